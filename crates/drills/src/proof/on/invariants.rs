//! Invariants of a reaction, checked on its progress, its parked events and the log.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use statehouse::infra::log::{PARKED, PROGRESS};
use statehouse_store::{OperationStatus, Row};

use crate::harness::invariants::CheckScope;
use crate::harness::store_client::whole_log;

/// As many events are parked as the progress of their partition counts, and progress is never ahead of the log. Each effect names
/// an applied operation as its cause, and an operation causes at most as many effects as it has events.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let mut parked: BTreeMap<i64, i64> = BTreeMap::new();
    for row in of_reaction(scope, PARKED).await? {
        *parked.entry(row.int("log_partition").context("no partition")?).or_default() += 1;
    }
    for row in of_reaction(scope, PROGRESS).await? {
        let partition = row.int("log_partition").context("no partition")?;
        let count = parked.remove(&partition).unwrap_or(0);
        ensure!(row.int("parked") == Some(count), "{row}: {count} events are parked");
        let head = scope.store.read_log(u32::try_from(partition)?, 0, 1).await?.head;
        let reached = u64::try_from(row.int("reached").unwrap_or(0))?;
        ensure!(reached <= head, "{row}: the newest offset is {head}");
    }
    ensure!(parked.is_empty(), "events are parked in partitions without progress: {parked:?}");
    check_causes(scope).await
}

async fn check_causes(scope: &CheckScope<'_>) -> Result<()> {
    let mut events: BTreeMap<String, usize> = BTreeMap::new();
    let mut effects: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for record in whole_log(scope.store.as_ref()).await? {
        if record.status != OperationStatus::Applied || record.tenant != *scope.tenant {
            continue;
        }
        *events.entry(record.operation.clone()).or_default() += record.events.len();
        for event in record.events.iter().filter(|event| event.data["reaction"]["on"] == scope.resource) {
            let cause = event.data["reaction"]["operation"].as_str().context("an effect without a cause")?;
            effects.entry(cause.to_owned()).or_default().insert(record.operation.clone());
        }
    }
    for (cause, operations) in effects {
        let count = events.get(&cause).with_context(|| format!("{cause} is not in the log"))?;
        ensure!(operations.len() <= *count, "{cause} has {count} events and caused {operations:?}");
    }
    Ok(())
}

/// The rows of one of the system's tables that belong to the reaction.
async fn of_reaction(scope: &CheckScope<'_>, table: &str) -> Result<Vec<Row>> {
    let table =
        scope.house.schema().table(table).with_context(|| format!("the house has no table {table}"))?;
    let rows = scope.rows(table).await?.into_iter();
    Ok(rows.filter(|row| row.text("consumer") == Some(scope.resource)).collect())
}
