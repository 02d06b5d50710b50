//! The job queues that others have made, in a Node process of their own (`rivals/queues.mjs`).

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value as Json, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::load::LoadRound;
use crate::servers::run_script;

/// One of the other queues, by the name of its package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rival {
    /// With its local queue, and completions in batches.
    GraphileWorker,
    /// With fetches and completions in batches.
    PgBoss,
}

impl Rival {
    /// The name of its package.
    pub fn name(self) -> &'static str {
        match self {
            Rival::GraphileWorker => "graphile-worker",
            Rival::PgBoss => "pg-boss",
        }
    }
}

/// The other process.
pub struct Rivals {
    process: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Rivals {
    /// Installs what is missing, and starts the process on the same server.
    pub async fn start(url: &str) -> Result<Rivals> {
        let folder = run_script("rivals", &[])?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("rivals/queues.mjs");
        let mut command = Command::new("node");
        command.arg(script).arg(url).arg(folder.trim());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().context("node is needed for the queues to compare with")?;
        let orders = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().context("the process says nothing")?).lines();
        let mut rivals = Rivals { process, orders, answers };
        rivals.answer().await?;
        Ok(rivals)
    }

    async fn answer(&mut self) -> Result<Json> {
        let line = self.answers.next_line().await?.context("the other queues' process ended")?;
        Ok(serde_json::from_str(&line)?)
    }

    async fn order(&mut self, order: &Json) -> Result<Json> {
        let orders = self.orders.as_mut().context("the process takes no orders")?;
        orders.write_all(format!("{order}\n").as_bytes()).await?;
        self.answer().await
    }

    /// Callers that each enqueue one job after another, for a while.
    pub async fn enqueue(&mut self, rival: Rival, callers: u64, span: Duration) -> Result<LoadRound> {
        let millis = u64::try_from(span.as_millis())?;
        let order = json!({"do": "enqueue", "queue": rival.name(), "callers": callers, "millis": millis});
        let answer = self.order(&order).await?;
        let figure = |name: &str| answer.get(name).and_then(Json::as_f64).context("a figure is missing");
        let span = |name: &str| figure(name).map(Duration::from_secs_f64);
        Ok(LoadRound { rate: figure("rate")?, p50: span("p50")?, p99: span("p99")? })
    }

    /// How long it takes to do so many jobs, with nothing to do for each, in seconds.
    pub async fn drain(&mut self, rival: Rival, jobs: usize) -> Result<f64> {
        self.seconds("drain", rival, jobs).await
    }

    /// The same for pg-boss's own workers.
    pub async fn work(&mut self, jobs: usize) -> Result<f64> {
        self.seconds("work", Rival::PgBoss, jobs).await
    }

    async fn seconds(&mut self, what: &str, rival: Rival, jobs: usize) -> Result<f64> {
        let answer = self.order(&json!({"do": what, "queue": rival.name(), "jobs": jobs})).await?;
        answer.get("seconds").and_then(Json::as_f64).context("the figure is missing")
    }

    /// Lets it take its schemas away, and waits for its end.
    pub async fn stop(mut self) -> Result<()> {
        drop(self.orders.take());
        self.process.wait().await?;
        Ok(())
    }
}
