//! A transaction pooler between the store and the server: PgBouncer, with fewer server processes than connections.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use statehouse_store::{
    Address, Clock as _, Commit, Consistency, Random, Resolution, Scan, Store, StoreError, SystemClock,
    Table, Tenant,
};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::processes::Processes;
use crate::proxy::{message_length, target, url_by};
use crate::support::{Namespace, counters, increment, logged, raw, tenant, url};
use crate::{migration, tenancy};

/// Where the pooler is that all tests share.
fn pooled() -> String {
    std::env::var("STATEHOUSE_TEST_PGBOUNCER").expect(
        "STATEHOUSE_TEST_PGBOUNCER has to hold the URL that `scripts/pgbouncer start DIR POSTGRES_URL` prints",
    )
}

/// A connection past the store.
async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// What a question without parameters is answered with, in the first column of the first row. It goes without a name.
async fn ask(client: &Client, question: &str) -> String {
    let answers = client.simple_query(question).await.unwrap();
    let row = answers.iter().find_map(|answer| match answer {
        SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap().to_owned()),
        _ => None,
    });
    row.unwrap()
}

/// How many statements the server processes of a pooler have kept, each of them.
async fn kept(url: &str) -> Vec<String> {
    let clients = join_all((0..PROCESSES).map(|_| connect(url))).await;
    // A client in a transaction has a process of its own.
    try_join_all(clients.iter().map(|client| client.batch_execute("begin"))).await.unwrap();
    let mut kept = Vec::new();
    for client in &clients {
        kept.push(ask(client, "select count(*) from pg_prepared_statements").await);
        client.batch_execute("rollback").await.unwrap();
    }
    kept
}

/// The server processes of a pooler.
const PROCESSES: usize = 3;

/// A pooler of a test's own, which can be killed.
struct Pooler {
    folder: PathBuf,
    settings: Vec<&'static str>,
    url: String,
}

impl Pooler {
    async fn start(settings: &[&'static str]) -> Pooler {
        let name = format!("statehouse-pgbouncer-{:x}", Random::from_entropy().below(1 << 48));
        let folder = std::env::temp_dir().join(name);
        let mut pooler = Pooler { folder, settings: settings.to_vec(), url: String::new() };
        pooler.url = pooler.restart().await;
        pooler
    }

    /// Starts it where it was before.
    async fn restart(&self) -> String {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/pgbouncer");
        let mut command = Command::new(script);
        command.arg("start").arg(&self.folder).arg(url()).args(&self.settings);
        let output = command.output().await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().last().unwrap().to_owned()
    }

    /// What it noted to be wrong with its connections. What clients are refused is not among it.
    fn errors(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap();
        log.lines().filter(|line| line.contains(" ERROR ")).take(10).map(str::to_owned).collect()
    }

    /// Ends it and all its connections, without a word to anybody.
    fn kill(&self) {
        let process = std::fs::read_to_string(self.folder.join("pid")).unwrap();
        let signal = |signal: &str| {
            let kill = std::process::Command::new("kill").args([signal, process.trim()]).output();
            kill.unwrap().status.success()
        };
        assert!(signal("-9"));
        while signal("-0") {
            std::thread::yield_now();
        }
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let process = std::fs::read_to_string(self.folder.join("pid")).unwrap_or_default();
        drop(std::process::Command::new("kill").args(["-9", process.trim()]).output());
        drop(std::fs::remove_dir_all(&self.folder));
    }
}

/// What this file is about: if names got through, nothing here would show that the store uses none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_prepares_statements_comes_to_grief() {
    let pooler = Pooler::start(&["default_pool_size=2"]).await;
    let (first, second) = (connect(&pooler.url).await, connect(&pooler.url).await);
    let statement = first.prepare("select 1").await.unwrap();
    // The other one has the process now, and finds the name on it.
    second.batch_execute("begin").await.unwrap();
    let name = ask(&second, "select name from pg_prepared_statements").await;
    let error = first.query(&statement, &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "26000", "{error}");
    let error = second.batch_execute(&format!("prepare {name} as select 2")).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "42P05", "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_does_all_its_work_under_the_fence() {
    tenancy::work_under_the_fence(pooled()).await;
}

#[tokio::test]
async fn looks_of_two_tenants_that_are_one_statement_never_see_each_others_rows() {
    tenancy::look_together(pooled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_servers_may_start_at_once() {
    migration::start_at_once(&Namespace::at(&pooled())).await;
}

/// Their drivers count their statements from the same number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_share_the_server_processes() {
    let (namespace, pooler) = (Namespace::new(), Pooler::start(&[]).await);
    Processes::on(&namespace).await.work_at(&pooler.url).await;
    assert_eq!(kept(&pooler.url).await, ["0"; PROCESSES]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_is_killed_again_and_again_loses_and_repeats_nothing() {
    /// So many records are written from one death to the next.
    const EVERY: u64 = 40;
    let (namespace, pooler) = (Namespace::new(), Pooler::start(&[]).await);
    let processes = Processes::on(&namespace).await;
    let direct = raw().await;
    let progress = format!("select sum(head) from {}.statehouse_heads", namespace.schema());
    let mut killed = 0;
    let killing = async {
        let mut next = EVERY;
        loop {
            if ask(&direct, &progress).await.parse::<u64>().unwrap() >= next {
                pooler.kill();
                killed += 1;
                next += EVERY;
                assert_eq!(pooler.restart().await, pooler.url);
            }
            SystemClock.sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = processes.work_at(&pooler.url) => {}
        () = killing => {}
    }
    assert!(killed > 3, "{killed}");
}

/// What a connection asks for at its start is refused by one pooler and passed over by another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_hands_no_settings_or_names_to_another_client() {
    for settings in [&[][..], &["ignore_startup_parameters=options"]] {
        let pooler = Pooler::start(settings).await;
        let namespace = Namespace::at(&pooler.url);
        let table = counters("counters");
        let store = namespace.open_with(&[&table]).await;
        let acme = tenant("acme");
        for number in 0..3 {
            let plan = logged(&acme, &format!("op-{number}"), "x", vec![increment(&table, "x")]);
            let outcome = store.commit(&plan).await;
            assert!(matches!(outcome, Ok(Commit::Applied(_))), "{settings:?}: {outcome:?}");
            assert_eq!(count(&store, &table, &acme, "x").await, number + 1);
        }
        assert_eq!((store.counts().alone, store.counts().compiled_faults), (3, 0), "{settings:?}");
        assert_eq!(kept(&pooler.url).await, ["0"; PROCESSES], "{settings:?}");
    }
}

async fn count(store: &PostgresStore, table: &Arc<Table>, tenant: &Tenant, id: &str) -> i64 {
    let address = Address::new(table, tenant, [id.into()]).unwrap();
    let rows = store.get(&[address], Consistency::Strong).await.unwrap();
    rows[0].as_ref().unwrap().int("n").unwrap()
}

/// Looks for so many rows that are not there and one that is. Each of them is named by 900 octets.
async fn large_look(
    store: &PostgresStore,
    table: &Arc<Table>,
    tenant: &Tenant,
    id: &str,
    others: usize,
) -> Vec<i64> {
    let ids = (0..others).map(|index| format!("{index:0900}")).chain([id.to_owned()]);
    let addresses: Vec<Address> = ids.map(|id| Address::new(table, tenant, [id.into()]).unwrap()).collect();
    let rows = store.get(&addresses, Consistency::Strong).await.unwrap();
    rows.iter().flatten().map(|row| row.int("n").unwrap()).collect()
}

/// All that a store sends at once: many callers of four stores, each with one connection for reads. Some requests are so
/// large that the pooler passes them on in parts, behind small ones that are being answered meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_many_callers_do_not_get_mixed_up() {
    const STORES: usize = 4;
    const CALLERS: usize = 12;
    const TURNS: usize = 25;
    let pooler = Pooler::start(&[]).await;
    let mut namespace = Namespace::at(&pooler.url);
    namespace.options.readers = 1;
    let table = counters("counters");
    let first = Arc::new(namespace.open_with(&[&table]).await);
    let others = join_all((1..STORES).map(|_| namespace.open())).await.into_iter().map(Arc::new);
    let stores: Vec<Arc<PostgresStore>> = [first].into_iter().chain(others).collect();
    let acme = tenant("acme");
    let mut callers = JoinSet::new();
    for (number, store) in (0..CALLERS).flat_map(|_| stores.clone()).enumerate() {
        let (table, acme) = (table.clone(), acme.clone());
        callers.spawn(async move {
            let own = format!("own-{number}");
            for turn in 0..TURNS {
                // One statement by itself, and one of a transaction of two round trips.
                for (kind, key, steps) in [
                    ("small", &own, vec![increment(&table, &own)]),
                    ("large", &own, vec![increment(&table, &own), increment(&table, "all")]),
                ] {
                    let plan = logged(&acme, &format!("{kind}-{number}-{turn}"), key, steps);
                    let outcome = store.commit(&plan).await;
                    assert!(matches!(outcome, Ok(Commit::Applied(_))), "{outcome:?}");
                }
                let done = 2 * (turn as i64 + 1);
                let large = async { large_look(&store, &table, &acme, &own, 100).await };
                let small =
                    async { store.find_operation(&acme, &format!("small-{number}-{turn}")).await.unwrap() };
                let walk = Scan::of(&table, &acme).limit(5).unwrap();
                let walk = async { store.scan(&walk).await.unwrap() };
                let missing = Address::new(&counters("missing"), &acme, ["x".into()]).unwrap();
                let missing = async { store.get(&[missing], Consistency::Strong).await.unwrap_err() };
                let (record, found, page, error) = tokio::join!(small, large, walk, missing);
                assert!(matches!(error, StoreError::Schema { .. }), "{error}");
                assert_eq!(record.unwrap().operation, format!("small-{number}-{turn}"));
                assert_eq!(found, [done]);
                assert!(!page.rows.is_empty());
            }
        });
    }
    while let Some(done) = callers.join_next().await {
        done.unwrap();
    }
    let commits = (STORES * CALLERS * TURNS) as i64;
    assert_eq!(count(&stores[0], &table, &acme, "all").await, commits);
    let mut records = 0;
    for partition in 0..stores[0].partitions() {
        records += stores[0].read_log(partition, 0, 1).await.unwrap().head;
    }
    assert_eq!(records, 2 * commits as u64);
    assert_eq!(pooler.errors(), [""; 0]);
    assert_eq!(kept(&pooler.url).await, ["0"; PROCESSES]);
}

/// A client sends a slow statement and disconnects. The next request on the connection is so large that the
/// pooler could pass on only a part of it before the first one is answered, and then another client gets the server process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_caller_does_not_affect_the_others() {
    let pooler = Pooler::start(&["default_pool_size=1"]).await;
    let neighbour = connect(&pooler.url).await;
    let mut namespace = Namespace::at(&pooler.url);
    namespace.options.readers = 1;
    let (table, acme) = (counters("counters"), tenant("acme"));
    let store = namespace.open_with(&[&table]).await;
    store.commit(&logged(&acme, "op", "x", vec![increment(&table, "x")])).await.unwrap();
    assert_eq!(count(&store, &table, &acme, "x").await, 1);
    let holder = raw().await;
    let hold = format!("begin; lock table {}.counters in access exclusive mode", namespace.schema());
    holder.batch_execute(&hold).await.unwrap();
    tokio::select! {
        biased;
        count = count(&store, &table, &acme, "x") => panic!("{count}"),
        () = tokio::task::yield_now() => {}
    }
    let release = async {
        // It may take as long as it likes. In that time the request could come as far as it gets.
        SystemClock.sleep(Duration::from_millis(500)).await;
        holder.batch_execute("rollback").await.unwrap();
    };
    let large = large_look(&store, &table, &acme, "x", 10_000);
    let (found, (), answer) = tokio::join!(large, release, ask(&neighbour, "select 'neighbour'"));
    assert_eq!((found, answer.as_str()), (vec![1], "neighbour"));
    assert_eq!(pooler.errors(), [""; 0]);
}

/// A client that waits for a server process too long is refused in the pooler's own words.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_got_no_server_process_is_settled_later() {
    let pooler = Pooler::start(&["default_pool_size=1", "query_wait_timeout=1"]).await;
    let (namespace, holder) = (Namespace::at(&pooler.url), connect(&pooler.url).await);
    let (table, acme) = (counters("counters"), tenant("acme"));
    let store = namespace.open_with(&[&table]).await;
    let plan = |operation: &str| logged(&acme, operation, "x", vec![increment(&table, "x")]);
    store.commit(&plan("first")).await.unwrap();
    holder.batch_execute("begin").await.unwrap();
    let outcome = store.commit(&plan("second")).await;
    assert!(matches!(outcome, Err(StoreError::OutcomeUnknown { .. })), "{outcome:?}");
    holder.batch_execute("rollback").await.unwrap();
    assert_eq!(store.resolve(&acme, "second").await.unwrap(), Resolution::Aborted);
    assert_eq!(store.commit(&plan("second")).await.unwrap(), Commit::Fenced);
    assert_eq!(count(&store, &table, &acme, "x").await, 1);
}

/// Exchanges the server processes under connections that are theirs by every sign: the new ones have been told the same at
/// their start.
struct Exchange {
    address: SocketAddr,
    /// Counts up whenever all are to be exchanged; what the new processes are told first.
    order: watch::Sender<(u64, String)>,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Names under which statements were prepared.
    names: Mutex<Vec<String>>,
    connections: AtomicUsize,
    exchanged: AtomicUsize,
}

impl Exchange {
    async fn start() -> Exchange {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (order, seen) = (watch::Sender::new((0, String::new())), Arc::new(Seen::default()));
        let (orders, all) = (order.clone(), seen.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (orders, seen) = (orders.subscribe(), all.clone());
                tokio::spawn(async move {
                    seen.connections.fetch_add(1, Ordering::SeqCst);
                    // An end of either side ends both.
                    drop(carry(client, orders, &seen).await);
                    seen.connections.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Exchange { address, order, seen }
    }

    fn names(&self) -> Vec<String> {
        self.seen.names.lock().unwrap().clone()
    }

    /// Exchanges all processes, while nothing is under way.
    async fn exchange(&self, told: &str) {
        self.seen.exchanged.store(0, Ordering::SeqCst);
        self.order.send_modify(|(number, words)| (*number, *words) = (*number + 1, told.to_owned()));
        while self.seen.exchanged.load(Ordering::SeqCst) < self.seen.connections.load(Ordering::SeqCst) {
            tokio::task::yield_now().await;
        }
    }
}

async fn carry(
    mut client: TcpStream,
    mut orders: watch::Receiver<(u64, String)>,
    seen: &Seen,
) -> std::io::Result<()> {
    let (mut from_client, mut from_server) = (vec![0; 65_536], vec![0; 65_536]);
    let mut beginning = Vec::new();
    while message_length(&beginning, false).is_none() {
        let length = client.read(&mut from_client).await?;
        beginning.extend_from_slice(&from_client[..length]);
    }
    let mut server = TcpStream::connect(target()).await?;
    server.write_all(&beginning).await?;
    let mut requests = Vec::new();
    loop {
        tokio::select! {
            length = client.read(&mut from_client) => {
                let request = &from_client[..length?];
                if request.is_empty() {
                    return Ok(());
                }
                requests.extend_from_slice(request);
                while let Some(length) = message_length(&requests, true) {
                    let message: Vec<u8> = requests.drain(..length).collect();
                    let name = message[5..].split(|byte| *byte == 0).next().unwrap_or_default();
                    if message[0] == b'P' && !name.is_empty() {
                        seen.names.lock().unwrap().push(String::from_utf8(name.to_vec()).unwrap());
                    }
                }
                server.write_all(request).await?;
            }
            length = server.read(&mut from_server) => match length? {
                0 => return Ok(()),
                length => client.write_all(&from_server[..length]).await?,
            },
            ordered = orders.changed() => {
                if ordered.is_err() {
                    return Ok(());
                }
                let told = orders.borrow_and_update().1.clone();
                server = TcpStream::connect(target()).await?;
                server.write_all(&beginning).await?;
                ready(&mut server).await?;
                let length = u32::try_from(told.len() + 5).unwrap().to_be_bytes();
                server.write_all(&[b"Q", &length[..], told.as_bytes(), b"\0"].concat()).await?;
                ready(&mut server).await?;
                seen.exchanged.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

/// Reads until the server is ready for more.
async fn ready(server: &mut TcpStream) -> std::io::Result<()> {
    let (mut all, mut chunk) = (Vec::new(), vec![0; 65_536]);
    while !all.ends_with(b"Z\0\0\0\x05I") {
        match server.read(&mut chunk).await? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            length => all.extend_from_slice(&chunk[..length]),
        }
    }
    Ok(())
}

/// No pooler is known that passes on the mark. If one does, names are trusted until the first of them is not known, or stands
/// for something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_lost_a_statement_name_gets_none_again() {
    for strangers in [false, true] {
        let (namespace, between) = (Namespace::new(), Exchange::start().await);
        let (table, acme) = (counters("counters"), tenant("acme"));
        let witness = namespace.open_with(&[&table]).await;
        let mut options = PostgresOptions::from_url(&url_by(between.address)).unwrap();
        options.schema = namespace.schema().to_owned();
        let store = PostgresStore::open(options).await.unwrap();
        let mut turn = 0;
        // One statement, several, reads on both connections, and what is unknown.
        let mut work = async || {
            turn += 1;
            for (kind, steps) in [
                ("small", vec![increment(&table, "x")]),
                ("large", vec![increment(&table, "x"), increment(&table, "y")]),
            ] {
                let outcome = store.commit(&logged(&acme, &format!("{kind}-{turn}"), "x", steps)).await;
                assert!(matches!(outcome, Ok(Commit::Applied(_))), "{outcome:?}");
            }
            for _ in 0..2 {
                assert_eq!(count(&store, &table, &acme, "x").await, 2 * turn);
                assert!(store.find_operation(&acme, &format!("small-{turn}")).await.unwrap().is_some());
            }
            let resolution = store.resolve(&acme, &format!("never-{turn}")).await.unwrap();
            assert_eq!(resolution, Resolution::Aborted);
        };
        work().await;
        let names = between.names();
        assert!(!names.is_empty());
        let others = names.iter().map(|name| {
            let parameters: Vec<String> = (1..=40).map(|number| format!("${number}::text")).collect();
            format!("prepare {name} as select {};", parameters.join(", "))
        });
        let others = if strangers { others.collect() } else { String::new() };
        between.exchange(&others).await;
        work().await;
        let names = between.names();
        for _ in 0..3 {
            between.exchange(&others).await;
            work().await;
        }
        assert_eq!(between.names(), names);
        assert_eq!(count(&witness, &table, &acme, "x").await, 10);
    }
}
