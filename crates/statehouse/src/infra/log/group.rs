//! `[log.NAME]`: a group for programs outside, of each tenant by itself.
//!
//! A program claims a partition, polls records, does what it does, and commits the offset it has come to; in a batch with
//! its own writes, the effect and the offset are one plan. The lease of a partition and its progress are one row, so that
//! one guard says both: `reached = from` and `epoch = mine and holder = me`.
//!
//! A program that cannot do a record parks it. Later records of its key are then withheld from polls, and parked behind
//! it by the commit that passes them; what is parked is listed, done in order, and settled.

mod actions;
mod parked;
mod read;
mod write;

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::table::VERSION;
use statehouse_store::{Address, Consistency, EventTemplate, Record, Row, Store, Tenant, Type, Value};

pub(crate) use self::actions::reaction_actions;
use self::actions::{actions, parked_actions};
use super::delivery::{BOOKKEEPING, Delivery};
use super::parking::{LOG_OFFSET, SUBJECT};
use super::progress::{ConsumerTables, LOG_PARTITION, PARKED_COUNT, REACHED};
use super::retention::DeclaredGroup;
use crate::action::{Call, Code, Refusal};
use crate::declare::{Declare, ResourceSpec};
use crate::infra::lease::{EPOCH, EXPIRES_AT, HOLDER};
use crate::resource::key_text;
use crate::view_source::ViewSource;

/// How long a partition is held, if neither the blueprint nor the caller says.
const DURATION_DEFAULT: Duration = Duration::from_secs(30);
const DURATION_MS_MAX: i64 = 3_600_000;
const DURATION_MS: &str = "duration_ms";
/// Records of one poll, if the caller says nothing, and at most.
const POLL_DEFAULT: usize = 50;
const POLL_MAX: i64 = 500;
/// Pages of the log that one poll goes through for its tenant's records.
const POLL_PAGES: usize = 8;
/// How long a poll waits at most for something to come.
const WAIT_MS_MAX: i64 = 30_000;
/// Records that one commit parks behind others at most, so that it fits into a plan with others.
const BEHIND_MAX: usize = 20;
/// The label of the step on the row of progress.
const PROGRESS: &str = "progress";
/// Where an event says which parked record was settled.
const SETTLED: &str = "settled";

const AFTER: &str = "after";
const FROM: &str = "from";
const TO: &str = "to";
const LIMIT: &str = "limit";
const WAIT_MS: &str = "wait_ms";

/// One declared group.
#[derive(Debug)]
struct GroupSpec {
    name: String,
    /// The resources whose records it wants; all if it is empty.
    of: Vec<String>,
    duration: Duration,
}

/// Reads `[log.NAME]`: the group, and what it has parked.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let of = settings.texts("of");
    let lease_max = Duration::from_millis(DURATION_MS_MAX.unsigned_abs());
    let duration = settings.duration("lease", DURATION_DEFAULT, Duration::from_millis(1)..=lease_max);
    let group = Arc::new(GroupSpec { name: name.to_owned(), of, duration });
    let read = DeclaredGroup { name: name.to_owned(), of: group.of.clone() };
    let parked = format!("{name}_parked");
    let key = |parts: &[(&str, Type)]| parts.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect();
    let telling = ViewSource::nothing(
        "its rows say how far readers have got",
        format!("call `{name}.list`, or make the view of a resource that is written"),
    );
    let progress = key(&[(LOG_PARTITION, Type::Int)]);
    let records = key(&[(LOG_PARTITION, Type::Int), (SUBJECT, Type::Text), (LOG_OFFSET, Type::Int)]);
    let own = ResourceSpec::without_rows(name, progress, telling.clone());
    cx.resource(own.actions(actions(&group)).declared_group(read));
    cx.resource(ResourceSpec::without_rows(&parked, records, telling).actions(parked_actions(&group)));
    Some(())
}

/// The key of what is parked.
pub(crate) fn parked_key() -> Vec<(String, Type)> {
    let key = [(LOG_PARTITION, Type::Int), (SUBJECT, Type::Text), (LOG_OFFSET, Type::Int)];
    key.map(|(name, kind)| (name.to_owned(), kind)).into()
}

impl GroupSpec {
    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    /// What a program of this tenant is shown of a record, if anything.
    fn delivery<'r>(&self, tenant: &Tenant, record: &'r Record) -> Option<Delivery<'r>> {
        Delivery::of(&self.of, tenant, record)
    }

    /// The partition that a call names, if the log has it.
    fn partition(&self, call: &Call, store: &dyn Store) -> Result<u32, Refusal> {
        let given = call.key.first().and_then(Value::as_int).and_then(|number| u32::try_from(number).ok());
        given.filter(|number| *number < store.partitions()).ok_or_else(|| {
            let message =
                format!("{}: the log has the partitions 0 to {}", self.what(call), store.partitions() - 1);
            Refusal::new(Code::NotFound, message)
        })
    }

    async fn row(&self, tenant: &Tenant, partition: u32, store: &dyn Store) -> Result<Option<Row>, Refusal> {
        let address = Address::new(
            &ConsumerTables::open()?.progress,
            tenant,
            ConsumerTables::key(&self.name, partition),
        )?;
        Ok(store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
    }

    fn event(&self, what: &str) -> EventTemplate {
        EventTemplate::named(format!("{}.{what}", self.name)).with(BOOKKEEPING, true)
    }
}

/// What callers see of a row of progress.
fn shown(row: &Json) -> Json {
    let names = [LOG_PARTITION, REACHED, PARKED_COUNT, HOLDER, EPOCH, EXPIRES_AT, VERSION];
    let field = |name: &str| (name.to_owned(), row.get(name).cloned().unwrap_or_default());
    Json::Object(names.into_iter().map(field).collect())
}
