//! The reads: whether an edge is there, the lists of both ends, and how long they are.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::Row;
use statehouse_store::table::VERSION;

use super::{COUNT, HAS, RelationEnd, RelationSpec, SINCE, UPDATED_AT, rows_of};
use crate::action::{ActionContext, Answer, Call, Read, Refusal};
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum RelationQuery {
    Has,
    List(RelationEnd),
    Count(RelationEnd),
}

pub(super) struct RelationRead {
    pub relation: Arc<RelationSpec>,
    pub what: RelationQuery,
}

#[async_trait]
impl Read for RelationRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.what {
            RelationQuery::Has => {
                let row = self.relation.row(call, cx).await?;
                Answer::row(
                    row.map_or_else(|| self.relation.never(call), |row| self.relation.shown(row.to_json())),
                )
            }
            RelationQuery::List(end) => self.list(call, cx, end).await?,
            RelationQuery::Count(end) => self.count(call, cx, end).await?,
        };
        Ok(Arc::new(answer))
    }

    /// An edge that is not there is not shown.
    async fn show(
        &self,
        rows: &[Row],
        _: &Call,
        _: &ActionContext<'_>,
    ) -> Result<Option<Vec<Option<Json>>>, Refusal> {
        let shown = |row: &Row| row.time(SINCE).map(|_| self.relation.shown(row.to_json()));
        Ok(Some(rows.iter().map(shown).collect()))
    }
}

impl RelationSpec {
    /// An edge that was never there, as callers see it.
    pub(super) fn never(&self, call: &Call) -> Json {
        let mut body = Map::new();
        for (field, value) in self.from.iter().chain(&self.to).zip(&call.key) {
            body.insert(field.name.clone(), value.to_json());
        }
        for name in self.fields.iter().map(|field| field.name.as_str()).chain([SINCE, UPDATED_AT]) {
            body.insert(name.to_owned(), Json::Null);
        }
        body.insert(HAS.into(), false.into());
        body.insert(VERSION.into(), 0.into());
        Json::Object(body)
    }
}

impl RelationRead {
    async fn list(&self, call: &Call, cx: &ActionContext<'_>, end: RelationEnd) -> Result<Answer, Refusal> {
        let relation = &self.relation;
        let owner = paging::given(relation.owner(end), call)?;
        let (items, next) = relation.listing(end).page(cx.store, call, &owner, true).await?;
        let key = |item: &Vec<statehouse_store::Value>| match end {
            RelationEnd::Out => owner.iter().chain(item).cloned().collect(),
            RelationEnd::In => item.iter().chain(&owner).cloned().collect(),
        };
        let rows =
            rows_of(cx, &relation.table, &call.tenant, items.iter().map(|item| key(&item.key))).await?;
        // One that went since the list was read is not shown, nor one that came back elsewhere in the list.
        let there = rows.into_iter().zip(&items).filter_map(|(row, item)| {
            row.filter(|row| row.time(SINCE) == Some(item.at)).map(|row| self.relation.shown(row.to_json()))
        });
        Ok(paging::answer(there, next))
    }

    async fn count(&self, call: &Call, cx: &ActionContext<'_>, end: RelationEnd) -> Result<Answer, Refusal> {
        let relation = &self.relation;
        let count = relation.listing(end).count(cx.store, &call.tenant, &call.key).await?;
        let mut body = Map::new();
        for (field, value) in relation.owner(end).iter().zip(&call.key) {
            body.insert(field.name.clone(), value.to_json());
        }
        body.insert(COUNT.into(), json!(count));
        Ok(Answer::row(Json::Object(body)))
    }
}
