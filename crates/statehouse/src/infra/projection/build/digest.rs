//! Digests of entries, with which a build is compared with its source.

use statehouse_store::{Scan, Store, StoreError, Value};

use super::super::pipeline::EntryDigest;
use super::super::{GENERATION, ProjectionEntry, Projector, SOURCE};
use super::misuse;

/// The digest of a generation's entries; `None` if it was told to stop.
pub(super) async fn digest_of(
    store: &dyn Store,
    projector: &dyn Projector,
    generation: i64,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<Option<EntryDigest>, StoreError> {
    let mut digest = EntryDigest::default();
    let mut scan = Scan::all(projector.entries());
    loop {
        let page = store.scan(&scan).await?;
        for row in page.rows.iter().filter(|row| row.int(GENERATION) == Some(generation)) {
            let entry = ProjectionEntry::of(Some(row))?;
            if let Some(content) = &entry.content {
                let source = row.get_text(SOURCE)?;
                let order = if projector.row_lookup().is_some() { 0 } else { entry.order };
                digest.add(row.tenant(), source, order, content);
            }
        }
        let Some(next) = page.next else { return Ok(Some(digest)) };
        if !go_on() {
            return Ok(None);
        }
        scan = scan.after(next).map_err(|error| misuse(&error))?;
    }
}

/// The digest that the entries of the source would have.
pub(super) async fn digest_of_source(
    store: &dyn Store,
    projector: &dyn Projector,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<Option<EntryDigest>, StoreError> {
    let mut digest = EntryDigest::default();
    let mut scan = Scan::all(projector.source());
    loop {
        let page = store.scan(&scan).await?;
        for row in &page.rows {
            let change = projector.change_of(row);
            if let Some(content) = change.content {
                let content =
                    content.into_iter().filter(|(_, value): &(String, Value)| !value.is_null()).collect();
                digest.add(row.tenant(), &change.source, change.order, &content);
            }
        }
        let Some(next) = page.next else { return Ok(Some(digest)) };
        if !go_on() {
            return Ok(None);
        }
        scan = scan.after(next).map_err(|error| misuse(&error))?;
    }
}
