//! Rules as text: what [`Rule::parse`](super::Rule::parse) reads back.

use std::fmt;

use super::{CheckedRule, Rule, Term, token};

/// Writes a name as the parser reads it: in double quotes unless it is a plain word.
struct QuotedName<'a> {
    name: &'a str,
    is_plain: bool,
}

/// A column's name; a word of the grammar is quoted.
fn column(name: &str) -> QuotedName<'_> {
    QuotedName { name, is_plain: token::is_word(name) && !token::is_reserved(name) }
}

/// A name behind `input.` or `claim.`, where no word has another meaning.
fn member(name: &str) -> QuotedName<'_> {
    QuotedName { name, is_plain: token::is_word(name) }
}

impl fmt::Display for QuotedName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_plain {
            f.write_str(self.name)
        } else {
            write!(f, "\"{}\"", self.name.replace('"', "\"\""))
        }
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Term::Column(name) => write!(f, "{}", column(name)),
            Term::Coalesce(name, default) => write!(f, "coalesce({}, {default})", column(name)),
            Term::Value(value) => write!(f, "{value}"),
            Term::Now { plus_micros } => write_now(f, *plus_micros),
            Term::Input(name) => write!(f, "input.{}", member(name)),
            Term::Claim(name) => write!(f, "claim.{}", member(name)),
            Term::Key(place) => write!(f, "key[{place}]"),
            Term::Bind(name) => write!(f, "bind.{}", member(name)),
        }
    }
}

/// Units of a duration, the largest first, in microseconds.
const UNITS: [(u64, &str); 5] =
    [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1_000, "ms")];

/// The clock and its offset, in the largest unit that is exact.
fn write_now(f: &mut fmt::Formatter<'_>, plus_micros: i64) -> fmt::Result {
    f.write_str("now")?;
    if plus_micros == 0 {
        return Ok(());
    }
    let sign = if plus_micros > 0 { '+' } else { '-' };
    let micros = plus_micros.unsigned_abs();
    let exact = UNITS.into_iter().find(|(unit, _)| micros.is_multiple_of(*unit));
    let (unit, suffix) = exact.unwrap_or((1, token::MICROSECONDS));
    write!(f, " {sign} {}{suffix}", micros / unit)
}

fn write_list(f: &mut fmt::Formatter<'_>, list: &[Term]) -> fmt::Result {
    let texts: Vec<String> = list.iter().map(Term::to_string).collect();
    write!(f, "({})", texts.join(", "))
}

fn write_parts(f: &mut fmt::Formatter<'_>, parts: &[Rule], word: &str) -> fmt::Result {
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            write!(f, " {word} ")?;
        }
        match part {
            Rule::All(inner) | Rule::Any(inner) if inner.len() > 1 => write!(f, "({part})")?,
            _ => write!(f, "{part}")?,
        }
    }
    Ok(())
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::Compare(left, comparison, right) => write!(f, "{left} {} {right}", comparison.symbol()),
            Rule::Null(term) => write!(f, "{term} is null"),
            Rule::NotNull(term) => write!(f, "{term} is not null"),
            Rule::In(term, list) => {
                write!(f, "{term} in ")?;
                write_list(f, list)
            }
            Rule::NotIn(term, list) => {
                write!(f, "{term} not in ")?;
                write_list(f, list)
            }
            Rule::All(parts) if parts.is_empty() => f.write_str("true"),
            Rule::Any(parts) if parts.is_empty() => f.write_str("false"),
            Rule::All(parts) => write_parts(f, parts, "and"),
            Rule::Any(parts) => write_parts(f, parts, "or"),
        }
    }
}

impl fmt::Display for CheckedRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.rule())
    }
}
