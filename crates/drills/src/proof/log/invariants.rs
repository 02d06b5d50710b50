//! Invariants of a declared group, checked on its progress, its parked records and the log.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse::infra::log::{PARKED, PROGRESS};
use statehouse_store::Row;

use crate::harness::invariants::{CheckScope, LoggedChange};

/// I1, I3 and I5: a claim raises the epoch by one, only a seek moves progress back, and the row is where the log ended. As many
/// records are parked as the row counts. Progress is never ahead of the log.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let mut parked: BTreeMap<i64, i64> = BTreeMap::new();
    for row in of_group(scope, PARKED).await? {
        *parked.entry(row.int("log_partition").context("no partition")?).or_default() += 1;
    }
    let mut logged = scope.changes(scope.sibling("")?, &[]).await?;
    for row in of_group(scope, PROGRESS).await? {
        let partition = row.int("log_partition").context("no partition")?;
        let changes =
            logged.remove(&partition.to_string()).with_context(|| format!("{row} is not in the log"))?;
        let last = check_changes(partition, &changes)?;
        for column in ["reached", "epoch", "holder"] {
            let stored = row.get(column).map_or(json!(null), statehouse_store::Value::to_json);
            let data = &last.data["row"][column];
            ensure!(stored == *data, "{row}: the log ends with {data} as its {column}");
        }
        let count = parked.remove(&partition).unwrap_or(0);
        ensure!(row.int("parked") == Some(count), "{row}: {count} records are parked");
        let head = scope.store.read_log(u32::try_from(partition)?, 0, 1).await?.head;
        let reached = u64::try_from(row.int("reached").unwrap_or(0))?;
        ensure!(reached <= head, "{row}: the newest offset is {head}");
    }
    ensure!(parked.is_empty(), "records are parked in partitions without progress: {parked:?}");
    ensure!(logged.is_empty(), "progress that the log has is not stored: {logged:?}");
    Ok(())
}

/// The rows of one of the system's tables that belong to the group.
async fn of_group(scope: &CheckScope<'_>, table: &str) -> Result<Vec<Row>> {
    let table =
        scope.house.schema().table(table).with_context(|| format!("the house has no table {table}"))?;
    let rows = scope.rows(table).await?.into_iter();
    Ok(rows.filter(|row| row.text("consumer") == Some(scope.resource)).collect())
}

/// Checks the changes of one partition's progress, in the order of their versions, and returns the last.
fn check_changes(partition: i64, changes: &BTreeMap<i64, LoggedChange>) -> Result<&LoggedChange> {
    let (mut reached, mut epoch) = (0, 0);
    for change in changes.values() {
        let row = &change.data["row"];
        let what = || format!("{} of partition {partition} at {}: {row}", change.name, change.at);
        epoch += i64::from(change.name == "claimed");
        ensure!(row["epoch"] == json!(epoch), "{}: the epoch is {epoch}", what());
        let now = row["reached"].as_i64().with_context(what)?;
        ensure!(now >= reached || change.name == "moved", "{}: it was at {reached}", what());
        ensure!(now == reached || ["committed", "moved"].contains(&change.name.as_str()), "{}", what());
        reached = now;
    }
    changes.values().next_back().context("progress without a change")
}
