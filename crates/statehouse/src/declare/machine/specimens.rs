//! Machines of two kinds that no built archetype has: a workflow whose names exist only at run time, and an auction, whose bids
//! are rows that the same plan accepts or rejects.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_store::clock::SkewedClock;
use statehouse_store::{
    Commit, Ids, ManualClock, Migrate, ModelStore, Random, Row, Scan, Store, Tenant, Time, Type,
};

use super::tests::{int, text};
use super::*;
use crate::action::{Answer, Code, Refusal};
use crate::atlas;
use crate::declare::rule::{coalesce, col, input, is_null, now, now_plus};
use crate::declare::table::TableDef;
use crate::declare::{ActionSpec, ResourceSpec, TableSpec};
use crate::house::{House, Operation, Request};
use crate::infra::due::Due as _;

const HOUR: Duration = Duration::from_secs(3_600);

/// A house of some machines, on the model store.
struct SpecimenHouse {
    house: House,
    store: Arc<dyn Store>,
    clock: ManualClock,
    tenant: Tenant,
}

impl SpecimenHouse {
    async fn of(machines: &[(&Arc<TableDef>, &Arc<Machine>)]) -> SpecimenHouse {
        let entry = atlas::by_keyword("timer").unwrap();
        let resource = |(def, machine): &(&Arc<TableDef>, &Arc<Machine>)| {
            ResourceSpec::of(machine.resource(), def).machine(machine).build(entry)
        };
        let resources = machines.iter().map(resource).collect();
        let clock = ManualClock::at(Time::from_micros(1_700_000_000_000_000));
        let store: Arc<dyn Store> = Arc::new(ModelStore::with(Arc::new(clock.clone()), 4));
        let here = Arc::new(SkewedClock::over(Arc::new(clock.clone())));
        let ids = Ids::new(here.clone(), Random::seeded(7));
        let house = House::of("test", resources, None, store.clone(), here, ids).unwrap();
        store.migrate(house.schema(), Migrate::Apply).await.unwrap();
        SpecimenHouse { house, store, clock, tenant: Tenant::new("acme").unwrap() }
    }

    async fn call(&self, action: &str, key: &str, input: Json) -> Result<Answer, Refusal> {
        let key = if key.is_empty() { Vec::new() } else { vec![key.into()] };
        let Json::Object(input) = input else { panic!("an object") };
        let request = Request { action: action.into(), key, input, expected: None };
        self.house.call(&self.tenant, request, Operation::default()).await
    }

    async fn done(&self, action: &str, key: &str, input: Json) -> Json {
        let answer = self.call(action, key, input).await;
        answer.unwrap_or_else(|refusal| panic!("{action}: {refusal}")).body
    }

    async fn rows(&self, def: &Arc<TableDef>) -> Vec<Row> {
        let scan = Scan::of(def.table(), &self.tenant);
        self.store.scan(&scan).await.unwrap().rows
    }
}

/// A workflow as a blueprint declares it: every name is text that was read at run time.
struct DeclaredWorkflow {
    name: String,
    states: Vec<String>,
    /// Name, origins and target of each transition.
    transitions: Vec<(String, Vec<String>, String)>,
}

impl DeclaredWorkflow {
    fn read(text: &str) -> DeclaredWorkflow {
        let mut lines = text.lines();
        let name = lines.next().unwrap().to_owned();
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<String>>();
        let states = words(lines.next().unwrap());
        let transition = |line: &str| {
            let parts: Vec<&str> = line.split(" -> ").collect();
            let mut left = words(parts[0]);
            (left.remove(0), left, parts[1].to_owned())
        };
        DeclaredWorkflow { name, states, transitions: lines.map(transition).collect() }
    }

    fn table(&self) -> Arc<TableDef> {
        // The table's states are static text, so those of the test live as long as it.
        let states: Vec<&'static str> =
            self.states.iter().map(|state| &*String::leak(state.clone())).collect();
        let key = format!("{}_id", self.name);
        TableSpec::named(format!("{}s", self.name))
            .partition(&key, Type::Text)
            .states(&states)
            .updated_at()
            .build()
            .unwrap()
    }

    fn machine(&self, def: &Arc<TableDef>) -> Arc<Machine> {
        let start =
            ActionSpec::create("start", "Start a {name}.").takes([text(&format!("{}_id", self.name))]);
        let first = self.states.first().unwrap().clone();
        let start = Transition::call(start, absent().to(first).event("started"));
        let machine = Machine::of(self.name.clone(), def).transition(start);
        let declared = self.transitions.iter().map(|(name, origins, target)| {
            let action = ActionSpec::transition(name.clone(), format!("Do {name}."));
            Transition::call(action, from(origins.clone()).to(target.clone()).event(format!("{name}_done")))
        });
        declared.fold(machine, MachineSpec::transition).build().unwrap()
    }
}

#[tokio::test]
async fn a_workflow_is_declared_by_names_that_were_read() {
    let declared = DeclaredWorkflow::read(
        "order\nNEW PAID SHIPPED VOID\npay NEW -> PAID\nship PAID -> SHIPPED\nvoid NEW PAID -> VOID",
    );
    let table = declared.table();
    let machine = declared.machine(&table);
    assert_eq!(
        machine.graph().mermaid(),
        "stateDiagram-v2\n    [*] --> NEW: start\n    NEW --> PAID: pay\n    NEW --> VOID: void\n    PAID --> SHIPPED: ship\n    \
         PAID --> VOID: void\n"
    );
    let world = SpecimenHouse::of(&[(&table, &machine)]).await;
    world.done("order.start", "", json!({"order_id": "a"})).await;
    let refusal = world.call("order.ship", "a", json!({})).await.unwrap_err();
    assert_eq!(
        (refusal.code, refusal.message.as_str()),
        (Code::WrongState, "order a is NEW; this begins with PAID")
    );
    world.done("order.pay", "a", json!({})).await;
    let (shipped, voided) =
        tokio::join!(world.call("order.ship", "a", json!({})), world.call("order.void", "a", json!({})));
    assert_ne!(shipped.is_ok(), voided.is_ok(), "of two transitions one wins");
    let events = ["started", "pay_done", if shipped.is_ok() { "ship_done" } else { "void_done" }];
    let mut reached = std::collections::BTreeSet::from([None]);
    for event in events {
        reached = machine.graph().after_event(&reached, event, None);
    }
    let state = world.rows(&table).await[0].text("state").map(|state| DeclaredName::from(state.to_owned()));
    assert_eq!(reached, std::collections::BTreeSet::from([state]));
}

fn bids() -> Arc<TableDef> {
    let bids = TableSpec::named("bids").partition("bid_id", Type::Text).states(&["ACCEPTED", "REJECTED"]);
    bids.text("lot").int("amount").updated_at().build().unwrap()
}

fn bid_machine(def: &Arc<TableDef>) -> Arc<Machine> {
    let record = |state: &'static str, name: &'static str| {
        absent().to(state).named(name).event(name).set_given(["lot", "amount"])
    };
    Machine::of("bid", def)
        .transition(Transition::part(
            "record",
            [record("ACCEPTED", "accepted"), record("REJECTED", "rejected")],
        ))
        .build()
        .unwrap()
}

fn auctions() -> Arc<TableDef> {
    TableSpec::named("auctions")
        .partition("auction_id", Type::Text)
        .states(&["OPEN", "CLOSED", "CANCELLED"])
        .int("best_amount")
        .null()
        .text("best_bid")
        .null()
        .text("winner")
        .null()
        .time("ends_at")
        .updated_at()
        .deadline(&["OPEN"], "ends_at", 4)
        .build()
        .unwrap()
}

/// A bid is accepted or rejected, and either way it is a row of the same plan as the lot.
fn bid(record: &PartUse) -> Transition {
    let case = |name: &'static str, outcome: &'static str| {
        let part = record.clone();
        from(["OPEN"])
            .to_same()
            .named(name)
            .event(name)
            .rule("in time", col("ends_at").gt(now()), Code::Expired, "{what} ended at {ends_at}")
            .parts([record.clone()], move |scene| {
                let inputs = scene.inputs().ok_or_else(|| statehouse_store::bug!("a bid without inputs"))?;
                let bid = part.at([inputs.get_text("bid_id")?.into()]).case(outcome);
                let bid = bid.bind("lot", scene.key_text()?).bind("amount", inputs.get_int("amount")?);
                Ok(vec![bid.into()])
            })
    };
    let higher = case("raised", "accepted")
        .rule_or_retry("higher", coalesce("best_amount", 0).lt(input("amount")))
        .set("best_amount", input("amount"))
        .set("best_bid", input("bid_id"));
    let lower = case("outbid", "rejected")
        .rule_or_retry("not higher", coalesce("best_amount", 0).ge(input("amount")));
    let action = ActionSpec::transition("bid", "Bid for a {name}.").takes([text("bid_id"), int("amount")]);
    Transition::call(action, [higher, lower]).reading().try_pick(|scene| {
        let best = scene.loaded_row()?.get_optional_int("best_amount")?.unwrap_or(0);
        Ok(usize::from(scene.inputs().and_then(|inputs| inputs.int("amount")) <= Some(best)))
    })
}

fn auction_machine(def: &Arc<TableDef>, record: &PartUse) -> Arc<Machine> {
    let open = absent().to("OPEN").event("opened").set("ends_at", now_plus(HOUR));
    let cancel = from(["OPEN"]).to("CANCELLED").event("cancelled").rule(
        "no bid",
        is_null("best_bid"),
        Code::Held,
        "{what} has the bid {best_bid}",
    );
    Machine::of("auction", def)
        .transition(Transition::call(
            ActionSpec::create("open", "Open a {name}.").takes([text("auction_id")]),
            open,
        ))
        .transition(bid(record))
        .transition(Transition::call(ActionSpec::transition("cancel", "Cancel a {name}."), cancel))
        .transition(Transition::deadline(
            "close",
            from(["OPEN"]).to("CLOSED").event("closed").set("winner", col("best_bid")),
        ))
        .build()
        .unwrap()
}

#[tokio::test]
async fn an_auction_has_cases_a_deadline_and_parts() {
    let (bid_table, auction_table) = (bids(), auctions());
    let bids = bid_machine(&bid_table);
    let auctions = auction_machine(&auction_table, &bids.part("record").unwrap());
    assert!(bids.unused_parts().is_empty());
    let world = SpecimenHouse::of(&[(&bid_table, &bids), (&auction_table, &auctions)]).await;
    world.done("auction.open", "", json!({"auction_id": "a"})).await;
    // Each bid is recorded, and only those that raised the best one are accepted.
    let bid = |number: i64| {
        let input = json!({"bid_id": format!("b{number}"), "amount": 10 + number / 2});
        world.call("auction.bid", "a", input)
    };
    for number in 0..6 {
        bid(number).await.unwrap();
    }
    let (one, other) = tokio::join!(bid(6), bid(7));
    assert!(one.is_ok() && other.is_ok(), "{one:?} {other:?}");
    let rows = world.rows(&bid_table).await;
    assert_eq!(rows.len(), 8);
    let accepted = |row: &&Row| row.text("state") == Some("ACCEPTED");
    let best = rows.iter().filter(accepted).max_by_key(|row| row.int("amount")).unwrap();
    assert_eq!(best.int("amount"), Some(13));
    let auction = world.rows(&auction_table).await.remove(0);
    assert_eq!(auction.int("best_amount"), Some(13));
    assert_eq!(auction.text("best_bid"), best.text("bid_id"));
    let mut amounts: Vec<Option<i64>> = rows.iter().filter(accepted).map(|row| row.int("amount")).collect();
    let count = amounts.len();
    amounts.sort_unstable();
    amounts.dedup();
    assert_eq!(amounts.len(), count, "two accepted bids have one amount");
    let refusal = world.call("auction.cancel", "a", json!({})).await.unwrap_err();
    assert_eq!(refusal.code, Code::Held);
    // The deadline closes it, and no bid changes it from then on.
    world.clock.set(auction.time("ends_at").unwrap());
    let refusal = bid(20).await.unwrap_err();
    assert_eq!(refusal.code, Code::Expired);
    assert_eq!(world.rows(&bid_table).await.len(), 8, "a refused bid left a row");
    let sweeper = DeadlineSweeper::of(&auctions);
    let plan = sweeper.plan(&auction, world.house.clock().now(), &world.house.ids().next()).unwrap();
    assert!(matches!(world.store.commit(&plan).await.unwrap(), Commit::Applied(_)));
    let closed = world.rows(&auction_table).await.remove(0);
    assert_eq!((closed.text("state"), closed.text("winner")), (Some("CLOSED"), best.text("bid_id")));
    assert_eq!(bid(21).await.unwrap_err().code, Code::WrongState);
}
