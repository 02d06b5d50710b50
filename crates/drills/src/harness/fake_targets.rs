//! The outside of a house in a drill: a courier that follows a script, and a real server on this machine.
//!
//! The script knows more than any courier can: whether the target acted on a request, also where the house is not told.
//! So a case can hold what the house says against what happened.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use async_trait::async_trait;
use statehouse::egress::{Egress, Environment, OutboundRequest, SendOutcome, TargetResponse, Transport};
use statehouse_store::Clock;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What a target does with a request.
#[derive(Clone, Debug)]
pub enum TargetBehavior {
    /// It answers. An answer of success means that it has acted, unless it has acted on this key before.
    Answers(TargetResponse),
    /// It acts, and the answer is lost.
    Loses,
    /// Nothing arrives, and the outcome is unknown.
    Swallows,
    /// It cannot be reached.
    Unreachable,
    /// It acts, and answers with success once the door is opened.
    Holds(Latch),
}

impl TargetBehavior {
    /// It answers with this status.
    pub fn status(status: u16) -> TargetBehavior {
        TargetBehavior::Answers(TargetResponse { status, complete: true, ..TargetResponse::default() })
    }

    /// It answers with this status and body.
    pub fn body(status: u16, body: &str) -> TargetBehavior {
        TargetBehavior::Answers(TargetResponse {
            status,
            body: body.as_bytes().to_vec(),
            complete: true,
            retry_after: None,
        })
    }
}

/// Something that is closed until it is opened. Clones are one door.
#[derive(Clone, Debug)]
pub struct Latch(watch::Sender<bool>);

impl Default for Latch {
    fn default() -> Latch {
        Latch(watch::Sender::new(false))
    }
}

impl Latch {
    /// Opens it.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    async fn passed(&self) {
        // The sender lives as long as `self`.
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

/// Decides what a target does: from the request and how many came before it.
type TargetScript = Box<dyn Fn(&OutboundRequest, usize) -> TargetBehavior + Send + Sync>;

/// A courier to targets that follow a script.
pub struct FakeTargets {
    script: TargetScript,
    seen: Mutex<TargetRecord>,
    arrived: watch::Sender<usize>,
}

#[derive(Default)]
struct TargetRecord {
    outbounds: Vec<OutboundRequest>,
    /// How often a target acted, by the key of the request.
    acted: BTreeMap<String, usize>,
    in_flight: usize,
    most_in_flight: usize,
}

impl fmt::Debug for FakeTargets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Script")
    }
}

impl FakeTargets {
    /// Targets that do what the script says.
    pub fn of(
        script: impl Fn(&OutboundRequest, usize) -> TargetBehavior + Send + Sync + 'static,
    ) -> Arc<FakeTargets> {
        Arc::new(FakeTargets {
            script: Box::new(script),
            seen: Mutex::default(),
            arrived: watch::Sender::new(0),
        })
    }

    /// Targets that do what the script says, from the request and how many came before it under the same key.
    pub fn by_key(
        script: impl Fn(&OutboundRequest, usize) -> TargetBehavior + Send + Sync + 'static,
    ) -> Arc<FakeTargets> {
        let counts: Mutex<BTreeMap<String, usize>> = Mutex::default();
        FakeTargets::of(move |outbound, _| {
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            let count = counts.entry(key_of(outbound)).or_default();
            *count += 1;
            script(outbound, *count - 1)
        })
    }

    /// An outside that is this script, with these secrets.
    pub fn egress(self: &Arc<FakeTargets>, secrets: &[(&str, &str)]) -> Egress {
        let transport: Arc<dyn Transport> = self.clone();
        Egress {
            transport: Some(transport),
            environment: Arc::new(TestSecrets::of(secrets)),
            ..Egress::default()
        }
    }

    fn seen(&self) -> MutexGuard<'_, TargetRecord> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every request that came, in order.
    pub fn outbounds(&self) -> Vec<OutboundRequest> {
        self.seen().outbounds.clone()
    }

    /// How many requests came for a host.
    pub fn count(&self, host: &str) -> usize {
        self.seen().outbounds.iter().filter(|outbound| outbound.url.host() == Some(host)).count()
    }

    /// How often a target acted, by key.
    pub fn acted(&self) -> BTreeMap<String, usize> {
        self.seen().acted.clone()
    }

    /// The most requests that were under way at once.
    pub fn most_in_flight(&self) -> usize {
        self.seen().most_in_flight
    }

    /// Returns when so many requests have come.
    pub async fn arrived(&self, count: usize) {
        // The sender lives as long as `self`.
        let _ = self.arrived.subscribe().wait_for(|arrived| *arrived >= count).await;
    }

    fn enter(&self, outbound: &OutboundRequest) -> TargetBehavior {
        let mut seen = self.seen();
        let play = (self.script)(outbound, seen.outbounds.len());
        seen.outbounds.push(outbound.clone());
        seen.in_flight += 1;
        seen.most_in_flight = seen.most_in_flight.max(seen.in_flight);
        let acts = match &play {
            TargetBehavior::Answers(reply) => (200..300).contains(&reply.status) && outbound.method != "GET",
            TargetBehavior::Loses | TargetBehavior::Holds(_) => true,
            TargetBehavior::Swallows | TargetBehavior::Unreachable => false,
        };
        if acts {
            *seen.acted.entry(key_of(outbound)).or_default() += 1;
        }
        drop(seen);
        self.arrived.send_modify(|arrived| *arrived += 1);
        play
    }
}

/// The idempotency key of a request.
pub fn key_of(outbound: &OutboundRequest) -> String {
    header(outbound, "idempotency-key").unwrap_or_default()
}

/// A header of a request.
pub fn header(outbound: &OutboundRequest, name: &str) -> Option<String> {
    Some(outbound.headers.get(name)?.to_str().ok()?.to_owned())
}

#[async_trait]
impl Transport for FakeTargets {
    async fn send(&self, outbound: &OutboundRequest, _: &dyn Clock) -> SendOutcome {
        let play = self.enter(outbound);
        // Others have their turn: what runs together shows.
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        let sent = match play {
            TargetBehavior::Answers(reply) => SendOutcome::Answered(reply),
            TargetBehavior::Loses | TargetBehavior::Swallows => {
                SendOutcome::Unknown { why: "the connection was cut".into() }
            }
            TargetBehavior::Unreachable => SendOutcome::NotSent { why: "nobody listens there".into() },
            TargetBehavior::Holds(door) => {
                door.passed().await;
                SendOutcome::Answered(TargetResponse {
                    status: 200,
                    complete: true,
                    ..TargetResponse::default()
                })
            }
        };
        self.seen().in_flight -= 1;
        sent
    }
}

/// An environment with these secrets, which can be changed.
#[derive(Debug, Default)]
pub struct TestSecrets(Mutex<BTreeMap<String, String>>);

impl TestSecrets {
    /// These ones.
    pub fn of(secrets: &[(&str, &str)]) -> TestSecrets {
        let owned = secrets.iter().map(|(name, secret)| ((*name).to_owned(), (*secret).to_owned()));
        TestSecrets(Mutex::new(owned.collect()))
    }

    /// Sets one, or takes it away.
    pub fn set(&self, name: &str, secret: Option<&str>) {
        let mut secrets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match secret {
            Some(secret) => drop(secrets.insert(name.to_owned(), secret.to_owned())),
            None => drop(secrets.remove(name)),
        }
    }
}

#[async_trait]
impl Environment for TestSecrets {
    async fn read(&self, name: &str) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}

/// A request as a real server got it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// `POST /charges HTTP/1.1`.
    pub line: String,
    /// Headers by their names in lower case.
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: Vec<u8>,
}

/// What a real server does with a request.
#[derive(Clone, Debug)]
pub enum ServerReaction {
    /// Writes these bytes and closes.
    Writes(Vec<u8>),
    /// Writes these bytes and keeps the connection open without another word.
    Stalls(Vec<u8>),
}

impl ServerReaction {
    /// An answer with a status, headers and a body.
    pub fn answer(status: u16, headers: &[(&str, &str)], body: &[u8]) -> ServerReaction {
        let mut head = format!("HTTP/1.1 {status} Status\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        ServerReaction::Writes([head.as_bytes(), b"\r\n", body].concat())
    }
}

type React = dyn Fn(&ReceivedRequest, usize) -> ServerReaction + Send + Sync;

/// A real server on this machine, until it is dropped.
pub struct TestHttpServer {
    /// Where it listens.
    pub address: SocketAddr,
    got: Arc<Mutex<Vec<ReceivedRequest>>>,
    task: tokio::task::JoinHandle<()>,
}

impl TestHttpServer {
    /// Listens, and reacts to each request by what it is and how many came before it.
    pub async fn open(
        react: impl Fn(&ReceivedRequest, usize) -> ServerReaction + Send + Sync + 'static,
    ) -> Result<TestHttpServer> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("no port to listen on")?;
        let address = listener.local_addr()?;
        let got: Arc<Mutex<Vec<ReceivedRequest>>> = Arc::default();
        let (seen, react): (_, Arc<React>) = (got.clone(), Arc::new(react));
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, seen.clone(), react.clone()));
            }
        });
        Ok(TestHttpServer { address, got, task })
    }

    /// Every request that came, in order.
    pub fn got(&self) -> Vec<ReceivedRequest> {
        self.got.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The idempotency keys of the requests that came.
    pub fn keys(&self) -> BTreeSet<String> {
        self.got().iter().filter_map(|got| got.headers.get("idempotency-key").cloned()).collect()
    }
}

impl Drop for TestHttpServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, got: Arc<Mutex<Vec<ReceivedRequest>>>, react: Arc<React>) {
    let Some(request) = read_request(&mut stream).await else { return };
    let reaction = {
        let mut got = got.lock().unwrap_or_else(PoisonError::into_inner);
        let reaction = react(&request, got.len());
        got.push(request);
        reaction
    };
    match reaction {
        ServerReaction::Writes(bytes) => {
            let _ = stream.write_all(&bytes).await;
            let _ = stream.shutdown().await;
        }
        ServerReaction::Stalls(bytes) => {
            let _ = stream.write_all(&bytes).await;
            std::future::pending::<()>().await;
        }
    }
}

async fn read_request(stream: &mut TcpStream) -> Option<ReceivedRequest> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(bytes.get(..end)?).into_owned();
    let mut lines = head.split("\r\n");
    let line = lines.next()?.to_owned();
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length: usize = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = bytes.split_off(end + 4);
    while body.len() < length {
        if stream.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    Some(ReceivedRequest { line, headers, body })
}
