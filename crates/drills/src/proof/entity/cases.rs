//! A01 Current-value entity: what each action does and refuses, and what many callers at once may not break.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Expected, Operation, Refusal, lock};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::guard::{now, now_plus};
use statehouse_store::{Commit, ManualClock, Reason, Step, SystemClock, Time, Value};
use tokio::task::JoinHandle;

use super::allow::{a_rule_holds_for_the_row_that_is_written, rules_decide_who_does_what};
use super::cases as entity;
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Meanwhile, StoreProxy};
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    entity {
        a_row_lives_its_life(3),
        a_create_is_done_once_under_its_id(3),
        a_second_create_is_refused(3),
        retries_get_the_first_answer(3),
        reads_see_what_was_acknowledged(3),
        cached_reads_see_the_callers_own_writes(3),
        a_stale_version_is_told_the_current_one(3),
        a_plan_is_bound_to_the_version_that_was_read(4),
        of_many_updates_under_one_version_one_wins(3),
        a_write_that_changes_nothing_writes_nothing(3),
        mutations_set_count_and_append(3),
        increments_are_never_lost(3),
        computed_mutations_lose_nothing(3),
        hot_fields_leave_the_version_alone(4),
        a_deleted_row_accepts_no_write(4),
        lists_are_paged_by_status_newest_first(3),
        a_batch_over_two_resources_is_all_or_nothing(6),
        tenants_are_apart(4),
        locked_mutations_take_turns(4),
        a_crashed_holders_lock_runs_out(4),
        other_writes_wait_for_a_lock(4),
        a_lost_lock_changes_nothing(4),
        no_lock_is_left_behind(4),
        a_batch_takes_locks_in_one_order(6),
        locked_mutations_survive_lost_answers(4),
        a_lock_that_was_lost_is_not_given_back_for_others(4),
        a_row_with_a_lock_is_guarded_like_any_other(4),
        a_row_that_is_gone_is_not_made_up(4),
        a_rule_holds_for_the_row_that_is_written(4),
        rules_decide_who_does_what(4),
    }
};

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text", bio = "text?", points = { type = "int", default = 0 }, tags = "json?", views = { type = "int", default = 0 }, seen = "json?" }
hot    = ["views", "seen"]

[entity.account]
key    = { owner = "text", number = "int" }
fields = { balance = { type = "int", default = 0 }, history = "json?", note = "text?" }
mutate = "pessimistic"
"#;

const LOCKS: &str = "accounts_lock";

fn one() -> [Value; 1] {
    [1.into()]
}

fn account(number: i64) -> [Value; 2] {
    ["ann".into(), number.into()]
}

/// A house with the profile 1.
async fn profile(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    client.done("profile.create", &[], json!({"user_id": 1, "display_name": "Ann"}), None).await?;
    Ok(client)
}

async fn open_account(client: &TenantClient, number: i64) -> Result<()> {
    client.done("account.create", &[], json!({"owner": "ann", "number": number}), None).await?;
    Ok(())
}

/// A clock that stands until the case moves it.
fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(1_800_000_000_000))
}

async fn a_row_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let created =
        client.done("profile.create", &[], json!({"user_id": 1, "display_name": "Ann"}), None).await?;
    same("version and key", &(created.version, created.created.as_deref()), &(Some(1), Some("1")))?;
    shows(&created, &json!({"user_id": 1, "bio": null, "points": 0, "status": "ACTIVE"}))?;
    let updated =
        client.done("profile.update", &one(), json!({"display_name": "Anna", "bio": "x"}), Some(1)).await?;
    shows(&updated, &json!({"version": 2, "display_name": "Anna", "bio": "x", "points": 0}))?;
    let patched = client.done("profile.patch", &one(), json!({"bio": null}), Some(2)).await?;
    shows(&patched, &json!({"version": 3, "display_name": "Anna", "bio": null}))?;
    let deleted = client.done("profile.delete", &one(), json!({}), Some(3)).await?;
    shows(&deleted, &json!({"version": 4, "status": "DELETED"}))?;
    client.refused("profile.read", &one(), json!({}), None, Code::Deleted).await?;
    client.refused("profile.delete", &one(), json!({}), None, Code::Deleted).await?;
    let restored = client.done("profile.restore", &one(), json!({}), None).await?;
    shows(&restored, &json!({"version": 5, "status": "ACTIVE", "display_name": "Anna"}))?;
    for version in [None, Some(5)] {
        client.refused("profile.restore", &one(), json!({}), version, Code::NotDeleted).await?;
    }
    let names = client.events(5).await?;
    let expected =
        ["created", "updated", "updated", "deleted", "restored"].map(|what| format!("profile.{what}"));
    same("the events", &names, &expected.to_vec())
}

async fn a_create_is_done_once_under_its_id(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let input = || json!({"user_id": 1, "display_name": "Ann"});
    // All at once, as an impatient client does; then once more, when the row has moved on.
    let calls: Vec<JoinHandle<Result<Answer, Refusal>>> = (0..4)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.call_as("signup", "profile.create", &[], input(), None).await })
        })
        .collect();
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await??.body);
    }
    client.done("profile.patch", &one(), json!({"bio": "x"}), Some(1)).await?;
    answers.push(client.call_as("signup", "profile.create", &[], input(), None).await?.body);
    ensure!(answers.windows(2).all(|pair| pair[0] == pair[1]), "the answers differ: {answers:?}");
    let other = json!({"user_id": 2, "display_name": "Bob"});
    let reused = client.call_as("signup", "profile.create", &[], other, None).await;
    same("another request", &reused.err().map(|refusal| refusal.code), &Some(Code::OperationReused))?;
    client.store_client()?.exact_log(2).await?;
    Ok(())
}

async fn a_second_create_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    client.done("profile.patch", &one(), json!({"bio": "x"}), Some(1)).await?;
    let again = json!({"user_id": 1, "display_name": "Bob"});
    let refusal = client.refused("profile.create", &[], again, None, Code::AlreadyExists).await?;
    same("the version", &refusal.current_version, &Some(2))?;
    client.shows("profile", &one(), &json!({"display_name": "Ann", "version": 2})).await
}

async fn retries_get_the_first_answer(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    let calls = [
        ("profile.update", json!({"display_name": "Anna"}), Some(1)),
        ("profile.patch", json!({"bio": "x"}), Some(2)),
        ("profile.mutate", json!({"increment": {"points": 3}}), None),
        ("profile.mutate", json!({"set": {"bio": "y"}, "append": {"tags": "t"}}), None),
        ("profile.delete", json!({}), Some(5)),
    ];
    let mut answers = Vec::new();
    for (number, (action, input, version)) in calls.iter().enumerate() {
        let id = format!("op-{number}");
        answers.push(client.call_as(&id, action, &one(), input.clone(), *version).await?);
    }
    // By now each of them would be refused, if it were judged anew.
    for (number, (action, input, version)) in calls.into_iter().enumerate() {
        let repeated = client.call_as(&format!("op-{number}"), action, &one(), input, version).await?;
        same(action, &repeated.body, &answers[number].body)?;
    }
    client.store_client()?.exact_log(6).await?;
    Ok(())
}

async fn reads_see_what_was_acknowledged(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    for version in 1..6 {
        client.done("profile.patch", &one(), json!({"bio": version.to_string()}), Some(version)).await?;
        let expected = json!({"version": version + 1, "bio": version.to_string()});
        client.shows("profile", &one(), &expected).await?;
    }
    client.refused("profile.read", &[2.into()], json!({}), None, Code::NotFound).await?;
    Ok(())
}

async fn cached_reads_see_the_callers_own_writes(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    client.house.start_followers();
    for version in 1..8 {
        let written =
            client.done("profile.patch", &one(), json!({"bio": version.to_string()}), Some(version)).await?;
        let token = written.token.context("a write has no token")?;
        let cached = json!({"consistency": "cached", "after": token});
        let read = client.done("profile.read", &one(), cached, None).await?;
        shows(&read, &json!({"version": version + 1, "bio": version.to_string()}))?;
        // Without the token an older version may be shown, never one that there was not.
        let read = client.done("profile.read", &one(), json!({"consistency": "cached"}), None).await?;
        ensure!(read.version <= Some(version + 1), "a version from the future: {}", read.body);
    }
    // In the end everybody sees the last one, token or not.
    for _ in 0..1_000 {
        let read = client.done("profile.read", &one(), json!({"consistency": "cached"}), None).await?;
        if read.version == Some(8) && client.house.cache().figures().hits > 0 {
            return Ok(());
        }
        pause().await;
    }
    anyhow::bail!("the cache never answered with the last version: {:?}", client.house.cache())
}

async fn a_stale_version_is_told_the_current_one(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    client.done("profile.patch", &one(), json!({"bio": "x"}), Some(1)).await?;
    for (action, input) in [
        ("profile.update", json!({"display_name": "Bob"})),
        ("profile.patch", json!({"display_name": "Bob"})),
        ("profile.mutate", json!({"set": {"display_name": "Bob"}})),
        ("profile.mutate", json!({"increment": {"views": 1}})),
        ("profile.delete", json!({})),
    ] {
        for stale in [1, 3] {
            let refusal =
                client.refused(action, &one(), input.clone(), Some(stale), Code::VersionConflict).await?;
            same(action, &refusal.current_version, &Some(2))?;
        }
    }
    client
        .refused("profile.update", &one(), json!({"display_name": "B"}), None, Code::VersionRequired)
        .await?;
    client.refused("profile.patch", &[2.into()], json!({"bio": "y"}), Some(1), Code::NotFound).await?;
    client.shows("profile", &one(), &json!({"display_name": "Ann", "bio": "x", "views": 0})).await
}

async fn a_plan_is_bound_to_the_version_that_was_read(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    let calls = [
        ("profile.update", json!({"display_name": "Bob"}), Some(Expected::Any)),
        ("profile.patch", json!({"display_name": "Bob"}), Some(Expected::Any)),
        ("profile.mutate", json!({"set": {"display_name": "Bob"}}), None),
        ("profile.mutate", json!({"append": {"tags": "b"}, "increment": {"points": 1}}), None),
        ("profile.mutate", json!({"append": {"seen": "b"}}), None),
    ];
    client.done("profile.mutate", &one(), json!({"append": {"seen": "a"}}), None).await?;
    for (number, (action, input, expected)) in calls.into_iter().enumerate() {
        let request = TenantClient::request(action, &one(), &input, expected);
        let plan = client.house.plan(&client.tenant, request).await?.context("there is nothing to write")?;
        // Between the reading and the writing another caller changes the row and the hot row.
        let bio = json!({"set": {"bio": number.to_string()}});
        client.done("profile.mutate", &one(), bio, None).await?;
        client.done("profile.mutate", &one(), json!({"append": {"seen": number}}), None).await?;
        let outcome = client.house.store().commit(&plan).await?;
        ensure!(
            matches!(&outcome, Commit::Refused(refused) if matches!(refused.reason, Reason::Guard { .. })),
            "{action} {input} was written over what it had not read: {outcome:?}"
        );
    }
    client
        .shows("profile", &one(), &json!({"display_name": "Ann", "points": 0, "tags": null, "bio": "4"}))
        .await
}

async fn of_many_updates_under_one_version_one_wins(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    for round in 1..4 {
        let calls: Vec<JoinHandle<Result<Answer, Refusal>>> = (0..6)
            .map(|caller| {
                let (client, input) = (client.clone(), json!({"bio": format!("{round}-{caller}")}));
                tokio::spawn(async move { client.call("profile.patch", &one(), input, Some(round)).await })
            })
            .collect();
        let mut winners = Vec::new();
        for call in calls {
            match call.await? {
                Ok(answer) => winners.push(answer.body["bio"].clone()),
                Err(refusal) => {
                    let told = (refusal.code, refusal.current_version);
                    same("a loser", &told, &(Code::VersionConflict, Some(round + 1)))?;
                }
            }
        }
        same("winners", &winners.len(), &1)?;
        client.shows("profile", &one(), &json!({"bio": winners[0], "version": round + 1})).await?;
    }
    Ok(())
}

async fn a_write_that_changes_nothing_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    open_account(&client, 1).await?;
    let key = account(1);
    for (action, key, input) in [
        ("profile.patch", &one()[..], json!({"display_name": "Ann"})),
        ("profile.patch", &one()[..], json!({})),
        ("profile.update", &one()[..], json!({"display_name": "Ann"})),
        ("profile.mutate", &one()[..], json!({"set": {"display_name": "Ann", "bio": null}})),
        ("profile.mutate", &one()[..], json!({"increment": {"points": 0}})),
        ("account.mutate", &key[..], json!({"set": {"balance": 0}})),
    ] {
        let version = (!action.starts_with("account")).then_some(1);
        let answer = client.done(action, key, input, version).await?;
        same(action, &answer.version, &Some(1))?;
    }
    client.store_client()?.exact_log(2).await?;
    client.shows("profile", &one(), &json!({"version": 1})).await?;
    client.shows("account", &account(1), &json!({"version": 1})).await
}

async fn mutations_set_count_and_append(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    let counted = client.done("profile.mutate", &one(), json!({"increment": {"points": 5}}), None).await?;
    shows(&counted, &json!({"version": 2, "points": 5}))?;
    let all = json!({"set": {"bio": "b"}, "increment": {"points": -2}, "append": {"tags": {"a": 1}}});
    let mixed = client.done("profile.mutate", &one(), all, None).await?;
    shows(&mixed, &json!({"version": 3, "bio": "b", "points": 3, "tags": [{"a": 1}]}))?;
    let under = json!({"append": {"tags": "x"}});
    shows(&client.done("profile.mutate", &one(), under, Some(3)).await?, &json!({"tags": [{"a": 1}, "x"]}))?;
    for (input, code) in [
        (json!({"increment": {"points": i64::MAX}}), Code::OutOfRange),
        (json!({"increment": {"points": i64::MAX}, "set": {"bio": "c"}}), Code::OutOfRange),
        (json!({}), Code::InvalidInput),
        (json!({"set": {"points": 1}, "increment": {"points": 1}}), Code::InvalidInput),
        (json!({"increment": {"views": 1, "points": 1}}), Code::InvalidInput),
    ] {
        client.refused("profile.mutate", &one(), input, None, code).await?;
    }
    client.refused("profile.mutate", &[2.into()], json!({"set": {"bio": "x"}}), None, Code::NotFound).await?;
    client.shows("profile", &one(), &json!({"version": 4, "bio": "b", "points": 3})).await
}

/// Several callers call an action again and again; one that was told that others were faster asks once more.
async fn crowd(
    client: &TenantClient,
    callers: usize,
    calls: usize,
    action: &'static str,
    key: &[Value],
    input: impl Fn(String) -> Json,
) -> Result<usize> {
    let tasks: Vec<JoinHandle<Result<usize, Refusal>>> = (0..callers)
        .map(|caller| {
            let (client, key) = (client.clone(), key.to_vec());
            let inputs: Vec<Json> = (0..calls).map(|call| input(format!("{caller}-{call}"))).collect();
            tokio::spawn(async move {
                let mut contended = 0;
                for input in inputs {
                    loop {
                        match client.call(action, &key, input.clone(), None).await {
                            Ok(_) => break,
                            Err(refusal) if refusal.code == Code::Contended => contended += 1,
                            Err(refusal) => return Err(refusal),
                        }
                    }
                }
                Ok(contended)
            })
        })
        .collect();
    let mut contended = 0;
    for task in tasks {
        contended += task.await??;
    }
    Ok(contended)
}

async fn increments_are_never_lost(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    let input = |_| json!({"increment": {"points": 1}});
    let contended = crowd(&client, 4, 8, "profile.mutate", &one(), input).await?;
    same("callers that were sent away", &contended, &0)?;
    client.shows("profile", &one(), &json!({"points": 32, "version": 33})).await
}

async fn computed_mutations_lose_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    let input = |name: String| json!({"increment": {"points": 1}, "append": {"tags": name}});
    crowd(&client, 3, 5, "profile.mutate", &one(), input).await?;
    has_all_of(&client.shown("profile", &one(), &["points", "tags", "version"]).await?, 3, 5)
}

/// A number, a list of names and a version that `callers` with `calls` each have brought about.
fn has_all_of(shown: &[Json], callers: usize, calls: usize) -> Result<()> {
    let mut names: Vec<&str> = shown[1].as_array().into_iter().flatten().filter_map(Json::as_str).collect();
    names.sort_unstable();
    let mut expected: Vec<String> =
        (0..callers).flat_map(|caller| (0..calls).map(move |call| format!("{caller}-{call}"))).collect();
    expected.sort_unstable();
    same("the names", &names, &expected.iter().map(String::as_str).collect())?;
    same("the number", &shown[0], &json!(callers * calls))?;
    same("the version", &shown[2], &json!(callers * calls + 1))
}

async fn hot_fields_leave_the_version_alone(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    // Together they make the row of the hot fields, which does not exist yet.
    let key = one();
    let counting = crowd(&client, 2, 5, "profile.mutate", &key, |_| json!({"increment": {"views": 2}}));
    let appending = crowd(&client, 2, 4, "profile.mutate", &key, |name| json!({"append": {"seen": name}}));
    let (counted, appended) = tokio::join!(counting, appending);
    counted?;
    appended?;
    let counted = client.done("profile.mutate", &one(), json!({"increment": {"views": 1}}), Some(1)).await?;
    // The hot row's own version must not be taken for the one that editors hold.
    same("the version of an answer", &(counted.version, counted.body.get("version")), &(None, None))?;
    let shown = client.shown("profile", &one(), &["views", "version", "seen"]).await?;
    same("views and version", &shown[..2].to_vec(), &vec![json!(21), json!(1)])?;
    same("the list", &shown[2].as_array().map(Vec::len), &Some(8))?;
    // What an editor read before is still what is there.
    client.done("profile.patch", &one(), json!({"bio": "x"}), Some(1)).await?;
    for version in [None, Some(1)] {
        let view = json!({"increment": {"views": 1}});
        client.refused("profile.mutate", &[2.into()], view, version, Code::NotFound).await?;
    }
    Ok(())
}

async fn a_deleted_row_accepts_no_write(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    open_account(&client, 1).await?;
    client.done("profile.delete", &one(), json!({}), None).await?;
    client.done("account.delete", &account(1), json!({}), None).await?;
    for (action, input, version) in [
        ("profile.update", json!({"display_name": "B"}), Some(2)),
        ("profile.patch", json!({"bio": "b"}), Some(2)),
        ("profile.mutate", json!({"increment": {"points": 1}}), None),
        ("profile.mutate", json!({"set": {"bio": "b"}}), None),
        ("profile.mutate", json!({"increment": {"views": 1}}), None),
        ("profile.mutate", json!({"increment": {"views": 1}}), Some(2)),
        ("profile.delete", json!({}), None),
        ("profile.delete", json!({}), Some(2)),
    ] {
        let refusal = client.refused(action, &one(), input, version, Code::Deleted).await?;
        same(action, &refusal.current_version, &Some(2))?;
    }
    for version in [1, 3] {
        client.refused("profile.restore", &one(), json!({}), Some(version), Code::VersionConflict).await?;
    }
    client.refused("account.mutate", &account(1), json!({"set": {"note": "x"}}), None, Code::Deleted).await?;
    let again = json!({"user_id": 1, "display_name": "Ann"});
    client.refused("profile.create", &[], again, None, Code::AlreadyExists).await?;
    // A delete and an update that meet: one of them sees the other.
    let key = one();
    for round in 0..4 {
        let version = 2 * round + 3;
        client.done("profile.restore", &one(), json!({}), None).await?;
        let patch = client.call("profile.patch", &key, json!({"bio": round.to_string()}), Some(version));
        let delete = client.call("profile.delete", &key, json!({}), Some(version));
        let (patched, deleted) = tokio::join!(patch, delete);
        same("winners", &(u8::from(patched.is_ok()) + u8::from(deleted.is_ok())), &1)?;
        if patched.is_ok() {
            client.done("profile.delete", &one(), json!({}), Some(version + 1)).await?;
            client.done("profile.restore", &one(), json!({}), None).await?;
            break;
        }
    }
    Ok(())
}

async fn lists_are_paged_by_status_newest_first(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    for user in 0..7 {
        clock.advance(Duration::from_secs(1));
        client.done("profile.create", &[], json!({"user_id": user, "display_name": "x"}), None).await?;
    }
    clock.advance(Duration::from_secs(1));
    client.done("profile.delete", &[3.into()], json!({}), None).await?;
    client.done("profile.patch", &[0.into()], json!({"bio": "x"}), Some(1)).await?;
    listed(&client, json!({"limit": 2}), &[0, 6, 5, 4, 2, 1]).await?;
    listed(&client, json!({"status": "DELETED"}), &[3]).await?;
    client.refused("profile.list", &[], json!({"cursor": "nonsense"}), None, Code::InvalidInput).await?;
    Ok(())
}

/// Requires all pages of a list together to hold these users, once the index has caught up.
async fn listed(client: &TenantClient, input: Json, expected: &[i64]) -> Result<()> {
    let mut seen = Vec::new();
    for _ in 0..1_000 {
        seen.clear();
        let mut input = input.clone();
        loop {
            let page = client.done("profile.list", &[], input.clone(), None).await?;
            let rows = page.body.as_array().into_iter().flatten();
            seen.extend(rows.filter_map(|row| row["user_id"].as_i64()));
            let Some(next) = page.next else { break };
            input["cursor"] = next.into();
        }
        if seen == expected {
            return Ok(());
        }
        pause().await;
    }
    anyhow::bail!("expected the list {input} to be {expected:?}, it is {seen:?}")
}

async fn a_batch_over_two_resources_is_all_or_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    open_account(&client, 1).await?;
    let key = account(1);
    let patch = |version| {
        let input = json!({"display_name": "Anna"});
        TenantClient::request("profile.patch", &one(), &input, Some(Expected::Version(version)))
    };
    let pay = || TenantClient::request("account.mutate", &key, &json!({"increment": {"balance": 5}}), None);
    let note = || TenantClient::request("account.mutate", &key, &json!({"set": {"note": "paid"}}), None);
    let batch = |id: &str, requests| {
        let operation = Operation { id: Some(id.to_owned()), fingerprint: id.to_owned() };
        client.house.batch(&client.tenant, requests, operation)
    };
    let refused = batch("first", vec![pay(), patch(9)]).await;
    let told = refused.err().map(|refusal| (refusal.call, refusal.code));
    same("the refused call", &told, &Some((Some(1), Code::VersionConflict)))?;
    client.shows("account", &key, &json!({"balance": 0, "version": 1})).await?;
    // Also where one of them holds a lock: it is given back.
    let refused = batch("second", vec![note(), patch(9)]).await;
    same("the refused call", &refused.err().map(|refusal| refusal.call), &Some(Some(1)))?;
    client.shows("account", &key, &json!({"note": null, "version": 1})).await?;
    let answers = batch("third", vec![note(), patch(1)]).await?;
    client.shows("account", &key, &json!({"note": "paid", "version": 2})).await?;
    client.shows("profile", &one(), &json!({"display_name": "Anna", "version": 2})).await?;
    let repeated = batch("third", vec![note(), patch(1)]).await?;
    let bodies = |answers: &[Answer]| answers.iter().map(|answer| answer.body.clone()).collect::<Vec<_>>();
    same("the repetition", &bodies(&repeated), &bodies(&answers))?;
    let twice = batch("fourth", vec![pay(), pay()]).await;
    let told = twice.err().map(|refusal| refusal.code);
    same("a row twice in a batch", &told, &Some(Code::InvalidInput))?;
    let mut told: Vec<String> = Vec::new();
    for record in whole_log(client.house.store().as_ref()).await? {
        told.extend(record.events.into_iter().map(|event| event.name));
    }
    told.sort();
    let expected = ["account.created", "account.updated", "profile.created", "profile.updated"];
    same("what is told", &told, &expected.map(str::to_owned).to_vec())
}

async fn tenants_are_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let client = profile(namespace).await?;
    let stranger = client.for_tenant("acme.")?;
    for (action, input, version) in [
        ("profile.read", json!({}), None),
        ("profile.patch", json!({"bio": "x"}), Some(1)),
        ("profile.mutate", json!({"increment": {"points": 1}}), None),
        ("profile.mutate", json!({"increment": {"views": 1}}), None),
        ("profile.delete", json!({}), None),
        ("profile.restore", json!({}), None),
    ] {
        stranger.refused(action, &one(), input, version, Code::NotFound).await?;
    }
    stranger.done("profile.create", &[], json!({"user_id": 1, "display_name": "Other"}), None).await?;
    stranger.done("profile.patch", &one(), json!({"bio": "x"}), Some(1)).await?;
    client.shows("profile", &one(), &json!({"display_name": "Ann", "version": 1})).await?;
    listed(&stranger, json!({}), &[1]).await?;
    // One operation id of two tenants is two operations.
    for (number, tenant) in [&client, &stranger].into_iter().enumerate() {
        open_account(tenant, 1).await?;
        let input = json!({"set": {"note": number.to_string()}});
        tenant.call_as("note", "account.mutate", &account(1), input, None).await?;
        tenant.shows("account", &account(1), &json!({"note": number.to_string(), "version": 2})).await?;
    }
    Ok(())
}

async fn locked_mutations_take_turns(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    open_account(&client, 1).await?;
    let (key, input) =
        (account(1), |name: String| json!({"increment": {"balance": 1}, "append": {"history": name}}));
    let contended = crowd(&client, 4, 5, "account.mutate", &key, input).await?;
    same("callers that were sent away", &contended, &0)?;
    has_all_of(&client.shown("account", &key, &["balance", "history", "version"]).await?, 4, 5)?;
    client.store_client()?.exact_log(21).await?;
    Ok(())
}

/// Takes the lock of an account for a holder that will not release it.
async fn hold(client: &TenantClient, number: i64, holder: &str) -> Result<()> {
    let store_client = client.store_client()?;
    let lock = Step::upsert(client.table(LOCKS)?, account(number))
        .set("held_by", holder)
        .set("held_until", now_plus(lock::TERM));
    store_client.apply(store_client.one(lock)).await?;
    Ok(())
}

/// Lets time pass until a call is done.
pub(crate) async fn outcome<T>(
    clock: &ManualClock,
    call: JoinHandle<Result<T, Refusal>>,
) -> Result<Result<T, Refusal>> {
    for _ in 0..3_000 {
        if call.is_finished() {
            return Ok(call.await?);
        }
        pause().await;
        clock.advance(Duration::from_millis(40));
    }
    anyhow::bail!("a call waits for ever")
}

async fn a_crashed_holders_lock_runs_out(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    open_account(&client, 1).await?;
    hold(&client, 1, "crashed").await?;
    let held = client.store_client()?.row(client.table(LOCKS)?, account(1)).await?;
    let until = held.time("held_until").context("the lock has no end")?;
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.call("account.mutate", &account(1), json!({"set": {"note": "x"}}), None).await }
    });
    let answer = outcome(&clock, call).await??;
    let row = client.store_client()?.row(client.table("accounts")?, account(1)).await?;
    ensure!(row.time("updated_at") >= Some(until), "{} was written before the lock ran out", answer.body);
    // The operation that holds a lock is let in at once: it is the holder, come back after a crash.
    open_account(&client, 2).await?;
    hold(&client, 2, "retried").await?;
    let input = json!({"set": {"note": "y"}});
    let answer = client.call_as("retried", "account.mutate", &account(2), input, None).await?;
    shows(&answer, &json!({"note": "y", "version": 2}))
}

async fn other_writes_wait_for_a_lock(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let calls = [
        ("account.update", json!({"note": "u"}), Some(1)),
        ("account.patch", json!({"note": "p"}), Some(1)),
        ("account.mutate", json!({"increment": {"balance": 1}}), None),
        ("account.mutate", json!({"set": {"note": "m"}}), Some(1)),
        ("account.delete", json!({}), None),
    ];
    for (number, (action, input, version)) in (1..).zip(calls) {
        open_account(&client, number).await?;
        hold(&client, number, "somebody").await?;
        let call = tokio::spawn({
            let client = client.clone();
            async move { client.call(action, &account(number), input, version).await }
        });
        // Its clock stands, so it cannot even look again.
        for _ in 0..5 {
            pause().await;
        }
        ensure!(!call.is_finished(), "{action} did not wait for the lock");
        let shown = client.shown("account", &account(number), &["version"]).await?;
        same(action, &shown, &vec![json!(1)])?;
        let store_client = client.store_client()?;
        let release = Step::update(client.table(LOCKS)?, account(number)).set("held_until", now());
        store_client.apply(store_client.one(release)).await?;
        shows(&outcome(&clock, call).await??, &json!({"version": 2}))?;
    }
    // An editor who waited for a mutation is told what it did.
    open_account(&client, 9).await?;
    hold(&client, 9, "mutation").await?;
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.call("account.patch", &account(9), json!({"note": "late"}), Some(1)).await }
    });
    let input = json!({"set": {"note": "first"}});
    client.call_as("mutation", "account.mutate", &account(9), input, None).await?;
    let told = outcome(&clock, call).await?.err().map(|refusal| (refusal.code, refusal.current_version));
    same("the editor", &told, &Some((Code::VersionConflict, Some(2))))
}

async fn a_lost_lock_changes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let locks = client.table(LOCKS)?;
    // How often the lock was taken since the plan was made, how long ago, and whether the plan may then be applied.
    for (number, (taken, ago, applies)) in (1..).zip([
        (0, Duration::ZERO, false),
        (1, Duration::ZERO, true),
        (1, lock::TERM - Duration::from_micros(1), true),
        (1, lock::TERM, false),
        (2, Duration::ZERO, false),
    ]) {
        open_account(&client, number).await?;
        let request =
            TenantClient::request("account.mutate", &account(number), &json!({"set": {"note": "x"}}), None);
        let plan = client.house.plan(&client.tenant, request).await?.context("there is nothing to write")?;
        for holder in 0..taken {
            hold(&client, number, &holder.to_string()).await?;
        }
        clock.advance(ago);
        let applied = match client.house.store().commit(&plan).await? {
            Commit::Applied(_) => true,
            Commit::Refused(refused) => {
                let by_lock =
                    refused.reason == Reason::Absent || matches!(refused.reason, Reason::Guard { .. });
                ensure!(refused.step == 1 && by_lock, "not the lock was the reason: {refused:?}");
                false
            }
            Commit::Fenced => anyhow::bail!("no client fenced it"),
        };
        same(&format!("taken {taken} times, {ago:?} ago"), &applied, &applies)?;
        if applied {
            let lock = client.store_client()?.row(locks, account(number)).await?;
            ensure!(
                lock.time("held_until") <= Some(clock_time(&clock)),
                "the lock was not given back: {lock:?}"
            );
        }
    }
    Ok(())
}

fn clock_time(clock: &ManualClock) -> Time {
    statehouse_store::Clock::now(clock)
}

async fn no_lock_is_left_behind(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    open_account(&client, 1).await?;
    let out_of_range = json!({"increment": {"balance": i64::MAX}, "set": {"note": "x"}});
    for (input, code) in [
        (json!({"set": {"balance": 1}}), None),
        (json!({"set": {"balance": 1}}), None),
        (out_of_range, Some(Code::OutOfRange)),
        (json!({"append": {"history": "x"}}), None),
    ] {
        // The clock stands: a caller that had to wait for the one before would wait for ever.
        match code {
            None => drop(client.done("account.mutate", &account(1), input, None).await?),
            Some(code) => drop(client.refused("account.mutate", &account(1), input, None, code).await?),
        }
        let lock = client.store_client()?.row(client.table(LOCKS)?, account(1)).await?;
        ensure!(lock.time("held_until") <= Some(clock_time(&clock)), "the lock is still held: {lock:?}");
    }
    // What does not exist gets no lock either.
    client
        .refused("account.mutate", &account(2), json!({"set": {"note": "x"}}), None, Code::NotFound)
        .await?;
    let lock = client.store_client()?.find(client.table(LOCKS)?, account(2)).await?;
    same("a lock of nothing", &lock, &None)
}

async fn a_batch_takes_locks_in_one_order(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    open_account(&client, 1).await?;
    open_account(&client, 2).await?;
    // A caller that has to wait for the first lock does not hold the second meanwhile, however the calls are listed.
    hold(&client, 1, "somebody").await?;
    let batch = tokio::spawn({
        let client = client.clone();
        async move {
            let note = |number| {
                TenantClient::request(
                    "account.mutate",
                    &account(number),
                    &json!({"set": {"note": "x"}}),
                    None,
                )
            };
            let notes = vec![note(2), note(1)];
            client.house.batch(&client.tenant, notes, Operation::default()).await
        }
    });
    for _ in 0..5 {
        pause().await;
    }
    let second = client.store_client()?.find(client.table(LOCKS)?, account(2)).await?;
    same("the second lock while the first is waited for", &second, &None)?;
    outcome(&clock, batch).await??;
    // And with everybody at once, in both directions.
    let client = TenantClient::over(client.house.store().clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let transfer = |from: i64, to: i64, name: String| {
        let client = client.clone();
        tokio::spawn(async move {
            let part = |number, amount: i64| {
                let input = json!({"increment": {"balance": amount}, "append": {"history": name.as_str()}});
                TenantClient::request("account.mutate", &account(number), &input, None)
            };
            client.house.batch(&client.tenant, vec![part(from, -1), part(to, 1)], Operation::default()).await
        })
    };
    for round in 0..3 {
        let there: Vec<_> = (0..2).map(|call| transfer(1, 2, format!("{round}-{call}"))).collect();
        let back = transfer(2, 1, format!("{round}-back"));
        for call in there.into_iter().chain(std::iter::once(back)) {
            call.await??;
        }
    }
    for (number, balance) in [(1, -3), (2, 3)] {
        let shown = client.shown("account", &account(number), &["balance", "version", "history"]).await?;
        same("the account", &shown[..2].to_vec(), &vec![json!(balance), json!(11)])?;
        same("its history", &shown[2].as_array().map(Vec::len), &Some(9))?;
    }
    Ok(())
}

async fn locked_mutations_survive_lost_answers(namespace: &dyn TestNamespace) -> Result<()> {
    let inner = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(inner, Arc::new(SystemClock), Odds::default(), 11));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    open_account(&client, 1).await?;
    faulty.set_odds(Odds { unknown_before: 0.1, unknown_after: 0.2, unavailable: 0.05, ..Odds::default() });
    let callers: Vec<JoinHandle<Result<()>>> = (0..3)
        .map(|caller| {
            let client = client.clone();
            tokio::spawn(async move {
                for call in 0..5 {
                    let name = format!("{caller}-{call}");
                    let input = json!({"increment": {"balance": 1}, "append": {"history": name.as_str()}});
                    loop {
                        let answer =
                            client.call_as(&name, "account.mutate", &account(1), input.clone(), None).await;
                        match answer.map_err(|refusal| refusal.code) {
                            Ok(_) => break,
                            Err(Code::Unavailable | Code::OutcomeUnknown | Code::Contended) => {}
                            Err(code) => anyhow::bail!("{name} was refused: {code}"),
                        }
                    }
                }
                Ok(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after + achieved.unknown_before > 0, "nothing went wrong: {achieved}");
    faulty.set_odds(Odds::default());
    has_all_of(&client.shown("account", &account(1), &["balance", "history", "version"]).await?, 3, 5)
}

async fn a_row_with_a_lock_is_guarded_like_any_other(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    open_account(&client, 1).await?;
    let again = json!({"owner": "ann", "number": 1, "note": "again"});
    client.refused("account.create", &[], again, None, Code::AlreadyExists).await?;
    // What changes nothing writes nothing.
    for (action, input) in
        [("account.patch", json!({"balance": 0})), ("account.update", json!({"balance": 0}))]
    {
        let answer = client.done(action, &account(1), input, Some(1)).await?;
        same(action, &answer.version, &Some(1))?;
    }
    client.done("account.patch", &account(1), json!({"note": "a"}), Some(1)).await?;
    for action in ["account.update", "account.patch", "account.delete"] {
        let input = if action.ends_with("delete") { json!({}) } else { json!({"note": "b"}) };
        client.refused(action, &account(1), input, Some(1), Code::VersionConflict).await?;
    }
    client.done("account.delete", &account(1), json!({}), Some(2)).await?;
    for (action, input, version) in [
        ("account.update", json!({"note": "c"}), Some(3)),
        ("account.patch", json!({"note": "c"}), Some(3)),
        ("account.mutate", json!({"increment": {"balance": 1}}), None),
        ("account.mutate", json!({"set": {"note": "c"}}), None),
        ("account.delete", json!({}), None),
        ("account.delete", json!({}), Some(3)),
    ] {
        client.refused(action, &account(1), input, version, Code::Deleted).await?;
    }
    // A process that does not know of locks writes past them; the holder of a lock does not overwrite that.
    open_account(&client, 2).await?;
    let request =
        TenantClient::request("account.mutate", &account(2), &json!({"set": {"note": "mine"}}), None);
    let plan = client.house.plan(&client.tenant, request).await?.context("there is nothing to write")?;
    hold(&client, 2, "mine").await?;
    let (store_client, table) = (client.store_client()?, client.table("accounts")?);
    store_client.apply(store_client.one(Step::update(table, account(2)).set("note", "theirs"))).await?;
    let outcome = client.house.store().commit(&plan).await?;
    ensure!(matches!(outcome, Commit::Refused(_)), "it was written over what it had not read: {outcome:?}");
    // What is deleted gets no lock.
    let lock = client.store_client()?.find(client.table(LOCKS)?, account(1)).await?;
    same("the lock of a deleted row", &lock, &None)?;
    client.store_client()?.exact_log(4).await?;
    Ok(())
}

async fn a_lock_that_was_lost_is_not_given_back_for_others(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let meanwhile = Arc::new(Meanwhile::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), meanwhile.clone()));
    let (clock_of, client) =
        (Arc::new(clock.clone()), TenantClient::over(store, BLUEPRINT, Arc::new(clock.clone())).await?);
    let slow = TenantClient::over(slow, BLUEPRINT, clock_of).await?;
    open_account(&client, 1).await?;
    // Between the taking of the lock and the reading the caller is paused, for longer than its lock lasts.
    meanwhile.next({
        let (client, clock) = (client.clone(), clock.clone());
        async move {
            clock.advance(lock::TERM);
            // If this fails, the case finds another holder than it expects.
            let _ = hold(&client, 1, "somebody").await;
        }
    });
    let call = slow.start("account.mutate", &account(1), json!({"set": {"note": "late"}}), None);
    for _ in 0..10 {
        pause().await;
    }
    ensure!(!call.is_finished(), "it did not wait for the lock that it lost");
    let held = client.store_client()?.row(client.table(LOCKS)?, account(1)).await?;
    same("the holder", &held.text("held_by"), &Some("somebody"))?;
    ensure!(
        held.time("held_until") > Some(clock_time(&clock)),
        "another holder's lock was released: {held:?}"
    );
    client.shows("account", &account(1), &json!({"note": null, "version": 1})).await?;
    shows(&outcome(&clock, call).await??, &json!({"note": "late", "version": 2}))
}

async fn a_row_that_is_gone_is_not_made_up(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let (store_client, accounts) = (client.store_client()?, client.table("accounts")?.clone());
    let seen = Some(Expected::Version(1));
    for (number, (action, input, expected)) in (1..).zip([
        ("account.update", json!({"note": "u"}), seen),
        ("account.patch", json!({"note": "p"}), seen),
        ("account.mutate", json!({"increment": {"balance": 1}}), None),
        ("account.mutate", json!({"set": {"note": "m"}}), seen),
        ("account.delete", json!({}), None),
        ("account.delete", json!({}), seen),
    ]) {
        open_account(&client, number).await?;
        let plan = client.drafted(action, &account(number), input, expected).await?;
        // A program deletes it past the actions, which only mark what is deleted.
        store_client.apply(store_client.one(Step::delete(&accounts, account(number)))).await?;
        client.too_late(&plan).await?;
        same(action, &store_client.find(&accounts, account(number)).await?, &None)?;
    }
    Ok(())
}
