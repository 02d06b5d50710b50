//! How far a reader has got: a cursor that never goes back (F5).

use std::cmp::Ordering;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::guard::now;
use statehouse_store::table::VERSION;
use statehouse_store::{EventTemplate, Guard, Reason, Row, Step, Value};

use super::{
    CREATED_AT, FeedSpec, LAST_SEEN_AT, LAST_SEEN_CREATED_AT, LAST_SEEN_POST, POST, UPDATED_AT, VIEWER,
};
use crate::action::{
    ActionContext, Answer, Call, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::resource::key_text;

pub(super) struct MarkSeen {
    pub feed: Arc<FeedSpec>,
}

impl FeedSpec {
    /// The cursor of a reader, if anything was seen.
    pub(super) async fn cursor(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Option<Row>, Refusal> {
        cx.row(&self.cursors, &call.tenant, call.key.iter().cloned()).await
    }

    /// The cursor of a reader who has seen nothing.
    pub(super) fn unseen(call: &Call) -> Json {
        let viewer = call.key.first().map(Value::to_json);
        json!({
            VIEWER: viewer, LAST_SEEN_POST: null, LAST_SEEN_CREATED_AT: null, LAST_SEEN_AT: null,
            UPDATED_AT: null, VERSION: 0,
        })
    }
}

/// Whether a place in the feed is before the one that a cursor is at.
fn is_ahead(row: &Row, created: &Value, post: &Value) -> bool {
    let order = |column: &str, value: &Value| row.get(column).and_then(|seen| value.compare(seen));
    let order = order(LAST_SEEN_CREATED_AT, created)
        .unwrap_or(Ordering::Equal)
        .then(order(LAST_SEEN_POST, post).unwrap_or(Ordering::Equal));
    order.is_gt()
}

#[async_trait]
impl Prepare for MarkSeen {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let feed = &self.feed;
        let (created, post) = (call.input.value_or_null(CREATED_AT), call.input.value_or_null(POST));
        let row = feed.cursor(call, cx).await?;
        let key = call.key.iter().cloned();
        let step = match &row {
            Some(row) if !is_ahead(row, &created, &post) => {
                return Ok(Prepared::Unchanged(Answer::row(row.to_json())));
            }
            Some(row) => Step::update(&feed.cursors, key).guard(Guard::version(row.version())),
            None => Step::insert(&feed.cursors, key),
        };
        let step = step
            .set(LAST_SEEN_POST, post)
            .set(LAST_SEEN_CREATED_AT, created)
            .set(LAST_SEEN_AT, now())
            .set(UPDATED_AT, now());
        let event = EventTemplate::named(format!("{}.seen", feed.name)).with_row_of(0);
        Ok(PlanParts::new(key_text(&call.key), vec![step], event).into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match refused.reason {
            // Another device of the reader was faster.
            Reason::Present | Reason::Guard { .. } => Verdict::Retry,
            _ => refused.standard(&format!("{} {}", self.feed.name, key_text(&call.key))),
        }
    }
}
