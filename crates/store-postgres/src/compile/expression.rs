//! Guards and assignments as SQL. Each constant gets its name when it is written, in the order of [`crate::shape::constants`].

use statehouse_store::guard::Comparison;
use statehouse_store::table::VERSION;
use statehouse_store::{Expr, Guard, Operand, Type};

use super::statement::{CompiledStatement, FoundRow, ValueSource};
use crate::shape::{compared_type, has_constant};
use crate::sql::{name, placeholder, type_name};

impl CompiledStatement<'_, '_> {
    /// The names of the constants of an expression.
    pub(super) fn operand_names(&mut self, expr: &Expr) -> Vec<String> {
        let now = self.compiler.now;
        let reads = || expr.operands().any(|operand| matches!(operand, Operand::Now { .. }));
        self.reads_clock |= now.is_none() && self.stamped.is_none() && reads();
        expr.operands()
            .filter(|operand| has_constant(operand, now))
            .map(|operand| self.operand_constant(operand))
            .collect::<Vec<_>>()
    }

    /// The assignments to a row that is there. Where the same statement inserts it, constants have been said already.
    pub(super) fn changes(&self, operands: &[Vec<String>], inserts_too: bool) -> String {
        let step = self.step;
        let mut parts = Vec::with_capacity(step.assignments.len() + 1);
        for (assignment, names) in step.assignments.iter().zip(operands) {
            let column = name(&assignment.column);
            let value = match &assignment.expr {
                Expr::Is(Operand::Value(_)) if inserts_too => format!("excluded.{column}"),
                expr => self.expression(expr, names, &assignment.column, FoundRow::Row),
            };
            parts.push(format!("{column} = {value}"));
        }
        parts.push(format!("{VERSION} = t.{VERSION} + 1"));
        parts.join(", ")
    }

    pub(super) fn expression(&self, expr: &Expr, names: &[String], column: &str, found: FoundRow) -> String {
        let kind = self.step.table.type_of(column).unwrap_or(Type::Text);
        let mut names = names.iter();
        let mut written = expr.operands().map(|operand| {
            let constant = if has_constant(operand, self.compiler.now) { names.next() } else { None };
            match operand {
                Operand::Now { .. } if self.stamped.is_some() => "clock_timestamp()".to_owned(),
                _ => operand_text(operand, constant.map(String::as_str), kind, found),
            }
        });
        let (first, second) = (written.next().unwrap_or_default(), written.next().unwrap_or_default());
        // Only ints are added here; that two parameters are, the server cannot know by itself.
        let typed = |text: String| if text.starts_with('$') { format!("{text}::bigint") } else { text };
        match expr {
            Expr::Is(_) => first,
            Expr::Add(..) => format!("{} + {}", typed(first), typed(second)),
            Expr::Subtract(..) => format!("{} - {}", typed(first), typed(second)),
        }
    }

    pub(super) fn guard(&mut self, guard: &Guard) -> String {
        match guard {
            Guard::Compare(left, comparison, right) => self.comparison(left, *comparison, right),
            Guard::Null(column) => format!("t.{} is null", name(column)),
            Guard::NotNull(column) => format!("t.{} is not null", name(column)),
            Guard::In(column, _) => self.listed(column, "= any"),
            Guard::NotIn(column, _) => self.listed(column, "<> all"),
            Guard::All(parts) if parts.is_empty() => "true".to_owned(),
            Guard::Any(parts) if parts.is_empty() => "false".to_owned(),
            Guard::All(parts) => self.joined(parts, " and "),
            Guard::Any(parts) => self.joined(parts, " or "),
        }
    }

    pub(super) fn joined(&mut self, parts: &[Guard], with: &str) -> String {
        let parts: Vec<String> = parts.iter().map(|part| self.guard(part)).collect();
        format!("({})", parts.join(with))
    }

    /// Lists stand before the constants, behind the tenant of one plan.
    pub(super) fn listed(&mut self, column: &str, operator: &str) -> String {
        let kind = self.step.table.type_of(column).map_or("text", type_name);
        let first = usize::from(matches!(self.source, ValueSource::Parameters));
        let list = placeholder(first + self.lists_named);
        self.lists_named += 1;
        format!("t.{} {operator} ({list}::{kind}[])", name(column))
    }

    pub(super) fn comparison(&mut self, left: &Operand, comparison: Comparison, right: &Operand) -> String {
        let kind = compared_type(&self.step.table, left, right);
        let ordered = !matches!(comparison, Comparison::Eq | Comparison::Ne);
        // Equal text is equal in every collation that a database can have; its order is not.
        let collation = if ordered && kind == Type::Text { " collate \"C\"" } else { "" };
        let (left, right) = (self.compared(left, kind), self.compared(right, kind));
        format!("{left}{collation} {} {right}", comparison.symbol())
    }

    pub(super) fn compared(&mut self, operand: &Operand, kind: Type) -> String {
        self.reads_clock |= self.compiler.now.is_none() && matches!(operand, Operand::Now { .. });
        let constant = has_constant(operand, self.compiler.now).then(|| self.operand_constant(operand));
        operand_text(operand, constant.as_deref(), kind, FoundRow::Row)
    }

    /// The constant of an operand, by its name. A distance from the server's clock is named with the clock. Within a
    /// century of it no time leaves the range of times, so nothing has to be clamped.
    pub(super) fn operand_constant(&mut self, operand: &Operand) -> String {
        let constant = self.constant();
        match (operand, self.compiler.now) {
            (Operand::Now { .. }, None) => format!("(select now from clock) + {constant}::interval"),
            _ => constant,
        }
    }
}

/// An operand, given the name of its constant if it has one.
fn operand_text(operand: &Operand, constant: Option<&str>, kind: Type, found: FoundRow) -> String {
    match (operand, found) {
        (Operand::Column(column), FoundRow::Row) => format!("t.{}", name(column)),
        (Operand::Column(_), FoundRow::Nothing) => format!("null::{}", type_name(kind)),
        (Operand::Coalesce(column, _), FoundRow::Row) => {
            format!("coalesce(t.{}, {})", name(column), constant.unwrap_or("null"))
        }
        (Operand::Coalesce(..), FoundRow::Nothing) | (Operand::Value(_), _) => {
            constant.unwrap_or("null").to_owned()
        }
        (Operand::Now { .. }, _) => constant.unwrap_or("(select now from clock)").to_owned(),
    }
}
