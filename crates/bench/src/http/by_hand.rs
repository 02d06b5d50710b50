//! The same update as a developer would write it for this one table: axum, a writer thread that commits what waits in one
//! transaction, prepared statements, and an outbox. It knows no tenants, retries or other resources, and its answer is
//! durable too. What it reaches is about what this machine has to give.

use std::path::Path;

use anyhow::{Context, Result};
use axum::extract::{Path as Key, State};
use axum::http::header::{ETAG, IF_MATCH};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::put;
use axum::{Json, Router};
use rusqlite::{Connection, OptionalExtension as _, params};
use serde::{Deserialize, Serialize};
use statehouse_store::{Clock as _, Ids, Random, SystemClock};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use super::generator;
use super::{CONNECTIONS, ROWS_EACH};

/// Updates in one transaction.
const BATCH: usize = 256;

const SCHEMA: &str = "
CREATE TABLE profiles (
    user_id INTEGER PRIMARY KEY, display_name TEXT NOT NULL, bio TEXT, avatar_url TEXT, points INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'ACTIVE', updated_at INTEGER NOT NULL, version INTEGER NOT NULL
) STRICT;
CREATE TABLE outbox (
    position INTEGER PRIMARY KEY, operation TEXT NOT NULL UNIQUE, resource TEXT NOT NULL, key TEXT NOT NULL,
    at INTEGER NOT NULL, events TEXT NOT NULL
) STRICT;
";

#[derive(Clone, Deserialize, Serialize)]
struct Profile {
    display_name: String,
    bio: Option<String>,
    avatar_url: Option<String>,
    points: i64,
}

#[derive(Serialize)]
struct Stored {
    user_id: i64,
    #[serde(flatten)]
    profile: Profile,
    updated_at: i64,
    version: i64,
}

/// A profile to be stored under a version, and who waits for it.
struct HttpUpdate {
    user: i64,
    version: i64,
    profile: Profile,
    operation: String,
    done: oneshot::Sender<Option<Stored>>,
}

#[derive(Clone)]
struct Front {
    queue: mpsc::Sender<HttpUpdate>,
    ids: Arc<Ids>,
}

/// Starts it on a new file and returns its port.
pub async fn start(folder: &Path) -> Result<u16> {
    let writer = filled(&folder.join("by-hand.db"))?;
    let (queue, mut updates) = mpsc::channel::<HttpUpdate>(1024);
    std::thread::spawn(move || {
        let mut waiting = Vec::new();
        while updates.blocking_recv_many(&mut waiting, BATCH) > 0 {
            // A failed write drops the senders, which the callers notice.
            let _ = write(&writer, &mut waiting);
            waiting.clear();
        }
    });
    let ids = Arc::new(Ids::new(Arc::new(SystemClock), Random::from_entropy()));
    let router = Router::new().route("/v1/profile/{user}", put(update)).with_state(Front { queue, ids });
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(port)
}

fn filled(path: &Path) -> Result<Connection> {
    let writer = Connection::open(path)?;
    writer.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
    writer.execute_batch("PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 8000;")?;
    writer.execute_batch(SCHEMA)?;
    let profile: Profile = serde_json::from_value(generator::fields(0).into())?;
    writer.execute_batch("BEGIN")?;
    for user in 0..CONNECTIONS * ROWS_EACH {
        writer.prepare_cached("INSERT INTO profiles VALUES (?1, ?2, ?3, ?4, ?5, 'ACTIVE', 0, 1)")?.execute(
            params![user as i64, profile.display_name, profile.bio, profile.avatar_url, profile.points],
        )?;
    }
    writer.execute_batch("COMMIT")?;
    Ok(writer)
}

async fn update(
    State(front): State<Front>,
    Key(user): Key<i64>,
    headers: HeaderMap,
    Json(profile): Json<Profile>,
) -> Response {
    let given = headers.get(IF_MATCH).and_then(|value| value.to_str().ok());
    let Some(version) = given.and_then(|value| value.trim_matches('"').parse().ok()) else {
        return StatusCode::PRECONDITION_REQUIRED.into_response();
    };
    match stored(&front, user, version, profile).await {
        Ok(Some(row)) => ([(ETAG, format!("\"{}\"", row.version))], Json(row)).into_response(),
        Ok(None) => StatusCode::PRECONDITION_FAILED.into_response(),
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

async fn stored(front: &Front, user: i64, version: i64, profile: Profile) -> Result<Option<Stored>> {
    let (done, answer) = oneshot::channel();
    let update = HttpUpdate { user, version, profile, operation: front.ids.next(), done };
    front.queue.send(update).await.ok().context("the writer is gone")?;
    Ok(answer.await?)
}

/// One transaction of all updates that wait.
fn write(writer: &Connection, waiting: &mut Vec<HttpUpdate>) -> Result<()> {
    let now = SystemClock.now().micros();
    writer.execute_batch("BEGIN IMMEDIATE")?;
    let mut answers = Vec::with_capacity(waiting.len());
    for update in waiting.drain(..) {
        let HttpUpdate { user, version, profile, operation, done } = update;
        let new: Option<i64> = writer
            .prepare_cached(
                "UPDATE profiles SET display_name = ?1, bio = ?2, avatar_url = ?3, points = ?4, updated_at = ?5, \
                 version = version + 1 WHERE user_id = ?6 AND version = ?7 AND status = 'ACTIVE' RETURNING version",
            )?
            .query_row(
                params![profile.display_name, profile.bio, profile.avatar_url, profile.points, now, user, version],
                |row| row.get(0),
            )
            .optional()?;
        let row = new.map(|version| Stored { user_id: user, profile, updated_at: now, version });
        if let Some(row) = &row {
            let events = serde_json::json!([{"name": "profile.updated", "data": {"row": row}}]).to_string();
            writer
                .prepare_cached(
                    "INSERT INTO outbox (operation, resource, key, at, events) VALUES (?1, 'profile', ?2, ?3, ?4)",
                )?
                .execute(params![operation, user.to_string(), now, events])?;
        }
        answers.push((done, row));
    }
    writer.execute_batch("COMMIT")?;
    for (done, row) in answers {
        // A caller that has gone away does not need the answer.
        let _ = done.send(row);
    }
    Ok(())
}
