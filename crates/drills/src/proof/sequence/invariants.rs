//! Invariants of the three kinds of sequences, checked on the stored rows and the log.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use statehouse_store::Time;

use crate::harness::invariants::{CheckScope, columns_text};
use crate::harness::store_client::same;

/// The invariants of a sequence, by its kind.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let has = |suffix: &str| scope.table_beside(suffix).is_ok();
    match (has("ranges"), has("taken")) {
        (true, _) => check_counter(scope).await,
        (_, true) => check_gapless(scope).await,
        _ => check_time(scope).await,
    }
}

fn int(json: &Json, name: &str) -> Result<i64> {
    json[name].as_i64().with_context(|| format!("no {name} in {json}"))
}

/// I1 and I2: each number of a counter is given out once, without gaps, and `last` is where the log ended.
async fn check_counter(scope: &CheckScope<'_>) -> Result<()> {
    let mut lasts = BTreeMap::new();
    for (key, events) in scope.events(scope.resource).await? {
        let mut before: Option<i64> = None;
        for event in &events {
            let row = &event.data["row"];
            let (first, last) = match event.name.as_str() {
                "given" => (int(row, "last")? - int(&event.data, "count")? + 1, int(row, "last")?),
                "leased" => (int(row, "first")?, int(row, "last")?),
                _ => continue,
            };
            // The first number of a counter is its setting `start`.
            let follows = before.is_none_or(|before| first == before + 1) && last >= first;
            ensure!(follows, "{} of {key} at {}: {first} to {last}, after {before:?}", event.name, event.at);
            before = Some(last);
        }
        lasts.extend(before.map(|last| (key, last)));
    }
    same("the last numbers", &stored_lasts(scope).await?, &lasts)
}

async fn stored_lasts(scope: &CheckScope<'_>) -> Result<BTreeMap<String, i64>> {
    let key = &scope.sibling("")?.key;
    let mut lasts = BTreeMap::new();
    for row in scope.rows(scope.table()?).await? {
        lasts.insert(columns_text(&row, key)?, row.int("last").context("no last number")?);
    }
    Ok(lasts)
}

/// I3: the numbers that were taken follow each other without gaps, each by one subject, and the log has the same.
async fn check_gapless(scope: &CheckScope<'_>) -> Result<()> {
    let key = &scope.sibling("")?.key;
    let mut stored: BTreeMap<String, BTreeMap<i64, String>> = BTreeMap::new();
    for row in scope.rows(scope.table_beside("taken")?).await? {
        let number = row.int("number").context("no number")?;
        let subject = row.text("subject").context("no subject")?.to_owned();
        let other = stored.entry(columns_text(&row, key)?).or_default().insert(number, subject);
        ensure!(other.is_none(), "{row}: {other:?} has the number too");
    }
    let mut logged: BTreeMap<String, BTreeMap<i64, String>> = BTreeMap::new();
    let mut subjects = BTreeSet::new();
    for (counter, events) in scope.events(scope.resource).await? {
        for event in events.iter().filter(|event| event.name == "taken") {
            let row = &event.data["row"];
            let subject = row["subject"].as_str().context("no subject")?.to_owned();
            let is_new = subjects.insert((counter.clone(), subject.clone()));
            ensure!(is_new, "{subject} of {counter} took a number twice");
            let numbers = logged.entry(counter.clone()).or_default();
            let number = int(row, "number")?;
            let before = numbers.last_key_value().map(|(last, _)| *last);
            ensure!(before.is_none_or(|last| number == last + 1), "{row} of {counter}, after {before:?}");
            numbers.insert(number, subject);
        }
    }
    same("the numbers that were taken", &stored, &logged)?;
    let last =
        |(counter, numbers): (String, BTreeMap<i64, String>)| Some((counter, *numbers.keys().next_back()?));
    let lasts = logged.into_iter().filter_map(last).collect();
    same("the last numbers", &stored_lasts(scope).await?, &lasts)
}

/// I4: the reserved spans of each worker id follow each other, and the mark is the end of the last one.
async fn check_time(scope: &CheckScope<'_>) -> Result<()> {
    let time = |json: &Json| -> Result<Time> { Ok(json.as_str().context("no time")?.parse()?) };
    let mut marks: BTreeMap<String, Option<Time>> = BTreeMap::new();
    for (worker, events) in scope.events(scope.resource).await? {
        let mut mark: Option<Time> = None;
        for event in &events {
            if !["leased", "reserved", "drawn"].contains(&event.name.as_str()) {
                continue;
            }
            let row = &event.data["row"];
            let (from, until) = (time(&row["reserved_from"])?, time(&row["reserved_until"])?);
            let follows = from < until && mark.is_none_or(|mark| mark <= from);
            ensure!(follows, "{} of {worker} at {}: {row}; the mark was {mark:?}", event.name, event.at);
            mark = Some(until);
        }
        marks.insert(worker, mark);
    }
    let mut stored = BTreeMap::new();
    for row in scope.rows(scope.table()?).await? {
        let worker = row.int("worker").context("no worker")?.to_string();
        stored.insert(worker, row.time("reserved_until"));
    }
    same("the marks", &stored, &marks)
}
