//! Connections: made with backoff, checked once, and used with pipelining.
//!
//! A [`Session`] is one live connection with its prepared statements. [`Session::run`] sends any number of requests at once and then
//! waits for all answers, so that a whole transaction is one round trip. Correctness never depends on state of the connection from one
//! transaction to the next. A connection requests its settings when it is made. If the server has accepted them ([`Session::is_set`]),
//! transactions of one statement do not repeat them. They bound waits and keep plans quick. The one setting that matters for
//! correctness, the role, is checked by each statement ([`crate::compile`]).
//!
//! **A pooler** such as PgBouncer may assign each transaction to any of its server processes. The name of a prepared statement belongs to
//! one process: on another process the name is unknown, or it is a statement of another client. So a new connection is marked by a setting
//! with a random value. Only if its server process then has the mark, the process belongs to this connection, and only then are statements
//! prepared.
//!
//! - L1. No statement name is sent through a pooler. *If the mark is missing, each statement is parsed, bound and executed in one request,
//!   without a name. The types of arrays are known to the client ([`Arg::declared`]), and the server infers all others.*
//! - L2. No request follows the end of a transaction that is in flight. *A pooler may reassign the process when a transaction has ended
//!   and no complete request has arrived. The beginning of the next request would stay on the old process. So, if the mark is missing,
//!   one transaction at a time is in flight on a connection ([`Session::turn`]).*
//! - L3. A connector whose names failed once uses no names any more. *If a marked process does not know a name, or has it already, all
//!   sessions of the connector are replaced by sessions without names ([`PostgresFault::Elsewhere`]).*
//!
//! A [`LazyConnection`] holds a session. If the session is closed, the next user makes a new one.

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

use crate::fault::PostgresFault;
use crate::options::PostgresOptions;
use crate::silence_timeout::SilenceTimeout;
use crate::sql::{Arg, text_at, value_at};

/// One statement and its parameters.
#[derive(Clone, Debug)]
pub(crate) struct DatabaseCall<'a> {
    /// The statement.
    pub text: Arc<str>,
    /// Its parameters, in order.
    pub args: Vec<Arg<'a>>,
}

impl<'a> DatabaseCall<'a> {
    pub(crate) fn new(text: impl Into<Arc<str>>, args: Vec<Arg<'a>>) -> DatabaseCall<'a> {
        DatabaseCall { text: text.into(), args }
    }
}

/// Prepared statements of one connection, at most. Shapes come from actions, of which there are few. The limit is for callers that
/// generate shapes.
const STATEMENTS_MAX: usize = 400;

/// A live connection.
pub(crate) struct Session {
    client: Client,
    driver: AbortHandle,
    statements: Mutex<PreparedStatements>,
    /// Held while the requests of one transaction are sent, so that those of two transactions do not interleave.
    gate: Mutex<()>,
    /// Held during a transaction, if only one may be in flight (L2). The value says whether a request may still be in flight: the
    /// last holder was cancelled before all answers arrived, or the last answer was an error, which precedes the end of its
    /// transaction.
    turn: tokio::sync::Mutex<bool>,
    /// Closes the connection if the server does not answer.
    silence: Arc<SilenceTimeout>,
    /// Whether the server process belongs to this connection, so that statements can be prepared.
    is_own: bool,
    /// Whether the server accepted the settings that were requested when the connection was made.
    is_set: bool,
    /// Shared with the connector: whether a marked process turned out to be shared (L3).
    names_failed: Arc<AtomicBool>,
}

/// The statements that are prepared on a connection.
#[derive(Default)]
struct PreparedStatements {
    by_text: HashMap<Arc<str>, Statement>,
    /// The most recent ones, found by the address of their texts. To hash a long text may take longer than everything else that
    /// is done before it is sent.
    recent: Vec<(Arc<str>, Statement)>,
}

impl PreparedStatements {
    const RECENT_MAX: usize = 8;

    fn get(&mut self, text: &Arc<str>) -> Option<Statement> {
        if let Some((_, statement)) = self.recent.iter().find(|(recent, _)| Arc::ptr_eq(recent, text)) {
            return Some(statement.clone());
        }
        let statement = self.by_text.get(text)?.clone();
        self.recent.truncate(PreparedStatements::RECENT_MAX - 1);
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

/// A call in the form in which it is sent.
enum WireRequest<'c> {
    /// By the name of the prepared statement.
    Named(Statement, Vec<&'c (dyn ToSql + Sync)>),
    /// As text, without a name.
    Whole(&'c str, Vec<(&'c (dyn ToSql + Sync), PgType)>),
}

type PendingAnswer<'s> = Pin<Box<dyn Future<Output = Result<Vec<Row>, tokio_postgres::Error>> + Send + 's>>;

/// The answers to one pipeline.
pub(crate) struct Answers {
    /// The rows of each statement, or the fault of the first that failed.
    pub rows: Result<Vec<Vec<Row>>, PostgresFault>,
    /// What is known about the end of the transaction.
    pub closing: Closing,
}

/// What is known about the statement that ends a transaction.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Closing {
    /// It was not sent: the transaction cannot have been committed.
    Unsent,
    /// It was executed. If a statement before it failed, that was a rollback.
    Done,
    /// It was sent, and its answer was lost.
    Unknown(String),
}

impl Session {
    /// Whether the settings of [`Connector::for_writers`] hold for every transaction. Behind a pooler that does not pass them
    /// on they do not.
    pub(crate) fn is_set(&self) -> bool {
        self.is_set
    }

    /// Whether the connection is closed, or must not be used any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed() || (self.is_own && self.names_failed.load(Ordering::Relaxed))
    }

    /// Runs statements as one pipeline: `open`, the calls, `close`. Without both, each call is a transaction of its own. All are
    /// sent before the first answer is awaited.
    pub(crate) async fn run(
        &self,
        open: Option<&str>,
        calls: &[DatabaseCall<'_>],
        close: Option<&str>,
    ) -> Answers {
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

    /// Waits until no request is in flight, if that is required (L2). The holder may send one transaction, or a part of one.
    async fn turn(&self) -> Result<Option<tokio::sync::MutexGuard<'_, bool>>, PostgresFault> {
        if self.is_own {
            return Ok(None);
        }
        let mut unanswered = self.turn.lock().await;
        if *unanswered {
            // An empty query is answered after everything before it.
            self.send_and_wait("").await?;
        }
        *unanswered = true;
        Ok(Some(unanswered))
    }

    /// Runs transactions of one statement each, one after the other.
    async fn run_one_by_one(&self, calls: &[DatabaseCall<'_>]) -> Answers {
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

    async fn run_at_once(
        &self,
        open: Option<&str>,
        calls: &[DatabaseCall<'_>],
        close: Option<&str>,
    ) -> Answers {
        let mut requests = Vec::with_capacity(calls.len());
        for call in calls {
            match self.request(call).await {
                Ok(request) => requests.push(request),
                Err(fault) => {
                    // Without `open` the transaction has begun already.
                    self.roll_back_unsent(close.filter(|_| open.is_none())).await;
                    return Answers { rows: Err(fault), closing: Closing::Unsent };
                }
            }
        }
        let sql = |text: &'_ str| -> PendingAnswer<'_> {
            let text = text.to_owned();
            Box::pin(async move { self.client.batch_execute(&text).await.map(|()| Vec::new()) })
        };
        let mut pending: Vec<PendingAnswer<'_>> = Vec::with_capacity(calls.len() + 2);
        pending.extend(open.map(sql));
        for request in &requests {
            pending.push(match request {
                WireRequest::Named(statement, args) => Box::pin(self.client.query(statement, args)),
                WireRequest::Whole(text, args) => Box::pin(self.client.query_typed(text, args)),
            });
        }
        pending.extend(close.map(sql));
        let asked = pending.len();
        let mut answers = self.silence.wait_for(self.queued(pending)).await;
        let all_sent = answers.len() == asked;
        let mut closing = match close.filter(|_| all_sent).and_then(|_| answers.pop()) {
            Some(Ok(_)) => Closing::Done,
            Some(Err(error)) => Closing::Unknown(self.fault(&error).said().to_owned()),
            None => {
                self.roll_back_unsent(close).await;
                Closing::Unsent
            }
        };
        if open.is_some() && matches!(answers.first(), Some(Ok(_))) {
            drop(answers.remove(0));
        }
        let rows: Result<Vec<Vec<Row>>, PostgresFault> =
            answers.into_iter().map(|answer| answer.map_err(|error| self.fault(&error))).collect();
        if close.is_none() && all_sent {
            closing = match &rows {
                Err(PostgresFault::Lost(why)) => Closing::Unknown(why.clone()),
                _ => Closing::Done,
            };
        }
        if let Err(fault) = &rows {
            self.react_to(fault);
        }
        Answers { rows, closing }
    }

    /// Runs a compiled statement: a transaction by itself, unless `open` begins one.
    pub(crate) async fn run_compiled(&self, call: &DatabaseCall<'_>, open: Option<&str>) -> Answers {
        self.run(open, std::slice::from_ref(call), open.map(|_| "commit")).await
    }

    /// Discards prepared statements after a fault that concerns them.
    fn react_to(&self, fault: &PostgresFault) {
        match fault {
            PostgresFault::Stale(_) => self.lock_statements().clear(),
            PostgresFault::Elsewhere(_) => self.names_failed.store(true, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Rolls back a transaction whose end could not be sent.
    async fn roll_back_unsent(&self, close: Option<&str>) {
        if close.is_none() {
            return;
        }
        if self.is_own {
            self.queue("rollback").await;
        } else {
            // If this fails too, the connection is closed, which ends the transaction.
            let _ = self.send_and_wait("rollback").await;
        }
    }

    /// Sends SQL whose answer is not needed. The answer is awaited only if L2 requires it.
    pub(crate) async fn execute_unawaited(&self, sql: &str) {
        if self.is_own {
            self.queue(sql).await;
        } else {
            let _ = self.execute(sql).await;
        }
    }

    /// Executes SQL without parameters, and waits for the answer.
    pub(crate) async fn execute(&self, sql: &str) -> Result<(), PostgresFault> {
        let mut turn = self.turn().await?;
        let answer = self.send_and_wait(sql).await;
        if let Some(unanswered) = &mut turn {
            **unanswered = answer.is_err();
        }
        answer
    }

    /// Sends SQL without waiting for the answer.
    async fn queue(&self, sql: &str) {
        let mut request = std::pin::pin!(self.client.batch_execute(sql));
        std::future::poll_fn(|context| {
            let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = request.as_mut().poll(context);
            Poll::Ready(())
        })
        .await;
    }

    /// Sends SQL and waits for the answer, without acquiring the turn.
    async fn send_and_wait(&self, sql: &str) -> Result<(), PostgresFault> {
        let answer = self.silence.wait_for(self.gated(self.client.batch_execute(sql))).await;
        answer.map_err(|error| self.fault(&error))
    }

    /// Sends all of these by polling each once, in order and without requests of other tasks between them, and then waits for each.
    /// If one cannot be sent, the later ones are not sent: a commit must not follow a gap.
    async fn queued(
        &self,
        mut pending: Vec<PendingAnswer<'_>>,
    ) -> Vec<Result<Vec<Row>, tokio_postgres::Error>> {
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

    /// Sends one request, not between those of a transaction of another task, and waits for its answer.
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

    /// Classifies an error. A connection that was dropped by the silence timeout is reported as such.
    fn fault(&self, error: &tokio_postgres::Error) -> PostgresFault {
        match PostgresFault::of(error) {
            PostgresFault::Lost(_) if self.silence.is_expired() => {
                PostgresFault::Lost(format!("no answer for {:?}", self.silence.patience))
            }
            fault => fault,
        }
    }

    fn lock_statements(&self) -> std::sync::MutexGuard<'_, PreparedStatements> {
        self.statements.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The request of a call on this server process.
    async fn request<'c>(&self, call: &'c DatabaseCall<'_>) -> Result<WireRequest<'c>, PostgresFault> {
        let args = call.args.iter();
        if !self.is_own {
            let args = args.map(|arg| (arg as &(dyn ToSql + Sync), arg.declared())).collect();
            return Ok(WireRequest::Whole(&call.text, args));
        }
        let statement = self.prepared(&call.text).await.inspect_err(|fault| self.react_to(fault))?;
        // The types that are declared for statements without names equal those that the server infers.
        debug_assert!(args.clone().zip(statement.params()).all(|(arg, kind)| arg.fits(kind)), "{call:?}");
        Ok(WireRequest::Named(statement, args.map(|arg| arg as &(dyn ToSql + Sync)).collect()))
    }

    async fn prepared(&self, text: &Arc<str>) -> Result<Statement, PostgresFault> {
        let known = self.lock_statements().get(text);
        if let Some(statement) = known {
            return Ok(statement);
        }
        let prepared = self.silence.wait_for(self.gated(self.client.prepare(text))).await;
        let statement = prepared.map_err(|error| self.fault(&error))?;
        self.lock_statements().insert(text, &statement);
        Ok(statement)
    }
}

/// Closes the connection even if the server does not answer any more.
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
pub(crate) struct Connector {
    driver: tokio_postgres::Config,
    /// What a session is to be set to from its start, by name.
    settings: Vec<(&'static str, String)>,
    tls: MakeRustlsConnect,
    patience: Duration,
    random: Mutex<Random>,
    /// Whether a server process that had a connection's mark turned out not to be its own.
    names_failed: Arc<AtomicBool>,
}

/// The setting by which a connection knows its server process again.
const MARK: &str = "statehouse.session";

/// How often a connection is tried before the caller gets an error.
const ATTEMPTS: u32 = 6;
/// How much longer than for a connection is waited until a server has accepted the login: the driver's own limit ends with
/// the connection.
const HANDSHAKE: u32 = 3;
/// The first pause between two attempts; each is twice as long as the one before, give or take a half.
const FIRST_PAUSE: Duration = Duration::from_millis(25);

impl Connector {
    pub(crate) fn new(options: &PostgresOptions) -> Result<Connector, StoreError> {
        Ok(Connector {
            driver: options.driver.clone(),
            settings: Vec::new(),
            tls: crate::tls::connector(options)?,
            // The server gives up first, unless it is gone.
            patience: options.statement_timeout + Duration::from_secs(5),
            random: Mutex::new(Random::from_entropy()),
            names_failed: Arc::default(),
        })
    }

    /// For sessions that write: settings that a transaction of one statement cannot set for itself, because they must be in
    /// effect when the statement is planned or begins, or should not, because setting them costs a round trip.
    pub(crate) fn for_writers(options: &PostgresOptions) -> Result<Connector, StoreError> {
        let lookups = crate::compile::LOOKUPS.map(|(name, value)| (name, value.to_owned()));
        let timeouts =
            [("statement_timeout", options.statement_timeout), ("lock_timeout", options.lock_timeout)]
                .map(|(name, timeout)| (name, timeout.as_millis().to_string()));
        let isolation = ("default_transaction_isolation", "read committed".to_owned());
        let role = options.role().map(|role| ("role", role.to_owned()));
        let settings = lookups.into_iter().chain(timeouts).chain([isolation]).chain(role).collect();
        Ok(Connector { settings, ..Connector::new(options)? })
    }

    /// For sessions that read: what keeps their plans right, which a lone statement cannot set for itself. Where a pooler
    /// does not pass it on, the server plans as it would for anybody.
    pub(crate) fn for_readers(options: &PostgresOptions) -> Result<Connector, StoreError> {
        let lookups = crate::multi_read::LOOKUPS.map(|(name, value)| (name, value.to_owned()));
        // What takes too long ends at the server, too, before it is given up here and asked again.
        let timeout = ("statement_timeout", options.statement_timeout.as_millis().to_string());
        let settings = lookups.into_iter().chain([timeout]).collect();
        Ok(Connector { settings, ..Connector::new(options)? })
    }

    /// Exponential backoff with jitter before a connection attempt.
    pub(crate) async fn back_off(&self, attempt: u32) {
        let longest = FIRST_PAUSE.saturating_mul(1 << attempt.min(6));
        let share = 0.5 + self.random.lock().unwrap_or_else(PoisonError::into_inner).unit();
        SystemClock.sleep(longest.mul_f64(share)).await;
    }

    /// A random, growing pause before a transaction is retried after a conflict.
    pub(crate) async fn back_off_after_conflict(&self, attempt: u32) {
        let longest = Duration::from_millis(1 << attempt.min(8));
        let share = self.random.lock().unwrap_or_else(PoisonError::into_inner).unit();
        SystemClock.sleep(longest.mul_f64(share)).await;
    }

    /// Makes a session, with retries.
    pub(crate) async fn session(&self) -> Result<Arc<Session>, StoreError> {
        self.session_with(self.patience).await
    }

    /// Makes a session with this silence timeout, with retries.
    pub(crate) async fn session_with(&self, patience: Duration) -> Result<Arc<Session>, StoreError> {
        let mut attempt = 0;
        loop {
            let silence = self.driver.get_connect_timeout().copied().unwrap_or(patience) * HANDSHAKE;
            let connected = tokio::select! {
                biased;
                connected = self.connect(patience) => connected,
                () = SystemClock.sleep(silence) => {
                    Err(ConnectError::Transient(format!("it accepted a connection and did not answer for {silence:?}")))
                }
            };
            match connected {
                Ok(session) => return Ok(Arc::new(session)),
                Err(ConnectError::Final(error)) => return Err(error),
                Err(ConnectError::Transient(why)) if attempt + 1 == ATTEMPTS => {
                    return Err(StoreError::unavailable(format!("no connection to PostgreSQL: {why}")));
                }
                Err(ConnectError::Transient(_)) => self.back_off(attempt).await,
            }
            attempt += 1;
        }
    }

    async fn connect(&self, patience: Duration) -> Result<Session, ConnectError> {
        let transient = |error: tokio_postgres::Error| match PostgresFault::of(&error) {
            // A wrong password or database is not retried.
            fault if is_identity(&error) => {
                ConnectError::Final(StoreError::schema("the PostgreSQL server", fault.said()))
            }
            other => ConnectError::Transient(other.said().to_owned()),
        };
        let mark = {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            format!("{:016x}", random.next_u64())
        };
        let (client, connection) = match self.connect_set(&mark).await {
            Ok(connected) => connected,
            Err(error) if is_overloaded(&error) => return Err(transient(error)),
            // The settings were refused, for example by a pooler that does not know them.
            Err(_) => self.driver.connect(self.tls.clone()).await.map_err(transient)?,
        };
        let silence = Arc::new(SilenceTimeout::new(patience));
        let driver = tokio::spawn({
            let silence = silence.clone();
            async move {
                // Pending requests get the error.
                tokio::select! {
                    biased;
                    _ = connection => {}
                    () = silence.expired() => {}
                }
            }
        });
        let mut session = Session {
            client,
            driver: driver.abort_handle(),
            statements: Mutex::default(),
            gate: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            silence,
            is_own: false,
            is_set: false,
            names_failed: self.names_failed.clone(),
        };
        session.check().await?;
        let (is_marked, is_set) = self.accepted_settings(&session, &mark).await.unwrap_or_default();
        session.is_own = is_marked && !self.names_failed.load(Ordering::Relaxed);
        session.is_set = session.is_own && is_set;
        Ok(session)
    }

    /// A connection that requests the settings and its mark.
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
    async fn accepted_settings(&self, session: &Session, mark: &str) -> Option<(bool, bool)> {
        // `current_setting` returns a time with its unit; `pg_settings`, which lacks the role, returns the number.
        let question = "select current_setting($1::text, true) = $2::text, count(*) = cardinality($3::text[]) \
                        from unnest($3::text[], $4::text[]) as k(name, value) \
                        left join pg_settings as s on s.name = k.name \
                        where coalesce(s.setting, current_setting(k.name)) = k.value";
        let names = Arg::Texts(self.settings.iter().map(|(name, _)| *name).collect());
        let values = Arg::Texts(self.settings.iter().map(|(_, value)| value.as_str()).collect());
        let args = vec![Arg::Text(MARK), Arg::Text(mark), names, values];
        let rows = session.run(None, &[DatabaseCall::new(question, args)], None).await.rows.ok()?;
        let row = rows.first()?.first()?;
        let is = |index: usize| value_at(row, index, Type::Bool, "pg_settings").ok()?.as_bool();
        Some((is(0)?, is(1)?))
    }
}

type Connected = (Client, Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>);

fn is_identity(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| code.code().starts_with("28") || code.code() == "3D000")
}

/// Whether the server accepts no connections now, whatever their settings.
fn is_overloaded(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| ["53", "57"].iter().any(|class| code.code().starts_with(class)))
}

enum ConnectError {
    /// A retry may succeed.
    Transient(String),
    /// A retry cannot succeed.
    Final(StoreError),
}

/// The oldest supported server version: older ones lack features that the statements use.
const VERSION_MIN: i64 = 130_000;

impl Session {
    /// Refuses servers on which commits are not durable, or whose encoding is not UTF-8.
    async fn check(&self) -> Result<(), ConnectError> {
        let question = "select current_setting('server_version_num')::bigint, current_setting('fsync'), \
                        current_setting('synchronous_commit'), current_setting('server_encoding'), \
                        pg_is_in_recovery()";
        let answers = self.run(None, &[DatabaseCall::new(question, Vec::new())], None).await;
        let rows = answers.rows.map_err(|fault| ConnectError::Transient(fault.said().to_owned()))?;
        let Some(row) = rows.first().and_then(|rows| rows.first()) else {
            return Err(ConnectError::Transient("the server did not report its version".into()));
        };
        let server = "the PostgreSQL server";
        let read = |error: StoreError| ConnectError::Final(error);
        let refuse = |why: &str| Err(ConnectError::Final(StoreError::schema(server, why)));
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
            return Err(ConnectError::Transient("it is a standby and takes no writes".into()));
        }
        Ok(())
    }
}

/// A session that is made when it is needed.
#[derive(Default)]
pub(crate) struct LazyConnection {
    session: tokio::sync::Mutex<Option<Arc<Session>>>,
}

impl LazyConnection {
    /// The live session, or a new one if the last is closed.
    pub(crate) async fn session(&self, connector: &Connector) -> Result<Arc<Session>, StoreError> {
        let mut place = self.session.lock().await;
        match &*place {
            Some(session) if !session.is_closed() => Ok(session.clone()),
            _ => Ok(place.insert(connector.session().await?).clone()),
        }
    }

    /// Closes the session.
    pub(crate) async fn close(&self) {
        self.session.lock().await.take();
    }
}
