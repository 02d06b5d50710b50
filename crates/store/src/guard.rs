//! Guards and assignments: expressions over one row, held as data.
//!
//! Because they are data they can be compiled to SQL or to a DynamoDB condition, evaluated in memory
//! ([`crate::eval`]), printed, and taken apart by the drills, which remove one conjunct at a time.
//!
//! **Null.** A comparison with null neither holds nor fails: it is unknown, and so is its negation. There is no
//! `Not` in the data: [`Guard::negated`] pushes a negation down to the leaves by Kleene's laws, where each
//! comparison has an exact opposite that is unknown in the same cases. What remains has only `All` and `Any`
//! above the leaves, and there "unknown" and "does not hold" lead to the same result. So an engine has to know
//! one rule only: *a leaf that touches null does not hold*, apart from the two that ask about null.

use std::cmp::Ordering;
use std::fmt;
use std::time::Duration;

use crate::table::VERSION;
use crate::value::Value;

/// What a comparison or an assignment can look at: the row itself, a constant, the engine's clock.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A column of the guarded row, `version` included.
    Column(String),
    /// A column of the guarded row, or a constant where it is null (or the row is absent).
    Coalesce(String, Value),
    /// A constant.
    Value(Value),
    /// The engine's clock, moved by a number of microseconds. One reading serves the whole plan.
    Now {
        /// Added to the reading; may be negative.
        plus_micros: i64,
    },
}

/// How two operands are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Equal.
    Eq,
    /// Different.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

impl Comparison {
    /// Every comparison.
    pub const ALL: [Comparison; 6] =
        [Comparison::Eq, Comparison::Ne, Comparison::Lt, Comparison::Le, Comparison::Gt, Comparison::Ge];

    /// The comparison that holds exactly where this one fails, and is unknown where this one is.
    pub fn opposite(self) -> Comparison {
        match self {
            Comparison::Eq => Comparison::Ne,
            Comparison::Ne => Comparison::Eq,
            Comparison::Lt => Comparison::Ge,
            Comparison::Le => Comparison::Gt,
            Comparison::Gt => Comparison::Le,
            Comparison::Ge => Comparison::Lt,
        }
    }

    /// Whether it holds for operands in this order.
    pub fn accepts(self, order: Ordering) -> bool {
        match self {
            Comparison::Eq => order.is_eq(),
            Comparison::Ne => order.is_ne(),
            Comparison::Lt => order.is_lt(),
            Comparison::Le => order.is_le(),
            Comparison::Gt => order.is_gt(),
            Comparison::Ge => order.is_ge(),
        }
    }

    /// As SQL and DynamoDB write it.
    pub fn symbol(self) -> &'static str {
        match self {
            Comparison::Eq => "=",
            Comparison::Ne => "<>",
            Comparison::Lt => "<",
            Comparison::Le => "<=",
            Comparison::Gt => ">",
            Comparison::Ge => ">=",
        }
    }
}

/// A condition on one row.
#[derive(Clone, Debug, PartialEq)]
pub enum Guard {
    /// A comparison of two operands of one ordered type.
    Compare(Operand, Comparison, Operand),
    /// The column is null.
    Null(String),
    /// The column is not null.
    NotNull(String),
    /// The column is one of these constants.
    In(String, Vec<Value>),
    /// The column is set and is none of these constants.
    NotIn(String, Vec<Value>),
    /// All of these hold; an empty list holds always.
    All(Vec<Guard>),
    /// At least one of these holds; an empty list never does.
    Any(Vec<Guard>),
}

impl Guard {
    /// Holds always.
    pub fn always() -> Guard {
        Guard::All(Vec::new())
    }

    /// Never holds.
    pub fn never() -> Guard {
        Guard::Any(Vec::new())
    }

    /// The row is at this version.
    pub fn version(expected: i64) -> Guard {
        column(VERSION).eq(expected)
    }

    /// Both hold.
    #[must_use]
    pub fn and(self, other: Guard) -> Guard {
        match (self, other) {
            (Guard::All(mut left), Guard::All(right)) => {
                left.extend(right);
                Guard::All(left)
            }
            (Guard::All(mut left), right) => {
                left.push(right);
                Guard::All(left)
            }
            (left, Guard::All(mut right)) => {
                right.insert(0, left);
                Guard::All(right)
            }
            (left, right) => Guard::All(vec![left, right]),
        }
    }

    /// At least one holds.
    #[must_use]
    pub fn or(self, other: Guard) -> Guard {
        match (self, other) {
            (Guard::Any(mut left), Guard::Any(right)) => {
                left.extend(right);
                Guard::Any(left)
            }
            (Guard::Any(mut left), right) => {
                left.push(right);
                Guard::Any(left)
            }
            (left, Guard::Any(mut right)) => {
                right.insert(0, left);
                Guard::Any(right)
            }
            (left, right) => Guard::Any(vec![left, right]),
        }
    }

    /// Holds where this fails, and is unknown where this is unknown.
    #[must_use]
    pub fn negated(self) -> Guard {
        match self {
            Guard::Compare(left, comparison, right) => Guard::Compare(left, comparison.opposite(), right),
            Guard::Null(column) => Guard::NotNull(column),
            Guard::NotNull(column) => Guard::Null(column),
            Guard::In(column, values) => Guard::NotIn(column, values),
            Guard::NotIn(column, values) => Guard::In(column, values),
            Guard::All(parts) => Guard::Any(parts.into_iter().map(Guard::negated).collect()),
            Guard::Any(parts) => Guard::All(parts.into_iter().map(Guard::negated).collect()),
        }
    }

    /// The conditions that must all hold, each on its own: what a refusal names and a drill removes.
    pub fn conjuncts(&self) -> &[Guard] {
        match self {
            Guard::All(parts) => parts,
            one => std::slice::from_ref(one),
        }
    }

    /// Visits every leaf.
    pub fn leaves<'a>(&'a self, visit: &mut dyn FnMut(&'a Guard)) {
        match self {
            Guard::All(parts) | Guard::Any(parts) => parts.iter().for_each(|part| part.leaves(visit)),
            leaf => visit(leaf),
        }
    }
}

/// What an assignment stores.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// The operand as it is.
    Is(Operand),
    /// A sum: two ints, two floats, or a time and an int of microseconds. Null if either is null.
    Add(Operand, Operand),
    /// A difference: two ints, two floats, or a time less an int of microseconds. Null if either is null.
    Subtract(Operand, Operand),
}

impl Expr {
    /// The operands, one or two.
    pub fn operands(&self) -> impl Iterator<Item = &Operand> {
        let (first, second) = match self {
            Expr::Is(operand) => (operand, None),
            Expr::Add(left, right) | Expr::Subtract(left, right) => (left, Some(right)),
        };
        std::iter::once(first).chain(second)
    }

    /// The constant, if the expression is nothing but one.
    pub fn as_constant(&self) -> Option<&Value> {
        if let Expr::Is(Operand::Value(value)) = self { Some(value) } else { None }
    }
}

/// A column of the row.
pub fn column(name: &str) -> Operand {
    Operand::Column(name.to_owned())
}

/// A constant.
pub fn value(value: impl Into<Value>) -> Operand {
    Operand::Value(value.into())
}

/// The engine's clock.
pub fn now() -> Operand {
    Operand::Now { plus_micros: 0 }
}

/// The engine's clock, moved forward.
pub fn now_plus(span: Duration) -> Operand {
    Operand::Now { plus_micros: i64::try_from(span.as_micros()).unwrap_or(i64::MAX) }
}

/// The engine's clock, moved backward.
pub fn now_minus(span: Duration) -> Operand {
    Operand::Now { plus_micros: i64::try_from(span.as_micros()).map_or(i64::MIN, |micros| -micros) }
}

#[expect(
    clippy::should_implement_trait,
    reason = "these build conditions; they do not compare or add operands"
)]
impl Operand {
    /// A comparison as a guard.
    pub fn compare(self, comparison: Comparison, other: impl Into<Operand>) -> Guard {
        Guard::Compare(self, comparison, other.into())
    }
    /// `self = other`.
    pub fn eq(self, other: impl Into<Operand>) -> Guard {
        self.compare(Comparison::Eq, other)
    }
    /// `self <> other`.
    pub fn ne(self, other: impl Into<Operand>) -> Guard {
        self.compare(Comparison::Ne, other)
    }
    /// `self < other`.
    pub fn lt(self, other: impl Into<Operand>) -> Guard {
        self.compare(Comparison::Lt, other)
    }
    /// `self <= other`.
    pub fn le(self, other: impl Into<Operand>) -> Guard {
        self.compare(Comparison::Le, other)
    }
    /// `self > other`.
    pub fn gt(self, other: impl Into<Operand>) -> Guard {
        self.compare(Comparison::Gt, other)
    }
    /// `self >= other`.
    pub fn ge(self, other: impl Into<Operand>) -> Guard {
        self.compare(Comparison::Ge, other)
    }
    /// `self + other`.
    pub fn add(self, other: impl Into<Operand>) -> Expr {
        Expr::Add(self, other.into())
    }
    /// `self - other`.
    pub fn subtract(self, other: impl Into<Operand>) -> Expr {
        Expr::Subtract(self, other.into())
    }
}

/// The column is null.
pub fn is_null(column: &str) -> Guard {
    Guard::Null(column.to_owned())
}

/// The column is not null.
pub fn is_set(column: &str) -> Guard {
    Guard::NotNull(column.to_owned())
}

/// The column is one of these.
pub fn is_in<V: Into<Value>>(column: &str, values: impl IntoIterator<Item = V>) -> Guard {
    Guard::In(column.to_owned(), values.into_iter().map(Into::into).collect())
}

impl<V: Into<Value>> From<V> for Operand {
    fn from(value: V) -> Operand {
        Operand::Value(value.into())
    }
}

impl From<Operand> for Expr {
    fn from(operand: Operand) -> Expr {
        Expr::Is(operand)
    }
}

impl<V: Into<Value>> From<V> for Expr {
    fn from(value: V) -> Expr {
        Expr::Is(Operand::Value(value.into()))
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operand::Column(name) => f.write_str(name),
            Operand::Coalesce(name, default) => write!(f, "coalesce({name}, {default})"),
            Operand::Value(value) => write!(f, "{value}"),
            Operand::Now { plus_micros } => write_now(f, *plus_micros),
        }
    }
}

fn write_now(f: &mut fmt::Formatter<'_>, plus_micros: i64) -> fmt::Result {
    f.write_str("now")?;
    let sign = match plus_micros.cmp(&0) {
        Ordering::Equal => return Ok(()),
        Ordering::Greater => '+',
        Ordering::Less => '-',
    };
    let micros = plus_micros.unsigned_abs();
    if micros.is_multiple_of(1_000_000) {
        write!(f, " {sign} {}s", micros / 1_000_000)
    } else {
        write!(f, " {sign} {micros}µs")
    }
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, parts: &[Guard], word: &str| {
            for (index, part) in parts.iter().enumerate() {
                if index > 0 {
                    write!(f, " {word} ")?;
                }
                match part {
                    Guard::All(inner) | Guard::Any(inner) if inner.len() > 1 => write!(f, "({part})")?,
                    _ => write!(f, "{part}")?,
                }
            }
            Ok(())
        };
        let values = |f: &mut fmt::Formatter<'_>, values: &[Value]| {
            let texts: Vec<String> = values.iter().map(Value::to_string).collect();
            write!(f, "({})", texts.join(", "))
        };
        match self {
            Guard::Compare(left, comparison, right) => write!(f, "{left} {} {right}", comparison.symbol()),
            Guard::Null(column) => write!(f, "{column} is null"),
            Guard::NotNull(column) => write!(f, "{column} is not null"),
            Guard::In(column, list) => {
                write!(f, "{column} in ")?;
                values(f, list)
            }
            Guard::NotIn(column, list) => {
                write!(f, "{column} not in ")?;
                values(f, list)
            }
            Guard::All(parts) if parts.is_empty() => f.write_str("true"),
            Guard::Any(parts) if parts.is_empty() => f.write_str("false"),
            Guard::All(parts) => list(f, parts, "and"),
            Guard::Any(parts) => list(f, parts, "or"),
        }
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expr::Is(operand) => write!(f, "{operand}"),
            Expr::Add(left, right) => write!(f, "{left} + {right}"),
            Expr::Subtract(left, right) => write!(f, "{left} - {right}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_read_like_sql() {
        let guard = column("status")
            .eq("AVAILABLE")
            .or(column("status").eq("HELD").and(column("hold_expires_at").le(now())))
            .and(Guard::version(7));
        assert_eq!(
            guard.to_string(),
            "(status = 'AVAILABLE' or (status = 'HELD' and hold_expires_at <= now)) and version = 7"
        );
        assert_eq!(
            now_plus(Duration::from_secs(600)).to_string(),
            "now + 600s",
            "offsets are printed in seconds where they are whole"
        );
        assert_eq!(Guard::always().to_string(), "true");
        assert_eq!(Guard::always().negated().to_string(), "false");
    }

    #[test]
    fn conjuncts_are_the_parts_that_must_all_hold() {
        let guard = Guard::version(1).and(is_null("a")).and(is_set("b").or(is_null("c")));
        assert_eq!(guard.conjuncts().len(), 3);
        assert_eq!(is_null("a").conjuncts().len(), 1);
        assert_eq!(Guard::always().conjuncts().len(), 0);
    }
}
