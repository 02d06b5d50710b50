//! Takes on PostgreSQL: one statement finds, locks and changes the rows (`crate::compile::taken`); the commit follows when
//! its answer is here. So whoever loses the answer to the commit knows which rows it is about, and finds out by plans, under
//! the same operation id: each either takes its row now, or meets the mark on it.
//!
//! Takers have connections of their own, each for one take at a time: what is claimed need not wait for what is written.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use statehouse_store::{ClaimRange, Row, StoreError, Value};

use crate::compile::lookup_words;
use crate::link::{Closing, Link, Session};
use crate::reader::ATTEMPTS;
use crate::shared::Shared;
use crate::tenancy::Scope;

/// The range is read by an index that has its rows in their order.
pub(crate) const IN_ORDER: &str = "; set local enable_sort = off; set local enable_bitmapscan = off";

/// A taker's connection. Whoever holds the turn may use it.
#[derive(Default)]
pub(crate) struct Taker {
    pub link: Link,
    turn: tokio::sync::Mutex<()>,
}

/// What came of a take.
pub(crate) enum Taking {
    /// These rows were taken, and nothing else is to be had.
    Taken(Vec<Row>),
    /// These rows were taken; others are there for which the statement did nothing.
    Partly(Vec<Row>),
    /// The rows with these keys were taken, or not.
    Unknown(Vec<Vec<Value>>),
    /// Nothing was done.
    NotMade,
}

impl Shared {
    /// Takes rows by one statement. It must not be dropped midway: the transaction would stay open.
    pub(crate) async fn take(self: Arc<Self>, take: ClaimRange) -> Result<Taking, StoreError> {
        let next = self.next_taker.fetch_add(1, Ordering::Relaxed);
        let free = self.takers.iter().find_map(|taker| Some((taker, taker.turn.try_lock().ok()?)));
        let (taker, _turn) = match (free, self.takers.get(next % self.takers.len().max(1))) {
            (Some(free), _) => free,
            (None, Some(taker)) => (taker, taker.turn.lock().await),
            (None, None) => return Ok(Taking::NotMade),
        };
        for _ in 0..ATTEMPTS {
            let session = taker.link.session(&self.writer_dialer).await?;
            if let Some(taking) = self.take_on(&session, &take).await? {
                return Ok(taking);
            }
        }
        Ok(Taking::NotMade)
    }

    /// `None` if somebody was in the way, or the connection went before there was anything to commit.
    async fn take_on(&self, session: &Session, take: &ClaimRange) -> Result<Option<Taking>, StoreError> {
        let Some(taken) = self.compiler().taken(&self.takes, take) else { return Ok(Some(Taking::NotMade)) };
        let planner = if session.is_set() { String::new() } else { lookup_words() } + IN_ORDER;
        let lock_timeout_ms = self.options.lock_timeout.as_millis();
        let open = self.options.open_words(lock_timeout_ms, &planner, &Scope::of(take.tenant()));
        let answers = session.run(Some(&open), std::slice::from_ref(&taken.call), None).await;
        let rows = match answers.rows {
            Ok(rows) => rows,
            Err(fault) => {
                session.tell("rollback").await;
                return Ok((!fault.is_passing()).then_some(Taking::NotMade));
            }
        };
        let (rows, others) = match taken.rows(rows.first().map(Vec::as_slice).unwrap_or_default()) {
            Ok(answer) => answer,
            Err(error) => {
                session.tell("rollback").await;
                return Err(error);
            }
        };
        if rows.is_empty() {
            session.tell("rollback").await;
            return Ok(Some(Taking::Partly(rows)));
        }
        let closed = session.run(None, &[], Some("commit")).await;
        self.counters.taken.fetch_add(rows.len() as u64, Ordering::Relaxed);
        Ok(Some(match (closed.rows, closed.closing) {
            (Ok(_), Closing::Done) if others => Taking::Partly(rows),
            (Ok(_), Closing::Done) => Taking::Taken(rows),
            _ => Taking::Unknown(rows.iter().map(|row| row.key().to_vec()).collect()),
        }))
    }
}
