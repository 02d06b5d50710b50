//! Which house a store belongs to, fields that go and come back, and losses by name.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse_store::{Migrate, Store};
use tokio::task::JoinSet;

use super::{applied, house, refused};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

/// A house of this name with one entity.
fn named(house: &str, fields: &str) -> String {
    format!("[house]\n{house}\n[entity.product]\nkey = {{ id = \"int\" }}\nfields = {{ {fields} }}\n")
}

fn drill(fields: &str) -> String {
    named("name = \"drill\"", fields)
}

/// What a migration to this blueprint would do.
async fn left(store: &Arc<dyn Store>, blueprint: &str) -> Result<Vec<String>> {
    Ok(house(store, blueprint)?.migrate(Migrate::Show).await?.iter().map(ToString::to_string).collect())
}

async fn create(client: &TenantClient, id: i64, fields: serde_json::Value) -> Result<()> {
    let mut input = fields;
    input["id"] = id.into();
    client.done("product.create", &[], input, None).await.map(drop)
}

pub(super) async fn a_store_belongs_to_one_house(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let own = drill("note = \"text?\"");
    ensure!(house(&store, &own)?.identity().await?.is_none(), "an empty store has an owner");
    // Showing claims nothing.
    left(&store, &own).await?;
    ensure!(house(&store, &own)?.identity().await?.is_none(), "showing has claimed the store");
    // A store of an earlier version has tables and no owner. It is claimed.
    store.migrate(house(&store, &own)?.schema(), Migrate::Apply).await?;
    ensure!(house(&store, &own)?.identity().await?.is_none(), "the tables have claimed the store");
    let client = applied(&store, &own, Migrate::Apply).await?;
    create(&client, 1, json!({"note": "kept"})).await?;
    let identity = client.house.identity().await?;
    let id = identity.as_ref().map(|found| found.id.clone()).unwrap_or_default();
    same("the name", &identity.map(|found| found.name).as_deref(), &Some("drill"))?;
    ensure!(!id.is_empty(), "the house has no id");
    // Another house is rejected in every mode, also if it asks for nothing but what is there.
    let other = named("name = \"other\"", "size = \"int?\"");
    for blueprint in
        [&other, &named("name = \"other\"", "note = \"text?\""), "[entity.a]\nkey = { id = \"int\" }\n"]
    {
        let other = house(&store, blueprint)?;
        for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
            let message = refused(other.migrate(how).await).await?;
            ensure!(message.contains("`drill`") && message.contains("renamed_from"), "{message}");
        }
        refused(other.prepare().await).await?;
        refused(other.migrate_losing(&["products".into()]).await).await?;
        ensure!(other.check_fit().await.is_err(), "another house uses the store");
    }
    same("what has changed", &left(&store, &own).await?, &Vec::new())?;
    client.shows("product", &[1.into()], &json!({"note": "kept"})).await?;
    // A house that says that it is the same one keeps its id.
    let renamed = named("name = \"other\"\nrenamed_from = \"drill\"", "note = \"text?\"");
    let client = applied(&store, &renamed, Migrate::Apply).await?;
    let identity = client.house.identity().await?.map(|found| (found.name, found.id));
    same("the identity", &identity, &Some(("other".to_owned(), id)))?;
    client.shows("product", &[1.into()], &json!({"note": "kept"})).await?;
    refused(house(&store, &own)?.migrate(Migrate::Apply).await).await.map(drop)
}

pub(super) async fn of_houses_that_race_one_gets_the_store(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let blueprints = ["one", "two", "three"]
        .map(|name| format!("[house]\nname = \"{name}\"\n[entity.{name}]\nkey = {{ id = \"int\" }}\n"));
    let mut tasks = JoinSet::new();
    for blueprint in blueprints.iter().chain(&blueprints) {
        let house = house(&store, blueprint)?;
        tasks.spawn(async move { (house.name().to_owned(), house.migrate(Migrate::Apply).await) });
    }
    let mut results = Vec::new();
    while let Some(result) = tasks.join_next().await {
        results.push(result?);
    }
    let [first, ..] = &blueprints;
    let owner = house(&store, first)?.identity().await?.map(|found| found.name).unwrap_or_default();
    for (name, result) in results {
        same(&format!("whether {name} has the store: {result:?}"), &result.is_ok(), &(name == owner))?;
    }
    // The others have created nothing.
    let own = blueprints.iter().find(|blueprint| blueprint.contains(&owner));
    same("what is left", &left(&store, own.map(String::as_str).unwrap_or_default()).await?, &Vec::new())
}

pub(super) async fn a_required_field_goes_and_comes_back(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let (first, lean) = (drill("name = \"text\", size = \"int\""), drill("name = \"text\""));
    let client = applied(&store, &first, Migrate::Apply).await?;
    create(&client, 1, json!({"name": "a", "size": 10})).await?;
    // As a server does it, and as `apply` does it.
    house(&store, &lean)?.prepare().await?;
    let client = applied(&store, &lean, Migrate::Apply).await?;
    create(&client, 2, json!({"name": "b"})).await?;
    // Without a default it cannot come back: a row has none.
    let message = refused(house(&store, &first)?.migrate(Migrate::Apply).await).await?;
    ensure!(message.contains("products.size") && message.contains("id=2)"), "{message}");
    let back = drill("name = \"text\", size = { type = \"int\", default = 7 }");
    house(&store, &back)?.prepare().await?;
    let client = applied(&store, &back, Migrate::Apply).await?;
    client.shows("product", &[1.into()], &json!({"size": 10})).await?;
    client.shows("product", &[2.into()], &json!({"size": 7})).await?;
    let client = applied(&store, &lean, Migrate::Apply).await?;
    create(&client, 3, json!({"name": "c"})).await?;
    let client = applied(&store, &first, Migrate::Apply).await?;
    client.shows("product", &[3.into()], &json!({"size": 7})).await?;
    same("what is left", &left(&store, &first).await?, &Vec::new())
}

pub(super) async fn only_what_is_named_is_lost(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let lock = "[lease.lock]\nkey = { id = \"int\" }\n";
    let full = format!("{}{lock}", drill("note = \"text?\", size = \"int\""));
    let client = applied(&store, &full, Migrate::Apply).await?;
    create(&client, 1, json!({"note": "kept", "size": 3})).await?;
    let lean = drill("");
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<String>>();
    for wrong in [&["products.nota"][..], &[""], &["products"], &["products.note", "product.size"]] {
        let message = refused(house(&store, &lean)?.migrate_losing(&names(wrong)).await).await?;
        let all = ["products.note", "products.size", "locks"];
        ensure!(all.iter().all(|name| message.contains(name)), "{wrong:?}: {message}");
    }
    let before = left(&store, &full).await?;
    same("what has changed", &before, &Vec::new())?;
    house(&store, &lean)?.migrate_losing(&names(&["products.size"])).await?;
    let dropped =
        vec!["drop column products.note, with its data".to_owned(), "drop table locks, with its data".into()];
    let mut remaining = left(&store, &lean).await?;
    remaining.sort();
    same("what is kept", &remaining, &dropped)?;
    let client = applied(&store, &drill("note = \"text?\""), Migrate::Apply).await?;
    client.shows("product", &[1.into()], &json!({"note": "kept"})).await?;
    house(&store, &lean)?.migrate_losing(&names(&["locks", "products.note"])).await?;
    same("what is left", &left(&store, &lean).await?, &Vec::new())?;
    let message = refused(house(&store, &lean)?.migrate_losing(&names(&["locks"])).await).await?;
    ensure!(message.contains("nothing of the store would be lost"), "{message}");
    Ok(())
}

pub(super) async fn a_server_makes_only_reversible_changes(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let follows = |buckets: i64| {
        format!(
            "[house]\nname = \"drill\"\n[relation.follow]\nfrom = {{ a = \"int\" }}\nto = {{ b = \"int\" }}\n\
             buckets = {buckets}\n"
        )
    };
    house(&store, &follows(2))?.prepare().await?;
    let more = format!("{}[lease.lock]\nkey = {{ id = \"int\" }}\n", follows(4));
    let message = refused(house(&store, &more)?.prepare().await).await?;
    ensure!(message.contains("buckets") && message.contains("statehouse apply"), "{message}");
    same("what a refused server has changed", &left(&store, &follows(2)).await?, &Vec::new())?;
    house(&store, &more)?.migrate(Migrate::Apply).await?;
    house(&store, &more)?.prepare().await?;
    // What is no longer named stays, and is reported.
    let lean = house(&store, &follows(4))?;
    same("what a server changes", &lean.prepare().await?.len(), &0)?;
    same("what is reported", &lean.orphaned_tables().await?, &vec!["locks".to_owned()])
}

pub(super) async fn rows_that_violate_a_new_constraint_are_listed(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let free = drill("price = \"int?\", code = \"text?\"");
    let client = applied(&store, &free, Migrate::Apply).await?;
    for (id, price, code) in [(1, 5, "a-1"), (2, -3, "b-2"), (3, 900, "a-3"), (4, 10, "toolong")] {
        create(&client, id, json!({"price": price, "code": code})).await?;
    }
    create(&client, 5, json!({})).await?;
    let limited = |price: &str, code: &str| {
        drill(&format!(
            "price = {{ type = \"int?\", {price} }}, code = {{ type = \"text?\", {code} }}, extra = \"int?\""
        ))
    };
    let any = "max_length = 100";
    for (blueprint, wrong, right) in [
        (limited("min = 0", any), &[2][..], &[1, 3, 4, 5][..]),
        (limited("max = 100", any), &[3], &[1, 2, 4, 5]),
        (limited("enum = [5, 10, 900]", any), &[2], &[1, 3, 4, 5]),
        (limited("max = 1000", "max_length = 3"), &[4], &[1, 2, 3, 5]),
        (limited("min = 0", "pattern = \"a-[0-9]\""), &[2, 4], &[1, 3, 5]),
    ] {
        let changed = house(&store, &blueprint)?;
        for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
            let message = refused(changed.migrate(how).await).await?;
            let lists = |id: &i64| message.contains(&format!("id={id})"));
            ensure!(wrong.iter().all(lists) && !right.iter().any(lists), "{wrong:?}: {message}");
        }
        refused(changed.prepare().await).await?;
        same("what has changed", &left(&store, &free).await?, &Vec::new())?;
    }
    // Once the rows are right, it is taken.
    let good = limited("min = 0", any);
    let input = json!({"price": 3});
    client.done("product.patch", &[2.into()], input, Some(1)).await?;
    let client = applied(&store, &good, Migrate::Apply).await?;
    client.shows("product", &[2.into()], &json!({"price": 3})).await?;
    same("what is left", &left(&store, &good).await?, &Vec::new())?;
    // A constraint that was given up for a while is checked again.
    let client = applied(&store, &free, Migrate::Apply).await?;
    client.done("product.patch", &[1.into()], json!({"price": -1}), Some(1)).await?;
    let message = refused(house(&store, &good)?.migrate(Migrate::Apply).await).await?;
    ensure!(message.contains("id=1)"), "{message}");
    Ok(())
}

pub(super) async fn a_renamed_field_keeps_its_values(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let old = drill("note = \"text\", price = \"int?\"");
    let client = applied(&store, &old, Migrate::Apply).await?;
    create(&client, 1, json!({"note": "one", "price": 5})).await?;
    create(&client, 2, json!({"note": "two", "price": -5})).await?;
    let renamed = |limit: &str| {
        drill(&format!(
            "text = {{ type = \"text\", renamed_from = \"note\" }}, \
             cents = {{ type = \"int?\", renamed_from = \"price\"{limit} }}, extra = \"int?\""
        ))
    };
    if store.engine() == "dynamodb" {
        for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
            let message = refused(house(&store, &renamed(""))?.migrate(how).await).await?;
            ensure!(message.contains("copy the values"), "{message}");
        }
        return same("what has changed", &left(&store, &old).await?, &Vec::new());
    }
    // A constraint that comes with the new name is checked under the old one.
    let message = refused(house(&store, &renamed(", min = 0"))?.migrate(Migrate::Apply).await).await?;
    ensure!(message.contains("id=2)") && !message.contains("id=1)"), "{message}");
    // Servers with the older blueprint would fail, so a server does not do it.
    let new = renamed("");
    refused(house(&store, &new)?.prepare().await).await?;
    same("what has changed", &left(&store, &old).await?, &Vec::new())?;
    let shown = left(&store, &new).await?;
    let expected = [
        "rename column products.note to text",
        "rename column products.price to cents",
        "add column products.extra int",
    ];
    same("what is shown", &shown, &expected.map(str::to_owned).to_vec())?;
    let client = applied(&store, &new, Migrate::Apply).await?;
    client.shows("product", &[1.into()], &json!({"text": "one", "cents": 5, "extra": null})).await?;
    client.shows("product", &[2.into()], &json!({"text": "two", "cents": -5})).await?;
    create(&client, 3, json!({"text": "three"})).await?;
    same("what is left", &left(&store, &new).await?, &Vec::new())?;
    // The setting may go when it is done, and back is another rename.
    let plain = drill("text = \"text\", cents = \"int?\", extra = \"int?\"");
    same("without the setting", &left(&store, &plain).await?, &Vec::new())?;
    let back = drill("note = { type = \"text\", renamed_from = \"text\" }, cents = \"int?\"");
    let client = applied(&store, &back, Migrate::ApplyWithLoss).await?;
    client.shows("product", &[3.into()], &json!({"note": "three", "cents": null})).await
}

pub(super) async fn a_renamed_resource_keeps_its_table(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let client = applied(&store, &drill("note = \"text?\""), Migrate::Apply).await?;
    create(&client, 1, json!({"note": "kept"})).await?;
    let renamed =
        drill("note = \"text?\"").replace("[entity.product]", "[entity.article]\ntable = \"products\"");
    same("what is left", &left(&store, &renamed).await?, &Vec::new())?;
    house(&store, &renamed)?.prepare().await?;
    let client = applied(&store, &renamed, Migrate::Apply).await?;
    client.shows("article", &[1.into()], &json!({"note": "kept"})).await?;
    client.done("article.patch", &[1.into()], json!({"note": "new"}), Some(1)).await.map(drop)
}
