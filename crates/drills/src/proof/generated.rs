//! Generated blueprints: every pair of archetypes side by side, with settings by chance.
//!
//! A drill must never be failed on a correct system, whatever else a blueprint declares. [`blueprint`] makes the text of a
//! blueprint from a pair of archetypes and a seed, and [`GeneratedBlueprint::drill`] runs on it every drill that takes any resource.
//! The same pair and seed always give the same text. Left out is what needs a server beside the store: holds in Redis.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use statehouse::Blueprint;
use statehouse::archetypes::Archetype;
use statehouse_store::Random;

use crate::harness::drill::{Drill, DrillReport, DrillTarget};
use crate::harness::engines::TestEngine;
use crate::proof::Proof;

/// The archetypes that a blueprint can declare, by keyword, in the order of the library's list.
pub fn declarable() -> Vec<&'static str> {
    let all = statehouse::archetypes::ARCHETYPES.iter().copied();
    all.filter(|archetype| archetype.is_declarable()).map(|archetype: &Archetype| archetype.keyword).collect()
}

/// Every pair of archetypes, also each with itself.
pub fn pairs() -> Vec<(&'static str, &'static str)> {
    let all = declarable();
    let with = |(index, one): (usize, &&'static str)| {
        let one = *one;
        all.iter().skip(index).map(move |other| (one, *other)).collect::<Vec<_>>()
    };
    all.iter().enumerate().flat_map(with).collect()
}

/// The pair of the blueprint of a number.
pub fn pair_of(number: u64) -> (&'static str, &'static str) {
    let pairs = pairs();
    let index = usize::try_from(number).unwrap_or(0) % pairs.len().max(1);
    pairs.get(index).copied().unwrap_or(("entity", "entity"))
}

/// A generated blueprint, ready to be drilled.
#[derive(Clone, Debug)]
pub struct GeneratedBlueprint {
    /// Its text.
    pub text: String,
    targets: Vec<(&'static str, DrillTarget)>,
}

impl GeneratedBlueprint {
    /// The blueprint of a number: pairs come by turns, and the number is the seed of the settings.
    pub fn of_number(number: u64) -> Result<GeneratedBlueprint> {
        let text = blueprint(pair_of(number), number);
        let read = Blueprint::read("generated.toml", &text).with_context(|| text.clone())?;
        let targets = DrillTarget::all_of(&read).with_context(|| text.clone())?;
        Ok(GeneratedBlueprint { text, targets })
    }

    /// Runs every drill that takes any resource, on the first resource of its archetype.
    pub async fn drill(&self, engine: &dyn TestEngine, seed: u64) -> Vec<DrillReport> {
        let mut reports = Vec::new();
        for (archetype, target) in &self.targets {
            for drill in drills_of(archetype) {
                reports.push(drill.report(engine, Some(target), seed).await);
            }
        }
        reports
    }
}

/// The drills of an archetype that take any resource.
fn drills_of(archetype: &str) -> impl Iterator<Item = &'static Drill> {
    let all = super::DRILLS.iter().copied().flatten();
    all.filter(move |drill| drill.archetype == archetype && drill.takes_any_resource())
}

/// The text of a blueprint that declares these two archetypes, and what they need to stand on.
pub fn blueprint(pair: (&str, &str), seed: u64) -> String {
    let mut writer =
        BlueprintWriter { random: Random::seeded(seed), text: String::new(), sources: Vec::new() };
    // What stands on others is written last, so that there is something to stand on.
    let mut wanted = [pair.0, pair.1];
    wanted.sort_by_key(|archetype| {
        Archetype::of(archetype).is_some_and(|archetype| archetype.dependencies().next().is_some())
    });
    if !wanted.iter().any(|archetype| drills_of(archetype).next().is_some()) {
        writer.declare("entity", "entity0", 0);
    }
    for (number, archetype) in wanted.into_iter().enumerate() {
        writer.declare(archetype, &format!("{archetype}{}", number + 1), number + 1);
    }
    writer.text
}

/// Writes the declaration of a thing with settings by chance: its name, and the number of the thing in the blueprint.
pub(crate) type GenerateDeclaration = fn(&mut BlueprintWriter, name: &str, number: usize);

/// The text of a blueprint being written.
pub(crate) struct BlueprintWriter {
    pub(crate) random: Random,
    pub(crate) text: String,
    pub(crate) sources: Vec<GeneratedSource>,
}

/// A resource that a view, a group, a scan or a reaction can be of.
#[derive(Clone)]
pub(crate) struct GeneratedSource {
    pub(crate) name: String,
    /// The column of its state.
    pub(crate) state: &'static str,
    /// The event that its rows begin with.
    pub(crate) event: &'static str,
    /// Columns that are ints.
    pub(crate) ints: Vec<String>,
}

/// Whether a declared field has to be given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FieldUse {
    Key,
    Any,
}

impl BlueprintWriter {
    /// Declares a thing of an archetype. A test reports an archetype that can be declared and is not generated.
    fn declare(&mut self, archetype: &str, name: &str, number: usize) {
        if let Some(generate) = Proof::of(archetype).and_then(|proof| proof.generate) {
            generate(self, name, number);
        }
    }

    pub(crate) fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{line}");
    }

    /// What later declarations can be of.
    pub(crate) fn source(&mut self, name: &str, state: &'static str, event: &'static str, ints: Vec<String>) {
        self.sources.push(GeneratedSource { name: name.to_owned(), state, event, ints });
    }

    /// One of the sources; an entity is declared if there is none.
    pub(crate) fn any_source(&mut self, name: &str) -> Option<GeneratedSource> {
        if self.sources.is_empty() {
            self.declare("entity", &format!("{name}_source"), 0);
        }
        self.random.pick(&self.sources).cloned()
    }

    pub(crate) fn head(&mut self, archetype: &str, name: &str) {
        self.line(format_args!("[{archetype}.{name}]"));
    }

    pub(crate) fn pick(&mut self, words: &[&'static str]) -> &'static str {
        self.random.pick(words).copied().unwrap_or_default()
    }

    /// A setting that is given every second time.
    pub(crate) fn maybe(&mut self, name: &str, values: &[&'static str]) {
        if self.random.chance(0.5) {
            let value = self.pick(values);
            self.line(format_args!("{name} = {value}"));
        }
    }

    /// So many fields, as a setting; returns the names of those that are ints.
    pub(crate) fn fields(&mut self, setting: &str, lead: &str, count: u64, need: FieldUse) -> Vec<String> {
        let (mut parts, mut ints) = (Vec::new(), Vec::new());
        for number in 0..count {
            let kind = match need {
                FieldUse::Key => self.pick(&["text", "int", "time", "bytes"]),
                FieldUse::Any => self.pick(&["text", "int", "float", "bool", "bytes", "time", "json"]),
            };
            let default = match kind {
                "text" => Some("\"none\""),
                "int" => Some("3"),
                "bool" => Some("true"),
                "float" => Some("0.5"),
                _ => None,
            };
            let declared = match (need, self.random.below(3), default) {
                (FieldUse::Any, 0, _) => format!("\"{kind}?\""),
                (FieldUse::Any, 1, Some(default)) => format!("{{ type = \"{kind}\", default = {default} }}"),
                _ => format!("\"{kind}\""),
            };
            let name = format!("{lead}{number}");
            if kind == "int" {
                ints.push(name.clone());
            }
            parts.push(format!("{name} = {declared}"));
        }
        self.line(format_args!("{setting} = {{ {} }}", parts.join(", ")));
        ints
    }

    pub(crate) fn key(&mut self, setting: &str, lead: &str) {
        let parts = 1 + self.random.below(3);
        self.fields(setting, lead, parts, FieldUse::Key);
    }

    pub(crate) fn some_fields(&mut self, setting: &str, lead: &str) -> Vec<String> {
        let count = self.random.below(5);
        self.fields(setting, lead, count, FieldUse::Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An archetype that can be declared and that nothing is written for would be missing from the drilled blueprints.
    #[test]
    fn every_archetype_that_can_be_declared_is_generated() {
        for archetype in declarable() {
            let head = format!("[{archetype}.");
            for seed in 0..20 {
                let text = blueprint((archetype, archetype), seed);
                assert!(text.matches(&head).count() >= 2, "{archetype}, seed {seed}:\n{text}");
            }
        }
        assert!(pairs().contains(&("entity", "on")) && pairs().contains(&("on", "scan")));
    }

    #[test]
    fn every_generated_blueprint_is_a_good_one() {
        for number in 0..2_000 {
            GeneratedBlueprint::of_number(number).unwrap();
        }
    }
}
