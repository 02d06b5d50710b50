//! SQLite: a guarded update and its log record, against the same SQL written by hand.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rusqlite::{Connection, params};
use statehouse_store::{Ids, Random, SystemClock};
use statehouse_store_sqlite::{SqliteOptions, SqliteStore};
use tokio::sync::{mpsc, oneshot};

use crate::load::{self, LoadRound, drive, median, ratio};
use crate::report;
use crate::waist::{ROWS, Waist, name, pick};

const CALLERS: u64 = 64;
const ROUNDS: usize = 9;
const SPAN: Duration = Duration::from_millis(700);

/// Measures and prints.
pub async fn run() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let store = SqliteStore::open(SqliteOptions::at(folder.path().join("house.db"))).await?;
    let house = Arc::new(Waist::over(Arc::new(store)).await?);
    // The store comes first and alone, so that the memory is its own.
    house.writes(CALLERS, SPAN).await?;
    let resident = load::peak_resident_bytes();
    let by_hand = Arc::new(SqliteRowsByHand::open(&folder.path().join("grouped.db"), 256)?);
    let one_by_one = Arc::new(SqliteRowsByHand::open(&folder.path().join("single.db"), 1)?);
    let (mut ours, mut grouped, mut single) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        grouped.push(by_hand.writes().await?);
        single.push(one_by_one.writes().await?);
        ours.push(house.writes(CALLERS, SPAN).await?);
    }
    report::heading(&format!("SQLite: guarded update + log record, {CALLERS} callers"));
    report::measured("Statehouse", median(&ours)?);
    report::measured("by hand, group commit", median(&grouped)?);
    report::measured("by hand, a commit for each", median(&single)?);
    report::ratio("Statehouse / by hand, group commit", ratio(&ours, &grouped)?, 0.8);
    report::ratio("Statehouse / by hand, a commit for each", ratio(&ours, &single)?, 6.0);
    if let Some(bytes) = resident {
        report::bounded("resident memory, store opened and loaded", bytes as f64 / 1e6, "MB", 100.0);
    }

    let (mut ours, mut reference) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ours.push(house.reads(SPAN).await?);
        reference.push(by_hand.reads().await?);
    }
    report::heading("SQLite: point reads, 1 caller");
    report::measured("Statehouse", median(&ours)?);
    report::measured("by hand, prepared statement", median(&reference)?);
    report::ratio("Statehouse / by hand", ratio(&ours, &reference)?, 0.7);
    house.store().close().await;
    Ok(())
}

/// The same by hand: a writer thread, a queue, prepared statements, one transaction for what waits.
struct SqliteRowsByHand {
    queue: mpsc::Sender<SqliteUpdate>,
    reader: Mutex<Connection>,
    ids: Ids,
}

struct SqliteUpdate {
    user: i64,
    name: String,
    operation: String,
    events: String,
    done: oneshot::Sender<bool>,
}

const SCHEMA: &str = "
CREATE TABLE profiles (
    tenant TEXT NOT NULL, user_id INTEGER NOT NULL, display_name TEXT NOT NULL, bio TEXT,
    status TEXT NOT NULL DEFAULT 'ACTIVE', updated_at INTEGER NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (tenant, user_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE log (
    position INTEGER PRIMARY KEY, tenant TEXT NOT NULL, operation TEXT NOT NULL, resource TEXT NOT NULL,
    key TEXT NOT NULL, at INTEGER NOT NULL, fingerprint TEXT NOT NULL, fate TEXT NOT NULL, events TEXT NOT NULL,
    UNIQUE (tenant, operation)
) STRICT;
";

impl SqliteRowsByHand {
    fn open(path: &Path, batch: usize) -> Result<SqliteRowsByHand> {
        let writer = Connection::open(path)?;
        writer.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
        writer.execute_batch("PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 8000;")?;
        writer.execute_batch(SCHEMA)?;
        writer.execute_batch("BEGIN")?;
        for user in 0..ROWS as i64 {
            writer.execute(
                "INSERT INTO profiles VALUES ('acme', ?1, 'a person', \
                 'a few words about a person, as people write them', 'ACTIVE', 0, 1)",
                [user],
            )?;
        }
        writer.execute_batch("COMMIT")?;
        let (queue, mut updates) = mpsc::channel::<SqliteUpdate>(1024);
        std::thread::spawn(move || {
            let mut waiting = Vec::new();
            let mut position = 0;
            while updates.blocking_recv_many(&mut waiting, batch) > 0 {
                // A failed write drops the senders, which the callers notice.
                let _ = write(&writer, &mut waiting, &mut position);
                waiting.clear();
            }
        });
        let reader = Mutex::new(Connection::open(path)?);
        Ok(SqliteRowsByHand { queue, reader, ids: Ids::new(Arc::new(SystemClock), Random::from_entropy()) })
    }

    async fn writes(self: &Arc<SqliteRowsByHand>) -> Result<LoadRound> {
        let by_hand = self.clone();
        drive(CALLERS, SPAN, move |caller, number| {
            let by_hand = by_hand.clone();
            async move {
                let (done, answer) = oneshot::channel();
                let name = name(number);
                let events = serde_json::json!([{"name": "profile.updated", "data": {"display_name": name}}]);
                let update = SqliteUpdate {
                    user: pick(caller, number),
                    name,
                    operation: by_hand.ids.next(),
                    events: events.to_string(),
                    done,
                };
                by_hand.queue.send(update).await.ok().context("the writer is gone")?;
                ensure!(answer.await?, "not applied");
                Ok(())
            }
        })
        .await
    }

    async fn reads(self: &Arc<SqliteRowsByHand>) -> Result<LoadRound> {
        let by_hand = self.clone();
        drive(1, SPAN, move |caller, number| {
            let by_hand = by_hand.clone();
            async move {
                let reader = by_hand.reader.lock().unwrap_or_else(PoisonError::into_inner);
                let mut select = reader.prepare_cached(
                    "SELECT user_id, display_name, bio, status, updated_at, version FROM profiles \
                     WHERE tenant = ?1 AND user_id = ?2",
                )?;
                let row = select.query_row(params!["acme", pick(caller, number)], |row| {
                    Ok((
                        row.get::<_, i64>(0)?,
                        row.get::<_, String>(1)?,
                        row.get::<_, Option<String>>(2)?,
                        row.get::<_, String>(3)?,
                        row.get::<_, i64>(4)?,
                        row.get::<_, i64>(5)?,
                    ))
                })?;
                std::hint::black_box(row);
                Ok(())
            }
        })
        .await
    }
}

/// One transaction of all updates that wait.
fn write(writer: &Connection, waiting: &mut Vec<SqliteUpdate>, position: &mut i64) -> rusqlite::Result<()> {
    let now = statehouse_store::Clock::now(&SystemClock).micros();
    writer.execute_batch("BEGIN IMMEDIATE")?;
    let mut answers = Vec::with_capacity(waiting.len());
    for update in waiting.drain(..) {
        let changed = writer
            .prepare_cached(
                "UPDATE profiles SET display_name = ?1, updated_at = ?2, version = version + 1 \
                 WHERE tenant = ?3 AND user_id = ?4 AND status = 'ACTIVE'",
            )?
            .execute(params![update.name, now, "acme", update.user])?;
        *position += 1;
        writer
            .prepare_cached("INSERT INTO log VALUES (?1, 'acme', ?2, 'profile', ?3, ?4, '', 'applied', ?5)")?
            .execute(params![*position, update.operation, update.user.to_string(), now, update.events])?;
        answers.push((update.done, changed == 1));
    }
    writer.execute_batch("COMMIT")?;
    for (done, applied) in answers {
        // A caller that has gone away does not need the answer.
        let _ = done.send(applied);
    }
    Ok(())
}
