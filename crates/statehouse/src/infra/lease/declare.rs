//! The declaration of leases: settings, table, transitions and reads.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_store::{Row, Time, Type, guard};

use super::{ACQUIRED_AT, EPOCH, EXPIRES_AT, FREE, HELD, HOLDER, STATE};
use crate::action::{Answer, Code, Refusal};
use crate::declare::machine::{Scene, Transition, TransitionCase, absent_or, from, null, sum};
use crate::declare::rule::{coalesce, col, input, now};
use crate::declare::{
    ActionSpec, Declare, IndexList, Machine, MachineSpec, ResourceSpec, RowRead, TableDef, TableSpec,
};
use crate::form::{Form, Property};
use crate::prepare::take_field;
use crate::resource::plural;

/// The states that a row reads as. `EXPIRED` is how a held one reads after its time; it is not stored.
const STATES: [&str; 3] = [HELD, FREE, EXPIRED];
const EXPIRED: &str = "EXPIRED";
/// The indexes of an archetype's table. Neither holds what a renewal changes.
const BY_STATE: &str = "by_state";
const BY_HOLDER: &str = "by_holder";

/// How long a lease is held, if neither the blueprint nor the caller says.
const DURATION_DEFAULT: Duration = Duration::from_secs(30);
/// How long one can be held without a renewal, if the blueprint does not say.
const DURATION_MAX_DEFAULT: Duration = Duration::from_secs(3600);
/// The bounds of both settings.
const DURATIONS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(10 * 366 * 86_400);

/// Reads `[lease.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let key = settings.key("key");
    let table = settings.text("table", plural(name));
    let max = settings.duration("max_duration", DURATION_MAX_DEFAULT, DURATIONS);
    let duration = settings.duration("duration", DURATION_DEFAULT.min(max), DURATIONS);
    settings.refuse_if(duration > max, "duration", "`duration` is longer than `max_duration`");
    let spec = TableSpec::named(table)
        .key(&key)
        .states(&STORED)
        .shown_as(Form::one_of(&STATES))
        .about("EXPIRED can be acquired like FREE")
        .text(HOLDER)
        .null()
        .int(EPOCH)
        .about("counts acquisitions and is never reset")
        .time(ACQUIRED_AT)
        .time(EXPIRES_AT)
        .null()
        .about("by the store's clock")
        .index(BY_STATE, &[STATE], &[ACQUIRED_AT])
        .index(BY_HOLDER, &[HOLDER], &[ACQUIRED_AT]);
    let def = cx.build(spec)?;
    let machine = cx.machine(transitions(Machine::of(name, &def), duration, max))?;
    let state = Property::optional(
        STATE,
        Form::one_of(&STORED),
        "which ones, if no holder is given; HELD if not given",
    );
    let of_holder = Property::optional(HOLDER, Form::Value(Type::Text), "those of this holder");
    let list =
        IndexList::newest_first(&def).by(BY_HOLDER, of_holder).by_or(BY_STATE, state, HELD).shown(shown);
    let read = "Read who holds a {name}. With `Prefer: wait` the answer comes when that changes.";
    cx.resource(
        ResourceSpec::of(name, &def)
            .machine(&machine)
            .action(
                ActionSpec::read("read", read)
                    .after(["acquire"])
                    .reads_row(RowRead::of(name, &def).missing("was never acquired").shown(shown)),
            )
            .action(
                ActionSpec::list("list", "List {name} rows, those acquired last first.")
                    .mechanism("range read on the index by state or by holder")
                    .after(["acquire"])
                    .reads_index(list),
            ),
    );
    Some(())
}

/// `acquire`, `renew`, `release` and `check`, with what they take: holder, epoch, duration.
fn actions(default: Duration, max: Duration) -> [ActionSpec; 4] {
    let holder =
        || Property::required(HOLDER, Form::Value(Type::Text), "who holds it; a name of the caller's own");
    let epoch = || Property::required(EPOCH, Form::Value(Type::Int), "the epoch that acquire returned");
    let millis = i64::try_from(max.as_millis()).unwrap_or(i64::MAX);
    let about = format!(
        "for how long, in milliseconds, counted from before this request was sent; {} if not given",
        default.as_millis()
    );
    let duration = || Property::optional(DURATION_MS, Form::Range(1, millis), &about);
    let acquire = ActionSpec::transition("acquire", "Take a {name} that is free or has expired.")
        .mechanism("guarded exclusive claim with expiry and epoch")
        .takes([holder(), duration()])
        .answers(&["duplicate claim", "orphaned claim after crash", "lease expiry race"]);
    let renew = ActionSpec::transition("renew", "Hold a {name} for longer, before it expires.")
        .shape("overwrite")
        .mechanism("conditional update guarded by epoch and expiry")
        .takes([holder(), epoch(), duration()])
        .answers(&["lease expiry race", "stale holder acting after expiry"]);
    let release = ActionSpec::transition("release", "Let go of a {name}.")
        .mechanism("conditional update guarded by epoch")
        .takes([holder(), epoch()])
        .answers(&["stale holder acting after expiry"]);
    let summary = "Write nothing, and be refused unless the {name} is the caller's: for a batch whose other writes only \
                   its holder may do.";
    let check = ActionSpec::check("check", summary)
        .mechanism("assertion guarded by epoch, in the plan of the holder's effect")
        .takes([holder(), epoch()])
        .gives(Form::Object(vec![
            Property::required(HOLDER, Form::Value(Type::Text), ""),
            Property::required(EPOCH, Form::Value(Type::Int), ""),
        ]))
        .answers(&["stale holder acting after expiry"])
        .try_answer_with(|_, _, event| {
            Ok(Answer::row(json!({HOLDER: take_field(event, HOLDER)?, EPOCH: take_field(event, EPOCH)?})))
        });
    [acquire, renew, release, check]
}

fn transitions(machine: MachineSpec, default: Duration, max: Duration) -> MachineSpec {
    let [acquire, renew, release, check] = actions(default, max);
    let end = move |scene: &Scene<'_>| {
        let given = scene.inputs().and_then(|inputs| inputs.duration_ms(DURATION_MS));
        Ok(guard::now_plus(given.unwrap_or(default)).into())
    };
    let given = |name: &'static str| {
        move |scene: &Scene<'_>| scene.inputs().map_or(Json::Null, |inputs| inputs.json(name))
    };
    machine
        .transition(named(Transition::call(
            acquire,
            absent_or(STORED)
                .to(HELD)
                .rule("free", col(STATE).eq(FREE).or(col(EXPIRES_AT).le(now())), Code::Held, IS_HELD)
                .set(HOLDER, input(HOLDER))
                .set(EPOCH, sum(coalesce(EPOCH, 0), 1))
                .set(ACQUIRED_AT, now())
                .set_with(EXPIRES_AT, end),
        )))
        .transition(named(Transition::call(
            renew,
            mine(from([HELD]).to_same())
                .rule("in time", col(EXPIRES_AT).gt(now()), Code::Expired, HAS_EXPIRED)
                .set_with(EXPIRES_AT, end),
        )))
        .transition(named(Transition::call(
            release,
            mine(from([HELD]).to(FREE)).set(HOLDER, null()).set(EXPIRES_AT, null()),
        )))
        .transition(named(Transition::call(
            check,
            mine(from([HELD]).checked()).event_field(HOLDER, given(HOLDER)).event_field(EPOCH, given(EPOCH)),
        )))
}

const IS_HELD: &str =
    "{what} is held by {holder} until {expires_at}, under epoch {epoch}: wait and try again";
const HAS_EXPIRED: &str = "{what} has expired: acquire it again, under a new epoch";
const IS_ANOTHERS: &str =
    "{what} is held by {holder} under epoch {epoch}, not by {input.holder} under epoch {input.epoch}";
const WAS_RELEASED: &str = "{what} was released and is at epoch {epoch}: acquire it again";

/// Only the holder may do it, under the epoch of its acquisition (I3, I4, I5).
fn mine(case: TransitionCase) -> TransitionCase {
    let is_mine = col(EPOCH).eq(input(EPOCH)).and(col(HOLDER).eq(input(HOLDER)));
    case.state_implied("a free lease has no holder")
        .rule("mine", is_mine, Code::NotHolder, IS_ANOTHERS)
        .refused_in(FREE, Code::NotHolder, WAS_RELEASED)
}

/// A holder has a name.
fn named(transition: Transition) -> Transition {
    transition.bind(HOLDER, |scene| match scene.inputs().and_then(|inputs| inputs.text(HOLDER)) {
        None | Some("") => Err(Refusal::field(HOLDER, "the holder must not be empty")),
        Some(holder) => Ok(holder.into()),
    })
}

/// What is stored as a state.
const STORED: [&str; 2] = [HELD, FREE];
/// How long a caller wants to hold.
const DURATION_MS: &str = "duration_ms";

/// A row as callers see it.
fn shown(def: &TableDef, row: &Row, at: Time) -> Json {
    let mut body = def.row_json(row);
    // A free lease has no end.
    let is_over = row.time(EXPIRES_AT).is_some_and(|end| end <= at);
    if let (Some(fields), true) = (body.as_object_mut(), is_over) {
        fields.insert(STATE.into(), EXPIRED.into());
    }
    body
}
