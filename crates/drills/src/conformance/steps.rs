//! What one step does: every verb on a row that is there and on one that is not, every expression, defaults, versions.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse_store::guard::{column, now, now_minus, now_plus};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Column, Expr, Guard, ManualClock, Operand, Reason, Step, Table, Time, Type, Value};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{counters, ladder, longest_ladder, of_every_type, other, sample};
use crate::harness::store_client::{StoreClient, same};

/// What is there when a step comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Situation {
    Absent,
    GuardHolds,
    GuardFails,
}

/// What the contract says about a step of this kind in this situation; `None` if it is applied.
fn expected_refusal(expect: Expect, situation: Situation, guard: &Guard) -> Option<Reason> {
    let guard_reason = || Reason::Guard { conjunct: 0, guard: Box::new(guard.clone()) };
    match (expect, situation) {
        (Expect::Present, Situation::Absent) => Some(Reason::Absent),
        (Expect::Absent, Situation::GuardHolds | Situation::GuardFails) => Some(Reason::Present),
        (Expect::Present | Expect::Either, Situation::GuardFails) => Some(guard_reason()),
        _ => None,
    }
}

pub(super) async fn every_verb_and_expectation_on_present_and_absent_rows(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("verbs")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for verb in [Verb::Put, Verb::Delete, Verb::Assert] {
        for expect in [Expect::Absent, Expect::Present, Expect::Either] {
            for situation in [Situation::Absent, Situation::GuardHolds, Situation::GuardFails] {
                verb_case(&client, &table, verb, expect, situation)
                    .await
                    .with_context(|| format!("{verb:?}, expecting {expect:?}, {situation:?}"))?;
            }
        }
    }
    Ok(())
}

async fn verb_case(
    client: &StoreClient,
    table: &Arc<Table>,
    verb: Verb,
    expect: Expect,
    situation: Situation,
) -> Result<()> {
    let key: Value = format!("{verb:?} {expect:?} {situation:?}").into();
    if situation != Situation::Absent {
        let content = if situation == Situation::GuardHolds { 1 } else { 2 };
        client.apply(client.one(Step::insert(table, [key.clone()]).set("n", content))).await?;
    }
    let before = client.find(table, [key.clone()]).await?;
    let mut step = Step { verb, expect, ..Step::assert(table, [key.clone()]) };
    let guard = column("n").eq(1);
    if expect != Expect::Absent {
        step = step.guard(guard.clone());
    }
    if verb == Verb::Put {
        step = step.set("n", 7);
    }
    let refusal = expected_refusal(expect, situation, &guard);
    if let Some(reason) = &refusal {
        client.refuse_as(client.one(step), 0, reason).await?;
        return same("a row whose step was refused", &client.find(table, [key]).await?, &before);
    }
    let applied = client.apply(client.one(step)).await?;
    let after = client.find(table, [key]).await?;
    same("the rows in the outcome", &applied.rows, &vec![after.clone()])?;
    match verb {
        Verb::Assert => same("a row that was only looked at", &after, &before),
        Verb::Delete => same("a deleted row", &after, &None),
        Verb::Put => {
            let row = after.context("the put left no row")?;
            same("what was put", &row.int("n"), &Some(7))?;
            same("its version", &row.version(), &before.map_or(1, |before| before.version() + 1))
        }
    }
}

pub(super) async fn every_value_of_every_type_reads_back(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("values").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for place in 0..longest_ladder() {
        let key = [Value::from(place as i64)];
        let mut step = Step::insert(&table, key.clone());
        for kind in Type::ALL {
            step = step.set(kind.name(), sample(kind, place));
        }
        let applied = client.apply(client.one(step)).await?;
        let row = client.row(&table, key).await?;
        for kind in Type::ALL {
            same(kind.name(), &row.get(kind.name()), &Some(&sample(kind, place)))?;
            same("a column that was not set", &row.get(&other(kind)), &Some(&Value::Null))?;
        }
        same("the row in the outcome", &applied.rows, &vec![Some(row)])?;
    }
    Ok(())
}

pub(super) async fn every_value_can_stand_in_a_key(namespace: &dyn TestNamespace) -> Result<()> {
    for kind in Type::ALL.into_iter().filter(|kind| kind.is_ordered()) {
        let table = Table::named(format!("keyed_by_{kind}"))
            .partition("part", kind)
            .sort("rank", kind)
            .required("place", Type::Int)
            .build()?;
        let client = StoreClient::open(namespace, &[&table]).await?;
        let ladder = ladder(kind);
        for (place, value) in ladder.iter().enumerate() {
            let step = Step::insert(&table, [value.clone(), value.clone()]).set("place", place as i64);
            client.apply(client.one(step)).await?;
        }
        for (place, value) in ladder.iter().enumerate() {
            let row = client.row(&table, [value.clone(), value.clone()]).await?;
            same("the key", &row.key(), &[value.clone(), value.clone()].as_slice())?;
            same("the row behind the key", &row.int("place"), &Some(place as i64))?;
        }
    }
    Ok(())
}

pub(super) async fn values_are_stored_in_one_form(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("forms")
        .partition("id", Type::Float)
        .optional("float", Type::Float)
        .optional("json", Type::Json)
        .build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    // An int widens to a float, negative zero is zero, JSON's whole floats are integers, and its null is null.
    let step =
        Step::insert(&table, [Value::Float(-0.0)]).set("float", 3).set("json", json!({"a": 1.0, "b": -0.0}));
    client.apply(client.one(step)).await?;
    let row = client.row(&table, [0.into()]).await?;
    same("a widened int", &row.get("float"), &Some(&Value::Float(3.0)))?;
    same("canonical JSON", &row.json("json"), &Some(&json!({"a": 1, "b": 0})))?;
    let step = Step::update(&table, [0.into()]).set("json", json!(null)).set("float", -0.0);
    client.apply(client.one(step)).await?;
    let row = client.row(&table, [Value::Float(0.0)]).await?;
    same("JSON's null", &row.get("json"), &Some(&Value::Null))?;
    let bits = row.float("float").map(f64::to_bits);
    same("negative zero", &bits, &Some(0.0_f64.to_bits()))
}

pub(super) async fn columns_can_be_copied(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("copies").optional("seen", Type::Int).optional("own_id", Type::Int).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let mut insert = Step::insert(&table, [5.into()]);
    let mut copy =
        Step::update(&table, [5.into()]).set("seen", column("version")).set("own_id", column("id"));
    for kind in Type::ALL {
        insert = insert.set(kind.name(), sample(kind, 3));
        copy = copy.set(&other(kind), column(kind.name()));
    }
    client.apply(client.one(insert)).await?;
    client.apply(client.one(copy)).await?;
    let row = client.row(&table, [5.into()]).await?;
    for kind in Type::ALL {
        same(kind.name(), &row.get(&other(kind)), &Some(&sample(kind, 3)))?;
    }
    same("the version as it was before the step", &row.int("seen"), &Some(1))?;
    same("the key", &row.int("own_id"), &Some(5))
}

pub(super) async fn assignments_read_the_row_as_it_was(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("swaps").optional("sum", Type::Int).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let insert = Step::insert(&table, [1.into()]).set("int", 3).set("other_int", 40);
    client.apply(client.one(insert)).await?;
    let swap = Step::update(&table, [1.into()])
        .set("int", column("other_int"))
        .set("other_int", column("int"))
        .set("sum", column("int").subtract(column("other_int")));
    client.apply(client.one(swap)).await?;
    let row = client.row(&table, [1.into()]).await?;
    same(
        "swapped, and the difference of before",
        &(row.int("int"), row.int("other_int"), row.int("sum")),
        &(Some(40), Some(3), Some(-37)),
    )
}

/// Commits one assignment to a row that was prepared with others, and returns the row.
async fn computed(
    client: &StoreClient,
    table: &Arc<Table>,
    before: &[(&str, Value)],
    set: (&str, Expr),
) -> Result<Value> {
    let key = [Value::from(1)];
    client.apply(client.one(Step::remove(table, key.clone()))).await?;
    let insert = before
        .iter()
        .fold(Step::insert(table, key.clone()), |step, (name, value)| step.set(name, value.clone()));
    client.apply(client.one(insert)).await?;
    let (target, expr) = set;
    client.apply(client.one(Step::update(table, key.clone()).set(target, expr))).await?;
    let row = client.row(table, key).await?;
    Ok(row.get(target).cloned().unwrap_or(Value::Null))
}

pub(super) async fn sums_and_differences(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("sums").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let before: [(&str, Value); 5] = [
        ("int", 5.into()),
        ("other_int", (-7).into()),
        ("float", 0.1.into()),
        ("other_float", 0.2.into()),
        ("time", Time::from_micros(1_000).into()),
    ];
    let constant = |value: Value| Operand::Value(value);
    let cases: Vec<(&str, Expr, Value)> = vec![
        ("int", column("int").add(1), 6.into()),
        ("int", column("int").add(column("other_int")), (-2).into()),
        ("int", column("int").subtract(column("other_int")), 12.into()),
        ("other_int", column("int").add(column("int")), 10.into()),
        ("int", constant(100.into()).subtract(column("int")), 95.into()),
        ("int", column("version").add(41), 42.into()),
        ("int", column("int").add(i64::MAX - 5), i64::MAX.into()),
        ("int", column("other_int").subtract(i64::MAX - 6), (-i64::MAX - 1).into()),
        // Floats are added as the machine adds them, to the last bit.
        ("float", column("float").add(column("other_float")), (0.1 + 0.2).into()),
        ("float", column("float").subtract(column("other_float")), (0.1 - 0.2).into()),
        ("float", column("float").subtract(column("float")), 0.0.into()),
        ("float", column("float").add(1), 1.1.into()),
        ("float", column("float").add(1e100), 1e100.into()),
        ("time", column("time").add(-1_001), Time::from_micros(-1).into()),
        ("time", column("time").subtract(column("int")), Time::from_micros(995).into()),
        ("other_time", column("time").add(column("int")), Time::from_micros(1_005).into()),
    ];
    for (target, expr, expected) in cases {
        let about = format!("{target} = {expr}");
        let got = computed(&client, &table, &before, (target, expr)).await?;
        same(&about, &got, &expected)?;
    }
    Ok(())
}

pub(super) async fn null_makes_a_sum_null(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("voids").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let before: [(&str, Value); 3] =
        [("int", 5.into()), ("float", 0.5.into()), ("time", Time::from_micros(9).into())];
    let cases = [
        ("int", column("int").add(column("other_int"))),
        ("int", column("other_int").subtract(column("int"))),
        ("int", Expr::from(column("other_int"))),
        ("float", column("other_float").add(1.5)),
        ("float", column("float").subtract(column("other_float"))),
        ("time", column("other_time").add(column("int"))),
        ("time", column("time").subtract(column("other_int"))),
        // Where null takes part, nothing can overflow.
        ("int", column("other_int").add(i64::MAX)),
    ];
    for (target, expr) in cases {
        let about = format!("{target} = {expr}");
        same(&about, &computed(&client, &table, &before, (target, expr)).await?, &Value::Null)?;
    }
    let or_zero = Operand::Coalesce("other_int".into(), 0.into());
    let got = computed(&client, &table, &before, ("other_int", or_zero.add(column("int")))).await?;
    same("a sum with a stand-in for null", &got, &5.into())
}

pub(super) async fn results_out_of_range_are_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("overflows").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let insert = Step::insert(&table, [1.into()])
        .set("int", i64::MAX)
        .set("other_int", i64::MIN)
        .set("float", 9.9e125)
        .set("other_float", 1.5e-130)
        .set("time", Time::MAX)
        .set("other_time", Time::MIN);
    client.apply(client.one(insert)).await?;
    let before = client.row(&table, [1.into()]).await?;
    let cases = [
        ("int", column("int").add(1)),
        ("int", column("int").subtract(-1)),
        ("other_int", column("other_int").subtract(1)),
        ("int", Operand::from(0).subtract(column("other_int"))),
        ("float", column("float").add(9.9e125)),
        ("float", Operand::from(-9.9e125).subtract(column("float"))),
        // Too near to zero is out of range as well.
        ("other_float", column("other_float").subtract(1e-130)),
        ("time", column("time").add(1)),
        ("time", column("time").add(i64::MAX)),
        ("time", column("time").subtract(column("other_int"))),
        ("other_time", column("other_time").subtract(1)),
        ("other_time", column("other_time").add(column("other_int"))),
    ];
    for (target, expr) in cases {
        let step = Step::update(&table, [1.into()]).set("text", "written").set(target, expr);
        client.refuse_as(client.one(step), 0, &Reason::Overflow { column: target.into() }).await?;
    }
    same("a row that was only refused", &client.row(&table, [1.into()]).await?, &before)
}

pub(super) async fn required_columns_refuse_null_at_commit(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("demands")
        .partition("id", Type::Int)
        .required("must", Type::Int)
        .optional("may", Type::Int)
        .build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let null = Reason::Null { column: "must".into() };
    // In a new row all columns are null before the step.
    let absent = || Step::upsert(&table, [1.into()]);
    client.refuse_as(client.one(absent().set("must", column("may"))), 0, &null).await?;
    client.refuse_as(client.one(absent().set("must", column("must").add(1))), 0, &null).await?;
    client.apply(client.one(absent().set("must", 1))).await?;
    let present = || Step::update(&table, [1.into()]);
    client.refuse_as(client.one(present().set("must", column("may"))), 0, &null).await?;
    client.refuse_as(client.one(present().set("must", column("may").add(1))), 0, &null).await?;
    client.apply(client.one(present().set("may", 4))).await?;
    client.apply(client.one(present().set("must", column("may")))).await?;
    same("the copied value", &client.row(&table, [1.into()]).await?.int("must"), &Some(4))
}

pub(super) async fn the_first_impossible_assignment_is_named(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("mistakes")
        .partition("id", Type::Int)
        .defaulted("a", Type::Int, i64::MAX)
        .defaulted("b", Type::Int, i64::MAX)
        .optional("c", Type::Int)
        .build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, [1.into()]))).await?;
    let update = || Step::update(&table, [1.into()]);
    let plan = client.one(update().set("b", column("b").add(1)).set("a", column("c")));
    client.refuse_as(plan, 0, &Reason::Overflow { column: "b".into() }).await?;
    let plan = client.one(update().set("a", column("c")).set("b", column("b").add(1)));
    client.refuse_as(plan, 0, &Reason::Null { column: "a".into() }).await?;
    // A guard is looked at before anything is computed.
    let guard = column("a").eq(0);
    let plan = client.one(update().guard(guard.clone()).set("b", column("b").add(1)));
    client.refuse_as(plan, 0, &Reason::Guard { conjunct: 0, guard: Box::new(guard) }).await
}

pub(super) async fn an_upsert_counts_from_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("tallies").partition("id", Type::Int).optional("n", Type::Int).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let count = || {
        let n = Operand::Coalesce("n".into(), 0.into());
        client.one(Step::upsert(&table, [1.into()]).set("n", n.add(1)))
    };
    for expected in 1..=4_i64 {
        client.apply(count()).await?;
        let row = client.row(&table, [1.into()]).await?;
        same("count and version", &(row.int("n"), row.version()), &(Some(expected), expected))?;
    }
    Ok(())
}

pub(super) async fn an_upsert_ignores_its_guard_when_nothing_is_there(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("arrivals")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let upsert = || client.one(Step::upsert(&table, ["x".into()]).guard(Guard::never()).set("n", 1));
    client.apply(upsert()).await?;
    let never = Reason::Guard { conjunct: 0, guard: Box::new(Guard::never()) };
    client.refuse_as(upsert(), 0, &never).await
}

pub(super) async fn defaults_fill_what_an_insert_leaves_out(namespace: &dyn TestNamespace) -> Result<()> {
    let mut table = Table::named("defaults").partition("id", Type::Int).optional("none", Type::Int);
    for kind in Type::ALL {
        table = table.defaulted(kind.name(), kind, sample(kind, 1));
        let column = Column { name: other(kind), kind, required: false, default: Some(sample(kind, 1)) };
        table = table.declared(column);
    }
    let table = table.build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, [1.into()]))).await?;
    client.apply(client.one(Step::upsert(&table, [2.into()]))).await?;
    for key in [1, 2] {
        let row = client.row(&table, [key.into()]).await?;
        same("a column without a default", &row.get("none"), &Some(&Value::Null))?;
        for kind in Type::ALL {
            same(kind.name(), &row.get(kind.name()), &Some(&sample(kind, 1)))?;
            same(&other(kind), &row.get(&other(kind)), &Some(&sample(kind, 1)))?;
        }
    }
    // What is set is not a case for the default, null included; and a default is not put back by an update.
    let mut insert = Step::insert(&table, [3.into()]);
    for kind in Type::ALL {
        insert = insert.set(kind.name(), sample(kind, 0)).set(&other(kind), Value::Null);
    }
    client.apply(client.one(insert)).await?;
    client.apply(client.one(Step::update(&table, [3.into()]).set("none", 1))).await?;
    client.apply(client.one(Step::upsert(&table, [3.into()]).set("none", 2))).await?;
    let row = client.row(&table, [3.into()]).await?;
    for kind in Type::ALL {
        same(kind.name(), &row.get(kind.name()), &Some(&sample(kind, 0)))?;
        same(&other(kind), &row.get(&other(kind)), &Some(&Value::Null))?;
    }
    Ok(())
}

pub(super) async fn a_default_is_not_what_an_insert_reads(namespace: &dyn TestNamespace) -> Result<()> {
    // Of a row that was absent all columns are null, those with a default too.
    let table = Table::named("echoes")
        .partition("id", Type::Int)
        .defaulted("n", Type::Int, 5)
        .optional("seen", Type::Int)
        .optional("or_nine", Type::Int)
        .optional("life", Type::Int)
        .build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let insert = Step::insert(&table, [1.into()])
        .set("seen", column("n"))
        .set("or_nine", Operand::Coalesce("n".into(), 9.into()))
        .set("life", column("version"));
    client.apply(client.one(insert)).await?;
    let row = client.row(&table, [1.into()]).await?;
    same("the default", &row.int("n"), &Some(5))?;
    same("what the insert saw of it", &row.int("seen"), &None)?;
    same("the stand-in", &row.int("or_nine"), &Some(9))?;
    same("the version before there was a row", &row.int("life"), &None)
}

pub(super) async fn versions_count_the_writes_of_one_life(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("lives")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for life in 0..2 {
        client.apply(client.one(Step::insert(&table, ["x".into()]))).await?;
        for version in 1..=3 {
            let row = client.row(&table, ["x".into()]).await?;
            same(&format!("the version in life {life}"), &row.version(), &version)?;
            // A write that changes nothing is a write; an assert is none; neither is a refusal.
            client.apply(client.one(Step::update(&table, ["x".into()]).set("n", 0))).await?;
            client.apply(client.one(Step::assert(&table, ["x".into()]))).await?;
            client.refuse(client.one(Step::insert(&table, ["x".into()]))).await?;
        }
        client.apply(client.one(Step::update(&table, ["x".into()]))).await?;
        same("an update without assignments", &client.row(&table, ["x".into()]).await?.version(), &5)?;
        client.apply(client.one(Step::delete(&table, ["x".into()]).guard(Guard::version(5)))).await?;
        same("a deleted row", &client.find(&table, ["x".into()]).await?, &None)?;
    }
    Ok(())
}

pub(super) async fn the_engines_clock_in_assignments(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("stamps").build()?;
    let start = Time::from_micros(1_700_000_000_654_321);
    let clock = ManualClock::at(start);
    let client = StoreClient::open_at(namespace, Arc::new(clock.clone()), &[&table]).await?;
    let day = Duration::from_secs(86_400);
    let cases = [
        (Expr::from(now()), start),
        (now_plus(day).into(), start.plus(day)),
        (now_minus(day).into(), start.minus(day)),
        (now().add(7), start.plus(Duration::from_micros(7))),
        (now().subtract(7), start.minus(Duration::from_micros(7))),
        (now_plus(day).add(column("int")), start.plus(day).plus(Duration::from_micros(11))),
    ];
    for (place, (expr, expected)) in cases.into_iter().enumerate() {
        let key = [Value::from(place as i64)];
        client.apply(client.one(Step::insert(&table, key.clone()).set("int", 11))).await?;
        let about = format!("time = {expr}");
        client.apply(client.one(Step::update(&table, key.clone()).set("time", expr))).await?;
        same(&about, &client.row(&table, key).await?.time("time"), &Some(expected))?;
    }
    clock.set(Time::MAX);
    let plan = client.one(Step::update(&table, [0.into()]).set("time", now().add(1)));
    client.refuse_as(plan, 0, &Reason::Overflow { column: "time".into() }).await?;
    // A moved clock stops at the end of time; only arithmetic on it overflows.
    client.apply(client.one(Step::update(&table, [0.into()]).set("time", now_plus(day)))).await?;
    let row = client.row(&table, [0.into()]).await?;
    ensure!(row.time("time") == Some(Time::MAX), "the moved clock did not stop at the end: {row:?}");
    Ok(())
}
