//! Modes of bidding, and what operators and buyers do besides.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::Code;

use super::cases::{AuctionFixture, BLUEPRINT, bid, key};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::store_client::{same, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

/// All events that subscribers of a lot get, without what they do not see.
async fn told_of(fixture: &AuctionFixture, resource: &str) -> Result<String> {
    let hidden = &fixture.client.house.resource(resource)?.hidden;
    let mut told = Vec::new();
    for record in whole_log(fixture.store.as_ref()).await? {
        for mut event in record.events {
            if let Some(row) = event.data.get_mut("row").and_then(Json::as_object_mut) {
                row.retain(|name, _| !hidden.contains(name));
            }
            told.push(event.data.to_string());
        }
    }
    Ok(told.join("\n"))
}

pub(super) async fn proxy_bids_hide_their_maximum(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("maximum", "a", 60, json!({"start_price": 10, "reserve": 60})).await?;
    let first = client.done("maximum.bid", &key("a"), bid("ann", 987_654_301), None).await?;
    shows(&first, &json!({"price": 60, "leading": true, "min_next": 65}))?;
    let second = client.done("maximum.bid", &key("a"), bid("bob", 4_030), None).await?;
    shows(&second, &json!({"price": 4_055, "leading": false, "min_next": 4_080}))?;
    fixture.refused("maximum", "a", ("cat", 4_079), Code::TooLow).await?;
    // Only the leader's maximum rises.
    fixture.refused("maximum", "a", ("ann", 987_654_301), Code::TooLow).await?;
    let raised = client.done("maximum.bid", &key("a"), bid("ann", 987_654_309), None).await?;
    shows(&raised, &json!({"price": 4_055, "leading": true}))?;
    let shown = client.done("maximum.read", &key("a"), json!({}), None).await?;
    let list = client.done("maximum_bid.list", &[], json!({"lot_id": "a"}), None).await?;
    for (what, text) in [
        ("the lot", shown.body.to_string()),
        ("the list", list.body.to_string()),
        ("the log", told_of(&fixture, "maximum").await?),
    ] {
        ensure!(!text.contains("9876543"), "{what} tells the maximum: {text}");
    }
    fixture.clock.advance(Duration::from_secs(60));
    client.drain_workers().await?;
    let sold = client.done("maximum.read", &key("a"), json!({}), None).await?;
    let winner = json!({"bidder_id": "ann", "winning_amount": 4_055, "runner_up_bidder_id": "bob",
                        "runner_up_amount": 4_030});
    for (name, value) in winner.as_object().into_iter().flatten() {
        same(name, &sold.body["winner"][name], value)?;
    }
    Ok(())
}

pub(super) async fn sealed_bids_are_shown_at_the_close(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("tender", "a", 60, json!({"start_price": 10})).await?;
    let first = client.done("tender.bid", &key("a"), bid("ann", 987_654_301), None).await?;
    shows(&first, &json!({"amount": 987_654_301, "price": null, "leading": null, "min_next": 10}))?;
    fixture.bids("tender", "a", &[("bob", 987_654_303), ("cat", 987_654_303), ("dan", 987_654_302)]).await?;
    fixture.refused("tender", "a", ("eve", 9), Code::TooLow).await?;
    client.shows("tender", &key("a"), &json!({"bids": 4, "min_next": 10})).await?;
    let shown = client.done("tender.read", &key("a"), json!({}), None).await?;
    let list = client.done("tender_bid.list", &[], json!({"lot_id": "a"}), None).await?;
    for (what, text) in [
        ("the lot", shown.body.to_string()),
        ("the list", list.body.to_string()),
        ("the log", told_of(&fixture, "tender").await?),
    ] {
        ensure!(!text.contains("9876543") && !text.contains("\"ann\""), "{what} tells a secret: {text}");
    }
    fixture.clock.advance(Duration::from_secs(60));
    client.drain_workers().await?;
    let sold = client.done("tender.read", &key("a"), json!({}), None).await?;
    let winner = json!([sold.body["winner"]["bidder_id"], sold.body["winner"]["winning_amount"]]);
    same("the winner", &winner, &json!(["bob", 987_654_303]))
}

pub(super) async fn a_lot_is_bought_at_once(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    let buyer = |id: &str| json!({"bidder_id": id});
    let offered = json!({"buy_now": 500, "seller": "sue"});
    for id in ["a", "bids", "late"] {
        fixture.create("tender", id, 60, offered.clone()).await?;
    }
    fixture.create("tender", "none", 60, json!({})).await?;
    fixture.create("tender", "gone", 60, offered.clone()).await?;
    let more = json!({"buy_now": 500, "starts_at": fixture.after(30).to_string()});
    fixture.create("tender", "early", 60, more).await?;
    client.refused("tender.buy_now", &key("a"), buyer("sue"), None, Code::Forbidden).await?;
    client.done("tender.buy_now", &key("a"), buyer("ann"), None).await?;
    client.refused("tender.buy_now", &key("a"), buyer("bob"), None, Code::WrongState).await?;
    let sold = client.done("tender.read", &key("a"), json!({}), None).await?;
    let winner = json!([
        sold.body["winner"]["bidder_id"],
        sold.body["winner"]["winning_amount"],
        sold.body["winner"]["winning_bid_id"]
    ]);
    same("the winner", &winner, &json!(["ann", 500, null]))?;
    fixture.refused("tender", "a", ("bob", 900), Code::Expired).await?;
    // A bid was drafted before the lot was sold.
    let bidding = client.drafted("tender.bid", &key("bids"), bid("bob", 10), None).await?;
    fixture.bids("tender", "bids", &[("bob", 10)]).await?;
    client.too_late(&bidding).await?;
    client.done("tender.cancel", &key("gone"), json!({}), None).await?;
    for id in ["bids", "none", "gone", "early"] {
        client.refused("tender.buy_now", &key(id), buyer("ann"), None, Code::WrongState).await?;
    }
    fixture.clock.advance(Duration::from_secs(60));
    client.refused("tender.buy_now", &key("late"), buyer("ann"), None, Code::Expired).await?;
    same("what was closed", &client.drain_workers_of("tender").await?, &4)?;
    client.shows("tender", &key("late"), &json!({"state": "UNSOLD"})).await
}

pub(super) async fn a_lot_is_bought_while_bids_are_below(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    let buyer = |id: &str| json!({"bidder_id": id});
    let offered = json!({"buy_now": 500, "start_price": 10});
    for id in ["none", "below", "above"] {
        fixture.create("maximum", id, 60, offered.clone()).await?;
    }
    client.done("maximum.buy_now", &key("none"), buyer("ann"), None).await?;
    fixture.bids("maximum", "below", &[("bob", 800), ("cat", 400)]).await?;
    client.done("maximum.buy_now", &key("below"), buyer("ann"), None).await?;
    let sold = json!({"state": "SOLD", "price": 500, "bidder_id": "ann", "best_bid_id": null, "bids": 2});
    client.shows("maximum", &key("below"), &sold).await?;
    fixture.bids("maximum", "above", &[("bob", 800), ("cat", 600)]).await?;
    client.refused("maximum.buy_now", &key("above"), buyer("ann"), None, Code::WrongState).await?;
    Ok(())
}

pub(super) async fn rejected_bids_may_be_counted(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    let process = fixture.ahead(-3_600).await?;
    let start = fixture.after(10);
    fixture.create("flood", "a", 60, json!({"starts_at": start.to_string(), "start_price": 10})).await?;
    fixture.create("flood", "b", 60, json!({})).await?;
    fixture.refused("flood", "a", ("ann", 50), Code::WrongState).await?;
    fixture.clock.reach(start);
    fixture.bids("flood", "a", &[("ann", 50)]).await?;
    fixture.refused("flood", "a", ("bob", 50), Code::TooLow).await?;
    process.refused("flood.bid", &key("a"), bid("bob", 20), None, Code::TooLow).await?;
    client.shows("flood", &key("a"), &json!({"rejected": 3, "bids": 1})).await?;
    fixture.clock.advance(Duration::from_secs(50));
    for (count, client) in [(4, client), (5, &process)] {
        client.refused("flood.bid", &key("a"), bid("bob", 900), None, Code::Expired).await?;
        client.shows("flood", &key("a"), &json!({"rejected": count, "price": 50})).await?;
    }
    client.drain_workers().await?;
    fixture.refused("flood", "a", ("bob", 900), Code::Expired).await?;
    client.shows("flood", &key("a"), &json!({"rejected": 6, "state": "SOLD"})).await?;
    // A count that was drafted is not lost, and the end does not come back.
    fixture.create("flood", "c", 60, json!({"start_price": 10})).await?;
    let input = json!({"lot_id": "a", "state": "REJECTED"});
    let list = client.done("flood_bid.list", &[], input, None).await?;
    same("what is kept", &list.body, &json!([]))
}

pub(super) async fn an_operator_voids_bids(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("maximum", "a", 60, json!({"start_price": 10})).await?;
    let named = |bidder: &str, amount: i64| json!({"bidder_id": bidder, "amount": amount, "bid_id": bidder});
    for (bidder, amount) in [("ann", 50), ("bob", 300), ("cat", 200)] {
        client.done("maximum.bid", &key("a"), named(bidder, amount), None).await?;
    }
    client.refused("maximum.bid", &key("a"), named("dan", 5), None, Code::TooLow).await?;
    client.shows("maximum", &key("a"), &json!({"price": 225, "bidder_id": "bob"})).await?;
    let void = |bid: &str| json!({"bid_id": bid});
    client.refused("maximum.void", &key("a"), void("eve"), None, Code::NotFound).await?;
    client.refused("maximum.void", &key("a"), void("dan"), None, Code::WrongState).await?;
    client.refused("maximum.void", &key("b"), void("ann"), None, Code::NotFound).await?;
    client.done("maximum.void", &key("a"), void("bob"), None).await?;
    client.refused("maximum.void", &key("a"), void("bob"), None, Code::WrongState).await?;
    let left = json!({"price": 55, "bidder_id": "cat", "min_next": 60, "bids": 3});
    client.shows("maximum", &key("a"), &left).await?;
    // Bidding goes on from there.
    client.done("maximum.bid", &key("a"), named("eve", 60), None).await?;
    for bid in ["ann", "cat", "eve"] {
        client.done("maximum.void", &key("a"), void(bid), None).await?;
    }
    let none = json!({"price": null, "bidder_id": null, "min_next": 10, "reserve_met": false, "bids": 4});
    client.shows("maximum", &key("a"), &none).await?;
    client.done("maximum.bid", &key("a"), named("fay", 10), None).await?;
    fixture.clock.advance(Duration::from_secs(60));
    client.drain_workers().await?;
    client.refused("maximum.void", &key("a"), void("fay"), None, Code::WrongState).await?;
    client.shows("maximum", &key("a"), &json!({"state": "SOLD", "bidder_id": "fay", "price": 10})).await
}

pub(super) async fn a_void_and_a_bid_contend(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("lot", "a", 60, json!({})).await?;
    let named = |bidder: &str, amount: i64| json!({"bidder_id": bidder, "amount": amount, "bid_id": bidder});
    for (bidder, amount) in [("ann", 10), ("bob", 20)] {
        client.done("lot.bid", &key("a"), named(bidder, amount), None).await?;
    }
    // An operator was paused with the plan in its hands, and another one voids the other bid, or the same.
    let void = |bid: &str| json!({"bid_id": bid});
    let drafted = client.drafted("lot.void", &key("a"), void("bob"), None).await?;
    client.done("lot.bid", &key("a"), named("cat", 30), None).await?;
    client.too_late(&drafted).await?;
    let drafted = client.drafted("lot.void", &key("a"), void("cat"), None).await?;
    client.done("lot.void", &key("a"), void("cat"), None).await?;
    client.too_late(&drafted).await?;
    client.shows("lot", &key("a"), &json!({"price": 20, "bidder_id": "bob", "bids": 3})).await?;
    let drafted = client.drafted("lot.bid", &key("a"), named("dan", 30), None).await?;
    client.done("lot.cancel", &key("a"), json!({}), None).await?;
    client.too_late(&drafted).await
}

pub(super) async fn the_winner_is_told_once(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    for id in ["a", "b"] {
        fixture.create("prize", id, 60, json!({})).await?;
    }
    fixture.bids("prize", "a", &[("ann", 10), ("bob", 20)]).await?;
    fixture.clock.advance(Duration::from_secs(60));
    let closing = client.drafted("prize.close", &key("a"), json!({}), None).await?;
    let closers = [0, 1, 2].map(|_| client.start("prize.close", &key("a"), json!({}), None));
    let mut closed = 0;
    for closer in closers {
        match closer.await? {
            Ok(_) => closed += 1,
            Err(refusal) => same("the code", &refusal.code, &Code::WrongState)?,
        }
    }
    same("how often it was closed", &closed, &1)?;
    client.too_late(&closing).await?;
    client.done("prize.close", &key("b"), json!({}), None).await?;
    let rows = client.scope("won").rows(client.table("wons")?).await?;
    let sent: Vec<(Option<&str>, Option<&Json>)> =
        rows.iter().map(|row| (row.text("key"), row.json("body"))).collect();
    let body = json!({"auction": "prize", "key": "a", "bidder_id": "bob", "winning_amount": 20});
    same("what is sent", &sent, &vec![(Some("prize:a"), Some(&body))])?;
    let sold = client.done("prize.read", &key("a"), json!({}), None).await?;
    ensure!(sold.body["winner"]["at"].as_str().is_some(), "when it was sold: {}", sold.body);
    let winner = sold.body["winner"].as_object().context("no winner")?;
    ensure!(!winner.contains_key("runner_up_bidder_id"), "no runner-up is declared: {winner:?}");
    Ok(())
}

pub(super) async fn a_low_bid_and_a_void_contend(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    fixture.create("lot", "a", 60, json!({})).await?;
    fixture.bids("lot", "a", &[("ann", 10)]).await?;
    let high = json!({"bidder_id": "bob", "amount": 100, "bid_id": "high"});
    fixture.client.done("lot.bid", &key("a"), high, None).await?;
    let paused = Arc::new(Paused::default());
    let store = StoreProxy::new(fixture.store.clone(), paused.clone());
    let clock = Arc::new(fixture.clock.clone());
    let bidder = TenantClient::over(Arc::new(store), BLUEPRINT, clock).await?;
    // The bid is judged to be too low, and before that is written the bid above it is voided.
    let operator = fixture.client.clone();
    paused.before("lots", 1, async move {
        let voided = operator.done("lot.void", &key("a"), json!({"bid_id": "high"}), None).await;
        assert!(voided.is_ok(), "{voided:?}");
    });
    bidder.done("lot.bid", &key("a"), bid("cat", 50), None).await?;
    ensure!(paused.is_over(), "nothing was voided");
    fixture.client.shows("lot", &key("a"), &json!({"bidder_id": "cat", "price": 50, "bids": 3})).await
}
