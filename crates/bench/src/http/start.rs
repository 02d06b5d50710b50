//! How long a server takes to be ready on an empty folder, and how much memory it uses without requests.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use statehouse::{Blueprint, House};
use statehouse_server::{Config, Server, logs};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock as _, SystemClock};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use super::BLUEPRINT;
use crate::{load, report};

/// What makes this program a server, for want of the real one.
pub const FLAG: &str = "--serve";
/// Names the binary to start, if it is not beside this one.
const BINARY: &str = "STATEHOUSE_BINARY";
const STARTS: usize = 7;
/// How long the server is left alone before its memory is read.
const REST: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(20);

/// Measures and prints.
pub async fn run() -> Result<()> {
    let (mut times, mut resident) = (Vec::new(), Vec::new());
    let binary = binary().await;
    for _ in 0..STARTS {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("statehouse.toml"), BLUEPRINT)?;
        let port = free_port().await?;
        let mut command = command(binary.as_deref(), folder.path(), port)?;
        let watch = Stopwatch::start();
        let mut process = command.kill_on_drop(true).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        while !is_ready(port).await {
            ensure!(watch.elapsed() < PATIENCE, "the server is not ready after {PATIENCE:?}");
            ensure!(process.try_wait()?.is_none(), "the server ended");
            SystemClock.sleep(Duration::from_millis(1)).await;
        }
        times.push(watch.elapsed().as_secs_f64());
        if resident.is_empty() {
            SystemClock.sleep(REST).await;
            let id = process.id().context("the server has no process id")?;
            resident.extend(load::resident_bytes(id));
        }
        process.kill().await?;
    }
    let what = binary.map_or("the library's server".into(), |path| path.display().to_string());
    report::heading(&format!("HTTP: {what}, on an empty folder"));
    report::bounded("from start to ready", load::middle(&times)? * 1e3, "ms", 300.0);
    for bytes in resident {
        report::bounded("resident memory, idle", bytes as f64 / 1e6, "MB", 60.0);
    }
    Ok(())
}

/// The real binary, if it is there and can serve.
async fn binary() -> Option<PathBuf> {
    let named = std::env::var_os(BINARY).map(PathBuf::from);
    let beside = std::env::current_exe().ok()?.parent()?.parent()?.join("statehouse");
    let path = named.unwrap_or(beside);
    let mut command = Command::new(&path);
    let asked = command.args(["serve", "--help"]).stdout(Stdio::null()).stderr(Stdio::null()).status().await;
    asked.is_ok_and(|status| status.success()).then_some(path)
}

fn command(binary: Option<&Path>, folder: &Path, port: u16) -> Result<Command> {
    let address = format!("127.0.0.1:{port}");
    let mut command = match binary {
        Some(binary) => {
            let mut command = Command::new(binary);
            let store = format!("sqlite:{}", folder.join("house.db").display());
            command.args(["serve", "--listen", &address, "--store", &store, "--blueprint"]);
            command.arg(folder.join("statehouse.toml"));
            command
        }
        None => {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg(FLAG).arg(folder).arg(&address);
            command
        }
    };
    command.current_dir(folder).stderr(Stdio::null());
    Ok(command)
}

async fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port())
}

async fn is_ready(port: u16) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer.starts_with(b"HTTP/1.1 200"))
    };
    asked.await.unwrap_or(false)
}

/// Serves a folder until it is killed. This is the other process.
pub fn serve(folder: &Path, address: &str) -> Result<()> {
    let _logs = logs::start(logs::LogOptions::default(), std::io::stderr())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
        let url = format!("sqlite:{}", folder.join("house.db").display());
        let house = Arc::new(House::open(&url, &blueprint).await?);
        let server = Server::new(house, Config::default()).await?;
        server.serve(TcpListener::bind(address).await?, std::future::pending()).await?;
        Ok(())
    })
}
