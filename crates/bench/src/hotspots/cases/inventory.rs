//! Hotspots of `inventory`: many callers who want one stock, also when it is sold out, and orders of several lines.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, Request};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial};
use crate::site::request;

const BLUEPRINT: &str = "
[inventory.stock]
key       = { sku = \"int\" }
movements = \"log\"
SETTINGS
";

const CASE: HotspotCase = HotspotCase {
    archetype: "inventory",
    hotspot: "",
    operation: "one of 64 callers reserves one of a stock",
    compares: Compares::Load,
    blueprint: BLUEPRINT,
    sides: [Side::level("", 0), Side::level("", 1)],
    operations: 3_200,
    callers: 64,
    workload: |trial| Box::pin(reserve_one(trial, 1)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase {
        hotspot: "hot inventory key",
        compares: Compares::Switch,
        sides: [Side::settings("cells = 1"), Side::settings("cells = 16")],
        workload: |trial| Box::pin(reserve_one(trial, 1)),
        ..CASE
    },
    HotspotCase {
        hotspot: "concentrated contention on scarce resources",
        operation: "one of 64 callers wants one of a stock, and gets it or is refused",
        sides: [Side::level("enough for all", 1), Side::level("sold out", 0)],
        workload: |trial| {
            let enough = trial.side.level == 1;
            Box::pin(scarce(trial, enough))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "fragmented capacity",
        operation: "a caller reserves one of each of 8 stocks",
        compares: Compares::Switch,
        sides: [Side::level("a reservation for each line", 1), Side::level("one reservation of 8 lines", 8)],
        operations: 400,
        callers: 16,
        workload: |trial| {
            let lines = trial.side.level;
            Box::pin(several(trial, lines))
        },
        ..CASE
    },
];

const STOCKS: u64 = 64;

fn restock(sku: u64, quantity: u64) -> Request {
    request(
        "stock.restock",
        vec![i64::try_from(sku).unwrap_or(0).into()],
        json!({"quantity": quantity.max(1)}),
    )
}

fn reserve(id: &str, skus: impl IntoIterator<Item = u64>) -> Request {
    let lines: Vec<Json> = skus.into_iter().map(|sku| json!({"sku": sku, "quantity": 1})).collect();
    request("stock_reservation.reserve", vec![], json!({"reservation_id": id, "lines": lines}))
}

async fn reserve_one(trial: Trial, stocks: u64) -> Result<CaseFigures> {
    let operations = trial.operations;
    trial.fill((0..stocks).map(|sku| restock(sku, operations))).await?;
    trial.measure_calls(move |number| reserve(&number.to_string(), [number % stocks])).await
}

async fn scarce(trial: Trial, enough: bool) -> Result<CaseFigures> {
    let operations = trial.operations;
    trial.fill([restock(0, if enough { operations } else { 1 })]).await?;
    if !enough {
        trial.fill([reserve("first", [0])]).await?;
        let bought = request("stock_reservation.commit", vec!["first".into()], json!({}));
        trial.fill([bought]).await?;
    }
    trial
        .measure_each(move |house, number| async move {
            match house.send(reserve(&number.to_string(), [0])).await {
                Ok(_) => ensure!(enough, "a stock that is sold out was reserved"),
                Err(refusal) => ensure!(!enough && refusal.code == Code::OutOfStock, "{refusal}"),
            }
            Ok(())
        })
        .await
}

/// Eight stocks in one plan, or in a plan for each.
async fn several(trial: Trial, lines: u64) -> Result<CaseFigures> {
    let operations = trial.operations;
    trial.fill((0..STOCKS).map(|sku| restock(sku, 8 * operations))).await?;
    trial
        .measure_each(move |house, number| async move {
            let skus = |first: u64| (first..first + lines).map(move |line| (8 * number + line) % STOCKS);
            for part in 0..8 / lines {
                house.send(reserve(&format!("{number}-{part}"), skus(part * lines))).await?;
            }
            Ok(())
        })
        .await
}
