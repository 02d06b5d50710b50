//! What must hold of entities, on what is stored.

use anyhow::{Result, ensure};

use crate::harness::invariants::CheckScope;

/// Each version of a row has exactly one writer, a row begins by being created, and one that is deleted is changed by nothing but
/// its restoration. What is stored is where the log ended. Hot fields have rows and versions of their own.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    for (key, changes) in scope.histories(scope.sibling("")?, &["counted"]).await? {
        let mut before = None;
        for change in &changes {
            let fits = match before {
                None => change.name == "created",
                Some("deleted") => change.name == "restored",
                Some(_) => change.name != "created",
            };
            ensure!(fits, "{} of {key} at {}, after {before:?}", change.name, change.at);
            before = Some(change.name.as_str());
        }
    }
    Ok(())
}
