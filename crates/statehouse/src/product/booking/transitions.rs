//! The transitions of units and bookings.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::{Row, Value};

use super::rules::span;
use super::{
    AVAILABLE, BOOKING_ID, BookingSpec, CANCELLED, CONFIRMED, CREATED_AT, EXPIRED, EXPIRES_AT, HELD,
    HOLD_EXPIRES_AT, HOLDER, IN_PROGRESS, OVERDUE, RETIRED, SOLD, STATE, UNITS,
};
use crate::action::{ActionContext, Call, Code, Refusal};
use crate::declare::machine::{
    Gather, Gathered, MachinePart, PartUse, RowOrigin, Scene, Transition, TransitionCase, absent, from, null,
};
use crate::declare::rule::{bind, col, now, now_minus, now_plus};
use crate::declare::{ActionSpec, Machine, MachineSpec};
use crate::resource::key_text;

/// A bound value: the booking that holds a unit, and whose time is up.
pub(super) const BEFORE: &str = "before";
/// A bound value: units that the plan itself changes, as a list of keys.
pub(super) const TAKEN: &str = "taken";
/// The cases in which a unit is held: it is free, or its hold is over.
pub(super) const FREE: &str = "free";
pub(super) const OVER: &str = "over";

const TIME_WAS_UP: &str = "the time of {what} was up; hold again";
const TIME_IS_UP: &str = "the time of {what} is up; confirm or cancel it";

/// The transitions of a unit that bookings fire.
pub(super) struct UnitParts {
    /// Holding and extending leave no trace in the row if holds are leases.
    pub hold: Option<PartUse>,
    pub extend: Option<PartUse>,
    pub sell: PartUse,
    pub free: Option<PartUse>,
}

/// The actions of a unit that are transitions of its row.
pub(super) struct UnitActions {
    pub create: ActionSpec,
    /// None for units without fields.
    pub patch: Option<ActionSpec>,
    pub retire: ActionSpec,
    pub restore: ActionSpec,
    pub delete: ActionSpec,
}

/// The machine of units. What bookings change is named by the events of bookings.
pub(super) fn of_units(booking: &Arc<BookingSpec>, actions: UnitActions) -> MachineSpec {
    let machine = Machine::of(&booking.name, &booking.units_def);
    let machine = called(booking, actions).into_iter().fold(machine, MachineSpec::transition);
    // I2: only the booking that has a unit changes it.
    let own = |case: TransitionCase| {
        case.state_implied("only a unit that is held or sold names a booking")
            .rule_or_retry("owner", col(BOOKING_ID).eq(bind(BOOKING_ID)))
    };
    let free = own(from([HELD, SOLD]).to(AVAILABLE)).set(BOOKING_ID, null()).set(HOLD_EXPIRES_AT, null());
    let free = Transition::part("free", free);
    if booking.leased {
        // A row may still be held from before holds were leases.
        let machine = machine
            .transition(Transition::by_hand("hold", from([AVAILABLE]).to(HELD)).unlogged())
            .transition(sell_leased());
        return if booking.refundable { machine.transition(free) } else { machine };
    }
    let hold_for = booking.hold_for;
    machine
        .transition(held_unit(booking))
        .transition(Transition::part(
            "extend",
            own(from([HELD]).to_same()).set(HOLD_EXPIRES_AT, now_plus(hold_for)),
        ))
        .transition(Transition::part("sell", own(from([HELD]).to(SOLD)).set(HOLD_EXPIRES_AT, null())))
        .transition(free)
}

/// What callers do to units themselves (I6).
fn called(booking: &Arc<BookingSpec>, actions: UnitActions) -> Vec<Transition> {
    let UnitActions { create, patch, retire, restore, delete } = actions;
    let fields = || booking.fields.iter().map(|field| field.name.clone());
    let gone = |case: TransitionCase| match booking.leased {
        // The trace of a hold from before holds were leases.
        true => case.set(BOOKING_ID, null()).set(HOLD_EXPIRES_AT, null()),
        false => case,
    };
    let created = absent().to(AVAILABLE).event("created").set_given(fields());
    let patched = |action| {
        let case = idle(booking, &[AVAILABLE, RETIRED], RowOrigin::to_same);
        let patched = Transition::call(action, case.event("updated").set_given(fields()));
        leased(booking, UnitLease::Look, patched)
    };
    let retired = gone(idle(booking, &[AVAILABLE], |origin| origin.to(RETIRED)));
    let deleted = idle(booking, &[AVAILABLE, RETIRED], RowOrigin::to_deleted);
    let restored = Transition::call(restore, from([RETIRED]).to(AVAILABLE));
    let mut transitions = vec![Transition::call(create, created)];
    transitions.extend(patch.map(patched));
    transitions.extend([
        leased(booking, UnitLease::Take, Transition::call(retire, retired)),
        leased(booking, UnitLease::Release, restored),
        leased(booking, UnitLease::Take, Transition::call(delete, deleted)),
    ]);
    transitions
}

/// A case that begins with a unit in one of these states. Where holds are leases, a row that is still held from before they were
/// counts as `AVAILABLE` once its hold is over.
fn idle(
    booking: &BookingSpec,
    states: &[&'static str],
    to: impl FnOnce(RowOrigin) -> TransitionCase,
) -> TransitionCase {
    let held = "{what} is held by booking {booking_id} until {hold_expires_at}; try again when it is over and the \
                server has freed the unit";
    let case = if booking.leased {
        let over = col(STATE).eq(HELD).and(col(HOLD_EXPIRES_AT).le(now()));
        let is_idle = states.iter().fold(over, |rule, state| rule.or(col(STATE).eq(*state)));
        to(from(states.iter().copied().chain([HELD]))).state_implied("the rule names the states").rule(
            "idle",
            is_idle,
            Code::WrongState,
            "{what} is {state}",
        )
    } else {
        to(from(states.iter().copied()))
    };
    case.refused_in(HELD, Code::Held, held)
}

/// Holds a unit (I1): one that is free, or, unless bookings keep their units, one whose hold is over.
fn held_unit(booking: &BookingSpec) -> Transition {
    let free = from([AVAILABLE]).to(HELD).named(FREE);
    let over = from([HELD])
        .to(HELD)
        .named(OVER)
        .state_implied("only a unit that is held has an end of its hold")
        .rule_or_retry("holder", col(BOOKING_ID).eq(bind(BEFORE)))
        .rule_or_retry("over", col(HOLD_EXPIRES_AT).le(now()));
    let hold = match booking.keeps_units {
        true => Transition::part("hold", free),
        false => Transition::part("hold", [free, over]),
    };
    hold.each(|case| {
        case.set(BOOKING_ID, bind(BOOKING_ID))
            .set(HOLD_EXPIRES_AT, now_plus(booking.hold_for))
            .refused_in(HELD, Code::Held, "{what} is held by another caller")
            .refused_in(SOLD, Code::WrongState, "{what} is {state}")
            .refused_in(RETIRED, Code::WrongState, "{what} was retired")
    })
}

/// Sells a unit that was held by a lease, unless its row says that another booking has it.
fn sell_leased() -> Transition {
    let over = col(STATE).eq(HELD).and(col(HOLD_EXPIRES_AT).le(now()));
    let free = col(STATE).eq(AVAILABLE).or(col(BOOKING_ID).eq(bind(BOOKING_ID))).or(over);
    let case = from([AVAILABLE, HELD])
        .to(SOLD)
        .state_implied("a unit that is sold names another booking")
        .rule("free", free, Code::WrongState, "{what} was sold to another caller; the hold was lost")
        .refused_in(RETIRED, Code::WrongState, "{what} was retired; the hold was lost")
        .set(BOOKING_ID, bind(BOOKING_ID))
        .set(HOLD_EXPIRES_AT, null());
    Transition::part("sell", case)
}

/// The actions of a booking that are transitions of its row.
pub(super) struct BookingActions {
    pub extend: ActionSpec,
    pub confirm: ActionSpec,
    pub cancel: ActionSpec,
    pub expire: ActionSpec,
}

/// The machine of bookings. `hold` chooses the units by hand and fires the first transition.
pub(super) fn of_bookings(
    booking: &Arc<BookingSpec>,
    units: &UnitParts,
    actions: BookingActions,
) -> MachineSpec {
    let BookingActions { extend, confirm, cancel, expire } = actions;
    let (hold_for, hold_max) = (booking.hold_for, booking.hold_max);
    let named: Vec<String> = booking.group.iter().map(|field| field.name.clone()).collect();
    let reading = |transition: Transition| {
        let columns = named.iter().cloned().map(Into::into).chain([UNITS.into()]);
        transition.reading_only::<std::borrow::Cow<'static, str>>(columns)
    };
    let each = |case: TransitionCase, part: Option<&PartUse>| match part {
        Some(part) => case.parts([part.clone()], each_unit(booking, part)),
        None => case,
    };
    let up = if booking.keeps_units { TIME_IS_UP } else { TIME_WAS_UP };
    let ended = |case: TransitionCase| case.refused_in(EXPIRED, Code::Expired, TIME_WAS_UP);
    // I3: by the engine's clock, which also set the end.
    let live =
        |case: TransitionCase| ended(case).rule("in time", col(EXPIRES_AT).gt(now()), Code::Expired, up);
    let longest = format!("{{what}} cannot be held longer than {} in all", span(hold_max));
    let begun = col(CREATED_AT).ge(now_minus(hold_max.saturating_sub(hold_for)));
    let held = absent()
        .to(IN_PROGRESS)
        .event("held")
        .set(UNITS, bind(UNITS))
        .set(HOLDER, bind(HOLDER))
        .set(CREATED_AT, now())
        .set(EXPIRES_AT, now_plus(hold_for))
        .set_given(named.iter().cloned())
        .set_given(booking.details.iter().map(|field| field.name.clone()));
    let extended = live(from([IN_PROGRESS]).to_same())
        .rule("bound", begun, Code::Expired, longest)
        .refused_in(OVERDUE, Code::Expired, TIME_IS_UP)
        .set(EXPIRES_AT, now_plus(hold_for));
    let (confirmed, expired) = match booking.keeps_units {
        true => (
            from([IN_PROGRESS, OVERDUE]).to(CONFIRMED).refused_in(EXPIRED, Code::Expired, TIME_WAS_UP),
            from([IN_PROGRESS]).to(OVERDUE).event("overdue"),
        ),
        false => (live(from([IN_PROGRESS]).to(CONFIRMED)), ended(from([IN_PROGRESS]).to(EXPIRED))),
    };
    let expired = expired.rule("due", col(EXPIRES_AT).le(now()), Code::WrongState, "{what} is still held");
    let free_held = units.free.as_ref().filter(|_| !booking.leased && !booking.keeps_units);
    let machine = Machine::of(&booking.bookings, &booking.bookings_def);
    let machine = match booking.keeps_units {
        // A booking may have expired before bookings kept their units.
        true => machine.transition(Transition::by_hand("end", from([IN_PROGRESS]).to(EXPIRED)).unlogged()),
        // A booking may be overdue from before they were freed.
        false => {
            machine.transition(Transition::by_hand("overdue", from([IN_PROGRESS]).to(OVERDUE)).unlogged())
        }
    };
    machine
        .transition(Transition::part("hold", held))
        .transition(reading(leases(
            booking,
            LeaseChange::Extend,
            Transition::call(extend, each(extended, units.extend.as_ref())),
        )))
        .transition(reading(Transition::call(confirm, each(confirmed, Some(&units.sell)))))
        .transition(reading(leases(booking, LeaseChange::Release, cancelled(booking, units, cancel, each))))
        .transition(reading(Transition::deadline_or_call(expire, each(expired, free_held))))
}

fn cancelled(
    booking: &BookingSpec,
    units: &UnitParts,
    cancel: ActionSpec,
    each: impl Fn(TransitionCase, Option<&PartUse>) -> TransitionCase,
) -> Transition {
    let to_cancelled = |states: &[&'static str]| {
        let case = from(states.iter().copied()).to(CANCELLED).event("cancelled");
        case.refused_in(EXPIRED, Code::Expired, TIME_WAS_UP)
    };
    let free = units.free.as_ref();
    match (booking.refundable, booking.leased) {
        (false, true) => Transition::call(cancel, to_cancelled(&[IN_PROGRESS, OVERDUE])),
        (false, false) => Transition::call(cancel, each(to_cancelled(&[IN_PROGRESS, OVERDUE]), free)),
        (true, false) => {
            Transition::call(cancel, each(to_cancelled(&[IN_PROGRESS, OVERDUE, CONFIRMED]), free))
        }
        // Only units that were sold have a trace in their rows.
        (true, true) => Transition::call(
            cancel,
            [
                to_cancelled(&[IN_PROGRESS, OVERDUE]).named("held"),
                each(to_cancelled(&[CONFIRMED]).named("sold"), free),
            ],
        )
        .try_pick(|scene| Ok(usize::from(scene.loaded_row()?.get_text(STATE)? == CONFIRMED))),
    }
}

/// Fires a transition on each unit of a booking, but those that the plan changes otherwise.
fn each_unit(
    booking: &Arc<BookingSpec>,
    part: &PartUse,
) -> impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + use<> {
    let (booking, part) = (booking.clone(), part.clone());
    move |scene| {
        let units = booking.units_in(scene.loaded_row()?)?;
        let taken = scene.bound(TAKEN).map_or(Json::Null, Value::to_json);
        let is_taken =
            |key: &[Value]| taken.as_array().is_some_and(|keys| keys.contains(&json!(key_text(key))));
        let id = Value::from(scene.key_text()?);
        let fired = units.into_iter().filter(|key| !is_taken(key)).map(|key| {
            let firing = part.at(key).bind(BOOKING_ID, id.clone());
            // Without leases, the units change with the booking: a refused unit means that the booking has changed since.
            if booking.leased { firing.into() } else { firing.or_retry().into() }
        });
        Ok(fired.collect())
    }
}

/// What becomes of the leases of a booking before its row changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseChange {
    Extend,
    Release,
}

/// What the lease on a unit has to do with a change of the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitLease {
    /// There must be none.
    Look,
    /// There must be none, and for a moment no buyer gets one.
    Take,
    /// Buyers get one at once.
    Release,
}

struct LeaseUnit {
    booking: Arc<BookingSpec>,
    lease: UnitLease,
}

#[async_trait]
impl Gather for LeaseUnit {
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        _: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        self.booking.lease_unit(self.lease, call, cx).await?;
        Ok(Gathered::default())
    }

    fn acts_outside(&self) -> bool {
        self.lease != UnitLease::Look
    }
}

fn leased(booking: &Arc<BookingSpec>, lease: UnitLease, transition: Transition) -> Transition {
    if !booking.leased {
        return transition;
    }
    transition.gather(LeaseUnit { booking: booking.clone(), lease })
}

struct ChangeLeases {
    booking: Arc<BookingSpec>,
    change: LeaseChange,
}

#[async_trait]
impl Gather for ChangeLeases {
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        row: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        if let Some(row) = row {
            self.booking.change_leases(self.change, call, cx, row).await?;
        }
        Ok(Gathered::default())
    }

    fn acts_outside(&self) -> bool {
        true
    }
}

fn leases(booking: &Arc<BookingSpec>, change: LeaseChange, transition: Transition) -> Transition {
    if !booking.leased {
        return transition;
    }
    transition.gather(ChangeLeases { booking: booking.clone(), change })
}
