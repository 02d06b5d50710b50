//! Guards as DynamoDB condition expressions.
//!
//! The contract's rule about null is DynamoDB's rule: a comparison with a missing attribute does not hold. The exceptions are
//! `<>` and `NOT … IN`, which hold for a missing attribute and are combined with `attribute_exists`, and ordered comparisons of
//! booleans, which DynamoDB does not support and which are compiled to equalities.
//!
//! Conditions are built as a tree and printed once, because DynamoDB rejects redundant parentheses. Every name is a
//! placeholder, so that no column collides with a reserved word. A condition above DynamoDB's limits (4 KB of text, 300
//! operators) is not compiled; the caller reads the row and evaluates the guard in memory.

use std::collections::{BTreeMap, HashMap, HashSet};

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::guard::Comparison;
use statehouse_store::table::VERSION;
use statehouse_store::{Guard, Operand, Table, Time, Type, Value, eval};

use crate::item::{self, PK};

/// DynamoDB's limit for the bytes of an expression.
const EXPRESSION_BYTES_MAX: usize = 4_096;
/// DynamoDB's limit for the operators of an expression, minus a reserve for conditions that are added to a guard.
const OPERATORS_MAX: usize = 280;

/// The placeholders of names and values in expressions.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ExpressionPlaceholders {
    names: BTreeMap<String, String>,
    values: Vec<(String, AttributeValue)>,
}

impl ExpressionPlaceholders {
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

    /// Removes placeholders that none of these expressions uses: DynamoDB rejects unused ones.
    pub(crate) fn keep_used(&mut self, expressions: &[&str]) {
        let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '#' | ':');
        let used: HashSet<&str> =
            expressions.iter().flat_map(|text| text.split(|c: char| !in_word(c))).collect();
        self.names.retain(|placeholder, _| used.contains(placeholder.as_str()));
        self.values.retain(|(placeholder, _)| used.contains(placeholder.as_str()));
    }

    /// The names for a request; `None` if there are none.
    pub(crate) fn names(&self) -> Option<HashMap<String, String>> {
        (!self.names.is_empty()).then(|| self.names.clone().into_iter().collect())
    }

    /// The values for a request; `None` if there are none.
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

    /// The attribute exists.
    pub(crate) fn exists(terms: &mut ExpressionPlaceholders, attribute: &str) -> Condition {
        Condition::Leaf(format!("attribute_exists({})", terms.name(attribute)))
    }

    /// The attribute does not exist.
    pub(crate) fn missing(terms: &mut ExpressionPlaceholders, attribute: &str) -> Condition {
        Condition::Leaf(format!("attribute_not_exists({})", terms.name(attribute)))
    }

    /// The comparison of the attribute with a value holds.
    pub(crate) fn compare(
        terms: &mut ExpressionPlaceholders,
        attribute: &str,
        symbol: &str,
        value: AttributeValue,
    ) -> Condition {
        Condition::Leaf(format!("{} {symbol} {}", terms.name(attribute), terms.value(value)))
    }

    /// Merges nested lists of one kind and replaces lists of one element by the element.
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

    /// The expression; `None` for one that always holds. The second result is whether it is within DynamoDB's limits.
    pub(crate) fn print(self, terms: &mut ExpressionPlaceholders) -> (Option<String>, bool) {
        let condition = self.flattened();
        if condition == Condition::All(Vec::new()) {
            return (None, true);
        }
        let text = condition.text(terms);
        let fits = text.len() <= EXPRESSION_BYTES_MAX && condition.operators() <= OPERATORS_MAX;
        (Some(text), fits)
    }

    fn text(&self, terms: &mut ExpressionPlaceholders) -> String {
        let join = |parts: &[Condition], word: &str, terms: &mut ExpressionPlaceholders| {
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
            // Conditions on a row are combined with one that requires the item, and every item has its key.
            Condition::All(parts) if parts.is_empty() => Condition::exists(terms, PK).text(terms),
            Condition::Any(parts) if parts.is_empty() => Condition::missing(terms, PK).text(terms),
            Condition::All(parts) => join(parts, " AND ", terms),
            Condition::Any(parts) => join(parts, " OR ", terms),
        }
    }
}

/// One side of a comparison.
enum ComparisonSide<'g> {
    Constant(Value),
    Column(&'g str),
    Coalesce(&'g str, &'g Value),
}

/// Compiles guards on one table for one time.
pub(crate) struct GuardCompiler<'a> {
    pub(crate) table: &'a Table,
    pub(crate) now: Time,
}

impl GuardCompiler<'_> {
    /// The condition that holds for an item if and only if the guard holds for its row.
    pub(crate) fn guard(&self, guard: &Guard, terms: &mut ExpressionPlaceholders) -> Condition {
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

    fn side<'g>(&self, operand: &'g Operand) -> ComparisonSide<'g> {
        match operand {
            Operand::Column(column) => ComparisonSide::Column(column),
            Operand::Coalesce(column, default) => ComparisonSide::Coalesce(column, default),
            Operand::Value(value) => ComparisonSide::Constant(value.clone()),
            Operand::Now { plus_micros } => {
                ComparisonSide::Constant(Value::Time(eval::now_moved(self.now, *plus_micros)))
            }
        }
    }

    fn comparison(
        &self,
        left: &ComparisonSide<'_>,
        comparison: Comparison,
        right: &ComparisonSide<'_>,
        terms: &mut ExpressionPlaceholders,
    ) -> Condition {
        match (left, right) {
            (ComparisonSide::Constant(left), ComparisonSide::Constant(right)) => {
                constant(left, comparison, right)
            }
            (ComparisonSide::Column(column), ComparisonSide::Constant(value)) => {
                self.with_value(column, comparison, value, terms)
            }
            (ComparisonSide::Constant(value), ComparisonSide::Column(column)) => {
                self.with_value(column, mirrored(comparison), value, terms)
            }
            (ComparisonSide::Column(left), ComparisonSide::Column(right)) => {
                self.with_column(left, comparison, right, terms)
            }
            (ComparisonSide::Coalesce(column, default), other) => {
                let set = self.comparison(&ComparisonSide::Column(column), comparison, other, terms);
                let unset = Condition::missing(terms, column).and(self.comparison(
                    &ComparisonSide::Constant((*default).clone()),
                    comparison,
                    other,
                    terms,
                ));
                simplified(set, unset)
            }
            (other, ComparisonSide::Coalesce(column, default)) => self.comparison(
                &ComparisonSide::Coalesce(column, default),
                mirrored(comparison),
                other,
                terms,
            ),
        }
    }

    fn with_value(
        &self,
        column: &str,
        comparison: Comparison,
        value: &Value,
        terms: &mut ExpressionPlaceholders,
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

    fn with_column(
        &self,
        left: &str,
        comparison: Comparison,
        right: &str,
        terms: &mut ExpressionPlaceholders,
    ) -> Condition {
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
pub(crate) fn present(terms: &mut ExpressionPlaceholders) -> Condition {
    Condition::exists(terms, VERSION)
}

/// The condition of an item that holds no row: a tombstone, or no item.
pub(crate) fn absent(terms: &mut ExpressionPlaceholders) -> Condition {
    Condition::missing(terms, VERSION)
}

fn list(column: &str, values: &[Value], terms: &mut ExpressionPlaceholders) -> String {
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

/// `set OR unset`, without the second if it can never hold.
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

/// The equivalent comparison with exchanged sides.
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
        let mut terms = ExpressionPlaceholders::default();
        let compiler = GuardCompiler { table: &table, now: Time::from_micros(0) };
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
