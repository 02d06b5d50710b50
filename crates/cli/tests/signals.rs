//! What the command does when it is asked to end, and what it says while it runs.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "helpers of tests fail by panicking, as tests do, and wait for processes that have a clock of their own"
)]

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value as Json;

fn start(folder: &tempfile::TempDir, arguments: &[&str]) -> Child {
    // The suite itself may have been started with signals ignored, by `nohup` for example.
    Command::new("env")
        .args(["--default-signal=HUP,INT", env!("CARGO_BIN_EXE_statehouse")])
        .args(arguments)
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn signal(child: &Child, signal: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn a_simulation_that_is_interrupted_prints_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let child = start(&folder, &["simulate", "--seeds", "100000000", "--json"]);
    std::thread::sleep(Duration::from_secs(3));
    signal(&child, "INT");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sum: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(sum["stopped"], true);
    assert!(sum["histories"].as_u64().unwrap() > 0, "{sum}");
}

#[test]
fn a_server_whose_terminal_is_closed_stops_in_order() {
    for asked in ["HUP", "TERM", "INT"] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("statehouse.toml"), "[entity.a]\nkey = { id = \"int\" }\n")
            .unwrap();
        let mut child = start(
            &folder,
            &["serve", "--json", "--listen", "127.0.0.1:0", "--log", "info", "--store", "sqlite:a.db"],
        );
        let mut greeting = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut greeting).unwrap();
        signal(&child, asked);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success(), "{asked}: {said}");
        assert!(said.contains("\"stopped\""), "{asked}: {said}");
    }
}

#[test]
fn a_demo_says_how_far_it_is() {
    let folder = tempfile::tempdir().unwrap();
    for system in ["profile", "feed"] {
        let child = start(&folder, &["demo", system, "--callers", "2", "--actions", "20"]);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        assert!(said.starts_with(&format!("{system}: 0 of 40 actions\n")), "{said}");
        // Between the first and the last line there are others.
        assert!((4..=12).contains(&said.lines().count()), "{said}");
        let last = format!("{system}: 40 of 40 actions; what must hold is checked\n");
        assert!(said.ends_with(&last), "{said}");
    }
}
