//! Connections: made with back-off, checked once, and used as a pipe.
//!
//! A [`Session`] is one live connection and the statements prepared on it. Requests are *queued*, not exchanged:
//! [`Session::run`] queues any number of them in one go and then waits for all the answers, so that a whole
//! transaction is one round trip. Nothing that has to be right is relied on in the connection from one transaction to the
//! next. A connection asks for its settings when it is made; where it got them ([`Session::is_set`]), transactions of one
//! statement need not say them again. They bound waits and keep plans quick; the one that is more, the role, each statement
//! looks at ([`crate::compile`]).
//!
//! **A pooler** may stand between, which gives each transaction to any of its server processes. A prepared statement has a
//! name, and names belong to a process: elsewhere the name is unknown, or, worse, some other client's statement has it. So
//! a connection is marked when it is made, by a setting that nobody else has; only if its process then has the mark
//! is the process its own, and only then are statements prepared.
//!
//! - L1. No name ever goes through a pooler. *Where the mark is missing, a statement goes whole each time: it is parsed,
//!   bound and executed in one request, without a name. The types of arrays are known on this side ([`Arg::declared`]), and
//!   of everything else the server finds them, so that nothing has to be learned ahead.*
//! - L2. Nothing is under way behind a transaction that ends. *A pooler takes the process away when it sees a transaction end and
//!   no further request that is complete. The beginning of the next one would stay behind on that process. So, where
//!   the mark is missing, one transaction at a time is under way on a connection ([`Session::turn`]).*
//! - L3. Whoever trusted a name in vain trusts none again. *If a process that had the mark does not know a name, or knows it
//!   already, all sessions of its dialer are replaced by ones without names ([`Fault::Elsewhere`]).*
//!
//! A [`Link`] is the place of a session: when the session is gone, the next user makes a new one.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use statehouse_store::{Clock, Random, StoreError, SystemClock, Type};
use tokio::task::AbortHandle;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::{ToSql, Type as PgType};
use tokio_postgres::{Client, Connection, Row, Socket, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::fault::Fault;
use crate::options::Options;
use crate::sql::{Arg, text_at, value_at};
use crate::watch::Watch;

/// One statement and its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Call<'a> {
    /// The statement.
    pub text: Arc<str>,
    /// Its parameters, in order.
    pub args: Vec<Arg<'a>>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(text: impl Into<Arc<str>>, args: Vec<Arg<'a>>) -> Call<'a> {
        Call { text: text.into(), args }
    }
}

/// Statements that one connection keeps prepared, at most. Shapes come from actions, of which there are few; the
/// bound is for poolers and for callers who make up shapes.
const STATEMENTS_MAX: usize = 400;

/// A live connection.
pub(crate) struct Session {
    client: Client,
    driver: AbortHandle,
    statements: Mutex<Prepared>,
    /// Held while the requests of one transaction are queued, so that two of them do not mix.
    gate: Mutex<()>,
    /// Held by whoever has a transaction under way, where there may be one at a time. Whether something may be under way
    /// still: the last holder went away before everything was answered, or the last answer was an error, which comes
    /// ahead of the end of its transaction.
    turn: tokio::sync::Mutex<bool>,
    /// A server that is silent for longer than this is not waited for.
    watch: Arc<Watch>,
    /// Whether the server process is this connection's own, and will be.
    is_own: bool,
    /// Whether the server took the settings that were asked for when the connection was made.
    is_set: bool,
    /// The dialer's: whether a process turned out not to be a connection's own.
    is_deceived: Arc<AtomicBool>,
}

/// The statements that are prepared on a connection.
#[derive(Default)]
struct Prepared {
    by_text: HashMap<Arc<str>, Statement>,
    /// Those that were used last, found by where their texts are kept: a text itself may take longer to look up than
    /// everything else that is done before it is sent.
    recent: Vec<(Arc<str>, Statement)>,
}

impl Prepared {
    const RECENT_MAX: usize = 8;

    fn get(&mut self, text: &Arc<str>) -> Option<Statement> {
        if let Some((_, statement)) = self.recent.iter().find(|(recent, _)| Arc::ptr_eq(recent, text)) {
            return Some(statement.clone());
        }
        let statement = self.by_text.get(text)?.clone();
        self.recent.truncate(Prepared::RECENT_MAX - 1);
        self.recent.insert(0, (text.clone(), statement.clone()));
        Some(statement)
    }

    fn insert(&mut self, text: &Arc<str>, statement: &Statement) {
        if self.by_text.len() >= STATEMENTS_MAX {
            self.clear();
        }
        self.by_text.insert(text.clone(), statement.clone());
    }

    fn clear(&mut self) {
        self.by_text.clear();
        self.recent.clear();
    }
}

/// A call as it is sent.
enum Request<'c> {
    /// Under the name that the statement was prepared by.
    Named(Statement, Vec<&'c (dyn ToSql + Sync)>),
    /// Whole, and without a name.
    Whole(&'c str, Vec<(&'c (dyn ToSql + Sync), PgType)>),
}

type Pending<'s> = Pin<Box<dyn Future<Output = Result<Vec<Row>, tokio_postgres::Error>> + Send + 's>>;

/// The answers to one pipeline.
pub(crate) struct Answers {
    /// Of each statement; or of the first that failed.
    pub rows: Result<Vec<Vec<Row>>, Fault>,
    /// What is known of the words that close the transaction.
    pub closing: Closing,
}

/// What is known of the words that close a transaction.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Closing {
    /// They were never sent: the transaction cannot have been committed.
    Unsent,
    /// They were carried out. If a statement before them failed, that was a rollback.
    Done,
    /// They were sent, and no answer says what became of them.
    Unknown(String),
}

impl Session {
    /// Whether the settings of [`Dialer::for_writers`] hold for every transaction. Behind a pooler that does not pass them
    /// on they do not.
    pub(crate) fn is_set(&self) -> bool {
        self.is_set
    }

    /// Whether the connection is gone, or not to be used any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed() || (self.is_own && self.is_deceived.load(Ordering::Relaxed))
    }

    /// Runs statements as one pipeline: `open`, the calls, `close`. With neither, each call is a transaction of its
    /// own, which its end closes. All are queued before the first answer is waited for.
    pub(crate) async fn run(&self, open: Option<&str>, calls: &[Call<'_>], close: Option<&str>) -> Answers {
        let mut turn = match self.turn().await {
            Ok(turn) => turn,
            Err(fault) => return Answers { rows: Err(fault), closing: Closing::Unsent },
        };
        let answers = if turn.is_some() && calls.len() > 1 && open.is_none() && close.is_none() {
            self.run_one_by_one(calls).await
        } else {
            self.run_at_once(open, calls, close).await
        };
        if let Some(unanswered) = &mut turn {
            **unanswered = match close {
                Some(_) => answers.closing != Closing::Done,
                None => answers.rows.is_err(),
            };
        }
        answers
    }

    /// Waits until nothing is under way any more, where that is asked for. Whoever holds the turn may send one transaction,
    /// or a part of one.
    async fn turn(&self) -> Result<Option<tokio::sync::MutexGuard<'_, bool>>, Fault> {
        if self.is_own {
            return Ok(None);
        }
        let mut unanswered = self.turn.lock().await;
        if *unanswered {
            // Words that say nothing are answered when everything before them has ended.
            self.exchange("").await?;
        }
        *unanswered = true;
        Ok(Some(unanswered))
    }

    /// Runs transactions of one statement each, each when the one before was answered.
    async fn run_one_by_one(&self, calls: &[Call<'_>]) -> Answers {
        let mut rows = Vec::with_capacity(calls.len());
        for call in calls {
            let answers = self.run_at_once(None, std::slice::from_ref(call), None).await;
            match answers.rows {
                Ok(answer) => rows.extend(answer),
                Err(_) => return answers,
            }
        }
        Answers { rows: Ok(rows), closing: Closing::Done }
    }

    async fn run_at_once(&self, open: Option<&str>, calls: &[Call<'_>], close: Option<&str>) -> Answers {
        let mut requests = Vec::with_capacity(calls.len());
        for call in calls {
            match self.request(call).await {
                Ok(request) => requests.push(request),
                Err(fault) => {
                    // Without opening words the transaction is open already.
                    self.give_up(close.filter(|_| open.is_none())).await;
                    return Answers { rows: Err(fault), closing: Closing::Unsent };
                }
            }
        }
        let words = |text: &'_ str| -> Pending<'_> {
            let text = text.to_owned();
            Box::pin(async move { self.client.batch_execute(&text).await.map(|()| Vec::new()) })
        };
        let mut pending: Vec<Pending<'_>> = Vec::with_capacity(calls.len() + 2);
        pending.extend(open.map(words));
        for request in &requests {
            pending.push(match request {
                Request::Named(statement, args) => Box::pin(self.client.query(statement, args)),
                Request::Whole(text, args) => Box::pin(self.client.query_typed(text, args)),
            });
        }
        pending.extend(close.map(words));
        let asked = pending.len();
        let mut answers = self.watch.over(self.queued(pending)).await;
        let all_sent = answers.len() == asked;
        let mut closing = match close.filter(|_| all_sent).and_then(|_| answers.pop()) {
            Some(Ok(_)) => Closing::Done,
            Some(Err(error)) => Closing::Unknown(self.fault(&error).said().to_owned()),
            None => {
                self.give_up(close).await;
                Closing::Unsent
            }
        };
        if open.is_some() && matches!(answers.first(), Some(Ok(_))) {
            drop(answers.remove(0));
        }
        let rows: Result<Vec<Vec<Row>>, Fault> =
            answers.into_iter().map(|answer| answer.map_err(|error| self.fault(&error))).collect();
        if close.is_none() && all_sent {
            closing = match &rows {
                Err(Fault::Lost(why)) => Closing::Unknown(why.clone()),
                _ => Closing::Done,
            };
        }
        if let Err(fault) = &rows {
            self.heed(fault);
        }
        Answers { rows, closing }
    }

    /// Runs a compiled statement: a transaction by itself, unless words open one for it.
    pub(crate) async fn run_compiled(&self, call: &Call<'_>, open: Option<&str>) -> Answers {
        self.run(open, std::slice::from_ref(call), open.map(|_| "commit")).await
    }

    /// Draws the conclusions from what went wrong with a prepared statement.
    fn heed(&self, fault: &Fault) {
        match fault {
            Fault::Stale(_) => self.lock_statements().clear(),
            Fault::Elsewhere(_) => self.is_deceived.store(true, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Rolls back a transaction whose closing words could not be sent.
    async fn give_up(&self, close: Option<&str>) {
        if close.is_none() {
            return;
        }
        if self.is_own {
            self.queue("rollback").await;
        } else {
            // If this fails too, the connection is gone, and the transaction with it.
            let _ = self.exchange("rollback").await;
        }
    }

    /// Sends words whose answer nobody needs. It is not waited for, unless it has to be.
    pub(crate) async fn tell(&self, words: &str) {
        if self.is_own {
            self.queue(words).await;
        } else {
            let _ = self.say(words).await;
        }
    }

    /// Sends words that are not a statement with parameters, and waits for the answer.
    pub(crate) async fn say(&self, words: &str) -> Result<(), Fault> {
        let mut turn = self.turn().await?;
        let answer = self.exchange(words).await;
        if let Some(unanswered) = &mut turn {
            **unanswered = answer.is_err();
        }
        answer
    }

    /// Queues words without waiting for the answer.
    async fn queue(&self, words: &str) {
        let mut request = std::pin::pin!(self.client.batch_execute(words));
        std::future::poll_fn(|context| {
            let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = request.as_mut().poll(context);
            Poll::Ready(())
        })
        .await;
    }

    /// Queues words and waits for the answer.
    async fn exchange(&self, words: &str) -> Result<(), Fault> {
        let answer = self.watch.over(self.gated(self.client.batch_execute(words))).await;
        answer.map_err(|error| self.fault(&error))
    }

    /// Queues all of these by polling each once, in order and without a word of anybody else's between them, and
    /// then waits for each. If one cannot even be queued, those behind it are not: a commit must not follow a gap.
    async fn queued(&self, mut pending: Vec<Pending<'_>>) -> Vec<Result<Vec<Row>, tokio_postgres::Error>> {
        let mut ready: Vec<Option<Result<Vec<Row>, tokio_postgres::Error>>> =
            Vec::with_capacity(pending.len());
        std::future::poll_fn(|context| {
            let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            for future in &mut pending {
                let answer = match future.as_mut().poll(context) {
                    Poll::Ready(answer) => Some(answer),
                    Poll::Pending => None,
                };
                let failed = matches!(answer, Some(Err(_)));
                ready.push(answer);
                if failed {
                    break;
                }
            }
            Poll::Ready(())
        })
        .await;
        let mut answers = Vec::with_capacity(pending.len());
        for (future, ready) in pending.into_iter().zip(ready) {
            answers.push(match ready {
                Some(answer) => answer,
                None => future.await,
            });
        }
        answers
    }

    /// Queues one request, not between those of somebody's transaction, and waits for its answer.
    async fn gated<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        let first = std::future::poll_fn(|context| {
            let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            Poll::Ready(work.as_mut().poll(context))
        });
        match first.await {
            Poll::Ready(done) => done,
            Poll::Pending => work.await,
        }
    }

    /// What went wrong: what the server said, unless it said nothing for too long.
    fn fault(&self, error: &tokio_postgres::Error) -> Fault {
        match Fault::of(error) {
            Fault::Lost(_) if self.watch.is_over() => {
                Fault::Lost(format!("no answer for {:?}", self.watch.patience))
            }
            fault => fault,
        }
    }

    fn lock_statements(&self) -> std::sync::MutexGuard<'_, Prepared> {
        self.statements.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call as it goes to this server process.
    async fn request<'c>(&self, call: &'c Call<'_>) -> Result<Request<'c>, Fault> {
        let args = call.args.iter();
        if !self.is_own {
            let args = args.map(|arg| (arg as &(dyn ToSql + Sync), arg.declared())).collect();
            return Ok(Request::Whole(&call.text, args));
        }
        let statement = self.prepared(&call.text).await.inspect_err(|fault| self.heed(fault))?;
        // What is declared where there are no names is what the server finds by itself.
        debug_assert!(args.clone().zip(statement.params()).all(|(arg, kind)| arg.fits(kind)), "{call:?}");
        Ok(Request::Named(statement, args.map(|arg| arg as &(dyn ToSql + Sync)).collect()))
    }

    async fn prepared(&self, text: &Arc<str>) -> Result<Statement, Fault> {
        let known = self.lock_statements().get(text);
        if let Some(statement) = known {
            return Ok(statement);
        }
        let prepared = self.watch.over(self.gated(self.client.prepare(text))).await;
        let statement = prepared.map_err(|error| self.fault(&error))?;
        self.lock_statements().insert(text, &statement);
        Ok(statement)
    }
}

/// Ends the connection even when the server does not answer any more.
impl Drop for Session {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Session")
    }
}

/// How to make sessions.
pub(crate) struct Dialer {
    driver: tokio_postgres::Config,
    /// What a session is to be set to from its start, by name.
    settings: Vec<(&'static str, String)>,
    tls: MakeRustlsConnect,
    patience: Duration,
    random: Mutex<Random>,
    /// Whether a server process that had a connection's mark turned out not to be its own.
    is_deceived: Arc<AtomicBool>,
}

/// The setting by which a connection knows its server process again.
const MARK: &str = "statehouse.session";

/// How often a connection is tried before the caller is told that there is none.
const ATTEMPTS: u32 = 6;
/// How much longer than for a connection is waited until a server has let somebody in: the driver's own limit ends when there
/// is somebody to talk to.
const HANDSHAKE: u32 = 3;
/// The first pause between two attempts; each is twice as long as the one before, give or take a half.
const FIRST_PAUSE: Duration = Duration::from_millis(25);

impl Dialer {
    pub(crate) fn new(options: &Options) -> Result<Dialer, StoreError> {
        Ok(Dialer {
            driver: options.driver.clone(),
            settings: Vec::new(),
            tls: crate::tls::connector(options)?,
            // The server gives up first, unless it is gone.
            patience: options.statement_timeout + Duration::from_secs(5),
            random: Mutex::new(Random::from_entropy()),
            is_deceived: Arc::default(),
        })
    }

    /// For sessions that write: what a transaction of one statement cannot set for itself, because it has to hold when the
    /// statement is planned or begins, or what it had better not.
    pub(crate) fn for_writers(options: &Options) -> Result<Dialer, StoreError> {
        let lookups = crate::compile::LOOKUPS.map(|(name, value)| (name, value.to_owned()));
        let timeouts =
            [("statement_timeout", options.statement_timeout), ("lock_timeout", options.lock_timeout)]
                .map(|(name, timeout)| (name, timeout.as_millis().to_string()));
        let isolation = ("default_transaction_isolation", "read committed".to_owned());
        let role = options.role().map(|role| ("role", role.to_owned()));
        let settings = lookups.into_iter().chain(timeouts).chain([isolation]).chain(role).collect();
        Ok(Dialer { settings, ..Dialer::new(options)? })
    }

    /// For sessions that read: what keeps their plans right, which a lone statement cannot set for itself. Where a pooler
    /// does not pass it on, the server plans as it would for anybody.
    pub(crate) fn for_readers(options: &Options) -> Result<Dialer, StoreError> {
        let lookups = crate::look::LOOKUPS.map(|(name, value)| (name, value.to_owned()));
        // What takes too long ends at the server, too, before it is given up here and asked again.
        let timeout = ("statement_timeout", options.statement_timeout.as_millis().to_string());
        let settings = lookups.into_iter().chain([timeout]).collect();
        Ok(Dialer { settings, ..Dialer::new(options)? })
    }

    /// Waits before an attempt: longer each time, and not in step with others.
    pub(crate) async fn pause(&self, attempt: u32) {
        let longest = FIRST_PAUSE.saturating_mul(1 << attempt.min(6));
        let share = 0.5 + self.random.lock().unwrap_or_else(PoisonError::into_inner).unit();
        SystemClock.sleep(longest.mul_f64(share)).await;
    }

    /// Waits a moment that no two take alike, before a transaction that met another is run again.
    pub(crate) async fn step_aside(&self, attempt: u32) {
        let longest = Duration::from_millis(1 << attempt.min(8));
        let share = self.random.lock().unwrap_or_else(PoisonError::into_inner).unit();
        SystemClock.sleep(longest.mul_f64(share)).await;
    }

    /// Makes a session, trying a few times.
    pub(crate) async fn session(&self) -> Result<Arc<Session>, StoreError> {
        self.session_with(self.patience).await
    }

    /// Makes a session that waits so long for an answer, trying a few times.
    pub(crate) async fn session_with(&self, patience: Duration) -> Result<Arc<Session>, StoreError> {
        let mut attempt = 0;
        loop {
            let silence = self.driver.get_connect_timeout().copied().unwrap_or(patience) * HANDSHAKE;
            let connected = tokio::select! {
                biased;
                connected = self.connect(patience) => connected,
                () = SystemClock.sleep(silence) => {
                    Err(Refusal::Passing(format!("it has accepted a connection and said nothing for {silence:?}")))
                }
            };
            match connected {
                Ok(session) => return Ok(Arc::new(session)),
                Err(Refusal::Final(error)) => return Err(error),
                Err(Refusal::Passing(why)) if attempt + 1 == ATTEMPTS => {
                    return Err(StoreError::unavailable(format!("no connection to PostgreSQL: {why}")));
                }
                Err(Refusal::Passing(_)) => self.pause(attempt).await,
            }
            attempt += 1;
        }
    }

    async fn connect(&self, patience: Duration) -> Result<Session, Refusal> {
        let passing = |error: tokio_postgres::Error| match Fault::of(&error) {
            // A wrong password or database stays wrong.
            fault if is_identity(&error) => {
                Refusal::Final(StoreError::schema("the PostgreSQL server", fault.said()))
            }
            other => Refusal::Passing(other.said().to_owned()),
        };
        let mark = {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            format!("{:016x}", random.next_u64())
        };
        let (client, connection) = match self.connect_set(&mark).await {
            Ok(connected) => connected,
            Err(error) if is_overloaded(&error) => return Err(passing(error)),
            // It was not let in with what it asks for, as by a pooler that does not know it.
            Err(_) => self.driver.connect(self.tls.clone()).await.map_err(passing)?,
        };
        let watch = Arc::new(Watch::new(patience));
        let driver = tokio::spawn({
            let watch = watch.clone();
            async move {
                // Whoever waits for an answer is told of the error; there is nobody else to tell.
                tokio::select! {
                    biased;
                    _ = connection => {}
                    () = watch.until_over() => {}
                }
            }
        });
        let mut session = Session {
            client,
            driver: driver.abort_handle(),
            statements: Mutex::default(),
            gate: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            watch,
            is_own: false,
            is_set: false,
            is_deceived: self.is_deceived.clone(),
        };
        session.check().await?;
        let (is_marked, is_set) = self.took(&session, &mark).await.unwrap_or_default();
        session.is_own = is_marked && !self.is_deceived.load(Ordering::Relaxed);
        session.is_set = session.is_own && is_set;
        Ok(session)
    }

    /// A connection that asks for the settings and for its mark.
    async fn connect_set(&self, mark: &str) -> Result<Connected, tokio_postgres::Error> {
        let escaped = |value: &str| value.replace('\\', "\\\\").replace(' ', "\\ ");
        let settings = self.settings.iter().map(|(name, value)| (*name, value.as_str()));
        let wanted: Vec<String> = settings
            .chain([(MARK, mark)])
            .map(|(name, value)| format!("-c {name}={}", escaped(value)))
            .collect();
        let given = self.driver.get_options().unwrap_or_default();
        let mut driver = self.driver.clone();
        driver.options(format!("{given} {}", wanted.join(" ")));
        driver.connect(self.tls.clone()).await
    }

    /// Whether a session's server process has the mark, and whether it has the settings.
    async fn took(&self, session: &Session, mark: &str) -> Option<(bool, bool)> {
        // Of a time the server tells the unit too; as a part of its catalogue, where the role is not, it is a number.
        let question = "select current_setting($1::text, true) = $2::text, count(*) = cardinality($3::text[]) \
                        from unnest($3::text[], $4::text[]) as k(name, value) \
                        left join pg_settings as s on s.name = k.name \
                        where coalesce(s.setting, current_setting(k.name)) = k.value";
        let names = Arg::Texts(self.settings.iter().map(|(name, _)| *name).collect());
        let values = Arg::Texts(self.settings.iter().map(|(_, value)| value.as_str()).collect());
        let args = vec![Arg::Text(MARK), Arg::Text(mark), names, values];
        let rows = session.run(None, &[Call::new(question, args)], None).await.rows.ok()?;
        let row = rows.first()?.first()?;
        let is = |place: usize| value_at(row, place, Type::Bool, "pg_settings").ok()?.as_bool();
        Some((is(0)?, is(1)?))
    }
}

type Connected = (Client, Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>);

fn is_identity(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| code.code().starts_with("28") || code.code() == "3D000")
}

/// Whether the server lets nobody in now, whatever they ask for.
fn is_overloaded(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| ["53", "57"].iter().any(|class| code.code().starts_with(class)))
}

enum Refusal {
    /// Later it may work.
    Passing(String),
    /// It will not.
    Final(StoreError),
}

/// Older servers lack what the statements use.
const VERSION_MIN: i64 = 130_000;

impl Session {
    /// Refuses servers on which "applied" would not mean "durable", or text not what it is elsewhere.
    async fn check(&self) -> Result<(), Refusal> {
        let question = "select current_setting('server_version_num')::bigint, current_setting('fsync'), \
                        current_setting('synchronous_commit'), current_setting('server_encoding'), \
                        pg_is_in_recovery()";
        let answers = self.run(None, &[Call::new(question, Vec::new())], None).await;
        let rows = answers.rows.map_err(|fault| Refusal::Passing(fault.said().to_owned()))?;
        let Some(row) = rows.first().and_then(|rows| rows.first()) else {
            return Err(Refusal::Passing("the server did not say what it is".into()));
        };
        let server = "the PostgreSQL server";
        let read = |error: StoreError| Refusal::Final(error);
        let refuse = |why: &str| Err(Refusal::Final(StoreError::schema(server, why)));
        let version = value_at(row, 0, Type::Int, server).map_err(read)?.as_int().unwrap_or(0);
        if version < VERSION_MIN {
            return refuse("it is older than version 13");
        }
        if text_at(row, 1, server).map_err(read)? == "off" {
            return refuse(
                "fsync is off, so a crash of the machine would lose or corrupt what was committed",
            );
        }
        if text_at(row, 2, server).map_err(read)? == "off" {
            return refuse(
                "synchronous_commit is off for this role, so a crash would lose what was acknowledged; \
                 set it to on (alter role … set synchronous_commit = on)",
            );
        }
        if text_at(row, 3, server).map_err(read)? != "UTF8" {
            return refuse("the database's encoding is not UTF8");
        }
        if value_at(row, 4, Type::Bool, server).map_err(read)?.as_bool() == Some(true) {
            return Err(Refusal::Passing("it is a standby and takes no writes".into()));
        }
        Ok(())
    }
}

/// The place of a session that is made when it is needed.
#[derive(Default)]
pub(crate) struct Link {
    session: tokio::sync::Mutex<Option<Arc<Session>>>,
}

impl Link {
    /// The live session, a new one if the last is gone.
    pub(crate) async fn session(&self, dialer: &Dialer) -> Result<Arc<Session>, StoreError> {
        let mut place = self.session.lock().await;
        match &*place {
            Some(session) if !session.is_closed() => Ok(session.clone()),
            _ => Ok(place.insert(dialer.session().await?).clone()),
        }
    }

    /// Lets go of the session.
    pub(crate) async fn close(&self) {
        self.session.lock().await.take();
    }
}
