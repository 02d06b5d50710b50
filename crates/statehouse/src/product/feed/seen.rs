//! How far a reader has got: a cursor that never goes back (F5).

use std::cmp::Ordering;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::guard::now;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Event, EventTemplate, Guard, Reason, Refused, Row, Step, Type, Value,
};

use super::{CREATED_AT, Feed, LAST_SEEN_AT, LAST_SEEN_CREATED_AT, LAST_SEEN_POST, POST, UPDATED_AT, VIEWER};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::resource::key_text;

pub(super) struct Marker {
    pub feed: Arc<Feed>,
}

impl Feed {
    /// The cursor of a reader, if anything was seen.
    pub(super) async fn cursor(&self, call: &Call, desk: &Desk<'_>) -> Result<Option<Row>, Refusal> {
        let address = Address::new(&self.cursors, &call.tenant, call.key.iter().cloned())?;
        Ok(desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
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
impl Write for Marker {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let feed = &self.feed;
        let given = |name: &str| {
            let kind = feed.rows.type_of(name).unwrap_or(Type::Text);
            let json = call.input.get(name).cloned().unwrap_or_default();
            Value::from_json(json, kind).map_err(|why| Refusal::new(Code::InvalidInput, why.to_string()))
        };
        let (created, post) = (given(CREATED_AT)?, given(POST)?);
        let row = feed.cursor(call, desk).await?;
        let key = call.key.iter().cloned();
        let step = match &row {
            Some(row) if !is_ahead(row, &created, &post) => {
                return Ok(Draft::Done(Answer::row(row.to_json())));
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
        Ok(Draft::Write(Pieces { subject: key_text(&call.key), steps: vec![step], event }))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        match refused.reason {
            // Another device of the reader was faster.
            Reason::Present | Reason::Guard { .. } => Verdict::TryAgain,
            _ => common_verdict(&format!("{} {}", self.feed.name, key_text(&call.key)), refused),
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        Answer::row(row_of(event))
    }
}
