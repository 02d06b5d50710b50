//! The transitions of transfers, and the changes of accounts that they make.

use std::sync::Arc;

use statehouse_store::{Row, Value};

use super::actions::{TransferActions, transfer_actions};
use super::posting::{AccountChange, LedgerLine, Phase, account_changes};
use super::{
    AMOUNT, AVAILABLE, CREDIT, CREDITS_PENDING, CREDITS_POSTED, CURRENCY, DEBIT, DEBITS_PENDING,
    DEBITS_POSTED, EXPIRES_AT, LedgerSpec, MEMO, PENDING, POSTED, TRANSFER_ID, VOIDED,
};
use crate::action::{Code, Refusal};
use crate::declare::machine::{
    Assign, MachinePart, PartUse, Scene, Transition, TransitionCase, absent, always, any, from, null,
};
use crate::declare::rule::{bind, coalesce, col, now};
use crate::declare::table::CREATED_AT;
use crate::declare::{Machine, MachineSpec};
use crate::inputs::Inputs;

/// A bound value: what a covered account must have.
pub(super) const NEED: &str = "need";
/// The cases of a change of an account.
pub(super) const COVERED: &str = "covered";
pub(super) const BLIND: &str = "blind";
/// An input of `pend`.
pub(super) const TIMEOUT_MS: &str = "timeout_ms";

/// The machine of accounts: sums that grow and shrink.
pub(super) fn of_accounts(spec: &LedgerSpec) -> MachineSpec {
    let columns = [DEBITS_POSTED, CREDITS_POSTED, DEBITS_PENDING, CREDITS_PENDING, AVAILABLE];
    // L4.
    let covered = any().to_same().named(COVERED).rule(
        "covered",
        col(AVAILABLE).ge(bind(NEED)),
        Code::OutOfRange,
        "{what} has {available}, which is too little",
    );
    let covered = columns
        .into_iter()
        .fold(covered, |case, column| case.set(column, Assign::Add(col(column), bind(column))));
    let blind = columns.into_iter().fold(always().to_same().named(BLIND), |case, column| {
        case.set(column, Assign::Add(coalesce(column, 0), bind(column)))
    });
    Machine::of(&spec.accounts, &spec.accounts_def)
        .after([format!("{}.transfer", spec.transfers).as_str()])
        .transition(Transition::part("change", [covered, blind]))
}

/// The machine of transfers.
pub(super) fn of_transfers(spec: &Arc<LedgerSpec>, change: &PartUse) -> MachineSpec {
    let TransferActions { transfer, pend, post, void } = transfer_actions(spec);
    let given =
        |case: TransitionCase| case.set_given([DEBIT, CREDIT, CURRENCY, AMOUNT, MEMO]).set(CREATED_AT, now());
    // What is recorded was counted with the other lines of its plan.
    let recorded = given(absent().to(POSTED).event("posted"));
    let counts = |case: TransitionCase, phase| case.parts([change.clone()], counted(spec, change, phase));
    let transferred = counts(given(absent().to(POSTED).event("posted")), Phase::Posted);
    let longest = spec.pending_for;
    let pended = counts(given(absent().to(PENDING).event("pended")), Phase::Pended).set_with(
        EXPIRES_AT,
        move |scene| {
            let span = scene.inputs().and_then(|inputs| inputs.duration_ms(TIMEOUT_MS)).unwrap_or(longest);
            Ok(statehouse_store::guard::now_plus(span).into())
        },
    );
    let posted = counts(from([PENDING]).to(POSTED).event("posted"), Phase::Resolved).rule(
        "in time",
        col(EXPIRES_AT).gt(now()),
        Code::Expired,
        "the time of {what} was up at {expires_at}; it is voided",
    );
    let voided = || counts(from([PENDING]).to(VOIDED).event("voided").set(EXPIRES_AT, null()), Phase::Voided);
    let reading = |transition: Transition| transition.reading_only([DEBIT, CREDIT, CURRENCY, AMOUNT]);
    Machine::of(&spec.transfers, &spec.transfers_def)
        .transition(Transition::part("record", recorded))
        .transition(Transition::call(transfer, transferred))
        .transition(Transition::call(pend, pended))
        .transition(reading(Transition::call(post, posted.set(EXPIRES_AT, null()))))
        .transition(reading(Transition::call(void, voided())))
        .transition(reading(Transition::deadline("timeout", voided())))
}

/// Counts a transfer in its two accounts.
fn counted(
    spec: &Arc<LedgerSpec>,
    change: &PartUse,
    phase: Phase,
) -> impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + use<> {
    let (spec, change) = (spec.clone(), change.clone());
    move |scene| {
        let line = match (scene.row, scene.inputs()) {
            (Some(row), _) => of_row(row)?,
            (None, Some(inputs)) => of_inputs(scene, inputs)?,
            (None, None) => return Err(Refusal::new(Code::Internal, "a transfer without its amount")),
        };
        spec.check(&line.debit, &line.credit)?;
        let changes = account_changes(&spec, std::slice::from_ref(&line), phase);
        Ok(changes.iter().map(|one| one.firing(&change)).collect())
    }
}

fn of_row(row: &Row) -> Result<LedgerLine, Refusal> {
    Ok(LedgerLine {
        id: row.key().first().and_then(Value::as_text).unwrap_or_default().to_owned(),
        debit: row.get_text(DEBIT)?.to_owned(),
        credit: row.get_text(CREDIT)?.to_owned(),
        currency: row.get_text(CURRENCY)?.to_owned(),
        amount: row.get_int(AMOUNT)?,
        memo: None,
    })
}

fn of_inputs(scene: &Scene<'_>, inputs: &Inputs) -> Result<LedgerLine, Refusal> {
    let id = scene.key_text()?;
    if let Some(problem) = super::id_problem(id) {
        return Err(Refusal::field(TRANSFER_ID, problem));
    }
    if let Some(problem) = inputs.text(MEMO).and_then(super::card_number_problem) {
        return Err(Refusal::field(MEMO, problem));
    }
    Ok(LedgerLine {
        id: id.to_owned(),
        debit: inputs.get_text(DEBIT)?.to_owned(),
        credit: inputs.get_text(CREDIT)?.to_owned(),
        currency: inputs.get_text(CURRENCY)?.to_owned(),
        amount: inputs.get_int(AMOUNT)?,
        memo: inputs.text(MEMO).map(str::to_owned),
    })
}

impl AccountChange {
    /// The change as a transition of the account's row.
    pub(super) fn firing(&self, change: &PartUse) -> MachinePart {
        let key = [self.account.as_str().into(), self.currency.as_str().into(), self.cell.into()];
        let need = -self.available;
        let case = if self.is_covered && need > 0 { COVERED } else { BLIND };
        let mut firing = change.at(key).case(case).bind(NEED, need);
        for (name, delta) in self.deltas() {
            firing = firing.bind(name, delta);
        }
        firing.into()
    }
}
