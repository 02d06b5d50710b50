//! Closing, opening again, and what a store says of itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::guard::column;
use statehouse_store::{
    Commit, Consistency, Entry, Migrate, Plan, Query, Resolution, Row, Scan, Schema, Step, StoreError, Type,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{counters, longest_ladder, of_every_type, sample};
use crate::harness::store_client::{StoreClient, fails, pause, same, scan};

pub(super) async fn a_restart_keeps_rows_log_operations_and_schema(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = of_every_type("durable").index("by_int", &[], &["int"]).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let mut plans = Vec::new();
    for place in 0..longest_ladder() {
        let mut step = Step::insert(&table, [(place as i64).into()]);
        for kind in Type::ALL {
            step = step.set(kind.name(), sample(kind, place));
        }
        let plan = client.noted("durable", &place.to_string(), "made").step(step).build()?;
        client.store.commit(&plan).await?;
        plans.push(plan);
    }
    client.store.resolve(&client.tenant, "fenced").await?;
    let sorted = |mut rows: Vec<Row>| {
        rows.sort_by_key(|row| row.int("id"));
        rows
    };
    let rows = sorted(scan(client.store.as_ref(), Scan::all(&table)).await?);
    let log = client.exact_log(plans.len() + 1).await?;
    let (engine, partitions) = (client.store.engine(), client.store.partitions());
    client.store.close().await;
    drop(client);

    let client = StoreClient::of(namespace.open().await?, "acme")?;
    client.skip_ids(1_000);
    same(
        "engine and partitions",
        &(client.store.engine(), client.store.partitions()),
        &(engine, partitions),
    )?;
    // Without another migration: the schema is a part of what was kept.
    let found = sorted(scan(client.store.as_ref(), Scan::all(&table)).await?);
    ensure!(found == rows, "after a restart the rows are {found:?}, before they were {rows:?}");
    same("the log", &client.exact_log(log.len()).await?, &log)?;
    let shown = client.store.migrate(&Schema::new([table.clone()])?, Migrate::Show).await?;
    ensure!(shown.is_empty(), "after a restart the schema lacks {shown:?}");
    for plan in &plans {
        match client.store.commit(plan).await? {
            Commit::Applied(applied) if applied.repeated => {}
            other => bail!("an operation from before the restart gives {other:?}"),
        }
    }
    let fenced = Plan::of(&client.tenant, "fenced").log(Entry::about("x", "y")).build()?;
    same("an operation that was fenced before", &client.store.commit(&fenced).await?, &Commit::Fenced)?;
    let resolution = client.store.resolve(&client.tenant, plans[0].operation()).await?;
    ensure!(matches!(resolution, Resolution::Applied(_)), "an applied operation became {resolution:?}");
    // And it goes on where it stopped: versions, offsets, indexes.
    let update = Step::update(&table, [0.into()]).guard(column("version").eq(1)).set("int", 77);
    client.apply(client.noted("durable", "0", "changed").step(update)).await?;
    client.exact_log(log.len() + 1).await?;
    let query = Query::index(&table, "by_int", &client.tenant, [])?.prefix([77.into()])?;
    client.eventually(&query, |rows| same("the index", &rows.len(), &1)).await
}

pub(super) async fn a_closed_store_is_unavailable(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("shut")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, ["x".into()]))).await?;
    let store = client.store.clone();
    store.close().await;
    store.close().await;
    let unavailable = |error: &StoreError| matches!(error, StoreError::Unavailable { .. });
    let plan = client.one(Step::insert(&table, ["y".into()])).build()?;
    fails("commit", store.commit(&plan).await, unavailable)?;
    fails("resolve", store.resolve(&client.tenant, "op").await, unavailable)?;
    let address = client.address(&table, ["x".into()])?;
    fails("get", store.get(&[address], Consistency::Strong).await, unavailable)?;
    let query = Query::table(&table, &client.tenant, ["x".into()])?;
    fails("query", store.query(&query).await, unavailable)?;
    fails("scan", store.scan(&Scan::all(&table)).await, unavailable)?;
    fails("read_log", store.read_log(0, 0, 1).await, unavailable)?;
    fails("wait_log", store.wait_log(&[], Duration::ZERO).await, unavailable)?;
    fails("trim_log", store.trim_log(0, 1).await, unavailable)?;
    fails("migrate", store.migrate(&Schema::new([table.clone()])?, Migrate::Apply).await, unavailable)?;
    drop(store);
    let client = StoreClient::of(namespace.open().await?, "acme")?;
    same("a plan that came too late", &client.find(&table, ["y".into()]).await?, &None)?;
    same("a row from before", &client.row(&table, ["x".into()]).await?.version(), &1)
}

pub(super) async fn closing_amid_commits_loses_none_that_was_acknowledged(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("rushed")?;
    let mut client = StoreClient::open(namespace, &[&table]).await?;
    let mut acknowledged: Vec<String> = Vec::new();
    for round in 0..3_u64 {
        let mut tasks = JoinSet::new();
        let count = Arc::new(AtomicU64::new(0));
        for task in 0..4 {
            let (client, table, count) = (client.clone(), table.clone(), count.clone());
            tasks.spawn(async move {
                let mut done = Vec::new();
                for turn in 0..200 {
                    let key = format!("{round}/{task}/{turn}");
                    let step = Step::insert(&table, [key.as_str().into()]);
                    let plan = client.noted("rush", &key, "made").step(step).build()?;
                    match client.store.commit(&plan).await {
                        Ok(Commit::Applied(_)) => {
                            done.push(key);
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(other) => bail!("a fresh insert gives {other:?}"),
                        // Certain that it was not done, or not certain: either is an honest answer.
                        Err(StoreError::Unavailable { .. } | StoreError::OutcomeUnknown { .. }) => break,
                        Err(error) => return Err(error.into()),
                    }
                    tokio::task::yield_now().await;
                }
                anyhow::Ok(done)
            });
        }
        // Let them get going, and close in the midst of it. The bound is for a store that acknowledges nothing.
        for _ in 0..1_000 {
            if count.load(Ordering::Relaxed) >= 10 {
                break;
            }
            pause().await;
        }
        client.store.close().await;
        while let Some(done) = tasks.join_next().await {
            acknowledged.extend(done??);
        }
        client = StoreClient::of(namespace.open().await?, "acme")?;
        client.skip_ids(10_000 * (round + 1));
    }
    ensure!(!acknowledged.is_empty(), "nothing was acknowledged, so nothing was shown");
    let records = client.log(acknowledged.len()).await?;
    for key in &acknowledged {
        client.row(&table, [key.as_str().into()]).await.context("an acknowledged insert")?;
        ensure!(
            records.iter().any(|record| record.key == *key),
            "no record of the acknowledged insert {key}"
        );
    }
    let stored = scan(client.store.as_ref(), Scan::all(&table)).await?.len();
    same("rows and records", &stored, &client.exact_log(stored).await?.len())
}
