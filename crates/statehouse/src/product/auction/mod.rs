//! A16 Auction / competitive window: lots that bidders compete for until a time, and that one of them gets.
//!
//! ```text
//!              bid, void
//!               ┌────┐
//!       create  ▼    │   close (reserve met), buy_now
//!   (none) ─────► OPEN ─────────────────────────────────► SOLD
//!                 │  │        close (otherwise)
//!                 │  └──────────────────────────────────► UNSOLD
//!                 └───────────── cancel ────────────────► CANCELLED
//! ```
//!
//! **Rows.** `lots(tenant, key…, state, seller, starts_at, ends_at, hard_end, start_price, reserve, buy_now, price, min_next,
//! best_bid_id, bidder_id, max_amount, runner_…, reserve_met, bids, rejected, …, due_shard, due_at, version)`: the auction and
//! its best bid. Everything that a bid is judged by is in this one row, because a guard sees one row.
//! `lot_details(tenant, key…, fields…)`: the description, which bids do not rewrite. `lot_bids(tenant, key…, bucket, bid_id,
//! bidder_id, amount, state, reason, seq, price, min_next, leading, ends_at, at, …)`: every bid, accepted or not, with an index
//! by state and sequence number. `lot_winners(tenant, key…, winning_bid_id, bidder_id, winning_amount, runner_up_…, at)`.
//!
//! **Invariants.**
//! - I1. The best bid is that of all accepted bids in their order. *Bids are combined ([`crate::declare::combine`]): judged one
//!   after the other by [`rules`], written in one plan. Guard of bid:* `version = the one that was judged`.
//! - I2. A bid is accepted between the start and the end only. *Guard of bid:* `starts_at <= now and ends_at > now`, by the
//!   engine's clock. *Guard of a late bid's rejection:* `ends_at <= now`.
//! - I3. The end moves with an accepted bid near it only, to `now + to`, and not past `hard_end`. *Guard of a bid that moves it:*
//!   `ends_at <= now + within and hard_end >= now + to`; *of one that moves it to `hard_end`:* `hard_end < now + to`; *of one
//!   that does not:* `ends_at > now + within`.
//! - I4. A lot closes once, and then has a winner or none. *Guard of close:* `version = the one that was read and ends_at <=
//!   now`; the winner's row, which must be absent, and the effect are in the same plan.
//! - I5. A bid is stored once. *Its row is inserted under the bidder's id for it;* a repetition is answered from that row.
//! - I6. A lot is bought at once at its price only while no bid was accepted. *Guard of buy_now:* `state = 'OPEN' and bids = 0`
//!   (unless `buy_now = "always"`: then the price is below it).
//! - I7. The seller does not bid. *`seller` never changes; it is judged with the bid. Guard of buy_now:* `seller <> bidder`.
//!
//! **Failures.** *Accepted late bid*: I2, on the row that the close changes. *Wrong winner*: I1; the winner is read from the row
//! that the close guards. *Duplicate close*: I4. *Stale current-best read near close*: what was read decides nothing; a bidder is
//! told price, least next bid and end of the row that its bid was judged by.
//!
//! **Hotspots.** *Burst bids near close*, *current-best contention*: `fold = 64` bids are one plan. *Hot auction row*: it has no
//! descriptive fields. *Append hotspot for hot auction*: `bid_buckets = 8` spreads the bids of a lot over partitions.

mod actions;
mod archetype;
mod bids;
mod read;
pub mod rules;
mod settings;
mod tables;
mod transitions;

pub use archetype::ARCHETYPE;

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::log::partition_of;
use statehouse_store::{Row, Value};

use crate::action::Refusal;
use crate::blueprint::settings::Field;
use crate::declare::machine::PartUse;
use crate::declare::{Declare, ResourceSpec, TableDef};
use crate::infra::effect::Outbox;
use crate::resource::key_text;
use crate::view_source::ViewSource;
use rules::{BestBid, BiddingMode, Increments, LotTerms, StandingBid};

/// The states of a lot.
const STATES: [&str; 4] = [OPEN, SOLD, UNSOLD, CANCELLED];
const OPEN: &str = "OPEN";
const SOLD: &str = "SOLD";
const UNSOLD: &str = "UNSOLD";
const CANCELLED: &str = "CANCELLED";
/// How a lot reads that is open and has not begun.
const SCHEDULED: &str = "SCHEDULED";
/// The columns of a lot.
const SELLER: &str = "seller";
const STARTS_AT: &str = "starts_at";
const ENDS_AT: &str = "ends_at";
const HARD_END: &str = "hard_end";
const START_PRICE: &str = "start_price";
const RESERVE: &str = "reserve";
const BUY_NOW: &str = "buy_now";
const PRICE: &str = "price";
const MIN_NEXT: &str = "min_next";
const BEST_BID_ID: &str = "best_bid_id";
const BIDDER_ID: &str = "bidder_id";
const MAX_AMOUNT: &str = "max_amount";
const RUNNER_BID_ID: &str = "runner_bid_id";
const RUNNER_BIDDER_ID: &str = "runner_bidder_id";
const RUNNER_AMOUNT: &str = "runner_amount";
const RESERVE_MET: &str = "reserve_met";
const BIDS: &str = "bids";
const REJECTED_COUNT: &str = "rejected";
const BID_BUCKETS: &str = "bid_buckets";
/// An input of `create`: the place of a lot in the order of a sale.
const POSITION: &str = "position";
/// The columns of a bid.
const BUCKET: &str = "bucket";
const BID_ID: &str = "bid_id";
const AMOUNT: &str = "amount";
const REASON: &str = "reason";
const SEQ: &str = "seq";
const LEADING: &str = "leading";
const AT: &str = "at";
const VOIDED_AT: &str = "voided_at";
/// The states of a bid.
const BID_STATES: [&str; 3] = [ACCEPTED, REJECTED, VOIDED];
const ACCEPTED: &str = "ACCEPTED";
const REJECTED: &str = "REJECTED";
const VOIDED: &str = "VOIDED";
/// The columns of a winner.
const WINNING_BID_ID: &str = "winning_bid_id";
const WINNING_AMOUNT: &str = "winning_amount";
const RUNNER_UP_BIDDER_ID: &str = "runner_up_bidder_id";
const RUNNER_UP_AMOUNT: &str = "runner_up_amount";
/// Indexes.
const BY_STATE: &str = "by_state";

/// When a lot can be bought at its `buy_now` price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BuyNow {
    Never,
    UntilFirstBid,
    Always,
}

/// By how much bids near the end move it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extension {
    /// A bid in this time before the end moves it
    within: Duration,
    /// to this time from now,
    to: Duration,
    /// up to this time after the end that was planned.
    until: Duration,
}

/// One declared kind of lot.
#[derive(Debug)]
struct AuctionSpec {
    /// `lot`.
    name: String,
    key: Vec<Field>,
    fields: Vec<Field>,
    lots: Arc<TableDef>,
    /// None if there are no fields.
    details: Option<Arc<TableDef>>,
    bids: Arc<TableDef>,
    winners: Arc<TableDef>,
    mode: BiddingMode,
    increments: Increments,
    buy_now: BuyNow,
    extension: Option<Extension>,
    /// How much later a lot ends than the one at the position before it.
    stagger: Option<Duration>,
    /// Whether rejected bids are stored; if not, they are counted.
    keeps_rejected: bool,
    runner_up: bool,
    on_won: Option<Outbox>,
    fold: usize,
    buckets: u32,
}

impl AuctionSpec {
    fn what(&self, key: &[Value]) -> String {
        format!("{} {}", self.name, key_text(key))
    }

    /// What never changes about a lot.
    fn terms(&self, lot: &Row) -> Result<LotTerms<'_>, Refusal> {
        Ok(LotTerms {
            mode: self.mode,
            increments: &self.increments,
            start_price: lot.get_int(START_PRICE)?,
            reserve: lot.get_optional_int(RESERVE)?,
        })
    }

    /// The key of a bid. Its bucket follows from its id and from the number of buckets that the lot was created with.
    fn bid_key(&self, lot: &Row, bid_id: &str) -> Result<Vec<Value>, Refusal> {
        let buckets = lot.get_int(BID_BUCKETS)?;
        let buckets = u32::try_from(buckets).map_err(|_| lot.corrupt(BID_BUCKETS, "is out of range"))?;
        let bucket = partition_of(lot.tenant(), &self.name, bid_id, buckets.max(1));
        Ok(lot.key().iter().cloned().chain([i64::from(bucket).into(), bid_id.into()]).collect())
    }
}

/// The best bid that a row has.
fn best_of(lot: &Row) -> Result<BestBid, Refusal> {
    let standing = |[bid_id, bidder_id, amount]: [&str; 3]| match lot.text(bid_id) {
        None => Ok::<_, Refusal>(None),
        Some(bid) => Ok(Some(StandingBid {
            bid_id: bid.to_owned(),
            bidder_id: lot.get_text(bidder_id)?.to_owned(),
            amount: lot.get_int(amount)?,
        })),
    };
    Ok(BestBid {
        price: lot.get_optional_int(PRICE)?,
        min_next: lot.get_int(MIN_NEXT)?,
        leader: standing([BEST_BID_ID, BIDDER_ID, MAX_AMOUNT])?,
        runner_up: standing([RUNNER_BID_ID, RUNNER_BIDDER_ID, RUNNER_AMOUNT])?,
        reserve_met: lot.bool(RESERVE_MET).unwrap_or(false),
        bids: lot.get_int(BIDS)?,
    })
}

/// The columns of a best bid, by name.
fn best_columns(best: &BestBid) -> [(&'static str, Value); 9] {
    let text = |standing: &Option<StandingBid>, part: fn(&StandingBid) -> &str| {
        standing.as_ref().map_or(Value::Null, |bid| part(bid).into())
    };
    let amount =
        |standing: &Option<StandingBid>| standing.as_ref().map_or(Value::Null, |bid| bid.amount.into());
    let (leader, runner_up) = (&best.leader, &best.runner_up);
    [
        (PRICE, best.price.map_or(Value::Null, Value::from)),
        (MIN_NEXT, best.min_next.into()),
        (BEST_BID_ID, text(leader, |bid| &bid.bid_id)),
        (BIDDER_ID, text(leader, |bid| &bid.bidder_id)),
        (MAX_AMOUNT, amount(leader)),
        (RUNNER_BID_ID, text(runner_up, |bid| &bid.bid_id)),
        (RUNNER_BIDDER_ID, text(runner_up, |bid| &bid.bidder_id)),
        (RUNNER_AMOUNT, amount(runner_up)),
        (RESERVE_MET, best.reserve_met.into()),
    ]
}

/// Reads `[auction.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let auction = Arc::new(settings::read(cx)?);
    let machine = cx.machine(transitions::of_lots(&auction, actions::lot_actions(&auction)))?;
    let bid: PartUse = cx.part(&machine, transitions::BID)?;
    let name = &auction.name;
    let mut lots = ResourceSpec::of(name, &auction.lots).machine(&machine);
    for table in auction.details.iter().chain([&auction.winners]) {
        lots = lots.table(table.table());
    }
    cx.resource(
        lots.action(actions::bid(&auction, bids::BidRules { auction: auction.clone(), bid }))
            .actions(actions::lot_reads(&auction)),
    );
    let instead = format!("write `of = \"{name}\"`: its rows count the bids");
    cx.resource(
        ResourceSpec::of(&format!("{name}_bid"), &auction.bids)
            .telling(ViewSource::nothing("events of the lots tell of their bids", instead))
            .key(
                auction.key.iter().map(|field| (field.name.clone(), field.kind)).chain([bid_key()]).collect(),
            )
            .actions(actions::bid_reads(&auction)),
    );
    Some(())
}

fn bid_key() -> (String, statehouse_store::Type) {
    (BID_ID.to_owned(), statehouse_store::Type::Text)
}
