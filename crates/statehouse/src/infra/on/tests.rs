//! What is wrong with a reaction is said at its line when the blueprint is read.

use crate::resource::check;

const THINGS: &str = r#"
[entity.loan]
key    = { id = "int" }
fields = { email = "text?", days = "int", more = "json?" }
[entity.mail]
key    = { id = "text" }
fields = { to = "text", n = "int?" }
[timer.reminder]
key = { loan = "int" }
[schedule.task]
[view.loan_totals]
of = "loan"
"#;

/// The problems of a blueprint with these reactions.
fn problems(reactions: &str) -> String {
    match check("statehouse.toml", &format!("{THINGS}{reactions}")) {
        Ok(_) => String::new(),
        Err(problems) => problems.render(false),
    }
}

/// The line and the message of the only problem.
fn problem(reactions: &str) -> (u64, String) {
    let found = check("statehouse.toml", &format!("{THINGS}{reactions}")).unwrap_err().to_json();
    assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
    let line = found[0]["line"].as_u64().unwrap() - u64::try_from(THINGS.lines().count()).unwrap();
    let advice = found[0]["advice"].as_str().unwrap_or_default();
    (line, format!("{}; {advice}", found[0]["message"].as_str().unwrap()))
}

fn reaction(event: &str, action: &str, rest: &str) -> String {
    format!("[on.x]\nevent = \"{event}\"\ndo = \"{action}\"\n{rest}\n")
}

const MAIL: &str = "input = { id = \"{subject}\", to = \"{row.email}\" }";

#[test]
fn a_reaction_may_call_any_write_of_one_plan() {
    for text in [
        reaction("loan.created", "mail.create", MAIL),
        reaction("loan.created", "mail.create", &format!("{MAIL}\nwhen = \"days > 3\"\nfrom = \"start\"")),
        reaction("loan.updated", "loan.delete", "key = \"{subject}\"\nversion = \"{row.version}\""),
        reaction("loan.updated", "loan.delete", "input = { key = \"{key.id}\" }\nversion = \"any\""),
        reaction("reminder.fired", "reminder.cancel", "key = \"{subject}\""),
        reaction("task.failed", "task.enqueue", "input = { payload = { job = \"{row.job_id}\" } }"),
        reaction("loan.created", "reminder.set", "key = \"{key.id}\"\ninput = { after_ms = \"{row.days}\" }"),
    ] {
        assert_eq!(problems(&text), "", "{text}");
    }
}

#[test]
fn unknown_names_are_pointed_at() {
    let expect = |text: &str, line: u64, expected: &str| {
        let (at, said) = problem(text);
        assert!(at == line && said.contains(expected), "line {at}: {said}; expected line {line}: {expected}");
    };
    expect(&reaction("lone.created", "mail.create", MAIL), 2, "no resource `lone`; did you mean `loan`?");
    expect(&reaction("loan.creatd", "mail.create", MAIL), 2, "no event `creatd`; did you mean `created`?");
    expect(&reaction("loan_totals.created", "mail.create", MAIL), 2, "its rows follow from others");
    expect(&reaction("loan.created", "mial.create", MAIL), 3, "did you mean `mail`?");
    expect(&reaction("loan.created", "mail.creat", MAIL), 3, "did you mean `create`?");
    expect(&reaction("loan.created", "mail.read", "key = \"1\""), 3, "not a write of one plan");
    expect(&reaction("loan.created", "mail.create", "input = { id = \"1\" }"), 4, "needs the input `to`");
    let input = |input: &str| format!("input = {{ id = \"1\", {input} }}");
    let mail = |given: &str| reaction("loan.created", "mail.create", &input(given));
    expect(&mail("tu = \"a\", to = \"b\""), 4, "no input `tu`; did you mean `to`?");
    expect(&mail("to = \"{row.emial}\""), 4, "no column `emial`; did you mean `email`?");
    expect(&mail("to = \"{row.days.x}\""), 4, "`days` is int, which has no parts");
    expect(&mail("to = \"{key.ide}\""), 4, "has no `ide`; did you mean `id`?");
    expect(&mail("to = \"{rows.email}\""), 4, "names nothing; there are subject");
    expect(&mail("to = \"{row.email\""), 4, "has a brace by itself");
    expect(&mail("to = 3"), 4, "expected text");
    expect(&mail("to = \"b\", n = \"{at}\""), 4, "`n` takes int, and this is time");
    expect(&mail("to = \"b\", n = \"a {row.days}\""), 4, "`n` takes int, and this is text");
    let when = |rule: &str| reaction("loan.created", "mail.create", &format!("{MAIL}\nwhen = \"{rule}\""));
    expect(&when("day > 3"), 5, "did you mean `days`?");
    expect(&when("days > input.n"), 5, "n");
    expect(&reaction("loan.updated", "loan.delete", ""), 3, "needs the key of a row");
    expect(&reaction("loan.updated", "mail.create", &format!("{MAIL}\nkey = \"1\"")), 5, "names no row");
    expect(
        &reaction("loan.created", "mail.create", &format!("{MAIL}\nwehn = \"x\"")),
        5,
        "did you mean `when`?",
    );
    assert!(problems("[on.x]\n").contains("there is no `event`"));
}

#[test]
fn reactions_that_cause_themselves_are_refused() {
    let itself =
        reaction("loan.updated", "loan.mutate", "key = \"{subject}\"\ninput = { increment = { days = 1 } }");
    let (line, said) = problem(&itself);
    assert!(line == 3 && said.contains("causes itself, for ever: `on.x` → `on.x`"), "{line}: {said}");
    // A condition may end it.
    assert_eq!(problems(&format!("{itself}when = \"days < 3\"\n")), "");
    let two = "\
[on.a]
event = \"loan.created\"
do = \"mail.create\"
input = { id = \"{subject}\", to = \"x\" }
[on.b]
event = \"mail.created\"
do = \"loan.create\"
input = { id = 1, days = 1 }
";
    let said = problems(two);
    assert!(said.contains("`on.a` → `on.b` → `on.a`") && said.contains("`on.b` → `on.a` → `on.b`"), "{said}");
    assert_eq!(problems(&two.replace("mail.created", "mail.updated")), "");
}

#[test]
fn a_reaction_has_a_name_of_its_own() {
    let said = problems(&reaction("loan.created", "mail.create", MAIL).replace("on.x", "on.mail"));
    assert!(said.contains("the name `mail` is taken"), "{said}");
}
