//! The actions of a group, and of what it has parked.

use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::super::parking::{LOG_OFFSET, PARKED_AT, REASON, SUBJECT, TRIES};
use super::super::progress::{LOG_PARTITION, MISSED, PARKED_COUNT, REACHED};
use super::parked::{ParkedRead, RetryParked, SettleParked};
use super::read::{GroupQuery, GroupRead};
use super::write::{GroupVerb, GroupWrite};
use super::{
    AFTER, DURATION_DEFAULT, DURATION_MS, DURATION_MS_MAX, FROM, GroupSpec, LIMIT, POLL_MAX, SETTLED, TO,
    WAIT_MS, WAIT_MS_MAX, shown,
};
use crate::action::{Answer, Code, Method, RouteKind};
use crate::declare::ActionSpec;
use crate::form::{Form, Property};
use crate::infra::lease::{EPOCH, EXPIRES_AT, HOLDER};
use crate::prepare::take_field;

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

/// The actions of a group.
pub(super) fn actions(group: &Arc<GroupSpec>) -> [ActionSpec; 9] {
    let [claim, renew, release] = lease_actions(group);
    let [read, list] = status_actions(group);
    [claim, poll(group), commit(group), renew, release, seek(group), park(group), read, list]
}

fn text(name: &str, about: &str) -> Property {
    Property::required(name, Form::Value(Type::Text), about)
}

fn offset(name: &str, about: &str) -> Property {
    Property::required(name, Form::Range(0, i64::MAX), about)
}

fn holder() -> Property {
    text(HOLDER, "who reads; a name of the caller's own")
}

fn epoch() -> Property {
    Property::required(EPOCH, Form::Value(Type::Int), "the epoch that claim returned")
}

fn duration(group: &GroupSpec) -> Property {
    let about = format!("for how long; {} if not given", group.duration.as_millis());
    Property::optional(DURATION_MS, Form::Range(1, DURATION_MS_MAX), &about)
}

/// An action that changes the row of progress.
fn write(
    group: &Arc<GroupSpec>,
    verb: GroupVerb,
    name: &'static str,
    summary: &'static str,
    mechanism: &'static str,
) -> ActionSpec {
    ActionSpec::transition(name, summary)
        .mechanism(mechanism)
        .gives(row_form())
        .codes(&[Code::NotFound, Code::NotHolder])
        .after(["claim"])
        .answer_with(|_, _, event| Answer::row(shown(event.data.get("row").unwrap_or(&Json::Null))))
        .writes(GroupWrite { group: group.clone(), verb })
}

/// An action that reads the row of progress and the log behind it.
fn status(
    group: &Arc<GroupSpec>,
    look: GroupQuery,
    name: &'static str,
    summary: &'static str,
    mechanism: &'static str,
) -> ActionSpec {
    ActionSpec::read(name, summary)
        .mechanism(mechanism)
        .answers(&["consumer lag"])
        .after(["claim"])
        .reads(GroupRead { group: group.clone(), look })
}

/// Claiming, renewing and releasing a partition.
fn lease_actions(group: &Arc<GroupSpec>) -> [ActionSpec; 3] {
    let claim = write(
        group,
        GroupVerb::Claim,
        "claim",
        "Take a partition of {name} that no reader holds, or whose reader's lease has expired.",
        "guarded exclusive claim with expiry and epoch, on the row of progress",
    )
    .takes([holder(), duration(group)])
    .codes(&[Code::Held, Code::NotFound])
    .answers(&["duplicate consumption"])
    .after([]);
    let renew = write(
        group,
        GroupVerb::Renew,
        "renew",
        "Hold a partition of {name} for longer, before its lease expires.",
        "conditional update guarded by epoch and expiry",
    )
    .shape("overwrite")
    .takes([holder(), epoch(), duration(group)])
    .code(Code::Expired)
    .answers(&["duplicate consumption"]);
    let release = write(
        group,
        GroupVerb::Release,
        "release",
        "Let go of a partition of {name}, so that another reader need not wait.",
        "conditional update guarded by epoch",
    )
    .takes([holder(), epoch()]);
    [claim, renew, release]
}

fn poll(group: &Arc<GroupSpec>) -> ActionSpec {
    let optional = |property: Property| Property { required: false, ..property };
    status(
        group,
        GroupQuery::Poll,
        "poll",
        "Read the next records of {name}; with `wait_ms`, wait for one to come.",
        "range read of the log behind an offset, under the reader's epoch",
    )
    .on(Method::Get, RouteKind::ItemAction)
    .shape("read log")
    .takes([
        optional(holder()),
        optional(epoch()),
        Property::optional(AFTER, Form::Range(0, i64::MAX), "behind this offset; `reached` if not given"),
        Property::optional(LIMIT, Form::Range(1, POLL_MAX), "records at most; 50 if not given"),
        Property::optional(WAIT_MS, Form::Range(0, WAIT_MS_MAX), "how long to wait for the first"),
    ])
    .gives(Form::Object(vec![
        Property::required("records", Form::List(Box::new(record_form())), ""),
        offset("reached", "what was committed"),
        offset("through", "everything up to here was looked at: commit this, or poll after it"),
        offset("head", "the newest offset"),
        offset(MISSED, "records that were trimmed before they were read"),
    ]))
    .codes(&[Code::NotFound, Code::NotHolder])
}

fn commit(group: &Arc<GroupSpec>) -> ActionSpec {
    write(
        group,
        GroupVerb::Commit,
        "commit",
        "Say up to where the records of {name} are done, and hold the partition for longer. In a batch with what was \
         done, both are one plan.",
        "conditional update guarded by the old offset and the reader's epoch",
    )
    .shape("overwrite")
    .takes([
        holder(),
        epoch(),
        offset(FROM, "the offset that was committed before"),
        offset(TO, "everything up to here is done"),
        duration(group),
    ])
    .codes(&[Code::NotFound, Code::NotHolder, Code::VersionConflict, Code::InvalidInput])
    .answers(&["duplicate consumption", "offset advanced before effect committed"])
}

fn seek(group: &Arc<GroupSpec>) -> ActionSpec {
    write(
        group,
        GroupVerb::Seek,
        "seek",
        "Move {name} to another offset: back, to read records again, or forward.",
        "conditional update guarded by epoch",
    )
    .shape("overwrite")
    .takes([
        holder(),
        epoch(),
        offset(TO, "the next record is the one after this offset; beyond the newest means the newest"),
    ])
}

fn park(group: &Arc<GroupSpec>) -> ActionSpec {
    write(
        group,
        GroupVerb::Park,
        "park",
        "Set a record of {name} aside that cannot be processed, and what follows of its key.",
        "insert beside a conditional update guarded by epoch",
    )
    .shape("append")
    .takes([
        holder(),
        epoch(),
        text(SUBJECT, "as the poll has it"),
        Property::required(LOG_OFFSET, Form::Range(1, i64::MAX), "which record"),
        text(REASON, "why it cannot be processed"),
    ])
    .codes(&[Code::NotFound, Code::NotHolder, Code::WrongState, Code::AlreadyExists])
    .answers(&["out-of-order processing across partitions"])
}

fn status_actions(group: &Arc<GroupSpec>) -> [ActionSpec; 2] {
    let read = status(
        group,
        GroupQuery::One,
        "read",
        "Read how far {name} has got in a partition, and how far it is behind.",
        "strong read by key, and of the log behind it",
    );
    let list = status(
        group,
        GroupQuery::All,
        "list",
        "Read how far {name} has got in every partition.",
        "strong reads by key, and of the log behind them",
    );
    [
        read.gives(standing_form()),
        list.on(Method::Get, RouteKind::Collection).gives(Form::List(Box::new(standing_form()))).codes(&[]),
    ]
}

fn parked_form() -> Form {
    Form::Object(vec![
        Property::required(LOG_PARTITION, Form::Value(Type::Int), ""),
        Property::required(SUBJECT, Form::Value(Type::Text), ""),
        Property::required(LOG_OFFSET, Form::Value(Type::Int), ""),
        Property::required(REASON, Form::Value(Type::Text), "why it is parked"),
        Property::required(TRIES, Form::Value(Type::Int), "0 for one that is only behind another"),
        Property::required(PARKED_AT, Form::Value(Type::Time), ""),
        Property::required("record", record_form(), "null once it was trimmed").or_null(),
    ])
}

/// The actions of what a group has parked.
pub(super) fn parked_actions(group: &Arc<GroupSpec>) -> [ActionSpec; 3] {
    let (name, row) = (&group.name, parked_form());
    let (claim, park) = (format!("{name}.claim"), format!("{name}.park"));
    let after = [claim.as_str(), park.as_str()];
    let read = |list: bool| ParkedRead { group: group.clone(), list };
    [
        ActionSpec::read("read", format!("Read a record that {name} has parked."))
            .mechanism("strong read by key, and of the log")
            .gives(row.clone())
            .after(after)
            .reads(read(false)),
        ActionSpec::list("list", format!("List what {name} has parked in a partition, by key, oldest first."))
            .mechanism("strong range read, and of the log")
            .takes([
                Property::required(LOG_PARTITION, Form::Range(0, i64::from(u32::MAX)), ""),
                Property::optional(SUBJECT, Form::Value(Type::Text), "of this key only"),
            ])
            .gives_rows(row)
            .after(after)
            .reads(read(true)),
        ActionSpec::transition(
            "settle",
            format!(
                "Take away a record that {name} has parked: it was processed after all, in the same batch, or is given up. \
                 The oldest of a key is the first."
            ),
        )
        .mechanism("delete beside an update guarded by the number of what is parked")
        .gives(Form::Object(vec![
            Property::required(SUBJECT, Form::Value(Type::Text), ""),
            Property::required(LOG_OFFSET, Form::Value(Type::Int), ""),
        ]))
        .answers(&["out-of-order processing across partitions"])
        .after(after)
        .try_answer_with(|_, _, event| Ok(Answer::row(take_field(event, SETTLED)?)))
        .writes(SettleParked { group: group.clone() }),
    ]
}

/// What can be done about the parked events of a reaction to a resource: they are read, listed, tried again and given up.
pub(crate) fn reaction_actions(name: &str, source: &str) -> Vec<ActionSpec> {
    let of = vec![source.to_owned()];
    let group = Arc::new(GroupSpec { name: name.to_owned(), of, duration: DURATION_DEFAULT });
    let [read, _, settle] = parked_actions(&group);
    let about = "of this partition only, page by page; without it, the first 200 of all";
    let list = ActionSpec::list("list", "List the events that {name} has parked, by key, oldest first.")
        .mechanism("strong range reads, and of the log")
        .takes([
            Property::optional(LOG_PARTITION, Form::Range(0, i64::from(u32::MAX)), about),
            Property::optional(SUBJECT, Form::Value(Type::Text), "of this key only, with `log_partition`"),
        ])
        .gives_rows(parked_form())
        .reads(ParkedRead { group: group.clone(), list: true });
    let place = || {
        Form::Object(vec![
            Property::required(SUBJECT, Form::Value(Type::Text), ""),
            Property::required(LOG_OFFSET, Form::Value(Type::Int), ""),
        ])
    };
    let retry = ActionSpec::transition(
        "retry",
        "React to an event again that {name} has parked. The oldest of a key is the first; those behind it follow.",
    )
    .mechanism("guarded conditional update of the oldest parked row of the key")
    .gives(place())
    .answers(&["out-of-order processing across partitions"])
    .try_answer_with(|_, _, event| Ok(Answer::row(take_field(event, SETTLED)?)))
    .writes(RetryParked { group });
    let discard =
        settle.named("discard", "Give up an event that {name} has parked. The oldest of a key is the first.");
    [read, list, discard, retry].map(|action| action.after([])).into()
}
