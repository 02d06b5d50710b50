//! What must hold of stocks, reservations and movements, on what is stored.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json};
use statehouse::house::Operation;
use statehouse::resource::key_text;
use statehouse::{Request, Resource};
use statehouse_store::{Row, Time, Value};

use crate::harness::invariants::{CheckScope, LoggedChange};
use crate::harness::store_client::same;

/// What the reservations and the log say of one row.
#[derive(Clone, Debug, Default, PartialEq)]
struct StockLedger {
    reserved: i64,
    sold: i64,
    stocked: i64,
    /// How often it was written.
    writes: i64,
}

/// Everything below.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let mut ledgers = BTreeMap::new();
    follow_stocks(scope, &mut ledgers).await?;
    follow_reservations(scope, &mut ledgers).await?;
    check_rows(scope, ledgers).await?;
    check_movements(scope).await
}

/// I5 and the version: the rows of each stock have what the log and the reservations say, and were written no more often.
async fn check_rows(scope: &CheckScope<'_>, mut ledgers: BTreeMap<String, StockLedger>) -> Result<()> {
    let rows = scope.rows(scope.table()?).await?;
    let mut stored: BTreeMap<String, StockLedger> = BTreeMap::new();
    let cells = scope.table_beside("cells").ok();
    for row in &rows {
        add_row(&mut stored, row, row.key())?;
    }
    for row in if let Some(cells) = cells { scope.rows(cells).await? } else { Vec::new() } {
        let stock = row.key().split_last().map_or(&[][..], |(_, stock)| stock);
        ensure!(row.int("available").is_some_and(|available| available >= 0), "a cell is below zero: {row}");
        add_row(&mut stored, &row, stock)?;
    }
    for row in &rows {
        let key = key_text(row.key());
        let mut ledger = ledgers.remove(&key).unwrap_or_default();
        let stored = stored.remove(&key).unwrap_or_default();
        if cells.is_some() {
            // The balancer writes as well.
            ledger.writes = stored.writes;
        }
        same(&format!("the stock {key}"), &stored, &ledger)?;
        ensure!(orderable(scope, row).await? >= 0, "more of {key} was reserved than there was: {row}");
    }
    ensure!(stored.is_empty(), "cells of stocks that are not there: {stored:?}");
    ensure!(ledgers.is_empty(), "rows are not stored that the log has: {ledgers:?}");
    Ok(())
}

/// Adds a row to what its stock has.
fn add_row(stored: &mut BTreeMap<String, StockLedger>, row: &Row, stock: &[Value]) -> Result<()> {
    let int = |name: &str| row.int(name).with_context(|| format!("{name} in {row}"));
    let (available, reserved, sold, stocked) =
        (int("available")?, int("reserved")?, int("sold")?, int("stocked")?);
    same(&format!("the balance of {row}"), &(available + reserved + sold), &stocked)?;
    ensure!(reserved >= 0 && sold >= 0, "something is negative: {row}");
    let ledger = stored.entry(key_text(stock)).or_default();
    ledger.reserved += reserved;
    ledger.sold += sold;
    ledger.stocked += stocked;
    ledger.writes += row.version();
    Ok(())
}

/// What can still be reserved of a row, with what may be ordered beyond it (I1).
async fn orderable(scope: &CheckScope<'_>, row: &Row) -> Result<i64> {
    let action = format!("{}.availability", scope.resource);
    let request = Request { action, key: row.key().to_vec(), input: Map::new(), expected: None };
    let answer = scope.house.call(scope.tenant, request, Operation::default()).await?;
    answer.body["orderable"].as_i64().with_context(|| format!("no number in {}", answer.body))
}

fn quantity(change: &LoggedChange) -> Result<i64> {
    change.data["quantity"]
        .as_i64()
        .with_context(|| format!("{} has no quantity: {}", change.name, change.data))
}

/// What actions on stocks did, by their events; and no version twice.
async fn follow_stocks(scope: &CheckScope<'_>, ledgers: &mut BTreeMap<String, StockLedger>) -> Result<()> {
    scope.changes(scope.sibling("")?, &[]).await?;
    for (key, changes) in scope.events(scope.resource).await? {
        let ledger = ledgers.entry(key).or_default();
        for change in &changes {
            match change.name.as_str() {
                "low" => continue,
                "updated" => {}
                "returned" => ledger.sold -= quantity(change)?,
                _ => ledger.stocked += quantity(change)?,
            }
            ledger.writes += 1;
        }
    }
    Ok(())
}

/// The lines in a column of a reservation, each with the key of its row.
fn lines_in(stock: &Resource, lines: &Json) -> Result<Vec<(String, i64)>> {
    let line = |line: &Json| {
        let part = |(name, kind): &(String, statehouse_store::Type)| {
            Value::from_json(line[name.as_str()].clone(), *kind)
                .map_err(|why| anyhow::anyhow!("{name}: {why}"))
        };
        let key = stock.key.iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok((key_text(&key), line["quantity"].as_i64().context("a line without a quantity")?))
    };
    lines.as_array().into_iter().flatten().map(line).collect()
}

/// I2, I3 and I4: each reservation is a path through its states, with an event for each of its versions. It is extended and bought
/// before its end, and expires at its end or later. What it holds and bought is in the rows.
async fn follow_reservations(
    scope: &CheckScope<'_>,
    ledgers: &mut BTreeMap<String, StockLedger>,
) -> Result<()> {
    let (stock, reservations) = (scope.sibling("")?, scope.sibling("reservation")?);
    for (id, changes) in scope.histories(reservations, &[]).await? {
        let mut before: Option<(String, Option<Time>)> = None;
        for change in &changes {
            let end = before.as_ref().and_then(|(_, end)| *end);
            let in_time = end.is_none_or(|end| change.at < end);
            let fits = match (before.as_ref().map(|(state, _)| state.as_str()), change.name.as_str()) {
                (None, "reserved") => true,
                (Some("RESERVED"), "extended" | "committed") => in_time,
                (Some("RESERVED"), "expired") => !in_time,
                (Some("RESERVED"), "released") => true,
                _ => false,
            };
            ensure!(fits, "{} of {id} at {}, after {before:?}", change.name, change.at);
            follow(stock, change, ledgers)?;
            let state = change.data["row"]["state"].as_str().context("a reservation without a state")?;
            before = Some((state.to_owned(), change.time("expires_at")?));
        }
    }
    Ok(())
}

fn follow(
    stock: &Resource,
    change: &LoggedChange,
    ledgers: &mut BTreeMap<String, StockLedger>,
) -> Result<()> {
    let row = &change.data["row"];
    let direction = match change.name.as_str() {
        "reserved" => 1,
        "extended" => return Ok(()),
        _ => -1,
    };
    let mut lines: BTreeMap<String, i64> = BTreeMap::new();
    for (key, quantity) in lines_in(stock, &row["lines"])? {
        ensure!(quantity > 0, "a line of {row} is not positive");
        ensure!(lines.insert(key, quantity).is_none(), "two lines of one row in {row}");
    }
    for (key, quantity) in &lines {
        let ledger = ledgers.entry(key.clone()).or_default();
        ledger.reserved += direction * quantity;
        ledger.writes += 1;
    }
    for (key, quantity) in lines_in(stock, &row["bought"])? {
        ensure!(change.name == "committed", "{} has bought something", change.name);
        ensure!(
            quantity > 0 && lines.get(&key).is_some_and(|of| quantity <= *of),
            "{row} has bought more than it had"
        );
        ledgers.entry(key).or_default().sold += quantity;
    }
    Ok(())
}

/// I5: the movements of each row add up to what it has.
async fn check_movements(scope: &CheckScope<'_>) -> Result<()> {
    let Ok(movements) = scope.sibling("movement") else { return Ok(()) };
    let table = movements.tables.first().context("movements without a table")?;
    let mut sums: BTreeMap<String, (i64, i64)> = BTreeMap::new();
    for row in scope.rows(table).await? {
        let key = row.key().split_last().map_or(&[][..], |(_, stock)| stock);
        let quantity = row.int("quantity").context("a movement without a quantity")?;
        let (stocked, sold) = sums.entry(key_text(key)).or_default();
        match row.text("kind") {
            Some("SALE") => *sold += quantity,
            Some("RETURN") => *sold -= quantity,
            _ => *stocked += quantity,
        }
    }
    let mut stored = BTreeMap::new();
    for row in scope.rows(scope.table()?).await? {
        add_row(&mut stored, &row, row.key())?;
    }
    if let Ok(cells) = scope.table_beside("cells") {
        for row in scope.rows(cells).await? {
            add_row(&mut stored, &row, row.key().split_last().map_or(&[][..], |(_, stock)| stock))?;
        }
    }
    for (key, ledger) in stored {
        let stored = (ledger.stocked, ledger.sold);
        same(&format!("the movements of {key}"), &sums.remove(&key).unwrap_or_default(), &stored)?;
    }
    ensure!(sums.is_empty(), "movements of rows that are not there: {sums:?}");
    Ok(())
}
