//! The tables of an auction.

use statehouse_store::Type;

use super::rules::BiddingMode;
use super::{
    AMOUNT, AT, BEST_BID_ID, BID_BUCKETS, BID_ID, BID_STATES, BIDDER_ID, BIDS, BUCKET, BUY_NOW, BY_STATE,
    ENDS_AT, HARD_END, LEADING, MAX_AMOUNT, MIN_NEXT, OPEN, PRICE, REASON, REJECTED_COUNT, RESERVE,
    RESERVE_MET, RUNNER_AMOUNT, RUNNER_BID_ID, RUNNER_BIDDER_ID, RUNNER_UP_AMOUNT, RUNNER_UP_BIDDER_ID,
    SELLER, SEQ, START_PRICE, STARTS_AT, STATES, VOIDED_AT, WINNING_AMOUNT, WINNING_BID_ID,
};
use crate::blueprint::settings::Field;
use crate::declare::TableSpec;
use crate::declare::table::STATE;

/// Hides the last column if a condition holds.
fn hidden_if(condition: bool, spec: TableSpec) -> TableSpec {
    if condition { spec.hidden() } else { spec }
}

/// The auction and its best bid.
pub(super) fn lots(table: String, key: &[Field], mode: BiddingMode, shards: u32) -> TableSpec {
    let is_sealed = mode == BiddingMode::Sealed;
    let spec = TableSpec::named(table)
        .key(key)
        .states(&STATES)
        .text(SELLER)
        .null()
        .about("who sells it, and may not bid")
        .immutable()
        .time(STARTS_AT)
        .about("from when on bids are accepted")
        .immutable()
        .time(ENDS_AT)
        .about("until when bids are accepted")
        .time(HARD_END)
        .about("until when bids near the end can move it")
        .immutable()
        .int(START_PRICE)
        .about("the least price")
        .immutable()
        .int(RESERVE)
        .null()
        .immutable()
        .hidden()
        .int(BUY_NOW)
        .null()
        .about("the price at which it can be bought at once; null if it cannot")
        .immutable();
    let spec = hidden_if(is_sealed, spec.int(PRICE).null().about("what the leader would pay now"));
    let spec = spec.int(MIN_NEXT).about("the least amount that the next bid needs");
    let spec = hidden_if(is_sealed, spec.text(BEST_BID_ID).null().about("the bid that leads"));
    let spec = hidden_if(is_sealed, spec.text(BIDDER_ID).null().about("who leads, or bought it"));
    let spec =
        [MAX_AMOUNT, RUNNER_AMOUNT].into_iter().fold(spec, |spec, name| spec.int(name).null().hidden());
    let spec =
        [RUNNER_BID_ID, RUNNER_BIDDER_ID].into_iter().fold(spec, |s, name| s.text(name).null().hidden());
    hidden_if(is_sealed, spec.flag(RESERVE_MET).about("whether the price has reached the reserve"))
        .int(BIDS)
        .about("how many bids were accepted, those that were voided later included")
        .int(REJECTED_COUNT)
        .about("how many bids were rejected and only counted")
        .int(BID_BUCKETS)
        .immutable()
        .hidden()
        .created_at()
        .updated_at()
        .deadline(&[OPEN], ENDS_AT, shards)
        .index(BY_STATE, &[STATE], &[ENDS_AT])
}

/// The description.
pub(super) fn details(name: &str, key: &[Field], fields: &[Field]) -> TableSpec {
    TableSpec::named(format!("{name}_details")).key(key).fields(fields)
}

/// Every bid. Those of a lot are spread over buckets.
pub(super) fn bids(name: &str, key: &[Field], mode: BiddingMode, buckets: u32) -> TableSpec {
    let spec = TableSpec::named(format!("{name}_bids"))
        .key(key)
        .partition(BUCKET, Type::Int)
        .sort(BID_ID, Type::Text)
        .text(BIDDER_ID)
        .about("who bid")
        .immutable();
    let spec = hidden_if(mode == BiddingMode::Sealed, spec);
    let spec = spec.int(AMOUNT).about("how much, at most").immutable();
    let spec = hidden_if(mode != BiddingMode::Open, spec)
        .states(&BID_STATES)
        .text(REASON)
        .null()
        .about("why it was rejected: `low`, `late`, `early` or `cancelled`")
        .immutable()
        .int(SEQ)
        .about("its number among the accepted bids; of a rejected bid, that of the one before it")
        .immutable()
        .int(PRICE)
        .null()
        .about("the price of the lot after the bid; null if the bids are sealed")
        .immutable()
        .int(MIN_NEXT)
        .about("the least amount that the next bid needed then")
        .immutable()
        .flag(LEADING)
        .null()
        .about("whether it led then; null if the bids are sealed")
        .immutable()
        .time(ENDS_AT)
        .about("the end of the lot after the bid")
        .immutable()
        .time(AT)
        .about("when it was placed")
        .immutable()
        .time(VOIDED_AT)
        .null()
        .about("when an operator voided it")
        .receipt()
        .growing("bid_buckets", buckets);
    let partition: Vec<&str> = key.iter().map(|field| field.name.as_str()).chain([BUCKET, STATE]).collect();
    spec.index(BY_STATE, &partition, &[SEQ])
}

/// The winner of each lot that was sold.
pub(super) fn winners(name: &str, key: &[Field]) -> TableSpec {
    TableSpec::named(format!("{name}_winners"))
        .key(key)
        .text(WINNING_BID_ID)
        .null()
        .about("the bid that won; null if the lot was bought at once")
        .text(BIDDER_ID)
        .about("who won")
        .int(WINNING_AMOUNT)
        .about("what the winner pays")
        .text(RUNNER_UP_BIDDER_ID)
        .null()
        .about("who made the best bid besides the winner's")
        .int(RUNNER_UP_AMOUNT)
        .null()
        .about("how much that was, at most")
        .time(AT)
        .about("when it was sold")
}
