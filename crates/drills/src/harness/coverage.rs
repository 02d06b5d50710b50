//! What is proven of the atlas: for each failure its drill and the engines that the suite runs it on, for each hotspot what
//! turns it down and which benchmark measures that.
//!
//! `statehouse atlas --json`, `docs/guarantees.md`, the table of the README and the failure table of each archetype's page are
//! made from this.

use std::fmt::Write as _;

use statehouse::archetypes::{ARCHETYPES, Archetype, FailureAnswer, Relief};
use statehouse::atlas::{self, AtlasEntry};

use crate::harness::drill::Drill;
use crate::harness::engines;
use crate::proof;

/// The drill of a failure.
pub fn drill(archetype: &AtlasEntry, failure: &str) -> Option<&'static Drill> {
    let ours = |drill: &&'static Drill| drill.archetype == archetype.keyword() && drill.failure == failure;
    proof::drills().find(ours)
}

/// The engines on which the suite runs a drill.
pub fn engines(drill: &Drill) -> Vec<String> {
    let all = engines::all();
    let fit = all
        .iter()
        .filter(|engine| engine.carries_archetypes() && drill.largest_plan <= engine.largest_plan());
    fit.map(|engine| engine.name().to_owned()).collect()
}

/// What turns a hotspot down.
pub fn switch(archetype: &AtlasEntry, hotspot: &str) -> Option<&'static Relief> {
    Archetype::relief_of(archetype, hotspot)
}

/// `docs/guarantees.md`.
pub fn page() -> String {
    let archetypes = atlas::archetypes();
    let failures = archetypes.iter().flat_map(|a| a.failures.iter().map(move |failure| (a, failure)));
    let hotspots = archetypes.iter().flat_map(|a| a.hotspots.iter().map(move |hotspot| (a, hotspot)));
    let drilled = failures.clone().filter(|(a, failure)| drill(a, failure).is_some()).count();
    let relieved = hotspots.clone().filter(|(a, hotspot)| switch(a, hotspot).is_some()).count();
    let mut page = format!(
        "# Guarantees\n\n\
         <!-- Generated: STATEHOUSE_BLESS=1 cargo test -p statehouse-drills --test coverage -->\n\n\
         Each failure that the atlas names, the drill that provokes it, and the engines on which the test command runs that\n\
         drill. `statehouse drill NAME --on URL --blueprint FILE` runs it on your store and your resources, in a namespace of\n\
         its own; `statehouse drill --mutate` shows that it turns red when a guard is taken out.\n\n\
         {drilled} of {} failures have a drill; {relieved} of {} hotspots have something that turns them down.\n",
        failures.count(),
        hotspots.count(),
    );
    for archetype in archetypes {
        let keyword = archetype.keyword();
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            "\n## {} {} (`{keyword}`)\n\n| failure | drill | engines |\n|---|---|---|\n",
            archetype.code, archetype.name
        );
        for failure in &archetype.failures {
            let _ = match drill(archetype, failure) {
                Some(drill) => {
                    let engines = engines(drill).join(", ");
                    writeln!(page, "| {failure} | `{}` {} | {engines} |", drill.name(), drill.provokes)
                }
                None => writeln!(page, "| {failure} | not built yet | |"),
            };
        }
        let _ = write!(page, "\n| hotspot | switch | benchmark |\n|---|---|---|\n");
        for hotspot in &archetype.hotspots {
            let _ = match switch(archetype, hotspot) {
                Some(relief) => {
                    let bench = relief
                        .bench
                        .map_or("not built yet".to_owned(), |name| format!("`cargo bench -- {name}`"));
                    writeln!(page, "| {hotspot} | {} | {bench} |", relief.switch)
                }
                None => writeln!(page, "| {hotspot} | not built yet | |"),
            };
        }
    }
    page
}

/// The table of archetypes in the README.
pub fn readme_table() -> String {
    let row = |a: &&Archetype| format!("| [{0}](docs/archetypes/{0}.md) | {1} |\n", a.keyword, a.about);
    let rows: String = ARCHETYPES.iter().map(row).collect();
    format!("| archetype | for |\n|---|---|\n{rows}")
}

/// The table of failures on the page of an archetype.
pub fn failure_table(archetype: &Archetype) -> String {
    let row = |answer: &FailureAnswer| {
        let drill = archetype.entry().and_then(|entry| drill(entry, answer.failure));
        let drill = drill.map(|drill| format!("`{}`", drill.name())).unwrap_or_default();
        format!("| {} | {} | {} | {drill} |\n", answer.failure, answer.answer, answer.held_by)
    };
    let rows: String = archetype.failures.iter().map(row).collect();
    format!("| failure | what happens | held by | drill |\n|---|---|---|---|\n{rows}")
}
