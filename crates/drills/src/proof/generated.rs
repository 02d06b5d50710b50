//! Blueprints that nobody wrote: every pair of archetypes side by side, with settings by chance.
//!
//! A drill must never be failed on a correct system, whatever else a blueprint declares. [`blueprint`] makes the text of a
//! blueprint from a pair of archetypes and a seed, and [`GeneratedBlueprint::drill`] runs on it every drill that takes any resource.
//! The same pair and seed always give the same text. Left out is what needs a server beside the store: holds in Redis.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use statehouse::Blueprint;
use statehouse_store::Random;

use crate::harness::drill::{Drill, DrillReport, Target};
use crate::harness::engines::TestEngine;

/// The archetypes that a blueprint can declare.
pub const ARCHETYPES: [&str; 12] = [
    "booking", "effect", "entity", "feed", "lease", "log", "relation", "schedule", "sequence", "thread",
    "timer", "view",
];

/// The archetypes whose drills take any resource.
const DRILLED: [&str; 4] = ["booking", "entity", "lease", "timer"];

/// Every pair of archetypes, also each with itself.
pub fn pairs() -> Vec<(&'static str, &'static str)> {
    let with = |(place, one): (usize, &&'static str)| {
        let one = *one;
        ARCHETYPES.iter().skip(place).map(move |other| (one, *other)).collect::<Vec<_>>()
    };
    ARCHETYPES.iter().enumerate().flat_map(with).collect()
}

/// The pair of the blueprint of a number.
pub fn pair_of(number: u64) -> (&'static str, &'static str) {
    let pairs = pairs();
    let place = usize::try_from(number).unwrap_or(0) % pairs.len().max(1);
    pairs.get(place).copied().unwrap_or(("entity", "entity"))
}

/// A generated blueprint, ready to be drilled.
#[derive(Clone, Debug)]
pub struct GeneratedBlueprint {
    /// Its text.
    pub text: String,
    targets: Vec<(&'static str, Target)>,
}

impl GeneratedBlueprint {
    /// The blueprint of a number: pairs come by turns, and the number is the seed of the settings.
    pub fn of_number(number: u64) -> Result<GeneratedBlueprint> {
        let text = blueprint(pair_of(number), number);
        let read = Blueprint::read("generated.toml", &text).with_context(|| text.clone())?;
        let targets = Target::all_of(&read).with_context(|| text.clone())?;
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
    wanted.sort_by_key(|archetype| ["view", "feed", "log"].contains(archetype));
    if !wanted.iter().any(|archetype| DRILLED.contains(archetype)) {
        writer.declare("entity", 0);
    }
    for (number, archetype) in wanted.into_iter().enumerate() {
        writer.declare(archetype, number + 1);
    }
    writer.text
}

struct BlueprintWriter {
    random: Random,
    text: String,
    /// What a view can be of: the resource, the column of its state, and columns that are ints.
    sources: Vec<(String, &'static str, Vec<String>)>,
}

/// Whether a declared field has to be given.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FieldUse {
    Key,
    Any,
}

impl BlueprintWriter {
    fn declare(&mut self, archetype: &str, number: usize) {
        let name = format!("{archetype}{number}");
        match archetype {
            "booking" => self.booking(&name),
            "effect" => self.effect(&name),
            "entity" => self.entity(&name),
            "feed" => self.feed(&name, number),
            "lease" => self.lease(&name),
            "log" => self.log(&name),
            "relation" => self.relation(&name),
            "schedule" => self.schedule(&name),
            "sequence" => self.sequence(&name),
            "thread" => self.thread(&name),
            "timer" => self.timer(&name),
            _ => self.view(&name),
        }
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{line}");
    }

    fn head(&mut self, archetype: &str, name: &str) {
        self.line(format_args!("[{archetype}.{name}]"));
    }

    fn pick(&mut self, words: &[&'static str]) -> &'static str {
        self.random.pick(words).copied().unwrap_or_default()
    }

    /// A setting that is given every second time.
    fn maybe(&mut self, name: &str, values: &[&'static str]) {
        if self.random.chance(0.5) {
            let value = self.pick(values);
            self.line(format_args!("{name} = {value}"));
        }
    }

    /// So many fields, as a setting; returns the names of those that are ints.
    fn fields(&mut self, setting: &str, lead: &str, count: u64, need: FieldUse) -> Vec<String> {
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

    fn key(&mut self, setting: &str, lead: &str) {
        let parts = 1 + self.random.below(3);
        self.fields(setting, lead, parts, FieldUse::Key);
    }

    fn booking(&mut self, name: &str) {
        self.head("booking", name);
        let parts = 2 + self.random.below(2);
        self.fields("key", "part_", parts, FieldUse::Key);
        let ints = self.some_fields("fields", "price_");
        self.some_fields("details", "detail_");
        let hold = self.pick(&["1s", "90s", "10m", "1d"]);
        self.line(format_args!("hold_for = \"{hold}\""));
        self.maybe("hold_max", &["\"1d\"", "\"7d\""]);
        self.maybe("units_max", &["1", "10", "40"]);
        self.maybe("refundable", &["true", "false"]);
        self.maybe("shards", &["1", "3", "16"]);
        self.sources.push((name.to_owned(), "state", ints));
        self.sources.push((format!("{name}_booking"), "state", Vec::new()));
    }

    fn some_fields(&mut self, setting: &str, lead: &str) -> Vec<String> {
        let count = self.random.below(5);
        self.fields(setting, lead, count, FieldUse::Any)
    }

    fn effect(&mut self, name: &str) {
        self.head("effect", name);
        let place = self.pick(&["url = \"https://example.com/hook\"", "hosts = [\"*.example.com\"]"]);
        self.line(format_args!("{place}"));
        self.maybe("method", &["\"POST\"", "\"PUT\""]);
        self.maybe("idempotent", &["true", "false"]);
        self.maybe("max_attempts", &["1", "5"]);
        self.maybe("keep", &["\"1d\""]);
        self.sources.push((name.to_owned(), "status", Vec::new()));
    }

    fn entity(&mut self, name: &str) {
        self.head("entity", name);
        self.key("key", "id_");
        let mut ints = self.some_fields("fields", "field_");
        self.maybe("mutate", &["\"optimistic\"", "\"pessimistic\""]);
        self.maybe("require_version", &["true", "false"]);
        // A hot field must be one that `create` does not have to be given.
        let fields = self.text.lines().rev().find(|line| line.starts_with("fields")).unwrap_or_default();
        let is_required = |name: &String| fields.contains(&format!("{name} = \"int\""));
        let hot = ints.iter().position(|name| !is_required(name));
        if let Some(place) = hot.filter(|_| self.random.chance(0.5)) {
            let hot = ints.remove(place);
            self.line(format_args!("hot = [\"{hot}\"]"));
        }
        self.sources.push((name.to_owned(), "status", ints));
    }

    fn lease(&mut self, name: &str) {
        self.head("lease", name);
        self.key("key", "id_");
        self.maybe("duration", &["\"1s\"", "\"30s\"", "\"10m\""]);
        self.maybe("max_duration", &["\"1h\"", "\"1d\""]);
        self.sources.push((name.to_owned(), "state", Vec::new()));
    }

    fn log(&mut self, name: &str) {
        self.head("log", name);
        let source = self.random.pick(&self.sources).map(|(source, ..)| source.clone());
        if let Some(source) = source.filter(|_| self.random.chance(0.7)) {
            self.line(format_args!("of = [\"{source}\"]"));
        }
        self.maybe("lease", &["\"5s\"", "\"1m\""]);
    }

    fn relation(&mut self, name: &str) {
        self.head("relation", name);
        self.key("from", "from_");
        self.key("to", "to_");
        let ints = self.some_fields("fields", "field_");
        self.maybe("buckets", &["1", "4", "7"]);
        self.maybe("out_buckets", &["1", "3"]);
        self.maybe("count_shards", &["1", "5"]);
        self.sources.push((name.to_owned(), "from_0", ints));
    }

    fn schedule(&mut self, name: &str) {
        self.head("schedule", name);
        self.maybe("lease", &["\"5s\"", "\"1m\""]);
        self.maybe("max_attempts", &["1", "20"]);
        self.maybe("per_key", &["1", "3"]);
        self.maybe("priorities", &["1", "4"]);
        self.maybe("shards", &["1", "6"]);
        self.maybe("keep", &["\"0s\"", "\"1d\""]);
        self.sources.push((name.to_owned(), "state", Vec::new()));
    }

    fn sequence(&mut self, name: &str) {
        self.head("sequence", name);
        let kind = self.pick(&["counter", "gapless", "time"]);
        self.line(format_args!("kind = \"{kind}\""));
        if kind == "time" {
            self.maybe("worker_bits", &["4", "10"]);
            self.maybe("shared", &["1", "3"]);
        } else {
            self.key("key", "id_");
            self.maybe("start", &["1", "1000"]);
        }
    }

    fn thread(&mut self, name: &str) {
        self.head("thread", name);
        self.key("parent", "parent_");
        let count = 1 + self.random.below(4);
        let ints = self.fields("fields", "field_", count, FieldUse::Any);
        self.maybe("buckets", &["1", "5"]);
        self.maybe("require_version", &["true", "false"]);
        self.sources.push((name.to_owned(), "status", ints));
    }

    fn timer(&mut self, name: &str) {
        self.head("timer", name);
        self.key("key", "id_");
        self.maybe("shards", &["1", "4", "9"]);
        self.maybe("missed", &["\"once\"", "\"all\""]);
        self.sources.push((name.to_owned(), "status", Vec::new()));
    }

    /// A feed with posts and follows of its own.
    fn feed(&mut self, name: &str, number: usize) {
        let (post, follow) = (format!("post{number}"), format!("follow{number}"));
        let author = self.pick(&["int", "text"]);
        self.line(format_args!("[entity.{post}]\nkey = {{ post_id = \"int\" }}"));
        self.line(format_args!(
            "fields = {{ author_id = \"{author}\", created_at = \"time\", body = \"text\" }}"
        ));
        self.line(format_args!("[relation.{follow}]\nfrom = {{ reader = \"{author}\" }}"));
        self.line(format_args!("to = {{ author = \"{author}\" }}"));
        self.line(format_args!("[feed.{name}]\nposts = \"{post}\"\nfollows = \"{follow}\""));
        self.line(format_args!("table = \"{name}_rows\"\ncursor_table = \"{name}_cursors\""));
        self.maybe("preview", &["\"body\""]);
        self.maybe("pull_above", &["0", "2", "1000"]);
    }

    fn view(&mut self, name: &str) {
        if self.sources.is_empty() {
            self.entity(&format!("{name}_source"));
        }
        let Some((source, state, ints)) = self.random.pick(&self.sources).cloned() else { return };
        self.head("view", name);
        self.line(format_args!("of = \"{source}\""));
        let is_key = state.starts_with("from");
        if !is_key && self.random.chance(0.8) {
            self.line(format_args!("group_by = [\"{state}\"]"));
        }
        if let Some(int) = self.random.pick(&ints).cloned().filter(|_| self.random.chance(0.6)) {
            let what = self.pick(&["sum", "min", "max"]);
            self.line(format_args!("{what} = [\"{int}\"]\ncount = true"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generated_blueprint_is_a_good_one() {
        for number in 0..2_000 {
            GeneratedBlueprint::of_number(number).unwrap();
        }
    }
}
