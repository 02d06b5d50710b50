//! The house: resources over a store. Runs calls of actions, alone or several as one plan.
//!
//! H1. A write is one plan under one operation id. If its outcome is unknown it is committed again, under the same id,
//!     until it is known or the tries are used up; then the caller is told that it is unknown.
//! H2. An answer is made from the log record alone. A repetition under the same id gets the same answer.
//! H3. A repetition is recognized before its draft is judged: a call that was applied is answered from its record even
//!     if it would be refused today.
//! H4. A draft that lost a race is drafted anew, a bounded number of times, with growing pauses.
//! H5. Every event says what it is about ([`subject_of`]), also in a batch, whose record stands under its first subject.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use statehouse_store::{
    Clock, Commit, Draft as EventDraft, Entry, Event, Fate, Ids, Migrate, Plan, Random, Record, Refused,
    Schema, Store, StoreError, SystemClock, Tenant, Value,
};
use tokio::task::JoinHandle;

use crate::action::{
    Action, Answer, Call, Code, Desk, Does, Draft, Expected, Pieces, Refusal, Verdict, Write,
};
use crate::blueprint::Blueprint;
use crate::cache::{self, Cache, Token};
use crate::form::{Form, Misfit};
use crate::own;
use crate::resource::{self, Resource, no_such};

/// How often a draft that lost a race is drafted anew.
const RACES_MAX: u32 = 6;
/// How often an unknown outcome is asked for again.
const UNKNOWN_MAX: u32 = 4;
/// The first pause between tries; each one is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(5);

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

/// Resources over a store.
#[derive(Debug)]
pub struct House {
    name: String,
    resources: Vec<Resource>,
    schema: Schema,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    ids: Ids,
    cache: Arc<Cache>,
    follower: Mutex<Option<JoinHandle<()>>>,
}

/// One call that is ready to be drafted.
struct Ready<'a> {
    resource: &'a Resource,
    write: &'a dyn Write,
    call: Call,
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
        let tables = resources.iter().flat_map(|resource| resource.tables.clone()).chain(own::tables());
        // Names were checked by the declaration, so a clash cannot be left.
        let schema = Schema::new(tables).unwrap_or_default();
        let cache = Arc::new(Cache::holding(cache::BYTES_DEFAULT, store.partitions(), clock.clone()));
        let follower = Mutex::default();
        Ok(House { name: blueprint.name.clone(), resources, schema, store, clock, ids, cache, follower })
    }

    /// The same house with a cache of another size.
    #[must_use]
    pub fn with_cache(mut self, bytes: usize) -> House {
        self.cache = Arc::new(Cache::holding(bytes, self.store.partitions(), self.clock.clone()));
        self
    }

    /// Starts what follows the log on behalf of this house, in the caller's tokio runtime, until the house is gone.
    /// Without it cached reads are strong ones.
    pub fn start_followers(&self) {
        let mut follower = self.follower.lock().unwrap_or_else(PoisonError::into_inner);
        if follower.is_none() {
            *follower = Some(tokio::spawn(self.cache.clone().follow(self.store.clone())));
        }
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

    /// Makes the store fit the blueprint, or says what that would take.
    pub async fn migrate(&self, how: Migrate) -> Result<Vec<statehouse_store::Change>, StoreError> {
        self.store.migrate(&self.schema, how).await
    }

    /// The resource of that name.
    pub fn resource(&self, name: &str) -> Result<&Resource, Refusal> {
        self.resources.iter().find(|resource| resource.name == name).ok_or_else(|| no_such("resource", name))
    }

    /// The action of that full name.
    pub fn action(&self, name: &str) -> Result<(&Resource, &Action), Refusal> {
        let (resource, action) = name.split_once('.').ok_or_else(|| no_such("action", name))?;
        let resource = self.resource(resource)?;
        resource.action(action).map(|action| (resource, action)).ok_or_else(|| no_such("action", name))
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
            Does::Read(read) => read.read(&call, &self.desk()).await,
            Does::Write(write) => {
                let ready = Ready { resource, write: &**write, call };
                let answers =
                    self.write(tenant, &[ready], operation).await.map_err(|(_, refusal)| refusal)?;
                let answer = answers.into_iter().next();
                answer.ok_or_else(|| Refusal::new(Code::Internal, "a write had no answer"))
            }
        }
    }

    /// Runs several writes as one plan: all or none. A refusal says which one it was, from 0.
    pub async fn batch(
        &self,
        tenant: &Tenant,
        requests: Vec<Request>,
        operation: Operation,
    ) -> Result<Vec<Answer>, (usize, Refusal)> {
        let mut ready = Vec::with_capacity(requests.len());
        for (number, request) in requests.into_iter().enumerate() {
            let at = |refusal| (number, refusal);
            let (resource, action) = self.action(&request.action).map_err(at)?;
            let Does::Write(write) = &action.does else {
                let why = format!("{} reads; a batch is for writes", request.action);
                return Err(at(Refusal::new(Code::InvalidInput, why)));
            };
            let call = admit(resource, action, tenant, request).map_err(at)?;
            ready.push(Ready { resource, write: &**write, call });
        }
        self.write(tenant, &ready, operation).await
    }

    /// The plan that a call would commit now, for `explain`; `None` if nothing would have to be written.
    pub async fn plan(&self, tenant: &Tenant, request: Request) -> Result<Option<Plan>, Refusal> {
        let (resource, action) = self.action(&request.action)?;
        let call = admit(resource, action, tenant, request)?;
        let Does::Write(write) = &action.does else {
            return Err(Refusal::new(Code::InvalidInput, "reads have no plan"));
        };
        let ready = [Ready { resource, write: &**write, call }];
        let drafts = self.draft(&ready).await.map_err(|(_, refusal)| refusal)?;
        assemble(tenant, &ready, &drafts, &self.ids.next(), "")
    }

    fn desk(&self) -> Desk<'_> {
        Desk { store: &*self.store, cache: &self.cache }
    }

    async fn draft(&self, ready: &[Ready<'_>]) -> Result<Vec<Draft>, (usize, Refusal)> {
        let desk = self.desk();
        let mut drafts = Vec::with_capacity(ready.len());
        for (number, one) in ready.iter().enumerate() {
            drafts.push(one.write.draft(&one.call, &desk).await.map_err(|refusal| (number, refusal))?);
        }
        Ok(drafts)
    }

    async fn write(
        &self,
        tenant: &Tenant,
        ready: &[Ready<'_>],
        operation: Operation,
    ) -> Result<Vec<Answer>, (usize, Refusal)> {
        let at_first = |refusal: Refusal| (0, refusal);
        let Operation { id, fingerprint } = operation;
        let given = id.is_some();
        let id = id.unwrap_or_else(|| self.ids.next());
        // H3: an id that a caller chose may have been used before.
        if given
            && let Some(record) = self.store.recorded(tenant, &id).await.map_err(|e| at_first(e.into()))?
        {
            return answers(ready, &record, &fingerprint).map_err(at_first);
        }
        for race in 0.. {
            let drafts = self.draft(ready).await?;
            let plan = assemble(tenant, ready, &drafts, &id, &fingerprint).map_err(at_first)?;
            let Some(plan) = plan else {
                return Ok(drafts.into_iter().filter_map(done).collect());
            };
            match self.settle(&plan).await.map_err(at_first)? {
                Commit::Applied(applied) => {
                    let record = applied.record.ok_or_else(|| {
                        at_first(Refusal::new(Code::Internal, "a write left no record in the log"))
                    })?;
                    return answers(ready, &record, &fingerprint).map_err(at_first);
                }
                Commit::Fenced => return Err(at_first(fenced(&id))),
                Commit::Refused(refused) => {
                    let (number, verdict) = judge(ready, &drafts, refused);
                    match verdict {
                        Verdict::Refuse(refusal) => return Err((number, refusal)),
                        Verdict::TryAgain if race < RACES_MAX => self.pause(race).await,
                        Verdict::TryAgain => {
                            let message =
                                "too many callers write this row at once; it was tried several times";
                            return Err((number, Refusal::new(Code::Contended, message)));
                        }
                    }
                }
            }
        }
        Err(at_first(Refusal::new(Code::Internal, "a write was never decided")))
    }

    /// Commits a plan until its outcome is known (H1).
    async fn settle(&self, plan: &Plan) -> Result<Commit, Refusal> {
        let mut unknown = 0;
        loop {
            match self.store.commit(plan).await {
                Ok(commit) => return Ok(commit),
                Err(StoreError::OutcomeUnknown { .. }) if unknown < UNKNOWN_MAX => {
                    self.pause(unknown).await;
                    unknown += 1;
                }
                // A later try that did not reach the store says nothing about the first.
                Err(StoreError::Unavailable { why }) if unknown > 0 => {
                    return Err(StoreError::unknown(plan.operation(), why).into());
                }
                Err(error) => return Err(error.into()),
            }
        }
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

/// What an event of a record is about: the resource and the key, as text (H5).
pub fn subject_of<'r>(record: &'r Record, event: &'r Event) -> Option<(&'r str, &'r str)> {
    let (resource, _) = event.name.split_once('.')?;
    let key = event.data.get(SUBJECT).and_then(Json::as_str);
    Some((resource, key.unwrap_or(&record.key)))
}

/// Checks a request against the action's form.
fn admit(resource: &Resource, action: &Action, tenant: &Tenant, request: Request) -> Result<Call, Refusal> {
    let Request { key, input, expected, .. } = request;
    let misfits = Form::Object(action.input.clone()).misfits(&Json::Object(input.clone()));
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
            "{}.{} overwrites what others may have written: say which version you have seen",
            resource.name, action.name
        );
        return Err(Refusal::new(Code::VersionRequired, message));
    }
    Ok(Call { tenant: tenant.clone(), key, input, expected })
}

fn done(draft: Draft) -> Option<Answer> {
    if let Draft::Done(answer) = draft { Some(answer) } else { None }
}

fn pieces(draft: &Draft) -> Option<&Pieces> {
    if let Draft::Write(pieces) = draft { Some(pieces) } else { None }
}

/// The event of a call in a batch that had nothing to write: it keeps the answer for a repetition.
const UNCHANGED: &str = "unchanged";
/// Where an event in a batch has its own key.
const SUBJECT: &str = "subject";

/// One plan of all drafts, with one event for each; `None` if none of them has anything to write.
fn assemble(
    tenant: &Tenant,
    ready: &[Ready<'_>],
    drafts: &[Draft],
    operation: &str,
    fingerprint: &str,
) -> Result<Option<Plan>, Refusal> {
    let first = ready.iter().zip(drafts).find_map(|(one, draft)| Some((one.resource, pieces(draft)?)));
    let Some((resource, first)) = first else { return Ok(None) };
    let mut plan = Plan::of(tenant, operation).without_rows();
    let mut entry = Entry::about(&resource.name, &first.subject).fingerprint(fingerprint);
    for draft in drafts {
        let event = match draft {
            Draft::Done(answer) => EventDraft::named(UNCHANGED).with("answer", json!(answer)),
            Draft::Write(pieces) => {
                let mut event = pieces.event.clone();
                event.row_of = event.row_of.map(|step| step + plan.steps.len());
                if pieces.subject != first.subject {
                    event = event.with(SUBJECT, pieces.subject.as_str());
                }
                plan = plan.steps(pieces.steps.iter().cloned());
                event
            }
        };
        entry = entry.event(event);
    }
    Ok(Some(plan.log(entry).build()?))
}

/// Which call a refused step belongs to, and what that means.
fn judge(ready: &[Ready<'_>], drafts: &[Draft], mut refused: Refused) -> (usize, Verdict) {
    for (number, (one, draft)) in ready.iter().zip(drafts).enumerate() {
        let steps = pieces(draft).map_or(0, |pieces| pieces.steps.len());
        if refused.step < steps {
            return (number, one.write.refusal(&one.call, &refused));
        }
        refused.step -= steps;
    }
    (0, Verdict::Refuse(Refusal::new(Code::Internal, "the store refused a step that the plan does not have")))
}

/// The answers of calls that were applied, now or before (H2).
fn answers(ready: &[Ready<'_>], record: &Record, fingerprint: &str) -> Result<Vec<Answer>, Refusal> {
    let reused = || {
        let message = format!("operation {} was used for another request; use a new id", record.operation);
        Refusal::new(Code::OperationReused, message)
    };
    if record.fate == Fate::Aborted {
        return Err(fenced(&record.operation));
    }
    if record.fingerprint != fingerprint || record.events.len() != ready.len() {
        return Err(reused());
    }
    let token = Token::of(record).to_string();
    let answer = |(one, event): (&Ready<'_>, &Event)| {
        let answer = if event.name == UNCHANGED {
            let kept = event.data.get("answer").cloned().unwrap_or_default();
            serde_json::from_value(kept).map_err(|_| reused())?
        } else {
            one.write.answer(&one.call, event)
        };
        Ok(Answer { token: Some(token.clone()), ..answer })
    };
    ready.iter().zip(&record.events).map(answer).collect()
}

fn fenced(operation: &str) -> Refusal {
    let message = format!("operation {operation} was given up before it was applied; use a new id");
    Refusal::new(Code::OperationFenced, message)
}
