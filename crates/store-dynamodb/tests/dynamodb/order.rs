//! The order of the log, under everything that could disturb it: clocks that disagree, rows that go and come back,
//! readers that race, records that are not visible yet.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::clock::SkewedClock;
use statehouse_store::guard::column;
use statehouse_store::log::partition_of;
use statehouse_store::{
    Address, Clock, Commit, Consistency, Entry, EventTemplate, ManualClock, Operand, Query, Random, Record,
    Step, Store, SystemClock, Table, Time, Type,
};
use statehouse_store_dynamodb::{DynamoOptions, DynamoStore};

use crate::common::{
    Proxy, ProxyAction, acme, apply, endpoint, entry, insert, log, open, options, plan, seats, servers,
};

fn operations(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.operation.as_str()).collect()
}

/// A clock that is wrong by so much.
fn wrong_by(seconds: i64) -> Arc<dyn Clock> {
    let clock = SkewedClock::over(Arc::new(SystemClock));
    clock.skew(seconds * 1_000_000);
    Arc::new(clock)
}

#[tokio::test]
async fn rows_that_go_and_come_back_stay_in_order_whatever_the_clocks_say() {
    for (name, endpoint, transaction_items) in servers() {
        let seats = seats();
        let shared = DynamoOptions { partitions: Some(1), transaction_items, ..options(&endpoint) };
        let ahead = open(DynamoOptions { clock: wrong_by(3_600), ..shared.clone() }, &[&seats]).await;
        let behind = open(DynamoOptions { clock: wrong_by(-3_600), ..shared }, &[&seats]).await;
        let key = || ["show".into(), 1.into()];
        let mut expected = Vec::new();
        // Insert by one, delete by the other, update in between, with rows and without, logged and not.
        for round in 0..6 {
            let (first, second) = if round % 2 == 0 { (&ahead, &behind) } else { (&behind, &ahead) };
            let steps = [
                (first, Step::insert(&seats, key()), round % 3 == 0),
                (second, Step::update(&seats, key()).set("status", "HELD"), round % 3 == 1),
                (first, Step::update(&seats, key()).set("holder", "ann"), true),
                (second, Step::delete(&seats, key()), round % 3 == 2),
            ];
            for (number, (store, step, rows)) in steps.into_iter().enumerate() {
                let operation = format!("{round}-{number}");
                // A deletion that leaves no record must not make the row forget its order either.
                let logged = !(number == 3 && round == 4);
                let mut builder = plan(&operation, [step]);
                if logged {
                    // Different subjects: only the row ties these plans together.
                    builder = builder.log(entry(&operation));
                    expected.push(operation);
                }
                apply(store, if rows { builder } else { builder.without_rows() }).await;
            }
        }
        assert_eq!(operations(&log(&behind, 0).await), expected, "{name}");
        assert_eq!(operations(&log(&ahead, 0).await), expected, "{name}");
    }
}

#[tokio::test]
async fn a_record_that_is_not_visible_yet_is_not_overtaken() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(DynamoOptions { partitions: Some(1), ..options(&proxy.endpoint) }, &[&seats]).await;
    let change = |number: i64| Step::update(&seats, ["show".into(), 1.into()]).set("sold", number);
    apply(&store, plan("first", [insert(&seats, 1)]).log(entry("a"))).await;
    apply(&store, plan("second", [change(2)]).log(entry("b")).without_rows()).await;
    apply(&store, plan("third", [change(3)]).log(entry("c")).without_rows()).await;
    apply(&store, plan("elsewhere", [insert(&seats, 2)]).log(entry("d"))).await;
    // A list of the pending that has the later records and not the earlier ones, as while a transaction is being
    // applied item by item. The rows know better.
    proxy.plan(
        "Query",
        ProxyAction::Change(Box::new(|_, mut answer| {
            let hidden =
                |item: &Json| ["first", "second"].contains(&item["operation"]["S"].as_str().unwrap());
            answer["Items"].as_array_mut().unwrap().retain(|item| !hidden(item));
            answer
        })),
    );
    let records = log(&store, 0).await;
    assert!(proxy.is_done());
    let order = operations(&records);
    let place = |operation: &str| order.iter().position(|other| *other == operation).unwrap();
    assert!(place("first") < place("second") && place("second") < place("third"), "{order:?}");
    assert_eq!(order.len(), 4);
}

#[tokio::test]
async fn a_trimmed_record_blocks_no_write() {
    let seats = seats();
    let address = endpoint("STATEHOUSE_TEST_DYNAMODB");
    let store = open(DynamoOptions { partitions: Some(1), ..options(&address) }, &[&seats]).await;
    apply(&store, plan("1", [insert(&seats, 1)]).log(entry("a"))).await;
    apply(&store, plan("2", []).log(entry("a"))).await;
    assert_eq!(log(&store, 0).await.len(), 2);
    store.trim_log(0, 1).await.unwrap();
    // The row still carries the marker of the operation that was forgotten, and the id is used again.
    let change = Step::update(&seats, ["show".into(), 1.into()]).set("sold", 1);
    let again = apply(&store, plan("1", [change]).log(entry("a")).without_rows()).await;
    assert!(!again.repeated);
    let page = store.read_log(0, 2, 10).await.unwrap();
    assert_eq!(operations(&page.records), ["1"]);
}

#[tokio::test]
async fn a_row_written_often_without_a_reader_makes_its_writers_help() {
    for (name, endpoint, transaction_items) in servers() {
        let seats = seats();
        let store = open(DynamoOptions { transaction_items, ..options(&endpoint) }, &[&seats]).await;
        apply(&store, plan("start", [insert(&seats, 1)])).await;
        let count = || {
            Step::update(&seats, ["show".into(), 1.into()])
                .set("sold", Operand::Coalesce("sold".into(), 0.into()).add(1))
        };
        for number in 0..60 {
            let builder = plan(&format!("{number}"), [count()]).log(entry(&format!("{}", number % 7)));
            apply(&store, builder.without_rows()).await;
        }
        let mut found = 0;
        for partition in 0..store.partitions() {
            found += log(&store, partition).await.len();
        }
        assert_eq!(found, 60, "{name}");
        let address = Address::new(&seats, &acme(), ["show".into(), 1.into()]).unwrap();
        let row = store.get(&[address], Consistency::Strong).await.unwrap().remove(0).unwrap();
        assert_eq!((row.int("sold"), row.version()), (Some(60), 61), "{name}");
    }
}

/// Rows that many plans write, each plan two of them and none of the same subject.
fn accounts() -> Arc<Table> {
    let table = Table::named("accounts").partition("id", Type::Int).defaulted("balance", Type::Int, 0);
    table.build().unwrap()
}

fn transfer(
    accounts: &Arc<Table>,
    operation: &str,
    from: i64,
    to: i64,
) -> statehouse_store::plan::PlanBuilder {
    let step = |id: i64, amount: i64| {
        Step::update(accounts, [id.into()]).set("balance", column("balance").add(amount))
    };
    let entry = Entry::about("transfer", operation)
        .event(EventTemplate::named("took").with_row_of(0))
        .event(EventTemplate::named("gave").with_row_of(1));
    plan(operation, [step(from, -1), step(to, 1)]).log(entry)
}

/// Writers on stores with wrong clocks, and readers that give out offsets all the while.
async fn race(endpoint: &str, transaction_items: usize, writers: i64, each: i64) {
    const ROWS: u64 = 5;
    let accounts = accounts();
    let shared = DynamoOptions { partitions: Some(2), transaction_items, ..options(endpoint) };
    let first = open(shared.clone(), &[&accounts]).await;
    for id in 0..ROWS {
        apply(&first, plan(&format!("open-{id}"), [Step::insert(&accounts, [(id as i64).into()])])).await;
    }
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..writers {
        let (accounts, shared) = (accounts.clone(), shared.clone());
        tasks.spawn(async move {
            let clock = wrong_by(writer * 40 - 60);
            let store = DynamoStore::open(DynamoOptions { clock, ..shared }).await.unwrap();
            let mut random = Random::seeded(writer as u64);
            for number in 0..each {
                let from = random.below(ROWS);
                let to = (from + 1 + random.below(ROWS - 1)) % ROWS;
                apply(&store, transfer(&accounts, &format!("{writer}-{number}"), from as i64, to as i64))
                    .await;
            }
        });
    }
    let (done, stop) = tokio::sync::watch::channel(false);
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (shared, stop) = (shared.clone(), stop.clone());
        readers.spawn(async move {
            let store = DynamoStore::open(shared).await.unwrap();
            let mut seen: HashMap<u32, Vec<Record>> = HashMap::new();
            loop {
                let last = *stop.borrow();
                for partition in 0..2 {
                    let records = seen.entry(partition).or_default();
                    let page = store.read_log(partition, records.len() as u64, 7).await.unwrap();
                    records.extend(page.records);
                }
                if last {
                    return seen;
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    done.send(true).unwrap();
    let complete: HashMap<u32, Vec<Record>> =
        HashMap::from([(0, log(&first, 0).await), (1, log(&first, 1).await)]);
    assert_eq!(
        complete.values().map(Vec::len).sum::<usize>(),
        (writers * each) as usize,
        "none missing, none twice"
    );
    while let Some(seen) = readers.join_next().await {
        for (partition, records) in seen.unwrap() {
            assert_eq!(records, complete[&partition][..records.len()], "what was read once stays as it was");
        }
    }
    for records in complete.values() {
        let mut versions: HashMap<String, i64> = HashMap::new();
        for record in records {
            assert_eq!(
                partition_of(&acme(), "transfer", &record.operation, 2),
                record.position.unwrap().partition
            );
            for event in &record.events {
                let (id, version) =
                    (event.data["row"]["id"].to_string(), event.data["row"]["version"].as_i64().unwrap());
                let before = versions.insert(id.clone(), version).unwrap_or(0);
                assert!(
                    before < version,
                    "row {id} goes from version {before} to {version} at {:?}",
                    record.position
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_race_and_no_version_is_inverted() {
    race(&endpoint("STATEHOUSE_TEST_DYNAMODB"), 100, 4, 40).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_race_on_amazons_server_too() {
    race(&endpoint("STATEHOUSE_TEST_DYNAMODB_LOCAL"), 10, 3, 12).await;
}

#[tokio::test]
async fn tombstones_are_passed_over_and_swept_when_their_time_has_come() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let store =
        open(DynamoOptions { clock: Arc::new(clock.clone()), ..options(&proxy.endpoint) }, &[&seats]).await;
    for seat in 0..4 {
        apply(&store, plan(&format!("in-{seat}"), [insert(&seats, seat)]).log(entry("a"))).await;
    }
    for seat in 0..3 {
        let delete = Step::delete(&seats, ["show".into(), i64::from(seat).into()]);
        apply(&store, plan(&format!("out-{seat}"), [delete]).log(entry("a")).without_rows()).await;
    }
    let query = Query::table(&seats, &acme(), ["show".into()]).unwrap().limit(1).unwrap();
    let page = store.query(&query).await.unwrap();
    assert_eq!(page.rows.iter().map(|row| row.int("seat")).collect::<Vec<_>>(), [Some(3)]);
    assert!(!proxy.names().contains(&"DeleteItem".to_owned()), "a young tombstone may still be needed");
    clock.advance(Duration::from_secs(3_600));
    store.query(&query).await.unwrap();
    let mut swept = 0;
    for _ in 0..100 {
        swept += proxy.names().iter().filter(|name| *name == "DeleteItem").count();
        if swept == 3 {
            break;
        }
        SystemClock.sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(swept, 3);
    // A row that comes back begins a new life.
    let back = store.commit(&plan("back", [insert(&seats, 1)]).build().unwrap()).await.unwrap();
    assert!(matches!(back, Commit::Applied(applied) if applied.rows[0].as_ref().unwrap().version() == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_of_one_row_all_get_through() {
    let (proxy, seats) = (Proxy::new().await, seats());
    let store = open(options(&proxy.endpoint), &[&seats]).await;
    apply(&store, plan("start", [insert(&seats, 1)])).await;
    proxy.take_requests();
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..48 {
        let (store, seats) = (store.clone(), seats.clone());
        tasks.spawn(async move {
            for number in 0..5 {
                let sold = Operand::Coalesce("sold".into(), 0.into());
                let step = Step::update(&seats, ["show".into(), 1.into()]).set("sold", sold.add(1));
                let builder = plan(&format!("{writer}-{number}"), [step]).log(entry("1"));
                apply(&store, if writer % 2 == 0 { builder } else { builder.without_rows() }).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let transactions = proxy.names().iter().filter(|name| *name == "TransactWriteItems").count();
    assert!(
        transactions < 240 * 8,
        "{transactions} transactions for 240 plans: they are in each other's way"
    );
    let address = Address::new(&seats, &acme(), ["show".into(), 1.into()]).unwrap();
    let row = store.get(&[address], Consistency::Strong).await.unwrap().remove(0).unwrap();
    assert_eq!(row.int("sold"), Some(240));
}
