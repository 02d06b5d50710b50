//! What `explain` says of every action of a system on every engine, kept in files: a change of what the engines get shows.
//!
//! `STATEHOUSE_BLESS=1 cargo test -p statehouse-cli --test explain` writes the files anew.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn explain(blueprint: &Path, resource: &str, engine: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_statehouse"))
        .args(["explain", resource, "--on", engine, "--blueprint"])
        .arg(blueprint)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A resource of a system.
fn check(system: &str, resource: &str, actions: &[&str]) {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    check_in(&root.join("systems").join(system).join("statehouse.toml"), resource, actions);
}

/// A resource of a blueprint that stands beside the golden files.
fn check_in_own(blueprint: &str, resource: &str, actions: &[&str]) {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    check_in(&golden.join(blueprint), resource, actions);
}

fn check_in(blueprint: &Path, resource: &str, actions: &[&str]) {
    let bless = std::env::var_os("STATEHOUSE_BLESS").is_some();
    for engine in ["sqlite", "postgres", "dynamodb"] {
        let text = explain(blueprint, resource, engine);
        let name = format!("{resource}-{engine}.txt");
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/explain").join(&name);
        if bless {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        let differs = text.lines().zip(golden.lines()).position(|(is, was)| is != was);
        assert!(
            text == golden,
            "{name} differs, first in line {differs:?}; STATEHOUSE_BLESS=1 writes it anew\n{text}"
        );
        for action in actions {
            assert!(text.contains(&format!("{action} {resource} -> ")), "{name} does not explain {action}");
        }
        assert_eq!(text.matches("(concrete, on").count(), text.matches("(abstract: ").count(), "{name}");
    }
}

const ENTITY: [&str; 8] = ["create", "read", "list", "update", "patch", "mutate", "delete", "restore"];

#[test]
fn every_action_of_an_entity_on_every_engine() {
    check("profile", "profile", &ENTITY);
}

#[test]
fn an_entity_with_hot_fields() {
    check("catalog", "product", &ENTITY);
}

#[test]
fn every_action_of_leases_timers_groups_views_and_effects() {
    let blueprint = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("rooms.toml");
    let text = "[house]\nname = \"rooms\"\n[lease.lock]\nkey = { name = \"text\" }\n[timer.bell]\nkey = { id = \"int\" }\n[log.audit]\n\
                [entity.thing]\nkey = { id = \"int\" }\nfields = { n = \"int\" }\n\
                [view.sums]\nof = \"thing\"\ngroup_by = [\"n\"]\nsum = [\"n\"]\nmax = [\"n\"]\n\
                [effect.charge]\nurl = \"https://psp.example/\"\nreconcile = { url = \"https://psp.example/{key}\" }\n\
                [effect.hook]\nhosts = [\"*.example.com\"]\n";
    std::fs::write(&blueprint, text).unwrap();
    for (resource, actions) in
        [("lock", 6), ("bell", 4), ("audit", 9), ("audit_parked", 3), ("sums", 2), ("charge", 7), ("hook", 6)]
    {
        for engine in ["sqlite", "postgres", "dynamodb"] {
            let output = Command::new(env!("CARGO_BIN_EXE_statehouse"))
                .args(["explain", resource, "--on", engine, "--blueprint"])
                .arg(&blueprint)
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(text.matches("(concrete, on").count(), actions, "{resource} on {engine}:\n{text}");
        }
    }
}

#[test]
fn every_action_of_a_booking() {
    check("tickets", "seat", &["create", "read", "list"]);
    let bookings = ["hold", "read", "list", "extend", "confirm", "cancel", "expire"];
    check("tickets", "seat_booking", &bookings);
}

#[test]
fn every_action_of_a_relation_and_a_thread() {
    check_in_own("square.toml", "follow", &["add", "remove", "has"]);
    check_in_own("square.toml", "follow_in", &["list", "count"]);
    let comments = ["append", "read", "list", "edit", "remove", "hide", "restore"];
    check_in_own("square.toml", "comment", &comments);
    check_in_own("square.toml", "comment_thread", &["read"]);
}

#[test]
fn every_action_of_a_sequence() {
    check_in_own("sequences.toml", "ticket", &["next", "lease", "read", "ranges"]);
    check_in_own("sequences.toml", "invoice_no", &["take", "read", "list"]);
    check_in_own("sequences.toml", "order_id", &["lease", "reserve", "release", "next", "read", "list"]);
}

#[test]
fn every_action_of_a_schedule() {
    check("jobs", "job", &["enqueue", "read", "list", "complete", "fail", "cancel", "replay"]);
    let queue = ["claim", "heartbeat", "complete", "fail", "replay", "pause", "resume", "read"];
    check("jobs", "job_queue", &queue);
    let definition = ["create", "pause", "resume", "delete", "run", "read", "list", "history"];
    check("jobs", "job_definition", &definition);
}

#[test]
fn every_action_of_a_feed_and_a_view() {
    check("feed", "home", &["list", "read", "seen"]);
    check("feed", "posts_by_author", &["list", "read"]);
}
