//! How many requests a plan takes: as many as code written by hand for it would send.

use statehouse_store::guard::column;
use statehouse_store::{Address, Commit, Consistency, Entry, EventTemplate, Plan, Reason, Step, Store};
use statehouse_store_dynamodb::DynamoStore;

use crate::common::{Proxy, acme, apply, entry, hold, insert, open, options, plan, seats};

/// Commits a plan and requires these requests.
async fn check(
    proxy: &Proxy,
    store: &DynamoStore,
    plan: statehouse_store::plan::PlanBuilder,
    requests: &[&str],
) -> Commit {
    let plan = plan.build().unwrap();
    proxy.take_requests();
    let outcome = store.commit(&plan).await.unwrap();
    assert_eq!(proxy.names(), requests, "{}", plan.steps()[0]);
    outcome
}

#[tokio::test]
async fn requests_are_as_few_as_by_hand() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    let seat = |number: i64| ["show".into(), number.into()];

    // One step without a log entry is one conditional request, and it returns the row.
    let inserted = check(&proxy, &store, plan("1", [insert(&seats, 1)]), &["UpdateItem"]).await;
    assert_eq!(inserted.applied().unwrap().rows[0].as_ref().unwrap().version(), 1);
    let held = check(&proxy, &store, plan("2", [hold(&seats, 1, "ann")]), &["UpdateItem"]).await;
    let held = held.applied().unwrap().rows.remove(0).unwrap();
    assert_eq!((held.version(), held.text("holder")), (2, Some("ann")));
    // So is one that is refused, and it returns the row as it is.
    let refused = check(&proxy, &store, plan("3", [hold(&seats, 1, "bob")]), &["UpdateItem"]).await;
    let refused = refused.refused().unwrap();
    assert!(matches!(refused.reason, Reason::Guard { conjunct: 0, .. }));
    assert_eq!(refused.current, Some(held));
    let missing = check(&proxy, &store, plan("4", [hold(&seats, 9, "bob")]), &["UpdateItem"]).await;
    assert_eq!(missing.refused().unwrap().reason, Reason::Absent);
    let counted = Step::upsert(&seats, seat(2))
        .set("sold", statehouse_store::Operand::Coalesce("sold".into(), 0.into()).add(1));
    check(&proxy, &store, plan("5", [counted.clone()]), &["UpdateItem"]).await;
    let again = check(&proxy, &store, plan("6", [counted]), &["UpdateItem"]).await;
    assert_eq!(again.applied().unwrap().rows[0].as_ref().unwrap().int("sold"), Some(2));
    check(&proxy, &store, plan("7", [Step::delete(&seats, seat(2))]), &["DeleteItem"]).await;
    check(&proxy, &store, plan("8", [Step::remove(&seats, seat(2))]), &["DeleteItem"]).await;
    check(&proxy, &store, plan("9", [Step::assert(&seats, seat(1))]), &["GetItem"]).await;

    // With a log entry it is one transaction, unless rows are asked for that only reading can tell.
    let logged = |operation: &str, step: Step| plan(operation, [step]).log(entry("1"));
    let free = || Step::update(&seats, seat(1)).guard(column("holder").eq("ann")).set("status", "FREE");
    check(&proxy, &store, logged("10", free()).without_rows(), &["TransactWriteItems"]).await;
    check(&proxy, &store, logged("11", insert(&seats, 3)), &["TransactWriteItems"]).await;
    let told = Entry::about("seat", "4").event(EventTemplate::named("made").with_row_of(0));
    check(&proxy, &store, plan("12", [insert(&seats, 4)]).log(told), &["TransactWriteItems"]).await;
    check(&proxy, &store, logged("13", free()), &["GetItem", "TransactWriteItems"]).await;
    check(
        &proxy,
        &store,
        Plan::of(&acme(), "14").step(Step::delete(&seats, seat(4))).log(entry("4")).without_rows(),
        &["TransactWriteItems"],
    )
    .await;
    // Several steps are one transaction, too.
    let both = [free(), hold(&seats, 3, "bob")];
    check(&proxy, &store, plan("15", both.clone()).without_rows(), &["TransactWriteItems"]).await;
    let both = [free(), Step::update(&seats, seat(3)).set("status", "FREE")];
    check(&proxy, &store, plan("16", both), &["BatchGetItem", "TransactWriteItems"]).await;
    let asserts = [Step::assert(&seats, seat(1)), Step::assert_absent(&seats, seat(99))];
    check(&proxy, &store, plan("17", asserts), &["TransactGetItems"]).await;
    // What cannot be said in an expression is read first.
    let heavier = Step::update(&seats, seat(1)).set("weight", column("weight").add(0.1));
    check(&proxy, &store, plan("18", [heavier]), &["GetItem", "UpdateItem"]).await;
    // A repetition is the same request, and one to fetch the record.
    let repeated =
        check(&proxy, &store, logged("11", insert(&seats, 3)), &["TransactWriteItems", "GetItem"]).await;
    assert!(repeated.applied().unwrap().repeated);
}

#[tokio::test]
async fn reads_are_one_request() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    for seat in 0..5 {
        apply(&store, plan(&format!("{seat}"), [insert(&seats, seat)])).await;
    }
    proxy.take_requests();
    let address = |seat: i64| Address::new(&seats, &acme(), ["show".into(), seat.into()]).unwrap();
    store.get(&[address(1)], Consistency::Strong).await.unwrap();
    assert_eq!(proxy.names(), ["GetItem"]);
    // Twice the same row, and one that is not there.
    let rows =
        store.get(&[address(3), address(1), address(9), address(3)], Consistency::Strong).await.unwrap();
    assert_eq!(proxy.names(), ["BatchGetItem"]);
    let found: Vec<Option<i64>> =
        rows.iter().map(|row| row.as_ref().and_then(|row| row.int("seat"))).collect();
    assert_eq!(found, [Some(3), Some(1), None, Some(3)]);
    let query = statehouse_store::Query::table(&seats, &acme(), ["show".into()]).unwrap();
    assert_eq!(store.query(&query).await.unwrap().rows.len(), 5);
    assert_eq!(proxy.names(), ["Query"]);
}
