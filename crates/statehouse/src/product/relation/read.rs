//! The reads: whether an edge is there, the lists of both ends, and how long they are.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::table::VERSION;

use super::{COUNT, End, HAS, Relation, SINCE, UPDATED_AT};
use crate::action::{Answer, Call, Desk, Read, Refusal};
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading {
    Has,
    List(End),
    Count(End),
}

pub(super) struct Reader {
    pub relation: Arc<Relation>,
    pub what: Reading,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.what {
            Reading::Has => {
                let row = self.relation.row(call, desk).await?;
                Answer::row(
                    row.map_or_else(|| self.relation.never(call), |row| self.relation.shown(row.to_json())),
                )
            }
            Reading::List(end) => self.list(call, desk, end).await?,
            Reading::Count(end) => self.count(call, desk, end).await?,
        };
        Ok(Arc::new(answer))
    }
}

impl Relation {
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

impl Reader {
    async fn list(&self, call: &Call, desk: &Desk<'_>, end: End) -> Result<Answer, Refusal> {
        let relation = &self.relation;
        let owner = paging::given(relation.owner(end), call)?;
        let (items, next) = relation.listing(end).page(desk.store, call, &owner, true).await?;
        let key = |item: &Vec<statehouse_store::Value>| match end {
            End::Out => owner.iter().chain(item).cloned().collect(),
            End::In => item.iter().chain(&owner).cloned().collect(),
        };
        let rows = relation.rows(desk, &call.tenant, items.iter().map(|item| key(&item.key))).await?;
        // One that went since the list was read is not shown, nor one that came back elsewhere in the list.
        let there = rows.into_iter().zip(&items).filter_map(|(row, item)| {
            row.filter(|row| row.time(SINCE) == Some(item.at)).map(|row| self.relation.shown(row.to_json()))
        });
        Ok(paging::answer(there, next))
    }

    async fn count(&self, call: &Call, desk: &Desk<'_>, end: End) -> Result<Answer, Refusal> {
        let relation = &self.relation;
        let count = relation.listing(end).count(desk.store, &call.tenant, &call.key).await?;
        let mut body = Map::new();
        for (field, value) in relation.owner(end).iter().zip(&call.key) {
            body.insert(field.name.clone(), value.to_json());
        }
        body.insert(COUNT.into(), json!(count));
        Ok(Answer::row(Json::Object(body)))
    }
}
