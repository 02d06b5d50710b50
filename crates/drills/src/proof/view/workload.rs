//! I05, I06 and A05 in simulation: a view that follows its source through the log while its workers crash.

use anyhow::{Result, bail};
use serde_json::json;
use statehouse::Code;

use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::proof::projection::cases::{teams, truth};

/// Profiles, and what they add up to by team.
pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "simulation"

[entity.profile]
key    = { id = "int" }
fields = { team = "text?", points = { type = "int", default = 0 } }

[view.teams]
of       = "profile"
group_by = ["team"]
count    = true
sum      = ["points"]
min      = ["points"]
max      = ["points"]
total    = true
"#;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "view",
    blueprint: BLUEPRINT,
    resource: "teams",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const PROFILES: u64 = 8;
const TEAMS: u64 = 3;

pub(crate) async fn act(client: &mut SimulatedClient) {
    let id = client.below(PROFILES);
    let fields = json!({"team": format!("team {}", client.below(TEAMS)), "points": client.below(10)});
    let key = [id.into()];
    match client.below(8) {
        0 | 1 => {
            let mut created = fields;
            created["id"] = json!(id);
            drop(client.call("profile.create", &[], created, None).await);
        }
        2 | 3 => drop(client.call("profile.mutate", &key, json!({"increment": {"points": 1}}), None).await),
        choice => {
            let known = client.read().call("profile.read", &key, json!({}), None).await;
            let deleted = matches!(&known, Err(refusal) if refusal.code == Code::Deleted);
            let version = known.ok().and_then(|answer| answer.version);
            let action = match choice {
                7 => "profile.delete",
                6 if deleted => "profile.restore",
                _ => "profile.patch",
            };
            let input = if action == "profile.patch" { fields } else { json!({}) };
            drop(client.call(action, &key, input, version).await);
        }
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Conservation: when everything was read, the view is what its source adds up to.
    let expected = truth(&end.sound).await?;
    let mut found = teams(&end.sound).await;
    for _ in 0..STEPS_MAX {
        if matches!(&found, Ok(found) if *found == expected) {
            return Ok(());
        }
        end.sound.work(50).await?;
        found = teams(&end.sound).await;
    }
    bail!("the view shows {found:?}, and its source is {expected:?}")
}

/// Steps until a view has caught up.
const STEPS_MAX: usize = 200;
