//! The journal: posted transfers as text that hledger reads.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::json;
use statehouse_store::{Query, Row, StoreError, Type};

use super::{AMOUNT, BY_TIME, CREDIT, CURRENCY, DEBIT, KIND, LedgerSpec, MEMO, POSTED, TRANSFER_ID};
use crate::action::{ActionContext, Answer, Call, Read, Refusal};
use crate::declare::table::CREATED_AT;
use crate::declare::{ActionSpec, ResourceSpec};
use crate::form::{Form, Property};
use crate::paging;
use crate::view_source::ViewSource;

/// The resource of the journal: entries of a currency, oldest first.
pub(super) fn resource(spec: &Arc<LedgerSpec>) -> ResourceSpec {
    let currencies = spec.currencies.iter().cloned().map(Cow::Owned).collect();
    let entry = Form::Object(vec![
        Property::required(TRANSFER_ID, Form::Value(Type::Text), "the transfer"),
        Property::required(ENTRY, Form::Value(Type::Text), "a transaction in the format of hledger"),
    ]);
    let transfer = format!("{}.transfer", spec.transfers);
    let list =
        ActionSpec::list("list", "The posted transfers of a currency as entries of a journal, oldest first.")
            .mechanism("range read on the index by currency and time")
            .takes([Property::required(CURRENCY, Form::OneOf(currencies), "whose transfers")])
            .gives_rows(entry)
            .answers(&["reconciliation drift"])
            .after([transfer.as_str()])
            .reads(JournalRead { spec: spec.clone() });
    let telling = ViewSource::nothing(
        "its entries say what transfers are",
        format!("make the view of `{}`", spec.transfers),
    );
    ResourceSpec::without_rows(&spec.journal, vec![(TRANSFER_ID.to_owned(), Type::Text)], telling)
        .action(list)
}

const ENTRY: &str = "entry";

struct JournalRead {
    spec: Arc<LedgerSpec>,
}

#[async_trait]
impl Read for JournalRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let table = self.spec.transfers_def.table();
        let query = Query::index(table, BY_TIME, &call.tenant, [call.input.value_or_null(CURRENCY)])?;
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        let mut entries = Vec::with_capacity(page.rows.len());
        for row in &page.rows {
            if row.get_text(KIND)? == POSTED {
                entries.push(json!({TRANSFER_ID: row.get_text(TRANSFER_ID)?, ENTRY: entry(row)?}));
            }
        }
        Ok(Arc::new(paging::answer(entries, page.next)))
    }
}

/// How many decimals the minor unit of a currency has. ISO 4217 lists those that have not two.
fn decimals(currency: &str) -> usize {
    match currency {
        "BIF" | "CLP" | "DJF" | "GNF" | "ISK" | "JPY" | "KMF" | "KRW" | "PYG" | "RWF" | "UGX" | "UYI"
        | "VND" | "VUV" | "XAF" | "XOF" | "XPF" => 0,
        "BHD" | "IQD" | "JOD" | "KWD" | "LYD" | "OMR" | "TND" => 3,
        "CLF" | "UYW" => 4,
        _ => 2,
    }
}

/// An amount in minor units, as hledger writes it.
fn decimal(amount: i64, currency: &str) -> String {
    let decimals = decimals(currency);
    let sign = if amount < 0 { "-" } else { "" };
    let digits = format!("{:0width$}", amount.unsigned_abs(), width = decimals + 1);
    let (whole, part) = digits.split_at(digits.len() - decimals);
    let point = if decimals == 0 { "" } else { "." };
    format!("{sign}{whole}{point}{part}")
}

/// A transfer as a transaction of two postings.
fn entry(row: &Row) -> Result<String, StoreError> {
    let currency = row.get_text(CURRENCY)?;
    let amount = row.get_int(AMOUNT)?;
    let at = row.get_time(CREATED_AT)?.to_string();
    let day: String = at.chars().take(10).collect();
    let memo = row.get_optional_text(MEMO)?.unwrap_or_default();
    let memo: String =
        memo.chars().map(|c| if c.is_control() || ";|".contains(c) { ' ' } else { c }).collect();
    let (id, debit, credit) = (row.get_text(TRANSFER_ID)?, row.get_text(DEBIT)?, row.get_text(CREDIT)?);
    // Debits are positive, as in hledger's own examples.
    let (given, taken) = (decimal(-amount, currency), decimal(amount, currency));
    Ok(format!("{day} ({id}) {memo}\n    {debit}  {currency} {taken}\n    {credit}  {currency} {given}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_the_decimals_of_their_currency() {
        for (amount, currency, expected) in [
            (1_999, "EUR", "19.99"),
            (-5, "EUR", "-0.05"),
            (0, "USD", "0.00"),
            (1_999, "JPY", "1999"),
            (1_999, "KWD", "1.999"),
            (-12_345, "CLF", "-1.2345"),
        ] {
            assert_eq!(decimal(amount, currency), expected, "{amount} {currency}");
        }
    }
}
