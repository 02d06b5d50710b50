//! I03 in simulation: timers that are set, set anew and cancelled while several scanners release them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::{Time, Value};

use crate::conformance::Verdict;
use crate::harness::simulation::{Acting, Client, Course, End};

pub(crate) const COURSE: Course = Course {
    archetype: "timer",
    blueprint: r#"
[house]
name = "simulation"

[timer.tick]
key    = { id = "int" }
shards = 2
missed = "all"
"#,
    resource: "tick",
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> Acting<'_> { Box::pin(act(client)) },
    check: |end| -> Verdict<'_> { Box::pin(check(end)) },
};

const TIMERS: u64 = 5;

async fn act(client: &mut Client) {
    let key = [Value::from(client.below(TIMERS))];
    let after = 100 * client.below(20);
    let input = match client.below(8) {
        0..=3 => json!({"after_ms": after}),
        4 => json!({"after_ms": after, "every_ms": 1_000}),
        5 => {
            let known = client.read().call("tick.read", &key, json!({}), None).await;
            let version = known.ok().and_then(|answer| answer.version);
            return drop(client.call("tick.set", &key, json!({"after_ms": after}), version).await);
        }
        _ => return drop(client.call("tick.cancel", &key, json!({}), None).await),
    };
    client.call("tick.set", &key, input, None).await;
}

async fn check(end: &End) -> Result<()> {
    // Order and exactly once: each release is of the due time that the timer had just then, and not early.
    let mut due: BTreeMap<String, (Option<Time>, i64)> = BTreeMap::new();
    let time = |json: &Json| json.as_str().map(str::parse::<Time>).transpose();
    for record in end.records().await? {
        for event in &record.events {
            let row = &event.data["row"];
            let (before, fired) = due.get(&record.key).copied().unwrap_or((None, 0));
            let what = || format!("{} of {} at {}: {}", event.name, record.key, record.at, event.data);
            let mut count = fired;
            match event.name.as_str() {
                "tick.fired" => {
                    let released = time(&event.data["due_at"])?.context("a release without its due time")?;
                    ensure!(before == Some(released), "{}: it was due at {before:?}", what());
                    ensure!(released <= record.at, "{}: that is early", what());
                    count += 1;
                    ensure!(row["fired"] == json!(count), "{}: {fired} were counted before", what());
                }
                "tick.cancelled" => ensure!(before.is_some(), "{}: it was not set", what()),
                _ => {}
            }
            due.insert(record.key.clone(), (time(&row["due_at"])?, count));
        }
    }
    // Conservation: what is stored is where the log ended, and nothing that is due is left.
    let table = end.sound.table("ticks")?;
    let scan = statehouse_store::Scan::of(table, &end.sound.tenant);
    for row in crate::harness::client::scan(end.sound.house.store().as_ref(), scan).await? {
        let key = row.int("id").context("a timer without a key")?.to_string();
        let stored = (row.time("due_at"), row.int("fired").unwrap_or(0));
        ensure!(due.get(&key) == Some(&stored), "{row}; the log ends with {:?}", due.get(&key));
        let left = row.time("due_at").is_some_and(|at| at <= end.sound.house.clock().now());
        ensure!(!left, "it is due and was not released: {row}");
    }
    Ok(())
}
