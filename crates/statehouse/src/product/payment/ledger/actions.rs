//! What can be done with transfers and accounts.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::json;
use statehouse_store::Type;

use super::read::{AccountQuery, AccountRead};
use super::transitions::TIMEOUT_MS;
use super::{
    AMOUNT, AMOUNT_MAX, BY_KIND, BY_TIME, CREDIT, CURRENCY, DEBIT, KIND, KINDS, LedgerSpec, MEMO, PENDING,
    PENDING_MAX, TRANSFER_ID,
};
use crate::action::Code;
use crate::declare::{ActionSpec, IndexList, RowRead};
use crate::form::{Form, Property};
use crate::resource::state_name;

/// The actions that are transitions of a transfer.
pub(super) struct TransferActions {
    pub transfer: ActionSpec,
    pub pend: ActionSpec,
    pub post: ActionSpec,
    pub void: ActionSpec,
}

fn text(name: &str, about: &str) -> Property {
    Property::required(name, Form::Value(Type::Text), about)
}

fn contents(spec: &LedgerSpec) -> Vec<Property> {
    let currencies = spec.currencies.iter().cloned().map(Cow::Owned).collect();
    vec![
        text(DEBIT, "the account that it is taken from").example(json!("bank:main")),
        text(CREDIT, "the account that it is given to").example(json!("wallet:7")),
        Property::required(CURRENCY, Form::OneOf(currencies), "of the amount"),
        Property::required(AMOUNT, Form::Range(1, AMOUNT_MAX), "in minor units"),
        Property::optional(MEMO, Form::Value(Type::Text), "what it is for"),
    ]
}

pub(super) fn transfer_actions(spec: &LedgerSpec) -> TransferActions {
    let target = format!("{} + {}", state_name(&spec.transfers), state_name(&spec.accounts));
    let counts = |action: ActionSpec| {
        action
            .target(target.clone())
            .code(Code::OutOfRange)
            .answers(&["duplicate commit", "invalid transition"])
    };
    let id = text(TRANSFER_ID, "an id that you choose; one id is one transfer for ever");
    let millis = i64::try_from(PENDING_MAX.as_millis()).unwrap_or(i64::MAX);
    let timeout =
        Property::optional(TIMEOUT_MS, Form::Range(1, millis), "after which it is voided by itself");
    let pended = format!("{}.pend", spec.transfers);
    TransferActions {
        transfer: counts(
            ActionSpec::create("transfer", "Move an amount from one account to another.")
                .mechanism("insert of the transfer + guarded debit + credit")
                .takes([id].into_iter().chain(contents(spec)))
                .code(Code::InvalidInput),
        ),
        pend: counts(
            ActionSpec::transition(
                "pend",
                "Reserve an amount: it is taken from one account, and given to the other when posted.",
            )
            .mechanism("insert of the transfer + guarded debit + credit")
            .takes(contents(spec).into_iter().chain([timeout]))
            .code(Code::AlreadyExists)
            .code(Code::InvalidInput),
        ),
        post: counts(ActionSpec::transition("post", "Post a pending {name}."))
            .code(Code::Expired)
            .after([pended.as_str()]),
        void: counts(ActionSpec::transition("void", "Void a pending {name}: the amount is given back."))
            .after([pended.as_str()]),
    }
}

/// The reads of transfers.
pub(super) fn transfer_reads(spec: &Arc<LedgerSpec>) -> [ActionSpec; 2] {
    let def = &spec.transfers_def;
    let kind = Property::optional(
        KIND,
        Form::one_of(&KINDS),
        "which of them; PENDING if no currency is given either",
    );
    let currencies = spec.currencies.iter().cloned().map(Cow::Owned).collect();
    let currency = Property::optional(CURRENCY, Form::OneOf(currencies), "those in this currency, by time");
    [
        ActionSpec::read("read", "Read a {name}.")
            .after(["transfer"])
            .reads_row(RowRead::of(&spec.transfers, def)),
        ActionSpec::list("list", "List {name} rows by currency or by kind, newest first.")
            .mechanism("range read on the index by currency and time, or by kind and time")
            .after(["transfer"])
            .reads_index(IndexList::newest_first(def).by(BY_TIME, currency).by_or(BY_KIND, kind, PENDING)),
    ]
}

/// The reads of accounts.
pub(super) fn account_reads(spec: &Arc<LedgerSpec>) -> [ActionSpec; 2] {
    let transfer = format!("{}.transfer", spec.transfers);
    let read = |what| AccountRead { spec: spec.clone(), what };
    let sums = |sums: Vec<Property>| Form::Object(sums);
    [
        ActionSpec::read("read", "Read what was posted to a {name} and taken from it.")
            .mechanism("strong range read of the account's cells")
            .gives(sums(AccountRead::account_form()))
            .after([transfer.as_str()])
            .reads(read(AccountQuery::Account)),
        ActionSpec::list(
            "list",
            "The trial balance: the sums of all accounts by currency. Debits and credits are equal.",
        )
        .mechanism("scan of the accounts")
        .gives_rows(sums(AccountRead::total_form()))
        .answers(&["reconciliation drift"])
        .after([transfer.as_str()])
        .reads(read(AccountQuery::TrialBalance)),
    ]
}
