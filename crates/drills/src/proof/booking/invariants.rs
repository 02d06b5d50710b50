//! What must hold of bookings and units, on what is stored.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use statehouse::Resource;
use statehouse_store::{Row, Time};

use crate::harness::invariants::CheckScope;
use crate::harness::store_client::same;

/// Everything below.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    check_rows(scope).await?;
    check_log(scope).await
}

/// The group and the unit, as one text.
fn unit_of(units: &Resource, row: &Row, unit: &Json) -> String {
    let group = units.key.split_last().map_or(&[][..], |(_, group)| group);
    let group: Vec<String> = group.iter().map(|(name, _)| format!("{:?}", row.get(name))).collect();
    format!("{} {unit}", group.join(" "))
}

/// I1 and I2: the units of bookings in progress are held by them, those of confirmed ones are sold to them, and no others are.
pub(crate) async fn check_rows(scope: &CheckScope<'_>) -> Result<()> {
    let units = scope.sibling("")?;
    let bookings = scope.sibling("booking")?.tables.first().context("bookings without a table")?;
    let mut owners: BTreeMap<String, (String, &str)> = BTreeMap::new();
    for row in scope.rows(bookings).await? {
        let state = match row.text("state") {
            Some("IN_PROGRESS") => "HELD",
            Some("CONFIRMED") => "SOLD",
            _ => continue,
        };
        let id = row.text("booking_id").unwrap_or_default();
        for unit in row.json("units").and_then(Json::as_array).context("a booking without units")? {
            let unit = unit_of(units, &row, unit);
            let other = owners.insert(unit.clone(), (id.to_owned(), state));
            ensure!(other.is_none(), "unit {unit} belongs to {id} and to {other:?}");
        }
    }
    for row in scope.rows(scope.table()?).await? {
        let unit = unit_of(units, &row, &row.key().last().context("a unit without a key")?.to_json());
        let owner = owners.remove(&unit);
        let stored = row.text("booking_id").map(|id| (id.to_owned(), row.text("state").unwrap_or_default()));
        same(&format!("the owner of unit {unit}"), &stored, &owner)?;
        ensure!(owner.is_some() || row.text("state") == Some("AVAILABLE"), "unit {unit}: {row}");
    }
    ensure!(owners.is_empty(), "bookings have units that do not exist: {owners:?}");
    Ok(())
}

/// I3 and I4: each booking is a path through its states, with an event for each of its versions. It is extended and confirmed
/// before its end, and expires at its end or later.
pub(crate) async fn check_log(scope: &CheckScope<'_>) -> Result<()> {
    for (booking, changes) in scope.histories(scope.sibling("booking")?, &[]).await? {
        let mut before: Option<(String, Time)> = None;
        for change in &changes {
            let in_time = before.as_ref().is_some_and(|(_, end)| change.at < *end);
            let fits = match (before.as_ref().map(|(state, _)| state.as_str()), change.name.as_str()) {
                (None, "held") => true,
                (Some("IN_PROGRESS"), "extended" | "confirmed") => in_time,
                (Some("IN_PROGRESS"), "expired") => !in_time,
                (Some("IN_PROGRESS" | "CONFIRMED"), "cancelled") => true,
                _ => false,
            };
            ensure!(fits, "{} of {booking} at {}, after {before:?}", change.name, change.at);
            let state = change.data["row"]["state"].as_str().context("a booking without a state")?;
            let end = change.time("expires_at")?.context("a booking without an end")?;
            before = Some((state.to_owned(), end));
        }
    }
    Ok(())
}
