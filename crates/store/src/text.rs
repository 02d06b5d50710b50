//! Plans and reads as text that is the same for every engine. `explain` and golden files print it.
//!
//! A plan is one line for each step, with its assignments and each condition of its guard on lines of their own, then the
//! log entry:
//!
//! ```text
//! update profiles(user_id=42)
//!   set display_name = 'Anna', updated_at = now
//!   where version = 1
//!   and status = 'ACTIVE'
//! log profile/42
//!   event profile.updated with the row of step 0
//! ```
//!
//! The operation id and the fingerprint are left out: they identify one call and say nothing about the plan's effect.

use std::fmt;
use std::ops::Bound;

use crate::claim_range::ClaimRange;
use crate::guard::Guard;
use crate::log::{Entry, EventTemplate};
use crate::plan::{Expect, Plan, Step, Verb};
use crate::read::{Consistency, Direction, Query};
use crate::row::Address;
use crate::scan::Scan;
use crate::store::{ExplainRequest, ReadRequest};
use crate::table::Column;
use crate::value::Value;

/// On one line; with `{:#}` the assignments and each condition are on lines of their own.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match (self.verb, self.expect) {
            (Verb::Put, Expect::Absent) => "insert",
            (Verb::Put, Expect::Present) => "update",
            (Verb::Put, Expect::Either) => "upsert",
            (Verb::Delete, Expect::Either) => "remove",
            (Verb::Delete, _) => "delete",
            (Verb::Assert, Expect::Absent) => "assert absent",
            (Verb::Assert, Expect::Present) => "assert",
            (Verb::Assert, Expect::Either) => "assert if present",
        };
        if let Some(label) = &self.label {
            write!(f, "{label}: ")?;
        }
        write!(f, "{verb} {}", self.table)?;
        // The step of a take has no key.
        if !self.key.is_empty() {
            f.write_str("(")?;
            write_values(f, self.table.key_columns().iter().zip(&self.key))?;
            f.write_str(")")?;
        }
        let break_line = if f.alternate() { "\n  " } else { " " };
        for (index, assignment) in self.assignments.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            } else {
                write!(f, "{break_line}set ")?;
            }
            write!(f, "{} = {}", assignment.column, assignment.expr)?;
        }
        let conjuncts = self.guard.conjuncts();
        for (index, conjunct) in conjuncts.iter().enumerate() {
            write!(f, "{break_line}{} ", if index > 0 { "and" } else { "where" })?;
            match conjunct {
                Guard::All(parts) | Guard::Any(parts) if parts.len() > 1 && conjuncts.len() > 1 => {
                    write!(f, "({conjunct})")?;
                }
                _ => write!(f, "{conjunct}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, step) in self.steps().iter().enumerate() {
            if number > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{step:#}")?;
        }
        match self.entry() {
            Some(entry) if self.steps().is_empty() => write!(f, "{entry}"),
            Some(entry) => write!(f, "\n{entry}"),
            None => Ok(()),
        }?;
        let returns_rows = self.returns_rows() && !self.steps().is_empty();
        f.write_str(if returns_rows { "\nreturn the rows" } else { "" })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "log {}/{}", self.resource, self.key)?;
        self.events.iter().try_for_each(|event| write!(f, "\n  event {event}"))
    }
}

impl fmt::Display for EventTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if !self.data.is_empty() {
            let data = serde_json::to_string(&self.data).map_err(|_| fmt::Error)?;
            write!(f, " {data}")?;
        }
        match self.row_of {
            Some(step) => write!(f, " with the row of step {step}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "query {}(", self.source())?;
        let sort = self.sort_columns();
        let fixed = self.partition_columns().into_iter().zip(self.partition_values());
        write_values(f, fixed.chain(sort.iter().copied().zip(self.prefix_values())))?;
        f.write_str(")")?;
        let bounded = sort.get(self.prefix_values().len()).map_or("", |column| column.name.as_str());
        let (lower, upper) = self.bounds();
        write_bound(f, bounded, lower, [">", ">="])?;
        write_bound(f, bounded, upper, ["<", "<="])?;
        if self.tenant().is_none() {
            f.write_str(", of all tenants")?;
        }
        if self.direction() == Direction::Backward {
            f.write_str(", backward")?;
        }
        write_page(f, self.page_limit(), self.cursor_values())?;
        f.write_str(match self.consistency() {
            Consistency::Strong => ", strong",
            Consistency::Eventual => ", eventual",
        })
    }
}

impl fmt::Display for Scan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if self.tenant().is_none() { ", of all tenants" } else { "" };
        let part = if self.segment().is_some() { ", within a segment" } else { "" };
        write!(f, "scan {}{whose}{part}", self.read_table())?;
        write_page(f, self.page_limit(), self.cursor_values())
    }
}

impl fmt::Display for ClaimRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "take the first rows of\n  {}", self.query())?;
        let step = format!("{:#}", self.step());
        step.lines().try_for_each(|line| write!(f, "\n  {line}"))?;
        if self.bytes_max() == usize::MAX {
            Ok(())
        } else {
            write!(f, "\n  at most {} bytes", self.bytes_max())
        }
    }
}

impl fmt::Display for ReadRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadRequest::Get(addresses) => write_get(f, addresses),
            ReadRequest::Value(cell) => {
                let column = cell.address().table().columns().get(cell.column_index());
                write!(f, "get {} of {}", column.map_or("?", |column| &column.name), cell.address())
            }
            ReadRequest::Query(query) => write!(f, "{query}"),
        }
    }
}

impl fmt::Display for ExplainRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExplainRequest::Commit(plan) => write!(f, "{plan}"),
            ExplainRequest::Get(addresses, Consistency::Strong) => write_get(f, addresses),
            ExplainRequest::Get(addresses, Consistency::Eventual) => {
                write_get(f, addresses)?;
                f.write_str(", eventual")
            }
            ExplainRequest::Query(query) => write!(f, "{query}"),
            ExplainRequest::Scan(scan) => write!(f, "{scan}"),
            ExplainRequest::ReadMany(asks) => {
                f.write_str("in one request")?;
                asks.iter().try_for_each(|ask| write!(f, "\n  {ask}"))
            }
            ExplainRequest::ClaimRange(take, _) => write!(f, "{take}"),
        }
    }
}

fn write_get(f: &mut fmt::Formatter<'_>, addresses: &[Address]) -> fmt::Result {
    f.write_str("get ")?;
    for (index, address) in addresses.iter().enumerate() {
        write!(f, "{}{address}", if index > 0 { ", " } else { "" })?;
    }
    Ok(())
}

/// `a=1, b='x'`.
fn write_values<'a>(
    f: &mut fmt::Formatter<'_>,
    values: impl Iterator<Item = (&'a Column, &'a Value)>,
) -> fmt::Result {
    for (index, (column, value)) in values.enumerate() {
        write!(f, "{}{}={value}", if index > 0 { ", " } else { "" }, column.name)?;
    }
    Ok(())
}

/// One bound of a range; `signs` are those of an excluded and an included value.
fn write_bound(
    f: &mut fmt::Formatter<'_>,
    column: &str,
    bound: &Bound<Value>,
    signs: [&str; 2],
) -> fmt::Result {
    let [excluded, included] = signs;
    match bound {
        Bound::Unbounded => Ok(()),
        Bound::Excluded(value) => write!(f, ", {column} {excluded} {value}"),
        Bound::Included(value) => write!(f, ", {column} {included} {value}"),
    }
}

fn write_page(f: &mut fmt::Formatter<'_>, limit: usize, cursor: Option<&[Value]>) -> fmt::Result {
    if let Some(values) = cursor {
        let values: Vec<String> = values.iter().map(Value::to_string).collect();
        write!(f, ", after ({})", values.join(", "))?;
    }
    write!(f, ", limit {limit}")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::guard::{column, now};
    use crate::{Table, Tenant, Type};

    fn profiles() -> Arc<Table> {
        let table = Table::named("profiles").partition("user_id", Type::Int).optional("status", Type::Text);
        let table = table.optional("seen_at", Type::Time).optional("claim", Type::Text);
        table.index("by_status", &["status"], &["seen_at"]).build().unwrap()
    }

    fn acme() -> Tenant {
        Tenant::new("acme").unwrap()
    }

    #[test]
    fn a_plan_prints_its_steps_conditions_and_events() {
        let update = Step::update(&profiles(), [42.into()])
            .guard(Guard::version(1).and(column("status").eq("NEW").or(column("seen_at").le(now()))))
            .set("status", "ACTIVE")
            .set("seen_at", now());
        let event = EventTemplate::named("profile.updated").with("by", "ann").with_row_of(0);
        let plan = Plan::of(&acme(), "op-1")
            .steps([update, Step::assert_absent(&profiles(), [43.into()])])
            .log(Entry::about("profile", "42").event(event).event(EventTemplate::named("profile.seen")));
        let expected = "update profiles(user_id=42)\n  set status = 'ACTIVE', seen_at = now\n  where version = 1\n  \
                        and (status = 'NEW' or seen_at <= now)\nassert absent profiles(user_id=43)\nlog profile/42\n  \
                        event profile.updated {\"by\":\"ann\"} with the row of step 0\n  event profile.seen\n\
                        return the rows";
        assert_eq!(plan.build().unwrap().to_string(), expected);
    }

    #[test]
    fn reads_print_their_range_and_what_limits_them() {
        let query = Query::index(&profiles(), "by_status", &acme(), ["NEW".into()]).unwrap();
        let query = query.above(crate::Time::from_micros(0)).unwrap().limit(5).unwrap().backward();
        assert_eq!(
            query.to_string(),
            "query profiles/by_status(status='NEW'), seen_at > '1970-01-01T00:00:00.000000Z', backward, limit 5, eventual"
        );
        let table = Query::table(&profiles(), &acme(), [1.into()]).unwrap().limit(2).unwrap();
        assert_eq!(table.to_string(), "query profiles(user_id=1), limit 2, strong");
        let scan = Scan::all(&profiles()).limit(3).unwrap();
        assert_eq!(scan.to_string(), "scan profiles, of all tenants, limit 3");
        let step = Step::update(&profiles(), []).guard(column("status").eq("NEW"));
        let take = ClaimRange::of(&acme(), "op-1", table, step, "claim").unwrap().limit_bytes(9);
        assert_eq!(
            take.to_string(),
            "take the first rows of\n  query profiles(user_id=1), limit 2, strong\n  update profiles\n    \
             set claim = 'op-1'\n    where status = 'NEW'\n  at most 9 bytes"
        );
    }
}
