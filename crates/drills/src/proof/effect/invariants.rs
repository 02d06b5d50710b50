//! Invariants of effects, checked on the stored rows and the log.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse::resource::key_text;

use crate::harness::invariants::{CheckScope, LoggedChange};

/// States in which the server still has something to do.
const UNSETTLED: [&str; 4] = ["pending", "sending", "retrying", "uncertain"];

/// I2, I3 and I4: each effect is a path through its states, each claim raises the attempt by one, and the row is where the log
/// ended. An effect that is parked or cancelled is without doubt. An unsettled effect is due, or a person was told of it.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let mut logged = scope.events(scope.resource).await?;
    for row in scope.rows(scope.table()?).await? {
        let key = key_text(row.key());
        let events = logged.remove(&key).with_context(|| format!("{row} is not in the log"))?;
        let (status, attempt) = last_state(&key, &events)?;
        let status =
            status.with_context(|| format!("{row} is stored, and the log says that it was deleted"))?;
        let stored = row.text("status").unwrap_or_default().to_ascii_lowercase();
        ensure!(stored == status, "{key} is stored as {stored}, and the log ends with {status}");
        ensure!(row.int("attempt") == Some(attempt), "{attempt} attempts are in the log of {row}");
        if ["parked", "cancelled"].contains(&status) {
            ensure!(row.bool("doubt") == Some(false), "{row} may have been applied");
        }
        if UNSETTLED.contains(&status) {
            let is_known = row.time("due_at").is_some() || row.time("stuck_at").is_some();
            ensure!(is_known, "{row} is not settled, and nothing will be done about it");
        }
    }
    for (key, events) in &logged {
        let (status, _) = last_state(key, events)?;
        ensure!(status.is_none(), "{key} is {status:?} in the log, and is not stored");
    }
    Ok(())
}

/// The state in which the events leave an effect and the number of its attempts; no state if it was deleted in the end.
fn last_state<'e>(key: &str, events: &'e [LoggedChange]) -> Result<(Option<&'e str>, i64)> {
    let (mut status, mut attempt) = (None, 0);
    for event in events {
        let by_hand = event.data["by"] == json!("hand");
        let what = || format!("{} of {key} at {}, after {status:?}: {}", event.name, event.at, event.data);
        let fits = match (status, event.name.as_str()) {
            (None, "pending") => !by_hand,
            (Some("parked" | "retrying" | "uncertain"), "pending") => by_hand,
            (Some("pending" | "retrying" | "uncertain"), "sending") => true,
            (Some("sending"), "delivered" | "retrying" | "uncertain" | "parked") => !by_hand,
            (Some("uncertain"), "delivered" | "retrying" | "uncertain" | "parked") => true,
            // Without an attempt: its address is forbidden, or it has expired.
            (Some("pending" | "retrying"), "parked" | "uncertain") => !by_hand,
            (Some("parked"), "delivered" | "parked") => by_hand,
            (Some("pending" | "retrying" | "parked"), "cancelled") => by_hand,
            (Some("delivered" | "cancelled"), "forgotten") => true,
            // What follows from an outcome was done later.
            (Some("delivered" | "parked" | "uncertain"), "settled") => true,
            _ => false,
        };
        ensure!(fits, "{}", what());
        if event.name == "sending" {
            attempt += 1;
            ensure!(event.data["attempt"] == json!(attempt), "{}: attempt {attempt} is next", what());
        }
        (status, attempt) = match event.name.as_str() {
            "forgotten" => (None, 0),
            "settled" => (status, attempt),
            name => (Some(name), attempt),
        };
    }
    Ok((status, attempt))
}
