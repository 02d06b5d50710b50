//! What must hold of payments and their transactions, on what is stored and logged.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use statehouse_store::Row;

use crate::harness::invariants::CheckScope;

/// States of a payment whose transaction is live, or may be.
const OPEN: [&str; 5] =
    ["PROCESSING", "REQUIRES_ACTION", "PENDING", "REQUIRES_RECONCILIATION", "REQUIRES_CAPTURE"];

fn int(row: &Row, column: &str) -> Result<i64> {
    row.int(column).with_context(|| format!("{row} has no {column}"))
}

/// I1 to I5: the amounts of each payment are the sums of its transactions, the live transaction is the one without an end, and each
/// open transaction has a request that is not settled.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let mut transactions = by_payment(scope).await?;
    let requests = requests(scope).await?;
    for payment in scope.rows(scope.table()?).await? {
        let id = payment.key().first().and_then(|id| id.as_text()).context("a payment without an id")?;
        let own = transactions.remove(id).unwrap_or_default();
        check_amounts(&payment, &own)?;
        for transaction in &own {
            let name = transaction.text("transaction_id").unwrap_or_default();
            let request = requests.get(&format!("{id}:{name}"));
            check_request(transaction, request)?;
        }
    }
    ensure!(transactions.is_empty(), "transactions have no payment: {transactions:?}");
    scope.histories(scope.sibling("")?, &[]).await?;
    scope.histories(scope.sibling("transaction")?, &[]).await?;
    if scope.sibling("transfer").is_ok() {
        check_ledger(scope).await?;
    }
    Ok(())
}

async fn by_payment(scope: &CheckScope<'_>) -> Result<BTreeMap<String, Vec<Row>>> {
    let table = scope.sibling("transaction")?.tables.first().context("no table of transactions")?;
    let mut transactions: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    for row in scope.rows(table).await? {
        let payment = row.key().first().and_then(|id| id.as_text()).context("a key without a payment")?;
        transactions.entry(payment.to_owned()).or_default().push(row);
    }
    Ok(transactions)
}

/// The requests to the provider, by key.
async fn requests(scope: &CheckScope<'_>) -> Result<BTreeMap<String, Row>> {
    let table = scope.sibling("attempt")?.tables.first().context("no table of requests")?;
    let rows = scope.rows(table).await?;
    let keyed = rows.into_iter().map(|row| (row.text("key").unwrap_or_default().to_owned(), row));
    Ok(keyed.collect())
}

fn check_amounts(payment: &Row, transactions: &[Row]) -> Result<()> {
    let status = payment.text("status").unwrap_or_default();
    let of = |kinds: &[&str], statuses: &[&str]| {
        let fits = |row: &&Row| {
            kinds.contains(&row.text("type").unwrap_or_default())
                && statuses.contains(&row.text("status").unwrap_or_default())
        };
        transactions.iter().filter(fits).collect::<Vec<&Row>>()
    };
    let total = |rows: &[&Row]| rows.iter().map(|row| row.int("amount").unwrap_or_default()).sum::<i64>();
    const OPEN_TRANSACTION: [&str; 2] = ["PENDING", "PENDING_NETWORK_RESULT"];
    let charged = of(&["CHARGE"], &["AUTHORIZED", "CAPTURED"]);
    ensure!(charged.len() <= 1, "{payment} was charged {} times", charged.len());
    let live: Vec<&str> = of(&["CHARGE", "CAPTURE", "VOID"], &OPEN_TRANSACTION)
        .iter()
        .filter_map(|row| row.text("transaction_id"))
        .collect();
    let named: Vec<&str> = payment.text("live_transaction").into_iter().collect();
    ensure!(live == named, "{payment} names {named:?} as live, and {live:?} are");
    ensure!(live.is_empty() || OPEN.contains(&status), "{payment} is {status}, and {live:?} has no end");
    let captured = total(&of(&["CHARGE"], &["CAPTURED"])) + total(&of(&["CAPTURE"], &["DONE"]));
    let refunded = total(&of(&["REFUND"], &["DONE"]));
    let refunding = total(&of(&["REFUND"], &OPEN_TRANSACTION));
    for (column, sum) in [("captured", captured), ("refunded", refunded), ("refunding", refunding)] {
        ensure!(int(payment, column)? == sum, "{payment} has {column} {}, not {sum}", int(payment, column)?);
    }
    let refundable = int(payment, "refundable")?;
    ensure!(refundable == captured - refunded - refunding, "{payment} has {refundable} refundable");
    ensure!(refundable >= 0, "{payment} has {refundable} refundable");
    let authorized = total(&of(&["CHARGE"], &["AUTHORIZED"]));
    let is_over = captured > 0 || status == "CANCELLED";
    let capturable = if is_over { 0 } else { authorized };
    ensure!(int(payment, "capturable")? == capturable, "{payment} has not {capturable} to capture");
    let charges = transactions.iter().filter(|row| row.text("type") == Some("CHARGE")).count();
    ensure!(int(payment, "attempt")? == i64::try_from(charges)?, "{payment} was charged {charges} times");
    Ok(())
}

/// I2 and I4.
fn check_request(transaction: &Row, request: Option<&Row>) -> Result<()> {
    let request = request.with_context(|| format!("{transaction} has no request"))?;
    let (status, sent) =
        (transaction.text("status").unwrap_or_default(), request.text("status").unwrap_or_default());
    let is_unsettled = request.time("unsettled_at").is_some();
    let fits = match status {
        "PENDING" => ["PENDING", "SENDING", "RETRYING"].contains(&sent) || is_unsettled,
        "PENDING_NETWORK_RESULT" => {
            ["UNCERTAIN", "SENDING", "RETRYING", "PENDING"].contains(&sent) || is_unsettled
        }
        "FAILED" => ["PARKED", "DELIVERED"].contains(&sent) && request.bool("doubt") == Some(false),
        _ => sent == "DELIVERED" && request.bool("doubt") == Some(false),
    };
    ensure!(fits, "{transaction} is {status}, and its request is {sent}");
    Ok(())
}

/// The sums of an account: debits and credits, posted and pending.
type Sums = [i64; 4];

/// L1 to L4: the columns of each account are the sums of its transfers, debits and credits are equal, covered accounts have no less
/// than nothing, and each capture and refund is posted once.
async fn check_ledger(scope: &CheckScope<'_>) -> Result<()> {
    let table = |suffix: &str| anyhow::Ok(scope.sibling(suffix)?.tables.first().context("no table")?);
    let mut expected: BTreeMap<(String, String), Sums> = BTreeMap::new();
    let mut posted: BTreeMap<String, usize> = BTreeMap::new();
    let text = |row: &Row, column: &str| row.text(column).unwrap_or_default().to_owned();
    for row in scope.rows(table("transfer")?).await? {
        let amount = int(&row, "amount")?;
        let (debit, credit, currency) = (text(&row, "debit"), text(&row, "credit"), text(&row, "currency"));
        let index = match row.text("kind") {
            Some("POSTED") => 0,
            Some("PENDING") => 2,
            _ => continue,
        };
        for (account, index) in [(debit, index), (credit, index + 1)] {
            let sums = expected.entry((account, currency.clone())).or_default();
            sums[index] += amount;
        }
        let id = text(&row, "transfer_id");
        if let Some((transaction, _)) = id.rsplit_once(':') {
            *posted.entry(transaction.to_owned()).or_default() += 1;
        }
    }
    let mut stored: BTreeMap<(String, String), (Sums, i64)> = BTreeMap::new();
    for row in scope.rows(table("account")?).await? {
        let (sums, available) = stored.entry((text(&row, "account"), text(&row, "currency"))).or_default();
        for (index, column) in
            ["debits_posted", "credits_posted", "debits_pending", "credits_pending"].into_iter().enumerate()
        {
            sums[index] += int(&row, column)?;
        }
        *available += int(&row, "available")?;
    }
    for (account, (sums, available)) in &stored {
        let transfers = expected.remove(account).unwrap_or_default();
        ensure!(*sums == transfers, "{account:?} has {sums:?}, and its transfers {transfers:?}");
        ensure!(*available == sums[1] - sums[0] - sums[2], "{account:?} has {available} available");
        ensure!(
            !account.0.starts_with("wallet:") || *available >= 0,
            "{account:?} has {available} available"
        );
    }
    ensure!(expected.is_empty(), "transfers of no account: {expected:?}");
    let [debits, credits] = [0, 1].map(|index| stored.values().map(|(sums, _)| sums[index]).sum::<i64>());
    ensure!(debits == credits, "debits are {debits}, credits {credits}");
    for row in scope.rows(table("transaction")?).await? {
        let id = format!("{}:{}", text(&row, "payment_intent_id"), text(&row, "transaction_id"));
        let is_moved = matches!(
            (row.text("type"), row.text("status")),
            (Some("CHARGE"), Some("CAPTURED")) | (Some("CAPTURE" | "REFUND"), Some("DONE"))
        );
        ensure!(posted.remove(&id).unwrap_or(0) == usize::from(is_moved), "{row} is posted otherwise");
    }
    ensure!(posted.is_empty(), "transfers of transactions that are not there: {posted:?}");
    Ok(())
}
