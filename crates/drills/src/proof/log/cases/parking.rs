//! What cannot be done is parked, and holds up its key alone.

use super::*;
use crate::harness::case_check::skip_invariants;
use crate::harness::proxy::{LostThenUnavailable, StoreProxy};

pub(super) async fn what_cannot_be_done_holds_up_its_key_alone(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = LogFixture::open(namespace, 6).await?;
    set(&fixture.handler.poison, &[13]);
    for n in [1, 13, 2, 3] {
        for id in 0..6 {
            // Only one note gets the number that cannot be done.
            let n = if n == 13 && id != 4 { 12 } else { n };
            fixture.write("acme", id, n).await?;
            fixture.write("bond", id, if n == 13 { 12 } else { n }).await?;
        }
    }
    fixture.drain().await?;
    let trails = fixture.trails().await?;
    for tenant in ["acme", "bond"] {
        for id in 0..6 {
            let name = format!("{tenant}/note/{id}");
            let expected = if name == "acme/note/4" { "1" } else { "1 12 2 3" };
            same(&name, &trails.get(&name).map(String::as_str), &Some(expected))?;
        }
    }
    let parked = fixture.parked("acme").await?;
    same("the keys", &parked.iter().map(|one| one.subject.as_str()).collect::<Vec<_>>(), &vec!["note/4"; 3])?;
    same("the tries", &parked.iter().map(|one| one.tries).collect::<Vec<_>>(), &vec![1, 0, 0])?;
    ensure!(parked[0].reason.contains("13 cannot be done"), "{parked:?}");
    ensure!(parked[1].reason.contains("older record"), "{parked:?}");
    ensure!(parked[0].offset < parked[1].offset && parked[1].offset < parked[2].offset, "{parked:?}");
    same("another tenant", &fixture.parked("bond").await?, &vec![])?;
    same("what lies ahead", &fixture.ahead().await?, &0)
}

pub(super) async fn a_handler_that_panics_holds_up_its_key_alone(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = LogFixture::open(namespace, 4).await?;
    set(&fixture.handler.panics, &[9]);
    for n in [1, 9, 2] {
        fixture.write("acme", 1, n).await?;
        fixture.write("acme", 2, n.min(2)).await?;
        fixture.write("bond", 1, n.min(2)).await?;
    }
    fixture.drain().await?;
    let trails = fixture.trails().await?;
    same("the key", &trails.get("acme/note/1").map(String::as_str), &Some("1"))?;
    same("another key", &trails.get("acme/note/2").map(String::as_str), &Some("1 2"))?;
    same("another tenant", &trails.get("bond/note/1").map(String::as_str), &Some("1 2"))?;
    let parked = fixture.parked("acme").await?;
    same("how many", &parked.len(), &2)?;
    ensure!(parked[0].reason.contains("panicked: 9 was not expected"), "{parked:?}");
    same("what lies ahead", &fixture.ahead().await?, &0)?;
    // Mended, it goes on in order.
    set(&fixture.handler.panics, &[]);
    fixture.group().replay(&fixture.client.tenant, parked[0].partition, &parked[0].subject).await?;
    eventually_parked(&fixture, 0).await?;
    same("in order", &fixture.trails().await?.get("acme/note/1").map(String::as_str), &Some("1 9 2"))
}

pub(super) async fn a_refusal_that_does_not_go_away_is_parked(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = LogFixture::open(namespace, 4).await?;
    set(&fixture.handler.refused, &[9]);
    for n in [1, 9, 2] {
        fixture.write("acme", 1, n).await?;
        fixture.write("acme", 2, n.min(2)).await?;
    }
    fixture.drain().await?;
    let trails = fixture.trails().await?;
    same("the key", &trails.get("acme/note/1").map(String::as_str), &Some("1"))?;
    same("another key", &trails.get("acme/note/2").map(String::as_str), &Some("1 2"))?;
    let parked = fixture.parked("acme").await?;
    same("how many", &parked.len(), &2)?;
    ensure!(parked[0].reason.contains("does not exist"), "{parked:?}");
    // Once it can be done, it is, and so is what waits behind it.
    set(&fixture.handler.refused, &[]);
    fixture.group().replay(&fixture.client.tenant, parked[0].partition, &parked[0].subject).await?;
    eventually_parked(&fixture, 0).await?;
    same("in order", &fixture.trails().await?.get("acme/note/1").map(String::as_str), &Some("1 9 2"))
}

/// Steps until so many records of the tenant are parked. The index that tells of what is ready may lag.
pub(super) async fn eventually_parked(fixture: &LogFixture, count: usize) -> Result<()> {
    for _ in 0..1_000 {
        fixture.drain().await?;
        if fixture.parked("acme").await?.len() == count {
            return Ok(());
        }
        pause().await;
    }
    anyhow::bail!("expected {count} records to be parked: {:?}", fixture.parked("acme").await?)
}

pub(super) async fn what_is_parked_is_replayed_in_order_or_given_up(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = LogFixture::open(namespace, 4).await?;
    set(&fixture.handler.poison, &[13, 14]);
    for n in [1, 13, 2, 14, 3] {
        fixture.write("acme", 1, n).await?;
    }
    fixture.drain().await?;
    let parked = fixture.parked("acme").await?;
    same("what is parked", &parked.len(), &4)?;
    let (partition, subject) = (parked[0].partition, parked[0].subject.clone());
    // In vain as long as it cannot be done, which is counted.
    let replay = async || fixture.group().replay(&fixture.client.tenant, partition, &subject).await;
    ensure!(replay().await?, "nothing was parked");
    for tries in 0.. {
        fixture.drain().await?;
        if fixture.parked("acme").await?[0].tries == 2 {
            break;
        }
        ensure!(tries < 1_000, "it was not tried again");
        pause().await;
    }
    same("the trail", &fixture.trails().await?.get("acme/note/1").map(String::as_str), &Some("1"))?;
    same("what is parked", &fixture.parked("acme").await?.len(), &4)?;
    // Now the first can be done, and the next; the third cannot, and stops what is behind it.
    set(&fixture.handler.poison, &[14]);
    ensure!(replay().await?, "nothing was parked");
    eventually_parked(&fixture, 2).await?;
    same("the trail", &fixture.trails().await?.get("acme/note/1").map(String::as_str), &Some("1 13 2"))?;
    // What is written meanwhile goes behind it.
    fixture.write("acme", 1, 4).await?;
    fixture.drain().await?;
    let parked = fixture.parked("acme").await?;
    same("what is parked", &parked.len(), &3)?;
    // Given up, it no longer holds anything up.
    ensure!(fixture.group().discard(&fixture.client.tenant, &parked[0]).await?, "it was not there");
    ensure!(!fixture.group().discard(&fixture.client.tenant, &parked[0]).await?, "it was there twice");
    ensure!(replay().await?, "nothing was parked");
    eventually_parked(&fixture, 0).await?;
    fixture.write("acme", 1, 5).await?;
    fixture.drain().await?;
    same(
        "the trail",
        &fixture.trails().await?.get("acme/note/1").map(String::as_str),
        &Some("1 13 2 3 4 5"),
    )?;
    ensure!(!replay().await?, "something is parked");
    Ok(())
}

pub(super) async fn parking_that_changes_meanwhile_is_looked_at_again(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = Arc::new(LogFixture::open(namespace, 1).await?);
    let partition = one_note(&fixture, &[13]).await?;
    set(&fixture.handler.poison, &[13]);
    fixture.drain().await?;
    let parked = fixture.parked("acme").await?;
    same("what is parked", &parked.len(), &1)?;
    let mut id = 1;
    loop {
        id += 1;
        fixture.write("acme", id, 5).await?;
        if position_of(fixture.client.house.store().as_ref(), "acme", id, 5).await?.0 == partition {
            break;
        }
    }
    fixture.write("acme", 1, 6).await?;
    position_of(fixture.client.house.store().as_ref(), "acme", 1, 6).await?;
    // The step has looked at what is parked, and is in the middle of the record before; then it is given up.
    let gate = fixture.handler.gate(5);
    let held = fixture.hold("first", partition).await?;
    let step = tokio::spawn({
        let (fixture, held) = (fixture.clone(), held.clone());
        async move { fixture.step(&held, partition, 50).await }
    });
    gate.arrived.notified().await;
    ensure!(fixture.group().discard(&fixture.client.tenant, &parked[0]).await?, "it was not parked");
    gate.go_on.notify_one();
    step.await??;
    fixture.drain().await?;
    same("what is parked", &fixture.parked("acme").await?, &vec![])?;
    let trails = fixture.trails().await?;
    same("the key that was free", &trails.get("acme/note/1").map(String::as_str), &Some("6"))?;
    same("the other", &trails.get(&format!("acme/note/{id}")).map(String::as_str), &Some("5"))
}

pub(super) async fn a_lost_discard_stays_unknown_if_the_retry_is_unavailable(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let faults = Arc::new(LostThenUnavailable::default());
    let store = Arc::new(StoreProxy::new(namespace.open().await?, faults.clone()));
    let fixture = LogFixture::over(store, Arc::new(SystemClock), BLUEPRINT, 4).await?;
    set(&fixture.handler.poison, &[13]);
    fixture.write("acme", 1, 13).await?;
    fixture.drain().await?;
    let parked = fixture.parked("acme").await?;
    let first = parked.first().context("nothing is parked")?;
    faults.start();
    let discarded = fixture.group().discard(&fixture.client.tenant, first).await;
    ensure!(matches!(discarded, Err(StoreError::OutcomeUnknown { .. })), "reported as {discarded:?}");
    faults.check_injected()?;
    // The lost attempt was applied: nothing is parked any more.
    same("what is parked", &fixture.parked("acme").await?, &vec![])
}
