//! Plans of one step as one statement: the guarded write, the log's head and the log record together.
//!
//! **A statement applies a plan, or does nothing for it.** It does not report why it did nothing. The plan is then decided on
//! locked rows by [`statehouse_store::eval`], like every other plan ([`crate::batch`]). So a compiled condition may be stricter than
//! the guard, but never weaker. Some things are not compiled, or compiled strictly:
//! - Sums of floats and times are not compiled, because their ranges are narrower here than in SQL. Neither are asserts, and
//!   removals of rows that may be missing.
//! - Sums of ints are compiled. If one overflows, the server raises an error and nothing is done.
//! - Size limits: see [`crate::size_bounds`].
//!
//! **Correctness under READ COMMITTED.** An UPDATE or DELETE that waited for a row lock evaluates its condition again on the current
//! row, and the condition refers to that row alone. The head of the log partition is locked after the row, until the end of the
//! transaction. So records of one partition get their positions in commit order. `Now` is read once, after the row is locked: if
//! it is only assigned to one column, it is read in the assignment, which is computed again after a wait; otherwise it is read
//! after a lock that is taken first.
//!
//! **One plan** is a statement that is a transaction by itself. Nothing is sent before or after it: settings that the transaction
//! needs and does not have ([`Set`]) are set by the statement first. **Several** updates, deletes or inserts of one
//! [shape](crate::shape), on different rows, are one statement with arrays of constants. It writes the rows in the order of their
//! keys and locks the heads in the order of the partitions. So does **one plan of many steps** of one shape ([`uniform`]).
//! **Inserts** read nothing back from the server that the caller knows already ([`mod@inserts`]).

mod claims;
mod expression;
mod inserts;
mod statement;
mod uniform;

pub(crate) use self::claims::ClaimTexts;
pub(crate) use self::uniform::{UniformMode, is_uniform};

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::bug;
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{
    Applied, Commit, Plan, Position, Record, Row, Step, StoreError, Time, Type, Value, eval,
};

use self::inserts::InsertCounts;
use self::statement::{CompiledStatement, ValueSource};
use crate::connection::DatabaseCall;
use crate::ddl::Names;
use crate::options::PostgresOptions;
use crate::order;
use crate::shape::{
    Constant, are_alike, compilable, constants, inserts, lists, partition, returns_row, takers,
};
use crate::sql::{Arg, count_at, ordinal_at, row_at, time_at};
use crate::tenancy::TransactionScope;

/// Compiles plans to statements.
#[derive(Clone, Copy)]
pub(crate) struct Compiler<'n> {
    pub names: &'n Names,
    pub partitions: u32,
    /// The caller's clock, if it is not the server's.
    pub now: Option<Time>,
    pub lock_timeout_ms: u128,
    /// Whether a statement has to name its tenants, for row-level security.
    pub says_tenant: bool,
    /// The role that a statement must run under, if it is not the one that connects.
    pub role: Option<&'n str>,
    /// The cache of statement texts.
    pub texts: &'n Texts,
}

/// The most recent statement texts, each with a plan of its shape. Building a text again would take longer than everything else
/// that the client does for a lone plan.
#[derive(Default)]
pub(crate) struct Texts(Mutex<VecDeque<(Plan, StepForm, Arc<str>)>>);

/// The properties of a statement that do not follow from the shape of its plans.
#[derive(Clone, Copy, PartialEq, Eq)]
struct StepForm {
    /// Whether it is of several plans.
    several: bool,
    set: Set,
    /// That of many steps.
    way: Option<UniformMode>,
}

impl Texts {
    /// Shapes come from actions, of which there are few.
    const MOST: usize = 128;

    /// The statement of a plan's shape, written by `write` if it is not there.
    fn of(&self, plan: &Plan, form: StepForm, write: impl FnOnce() -> Option<String>) -> Option<Arc<str>> {
        let texts = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(like, of, _): &&(Plan, StepForm, _)| *of == form && are_alike(like, plan);
        if let Some((_, _, text)) = texts().iter().find(is_it) {
            return Some(text.clone());
        }
        let text: Arc<str> = write()?.into();
        let mut texts = texts();
        if texts.len() == Texts::MOST {
            texts.pop_back();
        }
        texts.push_front((plan.clone(), form, text.clone()));
        Some(text)
    }
}

/// The settings that are in effect when a statement begins. The statement sets the others itself, which costs the server about as
/// much as one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// Nothing is known of the session.
    Nothing,
    /// The session has the settings of a writer ([`LOOKUPS`] and the lock timeout), but no tenant.
    Session,
    /// The SQL that began the transaction has set everything.
    Transaction,
}

/// Plans as one statement.
pub(crate) struct Compiled<'p> {
    /// In the order of the statement's arrays.
    plans: Vec<&'p Plan>,
    /// Of each plan, where it stood when it was given.
    pub indexes: Vec<usize>,
    /// Of several that insert: what becomes of their places in the log.
    counts: Option<InsertCounts>,
    partitions: u32,
    /// The caller's clock, if it is not the server's.
    now: Option<Time>,
    pub call: DatabaseCall<'p>,
}

/// Inserts in one statement, at most. If one of the rows exists, all of them have to be decided again.
const INSERTS_MAX: usize = 64;
/// Plans of one shape that justify a transaction without the queued plans of other shapes, at least.
const ALIKE_MIN: usize = 8;

/// Only lookups in an index, because the plan of a statement is kept while its tables grow: with the few rows that
/// are expected of the arrays, a nested loop is the cheapest join whatever the other side is. And floats in events have all
/// their digits.
pub(crate) const LOOKUPS: [(&str, &str); 4] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("random_page_cost", "0"),
    ("extra_float_digits", "1"),
];

/// The SQL that sets [`LOOKUPS`] for one transaction.
pub(crate) fn lookup_settings_sql() -> String {
    LOOKUPS.iter().map(|(name, value)| format!("; set local {name} = {value}")).collect()
}

impl<'n> Compiler<'n> {
    pub(crate) fn new(
        names: &'n Names,
        texts: &'n Texts,
        options: &'n PostgresOptions,
        partitions: u32,
    ) -> Compiler<'n> {
        let now = options.clock.as_ref().map(|clock| clock.now());
        let (lock_timeout_ms, says_tenant) = (options.lock_timeout.as_millis(), options.row_level_security);
        Compiler { names, partitions, now, lock_timeout_ms, says_tenant, role: options.role(), texts }
    }

    /// Compiles one plan, if it can be.
    pub(crate) fn compile<'p>(
        &self,
        plan: &'p Plan,
        events: Option<&'p str>,
        set: Set,
    ) -> Option<Compiled<'p>> {
        let step = compilable(plan)?;
        let write = || CompiledStatement::new(self, plan, step, ValueSource::Parameters, set).text();
        let text = self.texts.of(plan, StepForm { several: false, set, way: None }, write)?;
        let mut args = vec![Arg::Text(plan.tenant().as_str())];
        args.extend(list_args(step));
        args.extend(
            constants(plan, step, events, self.now, self.partitions).into_iter().map(|constant| constant.arg),
        );
        let call = DatabaseCall::new(text, args);
        let (partitions, now) = (self.partitions, self.now);
        Some(Compiled { plans: vec![plan], indexes: vec![0], counts: None, partitions, now, call })
    }

    /// Compiles several plans, if most of them can be, are of the first one's shape, and write different rows, of which
    /// it is clear whether they are to be there. The others are left out. `events` are those that are written already, of
    /// each plan.
    pub(crate) fn compile_same_shape<'p>(
        &self,
        plans: &'p [Plan],
        events: &[Option<&'p str>],
        set: Set,
    ) -> Option<Compiled<'p>> {
        let first = plans.first()?;
        let step = compilable(first).filter(|step| step.expect != Expect::Either)?;
        // Rows are locked in the order of the arrays.
        let mut ordered: BTreeMap<Vec<u8>, (usize, &'p Plan, &'p Step)> = BTreeMap::new();
        let mut alike = 0;
        for (number, plan) in plans.iter().enumerate() {
            let is_alike = number == 0 || (are_alike(first, plan) && compilable(plan).is_some());
            let is_full = inserts(step) && ordered.len() >= INSERTS_MAX;
            if let Some(step) = plan.steps().first().filter(|_| is_alike && !is_full) {
                let row = order::place(step.table.name(), 0, plan.tenant(), &step.key);
                ordered.entry(row).or_insert((number, plan, step));
                alike += 1;
            }
        }
        // Those left out wait for another transaction. Many plans on one row are better combined, and so are few of each
        // shape.
        let enough = ALIKE_MIN.max(plans.len() / 4);
        let is_mixed = plans.len() - alike > plans.len() / 4 && ordered.len() < enough;
        if ordered.len() < 2 || is_mixed || alike - ordered.len() > alike / 4 {
            return None;
        }
        let given: Vec<Vec<Constant<'p>>> = ordered
            .values()
            .map(|(number, plan, step)| {
                let events = events.get(*number).copied().flatten();
                constants(plan, step, events, self.now, self.partitions)
            })
            .collect();
        let kinds: Vec<&'static str> = given.first()?.iter().map(|constant| constant.kind).collect();
        let text = self.texts.of(first, StepForm { several: true, set, way: None }, || {
            CompiledStatement::new(self, first, step, ValueSource::Rows { kinds: &kinds }, set).text()
        })?;
        let mut args = list_args(step);
        args.push(Arg::Texts(ordered.values().map(|(_, plan, _)| plan.tenant().as_str()).collect()));
        let mut columns: Vec<Vec<Arg<'p>>> = kinds.iter().map(|_| Vec::with_capacity(given.len())).collect();
        for constants in given {
            for (column, constant) in columns.iter_mut().zip(constants) {
                column.push(constant.arg);
            }
        }
        args.extend(kinds.iter().zip(columns).map(|(kind, column)| Arg::List(kind, without_repeats(column))));
        if set != Set::Transaction && self.says_tenant {
            args.push(Arg::Own(Value::Text(
                TransactionScope::of_all(ordered.values().map(|(_, plan, _)| *plan)).names(),
            )));
        }
        let (indexes, plans): (Vec<usize>, Vec<&'p Plan>) =
            ordered.into_values().map(|(number, plan, _)| (number, plan)).unzip();
        let (partitions, now) = (self.partitions, self.now);
        let counts = inserts(step).then(|| InsertCounts::of(&plans, partitions));
        args.extend(counts.iter().filter(|_| first.entry().is_some()).flat_map(InsertCounts::args));
        let call = DatabaseCall::new(text, args);
        Some(Compiled { plans, indexes, counts, partitions, now, call })
    }
}

/// Only the first, if all are the same.
fn without_repeats(mut column: Vec<Arg<'_>>) -> Vec<Arg<'_>> {
    if let Some((first, others)) = column.split_first()
        && others.iter().all(|other| other == first)
    {
        column.truncate(1);
    }
    column
}

/// Whether the server writes floats into events.
fn prints_floats(plan: &Plan, step: &Step) -> bool {
    returns_row(plan, step) && step.table.columns().iter().any(|column| column.kind == Type::Float)
}

fn list_args(step: &Step) -> Vec<Arg<'_>> {
    lists(step).into_iter().map(|(values, kind)| Arg::Many(kind, values.iter().collect())).collect()
}

/// What came of a plan.
pub(crate) enum PlanOutcome {
    /// It has its outcome.
    Decided(Commit),
    /// It inserted its row, at this time. The caller of the plan computes the rest ([`PlanOutcome::commit`]), so that the writer does
    /// not do it while others wait.
    Inserted { logged: Option<Position>, at: Time },
}

impl PlanOutcome {
    fn applied(applied: Applied) -> PlanOutcome {
        PlanOutcome::Decided(Commit::Applied(applied))
    }

    /// Where the plan's records stand.
    pub(crate) fn positions(&self) -> impl Iterator<Item = Position> {
        let (first, also) = match self {
            PlanOutcome::Decided(Commit::Applied(Applied { record: Some(record), .. })) => {
                (record.position, record.also_at.as_slice())
            }
            PlanOutcome::Decided(_) => (None, [].as_slice()),
            PlanOutcome::Inserted { logged, .. } => (*logged, [].as_slice()),
        };
        first.into_iter().chain(also.iter().copied())
    }

    /// The outcome of the plan.
    pub(crate) fn commit(self, plan: &Plan) -> Commit {
        match self {
            PlanOutcome::Decided(commit) => commit,
            PlanOutcome::Inserted { logged, at } => {
                let step = plan.steps().first().filter(|_| returned(plan));
                let row = step.and_then(|step| eval::made(plan, step, at));
                Commit::Applied(done(plan, Verb::Put, logged, at, row))
            }
        }
    }
}

impl Compiled<'_> {
    /// The outcome of each plan of the statement: `None` where it did nothing.
    pub(crate) fn outcomes(
        &self,
        rows: &[tokio_postgres::Row],
    ) -> Result<Vec<Option<PlanOutcome>>, StoreError> {
        if let Some(counts) = &self.counts {
            return self.inserted(counts, rows);
        }
        let mut outcomes: Vec<Option<PlanOutcome>> = self.plans.iter().map(|_| None).collect();
        for answer in rows {
            let number = ordinal_at(answer, 0)?;
            let (Some(plan), Some(outcome)) = (self.plans.get(number), outcomes.get_mut(number)) else {
                return Err(bug!("an answer for plan {number} of {}", self.plans.len()).into());
            };
            *outcome = Some(self.applied(plan, answer)?);
        }
        Ok(outcomes)
    }

    fn applied(&self, plan: &Plan, answer: &tokio_postgres::Row) -> Result<PlanOutcome, StoreError> {
        let Some(step) = plan.steps().first() else {
            return Err(bug!("a compiled plan without steps").into());
        };
        let (mut at, mut logged) = (self.now, None);
        if plan.entry().is_some() {
            at = Some(time_at(answer, 2, "statehouse_log")?);
            let offset = count_at(answer, 1, "statehouse_log")?;
            logged = Some(Position { partition: partition(plan, self.partitions), offset });
        } else if at.is_none() && inserts(step) {
            at = Some(time_at(answer, 1, "the answer")?);
        }
        // Without a record and an insert the time is not used.
        let at = at.unwrap_or(Time::MIN);
        if inserts(step) {
            return Ok(PlanOutcome::Inserted { logged, at });
        }
        let mut row: Option<Row> = None;
        if returns_row(plan, step) {
            let first = if plan.entry().is_some() { 3 } else { 1 };
            row = Some(row_at(answer, first, &step.table, plan.tenant())?);
        }
        Ok(PlanOutcome::applied(done(plan, step.verb, logged, at, row)))
    }
}

/// Whether the caller or an event needs the row.
fn returned(plan: &Plan) -> bool {
    plan.returns_rows() || takers(plan).next().is_some()
}

/// The outcome of a plan, given what is known of its record and the row that it wrote or deleted.
fn done(plan: &Plan, verb: Verb, logged: Option<Position>, at: Time, row: Option<Row>) -> Applied {
    let record = plan.entry().map(|entry| {
        let events = entry.events.iter().map(|draft| eval::finish_event(draft, |_| row.as_ref())).collect();
        Record { position: logged, ..Record::of(plan, at, events) }
    });
    let rows = match (plan.returns_rows(), verb) {
        (false, _) => Vec::new(),
        (true, Verb::Put) => vec![row],
        (true, _) => vec![None],
    };
    Applied { record, rows, repeated: false }
}
