//! SQLite by hand: a writer thread that takes all waiting creates into one transaction, and a connection for each reader.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension as _, params};
use serde_json::Value as Json;
use statehouse_store::{Clock as _, SystemClock};
use tokio::sync::{mpsc, oneshot};

use super::{CATEGORIES, LoansByHand, MEMBERS, NewLoan, PAGE, READERS, TOOLS, event_of, tool_json};

const SCHEMA: &str = "
CREATE TABLE members (
    tenant TEXT NOT NULL, member_id INTEGER NOT NULL, name TEXT NOT NULL, status TEXT NOT NULL,
    updated_at INTEGER NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (tenant, member_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE loans (
    tenant TEXT NOT NULL, loan_id TEXT NOT NULL, code TEXT NOT NULL, member INTEGER NOT NULL, status TEXT NOT NULL,
    updated_at INTEGER NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (tenant, loan_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX loans_by_status ON loans (tenant, status, updated_at);
CREATE TABLE loans_code_unique (
    tenant TEXT NOT NULL, code TEXT NOT NULL, taken_by TEXT NOT NULL, PRIMARY KEY (tenant, code)
) STRICT, WITHOUT ROWID;
CREATE TABLE loans_member_refs (
    tenant TEXT NOT NULL, target INTEGER NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (tenant, target)
) STRICT, WITHOUT ROWID;
CREATE TABLE tools (
    tenant TEXT NOT NULL, tool_id INTEGER NOT NULL, category TEXT NOT NULL, name TEXT NOT NULL, price INTEGER NOT NULL,
    status TEXT NOT NULL, updated_at INTEGER NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (tenant, tool_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX tools_by_category ON tools (tenant, category, price);
CREATE TABLE log (
    position INTEGER PRIMARY KEY, tenant TEXT NOT NULL, operation TEXT NOT NULL, resource TEXT NOT NULL,
    key TEXT NOT NULL, at INTEGER NOT NULL, fate TEXT NOT NULL, events TEXT NOT NULL, UNIQUE (tenant, operation)
) STRICT;
";

/// Creates of one transaction at most.
const GROUP: usize = 256;

pub(super) struct SqliteLoans {
    queue: mpsc::Sender<(NewLoan, oneshot::Sender<bool>)>,
    readers: Vec<Mutex<Connection>>,
}

impl SqliteLoans {
    pub(super) fn open(path: &Path) -> Result<SqliteLoans> {
        let writer = Connection::open(path)?;
        writer.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
        writer.execute_batch("PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 8000;")?;
        writer.execute_batch(SCHEMA)?;
        writer.execute_batch("BEGIN")?;
        for member in 0..MEMBERS as i64 {
            writer
                .execute("INSERT INTO members VALUES ('acme', ?1, 'a member', 'ACTIVE', 0, 1)", [member])?;
        }
        for tool in 0..TOOLS as i64 {
            let category = format!("category {}", tool % CATEGORIES as i64);
            writer.execute(
                "INSERT INTO tools VALUES ('acme', ?1, ?2, 'a tool', ?3, 'ACTIVE', 0, 1)",
                params![tool, category, tool * 7 % 1_000],
            )?;
        }
        writer.execute_batch("COMMIT")?;
        let (queue, mut creates) = mpsc::channel(1024);
        std::thread::spawn(move || {
            let mut waiting = Vec::new();
            while creates.blocking_recv_many(&mut waiting, GROUP) > 0 {
                // A failed write drops the senders, which the callers notice.
                let _ = write(&writer, &mut waiting);
                waiting.clear();
            }
        });
        let reader = |_| -> Result<_> { Ok(Mutex::new(Connection::open(path)?)) };
        Ok(SqliteLoans { queue, readers: (0..READERS).map(reader).collect::<Result<_>>()? })
    }
}

/// One transaction of all creates that wait.
fn write(writer: &Connection, waiting: &mut Vec<(NewLoan, oneshot::Sender<bool>)>) -> rusqlite::Result<()> {
    let now = SystemClock.now().micros();
    writer.execute_batch("BEGIN IMMEDIATE")?;
    let mut answers = Vec::with_capacity(waiting.len());
    for (loan, done) in waiting.drain(..) {
        answers.push((done, create(writer, &loan, now)?));
    }
    writer.execute_batch("COMMIT")?;
    for (done, is_created) in answers {
        // A caller that has gone away does not need the answer.
        let _ = done.send(is_created);
    }
    Ok(())
}

/// The statements of one create. A member who is not there, or a code that is taken, leaves nothing.
fn create(writer: &Connection, loan: &NewLoan, now: i64) -> rusqlite::Result<bool> {
    let mut member =
        writer.prepare_cached("SELECT status FROM members WHERE tenant = 'acme' AND member_id = ?1")?;
    let status: Option<String> = member.query_row([loan.member], |row| row.get(0)).optional()?;
    let mut taken =
        writer.prepare_cached("SELECT 1 FROM loans_code_unique WHERE tenant = 'acme' AND code = ?1")?;
    if status.as_deref() != Some("ACTIVE") || taken.exists([&loan.code])? {
        return Ok(false);
    }
    writer
        .prepare_cached("INSERT INTO loans_code_unique VALUES ('acme', ?1, ?2)")?
        .execute(params![loan.code, loan.id])?;
    writer
        .prepare_cached(
            "INSERT INTO loans_member_refs VALUES ('acme', ?1, 1) ON CONFLICT DO UPDATE SET n = n + 1",
        )?
        .execute([loan.member])?;
    writer
        .prepare_cached("INSERT INTO loans VALUES ('acme', ?1, ?2, ?3, 'ACTIVE', ?4, 1)")?
        .execute(params![loan.id, loan.code, loan.member, now])?;
    writer
        .prepare_cached(
            "INSERT INTO log (tenant, operation, resource, key, at, fate, events) \
             VALUES ('acme', ?1, 'loan', ?2, ?3, 'applied', ?4)",
        )?
        .execute(params![loan.operation, loan.id, now, event_of(loan)])?;
    Ok(true)
}

#[async_trait]
impl LoansByHand for SqliteLoans {
    async fn create(&self, _: u64, loan: NewLoan) -> Result<bool> {
        let (done, answer) = oneshot::channel();
        self.queue.send((loan, done)).await.ok().context("the writer is gone")?;
        Ok(answer.await?)
    }

    async fn page(&self, caller: u64, category: &str) -> Result<Vec<Json>> {
        let reader = self.readers.get(caller as usize).context("no connection")?;
        let reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
        let mut select = reader.prepare_cached(
            "SELECT tool_id, name, price, updated_at, version FROM tools \
             WHERE tenant = 'acme' AND category = ?1 AND status = 'ACTIVE' ORDER BY price DESC, tool_id DESC LIMIT ?2",
        )?;
        let tool =
            |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?));
        let rows = select.query_map(params![category, PAGE], tool)?;
        rows.map(|row| Ok(tool_json(category, row?))).collect()
    }
}
