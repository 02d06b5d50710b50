//! Templates: texts of a blueprint with placeholders, from which the inputs of a call are made.
//!
//! `"{row.email}"` is the value itself, with its type; `"loan {subject}"` is text with values in it. Lists and tables hold
//! templates again. `{{` and `}}` stand for braces. What a placeholder may name is for a [`TemplateScope`] to say, when the
//! blueprint is read; a [`TemplateValues`] gives the values of one event or message.

use std::ops::Range;

use serde_json::Value as Json;
use statehouse_store::Type;

use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::form::{Form, Property};

/// A value of a blueprint that may have placeholders.
#[derive(Clone, Debug, PartialEq)]
pub enum Template {
    /// A constant.
    Literal(Json),
    /// Text and placeholders, one after the other.
    Text(Vec<TemplatePart>),
    /// A list.
    List(Vec<Template>),
    /// A table.
    Object(Vec<(String, Template)>),
}

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplatePart {
    /// As it is written.
    Text(String),
    /// What stands between braces, taken apart at the dots.
    Placeholder(Vec<String>),
}

/// What is wrong with a template, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateError {
    /// Where the text stands in the file.
    pub span: Range<usize>,
    /// What is wrong.
    pub title: String,
    /// What to write instead.
    pub advice: Option<String>,
}

impl TemplateError {
    /// An error at a place.
    pub fn at(span: &Range<usize>, title: impl Into<String>) -> TemplateError {
        TemplateError { span: span.clone(), title: title.into(), advice: None }
    }

    /// The same, with what to write instead.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> TemplateError {
        self.advice = Some(advice.into());
        self
    }
}

/// What placeholders may name.
pub trait TemplateScope {
    /// The type of a value, `None` if any is possible; or what is wrong, and what can be named instead.
    fn kind_of(&self, path: &[String]) -> Result<Option<Type>, (String, String)>;
}

/// The values of one event or message.
pub trait TemplateValues {
    /// The value that a placeholder names; null if there is none.
    fn value(&self, path: &[String]) -> Json;
}

impl Template {
    /// Reads a value of a blueprint.
    pub fn read(node: &Node) -> Result<Template, TemplateError> {
        Ok(match &node.value {
            TreeValue::Text(text) => {
                Template::Text(parts(text).map_err(|title| TemplateError::at(&node.span, title))?)
            }
            TreeValue::Int(int) => Template::Literal((*int).into()),
            TreeValue::Float(float) => Template::Literal((*float).into()),
            TreeValue::Bool(bool) => Template::Literal((*bool).into()),
            TreeValue::Time(time) => Template::Literal(time.as_str().into()),
            TreeValue::List(items) => {
                Template::List(items.iter().map(Template::read).collect::<Result<_, _>>()?)
            }
            TreeValue::Table(entries) => {
                let entry = |entry: &TreeEntry| Ok((entry.key.clone(), Template::read(&entry.value)?));
                Template::Object(entries.iter().map(entry).collect::<Result<_, TemplateError>>()?)
            }
        })
    }

    /// Checks its placeholders, and whether its value can be what a property takes.
    pub fn check(
        &self,
        node: &Node,
        property: &Property,
        scope: &dyn TemplateScope,
    ) -> Result<(), TemplateError> {
        let name = &property.name;
        let mismatch = |title: String| Err(TemplateError::at(&node.span, title));
        match self {
            Template::Literal(value) => match property.form.field_errors(value).first() {
                Some(error) => mismatch(format!("`{name}`: {}", error.detail)),
                None => Ok(()),
            },
            Template::Text(parts) => match (parts.as_slice(), self.check_names(node, scope)?) {
                ([TemplatePart::Placeholder(_)], Some(kind)) if !admits(&property.form, kind) => {
                    mismatch(format!("`{name}` takes {}, and this is {kind}", taken(&property.form)))
                }
                ([TemplatePart::Placeholder(_)], _) => Ok(()),
                ([], _) => check_text("", property, node),
                ([TemplatePart::Text(text)], _) => check_text(text, property, node),
                _ if takes_text(&property.form) => Ok(()),
                _ => mismatch(format!("`{name}` takes {}, and this is text", taken(&property.form))),
            },
            Template::List(_) | Template::Object(_) => match property.form {
                Form::Any | Form::Value(Type::Json) | Form::List(_) | Form::Object(_) => {
                    self.check_names(node, scope).map(drop)
                }
                _ => mismatch(format!("`{name}` takes {}", taken(&property.form))),
            },
        }
    }

    /// Checks its placeholders; returns the type of the value if the text is a placeholder and nothing else.
    pub fn check_names(&self, node: &Node, scope: &dyn TemplateScope) -> Result<Option<Type>, TemplateError> {
        let mut found = None;
        match (self, &node.value) {
            (Template::Text(parts), _) => {
                for part in parts {
                    if let TemplatePart::Placeholder(path) = part {
                        let kind = scope.kind_of(path);
                        found = kind
                            .map_err(|(title, advice)| TemplateError::at(&node.span, title).advise(advice))?;
                    }
                }
                return Ok(found.filter(|_| parts.len() == 1));
            }
            (Template::List(items), TreeValue::List(nodes)) => {
                for (item, node) in items.iter().zip(nodes) {
                    item.check_names(node, scope)?;
                }
            }
            (Template::Object(items), TreeValue::Table(entries)) => {
                for ((_, item), entry) in items.iter().zip(entries) {
                    item.check_names(&entry.value, scope)?;
                }
            }
            _ => {}
        }
        Ok(None)
    }

    /// The value for one event or message.
    pub fn render(&self, values: &dyn TemplateValues) -> Json {
        match self {
            Template::Literal(value) => value.clone(),
            Template::Text(parts) => match parts.as_slice() {
                [TemplatePart::Placeholder(path)] => values.value(path),
                parts => Json::String(parts.iter().map(|part| part.text(values)).collect()),
            },
            Template::List(items) => items.iter().map(|item| item.render(values)).collect(),
            Template::Object(items) => {
                let items = items.iter().map(|(name, item)| (name.clone(), item.render(values)));
                Json::Object(items.collect())
            }
        }
    }

    /// Visits the placeholders.
    pub fn placeholders<'t>(&'t self, visit: &mut dyn FnMut(&'t [String])) {
        match self {
            Template::Literal(_) => {}
            Template::Text(parts) => {
                for part in parts {
                    if let TemplatePart::Placeholder(path) = part {
                        visit(path);
                    }
                }
            }
            Template::List(items) => items.iter().for_each(|item| item.placeholders(visit)),
            Template::Object(items) => items.iter().for_each(|(_, item)| item.placeholders(visit)),
        }
    }
}

impl TemplatePart {
    /// Its text. Null is nothing.
    pub fn text(&self, values: &dyn TemplateValues) -> String {
        match self {
            TemplatePart::Text(text) => text.clone(),
            TemplatePart::Placeholder(path) => text_of(&values.value(path)),
        }
    }
}

/// A value as text: nothing for null.
pub fn text_of(value: &Json) -> String {
    match value {
        Json::Null => String::new(),
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// What is found in a document behind a path.
pub fn find<'j>(document: &'j Json, path: &[String]) -> &'j Json {
    let step = |value: &'j Json, name: &String| match value {
        Json::Array(items) => {
            name.parse::<usize>().ok().and_then(|index| items.get(index)).unwrap_or(&Json::Null)
        }
        value => value.get(name).unwrap_or(&Json::Null),
    };
    path.iter().fold(document, step)
}

/// A value in the form that a property takes, where a number is written as text or the other way round.
pub fn fitted(value: Json, form: &Form) -> Json {
    match (&without_limits(form), &value) {
        (Form::Value(Type::Text) | Form::OneOf(_), Json::Number(_) | Json::Bool(_)) => {
            Json::String(value.to_string())
        }
        (Form::Value(Type::Int | Type::Float | Type::Bool) | Form::Range(..), Json::String(text)) => {
            serde_json::from_str(text).unwrap_or(value)
        }
        _ => value,
    }
}

/// The form of a value whose constraints do not matter: they are checked when the action is called.
fn without_limits(form: &Form) -> Form {
    match form {
        Form::Limited(limits) => Form::Value(limits.kind),
        other => other.clone(),
    }
}

/// Whether a form takes values of a type, if need be as text.
fn admits(form: &Form, kind: Type) -> bool {
    match form {
        Form::Limited(limits) => admits(&Form::Value(limits.kind), kind),
        Form::Any | Form::Value(Type::Json) => true,
        Form::Value(Type::Text) => kind != Type::Json,
        Form::OneOf(_) => matches!(kind, Type::Text | Type::Int | Type::Bool),
        Form::Range(..) => matches!(kind, Type::Int | Type::Text),
        Form::Value(wanted) if *wanted == kind => true,
        // A key is text, and may be that of a number.
        Form::Value(Type::Int | Type::Float) => matches!(kind, Type::Int | Type::Text),
        Form::Value(_) => kind == Type::Text,
        Form::List(_) | Form::Object(_) => kind == Type::Json,
    }
}

/// Whether a form takes text that is not that of a number.
fn takes_text(form: &Form) -> bool {
    matches!(
        without_limits(form),
        Form::Any | Form::OneOf(_) | Form::Value(Type::Text | Type::Json | Type::Time | Type::Bytes)
    )
}

/// What a form takes, in words.
fn taken(form: &Form) -> String {
    match form {
        Form::Any => "anything".to_owned(),
        Form::Value(kind) => kind.to_string(),
        Form::Limited(limits) => limits.kind.to_string(),
        Form::OneOf(words) => format!("one of {}", words.join(", ")),
        Form::Range(min, max) => format!("an integer from {min} to {max}"),
        Form::Object(_) => "a table".to_owned(),
        Form::List(_) => "a list".to_owned(),
    }
}

fn check_text(text: &str, property: &Property, node: &Node) -> Result<(), TemplateError> {
    match property.form.field_errors(&Json::String(text.to_owned())).first() {
        Some(error) => Err(TemplateError::at(&node.span, format!("`{}`: {}", property.name, error.detail))),
        None => Ok(()),
    }
}

/// Takes a text apart at its braces.
fn parts(text: &str) -> Result<Vec<TemplatePart>, String> {
    let mut found = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(index) = rest.find(['{', '}']) {
        let (before, behind) = rest.split_at(index);
        plain.push_str(before);
        if let Some(after) = behind.strip_prefix("{{").or_else(|| behind.strip_prefix("}}")) {
            plain.push_str(behind.get(..1).unwrap_or_default());
            rest = after;
            continue;
        }
        let inner = behind.strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let Some((name, after)) = inner else {
            return Err(format!("`{text}` has a brace by itself; write {{{{ or }}}} for a brace"));
        };
        let path: Vec<String> = name.split('.').map(|part| part.trim().to_owned()).collect();
        if path.iter().any(|part| part.is_empty() || part.contains('{')) {
            return Err(format!("`{{{name}}}` names nothing"));
        }
        if !plain.is_empty() {
            found.push(TemplatePart::Text(std::mem::take(&mut plain)));
        }
        found.push(TemplatePart::Placeholder(path));
        rest = after;
    }
    plain.push_str(rest);
    if !plain.is_empty() {
        found.push(TemplatePart::Text(plain));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    struct Document(Json);

    impl TemplateValues for Document {
        fn value(&self, path: &[String]) -> Json {
            find(&self.0, path).clone()
        }
    }

    fn rendered(text: &str) -> Json {
        let values = Document(json!({"a": {"b": 3, "list": ["x", "y"]}, "name": "ann", "none": null}));
        Template::Text(parts(text).unwrap()).render(&values)
    }

    #[test]
    fn a_placeholder_by_itself_keeps_its_type() {
        assert_eq!(rendered("{a.b}"), json!(3));
        assert_eq!(rendered("{ a.list.1 }"), json!("y"));
        assert_eq!(rendered("{a}"), json!({"b": 3, "list": ["x", "y"]}));
        assert_eq!(rendered("{nothing.here}"), Json::Null);
    }

    #[test]
    fn text_around_placeholders_makes_text() {
        assert_eq!(rendered("{name}/{a.b}{none}!"), json!("ann/3!"));
        assert_eq!(rendered("{{{name}}} {{}}"), json!("{ann} {}"));
        assert_eq!(rendered(""), json!(""));
    }

    #[test]
    fn braces_come_in_pairs() {
        for text in ["{", "}", "a { b", "{}", "{a..b}", "{a{b}}"] {
            assert!(parts(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_and_texts_are_fitted() {
        assert_eq!(fitted(json!(3), &Form::Value(Type::Text)), json!("3"));
        assert_eq!(fitted(json!("3"), &Form::Value(Type::Int)), json!(3));
        assert_eq!(fitted(json!("x"), &Form::Value(Type::Int)), json!("x"));
        assert_eq!(fitted(json!("3"), &Form::Any), json!("3"));
    }
}
