//! Payments whose money is reserved first.

use super::*;

/// A payment of 100 that is authorized.
async fn authorized(fixture: &PaymentFixture, id: &str) -> Result<()> {
    fixture.create_as("card", id, 100).await?;
    fixture.begin("card.charge", id, json!({"transaction_id": format!("{id}-charge")})).await?;
    fixture.pass(Duration::ZERO).await?;
    let expected =
        json!({"status": "REQUIRES_CAPTURE", "capturable": 100, "captured": 0, "live_transaction": null});
    fixture.client.shows("card", &key(id), &expected).await
}

fn moving(transaction: &str, amount: i64) -> Json {
    json!({"transaction_id": transaction, "amount": amount})
}

pub(super) async fn what_was_authorized_is_captured_once(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    authorized(&fixture, "p").await?;
    fixture.refused("card.capture", "p", moving("c-0", 101), Code::OutOfRange).await?;
    fixture.refused("card.refund", "p", moving("c-0", 1), Code::OutOfRange).await?;
    // Of captures that race, one begins.
    let calls: Vec<_> = (1..=3)
        .map(|number| {
            fixture.client.start("card.capture", &key("p"), moving(&format!("c-{number}"), 70), None)
        })
        .collect();
    let mut applied = 0;
    for call in calls {
        match call.await? {
            Ok(_) => applied += 1,
            Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
        }
    }
    same("captures that began", &applied, &1)?;
    fixture.refused("card.cancel", "p", json!({"transaction_id": "v-1"}), Code::WrongState).await?;
    fixture.refused("card.charge", "p", json!({"transaction_id": "t-2"}), Code::WrongState).await?;
    fixture.pass(Duration::ZERO).await?;
    let captured = json!({"status": "SUCCEEDED", "captured": 70, "capturable": 0, "refundable": 70});
    fixture.client.shows("card", &key("p"), &captured).await?;
    fixture.refused("card.capture", "p", moving("c-9", 1), Code::WrongState).await?;
    same("captured at the provider", &fixture.provider.captured("p"), &70)?;
    // One that the provider rejects leaves the authorization as it was, and one in doubt is asked about.
    authorized(&fixture, "q").await?;
    fixture.provider.plan("q-1", &[ProviderReaction::Rejects]);
    fixture.begin("card.capture", "q", moving("q-1", 60)).await?;
    fixture.pass(Duration::ZERO).await?;
    let kept = json!({"status": "REQUIRES_CAPTURE", "capturable": 100, "live_transaction": null, "reason": "rejected"});
    fixture.client.shows("card", &key("q"), &kept).await?;
    fixture.provider.plan("q-2", &[ProviderReaction::LosesAnswer]);
    // All of it, if no amount is given.
    fixture.begin("card.capture", "q", json!({"transaction_id": "q-2"})).await?;
    fixture.pass(Duration::ZERO).await?;
    let doubt = json!({"status": "REQUIRES_RECONCILIATION", "capturable": 100, "live_transaction": "q-2"});
    fixture.client.shows("card", &key("q"), &doubt).await?;
    fixture.refused("card.capture", "q", moving("q-3", 10), Code::WrongState).await?;
    fixture.pass(SECOND * 10).await?;
    fixture.client.shows("card", &key("q"), &json!({"status": "SUCCEEDED", "captured": 100})).await?;
    same("captured at the provider", &fixture.provider.captured("q"), &100)
}

pub(super) async fn an_authorization_is_voided(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    authorized(&fixture, "p").await?;
    fixture.refused("card.cancel", "p", json!({}), Code::InvalidInput).await?;
    fixture.provider.plan("v-1", &[ProviderReaction::Rejects]);
    fixture.begin("card.cancel", "p", json!({"transaction_id": "v-1"})).await?;
    fixture.refused("card.cancel", "p", json!({"transaction_id": "v-2"}), Code::WrongState).await?;
    fixture.refused("card.capture", "p", moving("c-1", 10), Code::WrongState).await?;
    fixture.pass(Duration::ZERO).await?;
    fixture
        .client
        .shows("card", &key("p"), &json!({"status": "REQUIRES_CAPTURE", "capturable": 100}))
        .await?;
    fixture.begin("card.cancel", "p", json!({"transaction_id": "v-2"})).await?;
    fixture.pass(Duration::ZERO).await?;
    let voided = json!({"status": "CANCELLED", "capturable": 0, "captured": 0, "live_transaction": null});
    fixture.client.shows("card", &key("p"), &voided).await?;
    fixture
        .client
        .shows("card_transaction", &pair("p", "v-2"), &json!({"type": "VOID", "status": "DONE"}))
        .await?;
    fixture.refused("card.capture", "p", moving("c-2", 10), Code::WrongState).await
}

pub(super) async fn cancel_and_charge_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    for round in 0..5 {
        let id = format!("p-{round}");
        fixture.create(&id).await?;
        let charge = fixture.client.start("pay.charge", &key(&id), json!({"transaction_id": "t"}), None);
        let cancel = fixture.client.start("pay.cancel", &key(&id), json!({}), None);
        let (charge, cancel) = (charge.await?, cancel.await?);
        ensure!(charge.is_ok() != cancel.is_ok(), "both or neither: {charge:?}, {cancel:?}");
        fixture.pass(Duration::ZERO).await?;
        let status = if charge.is_ok() { "SUCCEEDED" } else { "CANCELLED" };
        fixture.shows(&id, json!({"status": status})).await?;
        fixture.agrees(&id).await?;
        // A cancellation that was drafted before the payment was charged comes too late.
        let id = format!("q-{round}");
        fixture.create(&id).await?;
        let cancel = fixture.client.drafted("pay.cancel", &key(&id), json!({}), None).await?;
        fixture.charge(&id, "t").await?;
        fixture.client.too_late(&cancel).await?;
        fixture.pass(Duration::ZERO).await?;
    }
    Ok(())
}
