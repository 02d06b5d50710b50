//! Standard drills of machines, derived from their graphs and run for every machine of every specimen.
//!
//! Rows are brought into a state by the actions that come before ([`statehouse::action::Action::after`]), with sample inputs; an
//! input that is also a column takes what the row has. Each scenario is a tenant of its own. Each drill ends with the check that
//! the log of every row is a path in its graph.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use statehouse::action::{Action, WAIT};
use statehouse::archetypes::{ARCHETYPES, Archetype};
use statehouse::declare::machine::{Edge, EdgeKind, Graph, Machine};
use statehouse::{Answer, Blueprint, Code, Operation, Refusal, Request, Resource};
use statehouse_store::{Address, Clock as _, Consistency, ManualClock, Row, Scan, Step, Time, Type, Value};

use super::machines;
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::log_paths::check_log_paths;
use crate::harness::sample_inputs;
use crate::harness::store_client::{pause, scan};
use crate::harness::tenant_client::TenantClient;

pub(crate) const CASES: &[Case] = cases! {
    machines {
        of_two_racing_transitions_the_graph_allows_what_happens_1(12),
        of_two_racing_transitions_the_graph_allows_what_happens_2(12),
        of_two_racing_transitions_the_graph_allows_what_happens_3(12),
        of_two_racing_transitions_the_graph_allows_what_happens_4(12),
        a_repeated_transition_returns_the_first_answer_1(12),
        a_repeated_transition_returns_the_first_answer_2(12),
        a_transition_that_is_not_in_the_graph_is_refused(3),
        a_deadline_holds_to_the_microsecond(12),
        late_sweepers_fire_once(12),
    }
};

/// Resources to whose actions sample inputs do not lead, and what repeats those actions instead.
const NOT_LED: [(&str, &str); 2] = [
    ("stock", "inventory::a_movement_is_written_once"),
    ("pay_attempt", "the cases of `effect`, whose actions these are"),
];

/// The archetypes whose machines a drill is about: those with machines, dealt out to parts, because a drill of all of them would
/// take minutes on a slow engine.
#[derive(Clone, Copy)]
struct DrillPart {
    number: usize,
    parts: usize,
}

impl DrillPart {
    const WHOLE: DrillPart = DrillPart { number: 1, parts: 1 };

    fn of(number: usize, parts: usize) -> DrillPart {
        DrillPart { number, parts }
    }

    /// The keywords of its archetypes.
    fn keywords(self) -> Result<BTreeSet<&'static str>> {
        let mut keywords = BTreeSet::new();
        for archetype in ARCHETYPES.iter().filter(|archetype| archetype.is_declarable()) {
            let blueprint = Blueprint::read("specimen", &archetype.specimen_blueprint())?;
            let resources = statehouse::resource::declare(&blueprint)?;
            if resources
                .iter()
                .any(|one| one.machine.is_some() && one.archetype.keyword() == archetype.keyword)
            {
                keywords.insert(archetype.keyword);
            }
        }
        ensure!(keywords.len() >= 4, "only {keywords:?} have machines");
        Ok(keywords.into_iter().skip(self.number - 1).step_by(self.parts).collect())
    }
}

/// The specimens of these archetypes and of those that they depend on, in one house.
fn specimens(keywords: &BTreeSet<&'static str>) -> String {
    let is_meant = |archetype: &&&Archetype| keywords.contains(archetype.keyword);
    let blueprints: Vec<String> =
        ARCHETYPES.iter().filter(is_meant).map(|archetype| archetype.specimen_blueprint()).collect();
    let is_needed = |archetype: &&&Archetype| blueprints.iter().any(|text| text.contains(archetype.specimen));
    ARCHETYPES.iter().filter(is_needed).map(|archetype| archetype.specimen).collect()
}

/// A house over an empty namespace, whose clock the drill moves.
struct MachineDrill {
    client: TenantClient,
    clock: ManualClock,
    keywords: BTreeSet<&'static str>,
    scenarios: usize,
}

/// One tenant's row of a resource.
struct Scenario<'a> {
    client: TenantClient,
    clock: &'a ManualClock,
    resource: &'a Resource,
}

impl MachineDrill {
    async fn open(namespace: &dyn TestNamespace, part: DrillPart) -> Result<MachineDrill> {
        let clock = ManualClock::at(Time::from_millis(1_700_000_000_000));
        let keywords = part.keywords()?;
        let text = specimens(&keywords);
        let client = TenantClient::open_at(namespace, &text, Arc::new(clock.clone())).await?;
        Ok(MachineDrill { client, clock, keywords, scenarios: 0 })
    }

    fn machines(&self) -> Vec<(Resource, Arc<Machine>)> {
        let is_meant = |resource: &&Resource| self.keywords.contains(resource.archetype.keyword());
        let resources = self.client.house.resources().iter().filter(is_meant);
        resources.filter_map(|resource| Some((resource.clone(), resource.machine.clone()?))).collect()
    }

    fn scenario<'a>(&'a mut self, resource: &'a Resource) -> Result<Scenario<'a>> {
        self.scenarios += 1;
        let client = self.client.for_tenant(&format!("tenant{}", self.scenarios))?;
        Ok(Scenario { client, clock: &self.clock, resource })
    }

    async fn finish(&self) -> Result<()> {
        let house = &self.client.house;
        check_log_paths(house, house.store().as_ref()).await
    }
}

impl Scenario<'_> {
    async fn row(&self) -> Result<Option<Row>> {
        self.row_at(&sample_inputs::key(self.resource, 1)).await
    }

    /// The only row of the tenant that has a deadline. Actions that choose a row do not choose the same one on every engine.
    async fn due_row(&self, deadline: &str) -> Result<Row> {
        let table = self.resource.tables.first().context("a resource without a table")?;
        let rows = Scan::of(table, &self.client.tenant);
        let mut rows = scan(self.client.house.store().as_ref(), rows).await?;
        rows.retain(|row| row.time(deadline).is_some());
        ensure!(rows.len() == 1, "{} rows with a deadline: {rows:?}", rows.len());
        rows.pop().context("no row")
    }

    /// The row that the actions so far led to: the one with a deadline, if there is one, or else that of the sample key.
    async fn subject(&self, machine: &Machine) -> Result<Vec<Value>> {
        let due = match machine.def().deadline() {
            Some(deadline) => self.due_row(deadline.column).await.ok(),
            None => None,
        };
        Ok(due.map_or_else(|| sample_inputs::key(self.resource, 1), |row| row.key().to_vec()))
    }

    async fn row_at(&self, key: &[Value]) -> Result<Option<Row>> {
        let table = self.resource.tables.first().context("a resource without a table")?;
        let key = key.iter().cloned();
        let address = Address::new(table, &self.client.tenant, key)?;
        let rows = self.client.house.store().get(&[address], Consistency::Strong).await?;
        Ok(rows.into_iter().next().flatten())
    }

    /// A sample request of an action. What the row says of an input is what a caller that has read it gives.
    async fn request(&self, action: &Action) -> Result<Request> {
        self.request_at(action, &sample_inputs::key(self.resource, 1)).await
    }

    async fn request_at(&self, action: &Action, key: &[Value]) -> Result<Request> {
        let house = &self.client.house;
        let mut request = sample_inputs::request(house.resources(), self.resource, action, 2);
        if !request.key.is_empty() {
            request.key = key.to_vec();
        }
        if let Some(row) = self.row_at(key).await? {
            for (name, value) in &mut request.input {
                // A document of the row is not what an action takes.
                let is_given = |stored: &&Value| !stored.is_null() && !matches!(stored, Value::Json(_));
                if let Some(stored) = row.get(name).filter(is_given) {
                    *value = stored.to_json();
                }
            }
        }
        Ok(request)
    }

    async fn call(&self, action: &Action, operation: Option<&str>) -> Result<Result<Answer, Refusal>> {
        let request = self.request(action).await?;
        let operation = operation.map_or_else(Operation::default, |id| Operation::under(id, &request));
        Ok(self.client.house.call(&self.client.tenant, request, operation).await)
    }

    /// Calls actions by their full names, in order.
    async fn follow(&self, path: &[String]) -> Result<()> {
        for name in path {
            if name == WAIT {
                self.clock.advance(Duration::from_secs(86_400));
                continue;
            }
            let house = &self.client.house;
            let (resource, action) = house.action(name)?;
            let request = match resource.name == self.resource.name {
                true => self.request(action).await?,
                false => sample_inputs::request(house.resources(), resource, action, 2),
            };
            let answer = house.call(&self.client.tenant, request, Operation::default()).await;
            answer.map_err(|refusal| anyhow::anyhow!("{name}: {refusal}"))?;
        }
        Ok(())
    }

    /// Lets the clock go on while calls that lost a race wait to be prepared again.
    async fn while_time_passes<T>(&self, calls: impl Future<Output = T>) -> T {
        let mut calls = std::pin::pin!(calls);
        loop {
            tokio::select! {
                done = &mut calls => return done,
                () = pause() => self.clock.advance(Duration::from_millis(1)),
            }
        }
    }

    async fn state(&self, graph: &Graph) -> Result<Option<String>> {
        Ok(self.row().await?.and_then(|row| row.text(&graph.column).map(str::to_owned)))
    }
}

/// Whether a call of an action takes an edge. A creation that is written by hand may answer a repetition of itself without a
/// write, so that of edges by hand only those of rows that exist count.
fn is_taken_by(edge: &Edge, action: &str) -> bool {
    let by_call = match edge.kind {
        EdgeKind::Call | EdgeKind::DeadlineOrCall => true,
        EdgeKind::ByHand => edge.from.is_some(),
        EdgeKind::Deadline | EdgeKind::Part => false,
    };
    by_call && edge.transition == action
}

/// Whether an action leaves a state.
fn leaves(graph: &Graph, action: &str, state: Option<&str>) -> bool {
    graph.edges.iter().any(|edge| edge.from.as_deref() == state && is_taken_by(edge, action))
}

/// Whether one of two actions leaves a state for one that the other leaves.
fn follows(graph: &Graph, first: &Action, second: &Action, state: Option<&str>) -> bool {
    [(first, second), (second, first)].into_iter().any(|(one, other)| {
        let mut taken = graph.edges.iter().filter(|edge| edge.from.as_deref() == state);
        taken.any(|edge| {
            is_taken_by(edge, &one.name)
                && edge.to.is_some()
                && leaves(graph, &other.name, edge.to.as_deref())
        })
    })
}

/// The actions that are transitions of the machine.
fn called<'a>(resource: &'a Resource, graph: &Graph) -> Vec<&'a Action> {
    let is_called = |action: &&Action| graph.edges.iter().any(|edge| is_taken_by(edge, &action.name));
    resource.actions.iter().filter(is_called).collect()
}

async fn of_two_racing_transitions_the_graph_allows_what_happens_1(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    race_transitions(namespace, DrillPart::of(1, 4)).await
}

async fn of_two_racing_transitions_the_graph_allows_what_happens_2(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    race_transitions(namespace, DrillPart::of(2, 4)).await
}

async fn of_two_racing_transitions_the_graph_allows_what_happens_3(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    race_transitions(namespace, DrillPart::of(3, 4)).await
}

async fn of_two_racing_transitions_the_graph_allows_what_happens_4(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    race_transitions(namespace, DrillPart::of(4, 4)).await
}

async fn race_transitions(namespace: &dyn TestNamespace, part: DrillPart) -> Result<()> {
    let mut drill = MachineDrill::open(namespace, part).await?;
    let mut races = 0;
    for (resource, machine) in drill.machines() {
        let graph = machine.graph();
        let actions = called(&resource, &graph);
        for (index, first) in actions.iter().copied().enumerate() {
            // Each pair once: neither call begins before the other.
            for second in actions.iter().copied().skip(index) {
                let scenario = drill.scenario(&resource)?;
                scenario.follow(&first.after).await?;
                let state = scenario.state(&graph).await?;
                if !leaves(&graph, &first.name, state.as_deref())
                    || !leaves(&graph, &second.name, state.as_deref())
                {
                    continue;
                }
                let version = scenario.row().await?.map_or(0, |row| row.version());
                let race = async { tokio::join!(scenario.call(first, None), scenario.call(second, None)) };
                let (one, other) = scenario.while_time_passes(race).await;
                let outcomes = [one?, other?];
                let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
                // A transition that finds nothing to do is done without a write.
                let idle = outcomes.iter().flatten().filter(|answer| answer.token.is_none()).count();
                let after = scenario.row().await?.map(|row| row.version());
                let checks = [first, second].iter().filter(|action| action.shape == "assert").count();
                // The versions of a row that is gone are not counted.
                let written = match after {
                    Some(after) => usize::try_from(after - version).unwrap_or(0),
                    None => 1 + usize::from(done == 2 && follows(&graph, first, second, state.as_deref())),
                };
                let what = format!("{}: {} and {} in {state:?}", resource.name, first.name, second.name);
                ensure!(
                    written <= done && done <= written + checks.max(idle),
                    "{what}: {done} done, {written} written"
                );
                races += 1;
            }
        }
    }
    ensure!(races > 2, "only {races} races");
    drill.finish().await
}

async fn a_repeated_transition_returns_the_first_answer_1(namespace: &dyn TestNamespace) -> Result<()> {
    repeat_transitions(namespace, DrillPart::of(1, 2)).await
}

async fn a_repeated_transition_returns_the_first_answer_2(namespace: &dyn TestNamespace) -> Result<()> {
    repeat_transitions(namespace, DrillPart::of(2, 2)).await
}

async fn repeat_transitions(namespace: &dyn TestNamespace, part: DrillPart) -> Result<()> {
    let mut drill = MachineDrill::open(namespace, part).await?;
    for (resource, machine) in drill.machines() {
        let graph = machine.graph();
        let mut repeated = 0;
        for action in called(&resource, &graph) {
            let scenario = drill.scenario(&resource)?;
            scenario.follow(&action.after).await?;
            let subject = scenario.subject(&machine).await?;
            let request = scenario.request_at(action, &subject).await?;
            let call = || {
                let operation = Operation::under("the operation", &request);
                scenario.client.house.call(&scenario.client.tenant, request.clone(), operation)
            };
            // Sample inputs do not lead everywhere.
            let Ok(first) = call().await else { continue };
            let version = scenario.row_at(&subject).await?.map(|row| row.version());
            let again = call().await.map_err(|refusal| anyhow::anyhow!("{}: {refusal}", action.name))?;
            ensure!(first.body == again.body, "{}: {} and then {}", action.name, first.body, again.body);
            let after = scenario.row_at(&subject).await?.map(|row| row.version());
            ensure!(version == after, "{} was done twice: {version:?}, {after:?}", action.name);
            repeated += 1;
        }
        let is_led = NOT_LED.iter().all(|(name, _)| *name != resource.name);
        ensure!(repeated > 0 || !is_led, "no action of {} was done", resource.name);
    }
    drill.finish().await
}

async fn a_transition_that_is_not_in_the_graph_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let mut drill = MachineDrill::open(namespace, DrillPart::WHOLE).await?;
    for (resource, machine) in drill.machines() {
        let graph = machine.graph();
        for state in &graph.states {
            let scenario = drill.scenario(&resource)?;
            let table = resource.tables.first().context("a resource without a table")?;
            let mut step =
                Step::insert(table, sample_inputs::key(&resource, 1)).set(&graph.column, state.as_ref());
            for column in table.columns().iter().skip(table.key_len()) {
                if column.required && column.default.is_none() && column.name != graph.column {
                    let value = match column.kind {
                        Type::Json => Value::Json(json!([])),
                        kind => sample_inputs::value(&column.name, kind, 1),
                    };
                    step = step.set(&column.name, value);
                }
            }
            let client = scenario.client.store_client()?;
            client.apply(client.one(step)).await?;
            let before = scenario.row().await?;
            for action in called(&resource, &graph) {
                if leaves(&graph, &action.name, Some(state)) {
                    continue;
                }
                let what = format!("{}.{} of a row that is {state}", resource.name, action.name);
                let refusal = match scenario.call(action, None).await? {
                    Err(refusal) => refusal,
                    Ok(answer) => bail!("{what} was done: {answer:?}"),
                };
                let expected = machine.refusal_in(&action.name, state);
                // Sample inputs may be refused for what the row has, or for what they name, before its state is judged.
                let fits = matches!(refusal.code, Code::InvalidInput | Code::NotFound)
                    || expected.map_or(refusal.code.is_conflict(), |code| code == refusal.code);
                ensure!(fits, "{what}: expected {expected:?}, got {refusal}");
                ensure!(scenario.row().await? == before, "{what} was refused and changed the row");
            }
        }
    }
    Ok(())
}

/// What brings a row into the state that a deadline transition leaves, with the time of the deadline.
fn deadline_path(resource: &Resource, graph: &Graph, transition: &str) -> Result<Vec<String>> {
    if let Some(action) = resource.action(transition) {
        return Ok(action.after.iter().filter(|name| *name != WAIT).cloned().collect());
    }
    let path = graph.path_to(transition).with_context(|| format!("no actions lead to {transition}"))?;
    let names = path.iter().filter(|name| *name != WAIT);
    Ok(names.map(|name| format!("{}.{name}", resource.name)).collect())
}

/// Every deadline transition, with its resource.
fn deadlines(drill: &MachineDrill) -> Vec<(Resource, Arc<Machine>, String)> {
    let mut found = Vec::new();
    for (resource, machine) in drill.machines() {
        let graph = machine.graph();
        let is_deadline = |kind: EdgeKind| matches!(kind, EdgeKind::Deadline | EdgeKind::DeadlineOrCall);
        let names: BTreeSet<String> = graph
            .edges
            .iter()
            .filter(|edge| is_deadline(edge.kind))
            .map(|edge| edge.transition.to_string())
            .collect();
        found.extend(names.into_iter().map(|name| (resource.clone(), machine.clone(), name)));
    }
    found
}

async fn a_deadline_holds_to_the_microsecond(namespace: &dyn TestNamespace) -> Result<()> {
    let mut drill = MachineDrill::open(namespace, DrillPart::WHOLE).await?;
    let deadlines = deadlines(&drill);
    ensure!(deadlines.len() >= 2, "only {} deadlines", deadlines.len());
    for (resource, machine, transition) in deadlines {
        let graph = machine.graph();
        let scenario = drill.scenario(&resource)?;
        scenario.follow(&deadline_path(&resource, &graph, &transition)?).await?;
        let column = machine.def().deadline().context("no deadline")?.column;
        let row = scenario.due_row(column).await?;
        let at = row.time(column).context("no time")?;
        let action = resource.action(&transition);
        scenario.clock.set(at.minus(Duration::from_micros(1)));
        scenario.client.drain_workers().await?;
        if let Some(action) = action {
            let early = scenario.call(action, None).await?;
            ensure!(early.is_err(), "{transition} was done a microsecond early: {early:?}");
        }
        let before = scenario.row_at(row.key()).await?;
        ensure!(before.as_ref() == Some(&row), "{transition} a microsecond early");
        scenario.clock.set(at);
        scenario.client.drain_workers().await?;
        let fired = scenario.row_at(row.key()).await?;
        let version = fired.as_ref().map(Row::version);
        ensure!(version.is_none_or(|version| version == row.version() + 1), "{transition}: {fired:?}");
        scenario.client.drain_workers().await?;
        ensure!(scenario.row_at(row.key()).await? == fired, "{transition} was fired twice");
    }
    drill.finish().await
}

async fn late_sweepers_fire_once(namespace: &dyn TestNamespace) -> Result<()> {
    let mut drill = MachineDrill::open(namespace, DrillPart::WHOLE).await?;
    for (resource, machine, transition) in deadlines(&drill) {
        let graph = machine.graph();
        let scenario = drill.scenario(&resource)?;
        scenario.follow(&deadline_path(&resource, &graph, &transition)?).await?;
        let column = machine.def().deadline().context("no deadline")?.column;
        let row = scenario.due_row(column).await?;
        let at = row.time(column).context("no time")?;
        let late = scenario.clock.now().max(at).plus(Duration::from_secs(86_400));
        scenario.clock.set(late);
        // Rows of earlier scenarios, as a timer that recurs, are due again.
        let drain = || scenario.client.drain_workers_of(&resource.name);
        let (one, other) = tokio::join!(drain(), drain());
        let times = one? + other?;
        ensure!(times == 1, "{}.{transition} was fired {times} times", resource.name);
        let (version, fired) = (row.version(), scenario.row_at(row.key()).await?.map(|row| row.version()));
        ensure!(fired.is_none_or(|fired| fired == version + 1), "{transition}: {version}, then {fired:?}");
    }
    drill.finish().await
}
