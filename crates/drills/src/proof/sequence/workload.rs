//! I09 in simulation: numbers that are taken, leased and put to subjects, and spans of time for ids.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::{Scan, Time, Value};

use crate::conformance::CaseFuture;
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::store_client::{same, scan};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "sequence",
    blueprint: r#"
[house]
name = "simulation"

[sequence.ticket]
kind  = "counter"
key   = { desk = "int" }
lease = "2s"

[sequence.invoice_no]
kind = "gapless"
key  = { year = "int" }

[sequence.order_id]
kind          = "time"
worker_bits   = 2
sequence_bits = 4
ahead         = "500ms"
lease         = "2s"
"#,
    resource: "ticket",
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const DESKS: u64 = 2;
/// Fewer than there are calls, so that many ask for a number that their subject has already.
const SUBJECTS: u64 = 60;

async fn act(client: &mut SimulatedClient) {
    let desk = [Value::from(client.below(DESKS))];
    let count = 1 + client.below(4);
    let name = client.name.clone();
    let known = client.memory.clone();
    let mine = json!({"holder": name, "epoch": known["epoch"]});
    match (client.below(10), known["worker"].as_i64()) {
        (0..=2, _) => drop(client.call("ticket.next", &desk, json!({"count": count}), None).await),
        (3, _) => {
            let input = json!({"holder": name, "count": count});
            drop(client.call("ticket.lease", &desk, input, None).await);
        }
        (4..=6, _) => {
            let subject = json!({"subject": format!("s{}", client.below(SUBJECTS))});
            drop(client.call("invoice_no.take", &[2026.into()], subject, None).await);
        }
        (7, _) => drop(client.call("order_id.next", &[0.into()], json!({"count": 20}), None).await),
        (8, Some(worker)) => {
            client.memory = Json::Null;
            drop(client.call("order_id.release", &[worker.into()], mine, None).await);
        }
        (_, Some(worker)) => drop(client.call("order_id.reserve", &[worker.into()], mine, None).await),
        (_, None) => {
            let leased = client.call("order_id.lease", &[], json!({"holder": name}), None).await;
            if let CallOutcome::Done(answer) = leased {
                client.memory = json!({"worker": answer.body["worker"], "epoch": answer.body["epoch"]});
            }
        }
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // The last number of each counter, the mark of each worker id, and who has a number.
    let mut lasts: BTreeMap<(String, String), i64> = BTreeMap::new();
    let mut marks: BTreeMap<String, Time> = BTreeMap::new();
    let mut subjects = BTreeSet::new();
    let int = |json: &Json, name: &str| json[name].as_i64().with_context(|| format!("no {name} in {json}"));
    let time = |json: &Json| -> Result<Time> { Ok(json.as_str().context("no time")?.parse()?) };
    for record in end.records().await? {
        for event in &record.events {
            let row = &event.data["row"];
            let what = || format!("{} of {} at {}: {}", event.name, record.key, record.at, event.data);
            let range = match event.name.as_str() {
                "ticket.given" => {
                    let last = int(row, "last")?;
                    Some((last - int(&event.data, "count")? + 1, last))
                }
                "ticket.leased" => Some((int(row, "first")?, int(row, "last")?)),
                "invoice_no.taken" => {
                    let subject = row["subject"].as_str().context("no subject")?.to_owned();
                    ensure!(subjects.insert(subject), "{}: it has a number already", what());
                    Some((int(row, "number")?, int(row, "number")?))
                }
                // Order: the spans of a worker id follow each other, whoever they are for and whatever the clocks said.
                "order_id.leased" | "order_id.reserved" | "order_id.drawn" => {
                    let (from, until) = (time(&row["reserved_from"])?, time(&row["reserved_until"])?);
                    let before = marks.insert(record.key.clone(), until);
                    ensure!(
                        from < until && before.is_none_or(|mark| mark <= from),
                        "{}: the mark was {before:?}",
                        what()
                    );
                    None
                }
                _ => None,
            };
            if let Some((first, last)) = range {
                let counter = (record.resource.clone(), record.key.clone());
                let before = lasts.insert(counter, last).unwrap_or(0);
                ensure!(first == before + 1 && last >= first, "{}: the last was {before}", what());
            }
        }
    }
    // Conservation: what is stored is where the log ended, and each number has its subject.
    for (resource, table, key) in [("ticket", "tickets", "desk"), ("invoice_no", "invoice_nos", "year")] {
        let scanned = Scan::of(end.sound.table(table)?, &end.sound.tenant);
        for row in scan(end.sound.house.store().as_ref(), scanned).await? {
            let key = row.int(key).context("a counter without a key")?.to_string();
            let last = lasts.get(&(resource.to_owned(), key));
            same(&row.to_string(), &row.int("last"), &last.copied())?;
        }
    }
    let taken = Scan::of(end.sound.table("invoice_nos_taken")?, &end.sound.tenant);
    let taken = scan(end.sound.house.store().as_ref(), taken).await?;
    let mut numbers: Vec<i64> = taken.iter().filter_map(|row| row.int("number")).collect();
    numbers.sort_unstable();
    let last = lasts.get(&("invoice_no".to_owned(), "2026".to_owned())).copied().unwrap_or(0);
    same("the numbers that were taken", &numbers, &(1..=last).collect())
}
