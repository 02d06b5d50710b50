//! Charges: what is created once, charged once, and refused.

use super::*;
use crate::harness::fake_targets::{header, key_of};

pub(super) async fn a_payment_is_charged_and_captured(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let input =
        json!({"payment_intent_id": "order-1", "amount": 1999, "currency": "EUR", "merchant_id": "m-1"});
    let created = fixture.client.done("pay.create", &[], input, None).await?;
    same("what was created", &created.created.as_deref(), &Some("order-1"))?;
    fixture
        .shows(
            "order-1",
            json!({"status": "CREATED", "capture_method": "automatic", "attempt": 0, "captured": 0}),
        )
        .await?;
    let charging = fixture.charge("order-1", "t-1").await?;
    same("the state", &charging.body["status"], &json!("PROCESSING"))?;
    fixture
        .shows_transaction("order-1", "t-1", json!({"type": "CHARGE", "status": "PENDING", "amount": 1999}))
        .await?;
    fixture.check().await?;
    fixture.pass(Duration::ZERO).await?;
    fixture
        .shows(
            "order-1",
            json!({
                "status": "SUCCEEDED", "live_transaction": null, "attempt": 1, "captured": 1999, "refundable": 1999,
                "refunding": 0, "refunded": 0, "capturable": 0, "provider_ref": "ref-acme:pay_attempt:order-1:t-1",
            }),
        )
        .await?;
    let transaction = json!({"status": "CAPTURED", "provider": "http", "method": "pm_1", "currency": "EUR"});
    fixture.shows_transaction("order-1", "t-1", transaction).await?;
    fixture.shows_request("order-1", "t-1", json!({"status": "DELIVERED", "attempt": 1})).await?;
    let requests = fixture.targets.outbounds();
    same("how many requests came", &requests.len(), &1)?;
    same("where", &requests[0].url.to_string(), &"https://psp.example/v1/charges".to_owned())?;
    same("under which key", &key_of(&requests[0]), &"acme:pay_attempt:order-1:t-1".to_owned())?;
    same("who", &header(&requests[0], "authorization").as_deref(), &Some("Bearer sk-topsecret"))?;
    let body: Json = serde_json::from_slice(&requests[0].body)?;
    let expected = json!({
        "payment_intent_id": "order-1", "transaction_id": "t-1", "amount": 1999, "currency": "EUR", "capture": true,
        "method": "pm_1",
    });
    same("what was asked for", &body, &expected)?;
    fixture.agrees("order-1").await?;
    let listed = json!({"payment_intent_id": "order-1"});
    let listed = fixture.client.done("pay_transaction.list", &[], listed, None).await?;
    ensure!(listed.body.to_string().contains("t-1"), "{}", listed.body);
    // Another tenant's payment of the same name is another one.
    let bond = fixture.client.for_tenant("bond")?;
    bond.refused("pay.read", &key("order-1"), json!({}), None, Code::NotFound).await.map(drop)
}

pub(super) async fn an_id_names_one_payment(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let input = json!({"payment_intent_id": "p", "amount": 100, "currency": "EUR", "note": {"a": 1}});
    let first = fixture.client.done("pay.create", &[], input.clone(), None).await?;
    let again = fixture.client.done("pay.create", &[], input.clone(), None).await?;
    same("the same payment", &again.body, &first.body)?;
    fixture.charge("p", "t-1").await?;
    let again = fixture.client.done("pay.create", &[], input, None).await?;
    same("the payment as it is", &again.body["status"], &json!("PROCESSING"))?;
    for other in [
        json!({"payment_intent_id": "p", "amount": 101, "currency": "EUR", "note": {"a": 1}}),
        json!({"payment_intent_id": "p", "amount": 100, "currency": "USD", "note": {"a": 1}}),
        json!({"payment_intent_id": "p", "amount": 100, "currency": "EUR"}),
        json!({"payment_intent_id": "p", "amount": 100, "currency": "EUR", "note": {"a": 1}, "capture_method": "manual"}),
    ] {
        fixture.client.refused("pay.create", &[], other, None, Code::AlreadyExists).await?;
    }
    // A transaction id is one transaction for ever.
    fixture.pass(Duration::ZERO).await?;
    let taken = json!({"transaction_id": "t-1", "amount": 1});
    fixture.refused("pay.refund", "p", taken, Code::AlreadyExists).await?;
    fixture.check().await
}

pub(super) async fn bad_input_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    for (amount, currency) in [
        (json!(0), "EUR"),
        (json!(-1), "EUR"),
        (json!(1_000_000_000_001_i64), "EUR"),
        (json!(i64::MAX), "EUR"),
        (json!("100"), "EUR"),
        (json!(1.5), "EUR"),
        (json!(100), "CHF"),
        (json!(100), "eur"),
        (json!(100), ""),
    ] {
        let input = json!({"payment_intent_id": "p", "amount": amount, "currency": currency});
        fixture.client.refused("pay.create", &[], input, None, Code::InvalidInput).await?;
    }
    for id in ["", "a:b", "ä", "a\nb", &"x".repeat(49)] {
        let input = json!({"payment_intent_id": id, "amount": 1, "currency": "EUR"});
        fixture.client.refused("pay.create", &[], input, None, Code::InvalidInput).await?;
    }
    fixture.refused("pay.read", "p", json!({}), Code::NotFound).await?;
    fixture.create("p").await?;
    for transaction in ["", "a:b", &"x".repeat(49)] {
        fixture
            .refused("pay.charge", "p", json!({"transaction_id": transaction}), Code::InvalidInput)
            .await?;
    }
    fixture.refused("pay.charge", "q", json!({"transaction_id": "t"}), Code::NotFound).await?;
    for action in ["pay.capture", "pay.refund"] {
        let input = json!({"transaction_id": "t", "amount": -5});
        fixture.refused(action, "p", input, Code::InvalidInput).await?;
    }
    fixture.shows("p", json!({"status": "CREATED", "version": 1})).await?;
    same("requests", &fixture.targets.outbounds().len(), &0)
}

pub(super) async fn card_numbers_are_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    fixture.create("p").await?;
    for card in ["4242424242424242", "4242 4242 4242 4242", "card 5555-5555-5555-4444"] {
        let charge = json!({"transaction_id": "t", "method": card});
        let refusal =
            fixture.client.refused("pay.charge", &key("p"), charge, None, Code::InvalidInput).await?;
        ensure!(refusal.message.contains("number of a card"), "{refusal}");
        for (name, value) in [("merchant_id", json!(card)), ("note", json!({"deep": [{"pan": card}]}))] {
            let mut input = json!({"payment_intent_id": "q", "amount": 1, "currency": "EUR"});
            input[name] = value;
            fixture.client.refused("pay.create", &[], input, None, Code::InvalidInput).await?;
        }
    }
    let as_id = json!({"payment_intent_id": "4242424242424242", "amount": 1, "currency": "EUR"});
    fixture.client.refused("pay.create", &[], as_id, None, Code::InvalidInput).await?;
    fixture
        .refused("pay.charge", "p", json!({"transaction_id": "4242424242424242"}), Code::InvalidInput)
        .await?;
    fixture.shows("p", json!({"status": "CREATED", "version": 1})).await
}

pub(super) async fn a_second_charge_waits_for_the_first(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    fixture.create("p").await?;
    fixture.provider.plan("t-1", &[ProviderReaction::Declines]);
    fixture.charge("p", "t-1").await?;
    fixture.refused("pay.charge", "p", json!({"transaction_id": "t-2"}), Code::WrongState).await?;
    fixture.pass(Duration::ZERO).await?;
    fixture
        .shows("p", json!({"status": "RETRYABLE", "live_transaction": null, "reason": "insufficient_funds"}))
        .await?;
    fixture
        .shows_transaction("p", "t-1", json!({"status": "DECLINED", "reason": "insufficient_funds"}))
        .await?;
    // A declined id stays declined.
    fixture.refused("pay.charge", "p", json!({"transaction_id": "t-1"}), Code::AlreadyExists).await?;
    fixture.charge("p", "t-2").await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("p", json!({"status": "SUCCEEDED", "attempt": 2, "captured": 100})).await?;
    fixture.refused("pay.charge", "p", json!({"transaction_id": "t-3"}), Code::WrongState).await?;
    fixture.agrees("p").await
}

pub(super) async fn racing_charges_are_one_charge(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let other = fixture.process(BLUEPRINT).await?;
    for round in 0..5 {
        let id = format!("p-{round}");
        fixture.create(&id).await?;
        // One of the charges that get through loses its answer.
        for number in 0..4 {
            fixture.provider.plan(&format!("t-{number}"), &[ProviderReaction::LosesAnswer]);
        }
        let calls: Vec<_> = (0..4)
            .map(|number| {
                let client = if number % 2 == 0 { &fixture.client } else { &other };
                let input = json!({"transaction_id": format!("t-{number}")});
                client.start("pay.charge", &key(&id), input, None)
            })
            .collect();
        let mut applied = 0;
        for call in calls {
            match call.await? {
                Ok(_) => applied += 1,
                Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
            }
        }
        same("charges that began", &applied, &1)?;
        fixture.pass(Duration::ZERO).await?;
        fixture.shows(&id, json!({"status": "REQUIRES_RECONCILIATION", "attempt": 1})).await?;
        fixture.refused("pay.charge", &id, json!({"transaction_id": "t-9"}), Code::WrongState).await?;
        fixture.refused("pay.cancel", &id, json!({}), Code::WrongState).await?;
        fixture.pass(SECOND * 10).await?;
        fixture.shows(&id, json!({"status": "SUCCEEDED", "captured": 100})).await?;
        fixture.agrees(&id).await?;
    }
    Ok(())
}

pub(super) async fn a_repeated_charge_gets_the_first_answer(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    fixture.create("p").await?;
    let charge = || json!({"transaction_id": "t-1"});
    let client = &fixture.client;
    let first = client.call_as("op-1", "pay.charge", &key("p"), charge(), None).await.context("the first")?;
    fixture.pass(Duration::ZERO).await?;
    let again =
        client.call_as("op-1", "pay.charge", &key("p"), charge(), None).await.context("the second")?;
    same("the answer", &again.body, &first.body)?;
    let other = client.call_as("op-1", "pay.charge", &key("p"), json!({"transaction_id": "t-2"}), None).await;
    ensure!(matches!(&other, Err(refusal) if refusal.code == Code::OperationReused), "{other:?}");
    fixture.agrees("p").await
}

pub(super) async fn attempts_are_bounded(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    fixture.create("p").await?;
    for number in 1..=3 {
        let transaction = format!("t-{number}");
        fixture.provider.plan(
            &transaction,
            &[if number == 2 { ProviderReaction::Rejects } else { ProviderReaction::Declines }],
        );
        fixture.charge("p", &transaction).await?;
        fixture.pass(Duration::ZERO).await?;
    }
    fixture.shows_transaction("p", "t-2", json!({"status": "FAILED", "reason": "rejected"})).await?;
    fixture.shows("p", json!({"status": "FAILED", "live_transaction": null, "attempt": 3})).await?;
    fixture.refused("pay.charge", "p", json!({"transaction_id": "t-4"}), Code::WrongState).await?;
    // Another blueprint allows fewer of them.
    fixture.create("q").await?;
    fixture.provider.plan("q-1", &[ProviderReaction::Declines]);
    fixture.charge("q", "q-1").await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("q", json!({"status": "RETRYABLE"})).await?;
    let stricter = fixture.process(&BLUEPRINT.replace("attempts_max = 3", "attempts_max = 1")).await?;
    let again = json!({"transaction_id": "q-2"});
    let refusal = stricter.refused("pay.charge", &key("q"), again, None, Code::WrongState).await?;
    ensure!(refusal.message.contains("charged 1 times"), "{refusal}");
    fixture.shows("q", json!({"status": "RETRYABLE", "attempt": 1})).await
}

pub(super) async fn every_action_begins_with_its_states(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let states: [(&str, &[ProviderReaction], &[&str]); 7] = [
        ("CREATED", &[], &["charge", "cancel"]),
        ("RETRYABLE", &[ProviderReaction::Declines], &["charge", "cancel"]),
        ("REQUIRES_ACTION", &[ProviderReaction::WantsAction], &[]),
        ("PENDING", &[ProviderReaction::Delays], &[]),
        ("REQUIRES_RECONCILIATION", &[ProviderReaction::LosesAnswer], &[]),
        ("SUCCEEDED", &[ProviderReaction::Works], &["refund"]),
        ("PROCESSING", &[ProviderReaction::Works], &[]),
    ];
    for action in ["charge", "capture", "cancel", "refund"] {
        for (status, reactions, begins) in states {
            let id = format!("{action}-{status}");
            fixture.create(&id).await?;
            let transaction = format!("{id}-1");
            fixture.provider.plan(&transaction, reactions);
            if !reactions.is_empty() {
                fixture.charge(&id, &transaction).await?;
            }
            if status != "PROCESSING" {
                fixture.pass(Duration::ZERO).await?;
            }
            fixture.shows(&id, json!({"status": status})).await?;
            let version = fixture.client.shown("pay", &key(&id), &["version"]).await?;
            let mut input = json!({"transaction_id": format!("{id}-2")});
            if ["capture", "refund"].contains(&action) {
                input["amount"] = json!(1);
            }
            let called = fixture.client.call(&format!("pay.{action}"), &key(&id), input, None).await;
            let code = if action == "refund" { Code::OutOfRange } else { Code::WrongState };
            match called {
                Ok(_) => ensure!(begins.contains(&action), "{action} began with {status}"),
                Err(refusal) => {
                    ensure!(!begins.contains(&action), "{action} of {status}: {refusal}");
                    ensure!(refusal.code == code, "{action} of {status}: {refusal}");
                    same("the row", &fixture.client.shown("pay", &key(&id), &["version"]).await?, &version)?;
                }
            }
        }
    }
    fixture.pass(SECOND * 20).await?;
    // What is over is over.
    fixture.create("over").await?;
    fixture.begin("pay.cancel", "over", json!({})).await?;
    for action in ["charge", "capture", "cancel"] {
        fixture
            .refused(&format!("pay.{action}"), "over", json!({"transaction_id": "x"}), Code::WrongState)
            .await?;
    }
    fixture.check().await
}
