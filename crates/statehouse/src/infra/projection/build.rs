//! The worker of a projection, and the handle for those who read it or watch over it.
//!
//! Each shard is a partition of the log and feeds every generation that has this projector's definition. The first shard
//! tends to the generations besides: begins builds, scans, compares, switches and deletes.

mod digest;
mod source_rows;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Address, Clock, Commit, Consistency, Cursor, Ids, Plan, PlanError, Position, Row, Scan, Step, Store,
    StoreError, Table, Tenant,
};
use tokio::task::JoinSet;

use self::digest::{digest_of, digest_of_source};
use self::source_rows::{put, put_in_pieces};
use super::pipeline::{GenerationGroup, generation_of, group_of};
use super::state::{BuildPhase, ProjectionState, projections_table};
use super::{GENERATION, Projector};
use crate::audit::{AuditActor, AuditEntry};
use crate::cache::ReadToken;
use crate::infra::log::{GroupInfo, GroupStatus, RecordHandler, feed, has_passed};
use crate::system;
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// Source rows in one plan of a scan at most.
const CHUNK_MAX: usize = 16;
/// Source rows at most that a scan writes one after another, where each may take many plans.
const IN_TURN_MAX: usize = 8;
/// How often a plan of a scan is tried that met the log's.
const RACES_MAX: u32 = 20;
/// PlanParts that one page of a scan writes at most, before the log has its turn.
const PIECES_MAX: usize = 256;
/// How many records a first build may be behind in a partition when it is switched to.
const BEHIND_MAX: u64 = 50;
/// The pause between two looks of a reader that waits for its write.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Rows that are deleted in one plan.
const DROP_MAX: usize = 8;

/// A projection, for its readers and those who watch over it.
#[derive(Clone, Debug)]
pub struct Projection {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    projector: Arc<dyn Projector>,
    /// Who operates it, and where ids of audit rows come from.
    by: Option<(AuditActor, Ids)>,
}

/// How a projection is.
#[derive(Clone, Debug)]
pub struct ProjectionStatus {
    /// Its generations.
    pub state: ProjectionState,
    /// How far the live generation has got.
    pub live: Vec<GroupStatus>,
    /// How far the one that is being built has got through the log.
    pub building: Vec<GroupStatus>,
    /// Whether the live generation was made by another definition than this process has.
    pub outdated: bool,
}

fn misuse(error: &PlanError) -> StoreError {
    StoreError::schema("a projection", error.to_string())
}

fn board() -> Result<(Arc<Table>, Tenant), StoreError> {
    // The same for every house. It is asked for with each page of a feed, and takes longer to declare than to read.
    static BOARD: OnceLock<(Arc<Table>, Tenant)> = OnceLock::new();
    if let Some(board) = BOARD.get() {
        return Ok(board.clone());
    }
    let table = projections_table().map_err(|error| StoreError::schema(error.table, error.why))?;
    let tenant = system::tenant().ok_or_else(|| StoreError::schema("the house", "it has no name"))?;
    Ok(BOARD.get_or_init(|| (table, tenant)).clone())
}

/// Where it stands which generations a projection has.
pub(super) fn state_address(name: &str) -> Result<Address, StoreError> {
    let (table, tenant) = board()?;
    Address::new(&table, &tenant, [name.into()]).map_err(|error| misuse(&error))
}

/// Reads which generations a projection has.
pub(super) async fn read_state(store: &dyn Store, name: &str) -> Result<ProjectionState, StoreError> {
    let rows = store.get(&[state_address(name)?], Consistency::Strong).await?;
    ProjectionState::of(rows.first().and_then(Option::as_ref))
}

/// Goes from one state to the next, if it is still the one that was read. The further step is the guard of a worker's lease, or the
/// audit row of an operator.
pub(super) async fn change_state(
    store: &dyn Store,
    name: &str,
    before: &ProjectionState,
    after: &ProjectionState,
    further: Option<Step>,
) -> Result<bool, StoreError> {
    let (table, tenant) = board()?;
    let plan = Plan::of(&tenant, "projection")
        .step(before.step_to(after, name, &table))
        .steps(further)
        .without_rows()
        .build()
        .map_err(|error| misuse(&error))?;
    Ok(matches!(store.commit(&plan).await?, Commit::Applied(_)))
}

impl Projection {
    /// The projection of a projector.
    pub fn of(store: Arc<dyn Store>, clock: Arc<dyn Clock>, projector: Arc<dyn Projector>) -> Projection {
        Projection { store, clock, projector, by: None }
    }

    /// The same on behalf of an operator: what is done with it is recorded in the audit, in the same plans.
    #[must_use]
    pub fn on_behalf_of(mut self, by: &AuditActor, ids: &Ids) -> Projection {
        self.by = Some((by.clone(), ids.clone()));
        self
    }

    /// The audit row of an operation.
    fn audited(&self, action: &str) -> Result<Option<Step>, StoreError> {
        let Some((by, ids)) = &self.by else { return Ok(None) };
        let step = AuditEntry::of(by, action, self.name()).step(self.clock.now(), &ids.next());
        step.map(Some).map_err(|error| StoreError::schema(error.table, error.why))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.projector.name()
    }

    /// Which generations it has.
    pub async fn state(&self) -> Result<ProjectionState, StoreError> {
        read_state(&*self.store, self.name()).await
    }

    /// The group that feeds a generation: how far it has got, and what it has parked.
    pub fn group(&self, generation: i64) -> GroupInfo {
        GroupInfo::named(self.store.clone(), self.clock.clone(), group_of(self.name(), generation))
    }

    /// How it is.
    pub async fn status(&self) -> Result<ProjectionStatus, StoreError> {
        let state = self.state().await?;
        let live = match &state.live {
            Some(generation) => self.group(generation.number).status().await?,
            None => Vec::new(),
        };
        let building = match &state.building {
            Some(building) => self.group(building.generation.number).status().await?,
            None => Vec::new(),
        };
        let definition = self.projector.definition();
        let outdated = state.live.as_ref().is_some_and(|live| live.definition != definition);
        Ok(ProjectionStatus { state, live, building, outdated })
    }

    /// Begins to build a new generation beside the live one. Says whether it could: one at a time.
    pub async fn rebuild(&self) -> Result<bool, StoreError> {
        begin(&self.store, &self.clock, &*self.projector, self.audited("projection.rebuild")?).await
    }

    /// Lets readers go back to the generation before the last switch. Says whether there is one.
    pub async fn roll_back(&self) -> Result<bool, StoreError> {
        let state = self.state().await?;
        let Some(after) = state.rolled_back() else { return Ok(false) };
        let audited = self.audited("projection.rollback")?;
        change_state(&*self.store, self.name(), &state, &after, audited).await
    }

    /// Has the generation before the last switch deleted. Says whether there is one.
    pub async fn drop_previous(&self) -> Result<bool, StoreError> {
        let state = self.state().await?;
        let Some(after) = state.dropping_previous() else { return Ok(false) };
        let audited = self.audited("projection.drop")?;
        change_state(&*self.store, self.name(), &state, &after, audited).await
    }

    /// The digest of a generation's entries, in which their order does not count.
    pub async fn digest(&self, generation: i64) -> Result<String, StoreError> {
        let digest = digest_of(&*self.store, &*self.projector, generation, &|| true).await?;
        Ok(digest.map(|digest| digest.to_string()).unwrap_or_default())
    }

    /// Waits until a generation has passed these writes of a tenant, and says whether it has. A write whose place the
    /// engine did not tell is passed once everything is that the log had when this was asked.
    pub async fn wait_for(
        &self,
        generation: i64,
        tenant: &Tenant,
        tokens: &[ReadToken],
        at_most: Duration,
    ) -> Result<bool, StoreError> {
        let group = group_of(self.name(), generation);
        wait_for(&*self.store, &*self.clock, &group, tenant, tokens, at_most).await
    }
}

pub(super) async fn wait_for(
    store: &dyn Store,
    clock: &dyn Clock,
    group: &str,
    tenant: &Tenant,
    tokens: &[ReadToken],
    at_most: Duration,
) -> Result<bool, StoreError> {
    let until = clock.uptime() + at_most;
    let mut places: Vec<Position> = Vec::new();
    for token in tokens {
        match token {
            ReadToken::At(position) => places.push(*position),
            ReadToken::Unplaced => {
                let heads = store.wait_log(&[], Duration::ZERO).await?;
                places.extend((0..).zip(heads).map(|(partition, offset)| Position { partition, offset }));
            }
        }
    }
    loop {
        if has_passed(store, group, tenant, &places).await? {
            return Ok(true);
        }
        let left = until.saturating_sub(clock.uptime());
        if left.is_zero() {
            return Ok(false);
        }
        clock.sleep(LOOK_AGAIN.min(left)).await;
    }
}

/// Begins to build a generation: its group starts where the log is now, and the scan comes after that.
async fn begin(
    store: &Arc<dyn Store>,
    clock: &Arc<dyn Clock>,
    projector: &dyn Projector,
    further: Option<Step>,
) -> Result<bool, StoreError> {
    let name = projector.name();
    let state = read_state(&**store, name).await?;
    let Some(after) = state.begun(projector.definition()) else { return Ok(false) };
    let group = GroupInfo::named(store.clone(), clock.clone(), group_of(name, after.newest));
    let heads = store.wait_log(&[], Duration::ZERO).await?;
    for (partition, head) in (0..).zip(heads) {
        group.begin_at(partition, head).await?;
    }
    change_state(&**store, name, &state, &after, further).await
}

/// The worker of a projection: as many shards as the log has partitions.
#[derive(Debug)]
pub struct ProjectionWorker {
    name: String,
    partitions: u32,
    clock: Arc<dyn Clock>,
    projector: Arc<dyn Projector>,
}

impl ProjectionWorker {
    /// The worker of a projector, over a log of so many partitions.
    pub fn of(projector: Arc<dyn Projector>, partitions: u32, clock: Arc<dyn Clock>) -> ProjectionWorker {
        ProjectionWorker { name: format!("{}.project", projector.name()), partitions, clock, projector }
    }

    /// Feeds all generations of this definition from the log.
    async fn feed(
        &self,
        context: &StepContext<'_>,
        limit: usize,
        progress: &mut StepProgress,
    ) -> Result<(), StoreError> {
        let state = read_state(&**context.store, self.projector.name()).await?;
        for generation in state.filled_by(&self.projector.definition()) {
            let handler: Arc<dyn RecordHandler> = Arc::new(GenerationGroup::of(&self.projector, generation));
            let fed = feed(&handler, context, limit).await?;
            progress.rows += fed.rows;
            progress.lag = progress.lag.max(fed.lag);
            progress.failures.extend(fed.failures);
            if progress.next != NextStep::Now {
                progress.next = fed.next;
            }
        }
        Ok(())
    }

    /// Looks after the generations. Says how many rows that took, and what went wrong.
    async fn tend(
        &self,
        context: &StepContext<'_>,
        limit: usize,
        progress: &mut StepProgress,
    ) -> Result<(), StoreError> {
        let (store, name) = (&**context.store, self.projector.name());
        let state = read_state(store, name).await?;
        let definition = self.projector.definition();
        if state.dropping.is_some() {
            progress.rows += self.delete(context, &state).await?;
            change_state(store, name, &state, &state.dropped(), Some(context.guard())).await?;
            return Ok(());
        }
        // What another version of the program has built, or builds, is its own affair.
        if state.filled_by(&definition).is_empty() {
            let begun = begin(context.store, &self.clock, &*self.projector, Some(context.guard())).await?;
            progress.rows += usize::from(begun);
            return Ok(());
        }
        let Some(building) = state.building.as_ref().filter(|one| one.generation.definition == definition)
        else {
            return Ok(());
        };
        let generation = building.generation.number;
        match building.phase {
            BuildPhase::Differs => {}
            BuildPhase::Scanning => self.scan(context, &state, generation, limit, progress).await?,
            BuildPhase::CatchingUp => {
                if self.has_caught_up(context, &state, generation).await?
                    && let Some((verified, digest)) = self.compare(context, generation).await?
                    && let Some(after) = state.switched(verified, digest)
                    && change_state(store, name, &state, &after, Some(context.guard())).await?
                {
                    progress.rows += 1;
                    if verified == Some(false) {
                        progress
                            .failures
                            .push(format!("generation {generation} of {name} differs from its source"));
                    }
                }
            }
        }
        Ok(())
    }

    /// One page of the source (I6).
    async fn scan(
        &self,
        context: &StepContext<'_>,
        state: &ProjectionState,
        generation: i64,
        limit: usize,
        progress: &mut StepProgress,
    ) -> Result<(), StoreError> {
        let bad = |error: PlanError| misuse(&error);
        let mut scan = Scan::all(self.projector.source()).limit(limit).map_err(bad)?;
        if let Some(cursor) = state.building.as_ref().and_then(|building| building.cursor.as_deref()) {
            scan = Cursor::parse(cursor).and_then(|cursor| scan.after(cursor)).map_err(bad)?;
        }
        let page = context.store.scan(&scan).await?;
        let count = page.rows.len();
        // Whether a row is written to its end.
        let mut plans: JoinSet<Result<bool, StoreError>> = JoinSet::new();
        let left = Arc::new(AtomicUsize::new(PIECES_MAX));
        let mut by_tenant: BTreeMap<Tenant, Vec<Row>> = BTreeMap::new();
        for row in page.rows {
            by_tenant.entry(row.tenant().clone()).or_default().push(row);
        }
        let chunk_max = if self.projector.reach().is_some() { IN_TURN_MAX } else { CHUNK_MAX };
        for (tenant, rows) in by_tenant {
            for chunk in rows.chunks(chunk_max) {
                let (store, ids, now) = (context.store.clone(), context.ids.clone(), context.clock.now());
                let (projector, clock) = (self.projector.clone(), self.clock.clone());
                let (held, left) = (context.held.clone(), left.clone());
                let (tenant, chunk) = (tenant.clone(), chunk.to_vec());
                plans.spawn(async move {
                    if projector.reach().is_none() {
                        let put = put(&*store, &ids, &*projector, generation, &tenant, chunk);
                        return put.await.map(|()| true);
                    }
                    let one_less = |left: usize| left.checked_sub(1);
                    let may = || {
                        held.is_live(&*clock)
                            && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
                    };
                    put_in_pieces(&*store, &ids, &*projector, generation, &chunk, now, &may).await
                });
            }
        }
        let mut is_done = true;
        while let Some(put) = plans.join_next().await {
            is_done &= put.map_err(|panic| StoreError::unavailable(panic.to_string()))??;
        }
        progress.rows += count.max(1);
        // What was not written to its end is come to again, with its page; what is stored tells how far it is.
        if !is_done {
            return Ok(());
        }
        let rows = i64::try_from(count).unwrap_or(i64::MAX);
        let after = state.scanned_to(rows, page.next.map(|cursor| cursor.to_string()));
        change_state(&**context.store, self.projector.name(), state, &after, Some(context.guard())).await?;
        Ok(())
    }

    /// Whether a generation has passed what the live one has, and is not far behind the log (I5).
    async fn has_caught_up(
        &self,
        context: &StepContext<'_>,
        state: &ProjectionState,
        generation: i64,
    ) -> Result<bool, StoreError> {
        let group = |number: i64| {
            GroupInfo::named(
                context.store.clone(),
                self.clock.clone(),
                group_of(self.projector.name(), number),
            )
        };
        let built = group(generation).status().await?;
        let live = match &state.live {
            Some(live) => group(live.number).status().await?.iter().map(|one| one.reached).collect(),
            None => Vec::new(),
        };
        let passed = |one: &GroupStatus| {
            let live = live.get(one.partition as usize).copied().unwrap_or(0);
            one.reached >= live && one.records <= BEHIND_MAX
        };
        Ok(built.iter().all(passed))
    }

    /// Compares a generation's entries with the source: equal or not, if nothing was written meanwhile; and their digest.
    async fn compare(
        &self,
        context: &StepContext<'_>,
        generation: i64,
    ) -> Result<Option<(Option<bool>, String)>, StoreError> {
        let (store, projector) = (&**context.store, &*self.projector);
        let group = GroupInfo::named(
            context.store.clone(),
            self.clock.clone(),
            group_of(projector.name(), generation),
        );
        let is_live = || context.is_live();
        let ahead = async || -> Result<(Vec<u64>, u64), StoreError> {
            let standing = group.status().await?;
            let heads = standing.iter().map(|one| one.head).collect();
            Ok((heads, standing.iter().map(|one| one.records).sum()))
        };
        let before = ahead().await?;
        let Some(built) = digest_of(store, projector, generation, &is_live).await? else { return Ok(None) };
        let Some(truth) = digest_of_source(store, projector, &is_live).await? else { return Ok(None) };
        let quiet = before.1 == 0 && before == ahead().await?;
        Ok(Some((quiet.then_some(built == truth), built.to_string())))
    }

    /// Deletes the rows of all generations that are over, and of their groups.
    async fn delete(&self, context: &StepContext<'_>, state: &ProjectionState) -> Result<usize, StoreError> {
        let mut deleted = 0;
        for table in self.projector.tables() {
            let mut scan = Scan::all(&table);
            loop {
                let page = context.store.scan(&scan).await?;
                let is_over = |row: &&Row| row.int(GENERATION).is_some_and(|number| state.is_over(number));
                let ours = page.rows.iter().filter(is_over);
                deleted += delete_rows(&**context.store, ours).await?;
                let Some(next) = page.next else { break };
                if !context.is_live() {
                    return Err(StoreError::unavailable("the shard is another's"));
                }
                scan = scan.after(next).map_err(|error| misuse(&error))?;
            }
        }
        let name = self.projector.name();
        for table in [crate::infra::log::progress_table(), crate::infra::log::parked_table()] {
            let table = table.map_err(|error| StoreError::schema(error.table, error.why))?;
            let mut scan = Scan::all(&table);
            loop {
                let page = context.store.scan(&scan).await?;
                let is_over = |row: &&Row| {
                    let group = row.text("consumer").and_then(|group| generation_of(name, group));
                    group.is_some_and(|number| state.is_over(number))
                };
                let ours = page.rows.iter().filter(is_over);
                deleted += delete_rows(&**context.store, ours).await?;
                let Some(next) = page.next else { break };
                scan = scan.after(next).map_err(|error| misuse(&error))?;
            }
        }
        Ok(deleted)
    }
}

/// Deletes rows, some of a tenant at once. No generation uses them any more, so they need no guard.
async fn delete_rows<'r>(
    store: &dyn Store,
    rows: impl Iterator<Item = &'r Row>,
) -> Result<usize, StoreError> {
    let mut by_tenant: BTreeMap<&Tenant, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        by_tenant.entry(row.tenant()).or_default().push(row);
    }
    let mut deleted = 0;
    for (tenant, rows) in by_tenant {
        for some in rows.chunks(DROP_MAX) {
            let steps = some.iter().map(|row| Step::remove(row.table(), row.key().iter().cloned()));
            let plan = Plan::of(tenant, "projection.drop").steps(steps).without_rows().build();
            store.commit(&plan.map_err(|error| misuse(&error))?).await?;
            deleted += some.len();
        }
    }
    Ok(deleted)
}

#[async_trait]
impl Worker for ProjectionWorker {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.partitions
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let mut progress = StepProgress::idle();
        let fed = self.feed(context, limit, &mut progress).await;
        // After the log has had its turn: whatever becomes of a build, the live generation does not wait for it.
        if context.shard == 0 {
            let before = progress.rows;
            match self.tend(context, limit, &mut progress).await {
                Ok(()) if progress.rows > before => progress.next = NextStep::Now,
                Ok(()) => {}
                Err(error) => progress.failures.push(error.to_string()),
            }
        }
        fed.map(|()| progress)
    }
}
