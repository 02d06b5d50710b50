//! `drill`: the failures that the atlas names, provoked; and with `--mutate` the guards that keep them away, taken out.

use std::sync::Arc;

use anyhow::Context as _;
use serde_json::{Value as Json, json};
use statehouse::engine::{Engine, limits};
use statehouse::{Blueprint, resource};
use statehouse_drills::drill::{Drill, DrillReport, DrillTarget};
use statehouse_drills::proof::DRILLS;
use statehouse_drills::{engines, mutation};

use crate::arguments;
use crate::output::{CliFailure, Output, counted};

pub(crate) async fn run(arguments: &arguments::DrillArgs, output: &Output) -> Result<(), CliFailure> {
    if arguments.mutate {
        return mutate(arguments, output).await;
    }
    let targets = match &arguments.blueprint {
        None => None,
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let blueprint = Blueprint::read(&path.display().to_string(), &text)?;
            limits::problems(&blueprint, &resource::declare(&blueprint)?, Engine::of_url(&arguments.on)?)
                .or(())?;
            Some(DrillTarget::all_of(&blueprint)?)
        }
    };
    let engine = engines::at(&arguments.on)?;
    let chosen = chosen(arguments)?;
    // A store that does not open shows nothing about what is drilled.
    engine.namespace("first look")?.open().await?.close().await;
    let mut reports = Vec::new();
    for drill in chosen {
        let target = match &targets {
            None => None,
            Some(targets) => match targets.iter().find(|(keyword, _)| *keyword == drill.archetype) {
                Some((_, target)) => Some(target),
                // The blueprint has nothing that could fail like this.
                None => continue,
            },
        };
        let report = report(&engine, drill, target, arguments.seed).await?;
        progress(&report);
        reports.push(report);
    }
    if reports.is_empty() {
        return Err(CliFailure::Usage("the blueprint declares nothing that these drills are for".into()));
    }
    let json: Vec<Json> = reports.iter().map(|report| to_json(report, engine.name())).collect();
    output.show(&json!(json), || describe(&reports, engine.name()));
    if reports.iter().any(|report| report.failed.is_some()) { Err(CliFailure::Shown) } else { Ok(()) }
}

/// Runs a drill; in memory on one thread of its own, so that the same seed gives the same history.
async fn report(
    engine: &Arc<dyn engines::TestEngine>,
    drill: &'static Drill,
    target: Option<&DrillTarget>,
    seed: u64,
) -> Result<DrillReport, CliFailure> {
    if engine.name() != Engine::Model.name() {
        return Ok(drill.report(engine.as_ref(), target, seed).await);
    }
    let (engine, target) = (engine.clone(), target.cloned());
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok::<_, std::io::Error>(runtime.block_on(drill.report(engine.as_ref(), target.as_ref(), seed)))
    };
    Ok(tokio::task::spawn_blocking(run).await.context("the drill did not end")?.context("a runtime")?)
}

fn chosen(arguments: &arguments::DrillArgs) -> Result<Vec<&'static Drill>, CliFailure> {
    let wanted = arguments.filter.as_deref().unwrap_or_default().to_lowercase();
    let fits = |drill: &&Drill| {
        let text = format!("{} {} {}", drill.archetype, drill.failure, drill.name());
        text.to_lowercase().contains(&wanted)
    };
    let chosen: Vec<&Drill> = DRILLS.iter().copied().flatten().filter(fits).collect();
    if chosen.is_empty() {
        return Err(CliFailure::Usage(format!(
            "no drill has `{wanted}` in its name; `statehouse drill` runs them all"
        )));
    }
    Ok(chosen)
}

/// Says on a terminal how far it is.
fn progress(report: &DrillReport) {
    use std::io::{IsTerminal as _, Write as _};
    let mut terminal = std::io::stderr();
    if terminal.is_terminal() {
        // A receiver that is gone is no error.
        let _ = writeln!(terminal, "{} {}", verdict(report).to_lowercase(), report.drill.name());
    }
}

/// What came of a drill, in a word.
fn verdict(report: &DrillReport) -> &'static str {
    match (&report.failed, &report.skipped) {
        (Some(_), _) => "RED    ",
        (None, Some(_)) => "skipped",
        (None, None) => "green  ",
    }
}

fn to_json(report: &DrillReport, engine: &str) -> Json {
    let failed = report.failed.as_ref();
    json!({
        "drill": report.drill.name(), "archetype": report.drill.archetype, "failure": report.drill.failure,
        "provokes": report.drill.provokes, "engine": engine, "resource": report.on,
        "outcome": verdict(report).trim_end().to_lowercase(), "green": failed.is_none() && report.skipped.is_none(),
        "skipped": report.skipped,
        "seconds": report.took.as_secs_f64(), "plans": report.plans, "faults": report.achieved.to_string(),
        "seed": failed.map_or(report.seed, |failed| failed.seed), "error": failed.map(|failed| &failed.why),
        "history": failed.map(|failed| &failed.history), "left_out": failed.map(|failed| failed.left_out),
    })
}

fn describe(reports: &[DrillReport], engine: &str) -> String {
    let mut lines = Vec::new();
    for report in reports {
        let verdict = verdict(report);
        let on = report.on.as_ref().map(|name| format!(" on {name}")).unwrap_or_default();
        lines.push(format!(
            "{verdict}  {:<52} {:>6} plans  {:>8.2} s{on}",
            report.drill.name(),
            report.plans,
            report.took.as_secs_f64()
        ));
        let achieved = report.achieved.to_string();
        if report.achieved != Default::default() {
            lines.push(format!("       {achieved}"));
        }
        if let Some(reason) = &report.skipped {
            lines.push(format!("         {reason}"));
        }
        if let Some(failed) = &report.failed {
            lines.push(format!("       {}\n", report.drill.provokes));
            lines.extend(failed.to_string().lines().map(|line| format!("       {line}")));
        }
    }
    let failed = reports.iter().filter(|report| report.failed.is_some()).count();
    let skipped = reports.iter().filter(|report| report.skipped.is_some()).count();
    let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    let drills = counted(reports.len() as u64, "drill", "drills");
    lines.push(format!("\n{drills} on {engine}, {failed} red{skipped}"));
    lines.join("\n")
}

/// Guard mutation runs on threads of its own, so that the runtime here is not in its way.
async fn mutate(arguments: &arguments::DrillArgs, output: &Output) -> Result<(), CliFailure> {
    let wanted = arguments.filter.clone().unwrap_or_default().to_lowercase();
    let archetypes = mutation::archetypes_with_drills().into_iter().filter(|name| name.contains(&wanted));
    let archetypes: Vec<&'static str> = archetypes.collect();
    if archetypes.is_empty() {
        return Err(CliFailure::Usage(format!("no archetype that has drills is called `{wanted}`")));
    }
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let work = move || {
        archetypes.into_iter().map(|name| mutation::run(name, threads)).collect::<Result<Vec<_>, _>>()
    };
    let reports = tokio::task::spawn_blocking(work).await.context("the mutation did not end")??;
    let json: Vec<Json> = reports.iter().map(mutation_json).collect();
    output.show(&json!(json), || reports.iter().map(describe_mutation).collect::<Vec<_>>().join("\n"));
    if reports.iter().all(mutation::MutationReport::is_fine) { Ok(()) } else { Err(CliFailure::Shown) }
}

fn mutation_json(report: &mutation::MutationReport) -> Json {
    let mutants = report.mutants.iter().map(|mutant| {
        json!({
            "actor": mutant.site.actor.name, "step": mutant.site.step, "condition": mutant.site.condition,
            "killed_by": mutant.killed_by, "redundant": mutant.redundant,
        })
    });
    json!({
        "archetype": report.archetype, "killed": report.killed(), "total": report.mutants.len(),
        "mutants": mutants.collect::<Vec<_>>(), "red_before": report.failing_before,
    })
}

fn describe_mutation(report: &mutation::MutationReport) -> String {
    let mut lines = Vec::new();
    for (name, why) in &report.failing_before {
        lines.push(format!("RED AS IT IS  {name}: {why}"));
    }
    for mutant in &report.mutants {
        lines.push(match (&mutant.killed_by, mutant.redundant) {
            (Some(by), None) => format!("killed     {}\n             by {by}", mutant.site),
            (None, Some(reason)) => format!("redundant  {}\n             {reason}", mutant.site),
            (None, None) => format!("SURVIVED   {}", mutant.site),
            (Some(by), Some(_)) => {
                format!("LISTED AS REDUNDANT  {}\n             killed by {by}", mutant.site)
            }
        });
    }
    let (killed, all, redundant) = (report.killed(), report.mutants.len(), report.redundant());
    lines.push(format!("{}: {killed}/{all} killed, {redundant} redundant\n", report.archetype));
    lines.join("\n")
}
