//! I06 Projection pipeline, and the view of A05 that stands on it: after everything was read, a view is what its source
//! says, whichever processes died, raced or rebuilt on the way; and no reader sees two generations at once.

mod rebuilds;
mod sources;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::infra::lease::{Held, Leases};
use statehouse::infra::projection::{BuildPhase, Projection, ProjectionState};
use statehouse::worker::{StepContext, WorkerOptions};
use statehouse::{Blueprint, Code, Expected, Operation, resource, system};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Commit, Page, Plan, Random, Row, Scan, Step, Store, StoreError, SystemClock};

use tokio::sync::Notify;

use self::rebuilds::*;
use self::sources::*;
use self::tokens::*;
use super::cases as projection;
use crate::conformance::{Case, cases};
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::recorder::{Actor, on_behalf};
use crate::harness::store_client::{pause, same, scan};
use crate::harness::tenant_client::TenantClient;
use crate::proof::view::invariants;

pub(crate) const CASES: &[Case] = cases! {
    projection {
        a_view_follows_its_source(9),
        extremes_are_right_after_removals(9),
        deleted_rows_count_nowhere_unless_asked_for(9),
        versions_count_once_from_whichever_partition(9),
        a_replay_changes_nothing(9),
        lost_answers_count_nothing_twice(9),
        a_projector_that_is_killed_leaves_what_a_replay_gives(9),
        a_rebuild_while_writing_gives_the_truth(9),
        readers_never_see_half_a_generation(9),
        a_page_goes_on_in_its_generation(9),
        what_a_scan_has_read_before_does_not_come_back(9),
        a_scan_that_was_overtaken_counts_nothing(9),
        a_step_that_was_overtaken_takes_no_switch_back(9),
        a_build_that_differs_is_not_switched_to(9),
        readers_go_back_to_what_was_kept_up(9),
        another_definition_is_built_beside_the_live_one(9),
        what_does_not_fit_is_parked_alone(9),
        a_reader_waits_for_its_own_write(20),
        a_token_is_good_on_another_server(20),
        tenants_count_apart(9),
        processes_share_a_projection_and_survive_each_other(20),
        edges_are_counted_while_they_are_there(9),
        comments_are_counted_while_they_are_visible(9),
        seats_and_bookings_are_counted_by_state(12),
        jobs_are_counted_as_live_until_they_are_over(9),
        effects_are_counted_by_status(9),
        what_was_forgotten_since_a_look_does_not_come_back(9),
        what_changed_back_since_a_look_stays_so(9),
        a_record_of_many_rows_is_done_in_pieces(100),
        a_sum_out_of_range_delays_no_other_source(9),
        a_record_may_name_more_rows_than_a_plan_writes(100),
        a_field_that_is_added_loses_no_record(9),
        an_entry_that_is_fought_over_is_not_parked(9),
        views_that_cannot_be_are_refused(0),
        a_total_stays_while_rows_change_groups(12),
        a_total_beyond_its_type_is_refused(9),
        totals_that_cannot_be_are_refused(0),
    }
};

pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "stale index",
        "A reader asks with the token of its own write, before and while the projector works.",
        "projection::a_reader_waits_for_its_own_write",
    ),
    Drill::by_case(
        CASES,
        "missing entry",
        "The source is written while it is scanned, before and behind the scan.",
        "projection::a_rebuild_while_writing_gives_the_truth",
    ),
    Drill::by_case(
        CASES,
        "duplicate entry",
        "Answers to what the projector writes get lost before and after the commit, and a rebuild is begun meanwhile.",
        "projection::lost_answers_count_nothing_twice",
    ),
    Drill::by_case(
        CASES,
        "tombstone not propagated",
        "Rows go while a scan has them in its hands that it has read before.",
        "projection::what_a_scan_has_read_before_does_not_come_back",
    ),
];

const SOURCE: &str = r#"
[house]
name = "drill"

[entity.profile]
key    = { id = "int" }
fields = { team = "text?", points = { type = "int", default = 0 }, height = "float?" }
"#;

const TEAMS: &str = r#"
[view.teams]
of       = "profile"
group_by = ["team"]
count    = true
sum      = ["points"]
min      = ["points"]
max      = ["points"]
"#;

fn blueprint(views: &str) -> String {
    format!("{SOURCE}{views}")
}

/// A client, and a lease on the shards of its projections.
pub(crate) struct ProjectionFixture {
    pub client: TenantClient,
    held: Held,
}

impl ProjectionFixture {
    async fn open(namespace: &dyn TestNamespace, views: &str) -> Result<ProjectionFixture> {
        ProjectionFixture::over(namespace.open().await?, views).await
    }

    async fn over(store: Arc<dyn Store>, views: &str) -> Result<ProjectionFixture> {
        ProjectionFixture::of(TenantClient::over(store, &blueprint(views), Arc::new(SystemClock)).await?)
            .await
    }

    pub async fn of(client: TenantClient) -> Result<ProjectionFixture> {
        let (tenant, table) = (system::tenant().context("the house has no name")?, system::leases()?);
        let house = &client.house;
        let leases = Leases::of(house.store().clone(), house.clock().clone(), table, tenant);
        let key = ["drill".into(), house.ids().next().into()];
        let held = loop {
            // For longer than any case lasts, also those that move the clock.
            match leases.acquire(&key, "drill", Duration::from_secs(30 * 86_400)).await {
                Ok(held) => break held.map_err(|lease| anyhow::anyhow!("{lease:?} is taken"))?,
                Err(error) => ensure!(error.is_transient(), "{error}"),
            }
        };
        Ok(ProjectionFixture { client, held })
    }

    fn projections(&self) -> Vec<Projection> {
        self.client.house.projections()
    }

    pub fn projection(&self) -> Result<Projection> {
        self.projections().into_iter().next().context("the house has no projection")
    }

    pub async fn state(&self) -> Result<ProjectionState> {
        Ok(self.projection()?.state().await?)
    }

    pub async fn live(&self) -> Result<i64> {
        Ok(self.state().await?.live.context("nothing is live")?.number)
    }

    /// One step of one shard of one projection.
    pub async fn step(&self, projection: &str, shard: u32, limit: usize) -> Result<(), StoreError> {
        self.step_of(&format!("{projection}.project"), shard, limit).await
    }

    /// One step of one shard of a worker.
    pub async fn step_of(&self, name: &str, shard: u32, limit: usize) -> Result<(), StoreError> {
        let house = &self.client.house;
        let missing = || StoreError::schema(name, "there is no such worker");
        let worker = house.workers().iter().find(|worker| worker.name() == name).ok_or_else(missing)?;
        let owner = name.split('.').next().and_then(|owner| house.resource(owner).ok());
        let archetype = owner.map_or("projection", |owner| owner.archetype.keyword());
        let store = on_behalf(house.store(), Actor { archetype, name: format!("worker {name}") });
        let (clock, ids, wakeups) = (house.clock(), house.ids(), house.bells());
        let (egress, held) = (house.egress(), &self.held);
        let context = StepContext { store: &store, clock, ids, egress, wakeups, shard, held };
        worker.step(&context, limit).await.map(drop)
    }

    /// Steps of all projections, once: the first shard, and those that have something ahead.
    pub async fn work(&self, limit: usize) -> Result<bool, StoreError> {
        let mut busy = false;
        for projection in self.projections() {
            self.step(projection.name(), 0, limit).await?;
            let status = projection.status().await?;
            let state = &status.state;
            busy |= state.dropping.is_some() || state.live.is_none();
            busy |= state.building.as_ref().is_some_and(|building| building.phase != BuildPhase::Differs);
            let kept = match &state.previous {
                Some(previous) if !status.outdated => projection.group(previous.number).status().await?,
                _ => Vec::new(),
            };
            let all = status.live.iter().filter(|_| !status.outdated).chain(&status.building).chain(&kept);
            let ahead: BTreeSet<u32> = all.filter(|one| one.records > 0).map(|one| one.partition).collect();
            for shard in ahead {
                busy = true;
                self.step(projection.name(), shard, limit).await?;
            }
        }
        Ok(busy)
    }

    /// Works until nothing is ahead and nothing is being built.
    pub async fn drain(&self) -> Result<()> {
        self.drain_by(1).await
    }

    /// The same, by steps of so many rows.
    pub async fn drain_by(&self, limit: usize) -> Result<()> {
        for _ in 0..5_000 {
            if !self.work(limit).await? {
                return Ok(());
            }
        }
        anyhow::bail!("the projections do not come to an end: {:?}", self.state().await?)
    }

    /// Gives a profile these fields, whatever it was.
    async fn put(&self, id: i64, team: &str, points: i64) -> Result<Option<String>> {
        put(&self.client, id, team, points).await
    }

    async fn delete(&self, id: i64) -> Result<()> {
        self.any_version("profile.delete", id, json!({})).await
    }

    pub async fn any_version(&self, action: &str, id: i64, input: Json) -> Result<()> {
        let request = TenantClient::request(action, &[id.into()], &input, Some(Expected::Any));
        self.client.house.call(&self.client.tenant, request, Operation::default()).await?;
        Ok(())
    }

    /// What the view of teams shows, by team: count, sum, least and greatest.
    async fn teams(&self) -> Result<BTreeMap<String, Json>> {
        teams(&self.client).await
    }

    /// The same, computed from the profiles.
    async fn truth(&self) -> Result<BTreeMap<String, Json>> {
        truth(&self.client).await
    }

    /// Requires the view to be what the profiles say.
    async fn is_true(&self) -> Result<()> {
        same("the view", &self.teams().await?, &self.truth().await?)?;
        invariants::check(&self.client.scope("teams")).await
    }

    /// Requires the entries to be those of a build from nothing, and the view to be the truth.
    async fn equals_a_rebuild(&self) -> Result<()> {
        self.drain().await?;
        self.is_true().await?;
        let projection = self.projection()?;
        let before = projection.digest(self.live().await?).await?;
        ensure!(projection.rebuild().await?, "no build could be begun");
        self.drain().await?;
        let state = self.state().await?;
        same("whether the build is the source's", &state.verified, &Some(true))?;
        same("the digest", &projection.digest(self.live().await?).await?, &before)?;
        self.is_true().await
    }
}

/// Shows some rows to scans as they were before, and holds a plan back.
#[derive(Debug, Default)]
struct LateReads {
    rows: Mutex<Vec<Row>>,
    held_back: Mutex<Option<(&'static str, Arc<PlanPause>)>>,
}

/// Where a plan waits until it is let on.
#[derive(Debug, Default)]
struct PlanPause {
    arrived: Notify,
    go_on: Notify,
}

impl LateReads {
    /// The store of a namespace, one that is late over it, and what makes it so.
    async fn over(namespace: &dyn TestNamespace) -> Result<(Arc<dyn Store>, Arc<dyn Store>, Arc<LateReads>)> {
        let (store, late) = (namespace.open().await?, Arc::new(LateReads::default()));
        Ok((store.clone(), Arc::new(StoreProxy::new(store, late.clone())), late))
    }

    /// Holds back the next plan of no group that writes this table.
    fn hold_back(&self, table: &'static str) -> Arc<PlanPause> {
        let gate = Arc::new(PlanPause::default());
        *self.held_back.lock().unwrap_or_else(PoisonError::into_inner) = Some((table, gate.clone()));
        gate
    }

    fn gate_of(&self, plan: &Plan) -> Option<Arc<PlanPause>> {
        let mut held_back = self.held_back.lock().unwrap_or_else(PoisonError::into_inner);
        let has = |name: &str| plan.steps().iter().any(|step| step.table.name() == name);
        held_back.take_if(|(table, _)| has(table) && !has("house_progress")).map(|(_, gate)| gate)
    }
}

#[async_trait]
impl Interceptor for Arc<LateReads> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        if let Some(gate) = self.gate_of(plan) {
            gate.arrived.notify_one();
            gate.go_on.notified().await;
        }
        inner.commit(plan).await
    }

    async fn scan(&self, inner: &Arc<dyn Store>, scan: &Scan) -> Result<Page, StoreError> {
        let mut page = inner.scan(scan).await?;
        let mut late = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        for row in &mut page.rows {
            if let Some(index) = late.iter().position(|old| old.address() == row.address()) {
                *row = late.remove(index);
            }
        }
        Ok(page)
    }
}

async fn put(client: &TenantClient, id: i64, team: &str, points: i64) -> Result<Option<String>> {
    let team = if team.is_empty() { Json::Null } else { json!(team) };
    let fields = json!({"team": team, "points": points});
    let request = TenantClient::request("profile.patch", &[id.into()], &fields, Some(Expected::Any));
    match client.house.call(&client.tenant, request, Operation::default()).await {
        Ok(answer) => Ok(answer.token),
        Err(refusal) if refusal.code == Code::NotFound => {
            let input = json!({"id": id, "team": team, "points": points});
            Ok(client.done("profile.create", &[], input, None).await?.token)
        }
        Err(refusal) => Err(refusal.into()),
    }
}

pub(crate) async fn teams(client: &TenantClient) -> Result<BTreeMap<String, Json>> {
    let (mut found, mut generations, mut input) = (BTreeMap::new(), BTreeSet::new(), json!({"limit": 2}));
    loop {
        let page = client.done("teams.list", &[], input.clone(), None).await?;
        for row in page.body.as_array().into_iter().flatten() {
            generations.insert(row["generation"].as_i64());
            let team = row["team"].as_str().unwrap_or("").to_owned();
            let shown = json!([row["count"], row["sum_points"], row["min_points"], row["max_points"]]);
            ensure!(found.insert(team.clone(), shown).is_none(), "{team} is listed twice");
        }
        let Some(next) = page.next else { break };
        input["cursor"] = next.into();
    }
    ensure!(generations.len() <= 1, "a list has rows of the generations {generations:?}");
    Ok(found)
}

pub(crate) async fn truth(client: &TenantClient) -> Result<BTreeMap<String, Json>> {
    let table = client.table("profiles")?;
    let rows = scan(client.house.store().as_ref(), Scan::of(table, &client.tenant)).await?;
    let mut groups: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.text("status") == Some("ACTIVE")) {
        let team = row.text("team").unwrap_or("").to_owned();
        groups.entry(team).or_default().push(row.int("points").unwrap_or(0));
    }
    let shown = |(team, points): (String, Vec<i64>)| {
        let sum: i64 = points.iter().sum();
        (team, json!([points.len(), sum, points.iter().min(), points.iter().max()]))
    };
    Ok(groups.into_iter().map(shown).collect())
}

const NAMES: [&str; 4] = ["red", "green", "blue", ""];

async fn a_view_follows_its_source(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    // Before anything was built no reader gets a number.
    fixture.client.refused("teams.list", &[], json!({}), None, Code::Unavailable).await?;
    for id in 0..6 {
        fixture.put(id, NAMES[id as usize % 4], 10 * id).await?;
    }
    fixture.drain().await?;
    fixture.is_true().await?;
    same("the groups", &fixture.teams().await?.len(), &4)?;
    // From one group to another, other numbers, out of every group and back.
    fixture.put(0, "blue", 7).await?;
    fixture.put(1, "green", -3).await?;
    fixture.delete(2).await?;
    fixture.drain().await?;
    fixture.is_true().await?;
    fixture.any_version("profile.restore", 2, json!({})).await?;
    fixture.put(6, "white", 1).await?;
    fixture.drain().await?;
    fixture.is_true().await?;
    fixture.delete(6).await?;
    fixture.drain().await?;
    fixture.is_true().await?;
    ensure!(!fixture.teams().await?.contains_key("white"), "a group without rows is listed");
    let read = fixture.client.done("teams.read", &["blue".into()], json!({}), None).await?.body;
    let [count, sum] = ["count", "sum_points"].map(|name| read[name].clone());
    same(
        "one group",
        &json!([count, sum, read["min_points"], read["max_points"]]),
        &fixture.truth().await?["blue"],
    )?;
    let none = fixture.client.done("teams.read", &["nobody".into()], json!({}), None).await?.body;
    same("none", &json!([none["count"], none["sum_points"], none["min_points"]]), &json!([0, 0, null]))?;
    fixture.equals_a_rebuild().await
}

async fn extremes_are_right_after_removals(namespace: &dyn TestNamespace) -> Result<()> {
    let views = r#"
[view.tall]
of     = "profile"
min    = ["height"]
max    = ["height", "points"]
latest = "points"
"#;
    let fixture = ProjectionFixture::open(namespace, views).await?;
    for (id, height) in [(1, 1.5), (2, -0.25), (3, 2.75)] {
        let input = json!({"id": id, "points": id, "height": height});
        fixture.client.done("profile.create", &[], input, None).await?;
    }
    let shown = async || -> Result<Json> {
        fixture.drain().await?;
        let body = fixture.client.done("tall.list", &[], json!({}), None).await?.body;
        Ok(json!([
            body[0]["min_height"],
            body[0]["max_height"],
            body[0]["max_points"],
            body[0]["latest"]["key"]
        ]))
    };
    same("all", &shown().await?, &json!([-0.25, 2.75, 3, "3"]))?;
    // The row that had the greatest goes; the one that had the least gets another.
    fixture.delete(3).await?;
    fixture.any_version("profile.patch", 2, json!({"height": 9.5})).await?;
    same("after", &shown().await?, &json!([1.5, 9.5, 2, "2"]))?;
    fixture.any_version("profile.patch", 2, json!({"height": null, "points": 0})).await?;
    same("without one", &shown().await?, &json!([1.5, 1.5, 1, "1"]))?;
    fixture.any_version("profile.restore", 3, json!({})).await?;
    same("back again", &shown().await?, &json!([1.5, 2.75, 3, "3"]))
}

async fn deleted_rows_count_nowhere_unless_asked_for(namespace: &dyn TestNamespace) -> Result<()> {
    let views = "[view.total]\nof = \"profile\"\nsum = [\"points\"]\ncount = true\n\
                 [view.by_status]\nof = \"profile\"\ngroup_by = [\"status\"]\n";
    let fixture = ProjectionFixture::open(namespace, views).await?;
    for id in 1..=4 {
        fixture.put(id, "red", id).await?;
    }
    fixture.delete(4).await?;
    fixture.drain().await?;
    let total = fixture.client.done("total.list", &[], json!({}), None).await?.body;
    same("the total", &json!([total[0]["count"], total[0]["sum_points"]]), &json!([3, 6]))?;
    let list = fixture.client.done("by_status.list", &[], json!({}), None).await?.body;
    let counts: Vec<(&str, i64)> = list
        .as_array()
        .into_iter()
        .flatten()
        .map(|row| (row["status"].as_str().unwrap_or(""), row["count"].as_i64().unwrap_or(0)))
        .collect();
    same("by status", &counts, &vec![("ACTIVE", 3), ("DELETED", 1)])
}

async fn versions_count_once_from_whichever_partition(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    for id in 0..4 {
        fixture.put(id, "red", 1).await?;
    }
    fixture.drain().await?;
    // A batch stands under its first row: the second row's older version is in another partition than its newer one.
    for (number, (first, second)) in [(0, 1), (2, 3)].into_iter().enumerate() {
        let patch = |id: i64, points: i64| {
            let input = json!({"team": "blue", "points": points});
            TenantClient::request("profile.patch", &[id.into()], &input, Some(Expected::Any))
        };
        let batch = vec![patch(first, 5), patch(second, 50)];
        let done = fixture.client.house.batch(&fixture.client.tenant, batch, Operation::default()).await;
        done?;
        fixture.put(second, "green", 7).await?;
        let mut shards: Vec<u32> = (0..fixture.client.house.store().partitions()).collect();
        // From the first partition to the last, and the other way round: in one of them the newer version is first.
        if number == 1 {
            shards.reverse();
        }
        for _ in 0..4 {
            for shard in &shards {
                fixture.step("teams", *shard, 1).await?;
            }
        }
        fixture.drain().await?;
        fixture.is_true().await?;
    }
    fixture.equals_a_rebuild().await
}

async fn a_replay_changes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    fixture.drain().await?;
    for id in 0..5 {
        fixture.put(id, NAMES[id as usize % 4], id).await?;
        fixture.put(id, NAMES[(id as usize + 1) % 4], 2 * id).await?;
    }
    fixture.delete(3).await?;
    fixture.drain().await?;
    let (projection, live) = (fixture.projection()?, fixture.live().await?);
    let before = (fixture.teams().await?, projection.digest(live).await?);
    let group = projection.group(live);
    for partition in 0..fixture.client.house.store().partitions() {
        group.seek(partition, 0).await?;
    }
    ensure!(group.status().await?.iter().any(|one| one.records > 0), "nothing lies ahead");
    fixture.drain().await?;
    same("after the replay", &(fixture.teams().await?, projection.digest(live).await?), &before)?;
    fixture.is_true().await
}

async fn lost_answers_count_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound, Arc::new(SystemClock), Odds::default(), 3));
    let fixture = ProjectionFixture::over(faulty.clone(), TEAMS).await?;
    fixture.drain().await?;
    for id in 0..5 {
        fixture.put(id, NAMES[id as usize % 3], id).await?;
        fixture.put(id, NAMES[(id as usize + 1) % 3], 3 * id).await?;
    }
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.4, unavailable: 0.05, ..Odds::default() });
    for round in 0..25 {
        if round == 8 {
            // And in the middle of it a rebuild.
            let _ = fixture.projection()?.rebuild().await;
        }
        // Whatever comes of it: the process may die here as well.
        let _ = fixture.work(1).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    fixture.equals_a_rebuild().await
}

async fn a_projector_that_is_killed_leaves_what_a_replay_gives(namespace: &dyn TestNamespace) -> Result<()> {
    let sound = namespace.open().await?;
    let quiet = ProjectionFixture::over(sound.clone(), TEAMS).await?;
    quiet.drain().await?;
    let mut died = 0;
    for seed in 1..=6 {
        for id in 0..5 {
            quiet.put(id, NAMES[(id as usize + seed as usize) % 4], id + seed as i64).await?;
        }
        let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), seed));
        let fixture = Arc::new(ProjectionFixture::over(faulty.clone(), TEAMS).await?);
        if seed == 3 {
            fixture.projection()?.rebuild().await?;
        }
        faulty.set_odds(Odds { crash_before: 0.1, crash_after: 0.3, ..Odds::default() });
        let process = tokio::spawn({
            let fixture = fixture.clone();
            async move {
                for _ in 0..10 {
                    let _ = fixture.work(1).await;
                }
            }
        });
        // A call that never returns is a process that is gone.
        for _ in 0..1_000 {
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
    quiet.equals_a_rebuild().await
}

async fn what_does_not_fit_is_parked_alone(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    fixture.drain().await?;
    let long = "x".repeat(400);
    fixture.put(1, "red", 1).await?;
    fixture.put(2, &long, 2).await?;
    fixture.put(3, "red", 3).await?;
    fixture.put(2, "red", 5).await?;
    fixture.drain().await?;
    same("the others", &fixture.teams().await?, &BTreeMap::from([("red".to_owned(), json!([2, 4, 1, 3]))]))?;
    let group = fixture.projection()?.group(fixture.live().await?);
    let parked = group.parked(&fixture.client.tenant).await?;
    same(
        "what is parked",
        &parked.iter().map(|one| one.subject.as_str()).collect::<Vec<_>>(),
        &vec!["profile/2"; 2],
    )?;
    ensure!(parked[0].reason.contains("bytes"), "{parked:?}");
    // The first is given up; what is behind it is tried again.
    ensure!(group.discard(&fixture.client.tenant, &parked[0]).await?, "it was not parked");
    ensure!(
        group.replay(&fixture.client.tenant, parked[1].partition, "profile/2").await?,
        "nothing was parked"
    );
    for _ in 0..1_000 {
        fixture.step("teams", parked[1].partition, 1).await?;
        if group.parked(&fixture.client.tenant).await?.is_empty() {
            break;
        }
        pause().await;
    }
    fixture.is_true().await?;
    fixture.equals_a_rebuild().await
}

async fn a_reader_waits_for_its_own_write(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    fixture.drain().await?;
    let token = fixture.put(1, "red", 5).await?.context("a write without a token")?;
    let read = async |token: &str, wait_ms: i64| {
        let input = json!({"after": token, "wait_ms": wait_ms});
        fixture.client.call("teams.read", &["red".into()], input, None).await
    };
    // No worker runs, so the view cannot have it.
    let early = read(&token, 0).await;
    ensure!(early.as_ref().is_err_and(|refusal| refusal.code == Code::Unavailable), "{early:?}");
    let refused = read("nonsense", 0).await;
    ensure!(refused.as_ref().is_err_and(|refusal| refusal.code == Code::InvalidInput), "{refused:?}");
    let options = WorkerOptions {
        lease: Duration::from_millis(1_500),
        step_rows: 1,
        idle_max: Duration::from_millis(500),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    };
    fixture.client.house.start_workers(options);
    for points in [6, 7, 8] {
        let token = fixture.put(1, "red", points).await?.context("a write without a token")?;
        let seen = loop {
            match read(&token, 30_000).await {
                Ok(seen) => break seen,
                // A slow machine is no failure; an old number would be.
                Err(refusal) => ensure!(refusal.code == Code::Unavailable, "{refusal}"),
            }
        };
        same("what the reader sees", &seen.body["sum_points"], &json!(points))?;
    }
    fixture.client.house.stop_workers().await;
    Ok(())
}

async fn tenants_count_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    let other = fixture.client.for_tenant("other")?;
    for id in 0..4 {
        fixture.put(id, "red", 1).await?;
        put(&other, id, "red", 100).await?;
    }
    put(&other, 7, "blue", 5).await?;
    fixture.drain().await?;
    for client in [&fixture.client, &other] {
        same(client.tenant.as_str(), &teams(client).await?, &truth(client).await?)?;
    }
    same(
        "the first one's",
        &fixture.teams().await?,
        &BTreeMap::from([("red".to_owned(), json!([4, 4, 1, 1]))]),
    )
}

async fn processes_share_a_projection_and_survive_each_other(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let (first, second) = (
        ProjectionFixture::over(store.clone(), TEAMS).await?,
        ProjectionFixture::over(store.clone(), TEAMS).await?,
    );
    let options = || WorkerOptions {
        lease: Duration::from_millis(1_500),
        step_rows: 1,
        idle_max: Duration::from_millis(300),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    };
    for fixture in [&first, &second] {
        fixture.client.house.start_workers(options());
    }
    let settle = async || -> Result<()> {
        for tries in 0.. {
            let shown = match teams(&second.client).await {
                Ok(shown) => shown,
                // It is being built for the first time.
                Err(_) if tries < 20_000 => BTreeMap::new(),
                Err(error) => return Err(error),
            };
            let truth = second.truth().await?;
            if shown == truth {
                return Ok(());
            }
            ensure!(tries < 20_000, "expected {truth:?}, got {shown:?}");
            pause().await;
        }
        Ok(())
    };
    for id in 0..5 {
        first.put(id, NAMES[id as usize % 4], id).await?;
    }
    settle().await?;
    // One is killed with its leases in its hands, while the projection is rebuilt.
    second.projection()?.rebuild().await?;
    drop(first);
    for id in 0..5 {
        second.put(id, NAMES[(id as usize + 1) % 4], 2 * id).await?;
    }
    for tries in 0.. {
        if second.live().await? == 2 {
            break;
        }
        ensure!(tries < 20_000, "the rebuild does not end: {:?}", second.state().await?);
        pause().await;
    }
    settle().await?;
    second.client.house.stop_workers().await;
    second.equals_a_rebuild().await
}

async fn views_that_cannot_be_are_refused(_: &dyn TestNamespace) -> Result<()> {
    let others = r#"
[relation.follow]
from = { a = "int" }
to   = { b = "int" }
[thread.comment]
parent = { post_id = "int" }
fields = { body = "text" }
[schedule.job]
[sequence.ticket]
kind = "counter"
key  = { series = "text" }
[log.audit]
[view.other]
of = "profile"
"#;
    for (view, expected) in [
        ("count = true", "does not say what it is of"),
        ("of = \"nothing\"", "not a resource that a view can be of"),
        ("of = \"profiles\"", "did you mean `profile`?"),
        ("of = \"profile\"\nsum = [\"height\"]", "`height` is float; `sum` takes int"),
        ("of = \"profile\"\nmin = [\"team\"]", "`team` is text"),
        ("of = \"profile\"\ngroup_by = [\"height\"]", "`height` is float"),
        ("of = \"profile\"\nmax = [\"age\"]", "no column `age`"),
        ("of = \"profile\"\ngroup_bye = [\"team\"]", "did you mean `group_by`?"),
        ("of = \"follow_out\"", "its rows are a list of others"),
        ("of = \"follow_in\"", "write `of = \"follow\"`"),
        ("of = \"comment_thread\"", "write `of = \"comment\"`"),
        ("of = \"ticket\"", "its row says how far it has got"),
        ("of = \"audit\"", "its rows say how far readers have got"),
        ("of = \"other\"", "its rows follow from others"),
        ("of = \"v\"", "its rows follow from others"),
        ("of = \"job\"\nmax = [\"attempt\"]", "`attempt` of `job` cannot be followed: claims and heartbeats"),
        ("of = \"job\"\ngroup_by = [\"worker\"]", "can be of job_id, queue, state, owner, priority,"),
    ] {
        let text = blueprint(&format!("{others}[view.v]\n{view}\n"));
        let declared = resource::declare(&Blueprint::read("statehouse.toml", &text)?);
        let problems = declared.err().with_context(|| format!("{view} was accepted"))?.render(false);
        ensure!(problems.contains(expected), "{view}: expected {expected:?}, got {problems}");
    }
    Ok(())
}
