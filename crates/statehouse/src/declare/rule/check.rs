//! The check of a rule against columns and inputs: every comparison gets one type, and every literal the form of that
//! type.

use std::fmt;
use std::ops::Range;

use statehouse_store::limits::{GUARD_LEAVES_MAX, IN_VALUES_MAX};
use statehouse_store::table::VERSION;
use statehouse_store::{BadValue, Table, Time, Type, Value};

use super::{Rule, Term};
use crate::blueprint::nearest;
use crate::blueprint::problem::BlueprintProblem;
use crate::declare::table::TableDef;
use crate::form::Property;

/// Offsets of the clock beyond a century are mistakes in a unit; a plan refuses them too.
const NOW_OFFSET_MAX_MICROS: u64 = 100 * 366 * 24 * 3600 * 1_000_000;

/// The columns that a rule may name.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleColumns {
    columns: Vec<RuleColumn>,
    /// The types of the key's parts, for [`Term::Key`].
    key: Vec<Type>,
}

#[derive(Clone, Debug, PartialEq)]
struct RuleColumn {
    name: String,
    kind: Type,
    is_visible: bool,
}

impl RuleColumns {
    /// All columns of a table and `version`, all visible.
    pub fn of(table: &Table) -> RuleColumns {
        let column = |name: &str, kind| RuleColumn { name: name.to_owned(), kind, is_visible: true };
        let declared = table.columns().iter().map(|declared| column(&declared.name, declared.kind));
        RuleColumns {
            columns: declared.chain([column(VERSION, Type::Int)]).collect(),
            key: table.key_columns().iter().map(|declared| declared.kind).collect(),
        }
    }

    /// These columns, all visible.
    pub fn named(columns: impl IntoIterator<Item = (String, Type)>) -> RuleColumns {
        let column = |(name, kind)| RuleColumn { name, kind, is_visible: true };
        RuleColumns { columns: columns.into_iter().map(column).collect(), key: Vec::new() }
    }

    /// Marks columns as hidden: messages to callers do not show what they hold.
    #[must_use]
    pub fn hide(mut self, names: &[impl AsRef<str>]) -> RuleColumns {
        for column in &mut self.columns {
            column.is_visible &= !names.iter().any(|name| name.as_ref() == column.name);
        }
        self
    }

    /// Only the visible columns: for rules that callers write. A hidden column is as unknown to them as one that is not
    /// there.
    #[must_use]
    pub fn visible(&self) -> RuleColumns {
        let columns = self.columns.iter().filter(|column| column.is_visible).cloned().collect();
        RuleColumns { columns, key: self.key.clone() }
    }

    fn kind_of(&self, name: &str) -> Option<Type> {
        self.columns.iter().find(|column| column.name == name).map(|column| column.kind)
    }

    fn names(&self) -> Vec<&str> {
        self.columns.iter().map(|column| column.name.as_str()).collect()
    }
}

impl From<&TableDef> for RuleColumns {
    fn from(def: &TableDef) -> RuleColumns {
        RuleColumns::of(def.table()).hide(def.hidden())
    }
}

/// What is wrong with a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct RuleError {
    /// Where, in bytes of the rule's text; `None` if the rule was not declared as text.
    pub span: Option<Range<usize>>,
    /// What is wrong.
    pub title: String,
    /// What to write instead.
    pub advice: Option<String>,
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title)?;
        self.advice.iter().try_for_each(|advice| write!(f, "; {advice}"))
    }
}

impl RuleError {
    pub(super) fn at(span: Range<usize>, title: impl Into<String>) -> RuleError {
        RuleError { span: Some(span), title: title.into(), advice: None }
    }

    pub(super) fn advise(self, advice: impl Into<String>) -> RuleError {
        RuleError { advice: Some(advice.into()), ..self }
    }

    /// The error as a problem of a blueprint. `value` is where the rule's text stands in the file, quotes included. The
    /// problem points into the text, or at all of it if the file writes the text with escapes.
    pub fn problem(&self, file: &str, value: Range<usize>, text: &str) -> BlueprintProblem {
        let offset = file.get(value.clone()).and_then(|written| written.find(text));
        let span = match (offset, &self.span) {
            (Some(offset), Some(span)) => value.start + offset + span.start..value.start + offset + span.end,
            _ => value,
        };
        let problem = BlueprintProblem::at(span, &self.title);
        match &self.advice {
            Some(advice) => problem.advice(advice),
            None => problem,
        }
    }
}

/// A rule whose names and types were checked; [`CheckedRule::bind`] makes guards of it.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedRule {
    rule: Rule,
    pub(super) tree: CheckedTree,
    /// Columns of the rule whose contents are not shown to callers.
    pub(super) hidden: Vec<String>,
}

/// The rule with the types of its leaves.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CheckedTree {
    Leaf(CheckedLeaf),
    All(Vec<CheckedTree>),
    Any(Vec<CheckedTree>),
}

/// A leaf, and the type of what it compares. A leaf that asks for null compares nothing; its type is not used.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CheckedLeaf {
    pub(super) rule: Rule,
    pub(super) kind: Type,
}

impl CheckedRule {
    /// The rule, its literals in the form of their types.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Whether the result depends on the engine's clock.
    pub fn reads_clock(&self) -> bool {
        self.rule.reads_clock()
    }
}

impl From<CheckedRule> for Rule {
    fn from(checked: CheckedRule) -> Rule {
        checked.rule
    }
}

impl Rule {
    /// Checks names, types and limits, and puts literals into the form of their types.
    pub fn checked(self, columns: &RuleColumns, inputs: &[Property]) -> Result<CheckedRule, RuleError> {
        let mut leaves = 0;
        self.leaves(&mut |_| leaves += 1);
        if leaves > GUARD_LEAVES_MAX {
            return Err(RuleError { span: None, title: too_many_leaves(), advice: None });
        }
        let tree = check_tree(self, &RuleScope { columns, inputs }).map_err(LeafError::unplaced)?;
        let rule = tree.rule();
        let is_hidden = |name: &&str| columns.columns.iter().any(|c| c.name == **name && !c.is_visible);
        let hidden = rule.columns().into_iter().filter(is_hidden).map(str::to_owned).collect();
        Ok(CheckedRule { rule, tree, hidden })
    }
}

pub(super) fn too_many_leaves() -> String {
    format!("the rule has more than {GUARD_LEAVES_MAX} comparisons")
}

impl CheckedTree {
    fn rule(&self) -> Rule {
        let rules = |parts: &[CheckedTree]| parts.iter().map(CheckedTree::rule).collect();
        match self {
            CheckedTree::Leaf(leaf) => leaf.rule.clone(),
            CheckedTree::All(parts) => Rule::All(rules(parts)),
            CheckedTree::Any(parts) => Rule::Any(rules(parts)),
        }
    }
}

fn check_tree(rule: Rule, scope: &RuleScope<'_>) -> Result<CheckedTree, LeafError> {
    let parts = |parts: Vec<Rule>| -> Result<Vec<CheckedTree>, LeafError> {
        parts.into_iter().map(|part| check_tree(part, scope)).collect()
    };
    match rule {
        Rule::All(list) => parts(list).map(CheckedTree::All),
        Rule::Any(list) => parts(list).map(CheckedTree::Any),
        leaf => check_leaf(leaf, scope).map(CheckedTree::Leaf),
    }
}

/// What the names of a rule can mean.
#[derive(Clone, Copy)]
pub(super) struct RuleScope<'a> {
    pub(super) columns: &'a RuleColumns,
    pub(super) inputs: &'a [Property],
}

/// What of a leaf is wrong: the term of that number, from the left, or all of it.
#[derive(Debug)]
pub(super) struct LeafError {
    pub(super) term: Option<usize>,
    error: RuleError,
}

impl LeafError {
    fn new(term: Option<usize>, title: impl Into<String>) -> LeafError {
        LeafError { term, error: RuleError { span: None, title: title.into(), advice: None } }
    }

    fn advise(self, advice: impl Into<String>) -> LeafError {
        LeafError { error: self.error.advise(advice), ..self }
    }

    fn unplaced(self) -> RuleError {
        self.error
    }

    pub(super) fn placed(self, span: Range<usize>) -> RuleError {
        RuleError { span: Some(span), ..self.error }
    }
}

/// Checks one leaf.
pub(super) fn check_leaf(rule: Rule, scope: &RuleScope<'_>) -> Result<CheckedLeaf, LeafError> {
    match rule {
        Rule::Compare(left, comparison, right) => {
            let mut terms = [left, right];
            let kind = unify(&mut terms, scope)?;
            let [left, right] = terms;
            Ok(CheckedLeaf { rule: Rule::Compare(left, comparison, right), kind })
        }
        Rule::Null(term) => {
            check_null(&term, scope)?;
            Ok(CheckedLeaf { rule: Rule::Null(term), kind: Type::Json })
        }
        Rule::NotNull(term) => {
            check_null(&term, scope)?;
            Ok(CheckedLeaf { rule: Rule::NotNull(term), kind: Type::Json })
        }
        Rule::In(term, list) => {
            let (term, list, kind) = check_list(term, list, scope)?;
            Ok(CheckedLeaf { rule: Rule::In(term, list), kind })
        }
        Rule::NotIn(term, list) => {
            let (term, list, kind) = check_list(term, list, scope)?;
            Ok(CheckedLeaf { rule: Rule::NotIn(term, list), kind })
        }
        // Callers take these apart.
        Rule::All(_) | Rule::Any(_) => Err(LeafError::new(None, "a list of rules is not a comparison")),
    }
}

fn check_null(term: &Term, scope: &RuleScope<'_>) -> Result<(), LeafError> {
    match term {
        Term::Column(name) => column_kind(name, scope, 0).map(drop),
        Term::Input(name) => property(name, scope, 0).map(drop),
        Term::Key(_) | Term::Claim(_) | Term::Bind(_) => Ok(()),
        Term::Value(_) | Term::Now { .. } | Term::Coalesce(..) => {
            let title = format!("`{term}` is never null");
            Err(LeafError::new(Some(0), title).advise("ask a column, an input or a claim"))
        }
    }
}

fn check_list(
    term: Term,
    list: Vec<Term>,
    scope: &RuleScope<'_>,
) -> Result<(Term, Vec<Term>, Type), LeafError> {
    if list.len() > IN_VALUES_MAX {
        let title = format!("the list has {} values; the limit is {IN_VALUES_MAX}", list.len());
        return Err(LeafError::new(None, title));
    }
    if matches!(term, Term::Now { .. } | Term::Coalesce(..)) {
        let title = format!("`{term}` cannot be looked for in a list");
        return Err(LeafError::new(Some(0), title).advise("compare it with each value"));
    }
    let varies = |item: &Term| matches!(item, Term::Column(_) | Term::Coalesce(..) | Term::Now { .. });
    let mut terms = vec![term];
    terms.extend(list);
    if let Some((index, item)) = terms.iter().enumerate().skip(1).find(|(_, item)| varies(item)) {
        if let Term::Column(name) = item {
            column_kind(name, scope, index)?;
        }
        let title = format!("`{item}` cannot be in a list");
        let advice = "a list has literals, inputs and claims; text is in single quotes";
        return Err(LeafError::new(Some(index), title).advise(advice));
    }
    let kind = unify(&mut terms, scope)?;
    let term = terms.remove(0);
    Ok((term, terms, kind))
}

/// How much a term says about the type of a comparison.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// It takes any type: a claim, a bound value.
    Open,
    /// A literal, which takes a form of the type it is compared with.
    Literal,
    /// An input; an integer widens to a float.
    Input,
    /// A column, a part of the key, the clock.
    Fixed,
}

/// The one type of the terms. Literals are put into its form.
fn unify(terms: &mut [Term], scope: &RuleScope<'_>) -> Result<Type, LeafError> {
    let mut own = Vec::with_capacity(terms.len());
    for (index, term) in terms.iter().enumerate() {
        own.push(own_kind(term, scope, index)?);
    }
    if own.iter().all(|(weight, _)| *weight == Weight::Literal) {
        let title = "compares constants with each other";
        return Err(LeafError::new(None, title).advise("name a column, an input or a claim"));
    }
    let mut anchor = (0, Weight::Open, Type::Text);
    for (index, (weight, kind)) in own.iter().enumerate() {
        if *weight > anchor.1 {
            anchor = (index, *weight, *kind);
        }
    }
    let (index, _, kind) = anchor;
    let name = match terms.get(index) {
        Some(Term::Coalesce(column, _)) => Term::Column(column.clone()).to_string(),
        Some(term) => term.to_string(),
        None => String::new(),
    };
    if !kind.is_ordered() {
        let title = format!("`{name}` is {kind}, which has no order");
        return Err(LeafError::new(Some(index), title).advise("only `is null` can be asked of it"));
    }
    for (index, (term, (weight, own))) in terms.iter_mut().zip(own).enumerate() {
        let widens = weight == Weight::Input && own == Type::Int && kind == Type::Float;
        if weight >= Weight::Input && own != kind && !widens {
            return Err(LeafError::new(Some(index), format!("`{term}` is {own}, but `{name}` is {kind}")));
        }
        convert(term, kind).map_err(|error| error.within(index, &name))?;
    }
    Ok(kind)
}

/// Why a literal has no form in a type.
enum LiteralError {
    Null,
    WrongType(Value, &'static str, Type),
    NotTime(Value),
    Unstorable(Value, BadValue),
}

impl LiteralError {
    fn within(self, index: usize, other: &str) -> LeafError {
        let fail = |title: String| LeafError::new(Some(index), title);
        match self {
            LiteralError::Null => null_compared(index),
            LiteralError::WrongType(value, got, kind) => {
                fail(format!("`{value}` is {got}, but `{other}` is {kind}"))
            }
            LiteralError::NotTime(text) => {
                fail(format!("{text} is not a time")).advise("write it as '2026-01-31T12:00:00Z'")
            }
            LiteralError::Unstorable(value, why) => fail(format!("`{value}`: {why}")),
        }
    }
}

fn null_compared(index: usize) -> LeafError {
    LeafError::new(Some(index), "null cannot be compared").advise("ask `is null` or `is not null`")
}

/// Puts the literal of a term into the form of a type.
fn convert(term: &mut Term, kind: Type) -> Result<(), LiteralError> {
    let (Term::Value(value) | Term::Coalesce(_, value)) = &*term else { return Ok(()) };
    let admitted = match (value, kind) {
        (Value::Null, _) => return Err(LiteralError::Null),
        (Value::Text(text), Type::Time) => match text.parse::<Time>() {
            Ok(time) => Value::Time(time),
            Err(_) => return Err(LiteralError::NotTime(value.clone())),
        },
        (value, kind) => match value.clone().admitted(kind) {
            Ok(admitted) => admitted,
            Err(BadValue::WrongType { got, .. }) => {
                return Err(LiteralError::WrongType(value.clone(), got, kind));
            }
            Err(why) => return Err(LiteralError::Unstorable(value.clone(), why)),
        },
    };
    if let Term::Value(value) | Term::Coalesce(_, value) = term {
        *value = admitted;
    }
    Ok(())
}

/// What a term says about the type of its comparison.
fn own_kind(term: &Term, scope: &RuleScope<'_>, index: usize) -> Result<(Weight, Type), LeafError> {
    let fail = |title: String| Err(LeafError::new(Some(index), title));
    match term {
        Term::Column(name) | Term::Coalesce(name, _) => Ok((Weight::Fixed, column_kind(name, scope, index)?)),
        Term::Now { plus_micros } if plus_micros.unsigned_abs() > NOW_OFFSET_MAX_MICROS => {
            fail(format!("`{term}` moves the clock by more than a century"))
        }
        Term::Now { .. } => Ok((Weight::Fixed, Type::Time)),
        Term::Key(part) => match scope.columns.key.get(*part) {
            Some(kind) => Ok((Weight::Fixed, *kind)),
            None => fail(format!("the key has {} parts, so there is no `{term}`", scope.columns.key.len())),
        },
        Term::Input(name) => match property(name, scope, index)?.form.kind() {
            Some(kind) => Ok((Weight::Input, kind)),
            None => fail(format!("`{term}` is not a single value, so it cannot be compared")),
        },
        Term::Value(value) => match value.kind() {
            Some(kind) => Ok((Weight::Literal, kind)),
            None => Err(null_compared(index)),
        },
        Term::Claim(_) | Term::Bind(_) => Ok((Weight::Open, Type::Text)),
    }
}

fn column_kind(name: &str, scope: &RuleScope<'_>, index: usize) -> Result<Type, LeafError> {
    scope.columns.kind_of(name).ok_or_else(|| {
        let title = format!("there is no column `{name}`");
        let input = scope.inputs.iter().any(|input| input.name == name);
        let advice = if input {
            format!("write `input.{name}` for the input; {}", known("columns", name, &scope.columns.names()))
        } else {
            known("columns", name, &scope.columns.names())
        };
        LeafError::new(Some(index), title).advise(advice)
    })
}

fn property<'a>(name: &str, scope: &RuleScope<'a>, index: usize) -> Result<&'a Property, LeafError> {
    scope.inputs.iter().find(|input| input.name == name).ok_or_else(|| {
        let names: Vec<&str> = scope.inputs.iter().map(|input| input.name.as_str()).collect();
        let title = format!("there is no input `{name}`");
        LeafError::new(Some(index), title).advise(known("inputs", name, &names))
    })
}

/// The names that could have been meant.
fn known(what: &str, word: &str, names: &[&str]) -> String {
    if names.is_empty() {
        return format!("there are no {what} here");
    }
    let all = format!("the {what} are {}", names.join(", "));
    match nearest(word, names.iter().copied()) {
        Some(near) => format!("did you mean `{near}`? {all}"),
        None => all,
    }
}
