//! The reads: one child, the list of a parent, and what there is to say about the whole thread.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::{Cursor, Value};

use super::{ALSO_HIDDEN, COUNT, HIDDEN, NEWEST, OLDEST, ORDER, STATUS, ThreadSpec, VISIBLE, rows_of};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum ThreadQuery {
    Child,
    List,
    Summary,
}

pub(super) struct ThreadRead {
    pub thread: Arc<ThreadSpec>,
    pub what: ThreadQuery,
}

#[async_trait]
impl Read for ThreadRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.what {
            ThreadQuery::Child => self.child(call, cx).await?,
            ThreadQuery::List => {
                let parent = paging::given(&self.thread.parent, call)?;
                let newest_first = call.input.text(ORDER) != Some(OLDEST);
                let (rows, next) = self.visible(call, cx, &parent, newest_first).await?;
                paging::answer(rows, next)
            }
            ThreadQuery::Summary => self.summary(call, cx).await?,
        };
        Ok(Arc::new(answer))
    }
}

impl ThreadRead {
    async fn child(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let row = self.thread.child(call, cx).await?;
        let also_hidden = call.input.flag(ALSO_HIDDEN).unwrap_or(false);
        match row.get_text(STATUS)? {
            VISIBLE => Ok(Answer::row(self.thread.def.row_json(&row))),
            HIDDEN if also_hidden => Ok(Answer::row(self.thread.def.row_json(&row))),
            HIDDEN => {
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
        cx: &ActionContext<'_>,
        parent: &[Value],
        newest_first: bool,
    ) -> Result<(Vec<Json>, Option<Cursor>), Refusal> {
        let thread = &self.thread;
        let (items, next) = thread.listing.page(cx.store, call, parent, newest_first).await?;
        let keys = items.iter().map(|item| parent.iter().chain(&item.key).cloned().collect());
        let rows = rows_of(cx, &thread.table, &call.tenant, keys).await?;
        // One that was hidden or removed since the list was read is not shown.
        let mut visible = Vec::with_capacity(rows.len());
        for row in rows.into_iter().flatten() {
            if row.get_text(STATUS)? == VISIBLE {
                visible.push(thread.def.row_json(&row));
            }
        }
        Ok((visible, next))
    }

    async fn summary(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let thread = &self.thread;
        let count = thread.listing.count(cx.store, &call.tenant, &call.key).await?;
        // A few, in case the newest goes while it is read.
        let few = Call { input: paging::first(NEWEST_LOOKED_AT), ..call.clone() };
        let (newest, _) = self.visible(&few, cx, &call.key, true).await?;
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
