//! The transitions of payments and their transactions.

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{Row, Value};

use super::actions::CalledActions;
use super::rules::{TransactionKind, card_number_problem, id_problem};
use super::{
    ACTION_URL, AMOUNT, ATTEMPT, AUTHORIZED, CANCELLED, CAPTURABLE, CAPTURE_METHOD, CAPTURED, CREATED,
    CURRENCY, DECLINED, DONE, FAILED, LIVE_TRANSACTION, METHOD, PENDING, PENDING_NETWORK_RESULT, PROCESSING,
    PROVIDER, PROVIDER_REF, PaymentSpec, REASON, REFUNDABLE, REFUNDED, REFUNDING, REQUIRES_ACTION,
    REQUIRES_CAPTURE, REQUIRES_RECONCILIATION, RETRYABLE, STATUS, STATUSES, SUCCEEDED, TRANSACTION_CAPTURED,
    TRANSACTION_ID, TYPE, WEBHOOK_URLS, first_text, webhook,
};
use crate::action::{ActionContext, Call, Code, Refusal};
use crate::declare::machine::{
    Gather, Gathered, MachinePart, PartUse, Scene, Transition, TransitionCase, absent, any, difference, from,
    null, sum,
};
use crate::declare::rule::{bind, col, input, is_null, now};
use crate::declare::table::CREATED_AT;
use crate::declare::{ActionSpec, Machine, MachineSpec};
use crate::infra::effect::EffectRequest;

/// A bound value: the amount that a call moves.
const MOVED: &str = "moved";

/// The transitions of a transaction that payments fire.
pub(super) struct TransactionParts {
    pub open: PartUse,
    pub settle: PartUse,
}

/// The machine of transactions.
pub(super) fn of_transactions(spec: &Arc<PaymentSpec>) -> MachineSpec {
    let open = absent()
        .to(PENDING)
        .event("opened")
        .set(TYPE, bind(TYPE))
        .set(AMOUNT, bind(AMOUNT))
        .set(CURRENCY, bind(CURRENCY))
        .set(PROVIDER, bind(PROVIDER))
        .set(METHOD, bind(METHOD))
        .set(CREATED_AT, now());
    // I3: a transaction that has its end keeps it.
    let to = |name: &'static str, status: &'static str| {
        from([PENDING, PENDING_NETWORK_RESULT])
            .to(status)
            .named(name)
            .event(name)
            .set_given([PROVIDER_REF])
            .set(REASON, bind(REASON))
    };
    let settle = [
        to("captured", TRANSACTION_CAPTURED),
        to("authorized", AUTHORIZED),
        to("done", DONE),
        to("declined", DECLINED),
        to("failed", FAILED),
        to("uncertain", PENDING_NETWORK_RESULT),
    ];
    let charge = format!("{}.charge", spec.name);
    let create = format!("{}.create", spec.name);
    Machine::of(&spec.transactions, &spec.transactions_def)
        .after([create.as_str(), charge.as_str()])
        .transition(Transition::part("open", open))
        .transition(Transition::part("settle", settle))
        .transition(Transition::by_hand("reconcile", any().to_same().event("reconcile_requested")))
}

/// The machine of payments.
pub(super) fn of_payments(
    spec: &Arc<PaymentSpec>,
    parts: &TransactionParts,
    actions: CalledActions,
) -> MachineSpec {
    let CalledActions { charge, capture, cancel, refund } = actions;
    let fields = spec.fields.iter().map(|field| field.name.clone());
    let has_urls = spec.table().type_of(WEBHOOK_URLS).is_some();
    let created = absent()
        .to(CREATED)
        .event("created")
        .set_given(fields)
        .set(AMOUNT, bind(AMOUNT))
        .set(CURRENCY, bind(CURRENCY))
        .set(CAPTURE_METHOD, bind(CAPTURE_METHOD))
        .set(CREATED_AT, now());
    let created = if has_urls { created.set_given([WEBHOOK_URLS]) } else { created };
    let begin =
        |case: TransitionCase, kind| case.parts([parts.open.clone()], begins(spec, &parts.open, kind));
    let read = || ReadPayment { spec: spec.clone() };
    Machine::of(&spec.name, &spec.def)
        .transition(Transition::part("create", created))
        .transition(Transition::call(charge, begin(charged(spec), TransactionKind::Charge)).gather(read()))
        .transition(
            Transition::call(capture, begin(capture_begun(), TransactionKind::Capture))
                .gather(read())
                .bind(MOVED, moved(spec)),
        )
        .transition(cancelled(spec, cancel, begin).gather(Checked))
        .transition(
            Transition::call(refund, begin(refund_begun(), TransactionKind::Refund))
                .gather(read())
                .bind(MOVED, moved(spec)),
        )
        .transition(settled())
        .transition(Transition::by_hand("reconcile", any().to_same().event("reconcile_requested")))
}

/// I1: without a live transaction. The states have none.
fn charged(spec: &PaymentSpec) -> TransitionCase {
    let used_up =
        format!("{{what}} was charged {{attempt}} times; it can be charged {} times", spec.attempts_max);
    from([CREATED, RETRYABLE])
        .to(PROCESSING)
        .event("processing")
        .rule("attempts", col(ATTEMPT).lt(spec.attempts_max), Code::WrongState, used_up)
        .set(LIVE_TRANSACTION, input(TRANSACTION_ID))
        .set(ATTEMPT, sum(col(ATTEMPT), 1))
        .set(ACTION_URL, null())
        .set(REASON, null())
}

fn capture_begun() -> TransitionCase {
    let case = from([REQUIRES_CAPTURE]).to_same().event("capturing").state_implied(
        "only an authorized payment is capturable, and in other states its transaction is live",
    );
    let others = STATUSES.into_iter().filter(|status| *status != REQUIRES_CAPTURE);
    let case = others.fold(case, |case, status| {
        case.refused_in(
            status,
            Code::WrongState,
            "{what} is {state}; only an authorized payment can be captured",
        )
    });
    // I1.
    case.rule(
        "one live",
        is_null(LIVE_TRANSACTION),
        Code::WrongState,
        "the transaction {live_transaction} of {what} has no definite end yet; wait for it",
    )
    // I5.
    .rule(
        "authorized",
        col(CAPTURABLE).ge(bind(MOVED)),
        Code::OutOfRange,
        "{what} has {capturable} to capture, not {input.amount}",
    )
    .set(LIVE_TRANSACTION, input(TRANSACTION_ID))
}

fn refund_begun() -> TransitionCase {
    // I5. Only what was captured is refundable, so the rule says enough about the state.
    any()
        .to_same()
        .event("refunding")
        .rule(
            "refundable",
            col(REFUNDABLE).ge(bind(MOVED)),
            Code::OutOfRange,
            "{what} is {state} and has {refundable} to refund, not {input.amount}",
        )
        .set(REFUNDABLE, difference(col(REFUNDABLE), bind(MOVED)))
        .set(REFUNDING, sum(col(REFUNDING), bind(MOVED)))
}

/// Gives up a payment that was not charged, or voids its authorization. It reads the payment, whose webhook tells of it.
fn cancelled(
    spec: &Arc<PaymentSpec>,
    action: ActionSpec,
    begin: impl Fn(TransitionCase, TransactionKind) -> TransitionCase,
) -> Transition {
    let idle = from([CREATED, RETRYABLE]).to(CANCELLED).named("idle").event("cancelled");
    let told = spec.clone();
    let idle = idle.parts([], move |scene| {
        let row = scene.loaded_row()?;
        webhook::notices(&told, row, "cancelled", &[(STATUS, CANCELLED.into())], scene.now_here)
    });
    let authorized = from([REQUIRES_CAPTURE])
        .to_same()
        .named("authorized")
        .event("voiding")
        .rule(
            "one live",
            is_null(LIVE_TRANSACTION),
            Code::WrongState,
            "the transaction {live_transaction} of {what} has no definite end yet; wait for it",
        )
        .set(LIVE_TRANSACTION, input(TRANSACTION_ID));
    Transition::call(action, [idle, begin(authorized, TransactionKind::Void)])
        .try_pick(|scene| Ok(usize::from(scene.loaded_row()?.get_text(STATUS)? == REQUIRES_CAPTURE)))
        .reading()
}

/// What the end of a transaction makes of its payment. All columns are computed from the row that was read.
fn settled() -> Transition {
    const OPEN: [&str; 4] = [PROCESSING, REQUIRES_ACTION, PENDING, REQUIRES_RECONCILIATION];
    const LIVE: [&str; 5] = [PROCESSING, REQUIRES_ACTION, REQUIRES_CAPTURE, PENDING, REQUIRES_RECONCILIATION];
    const AUTHORIZED_LIVE: [&str; 3] = [REQUIRES_CAPTURE, PENDING, REQUIRES_RECONCILIATION];
    let case = |case: TransitionCase, name: &'static str| {
        case.named(name)
            .event(name)
            .set(LIVE_TRANSACTION, bind(LIVE_TRANSACTION))
            .set(CAPTURABLE, bind(CAPTURABLE))
            .set(CAPTURED, bind(CAPTURED))
            .set(REFUNDABLE, bind(REFUNDABLE))
            .set(REFUNDING, bind(REFUNDING))
            .set(REFUNDED, bind(REFUNDED))
            .set_given([PROVIDER_REF, ACTION_URL, REASON])
    };
    let cases = [
        case(from(LIVE).to(SUCCEEDED), "captured"),
        case(from(OPEN).to(REQUIRES_CAPTURE), "authorized"),
        case(from(OPEN).to(REQUIRES_ACTION), "action_required"),
        case(from(LIVE).to(PENDING), "pending"),
        case(from(LIVE).to(REQUIRES_RECONCILIATION), "uncertain"),
        case(from(OPEN).to(RETRYABLE), "declined"),
        case(from(OPEN).to(FAILED), "failed"),
        case(from(AUTHORIZED_LIVE).to(CANCELLED), "voided"),
        case(from(AUTHORIZED_LIVE).to(REQUIRES_CAPTURE), "kept"),
        case(any().to_same(), "refunded"),
        case(any().to_same(), "refund_failed"),
    ];
    Transition::part("settle", cases).reading()
}

/// The amount that a call moves: what it says, or all.
fn moved(spec: &Arc<PaymentSpec>) -> impl Fn(&Scene<'_>) -> Result<Value, Refusal> + use<> {
    let spec = spec.clone();
    move |scene| {
        let given = scene.inputs().and_then(|inputs| inputs.int(AMOUNT));
        match given {
            Some(amount) => Ok(amount.into()),
            None => Ok(payment_in(&spec, scene)?.get_int(AMOUNT)?.into()),
        }
    }
}

/// The payment as it was read before the plan.
fn payment_in<'s>(spec: &PaymentSpec, scene: &'s Scene<'_>) -> Result<&'s Row, Refusal> {
    let gathered = scene.gathered.row(spec.table(), scene.key);
    gathered.or(scene.row).ok_or_else(|| spec.missing(scene.key))
}

/// The transaction that a call begins, and its request to the provider (I2).
fn begins(
    spec: &Arc<PaymentSpec>,
    open: &PartUse,
    kind: TransactionKind,
) -> impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + use<> {
    let (spec, open) = (spec.clone(), open.clone());
    move |scene| {
        let payment = payment_in(&spec, scene)?;
        let id = transaction_id(scene)?;
        let amount = match scene.bound(MOVED).and_then(Value::as_int) {
            Some(moved) => moved,
            None => payment.get_int(AMOUNT)?,
        };
        let method = scene.inputs().and_then(|inputs| inputs.text(METHOD)).map(str::to_owned);
        let facts = spec.facts(payment, kind, id.to_owned(), amount, method.clone())?;
        let request = spec.provider.request(&facts);
        let request = EffectRequest {
            key: PaymentSpec::request_key(&facts.payment_intent_id, id),
            url: Some(format!("{}{}", spec.outbox.base_url(), request.path)),
            body: request.body,
            ..EffectRequest::default()
        };
        let sent = spec.outbox.send(scene.tenant, &request, scene.now_here)?;
        let opened = open
            .at([first_text(scene.key)?.into(), id.into()])
            .bind(TYPE, kind.word())
            .bind(AMOUNT, amount)
            .bind(CURRENCY, facts.currency.as_str())
            .bind(PROVIDER, spec.provider_name)
            .bind(METHOD, method.map_or(Value::Null, Value::from));
        Ok(vec![
            opened.into(),
            MachinePart::Prepared { resource: spec.outbox.name().to_owned(), parts: sent },
        ])
    }
}

fn transaction_id<'s>(scene: &Scene<'s>) -> Result<&'s str, Refusal> {
    let given = scene.inputs().and_then(|inputs| inputs.text(TRANSACTION_ID));
    given.ok_or_else(|| Refusal::field(TRANSACTION_ID, "choose an id for the transaction that this begins"))
}

/// Refuses texts that cannot be what they are for (I6).
fn check_texts(call: &Call) -> Result<(), Refusal> {
    if let Some(problem) = call.input.text(TRANSACTION_ID).and_then(id_problem) {
        return Err(Refusal::field(TRANSACTION_ID, problem));
    }
    match call.input.text(METHOD).and_then(card_number_problem) {
        Some(problem) => Err(Refusal::field(METHOD, problem)),
        None => Ok(()),
    }
}

/// Reads the payment, of which a request to the provider has columns that do not change, or not before the plan's guards
/// refuse it.
struct ReadPayment {
    spec: Arc<PaymentSpec>,
}

#[async_trait]
impl Gather for ReadPayment {
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        _: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        check_texts(call)?;
        let row = cx.row(self.spec.table(), &call.tenant, call.key.iter().cloned()).await?;
        let row = row.ok_or_else(|| self.spec.missing(&call.key))?;
        Ok(Gathered { hints: vec![row], ..Gathered::default() })
    }
}

/// Only checks the texts of the call.
struct Checked;

#[async_trait]
impl Gather for Checked {
    async fn gather(&self, call: &Call, _: &ActionContext<'_>, _: Option<&Row>) -> Result<Gathered, Refusal> {
        check_texts(call).map(|()| Gathered::default())
    }
}
