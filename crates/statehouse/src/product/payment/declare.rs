//! Reads `[payment.NAME]`: the settings, the tables, and the three resources.

use std::sync::Arc;

use statehouse_store::Type;

use super::actions::{CalledActions, payment_reads, transaction_actions};
use super::by_hand::{AskProvider, ResolveTransaction};
use super::create::CreatePayment;
use super::ledger::{self, LedgerSettings};
use super::provider::Provider;
use super::provider::http::HttpProvider;
use super::rules::{AMOUNT_MAX, TransactionKind};
use super::settle::PaymentSettler;
use super::transitions::{self, TransactionParts};
use super::{
    ACTION_URL, AMOUNT, ATTEMPT, BY_PAYMENT, BY_STATUS, CAPTURABLE, CAPTURE_METHOD, CAPTURE_METHODS,
    CAPTURED, CURRENCY, LIVE_TRANSACTION, MANUAL, METHOD, PROVIDER, PROVIDER_REF, PaymentSpec, REASON,
    REFUNDABLE, REFUNDED, REFUNDING, STATUS, STATUSES, TRANSACTION_ID, TRANSACTION_STATUSES, TYPE,
    WEBHOOK_URLS,
};
use crate::blueprint::settings::Field;
use crate::declare::table::{CREATED_AT, UPDATED_AT};
use crate::declare::{Declare, ResourceSpec, SettingsReader, TableSpec};
use crate::form::Form;
use crate::infra::effect::Outbox;
use crate::infra::effect::owned::{EffectDraft, EffectOfOwner, OwnedEffect};
use crate::infra::effect::settle::Settler;
use crate::resource::{Resource, plural};

/// What the blueprint says of a payment.
struct PaymentSettings {
    key: Field,
    fields: Vec<Field>,
    currencies: Vec<String>,
    is_manual: bool,
    attempts_max: u32,
    table: String,
    webhook: Option<Outbox>,
    provider: ProviderDraft,
    ledger: Option<LedgerSettings>,
}

/// The provider that a blueprint declares, and the effect that sends to it.
struct ProviderDraft {
    name: &'static str,
    protocol: Box<dyn Provider>,
    effect: EffectDraft,
}

/// Reads `[payment.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let others = cx.others().map_or(&[][..], |(_, resources)| resources);
    let PaymentSettings {
        key,
        fields,
        currencies,
        is_manual,
        attempts_max,
        table,
        webhook,
        provider,
        ledger,
    } = read_settings(cx.settings(), name, others)?;
    let takes_urls = webhook.as_ref().is_some_and(Outbox::takes_url);
    let transactions = format!("{name}_transaction");
    let def = cx.build(payments_table(table, &key, &fields, takes_urls))?;
    let transactions_def = cx.build(transactions_table(&transactions, &key))?;
    let effect = EffectOfOwner::build(cx, provider.effect)?;
    let ledger = match ledger {
        Some(ledger) => Some(ledger::declare(cx, &currencies, ledger)?),
        None => None,
    };
    let spec = Arc::new(PaymentSpec {
        name: name.to_owned(),
        transactions,
        key: key.name.clone(),
        fields,
        currencies,
        is_manual,
        attempts_max: attempts_max.into(),
        def,
        transactions_def,
        provider_name: provider.name,
        provider: provider.protocol,
        outbox: effect.outbox(),
        webhook,
        ledger,
    });
    let transaction_machine = cx.machine(transitions::of_transactions(&spec))?;
    let parts = TransactionParts {
        open: cx.part(&transaction_machine, "open")?,
        settle: cx.part(&transaction_machine, "settle")?,
    };
    let machine = cx.machine(transitions::of_payments(&spec, &parts, CalledActions::of(&spec)))?;
    let settler = Arc::new(PaymentSettler {
        spec: spec.clone(),
        transaction: parts.settle.clone(),
        payment: cx.part(&machine, "settle")?,
    });
    let create = CreatePayment { spec: spec.clone(), part: cx.part(&machine, "create")? };
    let ask = |on_transaction| AskProvider { spec: spec.clone(), ask: effect.ask.clone(), on_transaction };
    let resolve = ResolveTransaction { settler: settler.clone(), effect: effect.resolve() };
    let (created, charged) = (format!("{name}.create"), format!("{name}.charge"));
    let before = [created.as_str(), charged.as_str()];
    let payments = ResourceSpec::of(name, &spec.def).actions(payment_reads(&spec, create, ask(false)));
    cx.resource(payments.machine(&machine));
    let transactions = ResourceSpec::of(&spec.transactions, &spec.transactions_def);
    let transactions = transactions.actions(transaction_actions(&spec, before, ask(true), resolve));
    cx.resource(transactions.machine(&transaction_machine));
    let settler: Arc<dyn Settler> = settler;
    cx.resource(effect.resource(settler, &before));
    Some(())
}

fn read_settings(
    settings: &mut SettingsReader<'_>,
    name: &str,
    others: &[Resource],
) -> Option<PaymentSettings> {
    let key = settings.key("key");
    let fields = settings.fields("fields");
    let table = settings.text("table", format!("{name}_intents"));
    let currencies = settings.texts("currencies");
    let is_code = |code: &&String| code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_uppercase());
    if let Some(wrong) = currencies.iter().find(|code| !is_code(code)) {
        let advice = "write the three letters of ISO 4217: `currencies = [\"EUR\", \"USD\"]`; amounts are in minor units";
        settings.problem_with_advice("currencies", format!("`{wrong}` is not a currency"), advice);
    }
    if currencies.is_empty() {
        let advice = "write `currencies = [\"EUR\"]`; amounts are in minor units";
        settings.problem_with_advice("currencies", format!("`payment.{name}` needs `currencies`"), advice);
    }
    let is_manual = settings.choice("capture", &CAPTURE_METHODS) == MANUAL;
    let attempts_max = settings.count("attempts_max", 3, 1..=100);
    let webhook = webhook(settings, others);
    let provider = provider(settings, name);
    let mut key = key.into_iter();
    let (Some(key), None) = (key.next().filter(|key| key.kind == Type::Text), key.next()) else {
        let title = format!("the key of `payment.{name}` must be one text");
        settings.problem_with_advice("key", title, "write `key = { payment_intent_id = \"text\" }`");
        return None;
    };
    let provider = provider?;
    let texts = fields.iter().filter(|field| field.kind == Type::Text && !field.optional);
    let columns: Vec<String> =
        texts.map(|field| field.name.clone()).chain([key.name.clone(), CURRENCY.to_owned()]).collect();
    let ledger = LedgerSettings::read(settings, &columns);
    Some(PaymentSettings {
        key,
        fields,
        currencies,
        is_manual,
        attempts_max,
        table,
        webhook,
        provider,
        ledger,
    })
}

/// The effect that tells the merchant.
fn webhook(settings: &mut SettingsReader<'_>, others: &[Resource]) -> Option<Outbox> {
    let name = settings.maybe_text("webhook")?;
    let found =
        others.iter().find(|resource| resource.name == name).and_then(|resource| resource.outbox.clone());
    if found.is_none() {
        let advice = format!("declare `[effect.{name}]` with `hosts` or `url`, and `sign`");
        settings.problem_with_advice("webhook", format!("there is no effect `{name}`"), advice);
    }
    found
}

fn provider(settings: &mut SettingsReader<'_>, name: &str) -> Option<ProviderDraft> {
    let effect = format!("{name}_attempt");
    let http = settings.nested("http", |settings| {
        let owned = OwnedEffect {
            name: &effect,
            status_path: "/transactions/{key}",
            content_type: "application/json",
            idempotent: false,
            replays_errors: false,
        };
        let protocol: Box<dyn Provider> = Box::new(HttpProvider);
        ProviderDraft { name: "http", protocol, effect: EffectDraft::read(settings, &owned) }
    });
    if http.is_none() {
        let title = format!("`payment.{name}` needs a provider");
        settings.problem_with_advice("http", title, "write `http = { url = \"https://…\" }`");
    }
    http
}

fn payments_table(table: String, key: &Field, fields: &[Field], takes_urls: bool) -> TableSpec {
    let spec = TableSpec::named(table)
        .partition(&key.name, key.kind)
        .fields(fields)
        .int(AMOUNT)
        .shown_as(Form::Range(1, AMOUNT_MAX))
        .about("in minor units")
        .immutable()
        .text(CURRENCY)
        .immutable()
        .text(CAPTURE_METHOD)
        .one_of(&CAPTURE_METHODS)
        .immutable();
    let spec = match takes_urls {
        true => spec
            .json(WEBHOOK_URLS)
            .null()
            .shown_as(Form::List(Box::new(Form::Value(Type::Text))))
            .about("where the merchant is told")
            .immutable(),
        false => spec,
    };
    spec.states_in(STATUS, &STATUSES)
        .text(LIVE_TRANSACTION)
        .null()
        .about("the charge, capture or cancellation that has no definite end yet")
        .int(ATTEMPT)
        .default(0)
        .about("how often it was charged")
        .int(CAPTURABLE)
        .default(0)
        .about("authorized and not captured")
        .int(CAPTURED)
        .default(0)
        .int(REFUNDABLE)
        .default(0)
        .about("captured, and neither refunded nor being refunded")
        .int(REFUNDING)
        .default(0)
        .about("in refunds without a definite end")
        .int(REFUNDED)
        .default(0)
        .text(PROVIDER_REF)
        .null()
        .about("what the provider calls it")
        .text(ACTION_URL)
        .null()
        .about("where the payer has to act")
        .text(REASON)
        .null()
        .about("why the last transaction ended as it did")
        .created_at()
        .updated_at()
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT])
}

fn transactions_table(name: &str, key: &Field) -> TableSpec {
    TableSpec::named(plural(name))
        .partition(&key.name, key.kind)
        .sort(TRANSACTION_ID, Type::Text)
        .text(TYPE)
        .one_of(&TransactionKind::WORDS)
        .immutable()
        .states_in(STATUS, &TRANSACTION_STATUSES)
        .int(AMOUNT)
        .immutable()
        .text(CURRENCY)
        .immutable()
        .text(PROVIDER)
        .immutable()
        .text(METHOD)
        .null()
        .about("what the payer pays with, as a reference of the provider's")
        .immutable()
        .text(PROVIDER_REF)
        .null()
        .about("what the provider calls it")
        .text(REASON)
        .null()
        .about("why it ended as it did")
        .created_at()
        .updated_at()
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT])
        .index(BY_PAYMENT, &[&key.name], &[CREATED_AT])
}
