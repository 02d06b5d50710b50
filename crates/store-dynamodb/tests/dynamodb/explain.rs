//! What `explain` prints, word for word. To accept a change, run with `STATEHOUSE_UPDATE_GOLDEN=1` and read the diff.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::{Entry, EventTemplate, ManualClock, Operand, Plan, Step, Store, Table, Time, Type};
use statehouse_store_dynamodb::DynamoOptions;

use crate::common::{acme, endpoint, entry, hold, insert, open, options, plan, seats};

#[tokio::test]
async fn explanations_are_what_is_sent() {
    let holds = Table::named("holds")
        .partition("seat", Type::Text)
        .required("holder", Type::Text)
        .required("until", Type::Time)
        .optional("size", Type::Int)
        .build()
        .unwrap();
    let seats = seats();
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let options = DynamoOptions { clock, ..options(&endpoint("STATEHOUSE_TEST_DYNAMODB")) };
    let prefix = options.prefix.clone();
    let store = open(options, &[&seats, &holds]).await;
    let key = || ["show".into(), 1.into()];
    let take = Step::upsert(&holds, ["show-1".into()])
        .guard(column("until").le(now()).or(column("holder").eq("ann")))
        .set("holder", "ann")
        .set("until", now_plus(Duration::from_secs(600)));
    let sell = Step::update(&seats, key())
        .guard(column("holder").ne("bob"))
        .set("sold", Operand::Coalesce("sold".into(), 0.into()).add(1));
    let cases: Vec<(&str, Plan)> = vec![
        ("insert", plan("op-1", [insert(&seats, 1)]).build().unwrap()),
        ("guarded update", plan("op-2", [hold(&seats, 1, "ann")]).build().unwrap()),
        ("upsert of a lease", plan("op-3", [take.clone()]).build().unwrap()),
        ("delete", plan("op-4", [Step::delete(&seats, key())]).build().unwrap()),
        ("assert", plan("op-5", [Step::assert(&seats, key())]).build().unwrap()),
        (
            "two steps and a log entry, without rows",
            Plan::of(&acme(), "op-6")
                .steps([take, sell.clone()])
                .log(entry("1"))
                .without_rows()
                .build()
                .unwrap(),
        ),
        (
            "a log entry with the row",
            Plan::of(&acme(), "op-7")
                .step(sell.set("weight", column("weight").add(0.5)))
                .log(Entry::about("seat", "1").event(EventTemplate::named("seat.sold").with_row_of(0)))
                .build()
                .unwrap(),
        ),
    ];
    let mut text = String::new();
    for (name, plan) in &cases {
        write!(text, "=== {name}\n{}\n", store.explain(plan.into())).unwrap();
    }
    let text = text.replace(&prefix, "shop");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dynamodb/explain.golden.txt");
    if std::env::var_os("STATEHOUSE_UPDATE_GOLDEN").is_some() {
        std::fs::write(&golden, &text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&golden).unwrap_or_default());
}
