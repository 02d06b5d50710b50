//! Invariants of any projection, checked when its workers have nothing left to do.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use statehouse::infra::projection::{EntryContent, GENERATION, Projector, SOURCE};
use statehouse::resource::Consuming;
use statehouse_store::Row;

use crate::harness::invariants::CheckScope;
use crate::harness::store_client::same;

/// The columns of an entry that are not the projector's own.
const PIPELINE_COLUMNS: [&str; 4] = [GENERATION, SOURCE, "source_order", "gone"];

/// I1 to I3: the live generation has an entry for each row of the source that counts, with what the row says, under the row's
/// order, and no other entry.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let (projector, entries) = live_entries(scope).await?;
    let mut expected = BTreeMap::new();
    for row in scope.rows(projector.source()).await? {
        let change = projector.change_of(&row);
        let Some(mut content) = change.content else { continue };
        content.retain(|_, value| !value.is_null());
        expected.insert(change.source, (change.order, content));
    }
    let mut stored = BTreeMap::new();
    for (row, content) in &entries {
        // Where source rows are looked up, the order of an entry only says for which record it was written.
        let order = if projector.row_lookup().is_some() { Some(0) } else { row.int("source_order") };
        let source = row.text(SOURCE).context("an entry without its source")?.to_owned();
        stored.insert(source, (order.context("an entry without an order")?, content.clone()));
    }
    same("the entries", &stored, &expected)
}

/// The projector of a resource.
pub(crate) fn projector(scope: &CheckScope<'_>) -> Result<Arc<dyn Projector>> {
    let projector = |consuming: &Consuming| match consuming {
        Consuming::Projection(projector) => Some(projector.clone()),
        Consuming::Group(_) | Consuming::Declared(_) => None,
    };
    scope.sibling("")?.consumers.iter().find_map(projector).context("a resource without a projection")
}

/// The generation that readers see.
pub(crate) async fn live_generation(scope: &CheckScope<'_>, projector: &Arc<dyn Projector>) -> Result<i64> {
    let projections = scope.house.projections();
    let projection = projections.iter().find(|projection| projection.name() == projector.name());
    let state = projection.context("the house does not have the projection")?.state().await?;
    Ok(state.live.context("no generation is live")?.number)
}

/// The projector of a resource, and the entries of its live generation that are not tombstones, each with its own columns.
pub(crate) async fn live_entries(
    scope: &CheckScope<'_>,
) -> Result<(Arc<dyn Projector>, Vec<(Row, EntryContent)>)> {
    let projector = projector(scope)?;
    let live = live_generation(scope, &projector).await?;
    let mut entries = Vec::new();
    for row in scope.rows(projector.entries()).await? {
        if row.int(GENERATION) != Some(live) || row.bool("gone") == Some(true) {
            continue;
        }
        let columns = row.table().columns().iter().zip(row.values());
        let own = columns
            .filter(|(column, value)| !PIPELINE_COLUMNS.contains(&column.name.as_str()) && !value.is_null());
        let content: EntryContent = own.map(|(column, value)| (column.name.clone(), value.clone())).collect();
        entries.push((row, content));
    }
    Ok((projector, entries))
}
