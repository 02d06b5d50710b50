//! The signals that ask a process to end.

use std::future::Future;

/// Ready when the process is asked to end: by Ctrl-C, by SIGTERM, or because its terminal is closed (SIGHUP). Signals are
/// listened for from the call on, and not only from the first look at the future.
#[cfg(unix)]
pub(crate) fn stop_requested() -> impl Future<Output = ()> + Send + 'static {
    use tokio::signal::unix::{Signal, SignalKind, signal};
    // Without a handler the signal ends the process by itself.
    let interrupted = signal(SignalKind::interrupt()).ok();
    let terminated = signal(SignalKind::terminate()).ok();
    // A program that is started with `nohup` outlives its terminal.
    let hung_up = if hangup_is_ignored() { None } else { signal(SignalKind::hangup()).ok() };
    async fn received(signal: Option<Signal>) {
        match signal {
            Some(mut signal) => drop(signal.recv().await),
            None => std::future::pending().await,
        }
    }
    async move {
        tokio::select! {
            () = received(interrupted) => {}
            () = received(terminated) => {}
            () = received(hung_up) => {}
        }
    }
}

/// Ready when the process is asked to end, by Ctrl-C.
#[cfg(not(unix))]
pub(crate) fn stop_requested() -> impl Future<Output = ()> + Send + 'static {
    async {
        // Without a handler the signal ends the process by itself.
        let _ = tokio::signal::ctrl_c().await;
    }
}

/// Whether the process was started with SIGHUP ignored. Where the system does not say, it was not.
#[cfg(unix)]
fn hangup_is_ignored() -> bool {
    const HANGUP: u64 = 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & HANGUP != 0)
}
