//! The first rows of a range, found, locked and changed by one statement.
//!
//! ```text
//!   taken    the first rows of the range that nobody else has locked, each with what those before it weigh
//!   clock    one reading, behind the locks
//!   update   those within the weight for which the guard holds, and the room that is left (`crate::room`)
//! ```
//!
//! Whoever has locked a row is about to change it, so it is passed over and not waited for: those who take at the same
//! time get different rows. A row that is locked stays where it is, so that it is changed there, without another look into an
//! index; one that was changed after the statement began has moved, and is not found. Every row comes back with the number of
//! those that were found. If that is more than were changed, the statement could not do something for one of them that plans
//! might; they are taken by plans then. If none was, nothing comes back at all, and it is the same.

use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::{ClaimRange, Plan, Row, StoreError, Table, Type, Value};

use super::{Compiler, Set, Source, Statement, list_args};
use crate::link::Call;
use crate::look::Spot;
use crate::room;
use crate::shape::{constants_of_step, is_exact, lists, steps_are_alike};
use crate::sql::{Arg, all_columns, int_at, placeholder, row_at};

/// The statements of takes that were written last, each with a take of its shape.
#[derive(Default)]
pub(crate) struct Takes(Mutex<Vec<(ClaimRange, Arc<str>)>>);

impl Takes {
    /// Shapes come from actions, of which there are few.
    const MOST: usize = 64;

    fn of(&self, take: &ClaimRange, write: impl FnOnce() -> Option<String>) -> Option<Arc<str>> {
        let texts = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(like, _): &&(ClaimRange, _)| {
            Spot::Range(like.query()).is_like(Spot::Range(take.query()))
                && steps_are_alike(like.step(), take.step())
        };
        if let Some((_, text)) = texts().iter().find(is_it) {
            return Some(text.clone());
        }
        let text: Arc<str> = write()?.into();
        let mut texts = texts();
        texts.truncate(Takes::MOST - 1);
        texts.insert(0, (take.clone(), text.clone()));
        Some(text)
    }
}

/// A take as one statement.
pub(crate) struct Taken<'t> {
    take: &'t ClaimRange,
    pub call: Call<'t>,
}

/// A key of a table: rows that are taken have others, but the statement is the same.
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
    /// Compiles a take, if it can be.
    pub(crate) fn taken<'t>(&self, takes: &Takes, take: &'t ClaimRange) -> Option<Taken<'t>> {
        let step = take.step();
        if !is_exact(step) || !room::is_small_change(step) {
            return None;
        }
        let text = takes.of(take, || {
            let plan = take.plan(&any_key(&step.table)).ok()?;
            self.taken_text(&plan, take)
        })?;
        let mut args = vec![Arg::Text(take.tenant().as_str())];
        args.extend(list_args(step));
        args.extend(Spot::Range(take.query()).constants());
        // The last one is the limit, which asks for one row more where a page is read.
        args.pop();
        args.push(Arg::Int(i64::try_from(take.query().page_limit()).unwrap_or(i64::MAX)));
        args.push(Arg::Int(i64::try_from(take.bytes_max()).unwrap_or(i64::MAX)));
        args.extend(constants_of_step(step, self.now).into_iter().map(|constant| constant.arg));
        Some(Taken { take, call: Call::new(text, args) })
    }

    /// The statement of a take, of which this plan is one.
    fn taken_text(&self, plan: &Plan, take: &ClaimRange) -> Option<String> {
        let step = plan.steps().first()?;
        let (table, range) = (&step.table, Spot::Range(take.query()));
        // The tenant, the lists, the range, the weight, and then the constants.
        let before = 1 + lists(step).len();
        let behind = before + range.constants().len();
        let mut statement = Statement::new(self, plan, step, Source::Parameters, Set::Transaction);
        (statement.stamped, statement.before) = (None, behind + 1);
        let mut conditions = room::bounds_by(step, 0, Some("k._bytes"))?;
        conditions.push(room::key_bound(step)?);
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
            room::length(table),
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

impl Taken<'_> {
    /// The rows in their order, and whether there are others that plans might take.
    pub(crate) fn rows(&self, answers: &[tokio_postgres::Row]) -> Result<(Vec<Row>, bool), StoreError> {
        let table = &self.take.step().table;
        let mut rows: Vec<(i64, Row)> = Vec::with_capacity(answers.len());
        let mut found = None;
        for answer in answers {
            let place = int_at(answer, 0, table.name())?;
            found = Some(int_at(answer, 1, table.name())?);
            rows.push((place, row_at(answer, 2, table, self.take.tenant())?));
        }
        rows.sort_by_key(|(place, _)| *place);
        let rows: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
        let all = found.and_then(|found| usize::try_from(found).ok()) == Some(rows.len());
        Ok((rows, !all))
    }
}
