//! The load: concurrent callers that each run one operation after another for a while.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock, SystemClock};

/// What one round measured.
#[derive(Clone, Copy, Debug)]
pub struct LoadRound {
    /// Operations per second, all callers together.
    pub rate: f64,
    /// Half of the operations took no longer than this.
    pub p50: Duration,
    /// All but one in a hundred took no longer than this.
    pub p99: Duration,
}

/// Runs `callers` callers for `span`. `call(caller, number)` is one operation.
pub async fn drive<F, W>(callers: u64, span: Duration, call: F) -> Result<LoadRound>
where
    F: Fn(u64, u64) -> W + Send + Sync + 'static,
    W: Future<Output = Result<()>> + Send,
{
    let (call, stop) = (Arc::new(call), Arc::new(AtomicBool::new(false)));
    let watch = Stopwatch::start();
    let tasks: Vec<_> = (0..callers)
        .map(|caller| {
            let (call, stop) = (call.clone(), stop.clone());
            tokio::spawn(async move {
                let mut times = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let one = Stopwatch::start();
                    call(caller, times.len() as u64).await?;
                    times.push(one.elapsed());
                }
                anyhow::Ok(times)
            })
        })
        .collect();
    SystemClock.sleep(span).await;
    stop.store(true, Ordering::Relaxed);
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.context("a caller was cut short")??);
    }
    Ok(summed(times, watch.elapsed()))
}

/// What a round measured, from the time that each operation took and the time of the whole.
pub fn summed(mut times: Vec<Duration>, elapsed: Duration) -> LoadRound {
    times.sort_unstable();
    let at = |share: f64| {
        let index = (times.len() as f64 * share) as usize;
        times.get(index).or(times.last()).copied().unwrap_or_default()
    };
    LoadRound { rate: times.len() as f64 / elapsed.as_secs_f64(), p50: at(0.5), p99: at(0.99) }
}

/// The round with the median rate.
pub fn median(rounds: &[LoadRound]) -> Result<LoadRound> {
    let mut rounds = rounds.to_vec();
    rounds.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    rounds.get(rounds.len() / 2).copied().context("no rounds were measured")
}

/// The median of the ratios of rounds that were measured side by side. What disturbs the machine for a while disturbs
/// both sides of a pair.
pub fn ratio(ours: &[LoadRound], reference: &[LoadRound]) -> Result<f64> {
    middle(&ours.iter().zip(reference).map(|(a, b)| a.rate / b.rate).collect::<Vec<f64>>())
}

/// The median of some figures.
pub fn middle(figures: &[f64]) -> Result<f64> {
    let mut figures = figures.to_vec();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().context("nothing was measured")
}

/// The most memory that this process has had resident, in bytes.
pub fn peak_resident_bytes() -> Option<u64> {
    memory("self", "VmHWM:")
}

/// The memory that a process has resident, in bytes.
pub fn resident_bytes(process: u32) -> Option<u64> {
    memory(&process.to_string(), "VmRSS:")
}

fn memory(process: &str, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with(name))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// The processor time that this process has used, in seconds.
pub fn processor_seconds() -> Option<f64> {
    /// What the kernel counts in, on every Linux that this runs on.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program stands in parentheses and may hold anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    Some(ticks.sum::<Result<f64, _>>().ok()? / TICKS_PER_SECOND)
}

/// How busy the machine is, as it says itself.
pub fn machine() -> Option<String> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    Some(load.split_whitespace().take(3).collect::<Vec<_>>().join(" "))
}
