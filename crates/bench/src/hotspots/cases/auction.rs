//! Hotspots of `auction`: many bidders at one lot.

use anyhow::Result;
use serde_json::json;
use statehouse::Code;

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial};
use crate::site::request;

const BLUEPRINT: &str = "
[auction.lot]
key     = { lot_id = \"int\" }
fields  = { about = \"text?\" }
bidding = \"open\"
SETTINGS
";

const CASE: HotspotCase = HotspotCase {
    archetype: "auction",
    hotspot: "",
    operation: "one of 64 bidders bids for one lot",
    compares: Compares::Switch,
    blueprint: BLUEPRINT,
    sides: [Side::settings("fold = 1"), Side::settings("fold = 64")],
    operations: 3_200,
    callers: 64,
    workload: |trial| Box::pin(bids(trial, 1, 0)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "burst bids near close", ..CASE },
    HotspotCase {
        hotspot: "current-best contention",
        operation: "one of 8 bidders bids for one lot",
        sides: [Side::settings("fold = 1"), Side::settings("fold = 8")],
        callers: 8,
        ..CASE
    },
    HotspotCase {
        hotspot: "hot auction row",
        operation: "one of 64 bidders bids for one lot",
        compares: Compares::Load,
        sides: [Side::level("no description", 0), Side::level("a description of 100 kB", 100_000)],
        workload: |trial| {
            let about = trial.side.level;
            Box::pin(bids(trial, 1, about))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "append hotspot for hot auction",
        sides: [Side::settings("bid_buckets = 1"), Side::settings("bid_buckets = 8")],
        ..CASE
    },
];

/// Each operation is a bid above all before it, for one of so many lots. A bidder that was overtaken has bid all the same.
async fn bids(trial: Trial, lots: u64, about: u64) -> Result<CaseFigures> {
    let about = "x".repeat(usize::try_from(about)?);
    let lot = |id: u64| {
        let input = json!({"lot_id": id, "ends_at": "2099-01-01T00:00:00Z", "about": about});
        request("lot.create", vec![], input)
    };
    trial.fill((0..lots).map(lot)).await?;
    trial
        .measure_each(move |house, number| async move {
            let input = json!({"bidder_id": format!("b{number}"), "amount": 1 + number});
            let id = i64::try_from(number % lots)?;
            match house.call("lot.bid", vec![id.into()], input).await {
                Ok(_) => Ok(()),
                Err(refusal) if refusal.code == Code::TooLow => Ok(()),
                Err(refusal) => Err(refusal.into()),
            }
        })
        .await
}
