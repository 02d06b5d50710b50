//! The worker of a projection, and the handle for those who read it or watch over it.
//!
//! Each shard is a partition of the log and feeds every generation that has this projector's definition. The first shard
//! tends to the generations besides: begins builds, scans, compares, switches and deletes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Address, Clock, Commit, Consistency, Cursor, Ids, Plan, PlanError, Position, Reason, Row, Scan, Step,
    Store, StoreError, Table, Tenant, Time, Value,
};
use tokio::task::JoinSet;

use super::pipeline::{Digest, Feed, Sheet, as_store_error, generation_of, group_of};
use super::state::{Phase, State, projections_table};
use super::{Change, Entry, GENERATION, Matter, Projector, SOURCE};
use crate::cache::Token;
use crate::infra::log::{Group, Handler, Reading, Standing, Unable, feed, has_passed};
use crate::own;
use crate::worker::{Next, Progress, Shift, Worker};

/// Source rows in one plan of a scan at most.
const CHUNK_MAX: usize = 16;
/// Source rows at most that a scan writes one after another, where each may take many plans.
const IN_TURN_MAX: usize = 8;
/// How often a plan of a scan is tried that met the log's.
const RACES_MAX: u32 = 20;
/// Pieces that one page of a scan writes at most, before the log has its turn.
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
}

/// How a projection is.
#[derive(Clone, Debug)]
pub struct Status {
    /// Its generations.
    pub state: State,
    /// How far the live generation has got.
    pub live: Vec<Standing>,
    /// How far the one that is being built has got through the log.
    pub building: Vec<Standing>,
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
    let tenant = own::tenant().ok_or_else(|| StoreError::schema("the house", "it has no name"))?;
    Ok(BOARD.get_or_init(|| (table, tenant)).clone())
}

/// Where it stands which generations a projection has.
pub(super) fn state_address(name: &str) -> Result<Address, StoreError> {
    let (table, tenant) = board()?;
    Address::new(&table, &tenant, [name.into()]).map_err(|error| misuse(&error))
}

/// Reads which generations a projection has.
pub(super) async fn read_state(store: &dyn Store, name: &str) -> Result<State, StoreError> {
    let rows = store.get(&[state_address(name)?], Consistency::Strong).await?;
    Ok(State::of(rows.first().and_then(Option::as_ref)))
}

/// Goes from one state to the next, if it is still the one that was read.
pub(super) async fn change_state(
    store: &dyn Store,
    name: &str,
    before: &State,
    after: &State,
    lease: Option<Step>,
) -> Result<bool, StoreError> {
    let (table, tenant) = board()?;
    let plan = Plan::of(&tenant, "projection")
        .step(before.step_to(after, name, &table))
        .steps(lease)
        .without_rows()
        .build()
        .map_err(|error| misuse(&error))?;
    Ok(matches!(store.commit(&plan).await?, Commit::Applied(_)))
}

impl Projection {
    /// The projection of a projector.
    pub fn of(store: Arc<dyn Store>, clock: Arc<dyn Clock>, projector: Arc<dyn Projector>) -> Projection {
        Projection { store, clock, projector }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.projector.name()
    }

    /// Which generations it has.
    pub async fn state(&self) -> Result<State, StoreError> {
        read_state(&*self.store, self.name()).await
    }

    /// The group that feeds a generation: how far it has got, and what it has parked.
    pub fn group(&self, generation: i64) -> Group {
        Group::named(self.store.clone(), self.clock.clone(), group_of(self.name(), generation))
    }

    /// How it is.
    pub async fn status(&self) -> Result<Status, StoreError> {
        let state = self.state().await?;
        let live = match &state.live {
            Some(generation) => self.group(generation.number).standing().await?,
            None => Vec::new(),
        };
        let building = match &state.building {
            Some(building) => self.group(building.generation.number).standing().await?,
            None => Vec::new(),
        };
        let definition = self.projector.definition();
        let outdated = state.live.as_ref().is_some_and(|live| live.definition != definition);
        Ok(Status { state, live, building, outdated })
    }

    /// Begins to build a new generation beside the live one. Says whether it could: one at a time.
    pub async fn rebuild(&self) -> Result<bool, StoreError> {
        begin(&self.store, &self.clock, &*self.projector, None).await
    }

    /// Lets readers go back to the generation before the last switch. Says whether there is one.
    pub async fn roll_back(&self) -> Result<bool, StoreError> {
        let state = self.state().await?;
        let Some(after) = state.rolled_back() else { return Ok(false) };
        change_state(&*self.store, self.name(), &state, &after, None).await
    }

    /// Has the generation before the last switch deleted. Says whether there is one.
    pub async fn drop_previous(&self) -> Result<bool, StoreError> {
        let state = self.state().await?;
        let Some(after) = state.dropping_previous() else { return Ok(false) };
        change_state(&*self.store, self.name(), &state, &after, None).await
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
        tokens: &[Token],
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
    tokens: &[Token],
    at_most: Duration,
) -> Result<bool, StoreError> {
    let until = clock.uptime() + at_most;
    let mut places: Vec<Position> = Vec::new();
    for token in tokens {
        match token {
            Token::At(position) => places.push(*position),
            Token::Unplaced => {
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
    lease: Option<Step>,
) -> Result<bool, StoreError> {
    let name = projector.name();
    let state = read_state(&**store, name).await?;
    let Some(after) = state.begun(projector.definition()) else { return Ok(false) };
    let group = Group::named(store.clone(), clock.clone(), group_of(name, after.newest));
    let heads = store.wait_log(&[], Duration::ZERO).await?;
    for (partition, head) in (0..).zip(heads) {
        group.begin_at(partition, head).await?;
    }
    change_state(&**store, name, &state, &after, lease).await
}

/// The worker of a projection: as many shards as the log has partitions.
#[derive(Debug)]
pub struct Projecting {
    name: String,
    partitions: u32,
    clock: Arc<dyn Clock>,
    projector: Arc<dyn Projector>,
}

impl Projecting {
    /// The worker of a projector, over a log of so many partitions.
    pub fn of(projector: Arc<dyn Projector>, partitions: u32, clock: Arc<dyn Clock>) -> Projecting {
        Projecting { name: format!("{}.project", projector.name()), partitions, clock, projector }
    }

    /// Feeds all generations of this definition from the log.
    async fn feed(&self, shift: &Shift<'_>, limit: usize, progress: &mut Progress) -> Result<(), StoreError> {
        let state = read_state(&**shift.store, self.projector.name()).await?;
        for generation in state.filled_by(&self.projector.definition()) {
            let handler: Arc<dyn Handler> = Arc::new(Feed::of(&self.projector, generation));
            let fed = feed(&handler, shift, limit).await?;
            progress.rows += fed.rows;
            progress.lag = progress.lag.max(fed.lag);
            progress.failures.extend(fed.failures);
            if progress.next != Next::Now {
                progress.next = fed.next;
            }
        }
        Ok(())
    }

    /// Looks after the generations. Says how many rows that took, and what went wrong.
    async fn tend(&self, shift: &Shift<'_>, limit: usize, progress: &mut Progress) -> Result<(), StoreError> {
        let (store, name) = (&**shift.store, self.projector.name());
        let state = read_state(store, name).await?;
        let definition = self.projector.definition();
        if state.dropping.is_some() {
            progress.rows += self.delete(shift, &state).await?;
            change_state(store, name, &state, &state.dropped(), Some(shift.guard())).await?;
            return Ok(());
        }
        // What another version of the program has built, or builds, is its own affair.
        if state.filled_by(&definition).is_empty() {
            let begun = begin(shift.store, &self.clock, &*self.projector, Some(shift.guard())).await?;
            progress.rows += usize::from(begun);
            return Ok(());
        }
        let Some(building) = state.building.as_ref().filter(|one| one.generation.definition == definition)
        else {
            return Ok(());
        };
        let generation = building.generation.number;
        match building.phase {
            Phase::Differs => {}
            Phase::Scanning => self.scan(shift, &state, generation, limit, progress).await?,
            Phase::CatchingUp => {
                if self.has_caught_up(shift, &state, generation).await?
                    && let Some((verified, digest)) = self.compare(shift, generation).await?
                    && let Some(after) = state.switched(verified, digest)
                    && change_state(store, name, &state, &after, Some(shift.guard())).await?
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
        shift: &Shift<'_>,
        state: &State,
        generation: i64,
        limit: usize,
        progress: &mut Progress,
    ) -> Result<(), StoreError> {
        let bad = |error: PlanError| misuse(&error);
        let mut scan = Scan::all(self.projector.source()).limit(limit).map_err(bad)?;
        if let Some(cursor) = state.building.as_ref().and_then(|building| building.cursor.as_deref()) {
            scan = Cursor::parse(cursor).and_then(|cursor| scan.after(cursor)).map_err(bad)?;
        }
        let page = shift.store.scan(&scan).await?;
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
                let (store, ids, now) = (shift.store.clone(), shift.ids.clone(), shift.clock.now());
                let (projector, clock) = (self.projector.clone(), self.clock.clone());
                let (held, left) = (shift.held.clone(), left.clone());
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
        change_state(&**shift.store, self.projector.name(), state, &after, Some(shift.guard())).await?;
        Ok(())
    }

    /// Whether a generation has passed what the live one has, and is not far behind the log (I5).
    async fn has_caught_up(
        &self,
        shift: &Shift<'_>,
        state: &State,
        generation: i64,
    ) -> Result<bool, StoreError> {
        let group = |number: i64| {
            Group::named(shift.store.clone(), self.clock.clone(), group_of(self.projector.name(), number))
        };
        let built = group(generation).standing().await?;
        let live = match &state.live {
            Some(live) => group(live.number).standing().await?.iter().map(|one| one.reached).collect(),
            None => Vec::new(),
        };
        let passed = |one: &Standing| {
            let live = live.get(one.partition as usize).copied().unwrap_or(0);
            one.reached >= live && one.records <= BEHIND_MAX
        };
        Ok(built.iter().all(passed))
    }

    /// Compares a generation's entries with the source: equal or not, if nothing was written meanwhile; and their digest.
    async fn compare(
        &self,
        shift: &Shift<'_>,
        generation: i64,
    ) -> Result<Option<(Option<bool>, String)>, StoreError> {
        let (store, projector) = (&**shift.store, &*self.projector);
        let group =
            Group::named(shift.store.clone(), self.clock.clone(), group_of(projector.name(), generation));
        let is_live = || shift.is_live();
        let ahead = async || -> Result<(Vec<u64>, u64), StoreError> {
            let standing = group.standing().await?;
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
    async fn delete(&self, shift: &Shift<'_>, state: &State) -> Result<usize, StoreError> {
        let mut deleted = 0;
        for table in self.projector.tables() {
            let mut scan = Scan::all(&table);
            loop {
                let page = shift.store.scan(&scan).await?;
                let is_over = |row: &&Row| row.int(GENERATION).is_some_and(|number| state.is_over(number));
                let ours = page.rows.iter().filter(is_over);
                deleted += delete_rows(&**shift.store, ours).await?;
                let Some(next) = page.next else { break };
                if !shift.is_live() {
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
                let page = shift.store.scan(&scan).await?;
                let is_over = |row: &&Row| {
                    let group = row.text("consumer").and_then(|group| generation_of(name, group));
                    group.is_some_and(|number| state.is_over(number))
                };
                let ours = page.rows.iter().filter(is_over);
                deleted += delete_rows(&**shift.store, ours).await?;
                let Some(next) = page.next else { break };
                scan = scan.after(next).map_err(|error| misuse(&error))?;
            }
        }
        Ok(deleted)
    }
}

/// Deletes rows, some of a tenant at once. Nobody needs them any more, so nothing has to hold for them.
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

/// Writes what source rows mean, unless the log has brought something newer (I2).
async fn put(
    store: &dyn Store,
    ids: &Ids,
    projector: &dyn Projector,
    generation: i64,
    tenant: &Tenant,
    rows: Vec<Row>,
) -> Result<(), StoreError> {
    let mut races = 0;
    while races < RACES_MAX {
        let mut sheet = Sheet::over(projector, generation);
        let changes = changes_of(&mut sheet, store, projector, tenant, &rows).await;
        let changes = changes.map_err(|unable| as_store_error(unable, projector.name()))?;
        let taken = sheet.take(vec![changes]);
        let (sheet, taken) = taken.map_err(|unable| as_store_error(unable, projector.name()))?;
        let steps = sheet.steps();
        if steps.is_empty() {
            return Ok(());
        }
        let plan = Plan::of(tenant, ids.next()).steps(steps).without_rows().build();
        let plan = plan.map_err(|error| misuse(&error))?;
        match store.commit(&plan).await {
            Ok(Commit::Applied(_)) if taken > 0 => return Ok(()),
            // That was only a part of it.
            Ok(Commit::Applied(_)) => races = 0,
            Ok(Commit::Refused(refused)) if matches!(refused.reason, Reason::Overflow { .. }) => {
                let never = Unable::Never(refused.describe(&plan));
                return Err(as_store_error(never, projector.name()));
            }
            // Whatever became of it, the entries tell.
            Ok(_) | Err(StoreError::OutcomeUnknown { .. }) => races += 1,
            Err(error) => return Err(error),
        }
    }
    Err(StoreError::unavailable("source rows change all the time; the scan tries again"))
}

/// What rows mean that a scan has come to, over their entries. Those that have to be looked up are, once more: the entries
/// were read after the scan.
async fn changes_of(
    sheet: &mut Sheet<'_>,
    store: &dyn Store,
    projector: &dyn Projector,
    tenant: &Tenant,
    rows: &[Row],
) -> Result<Vec<Change>, Unable> {
    let Some(look) = projector.look() else {
        let changes: Vec<Change> = rows.iter().map(|row| projector.change_of(row)).collect();
        sheet.read(store, tenant, changes.iter()).await?;
        return Ok(changes);
    };
    let keys: Vec<Vec<Value>> = rows.iter().map(|row| row.key().to_vec()).collect();
    let seen = sheet.look(look, store, tenant, keys.iter()).await?;
    // What cannot be understood is no entry. Of the log it would be parked, with the reason.
    let change =
        |(key, seen): (&Vec<Value>, Result<Change, String>)| seen.or_else(|_| look.seen(key, None)).ok();
    Ok(keys.iter().zip(seen).filter_map(change).collect())
}

/// Writes what source rows of one tenant mean, several in a plan where they fit and piece by piece where they do not, unless
/// the log has brought something newer (I2). Says whether it came to the end; each plan is asked for first.
async fn put_in_pieces(
    store: &dyn Store,
    ids: &Ids,
    projector: &dyn Projector,
    generation: i64,
    rows: &[Row],
    now: Time,
    may: &(dyn Fn() -> bool + Sync),
) -> Result<bool, StoreError> {
    let Some(reach) = projector.reach() else { return Ok(true) };
    let unable = |unable| as_store_error(unable, projector.name());
    let (mut at, mut races) = (0, 0);
    while let Some(row) = rows.get(at) {
        if races == RACES_MAX {
            return Err(StoreError::unavailable("source rows change all the time; the scan tries again"));
        }
        let reading = Reading { store, tenant: row.tenant(), now, refused: races };
        let rest: Vec<Matter<'_>> = rows.iter().skip(at).map(Matter::Row).collect();
        let bundle = match races {
            0 if rest.len() > 1 => reach.bundle(generation, &rest, &reading).await.map_err(unable)?,
            _ => None,
        };
        let (steps, passed) = match bundle {
            Some(bundle) => (bundle.steps, bundle.taken),
            None => {
                let piece = reach.piece(generation, Matter::Row(row), &reading).await.map_err(unable)?;
                (piece.steps, usize::from(piece.is_last))
            }
        };
        if !steps.is_empty() {
            if !may() {
                return Ok(false);
            }
            let plan = Plan::of(row.tenant(), ids.next()).steps(steps).without_rows().build();
            match store.commit(&plan.map_err(|error| misuse(&error))?).await {
                Ok(Commit::Applied(_)) => races = 0,
                // Whatever became of it, what is stored tells.
                Ok(_) | Err(StoreError::OutcomeUnknown { .. }) => {
                    races += 1;
                    continue;
                }
                Err(error) => return Err(error),
            }
        }
        at += passed;
    }
    Ok(true)
}

/// The digest of a generation's entries; `None` if it was told to stop.
async fn digest_of(
    store: &dyn Store,
    projector: &dyn Projector,
    generation: i64,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Digest>, StoreError> {
    let mut digest = Digest::default();
    let mut scan = Scan::all(projector.entries());
    loop {
        let page = store.scan(&scan).await?;
        for row in page.rows.iter().filter(|row| row.int(GENERATION) == Some(generation)) {
            let entry = Entry::of(Some(row));
            if let (Some(source), Some(content)) = (row.text(SOURCE), &entry.content) {
                let order = if projector.look().is_some() { 0 } else { entry.order };
                digest.add(row.tenant(), source, order, content);
            }
        }
        let Some(next) = page.next else { return Ok(Some(digest)) };
        if !go_on() {
            return Ok(None);
        }
        scan = scan.after(next).map_err(|error| misuse(&error))?;
    }
}

/// The digest that the entries of the source would have.
async fn digest_of_source(
    store: &dyn Store,
    projector: &dyn Projector,
    go_on: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Digest>, StoreError> {
    let mut digest = Digest::default();
    let mut scan = Scan::all(projector.source());
    loop {
        let page = store.scan(&scan).await?;
        for row in &page.rows {
            let change = projector.change_of(row);
            if let Some(content) = change.content {
                let content =
                    content.into_iter().filter(|(_, value): &(String, Value)| !value.is_null()).collect();
                digest.add(row.tenant(), &change.source, change.order, &content);
            }
        }
        let Some(next) = page.next else { return Ok(Some(digest)) };
        if !go_on() {
            return Ok(None);
        }
        scan = scan.after(next).map_err(|error| misuse(&error))?;
    }
}

#[async_trait]
impl Worker for Projecting {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.partitions
    }

    async fn step(&self, shift: &Shift<'_>, limit: usize) -> Result<Progress, StoreError> {
        let mut progress = Progress::idle();
        let fed = self.feed(shift, limit, &mut progress).await;
        // After the log has had its turn: whatever becomes of a build, the live generation does not wait for it.
        if shift.shard == 0 {
            let before = progress.rows;
            match self.tend(shift, limit, &mut progress).await {
                Ok(()) if progress.rows > before => progress.next = Next::Now,
                Ok(()) => {}
                Err(error) => progress.failures.push(error.to_string()),
            }
        }
        fed.map(|()| progress)
    }
}
