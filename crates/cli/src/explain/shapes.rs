//! Golden files of what each engine gets for each shape of a plan or a read; what the memory engine gets is the plan itself.
//! What archetypes send is made of these shapes. Which of them an action sends is in the golden files of [`super::plans`].
//!
//! `STATEHOUSE_BLESS=1 cargo test --workspace --all-features --bin statehouse shapes` writes them anew. Read the difference.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use statehouse::engine::{self, Engine};
use statehouse::{Blueprint, archetypes, resource};
use statehouse_store::guard::{column, is_in, is_null, is_set, now, now_minus, now_plus};
use statehouse_store::{
    Address, Cell, ClaimRange, Consistency, Entry, EventTemplate, Guard, Operand, Plan, Query, Row, Scan,
    Step, Table, Tenant, Time, Type, Value,
};

use super::golden::{check, differs};
use super::plans::VARIANTS;
use super::{RecordedCall, explain_action};

#[test]
fn what_each_engine_gets_for_each_shape_is_golden() {
    let shapes = shapes();
    let differing = Engine::ALL.iter().filter_map(|engine| {
        let mut text = String::new();
        for (name, asked) in &shapes {
            let explanation = asked.explained(*engine).unwrap();
            assert!(!explanation.requests.is_empty(), "{engine} gets nothing for {name}");
            text.push_str(&format!("=== {name}\n{explanation}\n"));
        }
        differs(&format!("shapes/{engine}.txt"), &text)
    });
    check(differing);
}

#[tokio::test]
async fn every_action_is_explained_on_every_engine() {
    for (name, text) in [("specimens", archetypes::specimens().as_str()), ("variants", VARIANTS)] {
        let blueprint = Blueprint::read(name, text).unwrap();
        for resource in &resource::declare(&blueprint).unwrap() {
            for action in &resource.actions {
                for engine in Engine::ALL {
                    let explained = explain_action(&blueprint, resource, action, engine).await;
                    let (resource, action) = (&resource.name, &action.name);
                    let parts = explained
                        .unwrap_or_else(|error| panic!("{resource}.{action} on {engine}: {error:?}"));
                    let is_explained = parts.iter().any(|part| !part.requests.is_empty());
                    assert!(is_explained, "{resource}.{action} on {engine} sends nothing");
                }
            }
        }
    }
}

fn acme() -> Tenant {
    Tenant::new("acme").unwrap()
}

/// A table with a sort column, columns of different types and both kinds of index.
fn seats() -> Arc<Table> {
    Table::named("seats")
        .partition("event", Type::Text)
        .sort("seat", Type::Int)
        .defaulted("state", Type::Text, "FREE")
        .optional("holder", Type::Text)
        .optional("price", Type::Int)
        .optional("until", Type::Time)
        .index("by_holder", &["holder"], &["until"])
        .global_index("due", &["state"], &["until"])
        .build()
        .unwrap()
}

/// A small table of another shape: one key column, one number.
fn counters() -> Arc<Table> {
    Table::named("counters").partition("id", Type::Int).defaulted("n", Type::Int, 0).build().unwrap()
}

/// A column of every type.
fn samples() -> Arc<Table> {
    let table = Table::named("samples").partition("id", Type::Int);
    Type::ALL.into_iter().fold(table, |table, kind| table.optional(kind.name(), kind)).build().unwrap()
}

fn seat(number: i64) -> [Value; 2] {
    ["gala".into(), number.into()]
}

fn plan(steps: impl IntoIterator<Item = Step>) -> RecordedCall {
    RecordedCall::Commit(Plan::of(&acme(), "op-1").steps(steps).build().unwrap())
}

fn logged(
    steps: impl IntoIterator<Item = Step>,
    events: impl IntoIterator<Item = EventTemplate>,
) -> RecordedCall {
    let entry = events.into_iter().fold(Entry::about("seat", "gala,1"), Entry::event);
    RecordedCall::Commit(Plan::of(&acme(), "op-1").steps(steps).log(entry).without_rows().build().unwrap())
}

fn hold() -> Step {
    Step::update(&seats(), seat(1)).set("state", "HELD")
}

fn guarded(guard: Guard) -> RecordedCall {
    plan([hold().guard(guard)])
}

/// All shapes, by name.
fn shapes() -> Vec<(&'static str, RecordedCall)> {
    let all = [one_step(), guards(), logged_plans(), several_steps(), reads(), takes()];
    all.into_iter().flatten().collect()
}

fn one_step() -> Vec<(&'static str, RecordedCall)> {
    let minute = Duration::from_secs(60);
    let all_types = [
        ("text", Value::from("it's")),
        ("int", 7.into()),
        ("float", 0.5.into()),
        ("bool", true.into()),
        ("bytes", vec![0, 255].into()),
        ("time", Time::from_millis(1_700_000_000_000).into()),
        ("json", json!({"a": [1, null]}).into()),
    ];
    let every_type = all_types
        .into_iter()
        .fold(Step::insert(&samples(), [1.into()]), |step, (name, value)| step.set(name, value));
    let or_zero = || Operand::Coalesce("n".into(), 0.into());
    vec![
        ("insert", plan([Step::insert(&seats(), seat(1))])),
        ("insert of every type", plan([every_type])),
        ("update of constants", plan([hold().set("holder", "ann").set("price", Value::Null)])),
        ("update by the clock", plan([hold().set("until", now_plus(minute))])),
        ("update by an expression", plan([hold().set("price", column("price").subtract(5))])),
        ("update that copies a column", plan([hold().set("holder", column("state"))])),
        ("upsert", plan([Step::upsert(&counters(), [1.into()]).set("n", or_zero().add(1))])),
        (
            "upsert under a guard",
            plan([Step::upsert(&seats(), seat(1)).guard(column("until").le(now())).set("holder", "ann")]),
        ),
        ("delete", plan([Step::delete(&counters(), [1.into()])])),
        ("delete under a guard", plan([Step::delete(&counters(), [1.into()]).guard(column("n").eq(0))])),
        ("remove, if present", plan([Step::remove(&counters(), [1.into()])])),
        ("remove under a guard", plan([Step::remove(&counters(), [1.into()]).guard(column("n").eq(0))])),
        ("assert", plan([Step::assert(&counters(), [1.into()])])),
        ("assert under a guard", plan([Step::assert(&counters(), [1.into()]).guard(column("n").gt(0))])),
        ("assert absent", plan([Step::assert_absent(&counters(), [1.into()])])),
    ]
}

fn guards() -> Vec<(&'static str, RecordedCall)> {
    let ten = Duration::from_secs(600);
    vec![
        ("update where version", guarded(Guard::version(3))),
        ("update where equal", guarded(column("state").eq("FREE"))),
        ("update where not equal", guarded(column("holder").ne("bob"))),
        ("update where between", guarded(column("price").ge(1).and(column("price").lt(10)))),
        ("update where two columns compare", guarded(column("holder").eq(column("state")))),
        ("update where a time is over", guarded(column("until").le(now()))),
        ("update where a time was not long ago", guarded(column("until").gt(now_minus(ten)))),
        ("update where null or set", guarded(is_null("holder").and(is_set("price")))),
        ("update where one of", guarded(is_in("state", ["FREE", "HELD"]))),
        ("update where none of", guarded(Guard::NotIn("state".into(), vec!["SOLD".into()]))),
        (
            "update where either",
            guarded(column("state").eq("FREE").or(column("state").eq("HELD").and(column("until").le(now())))),
        ),
        (
            "update where a default stands for null",
            guarded(Operand::Coalesce("price".into(), 0.into()).lt(10)),
        ),
    ]
}

fn logged_plans() -> Vec<(&'static str, RecordedCall)> {
    let event = |name: &str| EventTemplate::named(name);
    let with_rows = |step: Step| {
        let entry = Entry::about("seat", "gala,1").event(EventTemplate::named("seat.held").with_row_of(0));
        RecordedCall::Commit(
            Plan::of(&acme(), "op-1").step(step).log(entry.fingerprint("digest")).build().unwrap(),
        )
    };
    vec![
        (
            "record of an insert with its row",
            logged([Step::insert(&seats(), seat(1))], [event("seat.created").with_row_of(0)]),
        ),
        (
            "record of an update with its row",
            logged([hold().guard(Guard::version(1))], [event("seat.held").with_row_of(0)]),
        ),
        (
            "record of a delete with its row",
            logged([Step::delete(&seats(), seat(1))], [event("seat.deleted").with_row_of(0)]),
        ),
        (
            "record with data and two events",
            logged([hold()], [event("seat.held").with("by", "ann"), event("seat.seen")]),
        ),
        ("record alone", logged([], [event("seat.unchanged").with("answer", json!({"n": 1}))])),
        ("update without a record and without rows", {
            RecordedCall::Commit(Plan::of(&acme(), "op-1").step(hold()).without_rows().build().unwrap())
        }),
        ("record of an update whose row is returned", with_rows(hold())),
    ]
}

fn several_steps() -> Vec<(&'static str, RecordedCall)> {
    let count =
        || Step::upsert(&counters(), [1.into()]).set("n", Operand::Coalesce("n".into(), 0.into()).add(1));
    let free = || column("state").eq("FREE");
    let held = || EventTemplate::named("seat.held").with_row_of(0);
    let numbered = |number: i64| Step::update(&seats(), seat(number)).guard(free()).set("state", "HELD");
    vec![
        ("two inserts", logged([1, 2].map(|number| Step::insert(&seats(), seat(number))), [held()])),
        ("three updates of one table", logged([1, 2, 3].map(numbered), [held()])),
        ("insert and update", logged([Step::insert(&counters(), [2.into()]), numbered(1)], [held()])),
        ("update and count", logged([numbered(1), count()], [held()])),
        (
            "update under assertions",
            logged(
                [
                    numbered(1),
                    Step::assert(&counters(), [1.into()]),
                    Step::assert_absent(&counters(), [2.into()]),
                ],
                [held()],
            ),
        ),
        ("two deletes", logged([1, 2].map(|number| Step::delete(&seats(), seat(number))), [held()])),
        ("update and delete, without a record", plan([numbered(1), Step::delete(&counters(), [1.into()])])),
    ]
}

fn address(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Address {
    Address::new(table, &acme(), key).unwrap()
}

fn by_holder() -> Query {
    Query::index(&seats(), "by_holder", &acme(), ["ann".into()]).unwrap().limit(10).unwrap()
}

fn due() -> Query {
    let due = Query::all_tenants(&seats(), "due", ["HELD".into()]).unwrap();
    due.to(engine::explained_at()).unwrap().limit(10).unwrap()
}

fn held_row() -> Row {
    let until = engine::explained_at().into();
    let values = vec!["gala".into(), 1.into(), "HELD".into(), "ann".into(), 5.into(), until];
    Row::new(seats(), acme(), values, 1)
}

fn reads() -> Vec<(&'static str, RecordedCall)> {
    let (seats, counters) = (seats(), counters());
    let one = || address(&seats, seat(1));
    let table = || Query::table(&seats, &acme(), ["gala".into()]).unwrap().limit(10).unwrap();
    let cell = Cell::new(address(&counters, [1.into()]), "n").unwrap();
    vec![
        ("get of a row", RecordedCall::Get(vec![one()], Consistency::Strong)),
        ("get of a row, eventual", RecordedCall::Get(vec![one()], Consistency::Eventual)),
        ("get of rows of two tables", {
            let rows = vec![one(), address(&seats, seat(2)), address(&counters, [1.into()])];
            RecordedCall::Get(rows, Consistency::Strong)
        }),
        ("range of a table", RecordedCall::Query(table())),
        ("bounded range, backward, eventual", {
            RecordedCall::Query(table().above(1).unwrap().to(9).unwrap().backward().eventual())
        }),
        ("range after a cursor", RecordedCall::Query(table().after(table().cursor_at(&held_row())).unwrap())),
        ("range of an index", RecordedCall::Query(by_holder())),
        ("range of an index after a cursor, backward", {
            let query = by_holder().backward();
            let cursor = query.cursor_at(&held_row());
            RecordedCall::Query(query.after(cursor).unwrap())
        }),
        ("range of an index of all tenants", RecordedCall::Query(due())),
        ("scan of a tenant", RecordedCall::Scan(Scan::of(&seats, &acme()).limit(10).unwrap())),
        ("scan of all tenants", RecordedCall::Scan(Scan::all(&seats).limit(10).unwrap())),
        ("several reads in one request", {
            RecordedCall::Look(vec![
                RecordedCall::Get(vec![one()], Consistency::Strong),
                RecordedCall::Value(cell),
                RecordedCall::Query(table()),
            ])
        }),
    ]
}

fn takes() -> Vec<(&'static str, RecordedCall)> {
    let step = || Step::update(&seats(), []).guard(column("until").le(now())).set("state", "FREE");
    let take = |query: Query| ClaimRange::of(&acme(), "op-1", query, step(), "holder").unwrap();
    vec![
        ("take of the first rows of an index", RecordedCall::ClaimRange(take(by_holder()), Some(held_row()))),
        ("take of the first rows of all tenants' index", {
            RecordedCall::ClaimRange(take(due()).limit_bytes(1_000), Some(held_row()))
        }),
    ]
}
