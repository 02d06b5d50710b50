//! I02 Claim, lease, exclusive ownership: who holds it, for how long, and that no other caller's writes count.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::infra::lease::{Leases, acquire, release, renew};
use statehouse::{Answer, Code, Expected, Operation, Refusal};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Clock, Commit, ManualClock, Plan, Step, StoreError, SystemClock, Time, Value};
use tokio::task::JoinHandle;

use super::cases as lease;
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Delayed, LostThenUnavailable, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    lease {
        a_lease_lives_its_life(3),
        of_many_claims_one_wins(3),
        an_expired_lease_is_taken_by_the_next_caller(3),
        a_late_holder_cannot_renew(3),
        renewing_and_taking_contend_on_one_row(3),
        the_epoch_is_never_reset(3),
        what_a_stale_holder_writes_is_refused(5),
        a_clock_that_is_set_breaks_nothing(5),
        retries_get_the_first_answer(3),
        leases_are_listed_by_state_and_holder(3),
        tenants_hold_apart(3),
        a_refused_caller_does_not_get_it_later(3),
        a_caller_with_an_unknown_outcome_that_was_refused_does_not_get_it_later(3),
        programs_hold_leases(3),
        programs_find_their_lease_after_a_lost_answer(1),
        a_lost_answer_stays_unknown_if_the_retry_is_unavailable(1),
        a_holders_own_deadline_is_early(1),
        a_stale_program_neither_renews_nor_releases(1),
    }
};

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[lease.lock]
key          = { name = "text" }
duration     = "10s"
max_duration = "1m"

[entity.account]
key    = { number = "int" }
fields = { balance = { type = "int", default = 0 } }
"#;

fn door() -> [Value; 1] {
    ["door".into()]
}

fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(1_800_000_000_000))
}

fn as_holder(holder: &str, epoch: i64) -> Json {
    json!({"holder": holder, "epoch": epoch})
}

async fn take(client: &TenantClient, holder: &str) -> Result<Answer, Refusal> {
    client.call("lock.acquire", &door(), json!({"holder": holder}), None).await
}

async fn a_lease_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    client.refused("lock.read", &door(), json!({}), None, Code::NotFound).await?;
    for action in ["lock.renew", "lock.release", "lock.check"] {
        client.refused(action, &door(), as_holder("ann", 1), None, Code::NotFound).await?;
    }
    let start = clock.now();
    let taken = take(&client, "ann").await?;
    let ends = |span: u64| json!(start.plus(Duration::from_secs(span)).to_string());
    shows(
        &taken,
        &json!({"state": "HELD", "holder": "ann", "epoch": 1, "version": 1, "expires_at": ends(10)}),
    )?;
    let refusal = client.refused("lock.acquire", &door(), json!({"holder": "bob"}), None, Code::Held).await?;
    same("the version", &refusal.current_version, &Some(1))?;
    ensure!(refusal.message.contains("ann"), "{refusal}");
    // A holder is told the same: it has it already, and renews it.
    client.refused("lock.acquire", &door(), json!({"holder": "ann"}), None, Code::Held).await?;
    clock.advance(Duration::from_secs(4));
    let input = json!({"holder": "ann", "epoch": 1, "duration_ms": 20_000});
    let renewed = client.done("lock.renew", &door(), input, None).await?;
    shows(&renewed, &json!({"holder": "ann", "epoch": 1, "version": 2, "expires_at": ends(24)}))?;
    for wrong in [as_holder("bob", 1), as_holder("ann", 2), as_holder("ann", 0)] {
        client.refused("lock.renew", &door(), wrong.clone(), None, Code::NotHolder).await?;
        client.refused("lock.release", &door(), wrong.clone(), None, Code::NotHolder).await?;
        client.refused("lock.check", &door(), wrong, None, Code::NotHolder).await?;
    }
    client.done("lock.check", &door(), as_holder("ann", 1), None).await?;
    let released = client.done("lock.release", &door(), as_holder("ann", 1), None).await?;
    shows(&released, &json!({"state": "FREE", "holder": null, "epoch": 1, "expires_at": null}))?;
    client.refused("lock.release", &door(), as_holder("ann", 1), None, Code::NotHolder).await?;
    client.shows("lock", &door(), &json!({"state": "FREE", "epoch": 1})).await?;
    shows(&take(&client, "bob").await?, &json!({"holder": "bob", "epoch": 2}))?;
    for (input, pointer) in [
        (json!({"holder": ""}), "/holder"),
        (json!({"holder": "x", "duration_ms": 60_001}), "/duration_ms"),
        (json!({"holder": "x", "duration_ms": 0}), "/duration_ms"),
    ] {
        let refusal =
            client.refused("lock.acquire", &["other".into()], input, None, Code::InvalidInput).await?;
        same(
            "the place",
            &refusal.field_errors.first().map(|misfit| misfit.pointer.as_str()),
            &Some(pointer),
        )?;
    }
    let names = client.events(5).await?;
    let expected =
        ["acquired", "renewed", "checked", "released", "acquired"].map(|what| format!("lock.{what}"));
    same("the events", &names, &expected.to_vec())
}

async fn of_many_claims_one_wins(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let mut epochs = Vec::new();
    for round in 1..=3 {
        let calls: Vec<JoinHandle<Result<Answer, Refusal>>> = (0..12)
            .map(|claimant| {
                let client = client.clone();
                tokio::spawn(async move { take(&client, &format!("claimant-{claimant}")).await })
            })
            .collect();
        let mut winners = Vec::new();
        for call in calls {
            match call.await? {
                Ok(answer) => winners.push(answer),
                Err(refusal) => ensure!(refusal.code == Code::Held, "{refusal}"),
            }
        }
        let [winner] = winners.as_slice() else { anyhow::bail!("round {round} has the winners {winners:?}") };
        let (holder, epoch) =
            (winner.body["holder"].as_str().context("no holder")?, winner.body["epoch"].as_i64());
        epochs.push(epoch);
        let epoch = epoch.context("no epoch")?;
        client.done("lock.release", &door(), as_holder(holder, epoch), None).await?;
    }
    same("the epochs", &epochs, &vec![Some(1), Some(2), Some(3)])
}

async fn an_expired_lease_is_taken_by_the_next_caller(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    take(&client, "ann").await?;
    clock.advance(Duration::from_micros(9_999_999));
    client.refused("lock.acquire", &door(), json!({"holder": "bob"}), None, Code::Held).await?;
    client.shows("lock", &door(), &json!({"state": "HELD"})).await?;
    clock.advance(Duration::from_micros(1));
    client.shows("lock", &door(), &json!({"state": "EXPIRED", "holder": "ann", "epoch": 1})).await?;
    shows(&take(&client, "bob").await?, &json!({"state": "HELD", "holder": "bob", "epoch": 2}))?;
    for action in ["lock.renew", "lock.release", "lock.check"] {
        client.refused(action, &door(), as_holder("ann", 1), None, Code::NotHolder).await?;
    }
    client.shows("lock", &door(), &json!({"holder": "bob", "version": 2})).await
}

async fn a_late_holder_cannot_renew(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    take(&client, "ann").await?;
    clock.advance(Duration::from_secs(10));
    let refusal = client.refused("lock.renew", &door(), as_holder("ann", 1), None, Code::Expired).await?;
    same("the version", &refusal.current_version, &Some(1))?;
    // No other caller took it, so its guard still holds and it can be let go; to go on it is taken under a new epoch.
    client.done("lock.check", &door(), as_holder("ann", 1), None).await?;
    shows(&take(&client, "ann").await?, &json!({"holder": "ann", "epoch": 2}))?;
    client.refused("lock.check", &door(), as_holder("ann", 1), None, Code::NotHolder).await?;
    Ok(())
}

async fn renewing_and_taking_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    for round in 0..8_i64 {
        let key = [Value::from(format!("door-{round}"))];
        client.done("lock.acquire", &key, json!({"holder": "ann", "duration_ms": 1_000}), None).await?;
        // At the very end for some, a moment before it for others.
        clock.advance(Duration::from_micros(999_999 + u64::from(round % 2 == 0)));
        let (ann, bob) = (client.clone(), client.clone());
        let (ann_key, bob_key) = (key.clone(), key.clone());
        let renewal =
            tokio::spawn(async move { ann.call("lock.renew", &ann_key, as_holder("ann", 1), None).await });
        let claim =
            tokio::spawn(
                async move { bob.call("lock.acquire", &bob_key, json!({"holder": "bob"}), None).await },
            );
        let (renewal, claim) = (renewal.await?, claim.await?);
        ensure!(renewal.is_ok() != claim.is_ok(), "round {round}: {renewal:?} and {claim:?}");
        ensure!(claim.is_ok() == (round % 2 == 0), "round {round}: the time was up, and {claim:?}");
    }
    Ok(())
}

async fn the_epoch_is_never_reset(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    for epoch in 1..=6_i64 {
        shows(&take(&client, "ann").await?, &json!({"epoch": epoch}))?;
        match epoch % 3 {
            0 => clock.advance(Duration::from_secs(10)),
            _ => drop(client.done("lock.release", &door(), as_holder("ann", epoch), None).await?),
        }
    }
    let house = &client.house;
    ensure!(house.resource("lock")?.action("delete").is_none(), "a lease can be deleted");
    client.shows("lock", &door(), &json!({"epoch": 6})).await
}

async fn what_a_stale_holder_writes_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    client.done("account.create", &[], json!({"number": 1}), None).await?;
    // The effect and the guard on the lease are one plan.
    let pay = async |holder: &str, epoch: i64, amount: i64| {
        let requests = vec![
            TenantClient::request("lock.check", &door(), &as_holder(holder, epoch), None),
            TenantClient::request(
                "account.patch",
                &[1.into()],
                &json!({"balance": amount}),
                Some(Expected::Any),
            ),
        ];
        client.house.batch(&client.tenant, requests, Operation::default()).await
    };
    take(&client, "ann").await?;
    ensure!(pay("ann", 1, 10).await.is_ok(), "the holder could not write");
    // Ann is paused for longer than her lease. Bob takes it and works; then Ann wakes and goes on where she was.
    clock.advance(Duration::from_secs(60));
    take(&client, "bob").await?;
    ensure!(pay("bob", 2, 20).await.is_ok(), "the new holder could not write");
    let refused = pay("ann", 1, 30).await.map_err(|refusal| (refusal.call, refusal.code));
    ensure!(matches!(refused, Err((Some(0), Code::NotHolder))), "a stale holder wrote: {refused:?}");
    client.shows("account", &[1.into()], &json!({"balance": 20})).await?;
    client.done("lock.release", &door(), as_holder("bob", 2), None).await?;
    let refused = pay("bob", 2, 40).await.map_err(|refusal| refusal.code);
    ensure!(matches!(refused, Err(Code::NotHolder)), "who has released it wrote: {refused:?}");
    client.shows("account", &[1.into()], &json!({"balance": 20})).await
}

async fn a_clock_that_is_set_breaks_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let minutes = Duration::from_secs(600);
    take(&client, "ann").await?;
    // Set back, it lasts longer for the others, and its holder goes on.
    clock.set(clock.now().minus(minutes));
    client.refused("lock.acquire", &door(), json!({"holder": "bob"}), None, Code::Held).await?;
    client.done("lock.renew", &door(), as_holder("ann", 1), None).await?;
    // Set forward, it ends early; the guard stops the holder that does not know.
    clock.set(clock.now().plus(2 * minutes));
    shows(&take(&client, "bob").await?, &json!({"epoch": 2}))?;
    client.refused("lock.check", &door(), as_holder("ann", 1), None, Code::NotHolder).await?;
    clock.set(clock.now().minus(minutes));
    client.refused("lock.acquire", &door(), json!({"holder": "ann"}), None, Code::Held).await?;
    client.done("lock.check", &door(), as_holder("bob", 2), None).await?;
    Ok(())
}

async fn retries_get_the_first_answer(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let call =
        async |id: &str, action: &str, input: Json| client.call_as(id, action, &door(), input, None).await;
    let first = call("take", "lock.acquire", json!({"holder": "ann"})).await?;
    let freed = call("free", "lock.release", as_holder("ann", 1)).await?;
    take(&client, "bob").await?;
    same("a repeated claim", &call("take", "lock.acquire", json!({"holder": "ann"})).await?, &first)?;
    same("a repeated release", &call("free", "lock.release", as_holder("ann", 1)).await?, &freed)?;
    client.shows("lock", &door(), &json!({"holder": "bob", "epoch": 2})).await
}

async fn leases_are_listed_by_state_and_holder(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    for (number, holder) in ["ann", "bob", "ann", "cy", "ann"].into_iter().enumerate() {
        let input = json!({"holder": holder, "duration_ms": if holder == "cy" { 1 } else { 60_000 }});
        client.done("lock.acquire", &[format!("k{number}").into()], input, None).await?;
        clock.advance(Duration::from_secs(1));
    }
    client.done("lock.release", &["k2".into()], as_holder("ann", 1), None).await?;
    let expect = async |input: Json, expected: &[&str]| -> Result<()> {
        let (mut found, mut input) = (Vec::new(), input);
        for _ in 0..1_000 {
            found.clear();
            input["cursor"] = Json::Null;
            loop {
                let mut asked = input.clone();
                asked.as_object_mut().context("an object")?.retain(|_, value| !value.is_null());
                let page = client.done("lock.list", &[], asked, None).await?;
                for row in page.body.as_array().context("no list")? {
                    found.push(format!(
                        "{}:{}",
                        row["name"].as_str().unwrap_or(""),
                        row["state"].as_str().unwrap_or("")
                    ));
                }
                let Some(next) = page.next else { break };
                input["cursor"] = next.into();
            }
            if found == expected {
                return Ok(());
            }
            crate::harness::store_client::pause().await;
        }
        anyhow::bail!("{input}: expected {expected:?}, got {found:?}")
    };
    expect(json!({"limit": 2}), &["k4:HELD", "k3:EXPIRED", "k1:HELD", "k0:HELD"]).await?;
    expect(json!({"state": "FREE"}), &["k2:FREE"]).await?;
    expect(json!({"holder": "ann", "limit": 1}), &["k4:HELD", "k0:HELD"]).await?;
    expect(json!({"holder": "nobody"}), &[]).await
}

async fn tenants_hold_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let other = client.for_tenant("other")?;
    take(&client, "ann").await?;
    other.refused("lock.read", &door(), json!({}), None, Code::NotFound).await?;
    shows(&take(&other, "ann").await?, &json!({"epoch": 1}))?;
    other.done("lock.release", &door(), as_holder("ann", 1), None).await?;
    client.shows("lock", &door(), &json!({"state": "HELD"})).await
}

fn leases(client: &TenantClient, clock: Arc<dyn Clock>) -> Result<Leases> {
    let table = client.table("locks")?.clone();
    Ok(Leases::of(client.house.store().clone(), clock, table, client.tenant.clone()))
}

async fn programs_hold_leases(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let leases = leases(&client, Arc::new(clock.clone()))?;
    let (span, keys) = (Duration::from_secs(10), ["a", "b", "c"].map(|key| [Value::from(key)]));
    let mut held = Vec::new();
    for key in &keys {
        held.push(leases.acquire(key, "me", span).await?.map_err(|lease| anyhow::anyhow!("{lease:?}"))?);
    }
    // Others see who has it; its holder, again, gets it again under the same epoch.
    let taken = leases.acquire(&keys[0], "you", span).await?;
    same("who has it", &taken.err().and_then(|lease| lease.holder), &Some("me".to_owned()))?;
    let again = leases.acquire(&keys[0], "me", span).await?.map(|held| held.epoch());
    same("the same again", &again.ok(), &Some(1))?;
    // One of them is lost: the others are renewed all the same.
    clock.advance(Duration::from_secs(9));
    ensure!(leases.release(&held[1]).await?, "a lease was not its holder's");
    let you = leases.acquire(&keys[1], "you", span).await?;
    ensure!(you.is_ok(), "a released lease could not be taken: {you:?}");
    let lost = leases.renew(held.iter_mut().collect(), span).await?;
    same("what was lost", &lost, &vec![held[1].address().clone()])?;
    clock.advance(Duration::from_secs(9));
    let live: Vec<bool> = held.iter().map(|held| held.is_live(&clock)).collect();
    same("whose time is left", &live, &vec![true, false, true])?;
    // The guard stands in the plan of the effect.
    let (table, store_client) = (client.table("accounts")?.clone(), client.store_client()?);
    let effect = |number: i64, guard: Step| {
        store_client
            .plan()
            .step(guard)
            .step(Step::insert(&table, [number.into()]).set("updated_at", clock.now()))
    };
    store_client.apply(effect(1, held[0].guard())).await?;
    store_client.refuse(effect(2, held[1].guard())).await?;
    same("a second release", &leases.release(&held[1]).await?, &false)?;
    // A waiting caller is told of the next change, and of the end.
    let seen = leases.read(&keys[0]).await?.context("the lease is missing")?;
    let waiting = tokio::spawn({
        let (leases, key) = (leases.clone(), keys[0].clone());
        async move { leases.watch(&key, seen.version, Duration::from_secs(60)).await }
    });
    ensure!(leases.release(&held[0]).await?, "the lease was lost");
    while !waiting.is_finished() {
        clock.advance(Duration::from_millis(100));
        crate::harness::store_client::pause().await;
    }
    same("who has it now", &waiting.await??.and_then(|lease| lease.holder), &None)
}

async fn programs_find_their_lease_after_a_lost_answer(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound, Arc::new(SystemClock), Odds::default(), 3));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let leases = leases(&client, Arc::new(SystemClock))?;
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.4, ..Odds::default() });
    let span = Duration::from_secs(600);
    let mut epochs = Vec::new();
    for round in 0..10 {
        let mine = format!("me-{round}");
        let held = loop {
            // There is no other caller, so the holder is the caller itself.
            match leases.acquire(&door(), &mine, span).await {
                Ok(held) => break held.map_err(|lease| anyhow::anyhow!("{lease:?}"))?,
                Err(error) => ensure!(error.is_transient(), "{error}"),
            }
        };
        epochs.push(held.epoch());
        while leases.release(&held).await.is_err() {}
    }
    ensure!(faulty.achieved().unknown_after > 0, "{}", faulty.achieved());
    same("the epochs", &epochs, &(1..=10).collect::<Vec<i64>>())
}

async fn a_lost_answer_stays_unknown_if_the_retry_is_unavailable(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let faults = Arc::new(LostThenUnavailable::default());
    let store = Arc::new(StoreProxy::new(namespace.open().await?, faults.clone()));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(SystemClock)).await?;
    let leases = leases(&client, Arc::new(SystemClock))?;
    let span = Duration::from_secs(600);
    faults.start();
    let acquired = leases.acquire(&door(), "me", span).await;
    ensure!(matches!(acquired, Err(StoreError::OutcomeUnknown { .. })), "reported as {acquired:?}");
    faults.check_injected()?;
    // The lost attempt was applied: the same holder finds its lease.
    let held = leases.acquire(&door(), "me", span).await?.map_err(|lease| anyhow::anyhow!("{lease:?}"))?;
    same("the epoch", &held.epoch(), &1)?;
    faults.start();
    let released = leases.release(&held).await;
    ensure!(matches!(released, Err(StoreError::OutcomeUnknown { .. })), "reported as {released:?}");
    faults.check_injected()?;
    same("the holder", &leases.read(&door()).await?.and_then(|lease| lease.holder), &None)
}

async fn a_holders_own_deadline_is_early(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    // The holder's clock is an hour off and is set while it holds; its own deadline depends on neither.
    let (engine, own) = (standing(), ManualClock::at(Time::from_millis(1_700_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(engine.clone())).await?;
    let leases = leases(&client, Arc::new(own.clone()))?;
    let span = Duration::from_secs(10);
    let held = leases.acquire(&door(), "me", span).await?.map_err(|lease| anyhow::anyhow!("{lease:?}"))?;
    own.set(Time::from_millis(1_900_000_000_000));
    same("what is left", &held.left(&own), &span)?;
    for clock in [&engine, &own] {
        clock.advance(Duration::from_micros(9_999_999));
    }
    same("what is left at the end", &held.left(&own), &Duration::from_micros(1))?;
    own.advance(Duration::from_micros(1));
    ensure!(!held.is_live(&own), "its time is up");
    // The steps by themselves, as other rooms put them into their plans.
    let (table, tenant) = (client.table("locks")?, &client.tenant);
    let commit = async |step: Step| {
        let plan = Plan::of(tenant, "steps").step(step).build()?;
        Ok::<bool, anyhow::Error>(matches!(client.house.store().commit(&plan).await?, Commit::Applied(_)))
    };
    ensure!(
        commit(renew(table, door(), "me", 1, span)).await?,
        "the engine's clock says that there is time left"
    );
    engine.advance(span);
    ensure!(!commit(renew(table, door(), "me", 1, span)).await?, "it was renewed after its end");
    ensure!(commit(acquire(table, door(), "you", span)).await?, "it was not free after its end");
    ensure!(!commit(release(table, door(), "me", 1)).await?, "who has lost it released it");
    Ok(())
}

async fn a_stale_program_neither_renews_nor_releases(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let leases = leases(&client, Arc::new(clock.clone()))?;
    let span = Duration::from_secs(10);
    let take =
        async || leases.acquire(&door(), "me", span).await?.map_err(|lease| anyhow::anyhow!("{lease:?}"));
    let mut first = take().await?;
    clock.advance(span);
    same("renewed after its end", &leases.renew(vec![&mut first], span).await?.len(), &1)?;
    // The same program, under the same name, has taken it anew; what is left of its former life does nothing.
    let second = take().await?;
    same("the epochs", &(first.epoch(), second.epoch()), &(1, 2))?;
    same("renewed by its former life", &leases.renew(vec![&mut first], span).await?.len(), &1)?;
    same("released by its former life", &leases.release(&first).await?, &false)?;
    // The epoch alone is not enough either: it can be read by anybody.
    let (table, tenant) = (client.table("locks")?, &client.tenant);
    for (operation, step) in [
        ("lease.renew", renew(table, door(), "you", 2, span)),
        ("lease.release", release(table, door(), "you", 2)),
    ] {
        let plan = Plan::of(tenant, operation).step(step).build()?;
        let outcome = client.house.store().commit(&plan).await?;
        ensure!(matches!(outcome, Commit::Refused(_)), "{operation} by another caller: {outcome:?}");
    }
    same("released by its holder", &leases.release(&second).await?, &true)
}

/// Found by simulation: a claim whose answer was lost was repeated, refused, and reported as refused; and then the first
/// request arrived, and took the lease for a caller that had gone away.
async fn a_refused_caller_does_not_get_it_later(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let delayed = Arc::new(Delayed::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), delayed.clone()));
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(SystemClock)).await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    take(&client, "bob").await?;
    delayed.next(1);
    slow.refused("lock.acquire", &door(), json!({"holder": "ann"}), None, Code::Held).await?;
    client.done("lock.release", &door(), as_holder("bob", 1), None).await?;
    let late = store.commit(&delayed.kept().context("nothing is under way")?).await?;
    ensure!(late == Commit::Fenced, "a claim that was refused was applied after all: {late:?}");
    client.shows("lock", &door(), &json!({"state": "FREE", "epoch": 1})).await
}

async fn a_caller_with_an_unknown_outcome_that_was_refused_does_not_get_it_later(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let delayed = Arc::new(Delayed::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), delayed.clone()));
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(SystemClock)).await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    // More than the house tries by itself.
    delayed.next(50);
    let ask = async || slow.call_as("op", "lock.acquire", &door(), json!({"holder": "ann"}), None).await;
    let code = |told: Result<Answer, Refusal>| told.err().map(|refusal| refusal.code);
    same("at first", &code(ask().await), &Some(Code::OutcomeUnknown))?;
    delayed.next(0);
    // Asked again under the same id, it is refused, because another was faster. Nothing else says that it was not done.
    take(&client, "bob").await?;
    same("asked again", &code(ask().await), &Some(Code::Held))?;
    client.done("lock.release", &door(), as_holder("bob", 1), None).await?;
    let late = store.commit(&delayed.kept().context("nothing is under way")?).await?;
    ensure!(late == Commit::Fenced, "a claim that was refused was applied after all: {late:?}");
    client.shows("lock", &door(), &json!({"state": "FREE", "epoch": 1})).await
}
