//! The reads: one child, the list of a parent, and what there is to say about the whole thread.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::{Cursor, Value};

use super::{ALSO_HIDDEN, COUNT, HIDDEN, NEWEST, OLDEST, ORDER, STATUS, Thread, VISIBLE};
use crate::action::{Answer, Call, Code, Desk, Read, Refusal};
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading {
    Child,
    List,
    Summary,
}

pub(super) struct Reader {
    pub thread: Arc<Thread>,
    pub what: Reading,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.what {
            Reading::Child => self.child(call, desk).await?,
            Reading::List => {
                let parent = paging::given(&self.thread.parent, call)?;
                let newest_first = call.input.get(ORDER).and_then(Json::as_str) != Some(OLDEST);
                let (rows, next) = self.visible(call, desk, &parent, newest_first).await?;
                paging::answer(rows, next)
            }
            Reading::Summary => self.summary(call, desk).await?,
        };
        Ok(Arc::new(answer))
    }
}

impl Reader {
    async fn child(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let row = self.thread.child(call, desk).await?;
        let also_hidden = call.input.get(ALSO_HIDDEN).and_then(Json::as_bool).unwrap_or(false);
        match row.text(STATUS) {
            Some(VISIBLE) => Ok(Answer::row(self.thread.def.row_json(&row))),
            Some(HIDDEN) if also_hidden => Ok(Answer::row(self.thread.def.row_json(&row))),
            Some(HIDDEN) => {
                let message = format!("{} is not shown: it was hidden", self.thread.what(row.key()));
                Err(Refusal::new(Code::NotFound, message))
            }
            _ => Err(self.thread.removed(&row)),
        }
    }

    /// A page of the children that are visible (I6).
    async fn visible(
        &self,
        call: &Call,
        desk: &Desk<'_>,
        parent: &[Value],
        newest_first: bool,
    ) -> Result<(Vec<Json>, Option<Cursor>), Refusal> {
        let thread = &self.thread;
        let (items, next) = thread.listing.page(desk.store, call, parent, newest_first).await?;
        let keys = items.iter().map(|item| parent.iter().chain(&item.key).cloned().collect());
        let rows = thread.rows(desk, &call.tenant, keys).await?;
        // One that was hidden or removed since the list was read is not shown.
        let visible = rows.into_iter().filter_map(|row| {
            row.filter(|row| row.text(STATUS) == Some(VISIBLE)).map(|row| thread.def.row_json(&row))
        });
        Ok((visible.collect(), next))
    }

    async fn summary(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let thread = &self.thread;
        let count = thread.listing.count(desk.store, &call.tenant, &call.key).await?;
        // A few, in case the newest goes while it is read.
        let few = Call { input: paging::first(NEWEST_LOOKED_AT), ..call.clone() };
        let (newest, _) = self.visible(&few, desk, &call.key, true).await?;
        let mut body = Map::new();
        for (field, value) in thread.parent.iter().zip(&call.key) {
            body.insert(field.name.clone(), value.to_json());
        }
        body.insert(COUNT.into(), json!(count));
        body.insert(NEWEST.into(), newest.into_iter().next().unwrap_or_default());
        Ok(Answer::row(Json::Object(body)))
    }
}

/// Children that are looked at for the newest.
const NEWEST_LOOKED_AT: i64 = 3;
