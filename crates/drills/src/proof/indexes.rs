//! Indexes that a blueprint declares: which rows a list finds by them, in which order, and what it refuses.
//!
//! Indexes may lag on some engines, so that a list is read again until it shows what it has to show in the end.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Operation, Principal, Refusal};
use statehouse_store::{ManualClock, SystemClock, Time};

use super::constraints::problem_at;
use super::indexes;
use crate::conformance::{Case, cases};
use crate::harness::engines::TestNamespace;
use crate::harness::recorder::{Actor, acting};
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::TenantClient;

pub(crate) const CASES: &[Case] = cases! {
    indexes {
        a_list_reads_a_prefix_of_an_index(3),
        a_list_reads_a_range_in_both_directions(3),
        pages_go_on_while_rows_change(3),
        rows_without_a_value_are_never_missing(3),
        deleted_rows_are_listed_on_request_only(3),
        many_keys_are_read_at_once(5),
        a_list_shows_the_fields_that_are_asked_for(3),
        a_filter_without_an_index_is_refused_with_the_line_to_add(3),
        tenants_do_not_see_each_other(3),
        a_cursor_of_another_list_is_refused(3),
        every_archetype_with_rows_lists_by_its_indexes(7),
        rows_are_listed_as_they_are_shown(6),
        lists_need_no_filter_that_an_index_can_do_without(8),
        rules_for_end_users_hold_for_filters(3),
        an_index_can_change_under_its_name(3),
        bad_indexes_are_reported_at_their_line(1),
    }
};

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.tool]
key    = { id = "int" }
require_version = false
fields = { category = "text", price = "int", color = "text", owner = "text?", weight = "int?", notes = "json?" }
indexes = { by_category = ["category", "-price"], by_price = ["+price"], by_owner = ["owner"], by_weight = ["color", "weight"] }

[entity.plain]
key    = { id = "int" }
fields = { category = "text", notes = "json?" }

[entity.note]
key     = { id = "int" }
fields  = { owner = "text", body = "text" }
indexes = { by_owner = ["owner", "-updated_at"] }

[entity.note.allow]
list = "owner = claim.sub"

[thread.comment]
parent  = { post_id = "int" }
fields  = { author = "int", body = "text" }
indexes = { by_author = ["author", "-posted_at"] }

[relation.follows]
from    = { follower = "int" }
to      = { followed = "int" }
fields  = { kind = "text" }
indexes = { by_kind = ["kind"], by_followed = ["followed", "-updated_at"] }

[booking.seat]
key     = { event_id = "text", seat_no = "text" }
fields  = { section = "text" }
hold_for = "10m"
indexes = { by_section = ["section", "seat_no"], by_state = ["state", "section"] }

[timer.reminder]
key     = { id = "text" }
indexes = { by_due = ["status", "due_at"] }

[schedule.job]
"#;

async fn open(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    TenantClient::open(namespace, BLUEPRINT).await
}

/// Tools 1 to 6: hand tools of the prices 1 to 4, power tools of the prices 3 and 5.
async fn tools(client: &TenantClient) -> Result<()> {
    for (id, category, price) in
        [(1, "hand", 1), (2, "hand", 2), (3, "hand", 3), (4, "hand", 4), (5, "power", 3), (6, "power", 5)]
    {
        let input = json!({"id": id, "category": category, "price": price, "color": "red"});
        client.done("tool.create", &[], input, None).await?;
    }
    Ok(())
}

/// What the rows of an answer have in a column.
fn column(answer: &Answer, name: &str) -> Json {
    let rows = answer.body.as_array().into_iter().flatten();
    Json::Array(rows.map(|row| row[name].clone()).collect())
}

/// Reads a list until it shows these values in a column.
async fn lists(
    client: &TenantClient,
    action: &str,
    input: Json,
    name: &str,
    expected: Json,
) -> Result<Answer> {
    let mut answer = client.done(action, &[], input.clone(), None).await?;
    for _ in 0..1_000 {
        if column(&answer, name) == expected {
            return Ok(answer);
        }
        pause().await;
        answer = client.done(action, &[], input.clone(), None).await?;
    }
    anyhow::bail!("{action} {input}: expected {expected} in {name}, got {}", answer.body)
}

async fn found(client: &TenantClient, input: Json, expected: Json) -> Result<Answer> {
    lists(client, "tool.list", input, "id", expected).await
}

/// What a list says that is refused: where, and why.
async fn said(client: &TenantClient, action: &str, input: Json) -> Result<(String, String)> {
    let refusal = client.refused(action, &[], input, None, Code::InvalidInput).await?;
    let first = refusal.field_errors.into_iter().next();
    Ok(first.map_or((String::new(), refusal.message), |error| (error.pointer, error.detail)))
}

async fn a_list_reads_a_prefix_of_an_index(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tools(&client).await?;
    found(&client, json!({"category": "hand"}), json!([4, 3, 2, 1])).await?;
    found(&client, json!({"category": "power"}), json!([6, 5])).await?;
    found(&client, json!({"category": "power", "price": 3}), json!([5])).await?;
    found(&client, json!({"price": 3}), json!([3, 5])).await?;
    found(&client, json!({"category": "foot"}), json!([])).await?;
    client.done("tool.patch", &[3.into()], json!({"category": "power", "owner": "ann"}), None).await?;
    found(&client, json!({"category": "hand"}), json!([4, 2, 1])).await?;
    found(&client, json!({"owner": "ann"}), json!([3])).await?;
    client.done("tool.patch", &[3.into()], json!({"owner": null}), None).await?;
    found(&client, json!({"owner": "ann"}), json!([])).await?;
    // What the archetype itself lists by goes on as before.
    lists(&client, "tool.list", json!({"status": "ACTIVE"}), "id", json!([3, 6, 5, 4, 2, 1])).await.map(drop)
}

async fn a_list_reads_a_range_in_both_directions(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tools(&client).await?;
    let hand = |name: &str, value: i64, sort: &str| json!({"category": "hand", name: value, "sort": sort});
    for (name, up) in [
        ("price.gte", json!([2, 3, 4])),
        ("price.gt", json!([3, 4])),
        ("price.lte", json!([1, 2])),
        ("price.lt", json!([1])),
    ] {
        let mut down = up.clone();
        down.as_array_mut().into_iter().for_each(|ids| ids.reverse());
        found(&client, hand(name, 2, "price"), up).await?;
        found(&client, hand(name, 2, "-price"), down.clone()).await?;
        // The sign of the declaration counts where the call gives none.
        found(&client, json!({"category": "hand", name: 2}), down).await?;
    }
    found(&client, json!({"category": "hand", "price.gt": 1, "price.lte": 3}), json!([3, 2])).await?;
    // Nothing is fixed: all rows of the tenant are in the order of the price.
    found(&client, json!({"price.gte": 3}), json!([3, 5, 4, 6])).await?;
    found(&client, json!({"price.lt": 4, "sort": "-price"}), json!([5, 3, 2, 1])).await?;
    found(&client, json!({"sort": "-price"}), json!([6, 4, 5, 3, 2, 1])).await?;
    found(&client, json!({"price.gt": 3, "price.lt": 3}), json!([])).await.map(drop)
}

/// Rows that stay where they are show up once, whatever comes and goes beside them.
async fn pages_go_on_while_rows_change(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for id in 1..=7 {
        let input = json!({"id": id, "category": "hand", "price": id * 10, "color": "red"});
        client.done("tool.create", &[], input, None).await?;
    }
    let page = |cursor: Option<&String>| {
        let mut input = json!({"category": "hand", "limit": 2});
        if let Some(cursor) = cursor {
            input["cursor"] = json!(cursor);
        }
        input
    };
    found(&client, json!({"category": "hand"}), json!([7, 6, 5, 4, 3, 2, 1])).await?;
    let first = found(&client, page(None), json!([7, 6])).await?;
    let new = |id: i64, price: i64| json!({"id": id, "category": "hand", "price": price, "color": "red"});
    client.done("tool.create", &[], new(8, 65), None).await?;
    client.done("tool.create", &[], new(9, 45), None).await?;
    client.done("tool.delete", &[5.into()], json!({}), None).await?;
    // It was shown already, and is further on now.
    client.done("tool.patch", &[7.into()], json!({"price": 15}), None).await?;
    let second = found(&client, page(first.next.as_ref()), json!([9, 4])).await?;
    client.done("tool.patch", &[1.into()], json!({"category": "power"}), None).await?;
    let third = found(&client, page(second.next.as_ref()), json!([3, 2])).await?;
    let last = found(&client, page(third.next.as_ref()), json!([7])).await?;
    let behind = match &last.next {
        Some(_) => found(&client, page(last.next.as_ref()), json!([])).await?.next,
        None => None,
    };
    same("a page behind the last", &behind, &None)
}

/// A row is in an index only while all its columns are set.
async fn rows_without_a_value_are_never_missing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for (id, weight) in [(1, json!(5)), (2, Json::Null)] {
        let input = json!({"id": id, "category": "hand", "price": 1, "color": "red", "weight": weight});
        client.done("tool.create", &[], input, None).await?;
    }
    found(&client, json!({"color": "red", "weight.gte": 0}), json!([1])).await?;
    found(&client, json!({"color": "red", "weight": 5}), json!([1])).await?;
    for filter in [json!({"color": "red"}), json!({"color": "red", "sort": "weight"})] {
        let (at, why) = said(&client, "tool.list", filter).await?;
        same("the place", &at.as_str(), &"/color")?;
        ensure!(why.contains("index by_weight has no rows without weight"), "{why}");
    }
    Ok(())
}

async fn deleted_rows_are_listed_on_request_only(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tools(&client).await?;
    client.done("tool.delete", &[4.into()], json!({}), None).await?;
    found(&client, json!({"category": "hand"}), json!([3, 2, 1])).await?;
    found(&client, json!({"price.gte": 4}), json!([6])).await?;
    found(&client, json!({"category": "hand", "status": "DELETED"}), json!([4])).await?;
    found(&client, json!({"keys": "4,3"}), json!([3])).await?;
    found(&client, json!({"keys": "4,3", "status": "DELETED"}), json!([4])).await?;
    client.done("tool.restore", &[4.into()], json!({}), None).await?;
    found(&client, json!({"category": "hand"}), json!([4, 3, 2, 1])).await.map(drop)
}

/// A read by keys is strong: it shows at once what was written before.
async fn many_keys_are_read_at_once(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tools(&client).await?;
    let shown = |keys: &str| {
        let (client, input) = (client.clone(), json!({"keys": keys}));
        async move { anyhow::Ok(column(&client.done("tool.list", &[], input, None).await?, "id")) }
    };
    same("keys", &shown("3,1,99,1,6").await?, &json!([3, 1, 6]))?;
    same("a missing key", &shown("99").await?, &json!([]))?;
    let expect = [("1,x", "id must be int"), ("", "id must be int")];
    for (keys, why) in expect {
        same(
            "keys",
            &said(&client, "tool.list", json!({"keys": keys})).await?,
            &("/keys".into(), why.into()),
        )?;
    }
    let many: Vec<String> = (0..101).map(|id| id.to_string()).collect();
    let (_, why) = said(&client, "tool.list", json!({"keys": many.join(",")})).await?;
    same("too many", &why.as_str(), &"there are 101 keys; the limit is 100")?;
    for other in ["category", "cursor"] {
        let (at, why) = said(&client, "tool.list", json!({"keys": "1", other: "hand"})).await?;
        same("another filter", &(at, why), &(format!("/{other}"), "it does not go with `keys`".into()))?;
    }
    // A key of several parts; a comma within one is encoded.
    for (event_id, seat_no) in [("a,b", "1"), ("c", "2")] {
        let input = json!({"event_id": event_id, "seat_no": seat_no, "section": "x"});
        client.done("seat.create", &[], input, None).await?;
    }
    let seats = client.done("seat.list", &[], json!({"keys": "c,2,a%2Cb,1"}), None).await?;
    same("seats", &column(&seats, "event_id"), &json!(["c", "a,b"]))?;
    let (_, why) = said(&client, "seat.list", json!({"keys": "c,2,c"})).await?;
    same("half a key", &why.as_str(), &"a key of seat is event_id,seat_no")
}

async fn a_list_shows_the_fields_that_are_asked_for(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tools(&client).await?;
    found(&client, json!({"category": "power"}), json!([6, 5])).await?;
    let input = json!({"category": "power", "fields": "id,price"});
    let answer = found(&client, input, json!([6, 5])).await?;
    same("an index", &answer.body, &json!([{"id": 6, "price": 5}, {"id": 5, "price": 3}]))?;
    let answer =
        client.done("tool.list", &[], json!({"keys": "2", "fields": "price, category"}), None).await?;
    same("keys", &answer.body, &json!([{"price": 2, "category": "hand"}]))?;
    let input = json!({"status": "ACTIVE", "fields": "id"});
    let answer = lists(&client, "tool.list", input, "id", json!([6, 5, 4, 3, 2, 1])).await?;
    same("the own list", &answer.body[0], &json!({"id": 6}))?;
    let (at, why) = said(&client, "tool.list", json!({"fields": "id,prise"})).await?;
    same(
        "an unknown field",
        &(at.as_str(), why.as_str()),
        &("/fields", "there is no field \"prise\"; did you mean price?"),
    )
}

async fn a_filter_without_an_index_is_refused_with_the_line_to_add(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let client = open(namespace).await?;
    let add = "add this to `indexes` of [entity.tool] in the blueprint: ";
    for (input, at, line) in [
        (
            json!({"category": "hand", "owner": "ann"}),
            "/category",
            "by_category_owner = [\"category\", \"owner\"]",
        ),
        (json!({"category.gte": "a"}), "/category.gte", "by_category = [\"+category\"]"),
        (json!({"owner": "ann", "sort": "-price"}), "/owner", "by_owner_price = [\"owner\", \"-price\"]"),
        (
            json!({"status": "ACTIVE", "sort": "-updated_at"}),
            "/sort",
            "by_status_updated_at = [\"status\", \"-updated_at\"]",
        ),
    ] {
        let (place, why) = said(&client, "tool.list", input).await?;
        same("the place", &place.as_str(), &at)?;
        ensure!(why.ends_with(&format!("{add}{line}")), "{why}");
    }
    let (place, why) = said(&client, "plain.list", json!({"category": "hand"})).await?;
    same("the place", &place.as_str(), &"/category")?;
    let line = "add this line to [entity.plain] in the blueprint: indexes = { by_category = [\"category\"] }";
    ensure!(why.ends_with(line), "{why}");
    let (_, why) = said(&client, "plain.list", json!({"notes": "x"})).await?;
    ensure!(why.contains("notes has no order"), "{why}");
    let (_, why) = said(&client, "plain.list", json!({"colour": "x"})).await?;
    ensure!(why.contains("there is no such property"), "{why}");
    let (_, why) = said(&client, "tool.list", json!({"sort": "prise"})).await?;
    ensure!(why.contains("there is no column prise; did you mean price?"), "{why}");
    let (_, why) = said(&client, "tool.list", json!({"price.gte": 1, "weight.gte": 1})).await?;
    ensure!(why.contains("a range of one column"), "{why}");
    // The line that is advised is a good one.
    let text =
        BLUEPRINT.replace("by_price = [", "by_category_owner = [\"category\", \"owner\"], by_price = [");
    let client = TenantClient::over(client.house.store().clone(), &text, Arc::new(SystemClock)).await?;
    let input = json!({"id": 1, "category": "hand", "price": 1, "color": "red", "owner": "ann"});
    client.done("tool.create", &[], input, None).await?;
    found(&client, json!({"category": "hand", "owner": "ann"}), json!([1])).await.map(drop)
}

async fn tenants_do_not_see_each_other(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    let other = client.for_tenant("globex")?;
    tools(&client).await?;
    let input = json!({"id": 1, "category": "hand", "price": 3, "color": "red"});
    other.done("tool.create", &[], input, None).await?;
    found(&other, json!({"category": "hand"}), json!([1])).await?;
    found(&other, json!({"price.gte": 0}), json!([1])).await?;
    found(&other, json!({"keys": "1,2,3"}), json!([1])).await?;
    let page = found(&client, json!({"category": "hand", "limit": 1}), json!([4])).await?;
    // A cursor only says where to go on.
    let input = json!({"category": "hand", "limit": 5, "cursor": page.next});
    found(&other, input, json!([1])).await.map(drop)
}

async fn a_cursor_of_another_list_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tools(&client).await?;
    let page = found(&client, json!({"category": "hand", "limit": 1}), json!([4])).await?;
    ensure!(page.next.is_some(), "there are more rows");
    for input in [
        json!({"price.gte": 1, "cursor": page.next}),
        json!({"status": "ACTIVE", "cursor": page.next}),
        json!({"category": "hand", "cursor": "x"}),
    ] {
        client.refused("tool.list", &[], input, None, Code::InvalidInput).await?;
    }
    Ok(())
}

async fn every_archetype_with_rows_lists_by_its_indexes(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for (post_id, comment_id, author) in [(1, "a", 7), (2, "b", 7), (2, "c", 8)] {
        let input = json!({"post_id": post_id, "comment_id": comment_id, "author": author, "body": "x"});
        client.done("comment.append", &[], input, None).await?;
    }
    let by_author = || json!({"author": 7});
    lists(&client, "comment.list", by_author(), "comment_id", json!(["b", "a"])).await?;
    lists(&client, "comment.list", json!({"post_id": 2}), "comment_id", json!(["c", "b"])).await?;
    let (at, why) = said(&client, "comment.list", json!({})).await?;
    same("nothing is given", &(at.as_str(), why.as_str()), &("/post_id", "it is required"))?;
    let (at, _) = said(&client, "comment.list", json!({"author": 7, "order": "oldest"})).await?;
    same("an input of the own list", &at.as_str(), &"/order")?;
    client.done("comment.hide", &[1.into(), "a".into()], json!({}), None).await?;
    lists(&client, "comment.list", by_author(), "comment_id", json!(["b"])).await?;
    for followed in [2, 3] {
        client.done("follows.add", &[1.into(), followed.into()], json!({"kind": "close"}), None).await?;
    }
    lists(&client, "follows.list", json!({"kind": "close"}), "followed", json!([2, 3])).await?;
    let answer = lists(&client, "follows.list", json!({"followed": 2}), "follower", json!([1])).await?;
    same("as `has` shows it", &answer.body[0]["has"], &json!(true))?;
    client.done("follows.remove", &[1.into(), 2.into()], json!({}), None).await?;
    lists(&client, "follows.list", json!({"followed": 2}), "follower", json!([])).await?;
    lists(&client, "follows.list", json!({"kind": "close"}), "followed", json!([3])).await?;
    let (_, why) = said(&client, "follows.list", json!({})).await?;
    same("nothing is given", &why.as_str(), &"say which rows: give kind or followed")?;
    for id in ["a", "b"] {
        let input = json!({"due_at": "2099-01-01T00:00:00Z"});
        client.done("reminder.set", &[id.into()], input, None).await?;
    }
    let input = json!({"status": "SET", "due_at.gt": "2098-01-01T00:00:00Z"});
    lists(&client, "reminder.list", input, "id", json!(["a", "b"])).await.map(drop)
}

/// A hold that is over reads as free before a worker has freed it, so it is not listed as held.
async fn rows_are_listed_as_they_are_shown(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, clock.clone()).await?;
    let input = json!({"event_id": "e1", "seat_no": "1", "section": "x"});
    client.done("seat.create", &[], input, None).await?;
    let input = json!({"booking_id": "b1", "event_id": "e1", "seat_no": ["1"], "holder": "ann"});
    client.done("seat_booking.hold", &[], input, None).await?;
    let held = || json!({"state": "HELD", "section": "x"});
    lists(&client, "seat.list", held(), "seat_no", json!(["1"])).await?;
    clock.advance(Duration::from_secs(601));
    lists(&client, "seat.list", held(), "seat_no", json!([])).await?;
    let seats = lists(&client, "seat.list", json!({"section": "x"}), "seat_no", json!(["1"])).await?;
    same("the state", &column(&seats, "state"), &json!(["AVAILABLE"]))?;
    let seats = client.done("seat.list", &[], json!({"keys": "e1,1"}), None).await?;
    same("the state", &column(&seats, "state"), &json!(["AVAILABLE"]))
}

/// Seats of a section, bookings that are open, jobs of an order key.
async fn lists_need_no_filter_that_an_index_can_do_without(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for (event_id, seat_no, section) in [("e1", "1", "x"), ("e2", "2", "x"), ("e1", "3", "y")] {
        let input = json!({"event_id": event_id, "seat_no": seat_no, "section": section});
        client.done("seat.create", &[], input, None).await?;
    }
    for (booking_id, seat_no, holder) in [("b1", "1", "ann"), ("b3", "3", "bob")] {
        let input =
            json!({"booking_id": booking_id, "event_id": "e1", "seat_no": [seat_no], "holder": holder});
        client.done("seat_booking.hold", &[], input, None).await?;
    }
    let seats = lists(&client, "seat.list", json!({"section": "x"}), "seat_no", json!(["1", "2"])).await?;
    same("the states", &column(&seats, "state"), &json!(["HELD", "AVAILABLE"]))?;
    let bookings = |input: Json, ids: Json| lists(&client, "seat_booking.list", input, "booking_id", ids);
    bookings(json!({}), json!(["b3", "b1"])).await?;
    client.done("seat_booking.confirm", &["b1".into()], json!({}), None).await?;
    bookings(json!({}), json!(["b3"])).await?;
    bookings(json!({"state": "CONFIRMED"}), json!(["b1"])).await?;
    bookings(json!({"holder": "ann"}), json!(["b1"])).await?;
    bookings(json!({"holder": "ann", "state": "IN_PROGRESS"}), json!([])).await?;
    for (job_id, queue) in [("j1", "default"), ("j2", "slow")] {
        client
            .done("job.enqueue", &[], json!({"job_id": job_id, "queue": queue, "order_key": "k"}), None)
            .await?;
    }
    client.done("job.enqueue", &[], json!({"job_id": "j3"}), None).await?;
    let jobs = |input: Json, ids: Json| lists(&client, "job.list", input, "job_id", ids);
    jobs(json!({"order_key": "k"}), json!(["j2", "j1"])).await?;
    jobs(json!({"order_key": "k", "queue": "slow"}), json!(["j2"])).await?;
    jobs(json!({"order_key": "k", "state": "FAILED"}), json!([])).await?;
    jobs(json!({}), json!(["j3", "j1"])).await.map(drop)
}

/// Calls a list on behalf of an end user.
async fn list_as(client: &TenantClient, sub: &str, input: Json) -> Result<Answer, Refusal> {
    let request = TenantClient::request("note.list", &[], &input, None);
    let claims = json!({"sub": sub}).as_object().cloned().map(Arc::new);
    let caller = Principal { tenant: client.tenant.clone(), claims, actor: None };
    let actor = Actor { archetype: "entity", name: request.action.clone() };
    acting(actor, client.house.call(&caller, request, Operation::default())).await
}

async fn rules_for_end_users_hold_for_filters(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    for (id, owner) in [(1, "ann"), (2, "bob"), (3, "ann")] {
        let input = json!({"id": id, "owner": owner, "body": "x"});
        client.done("note.create", &[], input, None).await?;
    }
    let input = json!({"owner": "ann"});
    lists(&client, "note.list", input.clone(), "id", json!([3, 1])).await?;
    // What the rule names need not be shown.
    let few = json!({"owner": "ann", "fields": "id"});
    let mut answer = list_as(&client, "ann", few.clone()).await?;
    for _ in 0..1_000 {
        if answer.body == json!([{"id": 3}, {"id": 1}]) {
            break;
        }
        pause().await;
        answer = list_as(&client, "ann", few.clone()).await?;
    }
    same("the notes of Ann", &answer.body, &json!([{"id": 3}, {"id": 1}]))?;
    for input in [input, json!({}), json!({"keys": "1,2"}), json!({"owner": "ann", "sort": "-updated_at"})] {
        let refusal = list_as(&client, "bob", input.clone()).await.err().map(|refusal| refusal.code);
        same(&format!("{input}"), &refusal, &Some(Code::Forbidden))?;
    }
    Ok(())
}

/// The rows that exist are in the new index, and the old one does no harm.
async fn an_index_can_change_under_its_name(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    tools(&client).await?;
    let text = BLUEPRINT
        .replace("by_category = [\"category\", \"-price\"]", "by_category = [\"category\", \"color\"]");
    let other = TenantClient::over(store, &text, Arc::new(SystemClock)).await?;
    found(&other, json!({"category": "power", "color": "red"}), json!([5, 6])).await?;
    other.done("tool.patch", &[6.into()], json!({"color": "blue"}), None).await?;
    found(&other, json!({"category": "power", "color": "red"}), json!([5])).await?;
    let (_, why) = said(&other, "tool.list", json!({"category": "power", "price.gte": 1})).await?;
    ensure!(why.contains("by_category_price = [\"category\", \"price\"]"), "{why}");
    Ok(())
}

async fn bad_indexes_are_reported_at_their_line(_: &dyn TestNamespace) -> Result<()> {
    let entity = |indexes: &str| {
        format!(
            "[entity.tool]\nkey = {{ id = 'int' }}\nfields = {{ category = 'text', notes = 'json?', sort = 'text', views = \
             'int?' }}\nhot = ['views']\nindexes = {indexes}\n"
        )
    };
    for (indexes, expected) in [
        ("{ by_x = ['categry'] }", "did you mean `category`?"),
        ("{ by_x = ['views'] }", "`tool` has no column `views` that an index can have"),
        ("{ by_x = ['version'] }", "`tool` has no column `version` that an index can have"),
        ("{ by_x = ['category', 'notes'] }", "`notes` is json, which has no order"),
        ("{ by_x = ['sort'] }", "every list has an input `sort`"),
        ("{ by_x = ['category', 'category'] }", "names `category` twice"),
        ("{ by_x = ['category', '-updated_at', 'id'] }", "columns in both directions"),
        ("{ by_x = ['category'], by_y = ['category'] }", "`by_y` has the same columns as `by_x`"),
        ("{ by_x = ['category', 'id'], by_y = ['category', '-id'] }", "with `sort`"),
        ("{ by_x = [] }", "has 0 columns; an index has from 1 to 8"),
        ("{ by_x = 'category' }", "`by_x` must be a list of columns, not text"),
        ("{ by_x = [1] }", "a column must be text, not an integer"),
        ("['category']", "`indexes` must be a table of names and columns, not a list"),
        ("{ by_x = ['category'], by_x = ['id'] }", "duplicate key"),
    ] {
        problem_at(&entity(indexes), 5, expected)?;
    }
    let hidden = "[schedule.job]\nindexes = { by_x = ['run_shard'] }\n";
    problem_at(hidden, 2, "`run_shard` is not shown to callers")?;
    let no_rows = format!(
        "{}[view.sizes]\nof = 'tool'\ncount = true\nindexes = {{ by_x = ['count'] }}\n",
        entity("{}")
    );
    problem_at(&no_rows, 9, "has no column `count` that an index can have")
}
