//! A06 Inventory: what each action does and refuses, and what many callers at once may not break.

mod cells;
mod low;
mod races;
mod stocks;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::house::Operation;
use statehouse::{Answer, Blueprint, Code};
use statehouse_store::{Clock, ManualClock, Time, Value};

use self::cells::*;
use self::low::*;
use self::races::*;
use self::stocks::*;
use super::cases as inventory;
use crate::conformance::{Case, cases};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    inventory {
        stock_is_reserved_bought_and_returned(7),
        lines_of_one_row_are_added_up(5),
        a_reservation_is_all_or_nothing(5),
        a_repetition_gets_its_own_reservation(5),
        a_part_is_bought_and_the_rest_is_released(7),
        nothing_is_bought_after_the_end(6),
        the_sweeper_ends_what_is_over(6),
        a_caller_that_lacks_stock_ends_what_is_over(6),
        extensions_are_bounded(5),
        a_reservation_without_an_end_lasts(4),
        reservations_are_listed_by_holder_and_state(5),
        an_order_and_its_reservation_are_one_plan(7),
        stocks_of_tenants_are_apart(5),
        nonsense_is_refused_and_writes_nothing(5),
        more_is_ordered_than_there_is(4),
        a_stock_is_corrected_as_far_as_it_is_available(4),
        a_count_replaces_what_was_seen(5),
        stock_moves_to_another_row(7),
        only_what_was_sold_comes_back(6),
        fields_lists_and_availability_are_read(4),
        movements_tell_what_moved(7),
        a_version_that_was_seen_is_demanded(4),
        the_event_low_is_left_when_stock_falls_to_the_threshold(5),
        each_way_down_leaves_the_event_low(7),
        a_threshold_that_was_crossed_meanwhile_is_told_once(5),
        stock_that_was_added_meanwhile_is_seen(5),
        stock_that_went_meanwhile_is_not_sold_twice(5),
        many_callers_never_oversell(5),
        buying_and_expiring_have_one_winner(6),
        a_count_and_a_reservation_have_one_winner(5),
        a_reservation_that_was_bought_meanwhile_is_not_swept(6),
        a_movement_is_written_once(4),
        an_end_can_be_given_to_reservations_without_one(4),
        rows_that_do_not_agree_are_not_made_worse(5),
        settings_that_contradict_each_other_are_refused(1),
        a_stock_of_cells_reads_as_one(9),
        a_reservation_takes_from_several_cells(9),
        cells_are_ordered_beyond_what_there_is_once(9),
        no_refusal_is_an_artefact_of_cells(9),
        what_moves_between_cells_is_not_missed(9),
        cells_are_made_even(9),
        two_balancers_do_not_undo_each_other(9),
        stocks_of_cells_are_corrected_counted_and_moved(9),
        a_version_of_cells_is_judged_in_the_write(9),
        cells_that_do_not_agree_are_not_made_worse(9),
        a_cell_that_had_nothing_is_not_missed(9),
        a_cell_that_had_too_little_is_not_missed(9),
        the_event_low_is_left_by_all_cells_together(9),
        the_event_low_of_cells_is_left_once(9),
        a_stock_can_be_cut_into_cells(9),
        many_callers_of_cells_get_what_there_is(9),
    }
};

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[inventory.stock]
key       = { sku = "text", location = "text" }
fields    = { title = "text?" }
hold_for  = "10m"
hold_max  = "20m"
lines_max = 4
shards    = 2

[inventory.ware]
key       = { code = "int" }
fields    = { weight = "int" }
hold_for  = ""
backorder = 3
low       = 5
movements = "log"
shards    = 2

[entity.order]
key    = { order_id = "text" }
fields = { total = "int" }
"#;

const MINUTE: Duration = Duration::from_secs(60);

/// A house with mugs in Berlin and Oslo, on a clock that stands until it is moved.
async fn shop(
    namespace: &dyn TestNamespace,
    berlin: i64,
    oslo: i64,
) -> Result<(TenantClient, Arc<ManualClock>)> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, clock.clone()).await?;
    for (location, quantity) in [("berlin", berlin), ("oslo", oslo)] {
        if quantity > 0 {
            client.done("stock.restock", &mug(location), json!({"quantity": quantity}), None).await?;
        }
    }
    Ok((client, clock))
}

fn mug(location: &str) -> [Value; 2] {
    ["mug".into(), location.into()]
}

fn id(reservation: &str) -> [Value; 1] {
    [reservation.into()]
}

fn line(location: &str, quantity: i64) -> Json {
    json!({"sku": "mug", "location": location, "quantity": quantity})
}

fn wanted(reservation: &str, lines: &[(&str, i64)]) -> Json {
    let lines: Vec<Json> = lines.iter().map(|(location, quantity)| line(location, *quantity)).collect();
    json!({"reservation_id": reservation, "lines": lines, "holder": "ann"})
}

async fn reserve(client: &TenantClient, reservation: &str, lines: &[(&str, i64)]) -> Result<Answer> {
    client.done("stock_reservation.reserve", &[], wanted(reservation, lines), None).await
}

async fn refuse(client: &TenantClient, input: Json, code: Code) -> Result<String> {
    Ok(client.refused("stock_reservation.reserve", &[], input, None, code).await?.message)
}

/// Available, reserved, sold, stocked.
async fn has(client: &TenantClient, location: &str, expected: [i64; 4]) -> Result<()> {
    let names = ["available", "reserved", "sold", "stocked"];
    let got = client.shown("stock", &mug(location), &names).await?;
    same(&format!("the stock in {location}"), &got, &expected.map(Json::from).to_vec())
}

async fn act(client: &TenantClient, action: &str, reservation: &str) -> Result<Answer> {
    client.done(&format!("stock_reservation.{action}"), &id(reservation), json!({}), None).await
}

async fn refuse_act(client: &TenantClient, action: &str, reservation: &str, code: Code) -> Result<()> {
    let action = format!("stock_reservation.{action}");
    client.refused(&action, &id(reservation), json!({}), None, code).await.map(drop)
}

async fn stock_is_reserved_bought_and_returned(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 5, 2).await?;
    let reserved = reserve(&client, "r1", &[("berlin", 2), ("oslo", 1)]).await?;
    same("the key", &reserved.created.as_deref(), &Some("r1"))?;
    let lines = json!([line("berlin", 2), line("oslo", 1)]);
    let end = clock.now().plus(MINUTE * 10).to_string();
    shows(
        &reserved,
        &json!({"state": "RESERVED", "lines": lines, "holder": "ann", "expires_at": end, "bought": null}),
    )?;
    has(&client, "berlin", [3, 2, 0, 5]).await?;
    let bought = act(&client, "commit", "r1").await?;
    shows(
        &bought,
        &json!({"state": "COMMITTED", "bought": lines, "committed_at": clock.now().to_string(), "version": 2}),
    )?;
    has(&client, "berlin", [3, 0, 2, 5]).await?;
    has(&client, "oslo", [1, 0, 1, 2]).await?;
    for action in ["commit", "release", "extend", "expire"] {
        refuse_act(&client, action, "r1", Code::WrongState).await?;
        refuse_act(&client, action, "unknown", Code::NotFound).await?;
    }
    let back = json!({"quantity": 1, "reservation_id": "r1", "reason": "broken"});
    shows(
        &client.done("stock.return", &mug("berlin"), back, None).await?,
        &json!({"available": 4, "sold": 1}),
    )?;
    reserve(&client, "r2", &[("berlin", 1)]).await?;
    shows(&act(&client, "release", "r2").await?, &json!({"state": "RELEASED"}))?;
    refuse_act(&client, "release", "r2", Code::WrongState).await?;
    has(&client, "berlin", [4, 0, 1, 5]).await
}

async fn lines_of_one_row_are_added_up(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 0).await?;
    // Each by itself would fit.
    let message = refuse(&client, wanted("r1", &[("berlin", 3), ("berlin", 3)]), Code::OutOfStock).await?;
    ensure!(message.contains("stock mug,berlin has 5 available and 6 are wanted"), "{message}");
    has(&client, "berlin", [5, 0, 0, 5]).await?;
    let reserved = reserve(&client, "r2", &[("berlin", 3), ("berlin", 2)]).await?;
    shows(&reserved, &json!({"lines": [line("berlin", 5)]}))?;
    has(&client, "berlin", [0, 5, 0, 5]).await
}

async fn a_reservation_is_all_or_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 1).await?;
    refuse(&client, wanted("r1", &[("berlin", 1), ("oslo", 2)]), Code::OutOfStock).await?;
    refuse(&client, wanted("r1", &[("berlin", 1), ("rome", 1)]), Code::NotFound).await?;
    has(&client, "berlin", [5, 0, 0, 5]).await?;
    refuse_act(&client, "commit", "r1", Code::NotFound).await?;
    // Something is reserved of the row that lacks, and nothing of it is over.
    reserve(&client, "r2", &[("oslo", 1)]).await?;
    let message = refuse(&client, wanted("r1", &[("berlin", 1), ("oslo", 1)]), Code::OutOfStock).await?;
    ensure!(message.contains("has 0 available"), "{message}");
    has(&client, "berlin", [5, 0, 0, 5]).await
}

async fn a_repetition_gets_its_own_reservation(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 2).await?;
    let lines = [("berlin", 2), ("oslo", 1)];
    let call = || client.call_as("op-1", "stock_reservation.reserve", &[], wanted("r1", &lines), None);
    let first = call().await?;
    same("the answer to a repetition", &call().await?.body, &first.body)?;
    // The same lines in another order, in parts, under another operation id.
    let again = reserve(&client, "r1", &[("oslo", 1), ("berlin", 1), ("berlin", 1)]).await?;
    same(
        "the answer to the same reservation",
        &(&again.body, &again.created),
        &(&first.body, &first.created),
    )?;
    has(&client, "berlin", [3, 2, 0, 5]).await?;
    refuse(&client, wanted("r1", &[("berlin", 1)]), Code::AlreadyExists).await?;
    let mut other = wanted("r1", &lines);
    other["holder"] = json!("bob");
    refuse(&client, other, Code::AlreadyExists).await?;
    act(&client, "release", "r1").await?;
    let message = refuse(&client, wanted("r1", &lines), Code::AlreadyExists).await?;
    ensure!(message.contains("RELEASED"), "{message}");
    has(&client, "berlin", [5, 0, 0, 5]).await
}

async fn a_part_is_bought_and_the_rest_is_released(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 3).await?;
    reserve(&client, "r1", &[("berlin", 4), ("oslo", 2)]).await?;
    let commit = async |lines: Json| {
        client.call("stock_reservation.commit", &id("r1"), json!({"lines": lines}), None).await
    };
    for nonsense in
        [json!([]), json!([line("berlin", 5)]), json!([line("rome", 1)]), json!([line("berlin", 0)])]
    {
        same("the refusal", &commit(nonsense).await.err().map(|no| no.code), &Some(Code::InvalidInput))?;
    }
    let bought = commit(json!([line("berlin", 1), line("berlin", 2)])).await?;
    shows(&bought, &json!({"state": "COMMITTED", "bought": [line("berlin", 3)]}))?;
    has(&client, "berlin", [2, 0, 3, 5]).await?;
    has(&client, "oslo", [3, 0, 0, 3]).await
}

async fn nothing_is_bought_after_the_end(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 4, 0).await?;
    reserve(&client, "r1", &[("berlin", 1)]).await?;
    reserve(&client, "r2", &[("berlin", 2)]).await?;
    clock.advance(MINUTE * 10 - Duration::from_micros(1));
    refuse_act(&client, "expire", "r1", Code::WrongState).await?;
    act(&client, "commit", "r1").await?;
    clock.advance(Duration::from_micros(1));
    refuse_act(&client, "commit", "r2", Code::Expired).await?;
    refuse_act(&client, "extend", "r2", Code::Expired).await?;
    shows(&act(&client, "expire", "r2").await?, &json!({"state": "EXPIRED"}))?;
    for action in ["commit", "extend", "release", "expire"] {
        refuse_act(&client, action, "r2", Code::Expired).await?;
    }
    has(&client, "berlin", [3, 0, 1, 4]).await
}

async fn the_sweeper_ends_what_is_over(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 4, 2).await?;
    let other = client.for_tenant("zeta")?;
    other.done("stock.restock", &mug("berlin"), json!({"quantity": 1}), None).await?;
    reserve(&client, "r1", &[("berlin", 1), ("oslo", 2)]).await?;
    reserve(&other, "r1", &[("berlin", 1)]).await?;
    clock.advance(MINUTE * 5);
    reserve(&client, "r2", &[("berlin", 1)]).await?;
    same("swept too early", &client.drain_workers().await?, &0)?;
    clock.advance(MINUTE * 5);
    same("reservations of two tenants", &client.drain_workers().await?, &2)?;
    client.shows("stock_reservation", &id("r1"), &json!({"state": "EXPIRED"})).await?;
    client.shows("stock_reservation", &id("r2"), &json!({"state": "RESERVED"})).await?;
    has(&client, "berlin", [3, 1, 0, 4]).await?;
    has(&client, "oslo", [2, 0, 0, 2]).await?;
    has(&other, "berlin", [1, 0, 0, 1]).await
}

async fn a_caller_that_lacks_stock_ends_what_is_over(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 3, 3).await?;
    reserve(&client, "r1", &[("berlin", 2), ("oslo", 2)]).await?;
    clock.advance(MINUTE * 5);
    reserve(&client, "r2", &[("berlin", 1)]).await?;
    clock.advance(MINUTE * 5 - Duration::from_micros(1));
    refuse(&client, wanted("r3", &[("berlin", 2)]), Code::OutOfStock).await?;
    clock.advance(Duration::from_micros(1));
    reserve(&client, "r3", &[("berlin", 2)]).await?;
    client.shows("stock_reservation", &id("r1"), &json!({"state": "EXPIRED"})).await?;
    has(&client, "berlin", [0, 3, 0, 3]).await?;
    has(&client, "oslo", [3, 0, 0, 3]).await?;
    // What is not over stays.
    refuse(&client, wanted("r4", &[("berlin", 1)]), Code::OutOfStock).await?;
    client.shows("stock_reservation", &id("r2"), &json!({"state": "RESERVED"})).await
}

async fn extensions_are_bounded(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 2, 0).await?;
    reserve(&client, "r1", &[("berlin", 1)]).await?;
    clock.advance(MINUTE * 8);
    act(&client, "extend", "r1").await?;
    same("swept too early", &client.drain_workers().await?, &0)?;
    clock.advance(MINUTE * 8);
    // Sixteen minutes old, it would end after twenty-six.
    let extend =
        client.refused("stock_reservation.extend", &id("r1"), json!({}), None, Code::Expired).await?;
    ensure!(extend.message.contains("20m"), "{extend}");
    act(&client, "commit", "r1").await.map(drop)
}

fn ware(code: i64) -> [Value; 1] {
    [code.into()]
}

fn wares(reservation: &str, lines: &[(i64, i64)]) -> Json {
    let lines: Vec<Json> =
        lines.iter().map(|(code, quantity)| json!({"code": code, "quantity": quantity})).collect();
    json!({"reservation_id": reservation, "lines": lines})
}

/// Puts wares in stock.
async fn wares_in(client: &TenantClient, code: i64, quantity: i64) -> Result<()> {
    client.done("ware.restock", &ware(code), json!({"quantity": quantity, "weight": 1}), None).await.map(drop)
}

async fn a_reservation_without_an_end_lasts(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 9).await?;
    let reserved = client.done("ware_reservation.reserve", &[], wares("r1", &[(1, 2)]), None).await?;
    shows(&reserved, &json!({"expires_at": null, "holder": null}))?;
    clock.advance(MINUTE * 1_000_000);
    same("swept", &client.drain_workers().await?, &0)?;
    client.refused("ware_reservation.expire", &id("r1"), json!({}), None, Code::WrongState).await?;
    shows(
        &client.done("ware_reservation.commit", &id("r1"), json!({}), None).await?,
        &json!({"state": "COMMITTED"}),
    )
}

async fn an_end_can_be_given_to_reservations_without_one(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 9).await?;
    for name in ["r1", "r2"] {
        client.done("ware_reservation.reserve", &[], wares(name, &[(1, 2)]), None).await?;
    }
    // From now on reservations end; those from before do when they are extended.
    let limited = BLUEPRINT.replace("hold_for  = \"\"", "hold_for  = \"5m\"");
    let limited = TenantClient::over(client.house.store().clone(), &limited, clock.clone()).await?;
    clock.advance(MINUTE * 100);
    same("swept", &limited.drain_workers().await?, &0)?;
    let extended = limited.done("ware_reservation.extend", &id("r1"), json!({}), None).await?;
    shows(&extended, &json!({"expires_at": clock.now().plus(MINUTE * 5).to_string()}))?;
    clock.advance(MINUTE * 5);
    same("swept", &limited.drain_workers().await?, &1)?;
    limited.shows("ware_reservation", &id("r1"), &json!({"state": "EXPIRED"})).await?;
    limited.shows("ware_reservation", &id("r2"), &json!({"state": "RESERVED", "expires_at": null})).await
}

async fn reservations_are_listed_by_holder_and_state(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 9, 0).await?;
    for name in ["r1", "r2", "r3"] {
        reserve(&client, name, &[("berlin", 1)]).await?;
        clock.advance(MINUTE);
    }
    act(&client, "commit", "r2").await?;
    let listed = async |filter: Json, expected: &[&str]| -> Result<()> {
        for _ in 0..LOOKS_MAX {
            let page = client.done("stock_reservation.list", &[], filter.clone(), None).await?;
            let ids = page.body.as_array().into_iter().flatten().map(|row| row["reservation_id"].clone());
            if ids.eq(expected.iter().map(|id| json!(id))) {
                return Ok(());
            }
            crate::harness::store_client::pause().await;
        }
        anyhow::bail!("{filter} never lists {expected:?}")
    };
    listed(json!({"holder": "ann"}), &["r3", "r2", "r1"]).await?;
    listed(json!({}), &["r3", "r1"]).await?;
    listed(json!({"state": "COMMITTED"}), &["r2"]).await
}

/// How often an index is looked at before it counts as wrong.
const LOOKS_MAX: usize = 100;

async fn an_order_and_its_reservation_are_one_plan(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 3, 0).await?;
    let both = async |order: &str, quantity: i64| {
        let order_input = json!({"order_id": order, "total": 5});
        let requests = vec![
            TenantClient::request("order.create", &[], &order_input, None),
            TenantClient::request(
                "stock_reservation.reserve",
                &[],
                &wanted(order, &[("berlin", quantity)]),
                None,
            ),
        ];
        client.house.batch(&client.tenant, requests, Operation::default()).await
    };
    both("o1", 2).await?;
    let refusal = both("o2", 2).await.err().context("more was reserved than there was")?;
    same("the refusal", &(refusal.code, refusal.call), &(Code::OutOfStock, Some(1)))?;
    client.refused("order.read", &id("o2"), json!({}), None, Code::NotFound).await?;
    has(&client, "berlin", [1, 2, 0, 3]).await
}

async fn nonsense_is_refused_and_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 0).await?;
    let too_many: Vec<Json> = (0..5).map(|number| line(&format!("place {number}"), 1)).collect();
    let greatest = (1_i64 << 53) - 1;
    let lines = [
        json!([]),
        json!([line("berlin", 0)]),
        json!([line("berlin", -1)]),
        json!([line("berlin", greatest + 1)]),
        json!([line("berlin", greatest), line("berlin", 1)]),
        json!([{"sku": "mug", "quantity": 1}]),
        json!([{"sku": 7, "location": "berlin", "quantity": 1}]),
        json!([{"sku": "mug", "location": "berlin", "quantity": 1.5}]),
        json!([{"sku": "mug", "location": "berlin", "quantity": 1, "cell": 0}]),
        json!(too_many),
        json!("berlin"),
    ];
    for lines in lines {
        refuse(&client, json!({"reservation_id": "r1", "lines": lines}), Code::InvalidInput).await?;
    }
    refuse(&client, json!({"lines": [line("berlin", 1)]}), Code::InvalidInput).await?;
    let calls = [
        ("restock", json!({"quantity": 0})),
        ("restock", json!({"quantity": -3})),
        ("restock", json!({"quantity": greatest + 1})),
        ("restock", json!({})),
        ("adjust", json!({"by": 0})),
        ("adjust", json!({"by": "three"})),
        ("return", json!({"quantity": -1})),
        ("transfer", json!({"quantity": 1})),
        ("transfer", json!({"quantity": 1, "to_location": "berlin"})),
        ("transfer", json!({"quantity": 0, "to_location": "oslo"})),
        ("availability", json!({"quantity": 0})),
    ];
    for (action, input) in calls {
        client.refused(&format!("stock.{action}"), &mug("berlin"), input, None, Code::InvalidInput).await?;
    }
    let negative = json!({"counted": -1});
    client.refused("stock.recount", &mug("berlin"), negative, Some(1), Code::InvalidInput).await?;
    client.shows("stock", &mug("berlin"), &json!({"available": 5, "version": 1})).await?;
    Ok(())
}

async fn settings_that_contradict_each_other_are_refused(_: &dyn TestNamespace) -> Result<()> {
    let key = "key = { id = \"int\" }";
    for (settings, problem) in [
        ("hold_for = \"10m\"\nhold_max = \"5m\"", "at least as long as `hold_for`"),
        ("lines_max = 60", "must be from 1 to 48"),
        ("fields = { reason = \"text\" }", "`reason` is an input of actions"),
        ("backorder = -1", "must be from 0"),
    ] {
        let text = format!("[house]\nname = \"x\"\n[inventory.stock]\n{key}\n{settings}\n");
        let problems = match Blueprint::read("x.toml", &text).map(|read| statehouse::resource::declare(&read))
        {
            Ok(Ok(_)) => String::new(),
            Ok(Err(problems)) => problems.render(false),
            Err(error) => error.to_string(),
        };
        ensure!(problems.contains(problem), "{settings}: {problems}");
    }
    Ok(())
}
