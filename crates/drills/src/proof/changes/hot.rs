//! Fields that become hot, or are so no longer: their values go along.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, ensure};
use async_trait::async_trait;
use serde_json::json;
use statehouse::Expected;
use statehouse_store::{Commit, Migrate, Plan, Store, StoreError};

use super::{applied, house, refused};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;
use crate::proof::projection::cases::ProjectionFixture;

fn blueprint(hot: &str) -> String {
    format!(
        r#"
[house]
name = "drill"

[entity.profile]
key    = {{ id = "int" }}
fields = {{ team = "text?", points = {{ type = "int", default = 3 }}, seen = "int?", likes = {{ type = "int", default = 0 }} }}
hot    = [{hot}]
"#
    )
}

const ROWS: i64 = 9;

/// Profiles with all kinds of points: given, the default, and none of what may be missing.
async fn filled(client: &TenantClient) -> Result<()> {
    for id in 0..ROWS {
        let input = match id % 3 {
            0 => json!({"id": id, "team": "red", "points": 100 + id, "seen": id}),
            1 => json!({"id": id, "team": "blue", "seen": id}),
            _ => json!({"id": id, "team": "red", "points": -id}),
        };
        client.done("profile.create", &[], input, None).await?;
    }
    client.done("profile.delete", &[0.into()], json!({}), Some(1)).await?;
    Ok(())
}

/// Requires every profile to have its points, so many more than at first, and what was seen.
async fn has_all(client: &TenantClient, more: i64) -> Result<()> {
    for id in 1..ROWS {
        let (points, seen) = match id % 3 {
            0 => (100 + id, json!(id)),
            1 => (3, json!(id)),
            _ => (-id, json!(null)),
        };
        client.shows("profile", &[id.into()], &json!({"points": points + more, "seen": seen})).await?;
    }
    Ok(())
}

async fn count_all(client: &TenantClient) -> Result<()> {
    for id in 1..ROWS {
        let input = json!({"increment": {"points": 1}});
        client.done("profile.mutate", &[id.into()], input, None).await?;
    }
    Ok(())
}

pub(super) async fn a_field_that_becomes_hot_keeps_its_values(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let before = applied(&store, &blueprint(""), Migrate::Apply).await?;
    filled(&before).await?;
    let shown = house(&store, &blueprint("\"points\""))?.migrate(Migrate::Show).await?;
    let said: Vec<String> = shown.iter().map(ToString::to_string).collect();
    ensure!(said.iter().any(|change| change.contains("move") && change.contains("points")), "{said:?}");
    let one = applied(&store, &blueprint("\"points\""), Migrate::Apply).await?;
    has_all(&one, 0).await?;
    count_all(&one).await?;
    // Once more changes nothing, and another field goes where a row is already.
    let again = applied(&store, &blueprint("\"points\""), Migrate::Apply).await?;
    has_all(&again, 1).await?;
    let both = applied(&store, &blueprint("\"points\", \"seen\""), Migrate::ApplyWithLoss).await?;
    has_all(&both, 1).await?;
    count_all(&both).await?;
    has_all(&both, 2).await?;
    // What was deleted keeps its values too.
    both.done("profile.restore", &[0.into()], json!({}), None).await?;
    both.shows("profile", &[0.into()], &json!({"points": 100, "seen": 0})).await?;
    same(
        "what is left to do",
        &house(&store, &blueprint("\"points\", \"seen\""))?.migrate(Migrate::Show).await?.len(),
        &0,
    )
}

pub(super) async fn a_field_that_is_no_longer_hot_keeps_its_values(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let hot = applied(&store, &blueprint("\"points\", \"seen\""), Migrate::Apply).await?;
    for id in 0..ROWS {
        hot.done("profile.create", &[], json!({"id": id, "team": "red"}), None).await?;
        let set = match id % 3 {
            0 => json!({"set": {"points": 100 + id, "seen": id}}),
            1 => json!({"set": {"seen": id}}),
            _ => json!({"set": {"points": -id}}),
        };
        hot.done("profile.mutate", &[id.into()], set, None).await?;
    }
    hot.done("profile.delete", &[0.into()], json!({}), None).await?;
    has_all(&hot, 0).await?;
    let one = applied(&store, &blueprint("\"seen\""), Migrate::Apply).await?;
    has_all(&one, 0).await?;
    count_all(&one).await?;
    let none = applied(&store, &blueprint(""), Migrate::ApplyWithLoss).await?;
    has_all(&none, 1).await?;
    // There and back again.
    let hot = applied(&store, &blueprint("\"points\", \"seen\""), Migrate::Apply).await?;
    count_all(&hot).await?;
    has_all(&hot, 2).await?;
    let none = applied(&store, &blueprint(""), Migrate::Apply).await?;
    has_all(&none, 2).await
}

/// Fails every commit of a plan with a log entry after so many.
#[derive(Debug)]
struct FailAfterCommits(AtomicUsize);

#[async_trait]
impl Interceptor for FailAfterCommits {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let one_less = |left: usize| left.checked_sub(1);
        if plan.entry().is_some()
            && self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err()
        {
            return Err(StoreError::unavailable("the store is out of reach"));
        }
        inner.commit(plan).await
    }
}

pub(super) async fn a_move_that_was_interrupted_is_finished(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let before = applied(&store, &blueprint(""), Migrate::Apply).await?;
    filled(&before).await?;
    let tiring: Arc<dyn Store> =
        Arc::new(StoreProxy::new(store.clone(), FailAfterCommits(AtomicUsize::new(2))));
    let broken = house(&tiring, &blueprint("\"points\""))?.migrate(Migrate::ApplyWithLoss).await;
    ensure!(matches!(broken, Err(StoreError::Unavailable { .. })), "{broken:?}");
    // The one that comes next finds what is left, whether or not the column is to go.
    let after = applied(&store, &blueprint("\"points\""), Migrate::Apply).await?;
    has_all(&after, 0).await
}

pub(super) async fn a_server_does_not_move_values(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let before = applied(&store, &blueprint(""), Migrate::Apply).await?;
    filled(&before).await?;
    // Servers with the older blueprint may still run, and would go on writing where the values were.
    let server = house(&store, &blueprint("\"points\""))?;
    let message = refused(server.prepare().await).await?;
    ensure!(message.contains("points") && message.contains("statehouse apply"), "{message}");
    has_all(&before, 0).await?;
    server.migrate(Migrate::Apply).await?;
    server.prepare().await?;
    has_all(&TenantClient::of(Arc::new(server))?, 0).await
}

const TEAMS: &str =
    "\n[view.teams]\nof = \"profile\"\ngroup_by = [\"team\"]\ncount = true\nsum = [\"likes\"]\n";

pub(super) async fn moved_rows_count_in_views(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let fixture =
        ProjectionFixture::of(applied(&store, &format!("{}{TEAMS}", blueprint("")), Migrate::Apply).await?)
            .await?;
    filled(&fixture.client).await?;
    fixture.drain().await?;
    let hot = format!("{}{TEAMS}", blueprint("\"points\""));
    let fixture = ProjectionFixture::of(applied(&store, &hot, Migrate::Apply).await?).await?;
    fixture.drain().await?;
    let counts = async |fixture: &ProjectionFixture| -> Result<Vec<(String, i64)>> {
        let listed = fixture.client.done("teams.list", &[], json!({}), None).await?.body;
        let row = |row: &serde_json::Value| Some((row["team"].as_str()?.to_owned(), row["count"].as_i64()?));
        Ok(listed.as_array().into_iter().flatten().filter_map(row).collect())
    };
    let expected = vec![("blue".to_owned(), 3), ("red".to_owned(), 5)];
    same("the teams", &counts(&fixture).await?, &expected)?;
    ensure!(fixture.projection()?.rebuild().await?, "no build could be begun");
    fixture.drain().await?;
    same("whether the build is the source's", &fixture.state().await?.verified, &Some(true))?;
    same("the teams", &counts(&fixture).await?, &expected)?;
    // The version that a caller reads is the one that it may write under.
    let version = fixture.client.shown("profile", &[3.into()], &["version"]).await?;
    let request = TenantClient::request(
        "profile.patch",
        &[3.into()],
        &json!({"team": "blue"}),
        version.first().and_then(serde_json::Value::as_i64).map(Expected::Version),
    );
    fixture.client.house.call(&fixture.client.tenant, request, Default::default()).await?;
    Ok(())
}
