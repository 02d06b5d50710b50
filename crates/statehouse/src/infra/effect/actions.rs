//! What can be done with effects.

use std::sync::Arc;

use serde_json::json;
use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::read::Reader;
use super::write::{Changer, Verb, Writer};
use super::{
    AFTER_MS, ANSWER, ATTEMPT, BODY, CHECKS, CREATED_AT, DELIVERED_AT, DETAIL, DIGEST, DOUBT, Destination,
    EXPIRES_AT, Effect, HEADERS, HTTP_STATUS, IS_DELIVERED, KEY, Name, REASON, SENT_KEY, SPAN_MS_MAX, STATUS,
    STATUSES, STUCK_AT, TARGET, TRIES, UPDATED_AT, URL,
};
use crate::action::{Action, Code, Does, Method, Place, Route};
use crate::form::{Form, Property};
use crate::infra::due::{DUE_AT, DUE_SHARD};
use crate::paging;
use crate::resource::state_name;

/// What may be said about how an effect is to be sent.
fn letter(effect: &Effect) -> Vec<Property> {
    let text = |name: &str, about: &str| Property::required(name, Form::Value(Type::Text), about);
    let mut properties = vec![text(KEY, "what names it; the target gets it as its idempotency key")];
    if let Destination::Hosts(hosts) = &effect.destination {
        let scheme = if effect.allow_private { "http" } else { "https" };
        let host = hosts.first().map(|host| {
            let name = match &host.name {
                Name::Any => "hooks.example".to_owned(),
                Name::Is(name) => name.clone(),
                Name::Below(end) => format!("hooks{end}"),
            };
            host.port.map_or(name.clone(), |port| format!("{name}:{port}"))
        });
        let example = format!("{scheme}://{}/", host.unwrap_or_default());
        properties.push(text(URL, "where it goes, at one of the allowed hosts").example(json!(example)));
    }
    properties.extend([
        Property::optional(BODY, Form::Any, "what is sent; a text, unless the target takes JSON"),
        Property::optional(HEADERS, Form::Any, "further headers, an object of texts")
            .example(json!({"x-trace": "7"})),
        Property::optional(DUE_AT, Form::Value(Type::Time), "not before this time"),
        Property::optional(
            AFTER_MS,
            Form::Range(0, SPAN_MS_MAX),
            "and so many milliseconds later; from now, if due_at is not given",
        ),
        Property::optional(
            EXPIRES_AT,
            Form::Value(Type::Time),
            "not after this time: it is parked if it was not sent",
        ),
    ]);
    properties
}

pub(super) fn actions(effect: &Arc<Effect>) -> Vec<Action> {
    let name = &effect.name;
    let target = state_name(name);
    let row = row_form();
    let read = |list: bool| Does::Read(Arc::new(Reader { effect: effect.clone(), list }));
    let change = |verb: Verb| Does::Write(Arc::new(Changer { effect: effect.clone(), verb }));
    let at = |method, place| Route { method, place };
    let sent = vec![format!("{name}.send")];
    let base = Action {
        name: "send".into(),
        summary: format!("Write down a {name} that is to be sent, in the same plan as whatever decided it."),
        target,
        shape: "append",
        mechanism: "insert under the idempotency key, into the due index".into(),
        route: at(Method::Post, Place::Collection),
        input: letter(effect),
        output: row.clone(),
        refusals: vec![Code::AlreadyExists, Code::TooLarge],
        needs_version: false,
        answers: &["duplicate side effect", "invalid workflow transition around effect"],
        after: vec![],
        does: Does::Write(Arc::new(Writer(effect.clone()))),
    };
    let transition = |name: &'static str, summary: String, verb: Verb| Action {
        name: name.into(),
        summary,
        shape: "state transition",
        mechanism: "guarded conditional update".into(),
        route: at(Method::Post, Place::ItemAction),
        input: vec![],
        refusals: vec![Code::NotFound, Code::WrongState],
        answers: &["invalid workflow transition around effect"],
        after: sent.clone(),
        does: change(verb),
        ..base.clone()
    };
    let mut actions = vec![
        base.clone(),
        Action {
            name: "read".into(),
            summary: format!("Read a {name} and what became of it."),
            shape: "read source",
            mechanism: "strong read by key".into(),
            route: at(Method::Get, Place::Item),
            input: vec![],
            refusals: vec![Code::NotFound],
            answers: &[],
            after: sent.clone(),
            does: read(false),
            ..base.clone()
        },
        Action {
            name: "list".into(),
            summary: format!("List {name} rows by status, newest first."),
            shape: "read source",
            mechanism: "range read on the status and time index".into(),
            route: at(Method::Get, Place::Collection),
            input: [Property::optional(STATUS, Form::one_of(&STATUSES), "which rows; PARKED if not given")]
                .into_iter()
                .chain(paging::properties())
                .collect(),
            output: Form::List(Box::new(row)),
            refusals: vec![],
            answers: &["stuck reconciliation"],
            after: sent.clone(),
            does: read(true),
            ..base.clone()
        },
        transition(
            "cancel",
            format!("Cancel a {name} that was certainly not applied, and is not being sent."),
            Verb::Cancel,
        ),
        transition(
            "replay",
            format!("Send a {name} again, at once: one that is parked, or waits for its next try."),
            Verb::Replay,
        ),
        Action {
            input: vec![
                Property::required(
                    IS_DELIVERED,
                    Form::Value(Type::Bool),
                    "whether it was applied, as a person found out",
                ),
                Property::required(REASON, Form::Value(Type::Text), "how that is known"),
            ],
            answers: &["stuck reconciliation", "effect succeeded but ack lost"],
            ..transition(
                "resolve",
                format!(
                    "Say by hand whether a {name} was applied. One that was not is parked, and can be replayed."
                ),
                Verb::Resolve,
            )
        },
    ];
    if effect.rules.reconcile.is_some() {
        actions.push(Action {
            answers: &["stuck reconciliation", "effect succeeded but ack lost"],
            ..transition(
                "reconcile",
                format!("Ask the target at once what became of a {name} of which nobody knows."),
                Verb::Reconcile,
            )
        });
    }
    actions
}

fn row_form() -> Form {
    let of = |name: &str, kind: Type, about: &str| Property::required(name, Form::Value(kind), about);
    Form::Object(vec![
        of(KEY, Type::Text, ""),
        Property::required(STATUS, Form::one_of(&STATUSES), ""),
        of(SENT_KEY, Type::Text, "what the target knows it by"),
        of(URL, Type::Text, ""),
        of(TARGET, Type::Text, "host and port"),
        Property::required(HEADERS, Form::Any, "those that came with it").or_null(),
        Property::required(BODY, Form::Any, "").or_null(),
        of(DIGEST, Type::Text, "tells a repetition from another effect under the same key"),
        of(ATTEMPT, Type::Int, "how often it was sent in all; the epoch of its sender"),
        of(TRIES, Type::Int, "how often since it was written down or replayed"),
        of(CHECKS, Type::Int, "how often the target was asked what became of it"),
        of(DOUBT, Type::Bool, "whether some attempt may have been applied without anybody knowing"),
        of(STUCK_AT, Type::Time, "since when a person has to look at it").or_null(),
        of(DUE_SHARD, Type::Int, ""),
        of(
            DUE_AT,
            Type::Time,
            "when the house looks at it next; while it is sent, the end of its sender's lease",
        )
        .or_null(),
        of(EXPIRES_AT, Type::Time, "").or_null(),
        of(HTTP_STATUS, Type::Int, "of the last answer").or_null(),
        of(ANSWER, Type::Text, "the beginning of the last answer's body, without secrets").or_null(),
        of(REASON, Type::Text, "a stable word for why it is where it is").or_null(),
        of(DETAIL, Type::Text, "").or_null(),
        of(CREATED_AT, Type::Time, ""),
        of(DELIVERED_AT, Type::Time, "").or_null(),
        of(UPDATED_AT, Type::Time, ""),
        of(VERSION, Type::Int, "raised by every write"),
    ])
}
