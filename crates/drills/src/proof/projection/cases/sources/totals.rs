//! Totals over all groups: no row is counted twice or not at all, whatever group it is in.

use super::*;

use statehouse::Blueprint;

const BY_TEAM: ViewExpectation = ViewExpectation {
    view: "points",
    table: "profiles",
    by: &["team"],
    sum: &["points"],
    ends: &[],
    counts: |row| row.text("status") == Some("ACTIVE"),
    shown: as_it_is,
};

const PROFILES: &str = r#"
[entity.profile]
key    = { id = "int" }
fields = { team = "text?", points = { type = "int", default = 0 } }
require_version = false
"#;

async fn total(client: &TenantClient) -> Result<(i64, i64)> {
    let body = client.done("points_total.read", &[], json!({}), None).await?.body;
    let number = |name: &str| body[name].as_i64().with_context(|| format!("no {name} in {body}"));
    Ok((number("count")?, number("sum_points")?))
}

async fn create(client: &TenantClient, id: i64, team: &str, points: i64) -> Result<()> {
    client
        .done("profile.create", &[], json!({"id": id, "team": team, "points": points}), None)
        .await
        .map(drop)
}

pub(in crate::proof::projection) async fn a_total_stays_while_rows_change_groups(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let board = ViewFixture::open(namespace, PROFILES, &[("profile", BY_TEAM)]).await?;
    let client = board.client().clone();
    board.fixture.drain().await?;
    same("the total of nothing", &total(&client).await?, &(0, 0))?;
    for id in 1..=12 {
        create(&client, id, "red", 10).await?;
    }
    board.fixture.drain_by(5).await?;
    // Twelve rows go from team to team, while readers add up the shards.
    let reader = tokio::spawn({
        let client = client.clone();
        async move {
            for _ in 0..40 {
                let seen = total(&client).await?;
                ensure!(seen == (12, 120), "a row was counted twice or not at all: {seen:?}");
                tokio::task::yield_now().await;
            }
            anyhow::Ok(())
        }
    });
    for round in 0..3 {
        for id in 1..=12 {
            let team = format!("team {}", (id + round) % 4);
            client.done("profile.patch", &[id.into()], json!({"team": team}), None).await?;
        }
        board.fixture.drain_by(3).await?;
        same("the total", &total(&client).await?, &(12, 120))?;
    }
    reader.await??;
    client.done("profile.delete", &[1.into()], json!({}), None).await?;
    client.done("profile.patch", &[2.into()], json!({"points": -5}), None).await?;
    board.fixture.drain_by(5).await?;
    same("the total", &total(&client).await?, &(11, 95))?;
    let other = client.for_tenant("other")?;
    same("the total of another tenant", &total(&other).await?, &(0, 0))?;
    board.equals_a_rebuild().await?;
    same("the total after a rebuild", &total(&client).await?, &(11, 95))
}

pub(in crate::proof::projection) async fn a_total_beyond_its_type_is_refused(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("a source waits for a sum to fit");
    const ENORMOUS: i64 = 6_000_000_000_000_000_000;
    let board = ViewFixture::open(namespace, PROFILES, &[("profile", BY_TEAM)]).await?;
    let client = board.client();
    board.fixture.drain().await?;
    // Each in a group of its own. One fits into each shard; a second one there is parked.
    for id in 1..=16 {
        create(client, id, &format!("team {id}"), ENORMOUS).await?;
    }
    board.fixture.drain_by(5).await?;
    let refusal = client.refused("points_total.read", &[], json!({}), None, Code::OutOfRange).await?;
    ensure!(refusal.message.contains("sum_points"), "{refusal}");
    Ok(())
}

pub(in crate::proof::projection) async fn totals_that_cannot_be_are_refused(
    _: &dyn TestNamespace,
) -> Result<()> {
    for (settings, problem) in [
        ("total = true", "which is its total"),
        ("group_by = [\"team\"]\nmax = [\"points\"]\ntotal = true", "this view has neither"),
    ] {
        let text =
            format!("[house]\nname = \"drill\"\n{PROFILES}[view.points]\nof = \"profile\"\n{settings}\n");
        let blueprint = Blueprint::read("statehouse.toml", &text)?;
        let Err(problems) = resource::declare(&blueprint) else {
            anyhow::bail!("{settings} was accepted");
        };
        let shown = problems.render(false);
        ensure!(shown.contains(problem) && shown.contains("statehouse.toml:"), "{settings}: {shown}");
    }
    Ok(())
}
use crate::harness::case_check::skip_invariants;
