//! Refunds: never more than was captured.

use super::*;

pub(super) async fn refunds_stay_within_what_was_captured(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    fixture.captured("p").await?;
    let over = json!({"transaction_id": "r-0", "amount": 101});
    fixture.refused("pay.refund", "p", over, Code::OutOfRange).await?;
    fixture.refund("p", "r-1", 60).await?;
    fixture.shows("p", json!({"refundable": 40, "refunding": 60, "refunded": 0})).await?;
    fixture
        .refused("pay.refund", "p", json!({"transaction_id": "r-2", "amount": 60}), Code::OutOfRange)
        .await?;
    fixture.pass(Duration::ZERO).await?;
    fixture
        .shows("p", json!({"status": "SUCCEEDED", "refundable": 40, "refunding": 0, "refunded": 60}))
        .await?;
    fixture.shows_transaction("p", "r-1", json!({"type": "REFUND", "status": "DONE", "amount": 60})).await?;
    // One that certainly failed can be refunded again.
    fixture.provider.plan("r-3", &[ProviderReaction::Rejects]);
    fixture.provider.plan("r-4", &[ProviderReaction::Declines]);
    for transaction in ["r-3", "r-4"] {
        fixture.refund("p", transaction, 40).await?;
        fixture.shows("p", json!({"refundable": 0, "refunding": 40})).await?;
        fixture.pass(Duration::ZERO).await?;
        fixture.shows("p", json!({"refundable": 40, "refunding": 0, "refunded": 60})).await?;
    }
    fixture.refund("p", "r-5", 40).await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("p", json!({"refundable": 0, "refunding": 0, "refunded": 100})).await?;
    fixture.agrees("p").await
}

pub(super) async fn racing_refunds_stay_within_what_was_captured(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let other = fixture.process(BLUEPRINT).await?;
    for round in 0..3 {
        let id = format!("p-{round}");
        fixture.captured(&id).await?;
        let calls: Vec<_> = (0..6)
            .map(|number| {
                let client = if number % 2 == 0 { &fixture.client } else { &other };
                let amount = [60, 30, 60, 10, 30, 60][number];
                let input = json!({"transaction_id": format!("{id}-{number}"), "amount": amount});
                client.start("pay.refund", &key(&id), input, None)
            })
            .collect();
        let mut applied = 0;
        for call in calls {
            match call.await? {
                Ok(_) => applied += 1,
                Err(refusal) => ensure!(refusal.code == Code::OutOfRange, "{refusal}"),
            }
        }
        ensure!(applied >= 1, "none was refunded");
        // Their ends are recorded by two processes at once.
        let workers = [fixture.client.clone(), other.clone()].map(|client| {
            tokio::spawn(async move {
                for _ in 0..4 {
                    client.work(7).await?;
                }
                anyhow::Ok(())
            })
        });
        for worker in workers {
            worker.await??;
        }
        fixture.pass(Duration::ZERO).await?;
        fixture.shows(&id, json!({"refunding": 0})).await?;
        fixture.agrees(&id).await?;
    }
    Ok(())
}

pub(super) async fn a_refund_in_doubt_is_neither_done_nor_free(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    fixture.captured("p").await?;
    fixture.provider.plan("r-1", &[ProviderReaction::LosesAnswer]);
    fixture.refund("p", "r-1", 60).await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows_transaction("p", "r-1", json!({"status": "PENDING_NETWORK_RESULT"})).await?;
    fixture
        .shows("p", json!({"status": "SUCCEEDED", "refundable": 40, "refunding": 60, "refunded": 0}))
        .await?;
    fixture
        .refused("pay.refund", "p", json!({"transaction_id": "r-2", "amount": 41}), Code::OutOfRange)
        .await?;
    fixture.pass(SECOND * 10).await?;
    fixture.shows("p", json!({"refundable": 40, "refunding": 0, "refunded": 60})).await?;
    fixture.agrees("p").await
}
