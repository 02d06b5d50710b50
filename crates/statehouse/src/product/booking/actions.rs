//! What can be done with units and bookings.

use std::sync::Arc;

use statehouse_store::Type;

use super::read::{BookingQuery, BookingRead};
use super::rules::span;
use super::transitions::{BookingActions, UnitActions};
use super::write::HoldUnits;
use super::{
    BOOKING_ID, BOOKING_STATES, BY_HOLDER, BY_STATE, BookingSpec, COUNT, HOLDER, IN_PROGRESS, STATE,
    UNIT_STATES,
};
use crate::action::{Code, WAIT};
use crate::blueprint::settings::Field;
use crate::declare::{ActionSpec, IndexList, RowRead};
use crate::form::{Form, Property};
use crate::resource::state_name;

/// The actions that are transitions of a unit.
pub(super) fn unit_actions(booking: &BookingSpec) -> UnitActions {
    let key = booking.group.iter().chain([&booking.unit]);
    let whole = key.chain(&booking.fields).map(Field::property);
    let part = booking.fields.iter().map(|field| Property { required: false, ..field.property() });
    let about = "Change some fields of a {name} that is neither held nor sold; null clears an optional one (JSON \
                 Merge Patch).";
    let retire = "Offer a {name} no longer, unless it is held or sold. It is kept and can be restored.";
    UnitActions {
        create: ActionSpec::create("create", "Offer a {name}.").takes(whole),
        patch: (!booking.fields.is_empty()).then(|| ActionSpec::patch("patch", about).takes(part)),
        retire: ActionSpec::transition("retire", retire),
        restore: ActionSpec::transition("restore", "Offer a retired {name} again."),
        delete: ActionSpec::delete("delete", "Delete a {name} that is neither held nor sold. It is gone.")
            .mechanism("guarded delete"),
    }
}

pub(super) fn unit_reads(booking: &Arc<BookingSpec>) -> [ActionSpec; 2] {
    let read = |what: BookingQuery| BookingRead { booking: booking.clone(), what };
    let state =
        Property::optional(STATE, Form::one_of(&UNIT_STATES), "which of them to show; all if not given");
    [
        ActionSpec::read("read", "Look at a {name}: a hold whose time is up reads as free.")
            .mechanism("strong read by key, interpreted by the hold's end")
            .answers(&["stale availability after hold expiry"])
            .after(["create"])
            .reads(read(BookingQuery::Unit)),
        ActionSpec::list(
            "list",
            "List the {name} rows of a group, by their keys: a hold whose time is up reads as free.",
        )
        .mechanism("strong range read of the group, interpreted by the holds' ends")
        .takes(booking.group.iter().map(Field::property).chain([state]))
        .answers(&["stale availability after hold expiry"])
        .after(["create"])
        .reads(read(BookingQuery::Units)),
    ]
}

/// The state that actions of bookings work on.
fn target(booking: &BookingSpec) -> String {
    format!("{} + {}", state_name(&booking.bookings), state_name(&booking.name))
}

/// `hold`, and the reads of bookings.
pub(super) fn hold_and_reads(booking: &BookingSpec, hold: HoldUnits) -> [ActionSpec; 3] {
    let (unit, def) = (&booking.name, &booking.bookings_def);
    let created = format!("{unit}.create");
    let hold_for = span(booking.hold_for);
    let holder = Property::optional(HOLDER, Form::Value(booking.holder), "whose bookings");
    let about = "in which state; IN_PROGRESS if no holder is given either";
    let state = Property::optional(STATE, Form::one_of(&BOOKING_STATES), about);
    let held = if booking.leased { "temporary lease + workflow create" } else { "guarded exclusive hold" };
    [
        ActionSpec::create("hold", format!("Hold {unit} rows for {hold_for}, all of them or none."))
            .target(target(booking))
            .shape("state transition")
            .mechanism(held)
            .takes(wanted(booking))
            .codes(&[Code::AlreadyExists, Code::NotFound, Code::Held, Code::WrongState, Code::Contended])
            .answers(&["duplicate hold", "expired hold not released"])
            .after([created.as_str()])
            .writes(hold),
        ActionSpec::read("read", "Read a booking.")
            .target(target(booking))
            .after([created.as_str(), "hold"])
            .reads_row(RowRead::of(&booking.bookings, def)),
        ActionSpec::list("list", "List the bookings of a holder, or those in a state, newest first.")
            .target(target(booking))
            .mechanism("range read on the index by holder and time, or by state and time")
            .after([created.as_str(), "hold"])
            .reads_index(IndexList::newest_first(def).by(BY_HOLDER, holder).by_or(
                BY_STATE,
                state,
                IN_PROGRESS,
            )),
    ]
}

/// The actions that are transitions of a booking.
pub(super) fn booking_actions(booking: &BookingSpec) -> BookingActions {
    let created = format!("{}.create", booking.name);
    let (hold_for, hold_max) = (span(booking.hold_for), span(booking.hold_max));
    let action = |name: &'static str, summary: String, mechanism: &'static str| {
        ActionSpec::transition(name, summary)
            .target(target(booking))
            .mechanism(mechanism)
            .after([created.as_str(), "hold"])
    };
    let extend = format!("Hold for {hold_for} from now, up to {hold_max} in all.");
    let expire = match booking.keeps_units {
        true => {
            "Mark a booking as overdue, if its time is up; it keeps what it has. The server does this by itself."
        }
        false => "Free what was held, if its time is up. The server does this by itself.",
    };
    let confirm = match booking.keeps_units {
        true => "Buy what is held, also if it is overdue.",
        false => "Buy what is held, if its time is not up.",
    };
    BookingActions {
        extend: action("extend", extend, "guarded extension of the hold")
            .answers(&["expired hold not released"]),
        confirm: action("confirm", confirm.into(), "guarded confirm/commit")
            .answers(&["confirm-after-expiry race", "cancel/confirm race"]),
        cancel: action("cancel", "Give up what is held.".into(), "guarded release")
            .answers(&["cancel/confirm race"]),
        expire: action("expire", expire.into(), "timed release / expiry")
            .answers(&["expired hold not released", "confirm-after-expiry race"])
            .after([created.as_str(), "hold", WAIT]),
    }
}

/// What `hold` takes.
fn wanted(booking: &BookingSpec) -> Vec<Property> {
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
        Property::required(HOLDER, Form::Value(booking.holder), "for whom"),
    ]);
    wanted.extend(booking.details.iter().map(Field::property));
    wanted
}
