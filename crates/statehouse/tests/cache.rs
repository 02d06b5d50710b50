//! Cached reads through the house: they see the caller's own writes, and everybody else's through the log. Each of these
//! goes red if the follower stops discarding what records are about.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::needless_pass_by_value,
    reason = "helpers of tests fail by panicking and take literals, as tests do"
)]

use std::sync::Arc;

use serde_json::{Value as Json, json};
use statehouse::{Answer, Blueprint, Expected, House, Operation, Request};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Migrate, ModelStore, Store, Tenant};

const BLUEPRINT: &str = r#"
[house]
name = "shop"

[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text", views = { type = "int", default = 0 } }
hot    = ["views"]
"#;

async fn house(store: &Arc<dyn Store>) -> House {
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT).unwrap();
    let house = House::over(store.clone(), &blueprint).unwrap();
    house.migrate(Migrate::Apply).await.unwrap();
    house
}

fn tenant() -> Tenant {
    Tenant::new("acme").unwrap()
}

fn request(action: &str, user: i64, input: Json, version: Option<i64>) -> Request {
    let key = if action == "create" { vec![] } else { vec![user.into()] };
    let input = input.as_object().cloned().unwrap();
    Request { action: format!("profile.{action}"), key, input, expected: version.map(Expected::Version) }
}

async fn call(house: &House, action: &str, user: i64, input: Json, version: Option<i64>) -> Answer {
    house.call(&tenant(), request(action, user, input, version), Operation::default()).await.unwrap()
}

async fn cached(house: &House, user: i64, after: Option<&str>) -> Answer {
    let mut input = json!({"consistency": "cached"});
    if let Some(after) = after {
        input["after"] = after.into();
    }
    call(house, "read", user, input, None).await
}

/// Reads until the answer comes out of the cache and is as wanted; fails if that takes too long.
async fn until_cached(house: &House, user: i64, wanted: impl Fn(&Answer) -> bool) {
    let stopwatch = Stopwatch::start();
    loop {
        let hits = house.cache().figures().hits;
        let answer = cached(house, user, None).await;
        if house.cache().figures().hits > hits && wanted(&answer) {
            return;
        }
        assert!(stopwatch.elapsed().as_secs() < 20, "the cache still answers {answer:?}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_throws_the_old_row_out() {
    let store: Arc<dyn Store> = Arc::new(ModelStore::new());
    let (here, there) = (house(&store).await, house(&store).await);
    here.start_followers();
    call(&here, "create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await;
    until_cached(&here, 1, |answer| answer.version == Some(1)).await;
    // By another house, as another process would.
    call(&there, "patch", 1, json!({"display_name": "B"}), Some(1)).await;
    until_cached(&here, 1, |answer| answer.version == Some(2)).await;
    // A hot field stands in another row.
    call(&there, "mutate", 1, json!({"increment": {"views": 3}}), None).await;
    until_cached(&here, 1, |answer| answer.body["views"] == 3).await;
    // The second subject of a batch, whose record stands under the first.
    let batch = vec![
        request("create", 2, json!({"user_id": 2, "display_name": "Bob"}), None),
        request("patch", 1, json!({"display_name": "C"}), Some(2)),
    ];
    there.batch(&tenant(), batch, Operation::default()).await.unwrap();
    until_cached(&here, 1, |answer| answer.version == Some(3)).await;
    call(&there, "delete", 1, json!({}), None).await;
    let stopwatch = Stopwatch::start();
    let read = || request("read", 1, json!({"consistency": "cached"}), None);
    while here.call(&tenant(), read(), Operation::default()).await.is_ok() {
        assert!(stopwatch.elapsed().as_secs() < 20, "the cache still answers for a deleted row");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_never_answered_with_something_older() {
    let store: Arc<dyn Store> = Arc::new(ModelStore::new());
    let house = Arc::new(house(&store).await);
    house.start_followers();
    call(&house, "create", 1, json!({"user_id": 1, "display_name": "0"}), None).await;
    until_cached(&house, 1, |_| true).await;
    // Others read all the time, so that the cache is full of what is old a moment later.
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let house = house.clone();
            tokio::spawn(async move {
                for _ in 0..2_000 {
                    cached(&house, 1, None).await;
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for version in 1..500 {
        let written =
            call(&house, "patch", 1, json!({"display_name": version.to_string()}), Some(version)).await;
        let token = written.token.expect("a write has a token");
        let read = cached(&house, 1, Some(&token)).await;
        assert_eq!(read.version, Some(version + 1));
    }
    for reader in readers {
        reader.await.unwrap();
    }
    let figures = house.cache().figures();
    assert!(figures.hits > 0 && figures.bypasses > 0, "{figures:?}");
}

#[tokio::test]
async fn without_followers_cached_reads_are_strong() {
    let store: Arc<dyn Store> = Arc::new(ModelStore::new());
    let house = house(&store).await;
    call(&house, "create", 1, json!({"user_id": 1, "display_name": "0"}), None).await;
    for version in 1..5 {
        assert_eq!(cached(&house, 1, None).await.version, Some(version));
        call(&house, "patch", 1, json!({"display_name": version.to_string()}), Some(version)).await;
    }
    assert_eq!(house.cache().figures().hits, 0);
    // A write that changes nothing leaves nothing in the log, so there is nothing to wait for.
    assert_eq!(call(&house, "patch", 1, json!({}), Some(5)).await.token, None);
}
