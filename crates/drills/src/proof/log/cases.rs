//! I05 Append log and consumer progress: each record's effect once, in order by key, whichever process dies or sleeps on the way.

mod batches;
mod parking;
mod programs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::infra::lease::{Held, Leases};
use statehouse::infra::log::{
    Consumer, GroupInfo, HandlerContext, HandlerError, HandlerWrite, RecordHandler, subject_of,
};
use statehouse::worker::{StepContext, StepProgress, Worker, WorkerOptions};
use statehouse::{Blueprint, Code, Expected, House, Operation, system};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::guard::now;
use statehouse_store::{
    Address, Clock, Consistency, Guard, Ids, ManualClock, Migrate, Random, Record, Row, Scan, Step, Store,
    StoreError, SystemClock, Table, Tenant, Time, Value,
};
use tokio::sync::Notify;

use self::batches::*;
use self::parking::*;
use self::programs::*;
use super::{cases as log, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::recorder::unattributed;
use crate::harness::store_client::{pause, same, scan, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    log {
        each_record_has_its_effect_once_and_in_order(9),
        what_is_made_ahead_is_made_anew_where_it_does_not_hold(9),
        lost_answers_do_nothing_twice(9),
        a_process_that_dies_between_effect_and_answer_repeats_nothing(9),
        the_mark_is_never_ahead_of_the_work(9),
        a_paused_holder_wakes_in_vain(9),
        a_holder_of_an_older_epoch_writes_nothing(9),
        what_cannot_be_done_holds_up_its_key_alone(9),
        a_handler_that_panics_holds_up_its_key_alone(9),
        a_refusal_that_does_not_go_away_is_parked(9),
        what_is_parked_is_replayed_in_order_or_given_up(9),
        parking_that_changes_meanwhile_is_looked_at_again(9),
        a_lost_discard_stays_unknown_if_the_retry_is_unavailable(9),
        a_group_goes_back_and_does_everything_again(9),
        going_back_is_not_lost_to_a_step_under_way(9),
        processes_share_the_partitions_and_survive_each_other(20),
        the_log_is_kept_until_it_was_read(9),
        what_was_trimmed_unread_is_counted(9),
        a_program_polls_and_commits(5),
        a_program_commits_with_its_effect(6),
        a_program_whose_time_was_up_commits_nothing(3),
        programs_park_and_settle_in_order(6),
        each_part_of_a_claim_is_asked_for(6),
        programs_see_their_own_tenants_records(3),
        a_poll_waits_for_what_comes(3),
        a_rows_events_come_in_the_order_of_its_versions(7),
        a_group_gets_the_events_of_its_resources(7),
        a_parked_record_holds_up_each_of_its_keys(7),
        a_record_that_a_handler_cannot_do_holds_up_each_of_its_keys(9),
        the_log_is_kept_for_a_group_that_never_claimed(9),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "duplicate consumption",
        "Answers to what a consumer writes get lost before and after the commit, and the step is done again.",
        "log::lost_answers_do_nothing_twice",
    ),
    Drill::by_case(
        CASES,
        "offset advanced before effect committed",
        "One record cannot be done yet while others of its partition can, and the mark is compared with what is done.",
        "log::the_mark_is_never_ahead_of_the_work",
    ),
    Drill::by_case(
        CASES,
        "consumer lag",
        "Processes that share the partitions die, and the others catch up.",
        "log::processes_share_the_partitions_and_survive_each_other",
    ),
    Drill::by_case(
        CASES,
        "out-of-order processing across partitions",
        "Rows are written in batches and by themselves, and each reader's order of their versions is looked at.",
        "log::a_rows_events_come_in_the_order_of_its_versions",
    ),
];

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.note]
key    = { id = "int" }
fields = { n = "int" }

[entity.trail]
key    = { subject = "text" }
fields = { steps = "text" }

[log.audit]
of    = ["note"]
lease = "10s"

[log.other]
"#;

/// Writes down, for each subject, the numbers that its records have: a trail in which a repetition, a gap or another order
/// shows.
#[derive(Debug)]
struct TrailHandler {
    table: Arc<Table>,
    /// Records in one plan at most.
    most: usize,
    /// Numbers that cannot be done.
    poison: Mutex<BTreeSet<i64>>,
    /// Numbers over which the handler panics.
    panics: Mutex<BTreeSet<i64>>,
    /// Numbers that cannot be done now.
    later: Mutex<BTreeSet<i64>>,
    /// Numbers whose plan is refused.
    refused: Mutex<BTreeSet<i64>>,
    /// What happens once, when this number is handled, before anything is written.
    gates: Mutex<BTreeMap<i64, Arc<HandlerPause>>>,
    handled: AtomicUsize,
    /// Whether it makes effects ahead, and how many it has made.
    looks_ahead: AtomicBool,
    made_ahead: AtomicUsize,
}

/// Where a handler waits until it is let on.
#[derive(Debug, Default)]
struct HandlerPause {
    arrived: Notify,
    go_on: Notify,
}

impl TrailHandler {
    fn of(client: &TenantClient, most: usize) -> Result<Arc<TrailHandler>> {
        Ok(Arc::new(TrailHandler {
            table: client.table("trails")?.clone(),
            most,
            poison: Mutex::default(),
            panics: Mutex::default(),
            later: Mutex::default(),
            refused: Mutex::default(),
            gates: Mutex::default(),
            handled: AtomicUsize::new(0),
            looks_ahead: AtomicBool::new(false),
            made_ahead: AtomicUsize::new(0),
        }))
    }

    fn gate(&self, number: i64) -> Arc<HandlerPause> {
        let gate = Arc::new(HandlerPause::default());
        self.gates.lock().unwrap_or_else(PoisonError::into_inner).insert(number, gate.clone());
        gate
    }
}

fn set(of: &Mutex<BTreeSet<i64>>, numbers: &[i64]) {
    *of.lock().unwrap_or_else(PoisonError::into_inner) = numbers.iter().copied().collect();
}

fn has(of: &Mutex<BTreeSet<i64>>, number: i64) -> bool {
    of.lock().unwrap_or_else(PoisonError::into_inner).contains(&number)
}

/// The number that a record sets.
fn number_of(record: &Record) -> i64 {
    record.events.first().and_then(|event| event.data["row"]["n"].as_i64()).unwrap_or(0)
}

const GROUP: &str = "scribe";

#[async_trait]
impl RecordHandler for TrailHandler {
    fn group(&self) -> &str {
        GROUP
    }

    fn wants(&self, record: &Record) -> bool {
        record.resource == "note"
    }

    async fn handle(
        &self,
        records: &[Record],
        reading: &HandlerContext<'_>,
    ) -> Result<HandlerWrite, HandlerError> {
        let taken = records.len().min(self.most);
        let records = &records[..taken];
        self.handled.fetch_add(taken, Ordering::SeqCst);
        let mut trails: BTreeMap<String, (Option<Row>, String)> = BTreeMap::new();
        for record in records {
            let subject = subject_of(record);
            if !trails.contains_key(&subject) {
                let address = Address::new(&self.table, reading.tenant, [subject.as_str().into()])?;
                let row = reading.store.get(&[address], Consistency::Strong).await?.remove(0);
                let steps = row.as_ref().and_then(|row| row.text("steps")).unwrap_or_default().to_owned();
                trails.insert(subject.clone(), (row, steps));
            }
            if let Some((_, steps)) = trails.get_mut(&subject) {
                *steps = format!("{steps} {}", number_of(record)).trim().to_owned();
            }
        }
        let numbers: Vec<i64> = records.iter().map(number_of).collect();
        let gate = {
            let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
            numbers.iter().find_map(|number| gates.remove(number))
        };
        if let Some(gate) = gate {
            gate.arrived.notify_one();
            gate.go_on.notified().await;
        }
        if let Some(number) = numbers.iter().find(|number| has(&self.poison, **number)) {
            return Err(HandlerError::Never(format!("{number} cannot be done")));
        }
        if let Some(number) = numbers.iter().find(|number| has(&self.panics, **number)) {
            std::panic::resume_unwind(Box::new(format!("{number} was not expected")));
        }
        if numbers.iter().any(|number| has(&self.later, *number)) {
            return Err(HandlerError::Later(StoreError::unavailable("not now")));
        }
        let refused = numbers.iter().any(|number| has(&self.refused, *number));
        let step = |(subject, (row, steps)): (String, (Option<Row>, String))| {
            let key = [subject.into()];
            let step = match row {
                Some(row) => Step::update(&self.table, key).guard(Guard::version(row.version())),
                None => Step::insert(&self.table, key),
            };
            let step = if refused { step_that_is_refused(&self.table) } else { step };
            step.set("steps", steps).set("updated_at", now())
        };
        Ok(HandlerWrite::of(taken, trails.into_iter().map(step).collect()))
    }

    /// Each step demands the trail that it was made from.
    async fn ahead(
        &self,
        records: &[Record],
        reading: &HandlerContext<'_>,
    ) -> Result<Option<HandlerWrite>, HandlerError> {
        if !self.looks_ahead.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let effect = self.handle(records, reading).await?;
        self.made_ahead.fetch_add(1, Ordering::SeqCst);
        Ok(Some(effect))
    }
}

fn step_that_is_refused(table: &Arc<Table>) -> Step {
    Step::update(table, ["nobody wrote this".into()])
}

/// A house with a handler in it.
struct LogFixture {
    client: TenantClient,
    handler: Arc<TrailHandler>,
}

const TENANTS: [&str; 3] = ["acme", "bond", "core"];

impl LogFixture {
    async fn open(namespace: &dyn TestNamespace, most: usize) -> Result<LogFixture> {
        LogFixture::over(namespace.open().await?, Arc::new(SystemClock), BLUEPRINT, most).await
    }

    /// The same blueprint with a handler of its own, as another process would have.
    async fn over(
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        blueprint: &str,
        most: usize,
    ) -> Result<LogFixture> {
        let client = TenantClient::over(store.clone(), blueprint, clock.clone()).await?;
        let handler = TrailHandler::of(&client, most)?;
        let ids = Ids::new(clock.clone(), Random::from_entropy());
        let house = House::with(store, &Blueprint::read("statehouse.toml", blueprint)?, clock, ids)?;
        let house = Arc::new(house.with_consumer(handler.clone()));
        house.migrate(Migrate::Apply).await?;
        Ok(LogFixture { client: TenantClient { house, ..client }, handler })
    }

    fn group(&self) -> GroupInfo {
        self.client.house.group(GROUP)
    }

    /// Writes a number to a note of a tenant.
    async fn write(&self, tenant: &str, id: i64, n: i64) -> Result<()> {
        write(&self.client, tenant, id, n).await
    }

    /// The trails of all tenants.
    async fn trails(&self) -> Result<BTreeMap<String, String>> {
        trails(self.client.house.store().as_ref(), &self.handler.table).await
    }

    /// Steps until a step of every partition has nothing left.
    async fn drain(&self) -> Result<usize> {
        self.client.drain_workers().await
    }

    /// Requires each note's trail to be the numbers that were written to it.
    async fn follows(&self, expected: &BTreeMap<String, String>) -> Result<()> {
        same("the trails", &self.trails().await?, expected)
    }

    /// How many records lie ahead.
    async fn ahead(&self) -> Result<u64> {
        Ok(self.group().status().await?.iter().map(|standing| standing.records).sum())
    }

    /// Where a tenant's note is parked.
    async fn parked(&self, tenant: &str) -> Result<Vec<statehouse::infra::log::ParkedRecord>> {
        Ok(self.group().parked(&Tenant::new(tenant)?).await?)
    }

    /// A lease on a partition, as a process of that name has it.
    async fn hold(&self, name: &str, partition: u32) -> Result<Held> {
        let (tenant, table) = (system::tenant().context("the house has no name")?, system::leases()?);
        let house = &self.client.house;
        let leases = Leases::of(house.store().clone(), house.clock().clone(), table, tenant);
        let key = ["worker.scribe".into(), format!("{partition:05}").into()];
        let held = leases.acquire(&key, name, Duration::from_secs(10)).await?;
        held.map_err(|lease| anyhow::anyhow!("{lease:?} is taken"))
    }

    /// One step of the group on a partition, by the holder of this lease.
    async fn step(&self, held: &Held, partition: u32, limit: usize) -> Result<StepProgress, StoreError> {
        let house = &self.client.house;
        let worker = Consumer::of(self.handler.clone(), house.store().partitions());
        let (store, clock, ids) = (house.store(), house.clock(), house.ids());
        let (egress, wakeups) = (house.egress(), house.bells());
        worker.step(&StepContext { store, clock, ids, egress, wakeups, shard: partition, held }, limit).await
    }
}

async fn write(client: &TenantClient, tenant: &str, id: i64, n: i64) -> Result<()> {
    let client = client.for_tenant(tenant)?;
    let key = [id.into()];
    let request = TenantClient::request("note.update", &key, &json!({"n": n}), Some(Expected::Any));
    let updated = client.house.call(&client.tenant, request, Operation::default()).await;
    match updated {
        Ok(_) => Ok(()),
        Err(refusal) if refusal.code == Code::NotFound => {
            client.done("note.create", &[], json!({"id": id, "n": n}), None).await.map(drop)
        }
        Err(refusal) => Err(refusal.into()),
    }
}

async fn trails(store: &dyn Store, table: &Arc<Table>) -> Result<BTreeMap<String, String>> {
    let rows = scan(store, Scan::all(table)).await?;
    let trail = |row: Row| {
        let name = format!("{}/{}", row.tenant(), row.text("subject").unwrap_or_default());
        (name, row.text("steps").unwrap_or_default().to_owned())
    };
    Ok(rows.into_iter().map(trail).collect())
}

/// Writes some numbers to some notes of all tenants, in turns, and says what the trails have to be.
async fn busy(fixture: &LogFixture, notes: i64, rounds: i64) -> Result<BTreeMap<String, String>> {
    let mut expected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for n in 1..=rounds {
        for tenant in TENANTS {
            for id in 0..notes {
                fixture.write(tenant, id, n).await?;
                expected.entry(format!("{tenant}/note/{id}")).or_default().push(n.to_string());
            }
        }
    }
    Ok(expected.into_iter().map(|(name, steps)| (name, steps.join(" "))).collect())
}

/// The partition of a note, found in the log.
async fn position_of(store: &dyn Store, tenant: &str, id: i64, n: i64) -> Result<(u32, u64)> {
    for _ in 0..1_000 {
        for record in whole_log(store).await? {
            let is_it = record.tenant.as_str() == tenant
                && record.resource == "note"
                && record.key == id.to_string()
                && number_of(&record) == n;
            if is_it {
                let position = record.position.context("a record without its place")?;
                return Ok((position.partition, position.offset));
            }
        }
        pause().await;
    }
    anyhow::bail!("note {id} of {tenant} with {n} is not in the log")
}

fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(1_800_000_000_000))
}

async fn each_record_has_its_effect_once_and_in_order(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let store = namespace.open().await?;
    for most in [1, 5] {
        let fixture = LogFixture::over(store.clone(), Arc::new(SystemClock), BLUEPRINT, most).await?;
        let before = fixture.trails().await?;
        let written = busy(&fixture, 3, 4).await?;
        ensure!(fixture.ahead().await? > 0, "nothing lies ahead");
        let behind = fixture.group().status().await?.into_iter().map(|one| one.behind).max();
        ensure!(behind.is_some_and(|span| !span.is_zero()), "what lies ahead is not old: {behind:?}");
        fixture.drain().await?;
        let joined = |(name, steps): (String, String)| {
            let before = before.get(&name).map(|before| format!("{before} ")).unwrap_or_default();
            (name, format!("{before}{steps}"))
        };
        let expected: BTreeMap<String, String> = written.into_iter().map(joined).collect();
        fixture.follows(&expected).await?;
        same("what lies ahead", &fixture.ahead().await?, &0)?;
        // Another process finds nothing left to do.
        let later = LogFixture::over(store.clone(), Arc::new(SystemClock), BLUEPRINT, most).await?;
        later.drain().await?;
        same("records handled again", &later.handler.handled.load(Ordering::SeqCst), &0)?;
        later.follows(&expected).await?;
    }
    Ok(())
}

/// The records of one note are made from the trail that those before them leave, which is not there yet when they are made
/// ahead; those of different notes are not.
async fn what_is_made_ahead_is_made_anew_where_it_does_not_hold(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    const WRITES: i64 = 24;
    let fixture = LogFixture::open(namespace, 2).await?;
    fixture.handler.looks_ahead.store(true, Ordering::SeqCst);
    set(&fixture.handler.poison, &[7]);
    set(&fixture.handler.panics, &[9]);
    let mut expected: BTreeMap<String, String> = BTreeMap::new();
    for (tenant, notes) in [("acme", 1), ("core", WRITES)] {
        for n in 0..WRITES {
            fixture.write(tenant, n % notes, n + 10).await?;
            let trail = expected.entry(format!("{tenant}/note/{}", n % notes)).or_default();
            *trail = format!("{trail} {}", n + 10).trim().to_owned();
        }
    }
    // What cannot be done ahead is parked when it is its turn.
    for (id, n) in [(1, 7), (2, 9), (2, 10)] {
        fixture.write("bond", id, n).await?;
    }
    fixture.drain().await?;
    fixture.follows(&expected).await?;
    same("what lies ahead", &fixture.ahead().await?, &0)?;
    let parked = fixture.parked("bond").await?;
    let subjects: BTreeSet<&str> = parked.iter().map(|one| one.subject.as_str()).collect();
    same("what is parked", &subjects, &BTreeSet::from(["note/1", "note/2"]))?;
    ensure!(fixture.handler.made_ahead.load(Ordering::SeqCst) > 0, "nothing was made ahead");
    let handled = i64::try_from(fixture.handler.handled.load(Ordering::SeqCst))?;
    ensure!(handled > 2 * WRITES + 3, "what was made ahead was not made anew: {handled}");
    Ok(())
}

async fn lost_answers_do_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), 11));
    let fixture = LogFixture::over(faulty.clone(), Arc::new(SystemClock), BLUEPRINT, 4).await?;
    let expected = busy(&fixture, 3, 4).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.05, ..Odds::default() });
    for _ in 0..60 {
        // Whatever comes of it: the process may die here as well.
        let _ = fixture.client.work(4).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    fixture.drain().await?;
    fixture.follows(&expected).await
}

async fn a_process_that_dies_between_effect_and_answer_repeats_nothing(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let sound = namespace.open().await?;
    let quiet = LogFixture::over(sound.clone(), Arc::new(SystemClock), BLUEPRINT, 3).await?;
    let expected = busy(&quiet, 3, 3).await?;
    let mut died = 0;
    for seed in 1..=8 {
        let odds = Odds { crash_before: 0.1, crash_after: 0.3, ..Odds::default() };
        let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), seed));
        let fixture = LogFixture::over(faulty.clone(), Arc::new(SystemClock), BLUEPRINT, 3).await?;
        faulty.set_odds(odds);
        let client = fixture.client.clone();
        let process = tokio::spawn(async move {
            for _ in 0..20 {
                let _ = client.work(3).await;
            }
        });
        // A call that never returns is a process that is gone.
        for _ in 0..500 {
            let achieved = faulty.achieved();
            if process.is_finished() || achieved.crashes_after + achieved.crashes_before > 0 {
                break;
            }
            pause().await;
        }
        process.abort();
        died += faulty.achieved().crashes_after;
    }
    ensure!(died > 0, "no process died after its effect");
    quiet.drain().await?;
    quiet.follows(&expected).await
}

async fn the_mark_is_never_ahead_of_the_work(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = LogFixture::open(namespace, 4).await?;
    // One tenant's record cannot be done now; the others of its partition can.
    for tenant in TENANTS {
        for id in 0..4 {
            fixture.write(tenant, id, 1).await?;
        }
    }
    fixture.write("bond", 2, 77).await?;
    for tenant in TENANTS {
        for id in 0..4 {
            fixture.write(tenant, id, 2).await?;
        }
    }
    set(&fixture.handler.later, &[77]);
    let (partition, offset) = position_of(fixture.client.house.store().as_ref(), "bond", 2, 77).await?;
    for _ in 0..30 {
        let _ = fixture.client.work(100).await;
    }
    let reached = |standings: Vec<statehouse::infra::log::GroupStatus>| {
        standings.into_iter().find(|one| one.partition == partition).map(|one| one.reached)
    };
    let mark = reached(fixture.group().status().await?).context("no standing")?;
    ensure!(mark < offset, "the mark is at {mark}, and {offset} is not done");
    let trails = fixture.trails().await?;
    same("another tenant", &trails.get("acme/note/2").map(String::as_str), &Some("1 2"))?;
    same("the one that waits", &trails.get("bond/note/2").map(String::as_str), &Some("1"))?;
    // A process that takes over begins at the mark, and does what was left, and only that.
    set(&fixture.handler.later, &[]);
    let next =
        LogFixture::over(fixture.client.house.store().clone(), Arc::new(SystemClock), BLUEPRINT, 4).await?;
    next.drain().await?;
    let trails = next.trails().await?;
    same("what was left", &trails.get("bond/note/2").map(String::as_str), &Some("1 77 2"))?;
    for (name, steps) in trails.iter().filter(|(name, _)| *name != "bond/note/2") {
        same(name, &steps.as_str(), &"1 2")?;
    }
    Ok(())
}

/// Writes the first records of one note, and says where it stands.
async fn one_note(fixture: &LogFixture, numbers: &[i64]) -> Result<u32> {
    for n in numbers {
        fixture.write("acme", 1, *n).await?;
    }
    let last = numbers.last().copied().unwrap_or(0);
    Ok(position_of(fixture.client.house.store().as_ref(), "acme", 1, last).await?.0)
}

async fn a_paused_holder_wakes_in_vain(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    // Another process takes over, or the same one does, under a new epoch.
    for (id, successor) in [(1, "second"), (2, "first")] {
        overtaken(store.clone(), &clock, id, successor).await?;
        clock.advance(Duration::from_secs(11));
    }
    Ok(())
}

async fn overtaken(store: Arc<dyn Store>, clock: &ManualClock, id: i64, successor: &str) -> Result<()> {
    let first = Arc::new(LogFixture::over(store.clone(), Arc::new(clock.clone()), BLUEPRINT, 1).await?);
    first.write("acme", id, 9).await?;
    let partition = position_of(store.as_ref(), "acme", id, 9).await?.0;
    let held = first.hold("first", partition).await?;
    first.step(&held, partition, 50).await?;
    for n in [1, 2, 3] {
        first.write("acme", id, n).await?;
    }
    position_of(store.as_ref(), "acme", id, 3).await?;
    let gate = first.handler.gate(2);
    let sleeper = tokio::spawn({
        let first = first.clone();
        async move { first.step(&held, partition, 50).await }
    });
    gate.arrived.notified().await;
    // While the first one sleeps in the middle of a record, its time runs out and another does everything.
    clock.advance(Duration::from_secs(11));
    let second = LogFixture::over(store.clone(), Arc::new(clock.clone()), BLUEPRINT, 1).await?;
    let held = second.hold(successor, partition).await?;
    ensure!(held.epoch() >= 2, "the epoch is {}", held.epoch());
    second.step(&held, partition, 50).await?;
    let reached = second.group().status().await?[partition as usize].reached;
    gate.go_on.notify_one();
    let woken = sleeper.await?;
    ensure!(woken.as_ref().is_ok_and(|step| !step.failures.is_empty()) || woken.is_err(), "{woken:?}");
    let name = format!("acme/note/{id}");
    same("the trail", &second.trails().await?.get(&name).map(String::as_str), &Some("9 1 2 3"))?;
    same("the mark", &second.group().status().await?[partition as usize].reached, &reached)?;
    second.step(&held, partition, 50).await?;
    same("the trail", &second.trails().await?.get(&name).map(String::as_str), &Some("9 1 2 3"))
}

async fn a_holder_of_an_older_epoch_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let first = Arc::new(LogFixture::over(store.clone(), Arc::new(clock.clone()), BLUEPRINT, 1).await?);
    let partition = one_note(&first, &[13]).await?;
    set(&first.handler.poison, &[13]);
    let held = first.hold("first", partition).await?;
    first.step(&held, partition, 50).await?;
    same("what is parked", &first.parked("acme").await?.len(), &1)?;
    // Another key of the same partition, with which the first holder falls asleep.
    let mut id = 1;
    loop {
        id += 1;
        first.write("acme", id, 5).await?;
        if position_of(store.as_ref(), "acme", id, 5).await?.0 == partition {
            break;
        }
    }
    let gate = first.handler.gate(5);
    let sleeper = tokio::spawn({
        let (first, held) = (first.clone(), held.clone());
        async move { first.step(&held, partition, 50).await }
    });
    gate.arrived.notified().await;
    clock.advance(Duration::from_secs(11));
    // The second worker retries the parked record, fails, and makes no progress: the offset and the number of parked records are
    // as the first worker has read them, and only the epoch differs.
    let second = LogFixture::over(store.clone(), Arc::new(clock.clone()), BLUEPRINT, 1).await?;
    set(&second.handler.poison, &[13]);
    set(&second.handler.later, &[5]);
    let held = second.hold("second", partition).await?;
    let subject = second.parked("acme").await?[0].subject.clone();
    ensure!(second.group().replay(&second.client.tenant, partition, &subject).await?, "nothing was parked");
    for tries in 0.. {
        let _ = second.step(&held, partition, 50).await;
        if second.parked("acme").await?[0].tries == 2 {
            break;
        }
        ensure!(tries < 1_000, "what is parked was not tried again");
        pause().await;
    }
    gate.go_on.notify_one();
    let woken = sleeper.await?;
    ensure!(woken.as_ref().is_ok_and(|step| !step.failures.is_empty()) || woken.is_err(), "{woken:?}");
    let name = format!("acme/note/{id}");
    same("what the first one wrote", &second.trails().await?.get(&name), &None)?;
    set(&second.handler.later, &[]);
    second.step(&held, partition, 50).await?;
    same("what the second wrote", &second.trails().await?.get(&name).map(String::as_str), &Some("5"))
}

async fn a_group_goes_back_and_does_everything_again(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = LogFixture::open(namespace, 3).await?;
    let partition = one_note(&fixture, &[1, 2, 3, 4]).await?;
    fixture.drain().await?;
    let (_, offset) = position_of(fixture.client.house.store().as_ref(), "acme", 1, 2).await?;
    fixture.group().seek(partition, offset).await?;
    ensure!(fixture.ahead().await? >= 2, "nothing lies ahead");
    fixture.drain().await?;
    same("the trail", &fixture.trails().await?.get("acme/note/1").map(String::as_str), &Some("1 2 3 4 3 4"))?;
    fixture.write("acme", 1, 5).await?;
    fixture.drain().await?;
    same(
        "the trail",
        &fixture.trails().await?.get("acme/note/1").map(String::as_str),
        &Some("1 2 3 4 3 4 5"),
    )?;
    // Forward, over what is not to be done.
    let partition = one_note(&fixture, &[6, 7]).await?;
    let (_, offset) = position_of(fixture.client.house.store().as_ref(), "acme", 1, 6).await?;
    fixture.group().seek(partition, offset).await?;
    fixture.drain().await?;
    same(
        "the trail",
        &fixture.trails().await?.get("acme/note/1").map(String::as_str),
        &Some("1 2 3 4 3 4 5 7"),
    )
}

async fn going_back_is_not_lost_to_a_step_under_way(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = Arc::new(LogFixture::open(namespace, 1).await?);
    let partition = one_note(&fixture, &[1]).await?;
    fixture.drain().await?;
    let mark = fixture.group().status().await?[partition as usize].reached;
    fixture.write("acme", 1, 2).await?;
    position_of(fixture.client.house.store().as_ref(), "acme", 1, 2).await?;
    let gate = fixture.handler.gate(2);
    let held = fixture.hold("first", partition).await?;
    let step = tokio::spawn({
        let (fixture, held) = (fixture.clone(), held.clone());
        async move { fixture.step(&held, partition, 50).await }
    });
    gate.arrived.notified().await;
    // To the very place where the mark is: all that follows is to be done again, also what is under way.
    fixture.group().seek(partition, mark).await?;
    gate.go_on.notify_one();
    step.await??;
    fixture.drain().await?;
    same("the trail", &fixture.trails().await?.get("acme/note/1").map(String::as_str), &Some("1 2 2"))
}

async fn processes_share_the_partitions_and_survive_each_other(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let store = namespace.open().await?;
    let open = async || LogFixture::over(store.clone(), Arc::new(SystemClock), BLUEPRINT, 4).await;
    let options = || WorkerOptions {
        lease: Duration::from_millis(1_500),
        idle_max: Duration::from_millis(100),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    };
    let (first, second) = (open().await?, open().await?);
    first.client.house.start_workers(options());
    let mut expected = busy(&first, 3, 2).await?;
    second.client.house.start_workers(options());
    expected = joined(expected, busy(&second, 3, 2).await?);
    eventually(&second, &expected).await?;
    // One is killed with its leases in its hands.
    drop(first);
    expected = joined(expected, busy(&second, 3, 2).await?);
    eventually(&second, &expected).await?;
    second.client.house.stop_workers().await;
    second.follows(&expected).await
}

fn joined(mut all: BTreeMap<String, String>, more: BTreeMap<String, String>) -> BTreeMap<String, String> {
    for (name, steps) in more {
        let trail = all.entry(name).or_default();
        *trail = format!("{trail} {steps}").trim().to_owned();
    }
    all
}

async fn eventually(fixture: &LogFixture, expected: &BTreeMap<String, String>) -> Result<()> {
    let mut found = BTreeMap::new();
    for _ in 0..3_000 {
        found = fixture.trails().await?;
        if found == *expected {
            return Ok(());
        }
        pause().await;
    }
    same("the trails", &found, expected)
}

const KEPT: &str = "[house]\nname = \"drill\"\nlog_retention = \"1h\"\n";

fn kept(more: &str) -> String {
    BLUEPRINT.replace("[house]\nname = \"drill\"\n", &format!("{KEPT}{more}"))
}

/// The oldest offset of a partition.
async fn oldest(store: &dyn Store, partition: u32) -> Result<u64> {
    Ok(store.read_log(partition, 0, 1).await?.oldest)
}

async fn the_log_is_kept_until_it_was_read(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the log is trimmed");
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    // A group that no program reads would keep everything.
    let blueprint = kept("").replace("\n[log.other]\n", "\n");
    let fixture = LogFixture::over(store.clone(), Arc::new(clock.clone()), &blueprint, 4).await?;
    let client = &fixture.client;
    let create = json!({"id": 1, "n": 13});
    let first = client.call_as("first", "note.create", &[], create.clone(), None).await?;
    let partition = position_of(store.as_ref(), "acme", 1, 13).await?.0;
    // A program's group that has claimed and read nothing, and a parked record, keep what they need.
    let key = [i64::from(partition).into()];
    let claimed =
        client.done("audit.claim", &key, json!({"holder": "me", "duration_ms": 3_600_000}), None).await?;
    set(&fixture.handler.poison, &[13]);
    for n in [1, 2] {
        fixture.write("acme", 1, n).await?;
    }
    fixture.drain().await?;
    clock.advance(Duration::from_secs(7_200));
    fixture.write("acme", 1, 3).await?;
    fixture.drain().await?;
    same("the oldest, while a program has it ahead", &oldest(store.as_ref(), partition).await?, &1)?;
    let head = position_of(store.as_ref(), "acme", 1, 3).await?.1;
    let epoch = claimed.body["epoch"].clone();
    let commit = json!({"holder": "me", "epoch": epoch, "from": 0, "to": head});
    client.done("audit.commit", &key, commit, None).await?;
    eventually_oldest(&fixture, partition, 1).await?;
    let retried = client.call_as("first", "note.create", &[], create.clone(), None).await?;
    same("a retry", &retried.body, &first.body)?;
    // What was parked is given up: the old records are not needed any more.
    for parked in fixture.parked("acme").await? {
        fixture.group().discard(&client.tenant, &parked).await?;
    }
    eventually_oldest(&fixture, partition, head).await?;
    // With its record, an operation is forgotten: a retry that comes so late is a new request.
    let late = client.call_as("first", "note.create", &[], create, None).await;
    ensure!(late.as_ref().is_err_and(|refusal| refusal.code == Code::AlreadyExists), "{late:?}");
    client.shows("note", &[1.into()], &json!({"n": 3})).await
}

/// Trims until the oldest record is this one, and sees that it stays so. The index by which readers are found may lag.
async fn eventually_oldest(fixture: &LogFixture, partition: u32, offset: u64) -> Result<()> {
    let store = fixture.client.house.store();
    for _ in 0..1_000 {
        fixture.drain().await?;
        if oldest(store.as_ref(), partition).await? == offset {
            break;
        }
        pause().await;
    }
    fixture.drain().await?;
    same("the oldest", &oldest(store.as_ref(), partition).await?, &offset)
}

async fn what_was_trimmed_unread_is_counted(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the log is trimmed");
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let blueprint = kept("log_keep_unread = false\n");
    let fixture = LogFixture::over(store.clone(), Arc::new(clock.clone()), &blueprint, 4).await?;
    let partition = one_note(&fixture, &[1]).await?;
    fixture.drain().await?;
    set(&fixture.handler.later, &[2, 3, 4]);
    for n in [2, 3, 4] {
        fixture.write("acme", 1, n).await?;
    }
    let key = [i64::from(partition).into()];
    claim_as_me(&fixture.client, &key).await?;
    clock.advance(Duration::from_secs(7_200));
    fixture.write("acme", 1, 5).await?;
    let (_, last) = position_of(store.as_ref(), "acme", 1, 5).await?;
    for _ in 0..50 {
        let _ = fixture.client.work(3).await;
    }
    // The group could not read on, and the log was trimmed past it; it says so and goes on with what there is.
    set(&fixture.handler.later, &[]);
    fixture.drain().await?;
    let standing = &fixture.group().status().await?[partition as usize];
    ensure!(standing.missed >= 3, "{standing:?}");
    same("the trail", &fixture.trails().await?.get("acme/note/1").map(String::as_str), &Some("1 5"))?;
    let poll = fixture.client.done("audit.poll", &key, json!({}), None).await?;
    same("what a program missed", &poll.body["missed"], &json!(last - 1))?;
    same("what it gets", &poll.body["records"][0]["log_offset"], &json!(last))
}
