//! Bids: how concurrent ones are judged together (I1, I2, I3, I5).

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{Comparison, now, now_plus};
use statehouse_store::{Event, Expr, Guard, Operand, Row, Step, StoreError, Table, Tenant, Time, Value};

use super::rules::{BestBid, BiddingMode, OfferedBid};
use super::transitions::{CAPPED, CLOSED, EARLY, EXTENDING, LATE, LOW, PLAIN};
use super::{
    ACCEPTED, AMOUNT, AT, AuctionSpec, BID_ID, BIDDER_ID, BIDS, CANCELLED, ENDS_AT, HARD_END, LEADING,
    MIN_NEXT, OPEN, PRICE, REASON, REJECTED, REJECTED_COUNT, SELLER, SEQ, STARTS_AT, best_columns, best_of,
};
use crate::action::{ActionContext, Answer, Call, Code, Refusal};
use crate::declare::combine::{Combine, CombinedCall, Judged, RefusedSeal, Seal, StoredCall};
use crate::declare::machine::PartUse;
use crate::declare::table::STATE;
use crate::prepare::take_field;

/// How bids for one lot are judged.
pub(super) struct BidRules {
    pub auction: Arc<AuctionSpec>,
    pub bid: PartUse,
}

/// A lot, and what a group of bids makes of it.
#[derive(Clone, Debug)]
pub(super) struct LotState {
    row: Row,
    best: BestBid,
    /// Bids that are rejected and only counted.
    rejected: i64,
    /// What the event says of the bids that were accepted.
    accepted: Vec<Json>,
    /// Whether a bid of the group is stored.
    stores: bool,
}

/// The clock rules under which a group is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum BidCase {
    /// In time, and not near the end.
    Plain,
    /// Near the end, which can move.
    Extending,
    /// Near the end, which moves to its limit.
    Capped,
    Late,
    Early,
    /// The lot is not open.
    Closed,
}

impl BidCase {
    const ALL: [BidCase; 6] =
        [BidCase::Plain, BidCase::Extending, BidCase::Capped, BidCase::Late, BidCase::Early, BidCase::Closed];

    fn of(index: usize) -> BidCase {
        BidCase::ALL.get(index).copied().unwrap_or(BidCase::Closed)
    }
}

/// Why a bid is rejected, as its row has it.
const REASON_LOW: &str = "low";
const REASON_LATE: &str = "late";
const REASON_EARLY: &str = "early";
const REASON_CANCELLED: &str = "cancelled";

impl LotState {
    fn of(row: Row) -> Result<LotState, Refusal> {
        let best = best_of(&row)?;
        let rejected = row.get_int(REJECTED_COUNT)?;
        Ok(LotState { row, best, rejected, accepted: Vec::new(), stores: false })
    }
}

impl BidRules {
    /// Near the end: whether there is room to move it, as this process sees it.
    fn near_end(&self, lot: &Row, now_here: Time) -> BidCase {
        match (self.auction.extension, lot.time(HARD_END)) {
            (None, _) => BidCase::Plain,
            (Some(extension), Some(hard_end)) if hard_end < now_here.plus(extension.to) => BidCase::Capped,
            (Some(_), _) => BidCase::Extending,
        }
    }

    /// The case to try after the engine has refused another one.
    fn after_refusal(&self, lot: &Row, case: BidCase, guard: &Guard, now_here: Time) -> BidCase {
        let Guard::Compare(Operand::Column(name), comparison, Operand::Now { plus_micros }) = guard else {
            return case;
        };
        match (name.as_str(), comparison, plus_micros) {
            (STARTS_AT, Comparison::Le, _) => BidCase::Early,
            (STARTS_AT, ..) => BidCase::Plain,
            (ENDS_AT, Comparison::Gt, 0) => BidCase::Late,
            (ENDS_AT, Comparison::Gt, _) | (ENDS_AT, Comparison::Le, 0) => self.near_end(lot, now_here),
            (ENDS_AT, Comparison::Le, _) => BidCase::Plain,
            (HARD_END, Comparison::Ge, _) => BidCase::Capped,
            (HARD_END, ..) => BidCase::Extending,
            _ => case,
        }
    }

    /// Why a bid is rejected whatever its amount is.
    fn rejected_by_time(&self, lot: &Row, case: BidCase) -> Result<Option<&'static str>, Refusal> {
        Ok(match case {
            BidCase::Plain | BidCase::Extending | BidCase::Capped => None,
            BidCase::Late => Some(REASON_LATE),
            BidCase::Early => Some(REASON_EARLY),
            BidCase::Closed if lot.get_text(STATE)? == CANCELLED => Some(REASON_CANCELLED),
            BidCase::Closed => Some(REASON_LATE),
        })
    }

    /// What a rejected bidder is told: of the lot as it was when the bid was judged.
    fn refusal(&self, call: &Call, reason: &str, told: &RejectedBid) -> Refusal {
        let (what, RejectedBid { price, min_next, ends_at, .. }) = (self.auction.what(&call.key), told);
        let amount = call.input.int(AMOUNT).unwrap_or_default();
        let price = price.map_or(String::new(), |price| format!(" at price {price}"));
        match reason {
            REASON_LATE => {
                Refusal::new(Code::Expired, format!("{what} ended at {ends_at}; the bid came too late"))
            }
            REASON_EARLY => {
                Refusal::new(Code::WrongState, format!("{what} has not begun; read starts_at and bid then"))
            }
            REASON_CANCELLED => Refusal::new(Code::WrongState, format!("{what} was cancelled")),
            _ => {
                let message = format!(
                    "{what} stands{price} and needs at least {min_next} from this bidder, not {amount}: bid more"
                );
                Refusal::new(Code::TooLow, message)
            }
        }
    }

    /// The row of a bid, accepted or not.
    fn receipt_step(&self, id: &str, lot: &Row, after: &BidAfter<'_>) -> Result<Step, Refusal> {
        let key = self.auction.bid_key(lot, id)?;
        let shown = |value: Value| if self.auction.mode == BiddingMode::Sealed { Value::Null } else { value };
        let ends_at = match (after.reason, after.case, self.auction.extension) {
            (None, BidCase::Extending, Some(extension)) => Expr::from(now_plus(extension.to)),
            (None, BidCase::Capped, _) => lot.get(HARD_END).cloned().unwrap_or(Value::Null).into(),
            _ => lot.get(ENDS_AT).cloned().unwrap_or(Value::Null).into(),
        };
        let best = after.best;
        let leads = best.leader.as_ref().is_some_and(|leader| leader.bidder_id == after.bidder_id);
        let text = |text: Option<&str>| text.map_or(Value::Null, Value::from);
        Ok(Step::insert(self.auction.bids.table(), key)
            .set(BIDDER_ID, after.bidder_id)
            .set(AMOUNT, after.amount)
            .set(STATE, if after.reason.is_some() { REJECTED } else { ACCEPTED })
            .set(REASON, text(after.reason))
            .set(SEQ, best.bids)
            .set(PRICE, shown(best.price.map_or(Value::Null, Value::from)))
            .set(MIN_NEXT, after.least)
            .set(LEADING, shown(leads.into()))
            .set(ENDS_AT, ends_at)
            .set(AT, now()))
    }

    /// What the event of a group says of an accepted bid. Amounts of proxy bids and whose sealed bids are, are secrets.
    fn told(&self, id: &str, bidder_id: &str, best: &BestBid) -> Json {
        let mut told = Map::from_iter([(BID_ID.to_owned(), json!(id)), (SEQ.to_owned(), json!(best.bids))]);
        if self.auction.mode != BiddingMode::Sealed {
            let leads = best.leader.as_ref().is_some_and(|leader| leader.bidder_id == bidder_id);
            told.insert(BIDDER_ID.into(), json!(bidder_id));
            told.insert(PRICE.into(), json!(best.price));
            told.insert(LEADING.into(), json!(leads));
        }
        told.insert(MIN_NEXT.into(), json!(best.min_next));
        Json::Object(told)
    }

    /// The answer to an accepted bid. It names no column that changes later.
    fn accepted_answer(&self, call: &Call, bid: &Json, ends_at: &Json) -> Answer {
        let mut body = Map::new();
        for (field, value) in self.auction.key.iter().zip(&call.key) {
            body.insert(field.name.clone(), value.to_json());
        }
        for name in [BID_ID, SEQ, PRICE, MIN_NEXT, LEADING] {
            body.insert(name.to_owned(), bid.get(name).cloned().unwrap_or_default());
        }
        for name in [BIDDER_ID, AMOUNT] {
            body.insert(name.to_owned(), call.input.json(name));
        }
        body.insert(STATE.to_owned(), json!(ACCEPTED));
        body.insert(ENDS_AT.to_owned(), ends_at.clone());
        Answer::row(Json::Object(body))
    }
}

fn stored(receipt: Step, refusal: Option<Refusal>) -> Judged {
    Judged::Stored(Box::new(StoredCall { receipt, others: Vec::new(), refusal }))
}

/// A bid as its row tells of it.
struct BidAfter<'b> {
    bidder_id: &'b str,
    amount: i64,
    /// Why it is rejected, if it is.
    reason: Option<&'static str>,
    case: BidCase,
    /// The best bid after it.
    best: &'b BestBid,
    /// The least amount that the next bid needs, or that a rejected one would have needed.
    least: i64,
}

/// What a rejected bidder is told about.
struct RejectedBid {
    price: Option<i64>,
    min_next: i64,
    ends_at: String,
}

impl RejectedBid {
    fn of(lot: &Row, best: &BestBid, least: i64, is_sealed: bool) -> Result<RejectedBid, Refusal> {
        let ends_at = lot.get_time(ENDS_AT)?.to_string();
        Ok(RejectedBid { price: best.price.filter(|_| !is_sealed), min_next: least, ends_at })
    }

    fn of_receipt(receipt: &Row) -> Result<RejectedBid, Refusal> {
        let ends_at = receipt.get_time(ENDS_AT)?.to_string();
        let (price, min_next) = (receipt.get_optional_int(PRICE)?, receipt.get_int(MIN_NEXT)?);
        Ok(RejectedBid { price, min_next, ends_at })
    }
}

#[async_trait]
impl Combine for BidRules {
    type State = LotState;

    fn most(&self) -> usize {
        self.auction.fold
    }

    fn id_input(&self) -> &'static str {
        BID_ID
    }

    fn receipt(&self, state: &LotState, _: &Call, id: &str) -> Result<(Arc<Table>, Vec<Value>), Refusal> {
        Ok((self.auction.bids.table().clone(), self.auction.bid_key(&state.row, id)?))
    }

    async fn load(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        _: Option<&LotState>,
    ) -> Result<LotState, Refusal> {
        let row = cx.row(self.auction.lots.table(), &call.tenant, call.key.iter().cloned()).await?;
        let missing = || format!("{} does not exist", self.auction.what(&call.key));
        LotState::of(row.ok_or_else(|| Refusal::new(Code::NotFound, missing()))?)
    }

    fn row<'s>(&self, state: &'s LotState) -> &'s Row {
        &state.row
    }

    fn pick(&self, state: &LotState, now_here: Time, refused: Option<RefusedSeal<'_>>) -> usize {
        let lot = &state.row;
        let case = match refused {
            _ if lot.text(STATE) != Some(OPEN) => BidCase::Closed,
            Some(RefusedSeal { case, guard }) => self.after_refusal(lot, BidCase::of(case), guard, now_here),
            // Whether it is too early or too late, only the engine says.
            None => match (self.auction.extension, lot.time(ENDS_AT)) {
                (Some(extension), Some(ends_at)) if ends_at <= now_here.plus(extension.within) => {
                    self.near_end(lot, now_here)
                }
                _ => BidCase::Plain,
            },
        };
        case as usize
    }

    fn judge(&self, state: &mut LotState, case: usize, call: &CombinedCall<'_>) -> Result<Judged, Refusal> {
        let case = BidCase::of(case);
        let (bidder_id, amount) = (call.call.input.get_text(BIDDER_ID)?, call.call.input.get_int(AMOUNT)?);
        if state.row.text(SELLER) == Some(bidder_id) {
            let message =
                format!("{} is sold by {bidder_id}, who may not bid", self.auction.what(&call.call.key));
            return Ok(Judged::Refused(Refusal::new(Code::Forbidden, message)));
        }
        let terms = self.auction.terms(&state.row)?;
        let reason = match self.rejected_by_time(&state.row, case)? {
            Some(reason) => Some(reason),
            None => {
                let bid = OfferedBid { bid_id: call.id, bidder_id, amount };
                match state.best.place(&terms, &bid) {
                    Ok(best) => {
                        state.best = best;
                        None
                    }
                    Err(_) => Some(REASON_LOW),
                }
            }
        };
        let Some(reason) = reason else {
            let (best, least) = (&state.best, state.best.min_next);
            let after = BidAfter { bidder_id, amount, reason: None, case, best, least };
            let receipt = self.receipt_step(call.id, &state.row, &after)?;
            state.accepted.push(self.told(call.id, bidder_id, &state.best));
            state.stores = true;
            return Ok(stored(receipt, None));
        };
        let best = &state.best;
        let least = best.least_from(&terms, bidder_id);
        let is_sealed = self.auction.mode == BiddingMode::Sealed;
        let told = RejectedBid::of(&state.row, best, least, is_sealed)?;
        let refusal = self.refusal(call.call, reason, &told);
        if !self.auction.keeps_rejected {
            state.rejected = state.rejected.saturating_add(1);
            return Ok(Judged::Refused(refusal));
        }
        let after = BidAfter { bidder_id, amount, reason: Some(reason), case, best, least };
        let receipt = self.receipt_step(call.id, &state.row, &after)?;
        state.stores = true;
        Ok(stored(receipt, Some(refusal)))
    }

    fn seal(
        &self,
        tenant: &Tenant,
        before: &LotState,
        after: &LotState,
        case: usize,
        now_here: Time,
    ) -> Result<Option<Seal>, Refusal> {
        if !after.stores && after.rejected == before.rejected {
            return Ok(None);
        }
        let name = match BidCase::of(case) {
            BidCase::Plain if !after.accepted.is_empty() => PLAIN,
            BidCase::Extending if !after.accepted.is_empty() => EXTENDING,
            BidCase::Capped if !after.accepted.is_empty() => CAPPED,
            BidCase::Plain | BidCase::Extending | BidCase::Capped => LOW,
            BidCase::Late => LATE,
            BidCase::Early => EARLY,
            BidCase::Closed => CLOSED,
        };
        let firing = self.bid.on(&before.row).case(name);
        let firing = best_columns(&after.best)
            .into_iter()
            .chain([(BIDS, after.best.bids.into()), (REJECTED_COUNT, after.rejected.into())])
            .fold(firing, |firing, (name, value)| firing.bind(name, value));
        let firing = match after.accepted.is_empty() {
            true => firing,
            false => firing.event_field("placed", Json::Array(after.accepted.clone())),
        };
        Ok(Some(Seal { parts: firing.prepare(tenant, now_here)? }))
    }

    fn sealed(&self, _: LotState, row: Row) -> Option<LotState> {
        LotState::of(row).ok()
    }

    fn answer(&self, call: &Call, receipt: &Row) -> Result<Answer, Refusal> {
        if let Some(reason) = receipt.text(REASON) {
            return Err(self.refusal(call, reason, &RejectedBid::of_receipt(receipt)?));
        }
        let bid = receipt.to_json();
        Ok(self.accepted_answer(call, &bid, bid.get(ENDS_AT).unwrap_or(&Json::Null)))
    }

    fn answer_alone(&self, call: &Call, event: &mut Event) -> Result<Answer, StoreError> {
        let ends_at = event.data.pointer(&format!("/row/{ENDS_AT}")).cloned().unwrap_or_default();
        let placed = take_field(event, "placed")?;
        let missing = || StoreError::corrupt(format!("the event {}", event.name), "names no bid");
        let bid = placed.get(0).ok_or_else(missing)?;
        Ok(self.accepted_answer(call, bid, &ends_at))
    }
}
