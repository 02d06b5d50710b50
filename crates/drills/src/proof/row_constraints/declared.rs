//! Constraints that cannot be declared.

use anyhow::{Result, ensure};
use statehouse::Blueprint;

use crate::harness::engines::TestNamespace;

pub(super) async fn bad_row_constraints_are_reported_at_their_line(_: &dyn TestNamespace) -> Result<()> {
    let fields = [
        ("n = { type = 'float', unique = true }", "is float, which cannot be unique"),
        ("n = { type = 'json', unique = true }", "is json, which cannot be unique"),
        ("n = { type = 'int?', unique = true }, v = 'int?'\nhot = ['n']", "is hot, so it cannot be unique"),
        ("n = { type = 'int?', ref = 'thing' }, v = 'int?'\nhot = ['n']", "is hot, so it cannot refer"),
        ("n = { type = 'int', ref = 'thign' }", "did you mean \"thing\"?"),
        ("n = { type = 'text', ref = 'thing' }", "`n` is text, and the key `id` of `thing` is int"),
        ("n = { type = 'int', ref = 'pair' }", "has a key of several columns (a, b)"),
        ("n = { type = 'int', ref = 'desk' }", "declared by `lease`; a field can refer to an entity"),
        ("n = { type = 'int', ref = 'thing', on_delete = 'kep' }", "did you mean \"keep\"?"),
        ("n = { type = 'int', on_delete = 'keep' }", "needs a `ref`"),
    ];
    let others = "[entity.pair]\nkey = { a = 'int', b = 'int' }\n[lease.desk]\nkey = { id = 'int' }\n";
    for (field, expected) in fields {
        let (field, more) = field.split_once('\n').unwrap_or((field, ""));
        let thing = format!("[entity.thing]\nkey = {{ id = 'int' }}\nfields = {{ {field} }}\n{more}\n");
        problem_at(&format!("{thing}{others}"), 3, expected)?;
    }
    let unique = [
        ("slot = ['rom']", "did you mean \"room\"?"),
        ("slot = ['room', 'room']", "is listed twice"),
        ("slot = ['tags']", "is json, which cannot be unique"),
        ("slot = []", "names no field"),
        ("slot = 'room'", "expected a list of fields, not text"),
        ("slot = [1]", "expected the name of a field"),
        ("Slot = ['room']", "cannot be a name"),
        ("day = ['room']", "`day` is unique twice"),
    ];
    for (unique, expected) in unique {
        let thing = format!(
            "[entity.thing]\nkey = {{ id = 'int' }}\nunique = {{ {unique} }}\n[entity.thing.fields]\nroom = 'text'\n\
             tags = 'json?'\nday = {{ type = 'int', unique = true }}\n"
        );
        problem_at(&thing, 3, expected)?;
    }
    let key = "[entity.thing]\nkey = { id = { type = 'int', unique = true } }\n";
    problem_at(key, 2, "is part of the key")?;
    let other = "[booking.seat]\nkey = { show = 'int', seat = 'int' }\nfields = { n = { type = 'int', unique = true } }\n";
    problem_at(other, 3, "only fields of entities and threads can")?;
    let cycle = |optional: &str| {
        format!(
            "[entity.a]\nkey = {{ id = 'int' }}\nfields = {{ b = {{ type = 'int', ref = 'b' }} }}\n\
             [entity.b]\nkey = {{ id = 'int' }}\nfields = {{ a = {{ type = 'int{optional}', ref = 'a' }} }}\n"
        )
    };
    problem_at(&cycle(""), 3, "`a` refers to `b`, which refers back")?;
    problem_at(&cycle(""), 6, "`b` refers to `a`, which refers back")?;
    let blocked = "[entity.a]\nkey = { id = 'int' }\n\
         [entity.b]\nkey = { id = 'int' }\nfields = { a = { type = 'int', ref = 'a', on_delete = 'cascade' } }\n\
         [entity.c]\nkey = { id = 'int' }\nfields = { b = { type = 'int?', ref = 'b' } }\n";
    problem_at(blocked, 8, "`b` keeps a row of `b` from being deleted, which is deleted with its `a`")?;
    let can_be = Blueprint::read("statehouse.toml", &cycle("?"));
    let can_be = can_be.and_then(|blueprint| statehouse::resource::declare(&blueprint));
    ensure!(can_be.is_ok(), "a cycle with an optional field is refused");
    Ok(())
}

/// Requires the blueprint to be refused with this problem at this line.
fn problem_at(text: &str, line: usize, expected: &str) -> Result<()> {
    let read = Blueprint::read("statehouse.toml", text);
    let problems = read.and_then(|blueprint| statehouse::resource::declare(&blueprint).map(drop)).err();
    let rendered = problems.map(|problems| problems.render(false)).unwrap_or_default();
    ensure!(rendered.contains(expected), "{text}: expected {expected:?}, got {rendered}");
    ensure!(rendered.contains(&format!("statehouse.toml:{line}:")), "{text}: not at line {line}: {rendered}");
    Ok(())
}
