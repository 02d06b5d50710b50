//! A02 Relation: an edge is there or not, whichever callers add and remove it, and both lists and both counts say the same.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, Expected};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{ManualClock, Random, Scan, Step, SystemClock, Time, Value};

use super::{cases as relation, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Meanwhile, StoreProxy};
use crate::harness::store_client::{same, scan};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    relation {
        an_edge_comes_and_goes(7),
        what_changes_nothing_writes_nothing(7),
        a_retry_makes_no_second_edge(7),
        a_late_retry_brings_nothing_back(7),
        adding_and_removing_contend_on_one_row(7),
        edges_can_be_changed_under_a_version(7),
        a_paused_caller_comes_too_late(7),
        lists_that_do_not_agree_are_not_made_worse(7),
        lists_are_in_order_and_paged_over_buckets(7),
        a_list_of_one_bucket_goes_on(7),
        pages_hold_while_others_come_and_go(7),
        counts_are_the_edges_after_a_storm(7),
        lost_answers_count_nothing_twice(7),
        buckets_can_be_added_later(7),
        edges_of_tenants_are_apart(7),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "duplicate edge creation on retry",
        "An edge is added again under the same operation id, and under another.",
        "relation::a_retry_makes_no_second_edge",
    ),
    Drill::by_case(
        CASES,
        "add/remove race",
        "Callers add and remove one edge at once.",
        "relation::adding_and_removing_contend_on_one_row",
    ),
    Drill::by_case(
        CASES,
        "count projection lag",
        "Many callers add and remove at once, and the counts are compared with the edges.",
        "relation::counts_are_the_edges_after_a_storm",
    ),
    Drill::by_case(
        CASES,
        "stale relation list cache",
        "Pages of a list are read while others add and remove.",
        "relation::pages_hold_while_others_come_and_go",
    ),
];

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[relation.follow]
from         = { follower = "int" }
to           = { followee = "int" }
fields       = { note = "text?", level = { type = "int", default = 1 } }
buckets      = 3
out_buckets  = 2
count_shards = 2
"#;

fn edge(from: i64, to: i64) -> [Value; 2] {
    [from.into(), to.into()]
}

async fn add(client: &TenantClient, from: i64, to: i64) -> Result<()> {
    client.done("follow.add", &edge(from, to), json!({}), None).await.map(drop)
}

async fn remove(client: &TenantClient, from: i64, to: i64) -> Result<()> {
    client.done("follow.remove", &edge(from, to), json!({}), None).await.map(drop)
}

async fn count(client: &TenantClient, end: &str, who: i64) -> Result<Option<i64>> {
    let counted = client.done(&format!("follow_{end}.count"), &[who.into()], json!({}), None).await?;
    Ok(counted.body["count"].as_i64())
}

/// Who is at the other end, page by page, in the order of the list.
async fn list(client: &TenantClient, end: &str, who: i64, limit: i64) -> Result<Vec<i64>> {
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        let (listed, next) = page(client, end, who, limit, cursor).await?;
        found.extend(listed);
        if next.is_none() {
            return Ok(found);
        }
        cursor = next;
    }
}

/// One page of a list, and the cursor of the next.
async fn page(
    client: &TenantClient,
    end: &str,
    who: i64,
    limit: i64,
    cursor: Option<String>,
) -> Result<(Vec<i64>, Option<String>)> {
    let (owner, other) = if end == "out" { ("follower", "followee") } else { ("followee", "follower") };
    let mut input = json!({owner: who, "limit": limit});
    if let Some(cursor) = cursor {
        input["cursor"] = Json::String(cursor);
    }
    let page = client.done(&format!("follow_{end}.list"), &[], input, None).await?;
    let rows = page.body.as_array().context("no list")?;
    ensure!(rows.len() <= usize::try_from(limit)?, "{} rows in a page of {limit}", rows.len());
    let mut found = Vec::new();
    for row in rows {
        ensure!(row["has"] == json!(true) && row[owner] == json!(who), "{row} in the list of {who}");
        found.push(row[other].as_i64().context("no key at the other end")?);
    }
    Ok((found, page.next))
}

/// Checks the invariants, and returns the edges that are there.
async fn check_rows(client: &TenantClient) -> Result<BTreeSet<(i64, i64)>> {
    let scope = client.scope("follow");
    invariants::check(&scope).await?;
    let edge = |key: String| -> Result<(i64, i64)> {
        let (from, to) = key.split_once(',').context("an edge with one end")?;
        Ok((from.parse()?, to.parse()?))
    };
    invariants::check_rows(&scope).await?.into_iter().map(edge).collect()
}

async fn an_edge_comes_and_goes(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let has = async |expected: Json| -> Result<()> {
        let answer = client.done("follow.has", &edge(1, 2), json!({}), None).await?;
        shows(&answer, &expected)
    };
    has(json!({"follower": 1, "followee": 2, "has": false, "since": null, "version": 0})).await?;
    let added = client.done("follow.add", &edge(1, 2), json!({"note": "met"}), None).await?;
    shows(&added, &json!({"has": true, "note": "met", "level": 1, "version": 1}))?;
    ensure!(added.body.get("out_bucket").is_none(), "{}", added.body);
    has(json!({"has": true, "since": added.body["since"], "note": "met"})).await?;
    same("one way only", &list(&client, "out", 2, 10).await?, &vec![])?;
    same("out", &list(&client, "out", 1, 10).await?, &vec![2])?;
    same("in", &list(&client, "in", 2, 10).await?, &vec![1])?;
    same("counts", &(count(&client, "out", 1).await?, count(&client, "in", 2).await?), &(Some(1), Some(1)))?;
    let removed = client.done("follow.remove", &edge(1, 2), json!({}), None).await?;
    shows(&removed, &json!({"has": false, "since": null, "note": null, "version": 2}))?;
    has(json!({"has": false, "version": 2})).await?;
    same("in, after", &list(&client, "in", 2, 10).await?, &vec![])?;
    same("counts", &(count(&client, "out", 1).await?, count(&client, "in", 2).await?), &(Some(0), Some(0)))?;
    add(&client, 1, 2).await?;
    has(json!({"has": true, "note": null, "level": 1, "version": 3})).await?;
    client.refused("follow.add", &edge(1, 2), json!({"nota": "x"}), None, Code::InvalidInput).await?;
    client.refused("follow_in.list", &[], json!({}), None, Code::InvalidInput).await?;
    check_rows(&client).await?;
    same("what is told", &client.events(3).await?.len(), &3)
}

async fn what_changes_nothing_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    remove(&client, 1, 2).await?;
    for _ in 0..3 {
        let added = client.done("follow.add", &edge(1, 2), json!({"note": "met"}), None).await?;
        shows(&added, &json!({"has": true, "note": "met", "version": 1}))?;
    }
    let changed =
        client.done("follow.add", &edge(1, 2), json!({"note": "friends", "level": 2}), None).await?;
    shows(&changed, &json!({"note": "friends", "level": 2, "version": 2}))?;
    for _ in 0..3 {
        let removed = client.done("follow.remove", &edge(1, 2), json!({}), None).await?;
        shows(&removed, &json!({"has": false, "version": 3}))?;
    }
    let mut told = client.events(3).await?;
    told.sort();
    same(
        "what was written",
        &told,
        &["follow.added", "follow.changed", "follow.removed"].map(str::to_owned).to_vec(),
    )?;
    check_rows(&client).await.map(drop)
}

async fn a_retry_makes_no_second_edge(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let key = edge(1, 2);
    let mut answers = Vec::new();
    // Under one operation id, then under others, then by many at once.
    for operation in ["op-1", "op-1", "op-2", "op-3"] {
        answers.push(client.call_as(operation, "follow.add", &key, json!({}), None).await?.body);
    }
    ensure!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.call("follow.add", &edge(3, 2), json!({}), None).await })
        })
        .collect();
    for caller in callers {
        shows(&caller.await??, &json!({"has": true, "version": 1}))?;
    }
    same("how many", &count(&client, "in", 2).await?, &Some(2))?;
    same("the edges", &check_rows(&client).await?, &BTreeSet::from([(1, 2), (3, 2)]))
}

async fn a_late_retry_brings_nothing_back(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let key = edge(1, 2);
    let added = client.call_as("op-1", "follow.add", &key, json!({}), None).await?;
    let removed = client.call_as("op-2", "follow.remove", &key, json!({}), None).await?;
    let again = client.call_as("op-1", "follow.add", &key, json!({}), None).await?;
    same("the answer of the late one", &again.body, &added.body)?;
    same("what is there", &check_rows(&client).await?, &BTreeSet::new())?;
    add(&client, 1, 2).await?;
    let again = client.call_as("op-2", "follow.remove", &key, json!({}), None).await?;
    same("the answer of the late one", &again.body, &removed.body)?;
    same("what is there", &check_rows(&client).await?, &BTreeSet::from([(1, 2)]))
}

async fn adding_and_removing_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    for round in 0..6 {
        if round % 2 == 0 {
            add(&client, 1, 2).await?;
        }
        let callers: Vec<_> = (0..6)
            .map(|caller| {
                let client = client.clone();
                let action = if caller % 2 == 0 { "follow.remove" } else { "follow.add" };
                tokio::spawn(async move { client.call(action, &edge(1, 2), json!({}), None).await })
            })
            .collect();
        for caller in callers {
            if let Err(refusal) = caller.await? {
                ensure!(refusal.code == Code::Contended, "{refusal}");
            }
        }
        let there = check_rows(&client).await?;
        let has = client.done("follow.has", &edge(1, 2), json!({}), None).await?;
        same("whether it is there", &has.body["has"], &json!(there.contains(&(1, 2))))?;
        // What comes after all of them is what counts.
        if round % 3 == 0 {
            remove(&client, 1, 2).await?;
            same("after the last", &check_rows(&client).await?, &BTreeSet::new())?;
        }
    }
    Ok(())
}

async fn edges_can_be_changed_under_a_version(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let key = edge(1, 2);
    client.refused("follow.add", &key, json!({}), Some(1), Code::NotFound).await?;
    add(&client, 1, 2).await?;
    client.refused("follow.add", &key, json!({"note": "x"}), Some(7), Code::VersionConflict).await?;
    let refusal = client.refused("follow.remove", &key, json!({}), Some(7), Code::VersionConflict).await?;
    same("the version as it is", &refusal.current_version, &Some(1))?;
    client.done("follow.add", &key, json!({"note": "x"}), Some(1)).await?;
    client.done("follow.remove", &key, json!({}), Some(2)).await?;
    client.done("follow.add", &key, json!({}), Some(3)).await?;
    // Many who have seen the same version: one of them has it.
    let callers: Vec<_> = (0..6)
        .map(|caller| {
            let client = client.clone();
            let (action, input) = match caller % 2 {
                0 => ("follow.remove", json!({})),
                _ => ("follow.add", json!({"level": 10 + caller})),
            };
            tokio::spawn(async move { client.call(action, &edge(1, 2), input, Some(4)).await })
        })
        .collect();
    let mut done = 0;
    for caller in callers {
        match caller.await? {
            Ok(_) => done += 1,
            Err(refusal) => ensure!(refusal.code == Code::VersionConflict, "{refusal}"),
        }
    }
    same("who was first", &done, &1)?;
    let any = TenantClient::request("follow.remove", &edge(8, 9), &json!({}), Some(Expected::Any));
    let any = client.house.call(&client.tenant, any, statehouse::Operation::default()).await;
    same(
        "an edge that was never there",
        &any.map(drop).map_err(|refusal| refusal.code),
        &Err(Code::NotFound),
    )?;
    check_rows(&client).await.map(drop)
}

async fn a_paused_caller_comes_too_late(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let key = edge(1, 2);
    let at = |version: i64| Some(Expected::Version(version));
    // Each of these is drafted, and then others act before it is committed.
    let add_first = client.drafted("follow.add", &key, json!({}), None).await?;
    add(&client, 1, 2).await?;
    client.too_late(&add_first).await?;
    let change = client.drafted("follow.add", &key, json!({"level": 5}), at(1)).await?;
    let change_any = client.drafted("follow.add", &key, json!({"level": 6}), Some(Expected::Any)).await?;
    let end = client.drafted("follow.remove", &key, json!({}), at(1)).await?;
    client.done("follow.add", &key, json!({"level": 2}), None).await?;
    client.too_late(&change).await?;
    client.too_late(&end).await?;
    // The edge goes and comes back: it is another one, at another place in the lists.
    let end_any = client.drafted("follow.remove", &key, json!({}), None).await?;
    remove(&client, 1, 2).await?;
    client.too_late(&end_any).await?;
    client.too_late(&change_any).await?;
    let revive = client.drafted("follow.add", &key, json!({}), at(3)).await?;
    add(&client, 1, 2).await?;
    client.too_late(&end_any).await?;
    client.too_late(&change_any).await?;
    // It is gone again, and not as it was when the caller saw it.
    remove(&client, 1, 2).await?;
    client.too_late(&revive).await?;
    same("what is there", &check_rows(&client).await?, &BTreeSet::new())?;
    // Its row is gone altogether, past the actions.
    let key = edge(3, 4);
    add(&client, 3, 4).await?;
    let mut plans = Vec::new();
    for expected in [at(1), Some(Expected::Any)] {
        plans.push(client.drafted("follow.add", &key, json!({"level": 5}), expected).await?);
        plans.push(client.drafted("follow.remove", &key, json!({}), expected).await?);
    }
    let store_client = client.store_client()?;
    store_client.apply(store_client.one(Step::delete(client.table("follows")?, key))).await?;
    for plan in &plans {
        client.too_late(plan).await?;
    }
    Ok(())
}

async fn lists_that_do_not_agree_are_not_made_worse(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, clock).await?;
    let store_client = client.store_client()?;
    // A program writes past the actions. It should not; if it does, it shows.
    for (from, list) in [(1, "follows_out"), (2, "follows_in")] {
        add(&client, from, 9).await?;
        let table = client.table(list)?.clone();
        let listed = scan(store_client.store.as_ref(), Scan::of(&table, &client.tenant)).await?;
        let row = listed.iter().find(|row| row.int("follower") == Some(from)).context("not listed")?;
        let key = || row.key().to_vec();
        store_client.apply(store_client.one(Step::delete(&table, key()))).await?;
        client.refused("follow.remove", &edge(from, 9), json!({}), None, Code::Internal).await?;
        store_client.apply(store_client.one(Step::insert(&table, key()))).await?;
        remove(&client, from, 9).await?;
        store_client.apply(store_client.one(Step::insert(&table, key()))).await?;
        // The clock stands, so this is the place where the edge would stand again.
        client.refused("follow.add", &edge(from, 9), json!({}), None, Code::Internal).await?;
        store_client.apply(store_client.one(Step::delete(&table, key()))).await?;
    }
    same("what is there", &check_rows(&client).await?, &BTreeSet::new())
}

async fn lists_are_in_order_and_paged_over_buckets(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, clock.clone()).await?;
    // Four at a time come at one moment, and then stand by their keys.
    for follower in 0..24 {
        add(&client, follower, 100).await?;
        add(&client, 100, follower).await?;
        if follower % 4 == 3 {
            clock.advance(Duration::from_millis(1));
        }
    }
    // One that comes back is the newest.
    remove(&client, 5, 100).await?;
    add(&client, 5, 100).await?;
    let buckets: BTreeSet<Option<i64>> =
        scan(client.house.store().as_ref(), Scan::of(client.table("follows_in")?, &client.tenant))
            .await?
            .iter()
            .map(|row| row.int("bucket"))
            .collect();
    same("the buckets of one who is followed by many", &buckets.len(), &3)?;
    let mut expected: Vec<i64> = (0..24).rev().collect();
    for limit in [1, 2, 5, 7, 23, 24, 25, 500] {
        same(&format!("out, by {limit}"), &list(&client, "out", 100, limit).await?, &expected)?;
    }
    expected.retain(|follower| *follower != 5);
    expected.insert(0, 5);
    for limit in [1, 3, 8, 24, 100] {
        same(&format!("in, by {limit}"), &list(&client, "in", 100, limit).await?, &expected)?;
    }
    same("how many", &count(&client, "in", 100).await?, &Some(24))?;
    check_rows(&client).await.map(drop)
}

async fn a_list_of_one_bucket_goes_on(namespace: &dyn TestNamespace) -> Result<()> {
    let blueprint =
        "[relation.follow]\nfrom = { follower = \"int\" }\nto = { followee = \"int\" }\nbuckets = 1\n";
    let client = TenantClient::open(namespace, blueprint).await?;
    for other in 1..=5 {
        add(&client, 9, other).await?;
        add(&client, other, 9).await?;
    }
    for limit in [1, 2, 5] {
        for end in ["out", "in"] {
            same(&format!("{end}, by {limit}"), &list(&client, end, 9, limit).await?, &vec![5, 4, 3, 2, 1])?;
        }
    }
    Ok(())
}

/// Adds and removes edges to one end, as its seed says.
struct EdgeMover {
    client: TenantClient,
    clock: Arc<ManualClock>,
    random: Random,
    there: BTreeSet<i64>,
    moves: usize,
}

impl EdgeMover {
    /// Changes one of nine edges, or removes one and adds it again.
    async fn go(&mut self) -> Result<()> {
        let follower = 1_000 + i64::try_from(self.random.below(9))?;
        let times = if self.there.contains(&follower) && self.random.chance(0.5) { 2 } else { 1 };
        for _ in 0..times {
            self.clock.advance(Duration::from_millis(1));
            if self.there.remove(&follower) {
                remove(&self.client, follower, 7).await?;
            } else {
                add(&self.client, follower, 7).await?;
                self.there.insert(follower);
            }
            self.moves += 1;
        }
        Ok(())
    }
}

/// What happens between pages, and within one between the reading of the list and that of its edges, follows from a seed: the
/// same seed gives the same history, however busy the machine is.
async fn pages_hold_while_others_come_and_go(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let store = namespace.open_at(clock.clone()).await?;
    let mover = TenantClient::seeded(store.clone(), BLUEPRINT, clock.clone(), 1).await?;
    let meanwhile = Arc::new(Meanwhile::default());
    let around = Arc::new(StoreProxy::new(store, meanwhile.clone()));
    let reader = TenantClient::seeded(around, BLUEPRINT, clock.clone(), 2).await?;
    let still: BTreeSet<i64> = (0..30).collect();
    for follower in &still {
        add(&mover, *follower, 7).await?;
        clock.advance(Duration::from_millis(1));
    }
    let (random, there) = (Random::seeded(3), BTreeSet::new());
    let mover = EdgeMover { client: mover, clock, random, there, moves: 0 };
    let mover = Arc::new(tokio::sync::Mutex::new(mover));
    for limit in [1, 4, 9, 4, 11] {
        let (mut listed, mut cursor) = (Vec::new(), None);
        loop {
            mover.lock().await.go().await?;
            let (in_page, failed) = (mover.clone(), Arc::new(tokio::sync::Mutex::new(None)));
            let failure = failed.clone();
            meanwhile.next(async move {
                *failure.lock().await = in_page.lock().await.go().await.err();
            });
            let (found, next) = page(&reader, "in", 7, limit, cursor).await?;
            if let Some(error) = failed.lock().await.take() {
                return Err(error);
            }
            listed.extend(found);
            if next.is_none() {
                break;
            }
            cursor = next;
        }
        let distinct: BTreeSet<i64> = listed.iter().copied().collect();
        ensure!(distinct.len() == listed.len(), "a page showed one twice: {listed:?}");
        let kept: Vec<i64> = listed.into_iter().filter(|follower| *follower < 1_000).collect();
        same("those who stood still", &kept, &still.iter().rev().copied().collect())?;
    }
    let mover = mover.lock().await;
    ensure!(mover.moves > 100, "only {} moves", mover.moves);
    let expected: BTreeSet<(i64, i64)> = still.iter().chain(&mover.there).map(|one| (*one, 7)).collect();
    same("the edges", &check_rows(&mover.client).await?, &expected)
}

async fn counts_are_the_edges_after_a_storm(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let callers: Vec<_> = (0..8_u64)
        .map(|caller| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut random = Random::seeded(caller);
                for _ in 0..14 {
                    let from = i64::try_from(random.below(4))?;
                    // Two who are followed by everybody, by turns.
                    let to = 10 + i64::try_from(random.below(2))?;
                    let action = if random.chance(0.4) { "follow.remove" } else { "follow.add" };
                    let level = json!({"level": i64::try_from(random.below(2))?});
                    let input = if action == "follow.add" { level } else { json!({}) };
                    match client.call(action, &edge(from, to), input, None).await {
                        Err(refusal) if refusal.code != Code::Contended => return Err(refusal.into()),
                        _ => {}
                    }
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    let there = check_rows(&client).await?;
    for who in [10, 11] {
        let followers: BTreeSet<i64> =
            there.iter().filter(|(_, to)| *to == who).map(|(from, _)| *from).collect();
        same("the count", &count(&client, "in", who).await?, &Some(i64::try_from(followers.len())?))?;
        let listed: BTreeSet<i64> = list(&client, "in", who, 3).await?.into_iter().collect();
        same("the list", &listed, &followers)?;
    }
    Ok(())
}

async fn lost_answers_count_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(store, Arc::new(SystemClock), Odds::default(), 3));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.25, unknown_after: 0.35, unavailable: 0.05, ..Odds::default() });
    let mut expected = BTreeSet::new();
    for turn in 0..30_i64 {
        let (from, to) = (turn % 5, 10);
        let removes = turn % 3 == 2;
        let action = if removes { "follow.remove" } else { "follow.add" };
        // A caller that was told nothing asks again, now under the same operation id and now under another.
        let mut done = false;
        for attempt in 0..60 {
            let operation = format!("op-{turn}-{}", if turn % 2 == 0 { 0 } else { attempt });
            match client.call_as(&operation, action, &edge(from, to), json!({}), None).await {
                Ok(_) => {
                    done = true;
                    break;
                }
                Err(refusal) => {
                    let unsure = [Code::OutcomeUnknown, Code::Unavailable];
                    ensure!(unsure.contains(&refusal.code), "{refusal}");
                }
            }
        }
        ensure!(done, "turn {turn} was never answered");
        if removes {
            expected.remove(&(from, to))
        } else {
            expected.insert((from, to))
        };
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 5 && achieved.unknown_before > 5, "{achieved}");
    faulty.set_odds(Odds::default());
    same("what is there", &check_rows(&client).await?, &expected)
}

async fn buckets_can_be_added_later(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let before = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    for follower in 0..12 {
        add(&before, follower, 7).await?;
    }
    let wider = BLUEPRINT
        .replace("buckets      = 3", "buckets      = 8")
        .replace("out_buckets  = 2", "out_buckets  = 3")
        .replace("count_shards = 2", "count_shards = 5");
    let after = TenantClient::over(store, &wider, Arc::new(SystemClock)).await?;
    for follower in 6..18 {
        add(&after, follower, 7).await?;
    }
    for follower in 3..9 {
        remove(&after, follower, 7).await?;
    }
    let expected: BTreeSet<i64> = (0..3).chain(9..18).collect();
    let listed: Vec<i64> = list(&after, "in", 7, 4).await?;
    same("who is listed", &listed.iter().copied().collect(), &expected)?;
    same("how many", &(listed.len(), count(&after, "in", 7).await?), &(12, Some(12)))?;
    check_rows(&after).await.map(drop)
}

async fn edges_of_tenants_are_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let other = client.for_tenant("zeta")?;
    add(&client, 1, 2).await?;
    let has = other.done("follow.has", &edge(1, 2), json!({}), None).await?;
    shows(&has, &json!({"has": false, "version": 0}))?;
    remove(&other, 1, 2).await?;
    add(&other, 5, 2).await?;
    same("the list of the other", &list(&other, "in", 2, 5).await?, &vec![5])?;
    same("the count of the other", &count(&other, "in", 2).await?, &Some(1))?;
    same("the first one's edges", &check_rows(&client).await?, &BTreeSet::from([(1, 2)]))?;
    same("the other's edges", &check_rows(&other).await?, &BTreeSet::from([(5, 2)]))
}
