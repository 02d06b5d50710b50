//! The actions on stocks.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, Expected};

use super::{act, has, id, mug, refuse, reserve, shop, wanted, ware, wares, wares_in};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

pub(super) async fn more_is_ordered_than_there_is(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 1).await?;
    let reserve = |name: &str, quantity: i64| {
        let input = wares(name, &[(1, quantity)]);
        let client = client.clone();
        async move { client.call("ware_reservation.reserve", &[], input, None).await }
    };
    same("too many", &reserve("r0", 5).await.err().map(|no| no.code), &Some(Code::OutOfStock))?;
    reserve("r1", 3).await?;
    client.shows("ware", &ware(1), &json!({"available": -2, "reserved": 3})).await?;
    reserve("r2", 1).await?;
    let refusal = client
        .refused("ware_reservation.reserve", &[], wares("r3", &[(1, 1)]), None, Code::OutOfStock)
        .await?;
    ensure!(refusal.message.contains("has 0 available"), "{refusal}");
    // What was ordered cannot be taken out, and is there when it comes.
    client.refused("ware.adjust", &ware(1), json!({"by": -1}), None, Code::OutOfStock).await?;
    wares_in(&client, 1, 4).await?;
    client.done("ware_reservation.commit", &id("r1"), json!({}), None).await?;
    client.shows("ware", &ware(1), &json!({"available": 1, "reserved": 1, "sold": 3, "stocked": 5})).await
}

pub(super) async fn a_stock_is_corrected_as_far_as_it_is_available(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, _) = shop(namespace, 5, 0).await?;
    reserve(&client, "r1", &[("berlin", 2)]).await?;
    let berlin = mug("berlin");
    let adjust = |by: i64| client.call("stock.adjust", &berlin, json!({"by": by, "reason": "broken"}), None);
    let refusal = adjust(-4).await.err();
    ensure!(
        refusal.as_ref().is_some_and(|no| no.code == Code::OutOfStock && no.message.contains("has 3")),
        "{refusal:?}"
    );
    shows(&adjust(-3).await?, &json!({"available": 0, "reserved": 2, "stocked": 2}))?;
    shows(&adjust(2).await?, &json!({"available": 2, "stocked": 4}))?;
    client.refused("stock.adjust", &mug("rome"), json!({"by": 1}), None, Code::NotFound).await?;
    client.refused("stock.adjust", &mug("rome"), json!({"by": -1}), None, Code::NotFound).await?;
    act(&client, "release", "r1").await.map(drop)
}

pub(super) async fn a_count_replaces_what_was_seen(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 0).await?;
    reserve(&client, "r1", &[("berlin", 2)]).await?;
    reserve(&client, "r2", &[("berlin", 1)]).await?;
    act(&client, "commit", "r2").await?;
    has(&client, "berlin", [2, 2, 1, 5]).await?;
    let recount = async |counted: i64, version: Option<i64>| {
        client.call("stock.recount", &mug("berlin"), json!({"counted": counted}), version).await
    };
    let code = |answer: Result<statehouse::Answer, statehouse::Refusal>| answer.err().map(|no| no.code);
    same("without a version", &code(recount(3, None).await), &Some(Code::VersionRequired))?;
    same("an old version", &code(recount(3, Some(3)).await), &Some(Code::VersionConflict))?;
    // Fewer are there than are reserved.
    same("too few", &code(recount(1, Some(4)).await), &Some(Code::OutOfStock))?;
    shows(&recount(7, Some(4)).await?, &json!({"available": 5, "reserved": 2, "sold": 1, "stocked": 8}))?;
    same("the same version", &code(recount(7, Some(4)).await), &Some(Code::VersionConflict))?;
    let any =
        TenantClient::request("stock.recount", &mug("berlin"), &json!({"counted": 2}), Some(Expected::Any));
    let counted = client.house.call(&client.tenant, any, statehouse::house::Operation::default()).await?;
    shows(&counted, &json!({"available": 0, "stocked": 3}))?;
    client
        .refused("stock.recount", &mug("rome"), json!({"counted": 2}), Some(1), Code::NotFound)
        .await
        .map(drop)
}

pub(super) async fn stock_moves_to_another_row(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 1).await?;
    let transfer = async |quantity: i64, to: &str| {
        let input = json!({"quantity": quantity, "to_location": to, "reason": "demand"});
        client.call("stock.transfer", &mug("berlin"), input, None).await
    };
    shows(&transfer(2, "oslo").await?, &json!({"location": "berlin", "available": 3, "stocked": 3}))?;
    has(&client, "oslo", [3, 0, 0, 3]).await?;
    transfer(1, "rome").await?;
    has(&client, "rome", [1, 0, 0, 1]).await?;
    let refusal = transfer(3, "oslo").await.err();
    ensure!(
        refusal.as_ref().is_some_and(|no| no.code == Code::OutOfStock && no.message.contains("has 2")),
        "{refusal:?}"
    );
    has(&client, "oslo", [3, 0, 0, 3]).await?;
    let input = json!({"quantity": 1, "to_location": "berlin"});
    client.refused("stock.transfer", &mug("paris"), input, None, Code::NotFound).await?;
    // A row that needs a field has to exist before, or to be given the field.
    wares_in(&client, 1, 9).await?;
    let to = json!({"quantity": 1, "to_code": 2});
    client.refused("ware.transfer", &ware(1), to, None, Code::NotFound).await?;
    client.refused("ware.restock", &ware(2), json!({"quantity": 1}), None, Code::NotFound).await?;
    client.done("ware.restock", &ware(1), json!({"quantity": 1}), None).await?;
    client.shows("ware", &ware(1), &json!({"available": 10, "weight": 1})).await
}

pub(super) async fn only_what_was_sold_comes_back(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 0).await?;
    reserve(&client, "r1", &[("berlin", 3)]).await?;
    let back = async |quantity: i64| {
        client.call("stock.return", &mug("berlin"), json!({"quantity": quantity}), None).await
    };
    same("reserved", &back(1).await.err().map(|no| no.code), &Some(Code::WrongState))?;
    act(&client, "commit", "r1").await?;
    let refusal = back(4).await.err();
    ensure!(
        refusal
            .as_ref()
            .is_some_and(|no| no.code == Code::WrongState && no.message.contains("no more can come back")),
        "{refusal:?}"
    );
    back(3).await?;
    has(&client, "berlin", [5, 0, 0, 5]).await?;
    client.refused("stock.return", &mug("rome"), json!({"quantity": 1}), None, Code::NotFound).await.map(drop)
}

pub(super) async fn fields_lists_and_availability_are_read(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 2).await?;
    client.done("stock.restock", &mug("rome"), json!({"quantity": 1, "title": "A mug"}), None).await?;
    shows(
        &client.done("stock.patch", &mug("oslo"), json!({"title": "Ein Becher"}), None).await?,
        &json!({"available": 2}),
    )?;
    client.refused("stock.patch", &mug("paris"), json!({"title": "x"}), None, Code::NotFound).await?;
    let listed = client.done("stock.list", &[], json!({"sku": "mug"}), None).await?;
    let titles: Vec<&Json> = listed.body.as_array().into_iter().flatten().map(|row| &row["title"]).collect();
    same("titles", &titles, &vec![&Json::Null, &json!("Ein Becher"), &json!("A mug")])?;
    reserve(&client, "r1", &[("berlin", 4)]).await?;
    let available = async |quantity: i64| {
        client.done("stock.availability", &mug("berlin"), json!({"quantity": quantity}), None).await
    };
    let expected =
        json!({"available": 1, "orderable": 1, "reserved": 4, "sold": 0, "stocked": 5, "enough": true});
    shows(&available(1).await?, &expected)?;
    shows(&available(2).await?, &json!({"enough": false}))?;
    client.refused("stock.availability", &mug("paris"), json!({}), None, Code::NotFound).await?;
    wares_in(&client, 1, 1).await?;
    let ordered = client.done("ware.availability", &ware(1), json!({"quantity": 4}), None).await?;
    shows(&ordered, &json!({"available": 1, "orderable": 4, "enough": true}))
}

pub(super) async fn movements_tell_what_moved(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 9, 0).await?;
    let done = async |action: &str, input: Json| client.done(action, &mug("berlin"), input, None).await;
    done("stock.adjust", json!({"by": -2, "reason": "broken"})).await?;
    done("stock.transfer", json!({"quantity": 1, "to_location": "oslo"})).await?;
    reserve(&client, "r1", &[("berlin", 2), ("oslo", 1)]).await?;
    act(&client, "commit", "r1").await?;
    done("stock.return", json!({"quantity": 1, "reservation_id": "r1"})).await?;
    let version = done("stock.read", json!({})).await?.version;
    client.done("stock.recount", &mug("berlin"), json!({"counted": 4}), version).await?;
    let of = async |location: &str| -> Result<Vec<(Json, Json, Json, Json)>> {
        let page = client
            .done("stock_movement.list", &[], json!({"sku": "mug", "location": location}), None)
            .await?;
        let mut rows = page.body.as_array().cloned().unwrap_or_default();
        // Ids of one moment come in any order.
        rows.sort_by_key(|row| (row["kind"].to_string(), row["quantity"].as_i64()));
        let told = |row: &Json| {
            (
                row["kind"].clone(),
                row["quantity"].clone(),
                row["reservation_id"].clone(),
                row["reason"].clone(),
            )
        };
        Ok(rows.iter().map(told).collect())
    };
    let movement = |kind: &str, quantity: i64, reservation: Option<&str>, reason: Option<&str>| {
        (json!(kind), json!(quantity), json!(reservation), json!(reason))
    };
    let berlin = vec![
        movement("ADJUST", -2, None, Some("broken")),
        movement("RECOUNT", -1, None, None),
        movement("RESTOCK", 9, None, None),
        movement("RETURN", 1, Some("r1"), None),
        movement("SALE", 2, Some("r1"), None),
        movement("TRANSFER_OUT", -1, None, None),
    ];
    same("the movements in Berlin", &of("berlin").await?, &berlin)?;
    let oslo = vec![movement("SALE", 1, Some("r1"), None), movement("TRANSFER_IN", 1, None, None)];
    same("the movements in Oslo", &of("oslo").await?, &oslo)?;
    ensure!(
        client.house.resource("ware_movement").is_err(),
        "movements that are only in the log have no rows"
    );
    Ok(())
}

pub(super) async fn a_version_that_was_seen_is_demanded(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 0).await?;
    for (action, input) in [
        ("restock", json!({"quantity": 1})),
        ("adjust", json!({"by": -1})),
        ("transfer", json!({"quantity": 1, "to_location": "oslo"})),
    ] {
        let action = format!("stock.{action}");
        let version = client.done("stock.read", &mug("berlin"), json!({}), None).await?.version;
        client
            .refused(&action, &mug("berlin"), input.clone(), version.map(|v| v + 1), Code::VersionConflict)
            .await?;
        client.done(&action, &mug("berlin"), input, version).await?;
    }
    client.refused("stock.restock", &mug("rome"), json!({"quantity": 1}), Some(1), Code::NotFound).await?;
    let exists =
        TenantClient::request("stock.restock", &mug("rome"), &json!({"quantity": 1}), Some(Expected::Any));
    let refusal =
        client.house.call(&client.tenant, exists, statehouse::house::Operation::default()).await.err();
    same("a row that must exist", &refusal.map(|no| no.code), &Some(Code::NotFound))?;
    let only_if = json!({"by": -1, "if": "available >= 100"});
    client.refused("stock.adjust", &mug("berlin"), only_if, None, Code::ConditionFailed).await?;
    has(&client, "berlin", [4, 0, 0, 4]).await
}

pub(super) async fn stocks_of_tenants_are_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 1, 0).await?;
    let other = client.for_tenant("zeta")?;
    refuse(&other, wanted("r1", &[("berlin", 1)]), Code::NotFound).await?;
    reserve(&client, "r1", &[("berlin", 1)]).await?;
    other.done("stock.restock", &mug("berlin"), json!({"quantity": 2}), None).await?;
    reserve(&other, "r1", &[("berlin", 2)]).await?;
    act(&other, "release", "r1").await?;
    has(&client, "berlin", [0, 1, 0, 1]).await
}
