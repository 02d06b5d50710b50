//! `explain`: the abstract shape of an action, then what the engine gets.
//!
//! The action is run on a model that has a row as one may be, behind a store that writes down what it is asked for. What
//! it was asked is then explained by the engine in question, which is not needed for it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::action::{Action, ActionHandler, Code, WAIT};
use statehouse::engine::{self, Engine};
use statehouse::infra::lease::Leases;
use statehouse::product::booking::external_holds::{
    self, ExternalHold, ExternalHolds, HoldsUnreachable, MemoryHolds,
};
use statehouse::worker::{StepContext, Worker};
use statehouse::{Blueprint, House, Operation, Refusal, Resource, system};
use statehouse_drills::sample_inputs as sample;
use statehouse_server::console::ActionExplainer;
use statehouse_store::clock::ManualClock;
use statehouse_store::random::{Ids, Random};
use statehouse_store::{
    Address, BlankRange, BlankedPage, Cell, ClaimRange, Commit, Consistency, EngineRequest, ExplainRequest,
    Explanation, LogPage, Migrate, ModelStore, Page, Plan, Query, ReadRequest, ReadResult, Record,
    Resolution, Row, Scan, Schema, SchemaChange, Segment, Store, StoreError, Tenant, Time, Type, Value,
};

use crate::arguments::Explain;
use crate::blueprint;
use crate::output::{CliFailure, Output};
use crate::settings::CliSettings;

#[cfg(feature = "full")]
#[cfg(test)]
mod golden;
#[cfg(feature = "full")]
#[cfg(test)]
mod plans;
#[cfg(feature = "full")]
#[cfg(test)]
mod shapes;

/// How long [`WAIT`] is.
const DAY: Duration = Duration::from_secs(86_400);

pub(crate) async fn run(explain: &Explain, output: &Output) -> Result<(), CliFailure> {
    let own = CliSettings::read(&explain.live.flags())?.own;
    let engine = match explain.on {
        Some(engine) => engine.engine(),
        None => Engine::of_url(&own.store)?,
    };
    let blueprint = blueprint::read(&own)?;
    let resources = statehouse::resource::declare(&blueprint)?;
    let endpoint = explain.action.strip_prefix("inbound.");
    let called = endpoint.and_then(|name| statehouse::inbound::action_of(&blueprint, name));
    let wanted = called.as_deref().unwrap_or(&explain.action);
    let chosen = match wanted.split_once('.') {
        None => resources.iter().filter(|resource| resource.name == wanted).collect(),
        Some((name, _)) => resources.iter().filter(|resource| resource.name == name).collect::<Vec<_>>(),
    };
    let mut explained = Vec::new();
    for resource in chosen {
        for action in &resource.actions {
            let full = format!("{}.{}", resource.name, action.name);
            if full == wanted || resource.name == wanted {
                explained.push(one(&blueprint, resource, action, engine).await?);
            }
        }
    }
    if explained.is_empty() {
        let message =
            format!("there is no action or resource `{}`; `statehouse check` lists them", explain.action);
        return Err(CliFailure::Usage(message));
    }
    let json = match explained.as_slice() {
        [(json, _)] => json.clone(),
        many => many.iter().map(|(json, _)| json.clone()).collect(),
    };
    output.show(&json, || explained.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n\n"));
    Ok(())
}

/// One action on one engine, for programs and for people.
async fn one(
    blueprint: &Blueprint,
    resource: &Resource,
    action: &Action,
    engine: Engine,
) -> Result<(Json, String), CliFailure> {
    let explanations = explain_action(blueprint, resource, action, engine).await?;
    let line = format!(
        "{} {} -> {} (abstract: {}, {})",
        action.name, resource.name, action.target, action.shape, action.mechanism
    );
    let request = |request: &EngineRequest| json!({"purpose": request.purpose, "text": request.text, "parameters": request.parameters});
    let parts: Vec<Json> = explanations
        .iter()
        .map(|part| json!({"requests": part.requests.iter().map(request).collect::<Vec<_>>(), "cost": part.cost}))
        .collect();
    let json = json!({
        "action": format!("{}.{}", resource.name, action.name), "target": action.target,
        "shape": action.shape, "mechanism": action.mechanism, "engine": engine.name(),
        "concrete": parts, "answers": action.answers,
    });
    let concrete: Vec<String> = explanations.iter().map(ToString::to_string).collect();
    let answers = match action.answers {
        [] => String::new(),
        answers => format!("answers: {}\n", answers.join(", ")),
    };
    Ok((json, format!("{line}\n{answers}(concrete, on {engine}):\n\n{}", concrete.join("\n"))))
}

/// Explains actions on the console's pages.
pub(crate) struct ConsoleExplainer {
    pub blueprint: Blueprint,
}

#[async_trait]
impl ActionExplainer for ConsoleExplainer {
    async fn explain(&self, name: &str) -> Vec<(String, String)> {
        let mut explained = Vec::new();
        let Ok(resources) = statehouse::resource::declare(&self.blueprint) else { return explained };
        let Some((of, action)) = name.split_once('.') else { return explained };
        let resource = resources.iter().find(|resource| resource.name == of);
        let found = resource.and_then(|resource| Some((resource, resource.action(action)?)));
        let Some((resource, action)) = found else { return explained };
        for engine in [Engine::Sqlite, Engine::Postgres, Engine::Dynamodb] {
            // An engine that this program was built without explains nothing.
            if let Ok(parts) = explain_action(&self.blueprint, resource, action, engine).await {
                let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
                explained.push((engine.name().to_owned(), parts.join("\n")));
            }
        }
        explained
    }
}

/// What an action asks the store for, as the engine gets it.
pub(crate) async fn explain_action(
    blueprint: &Blueprint,
    resource: &Resource,
    action: &Action,
    engine: Engine,
) -> Result<Vec<Explanation>, CliFailure> {
    let (asked, _) = record_action(blueprint, resource, action).await?;
    asked.iter().map(|asked| asked.explained(engine)).collect()
}

/// What an action asks the store for, and the refusal of the sampled call if it was refused.
async fn record_action(
    blueprint: &Blueprint,
    resource: &Resource,
    action: &Action,
) -> Result<(Vec<RecordedCall>, Option<Refusal>), CliFailure> {
    let stage = Stage::of(blueprint).await?;
    let last = stage.perform(&action.after).await?;
    catch_up(&stage.house).await?;
    let Stage { house, recorder, tenant, .. } = &stage;
    recorder.forget();
    let operation = Operation { id: Some("operation-1".into()), fingerprint: String::new() };
    let mut request = sample::request(house.resources(), resource, action, 2);
    // The id of the operation is that of this call.
    action.operation_input().map(|name| request.input.remove(name));
    // An action like a claim chooses the row itself, so that what follows is about the row that it chose.
    let chosen = last.filter(|(of, _)| of == &resource.name && !request.key.is_empty());
    if let Some(key) = chosen.and_then(|(_, body)| key_in(resource, &body)) {
        request.key = key;
    }
    let mut called = house.call(tenant, request.clone(), operation.clone()).await;
    let mut asked = recorder.asked();
    if called.is_err() && asked.is_empty() && !request.key.is_empty() {
        // The action does not take this key, before any row is read: of worker ids, only the first can be drawn from.
        request.key = sample::key(resource, 0);
        called = house.call(tenant, request.clone(), operation.clone()).await;
        asked = recorder.asked();
    }
    if matches!(action.handler, ActionHandler::Read(_)) {
        // By its second call the house knows what it has learnt by the first, like which generation is live, and asks for
        // it no more. What is kept for a while is not asked for at all then.
        recorder.forget();
        called = house.call(tenant, request, operation).await;
        asked = Some(recorder.asked()).filter(|again| !again.is_empty()).unwrap_or(asked);
    }
    // What was sent is what is explained, also if it was refused: a sample does not know the epoch of a lease.
    match called {
        // Nor does it know what a reaction has parked, how a row gets into a state that only answers of a target lead to, or the key of
        // a row that another action makes.
        Err(refusal)
            if asked.iter().any(|asked| matches!(asked, RecordedCall::Commit(_)))
                || (matches!(refusal.code, Code::NotFound | Code::WrongState) && !asked.is_empty()) =>
        {
            Ok((asked, Some(refusal)))
        }
        called => called.map(|_| (asked, None)).map_err(CliFailure::from),
    }
}

/// The key of the row that an answer shows.
fn key_in(resource: &Resource, body: &Json) -> Option<Vec<Value>> {
    let part = |(name, kind): &(String, Type)| Value::from_json(body.get(name)?.clone(), *kind).ok();
    resource.key.iter().map(part).collect()
}

/// A house over a store in memory that records what it is asked for.
struct Stage {
    house: House,
    recorder: Arc<ExplainRecorder>,
    clock: Arc<ManualClock>,
    tenant: Tenant,
}

impl Stage {
    /// An empty house of a blueprint.
    async fn of(blueprint: &Blueprint) -> Result<Stage, CliFailure> {
        // On a clock that stands still, so that the same is explained in the same words.
        let clock = Arc::new(ManualClock::at(engine::explained_at()));
        let recorder = Arc::new(ExplainRecorder::on(clock.clone()));
        // With ids of its own, so that what is explained does not depend on how many ids a migration draws.
        let ids = |seed| Ids::new(clock.clone(), Random::seeded(seed));
        House::with(recorder.clone(), blueprint, clock.clone(), ids(2))?.migrate(Migrate::Apply).await?;
        let holds =
            Arc::new(RecordedHolds { held: MemoryHolds::on(clock.clone()), recorder: recorder.clone() });
        let house = House::with(recorder.clone(), blueprint, clock.clone(), ids(1))?.with_holds(holds);
        let tenant = Tenant::new("default").map_err(|error| CliFailure::Usage(error.to_string()))?;
        Ok(Stage { house, recorder, clock, tenant })
    }

    /// Calls actions by their full names, in order, with sampled inputs; [`WAIT`] lets a day pass. Returns what the last one
    /// answered, with the name of its resource.
    async fn perform(&self, names: &[String]) -> Result<Option<(String, Json)>, CliFailure> {
        let mut last = None;
        for name in names {
            if name == WAIT {
                self.clock.advance(DAY);
                continue;
            }
            let (resource, action) = self.house.action(name)?;
            let request = sample::request(self.house.resources(), resource, action, 1);
            let answer = self.house.call(&self.tenant, request, Operation::default()).await?;
            last = Some((resource.name.clone(), answer.body.clone()));
        }
        Ok(last)
    }
}

/// Brings the house's projections up to what was written, so that a view has something to show.
async fn catch_up(house: &House) -> Result<(), CliFailure> {
    let projecting: Vec<_> =
        house.workers().iter().filter(|worker| worker.name().ends_with(PROJECTING)).collect();
    for _ in 0..STEPS {
        for worker in &projecting {
            step_worker(house, &***worker).await?;
        }
    }
    Ok(())
}

/// One step of each shard of a worker.
async fn step_worker(house: &House, worker: &dyn Worker) -> Result<(), CliFailure> {
    let (Some(tenant), Ok(table)) = (system::tenant(), system::leases()) else { return Ok(()) };
    let leases = Leases::of(house.store().clone(), house.clock().clone(), table, tenant);
    let name = ["explain".into(), worker.name().into()];
    let Ok(held) = leases.acquire(&name, "explain", DAY).await? else { return Ok(()) };
    for shard in 0..worker.shards() {
        let (store, clock, ids) = (house.store(), house.clock(), house.ids());
        let (egress, wakeups) = (house.egress(), house.bells());
        let context = StepContext { store, clock, ids, egress, wakeups, shard, held: &held };
        worker.step(&context, STEPS).await?;
    }
    Ok(())
}

/// How the names of workers end that keep projections.
const PROJECTING: &str = ".project";
/// Enough steps to begin, fill and switch to a projection of one row.
const STEPS: usize = 8;

/// What a store was asked for, kept.
#[derive(Clone, Debug)]
enum RecordedCall {
    Commit(Plan),
    Get(Vec<Address>, Consistency),
    Value(Cell),
    Query(Query),
    Scan(Scan),
    /// With a row that was taken.
    ClaimRange(ClaimRange, Option<Row>),
    /// Several reads in one go, each of them kept.
    Look(Vec<RecordedCall>),
    /// What was asked of the holds before the store, which are the same whatever the engine is.
    Holds(Explanation),
}

impl RecordedCall {
    /// What an engine would get for this.
    fn explained(&self, engine: Engine) -> Result<Explanation, CliFailure> {
        self.matched(|holds| Ok(holds.clone()), |asked| Ok(engine::explain(engine, asked)?))
    }

    /// Calls one function with what the holds were asked for, or the other with what the store was asked for.
    fn matched<T>(
        &self,
        holds: impl FnOnce(&Explanation) -> T,
        store: impl FnOnce(ExplainRequest<'_>) -> T,
    ) -> T {
        match self {
            RecordedCall::Commit(plan) => store(ExplainRequest::Commit(plan)),
            RecordedCall::Get(addresses, consistency) => store(ExplainRequest::Get(addresses, *consistency)),
            // Only ever one of several.
            RecordedCall::Value(cell) => store(ExplainRequest::from(ReadRequest::Value(cell))),
            RecordedCall::Query(query) => store(ExplainRequest::Query(query)),
            RecordedCall::Scan(scan) => store(ExplainRequest::Scan(scan)),
            RecordedCall::ClaimRange(take, row) => store(ExplainRequest::ClaimRange(take, row.as_ref())),
            RecordedCall::Look(kept) => store(ExplainRequest::ReadMany(
                &kept.iter().filter_map(RecordedCall::ask).collect::<Vec<_>>(),
            )),
            RecordedCall::Holds(explanation) => holds(explanation),
        }
    }

    fn of(ask: &ReadRequest<'_>) -> RecordedCall {
        match ask {
            ReadRequest::Get(addresses) => RecordedCall::Get(addresses.to_vec(), Consistency::Strong),
            ReadRequest::Value(cell) => RecordedCall::Value((*cell).clone()),
            ReadRequest::Query(query) => RecordedCall::Query((*query).clone()),
        }
    }

    fn ask(&self) -> Option<ReadRequest<'_>> {
        match self {
            RecordedCall::Get(addresses, _) => Some(ReadRequest::Get(addresses)),
            RecordedCall::Value(cell) => Some(ReadRequest::Value(cell)),
            RecordedCall::Query(query) => Some(ReadRequest::Query(query)),
            _ => None,
        }
    }
}

/// Holds that write down what they are asked for, beside what the store is asked for.
#[derive(Debug)]
struct RecordedHolds {
    held: MemoryHolds,
    recorder: Arc<ExplainRecorder>,
}

impl RecordedHolds {
    fn record(&self, purpose: &str, script: &str, names: &[String], arguments: &[(&str, String)]) {
        let keys =
            names.iter().enumerate().map(|(index, name)| (format!("KEYS[{}]", index + 1), name.clone()));
        let arguments = arguments.iter().enumerate().map(|(index, (what, argument))| {
            (format!("ARGV[{}]", index + 1), format!("{argument} ({what})"))
        });
        let request = EngineRequest {
            purpose: format!("{purpose}, in Redis"),
            text: format!("EVALSHA, of the script\n{script}"),
            parameters: keys.chain(arguments).collect(),
        };
        let cost = vec![("round trips to Redis".to_owned(), "1".to_owned())];
        self.recorder.record(RecordedCall::Holds(Explanation { requests: vec![request], cost }));
    }
}

#[async_trait]
impl ExternalHolds for RecordedHolds {
    async fn acquire(
        &self,
        names: &[String],
        holder: &str,
        span: Duration,
    ) -> Result<Result<(), usize>, HoldsUnreachable> {
        let arguments = [("holder", holder.to_owned()), ("ms", span.as_millis().to_string())];
        self.record("take all holds or none", external_holds::TAKE, names, &arguments);
        self.held.acquire(names, holder, span).await
    }

    async fn extend(&self, names: &[String], holder: &str, span: Duration) -> Result<bool, HoldsUnreachable> {
        let arguments = [("holder", holder.to_owned()), ("ms", span.as_millis().to_string())];
        self.record("extend the holds", external_holds::EXTEND, names, &arguments);
        self.held.extend(names, holder, span).await
    }

    async fn release(&self, names: &[String], holder: &str) -> Result<(), HoldsUnreachable> {
        self.record("let go of the holds", external_holds::RELEASE, names, &[("holder", holder.to_owned())]);
        self.held.release(names, holder).await
    }

    async fn read_holds(&self, names: &[String]) -> Result<Vec<Option<ExternalHold>>, HoldsUnreachable> {
        self.record("look at the holds", external_holds::LOOK, names, &[]);
        self.held.read_holds(names).await
    }
}

/// A model that writes down what it is asked for.
struct ExplainRecorder {
    model: ModelStore,
    asked: Mutex<Vec<RecordedCall>>,
}

impl ExplainRecorder {
    fn on(clock: Arc<ManualClock>) -> ExplainRecorder {
        ExplainRecorder { model: ModelStore::with(clock, 2), asked: Mutex::default() }
    }

    fn record(&self, kept: RecordedCall) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
    }

    fn forget(&self) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn asked(&self) -> Vec<RecordedCall> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for ExplainRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExplainRecorder")
    }
}

#[async_trait]
impl Store for ExplainRecorder {
    fn engine(&self) -> &'static str {
        self.model.engine()
    }

    fn partitions(&self) -> u32 {
        self.model.partitions()
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        self.model.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.record(RecordedCall::Commit(plan.clone()));
        self.model.commit(plan).await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.model.resolve(tenant, operation).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.model.find_operation(tenant, operation).await
    }

    async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        self.record(RecordedCall::Get(addresses.to_vec(), consistency));
        self.model.get(addresses, consistency).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        self.record(RecordedCall::Query(query.clone()));
        self.model.query(query).await
    }

    async fn read_many(&self, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>, StoreError> {
        self.record(RecordedCall::Look(asks.iter().map(RecordedCall::of).collect()));
        self.model.read_many(asks).await
    }

    async fn claim_range(&self, take: &ClaimRange) -> Result<Vec<Row>, StoreError> {
        let taken = self.model.claim_range(take).await?;
        self.record(RecordedCall::ClaimRange(take.clone(), taken.first().cloned()));
        Ok(taken)
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.record(RecordedCall::Scan(scan.clone()));
        self.model.scan(scan).await
    }

    /// The table of the explanation has next to no rows. It is divided as if it had more, so that a division can be explained.
    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        let segments = self.model.segments(scan, max).await?;
        if segments.len() > 1 || max == 1 {
            return Ok(segments);
        }
        let tenant = scan.tenant().map_or("", Tenant::as_str).into();
        let key =
            scan.read_table().key_columns().iter().map(|column| sample::value(&column.name, column.kind, 1));
        Ok(Segment::by_keys(scan, vec![std::iter::once(tenant).chain(key).collect()]))
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.model.read_log(partition, after, limit).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.model.wait_log(seen, at_most).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.model.trim_log(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.model.blank_events(range).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.model.scrub().await
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.model.now().await
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        self.model.explain(asked)
    }

    async fn close(&self) {
        self.model.close().await;
    }
}
