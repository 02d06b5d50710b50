//! The house: resources over a store. Runs calls of actions, alone or several as one plan.
//!
//! H1. A write is one plan under one operation id. If its outcome is unknown it is committed again, under the same id,
//!     until it is known or the attempts are used up; then the caller gets `outcome_unknown`. A refusal after a lost response
//!     is returned only when the operation is fenced: the first attempt may still be in flight and may yet be applied. If the
//!     refusal is temporary, and the id is the caller's own, the outcome is reported as unknown instead. The same holds for
//!     a caller that received `outcome_unknown` before and retries ([`crate::unknown_outcomes`]).
//! H2. An answer is made from the log record alone. A repetition under the same id gets the same answer.
//! H3. A call that was applied is answered from its record even if it would be refused today. The commit recognizes a
//!     repetition by its operation id; if the call is refused or changes nothing, its record is looked up before the caller is
//!     told. A call that acts before the commit (it takes a lock, or a hold outside the store) looks its record up first.
//! H4. A call that lost a race is prepared again, a bounded number of times, with exponential backoff.
//! H5. Locks that calls need ([`crate::lock`]) are taken before the calls are prepared, in one order, and released by the plan
//!     itself or, if there is none, at once. A caller that meets a lock of another operation waits, with backoff and a limit.
//! H6. Every event says what it is about ([`subject_of`]), also in a batch, and is read from the partition of its own subject.
//!     So readers of the log get each event once, and those of one row in the order of its versions.
//! H7. An action of several plans, or of a call for each item of a list, is not one write: each plan is decided by itself. Its
//!     answer is remembered under the caller's operation id; its calls have ids that are derived from it. Calls for the items
//!     of a list may be tried as one plan first, which costs an engine far less than a plan for each. If the plan is refused,
//!     nothing was written, and each call runs by itself.
//! H8. A call of a combined action ([`crate::declare::combine`]) is written with other calls by one plan, which has an id of its
//!     own. The call is remembered by its receipt, a row that the plan inserts under the caller's id: H1 to H4 hold with the
//!     receipt in place of the record.

mod assemble;
mod authorize;
mod call;
mod cascade;
mod combine;
mod condition;
mod constrain;
mod constraints;
mod fill;
mod identity;
mod losses;
mod migrate;
mod moves;
mod multi;
mod processes;
mod react;
mod states;
mod write;

pub(crate) use self::assemble::{UNCHANGED, drop_subject, with_subject};
pub use self::assemble::{data_of, subject_of};
pub use self::call::{ActionRef, CallArguments};
use self::call::{ValidatedCall, validate};
pub use self::combine::COMBINED_OPERATIONS;
use self::combine::CombineQueues;
pub(crate) use self::condition::RowCheck;
pub use self::condition::{IF, condition_property, conditioned};
pub use self::identity::HouseIdentity;
pub(crate) use self::multi::TOGETHER_MAX;
use self::processes::ServingProcess;
pub(crate) use self::react::{REACTION, Reacted, ReactionCall};

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value as Json};
use statehouse_store::blank::ERASED;
use statehouse_store::{Clock, Ids, Random, Schema, SchemaError, Store, SystemClock, Value, bug};
use tokio::task::JoinHandle;

use crate::action::{ActionContext, Expected, Refusal};
use crate::audit::AuditSweeper;
use crate::blueprint::Blueprint;
use crate::blueprint::problem::BlueprintProblem;
use crate::cache::{self, Cache};
use crate::egress::Egress;
use crate::erase::BlankingWorker;
use crate::follow::{self, Tail};
use crate::inbound::{self, InboundEndpoint};
use crate::infra::log::{Consumer, GroupInfo, LogRetention, RecordHandler, Trimmer};
use crate::infra::projection::{Projection, ProjectionWorker};
use crate::infra::scan::runner::RunProgress;
use crate::product::booking::external_holds::ExternalHolds;
use crate::resource::{self, Consuming, Resource, no_such};
use crate::secret_keys::SecretKeys;
use crate::system;
use crate::unknown_outcomes::UnknownOutcomes;
use crate::worker::{self, PoolConfig, WakeupHub, Worker, WorkerPool};

/// How often a call that lost a race is prepared again.
const CONFLICTS_MAX: u32 = 6;

/// A request for one action.
#[derive(Clone, Debug)]
pub struct Request {
    /// `profile.update`.
    pub action: String,
    /// The key of the row, for actions that name one.
    pub key: Vec<Value>,
    /// What the action takes.
    pub input: Map<String, Json>,
    /// What the caller says about the version it has seen.
    pub expected: Option<Expected>,
}

/// Under what id, and for which request, a write is remembered.
#[derive(Clone, Debug, Default)]
pub struct Operation {
    /// The caller's own id; without one the house makes one, and a retry of the caller is a new write.
    pub id: Option<String>,
    /// A digest of the request, by which a repetition is told from another request under the same id.
    pub fingerprint: String,
}

impl Operation {
    /// The caller's own id for this request: under it the request is done once, and another request is refused.
    pub fn under(id: impl Into<String>, request: &Request) -> Operation {
        let Request { action, key, input, expected } = request;
        let said = format!("{action} {key:?} {expected:?} {}", Json::Object(input.clone()));
        Operation { id: Some(id.into()), fingerprint: digest(&said) }
    }
}

/// A digest by which what a caller said is told from what it says another time. FNV-1a of 128 bits: it does not withstand
/// one who seeks a collision.
pub(crate) fn digest(said: &str) -> String {
    let digest = said.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    });
    format!("{digest:032x}")
}

/// Who is told how far a migration is.
type ProgressListener = dyn Fn(&RunProgress) + Send + Sync;

/// Tells how far a migration is.
#[derive(Default)]
struct ProgressTeller(Option<Box<ProgressListener>>);

impl ProgressTeller {
    fn tell(&self, progress: &RunProgress) {
        if let Some(listener) = &self.0 {
            listener(progress);
        }
    }
}

impl fmt::Debug for ProgressTeller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProgressTeller")
    }
}

/// Resources over a store.
#[derive(Debug)]
pub struct House {
    name: String,
    /// The name that it had before, if it has another one now.
    renamed_from: Option<String>,
    resources: Vec<Resource>,
    /// Those of the resources, and the house's own.
    workers: Vec<Arc<dyn Worker>>,
    schema: Schema,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    ids: Ids,
    egress: Egress,
    cache: Arc<Cache>,
    tail: Arc<Tail>,
    follower: Mutex<Option<JoinHandle<()>>>,
    wakeups: Arc<WakeupHub>,
    crew: Mutex<Option<WorkerPool>>,
    unknown_outcomes: UnknownOutcomes,
    /// Calls of combined actions that wait for one another.
    combining: CombineQueues,
    pub(crate) endpoints: Vec<InboundEndpoint>,
    progress: ProgressTeller,
    /// What says in the store that this process serves.
    serving: Mutex<Option<ServingProcess>>,
}

impl House {
    /// A house over a store, on the machine's clock. The store's tables are not touched; see [`House::migrate`].
    pub fn over(store: Arc<dyn Store>, blueprint: &Blueprint) -> Result<House, crate::Problems> {
        let clock = Arc::new(SystemClock);
        let ids = Ids::new(clock.clone(), Random::from_entropy());
        House::with(store, blueprint, clock, ids)
    }

    /// A house over a store, with time and chance from elsewhere.
    pub fn with(
        store: Arc<dyn Store>,
        blueprint: &Blueprint,
        clock: Arc<dyn Clock>,
        ids: Ids,
    ) -> Result<House, crate::Problems> {
        let resources = resource::declare(blueprint)?;
        let house = House::of(&blueprint.name, resources, blueprint.keeping, store, clock, ids);
        let mut house = house.map_err(|error| {
            let mut problems = blueprint.problems();
            problems.add(BlueprintProblem::at(0..0, error.to_string()));
            problems
        })?;
        house.renamed_from.clone_from(&blueprint.renamed_from);
        house.endpoints = inbound::declare(blueprint, &house.resources)?;
        Ok(house)
    }

    /// A house with these resources, however they were declared.
    ///
    /// # Errors
    /// Two of them declare one table, or one of them declares a table of the house itself ([`system::tables`]).
    pub fn of(
        name: &str,
        resources: Vec<Resource>,
        keeping: Option<LogRetention>,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        ids: Ids,
    ) -> Result<House, SchemaError> {
        let schema = migrate::schema_of(&resources)?;
        let cache = Arc::new(Cache::holding(cache::BYTES_DEFAULT, store.partitions(), clock.clone()));
        let tail = Arc::new(Tail::of(store.partitions()));
        let partitions = store.partitions();
        let mut workers: Vec<Arc<dyn Worker>> = Vec::new();
        let mut declared = Vec::new();
        for resource in &resources {
            workers.extend(resource.workers.iter().cloned());
            for consuming in resource.consumers.iter().cloned() {
                match consuming {
                    Consuming::Group(handler) => workers.push(consumer(handler, partitions)),
                    Consuming::Projection(projector) => {
                        workers.push(Arc::new(ProjectionWorker::of(projector, partitions, clock.clone())));
                    }
                    Consuming::Declared(group) => declared.push(group),
                }
            }
        }
        workers.extend(cascade::workers(&resources));
        if let Some(keeping) = keeping {
            workers.push(Arc::new(Trimmer::of(keeping, partitions, declared)));
        }
        if resources.iter().any(|resource| resource.events.iter().any(|event| event.name == ERASED)) {
            workers.push(Arc::new(BlankingWorker::default()));
        }
        let wakeups = Arc::new(WakeupHub::of(&workers));
        Ok(House {
            name: name.to_owned(),
            renamed_from: None,
            resources,
            workers,
            schema,
            store,
            clock,
            ids,
            egress: Egress::default(),
            cache,
            tail,
            follower: Mutex::default(),
            wakeups,
            crew: Mutex::default(),
            unknown_outcomes: UnknownOutcomes::default(),
            combining: CombineQueues::default(),
            endpoints: Vec::new(),
            progress: ProgressTeller::default(),
            serving: Mutex::default(),
        })
    }

    /// The same house with a cache of another size.
    #[must_use]
    pub fn with_cache(mut self, bytes: usize) -> House {
        self.cache = Arc::new(Cache::holding(bytes, self.store.partitions(), self.clock.clone()));
        self
    }

    /// The same house, with a listener that is told from time to time how far a migration is that goes over rows.
    #[must_use]
    pub fn with_progress(mut self, listener: impl Fn(&RunProgress) + Send + Sync + 'static) -> House {
        self.progress = ProgressTeller(Some(Box::new(listener)));
        self
    }

    /// The same house with one more group of its own that reads the log. Its work is done by [`House::start_workers`].
    #[must_use]
    pub fn with_consumer(mut self, handler: Arc<dyn RecordHandler>) -> House {
        self.workers.push(consumer(handler, self.store.partitions()));
        self.wakeups = Arc::new(WakeupHub::of(&self.workers));
        self
    }

    /// The same house with a worker that deletes audit rows which are older than this.
    #[must_use]
    pub fn with_audit_retention(mut self, kept: Duration) -> House {
        self.workers.push(Arc::new(AuditSweeper::keeping(kept)));
        self.wakeups = Arc::new(WakeupHub::of(&self.workers));
        self
    }

    /// A group of the house that reads the log, by its name: how far it has got, and what it has parked.
    pub fn group(&self, name: &str) -> GroupInfo {
        GroupInfo::named(self.store.clone(), self.clock.clone(), name)
    }

    /// The projections of its resources.
    pub fn projections(&self) -> Vec<Projection> {
        let all = self.resources.iter().flat_map(|resource| &resource.consumers);
        let projection = |consuming: &Consuming| match consuming {
            Consuming::Projection(projector) => {
                Some(Projection::of(self.store.clone(), self.clock.clone(), projector.clone()))
            }
            Consuming::Group(_) | Consuming::Declared(_) => None,
        };
        all.filter_map(projection).collect()
    }

    /// All workers: those of the resources, and the house's own.
    pub fn workers(&self) -> &[Arc<dyn Worker>] {
        &self.workers
    }

    /// The same house with holds before its store, for bookings that keep theirs there.
    #[must_use]
    pub fn with_holds(mut self, holds: Arc<dyn ExternalHolds>) -> House {
        self.egress.holds = Some(holds);
        self
    }

    /// The same house with keys that encrypt the secrets in its store.
    #[must_use]
    pub fn with_secret_keys(mut self, keys: SecretKeys) -> House {
        self.egress.secret_keys = keys;
        self
    }

    /// The keys that encrypt the secrets in its store.
    pub fn secret_keys(&self) -> &SecretKeys {
        &self.egress.secret_keys
    }

    /// The same house with another outside: other couriers, other secrets.
    #[must_use]
    pub fn with_egress(mut self, egress: Egress) -> House {
        let holds = self.egress.holds.take();
        self.egress = Egress { holds: egress.holds.clone().or(holds), ..egress };
        self
    }

    /// What it reaches beyond its store.
    pub fn egress(&self) -> &Egress {
        &self.egress
    }

    /// Starts what follows the log on behalf of this house, in the caller's tokio runtime, until the house is gone.
    /// Without it cached reads are strong ones, and listeners receive no records.
    pub fn start_followers(&self) {
        let mut follower = self.follower.lock().unwrap_or_else(PoisonError::into_inner);
        if follower.is_none() {
            let (store, clock) = (self.store.clone(), self.clock.clone());
            *follower =
                Some(tokio::spawn(follow::follow(store, clock, self.cache.clone(), self.tail.clone())));
        }
    }

    /// The newest records of the log, for those who listen.
    pub fn tail(&self) -> &Arc<Tail> {
        &self.tail
    }

    /// Starts the workers of all resources, in the caller's tokio runtime, until [`House::stop_workers`] or until the
    /// house is gone. Other processes over the same store share the work.
    pub fn start_workers(&self, options: worker::WorkerOptions) {
        let workers = self.workers.clone();
        // The declarations of the house's own things are right, which a test shows.
        let (Ok(leases), Some(tenant)) = (system::leases(), system::tenant()) else {
            drop(bug!("the house's own table of leases, or its own tenant, is declared wrongly"));
            return;
        };
        let premises = PoolConfig {
            store: self.store.clone(),
            clock: self.clock.clone(),
            ids: self.ids.clone(),
            egress: self.egress.clone(),
            wakeups: self.wakeups.clone(),
            leases,
            tenant,
        };
        let mut crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        if crew.is_none() && !workers.is_empty() {
            *crew = Some(WorkerPool::start(premises, workers, options));
        }
    }

    /// Lets the steps under way finish, and hands the work over to other processes.
    pub async fn stop_workers(&self) {
        let crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(crew) = crew {
            crew.stop().await;
        }
    }

    /// What the workers of this process did so far; empty while none run.
    pub fn worker_figures(&self) -> Vec<worker::WorkerStats> {
        let crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        crew.as_ref().map(WorkerPool::stats).unwrap_or_default()
    }

    /// How often the store did not do what the workers of this process asked of it, because it was unavailable.
    pub fn worker_store_failures(&self) -> u64 {
        let crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        crew.as_ref().map(WorkerPool::store_failures).unwrap_or_default()
    }

    /// How writers wake workers: for those who write past the actions.
    pub fn bells(&self) -> &WakeupHub {
        &self.wakeups
    }

    /// The cache of reads.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What time it is for this house.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Where its ids come from.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// The house's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the blueprint declares.
    pub fn resources(&self) -> &[Resource] {
        &self.resources
    }

    /// The tables it needs.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The store below.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The resource of that name.
    pub fn resource(&self, name: &str) -> Result<&Resource, Refusal> {
        let names = || self.resources.iter().map(|resource| resource.name.as_str());
        let found = self.resources.iter().find(|resource| resource.name == name);
        found.ok_or_else(|| no_such("resource", name, names()))
    }

    fn context(&self) -> ActionContext<'_> {
        ActionContext {
            store: &*self.store,
            cache: &self.cache,
            clock: &*self.clock,
            holds: self.egress.holds.as_deref(),
            ids: &self.ids,
            resources: &self.resources,
            operation: "",
            attempt: 0,
            refused: None,
        }
    }
}

impl Drop for House {
    fn drop(&mut self) {
        if let Some(follower) = self.follower.get_mut().unwrap_or_else(PoisonError::into_inner) {
            follower.abort();
        }
        self.cache.stop();
    }
}

fn consumer(handler: Arc<dyn RecordHandler>, partitions: u32) -> Arc<dyn Worker> {
    Arc::new(Consumer::of(handler, partitions))
}
