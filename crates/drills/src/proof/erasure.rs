//! Erasure: an erased row is gone from tables, log, answers and derived rows, and what else was written stays.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::erase::{ErasureBacklog, PersonErasure};
use statehouse::{Code, Operation, Request};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::guard::{now, now_plus};
use statehouse_store::{Scan, Step, SystemClock, Value};

use super::erasure;
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{pause, same, scan, whole_log};
use crate::harness::tenant_client::TenantClient;

pub(crate) const CASES: &[Case] = cases! {
    erasure {
        an_erased_row_is_nowhere(12),
        an_erased_child_is_nowhere(9),
        a_deleted_row_can_be_erased(8),
        an_erasure_releases_values_and_references(9),
        a_row_that_others_refer_to_is_not_erased(9),
        a_repetition_tells_nothing_of_an_erased_row(20),
        an_erasure_races_with_writes(9),
        an_erasure_races_with_hot_fields_and_locks(9),
        an_erased_child_is_taken_out_once(9),
        an_erasure_whose_answer_was_lost_is_done_once(9),
        a_row_that_is_created_again_lives_on(9),
        views_forget_erased_rows(12),
        a_scan_does_not_bring_an_erased_row_back(12),
        all_rows_of_a_person_are_erased(9),
        an_interrupted_pass_goes_on(9),
    }
};

/// What must not be found again.
const SECRET: &str = "ann@example.org";

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.member]
key = { id = "int" }
require_version = false
hot = ["visits", "note"]
mutate = "pessimistic"
person = "id"

[entity.member.fields]
email  = { type = "text?", unique = true }
points = { type = "int", default = 0 }
team   = { type = "text?" }
visits = "int?"
note   = "text?"

[entity.loan]
key = { id = "int" }
require_version = false
person = "member"

[entity.loan.fields]
member = { type = "int?", ref = "member" }
what   = "text?"

[thread.comment]
parent = { post_id = "int" }
fields = { author = "int?", body = "text?" }
require_version = false
buckets = 1
person = "author"

[view.teams]
of = "member"
group_by = ["team"]
sum = ["points"]
"#;

const ONE: &[Value] = &[Value::Int(1)];

fn comment(id: &str) -> [Value; 2] {
    [Value::Int(7), id.into()]
}

async fn open(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    TenantClient::open(namespace, BLUEPRINT).await
}

async fn with_member(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    let client = open(namespace).await?;
    create(&client, 1).await?;
    Ok(client)
}

async fn create(client: &TenantClient, id: i64) -> Result<()> {
    let input = json!({"id": id, "email": format!("{id}-{SECRET}"), "points": 5, "team": "red"});
    client.done("member.create", &[], input, None).await.map(drop)
}

async fn append(client: &TenantClient, id: &str, author: i64) -> Result<()> {
    let input = json!({"post_id": 7, "comment_id": id, "author": author, "body": SECRET});
    client.done("comment.append", &[], input, None).await.map(drop)
}

async fn erase(client: &TenantClient, action: &str, key: &[Value]) -> Result<()> {
    client.done(action, key, json!({}), None).await.map(drop)
}

/// Everything that the store has as text: the rows of all tables, and the log.
async fn everything(client: &TenantClient) -> Result<String> {
    let mut text = String::new();
    let store = client.house.store();
    for table in client.house.schema().tables() {
        for row in scan(store.as_ref(), Scan::all(table)).await? {
            text += &format!("{row} {}\n", row.to_json());
        }
    }
    for record in whole_log(store.as_ref()).await? {
        text += &format!("{record:?}\n");
        // The copies that answers to repetitions are made from.
        let known = store.find_operation(&record.tenant, &record.operation).await?;
        text += &format!("{known:?}\n");
    }
    Ok(text)
}

async fn is_nowhere(client: &TenantClient, what: &str) -> Result<()> {
    client.drain_workers().await?;
    // The worker pauses after a pass.
    ErasureBacklog::of(client.house.store().as_ref(), &**client.house.clock()).finish().await?;
    let text = everything(client).await?;
    let found: Vec<&str> = text.lines().filter(|line| line.contains(what)).collect();
    ensure!(found.is_empty(), "`{what}` is still there: {found:#?}");
    let left = scan(client.house.store().as_ref(), Scan::all(client.table("house_erasures")?)).await?;
    ensure!(left.is_empty(), "erasures are left: {left:?}");
    let pass = scan(client.house.store().as_ref(), Scan::all(client.table("house_blanking")?)).await?;
    ensure!(pass.is_empty(), "a pass is left: {pass:?}");
    Ok(())
}

/// How many rows a table has.
async fn rows_in(client: &TenantClient, table: &str) -> Result<usize> {
    Ok(scan(client.house.store().as_ref(), Scan::all(client.table(table)?)).await?.len())
}

async fn an_erased_row_is_nowhere(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    create(&client, 2).await?;
    let secret = |what: &str| format!("1-{what}-{SECRET}");
    client.done("member.patch", ONE, json!({"email": secret("patch")}), None).await?;
    client.done("member.mutate", ONE, json!({"set": {"note": secret("hot")}}), None).await?;
    let computed = json!({"set": {"email": secret("set")}, "increment": {"points": 1}});
    client.done("member.mutate", ONE, computed, None).await?;
    let text = everything(&client).await?;
    for what in ["patch", "hot", "set"] {
        ensure!(text.contains(&secret(what)), "the search does not find {what}");
    }
    let answer = client.done("member.erase", ONE, json!({}), None).await?;
    same("the answer", &answer.body, &json!({"id": 1}))?;
    client.refused("member.read", ONE, json!({}), None, Code::NotFound).await?;
    client.refused("member.erase", ONE, json!({}), None, Code::NotFound).await?;
    client.refused("member.restore", ONE, json!({}), None, Code::NotFound).await?;
    is_nowhere(&client, &format!("1-{SECRET}")).await?;
    for what in ["patch", "hot", "set"] {
        is_nowhere(&client, &secret(what)).await?;
    }
    let text = everything(&client).await?;
    ensure!(text.contains(&format!("2-{SECRET}")), "another row's events are gone");
    // What is left says that there were events, and which.
    let records = whole_log(client.house.store().as_ref()).await?;
    let events = records.iter().flat_map(|record| &record.events);
    let names = |name: &str| events.clone().filter(|event| event.name == name).count();
    same("events", &["member.created", "member.counted", "member.erased"].map(names), &[2, 1, 1])?;
    same("rows", &rows_in(&client, "members").await?, &1)?;
    same("hot rows", &rows_in(&client, "members_hot").await?, &0)?;
    same("locks", &rows_in(&client, "members_lock").await?, &0)
}

async fn an_erased_child_is_nowhere(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for id in ["a", "b", "c", "d"] {
        append(&client, id, 1).await?;
    }
    client.done("comment.edit", &comment("a"), json!({"body": format!("{SECRET} again")}), None).await?;
    client.done("comment.remove", &comment("b"), json!({}), None).await?;
    client.done("comment.hide", &comment("c"), json!({"reason": SECRET}), None).await?;
    let count = async || -> Result<Json> {
        let thread = client.done("comment_thread.read", &[Value::Int(7)], json!({}), None).await?;
        Ok(thread.body["count"].clone())
    };
    for (id, left) in [("a", 1), ("b", 1), ("c", 1), ("d", 0)] {
        erase(&client, "comment.erase", &comment(id)).await?;
        same("how many are counted", &count().await?, &json!(left))?;
        client.refused("comment.read", &comment(id), json!({}), None, Code::NotFound).await?;
    }
    same("children", &rows_in(&client, "comments").await?, &0)?;
    same("listed children", &rows_in(&client, "comments_listed").await?, &0)?;
    is_nowhere(&client, SECRET).await
}

async fn a_deleted_row_can_be_erased(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    client.done("member.delete", ONE, json!({}), None).await?;
    client.refused("member.erase", ONE, json!({}), Some(1), Code::VersionConflict).await?;
    client.done("member.erase", ONE, json!({}), Some(2)).await?;
    is_nowhere(&client, SECRET).await
}

async fn an_erasure_releases_values_and_references(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    client.done("loan.create", &[], json!({"id": 1, "member": 1}), None).await?;
    erase(&client, "loan.erase", ONE).await?;
    erase(&client, "member.erase", ONE).await?;
    let again = json!({"id": 2, "email": format!("1-{SECRET}")});
    client.done("member.create", &[], again, None).await?;
    client.done("member.erase", &[Value::Int(2)], json!({}), None).await?;
    same("unique values", &rows_in(&client, "members_email_unique").await?, &0)?;
    let counts = scan(client.house.store().as_ref(), Scan::all(client.table("loans_member_refs")?)).await?;
    ensure!(counts.iter().all(|row| row.int("n") == Some(0)), "references are counted: {counts:?}");
    is_nowhere(&client, SECRET).await
}

async fn a_row_that_others_refer_to_is_not_erased(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the view is not built");
    let client = with_member(namespace).await?;
    client.done("loan.create", &[], json!({"id": 1, "member": 1}), None).await?;
    client.refused("member.erase", ONE, json!({}), None, Code::Referenced).await?;
    client.done("member.read", ONE, json!({}), None).await?;
    // A reference that comes between the draft and the commit is noticed, too.
    client.done("loan.patch", ONE, json!({"member": null}), None).await?;
    let late = client.drafted("member.erase", ONE, json!({}), None).await?;
    client.done("loan.patch", ONE, json!({"member": 1}), None).await?;
    client.too_late(&late).await
}

async fn a_repetition_tells_nothing_of_an_erased_row(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let create = json!({"id": 1, "email": format!("1-{SECRET}"), "team": "red"});
    client.call_as("create", "member.create", &[], create.clone(), None).await?;
    let erase = json!({});
    let calls = |team: &str| {
        let request =
            |action: &str, id: i64, input: Json| TenantClient::request(action, &[id.into()], &input, None);
        vec![
            request("member.patch", 2, json!({"team": team})),
            request("member.patch", 1, json!({"team": team})),
            // It changes nothing, and answers with the row as it is.
            request("member.patch", 3, json!({"team": "blue"})),
        ]
    };
    for id in [2, 3] {
        let input = json!({"id": id, "email": format!("{id}-{SECRET}"), "team": "blue"});
        client.done("member.create", &[], input, None).await?;
    }
    let batch = async |operation: &str, team: &str| {
        let operation = Operation { id: Some(operation.to_owned()), fingerprint: "digest".to_owned() };
        let calls: Vec<Request> = calls(team);
        client.house.batch(&client.tenant, calls, operation).await
    };
    same("the answers", &batch("batch", "green").await?.len(), &3)?;
    same("the answers again", &batch("batch", "green").await?.len(), &3)?;
    // A condition is judged although nothing changes, which leaves the row as the answer in the log.
    let failing = json!({"team": "green", "if": "points = 7"});
    client.refused("member.patch", ONE, failing, None, Code::ConditionFailed).await?;
    let unchanged = json!({"team": "green", "if": "points = 0"});
    client.call_as("unchanged", "member.patch", ONE, unchanged.clone(), None).await?;
    client.call_as("erase", "member.erase", ONE, erase.clone(), None).await?;
    client.call_as("erase 3", "member.erase", &[Value::Int(3)], erase.clone(), None).await?;
    client.drain_workers().await?;
    let refused = client.call_as("create", "member.create", &[], create, None).await;
    same("the refusal", &refused.as_ref().err().map(|refusal| refusal.code), &Some(Code::Erased))?;
    ensure!(!format!("{refused:?}").contains(SECRET), "{refused:?}");
    let refused = client.call_as("unchanged", "member.patch", ONE, unchanged, None).await;
    same("the refusal", &refused.as_ref().err().map(|refusal| refusal.code), &Some(Code::Erased))?;
    let refused = batch("batch", "green").await;
    same("the refusal", &refused.as_ref().err().map(|refusal| refusal.code), &Some(Code::Erased))?;
    ensure!(!format!("{refused:?}").contains(SECRET), "{refused:?}");
    // The erasure itself is answered again, and erases nothing that was created since.
    client.done("member.create", &[], json!({"id": 1}), None).await?;
    let again = client.call_as("erase", "member.erase", ONE, erase, None).await?;
    same("the answer again", &again.body, &json!({"id": 1}))?;
    client.done("member.read", ONE, json!({}), None).await?;
    is_nowhere(&client, &format!("1-{SECRET}")).await?;
    is_nowhere(&client, &format!("3-{SECRET}")).await
}

async fn an_erasure_races_with_writes(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    append(&client, "a", 1).await?;
    // A write that was drafted before the erasure comes too late, and so does an erasure that was drafted before a write.
    let patch = client.drafted("member.patch", ONE, json!({"team": SECRET}), None).await?;
    let late = client.drafted("member.erase", ONE, json!({}), None).await?;
    client.done("member.patch", ONE, json!({"email": format!("new-{SECRET}")}), None).await?;
    client.too_late(&late).await?;
    let restore = client.drafted("comment.hide", &comment("a"), json!({}), None).await?;
    erase(&client, "member.erase", ONE).await?;
    erase(&client, "comment.erase", &comment("a")).await?;
    client.too_late(&patch).await?;
    client.too_late(&restore).await?;
    for number in 0..4_i64 {
        create(&client, 10 + number).await?;
        let key = [Value::Int(10 + number)];
        // A value that a write takes after the erasure has read the row must not stay taken.
        let email = |write: i64| json!({"email": format!("{number}-{write}-{SECRET}")});
        let mut writes = vec![client.start("member.patch", &key, email(0), None)];
        let erasures = [0, 1].map(|_| client.start("member.erase", &key, json!({}), None));
        writes.extend([1, 2].map(|write| client.start("member.patch", &key, email(write), None)));
        let mut erased = 0;
        for erasure in erasures {
            match erasure.await?.map_err(|refusal| refusal.code) {
                Ok(_) => erased += 1,
                Err(Code::NotFound | Code::Contended) => {}
                Err(other) => anyhow::bail!("an erasure beside another: {other}"),
            }
        }
        for write in writes {
            let outcome = write.await?.map_err(|refusal| refusal.code);
            let is_fine = matches!(outcome, Ok(_) | Err(Code::NotFound | Code::Contended));
            ensure!(is_fine, "a write beside an erasure: {outcome:?}");
        }
        ensure!(erased <= 1, "a row was erased {erased} times");
        if erased == 0 {
            erase(&client, "member.erase", &key).await?;
        }
        same("unique values", &rows_in(&client, "members_email_unique").await?, &0)?;
    }
    is_nowhere(&client, SECRET).await
}

async fn an_erasure_races_with_hot_fields_and_locks(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    client.done("member.mutate", ONE, json!({"set": {"team": "blue"}}), None).await?;
    let note = client.drafted("member.mutate", ONE, json!({"set": {"note": SECRET}}), None).await?;
    erase(&client, "member.erase", ONE).await?;
    client.too_late(&note).await?;
    same("hot rows", &rows_in(&client, "members_hot").await?, &0)?;
    // While another caller holds the lock of a row, its erasure waits.
    create(&client, 2).await?;
    let key = [Value::Int(2)];
    let (store, locks) = (client.store_client()?, client.table("members_lock")?);
    let held = Step::upsert(locks, key.clone())
        .set("held_by", "another")
        .set("held_until", now_plus(Duration::from_secs(60)));
    store.apply(store.one(held)).await?;
    let erasure = client.start("member.erase", &key, json!({}), None);
    for _ in 0..5 {
        pause().await;
    }
    ensure!(!erasure.is_finished(), "the erasure did not wait for the lock");
    client.done("member.read", &key, json!({}), None).await?;
    store.apply(store.one(Step::update(locks, key.clone()).set("held_until", now()))).await?;
    erasure.await?.map_err(|refusal| anyhow::anyhow!("the erasure after the lock: {refusal}"))?;
    same("locks", &rows_in(&client, "members_lock").await?, &0)?;
    is_nowhere(&client, SECRET).await
}

async fn an_erased_child_is_taken_out_once(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("an erased row is neither stored nor in the log");
    let client = open(namespace).await?;
    append(&client, "a", 1).await?;
    append(&client, "b", 1).await?;
    let late = client.drafted("comment.erase", &comment("a"), json!({}), None).await?;
    client.done("comment.hide", &comment("a"), json!({}), None).await?;
    client.too_late(&late).await?;
    erase(&client, "comment.erase", &comment("a")).await?;
    let counted = async || -> Result<Json> {
        let thread = client.done("comment_thread.read", &[Value::Int(7)], json!({}), None).await?;
        Ok(thread.body["count"].clone())
    };
    same("how many are counted", &counted().await?, &json!(1))?;
    for number in 0..4 {
        let id = format!("c{number}");
        append(&client, &id, 1).await?;
        let hide = client.start("comment.hide", &comment(&id), json!({}), None);
        let erasures = [0, 1].map(|_| client.start("comment.erase", &comment(&id), json!({}), None));
        let mut outcomes = vec![hide.await?.map_err(|refusal| refusal.code)];
        let mut erased = 0;
        for erasure in erasures {
            let outcome = erasure.await?.map_err(|refusal| refusal.code);
            erased += usize::from(outcome.is_ok());
            outcomes.push(outcome);
        }
        let is_fine = |outcome: &std::result::Result<_, Code>| {
            matches!(outcome, Ok(_) | Err(Code::NotFound | Code::Contended | Code::Deleted))
        };
        ensure!(outcomes.iter().all(is_fine) && erased <= 1, "hide and erase at once: {outcomes:?}");
        if erased == 0 {
            erase(&client, "comment.erase", &comment(&id)).await?;
        }
        same("how many are counted", &counted().await?, &json!(1))?;
        same("listed children", &rows_in(&client, "comments_listed").await?, &1)?;
    }
    Ok(())
}

async fn an_erasure_whose_answer_was_lost_is_done_once(namespace: &dyn TestNamespace) -> Result<()> {
    let odds = Odds { unknown_before: 0.3, unknown_after: 0.3, ..Odds::default() };
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound, Arc::new(SystemClock), Odds::default(), 11));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    for id in 1..=6 {
        create(&client, id).await?;
        let key = [Value::Int(id)];
        faulty.set_odds(odds);
        let mut outcome = Err(None);
        for _ in 0..20 {
            outcome = client
                .call_as(&format!("erase {id}"), "member.erase", &key, json!({}), None)
                .await
                .map_err(|refusal| Some(refusal.code));
            if outcome.as_ref().err() != Some(&Some(Code::OutcomeUnknown)) {
                break;
            }
        }
        faulty.set_odds(Odds::default());
        ensure!(outcome.is_ok(), "the erasure of {id}: {outcome:?}");
        client.refused("member.read", &key, json!({}), None, Code::NotFound).await?;
    }
    let records = whole_log(client.house.store().as_ref()).await?;
    let erasures =
        records.iter().flat_map(|record| &record.events).filter(|event| event.name == "member.erased");
    same("erasures in the log", &erasures.count(), &6)?;
    is_nowhere(&client, SECRET).await
}

async fn a_row_that_is_created_again_lives_on(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    erase(&client, "member.erase", ONE).await?;
    // Before the log is blank.
    let input = json!({"id": 1, "email": "new", "team": "blue", "points": 2});
    client.done("member.create", &[], input, None).await?;
    is_nowhere(&client, SECRET).await?;
    client.shows("member", ONE, &json!({"email": "new", "version": 1})).await?;
    let text = everything(&client).await?;
    ensure!(
        text.contains("\"email\":\"new\"") || text.contains("String(\"new\")"),
        "the new row's event is gone: {text}"
    );
    let entries = entries(&client).await?;
    ensure!(entries.len() == 1 && entries[0].contains("blue"), "the view has {entries:?}");
    equals_a_rebuild(&client).await
}

async fn views_forget_erased_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    create(&client, 2).await?;
    client.done("member.patch", ONE, json!({"points": 9}), None).await?;
    client.drain_workers().await?;
    let before = entries(&client).await?;
    same("entries that count", &before.len(), &2)?;
    erase(&client, "member.erase", ONE).await?;
    client.drain_workers().await?;
    same("entries that count", &entries(&client).await?, &before[1..].to_vec())?;
    // The key begins again at version 1, which is below the version that was erased.
    create(&client, 1).await?;
    client.drain_workers().await?;
    same("entries that count", &entries(&client).await?.len(), &2)?;
    equals_a_rebuild(&client).await
}

async fn a_scan_does_not_bring_an_erased_row_back(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("versions of an erased row begin anew");
    let client = open(namespace).await?;
    for id in 1..=6 {
        create(&client, id).await?;
        client.done("member.patch", &[Value::Int(id)], json!({"points": id}), None).await?;
    }
    client.drain_workers().await?;
    let projections = client.house.projections();
    let projection = projections.first().context("no projection")?;
    ensure!(projection.rebuild().await?, "no build could be begun");
    for id in 1..=6 {
        client.work(1).await?;
        erase(&client, "member.erase", &[Value::Int(id)]).await?;
        if id % 2 == 0 {
            create(&client, id).await?;
        }
    }
    client.drain_workers().await?;
    same("entries that count", &entries(&client).await?.len(), &3)?;
    equals_a_rebuild(&client).await
}

/// What the entries of the live generation say that count.
async fn entries(client: &TenantClient) -> Result<Vec<String>> {
    let projections = client.house.projections();
    let state = projections.first().context("no projection")?.state().await?;
    let live = state.live.context("nothing was built")?.number;
    let rows = scan(client.house.store().as_ref(), Scan::all(client.table("teams_entries")?)).await?;
    let counts =
        rows.iter().filter(|row| row.int("generation") == Some(live) && row.bool("gone") == Some(false));
    let mut said: Vec<String> = counts
        .map(|row| format!("{:?} {:?} {:?}", row.text("source"), row.get("by_team"), row.get("sum_points")))
        .collect();
    said.sort();
    Ok(said)
}

async fn equals_a_rebuild(client: &TenantClient) -> Result<()> {
    let before = entries(client).await?;
    let projections = client.house.projections();
    let projection = projections.first().context("no projection")?;
    let number = projection.state().await?.live.context("nothing was built")?.number;
    ensure!(projection.rebuild().await?, "no build could be begun");
    client.drain_workers().await?;
    let rebuilt = projection.state().await?.live.context("nothing was built")?;
    ensure!(rebuilt.number > number, "the rebuild did not end");
    same("the entries after a rebuild", &entries(client).await?, &before)
}

async fn all_rows_of_a_person_are_erased(namespace: &dyn TestNamespace) -> Result<()> {
    let client = with_member(namespace).await?;
    create(&client, 2).await?;
    // The member comes before the loans that refer to it.
    for (id, member) in [(1, 1), (2, 2), (3, 1)] {
        client
            .done(
                "loan.create",
                &[],
                json!({"id": id, "member": member, "what": format!("by {member}-")}),
                None,
            )
            .await?;
    }
    for (id, author) in [("a", 1), ("b", 2), ("c", 1)] {
        append(&client, id, author).await?;
    }
    client.done("comment.remove", &comment("c"), json!({}), None).await?;
    client.done("member.create", &[], json!({"id": 12, "email": "twelve"}), None).await?;
    let progress = PersonErasure::of(&client.house, &client.tenant, "1").finish().await?;
    same("rows that were erased", &(progress.erased, progress.refused.len()), &(5, 0))?;
    let count = |table: &'static str| rows_in(&client, table);
    let left = (count("members").await?, count("loans").await?, count("comments").await?);
    same("rows that are left", &left, &(2, 1, 1))?;
    is_nowhere(&client, &format!("1-{SECRET}")).await?;
    is_nowhere(&client, "by 1-").await?;
    let text = everything(&client).await?;
    ensure!(text.contains("by 2-") && text.contains("twelve"), "another person's events are gone");
    // Again it finds nothing.
    let progress = PersonErasure::of(&client.house, &client.tenant, "1").finish().await?;
    same("rows that were erased again", &progress.erased, &0)
}

async fn an_interrupted_pass_goes_on(namespace: &dyn TestNamespace) -> Result<()> {
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound, Arc::new(SystemClock), Odds::default(), 5));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    for id in 1..=8 {
        create(&client, id).await?;
        erase(&client, "member.erase", &[Value::Int(id)]).await?;
    }
    let backlog = ErasureBacklog::of(client.house.store().as_ref(), &**client.house.clock());
    faulty.set_odds(Odds { unavailable: 0.3, unknown_before: 0.2, unknown_after: 0.2, ..Odds::default() });
    let mut steps = 0;
    loop {
        steps += 1;
        ensure!(steps < 2_000, "the pass does not end");
        // Errors are those that were injected.
        if let Ok(step) = backlog.step(2).await
            && !step.more
            && backlog.is_empty().await.unwrap_or(false)
        {
            break;
        }
    }
    faulty.set_odds(Odds::default());
    is_nowhere(&client, SECRET).await
}
