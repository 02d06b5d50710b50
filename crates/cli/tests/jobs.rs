//! Workers in other languages, over HTTP, as they stand in `systems/jobs`: they share the jobs of a served house, and one that
//! is killed with a job in its hands loses nothing.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "helpers of tests fail by panicking, as tests do, and wait for processes that have a clock of their own"
)]

use std::io::{BufRead as _, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value as Json, json};

fn system() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../systems/jobs")
}

/// A process that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct House {
    _server: Running,
    address: String,
    _folder: tempfile::TempDir,
}

impl House {
    fn serve() -> House {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_statehouse"))
            .args(["serve", "--json", "--listen", "127.0.0.1:0", "--log", "warn", "--blueprint"])
            .arg(system().join("statehouse.toml"))
            .args(["--store", "sqlite:jobs.db"])
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let greeting: Json = serde_json::from_str(&line).unwrap();
        let address = greeting["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        House { _server: Running(child), address, _folder: folder }
    }

    /// One request, and the body of its answer.
    fn send(&self, method: &str, path: &str, body: &Json) -> Json {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
        serde_json::from_str(body).unwrap()
    }

    fn enqueue(&self, job: &str, payload: &Json) {
        self.send("POST", "/v1/job", &json!({"job_id": job, "payload": payload}));
    }

    fn job(&self, job: &str) -> Json {
        self.send("GET", &format!("/v1/job/{job}"), &Json::Null)
    }

    /// Waits until a job is in a state.
    fn wait_for(&self, job: &str, state: &str) -> Json {
        for _ in 0..3_000 {
            let row = self.job(job);
            if row["state"] == state {
                return row;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{job} never was {state}: {}", self.job(job))
    }

    fn worker(&self, program: &str, script: &str, name: &str, more: &[&str]) -> Running {
        let child = Command::new(program)
            .arg(system().join(script))
            .args([&format!("http://{}", self.address), "default", "--name", name, "--lease-ms", "2000"])
            .args(more)
            .spawn();
        Running(child.unwrap_or_else(|error| panic!("{program} is needed for {script}: {error}")))
    }
}

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
    std::thread::sleep(Duration::from_millis(3_000));
    let _heir = house.worker(second.0, second.1, "heir", &[]);
    std::thread::sleep(Duration::from_millis(500));
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
