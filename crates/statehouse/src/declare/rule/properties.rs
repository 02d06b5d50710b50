//! Properties of rules: text and back, one meaning in three-valued logic, and negation.

use std::cmp::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::Comparison;
use statehouse_store::{Row, Table, Tenant, Time, Type, Value};

use super::*;
use crate::form::{Form, Property};

/// The clock of these tests, in microseconds.
const NOW: i64 = 1_000_000;

/// What a call finds: columns, inputs and claims, each of which may be missing.
#[derive(Clone, Debug)]
struct World {
    a: Option<i64>,
    b: Option<i64>,
    text: Option<&'static str>,
    at: Option<i64>,
    amount: Option<i64>,
    role: Option<&'static str>,
    groups: Option<Vec<Option<&'static str>>>,
}

fn world() -> impl Strategy<Value = World> {
    let number = || proptest::option::of(-1..2_i64);
    let word = || proptest::option::of(prop_oneof![Just("x"), Just("y")]);
    let time = proptest::option::of((-1..2_i64).prop_map(|seconds| NOW + seconds * 1_000_000));
    let groups = proptest::option::of(proptest::collection::vec(word(), 0..3));
    (number(), number(), word(), time, number(), word(), groups)
        .prop_map(|(a, b, text, at, amount, role, groups)| World { a, b, text, at, amount, role, groups })
}

impl World {
    fn row(&self) -> Row {
        let at = self.at.map(Time::from_micros);
        let values = vec![Value::Int(1), self.a.into(), self.b.into(), self.text.into(), at.into()];
        Row::new(table(), Tenant::new("t").unwrap(), values, 1)
    }

    fn inputs(&self) -> Map<String, Json> {
        self.amount.map(|amount| ("amount".to_owned(), json!(amount))).into_iter().collect()
    }

    fn claims(&self) -> Map<String, Json> {
        let role = self.role.map(|role| ("role".to_owned(), json!(role)));
        let groups = self.groups.as_ref().map(|groups| ("groups".to_owned(), json!(groups)));
        role.into_iter().chain(groups).collect()
    }
}

fn table() -> std::sync::Arc<Table> {
    Table::named("t")
        .partition("id", Type::Int)
        .optional("a", Type::Int)
        .optional("b", Type::Int)
        .optional("text", Type::Text)
        .optional("at", Type::Time)
        .build()
        .unwrap()
}

fn checked(rule: Rule) -> CheckedRule {
    rule.checked(&RuleColumns::of(&table()), &inputs()).unwrap()
}

fn inputs() -> Vec<Property> {
    vec![Property::optional("amount", Form::Value(Type::Int), "")]
}

fn rule() -> impl Strategy<Value = Rule> {
    let comparison = || (0..6_usize).prop_map(|index| Comparison::ALL[index]);
    let number =
        || prop_oneof![Just(col("a")), Just(col("b")), Just(coalesce("a", 1)), Just(input("amount"))];
    let constant = || prop_oneof![(-1..2_i64).prop_map(Term::from), Just(input("amount"))];
    let word = || prop_oneof![Just(Term::from("x")), Just(claim("role")), Just(Term::from("it's \"y\""))];
    let item = || prop_oneof![word(), Just(claim("groups"))];
    let clock = prop_oneof![
        Just(now()),
        (0..3_u64).prop_map(|s| now_plus(Duration::from_millis(s * 500))),
        Just(now_minus(Duration::from_micros(1_000_001))),
    ];
    let asked = prop_oneof![Just(col("a")), Just(col("at")), Just(input("amount")), Just(claim("role"))];
    let leaf = prop_oneof![
        (number(), comparison(), constant()).prop_map(|(left, op, right)| left.compare(op, right)),
        (number(), comparison(), number()).prop_map(|(left, op, right)| left.compare(op, right)),
        (comparison(), clock).prop_map(|(op, clock)| col("at").compare(op, clock)),
        (comparison(), word()).prop_map(|(op, word)| col("text").compare(op, word)),
        comparison().prop_map(|op| claim("role").compare(op, "x")),
        asked.prop_map(Term::is_null),
        proptest::collection::vec(constant(), 1..3).prop_map(|list| col("a").is_in(list)),
        proptest::collection::vec(item(), 1..3).prop_map(|list| col("text").is_in(list)),
        proptest::collection::vec(item(), 1..3).prop_map(|list| claim("role").is_in(list)),
        Just(Rule::always()),
    ];
    leaf.prop_recursive(4, 20, 3, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(left, right)| left.and(right)),
            (inner.clone(), inner.clone()).prop_map(|(left, right)| left.or(right)),
            inner.prop_map(Rule::negated),
        ]
    })
}

/// A value of the tests' own evaluation. Unlike the store's values they have one order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Datum {
    Number(i64),
    Word(String),
}

/// What a term is, item by item; `None` is null.
fn resolve(term: &Term, world: &World) -> Vec<Option<Datum>> {
    let number = |number: Option<i64>| vec![number.map(Datum::Number)];
    let word = |word: Option<&str>| word.map(|word| Datum::Word(word.to_owned()));
    match term {
        Term::Column(name) => match name.as_str() {
            "a" => number(world.a),
            "b" => number(world.b),
            "at" => number(world.at),
            _ => vec![word(world.text)],
        },
        Term::Coalesce(_, default) => number(world.a.or(default.as_int())),
        Term::Value(Value::Int(int)) => number(Some(*int)),
        Term::Value(value) => vec![word(value.as_text())],
        Term::Now { plus_micros } => number(Some(NOW + plus_micros)),
        Term::Input(_) => number(world.amount),
        Term::Claim(name) if name == "groups" => match &world.groups {
            None => vec![None],
            Some(groups) => groups.iter().map(|group| word(*group)).collect(),
        },
        Term::Claim(_) => vec![word(world.role)],
        Term::Key(_) | Term::Bind(_) => panic!("these rules have no {term}"),
    }
}

/// SQL's three truth values: `None` is unknown.
fn kleene(rule: &Rule, world: &World) -> Option<bool> {
    let one = |term: &Term| resolve(term, world).remove(0);
    match rule {
        Rule::Compare(left, comparison, right) => {
            let order = one(left)?.cmp(&one(right)?);
            Some(match comparison {
                Comparison::Eq => order == Ordering::Equal,
                Comparison::Ne => order != Ordering::Equal,
                Comparison::Lt => order == Ordering::Less,
                Comparison::Le => order != Ordering::Greater,
                Comparison::Gt => order == Ordering::Greater,
                Comparison::Ge => order != Ordering::Less,
            })
        }
        Rule::Null(term) => Some(one(term).is_none()),
        Rule::NotNull(term) => Some(one(term).is_some()),
        Rule::In(term, list) => {
            let sought = one(term)?;
            let items = list.iter().flat_map(|item| resolve(item, world));
            disjunction(items.map(|item| item.map(|item| item == sought)))
        }
        Rule::NotIn(term, list) => kleene(&Rule::In(term.clone(), list.clone()), world).map(|truth| !truth),
        Rule::All(parts) => {
            let any_fails = parts.iter().map(|part| kleene(part, world).map(|truth| !truth));
            disjunction(any_fails).map(|truth| !truth)
        }
        Rule::Any(parts) => disjunction(parts.iter().map(|part| kleene(part, world))),
    }
}

fn disjunction(truths: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    let truths: Vec<Option<bool>> = truths.collect();
    if truths.contains(&Some(true)) {
        Some(true)
    } else if truths.contains(&None) {
        None
    } else {
        Some(false)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn rule_text_reads_back_as_the_same_rule(rule in rule()) {
        let rule = checked(rule);
        let text = rule.to_string();
        prop_assert_eq!(Rule::parse(&text, &RuleColumns::of(&table()), &inputs()).unwrap(), rule, "{}", text);
    }

    #[test]
    fn not_in_rule_text_is_negation(rule in rule()) {
        let text = format!("not ({rule})");
        let parsed = Rule::parse(&text, &RuleColumns::of(&table()), &inputs()).unwrap();
        // Only in the shape of lists of one or no part may the two differ.
        prop_assert_eq!(parsed.to_string(), checked(rule).rule().clone().negated().to_string());
    }

    #[test]
    fn bound_rules_and_their_negations_agree_with_three_valued_logic(rule in rule(), world in world()) {
        let (inputs, claims, row) = (world.inputs(), world.claims(), world.row());
        let inputs = tests::untyped(&inputs);
        let values = RuleValues { inputs: Some(&inputs), claims: Some(&claims), ..RuleValues::default() };
        let now = Time::from_micros(NOW);
        let truth = kleene(&rule, &world);
        let (plain, negated) = (checked(rule.clone()), checked(rule.negated()));
        prop_assert_eq!(plain.holds(&values, &row, now), truth == Some(true), "{}", plain);
        prop_assert_eq!(negated.holds(&values, &row, now), truth == Some(false), "{}", negated);
        let failure = plain.failure(&values, &row, now);
        prop_assert_eq!(failure.is_none(), truth == Some(true));
        prop_assert!(failure.is_none_or(|failure| !failure.leaves.is_empty()));
    }

    #[test]
    fn no_rule_text_makes_the_parser_panic(text in "[a-z0-9 .,()<>=!'\"+\\-é]{0,40}") {
        let _ = Rule::parse(&text, &RuleColumns::of(&table()), &inputs()).map_err(|error| {
            let span = error.span.expect("text has places");
            assert!(text.get(span).is_some(), "a span lies on the edges of characters");
        });
    }
}
