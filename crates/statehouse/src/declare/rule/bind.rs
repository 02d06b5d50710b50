//! Binding: a checked rule and the values of one call make a guard.

use std::fmt;

use serde_json::{Map, Value as Json};
use statehouse_store::limits::IN_VALUES_MAX;
use statehouse_store::table::VERSION;
use statehouse_store::{Guard, Operand, Row, Time, Type, Value, eval};

use crate::inputs::Inputs;

use super::check::{CheckedLeaf, CheckedTree};
use super::{CheckedRule, Rule, Term};

/// The values of one call. A value may be [`Value::Json`]: binding reads it as the type that it is compared with. What is
/// not there is null.
pub trait RuleSource {
    /// An input of the call.
    fn input(&self, _name: &str) -> Value {
        Value::Null
    }
    /// A claim of the caller's credential.
    fn claim(&self, _name: &str) -> Value {
        Value::Null
    }
    /// A part of the row's key, counted from 0.
    fn key(&self, _place: usize) -> Value {
        Value::Null
    }
    /// A value that the library computes.
    fn bound(&self, _name: &str) -> Value {
        Value::Null
    }
}

/// The values of one call, given one by one.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuleValues<'a> {
    /// What the call was given.
    pub inputs: Option<&'a Inputs>,
    /// What the caller's credential says.
    pub claims: Option<&'a Map<String, Json>>,
    /// The row's key.
    pub key: &'a [Value],
    /// What the library computed.
    pub binds: &'a [(&'a str, Value)],
}

impl RuleSource for RuleValues<'_> {
    fn input(&self, name: &str) -> Value {
        self.inputs.map_or(Value::Null, |inputs| inputs.value_or_null(name))
    }
    fn claim(&self, name: &str) -> Value {
        member(self.claims, name)
    }
    fn key(&self, index: usize) -> Value {
        self.key.get(index).cloned().unwrap_or(Value::Null)
    }
    fn bound(&self, name: &str) -> Value {
        let found = self.binds.iter().find(|(bound, _)| *bound == name);
        found.map_or(Value::Null, |(_, value)| value.clone())
    }
}

fn member(object: Option<&Map<String, Json>>, name: &str) -> Value {
    object.and_then(|object| object.get(name)).map_or(Value::Null, |json| Value::Json(json.clone()))
}

impl Term {
    /// The term as an operand of a guard or an assignment, its value read as `kind`: null if it is missing or not of that
    /// type.
    pub fn bind(&self, kind: Type, source: &dyn RuleSource) -> Operand {
        match self {
            Term::Column(name) => Operand::Column(name.clone()),
            Term::Coalesce(name, default) => Operand::Coalesce(name.clone(), default.clone()),
            Term::Now { plus_micros } => Operand::Now { plus_micros: *plus_micros },
            Term::Value(_) | Term::Input(_) | Term::Claim(_) | Term::Key(_) | Term::Bind(_) => {
                Operand::Value(read_as(self.given(source), kind))
            }
        }
    }

    /// The value of a term that neither the row nor the clock has; null for the others.
    fn given(&self, source: &dyn RuleSource) -> Value {
        match self {
            Term::Value(value) => value.clone(),
            Term::Input(name) => source.input(name),
            Term::Claim(name) => source.claim(name),
            Term::Key(place) => source.key(*place),
            Term::Bind(name) => source.bound(name),
            Term::Column(_) | Term::Coalesce(..) | Term::Now { .. } => Value::Null,
        }
    }
}

/// A value in the form of a type; null if it has none.
fn read_as(value: Value, kind: Type) -> Value {
    let read = match value {
        Value::Json(Json::String(text)) if kind == Type::Int => Ok(canonical_int(&text)),
        Value::Json(json) if kind != Type::Json => Value::from_json(json, kind),
        other => other.admitted(kind),
    };
    read.unwrap_or(Value::Null)
}

/// An integer that is written as text, in the one form that it has; otherwise null.
fn canonical_int(text: &str) -> Value {
    text.parse::<i64>().ok().filter(|int| int.to_string() == text).map_or(Value::Null, Value::Int)
}

impl CheckedRule {
    /// The guard for one call. Parts that depend on the call alone are decided here: a rule that reads neither the row nor
    /// the clock becomes [`Guard::always`] or [`Guard::never`].
    pub fn bind(&self, source: &dyn RuleSource) -> Guard {
        self.tree.bind(source)
    }

    /// Whether the rule holds for a row at a time.
    pub fn holds(&self, source: &dyn RuleSource, row: &Row, now: Time) -> bool {
        eval::holds(&self.bind(source), row, now)
    }

    /// Why the rule does not hold for a row at a time; `None` if it holds.
    pub fn failure(&self, source: &dyn RuleSource, row: &Row, now: Time) -> Option<RuleFailure> {
        if self.holds(source, row, now) {
            return None;
        }
        let mut leaves = Vec::new();
        let scene = FailureScene { source, row, now, hidden: &self.hidden };
        scene.collect(&self.tree, &mut leaves);
        Some(RuleFailure { leaves })
    }
}

impl CheckedTree {
    pub(super) fn bind(&self, source: &dyn RuleSource) -> Guard {
        match self {
            CheckedTree::Leaf(leaf) => leaf.bind(source),
            CheckedTree::All(parts) => all(parts.iter().map(|part| part.bind(source))),
            CheckedTree::Any(parts) => any(parts.iter().map(|part| part.bind(source))),
        }
    }
}

impl CheckedLeaf {
    fn bind(&self, source: &dyn RuleSource) -> Guard {
        match &self.rule {
            Rule::Compare(left, comparison, right) => {
                match (left.bind(self.kind, source), right.bind(self.kind, source)) {
                    (Operand::Value(Value::Null), _) | (_, Operand::Value(Value::Null)) => Guard::never(),
                    (Operand::Value(left), Operand::Value(right)) => {
                        decided(left.compare(&right).is_some_and(|order| comparison.accepts(order)))
                    }
                    (left, right) => Guard::Compare(left, *comparison, right),
                }
            }
            Rule::Null(Term::Column(name)) => Guard::Null(name.clone()),
            Rule::NotNull(Term::Column(name)) => Guard::NotNull(name.clone()),
            Rule::Null(term) => decided(is_null(&term.given(source))),
            Rule::NotNull(term) => decided(!is_null(&term.given(source))),
            Rule::In(term, list) => self.bind_in(term, list, source),
            Rule::NotIn(term, list) => self.bind_not_in(term, list, source),
            // The check makes no such leaf.
            Rule::All(_) | Rule::Any(_) => Guard::never(),
        }
    }

    /// A null in the list is equal to nothing.
    fn bind_in(&self, term: &Term, list: &[Term], source: &dyn RuleSource) -> Guard {
        let mut values = self.values(list, source);
        values.retain(|value| !value.is_null());
        match term.bind(self.kind, source) {
            Operand::Column(_) if values.is_empty() => Guard::never(),
            Operand::Column(name) => {
                any(values.chunks(IN_VALUES_MAX).map(|part| Guard::In(name.clone(), part.to_vec())))
            }
            Operand::Value(value) => decided(values.contains(&value)),
            // The check admits no other terms.
            Operand::Coalesce(..) | Operand::Now { .. } => Guard::never(),
        }
    }

    /// A null in the list might be equal to anything, so the leaf does not hold.
    fn bind_not_in(&self, term: &Term, list: &[Term], source: &dyn RuleSource) -> Guard {
        let values = self.values(list, source);
        if values.iter().any(Value::is_null) {
            return Guard::never();
        }
        match term.bind(self.kind, source) {
            Operand::Column(name) if values.is_empty() => Guard::NotNull(name),
            Operand::Column(name) => {
                all(values.chunks(IN_VALUES_MAX).map(|part| Guard::NotIn(name.clone(), part.to_vec())))
            }
            Operand::Value(value) => decided(!value.is_null() && !values.contains(&value)),
            Operand::Coalesce(..) | Operand::Now { .. } => Guard::never(),
        }
    }

    /// The values of a list, each once. A term that is a list gives its items.
    fn values(&self, list: &[Term], source: &dyn RuleSource) -> Vec<Value> {
        let mut values = Vec::new();
        let mut add = |value: Value| {
            let value = read_as(value, self.kind);
            if !values.contains(&value) {
                values.push(value);
            }
        };
        for term in list {
            match term.given(source) {
                Value::Json(Json::Array(items)) => {
                    items.into_iter().for_each(|item| add(Value::Json(item)));
                }
                value => add(value),
            }
        }
        values
    }
}

fn is_null(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Json(Json::Null))
}

fn decided(holds: bool) -> Guard {
    if holds { Guard::always() } else { Guard::never() }
}

fn is_never(guard: &Guard) -> bool {
    matches!(guard, Guard::Any(parts) if parts.is_empty())
}

fn is_always(guard: &Guard) -> bool {
    matches!(guard, Guard::All(parts) if parts.is_empty())
}

/// All of these, without what holds always; never, if one never holds.
fn all(parts: impl Iterator<Item = Guard>) -> Guard {
    let mut kept = Vec::new();
    for part in parts {
        match part {
            never if is_never(&never) => return never,
            Guard::All(inner) => kept.extend(inner),
            other => kept.push(other),
        }
    }
    only(&mut kept).unwrap_or(Guard::All(kept))
}

/// Any of these, without what never holds; always, if one holds always.
fn any(parts: impl Iterator<Item = Guard>) -> Guard {
    let mut kept = Vec::new();
    for part in parts {
        match part {
            always if is_always(&always) => return always,
            Guard::Any(inner) => kept.extend(inner),
            other => kept.push(other),
        }
    }
    only(&mut kept).unwrap_or(Guard::Any(kept))
}

fn only(parts: &mut Vec<Guard>) -> Option<Guard> {
    if parts.len() == 1 { parts.pop() } else { None }
}

/// Why a rule does not hold. As text: `open_loans < 3 does not hold: open_loans is 5`.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleFailure {
    /// Of rules that must all hold, the first that does not; of alternatives, one leaf of each.
    pub leaves: Vec<FailedLeaf>,
}

/// A leaf that does not hold.
#[derive(Clone, Debug, PartialEq)]
pub struct FailedLeaf {
    /// The leaf as text.
    pub text: String,
    /// What its terms are now, without literals and hidden columns. A missing input or claim is null.
    pub values: Vec<(String, Value)>,
}

/// Values are cut after so many characters: they are there to be recognized.
const SHOWN_CHARACTERS_MAX: usize = 80;

impl fmt::Display for FailedLeaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} does not hold", self.text)?;
        for (index, (name, value)) in self.values.iter().enumerate() {
            let shown = value.to_string();
            let cut: String = shown.chars().take(SHOWN_CHARACTERS_MAX).collect();
            let rest = if cut.len() < shown.len() { "…" } else { "" };
            write!(f, "{}{name} is {cut}{rest}", if index == 0 { ": " } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Display for RuleFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.leaves.iter().map(FailedLeaf::to_string).collect();
        f.write_str(&texts.join("; "))
    }
}

/// A rule's failure being described.
struct FailureScene<'a> {
    source: &'a dyn RuleSource,
    row: &'a Row,
    now: Time,
    hidden: &'a [String],
}

impl FailureScene<'_> {
    /// Adds the leaves because of which a tree, which does not hold, does not hold.
    fn collect(&self, tree: &CheckedTree, leaves: &mut Vec<FailedLeaf>) {
        match tree {
            CheckedTree::Leaf(leaf) => leaves.push(self.describe(leaf)),
            CheckedTree::All(parts) => {
                let fails = |part: &&CheckedTree| !eval::holds(&part.bind(self.source), self.row, self.now);
                if let Some(failed) = parts.iter().find(fails) {
                    self.collect(failed, leaves);
                }
            }
            CheckedTree::Any(parts) if parts.is_empty() => {
                leaves.push(FailedLeaf { text: Rule::never().to_string(), values: Vec::new() });
            }
            CheckedTree::Any(parts) => parts.iter().for_each(|part| self.collect(part, leaves)),
        }
    }

    fn describe(&self, leaf: &CheckedLeaf) -> FailedLeaf {
        let mut values: Vec<(String, Value)> = Vec::new();
        leaf.rule.terms(&mut |term| {
            if let Some((name, value)) = self.current(term, leaf)
                && !values.iter().any(|(known, _)| *known == name)
            {
                values.push((name, value));
            }
        });
        FailedLeaf { text: leaf.rule.to_string(), values }
    }

    /// What a term is now; `None` if its text says it, or a caller may not know it.
    fn current(&self, term: &Term, leaf: &CheckedLeaf) -> Option<(String, Value)> {
        match term {
            Term::Value(_) => None,
            Term::Column(name) | Term::Coalesce(name, _) => {
                let is_shown = !self.hidden.contains(name);
                is_shown.then(|| (Term::Column(name.clone()).to_string(), self.column(name)))
            }
            Term::Now { plus_micros } => {
                Some((term.to_string(), Value::Time(eval::now_moved(self.now, *plus_micros))))
            }
            Term::Input(_) | Term::Claim(_) | Term::Key(_) | Term::Bind(_) => {
                let given = term.given(self.source);
                let is_whole = matches!(leaf.rule, Rule::Null(_) | Rule::NotNull(_));
                let is_list = matches!(given, Value::Json(Json::Array(_)));
                let value = if is_whole || is_list { given } else { read_as(given, leaf.kind) };
                Some((term.to_string(), value))
            }
        }
    }

    fn column(&self, name: &str) -> Value {
        if name == VERSION {
            return Value::Int(self.row.version());
        }
        self.row.get(name).cloned().unwrap_or(Value::Null)
    }
}
