//! What `engine::limits` lets pass is made, filled and read on the engine it was asked about.

use std::sync::Arc;

use anyhow::{Context, Result};
use statehouse::engine::{Engine, limits};
use statehouse_store::{Step, Table, Type, Value};

use super::blueprint;
use crate::conformance::{Case, cases};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{StoreClient, same};

pub(crate) const CASES: &[Case] = cases! {
    blueprint {
        schemas_that_pass_the_limits_are_carried(2),
    }
};

/// Schemas at the edges of what some engine carries. They share no table, so that each is made anew.
fn odd_schemas() -> Result<Vec<Vec<Arc<Table>>>> {
    let plain = |name: &str| Table::named(name).partition("id", Type::Int).optional("n", Type::Int);
    let indexed = |name: &str| plain(name).index("by_n", &[], &["n"]);
    let mut schemas = vec![
        vec![plain("sqlite_things").build()?],
        vec![plain("owned").optional("ctid", Type::Int).build()?],
        vec![plain("primary").build()?, plain("primary_pkey").build()?],
        vec![indexed("single").build()?, plain("single_by_n_idx").build()?],
        vec![indexed("double").build()?, plain("double__by_n").build()?],
    ];
    for parts in [31, 32] {
        let table = Table::named(format!("keyed_{parts}"));
        let parts = (0..parts).map(|number| format!("k{number}"));
        schemas.push(vec![parts.fold(table, |table, part| table.partition(&part, Type::Int)).build()?]);
    }
    for indexes in [20, 21] {
        let table = plain(&format!("indexed_{indexes}"));
        let names = (0..indexes).map(|number| format!("by_{number}"));
        schemas.push(vec![names.fold(table, |table, name| table.index(&name, &[], &["n"])).build()?]);
    }
    // The widest of each engine, and a little more: columns, their type, and how long their names are.
    for (columns, kind, length) in [
        (1_997, Type::Bool, 1),
        (1_998, Type::Bool, 1),
        (1_597, Type::Bool, 1),
        (1_598, Type::Bool, 1),
        (980, Type::Int, 1),
        (258, Type::Text, 1),
        (262, Type::Text, 1),
        (260, Type::Int, 1),
        (70, Type::Text, 40),
        (80, Type::Text, 40),
    ] {
        let table = Table::named(format!("wide_{columns}")).partition("id", Type::Int);
        let names = (0..columns).map(|number| format!("{}{number}", "c".repeat(length)));
        schemas.push(vec![names.fold(table, |table, name| table.optional(&name, kind)).build()?]);
    }
    Ok(schemas)
}

/// A value of a type; text as long as what a page may have to hold.
fn filling(kind: Type, number: usize) -> Value {
    let int = i64::try_from(number).unwrap_or(0);
    match kind {
        Type::Bool => number.is_multiple_of(2).into(),
        Type::Text => format!("{number:<23}").into(),
        _ => int.into(),
    }
}

async fn schemas_that_pass_the_limits_are_carried(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let engine = Engine::named(store.engine()).with_context(|| format!("no engine {}", store.engine()))?;
    let client = StoreClient::of(store.clone(), "acme")?;
    for (number, tables) in odd_schemas()?.into_iter().enumerate() {
        let listed: Vec<&Table> = tables.iter().map(|table| &**table).collect();
        if !limits::obstacles(&listed, engine).is_empty() {
            continue;
        }
        let what = || format!("schema {number}, of {} with {} columns", tables[0], tables[0].columns().len());
        let schema = statehouse_store::Schema::new(tables.iter().cloned())?;
        store.migrate(&schema, statehouse_store::Migrate::Apply).await.with_context(what)?;
        for table in &tables {
            let key: Vec<Value> = (1..).take(table.key_len()).map(|part: i64| part.into()).collect();
            let step = table
                .other_columns()
                .iter()
                .zip(0..)
                .fold(Step::insert(table, key.iter().cloned()), |step, (column, place)| {
                    step.set(&column.name, filling(column.kind, place))
                });
            client.apply(client.noted("thing", "1", "thing.made").step(step)).await.with_context(what)?;
            let row = client.row(table, key).await.with_context(what)?;
            let expected: Vec<Value> = table
                .other_columns()
                .iter()
                .zip(0..)
                .map(|(column, place)| filling(column.kind, place))
                .collect();
            same(&what(), &row.values()[table.key_len()..].to_vec(), &expected)?;
        }
    }
    Ok(())
}
