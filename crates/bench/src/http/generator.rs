//! The load generator: a second process with many connections and as little work for each request as can be.
//!
//! It takes one order a line on its standard input and answers it with a line of figures. Requests are put together in a
//! buffer that is kept, answers are searched for the three things that matter: status, length and version. One thread
//! is enough for more requests than any server here answers.

use std::collections::HashMap;
use std::fmt;
use std::io::Write as _;
use std::process::Stdio;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value as Json};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock as _, SystemClock};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::{CONNECTIONS, ROWS_EACH};
use crate::load::{LoadRound, summed};

/// What makes this program a load generator.
pub const FLAG: &str = "--generate";

/// What is asked of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HttpLoad {
    /// Send JSON, get it back.
    Echo,
    /// Replace the fields of a row under the version that the last answer had.
    Update,
    /// Read a row that may come from memory.
    CachedRead,
}

impl fmt::Display for HttpLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HttpLoad::Echo => "echo",
            HttpLoad::Update => "update",
            HttpLoad::CachedRead => "read",
        })
    }
}

impl FromStr for HttpLoad {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<HttpLoad> {
        let all = [HttpLoad::Echo, HttpLoad::Update, HttpLoad::CachedRead];
        all.into_iter().find(|load| load.to_string() == text).context("no such load")
    }
}

/// The other process, as the one that measures sees it.
pub struct Generator {
    orders: ChildStdin,
    figures: BufReader<ChildStdout>,
    /// Ends the process when this is dropped.
    _process: Child,
}

impl Generator {
    /// Starts this program again.
    pub fn start() -> Result<Generator> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(FLAG).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn()?;
        let orders = process.stdin.take().context("the generator takes no orders")?;
        let figures = BufReader::new(process.stdout.take().context("the generator gives no figures")?);
        Ok(Generator { orders, figures, _process: process })
    }

    /// Puts one server under load for a while.
    pub async fn round(&mut self, load: HttpLoad, port: u16, span: Duration) -> Result<LoadRound> {
        self.orders.write_all(format!("{load} {port} {}\n", span.as_millis()).as_bytes()).await?;
        let mut line = String::new();
        self.figures.read_line(&mut line).await?;
        let figures: Vec<f64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [rate, p50, p99] = figures[..] else { bail!("the generator failed: {line:?}") };
        Ok(LoadRound {
            rate,
            p50: Duration::from_secs_f64(p50 / 1e6),
            p99: Duration::from_secs_f64(p99 / 1e6),
        })
    }
}

/// Takes orders until there are no more. This is the other process.
#[expect(clippy::print_stdout, reason = "standard output is how figures are handed over")]
pub fn serve() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut known: HashMap<(HttpLoad, u16), Vec<Connection>> = HashMap::new();
        let mut orders = BufReader::new(tokio::io::stdin()).lines();
        while let Some(order) = orders.next_line().await? {
            let words: Vec<&str> = order.split_whitespace().collect();
            let [load, port, millis] = words[..] else { bail!("not an order: {order}") };
            let (load, port, span) = (load.parse()?, port.parse()?, Duration::from_millis(millis.parse()?));
            let connections = match known.remove(&(load, port)) {
                Some(connections) => connections,
                None => connect(load, port).await?,
            };
            let (round, connections) = drive(connections, span).await?;
            known.insert((load, port), connections);
            println!("{} {} {}", round.rate, round.p50.as_micros(), round.p99.as_micros());
        }
        Ok(())
    })
}

async fn connect(load: HttpLoad, port: u16) -> Result<Vec<Connection>> {
    let mut connections = Vec::with_capacity(CONNECTIONS);
    for number in 0..CONNECTIONS {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        let (request, answer, body) = (Vec::with_capacity(1024), vec![0; 16 << 10], Vec::new());
        let versions = [1; ROWS_EACH];
        connections.push(Connection { stream, load, number, sent: 0, versions, request, answer, body });
    }
    Ok(connections)
}

async fn drive(connections: Vec<Connection>, span: Duration) -> Result<(LoadRound, Vec<Connection>)> {
    let stop = Arc::new(AtomicBool::new(false));
    let watch = Stopwatch::start();
    let tasks: Vec<_> = connections
        .into_iter()
        .map(|mut connection| {
            let stop = stop.clone();
            tokio::spawn(async move {
                let mut times = Vec::with_capacity(4096);
                while !stop.load(Ordering::Relaxed) {
                    let one = Stopwatch::start();
                    connection.exchange().await?;
                    times.push(one.elapsed());
                }
                anyhow::Ok((times, connection))
            })
        })
        .collect();
    SystemClock.sleep(span).await;
    stop.store(true, Ordering::Relaxed);
    let (mut times, mut connections) = (Vec::new(), Vec::new());
    for task in tasks {
        let (taken, connection) = task.await.context("a connection was cut short")??;
        times.extend(taken);
        connections.push(connection);
    }
    Ok((summed(times, watch.elapsed()), connections))
}

/// One connection, and the rows that are its own.
struct Connection {
    stream: TcpStream,
    load: HttpLoad,
    number: usize,
    sent: usize,
    /// The versions of its rows, as the last answers had them.
    versions: [i64; ROWS_EACH],
    request: Vec<u8>,
    answer: Vec<u8>,
    body: Vec<u8>,
}

/// The fields of a row, different for each number.
pub fn fields(number: usize) -> Map<String, Json> {
    let body: Json = serde_json::from_slice(&{
        let mut body = Vec::new();
        write_fields(&mut body, number);
        body
    })
    .unwrap_or_default();
    body.as_object().cloned().unwrap_or_default()
}

fn write_fields(body: &mut Vec<u8>, number: usize) {
    // Writing to memory does not fail.
    let _ = write!(
        body,
        "{{\"display_name\":\"a person {number:08}\",\"bio\":\"a few words about a person, as people write them\",\
         \"avatar_url\":\"https://images.example/{number:08}.png\",\"points\":{number}}}"
    );
}

const USUAL: &str = "host: 127.0.0.1\r\nuser-agent: generator\r\naccept: */*\r\n";

impl Connection {
    /// One request and its answer.
    async fn exchange(&mut self) -> Result<()> {
        self.sent += 1;
        let index = self.sent % ROWS_EACH;
        self.put_together(index);
        self.stream.write_all(&self.request).await?;
        let version = self.take_answer().await?;
        if self.load == HttpLoad::Update
            && let (Some(known), Some(version)) = (self.versions.get_mut(index), version)
        {
            ensure!(version == *known + 1, "the row is at version {version} after {known}");
            *known = version;
        }
        Ok(())
    }

    fn put_together(&mut self, index: usize) {
        self.request.clear();
        self.body.clear();
        let row = self.number * ROWS_EACH + index;
        let written = match self.load {
            HttpLoad::CachedRead => {
                let row = row + CONNECTIONS * ROWS_EACH;
                write!(self.request, "GET /v1/profile/{row}?consistency=cached HTTP/1.1\r\n{USUAL}\r\n")
            }
            HttpLoad::Echo => {
                write_fields(&mut self.body, self.sent);
                write!(
                    self.request,
                    "POST /echo HTTP/1.1\r\n{USUAL}content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                    self.body.len()
                )
            }
            HttpLoad::Update => {
                write_fields(&mut self.body, self.sent);
                let version = self.versions.get(index).copied().unwrap_or_default();
                write!(
                    self.request,
                    "PUT /v1/profile/{row} HTTP/1.1\r\n{USUAL}if-match: \"{version}\"\r\n\
                     content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                    self.body.len()
                )
            }
        };
        // Writing to memory does not fail.
        let _ = written;
        self.request.extend_from_slice(&self.body);
    }

    /// Reads one answer to its end and returns the version in it.
    async fn take_answer(&mut self) -> Result<Option<i64>> {
        let mut filled = 0;
        loop {
            let room = self.answer.get_mut(filled..).context("the answer is too long")?;
            let count = self.stream.read(room).await?;
            ensure!(count > 0, "the server closed the connection");
            filled += count;
            let so_far = self.answer.get(..filled).unwrap_or_default();
            let Some(end) = find(so_far, b"\r\n\r\n") else { continue };
            let head = so_far.get(..end).unwrap_or_default();
            ensure!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(so_far));
            let length = header(head, b"\r\ncontent-length: ").context("an answer without a length")?;
            if filled >= end + 4 + length as usize {
                return Ok(header(head, b"\r\netag: \""));
            }
        }
    }
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// The number that a header begins with.
fn header(head: &[u8], name: &[u8]) -> Option<i64> {
    let start = find(head, name)? + name.len();
    let digits = head.get(start..)?.iter().take_while(|byte| byte.is_ascii_digit());
    digits.map(|digit| i64::from(digit - b'0')).reduce(|number, digit| number * 10 + digit)
}
