//! Rules: conditions on one row that also name what a call brings with it.
//!
//! A [`Guard`](statehouse_store::Guard) compares a row with constants and the engine's clock. A [`Rule`] is the
//! template of a guard: it may name inputs of the call, claims of the caller, parts of the row's key and values that the
//! library computes. A rule is written once and then goes three steps:
//!
//! 1. **Declared**, as text ([`Rule::parse`]) or with the functions of this module ([`col`], [`input`], …).
//! 2. **Checked** against columns and inputs: [`Rule::checked`] makes a [`CheckedRule`], in which every comparison has one
//!    type. Text is checked while it is parsed, so that a [`RuleError`] has the place in the text.
//! 3. **Bound** to the values of one call: [`CheckedRule::bind`] makes the guard. [`CheckedRule::holds`] evaluates that guard
//!    in memory with the store's own evaluation, so a rule has one meaning.
//!
//! ```
//! use statehouse::declare::rule::{Rule, RuleColumns, col, input, is_null, now};
//! use statehouse::form::{Form, Property};
//! use statehouse_store::{Table, Type};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let lots = Table::named("lots").partition("id", Type::Int).optional("best", Type::Int);
//! let lots = lots.required("ends_at", Type::Time).build()?;
//! let columns = RuleColumns::of(&lots);
//! let inputs = [Property::required("amount", Form::Value(Type::Int), "the bid")];
//! let text = "(best is null or best < input.amount) and ends_at > now";
//! let built = is_null("best").or(col("best").lt(input("amount"))).and(col("ends_at").gt(now()));
//! assert_eq!(Rule::parse(text, &columns, &inputs)?, built.checked(&columns, &inputs)?);
//! # Ok(())
//! # }
//! ```
//!
//! # Text
//!
//! ```text
//! rule     = and-rule { "or" and-rule }
//! and-rule = not-rule { "and" not-rule }
//! not-rule = "not" not-rule | "(" rule ")" | "true" | "false" | leaf
//! leaf     = term ( "=" | "<>" | "<" | "<=" | ">" | ">=" ) term
//!          | term "is" [ "not" ] "null"
//!          | term [ "not" ] "in" "(" term { "," term } ")"
//! term     = [ "row" "." ] column | "coalesce" "(" column "," literal ")" | literal
//!          | "now" [ ( "+" | "-" ) duration ] | "input" "." name | ( "claim" | "claims" ) "." name
//! literal  = 3 | -1.5 | 'text, with '' for a quote' | true | false
//! duration = 250ms | 10m | 1h30m
//! ```
//!
//! A time is written as text in RFC 3339 and compared with a time. A column or a name that is also a word of the grammar,
//! or that has other characters than letters, digits and `_`, is put into double quotes. The words of the grammar may be
//! written in capitals.
//!
//! # Null
//!
//! A missing input or claim binds to null, and so does one that is not of the type it is compared with. A claim that is
//! text and is compared with an integer is read as one: `sub` of a token is always text. A leaf that
//! touches null is unknown: it does not hold, and neither does its negation. `is null` and `is not null` are the two
//! exceptions. There is no `not` in the data: [`Rule::negated`] replaces each leaf by its opposite, which is unknown in
//! the same cases. Negating the guard after binding would be wrong: a leaf that binds to "never" would become "always".
//!
//! The functions here have the same names as those of [`statehouse_store::guard`] where they mean the same. Those
//! make operands and guards of a plan, these make terms and rules of a declaration; a module imports one of the two.

mod bind;
mod check;
mod parse;
#[cfg(test)]
mod properties;
mod substitute;
#[cfg(test)]
mod tests;
mod text;
mod token;

use std::time::Duration;

use statehouse_store::Value;
use statehouse_store::guard::Comparison;

pub use bind::{FailedLeaf, RuleFailure, RuleSource, RuleValues};
pub use check::{CheckedRule, RuleColumns, RuleError};
pub use substitute::KnownColumns;

/// What a rule can compare.
#[derive(Clone, Debug, PartialEq)]
pub enum Term {
    /// A column of the row, `version` included.
    Column(String),
    /// A column of the row, or a constant where the column is null.
    Coalesce(String, Value),
    /// A constant.
    Value(Value),
    /// The engine's clock, moved by a number of microseconds.
    Now {
        /// Added to the reading; may be negative.
        plus_micros: i64,
    },
    /// An input of the call.
    Input(String),
    /// A claim of the caller's credential. In the list of an `in` it may be a list itself.
    Claim(String),
    /// A part of the row's key, counted from 0. Only in Rust.
    Key(usize),
    /// A value that the library gives when it binds the rule. Only in Rust.
    Bind(String),
}

/// A condition on one row, as it was declared.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// A comparison of two terms of one type.
    Compare(Term, Comparison, Term),
    /// The column, input, claim or bound value is null.
    Null(Term),
    /// The column, input, claim or bound value is not null.
    NotNull(Term),
    /// The first is one of the others.
    In(Term, Vec<Term>),
    /// The first is not null and is none of the others.
    NotIn(Term, Vec<Term>),
    /// All of these hold; an empty list holds always.
    All(Vec<Rule>),
    /// At least one of these holds; an empty list never does.
    Any(Vec<Rule>),
}

impl Rule {
    /// Holds always.
    pub fn always() -> Rule {
        Rule::All(Vec::new())
    }

    /// Never holds.
    pub fn never() -> Rule {
        Rule::Any(Vec::new())
    }

    /// Both hold.
    #[must_use]
    pub fn and(self, other: Rule) -> Rule {
        let mut parts = self.into_conjuncts();
        parts.extend(other.into_conjuncts());
        single(parts).unwrap_or_else(Rule::All)
    }

    /// At least one holds.
    #[must_use]
    pub fn or(self, other: Rule) -> Rule {
        let mut parts = self.into_alternatives();
        parts.extend(other.into_alternatives());
        single(parts).unwrap_or_else(Rule::Any)
    }

    /// Holds where this fails, and is unknown where this is unknown.
    #[must_use]
    pub fn negated(self) -> Rule {
        match self {
            Rule::Compare(left, comparison, right) => Rule::Compare(left, comparison.opposite(), right),
            Rule::Null(term) => Rule::NotNull(term),
            Rule::NotNull(term) => Rule::Null(term),
            Rule::In(term, list) => Rule::NotIn(term, list),
            Rule::NotIn(term, list) => Rule::In(term, list),
            Rule::All(parts) => Rule::Any(parts.into_iter().map(Rule::negated).collect()),
            Rule::Any(parts) => Rule::All(parts.into_iter().map(Rule::negated).collect()),
        }
    }

    /// The rules that must all hold.
    pub fn into_conjuncts(self) -> Vec<Rule> {
        if let Rule::All(parts) = self { parts } else { vec![self] }
    }

    fn into_alternatives(self) -> Vec<Rule> {
        if let Rule::Any(parts) = self { parts } else { vec![self] }
    }

    /// Visits every leaf, in the order of the text.
    pub fn leaves<'a>(&'a self, visit: &mut dyn FnMut(&'a Rule)) {
        match self {
            Rule::All(parts) | Rule::Any(parts) => parts.iter().for_each(|part| part.leaves(visit)),
            leaf => visit(leaf),
        }
    }

    /// Visits every term, in the order of the text.
    pub fn terms<'a>(&'a self, visit: &mut dyn FnMut(&'a Term)) {
        self.leaves(&mut |leaf| match leaf {
            Rule::Compare(left, _, right) => [left, right].into_iter().for_each(&mut *visit),
            Rule::Null(term) | Rule::NotNull(term) => visit(term),
            Rule::In(term, list) | Rule::NotIn(term, list) => {
                std::iter::once(term).chain(list).for_each(&mut *visit);
            }
            // These are not leaves.
            Rule::All(_) | Rule::Any(_) => {}
        });
    }

    /// Whether the result depends on the engine's clock.
    pub fn reads_clock(&self) -> bool {
        let mut found = false;
        self.terms(&mut |term| found |= matches!(term, Term::Now { .. }));
        found
    }

    /// The columns that it names, each once. If there are none and the clock is not read, the rule binds to
    /// [`Guard::always`](statehouse_store::Guard::always) or [`Guard::never`](statehouse_store::Guard::never).
    pub fn columns(&self) -> Vec<&str> {
        let mut found = Vec::new();
        self.terms(&mut |term| {
            if let Term::Column(name) | Term::Coalesce(name, _) = term
                && !found.contains(&name.as_str())
            {
                found.push(name.as_str());
            }
        });
        found
    }
}

/// The only part of a list, or the list.
fn single(mut parts: Vec<Rule>) -> Result<Rule, Vec<Rule>> {
    match parts.pop() {
        Some(only) if parts.is_empty() => Ok(only),
        Some(last) => {
            parts.push(last);
            Err(parts)
        }
        None => Err(parts),
    }
}

/// A column of the row.
pub fn col(name: &str) -> Term {
    Term::Column(name.to_owned())
}

/// A column of the row, or a constant where the column is null.
pub fn coalesce(column: &str, default: impl Into<Value>) -> Term {
    Term::Coalesce(column.to_owned(), default.into())
}

/// An input of the call.
pub fn input(name: &str) -> Term {
    Term::Input(name.to_owned())
}

/// A claim of the caller's credential.
pub fn claim(name: &str) -> Term {
    Term::Claim(name.to_owned())
}

/// A part of the row's key, counted from 0.
pub fn key(index: usize) -> Term {
    Term::Key(index)
}

/// A value that the library gives when it binds the rule.
pub fn bind(name: &str) -> Term {
    Term::Bind(name.to_owned())
}

/// The engine's clock.
pub fn now() -> Term {
    Term::Now { plus_micros: 0 }
}

/// The engine's clock, moved forward.
pub fn now_plus(span: Duration) -> Term {
    Term::Now { plus_micros: i64::try_from(span.as_micros()).unwrap_or(i64::MAX) }
}

/// The engine's clock, moved backward.
pub fn now_minus(span: Duration) -> Term {
    Term::Now { plus_micros: i64::try_from(span.as_micros()).map_or(i64::MIN, |micros| -micros) }
}

/// The column is null.
pub fn is_null(column: &str) -> Rule {
    col(column).is_null()
}

/// The column is not null.
pub fn is_not_null(column: &str) -> Rule {
    col(column).is_not_null()
}

impl Term {
    /// A comparison as a rule.
    pub fn compare(self, comparison: Comparison, other: impl Into<Term>) -> Rule {
        Rule::Compare(self, comparison, other.into())
    }
    /// `self = other`.
    pub fn eq(self, other: impl Into<Term>) -> Rule {
        self.compare(Comparison::Eq, other)
    }
    /// `self <> other`.
    pub fn ne(self, other: impl Into<Term>) -> Rule {
        self.compare(Comparison::Ne, other)
    }
    /// `self < other`.
    pub fn lt(self, other: impl Into<Term>) -> Rule {
        self.compare(Comparison::Lt, other)
    }
    /// `self <= other`.
    pub fn le(self, other: impl Into<Term>) -> Rule {
        self.compare(Comparison::Le, other)
    }
    /// `self > other`.
    pub fn gt(self, other: impl Into<Term>) -> Rule {
        self.compare(Comparison::Gt, other)
    }
    /// `self >= other`.
    pub fn ge(self, other: impl Into<Term>) -> Rule {
        self.compare(Comparison::Ge, other)
    }
    /// `self is null`.
    pub fn is_null(self) -> Rule {
        Rule::Null(self)
    }
    /// `self is not null`.
    pub fn is_not_null(self) -> Rule {
        Rule::NotNull(self)
    }
    /// `self in (…)`.
    pub fn is_in<T: Into<Term>>(self, list: impl IntoIterator<Item = T>) -> Rule {
        Rule::In(self, list.into_iter().map(Into::into).collect())
    }
    /// `self not in (…)`.
    pub fn is_not_in<T: Into<Term>>(self, list: impl IntoIterator<Item = T>) -> Rule {
        Rule::NotIn(self, list.into_iter().map(Into::into).collect())
    }
}

impl<V: Into<Value>> From<V> for Term {
    fn from(value: V) -> Term {
        Term::Value(value.into())
    }
}
