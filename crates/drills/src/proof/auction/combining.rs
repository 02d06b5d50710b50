//! Bids that are written together: each is placed once and gets its own answer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::allow::Principal;
use statehouse::{Answer, Code, Operation, Refusal};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Commit, Plan, Store, StoreError, SystemClock};
use tokio::task::JoinHandle;

use super::cases::{AuctionFixture, BLUEPRINT, bid, key};
use crate::harness::drill::insist;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Delayed, Interceptor, Paused, StoreProxy};
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

/// What a caller was told.
type BidOutcome = Result<Answer, Refusal>;

impl AuctionFixture {
    /// A house over a store that is watched.
    async fn over(&self, store: Arc<dyn Store>) -> Result<TenantClient> {
        TenantClient::over(store, BLUEPRINT, Arc::new(self.clock.clone())).await
    }

    /// How many bids each plan has accepted for a lot, in the order of the log.
    async fn groups(&self, resource: &str, id: &str) -> Result<Vec<usize>> {
        let events = self.client.scope(resource).events(resource).await?;
        let placed = events.get(id).into_iter().flatten().filter_map(|event| event.data["placed"].as_array());
        Ok(placed.map(Vec::len).collect())
    }
}

/// Sends a bid, and others while the first one is being committed. Returns what all of them were told, the first one first.
async fn together(
    fixture: &AuctionFixture,
    resource: &str,
    id: &str,
    offers: &[(String, i64)],
) -> Result<Vec<BidOutcome>> {
    let paused = Arc::new(Paused::default());
    let store = StoreProxy::new(fixture.store.clone(), paused.clone());
    let client = fixture.over(Arc::new(store)).await?;
    let others: Arc<Mutex<Vec<JoinHandle<BidOutcome>>>> = Arc::default();
    let (first, rest) = offers.split_first().context("no bids")?;
    let action = format!("{resource}.bid");
    paused.before(&format!("{resource}s"), 1, {
        let (client, others, rest, action) = (client.clone(), others.clone(), rest.to_vec(), action.clone());
        let key = key(id);
        async move {
            for (bidder, amount) in rest {
                let told = client.start(&action, &key, bid(&bidder, amount), None);
                others.lock().unwrap_or_else(PoisonError::into_inner).push(told);
                // They arrive in this order.
                pause().await;
            }
        }
    });
    let mut told = vec![client.call(&action, &key(id), bid(&first.0, first.1), None).await];
    let others = std::mem::take(&mut *others.lock().unwrap_or_else(PoisonError::into_inner));
    for other in others {
        told.push(other.await?);
    }
    Ok(told)
}

fn rising(count: i64) -> Vec<(String, i64)> {
    (1..=count).map(|number| (format!("b{number}"), 10 * number)).collect()
}

pub(super) async fn bids_arrive_together(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    fixture.create("lot", "a", 60, json!({"seller": "sue"})).await?;
    let mut offers = rising(12);
    offers.push(("low".into(), 120));
    offers.push(("sue".into(), 500));
    offers.push(("last".into(), 130));
    let told = together(&fixture, "lot", "a", &offers).await?;
    for (number, ((bidder, amount), told)) in (1..).zip(offers.iter().zip(&told)) {
        match (bidder.as_str(), told) {
            ("low", Err(refusal)) => same("a low bid", &refusal.code, &Code::TooLow)?,
            ("sue", Err(refusal)) => same("the seller's bid", &refusal.code, &Code::Forbidden)?,
            ("last", Ok(answer)) => shows(answer, &json!({"seq": 13, "price": 130}))?,
            (_, Ok(answer)) => {
                shows(answer, &json!({"seq": number, "price": amount, "min_next": amount + 10}))?;
            }
            (_, Err(refusal)) => anyhow::bail!("{bidder}: {refusal}"),
        }
    }
    let groups = fixture.groups("lot", "a").await?;
    same("all bids", &groups.iter().sum::<usize>(), &13)?;
    ensure!(groups.iter().any(|group| *group > 1), "no bids were written together: {groups:?}");
    let expected = json!({"price": 130, "bidder_id": "last", "bids": 13});
    fixture.client.shows("lot", &key("a"), &expected).await
}

pub(super) async fn bidders_in_two_processes_share_a_lot(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let processes = [fixture.client.clone(), fixture.ahead(0).await?];
    fixture.create("lot", "a", 60, json!({})).await?;
    let mut bidders = Vec::new();
    for number in 1..=12 {
        for (place, process) in processes.iter().enumerate() {
            let input = bid(&format!("b{place}-{number}"), 10 * number);
            bidders.push((number, process.start("lot.bid", &key("a"), input, None)));
        }
    }
    let (mut accepted, mut most) = (0, 0);
    for (number, bidder) in bidders {
        match bidder.await? {
            Ok(_) => (accepted, most) = (accepted + 1, most.max(10 * number)),
            Err(refusal) => {
                ensure!(matches!(refusal.code, Code::TooLow | Code::Contended), "{refusal}");
            }
        }
    }
    ensure!(accepted > 0, "no bid was accepted");
    fixture.client.shows("lot", &key("a"), &json!({"bids": accepted, "price": most})).await?;
    // A process whose state is that of an earlier group does not judge by it.
    for (amount, process) in (most / 10 + 1..).zip(processes.iter().cycle().take(6)) {
        let (low, high) = (bid("low", 10 * (amount - 1)), bid("high", 10 * amount));
        process.refused("lot.bid", &key("a"), low, None, Code::TooLow).await?;
        process.done("lot.bid", &key("a"), high, None).await?;
    }
    // What one refuses by itself, it refuses by the row as it is.
    fixture.create("plain", "a", 60, json!({})).await?;
    processes[0].done("plain.bid", &key("a"), bid("ann", 10), None).await?;
    processes[1].done("plain.cancel", &key("a"), json!({}), None).await?;
    processes[0].refused("plain.bid", &key("a"), bid("ann", 50), None, Code::WrongState).await?;
    Ok(())
}

pub(super) async fn a_repeated_bid_gets_its_first_answer(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let other = fixture.ahead(0).await?;
    for resource in ["lot", "maximum", "tender"] {
        let action = format!("{resource}.bid");
        fixture.create(resource, "a", 60, json!({"start_price": 10})).await?;
        let first = fixture.client.call_as("one", &action, &key("a"), bid("ann", 50), None).await?;
        fixture.bids(resource, "a", &[("bob", 70), ("cat", 200)]).await?;
        for client in [&fixture.client, &other] {
            let again = client.call_as("one", &action, &key("a"), bid("ann", 50), None).await?;
            same("the answer", &again, &first)?;
            // Under the id in its input it is the same bid.
            let mut named = bid("ann", 50);
            named["bid_id"] = json!("one");
            let told = client.call(&action, &key("a"), named, None).await;
            same("another request", &told.err().map(|refusal| refusal.code), &Some(Code::OperationReused))?;
        }
        // A void does not change what was answered.
        fixture.client.done(&format!("{resource}.void"), &key("a"), json!({"bid_id": "one"}), None).await?;
        let again = other.call_as("one", &action, &key("a"), bid("ann", 50), None).await?;
        same("the answer after a void", &again, &first)?;
        fixture.client.shows(resource, &key("a"), &json!({"bids": 3})).await?;
    }
    // So does one that was rejected.
    let low = |client: &TenantClient| {
        let client = client.clone();
        async move { client.call_as("low", "lot.bid", &key("a"), bid("dan", 205), None).await.err() }
    };
    let first = low(&fixture.client).await.context("it was accepted")?;
    same("the code", &first.code, &Code::TooLow)?;
    fixture.bids("lot", "a", &[("cat", 300)]).await?;
    same("the refusal", &low(&other).await, &Some(first))?;
    fixture.clock.advance(std::time::Duration::from_secs(100));
    other.drain_workers().await?;
    let again = other.call_as("one", "lot.bid", &key("a"), bid("ann", 50), None).await?;
    shows(&again, &json!({"state": "ACCEPTED", "seq": 1}))
}

pub(super) async fn an_id_names_one_bid(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("lot", "a", 60, json!({})).await?;
    fixture.create("lot", "b", 60, json!({})).await?;
    let named = |amount: i64| json!({"bidder_id": "ann", "amount": amount, "bid_id": "one"});
    let first = client.done("lot.bid", &key("a"), named(50), None).await?;
    shows(&first, &json!({"bid_id": "one"}))?;
    same("the same bid", &client.done("lot.bid", &key("a"), named(50), None).await?, &first)?;
    client.refused("lot.bid", &key("a"), named(60), None, Code::OperationReused).await?;
    let told = client.call_as("one", "lot.bid", &key("a"), bid("ann", 90), None).await;
    same("another bid", &told.err().map(|refusal| refusal.code), &Some(Code::OperationReused))?;
    // Of another lot, it is another bid.
    client.done("lot.bid", &key("b"), named(60), None).await?;
    // Two at once under one id.
    let twins = [0, 1].map(|_| {
        let input = json!({"bidder_id": "ann", "amount": 100, "bid_id": "two"});
        client.start("lot.bid", &key("a"), input, None)
    });
    let mut answers = Vec::new();
    for twin in twins {
        answers.push(twin.await??);
    }
    same("both answers", &answers[0], &answers[1])?;
    client.shows("lot", &key("a"), &json!({"bids": 2, "price": 100})).await
}

pub(super) async fn lost_answers_place_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    fixture.create("lot", "a", 60, json!({})).await?;
    let faulty =
        Arc::new(FaultyStore::over(fixture.store.clone(), Arc::new(SystemClock), Odds::default(), 7));
    let store: Arc<dyn Store> = faulty.clone();
    let unlucky = fixture.over(store).await?;
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.3, unavailable: 0.1, ..Odds::default() });
    let bidders = (1..=8).map(|bidder| {
        let client = unlucky.clone();
        tokio::spawn(async move {
            let mut told = Vec::new();
            for round in 0..3 {
                let amount = 10 * (8 * round + bidder);
                let operation = format!("op {bidder} {round}");
                let input = bid(&format!("b{bidder}"), amount);
                told.push(insist(&client, &operation, "lot.bid", &key("a"), &input, None).await);
            }
            told
        })
    });
    let bidders: Vec<_> = bidders.collect();
    let mut accepted = 0;
    for bidder in bidders {
        for told in bidder.await? {
            match told {
                Ok(_) => accepted += 1,
                Err(error) => ensure!(format!("{error:#}").contains("too_low"), "{error:#}"),
            }
        }
    }
    faulty.set_odds(Odds::default());
    ensure!(accepted > 0, "no bid was accepted");
    fixture.client.shows("lot", &key("a"), &json!({"bids": accepted})).await
}

pub(super) async fn a_late_original_changes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    for (id, overtaken) in [("a", false), ("b", true)] {
        fixture.create("plain", id, 60, json!({})).await?;
        let delayed = Arc::new(Delayed::default());
        let store = StoreProxy::new(fixture.store.clone(), delayed.clone());
        let client = fixture.over(Arc::new(store)).await?;
        delayed.next(5);
        let told = client.call_as("one", "plain.bid", &key(id), bid("ann", 10), None).await;
        let unknown = told.err().map(|refusal| refusal.code);
        same("a lost request", &unknown, &Some(Code::OutcomeUnknown))?;
        if overtaken {
            fixture.bids("plain", id, &[("bob", 50)]).await?;
        }
        let again = client.call_as("one", "plain.bid", &key(id), bid("ann", 10), None).await;
        match again {
            Ok(_) if !overtaken => {}
            Err(refusal) if overtaken => same("the code", &refusal.code, &Code::TooLow)?,
            other => anyhow::bail!("{other:?}"),
        }
        let original = delayed.kept().context("nothing was under way")?;
        let outcome = fixture.store.commit(&original).await?;
        ensure!(matches!(outcome, Commit::Fenced | Commit::Refused(_)), "it came through: {outcome:?}");
        fixture.client.shows("plain", &key(id), &json!({"bids": 1})).await?;
    }
    Ok(())
}

/// Lets one commit of a table never return.
#[derive(Debug)]
struct LostCommit {
    table: &'static str,
    /// How many commits to the table are still to come, the one that is lost included.
    left: AtomicUsize,
    /// Whether it reaches the store.
    arrives: bool,
    is_lost: AtomicUsize,
}

impl LostCommit {
    fn of(table: &'static str, number: usize, arrives: bool) -> Arc<LostCommit> {
        Arc::new(LostCommit { table, left: AtomicUsize::new(number), arrives, is_lost: AtomicUsize::new(0) })
    }

    async fn happened(&self) {
        while self.is_lost.load(Ordering::SeqCst) == 0 {
            pause().await;
        }
    }
}

#[async_trait]
impl Interceptor for Arc<LostCommit> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let concerns = plan.steps().iter().any(|step| step.table.name() == self.table);
        let less = |left: usize| left.checked_sub(1);
        let before = concerns.then(|| self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less));
        if before == Some(Ok(1)) {
            if self.arrives {
                inner.commit(plan).await?;
            }
            self.is_lost.store(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
        if before.is_some() {
            // Others have time to arrive.
            for _ in 0..5 {
                pause().await;
            }
        }
        inner.commit(plan).await
    }
}

/// Callers of one house, each under an id of its own, with the tasks that call.
fn callers(client: &TenantClient, count: i64) -> Vec<(String, Json, JoinHandle<BidOutcome>)> {
    let caller = |number: i64| {
        let (client, id) = (client.clone(), format!("op {number}"));
        let input = bid(&format!("b{number}"), 10 * number);
        let (operation, offer) = (id.clone(), input.clone());
        let call = async move { client.call_as(&operation, "plain.bid", &key("a"), offer, None).await };
        (id, input, tokio::spawn(call))
    };
    (1..=count).map(caller).collect()
}

pub(super) async fn a_leader_that_goes_away_is_replaced(namespace: &dyn TestNamespace) -> Result<()> {
    for arrives in [false, true] {
        let fixture = AuctionFixture::open(namespace).await?;
        let id = if arrives { "arrives" } else { "vanishes" };
        fixture.create("lot", id, 60, json!({})).await?;
        let lost = LostCommit::of("lots", 2, arrives);
        let store = StoreProxy::new(fixture.store.clone(), lost.clone());
        let client = fixture.over(Arc::new(store)).await?;
        let mut waiting = Vec::new();
        for (bidder, amount) in rising(6) {
            waiting.push(client.start("lot.bid", &key(id), bid(&bidder, amount), None));
            pause().await;
        }
        lost.happened().await;
        // The leader of the second group goes away, and perhaps callers before it.
        let mut done = 0;
        for caller in waiting {
            if lost.is_lost.load(Ordering::SeqCst) == 1 && !caller.is_finished() {
                lost.is_lost.store(2, Ordering::SeqCst);
                caller.abort();
                continue;
            }
            match caller.await? {
                Ok(_) => done += 1,
                Err(refusal) => same("the code", &refusal.code, &Code::TooLow)?,
            }
        }
        ensure!(done > 0, "no bid was placed");
        let bids = fixture.client.shown("lot", &key(id), &["bids"]).await?;
        let stored = bids[0].as_i64().context("a lot without a count")?;
        // The one that went away may have been placed.
        ensure!((done..=done + 1).contains(&stored), "{done} were told that they have bid, of {stored}");
    }
    Ok(())
}

pub(super) async fn a_process_dies_in_the_middle_of_a_group(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    fixture.create("plain", "a", 60, json!({})).await?;
    for arrives in [false, true] {
        let lost = LostCommit::of("plains", 2, arrives);
        let store = StoreProxy::new(fixture.store.clone(), lost.clone());
        let dying = fixture.over(Arc::new(store)).await?;
        let callers = callers(&dying, 5);
        lost.happened().await;
        for (_, _, task) in &callers {
            task.abort();
        }
        drop(dying);
        // They ask another process, which knows nothing of them.
        for (operation, input, _) in callers {
            let told = fixture.client.call_as(&operation, "plain.bid", &key("a"), input, None).await;
            if let Err(refusal) = told {
                same("the code", &refusal.code, &Code::TooLow)?;
            }
        }
    }
    let records = whole_log(fixture.store.as_ref()).await?;
    let placed = records.iter().flat_map(|record| &record.events);
    let placed = placed.filter_map(|event| event.data["placed"].as_array()).map(Vec::len).sum::<usize>();
    fixture.client.shows("plain", &key("a"), &json!({"bids": placed})).await
}

pub(super) async fn a_bid_in_a_batch(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let house = &fixture.client.house;
    fixture.create("lot", "a", 60, json!({})).await?;
    fixture.create("lot", "b", 60, json!({})).await?;
    let batch = |amount: i64| {
        ["a", "b"].map(|id| TenantClient::request("lot.bid", &key(id), &bid("ann", amount), None)).to_vec()
    };
    let under = |id: &str| Operation { id: Some(id.to_owned()), fingerprint: "same".into() };
    let first = house.batch(&fixture.client.tenant, batch(10), under("one")).await?;
    for (answer, id) in first.iter().zip(["a", "b"]) {
        shows(answer, &json!({"lot_id": id, "bid_id": "one", "seq": 1, "price": 10, "leading": true}))?;
        fixture.client.shows("lot_bid", &[id.into(), "one".into()], &json!({"amount": 10})).await?;
    }
    let again = house.batch(&fixture.client.tenant, batch(10), under("one")).await?;
    let bodies = |answers: &[Answer]| answers.iter().map(|answer| answer.body.clone()).collect::<Vec<Json>>();
    same("again", &bodies(&again), &bodies(&first))?;
    // One that is refused takes the others with it, and leaves no row.
    fixture.bids("lot", "b", &[("bob", 50)]).await?;
    let told = house.batch(&fixture.client.tenant, batch(20), under("two")).await;
    same(
        "a low bid",
        &told.err().map(|refusal| (refusal.code, refusal.call)),
        &Some((Code::TooLow, Some(1))),
    )?;
    fixture.client.shows("lot", &key("a"), &json!({"bids": 1})).await?;
    same("what is kept", &fixture.listed("b", "REJECTED", 0).await?, &Vec::new())?;
    // A batch that lost a race is judged again.
    let drafted = fixture.client.drafted("lot.bid", &key("a"), bid("cat", 20), None).await?;
    fixture.bids("lot", "a", &[("bob", 30)]).await?;
    fixture.client.too_late(&drafted).await?;
    // At the wrong time, too.
    fixture.create("lot", "c", 60, json!({"starts_at": fixture.after(10).to_string()})).await?;
    let bid_for = |id: &str| vec![TenantClient::request("lot.bid", &key(id), &bid("dan", 900), None)];
    let code = async |id: &str, operation: &str| {
        let told = house.batch(&fixture.client.tenant, bid_for(id), under(operation)).await;
        told.err().map(|refusal| refusal.code)
    };
    same("early", &code("c", "three").await, &Some(Code::WrongState))?;
    fixture.clock.advance(std::time::Duration::from_secs(60));
    same("late", &code("a", "four").await, &Some(Code::Expired))
}

pub(super) async fn rules_of_the_resource_hold_in_a_group(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    fixture.create("ruled", "a", 60, json!({"start_price": 10})).await?;
    fixture.create("ruled", "b", 60, json!({"start_price": 100})).await?;
    let caller = |sub: &str| {
        let claims = json!({"sub": sub}).as_object().cloned().map(Arc::new);
        Principal { tenant: fixture.client.tenant.clone(), claims, actor: Some(sub.into()) }
    };
    let call = async |sub: &str, id: &str, bidder: &str, amount: i64| {
        let request = TenantClient::request("ruled.bid", &key(id), &bid(bidder, amount), None);
        let told = fixture.client.house.call(caller(sub), request, Operation::default()).await;
        told.map_err(|refusal| refusal.code)
    };
    for (sub, id, bidder, amount, expected) in [
        ("ann", "a", "ann", 10, None),
        ("ann", "a", "bob", 20, Some(Code::Forbidden)),
        ("bob", "a", "bob", 20, None),
        ("bob", "b", "bob", 200, Some(Code::Forbidden)),
        ("bob", "none", "bob", 200, Some(Code::NotFound)),
    ] {
        same(&format!("{sub} for {id}"), &call(sub, id, bidder, amount).await.err(), &expected)?;
    }
    // The bid says who called, and no answer does.
    let rows = fixture.client.scope("ruled").rows(fixture.client.table("ruled_bids")?).await?;
    let mut by: Vec<Option<&str>> = rows.iter().map(|row| row.text("called_by")).collect();
    by.sort_unstable();
    same("who called", &by, &vec![Some("ann"), Some("bob")])
}

pub(super) async fn conditions_of_callers_hold(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("lot", "a", 60, json!({})).await?;
    let if_below = |amount: i64, most: i64| json!({"bidder_id": "ann", "amount": amount, "if": format!("min_next <= {most}")});
    client.done("lot.bid", &key("a"), if_below(10, 5), None).await?;
    client.refused("lot.bid", &key("a"), if_below(50, 19), None, Code::ConditionFailed).await?;
    client.done("lot.bid", &key("a"), if_below(20, 20), None).await?;
    client.done("lot.bid", &key("a"), bid("bob", 30), Some(3)).await?;
    client.refused("lot.bid", &key("a"), bid("bob", 90), Some(3), Code::VersionConflict).await?;
    client.shows("lot", &key("a"), &json!({"bids": 3, "price": 30})).await
}

pub(super) async fn one_bid_at_a_time(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    fixture.create("plain", "a", 60, json!({})).await?;
    for told in together(&fixture, "plain", "a", &rising(6)).await? {
        told?;
    }
    same("the groups", &fixture.groups("plain", "a").await?, &vec![1; 6])
}
