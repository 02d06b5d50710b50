//! A server to test against, and a proxy before it that counts requests and does to them what networks and loaded
//! servers do and emulators do not.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_store::guard::column;
use statehouse_store::{
    Applied, Commit, Entry, EventTemplate, Guard, Migrate, Plan, Random, Record, Schema, Step, Store, Table,
    Tenant, Type,
};
use statehouse_store_dynamodb::{Credentials, DynamoOptions, DynamoStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The address of a server, from the environment. There is no test without one.
pub fn endpoint(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set; run `scripts/dynamodb start DIR` and set the variables that it prints")
    })
}

/// Options for a new, empty store on dynoxide, reached through this address.
pub fn options(endpoint: &str) -> DynamoOptions {
    let mut options = DynamoOptions::new(format!("test-{:x}", Random::from_entropy().below(1 << 48)));
    options.endpoint = Some(endpoint.to_owned());
    options.credentials = Credentials::Emulator;
    options.request_timeout = Duration::from_secs(20);
    // Requests are counted, and a slow machine must not add one.
    options.schema_lease = Duration::from_secs(3_600);
    options
}

/// Both servers: name, address, items in a transaction.
pub fn servers() -> [(&'static str, String, usize); 2] {
    [
        ("dynoxide", endpoint("STATEHOUSE_TEST_DYNAMODB"), 100),
        ("DynamoDB Local", endpoint("STATEHOUSE_TEST_DYNAMODB_LOCAL"), 10),
    ]
}

/// A table with something of most things.
pub fn seats() -> Arc<Table> {
    Table::named("seats")
        .partition("event", Type::Text)
        .sort("seat", Type::Int)
        .defaulted("status", Type::Text, "FREE")
        .optional("holder", Type::Text)
        .optional("sold", Type::Int)
        .optional("weight", Type::Float)
        .index("by_holder", &["holder"], &[])
        .build()
        .unwrap()
}

pub fn acme() -> Tenant {
    Tenant::new("acme").unwrap()
}

/// Opens a store and gives it tables.
pub async fn open(options: DynamoOptions, tables: &[&Arc<Table>]) -> DynamoStore {
    let store = DynamoStore::open(options).await.expect("the store opens");
    let schema = Schema::new(tables.iter().map(|table| (*table).clone())).unwrap();
    store.migrate(&schema, Migrate::Apply).await.expect("the tables are created");
    store
}

/// The steps that tests use most.
pub fn insert(table: &Arc<Table>, seat: i64) -> Step {
    Step::insert(table, ["show".into(), seat.into()])
}

pub fn hold(table: &Arc<Table>, seat: i64, holder: &str) -> Step {
    Step::update(table, ["show".into(), seat.into()])
        .guard(Guard::All(vec![column("status").eq("FREE")]))
        .set("status", "HELD")
        .set("holder", holder)
}

pub fn plan(operation: &str, steps: impl IntoIterator<Item = Step>) -> statehouse_store::plan::PlanBuilder {
    Plan::of(&acme(), operation).steps(steps)
}

pub fn entry(key: &str) -> Entry {
    Entry::about("seat", key).event(EventTemplate::named("seat.changed"))
}

/// Commits a plan that must be applied.
pub async fn apply(store: &DynamoStore, plan: statehouse_store::plan::PlanBuilder) -> Applied {
    let plan = plan.build().expect("a plan");
    match store.commit(&plan).await {
        Ok(Commit::Applied(applied)) => applied,
        other => panic!("{} was not applied: {other:?}", plan.operation()),
    }
}

/// All records of a partition.
pub async fn log(store: &DynamoStore, partition: u32) -> Vec<Record> {
    let mut records = Vec::new();
    loop {
        let after = records.len() as u64;
        let page = store.read_log(partition, after, 1_000).await.expect("the log");
        if page.records.is_empty() && page.head == after {
            return records;
        }
        for record in page.records {
            assert_eq!(record.position.map(|position| position.offset), Some(records.len() as u64 + 1));
            records.push(record);
        }
    }
}

/// Makes another answer of the request and the server's answer.
pub type Change = Box<dyn Fn(&Json, Json) -> Json + Send>;

/// What happens to a request.
pub enum ProxyAction {
    /// The server never sees it, and this is the answer: a status and a body.
    Answer(u16, Json),
    /// The server never sees it, and the connection is cut.
    Swallow,
    /// The server gets it, and the answer is lost with the connection.
    LoseAnswer,
    /// The server's answer to it is changed; the request is at hand.
    Change(Change),
    /// It goes through.
    Pass,
}

/// An error as DynamoDB answers it.
pub fn failure(code: &str) -> ProxyAction {
    let status = if code == "InternalServerError" { 500 } else { 400 };
    ProxyAction::Answer(
        status,
        json!({ "__type": format!("com.amazonaws.dynamodb.v20120810#{code}"), "message": "injected" }),
    )
}

/// A cancelled transaction with one reason for each of its items.
pub fn cancelled(codes: &[&str]) -> ProxyAction {
    let reasons: Vec<Json> = codes.iter().map(|code| json!({ "Code": code })).collect();
    let kind = "com.amazonaws.dynamodb.v20120810#TransactionCanceledException";
    ProxyAction::Answer(400, json!({ "__type": kind, "Message": "injected", "CancellationReasons": reasons }))
}

#[derive(Default)]
struct Script {
    seen: Vec<(String, Json)>,
    /// For requests of a name, in order; others pass.
    actions: VecDeque<(String, ProxyAction)>,
}

/// A proxy before a server.
#[derive(Clone)]
pub struct Proxy {
    pub endpoint: String,
    script: Arc<Mutex<Script>>,
}

impl Proxy {
    /// A proxy before the server at this address.
    pub async fn before(upstream: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let script: Arc<Mutex<Script>> = Arc::default();
        let upstream = upstream.trim_start_matches("http://").trim_end_matches('/').to_owned();
        let shared = script.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (upstream, script) = (upstream.clone(), shared.clone());
                tokio::spawn(async move { serve(client, upstream, script).await });
            }
        });
        Proxy { endpoint, script }
    }

    /// A proxy before dynoxide.
    pub async fn new() -> Proxy {
        Proxy::before(&endpoint("STATEHOUSE_TEST_DYNAMODB")).await
    }

    /// Does this to the next request of a name for which nothing else is planned before.
    pub fn plan(&self, request: &str, action: ProxyAction) {
        self.script.lock().unwrap().actions.push_back((request.to_owned(), action));
    }

    /// The requests since the last call, in order.
    pub fn take_requests(&self) -> Vec<(String, Json)> {
        std::mem::take(&mut self.script.lock().unwrap().seen)
    }

    /// Their names.
    pub fn names(&self) -> Vec<String> {
        self.take_requests().into_iter().map(|(name, _)| name).collect()
    }

    /// Whether everything that was planned has happened.
    pub fn is_done(&self) -> bool {
        self.script.lock().unwrap().actions.is_empty()
    }
}

/// One message: its first line, its headers and its body.
struct Message {
    first: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Message {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(header, _)| header.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    /// Reads a message; without a length it ends with the connection.
    async fn read(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Message> {
        let end = loop {
            if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break end;
            }
            if stream.read_buf(buffer).await.ok()? == 0 {
                return None;
            }
        };
        let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
        buffer.drain(..end + 4);
        let mut lines = head.split("\r\n");
        let first = lines.next()?.to_owned();
        let headers = lines.filter_map(|line| line.split_once(':'));
        let headers =
            headers.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect();
        let mut message = Message { first, headers, body: Vec::new() };
        match message.header("content-length").and_then(|length| length.parse::<usize>().ok()) {
            Some(length) => {
                while buffer.len() < length {
                    if stream.read_buf(buffer).await.ok()? == 0 {
                        return None;
                    }
                }
                message.body = buffer.drain(..length).collect();
            }
            None => {
                while stream.read_buf(buffer).await.ok()? > 0 {}
                message.body = std::mem::take(buffer);
            }
        }
        Some(message)
    }
}

async fn serve(mut client: TcpStream, upstream: String, script: Arc<Mutex<Script>>) -> Option<()> {
    client.set_nodelay(true).ok()?;
    let mut buffer = Vec::new();
    loop {
        let request = Message::read(&mut client, &mut buffer).await?;
        let name = request.header("x-amz-target")?.rsplit('.').next()?.to_owned();
        let body: Json = serde_json::from_slice(&request.body).ok()?;
        let action = {
            let mut script = script.lock().unwrap();
            script.seen.push((name.clone(), body.clone()));
            match script.actions.front() {
                Some((planned, _)) if *planned == name => {
                    script.actions.pop_front().map(|(_, action)| action)
                }
                _ => None,
            }
        };
        let (status, answer) = match action.unwrap_or(ProxyAction::Pass) {
            ProxyAction::Answer(status, answer) => (status, answer),
            ProxyAction::Swallow => return None,
            ProxyAction::LoseAnswer => {
                forward(&upstream, &request).await?;
                return None;
            }
            ProxyAction::Change(change) => {
                let (status, answer) = forward(&upstream, &request).await?;
                (status, if status == 200 { change(&body, answer) } else { answer })
            }
            ProxyAction::Pass => forward(&upstream, &request).await?,
        };
        let answer = answer.to_string();
        let head = format!(
            "HTTP/1.1 {status} X\r\nContent-Type: application/x-amz-json-1.0\r\nContent-Length: {}\r\n\r\n",
            answer.len()
        );
        client.write_all(&[head.as_bytes(), answer.as_bytes()].concat()).await.ok()?;
    }
}

/// Sends a request on, over a connection of its own.
async fn forward(upstream: &str, request: &Message) -> Option<(u16, Json)> {
    let mut server = TcpStream::connect(upstream).await.ok()?;
    server.set_nodelay(true).ok()?;
    let mut head = "POST / HTTP/1.0\r\n".to_owned();
    for (name, value) in &request.headers {
        if !["connection", "transfer-encoding"].iter().any(|other| name.eq_ignore_ascii_case(other)) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    head.push_str("\r\n");
    server.write_all(&[head.as_bytes(), &request.body].concat()).await.ok()?;
    let answer = Message::read(&mut server, &mut Vec::new()).await?;
    let status = answer.first.split(' ').nth(1)?.parse().ok()?;
    let body = if answer.body.is_empty() { json!({}) } else { serde_json::from_slice(&answer.body).ok()? };
    Some((status, body))
}
