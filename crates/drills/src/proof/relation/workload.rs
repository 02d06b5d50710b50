//! A02 in simulation: edges that come and go, with the lists and counts at both ends.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse_store::Value;

use crate::conformance::Verdict;
use crate::harness::simulation::{Acting, Client, Course, End};
use crate::proof::relation::cases::check_rows;

pub(crate) const COURSE: Course = Course {
    archetype: "relation",
    blueprint: r#"
[house]
name = "simulation"

[relation.follow]
from         = { follower = "int" }
to           = { followee = "int" }
fields       = { note = "text?" }
buckets      = 2
"#,
    resource: "follow",
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> Acting<'_> { Box::pin(act(client)) },
    check: |end| -> Verdict<'_> { Box::pin(check(end)) },
};

const PEOPLE: u64 = 3;

async fn act(client: &mut Client) {
    let edge = [Value::from(client.below(PEOPLE)), Value::from(client.below(PEOPLE))];
    match client.below(5) {
        0 | 1 => drop(client.call("follow.add", &edge, json!({}), None).await),
        2 => {
            let note = json!({"note": client.name});
            drop(client.call("follow.add", &edge, note, None).await);
        }
        _ => drop(client.call("follow.remove", &edge, json!({}), None).await),
    }
}

async fn check(end: &End) -> Result<()> {
    // Order: an edge is removed if it was there, and added if it was not.
    let mut there: BTreeMap<String, bool> = BTreeMap::new();
    for record in end.records().await? {
        for event in &record.events {
            let is_there = there.entry(record.key.clone()).or_default();
            let (fits, after) = match event.name.as_str() {
                "follow.added" => (!*is_there, true),
                "follow.changed" => (*is_there, true),
                "follow.removed" => (*is_there, false),
                _ => continue,
            };
            ensure!(fits, "{} of {} at {}: it was there: {is_there}", event.name, record.key, record.at);
            *is_there = after;
        }
    }
    // Conservation: lists and counts are the edges, and the edges are where the log ended.
    let edges = check_rows(&end.sound).await?;
    let told = there.values().filter(|is_there| **is_there).count();
    ensure!(edges.len() == told, "{} edges are stored, and {told} in the log", edges.len());
    Ok(())
}
