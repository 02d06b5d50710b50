//! Reads of rows. Tombstones are skipped; expired tombstones are deleted after the read.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::bug;
use statehouse_store::read::Direction;
use statehouse_store::scan::check_segments;
use statehouse_store::table::VERSION;
use statehouse_store::{Address, Consistency, Page, Query, Row, Scan, Segment, StoreError, Table};

use crate::expression::{Condition, ExpressionPlaceholders};
use crate::inner::DynamoInner;
use crate::item::{self, EXPIRES, Item, ItemKey, PK, SK};
use crate::item_write::{ItemWrite, WriteKind};
use crate::key::{self, SortKeyRange};

/// Server pages that are read for one page of the contract. With many tombstones, or with other tenants' rows in a scan, a
/// page is short instead of late.
const SERVER_PAGES_MAX: usize = 16;
/// Tombstones that are deleted after one read.
const TOMBSTONES_PER_READ_MAX: usize = 100;

/// Rows that were read, and the key at which the server stopped.
#[derive(Default)]
struct CollectedRows {
    rows: Vec<Row>,
    last_key: Option<Item>,
    /// The keys of expired tombstones.
    expired: Vec<ItemKey>,
}

/// The request for a page of a range.
pub(crate) struct RangeRead {
    pub(crate) index: Option<String>,
    pub(crate) condition: String,
    pub(crate) terms: ExpressionPlaceholders,
    /// One more than the page, to learn whether there are more.
    pub(crate) wanted: usize,
    pub(crate) strong: bool,
}

impl RangeRead {
    /// `None` if the range is empty.
    pub(crate) fn of(query: &Query) -> Option<RangeRead> {
        let (pk_name, sk_name) = match query.read_index() {
            Some(index) => item::index_names(&index.name),
            None => (PK.to_owned(), SK.to_owned()),
        };
        let mut terms = ExpressionPlaceholders::default();
        let partition = match query.tenant() {
            Some(tenant) => key::encode_for(tenant.as_str(), query.partition_values()),
            None => key::encode(query.partition_values()),
        };
        let mut condition =
            format!("{} = {}", terms.name(&pk_name), terms.value(AttributeValue::S(partition)));
        match key::range(query) {
            SortKeyRange::Empty => return None,
            SortKeyRange::Whole => {}
            SortKeyRange::From(low) => {
                let low = terms.value(AttributeValue::S(low));
                condition.push_str(&format!(" AND {} >= {low}", terms.name(&sk_name)));
            }
            SortKeyRange::Between(low, high) => {
                let (low, high) = (terms.value(AttributeValue::S(low)), terms.value(AttributeValue::S(high)));
                condition.push_str(&format!(" AND {} BETWEEN {low} AND {high}", terms.name(&sk_name)));
            }
        }
        let index = query.read_index().map(|index| item::index_physical(&index.name));
        let strong = index.is_none() && query.consistency() == Consistency::Strong;
        Some(RangeRead { index, condition, terms, wanted: query.page_limit() + 1, strong })
    }
}

/// The filter of a scan of one tenant's rows.
pub(crate) fn scan_filter(scan: &Scan, terms: &mut ExpressionPlaceholders) -> Option<String> {
    let tenant = scan.tenant()?;
    let prefix = AttributeValue::S(key::encode_for(tenant.as_str(), []));
    Some(format!("begins_with({}, {})", terms.name(PK), terms.value(prefix)))
}

impl DynamoInner {
    pub(crate) async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        let mut keys = Vec::with_capacity(addresses.len());
        for address in addresses {
            let live = self.catalog.live(&self.client, address.table()).await?;
            keys.push(ItemKey::at(address, &live.physical));
        }
        let strong = consistency == Consistency::Strong;
        let items =
            self.client.get_all(&keys, strong).await.map_err(|error| error.into_error("a read of rows"))?;
        let rows = addresses.iter().zip(&keys).map(|(address, key)| match items.get(key) {
            Some(item) => item::row(item, address.table()),
            None => Ok(None),
        });
        rows.collect()
    }

    pub(crate) async fn query(self: &Arc<Self>, query: &Query) -> Result<Page, StoreError> {
        let table = query.read_table();
        let live = self.catalog.live(&self.client, table).await?;
        if let Some(index) = query.read_index()
            && live.table.index(&index.name) != Some(index)
        {
            let place = format!("index {table}.{}", index.name);
            return Err(StoreError::schema(place, "the live table has no such index; migrate to it"));
        }
        let Some(RangeRead { index, condition, terms, wanted, strong }) = RangeRead::of(query) else {
            return Ok(Page { rows: Vec::new(), next: None });
        };
        let mut collected = CollectedRows::default();
        for _ in 0..SERVER_PAGES_MAX {
            let left = i32::try_from(wanted - collected.rows.len()).unwrap_or(i32::MAX);
            let request = || {
                self.client
                    .sdk
                    .query()
                    .table_name(&live.physical)
                    .set_index_name(index.clone())
                    .key_condition_expression(&condition)
                    .set_expression_attribute_names(terms.names())
                    .set_expression_attribute_values(terms.values())
                    .consistent_read(strong)
                    .scan_index_forward(query.direction() == Direction::Forward)
                    .limit(left)
                    .set_exclusive_start_key(collected.last_key.clone())
                    .send()
            };
            let page = self
                .client
                .send_with_retries(request)
                .await
                .map_err(|error| error.into_error(&live.physical))?;
            self.collect_items(&mut collected, table, &live.physical, page.items, page.last_evaluated_key)?;
            if collected.last_key.is_none() || collected.rows.len() >= wanted {
                break;
            }
        }
        self.delete_tombstones(std::mem::take(&mut collected.expired));
        let at_key = |item: &Item| item::key_row(item, table).filter(|_| index.is_none());
        Ok(page(collected, query.page_limit(), at_key, |row| query.cursor_at(row)))
    }

    /// Segments by hash: as the server divides a parallel scan. The server cannot divide a segment again.
    pub(crate) fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        check_segments(max)?;
        if let (Some(_), Some(segment)) = (scan.hash_segment()?, scan.segment()) {
            return Ok(vec![segment.clone()]);
        }
        let total = u32::try_from(max).map_err(|_| bug!("{max} segments"))?;
        Ok((0..total).map(|index| Segment::by_hash(scan.read_table(), index, total)).collect())
    }

    pub(crate) async fn scan(self: &Arc<Self>, scan: &Scan) -> Result<Page, StoreError> {
        let table = scan.read_table();
        let segment = match scan.hash_segment()? {
            Some((index, total)) => Some((
                i32::try_from(index).map_err(|_| bug!("segment {index}"))?,
                i32::try_from(total).map_err(|_| bug!("{total} segments"))?,
            )),
            None => None,
        };
        let live = self.catalog.live(&self.client, table).await?;
        let mut terms = ExpressionPlaceholders::default();
        let filter = scan_filter(scan, &mut terms);
        let mut collected =
            CollectedRows { last_key: start_of(scan, &live.physical)?, ..CollectedRows::default() };
        let wanted = scan.page_limit() + 1;
        for _ in 0..SERVER_PAGES_MAX {
            let left = i32::try_from(wanted - collected.rows.len()).unwrap_or(i32::MAX);
            let request = || {
                // The server applies a filter after the limit. A scan with a filter therefore uses the server's own page
                // size.
                self.client
                    .sdk
                    .scan()
                    .table_name(&live.physical)
                    .set_filter_expression(filter.clone())
                    .set_expression_attribute_names(terms.names())
                    .set_expression_attribute_values(terms.values())
                    .consistent_read(true)
                    .set_limit(filter.is_none().then_some(left))
                    .set_segment(segment.map(|(index, _)| index))
                    .set_total_segments(segment.map(|(_, total)| total))
                    .set_exclusive_start_key(collected.last_key.clone())
                    .send()
            };
            let page = self
                .client
                .send_with_retries(request)
                .await
                .map_err(|error| error.into_error(&live.physical))?;
            self.collect_items(&mut collected, table, &live.physical, page.items, page.last_evaluated_key)?;
            if collected.last_key.is_none() || collected.rows.len() >= wanted {
                break;
            }
        }
        self.delete_tombstones(std::mem::take(&mut collected.expired));
        let at_key = |item: &Item| item::key_row(item, table);
        Ok(page(collected, scan.page_limit(), at_key, |row| scan.cursor_at(row)))
    }

    fn collect_items(
        &self,
        collected: &mut CollectedRows,
        table: &Arc<Table>,
        physical: &str,
        items: Option<Vec<Item>>,
        last_key: Option<Item>,
    ) -> Result<(), StoreError> {
        let now_seconds = self.clock.now().micros() / 1_000_000;
        let skew_seconds = i64::try_from(self.clock_skew.as_secs()).unwrap_or(i64::MAX).saturating_add(1);
        for item in items.unwrap_or_default() {
            match item::row(&item, table)? {
                Some(row) => collected.rows.push(row),
                None => {
                    let expired = item::integer(&item, EXPIRES)
                        .is_some_and(|at| at.saturating_add(skew_seconds) < now_seconds);
                    if expired && collected.expired.len() < TOMBSTONES_PER_READ_MAX {
                        collected.expired.extend(ItemKey::in_item(physical, &item));
                    }
                }
            }
        }
        collected.last_key = last_key.filter(|key| !key.is_empty());
        Ok(())
    }

    /// Deletes expired tombstones in the background. The server's own expiry may take days, and until then every read of
    /// the range reads them.
    fn delete_tombstones(self: &Arc<Self>, expired: Vec<ItemKey>) {
        if expired.is_empty() || self.deleting_tombstones.swap(true, Ordering::SeqCst) {
            return;
        }
        let inner = self.clone();
        let now_seconds = self.clock.now().micros() / 1_000_000;
        tokio::spawn(async move {
            for key in expired {
                let mut terms = ExpressionPlaceholders::default();
                let condition = Condition::missing(&mut terms, VERSION);
                let condition =
                    condition.and(Condition::compare(&mut terms, EXPIRES, "<", item::number(now_seconds)));
                let verb = WriteKind::Delete;
                let action = ItemWrite::new(&key.table, key.attributes(), verb, condition, terms);
                // The next reader deletes those that stay.
                if inner.client.write_one(&action).await.is_err() {
                    break;
                }
            }
            inner.client.retry_clock.sleep(Duration::from_millis(100)).await;
            inner.deleting_tombstones.store(false, Ordering::SeqCst);
        });
    }
}

/// The key after which a scan continues.
fn start_of(scan: &Scan, physical: &str) -> Result<Option<Item>, StoreError> {
    let Some(cursor) = scan.cursor_values() else { return Ok(None) };
    let start = cursor.split_first().and_then(|(tenant, values)| {
        let tenant = statehouse_store::Tenant::new(tenant.as_text()?).ok()?;
        Some(ItemKey::of(scan.read_table(), physical, &tenant, values).attributes())
    });
    start.map(Some).ok_or_else(|| bug!("a scan's cursor does not begin with a tenant").into())
}

/// The page of the contract, from the rows that were collected.
fn page(
    collected: CollectedRows,
    limit: usize,
    at_key: impl Fn(&Item) -> Option<Row>,
    cursor_at: impl Fn(&Row) -> statehouse_store::Cursor,
) -> Page {
    let CollectedRows { mut rows, last_key, .. } = collected;
    if rows.len() > limit {
        rows.truncate(limit);
        let next = rows.last().map(cursor_at);
        return Page { rows, next };
    }
    // The server stopped early. It may have stopped at a tombstone or at another tenant's row. The cursor may name any key.
    // An index has neither, and its cursor needs the columns of the last row.
    let next = last_key.and_then(|item| at_key(&item).or_else(|| rows.last().cloned()));
    Page { next: next.as_ref().map(cursor_at), rows }
}
