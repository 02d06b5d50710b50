//! The same rows by hand: what a careful engineer would write who has them in memory already.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use rusqlite::{Connection, params};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock as _, SystemClock};
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls, Statement};

use super::{BODY, CALLERS, MANY, Post, followers};

/// How long a post is shown, as the feed has it if nothing else is declared.
const KEEP: Duration = Duration::from_secs(30 * 86_400);

/// A writer of rows of readers.
#[async_trait]
pub(super) trait FeedByHand: Send + Sync {
    /// Writes the rows of posts, so many at once, and says how many a second that was.
    async fn write(&self, posts: &[Post], at_once: usize) -> Result<f64>;
}

/// A row: its reader, time in microseconds, post, author, and end.
type FeedRow = (i64, i64, i64, i64, i64);

fn rows(posts: &[Post]) -> Vec<FeedRow> {
    let of = |post: &Post| {
        let (number, author) = (post.number as i64, post.author());
        let (at, end) = (post.at().micros(), post.at().plus(KEEP).micros());
        followers(author).map(move |reader| (reader as i64, at, number, author as i64, end))
    };
    posts.iter().flat_map(of).collect()
}

/// The table for writes of this size. The same rows are written twice, so there are two.
fn table(at_once: usize) -> &'static str {
    if at_once == MANY { "user_feed_many" } else { "user_feed" }
}

/// PostgreSQL: `insert … select unnest`, a transaction by itself, over as many connections as the store writes with.
pub(super) struct PostgresByHand {
    writers: Vec<Arc<Client>>,
    readers: Vec<(Client, Statement)>,
}

/// As many as the store has if it is not told otherwise.
const WRITERS: usize = 2;

impl PostgresByHand {
    pub(super) async fn open(url: &str) -> Result<PostgresByHand> {
        let mut clients = Vec::new();
        let most = CALLERS.iter().max().copied().unwrap_or(1) as usize;
        for _ in 0..WRITERS + most {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            clients.push(client);
        }
        let mut writers = Vec::new();
        for client in clients.drain(..WRITERS) {
            writers.push(Arc::new(client));
        }
        let first = writers.first().context("no connection")?;
        first
            .batch_execute(
                "drop schema if exists bench_feed_by_hand cascade; create schema bench_feed_by_hand",
            )
            .await?;
        for table in [table(0), table(MANY)] {
            let create = format!(
                "create table bench_feed_by_hand.{table} (
                    tenant text collate \"C\" not null, generation bigint not null, viewer_id bigint not null,
                    created_at timestamptz not null, post_id bigint not null, author_id bigint not null,
                    post_preview text, expires_at timestamptz not null, version bigint not null default 1,
                    primary key (tenant, generation, viewer_id, created_at, post_id)
                )"
            );
            first.batch_execute(&create).await?;
        }
        let mut readers = Vec::new();
        for client in clients {
            let statement = client.prepare(SELECT).await?;
            readers.push((client, statement));
        }
        Ok(PostgresByHand { writers, readers })
    }

    /// Lets the server look at the tables.
    pub(super) async fn settle(&self) -> Result<()> {
        let client = self.writers.first().context("no connection")?;
        Ok(client.batch_execute("analyze bench_feed_by_hand.user_feed").await?)
    }

    /// Reads a page of a reader's feed, and says how many rows it has.
    pub(super) async fn page(&self, caller: u64, reader: i64, limit: i64) -> Result<usize> {
        let (client, statement) = self.readers.get(caller as usize).context("no connection")?;
        let oldest = SystemClock.now().minus(KEEP).micros();
        let rows = client.query(statement, &[&"acme", &1_i64, &reader, &oldest, &limit]).await?;
        let read = |row: &tokio_postgres::Row| {
            anyhow::Ok((
                row.try_get::<_, i64>(0)?,
                row.try_get::<_, i64>(1)?,
                row.try_get::<_, Option<String>>(2)?,
                row.try_get::<_, i64>(3)?,
                row.try_get::<_, i64>(4)?,
            ))
        };
        let page = rows.iter().map(read).collect::<Result<Vec<_>>>()?;
        Ok(std::hint::black_box(page).len())
    }

    /// Takes the tables away.
    pub(super) async fn erase(&self) -> Result<()> {
        let client = self.writers.first().context("no connection")?;
        Ok(client.batch_execute("drop schema bench_feed_by_hand cascade").await?)
    }
}

/// Microseconds as the server's time, and back: so that the driver needs no library of dates.
const SELECT: &str = "
select post_id, author_id, post_preview, (extract(epoch from created_at) * 1000000)::bigint,
    (extract(epoch from expires_at) * 1000000)::bigint
from bench_feed_by_hand.user_feed
where tenant = $1 and generation = $2 and viewer_id = $3
    and created_at >= 'epoch'::timestamptz + $4::bigint * interval '1 microsecond'
order by created_at desc, post_id desc
limit $5";

#[async_trait]
impl FeedByHand for PostgresByHand {
    async fn write(&self, posts: &[Post], at_once: usize) -> Result<f64> {
        let insert = format!(
            "insert into bench_feed_by_hand.{}
                (tenant, generation, viewer_id, created_at, post_id, author_id, post_preview, expires_at, version)
             select 'acme', 1, viewer_id, 'epoch'::timestamptz + created_at * interval '1 microsecond', post_id,
                author_id, post_preview, 'epoch'::timestamptz + expires_at * interval '1 microsecond', 1
             from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[])
                as rows(viewer_id, created_at, post_id, author_id, post_preview, expires_at)",
            table(at_once)
        );
        let rows = rows(posts);
        let mut shares: Vec<Vec<Vec<FeedRow>>> = vec![Vec::new(); self.writers.len()];
        for (batch, share) in rows.chunks(at_once).zip((0..shares.len()).cycle()) {
            shares.get_mut(share).context("no connection")?.push(batch.to_vec());
        }
        let mut statements = Vec::new();
        for client in &self.writers {
            statements.push(client.prepare(&insert).await?);
        }
        let watch = Stopwatch::start();
        let mut writing: JoinSet<Result<()>> = JoinSet::new();
        for ((client, statement), share) in self.writers.iter().cloned().zip(statements).zip(shares) {
            writing.spawn(async move {
                for batch in share {
                    let column = |of: fn(&FeedRow) -> i64| batch.iter().map(of).collect::<Vec<i64>>();
                    let (readers, times) = (column(|row| row.0), column(|row| row.1));
                    let (posts, authors, ends) =
                        (column(|row| row.2), column(|row| row.3), column(|row| row.4));
                    let previews = vec![BODY; batch.len()];
                    client
                        .execute(&statement, &[&readers, &times, &posts, &authors, &previews, &ends])
                        .await?;
                }
                Ok(())
            });
        }
        while let Some(written) = writing.join_next().await {
            written??;
        }
        Ok(rows.len() as f64 / watch.elapsed().as_secs_f64())
    }
}

/// SQLite: a prepared insert, a transaction for so many rows, synchronized before it is done.
pub(super) struct SqliteByHand {
    connection: Mutex<Connection>,
    _folder: tempfile::TempDir,
}

impl SqliteByHand {
    pub(super) fn open() -> Result<SqliteByHand> {
        let folder = tempfile::tempdir()?;
        let connection = Connection::open(folder.path().join("by_hand.db"))?;
        connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
        connection.execute_batch("PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 8000;")?;
        for table in [table(0), table(MANY)] {
            connection.execute_batch(&format!(
                "CREATE TABLE {table} (
                    tenant TEXT NOT NULL, generation INTEGER NOT NULL, viewer_id INTEGER NOT NULL,
                    created_at INTEGER NOT NULL, post_id INTEGER NOT NULL, author_id INTEGER NOT NULL,
                    post_preview TEXT, expires_at INTEGER NOT NULL, version INTEGER NOT NULL,
                    PRIMARY KEY (tenant, generation, viewer_id, created_at, post_id)
                ) STRICT, WITHOUT ROWID"
            ))?;
        }
        Ok(SqliteByHand { connection: Mutex::new(connection), _folder: folder })
    }
}

#[async_trait]
impl FeedByHand for SqliteByHand {
    async fn write(&self, posts: &[Post], at_once: usize) -> Result<f64> {
        let rows = rows(posts);
        let insert = format!("INSERT INTO {} VALUES ('acme', 1, ?1, ?2, ?3, ?4, ?5, ?6, 1)", table(at_once));
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let watch = Stopwatch::start();
        for batch in rows.chunks(at_once) {
            connection.execute_batch("BEGIN IMMEDIATE")?;
            let mut insert = connection.prepare_cached(&insert)?;
            for (reader, at, post, author, end) in batch {
                insert.execute(params![reader, at, post, author, BODY, end])?;
            }
            connection.execute_batch("COMMIT")?;
        }
        Ok(rows.len() as f64 / watch.elapsed().as_secs_f64())
    }
}
