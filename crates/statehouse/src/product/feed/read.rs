//! The reads: a page of a feed, and how far its reader has got.

use std::cmp::Ordering;
use std::sync::{Arc, atomic};

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse_store::{
    Cursor, Page, Query, ReadRequest, ReadResult, Row, Store, Table, Tenant, Time, Value, bug,
};

use super::{AUTHOR, CREATED_AT, EXPIRES_AT, FeedSpec, POST, PREVIEW, PULL, SINCE, VIEWER};
use crate::action::{ActionContext, Answer, Call, Read, Refusal};
use crate::infra::projection::{GENERATION, ProjectionReader};
use crate::paging;
use crate::product::listing::{BucketRead, fill, filled, merge};

/// Authors' lists that are read at the same time.
const TOGETHER_MAX: usize = 32;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum FeedQuery {
    Page,
    Cursor,
}

pub(super) struct FeedRead {
    pub feed: Arc<FeedSpec>,
    pub what: FeedQuery,
}

#[async_trait]
impl Read for FeedRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        Ok(Arc::new(match self.what {
            FeedQuery::Page => self.feed.page(call, cx).await?,
            FeedQuery::Cursor => {
                let row = self.feed.cursor(call, cx).await?;
                Answer::row(row.map_or_else(|| FeedSpec::unseen(call), |row| row.to_json()))
            }
        }))
    }
}

impl FeedSpec {
    async fn page(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let viewer = call.input.value_or_null(VIEWER);
        let consult = ProjectionReader { name: &self.name, cx };
        let reading = |generation: i64, cursor: Option<String>| -> Result<PageRead<'_>, Refusal> {
            let cursor = cursor.map(|cursor| Cursor::parse(&cursor)).transpose()?;
            let (now, limit) = (cx.clock.now(), paging::rows(call));
            Ok(PageRead { feed: self, generation, cursor, viewer: &viewer, tenant: &call.tenant, now, limit })
        };
        let last = self.last_live.load(atomic::Ordering::Relaxed);
        if last > 0 && ProjectionReader::is_plain(call) {
            // Whether it is live still is asked while it is read. What was live before the rows were read, and is afterwards,
            // was kept up all the time: it could be gone back to, but it was not deleted.
            let page = reading(last, None)?;
            let (own, pulled, live) = (page.own()?, page.pulled()?, consult.live_cell()?);
            let asks = [ReadRequest::Value(&live), ReadRequest::Query(&own), ReadRequest::Query(&pulled)];
            let mut seen = cx.store.read_many(&asks).await?.into_iter();
            let live = seen.next().map(ReadResult::into_value).transpose()?.flatten();
            if live.and_then(|live| live.as_int()) == Some(last) {
                let pages = seen.map(ReadResult::into_page).collect::<Result<Vec<_>, _>>()?;
                return page.answer(own, pulled, pages.into_iter(), cx.store).await;
            }
        }
        let (generation, cursor) = consult.open(call).await?;
        if ProjectionReader::is_plain(call) {
            self.last_live.store(generation, atomic::Ordering::Relaxed);
        }
        let page = reading(generation, cursor)?;
        let (own, pulled) = (page.own()?, page.pulled()?);
        let seen = cx.store.read_many(&[ReadRequest::Query(&own), ReadRequest::Query(&pulled)]).await?;
        let pages = seen.into_iter().map(ReadResult::into_page).collect::<Result<Vec<_>, _>>()?;
        page.answer(own, pulled, pages.into_iter(), cx.store).await
    }
}

/// A page of a feed that is being read.
struct PageRead<'a> {
    feed: &'a FeedSpec,
    generation: i64,
    cursor: Option<Cursor>,
    viewer: &'a Value,
    tenant: &'a Tenant,
    now: Time,
    limit: usize,
}

impl PageRead<'_> {
    /// What was pushed to the reader.
    fn own(&self) -> Result<Query, Refusal> {
        let feed = self.feed;
        self.behind(&feed.rows, vec![self.generation.into(), self.viewer.clone()], feed.oldest(self.now))
    }

    /// From whom the reader pulls.
    fn pulled(&self) -> Result<Query, Refusal> {
        let partition = [self.generation.into(), self.viewer.clone()];
        Ok(Query::table(&self.feed.pulled, self.tenant, partition)?.limit(TOGETHER_MAX)?)
    }

    /// A list of posts, from where the page begins.
    fn behind(&self, table: &Arc<Table>, partition: Vec<Value>, oldest: Time) -> Result<Query, Refusal> {
        let query =
            Query::table(table, self.tenant, partition)?.from(oldest)?.backward().limit(self.limit)?;
        Ok(match &self.cursor {
            Some(cursor) => {
                let cursor = cursor.in_read(&query);
                query.after(cursor)?
            }
            None => query,
        })
    }

    /// The page, from the first ones of what was pushed and of whom to pull from.
    async fn answer(
        &self,
        own: Query,
        pulled: Query,
        mut pages: impl Iterator<Item = Page>,
        store: &dyn Store,
    ) -> Result<Answer, Refusal> {
        let nothing = || Page { rows: Vec::new(), next: None };
        let rows = fill(store, &own, pages.next().unwrap_or_else(nothing)).await?;
        let mut from = fill(store, &pulled, pages.next().unwrap_or_else(nothing)).await?;
        let mut so_far = BucketRead { is_whole: rows.next.is_none(), rows: rows.rows };
        let mut is_merged = false;
        // However many there are to pull from, some are read at a time, and no more than a page is kept.
        loop {
            let mut queries = Vec::new();
            for row in &from.rows {
                let since = row.get_time(SINCE)?;
                let Some(author) = row.get(AUTHOR) else {
                    return Err(bug!("table {} has no column {AUTHOR}", row.table()).into());
                };
                let list = vec![self.generation.into(), author.clone(), PULL.into()];
                let oldest = self.feed.oldest_since(since, self.now);
                queries.push(self.behind(&self.feed.lists, list, oldest)?);
            }
            if !queries.is_empty() {
                let pages = filled(store, &queries).await?;
                let parts = pages
                    .into_iter()
                    .map(|page| BucketRead { is_whole: page.next.is_none(), rows: page.rows });
                let (rows, goes_on) = merge(parts.chain([so_far]).collect(), self.limit, newest_first);
                so_far = BucketRead { rows, is_whole: !goes_on };
                is_merged = true;
            }
            let Some(next) = from.next else { break };
            from = store.query(&pulled.clone().after(next)?).await?;
        }
        let (mut rows, goes_on) = (so_far.rows, !so_far.is_whole);
        // The rows of authors' lists have the same columns in their order.
        let next = rows.last().filter(|_| goes_on).map(|row| own.cursor_at(row));
        // The parts were not read at one moment: a post that was deleted and came back in between may have been pushed
        // before and be pulled now.
        if is_merged {
            drop_repeated(&mut rows);
        }
        let viewer = self.viewer.to_json();
        let mut answer = paging::answer(shown(rows, viewer, self.generation), next);
        answer.next = answer.next.map(|next| ProjectionReader::cursor(self.generation, &next));
        Ok(answer)
    }
}

/// Leaves the first row of each post.
fn drop_repeated(rows: &mut Vec<Row>) {
    let posts: Vec<Option<&Value>> = rows.iter().map(|row| row.get(POST)).collect();
    let order = |one: usize, other: usize| match (posts.get(one), posts.get(other)) {
        (Some(Some(one)), Some(Some(other))) => one.compare(other).unwrap_or(Ordering::Equal),
        _ => Ordering::Equal,
    };
    // Stable: of the rows of one post the one that comes first in the page stays first.
    let mut places: Vec<usize> = (0..posts.len()).collect();
    places.sort_by(|one, other| order(*one, *other));
    let mut repeated = vec![false; posts.len()];
    for pair in places.windows(2) {
        if let [one, other] = *pair
            && order(one, other).is_eq()
            && let Some(repeated) = repeated.get_mut(other)
        {
            *repeated = true;
        }
    }
    let mut repeated = repeated.into_iter();
    rows.retain(|_| !repeated.next().unwrap_or(false));
}

fn newest_first(one: &Row, other: &Row) -> Ordering {
    let order = |column: &str| match (one.get(column), other.get(column)) {
        (Some(one), Some(other)) => other.compare(one).unwrap_or(Ordering::Equal),
        _ => Ordering::Equal,
    };
    order(CREATED_AT).then_with(|| order(POST))
}

/// Rows as callers see them.
fn shown(rows: Vec<Row>, viewer: Json, generation: i64) -> impl Iterator<Item = Json> {
    // An object for each is copied from this one, and its values are put in their places: a page has many rows, and to
    // find the place of each name of each would take longer than all the rest.
    let blank = [AUTHOR, CREATED_AT, EXPIRES_AT, POST, PREVIEW].map(|name| (name.to_owned(), Json::Null));
    let mut frame: Map<String, Json> = blank.into_iter().collect();
    frame.insert(GENERATION.to_owned(), generation.into());
    frame.insert(VIEWER.to_owned(), viewer);
    // What was pushed and what is pulled come from different tables.
    let mut known: Option<(Arc<Table>, Vec<Option<usize>>)> = None;
    rows.into_iter().map(move |row| {
        if !known.as_ref().is_some_and(|(table, _)| Arc::ptr_eq(table, row.table())) {
            let index = |(name, shown): (&String, &Json)| match shown {
                Json::Null => row.table().position(name),
                _ => None,
            };
            known = Some((row.table().clone(), frame.iter().map(index).collect()));
        }
        let places = known.iter().flat_map(|(_, places)| places);
        let mut values = row.into_values();
        let mut body = frame.clone();
        for (shown, index) in body.values_mut().zip(places) {
            if let Some(value) = index.and_then(|index| values.get_mut(index)) {
                *shown = std::mem::replace(value, Value::Null).into_json();
            }
        }
        Json::Object(body)
    })
}

#[cfg(test)]
mod tests {
    use statehouse_store::Type;

    use super::*;

    #[test]
    fn of_each_post_the_first_row_stays() {
        let table =
            Table::named("rows").partition("place", Type::Int).required(POST, Type::Int).build().unwrap();
        let tenant = Tenant::new("acme").unwrap();
        let check = |posts: &[i64], expected: &[i64]| {
            let row = |(index, post): (usize, &i64)| {
                Row::new(table.clone(), tenant.clone(), vec![(index as i64).into(), (*post).into()], 1)
            };
            let mut rows: Vec<Row> = posts.iter().enumerate().map(row).collect();
            drop_repeated(&mut rows);
            let places: Vec<i64> = rows.iter().filter_map(|row| row.int("place")).collect();
            assert_eq!(places, expected, "{posts:?}");
        };
        check(&[], &[]);
        check(&[7], &[0]);
        check(&[9, 8, 7], &[0, 1, 2]);
        check(&[9, 8, 9, 7, 8, 9], &[0, 1, 3]);
        check(&[1, 1, 1], &[0]);
    }
}
