//! Two versions of a blueprint that serve one store at once, and changes that have to wait until one of them is gone.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse::{Blueprint, House};
use statehouse_store::{Clock, Ids, ManualClock, Migrate, Random, Store, SystemClock, Time};

use super::{applied, refused};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

const LEASE: Duration = Duration::from_secs(10);
const WRITES: i64 = 12;

fn products(fields: &str) -> String {
    format!(
        "[house]\nname = 'drill'\n[entity.product]\nkey = {{ id = 'int' }}\nrequire_version = false\n\
         fields = {{ {fields} }}\n"
    )
}

fn house_at(store: &Arc<dyn Store>, blueprint: &str, clock: &ManualClock) -> Result<House> {
    let blueprint = Blueprint::read("statehouse.toml", blueprint)?;
    let clock: Arc<dyn Clock> = Arc::new(clock.clone());
    Ok(House::with(
        store.clone(),
        &blueprint,
        clock,
        Ids::new(Arc::new(SystemClock), Random::from_entropy()),
    )?)
}

/// Creates and changes rows from an id on.
async fn write(client: TenantClient, first: i64, field: &'static str) -> Result<()> {
    for id in first..first + WRITES {
        client.done("product.create", &[], json!({"id": id, "name": "a"}), None).await?;
        client.done("product.patch", &[id.into()], json!({field: "b"}), None).await?;
        // Both write this one.
        client.done("product.mutate", &[0.into()], json!({"increment": {"sold": 1}}), None).await?;
    }
    Ok(())
}

pub(super) async fn two_blueprints_serve_at_once(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let (old, new) = ("name = 'text', sold = 'int?'", "name = 'text', sold = 'int?', note = 'text?'");
    let older = applied(&store, &products(old), Migrate::Apply).await?;
    older.house.register(LEASE).await?;
    older.done("product.create", &[], json!({"id": 0, "name": "a"}), None).await?;
    let writer = tokio::spawn(write(older.clone(), 100, "name"));
    // What can be undone is done while it writes, as a server does it that starts.
    let newer = {
        let house = super::house(&store, &products(new))?;
        house.prepare().await?;
        TenantClient::of(Arc::new(house))?
    };
    newer.house.register(LEASE).await?;
    let others = tokio::spawn(write(newer.clone(), 200, "note"));
    writer.await??;
    others.await??;
    newer.shows("product", &[0.into()], &json!({"sold": 2 * WRITES})).await?;
    for id in 0..WRITES {
        newer.shows("product", &[(100 + id).into()], &json!({"name": "b", "note": null})).await?;
        newer.shows("product", &[(200 + id).into()], &json!({"name": "a", "note": "b"})).await?;
    }
    // What the older one could not go on after is refused while it serves, and nothing is changed.
    let unique = products("name = 'text', sold = { type = 'int?', unique = true }, note = 'text?'");
    let contracted = super::house(&store, &unique)?;
    let message = refused(contracted.migrate(Migrate::Apply).await).await?;
    ensure!(message.contains("fill products_sold_unique") && message.contains("stop it"), "{message}");
    let kept = ["products.note".to_owned()];
    let message = refused(super::house(&store, &products(old))?.migrate_losing(&kept).await).await?;
    ensure!(message.contains("drop column products.note"), "{message}");
    older.house.unregister().await;
    refused(contracted.migrate(Migrate::Apply).await).await?;
    newer.house.unregister().await;
    contracted.migrate(Migrate::Apply).await?;
    same("what is left", &contracted.migrate(Migrate::Show).await?.len(), &0)?;
    super::house(&store, &products(old))?.prepare().await.map(drop)?;
    Ok(())
}

pub(super) async fn a_killed_process_is_waited_for(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let follows = |buckets: i64| {
        format!(
            "[house]\nname = 'drill'\n[relation.follow]\nfrom = {{ a = 'int' }}\nto = {{ b = 'int' }}\n\
             buckets = {buckets}\n"
        )
    };
    let (old, new) = (follows(2), follows(4));
    let older = house_at(&store, &old, &clock)?;
    older.migrate(Migrate::Apply).await?;
    older.register(LEASE).await?;
    let newer = house_at(&store, &new, &clock)?;
    refused(newer.migrate(Migrate::Apply).await).await?;
    // A process of the same blueprint is no obstacle.
    let same_one = house_at(&store, &old, &clock)?;
    same_one.migrate_losing(&[]).await?;
    drop(older);
    clock.advance(LEASE - Duration::from_micros(1));
    let message = refused(newer.migrate(Migrate::Apply).await).await?;
    ensure!(message.contains("may be alive until"), "{message}");
    clock.advance(Duration::from_micros(1));
    newer.migrate(Migrate::Apply).await?;
    same("what is left", &newer.migrate(Migrate::Show).await?.len(), &0)
}
