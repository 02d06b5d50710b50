//! What must hold of children, their lists and counts, on what is stored.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use statehouse_store::{Row, Time};

use crate::harness::invariants::{CheckScope, columns_text};
use crate::harness::store_client::same;

/// I2 and I6: the list has each visible child once, where its row says, and nothing else, and the shards of each count add up to
/// them. Every change of a child is in the log once.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let child = &scope.sibling("")?.key;
    let parent = &scope.sibling("thread")?.key;
    let mut visible = BTreeMap::new();
    let mut expected: BTreeMap<String, i64> = BTreeMap::new();
    for row in scope.rows(scope.table()?).await? {
        if row.text("status") == Some("VISIBLE") {
            visible.insert(columns_text(&row, child)?, position(&row, "posted_at")?);
            *expected.entry(columns_text(&row, parent)?).or_default() += 1;
        }
    }
    let mut listed = BTreeMap::new();
    for row in scope.rows(scope.table_beside("listed")?).await? {
        let twice = listed.insert(columns_text(&row, child)?, position(&row, "at")?);
        ensure!(twice.is_none(), "{row} stands twice in the list");
    }
    same("the lists", &listed, &visible)?;
    let mut counts: BTreeMap<String, i64> = BTreeMap::new();
    for row in scope.rows(scope.table_beside("listed_count")?).await? {
        *counts.entry(columns_text(&row, parent)?).or_default() += row.int("count").unwrap_or(0);
    }
    counts.retain(|_, count| *count != 0);
    same("the counts", &counts, &expected)?;
    scope.histories(scope.sibling("")?, &[]).await.map(drop)
}

fn position(row: &Row, at: &str) -> Result<(i64, Time)> {
    Ok((row.int("bucket").context("no bucket")?, row.time(at).context("no time")?))
}
