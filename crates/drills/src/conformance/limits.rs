//! The limits, at the number and one above it: what fits is stored and read back, what does not is refused whole.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use statehouse_store::guard::{column, is_in};
use statehouse_store::limits::{
    GUARD_LEAVES_MAX, IN_VALUES_MAX, LOG_ENTRY_OPERATIONS, NAME_BYTES_MAX, PARTITION_KEY_BYTES_MAX,
    PLAN_BYTES_MAX, PLAN_OPERATIONS_MAX, ROW_BYTES_MAX, SORT_KEY_BYTES_MAX, TENANT_BYTES_MAX, check_record,
    row_weight,
};
use statehouse_store::plan::PlanBuilder;
use statehouse_store::table::NAME_MAX;
use statehouse_store::{
    Entry, Event, EventTemplate, Guard, Plan, PlanError, Query, Reason, Row, Step, StoreError, Table, Tenant,
    Type, Value,
};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{counters, of_every_type};
use crate::harness::store_client::{StoreClient, fails, keys_of, same};

/// Requires that a plan is refused when it is built, for its size.
fn too_large(about: &str, plan: PlanBuilder) -> Result<()> {
    match plan.build() {
        Err(PlanError::Limit { limit, actual, .. }) if actual > limit => Ok(()),
        Err(other) => bail!("{about}: expected a limit to be named, got {other}"),
        Ok(_) => bail!("{about}: the plan was built, though it is over a limit"),
    }
}

/// Requires that a plan which could be built is refused for its size when it is committed.
async fn exceeds(client: &StoreClient, about: &str, plan: PlanBuilder) -> Result<()> {
    let limit = |error: &StoreError| matches!(error, StoreError::LimitExceeded { limit, actual, .. } if actual > limit);
    fails(about, client.store.commit(&plan.build()?).await, limit)
}

/// A table of two long texts.
fn texts(name: &str) -> Result<Arc<Table>> {
    Ok(Table::named(name)
        .partition("id", Type::Int)
        .optional("a", Type::Text)
        .optional("b", Type::Text)
        .build()?)
}

/// How long `a` may be in a row of `texts`, alone.
fn longest_text(client: &StoreClient, table: &Arc<Table>) -> usize {
    let values = vec![Value::Int(0), "".into(), Value::Null];
    ROW_BYTES_MAX - row_weight(&Row::new(table.clone(), client.tenant.clone(), values, 1))
}

/// Text of this many bytes that does not look the same everywhere.
fn text_of(bytes: usize) -> String {
    (0..bytes).map(|index| char::from(b'a' + (index % 23) as u8)).collect()
}

pub(super) async fn a_hundred_operations(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("hundreds")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let inserts = |from: usize, count: usize| {
        (from..from + count)
            .map(|n| Step::insert(&table, [n.to_string().into()]).set("n", n as i64))
            .collect::<Vec<_>>()
    };
    let max = PLAN_OPERATIONS_MAX;
    too_large("101 steps", client.plan().steps(inserts(0, max + 1)))?;
    let beside = max - LOG_ENTRY_OPERATIONS;
    too_large("99 steps and an entry", client.noted("many", "x", "made").steps(inserts(0, beside + 1)))?;
    client.apply(client.plan().steps(inserts(0, max))).await?;
    let applied = client.apply(client.noted("many", "x", "made").steps(inserts(max, beside))).await?;
    same("the rows of the outcome", &applied.rows.len(), &beside)?;
    for n in [0, max - 1, max, max + beside - 1] {
        same("a row", &client.row(&table, [n.to_string().into()]).await?.int("n"), &Some(n as i64))?;
    }
    // The last of a hundred is refused, and so are all.
    let mut steps = inserts(1_000, max - 1);
    steps.push(Step::update(&table, ["nobody".into()]));
    client.refuse_as(client.plan().steps(steps), max - 1, &Reason::Absent).await?;
    same("the first of a refused hundred", &client.find(&table, ["1000".into()]).await?, &None)?;
    let asserts =
        (0..max).map(|n| Step::assert(&table, [n.to_string().into()]).guard(column("n").eq(n as i64)));
    client.apply(client.plan().steps(asserts)).await?;
    let deletes = (0..max).map(|n| Step::delete(&table, [n.to_string().into()]));
    client.apply(client.plan().steps(deletes)).await?;
    same("a deleted row", &client.find(&table, ["0".into()]).await?, &None)
}

pub(super) async fn a_row_of_the_largest_size(namespace: &dyn TestNamespace) -> Result<()> {
    let table = texts("bulky")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let length = longest_text(&client, &table);
    let insert = |length: usize| client.one(Step::insert(&table, [1.into()]).set("a", text_of(length)));
    too_large("a row one byte too large", insert(length + 1))?;
    client.apply(insert(length)).await?;
    ensure!(
        client.row(&table, [1.into()]).await?.text("a") == Some(text_of(length).as_str()),
        "the largest row does not read back"
    );
    let query = Query::table(&table, &client.tenant, [1.into()])?;
    same("a query for it", &client.rows(query).await?.len(), &1)?;
    // Over the row that is there nothing more fits, not even a byte.
    exceeds(&client, "one more byte", client.one(Step::update(&table, [1.into()]).set("b", "x"))).await?;
    let row = client.row(&table, [1.into()]).await?;
    same("version and second column", &(row.version(), row.text("b")), &(1, None))?;
    let shift = Step::update(&table, [1.into()]).set("a", Value::Null).set("b", column("a"));
    client.apply(client.one(shift)).await.context("the text moves, and the row weighs the same").map(drop)
}

pub(super) async fn a_row_must_not_grow_over_the_limit(namespace: &dyn TestNamespace) -> Result<()> {
    let table = texts("growing")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let insert = |key: i64| Step::insert(&table, [key.into()]).set("a", text_of(250_000));
    client.apply(client.plan().step(insert(1)).step(insert(2))).await?;
    let cases = [
        ("a constant", Step::update(&table, [1.into()]).set("b", text_of(250_000))),
        ("an upsert", Step::upsert(&table, [1.into()]).set("b", text_of(250_000))),
        ("a copy", Step::update(&table, [1.into()]).set("b", column("a"))),
    ];
    for (about, step) in cases {
        // Whatever else the plan does is not done either, and no record is left.
        let others = [Step::update(&table, [2.into()]).set("b", "changed"), Step::insert(&table, [3.into()])];
        exceeds(&client, about, client.noted("growth", "x", "grown").steps(others).step(step)).await?;
    }
    let untouched = client.row(&table, [2.into()]).await?;
    same("version and second column", &(untouched.version(), untouched.text("b")), &(1, None))?;
    same("a row of a plan that was too large", &client.find(&table, [3.into()]).await?, &None)?;
    client.apply(client.noted("growth", "x", "noted")).await?;
    same("the log", &client.exact_log(1).await?[0].events[0].name.as_str(), &"noted")
}

pub(super) async fn keys_of_the_largest_size(namespace: &dyn TestNamespace) -> Result<()> {
    let text = Table::named("long_text")
        .partition("part", Type::Text)
        .sort("rank", Type::Text)
        .sort("last", Type::Text)
        .build()?;
    let bytes =
        Table::named("long_bytes").partition("part", Type::Bytes).sort("rank", Type::Bytes).build()?;
    let client = StoreClient::open(namespace, &[&text, &bytes]).await?;
    // Each part has a byte of its own around it, and the tenant counts as well.
    let part_max = PARTITION_KEY_BYTES_MAX - client.tenant.as_str().len() - 1;
    let sort_max = SORT_KEY_BYTES_MAX - 2;
    let key = |part: usize, rank: usize, last: usize| {
        [text_of(part).into(), text_of(rank).into(), text_of(last).into()].to_vec()
    };
    too_large("a long partition", client.one(Step::insert(&text, key(part_max + 1, 1, 1))))?;
    too_large("a long sort key", client.one(Step::insert(&text, key(1, sort_max, 1))))?;
    too_large("a long second sort column", client.one(Step::insert(&text, key(1, 0, sort_max + 1))))?;
    let keys = [key(part_max, 0, sort_max), key(part_max, 1, sort_max - 1), key(part_max, sort_max, 0)];
    for key in &keys {
        client.apply(client.one(Step::insert(&text, key.clone()))).await?;
    }
    let query = Query::table(&text, &client.tenant, [keys[0][0].clone()])?.limit(1)?;
    same("the longest keys", &keys_of(&client.rows(query).await?), &keys.to_vec())?;
    // Octets count double. All are 0xff, the highest there is.
    let octets = |part: usize, rank: usize| [vec![0xff_u8; part].into(), vec![0xff_u8; rank].into()].to_vec();
    let (part_max, sort_max) = (part_max / 2, (SORT_KEY_BYTES_MAX - 1) / 2);
    too_large("long octets", client.one(Step::insert(&bytes, octets(part_max + 1, 1))))?;
    too_large("long sorted octets", client.one(Step::insert(&bytes, octets(1, sort_max + 1))))?;
    let keys = [octets(part_max, sort_max - 1), octets(part_max, sort_max)];
    for key in &keys {
        client.apply(client.one(Step::insert(&bytes, key.clone()))).await?;
    }
    let query = Query::table(&bytes, &client.tenant, [keys[0][0].clone()])?.from(keys[0][1].clone())?;
    same("the longest octets", &keys_of(&client.rows(query).await?), &keys.to_vec())
}

pub(super) async fn index_entries_of_the_largest_size(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("long_index")
        .partition("id", Type::Text)
        .optional("group", Type::Text)
        .optional("rank", Type::Text)
        .optional("copy", Type::Text)
        .optional("shard", Type::Text)
        .index("by_rank", &["group"], &["rank"])
        .global_index("ranked", &["shard"], &["rank"])
        .build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    // The sort part of an entry is the column and the row's key: "id" weighs 3 with its separator, the column 1 more.
    let sort_max = SORT_KEY_BYTES_MAX - 3 - 1;
    let group_max = PARTITION_KEY_BYTES_MAX - client.tenant.as_str().len() - 1;
    let insert = |group: usize, rank: usize| {
        client
            .one(Step::insert(&table, ["id".into()]).set("group", text_of(group)).set("rank", text_of(rank)))
    };
    too_large("a long sort part", insert(1, sort_max + 1))?;
    too_large("a long partition part", insert(group_max + 1, 1))?;
    client.apply(insert(group_max, sort_max)).await?;
    let query = Query::index(&table, "by_rank", &client.tenant, [text_of(group_max).into()])?;
    client.eventually(&query, |rows| same("the largest entry", &rows.len(), &1)).await?;
    // Across tenants the tenant is no part of the partition, but of what orders the rows.
    let shared_max = sort_max - client.tenant.as_str().len() - 1;
    let spread = |shard: usize, rank: usize| {
        let step = Step::insert(&table, ["ed".into()]).set("rank", text_of(rank));
        client.one(step.set("shard", text_of(shard)))
    };
    too_large("a long sort part across tenants", spread(1, shared_max + 1))?;
    too_large("a long partition part across tenants", spread(PARTITION_KEY_BYTES_MAX, 1))?;
    client.apply(spread(PARTITION_KEY_BYTES_MAX - 1, shared_max)).await?;
    let query = Query::all_tenants(&table, "ranked", [text_of(PARTITION_KEY_BYTES_MAX - 1).into()])?;
    client.eventually(&query, |rows| same("the largest entry across tenants", &rows.len(), &1)).await?;
    // What the row will be is known only at the commit here: a copy, and an entry that the other column completes.
    let long = Step::update(&table, ["id".into()]).set("copy", text_of(sort_max + 1));
    client.apply(client.one(long)).await?;
    let grow = Step::update(&table, ["id".into()]).set("rank", column("copy"));
    exceeds(&client, "a copied sort part", client.one(grow.clone())).await?;
    let unset = Step::update(&table, ["id".into()]).set("group", Value::Null);
    client.apply(client.one(unset)).await?;
    client.apply(client.one(grow)).await.context("outside of the index the column may be longer")?;
    let complete = Step::update(&table, ["id".into()]).set("group", "g");
    exceeds(&client, "an entry that would be too large", client.one(complete)).await
}

pub(super) async fn a_plan_of_the_largest_size(namespace: &dyn TestNamespace) -> Result<()> {
    let table = texts("loads")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let length = longest_text(&client, &table);
    let inserts = |count: i64| {
        (0..count).map(|key| Step::insert(&table, [key.into()]).set("a", text_of(length))).collect::<Vec<_>>()
    };
    let fitting = (PLAN_BYTES_MAX / ROW_BYTES_MAX) as i64;
    too_large("one row too many", client.plan().steps(inserts(fitting + 1)))?;
    too_large("an entry too many", client.noted("load", "x", "made").steps(inserts(fitting)))?;
    client.apply(client.plan().steps(inserts(fitting)).without_rows()).await?;
    for key in 0..fitting {
        let length_read = client.row(&table, [key.into()]).await?.text("a").map(str::len);
        same("a large row", &length_read, &Some(length))?;
    }
    Ok(())
}

pub(super) async fn a_plan_must_not_grow_over_the_limit(namespace: &dyn TestNamespace) -> Result<()> {
    let table = texts("freights")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let count = (PLAN_BYTES_MAX / ROW_BYTES_MAX) as i64 + 1;
    for key in 0..count {
        client.apply(client.one(Step::insert(&table, [key.into()]).set("a", text_of(200_000)))).await?;
    }
    // Each row fits, and what the plan itself holds does; the rows that it would write do not.
    let updates = (0..count).map(|key| Step::update(&table, [key.into()]).set("b", text_of(190_000)));
    exceeds(&client, "a plan that grows", client.plan().steps(updates)).await?;
    for key in 0..count {
        same("a row of that plan", &client.row(&table, [key.into()]).await?.version(), &1)?;
    }
    Ok(())
}

pub(super) async fn a_record_of_the_largest_size(namespace: &dyn TestNamespace) -> Result<()> {
    let table = texts("tomes")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let empty = [Event { name: "told".into(), data: json!({"text": ""}), actor: None }];
    let length = ROW_BYTES_MAX - check_record("op", &empty)?;
    let told = |length: usize| {
        client
            .plan()
            .log(Entry::about("tome", "x").event(EventTemplate::named("told").with("text", text_of(length))))
    };
    too_large("a record one byte too large", told(length + 1))?;
    client.apply(told(length)).await?;
    let log = client.exact_log(1).await?;
    ensure!(
        log[0].events[0].data["text"].as_str() == Some(text_of(length).as_str()),
        "the largest record does not read back"
    );
    // A row that an event takes in counts where it is put, which only the commit knows.
    client.apply(client.one(Step::insert(&table, [1.into()]).set("a", text_of(300_000)))).await?;
    let entry = Entry::about("tome", "x")
        .event(EventTemplate::named("told").with("text", text_of(200_000)).with_row_of(0));
    let plan = client.plan().step(Step::update(&table, [1.into()]).set("b", "changed")).log(entry);
    exceeds(&client, "a record that takes in a row", plan).await?;
    same("the row", &client.row(&table, [1.into()]).await?.text("b"), &None)?;
    client.exact_log(1).await?;
    Ok(())
}

pub(super) async fn lists_and_guards_of_the_largest_size(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("longest").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let last = IN_VALUES_MAX as i64 - 1;
    client.apply(client.one(Step::insert(&table, [1.into()]).set("int", last))).await?;
    let update = |guard: Guard| client.one(Step::update(&table, [1.into()]).guard(guard));
    too_large("a list of 101", update(is_in("int", 0..=last + 1)))?;
    client.apply(update(is_in("int", 0..=last))).await?;
    client.refuse(update(is_in("int", 0..=last).negated())).await?;
    client.refuse(update(is_in("int", last + 1..=2 * last + 1))).await?;
    client.apply(update(is_in("int", last + 1..=2 * last + 1).negated())).await?;
    let leaves = |count: usize| (0..count).map(|n| column("int").ne(n as i64 + 1_000)).collect::<Vec<_>>();
    too_large("a guard of 51 leaves", update(Guard::All(leaves(GUARD_LEAVES_MAX + 1))))?;
    client.apply(update(Guard::All(leaves(GUARD_LEAVES_MAX)))).await?;
    let mut one_fails = leaves(GUARD_LEAVES_MAX - 1);
    one_fails.push(column("int").eq(-1));
    client.refuse(update(Guard::All(one_fails.clone()))).await?;
    client.apply(update(Guard::Any(one_fails))).await?;
    Ok(())
}

pub(super) async fn names_of_the_largest_size(namespace: &dyn TestNamespace) -> Result<()> {
    let name = |first: &str| format!("{first}{}", "x".repeat(NAME_MAX - first.len()));
    let table = Table::named(name("t"))
        .partition(&name("p"), Type::Text)
        .sort(&name("s"), Type::Int)
        .optional(&name("a"), Type::Int)
        .optional(&name("b"), Type::Text)
        .index(&name("i"), &[&name("b")], &[&name("a")])
        .index(&name("j"), &[], &[&name("a")])
        .build()?;
    // Names that share all but their last letters, which an engine could cut off.
    let twin =
        Table::named(format!("{}y", &table.name()[..NAME_MAX - 1])).partition("id", Type::Int).build()?;
    let client = StoreClient::open(namespace, &[&table, &twin]).await?;
    let tenant = "T".repeat(TENANT_BYTES_MAX);
    ensure!(Tenant::new(format!("{tenant}T")).is_err(), "a tenant of 65 letters was accepted");
    let client = client.for_tenant(&tenant)?;
    let long = text_of(NAME_BYTES_MAX);
    let plan = |name: &str, event: &str| {
        let step = Step::insert(&table, ["p".into(), 1.into()]);
        let step = step.set(&name_of(&table, 2), 5).set(&name_of(&table, 3), "b");
        let entry =
            Entry::about(name, name).fingerprint(name).event(EventTemplate::named(event).with_row_of(0));
        Plan::of(&client.tenant, name).step(step).log(entry)
    };
    let over = text_of(NAME_BYTES_MAX + 1);
    too_large("an operation id of 257 bytes", plan(&over, "made"))?;
    too_large("an event's name of 257 bytes", plan("op", &over))?;
    client.apply(plan(&long, &long)).await?;
    let log = client.exact_log(1).await?;
    let record = &log[0];
    let names =
        [&record.operation, &record.resource, &record.key, &record.fingerprint, &record.events[0].name];
    ensure!(names.iter().all(|name| **name == long), "a name of 256 bytes became {record:?}");
    client.apply(client.one(Step::insert(&twin, [1.into()]))).await?;
    for (index, partition) in [(name("i"), vec!["b".into()]), (name("j"), vec![])] {
        let query = Query::index(&table, &index, &client.tenant, partition)?;
        client.eventually(&query, |rows| same("an index with a long name", &rows.len(), &1)).await?;
    }
    Ok(())
}

fn name_of(table: &Table, index: usize) -> String {
    table.columns()[index].name.clone()
}

pub(super) async fn many_columns(namespace: &dyn TestNamespace) -> Result<()> {
    let names: Vec<String> = (0..120).map(|number| format!("c{number}")).collect();
    let start = Table::named("wide").partition("id", Type::Int);
    let table = names.iter().fold(start, |table, name| table.optional(name, Type::Int)).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let set = |step: Step| names.iter().zip(0..).fold(step, |step, (name, number)| step.set(name, number));
    client.apply(client.one(set(Step::insert(&table, [1.into()])))).await?;
    let shifted = names.iter().zip(names.iter().cycle().skip(1));
    let update =
        shifted.fold(Step::update(&table, [1.into()]), |step, (name, next)| step.set(name, column(next)));
    client.apply(client.one(update)).await?;
    let row = client.row(&table, [1.into()]).await?;
    let numbers: Vec<Option<i64>> = names.iter().map(|name| row.int(name)).collect();
    let expected: Vec<Option<i64>> = (1..120).chain(std::iter::once(0)).map(Some).collect();
    same("120 columns, each with its neighbour's content", &numbers, &expected)
}

pub(super) async fn json_of_the_greatest_depth(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("nested").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let nested = |depth: usize| {
        (0..depth).fold(
            json!("core"),
            |inner, level| if level % 2 == 0 { json!([inner]) } else { json!({"in": inner}) },
        )
    };
    let insert = |depth: usize| {
        let entry = Entry::about("nest", "x")
            .event(EventTemplate::named("made").with("own", nested(depth - 1)).with_row_of(0));
        client.plan().step(Step::insert(&table, [1.into()]).set("json", nested(depth))).log(entry)
    };
    ensure!(insert(Value::JSON_DEPTH_MAX + 1).build().is_err(), "JSON of 65 levels was accepted");
    let deepest = nested(Value::JSON_DEPTH_MAX);
    client.apply(insert(Value::JSON_DEPTH_MAX)).await?;
    same("the row", &client.row(&table, [1.into()]).await?.json("json"), &Some(&deepest))?;
    same("the record", &client.exact_log(1).await?[0].events[0].data["row"]["json"], &deepest)
}
