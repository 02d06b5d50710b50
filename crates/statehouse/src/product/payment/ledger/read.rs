//! Reads of accounts: the sums over their cells, and the trial balance.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse_store::{Query, Row, Scan, StoreError, Type};

use super::{ACCOUNT, AVAILABLE, CURRENCY, LedgerSpec, SUMS, account_problem};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::form::{Form, Property};
use crate::paging;
use crate::resource::key_text;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum AccountQuery {
    Account,
    TrialBalance,
}

pub(super) struct AccountRead {
    pub spec: Arc<LedgerSpec>,
    pub what: AccountQuery,
}

/// The sums of rows, by column.
type Totals = BTreeMap<&'static str, i64>;

fn add(totals: &mut Totals, row: &Row, columns: &[&'static str]) -> Result<(), StoreError> {
    for column in columns {
        *totals.entry(column).or_default() += row.get_int(column)?;
    }
    Ok(())
}

fn int(name: &str) -> Property {
    Property::required(name, Form::Value(Type::Int), "in minor units")
}

fn text(name: &str, about: &str) -> Property {
    Property::required(name, Form::Value(Type::Text), about)
}

impl AccountRead {
    pub(super) fn account_form() -> Vec<Property> {
        let mut form = vec![text(ACCOUNT, "its name"), text(CURRENCY, "of the amounts")];
        form.extend(SUMS.into_iter().chain([AVAILABLE]).map(int));
        form
    }

    pub(super) fn total_form() -> Vec<Property> {
        std::iter::once(text(CURRENCY, "of the amounts")).chain(SUMS.into_iter().map(int)).collect()
    }

    async fn account(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let spec = &self.spec;
        let [account, currency] = call.key.as_slice() else {
            return Err(Refusal::new(Code::Internal, "the key of an account has two parts"));
        };
        let what = format!("{} {}", spec.accounts, key_text(&call.key));
        if let Some(problem) = account.as_text().and_then(account_problem) {
            return Err(Refusal::field("key", problem));
        }
        let query = Query::table(spec.accounts_def.table(), &call.tenant, [account.clone()])?;
        let query = query.prefix([currency.clone()])?.limit(spec.cells as usize)?;
        let rows = cx.store.query(&query).await?.rows;
        if rows.is_empty() {
            return Err(Refusal::new(Code::NotFound, format!("nothing was ever posted to {what}")));
        }
        let mut totals = Totals::new();
        for row in &rows {
            add(&mut totals, row, &SUMS)?;
            add(&mut totals, row, &[AVAILABLE])?;
        }
        let mut body = Map::new();
        body.insert(ACCOUNT.to_owned(), account.to_json());
        body.insert(CURRENCY.to_owned(), currency.to_json());
        body.extend(totals.into_iter().map(|(name, sum)| (name.to_owned(), sum.into())));
        Ok(Answer { version: None, ..Answer::row(Json::Object(body)) })
    }

    async fn trial_balance(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let mut totals: BTreeMap<String, Totals> = BTreeMap::new();
        let mut scan = Scan::of(self.spec.accounts_def.table(), &call.tenant);
        loop {
            let page = cx.store.scan(&scan).await?;
            for row in &page.rows {
                add(totals.entry(row.get_text(CURRENCY)?.to_owned()).or_default(), row, &SUMS)?;
            }
            match page.next {
                Some(next) => scan = scan.after(next)?,
                None => break,
            }
        }
        let rows: Vec<Json> = totals
            .into_iter()
            .map(|(currency, totals)| {
                let mut row = Map::new();
                row.insert(CURRENCY.to_owned(), currency.into());
                row.extend(totals.into_iter().map(|(name, sum)| (name.to_owned(), sum.into())));
                Json::Object(row)
            })
            .collect();
        Ok(paging::answer(rows, None))
    }
}

#[async_trait]
impl Read for AccountRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.what {
            AccountQuery::Account => self.account(call, cx).await,
            AccountQuery::TrialBalance => self.trial_balance(call, cx).await,
        };
        answer.map(Arc::new)
    }
}
