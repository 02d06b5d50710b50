//! Invariants of views, checked when their workers have nothing left to do.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use statehouse::infra::projection::{GENERATION, SOURCE};
use statehouse_store::{Row, Value};

use crate::harness::invariants::CheckScope;
use crate::harness::store_client::same;
use crate::proof::projection::invariants::{self, live_entries, live_generation};

/// The count and the sums of a row.
fn amounts_of(row: &Row) -> BTreeMap<String, i64> {
    let columns = row.table().columns().iter().zip(row.values());
    let amounts = columns.filter(|(column, _)| column.name == "members" || column.name.starts_with("sum_"));
    amounts.filter_map(|(column, value)| Some((column.name.clone(), value.as_int()?))).collect()
}

/// The total over all groups, of a view that keeps it, is what its entries add up to.
async fn check_total(scope: &CheckScope<'_>, live: i64, mut grand: BTreeMap<String, i64>) -> Result<()> {
    let Ok(table) = scope.table_beside("total") else { return Ok(()) };
    let mut stored: BTreeMap<String, i64> = BTreeMap::new();
    for row in scope.rows(table).await? {
        if row.int(GENERATION) == Some(live) {
            amounts_of(&row)
                .into_iter()
                .for_each(|(name, amount)| *stored.entry(name).or_default() += amount);
        }
    }
    grand.retain(|_, amount| *amount != 0);
    stored.retain(|_, amount| *amount != 0);
    same("the total over all groups", &stored, &grand)
}

/// Those of a projection, and that the totals and the ordered rows of the live generation are what its entries add up to.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    invariants::check(scope).await?;
    let (projector, entries) = live_entries(scope).await?;
    let live = live_generation(scope, &projector).await?;
    let group_of = |group: Option<&Value>| {
        group.and_then(Value::as_text).map(str::to_owned).context("a row without a group")
    };
    let mut totals: BTreeMap<String, BTreeMap<String, i64>> = BTreeMap::new();
    let mut grand: BTreeMap<String, i64> = BTreeMap::new();
    let mut ordered = BTreeSet::new();
    for (row, content) in &entries {
        let group = group_of(content.get("group_key"))?;
        let total = totals.entry(group.clone()).or_default();
        *total.entry("members".to_owned()).or_default() += 1;
        for (name, value) in content {
            if name.starts_with("sum_") {
                *total.entry(name.clone()).or_default() += value.as_int().context("a sum of no number")?;
            }
            if let (Some(field), Some(rank)) = (name.strip_prefix("rank_"), value.as_text()) {
                let source = row.text(SOURCE).unwrap_or_default();
                ordered.insert((group.clone(), field.to_owned(), rank.to_owned(), source.to_owned()));
            }
        }
    }
    for (name, amount) in totals.values().flatten() {
        *grand.entry(name.clone()).or_default() += amount;
    }
    check_total(scope, live, grand).await?;
    totals.values_mut().for_each(|total| total.retain(|_, amount| *amount != 0));
    let mut stored = BTreeMap::new();
    for row in scope.rows(scope.table()?).await? {
        if row.int(GENERATION) != Some(live) {
            continue;
        }
        let mut total = amounts_of(&row);
        total.retain(|_, amount| *amount != 0);
        // The row of a group that has become empty may stay.
        if !total.is_empty() {
            stored.insert(group_of(row.get("group_key"))?, total);
        }
    }
    same("the totals", &stored, &totals)?;
    let mut found = BTreeSet::new();
    for row in scope.rows(scope.table_beside("order")?).await? {
        if row.int(GENERATION) == Some(live) {
            let text = |column: &str| row.text(column).unwrap_or_default().to_owned();
            let twice = found.insert((text("group_key"), text("field"), text("rank"), text(SOURCE)));
            ensure!(twice, "{row} is there twice");
        }
    }
    same("the ordered rows", &found, &ordered)
}
