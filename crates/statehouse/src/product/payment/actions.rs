//! What can be done with payments and their transactions.

use std::borrow::Cow;

use serde_json::json;
use statehouse_store::Type;

use super::by_hand::{AskProvider, ResolveTransaction};
use super::create::CreatePayment;
use super::rules::AMOUNT_MAX;
use super::{
    AMOUNT, APPLIED, BY_PAYMENT, BY_STATUS, CAPTURE_METHOD, CAPTURE_METHODS, CURRENCY, METHOD,
    PENDING_NETWORK_RESULT, PaymentSpec, REASON, REQUIRES_RECONCILIATION, STATUS, STATUSES, TRANSACTION_ID,
    TRANSACTION_STATUSES, WEBHOOK_URLS,
};
use crate::action::{Answer, Code};
use crate::blueprint::settings::Field;
use crate::declare::{ActionSpec, IndexList, RowRead};
use crate::form::{Form, Property};

/// Addresses at which a merchant is told.
pub(super) const WEBHOOKS_MAX: usize = 20;

/// The actions that are transitions of a payment.
pub(super) struct CalledActions {
    pub charge: ActionSpec,
    pub capture: ActionSpec,
    pub cancel: ActionSpec,
    pub refund: ActionSpec,
}

fn text(name: &str, about: &str) -> Property {
    Property::required(name, Form::Value(Type::Text), about)
}

fn amount(about: &str) -> Property {
    Property::required(AMOUNT, Form::Range(1, AMOUNT_MAX), about)
}

impl CalledActions {
    pub(super) fn of(spec: &PaymentSpec) -> CalledActions {
        let id = || text(TRANSACTION_ID, "an id that you choose; one id is one transaction for ever");
        let method =
            text(METHOD, "what the payer pays with, as a reference of the provider's; never a card number");
        let charge = ActionSpec::transition(
            "charge",
            "Charge a {name}: begin a transaction and ask the provider for it.",
        )
        .takes([id(), Property { required: false, ..method }.example(json!("pm_1"))])
        .answers(&[
            "duplicate commit",
            "crash after commit before side effect",
            "retry ambiguity against provider",
        ])
        .after(["create"]);
        let whole = "how much; all that was authorized if not given. The rest is released";
        let capture =
            ActionSpec::transition("capture", "Capture what was authorized of a {name}, or a part of it.")
                .takes([id(), Property { required: false, ..amount(whole) }])
                .code(Code::OutOfRange)
                .answers(&["duplicate commit", "invalid transition"])
                .after(["create"]);
        let for_void = "an id that you choose, if the {name} is authorized: it is voided at the provider";
        let cancel = ActionSpec::transition(
            "cancel",
            "Give up a {name} that was not charged, or void its authorization.",
        )
        .takes([Property {
            required: false,
            ..text(TRANSACTION_ID, &for_void.replace("{name}", &spec.name))
        }])
        .answers(&["duplicate commit", "invalid transition"])
        .after(["create"]);
        let refund =
            ActionSpec::transition("refund", "Refund a {name}, or a part of what was captured of it.")
                .takes([id(), amount("how much")])
                .code(Code::OutOfRange)
                .answers(&["invalid transition"])
                .after(["create"]);
        let begins = |action: ActionSpec| {
            action
                .target(format!(
                    "{} + {} + {}",
                    state(&spec.name),
                    state(&spec.transactions),
                    state(spec.outbox.name())
                ))
                .mechanism("guarded workflow transition + inserts of the attempt and its request")
                .code(Code::AlreadyExists)
                .code(Code::InvalidInput)
        };
        CalledActions {
            charge: begins(charge),
            capture: begins(capture),
            cancel: begins(cancel),
            refund: begins(refund),
        }
    }
}

fn state(name: &str) -> String {
    crate::resource::state_name(name)
}

/// `create`, `reconcile` and the reads.
pub(super) fn payment_reads(spec: &PaymentSpec, create: CreatePayment, ask: AskProvider) -> [ActionSpec; 4] {
    let status = Property::optional(
        STATUS,
        Form::one_of(&STATUSES),
        "which of them; REQUIRES_RECONCILIATION if not given",
    );
    [
        ActionSpec::create("create", "Create a {name}. The same id with the same content is the first one.")
            .mechanism("insert under the id of the caller")
            .takes(contents(spec))
            .code(Code::InvalidInput)
            .answers(&["duplicate commit"])
            .writes(create),
        ActionSpec::read("read", "Read a {name} and what is known of it.")
            .after(["create"])
            .reads_row(RowRead::of(&spec.name, &spec.def)),
        ActionSpec::list("list", "List {name} rows by status, newest first.")
            .mechanism("range read on the status and time index")
            .answers(&["retry ambiguity against provider"])
            .after(["create"])
            .reads_index(IndexList::newest_first(&spec.def).by_or(BY_STATUS, status, REQUIRES_RECONCILIATION)),
        asks(
            "Ask the provider at once what became of the live transaction of a {name}. Nothing happens if its outcome is not \
             uncertain.",
            ask,
        )
        .after(["create"]),
    ]
}

/// An action that makes the question to the provider due.
fn asks(summary: &'static str, ask: AskProvider) -> ActionSpec {
    ActionSpec::transition("reconcile", summary)
        .mechanism("makes the status query due")
        .gives(Form::Object(vec![Property::required(
            ASKED,
            Form::Value(Type::Bool),
            "whether the provider is asked: whether there is something to ask",
        )]))
        .answers(&["reconciliation drift", "retry ambiguity against provider"])
        .after(["create"])
        .answer_with(|_, _, _| Answer { version: None, ..Answer::row(json!({ASKED: true})) })
        .writes(ask)
}

/// What `reconcile` answers.
pub(super) const ASKED: &str = "asked";

/// What a payment is created with.
fn contents(spec: &PaymentSpec) -> Vec<Property> {
    let currencies = spec.currencies.iter().cloned().map(Cow::Owned).collect();
    let mut contents = vec![
        text(&spec.key, "an id that you choose, without `:`"),
        amount("in minor units"),
        Property::required(CURRENCY, Form::OneOf(currencies), "of the amount"),
        Property::optional(
            CAPTURE_METHOD,
            Form::one_of(&CAPTURE_METHODS),
            if spec.is_manual { "manual if not given" } else { "automatic if not given" },
        ),
    ];
    contents.extend(spec.fields.iter().map(Field::property));
    if spec.table().type_of(WEBHOOK_URLS).is_some() {
        let urls = Form::List(Box::new(Form::Value(Type::Text)));
        contents.push(Property::optional(
            WEBHOOK_URLS,
            urls,
            "where the merchant is told, at most 20 addresses",
        ));
    }
    contents
}

/// What can be done with transactions.
pub(super) fn transaction_actions(
    spec: &PaymentSpec,
    after: [&str; 2],
    ask: AskProvider,
    resolve: ResolveTransaction,
) -> [ActionSpec; 4] {
    let def = &spec.transactions_def;
    let status = Property::optional(
        STATUS,
        Form::one_of(&TRANSACTION_STATUSES),
        "which of them; PENDING_NETWORK_RESULT if no payment is given either",
    );
    let payment = Property::optional(&spec.key, Form::Value(Type::Text), "those of this payment");
    [
        ActionSpec::read("read", "Read a transaction and what is known of it.")
            .after(after)
            .reads_row(RowRead::of(&spec.transactions, def)),
        ActionSpec::list("list", "List the transactions of a payment, or those in a status, newest first.")
            .mechanism("range read on the index by payment and time, or by status and time")
            .after(after)
            .reads_index(IndexList::newest_first(def).by(BY_PAYMENT, payment).by_or(
                BY_STATUS,
                status,
                PENDING_NETWORK_RESULT,
            )),
        asks("Ask the provider at once what became of a transaction. Nothing happens if its outcome is not uncertain.", ask)
            .after(after),
        ActionSpec::transition("resolve", "Say by hand whether a transaction with an uncertain outcome was applied.")
            .takes([
                Property::required(
                    APPLIED,
                    Form::Value(Type::Bool),
                    "whether it was applied, as a person found out",
                ),
                text(REASON, "how that is known"),
            ])
            .code(Code::VersionConflict)
            .answers(&["retry ambiguity against provider", "reconciliation drift"])
            .after(after)
            .writes(resolve),
    ]
}
