//! Three processes on one store, behind a proxy that cuts their connections at random, at commits too. Others stand in the
//! proxy's place in tests of their own.
//!
//! Each process counts, and writes registers under a version. Whenever it does not know what became of a write, it
//! resolves the operation, or commits the same plan again. In the end every operation is settled, each counter is
//! exactly what the processes know to be applied, and what they saw of each register can have happened in one order.
//!
//! The processes are this test binary, started again with a variable in their environment.

use std::process::Stdio;
use std::sync::atomic::Ordering;

use statehouse_drills::linearize::{self, RegisterAction, RegisterCall, Written};
use statehouse_store::guard::Guard;
use statehouse_store::{
    Address, Clock as _, Commit, Consistency, Plan, Random, Resolution, Step, Store, StoreError, SystemClock,
    Table, Value,
};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use std::sync::Arc;
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::proxy::{Cut, Proxy};
use crate::support::{Namespace, counters, increment, logged, tenant};

const CHILD: &str = "STATEHOUSE_TEST_CHILD";
const PROCESSES: u64 = 3;
const CLIENTS: u64 = 4;
const COUNTERS: u64 = 3;
const REGISTERS: u64 = 3;
const TURNS: u64 = 60;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_behind_a_proxy_that_cuts() {
    let (namespace, proxy) = (Namespace::new(), Proxy::start().await);
    let processes = Processes::on(&namespace).await;
    proxy.set(Cut::AtRandom(Random::seeded(7)));
    processes.work_at(&proxy.url()).await;
    // The faults were there: a quiet run has shown nothing.
    let achieved = &proxy.achieved;
    let (before, after) = (achieved.before.load(Ordering::Relaxed), achieved.after.load(Ordering::Relaxed));
    assert!(before > 3 && after > 3, "{achieved:?}");
}

/// Processes that share a store.
pub struct Processes<'n> {
    namespace: &'n Namespace,
    counted: Arc<Table>,
    /// Sees the store as it is.
    witness: PostgresStore,
}

impl Processes<'_> {
    pub async fn on(namespace: &Namespace) -> Processes<'_> {
        let (counted, registers) = (counters("counted"), counters("registers"));
        let witness = namespace.open_with(&[&counted, &registers]).await;
        Processes { namespace, counted, witness }
    }

    /// Lets the processes work, by the way that this URL goes, until they are done, and judges what they say.
    pub async fn work_at(&self, url: &str) {
        let mut children = JoinSet::new();
        for number in 0..PROCESSES {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["processes::child", "--exact", "--nocapture"])
                .env(CHILD, format!("{number} {} {url}", self.namespace.schema()))
                .stdout(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .unwrap();
            children.spawn(child.wait_with_output());
        }
        let mut history: Vec<RegisterCall> = Vec::new();
        let mut counts = [0_i64; COUNTERS as usize];
        while let Some(output) = children.join_next().await {
            let output = output.unwrap().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{text}");
            for line in text.lines() {
                if let Some(call) = line.strip_prefix("call ") {
                    history.push(parse(call));
                } else if let Some(counter) = line.strip_prefix("counted ") {
                    counts[counter.parse::<usize>().unwrap()] += 1;
                }
            }
        }
        assert!(history.len() > 300, "{}", history.len());
        linearize::check(&history).unwrap();
        let acme = tenant("acme");
        let addresses = (0..COUNTERS)
            .map(|number| Address::new(&self.counted, &acme, [number.to_string().into()]).unwrap());
        let rows = self.witness.get(&addresses.collect::<Vec<_>>(), Consistency::Strong).await.unwrap();
        let stored: Vec<i64> = rows.iter().map(|row| row.as_ref().unwrap().int("n").unwrap()).collect();
        assert_eq!(stored, counts);
    }
}

/// What each process does. Without the variable there is nothing to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let mut words = task.split(' ');
    let number: u64 = words.next().unwrap().parse().unwrap();
    let schema = words.next().unwrap().to_owned();
    let mut options = PostgresOptions::from_url(words.next().unwrap()).unwrap();
    options.schema = schema;
    let store = loop {
        // The proxy may cut the first connection too.
        match PostgresStore::open(options.clone()).await {
            Ok(store) => break Arc::new(store),
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    };
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let id = number * CLIENTS + client;
        let client = Client {
            store: store.clone(),
            counted: counters("counted"),
            registers: counters("registers"),
            random: Random::seeded(1000 + id),
            id,
        };
        clients.spawn(client.work());
    }
    while let Some(lines) = clients.join_next().await {
        for line in lines.unwrap() {
            println!("{line}");
        }
    }
}

struct Client {
    store: Arc<PostgresStore>,
    counted: Arc<Table>,
    registers: Arc<Table>,
    random: Random,
    id: u64,
}

/// Microseconds of the machine's clock, which all processes share.
fn clock() -> i64 {
    SystemClock.now().micros()
}

impl Client {
    async fn work(mut self) -> Vec<String> {
        let acme = tenant("acme");
        let mut lines = Vec::new();
        for turn in 0..TURNS {
            let operation = format!("op-{}-{turn}", self.id);
            let register = self.random.below(REGISTERS).to_string();
            if self.random.chance(0.3) {
                let counter = self.random.below(COUNTERS).to_string();
                let plan = logged(&acme, &operation, &counter, vec![increment(&self.counted, &counter)]);
                if self.settle(&plan).await == Some(true) {
                    lines.push(format!("counted {counter}"));
                }
                continue;
            }
            let invoked = clock();
            let address = Address::new(&self.registers, &acme, [register.as_str().into()]).unwrap();
            let Ok(rows) = self.store.get(&[address], Consistency::Strong).await else { continue };
            let seen = rows[0].as_ref().map(|row| (row.version(), row.int("n").unwrap()));
            let returned = clock();
            let (version, value) = seen.unzip();
            let show = |number: Option<i64>| number.map_or("-".to_owned(), |number| number.to_string());
            lines.push(format!(
                "call {register} {invoked} {returned} read {} {}",
                show(version),
                show(value)
            ));
            let value = i64::try_from(self.id * TURNS + turn).unwrap();
            let key = [Value::from(register.as_str())];
            let step = match version {
                Some(version) => Step::update(&self.registers, key).guard(Guard::version(version)),
                None => Step::insert(&self.registers, key),
            };
            let plan = logged(&acme, &operation, &register, vec![step.set("n", value)]);
            let invoked = clock();
            // What was fenced never happened, and is not part of the history.
            if let Some(applied) = self.settle(&plan).await {
                let returned = clock();
                let what = if applied { "applied" } else { "refused" };
                lines.push(format!("call {register} {invoked} {returned} {what} {} {value}", show(version)));
            }
        }
        lines
    }

    /// Commits until the outcome is known: whether it was applied, or `None` if it was fenced.
    async fn settle(&mut self, plan: &Plan) -> Option<bool> {
        let mut in_doubt = false;
        loop {
            match self.store.commit(plan).await {
                Ok(Commit::Applied(_)) => return Some(true),
                Ok(Commit::Fenced) => return None,
                // While the first attempt may still be in flight, a refusal of the second says nothing about it.
                Ok(Commit::Refused(_)) if !in_doubt => return Some(false),
                Ok(Commit::Refused(_)) => {}
                Err(StoreError::Unavailable { .. }) if !in_doubt => continue,
                Err(StoreError::Unavailable { .. }) => {}
                Err(StoreError::OutcomeUnknown { .. }) => {
                    in_doubt = true;
                    if self.random.chance(0.5) {
                        continue;
                    }
                }
                Err(error) => panic!("{error}"),
            }
            match self.store.resolve(plan.tenant(), plan.operation()).await {
                Ok(Resolution::Applied(_)) => return Some(true),
                Ok(Resolution::Aborted) => return None,
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    }
}

fn parse(line: &str) -> RegisterCall {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |index: usize| words[index].parse::<i64>().ok();
    // Two events of one microsecond overlap: a return is put after every call of its microsecond.
    let moment = |index: usize| number(index).unwrap().unsigned_abs() * 2;
    let written = |written| RegisterAction::Write { expected: number(4), value: number(5).unwrap(), written };
    let action = match words[3] {
        "read" => RegisterAction::Read { observed: number(4).zip(number(5)) },
        "applied" => written(Written::Applied),
        _ => written(Written::Refused),
    };
    RegisterCall { key: words[0].to_owned(), invoked: moment(1), returned: Some(moment(2) + 1), action }
}
