//! A proxy that understands just enough of the protocol to cut a connection at a commit.
//!
//! It can also stand for a pooler, which refuses clients that ask for settings of the connection.
//!
//! A commit is the word, or the execution of a statement that writes and is a transaction by itself: those of the store
//! begin by setting their scope.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use statehouse_store::Random;
use statehouse_store_postgres::{Encryption, PostgresOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::support::url;

/// When a connection is cut.
#[derive(Clone, Debug)]
pub enum Cut {
    Never,
    /// At the next commit, before the server hears of it.
    BeforeCommit,
    /// At the next commit, when the server has done it and before the client hears of it.
    AfterCommit,
    /// The same, but the client gets to hear what a pooler says that has lost the server.
    Disowned,
    /// Again and again, at commits and elsewhere.
    AtRandom(Random),
    /// At the start, if it asks for settings.
    Settings,
    /// From the next commit on nothing that the server says gets through, and no connection ends.
    Silence,
}

/// What was achieved.
#[derive(Debug, Default)]
pub struct Achieved {
    pub before: AtomicU64,
    pub after: AtomicU64,
    pub elsewhere: AtomicU64,
}

pub struct Proxy {
    address: SocketAddr,
    /// Counts up whenever all connections are to end.
    ended: watch::Sender<u64>,
    cut: Arc<Mutex<Cut>>,
    pub achieved: Arc<Achieved>,
}

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Pass,
    Before,
    /// The client gets these last words.
    After(&'static [u8]),
}

/// No last words, and no end.
const SILENCE: &[u8] = b"silence";

/// PgBouncer's last words. Where a server says how severe an error is in every language's word and in one for
/// programs, it has the first only.
const LOST: &[u8] = b"E\0\0\0\x29SFATAL\0C08P01\0Mserver conn crashed?\0\0";

impl Proxy {
    pub async fn start() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cut, achieved) = (Arc::new(Mutex::new(Cut::Never)), Arc::new(Achieved::default()));
        let target = target();
        let ended = watch::Sender::new(0);
        tokio::spawn({
            let (cut, achieved, ended) = (cut.clone(), achieved.clone(), ended.clone());
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    let (cut, achieved, target) = (cut.clone(), achieved.clone(), target.clone());
                    let mut ended = ended.subscribe();
                    tokio::spawn(async move {
                        let Ok(server) = TcpStream::connect(target).await else { return };
                        tokio::select! {
                            () = carry(client, server, cut, achieved) => {}
                            _ = ended.changed() => {}
                        }
                    });
                }
            }
        });
        Proxy { address, ended, cut, achieved }
    }

    /// Ends all connections that there are.
    pub fn cut_all(&self) {
        self.ended.send_modify(|times| *times += 1);
    }

    pub fn set(&self, cut: Cut) {
        *self.cut.lock().unwrap() = cut;
    }

    /// The same options, through this proxy.
    pub fn options(&self, direct: &PostgresOptions) -> PostgresOptions {
        let mut options = PostgresOptions::from_url(&self.url()).unwrap();
        options.schema = direct.schema.clone();
        options.partitions = direct.partitions;
        options.encrypt(Encryption::Disable);
        options
    }

    /// The server's URL, through this proxy.
    pub fn url(&self) -> String {
        url_by(self.address)
    }
}

/// The server's URL, by way of this address.
pub fn url_by(address: SocketAddr) -> String {
    let direct: tokio_postgres::Config = url().parse().unwrap();
    let user = direct.get_user().unwrap_or("postgres");
    let password = direct.get_password().map(|word| format!(":{}", String::from_utf8_lossy(word)));
    let database = direct.get_dbname().unwrap_or(user);
    format!("postgres://{user}{}@{address}/{database}?sslmode=disable", password.unwrap_or_default())
}

/// Where the server is.
pub fn target() -> String {
    let direct: tokio_postgres::Config = url().parse().unwrap();
    let host = match direct.get_hosts().first() {
        Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
        _ => "127.0.0.1".to_owned(),
    };
    format!("{host}:{}", direct.get_ports().first().copied().unwrap_or(5432))
}

async fn carry(client: TcpStream, server: TcpStream, cut: Arc<Mutex<Cut>>, achieved: Arc<Achieved>) {
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let swallow = watch::Sender::new(None);
    let answers = answers(from_server, to_client, swallow.subscribe(), achieved.clone());
    tokio::select! {
        () = requests(from_client, to_server, cut, swallow, achieved) => {}
        () = answers => {}
    }
}

/// Carries requests, message by message, until one is to be cut. When this ends, so do both connections.
async fn requests(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    cut: Arc<Mutex<Cut>>,
    swallow: watch::Sender<Option<&'static [u8]>>,
    achieved: Arc<Achieved>,
) {
    let mut buffer = Vec::new();
    let mut started = false;
    let mut swallowing = false;
    let mut writing: HashSet<Vec<u8>> = HashSet::new();
    loop {
        let mut chunk = [0; 65_536];
        let Ok(length @ 1..) = from.read(&mut chunk).await else { return };
        buffer.extend_from_slice(&chunk[..length]);
        let mut send = Vec::new();
        while let Some(length) = message_length(&buffer, started) {
            let message: Vec<u8> = buffer.drain(..length).collect();
            let commits = started && commits(&message, &mut writing);
            let asks = !started && message.windows(8).any(|window| window == b"options\0");
            if asks && matches!(*cut.lock().unwrap(), Cut::Settings) {
                achieved.elsewhere.fetch_add(1, Ordering::Relaxed);
                return;
            }
            started = true;
            match if swallowing { Fate::Pass } else { draw(&cut, commits) } {
                Fate::Pass => {}
                Fate::Before => {
                    let counter = if commits { &achieved.before } else { &achieved.elsewhere };
                    counter.fetch_add(1, Ordering::Relaxed);
                    let _ = to.write_all(&send).await;
                    return;
                }
                Fate::After(last_words) => {
                    swallowing = true;
                    swallow.send_replace(Some(last_words));
                }
            }
            send.extend(message);
        }
        if to.write_all(&send).await.is_err() {
            return;
        }
    }
}

/// What a statement says that is a transaction by itself, if it leaves a record and if it leaves none.
const WRITTEN: [&[u8]; 2] = [b"written as (", b"returning 1::bigint as _place"];

/// Whether the server commits something when it gets this message. Notes the names of statements that write.
fn commits(message: &[u8], writing: &mut HashSet<Vec<u8>>) -> bool {
    let mut texts = message.get(5..).unwrap_or_default().split(|byte| *byte == 0);
    let (first, second) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
    match message.first() {
        Some(b'Q') => first == b"commit",
        Some(b'P') => {
            // What has no name is another statement each time.
            writing.remove(first);
            if WRITTEN.iter().any(|words| second.windows(words.len()).any(|window| window == *words)) {
                writing.insert(first.to_vec());
            }
            false
        }
        // A bind names its portal, then its statement.
        Some(b'B') => writing.contains(second),
        _ => false,
    }
}

/// The length of the message at the beginning, if all of it is there. Only the first of a connection has no kind.
pub fn message_length(buffer: &[u8], started: bool) -> Option<usize> {
    let start = usize::from(started);
    let length: [u8; 4] = buffer.get(start..start + 4)?.try_into().unwrap();
    let length = u32::from_be_bytes(length) as usize + start;
    (buffer.len() >= length).then_some(length)
}

fn draw(cut: &Mutex<Cut>, commits: bool) -> Fate {
    let mut cut = cut.lock().unwrap();
    match (&mut *cut, commits) {
        (Cut::BeforeCommit, true) => {
            *cut = Cut::Never;
            Fate::Before
        }
        (Cut::AfterCommit, true) => {
            *cut = Cut::Never;
            Fate::After(b"")
        }
        (Cut::Silence, true) => {
            *cut = Cut::Never;
            Fate::After(SILENCE)
        }
        (Cut::Disowned, true) => {
            *cut = Cut::Never;
            Fate::After(LOST)
        }
        (Cut::AtRandom(random), commits) => {
            if !random.chance(if commits { 0.06 } else { 0.002 }) {
                Fate::Pass
            } else if commits && random.chance(0.5) {
                Fate::After(b"")
            } else {
                Fate::Before
            }
        }
        _ => Fate::Pass,
    }
}

/// Carries answers; once `swallow` says so, no longer, and when the commit is done the connection ends.
async fn answers(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    swallow: watch::Receiver<Option<&'static [u8]>>,
    achieved: Arc<Achieved>,
) {
    let mut chunk = [0; 65_536];
    let mut tail = Vec::new();
    loop {
        let Ok(length @ 1..) = from.read(&mut chunk).await else { return };
        let last_words = *swallow.borrow();
        if let Some(last_words) = last_words {
            tail.extend_from_slice(&chunk[..length]);
            // Ready for the next, outside of any transaction.
            if last_words != SILENCE && tail.windows(6).any(|window| window == b"Z\0\0\0\x05I") {
                achieved.after.fetch_add(1, Ordering::Relaxed);
                let _ = to.write_all(last_words).await;
                return;
            }
        } else if to.write_all(&chunk[..length]).await.is_err() {
            return;
        }
    }
}
