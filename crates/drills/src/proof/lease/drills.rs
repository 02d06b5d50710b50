//! The failures of I02, on any lease.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, Operation};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{SystemClock, Value};

use crate::conformance::CaseFuture;
use crate::harness::drill::{Drill, DrillClock, DrillKind, DrillRun, insist, time_in};
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::{TenantClient, shows};
use crate::proof::lease::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::DrillFn) -> Drill {
    let kind = DrillKind::AnyResource { blueprint: BLUEPRINT, resource: "lock", run };
    Drill { archetype: "lease", failure, provokes, largest_plan: 4, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "duplicate claim",
        "Many claim one lease at once, and a claimant whose answer was lost asks again.",
        |run| boxed(duplicate_claim(run)),
    ),
    drill(
        "stale holder acting after expiry",
        "A holder is paused past its end, another takes over, and the first goes on writing, renewing and releasing.",
        |run| boxed(stale_holder(run)),
    ),
    drill(
        "lease expiry race",
        "The holder renews and another claims at the last moment before the end, at the end and after it.",
        |run| boxed(expiry_race(run)),
    ),
    drill(
        "orphaned claim after crash",
        "The holder dies in the midst of its claim, before or after the commit, and no process releases it.",
        |run| boxed(orphaned(run)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> CaseFuture<'a> {
    Box::pin(run)
}

fn as_holder(holder: &str, epoch: i64) -> Json {
    json!({"holder": holder, "epoch": epoch})
}

/// Takes a lease and returns its epoch and when it ends.
async fn take(
    run: &DrillRun,
    client: &TenantClient,
    key: &[Value],
    holder: &str,
) -> Result<(i64, statehouse_store::Time)> {
    let taken = client.done(&run.action("acquire"), key, json!({"holder": holder}), None).await?;
    Ok((taken.body["epoch"].as_i64().context("no epoch")?, time_in(&taken.body, "expires_at")?))
}

/// The row that is stored: who holds it, under which epoch.
async fn stored(run: &DrillRun, client: &TenantClient, key: &[Value]) -> Result<(Option<String>, i64)> {
    let table = &run.resource()?.tables[0];
    let row = client.store_client()?.row(table, key.iter().cloned()).await?;
    Ok((row.text("holder").map(str::to_owned), row.int("epoch").context("no epoch")?))
}

async fn duplicate_claim(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let client = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let key = run.key(1)?;
    for epoch in run.rounds() {
        let claims: Vec<_> = (0..6)
            .map(|claimant| {
                let input = json!({"holder": format!("claimant-{claimant}")});
                client.start(&run.action("acquire"), &key, input, None)
            })
            .collect();
        let mut holders = Vec::new();
        for claim in claims {
            match claim.await? {
                Ok(answer) => holders.push(answer.body["holder"].as_str().unwrap_or_default().to_owned()),
                Err(refusal) => ensure!(refusal.code == Code::Held, "{refusal}"),
            }
        }
        let [holder] = holders.as_slice() else { anyhow::bail!("it is held by {holders:?}") };
        same("what is stored", &stored(run, &client, &key).await?, &(Some(holder.clone()), epoch))?;
        client.done(&run.action("release"), &key, as_holder(holder, epoch), None).await?;
    }
    // One claimant, whose answers get lost: it holds the lease once.
    let faulty = run.faulty(store);
    let unlucky = run.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    let key = run.key(2)?;
    let claim = json!({"holder": "unlucky"});
    let claimed = insist(&unlucky, "claim", &run.action("acquire"), &key, &claim, None).await?;
    shows(&claimed, &json!({"holder": "unlucky", "epoch": 1}))?;
    same("what is stored", &stored(run, &client, &key).await?, &(Some("unlucky".to_owned()), 1))
}

async fn stale_holder(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let client = run.house_at(&clock).await?;
    let (key, mut random) = (run.key(1)?, run.random());
    // The effect is a lease of another key: it is written in one plan with the check of this one.
    let act = async |holder: &str, epoch: i64, effect: i64| -> Result<bool> {
        let requests = vec![
            TenantClient::request(&run.action("check"), &key, &as_holder(holder, epoch), None),
            TenantClient::request(
                &run.action("acquire"),
                &run.key(effect)?,
                &json!({"holder": holder}),
                None,
            ),
        ];
        let done = client.house.batch(&client.tenant, requests, Operation::default()).await;
        Ok(done.is_ok())
    };
    for round in run.rounds() {
        let (first, second) = (2 * round - 1, 2 * round);
        let (epoch, end) = take(run, &client, &key, "paused").await?;
        same("the epoch", &epoch, &first)?;
        ensure!(act("paused", epoch, 10 * round + 1).await?, "the holder could not act");
        clock.reach(end.plus(Duration::from_micros(random.below(2_000_000))));
        let (epoch, _) = take(run, &client, &key, "next").await?;
        same("the epoch of the next", &epoch, &second)?;
        ensure!(!act("paused", first, 10 * round + 2).await?, "a stale holder acted");
        for action in ["renew", "release", "check"] {
            let input = as_holder("paused", first);
            client.refused(&run.action(action), &key, input, None, Code::NotHolder).await?;
            // Nor does it help to know the epoch, or to have had the name.
            for forged in [as_holder("paused", second), as_holder("next", first)] {
                client.refused(&run.action(action), &key, forged, None, Code::NotHolder).await?;
            }
        }
        ensure!(act("next", second, 10 * round + 3).await?, "the new holder could not act");
        same("what is stored", &stored(run, &client, &key).await?, &(Some("next".to_owned()), second))?;
        client.done(&run.action("release"), &key, as_holder("next", second), None).await?;
        ensure!(!act("next", second, 10 * round + 4).await?, "who has released it acted");
    }
    Ok(())
}

async fn expiry_race(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let client = run.house_at(&clock).await?;
    let mut random = run.random();
    for round in run.rounds() {
        let key = run.key(round)?;
        let (epoch, end) = take(run, &client, &key, "holder").await?;
        // A microsecond before the end, at the end, or one after it; every second time in the other order.
        let offset = random.below(3);
        clock.reach(end.minus(Duration::from_micros(1)).plus(Duration::from_micros(offset)));
        let start = |renews: bool| {
            let (name, input) = if renews {
                ("renew", as_holder("holder", epoch))
            } else {
                ("acquire", json!({"holder": "other"}))
            };
            client.start(&run.action(name), &key, input, None)
        };
        let renews_first = random.chance(0.5);
        let (one, two) = (start(renews_first), start(!renews_first));
        let (one, two) = (one.await?.is_ok(), two.await?.is_ok());
        let (renewed, taken) = if renews_first { (one, two) } else { (two, one) };
        same("renewed and taken", &(renewed, taken), &(offset == 0, offset > 0))?;
        let expected = if taken { ("other", epoch + 1) } else { ("holder", epoch) };
        let expected = (Some(expected.0.to_owned()), expected.1);
        same("what is stored", &stored(run, &client, &key).await?, &expected)?;
    }
    Ok(())
}

fn deaths(faulty: &FaultyStore) -> u64 {
    faulty.achieved().crashes_before + faulty.achieved().crashes_after
}

async fn orphaned(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = run.faulty(store.clone());
    let dying = run.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    let client = run.house_over(store, Arc::new(clock.clone())).await?;
    faulty.set_odds(Odds { crash_before: 0.4, crash_after: 0.6, ..Odds::default() });
    let mut orphans = 0;
    for round in run.rounds() {
        let key = run.key(round)?;
        let before = faulty.achieved();
        let claim = dying.start(&run.action("acquire"), &key, json!({"holder": "dead"}), None);
        while deaths(&faulty) == before.crashes_before + before.crashes_after {
            ensure!(!claim.is_finished(), "a caller that died had an answer: {:?}", claim.await?);
            pause().await;
        }
        claim.abort();
        let table = &run.resource()?.tables[0];
        let orphan = client.store_client()?.find(table, key.iter().cloned()).await?;
        let before = orphan.as_ref().and_then(|row| row.int("epoch")).unwrap_or(0);
        if let Some(end) = orphan.and_then(|row| row.time("expires_at")) {
            orphans += 1;
            clock.reach(end.minus(Duration::from_micros(1)));
            let heir = json!({"holder": "heir"});
            client.refused(&run.action("acquire"), &key, heir, None, Code::Held).await?;
            clock.advance(Duration::from_micros(1));
        }
        let (epoch, _) = take(run, &client, &key, "heir").await?;
        same("the epoch of the heir", &epoch, &(before + 1))?;
        let dead = as_holder("dead", before);
        client.refused(&run.action("check"), &key, dead, None, Code::NotHolder).await?;
    }
    same("orphans and claims that were committed", &faulty.achieved().crashes_after, &orphans)
}
