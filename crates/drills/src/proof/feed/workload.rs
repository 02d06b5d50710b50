//! A05 in simulation, as a feed: authors post, edit and delete, readers follow and unfollow, and workers deliver.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;
use statehouse::Code;
use statehouse_store::{Clock as _, Time, Value};

use super::cases::{feed_of, truth};
use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "feed",
    blueprint: r#"
[house]
name = "simulation"

[entity.post]
key    = { post_id = "int" }
fields = { author_id = "int", created_at = "time", body = "text?" }

[relation.follow]
from         = { follower = "int" }
to           = { followed = "int" }
buckets      = 2
count_shards = 1

[feed.home]
posts      = "post"
follows    = "follow"
preview    = "body"
pull_above = 2
"#,
    resource: "home",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const POSTS: u64 = 8;
/// Everybody writes and reads. An author with more than `pull_above` followers has posts that are pulled.
const PEOPLE: u64 = 4;

async fn act(client: &mut SimulatedClient) {
    let (post, author) = (client.below(POSTS), client.below(PEOPLE));
    let edge = [Value::from(client.below(PEOPLE)), Value::from(author)];
    let at = client.clock.now().minus(Duration::from_secs(client.random.below(60)));
    let fields = json!({"author_id": author, "created_at": Value::Time(at).to_json(), "body": client.name});
    let key = [post.into()];
    match client.below(9) {
        0 | 1 => {
            let mut created = fields;
            created["post_id"] = json!(post);
            drop(client.call("post.create", &[], created, None).await);
        }
        2 | 3 => drop(client.call("follow.add", &edge, json!({}), None).await),
        4 => drop(client.call("follow.remove", &edge, json!({}), None).await),
        choice => {
            let known = client.read().call("post.read", &key, json!({}), None).await;
            let deleted = matches!(&known, Err(refusal) if refusal.code == Code::Deleted);
            let version = known.ok().and_then(|answer| answer.version);
            let action = match choice {
                8 => "post.delete",
                7 if deleted => "post.restore",
                _ => "post.patch",
            };
            let input = if action == "post.patch" { fields } else { json!({}) };
            drop(client.call(action, &key, input, version).await);
        }
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Conservation: when everything was read, each feed has the posts of those whom its reader follows.
    let expected = truth(&end.sound, Time::MIN).await?;
    let mut differs = None;
    for _ in 0..STEPS_MAX {
        differs = None;
        for (viewer, posts) in &expected {
            match feed_of(&end.sound, *viewer, 3).await {
                Ok(found) if found == *posts => {}
                found => {
                    differs = Some(format!("the feed of {viewer} is {found:?}, and should be {posts:?}"));
                }
            }
        }
        if differs.is_none() {
            end.sound.drain_workers().await?;
            return Ok(());
        }
        end.sound.work(50).await?;
    }
    bail!("{}", differs.unwrap_or_default())
}

/// Steps until a feed has caught up.
const STEPS_MAX: usize = 200;
