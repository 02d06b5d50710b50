//! What servers and networks do to requests, and what a caller sees of it: as little as possible, and never a lie.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_store::{
    Address, Commit, Consistency, Entry, EventTemplate, Migrate, Operand, Query, Resolution, Scan, Schema,
    Step, Store, StoreError, Table, Type,
};
use statehouse_store_dynamodb::{DynamoOptions, DynamoStore};

use crate::common::{
    Proxy, ProxyAction, acme, apply, cancelled, entry, failure, hold, insert, log, open, options, plan, seats,
};

/// A step whose effect can be counted.
fn count(table: &Arc<Table>) -> Step {
    let sold = Operand::Coalesce("sold".into(), 0.into());
    Step::update(table, ["show".into(), 1.into()]).set("sold", sold.add(1))
}

async fn sold(store: &DynamoStore, table: &Arc<Table>) -> Option<i64> {
    let address = Address::new(table, &acme(), ["show".into(), 1.into()]).unwrap();
    store.get(&[address], Consistency::Strong).await.unwrap()[0].as_ref().unwrap().int("sold")
}

#[tokio::test]
async fn what_was_certainly_not_applied_is_sent_again() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    apply(&store, plan("0", [insert(&seats, 1)])).await;
    let codes = [
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "ThrottlingException",
        "TransactionConflictException",
    ];
    for (number, code) in codes.into_iter().enumerate() {
        proxy.plan("UpdateItem", failure(code));
        apply(&store, plan(code, [count(&seats)])).await;
        assert_eq!(sold(&store, &seats).await, Some(number as i64 + 1), "{code}");
    }
    for code in ["ThrottlingException", "RequestLimitExceeded"] {
        proxy.plan("TransactWriteItems", failure(code));
        apply(&store, plan(&format!("tx-{code}"), [count(&seats)]).log(entry("1")).without_rows()).await;
    }
    assert_eq!(sold(&store, &seats).await, Some(6));
    assert!(proxy.is_done());
}

#[tokio::test]
async fn a_conflict_is_never_a_refusal() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    apply(&store, plan("0", [insert(&seats, 1), insert(&seats, 2)])).await;
    // In the way of the first step, of the operation itself, and of capacity.
    for codes in [
        ["TransactionConflict", "None", "None", "None"],
        ["None", "None", "TransactionConflict", "None"],
        ["None", "ProvisionedThroughputExceeded", "None", "None"],
        ["TransactionConflict", "ConditionalCheckFailed", "None", "None"],
    ] {
        proxy.plan("TransactWriteItems", cancelled(&codes));
    }
    proxy.take_requests();
    let steps = [hold(&seats, 1, "ann"), hold(&seats, 2, "ann")];
    let applied = apply(&store, plan("1", steps).log(entry("1")).without_rows()).await;
    assert!(!applied.repeated);
    assert!(proxy.is_done());
    assert_eq!(proxy.names(), ["TransactWriteItems"; 5]);
}

#[tokio::test]
async fn a_transaction_in_progress_is_sent_again_as_it_was() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    apply(&store, plan("0", [insert(&seats, 1)])).await;
    proxy.plan("TransactWriteItems", failure("TransactionInProgressException"));
    proxy.plan("TransactWriteItems", failure("InternalServerError"));
    proxy.take_requests();
    apply(&store, plan("1", [count(&seats)]).log(entry("1")).without_rows()).await;
    let sent = proxy.take_requests();
    assert_eq!(sent.len(), 3);
    assert!(sent.iter().all(|request| *request == sent[0]), "the token stands for one content");
    assert!(sent[0].1["ClientRequestToken"].is_string());
    assert_eq!(sold(&store, &seats).await, Some(1));
}

#[tokio::test]
async fn a_lost_answer_of_a_transaction_is_found_again() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    apply(&store, plan("0", [insert(&seats, 1)])).await;
    // With a log entry and without one.
    proxy.plan("TransactWriteItems", ProxyAction::LoseAnswer);
    let applied = apply(&store, plan("1", [count(&seats)]).log(entry("1")).without_rows()).await;
    assert!(!applied.repeated, "the plan was applied by this call");
    proxy.plan("TransactWriteItems", ProxyAction::LoseAnswer);
    apply(
        &store,
        plan("2", [count(&seats), Step::assert_absent(&seats, ["x".into(), 1.into()])]).without_rows(),
    )
    .await;
    assert_eq!(sold(&store, &seats).await, Some(2));
    // A server that has forgotten the token says that the operation is recorded; the writer knows its own.
    proxy.plan("TransactWriteItems", ProxyAction::LoseAnswer);
    proxy.plan("TransactWriteItems", cancelled(&["None", "ConditionalCheckFailed", "None"]));
    let applied = apply(&store, plan("3", [count(&seats)]).log(entry("1")).without_rows()).await;
    assert!(!applied.repeated);
    assert_eq!(sold(&store, &seats).await, Some(3));
}

#[tokio::test]
async fn a_lost_answer_of_a_single_write_is_an_unknown_outcome() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    apply(&store, plan("0", [insert(&seats, 1)])).await;
    for action in [ProxyAction::LoseAnswer, ProxyAction::Swallow, failure("InternalServerError")] {
        proxy.plan("UpdateItem", action);
        let outcome = store.commit(&plan("1", [count(&seats)]).build().unwrap()).await;
        assert!(matches!(outcome, Err(StoreError::OutcomeUnknown { .. })), "{outcome:?}");
    }
    assert_eq!(sold(&store, &seats).await, Some(1), "of the three the first was applied");
}

#[tokio::test]
async fn an_unknown_outcome_can_be_resolved() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    apply(&store, plan("0", [insert(&seats, 1)])).await;
    for (operation, first) in [("applied", ProxyAction::LoseAnswer), ("lost", ProxyAction::Swallow)] {
        proxy.plan("TransactWriteItems", first);
        for _ in 0..7 {
            proxy.plan("TransactWriteItems", ProxyAction::Swallow);
        }
        for _ in 0..12 {
            proxy.plan("GetItem", failure("InternalServerError"));
        }
        let logged = plan(operation, [count(&seats)]).log(entry("1")).without_rows().build().unwrap();
        let outcome = store.commit(&logged).await;
        assert!(matches!(outcome, Err(StoreError::OutcomeUnknown { .. })), "{outcome:?}");
        assert!(proxy.is_done());
        let resolution = store.resolve(&acme(), operation).await.unwrap();
        match operation {
            "applied" => {
                let Resolution::Applied(record) = resolution else { panic!("{resolution:?}") };
                assert!(record.position.is_some());
                assert!(
                    matches!(store.commit(&logged).await.unwrap(), Commit::Applied(again) if again.repeated)
                );
            }
            _ => {
                assert_eq!(resolution, Resolution::Aborted);
                assert_eq!(store.commit(&logged).await.unwrap(), Commit::Fenced);
            }
        }
    }
    assert_eq!(sold(&store, &seats).await, Some(1));
}

#[tokio::test]
async fn a_claim_whose_answer_is_lost_still_fences() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    proxy.plan("TransactWriteItems", ProxyAction::LoseAnswer);
    assert_eq!(store.resolve(&acme(), "op").await.unwrap(), Resolution::Aborted);
    let late = plan("op", [insert(&seats, 1)]).log(entry("1")).build().unwrap();
    assert_eq!(store.commit(&late).await.unwrap(), Commit::Fenced);
}

#[tokio::test]
async fn a_server_that_is_not_there_is_unavailable_and_nothing_is_unknown() {
    let mut nowhere = options("http://127.0.0.1:1");
    nowhere.request_timeout = Duration::from_secs(2);
    let error = DynamoStore::open(nowhere).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
}

#[tokio::test]
async fn parts_of_a_batch_that_were_left_are_asked_for_again() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    for seat in 0..3 {
        apply(&store, plan(&format!("{seat}"), [insert(&seats, seat)])).await;
    }
    // All of it left, then a part of it.
    let all =
        |request: &Json, _: Json| json!({ "Responses": {}, "UnprocessedKeys": request["RequestItems"] });
    proxy.plan("BatchGetItem", ProxyAction::Change(Box::new(all)));
    proxy.plan(
        "BatchGetItem",
        ProxyAction::Change(Box::new(|request, mut answer| {
            let (table, asked) = request["RequestItems"].as_object().unwrap().iter().next().unwrap();
            let last = answer["Responses"][table].as_array_mut().unwrap().pop().unwrap();
            let mut left = asked.clone();
            left["Keys"] = json!([{ "PK": last["PK"], "SK": last["SK"] }]);
            answer["UnprocessedKeys"] = json!({ table: left });
            answer
        })),
    );
    let addresses: Vec<Address> = (0..4)
        .map(|seat| Address::new(&seats, &acme(), ["show".into(), i64::from(seat).into()]).unwrap())
        .collect();
    let rows = store.get(&addresses, Consistency::Strong).await.unwrap();
    assert_eq!(rows.iter().filter(|row| row.is_some()).count(), 3);
    assert!(proxy.is_done());
}

#[tokio::test]
async fn records_that_a_trim_left_are_deleted_by_another_request() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(DynamoOptions { partitions: Some(1), ..options(&proxy.endpoint) }, &[&seats]).await;
    for number in 0..5 {
        apply(&store, plan(&format!("{number}"), []).log(entry("1"))).await;
    }
    assert_eq!(log(&store, 0).await.len(), 5);
    let nothing_done = |request: &Json, _: Json| json!({ "UnprocessedItems": request["RequestItems"] });
    proxy.plan("BatchWriteItem", ProxyAction::Change(Box::new(nothing_done)));
    store.trim_log(0, 3).await.unwrap();
    let page = store.read_log(0, 0, 10).await.unwrap();
    assert_eq!((page.oldest, page.head, page.records.len()), (4, 5, 2));
    assert!(proxy.is_done());
}

/// Answers a query or a walk with an empty page that is not the last one.
fn empty_page(start: Json) -> ProxyAction {
    ProxyAction::Change(Box::new(
        move |_, _| json!({ "Items": [], "Count": 0, "ScannedCount": 0, "LastEvaluatedKey": start }),
    ))
}

#[tokio::test]
async fn an_empty_page_is_not_the_end() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(DynamoOptions { partitions: Some(1), ..options(&proxy.endpoint) }, &[&seats]).await;
    for seat in 0..3 {
        apply(&store, plan(&format!("{seat}"), [insert(&seats, seat)]).log(entry("1"))).await;
    }
    let before_all = json!({ "PK": { "S": "acme#show#" }, "SK": { "S": "!" } });
    for _ in 0..3 {
        proxy.plan("Query", empty_page(before_all.clone()));
    }
    let query = Query::table(&seats, &acme(), ["show".into()]).unwrap();
    let page = store.query(&query).await.unwrap();
    assert_eq!((page.rows.len(), page.next), (3, None));
    // More empty pages than one call goes through: the caller gets a page without rows, and goes on from there.
    let at = json!({ "PK": { "S": "acme#show#" }, "SK": { "S": "-9999999999999999999#" } });
    for _ in 0..16 {
        proxy.plan("Query", empty_page(at.clone()));
    }
    let page = store.query(&query).await.unwrap();
    assert!(page.rows.is_empty());
    let rest = query.after(page.next.expect("there is more")).unwrap();
    assert_eq!(store.query(&rest).await.unwrap().rows.len(), 3);
    proxy.plan("Scan", empty_page(json!({ "PK": { "S": "acme#show#" }, "SK": { "S": "!" } })));
    let mut walked = Vec::new();
    let mut walk = Scan::of(&seats, &acme());
    loop {
        let page = store.scan(&walk).await.unwrap();
        walked.extend(page.rows);
        match page.next {
            Some(next) => walk = walk.after(next).unwrap(),
            None => break,
        }
    }
    assert_eq!(walked.len(), 3);
    // The pending, then the log itself.
    proxy.plan("Query", empty_page(json!({ "partition": { "N": "0" }, "place": { "S": "!" } })));
    proxy.plan("Query", ProxyAction::Pass);
    proxy.plan("Query", ProxyAction::Pass);
    proxy.plan("Query", empty_page(json!({ "partition": { "N": "0" }, "offset": { "N": "0.5" } })));
    assert_eq!(store.read_log(0, 0, 10).await.unwrap().records.len(), 3);
    assert!(proxy.is_done());
}

#[tokio::test]
async fn a_page_of_the_log_ends_before_what_is_not_visible_yet() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(DynamoOptions { partitions: Some(1), ..options(&proxy.endpoint) }, &[&seats]).await;
    for number in 0..5 {
        apply(&store, plan(&format!("{number}"), []).log(entry("1"))).await;
    }
    assert_eq!(log(&store, 0).await.len(), 5);
    // Nothing is pending; the log shows all but the third, as while a move is being applied.
    proxy.plan("Query", ProxyAction::Pass);
    proxy.plan(
        "Query",
        ProxyAction::Change(Box::new(|_, mut answer| {
            answer["Items"].as_array_mut().unwrap().remove(2);
            answer
        })),
    );
    let page = store.read_log(0, 0, 10).await.unwrap();
    let offsets: Vec<u64> = page.records.iter().map(|record| record.position.unwrap().offset).collect();
    assert_eq!(offsets, [1, 2]);
    assert_eq!(log(&store, 0).await.len(), 5);
}

#[tokio::test]
async fn a_migration_that_was_cut_off_is_finished_by_the_next() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let options = DynamoOptions { schema_lease: Duration::from_millis(20), ..options(&proxy.endpoint) };
    let store = open(options.clone(), &[&seats]).await;
    for seat in 0..3 {
        apply(&store, plan(&format!("{seat}"), [insert(&seats, seat)])).await;
    }
    let wider = Table::named("seats")
        .partition("event", Type::Text)
        .sort("seat", Type::Int)
        .defaulted("status", Type::Text, "FREE")
        .optional("holder", Type::Text)
        .optional("sold", Type::Int)
        .optional("weight", Type::Float)
        .defaulted("price", Type::Int, 10)
        .index("by_holder", &["holder"], &[])
        .index("by_price", &["price"], &["status"])
        .build()
        .unwrap();
    let schema = Schema::new([wider.clone()]).unwrap();
    // The definitions can be read; the walk over the rows is refused.
    proxy.plan("Scan", ProxyAction::Pass);
    proxy.plan("Scan", failure("AccessDeniedException"));
    let cut = store.migrate(&schema, Migrate::Apply).await;
    assert!(matches!(cut, Err(StoreError::Unavailable { .. })), "{cut:?}");
    let other = DynamoStore::open(options).await.unwrap();
    other.migrate(&schema, Migrate::Apply).await.unwrap();
    let by_price = Query::index(&wider, "by_price", &acme(), [10.into()]).unwrap();
    let rows = other.query(&by_price).await.unwrap().rows;
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.int("price") == Some(10) && row.version() == 1));
    assert!(other.migrate(&schema, Migrate::Show).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_record_that_fills_an_item_finds_its_rows_all_the_same() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(DynamoOptions { partitions: Some(1), ..options(&proxy.endpoint) }, &[&seats]).await;
    let long = "n".repeat(450);
    let steps = |holder: &'static str| -> Vec<Step> {
        let key = |seat: i64| [long.as_str().into(), seat.into()];
        (0..90).map(|seat| Step::upsert(&seats, key(seat)).set("holder", holder)).collect()
    };
    let full = |operation: &str, holder: &'static str| {
        let told = EventTemplate::named("told").with("text", "x".repeat(390_000));
        plan(operation, steps(holder)).log(Entry::about("seat", operation).event(told)).without_rows()
    };
    for (operation, holder) in [("1", "ann"), ("2", "bob"), ("3", "cid")] {
        apply(&store, full(operation, holder)).await;
    }
    // Only the last one is in sight at first.
    proxy.plan(
        "Query",
        ProxyAction::Change(Box::new(|_, mut answer| {
            answer["Items"].as_array_mut().unwrap().retain(|item| item["operation"]["S"] == "3");
            answer
        })),
    );
    proxy.plan("Query", ProxyAction::Pass);
    let order: Vec<String> = log(&store, 0).await.into_iter().map(|record| record.operation).collect();
    assert_eq!(order, ["1", "2", "3"]);
}
