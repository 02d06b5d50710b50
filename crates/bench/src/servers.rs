//! Servers for a run: those that the environment names, or others that a script starts and stops again.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tokio_postgres::NoTls;

/// A server, and the URL by which a store is opened on it.
pub struct BenchServer {
    /// The URL.
    pub url: String,
    /// The script and the folder of a server that this run started.
    own: Option<(&'static str, tempfile::TempDir)>,
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(name)
}

/// Runs a script of the project and returns what it prints.
pub fn run_script(name: &str, arguments: &[&Path]) -> Result<String> {
    let ran = Command::new(script(name)).args(arguments).output()?;
    ensure!(ran.status.success(), "scripts/{name}: {}", String::from_utf8_lossy(&ran.stderr));
    Ok(String::from_utf8(ran.stdout)?)
}

impl BenchServer {
    /// PostgreSQL: the server that `STATEHOUSE_TEST_POSTGRES` names, or one that `scripts/postgres` starts.
    pub fn postgres() -> Result<BenchServer> {
        if let Ok(url) = std::env::var("STATEHOUSE_TEST_POSTGRES") {
            return Ok(BenchServer { url, own: None });
        }
        let (printed, folder) = BenchServer::start("postgres")?;
        let url = printed.lines().last().context("no URL was printed")?.to_owned();
        Ok(BenchServer { url, own: Some(("postgres", folder)) })
    }

    /// DynamoDB: the emulator that `STATEHOUSE_TEST_DYNAMODB` names, or one that `scripts/dynamodb` starts.
    pub fn dynamodb() -> Result<BenchServer> {
        const VARIABLE: &str = "STATEHOUSE_TEST_DYNAMODB";
        let (endpoint, own) = match std::env::var(VARIABLE) {
            Ok(endpoint) => (endpoint, None),
            Err(_) => {
                let (printed, folder) = BenchServer::start("dynamodb")?;
                let lead = format!("{VARIABLE}=");
                let endpoint = printed.lines().find_map(|line| line.strip_prefix(&lead));
                let endpoint = endpoint.context("no address was printed")?.to_owned();
                (endpoint, Some(("dynamodb", folder)))
            }
        };
        let url =
            format!("dynamodb://bench?credentials=emulator&request_timeout_ms=60000&endpoint={endpoint}");
        Ok(BenchServer { url, own })
    }

    /// SQLite: a file in a folder of its own. No server, and gone with this.
    pub fn sqlite() -> Result<BenchServer> {
        let folder = tempfile::tempdir()?;
        let url = format!("sqlite:{}", folder.path().join("house.db").display());
        Ok(BenchServer { url, own: Some(("", folder)) })
    }

    /// Lets PostgreSQL look at what its tables hold, as it does by itself within a minute or two. Until then it may take
    /// one index for another, and a short run would measure that.
    pub async fn settle(&self) -> Result<()> {
        if self.url.starts_with("postgres") {
            let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await?;
            tokio::spawn(connection);
            client.batch_execute("analyze").await?;
        }
        Ok(())
    }

    fn start(name: &'static str) -> Result<(String, tempfile::TempDir)> {
        let folder = tempfile::tempdir()?;
        let printed = run_script(name, &[Path::new("start"), folder.path()])?;
        Ok((printed, folder))
    }
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        if let Some((name, folder)) = self.own.as_ref().filter(|(name, _)| !name.is_empty()) {
            // The run is over; a server that does not stop is visible in the list of processes.
            let _ = run_script(name, &[Path::new("stop"), folder.path()]);
        }
    }
}
