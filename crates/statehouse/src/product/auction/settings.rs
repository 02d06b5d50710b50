//! What a blueprint says of an auction.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::rules::{BiddingMode, Increments};
use super::{AuctionSpec, BuyNow, Extension, tables};
use crate::blueprint::tree::TreeValue;
use crate::declare::settings::SettingsReader;
use crate::declare::{Declare, action_call::advice};
use crate::infra::effect::Outbox;
use crate::resource::plural;

/// The lengths of time that settings may have.
const SPANS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(366 * 86_400);
const INCREMENTS: &str = "increments";
const ON_WON: &str = "on_won";
/// Bids in one plan at most: each is one step, besides those of the lot.
const FOLD_MAX: u32 = 90;

/// Reads `[auction.NAME]`, and builds the tables.
pub(super) fn read(cx: &mut Declare<'_>) -> Option<AuctionSpec> {
    let name = cx.name();
    let settings = cx.settings();
    let key = settings.key("key");
    let fields = settings.fields("fields");
    let table = settings.text("table", plural(name));
    let mode = BiddingMode::of(settings.choice("bidding", &BiddingMode::WORDS));
    let increments = increments(settings);
    let buy_now = match settings.choice("buy_now", &["never", "until_first_bid", "always"]) {
        "until_first_bid" => BuyNow::UntilFirstBid,
        "always" => BuyNow::Always,
        _ => BuyNow::Never,
    };
    if mode == BiddingMode::Sealed && buy_now == BuyNow::Always {
        let title =
            "a sealed lot cannot be bought while it has bids: whether it can would tell their amounts";
        settings.problem_with_advice("buy_now", title, "write `buy_now = \"until_first_bid\"`");
    }
    let extension = extension(settings);
    let stagger = settings.maybe_duration("stagger", SPANS);
    let keeps_rejected = settings.choice("rejected", &["keep", "count"]) == "keep";
    let runner_up = settings.flag("runner_up", false);
    let fold = settings.count("fold", 64, 1..=FOLD_MAX);
    let buckets = settings.count("bid_buckets", 1, 1..=256);
    let shards = settings.count("shards", 4, 1..=1_024);
    let on_won = settings.maybe_text(ON_WON);
    let on_won = match on_won {
        None => None,
        Some(effect) => Some(outbox(cx, &effect)?),
    };
    let lots = cx.build(tables::lots(table, &key, mode, shards))?;
    let details = match fields.as_slice() {
        [] => None,
        fields => Some(cx.build(tables::details(name, &key, fields))?),
    };
    let bids = cx.build(tables::bids(name, &key, mode, buckets))?;
    let winners = cx.build(tables::winners(name, &key))?;
    Some(AuctionSpec {
        name: name.to_owned(),
        key,
        fields,
        lots,
        details,
        bids,
        winners,
        mode,
        increments,
        buy_now,
        extension,
        stagger,
        keeps_rejected,
        runner_up,
        on_won,
        fold: fold as usize,
        buckets,
    })
}

/// Reads `increments = [[0, 5], [100, 25]]`, or `increments = 5`.
fn increments(settings: &mut SettingsReader<'_>) -> Increments {
    let Some(node) = settings.node(INCREMENTS) else { return Increments::by_one() };
    let number = |value: &TreeValue| match value {
        TreeValue::Int(number) => Some(*number),
        _ => None,
    };
    let steps: Option<Vec<(i64, i64)>> = match &node.value {
        TreeValue::Int(step) => Some(vec![(0, *step)]),
        TreeValue::List(steps) => steps
            .iter()
            .map(|step| match &step.value {
                TreeValue::List(pair) => match pair.as_slice() {
                    [from, step] => Some((number(&from.value)?, number(&step.value)?)),
                    _ => None,
                },
                _ => None,
            })
            .collect(),
        _ => None,
    };
    let built = steps.ok_or("expected a number, or pairs of a price and the increment from there");
    built.and_then(Increments::of).unwrap_or_else(|why| {
        let advice = "write `increments = [[0, 5], [100, 25]]`: by 5, and from 100 on by 25";
        settings.problem_with_advice(INCREMENTS, why, advice);
        Increments::by_one()
    })
}

/// Reads `extend = { within = "2m", to = "2m", until = "30m" }`.
fn extension(settings: &mut SettingsReader<'_>) -> Option<Extension> {
    let minutes = |count: u64| Duration::from_secs(60 * count);
    settings.nested("extend", |settings| {
        let within = settings.duration("within", minutes(2), SPANS);
        let to = settings.duration("to", within, SPANS);
        let until = settings.duration("until", minutes(30), SPANS);
        settings.refuse_if(
            to < within,
            "to",
            "`to` must be at least as long as `within`: the end never falls",
        );
        Extension { within, to, until }
    })
}

/// The effect that a winner is sent.
fn outbox(cx: &mut Declare<'_>, effect: &str) -> Option<Outbox> {
    let (blueprint, resources) = cx.others()?;
    let Some(outbox) = Outbox::of(blueprint, effect) else {
        let is_effect =
            |name: &&str| blueprint.thing(name).is_some_and(|thing| thing.archetype.keyword() == "effect");
        let names = resources.iter().map(|resource| resource.name.as_str()).filter(is_effect);
        let advice = advice(effect, names);
        cx.settings().problem_with_advice(ON_WON, format!("there is no effect `{effect}`"), advice);
        return None;
    };
    if !outbox.is_fixed() {
        let title =
            format!("`{effect}` is sent to an address that each request names, and a close names none");
        cx.settings().problem_with_advice(ON_WON, title, "give the effect a `url`");
        return None;
    }
    Some(outbox)
}
