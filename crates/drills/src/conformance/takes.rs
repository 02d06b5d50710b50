//! Takes: the first rows of a range, each changed under a guard, and each by one taker.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse_store::guard::{column, is_in, now, now_plus};
use statehouse_store::{ClaimRange, Query, Row, Step, Store, StoreError, Table, Type, Value};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{LostThenUnavailable, StoreProxy};
use crate::harness::store_client::{StoreClient, same};

/// Tickets of a counter, in the order of their numbers; and those that wait, whatever the tenant.
fn tickets(name: &str) -> Result<Arc<Table>> {
    Ok(Table::named(name)
        .partition("counter", Type::Text)
        .sort("number", Type::Int)
        .required("state", Type::Text)
        .optional("waits", Type::Int)
        .optional("worker", Type::Text)
        .optional("taken_by", Type::Text)
        .optional("taken_at", Type::Time)
        .defaulted("times", Type::Int, 0)
        .optional("content", Type::Json)
        .global_index("waiting", &["counter"], &["waits"])
        .build()?)
}

async fn fill(client: &StoreClient, table: &Arc<Table>, numbers: std::ops::Range<i64>) -> Result<()> {
    let steps: Vec<Step> = numbers
        .map(|number| {
            Step::insert(table, ["a".into(), number.into()])
                .set("state", "waits")
                .set("waits", number)
                .set("content", Value::Json(json!({"number": number})))
        })
        .collect();
    for steps in steps.chunks(9) {
        client.apply(client.plan().steps(steps.to_vec())).await?;
    }
    Ok(())
}

/// What becomes of a ticket that is taken.
fn change(table: &Arc<Table>) -> Step {
    Step::update(table, [])
        .guard(column("state").eq("waits"))
        .set("state", "taken")
        .set("times", column("times").add(1))
        .set("taken_at", now())
}

fn all(client: &StoreClient, table: &Arc<Table>) -> Result<Query> {
    Ok(Query::table(table, &client.tenant, ["a".into()])?)
}

fn taking(client: &StoreClient, table: &Arc<Table>, operation: &str, rows: usize) -> Result<ClaimRange> {
    Ok(ClaimRange::of(
        &client.tenant,
        operation,
        all(client, table)?.limit(rows)?,
        change(table),
        "taken_by",
    )?)
}

fn numbers(rows: &[Row]) -> Vec<i64> {
    rows.iter().filter_map(|row| row.int("number")).collect()
}

pub(super) async fn the_first_rows_are_taken_in_order(namespace: &dyn TestNamespace) -> Result<()> {
    let table = tickets("taken_in_order")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    fill(&client, &table, 0..12).await?;
    let taken = client.store.claim_range(&taking(&client, &table, "first", 5)?).await?;
    same("those taken first", &numbers(&taken), &vec![0, 1, 2, 3, 4])?;
    for row in &taken {
        same("a row that was taken", &client.get(&row.address()).await?.as_ref(), &Some(row))?;
        same("its state", &row.text("state"), &Some("taken"))?;
        same("its taker", &row.text("taken_by"), &Some("first"))?;
        same("how often", &row.int("times"), &Some(1))?;
        same("its version", &row.version(), &2)?;
        ensure!(row.time("taken_at").is_some(), "{row} was taken at no time");
    }
    // From above, within bounds.
    let query = all(&client, &table)?.from(7)?.below(11)?.backward().limit(3)?;
    let take = ClaimRange::of(&client.tenant, "second", query, change(&table), "taken_by")?;
    same("those between bounds", &numbers(&client.store.claim_range(&take).await?), &vec![10, 9, 8])?;
    let untouched = client.row(&table, ["a".into(), 11.into()]).await?;
    same("one beyond them", &untouched.text("taken_by"), &None)
}

pub(super) async fn what_the_guard_refuses_is_left_as_it_is(namespace: &dyn TestNamespace) -> Result<()> {
    let table = tickets("taken_if")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    fill(&client, &table, 0..6).await?;
    for number in [0, 3] {
        let gone = Step::update(&table, ["a".into(), number.into()]).set("state", "gone");
        client.apply(client.one(gone)).await?;
    }
    let taken = client.store.claim_range(&taking(&client, &table, "some", 6)?).await?;
    same("those that the guard holds for", &numbers(&taken), &vec![1, 2, 4, 5])?;
    let gone = client.row(&table, ["a".into(), 3.into()]).await?;
    same("one that it does not", &(gone.text("taken_by"), gone.version()), &(None, 2))?;
    let again = client.store.claim_range(&taking(&client, &table, "again", 6)?).await?;
    same("those that are left", &numbers(&again), &Vec::new())?;
    let nowhere = Query::table(&table, &client.tenant, ["b".into()])?;
    let take = ClaimRange::of(&client.tenant, "none", nowhere, change(&table), "taken_by")?;
    same("of an empty range", &client.store.claim_range(&take).await?, &Vec::new())
}

pub(super) async fn guards_may_look_at_lists_and_the_clock(namespace: &dyn TestNamespace) -> Result<()> {
    let table = tickets("taken_in_time")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    fill(&client, &table, 0..4).await?;
    let hour = std::time::Duration::from_secs(3_600);
    for (number, at) in [(0, now()), (1, now_plus(hour))] {
        let step = Step::update(&table, ["a".into(), number.into()]).set("taken_at", at);
        client.apply(client.one(step)).await?;
    }
    let due = Step::update(&table, [])
        .guard(column("taken_at").le(now()))
        .guard(is_in("state", ["waits", "waits again"]))
        .set("taken_at", now_plus(hour))
        .set("worker", "w");
    let take = |operation: &str| {
        ClaimRange::of(&client.tenant, operation, all(&client, &table)?.limit(9)?, due.clone(), "taken_by")
            .context("the take is refused")
    };
    same("those that are due", &numbers(&client.store.claim_range(&take("one")?).await?), &vec![0])?;
    same("those that are due then", &numbers(&client.store.claim_range(&take("two")?).await?), &Vec::new())
}

pub(super) async fn no_more_are_taken_than_may_weigh(namespace: &dyn TestNamespace) -> Result<()> {
    let table = tickets("taken_by_weight")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let large = |bytes: usize| Value::Json(json!("x".repeat(bytes)));
    for number in 0..5_i64 {
        let step = Step::insert(&table, ["a".into(), number.into()]).set("state", "waits");
        client.apply(client.one(step.set("content", large(20_000)))).await?;
    }
    let take = |operation: &str, first: i64, bytes| {
        let query = all(&client, &table)?.from(first)?;
        let take = ClaimRange::of(&client.tenant, operation, query, change(&table), "taken_by")?;
        Ok::<_, anyhow::Error>(take.limit_bytes(bytes))
    };
    same("one always", &numbers(&client.store.claim_range(&take("one", 0, 1)?).await?), &vec![0])?;
    same(
        "as many as fit",
        &numbers(&client.store.claim_range(&take("two", 1, 30_000)?).await?),
        &vec![1, 2],
    )?;
    // So large that some engines have to look at the row first.
    let step = Step::update(&table, ["a".into(), 4.into()]).set("content", large(200_000));
    client.apply(client.one(step)).await?;
    let rest = client.store.claim_range(&taking(&client, &table, "rest", 9)?).await?;
    same("the rest", &numbers(&rest), &vec![3, 4])?;
    let last = client.row(&table, ["a".into(), 4.into()]).await?;
    same("a large one", &Some(&last), &rest.last())
}

pub(super) async fn nobody_takes_what_belongs_to_another_tenant(namespace: &dyn TestNamespace) -> Result<()> {
    let table = tickets("taken_across")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let other = client.for_tenant("other")?;
    fill(&client, &table, 0..3).await?;
    fill(&other, &table, 0..3).await?;
    let both = Query::all_tenants(&table, "waiting", ["a".into()])?;
    client.eventually(&both, |rows| same("waiting of both", &numbers(rows), &vec![0, 0, 1, 1, 2, 2])).await?;
    let take = ClaimRange::of(&client.tenant, "own", both, change(&table), "taken_by")?;
    let taken = client.store.claim_range(&take).await?;
    same("one's own", &numbers(&taken), &vec![0, 1, 2])?;
    ensure!(taken.iter().all(|row| row.tenant() == &client.tenant), "{taken:?}");
    for number in 0..3_i64 {
        let row = other.row(&table, ["a".into(), number.into()]).await?;
        same("the other's", &(row.text("state"), row.version()), &(Some("waits"), 1))?;
    }
    Ok(())
}

pub(super) async fn each_row_has_one_taker(namespace: &dyn TestNamespace) -> Result<()> {
    const ROWS: i64 = 60;
    const TAKERS: usize = 6;
    let table = tickets("taken_once")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    fill(&client, &table, 0..ROWS).await?;
    let mut takers: JoinSet<Result<Vec<(String, Row)>>> = JoinSet::new();
    for taker in 0..TAKERS {
        let (client, table) = (client.clone(), table.clone());
        takers.spawn(async move {
            let mut taken = Vec::new();
            for round in 0.. {
                let operation = format!("taker-{taker}-{round}");
                let rows = client.rows(all(&client, &table)?).await?;
                let first = rows.iter().find(|row| row.text("state") == Some("waits"));
                let Some(first) = first.and_then(|row| row.int("number")) else { break };
                let query = all(&client, &table)?.from(first)?.limit(7)?;
                let take =
                    ClaimRange::of(&client.tenant, operation.as_str(), query, change(&table), "taken_by")?;
                let rows = client.store.claim_range(&take).await?;
                taken.extend(rows.into_iter().map(|row| (operation.clone(), row)));
            }
            Ok(taken)
        });
    }
    let mut met = BTreeSet::new();
    while let Some(taken) = takers.join_next().await {
        for (operation, row) in taken?? {
            let number = row.int("number").context("a row has no number")?;
            ensure!(met.insert(number), "{number} was taken twice");
            let stored = client.get(&row.address()).await?.context("a row that was taken is missing")?;
            same("who has it", &stored.text("taken_by"), &Some(operation.as_str()))?;
            same("how often it was taken", &stored.int("times"), &Some(1))?;
        }
    }
    same("how many were taken", &met.len(), &(ROWS as usize))
}

pub(super) async fn what_is_no_take_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let (table, other) = (tickets("taken_or_not")?, tickets("taken_elsewhere")?);
    let client = StoreClient::open(namespace, &[&table, &other]).await?;
    let query = all(&client, &table)?;
    let key: [Value; 2] = ["a".into(), 1.into()];
    let unfit = [
        ("an insert", Step::insert(&table, []).set("state", "taken"), "taken_by"),
        ("a delete", Step::delete(&table, []), "taken_by"),
        ("an update of one row", Step::update(&table, key).set("state", "taken"), "taken_by"),
        ("a change of another table", change(&other), "taken_by"),
        ("a column that is not there", change(&table).set("nothing", 0), "taken_by"),
        ("a mark that is no column", change(&table), "nobody"),
        ("a mark for numbers", change(&table), "times"),
        ("a mark that is set already", change(&table).set("taken_by", "me"), "taken_by"),
        ("a guard that has no meaning", change(&table).guard(column("content").eq("x")), "taken_by"),
    ];
    for (about, step, mark) in unfit {
        let taken = ClaimRange::of(&client.tenant, "op", query.clone(), step, mark);
        ensure!(taken.is_err(), "{about} was accepted");
    }
    let others = client.for_tenant("other")?;
    ensure!(
        ClaimRange::of(&others.tenant, "op", query, change(&table), "taken_by").is_err(),
        "a range of another tenant was accepted"
    );
    client.store.close().await;
    let after = client.store.claim_range(&taking(&client, &table, "late", 1)?).await;
    ensure!(after.is_err(), "a store that was closed gave {after:?}");
    Ok(())
}

pub(super) async fn a_lost_answer_stays_unknown_if_the_retry_is_unavailable(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = tickets("taken_in_an_outage")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    fill(&client, &table, 0..1).await?;
    // This store takes row by row, so that every engine commits a plan.
    let faults = Arc::new(LostThenUnavailable::default());
    let store = StoreProxy::new(client.store.clone(), faults.clone());
    faults.start();
    let taken = store.claim_range(&taking(&client, &table, "first", 1)?).await;
    ensure!(matches!(taken, Err(StoreError::OutcomeUnknown { .. })), "reported as {taken:?}");
    faults.check_injected()?;
    let row = client.row(&table, ["a".into(), 0.into()]).await?;
    same("its taker", &row.text("taken_by"), &Some("first"))
}
