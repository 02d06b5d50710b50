//! A16 Auction: bids until the end and not after it, one winner, whatever happens in between.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::Code;
use statehouse_store::clock::SkewedClock;
use statehouse_store::{Clock as _, Store, Time, Value};

use super::{combining, modes, times};
use crate::conformance::{Case, cases};
use crate::harness::drill::DrillClock;
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::{TenantClient, shows};

use self as auction;

pub(crate) const CASES: &[Case] = cases! {
    auction {
        a_lot_lives_its_life(4),
        a_lot_without_a_sale(4),
        bad_input_is_refused(4),
        the_engines_clock_decides_what_is_late(5),
        the_engines_clock_decides_what_is_early(4),
        accepted_bids_near_the_end_move_it(4),
        the_end_moves_to_its_limit(4),
        lots_of_a_sale_end_one_after_the_other(4),
        rejected_bids_do_not_move_the_end(4),
        a_wrong_clock_does_not_move_the_end(4),
        a_bid_is_rejected_by_the_clock_as_it_is(4),
        a_low_bid_and_a_void_contend(4),
        bids_are_listed_in_their_order(4),
        bidding_and_closing_contend_on_one_row(5),
        bids_arrive_together(20),
        bidders_in_two_processes_share_a_lot(20),
        a_repeated_bid_gets_its_first_answer(4),
        an_id_names_one_bid(4),
        lost_answers_place_nothing_twice(12),
        a_late_original_changes_nothing(4),
        a_leader_that_goes_away_is_replaced(12),
        a_process_dies_in_the_middle_of_a_group(12),
        a_bid_in_a_batch(8),
        rules_of_the_resource_hold_in_a_group(6),
        conditions_of_callers_hold(4),
        one_bid_at_a_time(4),
        proxy_bids_hide_their_maximum(5),
        sealed_bids_are_shown_at_the_close(5),
        a_lot_is_bought_at_once(5),
        a_lot_is_bought_while_bids_are_below(5),
        rejected_bids_may_be_counted(4),
        an_operator_voids_bids(4),
        a_void_and_a_bid_contend(4),
        the_winner_is_told_once(6),
    }
};

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[auction.lot]
key         = { lot_id = "text" }
fields      = { title = "text?" }
bidding     = "open"
increments  = 10
extend      = { within = "10s", to = "20s", until = "40s" }
runner_up   = true
bid_buckets = 2
shards      = 2

[auction.plain]
key     = { lot_id = "text" }
bidding = "open"
fold    = 1

[auction.maximum]
key        = { lot_id = "text" }
increments = [[0, 5], [100, 25]]
runner_up  = true
buy_now    = "always"

[auction.tender]
key     = { lot_id = "text" }
bidding = "sealed"
buy_now = "until_first_bid"

[auction.flood]
key      = { lot_id = "text" }
bidding  = "open"
rejected = "count"
stagger  = "30s"
extend   = { within = "10s" }

[auction.prize]
key     = { lot_id = "text" }
bidding = "open"
on_won  = "won"

[effect.won]
url = "https://mail.example/won"

[auction.ruled]
key     = { lot_id = "text" }
bidding = "open"

[auction.ruled.allow]
read = "true"
bid  = "row.start_price < 100 and input.bidder_id = claims.sub"
"#;

/// A house whose clock is the engine's.
pub(super) struct AuctionFixture {
    pub(super) clock: DrillClock,
    pub(super) store: Arc<dyn Store>,
    pub(super) client: TenantClient,
}

impl AuctionFixture {
    pub(super) async fn open(namespace: &dyn TestNamespace) -> Result<AuctionFixture> {
        let clock = DrillClock::new();
        let store = namespace.open_at(Arc::new(clock.clone())).await?;
        let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(clock.clone())).await?;
        Ok(AuctionFixture { clock, store, client })
    }

    /// Another process, whose clock is so many seconds ahead of the engine's.
    pub(super) async fn ahead(&self, seconds: i64) -> Result<TenantClient> {
        let skewed = SkewedClock::over(Arc::new(self.clock.clone()));
        skewed.skew(seconds * 1_000_000);
        TenantClient::over(self.store.clone(), BLUEPRINT, Arc::new(skewed)).await
    }

    /// Opens a lot that ends in so many seconds.
    pub(super) async fn create(&self, resource: &str, id: &str, seconds: u64, more: Json) -> Result<()> {
        let mut input = json!({"lot_id": id, "ends_at": self.after(seconds).to_string()});
        for (name, value) in more.as_object().into_iter().flatten() {
            input[name] = value.clone();
        }
        self.client.done(&format!("{resource}.create"), &[], input, None).await.map(drop)
    }

    pub(super) fn after(&self, seconds: u64) -> Time {
        self.clock.now().plus(Duration::from_secs(seconds))
    }

    /// Bids that are accepted.
    pub(super) async fn bids(&self, resource: &str, id: &str, bids: &[(&str, i64)]) -> Result<()> {
        for (bidder, amount) in bids {
            self.client.done(&format!("{resource}.bid"), &key(id), bid(bidder, *amount), None).await?;
        }
        Ok(())
    }

    /// A bid that is refused.
    pub(super) async fn refused(
        &self,
        resource: &str,
        id: &str,
        offer: (&str, i64),
        code: Code,
    ) -> Result<()> {
        let input = bid(offer.0, offer.1);
        self.client.refused(&format!("{resource}.bid"), &key(id), input, None, code).await.map(drop)
    }

    /// The bids of a lot in a state, the newest first: of each the bidder and the amount.
    pub(super) async fn listed(&self, id: &str, state: &str, count: usize) -> Result<Vec<Json>> {
        let input = json!({"lot_id": id, "state": state});
        for _ in 0..1_000 {
            let list = self.client.done("lot_bid.list", &[], input.clone(), None).await?;
            let rows = list.body.as_array().context("no list")?;
            if rows.len() == count {
                return Ok(rows.iter().map(|row| json!([row["bidder_id"], row["amount"]])).collect());
            }
            pause().await;
        }
        anyhow::bail!("the list of {id} did not come to have {count} rows in the state {state}")
    }
}

pub(super) fn key(id: &str) -> [Value; 1] {
    [id.into()]
}

pub(super) fn bid(bidder: &str, amount: i64) -> Json {
    json!({"bidder_id": bidder, "amount": amount})
}

async fn a_lot_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let (client, clock) = (&fixture.client, &fixture.clock);
    client.refused("lot.read", &key("a"), json!({}), None, Code::NotFound).await?;
    client.refused("lot.bid", &key("a"), bid("ann", 100), None, Code::NotFound).await?;
    let more = json!({"title": "a vase", "seller": "sue", "start_price": 100, "reserve": 150,
                      "starts_at": fixture.after(5).to_string()});
    fixture.create("lot", "a", 60, more).await?;
    client.shows("lot", &key("a"), &json!({"state": "SCHEDULED", "title": "a vase", "winner": null})).await?;
    clock.advance(Duration::from_secs(5));
    let opened = json!({"state": "OPEN", "price": null, "min_next": 100, "bids": 0, "reserve_met": false});
    client.shows("lot", &key("a"), &opened).await?;
    let read = client.done("lot.read", &key("a"), json!({}), None).await?;
    ensure!(read.body.get("reserve").is_none(), "the reserve is a secret: {}", read.body);
    let placed = client.done("lot.bid", &key("a"), bid("ann", 100), None).await?;
    let told = json!({"lot_id": "a", "state": "ACCEPTED", "seq": 1, "price": 100, "min_next": 110, "leading": true,
                      "bidder_id": "ann", "amount": 100, "ends_at": fixture.after(55).to_string()});
    shows(&placed, &told)?;
    ensure!(placed.token.is_some(), "a write has a token");
    let id = placed.body["bid_id"].as_str().context("a bid without an id")?.to_owned();
    let bid_key = ["a".into(), id.as_str().into()];
    client
        .shows("lot_bid", &bid_key, &json!({"bidder_id": "ann", "amount": 100, "state": "ACCEPTED"}))
        .await?;
    fixture.refused("lot", "a", ("bob", 109), Code::TooLow).await?;
    fixture.bids("lot", "a", &[("bob", 110), ("ann", 160)]).await?;
    client.shows("lot", &key("a"), &json!({"price": 160, "bidder_id": "ann", "reserve_met": true})).await?;
    client.refused("lot.close", &key("a"), json!({}), None, Code::WrongState).await?;
    clock.advance(Duration::from_secs(55));
    fixture.refused("lot", "a", ("bob", 500), Code::Expired).await?;
    same("what was closed", &client.drain_workers_of("lot").await?, &1)?;
    let winner = client.done("lot.read", &key("a"), json!({}), None).await?;
    shows(&winner, &json!({"state": "SOLD", "price": 160, "bids": 3}))?;
    let sold = json!([
        winner.body["winner"]["bidder_id"],
        winner.body["winner"]["winning_amount"],
        winner.body["winner"]["runner_up_bidder_id"],
        winner.body["winner"]["runner_up_amount"]
    ]);
    same("the winner", &sold, &json!(["ann", 160, "bob", 110]))?;
    fixture.refused("lot", "a", ("bob", 900), Code::Expired).await?;
    for action in ["lot.close", "lot.cancel"] {
        client.refused(action, &key("a"), json!({}), None, Code::WrongState).await?;
    }
    Ok(())
}

async fn a_lot_without_a_sale(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("plain", "none", 10, json!({})).await?;
    for resource in ["plain", "lot"] {
        let again = json!({"lot_id": "none", "ends_at": fixture.after(10).to_string()});
        let create = format!("{resource}.create");
        fixture.client.call(&create, &[], again.clone(), None).await.ok();
        client.refused(&create, &[], again, None, Code::AlreadyExists).await?;
    }
    fixture.create("plain", "reserve", 10, json!({"reserve": 50})).await?;
    fixture.create("plain", "cancelled", 10, json!({})).await?;
    fixture.bids("plain", "reserve", &[("ann", 49)]).await?;
    fixture.bids("plain", "cancelled", &[("ann", 49)]).await?;
    client.done("plain.cancel", &key("cancelled"), json!({}), None).await?;
    fixture.refused("plain", "cancelled", ("bob", 99), Code::WrongState).await?;
    fixture.clock.advance(Duration::from_secs(10));
    client.done("plain.close", &key("none"), json!({}), None).await?;
    same("what was closed", &client.drain_workers_of("plain").await?, &1)?;
    for (id, state) in [("none", "UNSOLD"), ("reserve", "UNSOLD"), ("cancelled", "CANCELLED")] {
        client.shows("plain", &key(id), &json!({"state": state, "winner": null})).await?;
    }
    Ok(())
}

async fn bad_input_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    for (name, value) in [
        ("ends_at", json!(fixture.clock.now().to_string())),
        ("starts_at", json!(fixture.after(60).to_string())),
        ("start_price", json!(0)),
        ("reserve", json!(-1)),
        ("start_price", json!(1_000_000_000_000_001_i64)),
    ] {
        let mut input = json!({"lot_id": "a", "ends_at": fixture.after(60).to_string()});
        input[name] = value;
        client.refused("lot.create", &[], input, None, Code::InvalidInput).await?;
    }
    fixture.create("lot", "a", 60, json!({"seller": "sue", "start_price": 10})).await?;
    for amount in
        [json!(0), json!(-5), json!(1_000_000_000_000_001_i64), json!(i64::MAX), json!(1.5), json!("9")]
    {
        let input = json!({"bidder_id": "ann", "amount": amount});
        client.refused("lot.bid", &key("a"), input, None, Code::InvalidInput).await?;
    }
    client.refused("lot.bid", &key("a"), json!({"amount": 10}), None, Code::InvalidInput).await?;
    let mut named = bid("ann", 10);
    named["bid_id"] = json!("b1");
    let told = client.call_as("another", "lot.bid", &key("a"), named, None).await;
    same("another id", &told.err().map(|refusal| refusal.code), &Some(Code::InvalidInput))?;
    fixture.refused("lot", "a", ("sue", 100), Code::Forbidden).await?;
    let untouched = json!({"bids": 0, "price": null, "version": 1});
    client.shows("lot", &key("a"), &untouched).await?;
    fixture.refused("lot", "a", ("ann", 9), Code::TooLow).await?;
    client.shows("lot", &key("a"), &untouched).await?;
    same("what is kept", &fixture.listed("a", "REJECTED", 1).await?, &vec![json!(["ann", 9])])?;
    // The greatest amount is a bid, and there is none above it.
    let most = 1_000_000_000_000_000;
    fixture.bids("lot", "a", &[("ann", most)]).await?;
    fixture.refused("lot", "a", ("bob", most), Code::TooLow).await
}

async fn bids_are_listed_in_their_order(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    fixture.create("lot", "a", 60, json!({})).await?;
    fixture.create("lot", "b", 60, json!({})).await?;
    for number in 1..=9 {
        fixture.bids("lot", "a", &[("ann", 10 * number)]).await?;
        fixture.refused("lot", "a", ("bob", 10 * number), Code::TooLow).await?;
    }
    let expected: Vec<Json> = (1..=9).rev().map(|number| json!(["ann", 10 * number])).collect();
    same("accepted", &fixture.listed("a", "ACCEPTED", 9).await?, &expected)?;
    same("rejected", &fixture.listed("a", "REJECTED", 9).await?.len(), &9)?;
    same("of another lot", &fixture.listed("b", "ACCEPTED", 0).await?, &Vec::new())?;
    // Page by page, over all buckets.
    let mut paged = Vec::new();
    let mut input = json!({"lot_id": "a", "limit": 2});
    loop {
        let page = fixture.client.done("lot_bid.list", &[], input.clone(), None).await?;
        let rows = page.body.as_array().context("no list")?;
        ensure!(rows.len() <= 2, "a page of {} rows", rows.len());
        paged.extend(rows.iter().map(|row| json!([row["bidder_id"], row["amount"]])));
        let Some(next) = page.next else { break };
        input["cursor"] = json!(next);
    }
    same("page by page", &paged, &expected)
}

async fn bidding_and_closing_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = AuctionFixture::open(namespace).await?;
    let client = &fixture.client;
    fixture.create("plain", "a", 60, json!({})).await?;
    fixture.bids("plain", "a", &[("ann", 10)]).await?;
    // A closer and a bidder were paused with their plans in their hands.
    let bidding = client.drafted("plain.bid", &key("a"), bid("bob", 20), None).await?;
    fixture.clock.advance(Duration::from_secs(60));
    let closing = client.drafted("plain.close", &key("a"), json!({}), None).await?;
    client.too_late(&bidding).await?;
    client.done("plain.close", &key("a"), json!({}), None).await?;
    client.too_late(&closing).await?;
    client.too_late(&bidding).await?;
    client.shows("plain", &key("a"), &json!({"state": "SOLD", "bidder_id": "ann", "version": 3})).await?;
    // Between the reading of the winner and the close, an operator voids the bid.
    fixture.create("plain", "b", 60, json!({})).await?;
    fixture.bids("plain", "b", &[("ann", 10)]).await?;
    let voided = json!({"bidder_id": "bob", "amount": 20, "bid_id": "voided"});
    client.done("plain.bid", &key("b"), voided, None).await?;
    fixture.clock.advance(Duration::from_secs(60));
    let closing = client.drafted("plain.close", &key("b"), json!({}), None).await?;
    client.done("plain.void", &key("b"), json!({"bid_id": "voided"}), None).await?;
    client.too_late(&closing).await?;
    client.done("plain.close", &key("b"), json!({}), None).await?;
    client.shows("plain", &key("b"), &json!({"state": "SOLD", "bidder_id": "ann", "price": 10})).await
}

// The cases of the other files, under the names of this one.
use combining::{
    a_bid_in_a_batch, a_late_original_changes_nothing, a_leader_that_goes_away_is_replaced,
    a_process_dies_in_the_middle_of_a_group, a_repeated_bid_gets_its_first_answer, an_id_names_one_bid,
    bidders_in_two_processes_share_a_lot, bids_arrive_together, conditions_of_callers_hold,
    lost_answers_place_nothing_twice, one_bid_at_a_time, rules_of_the_resource_hold_in_a_group,
};
use modes::{
    a_lot_is_bought_at_once, a_lot_is_bought_while_bids_are_below, a_low_bid_and_a_void_contend,
    a_void_and_a_bid_contend, an_operator_voids_bids, proxy_bids_hide_their_maximum,
    rejected_bids_may_be_counted, sealed_bids_are_shown_at_the_close, the_winner_is_told_once,
};
use times::{
    a_bid_is_rejected_by_the_clock_as_it_is, a_wrong_clock_does_not_move_the_end,
    accepted_bids_near_the_end_move_it, lots_of_a_sale_end_one_after_the_other,
    rejected_bids_do_not_move_the_end, the_end_moves_to_its_limit, the_engines_clock_decides_what_is_early,
    the_engines_clock_decides_what_is_late,
};
