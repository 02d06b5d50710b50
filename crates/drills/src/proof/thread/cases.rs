//! A03 Append-only child object: one child for each id, moderation that wins, and a list that has what is visible.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Expected, Refusal};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{ManualClock, Random, Scan, Step, SystemClock, Time, Value};
use tokio::task::JoinHandle;

use super::{cases as thread, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{same, scan};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    thread {
        a_child_lives_its_life(5),
        a_retry_appends_no_second_child(5),
        edits_are_under_a_version(5),
        what_changes_nothing_writes_nothing(5),
        moderation_wins_over_the_author(5),
        what_was_removed_stays_so(5),
        edit_and_remove_contend_on_one_row(5),
        edit_and_hide_contend_on_one_row(5),
        hiding_and_removing_take_out_once(5),
        a_paused_caller_comes_too_late(5),
        a_list_that_does_not_agree_is_not_made_worse(5),
        lists_are_in_order_and_paged_over_buckets(5),
        pages_hold_while_others_come_and_go(5),
        the_thread_is_right_after_a_storm(5),
        lost_answers_append_nothing_twice(5),
        children_of_tenants_are_apart(5),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "duplicate child creation on retry",
        "Answers to appends get lost before and after the commit, and callers repeat them.",
        "thread::lost_answers_append_nothing_twice",
    ),
    Drill::by_case(
        CASES,
        "projection/search lag after append",
        "Many append, edit and remove at once, and list and count are compared with the children.",
        "thread::the_thread_is_right_after_a_storm",
    ),
    Drill::by_case(
        CASES,
        "delete/edit race",
        "One caller edits a child while another removes it.",
        "thread::edit_and_remove_contend_on_one_row",
    ),
    Drill::by_case(
        CASES,
        "moderation/removal lag",
        "A child is hidden, and its author edits it under every version and appends it again.",
        "thread::moderation_wins_over_the_author",
    ),
    Drill::by_case(
        CASES,
        "concurrent edit/delete race",
        "One caller edits a child while a moderator hides it.",
        "thread::edit_and_hide_contend_on_one_row",
    ),
];

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[thread.comment]
parent  = { post_id = "int" }
fields  = { author = "text", body = "text", mood = { type = "text", default = "calm" }, link = "text?" }
buckets = 3

[thread.remark]
parent          = { post_id = "int" }
fields          = { body = "text" }
require_version = false
buckets         = 1
"#;

fn key(post: i64, id: &str) -> [Value; 2] {
    [post.into(), id.into()]
}

fn said(post: i64, id: &str, body: &str) -> Json {
    json!({"post_id": post, "comment_id": id, "author": "ann", "body": body})
}

async fn append(client: &TenantClient, post: i64, id: &str) -> Result<Answer> {
    client.done("comment.append", &[], said(post, id, "hello"), None).await
}

/// The ids in a list, page by page.
async fn list(client: &TenantClient, post: i64, order: &str, limit: i64) -> Result<Vec<String>> {
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        let mut input = json!({"post_id": post, "order": order, "limit": limit});
        if let Some(cursor) = cursor.take() {
            input["cursor"] = Json::String(cursor);
        }
        let page = client.done("comment.list", &[], input, None).await?;
        let rows = page.body.as_array().context("no list")?;
        ensure!(rows.len() <= usize::try_from(limit)?, "{} rows in a page of {limit}", rows.len());
        for row in rows {
            ensure!(
                row["status"] == "VISIBLE" && row["post_id"] == json!(post),
                "{row} in the list of {post}"
            );
            found.push(row["comment_id"].as_str().context("no id")?.to_owned());
        }
        match page.next {
            Some(next) => cursor = Some(next),
            None => return Ok(found),
        }
    }
}

/// How many there are, and the newest.
async fn thread_of(client: &TenantClient, post: i64) -> Result<(i64, Option<String>)> {
    let thread = client.done("comment_thread.read", &[post.into()], json!({}), None).await?;
    let newest = thread.body["newest"]["comment_id"].as_str().map(str::to_owned);
    Ok((thread.body["count"].as_i64().context("no count")?, newest))
}

/// Checks the invariants, and that what was removed says nothing any more. Returns the ids of a post that are visible.
async fn check_rows(client: &TenantClient, post: i64) -> Result<BTreeSet<String>> {
    invariants::check(&client.scope("comment")).await?;
    let mut visible = BTreeSet::new();
    let table = client.table("comments")?;
    for row in scan(client.house.store().as_ref(), Scan::of(table, &client.tenant)).await? {
        match row.text("status") {
            Some("VISIBLE") if row.int("post_id") == Some(post) => {
                visible.extend(row.text("comment_id").map(str::to_owned));
            }
            Some("REMOVED") => ensure!(row.text("body").is_none() && row.text("mood").is_none(), "{row}"),
            _ => {}
        }
    }
    Ok(visible)
}

fn ids<const N: usize>(ids: [&str; N]) -> BTreeSet<String> {
    ids.map(str::to_owned).into()
}

async fn a_child_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    same("an empty thread", &thread_of(&client, 1).await?, &(0, None))?;
    client.refused("comment.read", &key(1, "a"), json!({}), None, Code::NotFound).await?;
    let appended = append(&client, 1, "a").await?;
    same("the key", &appended.created.as_deref(), &Some("1,a"))?;
    shows(
        &appended,
        &json!({"post_id": 1, "comment_id": "a", "body": "hello", "mood": "calm", "link": null, "status": "VISIBLE", "version": 1}),
    )?;
    ensure!(
        appended.body.get("digest").is_none() && appended.body.get("bucket").is_none(),
        "{}",
        appended.body
    );
    append(&client, 2, "a").await?;
    let edited =
        client.done("comment.edit", &key(1, "a"), json!({"body": "hi", "link": "x"}), Some(1)).await?;
    shows(&edited, &json!({"body": "hi", "link": "x", "mood": "calm", "author": "ann", "version": 2}))?;
    same("the thread", &thread_of(&client, 1).await?, &(1, Some("a".into())))?;
    let hidden = client.done("comment.hide", &key(1, "a"), json!({"reason": "rude"}), None).await?;
    shows(&hidden, &json!({"status": "HIDDEN", "version": 3}))?;
    client.refused("comment.read", &key(1, "a"), json!({}), None, Code::NotFound).await?;
    let seen = client.done("comment.read", &key(1, "a"), json!({"hidden": true}), None).await?;
    shows(&seen, &json!({"status": "HIDDEN", "body": "hi"}))?;
    same("the thread", &thread_of(&client, 1).await?, &(0, None))?;
    same("what is listed", &list(&client, 1, "newest", 5).await?, &vec![])?;
    let restored = client.done("comment.restore", &key(1, "a"), json!({}), None).await?;
    shows(&restored, &json!({"status": "VISIBLE", "body": "hi", "posted_at": appended.body["posted_at"]}))?;
    same("what is listed", &list(&client, 1, "oldest", 5).await?, &vec!["a".to_owned()])?;
    let removed = client.done("comment.remove", &key(1, "a"), json!({}), None).await?;
    shows(&removed, &json!({"status": "REMOVED", "body": null, "author": null, "mood": null, "version": 5}))?;
    client.refused("comment.read", &key(1, "a"), json!({"hidden": true}), None, Code::Deleted).await?;
    same("the other post", &check_rows(&client, 2).await?, &ids(["a"]))?;
    for input in [json!({"post_id": 1}), json!({"post_id": 1, "comment_id": "b", "author": "ann"})] {
        client.refused("comment.append", &[], input, None, Code::InvalidInput).await?;
    }
    let records = client.store_client()?.exact_log(6).await?;
    let hide = records.iter().find(|record| record.events[0].name == "comment.hidden").context("no hide")?;
    same("why it was hidden", &hide.events[0].data["reason"], &json!("rude"))
}

async fn a_retry_appends_no_second_child(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let mut answers = Vec::new();
    // Under one operation id, and under others with the same id of the child.
    for operation in ["op-1", "op-1", "op-2", "op-3"] {
        let call = client.call_as(operation, "comment.append", &[], said(1, "a", "hello"), None);
        answers.push(call.await?.body);
    }
    ensure!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
    client.refused("comment.append", &[], said(1, "a", "other"), None, Code::AlreadyExists).await?;
    // The child was edited meanwhile: who asks again sees it as it is.
    client.done("comment.edit", &key(1, "a"), json!({"body": "hi"}), Some(1)).await?;
    let again = client.done("comment.append", &[], said(1, "a", "hello"), None).await?;
    shows(&again, &json!({"body": "hi", "version": 2}))?;
    let callers: Vec<JoinHandle<Result<Answer, Refusal>>> = (0..8)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(
                async move { client.call("comment.append", &[], said(1, "b", "me too"), None).await },
            )
        })
        .collect();
    for caller in callers {
        shows(&caller.await??, &json!({"comment_id": "b", "version": 1}))?;
    }
    same("the thread", &thread_of(&client, 1).await?, &(2, Some("b".into())))?;
    same("what is visible", &check_rows(&client, 1).await?, &ids(["a", "b"]))
}

async fn edits_are_under_a_version(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    append(&client, 1, "a").await?;
    let body = |text: &str| json!({"body": text});
    client.refused("comment.edit", &key(1, "a"), body("x"), None, Code::VersionRequired).await?;
    client.refused("comment.edit", &key(1, "b"), body("x"), Some(1), Code::NotFound).await?;
    let refusal =
        client.refused("comment.edit", &key(1, "a"), body("x"), Some(9), Code::VersionConflict).await?;
    same("the version as it is", &refusal.current_version, &Some(1))?;
    client.refused("comment.edit", &key(1, "a"), json!({"body": null}), Some(1), Code::InvalidInput).await?;
    let callers: Vec<JoinHandle<Result<Answer, Refusal>>> = (0..6)
        .map(|caller| {
            let client = client.clone();
            let input = body(&format!("by {caller}"));
            tokio::spawn(async move { client.call("comment.edit", &key(1, "a"), input, Some(1)).await })
        })
        .collect();
    let mut done = Vec::new();
    for caller in callers {
        match caller.await? {
            Ok(answer) => done.push(answer.body["body"].clone()),
            Err(refusal) => ensure!(refusal.code == Code::VersionConflict, "{refusal}"),
        }
    }
    same("how many edits were done", &done.len(), &1)?;
    client.shows("comment", &key(1, "a"), &json!({"body": done[0], "version": 2})).await?;
    client.refused("comment.remove", &key(1, "a"), json!({}), Some(1), Code::VersionConflict).await?;
    client.done("comment.remove", &key(1, "a"), json!({}), Some(2)).await?;
    check_rows(&client, 1).await.map(drop)
}

async fn what_changes_nothing_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    append(&client, 1, "a").await?;
    shows(
        &client.done("comment.edit", &key(1, "a"), json!({"body": "hello"}), Some(1)).await?,
        &json!({"version": 1}),
    )?;
    for (action, version) in [("restore", 1), ("hide", 2), ("hide", 2), ("restore", 3), ("restore", 3)] {
        let answer = client.done(&format!("comment.{action}"), &key(1, "a"), json!({}), None).await?;
        same(action, &answer.version, &Some(version))?;
    }
    for _ in 0..2 {
        let answer = client.done("comment.remove", &key(1, "a"), json!({}), None).await?;
        same("remove", &answer.version, &Some(4))?;
    }
    same("how much was told", &client.events(4).await?.len(), &4)?;
    check_rows(&client, 1).await.map(drop)
}

async fn moderation_wins_over_the_author(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    append(&client, 1, "a").await?;
    client.done("comment.hide", &key(1, "a"), json!({}), None).await?;
    // Whatever the author does, it is not shown: under the version that it is at, under an old one, or anew.
    for version in [1, 2] {
        let edit = json!({"body": "milder"});
        client.refused("comment.edit", &key(1, "a"), edit, Some(version), Code::WrongState).await?;
    }
    client.refused("comment.append", &[], said(1, "a", "hello"), None, Code::WrongState).await?;
    client.refused("comment.append", &[], said(1, "a", "milder"), None, Code::AlreadyExists).await?;
    same("the thread", &thread_of(&client, 1).await?, &(0, None))?;
    // A moderator need not have seen the latest version.
    client.done("comment.restore", &key(1, "a"), json!({}), None).await?;
    client.done("comment.edit", &key(1, "a"), json!({"body": "milder"}), Some(3)).await?;
    client.done("comment.hide", &key(1, "a"), json!({}), None).await?;
    // What is hidden can be removed, and is not counted out a second time.
    client.done("comment.remove", &key(1, "a"), json!({}), None).await?;
    client.refused("comment.restore", &key(1, "a"), json!({}), None, Code::Deleted).await?;
    same("what is visible", &check_rows(&client, 1).await?, &BTreeSet::new())
}

async fn what_was_removed_stays_so(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let appended = client.call_as("op-1", "comment.append", &[], said(1, "a", "hello"), None).await?;
    client.done("comment.remove", &key(1, "a"), json!({}), None).await?;
    client.refused("comment.append", &[], said(1, "a", "hello"), None, Code::Deleted).await?;
    let late = client.call_as("op-1", "comment.append", &[], said(1, "a", "hello"), None).await?;
    same("the answer of a late retry", &late.body, &appended.body)?;
    client.refused("comment.edit", &key(1, "a"), json!({"body": "x"}), Some(2), Code::Deleted).await?;
    for action in ["hide", "restore"] {
        client.refused(&format!("comment.{action}"), &key(1, "a"), json!({}), None, Code::Deleted).await?;
    }
    same("what is visible", &check_rows(&client, 1).await?, &BTreeSet::new())
}

/// Calls actions on one child at once, and returns what came of each.
async fn race(
    client: &TenantClient,
    child: &[Value; 2],
    calls: &[(&str, Json)],
) -> Result<Vec<Result<Answer, Refusal>>> {
    let started: Vec<JoinHandle<Result<Answer, Refusal>>> = calls
        .iter()
        .map(|(action, input)| {
            let (client, action, input, key) =
                (client.clone(), (*action).to_owned(), input.clone(), child.clone());
            tokio::spawn(async move { client.call(&action, &key, input, None).await })
        })
        .collect();
    let mut outcomes = Vec::new();
    for one in started {
        outcomes.push(one.await?);
    }
    Ok(outcomes)
}

async fn edit_and_remove_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    // Remarks are edited without a version, so it is the state alone that decides.
    for round in 0..8 {
        let id = format!("r{round}");
        let input = json!({"post_id": 1, "remark_id": id, "body": "first"});
        client.done("remark.append", &[], input, None).await?;
        let edit = ("remark.edit", json!({"body": "second"}));
        let outcomes =
            race(&client, &key(1, &id), &[edit.clone(), ("remark.remove", json!({})), edit]).await?;
        ensure!(outcomes[1].is_ok(), "a removal lost: {:?}", outcomes[1]);
        for edit in [&outcomes[0], &outcomes[2]] {
            if let Err(refusal) = edit {
                ensure!(refusal.code == Code::Deleted, "{refusal}");
            }
        }
        let row = client.store_client()?.row(client.table("remarks")?, key(1, &id)).await?;
        ensure!(
            row.text("status") == Some("REMOVED") && row.text("body").is_none(),
            "an edit came after: {row}"
        );
    }
    Ok(())
}

async fn edit_and_hide_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    for round in 0..8 {
        let id = format!("r{round}");
        let input = json!({"post_id": 1, "remark_id": id, "body": "first"});
        client.done("remark.append", &[], input, None).await?;
        let edit = |text: &str| ("remark.edit", json!({"body": text}));
        let outcomes =
            race(&client, &key(1, &id), &[edit("second"), ("remark.hide", json!({})), edit("third")]).await?;
        ensure!(outcomes[1].is_ok(), "a moderator lost: {:?}", outcomes[1]);
        for edit in [&outcomes[0], &outcomes[2]] {
            if let Err(refusal) = edit {
                ensure!(refusal.code == Code::WrongState, "{refusal}");
            }
        }
        // Whatever was edited before it was hidden, nothing was after: each change has a version of its own.
        let row = client.store_client()?.row(client.table("remarks")?, key(1, &id)).await?;
        let hidden_at = outcomes[1].as_ref().ok().and_then(|answer| answer.version);
        same("the last change", &(row.text("status"), Some(row.version())), &(Some("HIDDEN"), hidden_at))?;
    }
    let listed = client.done("remark.list", &[], json!({"post_id": 1}), None).await?;
    same("what is listed", &listed.body, &json!([]))
}

async fn hiding_and_removing_take_out_once(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    append(&client, 1, "stays").await?;
    for round in 0..6 {
        let id = format!("c{round}");
        append(&client, 1, &id).await?;
        let calls = [
            ("comment.hide", json!({})),
            ("comment.remove", json!({})),
            ("comment.hide", json!({})),
            ("comment.restore", json!({})),
            ("comment.remove", json!({})),
        ];
        for outcome in race(&client, &key(1, &id), &calls).await? {
            if let Err(refusal) = outcome {
                ensure!([Code::Deleted, Code::Contended].contains(&refusal.code), "{refusal}");
            }
        }
        client.done("comment.remove", &key(1, &id), json!({}), None).await?;
        same("what is visible", &check_rows(&client, 1).await?, &ids(["stays"]))?;
    }
    same("the thread", &thread_of(&client, 1).await?, &(1, Some("stays".into())))
}

async fn a_paused_caller_comes_too_late(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let child = key(1, "a");
    let at = |version: i64| Some(Expected::Version(version));
    let draft = async |action: &str, input: Json, expected| {
        client.drafted(&format!("comment.{action}"), &child, input, expected).await
    };
    // Each of these is drafted, and then others act before it is committed.
    let append_first = client.drafted("comment.append", &[], said(1, "a", "hello"), None).await?;
    append(&client, 1, "a").await?;
    client.too_late(&append_first).await?;
    let edit = draft("edit", json!({"body": "x"}), at(1)).await?;
    let edit_any = draft("edit", json!({"body": "y"}), Some(Expected::Any)).await?;
    let remove_seen = draft("remove", json!({}), at(1)).await?;
    let (hide, remove) = (draft("hide", json!({}), None).await?, draft("remove", json!({}), None).await?);
    client.done("comment.edit", &child, json!({"body": "edited"}), Some(1)).await?;
    client.too_late(&edit).await?;
    client.too_late(&remove_seen).await?;
    client.done("comment.hide", &child, json!({}), None).await?;
    for plan in [&edit_any, &hide, &remove] {
        client.too_late(plan).await?;
    }
    let restore = draft("restore", json!({}), None).await?;
    let remove_hidden = draft("remove", json!({}), None).await?;
    client.done("comment.restore", &child, json!({}), None).await?;
    client.too_late(&restore).await?;
    client.too_late(&remove_hidden).await?;
    client.done("comment.hide", &child, json!({}), None).await?;
    let restore = draft("restore", json!({}), None).await?;
    client.done("comment.remove", &child, json!({}), None).await?;
    for plan in [&edit_any, &hide, &remove, &restore, &remove_hidden] {
        client.too_late(plan).await?;
    }
    same("what is visible", &check_rows(&client, 1).await?, &BTreeSet::new())
}

async fn a_list_that_does_not_agree_is_not_made_worse(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let (store_client, table) = (client.store_client()?, client.table("comments_listed")?.clone());
    append(&client, 1, "a").await?;
    let listed = scan(store_client.store.as_ref(), Scan::of(&table, &client.tenant)).await?;
    let row_key = || listed.first().map(|row| row.key().to_vec()).unwrap_or_default();
    // A program writes past the actions. It should not; if it does, it shows.
    store_client.apply(store_client.one(Step::delete(&table, row_key()))).await?;
    for action in ["hide", "remove"] {
        client.refused(&format!("comment.{action}"), &key(1, "a"), json!({}), None, Code::Internal).await?;
    }
    store_client.apply(store_client.one(Step::insert(&table, row_key()))).await?;
    client.done("comment.hide", &key(1, "a"), json!({}), None).await?;
    store_client.apply(store_client.one(Step::insert(&table, row_key()))).await?;
    same("what is hidden is not shown", &list(&client, 1, "newest", 5).await?, &vec![])?;
    client.refused("comment.restore", &key(1, "a"), json!({}), None, Code::Internal).await?;
    store_client.apply(store_client.one(Step::delete(&table, row_key()))).await?;
    client.done("comment.restore", &key(1, "a"), json!({}), None).await?;
    same("what is visible", &check_rows(&client, 1).await?, &ids(["a"]))?;
    // Something stands already where a new one would.
    let append = client.drafted("comment.append", &[], said(1, "b", "hello"), None).await?;
    let listed = append.steps().iter().find(|step| step.table.name() == table.name()).context("no place")?;
    store_client.apply(store_client.one(Step::insert(&table, listed.key.iter().cloned()))).await?;
    client.too_late(&append).await
}

async fn lists_are_in_order_and_paged_over_buckets(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, clock.clone()).await?;
    // Four at a time come at one moment, and then stand by their ids.
    for number in 0..24 {
        append(&client, 1, &format!("c{number:02}")).await?;
        if number % 4 == 3 {
            clock.advance(Duration::from_millis(1));
        }
    }
    for number in [0, 7, 22, 23] {
        client.done("comment.hide", &key(1, &format!("c{number:02}")), json!({}), None).await?;
    }
    client.done("comment.remove", &key(1, "c12"), json!({}), None).await?;
    client.done("comment.restore", &key(1, "c07"), json!({}), None).await?;
    let gone = [0, 12, 22, 23];
    let mut expected: Vec<String> =
        (0..24).filter(|number| !gone.contains(number)).map(|number| format!("c{number:02}")).collect();
    for limit in [1, 3, 7, 19, 20, 21, 100] {
        same(&format!("oldest first, by {limit}"), &list(&client, 1, "oldest", limit).await?, &expected)?;
    }
    same("the thread", &thread_of(&client, 1).await?, &(20, Some("c21".into())))?;
    expected.reverse();
    for limit in [1, 4, 20, 50] {
        same(&format!("newest first, by {limit}"), &list(&client, 1, "newest", limit).await?, &expected)?;
    }
    let rows =
        scan(client.house.store().as_ref(), Scan::of(client.table("comments_listed")?, &client.tenant))
            .await?;
    let buckets: BTreeSet<Option<i64>> = rows.iter().map(|row| row.int("bucket")).collect();
    same("the buckets of one post", &buckets.len(), &3)?;
    check_rows(&client, 1).await.map(drop)
}

async fn pages_hold_while_others_come_and_go(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let still: Vec<String> = (0..30).map(|number| format!("s{number:02}")).collect();
    for id in &still {
        append(&client, 1, id).await?;
    }
    let mover = client.clone();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let moving = tokio::spawn(async move {
        let mut moves = 0;
        loop {
            let id = format!("m{moves}");
            append(&mover, 1, &id).await?;
            let action = if moves % 2 == 0 { "comment.hide" } else { "comment.remove" };
            mover.done(action, &key(1, &id), json!({}), None).await?;
            if moves % 4 == 0 {
                mover.done("comment.restore", &key(1, &id), json!({}), None).await?;
            }
            moves += 1;
            if *stopped.borrow() {
                return Ok::<_, anyhow::Error>(moves);
            }
        }
    });
    for (limit, order) in [(1, "newest"), (4, "oldest"), (9, "newest"), (7, "oldest")] {
        let listed = list(&client, 1, order, limit).await?;
        let distinct: BTreeSet<&String> = listed.iter().collect();
        ensure!(distinct.len() == listed.len(), "a page showed one twice: {listed:?}");
        let mut kept: Vec<String> = listed.into_iter().filter(|id| id.starts_with('s')).collect();
        if order == "newest" {
            kept.reverse();
        }
        same("those that stood still", &kept, &still)?;
    }
    stop.send_replace(true);
    ensure!(moving.await?? > 0, "nothing moved");
    check_rows(&client, 1).await.map(drop)
}

async fn the_thread_is_right_after_a_storm(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let callers: Vec<_> = (0..8_u64)
        .map(|caller| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut random = Random::seeded(caller);
                for _ in 0..14 {
                    let id = format!("c{}", random.below(8));
                    let outcome = match random.below(6) {
                        0 | 1 => client.call("comment.append", &[], said(1, &id, "hello"), None).await,
                        2 => client.call("comment.hide", &key(1, &id), json!({}), None).await,
                        3 => client.call("comment.restore", &key(1, &id), json!({}), None).await,
                        4 => {
                            let edit = json!({"body": format!("by {caller}")});
                            client.call("comment.edit", &key(1, &id), edit, Some(1)).await
                        }
                        _ if random.chance(0.3) => {
                            client.call("comment.remove", &key(1, &id), json!({}), None).await
                        }
                        _ => client.call("comment.read", &key(1, &id), json!({}), None).await,
                    };
                    if let Err(refusal) = outcome {
                        let expected = [
                            Code::NotFound,
                            Code::Deleted,
                            Code::WrongState,
                            Code::VersionConflict,
                            Code::Contended,
                        ];
                        ensure!(expected.contains(&refusal.code), "{refusal}");
                    }
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    let visible = check_rows(&client, 1).await?;
    let listed = list(&client, 1, "newest", 3).await?;
    let (count, newest) = thread_of(&client, 1).await?;
    same("the count", &count, &i64::try_from(visible.len())?)?;
    same("the newest", &newest, &listed.first().cloned())?;
    same("the list", &listed.into_iter().collect(), &visible)
}

async fn lost_answers_append_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(store, Arc::new(SystemClock), Odds::default(), 9));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.25, unknown_after: 0.35, unavailable: 0.05, ..Odds::default() });
    let mut expected = BTreeSet::new();
    for turn in 0..24 {
        let id = format!("c{}", turn / 2);
        let hides = turn % 6 == 5;
        let mut done = false;
        for attempt in 0..60 {
            // A caller that was told nothing asks again, now under the same operation id and now under another.
            let operation = format!("op-{turn}-{}", if turn % 4 < 2 { 0 } else { attempt });
            let outcome = if hides {
                client.call_as(&operation, "comment.hide", &key(1, &id), json!({}), None).await
            } else {
                client.call_as(&operation, "comment.append", &[], said(1, &id, "hello"), None).await
            };
            match outcome {
                Ok(_) => {
                    done = true;
                    break;
                }
                Err(refusal) => {
                    let unsure = [Code::OutcomeUnknown, Code::Unavailable];
                    ensure!(unsure.contains(&refusal.code), "{refusal}");
                }
            }
        }
        ensure!(done, "turn {turn} was never answered");
        if hides {
            expected.remove(&id)
        } else {
            expected.insert(id)
        };
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 5 && achieved.unknown_before > 5, "{achieved}");
    faulty.set_odds(Odds::default());
    same("what is visible", &check_rows(&client, 1).await?, &expected)?;
    same("the count", &thread_of(&client, 1).await?.0, &i64::try_from(expected.len())?)
}

async fn children_of_tenants_are_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let other = client.for_tenant("zeta")?;
    append(&client, 1, "a").await?;
    for action in ["comment.read", "comment.remove", "comment.hide", "comment.restore"] {
        other.refused(action, &key(1, "a"), json!({}), None, Code::NotFound).await?;
    }
    other.done("comment.append", &[], said(1, "a", "mine"), None).await?;
    other.done("comment.remove", &key(1, "a"), json!({}), None).await?;
    same("the other's thread", &thread_of(&other, 1).await?, &(0, None))?;
    same("the first one's", &check_rows(&client, 1).await?, &ids(["a"]))?;
    check_rows(&other, 1).await.map(drop)
}
