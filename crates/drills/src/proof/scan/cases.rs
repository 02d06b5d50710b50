//! I04 Frontier scan: every row once, in ranges of many workers, whatever happens in between.

mod runs;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, Operation};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Clock, ManualClock, Store, SystemClock, Time, Value};

use self::runs::{
    a_late_worker_of_a_run_writes_nothing, a_run_goes_on_after_a_worker_died,
    a_run_of_the_house_lives_its_life, a_run_survives_lost_answers, rows_change_while_a_run_goes_on,
};
use super::worker::{self, ClaimedRange, RangeStep};
use super::{cases as scan, invariants};
use crate::conformance::{Case, cases};
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    scan {
        a_scan_lives_its_life(8),
        racing_workers_process_every_row_once(8),
        workers_that_claim_at_once_get_different_ranges(8),
        a_worker_whose_claim_has_ended_writes_nothing(8),
        lost_answers_process_no_row_twice(8),
        a_paused_caller_comes_too_late(12),
        a_range_with_rows_left_is_not_finished(8),
        a_split_divides_what_is_left(8),
        a_range_that_fails_again_is_parked(8),
        a_paused_scan_stands_still(12),
        a_throttled_range_waits(8),
        scans_of_tenants_are_apart(8),
        a_run_of_the_house_lives_its_life(8),
        a_run_goes_on_after_a_worker_died(8),
        a_run_survives_lost_answers(8),
        a_late_worker_of_a_run_writes_nothing(8),
        rows_change_while_a_run_goes_on(8),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "frontier advanced too far",
        "A worker finishes a range whose rows it has not read, and advances to a position of another range.",
        "scan::a_range_with_rows_left_is_not_finished",
    ),
    Drill::by_case(
        CASES,
        "same range claimed twice",
        "More workers than ranges claim at once.",
        "scan::workers_that_claim_at_once_get_different_ranges",
    ),
    Drill::by_case(
        CASES,
        "progress not advanced after success",
        "Answers get lost before and after the commit of effects and cursor, and workers go on from what is stored.",
        "scan::lost_answers_process_no_row_twice",
    ),
    Drill::by_case(
        CASES,
        "already-covered range reprocessed",
        "A worker is paused past the end of its claim and writes the same rows again, after another has.",
        "scan::a_worker_whose_claim_has_ended_writes_nothing",
    ),
];

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.item]
key    = { id = "int" }
fields = { n = { type = "int", default = 0 } }

[scan.sweep]
of       = "item"
ranges   = 3
lease    = "10s"
attempts = 2
"#;

const ITEMS: i64 = 12;

/// A client with items and a clock.
struct ScanFixture {
    client: TenantClient,
    /// A house over the same store in which callers that lose a race wait by a clock that goes on.
    racing: TenantClient,
    clock: ManualClock,
}

impl ScanFixture {
    async fn open(namespace: &dyn TestNamespace) -> Result<ScanFixture> {
        let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
        let store = namespace.open_at(Arc::new(clock.clone())).await?;
        ScanFixture::over(store, clock).await
    }

    async fn over(store: Arc<dyn Store>, clock: ManualClock) -> Result<ScanFixture> {
        let shared: Arc<dyn Clock> = Arc::new(clock.clone());
        let racing = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
        let client = TenantClient::over(store, BLUEPRINT, shared).await?;
        for id in 0..ITEMS {
            client.done("item.create", &[], json!({"id": id}), None).await?;
        }
        Ok(ScanFixture { client, racing, clock })
    }

    /// Starts a run and claims a range of it that has at least so many rows.
    async fn claimed(&self, run: &str, rows: usize) -> Result<ClaimedRange> {
        worker::start(&self.client, run).await?;
        loop {
            let range = ClaimedRange::claim(&self.client, run, "worker").await?;
            let page = range.rows(&self.client, 100).await?;
            if page["rows"].as_array().map_or(0, Vec::len) >= rows {
                return Ok(range);
            }
        }
    }

    /// Requires each item to be counted so many times, and the run to be over.
    async fn check(&self, run: &str, count: i64) -> Result<()> {
        for id in 0..ITEMS {
            self.client.shows("item", &[id.into()], &json!({"n": count})).await?;
        }
        let read = self.client.done("sweep.read", &[run.into()], json!({}), None).await?;
        shows(&read, &json!({"state": "DONE", "open": 0}))?;
        ensure!(read.body["progress"]["rows"] == ITEMS, "{}", read.body);
        ensure!(read.body["progress"]["fraction"] == 1.0, "{}", read.body);
        invariants::check(&self.client.scope("sweep")).await
    }

    async fn refused(&self, action: &str, range: &ClaimedRange, input: Json, code: Code) -> Result<()> {
        let action = format!("sweep_range.{action}");
        self.client.refused(&action, &range.key, input, None, code).await.map(drop)
    }
}

fn key(run: &str) -> [Value; 1] {
    [run.into()]
}

async fn a_scan_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    client.refused("sweep.read", &key("a"), json!({}), None, Code::NotFound).await?;
    let nowhere = json!({"run_id": "a", "holder": "w"});
    client.refused("sweep_range.claim", &[], nowhere, None, Code::NotFound).await?;
    let params = json!({"run_id": "a", "params": {"why": "count"}});
    let started = client.done("sweep.start", &[], params.clone(), None).await?;
    shows(&started, &json!({"state": "RUNNING", "rate": null, "params": {"why": "count"}}))?;
    client.refused("sweep.start", &[], params, None, Code::AlreadyExists).await?;
    let nameless = json!({"run_id": "a", "holder": ""});
    client.refused("sweep_range.claim", &[], nameless, None, Code::InvalidInput).await?;
    let range = ClaimedRange::claim(client, "a", "ann").await?;
    let row = client.done("sweep_range.read", &range.key, json!({}), None).await?;
    shows(
        &row,
        &json!({"state": "CLAIMED", "holder": "ann", "epoch": 1, "attempts": 1, "rows": 0, "cursor": ""}),
    )?;
    ensure!(row.body.get("segment").is_none(), "a hidden column is shown: {}", row.body);
    let page = range.rows(client, 1).await?;
    let rows = page["rows"].as_array().context("no rows")?.len();
    if rows > 0 {
        let advanced = client.done("sweep_range.advance", &range.key, range.advance(&page), None).await?;
        shows(&advanced, &json!({"rows": 1, "attempts": 0, "cursor": page["next"]}))?;
        // From the same position again, under another operation id.
        fixture.refused("advance", &range, range.advance(&page), Code::VersionConflict).await?;
    }
    let listed = client.done("sweep_range.list", &[], json!({"run_id": "a"}), None).await?;
    let ranges = listed.body.as_array().context("no list")?.len();
    same("ranges", &json!(ranges), &started.body["ranges"])?;
    let counts = client.done("sweep.read", &key("a"), json!({}), None).await?;
    shows(&counts, &json!({"open": ranges}))?;
    let progress = &counts.body["progress"];
    same("claimed", &progress["claimed"], &json!(1))?;
    same("ready", &progress["ready"], &json!(ranges - 1))?;
    let running = client.done("sweep.list", &[], json!({}), None).await?;
    ensure!(running.body.as_array().is_some_and(|rows| rows.len() <= 1), "{}", running.body);
    client.refused("sweep_range.retry", &range.key, json!({}), None, Code::WrongState).await?;
    client.refused("sweep_range.expire", &range.key, json!({}), None, Code::WrongState).await?;
    client.done("sweep.cancel", &key("a"), json!({}), None).await?;
    for action in ["pause", "resume", "cancel", "throttle"] {
        client.refused(&format!("sweep.{action}"), &key("a"), json!({}), None, Code::WrongState).await?;
    }
    let late = json!({"run_id": "a", "holder": "bob"});
    client.refused("sweep_range.claim", &[], late, None, Code::WrongState).await?;
    Ok(())
}

async fn racing_workers_process_every_row_once(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    for (count, run) in [(1, "a"), (2, "b")] {
        worker::start(&fixture.client, run).await?;
        let workers: Vec<_> = (0..4)
            .map(|number| {
                let client = fixture.racing.clone();
                tokio::spawn(async move { worker::work(&client, run, &format!("worker {number}")).await })
            })
            .collect();
        for worker in workers {
            worker.await??;
        }
        fixture.check(run, count).await?;
    }
    Ok(())
}

async fn workers_that_claim_at_once_get_different_ranges(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let started = worker::start(&fixture.client, "a").await?;
    let claims: Vec<_> = (0..6)
        .map(|number| {
            let input = json!({"run_id": "a", "holder": format!("worker {number}")});
            fixture.racing.start("sweep_range.claim", &[], input, None)
        })
        .collect();
    let mut claimed = BTreeSet::new();
    for claim in claims {
        match claim.await? {
            Ok(answer) => {
                let number = answer.body["range_no"].as_i64().context("no number")?;
                ensure!(claimed.insert(number), "range {number} was claimed twice");
            }
            Err(refusal) => ensure!([Code::Held, Code::Contended].contains(&refusal.code), "{refusal}"),
        }
    }
    ensure!(!claimed.is_empty(), "no worker got a range");
    while let Ok(range) = ClaimedRange::claim(&fixture.client, "a", "late").await {
        let number = range.key[1].as_int().context("no number")?;
        ensure!(claimed.insert(number), "range {number} was claimed twice");
    }
    same("claimed ranges", &json!(claimed.len()), &started.body["ranges"])?;
    let none = json!({"run_id": "a", "holder": "late"});
    fixture.client.refused("sweep_range.claim", &[], none, None, Code::Held).await?;
    invariants::check(&fixture.client.scope("sweep")).await
}

async fn a_worker_whose_claim_has_ended_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    let range = fixture.claimed("a", 1).await?;
    let page = range.rows(client, 2).await?;
    fixture.clock.advance(Duration::from_micros(9_999_999));
    fixture.refused("expire", &range, json!({}), Code::WrongState).await?;
    same("claims that end too early", &client.drain_workers_of("sweep_range").await?, &0)?;
    fixture.clock.advance(Duration::from_micros(1));
    ensure!(client.drain_workers_of("sweep_range").await? > 0, "no claim has ended");
    client.shows("sweep_range", &range.key, &json!({"state": "READY", "holder": null})).await?;
    let stale = async |code: Code| -> Result<()> {
        let batch = client.house.batch(&client.tenant, range.batch(&page), Operation::default()).await;
        let refusal = batch.err().context("a stale worker wrote")?;
        same("the refusal", &refusal.code, &code)?;
        fixture.refused("finish", &range, range.finish(&page), code).await?;
        fixture.refused("split", &range, json!({"epoch": range.epoch}), code).await?;
        fixture.refused("fail", &range, json!({"epoch": range.epoch, "error": "late"}), code).await
    };
    stale(Code::NotHolder).await?;
    // Another worker has it now, under the next epoch, and has processed the same rows.
    loop {
        let next = ClaimedRange::claim(client, "a", "next").await?;
        if next.key == range.key {
            same("the epoch", &next.epoch, &(range.epoch + 1))?;
            let step = next.step(client, 2, Operation::default()).await?;
            same("the step", &step, &RangeStep::Advanced)?;
            break;
        }
    }
    stale(Code::NotHolder).await?;
    fixture.clock.advance(Duration::from_secs(10));
    client.drain_workers().await?;
    worker::work(client, "a", "last").await?;
    fixture.check("a", 1).await
}

async fn lost_answers_process_no_row_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let fixture = ScanFixture::over(store.clone(), clock).await?;
    worker::start(&fixture.client, "a").await?;
    let faulty = Arc::new(FaultyStore::over(store, Arc::new(SystemClock), Odds::default(), 7));
    let unlucky = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.3, unavailable: 0.1, ..Odds::default() });
    let workers: Vec<_> = (0..2)
        .map(|number| {
            let client = unlucky.clone();
            tokio::spawn(async move { worker::work(&client, "a", &format!("worker {number}")).await })
        })
        .collect();
    for worker in workers {
        worker.await??;
    }
    faulty.set_odds(Odds::default());
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_before + achieved.unknown_after > 0, "no answer was lost: {achieved}");
    // A claim whose answer was lost ends by itself.
    fixture.clock.advance(Duration::from_secs(10));
    fixture.client.drain_workers().await?;
    worker::work(&fixture.client, "a", "last").await?;
    fixture.check("a", 1).await
}

/// Whether a range can be split on this engine.
async fn splits(fixture: &ScanFixture, range: &ClaimedRange) -> Result<bool> {
    let input = json!({"epoch": range.epoch});
    match fixture.client.call("sweep_range.split", &range.key, input, None).await {
        Ok(_) => Ok(true),
        Err(refusal) if refusal.code == Code::WrongState => Ok(false),
        Err(refusal) => anyhow::bail!("split: {refusal}"),
    }
}

async fn a_paused_caller_comes_too_late(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    worker::start(client, "a").await?;
    // Each plan is drafted, then the row changes, then the plan arrives.
    let claim =
        client.drafted("sweep_range.claim", &[], json!({"run_id": "a", "holder": "slow"}), None).await?;
    let mut ranges = Vec::new();
    while let Ok(range) = ClaimedRange::claim(client, "a", "worker").await {
        ranges.push(range);
    }
    client.too_late(&claim).await?;
    for range in &ranges {
        let page = range.rows(client, 1).await?;
        let fail = json!({"epoch": range.epoch, "error": "slow"});
        let mut plans = vec![
            client.drafted("sweep_range.advance", &range.key, range.advance(&page), None).await?,
            client.drafted("sweep_range.fail", &range.key, fail, None).await?,
        ];
        if let Ok(split) =
            client.drafted("sweep_range.split", &range.key, json!({"epoch": range.epoch}), None).await
        {
            plans.push(split);
        }
        fixture.clock.advance(Duration::from_secs(10));
        plans.push(client.drafted("sweep_range.expire", &range.key, json!({}), None).await?);
        // A step over nothing: the cursor stays, and the claim is longer.
        let nothing = json!({"epoch": range.epoch, "cursor": page["cursor"], "next": page["cursor"]});
        client.done("sweep_range.advance", &range.key, nothing, None).await?;
        for plan in &plans {
            client.too_late(plan).await?;
        }
        if range.step(client, 100, Operation::default()).await? == RangeStep::Advanced {
            let page = range.rows(client, 1).await?;
            let finish = client.drafted("sweep_range.finish", &range.key, range.finish(&page), None).await?;
            client.done("sweep_range.finish", &range.key, range.finish(&page), None).await?;
            client.too_late(&finish).await?;
        }
    }
    let done = client.done("sweep.read", &key("a"), json!({}), None).await?;
    shows(&done, &json!({"state": "DONE"}))?;
    fixture.check("a", 1).await
}

async fn a_range_with_rows_left_is_not_finished(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    let range = fixture.claimed("a", 2).await?;
    let page = range.rows(client, 1).await?;
    fixture.refused("finish", &range, range.finish(&page), Code::WrongState).await?;
    range.step(client, 1, Operation::default()).await?;
    let page = range.rows(client, 1).await?;
    fixture.refused("finish", &range, range.finish(&page), Code::WrongState).await?;
    // Positions that are none, or of another scan, or from where the range is not.
    for next in ["!", "bm8", "e30"] {
        let input = json!({"epoch": range.epoch, "cursor": page["cursor"], "next": next});
        fixture.refused("advance", &range, input, Code::InvalidInput).await?;
    }
    let skipping = json!({"epoch": range.epoch, "cursor": page["next"], "next": page["next"]});
    fixture.refused("advance", &range, skipping, Code::VersionConflict).await?;
    let other = ClaimedRange::claim(client, "a", "other").await;
    if let Ok(other) = other {
        let page = other.rows(client, 1).await?;
        if page["rows"].as_array().is_some_and(|rows| !rows.is_empty()) {
            let mine = range.rows(client, 1).await?;
            let input = json!({"epoch": range.epoch, "cursor": mine["cursor"], "next": page["next"]});
            fixture.refused("advance", &range, input, Code::InvalidInput).await?;
        }
    }
    fixture.clock.advance(Duration::from_secs(10));
    client.drain_workers().await?;
    worker::work(client, "a", "last").await?;
    fixture.check("a", 1).await
}

async fn a_split_divides_what_is_left(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    let range = fixture.claimed("a", 3).await?;
    range.step(client, 1, Operation::default()).await?;
    let before = client.done("sweep.read", &key("a"), json!({}), None).await?;
    let page = range.rows(client, 1).await?;
    let drafted =
        client.drafted("sweep_range.split", &range.key, json!({"epoch": range.epoch}), None).await.ok();
    // Its time is up, and no sweeper has come by: the split keeps it claimed.
    fixture.clock.advance(Duration::from_secs(10));
    let expire = client.drafted("sweep_range.expire", &range.key, json!({}), None).await?;
    let is_split = splits(&fixture, &range).await?;
    let after = client.done("sweep.read", &key("a"), json!({}), None).await?;
    let more = |body: &Json| body["ranges"].as_i64().unwrap_or(0) + i64::from(is_split);
    same("ranges", &after.body["ranges"].as_i64(), &Some(more(&before.body)))?;
    if is_split {
        // The page was read before the split: its position is of a range that is no more.
        fixture.refused("advance", &range, range.advance(&page), Code::NotHolder).await?;
        client.too_late(&drafted.context("no draft")?).await?;
        client.too_late(&expire).await?;
        two_splits_take_different_numbers(&fixture).await?;
    }
    fixture.clock.advance(Duration::from_secs(10));
    client.drain_workers().await?;
    worker::work(client, "a", "last").await?;
    fixture.check("a", 1).await
}

/// A split that was drafted before another one of the same scan.
async fn two_splits_take_different_numbers(fixture: &ScanFixture) -> Result<()> {
    let client = &fixture.client;
    let first = fixture.claimed("b", 3).await?;
    let second = loop {
        let range = ClaimedRange::claim(client, "b", "second").await?;
        if range.rows(client, 100).await?["rows"].as_array().map_or(0, Vec::len) >= 2 {
            break range;
        }
    };
    let input = json!({"epoch": second.epoch});
    let drafted = client.drafted("sweep_range.split", &second.key, input, None).await?;
    ensure!(splits(fixture, &first).await?, "it could be split before");
    client.too_late(&drafted).await?;
    client.done("sweep.cancel", &key("b"), json!({}), None).await?;
    invariants::check(&client.scope("sweep")).await
}

async fn a_range_that_fails_again_is_parked(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    let range = fixture.claimed("a", 1).await?;
    let fail = |epoch: i64| json!({"epoch": epoch, "error": "no such host"});
    fixture.refused("fail", &range, fail(range.epoch + 1), Code::NotHolder).await?;
    let failed = client.done("sweep_range.fail", &range.key, fail(range.epoch), None).await?;
    shows(&failed, &json!({"state": "READY", "holder": null, "error": "no such host", "attempts": 1}))?;
    let again = loop {
        let next = ClaimedRange::claim(client, "a", "again").await?;
        if next.key == range.key {
            break next;
        }
    };
    let parked = client.done("sweep_range.fail", &again.key, fail(again.epoch), None).await?;
    shows(&parked, &json!({"state": "FAILED", "attempts": 2}))?;
    // The others end by their time, and again after the second attempt.
    for _ in 0..2 {
        fixture.clock.advance(Duration::from_secs(10));
        client.drain_workers().await?;
        while ClaimedRange::claim(client, "a", "dies").await.is_ok() {}
    }
    fixture.clock.advance(Duration::from_secs(10));
    client.drain_workers().await?;
    let claim = json!({"run_id": "a", "holder": "last"});
    client.refused("sweep_range.claim", &[], claim, None, Code::WrongState).await?;
    let read = client.done("sweep.read", &key("a"), json!({}), None).await?;
    same("failed ranges", &read.body["progress"]["failed"], &read.body["ranges"])?;
    for number in 1..=read.body["ranges"].as_i64().unwrap_or(0) {
        let retried = client.done("sweep_range.retry", &["a".into(), number.into()], json!({}), None).await?;
        shows(&retried, &json!({"state": "READY", "attempts": 0, "error": null}))?;
    }
    worker::work(client, "a", "last").await?;
    fixture.check("a", 1).await
}

async fn a_paused_scan_stands_still(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    let range = fixture.claimed("a", 1).await?;
    client.refused("sweep.resume", &key("a"), json!({}), None, Code::WrongState).await?;
    let page = range.rows(client, 100).await?;
    let advance = client.drafted("sweep_range.advance", &range.key, range.advance(&page), None).await?;
    let others = ClaimedRange::claim(client, "a", "other").await.is_ok();
    client.done("sweep.pause", &key("a"), json!({}), None).await?;
    client.too_late(&advance).await?;
    client.refused("sweep.pause", &key("a"), json!({}), None, Code::WrongState).await?;
    fixture.refused("advance", &range, range.advance(&page), Code::WrongState).await?;
    fixture.refused("split", &range, json!({"epoch": range.epoch}), Code::WrongState).await?;
    let claim = json!({"run_id": "a", "holder": "late"});
    client.refused("sweep_range.claim", &[], claim, None, Code::WrongState).await?;
    client.done("sweep.resume", &key("a"), json!({}), None).await?;
    // A claim, a split and a finish that were prepared before the pause.
    let mut plans = Vec::new();
    let claim = json!({"run_id": "a", "holder": "late"});
    plans.extend(client.drafted("sweep_range.claim", &[], claim, None).await.ok());
    let split = json!({"epoch": range.epoch});
    plans.extend(client.drafted("sweep_range.split", &range.key, split, None).await.ok());
    client.done("sweep.pause", &key("a"), json!({}), None).await?;
    for plan in &plans {
        client.too_late(plan).await?;
    }
    client.done("sweep.resume", &key("a"), json!({}), None).await?;
    range.step(client, 100, Operation::default()).await?;
    late_finish(&fixture, &range).await?;
    ensure!(others || plans.len() < 3, "there was no other range");
    fixture.clock.advance(Duration::from_secs(10));
    client.drain_workers().await?;
    worker::work(client, "a", "last").await?;
    fixture.check("a", 1).await
}

/// A finish that was prepared before a pause, of a range that is not the last one and of the last one.
async fn late_finish(fixture: &ScanFixture, range: &ClaimedRange) -> Result<()> {
    let client = &fixture.client;
    let pause_before = async |range: &ClaimedRange| -> Result<()> {
        let page = range.rows(client, 1).await?;
        let finish = client.drafted("sweep_range.finish", &range.key, range.finish(&page), None).await?;
        client.done("sweep.pause", &key("a"), json!({}), None).await?;
        client.too_late(&finish).await?;
        fixture.refused("finish", range, range.finish(&page), Code::WrongState).await?;
        client.done("sweep.resume", &key("a"), json!({}), None).await?;
        client.done("sweep_range.finish", &range.key, range.finish(&page), None).await.map(drop)
    };
    pause_before(range).await?;
    fixture.clock.advance(Duration::from_secs(10));
    client.drain_workers().await?;
    // All others but one, at whose end two plans are drafted at once.
    let mut open = Vec::new();
    while let Ok(next) = ClaimedRange::claim(client, "a", "last").await {
        while !next.rows(client, 1).await?["rows"].as_array().is_some_and(Vec::is_empty) {
            next.step(client, 100, Operation::default()).await?;
        }
        open.push(next);
    }
    let [first, second] = open.as_slice() else { return Ok(()) };
    let page = first.rows(client, 1).await?;
    let more = client.drafted("sweep_range.finish", &first.key, first.finish(&page), None).await?;
    let page = second.rows(client, 1).await?;
    client.done("sweep_range.finish", &second.key, second.finish(&page), None).await?;
    // It was to leave one open range, and would now leave none in a scan that is not done.
    client.too_late(&more).await?;
    pause_before(first).await
}

async fn a_throttled_range_waits(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let client = &fixture.client;
    let range = fixture.claimed("a", 2).await?;
    client.refused("sweep.throttle", &key("a"), json!({"rate": 0}), None, Code::InvalidInput).await?;
    let throttled = client.done("sweep.throttle", &key("a"), json!({"rate": 2}), None).await?;
    shows(&throttled, &json!({"rate": 2, "state": "RUNNING"}))?;
    range.step(client, 1, Operation::default()).await?;
    let page = range.rows(client, 1).await?;
    same("the page of a range that waits", &page["rows"], &json!([]))?;
    same("how long", &page["wait_ms"], &json!(500))?;
    same("its end", &page["end"], &json!(false))?;
    fixture.clock.advance(Duration::from_millis(500));
    let page = range.rows(client, 1).await?;
    same("how long", &page["wait_ms"], &json!(0))?;
    ensure!(page["rows"].as_array().is_some_and(|rows| rows.len() == 1), "{page}");
    client.done("sweep.throttle", &key("a"), json!({"rate": null}), None).await?;
    client.shows("sweep", &key("a"), &json!({"rate": null})).await?;
    fixture.clock.advance(Duration::from_secs(10));
    client.drain_workers().await?;
    worker::work(client, "a", "last").await?;
    fixture.check("a", 1).await
}

async fn scans_of_tenants_are_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ScanFixture::open(namespace).await?;
    let other = fixture.client.for_tenant("zenith")?;
    for id in 0..5 {
        other.done("item.create", &[], json!({"id": id}), None).await?;
    }
    for client in [&fixture.client, &other] {
        worker::start(client, "a").await?;
        worker::work(client, "a", "worker").await?;
    }
    fixture.check("a", 1).await?;
    let read = other.done("sweep.read", &key("a"), json!({}), None).await?;
    same("rows of the other tenant", &read.body["progress"]["rows"], &json!(5))?;
    invariants::check(&other.scope("sweep")).await
}
