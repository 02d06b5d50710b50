//! Outcomes that are not known at once.

use tokio::sync::Barrier;

use super::*;
use crate::harness::fake_targets::{Latch, TargetBehavior};
use crate::harness::store_client::pause;

pub(super) async fn an_unknown_outcome_is_reconciled_and_never_failed(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    for (id, reaction) in [
        ("lost-answer", ProviderReaction::LosesAnswer),
        ("lost-request", ProviderReaction::LosesRequest),
        ("failing", ProviderReaction::Fails),
    ] {
        fixture.create(id).await?;
        fixture.provider.plan(id, &[reaction]);
        fixture.charge(id, id).await?;
        fixture.pass(Duration::ZERO).await?;
        let uncertain = json!({"status": "REQUIRES_RECONCILIATION", "live_transaction": id, "captured": 0});
        fixture.shows(id, uncertain.clone()).await?;
        fixture.shows_transaction(id, id, json!({"status": "PENDING_NETWORK_RESULT"})).await?;
        // Charged again it would be charged twice.
        fixture.refused("pay.charge", id, json!({"transaction_id": "other"}), Code::WrongState).await?;
        fixture.pass(SECOND * 9).await?;
        fixture.shows(id, uncertain).await?;
        fixture.pass(SECOND).await?;
        fixture.shows(id, json!({"status": "SUCCEEDED", "live_transaction": null, "captured": 100})).await?;
        fixture.agrees(id).await?;
    }
    fixture
        .shows_request("lost-answer", "lost-answer", json!({"attempt": 1, "reason": "reconciled"}))
        .await?;
    fixture.shows_request("lost-request", "lost-request", json!({"attempt": 2, "checks": 1})).await?;
    // A provider that does not say what it did is asked for ever, and an operator is told.
    fixture.create("silent").await?;
    fixture.provider.plan("silent", &[ProviderReaction::LosesAnswer]);
    fixture.provider.answers("silent", &vec![json!(503); 5]);
    fixture.charge("silent", "silent").await?;
    for _ in 0..6 {
        fixture.pass(SECOND * 10).await?;
        fixture
            .shows("silent", json!({"status": "REQUIRES_RECONCILIATION", "live_transaction": "silent"}))
            .await?;
    }
    let stuck = fixture.client.shown("pay_attempt", &key("silent:silent"), &["stuck_at"]).await?;
    ensure!(stuck[0].is_string(), "no operator is told");
    let listed = fixture.client.done("pay.list", &[], json!({}), None).await?;
    ensure!(listed.body.to_string().contains("silent"), "{}", listed.body);
    fixture.pass(SECOND * 10).await?;
    fixture.shows("silent", json!({"status": "SUCCEEDED"})).await?;
    fixture.agrees("silent").await
}

pub(super) async fn a_request_outlives_its_process(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    // The process that charges has no workers: it is gone.
    let gone = fixture.process(BLUEPRINT).await?;
    fixture.create("unsent").await?;
    gone.done("pay.charge", &key("unsent"), json!({"transaction_id": "t-1"}), None).await?;
    drop(gone);
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("unsent", json!({"status": "SUCCEEDED", "captured": 100})).await?;
    fixture.agrees("unsent").await?;
    // The next one dies after the request has left.
    let door = Latch::default();
    let held = FakeTargets::of({
        let (provider, door) = (fixture.provider.clone(), door.clone());
        move |outbound, _| match provider.react(outbound) {
            TargetBehavior::Answers(_) => TargetBehavior::Holds(door.clone()),
            other => other,
        }
    });
    let store = fixture.client.house.store().clone();
    let clock = Arc::new(fixture.clock.clone());
    let dying = TenantClient::before(store, BLUEPRINT, clock, held.egress(SECRETS)).await?;
    fixture.create("sent").await?;
    fixture.charge("sent", "t-2").await?;
    let sender = tokio::spawn({
        let dying = dying.clone();
        async move {
            while dying.work(20).await.is_ok_and(|done| done.iter().all(|step| step.rows == 0)) {
                pause().await;
            }
        }
    });
    held.arrived(1).await;
    sender.abort();
    let _ = sender.await;
    fixture.shows("sent", json!({"status": "PROCESSING", "live_transaction": "t-2"})).await?;
    fixture.pass(SECOND * 60).await?;
    fixture.shows("sent", json!({"status": "REQUIRES_RECONCILIATION", "live_transaction": "t-2"})).await?;
    fixture.pass(SECOND * 10).await?;
    fixture.shows("sent", json!({"status": "SUCCEEDED", "captured": 100})).await?;
    fixture.agrees("sent").await
}

pub(super) async fn nonsense_is_no_answer(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    fixture.create("p").await?;
    fixture.provider.plan("t-1", &[ProviderReaction::Babbles]);
    // What it says when it is asked makes no sense either, at first.
    let nonsense = [
        json!({"status": "captured", "amount": 7}),
        json!({"status": "refunded"}),
        json!([]),
        json!({"status": "captured", "currency": "USD"}),
    ];
    fixture.provider.answers("t-1", &nonsense);
    fixture.charge("p", "t-1").await?;
    for _ in 0..=nonsense.len() {
        fixture.pass(Duration::ZERO).await?;
        fixture
            .shows(
                "p",
                json!({"status": "REQUIRES_RECONCILIATION", "captured": 0, "live_transaction": "t-1"}),
            )
            .await?;
        fixture
            .shows_request(
                "p",
                "t-1",
                json!({"status": "UNCERTAIN", "reason": "unclear_response", "attempt": 1}),
            )
            .await?;
        fixture.clock.advance(SECOND * 10);
    }
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("p", json!({"status": "SUCCEEDED", "captured": 100})).await?;
    fixture.agrees("p").await
}

pub(super) async fn a_payer_who_has_to_act_and_a_slow_provider(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    for id in ["acting", "slow"] {
        fixture.create(id).await?;
    }
    fixture.provider.plan("t-acting", &[ProviderReaction::WantsAction]);
    fixture.provider.plan("t-slow", &[ProviderReaction::Delays]);
    fixture.charge("acting", "t-acting").await?;
    fixture.charge("slow", "t-slow").await?;
    fixture.pass(Duration::ZERO).await?;
    let acting = json!({
        "status": "REQUIRES_ACTION", "live_transaction": "t-acting", "action_url": "https://bank.example/3ds"
    });
    fixture.shows("acting", acting).await?;
    fixture
        .shows("slow", json!({"status": "PENDING", "live_transaction": "t-slow", "action_url": null}))
        .await?;
    fixture.pass(SECOND * 10).await?;
    for id in ["acting", "slow"] {
        fixture.shows(id, json!({"status": "SUCCEEDED", "action_url": null, "captured": 100})).await?;
        fixture.agrees(id).await?;
    }
    Ok(())
}

pub(super) async fn a_person_resolves_what_cannot_be_known(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    for (id, applied) in [("found", true), ("absent", false)] {
        let transaction = format!("t-{id}");
        fixture.create(id).await?;
        let resolve = json!({"applied": applied, "reason": "as the statement says"});
        let resolve = |version| {
            let (client, key, resolve) = (fixture.client.clone(), pair(id, &transaction), resolve.clone());
            async move { client.call("pay_transaction.resolve", &key, resolve, version).await }
        };
        ensure!(
            matches!(resolve(None).await, Err(refusal) if refusal.code == Code::NotFound),
            "it does not exist"
        );
        fixture.provider.plan(&transaction, &[ProviderReaction::LosesAnswer]);
        fixture.provider.answers(&transaction, &vec![json!(500); 50]);
        fixture.charge(id, &transaction).await?;
        ensure!(
            matches!(resolve(None).await, Err(refusal) if refusal.code == Code::WrongState),
            "it is not sent"
        );
        fixture.pass(Duration::ZERO).await?;
        let stale = resolve(Some(1)).await;
        ensure!(matches!(&stale, Err(refusal) if refusal.code == Code::VersionConflict), "{stale:?}");
        let resolved = resolve(Some(2)).await.context("resolving")?;
        let expected = if applied { "CAPTURED" } else { "FAILED" };
        same("the transaction", &resolved.body["status"], &json!(expected))?;
        ensure!(
            matches!(resolve(None).await, Err(refusal) if refusal.code == Code::WrongState),
            "it has its end"
        );
        let status = if applied { "SUCCEEDED" } else { "RETRYABLE" };
        fixture
            .shows(id, json!({"status": status, "live_transaction": null, "reason": "as the statement says"}))
            .await?;
        let sent = fixture.targets.outbounds().len();
        fixture.pass(SECOND * 60).await?;
        same("requests", &fixture.targets.outbounds().len(), &sent)?;
        fixture.shows(id, json!({"status": status})).await?;
    }
    Ok(())
}

pub(super) async fn a_status_query_is_recorded_once(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    for round in 0..3 {
        let id = format!("p-{round}");
        fixture.create(&id).await?;
        let transaction = format!("t-{round}");
        fixture.provider.plan(&transaction, &[ProviderReaction::LosesAnswer]);
        fixture.charge(&id, &transaction).await?;
        fixture.pass(Duration::ZERO).await?;
        fixture.clock.advance(SECOND * 10);
        // Both have found the same row to be due before either records an answer.
        let barrier = Arc::new(Barrier::new(2));
        let tasks = [fixture.process(BLUEPRINT).await?, fixture.process(BLUEPRINT).await?].map(|client| {
            let barrier = barrier.clone();
            tokio::spawn(async move {
                barrier.wait().await;
                for _ in 0..5 {
                    client.work(7).await?;
                }
                anyhow::Ok(())
            })
        });
        for task in tasks {
            task.await??;
        }
        fixture.pass(Duration::ZERO).await?;
        fixture.shows(&id, json!({"status": "SUCCEEDED", "captured": 100, "refundable": 100})).await?;
        fixture.agrees(&id).await?;
    }
    Ok(())
}

pub(super) async fn a_query_can_be_asked_for(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let client = &fixture.client;
    client.refused("pay.reconcile", &key("p"), json!({}), None, Code::NotFound).await?;
    fixture.create("p").await?;
    let asked = client.done("pay.reconcile", &key("p"), json!({}), None).await?;
    same("nothing to ask", &asked.body, &json!({"asked": false}))?;
    for (transaction, resource, key) in
        [("t-1", "pay", key("p").to_vec()), ("t-2", "pay_transaction", pair("p", "t-2").to_vec())]
    {
        fixture.provider.plan(transaction, &[ProviderReaction::LosesRequest, ProviderReaction::Declines]);
        fixture.charge("p", transaction).await?;
        fixture.pass(Duration::ZERO).await?;
        fixture.shows("p", json!({"status": "REQUIRES_RECONCILIATION"})).await?;
        let asked = client.done(&format!("{resource}.reconcile"), &key, json!({}), None).await?;
        same("it is asked", &asked.body, &json!({"asked": true}))?;
        fixture.pass(Duration::ZERO).await?;
        fixture.shows("p", json!({"status": "RETRYABLE", "live_transaction": null})).await?;
        let asked = client.done(&format!("{resource}.reconcile"), &key, json!({}), None).await?;
        same("nothing to ask", &asked.body, &json!({"asked": false}))?;
    }
    client
        .refused("pay_transaction.reconcile", &pair("p", "t-9"), json!({}), None, Code::NotFound)
        .await
        .map(drop)
}
