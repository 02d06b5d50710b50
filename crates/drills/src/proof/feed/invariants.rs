//! Invariants of feeds, checked when their workers have nothing left to do.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use statehouse::infra::projection::{GENERATION, SOURCE};
use statehouse::resource::key_text;

use crate::harness::invariants::CheckScope;
use crate::proof::projection::invariants::{self, live_entries, live_generation};

/// Those of a projection, and F1 and F4: each row of a reader is of a post that has an entry, at the place that the entry says,
/// and the reader follows its author. No fan-out is left unfinished.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    invariants::check(scope).await?;
    let (projector, entries) = live_entries(scope).await?;
    let live = live_generation(scope, &projector).await?;
    let truths = projector.truths();
    let follows = truths.get(1).context("a feed without follows")?;
    let mut edges = BTreeSet::new();
    for row in scope.rows(follows).await? {
        if row.time("since").is_some() {
            edges.insert(key_text(row.key()));
        }
    }
    let mut posts = BTreeMap::new();
    for (row, content) in &entries {
        let place = (content.get("author_id").cloned(), content.get("created_at").cloned());
        posts.insert(row.text(SOURCE).unwrap_or_default().to_owned(), place);
    }
    for row in scope.rows(scope.table()?).await? {
        if row.int(GENERATION) != Some(live) {
            continue;
        }
        let post = key_text([row.get("post_id").context("a row without its post")?]);
        let (author, at) = (row.get("author_id"), row.get("created_at"));
        let place = (author.cloned(), at.cloned());
        ensure!(posts.get(&post) == Some(&place), "{row}: the entry of its post says {:?}", posts.get(&post));
        let viewer = row.get("viewer_id").context("a row without its reader")?;
        let edge = key_text([viewer, author.context("a row without its author")?]);
        ensure!(edges.contains(&edge), "{row}: the reader does not follow its author");
    }
    let work = scope.rows(scope.table_beside("work")?).await?;
    let unfinished = work.iter().find(|row| row.int(GENERATION) == Some(live));
    ensure!(unfinished.is_none(), "{unfinished:?} is left to do");
    Ok(())
}
