//! The house: resources over a store. Runs calls of actions, alone or several as one plan.
//!
//! H1. A write is one plan under one operation id. If its outcome is unknown it is committed again, under the same id,
//!     until it is known or the tries are used up; then the caller is told that it is unknown. A refusal after a lost
//!     answer is told only when the operation is fenced: what was lost may still be under way, and find its guard holding.
//!     If it only says to try again, and the id is the caller's own, the outcome is called unknown instead. The same holds
//!     for a caller that was told so before and asks again ([`crate::doubt`]).
//! H2. An answer is made from the log record alone. A repetition under the same id gets the same answer.
//! H3. A repetition is recognized before its draft is judged: a call that was applied is answered from its record even
//!     if it would be refused today.
//! H4. A draft that lost a race is drafted anew, a bounded number of times, with growing pauses.
//! H5. Locks that calls need ([`crate::lock`]) are taken before the draft, in one order, and given back by the plan itself;
//!     or, if there is none, at once. Whoever meets a lock of somebody else waits, with growing pauses and an end.
//! H6. Every event says what it is about ([`subject_of`]), also in a batch, and is read from the partition of its own subject.
//!     So readers of the log get each event once, and those of one row in the order of its versions.
//! H7. An action of several plans, or of a call for each item of a list, is not one write: each is decided by itself. Its answer
//!     is remembered under the caller's operation id; its calls have ids that are made from it. Calls for the items of a list
//!     may be tried as one plan first, which costs an engine far less than a plan for each: if all of them hold, nobody can
//!     tell the difference; if one does not, nothing was done, and each goes by itself.

mod many;
mod migrate;
mod moves;

pub(crate) use self::many::TOGETHER_MAX;

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use statehouse_store::{
    Backoff, Clock, Commit, Entry, Event, EventTemplate, Ids, OperationStatus, Plan, PlanError, Random,
    Record, Refused, Resolution, RetryPolicy, Schema, Store, StoreError, SystemClock, Tenant, Value,
    commit_reported,
};
use tokio::task::JoinHandle;

use crate::action::{Action, Answer, Call, Code, Desk, Does, Draft, Expected, Refusal, Verdict, Write};
use crate::blueprint::Blueprint;
use crate::cache::{self, Cache, Token};
use crate::doubt::Doubts;
use crate::follow::{self, Tail};
use crate::form::{Misfit, object_misfits};
use crate::holds::Holds;
use crate::infra::log::{Consumer, Group, Handler, Keeping, Trimmer};
use crate::infra::projection::{Projecting, Projection};
use crate::lock::{self, Held, Taken};
use crate::outside::Outside;
use crate::own;
use crate::resource::{self, Consuming, Resource, no_such};
use crate::worker::{self, Bells, Crew, Premises, Worker};

/// How often a draft that lost a race is drafted anew.
const RACES_MAX: u32 = 6;
/// How often a plan is committed whose outcome stays unknown.
const COMMIT_ATTEMPTS: u32 = 5;
/// The first pause between tries; each one is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(5);
/// How often the pause between two looks at a lock is doubled.
const WAIT_DOUBLINGS: u32 = 4;

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

/// Resources over a store.
#[derive(Debug)]
pub struct House {
    name: String,
    resources: Vec<Resource>,
    /// Those of the resources, and the house's own.
    workers: Vec<Arc<dyn Worker>>,
    schema: Schema,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    ids: Ids,
    outside: Outside,
    cache: Arc<Cache>,
    tail: Arc<Tail>,
    follower: Mutex<Option<JoinHandle<()>>>,
    bells: Arc<Bells>,
    crew: Mutex<Option<Crew>>,
    holds: Option<Arc<dyn Holds>>,
    doubts: Doubts,
}

/// One call that is ready to be drafted.
struct Ready<'a> {
    resource: &'a Resource,
    write: &'a dyn Write,
    call: Call,
}

/// What came of one try to write.
enum Attempt {
    /// It was applied, now or before.
    Written(Vec<Answer>),
    /// Nothing had to be written.
    Unchanged(Vec<Answer>),
    /// This call met others, who were faster or hold it.
    Lost(usize, Verdict),
}

/// How often a write met others.
struct Patience {
    races: u32,
    /// How often it may lose a race.
    races_max: u32,
    waits: u32,
    waited: Duration,
    /// Whether an answer was lost, so that a plan of this operation may still be under way.
    in_doubt: bool,
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
        Ok(House::of(&blueprint.name, resources, blueprint.keeping, store, clock, ids))
    }

    /// A house with these resources, however they were declared.
    pub fn of(
        name: &str,
        resources: Vec<Resource>,
        keeping: Option<Keeping>,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        ids: Ids,
    ) -> House {
        let tables = resources.iter().flat_map(|resource| resource.tables.clone()).chain(own::tables());
        // Names were checked by the declaration, so a clash cannot be left.
        let schema = Schema::new(tables).unwrap_or_default();
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
                        workers.push(Arc::new(Projecting::of(projector, partitions, clock.clone())));
                    }
                    Consuming::Declared(group) => declared.push(group),
                }
            }
        }
        if let Some(keeping) = keeping {
            workers.push(Arc::new(Trimmer::of(keeping, partitions, declared)));
        }
        let bells = Arc::new(Bells::of(&workers));
        House {
            name: name.to_owned(),
            resources,
            workers,
            schema,
            store,
            clock,
            ids,
            outside: Outside::default(),
            cache,
            tail,
            follower: Mutex::default(),
            bells,
            crew: Mutex::default(),
            holds: None,
            doubts: Doubts::default(),
        }
    }

    /// The same house with a cache of another size.
    #[must_use]
    pub fn with_cache(mut self, bytes: usize) -> House {
        self.cache = Arc::new(Cache::holding(bytes, self.store.partitions(), self.clock.clone()));
        self
    }

    /// The same house with one more group of its own that reads the log. Its work is done by [`House::start_workers`].
    #[must_use]
    pub fn with_consumer(mut self, handler: Arc<dyn Handler>) -> House {
        self.workers.push(consumer(handler, self.store.partitions()));
        self.bells = Arc::new(Bells::of(&self.workers));
        self
    }

    /// A group of the house that reads the log, by its name: how far it has got, and what it has parked.
    pub fn group(&self, name: &str) -> Group {
        Group::named(self.store.clone(), self.clock.clone(), name)
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
    pub fn with_holds(mut self, holds: Arc<dyn Holds>) -> House {
        self.holds = Some(holds);
        self
    }

    /// The same house with another outside: other couriers, other secrets.
    #[must_use]
    pub fn with_outside(mut self, outside: Outside) -> House {
        self.outside = outside;
        self
    }

    /// What it reaches beyond its store.
    pub fn outside(&self) -> &Outside {
        &self.outside
    }

    /// Starts what follows the log on behalf of this house, in the caller's tokio runtime, until the house is gone.
    /// Without it cached reads are strong ones, and nobody who listens hears anything.
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
    pub fn start_workers(&self, options: worker::Options) {
        let workers = self.workers.clone();
        // The declarations of the house's own things are right, which a test shows.
        let (Ok(leases), Some(tenant)) = (own::leases(), own::tenant()) else { return };
        let premises = Premises {
            store: self.store.clone(),
            clock: self.clock.clone(),
            ids: self.ids.clone(),
            outside: self.outside.clone(),
            bells: self.bells.clone(),
            leases,
            tenant,
        };
        let mut crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        if crew.is_none() && !workers.is_empty() {
            *crew = Some(Crew::start(premises, workers, options));
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
    pub fn worker_figures(&self) -> Vec<worker::Figures> {
        let crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        crew.as_ref().map(Crew::figures).unwrap_or_default()
    }

    /// How writers wake workers: for those who write past the actions.
    pub fn bells(&self) -> &Bells {
        &self.bells
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

    /// The action of that full name.
    pub fn action(&self, name: &str) -> Result<(&Resource, &Action), Refusal> {
        let (resource, action) = name.split_once('.').ok_or_else(|| {
            let message = format!("`{name}` is no action: write the resource, a dot and the action");
            Refusal::new(Code::NotFound, message)
        })?;
        let resource = self.resource(resource)?;
        let names = || resource.actions.iter().map(|action| &*action.name);
        let found = resource.action(action).map(|action| (resource, action));
        found.ok_or_else(|| no_such(&format!("action of {}", resource.name), action, names()))
    }

    /// Runs one action.
    pub async fn call(
        &self,
        tenant: &Tenant,
        request: Request,
        operation: Operation,
    ) -> Result<Answer, Refusal> {
        let (resource, action) = self.action(&request.action)?;
        let call = admit(resource, action, tenant, request)?;
        match &action.does {
            Does::Read(read) => read.read(&call, &self.desk(0)).await.map(Arc::unwrap_or_clone),
            Does::Write(write) => {
                let ready = Ready { resource, write: &**write, call };
                let answers = self
                    .write(tenant, &[ready], operation, RACES_MAX)
                    .await
                    .map_err(|(_, refusal)| refusal)?;
                let answer = answers.into_iter().next();
                answer.ok_or_else(|| Refusal::new(Code::Internal, "a write had no answer"))
            }
            Does::Several(several) => self.several(resource, &**several, &call, operation).await,
            Does::Each(each) => self.each(tenant, each, &call, &operation).await,
        }
    }

    /// Runs one action that reads. The answer may be shared with others who have asked for it.
    pub async fn read(&self, tenant: &Tenant, request: Request) -> Result<Arc<Answer>, Refusal> {
        let (resource, action) = self.action(&request.action)?;
        let Does::Read(read) = &action.does else {
            return Err(Refusal::new(Code::InvalidInput, format!("{} writes", request.action)));
        };
        read.read(&admit(resource, action, tenant, request)?, &self.desk(0)).await
    }

    /// Runs several writes as one plan: all or none. A refusal says which one it was, from 0, unless it is about all of them,
    /// as that of a plan which is too large.
    pub async fn batch(
        &self,
        tenant: &Tenant,
        requests: Vec<Request>,
        operation: Operation,
    ) -> Result<Vec<Answer>, RefusedCall> {
        self.at_once(tenant, requests, operation, RACES_MAX).await
    }

    async fn at_once(
        &self,
        tenant: &Tenant,
        requests: Vec<Request>,
        operation: Operation,
        races_max: u32,
    ) -> Result<Vec<Answer>, RefusedCall> {
        let mut ready = Vec::with_capacity(requests.len());
        for (number, request) in requests.into_iter().enumerate() {
            let at = |refusal| (Some(number), refusal);
            let (resource, action) = self.action(&request.action).map_err(at)?;
            let Does::Write(write) = &action.does else {
                let why = format!("{} is no single write; a batch is for those", request.action);
                return Err(at(Refusal::new(Code::InvalidInput, why)));
            };
            let call = admit(resource, action, tenant, request).map_err(at)?;
            ready.push(Ready { resource, write: &**write, call });
        }
        self.write(tenant, &ready, operation, races_max).await
    }

    /// The plan that a call would commit now, for `explain`; `None` if nothing would have to be written.
    pub async fn plan(&self, tenant: &Tenant, request: Request) -> Result<Option<Plan>, Refusal> {
        let (resource, action) = self.action(&request.action)?;
        let call = admit(resource, action, tenant, request)?;
        let Does::Write(write) = &action.does else {
            return Err(Refusal::new(Code::InvalidInput, "only a single write has a plan"));
        };
        let ready = [Ready { resource, write: &**write, call }];
        let drafts = self.draft(&ready, 0).await.map_err(|(_, refusal)| refusal)?;
        let wanted = wanted_locks(&ready).map_err(|(_, refusal)| refusal)?;
        let locks: Vec<Held> = wanted.iter().map(|(_, wanted)| Held::imagined(wanted)).collect();
        match assemble(tenant, &ready, drafts, &locks, &self.ids.next(), "")? {
            Assembled::Plan(plan, _) => Ok(Some(plan)),
            Assembled::Done(_) => Ok(None),
        }
    }

    fn desk(&self, tries: u32) -> Desk<'_> {
        let holds = self.holds.as_deref();
        let (cache, clock) = (&*self.cache, &*self.clock);
        Desk { store: &*self.store, cache, clock, holds, ids: &self.ids, resources: &self.resources, tries }
    }

    async fn draft(&self, ready: &[Ready<'_>], tries: u32) -> Result<Vec<Draft>, RefusedCall> {
        let desk = self.desk(tries);
        let mut drafts = Vec::with_capacity(ready.len());
        for (number, one) in ready.iter().enumerate() {
            drafts.push(one.write.draft(&one.call, &desk).await.map_err(|refusal| (Some(number), refusal))?);
        }
        Ok(drafts)
    }

    async fn write(
        &self,
        tenant: &Tenant,
        ready: &[Ready<'_>],
        operation: Operation,
        races_max: u32,
    ) -> Result<Vec<Answer>, RefusedCall> {
        let of_all = |refusal: Refusal| (None, refusal);
        let Operation { id, fingerprint } = operation;
        let given = id.is_some();
        let id = id.unwrap_or_else(|| self.ids.next());
        // H3: an id that a caller chose may have been used before.
        if given
            && let Some(record) =
                self.store.find_operation(tenant, &id).await.map_err(|e| of_all(e.into()))?
        {
            return answers(ready, record, &fingerprint).map_err(of_all);
        }
        let in_doubt = given && self.doubts.has(tenant, &id);
        let mut patience = Patience { races: 0, races_max, waits: 0, waited: Duration::ZERO, in_doubt };
        let written = self.persist(tenant, ready, &id, &fingerprint, &mut patience).await;
        let told = match written {
            // To fence it would take the caller's id away from a caller who is told to try again.
            Err((number, refusal)) if patience.in_doubt && given && refusal.code.is_passing() => {
                let why = format!("its answer was lost, and then: {}", refusal.message);
                Err((number, StoreError::unknown(&id, why).into()))
            }
            Err((number, refusal)) if patience.in_doubt && refusal.code != Code::OutcomeUnknown => {
                match self.store.resolve(tenant, &id).await {
                    Ok(Resolution::Applied(record)) => answers(ready, record, &fingerprint).map_err(of_all),
                    Ok(Resolution::Aborted) => Err((number, refusal)),
                    Err(error) => {
                        let why = format!("it was refused after a lost answer, and {error}");
                        Err((number, StoreError::unknown(&id, why).into()))
                    }
                }
            }
            written => written,
        };
        if given && matches!(&told, Err((_, refusal)) if refusal.code == Code::OutcomeUnknown) {
            self.doubts.add(tenant, &id);
        }
        told
    }

    /// Tries to write until it is done, or there is no more patience.
    async fn persist(
        &self,
        tenant: &Tenant,
        ready: &[Ready<'_>],
        id: &str,
        fingerprint: &str,
        patience: &mut Patience,
    ) -> Result<Vec<Answer>, RefusedCall> {
        loop {
            let locks = self.take_locks(tenant, ready, id, patience).await?;
            let attempt = self.attempt(tenant, ready, &locks, patience, id, fingerprint).await;
            // An unknown plan may yet be applied under its locks; if it is not, the next try under this id has them.
            let keeps = match &attempt {
                Ok(attempt) => matches!(attempt, Attempt::Written(_)),
                Err((_, refusal)) => refusal.code == Code::OutcomeUnknown,
            };
            if !keeps {
                self.give_back(tenant, &locks, id).await;
            }
            match attempt? {
                Attempt::Written(answers) | Attempt::Unchanged(answers) => return Ok(answers),
                Attempt::Lost(number, verdict) => {
                    self.bear(verdict, patience).await.map_err(|refusal| (Some(number), refusal))?;
                }
            }
        }
    }

    /// Drafts the calls and commits them, once.
    async fn attempt(
        &self,
        tenant: &Tenant,
        ready: &[Ready<'_>],
        locks: &[Held],
        patience: &mut Patience,
        id: &str,
        fingerprint: &str,
    ) -> Result<Attempt, RefusedCall> {
        let of_all = |refusal: Refusal| (None, refusal);
        let drafts = self.draft(ready, patience.races).await?;
        let (plan, steps) = match assemble(tenant, ready, drafts, locks, id, fingerprint).map_err(of_all)? {
            Assembled::Plan(plan, steps) => (plan, steps),
            Assembled::Done(answers) => return Ok(Attempt::Unchanged(answers)),
        };
        match self.settle(&plan, &mut patience.in_doubt).await.map_err(of_all)? {
            Commit::Applied(applied) => {
                let record = applied.record.ok_or_else(|| {
                    of_all(Refusal::new(Code::Internal, "a write left no record in the log"))
                })?;
                for (one, event) in ready.iter().zip(&record.events) {
                    let wakes = one.write.wakes(&one.call, event);
                    wakes.iter().for_each(|wake| self.bells.ring(wake));
                }
                answers(ready, record, fingerprint).map(Attempt::Written).map_err(of_all)
            }
            Commit::Fenced => Err(of_all(fenced(id))),
            Commit::Refused(refused) => {
                let (number, verdict) = judge(ready, &steps, refused);
                Ok(Attempt::Lost(number, verdict))
            }
        }
    }

    /// Pauses before the next try, or says that there is none.
    async fn bear(&self, verdict: Verdict, patience: &mut Patience) -> Result<(), Refusal> {
        match verdict {
            Verdict::Refuse(refusal) => Err(refusal),
            Verdict::Wait => self.wait(patience).await,
            Verdict::TryAgain if patience.races < patience.races_max => {
                // The first draft may not have looked, so there need not have been a race.
                if patience.races > 0 {
                    self.pause(patience.races).await;
                }
                patience.races += 1;
                Ok(())
            }
            Verdict::TryAgain => {
                let message = "too many callers write this row at once; it was tried several times";
                Err(Refusal::new(Code::Contended, message))
            }
        }
    }

    /// Waits a little for a lock that somebody else holds.
    async fn wait(&self, patience: &mut Patience) -> Result<(), Refusal> {
        if patience.waited >= lock::WAIT_MAX {
            let message = format!("others hold this row, for {:?} already; try again later", patience.waited);
            return Err(Refusal::new(Code::Contended, message));
        }
        let span = PAUSE.saturating_mul(1 << patience.waits.min(WAIT_DOUBLINGS));
        self.clock.sleep(span).await;
        patience.waits += 1;
        patience.waited += span;
        Ok(())
    }

    /// Takes the locks that the calls need (H5).
    async fn take_locks(
        &self,
        tenant: &Tenant,
        ready: &[Ready<'_>],
        id: &str,
        patience: &mut Patience,
    ) -> Result<Vec<Held>, RefusedCall> {
        let mut held = Vec::new();
        for (number, wanted) in wanted_locks(ready)? {
            loop {
                let taken = match lock::take(&*self.store, tenant, id, &wanted).await {
                    Ok(Taken::Held(lock)) => {
                        held.push(lock);
                        break;
                    }
                    Ok(Taken::Busy) => self.wait(patience).await,
                    Ok(Taken::Refused(refused)) => match ready.get(number) {
                        Some(one) => self.bear(one.write.refusal(&one.call, &refused), patience).await,
                        None => Ok(()),
                    },
                    Err(refusal) => Err(refusal),
                };
                if let Err(refusal) = taken {
                    self.give_back(tenant, &held, id).await;
                    return Err((Some(number), refusal));
                }
            }
        }
        Ok(held)
    }

    async fn give_back(&self, tenant: &Tenant, locks: &[Held], id: &str) {
        for lock in locks {
            lock.give_back(&*self.store, tenant, id).await;
        }
    }

    /// Commits a plan until its outcome is known (H1).
    async fn settle(&self, plan: &Plan, in_doubt: &mut bool) -> Result<Commit, Refusal> {
        let backoff = Some(Backoff { clock: &*self.clock, first: PAUSE });
        let policy = RetryPolicy { attempts: COMMIT_ATTEMPTS, backoff };
        let report = commit_reported(&*self.store, plan, policy).await;
        *in_doubt |= report.answer_lost;
        Ok(report.outcome?)
    }

    async fn pause(&self, tries: u32) {
        self.clock.sleep(PAUSE.saturating_mul(1 << tries.min(8))).await;
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

fn consumer(handler: Arc<dyn Handler>, partitions: u32) -> Arc<dyn Worker> {
    Arc::new(Consumer::of(handler, partitions))
}

/// What an event of a record is about: the resource and the key, as text (H6).
pub fn subject_of<'r>(record: &'r Record, event: &'r Event) -> Option<(&'r str, &'r str)> {
    let (resource, _) = event.name.split_once('.')?;
    let key = event.data.get(SUBJECT).and_then(Json::as_str);
    Some((resource, key.unwrap_or(&record.key)))
}

/// What an event of a record says, without what only tells its subject.
pub fn data_of(event: &Event) -> Cow<'_, Json> {
    if event.data.get(SUBJECT).is_none() {
        return Cow::Borrowed(&event.data);
    }
    let mut event = event.clone();
    drop_subject(&mut event);
    Cow::Owned(event.data)
}

/// An event about the row of a resource with this key, in an entry that may be about another one (H6).
pub(crate) fn with_subject(event: EventTemplate, resource: &str, key: &str, entry: &Entry) -> EventTemplate {
    if resource == entry.resource && key == entry.key {
        return event;
    }
    event.with(SUBJECT, key).about(resource, key)
}

/// Leaves of an event what it says without what only tells its subject.
pub(crate) fn drop_subject(event: &mut Event) {
    if let Some(data) = event.data.as_object_mut() {
        data.remove(SUBJECT);
    }
}

/// Checks a request against the action's form.
fn admit(resource: &Resource, action: &Action, tenant: &Tenant, request: Request) -> Result<Call, Refusal> {
    let Request { key, input, expected, .. } = request;
    let misfits = object_misfits(&action.input, &input);
    if !misfits.is_empty() {
        return Err(Refusal::misfits(misfits));
    }
    let names_row = action.route.place != crate::action::Place::Collection;
    if names_row && key.len() != resource.key.len() {
        let names: Vec<&str> = resource.key.iter().map(|(name, _)| name.as_str()).collect();
        let detail = format!("a key of {} is {}", resource.name, names.join(","));
        return Err(Refusal::misfits(vec![Misfit { pointer: "/key".into(), detail }]));
    }
    if action.needs_version && expected.is_none() {
        let message = format!(
            "{}.{} overwrites what others may have written: say which version you have seen, with If-Match over HTTP \
             or --version on the command line",
            resource.name, action.name
        );
        return Err(Refusal::new(Code::VersionRequired, message));
    }
    Ok(Call { tenant: tenant.clone(), key, input, expected })
}

/// The event of a call in a batch that had nothing to write: it keeps the answer for a repetition.
const UNCHANGED: &str = "unchanged";
/// Where an event in a batch has its own key.
const SUBJECT: &str = "subject";

/// Which call of several is refused, from 0, or none if the refusal is about all of them; and the refusal.
pub type RefusedCall = (Option<usize>, Refusal);

/// The locks that calls need, with the number of the call, each once and in one order for all operations.
fn wanted_locks(ready: &[Ready<'_>]) -> Result<Vec<(usize, lock::Wanted)>, RefusedCall> {
    let mut wanted = Vec::new();
    for (number, one) in ready.iter().enumerate() {
        if let Some(lock) = one.write.lock(&one.call).map_err(|refusal| (Some(number), refusal))? {
            wanted.push((number, lock));
        }
    }
    let name = |lock: &lock::Wanted| (lock.row.table().name().to_owned(), resource::key_text(lock.row.key()));
    wanted.sort_by_cached_key(|(_, lock)| name(lock));
    wanted.dedup_by(|(_, one), (_, other)| name(one) == name(other));
    Ok(wanted)
}

/// What becomes of drafts.
enum Assembled {
    /// None of them has anything to write; these are the answers.
    Done(Vec<Answer>),
    /// One plan of all of them, and how many of its steps belong to each.
    Plan(Plan, Vec<usize>),
}

/// One plan of all drafts, with one event for each, that gives back the locks.
fn assemble(
    tenant: &Tenant,
    ready: &[Ready<'_>],
    drafts: Vec<Draft>,
    locks: &[Held],
    operation: &str,
    fingerprint: &str,
) -> Result<Assembled, Refusal> {
    let mut subjects = ready.iter().zip(&drafts).filter_map(|(one, draft)| match draft {
        Draft::Write(pieces) => Some((one.resource, pieces.subject.clone())),
        Draft::Done(_) => None,
    });
    let Some((resource, subject)) = subjects.next() else {
        let answer = |draft| if let Draft::Done(answer) = draft { Some(answer) } else { None };
        return Ok(Assembled::Done(drafts.into_iter().filter_map(answer).collect()));
    };
    let mut plan = Plan::of(tenant, operation).without_rows();
    if let Some((_, lost)) = std::iter::once((resource, subject.clone())).chain(subjects).find(is_unnameable)
    {
        let detail = format!("`{lost}` cannot be a key: no path could name the row");
        return Err(Refusal::misfits(vec![Misfit { pointer: "/key".into(), detail }]));
    }
    let mut entry = Entry::about(&resource.name, subject.as_str()).fingerprint(fingerprint);
    let mut steps = Vec::with_capacity(drafts.len());
    let mut besides = Vec::new();
    for (one, draft) in ready.iter().zip(drafts) {
        let before = plan.steps.len();
        let about = |resource: &str, key: &str, mut event: EventTemplate| {
            event.row_of = event.row_of.map(|step| step + before);
            with_subject(event, resource, key, &entry)
        };
        let event = match draft {
            Draft::Done(answer) => EventTemplate::named(UNCHANGED).with("answer", json!(answer)),
            Draft::Write(pieces) => {
                let others = one.write.besides(&pieces.steps);
                besides.extend(others.into_iter().map(|(key, event)| {
                    let resource = event.name.split('.').next().unwrap_or_default().to_owned();
                    about(&resource, &key, event)
                }));
                plan = plan.steps(pieces.steps);
                about(&one.resource.name, &pieces.subject, pieces.event)
            }
        };
        steps.push(plan.steps.len() - before);
        entry = entry.event(event);
    }
    let entry = besides.into_iter().fold(entry, Entry::event);
    let plan = plan.steps(locks.iter().map(Held::release)).log(entry).build();
    Ok(Assembled::Plan(plan.map_err(|error| unbuilt(error, &steps))?, steps))
}

/// Whether clients and proxies take a key, in a path, for the folder itself or the one above.
fn is_unnameable((_, key): &(&Resource, String)) -> bool {
    ["", ".", ".."].contains(&key.as_str())
}

/// Why a plan cannot be, in words of the calls that it is made of.
fn unbuilt(error: PlanError, steps: &[usize]) -> Refusal {
    let PlanError::RowTwice { row, first, second } = &error else { return error.into() };
    let call_of = |step: usize| {
        let mut end = 0;
        steps.iter().position(|count| {
            end += count;
            step < end
        })
    };
    match (call_of(*first), call_of(*second)) {
        (Some(one), Some(other)) if one != other => {
            let message = format!(
                "calls {one} and {other} of the batch, counted from 0, both write {row}; a batch writes a row once, so \
                 make one call of them or send them one after the other"
            );
            Refusal::new(Code::InvalidInput, message)
        }
        _ => error.into(),
    }
}

/// Which call a refused step belongs to, and what that means.
fn judge(ready: &[Ready<'_>], steps: &[usize], mut refused: Refused) -> (usize, Verdict) {
    for (number, (one, steps)) in ready.iter().zip(steps).enumerate() {
        if refused.step < *steps {
            return (number, one.write.refusal(&one.call, &refused));
        }
        refused.step -= steps;
    }
    // Behind the drafts the locks are given back: one of them was lost.
    (0, Verdict::TryAgain)
}

/// The answers of calls that were applied, now or before (H2).
fn answers(ready: &[Ready<'_>], mut record: Record, fingerprint: &str) -> Result<Vec<Answer>, Refusal> {
    if record.status == OperationStatus::Aborted {
        return Err(fenced(&record.operation));
    }
    if record.fingerprint != fingerprint || record.events.len() < ready.len() {
        return Err(reused(&record.operation));
    }
    let token = Token::text_of(&record);
    let answer = |(one, event): (&Ready<'_>, &mut Event)| {
        let answer = if event.name == UNCHANGED {
            let kept = event.data.get_mut("answer").map(Json::take).unwrap_or_default();
            serde_json::from_value(kept).map_err(|_| reused(&record.operation))?
        } else {
            one.write.answer(&one.call, event)
        };
        Ok(Answer { token: Some(token.clone()), ..answer })
    };
    ready.iter().zip(&mut record.events).map(answer).collect()
}

fn reused(operation: &str) -> Refusal {
    let message = format!("operation {operation} was used for another request; use a new id");
    Refusal::new(Code::OperationReused, message)
}

fn fenced(operation: &str) -> Refusal {
    let message = format!("operation {operation} was given up before it was applied; use a new id");
    Refusal::new(Code::OperationFenced, message)
}
