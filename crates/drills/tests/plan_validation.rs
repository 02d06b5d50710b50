//! What is wrong with a plan or a read by itself is refused when it is built, before any store has heard of it.
//!
//! Each of these would otherwise have to be refused by every engine, in the same way and at the same moment.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "the exemption for tests does not reach the functions that tests share"
)]

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use statehouse_store::guard::{column, is_in, is_null, now, now_plus, value};
use statehouse_store::limits::{GUARD_LEAVES_MAX, IN_VALUES_MAX, NAME_BYTES_MAX, PAGE_MAX};
use statehouse_store::plan::PlanBuilder;
use statehouse_store::{
    Address, BadValue, Entry, EventTemplate, Guard, Operand, Plan, PlanError, Query, Scan, Step, Table,
    Tenant, Time, Type, Value,
};

fn table() -> Arc<Table> {
    Type::ALL
        .into_iter()
        .fold(Table::named("things").partition("id", Type::Int).sort("rank", Type::Text), |table, kind| {
            table.optional(kind.name(), kind)
        })
        .required("must", Type::Int)
        .build()
        .unwrap()
}

fn tenant() -> Tenant {
    Tenant::new("acme").unwrap()
}

fn key() -> [Value; 2] {
    [1.into(), "r".into()]
}

fn update() -> Step {
    Step::update(&table(), key())
}

fn of(step: Step) -> PlanBuilder {
    Plan::of(&tenant(), "op").step(step)
}

/// Requires that a plan cannot be built, and that the error's text holds all of these.
#[track_caller]
fn refused(plan: PlanBuilder, expect: &[&str]) {
    match plan.build() {
        Ok(_) => panic!("the plan was built; expected an error holding {expect:?}"),
        Err(error) => {
            let text = error.to_string();
            assert!(expect.iter().all(|part| text.contains(part)), "expected {expect:?} in: {text}");
        }
    }
}

#[test]
fn plans_must_do_something() {
    assert_eq!(Plan::of(&tenant(), "op").build(), Err(PlanError::Empty));
}

#[test]
fn names_must_be_there_and_short() {
    refused(Plan::of(&tenant(), "").log(Entry::about("r", "k")), &["operation", "must not be empty"]);
    refused(Plan::of(&tenant(), "a\0b").log(Entry::about("r", "k")), &["operation", "U+0000"]);
    refused(Plan::of(&tenant(), "a\u{1}12.3").log(Entry::about("r", "k")), &["operation", "U+0001"]);
    assert!(Plan::of(&tenant(), "a\u{1}b").log(Entry::about("r", "k")).build().is_ok(), "only with a place");
    let over = "x".repeat(NAME_BYTES_MAX + 1);
    refused(Plan::of(&tenant(), over.as_str()).log(Entry::about("r", "k")), &["operation", "257", "256"]);
    let logged = |entry: Entry| Plan::of(&tenant(), "op").log(entry);
    refused(logged(Entry::about("", "k")), &["resource"]);
    refused(logged(Entry::about(over.as_str(), "k")), &["resource", "257"]);
    refused(logged(Entry::about("r", over.as_str())), &["key", "257"]);
    refused(logged(Entry::about("r", "k").fingerprint(over.as_str())), &["fingerprint", "257"]);
    refused(logged(Entry::about("r", "k").event(EventTemplate::named(""))), &["event"]);
    refused(logged(Entry::about("r", "k").event(EventTemplate::named(over))), &["event", "257"]);
    assert!(logged(Entry::about("r", "")).build().is_ok(), "a subject may have an empty key");
    for bad in ["", "a b", "é", "a/b", &"x".repeat(65)] {
        assert!(matches!(Tenant::new(bad), Err(PlanError::BadName { .. })), "{bad:?}");
    }
}

#[test]
fn keys_must_be_complete_and_typed() {
    refused(of(Step::update(&table(), [1.into()])), &["2 parts (id, rank); 1 given"]);
    refused(of(Step::update(&table(), [1.into(), "r".into(), 2.into()])), &["2 parts", "3 given"]);
    refused(of(Step::update(&table(), ["1".into(), "r".into()])), &["things.id", "expected int, got text"]);
    refused(of(Step::update(&table(), [1.into(), Value::Null])), &["things.rank", "cannot be null"]);
    refused(of(Step::update(&table(), [1.into(), "a\0".into()])), &["things.rank", "U+0000"]);
    assert!(matches!(Address::new(&table(), &tenant(), [1.into()]), Err(PlanError::KeyParts { .. })));
}

#[test]
fn a_row_is_named_once() {
    let twice = of(update()).step(Step::assert(&table(), key()));
    refused(twice, &["steps 0 and 1", "id=1"]);
    // The same key in the form in which it is stored.
    let floats = Table::named("floats").partition("id", Type::Float).build().unwrap();
    let twice = of(Step::remove(&floats, [Value::Float(-0.0)])).step(Step::remove(&floats, [0.into()]));
    refused(twice, &["steps 0 and 1"]);
}

#[test]
fn columns_must_exist_and_be_assignable() {
    refused(of(update().set("colour", 1)), &["no column colour", "id, rank, text"]);
    refused(of(update().guard(column("colour").eq(1))), &["no column colour"]);
    refused(of(update().guard(is_null("colour"))), &["no column colour"]);
    refused(of(update().guard(is_in("colour", [1]))), &["no column colour"]);
    refused(of(update().set("int", column("colour"))), &["no column colour"]);
    refused(of(update().guard(column("tenant").eq("acme"))), &["no column tenant"]);
    refused(of(update().set("version", 1)), &["the store counts it"]);
    refused(of(update().set("rank", "x")), &["part of the key"]);
    refused(of(update().set("int", 1).set("int", 2)), &["assigned twice"]);
    refused(of(Step::delete(&table(), key()).set("int", 1)), &["only a put assigns"]);
    refused(of(Step::assert(&table(), key()).set("int", 1)), &["only a put assigns"]);
}

#[test]
fn values_must_fit_their_columns() {
    refused(of(update().set("int", "1")), &["things.int", "expected int, got text"]);
    refused(of(update().set("int", 1.0)), &["expected int, got float"]);
    refused(of(update().set("text", "a\0b")), &["U+0000"]);
    refused(of(update().set("float", f64::NAN)), &["NaN"]);
    refused(of(update().set("float", 1e126)), &["1e126"]);
    refused(of(update().set("float", i64::MAX)), &["expected float, got int"]);
    refused(
        of(update().set("time", Time::from_micros(i64::MAX))),
        &["a time must lie between", "9999-12-30"],
    );
    refused(of(update().set("json", json!({"a\0": 1}))), &["U+0000"]);
    let deep = (0..=Value::JSON_DEPTH_MAX).fold(json!(1), |inner, _| json!([inner]));
    refused(of(update().set("json", deep)), &["deeper than 64"]);
    let entry = Entry::about("r", "k").event(EventTemplate::named("e").with("x", "a\0b"));
    assert!(matches!(
        Plan::of(&tenant(), "op").log(entry).build(),
        Err(PlanError::BadValue { why: BadValue::NulCharacter, .. })
    ));
}

#[test]
fn required_columns_must_be_given() {
    refused(of(Step::insert(&table(), key())), &["things.must is required"]);
    refused(of(Step::upsert(&table(), key()).set("int", 1)), &["things.must is required"]);
    refused(of(update().set("must", Value::Null)), &["things.must is required"]);
    assert!(of(update()).build().is_ok(), "an update leaves what it does not name");
    assert!(
        of(Step::insert(&table(), key()).set("must", column("int"))).build().is_ok(),
        "only the commit can know"
    );
}

#[test]
fn comparisons_must_make_sense() {
    refused(of(update().guard(column("int").eq(Value::Null))), &["constant null", "is null"]);
    refused(of(update().guard(is_in("int", [Value::Null]))), &["things.int", "cannot be null"]);
    refused(of(update().guard(column("int").eq("x"))), &["needs a constant of type int, got text"]);
    refused(of(update().guard(column("int").eq(column("text")))), &["compares int with text"]);
    refused(of(update().guard(column("int").lt(now()))), &["compares int with time"]);
    refused(of(update().guard(value(1).eq(1))), &["compares two constants"]);
    refused(of(update().guard(column("json").eq(json!({})))), &["json, which has no order"]);
    refused(of(update().guard(is_in("json", [json!({})]))), &["json, which has no order"]);
    refused(
        of(update().guard(column("int").eq(Operand::Coalesce("int".into(), "x".into())))),
        &["type int, got text"],
    );
    refused(of(update().guard(column("float").eq(f64::INFINITY))), &["inf"]);
    let century = Duration::from_secs(101 * 366 * 86_400);
    refused(of(update().guard(column("time").lt(now_plus(century)))), &["more than a century"]);
    // The parts of a guard are looked at however deep they stand.
    let nested = Guard::Any(vec![Guard::All(vec![column("int").eq(1), column("nothing").eq(1)])]);
    refused(of(update().guard(nested)), &["no column nothing"]);
    let guarded = Step::insert(&table(), key()).set("must", 1).guard(column("int").eq(1));
    refused(of(guarded), &["must be absent"]);
}

#[test]
fn sums_must_make_sense() {
    refused(of(update().set("text", column("text").add("x"))), &["only int, float and time"]);
    refused(of(update().set("int", column("int").add(column("float")))), &["needs int", "float"]);
    refused(of(update().set("int", column("int").add(0.5))), &["type int, got float"]);
    refused(of(update().set("time", column("time").add(column("time")))), &["needs int", "time"]);
    refused(of(update().set("time", column("int").add(column("int")))), &["needs time", "int"]);
    refused(of(update().set("int", column("text"))), &["needs int", "text"]);
    refused(of(update().set("int", now())), &["needs int", "time"]);
    refused(of(update().set("int", column("int").add(Value::Null))), &["constant null"]);
}

#[test]
fn lists_and_guards_are_bounded() {
    let list = |count: usize| update().guard(is_in("int", 0..count as i64));
    refused(of(list(IN_VALUES_MAX + 1)), &["101; the limit is 100"]);
    assert!(of(list(IN_VALUES_MAX)).build().is_ok());
    let leaves = |count: usize| {
        let parts = (0..count).map(|number| column("int").ne(number as i64)).collect();
        update().guard(Guard::All(vec![Guard::Any(parts)]))
    };
    refused(of(leaves(GUARD_LEAVES_MAX + 1)), &["conditions in a guard", "51; the limit is 50"]);
    assert!(of(leaves(GUARD_LEAVES_MAX)).build().is_ok());
}

#[test]
fn events_take_rows_from_steps_that_write() {
    let with_row_of = |step: usize| Entry::about("r", "k").event(EventTemplate::named("e").with_row_of(step));
    let plan = |entry: Entry| {
        of(Step::assert(&table(), key())).step(Step::remove(&table(), [2.into(), "r".into()])).log(entry)
    };
    refused(plan(with_row_of(0)), &["event e", "step 0"]);
    refused(plan(with_row_of(2)), &["event e", "step 2"]);
    assert!(plan(with_row_of(1)).build().is_ok());
}

#[test]
fn limits_are_named_with_their_numbers() {
    let count = |steps: i64| {
        (0..steps).fold(Plan::of(&tenant(), "op"), |plan, id| {
            plan.step(Step::remove(&table(), [id.into(), "r".into()]))
        })
    };
    assert!(count(100).build().is_ok());
    refused(count(101), &["operations in a plan", "101; the limit is 100"]);
    assert!(count(98).log(Entry::about("r", "k")).build().is_ok(), "a log entry counts for two");
    refused(count(99).log(Entry::about("r", "k")), &["101; the limit is 100"]);
    // So many other subjects as there are other partitions, at most.
    let about = |others: usize| {
        let event = |key: usize| EventTemplate::named("e").about("r", key.to_string());
        (0..others).map(event).fold(Entry::about("r", "k"), Entry::event)
    };
    for (others, most) in [(0, 98), (1, 97), (15, 83), (200, 83)] {
        assert!(count(most).log(about(others)).build().is_ok(), "{most} steps and {others} others");
        refused(count(most + 1).log(about(others)), &["101; the limit is 100"]);
    }
    refused(of(update().set("text", "x".repeat(400_001))), &["things", "the limit is 400000"]);
    let told = EventTemplate::named("told").with("text", "x".repeat(400_001));
    let error = Plan::of(&tenant(), "op").log(Entry::about("r", "k").event(told)).build().unwrap_err();
    let PlanError::Limit { limit, actual, .. } = error else { panic!("expected a limit, got {error}") };
    assert!(actual > limit, "the number that is named, {actual}, is within the limit of {limit}");
    refused(
        of(Step::remove(&table(), [1.into(), "x".repeat(500).into()])),
        &["sort key of things", "501; the limit is 500"],
    );
}

#[test]
fn reads_are_bounded_and_their_cursors_are_their_own() {
    let (table, tenant) = (table(), tenant());
    for rows in [0, PAGE_MAX + 1] {
        assert!(matches!(Scan::all(&table).limit(rows), Err(PlanError::Limit { .. })));
        let query = Query::table(&table, &tenant, [1.into()]).unwrap();
        assert!(matches!(query.limit(rows), Err(PlanError::Limit { .. })));
    }
    assert!(Scan::all(&table).limit(PAGE_MAX).is_ok());
    assert!(matches!(Query::table(&table, &tenant, [Value::Null]), Err(PlanError::Required { .. })));
    assert!(matches!(Query::table(&table, &tenant, ["x".into()]), Err(PlanError::BadValue { .. })));
    assert!(matches!(Query::index(&table, "by_x", &tenant, []), Err(PlanError::UnknownIndex { .. })));
}
