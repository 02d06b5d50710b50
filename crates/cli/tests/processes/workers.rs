//! Workers in other languages, over HTTP, as they stand in `systems/jobs`: they share the jobs of a served house, and one that
//! is killed with a job in its hands loses nothing.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::served::{Running, Server, pause, system};

struct House {
    server: Server,
    _folder: tempfile::TempDir,
}

fn folder() -> PathBuf {
    system("jobs").parent().unwrap().to_owned()
}

impl House {
    fn serve() -> House {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(&system("jobs"), "sqlite:jobs.db", folder.path(), &[]);
        House { server, _folder: folder }
    }

    fn enqueue(&self, job: &str, payload: &Json) {
        self.server.send("POST", "/v1/job", &json!({"job_id": job, "payload": payload}));
    }

    fn job(&self, job: &str) -> Json {
        self.server.send("GET", &format!("/v1/job/{job}"), &Json::Null)
    }

    /// Waits until a job is in a state.
    fn wait_for(&self, job: &str, state: &str) -> Json {
        for _ in 0..3_000 {
            let row = self.job(job);
            if row["state"] == state {
                return row;
            }
            pause(Duration::from_millis(20));
        }
        panic!("{job} never was {state}: {}", self.job(job))
    }

    fn worker(&self, program: &str, script: &str, name: &str, more: &[&str]) -> Running {
        let child = Command::new(program)
            .arg(folder().join(script))
            .args([
                &format!("http://{}", self.server.address),
                "default",
                "--name",
                name,
                "--lease-ms",
                LEASE_MS,
            ])
            .args(more)
            .spawn();
        Running(child.unwrap_or_else(|error| panic!("{program} is needed for {script}: {error}")))
    }
}

/// So long that a machine with much else to do does not miss a beat of it.
const LEASE_MS: &str = "6000";
const PYTHON: (&str, &str) = ("python3", "worker.py");
const NODE: (&str, &str) = ("node", "worker.mjs");

#[test]
fn workers_in_python_and_node_share_the_jobs() {
    let house = House::serve();
    for number in 0..40 {
        house.enqueue(&format!("sum-{number}"), &json!({"add": [number, 1]}));
    }
    house.enqueue("broken", &json!({"add": 7}));
    let workers =
        [PYTHON, NODE].map(|(program, script)| house.worker(program, script, program, &["--until-empty"]));
    for mut worker in workers {
        assert!(worker.0.wait().unwrap().success());
    }
    for number in 0..40 {
        let row = house.job(&format!("sum-{number}"));
        assert_eq!((&row["state"], &row["attempt"]), (&json!("COMPLETED"), &json!(1)), "{row}");
        assert_eq!(row["result"]["value"], number + 1, "{row}");
    }
    // What cannot be done is told, and tried again after a rest.
    let broken = house.job("broken");
    assert!(["RETRYING", "IN_PROGRESS"].contains(&broken["state"].as_str().unwrap()), "{broken}");
    assert!(broken["error"].as_str().is_some_and(|error| error.contains("TypeError")), "{broken}");
}

/// A worker in one language is killed with a job in its hands, and one in another has it when the lease is over.
fn killed(first: (&str, &str), second: (&str, &str)) {
    let house = House::serve();
    house.enqueue("hangs", &json!({"hang_on_attempt": 1}));
    let doomed = house.worker(first.0, first.1, "doomed", &[]);
    let row = house.wait_for("hangs", "IN_PROGRESS");
    assert_eq!(row["worker"], "doomed");
    // For longer than a lease its heart beats.
    pause(Duration::from_millis(7_000));
    let _heir = house.worker(second.0, second.1, "heir", &[]);
    pause(Duration::from_millis(500));
    assert_eq!(house.job("hangs")["attempt"], 1);
    drop(doomed);
    let row = house.wait_for("hangs", "COMPLETED");
    assert_eq!((&row["attempt"], &row["result"]["by"]), (&json!(2), &json!("heir")), "{row}");
}

#[test]
fn a_python_worker_that_is_killed_loses_nothing() {
    killed(PYTHON, NODE);
}

#[test]
fn a_node_worker_that_is_killed_loses_nothing() {
    killed(NODE, PYTHON);
}
