//! Constraints between rows: values that one row at most may have, and references to rows that must be live.

mod cascade;
mod declared;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Operation, Refusal};
use statehouse_store::Value;
use tokio::task::JoinHandle;

use self::cascade::*;
use self::declared::*;
use super::row_constraints;
use crate::conformance::{Case, cases};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    row_constraints {
        one_of_many_writers_takes_a_value(5),
        a_value_is_released_on_change_and_delete(8),
        a_restored_row_takes_its_value_again(8),
        several_fields_are_unique_together(8),
        increments_and_mutations_keep_values_unique(6),
        a_row_that_changed_since_it_was_read_is_read_again(8),
        a_reference_needs_a_live_row(8),
        a_row_is_not_deleted_while_others_refer_to_it(8),
        a_delete_races_with_a_new_reference(8),
        repetitions_take_and_count_once(8),
        calls_of_a_batch_fit_together(20),
        children_of_a_thread_keep_constraints(9),
        reactions_keep_constraints(9),
        rows_are_deleted_with_the_row_they_refer_to(9),
        deletions_go_on_after_a_crash(9),
        deletions_of_a_circle_come_to_an_end(9),
        a_late_deletion_takes_nothing_along(9),
        a_row_that_refers_elsewhere_meanwhile_stays(9),
        bad_row_constraints_are_reported_at_their_line(1),
    }
};

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.member]
key = { id = "int" }
require_version = false

[entity.member.fields]
email  = { type = "text?", unique = true }
number = { type = "int?", unique = true }
name   = "text?"
boss   = { type = "int?", ref = "member" }

[entity.room]
key = { id = "text" }
require_version = false
fields = { name = "text?" }

[entity.loan]
key = { id = "int" }
require_version = false
unique = { slot = ["room", "day"] }

[entity.loan.fields]
member = { type = "int?", ref = "member", on_delete = "refuse" }
room   = { type = "text?", ref = "room", on_delete = "keep" }
day    = "int?"

[thread.comment]
parent = { post = "int" }
require_version = false
fields = { title = { type = "text?", unique = true }, author = { type = "int?", ref = "member" } }

[entity.badge]
key = { id = "text" }
fields = { email = { type = "text?", unique = true } }

[on.badge_of_member]
event = "member.created"
when  = "name = 'staff'"
do    = "badge.create"
input = { id = "{subject}", email = "{row.email}" }
"#;

async fn open(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    TenantClient::open(namespace, BLUEPRINT).await
}

const ONE: &[Value] = &[Value::Int(1)];

fn id(id: i64) -> [Value; 1] {
    [id.into()]
}

/// A row with this key and these fields.
fn row(id: impl Into<Json>, fields: &Json) -> Json {
    let mut row = json!({"id": id.into()});
    if let (Some(row), Some(fields)) = (row.as_object_mut(), fields.as_object()) {
        row.extend(fields.clone());
    }
    row
}

fn email(email: &str) -> Json {
    json!({"email": email})
}

impl TenantClient {
    async fn create(&self, resource: &str, id: impl Into<Json>, fields: Json) -> Result<Answer> {
        self.done(&format!("{resource}.create"), &[], row(id, &fields), None).await
    }

    async fn not_created(
        &self,
        resource: &str,
        id: impl Into<Json>,
        fields: Json,
        code: Code,
    ) -> Result<Refusal> {
        self.refused(&format!("{resource}.create"), &[], row(id, &fields), None, code).await
    }

    async fn patch(&self, resource: &str, key: i64, fields: Json) -> Result<Answer> {
        self.done(&format!("{resource}.patch"), &id(key), fields, None).await
    }

    async fn not_patched(&self, resource: &str, key: i64, fields: Json, code: Code) -> Result<Refusal> {
        self.refused(&format!("{resource}.patch"), &id(key), fields, None, code).await
    }

    async fn delete(&self, resource: &str, key: i64) -> Result<Answer> {
        self.done(&format!("{resource}.delete"), &id(key), json!({}), None).await
    }

    async fn not_deleted(&self, resource: &str, key: i64, code: Code) -> Result<Refusal> {
        self.refused(&format!("{resource}.delete"), &id(key), json!({}), None, code).await
    }

    async fn restore(&self, resource: &str, key: i64) -> Result<Answer> {
        self.done(&format!("{resource}.restore"), &id(key), json!({}), None).await
    }

    async fn not_restored(&self, resource: &str, key: i64, code: Code) -> Result<Refusal> {
        self.refused(&format!("{resource}.restore"), &id(key), json!({}), None, code).await
    }

    async fn batched(&self, calls: &[(&str, &[Value], Json)]) -> Result<Vec<Answer>, Refusal> {
        let request =
            |(action, key, input): &(&str, &[Value], Json)| TenantClient::request(action, key, input, None);
        let requests = calls.iter().map(request).collect();
        self.house.batch(&self.tenant, requests, Operation::default()).await
    }
}

/// Requires the refusal to point at these fields.
fn points_at(refusal: &Refusal, fields: &[&str]) -> Result<()> {
    let pointers: Vec<&str> = refusal.field_errors.iter().map(|error| error.pointer.as_str()).collect();
    same("the fields", &pointers, &fields.to_vec())
}

/// Sixteen writers want one value. One gets it, and the others learn which field it was and who has it.
async fn one_of_many_writers_takes_a_value(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let start = |id: i64| client.start("member.create", &[], row(id, &email("ann@home")), None);
    let writers: Vec<JoinHandle<_>> = (0..16).map(start).collect();
    let (mut winner, mut refusals) = (None, Vec::new());
    for (id, writer) in writers.into_iter().enumerate() {
        match writer.await? {
            Ok(_) => ensure!(winner.replace(id).is_none(), "two rows have one value"),
            Err(refusal) => refusals.push(refusal),
        }
    }
    let winner = winner.context("no writer got the value")?;
    for refusal in &refusals {
        same("the code", &refusal.code, &Code::NotUnique)?;
        points_at(refusal, &["/email"])?;
        let expected = format!("it is taken by member {winner};");
        ensure!(refusal.message.contains(&expected), "{refusal}");
    }
    same("the refused", &refusals.len(), &15)?;
    // Each tenant has its own values.
    let other = client.for_tenant("other")?;
    other.create("member", 1, email("ann@home")).await.map(drop)
}

async fn a_value_is_released_on_change_and_delete(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.create("member", 1, email("a")).await?;
    client.patch("member", 1, email("b")).await?;
    client.create("member", 2, email("a")).await?;
    let refusal = client.not_patched("member", 2, email("b"), Code::NotUnique).await?;
    client.not_created("member", 1, email("b"), Code::AlreadyExists).await?;
    let expected = "member: email \"b\": it is taken by member 1; one row at most may have it";
    same("the message", &refusal.message.as_str(), &expected)?;
    client.shows("member", &id(2), &json!({"email": "a", "version": 1})).await?;
    // What stays as it is takes nothing.
    client.patch("member", 2, json!({"email": "a", "name": "Ann"})).await?;
    client.delete("member", 1).await?;
    // Under a version the row need not be read before it is written.
    client.done("member.update", &id(2), email("b"), Some(2)).await?;
    client.refused("member.update", &id(2), email("a"), Some(2), Code::VersionConflict).await?;
    client.create("member", 3, email("a")).await?;
    client.refused("member.update", &id(3), email("b"), Some(1), Code::NotUnique).await?;
    client.patch("member", 3, json!({"email": null})).await?;
    client.create("member", 4, email("a")).await?;
    // Rows without a value do not exclude each other.
    for key in 5..7 {
        client.create("member", key, json!({})).await?;
    }
    client.done("member.update", &id(4), json!({}), Some(1)).await?;
    client.create("member", 7, email("a")).await.map(drop)
}

async fn a_restored_row_takes_its_value_again(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.create("member", 1, email("a")).await?;
    client.delete("member", 1).await?;
    client.create("member", 2, email("a")).await?;
    let refusal = client.not_restored("member", 1, Code::NotUnique).await?;
    ensure!(refusal.message.contains("taken by member 2"), "{refusal}");
    client.not_restored("member", 3, Code::NotFound).await?;
    client.not_deleted("member", 3, Code::NotFound).await?;
    client.patch("member", 2, email("b")).await?;
    client.restore("member", 1).await?;
    client.not_created("member", 3, email("a"), Code::NotUnique).await?;
    client.delete("member", 1).await?;
    client.create("member", 3, email("a")).await.map(drop)
}

async fn several_fields_are_unique_together(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for room in ["red", "blue"] {
        client.create("room", room, json!({})).await?;
    }
    let slot = |room: &str, day: Option<i64>| json!({"room": room, "day": day});
    client.create("loan", 1, slot("red", Some(1))).await?;
    client.create("loan", 2, slot("red", Some(2))).await?;
    client.create("loan", 3, slot("blue", Some(1))).await?;
    let refusal = client.not_created("loan", 4, slot("red", Some(1)), Code::NotUnique).await?;
    points_at(&refusal, &["/room", "/day"])?;
    ensure!(refusal.message.contains("room \"red\" and day 1"), "{refusal}");
    // One that is not complete takes nothing.
    for key in [4, 5] {
        client.create("loan", key, slot("red", None)).await?;
    }
    client.not_patched("loan", 4, json!({"day": 2}), Code::NotUnique).await?;
    client.patch("loan", 2, json!({"room": "blue"})).await?;
    client.patch("loan", 4, json!({"day": 2})).await.map(drop)
}

async fn increments_and_mutations_keep_values_unique(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let number = |number: i64| json!({"number": number});
    let add = |amount: i64| json!({"increment": {"number": amount}});
    client.create("member", 1, number(1)).await?;
    client.create("member", 2, number(2)).await?;
    let refusal = client.refused("member.mutate", &id(1), add(1), None, Code::NotUnique).await?;
    ensure!(refusal.message.contains("number 2: it is taken by member 2"), "{refusal}");
    client.done("member.mutate", &id(1), add(2), None).await?;
    client.create("member", 3, number(1)).await?;
    client.refused("member.mutate", &id(3), json!({"set": {"number": 3}}), None, Code::NotUnique).await?;
    client.done("member.mutate", &id(3), json!({"set": {"number": 4}}), None).await?;
    client.refused("member.mutate", &id(1), add(i64::MAX), None, Code::OutOfRange).await?;
    // Increments that race all count, and what they pass is free again.
    let racing: Vec<JoinHandle<_>> =
        (0..3).map(|_| client.start("member.mutate", &id(1), add(10), None)).collect();
    for mutation in racing {
        mutation.await??;
    }
    client.shows("member", &id(1), &number(33)).await?;
    for (key, number) in [(4, 3), (5, 13), (6, 23)] {
        client.create("member", key, json!({"number": number})).await?;
    }
    client.not_created("member", 7, number(33), Code::NotUnique).await.map(drop)
}

/// Callers that have read a row are paused while others change it.
async fn a_row_that_changed_since_it_was_read_is_read_again(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let contents = |email: &str, number: i64| json!({"email": email, "number": number});
    client.create("member", 1, contents("a", 1)).await?;
    let delete = client.drafted("member.delete", &id(1), json!({}), None).await?;
    let add = json!({"increment": {"number": 1}});
    let mutate = client.drafted("member.mutate", &id(1), add, None).await?;
    client.patch("member", 1, contents("b", 5)).await?;
    client.too_late(&delete).await?;
    client.too_late(&mutate).await?;
    client.delete("member", 1).await?;
    let restore = client.drafted("member.restore", &id(1), json!({}), None).await?;
    client.restore("member", 1).await?;
    client.patch("member", 1, contents("c", 6)).await?;
    client.delete("member", 1).await?;
    // It is deleted as it was, and has other values.
    client.too_late(&restore).await?;
    for (key, email) in [(2, "a"), (3, "b"), (4, "c")] {
        client.create("member", key, json!({"email": email})).await?;
    }
    Ok(())
}

async fn a_reference_needs_a_live_row(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let of = |member: i64| json!({"member": member});
    let refusal = client.not_created("loan", 1, of(1), Code::MissingReference).await?;
    points_at(&refusal, &["/member"])?;
    let expected = "member refers to a row that is not there: member 1 does not exist";
    same("the message", &refusal.message.as_str(), &expected)?;
    client.create("member", 1, json!({})).await?;
    client.create("member", 2, json!({})).await?;
    client.delete("member", 2).await?;
    client.create("loan", 1, of(1)).await?;
    let deleted = [
        client.not_created("loan", 2, of(2), Code::MissingReference).await?,
        client.not_patched("loan", 1, of(2), Code::MissingReference).await?,
        client.refused("loan.mutate", &id(1), json!({"set": of(2)}), None, Code::MissingReference).await?,
        client.refused("loan.update", &id(1), of(2), Some(1), Code::MissingReference).await?,
    ];
    for refusal in &deleted {
        ensure!(refusal.message.contains("member 2 was deleted"), "{refusal}");
    }
    client.shows("loan", &id(1), &json!({"member": 1, "version": 1})).await?;
    client.restore("member", 2).await?;
    client.patch("loan", 1, of(2)).await?;
    client.patch("loan", 1, json!({"member": null})).await?;
    // A target that references keep may be deleted; what refers to it can change, and cannot come back.
    client.not_created("loan", 3, json!({"room": "red"}), Code::MissingReference).await?;
    client.create("room", "red", json!({})).await?;
    client.create("loan", 3, json!({"room": "red"})).await?;
    client.not_patched("loan", 3, json!({"room": "blue"}), Code::MissingReference).await?;
    client.done("room.delete", &["red".into()], json!({}), None).await?;
    client.patch("loan", 3, json!({"day": 1})).await?;
    client.delete("loan", 3).await?;
    client.not_restored("loan", 3, Code::MissingReference).await.map(drop)
}

async fn a_row_is_not_deleted_while_others_refer_to_it(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for key in 1..4 {
        client.create("member", key, json!({})).await?;
    }
    for key in 1..3 {
        client.create("loan", key, json!({"member": 1})).await?;
    }
    let refusal = client.not_deleted("member", 1, Code::Referenced).await?;
    let expected =
        "member 1 cannot be deleted: 2 loan rows refer to it by member; change or delete them first";
    same("the message", &refusal.message.as_str(), &expected)?;
    client.delete("loan", 1).await?;
    client.not_deleted("member", 1, Code::Referenced).await?;
    client.done("loan.mutate", &id(2), json!({"set": {"member": 2}}), None).await?;
    client.not_deleted("member", 2, Code::Referenced).await?;
    client.delete("member", 1).await?;
    client.not_restored("loan", 1, Code::MissingReference).await?;
    client.restore("member", 1).await?;
    client.restore("loan", 1).await?;
    client.not_deleted("member", 1, Code::Referenced).await?;
    client.patch("loan", 1, json!({"member": null})).await?;
    // Rows of one resource can refer to each other, and to themselves.
    client.patch("member", 3, json!({"boss": 1})).await?;
    let refusal = client.not_deleted("member", 1, Code::Referenced).await?;
    ensure!(refusal.message.contains("1 member row refers to it by boss"), "{refusal}");
    client.patch("member", 3, json!({"boss": 3})).await?;
    client.delete("member", 1).await?;
    client.delete("member", 3).await?;
    client.restore("member", 3).await?;
    client.create("member", 4, json!({"boss": 4})).await.map(drop)
}

async fn a_delete_races_with_a_new_reference(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for key in 0..6 {
        client.create("member", key, json!({})).await?;
        let delete = client.start("member.delete", &id(key), json!({}), None);
        let lend = client.start("loan.create", &[], row(key, &json!({"member": key})), None);
        match (delete.await?, lend.await?) {
            (Ok(_), Err(refusal)) => same("the loan", &refusal.code, &Code::MissingReference)?,
            (Err(refusal), Ok(_)) => same("the deletion", &refusal.code, &Code::Referenced)?,
            (delete, lend) => anyhow::bail!("{delete:?} and {lend:?}"),
        }
    }
    // The one who is paused comes too late.
    client.create("member", 10, json!({})).await?;
    let lend = row(10, &json!({"member": 10}));
    let lend = client.drafted("loan.create", &[], lend, None).await?;
    let delete = client.drafted("member.delete", &id(10), json!({}), None).await?;
    client.create("loan", 11, json!({"member": 10})).await?;
    client.too_late(&delete).await?;
    client.delete("loan", 11).await?;
    client.delete("member", 10).await?;
    client.too_late(&lend).await
}

async fn repetitions_take_and_count_once(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let create = || client.call_as("one", "member.create", &[], row(1, &email("a")), None);
    let first = create().await?;
    same("a repetition", &create().await?.body, &first.body)?;
    let lend = || client.call_as("two", "loan.create", &[], row(1, &json!({"member": 1})), None);
    let first = lend().await?;
    same("a repetition", &lend().await?.body, &first.body)?;
    let give_back = || client.call_as("three", "loan.delete", ONE, json!({}), None);
    for _ in 0..2 {
        give_back().await?;
    }
    let moved = || client.call_as("four", "member.patch", ONE, email("b"), None);
    moved().await?;
    client.create("member", 2, email("a")).await?;
    shows(&moved().await?, &json!({"email": "b", "version": 2}))?;
    // The value is another row's now: the repetition still has its first answer.
    same("a repetition", &create().await?.version, &Some(1))?;
    client.delete("member", 1).await.map(drop)
}

async fn calls_of_a_batch_fit_together(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let create = |id: i64, fields: Json| ("member.create", [].as_slice(), row(id, &fields));
    let (one, two) = (id(1), id(2));
    let refused = client.batched(&[create(1, email("a")), create(2, email("a"))]).await;
    let refusal = refused.err().context("two rows of a batch have one value")?;
    same("the refusal", &(refusal.code, refusal.call), &(Code::NotUnique, Some(1)))?;
    points_at(&refusal, &["/email"])?;
    client.batched(&[create(1, email("a")), create(2, email("b"))]).await?;
    // Two rows exchange their values; one takes what another releases.
    client.batched(&[("member.patch", &one, email("b")), ("member.patch", &two, email("a"))]).await?;
    client.not_created("member", 3, email("a"), Code::NotUnique).await?;
    client.batched(&[("member.delete", &one, json!({})), create(3, email("b"))]).await?;
    let refusal = client.not_restored("member", 1, Code::NotUnique).await?;
    ensure!(refusal.message.contains("taken by member 3"), "{refusal}");
    // A row and what refers to it; several references to one row.
    let lend = |id: i64, member: i64| ("loan.create", [].as_slice(), row(id, &json!({"member": member})));
    client.batched(&[lend(1, 4), create(4, json!({})), lend(2, 4)]).await?;
    let refusal = client.not_deleted("member", 4, Code::Referenced).await?;
    ensure!(refusal.message.contains("2 loan rows refer"), "{refusal}");
    client.batched(&[lend(3, 2), ("member.patch", &two, json!({"name": "Bob"}))]).await?;
    let give_back = id(3);
    client.batched(&[("loan.delete", &give_back, json!({})), lend(4, 2)]).await?;
    client.delete("loan", 4).await?;
    let refused = client.batched(&[("member.delete", &two, json!({})), lend(5, 2)]).await;
    let refusal = refused.err().context("a batch refers to a row that it deletes")?;
    same("the refusal", &(refusal.code, refusal.call), &(Code::MissingReference, Some(1)))?;
    client.delete("member", 2).await.map(drop)
}

async fn children_of_a_thread_keep_constraints(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.create("member", 1, json!({})).await?;
    let key = |id: &str| [Value::Int(1), id.into()];
    let child = |id: &str, title: &str, author: i64| json!({"post": 1, "comment_id": id, "title": title, "author": author});
    let title = |title: &str| json!({"title": title});
    client.done("comment.append", &[], child("x", "a", 1), None).await?;
    client.done("comment.append", &[], child("x", "a", 1), None).await?;
    let refusal = client.refused("comment.append", &[], child("y", "a", 1), None, Code::NotUnique).await?;
    ensure!(refusal.message.contains("taken by comment 1,x"), "{refusal}");
    client.refused("comment.append", &[], child("y", "b", 2), None, Code::MissingReference).await?;
    let refusal = client.not_deleted("member", 1, Code::Referenced).await?;
    ensure!(refusal.message.contains("1 comment row refers to it by author"), "{refusal}");
    let draft = async |action: &str, input: Json| {
        client.drafted(&format!("comment.{action}"), &key("x"), input, None).await
    };
    let edited = draft("edit", title("z")).await?;
    let (hidden, removed) = (draft("hide", json!({})).await?, draft("remove", json!({})).await?);
    client.done("comment.edit", &key("x"), title("b"), None).await?;
    for late in [&edited, &hidden, &removed] {
        client.too_late(late).await?;
    }
    // What is hidden has no value and refers to nothing.
    client.done("comment.hide", &key("x"), json!({}), None).await?;
    let restored = draft("restore", json!({})).await?;
    client.done("comment.restore", &key("x"), json!({}), None).await?;
    client.done("comment.edit", &key("x"), title("c"), None).await?;
    client.done("comment.hide", &key("x"), json!({}), None).await?;
    client.too_late(&restored).await?;
    client.done("comment.append", &[], child("y", "c", 1), None).await?;
    client.refused("comment.restore", &key("x"), json!({}), None, Code::NotUnique).await?;
    client.done("comment.remove", &key("y"), json!({}), None).await?;
    client.delete("member", 1).await?;
    client.refused("comment.restore", &key("x"), json!({}), None, Code::MissingReference).await?;
    client.restore("member", 1).await?;
    client.done("comment.restore", &key("x"), json!({}), None).await?;
    client.refused("comment.append", &[], child("v", "c", 1), None, Code::NotUnique).await?;
    for free in ["a", "b", "z"] {
        client.done("comment.append", &[], child(free, free, 1), None).await?;
    }
    client.not_deleted("member", 1, Code::Referenced).await.map(drop)
}

async fn reactions_keep_constraints(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.create("member", 1, json!({"email": "a", "name": "staff"})).await?;
    client.drain_workers().await?;
    client.shows("badge", &["1".into()], &email("a")).await?;
    let refusal = client.not_created("badge", "2", email("a"), Code::NotUnique).await?;
    ensure!(refusal.message.contains("taken by badge 1"), "{refusal}");
    client.create("badge", "3", email("b")).await?;
    client.create("member", 2, json!({"email": "b", "name": "staff"})).await?;
    client.drain_workers().await?;
    client.refused("badge.read", &["2".into()], json!({}), None, Code::NotFound).await?;
    client.create("badge", "4", email("c")).await?;
    client.create("member", 4, json!({"email": "d", "name": "staff"})).await?;
    client.drain_workers().await?;
    client.shows("badge", &["4".into()], &email("c")).await
}
