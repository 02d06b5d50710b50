//! What is wrong with a declaration is said where it stands.

use crate::Blueprint;
use crate::resource;

const GOOD: &str = r#"[effect.mail]
url = "https://mail.example/"
[schedule.label]
[workflow.order]
key     = { order_id = "text" }
fields  = { total = "int", payment = "text?" }
initial = "PLACED"
final   = ["DONE"]
[workflow.order.on]
pay  = { from = "PLACED", to = "PAID", set = ["payment"], send = { mail = { to = "{payment}" } } }
done = { from = "PAID", to = "DONE", if = "total < 10", enqueue = { label = "{order_id}" } }
late = { from = "PAID", to = "DONE", after = "1h" }
"#;

fn problems(text: &str) -> String {
    let blueprint = match Blueprint::read("statehouse.toml", text) {
        Ok(blueprint) => blueprint,
        Err(problems) => return problems.render(false),
    };
    resource::declare(&blueprint).err().map_or(String::new(), |problems| problems.render(false))
}

fn warnings(text: &str) -> String {
    let blueprint = Blueprint::read("statehouse.toml", text).unwrap();
    let mut found = blueprint.problems();
    let resources = resource::declare(&blueprint).unwrap();
    resources.iter().flat_map(|one| &one.warnings).for_each(|one| found.add(one.clone()));
    found.render(false)
}

/// One change of the good declaration, what is said of it, and in which line.
fn check(from: &str, to: &str, said: &str, line: usize) {
    assert!(GOOD.contains(from), "{from}");
    let rendered = problems(&GOOD.replacen(from, to, 1));
    assert!(rendered.contains(said), "{from} → {to}: expected {said:?} in\n{rendered}");
    assert!(
        rendered.contains(&format!("statehouse.toml:{line}:")),
        "{from} → {to}: line {line} in\n{rendered}"
    );
}

#[test]
fn a_good_declaration_has_no_problems_and_no_warnings() {
    assert_eq!(problems(GOOD), "");
    assert_eq!(warnings(GOOD), "");
}

#[test]
fn states_are_reported_where_they_are_named() {
    check("from = \"PLACED\", to", "from = \"PLACD\", to", "did you mean PLACED?", 10);
    check("final   = [\"DONE\"]", "final   = [\"DNE\"]", "there is no state `DNE`", 8);
    check("initial = \"PLACED\"", "initial = \"\"", "cannot be the name of a state", 7);
    check("initial = \"PLACED\"", "", "there is no `initial`", 4);
    check(
        "from = \"PAID\", to = \"DONE\", after",
        "from = \"x.*\", to = \"DONE\", after",
        "there is no state `x.*`",
        12,
    );
    check("late = {", "lone = { from = \"GONE\", to = \"GONE\" }\nlate = {", "no row can reach GONE", 12);
    check("from = \"PLACED\", to = \"PAID\",", "to = \"PAID\",", "`pay` has no `from`", 10);
}

#[test]
fn timers_are_reported_where_they_are_set() {
    check("after = \"1h\"", "after = \"soon\"", "cannot be the time of a state", 12);
    check("after = \"1h\"", "after = \"1h\", if = \"total < 1\"", "cannot have `if`", 12);
    check(
        "late = {",
        "more = { from = \"PAID\", to = \"DONE\", after = \"2h\" }\nlate = {",
        "left by two timers",
        13,
    );
    let circle = "to = \"PAID\", after = \"0s\"";
    check("to = \"DONE\", after = \"1h\"", circle, "timers without a pause lead from PAID to PAID", 12);
}

#[test]
fn names_and_templates_are_checked() {
    check("send = { mail", "send = { mial", "there is no effect `mial`", 10);
    check("enqueue = { label", "enqueue = { mail", "there is no schedule `mail`", 11);
    check("to = \"{payment}\"", "to = \"{paymnt}\"", "did you mean {payment}?", 10);
    check("set = [\"payment\"]", "set = [\"paid\"]", "there is no field `paid`", 10);
    check("if = \"total < 10\"", "if = \"totl < 10\"", "totl", 11);
    check("if = \"total < 10\"", "if = \"total < claim.n\"", "not about claims", 11);
    check("done = {", "read = {", "every workflow has `read` already", 11);
    check("done = {", "Done = {", "cannot be the name of a transition", 11);
    check("after = \"1h\"", "afer = \"1h\"", "did you mean `after`?", 12);
    check("total = \"int\"", "reason = \"int\"", "`reason` is an input of every transition", 6);
    check("if = \"total < 10\",", "scope = \"write\",", "cannot be the scope", 11);
}

#[test]
fn states_of_an_older_definition_become_known_ones() {
    let moved = |line: &str| format!("{GOOD}[workflow.order.moved]\n{line}\n");
    assert_eq!(problems(&moved("WAITING = \"PLACED\"")), "");
    assert!(problems(&moved("WAITING = \"PLACD\"")).contains("did you mean PLACED?"));
    assert!(problems(&moved("PAID = \"PLACED\"")).contains("PAID is a state of this definition"));
}

#[test]
fn what_is_probably_not_meant_is_a_warning() {
    let trap = warnings(&GOOD.replace("final   = [\"DONE\"]", ""));
    assert!(trap.contains("warning") && trap.contains("rows stay in DONE for ever"), "{trap}");
    let left = warnings(&GOOD.replace("final   = [\"DONE\"]", "final   = [\"DONE\", \"PAID\"]"));
    assert!(left.contains("PAID is final, and `done` leaves it"), "{left}");
}
