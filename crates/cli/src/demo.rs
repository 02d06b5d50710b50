//! `demo`: a ready system under load, and what must hold when it is over.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value as Json, json};
use statehouse::engine;
use statehouse_drills::scenario::{ScenarioProgress, ScenarioReport, ScenarioSize, System};

use crate::arguments::Demo;
use crate::blueprint;
use crate::output::{CliFailure, Output, counted};

pub(crate) async fn run(demo: &Demo, output: &Output) -> Result<(), CliFailure> {
    let system = System::named(&demo.system).ok_or_else(|| blueprint::no_system(&demo.system))?;
    let size = ScenarioSize { callers: demo.callers.max(1), actions: demo.actions, seed: demo.seed };
    let folder = tempfile::tempdir().context("a folder for the demo cannot be made")?;
    let own = || format!("sqlite:{}", folder.path().join("demo.db").display());
    let store = engine::open(&demo.store.clone().unwrap_or_else(own)).await?;
    let total = (size.callers * size.actions) as u64;
    let (bar, lines) = (progress_bar(total), ProgressLines::of(system.name, total));
    let progress = bar.clone();
    let progress: ScenarioProgress = Arc::new(move |done, _| {
        progress.set_position(done);
        lines.reached(done);
    });
    let run = system.run(store.clone(), size, progress).await;
    bar.finish_and_clear();
    let engine = store.engine();
    store.close().await;
    let report = run.with_context(|| format!("the {} system, with --seed {}", system.name, size.seed))?;
    output.show(&to_json(system, engine, size, &report), || describe(system, engine, size, &report));
    Ok(())
}

fn progress_bar(total: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} actions, {per_sec}, {eta} left");
    ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Lines about the progress, on standard error where it is no terminal.
struct ProgressLines {
    name: &'static str,
    total: u64,
    /// Tenths of the actions that a line was written for; more than ten if none is to be written.
    tenths: AtomicU64,
}

impl ProgressLines {
    fn of(name: &'static str, total: u64) -> ProgressLines {
        let is_terminal = std::io::stderr().is_terminal();
        let lines =
            ProgressLines { name, total, tenths: AtomicU64::new(if is_terminal { u64::MAX } else { 0 }) };
        lines.write(0);
        lines
    }

    fn reached(&self, done: u64) {
        let tenths = done.saturating_mul(10) / self.total.max(1);
        if self.tenths.fetch_max(tenths, Ordering::Relaxed) < tenths {
            self.write(done);
        }
    }

    fn write(&self, done: u64) {
        if self.tenths.load(Ordering::Relaxed) == u64::MAX {
            return;
        }
        let then = if done >= self.total { "; what must hold is checked" } else { "" };
        // A caller that does not read standard error misses the lines.
        let _ = writeln!(std::io::stderr(), "{}: {done} of {} actions{then}", self.name, self.total);
    }
}

fn to_json(system: &System, engine: &str, size: ScenarioSize, report: &ScenarioReport) -> Json {
    let invariants = report.invariants.iter().map(|one| json!({"holds": one.holds, "counted": one.counted}));
    let figures = report.figures.iter().map(|(name, figure)| ((*name).to_owned(), json!(figure)));
    json!({
        "system": system.name, "engine": engine,
        "callers": size.callers, "actions": size.actions, "seed": size.seed,
        "invariants": invariants.collect::<Vec<_>>(), "figures": figures.collect::<serde_json::Map<_, _>>(),
    })
}

fn describe(system: &System, engine: &str, size: ScenarioSize, report: &ScenarioReport) -> String {
    let mut lines = vec![
        system.about.to_owned(),
        format!(
            "{} with {} each, on {engine}, seed {}.\n",
            counted(size.callers as u64, "caller", "callers"),
            counted(size.actions as u64, "action", "actions"),
            size.seed
        ),
    ];
    lines.extend(report.invariants.iter().map(|one| format!("  holds  {} ({})", one.holds, one.counted)));
    lines.push(String::new());
    lines.extend(report.figures.iter().map(|(name, figure)| format!("  {name:<27} {figure}")));
    lines.join("\n")
}
