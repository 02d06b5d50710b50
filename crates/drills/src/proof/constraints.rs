//! Constraints on fields: what callers give is checked before the plan, what the engine computes by its guard.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Blueprint, Code, Refusal};
use statehouse_store::Value;
use tokio::task::JoinHandle;

use super::constraints;
use crate::conformance::{Case, cases};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    constraints {
        inputs_keep_their_constraints(3),
        increments_stay_in_range(3),
        racing_increments_stay_in_range(3),
        increments_of_hot_fields_stay_in_range(4),
        computed_sums_stay_in_range(3),
        an_immutable_field_keeps_what_it_was_created_with(3),
        the_server_makes_keys_and_times(3),
        bad_constraints_are_reported_at_their_line(1),
    }
};

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.tool]
key    = { id = "int" }
created_at = true
require_version = false
hot    = ["views"]

[entity.tool.fields]
name     = { type = "text", max_length = 8 }
category = { type = "text", enum = ["hand", "power"], default = "hand" }
code     = { type = "text?", pattern = "[A-Z]{2}-[0-9]+", immutable = true }
stock    = { type = "int", min = 0, max = 10, default = 0 }
price    = { type = "float?", min = 0.5 }
level    = { type = "int?", enum = [1, 2, 4] }
views    = { type = "int", min = 0, max = 3, default = 1 }

[entity.note]
key    = { id = "uuid7" }
fields = { body = "text" }
"#;

const ONE: &[Value] = &[Value::Int(1)];

async fn tool(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    client
        .done("tool.create", &[], json!({"id": 1, "name": "saw", "code": "AB-1", "stock": 2}), None)
        .await?;
    Ok(client)
}

async fn inputs_keep_their_constraints(namespace: &dyn TestNamespace) -> Result<()> {
    let client = tool(namespace).await?;
    let bad = [
        ("name", json!("ninechars"), "it has 9 characters; the limit is 8"),
        ("category", json!("foot"), "it must be one of hand, power"),
        ("stock", json!(-1), "it must be from 0 to 10"),
        ("stock", json!(11), "it must be from 0 to 10"),
        ("price", json!(0.25), "it must be at least 0.5"),
        ("level", json!(3), "it must be one of 1, 2, 4"),
    ];
    for (name, value, why) in &bad {
        let whole = json!({"id": 2, "name": "saw", *name: value});
        let told = |refusal: Refusal| refusal.field_errors.first().map(|error| error.detail.clone());
        let refusal = client.refused("tool.create", &[], whole, None, Code::InvalidInput).await?;
        same("a create", &told(refusal).as_deref(), &Some(*why))?;
        let part = json!({*name: value});
        let refusal = client.refused("tool.patch", ONE, part.clone(), None, Code::InvalidInput).await?;
        same("a patch", &told(refusal).as_deref(), &Some(*why))?;
        client.refused("tool.mutate", ONE, json!({"set": part}), None, Code::InvalidInput).await?;
    }
    let code = json!({"id": 2, "name": "saw", "code": "AB-"});
    client.refused("tool.create", &[], code, None, Code::InvalidInput).await?;
    client.refused("tool.read", &[2.into()], json!({}), None, Code::NotFound).await?;
    // Characters are counted, not bytes.
    let good = json!({"name": "éééééééé", "category": "power", "stock": 10, "price": 0.5, "level": 4});
    let patched = client.done("tool.patch", ONE, good.clone(), None).await?;
    shows(&patched, &good)
}

fn add(name: &str, amount: impl Into<Json>) -> Json {
    json!({"increment": {name: amount.into()}})
}

async fn increments_stay_in_range(namespace: &dyn TestNamespace) -> Result<()> {
    let client = tool(namespace).await?;
    let refusal = client.refused("tool.mutate", ONE, add("stock", -3), None, Code::OutOfRange).await?;
    let expected = "tool 1: the new stock would be out of range: it must be from 0 to 10, and stock is 2";
    same("the message", &refusal.message.as_str(), &expected)?;
    same("the version", &refusal.current_version, &Some(1))?;
    client.done("tool.mutate", ONE, add("stock", -2), None).await?;
    client.refused("tool.mutate", ONE, add("stock", 11), None, Code::OutOfRange).await?;
    client.done("tool.mutate", ONE, add("stock", 10), None).await?;
    client.refused("tool.mutate", ONE, add("stock", i64::MIN), None, Code::OutOfRange).await?;
    client.refused("tool.mutate", ONE, add("stock", i64::MAX), None, Code::OutOfRange).await?;
    client.shows("tool", ONE, &json!({"stock": 10, "version": 3})).await
}

/// Sixteen buyers of the last two pieces.
async fn racing_increments_stay_in_range(namespace: &dyn TestNamespace) -> Result<()> {
    let client = tool(namespace).await?;
    let buyers: Vec<JoinHandle<_>> =
        (0..16).map(|_| client.start("tool.mutate", ONE, add("stock", -1), None)).collect();
    let mut sold = 0;
    for buyer in buyers {
        match buyer.await? {
            Ok(_) => sold += 1,
            Err(refusal) => same("the refusal", &refusal.code, &Code::OutOfRange)?,
        }
    }
    same("sold", &sold, &2)?;
    client.shows("tool", ONE, &json!({"stock": 0, "version": 3})).await
}

async fn increments_of_hot_fields_stay_in_range(namespace: &dyn TestNamespace) -> Result<()> {
    let client = tool(namespace).await?;
    // There is no row of the hot fields yet: the default counts.
    for amount in [3, -2] {
        client.refused("tool.mutate", ONE, add("views", amount), None, Code::OutOfRange).await?;
    }
    client.done("tool.mutate", ONE, add("views", 2), None).await?;
    client.refused("tool.mutate", ONE, add("views", 1), None, Code::OutOfRange).await?;
    client.done("tool.mutate", ONE, add("views", -3), None).await?;
    for amount in [-1, -3] {
        client.refused("tool.mutate", ONE, add("views", amount), None, Code::OutOfRange).await?;
    }
    // What would be out of range for a first row need not be so for this one.
    client.done("tool.mutate", ONE, add("views", 3), None).await?;
    client.refused("tool.mutate", ONE, add("views", 3), None, Code::OutOfRange).await?;
    client.shows("tool", ONE, &json!({"views": 3, "version": 1})).await
}

async fn computed_sums_stay_in_range(namespace: &dyn TestNamespace) -> Result<()> {
    let client = tool(namespace).await?;
    client.done("tool.patch", ONE, json!({"price": 1.0, "level": 1}), None).await?;
    client.refused("tool.mutate", ONE, add("price", -0.75), None, Code::OutOfRange).await?;
    client.done("tool.mutate", ONE, add("price", -0.5), None).await?;
    client.refused("tool.mutate", ONE, add("level", 2), None, Code::OutOfRange).await?;
    client.done("tool.mutate", ONE, add("level", 1), None).await?;
    let both = json!({"set": {"name": "axe"}, "increment": {"stock": -3}});
    client.refused("tool.mutate", ONE, both, None, Code::OutOfRange).await?;
    let under_version = add("stock", 9);
    client.refused("tool.mutate", ONE, under_version, Some(4), Code::OutOfRange).await?;
    client.shows("tool", ONE, &json!({"price": 0.5, "level": 2, "stock": 2, "version": 4})).await
}

async fn an_immutable_field_keeps_what_it_was_created_with(namespace: &dyn TestNamespace) -> Result<()> {
    let client = tool(namespace).await?;
    let other = |code: Json| json!({"name": "axe", "code": code});
    for version in [None, Some(1)] {
        for code in [json!("AB-2"), Json::Null] {
            for action in ["tool.update", "tool.patch"] {
                let refusal =
                    client.refused(action, ONE, other(code.clone()), version, Code::InvalidInput).await?;
                let pointer = refusal.field_errors.first().map(|error| error.pointer.as_str());
                same("the place", &pointer, &Some("/code"))?;
            }
            let set = json!({"set": {"code": code}});
            client.refused("tool.mutate", ONE, set, version, Code::InvalidInput).await?;
        }
    }
    // A replacement may repeat it or leave it out.
    client.done("tool.update", ONE, other("AB-1".into()), Some(1)).await?;
    client.done("tool.update", ONE, json!({"name": "adze"}), Some(2)).await?;
    client.done("tool.patch", ONE, other("AB-1".into()), None).await?;
    client.shows("tool", ONE, &json!({"name": "axe", "code": "AB-1", "version": 4})).await
}

async fn the_server_makes_keys_and_times(namespace: &dyn TestNamespace) -> Result<()> {
    let client = tool(namespace).await?;
    let body = || json!({"body": "x"});
    let first = client.call_as("note", "note.create", &[], body(), None).await?;
    let again = client.call_as("note", "note.create", &[], body(), None).await?;
    same("a repetition", &again.created, &first.created)?;
    let second = client.done("note.create", &[], body(), None).await?;
    ensure!(second.created != first.created, "two notes have one key");
    let id = first.created.clone().unwrap_or_default();
    ensure!(id.len() == 36, "{id} is not a UUID");
    client.shows("note", &[id.as_str().into()], &json!({"id": id, "body": "x"})).await?;
    // A caller may choose the key.
    let own = client.done("note.create", &[], json!({"id": "mine", "body": "x"}), None).await?;
    same("the key", &own.created.as_deref(), &Some("mine"))?;
    client.refused("note.create", &[], json!({"id": "mine", "body": "x"}), None, Code::AlreadyExists).await?;
    let times = client.shown("tool", ONE, &["created_at", "updated_at"]).await?;
    ensure!(times[0].is_string() && times[0] == times[1], "{times:?}");
    client.done("tool.patch", ONE, json!({"name": "axe"}), None).await?;
    same("created_at", &client.shown("tool", ONE, &["created_at"]).await?[0], &times[0])
}

async fn bad_constraints_are_reported_at_their_line(_: &dyn TestNamespace) -> Result<()> {
    let bad = [
        ("n = { type = 'int', min = 3, max = 2 }", "`min` of `n` is greater than its `max`"),
        ("n = { type = 'int', min = 'x' }", "`min` of `n` is not int"),
        ("n = { type = 'int', max = 2, default = 3 }", "the default of `n` violates its constraint"),
        ("n = { type = 'text', enum = ['a'], default = 'b' }", "it must be one of a"),
        ("n = { type = 'text', min = 1 }", "`min` of `n` is for int, float, time, not for text"),
        ("n = { type = 'int', pattern = 'x' }", "`pattern` of `n` is for text, not for int"),
        ("n = { type = 'text', pattern = '(' }", "is not a regular expression"),
        ("n = { type = 'text', max_length = 0 }", "must be at least 1"),
        ("n = { type = 'text', enum = [] }", "must be a list of text"),
        ("n = { type = 'int', mn = 1 }", "did you mean `min`?"),
        ("n = 'uuid7'", "only the key of an entity can"),
        ("if = 'int'", "cannot be a field"),
    ];
    for (field, expected) in bad {
        let text = format!("[entity.thing]\nkey = {{ id = 'int' }}\nfields = {{ {field} }}\n");
        problem_at(&text, 3, expected)?;
    }
    problem_at(
        "[thread.post]\nparent = { on = 'int' }\nfields = { n = { type = 'int', immutable = true } }\n",
        3,
        "only fields of an entity can",
    )?;
    problem_at("[lease.desk]\nkey = { id = 'uuid7' }\n", 2, "callers name these rows")?;
    let hot = "[entity.thing]\nkey = { id = 'int' }\nhot = ['n']\nfields = { n = { type = 'float?', min = 1.0 } }\n";
    problem_at(hot, 4, "cannot be kept")
}

/// Requires the blueprint to be refused with this problem at this line.
pub(super) fn problem_at(text: &str, line: usize, expected: &str) -> Result<()> {
    let read = Blueprint::read("statehouse.toml", text);
    let problems = read.and_then(|blueprint| statehouse::resource::declare(&blueprint).map(drop)).err();
    let rendered = problems.map(|problems| problems.render(false)).unwrap_or_default();
    ensure!(rendered.contains(expected), "{text}: expected {expected:?}, got {rendered}");
    ensure!(rendered.contains(&format!("statehouse.toml:{line}:")), "{text}: not at line {line}: {rendered}");
    Ok(())
}
