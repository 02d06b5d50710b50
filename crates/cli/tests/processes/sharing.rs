//! Two servers on one PostgreSQL share the house's own work and the jobs of workers. One that is killed, or sleeps through its
//! leases, loses nothing and doubles nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value as Json, json};
use statehouse_store::Time;

use crate::served::{Namespace, Running, Server, counted, system, until};

const BLUEPRINT: &str = r#"
[house]
name = "shared"

[booking.seat]
key      = { event_id = "text", seat_no = "int" }
hold_for = "1s"
shards   = 4

[timer.alarm]
key    = { id = "int" }
shards = 4

[schedule.job]
lease  = "1s"
shards = 4
"#;

/// Short, so that the test is; the default is ten seconds.
const LEASE: [&str; 2] = ["--set", "worker_lease_ms=1500"];
const ALARMS: i64 = 24;
const SEATS: i64 = 12;
const JOBS: i64 = 24;

struct Scene {
    namespace: Namespace,
    folder: tempfile::TempDir,
}

impl Scene {
    fn set() -> Scene {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("statehouse.toml"), BLUEPRINT).unwrap();
        Scene { namespace: Namespace::new(), folder }
    }

    fn blueprint(&self) -> PathBuf {
        self.folder.path().join("statehouse.toml")
    }

    fn server(&self) -> Server {
        Server::start(&self.blueprint(), &self.namespace.url(), self.folder.path(), &LEASE)
    }

    /// Timers, holds and jobs that become due over the next seconds, numbered from here on.
    fn burden(&self, server: &Server, first: i64) {
        for number in 0..ALARMS {
            let alarm = format!("/v1/alarm/{}", first + number);
            server.send("PUT", &alarm, &json!({"after_ms": number * 120}));
        }
        for number in 0..SEATS {
            let seat = first + number;
            server.send("POST", "/v1/seat", &json!({"event_id": "gala", "seat_no": seat}));
            let hold = json!({
                "booking_id": format!("b{seat}"), "event_id": "gala", "seat_no": [seat], "holder": "ann",
            });
            server.send("POST", "/v1/seat_booking", &hold);
        }
        for number in 0..JOBS {
            let job = json!({"job_id": format!("j{}", first + number), "after_ms": number * 100});
            server.send("POST", "/v1/job", &job);
        }
    }
}

/// That both have a part of every worker's shards.
fn share(servers: [&Server; 2]) {
    for worker in ["alarm.fire", "seat_booking.expire", "job.make"] {
        until(&format!("{worker} is shared"), || servers.map(|server| server.shards_of(worker)) == [2, 2]);
    }
}

/// Claims at any server that lives and completes at any, until everything is done.
fn work(servers: &[&Server], what: &str, is_done: impl Fn() -> bool) {
    let mut turn = 0;
    let mut claimed: Vec<Json> = Vec::new();
    until(what, || {
        turn += 1;
        let server = servers[turn % servers.len()];
        if claimed.is_empty() {
            let claim = json!({"worker": "ann", "limit": 5});
            if let Ok((200, text)) = server.asked("POST", "/v1/job_queue/default/claim", &claim) {
                claimed = serde_json::from_str(&text).unwrap();
            }
            return claimed.is_empty() && is_done();
        }
        let end = |job: &Json| json!({"job_id": job["job_id"], "attempt": job["attempt"]});
        let ends: Vec<Json> = claimed.iter().map(end).collect();
        // One that was recorded at a server which died before it could say so is over already, and is refused.
        let told = server.asked("POST", "/v1/job_queue/default/complete", &json!({"jobs": ends}));
        if matches!(told, Ok((200, _))) {
            claimed.clear();
        }
        false
    });
}

/// That the jobs that were enqueued are completed.
fn jobs_are_done(server: &Server, first: i64) -> bool {
    let state = |id: i64| server.send("GET", &format!("/v1/job/j{id}"), &Json::Null)["state"].clone();
    (first..first + JOBS).all(|id| state(id) == "COMPLETED")
}

fn all(server: &Server, path: &str) -> usize {
    server.send("GET", path, &Json::Null).as_array().unwrap().len()
}

/// That what is due was done by then.
fn is_relieved(server: &Server, first: i64) {
    let fired = |id: i64| server.send("GET", &format!("/v1/alarm/{id}"), &Json::Null)["status"] == "FIRED";
    until("every timer has fired", || (first..first + ALARMS).all(fired));
    let expired =
        |id: i64| server.send("GET", &format!("/v1/seat_booking/b{id}"), &Json::Null)["state"] == "EXPIRED";
    until("every hold has ended", || (first..first + SEATS).all(expired));
}

#[test]
fn two_servers_share_the_work_and_either_may_be_killed_or_sleep() {
    let scene = Scene::set();
    let (one, two) = (scene.server(), scene.server());
    share([&one, &two]);
    one.send("PUT", "/v1/job_definition/tick", &json!({"when": {"every_ms": 1000}, "missed": "all"}));
    // One is killed in the midst of it.
    scene.burden(&one, 0);
    one.process.signal("KILL");
    work(&[&one, &two], "the first jobs are done", || jobs_are_done(&two, 0));
    is_relieved(&two, 0);
    // Its successor takes its share, and the other one sleeps through its leases and wakes.
    let three = scene.server();
    share([&three, &two]);
    scene.burden(&three, 100);
    two.process.signal("STOP");
    is_relieved(&three, 100);
    two.process.signal("CONT");
    share([&three, &two]);
    // And now the other one dies.
    scene.burden(&three, 200);
    two.process.signal("KILL");
    work(&[&two, &three], "all jobs are done", || jobs_are_done(&three, 100) && jobs_are_done(&three, 200));
    is_relieved(&three, 200);
    three.send("POST", "/v1/job_definition/tick/pause", &json!({}));
    work(&[&three], "the jobs of the definition are done", || {
        ["PENDING", "IN_PROGRESS"].iter().all(|state| all(&three, &format!("/v1/job?state={state}")) == 0)
    });
    drop((one, two, three));
    let (jobs, records) = scene.namespace.stored(&scene.blueprint(), "jobs");
    for (event, expected) in [("alarm.fired", 3 * ALARMS), ("seat_booking.expired", 3 * SEATS)] {
        let counts = counted(&records, event);
        assert_eq!(counts.len(), usize::try_from(expected).unwrap(), "{event}");
        assert!(counts.values().all(|times| *times == 1), "{event}: {counts:?}");
    }
    let completed = counted(&records, "job.completed");
    assert!(completed.values().all(|times| *times == 1), "{completed:?}");
    let made: Vec<i64> = jobs.iter().filter_map(|job| job.time("execution_time")).map(Time::micros).collect();
    let asked = jobs.iter().filter(|job| job.time("execution_time").is_none());
    assert_eq!(asked.clone().count(), 3 * usize::try_from(JOBS).unwrap());
    assert!(asked.clone().all(|job| job.text("state") == Some("COMPLETED")));
    // Each second of the definition made one job, over both kills.
    let (first, last) = (made.iter().min().unwrap(), made.iter().max().unwrap());
    let seconds = usize::try_from((last - first) / 1_000_000).unwrap() + 1;
    assert_eq!(made.len(), seconds, "{made:?}");
}

/// Claims one job, leaves a trace of having done it, and records it when it is allowed to.
const WORKER: &str = r#"
import json, os, sys, time, urllib.request
url, name = sys.argv[1:3]
def call(action, body):
    request = urllib.request.Request(f"{url}/v1/job_queue/default/{action}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
jobs = []
while not jobs:
    jobs = call("claim", {"worker": name, "lease_ms": 1000, "wait_ms": 500})
job = jobs[0]
with open("effects", "a") as effects:
    effects.write(f"{name} {job['attempt']}\n")
while not os.path.exists(f"{name} may record"):
    time.sleep(0.02)
told = call("complete", {"jobs": [{"job_id": job["job_id"], "attempt": job["attempt"], "result": name}]})
with open(f"{name} was told.part", "w") as file:
    json.dump(told[0], file)
os.rename(f"{name} was told.part", f"{name} was told")
"#;

struct Workshop {
    server: Server,
    folder: tempfile::TempDir,
    namespace: Namespace,
}

impl Workshop {
    fn open() -> Workshop {
        let (namespace, folder) = (Namespace::new(), tempfile::tempdir().unwrap());
        let server = Server::start(&system("jobs"), &namespace.url(), folder.path(), &[]);
        server.send("POST", "/v1/job", &json!({"job_id": "only"}));
        Workshop { server, folder, namespace }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn worker(&self, name: &str) -> Running {
        let child = Command::new("python3")
            .args(["-c", WORKER, &format!("http://{}", self.server.address), name])
            .current_dir(self.folder.path())
            .stderr(Stdio::inherit())
            .spawn();
        Running(child.expect("python3 is needed for workers"))
    }

    fn allow(&self, name: &str) {
        std::fs::write(self.path(&format!("{name} may record")), "").unwrap();
    }

    fn effects(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("effects")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn told(&self, name: &str) -> Json {
        let path = self.path(&format!("{name} was told"));
        until(&format!("{name} was told"), || Path::exists(&path));
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    /// That the job ended once, by this worker.
    fn ended_once(self, by: &str) {
        let row = self.server.send("GET", "/v1/job/only", &Json::Null);
        assert_eq!((&row["state"], &row["result"]), (&json!("COMPLETED"), &json!(by)), "{row}");
        assert_eq!(row["attempt"], 2, "{row}");
        drop(self.server);
        let (_, records) = self.namespace.stored(&system("jobs"), "jobs");
        assert_eq!(counted(&records, "job.completed").into_iter().collect::<Vec<_>>(), [("only", 1)]);
    }
}

#[test]
fn a_worker_killed_between_its_effect_and_its_record_is_followed_by_another() {
    let workshop = Workshop::open();
    let doomed = workshop.worker("doomed");
    until("the effect is there", || workshop.effects() == ["doomed 1"]);
    doomed.signal("KILL");
    workshop.allow("heir");
    let _heir = workshop.worker("heir");
    assert_eq!(workshop.told("heir")["done"], true);
    assert_eq!(workshop.effects(), ["doomed 1", "heir 2"]);
    workshop.ended_once("heir");
}

#[test]
fn a_worker_that_slept_through_its_lease_is_refused() {
    let workshop = Workshop::open();
    let sleeper = workshop.worker("sleeper");
    until("the effect is there", || workshop.effects() == ["sleeper 1"]);
    sleeper.signal("STOP");
    workshop.allow("sleeper");
    workshop.allow("heir");
    let _heir = workshop.worker("heir");
    assert_eq!(workshop.told("heir")["done"], true);
    sleeper.signal("CONT");
    let told = workshop.told("sleeper");
    assert_eq!((&told["done"], &told["code"]), (&json!(false), &json!("not_holder")), "{told}");
    workshop.ended_once("heir");
}

#[test]
fn jobs_are_claimed_where_the_database_keeps_tenants_apart() {
    let (namespace, folder) = (Namespace::kept_apart(), tempfile::tempdir().unwrap());
    let server = Server::start(&system("jobs"), &namespace.url(), folder.path(), &[]);
    for number in 0..5 {
        let job = json!({"job_id": format!("j{number}"), "order_key": format!("k{}", number % 2)});
        server.send("POST", "/v1/job", &job);
    }
    let mut done = 0;
    until("all jobs are done", || {
        let claim = json!({"worker": "ann", "limit": 5});
        let claimed = server.send("POST", "/v1/job_queue/default/claim", &claim);
        for job in claimed.as_array().unwrap() {
            let path = format!("/v1/job/{}/complete", job["job_id"].as_str().unwrap());
            server.send("POST", &path, &json!({"attempt": job["attempt"]}));
            done += 1;
        }
        done == 5
    });
    let (rows, _) = namespace.stored(&system("jobs"), "jobs");
    assert!(rows.iter().all(|row| row.text("state") == Some("COMPLETED")), "{rows:?}");
}
