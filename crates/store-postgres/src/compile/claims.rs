//! The first rows of a range, found, locked and changed by one statement.
//!
//! ```text
//!   taken    the first rows of the range that no other transaction has locked, each with the total weight of those before it
//!   clock    one reading, after the locks
//!   update   the rows within the weight limit for which the guard and the size bounds (`crate::size_bounds`) hold
//! ```
//!
//! A row that another transaction has locked is about to change, so it is skipped (`skip locked`): concurrent claims get different
//! rows. A locked row keeps its physical location, so it is updated there without another index lookup. A row that was changed after
//! the statement began has moved and is not found. Each row is returned with the number of rows that were found. If fewer were changed,
//! the statement could not do something that plans may be able to do, and the remaining rows are claimed by plans. The same holds if
//! nothing is returned.

use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::{ClaimRange, Plan, Row, StoreError, Table, Type, Value};

use super::statement::{CompiledStatement, ValueSource};
use super::{Compiler, Set, list_args};
use crate::connection::DatabaseCall;
use crate::multi_read::ReadItem;
use crate::shape::{constants_of_step, is_exact, lists, steps_are_alike};
use crate::size_bounds;
use crate::sql::{Arg, all_columns, int_at, placeholder, row_at};

/// The most recent statement texts of claims, each with a claim of its shape.
#[derive(Default)]
pub(crate) struct ClaimTexts(Mutex<Vec<(ClaimRange, Arc<str>)>>);

impl ClaimTexts {
    /// Shapes come from actions, of which there are few.
    const MOST: usize = 64;

    fn of(&self, claim: &ClaimRange, write: impl FnOnce() -> Option<String>) -> Option<Arc<str>> {
        let texts = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(like, _): &&(ClaimRange, _)| {
            ReadItem::Range(like.query()).is_like(ReadItem::Range(claim.query()))
                && steps_are_alike(like.step(), claim.step())
        };
        if let Some((_, text)) = texts().iter().find(is_it) {
            return Some(text.clone());
        }
        let text: Arc<str> = write()?.into();
        let mut texts = texts();
        texts.truncate(ClaimTexts::MOST - 1);
        texts.insert(0, (claim.clone(), text.clone()));
        Some(text)
    }
}

/// A claim as one statement.
pub(crate) struct CompiledClaim<'t> {
    claim: &'t ClaimRange,
    pub call: DatabaseCall<'t>,
}

/// Some key of a table. The rows of a claim have other keys, but the statement is the same.
fn any_key(table: &Table) -> Vec<Value> {
    let any = |kind: Type| match kind {
        Type::Text => Value::from("-"),
        Type::Int => Value::from(0),
        Type::Float => Value::from(0.0),
        Type::Bool => Value::from(false),
        Type::Bytes => Value::Bytes(vec![0]),
        Type::Time => Value::Time(statehouse_store::Time::from_micros(0)),
        Type::Json => Value::Null,
    };
    table.key_columns().iter().map(|column| any(column.kind)).collect()
}

impl Compiler<'_> {
    /// Compiles a claim, if it can be.
    pub(crate) fn claim<'t>(&self, texts: &ClaimTexts, claim: &'t ClaimRange) -> Option<CompiledClaim<'t>> {
        let step = claim.step();
        if !is_exact(step) || !size_bounds::is_small_change(step) {
            return None;
        }
        let text = texts.of(claim, || {
            let plan = claim.plan(&any_key(&step.table)).ok()?;
            self.claim_text(&plan, claim)
        })?;
        let mut args = vec![Arg::Text(claim.tenant().as_str())];
        args.extend(list_args(step));
        args.extend(ReadItem::Range(claim.query()).constants());
        // The last one is the limit, which asks for one row more where a page is read.
        args.pop();
        args.push(Arg::Int(i64::try_from(claim.query().page_limit()).unwrap_or(i64::MAX)));
        args.push(Arg::Int(i64::try_from(claim.bytes_max()).unwrap_or(i64::MAX)));
        args.extend(constants_of_step(step, self.now).into_iter().map(|constant| constant.arg));
        Some(CompiledClaim { claim, call: DatabaseCall::new(text, args) })
    }

    /// The statement of a claim. `plan` is the plan that would claim one row.
    fn claim_text(&self, plan: &Plan, claim: &ClaimRange) -> Option<String> {
        let step = plan.steps().first()?;
        let (table, range) = (&step.table, ReadItem::Range(claim.query()));
        // The tenant, the lists, the range, the weight, and then the constants.
        let before = 1 + lists(step).len();
        let behind = before + range.constants().len();
        let mut statement =
            CompiledStatement::new(self, plan, step, ValueSource::Parameters, Set::Transaction);
        (statement.stamped, statement.before) = (None, behind + 1);
        let mut conditions = size_bounds::bounds_by(step, 0, Some("k._bytes"))?;
        conditions.push(size_bounds::key_bound(step)?);
        // In the order of the constants.
        let operands: Vec<Vec<String>> =
            step.assignments.iter().map(|a| statement.operand_names(&a.expr)).collect();
        for conjunct in step.guard.conjuncts() {
            conditions.push(statement.guard(conjunct));
        }
        let source = range.source(self.names, &|number| placeholder(before + number), "t.tenant = $1::text");
        let mut parts = vec![format!(
            "taken as materialized (\nselect k.*, row_number() over () as _place, \
             sum(k._bytes) over (rows unbounded preceding) - k._bytes < {}::bigint as _fits\nfrom (\n\
             select t.ctid as _row, {} as _bytes\n{source}\nfor update of t skip locked\n) as k\n)",
            placeholder(behind),
            size_bounds::length(table),
        )];
        if statement.reads_clock {
            parts.push(
                "clock as materialized (\nselect clock_timestamp() as now\n\
                 from (select count(*) from taken) as locked\n)"
                    .to_owned(),
            );
        }
        Some(format!(
            "with {}\nupdate {} as t\nset {}\nfrom taken as k\nwhere t.ctid = k._row and k._fits and {}\n\
             returning k._place, (select count(*) from taken where _fits), {}",
            parts.join(", "),
            self.names.table(table.name()),
            statement.changes(&operands, false),
            conditions.join(" and "),
            all_columns(table, "t"),
        ))
    }
}

impl CompiledClaim<'_> {
    /// The rows in their order, and whether there are others that plans could claim.
    pub(crate) fn rows(&self, answers: &[tokio_postgres::Row]) -> Result<(Vec<Row>, bool), StoreError> {
        let table = &self.claim.step().table;
        let mut rows: Vec<(i64, Row)> = Vec::with_capacity(answers.len());
        let mut found = None;
        for answer in answers {
            let place = int_at(answer, 0, table.name())?;
            found = Some(int_at(answer, 1, table.name())?);
            rows.push((place, row_at(answer, 2, table, self.claim.tenant())?));
        }
        rows.sort_by_key(|(place, _)| *place);
        let rows: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
        let all = found.and_then(|found| usize::try_from(found).ok()) == Some(rows.len());
        Ok((rows, !all))
    }
}
