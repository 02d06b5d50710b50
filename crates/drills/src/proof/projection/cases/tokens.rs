//! Tokens of writes on a server that did not write.

use super::*;

/// A server whose cache has the former row, and whose view is behind, shows a write to a caller that brings its token.
pub(super) async fn a_token_is_good_on_another_server(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let writer = ProjectionFixture::over(store.clone(), TEAMS).await?;
    let reader = TenantClient::over(store, &blueprint(TEAMS), Arc::new(SystemClock)).await?;
    reader.house.start_followers();
    reader.house.start_workers(WorkerOptions {
        lease: Duration::from_millis(1_500),
        idle_max: Duration::from_millis(500),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    });
    for points in 1..6 {
        let token = writer.put(1, "red", points).await?.context("a write without a token")?;
        let cached = json!({"consistency": "cached", "after": token});
        let row = reader.done("profile.read", &[1.into()], cached, None).await?;
        same("the cached row", &row.body["points"], &json!(points))?;
        let seen = loop {
            let input = json!({"after": token, "wait_ms": 30_000});
            match reader.call("teams.read", &["red".into()], input, None).await {
                Ok(seen) => break seen,
                // A slow machine is no failure; an old number would be.
                Err(refusal) => ensure!(refusal.code == Code::Unavailable, "{refusal}"),
            }
        };
        same("the view", &seen.body["sum_points"], &json!(points))?;
        // The cache has this row when the next write comes.
        reader.done("profile.read", &[1.into()], json!({"consistency": "cached"}), None).await?;
    }
    reader.house.stop_workers().await;
    Ok(())
}
