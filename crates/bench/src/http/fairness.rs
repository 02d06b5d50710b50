//! Fairness: how much longer a tenant's update takes while another tenant floods the server.
//!
//! The flood is a number of connections that each send one update after another. The other tenant has one connection. Either is
//! a process of its own, which is this benchmark started again, so neither waits in the other's run queue, nor in that of the
//! server. They share the machine's cores with the server, so a part of the difference is the processor, not the queue.
//!
//! Three servers take turns, round by round: one with the default settings, one in which a tenant may use all slots at any time, and
//! one without a queue. The ratio of a round is that of two spans that follow each other.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use statehouse::{Blueprint, House};
use statehouse_server::{Config, Server};
use statehouse_store::{Clock as _, SystemClock};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::Mutex;

use super::BLUEPRINT;
use crate::load::{LoadRound, drive, median, middle};
use crate::report;

/// Connections of the tenant that floods.
const FLOOD: u64 = 512;
const ROUNDS: usize = 5;
const SPAN: Duration = Duration::from_secs(2);
/// The flood is at its height before the other tenant is measured, and until it was.
const LEAD: Duration = Duration::from_millis(1_500);

/// Measures and prints.
pub async fn run() -> Result<()> {
    report::heading(&format!("Fairness: one tenant floods with {FLOOD} connections, SQLite"));
    let mut greedy = Config::default();
    greedy.limits.tenant_concurrent_writes = usize::MAX;
    let mut open = greedy.clone();
    open.limits.concurrent_writes = usize::MAX;
    let mut settings = [
        Setting::start("default", Config::default()).await?,
        Setting::start("a tenant may use all slots", greedy).await?,
        Setting::start("no queue", open).await?,
    ];
    for _ in 0..ROUNDS {
        for setting in &mut settings {
            setting.round().await?;
        }
    }
    for setting in &settings {
        setting.report()?;
    }
    Ok(())
}

/// One server, and what was measured of it.
struct Setting {
    name: &'static str,
    port: u16,
    _folder: tempfile::TempDir,
    alone: Vec<LoadRound>,
    flooded: Vec<LoadRound>,
    flood: Vec<LoadRound>,
}

impl Setting {
    async fn start(name: &'static str, config: Config) -> Result<Setting> {
        let folder = tempfile::tempdir()?;
        let port = serve(folder.path(), config).await?;
        let (alone, flooded, flood) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Setting { name, port, _folder: folder, alone, flooded, flood })
    }

    async fn round(&mut self) -> Result<()> {
        self.alone.push(load(self.port, "quiet", 1, SPAN).await?);
        let flooding = tokio::spawn(load(self.port, "flood", FLOOD, SPAN + LEAD + LEAD));
        SystemClock.sleep(LEAD).await;
        self.flooded.push(load(self.port, "quiet", 1, SPAN).await?);
        self.flood.push(flooding.await??);
        Ok(())
    }

    fn report(&self) -> Result<()> {
        report::line(&format!("  {}", self.name));
        report::measured("  update, alone", median(&self.alone)?);
        report::measured("  update, while another tenant floods", median(&self.flooded)?);
        report::measured("  update of the tenant that floods", median(&self.flood)?);
        let rounds = self.flooded.iter().zip(&self.alone);
        let grown: Vec<f64> =
            rounds.map(|(flooded, alone)| flooded.p50.as_secs_f64() / alone.p50.as_secs_f64()).collect();
        report::compared("  p50 while flooded / alone (wanted at most 3)", middle(&grown)?);
        Ok(())
    }
}

/// The load of one tenant, by a process of its own.
async fn load(port: u16, tenant: &'static str, connections: u64, span: Duration) -> Result<LoadRound> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--fairness", tenant, &port.to_string(), &connections.to_string()])
        .arg(span.as_millis().to_string())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await?;
    ensure!(output.status.success(), "the load of {tenant} ended with {}", output.status);
    let text = String::from_utf8(output.stdout)?;
    let figures: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [rate, p50, p99] = figures[..] else { anyhow::bail!("the load of {tenant} printed {text:?}") };
    Ok(LoadRound { rate, p50: Duration::from_secs_f64(p50), p99: Duration::from_secs_f64(p99) })
}

/// What the process of one tenant does: it prints the rate, and p50 and p99 in seconds.
pub fn generate(tenant: &str, port: &str, connections: &str, millis: &str) -> Result<()> {
    let (port, connections, millis): (u16, u64, u64) = (port.parse()?, connections.parse()?, millis.parse()?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let round = runtime.block_on(async {
        let mut clients = Vec::new();
        for row in 0..connections {
            clients.push(Mutex::new(Client::connect(port, tenant, row).await?));
        }
        let clients = Arc::new(clients);
        drive(connections, Duration::from_millis(millis), move |caller, _| {
            let clients = clients.clone();
            async move {
                let client = clients.get(usize::try_from(caller)?).context("no such connection")?;
                client.lock().await.update().await
            }
        })
        .await
    })?;
    report::line(&format!("{} {} {}", round.rate, round.p50.as_secs_f64(), round.p99.as_secs_f64()));
    Ok(())
}

async fn serve(folder: &Path, config: Config) -> Result<u16> {
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
    let url = format!("sqlite:{}", folder.join("house.db").display());
    let house = Arc::new(House::open(&url, &blueprint).await?);
    let server = Server::new(house, config).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move { server.serve(listener, std::future::pending()).await });
    Ok(port)
}

/// A connection of a tenant that changes a row of its own.
struct Client {
    stream: TcpStream,
    update: Vec<u8>,
    answer: Vec<u8>,
}

impl Client {
    async fn connect(port: u16, tenant: &str, row: u64) -> Result<Client> {
        let mut fields = super::generator::fields(0);
        fields.insert("user_id".into(), row.into());
        let request = |path: &str, body: &str| {
            format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\nstatehouse-tenant: {tenant}\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
        };
        let create = request("/v1/profile", &serde_json::Value::from(fields).to_string());
        let update = request(&format!("/v1/profile/{row}/mutate"), r#"{"increment": {"points": 1}}"#);
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        let mut client = Client { stream, update: update.into_bytes(), answer: vec![0; 16 << 10] };
        // The row is there already, except in the first round.
        client.exchange(create.into_bytes(), &["201", "409"]).await?;
        Ok(client)
    }

    async fn update(&mut self) -> Result<()> {
        let update = std::mem::take(&mut self.update);
        let done = self.exchange(update.clone(), &["200"]).await;
        self.update = update;
        done
    }

    async fn exchange(&mut self, request: Vec<u8>, expected: &[&str]) -> Result<()> {
        self.stream.write_all(&request).await?;
        let mut filled = 0;
        loop {
            let free = self.answer.get_mut(filled..).context("the answer is too long")?;
            let count = self.stream.read(free).await?;
            ensure!(count > 0, "the connection was closed");
            filled += count;
            let answer = String::from_utf8_lossy(self.answer.get(..filled).unwrap_or_default());
            let Some((head, body)) = answer.split_once("\r\n\r\n") else { continue };
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.context("an answer without a length")?.parse()?;
            if body.len() >= length {
                let is_expected =
                    expected.iter().any(|status| head.starts_with(&format!("HTTP/1.1 {status}")));
                ensure!(is_expected, "{answer}");
                return Ok(());
            }
        }
    }
}
