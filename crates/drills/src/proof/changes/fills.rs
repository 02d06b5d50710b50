//! Constraints between rows that are added to tables with rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::{Blueprint, Code, House};
use statehouse_store::{
    Clock, Commit, Ids, ManualClock, Migrate, Plan, Random, Store, StoreError, SystemClock, Time,
};

use super::{applied, house, refused};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

/// Members, and tools with these fields.
fn tools(fields: &str) -> String {
    format!(
        "[house]\nname = 'drill'\n[entity.member]\nkey = {{ id = 'int' }}\n[entity.tool]\nkey = {{ id = 'int' }}\n\
         require_version = false\nfields = {{ {fields} }}\n"
    )
}

fn plain() -> String {
    tools("code = 'text?', owner = 'int?'")
}

fn constrained() -> String {
    tools("code = { type = 'text?', unique = true }, owner = { type = 'int?', ref = 'member' }")
}

async fn create(client: &TenantClient, resource: &str, id: i64, fields: Json) -> Result<()> {
    let mut input = fields;
    input["id"] = id.into();
    client.done(&format!("{resource}.create"), &[], input, None).await.map(drop)
}

/// Members 1 to 3, and tools of member 1 with codes of their own; one tool was deleted, and one has neither code nor owner.
async fn stock(client: &TenantClient, count: i64) -> Result<()> {
    for member in 1..4 {
        create(client, "member", member, json!({})).await?;
    }
    for tool in 0..count {
        create(client, "tool", tool, json!({"code": format!("c{tool}"), "owner": 1})).await?;
    }
    create(client, "tool", 1_000, json!({"code": "c0", "owner": 2})).await?;
    client.done("tool.delete", &[1_000.into()], json!({}), None).await?;
    create(client, "tool", 1_001, json!({})).await
}

/// What a migration to this blueprint would do.
async fn left(store: &Arc<dyn Store>, blueprint: &str) -> Result<Vec<String>> {
    Ok(house(store, blueprint)?.migrate(Migrate::Show).await?.iter().map(ToString::to_string).collect())
}

/// Requires rows that were there before to be constrained as if they had been written afterwards.
async fn check(client: &TenantClient, count: i64) -> Result<()> {
    let tool = |id: i64, code: &str| json!({"id": id, "code": code});
    let refusal = client.refused("tool.create", &[], tool(2_000, "c0"), None, Code::NotUnique).await?;
    ensure!(refusal.message.contains("taken by tool 0"), "{refusal}");
    client.refused("tool.restore", &[1_000.into()], json!({}), None, Code::NotUnique).await?;
    let refusal = client.refused("member.delete", &[1.into()], json!({}), None, Code::Referenced).await?;
    ensure!(refusal.message.contains(&format!("{count} tool rows refer to it")), "{refusal}");
    client.done("member.delete", &[2.into()], json!({}), None).await?;
    client.done("member.restore", &[2.into()], json!({}), None).await?;
    // A value is released, and references are counted off one by one.
    client.done("tool.patch", &[0.into()], json!({"code": "new"}), None).await?;
    client.done("tool.create", &[], tool(2_000, "c0"), None).await?;
    for id in 0..count {
        client.refused("member.delete", &[1.into()], json!({}), None, Code::Referenced).await?;
        client.done("tool.patch", &[id.into()], json!({"owner": null}), None).await?;
    }
    client.done("member.delete", &[1.into()], json!({}), None).await.map(drop)
}

pub(super) async fn a_constraint_is_added_to_rows_that_exist(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let client = applied(&store, &plain(), Migrate::Apply).await?;
    stock(&client, 9).await?;
    let other = client.for_tenant("zenith")?;
    stock(&other, 4).await?;
    let shown = left(&store, &constrained()).await?;
    for expected in
        ["fill tools_code_unique from the rows of tools", "fill tools_owner_refs from the rows of tools"]
    {
        ensure!(shown.iter().any(|change| change == expected), "{shown:?}");
    }
    // Servers with the older blueprint may be running, so that a server does not do it.
    let message = refused(house(&store, &constrained())?.prepare().await).await?;
    ensure!(message.contains("fill tools_") && message.contains("statehouse apply"), "{message}");
    same("what a refused server has changed", &left(&store, &plain()).await?, &Vec::new())?;
    let client = applied(&store, &constrained(), Migrate::Apply).await?;
    same("what is left", &left(&store, &constrained()).await?, &Vec::new())?;
    house(&store, &constrained())?.prepare().await?;
    check(&client, 9).await?;
    check(&client.for_tenant("zenith")?, 4).await
}

pub(super) async fn rows_that_violate_a_new_row_constraint_are_listed(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let client = applied(&store, &plain(), Migrate::Apply).await?;
    stock(&client, 5).await?;
    create(&client, "tool", 50, json!({"code": "c3"})).await?;
    create(&client, "tool", 51, json!({"owner": 77})).await?;
    create(&client, "tool", 52, json!({"owner": 3})).await?;
    client.done("member.delete", &[3.into()], json!({}), None).await?;
    for how in [Migrate::Apply, Migrate::ApplyWithLoss] {
        let message = refused(house(&store, &constrained())?.migrate(how).await).await?;
        let twins = ["id=3)", "id=50)"].iter().filter(|twin| message.contains(*twin)).count();
        ensure!(twins == 1 && message.contains("code \"c3\": it is taken by tool"), "{message}");
        ensure!(message.contains("id=51): owner: member 77 does not exist"), "{message}");
        ensure!(message.contains("id=52): owner: member 3 was deleted"), "{message}");
        ensure!(!message.contains("id=1)") && message.contains("Nothing was changed"), "{message}");
        same("what has changed", &left(&store, &plain()).await?, &Vec::new())?;
    }
    // The rows are as they were, and the older blueprint goes on.
    create(&client, "tool", 53, json!({"code": "c3"})).await?;
    for (id, change) in [(50, json!({"code": "d"})), (53, json!({"code": null}))] {
        client.done("tool.patch", &[id.into()], change, None).await?;
    }
    for id in [51, 52] {
        client.done("tool.patch", &[id.into()], json!({"owner": 2}), None).await?;
    }
    let client = applied(&store, &constrained(), Migrate::Apply).await?;
    let refusal = client.refused("member.delete", &[2.into()], json!({}), None, Code::Referenced).await?;
    ensure!(refusal.message.contains("2 tool rows refer to it"), "{refusal}");
    for id in [51, 52] {
        client.done("tool.patch", &[id.into()], json!({"owner": null}), None).await?;
    }
    check(&client, 5).await
}

/// A store that is gone after so many commits.
#[derive(Debug)]
struct DiesAfter(AtomicUsize);

#[async_trait]
impl Interceptor for DiesAfter {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let less = |left: usize| left.checked_sub(1);
        match self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) {
            Ok(_) => inner.commit(plan).await,
            Err(_) => Err(StoreError::unavailable("the process was killed")),
        }
    }
}

/// A clock on which a pause takes no time: what a killed process has claimed is free as soon as another one has waited for it.
#[derive(Clone, Debug)]
struct SkippingClock(ManualClock);

#[async_trait]
impl Clock for SkippingClock {
    fn now(&self) -> Time {
        self.0.now()
    }

    fn uptime(&self) -> Duration {
        self.0.uptime()
    }

    async fn sleep(&self, span: Duration) {
        self.0.advance(span);
        tokio::task::yield_now().await;
    }
}

/// The process is killed after each of its commits; the next one goes on with what is stored.
pub(super) async fn a_fill_that_was_killed_goes_on(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let house = |store: &Arc<dyn Store>, blueprint: &str| -> Result<House> {
        let blueprint = Blueprint::read("statehouse.toml", blueprint)?;
        let ids = Ids::new(Arc::new(SystemClock), Random::from_entropy());
        Ok(House::with(store.clone(), &blueprint, Arc::new(SkippingClock(clock.clone())), ids)?)
    };
    let client = applied(&store, &plain(), Migrate::Apply).await?;
    stock(&client, 9).await?;
    let mut killed = 0;
    loop {
        let dying: Arc<dyn Store> =
            Arc::new(StoreProxy::new(store.clone(), DiesAfter(AtomicUsize::new(killed / 4))));
        match house(&dying, &constrained())?.migrate(Migrate::Apply).await {
            Ok(_) => break,
            Err(StoreError::Unavailable { .. }) => killed += 1,
            Err(error) => return Err(error.into()),
        }
        ensure!(killed < 400, "it does not come to an end");
        // What is not filled is not used.
        if killed % 7 == 0 {
            ensure!(house(&store, &constrained())?.check_fit().await.is_err(), "a half of it is used");
        }
    }
    ensure!(killed > 8, "it was killed {killed} times only");
    same("what is left", &left(&store, &constrained()).await?, &Vec::new())?;
    let client = applied(&store, &constrained(), Migrate::Apply).await?;
    check(&client, 9).await
}

pub(super) async fn a_constraint_that_was_given_up_is_filled_anew(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let client = applied(&store, &constrained(), Migrate::Apply).await?;
    for member in 1..4 {
        create(&client, "member", member, json!({})).await?;
    }
    for tool in 0..3 {
        create(&client, "tool", tool, json!({"code": format!("c{tool}"), "owner": 1})).await?;
    }
    // Without the constraint, rows change what they take and refer to.
    let client = applied(&store, &plain(), Migrate::Apply).await?;
    client.done("tool.patch", &[0.into()], json!({"code": "x", "owner": 2}), None).await?;
    create(&client, "tool", 60, json!({"code": "c0"})).await?;
    let client = applied(&store, &constrained(), Migrate::Apply).await?;
    let input = json!({"id": 61, "code": "x"});
    let refusal = client.refused("tool.create", &[], input, None, Code::NotUnique).await?;
    ensure!(refusal.message.contains("taken by tool 0"), "{refusal}");
    let input = json!({"id": 61, "code": "c0"});
    let refusal = client.refused("tool.create", &[], input, None, Code::NotUnique).await?;
    ensure!(refusal.message.contains("taken by tool 60"), "{refusal}");
    for (member, count) in [(1, "2 tool rows refer"), (2, "1 tool row refers")] {
        let refusal =
            client.refused("member.delete", &[member.into()], json!({}), None, Code::Referenced).await?;
        ensure!(refusal.message.contains(count), "{refusal}");
    }
    Ok(())
}
