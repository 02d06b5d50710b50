//! What can be done with units and bookings.

use std::sync::Arc;

use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::read::{Reader, Reading};
use super::rules::span;
use super::write::{Offer, Verb, Writer};
use super::{
    BOOKING_ID, BOOKING_STATES, Booking, COUNT, CREATED_AT, EXPIRES_AT, HOLD_EXPIRES_AT, HOLDER, STATE,
    UNIT_STATES, UNITS, UPDATED_AT,
};
use crate::action::{Action, Code, Does, Method, Place, Route, WAIT};
use crate::blueprint::settings::Field;
use crate::form::{Form, Property};
use crate::infra::due::{DUE_AT, DUE_SHARD};
use crate::paging;
use crate::resource::state_name;

pub(super) fn unit_actions(booking: &Arc<Booking>) -> Vec<Action> {
    let (name, target) = (&booking.name, state_name(&booking.name));
    let row = unit_form(booking);
    let at = |method, place| Route { method, place };
    let key = booking.group.iter().chain([&booking.unit]);
    let read = |what: Reading| Does::Read(Arc::new(Reader { booking: booking.clone(), what }));
    let state =
        Property::optional(STATE, Form::one_of(&UNIT_STATES), "which of them to show; all if not given");
    let list = booking.group.iter().map(Field::property).chain([state]).chain(paging::properties());
    vec![
        Action {
            name: "create".into(),
            summary: format!("Offer a {name}."),
            target: target.clone(),
            shape: "create target",
            mechanism: "insert/create".into(),
            route: at(Method::Post, Place::Collection),
            input: key.chain(&booking.fields).map(Field::property).collect(),
            output: row.clone(),
            refusals: vec![Code::AlreadyExists],
            needs_version: false,
            answers: &[],
            after: vec![],
            does: Does::Write(Arc::new(Offer(booking.clone()))),
        },
        Action {
            name: "read".into(),
            summary: format!("Look at a {name}: a hold whose time is up reads as free."),
            target: target.clone(),
            shape: "read source",
            mechanism: "strong read by key, interpreted by the hold's end".into(),
            route: at(Method::Get, Place::Item),
            input: vec![],
            output: row.clone(),
            refusals: vec![Code::NotFound],
            needs_version: false,
            answers: &["stale availability after hold expiry"],
            after: vec![format!("{name}.create")],
            does: read(Reading::Unit),
        },
        Action {
            name: "list".into(),
            summary: format!(
                "List the {name} rows of a group, by their keys: a hold whose time is up reads as free."
            ),
            target,
            shape: "read source",
            mechanism: "strong range read of the group, interpreted by the holds' ends".into(),
            route: at(Method::Get, Place::Collection),
            input: list.collect(),
            output: Form::List(Box::new(row)),
            refusals: vec![],
            needs_version: false,
            answers: &["stale availability after hold expiry"],
            after: vec![format!("{name}.create")],
            does: read(Reading::Units),
        },
    ]
}

pub(super) fn booking_actions(booking: &Arc<Booking>) -> Vec<Action> {
    let (unit, target) =
        (&booking.name, format!("{} + {}", state_name(&booking.bookings), state_name(&booking.name)));
    let row = booking_form(booking);
    let at = |method, place| Route { method, place };
    let write = |verb: Verb| Does::Write(Arc::new(Writer { booking: booking.clone(), verb }));
    let read = |what: Reading| Does::Read(Arc::new(Reader { booking: booking.clone(), what }));
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
    let step = |name: &'static str, summary: String, mechanism: &'static str| Action {
        name: name.into(),
        summary,
        target: target.clone(),
        shape: "state transition",
        mechanism: mechanism.into(),
        route: at(Method::Post, Place::ItemAction),
        input: vec![],
        output: row.clone(),
        refusals: vec![Code::NotFound, Code::WrongState, Code::Expired],
        needs_version: false,
        answers: &[],
        after: vec![format!("{unit}.create"), format!("{}.hold", booking.bookings)],
        does: write(Verb::Cancel),
    };
    vec![
        Action {
            route: at(Method::Post, Place::Collection),
            input: wanted,
            refusals: vec![
                Code::AlreadyExists,
                Code::NotFound,
                Code::Held,
                Code::WrongState,
                Code::Contended,
            ],
            answers: &["duplicate hold", "expired hold not released"],
            after: vec![format!("{unit}.create")],
            does: write(Verb::Hold),
            ..step(
                "hold",
                format!("Hold {unit} rows for {}, all of them or none.", span(booking.hold_for)),
                if booking.leased { "temporary lease + workflow create" } else { "guarded exclusive hold" },
            )
        },
        Action {
            shape: "read source",
            route: at(Method::Get, Place::Item),
            refusals: vec![Code::NotFound],
            does: read(Reading::Booking),
            ..step("read", "Read a booking.".into(), "strong read by key")
        },
        Action {
            shape: "read source",
            route: at(Method::Get, Place::Collection),
            input: [Property::required(HOLDER, Form::Value(Type::Text), "whose bookings")]
                .into_iter()
                .chain(paging::properties())
                .collect(),
            output: Form::List(Box::new(row.clone())),
            refusals: vec![],
            does: read(Reading::Bookings),
            ..step(
                "list",
                "List the bookings of a holder, newest first.".into(),
                "range read on the holder and time index",
            )
        },
        Action {
            answers: &["expired hold not released"],
            does: write(Verb::Extend),
            ..step(
                "extend",
                format!(
                    "Hold for {} from now, up to {} in all.",
                    span(booking.hold_for),
                    span(booking.hold_max)
                ),
                "guarded extension of the hold",
            )
        },
        Action {
            answers: &["confirm-after-expiry race", "cancel/confirm race"],
            does: write(Verb::Confirm),
            ..step("confirm", "Buy what is held, if its time is not up.".into(), "guarded confirm/commit")
        },
        Action {
            refusals: vec![Code::NotFound, Code::WrongState],
            answers: &["cancel/confirm race"],
            does: write(Verb::Cancel),
            ..step("cancel", "Give up what is held.".into(), "guarded release")
        },
        Action {
            refusals: vec![Code::NotFound, Code::WrongState],
            answers: &["expired hold not released", "confirm-after-expiry race"],
            after: vec![format!("{unit}.create"), format!("{}.hold", booking.bookings), WAIT.into()],
            does: write(Verb::Expire),
            ..step(
                "expire",
                "Free what was held, if its time is up. The house does this by itself.".into(),
                "timed release / expiry",
            )
        },
    ]
}

fn unit_form(booking: &Booking) -> Form {
    let key = booking.group.iter().chain([&booking.unit]);
    let mut form: Vec<Property> =
        key.map(|field| Property::required(&field.name, Form::Value(field.kind), "")).collect();
    form.extend(booking.fields.iter().map(|field| Property { required: true, ..field.property() }));
    form.extend([
        Property::required(STATE, Form::one_of(&UNIT_STATES), "as it is now"),
        Property::required(BOOKING_ID, Form::Value(Type::Text), "who has it").or_null(),
        Property::required(HOLD_EXPIRES_AT, Form::Value(Type::Time), "when it is free again").or_null(),
        Property::required(UPDATED_AT, Form::Value(Type::Time), "when it was last changed"),
        Property::required(VERSION, Form::Value(Type::Int), "how often it was changed"),
    ]);
    Form::Object(form)
}

fn booking_form(booking: &Booking) -> Form {
    let mut form = vec![
        Property::required(BOOKING_ID, Form::Value(Type::Text), ""),
        Property::required(STATE, Form::one_of(&BOOKING_STATES), "as it is now"),
    ];
    form.extend(
        booking.group.iter().map(|field| Property::required(&field.name, Form::Value(field.kind), "")),
    );
    form.push(Property::required(
        UNITS,
        Form::List(Box::new(Form::Value(booking.unit.kind))),
        "what it holds or bought",
    ));
    form.push(Property::required(HOLDER, Form::Value(Type::Text), "for whom"));
    form.extend(booking.details.iter().map(|field| Property { required: true, ..field.property() }));
    form.extend([
        Property::required(CREATED_AT, Form::Value(Type::Time), ""),
        Property::required(EXPIRES_AT, Form::Value(Type::Time), "when the hold ends"),
        Property::required(UPDATED_AT, Form::Value(Type::Time), "when it was last changed"),
        Property::required(DUE_SHARD, Form::Value(Type::Int), "").or_null(),
        Property::required(DUE_AT, Form::Value(Type::Time), "when the house looks after it").or_null(),
        Property::required(VERSION, Form::Value(Type::Int), "how often it was changed"),
    ]);
    Form::Object(form)
}
