//! Tests of rules: what text means, every error with its place, binding and messages.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{self, Comparison};
use statehouse_store::limits::{GUARD_LEAVES_MAX, IN_VALUES_MAX};
use statehouse_store::{Guard, Plan, Row, Step, Table, Tenant, Time, Type, Value};

use super::*;
use crate::blueprint::problem::Problems;
use crate::declare::TableSpec;
use crate::form::{Form, Property};
use crate::inputs::Inputs;

/// Inputs of unknown types: a rule reads each in the type that it is compared with.
pub(super) fn untyped(fields: &Map<String, Json>) -> Inputs {
    let mut inputs = Inputs::default();
    for (name, json) in fields {
        inputs.set(name, if json.is_null() { Value::Null } else { Value::Json(json.clone()) });
    }
    inputs
}

fn table() -> Arc<Table> {
    Table::named("members")
        .partition("id", Type::Text)
        .sort("place", Type::Int)
        .optional("open_loans", Type::Int)
        .optional("best", Type::Int)
        .optional("price", Type::Float)
        .optional("ends_at", Type::Time)
        .optional("state", Type::Text)
        .optional("active", Type::Bool)
        .optional("doc", Type::Json)
        .optional("blob", Type::Bytes)
        .optional("now", Type::Int)
        .optional("reserve", Type::Int)
        .build()
        .unwrap()
}

fn columns() -> RuleColumns {
    RuleColumns::of(&table()).hide(&["reserve"])
}

fn inputs() -> Vec<Property> {
    vec![
        Property::required("amount", Form::Value(Type::Int), ""),
        Property::optional("at", Form::Value(Type::Time), ""),
        Property::optional("word", Form::one_of(&["A", "B"]), ""),
        Property::optional("count", Form::Range(1, 9), ""),
        Property::optional("tags", Form::List(Box::new(Form::Value(Type::Text))), ""),
        Property::optional("ratio", Form::Value(Type::Float), ""),
    ]
}

fn parse(text: &str) -> Result<CheckedRule, RuleError> {
    Rule::parse(text, &columns(), &inputs())
}

fn row(values: &[(&str, Value)]) -> Row {
    let table = table();
    let mut all = vec![Value::from("m1"), Value::from(2)];
    all.extend(table.other_columns().iter().map(|column| {
        let given = values.iter().find(|(name, _)| *name == column.name);
        given.map_or(Value::Null, |(_, value)| value.clone())
    }));
    Row::new(table, Tenant::new("acme").unwrap(), all, 7)
}

fn object(json: Json) -> Map<String, Json> {
    match json {
        Json::Object(map) => map,
        other => panic!("{other} is not an object"),
    }
}

/// Checks that text is the same as a built rule, and its text.
fn same(text: &str, built: Rule, printed: &str) {
    let parsed = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert_eq!(parsed, built.checked(&columns(), &inputs()).unwrap(), "{text}");
    assert_eq!(parsed.to_string(), printed);
    assert_eq!(parse(printed).unwrap(), parsed, "{printed}");
}

#[test]
fn text_and_functions_make_the_same_rules() {
    let minutes = |n: u64| Duration::from_secs(60 * n);
    same("open_loans < 3", col("open_loans").lt(3), "open_loans < 3");
    same(
        "best is null OR best<input.amount AND state <> 'it''s'",
        is_null("best").or(col("best").lt(input("amount")).and(col("state").ne("it's"))),
        "best is null or (best < input.amount and state <> 'it''s')",
    );
    same("ends_at > now - 90m", col("ends_at").gt(now_minus(minutes(90))), "ends_at > now - 90m");
    same("ends_at <= now+1h30m", col("ends_at").le(now_plus(minutes(90))), "ends_at <= now + 90m");
    same("ends_at >= now", col("ends_at").ge(now()), "ends_at >= now");
    same("ends_at < now + 7us", col("ends_at").lt(now_plus(Duration::from_micros(7))), "ends_at < now + 7us");
    same(
        "state in ('A', claim.groups) and state not in ('B')",
        col("state").is_in([Term::from("A"), claim("groups")]).and(col("state").is_not_in(["B"])),
        "state in ('A', claim.groups) and state not in ('B')",
    );
    same("price >= -1.5e-7", col("price").ge(-1.5e-7), "price >= -1.5e-7");
    same("active = true", col("active").eq(true), "active = true");
    same("coalesce(best, 0) < 5", coalesce("best", 0).lt(5), "coalesce(best, 0) < 5");
    same("\"now\" = 1 and \"best\" = 2", col("now").eq(1).and(col("best").eq(2)), "\"now\" = 1 and best = 2");
    same("claim.\"x:y\" is not null", claim("x:y").is_not_null(), "claim.\"x:y\" is not null");
    same("claim.in = 'a'", claim("in").eq("a"), "claim.in = 'a'");
    same("version = 7", col("version").eq(7), "version = 7");
    same("-9223372036854775808 < best", Term::from(i64::MIN).lt(col("best")), "-9223372036854775808 < best");
    same("true or best = 1", Rule::always().or(col("best").eq(1)), "true or best = 1");
    same("true = active", Term::from(true).eq(col("active")), "true = active");
    same("false", Rule::never(), "false");
}

#[test]
fn not_becomes_the_opposite_of_each_leaf() {
    let printed = |text: &str| parse(text).unwrap().to_string();
    assert_eq!(
        printed("not (best = 1 or state in ('A') and doc is null)"),
        "best <> 1 and (state not in ('A') or doc is not null)"
    );
    assert_eq!(printed("not best < 1 and state = 'A'"), "best >= 1 and state = 'A'", "it binds tightly");
    assert_eq!(printed("not not best <= 1"), "best <= 1");
    assert_eq!(printed("not (true and not best > 1)"), "best > 1");
    assert_eq!(printed("not true"), "false");
    assert_eq!(printed("not (best is not null)"), "best is null");
}

#[test]
fn literals_take_the_form_of_their_column() {
    let right = |text: &str| match parse(text).unwrap().rule() {
        Rule::Compare(_, _, Term::Value(value)) => value.clone(),
        other => panic!("{other}"),
    };
    assert_eq!(right("price < 3"), Value::Float(3.0));
    assert_eq!(right("ends_at < '1970-01-01T00:00:01Z'"), Value::Time(Time::from_micros(1_000_000)));
    assert_eq!(right("now < '1970-01-01T01:00:01+01:00'"), Value::Time(Time::from_micros(1_000_000)));
    assert_eq!(right("input.at < '1970-01-01T00:00:01Z'"), Value::Time(Time::from_micros(1_000_000)));
    assert_eq!(right("input.ratio < 3"), Value::Float(3.0));
    assert_eq!(right("claim.level >= 3"), Value::Int(3));
}

/// Checks an error. In the text the place is between `«` and `»`.
fn fails(marked: &str, title: &str, advice: &str) {
    let start = marked.find('«').unwrap();
    let end = marked.find('»').unwrap() - '«'.len_utf8();
    let text = marked.replace(['«', '»'], "");
    let error = parse(&text).expect_err(&text);
    assert_eq!((error.title.as_str(), error.advice.as_deref().unwrap_or("")), (title, advice), "{text}");
    assert_eq!(error.span, Some(start..end), "{text}: {error}");
}

const KNOWN: &str = "the columns are id, place, open_loans, best, price, ends_at, state, active, doc, blob, now, reserve, version";
const A_TERM: &str = "a column, a literal, `now`, `input.NAME` or `claim.NAME`";

#[test]
fn errors_of_words_and_symbols() {
    fails("best «==» 1", "`==` is not a symbol of rules", "write `=`");
    fails("best «!=» 1", "`!=` is not a symbol of rules", "write `<>`");
    fails("best = 1 «&&» best = 2", "`&&` is not a symbol of rules", "write `and`");
    fails("best = 1 «||» best = 2", "`||` is not a symbol of rules", "write `or`");
    fails("«!»(best = 1)", "`!` is not a symbol of rules", "write `not`");
    fails("state = 'é' and «ü» = 1", "`ü` is not a symbol of rules", "");
    fails("state = «'open»", "a text literal is not closed", "end it with '");
    fails("«\"state = 1»", "a quoted name is not closed", "end it with \"");
    fails("best = «12x»", "`12x` is neither a number nor a duration", "text is in single quotes");
    let advice = "write `now + 10m` or `now - 10m`";
    fails("best = «10m»", "`10m` is a duration, which can only be added to the clock", advice);
    let big = "9223372036854775808 does not fit into an integer of 64 bits";
    fails("best = «9223372036854775808»", big, "");
}

#[test]
fn errors_of_grammar() {
    let more = "`and`, `or` or the end";
    fails("«»", &format!("expected {A_TERM}, found the end"), "");
    fails("best = «»", &format!("expected {A_TERM}, found the end"), "");
    fails("best = «and» best = 1", &format!("expected {A_TERM}, found `and`"), "");
    fails("best = «-»state", &format!("expected {A_TERM}, found `-`"), "");
    fails("best = 1 «best» = 2", &format!("expected {more}, found `best`"), "");
    fails("best = 1 «'x'»", &format!("expected {more}, found 'x'"), "");
    fails("best = 1«)»", &format!("expected {more}, found `)`"), "");
    fails("(best = 1«»", "expected `and`, `or` or `)`, found the end", "");
    fails("best is «1»", "expected `null` or `not null`, found `1`", "");
    fails("best is not «in»", "expected `null`, found `in`", "");
    fails("best in «1»", "expected `(`, found `1`", "");
    fails("best in («)»", &format!("expected {A_TERM}, found `)`"), "");
    fails("best in (1 «2»)", "expected `,` or `)`, found `2`", "");
    fails("ends_at < now + «10»", "expected a duration such as `10m` or `1h30m`, found `10`", "");
    fails("ends_at < now - «best»", "expected a duration such as `10m` or `1h30m`, found `best`", "");
    fails("input.«=» 1", "expected a name behind `input.`, found `=`", "");
    fails("«rwo.»best = 1", "`rwo.` is not known", "write `row.NAME`, `input.NAME` or `claim.NAME`");
    fails("coalesce(«1», 2) = 1", "expected a column, found `1`", "");
    fails("coalesce(best«)» = 1", "expected `,`, found `)`", "");
    fails("coalesce(best, «state») = 1", "expected a literal, found `state`", "");
    fails("coalesce(best, 0 «=» 1", "expected `)`, found `=`", "");
    let compare = "expected a comparison (=, <>, <, <=, >, >=), `is` or `in`, found";
    fails("active«»", &format!("{compare} the end"), "a rule compares: `active = …`");
    fails("active «not» null", &format!("{compare} `not`"), "a rule compares: `active = …`");
    fails("best = «null»", "null cannot be compared", "ask `is null` or `is not null`");
    fails("best in (1, «null»)", "null cannot be compared", "ask `is null` or `is not null`");
}

#[test]
fn errors_of_names() {
    fails(
        "«opn_loans» < 3",
        "there is no column `opn_loans`",
        &format!("did you mean `open_loans`? {KNOWN}"),
    );
    fails("state = 'A' and best > «zzzzzz»", "there is no column `zzzzzz`", KNOWN);
    fails("«zzzzzz» is null", "there is no column `zzzzzz`", KNOWN);
    fails("«coalesce(zzzzzz, 1)» = 1", "there is no column `zzzzzz`", KNOWN);
    fails("best in (1, «zzzzzz»)", "there is no column `zzzzzz`", KNOWN);
    fails(
        "«amount» = 1",
        "there is no column `amount`",
        &format!("write `input.amount` for the input; {KNOWN}"),
    );
    fails("«tenant» = 'acme'", "there is no column `tenant`", KNOWN);
    let inputs = "the inputs are amount, at, word, count, tags, ratio";
    fails("best < «input.amout»", "there is no input `amout`", &format!("did you mean `amount`? {inputs}"));
    fails("«input.zzzzzz» is null", "there is no input `zzzzzz`", inputs);
    let error = Rule::parse("best < input.amount", &columns(), &[]).unwrap_err();
    assert_eq!(error.to_string(), "there is no input `amount`; there are no inputs here");
}

#[test]
fn errors_of_types() {
    fails("best = «'x'»", "`'x'` is text, but `best` is int", "");
    fails("«1.5» < best", "`1.5` is float, but `best` is int", "");
    fails("best = «state»", "`state` is text, but `best` is int", "");
    fails("best < «now»", "`now` is time, but `best` is int", "");
    fails("state = «input.amount»", "`input.amount` is int, but `state` is text", "");
    fails("best = «input.ratio»", "`input.ratio` is float, but `best` is int", "");
    fails("best = «input.word»", "`input.word` is text, but `best` is int", "");
    fails("state = «input.count»", "`input.count` is int, but `state` is text", "");
    fails("input.amount = «'x'»", "`'x'` is text, but `input.amount` is int", "");
    fails("best in (1, «'x'»)", "`'x'` is text, but `best` is int", "");
    fails("claim.role in ('a', «1»)", "`1` is int, but `'a'` is text", "");
    fails("state in («input.tags»)", "`input.tags` is not a single value, so it cannot be compared", "");
    fails("ends_at < «'soon'»", "'soon' is not a time", "write it as '2026-01-31T12:00:00Z'");
    fails("«coalesce(ends_at, 'soon')» < now", "'soon' is not a time", "write it as '2026-01-31T12:00:00Z'");
    fails("«coalesce(best, 'x')» < 1", "`'x'` is text, but `best` is int", "");
    fails("«doc» = 'x'", "`doc` is json, which has no order", "only `is null` can be asked of it");
    let (constants, name) = ("compares constants with each other", "name a column, an input or a claim");
    fails("«'a' = 'b'»", constants, name);
    fails("best = 1 and «1 in (1, 2)»", constants, name);
    fails("«now» is null", "`now` is never null", "ask a column, an input or a claim");
    fails("«now» in (1)", "`now` cannot be looked for in a list", "compare it with each value");
    let list = "a list has literals, inputs and claims; text is in single quotes";
    fails("best in (1, «open_loans»)", "`open_loans` cannot be in a list", list);
    let far = "`now + 36601d` moves the clock by more than a century";
    fails("ends_at < «now + 36601d»", far, "");
    let error = parse("price < 1e126").unwrap_err();
    assert_eq!(error.span, Some(8..13));
    assert!(error.title.contains("a float must be zero or have a magnitude"), "{error}");
}

#[test]
fn errors_of_size() {
    let many = vec!["best = 1"; GUARD_LEAVES_MAX].join(" or ");
    assert!(parse(&many).is_ok());
    fails(&format!("{many} or «best = 2»"), "the rule has more than 50 comparisons", "");
    let built = (0..=GUARD_LEAVES_MAX).fold(Rule::always(), |rule, _| rule.and(is_null("best")));
    let error = built.checked(&columns(), &[]).unwrap_err();
    assert_eq!((error.span, error.title.as_str()), (None, "the rule has more than 50 comparisons"));

    let list = vec!["1"; IN_VALUES_MAX].join(", ");
    assert!(parse(&format!("best in ({list})")).is_ok());
    fails(&format!("«best in ({list}, 1)»"), "the list has 101 values; the limit is 100", "");

    let nested = |depth: usize| format!("{}best = 1{}", "(".repeat(depth), ")".repeat(depth));
    assert!(parse(&nested(32)).is_ok());
    let deep = "the rule is nested deeper than 32 levels";
    fails(&nested(33).replacen("(b", "«(»b", 1), deep, "");
    fails(&format!("{}«not» {}best = 1", "not ".repeat(32), "not ".repeat(100_000)), deep, "");
}

#[test]
fn errors_of_built_rules_name_the_term() {
    let fails = |rule: Rule, title: &str| {
        assert_eq!(rule.checked(&columns(), &inputs()).unwrap_err().title, title);
    };
    fails(col("zzzzzz").eq(1), "there is no column `zzzzzz`");
    fails(col("id").eq(key(1)), "`key[1]` is int, but `id` is text");
    fails(col("id").eq(key(2)), "the key has 2 parts, so there is no `key[2]`");
    fails(col("best").eq(Value::Null), "null cannot be compared");
    fails(coalesce("best", Value::Null).eq(1), "null cannot be compared");
    fails(col("best").eq(json!([1])), "`'[1]'` is json, but `best` is int");
}

#[test]
fn callers_name_visible_columns_only() {
    let visible = columns().visible();
    assert!(parse("reserve <= 5").is_ok());
    let error = Rule::parse("reserve <= 5", &visible, &[]).unwrap_err();
    assert_eq!(error.title, "there is no column `reserve`");
    assert!(!error.advice.unwrap().contains("reserve"), "a hidden name is not listed");

    let def = TableSpec::named("t").partition("id", Type::Text).int("best").int("reserve").hidden().build();
    let columns = RuleColumns::from(&*def.unwrap());
    assert!(Rule::parse("reserve <= best", &columns, &[]).is_ok());
    assert!(Rule::parse("reserve <= best", &columns.visible(), &[]).is_err());
}

#[test]
fn errors_become_problems_at_the_place_in_the_file() {
    let text = "bst < 3";
    let error = parse(text).unwrap_err();
    let place = |file: &str| {
        let value = file.find(['"', '\'']).unwrap()..file.len();
        let mut problems = Problems::of("statehouse.toml", file);
        problems.add(error.problem(file, value, text));
        problems.to_json()[0]["column"].as_u64().unwrap()
    };
    assert_eq!(place("if = \"bst < 3\""), 7);
    assert_eq!(place("if = '''bst < 3'''"), 9);
    assert_eq!(place("if = \"b\\u0073t < 3\""), 6, "the whole value, if it is written with escapes");
}

fn bound(text: &str, inputs: Json, claims: Json) -> Guard {
    let (inputs, claims) = (untyped(&object(inputs)), object(claims));
    parse(text).unwrap().bind(&RuleValues {
        inputs: Some(&inputs),
        claims: Some(&claims),
        ..RuleValues::default()
    })
}

#[test]
fn binding_gives_guards_that_a_plan_accepts() {
    let rule = "(best is null or best < input.amount) and state in ('A', claim.groups) and ends_at > now";
    let guard = bound(rule, json!({"amount": 5}), json!({"groups": ["x", "y", "x"]}));
    assert_eq!(
        guard.to_string(),
        "(best is null or best < 5) and state in ('A', 'x', 'y') and ends_at > now"
    );
    for text in [rule, "state not in (claim.groups)", "claim.role = 'a' or best = 1", "price < input.amount"]
    {
        for claims in [json!({}), json!({"groups": ["x"], "role": "a"}), json!({"groups": [1], "role": []})] {
            for inputs in [json!({}), json!({"amount": 5}), json!({"amount": i64::MAX})] {
                let step =
                    Step::update(&table(), ["m".into(), 1.into()]).guard(bound(text, inputs, claims.clone()));
                Plan::of(&Tenant::new("acme").unwrap(), "op").step(step.set("best", 1)).build().unwrap();
            }
        }
    }
}

#[test]
fn what_is_missing_or_mistyped_does_not_hold_and_neither_does_its_negation() {
    let never = Guard::never();
    for text in ["best < input.amount", "best in (input.amount)", "input.amount > 0", "input.amount in (1)"] {
        for inputs in [json!({}), json!({"amount": null}), json!({"amount": "x"})] {
            assert_eq!(bound(text, inputs.clone(), json!({})), never, "{text} {inputs}");
            assert_eq!(bound(&format!("not ({text})"), inputs.clone(), json!({})), never, "{text} {inputs}");
        }
    }
    assert_eq!(bound("state not in ('A', claim.groups)", json!({}), json!({})), never);
    assert_eq!(bound("state not in (claim.groups)", json!({}), json!({"groups": ["x", 1]})), never);
    assert_eq!(bound("state in ('A', claim.groups)", json!({}), json!({})), guard::is_in("state", ["A"]));
}

#[test]
fn rules_of_the_call_alone_are_decided_when_they_are_bound() {
    let claims = json!({"role": "admin", "groups": ["a", "b"], "level": 3});
    let decided = |text: &str| {
        let guard = bound(text, json!({"amount": 5}), claims.clone());
        assert!(guard == Guard::always() || guard == Guard::never(), "{text}: {guard}");
        guard == Guard::always()
    };
    assert!(decided("claim.role = 'admin'"));
    assert!(!decided("claim.role <> 'admin'"));
    assert!(decided("claim.role in ('admin', 'staff')"));
    assert!(decided("'b' in (claim.groups)"));
    assert!(!decided("'c' in (claim.groups)"));
    assert!(decided("'c' not in (claim.groups)"));
    assert!(decided("claim.level >= 3 and input.amount < 6"));
    assert!(decided("claim.role is not null and claim.nothing is null and input.at is null"));
    assert!(decided("claim.role = 'admin' or best = 1"), "one alternative is enough");
    assert!(!decided("claim.role = 'user' and best = 1"), "one conjunct is enough");
    assert_eq!(bound("claim.role = 'admin' and best = 1", json!({}), claims.clone()).to_string(), "best = 1");
}

#[test]
fn lists_of_claims_may_be_empty_or_long() {
    let groups = |count: usize| json!({"groups": (0..count).map(|n| format!("g{n}")).collect::<Vec<_>>()});
    assert_eq!(bound("state in (claim.groups)", json!({}), groups(0)), Guard::never());
    assert_eq!(bound("state not in (claim.groups)", json!({}), groups(0)), guard::is_set("state"));
    let holds = |text: &str, state: &str| {
        let guard = bound(text, json!({}), groups(250));
        let step = Step::update(&table(), ["m".into(), 1.into()]).guard(guard.clone()).set("best", 1);
        Plan::of(&Tenant::new("acme").unwrap(), "op").step(step).build().unwrap();
        statehouse_store::eval::holds(&guard, &row(&[("state", state.into())]), Time::from_micros(0))
    };
    assert!(holds("state in (claim.groups)", "g249") && !holds("state in (claim.groups)", "g250"));
    assert!(holds("state not in (claim.groups)", "g250") && !holds("state not in (claim.groups)", "g249"));
}

#[test]
fn keys_and_bound_values_come_from_the_library() {
    let rule = col("id").eq(key(0)).and(col("best").ge(bind("floor"))).checked(&columns(), &[]).unwrap();
    let (key, binds) = ([Value::from("m1"), Value::from(2)], [("floor", Value::from(3))]);
    let values = RuleValues { key: &key, binds: &binds, ..RuleValues::default() };
    assert_eq!(rule.bind(&values).to_string(), "id = 'm1' and best >= 3");
    assert_eq!(rule.bind(&RuleValues::default()), Guard::never());
    assert_eq!(rule.to_string(), "id = key[0] and best >= bind.floor");
}

#[test]
fn the_leaf_that_fails_is_named_with_what_it_sees() {
    let (inputs, claims) = (object(json!({"amount": 5})), object(json!({"groups": ["a"]})));
    let inputs = untyped(&inputs);
    let values = RuleValues { inputs: Some(&inputs), claims: Some(&claims), ..RuleValues::default() };
    let now = Time::from_micros(1_000_000);
    let row = row(&[
        ("open_loans", 5.into()),
        ("best", 7.into()),
        ("state", "x".repeat(100).into()),
        ("reserve", 99.into()),
        ("ends_at", Time::from_micros(0).into()),
    ]);
    let check = |text: &str, expect: &str| {
        let failure = parse(text).unwrap().failure(&values, &row, now);
        assert_eq!(failure.map(|failure| failure.to_string()).unwrap_or_default(), expect, "{text}");
    };
    check("open_loans < 6", "");
    check("open_loans < 3", "open_loans < 3 does not hold: open_loans is 5");
    check("best = 7 and open_loans < 3 and best = 8", "open_loans < 3 does not hold: open_loans is 5");
    check(
        "best is null or best < input.amount",
        "best is null does not hold: best is 7; \
         best < input.amount does not hold: best is 7, input.amount is 5",
    );
    check("best < input.count", "best < input.count does not hold: best is 7, input.count is null");
    check(
        "ends_at > now + 1s",
        "ends_at > now + 1s does not hold: ends_at is '1970-01-01T00:00:00.000000Z', \
         now + 1s is '1970-01-01T00:00:02.000000Z'",
    );
    check("reserve <= input.amount", "reserve <= input.amount does not hold: input.amount is 5");
    check("'b' in (claim.groups)", "'b' in (claim.groups) does not hold: claim.groups is '[\"a\"]'");
    check("input.amount is null", "input.amount is null does not hold: input.amount is '5'");
    check("version = 8", "version = 8 does not hold: version is 7");
    check("state = 'y'", &format!("state = 'y' does not hold: state is '{}…", "x".repeat(79)));
    check("coalesce(price, 1.0) > 1", "coalesce(price, 1.0) > 1.0 does not hold: price is null");
    check("best = 7 and false", "false does not hold");
}

#[test]
fn what_a_rule_reads_is_known() {
    let read = |text: &str| {
        let rule = parse(text).unwrap();
        (rule.reads_clock(), rule.rule().columns().join(" "))
    };
    assert_eq!(read("best = 1 and coalesce(best, 1) = open_loans"), (false, "best open_loans".into()));
    assert_eq!(read("best = 1 or ends_at < now"), (true, "best ends_at".into()));
    assert_eq!(read("claim.role = 'a'"), (false, String::new()));
    assert_eq!(col("best").compare(Comparison::Le, 1).to_string(), "best <= 1");
}
