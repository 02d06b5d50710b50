//! Definitions that change while there are rows.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Blueprint, House};
use statehouse_store::{Clock, Ids, Migrate, Random, Store};

use super::{order, standing};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::{TenantClient, shows};

/// Before: orders wait, and are paid.
const BEFORE: &str = r#"
[house]
name = "drill"
[workflow.order]
key     = { order_id = "text" }
initial = "WAITING"
final   = ["DONE"]
[workflow.order.on]
pay    = { from = "WAITING", to = "PAID" }
finish = { from = "PAID", to = "DONE" }
test   = { from = "PAID", to = "CHECKED" }
pass   = { from = "CHECKED", to = "PAID" }
"#;

/// After: they are placed instead, with a timer, and paid ones are not checked any more.
const AFTER: &str = r#"
[house]
name = "drill"
[workflow.order]
key     = { order_id = "text" }
initial = "PLACED"
final   = ["DONE"]
MOVED
[workflow.order.on]
pay    = { from = "PLACED", to = "PAID" }
finish = { from = "PAID", to = "DONE" }
late   = { from = "PLACED", to = "DONE", after = "1h" }
"#;

fn after(moved: &str) -> String {
    AFTER.replace("MOVED", moved)
}

const MOVED: &str = "moved = { WAITING = \"PLACED\", CHECKED = \"PAID\" }";

fn house(store: &Arc<dyn Store>, blueprint: &str, clock: &Arc<dyn Clock>) -> Result<House> {
    let blueprint = Blueprint::read("statehouse.toml", blueprint)?;
    let ids = Ids::new(clock.clone(), Random::from_entropy());
    Ok(House::with(store.clone(), &blueprint, clock.clone(), ids)?)
}

/// Two orders that wait, one that is checked, and one that is done.
async fn filled(store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<()> {
    let client = TenantClient::over(store.clone(), BEFORE, clock.clone()).await?;
    for id in ["o1", "o2", "o3", "o4"] {
        client.done("order.start", &[], json!({"order_id": id}), None).await?;
    }
    for (id, action) in [("o3", "pay"), ("o3", "test"), ("o4", "pay"), ("o4", "finish")] {
        client.done(&format!("order.{action}"), &order(id), json!({}), None).await?;
    }
    Ok(())
}

pub(super) async fn rows_in_removed_states_are_counted(namespace: &dyn TestNamespace) -> Result<()> {
    let clock: Arc<dyn Clock> = Arc::new(standing());
    let store = namespace.open_at(clock.clone()).await?;
    filled(&store, &clock).await?;
    for (moved, told) in
        [("", "CHECKED (1 rows), WAITING (2 rows)"), ("moved = { CHECKED = \"PAID\" }", "WAITING (2 rows)")]
    {
        let house = house(&store, &after(moved), &clock)?;
        for how in [Migrate::Show, Migrate::Apply] {
            let error =
                house.migrate(how).await.err().context("rows in removed states were accepted")?.to_string();
            ensure!(error.contains(told) && error.contains("[workflow.order.moved]"), "{error}");
        }
    }
    // Nothing was changed.
    let client = TenantClient::over(store, BEFORE, clock).await?;
    client.shows("order", &order("o1"), &json!({"state": "WAITING", "version": 1})).await
}

pub(super) async fn rows_in_removed_states_are_moved(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the log has transitions of the older definition");
    let standing = standing();
    let clock: Arc<dyn Clock> = Arc::new(standing.clone());
    let store = namespace.open_at(clock.clone()).await?;
    filled(&store, &clock).await?;
    standing.advance(Duration::from_secs(60));
    let shown = house(&store, &after(MOVED), &clock)?.migrate(Migrate::Show).await?;
    let lines: Vec<String> = shown.iter().map(ToString::to_string).collect();
    for line in ["are CHECKED to PAID: there are 1", "are WAITING to PLACED: there are 2"] {
        ensure!(lines.iter().any(|shown| shown.contains(line)), "{line} is not in {lines:?}");
    }
    let client = TenantClient::over(store.clone(), &after(MOVED), clock.clone()).await?;
    let due = clock.now().plus(Duration::from_secs(3_600)).to_string();
    let placed =
        json!({"state": "PLACED", "seq": 2, "last_transition": "moved", "due_at": due, "version": 2});
    client.shows("order", &order("o1"), &placed).await?;
    client.shows("order", &order("o3"), &json!({"state": "PAID", "seq": 4, "due_at": null})).await?;
    client.shows("order", &order("o4"), &json!({"state": "DONE", "seq": 3})).await?;
    let history = client.done("order.history", &order("o2"), json!({}), None).await?;
    let entry = &history.body["history"][1];
    let told: Vec<&Json> = ["transition", "from", "to"].iter().map(|name| &entry[*name]).collect();
    same("the history", &told, &vec![&json!("moved"), &json!("WAITING"), &json!("PLACED")])?;
    // They go on from there, also by the timer; and there is nothing more to move.
    shows(
        &client.done("order.pay", &order("o1"), json!({}), None).await?,
        &json!({"state": "PAID", "seq": 3}),
    )?;
    standing.advance(Duration::from_secs(3_600));
    same("what is due", &client.work_of("order").await?, &1)?;
    client.shows("order", &order("o2"), &json!({"state": "DONE", "seq": 3})).await?;
    let left = house(&store, &after(MOVED), &clock)?.migrate(Migrate::Show).await?;
    ensure!(left.iter().all(|change| !change.to_string().contains("there are")), "{left:?}");
    // The log says how each came where it is, but for what the older definition allowed.
    let events = client.scope("order").events("order").await?;
    let moved = events.values().flatten().filter(|change| change.name == "moved").count();
    same("how many were moved", &moved, &3)
}

pub(super) async fn a_server_moves_no_rows(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the log has transitions of the older definition");
    let clock: Arc<dyn Clock> = Arc::new(standing());
    let store = namespace.open_at(clock.clone()).await?;
    filled(&store, &clock).await?;
    let house = house(&store, &after(MOVED), &clock)?;
    let error = house.prepare().await.err().context("a server moved rows")?.to_string();
    ensure!(error.contains("statehouse apply"), "{error}");
    house.migrate(Migrate::Apply).await?;
    house.prepare().await?;
    house.check_fit().await?;
    let scope = TenantClient::of(Arc::new(house))?;
    let rows = scope.done("order.read", &order("o1"), json!({}), None).await?;
    shows(&rows, &json!({"state": "PLACED"}))
}

/// Rows keep the due time that they have when the blueprint takes the timer away.
pub(super) async fn a_state_without_a_timer_fires_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the log has timers of the older definition");
    let standing = standing();
    let clock: Arc<dyn Clock> = Arc::new(standing.clone());
    let store = namespace.open_at(clock.clone()).await?;
    let timed = after("").replace("after = \"1h\"", "after = \"1s\"");
    let client = TenantClient::over(store.clone(), &timed, clock.clone()).await?;
    client.done("order.start", &[], json!({"order_id": "o1"}), None).await?;
    standing.advance(Duration::from_secs(60));
    let moved_timer = timed.replace("late   = { from = \"PLACED\"", "late   = { from = \"PAID\"");
    let client = TenantClient::over(store, &moved_timer, clock).await?;
    same("what is due", &client.work_of("order").await?, &0)?;
    client.shows("order", &order("o1"), &json!({"state": "PLACED", "seq": 1})).await?;
    client.done("order.pay", &order("o1"), json!({}), None).await?;
    standing.advance(Duration::from_secs(2));
    same("what is due then", &client.work_of("order").await?, &1)?;
    client.shows("order", &order("o1"), &json!({"state": "DONE", "seq": 3})).await
}
