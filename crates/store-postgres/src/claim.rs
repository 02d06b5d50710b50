//! `claim_range` on PostgreSQL: one statement finds, locks and changes the rows ([`crate::compile`]). The commit is sent after its
//! answer has arrived. So a caller that loses the answer to the commit knows the keys of the rows. It then commits one plan for each
//! under the same operation id: the plan claims the row now, or finds the operation id in the mark column.
//!
//! Claims have connections of their own, one claim at a time on each, so that they do not wait for writers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use statehouse_store::bug;
use statehouse_store::{ClaimRange, Row, StoreError, Value};

use crate::compile::lookup_settings_sql;
use crate::connection::{Closing, LazyConnection, Session};
use crate::reader::ATTEMPTS;
use crate::shared::Shared;
use crate::tenancy::TransactionScope;

/// Planner settings that make the server read the range by an index in its order.
pub(crate) const IN_ORDER: &str = "; set local enable_sort = off; set local enable_bitmapscan = off";

/// A connection for claims. The holder of `turn` may use it.
#[derive(Default)]
pub(crate) struct ClaimConnection {
    pub connection: LazyConnection,
    turn: tokio::sync::Mutex<()>,
}

/// The outcome of a claim.
pub(crate) enum ClaimOutcome {
    /// These rows were claimed, and no others are available.
    Complete(Vec<Row>),
    /// These rows were claimed. The range has others for which the statement did nothing.
    Partial(Vec<Row>),
    /// It is not known whether the rows with these keys were claimed.
    Unknown(Vec<Vec<Value>>),
    /// Nothing was done.
    NotRun,
}

impl Shared {
    /// Claims rows by one statement. The future must not be dropped before it ends: the transaction would stay open.
    pub(crate) async fn claim(self: Arc<Self>, claim: ClaimRange) -> Result<ClaimOutcome, StoreError> {
        let next = self.next_claim_connection.fetch_add(1, Ordering::Relaxed);
        let free = self.claim_connections.iter().find_map(|one| Some((one, one.turn.try_lock().ok()?)));
        let (connection, _turn) =
            match (free, self.claim_connections.get(next % self.claim_connections.len().max(1))) {
                (Some(free), _) => free,
                (None, Some(connection)) => (connection, connection.turn.lock().await),
                (None, None) => return Ok(ClaimOutcome::NotRun),
            };
        for _ in 0..ATTEMPTS {
            let session = connection.connection.session(&self.writer_connector).await?;
            if let Some(outcome) = self.claim_on(&session, &claim).await? {
                return Ok(outcome);
            }
        }
        Ok(ClaimOutcome::NotRun)
    }

    /// `None` if another transaction conflicted, or the connection was lost before the commit was sent.
    async fn claim_on(
        &self,
        session: &Session,
        claim: &ClaimRange,
    ) -> Result<Option<ClaimOutcome>, StoreError> {
        let Some(compiled) = self.compiler().claim(&self.claim_texts, claim) else {
            return Ok(Some(ClaimOutcome::NotRun));
        };
        let planner = if session.is_set() { String::new() } else { lookup_settings_sql() } + IN_ORDER;
        let lock_timeout_ms = self.options.lock_timeout.as_millis();
        let open = self.options.begin_sql(lock_timeout_ms, &planner, &TransactionScope::of(claim.tenant()));
        let answers = session.run(Some(&open), std::slice::from_ref(&compiled.call), None).await;
        let rows = match answers.rows {
            Ok(rows) => rows,
            Err(fault) => {
                session.execute_unawaited("rollback").await;
                return Ok((!fault.is_passing()).then_some(ClaimOutcome::NotRun));
            }
        };
        let unanswered = || StoreError::from(bug!("a statement without an answer"));
        let (rows, others) = match rows.first().ok_or_else(unanswered).and_then(|rows| compiled.rows(rows)) {
            Ok(answer) => answer,
            Err(error) => {
                session.execute_unawaited("rollback").await;
                return Err(error);
            }
        };
        if rows.is_empty() {
            session.execute_unawaited("rollback").await;
            return Ok(Some(ClaimOutcome::Partial(rows)));
        }
        let closed = session.run(None, &[], Some("commit")).await;
        self.counters.taken.fetch_add(rows.len() as u64, Ordering::Relaxed);
        Ok(Some(match (closed.rows, closed.closing) {
            (Ok(_), Closing::Done) if others => ClaimOutcome::Partial(rows),
            (Ok(_), Closing::Done) => ClaimOutcome::Complete(rows),
            _ => ClaimOutcome::Unknown(rows.iter().map(|row| row.key().to_vec()).collect()),
        }))
    }
}
