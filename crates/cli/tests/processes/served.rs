//! Servers as processes, and a schema on PostgreSQL that they share.

use std::io::{BufRead as _, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value as Json;
use statehouse::{Blueprint, House};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Random, Record, Row, Scan, Tenant};
use tokio_postgres::NoTls;

/// The blueprint of a system.
pub fn system(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../systems").join(name).join("statehouse.toml")
}

/// Lets other processes get on.
pub fn pause(span: Duration) {
    std::thread::sleep(span);
}

/// Looks again and again until something is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..3_000 {
        if is_so() {
            return;
        }
        pause(Duration::from_millis(20));
    }
    panic!("it never was so: {what}")
}

/// A process that does not outlive its test.
pub struct Running(pub Child);

impl Running {
    /// `KILL`, `STOP` or `CONT`.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {}", self.0.id())]).status();
        assert!(sent.unwrap().success(), "{signal} was not sent");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// After how long without an answer a request counts as lost.
const PATIENCE: Duration = Duration::from_secs(120);

/// A `statehouse serve`.
pub struct Server {
    pub process: Running,
    pub address: String,
}

impl Server {
    pub fn start(blueprint: &Path, store: &str, folder: &Path, more: &[&str]) -> Server {
        let child = Command::new(env!("CARGO_BIN_EXE_statehouse"))
            .args(["serve", "--json", "--listen", "127.0.0.1:0", "--log", "warn", "--blueprint"])
            .arg(blueprint)
            .args(["--store", store])
            .args(more)
            .current_dir(folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut process = Running(child);
        let mut line = String::new();
        std::io::BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let greeting: Json = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        let address = greeting["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        Server { process, address }
    }

    /// One request: the status and the text of its answer, if there is one.
    pub fn asked(&self, method: &str, path: &str, body: &Json) -> std::io::Result<(u16, String)> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let broken = || std::io::Error::other(format!("half an answer: {answer:?}"));
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(broken)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(broken)?;
        Ok((status, body.to_owned()))
    }

    /// The same, of a server that lives.
    pub fn ask(&self, method: &str, path: &str, body: &Json) -> (u16, Json) {
        let (status, text) = self.asked(method, path, body).unwrap();
        (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}")))
    }

    /// One request that has to be done.
    pub fn send(&self, method: &str, path: &str, body: &Json) -> Json {
        let (status, answer) = self.ask(method, path, body);
        assert!((200..300).contains(&status), "{method} {path} {body}: {status} {answer}");
        answer
    }

    /// How many shards of a worker this process has, as it says itself.
    pub fn shards_of(&self, worker: &str) -> u32 {
        let (_, metrics) = self.asked("GET", "/metrics", &Json::Null).unwrap();
        let lead = format!("statehouse_worker_shards{{worker=\"{worker}\"}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&lead));
        line.and_then(|figure| figure.parse().ok()).unwrap_or(0)
    }
}

/// A schema of its own on the PostgreSQL server, gone with this.
pub struct Namespace {
    server: String,
    schema: String,
    role: Option<String>,
}

fn postgres() -> String {
    let advice = "STATEHOUSE_TEST_POSTGRES has to hold the URL that `scripts/postgres start DIR` prints";
    std::env::var("STATEHOUSE_TEST_POSTGRES").expect(advice)
}

/// Runs something asynchronous, whether or not the caller is.
fn block_on<T: Send>(work: impl Future<Output = T> + Send) -> T {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::scope(|scope| scope.spawn(|| runtime().block_on(work)).join().unwrap())
}

async fn execute(server: &str, sql: &str) -> Result<(), tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(server, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute(sql).await
}

impl Namespace {
    pub fn new() -> Namespace {
        let schema = format!("processes_{:x}", Random::from_entropy().below(1 << 48));
        Namespace { server: postgres(), schema, role: None }
    }

    /// One in which the server keeps tenants apart, under a role that owns nothing.
    pub fn kept_apart() -> Namespace {
        let mut namespace = Namespace::new();
        let role = format!("role_of_{}", namespace.schema);
        block_on(execute(&namespace.server, &format!("create role {role}"))).unwrap();
        namespace.role = Some(role);
        namespace
    }

    /// The store's URL.
    pub fn url(&self) -> String {
        let between = if self.server.contains('?') { '&' } else { '?' };
        let role = self.role.as_ref().map(|role| format!("&rls=on&role={role}")).unwrap_or_default();
        format!("{}{between}schema={}{role}", self.server, self.schema)
    }

    /// Every row of a table of a tenant, and every record of the log, as they are stored.
    pub fn stored(&self, blueprint: &Path, table: &str) -> (Vec<Row>, Vec<Record>) {
        let text = std::fs::read_to_string(blueprint).unwrap();
        let blueprint = Blueprint::read("statehouse.toml", &text).unwrap();
        block_on(async {
            let house = Arc::new(House::open_as_it_is(&self.url(), &blueprint).await.unwrap());
            let table = house.schema().table(table).unwrap();
            let mut scan = Scan::of(table, &Tenant::new("default").unwrap());
            let mut rows = Vec::new();
            loop {
                let page = house.store().scan(&scan).await.unwrap();
                rows.extend(page.rows);
                let Some(next) = page.next else { break };
                scan = scan.after(next).unwrap();
            }
            let mut records = Vec::new();
            for partition in 0..house.store().partitions() {
                let mut after = 0;
                loop {
                    let page = house.store().read_log(partition, after, PAGE_MAX).await.unwrap();
                    let Some(last) = page.records.last().and_then(|record| record.position) else { break };
                    after = last.offset;
                    records.extend(page.records);
                }
            }
            house.store().close().await;
            (rows, records)
        })
    }
}

/// How often each key has an event of this name.
pub fn counted<'r>(records: &'r [Record], name: &str) -> std::collections::BTreeMap<&'r str, usize> {
    let mut counts = std::collections::BTreeMap::new();
    for record in records {
        for event in record.events.iter().filter(|event| event.name == name) {
            let (_, key) = statehouse::house::subject_of(record, event).unwrap();
            *counts.entry(key).or_default() += 1;
        }
    }
    counts
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let role = self.role.as_ref().map(|role| format!("; drop owned by {role}; drop role {role}"));
        let sql = format!("drop schema if exists {} cascade{}", self.schema, role.unwrap_or_default());
        // A schema that stays behind is harmless.
        let _ = block_on(execute(&self.server, &sql));
    }
}
