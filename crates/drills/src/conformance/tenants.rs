//! Tenants: no verb and no read crosses from one to another, however alike their names are.

use anyhow::{Context, Result};
use statehouse_store::guard::column;
use statehouse_store::{Consistency, Guard, Query, Reason, Scan, Step, Table, Type, Value};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::counters;
use crate::harness::store_client::{StoreClient, column_of, same, scan};

/// Names that an engine could confuse by folding case, by prefix, or by joining them with a key.
const NAMES: [&str; 6] = ["acme", "ACME", "acme.", "acme-x", "acm", "_"];

pub(super) async fn verbs_touch_the_own_tenants_rows_only(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("walled")?;
    let first = StoreClient::open(namespace, &[&table]).await?;
    let mut clients = Vec::new();
    for name in NAMES {
        clients.push(first.for_tenant(name)?);
    }
    let key = || [Value::from("x")];
    let (owner, strangers) = clients.split_first().context("there are no tenants")?;
    owner.apply(owner.one(Step::insert(&table, key()).set("n", 7))).await?;
    let before = owner.row(&table, key()).await?;
    for stranger in strangers {
        // For everybody else the row is not there.
        stranger.refuse_as(stranger.one(Step::update(&table, key()).set("n", 0)), 0, &Reason::Absent).await?;
        stranger.refuse_as(stranger.one(Step::delete(&table, key())), 0, &Reason::Absent).await?;
        stranger.refuse_as(stranger.one(Step::assert(&table, key())), 0, &Reason::Absent).await?;
        stranger.apply(stranger.one(Step::assert_absent(&table, key()))).await?;
        stranger.apply(stranger.one(Step::remove(&table, key()).guard(Guard::never()))).await?;
        stranger.apply(stranger.one(Step::upsert(&table, key()).guard(Guard::never()).set("n", 1))).await?;
        stranger.refuse_as(stranger.one(Step::insert(&table, key())), 0, &Reason::Present).await?;
        let guard = column("n").eq(7);
        let reason = Reason::Guard { conjunct: 0, guard: Box::new(guard.clone()) };
        stranger.refuse_as(stranger.one(Step::assert(&table, key()).guard(guard)), 0, &reason).await?;
        stranger.apply(stranger.one(Step::update(&table, key()).set("n", column("n").add(1)))).await?;
        stranger.apply(stranger.one(Step::delete(&table, key()).guard(column("n").eq(2)))).await?;
        same("the owner's row", &owner.row(&table, key()).await?, &before)?;
    }
    Ok(())
}

pub(super) async fn reads_return_the_own_tenants_rows_only(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("veiled")
        .partition("part", Type::Text)
        .sort("rank", Type::Int)
        .required("owner", Type::Text)
        .index("by_owner_rank", &[], &["rank"])
        .index("by_part", &["part"], &["rank"])
        .build()?;
    let first = StoreClient::open(namespace, &[&table]).await?;
    let mut clients = Vec::new();
    for name in NAMES {
        let client = first.for_tenant(name)?;
        let steps = (0..3).map(|rank| Step::insert(&table, ["p".into(), rank.into()]).set("owner", name));
        client.apply(client.plan().steps(steps)).await?;
        clients.push(client);
    }
    for client in &clients {
        let own = vec![Value::from(client.tenant.as_str()); 3];
        let addresses = (0..3)
            .map(|rank| client.address(&table, ["p".into(), rank.into()]))
            .collect::<Result<Vec<_>>>()?;
        let rows: Vec<_> =
            client.store.get(&addresses, Consistency::Strong).await?.into_iter().flatten().collect();
        same("a get", &column_of(&rows, "owner"), &own)?;
        let query = Query::table(&table, &client.tenant, ["p".into()])?;
        for query in [query.clone(), query.clone().limit(1)?, query.backward().limit(2)?] {
            same("a query", &column_of(&client.rows(query).await?, "owner"), &own)?;
        }
        let indexes = [
            Query::index(&table, "by_owner_rank", &client.tenant, [])?.limit(2)?,
            Query::index(&table, "by_part", &client.tenant, ["p".into()])?.backward(),
        ];
        for query in indexes {
            client.eventually(&query, |rows| same("an index", &column_of(rows, "owner"), &own)).await?;
        }
        let rows = scan(client.store.as_ref(), Scan::of(&table, &client.tenant).limit(2)?).await?;
        same("a scan", &column_of(&rows, "owner"), &own)?;
    }
    Ok(())
}

pub(super) async fn subjects_of_tenants_are_apart_in_the_log(namespace: &dyn TestNamespace) -> Result<()> {
    let first = StoreClient::open(namespace, &[]).await?;
    for name in NAMES {
        let client = first.for_tenant(name)?;
        client.apply(client.noted("thing", "x", "noted")).await?;
    }
    let mut owners: Vec<String> =
        first.exact_log(NAMES.len()).await?.into_iter().map(|record| record.tenant.to_string()).collect();
    owners.sort();
    let mut expected: Vec<String> = NAMES.iter().map(|&name| name.to_owned()).collect();
    expected.sort();
    same("the owners of the records", &owners, &expected)
}
