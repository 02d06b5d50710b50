//! What must hold of leases, on what is stored.

use anyhow::{Result, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::Time;

use crate::harness::invariants::CheckScope;

/// A lease is acquired when it is free or has ended, and each time under the next epoch. It is renewed before its end, under the
/// same epoch. What is stored is where the log ended.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    for (key, changes) in scope.histories(scope.sibling("")?, &[]).await? {
        let (mut holder, mut epoch, mut end) = (Json::Null, 0_i64, None::<Time>);
        for change in &changes {
            let (at, row) = (change.at, &change.data["row"]);
            let what = || format!("{} of {key} at {at}: {row}; it was {holder}'s until {end:?}", change.name);
            match change.name.as_str() {
                "acquired" => {
                    ensure!(holder.is_null() || end.is_some_and(|end| end <= at), "{}", what());
                    epoch += 1;
                }
                "renewed" => ensure!(end.is_some_and(|end| end > at), "{}", what()),
                "released" => {}
                _ => bail!("{}: no lease does that", what()),
            }
            ensure!(row["epoch"] == json!(epoch), "{}: the epoch is {epoch}", what());
            let released = change.name == "released";
            (holder, end) = if released {
                (Json::Null, None)
            } else {
                (row["holder"].clone(), change.time("expires_at")?)
            };
        }
    }
    Ok(())
}
