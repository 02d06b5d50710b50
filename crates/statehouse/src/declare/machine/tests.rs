//! A small machine on the model store: lots that are sold, cancelled or over, and a till that counts sales.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_store::{
    Commit, Ids, ManualClock, Migrate, ModelStore, Plan, Random, Row, Store, Tenant, Time, Type, Value,
};

use statehouse_store::clock::SkewedClock;

use super::*;
use crate::action::{Answer, Code, Expected, Refusal};
use crate::atlas;
use crate::declare::rule::{bind, col, input, now, now_plus};
use crate::declare::table::TableDef;
use crate::declare::{ActionSpec, ResourceSpec, TableSpec};
use crate::form::{Form, Property};
use crate::house::{House, Operation, Request};
use crate::infra::due::{DUE_AT, DUE_SHARD, Due as _};

pub(super) const HOUR: Duration = Duration::from_secs(3_600);
const TILL_MAX: i64 = 3;

pub(super) fn lots() -> Arc<TableDef> {
    TableSpec::named("lots")
        .partition("lot_id", Type::Text)
        .states(&["OPEN", "SOLD", "CANCELLED", "OVER"])
        .text("till")
        .immutable()
        .int("price")
        .int("secret")
        .default(0)
        .hidden()
        .text("buyer")
        .null()
        .time("ends_at")
        .updated_at()
        .deadline(&["OPEN"], "ends_at", 4)
        .build()
        .unwrap()
}

pub(super) fn tills() -> Arc<TableDef> {
    TableSpec::named("tills").partition("till_id", Type::Text).int("sales").updated_at().build().unwrap()
}

pub(super) fn text(name: &str) -> Property {
    Property::required(name, Form::Value(Type::Text), "")
}

pub(super) fn int(name: &str) -> Property {
    Property::required(name, Form::Value(Type::Int), "")
}

pub(super) fn till_machine(def: &Arc<TableDef>) -> Arc<Machine> {
    let add = any()
        .to_same()
        .rule("room", col("sales").lt(TILL_MAX), Code::OutOfRange, "{what} has {sales} sales")
        .set("sales", sum(col("sales"), bind("count")));
    Machine::of("till", def)
        .transition(Transition::call(
            ActionSpec::put("open", "Open a {name}."),
            always().to_same().event("opened").set("sales", 0),
        ))
        .transition(Transition::part("add", add))
        .build()
        .unwrap()
}

fn open() -> Transition {
    let inputs = [text("lot_id"), text("till"), int("price")];
    let case =
        absent().to("OPEN").event("opened").set_given(["till", "price"]).set("ends_at", now_plus(HOUR));
    Transition::call(ActionSpec::create("open", "Open a {name}.").takes(inputs), case)
}

/// Sells in time, for the price or more; the till of the lot counts it.
fn buy(till: &PartUse) -> Transition {
    let part = till.clone();
    let case = from(["OPEN"])
        .to("SOLD")
        .event("sold")
        .rule("in time", col("ends_at").gt(now()), Code::Expired, "{what} ended at {ends_at}")
        .rule(
            "enough",
            col("price").le(input("price")),
            Code::Held,
            "{what} costs {price}, not {input.price}",
        )
        .refused_in("OVER", Code::Expired, "{what} is over")
        .set("buyer", input("buyer"))
        .parts([till.clone()], move |scene| {
            let till = scene.row.and_then(|row| row.get("till")).cloned().unwrap_or(Value::Null);
            Ok(vec![part.at([till]).bind("count", 1).into()])
        });
    let action = ActionSpec::transition("buy", "Buy a {name}.").takes([text("buyer"), int("price")]);
    Transition::call(action, case).reading_only(["till"])
}

fn close() -> Transition {
    Transition::deadline_or_call(
        ActionSpec::transition("close", "Close a {name}."),
        from(["OPEN"]).to("OVER").event("closed"),
    )
}

/// Raises the price under a fence; above 100 it is a case of its own.
fn reprice() -> Transition {
    let action = ActionSpec::transition("reprice", "Raise the price of a {name}.").takes([int("price")]);
    let cases = [
        from(["OPEN"]).to_same().named("low"),
        from(["OPEN"]).to_same().named("high").event_field("high", |_| true.into()),
    ];
    Transition::call(action, cases)
        .reading()
        .pick(|scene| usize::from(scene.inputs().and_then(|inputs| inputs.int("price")) > Some(100)))
        .each(|case| {
            case.event("repriced")
                .rule(
                    "raise",
                    col("price").lt(input("price")),
                    Code::OutOfRange,
                    "{what} costs {price} already",
                )
                .rule("early", col("ends_at").gt(now_plus(HOUR / 2)), Code::Expired, "{what} ends soon")
                .set("price", input("price"))
        })
}

pub(super) fn lot_machine(def: &Arc<TableDef>, till: &PartUse) -> MachineSpec {
    let extend = ActionSpec::transition("extend", "Extend a {name}.");
    let cancel = ActionSpec::delete("cancel", "Cancel a {name}.");
    let delete = ActionSpec::transition("delete", "Delete a {name}.");
    Machine::of("lot", def)
        .after(["till.open"])
        .transition(open())
        .transition(buy(till))
        .transition(Transition::call(cancel, from(["OPEN"]).to("CANCELLED").event("cancelled")))
        .transition(Transition::call(extend, from(["OPEN"]).to_same().set("ends_at", now_plus(HOUR * 2))))
        .transition(reprice())
        .transition(Transition::call(delete, from(["CANCELLED", "OVER"]).to_deleted()))
        .transition(close())
}

struct World {
    house: House,
    store: Arc<dyn Store>,
    machine: Arc<Machine>,
    engine: ManualClock,
    here: SkewedClock,
    tenant: Tenant,
}

impl World {
    async fn new() -> World {
        let (lots, tills) = (lots(), tills());
        let till = till_machine(&tills);
        let add = till.part("add").unwrap();
        let machine = lot_machine(&lots, &add).build().unwrap();
        let entry = atlas::by_keyword("timer").unwrap();
        let resources = vec![
            ResourceSpec::of("till", &tills).machine(&till).build(entry),
            ResourceSpec::of("lot", &lots).machine(&machine).build(entry),
        ];
        let engine = ManualClock::at(Time::from_micros(1_700_000_000_000_000));
        let here = SkewedClock::over(Arc::new(engine.clone()));
        let store: Arc<dyn Store> = Arc::new(ModelStore::with(Arc::new(engine.clone()), 4));
        let clock = Arc::new(here.clone());
        let ids = Ids::new(clock.clone(), Random::seeded(7));
        let house = House::of("test", resources, None, store.clone(), clock, ids).unwrap();
        store.migrate(house.schema(), Migrate::Apply).await.unwrap();
        let tenant = Tenant::new("acme").unwrap();
        let world = World { house, store, machine, engine, here, tenant };
        world.done("till.open", "t", json!({}), None).await;
        world
    }

    /// A world with a lot that is open.
    async fn open() -> World {
        let world = World::new().await;
        let input = json!({"lot_id": "a", "till": "t", "price": 10});
        let request = world.request("lot.open", "", input, None);
        let answer = world.house.call(&world.tenant, request, Operation::default()).await.unwrap();
        assert_eq!(answer.created.as_deref(), Some("a"));
        world
    }

    fn request(&self, action: &str, key: &str, input: Json, version: Option<i64>) -> Request {
        let key = if key.is_empty() { Vec::new() } else { vec![key.into()] };
        let Json::Object(input) = input else { panic!("an object") };
        Request { action: action.into(), key, input, expected: version.map(Expected::from) }
    }

    async fn call(
        &self,
        action: &str,
        key: &str,
        input: Json,
        version: Option<i64>,
    ) -> Result<Answer, Refusal> {
        let request = self.request(action, key, input, version);
        self.house.call(&self.tenant, request, Operation::default()).await
    }

    async fn done(&self, action: &str, key: &str, input: Json, version: Option<i64>) -> Answer {
        self.call(action, key, input, version).await.unwrap_or_else(|refusal| panic!("{action}: {refusal}"))
    }

    async fn refused(&self, action: &str, input: Json, version: Option<i64>, code: Code) -> String {
        let before = self.row("a").await;
        let refusal = self.call(action, "a", input, version).await.unwrap_err();
        assert_eq!(refusal.code, code, "{action}: {refusal}");
        assert_eq!(self.row("a").await, before, "{action} was refused and changed the row");
        refusal.message
    }

    async fn row(&self, key: &str) -> Option<Row> {
        let address = statehouse_store::Address::new(self.machine.def.table(), &self.tenant, [key.into()]);
        let rows = self.store.get(&[address.unwrap()], statehouse_store::Consistency::Strong).await;
        rows.unwrap().into_iter().next().flatten()
    }

    /// The plan of the sweeper for a row.
    fn sweep(&self, row: &Row) -> Plan {
        let sweeper = DeadlineSweeper::of(&self.machine);
        sweeper.plan(row, self.house.clock().now(), &self.house.ids().next()).unwrap()
    }
}

fn bid() -> Json {
    json!({"buyer": "ann", "price": 10})
}

#[tokio::test]
async fn a_row_follows_the_graph_and_every_refusal_has_its_code() {
    let world = World::open().await;
    assert_eq!(
        world.refused("lot.buy", json!({"buyer": "ann", "price": 9}), None, Code::Held).await,
        "lot a costs 10, not 9"
    );
    world.refused("lot.buy", bid(), Some(7), Code::VersionConflict).await;
    let message = world.refused("lot.delete", json!({}), None, Code::WrongState).await;
    assert_eq!(message, "lot a is OPEN; this begins with CANCELLED or OVER");
    world.refused("lot.close", json!({}), None, Code::WrongState).await;
    let sold = world.done("lot.buy", "a", bid(), Some(1)).await;
    assert_eq!((&sold.body["state"], &sold.body["buyer"]), (&json!("SOLD"), &json!("ann")));
    assert_eq!(sold.body.get("secret"), None);
    for action in ["lot.buy", "lot.cancel", "lot.extend", "lot.close", "lot.delete"] {
        let input = if action == "lot.buy" { bid() } else { json!({}) };
        world.refused(action, input, None, Code::WrongState).await;
    }
    let refusal = world.call("lot.buy", "b", bid(), None).await.unwrap_err();
    assert_eq!(refusal.code, Code::NotFound);
    let again = world.request("lot.open", "", json!({"lot_id": "a", "till": "t", "price": 1}), None);
    let refusal = world.house.call(&world.tenant, again, Operation::default()).await.unwrap_err();
    assert_eq!(refusal.code, Code::AlreadyExists);
}

#[tokio::test]
async fn of_two_racing_transitions_one_wins() {
    for _ in 0..20 {
        let world = World::open().await;
        let (bought, cancelled) = tokio::join!(
            world.call("lot.buy", "a", bid(), None),
            world.call("lot.cancel", "a", json!({}), None)
        );
        assert_ne!(bought.is_ok(), cancelled.is_ok());
        let loser = bought.err().or(cancelled.err()).unwrap();
        assert_eq!(loser.code, Code::WrongState);
    }
}

#[tokio::test]
async fn a_repeated_transition_returns_the_first_answer() {
    let world = World::open().await;
    let request = world.request("lot.buy", "a", bid(), None);
    let operation = || Operation::under("op", &request);
    let first = world.house.call(&world.tenant, request.clone(), operation()).await.unwrap();
    let again = world.house.call(&world.tenant, request.clone(), operation()).await.unwrap();
    assert_eq!(first.body, again.body);
    assert_eq!(world.row("a").await.unwrap().version(), 2);
}

#[tokio::test]
async fn the_deadline_is_the_engines_to_the_microsecond() {
    let world = World::open().await;
    let row = world.row("a").await.unwrap();
    let ends_at = row.time("ends_at").unwrap();
    assert_eq!((row.time(DUE_AT), row.int(DUE_SHARD).is_some()), (Some(ends_at), true));
    // A process that is ahead does not close it early.
    world.here.skew(1_000_000);
    world.engine.set(ends_at.minus(Duration::from_micros(1)));
    let early = world.store.commit(&world.sweep(&row)).await.unwrap();
    assert!(matches!(early, Commit::Refused(_)), "{early:?}");
    world.refused("lot.close", json!({}), None, Code::WrongState).await;
    let at_the_end = World::open().await;
    at_the_end.engine.set(ends_at.minus(Duration::from_micros(1)));
    at_the_end.done("lot.buy", "a", bid(), None).await;
    world.engine.set(ends_at);
    assert!(world.refused("lot.buy", bid(), None, Code::Expired).await.starts_with("lot a ended at"));
    let (first, second) = (world.sweep(&row), world.sweep(&row));
    assert!(matches!(world.store.commit(&first).await.unwrap(), Commit::Applied(_)));
    assert!(matches!(world.store.commit(&second).await.unwrap(), Commit::Refused(_)));
    let closed = world.row("a").await.unwrap();
    assert_eq!(
        (closed.text("state"), closed.time(DUE_AT), closed.int(DUE_SHARD)),
        (Some("OVER"), None, None)
    );
    assert_eq!(closed.time("ends_at"), Some(ends_at));
    // A declared state has its own code.
    world.refused("lot.buy", bid(), None, Code::Expired).await;
    world.done("lot.delete", "a", json!({}), None).await;
    assert_eq!(world.row("a").await, None);
}

#[tokio::test]
async fn the_due_time_moves_with_its_column_and_wakes_the_sweeper() {
    let world = World::open().await;
    world.done("lot.extend", "a", json!({}), None).await;
    let row = world.row("a").await.unwrap();
    let expected = world.house.clock().now().plus(HOUR * 2);
    assert_eq!((row.time("ends_at"), row.time(DUE_AT)), (Some(expected), Some(expected)));
    let case = &world.machine.transitions.iter().find(|one| one.decl.name == "extend").unwrap().cases[0];
    let gathered = Gathered::default();
    let scene = Scene {
        tenant: &world.tenant,
        key: row.key(),
        call: None,
        row: None,
        gathered: &gathered,
        binds: &[],
        refused: None,
        now_here: world.house.clock().now(),
    };
    let step = case.step(&world.machine, &scene, bind::Fence::None).unwrap();
    let wakeups = bind::wakeups(&world.machine, &step, None, scene.now_here);
    assert_eq!(wakeups.len(), 1);
    assert_eq!((wakeups[0].worker.as_str(), wakeups[0].at), ("lot.close", expected));
}

#[tokio::test]
async fn parts_change_with_the_main_row_or_not_at_all() {
    let world = World::open().await;
    for _ in 0..TILL_MAX {
        let world = &world;
        let input = json!({"lot_id": format!("x{}", world.house.ids().next()), "till": "t", "price": 1});
        let request = world.request("lot.open", "", input.clone(), None);
        world.house.call(&world.tenant, request, Operation::default()).await.unwrap();
        world.done("lot.buy", input["lot_id"].as_str().unwrap(), bid(), None).await;
    }
    let message = world.refused("lot.buy", bid(), None, Code::OutOfRange).await;
    assert_eq!(message, "till t has 3 sales");
    world.done("till.open", "t", json!({}), None).await;
    world.done("lot.buy", "a", bid(), None).await;
}

#[tokio::test]
async fn a_fence_implies_what_is_judged_in_memory() {
    let world = World::open().await;
    let request = world.request("lot.reprice", "a", json!({"price": 11}), None);
    let plan = world.house.plan(&world.tenant, request).await.unwrap().unwrap();
    let guard = plan.steps()[0].guard.to_string();
    assert!(guard.starts_with("version = 1 and ") && !guard.contains("price"), "{guard}");
    world.refused("lot.reprice", json!({"price": 10}), None, Code::OutOfRange).await;
    world.refused("lot.reprice", json!({"price": 11}), Some(5), Code::VersionConflict).await;
    let calls = (11..31).map(|price| world.call("lot.reprice", "a", json!({"price": price}), None));
    let outcomes = futures_util::future::join_all(calls).await;
    let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    let row = world.row("a").await.unwrap();
    // Each that was done raised the price: no update was lost.
    assert_eq!(row.version(), 1 + i64::try_from(done).unwrap());
    assert!(row.int("price") > Some(10));
    let high = world.done("lot.reprice", "a", json!({"price": 101}), None).await;
    assert_eq!(high.body["price"], 101);
    world.engine.advance(HOUR / 2);
    // The case is picked again for the same row, so that the caller is told.
    world.refused("lot.reprice", json!({"price": 102}), None, Code::Expired).await;
    world.done("lot.cancel", "a", json!({}), None).await;
    world.refused("lot.reprice", json!({"price": 103}), None, Code::WrongState).await;
}
