//! The reads: a page of a feed, and how far its reader has got.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, atomic};

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse_store::{Cursor, Page, Query, Row, Table, Time, Type, Value};

use super::{AUTHOR, CREATED_AT, EXPIRES_AT, Feed, POST, PREVIEW, PULL, SINCE, VIEWER};
use crate::action::{Answer, Call, Desk, Read, Refusal};
use crate::form::Misfit;
use crate::infra::projection::{Consult, GENERATION};
use crate::paging;
use crate::product::listing::{Part, filled, merge, together};

/// Authors' lists that are read at the same time.
const TOGETHER_MAX: usize = 32;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading {
    Page,
    Cursor,
}

pub(super) struct Reader {
    pub feed: Arc<Feed>,
    pub what: Reading,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        Ok(Arc::new(match self.what {
            Reading::Page => self.feed.page(call, desk).await?,
            Reading::Cursor => {
                let row = self.feed.cursor(call, desk).await?;
                Answer::row(row.map_or_else(|| Feed::unseen(call), |row| row.to_json()))
            }
        }))
    }
}

impl Feed {
    async fn page(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let json = call.input.get(VIEWER).cloned().unwrap_or_default();
        let kind = self.rows.type_of(VIEWER).unwrap_or(Type::Text);
        let viewer = Value::from_json(json, kind).map_err(|why| {
            Refusal::misfits(vec![Misfit { pointer: format!("/{VIEWER}"), detail: why.to_string() }])
        })?;
        let consult = Consult { name: &self.name, desk };
        let last = self.last_live.load(atomic::Ordering::Relaxed);
        if last > 0 && Consult::is_plain(call) {
            // Whether it is live still is asked while it is read. What was live before the rows were read, and is afterwards,
            // was kept up all the time: it could be gone back to, but it was not deleted.
            let page = self.page_in(last, None, &viewer, call, desk);
            let (live, page) = tokio::join!(consult.live(), page);
            if live? == last {
                return page;
            }
        }
        let (generation, cursor) = consult.open(call).await?;
        if Consult::is_plain(call) {
            self.last_live.store(generation, atomic::Ordering::Relaxed);
        }
        self.page_in(generation, cursor, &viewer, call, desk).await
    }

    async fn page_in(
        &self,
        generation: i64,
        cursor: Option<String>,
        viewer: &Value,
        call: &Call,
        desk: &Desk<'_>,
    ) -> Result<Answer, Refusal> {
        let cursor = cursor.map(|cursor| Cursor::parse(&cursor)).transpose()?;
        let (now, limit) = (desk.clock.now(), paging::rows(call));
        let behind = |table: &Arc<Table>, partition: Vec<Value>, oldest: Time| -> Result<Query, Refusal> {
            let query =
                Query::table(table, &call.tenant, partition)?.from(oldest)?.backward().limit(limit)?;
            Ok(match &cursor {
                Some(cursor) => {
                    let cursor = cursor.in_read(&query);
                    query.after(cursor)?
                }
                None => query,
            })
        };
        let own = behind(&self.rows, vec![generation.into(), viewer.clone()], self.oldest(now))?;
        let pulled = Query::table(&self.pulled, &call.tenant, [generation.into(), viewer.clone()])?;
        let pulled = pulled.limit(TOGETHER_MAX)?;
        let mut pages = all(desk, vec![own.clone(), pulled.clone()]).await?.into_iter();
        let nothing = || Page { rows: Vec::new(), next: None };
        let rows = pages.next().unwrap_or_else(nothing);
        let mut from = pages.next().unwrap_or_else(nothing);
        let mut so_far = Part { is_whole: rows.next.is_none(), rows: rows.rows };
        // However many there are to pull from, some are read at a time, and no more than a page is kept.
        loop {
            let mut queries = Vec::new();
            for row in &from.rows {
                let (Some(author), Some(since)) = (row.get(AUTHOR), row.time(SINCE)) else { continue };
                let list = vec![generation.into(), author.clone(), PULL.into()];
                queries.push(behind(&self.lists, list, self.oldest_since(since, now))?);
            }
            if !queries.is_empty() {
                let pages = all(desk, queries).await?;
                let parts =
                    pages.into_iter().map(|page| Part { is_whole: page.next.is_none(), rows: page.rows });
                let (rows, goes_on) = merge(parts.chain([so_far]).collect(), limit, newest_first);
                so_far = Part { rows, is_whole: !goes_on };
            }
            let Some(next) = from.next else { break };
            from = desk.store.query(&pulled.clone().after(next)?).await?;
        }
        let (mut rows, goes_on) = (so_far.rows, !so_far.is_whole);
        // The rows of authors' lists have the same columns in their order.
        let next = rows.last().filter(|_| goes_on).map(|row| own.cursor_at(row));
        // The parts were not read at one moment: a post that was deleted and came back in between may have been pushed
        // before and be pulled now.
        let mut posts = BTreeSet::new();
        rows.retain(|row| posts.insert(row.get(POST).map(|post| post.to_json().to_string())));
        let mut answer = paging::answer(rows.iter().map(|row| shown(row, viewer, generation)), next);
        answer.next = answer.next.map(|next| Consult::cursor(generation, &next));
        Ok(answer)
    }
}

/// Reads all of these at once.
async fn all(desk: &Desk<'_>, queries: Vec<Query>) -> Result<Vec<Page>, Refusal> {
    let reads: Vec<Pin<Box<dyn Future<Output = _> + Send + '_>>> =
        queries.into_iter().map(|query| Box::pin(filled(desk.store, query)) as _).collect();
    together(reads).await.into_iter().collect()
}

fn newest_first(one: &Row, other: &Row) -> Ordering {
    let order = |column: &str| match (one.get(column), other.get(column)) {
        (Some(one), Some(other)) => other.compare(one).unwrap_or(Ordering::Equal),
        _ => Ordering::Equal,
    };
    order(CREATED_AT).then_with(|| order(POST))
}

/// A row as callers see it.
fn shown(row: &Row, viewer: &Value, generation: i64) -> Json {
    let column = |name: &str| (name.to_owned(), row.get(name).map(Value::to_json).unwrap_or_default());
    let mut body: Map<String, Json> =
        [POST, AUTHOR, PREVIEW, CREATED_AT, EXPIRES_AT].into_iter().map(column).collect();
    body.insert(VIEWER.to_owned(), viewer.to_json());
    body.insert(GENERATION.to_owned(), generation.into());
    Json::Object(body)
}
