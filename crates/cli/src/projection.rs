//! `projection`: which generations views have, how far they have got, and building them anew.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value as Json, json};
use statehouse::House;
use statehouse::infra::log::GroupStatus;
use statehouse::infra::projection::{BuildPhase, Generation, Projection, ProjectionStatus};

use crate::arguments::{Project, ProjectCommand};
use crate::blueprint;
use crate::output::{CliFailure, Output};
use crate::settings::CliSettings;

/// The pause between two looks at a build.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

pub(crate) async fn run(project: &Project, output: &Output) -> Result<(), CliFailure> {
    let house = blueprint::open_in_use(&CliSettings::read(&project.live().flags())?.own).await?;
    let done = act(&house, &project.command, output).await;
    house.stop_workers().await;
    house.store().close().await;
    done
}

async fn act(house: &House, command: &ProjectCommand, output: &Output) -> Result<(), CliFailure> {
    match command {
        ProjectCommand::List { .. } => {
            let mut all = Vec::new();
            for projection in house.projections() {
                all.push((projection.name().to_owned(), projection.status().await?));
            }
            let json: Vec<Json> = all.iter().map(|(name, status)| to_json(name, status)).collect();
            output.show(&json!(json), || {
                if all.is_empty() {
                    return "The blueprint has no projection; `[view.NAME]` declares one.".into();
                }
                all.iter().map(|(name, status)| line(name, status)).collect::<Vec<_>>().join("\n")
            });
        }
        ProjectCommand::Status { name, .. } => show(&named(house, name)?, output).await?,
        ProjectCommand::Rebuild { name, detach, .. } => {
            let projection = named(house, name)?;
            if !projection.rebuild().await? {
                let message = format!("a generation of {name} is being built or deleted already");
                return Err(CliFailure::Usage(message));
            }
            if !detach {
                follow(house, &projection).await?;
            }
            show(&projection, output).await?;
        }
        ProjectCommand::Rollback { name, .. } => {
            let projection = named(house, name)?;
            if !projection.roll_back().await? {
                return Err(CliFailure::Usage(format!("{name} has no generation to go back to")));
            }
            show(&projection, output).await?;
        }
        ProjectCommand::Drop { name, .. } => {
            let projection = named(house, name)?;
            if !projection.drop_previous().await? {
                return Err(CliFailure::Usage(format!(
                    "{name} has no former generation, or one is being deleted"
                )));
            }
            show(&projection, output).await?;
        }
    }
    Ok(())
}

fn named(house: &House, name: &str) -> Result<Projection, CliFailure> {
    let found = house.projections().into_iter().find(|projection| projection.name() == name);
    let found = found.map(|projection| projection.on_behalf_of(&crate::audit::actor(), house.ids()));
    found.ok_or_else(|| {
        CliFailure::Usage(format!("there is no projection `{name}`; `projection list` has them"))
    })
}

/// Works on the build together with the servers, if there are any, until readers read it.
async fn follow(house: &House, projection: &Projection) -> Result<(), CliFailure> {
    house.start_workers(statehouse::worker::WorkerOptions::default());
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::new_spinner(),
        false => ProgressBar::hidden(),
    };
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    loop {
        let status = projection.status().await?;
        let Some(building) = &status.state.building else { break };
        let (ahead, _) = lag(&status.building);
        let said = match building.phase {
            BuildPhase::Scanning => format!("{} rows scanned, {ahead} records ahead", status.state.scanned),
            BuildPhase::CatchingUp => {
                format!("all {} rows scanned, {ahead} records ahead", status.state.scanned)
            }
            BuildPhase::Differs => {
                bar.finish_and_clear();
                let number = building.generation.number;
                let why = format!("generation {number} differs from its source and was not switched to");
                return Err(CliFailure::Other(anyhow::anyhow!("{why}; rebuild once more")));
            }
        };
        bar.set_message(said);
        bar.tick();
        house.clock().sleep(LOOK_AGAIN).await;
    }
    bar.finish_and_clear();
    Ok(())
}

async fn show(projection: &Projection, output: &Output) -> Result<(), CliFailure> {
    let status = projection.status().await?;
    output.show(&to_json(projection.name(), &status), || describe(projection.name(), &status));
    Ok(())
}

/// Records ahead in all partitions, and the age of the oldest of them.
fn lag(standings: &[GroupStatus]) -> (u64, Duration) {
    let records = standings.iter().map(|one| one.records).sum();
    (records, standings.iter().map(|one| one.behind).max().unwrap_or_default())
}

fn to_json(name: &str, status: &ProjectionStatus) -> Json {
    let state = &status.state;
    let number = |generation: &Option<Generation>| generation.as_ref().map(|one| one.number);
    let (records, behind) = lag(&status.live);
    let building = state.building.as_ref().map(|building| {
        json!({
            "generation": building.generation.number, "phase": building.phase.name(),
            "lag_records": lag(&status.building).0,
        })
    });
    json!({
        "name": name, "live": number(&state.live), "previous": number(&state.previous), "building": building,
        "dropping": state.dropping, "scanned": state.scanned, "verified": state.verified, "digest": state.digest,
        "outdated": status.outdated, "lag_records": records, "lag_seconds": behind.as_secs_f64(),
    })
}

fn line(name: &str, status: &ProjectionStatus) -> String {
    let state = &status.state;
    let live =
        state.live.as_ref().map_or("not built yet".to_owned(), |live| format!("generation {}", live.number));
    let (records, behind) = lag(&status.live);
    let building = state.building.as_ref().map_or(String::new(), |building| {
        format!(", building {} ({})", building.generation.number, building.phase.name())
    });
    let outdated = if status.outdated { ", outdated" } else { "" };
    format!(
        "{name:<24} {live}, {records} records and {:.1} s behind{building}{outdated}",
        behind.as_secs_f64()
    )
}

fn describe(name: &str, status: &ProjectionStatus) -> String {
    let state = &status.state;
    let mut lines = vec![line(name, status)];
    if let Some(previous) = &state.previous {
        lines.push(format!("  kept to go back to: generation {}", previous.number));
    }
    if let Some(number) = state.dropping {
        lines.push(format!("  being deleted: generation {number}"));
    }
    let verified = match state.verified {
        Some(true) => "equal to the source",
        Some(false) => "different from the source",
        None => "not compared while nothing was written",
    };
    lines.push(format!("  last build: {} rows scanned, {verified}", state.scanned));
    if let Some(digest) = &state.digest {
        lines.push(format!("  digest: {digest}"));
    }
    lines.join("\n")
}
