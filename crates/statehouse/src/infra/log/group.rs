//! `[log.NAME]`: a group for programs outside, of each tenant by itself.
//!
//! A program claims a partition, polls records, does what it does, and commits the offset it has come to; in a batch with
//! its own writes, the effect and the offset are one plan. The lease of a partition and its progress are one row, so that
//! one guard says both: `reached = from` and `epoch = mine and holder = me`.
//!
//! A program that cannot do a record parks it. Later records of its key are then withheld from polls, and parked behind
//! it by the commit that passes them; what is parked is listed, done in order, and settled.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Event, EventTemplate, Operand, Query, Reason, Record, Refused, Row, Step, Store,
    Tenant, Type, Value,
};

use super::delivery::{BOOKKEEPING, Delivery};
use super::parking::{self, LOG_OFFSET, Lot, PARKED_AT, Parked, REASON, SUBJECT, TRIES};
use super::progress::{Books, KEEPS_FROM, LOG_PARTITION, MISSED, Mark, PARKED_COUNT, REACHED, UPDATED_AT};
use super::retention::DeclaredGroup;
use super::{column_of, offset_in, offset_of};
use crate::action::{
    Action, Answer, Call, Code, Desk, Does, Draft, Method, Pieces, Place, Read, Refusal, Route, Verdict,
    Write, common_verdict,
};
use crate::declare::{Declare, ResourceSpec};
use crate::form::{Form, Misfit, Property};
use crate::infra::lease::{self, EPOCH, EXPIRES_AT, HOLDER};
use crate::paging;
use crate::resource::{key_text, state_name};
use crate::told::Telling;

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
/// Where an event says which parked record was settled.
const SETTLED: &str = "settled";

const AFTER: &str = "after";
const FROM: &str = "from";
const TO: &str = "to";
const LIMIT: &str = "limit";
const WAIT_MS: &str = "wait_ms";

/// One declared group.
#[derive(Debug)]
struct Declared {
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
    let group = Arc::new(Declared { name: name.to_owned(), of, duration });
    let read = DeclaredGroup { name: name.to_owned(), of: group.of.clone() };
    let parked = format!("{name}_parked");
    let key = |parts: &[(&str, Type)]| parts.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect();
    let telling = Telling::nothing(
        "its rows say how far readers have got",
        format!("call `{name}.list`, or make the view of a resource that is written"),
    );
    let progress = key(&[(LOG_PARTITION, Type::Int)]);
    let records = key(&[(LOG_PARTITION, Type::Int), (SUBJECT, Type::Text), (LOG_OFFSET, Type::Int)]);
    let own = ResourceSpec::without_rows(name, progress, telling.clone());
    cx.resource(own.built_actions(actions(&group)).declared_group(read));
    let parked_actions = parked_actions(&group, &parked);
    cx.resource(ResourceSpec::without_rows(&parked, records, telling).built_actions(parked_actions));
    Some(())
}

fn row_form() -> Form {
    let int = |name: &str, about: &str| Property::required(name, Form::Value(Type::Int), about);
    Form::Object(vec![
        int(LOG_PARTITION, ""),
        int(REACHED, "everything up to this offset is done"),
        int(PARKED_COUNT, "how many records are parked"),
        Property::required(HOLDER, Form::Value(Type::Text), "who reads it").or_null(),
        int(EPOCH, "counts claims and is never reset"),
        Property::required(EXPIRES_AT, Form::Value(Type::Time), "by the store's clock").or_null(),
        int(VERSION, "raised by every write"),
    ])
}

fn standing_form() -> Form {
    let Form::Object(mut properties) = row_form() else { return row_form() };
    let int = |name: &str, about: &str| Property::required(name, Form::Value(Type::Int), about);
    properties.extend([
        int("head", "the newest offset"),
        int("lag_records", "records of this tenant that are ahead; more than a thousand are estimated"),
        int("lag_ms", "how old the oldest of them is"),
        int(MISSED, "records that were trimmed before they were read"),
    ]);
    Form::Object(properties)
}

fn record_form() -> Form {
    let text = |name: &str, about: &str| Property::required(name, Form::Value(Type::Text), about);
    Form::Object(vec![
        Property::required(LOG_OFFSET, Form::Value(Type::Int), ""),
        text(SUBJECT, "the key of the first event; order is kept by the keys of all"),
        Property::required("at", Form::Value(Type::Time), "when it was written"),
        text("operation", ""),
        text("resource", ""),
        text("key", ""),
        Property::required(
            "events",
            Form::List(Box::new(Form::Any)),
            "each with `name`, `subject` and `data`",
        ),
    ])
}

fn actions(group: &Arc<Declared>) -> Vec<Action> {
    let name = &group.name;
    let target = state_name(name);
    let claim = format!("{name}.claim");
    let text = |name: &str, about: &str| Property::required(name, Form::Value(Type::Text), about);
    let offset = |name: &str, about: &str| Property::required(name, Form::Range(0, i64::MAX), about);
    let holder = || text(HOLDER, "who reads; a name of the caller's own");
    let epoch = || Property::required(EPOCH, Form::Value(Type::Int), "the epoch that claim returned");
    let optional = |property: Property| Property { required: false, ..property };
    let duration = || {
        let about = format!("for how long; {} if not given", group.duration.as_millis());
        Property::optional(DURATION_MS, Form::Range(1, DURATION_MS_MAX), &about)
    };
    let at = |method, place| Route { method, place };
    let post = || at(Method::Post, Place::ItemAction);
    let write = |verb: Verb| Does::Write(Arc::new(Writer { group: group.clone(), verb }));
    let read = |look: Look| Does::Read(Arc::new(Reader { group: group.clone(), look }));
    vec![
        Action {
            name: "claim".into(),
            summary: format!("Take a partition of {name} that nobody reads, or whose reader's time is up."),
            target: target.clone(),
            shape: "state transition",
            mechanism: "guarded exclusive claim with expiry and epoch, on the row of progress".into(),
            route: post(),
            input: vec![holder(), duration()],
            output: row_form(),
            refusals: vec![Code::Held, Code::NotFound],
            needs_version: false,
            answers: &["duplicate consumption"],
            after: vec![],
            does: write(Verb::Claim),
        },
        Action {
            name: "poll".into(),
            summary: format!("Read the next records of {name}; with `wait_ms`, wait for one to come."),
            target: target.clone(),
            shape: "read log",
            mechanism: "range read of the log behind an offset, under the reader's epoch".into(),
            route: at(Method::Get, Place::ItemAction),
            input: vec![
                optional(holder()),
                optional(epoch()),
                Property::optional(
                    AFTER,
                    Form::Range(0, i64::MAX),
                    "behind this offset; `reached` if not given",
                ),
                Property::optional(LIMIT, Form::Range(1, POLL_MAX), "records at most; 50 if not given"),
                Property::optional(WAIT_MS, Form::Range(0, WAIT_MS_MAX), "how long to wait for the first"),
            ],
            output: Form::Object(vec![
                Property::required("records", Form::List(Box::new(record_form())), ""),
                offset("reached", "what was committed"),
                offset("through", "everything up to here was looked at: commit this, or poll after it"),
                offset("head", "the newest offset"),
                offset(MISSED, "records that were trimmed before they were read"),
            ]),
            refusals: vec![Code::NotFound, Code::NotHolder],
            needs_version: false,
            answers: &["consumer lag"],
            after: vec![claim.clone()],
            does: read(Look::Poll),
        },
        Action {
            name: "commit".into(),
            summary: format!(
                "Say up to where the records of {name} are done, and hold the partition for longer. In a batch with what \
                 was done, both are one plan."
            ),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "conditional update guarded by the old offset and the reader's epoch".into(),
            route: post(),
            input: vec![
                holder(),
                epoch(),
                offset(FROM, "the offset that was committed before"),
                offset(TO, "everything up to here is done"),
                duration(),
            ],
            output: row_form(),
            refusals: vec![Code::NotFound, Code::NotHolder, Code::VersionConflict, Code::InvalidInput],
            needs_version: false,
            answers: &["duplicate consumption", "offset advanced before effect committed"],
            after: vec![claim.clone()],
            does: write(Verb::Commit),
        },
        Action {
            name: "renew".into(),
            summary: format!("Hold a partition of {name} for longer, before its time is up."),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "conditional update guarded by epoch and expiry".into(),
            route: post(),
            input: vec![holder(), epoch(), duration()],
            output: row_form(),
            refusals: vec![Code::NotFound, Code::NotHolder, Code::Expired],
            needs_version: false,
            answers: &["duplicate consumption"],
            after: vec![claim.clone()],
            does: write(Verb::Renew),
        },
        Action {
            name: "release".into(),
            summary: format!("Let go of a partition of {name}, so that another need not wait."),
            target: target.clone(),
            shape: "state transition",
            mechanism: "conditional update guarded by epoch".into(),
            route: post(),
            input: vec![holder(), epoch()],
            output: row_form(),
            refusals: vec![Code::NotFound, Code::NotHolder],
            needs_version: false,
            answers: &[],
            after: vec![claim.clone()],
            does: write(Verb::Release),
        },
        Action {
            name: "seek".into(),
            summary: format!("Go to another place of {name}: back, to read records again, or forward."),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "conditional update guarded by epoch".into(),
            route: post(),
            input: vec![
                holder(),
                epoch(),
                offset(
                    TO,
                    "the next record is the one after this offset; beyond the newest means the newest",
                ),
            ],
            output: row_form(),
            refusals: vec![Code::NotFound, Code::NotHolder],
            needs_version: false,
            answers: &[],
            after: vec![claim.clone()],
            does: write(Verb::Seek),
        },
        Action {
            name: "park".into(),
            summary: format!(
                "Set a record of {name} aside that cannot be done, and what follows of its key."
            ),
            target: target.clone(),
            shape: "append",
            mechanism: "insert beside a conditional update guarded by epoch".into(),
            route: post(),
            input: vec![
                holder(),
                epoch(),
                text(SUBJECT, "as the poll has it"),
                Property::required(LOG_OFFSET, Form::Range(1, i64::MAX), "which record"),
                text(REASON, "why it cannot be done"),
            ],
            output: row_form(),
            refusals: vec![Code::NotFound, Code::NotHolder, Code::WrongState, Code::AlreadyExists],
            needs_version: false,
            answers: &["out-of-order processing across partitions"],
            after: vec![claim.clone()],
            does: write(Verb::Park),
        },
        Action {
            name: "read".into(),
            summary: format!("Read how far {name} has got in a partition, and how far it is behind."),
            target: target.clone(),
            shape: "read source",
            mechanism: "strong read by key, and of the log behind it".into(),
            route: at(Method::Get, Place::Item),
            input: vec![],
            output: standing_form(),
            refusals: vec![Code::NotFound],
            needs_version: false,
            answers: &["consumer lag"],
            after: vec![claim.clone()],
            does: read(Look::One),
        },
        Action {
            name: "list".into(),
            summary: format!("Read how far {name} has got in every partition."),
            target,
            shape: "read source",
            mechanism: "strong reads by key, and of the log behind them".into(),
            route: at(Method::Get, Place::Collection),
            input: vec![],
            output: Form::List(Box::new(standing_form())),
            refusals: vec![],
            needs_version: false,
            answers: &["consumer lag"],
            after: vec![claim],
            does: read(Look::All),
        },
    ]
}

fn parked_actions(group: &Arc<Declared>, parked: &str) -> Vec<Action> {
    let target = state_name(parked);
    let row = || {
        Form::Object(vec![
            Property::required(LOG_PARTITION, Form::Value(Type::Int), ""),
            Property::required(SUBJECT, Form::Value(Type::Text), ""),
            Property::required(LOG_OFFSET, Form::Value(Type::Int), ""),
            Property::required(REASON, Form::Value(Type::Text), "why it is parked"),
            Property::required(TRIES, Form::Value(Type::Int), "0 for one that is only behind another"),
            Property::required(PARKED_AT, Form::Value(Type::Time), ""),
            Property::required("record", record_form(), "null once it was trimmed").or_null(),
        ])
    };
    let after = || vec![format!("{}.claim", group.name), format!("{}.park", group.name)];
    let read = |list: bool| Does::Read(Arc::new(ParkedReader { group: group.clone(), list }));
    vec![
        Action {
            name: "read".into(),
            summary: format!("Read a record that {} has parked.", group.name),
            target: target.clone(),
            shape: "read source",
            mechanism: "strong read by key, and of the log".into(),
            route: Route { method: Method::Get, place: Place::Item },
            input: vec![],
            output: row(),
            refusals: vec![Code::NotFound],
            needs_version: false,
            answers: &[],
            after: after(),
            does: read(false),
        },
        Action {
            name: "list".into(),
            summary: format!("List what {} has parked in a partition, by key, oldest first.", group.name),
            target: target.clone(),
            shape: "read source",
            mechanism: "strong range read, and of the log".into(),
            route: Route { method: Method::Get, place: Place::Collection },
            input: [
                Property::required(LOG_PARTITION, Form::Range(0, i64::from(u32::MAX)), ""),
                Property::optional(SUBJECT, Form::Value(Type::Text), "of this key only"),
            ]
            .into_iter()
            .chain(paging::properties())
            .collect(),
            output: Form::List(Box::new(row())),
            refusals: vec![],
            needs_version: false,
            answers: &[],
            after: after(),
            does: read(true),
        },
        Action {
            name: "settle".into(),
            summary: format!(
                "Take away a record that {} has parked: it was done after all, in the same batch, or is given up. The \
                 oldest of a key is the first.",
                group.name
            ),
            target,
            shape: "state transition",
            mechanism: "delete beside an update guarded by the number of what is parked".into(),
            route: Route { method: Method::Post, place: Place::ItemAction },
            input: vec![],
            output: Form::Object(vec![
                Property::required(SUBJECT, Form::Value(Type::Text), ""),
                Property::required(LOG_OFFSET, Form::Value(Type::Int), ""),
            ]),
            refusals: vec![Code::NotFound, Code::WrongState],
            needs_version: false,
            answers: &["out-of-order processing across partitions"],
            after: after(),
            does: Does::Write(Arc::new(Settler { group: group.clone() })),
        },
    ]
}

impl Declared {
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
        let address = Address::new(&Books::open()?.progress, tenant, Books::key(&self.name, partition))?;
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

fn offset_given(input: &Map<String, Json>, name: &str) -> Option<u64> {
    input.get(name).and_then(Json::as_u64)
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Claim,
    Renew,
    Release,
    Commit,
    Seek,
    Park,
}

struct Writer {
    group: Arc<Declared>,
    verb: Verb,
}

/// What a caller says about itself.
struct Claim<'c> {
    holder: &'c str,
    epoch: i64,
    span: Duration,
}

impl Writer {
    fn claim<'c>(&self, call: &'c Call) -> Claim<'c> {
        let millis = offset_given(&call.input, DURATION_MS);
        Claim {
            holder: call.input.get(HOLDER).and_then(Json::as_str).unwrap_or_default(),
            epoch: call.input.get(EPOCH).and_then(Json::as_i64).unwrap_or(0),
            span: millis.map_or(self.group.duration, Duration::from_millis),
        }
    }

    /// The commit of an offset, with what has to be parked on the way to it (I4).
    async fn commit(&self, call: &Call, partition: u32, desk: &Desk<'_>) -> Result<Vec<Step>, Refusal> {
        let books = Books::open()?;
        let Claim { holder, epoch, span } = self.claim(call);
        let offset = |name: &str| offset_given(&call.input, name).unwrap_or(0);
        let (from, to) = (offset(FROM), offset(TO));
        let misfit = |detail: String| Refusal::misfits(vec![Misfit { pointer: format!("/{TO}"), detail }]);
        if to < from {
            return Err(misfit(format!("it is before {from}; to go back, seek")));
        }
        let row = self.group.row(&call.tenant, partition, desk.store).await?;
        let mark = Mark::of(row.as_ref());
        let mut lot = match mark.parked {
            0 => Lot::default(),
            _ => Lot::read(desk.store, &call.tenant, &self.group.name, partition).await?,
        };
        let (mut behind, mut records) = (Vec::new(), 0);
        let mut at = from;
        loop {
            // Without anything parked only the newest offset is asked for.
            let rows = if mark.parked == 0 { 1 } else { PAGE_MAX };
            let page = desk.store.read_log(partition, at, rows).await?;
            if to > page.head {
                return Err(misfit(format!("the newest offset is {}", page.head)));
            }
            let Some(last) = page.records.last().map(offset_of).filter(|_| mark.parked > 0) else { break };
            for record in page.records.iter().filter(|record| offset_of(record) <= to) {
                let Some(delivery) = self.group.delivery(&call.tenant, record) else { continue };
                if delivery.waits(&lot) && !delivery.is_parked(&lot) {
                    let reason = "an older record of its key is parked";
                    behind.extend(delivery.park(&self.group.name, partition, reason, 0, books));
                    delivery.add_to(&mut lot);
                    records += 1;
                }
            }
            at = last;
            if at >= to {
                break;
            }
        }
        // A record of many keys is parked under all of them, and cannot be committed in part.
        if behind.len() > BEHIND_MAX && records > 1 {
            return Err(misfit(format!(
                "records on the way have more than {BEHIND_MAX} keys that are behind parked ones; commit less"
            )));
        }
        let parked = mark.parked + i64::try_from(behind.len()).unwrap_or(0);
        let step = Step::update(&books.progress, Books::key(&self.group.name, partition))
            .guard(lease::held_by(holder, epoch))
            .guard(column(REACHED).eq(column_of(from)))
            .guard(column(PARKED_COUNT).eq(mark.parked))
            .set(REACHED, column_of(to))
            .set(KEEPS_FROM, column_of(to))
            .set(PARKED_COUNT, parked)
            .set(EXPIRES_AT, now_plus(span))
            .set(UPDATED_AT, now());
        Ok(std::iter::once(step).chain(behind).collect())
    }

    /// Parks a record under each of its subjects (D2).
    async fn park(&self, call: &Call, partition: u32, desk: &Desk<'_>) -> Result<Vec<Step>, Refusal> {
        let books = Books::open()?;
        let Claim { holder, epoch, .. } = self.claim(call);
        let text = |name: &str| call.input.get(name).and_then(Json::as_str).unwrap_or_default();
        let offset = offset_given(&call.input, LOG_OFFSET).unwrap_or(0);
        let (subject, reason, group) = (text(SUBJECT), text(REASON), &self.group.name);
        let page = desk.store.read_log(partition, offset.saturating_sub(1), 1).await?;
        let record = page.records.first().filter(|record| offset_of(record) == offset);
        let delivery = record.map(|record| self.group.delivery(&call.tenant, record));
        let parked = match &delivery {
            Some(Some(delivery)) if delivery.subjects().iter().any(|known| known == subject) => {
                delivery.park(group, partition, reason, 1, books)
            }
            // A record that was trimmed after the program read it, or is not the group's, is parked as the program names it.
            None | Some(None) => vec![parking::park(group, partition, subject, offset, reason, 1, books)],
            Some(Some(_)) => {
                let detail = format!("{} has no record of {subject} at {offset}", self.group.what(call));
                return Err(Refusal::misfits(vec![Misfit { pointer: format!("/{SUBJECT}"), detail }]));
            }
        };
        let count = i64::try_from(parked.len()).unwrap_or(i64::MAX);
        let step = Step::update(&books.progress, Books::key(group, partition))
            .guard(lease::held_by(holder, epoch))
            .guard(column(REACHED).lt(column_of(offset)))
            .set(PARKED_COUNT, column(PARKED_COUNT).add(count))
            .set(UPDATED_AT, now());
        Ok(std::iter::once(step).chain(parked).collect())
    }
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let books = Books::open()?;
        let partition = self.group.partition(call, desk.store)?;
        let Claim { holder, epoch, span } = self.claim(call);
        if holder.is_empty() {
            let detail = "a holder has a name".to_owned();
            return Err(Refusal::misfits(vec![Misfit { pointer: format!("/{HOLDER}"), detail }]));
        }
        let (table, key) = (&books.progress, Books::key(&self.group.name, partition));
        let (steps, what) = match self.verb {
            Verb::Claim => {
                let step = lease::acquire(table, key, holder, span)
                    .set(KEEPS_FROM, Operand::Coalesce(REACHED.to_owned(), 0.into()));
                (vec![step.set(UPDATED_AT, now())], "claimed")
            }
            Verb::Renew => {
                (vec![lease::renew(table, key, holder, epoch, span).set(UPDATED_AT, now())], "renewed")
            }
            Verb::Release => {
                (vec![lease::release(table, key, holder, epoch).set(UPDATED_AT, now())], "released")
            }
            Verb::Commit => (self.commit(call, partition, desk).await?, "committed"),
            Verb::Seek => {
                let head = desk.store.read_log(partition, 0, 1).await?.head;
                let to = column_of(offset_given(&call.input, TO).unwrap_or(0).min(head));
                let step = Step::update(table, key).guard(lease::held_by(holder, epoch));
                (vec![step.set(REACHED, to).set(KEEPS_FROM, to).set(UPDATED_AT, now())], "moved")
            }
            Verb::Park => (self.park(call, partition, desk).await?, "parked"),
        };
        let event = self.group.event(what).with_row_of(0);
        Ok(Draft::Write(Pieces { subject: key_text(&call.key), steps, event }))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let what = self.group.what(call);
        if refused.step > 0 && self.verb == Verb::Commit {
            return Verdict::TryAgain;
        }
        if refused.step > 0 {
            return common_verdict(
                &format!("{what}: the record at that offset, among what is parked,"),
                refused,
            );
        }
        let (Reason::Guard { guard, .. }, Some(row)) = (&refused.reason, &refused.current) else {
            return common_verdict(&what, refused);
        };
        let Claim { holder, epoch, .. } = self.claim(call);
        let current = row.text(HOLDER).unwrap_or("nobody").to_owned();
        let at = row.int(EPOCH).unwrap_or(0);
        let reached = row.int(REACHED).unwrap_or(0);
        let is_own = current == holder && at == epoch;
        let refusal = match self.verb {
            Verb::Claim => {
                let message = format!("{what} is read by {current}, under epoch {at}: wait and try again");
                Refusal::new(Code::Held, message)
            }
            _ if !is_own => {
                let message = format!(
                    "{what} is read by {current} under epoch {at}, not by {holder} under epoch {epoch}"
                );
                Refusal::new(Code::NotHolder, message)
            }
            Verb::Renew => Refusal::new(
                Code::Expired,
                format!("{what}: its time was up; claim it again, under a new epoch"),
            ),
            Verb::Park => {
                Refusal::new(Code::WrongState, format!("{what} has passed that record: it is at {reached}"))
            }
            // Something was parked or settled between the draft and the commit.
            _ if **guard != column(REACHED).eq(column_of(offset_given(&call.input, FROM).unwrap_or(0))) => {
                return Verdict::TryAgain;
            }
            _ => {
                Refusal::new(Code::VersionConflict, format!("{what} is at {reached}: poll again from there"))
            }
        };
        Verdict::Refuse(refusal.at_version(Some(row)))
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        Answer::row(shown(event.data.get("row").unwrap_or(&Json::Null)))
    }
}

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    One,
    All,
    Poll,
}

struct Reader {
    group: Arc<Declared>,
    look: Look,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.look {
            Look::Poll => self.poll(call, desk).await?,
            Look::One => {
                let partition = self.group.partition(call, desk.store)?;
                Answer::row(self.standing(&call.tenant, partition, desk).await?)
            }
            Look::All => {
                let mut all = Vec::new();
                for partition in 0..desk.store.partitions() {
                    all.push(self.standing(&call.tenant, partition, desk).await?);
                }
                Answer::row(json!(all))
            }
        };
        Ok(Arc::new(answer))
    }
}

impl Reader {
    /// How far the group has got, and what lies ahead of it.
    async fn standing(&self, tenant: &Tenant, partition: u32, desk: &Desk<'_>) -> Result<Json, Refusal> {
        let row = self.group.row(tenant, partition, desk.store).await?;
        let reached = Mark::of(row.as_ref()).reached;
        let page = desk.store.read_log(partition, reached, PAGE_MAX).await?;
        let ahead: Vec<&Record> =
            page.records.iter().filter(|record| self.group.delivery(tenant, record).is_some()).collect();
        let last = page.records.last().map_or(reached.max(page.head), offset_of);
        let behind = ahead.first().map_or(Duration::ZERO, |record| desk.clock.now().since(record.at));
        let mut body = match &row {
            Some(row) => shown(&row.to_json()),
            None => json!({
                LOG_PARTITION: partition, REACHED: 0, PARKED_COUNT: 0, HOLDER: null, EPOCH: 0, EXPIRES_AT: null,
                VERSION: 0,
            }),
        };
        let missed = if row.is_some() { page.oldest.saturating_sub(reached + 1) } else { 0 };
        if let Some(fields) = body.as_object_mut() {
            fields.insert("head".into(), page.head.into());
            let more = page.head.saturating_sub(last);
            fields.insert("lag_records".into(), (ahead.len() as u64 + more).into());
            fields.insert("lag_ms".into(), u64::try_from(behind.as_millis()).unwrap_or(u64::MAX).into());
            fields.insert(MISSED.into(), missed.into());
        }
        Ok(body)
    }

    async fn poll(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let partition = self.group.partition(call, desk.store)?;
        let row = self.group.row(&call.tenant, partition, desk.store).await?;
        let (holder, epoch) = (call.input.get(HOLDER).and_then(Json::as_str), call.input.get(EPOCH));
        if holder.is_some() || epoch.is_some() {
            let of = |name: &str| row.as_ref().and_then(|row| row.get(name)).map(Value::to_json);
            let is_own = of(HOLDER).as_ref().and_then(Json::as_str) == holder && of(EPOCH).as_ref() == epoch;
            if !is_own {
                let what = self.group.what(call);
                let message = format!("{what} is not the caller's, under this epoch: claim it again");
                return Err(Refusal::new(Code::NotHolder, message).at_version(row.as_ref()));
            }
        }
        let mark = Mark::of(row.as_ref());
        let lot = match mark.parked {
            0 => Lot::default(),
            _ => Lot::read(desk.store, &call.tenant, &self.group.name, partition).await?,
        };
        let after = offset_given(&call.input, AFTER).unwrap_or(mark.reached);
        let limit =
            call.input.get(LIMIT).and_then(Json::as_u64).and_then(|limit| usize::try_from(limit).ok());
        let limit = limit.unwrap_or(POLL_DEFAULT);
        let wait = Duration::from_millis(offset_given(&call.input, WAIT_MS).unwrap_or(0));
        let until = desk.clock.uptime() + wait;
        let mut found = Found { through: after, lot, ..Found::default() };
        if mark.parked > 0 {
            self.pass_over(call, partition, mark.reached, &mut found, desk).await?;
        }
        loop {
            self.look_on(call, partition, limit, &mut found, desk).await?;
            let left = until.saturating_sub(desk.clock.uptime());
            if !found.records.is_empty() || left.is_zero() {
                break;
            }
            let mut seen = vec![u64::MAX; desk.store.partitions() as usize];
            if let Some(seen) = seen.get_mut(partition as usize) {
                *seen = found.head;
            }
            desk.store.wait_log(&seen, left).await?;
        }
        let missed = if row.is_some() { found.oldest.saturating_sub(after + 1) } else { 0 };
        Ok(Answer::row(json!({
            "records": found.records, "reached": mark.reached, "through": found.through, "head": found.head,
            MISSED: missed,
        })))
    }

    /// Notes what is behind parked records between what was committed and where the poll begins: the keys of these records
    /// wait with them.
    async fn pass_over(
        &self,
        call: &Call,
        partition: u32,
        mut at: u64,
        found: &mut Found,
        desk: &Desk<'_>,
    ) -> Result<(), Refusal> {
        while at < found.through {
            let page = desk.store.read_log(partition, at, PAGE_MAX).await?;
            let Some(last) = page.records.last().map(offset_of) else { return Ok(()) };
            for record in page.records.iter().filter(|record| offset_of(record) <= found.through) {
                let delivery = self.group.delivery(&call.tenant, record);
                if let Some(delivery) = delivery.filter(|delivery| delivery.waits(&found.lot)) {
                    delivery.add_to(&mut found.lot);
                }
            }
            at = last;
        }
        Ok(())
    }

    /// Goes on through the log until there are enough records, or too many were passed over.
    async fn look_on(
        &self,
        call: &Call,
        partition: u32,
        limit: usize,
        found: &mut Found,
        desk: &Desk<'_>,
    ) -> Result<(), Refusal> {
        for _ in 0..POLL_PAGES {
            let page = desk.store.read_log(partition, found.through, PAGE_MAX).await?;
            (found.head, found.oldest) = (page.head, page.oldest);
            if page.records.is_empty() {
                return Ok(());
            }
            for record in &page.records {
                if let Some(delivery) = self.group.delivery(&call.tenant, record) {
                    let (waits, keys) = (delivery.waits(&found.lot), delivery.subjects().len());
                    let is_full = waits && found.behind > 0 && found.behind + keys > BEHIND_MAX;
                    if found.records.len() >= limit || is_full {
                        return Ok(());
                    }
                    if waits {
                        found.behind += keys;
                        delivery.add_to(&mut found.lot);
                    } else {
                        found.records.push(delivery.shown(desk.resources));
                    }
                }
                found.through = offset_of(record);
            }
        }
        Ok(())
    }
}

/// What a poll has found so far.
#[derive(Default)]
struct Found {
    records: Vec<Json>,
    /// What is parked, or will be when the records on the way are committed.
    lot: Lot,
    /// Keys of records that are withheld, because an older one of theirs is parked.
    behind: usize,
    through: u64,
    head: u64,
    oldest: u64,
}

struct ParkedReader {
    group: Arc<Declared>,
    list: bool,
}

impl ParkedReader {
    /// A parked record with what the log has of it.
    async fn shown(&self, parked: &Parked, tenant: &Tenant, desk: &Desk<'_>) -> Result<Json, Refusal> {
        let before = parked.offset.saturating_sub(1);
        let page = desk.store.read_log(parked.partition, before, 1).await?;
        let record = page.records.first().filter(|record| offset_of(record) == parked.offset);
        let delivery = record.and_then(|record| self.group.delivery(tenant, record));
        let record = delivery.map(|delivery| delivery.shown(desk.resources));
        Ok(json!({
            LOG_PARTITION: parked.partition, SUBJECT: parked.subject, LOG_OFFSET: parked.offset,
            REASON: parked.reason, TRIES: parked.tries, PARKED_AT: Value::Time(parked.parked_at).to_json(),
            "record": record,
        }))
    }
}

#[async_trait]
impl Read for ParkedReader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let books = Books::open()?;
        if self.list {
            let partition = call.input.get(LOG_PARTITION).and_then(Json::as_i64).unwrap_or(0);
            let key = [Value::from(self.group.name.as_str()), partition.into()];
            let mut query = Query::table(&books.parked, &call.tenant, key)?;
            if let Some(subject) = call.input.get(SUBJECT).and_then(Json::as_str) {
                query = query.prefix([subject.into()])?;
            }
            let page = desk.store.query(&paging::page_of(query, call)?).await?;
            let mut rows = Vec::new();
            for row in &page.rows {
                rows.push(self.shown(&Parked::of(row), &call.tenant, desk).await?);
            }
            return Ok(Arc::new(paging::answer(rows, page.next)));
        }
        let key = std::iter::once(Value::from(self.group.name.as_str())).chain(call.key.iter().cloned());
        let address = Address::new(&books.parked, &call.tenant, key)?;
        let row = desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        let missing = || {
            let message = format!("{} has nothing parked at {}", self.group.name, key_text(&call.key));
            Refusal::new(Code::NotFound, message)
        };
        let parked = Parked::of(&row.ok_or_else(missing)?);
        Ok(Arc::new(Answer::row(self.shown(&parked, &call.tenant, desk).await?)))
    }
}

struct Settler {
    group: Arc<Declared>,
}

#[async_trait]
impl Write for Settler {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let books = Books::open()?;
        let partition = self.group.partition(call, desk.store)?;
        let subject = call.key.get(1).and_then(Value::as_text).unwrap_or_default();
        let offset = call.key.get(2).and_then(Value::as_int).map_or(0, offset_in);
        let what = format!("{} {}", self.group.name, key_text(&call.key));
        let mark = Mark::of(self.group.row(&call.tenant, partition, desk.store).await?.as_ref());
        let lot = Lot::read(desk.store, &call.tenant, &self.group.name, partition).await?;
        if !lot.holds(subject, offset) {
            return Err(Refusal::new(Code::NotFound, format!("{what} is not parked")));
        }
        if let Some((key, first)) = lot.before(offset) {
            let message =
                format!("{what}: the record at {first} is older, and is parked as well under {key}");
            return Err(Refusal::new(Code::WrongState, message));
        }
        let keys = lot.keys_at(offset);
        let step = Step::update(&books.progress, Books::key(&self.group.name, partition))
            .guard(column(PARKED_COUNT).eq(mark.parked))
            .set(PARKED_COUNT, mark.parked - i64::try_from(keys.len()).unwrap_or(0))
            .set(UPDATED_AT, now());
        let event = self.group.event("settled").with(SETTLED, json!({SUBJECT: subject, LOG_OFFSET: offset}));
        let removed = parking::remove_all(&self.group.name, partition, &keys, offset, books);
        let steps = std::iter::once(step).chain(removed).collect();
        Ok(Draft::Write(Pieces { subject: key_text(&call.key), steps, event }))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        match (refused.step, &refused.reason) {
            // Somebody parked or settled in between.
            (0, _) | (_, Reason::Absent) => Verdict::TryAgain,
            _ => common_verdict(&format!("{} {}", self.group.name, key_text(&call.key)), refused),
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        Answer::row(event.data.get_mut(SETTLED).map(Json::take).unwrap_or_default())
    }
}
