//! The machine of lots: rules, assignments and the rows that change together.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use statehouse_store::guard::{column, now as engine_now};
use statehouse_store::{Query, Row, Step, Value};

use super::actions::LotActions;
use super::rules::{BestBid, OfferedBid};
use super::{
    ACCEPTED, AMOUNT, AT, AuctionSpec, BEST_BID_ID, BID_BUCKETS, BID_ID, BIDDER_ID, BIDS, BUY_NOW, BuyNow,
    CANCELLED, ENDS_AT, HARD_END, MAX_AMOUNT, MIN_NEXT, OPEN, POSITION, PRICE, REJECTED_COUNT, RESERVE,
    RESERVE_MET, RUNNER_AMOUNT, RUNNER_BID_ID, RUNNER_BIDDER_ID, RUNNER_UP_AMOUNT, RUNNER_UP_BIDDER_ID,
    SELLER, SEQ, SOLD, START_PRICE, STARTS_AT, UNSOLD, VOIDED, VOIDED_AT, WINNING_AMOUNT, WINNING_BID_ID,
    best_columns, best_of,
};
use crate::action::{ActionContext, Call, Code, Refusal};
use crate::declare::ActionSpec;
use crate::declare::machine::{
    Gather, Gathered, Machine, MachinePart, MachineSpec, RowOrigin, Scene, Transition, TransitionCase,
    absent, from, null,
};
use crate::declare::rule::{Rule, bind, col, input, is_null, now, now_plus};
use crate::declare::table::{CREATED_AT, STATE};
use crate::infra::effect::EffectRequest;
use crate::resource::key_text;

/// The part that bids fire.
pub(super) const BID: &str = "bid";
/// Its cases.
pub(super) const PLAIN: &str = "plain";
pub(super) const EXTENDING: &str = "extending";
pub(super) const CAPPED: &str = "capped";
pub(super) const LOW: &str = "low";
pub(super) const LATE: &str = "late";
pub(super) const EARLY: &str = "early";
pub(super) const CLOSED: &str = "closed";

/// What a lot whose end has come is called.
const OVER: &str = "{what} ended at {ends_at}";
const NOT_BEGUN: &str = "{what} begins at {starts_at}; bid then";

/// The machine of lots.
pub(super) fn of_lots(auction: &Arc<AuctionSpec>, actions: LotActions) -> MachineSpec {
    let LotActions { create, buy_now, close, cancel, void } = actions;
    let mut machine = Machine::of(&auction.name, &auction.lots)
        .transition(Transition::call(create, created(auction)).bind(ENDS_AT, ends_at(auction.stagger)))
        .transition(Transition::part(BID, placed(auction)).reading())
        .transition(closed(auction, close))
        .transition(Transition::call(cancel, from([OPEN]).to(CANCELLED).event("cancelled")))
        .transition(voided(auction, void));
    if let Some(buy_now) = buy_now {
        machine = machine.transition(bought(auction, buy_now));
    }
    machine
}

/// The end that a call of `create` gives: later by `stagger` for each position of the lot in its sale.
fn ends_at(
    stagger: Option<Duration>,
) -> impl Fn(&Scene<'_>) -> Result<Value, Refusal> + Send + Sync + 'static {
    move |scene| {
        let inputs = scene.inputs();
        let given = |name: &str| inputs.and_then(|inputs| inputs.time(name));
        let planned = given(ENDS_AT).ok_or_else(|| Refusal::field(ENDS_AT, "it is required"))?;
        let position = inputs.and_then(|inputs| inputs.count(POSITION)).unwrap_or(0);
        let position = u32::try_from(position).map_err(|_| Refusal::field(POSITION, "it is out of range"))?;
        let later = stagger.and_then(|stagger| stagger.checked_mul(position)).unwrap_or_default();
        let ends_at = planned.plus(later);
        if ends_at <= given(STARTS_AT).unwrap_or(scene.now_here) {
            return Err(Refusal::field(ENDS_AT, "the end must be after the start"));
        }
        Ok(Value::Time(ends_at))
    }
}

fn created(auction: &Arc<AuctionSpec>) -> TransitionCase {
    let until = auction.extension.map_or(Duration::ZERO, |extension| extension.until);
    let case = absent()
        .to(OPEN)
        .event("created")
        .set(CREATED_AT, now())
        .set_with(STARTS_AT, |scene| {
            let given = scene.inputs().and_then(|inputs| inputs.time(STARTS_AT));
            Ok(given.map_or_else(|| engine_now().into(), |at| Value::Time(at).into()))
        })
        .set(ENDS_AT, bind(ENDS_AT))
        .set_with(HARD_END, move |scene| match scene.bound(ENDS_AT) {
            Some(Value::Time(at)) => Ok(Value::Time(at.plus(until)).into()),
            _ => Err(Refusal::field(ENDS_AT, "it is required")),
        })
        .set_given([SELLER, RESERVE, BUY_NOW])
        .set_with(START_PRICE, |scene| Ok(start_price(scene).into()))
        .set_with(MIN_NEXT, |scene| Ok(start_price(scene).into()))
        .set_with(RESERVE_MET, |_| Ok(false.into()))
        .set_with(BIDS, |_| Ok(0.into()))
        .set_with(REJECTED_COUNT, |_| Ok(0.into()))
        .set_with(BID_BUCKETS, {
            let buckets = i64::from(auction.buckets);
            move |_| Ok(buckets.into())
        });
    let Some(details) = auction.details.clone() else { return case };
    let names: Vec<String> = auction.fields.iter().map(|field| field.name.clone()).collect();
    case.parts([], move |scene| {
        let step = Step::insert(details.table(), scene.key.iter().cloned());
        let given = names.iter().filter_map(|name| Some((name, scene.inputs()?.value(name)?)));
        let step = given.fold(step, |step, (name, value)| step.set(name, value.clone()));
        Ok(vec![step.label("details").into()])
    })
}

fn start_price(scene: &Scene<'_>) -> i64 {
    scene.inputs().and_then(|inputs| inputs.int(START_PRICE)).unwrap_or(1)
}

/// I2: bids are accepted from the start on,
fn begun(case: TransitionCase) -> TransitionCase {
    case.rule("begun", col(STARTS_AT).le(now()), Code::WrongState, NOT_BEGUN)
}

/// and before the end.
fn in_time(case: TransitionCase) -> TransitionCase {
    case.rule("in time", col(ENDS_AT).gt(now()), Code::Expired, OVER)
}

/// The cases of bids. Their rules read the clock: what else a bid is judged by, the fence covers.
fn placed(auction: &AuctionSpec) -> Vec<TransitionCase> {
    let mut cases = accepted(auction);
    let rejected = |name: &'static str, origin: RowOrigin| {
        let case = match auction.keeps_rejected {
            true => origin.checked(),
            false => origin.to_same().set(REJECTED_COUNT, bind(REJECTED_COUNT)),
        };
        case.named(name).event("bid_rejected")
    };
    let rule = |case: TransitionCase, label, rule: Rule| case.rule_or_retry(label, rule);
    cases.extend([
        in_time(begun(rejected(LOW, from([OPEN])))),
        rule(rejected(LATE, from([OPEN])), "over", col(ENDS_AT).le(now())),
        rule(rejected(EARLY, from([OPEN])), "not begun", col(STARTS_AT).gt(now())),
        rejected(CLOSED, from([SOLD, UNSOLD, CANCELLED])),
    ]);
    cases
}

/// I2 and I3: an accepted bid, and what it does to the end.
fn accepted(auction: &AuctionSpec) -> Vec<TransitionCase> {
    let best = |case: TransitionCase| {
        let columns = [
            PRICE,
            MIN_NEXT,
            BEST_BID_ID,
            BIDDER_ID,
            MAX_AMOUNT,
            RUNNER_BID_ID,
            RUNNER_BIDDER_ID,
            RUNNER_AMOUNT,
            RESERVE_MET,
            BIDS,
            REJECTED_COUNT,
        ];
        columns.into_iter().fold(case, |case, name| case.set(name, bind(name))).event("bid")
    };
    let case = |name: &'static str| best(begun(from([OPEN]).to_same().named(name)));
    let Some(extension) = auction.extension else { return vec![in_time(case(PLAIN))] };
    let near = col(ENDS_AT).le(now_plus(extension.within));
    let room = || col(HARD_END).ge(now_plus(extension.to));
    let moving = |name: &'static str| in_time(case(name)).rule_or_retry("near the end", near.clone());
    vec![
        case(PLAIN).rule_or_retry("before", col(ENDS_AT).gt(now_plus(extension.within))),
        moving(EXTENDING).rule_or_retry("room", room()).set(ENDS_AT, now_plus(extension.to)),
        moving(CAPPED).rule_or_retry("no room", room().negated()).set(ENDS_AT, col(HARD_END)),
    ]
}

/// I4: the end of a lot. The winner is taken from the row that the fence guards.
fn closed(auction: &Arc<AuctionSpec>, action: ActionSpec) -> Transition {
    let sold = from([OPEN]).to(SOLD).named("sold").event("sold");
    let winner = {
        let auction = auction.clone();
        move |scene: &Scene<'_>| {
            let lot = scene.loaded_row()?;
            let best = best_of(lot)?;
            let (Some(leader), Some(price)) = (&best.leader, best.price) else {
                return Err(lot.corrupt(BEST_BID_ID, "is null in a lot that is sold").into());
            };
            let runner_up = best.runner_up.as_ref().filter(|_| auction.runner_up);
            let winner = auction
                .winner(scene.key)
                .set(WINNING_BID_ID, leader.bid_id.as_str())
                .set(BIDDER_ID, leader.bidder_id.as_str())
                .set(WINNING_AMOUNT, price)
                .set(RUNNER_UP_BIDDER_ID, runner_up.map_or(Value::Null, |bid| bid.bidder_id.as_str().into()))
                .set(RUNNER_UP_AMOUNT, runner_up.map_or(Value::Null, |bid| bid.amount.into()));
            auction.won(scene, winner, &leader.bidder_id, price)
        }
    };
    let unsold = from([OPEN]).to(UNSOLD).named("unsold").event("unsold");
    Transition::deadline_or_call(action, [sold.parts([], winner), unsold]).reading().try_pick(|scene| {
        let best = best_of(scene.loaded_row()?)?;
        Ok(usize::from(best.leader.is_none() || !best.reserve_met))
    })
}

/// I6 and I7: the lot is bought at once.
fn bought(auction: &Arc<AuctionSpec>, action: ActionSpec) -> Transition {
    let case =
        from([OPEN]).to(SOLD).event("bought").refused_in(CANCELLED, Code::WrongState, "{what} was cancelled");
    let case = in_time(begun(case)).rule(
        "not the seller",
        is_null(SELLER).or(col(SELLER).ne(input(BIDDER_ID))),
        Code::Forbidden,
        "{what} is sold by {seller}, who may not buy it",
    );
    let case = match auction.buy_now {
        BuyNow::Always => case.rule(
            "below",
            is_null(PRICE).or(col(PRICE).lt(col(BUY_NOW))),
            Code::WrongState,
            "bids for {what} have reached {buy_now}; bid",
        ),
        BuyNow::Never | BuyNow::UntilFirstBid => {
            case.rule("no bid", col(BIDS).eq(0), Code::WrongState, "{what} has a bid; bid")
        }
    };
    // The bids that stood lead no more.
    let case = case.set(PRICE, col(BUY_NOW)).set(BIDDER_ID, input(BIDDER_ID)).set(BEST_BID_ID, null());
    let auction = auction.clone();
    let case = case.parts([], move |scene| {
        let Some(price) = scene.loaded_row()?.get_optional_int(BUY_NOW)? else {
            let message = format!("{} cannot be bought at once; bid", auction.what(scene.key));
            return Err(Refusal::new(Code::WrongState, message));
        };
        let bidder = scene.inputs().and_then(|inputs| inputs.text(BIDDER_ID)).unwrap_or_default();
        let winner = auction.winner(scene.key).set(BIDDER_ID, bidder).set(WINNING_AMOUNT, price);
        auction.won(scene, winner, bidder, price)
    });
    Transition::call(action, case).reading_only([BUY_NOW])
}

/// An operator voids a bid: the best bid is that of the others. Bids that are accepted write the lot, so the fence covers them.
fn voided(auction: &Arc<AuctionSpec>, action: ActionSpec) -> Transition {
    let best = best_columns_of_bound();
    let case = best
        .into_iter()
        .fold(from([OPEN]).to_same().event("bid_voided"), |case, name| case.set(name, bind(name)));
    let case = case.event_field(BID_ID, |scene| {
        scene.inputs().and_then(|inputs| inputs.text(BID_ID)).map_or(json!(null), |id| json!(id))
    });
    let auction = auction.clone();
    let bids = auction.clone();
    let case = case.parts([], move |scene| {
        let bid_id = scene.inputs().and_then(|inputs| inputs.text(BID_ID)).unwrap_or_default();
        let key = bids.bid_key(scene.loaded_row()?, bid_id)?;
        let step = Step::update(bids.bids.table(), key).guard(column(STATE).eq(ACCEPTED));
        Ok(vec![step.set(STATE, VOIDED).set(VOIDED_AT, engine_now()).label("voided").into()])
    });
    Transition::call(action, case).reading().gather(OtherBids(auction)).codes(&[Code::WrongState])
}

fn best_columns_of_bound() -> [&'static str; 9] {
    [
        PRICE,
        MIN_NEXT,
        BEST_BID_ID,
        BIDDER_ID,
        MAX_AMOUNT,
        RUNNER_BID_ID,
        RUNNER_BIDDER_ID,
        RUNNER_AMOUNT,
        RESERVE_MET,
    ]
}

/// Reads all bids of a lot and computes the best one without the bid that is voided.
struct OtherBids(Arc<AuctionSpec>);

#[async_trait]
impl Gather for OtherBids {
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        row: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        let auction = &self.0;
        let lot = row.ok_or_else(|| Refusal::new(Code::NotFound, auction.what(&call.key)))?;
        let voided = call.input.get_text(BID_ID)?;
        let mut bids = auction.all_bids(call, cx).await?;
        let known = bids.iter().find(|bid| bid.text(BID_ID) == Some(voided));
        let what = auction.what(&call.key);
        match known.map(|bid| bid.get_text(STATE)).transpose()? {
            None => return Err(Refusal::new(Code::NotFound, format!("{what} has no bid {voided}"))),
            Some(ACCEPTED) => {}
            Some(state) => {
                let message =
                    format!("bid {voided} for {what} is {state}; only an ACCEPTED one can be voided");
                return Err(Refusal::new(Code::WrongState, message));
            }
        }
        bids.retain(|bid| bid.text(STATE) == Some(ACCEPTED) && bid.text(BID_ID) != Some(voided));
        bids.sort_by_key(|bid| bid.int(SEQ));
        let mut offered = Vec::with_capacity(bids.len());
        for bid in &bids {
            offered.push(OfferedBid {
                bid_id: bid.get_text(BID_ID)?,
                bidder_id: bid.get_text(BIDDER_ID)?,
                amount: bid.get_int(AMOUNT)?,
            });
        }
        let best = BestBid::of(&auction.terms(lot)?, offered);
        let binds = best_columns(&best).map(|(name, value)| (name.into(), value)).into();
        Ok(Gathered { binds, ..Gathered::default() })
    }
}

/// Rows of a page of bids.
const PAGE: usize = 500;

impl AuctionSpec {
    /// Every bid of a lot, by strong reads.
    async fn all_bids(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Vec<Row>, Refusal> {
        let mut bids = Vec::new();
        for bucket in 0..self.buckets {
            let partition = call.key.iter().cloned().chain([i64::from(bucket).into()]);
            let query = Query::table(self.bids.table(), &call.tenant, partition)?.limit(PAGE)?;
            let mut after = None;
            loop {
                let page = match after {
                    Some(cursor) => cx.store.query(&query.clone().after(cursor)?).await?,
                    None => cx.store.query(&query).await?,
                };
                bids.extend(page.rows);
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
        }
        Ok(bids)
    }

    /// Inserts the winner of a lot.
    fn winner(&self, lot: &[Value]) -> Step {
        Step::insert(self.winners.table(), lot.iter().cloned()).set(AT, engine_now()).label("winner")
    }

    /// The winner's row, and the effect that tells the winner.
    fn won(
        &self,
        scene: &Scene<'_>,
        winner: Step,
        bidder: &str,
        amount: i64,
    ) -> Result<Vec<MachinePart>, Refusal> {
        let mut parts = vec![MachinePart::Step(winner)];
        if let Some(outbox) = &self.on_won {
            let key = key_text(scene.key);
            let request = EffectRequest {
                key: format!("{}:{key}", self.name),
                body: json!({"auction": self.name, "key": key, BIDDER_ID: bidder, WINNING_AMOUNT: amount}),
                ..EffectRequest::default()
            };
            let sent = outbox.send(scene.tenant, &request, scene.now_here)?;
            parts.push(MachinePart::Prepared { resource: outbox.name().to_owned(), parts: sent });
        }
        Ok(parts)
    }
}
