//! What can be done with units and bookings.

use std::sync::Arc;

use statehouse_store::Type;

use super::read::{Reader, Reading};
use super::rules::span;
use super::write::{Offer, Verb, Writer};
use super::{BOOKING_ID, BY_HOLDER, Booking, COUNT, HOLDER, STATE, UNIT_STATES};
use crate::action::{Code, WAIT};
use crate::blueprint::settings::Field;
use crate::declare::{ActionSpec, IndexList, RowRead};
use crate::form::{Form, Property};
use crate::resource::state_name;

pub(super) fn unit_actions(booking: &Arc<Booking>) -> [ActionSpec; 3] {
    let key = booking.group.iter().chain([&booking.unit]);
    let read = |what: Reading| Reader { booking: booking.clone(), what };
    let state =
        Property::optional(STATE, Form::one_of(&UNIT_STATES), "which of them to show; all if not given");
    [
        ActionSpec::create("create", "Offer a {name}.")
            .takes(key.chain(&booking.fields).map(Field::property))
            .writes(Offer(booking.clone())),
        ActionSpec::read("read", "Look at a {name}: a hold whose time is up reads as free.")
            .mechanism("strong read by key, interpreted by the hold's end")
            .answers(&["stale availability after hold expiry"])
            .after(["create"])
            .reads(read(Reading::Unit)),
        ActionSpec::list(
            "list",
            "List the {name} rows of a group, by their keys: a hold whose time is up reads as free.",
        )
        .mechanism("strong range read of the group, interpreted by the holds' ends")
        .takes(booking.group.iter().map(Field::property).chain([state]))
        .answers(&["stale availability after hold expiry"])
        .after(["create"])
        .reads(read(Reading::Units)),
    ]
}

pub(super) fn booking_actions(booking: &Arc<Booking>) -> [ActionSpec; 7] {
    let (unit, def) = (&booking.name, &booking.bookings_def);
    let created = format!("{unit}.create");
    let target = format!("{} + {}", state_name(&booking.bookings), state_name(unit));
    let (hold_for, hold_max) = (span(booking.hold_for), span(booking.hold_max));
    let holder = Property::required(HOLDER, Form::Value(Type::Text), "whose bookings");
    let held = if booking.leased { "temporary lease + workflow create" } else { "guarded exclusive hold" };
    let write = |action: ActionSpec, verb: Verb| {
        action
            .target(target.clone())
            .after([created.as_str(), "hold"])
            .writes(Writer { booking: booking.clone(), verb })
    };
    let step = |name: &'static str, summary: String, mechanism: &'static str, verb: Verb| {
        write(ActionSpec::transition(name, summary).mechanism(mechanism), verb)
    };
    [
        write(
            ActionSpec::create("hold", format!("Hold {unit} rows for {hold_for}, all of them or none.")),
            Verb::Hold,
        )
        .shape("state transition")
        .mechanism(held)
        .takes(wanted(booking))
        .codes(&[Code::AlreadyExists, Code::NotFound, Code::Held, Code::WrongState, Code::Contended])
        .answers(&["duplicate hold", "expired hold not released"])
        .after([created.as_str()]),
        ActionSpec::read("read", "Read a booking.")
            .target(target.clone())
            .after([created.as_str(), "hold"])
            .reads_row(RowRead::of(&booking.bookings, def)),
        ActionSpec::list("list", "List the bookings of a holder, newest first.")
            .target(target.clone())
            .mechanism("range read on the holder and time index")
            .after([created.as_str(), "hold"])
            .reads_index(IndexList::newest_first(def).by(BY_HOLDER, holder)),
        step(
            "extend",
            format!("Hold for {hold_for} from now, up to {hold_max} in all."),
            "guarded extension of the hold",
            Verb::Extend,
        )
        .code(Code::Expired)
        .answers(&["expired hold not released"]),
        step(
            "confirm",
            "Buy what is held, if its time is not up.".into(),
            "guarded confirm/commit",
            Verb::Confirm,
        )
        .code(Code::Expired)
        .answers(&["confirm-after-expiry race", "cancel/confirm race"]),
        step("cancel", "Give up what is held.".into(), "guarded release", Verb::Cancel)
            .answers(&["cancel/confirm race"]),
        step(
            "expire",
            "Free what was held, if its time is up. The server does this by itself.".into(),
            "timed release / expiry",
            Verb::Expire,
        )
        .answers(&["expired hold not released", "confirm-after-expiry race"])
        .after([created.as_str(), "hold", WAIT]),
    ]
}

/// What `hold` takes.
fn wanted(booking: &Booking) -> Vec<Property> {
    let mut wanted = vec![Property::required(BOOKING_ID, Form::Value(Type::Text), "an id that you choose")];
    wanted.extend(booking.group.iter().map(Field::property));
    wanted.extend([
        Property::optional(
            &booking.unit.name,
            Form::List(Box::new(Form::Value(booking.unit.kind))),
            "the units that you want",
        ),
        Property::optional(
            COUNT,
            Form::Range(1, i64::try_from(booking.units_max).unwrap_or(1)),
            "how many in all; those that you do not name are the best that are free, side by side if possible",
        ),
        Property::required(HOLDER, Form::Value(Type::Text), "for whom"),
    ]);
    wanted.extend(booking.details.iter().map(Field::property));
    wanted
}
