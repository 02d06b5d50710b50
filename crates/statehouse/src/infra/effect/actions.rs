//! What can be done with effects.

use std::sync::Arc;

use serde_json::json;
use statehouse_store::Type;

use super::transitions::SETTLES;
use super::write::{ResolveEffect, SendEffect};
use super::{
    AFTER_MS, BODY, BY_STATUS, EXPIRES_AT, EffectDestination, EffectSpec, HEADERS, HostName, IS_DELIVERED,
    KEY, PARKED, REASON, SPAN_MS_MAX, STATUS, STATUSES, URL,
};
use crate::action::Code;
use crate::declare::machine::PartUse;
use crate::declare::{ActionSpec, IndexList, RowRead};
use crate::form::{Form, Property};
use crate::infra::due::DUE_AT;

/// What may be said about how an effect is to be sent.
fn request_form(effect: &EffectSpec) -> Vec<Property> {
    let text = |name: &str, about: &str| Property::required(name, Form::Value(Type::Text), about);
    let mut properties = vec![text(KEY, "what names it; the target gets it as its idempotency key")];
    if let EffectDestination::Hosts(hosts) = &effect.destination {
        let scheme = if effect.allow_private { "http" } else { "https" };
        let host = hosts.first().map(|host| {
            let name = match &host.name {
                HostName::Any => "hooks.example".to_owned(),
                HostName::Is(name) => name.clone(),
                HostName::Below(end) => format!("hooks{end}"),
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

/// `send`, and the reads.
pub(super) fn actions(effect: &Arc<EffectSpec>) -> [ActionSpec; 3] {
    let def = &effect.def;
    let status = Property::optional(STATUS, Form::one_of(&STATUSES), "which rows; PARKED if not given");
    [
        ActionSpec::create(
            "send",
            "Write down a {name} that is to be sent, in the same plan as whatever decided it.",
        )
        .shape("append")
        .mechanism("insert under the idempotency key, into the due index")
        .takes(request_form(effect))
        .code(Code::TooLarge)
        .answers(&["duplicate side effect", "invalid workflow transition around effect"])
        .writes(SendEffect(effect.clone())),
        ActionSpec::read("read", "Read a {name} and what became of it.")
            .after(["send"])
            .reads_row(RowRead::of(&effect.name, def)),
        ActionSpec::list("list", "List {name} rows by status, newest first.")
            .mechanism("range read on the status and time index")
            .answers(&["stuck reconciliation"])
            .after(["send"])
            .reads_index(IndexList::newest_first(def).by_or(BY_STATUS, status, PARKED)),
    ]
}

/// `resolve`: by hand, because a settler may add steps to its plan.
pub(super) fn resolve(effect: &Arc<EffectSpec>, part: PartUse) -> ActionSpec {
    let delivered = "whether it was applied, as a person found out";
    let summary =
        "Say by hand whether a {name} was applied. One that was not is parked, and can be replayed.";
    ActionSpec::transition("resolve", summary)
        .takes([
            Property::required(IS_DELIVERED, Form::Value(Type::Bool), delivered),
            Property::required(REASON, Form::Value(Type::Text), "how that is known"),
        ])
        .codes(&[Code::NotFound, Code::WrongState, Code::VersionConflict])
        .answers(SETTLES)
        .after(["send"])
        .writes(ResolveEffect { effect: effect.clone(), part })
}
