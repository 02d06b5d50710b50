//! Views and feeds whose tables went away and came back, and events of servers with an older blueprint.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, Expected, Operation};
use statehouse_store::{Clock, Migrate, Store, SystemClock, Time, Value};

use super::{applied, house};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;
use crate::proof::feed::cases::feed_of;
use crate::proof::projection::cases::{ProjectionFixture, teams, truth};

const PROFILE: &str = r#"
[house]
name = "drill"

[entity.profile]
key    = { id = "int" }
fields = { team = { type = "text", default = "none" }, points = { type = "int", default = 0 } }
"#;

/// The profile as a server with the older blueprint knows it.
const OLDER_PROFILE: &str = r#"
[house]
name = "drill"

[entity.profile]
key    = { id = "int" }
fields = { points = { type = "int", default = 0 } }
"#;

const TEAMS: &str = r#"
[view.teams]
of       = "profile"
group_by = ["team"]
count    = true
sum      = ["points"]
min      = ["points"]
max      = ["points"]
"#;

const TEAMS_WITHOUT_SUM: &str = r#"
[view.teams]
of       = "profile"
group_by = ["team"]
count    = true
min      = ["points"]
max      = ["points"]
"#;

fn with(view: &str) -> String {
    format!("{PROFILE}{view}")
}

async fn fixture(store: &Arc<dyn Store>, blueprint: &str) -> Result<ProjectionFixture> {
    ProjectionFixture::of(applied(store, blueprint, Migrate::Apply).await?).await
}

async fn create(client: &TenantClient, id: i64, team: &str, points: i64) -> Result<()> {
    let input = json!({"id": id, "team": team, "points": points});
    client.done("profile.create", &[], input, None).await.map(drop)
}

async fn patch(client: &TenantClient, action: &str, id: i64, input: &Json) -> Result<()> {
    let request = TenantClient::request(action, &[id.into()], input, Some(Expected::Any));
    client.house.call(&client.tenant, request, Operation::default()).await?;
    Ok(())
}

/// Drains the projections, and requires the view to be what the profiles say.
async fn is_true(fixture: &ProjectionFixture) -> Result<()> {
    fixture.drain().await?;
    same("the view", &teams(&fixture.client).await?, &truth(&fixture.client).await?)
}

/// Four profiles, and the view of them.
async fn counted(store: &Arc<dyn Store>) -> Result<ProjectionFixture> {
    let fixture = fixture(store, &with(TEAMS)).await?;
    for (id, team) in [(1, "red"), (2, "blue"), (3, "red"), (4, "green")] {
        create(&fixture.client, id, team, 10 * id).await?;
    }
    is_true(&fixture).await?;
    Ok(fixture)
}

pub(super) async fn a_dropped_view_is_built_again(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    counted(&store).await?;
    for round in 0..2 {
        let without = applied(&store, PROFILE, Migrate::ApplyWithLoss).await?;
        patch(&without, "profile.patch", 1, &json!({"points": 100 + round})).await?;
        let again = fixture(&store, &with(TEAMS)).await?;
        // Nothing is shown before everything is counted.
        again.client.refused("teams.list", &[], json!({}), None, Code::Unavailable).await?;
        create(&again.client, 10 + round, "blue", round).await?;
        is_true(&again).await?;
        same("whether the build is the source's", &again.state().await?.verified, &Some(true))?;
    }
    Ok(())
}

pub(super) async fn a_dropped_column_of_a_view_is_built_again(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    counted(&store).await?;
    let without =
        ProjectionFixture::of(applied(&store, &with(TEAMS_WITHOUT_SUM), Migrate::ApplyWithLoss).await?)
            .await?;
    without.drain().await?;
    // The sums of the generation before went away with their column.
    let again = fixture(&store, &with(TEAMS)).await?;
    // The one of the definition between them goes on serving until there is another.
    for _ in 0..500 {
        if !again.projection()?.status().await?.outdated {
            break;
        }
        again.work(1).await?;
    }
    is_true(&again).await
}

pub(super) async fn a_source_that_was_dropped_is_counted_anew(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    counted(&store).await?;
    applied(&store, "[house]\nname = \"drill\"\n", Migrate::ApplyWithLoss).await?;
    let again = fixture(&store, &with(TEAMS)).await?;
    create(&again.client, 1, "white", 1).await?;
    is_true(&again).await?;
    // A source that moves to another table begins without rows.
    let moved = with(TEAMS).replace("[entity.profile]", "[entity.profile]\ntable = \"people\"");
    let moved = fixture(&store, &moved).await?;
    create(&moved.client, 2, "black", 2).await?;
    moved.drain().await?;
    let groups: Vec<String> = teams(&moved.client).await?.into_keys().collect();
    same("the groups", &groups, &vec!["black".to_owned()])
}

pub(super) async fn a_migration_that_races_keeps_the_new_build(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    counted(&store).await?;
    applied(&store, PROFILE, Migrate::ApplyWithLoss).await?;
    // Several servers start with the view at once.
    let blueprint = with(TEAMS);
    let houses = [house(&store, &blueprint)?, house(&store, &blueprint)?, house(&store, &blueprint)?];
    let [a, b, c] = houses.each_ref().map(|house| house.migrate(Migrate::Apply));
    for changes in <[_; 3]>::from(tokio::join!(a, b, c)) {
        changes?;
    }
    let first = fixture(&store, &blueprint).await?;
    is_true(&first).await?;
    let live = first.live().await?;
    // One that comes later finds the tables, and leaves the build alone.
    let later = fixture(&store, &blueprint).await?;
    is_true(&later).await?;
    same("the live generation", &later.live().await?, &live)
}

pub(super) async fn a_partial_event_is_looked_up_by_a_view(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    // The older server runs first; its rows have no team.
    let older = applied(&store, OLDER_PROFILE, Migrate::Apply).await?;
    older.done("profile.create", &[], json!({"id": 1, "points": 1}), None).await?;
    let fixture = counted_beside(&store).await?;
    // It changes rows that have a team, before and after the newer one does.
    patch(&older, "profile.patch", 2, &json!({"points": 7})).await?;
    patch(&older, "profile.patch", 3, &json!({"points": 8})).await?;
    patch(&fixture.client, "profile.patch", 3, &json!({"team": "green"})).await?;
    patch(&older, "profile.delete", 4, &json!({})).await?;
    older.done("profile.create", &[], json!({"id": 5, "points": 5}), None).await?;
    is_true(&fixture).await?;
    patch(&older, "profile.restore", 4, &json!({})).await?;
    patch(&older, "profile.mutate", 2, &json!({"increment": {"points": 1}})).await?;
    is_true(&fixture).await?;
    ensure!(fixture.projection()?.rebuild().await?, "no build could be begun");
    is_true(&fixture).await?;
    same("whether the build is the source's", &fixture.state().await?.verified, &Some(true))
}

/// Three profiles with a team, beside what an older server has written.
async fn counted_beside(store: &Arc<dyn Store>) -> Result<ProjectionFixture> {
    let fixture = fixture(store, &with(TEAMS)).await?;
    for (id, team) in [(2, "red"), (3, "blue"), (4, "red")] {
        create(&fixture.client, id, team, id).await?;
    }
    is_true(&fixture).await?;
    Ok(fixture)
}

/// Posts, who follows whom, and feeds.
fn posts(fields: &str) -> String {
    format!(
        r#"
[house]
name = "drill"

[entity.post]
key    = {{ post_id = "int" }}
fields = {{ author_id = "int", created_at = "time"{fields} }}

[relation.follow]
from         = {{ follower = "int" }}
to           = {{ followed = "int" }}
buckets      = 2
count_shards = 1
"#
    )
}

const HOME: &str = r#"
[feed.home]
posts      = "post"
follows    = "follow"
preview    = "body"
keep       = "30d"
pull_above = 100
"#;

async fn post(client: &TenantClient, post: i64, author: i64, body: Option<&str>) -> Result<()> {
    let minute = SystemClock.now().micros() / 60_000_000 * 60_000_000;
    let at = Value::Time(Time::from_micros(minute - 60_000_000 + post)).to_json();
    let mut input = json!({"post_id": post, "author_id": author, "created_at": at});
    if let Some(body) = body {
        input["body"] = body.into();
    }
    client.done("post.create", &[], input, None).await.map(drop)
}

async fn follow(client: &TenantClient, viewer: i64, author: i64) -> Result<()> {
    client.done("follow.add", &[viewer.into(), author.into()], json!({}), None).await.map(drop)
}

/// The posts of a feed, and how they begin.
async fn shown(fixture: &ProjectionFixture, viewer: i64) -> Result<Vec<(i64, String)>> {
    fixture.drain().await?;
    let mut shown: Vec<(i64, String)> = feed_of(&fixture.client, viewer, 3)
        .await?
        .into_iter()
        .map(|(_, post, _, body)| (post, body))
        .collect();
    shown.sort();
    Ok(shown)
}

pub(super) async fn a_dropped_feed_is_built_again(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let truth = posts(", body = \"text?\"");
    let first = fixture(&store, &format!("{truth}{HOME}")).await?;
    follow(&first.client, 1, 10).await?;
    post(&first.client, 1, 10, Some("one")).await?;
    same("the feed", &shown(&first, 1).await?, &vec![(1, "one".to_owned())])?;
    let without = applied(&store, &truth, Migrate::ApplyWithLoss).await?;
    post(&without, 2, 10, Some("two")).await?;
    let again = fixture(&store, &format!("{truth}{HOME}")).await?;
    post(&again.client, 3, 10, Some("three")).await?;
    let expected = vec![(1, "one".to_owned()), (2, "two".to_owned()), (3, "three".to_owned())];
    same("the feed", &shown(&again, 1).await?, &expected)
}

pub(super) async fn a_partial_event_is_looked_up_by_a_feed(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let older = applied(&store, &posts(""), Migrate::Apply).await?;
    let newer = fixture(&store, &format!("{}{HOME}", posts(", body = \"text?\""))).await?;
    follow(&newer.client, 1, 10).await?;
    post(&newer.client, 1, 10, Some("one")).await?;
    same("the feed", &shown(&newer, 1).await?, &vec![(1, "one".to_owned())])?;
    // The older server does not know what posts begin with.
    post(&older, 2, 10, None).await?;
    patch(&older, "post.patch", 1, &json!({"author_id": 10, "created_at": "2026-01-01T00:00:00Z"})).await?;
    patch(&older, "post.patch", 1, &json!({"created_at": Value::Time(SystemClock.now()).to_json()})).await?;
    let expected = vec![(1, "one".to_owned()), (2, String::new())];
    same("the feed", &shown(&newer, 1).await?, &expected)?;
    patch(&older, "post.delete", 1, &json!({})).await?;
    same("the feed", &shown(&newer, 1).await?, &vec![(2, String::new())])
}
