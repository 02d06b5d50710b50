//! The actions of an auction.

use std::sync::Arc;

use statehouse_store::Type;

use super::bids::BidRules;
use super::read::{AuctionRead, BidHistory, BidRead};
use super::rules::AMOUNT_MAX;
use super::{
    ACCEPTED, AMOUNT, AuctionSpec, BID_ID, BID_STATES, BIDDER_ID, BUY_NOW, BY_STATE, BuyNow, ENDS_AT,
    LEADING, MIN_NEXT, OPEN, POSITION, PRICE, RESERVE, SELLER, SEQ, START_PRICE, STARTS_AT, STATES,
};
use crate::action::{Code, WAIT};
use crate::blueprint::settings::Field;
use crate::declare::table::STATE;
use crate::declare::{ActionSpec, IndexList};
use crate::form::{Form, Property};
use crate::resource::state_name;

/// The actions that are transitions of a lot.
pub(super) struct LotActions {
    pub create: ActionSpec,
    pub buy_now: Option<ActionSpec>,
    pub close: ActionSpec,
    pub cancel: ActionSpec,
    pub void: ActionSpec,
}

/// The last place of a lot in a sale.
const POSITION_MAX: i64 = 100_000;

/// The state that bids and closes work on.
fn best_state(auction: &AuctionSpec) -> String {
    state_name(&format!("{}_best_bid", auction.name))
}

fn amount(name: &str, about: &str) -> Property {
    Property::optional(name, Form::Range(1, AMOUNT_MAX), about)
}

fn bidder() -> Property {
    Property::required(BIDDER_ID, Form::Value(Type::Text), "who bids")
}

pub(super) fn lot_actions(auction: &AuctionSpec) -> LotActions {
    let bought = ActionSpec::transition("buy_now", "Buy a {name} at its price, if no bid stands in the way.")
        .mechanism("guarded close with the winner in the same plan")
        .takes([bidder()]);
    LotActions {
        create: ActionSpec::create("create", "Open a {name} for bids until a time.").takes(created(auction)),
        buy_now: (auction.buy_now != BuyNow::Never).then_some(bought),
        close: ActionSpec::transition(
            "close",
            "Close a {name} whose end has come, and commit the winner. The server does this by itself.",
        )
        .target(format!("{} + {}", best_state(auction), state_name(&format!("{}_winner", auction.name))))
        .mechanism("guarded close with the winner in the same plan")
        .answers(&["wrong winner", "duplicate close"])
        .after(["create", WAIT]),
        cancel: ActionSpec::transition("cancel", "Cancel a {name} that is open, so that no bidder gets it.")
            .restricted(),
        void: ActionSpec::transition("void", "Void a bid: the best one is that of the others.")
            .target(best_state(auction))
            .takes([Property::required(BID_ID, Form::Value(Type::Text), "the bid")])
            .answers(&["wrong winner"])
            .after(["create", "bid"])
            .restricted(),
    }
}

fn created(auction: &AuctionSpec) -> Vec<Property> {
    let mut created: Vec<Property> = auction.key.iter().map(Field::property).collect();
    let time = |name: &str, about: &str| Property::optional(name, Form::Value(Type::Time), about);
    created.extend([
        time(STARTS_AT, "from when on bids are accepted; from now on, if not given")
            .example("2020-01-01T00:00:00Z".into()),
        Property { required: true, ..time(ENDS_AT, "until when bids are accepted") }
            .example("2099-01-01T00:00:00Z".into()),
        Property::optional(SELLER, Form::Value(Type::Text), "who sells it, and may not bid"),
        amount(START_PRICE, "the least price; 1 if not given"),
        amount(RESERVE, "it is not sold below this price, which no answer shows"),
    ]);
    if auction.buy_now != BuyNow::Never {
        created.push(amount(BUY_NOW, "the price at which it can be bought at once"));
    }
    if auction.stagger.is_some() {
        let about = "the place of the lot in its sale, from 0; it ends later by `stagger` for each place";
        created.push(Property::optional(POSITION, Form::Range(0, POSITION_MAX), about));
    }
    created.extend(auction.fields.iter().map(Field::property));
    created
}

/// `bid`.
pub(super) fn bid(auction: &Arc<AuctionSpec>, rules: BidRules) -> ActionSpec {
    let text = Form::Value(Type::Text);
    let int = || Form::Value(Type::Int);
    let shown = |property: Property| Property { nullable: true, ..property };
    let mut answer: Vec<Property> = auction
        .key
        .iter()
        .map(|field| Property::required(&field.name, Form::Value(field.kind), "the lot"))
        .collect();
    answer.extend([
        Property::required(BID_ID, text.clone(), "the bid"),
        Property::required(BIDDER_ID, text.clone(), "who bid"),
        Property::required(AMOUNT, int(), "how much, at most"),
        Property::required(STATE, Form::one_of(&[ACCEPTED]), "a rejected bid is a refusal"),
        Property::required(SEQ, int(), "its number among the accepted bids"),
        shown(Property::required(PRICE, int(), "the price after it; null if bids are sealed")),
        Property::required(MIN_NEXT, int(), "the least amount that the next bid needed then"),
        shown(Property::required(LEADING, Form::Value(Type::Bool), "whether it led then; null if sealed")),
        Property::required(ENDS_AT, Form::Value(Type::Time), "the end of the lot after it"),
    ]);
    ActionSpec::transition("bid", "Bid for a {name}.")
        .target(format!("{} + {}", state_name(&format!("{}_bid", auction.name)), best_state(auction)))
        .shape("append + guarded best-state update")
        .mechanism("bids that arrive together are judged in memory and written as one plan")
        .takes([
            Property::optional(BID_ID, text, "an id that you choose; the idempotency key, if not given"),
            bidder(),
            Property { required: true, ..amount(AMOUNT, "how much; a maximum, if bids are proxy bids") },
        ])
        .gives(Form::Object(answer))
        .codes(&[
            Code::NotFound,
            Code::TooLow,
            Code::Expired,
            Code::WrongState,
            Code::Forbidden,
            Code::OperationReused,
            Code::Contended,
        ])
        .answers(&["accepted late bid", "wrong winner", "stale current-best read near close"])
        .after(["create"])
        .combines(rules)
}

/// `read` and `list` of lots.
pub(super) fn lot_reads(auction: &Arc<AuctionSpec>) -> [ActionSpec; 2] {
    let state = Property::optional(STATE, Form::one_of(&STATES), "in which state; OPEN if not given");
    [
        ActionSpec::read("read", "Read a {name}: its description, its best bid, and its winner.")
            .after(["create"])
            .gives(AuctionRead::form(auction))
            .reads(AuctionRead(auction.clone())),
        ActionSpec::list("list", "List {name} rows in a state, those that end last first.")
            .mechanism("range read on the index by state and end")
            .after(["create"])
            .reads_index(IndexList::newest_first(&auction.lots).by_or(BY_STATE, state, OPEN)),
    ]
}

/// `read` and `list` of bids.
pub(super) fn bid_reads(auction: &Arc<AuctionSpec>) -> [ActionSpec; 2] {
    let lot = &auction.name;
    let (created, placed) = (format!("{lot}.create"), format!("{lot}.bid"));
    let state = Property::optional(STATE, Form::one_of(&BID_STATES), "in which state; ACCEPTED if not given");
    [
        ActionSpec::read("read", format!("Read a bid for a {lot}."))
            .after([created.as_str(), placed.as_str()])
            .reads(BidRead(auction.clone())),
        ActionSpec::list("list", format!("List the bids for a {lot}, newest first."))
            .mechanism("range reads on the index by state and number, one for each bucket, merged")
            .takes(auction.key.iter().map(Field::property).chain([state]))
            .after([created.as_str(), placed.as_str()])
            .reads(BidHistory(auction.clone())),
    ]
}
