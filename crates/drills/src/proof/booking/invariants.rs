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

/// Whether bookings keep their units when their time is up.
pub(crate) fn keeps_units(bookings: &Resource) -> bool {
    let machine = bookings.machine.as_ref().map(|machine| machine.graph());
    let mut edges = machine.iter().flat_map(|graph| &graph.edges);
    edges.any(|edge| edge.transition == "expire" && edge.to.as_deref() == Some("OVERDUE"))
}

/// I1, I2 and I6: the units of bookings in progress or overdue are held by them, those of confirmed ones are sold to them, and no
/// others are. What is retired belongs to no booking.
pub(crate) async fn check_rows(scope: &CheckScope<'_>) -> Result<()> {
    let units = scope.sibling("")?;
    let bookings = scope.sibling("booking")?.tables.first().context("bookings without a table")?;
    let mut owners: BTreeMap<String, (String, &str)> = BTreeMap::new();
    for row in scope.rows(bookings).await? {
        let state = match row.text("state") {
            Some("IN_PROGRESS" | "OVERDUE") => "HELD",
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
        let is_idle = matches!(row.text("state"), Some("AVAILABLE" | "RETIRED"));
        ensure!(owner.is_some() != is_idle, "unit {unit}: {row}");
    }
    ensure!(owners.is_empty(), "bookings have units that do not exist: {owners:?}");
    Ok(())
}

/// I3 and I4: each booking is a path through its states, with an event for each of its versions. It is extended and confirmed
/// before its end, and expires or becomes overdue at its end or later. One that keeps its units can be confirmed at any time.
pub(crate) async fn check_log(scope: &CheckScope<'_>) -> Result<()> {
    let bookings = scope.sibling("booking")?;
    let keeps_units = keeps_units(bookings);
    for (booking, changes) in scope.histories(bookings, &[]).await? {
        let mut before: Option<(String, Time)> = None;
        for change in &changes {
            let in_time = before.as_ref().is_some_and(|(_, end)| change.at < *end);
            let fits = match (before.as_ref().map(|(state, _)| state.as_str()), change.name.as_str()) {
                (None, "held") => true,
                (Some("IN_PROGRESS"), "extended") => in_time,
                (Some("IN_PROGRESS"), "confirmed") => in_time || keeps_units,
                (Some("IN_PROGRESS"), "expired" | "overdue") => !in_time,
                (Some("OVERDUE"), "confirmed") => keeps_units,
                (Some("IN_PROGRESS" | "OVERDUE" | "CONFIRMED"), "cancelled") => true,
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
