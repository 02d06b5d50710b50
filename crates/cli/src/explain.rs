//! `explain`: the abstract shape of an action, then what the engine gets.
//!
//! The action is run on a model that has a row as one may be, behind a store that writes down what it is asked for. What
//! it was asked is then explained by the engine in question, which is not needed for it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::action::{Action, Does, WAIT};
use statehouse::engine::{self, Engine};
use statehouse::holds::{self, Hold, Holds, MemoryHolds, Unreachable};
use statehouse::infra::lease::Leases;
use statehouse::worker::{Shift, Worker};
use statehouse::{Blueprint, House, Operation, Refusal, Resource, own};
use statehouse_drills::sample_inputs as sample;
use statehouse_store::clock::ManualClock;
use statehouse_store::random::{Ids, Random};
use statehouse_store::{
    Address, Cell, Change, ClaimRange, Commit, Consistency, ExplainRequest, Explanation, LogPage, Migrate,
    ModelStore, Page, Plan, Query, ReadRequest, ReadResult, Record, Request, Resolution, Row, Scan, Schema,
    Store, StoreError, Tenant,
};

use crate::arguments::Explain;
use crate::blueprint;
use crate::output::{Failure, Output};
use crate::settings::Settings;

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

pub(crate) async fn run(explain: &Explain, output: &Output) -> Result<(), Failure> {
    let own = Settings::read(&explain.live.flags())?.own;
    let engine = match explain.on {
        Some(engine) => engine.engine(),
        None => Engine::of_url(&own.store)?,
    };
    let blueprint = blueprint::read(&own)?;
    let resources = statehouse::resource::declare(&blueprint)?;
    let chosen = match explain.action.split_once('.') {
        None => resources.iter().filter(|resource| resource.name == explain.action).collect(),
        Some((name, _)) => resources.iter().filter(|resource| resource.name == name).collect::<Vec<_>>(),
    };
    let mut explained = Vec::new();
    for resource in chosen {
        for action in &resource.actions {
            let full = format!("{}.{}", resource.name, action.name);
            if full == explain.action || resource.name == explain.action {
                explained.push(one(&blueprint, resource, action, engine).await?);
            }
        }
    }
    if explained.is_empty() {
        let message =
            format!("there is no action or resource `{}`; `statehouse check` lists them", explain.action);
        return Err(Failure::Usage(message));
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
) -> Result<(Json, String), Failure> {
    let explanations = explain_action(blueprint, resource, action, engine).await?;
    let line = format!(
        "{} {} -> {} (abstract: {}, {})",
        action.name, resource.name, action.target, action.shape, action.mechanism
    );
    let request = |request: &Request| json!({"purpose": request.purpose, "text": request.text, "parameters": request.parameters});
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

/// What an action asks the store for, as the engine gets it.
pub(crate) async fn explain_action(
    blueprint: &Blueprint,
    resource: &Resource,
    action: &Action,
    engine: Engine,
) -> Result<Vec<Explanation>, Failure> {
    let (asked, _) = record_action(blueprint, resource, action).await?;
    asked.iter().map(|asked| asked.explained(engine)).collect()
}

/// What an action asks the store for, and the refusal of the sampled call if it was refused.
async fn record_action(
    blueprint: &Blueprint,
    resource: &Resource,
    action: &Action,
) -> Result<(Vec<Kept>, Option<Refusal>), Failure> {
    let stage = Stage::of(blueprint).await?;
    stage.perform(&action.after).await?;
    catch_up(&stage.house).await?;
    let Stage { house, witness, tenant, .. } = &stage;
    witness.forget();
    let operation = Operation { id: Some("operation-1".into()), fingerprint: String::new() };
    let mut request = sample::request(house.resources(), resource, action, 2);
    let mut called = house.call(tenant, request.clone(), operation.clone()).await;
    let mut asked = witness.asked();
    if called.is_err() && asked.is_empty() && !request.key.is_empty() {
        // The action does not take this key, before any row is read: of worker ids, only the first can be drawn from.
        request.key = sample::key(resource, 0);
        called = house.call(tenant, request.clone(), operation.clone()).await;
        asked = witness.asked();
    }
    if matches!(action.does, Does::Read(_)) {
        // By its second call the house knows what it has learnt by the first, like which generation is live, and asks for
        // it no more. What is kept for a while is not asked for at all then.
        witness.forget();
        called = house.call(tenant, request, operation).await;
        asked = Some(witness.asked()).filter(|again| !again.is_empty()).unwrap_or(asked);
    }
    // What was sent is what is explained, also if it was refused: a sample does not know the epoch of a lease.
    match called {
        Err(refusal) if asked.iter().any(|asked| matches!(asked, Kept::Commit(_))) => {
            Ok((asked, Some(refusal)))
        }
        called => called.map(|_| (asked, None)).map_err(Failure::from),
    }
}

/// A house over a store in memory that records what it is asked for.
struct Stage {
    house: House,
    witness: Arc<Witness>,
    clock: Arc<ManualClock>,
    tenant: Tenant,
}

impl Stage {
    /// An empty house of a blueprint.
    async fn of(blueprint: &Blueprint) -> Result<Stage, Failure> {
        // On a clock that stands still, so that the same is explained in the same words.
        let clock = Arc::new(ManualClock::at(engine::explained_at()));
        let witness = Arc::new(Witness::on(clock.clone()));
        let ids = Ids::new(clock.clone(), Random::seeded(1));
        let holds = Arc::new(HoldsWitness { held: MemoryHolds::on(clock.clone()), witness: witness.clone() });
        let house = House::with(witness.clone(), blueprint, clock.clone(), ids)?.with_holds(holds);
        house.migrate(Migrate::Apply).await?;
        let tenant = Tenant::new("default").map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(Stage { house, witness, clock, tenant })
    }

    /// Calls actions by their full names, in order, with sampled inputs; [`WAIT`] lets a day pass.
    async fn perform(&self, names: &[String]) -> Result<(), Failure> {
        for name in names {
            if name == WAIT {
                self.clock.advance(DAY);
                continue;
            }
            let (resource, action) = self.house.action(name)?;
            let request = sample::request(self.house.resources(), resource, action, 1);
            self.house.call(&self.tenant, request, Operation::default()).await?;
        }
        Ok(())
    }
}

/// Brings the house's projections up to what was written, so that a view has something to show.
async fn catch_up(house: &House) -> Result<(), Failure> {
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
async fn step_worker(house: &House, worker: &dyn Worker) -> Result<(), Failure> {
    let (Some(tenant), Ok(table)) = (own::tenant(), own::leases()) else { return Ok(()) };
    let leases = Leases::of(house.store().clone(), house.clock().clone(), table, tenant);
    let name = ["explain".into(), worker.name().into()];
    let Ok(held) = leases.acquire(&name, "explain", DAY).await? else { return Ok(()) };
    for shard in 0..worker.shards() {
        let (store, clock, ids) = (house.store(), &**house.clock(), house.ids());
        let shift = Shift { store, clock, ids, outside: house.outside(), shard, held: &held };
        worker.step(&shift, STEPS).await?;
    }
    Ok(())
}

/// How the names of workers end that keep projections.
const PROJECTING: &str = ".project";
/// Enough steps to begin, fill and switch to a projection of one row.
const STEPS: usize = 8;

/// What a store was asked for, kept.
#[derive(Clone, Debug)]
enum Kept {
    Commit(Plan),
    Get(Vec<Address>, Consistency),
    Value(Cell),
    Query(Query),
    Scan(Scan),
    /// With a row that was taken.
    ClaimRange(ClaimRange, Option<Row>),
    /// Several reads in one go, each of them kept.
    Look(Vec<Kept>),
    /// What was asked of the holds before the store, which are the same whatever the engine is.
    Holds(Explanation),
}

impl Kept {
    /// What an engine would get for this.
    fn explained(&self, engine: Engine) -> Result<Explanation, Failure> {
        self.matched(|holds| Ok(holds.clone()), |asked| Ok(engine::explain(engine, asked)?))
    }

    /// Calls one function with what the holds were asked for, or the other with what the store was asked for.
    fn matched<T>(
        &self,
        holds: impl FnOnce(&Explanation) -> T,
        store: impl FnOnce(ExplainRequest<'_>) -> T,
    ) -> T {
        match self {
            Kept::Commit(plan) => store(ExplainRequest::Commit(plan)),
            Kept::Get(addresses, consistency) => store(ExplainRequest::Get(addresses, *consistency)),
            // Only ever one of several.
            Kept::Value(cell) => store(ExplainRequest::from(ReadRequest::Value(cell))),
            Kept::Query(query) => store(ExplainRequest::Query(query)),
            Kept::Scan(scan) => store(ExplainRequest::Scan(scan)),
            Kept::ClaimRange(take, row) => store(ExplainRequest::ClaimRange(take, row.as_ref())),
            Kept::Look(kept) => {
                store(ExplainRequest::ReadMany(&kept.iter().filter_map(Kept::ask).collect::<Vec<_>>()))
            }
            Kept::Holds(explanation) => holds(explanation),
        }
    }

    fn of(ask: &ReadRequest<'_>) -> Kept {
        match ask {
            ReadRequest::Get(addresses) => Kept::Get(addresses.to_vec(), Consistency::Strong),
            ReadRequest::Value(cell) => Kept::Value((*cell).clone()),
            ReadRequest::Query(query) => Kept::Query((*query).clone()),
        }
    }

    fn ask(&self) -> Option<ReadRequest<'_>> {
        match self {
            Kept::Get(addresses, _) => Some(ReadRequest::Get(addresses)),
            Kept::Value(cell) => Some(ReadRequest::Value(cell)),
            Kept::Query(query) => Some(ReadRequest::Query(query)),
            _ => None,
        }
    }
}

/// Holds that write down what they are asked for, beside what the store is asked for.
#[derive(Debug)]
struct HoldsWitness {
    held: MemoryHolds,
    witness: Arc<Witness>,
}

impl HoldsWitness {
    fn note(&self, purpose: &str, script: &str, names: &[String], arguments: &[(&str, String)]) {
        let keys =
            names.iter().enumerate().map(|(place, name)| (format!("KEYS[{}]", place + 1), name.clone()));
        let arguments = arguments.iter().enumerate().map(|(place, (what, argument))| {
            (format!("ARGV[{}]", place + 1), format!("{argument} ({what})"))
        });
        let request = Request {
            purpose: format!("{purpose}, in Redis"),
            text: format!("EVALSHA, of the script\n{script}"),
            parameters: keys.chain(arguments).collect(),
        };
        let cost = vec![("round trips to Redis".to_owned(), "1".to_owned())];
        self.witness.note(Kept::Holds(Explanation { requests: vec![request], cost }));
    }
}

#[async_trait]
impl Holds for HoldsWitness {
    async fn take(
        &self,
        names: &[String],
        holder: &str,
        span: Duration,
    ) -> Result<Result<(), usize>, Unreachable> {
        let arguments = [("holder", holder.to_owned()), ("ms", span.as_millis().to_string())];
        self.note("take all holds or none", holds::TAKE, names, &arguments);
        self.held.take(names, holder, span).await
    }

    async fn extend(&self, names: &[String], holder: &str, span: Duration) -> Result<bool, Unreachable> {
        let arguments = [("holder", holder.to_owned()), ("ms", span.as_millis().to_string())];
        self.note("extend the holds", holds::EXTEND, names, &arguments);
        self.held.extend(names, holder, span).await
    }

    async fn release(&self, names: &[String], holder: &str) -> Result<(), Unreachable> {
        self.note("let go of the holds", holds::RELEASE, names, &[("holder", holder.to_owned())]);
        self.held.release(names, holder).await
    }

    async fn look(&self, names: &[String]) -> Result<Vec<Option<Hold>>, Unreachable> {
        self.note("look at the holds", holds::LOOK, names, &[]);
        self.held.look(names).await
    }
}

/// A model that writes down what it is asked for.
struct Witness {
    model: ModelStore,
    asked: Mutex<Vec<Kept>>,
}

impl Witness {
    fn on(clock: Arc<ManualClock>) -> Witness {
        Witness { model: ModelStore::with(clock, 2), asked: Mutex::default() }
    }

    fn note(&self, kept: Kept) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
    }

    fn forget(&self) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn asked(&self) -> Vec<Kept> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Witness")
    }
}

#[async_trait]
impl Store for Witness {
    fn engine(&self) -> &'static str {
        self.model.engine()
    }

    fn partitions(&self) -> u32 {
        self.model.partitions()
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<Change>, StoreError> {
        self.model.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.note(Kept::Commit(plan.clone()));
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
        self.note(Kept::Get(addresses.to_vec(), consistency));
        self.model.get(addresses, consistency).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        self.note(Kept::Query(query.clone()));
        self.model.query(query).await
    }

    async fn read_many(&self, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>, StoreError> {
        self.note(Kept::Look(asks.iter().map(Kept::of).collect()));
        self.model.read_many(asks).await
    }

    async fn claim_range(&self, take: &ClaimRange) -> Result<Vec<Row>, StoreError> {
        let taken = self.model.claim_range(take).await?;
        self.note(Kept::ClaimRange(take.clone(), taken.first().cloned()));
        Ok(taken)
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.note(Kept::Scan(scan.clone()));
        self.model.scan(scan).await
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

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        self.model.explain(asked)
    }

    async fn close(&self) {
        self.model.close().await;
    }
}
