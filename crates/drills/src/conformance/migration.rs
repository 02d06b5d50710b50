//! Migration: additions keep what is there, removals are asked for, and what cannot be done in place is refused.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse_store::guard::{column, is_null};
use statehouse_store::migration::Difference;
use statehouse_store::table::TableBuilder;
use statehouse_store::{
    Consistency, Entry, EventTemplate, Migrate, Query, Scan, Schema, SchemaChange, Step, StoreError, Table,
    Type, Value,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{ladder, sample};
use crate::harness::store_client::{StoreClient, column_of, fails, same, scan};

/// The table that the cases change.
fn base() -> TableBuilder {
    Table::named("people").partition("id", Type::Int).required("name", Type::Text).optional("age", Type::Int)
}

fn schema(tables: &[&Arc<Table>]) -> Result<Schema> {
    Ok(Schema::new(tables.iter().map(|&table| table.clone()))?)
}

/// Changes as they are printed.
fn printed(changes: &[SchemaChange]) -> Vec<String> {
    changes.iter().map(SchemaChange::to_string).collect()
}

async fn migrate(client: &StoreClient, tables: &[&Arc<Table>], how: Migrate) -> Result<Vec<String>> {
    Ok(printed(&client.store.migrate(&schema(tables)?, how).await?))
}

/// Opens a namespace with the base table and two people in it.
async fn with_people(namespace: &dyn TestNamespace, table: &Arc<Table>) -> Result<StoreClient> {
    let client = StoreClient::open(namespace, &[table]).await?;
    client.apply(client.one(Step::insert(table, [1.into()]).set("name", "ann").set("age", 30))).await?;
    client.apply(client.one(Step::insert(table, [2.into()]).set("name", "bob"))).await?;
    Ok(client)
}

fn none() -> Vec<String> {
    Vec::new()
}

pub(super) async fn migrating_again_changes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let table = base().index("by_name", &["name"], &[]).build()?;
    let client = StoreClient::open(namespace, &[]).await?;
    let created = vec!["create table people".to_owned()];
    same("the first migration", &migrate(&client, &[&table], Migrate::Apply).await?, &created)?;
    for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
        same("a later migration", &migrate(&client, &[&table], how).await?, &none())?;
    }
    Ok(())
}

pub(super) async fn showing_changes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (old, new) =
        (base().build()?, base().optional("email", Type::Text).index("by_age", &[], &["age"]).build()?);
    let client = StoreClient::open(namespace, &[]).await?;
    same(
        "what is shown",
        &migrate(&client, &[&old], Migrate::Show).await?,
        &vec!["create table people".to_owned()],
    )?;
    let insert = |table: &Arc<Table>| client.one(Step::insert(table, [1.into()]).set("name", "ann")).build();
    let schema_error = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    fails("a table that was only shown", client.store.commit(&insert(&old)?).await, schema_error)?;
    migrate(&client, &[&old], Migrate::Apply).await?;
    let shown = migrate(&client, &[&new], Migrate::Show).await?;
    let expected = vec!["add column people.email text".to_owned(), "add index people.by_age".into()];
    same("the differences", &shown, &expected)?;
    same("shown again", &migrate(&client, &[&new], Migrate::Show).await?, &expected)?;
    same("what is applied", &migrate(&client, &[&new], Migrate::Apply).await?, &expected)?;
    // Removals are shown, and not applied unless they are asked for by name.
    let removals =
        vec!["drop index people.by_age".to_owned(), "drop column people.email, with its data".into()];
    same("removals", &migrate(&client, &[&old], Migrate::Show).await?, &removals)?;
    same("what is applied without loss", &migrate(&client, &[&old], Migrate::Apply).await?, &none())?;
    same("removals", &migrate(&client, &[&old], Migrate::Show).await?, &removals)
}

pub(super) async fn a_new_column_has_its_default_in_old_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().build()?;
    let client = with_people(namespace, &old).await?;
    let new = base()
        .defaulted("status", Type::Text, "ACTIVE")
        .optional("email", Type::Text)
        .defaulted("visits", Type::Int, 7)
        .build()?;
    let added =
        ["status text", "email text", "visits int"].map(|column| format!("add column people.{column}"));
    same("the changes", &migrate(&client, &[&new], Migrate::Apply).await?, &added.to_vec())?;
    let row = client.row(&new, [1.into()]).await?;
    same(
        "an old row",
        &row.values(),
        &[1.into(), "ann".into(), 30.into(), "ACTIVE".into(), Value::Null, 7.into()].as_slice(),
    )?;
    same("its version", &row.version(), &1)?;
    let rows = scan(client.store.as_ref(), Scan::all(&new)).await?;
    same("a scan", &column_of(&rows, "status"), &vec!["ACTIVE".into(), "ACTIVE".into()])?;
    let rows = client.rows(Query::table(&new, &client.tenant, [2.into()])?).await?;
    same("a query", &column_of(&rows, "visits"), &vec![7.into()])?;
    // In guards, in expressions and in events it is as if it had always been there.
    let guard = column("status").eq("ACTIVE").and(column("visits").eq(7)).and(is_null("email"));
    let step = Step::update(&new, [1.into()]).guard(guard).set("visits", column("visits").add(1));
    let entry = Entry::about("person", "1").event(EventTemplate::named("visited").with_row_of(0));
    let applied = client.apply(client.plan().step(step).log(entry)).await?;
    same("the row of the outcome", &applied.rows, &vec![client.find(&new, [1.into()]).await?])?;
    let shown = json!({
        "id": 1, "name": "ann", "age": 30, "status": "ACTIVE", "email": null, "visits": 8, "version": 2,
    });
    same("the row of the event", &client.exact_log(1).await?[0].events[0].data["row"], &shown)?;
    client.refuse(client.one(Step::delete(&new, [2.into()]).guard(column("status").ne("ACTIVE")))).await?;
    // An update that does not name the columns leaves their defaults.
    client.apply(client.one(Step::update(&new, [2.into()]).set("age", 1))).await?;
    let row = client.row(&new, [2.into()]).await?;
    same("an updated old row", &(row.text("status"), row.int("visits")), &(Some("ACTIVE"), Some(7)))?;
    client.apply(client.one(Step::insert(&new, [3.into()]).set("name", "cy").set("visits", 0))).await?;
    let row = client.row(&new, [3.into()]).await?;
    same("a new row", &(row.text("status"), row.int("visits")), &(Some("ACTIVE"), Some(0)))
}

pub(super) async fn new_columns_of_every_type(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().build()?;
    let client = with_people(namespace, &old).await?;
    for (place, kind) in Type::ALL.into_iter().enumerate() {
        // Each type once with its least value and once with its greatest for a default, one type at a time.
        let last = ladder(kind).len() - 1;
        let mut builder = base();
        for kind in Type::ALL.into_iter().take(place + 1) {
            let last = ladder(kind).len() - 1;
            builder = builder
                .defaulted(&format!("low_{kind}"), kind, sample(kind, 0))
                .defaulted(&format!("high_{kind}"), kind, sample(kind, last))
                .optional(&format!("no_{kind}"), kind);
        }
        let table = builder.build()?;
        migrate(&client, &[&table], Migrate::Apply).await?;
        same("nothing is left to do", &migrate(&client, &[&table], Migrate::Show).await?, &none())?;
        let row = client.row(&table, [1.into()]).await?;
        same("the least default", &row.get(&format!("low_{kind}")), &Some(&sample(kind, 0)))?;
        same("the greatest default", &row.get(&format!("high_{kind}")), &Some(&sample(kind, last)))?;
        same("no default", &row.get(&format!("no_{kind}")), &Some(&Value::Null))?;
    }
    Ok(())
}

pub(super) async fn a_new_index_finds_old_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().build()?;
    let client = with_people(namespace, &old).await?;
    let new = base()
        .index("by_age", &[], &["age"])
        .index("by_name", &["name"], &["id"])
        .defaulted("status", Type::Text, "ACTIVE")
        .index("by_status", &["status"], &[])
        .build()?;
    migrate(&client, &[&new], Migrate::Apply).await?;
    client.apply(client.one(Step::insert(&new, [3.into()]).set("name", "bob").set("age", 20))).await?;
    let expect = [
        (Query::index(&new, "by_age", &client.tenant, [])?, vec![3, 1]),
        (Query::index(&new, "by_name", &client.tenant, ["bob".into()])?, vec![2, 3]),
        // Over a column that is as new as the index, old rows stand where its default puts them.
        (Query::index(&new, "by_status", &client.tenant, ["ACTIVE".into()])?, vec![1, 2, 3]),
    ];
    for (query, ids) in expect {
        let ids: Vec<Value> = ids.into_iter().map(Value::Int).collect();
        let source = query.source();
        client.eventually(&query, |rows| same(&source, &column_of(rows, "id"), &ids)).await?;
    }
    Ok(())
}

pub(super) async fn an_older_writer_keeps_what_it_does_not_know(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().build()?;
    let client = with_people(namespace, &old).await?;
    let new = base()
        .defaulted("status", Type::Text, "ACTIVE")
        .optional("email", Type::Text)
        .index("by_email", &["email"], &[])
        .build()?;
    migrate(&client, &[&new], Migrate::Apply).await?;
    let set = Step::update(&new, [1.into()]).set("status", "AWAY").set("email", "ann@x");
    client.apply(client.one(set)).await?;
    // The older program starts: it migrates to its own schema, reads, and writes.
    same("what the older one changes", &migrate(&client, &[&old], Migrate::Apply).await?, &none())?;
    let seen = client.row(&old, [1.into()]).await?;
    same("what the older one sees", &seen.values(), &[1.into(), "ann".into(), 30.into()].as_slice())?;
    let applied = client.apply(client.one(Step::update(&old, [1.into()]).set("age", 31))).await?;
    same("what its commit returns", &applied.rows, &vec![client.find(&old, [1.into()]).await?])?;
    client.apply(client.one(Step::upsert(&old, [2.into()]).set("name", "bo").set("age", 5))).await?;
    client.apply(client.one(Step::insert(&old, [3.into()]).set("name", "cy"))).await?;
    let row = client.row(&new, [1.into()]).await?;
    same(
        "what it kept",
        &(row.text("status"), row.text("email"), row.int("age")),
        &(Some("AWAY"), Some("ann@x"), Some(31)),
    )?;
    let row = client.row(&new, [2.into()]).await?;
    same(
        "what it kept in an upsert",
        &(row.text("status"), row.text("name")),
        &(Some("ACTIVE"), Some("bo")),
    )?;
    let row = client.row(&new, [3.into()]).await?;
    same("what its insert got", &(row.text("status"), row.text("email")), &(Some("ACTIVE"), None))?;
    let query = Query::index(&new, "by_email", &client.tenant, ["ann@x".into()])?;
    client
        .eventually(&query, |rows| same("the newer index", &column_of(rows, "age"), &vec![31.into()]))
        .await?;
    same("the newer program finds its schema", &migrate(&client, &[&new], Migrate::Apply).await?, &none())
}

pub(super) async fn removals_take_their_data_along(namespace: &dyn TestNamespace) -> Result<()> {
    let full = base().optional("email", Type::Text).index("by_email", &["email"], &[]).build()?;
    let beside = Table::named("beside").partition("id", Type::Int).build()?;
    let client = StoreClient::open(namespace, &[&full, &beside]).await?;
    let insert = Step::insert(&full, [1.into()]).set("name", "ann").set("age", 30).set("email", "ann@x");
    client.apply(client.one(insert).step(Step::insert(&beside, [1.into()]))).await?;
    let lean = base().build()?;
    let removed = migrate(&client, &[&lean], Migrate::ApplyWithLoss).await?;
    let expected = vec![
        "drop index people.by_email".to_owned(),
        "drop column people.email, with its data".into(),
        "drop table beside, with its data".into(),
    ];
    same("the removals", &removed, &expected)?;
    let row = client.row(&lean, [1.into()]).await?;
    same("what is left of the row", &row.values(), &[1.into(), "ann".into(), 30.into()].as_slice())?;
    let address = client.address(&beside, [1.into()])?;
    let schema_error = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    fails("the dropped table", client.store.get(&[address], Consistency::Strong).await, schema_error)?;
    // What comes back under the old name is new: nothing of the old content shines through.
    let again = base().defaulted("email", Type::Text, "none").index("by_email", &["email"], &[]).build()?;
    migrate(&client, &[&again, &beside], Migrate::Apply).await?;
    same("the column", &client.row(&again, [1.into()]).await?.text("email"), &Some("none"))?;
    same("the table", &client.find(&beside, [1.into()]).await?, &None)?;
    let query = Query::index(&again, "by_email", &client.tenant, ["none".into()])?;
    client.eventually(&query, |rows| same("the index", &rows.len(), &1)).await
}

pub(super) async fn a_column_can_be_relaxed_and_its_default_changed(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let old = base().defaulted("status", Type::Text, "OLD").build()?;
    let client = with_people(namespace, &old).await?;
    let new = Table::named("people")
        .partition("id", Type::Int)
        .optional("name", Type::Text)
        .optional("age", Type::Int)
        .defaulted("status", Type::Text, "NEW")
        .build()?;
    let expected = vec!["let people.name be null".to_owned(), "default people.status to 'NEW'".into()];
    same("the changes", &migrate(&client, &[&new], Migrate::Apply).await?, &expected)?;
    same("once they are made", &migrate(&client, &[&new], Migrate::Show).await?, &none())?;
    client.apply(client.one(Step::insert(&new, [3.into()]))).await?;
    client.apply(client.one(Step::update(&new, [1.into()]).set("name", Value::Null))).await?;
    let (row, fresh) = (client.row(&new, [1.into()]).await?, client.row(&new, [3.into()]).await?);
    same("an old row", &(row.text("name"), row.text("status")), &(None, Some("OLD")))?;
    same("a new row", &(fresh.text("name"), fresh.text("status")), &(None, Some("NEW")))
}

pub(super) async fn what_cannot_change_in_place_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().required("email", Type::Text).index("by_age", &[], &["age"]).build()?;
    let client = StoreClient::open(namespace, &[&old]).await?;
    let insert = Step::insert(&old, [1.into()]).set("name", "ann").set("age", 3).set("email", "ann@x");
    client.apply(client.one(insert)).await?;
    let plain = || Table::named("people").partition("id", Type::Int);
    let rest = |builder: TableBuilder| builder.optional("age", Type::Int).required("email", Type::Text);
    let cases: [(&str, TableBuilder); 6] = [
        ("another type", rest(plain().required("name", Type::Int))),
        (
            "another key",
            rest(Table::named("people").partition("id", Type::Text).required("name", Type::Text)),
        ),
        (
            "another key's name",
            rest(Table::named("people").partition("key", Type::Int).required("name", Type::Text)),
        ),
        ("a sort column", rest(plain().sort("at", Type::Int).required("name", Type::Text))),
        ("a required column", rest(plain().required("name", Type::Text)).required("city", Type::Text)),
        (
            "another index of that name",
            rest(plain().required("name", Type::Text)).index("by_age", &["age"], &["id"]),
        ),
    ];
    let schema_error = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    let extra = Table::named("aardvarks").partition("id", Type::Int).build()?;
    for (about, builder) in cases {
        let wanted = schema(&[&extra, &builder.build()?])?;
        for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
            fails(about, client.store.migrate(&wanted, how).await, schema_error)?;
        }
    }
    same("the live schema", &migrate(&client, &[&old], Migrate::Show).await?, &none())?;
    same("the row", &client.row(&old, [1.into()]).await?.text("email"), &Some("ann@x"))?;
    client.apply(client.one(Step::update(&old, [1.into()]).set("age", 4))).await?;
    Ok(())
}

pub(super) async fn a_required_column_left_behind_is_relaxed(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().required("email", Type::Text).index("by_email", &["email"], &[]).build()?;
    let client = StoreClient::open(namespace, &[&old]).await?;
    let insert = Step::insert(&old, [1.into()]).set("name", "ann").set("email", "ann@x");
    client.apply(client.one(insert)).await?;
    let lean = base().build()?;
    let shown = vec![
        "let people.email be null".to_owned(),
        "drop index people.by_email".into(),
        "drop column people.email, with its data".into(),
    ];
    same("what is shown", &migrate(&client, &[&lean], Migrate::Show).await?, &shown)?;
    let made = migrate(&client, &[&lean], Migrate::Apply).await?;
    same("what is applied", &made, &vec!["let people.email be null".to_owned()])?;
    client.apply(client.one(Step::insert(&lean, [2.into()]).set("name", "bob"))).await?;
    client.apply(client.one(Step::update(&lean, [1.into()]).set("age", 1))).await?;
    // It comes back with a default, which rows without a value get.
    let back = base().defaulted("email", Type::Text, "none").index("by_email", &["email"], &[]).build()?;
    let made = migrate(&client, &[&back], Migrate::Apply).await?;
    let expected = vec![
        "default people.email to 'none'".to_owned(),
        "require people.email, with 'none' where it is null".into(),
    ];
    same("what brings it back", &made, &expected)?;
    same("once it is there", &migrate(&client, &[&back], Migrate::Show).await?, &none())?;
    let (one, two) = (client.row(&back, [1.into()]).await?, client.row(&back, [2.into()]).await?);
    same("the values", &(one.text("email"), two.text("email")), &(Some("ann@x"), Some("none")))?;
    for email in ["ann@x", "none"] {
        let query = Query::index(&back, "by_email", &client.tenant, [email.into()])?;
        client.eventually(&query, |rows| same("the index", &rows.len(), &1)).await?;
    }
    // Removed again it has a default, so nothing stops inserts.
    same("removed again", &migrate(&client, &[&lean], Migrate::Apply).await?, &none())?;
    client.apply(client.one(Step::insert(&lean, [3.into()]).set("name", "cy"))).await?;
    let removed = migrate(&client, &[&lean], Migrate::ApplyWithLoss).await?;
    same("with loss", &removed, &shown.into_iter().skip(1).collect::<Vec<_>>())
}

pub(super) async fn a_column_is_required_when_every_row_has_a_value(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let old = base().index("by_age", &[], &["age"]).build()?;
    let client = with_people(namespace, &old).await?;
    client.apply(client.one(Step::insert(&old, [3.into()]).set("name", "cy"))).await?;
    let new = Table::named("people")
        .partition("id", Type::Int)
        .required("name", Type::Text)
        .required("age", Type::Int)
        .index("by_age", &[], &["age"])
        .build()?;
    let extra = Table::named("aardvarks").partition("id", Type::Int).build()?;
    for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
        let listed = |error: &StoreError| {
            let said = error.to_string();
            matches!(error, StoreError::Schema { .. })
                && said.contains("column people.age")
                && said.contains("id=2)")
                && said.contains("id=3)")
                && !said.contains("id=1)")
        };
        fails("rows without a value", client.store.migrate(&schema(&[&extra, &new])?, how).await, listed)?;
    }
    same("the live schema", &migrate(&client, &[&old], Migrate::Show).await?, &none())?;
    for id in [2, 3] {
        client.apply(client.one(Step::update(&old, [id.into()]).set("age", 40 + id))).await?;
    }
    let expected = vec!["require people.age".to_owned()];
    same("what is shown", &migrate(&client, &[&new], Migrate::Show).await?, &expected)?;
    same("what is applied", &migrate(&client, &[&new], Migrate::Apply).await?, &expected)?;
    same("once it is made", &migrate(&client, &[&new], Migrate::Show).await?, &none())?;
    let query = Query::index(&new, "by_age", &client.tenant, [])?;
    client
        .eventually(&query, |rows| {
            same("the index", &column_of(rows, "age"), &vec![30.into(), 42.into(), 43.into()])
        })
        .await?;
    ensure!(
        client.one(Step::insert(&new, [4.into()]).set("name", "di")).build().is_err(),
        "null was planned"
    );
    // And back.
    let made = migrate(&client, &[&old], Migrate::Apply).await?;
    same("back", &made, &vec!["let people.age be null".to_owned()])?;
    client.apply(client.one(Step::insert(&old, [4.into()]).set("name", "di"))).await?;
    same("a row without it", &client.row(&old, [4.into()]).await?.int("age"), &None)
}

pub(super) async fn layout_numbers_never_shrink(namespace: &dyn TestNamespace) -> Result<()> {
    let plain = base().build()?;
    let client = with_people(namespace, &plain).await?;
    // A table of an older program has no number yet: whatever comes first is recorded.
    let numbered = |buckets: i64, bits: i64| base().growing("buckets", buckets).fixed("bits", bits).build();
    let expected = vec!["record `buckets` of people as 4".to_owned(), "record `bits` of people as 10".into()];
    same("the changes", &migrate(&client, &[&numbered(4, 10)?], Migrate::Apply).await?, &expected)?;
    same("once they are made", &migrate(&client, &[&numbered(4, 10)?], Migrate::Show).await?, &none())?;
    // A program that does not know them leaves them there.
    same("nothing is declared", &migrate(&client, &[&plain], Migrate::Apply).await?, &none())?;
    let schema_error = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    let extra = Table::named("aardvarks").partition("id", Type::Int).build()?;
    for (about, table) in
        [("fewer", numbered(3, 10)?), ("more bits", numbered(4, 11)?), ("less", numbered(4, 9)?)]
    {
        for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
            fails(about, client.store.migrate(&schema(&[&extra, &table])?, how).await, schema_error)?;
        }
    }
    let grown = vec!["record `buckets` of people as 8".to_owned()];
    same("more", &migrate(&client, &[&numbered(8, 10)?], Migrate::Apply).await?, &grown)?;
    client.store.close().await;
    let again = StoreClient::of(namespace.open().await?, client.tenant.as_str())?;
    fails("fewer", again.store.migrate(&schema(&[&numbered(4, 10)?])?, Migrate::Apply).await, schema_error)?;
    same("the row", &again.row(&plain, [1.into()]).await?.text("name"), &Some("ann"))?;
    // They go with their table.
    migrate(&again, &[&extra], Migrate::ApplyWithLoss).await?;
    let created = vec!["create table people".to_owned()];
    same("a new table", &migrate(&again, &[&extra, &numbered(2, 5)?], Migrate::Apply).await?, &created)
}

pub(super) async fn a_table_is_added_beside_others(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().build()?;
    let client = with_people(namespace, &old).await?;
    let beside = Table::named("beside").partition("id", Type::Int).build()?;
    let changes = client.store.migrate(&schema(&[&old, &beside])?, Migrate::Apply).await?;
    ensure!(
        changes.len() == 1
            && changes[0].difference == Difference::CreateTable
            && *changes[0].table == *beside,
        "expected one table to be created, got {changes:?}"
    );
    // A schema that names only the new table leaves the other where it is.
    same("the changes", &migrate(&client, &[&beside], Migrate::Apply).await?, &none())?;
    client.apply(client.one(Step::insert(&beside, [1.into()])).step(Step::update(&old, [1.into()]))).await?;
    same("the old table's row", &client.row(&old, [1.into()]).await?.version(), &2)
}

pub(super) async fn migrations_may_run_at_once(namespace: &dyn TestNamespace) -> Result<()> {
    let old = base().build()?;
    let client = with_people(namespace, &old).await?;
    let beside = Table::named("beside").partition("id", Type::Int).build()?;
    let wanted = [
        vec![base().defaulted("a", Type::Int, 1).index("by_a", &[], &["a"]).build()?],
        vec![base().optional("b", Type::Text).build()?, beside.clone()],
        vec![base().defaulted("a", Type::Int, 1).optional("b", Type::Text).build()?],
    ];
    let mut tasks: JoinSet<Result<Vec<SchemaChange>, StoreError>> = JoinSet::new();
    for tables in wanted.iter().chain(&wanted) {
        let (store, schema) = (client.store.clone(), Schema::new(tables.iter().cloned())?);
        tasks.spawn(async move { store.migrate(&schema, Migrate::Apply).await });
    }
    let mut made = Vec::new();
    while let Some(changes) = tasks.join_next().await {
        made.extend(printed(&changes??));
    }
    made.sort();
    let mut expected = [
        "add column people.a int",
        "add column people.b text",
        "add index people.by_a",
        "create table beside",
    ]
    .map(str::to_owned)
    .to_vec();
    expected.sort();
    same("every change is made once, by the first server", &made, &expected)?;
    let all =
        base().defaulted("a", Type::Int, 1).optional("b", Type::Text).index("by_a", &[], &["a"]).build()?;
    same("what is left to do", &migrate(&client, &[&all, &beside], Migrate::Show).await?, &none())?;
    let row = client.row(&all, [1.into()]).await?;
    same("a row that was there before", &(row.text("name"), row.int("a")), &(Some("ann"), Some(1)))
}
