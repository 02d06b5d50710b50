//! The worker that blanks the log: takes the erasures that were noted, goes once through the whole log for all of them, and has the
//! engine remove former contents.
//!
//! Several processes may do this at once, a command among them: each step changes the row that says how far the log is blank, under its
//! version, and blanking a page twice changes nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::blank::{BlankSubjects, tells_erasure};
use statehouse_store::guard::column;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::{EventSubject, partition_of};
use statehouse_store::{
    Address, BlankRange, Clock, Commit, Consistency, Guard, Plan, PlanError, Position, Row, Scan, Step,
    Store, StoreError, Table, Tenant, Time,
};

use super::{KEY, OPERATION, RESOURCE, erasures};
use crate::system;
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// The name of the worker.
pub const NAME: &str = "log.blank";
/// The key of the row that says how far the log is blank.
const LOG: &str = "log";
const SUBJECTS: &str = "subjects";
const HEADS: &str = "heads";
const LOG_PARTITION: &str = "log_partition";
const REACHED: &str = "reached";
const EVENTS: &str = "events";
const BEGAN_AT: &str = "began_at";
/// Erasures of one pass through the log at most, and bytes of their names.
const ERASURES_MAX: usize = 500;
const NAMES_BYTES_MAX: usize = 100_000;
/// Records in one step at most, and at least. They are larger than rows, but few of them change.
const RECORDS_MIN: usize = 250;
/// How many times as long as a pass the worker pauses after it, so that engines that rewrite a file do so seldom.
const REST: u32 = 10;

fn misuse(error: &PlanError) -> StoreError {
    StoreError::schema(system::BLANKING, error.to_string())
}

/// A row that was erased, as it is noted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NotedErasure {
    tenant: Tenant,
    subject: EventSubject,
    operation: String,
    /// The position of the event that tells of it.
    at: Position,
}

impl NotedErasure {
    fn to_json(&self) -> Json {
        let NotedErasure { tenant, subject, operation, at } = self;
        json!([tenant.as_str(), subject.resource, subject.key, operation, at.partition, at.offset])
    }

    fn of(json: &Json) -> Option<NotedErasure> {
        let text = |index: usize| json.get(index)?.as_str().map(str::to_owned);
        let number = |index: usize| json.get(index)?.as_u64();
        Some(NotedErasure {
            tenant: Tenant::new(text(0)?).ok()?,
            subject: EventSubject { resource: text(1)?, key: text(2)? },
            operation: text(3)?,
            at: Position { partition: u32::try_from(number(4)?).ok()?, offset: number(5)? },
        })
    }
}

/// A pass through the log, as it is stored.
#[derive(Clone, Debug)]
struct BlankingPass {
    erasures: Vec<NotedErasure>,
    /// The heads of the log when the pass began.
    heads: Vec<u64>,
    partition: u32,
    reached: u64,
    events: u64,
    began_at: Time,
    /// The version of its row.
    version: i64,
}

impl BlankingPass {
    fn of(row: &Row) -> Result<BlankingPass, StoreError> {
        let list = |column: &str| -> Result<Vec<Json>, StoreError> {
            let json = row.json(column).and_then(Json::as_array);
            json.cloned().ok_or_else(|| row.corrupt(column, "is not a list"))
        };
        let number = |column: &str| {
            u64::try_from(row.get_int(column)?).map_err(|_| row.corrupt(column, "is negative"))
        };
        let erasures = list(SUBJECTS)?.iter().map(NotedErasure::of).collect::<Option<_>>();
        let heads = list(HEADS)?.iter().map(Json::as_u64).collect::<Option<_>>();
        Ok(BlankingPass {
            erasures: erasures.ok_or_else(|| row.corrupt(SUBJECTS, "has something that is no erasure"))?,
            heads: heads.ok_or_else(|| row.corrupt(HEADS, "has something that is no offset"))?,
            partition: u32::try_from(number(LOG_PARTITION)?)
                .map_err(|_| row.corrupt(LOG_PARTITION, "is not a partition"))?,
            reached: number(REACHED)?,
            events: number(EVENTS)?,
            began_at: row.get_time(BEGAN_AT)?,
            version: row.version(),
        })
    }

    fn subjects(&self) -> BlankSubjects {
        let mut subjects = BlankSubjects::new();
        for NotedErasure { tenant, subject, at, .. } in &self.erasures {
            subjects.entry(tenant.clone()).or_default().insert(subject.clone(), *at);
        }
        subjects
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlankingStep {
    /// Whether more is left to do at once.
    pub more: bool,
    /// How many events it blanked.
    pub events: usize,
    /// When the pass began that this step ended, if it ended one.
    pub ended: Option<Time>,
}

/// Erasures over a store.
#[derive(Debug)]
pub struct ErasureBacklog<'s> {
    store: &'s dyn Store,
    clock: &'s dyn Clock,
}

impl<'s> ErasureBacklog<'s> {
    /// The erasures of a store.
    pub fn of(store: &'s dyn Store, clock: &'s dyn Clock) -> ErasureBacklog<'s> {
        ErasureBacklog { store, clock }
    }

    /// Blanks the log for all erasures that are noted now, and returns how many events were blanked.
    pub async fn finish(&self) -> Result<usize, StoreError> {
        let mut events = 0;
        loop {
            let step = self.step(PAGE_MAX).await?;
            events += step.events;
            if !step.more {
                return Ok(events);
            }
        }
    }

    /// Whether there are erasures whose events are not blank yet.
    pub async fn is_empty(&self) -> Result<bool, StoreError> {
        let page = self.store.scan(&Scan::all(&erasures()?)).await?;
        Ok(page.rows.is_empty() && page.next.is_none())
    }

    /// One bounded piece of work: begins a pass, blanks up to `limit` records, or ends the pass.
    pub async fn step(&self, limit: usize) -> Result<BlankingStep, StoreError> {
        let (table, tenant) = board()?;
        let address = Address::new(&table, &tenant, [LOG.into()]).map_err(|error| misuse(&error))?;
        let row = self.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        match row {
            None => Ok(BlankingStep { more: self.begin().await?, events: 0, ended: None }),
            Some(row) => {
                let pass = BlankingPass::of(&row)?;
                match pass.heads.get(pass.partition as usize).copied() {
                    Some(head) => self.blank(&pass, head, limit).await,
                    None => self.end(&pass).await,
                }
            }
        }
    }

    /// Begins a pass for the erasures that are noted. Says whether there are any.
    async fn begin(&self) -> Result<bool, StoreError> {
        let scan = Scan::all(&erasures()?).limit(ERASURES_MAX).map_err(|error| misuse(&error))?;
        let noted = self.store.scan(&scan).await?.rows;
        if noted.is_empty() {
            return Ok(false);
        }
        // After the notes were read, so that all events of their rows are at or below the heads (E2).
        let heads = self.store.wait_log(&[], Duration::ZERO).await?;
        let (mut erasures, mut bytes) = (Vec::new(), 0);
        for row in &noted {
            let subject = EventSubject {
                resource: row.get_text(RESOURCE)?.to_owned(),
                key: row.get_text(KEY)?.to_owned(),
            };
            let operation = row.get_text(OPERATION)?.to_owned();
            bytes += subject.resource.len() + subject.key.len() + operation.len() + 100;
            if bytes > NAMES_BYTES_MAX && !erasures.is_empty() {
                break;
            }
            let at = self.position_of(row.tenant(), &subject, &operation).await?;
            erasures.push(NotedErasure { tenant: row.tenant().clone(), subject, operation, at }.to_json());
        }
        let (table, tenant) = board()?;
        let step = Step::insert(&table, [LOG.into()])
            .set(SUBJECTS, statehouse_store::Value::Json(erasures.into()))
            .set(HEADS, statehouse_store::Value::Json(json!(heads)))
            .set(LOG_PARTITION, 0)
            .set(REACHED, 0)
            .set(EVENTS, 0)
            .set(BEGAN_AT, self.clock.now());
        self.change(&tenant, step).await?;
        Ok(true)
    }

    /// Where the event of an erasure stands in the partition of the row. If it was trimmed, nothing before it is left there.
    async fn position_of(
        &self,
        tenant: &Tenant,
        subject: &EventSubject,
        operation: &str,
    ) -> Result<Position, StoreError> {
        let partition = partition_of(tenant, &subject.resource, &subject.key, self.store.partitions());
        let trimmed = Position { partition, offset: 0 };
        let Some(record) = self.store.find_operation(tenant, operation).await? else { return Ok(trimmed) };
        if let Some(position) = record.position.filter(|position| position.partition == partition) {
            return Ok(position);
        }
        // A batch over several partitions does not say where its records stand.
        let mut after = 0;
        loop {
            let page = self.store.read_log(partition, after, PAGE_MAX).await?;
            let is_it = |record: &&statehouse_store::Record| {
                record.tenant == *tenant
                    && record.operation == operation
                    && record.events.iter().any(|event| tells_erasure(&event.name))
            };
            if let Some(position) = page.records.iter().find(is_it).and_then(|record| record.position) {
                return Ok(position);
            }
            match page.records.last().and_then(|record| record.position) {
                Some(last) => after = last.offset,
                None => return Ok(trimmed),
            }
        }
    }

    async fn blank(&self, pass: &BlankingPass, head: u64, limit: usize) -> Result<BlankingStep, StoreError> {
        let mut events = 0;
        let (mut partition, mut reached) = (pass.partition, pass.reached);
        if reached < head {
            let range = BlankRange {
                partition,
                after: reached,
                through: head,
                limit,
                subjects: Arc::new(pass.subjects()),
            };
            let page = self.store.blank_events(&range).await?;
            (reached, events) = (page.reached, page.events);
        }
        if reached >= head {
            (partition, reached) = (partition + 1, 0);
        }
        let (table, tenant) = board()?;
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let step = Step::update(&table, [LOG.into()])
            .guard(Guard::version(pass.version))
            .set(LOG_PARTITION, i64::from(partition))
            .set(REACHED, number(reached))
            .set(EVENTS, number(pass.events.saturating_add(events as u64)));
        self.change(&tenant, step).await?;
        Ok(BlankingStep { more: true, events, ended: None })
    }

    /// Has the engine remove former contents, and forgets the erasures (E4).
    async fn end(&self, pass: &BlankingPass) -> Result<BlankingStep, StoreError> {
        self.store.scrub().await?;
        let noted = erasures()?;
        for NotedErasure { tenant, subject, operation, .. } in &pass.erasures {
            // The row may have been created and erased again meanwhile, which is another pass.
            let step = Step::delete(&noted, [subject.resource.as_str().into(), subject.key.as_str().into()])
                .guard(column(OPERATION).eq(operation.as_str()));
            self.change(tenant, step).await?;
        }
        let (table, tenant) = board()?;
        let step = Step::delete(&table, [LOG.into()]).guard(Guard::version(pass.version));
        self.change(&tenant, step).await?;
        let more = !self.is_empty().await?;
        Ok(BlankingStep { more, events: 0, ended: Some(pass.began_at) })
    }

    /// Makes a change that is right to repeat: what is stored says what is left. A refusal means that another process was faster.
    async fn change(&self, tenant: &Tenant, step: Step) -> Result<(), StoreError> {
        let plan =
            Plan::of(tenant, NAME).step(step).without_rows().build().map_err(|error| misuse(&error))?;
        match self.store.commit(&plan).await {
            Ok(Commit::Applied(_) | Commit::Refused(_) | Commit::Fenced)
            | Err(StoreError::OutcomeUnknown { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn board() -> Result<(Arc<Table>, Tenant), StoreError> {
    let table = system::blanking().map_err(|error| StoreError::schema(error.table, error.why))?;
    let tenant = system::tenant().ok_or_else(|| StoreError::schema("the house", "it has no name"))?;
    Ok((table, tenant))
}

/// The worker that blanks the log.
#[derive(Debug, Default)]
pub struct BlankingWorker {
    /// Until when it pauses after a pass.
    rests_until: Mutex<Option<Time>>,
}

#[async_trait]
impl Worker for BlankingWorker {
    fn name(&self) -> &str {
        NAME
    }

    fn shards(&self) -> u32 {
        1
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let clock = &**context.clock;
        let rest = *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(until) = rest.filter(|until| clock.now() < *until) {
            return Ok(StepProgress { next: NextStep::At(until), ..StepProgress::idle() });
        }
        let backlog = ErasureBacklog::of(&**context.store, clock);
        let step = backlog.step(limit.max(RECORDS_MIN)).await?;
        if let Some(began) = step.ended {
            let until = clock.now().plus(clock.now().since(began).saturating_mul(REST));
            *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
        }
        let next = if step.more { NextStep::Now } else { NextStep::Idle };
        let rows = step.events.max(usize::from(step.more));
        Ok(StepProgress { rows, next, ..StepProgress::idle() })
    }
}
