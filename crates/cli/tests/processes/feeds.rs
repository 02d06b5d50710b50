//! Two servers on one store share the work of projecting a feed. One that is killed loses nothing, also while the feed is built
//! anew.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::{Value as Json, json};
use statehouse_store::{Clock as _, SystemClock, Value};

use crate::served::{Namespace, Server, system, until};

/// Short, so that the test is; the default is ten seconds.
const LEASE: [&str; 2] = ["--set", "worker_lease_ms=1500"];
const VIEWERS: i64 = 6;

/// What a reader sees, by number, and the words of each; nothing while it is built for the first time.
fn feed(server: &Server, viewer: i64) -> BTreeMap<i64, String> {
    let path = format!("/v1/home?viewer_id={viewer}&limit=500");
    let (status, rows) = server.ask("GET", &path, &Json::Null);
    if status == 503 {
        return BTreeMap::new();
    }
    assert_eq!(status, 200, "{rows}");
    let row =
        |row: &Json| (row["post_id"].as_i64().unwrap(), row["post_preview"].as_str().unwrap().to_owned());
    rows.as_array().unwrap().iter().map(row).collect()
}

#[test]
fn a_server_that_is_killed_loses_nothing_of_a_feed() {
    let (namespace, folder) = (Namespace::new(), tempfile::tempdir().unwrap());
    let start = || Server::start(&system("feed"), &namespace.url(), folder.path(), &LEASE);
    let [first, second] = [start(), start()];
    let mut expected: BTreeMap<i64, BTreeMap<i64, String>> = BTreeMap::new();
    for viewer in 1..=VIEWERS {
        first.send("PUT", &format!("/v1/follow/{viewer},{}", 100 + viewer % 2), &json!({}));
    }
    let mut post = |server: &Server, number: i64| {
        let (author, body) = (100 + number % 2, format!("post {number}"));
        let at = Value::Time(SystemClock.now()).to_json();
        let input = json!({"post_id": number, "author_id": author, "created_at": at, "body": body});
        server.send("POST", "/v1/post", &input);
        for viewer in (1..=VIEWERS).filter(|viewer| 100 + viewer % 2 == author) {
            expected.entry(viewer).or_default().insert(number, body.clone());
        }
        expected.clone()
    };
    let shows = |wanted: &BTreeMap<i64, BTreeMap<i64, String>>| {
        wanted.iter().all(|(viewer, posts)| feed(&second, *viewer) == *posts)
    };
    for number in 1..=10 {
        post(&first, number);
    }
    let wanted = post(&second, 11);
    until("the feeds have the first posts", || shows(&wanted));
    until("both servers project", || {
        [&first, &second].iter().all(|server| server.shards_of("home.project") > 0)
    });
    let rebuild = Command::new(env!("CARGO_BIN_EXE_statehouse"))
        .args(["projection", "rebuild", "home", "--detach", "--blueprint"])
        .arg(system("feed"))
        .args(["--store", &namespace.url()])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(rebuild.status.success(), "{}", String::from_utf8_lossy(&rebuild.stderr));
    for number in 12..=30 {
        post(if number % 2 == 0 { &first } else { &second }, number);
    }
    // With its leases in its hands, and whatever it was about to write.
    first.process.signal("KILL");
    let wanted = post(&second, 31);
    until("the feeds have all posts", || shows(&wanted));
    let generation =
        || second.send("GET", "/v1/home?viewer_id=1&limit=1", &Json::Null)[0]["generation"].as_i64();
    until("the new generation is read", || generation() == Some(2));
    until("it has all posts as well", || shows(&wanted));
}
