//! Time: the engine's clock decides what is early and what is late, and when the end moves.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value as Json, json};
use statehouse::Code;
use statehouse_store::{Clock, Time};

use super::cases::{AuctionFixture, BLUEPRINT, bid, key};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

pub(super) async fn the_engines_clock_decides_what_is_late(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    for (resource, id, skew) in
        [("plain", "a", -3_600), ("plain", "b", 3_600), ("lot", "c", -3_600), ("lot", "d", 3_600)]
    {
        let process = fixture.ahead(skew).await?;
        let end = fixture.after(100);
        fixture.create(resource, id, 100, json!({})).await?;
        let action = format!("{resource}.bid");
        fixture.clock.reach(end.minus(Duration::from_micros(1)));
        process.done(&action, &key(id), bid("ann", 10), None).await?;
        // The bid may have moved the end.
        let moved = process.shown(resource, &key(id), &["ends_at"]).await?;
        let end: Time = moved[0].as_str().context("a lot without an end")?.parse()?;
        fixture.clock.reach(end.minus(Duration::from_micros(1)));
        if resource == "plain" {
            process.done(&action, &key(id), bid("bob", 20), None).await?;
        }
        fixture.clock.reach(end);
        for amount in [1, 30] {
            process.refused(&action, &key(id), bid("bob", amount), None, Code::Expired).await?;
        }
        process.done(&format!("{resource}.close"), &key(id), json!({}), None).await?;
        process.shows(resource, &key(id), &json!({"state": "SOLD"})).await?;
    }
    Ok(())
}

pub(super) async fn the_engines_clock_decides_what_is_early(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    for (resource, id, skew) in
        [("plain", "a", -3_600), ("plain", "b", 3_600), ("lot", "c", -3_600), ("lot", "d", 3_600)]
    {
        let process = fixture.ahead(skew).await?;
        let start = fixture.after(100);
        let more = json!({"starts_at": start.to_string(), "start_price": 50});
        fixture.create(resource, id, 10_000, more).await?;
        let action = format!("{resource}.bid");
        for offer in [9, 100] {
            fixture.clock.reach(start.minus(Duration::from_micros(1)));
            process.refused(&action, &key(id), bid("ann", offer), None, Code::WrongState).await?;
        }
        fixture.clock.reach(start);
        process.done(&action, &key(id), bid("ann", 60), None).await?;
    }
    // Near the end of a lot that is short, too.
    let start = fixture.after(100);
    fixture.create("lot", "short", 105, json!({"starts_at": start.to_string()})).await?;
    fixture.clock.reach(start.minus(Duration::from_micros(1)));
    fixture.refused("lot", "short", ("ann", 10), Code::WrongState).await?;
    fixture.create("lot", "edge", 5, json!({"starts_at": fixture.after(1).to_string()})).await?;
    fixture.refused("lot", "edge", ("ann", 10), Code::WrongState).await
}

/// The end of a lot, in microseconds from a time on.
async fn end_of(client: &TenantClient, id: &str) -> Result<Time> {
    let shown = client.shown("lot", &key(id), &["ends_at"]).await?;
    Ok(shown[0].as_str().context("a lot without an end")?.parse()?)
}

pub(super) async fn accepted_bids_near_the_end_move_it(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let (client, clock) = (&fixture.client, &fixture.clock);
    let planned = fixture.after(60);
    fixture.create("lot", "a", 60, json!({})).await?;
    clock.reach(planned.minus(Duration::from_micros(10_000_001)));
    fixture.bids("lot", "a", &[("ann", 10)]).await?;
    same("before the last ten seconds", &end_of(client, "a").await?, &planned)?;
    clock.advance(Duration::from_micros(1));
    let answer = client.done("lot.bid", &key("a"), bid("bob", 20), None).await?;
    let moved = fixture.after(20);
    same("within them", &end_of(client, "a").await?, &moved)?;
    shows(&answer, &json!({"ends_at": moved.to_string()}))?;
    clock.reach(moved.minus(Duration::from_secs(1)));
    fixture.bids("lot", "a", &[("ann", 30)]).await?;
    same("once more", &end_of(client, "a").await?, &fixture.after(20))?;
    clock.reach(moved);
    same("what is due", &client.drain_workers_of("lot").await?, &0)?;
    clock.reach(end_of(client, "a").await?);
    same("what is due then", &client.drain_workers_of("lot").await?, &1)?;
    client.shows("lot", &key("a"), &json!({"state": "SOLD", "bidder_id": "ann"})).await
}

pub(super) async fn lots_of_a_sale_end_one_after_the_other(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let (client, clock) = (&fixture.client, &fixture.clock);
    let begins = clock.now();
    for (id, position) in [("a", 0), ("b", 1), ("c", 3)] {
        fixture.create("flood", id, 60, json!({"position": position})).await?;
        let shown = client.shown("flood", &key(id), &["ends_at", "hard_end"]).await?;
        let end = begins.plus(Duration::from_secs(60 + 30 * position));
        same("its end", &shown[0], &json!(end.to_string()))?;
        let hard_end = end.plus(Duration::from_secs(30 * 60));
        same("its hard end", &shown[1], &json!(hard_end.to_string()))?;
    }
    for (sold, open) in [("a", "b"), ("b", "c")] {
        let closes = if sold == "a" { 60 } else { 90 };
        fixture.bids("flood", sold, &[("ann", 10)]).await?;
        clock.reach(begins.plus(Duration::from_secs(closes)));
        client.drain_workers().await?;
        client.shows("flood", &key(sold), &json!({"state": "SOLD"})).await?;
        client.shows("flood", &key(open), &json!({"state": "OPEN"})).await?;
    }
    // An end that is over is refused, except where the position of the lot moves it.
    let over =
        |position: Json| json!({"lot_id": "d", "ends_at": clock.now().to_string(), "position": position});
    for position in [json!(0), json!(-1), json!(100_001), json!("1")] {
        client.refused("flood.create", &[], over(position), None, Code::InvalidInput).await?;
    }
    client.done("flood.create", &[], over(json!(1)), None).await?;
    let input = json!({"lot_id": "e", "ends_at": fixture.after(60).to_string(), "position": 1});
    client.refused("plain.create", &[], input, None, Code::InvalidInput).await.map(drop)
}

pub(super) async fn the_end_moves_to_its_limit(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let (client, clock) = (&fixture.client, &fixture.clock);
    let planned = fixture.after(60);
    let limit = planned.plus(Duration::from_secs(40));
    fixture.create("lot", "a", 60, json!({})).await?;
    // Each bid is a second before the end that the one before made: 19 seconds later.
    for (moved, amount) in [(19, 10), (38, 20)] {
        clock.reach(end_of(client, "a").await?.minus(Duration::from_secs(1)));
        fixture.bids("lot", "a", &[("ann", amount)]).await?;
        same("the end", &end_of(client, "a").await?, &planned.plus(Duration::from_secs(moved)))?;
    }
    clock.reach(limit.minus(Duration::from_secs(3)));
    fixture.bids("lot", "a", &[("bob", 30)]).await?;
    same("the limit", &end_of(client, "a").await?, &limit)?;
    fixture.bids("lot", "a", &[("ann", 40)]).await?;
    same("still the limit", &end_of(client, "a").await?, &limit)?;
    // At the edge the engine says whether there is room, whatever the clock of the process says.
    for (id, skew) in [("f", -5), ("g", 5)] {
        let process = fixture.ahead(skew).await?;
        for (name, micros, room) in [("room", 0, true), ("none", 1, false)] {
            let id = format!("{id} {name}");
            // The end can move by 40 seconds, in steps of up to 20.
            let end = fixture.after(5);
            fixture.create("lot", &id, 5, json!({})).await?;
            let hard_end = end.plus(Duration::from_secs(40));
            process.done("lot.bid", &key(&id), bid("ann", 10), None).await?;
            clock.reach(end_of(client, &id).await?.minus(Duration::from_secs(5)));
            process.done("lot.bid", &key(&id), bid("bob", 20), None).await?;
            let edge = hard_end.minus(Duration::from_secs(20)).plus(Duration::from_micros(micros));
            clock.reach(end_of(client, &id).await?.minus(Duration::from_secs(10)).max(edge));
            let now = clock.now();
            process.done("lot.bid", &key(&id), bid("ann", 30), None).await?;
            let expected = now.plus(Duration::from_secs(20)).min(hard_end);
            same(&format!("{id}, with room: {room}"), &end_of(client, &id).await?, &expected)?;
        }
    }
    Ok(())
}

pub(super) async fn rejected_bids_do_not_move_the_end(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    for resource in ["lot", "flood"] {
        let planned = fixture.after(60);
        fixture.create(resource, "a", 60, json!({"seller": "sue"})).await?;
        fixture.bids(resource, "a", &[("ann", 50)]).await?;
        fixture.clock.reach(planned.minus(Duration::from_secs(1)));
        for _ in 0..3 {
            fixture.refused(resource, "a", ("bob", 50), Code::TooLow).await?;
            fixture.refused(resource, "a", ("sue", 500), Code::Forbidden).await?;
        }
        let shown = fixture.client.shown(resource, &key("a"), &["ends_at"]).await?;
        same("the end", &shown, &vec![json!(planned.to_string())])?;
        fixture.clock.reach(planned);
        fixture.refused(resource, "a", ("bob", 500), Code::Expired).await?;
    }
    Ok(())
}

pub(super) async fn a_wrong_clock_does_not_move_the_end(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    // A process that is ahead believes that the end is near; one that is behind that it is far.
    for (id, skew) in [("a", 3_600), ("b", -3_600), ("c", 55), ("d", -55)] {
        let process = fixture.ahead(skew).await?;
        let planned = fixture.after(60);
        fixture.create("lot", id, 60, json!({})).await?;
        process.done("lot.bid", &key(id), bid("ann", 10), None).await?;
        same("far from the end", &end_of(&process, id).await?, &planned)?;
        fixture.clock.reach(planned.minus(Duration::from_secs(5)));
        process.done("lot.bid", &key(id), bid("bob", 20), None).await?;
        same("near the end", &end_of(&process, id).await?, &fixture.after(20))?;
    }
    Ok(())
}

/// Between the refusal of a bid by the clock and the plan that rejects it, the clock goes on, or is set back.
pub(super) async fn a_bid_is_rejected_by_the_clock_as_it_is(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    for resource in ["plain", "flood"] {
        let paused = Arc::new(Paused::default());
        let store = StoreProxy::new(fixture.store.clone(), paused.clone());
        let clock = Arc::new(fixture.clock.clone());
        let client = TenantClient::over(Arc::new(store), BLUEPRINT, clock).await?;
        let action = format!("{resource}.bid");
        // The first plan is refused by the clock, and the second one rejects the bid.
        let start = fixture.after(100);
        fixture.create(resource, "early", 1_000, json!({"starts_at": start.to_string()})).await?;
        let clock = fixture.clock.clone();
        paused.before(&format!("{resource}s"), 2, async move { clock.reach(start) });
        client.done(&action, &key("early"), bid("ann", 10), None).await?;
        let end = fixture.after(100);
        fixture.create(resource, "late", 100, json!({})).await?;
        fixture.clock.reach(end);
        let (clock, before) = (fixture.clock.clone(), end.minus(Duration::from_secs(1)));
        paused.before(&format!("{resource}s"), 2, async move { clock.set(before) });
        client.done(&action, &key("late"), bid("ann", 10), None).await?;
    }
    Ok(())
}
