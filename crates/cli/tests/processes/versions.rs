//! Servers with an older and a newer blueprint on one PostgreSQL, under load, while the newer one changes the tables.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_store::Row;

use crate::served::{Namespace, Server, pause};

const OLDER: &str = r#"
[house]
name = "rolling"

[entity.item]
key    = { id = "int" }
fields = { shelf = "text", n = { type = "int", default = 0 } }

[view.shelf]
of       = "item"
group_by = ["shelf"]
sum      = ["n"]
count    = true
"#;

/// A field, an index on rows that exist, a view by the field, and a resource more.
const NEWER: &str = r#"
[house]
name = "rolling"

[entity.item]
key     = { id = "int" }
fields  = { shelf = "text", n = { type = "int", default = 0 }, colour = { type = "text", default = "grey" } }
indexes = { by_shelf = ["shelf", "n"] }

[entity.label]
key    = { id = "int" }
fields = { text = "text" }

[view.shelf]
of       = "item"
group_by = ["shelf"]
sum      = ["n"]
count    = true

[view.colours]
of       = "item"
group_by = ["colour"]
count    = true
"#;

const ITEMS: i64 = 40;
const WRITERS: i64 = 3;

/// Adds one to items in turn until told to stop. Returns how many were acknowledged.
fn write(server: &Server, writer: i64, is_over: &AtomicBool) -> i64 {
    let mut done = 0;
    while !is_over.load(Ordering::Relaxed) {
        let item = (done * WRITERS + writer) % ITEMS;
        let answer = server.send("POST", &format!("/v1/item/{item}/mutate"), &json!({"increment": {"n": 1}}));
        assert!(answer["version"].as_i64().unwrap() > 1, "{answer}");
        done += 1;
        // Steady work, and not all that the machine can do.
        pause(Duration::from_millis(10));
    }
    done
}

/// Starts writers at a server.
fn writers(server: &Arc<Server>, is_over: &Arc<AtomicBool>) -> Vec<JoinHandle<i64>> {
    let start = |writer| {
        let (server, is_over) = (server.clone(), is_over.clone());
        std::thread::spawn(move || write(&server, writer, &is_over))
    };
    (0..WRITERS).map(start).collect()
}

/// Waits until the groups of a view are as expected.
fn view_reaches(server: &Server, view: &str, expected: &dyn Fn(&[Json]) -> bool) {
    let mut last = Json::Null;
    for _ in 0..3_000 {
        let (status, answer) = server.ask("GET", &format!("/v1/{view}"), &Json::Null);
        if status == 200 && answer.as_array().is_some_and(|groups| expected(groups)) {
            return;
        }
        last = answer;
        pause(Duration::from_millis(20));
    }
    panic!("{view} was not up to date after a minute: {last}");
}

fn total(groups: &[Json], column: &str) -> i64 {
    groups.iter().map(|group| group[column].as_i64().unwrap()).sum()
}

#[test]
fn two_blueprints_serve_at_once_under_load() {
    let (namespace, folder) = (Namespace::new(), tempfile::tempdir().unwrap());
    let file = |name: &str, text: &str| -> PathBuf {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    let (older, newer) = (file("older.toml", OLDER), file("newer.toml", NEWER));
    let start = |blueprint| Arc::new(Server::start(blueprint, &namespace.url(), folder.path(), &[]));
    let first = start(&older);
    for id in 0..ITEMS {
        first.send("POST", "/v1/item", &json!({"id": id, "shelf": format!("s{}", id % 4)}));
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let mut writing = writers(&first, &is_over);
    // The tables change while the older server writes, and the older one goes on.
    let second = start(&newer);
    writing.extend(writers(&second, &is_over));
    let by_shelf = second.send("GET", "/v1/item?shelf=s1&sort=n&limit=100", &Json::Null);
    assert_eq!(by_shelf.as_array().unwrap().len(), 10, "{by_shelf}");
    second.send("POST", "/v1/item/0/mutate", &json!({"set": {"colour": "red"}}));
    second.send("POST", "/v1/label", &json!({"id": 1, "text": "new"}));
    // A row of the newer server is changed by the older one, and keeps the field that the older one does not know.
    second.send("POST", "/v1/item", &json!({"id": 1_000, "shelf": "s9", "colour": "blue"}));
    first.send("POST", "/v1/item/1000/mutate", &json!({"increment": {"n": 1}}));
    assert_eq!(second.send("GET", "/v1/item/1000", &Json::Null)["colour"], "blue");
    // The change can be undone: a server with the older blueprint starts again.
    start(&older).send("GET", "/v1/item/1", &Json::Null);
    view_reaches(&second, "colours", &|groups| total(groups, "count") == ITEMS + 1);
    is_over.store(true, Ordering::Relaxed);
    let acknowledged = writing.into_iter().map(|writer| writer.join().unwrap()).sum::<i64>() + 1;
    for server in [&first, &second] {
        view_reaches(server, "shelf", &|groups| total(groups, "sum_n") == acknowledged);
    }
    view_reaches(&second, "colours", &|groups| {
        let of =
            |colour: &str| groups.iter().find(|group| group["colour"] == colour).map(|group| &group["count"]);
        (of("grey"), of("red"), of("blue")) == (Some(&json!(ITEMS - 1)), Some(&json!(1)), Some(&json!(1)))
    });
    assert!(acknowledged > ITEMS, "only {acknowledged} writes were made");
    let (rows, records) = namespace.stored(&newer, "items");
    assert_eq!(rows.iter().filter_map(|row| row.int("n")).sum::<i64>(), acknowledged);
    // Each write of each row has its event, once.
    let written: i64 = rows.iter().map(Row::version).sum();
    let events = records.iter().flat_map(|record| &record.events);
    let told = events.filter(|event| event.name.starts_with("item.")).count();
    assert_eq!(i64::try_from(told).unwrap(), written);
}
