//! Conditions of callers (`if`): judged by the engine, with the write, alone and in batches that race.

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Operation, Refusal, Request};
use statehouse_store::Value;

use super::conditions;
use crate::conformance::{Case, cases};
use crate::harness::engines::TestNamespace;
use crate::harness::recorder::{Actor, acting};
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    conditions {
        a_condition_is_one_more_guard(3),
        a_failed_condition_names_the_current_value(3),
        a_condition_needs_a_row(3),
        a_condition_of_a_call_without_changes_is_judged(3),
        a_condition_on_a_transition_is_judged(3),
        bad_conditions_are_refused_before_anything_is_written(3),
        a_check_asserts_in_a_batch(6),
        a_check_and_a_write_of_one_row_are_one_step(3),
        racing_batches_keep_their_conditions(6),
        a_repeated_call_is_not_judged_again(3),
    }
};

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.member]
key    = { id = "int" }
fields = { name = "text", open_loans = { type = "int", default = 0 }, note = "text?" }
require_version = false

[entity.loan]
key    = { id = "int" }
fields = { member = "int" }

[lease.desk]
key = { id = "int" }
"#;

const ONE: &[Value] = &[Value::Int(1)];

async fn member(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    client.done("member.create", &[], json!({"id": 1, "name": "Ann"}), None).await?;
    Ok(client)
}

async fn batch(client: &TenantClient, calls: &[(&str, StaticKey, Json)]) -> Result<Vec<Answer>, Refusal> {
    let requests: Vec<Request> =
        calls.iter().map(|(action, key, input)| TenantClient::request(action, key, input, None)).collect();
    client.house.batch(&client.tenant, requests, Operation::default()).await
}

type StaticKey = &'static [Value];

/// An action, its input and version, conditions that fail, and one of the same form that holds.
type ConditionTrial = (&'static str, Json, Option<i64>, &'static [&'static str], &'static str);

/// Each condition is tried with constants with which it fails, and then with those with which it holds.
async fn a_condition_is_one_more_guard(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let change = |note: &str| json!({"note": note});
    let calls: [ConditionTrial; 7] = [
        ("member.patch", change("x"), None, &["open_loans = 1"], "open_loans = 0"),
        ("member.patch", change("y"), Some(2), &["open_loans = 1"], "open_loans = 0"),
        (
            "member.mutate",
            json!({"increment": {"open_loans": 2}}),
            None,
            &["open_loans < 0"],
            "open_loans < 1",
        ),
        (
            "member.mutate",
            json!({"set": {"note": "z"}}),
            None,
            &["open_loans >= 3 and note <> 'q'", "open_loans >= 2 and note <> 'y'"],
            "open_loans >= 2 and note <> 'q'",
        ),
        ("member.update", json!({"name": "Anna"}), Some(5), &["name = 'Bob'"], "name = 'Ann'"),
        ("member.delete", json!({}), None, &["version = 5", "not version = 6"], "version = 6"),
        ("member.restore", json!({}), None, &["status = 'ACTIVE'"], "status = 'DELETED'"),
    ];
    for (action, input, version, failing, holding) in calls {
        let with = |condition: &str| {
            let mut input = input.clone();
            input["if"] = condition.into();
            input
        };
        for condition in failing {
            client.refused(action, ONE, with(condition), version, Code::ConditionFailed).await?;
        }
        client.done(action, ONE, with(holding), version).await?;
    }
    client.shows("member", ONE, &json!({"name": "Anna", "note": null, "version": 8})).await?;
    // A comparison that touches null does not hold, and neither does its negation.
    for condition in ["note = 'x'", "note <> 'x'", "not note = 'x'"] {
        let input = json!({"if": condition});
        client.refused("member.delete", ONE, input, None, Code::ConditionFailed).await?;
    }
    Ok(())
}

async fn a_failed_condition_names_the_current_value(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    client.done("member.mutate", ONE, json!({"increment": {"open_loans": 5}}), None).await?;
    let input = json!({"note": "x", "if": "status = 'ACTIVE' and open_loans < 3"});
    let refusal = client.refused("member.patch", ONE, input, None, Code::ConditionFailed).await?;
    let expected = "member 1: open_loans < 3 does not hold: open_loans is 5";
    same("the message", &refusal.message.as_str(), &expected)?;
    same("the version", &refusal.current_version, &Some(2))?;
    // What the action itself demands comes first.
    let input = json!({"note": "x", "if": "open_loans < 3"});
    client.refused("member.patch", ONE, input, Some(1), Code::VersionConflict).await?;
    Ok(())
}

async fn a_condition_needs_a_row(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let two: &[Value] = &[2.into()];
    for action in ["member.patch", "member.mutate", "member.delete", "member.check"] {
        let input = match action {
            "member.patch" => json!({"note": "x", "if": "open_loans = 0"}),
            "member.mutate" => json!({"increment": {"open_loans": 1}, "if": "open_loans < 1"}),
            "member.delete" => json!({"if": "version = 1"}),
            _ => json!({"if": "open_loans = 0"}),
        };
        client.refused(action, two, input, None, Code::NotFound).await?;
    }
    // An action that would create the row does not.
    let acquire = json!({"holder": "ann", "if": "epoch = 0"});
    client.refused("desk.acquire", ONE, acquire, None, Code::NotFound).await?;
    client.refused("desk.read", ONE, json!({}), None, Code::NotFound).await?;
    let create = json!({"id": 2, "name": "Bob", "if": "open_loans = 0"});
    client.refused("member.create", &[], create, None, Code::InvalidInput).await?;
    client.done("member.delete", ONE, json!({}), None).await?;
    client.refused("member.check", ONE, json!({"if": "open_loans = 0"}), None, Code::Deleted).await?;
    Ok(())
}

async fn a_condition_of_a_call_without_changes_is_judged(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let same_name = |condition: &str| json!({"name": "Ann", "if": condition});
    for version in [None, Some(1)] {
        let answer = client.done("member.patch", ONE, same_name("open_loans = 0"), version).await?;
        shows(&answer, &json!({"version": 1, "name": "Ann"}))?;
        let input = same_name("open_loans = 1");
        client.refused("member.patch", ONE, input, version, Code::ConditionFailed).await?;
    }
    // The row that the call saw is the one that the condition is judged on.
    let expected = None;
    let plan = client.drafted("member.patch", ONE, same_name("open_loans = 0"), expected).await?;
    client.done("member.patch", ONE, json!({"name": "Bea"}), Some(1)).await?;
    let actor = Actor { archetype: "entity", name: "member.patch".into() };
    acting(actor, client.too_late(&plan)).await?;
    client.shows("member", ONE, &json!({"version": 2})).await
}

async fn a_condition_on_a_transition_is_judged(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let take = |condition: &str| json!({"holder": "ann", "duration_ms": 1, "if": condition});
    let give = |condition: &str| json!({"holder": "ann", "epoch": 1, "if": condition});
    client.done("desk.acquire", ONE, json!({"holder": "ann"}), None).await?;
    client.refused("desk.release", ONE, give("epoch = 9"), None, Code::ConditionFailed).await?;
    client.done("desk.release", ONE, give("epoch = 1"), None).await?;
    client.refused("desk.acquire", ONE, take("epoch = 9"), None, Code::ConditionFailed).await?;
    client.done("desk.acquire", ONE, take("epoch = 1"), None).await?;
    pause().await;
    client.done("desk.acquire", ONE, take("epoch = 2"), None).await?;
    client.shows("desk", ONE, &json!({"epoch": 3})).await
}

async fn bad_conditions_are_refused_before_anything_is_written(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let bad = [
        ("open_lons < 3", "open_loans"),
        ("open_loans <", "the end"),
        ("open_loans < 'x'", "int"),
        ("open_loans < input.max", "input"),
        ("claim.sub = 'ann'", "claim"),
        ("", "the end"),
    ];
    for (condition, expected) in bad {
        let input = json!({"note": "x", "if": condition});
        let refusal = client.refused("member.patch", ONE, input, None, Code::InvalidInput).await?;
        let error = refusal.field_errors.first().context("no place of the error")?;
        same("the place", &error.pointer.as_str(), &"/if")?;
        ensure!(error.detail.contains(expected), "`{condition}`: {}", error.detail);
    }
    // Columns that callers do not see do not exist for them.
    client.done("desk.acquire", ONE, json!({"holder": "ann"}), None).await?;
    let input = json!({"holder": "ann", "epoch": 1, "if": 3});
    client.refused("desk.release", ONE, input, None, Code::InvalidInput).await?;
    client.refused("member.read", ONE, json!({"if": "open_loans = 0"}), None, Code::InvalidInput).await?;
    client.shows("member", ONE, &json!({"version": 1})).await
}

async fn a_check_asserts_in_a_batch(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let check = |condition: &str| ("member.check", ONE, json!({"if": condition}));
    let lend = |id: i64| ("loan.create", &[] as StaticKey, json!({"id": id, "member": 1}));
    let answers = batch(&client, &[check("open_loans < 3"), lend(1)]).await?;
    same("the answer", &answers[0].body, &json!({"if": "open_loans < 3"}))?;
    client.done("member.mutate", ONE, json!({"increment": {"open_loans": 3}}), None).await?;
    let refused = batch(&client, &[lend(2), check("open_loans < 3")]).await;
    let refusal = refused.err().context("the check passed")?;
    same("the refusal", &(refusal.call, refusal.code), &(Some(1), Code::ConditionFailed))?;
    ensure!(refusal.message.contains("open_loans is 3"), "{}", refusal.message);
    client.refused("loan.read", &[2.into()], json!({}), None, Code::NotFound).await?;
    client.refused("member.check", ONE, json!({"if": "open_loans = 0"}), None, Code::ConditionFailed).await?;
    // Two checks of one row are one assertion, and each is told its own failure.
    let refused = batch(&client, &[check("open_loans >= 3"), lend(2), check("open_loans > 3")]).await;
    same("the second", &refused.err().and_then(|refusal| refusal.call), &Some(2))?;
    // It writes nothing.
    client.shows("member", ONE, &json!({"version": 2})).await
}

async fn a_check_and_a_write_of_one_row_are_one_step(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let check = |condition: &str| ("member.check", ONE, json!({"if": condition}));
    let count = |input: Json| ("member.mutate", ONE, input);
    let more = json!({"increment": {"open_loans": 1}});
    // All conditions are judged on the row as it is before the batch.
    let answers = batch(&client, &[check("open_loans = 0"), count(more.clone())]).await?;
    shows(&answers[1], &json!({"open_loans": 1, "version": 2}))?;
    batch(&client, &[count(more.clone()), check("open_loans = 1")]).await?;
    let refused = batch(&client, &[check("open_loans = 2"), count(more.clone()), check("note = 'x'")]).await;
    same("the refused check", &refused.err().and_then(|refusal| refusal.call), &Some(2))?;
    let strict = json!({"increment": {"open_loans": 1}, "if": "open_loans < 2"});
    let refused = batch(&client, &[check("open_loans = 2"), count(strict)]).await;
    same("the refused write", &refused.err().and_then(|refusal| refusal.call), &Some(1))?;
    let twice = batch(&client, &[count(more.clone()), count(more)]).await;
    same("two writes", &twice.err().map(|refusal| refusal.code), &Some(Code::InvalidInput))?;
    client.shows("member", ONE, &json!({"open_loans": 2, "version": 3})).await
}

/// At most three loans, however many callers lend at once.
async fn racing_batches_keep_their_conditions(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let lends: Vec<_> = (0..8_i64)
        .map(|id| {
            let client = client.clone();
            tokio::spawn(async move {
                let count = json!({"increment": {"open_loans": 1}, "if": "open_loans < 3"});
                let calls = [
                    ("loan.create", &[] as StaticKey, json!({"id": id, "member": 1})),
                    ("member.mutate", ONE, count),
                ];
                batch(&client, &calls).await
            })
        })
        .collect();
    let mut lent = 0;
    for lend in lends {
        match lend.await? {
            Ok(_) => lent += 1,
            Err(refusal) => {
                same("the refusal", &(refusal.call, refusal.code), &(Some(1), Code::ConditionFailed))?;
            }
        }
    }
    same("loans", &lent, &3)?;
    client.shows("member", ONE, &json!({"open_loans": 3, "version": 4})).await
}

async fn a_repeated_call_is_not_judged_again(namespace: &dyn TestNamespace) -> Result<()> {
    let client = member(namespace).await?;
    let input = || json!({"increment": {"open_loans": 1}, "if": "open_loans < 1"});
    let first = client.call_as("lend", "member.mutate", ONE, input(), None).await?;
    let again = client.call_as("lend", "member.mutate", ONE, input(), None).await?;
    same("the answer", &again.body, &first.body)?;
    let other = json!({"increment": {"open_loans": 1}, "if": "open_loans < 2"});
    let reused = client.call_as("lend", "member.mutate", ONE, other, None).await;
    same("another condition", &reused.err().map(|refusal| refusal.code), &Some(Code::OperationReused))?;
    let checked = client.call_as("seen", "member.check", ONE, json!({"if": "open_loans = 1"}), None).await?;
    client.done("member.mutate", ONE, json!({"increment": {"open_loans": 1}}), None).await?;
    let again = client.call_as("seen", "member.check", ONE, json!({"if": "open_loans = 1"}), None).await?;
    same("the check", &again.body, &checked.body)
}
