//! What the merchant is told.

use std::collections::BTreeMap;

use super::*;
use crate::harness::fake_targets::key_of;

/// The notices that came at an address, by the version of the payment.
fn notices(fixture: &PaymentFixture, url: &str) -> Result<BTreeMap<i64, Json>> {
    let mut notices = BTreeMap::new();
    for outbound in fixture.targets.outbounds().iter().filter(|outbound| outbound.url == url) {
        let body: Json = serde_json::from_slice(&outbound.body)?;
        let version = body["data"]["version"].as_i64().context("a notice without a version")?;
        ensure!(
            notices.insert(version, body).is_none(),
            "version {version} was told twice: {}",
            key_of(outbound)
        );
    }
    Ok(notices)
}

/// The changes of a payment as the log has them, by version, without the columns that no notice has.
async fn logged(fixture: &PaymentFixture, id: &str) -> Result<BTreeMap<i64, (String, Json)>> {
    let scope = fixture.client.scope("pay");
    let changes =
        scope.histories(scope.sibling("")?, &[]).await?.remove(id).context("it is not in the log")?;
    let rows = changes.into_iter().filter_map(|change| {
        let mut row = change.data["row"].clone();
        let version = row["version"].as_i64()?;
        let fields = row.as_object_mut()?;
        fields.remove("updated_at");
        fields.remove("webhook_urls");
        Some((version, (format!("pay.{}", change.name), row)))
    });
    Ok(rows.collect())
}

pub(super) async fn a_merchant_is_told_what_the_row_says(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let urls = ["https://shop.example/a", "https://shop.example/b?x=1"];
    for bad in [json!(["https://evil.example/"]), json!(["http://shop.example/"]), json!(vec![urls[0]; 21])] {
        let input = json!({"payment_intent_id": "p", "amount": 100, "currency": "EUR", "webhook_urls": bad});
        fixture.client.refused("pay.create", &[], input, None, Code::InvalidInput).await?;
    }
    let input = json!({"payment_intent_id": "p", "amount": 100, "currency": "EUR", "webhook_urls": urls});
    fixture.client.done("pay.create", &[], input, None).await?;
    fixture.provider.plan("t-1", &[ProviderReaction::Declines]);
    fixture.provider.plan("t-2", &[ProviderReaction::LosesAnswer]);
    for transaction in ["t-1", "t-2"] {
        fixture.charge("p", transaction).await?;
        fixture.pass(Duration::ZERO).await?;
    }
    fixture.pass(SECOND * 10).await?;
    // The ends of two refunds are recorded at once.
    for number in 0..4 {
        fixture.refund("p", &format!("r-{number}"), 10).await?;
    }
    let other = fixture.process(BLUEPRINT).await?;
    let workers = [fixture.client.clone(), other]
        .map(|client| tokio::spawn(async move { client.work(7).await.map(drop) }));
    for worker in workers {
        worker.await??;
    }
    for _ in 0..5 {
        fixture.pass(SECOND * 10).await?;
    }
    fixture.shows("p", json!({"status": "SUCCEEDED", "refunded": 40})).await?;
    let logged = logged(&fixture, "p").await?;
    for url in urls {
        let notices = notices(&fixture, url)?;
        let told: Vec<&str> = notices.values().filter_map(|body| body["type"].as_str()).collect();
        let expected = ["pay.declined", "pay.uncertain", "pay.captured"];
        same("what was told first", &told.get(..3), &Some(&expected[..]))?;
        same("refunds", &told.iter().filter(|name| **name == "pay.refunded").count(), &4)?;
        same("notices", &told.len(), &7)?;
        for (version, body) in &notices {
            let (event, row) = logged.get(version).context("a version that is not in the log")?;
            same("the event", &body["type"], &json!(event))?;
            same("the row", &body["data"], row)?;
            same("the id", &body["id"], &json!(format!("p.{version}")))?;
        }
    }
    // One that was given up is told too.
    let input = json!({"payment_intent_id": "q", "amount": 1, "currency": "EUR", "webhook_urls": [urls[0]]});
    fixture.client.done("pay.create", &[], input, None).await?;
    fixture.begin("pay.cancel", "q", json!({})).await?;
    fixture.pass(Duration::ZERO).await?;
    let last = fixture.targets.outbounds().pop().context("nothing was sent")?;
    let body: Json = serde_json::from_slice(&last.body)?;
    same(
        "the notice",
        &(&body["type"], &body["data"]["status"]),
        &(&json!("pay.cancelled"), &json!("CANCELLED")),
    )
}
