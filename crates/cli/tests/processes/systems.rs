//! The systems that are ready to run, on a SQLite file and on PostgreSQL.

use std::process::Command;

use serde_json::Value as Json;

use crate::served::Namespace;

const SYSTEMS: [&str; 7] = ["auction", "catalog", "feed", "jobs", "library", "profile", "tickets"];

/// Runs the scenario of a system. Its exit code says whether all its invariants hold.
fn demo(system: &str, store: &str, folder: &std::path::Path) {
    let run = Command::new(env!("CARGO_BIN_EXE_statehouse"))
        .args(["demo", system, "--json", "--callers", "4", "--actions", "25", "--store", store])
        .current_dir(folder)
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{system} on {store}: {out}{err}");
    let report: Json = serde_json::from_str(&out).unwrap();
    assert!(report["invariants"].as_array().unwrap().len() >= 4, "{report}");
    assert_eq!(report["figures"]["actions"], "100", "{report}");
}

#[test]
fn the_invariants_of_systems_hold_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    for system in SYSTEMS {
        demo(system, &format!("sqlite:{system}.db"), folder.path());
    }
}

#[test]
fn the_invariants_of_systems_hold_on_postgresql() {
    let folder = tempfile::tempdir().unwrap();
    for system in SYSTEMS {
        demo(system, &Namespace::new().url(), folder.path());
    }
}
