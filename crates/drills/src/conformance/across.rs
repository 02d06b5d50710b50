//! Indexes across tenants: what the house's own workers find without knowing whose it is.

use std::sync::Arc;

use anyhow::{Result, ensure};
use statehouse_store::{PlanError, Query, Row, Step, Table, Tenant, Type, Value};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{ladder, of_every_type, ordered_types};
use crate::harness::store_client::{StoreClient, same};

/// Jobs by owner's queue and number, found by shard and due time whatever the tenant.
fn jobs() -> Result<Arc<Table>> {
    Ok(Table::named("jobs")
        .partition("queue", Type::Text)
        .sort("number", Type::Int)
        .optional("shard", Type::Int)
        .optional("due", Type::Int)
        .index("by_due", &["shard"], &["due"])
        .global_index("due", &["shard"], &["due"])
        .build()?)
}

/// Whose job, its key, its shard and due time. In the order in which shard 1 has those that stand in it.
type JobRow = (&'static str, &'static str, i64, Option<i64>, Option<i64>);

const JOBS: [JobRow; 11] = [
    ("b", "q", 1, Some(1), Some(-7)),
    // Of one due time: by tenant, bytewise, then by key. A tenant's name does not run into the key.
    ("A", "z", 9, Some(1), Some(5)),
    ("a", "q", 2, Some(1), Some(5)),
    ("a", "q", 10, Some(1), Some(5)),
    ("a-1", "", 1, Some(1), Some(5)),
    ("a.", "q", 1, Some(1), Some(5)),
    ("b", "a", 1, Some(1), Some(5)),
    ("a", "a", 1, Some(1), Some(6)),
    // Elsewhere, or nowhere.
    ("a", "q", 3, Some(2), Some(5)),
    ("a", "q", 4, None, Some(5)),
    ("b", "q", 5, Some(1), None),
];

fn named(tenant: &Tenant, queue: &str, number: i64) -> String {
    format!("{tenant}/{queue}{number}")
}

/// Rows as the cases write them, with their owners.
fn names(rows: &[Row]) -> Vec<String> {
    let name = |row: &Row| Some(named(row.tenant(), row.text("queue")?, row.int("number")?));
    rows.iter().filter_map(name).collect()
}

async fn insert_jobs(client: &StoreClient, table: &Arc<Table>) -> Result<()> {
    for (tenant, queue, number, shard, due) in JOBS.iter().rev() {
        let owner = client.for_tenant(tenant)?;
        let step = Step::insert(table, [(*queue).into(), (*number).into()]);
        client.apply(owner.one(step.set("shard", *shard).set("due", *due))).await?;
    }
    Ok(())
}

async fn expect(client: &StoreClient, query: &Query, expected: &[&str]) -> Result<()> {
    let about = format!("{query:?}");
    let expected: Vec<String> = expected.iter().map(|&name| name.to_owned()).collect();
    client.eventually(query, |rows| same(&about, &names(rows), &expected)).await
}

pub(super) async fn rows_of_all_tenants_stand_in_one_order(namespace: &dyn TestNamespace) -> Result<()> {
    let table = jobs()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert_jobs(&client, &table).await?;
    let shard = |shard: i64| Query::all_tenants(&table, "due", [shard.into()]);
    let mut all = ["b/q1", "A/z9", "a/q2", "a/q10", "a-1/1", "a./q1", "b/a1", "a/a1"];
    for page in [1, 2, 3, 1_000] {
        expect(&client, &shard(1)?.limit(page)?, &all).await?;
        all.reverse();
        expect(&client, &shard(1)?.backward().limit(page)?, &all).await?;
        all.reverse();
    }
    expect(&client, &shard(2)?, &["a/q3"]).await?;
    expect(&client, &shard(3)?, &[]).await?;
    expect(&client, &shard(1)?.below(5)?, &["b/q1"]).await?;
    expect(&client, &shard(1)?.to(5)?.limit(2)?, &all[..7]).await?;
    expect(&client, &shard(1)?.above(5)?, &["a/a1"]).await?;
    expect(&client, &shard(1)?.from(-7)?.below(5)?, &["b/q1"]).await?;
    expect(&client, &shard(1)?.prefix([5.into()])?.limit(4)?, &all[1..7]).await?;
    expect(&client, &shard(1)?.prefix([5.into()])?.backward().limit(1)?, &{
        let mut fives = all[1..7].to_vec();
        fives.reverse();
        fives
    })
    .await?;
    // Rows come whole, and can be found again by the address that they name.
    for row in client.rows(shard(1)?).await? {
        same("the row behind its address", &client.get(&row.address()).await?, &Some(row))?;
    }
    // A tenant does not get at it, and its own index shows its own rows.
    let owner = Tenant::new("b")?;
    let apart = Query::index(&table, "due", &owner, [1.into()]);
    ensure!(
        matches!(apart, Err(PlanError::IndexReach { .. })),
        "a tenant reads the house's index: {apart:?}"
    );
    expect(&client, &Query::index(&table, "by_due", &owner, [1.into()])?, &["b/q1", "b/a1"]).await
}

pub(super) async fn the_index_follows_the_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let table = jobs()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert_jobs(&client, &table).await?;
    let of = |tenant: &str| client.for_tenant(tenant);
    let update = |queue: &str, number: i64| Step::update(&table, [queue.into(), number.into()]);
    // Moved within the shard, to another, out of the index, into it, deleted, and deleted and inserted again.
    client.apply(of("b")?.one(update("q", 1).set("due", 99))).await?;
    client.apply(of("A")?.one(update("z", 9).set("shard", 2))).await?;
    client.apply(of("a")?.one(update("q", 2).set("shard", Value::Null))).await?;
    client.apply(of("a")?.one(update("q", 10).set("due", Value::Null).set("shard", Value::Null))).await?;
    client.apply(of("b")?.one(update("q", 5).set("due", 4))).await?;
    client.apply(of("a.")?.one(Step::delete(&table, ["q".into(), 1.into()]))).await?;
    client.apply(of("b")?.one(Step::delete(&table, ["a".into(), 1.into()]))).await?;
    let again = Step::insert(&table, ["a".into(), 1.into()]).set("shard", 2).set("due", 0);
    client.apply(of("b")?.one(again)).await?;
    // The same key of another tenant stays where it is.
    let shard = |shard: i64| Query::all_tenants(&table, "due", [shard.into()]);
    expect(&client, &shard(1)?.limit(2)?, &["b/q5", "a-1/1", "a/a1", "b/q1"]).await?;
    expect(&client, &shard(2)?, &["b/a1", "A/z9", "a/q3"]).await?;
    // A column outside of the index changes what it shows, and a logged delete takes the row out as well.
    client
        .apply(of("a")?.noted("job", "a1", "gone").step(Step::delete(&table, ["a".into(), 1.into()])))
        .await?;
    expect(&client, &shard(1)?, &["b/q5", "a-1/1", "b/q1"]).await
}

pub(super) async fn every_ordered_type_can_stand_in_it(namespace: &dyn TestNamespace) -> Result<()> {
    let mut builder = of_every_type("spread");
    let kinds = || ordered_types().filter(|kind| *kind != Type::Bool);
    for kind in kinds() {
        builder = builder.global_index(&format!("at_{kind}"), &[kind.name()], &["id"]);
        builder = builder.global_index(&format!("by_{kind}"), &["bool"], &[kind.name()]);
    }
    // A column that the row's key has too is not a second one.
    let table = builder.global_index("by_id", &["id"], &[]).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let tenants = ["y", "x"];
    for kind in kinds() {
        let ladder = ladder(kind);
        for (place, value) in ladder.iter().enumerate() {
            for tenant in tenants {
                let step = Step::upsert(&table, [(place as i64).into()]).set(kind.name(), value.clone());
                client.apply(client.for_tenant(tenant)?.one(step.set("bool", true))).await?;
            }
        }
        let both: Vec<Value> = ladder.iter().flat_map(|value| [value.clone(), value.clone()]).collect();
        let query = Query::all_tenants(&table, &format!("by_{kind}"), [true.into()])?.limit(5)?;
        client
            .eventually(&query, |rows| {
                same(&query.source(), &crate::harness::store_client::column_of(rows, kind.name()), &both)?;
                let owners: Vec<&str> = rows.iter().map(|row| row.tenant().as_str()).collect();
                same(&query.source(), &owners, &["x", "y"].repeat(ladder.len()))
            })
            .await?;
        for (place, value) in ladder.iter().enumerate() {
            let query = Query::all_tenants(&table, &format!("at_{kind}"), [value.clone()])?.limit(1)?;
            let about = format!("the partition of {value}");
            let found = |rows: &[Row]| rows.iter().map(|row| row.key()[0].clone()).collect::<Vec<_>>();
            let expected = vec![Value::from(place as i64); 2];
            client.eventually(&query, |rows| same(&about, &found(rows), &expected)).await?;
        }
    }
    let query = Query::all_tenants(&table, "by_id", [0.into()])?.backward().limit(1)?;
    let owners = |rows: &[Row]| rows.iter().map(|row| row.tenant().to_string()).collect::<Vec<_>>();
    client.eventually(&query, |rows| same("by key", &owners(rows), &vec!["y".into(), "x".into()])).await
}

pub(super) async fn pages_of_heavy_rows_go_on_where_they_ended(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("loads")
        .partition("id", Type::Int)
        .required("shard", Type::Int)
        .required("due", Type::Int)
        .required("load", Type::Text)
        .index("by_due", &["shard"], &["due"])
        .global_index("due", &["shard"], &["due"])
        .build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let owners = [client.clone(), client.for_tenant("other")?];
    let count = 24_i64;
    for id in 0..count {
        for owner in &owners {
            let step = Step::insert(&table, [id.into()]).set("shard", 1).set("due", count - id);
            client.apply(owner.one(step.set("load", "x".repeat(390_000)))).await?;
        }
    }
    // Together far more than some engine returns for one page, which may then hold fewer rows than it was asked for.
    let due = |rows: &[Row]| rows.iter().filter_map(|row| row.int("due")).collect::<Vec<_>>();
    let expected: Vec<i64> = (1..=count).flat_map(|due| [due, due]).collect();
    let query = Query::all_tenants(&table, "due", [1.into()])?;
    client.eventually(&query, |rows| same("across tenants", &due(rows), &expected)).await?;
    let expected: Vec<i64> = (1..=count).collect();
    let query = Query::index(&table, "by_due", &client.tenant, [1.into()])?;
    client.eventually(&query, |rows| same("of one tenant", &due(rows), &expected)).await
}

pub(super) async fn it_can_be_added_to_rows_and_taken_away(namespace: &dyn TestNamespace) -> Result<()> {
    let base = || {
        Table::named("jobs")
            .partition("queue", Type::Text)
            .sort("number", Type::Int)
            .optional("shard", Type::Int)
            .optional("due", Type::Int)
    };
    let (old, new) = (base().build()?, base().global_index("due", &["shard"], &["due"]).build()?);
    let client = StoreClient::open(namespace, &[&old]).await?;
    insert_jobs(&client, &old).await?;
    let migrate = async |table: &Arc<Table>, how| -> Result<Vec<String>> {
        let schema = statehouse_store::Schema::new([table.clone()])?;
        let changes = client.store.migrate(&schema, how).await?;
        Ok(changes.iter().map(ToString::to_string).collect())
    };
    use statehouse_store::Migrate::{Apply, ApplyWithLoss, Show};
    same("adding", &migrate(&new, Apply).await?, &vec!["add index jobs.due across tenants".into()])?;
    same("once it is added", &migrate(&new, Show).await?, &vec![])?;
    let query = Query::all_tenants(&new, "due", [1.into()])?.limit(3)?;
    let all = ["b/q1", "A/z9", "a/q2", "a/q10", "a-1/1", "a./q1", "b/a1", "a/a1"];
    expect(&client, &query, &all).await?;
    // A program that does not know the index keeps it right.
    let late = Step::update(&old, ["q".into(), 1.into()]).set("due", 7);
    client.apply(client.for_tenant("b")?.one(late)).await?;
    let gone = Step::delete(&old, ["z".into(), 9.into()]);
    client.apply(client.for_tenant("A")?.one(gone)).await?;
    expect(&client, &query, &["a/q2", "a/q10", "a-1/1", "a./q1", "b/a1", "a/a1", "b/q1"]).await?;
    same("an older schema", &migrate(&old, Apply).await?, &vec![])?;
    let taken = vec!["drop index jobs.due".to_owned()];
    same("taking it away", &migrate(&old, ApplyWithLoss).await?, &taken)?;
    client
        .apply(client.for_tenant("b")?.one(Step::update(&old, ["q".into(), 1.into()]).set("due", 6)))
        .await?;
    migrate(&new, Apply).await?;
    expect(&client, &query, &["a/q2", "a/q10", "a-1/1", "a./q1", "b/a1", "a/a1", "b/q1"]).await
}
