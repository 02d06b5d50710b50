//! What the log tells of a resource's rows, and so whether a view can follow them.
//!
//! A view has to be what its source says once it has read the log, and a rebuild from the rows has to come to the same. So
//! each archetype says of each of its resources how its rows can be followed ([`Telling`]):
//!
//! - *With the row*: every write of a row is an event that has the row, and rows are never deleted for good. The event says
//!   all there is to know, and the row's version tells an old one from a new one. Only where a server with an older blueprint
//!   has written it, it lacks columns; then the row is looked up ([`RowTold`]).
//! - *By name*: an event says which rows a write changed, and not what they are: several rows in one plan, rows that are
//!   deleted for good, rows with large bodies. Whoever follows looks them up.
//! - *Nothing*: its rows are no truth of their own, or are read as cheaply as a view would be.
//!
//! What changes without an event, like the attempt of a job that is claimed, cannot be followed at any price but that of an
//! event. Such columns are named, and values that change into each other in this way count as one ([`Alike`]).

use std::fmt;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::{Event, Record, Table, Value};

/// Whether and how a view can follow the rows of a resource.
#[derive(Clone, Debug)]
pub enum Telling {
    /// It can.
    Rows(Box<Told>),
    /// It cannot: why, and what to do instead.
    Nothing {
        /// Why, as a sentence goes on behind a colon.
        why: String,
        /// What to do instead.
        instead: String,
    },
}

impl Telling {
    /// Nothing, because of this; and what to do instead.
    pub fn nothing(why: &str, instead: impl Into<String>) -> Telling {
        Telling::Nothing { why: why.to_owned(), instead: instead.into() }
    }

    /// Nothing, because the rows follow from others.
    pub fn derived() -> Telling {
        Telling::nothing("its rows follow from others", "make the view of the resource that they follow from")
    }

    /// Nothing, because the rows are a list of others.
    pub fn list_of(resource: &str) -> Telling {
        Telling::nothing("its rows are a list of others", format!("write `of = \"{resource}\"`"))
    }
}

/// How the rows of a table can be followed.
#[derive(Clone, Debug)]
pub struct Told {
    /// The table.
    pub table: Arc<Table>,
    /// How the log tells of its rows.
    pub how: How,
    /// Which rows count.
    pub counts: Counts,
    /// What changes without an event.
    pub untold: Untold,
    /// Values that change into each other without an event.
    pub alike: Option<Alike>,
}

/// How the log tells of rows.
#[derive(Clone, Debug)]
pub enum How {
    /// Events of this resource have the row.
    WithRow(String),
    /// Events name the row.
    ByName(Vec<Naming>),
}

/// How the events of a resource name rows: by their key's columns, except for the last one.
#[derive(Clone, Debug)]
pub struct Naming {
    /// The resource.
    pub resource: String,
    /// Where the last part of the key is, or a list of several.
    pub last: String,
}

/// What an event of a row's write has of the row.
#[derive(Clone, Debug, PartialEq)]
pub enum RowTold<'r> {
    /// All that was asked for, with the row's version.
    Whole(&'r serde_json::Map<String, Json>, i64),
    /// Less: the server that wrote the event has an older blueprint, or the column was added since. The row itself has to be
    /// looked up, by this key. It is at this version or a later one.
    Partial(Vec<Value>, i64),
}

/// Which rows count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// All.
    All,
    /// Those with one of these values in a column, unless the view groups by the column.
    With(&'static str, &'static [&'static str]),
    /// Those in which this column is not null.
    Having(&'static str),
}

/// What changes without an event.
#[derive(Clone, Copy, Debug, Default)]
pub struct Untold {
    /// The columns.
    pub columns: &'static [&'static str],
    /// Why there is no event, as a sentence.
    pub why: &'static str,
}

/// Values of a column that count as one.
#[derive(Clone, Copy, Debug)]
pub struct Alike {
    /// The column.
    pub column: &'static str,
    /// Its values.
    pub values: &'static [&'static str],
    /// What they count as.
    pub shown: &'static str,
}

impl Told {
    /// Rows that are in every event of a write of theirs.
    pub fn with_row(resource: &str, table: &Arc<Table>) -> Told {
        Told::how(table, How::WithRow(resource.to_owned()))
    }

    /// Rows that are named by events of these resources.
    pub fn by_name<'n>(table: &Arc<Table>, namings: impl IntoIterator<Item = (&'n str, &'n str)>) -> Told {
        let naming = |(resource, last): (&str, &str)| Naming { resource: resource.into(), last: last.into() };
        Told::how(table, How::ByName(namings.into_iter().map(naming).collect()))
    }

    fn how(table: &Arc<Table>, how: How) -> Told {
        let (counts, untold) = (Counts::All, Untold::default());
        Told { table: table.clone(), how, counts, untold, alike: None }
    }

    /// Only these rows count.
    #[must_use]
    pub fn counting(self, counts: Counts) -> Told {
        Told { counts, ..self }
    }

    /// Columns that change without an event, and why.
    #[must_use]
    pub fn untold(self, columns: &'static [&'static str], why: &'static str) -> Told {
        Told { untold: Untold { columns, why }, ..self }
    }

    /// Values that count as one.
    #[must_use]
    pub fn alike(self, alike: Alike) -> Told {
        Told { alike: Some(alike), ..self }
    }

    /// What a view makes of a value.
    pub fn shown(&self, column: &str, value: Value) -> Value {
        match &self.alike {
            Some(alike) if alike.column == column && alike.has(&value) => alike.shown.into(),
            _ => value,
        }
    }

    /// Whether a record may tell of a row.
    pub fn wants(&self, record: &Record) -> bool {
        record.events.iter().any(|event| match &self.how {
            How::WithRow(resource) => is_of(event, resource),
            How::ByName(namings) => namings.iter().any(|naming| is_of(event, &naming.resource)),
        })
    }

    /// The rows of a record, for a reader that uses these columns of them. Events of what stands beside a row, like hot fields,
    /// do not have what every row has: its key, and what is required and has no default. They are passed over. Any other
    /// column may be unknown to the server that wrote the event, which says nothing about its value.
    pub fn rows<'r>(&self, record: &'r Record, used: &[&str]) -> Vec<RowTold<'r>> {
        let How::WithRow(resource) = &self.how else { return Vec::new() };
        let events = record.events.iter().filter(|event| is_of(event, resource));
        let rows = events.filter_map(|event| event.data.get("row").and_then(Json::as_object));
        let is_row = |row: &&serde_json::Map<String, Json>| {
            let own = self.table.other_columns().iter();
            let own = own.filter(|column| column.required && column.default.is_none());
            self.table.key_columns().iter().chain(own).all(|column| row.contains_key(&column.name))
        };
        let told = |row: &'r serde_json::Map<String, Json>| {
            let version = row.get("version")?.as_i64()?;
            if used.iter().all(|name| row.contains_key(*name)) {
                return Some(RowTold::Whole(row, version));
            }
            let key = self.table.key_columns().iter().map(|column| self.value(row, &column.name));
            Some(RowTold::Partial(key.collect(), version))
        };
        rows.filter(is_row).filter_map(told).collect()
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
        let How::ByName(namings) = &self.how else { return Vec::new() };
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

impl Alike {
    /// Whether a value is one of them.
    pub fn has(&self, value: &Value) -> bool {
        value.as_text().is_some_and(|text| self.values.contains(&text))
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Counts::All => f.write_str("all"),
            Counts::With(column, values) => write!(f, "{column} {}", values.join("|")),
            Counts::Having(column) => f.write_str(column),
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
        let event = |(name, data): &(&str, Json)| Event { name: (*name).to_owned(), data: data.clone() };
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

    fn seats() -> Told {
        let table = Table::named("seats")
            .partition("event_id", Type::Text)
            .sort("seat_no", Type::Int)
            .required("state", Type::Text)
            .build()
            .unwrap();
        Told::by_name(&table, [("seat", "seat_no"), ("seat_booking", "units")])
    }

    #[test]
    fn events_name_rows_by_their_keys() {
        let told = seats();
        let booked = json!({"row": {"booking_id": "b", "event_id": "e", "units": [3, 4]}});
        let both = record(&[
            ("seat_booking.held", booked),
            ("seat.created", json!({"row": {"event_id": "e", "seat_no": 4, "state": "AVAILABLE"}})),
            ("seat.gone", json!({"event_id": "f", "seat_no": 9})),
            ("seating.made", json!({"event_id": "f", "seat_no": 10})),
        ]);
        let key = |event: &str, seat: i64| vec![Value::from(event), seat.into()];
        assert_eq!(told.keys(&both), [key("e", 3), key("e", 4), key("f", 9)]);
        assert!(told.wants(&both) && told.rows(&both, &[]).is_empty());
        // What does not say all of a key names nothing.
        for data in [
            json!({}),
            json!({"row": {"seat_no": 1}}),
            json!({"event_id": "e", "seat_no": null}),
            json!({"event_id": "e", "seat_no": "1a"}),
        ] {
            assert_eq!(told.keys(&record(&[("seat.created", data)])), Vec::<Vec<Value>>::new());
        }
        assert!(!told.wants(&record(&[("seats.created", json!({}))])));
    }

    #[test]
    fn events_have_rows_if_they_have_all_of_them() {
        let told = Told::with_row("seat", &seats().table);
        let whole = json!({"row": {"event_id": "e", "seat_no": 1, "state": "SOLD", "version": 7}});
        let part = json!({"row": {"event_id": "e", "seat_no": 1, "version": 8}});
        let found = record(&[("seat.sold", whole), ("seat.counted", part), ("seat.seen", json!({}))]);
        let rows = told.rows(&found, &["state"]);
        assert!(matches!(rows.as_slice(), [RowTold::Whole(_, 7)]), "{rows:?}");
        // A column that the event does not have is looked up, whatever its default is.
        let key = vec![Value::from("e"), 1.into()];
        assert_eq!(told.rows(&found, &["state", "price"]), [RowTold::Partial(key, 7)]);
        assert_eq!(told.keys(&found), Vec::<Vec<Value>>::new());
    }

    #[test]
    fn values_that_change_untold_are_shown_as_one() {
        let alike = Alike { column: "state", values: &["PENDING", "RUNNING"], shown: "LIVE" };
        let told = seats().alike(alike);
        assert_eq!(told.shown("state", "RUNNING".into()), "LIVE".into());
        assert_eq!(told.shown("state", "DONE".into()), "DONE".into());
        assert_eq!(told.shown("queue", "RUNNING".into()), "RUNNING".into());
        assert_eq!(told.shown("state", Value::Null), Value::Null);
    }
}
