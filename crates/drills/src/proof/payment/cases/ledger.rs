//! The ledger: what is taken from one account is given to another, covered accounts never have less than nothing, and captures and
//! refunds are posted with the payment.

use std::collections::BTreeMap;

use super::*;

fn moving(id: &str, debit: &str, credit: &str, amount: i64) -> Json {
    json!({"transfer_id": id, "debit": debit, "credit": credit, "currency": "EUR", "amount": amount})
}

fn pending(debit: &str, credit: &str, amount: i64) -> Json {
    json!({"debit": debit, "credit": credit, "currency": "EUR", "amount": amount, "timeout_ms": 60_000})
}

async fn balance(fixture: &PaymentFixture, account: &str, expected: Json) -> Result<()> {
    let key = [account.into(), "EUR".into()];
    let read = fixture.client.done("pay_account.read", &key, json!({}), None).await?;
    crate::harness::tenant_client::shows(&read, &expected).with_context(|| account.to_owned())
}

/// The trial balance in euros: debits and credits, posted and pending.
async fn totals(fixture: &PaymentFixture) -> Result<[i64; 4]> {
    let answer = fixture.client.done("pay_account.list", &[], json!({}), None).await?;
    let row = answer.body.as_array().and_then(|rows| rows.iter().find(|row| row["currency"] == json!("EUR")));
    let row = row.context("nothing in euros")?;
    let int = |name: &str| row[name].as_i64().unwrap_or_default();
    Ok([int("debits_posted"), int("credits_posted"), int("debits_pending"), int("credits_pending")])
}

pub(super) async fn a_transfer_moves_an_amount_once(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let client = &fixture.client;
    client.done("pay_transfer.transfer", &[], moving("m-1", "bank", "wallet:7", 500), None).await?;
    balance(&fixture, "bank", json!({"debits_posted": 500, "credits_posted": 0})).await?;
    balance(&fixture, "wallet:7", json!({"credits_posted": 500, "available": 500})).await?;
    for again in [moving("m-1", "bank", "wallet:7", 500), moving("m-1", "bank", "wallet:7", 1)] {
        client.refused("pay_transfer.transfer", &[], again, None, Code::AlreadyExists).await?;
    }
    for bad in [
        moving("m-2", "bank", "bank", 1),
        moving("m-2", "bank", "wallet:7", 0),
        moving("m-2", "bank", "wallet:7", -1),
        moving("m-2", "ba nk", "wallet:7", 1),
        moving("m-2", "bank", "", 1),
        moving("m-2", "bank", "card:4242424242424242", 1),
        moving("4242424242424242", "bank", "wallet:7", 1),
        json!({"transfer_id": "m-2", "debit": "bank", "credit": "wallet:7", "currency": "CHF", "amount": 1}),
        json!({"transfer_id": "m-2", "debit": "bank", "credit": "wallet:7", "currency": "EUR", "amount": 1,
               "memo": "4242 4242 4242 4242"}),
    ] {
        client.refused("pay_transfer.transfer", &[], bad, None, Code::InvalidInput).await?;
    }
    let key = ["nothing".into(), "EUR".into()];
    client.refused("pay_account.read", &key, json!({}), None, Code::NotFound).await?;
    same("the trial balance", &totals(&fixture).await?, &[500, 500, 0, 0])?;
    fixture.check().await
}

pub(super) async fn a_covered_account_never_has_less_than_nothing(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let client = &fixture.client;
    let none = moving("m-0", "wallet:1", "shop", 1);
    client.refused("pay_transfer.transfer", &[], none, None, Code::NotFound).await?;
    client.done("pay_transfer.transfer", &[], moving("m-1", "bank", "wallet:1", 100), None).await?;
    let calls: Vec<_> = (0..6)
        .map(|number| {
            let input = moving(&format!("w-{number}"), "wallet:1", "shop", 40);
            client.start("pay_transfer.transfer", &[], input, None)
        })
        .collect();
    let mut applied = 0;
    for call in calls {
        match call.await? {
            Ok(_) => applied += 1,
            Err(refusal) => ensure!(refusal.code == Code::OutOfRange, "{refusal}"),
        }
    }
    same("transfers", &applied, &2)?;
    balance(&fixture, "wallet:1", json!({"available": 20, "debits_posted": 80})).await?;
    // What is pending is not available either.
    client.done("pay_transfer.pend", &key("p-1"), pending("wallet:1", "shop", 15), None).await?;
    balance(&fixture, "wallet:1", json!({"available": 5, "debits_pending": 15})).await?;
    let refusal = client
        .refused("pay_transfer.pend", &key("p-2"), pending("wallet:1", "shop", 6), None, Code::OutOfRange)
        .await?;
    ensure!(refusal.message.contains("has 5"), "{refusal}");
    // Any other account may have less than nothing.
    balance(&fixture, "bank", json!({"debits_posted": 100})).await?;
    fixture.check().await
}

pub(super) async fn a_pending_transfer_is_resolved_once(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let client = &fixture.client;
    client.done("pay_transfer.transfer", &[], moving("m-1", "bank", "wallet:1", 100), None).await?;
    for round in 0..3 {
        let id = format!("p-{round}");
        client.done("pay_transfer.pend", &key(&id), pending("wallet:1", "shop", 10), None).await?;
        let post = client.start("pay_transfer.post", &key(&id), json!({}), None);
        let void = client.start("pay_transfer.void", &key(&id), json!({}), None);
        let (post, void) = (post.await?, void.await?);
        ensure!(post.is_ok() != void.is_ok(), "both or neither: {post:?}, {void:?}");
        for action in ["pay_transfer.post", "pay_transfer.void"] {
            client.refused(action, &key(&id), json!({}), None, Code::WrongState).await?;
        }
        fixture.check().await?;
    }
    client.refused("pay_transfer.post", &key("p-9"), json!({}), None, Code::NotFound).await?;
    let again = pending("wallet:1", "shop", 10);
    client.refused("pay_transfer.pend", &key("p-0"), again, None, Code::AlreadyExists).await?;
    // One whose time is up is voided, and cannot be posted, swept or not.
    client.done("pay_transfer.pend", &key("late"), pending("wallet:1", "shop", 10), None).await?;
    let posted = client.drafted("pay_transfer.post", &key("late"), json!({}), None).await?;
    fixture.clock.advance(SECOND * 60 - Duration::from_micros(1));
    fixture.pass(Duration::ZERO).await?;
    client.shows("pay_transfer", &key("late"), &json!({"kind": "PENDING"})).await?;
    fixture.clock.advance(Duration::from_micros(1));
    client.refused("pay_transfer.post", &key("late"), json!({}), None, Code::Expired).await?;
    client.too_late(&posted).await?;
    fixture.pass(Duration::ZERO).await?;
    client.shows("pay_transfer", &key("late"), &json!({"kind": "VOIDED", "expires_at": null})).await?;
    let [debits, credits, pending_debits, pending_credits] = totals(&fixture).await?;
    same("posted", &debits, &credits)?;
    same("pending", &[pending_debits, pending_credits], &[0, 0])
}

pub(super) async fn captures_and_refunds_are_posted_with_the_payment(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let create = |id: &str| {
        let input = json!({"payment_intent_id": id, "amount": 100, "currency": "EUR", "merchant_id": "m-7"});
        (fixture.client.clone(), input)
    };
    for id in ["p", "q"] {
        let (client, input) = create(id);
        client.done("pay.create", &[], input, None).await?;
    }
    fixture.provider.plan("q-1", &[ProviderReaction::LosesAnswer]);
    fixture.charge("p", "p-1").await?;
    fixture.charge("q", "q-1").await?;
    fixture.pass(Duration::ZERO).await?;
    let posted = json!({"credits_posted": 100, "debits_posted": 0});
    balance(&fixture, "merchant:m-7", posted).await?;
    balance(&fixture, "psp:http", json!({"debits_posted": 100})).await?;
    // What is in doubt is not posted.
    fixture.pass(SECOND * 10).await?;
    balance(&fixture, "merchant:m-7", json!({"credits_posted": 200})).await?;
    fixture.refund("p", "r-1", 30).await?;
    fixture.pass(Duration::ZERO).await?;
    balance(&fixture, "merchant:m-7", json!({"credits_posted": 200, "debits_posted": 30})).await?;
    fixture.provider.plan("r-2", &[ProviderReaction::Rejects]);
    fixture.refund("p", "r-2", 30).await?;
    fixture.pass(Duration::ZERO).await?;
    balance(&fixture, "merchant:m-7", json!({"credits_posted": 200, "debits_posted": 30})).await?;
    same("the trial balance", &totals(&fixture).await?, &[230, 230, 0, 0])?;
    let listed = fixture.client.done("pay_journal.list", &[], json!({"currency": "EUR"}), None).await?;
    let entries: BTreeMap<String, String> = listed
        .body
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|row| Some((row["transfer_id"].as_str()?.to_owned(), row["entry"].as_str()?.to_owned())))
        .collect();
    let expected = "2027-01-15 (p:r-1:0) \n    merchant:m-7  EUR 0.30\n    psp:http  EUR -0.30\n";
    same("a refund in the journal", &entries.get("p:r-1:0").map(String::as_str), &Some(expected))?;
    same("entries", &entries.len(), &3)
}

pub(super) async fn cells_of_an_account_are_one_account(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let client = &fixture.client;
    for number in 0..12 {
        let input = moving(&format!("m-{number}"), "bank", "shop", 1 + number);
        client.done("pay_transfer.transfer", &[], input, None).await?;
    }
    let scope = client.scope("pay");
    let table = scope.sibling("account")?.tables.first().context("no accounts")?;
    let cells = scope.rows(table).await?;
    let of_bank = cells.iter().filter(|row| row.text("account") == Some("bank")).count();
    ensure!(of_bank > 1, "the account is one row");
    balance(&fixture, "bank", json!({"debits_posted": 78, "credits_posted": 0})).await?;
    balance(&fixture, "shop", json!({"credits_posted": 78, "debits_posted": 0})).await?;
    fixture.check().await
}

pub(super) async fn timeouts_contend_with_callers_by_the_engines_clock(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let fixture = PaymentFixture::open(namespace).await?;
    let client = &fixture.client;
    client.done("pay_transfer.transfer", &[], moving("m-1", "bank", "wallet:1", 100), None).await?;
    client.done("pay_transfer.pend", &key("early"), pending("wallet:1", "shop", 10), None).await?;
    // The clock of a process is ahead: to it, the time is up.
    let ahead = ManualClock::at(fixture.clock.now().plus(SECOND * 3_600));
    let store = client.house.store().clone();
    let ahead =
        TenantClient::before(store, BLUEPRINT, Arc::new(ahead), fixture.targets.egress(SECRETS)).await?;
    for _ in 0..5 {
        ahead.work(7).await?;
    }
    client.shows("pay_transfer", &key("early"), &json!({"kind": "PENDING"})).await?;
    client.done("pay_transfer.post", &key("early"), json!({}), None).await?;
    // A caller and the sweepers of two processes void one transfer at once.
    let other = fixture.process(BLUEPRINT).await?;
    for round in 0..6 {
        let id = format!("late-{round}");
        client.done("pay_transfer.pend", &key(&id), pending("wallet:1", "shop", 10), None).await?;
        fixture.clock.advance(SECOND * 60);
        let sweepers = [client.clone(), other.clone()]
            .map(|client| tokio::spawn(async move { client.work(7).await.map(drop) }));
        let void = client.start("pay_transfer.void", &key(&id), json!({}), None);
        if let Err(refusal) = void.await? {
            ensure!(refusal.code == Code::WrongState, "{refusal}");
        }
        for sweeper in sweepers {
            sweeper.await??;
        }
        fixture.pass(Duration::ZERO).await?;
        client.shows("pay_transfer", &key(&id), &json!({"kind": "VOIDED"})).await?;
    }
    balance(&fixture, "wallet:1", json!({"available": 90, "debits_pending": 0})).await
}
