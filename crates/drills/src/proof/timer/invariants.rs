//! What must hold of timers, on what is stored.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse_store::Time;

use crate::harness::invariants::CheckScope;

/// Each release is of the due time that the timer had just then, once, and not early. A timer that is cancelled was set. What is
/// stored is where the log ended.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    for (key, changes) in scope.histories(scope.sibling("")?, &[]).await? {
        let (mut due, mut fired): (Option<Time>, i64) = (None, 0);
        for change in &changes {
            let what = || format!("{} of {key} at {}: {}", change.name, change.at, change.data);
            match change.name.as_str() {
                "fired" => {
                    let released =
                        change.data["due_at"].as_str().context("a release without its due time")?;
                    let released: Time = released.parse()?;
                    ensure!(due == Some(released), "{}: it was due at {due:?}", what());
                    ensure!(released <= change.at, "{}: that is early", what());
                    fired += 1;
                }
                "cancelled" => ensure!(due.is_some(), "{}: it was not set", what()),
                _ => {}
            }
            ensure!(
                change.data["row"]["fired"] == json!(fired),
                "{}: {fired} releases are in the log",
                what()
            );
            due = change.time("due_at")?;
        }
    }
    Ok(())
}
