//! How a bid changes the best bid of a lot: pure functions.

use std::fmt;

/// Amounts are whole numbers of the smallest unit of a currency. The limit keeps sums of two of them far from overflow.
pub(super) const AMOUNT_MAX: i64 = 1_000_000_000_000_000;

/// How bids compete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BiddingMode {
    /// A bid is a maximum. The house bids for the bidder up to it, by one increment more than the others.
    Proxy,
    /// A bid is the price.
    Open,
    /// A bid is the price, and hidden until the lot closes.
    Sealed,
}

impl BiddingMode {
    /// The names of the modes, as a blueprint has them.
    pub(super) const WORDS: [&'static str; 3] = ["proxy", "open", "sealed"];

    /// The mode of a name.
    pub(super) fn of(word: &str) -> BiddingMode {
        match word {
            "open" => BiddingMode::Open,
            "sealed" => BiddingMode::Sealed,
            _ => BiddingMode::Proxy,
        }
    }
}

/// By how much a bid must be above the price: from each price on, so much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Increments(Vec<(i64, i64)>);

impl Increments {
    /// The table, which begins at 0 and rises.
    pub(super) fn of(steps: Vec<(i64, i64)>) -> Result<Increments, &'static str> {
        let rises = steps.iter().zip(steps.iter().skip(1)).all(|(one, next)| one.0 < next.0);
        if steps.first().map(|(from, _)| *from) != Some(0) || !rises {
            return Err("the first increment is for prices from 0, and each further one for higher prices");
        }
        if steps.iter().any(|(from, step)| *from > AMOUNT_MAX || !(1..=AMOUNT_MAX).contains(step)) {
            return Err("an increment is at least 1, and no amount is above 10^15");
        }
        Ok(Increments(steps))
    }

    /// Each bid is above the price, if by 1 only.
    pub(super) fn by_one() -> Increments {
        Increments(vec![(0, 1)])
    }

    /// The increment at a price.
    pub(super) fn at(&self, price: i64) -> i64 {
        let step = self.0.iter().rev().find(|(from, _)| *from <= price);
        step.map_or(1, |(_, step)| *step)
    }
}

/// A bid, as far as its effect on the best one goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferedBid<'b> {
    /// The id.
    pub bid_id: &'b str,
    /// Who bids.
    pub bidder_id: &'b str,
    /// How much, at most.
    pub amount: i64,
}

/// A bid that stands for something: the leader, or the one behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingBid {
    /// The bid.
    pub bid_id: String,
    /// Who bid.
    pub bidder_id: String,
    /// How much, at most.
    pub amount: i64,
}

impl StandingBid {
    fn of(bid: &OfferedBid<'_>) -> StandingBid {
        let OfferedBid { bid_id, bidder_id, amount } = *bid;
        StandingBid { bid_id: bid_id.to_owned(), bidder_id: bidder_id.to_owned(), amount }
    }
}

/// What never changes about a lot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LotTerms<'t> {
    /// How bids compete.
    pub mode: BiddingMode,
    /// By how much they must be above the price.
    pub increments: &'t Increments,
    /// The least price.
    pub start_price: i64,
    /// Below this price the lot is not sold.
    pub reserve: Option<i64>,
}

/// The best bid of a lot, and what follows from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BestBid {
    /// What the leader would pay now.
    pub price: Option<i64>,
    /// The least amount that the next bid needs.
    pub min_next: i64,
    /// Who leads.
    pub leader: Option<StandingBid>,
    /// The best bid of another bidder.
    pub runner_up: Option<StandingBid>,
    /// Whether the price has reached the reserve.
    pub reserve_met: bool,
    /// How many bids were accepted, those that were voided later included.
    pub bids: i64,
}

/// A bid that changes nothing because it is too low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BidTooLow;

impl fmt::Display for BidTooLow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the bid is too low")
    }
}

impl BestBid {
    /// Before the first bid.
    pub fn none(terms: &LotTerms<'_>) -> BestBid {
        BestBid {
            price: None,
            min_next: terms.start_price,
            leader: None,
            runner_up: None,
            reserve_met: false,
            bids: 0,
        }
    }

    fn leads(&self, bidder_id: &str) -> bool {
        self.leader.as_ref().is_some_and(|leader| leader.bidder_id == bidder_id)
    }

    /// The least amount that a bid of this bidder needs.
    pub fn least_from(&self, terms: &LotTerms<'_>, bidder_id: &str) -> i64 {
        match (terms.mode, &self.leader) {
            // Only the leader's own maximum rises: not the price.
            (BiddingMode::Proxy, Some(leader)) if self.leads(bidder_id) => leader.amount.saturating_add(1),
            _ => self.min_next,
        }
    }

    /// The best bid after one more, or that it is too low.
    pub fn place(&self, terms: &LotTerms<'_>, bid: &OfferedBid<'_>) -> Result<BestBid, BidTooLow> {
        let leads = self.leads(bid.bidder_id);
        if bid.amount < self.least_from(terms, bid.bidder_id) {
            return Err(BidTooLow);
        }
        let mut next = BestBid { bids: self.bids.saturating_add(1), ..self.clone() };
        let beaten = next.compete(bid, leads);
        next.set_price(terms, self.price, beaten, leads);
        Ok(next)
    }

    /// Who leads, and who is behind. Returns the greatest amount of the others that this bid met. Of two equal amounts, the
    /// earlier one is ahead.
    fn compete(&mut self, bid: &OfferedBid<'_>, leads: bool) -> Option<i64> {
        match self.leader.take() {
            Some(leader) if leads => {
                self.leader = Some(if bid.amount > leader.amount { StandingBid::of(bid) } else { leader });
                None
            }
            Some(leader) if bid.amount > leader.amount => {
                let beaten = leader.amount;
                self.runner_up = Some(leader);
                self.leader = Some(StandingBid::of(bid));
                Some(beaten)
            }
            Some(leader) => {
                self.leader = Some(leader);
                let is_ahead = |runner_up: &StandingBid| runner_up.amount >= bid.amount;
                if !self.runner_up.as_ref().is_some_and(is_ahead) {
                    self.runner_up = Some(StandingBid::of(bid));
                }
                Some(bid.amount)
            }
            None => {
                self.leader = Some(StandingBid::of(bid));
                None
            }
        }
    }

    fn set_price(&mut self, terms: &LotTerms<'_>, before: Option<i64>, beaten: Option<i64>, leads: bool) {
        let Some(leader) = &self.leader else { return };
        let above = |price: i64| price.saturating_add(terms.increments.at(price)).min(AMOUNT_MAX);
        let price = match terms.mode {
            BiddingMode::Open | BiddingMode::Sealed => leader.amount,
            BiddingMode::Proxy => {
                let before = before.unwrap_or(terms.start_price);
                let bid_up = match beaten {
                    Some(beaten) if !leads => before.max(leader.amount.min(above(beaten))),
                    _ => before,
                };
                match terms.reserve {
                    Some(reserve) if leader.amount >= reserve => bid_up.max(reserve),
                    _ => bid_up,
                }
            }
        };
        self.price = Some(price);
        self.reserve_met = terms.reserve.is_none_or(|reserve| price >= reserve);
        self.min_next = match terms.mode {
            BiddingMode::Sealed => terms.start_price,
            // Above the greatest amount there is no bid.
            BiddingMode::Open | BiddingMode::Proxy => price.saturating_add(terms.increments.at(price)),
        };
    }

    /// The best of several bids, in their order. A bid that was accepted is never too low among fewer bids: without one of them
    /// the price is not higher, and a bidder's later bid is above its earlier ones.
    pub fn of<'b>(terms: &LotTerms<'_>, bids: impl IntoIterator<Item = OfferedBid<'b>>) -> BestBid {
        bids.into_iter().fold(BestBid::none(terms), |best, bid| best.place(terms, &bid).unwrap_or(best))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn increments() -> Increments {
        Increments::of(vec![(0, 5), (100, 25), (500, 50)]).unwrap()
    }

    /// Bids of (bidder, amount), and what comes of each: (price, leader), or that it is too low.
    fn course(mode: BiddingMode, reserve: Option<i64>, bids: &[(&str, i64)]) -> Vec<Option<(i64, String)>> {
        let increments = increments();
        let terms = LotTerms { mode, increments: &increments, start_price: 10, reserve };
        let mut best = BestBid::none(&terms);
        let mut told = Vec::new();
        for (number, (bidder_id, amount)) in bids.iter().enumerate() {
            let bid_id = format!("b{number}");
            let bid = OfferedBid { bid_id: &bid_id, bidder_id, amount: *amount };
            told.push(best.place(&terms, &bid).ok().map(|next| {
                best = next;
                (best.price.unwrap(), best.leader.clone().unwrap().bidder_id)
            }));
        }
        told
    }

    fn at(price: i64, leader: &str) -> Option<(i64, String)> {
        Some((price, leader.to_owned()))
    }

    #[test]
    fn open_bids_are_the_price_and_rise_by_the_increment() {
        let told = course(
            BiddingMode::Open,
            None,
            &[("ann", 9), ("ann", 10), ("bob", 14), ("bob", 15), ("ann", 100), ("bob", 124), ("bob", 125)],
        );
        let expected = vec![None, at(10, "ann"), None, at(15, "bob"), at(100, "ann"), None, at(125, "bob")];
        assert_eq!(told, expected);
    }

    #[test]
    fn proxy_bids_raise_the_price_by_what_the_second_one_makes_necessary() {
        let told = course(
            BiddingMode::Proxy,
            None,
            &[("ann", 50), ("bob", 30), ("bob", 50), ("bob", 60), ("bob", 90), ("ann", 64), ("ann", 65)],
        );
        let expected = vec![
            at(10, "ann"),
            at(35, "ann"),
            // A tie is the earlier one's.
            at(50, "ann"),
            at(55, "bob"),
            // The leader raises his maximum only.
            at(55, "bob"),
            at(69, "bob"),
            None,
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn a_maximum_that_reaches_the_reserve_pays_it() {
        let told = course(BiddingMode::Proxy, Some(80), &[("ann", 50), ("bob", 79), ("ann", 200)]);
        assert_eq!(told, vec![at(10, "ann"), at(55, "bob"), at(84, "ann")]);
        let told = course(BiddingMode::Proxy, Some(80), &[("ann", 80)]);
        assert_eq!(told, vec![at(80, "ann")]);
    }

    #[test]
    fn of_sealed_bids_the_highest_leads_and_the_earlier_of_two() {
        let told = course(BiddingMode::Sealed, None, &[("ann", 50), ("bob", 50), ("cat", 20), ("bob", 51)]);
        assert_eq!(told, vec![at(50, "ann"), at(50, "ann"), at(50, "ann"), at(51, "bob")]);
    }

    #[test]
    fn the_runner_up_is_the_best_bid_of_another_bidder() {
        let increments = increments();
        let mode = BiddingMode::Proxy;
        let terms = LotTerms { mode, increments: &increments, start_price: 10, reserve: None };
        let bids =
            [("a1", "ann", 50), ("b1", "bob", 30), ("a2", "ann", 70), ("c1", "cat", 60), ("b2", "bob", 90)];
        let offered = bids.map(|(bid_id, bidder_id, amount)| OfferedBid { bid_id, bidder_id, amount });
        let runner_up = |count: usize| {
            BestBid::of(&terms, offered.into_iter().take(count)).runner_up.map(|runner_up| runner_up.bid_id)
        };
        let told: Vec<_> = (1..=5).map(runner_up).collect();
        let expected = [None, Some("b1"), Some("b1"), Some("c1"), Some("a2")];
        assert_eq!(told, expected.map(|bid| bid.map(str::to_owned)));
    }

    #[test]
    fn the_greatest_amount_ends_the_bidding() {
        let told = course(BiddingMode::Open, None, &[("ann", AMOUNT_MAX), ("bob", AMOUNT_MAX)]);
        assert_eq!(told, vec![at(AMOUNT_MAX, "ann"), None]);
    }

    #[test]
    fn tables_of_increments_are_checked() {
        for steps in [vec![], vec![(1, 5)], vec![(0, 5), (0, 6)], vec![(0, 0)], vec![(0, 5), (100, -1)]] {
            assert!(Increments::of(steps.clone()).is_err(), "{steps:?}");
        }
        let table = increments();
        assert_eq!([0, 99, 100, 499, 10_000].map(|price| table.at(price)), [5, 5, 25, 25, 50]);
    }
}
