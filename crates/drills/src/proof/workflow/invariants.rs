//! What must hold of workflows, on what is stored.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::product::workflow::{ChartTransition, StateChart};
use statehouse::resource::key_text;
use statehouse_store::{Row, Value};

use crate::harness::invariants::{CheckScope, LoggedChange};

const START: &str = "start";
const STARTED: &str = "started";

/// One transition of a row, as the log has it.
struct LoggedTransition<'a> {
    name: &'a str,
    from: Option<String>,
    to: String,
    seq: i64,
}

/// W1: the log of each row is a path in the declared graph. W2: `seq` counts it, and the history has the same. W3: each transition has
/// its effects and jobs once, and there are no others. W4: a row is due if and only if its state has a timer, and no timer fires early.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let resource = scope.sibling("")?;
    let chart = resource.state_chart.as_ref().context("it is no workflow")?;
    let mut outputs = Outputs::read(scope, chart).await?;
    let mut history = history_of(scope, chart).await?;
    for (key, changes) in scope.histories(resource, &[]).await? {
        let mut entries = history.remove(&key).unwrap_or_default();
        let mut before: Option<&LoggedChange> = None;
        for (change, seq) in changes.iter().zip(1..) {
            let what = || format!("{} of {key} at {}: {}", change.name, change.at, change.data);
            let step = step_of(chart, before, change, seq).with_context(what)?;
            check_due(chart, before, change, &step).with_context(what)?;
            if chart.has_history {
                let entry = entries.remove(&seq).with_context(|| format!("{}: no history", what()))?;
                check_entry(&entry, &step, change).with_context(what)?;
            }
            outputs.take(chart, &key, &step).with_context(what)?;
            before = Some(change);
        }
        ensure!(entries.is_empty(), "{key} has a history that the log does not have: {entries:?}");
    }
    ensure!(history.is_empty(), "there is a history of rows that do not exist: {history:?}");
    outputs.check_empty()
}

/// The state before and after a change, which a declared transition has to connect.
fn step_of<'a>(
    chart: &StateChart,
    before: Option<&LoggedChange>,
    change: &'a LoggedChange,
    seq: i64,
) -> Result<LoggedTransition<'a>> {
    let row = &change.data["row"];
    let to = row["state"].as_str().context("a row without a state")?.to_owned();
    ensure!(row["seq"] == json!(seq), "it is the transition {seq}");
    let from = before.and_then(|before| before.data["row"]["state"].as_str()).map(str::to_owned);
    let known = match (&from, change.name.as_str()) {
        (None, STARTED) => to == chart.initial,
        (Some(from), "moved") => chart.moved.iter().any(|(old, new)| old == from && *new == to),
        (Some(from), name) => chart
            .transition(name)
            .is_some_and(|one| one.from.contains(from) && one.to.as_deref().unwrap_or(from) == to),
        (None, _) => false,
    };
    ensure!(known, "no transition leads from {from:?} to {to}");
    let name = if change.name == STARTED { START } else { &change.name };
    ensure!(row["last_transition"] == json!(name), "the row says otherwise");
    Ok(LoggedTransition { name, from, to, seq })
}

fn check_due(
    chart: &StateChart,
    before: Option<&LoggedChange>,
    change: &LoggedChange,
    step: &LoggedTransition<'_>,
) -> Result<()> {
    let timer = chart.timer_of(&step.to);
    let due = change.time("due_at")?;
    ensure!(
        due.is_some() == timer.is_some(),
        "it is due at {due:?}, and the timer of the state is {timer:?}"
    );
    let fired = chart.transition(step.name).and_then(|one| one.after);
    if fired.is_some() {
        let due = before.map(|before| before.time("due_at")).transpose()?.flatten();
        ensure!(due.is_some_and(|due| due <= change.at), "the timer fired early: it was due at {due:?}");
    }
    Ok(())
}

/// The rows of the history by key and number.
async fn history_of(
    scope: &CheckScope<'_>,
    chart: &StateChart,
) -> Result<BTreeMap<String, BTreeMap<i64, Row>>> {
    let mut history: BTreeMap<String, BTreeMap<i64, Row>> = BTreeMap::new();
    if !chart.has_history {
        return Ok(history);
    }
    let table = scope.house.schema().table(&format!("{}_history", chart.name)).context("no history")?;
    for row in scope.rows(table).await? {
        let seq = row.int("seq").context("an entry without a number")?;
        let key = row.key().iter().take(row.key().len() - 1);
        history.entry(key_text(key)).or_default().insert(seq, row);
    }
    Ok(history)
}

fn check_entry(entry: &Row, step: &LoggedTransition<'_>, change: &LoggedChange) -> Result<()> {
    let text = |name: &str| entry.text(name).map(str::to_owned);
    let has = (text("transition"), text("from"), text("to"));
    let told = (Some(step.name.to_owned()), step.from.clone(), Some(step.to.clone()));
    ensure!(has == told, "the history has {entry}");
    let row = &change.data["row"];
    for (name, column) in [("by", "last_by"), ("operation", "last_operation")] {
        let value = entry.get(name).map_or(Json::Null, Value::to_json);
        ensure!(value == row[column], "the history has {name} = {value}: {row}");
    }
    ensure!(entry.version() == 1, "the history was changed: {entry}");
    Ok(())
}

/// The effects and jobs under keys of the workflow, by resource and key.
struct Outputs(BTreeMap<(String, String), usize>);

impl Outputs {
    async fn read(scope: &CheckScope<'_>, chart: &StateChart) -> Result<Outputs> {
        let named = |one: &ChartTransition| {
            one.sends.iter().chain(&one.jobs).map(|(name, _)| name.clone()).collect::<Vec<_>>()
        };
        let mut resources: Vec<String> = chart.transitions.iter().flat_map(named).collect();
        resources.sort();
        resources.dedup();
        let mut outputs = BTreeMap::new();
        let lead = format!("{}:", chart.name);
        for resource in resources {
            for (key, changes) in scope.events(&resource).await? {
                let first = ["pending", "enqueued"];
                let count = changes.iter().filter(|change| first.contains(&&*change.name)).count();
                if key.starts_with(&lead) {
                    outputs.insert((resource.clone(), key), count);
                }
            }
        }
        Ok(Outputs(outputs))
    }

    /// Takes out what a transition has to have caused.
    fn take(&mut self, chart: &StateChart, key: &str, step: &LoggedTransition<'_>) -> Result<()> {
        let Some(declared) = chart.transition(step.name) else { return Ok(()) };
        let output = key_text([&Value::from(chart.output_key(key, step.seq))]);
        for (resource, _) in declared.sends.iter().chain(&declared.jobs) {
            let count = self.0.remove(&(resource.clone(), output.clone()));
            let first =
                if declared.sends.iter().any(|(send, _)| send == resource) { "sent" } else { "enqueued" };
            ensure!(count == Some(1), "{resource} {output} was {first} {count:?} times");
        }
        Ok(())
    }

    fn check_empty(&self) -> Result<()> {
        ensure!(self.0.is_empty(), "no transition caused {:?}", self.0);
        Ok(())
    }
}
