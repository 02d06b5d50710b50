//! A declared field: `"text"`, `"text?"`, or a table with its type, default and constraints.

use std::ops::Range;

use statehouse_store::{Type, Value};

use super::problem::{BlueprintProblem, Problems};
use super::settings::{Field, Settings, constant};
use super::tree::{self, Node, TreeEntry};
use super::{check_name, nearest};
use crate::declare::row_constraints::read_field_constraints;
use crate::declare::{FieldLimits, TextPattern};

/// The word for a key that the server makes.
const UUID7: &str = "uuid7";

/// What stands behind a field's name.
struct WrittenField {
    span: Range<usize>,
    word: String,
    optional: bool,
    immutable: bool,
    /// The settings of the table form, to be read when the type is known.
    settings: Option<Settings>,
}

/// Reads `text`, `text?` or `{ type = "text", optional = true, default = …, max_length = 200, … }`.
pub(super) fn read_field(entry: TreeEntry, problems: &mut Problems) -> Option<Field> {
    let TreeEntry { key, key_span, value } = entry;
    if let Err(why) = check_name(&key) {
        problems.add(BlueprintProblem::at(key_span, format!("`{key}` cannot be a name: it {why}")));
        return None;
    }
    if key == crate::house::IF {
        let title = format!("`{key}` cannot be a field: calls give their condition under this name");
        problems.add(BlueprintProblem::at(key_span, title).advice("give it another name"));
        return None;
    }
    let mut written = written(&key, value, problems)?;
    let generated = written.word == UUID7;
    let kind = if generated { Type::Text } else { kind(&mut written, problems)? };
    let mut default = None;
    let mut limits = None;
    let (mut unique, mut reference) = (false, None);
    let mut renamed_from = None;
    if let Some(settings) = &mut written.settings {
        let reader = FieldLimitsReader { name: &key, kind };
        let read = reader.read(settings, problems);
        default = reader.default(settings, &read, problems);
        limits = Some(read).filter(|limits| !limits.is_empty());
        (unique, reference) = read_field_constraints(&key, settings, problems);
        renamed_from = former_name(&key, settings, problems);
        settings.finish(problems);
    }
    let WrittenField { optional, immutable, .. } = written;
    let (name, span) = (key, key_span);
    Some(Field {
        name,
        span,
        kind,
        optional,
        default,
        limits,
        immutable,
        generated,
        unique,
        reference,
        renamed_from,
    })
}

/// The name that a field had before.
fn former_name(key: &str, settings: &mut Settings, problems: &mut Problems) -> Option<String> {
    let former = settings.text("renamed_from", problems)?;
    let why = match check_name(&former) {
        Err(why) => why,
        Ok(()) if former == key => "is the name that it has now".into(),
        Ok(()) => return Some(former),
    };
    let title = format!("`renamed_from` of `{key}` cannot be `{former}`: it {why}");
    problems.add(BlueprintProblem::at(settings.span_of("renamed_from"), title));
    None
}

fn written(key: &str, value: Node, problems: &mut Problems) -> Option<WrittenField> {
    match value {
        Node { span, value: tree::TreeValue::Text(word) } => {
            Some(WrittenField { span, word, optional: false, immutable: false, settings: None })
        }
        Node { span, value: table @ tree::TreeValue::Table(_) } => {
            let mut settings = Settings::of(key, Node { span: span.clone(), value: table }, problems)?;
            let word = settings.text("type", problems);
            let optional = settings.bool("optional", problems).unwrap_or(false);
            let immutable = settings.bool("immutable", problems).unwrap_or(false);
            let Some(word) = word else {
                problems.add(BlueprintProblem::at(span, format!("`{key}` has no type")).advice(TYPES));
                return None;
            };
            Some(WrittenField { span, word, optional, immutable, settings: Some(settings) })
        }
        other => {
            let title = format!("the type of `{key}` must be text, not {}", other.value.kind());
            problems.add(BlueprintProblem::at(other.span, title).advice(TYPES));
            None
        }
    }
}

/// The type that a word names; a `?` behind it makes the field optional.
fn kind(written: &mut WrittenField, problems: &mut Problems) -> Option<Type> {
    let word = &written.word;
    let bare = word.strip_suffix('?').unwrap_or(word);
    written.optional |= bare.len() < word.len();
    let found = Type::ALL.into_iter().find(|kind| kind.name() == bare);
    if found.is_none() {
        let mut problem = BlueprintProblem::at(written.span.clone(), format!("`{word}` is not a type"));
        problem = match nearest(bare, Type::ALL.map(Type::name)) {
            Some(near) => {
                problem.advice(format!("did you mean \"{near}{}\"?", if written.optional { "?" } else { "" }))
            }
            None => problem.advice(TYPES),
        };
        problems.add(problem);
    }
    found
}

const TYPES: &str =
    "types are text, int, float, bool, bytes, time and json, with a `?` behind if it may be missing";

/// Reads the constraints of a field of a known type.
struct FieldLimitsReader<'a> {
    name: &'a str,
    kind: Type,
}

impl FieldLimitsReader<'_> {
    fn read(&self, settings: &mut Settings, problems: &mut Problems) -> FieldLimits {
        let mut limits = FieldLimits::of(self.kind);
        let numbers = [Type::Int, Type::Float, Type::Time];
        if self.allows(settings, &["min", "max"], &numbers, problems) {
            limits.min = self.value(settings, "min", problems);
            limits.max = self.value(settings, "max", problems);
        }
        if self.allows(settings, &["max_length"], &[Type::Text], problems) {
            limits.max_length = self.length(settings, problems);
        }
        if self.allows(settings, &["enum"], &[Type::Text, Type::Int], problems) {
            limits.one_of = self.values(settings, problems);
        }
        if self.allows(settings, &["pattern"], &[Type::Text], problems) {
            limits.pattern = self.pattern(settings, problems);
        }
        if let (Some(min), Some(max)) = (&limits.min, &limits.max)
            && min.compare(max).is_some_and(std::cmp::Ordering::is_gt)
        {
            let title = format!("`min` of `{}` is greater than its `max`", self.name);
            problems.add(BlueprintProblem::at(settings.span_of("min"), title));
        }
        limits
    }

    /// Whether the type has such a constraint; one that is given and cannot be is reported.
    fn allows(
        &self,
        settings: &mut Settings,
        names: &[&'static str],
        kinds: &[Type],
        problems: &mut Problems,
    ) -> bool {
        let is_allowed = kinds.contains(&self.kind);
        for name in names.iter().filter(|_| !is_allowed) {
            if settings.take(name).is_some() {
                let kinds: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
                let title =
                    format!("`{name}` of `{}` is for {}, not for {}", self.name, kinds.join(", "), self.kind);
                problems.add(BlueprintProblem::at(settings.span_of(name), title));
            }
        }
        is_allowed
    }

    fn value(&self, settings: &mut Settings, name: &'static str, problems: &mut Problems) -> Option<Value> {
        let node = settings.take(name)?;
        let value = constant(&node.value, self.kind);
        if value.is_none() {
            let title = format!("`{name}` of `{}` is not {}", self.name, self.kind);
            problems
                .add(BlueprintProblem::at(node.span, title).label(format!("this is {}", node.value.kind())));
        }
        value
    }

    fn length(&self, settings: &mut Settings, problems: &mut Problems) -> Option<usize> {
        let given = settings.int("max_length", problems)?;
        let length = usize::try_from(given).ok().filter(|length| *length > 0);
        if length.is_none() {
            let title = format!("`max_length` of `{}` must be at least 1", self.name);
            problems.add(BlueprintProblem::at(settings.span_of("max_length"), title));
        }
        length
    }

    fn values(&self, settings: &mut Settings, problems: &mut Problems) -> Vec<Value> {
        let Some(node) = settings.take("enum") else { return Vec::new() };
        let items = match &node.value {
            tree::TreeValue::List(items) if !items.is_empty() => items.as_slice(),
            _ => &[],
        };
        let values: Option<Vec<Value>> = items.iter().map(|item| constant(&item.value, self.kind)).collect();
        match values {
            Some(values) if !values.is_empty() => values,
            _ => {
                let title = format!("`enum` of `{}` must be a list of {}", self.name, self.kind);
                problems.add(
                    BlueprintProblem::at(node.span, title).advice("write `enum = [\"hand\", \"power\"]`"),
                );
                Vec::new()
            }
        }
    }

    fn pattern(&self, settings: &mut Settings, problems: &mut Problems) -> Option<TextPattern> {
        let text = settings.text("pattern", problems)?;
        let pattern = TextPattern::new(&text);
        pattern
            .map_err(|why| {
                let title = format!("`pattern` of `{}` is not a regular expression: {why}", self.name);
                problems.add(BlueprintProblem::at(settings.span_of("pattern"), title));
            })
            .ok()
    }

    /// The default, which keeps the constraints.
    fn default(
        &self,
        settings: &mut Settings,
        limits: &FieldLimits,
        problems: &mut Problems,
    ) -> Option<Value> {
        let node = settings.take("default")?;
        let Some(default) = constant(&node.value, self.kind) else {
            let title = format!("the default of `{}` is not {}", self.name, self.kind);
            problems
                .add(BlueprintProblem::at(node.span, title).label(format!("this is {}", node.value.kind())));
            return None;
        };
        if let Err(why) = limits.check(&default) {
            let title = format!("the default of `{}` violates its constraint: {why}", self.name);
            problems.add(BlueprintProblem::at(node.span, title));
        }
        Some(default)
    }
}
