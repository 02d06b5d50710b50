//! Reads of rows by key and of pages of ranges, any number of them as one statement.
//!
//! A [`MultiRead`] is a list of *items*: a row, a value of a row, or a page of a range. Items whose statements differ only in their
//! constants have one *shape*. Each shape is one `select`. Several shapes are joined with `union all`, and each answer contains the
//! number of its shape. All selects of a union have the same columns: for each type as many as the shape that needs most of that type.
//! If a statement has ranges, a row by key is returned as one column, a record: there are few such rows, and the many rows of a range
//! do not need a column for each of theirs. A value is returned in a column of its type: to build a record costs the server nearly as
//! much as the lookup. Columns that an item fixes, such as the key of a row, are not returned.
//!
//! If there is one item of each shape, its constants are parameters. Otherwise they are arrays, and a lateral subquery runs once for
//! each index of the arrays. Its rows come in the order of the range, one range after the other: a subquery with a limit that depends on
//! the outer row can only be the inner side of a nested loop, which preserves the order of both sides. So there are two texts for a list
//! of shapes, whatever the number of items.
//!
//! A page is read with one row more than its limit, which shows whether there is a next page. Cursors are row values in the order of the
//! index, compared as such, so that the server continues after the last page instead of skipping rows.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::bug;
use statehouse_store::read::Direction;
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{
    Address, Bug, Cell, Column, Page, Query, ReadRequest, ReadResult, Row, StoreError, Table, Tenant, Type,
    Value,
};

use crate::connection::DatabaseCall;
use crate::ddl::{INDEXED, Names};
use crate::read::{behind, ordered, page};
use crate::sql::{Arg, fields_at, int_at, name, placeholder, type_name, value_at};
use crate::tenancy::TransactionScope;

/// Planner settings for lookups. A cached plan is kept while its tables grow, so only index lookups in order are permitted. A
/// generic plan estimates a page as a tenth of its range, which must not trigger JIT compilation.
pub(crate) const LOOKUPS: [(&str, &str); 5] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_sort", "off"),
    ("jit", "off"),
];

/// One item to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReadItem<'a> {
    /// A row.
    Row(&'a Address),
    /// One value of a row.
    Value(&'a Cell),
    /// A page of a range.
    Range(&'a Query),
}

/// An owned [`ReadItem`].
#[derive(Clone, Debug)]
enum OwnedItem {
    Row(Address),
    Value(Cell),
    Range(Query),
}

impl OwnedItem {
    fn item(&self) -> ReadItem<'_> {
        match self {
            OwnedItem::Row(address) => ReadItem::Row(address),
            OwnedItem::Value(cell) => ReadItem::Value(cell),
            OwnedItem::Range(query) => ReadItem::Range(query),
        }
    }
}

impl<'a> ReadItem<'a> {
    fn owned(self) -> OwnedItem {
        match self {
            ReadItem::Row(address) => OwnedItem::Row(address.clone()),
            ReadItem::Value(cell) => OwnedItem::Value(cell.clone()),
            ReadItem::Range(query) => OwnedItem::Range(query.clone()),
        }
    }

    /// The address of a row, or of the row of a value.
    fn address(self) -> Option<&'a Address> {
        match self {
            ReadItem::Row(address) => Some(address),
            ReadItem::Value(cell) => Some(cell.address()),
            ReadItem::Range(_) => None,
        }
    }

    fn table(self) -> &'a Arc<Table> {
        match self {
            ReadItem::Row(address) => address.table(),
            ReadItem::Value(cell) => cell.address().table(),
            ReadItem::Range(query) => query.read_table(),
        }
    }

    fn tenant(self) -> Option<&'a Tenant> {
        match self {
            ReadItem::Row(address) => Some(address.tenant()),
            ReadItem::Value(cell) => Some(cell.address().tenant()),
            ReadItem::Range(query) => query.tenant(),
        }
    }

    /// The maximum number of rows that it can return.
    fn rows(self) -> usize {
        match self {
            ReadItem::Row(_) | ReadItem::Value(_) => 1,
            ReadItem::Range(query) => query.page_limit() + 1,
        }
    }

    /// The columns that it fixes, so that the server need not return them.
    fn fixed_columns(self) -> Vec<&'a Column> {
        match self {
            ReadItem::Row(address) => address.table().key_columns().iter().collect(),
            // The value is read even if it is a part of the key: the answer shows whether the row exists.
            ReadItem::Value(_) => Vec::new(),
            ReadItem::Range(query) => {
                let prefix = query.sort_columns().into_iter().take(query.prefix_values().len());
                query.partition_columns().into_iter().chain(prefix).collect()
            }
        }
    }

    /// The value of a fixed column, by its number.
    fn fixed_value(self, number: usize) -> Option<&'a Value> {
        match self {
            ReadItem::Row(address) => address.key().get(number),
            ReadItem::Value(_) => None,
            ReadItem::Range(query) => {
                let partition = query.partition_values();
                partition
                    .get(number)
                    .or_else(|| query.prefix_values().get(number.checked_sub(partition.len())?))
            }
        }
    }

    /// Whether two items have the same shape.
    pub(crate) fn is_like(self, other: ReadItem<'_>) -> bool {
        let (one, two) = (self.table(), other.table());
        if !Arc::ptr_eq(one, two) && one != two {
            return false;
        }
        match (self, other) {
            (ReadItem::Row(_), ReadItem::Row(_)) => true,
            (ReadItem::Value(one), ReadItem::Value(other)) => one.column_index() == other.column_index(),
            (ReadItem::Range(one), ReadItem::Range(other)) => {
                fn index(query: &Query) -> Option<&str> {
                    query.read_index().map(|index| index.name.as_str())
                }
                let kind = |bound: &Bound<Value>| std::mem::discriminant(bound);
                let kinds = |query: &Query| (kind(query.bounds().0), kind(query.bounds().1));
                // Where all sort columns are fixed there is none left to be bounded.
                let is_fixed = |query: &Query| query.prefix_values().len() == query.sort_columns().len();
                one.direction() == other.direction()
                    && one.tenant().is_some() == other.tenant().is_some()
                    && one.cursor_values().is_some() == other.cursor_values().is_some()
                    && one.prefix_values().len() == other.prefix_values().len()
                    && index(one) == index(other)
                    && (kinds(one) == kinds(other) || is_fixed(one))
            }
            _ => false,
        }
    }

    /// The values of its shape's constants, in their order.
    pub(crate) fn constants(self) -> Vec<Arg<'a>> {
        let mut constants: Vec<Arg<'a>> = Vec::new();
        constants.extend(self.tenant().map(|tenant| Arg::Text(tenant.as_str())));
        match self {
            ReadItem::Row(address) => constants.extend(address.key().iter().map(Arg::One)),
            ReadItem::Value(cell) => constants.extend(cell.address().key().iter().map(Arg::One)),
            ReadItem::Range(query) => {
                constants.extend(query.partition_values().iter().map(Arg::One));
                constants.extend(query.prefix_values().iter().map(Arg::One));
                constants.extend(bounds(query).map(|(_, value, _)| Arg::One(value)));
                constants.extend(query.cursor_values().unwrap_or_default().iter().map(Arg::One));
                constants.push(Arg::Int(i64::try_from(self.rows()).unwrap_or(i64::MAX)));
            }
        }
        constants
    }
}

impl ReadItem<'_> {
    /// Everything of its `select` behind the columns, under one more condition.
    pub(crate) fn source(self, names: &Names, constant: &dyn Fn(usize) -> String, condition: &str) -> String {
        source(names, self, constant, Some(condition))
    }
}

/// The bounds of a range: operator, value, and the column that they are of.
fn bounds(query: &Query) -> impl Iterator<Item = (&'static str, &Value, &Column)> {
    let column = query.sort_columns().get(query.prefix_values().len()).copied();
    let (lower, upper) = query.bounds();
    let bounds = [(lower, ">=", ">"), (upper, "<=", "<")].into_iter();
    bounds.filter_map(move |(bound, inclusive, exclusive)| match bound {
        Bound::Unbounded => None,
        Bound::Included(value) => Some((inclusive, value, column?)),
        Bound::Excluded(value) => Some((exclusive, value, column?)),
    })
}

/// Whether a range is empty in any case: it has at most one row, and the cursor is after it.
fn is_over(query: &Query) -> bool {
    query.cursor_values().is_some() && query.order_columns().is_empty()
}

/// Several reads that are one statement.
#[derive(Clone, Debug)]
pub(crate) struct MultiRead<'a> {
    /// Each with the number of its shape.
    items: Vec<(usize, ReadItem<'a>)>,
    /// The first item of each shape.
    shapes: Vec<ReadItem<'a>>,
}

impl<'a> MultiRead<'a> {
    pub(crate) fn of(requests: &[ReadRequest<'a>]) -> MultiRead<'a> {
        let mut read = MultiRead { items: Vec::new(), shapes: Vec::new() };
        for request in requests {
            match *request {
                ReadRequest::Get(addresses) => {
                    addresses.iter().for_each(|address| read.push(ReadItem::Row(address)));
                }
                ReadRequest::Value(cell) => read.push(ReadItem::Value(cell)),
                ReadRequest::Query(query) if is_over(query) => {}
                ReadRequest::Query(query) => read.push(ReadItem::Range(query)),
            }
        }
        read
    }

    fn push(&mut self, item: ReadItem<'a>) {
        let shape = match self.shapes.iter().position(|shape| shape.is_like(item)) {
            Some(shape) => shape,
            None => {
                self.shapes.push(item);
                self.shapes.len() - 1
            }
        };
        self.items.push((shape, item));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The most rows that it can give.
    pub(crate) fn rows(&self) -> usize {
        self.items.iter().map(|(_, item)| item.rows()).sum()
    }

    /// The tenants of the read.
    pub(crate) fn scope(&self) -> TransactionScope {
        let tenants: Option<BTreeSet<Tenant>> =
            self.items.iter().map(|(_, item)| item.tenant().cloned()).collect();
        tenants.map_or(TransactionScope::All, TransactionScope::Of)
    }

    pub(crate) fn tables(&self) -> Vec<&'a str> {
        self.shapes.iter().map(|shape| shape.table().name()).collect()
    }

    pub(crate) fn owned(&self) -> OwnedMultiRead {
        OwnedMultiRead(self.items.iter().map(|(shape, item)| (*shape, item.owned())).collect())
    }

    /// The results, from the rows of each item. `requests` are those that [`MultiRead::of`] was given.
    pub(crate) fn seen(
        &self,
        requests: &[ReadRequest<'_>],
        found: Option<&FoundRows>,
    ) -> Result<Vec<ReadResult>, StoreError> {
        let most = found.map_or(0, |found| found.rows.len());
        let room = |(_, item): &(usize, ReadItem<'_>)| Vec::with_capacity(item.rows().min(most));
        let mut rows: Vec<Vec<Row>> = self.items.iter().map(room).collect();
        if let Some(FoundRows { statement, rows: found }) = found {
            for (number, row) in found {
                let item = self.items.get(*number);
                let layout = item.and_then(|(shape, _)| statement.layouts.get(*shape));
                let (Some((_, item)), Some(layout), Some(rows)) = (item, layout, rows.get_mut(*number))
                else {
                    return Err(bug!("a row of item {number}, which was not read").into());
                };
                rows.push(layout.row(row, *item)?);
            }
        }
        let mut rows = rows.into_iter();
        let mut next = || rows.next().ok_or_else(|| bug!("fewer items were read than requests have"));
        let seen = requests.iter().map(|request| {
            Ok(match request {
                ReadRequest::Get(addresses) => {
                    let rows = addresses.iter().map(|_| Ok(next()?.into_iter().next()));
                    ReadResult::Rows(rows.collect::<Result<_, Bug>>()?)
                }
                ReadRequest::Value(cell) => {
                    ReadResult::Value(next()?.into_iter().next().and_then(|row| cell.value_in(row)))
                }
                ReadRequest::Query(query) if is_over(query) => {
                    ReadResult::Page(Page { rows: Vec::new(), next: None })
                }
                ReadRequest::Query(query) => {
                    ReadResult::Page(page(next()?, query.page_limit(), |row| query.cursor_at(row)))
                }
            })
        });
        Ok(seen.collect::<Result<_, Bug>>()?)
    }
}

/// An owned [`MultiRead`], for the queue.
#[derive(Debug)]
pub(crate) struct OwnedMultiRead(Vec<(usize, OwnedItem)>);

impl OwnedMultiRead {
    pub(crate) fn borrowed(&self) -> MultiRead<'_> {
        let items = self.0.iter().map(|(shape, owned)| (*shape, owned.item())).collect();
        MultiRead { items, shapes: self.shapes().collect() }
    }

    /// The first item of each shape. Shapes are numbered in the order of their first items.
    fn shapes(&self) -> impl Iterator<Item = ReadItem<'_>> {
        let mut met = 0;
        let is_first = move |(shape, _): &&(usize, OwnedItem)| {
            let is_first = *shape == met;
            met += usize::from(is_first);
            is_first
        };
        self.0.iter().filter(is_first).map(|(_, owned)| owned.item())
    }

    /// Whether another has the same shapes in the same order, so that one statement can serve both.
    pub(crate) fn is_like(&self, other: &OwnedMultiRead) -> bool {
        let (mut one, mut other) = (self.shapes(), other.shapes());
        loop {
            match (one.next(), other.next()) {
                (None, None) => return true,
                (Some(one), Some(other)) if one.is_like(other) => {}
                _ => return false,
            }
        }
    }
}

/// The rows of a read as the server sent them, each with the number of its item.
pub(crate) struct FoundRows {
    statement: Arc<ReadStatement>,
    rows: Vec<(usize, tokio_postgres::Row)>,
}

/// Reads of the same shapes as one call.
pub(crate) struct ReadCall<'a> {
    pub call: DatabaseCall<'a>,
    statement: Arc<ReadStatement>,
    /// For each shape, the read and the item at each index of its arrays.
    indexes: Vec<Vec<(usize, usize)>>,
    reads: usize,
}

impl<'a> ReadCall<'a> {
    /// The call for all of these reads, which have the same shapes; `None` if they have no items.
    pub(crate) fn of(
        names: &Names,
        statements: &ReadStatements,
        reads: &[MultiRead<'a>],
    ) -> Option<ReadCall<'a>> {
        let shapes = reads.first().map(|read| &read.shapes).filter(|shapes| !shapes.is_empty())?;
        let mut indexes: Vec<Vec<(usize, usize)>> = shapes.iter().map(|_| Vec::new()).collect();
        for (number, read) in reads.iter().enumerate() {
            for (item, (shape, _)) in read.items.iter().enumerate() {
                indexes.get_mut(*shape)?.push((number, item));
            }
        }
        let way = if indexes.iter().all(|indexes| indexes.len() == 1) {
            ConstantSource::Parameters
        } else {
            ConstantSource::Arrays
        };
        let statement = statements.of(names, shapes, way);
        let mut args: Vec<Arg<'a>> = Vec::new();
        for (indexes, kinds) in indexes.iter().zip(&statement.kinds) {
            let mut items = indexes
                .iter()
                .filter_map(|(read, item)| Some(reads.get(*read)?.items.get(*item)?.1.constants()));
            let Some(first) = items.next() else { continue };
            if way == ConstantSource::Parameters {
                args.extend(first);
                continue;
            }
            let mut columns: Vec<Vec<Arg<'a>>> = first.into_iter().map(|constant| vec![constant]).collect();
            for constants in items {
                columns.iter_mut().zip(constants).for_each(|(column, constant)| column.push(constant));
            }
            args.extend(kinds.iter().zip(columns).map(|(kind, column)| Arg::List(kind, column)));
        }
        let call = DatabaseCall::new(statement.text.clone(), args);
        Some(ReadCall { call, statement, indexes, reads: reads.len() })
    }

    /// The rows of each read.
    pub(crate) fn found(&self, rows: Vec<tokio_postgres::Row>) -> Result<Vec<FoundRows>, StoreError> {
        let each = rows.len() / self.reads.max(1);
        let none = || FoundRows { statement: self.statement.clone(), rows: Vec::with_capacity(each) };
        let mut found: Vec<FoundRows> = (0..self.reads).map(|_| none()).collect();
        for row in rows {
            let (shape, index) = self.statement.index_of(&row)?;
            let target = self.indexes.get(shape).and_then(|indexes| indexes.get(index));
            let target = target.and_then(|(read, item)| Some((found.get_mut(*read)?, *item)));
            let Some((found, item)) = target else {
                return Err(bug!("an answer for index {index} of shape {shape}, which was not sent").into());
            };
            found.rows.push((item, row));
        }
        Ok(found)
    }
}

/// Where the constants of a statement come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConstantSource {
    /// Parameters: there is one item of each shape.
    Parameters,
    /// Arrays, with an element for each item.
    Arrays,
}

/// The statement for a list of shapes.
#[derive(Debug)]
struct ReadStatement {
    text: Arc<str>,
    way: ConstantSource,
    /// The types of each shape's constants.
    kinds: Vec<Vec<&'static str>>,
    /// The positions of each shape's columns in an answer.
    layouts: Vec<ResultLayout>,
}

/// The most recent statements, each with items of its shapes. Building a text again would take longer than everything else that
/// the client does for a lone read.
#[derive(Default)]
pub(crate) struct ReadStatements(Mutex<Vec<(Vec<OwnedItem>, Arc<ReadStatement>)>>);

impl ReadStatements {
    /// Shapes come from actions, of which there are few. The limit is for callers that generate shapes.
    const MOST: usize = 256;

    fn of(&self, names: &Names, shapes: &[ReadItem<'_>], way: ConstantSource) -> Arc<ReadStatement> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(owned, statement): &(Vec<OwnedItem>, Arc<ReadStatement>)| {
            statement.way == way
                && owned.len() == shapes.len()
                && owned.iter().zip(shapes).all(|(owned, shape)| owned.item().is_like(*shape))
        };
        let mut known = lock();
        if let Some(index) = known.iter().position(is_it) {
            // To the front, where it is found first.
            known.get_mut(..=index).unwrap_or_default().rotate_right(1);
            if let Some((_, statement)) = known.first() {
                return statement.clone();
            }
        }
        drop(known);
        let statement = Arc::new(ReadStatement::of(names, shapes, way));
        let mut known = lock();
        known.truncate(ReadStatements::MOST - 1);
        known.insert(0, (shapes.iter().map(|shape| shape.owned()).collect(), statement.clone()));
        statement
    }
}

impl ReadStatement {
    fn of(names: &Names, shapes: &[ReadItem<'_>], way: ConstantSource) -> ReadStatement {
        let is_union = shapes.len() > 1;
        let leading = usize::from(is_union) + usize::from(way == ConstantSource::Arrays);
        let outputs: Vec<Vec<(String, Type)>> = shapes.iter().map(|shape| outputs(*shape)).collect();
        let is_row = |shape: &ReadItem<'_>| matches!(shape, ReadItem::Row(_));
        let is_range = |shape: &ReadItem<'_>| matches!(shape, ReadItem::Range(_));
        // In a statement with ranges, rows by key are records.
        let has_records = shapes.iter().any(is_row) && shapes.iter().any(is_range);
        let is_record = |shape: &ReadItem<'_>| has_records && is_row(shape);
        let in_slots = shapes.iter().zip(&outputs).filter(|(shape, _)| !is_record(shape));
        let slots = ColumnSlots::of(&in_slots.map(|(_, outputs)| outputs.as_slice()).collect::<Vec<_>>());
        let kinds: Vec<Vec<&'static str>> = shapes.iter().map(|shape| kinds(*shape)).collect();
        let (mut selects, mut layouts, mut parameters) = (Vec::new(), Vec::new(), 0);
        for (number, ((shape, outputs), kinds)) in shapes.iter().zip(&outputs).zip(&kinds).enumerate() {
            let mut shown: Vec<String> = Vec::new();
            if is_union {
                shown.push(format!("{number} as _shape"));
            }
            if way == ConstantSource::Arrays {
                shown.push("k._place".to_owned());
            }
            let is_record = is_record(shape);
            let columns = || outputs.iter().map(|(column, _)| column.as_str()).collect::<Vec<&str>>();
            let indexes = match is_union && !is_record {
                true => {
                    slots.indexes(outputs).into_iter().map(|index| index + usize::from(has_records)).collect()
                }
                false => (0..outputs.len()).collect::<Vec<usize>>(),
            };
            match is_union {
                false => shown.extend(columns().into_iter().map(str::to_owned)),
                true if is_record => {
                    shown.push(format!("row({})", columns().join(", ")));
                    shown.extend(slots.filled(&[], &[]));
                }
                true => {
                    shown.extend(has_records.then(|| "null::record".to_owned()));
                    let in_slots = slots.indexes(outputs);
                    shown.extend(slots.filled(outputs, &in_slots));
                }
            }
            layouts.push(ResultLayout::of(*shape, leading, indexes, is_record));
            let select = match way {
                ConstantSource::Parameters => {
                    let constant = |number: usize| placeholder(parameters + number);
                    let select = source(names, *shape, &constant, None);
                    let select = format!("select {}\n{select}", shown.join(", "));
                    if is_union { format!("({select})") } else { select }
                }
                ConstantSource::Arrays => {
                    let arrays: Vec<String> = kinds
                        .iter()
                        .enumerate()
                        .map(|(number, kind)| format!("{}::{kind}[]", placeholder(parameters + number)))
                        .collect();
                    let columns: Vec<String> =
                        (1..=kinds.len()).map(|number| format!("c{number}, ")).collect();
                    let inner: Vec<&str> = outputs.iter().map(|(column, _)| column.as_str()).collect();
                    // A whole key has one row. The limit keeps the subquery on the inner side of a nested loop.
                    let limit = if shape.address().is_some() { "\nlimit 1" } else { "" };
                    format!(
                        "select {}\nfrom unnest({}) with ordinality as k({}_place)\ncross join lateral (\n\
                         select {}\n{}{limit}\n) as t",
                        shown.join(", "),
                        arrays.join(", "),
                        columns.concat(),
                        inner.join(", "),
                        source(names, *shape, &|number| format!("k.c{}", number + 1), None),
                    )
                }
            };
            parameters += kinds.len();
            selects.push(select);
        }
        ReadStatement { text: selects.join("\nunion all\n").into(), way, kinds, layouts }
    }

    /// The shape of a row, and its index in the arrays of that shape.
    fn index_of(&self, row: &tokio_postgres::Row) -> Result<(usize, usize), StoreError> {
        let number = |index: usize| -> Result<usize, StoreError> {
            let number = int_at(row, index, "a read")?;
            let invalid = |_| StoreError::corrupt("a read", format!("an answer has the number {number}"));
            usize::try_from(number).map_err(invalid)
        };
        let is_union = self.layouts.len() > 1;
        let shape = if is_union { number(0)? } else { 0 };
        let index = match self.way {
            ConstantSource::Parameters => 0,
            // Counted from 1.
            ConstantSource::Arrays => number(usize::from(is_union))?.wrapping_sub(1),
        };
        Ok((shape, index))
    }
}

/// The columns that are returned for a shape: the tenant if the read is not of one tenant, the columns that are not fixed and the
/// version; or the one value.
fn outputs(shape: ReadItem<'_>) -> Vec<(String, Type)> {
    if let ReadItem::Value(cell) = shape {
        let column = shape.table().columns().get(cell.column_index());
        return column.map(|column| (format!("t.{}", name(&column.name)), column.kind)).into_iter().collect();
    }
    let owner = shape.tenant().is_none().then_some((TENANT, Type::Text));
    let fixed = shape.fixed_columns();
    let is_open = |column: &&Column| fixed.iter().all(|fixed| fixed.name != column.name);
    let columns = shape.table().columns().iter().filter(is_open);
    let columns = columns.map(|column| (column.name.as_str(), column.kind));
    let all = owner.into_iter().chain(columns).chain([(VERSION, Type::Int)]);
    all.map(|(column, kind)| (format!("t.{}", name(column)), kind)).collect()
}

/// The types of a shape's constants, in the order of [`ReadItem::constants`].
fn kinds(shape: ReadItem<'_>) -> Vec<&'static str> {
    let of = |columns: &mut dyn Iterator<Item = &Column>| -> Vec<&'static str> {
        columns.map(|column| type_name(column.kind)).collect()
    };
    let mut kinds: Vec<&'static str> = Vec::new();
    kinds.extend(shape.tenant().map(|_| type_name(Type::Text)));
    match shape {
        ReadItem::Row(_) | ReadItem::Value(_) => kinds.extend(of(&mut shape.table().key_columns().iter())),
        ReadItem::Range(query) => {
            kinds.extend(of(&mut query.partition_columns().into_iter()));
            kinds.extend(of(&mut query.sort_columns().into_iter().take(query.prefix_values().len())));
            kinds.extend(bounds(query).map(|(_, _, column)| type_name(column.kind)));
            if query.cursor_values().is_some() {
                kinds.extend(of(&mut query.order_columns().into_iter()));
            }
            kinds.push(type_name(Type::Int));
        }
    }
    kinds
}

/// Everything of a shape's `select` behind its columns. `constant` names a constant by its number.
fn source(
    names: &Names,
    shape: ReadItem<'_>,
    constant: &dyn Fn(usize) -> String,
    condition: Option<&str>,
) -> String {
    let mut named = 0;
    let mut next = || {
        named += 1;
        constant(named - 1)
    };
    let mut conditions: Vec<String> = condition.map(str::to_owned).into_iter().collect();
    if shape.tenant().is_some() {
        conditions.push(format!("t.{TENANT} = {}", next()));
    }
    let from = |conditions: &[String]| {
        format!("from {} as t\nwhere {}", names.table(shape.table().name()), conditions.join(" and "))
    };
    let query = match shape {
        ReadItem::Row(_) | ReadItem::Value(_) => {
            let keys = shape.table().key_columns().iter();
            conditions.extend(keys.map(|column| format!("t.{} = {}", name(&column.name), next())));
            return from(&conditions);
        }
        ReadItem::Range(query) => query,
    };
    let sort = query.sort_columns();
    let fixed =
        query.partition_columns().into_iter().chain(sort.into_iter().take(query.prefix_values().len()));
    conditions.extend(fixed.map(|column| format!("t.{} = {}", name(&column.name), next())));
    conditions.extend(
        bounds(query).map(|(operator, _, column)| format!("{} {operator} {}", ordered(column), next())),
    );
    if let Some(index) = query.read_index() {
        // The planner uses a partial index only if the statement contains its conditions.
        conditions.push(format!("t.{INDEXED}"));
        let table = query.read_table();
        let sparse =
            index.columns().filter_map(|column| table.column(column)).filter(|column| !column.required);
        conditions.extend(sparse.map(|column| format!("t.{} is not null", name(&column.name))));
    }
    let order: Vec<String> = query.order_columns().into_iter().map(ordered).collect();
    let (operator, direction) = match query.direction() {
        Direction::Forward => (">", ""),
        Direction::Backward => ("<", " desc"),
    };
    if query.cursor_values().is_some() {
        let after: Vec<String> = order.iter().map(|_| next()).collect();
        conditions.push(behind(&order, operator, &after));
    }
    let mut text = from(&conditions);
    if !order.is_empty() {
        let order: Vec<String> = order.iter().map(|column| format!("{column}{direction}")).collect();
        text.push_str(&format!("\norder by {}", order.join(", ")));
    }
    text.push_str(&format!("\nlimit {}", next()));
    text
}

/// The columns of a union: for each type as many as the shape that needs most of that type.
struct ColumnSlots(Vec<(Type, usize)>);

impl ColumnSlots {
    fn of(shapes: &[&[(String, Type)]]) -> ColumnSlots {
        let of = |kind: Type, shape: &[(String, Type)]| shape.iter().filter(|(_, of)| *of == kind).count();
        let most = |kind: Type| shapes.iter().map(|shape| of(kind, shape)).max().unwrap_or(0);
        ColumnSlots(Type::ALL.map(|kind| (kind, most(kind))).into())
    }

    /// The slot of each column.
    fn indexes(&self, columns: &[(String, Type)]) -> Vec<usize> {
        let mut taken = Type::ALL.map(|kind| (kind, 0));
        let index = |(_, kind): &(String, Type)| {
            let before: usize = self.0.iter().take_while(|(of, _)| of != kind).map(|(_, count)| count).sum();
            let own = taken.iter_mut().find(|(of, _)| of == kind);
            let own = own.map_or(0, |(_, taken)| {
                *taken += 1;
                *taken - 1
            });
            before + own
        };
        columns.iter().map(index).collect()
    }

    /// The expression for each slot.
    fn filled(&self, columns: &[(String, Type)], indexes: &[usize]) -> Vec<String> {
        let kinds = self.0.iter().flat_map(|(kind, count)| std::iter::repeat_n(*kind, *count));
        let filled = kinds.enumerate().map(|(slot, kind)| {
            let mut taken = indexes.iter().zip(columns).filter(|(index, _)| **index == slot);
            taken
                .next()
                .map_or_else(|| format!("null::{}", type_name(kind)), |(_, (column, _))| column.clone())
        });
        filled.collect()
    }
}

/// The positions of a row's columns in an answer.
#[derive(Debug)]
struct ResultLayout {
    /// How many columns come before those of any row.
    first: usize,
    /// Behind them, or in the record there: its owner's if it names one, the table's columns that are not fixed, the version.
    indexes: Vec<usize>,
    /// Whether they are one column, a record.
    is_record: bool,
    names_owner: bool,
    /// Of each column of the table, the number under which the item fixes it, if it does.
    fixed: Vec<Option<usize>>,
}

impl ResultLayout {
    fn of(shape: ReadItem<'_>, first: usize, indexes: Vec<usize>, is_record: bool) -> ResultLayout {
        let known = shape.fixed_columns();
        let columns = shape.table().columns().iter();
        let fixed = columns.map(|column| known.iter().position(|known| known.name == column.name)).collect();
        ResultLayout { first, indexes, is_record, names_owner: shape.tenant().is_none(), fixed }
    }

    fn row(&self, row: &tokio_postgres::Row, item: ReadItem<'_>) -> Result<Row, StoreError> {
        let table = item.table();
        let record = match self.is_record {
            true => Some(fields_at(row, self.first, table.name())?),
            false => None,
        };
        let at = |index: usize, kind: Type| match &record {
            Some(fields) => fields.value_at(index, kind, table.name()),
            None => value_at(row, self.first + index, kind, table.name()),
        };
        let mut indexes = self.indexes.iter().copied();
        let mut next = |kind: Type| {
            let index = indexes.next();
            at(index.ok_or_else(|| bug!("a row of {table} has fewer columns than its layout"))?, kind)
        };
        if let ReadItem::Value(cell) = item {
            // The caller gets the value alone, not this row.
            let mut values = vec![Value::Null; table.columns().len()];
            if let (Some(value), Some(column)) =
                (values.get_mut(cell.column_index()), table.columns().get(cell.column_index()))
            {
                *value = next(column.kind)?;
            }
            return Ok(Row::new(table.clone(), cell.address().tenant().clone(), values, 0));
        }
        let tenant = match item.tenant().filter(|_| !self.names_owner) {
            Some(tenant) => tenant.clone(),
            None => {
                let owner = next(Type::Text)?;
                let owner = owner.as_text();
                let owner = owner.ok_or_else(|| StoreError::corrupt(table.name(), "a row has no tenant"))?;
                Tenant::new(owner).map_err(|error| StoreError::corrupt(table.name(), error.to_string()))?
            }
        };
        let mut values = Vec::with_capacity(table.columns().len());
        for (column, fixed) in table.columns().iter().zip(&self.fixed) {
            values.push(match fixed.and_then(|number| item.fixed_value(number)) {
                Some(value) => value.clone(),
                None => next(column.kind)?,
            });
        }
        let Some(version) = next(Type::Int)?.as_int() else {
            return Err(StoreError::corrupt(table.name(), "a row has no version"));
        };
        Ok(Row::new(table.clone(), tenant, values, version))
    }
}
