//! How the log describes a resource's rows, and so whether a view can be computed from them.
//!
//! A view has to equal its source once it has read the log, and a rebuild from the rows has to give the same result. So each
//! archetype declares for each of its resources how its rows can be tracked ([`ViewSource`]):
//!
//! - *With the row* ([`EventShape::Row`]): every write of a row has an event with the whole row, and a row is only deleted when it is
//!   erased, which an event tells with its key. The row's version orders the events of one life of the row. Events of a server with an older blueprint may lack columns; the view then reads the row
//!   ([`EventRow`]).
//! - *With the key* ([`EventShape::Key`]): an event has the keys of the rows that a write changed, not their content: several rows
//!   in one plan, rows that are deleted, rows with large bodies. The view reads the rows.
//! - *Nothing*: the rows are derived from others, or are read as cheaply as a view would be.
//!
//! Columns that change without an event, like the attempt of a claimed job, cannot be tracked by a view; they are listed in
//! [`UnloggedColumns`]. Values that change into each other without an event count as one ([`MergedValues`]).

use std::fmt;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::blank::tells_erasure;
use statehouse_store::table::VERSION;
use statehouse_store::{Event, Record, Table, Value};

/// Where an event that tells of an erasure has the key of the row, by column.
pub const OF: &str = "of";

/// Whether and how a view can follow the rows of a resource.
#[derive(Clone, Debug)]
pub enum ViewSource {
    /// It can.
    Rows(Box<SourceRows>),
    /// It cannot: why, and what to do instead.
    Nothing {
        /// Why, as a sentence goes on behind a colon.
        why: String,
        /// What to do instead.
        instead: String,
    },
}

impl ViewSource {
    /// Nothing, because of this; and what to do instead.
    pub fn nothing(why: &str, instead: impl Into<String>) -> ViewSource {
        ViewSource::Nothing { why: why.to_owned(), instead: instead.into() }
    }

    /// Nothing, because the rows follow from others.
    pub fn derived() -> ViewSource {
        ViewSource::nothing(
            "its rows follow from others",
            "make the view of the resource that they follow from",
        )
    }

    /// Nothing, because the rows are a list of others.
    pub fn list_of(resource: &str) -> ViewSource {
        ViewSource::nothing("its rows are a list of others", format!("write `of = \"{resource}\"`"))
    }
}

/// How the rows of a table can be followed.
#[derive(Clone, Debug)]
pub struct SourceRows {
    /// The table.
    pub table: Arc<Table>,
    /// How the log tells of its rows.
    pub shape: EventShape,
    /// Which rows count.
    pub filter: RowFilter,
    /// What changes without an event.
    pub unlogged: UnloggedColumns,
    /// Values that change into each other without an event.
    pub merged: Option<MergedValues>,
}

/// How the log tells of rows.
#[derive(Clone, Debug)]
pub enum EventShape {
    /// Events of this resource have the row.
    Row(String),
    /// Events name the row.
    Key(Vec<KeyPath>),
}

/// How the events of a resource name rows: by their key's columns, except for the last one.
#[derive(Clone, Debug)]
pub struct KeyPath {
    /// The resource.
    pub resource: String,
    /// Where the last part of the key is, or a list of several.
    pub last: String,
}

/// What an event of a row's write has of the row.
#[derive(Clone, Debug, PartialEq)]
pub enum EventRow<'r> {
    /// All that was asked for, with the row's version.
    Whole(&'r serde_json::Map<String, Json>, i64),
    /// Less: the server that wrote the event has an older blueprint, or the column was added since. The row itself has to be
    /// looked up, by this key. It is at this version or a later one.
    Partial(Vec<Value>, i64),
    /// The row of this key is gone for good, at this version. A row that is created under the key begins again at version 1.
    Erased(Vec<Value>, i64),
}

/// Which rows count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFilter {
    /// All.
    All,
    /// Those with one of these values in a column, unless the view groups by the column.
    With(&'static str, &'static [&'static str]),
    /// Those in which this column is not null.
    Having(&'static str),
}

/// What changes without an event.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnloggedColumns {
    /// The columns.
    pub columns: &'static [&'static str],
    /// Why there is no event, as a sentence.
    pub why: &'static str,
}

/// Values of a column that count as one.
#[derive(Clone, Copy, Debug)]
pub struct MergedValues {
    /// The column.
    pub column: &'static str,
    /// Its values.
    pub values: &'static [&'static str],
    /// What they count as.
    pub shown: &'static str,
}

impl SourceRows {
    /// Rows that are in every event of a write of theirs.
    pub fn with_row(resource: &str, table: &Arc<Table>) -> SourceRows {
        SourceRows::with_shape(table, EventShape::Row(resource.to_owned()))
    }

    /// Rows that are named by events of these resources.
    pub fn with_keys<'n>(
        table: &Arc<Table>,
        namings: impl IntoIterator<Item = (&'n str, &'n str)>,
    ) -> SourceRows {
        let naming =
            |(resource, last): (&str, &str)| KeyPath { resource: resource.into(), last: last.into() };
        SourceRows::with_shape(table, EventShape::Key(namings.into_iter().map(naming).collect()))
    }

    fn with_shape(table: &Arc<Table>, how: EventShape) -> SourceRows {
        let (counts, untold) = (RowFilter::All, UnloggedColumns::default());
        SourceRows { table: table.clone(), shape: how, filter: counts, unlogged: untold, merged: None }
    }

    /// Only these rows count.
    #[must_use]
    pub fn filtered(self, counts: RowFilter) -> SourceRows {
        SourceRows { filter: counts, ..self }
    }

    /// Columns that change without an event, and why.
    #[must_use]
    pub fn unlogged(self, columns: &'static [&'static str], why: &'static str) -> SourceRows {
        SourceRows { unlogged: UnloggedColumns { columns, why }, ..self }
    }

    /// Values that count as one.
    #[must_use]
    pub fn merging(self, alike: MergedValues) -> SourceRows {
        SourceRows { merged: Some(alike), ..self }
    }

    /// What a view makes of a value.
    pub fn shown(&self, column: &str, value: Value) -> Value {
        match &self.merged {
            Some(alike) if alike.column == column && alike.has(&value) => alike.shown.into(),
            _ => value,
        }
    }

    /// Whether a record may tell of a row.
    pub fn wants(&self, record: &Record) -> bool {
        record.events.iter().any(|event| match &self.shape {
            EventShape::Row(resource) => is_of(event, resource),
            EventShape::Key(namings) => namings.iter().any(|naming| is_of(event, &naming.resource)),
        })
    }

    /// The rows of a record, for a reader that uses these columns of them. Events of what stands beside a row, like hot fields,
    /// do not have what every row has: its key, and what is required and has no default. They are passed over. Any other
    /// column may be unknown to the server that wrote the event, which says nothing about its value.
    pub fn rows<'r>(&self, record: &'r Record, used: &[&str]) -> Vec<EventRow<'r>> {
        let EventShape::Row(resource) = &self.shape else { return Vec::new() };
        let events = record.events.iter().filter(|event| is_of(event, resource));
        let is_row = |row: &&serde_json::Map<String, Json>| {
            let own = self.table.other_columns().iter();
            let own = own.filter(|column| column.required && column.default.is_none());
            self.table.key_columns().iter().chain(own).all(|column| row.contains_key(&column.name))
        };
        let event_row = |row: &'r serde_json::Map<String, Json>| {
            let version = row.get("version")?.as_i64()?;
            if used.iter().all(|name| row.contains_key(*name)) {
                return Some(EventRow::Whole(row, version));
            }
            let key = self.table.key_columns().iter().map(|column| self.value(row, &column.name));
            Some(EventRow::Partial(key.collect(), version))
        };
        let erased = |event: &'r Event| {
            let of = event.data.get(OF).and_then(Json::as_object)?;
            let key = self.table.key_columns().iter().map(|column| self.value(of, &column.name));
            Some(EventRow::Erased(key.collect(), event.data.get(VERSION)?.as_i64()?))
        };
        let row = |event: &'r Event| match tells_erasure(&event.name) {
            true => erased(event),
            false => event.data.get("row").and_then(Json::as_object).filter(is_row).and_then(event_row),
        };
        events.filter_map(row).collect()
    }

    /// What a row of a record has in a column.
    pub fn value(&self, row: &serde_json::Map<String, Json>, name: &str) -> Value {
        let kind = self.table.type_of(name);
        let value =
            row.get(name).zip(kind).and_then(|(json, kind)| Value::from_json(json.clone(), kind).ok());
        value.unwrap_or(Value::Null)
    }

    /// The keys of the rows that a record names, each once.
    pub fn keys(&self, record: &Record) -> Vec<Vec<Value>> {
        let EventShape::Key(namings) = &self.shape else { return Vec::new() };
        let mut keys: Vec<Vec<Value>> = Vec::new();
        for event in &record.events {
            for naming in namings.iter().filter(|naming| is_of(event, &naming.resource)) {
                for key in self.keys_in(event, &naming.last) {
                    if !keys.contains(&key) {
                        keys.push(key);
                    }
                }
            }
        }
        keys
    }

    fn keys_in(&self, event: &Event, last: &str) -> Vec<Vec<Value>> {
        let said = event.data.get("row").unwrap_or(&event.data);
        let Some((column, before)) = self.table.key_columns().split_last() else { return Vec::new() };
        let value =
            |json: &Json, kind| Value::from_json(json.clone(), kind).ok().filter(|value| !value.is_null());
        let before: Option<Vec<Value>> =
            before.iter().map(|column| value(said.get(&column.name)?, column.kind)).collect();
        let lasts = match said.get(last) {
            Some(Json::Array(several)) => several.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None => &[],
        };
        let Some(before) = before else { return Vec::new() };
        let lasts = lasts.iter().filter_map(|last| value(last, column.kind));
        lasts.map(|last| before.iter().cloned().chain([last]).collect()).collect()
    }
}

impl MergedValues {
    /// Whether a value is one of them.
    pub fn has(&self, value: &Value) -> bool {
        value.as_text().is_some_and(|text| self.values.contains(&text))
    }
}

impl fmt::Display for RowFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowFilter::All => f.write_str("all"),
            RowFilter::With(column, values) => write!(f, "{column} {}", values.join("|")),
            RowFilter::Having(column) => f.write_str(column),
        }
    }
}

/// Whether an event is one of a resource: `profile.updated` is of `profile`.
fn is_of(event: &Event, resource: &str) -> bool {
    event.name.split('.').next() == Some(resource)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use statehouse_store::{OperationStatus, Tenant, Time, Type};

    use super::*;

    fn record(events: &[(&str, Json)]) -> Record {
        let event =
            |(name, data): &(&str, Json)| Event { name: (*name).to_owned(), data: data.clone(), actor: None };
        Record {
            position: None,
            also_at: Vec::new(),
            tenant: Tenant::new("acme").unwrap(),
            operation: "1".into(),
            resource: "x".into(),
            key: "1".into(),
            at: Time::from_micros(0),
            fingerprint: String::new(),
            status: OperationStatus::Applied,
            events: events.iter().map(event).collect(),
        }
    }

    fn seats() -> SourceRows {
        let table = Table::named("seats")
            .partition("event_id", Type::Text)
            .sort("seat_no", Type::Int)
            .required("state", Type::Text)
            .build()
            .unwrap();
        SourceRows::with_keys(&table, [("seat", "seat_no"), ("seat_booking", "units")])
    }

    #[test]
    fn events_name_rows_by_their_keys() {
        let source = seats();
        let booked = json!({"row": {"booking_id": "b", "event_id": "e", "units": [3, 4]}});
        let both = record(&[
            ("seat_booking.held", booked),
            ("seat.created", json!({"row": {"event_id": "e", "seat_no": 4, "state": "AVAILABLE"}})),
            ("seat.gone", json!({"event_id": "f", "seat_no": 9})),
            ("seating.made", json!({"event_id": "f", "seat_no": 10})),
        ]);
        let key = |event: &str, seat: i64| vec![Value::from(event), seat.into()];
        assert_eq!(source.keys(&both), [key("e", 3), key("e", 4), key("f", 9)]);
        assert!(source.wants(&both) && source.rows(&both, &[]).is_empty());
        // What does not say all of a key names nothing.
        for data in [
            json!({}),
            json!({"row": {"seat_no": 1}}),
            json!({"event_id": "e", "seat_no": null}),
            json!({"event_id": "e", "seat_no": "1a"}),
        ] {
            assert_eq!(source.keys(&record(&[("seat.created", data)])), Vec::<Vec<Value>>::new());
        }
        assert!(!source.wants(&record(&[("seats.created", json!({}))])));
    }

    #[test]
    fn events_have_rows_if_they_have_all_of_them() {
        let source = SourceRows::with_row("seat", &seats().table);
        let whole = json!({"row": {"event_id": "e", "seat_no": 1, "state": "SOLD", "version": 7}});
        let part = json!({"row": {"event_id": "e", "seat_no": 1, "version": 8}});
        let found = record(&[("seat.sold", whole), ("seat.counted", part), ("seat.seen", json!({}))]);
        let rows = source.rows(&found, &["state"]);
        assert!(matches!(rows.as_slice(), [EventRow::Whole(_, 7)]), "{rows:?}");
        // A column that the event does not have is looked up, whatever its default is.
        let key = vec![Value::from("e"), 1.into()];
        assert_eq!(source.rows(&found, &["state", "price"]), [EventRow::Partial(key, 7)]);
        assert_eq!(source.keys(&found), Vec::<Vec<Value>>::new());
    }

    #[test]
    fn values_that_change_untold_are_shown_as_one() {
        let alike = MergedValues { column: "state", values: &["PENDING", "RUNNING"], shown: "LIVE" };
        let source = seats().merging(alike);
        assert_eq!(source.shown("state", "RUNNING".into()), "LIVE".into());
        assert_eq!(source.shown("state", "DONE".into()), "DONE".into());
        assert_eq!(source.shown("queue", "RUNNING".into()), "RUNNING".into());
        assert_eq!(source.shown("state", Value::Null), Value::Null);
    }
}
