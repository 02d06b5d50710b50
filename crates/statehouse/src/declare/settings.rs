//! Reads the settings of a declaration: name, default and allowed range in one call.
//!
//! Each method reads one setting, reports a [`BlueprintProblem`] at the value's place in the file if it does not fit, and returns a
//! usable value in any case. So a declaration reads all its settings and the user sees all problems at once; the caller
//! drops what was declared if there were any. Every setting that was read is recorded ([`SettingInfo`]) for the generated
//! documentation.

use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use statehouse_store::Type;

use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::blueprint::settings::{Field, Settings};
use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::declare::template::TemplateError;

/// One setting as it was read, for the generated settings table.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingInfo {
    /// Its name, with the table it stands in: `back_off.min`.
    pub name: String,
    /// Its type in words: `a duration`.
    pub kind: &'static str,
    /// The value if it is not given.
    pub default: String,
    /// The values it may have, empty if there is no restriction beyond the type.
    pub allowed: String,
}

/// The settings of one declaration, or of a table within it.
#[derive(Debug)]
pub struct SettingsReader<'p> {
    settings: Settings,
    problems: &'p mut Problems,
    /// Prefix of recorded names: empty, or `back_off.`.
    prefix: String,
    infos: Vec<SettingInfo>,
}

impl<'p> SettingsReader<'p> {
    /// Reads these settings and reports problems there.
    pub fn new(settings: Settings, problems: &'p mut Problems) -> SettingsReader<'p> {
        SettingsReader { settings, problems, prefix: String::new(), infos: Vec::new() }
    }

    /// The columns that name a row. A placeholder column after a problem.
    pub fn key(&mut self, name: &'static str) -> Vec<Field> {
        let key = self.key_or_generated(name);
        for field in key.iter().filter(|field| field.generated) {
            let title = format!("`{}` cannot be made by the server: callers name these rows", field.name);
            self.field_problem(field, title, Some("write `text`"));
        }
        key
    }

    /// The columns that name a row, some of which the server may make.
    pub fn key_or_generated(&mut self, name: &'static str) -> Vec<Field> {
        self.record(name, "columns", "required", "");
        let Some(key) = self.settings.key(name, self.problems) else {
            return vec![Field::required("id", Type::Text)];
        };
        for field in key.iter().filter(|field| field.is_constrained()) {
            let title =
                format!("`{}` is part of the key, so it cannot be unique or refer to a row", field.name);
            self.field_problem(field, title, Some("declare a field for it"));
        }
        key
    }

    /// User-declared columns; none if not given.
    pub fn fields(&mut self, name: &'static str) -> Vec<Field> {
        let fields = self.fields_or_constrained(name);
        for field in fields.iter().filter(|field| field.is_constrained()) {
            let title = format!(
                "`{}` cannot be unique or refer to a row: only fields of entities and threads can",
                field.name
            );
            self.field_problem(field, title, None);
        }
        fields
    }

    /// User-declared columns, some of which may be unique or refer to rows; none if not given.
    pub fn fields_or_constrained(&mut self, name: &'static str) -> Vec<Field> {
        let fields = self.fields_or_immutable(name);
        for field in fields.iter().filter(|field| field.immutable) {
            let title = format!("`{}` cannot be immutable: only fields of an entity can", field.name);
            self.field_problem(field, title, None);
        }
        fields
    }

    /// User-declared columns, some of which may keep what they were created with; none if not given.
    pub fn fields_or_immutable(&mut self, name: &'static str) -> Vec<Field> {
        self.record(name, "columns", "none", "");
        let fields = self.settings.fields(name, self.problems).unwrap_or_default();
        for field in fields.iter().filter(|field| field.generated) {
            let title = format!("`{}` cannot be \"uuid7\": only the key of an entity can", field.name);
            self.field_problem(field, title, Some("write `text`"));
        }
        fields
    }

    /// A number in a range.
    pub fn count(&mut self, name: &'static str, default: u32, allowed: RangeInclusive<u32>) -> u32 {
        self.maybe_count_or(name, default.to_string(), &allowed).unwrap_or(default)
    }

    /// A number in a range, or none.
    pub fn maybe_count(&mut self, name: &'static str, allowed: RangeInclusive<u32>) -> Option<u32> {
        self.maybe_count_or(name, "none".into(), &allowed)
    }

    fn maybe_count_or(
        &mut self,
        name: &'static str,
        default: String,
        allowed: &RangeInclusive<u32>,
    ) -> Option<u32> {
        let (min, max) = (allowed.start(), allowed.end());
        self.record(name, "an integer", default, format!("{min} to {max}"));
        let given = self.settings.int(name, self.problems)?;
        let fits = u32::try_from(given).ok().filter(|given| allowed.contains(given));
        if fits.is_none() {
            self.problem(name, format!("`{name}` must be from {min} to {max}"));
        }
        fits
    }

    /// An integer in a range, which may be negative.
    pub fn integer(&mut self, name: &'static str, default: i64, allowed: RangeInclusive<i64>) -> i64 {
        let (min, max) = (allowed.start(), allowed.end());
        self.record(name, "an integer", default.to_string(), format!("{min} to {max}"));
        let given = self.settings.int(name, self.problems).unwrap_or(default);
        if allowed.contains(&given) {
            return given;
        }
        self.problem(name, format!("`{name}` must be from {min} to {max}"));
        default
    }

    /// A duration in a range.
    pub fn duration(
        &mut self,
        name: &'static str,
        default: Duration,
        allowed: RangeInclusive<Duration>,
    ) -> Duration {
        self.maybe_duration_or(name, duration_text(default), &allowed).unwrap_or(default)
    }

    /// A duration in a range, or none.
    pub fn maybe_duration(
        &mut self,
        name: &'static str,
        allowed: RangeInclusive<Duration>,
    ) -> Option<Duration> {
        self.maybe_duration_or(name, "none".into(), &allowed)
    }

    /// A duration in a range, or none if it is given as an empty text.
    pub fn duration_or_none(
        &mut self,
        name: &'static str,
        default: Duration,
        allowed: RangeInclusive<Duration>,
    ) -> Option<Duration> {
        if self.settings.is_empty_text(name) {
            self.settings.text(name, self.problems);
            self.record(name, "a duration", duration_text(default), "");
            return None;
        }
        Some(self.duration(name, default, allowed))
    }

    fn maybe_duration_or(
        &mut self,
        name: &'static str,
        default: String,
        allowed: &RangeInclusive<Duration>,
    ) -> Option<Duration> {
        let (min, max) = (duration_text(*allowed.start()), duration_text(*allowed.end()));
        self.record(name, "a duration", default, format!("{min} to {max}"));
        let given = self.settings.duration(name, self.problems)?;
        let fits = Some(given).filter(|given| allowed.contains(given));
        if fits.is_none() {
            self.problem(name, format!("`{name}` must be from {min} to {max}"));
        }
        fits
    }

    /// One of these words; the first is the default.
    pub fn choice(&mut self, name: &'static str, words: &[&'static str]) -> &'static str {
        let default = words.first().copied().unwrap_or_default();
        self.choice_or(name, words, default)
    }

    /// One of these words, with another default than the first.
    pub fn choice_or(
        &mut self,
        name: &'static str,
        words: &[&'static str],
        default: &'static str,
    ) -> &'static str {
        self.record(name, "a word", format!("\"{default}\""), words.join(", "));
        self.settings.choice(name, words, self.problems).unwrap_or(default)
    }

    /// One of these words, which must be given. `None` after a problem.
    pub fn required_choice(
        &mut self,
        name: &'static str,
        words: &[&'static str],
        advice: &str,
    ) -> Option<&'static str> {
        self.record(name, "a word", "required", words.join(", "));
        if !self.has(name) {
            let title = format!("`{}` has no {name}", self.settings.subject());
            self.problem_with_advice(name, title, advice);
        }
        self.settings.choice(name, words, self.problems)
    }

    /// A switch.
    pub fn flag(&mut self, name: &'static str, default: bool) -> bool {
        self.record(name, "true or false", default.to_string(), "");
        self.settings.bool(name, self.problems).unwrap_or(default)
    }

    /// A text.
    pub fn text(&mut self, name: &'static str, default: impl Into<String>) -> String {
        let default = default.into();
        self.record(name, "text", format!("\"{default}\""), "");
        self.settings.text(name, self.problems).unwrap_or(default)
    }

    /// A text, or none.
    pub fn maybe_text(&mut self, name: &'static str) -> Option<String> {
        self.record(name, "text", "none", "");
        self.settings.text(name, self.problems)
    }

    /// A list of texts; empty if not given.
    pub fn texts(&mut self, name: &'static str) -> Vec<String> {
        self.record(name, "a list of texts", "empty", "");
        self.settings.texts(name, self.problems).unwrap_or_default()
    }

    /// A table of names and texts; empty if not given. The names are free.
    pub fn texts_by_name(&mut self, name: &'static str) -> Vec<(String, String)> {
        self.record(name, "a table of texts", "empty", "");
        self.settings.texts_by_name(name, self.problems).unwrap_or_default()
    }

    /// The settings in a table of its own, read by a function; `None` if the table is not given.
    pub fn nested<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&mut SettingsReader<'_>) -> T,
    ) -> Option<T> {
        let settings = self.settings.table(name, self.problems)?;
        let prefix = format!("{}{name}.", self.prefix);
        let mut inner = SettingsReader { settings, problems: &mut *self.problems, prefix, infos: Vec::new() };
        let value = read(&mut inner);
        inner.settings.finish(inner.problems);
        self.infos.append(&mut inner.infos);
        Some(value)
    }

    /// The tables of a table whose names are free, `[workflow.order.on]`: each is read by a function, which gets its name and
    /// where the name stands. What the function gives after a problem is not used.
    pub fn each<T>(
        &mut self,
        name: &'static str,
        mut read: impl FnMut(&str, Range<usize>, &mut SettingsReader<'_>) -> Option<T>,
    ) -> Vec<T> {
        self.record(name, "a table of tables", "empty", "");
        let Some(node) = self.settings.node(name) else { return Vec::new() };
        let subject = format!("{}.{name}", self.settings.subject());
        let TreeValue::Table(entries) = node.value else {
            let title = format!("`{name}` must be a table of tables, not {}", node.value.kind());
            let problem = BlueprintProblem::at(node.span, title);
            self.problems.add(problem.advice(format!("write `[{subject}]`")));
            return Vec::new();
        };
        let mut read_all = Vec::new();
        for TreeEntry { key, key_span, value } in entries {
            let subject = format!("{subject}.{key}");
            let Some(settings) = Settings::of(&subject, value, self.problems) else { continue };
            let prefix = format!("{}{name}.{key}.", self.prefix);
            let problems = &mut *self.problems;
            let mut inner = SettingsReader { settings, problems, prefix, infos: Vec::new() };
            read_all.extend(read(&key, key_span, &mut inner));
            inner.settings.finish(inner.problems);
            self.infos.append(&mut inner.infos);
        }
        read_all
    }

    /// A value of any kind, or none, for settings whose form only another declaration knows.
    pub fn node(&mut self, name: &'static str) -> Option<Node> {
        self.record(name, "a value", "none", "");
        self.settings.node(name)
    }

    /// Where a setting's value stands.
    pub fn span_of(&self, name: &str) -> Range<usize> {
        self.settings.span_of(name)
    }

    /// How many problems there are, of this declaration and those before it.
    pub fn problem_count(&self) -> usize {
        self.problems.len()
    }

    /// Reports a problem of a template.
    pub fn template_problem(&mut self, error: TemplateError) {
        let problem = BlueprintProblem::at(error.span, error.title);
        self.problems.add(match error.advice {
            Some(advice) => problem.advice(advice),
            None => problem,
        });
    }

    /// Reports a problem that was made elsewhere.
    pub fn add_problem(&mut self, problem: BlueprintProblem) {
        self.problems.add(problem);
    }

    /// Whether a setting is given.
    pub fn has(&self, name: &str) -> bool {
        self.settings.has(name)
    }

    /// Reports a problem at a setting's value.
    pub fn problem(&mut self, name: &str, title: impl Into<String>) {
        self.problems.add(BlueprintProblem::at(self.settings.span_of(name), title));
    }

    /// Reports a problem at a setting's value, with what to write instead.
    pub fn problem_with_advice(&mut self, name: &str, title: impl Into<String>, advice: impl Into<String>) {
        self.problems.add(BlueprintProblem::at(self.settings.span_of(name), title).advice(advice));
    }

    /// Reports a problem at a declared field.
    pub fn field_problem(&mut self, field: &Field, title: impl Into<String>, advice: Option<&str>) {
        let problem = BlueprintProblem::at(field.span.clone(), title);
        self.problems.add(match advice {
            Some(advice) => problem.advice(advice),
            None => problem,
        });
    }

    /// Reports a problem at a setting's value if a condition holds.
    pub fn refuse_if(&mut self, condition: bool, name: &str, title: impl Into<String>) {
        if condition {
            self.problem(name, title);
        }
    }

    /// Reports a problem of the settings as a whole.
    pub fn whole_problem(&mut self, title: impl Into<String>) {
        self.problems.add(BlueprintProblem::at(self.settings.span(), title));
    }

    /// Reports names that cannot be columns, each where it is declared. Whether there are some.
    pub(super) fn clashes(&mut self, names: &[String]) -> bool {
        self.settings.report_clashes(names, self.problems);
        !names.is_empty()
    }

    /// Reports settings that no method asked for. Returns what was read, and the problems.
    pub(crate) fn finish(self) -> (Vec<SettingInfo>, &'p mut Problems) {
        self.settings.finish(self.problems);
        (self.infos, self.problems)
    }

    fn record(
        &mut self,
        name: &str,
        kind: &'static str,
        default: impl Into<String>,
        allowed: impl Into<String>,
    ) {
        let name = format!("{}{name}", self.prefix);
        self.infos.push(SettingInfo { name, kind, default: default.into(), allowed: allowed.into() });
    }
}

/// A duration as a blueprint writes it, with the largest unit that fits: `10m`, `1500ms`.
pub fn duration_text(duration: Duration) -> String {
    let millis = duration.as_millis();
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)];
    let unit = units.into_iter().find(|(_, size)| millis > 0 && millis.is_multiple_of(*size));
    unit.map_or_else(|| format!("{millis}ms"), |(name, size)| format!("{}{name}", millis / size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Blueprint;

    fn read<T>(text: &str, read: impl FnOnce(&mut SettingsReader<'_>) -> T) -> (T, String, Vec<SettingInfo>) {
        let blueprint = Blueprint::read("statehouse.toml", &format!("[entity.thing]\n{text}\n")).unwrap();
        let mut problems = blueprint.problems();
        let settings = blueprint.things.first().unwrap().settings.clone();
        let mut reader = SettingsReader::new(settings, &mut problems);
        let value = read(&mut reader);
        let (infos, _) = reader.finish();
        (value, problems.render(false), infos)
    }

    #[test]
    fn a_value_outside_its_range_is_reported_and_the_default_is_used() {
        let (value, problems, infos) = read("shards = 0", |s| s.count("shards", 16, 1..=1_024));
        assert_eq!(value, 16);
        assert!(problems.contains("`shards` must be from 1 to 1024"), "{problems}");
        assert_eq!(infos.first().map(|info| info.allowed.as_str()), Some("1 to 1024"));
        let minute = Duration::from_secs(60);
        let (value, problems, _) =
            read("keep = \"2m\"", |s| s.duration("keep", minute, Duration::from_millis(1)..=minute));
        assert_eq!(value, minute);
        assert!(problems.contains("`keep` must be from 1ms to 1m"), "{problems}");
        let (value, problems, _) = read("shards = -1", |s| s.maybe_count("shards", 1..=4));
        assert_eq!(value, None);
        assert!(problems.contains("from 1 to 4"), "{problems}");
    }

    #[test]
    fn nested_settings_are_finished_and_recorded_with_their_table() {
        let (value, problems, infos) = read("back_off = { min = \"1s\", mix = 1 }", |s| {
            s.nested("back_off", |s| {
                s.duration("min", Duration::from_secs(5), Duration::ZERO..=Duration::from_secs(60))
            })
        });
        assert_eq!(value, Some(Duration::from_secs(1)));
        assert!(problems.contains("did you mean `min`?"), "{problems}");
        assert_eq!(infos.first().map(|info| info.name.as_str()), Some("back_off.min"));
    }

    #[test]
    fn unknown_settings_and_missing_keys_are_reported_together() {
        let (key, problems, _) = read("keys = { a = \"int\" }", |s| s.key("key"));
        assert_eq!(key.len(), 1);
        assert!(problems.contains("has no key") && problems.contains("did you mean `key`?"), "{problems}");
    }

    #[test]
    fn durations_are_written_with_the_largest_unit_that_fits() {
        for (millis, text) in [(0, "0ms"), (1, "1ms"), (1_500, "1500ms"), (60_000, "1m"), (86_400_000, "1d")]
        {
            assert_eq!(duration_text(Duration::from_millis(millis)), text);
        }
    }
}
