//! Several reads in one go: each is answered as if it had been made by itself, whatever else is asked with it.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use statehouse_store::{
    Address, Cell, Consistency, Query, Random, ReadRequest, ReadResult, Step, Store, StoreError, Table, Type,
    Value,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{counters, ladder, of_every_type};
use crate::harness::store_client::{StoreClient, fails, pause, same};

/// Entries of lists, also by their mark.
fn entries(name: &str) -> Result<Arc<Table>> {
    Ok(Table::named(name)
        .partition("list", Type::Text)
        .sort("at", Type::Time)
        .sort("number", Type::Int)
        .optional("mark", Type::Text)
        .index("by_mark", &["mark"], &["number"])
        .build()?)
}

/// Fills lists `l0`, `l1`, …: the first has no entries, the next 7, then 14, …
async fn fill(client: &StoreClient, table: &Arc<Table>, lists: i64) -> Result<()> {
    for list in 0..lists {
        let steps: Vec<Step> = (0..list * 7)
            .map(|number| {
                let key = [format!("l{list}").into(), time(number / 2), number.into()];
                Step::insert(table, key).set("mark", if number % 3 == 0 { Value::Null } else { "m".into() })
            })
            .collect();
        for steps in steps.chunks(9) {
            client.apply(client.plan().steps(steps.to_vec())).await?;
        }
    }
    Ok(())
}

fn time(seconds: i64) -> Value {
    statehouse_store::Time::from_millis(seconds * 1_000).into()
}

/// What the store answers to each of these by itself.
async fn one_by_one(store: &dyn Store, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>> {
    let mut seen = Vec::new();
    for ask in asks {
        seen.push(match ask {
            ReadRequest::Get(addresses) => ReadResult::Rows(store.get(addresses, Consistency::Strong).await?),
            ReadRequest::Value(cell) => {
                let rows = store.get(&[cell.address().clone()], Consistency::Strong).await?;
                let row = rows.into_iter().next().flatten();
                ReadResult::Value(row.and_then(|row| row.values().get(cell.column_index()).cloned()))
            }
            ReadRequest::Query(query) => ReadResult::Page(store.query(query).await?),
        });
    }
    Ok(seen)
}

/// Demands that these are answered in one go as they are one by one, and that something is seen.
async fn expect_same(client: &StoreClient, about: &str, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>> {
    let store = client.store.as_ref();
    let (together, apart) = (store.read_many(asks).await?, one_by_one(store, asks).await?);
    same(&format!("answers to {about}"), &together.len(), &asks.len())?;
    for (number, (together, apart)) in together.iter().zip(&apart).enumerate() {
        same(&format!("answer {number} to {about}"), together, apart)?;
    }
    Ok(together)
}

fn has_rows(seen: &ReadResult) -> bool {
    match seen {
        ReadResult::Rows(rows) => rows.iter().any(Option::is_some),
        ReadResult::Value(value) => value.is_some(),
        ReadResult::Page(page) => !page.rows.is_empty(),
    }
}

pub(super) async fn answers_stand_in_the_order_of_their_asks(namespace: &dyn TestNamespace) -> Result<()> {
    let (left, right, lists) =
        (counters("looked_left")?, counters("looked_right")?, entries("looked_lists")?);
    let client = StoreClient::open(namespace, &[&left, &right, &lists]).await?;
    client.apply(client.one(Step::insert(&left, ["a".into()]).set("n", 1))).await?;
    client.apply(client.one(Step::insert(&right, ["a".into()]).set("n", 2))).await?;
    fill(&client, &lists, 3).await?;
    let left_a = client.address(&left, ["a".into()])?;
    let (right_a, missing) = (client.address(&right, ["a".into()])?, client.address(&left, ["b".into()])?);
    let list = |name: &str| Query::table(&lists, &client.tenant, [name.into()]);
    let (long, short, none) = (list("l2")?.backward().limit(3)?, list("l1")?, list("l0")?);
    let (several, twice) =
        ([right_a.clone(), missing.clone(), left_a.clone()], [left_a.clone(), left_a.clone()]);
    let (absent, nothing) = ([missing], []);
    let asks = [
        ReadRequest::Query(&long),
        ReadRequest::Get(&several),
        ReadRequest::Query(&none),
        ReadRequest::Get(&twice),
        ReadRequest::Get(&nothing),
        ReadRequest::Query(&short),
        ReadRequest::Get(&absent),
        ReadRequest::Query(&long),
    ];
    let seen = expect_same(&client, "reads of all kinds", &asks).await?;
    let with_rows: Vec<bool> = seen.iter().map(has_rows).collect();
    same("which have rows", &with_rows, &vec![true, true, false, true, false, true, false, true])?;
    for ask in &asks {
        expect_same(&client, "one read", std::slice::from_ref(ask)).await?;
    }
    same("a look at nothing", &client.store.read_many(&[]).await?, &Vec::new())?;
    same(
        "a look at no rows",
        &client.store.read_many(&[ReadRequest::Get(&[])]).await?,
        &vec![ReadResult::Rows(Vec::new())],
    )
}

pub(super) async fn ranges_keep_their_bounds_order_and_pages(namespace: &dyn TestNamespace) -> Result<()> {
    let lists = entries("looked_ranges")?;
    let client = StoreClient::open(namespace, &[&lists]).await?;
    fill(&client, &lists, 5).await?;
    let mut queries = Vec::new();
    for (number, list) in ["l4", "l0", "l3", "l2", "l4", "l1"].into_iter().enumerate() {
        let list = || Query::table(&lists, &client.tenant, [list.into()]);
        let limit = number % 3 + 2;
        queries.extend([
            list()?.limit(limit)?,
            list()?.backward().limit(limit + 1)?,
            list()?.from(time(2))?.below(time(9))?.limit(limit)?,
            list()?.above(time(1))?.backward(),
            list()?.prefix([time(3)])?.to(7)?,
            list()?.prefix([time(3), 6.into()])?,
        ]);
        for query in [list()?.limit(limit)?, list()?.backward().limit(limit)?] {
            if let Some(next) = client.store.query(&query).await?.next {
                queries.push(query.after(next)?);
            }
        }
    }
    let asks: Vec<ReadRequest<'_>> = queries.iter().map(ReadRequest::Query).collect();
    let seen = expect_same(&client, "many ranges", &asks).await?;
    let found = seen.iter().filter(|seen| has_rows(seen)).count();
    ensure!(found > 30, "only {found} of {} ranges have rows", queries.len());
    // A range that begins behind the end of a list without an order of its own holds nothing.
    let single = counters("looked_single")?;
    let client = StoreClient::open(namespace, &[&lists, &single]).await?;
    client.apply(client.one(Step::insert(&single, ["a".into()]))).await?;
    let whole = Query::table(&single, &client.tenant, ["a".into()])?;
    let row = client.row(&single, ["a".into()]).await?;
    let behind = whole.clone().after(whole.cursor_at(&row))?;
    let seen = expect_same(
        &client,
        "one row and behind it",
        &[ReadRequest::Query(&behind), ReadRequest::Query(&whole)],
    )
    .await?;
    same("which have rows", &seen.iter().map(has_rows).collect::<Vec<_>>(), &vec![false, true])
}

pub(super) async fn rows_of_every_type_can_be_looked_at_together(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (wide, narrow, lists) =
        (of_every_type("looked_wide").build()?, counters("looked_narrow")?, entries("looked_beside")?);
    let client = StoreClient::open(namespace, &[&wide, &narrow, &lists]).await?;
    for place in 0..4_usize {
        let mut step = Step::insert(&wide, [(place as i64).into()]);
        for kind in Type::ALL {
            step = step.set(kind.name(), ladder(kind).get(place * 2).cloned().unwrap_or(Value::Null));
        }
        client.apply(client.one(step)).await?;
    }
    client.apply(client.one(Step::insert(&narrow, ["a".into()]).set("n", i64::MIN))).await?;
    fill(&client, &lists, 2).await?;
    let wides = (0..5).map(|id: i64| client.address(&wide, [id.into()])).collect::<Result<Vec<Address>>>()?;
    let narrows = [client.address(&narrow, ["a".into()])?];
    let list = Query::table(&lists, &client.tenant, ["l1".into()])?;
    let one = wides.get(1..2).unwrap_or_default();
    expect_same(
        &client,
        "one of each",
        &[ReadRequest::Get(&narrows), ReadRequest::Get(one), ReadRequest::Query(&list)],
    )
    .await?;
    let seen = expect_same(
        &client,
        "several of each",
        &[
            ReadRequest::Get(&wides),
            ReadRequest::Query(&list),
            ReadRequest::Get(&narrows),
            ReadRequest::Query(&list),
            ReadRequest::Get(one),
        ],
    )
    .await?;
    ensure!(seen.iter().all(has_rows), "something was not seen: {seen:?}");
    Ok(())
}

pub(super) async fn a_value_can_be_looked_at_without_its_row(namespace: &dyn TestNamespace) -> Result<()> {
    let (wide, narrow, lists) =
        (of_every_type("valued_wide").build()?, counters("valued_narrow")?, entries("valued_beside")?);
    let client = StoreClient::open(namespace, &[&wide, &narrow, &lists]).await?;
    let other = client.for_tenant("other")?;
    // The first row has nothing but its key, and the last is not there.
    for id in 0..3_usize {
        let mut step = Step::insert(&wide, [(id as i64).into()]);
        for kind in Type::ALL {
            let value = ladder(kind).get(id * 2).filter(|_| id > 0).cloned();
            step = step.set(kind.name(), value.unwrap_or(Value::Null));
        }
        client.apply(client.one(step)).await?;
    }
    client.apply(client.one(Step::insert(&narrow, ["a".into()]).set("n", 7))).await?;
    other.apply(other.one(Step::insert(&narrow, ["a".into()]).set("n", 8))).await?;
    fill(&client, &lists, 3).await?;
    let cell = |client: &StoreClient, table: &Arc<Table>, key: Value, column: &str| -> Result<Cell> {
        Ok(Cell::new(client.address(table, [key])?, column)?)
    };
    let list = |name: &str| Query::table(&lists, &client.tenant, [name.into()]);
    let (long, short) = (list("l2")?, list("l1")?);
    let (own, foreign) = (cell(&client, &narrow, "a".into(), "n")?, cell(&other, &narrow, "a".into(), "n")?);
    let (key, missing) =
        (cell(&client, &narrow, "a".into(), "id")?, cell(&client, &narrow, "b".into(), "id")?);
    let row = [own.address().clone()];
    // Alone, beside ranges, beside rows, beside others of their shape.
    let together = [ReadRequest::Value(&own), ReadRequest::Query(&long), ReadRequest::Query(&short)];
    expect_same(&client, "a value and two lists", &together).await?;
    let apart = [ReadRequest::Query(&short), ReadRequest::Value(&own), ReadRequest::Get(&row)];
    expect_same(&client, "a value, its row and a list", &apart).await?;
    let asks = [
        ReadRequest::Value(&foreign),
        ReadRequest::Value(&key),
        ReadRequest::Value(&own),
        ReadRequest::Value(&missing),
        ReadRequest::Get(&row),
    ];
    let seen = expect_same(&client, "several values", &asks).await?;
    let values: Vec<Option<Value>> =
        seen.into_iter().take(4).map(ReadResult::into_value).collect::<Result<_, _>>()?;
    same("values", &values, &vec![Some(8.into()), Some("a".into()), Some(7.into()), None])?;
    for kind in Type::ALL {
        let cells = (0..4_i64)
            .map(|id| cell(&client, &wide, id.into(), kind.name()))
            .collect::<Result<Vec<Cell>>>()?;
        let asks: Vec<ReadRequest<'_>> =
            cells.iter().map(ReadRequest::Value).chain([ReadRequest::Query(&long)]).collect();
        let seen = expect_same(&client, kind.name(), &asks).await?;
        for ask in &asks {
            expect_same(&client, kind.name(), std::slice::from_ref(ask)).await?;
        }
        let values: Vec<Option<Value>> =
            seen.into_iter().take(4).map(ReadResult::into_value).collect::<Result<_, _>>()?;
        same("no value", &values.first().cloned().flatten(), &Some(Value::Null))?;
        same("no row", &values.last().cloned().flatten(), &None)?;
    }
    ensure!(Cell::new(client.address(&narrow, ["a".into()])?, "m").is_err(), "there is no such column");
    Ok(())
}

pub(super) async fn indexes_can_be_looked_at_with_tables(namespace: &dyn TestNamespace) -> Result<()> {
    let (lists, jobs) = (
        entries("looked_marks")?,
        Table::named("looked_jobs")
            .partition("id", Type::Int)
            .optional("shard", Type::Int)
            .optional("due", Type::Int)
            .global_index("due", &["shard"], &["due"])
            .build()?,
    );
    let client = StoreClient::open(namespace, &[&lists, &jobs]).await?;
    let other = client.for_tenant("other")?;
    fill(&client, &lists, 3).await?;
    for (number, client) in [&client, &other, &client].into_iter().enumerate() {
        let step =
            Step::insert(&jobs, [(number as i64).into()]).set("shard", 1).set("due", 9 - number as i64);
        client.apply(client.one(step)).await?;
    }
    let marked = |tenant: &StoreClient| Query::index(&lists, "by_mark", &tenant.tenant, ["m".into()]);
    let (marks, last) = (marked(&client)?.limit(4)?, marked(&client)?.backward().limit(2)?);
    let (foreign, due) = (marked(&other)?, Query::all_tenants(&jobs, "due", [1.into()])?);
    let list = Query::table(&lists, &client.tenant, ["l2".into()])?.limit(1)?;
    let asks = [
        ReadRequest::Query(&marks),
        ReadRequest::Query(&due),
        ReadRequest::Query(&list),
        ReadRequest::Query(&last),
        ReadRequest::Query(&foreign),
    ];
    // Indexes may lag, though not for ever.
    for tries in 1.. {
        let seen = client.store.read_many(&asks).await?;
        let rows: Vec<usize> =
            seen.into_iter().map(|seen| Ok(seen.into_page()?.rows.len())).collect::<Result<_>>()?;
        if rows == [4, 3, 1, 2, 0] {
            break;
        }
        ensure!(tries < 1_000, "the pages have {rows:?} rows");
        pause().await;
    }
    let seen = expect_same(&client, "indexes and a table", &asks).await?;
    let due: Vec<_> = seen.into_iter().nth(1).context("one result is missing")?.into_page()?.rows;
    let owners: Vec<&str> = due.iter().map(|row| row.tenant().as_str()).collect();
    same("whose jobs are due", &owners, &vec!["acme", "other", "acme"])
}

pub(super) async fn each_tenant_is_shown_its_own_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let (rows, lists) = (counters("looked_own")?, entries("looked_own_lists")?);
    let client = StoreClient::open(namespace, &[&rows, &lists]).await?;
    let other = client.for_tenant("other")?;
    for (n, client) in [(1, &client), (2, &other)] {
        client.apply(client.one(Step::insert(&rows, ["a".into()]).set("n", n))).await?;
        fill(client, &lists, n + 1).await?;
    }
    let addresses = [client.address(&rows, ["a".into()])?, other.address(&rows, ["a".into()])?];
    let list = |client: &StoreClient| Query::table(&lists, &client.tenant, ["l2".into()]);
    let (own, foreign) = (list(&client)?, list(&other)?);
    let asks = [ReadRequest::Query(&foreign), ReadRequest::Get(&addresses), ReadRequest::Query(&own)];
    let seen = expect_same(&client, "rows of two tenants", &asks).await?;
    same("which have rows", &seen.iter().map(has_rows).collect::<Vec<_>>(), &vec![true, true, false])?;
    for seen in seen {
        if let ReadResult::Page(page) = seen {
            ensure!(page.rows.iter().all(|row| row.tenant() == &other.tenant), "rows of another: {page:?}");
        }
    }
    Ok(())
}

pub(super) async fn a_look_sees_what_was_acknowledged(namespace: &dyn TestNamespace) -> Result<()> {
    let (rows, lists) = (counters("looked_fresh")?, entries("looked_fresh_lists")?);
    let client = StoreClient::open(namespace, &[&rows, &lists]).await?;
    let mut tasks: JoinSet<Result<()>> = JoinSet::new();
    for task in 0..6_i64 {
        let (client, rows, lists) = (client.clone(), rows.clone(), lists.clone());
        tasks.spawn(async move {
            let mut random = Random::seeded(task as u64);
            let name = format!("t{task}");
            let addresses = [client.address(&rows, [name.as_str().into()])?];
            for number in 1..=15_i64 {
                let row = Step::upsert(&rows, [name.as_str().into()]).set("n", number);
                let entry = Step::insert(&lists, [name.as_str().into(), time(number), number.into()]);
                client.apply(client.plan().step(row).step(entry)).await?;
                let limit = random.below(20) as usize + 1;
                let list = Query::table(&lists, &client.tenant, [name.as_str().into()])?;
                let list = list.backward().limit(limit)?;
                let seen = client
                    .store
                    .read_many(&[ReadRequest::Query(&list), ReadRequest::Get(&addresses)])
                    .await?;
                let mut seen = seen.into_iter();
                let page = seen.next().context("one result is missing")?.into_page()?.rows;
                let got: Vec<Option<i64>> = page.iter().map(|row| row.int("number")).collect();
                let expected: Vec<Option<i64>> = (1..=number).rev().take(limit).map(Some).collect();
                same("the list of a caller among others", &got, &expected)?;
                ensure!(
                    page.iter().all(|row| row.text("list") == Some(&name)),
                    "the list of another caller: {page:?}"
                );
                let row = seen.next().context("one result is missing")?.into_rows()?;
                let n: Vec<Option<i64>> = row.iter().map(|row| row.as_ref()?.int("n")).collect();
                same("the row of a caller among others", &n, &vec![Some(number)])?;
            }
            Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

pub(super) async fn tables_that_are_not_there_are_told(namespace: &dyn TestNamespace) -> Result<()> {
    let (known, unknown) = (counters("looked_known")?, counters("looked_unknown")?);
    let client = StoreClient::open(namespace, &[&known]).await?;
    client.apply(client.one(Step::insert(&known, ["a".into()]))).await?;
    let addresses = [client.address(&known, ["a".into()])?];
    let query = Query::table(&unknown, &client.tenant, ["a".into()])?;
    let schema = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    fails(
        "a look",
        client.store.read_many(&[ReadRequest::Get(&addresses), ReadRequest::Query(&query)]).await,
        schema,
    )?;
    let seen = expect_same(&client, "what is there", &[ReadRequest::Get(&addresses)]).await?;
    ensure!(seen.iter().all(has_rows), "something was not seen: {seen:?}");
    Ok(())
}
