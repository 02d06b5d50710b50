//! What must hold of scans, on what is stored.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use statehouse::resource::key_text;
use statehouse_store::{Row, Scan, Segment};

use crate::harness::invariants::CheckScope;
use crate::harness::store_client::scan;

/// The counts of a scan are those of its ranges; a scan is done when all ranges are. No row belongs to two ranges of a run. Every
/// change of a range after its insert is in the log, in the order of its versions.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let ranges = scope.sibling("range")?;
    let table = ranges.tables.first().context("ranges without a table")?;
    let mut by_run: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    let mut stored: BTreeMap<String, i64> = BTreeMap::new();
    for row in scope.rows(table).await? {
        stored.insert(key_text(row.key()), row.version());
        by_run.entry(row.text("run_id").unwrap_or_default().to_owned()).or_default().push(row);
    }
    for row in scope.rows(scope.table()?).await? {
        let ranges = by_run.remove(row.text("run_id").unwrap_or_default()).unwrap_or_default();
        let open = ranges.iter().filter(|range| range.text("state") != Some("DONE")).count();
        let counted = (row.int("ranges"), row.int("open"));
        let expected = (i64::try_from(ranges.len()).ok(), i64::try_from(open).ok());
        ensure!(counted == expected, "{row} has {} ranges, of which {open} are open", ranges.len());
        let is_done = row.text("state") == Some("DONE");
        ensure!(is_done == (open == 0), "{row} has {open} open ranges");
        disjoint(scope, &ranges).await?;
    }
    ensure!(by_run.is_empty(), "ranges without a scan: {by_run:?}");
    let changes = scope.changes(ranges, &[]).await?;
    for (key, version) in stored {
        let logged: Vec<i64> = changes.get(&key).map(|of| of.keys().copied().collect()).unwrap_or_default();
        let expected: Vec<i64> = (2..=version).collect();
        ensure!(logged == expected, "range {key} is at version {version}, and the log has {logged:?}");
    }
    Ok(())
}

/// No row is in the segments of two ranges.
async fn disjoint(scope: &CheckScope<'_>, ranges: &[Row]) -> Result<()> {
    let mut seen = BTreeSet::new();
    for range in ranges {
        let segment = Segment::parse(range.text("segment").context("no segment")?)?;
        let source =
            scope.house.schema().tables().find(|table| Scan::all(table).within(segment.clone()).is_ok());
        let source = source.context("a segment of no table")?;
        for row in scan(scope.store.as_ref(), Scan::of(source, scope.tenant).within(segment)?).await? {
            ensure!(seen.insert(key_text(row.key())), "{row} is in two ranges of one run");
        }
    }
    Ok(())
}
