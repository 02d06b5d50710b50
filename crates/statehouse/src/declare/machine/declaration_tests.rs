//! What declarations are refused for, what follows from the graph, and how a refusal finds its rule.

use std::collections::BTreeSet;

use serde_json::{Value as Json, json};

use super::tests::{HOUR, int, lot_machine, lots, text, till_machine, tills};
use super::*;
use crate::action::Code;
use crate::declare::ActionSpec;
use crate::declare::rule::{col, input, now, now_plus};
use crate::form::Property;
use crate::infra::due::DUE_AT;

#[test]
fn the_graph_says_what_can_happen() {
    let (lots, tills) = (lots(), tills());
    let till = till_machine(&tills);
    let machine = lot_machine(&lots, &till.part("add").unwrap()).build().unwrap();
    assert!(till.unused_parts().is_empty());
    let graph = machine.graph();
    assert_eq!(
        graph.mermaid(),
        "stateDiagram-v2\n    [*] --> OPEN: open\n    OPEN --> OPEN: extend, reprice\n    OPEN --> SOLD: buy\n    \
         OPEN --> CANCELLED: cancel\n    OPEN --> OVER: (close)\n    CANCELLED --> [*]: delete\n    OVER --> [*]: delete\n"
    );
    assert_eq!(machine.path_to("buy").unwrap(), ["till.open", "open"]);
    assert_eq!(machine.path_to("close").unwrap(), ["till.open", "open", "wait"]);
    assert_eq!(machine.path_to("delete").unwrap(), ["till.open", "open", "cancel"]);
    let none: BTreeSet<Option<DeclaredName>> = BTreeSet::from([None]);
    let open = graph.after_event(&none, "opened", Some("OPEN"));
    assert_eq!(open, BTreeSet::from([Some("OPEN".into())]));
    assert!(graph.after_event(&open, "opened", Some("OPEN")).is_empty());
    assert_eq!(graph.after_event(&open, "sold", None), BTreeSet::from([Some("SOLD".into())]));
    assert!(graph.after_event(&open, "sold", Some("OVER")).is_empty());
}

/// What building a machine of lots says if this transition is added to it, or replaces the one of its name.
fn problem(change: Transition) -> String {
    let (lots, tills) = (lots(), tills());
    let add = till_machine(&tills).part("add").unwrap();
    let mut spec = lot_machine(&lots, &add);
    spec.transitions.retain(|one| one.name != change.name);
    spec.transition(change).build().err().map(|error| error.why).unwrap_or_default()
}

#[test]
fn contradictions_are_refused_at_declaration() {
    let call = |case: TransitionCase| Transition::call(ActionSpec::transition("extra", "Do more."), case);
    let is_open = || from(["OPEN"]).to_same();
    let cases = [
        (call(from(["OPN"]).to_same()), "there is no state OPN"),
        (call(from(["OPEN"]).to("GONE")), "there is no state GONE"),
        (call(is_open().set("prize", 1)), "there is no column `prize`"),
        (call(is_open().set("price", col("prize"))), "there is no column `prize`"),
        (call(is_open().set("state", "SOLD")), "`state` is set by the machine"),
        (call(is_open().set(DUE_AT, now())), "`due_at` is set by the machine"),
        (call(is_open().set("till", "x")), "only the insert sets `till`"),
        (call(is_open().set("price", input("prize"))), "there is no input `prize`"),
        (call(is_open().rule("r", col("prize").eq(1), Code::Held, "")), "prize"),
        (call(is_open().rule("r", col("price").eq(1), Code::Held, "{secret}")), "the hidden column `secret`"),
        (call(is_open().rule("r", col("price").eq(1), Code::Held, "{prize}")), "there is no column `prize`"),
        (
            call(absent().to("OPEN").set("ends_at", now()).rule("r", col("price").eq(1), Code::Held, "")),
            "absent",
        ),
        (call(absent().to("OPEN")), "set `ends_at`"),
        (call(from(["OPEN"]).checked().set("price", 1)), "cannot be assigned"),
        (call(is_open()).reading_only(["price"]), "`price` can change"),
        (call(is_open()).unlogged(), "answered from its event"),
        (
            Transition::call(
                ActionSpec::transition("extra", ""),
                [is_open().named("a"), is_open().named("b")],
            ),
            "need a `pick`",
        ),
        (Transition::deadline("extra", from(["SOLD"]).to("OVER")), "has no deadline"),
        (Transition::part("close", from(["OPEN"]).to("OVER")), "no deadline transition leaves it"),
        (Transition::part("buy", is_open()), "no transition leads to SOLD"),
    ];
    for (change, expected) in cases {
        let name = change.name.clone();
        let why = problem(change);
        assert!(why.contains(expected), "{name}: expected {expected:?}, got {why:?}");
    }
    assert_eq!(problem(call(is_open())), "");
}

#[test]
fn parts_are_found_at_declaration() {
    let till = till_machine(&tills());
    assert_eq!(till.unused_parts(), ["add"]);
    let why = till.part("ad").unwrap_err().why;
    assert!(why.contains("there is no transition `ad`; it has open, add"), "{why}");
}

/// A rule is recognized by its shape, whatever the call gave.
#[test]
fn a_failed_conjunct_finds_its_rule() {
    use crate::declare::rule::{RuleColumns, RuleValues, is_null};
    let def = lots();
    let inputs = [int("price"), text("buyer")];
    let rules = [
        col("price").lt(input("price")),
        col("buyer").eq(input("buyer")),
        is_null("buyer").or(col("buyer").eq(input("buyer"))),
        col("ends_at").gt(now()),
        col("ends_at").gt(now_plus(HOUR)),
        col("price").is_in([1, 2]),
        col("price").eq(5),
        col("price").eq(6),
    ];
    for given in [json!({}), json!({"price": 3, "buyer": "ann"}), json!({"price": 3})] {
        let Json::Object(given) = given else { panic!("an object") };
        let optional = inputs.clone().map(|input| Property { required: false, ..input });
        let given = crate::inputs::parse_inputs(&optional, given).unwrap();
        let values = RuleValues { inputs: Some(&given), ..RuleValues::default() };
        for (index, rule) in rules.iter().enumerate() {
            let checked = rule.clone().checked(&RuleColumns::from(&*def), &inputs).unwrap();
            let guard = checked.bind(&values);
            let found: Vec<usize> =
                (0..rules.len()).filter(|other| refuse::could_bind(&rules[*other], &guard)).collect();
            assert!(found.contains(&index), "{rule} binds to {guard}, found {found:?}");
            if !given.is_empty() && index > 2 {
                assert_eq!(found, [index], "{rule} binds to {guard}");
            }
        }
    }
}
