//! Lists of what belongs to an owner, in the order of time, with an exact count: spread over buckets, so that many can
//! write to one owner at once.
//!
//! A list is no truth. Some row elsewhere is, and it says where it stands in the list ([`ListPosition`]); the plan that changes
//! that row puts it into the list or takes it out ([`Listing::put`], [`Listing::take`]).
//!
//! **Rows.** `NAME(tenant, owner…, bucket, at, item…, version)`, one for each item that is in the list, and
//! `NAME_count(tenant, owner…, shard, count, version)`.
//!
//! - L1. An item is in the list exactly while its row says so, and counted as often. *One plan, guarded on that row.*
//! - L2. A page has the items in their order, over all buckets, none twice and none left out that was there the whole time.
//!   *Buckets are read behind one common place and merged; where a bucket was not read to its end, nothing behind what was
//!   read of it is shown* ([`merge`]).
//! - L3. More buckets can be declared at any time, fewer never. *A row keeps its place; which shard of the count is
//!   changed does not matter, since they are added up. The store records both numbers with the tables, and a migration to a
//!   smaller one is refused.*
//!
//! The count is added up from rows that are read one by one: while others write, it is a number that was right for each
//! part of it, not for one moment. Without concurrent writes it is exact.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use statehouse_store::log::partition_of;
use statehouse_store::table::TableBuilder;
use statehouse_store::{
    Address, Consistency, Cursor, Expr, Guard, Operand, Page, PlanError, Query, ReadRequest, ReadResult, Row,
    Step, Store, StoreError, Table, Tenant, Time, Type, Value,
};

use crate::action::{ActionContext, Call, Refusal};
use crate::blueprint::settings::Field;
use crate::paging;
use crate::resource::key_text;

const BUCKET: &str = "bucket";
const AT: &str = "at";
const SHARD: &str = "shard";
const COUNT: &str = "count";

/// Buckets, and shards of a count, at most: each is a request for every page, or every count.
pub(super) const BUCKETS_MAX: u32 = 64;

/// One kind of list.
#[derive(Debug)]
pub(super) struct Listing {
    pub table: Arc<Table>,
    pub counts: Arc<Table>,
    /// How many columns the owner has.
    owner: usize,
    buckets: u32,
    shards: u32,
}

/// The rows of these keys, in their order, read strongly.
pub(super) async fn rows_of(
    cx: &ActionContext<'_>,
    table: &Arc<Table>,
    tenant: &Tenant,
    keys: impl IntoIterator<Item = Vec<Value>>,
) -> Result<Vec<Option<Row>>, Refusal> {
    let addresses =
        keys.into_iter().map(|key| Address::new(table, tenant, key)).collect::<Result<Vec<_>, _>>()?;
    Ok(cx.store.get(&addresses, Consistency::Strong).await?)
}

/// Where an item stands in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListPosition {
    pub bucket: i64,
    pub at: Time,
}

/// An item of a list.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ListItem {
    pub at: Time,
    pub key: Vec<Value>,
}

/// A setting that says how many parts something is cut in, and its value.
pub(super) type PartCount = (&'static str, u32);

/// The tables of a list: its rows, cut in buckets, and its counts, cut in shards (L3).
pub(super) fn tables(
    name: &str,
    owner: &[Field],
    item: &[Field],
    buckets: PartCount,
    shards: PartCount,
) -> [TableBuilder; 2] {
    let owned = |name: &str| {
        owner.iter().fold(Table::named(name), |table, field| table.partition(&field.name, field.kind))
    };
    let rows = owned(name).partition(BUCKET, Type::Int).sort(AT, Type::Time);
    let rows = item.iter().fold(rows, |table, field| table.sort(&field.name, field.kind));
    let counts = owned(&format!("{name}_count")).partition(SHARD, Type::Int).required(COUNT, Type::Int);
    [rows.growing(buckets.0, buckets.1), counts.growing(shards.0, shards.1)]
}

impl Listing {
    /// A list over its tables.
    pub fn over(table: Arc<Table>, counts: Arc<Table>, owner: usize, buckets: u32, shards: u32) -> Listing {
        Listing { table, counts, owner, buckets, shards }
    }

    fn spread(&self, tenant: &Tenant, item: &[Value], parts: u32) -> i64 {
        i64::from(partition_of(tenant, self.table.name(), &key_text(item), parts))
    }

    /// Where an item would stand that is put into the list at this time.
    pub fn position(&self, tenant: &Tenant, item: &[Value], at: Time) -> ListPosition {
        ListPosition { bucket: self.spread(tenant, item, self.buckets), at }
    }

    fn key(owner: &[Value], position: ListPosition, item: &[Value]) -> impl Iterator<Item = Value> {
        let position = [position.bucket.into(), position.at.into()];
        owner.iter().cloned().chain(position).chain(item.to_vec())
    }

    /// Puts an item into the list (L1).
    pub fn put(&self, tenant: &Tenant, owner: &[Value], item: &[Value], position: ListPosition) -> [Step; 2] {
        let count = Expr::Add(Operand::Coalesce(COUNT.to_owned(), 0.into()), 1.into());
        [
            Step::insert(&self.table, Listing::key(owner, position, item)),
            self.counted(tenant, owner, item, count),
        ]
    }

    /// Takes an item out of the list (L1).
    pub fn remove(
        &self,
        tenant: &Tenant,
        owner: &[Value],
        item: &[Value],
        position: ListPosition,
    ) -> [Step; 2] {
        let count = Expr::Subtract(Operand::Coalesce(COUNT.to_owned(), 0.into()), 1.into());
        [
            Step::delete(&self.table, Listing::key(owner, position, item)),
            self.counted(tenant, owner, item, count),
        ]
    }

    fn counted(&self, tenant: &Tenant, owner: &[Value], item: &[Value], count: Expr) -> Step {
        let shard = self.spread(tenant, item, self.shards);
        Step::upsert(&self.counts, owner.iter().cloned().chain([shard.into()])).set(COUNT, count)
    }

    /// How many items the list has.
    pub async fn count(&self, store: &dyn Store, tenant: &Tenant, owner: &[Value]) -> Result<i64, Refusal> {
        Ok(self.sharded_count(store, tenant, owner).await?.sum())
    }

    /// The parts of the count, as they are.
    pub async fn sharded_count(
        &self,
        store: &dyn Store,
        tenant: &Tenant,
        owner: &[Value],
    ) -> Result<ShardedCount, Refusal> {
        let addresses = self.parts(tenant, owner)?;
        let rows = store.get(&addresses, Consistency::Strong).await?;
        Ok(ShardedCount::of(addresses.into_iter().zip(rows))?)
    }

    /// How many parts the count has.
    pub fn shards(&self) -> usize {
        self.shards as usize
    }

    /// Where the parts of the count are.
    pub fn parts(&self, tenant: &Tenant, owner: &[Value]) -> Result<Vec<Address>, PlanError> {
        let address = |shard: u32| {
            let shard = Value::from(i64::from(shard));
            Address::new(&self.counts, tenant, owner.iter().cloned().chain([shard]))
        };
        (0..self.shards).map(address).collect()
    }

    /// A page of the list, as a call asks for it, and where the next one begins (L2).
    pub async fn page(
        &self,
        store: &dyn Store,
        call: &Call,
        owner: &[Value],
        newest_first: bool,
    ) -> Result<(Vec<ListItem>, Option<Cursor>), Refusal> {
        let bucket = |bucket: u32| -> Result<Query, Refusal> {
            let bucket = Value::from(i64::from(bucket));
            let query = Query::table(&self.table, &call.tenant, owner.iter().cloned().chain([bucket]))?;
            paging::page_of(if newest_first { query.backward() } else { query }, call)
        };
        self.read(store, (0..self.buckets).map(bucket).collect::<Result<Vec<_>, _>>()?, newest_first).await
    }

    /// The next so many items of the list, the oldest first, and where to go on (L2).
    pub async fn next(
        &self,
        store: &dyn Store,
        tenant: &Tenant,
        owner: &[Value],
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<(Vec<ListItem>, Option<Cursor>), Refusal> {
        let bucket = |bucket: u32| -> Result<Query, Refusal> {
            let bucket = Value::from(i64::from(bucket));
            let query = Query::table(&self.table, tenant, owner.iter().cloned().chain([bucket]))?;
            let query = query.limit(limit)?;
            Ok(match cursor {
                Some(cursor) => query.after(Cursor::parse(cursor)?)?,
                None => query,
            })
        };
        self.read(store, (0..self.buckets).map(bucket).collect::<Result<Vec<_>, _>>()?, false).await
    }

    async fn read(
        &self,
        store: &dyn Store,
        queries: Vec<Query>,
        newest_first: bool,
    ) -> Result<(Vec<ListItem>, Option<Cursor>), Refusal> {
        let Some(first) = queries.first().cloned() else { return Ok((Vec::new(), None)) };
        let limit = first.page_limit();
        let pages = filled(store, &queries).await?;
        let parts =
            pages.into_iter().map(|page| BucketRead { is_whole: page.next.is_none(), rows: page.rows });
        let order = |a: &Row, b: &Row| {
            let order = self.order(a, b);
            if newest_first { order.reverse() } else { order }
        };
        let (rows, goes_on) = merge(parts.collect(), limit, order);
        let next = rows.last().filter(|_| goes_on).map(|row| first.cursor_at(row));
        Ok((rows.iter().map(|row| self.item(row)).collect::<Result<_, StoreError>>()?, next))
    }

    /// The columns behind the bucket.
    fn place_in<'r>(&self, row: &'r Row) -> &'r [Value] {
        row.key().get(self.owner + 1..).unwrap_or_default()
    }

    fn order(&self, a: &Row, b: &Row) -> Ordering {
        let pairs = self.place_in(a).iter().zip(self.place_in(b));
        pairs.map(|(a, b)| a.compare(b).unwrap_or(Ordering::Equal)).fold(Ordering::Equal, Ordering::then)
    }

    fn item(&self, row: &Row) -> Result<ListItem, StoreError> {
        let key = self.place_in(row).get(1..).unwrap_or_default().to_vec();
        Ok(ListItem { at: row.get_time(AT)?, key })
    }
}

/// The parts of a count. Whatever comes into a list or leaves it changes one of them.
#[derive(Debug)]
pub(super) struct ShardedCount {
    parts: Vec<(Address, Option<Row>)>,
    sum: i64,
}

impl ShardedCount {
    /// The parts, as they were read.
    pub fn of(parts: impl IntoIterator<Item = (Address, Option<Row>)>) -> Result<ShardedCount, StoreError> {
        let mut read = ShardedCount { parts: parts.into_iter().collect(), sum: 0 };
        for row in read.parts.iter().filter_map(|(_, row)| row.as_ref()) {
            read.sum += row.get_int(COUNT)?;
        }
        Ok(read)
    }

    /// What is different whenever something has come or gone: the versions of the parts, which are never deleted.
    pub fn stamp(&self) -> Vec<i64> {
        self.parts.iter().map(|(_, row)| row.as_ref().map_or(0, Row::version)).collect()
    }

    /// The count.
    pub fn sum(&self) -> i64 {
        self.sum
    }

    /// Demands that nothing has come or gone since the parts were read.
    pub fn unchanged(&self) -> impl Iterator<Item = Step> {
        self.parts.iter().map(|(address, row)| match row {
            Some(row) => {
                Step::assert(address.table(), address.key().to_vec()).guard(Guard::version(row.version()))
            }
            None => Step::assert_absent(address.table(), address.key().to_vec()),
        })
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }
}

/// Of each range the first page that has rows, or the last, in one go.
pub(super) async fn filled(store: &dyn Store, queries: &[Query]) -> Result<Vec<Page>, Refusal> {
    let asks: Vec<ReadRequest<'_>> = queries.iter().map(ReadRequest::Query).collect();
    let pages = store.read_many(&asks).await?.into_iter().map(ReadResult::into_page);
    let mut filled = Vec::with_capacity(queries.len());
    for (query, page) in queries.iter().zip(pages) {
        filled.push(fill(store, query, page?).await?);
    }
    Ok(filled)
}

/// The first page from this one on that has rows, or the last. Few engines give a page without rows before the end.
pub(super) async fn fill(store: &dyn Store, query: &Query, mut page: Page) -> Result<Page, Refusal> {
    while page.rows.is_empty() {
        let Some(next) = page.next.take() else { break };
        page = store.query(&query.clone().after(next)?).await?;
    }
    Ok(page)
}

/// What was read of a bucket.
#[derive(Clone, Debug)]
pub(super) struct BucketRead<T> {
    pub rows: Vec<T>,
    /// Whether there is nothing behind these rows.
    pub is_whole: bool,
}

/// The first so many rows of all parts, in their common order, and whether there are more. A part that is not whole has at
/// least one row.
pub(super) fn merge<T>(
    parts: Vec<BucketRead<T>>,
    limit: usize,
    order: impl Fn(&T, &T) -> Ordering,
) -> (Vec<T>, bool) {
    let whole = parts.iter().all(|part| part.is_whole);
    let mut rows = Vec::new();
    // Of each part, the number of its last row, if it is not whole: what comes behind that is not known.
    let mut ends = HashSet::new();
    for (number, part) in parts.into_iter().enumerate() {
        if !part.is_whole {
            ends.insert((number, part.rows.len()));
        }
        rows.extend(part.rows.into_iter().enumerate().map(|(index, row)| (number, index + 1, row)));
    }
    rows.sort_by(|(_, _, a), (_, _, b)| order(a, b));
    let is_end = |number: usize, index: usize| ends.contains(&(number, index));
    let known = rows.iter().position(|(number, index, _)| is_end(*number, *index));
    let shown = known.map_or(rows.len(), |end| end + 1).min(limit);
    let goes_on = !whole || shown < rows.len();
    rows.truncate(shown);
    (rows.into_iter().map(|(_, _, row)| row).collect(), goes_on)
}

/// Waits for all of these at once.
pub(super) async fn together<T>(mut waiting: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
    let mut done: Vec<Option<T>> = waiting.iter().map(|_| None).collect();
    poll_fn(|context| {
        let mut all = Poll::Ready(());
        for (future, done) in waiting.iter_mut().zip(&mut done).filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(context) {
                Poll::Ready(value) => *done = Some(value),
                Poll::Pending => all = Poll::Pending,
            }
        }
        all
    })
    .await;
    done.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(parts: &[(&[i32], bool)], limit: usize, expect: (&[i32], bool)) {
        let given =
            parts.iter().map(|(rows, is_whole)| BucketRead { rows: rows.to_vec(), is_whole: *is_whole });
        let (rows, goes_on) = merge(given.collect(), limit, i32::cmp);
        assert_eq!((rows.as_slice(), goes_on), expect, "{parts:?} by {limit}");
    }

    #[test]
    fn buckets_are_merged_in_order() {
        check(&[], 3, (&[], false));
        check(&[(&[], true), (&[], true)], 3, (&[], false));
        check(&[(&[1, 4], true), (&[2, 3], true)], 9, (&[1, 2, 3, 4], false));
        check(&[(&[1, 4], true), (&[2, 3], true)], 3, (&[1, 2, 3], true));
        check(&[(&[1, 4], true), (&[2, 3], true)], 4, (&[1, 2, 3, 4], false));
        // Behind the last row of a bucket that goes on nothing is shown, because it may have one that comes before.
        check(&[(&[1, 4], false), (&[2, 5], true)], 9, (&[1, 2, 4], true));
        check(&[(&[1], false), (&[2, 3], false)], 9, (&[1], true));
        check(&[(&[1, 2, 3], false), (&[4, 5, 6], false)], 3, (&[1, 2, 3], true));
        check(&[(&[7], false)], 1, (&[7], true));
    }

    #[test]
    fn what_was_merged_can_be_merged_with_more() {
        let part = |rows: &[i32], is_whole: bool| BucketRead { rows: rows.to_vec(), is_whole };
        let parts = [part(&[1, 9], false), part(&[2, 3], true), part(&[4, 8], false), part(&[5], true)];
        for limit in 1..9 {
            let at_once = merge(parts.to_vec(), limit, i32::cmp);
            let one_by_one = parts.iter().fold(part(&[], true), |so_far, next| {
                let (rows, goes_on) = merge(vec![so_far, next.clone()], limit, i32::cmp);
                BucketRead { rows, is_whole: !goes_on }
            });
            assert_eq!((one_by_one.rows, !one_by_one.is_whole), at_once, "by {limit}");
        }
    }

    #[test]
    fn pages_of_merged_buckets_leave_nothing_out() {
        // Buckets of odd sizes, read by so many rows at a time, of which the store gives fewer now and then.
        for (limit, short) in [(1, 1), (3, 2), (4, 1), (7, 7), (50, 3)] {
            let buckets: Vec<Vec<i32>> =
                (0..4).map(|bucket| (0..40).filter(|n| n * 7 % 11 % 4 == bucket).collect()).collect();
            let (mut seen, mut after) = (Vec::new(), -1);
            loop {
                let part = |bucket: &Vec<i32>| {
                    let rows: Vec<i32> = bucket.iter().copied().filter(|n| *n > after).collect();
                    let shown = limit.min(short).min(rows.len());
                    BucketRead { is_whole: shown == rows.len(), rows: rows.into_iter().take(shown).collect() }
                };
                let (rows, goes_on) = merge(buckets.iter().map(part).collect(), limit, i32::cmp);
                after = rows.last().copied().unwrap_or(after);
                seen.extend(rows);
                if !goes_on {
                    break;
                }
            }
            assert_eq!(seen, (0..40).collect::<Vec<i32>>(), "by {limit} and {short}");
        }
    }
}
