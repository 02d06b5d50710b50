//! Reads of rows. Tombstones are passed over; those that have outlived their use are swept on the way.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::read::Direction;
use statehouse_store::table::VERSION;
use statehouse_store::{Address, Consistency, Page, Query, Row, Scan, StoreError, Table};

use crate::action::{self, Action};
use crate::expression::{Condition, Terms};
use crate::inner::Inner;
use crate::item::{self, EXPIRES, Item, Key, PK, SK};
use crate::key::{self, Range};

/// Pages of the server that make up one page here, at most: behind many tombstones, or other tenants' rows in a walk, a
/// page comes back short rather than late.
const SERVER_PAGES_MAX: usize = 16;
/// Tombstones that are swept after one read.
const SWEEP_MAX: usize = 100;

/// Rows that were read, and where the server stopped.
#[derive(Default)]
struct Gathered {
    rows: Vec<Row>,
    stopped: Option<Item>,
    /// The keys of tombstones that have outlived their use.
    spent: Vec<Key>,
}

/// What the server is asked for a page of a range.
pub(crate) struct RangeRead {
    pub(crate) index: Option<String>,
    pub(crate) condition: String,
    pub(crate) terms: Terms,
    /// One more than asked for tells whether there are more.
    pub(crate) wanted: usize,
    pub(crate) strong: bool,
}

impl RangeRead {
    /// `None` if nothing can be in the range.
    pub(crate) fn of(query: &Query) -> Option<RangeRead> {
        let (pk_name, sk_name) = match query.read_index() {
            Some(index) => item::index_names(&index.name),
            None => (PK.to_owned(), SK.to_owned()),
        };
        let mut terms = Terms::default();
        let partition = match query.tenant() {
            Some(tenant) => key::encode_for(tenant.as_str(), query.partition_values()),
            None => key::encode(query.partition_values()),
        };
        let mut condition =
            format!("{} = {}", terms.name(&pk_name), terms.value(AttributeValue::S(partition)));
        match key::range(query) {
            Range::Nothing => return None,
            Range::Whole => {}
            Range::From(low) => {
                let low = terms.value(AttributeValue::S(low));
                condition.push_str(&format!(" AND {} >= {low}", terms.name(&sk_name)));
            }
            Range::Between(low, high) => {
                let (low, high) = (terms.value(AttributeValue::S(low)), terms.value(AttributeValue::S(high)));
                condition.push_str(&format!(" AND {} BETWEEN {low} AND {high}", terms.name(&sk_name)));
            }
        }
        let index = query.read_index().map(|index| item::index_physical(&index.name));
        let strong = index.is_none() && query.consistency() == Consistency::Strong;
        Some(RangeRead { index, condition, terms, wanted: query.page_limit() + 1, strong })
    }
}

/// The condition on which a walk over one tenant's rows lets an item through.
pub(crate) fn walk_filter(scan: &Scan, terms: &mut Terms) -> Option<String> {
    let tenant = scan.tenant()?;
    let prefix = AttributeValue::S(key::encode_for(tenant.as_str(), []));
    Some(format!("begins_with({}, {})", terms.name(PK), terms.value(prefix)))
}

impl Inner {
    pub(crate) async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        let mut keys = Vec::with_capacity(addresses.len());
        for address in addresses {
            let live = self.catalog.live(&self.wire, address.table()).await?;
            keys.push(Key::at(address, &live.physical));
        }
        let strong = consistency == Consistency::Strong;
        let items =
            self.wire.get_all(&keys, strong).await.map_err(|fault| fault.into_error("a read of rows"))?;
        let rows = addresses.iter().zip(&keys).map(|(address, key)| match items.get(key) {
            Some(item) => item::row(item, address.table()),
            None => Ok(None),
        });
        rows.collect()
    }

    pub(crate) async fn query(self: &Arc<Self>, query: &Query) -> Result<Page, StoreError> {
        let table = query.read_table();
        let live = self.catalog.live(&self.wire, table).await?;
        if let Some(index) = query.read_index()
            && live.table.index(&index.name) != Some(index)
        {
            let place = format!("index {table}.{}", index.name);
            return Err(StoreError::schema(place, "the live table has no such index; migrate to it"));
        }
        let Some(RangeRead { index, condition, terms, wanted, strong }) = RangeRead::of(query) else {
            return Ok(Page { rows: Vec::new(), next: None });
        };
        let mut gathered = Gathered::default();
        for _ in 0..SERVER_PAGES_MAX {
            let left = i32::try_from(wanted - gathered.rows.len()).unwrap_or(i32::MAX);
            let request = || {
                self.wire
                    .client
                    .query()
                    .table_name(&live.physical)
                    .set_index_name(index.clone())
                    .key_condition_expression(&condition)
                    .set_expression_attribute_names(terms.names())
                    .set_expression_attribute_values(terms.values())
                    .consistent_read(strong)
                    .scan_index_forward(query.direction() == Direction::Forward)
                    .limit(left)
                    .set_exclusive_start_key(gathered.stopped.clone())
                    .send()
            };
            let page = self.wire.repeat(request).await.map_err(|fault| fault.into_error(&live.physical))?;
            self.gather(&mut gathered, table, &live.physical, page.items, page.last_evaluated_key)?;
            if gathered.stopped.is_none() || gathered.rows.len() >= wanted {
                break;
            }
        }
        self.sweep(std::mem::take(&mut gathered.spent));
        let at_key = |item: &Item| item::key_row(item, table).filter(|_| index.is_none());
        Ok(page(gathered, query.page_limit(), at_key, |row| query.cursor_at(row)))
    }

    pub(crate) async fn scan(self: &Arc<Self>, scan: &Scan) -> Result<Page, StoreError> {
        let table = scan.read_table();
        let live = self.catalog.live(&self.wire, table).await?;
        let mut terms = Terms::default();
        let filter = walk_filter(scan, &mut terms);
        let mut gathered = Gathered { stopped: start_of(scan, &live.physical), ..Gathered::default() };
        let wanted = scan.page_limit() + 1;
        for _ in 0..SERVER_PAGES_MAX {
            let left = i32::try_from(wanted - gathered.rows.len()).unwrap_or(i32::MAX);
            let request = || {
                // A filter is applied after the limit, so a walk over one tenant's rows lets the server's own limit
                // of a page do.
                self.wire
                    .client
                    .scan()
                    .table_name(&live.physical)
                    .set_filter_expression(filter.clone())
                    .set_expression_attribute_names(terms.names())
                    .set_expression_attribute_values(terms.values())
                    .consistent_read(true)
                    .set_limit(filter.is_none().then_some(left))
                    .set_exclusive_start_key(gathered.stopped.clone())
                    .send()
            };
            let page = self.wire.repeat(request).await.map_err(|fault| fault.into_error(&live.physical))?;
            self.gather(&mut gathered, table, &live.physical, page.items, page.last_evaluated_key)?;
            if gathered.stopped.is_none() || gathered.rows.len() >= wanted {
                break;
            }
        }
        self.sweep(std::mem::take(&mut gathered.spent));
        let at_key = |item: &Item| item::key_row(item, table);
        Ok(page(gathered, scan.page_limit(), at_key, |row| scan.cursor_at(row)))
    }

    fn gather(
        &self,
        gathered: &mut Gathered,
        table: &Arc<Table>,
        physical: &str,
        items: Option<Vec<Item>>,
        stopped: Option<Item>,
    ) -> Result<(), StoreError> {
        let now_seconds = self.clock.now().micros() / 1_000_000;
        let skew_seconds = i64::try_from(self.clock_skew.as_secs()).unwrap_or(0) + 1;
        for item in items.unwrap_or_default() {
            match item::row(&item, table)? {
                Some(row) => gathered.rows.push(row),
                None => {
                    let spent =
                        item::integer(&item, EXPIRES).is_some_and(|at| at + skew_seconds < now_seconds);
                    if spent && gathered.spent.len() < SWEEP_MAX {
                        gathered.spent.extend(Key::in_item(physical, &item));
                    }
                }
            }
        }
        gathered.stopped = stopped.filter(|key| !key.is_empty());
        Ok(())
    }

    /// Deletes tombstones that have outlived their use, beside the work. The server's own expiry may take days, and
    /// until then every read of the range passes over them.
    fn sweep(self: &Arc<Self>, spent: Vec<Key>) {
        if spent.is_empty() || self.sweeping.swap(true, Ordering::SeqCst) {
            return;
        }
        let inner = self.clone();
        let now_seconds = self.clock.now().micros() / 1_000_000;
        tokio::spawn(async move {
            for key in spent {
                let mut terms = Terms::default();
                let condition = Condition::missing(&mut terms, VERSION);
                let condition =
                    condition.and(Condition::compare(&mut terms, EXPIRES, "<", item::number(now_seconds)));
                let verb = action::Verb::Delete;
                let action = Action::new(&key.table, key.attributes(), verb, condition, terms);
                // What stays is swept by the next reader.
                if inner.wire.write_one(&action).await.is_err() {
                    break;
                }
            }
            inner.wire.pauses.sleep(Duration::from_millis(100)).await;
            inner.sweeping.store(false, Ordering::SeqCst);
        });
    }
}

/// Where a walk goes on.
fn start_of(scan: &Scan, physical: &str) -> Option<Item> {
    let (tenant, values) = scan.cursor_values()?.split_first()?;
    let tenant = statehouse_store::Tenant::new(tenant.as_text()?).ok()?;
    Some(Key::of(scan.read_table(), physical, &tenant, values).attributes())
}

/// The page that was asked for, out of what was gathered.
fn page(
    gathered: Gathered,
    limit: usize,
    at_key: impl Fn(&Item) -> Option<Row>,
    cursor_at: impl Fn(&Row) -> statehouse_store::Cursor,
) -> Page {
    let Gathered { mut rows, stopped, .. } = gathered;
    if rows.len() > limit {
        rows.truncate(limit);
        let next = rows.last().map(cursor_at);
        return Page { rows, next };
    }
    // The server stopped early. It may have stopped at a tombstone or at another tenant's row: any key will do. In an
    // index, which holds neither, a key alone does not say where the row stands; the last row does.
    let next = stopped.and_then(|item| at_key(&item).or_else(|| rows.last().cloned()));
    Page { next: next.as_ref().map(cursor_at), rows }
}
