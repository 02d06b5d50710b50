//! What must hold of edges, lists and counts, on what is stored.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

use crate::harness::invariants::{CheckScope, columns_text};
use crate::harness::store_client::same;

/// Everything below.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let edges = check_rows(scope).await?;
    check_log(scope, &edges).await
}

/// I1 and I2, and the edges that are there: both lists have each once, in the bucket that its row says, and nothing else, and the
/// shards of every count add up to them.
pub(crate) async fn check_rows(scope: &CheckScope<'_>) -> Result<BTreeSet<String>> {
    let edge = &scope.sibling("")?.key;
    let mut there = Vec::new();
    for row in scope.rows(scope.table()?).await? {
        if row.time("since").is_some() {
            there.push(row);
        }
    }
    for end in ["out", "in"] {
        let owner = &scope.sibling(end)?.key;
        let mut expected = BTreeMap::new();
        let mut expected_counts: BTreeMap<String, i64> = BTreeMap::new();
        for row in &there {
            let bucket = row.int(&format!("{end}_bucket")).with_context(|| format!("no bucket in {row}"))?;
            expected.insert(columns_text(row, edge)?, (row.time("since"), Some(bucket)));
            *expected_counts.entry(columns_text(row, owner)?).or_default() += 1;
        }
        let mut listed = BTreeMap::new();
        for row in scope.rows(scope.table_beside(end)?).await? {
            let twice = listed.insert(columns_text(&row, edge)?, (row.time("at"), row.int("bucket")));
            ensure!(twice.is_none(), "{row} stands twice in the lists");
        }
        same(&format!("the lists {end}"), &listed, &expected)?;
        let mut counted: BTreeMap<String, i64> = BTreeMap::new();
        for row in scope.rows(scope.table_beside(&format!("{end}_count"))?).await? {
            *counted.entry(columns_text(&row, owner)?).or_default() += row.int("count").unwrap_or(0);
        }
        counted.retain(|_, count| *count != 0);
        same(&format!("the counts {end}"), &counted, &expected_counts)?;
    }
    there.iter().map(|row| columns_text(row, edge)).collect()
}

/// An edge is added if it was not there, changed and removed if it was, and the edges are where the log ended.
async fn check_log(scope: &CheckScope<'_>, edges: &BTreeSet<String>) -> Result<()> {
    let mut logged = BTreeSet::new();
    for (key, changes) in scope.histories(scope.sibling("")?, &[]).await? {
        let mut there = false;
        for change in &changes {
            let (fits, after) = match change.name.as_str() {
                "added" => (!there, true),
                "changed" => (there, true),
                "removed" => (there, false),
                _ => (false, there),
            };
            ensure!(fits, "{} of {key} at {}: it was there: {there}", change.name, change.at);
            there = after;
        }
        if there {
            logged.insert(key);
        }
    }
    same("the edges at the end of the log", &logged, edges)
}
