//! The settings of one thing, read by name. What is read is known; what is left at the end was a mistake.

use std::ops::Range;
use std::time::Duration;

use statehouse_store::table::TableBuilder;
use statehouse_store::{Type, Value};

use super::field::read_field;
use super::nearest;
use super::problem::{BlueprintProblem, Problems};
use super::tree::{self, Node, TreeEntry};
use crate::declare::FieldLimits;
use crate::declare::row_constraints::FieldReference;
use crate::form::{Form, Property};

/// The settings of one thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// What they belong to, for messages: `entity.profile`.
    subject: String,
    span: Range<usize>,
    entries: Vec<TreeEntry>,
    /// What was asked for.
    known: Vec<&'static str>,
    /// Which entries were asked for.
    read: Vec<String>,
}

/// A declared field.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// Where the name stands.
    pub span: Range<usize>,
    /// Its type.
    pub kind: Type,
    /// Whether it may be missing.
    pub optional: bool,
    /// What it is when nothing is given.
    pub default: Option<Value>,
    /// What its contents must keep.
    pub limits: Option<FieldLimits>,
    /// Whether it keeps what it was created with.
    pub immutable: bool,
    /// Whether the server makes its value where none is given.
    pub generated: bool,
    /// Whether one row at most may have a value.
    pub unique: bool,
    /// What it refers to.
    pub reference: Option<FieldReference>,
    /// The name that it had before, whose values it has.
    pub renamed_from: Option<String>,
}

impl Field {
    /// A field that is not in the file and must always be given.
    pub fn required(name: impl Into<String>, kind: Type) -> Field {
        Field {
            name: name.into(),
            span: 0..0,
            kind,
            optional: false,
            default: None,
            limits: None,
            immutable: false,
            generated: false,
            unique: false,
            reference: None,
            renamed_from: None,
        }
    }

    /// Whether a caller that creates a row has to give it.
    pub fn is_required(&self) -> bool {
        !self.optional && self.default.is_none() && !self.generated
    }

    /// Whether it is unique or refers to a row.
    pub(crate) fn is_constrained(&self) -> bool {
        self.unique || self.reference.is_some()
    }

    /// What an action takes for it.
    pub(crate) fn property(&self) -> Property {
        let form = match &self.limits {
            Some(limits) => Form::Limited(Box::new(limits.clone())),
            None => Form::Value(self.kind),
        };
        let property = Property::required(&self.name, form, "");
        Property { required: self.is_required(), nullable: self.optional, ..property }
    }

    /// A table with columns for fields.
    pub(crate) fn columns(fields: &[Field], table: TableBuilder) -> TableBuilder {
        fields.iter().fold(table, |table, field| {
            let table = match (&field.default, field.optional) {
                (Some(default), _) => table.defaulted(&field.name, field.kind, default.clone()),
                (None, true) => table.optional(&field.name, field.kind),
                (None, false) => table.required(&field.name, field.kind),
            };
            match &field.renamed_from {
                Some(former) => table.renamed(&field.name, former),
                None => table,
            }
        })
    }
}

impl Settings {
    /// The settings in a table.
    pub fn of(subject: &str, node: Node, problems: &mut Problems) -> Option<Settings> {
        match node.value {
            tree::TreeValue::Table(entries) => Some(Settings {
                subject: subject.to_owned(),
                span: node.span,
                entries,
                known: Vec::new(),
                read: Vec::new(),
            }),
            other => {
                let title = format!("`{subject}` must be a table, not {}", other.kind());
                problems.add(BlueprintProblem::at(node.span, title).advice(format!("write `[{subject}]`")));
                None
            }
        }
    }

    /// What they belong to: `entity.profile`.
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// Where the settings stand.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// Where a setting stands, or the settings as a whole.
    pub fn span_of(&self, name: &str) -> Range<usize> {
        let entry = self.entries.iter().find(|entry| entry.key == name);
        entry.map_or_else(|| self.span(), |entry| entry.value.span.clone())
    }

    /// Where a name stands that one of the settings declares, like a field: or the settings as a whole.
    pub fn span_of_declared(&self, name: &str) -> Range<usize> {
        let declared = self.declared().find(|declared| declared.key == name);
        declared.map_or_else(|| self.span(), |declared| declared.key_span.clone())
    }

    /// What the settings declare, like fields.
    fn declared(&self) -> impl Iterator<Item = &TreeEntry> {
        self.entries.iter().flat_map(|entry| match &entry.value.value {
            tree::TreeValue::Table(inner) => inner.as_slice(),
            _ => &[],
        })
    }

    pub(super) fn take(&mut self, name: &'static str) -> Option<Node> {
        self.known.push(name);
        let entry = self.entries.iter().find(|entry| entry.key == name)?;
        self.read.push(name.to_owned());
        Some(entry.value.clone())
    }

    /// A setting as it stands in the file.
    pub(crate) fn node(&mut self, name: &'static str) -> Option<Node> {
        self.take(name)
    }

    fn take_as<T>(
        &mut self,
        name: &'static str,
        expected: &str,
        problems: &mut Problems,
        read: impl FnOnce(&tree::TreeValue) -> Option<T>,
    ) -> Option<T> {
        let node = self.take(name)?;
        let value = read(&node.value);
        if value.is_none() {
            let title = format!("`{name}` of `{}`: expected {expected}", self.subject);
            problems
                .add(BlueprintProblem::at(node.span, title).label(format!("this is {}", node.value.kind())));
        }
        value
    }

    /// A text.
    pub fn text(&mut self, name: &'static str, problems: &mut Problems) -> Option<String> {
        self.take_as(name, "text", problems, |value| match value {
            tree::TreeValue::Text(text) => Some(text.clone()),
            _ => None,
        })
    }

    /// An integer.
    pub fn int(&mut self, name: &'static str, problems: &mut Problems) -> Option<i64> {
        self.take_as(name, "an integer", problems, |value| match value {
            tree::TreeValue::Int(int) => Some(*int),
            _ => None,
        })
    }

    /// A switch.
    pub fn bool(&mut self, name: &'static str, problems: &mut Problems) -> Option<bool> {
        self.take_as(name, "true or false", problems, |value| match value {
            tree::TreeValue::Bool(bool) => Some(*bool),
            _ => None,
        })
    }

    /// A list of texts.
    pub fn texts(&mut self, name: &'static str, problems: &mut Problems) -> Option<Vec<String>> {
        self.take_as(name, "a list of texts", problems, |value| match value {
            tree::TreeValue::List(items) => items
                .iter()
                .map(|item| match &item.value {
                    tree::TreeValue::Text(text) => Some(text.clone()),
                    _ => None,
                })
                .collect(),
            _ => None,
        })
    }

    /// A table of names and texts: `{ accept = "text/plain" }`. The names are free.
    pub fn texts_by_name(
        &mut self,
        name: &'static str,
        problems: &mut Problems,
    ) -> Option<Vec<(String, String)>> {
        self.take_as(name, "a table of names and texts", problems, |value| match value {
            tree::TreeValue::Table(entries) => entries
                .iter()
                .map(|entry| match &entry.value.value {
                    tree::TreeValue::Text(text) => Some((entry.key.clone(), text.clone())),
                    _ => None,
                })
                .collect(),
            _ => None,
        })
    }

    /// Settings within settings: `back_off = { min = "1s" }`. The reader calls `finish` at the end.
    pub fn table(&mut self, name: &'static str, problems: &mut Problems) -> Option<Settings> {
        let entries = self.take_as(name, "a table", problems, |value| match value {
            tree::TreeValue::Table(entries) => Some(entries.clone()),
            _ => None,
        })?;
        let node = Node { span: self.span_of(name), value: tree::TreeValue::Table(entries) };
        Settings::of(&format!("{}.{name}", self.subject), node, problems)
    }

    /// Whether something is said under a name.
    pub fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| entry.key == name)
    }

    /// Whether a setting is given as a text without characters.
    pub fn is_empty_text(&self, name: &str) -> bool {
        let entry = self.entries.iter().find(|entry| entry.key == name);
        entry
            .is_some_and(|entry| matches!(&entry.value.value, tree::TreeValue::Text(text) if text.is_empty()))
    }

    /// A span of time: a number and `ms`, `s`, `m`, `h` or `d`.
    pub fn duration(&mut self, name: &'static str, problems: &mut Problems) -> Option<Duration> {
        self.take_as(name, "a span of time like \"10m\" (ms, s, m, h, d)", problems, |value| match value {
            tree::TreeValue::Text(text) => parse_duration(text),
            _ => None,
        })
    }

    /// One of these words.
    pub fn choice(
        &mut self,
        name: &'static str,
        words: &[&'static str],
        problems: &mut Problems,
    ) -> Option<&'static str> {
        let node = self.take(name)?;
        let given = match &node.value {
            tree::TreeValue::Text(text) => text.as_str(),
            _ => "",
        };
        let found = words.iter().find(|word| **word == given).copied();
        if found.is_none() {
            let list: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
            let title = format!("`{name}` of `{}` must be {}", self.subject, list.join(" or "));
            let mut problem = BlueprintProblem::at(node.span, title);
            if let Some(near) = nearest(given, words.iter().copied()) {
                problem = problem.advice(format!("did you mean \"{near}\"?"));
            }
            problems.add(problem);
        }
        found
    }

    /// A table of names and types: `{ display_name = "text", bio = "text?" }`. `None` if it is not given.
    pub fn fields(&mut self, name: &'static str, problems: &mut Problems) -> Option<Vec<Field>> {
        let node = self.take(name)?;
        let tree::TreeValue::Table(entries) = node.value else {
            let title = format!("`{name}` of `{}` must be a table of names and types", self.subject);
            let advice = format!("write `{name} = {{ some_name = \"text\" }}`");
            problems.add(BlueprintProblem::at(node.span, title).advice(advice));
            return None;
        };
        Some(entries.into_iter().filter_map(|entry| read_field(entry, problems)).collect())
    }

    /// The columns that name a row, all of which must always be given. `None` if there are none, which is a problem.
    pub fn key(&mut self, name: &'static str, problems: &mut Problems) -> Option<Vec<Field>> {
        let key = self.fields(name, problems).filter(|key| !key.is_empty());
        let Some(key) = key else {
            let title = format!("`{}` has no {name}", self.subject);
            let advice = format!("say what names a row: `{name} = {{ user_id = \"int\" }}`");
            problems.add(BlueprintProblem::at(self.span(), title).advice(advice));
            return None;
        };
        for field in key.iter().filter(|field| field.optional || field.default.is_some()) {
            let title = format!("`{}` is part of the {name} and must always be given", field.name);
            problems.add(BlueprintProblem::at(field.span.clone(), title));
        }
        Some(key)
    }

    /// Reports names that cannot be columns, because a table has them already, each where it is declared.
    pub(crate) fn report_clashes(&self, names: &[String], problems: &mut Problems) {
        for name in names {
            let mut declared = self.declared().filter(|entry| entry.key == *name);
            let first = declared.next().map_or_else(|| self.span(), |entry| entry.key_span.clone());
            let (span, title) = match declared.last() {
                Some(again) => (again.key_span.clone(), format!("`{name}` is declared twice")),
                None => (first, format!("every `{}` has a column `{name}` already", self.archetype())),
            };
            problems.add(BlueprintProblem::at(span, title).advice("give it another name"));
        }
    }

    /// The word before the name.
    fn archetype(&self) -> &str {
        self.subject.split('.').next().unwrap_or(&self.subject)
    }

    /// Reports the settings that no reader asked for.
    pub fn finish(&self, problems: &mut Problems) {
        for entry in self.entries.iter().filter(|entry| !self.read.contains(&entry.key)) {
            let title = format!("`{}` has no setting `{}`", self.subject, entry.key);
            let problem = BlueprintProblem::at(entry.key_span.clone(), title);
            problems.add(match nearest(&entry.key, self.known.iter().copied()) {
                Some(near) => problem.advice(format!("did you mean `{near}`?")),
                None => problem.advice(format!("it has {}", self.known.join(", "))),
            });
        }
    }
}

/// A constant in a blueprint as a value.
pub(super) fn constant(value: &tree::TreeValue, kind: Type) -> Option<Value> {
    let json = match value {
        tree::TreeValue::Text(text) => text.as_str().into(),
        tree::TreeValue::Int(int) => (*int).into(),
        tree::TreeValue::Float(float) => serde_json::Number::from_f64(*float)?.into(),
        tree::TreeValue::Bool(bool) => (*bool).into(),
        tree::TreeValue::Time(time) => time.as_str().into(),
        tree::TreeValue::List(_) | tree::TreeValue::Table(_) => return None,
    };
    Value::from_json(json, kind).ok().filter(|value| !value.is_null())
}

/// Reads `10m`, `250ms`, `1h30m`.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, behind) = rest.split_at(digits);
        let unit = behind.find(|c: char| c.is_ascii_digit()).unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(unit);
        let number: u64 = number.parse().ok()?;
        let millis = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return None,
        };
        total = total.checked_add(Duration::from_millis(number.checked_mul(millis)?))?;
        rest = behind;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Blueprint;

    fn settings(text: &str) -> (Settings, Problems) {
        let text = format!("[entity.thing]\n{text}\n");
        let blueprint = Blueprint::read("statehouse.toml", &text).unwrap();
        (blueprint.things.first().unwrap().settings.clone(), blueprint.problems())
    }

    fn check_field(text: &str, expect: &str) {
        let (mut settings, mut problems) = settings(&format!("fields = {{ {text} }}"));
        settings.fields("fields", &mut problems);
        let rendered = problems.render(false);
        assert!(rendered.contains(expect), "{rendered}");
    }

    #[test]
    fn fields_keep_the_order_of_the_file() {
        let text = "fields = { z = \"text\", a = \"int?\", m = { type = \"time\", default = 2026-01-01T00:00:00Z } }";
        let (mut settings, mut problems) = settings(text);
        let fields = settings.fields("fields", &mut problems).unwrap();
        assert!(problems.is_empty(), "{problems}");
        let names: Vec<_> = fields.iter().map(|f| (f.name.as_str(), f.kind, f.optional)).collect();
        assert_eq!(names, [("z", Type::Text, false), ("a", Type::Int, true), ("m", Type::Time, false)]);
        assert!(fields[2].default.is_some());
    }

    #[test]
    fn wrong_types_are_pointed_at() {
        check_field("a = \"txt\"", "did you mean \"text\"?");
        check_field("a = \"txt?\"", "did you mean \"text?\"?");
        check_field("a = 3", "must be text, not an integer");
        check_field("a = { optional = true }", "`a` has no type");
        check_field("a = { type = \"int\", default = \"x\" }", "the default of `a` is not int");
        check_field("A = \"int\"", "cannot be a name");
        check_field("a = { type = \"int\", defalt = 1 }", "did you mean `default`?");
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("10m"), Some(Duration::from_secs(600)));
        assert_eq!(parse_duration("1h30m"), Some(Duration::from_secs(5400)));
        assert_eq!(parse_duration("250ms"), Some(Duration::from_millis(250)));
        for bad in ["", "10", "m", "10x", "10m5", "-1s"] {
            assert_eq!(parse_duration(bad), None, "{bad}");
        }
    }

    #[test]
    fn choices_and_unknown_settings_get_advice() {
        let (mut settings, mut problems) = settings("mutate = \"optimistc\"\nbogus = 1");
        settings.choice("mutate", &["optimistic", "pessimistic"], &mut problems);
        settings.finish(&mut problems);
        let rendered = problems.render(false);
        assert!(rendered.contains("did you mean \"optimistic\"?"), "{rendered}");
        assert!(
            rendered.contains("has no setting `bogus`") && rendered.contains("it has mutate"),
            "{rendered}"
        );
    }
}
