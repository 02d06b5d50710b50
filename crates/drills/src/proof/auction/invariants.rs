//! What must hold of lots, bids and winners, on what is stored.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use statehouse::Resource;
use statehouse::house::COMBINED_OPERATIONS;
use statehouse::resource::key_text;
use statehouse_store::{OperationStatus, Row, Time, Value};

use crate::harness::invariants::{CheckScope, LoggedChange};
use crate::harness::store_client::{same, whole_log};

/// Everything below.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let lots = scope.rows(scope.table()?).await?;
    let bids = bids_by_lot(scope).await?;
    let mode = StoredMode::of(scope)?;
    for lot in &lots {
        let what = key_text(lot.key());
        let own = bids.get(&what).map_or(&[][..], Vec::as_slice);
        check_best(mode, lot, own).with_context(|| format!("lot {what}: {lot}"))?;
        check_times(lot, own).with_context(|| format!("lot {what}: {lot}"))?;
    }
    let known: BTreeSet<String> = lots.iter().map(|lot| key_text(lot.key())).collect();
    ensure!(bids.keys().all(|lot| known.contains(lot)), "bids for lots that do not exist: {:?}", bids.keys());
    check_winners(scope, &lots).await?;
    check_receipts(scope, &bids).await?;
    check_log(scope, &bids).await
}

/// How bids compete, as the columns tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoredMode {
    Proxy,
    Open,
    Sealed,
}

impl StoredMode {
    fn of(scope: &CheckScope<'_>) -> Result<StoredMode> {
        let hides = |resource: &Resource, name: &str| resource.hidden.iter().any(|hidden| hidden == name);
        Ok(match (hides(scope.sibling("")?, "price"), hides(scope.sibling("bid")?, "amount")) {
            (true, _) => StoredMode::Sealed,
            (false, true) => StoredMode::Proxy,
            (false, false) => StoredMode::Open,
        })
    }
}

/// The bids of each lot, by its key as text.
async fn bids_by_lot(scope: &CheckScope<'_>) -> Result<BTreeMap<String, Vec<Row>>> {
    let table = scope.sibling("bid")?.tables.first().context("bids without a table")?;
    let mut bids: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    for row in scope.rows(table).await? {
        let lot = row.key().len().checked_sub(2).and_then(|parts| row.key().get(..parts));
        bids.entry(key_text(lot.context("a bid without a lot")?)).or_default().push(row);
    }
    for bids in bids.values_mut() {
        bids.sort_by_key(|bid| (bid.int("seq"), bid.text("state") == Some("REJECTED")));
    }
    Ok(bids)
}

fn int(row: &Row, column: &str) -> Result<i64> {
    row.int(column).with_context(|| format!("no {column} in {row}"))
}

fn time(row: &Row, column: &str) -> Result<Time> {
    row.time(column).with_context(|| format!("no {column} in {row}"))
}

fn state(row: &Row) -> &str {
    row.text("state").unwrap_or_default()
}

/// I1: the numbers of accepted bids have no gap, and the best bid is that of those that were not voided.
fn check_best(mode: StoredMode, lot: &Row, bids: &[Row]) -> Result<()> {
    let counted: Vec<&Row> = bids.iter().filter(|bid| state(bid) != "REJECTED").collect();
    let numbers: Vec<i64> = counted.iter().map(|bid| int(bid, "seq")).collect::<Result<_>>()?;
    let expected: Vec<i64> = (1..=int(lot, "bids")?).collect();
    same("the numbers of its bids", &numbers, &expected)?;
    for bid in bids.iter().filter(|bid| state(bid) == "REJECTED") {
        ensure!(
            (0..=int(lot, "bids")?).contains(&int(bid, "seq")?),
            "a rejected bid has a wrong number: {bid}"
        );
        let is_low = bid.text("reason") == Some("low");
        ensure!(!is_low || bid.int("amount") < bid.int("min_next"), "it was not too low: {bid}");
    }
    if lot.text("state") == Some("SOLD") && lot.text("best_bid_id").is_none() {
        // It was bought at once.
        return same("the price", &lot.int("price"), &lot.int("buy_now"));
    }
    let valid: Vec<&Row> = counted.into_iter().filter(|bid| state(bid) == "ACCEPTED").collect();
    // Of two equal amounts the earlier bid is ahead. Open bids each are above the one before.
    let ahead = |one: &&Row, other: &&Row| {
        one.int("amount").cmp(&other.int("amount")).then(other.int("seq").cmp(&one.int("seq")))
    };
    let leader = valid.iter().copied().max_by(ahead);
    let standing = |bid: Option<&Row>| -> [Option<Value>; 3] {
        ["bid_id", "bidder_id", "amount"].map(|name| bid.and_then(|bid| bid.get(name)).cloned())
    };
    let stored = |names: [&str; 3]| names.map(|name| lot.get(name).filter(|value| !value.is_null()).cloned());
    same("the leader", &stored(["best_bid_id", "bidder_id", "max_amount"]), &standing(leader))?;
    let others = valid.iter().copied().filter(|bid| bid.text("bidder_id") != lot.text("bidder_id"));
    let runner_up = others.max_by(ahead);
    let names = ["runner_bid_id", "runner_bidder_id", "runner_amount"];
    same("the runner-up", &stored(names), &standing(runner_up))?;
    check_price(mode, lot, leader, runner_up)
}

fn check_price(mode: StoredMode, lot: &Row, leader: Option<&Row>, runner_up: Option<&Row>) -> Result<()> {
    let (start, reserve) = (int(lot, "start_price")?, lot.int("reserve"));
    let Some(leader) = leader else {
        same("the least bid", &int(lot, "min_next")?, &start)?;
        return same("the price without a bid", &lot.int("price"), &None);
    };
    let (price, most) = (int(lot, "price")?, int(leader, "amount")?);
    let is_met = reserve.is_none_or(|reserve| price >= reserve);
    same("whether the reserve is met", &lot.bool("reserve_met"), &Some(is_met))?;
    match mode {
        StoredMode::Open | StoredMode::Sealed => same("the price", &price, &most)?,
        StoredMode::Proxy => {
            let second = runner_up.map(|bid| int(bid, "amount")).transpose()?.unwrap_or(start);
            let reached = reserve.filter(|reserve| most >= *reserve).unwrap_or(start);
            let least = start.max(second.min(most)).max(reached);
            ensure!((least..=most).contains(&price), "the price {price} is not within {least} and {most}");
            ensure!(runner_up.is_some() || price == least, "the price {price} of the only bidder");
        }
    }
    let least = int(lot, "min_next")?;
    ensure!(
        if mode == StoredMode::Sealed { least == start } else { least > price },
        "the least bid is {least}"
    );
    Ok(())
}

/// I2 and I3: what bids say of the time at which they were placed.
fn check_times(lot: &Row, bids: &[Row]) -> Result<()> {
    let (starts_at, hard_end) = (time(lot, "starts_at")?, time(lot, "hard_end")?);
    ensure!(time(lot, "ends_at")? <= hard_end, "it ends after its hard end");
    for bid in bids {
        let (at, ends_at) = (time(bid, "at")?, time(bid, "ends_at")?);
        let fits = match bid.text("reason") {
            None => starts_at <= at && at < ends_at && ends_at <= hard_end,
            Some("low") => starts_at <= at && at < ends_at,
            Some("early") => at < starts_at,
            Some("late") => at >= ends_at || lot.text("state") == Some("SOLD"),
            Some("cancelled") => lot.text("state") == Some("CANCELLED"),
            Some(_) => false,
        };
        ensure!(fits, "a bid at the wrong time: {bid}");
    }
    Ok(())
}

/// I4: a lot that was sold has one winner, the bidder who led; no other lot has one.
async fn check_winners(scope: &CheckScope<'_>, lots: &[Row]) -> Result<()> {
    let tables = &scope.sibling("")?.tables;
    let table = tables.iter().find(|table| table.type_of("winning_amount").is_some());
    let rows = scope.rows(table.context("lots without a table of winners")?).await?;
    let mut winners: BTreeMap<String, Row> =
        rows.into_iter().map(|winner| (key_text(winner.key()), winner)).collect();
    for lot in lots {
        let key = key_text(lot.key());
        let winner = winners.remove(&key);
        ensure!(winner.is_some() == (state(lot) == "SOLD"), "lot {key} is {} with {winner:?}", state(lot));
        if let Some(winner) = winner {
            let of = |names: [&str; 3], row: &Row| names.map(|name| row.get(name).cloned());
            let won = of(["winning_bid_id", "bidder_id", "winning_amount"], &winner);
            same("the winner", &won, &of(["best_bid_id", "bidder_id", "price"], lot))?;
        }
        let has_sale = lot.text("best_bid_id").is_some() && lot.bool("reserve_met") == Some(true);
        ensure!(state(lot) != "UNSOLD" || !has_sale, "lot {key} could have been sold");
        let is_bought = lot.text("best_bid_id").is_none() && lot.int("buy_now").is_some();
        ensure!(state(lot) != "SOLD" || has_sale || is_bought, "lot {key} was sold below its reserve");
    }
    ensure!(winners.is_empty(), "winners of lots that do not exist: {winners:?}");
    Ok(())
}

/// I5: each bid was stored by the plan that it names, which is in the log.
async fn check_receipts(scope: &CheckScope<'_>, bids: &BTreeMap<String, Vec<Row>>) -> Result<()> {
    let mut applied: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for record in whole_log(scope.store.as_ref()).await? {
        if record.status == OperationStatus::Applied && record.tenant == *scope.tenant {
            let named =
                record.events.iter().filter_map(|event| event.data[COMBINED_OPERATIONS].as_array()).flatten();
            let named = named.filter_map(Json::as_str).map(str::to_owned).collect();
            applied.insert(record.operation, named);
        }
    }
    for bid in bids.values().flatten() {
        let plan = bid.text("applied_by").context("a bid without the plan that stored it")?;
        let named = applied.get(plan).with_context(|| format!("{plan} is not in the log: {bid}"))?;
        let id = bid.text("bid_id").unwrap_or_default();
        // A bid that was part of a batch is remembered under the id of the batch.
        let is_named = named.contains(id) || named.is_empty();
        ensure!(state(bid) == "REJECTED" || is_named, "{plan} does not name the bid {id}, but {named:?}");
    }
    Ok(())
}

/// I2, I3 and I4, as the log tells of each lot: bids before the end, which only they move, and not back; one close, at the end.
async fn check_log(scope: &CheckScope<'_>, bids: &BTreeMap<String, Vec<Row>>) -> Result<()> {
    for (lot, changes) in scope.histories(scope.sibling("")?, &[]).await? {
        let mut end: Option<Time> = None;
        let mut placed = Vec::new();
        for change in &changes {
            let what = || format!("{} of {lot} at {}, which ends at {end:?}", change.name, change.at);
            let next = change.time("ends_at")?.context("a lot without an end")?;
            let in_time = end.is_some_and(|end| change.at < end);
            match change.name.as_str() {
                "bid" => {
                    ensure!(in_time, "{}", what());
                    ensure!(
                        end <= Some(next) && change.time("hard_end")? >= Some(next),
                        "{}: {next}",
                        what()
                    );
                    placed.extend(ids_of(change)?);
                }
                "bought" => ensure!(in_time, "{}", what()),
                "sold" | "unsold" => ensure!(!in_time, "{}", what()),
                _ => {}
            }
            let moves = end.is_some_and(|end| end != next);
            ensure!(!moves || change.name == "bid", "{} moved the end to {next}", what());
            end = Some(next);
        }
        let own = bids.get(&lot).map_or(&[][..], Vec::as_slice);
        let stored = own.iter().filter(|bid| state(bid) != "REJECTED");
        let stored: Vec<&str> = stored.map(|bid| bid.text("bid_id").unwrap_or_default()).collect();
        same(&format!("the bids for {lot}, in their order"), &placed, &stored)?;
    }
    Ok(())
}

/// The bids that an event tells of, in their order.
fn ids_of(change: &LoggedChange) -> Result<Vec<&str>> {
    let placed = change.data["placed"].as_array().context("a bid that tells of none")?;
    placed.iter().map(|bid| bid["bid_id"].as_str().context("a bid without an id")).collect()
}
