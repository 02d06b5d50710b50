//! The transitions of an effect: what people do to it, and, as edges, what the worker does.

use std::sync::Arc;

use statehouse_store::{Value, guard};

use super::rules::BY_HAND;
use super::write::{EffectRequest, shard_of};
use super::{
    CANCELLED, CHECKS, DELIVERED, DELIVERED_AT, DETAIL, DOUBT, EffectDestination, EffectSpec, PARKED,
    PENDING, REASON, RETRYING, SENDING, STUCK_AT, TARGET, TRIES, UNCERTAIN, UNSETTLED_AT, URL,
};
use crate::action::{Code, Refusal};
use crate::declare::machine::{Assign, RowOrigin, Scene, Transition, TransitionCase, absent, from, null};
use crate::declare::rule::{bind, col, now, now_plus};
use crate::declare::{ActionSpec, Machine, MachineSpec};
use crate::infra::due::{DUE_AT, DUE_SHARD};

const MAY_HAVE_BEEN_APPLIED: &str =
    "{what} may have been applied by attempt {attempt}: find out, and resolve it";

fn action(name: &'static str, summary: &'static str) -> ActionSpec {
    ActionSpec::transition(name, summary)
        .answers(&["invalid workflow transition around effect"])
        .after(["send"])
}

/// A person does it. The event is named after the state that it leads to.
fn by_hand(case: TransitionCase, event: &'static str) -> TransitionCase {
    case.event(event).event_field("by", |_| "hand".into()).set(STUCK_AT, null()).set(UNSETTLED_AT, null())
}

/// I3, I5: only what was certainly not applied.
fn certainly_not_applied(case: TransitionCase) -> TransitionCase {
    case.rule("no doubt", col(DOUBT).eq(false), Code::WrongState, MAY_HAVE_BEEN_APPLIED)
}

fn sent_by(effect: &EffectSpec) -> MachineSpec {
    Machine::of(&effect.name, &effect.def).worker(&effect.sender)
}

/// The machine of an effect's rows.
pub(super) fn of(effect: &Arc<EffectSpec>) -> MachineSpec {
    let ended: Assign = effect.keep.map_or(null(), now_plus).into();
    let cancel = action("cancel", "Cancel a {name} that was certainly not applied, and is not being sent.");
    let cancelled = by_hand(from([PENDING, RETRYING, PARKED]).to(CANCELLED), "cancelled");
    let machine = worker_edges(sent_by(effect), from([DELIVERED, CANCELLED]))
        .transition(Transition::call(cancel, certainly_not_applied(cancelled).set(DUE_AT, ended.clone())))
        .transition(replay(effect))
        .transition(resolved_by_hand([UNCERTAIN, PARKED], &ended));
    if effect.rules.reconcile.is_none() {
        return machine;
    }
    let summary = "Ask the target at once what became of a {name} with an unknown outcome.";
    machine.transition(Transition::call(
        action("reconcile", summary).answers(SETTLES),
        by_hand(from([UNCERTAIN]).to(UNCERTAIN), "uncertain").set(CHECKS, 0).set(DUE_AT, now()),
    ))
}

pub(super) const SETTLES: &[&str] = &["stuck reconciliation", "effect succeeded but ack lost"];

fn replay(effect: &Arc<EffectSpec>) -> Transition {
    let summary = "Send a {name} again, at once: one that is parked, or waits for its next try.";
    // Sent again although it may have been applied: only to a target that does one key once (I5).
    let case = match effect.rules.idempotent {
        true => from([PARKED, RETRYING, UNCERTAIN]).to(PENDING),
        false => certainly_not_applied(from([PARKED, RETRYING]).to(PENDING)),
    };
    let mut case = by_hand(case, "pending")
        .set(TRIES, 0)
        .set(CHECKS, 0)
        .set(REASON, null())
        .set(DETAIL, null())
        .set(DUE_AT, now());
    // It goes to where the blueprint says now: the address may be what was wrong.
    if matches!(effect.destination, EffectDestination::Fixed(_)) {
        case = case
            .set_with(URL, addressed(effect, |_, (url, _)| url.into()))
            .set_with(TARGET, addressed(effect, |_, (_, target)| target.into()))
            .set_with(
                DUE_SHARD,
                addressed(effect, |effect, (_, target)| shard_of(&target, effect.shards).into()),
            );
    }
    Transition::call(action("replay", summary), case)
}

/// A column that follows from the address of an effect: its URL, and the host and port.
fn addressed(
    effect: &Arc<EffectSpec>,
    column: fn(&EffectSpec, (String, String)) -> Value,
) -> impl Fn(&Scene<'_>) -> Result<statehouse_store::Expr, Refusal> + use<> {
    let effect = effect.clone();
    move |scene| {
        let key = scene.key_text()?;
        let sent_key = effect.sent_key(scene.tenant, key);
        let (url, checked) = effect.address(&EffectRequest::default(), &sent_key)?;
        Ok(guard::value(column(&effect, (url, checked.target))).into())
    }
}

/// The machine of the rows of an effect that another archetype owns: what people do to them goes through the owner.
pub(super) fn of_owned(effect: &Arc<EffectSpec>) -> MachineSpec {
    let ask = by_hand(from([UNCERTAIN]).to(UNCERTAIN), "uncertain").set(CHECKS, 0).set(DUE_AT, now());
    worker_edges(sent_by(effect), from([DELIVERED]))
        .transition(Transition::part("ask", ask))
        .transition(resolved_by_hand([UNCERTAIN], &null().into()))
}

/// A person has found out. It is fired by hand, because a settler may have to add steps to the plan.
fn resolved_by_hand<const N: usize>(states: [&'static str; N], ended: &Assign) -> Transition {
    let resolved = |case: TransitionCase, event| {
        by_hand(case, event).set(DOUBT, false).set(REASON, BY_HAND).set(DETAIL, bind(REASON))
    };
    let delivered = resolved(from(states).to(DELIVERED).named("delivered"), "delivered")
        .set(DELIVERED_AT, now())
        .set(DUE_AT, ended.clone());
    let parked = resolved(from(states).to(PARKED).named("parked"), "parked").set(DUE_AT, null());
    Transition::part("resolve", [delivered, parked]).reading()
}

/// What `send` and the worker do. Their plans depend on what a target answered, so that they are made by hand.
fn worker_edges(machine: MachineSpec, forgotten: RowOrigin) -> MachineSpec {
    let to = |states: &[&'static str], state: &'static str, event: &'static str| {
        from(states.iter().copied()).to(state).named(event).event(event)
    };
    let unsent = [PENDING, RETRYING, UNCERTAIN];
    machine
        .transition(Transition::by_hand("send", absent().to(PENDING).event("pending")))
        .transition(Transition::by_hand("claim", to(&unsent, SENDING, "sending")))
        .transition(Transition::by_hand(
            "record",
            [
                to(&[SENDING, UNCERTAIN], DELIVERED, "delivered"),
                to(&[SENDING, UNCERTAIN], RETRYING, "retrying"),
                to(&[SENDING, PENDING, RETRYING, UNCERTAIN], UNCERTAIN, "uncertain"),
                to(&[SENDING, PENDING, RETRYING, UNCERTAIN], PARKED, "parked"),
            ],
        ))
        .transition(Transition::by_hand(
            "settle",
            from([DELIVERED, PARKED, UNCERTAIN]).to_same().event("settled"),
        ))
        .transition(Transition::by_hand("forget", forgotten.to_deleted().event("forgotten")))
}
