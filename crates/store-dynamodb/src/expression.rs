//! Guards as DynamoDB condition expressions.
//!
//! The waist's one rule about null is DynamoDB's own: a comparison with a missing attribute does not hold. The
//! exceptions are `<>`, `NOT … IN`, which do hold there and get an `attribute_exists` beside them, and comparisons of
//! booleans by order, which DynamoDB does not know and which are written as equalities.
//!
//! Conditions are put together as a tree and printed once, because DynamoDB refuses redundant parentheses. Every name
//! goes through a placeholder, so that no column can collide with a reserved word. What does not fit into DynamoDB's
//! limits (4 KB of text, 300 operators) is not compiled; the caller reads the row and decides in memory instead.

use std::collections::{BTreeMap, HashMap, HashSet};

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::guard::Comparison;
use statehouse_store::table::VERSION;
use statehouse_store::{Guard, Operand, Table, Time, Type, Value, eval};

use crate::item::{self, PK};

/// Bytes of one expression that DynamoDB takes.
const EXPRESSION_BYTES_MAX: usize = 4_096;
/// Operators of one expression that DynamoDB takes, less a few for what is added around a guard.
const OPERATORS_MAX: usize = 280;

/// The names and values that expressions refer to.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Terms {
    names: BTreeMap<String, String>,
    values: Vec<(String, AttributeValue)>,
}

impl Terms {
    /// The placeholder of an attribute's name.
    pub(crate) fn name(&mut self, attribute: &str) -> String {
        let placeholder = format!("#{attribute}");
        self.names.insert(placeholder.clone(), attribute.to_owned());
        placeholder
    }

    /// The placeholder of a value.
    pub(crate) fn value(&mut self, value: AttributeValue) -> String {
        if let Some((placeholder, _)) = self.values.iter().find(|(_, known)| *known == value) {
            return placeholder.clone();
        }
        let placeholder = format!(":v{}", self.values.len());
        self.values.push((placeholder.clone(), value));
        placeholder
    }

    /// Drops what none of these expressions refers to: DynamoDB refuses a term that is not used.
    pub(crate) fn keep_used(&mut self, expressions: &[&str]) {
        let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '#' | ':');
        let used: HashSet<&str> =
            expressions.iter().flat_map(|text| text.split(|c: char| !in_word(c))).collect();
        self.names.retain(|placeholder, _| used.contains(placeholder.as_str()));
        self.values.retain(|(placeholder, _)| used.contains(placeholder.as_str()));
    }

    /// The names as a request takes them; `None` if there are none.
    pub(crate) fn names(&self) -> Option<HashMap<String, String>> {
        (!self.names.is_empty()).then(|| self.names.clone().into_iter().collect())
    }

    /// The values as a request takes them; `None` if there are none.
    pub(crate) fn values(&self) -> Option<HashMap<String, AttributeValue>> {
        (!self.values.is_empty()).then(|| self.values.iter().cloned().collect())
    }
}

/// A condition.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Condition {
    Leaf(String),
    All(Vec<Condition>),
    Any(Vec<Condition>),
}

impl Condition {
    /// Both hold.
    #[must_use]
    pub(crate) fn and(self, other: Condition) -> Condition {
        Condition::All(vec![self, other])
    }

    /// At least one holds.
    #[must_use]
    pub(crate) fn or(self, other: Condition) -> Condition {
        Condition::Any(vec![self, other])
    }

    /// The attribute is there.
    pub(crate) fn exists(terms: &mut Terms, attribute: &str) -> Condition {
        Condition::Leaf(format!("attribute_exists({})", terms.name(attribute)))
    }

    /// The attribute is not there.
    pub(crate) fn missing(terms: &mut Terms, attribute: &str) -> Condition {
        Condition::Leaf(format!("attribute_not_exists({})", terms.name(attribute)))
    }

    /// The attribute compares so with a value.
    pub(crate) fn compare(
        terms: &mut Terms,
        attribute: &str,
        symbol: &str,
        value: AttributeValue,
    ) -> Condition {
        Condition::Leaf(format!("{} {symbol} {}", terms.name(attribute), terms.value(value)))
    }

    /// Merges nested lists of one kind and takes away lists of one.
    fn flattened(self) -> Condition {
        let flatten = |parts: Vec<Condition>, all: bool| {
            let mut list = Vec::new();
            for part in parts.into_iter().map(Condition::flattened) {
                match part {
                    Condition::All(inner) if all => list.extend(inner),
                    Condition::Any(inner) if !all => list.extend(inner),
                    other => list.push(other),
                }
            }
            list
        };
        let rebuilt = match self {
            Condition::Leaf(_) => return self,
            Condition::All(parts) => Condition::All(flatten(parts, true)),
            Condition::Any(parts) => Condition::Any(flatten(parts, false)),
        };
        match rebuilt {
            Condition::All(mut parts) | Condition::Any(mut parts) if parts.len() == 1 => parts.remove(0),
            other => other,
        }
    }

    fn operators(&self) -> usize {
        match self {
            Condition::Leaf(text) => 2 + text.matches(',').count(),
            Condition::All(parts) | Condition::Any(parts) => {
                parts.len() + parts.iter().map(Condition::operators).sum::<usize>()
            }
        }
    }

    /// The expression; `None` for one that holds always. The second result says whether DynamoDB takes it.
    pub(crate) fn print(self, terms: &mut Terms) -> (Option<String>, bool) {
        let condition = self.flattened();
        if condition == Condition::All(Vec::new()) {
            return (None, true);
        }
        let text = condition.text(terms);
        let fits = text.len() <= EXPRESSION_BYTES_MAX && condition.operators() <= OPERATORS_MAX;
        (Some(text), fits)
    }

    fn text(&self, terms: &mut Terms) -> String {
        let join = |parts: &[Condition], word: &str, terms: &mut Terms| {
            let texts: Vec<String> = parts
                .iter()
                .map(|part| match part {
                    Condition::All(inner) | Condition::Any(inner) if !inner.is_empty() => {
                        format!("({})", part.text(terms))
                    }
                    part => part.text(terms),
                })
                .collect();
            texts.join(word)
        };
        match self {
            Condition::Leaf(text) => text.clone(),
            // Conditions on a row stand beside one that demands the item; there every item has its key.
            Condition::All(parts) if parts.is_empty() => Condition::exists(terms, PK).text(terms),
            Condition::Any(parts) if parts.is_empty() => Condition::missing(terms, PK).text(terms),
            Condition::All(parts) => join(parts, " AND ", terms),
            Condition::Any(parts) => join(parts, " OR ", terms),
        }
    }
}

/// One side of a comparison.
enum Side<'g> {
    Constant(Value),
    Column(&'g str),
    Coalesce(&'g str, &'g Value),
}

/// Compiles guards on one table at one reading of the clock.
pub(crate) struct Compiler<'a> {
    pub(crate) table: &'a Table,
    pub(crate) now: Time,
}

impl Compiler<'_> {
    /// The condition that holds for an item where the guard holds for its row.
    pub(crate) fn guard(&self, guard: &Guard, terms: &mut Terms) -> Condition {
        match guard {
            Guard::Compare(left, comparison, right) => {
                self.comparison(&self.side(left), *comparison, &self.side(right), terms)
            }
            Guard::Null(column) => Condition::missing(terms, column),
            Guard::NotNull(column) => Condition::exists(terms, column),
            Guard::In(column, values) => Condition::Leaf(list(column, values, terms)),
            Guard::NotIn(column, values) => {
                let exists = Condition::exists(terms, column);
                exists.and(Condition::Leaf(format!("NOT {}", list(column, values, terms))))
            }
            Guard::All(parts) => Condition::All(parts.iter().map(|part| self.guard(part, terms)).collect()),
            Guard::Any(parts) => Condition::Any(parts.iter().map(|part| self.guard(part, terms)).collect()),
        }
    }

    fn side<'g>(&self, operand: &'g Operand) -> Side<'g> {
        match operand {
            Operand::Column(column) => Side::Column(column),
            Operand::Coalesce(column, default) => Side::Coalesce(column, default),
            Operand::Value(value) => Side::Constant(value.clone()),
            Operand::Now { plus_micros } => {
                Side::Constant(Value::Time(eval::now_moved(self.now, *plus_micros)))
            }
        }
    }

    fn comparison(
        &self,
        left: &Side<'_>,
        comparison: Comparison,
        right: &Side<'_>,
        terms: &mut Terms,
    ) -> Condition {
        match (left, right) {
            (Side::Constant(left), Side::Constant(right)) => constant(left, comparison, right),
            (Side::Column(column), Side::Constant(value)) => {
                self.with_value(column, comparison, value, terms)
            }
            (Side::Constant(value), Side::Column(column)) => {
                self.with_value(column, mirrored(comparison), value, terms)
            }
            (Side::Column(left), Side::Column(right)) => self.with_column(left, comparison, right, terms),
            (Side::Coalesce(column, default), other) => {
                let set = self.comparison(&Side::Column(column), comparison, other, terms);
                let unset = Condition::missing(terms, column).and(self.comparison(
                    &Side::Constant((*default).clone()),
                    comparison,
                    other,
                    terms,
                ));
                simplified(set, unset)
            }
            (other, Side::Coalesce(column, default)) => {
                self.comparison(&Side::Coalesce(column, default), mirrored(comparison), other, terms)
            }
        }
    }

    fn with_value(
        &self,
        column: &str,
        comparison: Comparison,
        value: &Value,
        terms: &mut Terms,
    ) -> Condition {
        if let (Value::Bool(bool), false) = (value, matches!(comparison, Comparison::Eq | Comparison::Ne)) {
            let accepted: Vec<Value> = [false, true]
                .into_iter()
                .filter(|has| comparison.accepts(has.cmp(bool)))
                .map(Value::Bool)
                .collect();
            return match accepted.as_slice() {
                [] => Condition::Any(Vec::new()),
                [one] => self.with_value(column, Comparison::Eq, one, terms),
                _ => Condition::exists(terms, column),
            };
        }
        let Some(attribute) = item::attribute(value) else { return Condition::Any(Vec::new()) };
        let compared = Condition::compare(terms, column, comparison.symbol(), attribute);
        if comparison == Comparison::Ne { Condition::exists(terms, column).and(compared) } else { compared }
    }

    fn with_column(&self, left: &str, comparison: Comparison, right: &str, terms: &mut Terms) -> Condition {
        let ordered = !matches!(comparison, Comparison::Eq | Comparison::Ne);
        if ordered && self.table.type_of(left) == Some(Type::Bool) {
            let pairs = [(false, false), (false, true), (true, false), (true, true)];
            let accepted = pairs.into_iter().filter(|(a, b)| comparison.accepts(a.cmp(b)));
            let parts = accepted.map(|(a, b)| {
                let left = self.with_value(left, Comparison::Eq, &Value::Bool(a), terms);
                left.and(self.with_value(right, Comparison::Eq, &Value::Bool(b), terms))
            });
            return Condition::Any(parts.collect());
        }
        let both = Condition::exists(terms, left).and(Condition::exists(terms, right));
        both.and(Condition::Leaf(format!(
            "{} {} {}",
            terms.name(left),
            comparison.symbol(),
            terms.name(right)
        )))
    }
}

/// The condition of an item that holds a row.
pub(crate) fn present(terms: &mut Terms) -> Condition {
    Condition::exists(terms, VERSION)
}

/// The condition of an item that holds no row: a tombstone, or no item.
pub(crate) fn absent(terms: &mut Terms) -> Condition {
    Condition::missing(terms, VERSION)
}

fn list(column: &str, values: &[Value], terms: &mut Terms) -> String {
    let values: Vec<String> =
        values.iter().filter_map(item::attribute).map(|value| terms.value(value)).collect();
    format!("{} IN ({})", terms.name(column), values.join(", "))
}

fn constant(left: &Value, comparison: Comparison, right: &Value) -> Condition {
    if left.compare(right).is_some_and(|order| comparison.accepts(order)) {
        Condition::All(Vec::new())
    } else {
        Condition::Any(Vec::new())
    }
}

/// `set OR unset`, without the second where it can never hold.
fn simplified(set: Condition, unset: Condition) -> Condition {
    match unset {
        Condition::All(parts) if parts.contains(&Condition::Any(Vec::new())) => set,
        Condition::All(parts) => {
            let parts: Vec<Condition> =
                parts.into_iter().filter(|part| *part != Condition::All(Vec::new())).collect();
            set.or(Condition::All(parts))
        }
        other => set.or(other),
    }
}

/// The comparison that says the same with its sides exchanged.
fn mirrored(comparison: Comparison) -> Comparison {
    match comparison {
        Comparison::Eq | Comparison::Ne => comparison,
        Comparison::Lt => Comparison::Gt,
        Comparison::Le => Comparison::Ge,
        Comparison::Gt => Comparison::Lt,
        Comparison::Ge => Comparison::Le,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_store::guard::{column, is_in, is_null, is_set, now};

    fn check(guard: &Guard, expect: &str) {
        let table = Table::named("seats").partition("id", Type::Int).optional("status", Type::Text);
        let table =
            table.optional("sold", Type::Bool).optional("held", Type::Bool).optional("size", Type::Int);
        let table = table.optional("until", Type::Time).build().unwrap();
        let mut terms = Terms::default();
        let compiler = Compiler { table: &table, now: Time::from_micros(0) };
        let (text, fits) = compiler.guard(guard, &mut terms).print(&mut terms);
        assert_eq!(text.unwrap_or_default(), expect);
        assert!(fits);
    }

    #[test]
    fn guards_become_conditions_without_redundant_parentheses() {
        let free = column("status").eq("FREE");
        let lapsed = column("status").eq("HELD").and(column("until").le(now()));
        check(
            &free.clone().or(lapsed).and(Guard::version(7)),
            "(#status = :v0 OR (#status = :v1 AND #until <= :v2)) AND #version = :v3",
        );
        check(&column("status").ne("FREE"), "attribute_exists(#status) AND #status <> :v0");
        check(
            &is_in("status", ["A", "B"]).negated(),
            "attribute_exists(#status) AND NOT #status IN (:v0, :v1)",
        );
        check(
            &is_null("status").or(is_set("size")),
            "attribute_not_exists(#status) OR attribute_exists(#size)",
        );
        check(&Guard::All(vec![Guard::All(vec![free])]), "#status = :v0");
        check(&Guard::never(), "attribute_not_exists(#PK)");
    }

    #[test]
    fn booleans_are_compared_by_equality() {
        check(&column("sold").lt(true), "#sold = :v0");
        check(&column("sold").le(true), "attribute_exists(#sold)");
        check(&column("sold").gt(true), "attribute_not_exists(#PK)");
        check(&column("sold").lt(column("held")), "#sold = :v0 AND #held = :v1");
    }

    #[test]
    fn a_default_for_null_is_decided_beforehand() {
        let size = || Operand::Coalesce("size".into(), 0.into());
        check(&size().lt(5), "#size < :v0 OR attribute_not_exists(#size)");
        check(&size().gt(5), "#size > :v0");
        check(&Operand::Value(5.into()).gt(size()), "#size < :v0 OR attribute_not_exists(#size)");
    }
}
