//! Reads of rows by key and of pages of ranges, any number of them as one statement.
//!
//! A [`Look`] is a list of *spots*: a row, a value of one, or a page of a range. Spots whose statements would differ in
//! their constants alone are of one *shape*. Each shape is one `select`; those of several shapes are joined with
//! `union all`, and say which one an answer belongs to. So that their columns fit each other, each has a place for as many
//! columns of each type as any of them needs. Where there are ranges among them, rows by key come as one column, a record:
//! there are few of them, and the many rows of a range need not have a place for each of their columns. A value is its column
//! alone, in a place like any other: to make a record ready costs the server nearly as much as to look the row up. What a
//! spot fixes, as the key of a row, it knows itself and does not ask for.
//!
//! Where there is one spot of each shape, its constants are parameters, and the statement of a lone spot is what anybody
//! would write. Otherwise they are arrays, and a lateral subquery runs once for each of their places. Its rows come in the
//! order of the range, and one range after the other: a subquery with a limit that looks at the place which it is run for
//! can only be the inner side of a nested loop, which does not change the order of either side. So there are two
//! texts for a list of shapes, however many spots there are.
//!
//! A page is read with one row more than asked for, which tells whether there is a next one. Cursors are rows of values
//! in the order of the index, compared as such, so that the server goes on where the last page ended instead of
//! counting past it.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::read::Direction;
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{
    Address, Cell, Column, Page, Query, ReadRequest, ReadResult, Row, StoreError, Table, Tenant, Type, Value,
};

use crate::ddl::{INDEXED, Names};
use crate::link::Call;
use crate::read::{behind, ordered, page};
use crate::sql::{Arg, fields_at, int_at, name, placeholder, type_name, value_at};
use crate::tenancy::Scope;

/// Rows of ranges come by an index that has them in their order, and rows by their key, because the plan of a statement is
/// kept while its tables grow. Such a plan guesses that a page is a tenth of its range, which is no reason to compile it.
pub(crate) const LOOKUPS: [(&str, &str); 5] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_sort", "off"),
    ("jit", "off"),
];

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Spot<'a> {
    /// A row.
    Row(&'a Address),
    /// One value of a row.
    Value(&'a Cell),
    /// A page of a range.
    Range(&'a Query),
}

/// The same, kept.
#[derive(Clone, Debug)]
enum Kept {
    Row(Address),
    Value(Cell),
    Range(Query),
}

impl Kept {
    fn spot(&self) -> Spot<'_> {
        match self {
            Kept::Row(address) => Spot::Row(address),
            Kept::Value(cell) => Spot::Value(cell),
            Kept::Range(query) => Spot::Range(query),
        }
    }
}

impl<'a> Spot<'a> {
    fn kept(self) -> Kept {
        match self {
            Spot::Row(address) => Kept::Row(address.clone()),
            Spot::Value(cell) => Kept::Value(cell.clone()),
            Spot::Range(query) => Kept::Range(query.clone()),
        }
    }

    /// Of a row, or of a value of one: where the row stands.
    fn address(self) -> Option<&'a Address> {
        match self {
            Spot::Row(address) => Some(address),
            Spot::Value(cell) => Some(cell.address()),
            Spot::Range(_) => None,
        }
    }

    fn table(self) -> &'a Arc<Table> {
        match self {
            Spot::Row(address) => address.table(),
            Spot::Value(cell) => cell.address().table(),
            Spot::Range(query) => query.read_table(),
        }
    }

    fn tenant(self) -> Option<&'a Tenant> {
        match self {
            Spot::Row(address) => Some(address.tenant()),
            Spot::Value(cell) => Some(cell.address().tenant()),
            Spot::Range(query) => query.tenant(),
        }
    }

    /// The most rows that it can give.
    fn rows(self) -> usize {
        match self {
            Spot::Row(_) | Spot::Value(_) => 1,
            Spot::Range(query) => query.page_limit() + 1,
        }
    }

    /// The columns that it fixes, so that nobody has to be asked for them.
    fn fixed_columns(self) -> Vec<&'a Column> {
        match self {
            Spot::Row(address) => address.table().key_columns().iter().collect(),
            // The value is asked for even if it is a part of the key: the answer tells whether there is a row.
            Spot::Value(_) => Vec::new(),
            Spot::Range(query) => {
                let prefix = query.sort_columns().into_iter().take(query.prefix_values().len());
                query.partition_columns().into_iter().chain(prefix).collect()
            }
        }
    }

    /// What it fixes one of them to, by its number.
    fn fixed_value(self, number: usize) -> Option<&'a Value> {
        match self {
            Spot::Row(address) => address.key().get(number),
            Spot::Value(_) => None,
            Spot::Range(query) => {
                let partition = query.partition_values();
                partition
                    .get(number)
                    .or_else(|| query.prefix_values().get(number.checked_sub(partition.len())?))
            }
        }
    }

    /// Whether two spots are of one shape.
    pub(crate) fn is_like(self, other: Spot<'_>) -> bool {
        let (one, two) = (self.table(), other.table());
        if !Arc::ptr_eq(one, two) && one != two {
            return false;
        }
        match (self, other) {
            (Spot::Row(_), Spot::Row(_)) => true,
            (Spot::Value(one), Spot::Value(other)) => one.column_index() == other.column_index(),
            (Spot::Range(one), Spot::Range(other)) => {
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
            Spot::Row(address) => constants.extend(address.key().iter().map(Arg::One)),
            Spot::Value(cell) => constants.extend(cell.address().key().iter().map(Arg::One)),
            Spot::Range(query) => {
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

impl Spot<'_> {
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

/// Whether nothing can be in a range: it has one row at most, and goes on behind it.
fn is_over(query: &Query) -> bool {
    query.cursor_values().is_some() && query.order_columns().is_empty()
}

/// Reads that are made in one go.
#[derive(Clone, Debug)]
pub(crate) struct Look<'a> {
    /// Each with the number of its shape.
    spots: Vec<(usize, Spot<'a>)>,
    /// The first spot of each shape.
    shapes: Vec<Spot<'a>>,
}

impl<'a> Look<'a> {
    pub(crate) fn of(asks: &[ReadRequest<'a>]) -> Look<'a> {
        let mut look = Look { spots: Vec::new(), shapes: Vec::new() };
        for ask in asks {
            match *ask {
                ReadRequest::Get(addresses) => {
                    addresses.iter().for_each(|address| look.push(Spot::Row(address)));
                }
                ReadRequest::Value(cell) => look.push(Spot::Value(cell)),
                ReadRequest::Query(query) if is_over(query) => {}
                ReadRequest::Query(query) => look.push(Spot::Range(query)),
            }
        }
        look
    }

    fn push(&mut self, spot: Spot<'a>) {
        let shape = match self.shapes.iter().position(|shape| shape.is_like(spot)) {
            Some(shape) => shape,
            None => {
                self.shapes.push(spot);
                self.shapes.len() - 1
            }
        };
        self.spots.push((shape, spot));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.spots.is_empty()
    }

    /// The most rows that it can give.
    pub(crate) fn rows(&self) -> usize {
        self.spots.iter().map(|(_, spot)| spot.rows()).sum()
    }

    /// For whom it is.
    pub(crate) fn scope(&self) -> Scope {
        let tenants: Option<BTreeSet<Tenant>> =
            self.spots.iter().map(|(_, spot)| spot.tenant().cloned()).collect();
        tenants.map_or(Scope::All, Scope::Of)
    }

    pub(crate) fn tables(&self) -> Vec<&'a str> {
        self.shapes.iter().map(|shape| shape.table().name()).collect()
    }

    pub(crate) fn kept(&self) -> KeptLook {
        KeptLook(self.spots.iter().map(|(shape, spot)| (*shape, spot.kept())).collect())
    }

    /// What was seen, from the rows of each spot. `asks` are those that it is of.
    pub(crate) fn seen(
        &self,
        asks: &[ReadRequest<'_>],
        found: Option<&Found>,
    ) -> Result<Vec<ReadResult>, StoreError> {
        let most = found.map_or(0, |found| found.rows.len());
        let room = |(_, spot): &(usize, Spot<'_>)| Vec::with_capacity(spot.rows().min(most));
        let mut rows: Vec<Vec<Row>> = self.spots.iter().map(room).collect();
        if let Some(Found { statement, rows: found }) = found {
            for (number, row) in found {
                let Some((shape, spot)) = self.spots.get(*number) else { continue };
                let Some(layout) = statement.layouts.get(*shape) else { continue };
                if let Some(rows) = rows.get_mut(*number) {
                    rows.push(layout.row(row, *spot)?);
                }
            }
        }
        let mut rows = rows.into_iter();
        let mut next = || rows.next().unwrap_or_default();
        let seen = asks.iter().map(|ask| match ask {
            ReadRequest::Get(addresses) => {
                ReadResult::Rows(addresses.iter().map(|_| next().into_iter().next()).collect())
            }
            ReadRequest::Value(cell) => {
                ReadResult::Value(next().into_iter().next().and_then(|row| cell.value_in(row)))
            }
            ReadRequest::Query(query) if is_over(query) => {
                ReadResult::Page(Page { rows: Vec::new(), next: None })
            }
            ReadRequest::Query(query) => {
                ReadResult::Page(page(next(), query.page_limit(), |row| query.cursor_at(row)))
            }
        });
        Ok(seen.collect())
    }
}

/// A look that waits, apart from whoever has asked for it.
#[derive(Debug)]
pub(crate) struct KeptLook(Vec<(usize, Kept)>);

impl KeptLook {
    pub(crate) fn look(&self) -> Look<'_> {
        let spots = self.0.iter().map(|(shape, kept)| (*shape, kept.spot())).collect();
        Look { spots, shapes: self.shapes().collect() }
    }

    /// The first spot of each shape, which are numbered in the order in which they are met.
    fn shapes(&self) -> impl Iterator<Item = Spot<'_>> {
        let mut met = 0;
        let is_first = move |(shape, _): &&(usize, Kept)| {
            let is_first = *shape == met;
            met += usize::from(is_first);
            is_first
        };
        self.0.iter().filter(is_first).map(|(_, kept)| kept.spot())
    }

    /// Whether another has the same shapes in the same order, so that one statement can serve both.
    pub(crate) fn is_like(&self, other: &KeptLook) -> bool {
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

/// The rows of a look, each with the number of its spot, as the server sent them.
pub(crate) struct Found {
    statement: Arc<Statement>,
    rows: Vec<(usize, tokio_postgres::Row)>,
}

/// Looks of the same shapes as one call.
pub(crate) struct Asking<'a> {
    pub call: Call<'a>,
    statement: Arc<Statement>,
    /// Of each shape, which spot of which look stands at each place of its arrays.
    places: Vec<Vec<(usize, usize)>>,
    looks: usize,
}

impl<'a> Asking<'a> {
    /// The call that serves all of these looks, which are alike; none if there is nothing to read.
    pub(crate) fn of(names: &Names, statements: &Statements, looks: &[Look<'a>]) -> Option<Asking<'a>> {
        let shapes = looks.first().map(|look| &look.shapes).filter(|shapes| !shapes.is_empty())?;
        let mut places: Vec<Vec<(usize, usize)>> = shapes.iter().map(|_| Vec::new()).collect();
        for (number, look) in looks.iter().enumerate() {
            for (spot, (shape, _)) in look.spots.iter().enumerate() {
                places.get_mut(*shape)?.push((number, spot));
            }
        }
        let way = if places.iter().all(|places| places.len() == 1) { Way::Parameters } else { Way::Arrays };
        let statement = statements.of(names, shapes, way);
        let mut args: Vec<Arg<'a>> = Vec::new();
        for (places, kinds) in places.iter().zip(&statement.kinds) {
            let mut spots = places
                .iter()
                .filter_map(|(look, spot)| Some(looks.get(*look)?.spots.get(*spot)?.1.constants()));
            let Some(first) = spots.next() else { continue };
            if way == Way::Parameters {
                args.extend(first);
                continue;
            }
            let mut columns: Vec<Vec<Arg<'a>>> = first.into_iter().map(|constant| vec![constant]).collect();
            for constants in spots {
                columns.iter_mut().zip(constants).for_each(|(column, constant)| column.push(constant));
            }
            args.extend(kinds.iter().zip(columns).map(|(kind, column)| Arg::List(kind, column)));
        }
        let call = Call::new(statement.text.clone(), args);
        Some(Asking { call, statement, places, looks: looks.len() })
    }

    /// The rows of each look.
    pub(crate) fn found(&self, rows: Vec<tokio_postgres::Row>) -> Result<Vec<Found>, StoreError> {
        let each = rows.len() / self.looks.max(1);
        let none = || Found { statement: self.statement.clone(), rows: Vec::with_capacity(each) };
        let mut found: Vec<Found> = (0..self.looks).map(|_| none()).collect();
        for row in rows {
            let (shape, place) = self.statement.place_of(&row)?;
            let Some((look, spot)) = self.places.get(shape).and_then(|places| places.get(place)) else {
                continue;
            };
            if let Some(found) = found.get_mut(*look) {
                found.rows.push((*spot, row));
            }
        }
        Ok(found)
    }
}

/// Where the constants of a statement come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Each is a parameter: there is one spot of each shape.
    Parameters,
    /// Each is an array, with a place for each spot.
    Arrays,
}

/// What is sent for a list of shapes.
#[derive(Debug)]
struct Statement {
    text: Arc<str>,
    way: Way,
    /// The types of each shape's constants.
    kinds: Vec<Vec<&'static str>>,
    /// Where the columns of each shape's rows stand in an answer.
    layouts: Vec<Layout>,
}

/// The statements that were used last, each with spots of its shapes: to write one again would take longer than
/// everything else that a lone reader waits for on this side.
#[derive(Default)]
pub(crate) struct Statements(Mutex<Vec<(Vec<Kept>, Arc<Statement>)>>);

impl Statements {
    /// Shapes come from actions, of which there are few; the bound is for callers who make up shapes.
    const MOST: usize = 256;

    fn of(&self, names: &Names, shapes: &[Spot<'_>], way: Way) -> Arc<Statement> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(kept, statement): &(Vec<Kept>, Arc<Statement>)| {
            statement.way == way
                && kept.len() == shapes.len()
                && kept.iter().zip(shapes).all(|(kept, shape)| kept.spot().is_like(*shape))
        };
        let mut known = lock();
        if let Some(place) = known.iter().position(is_it) {
            // To the front, where it is found first.
            known.get_mut(..=place).unwrap_or_default().rotate_right(1);
            if let Some((_, statement)) = known.first() {
                return statement.clone();
            }
        }
        drop(known);
        let statement = Arc::new(Statement::of(names, shapes, way));
        let mut known = lock();
        known.truncate(Statements::MOST - 1);
        known.insert(0, (shapes.iter().map(|shape| shape.kept()).collect(), statement.clone()));
        statement
    }
}

impl Statement {
    fn of(names: &Names, shapes: &[Spot<'_>], way: Way) -> Statement {
        let is_union = shapes.len() > 1;
        let leading = usize::from(is_union) + usize::from(way == Way::Arrays);
        let outputs: Vec<Vec<(String, Type)>> = shapes.iter().map(|shape| outputs(*shape)).collect();
        let is_row = |shape: &Spot<'_>| matches!(shape, Spot::Row(_));
        let is_range = |shape: &Spot<'_>| matches!(shape, Spot::Range(_));
        // Beside ranges, rows by key are records.
        let has_records = shapes.iter().any(is_row) && shapes.iter().any(is_range);
        let is_record = |shape: &Spot<'_>| has_records && is_row(shape);
        let in_slots = shapes.iter().zip(&outputs).filter(|(shape, _)| !is_record(shape));
        let slots = Slots::of(&in_slots.map(|(_, outputs)| outputs.as_slice()).collect::<Vec<_>>());
        let kinds: Vec<Vec<&'static str>> = shapes.iter().map(|shape| kinds(*shape)).collect();
        let (mut selects, mut layouts, mut parameters) = (Vec::new(), Vec::new(), 0);
        for (number, ((shape, outputs), kinds)) in shapes.iter().zip(&outputs).zip(&kinds).enumerate() {
            let mut shown: Vec<String> = Vec::new();
            if is_union {
                shown.push(format!("{number} as _shape"));
            }
            if way == Way::Arrays {
                shown.push("k._place".to_owned());
            }
            let is_record = is_record(shape);
            let columns = || outputs.iter().map(|(column, _)| column.as_str()).collect::<Vec<&str>>();
            let places = match is_union && !is_record {
                true => {
                    slots.places(outputs).into_iter().map(|place| place + usize::from(has_records)).collect()
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
                    let in_slots = slots.places(outputs);
                    shown.extend(slots.filled(outputs, &in_slots));
                }
            }
            layouts.push(Layout::of(*shape, leading, places, is_record));
            let select = match way {
                Way::Parameters => {
                    let constant = |number: usize| placeholder(parameters + number);
                    let select = source(names, *shape, &constant, None);
                    let select = format!("select {}\n{select}", shown.join(", "));
                    if is_union { format!("({select})") } else { select }
                }
                Way::Arrays => {
                    let arrays: Vec<String> = kinds
                        .iter()
                        .enumerate()
                        .map(|(number, kind)| format!("{}::{kind}[]", placeholder(parameters + number)))
                        .collect();
                    let columns: Vec<String> =
                        (1..=kinds.len()).map(|number| format!("c{number}, ")).collect();
                    let inner: Vec<&str> = outputs.iter().map(|(column, _)| column.as_str()).collect();
                    // Of a row that is looked up by its whole key there is one; the limit keeps the lookup in its place.
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
        Statement { text: selects.join("\nunion all\n").into(), way, kinds, layouts }
    }

    /// To which shape, and to which place of its arrays, a row belongs.
    fn place_of(&self, row: &tokio_postgres::Row) -> Result<(usize, usize), StoreError> {
        let number = |place: usize| -> Result<usize, StoreError> {
            Ok(usize::try_from(int_at(row, place, "a read")?).unwrap_or(usize::MAX))
        };
        let is_union = self.layouts.len() > 1;
        let shape = if is_union { number(0)? } else { 0 };
        let place = match self.way {
            Way::Parameters => 0,
            // Counted from 1.
            Way::Arrays => number(usize::from(is_union))?.wrapping_sub(1),
        };
        Ok((shape, place))
    }
}

/// What is asked for of a row of a shape: its owner where it can be anybody, the columns that are not fixed, its version;
/// or the one value.
fn outputs(shape: Spot<'_>) -> Vec<(String, Type)> {
    if let Spot::Value(cell) = shape {
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

/// The types of a shape's constants, in the order of [`Spot::constants`].
fn kinds(shape: Spot<'_>) -> Vec<&'static str> {
    let of = |columns: &mut dyn Iterator<Item = &Column>| -> Vec<&'static str> {
        columns.map(|column| type_name(column.kind)).collect()
    };
    let mut kinds: Vec<&'static str> = Vec::new();
    kinds.extend(shape.tenant().map(|_| type_name(Type::Text)));
    match shape {
        Spot::Row(_) | Spot::Value(_) => kinds.extend(of(&mut shape.table().key_columns().iter())),
        Spot::Range(query) => {
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
    shape: Spot<'_>,
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
        Spot::Row(_) | Spot::Value(_) => {
            let keys = shape.table().key_columns().iter();
            conditions.extend(keys.map(|column| format!("t.{} = {}", name(&column.name), next())));
            return from(&conditions);
        }
        Spot::Range(query) => query,
    };
    let sort = query.sort_columns();
    let fixed =
        query.partition_columns().into_iter().chain(sort.into_iter().take(query.prefix_values().len()));
    conditions.extend(fixed.map(|column| format!("t.{} = {}", name(&column.name), next())));
    conditions.extend(
        bounds(query).map(|(operator, _, column)| format!("{} {operator} {}", ordered(column), next())),
    );
    if let Some(index) = query.read_index() {
        // Only a statement that names an index's conditions may use it.
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

/// Places for the columns of any shape: so many for each type as the shape that needs most of them.
struct Slots(Vec<(Type, usize)>);

impl Slots {
    fn of(shapes: &[&[(String, Type)]]) -> Slots {
        let of = |kind: Type, shape: &[(String, Type)]| shape.iter().filter(|(_, of)| *of == kind).count();
        let most = |kind: Type| shapes.iter().map(|shape| of(kind, shape)).max().unwrap_or(0);
        Slots(Type::ALL.map(|kind| (kind, most(kind))).into())
    }

    /// Where each column stands.
    fn places(&self, columns: &[(String, Type)]) -> Vec<usize> {
        let mut taken = Type::ALL.map(|kind| (kind, 0));
        let place = |(_, kind): &(String, Type)| {
            let before: usize = self.0.iter().take_while(|(of, _)| of != kind).map(|(_, count)| count).sum();
            let own = taken.iter_mut().find(|(of, _)| of == kind);
            let own = own.map_or(0, |(_, taken)| {
                *taken += 1;
                *taken - 1
            });
            before + own
        };
        columns.iter().map(place).collect()
    }

    /// What stands in each slot.
    fn filled(&self, columns: &[(String, Type)], places: &[usize]) -> Vec<String> {
        let kinds = self.0.iter().flat_map(|(kind, count)| std::iter::repeat_n(*kind, *count));
        let filled = kinds.enumerate().map(|(slot, kind)| {
            let mut taken = places.iter().zip(columns).filter(|(place, _)| **place == slot);
            taken
                .next()
                .map_or_else(|| format!("null::{}", type_name(kind)), |(_, (column, _))| column.clone())
        });
        filled.collect()
    }
}

/// Where the columns of a row stand in an answer.
#[derive(Debug)]
struct Layout {
    /// How many columns come before those of any row.
    first: usize,
    /// Behind them, or in the record there: its owner's if it names one, the table's columns that are not fixed, the version.
    places: Vec<usize>,
    /// Whether they are one column, a record.
    is_record: bool,
    names_owner: bool,
    /// Of each column of the table, the number under which the spot fixes it, if it does.
    fixed: Vec<Option<usize>>,
}

impl Layout {
    fn of(shape: Spot<'_>, first: usize, places: Vec<usize>, is_record: bool) -> Layout {
        let known = shape.fixed_columns();
        let columns = shape.table().columns().iter();
        let fixed = columns.map(|column| known.iter().position(|known| known.name == column.name)).collect();
        Layout { first, places, is_record, names_owner: shape.tenant().is_none(), fixed }
    }

    fn row(&self, row: &tokio_postgres::Row, spot: Spot<'_>) -> Result<Row, StoreError> {
        let table = spot.table();
        let record = match self.is_record {
            true => Some(fields_at(row, self.first, table.name())?),
            false => None,
        };
        let at = |place: usize, kind: Type| match &record {
            Some(fields) => fields.value_at(place, kind, table.name()),
            None => value_at(row, self.first + place, kind, table.name()),
        };
        let mut places = self.places.iter().copied();
        let mut next = |kind: Type| at(places.next().unwrap_or(usize::MAX), kind);
        if let Spot::Value(cell) = spot {
            // Nobody is shown the rest of this row.
            let mut values = vec![Value::Null; table.columns().len()];
            if let (Some(value), Some(column)) =
                (values.get_mut(cell.column_index()), table.columns().get(cell.column_index()))
            {
                *value = next(column.kind)?;
            }
            return Ok(Row::new(table.clone(), cell.address().tenant().clone(), values, 0));
        }
        let tenant = match spot.tenant().filter(|_| !self.names_owner) {
            Some(tenant) => tenant.clone(),
            None => {
                let owner = next(Type::Text)?;
                Tenant::new(owner.as_text().unwrap_or_default())
                    .map_err(|error| StoreError::corrupt(table.name(), error.to_string()))?
            }
        };
        let mut values = Vec::with_capacity(table.columns().len());
        for (column, fixed) in table.columns().iter().zip(&self.fixed) {
            values.push(match fixed.and_then(|number| spot.fixed_value(number)) {
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
