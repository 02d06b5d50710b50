//! The lines of a posting, and what they change in accounts. Pure.

use std::collections::BTreeMap;

use statehouse_store::{Row, Value};

use super::{
    AVAILABLE, CREDITS_PENDING, CREDITS_POSTED, DEBITS_PENDING, DEBITS_POSTED, Ledger, LedgerSpec,
    POSTINGS_MAX,
};
use crate::action::{Code, Refusal};
use crate::blueprint::tree::{Node, TreeValue};
use crate::declare::SettingsReader;
use crate::declare::machine::MachinePart;

/// One amount from one account to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::product::payment) struct LedgerLine {
    pub id: String,
    pub debit: String,
    pub credit: String,
    pub currency: String,
    pub amount: i64,
    pub memo: Option<String>,
}

/// What happens to a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is posted at once.
    Posted,
    /// It is pending.
    Pended,
    /// A pending one is posted.
    Resolved,
    /// A pending one is voided.
    Voided,
}

/// What changes in one row of an account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AccountChange {
    pub account: String,
    pub currency: String,
    pub cell: i64,
    pub is_covered: bool,
    debits_posted: i64,
    credits_posted: i64,
    debits_pending: i64,
    credits_pending: i64,
    pub available: i64,
}

impl AccountChange {
    pub(super) fn deltas(&self) -> [(&'static str, i64); 5] {
        [
            (DEBITS_POSTED, self.debits_posted),
            (CREDITS_POSTED, self.credits_posted),
            (DEBITS_PENDING, self.debits_pending),
            (CREDITS_PENDING, self.credits_pending),
            (AVAILABLE, self.available),
        ]
    }

    fn debit(&mut self, phase: Phase, amount: i64) {
        match phase {
            Phase::Posted => {
                self.debits_posted += amount;
                self.available -= amount;
            }
            Phase::Pended => {
                self.debits_pending += amount;
                self.available -= amount;
            }
            Phase::Resolved => {
                self.debits_pending -= amount;
                self.debits_posted += amount;
            }
            Phase::Voided => {
                self.debits_pending -= amount;
                self.available += amount;
            }
        }
    }

    fn credit(&mut self, phase: Phase, amount: i64) {
        match phase {
            Phase::Posted => {
                self.credits_posted += amount;
                self.available += amount;
            }
            Phase::Pended => self.credits_pending += amount,
            Phase::Resolved => {
                self.credits_pending -= amount;
                self.credits_posted += amount;
                self.available += amount;
            }
            Phase::Voided => self.credits_pending -= amount,
        }
    }
}

/// What lines change, each row once: what one line gives to an account and another takes from it is netted.
pub(super) fn account_changes(spec: &LedgerSpec, lines: &[LedgerLine], phase: Phase) -> Vec<AccountChange> {
    let mut changes: BTreeMap<(String, String, i64), AccountChange> = BTreeMap::new();
    for line in lines {
        for (account, is_debit) in [(&line.debit, true), (&line.credit, false)] {
            let cell = spec.cell(account, &line.id);
            let change = changes.entry((account.clone(), line.currency.clone(), cell)).or_insert_with(|| {
                AccountChange {
                    account: account.clone(),
                    currency: line.currency.clone(),
                    cell,
                    is_covered: spec.is_covered(account),
                    ..AccountChange::default()
                }
            });
            if is_debit { change.debit(phase, line.amount) } else { change.credit(phase, line.amount) }
        }
    }
    changes.into_values().collect()
}

impl Ledger {
    /// The parts that post lines: each transfer, and each account once.
    pub(in crate::product::payment) fn posted(
        &self,
        lines: &[LedgerLine],
    ) -> Result<Vec<MachinePart>, Refusal> {
        let mut parts = Vec::new();
        for line in lines {
            self.spec.check(&line.debit, &line.credit)?;
            let record = self.record.at([Value::from(line.id.as_str())]);
            let record = record
                .bind(super::DEBIT, line.debit.as_str())
                .bind(super::CREDIT, line.credit.as_str())
                .bind(super::CURRENCY, line.currency.as_str())
                .bind(super::AMOUNT, line.amount)
                .bind(super::MEMO, line.memo.as_deref().map_or(Value::Null, Value::from));
            parts.push(record.into());
        }
        let changes = account_changes(&self.spec, lines, Phase::Posted);
        parts.extend(changes.iter().map(|change| change.firing(&self.change)));
        Ok(parts)
    }
}

/// A transfer that an outcome of a payment makes: names of accounts, with columns of the payment in braces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::product::payment) struct PostingTemplate {
    debit: Vec<NamePart>,
    credit: Vec<NamePart>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum NamePart {
    Text(String),
    Column(String),
}

/// Stands for the name of the provider.
const PROVIDER: &str = "provider";
/// The only amount that a posting can have.
const AMOUNT_WORD: &str = "amount";

impl PostingTemplate {
    /// The line of an amount of a payment.
    pub(in crate::product::payment) fn line(
        &self,
        id: String,
        payment: &Row,
        provider: &str,
        amount: i64,
    ) -> Result<LedgerLine, Refusal> {
        let column = |name: &str| match name {
            PROVIDER => Some(provider),
            _ => payment.get(name).and_then(Value::as_text),
        };
        let missing =
            || Refusal::new(Code::Internal, format!("{payment} has no text for the name of an account"));
        Ok(LedgerLine {
            id,
            debit: name_of(&self.debit, &column).ok_or_else(missing)?,
            credit: name_of(&self.credit, &column).ok_or_else(missing)?,
            currency: payment.get_text(super::CURRENCY)?.to_owned(),
            amount,
            memo: None,
        })
    }

    /// The beginning of the account that it takes from, up to the first column of the payment.
    pub(super) fn taken_from(&self) -> &str {
        match self.debit.first() {
            Some(NamePart::Text(text)) => text,
            _ => "",
        }
    }
}

/// The name of an account, with columns filled in.
fn name_of<'c>(parts: &[NamePart], column: &dyn Fn(&str) -> Option<&'c str>) -> Option<String> {
    parts.iter().try_fold(String::new(), |name, part| match part {
        NamePart::Text(text) => Some(name + text),
        NamePart::Column(named) => Some(name + column(named)?),
    })
}

impl Ledger {
    /// Refuses a payment whose texts cannot be parts of the names of its accounts: what is captured could not be posted.
    pub(in crate::product::payment) fn check_names(
        &self,
        contents: &[(String, Value)],
        provider: &str,
        id: &str,
        key: &str,
    ) -> Result<(), Refusal> {
        let column = |name: &str| match name {
            PROVIDER => Some(provider),
            name if name == key => Some(id),
            name => contents.iter().find(|(known, _)| known == name).and_then(|(_, value)| value.as_text()),
        };
        for template in self.spec.on_capture.iter().chain(&self.spec.on_refund) {
            let names = [&template.debit, &template.credit].map(|parts| name_of(parts, &column));
            let [Some(debit), Some(credit)] = names else { continue };
            if let Err(refusal) = self.spec.check(&debit, &credit) {
                let why =
                    format!("`{debit}` and `{credit}` cannot be accounts of the ledger: {}", refusal.message);
                let named = template.debit.iter().chain(&template.credit).find_map(NamePart::column);
                return Err(Refusal::field(named.unwrap_or(key), why));
            }
        }
        Ok(())
    }
}

impl NamePart {
    fn column(&self) -> Option<&str> {
        match self {
            NamePart::Column(name) if name != PROVIDER => Some(name),
            _ => None,
        }
    }
}

/// Reads a list of postings: `[["psp:{provider}", "merchant:{merchant_id}", "amount"]]`.
pub(super) fn read(
    settings: &mut SettingsReader<'_>,
    name: &'static str,
    columns: &[String],
) -> Vec<PostingTemplate> {
    let Some(node) = settings.node(name) else { return Vec::new() };
    let advice = "write `[[\"psp:{provider}\", \"merchant:{merchant_id}\", \"amount\"]]`: from, to, how much";
    match templates(&node, columns) {
        Ok(templates) if templates.len() <= POSTINGS_MAX => templates,
        Ok(_) => {
            settings.problem_with_advice(name, format!("at most {POSTINGS_MAX} transfers"), advice);
            Vec::new()
        }
        Err(why) => {
            settings.problem_with_advice(name, why, advice);
            Vec::new()
        }
    }
}

fn templates(node: &Node, columns: &[String]) -> Result<Vec<PostingTemplate>, String> {
    let list = |node: &Node| match &node.value {
        TreeValue::List(items) => Some(items.clone()),
        _ => None,
    };
    let text = |node: &Node| match &node.value {
        TreeValue::Text(text) => Some(text.clone()),
        _ => None,
    };
    let lines = list(node).ok_or("expected a list of transfers")?;
    let mut templates = Vec::new();
    for line in lines {
        let parts: Option<Vec<String>> = list(&line).and_then(|parts| parts.iter().map(text).collect());
        match parts.as_deref() {
            Some([debit, credit, amount]) if amount == AMOUNT_WORD => templates.push(PostingTemplate {
                debit: name_parts(debit, columns)?,
                credit: name_parts(credit, columns)?,
            }),
            _ => return Err("a transfer has an account, another one, and the word `amount`".to_owned()),
        }
    }
    Ok(templates)
}

fn name_parts(text: &str, columns: &[String]) -> Result<Vec<NamePart>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        let (column, after) =
            after.split_once('}').ok_or_else(|| format!("`{text}` has a brace without its pair"))?;
        if column != PROVIDER && !columns.iter().any(|known| known == column) {
            return Err(format!(
                "`{{{column}}}` in `{text}` names nothing; there are provider, {}",
                columns.join(", ")
            ));
        }
        if !before.is_empty() {
            parts.push(NamePart::Text(before.to_owned()));
        }
        parts.push(NamePart::Column(column.to_owned()));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(NamePart::Text(rest.to_owned()));
    }
    let fixed: String = parts
        .iter()
        .map(|part| match part {
            NamePart::Text(text) => text.as_str(),
            NamePart::Column(_) => "x",
        })
        .collect();
    match super::account_problem(&fixed) {
        Some(why) => Err(format!("`{text}` cannot name an account: {why}")),
        None => Ok(parts),
    }
}
