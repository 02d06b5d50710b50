//! Plans of one step as one statement: the guarded write, the log's head and the log record together.
//!
//! The statement is safe by construction: **it applies a plan, or it does nothing for it.** It need not know why it did
//! nothing; then the plan is decided as every other plan is ([`crate::batch`]), on locked rows and by
//! [`statehouse_store::eval`]. So a compiled condition may be too strict, but never too lax, and these things are
//! left out or made strict on purpose:
//! - sums of floats and times, whose ranges are narrower here than in SQL; asserts; removals of rows that may be
//!   missing: not compiled;
//! - sums of ints compile: where they overflow the server raises an error, and nothing is done;
//! - limits of size: see [`crate::room`].
//!
//! Why it is right under READ COMMITTED: an UPDATE or DELETE that had to wait for a row decides its condition anew on
//! the row as it is then, and the condition looks at that row alone. The head of the log's partition is taken
//! after the row, and given back at the end of the transaction: records of one partition get their positions in
//! the order of the commits. `Now` is read once, after the row is locked: where it is only written to one column, in its
//! place there, which is computed anew after a wait; otherwise behind a lock that is taken first.
//!
//! **One plan** makes a statement that is a transaction by itself, and nothing has to be sent before or after it: what
//! has to be set for the transaction and is not ([`Set`]), it sets itself, first of all. **Several** updates, deletes or inserts of one
//! [shape](crate::shape), on different rows, make one statement that takes their constants as arrays. It writes the rows
//! in the order of their keys and takes the heads in the order of the partitions. So does **one plan of many steps** of one
//! shape ([`uniform`]). What **inserts** need not ask the server for is a matter of its own ([`mod@inserts`]).

mod inserts;
mod taken;
mod uniform;

pub(crate) use self::taken::Takes;
pub(crate) use self::uniform::{Way, is_uniform};

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::guard::Comparison;
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{
    Applied, Commit, Expr, Guard, Operand, Plan, Position, Record, Row, Step, StoreError, Table, Time, Type,
    Value, eval,
};

use self::inserts::Tally;
use crate::ddl::Names;
use crate::link::Call;
use crate::options::Options;
use crate::order;
use crate::room;
use crate::shape::{
    Constant, ROW_MARK, are_alike, compared_type, compilable, constants, has_constant, inserts, lists,
    partition, returns_row, takers,
};
use crate::sql::{Arg, all_columns, int_at, literal, name, placeholder, row_at, time_at, type_name};
use crate::tenancy::Scope;

/// What plans are compiled with.
#[derive(Clone, Copy)]
pub(crate) struct Compiler<'n> {
    pub names: &'n Names,
    pub partitions: u32,
    /// The caller's clock, if it is not the server's.
    pub now: Option<Time>,
    pub lock_timeout_ms: u128,
    /// Whether the server has to be told for whom a statement works.
    pub says_tenant: bool,
    /// The role that a statement has to be run under, if it is not the one that connects.
    pub role: Option<&'n str>,
    /// What was written before.
    pub texts: &'n Texts,
}

/// The statements that were written last, each with a plan of its shape. To write one again would take longer than
/// everything else that a lone caller has to wait for on this side.
#[derive(Default)]
pub(crate) struct Texts(Mutex<VecDeque<(Plan, Form, Arc<str>)>>);

/// What a statement depends on beside the shape of its plans.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Whether it is of several plans.
    several: bool,
    set: Set,
    /// That of many steps.
    way: Option<Way>,
}

impl Texts {
    /// Shapes come from actions, of which there are few.
    const MOST: usize = 128;

    /// The statement of a plan's shape, written by `write` if it is not there.
    fn of(&self, plan: &Plan, form: Form, write: impl FnOnce() -> Option<String>) -> Option<Arc<str>> {
        let texts = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(like, of, _): &&(Plan, Form, _)| *of == form && are_alike(like, plan);
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

/// What holds already when a statement begins. The rest it sets itself, which takes the server as long as a row takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// Nothing is known of the session.
    Nothing,
    /// The session has the settings of a writer ([`LOOKUPS`], and the longest wait for a lock), but works for nobody yet.
    Session,
    /// The transaction was opened with words that say all of it.
    Transaction,
}

/// Plans as one statement.
pub(crate) struct Compiled<'p> {
    /// In the order of the statement's arrays.
    plans: Vec<&'p Plan>,
    /// Of each plan, where it stood when it was given.
    pub places: Vec<usize>,
    /// Of several that insert: what becomes of their places in the log.
    tally: Option<Tally>,
    partitions: u32,
    /// The caller's clock, if it is not the server's.
    now: Option<Time>,
    pub call: Call<'p>,
}

/// Inserts in one statement, at most: if one of the rows is there already, all of them have to be decided anew.
const INSERTS_MAX: usize = 64;
/// So many plans of one shape are worth a transaction without those of other shapes that wait with them.
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

/// The words that set [`LOOKUPS`] for one transaction.
pub(crate) fn lookup_words() -> String {
    LOOKUPS.iter().map(|(name, value)| format!("; set local {name} = {value}")).collect()
}

impl<'n> Compiler<'n> {
    pub(crate) fn new(
        names: &'n Names,
        texts: &'n Texts,
        options: &'n Options,
        partitions: u32,
    ) -> Compiler<'n> {
        let now = options.clock.as_ref().map(|clock| clock.now());
        let (lock_timeout_ms, says_tenant) = (options.lock_timeout.as_millis(), options.row_level_security);
        Compiler { names, partitions, now, lock_timeout_ms, says_tenant, role: options.role(), texts }
    }

    /// Compiles one plan, if it can be.
    pub(crate) fn one<'p>(&self, plan: &'p Plan, events: Option<&'p str>, set: Set) -> Option<Compiled<'p>> {
        let step = compilable(plan)?;
        let write = || Statement::new(self, plan, step, Source::Parameters, set).text();
        let text = self.texts.of(plan, Form { several: false, set, way: None }, write)?;
        let mut args = vec![Arg::Text(plan.tenant().as_str())];
        args.extend(list_args(step));
        args.extend(
            constants(plan, step, events, self.now, self.partitions).into_iter().map(|constant| constant.arg),
        );
        let call = Call::new(text, args);
        let (partitions, now) = (self.partitions, self.now);
        Some(Compiled { plans: vec![plan], places: vec![0], tally: None, partitions, now, call })
    }

    /// Compiles several plans, if most of them can be, are of the first one's shape, and write different rows, of which
    /// it is clear whether they are to be there. The others are left out. `events` are those that are written already, of
    /// each plan.
    pub(crate) fn several<'p>(
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
        let text = self.texts.of(first, Form { several: true, set, way: None }, || {
            Statement::new(self, first, step, Source::Rows { kinds: &kinds }, set).text()
        })?;
        let mut args = list_args(step);
        args.push(Arg::Texts(ordered.values().map(|(_, plan, _)| plan.tenant().as_str()).collect()));
        let mut columns: Vec<Vec<Arg<'p>>> = kinds.iter().map(|_| Vec::with_capacity(given.len())).collect();
        for constants in given {
            for (column, constant) in columns.iter_mut().zip(constants) {
                column.push(constant.arg);
            }
        }
        args.extend(kinds.iter().zip(columns).map(|(kind, column)| Arg::List(kind, shortened(column))));
        if set != Set::Transaction && self.says_tenant {
            args.push(Arg::Own(Value::Text(
                Scope::of_all(ordered.values().map(|(_, plan, _)| *plan)).names(),
            )));
        }
        let (places, plans): (Vec<usize>, Vec<&'p Plan>) =
            ordered.into_values().map(|(number, plan, _)| (number, plan)).unzip();
        let (partitions, now) = (self.partitions, self.now);
        let tally = inserts(step).then(|| Tally::of(&plans, partitions));
        args.extend(tally.iter().filter(|_| first.entry().is_some()).flat_map(Tally::args));
        let call = Call::new(text, args);
        Some(Compiled { plans, places, tally, partitions, now, call })
    }
}

/// Only the first, if all are the same.
fn shortened(mut column: Vec<Arg<'_>>) -> Vec<Arg<'_>> {
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
pub(crate) enum Settled {
    /// It has its outcome.
    Decided(Commit),
    /// It inserted its row, at a time by the clock that its statement went by. The rest is for whoever waits for it to make
    /// ([`Settled::commit`]), beside the others and not while they wait.
    Inserted { logged: Option<Position>, at: Time },
}

impl Settled {
    fn applied(applied: Applied) -> Settled {
        Settled::Decided(Commit::Applied(applied))
    }

    /// Where the plan's records stand.
    pub(crate) fn positions(&self) -> impl Iterator<Item = Position> {
        let (first, also) = match self {
            Settled::Decided(Commit::Applied(Applied { record: Some(record), .. })) => {
                (record.position, record.also_at.as_slice())
            }
            Settled::Decided(_) => (None, [].as_slice()),
            Settled::Inserted { logged, .. } => (*logged, [].as_slice()),
        };
        first.into_iter().chain(also.iter().copied())
    }

    /// The outcome of the plan.
    pub(crate) fn commit(self, plan: &Plan) -> Commit {
        match self {
            Settled::Decided(commit) => commit,
            Settled::Inserted { logged, at } => {
                let step = plan.steps().first().filter(|_| returned(plan));
                let row = step.and_then(|step| eval::made(plan, step, at));
                Commit::Applied(done(plan, Verb::Put, logged, at, row))
            }
        }
    }
}

impl Compiled<'_> {
    /// What came of each plan of the statement: `None` where it did nothing.
    pub(crate) fn outcomes(&self, rows: &[tokio_postgres::Row]) -> Result<Vec<Option<Settled>>, StoreError> {
        if let Some(tally) = &self.tally {
            return self.inserted(tally, rows);
        }
        let mut outcomes: Vec<Option<Settled>> = self.plans.iter().map(|_| None).collect();
        for answer in rows {
            let number = usize::try_from(int_at(answer, 0, "unnest")? - 1).unwrap_or(usize::MAX);
            if let (Some(plan), Some(outcome)) = (self.plans.get(number), outcomes.get_mut(number)) {
                *outcome = Some(self.applied(plan, answer)?);
            }
        }
        Ok(outcomes)
    }

    fn applied(&self, plan: &Plan, answer: &tokio_postgres::Row) -> Result<Settled, StoreError> {
        let Some(step) = plan.steps().first() else {
            return Err(StoreError::corrupt("the answer", "it is to a plan without steps"));
        };
        let (mut at, mut logged) = (self.now, None);
        if plan.entry().is_some() {
            at = Some(time_at(answer, 2, "statehouse_log")?);
            let offset = u64::try_from(int_at(answer, 1, "statehouse_log")?).unwrap_or_default();
            logged = Some(Position { partition: partition(plan, self.partitions), offset });
        } else if at.is_none() && inserts(step) {
            at = Some(time_at(answer, 1, "the answer")?);
        }
        let at = at.unwrap_or(Time::MIN);
        if inserts(step) {
            return Ok(Settled::Inserted { logged, at });
        }
        let mut row: Option<Row> = None;
        if returns_row(plan, step) {
            let first = if plan.entry().is_some() { 3 } else { 1 };
            row = Some(row_at(answer, first, &step.table, plan.tenant())?);
        }
        Ok(Settled::applied(done(plan, step.verb, logged, at, row)))
    }
}

/// Whether somebody is told of the row.
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

/// Where the constants of a statement come from.
#[derive(Clone, Copy)]
enum Source<'k> {
    /// Of one plan: parameters, behind the tenant and the lists.
    Parameters,
    /// Of several: columns of `k`, which are of these types.
    Rows { kinds: &'k [&'static str] },
}

/// Whether the row that an expression looks at is there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It is, as `t`.
    Row,
    /// It is not: all its columns are null.
    Nothing,
}

/// A statement being written. Constants are named in the order in which [`constants`] lists them.
struct Statement<'n, 'p> {
    compiler: &'n Compiler<'n>,
    plan: &'p Plan,
    step: &'p Step,
    source: Source<'n>,
    /// Sets what does not hold yet, and gives back the tenant's name or how many plans there are.
    scope: Option<String>,
    /// Whether it is given the tenants that it works for, behind the constants of several plans.
    says_tenants: bool,
    lists: usize,
    /// How many parameters stand before the constants of one plan.
    before: usize,
    /// How many constants, and how many lists, have been named.
    named: usize,
    lists_named: usize,
    /// Whether the server's clock is read ahead, for several uses.
    reads_clock: bool,
    /// The column that is set to the server's clock, if that is the clock's only use. Then it is read in its place,
    /// where an update that had to wait for the row reads it again.
    stamped: Option<&'p str>,
}

/// The only column that a step sets to the clock, if nothing else in the step looks at it.
fn stamped(step: &Step) -> Option<&str> {
    let is_now = |operand: &Operand| matches!(operand, Operand::Now { .. });
    let mut guarded = false;
    step.guard.leaves(&mut |leaf| {
        if let Guard::Compare(left, _, right) = leaf {
            guarded |= is_now(left) || is_now(right);
        }
    });
    let mut set = step.assignments.iter().filter(|assignment| assignment.expr.operands().any(is_now));
    let only = set.next().filter(|_| !guarded && set.next().is_none())?;
    matches!(only.expr, Expr::Is(Operand::Now { plus_micros: 0 })).then_some(only.column.as_str())
}

/// The first thing that a statement does, unless all of it holds already: it bounds its waits for locks, says for whom it
/// works where the server asks, and gives back the tenant's name, or how many plans there are. Since no row can be looked
/// for without that, nothing happens before.
fn scope(compiler: &Compiler<'_>, plan: &Plan, step: &Step, source: Source<'_>, set: Set) -> Option<String> {
    let mut local = "true".to_owned();
    let mut say = |name: &str, value: &str| {
        local = format!("set_config('{name}', {value}, {local}) is not null");
    };
    if set == Set::Nothing {
        say("lock_timeout", &format!("'{}'", compiler.lock_timeout_ms));
        if prints_floats(plan, step) {
            // Floats in events have all their digits, whatever the server is set to.
            say("extra_float_digits", "'1'");
        }
    }
    if set != Set::Transaction && compiler.says_tenant {
        let tenants = match source {
            Source::Parameters => "$1".to_owned(),
            Source::Rows { kinds } => placeholder(lists(step).len() + 1 + kinds.len()),
        };
        say("statehouse.tenants", &tenants);
        // A pooler may have let a session in with its role and then have given it another server process.
        if let Some(role) = compiler.role {
            local = format!("{local} and current_user = {}", literal(&Value::from(role)));
        }
    }
    let known = match source {
        Source::Parameters => "$1::text end as tenant".to_owned(),
        Source::Rows { .. } => {
            format!("cardinality({}::text[]) else 0 end as plans", placeholder(lists(step).len()))
        }
    };
    (local != "true").then(|| format!("case when {local} then {known}"))
}

/// The columns of a record that come from the plan, in the order of [`constants`].
const RECORD: [&str; 6] = ["_partition", "_operation", "_resource", "_key", "_fingerprint", "_events"];

impl<'n, 'p> Statement<'n, 'p> {
    fn new(
        compiler: &'n Compiler<'n>,
        plan: &'p Plan,
        step: &'p Step,
        source: Source<'n>,
        set: Set,
    ) -> Statement<'n, 'p> {
        let lists = lists(step).len();
        let scope = scope(compiler, plan, step, source, set);
        // An insert does not wait for its row, and its record may need the reading too.
        let stamped = stamped(step).filter(|_| compiler.now.is_none() && !inserts(step));
        Statement {
            compiler,
            plan,
            step,
            source,
            scope,
            says_tenants: set != Set::Transaction && compiler.says_tenant,
            lists,
            before: 1 + lists,
            named: 0,
            lists_named: 0,
            reads_clock: false,
            stamped,
        }
    }

    /// The name of the next constant.
    fn constant(&mut self) -> String {
        self.named += 1;
        match self.source {
            Source::Parameters => placeholder(self.before + self.named - 1),
            Source::Rows { .. } => format!("k.c{}", self.named),
        }
    }

    fn tenant(&self) -> &'static str {
        match self.source {
            Source::Parameters if self.scope.is_some() => "(select tenant from scope)",
            Source::Parameters => "$1::text",
            Source::Rows { .. } => "k.tenant",
        }
    }

    /// `(select p.tenant, ($2::bigint[])[p._place], … from unnest($1::text[]) … limit …) as k(tenant, c1, …, _place)`: the
    /// plans, one a row. Places in arrays are quicker than so many arrays unnested side by side, each into a store of its
    /// own. An array of one stands for as many as there are plans ([`shortened`]): most of what plans of one shape bring along
    /// is the same, and to look far into an array of texts means to look at all before. The limit is no limit: it makes the planner expect so few rows that it looks up each of them, in their
    /// order, whatever the size of the table is when the statement is planned.
    fn rows(&self, kinds: &[&str]) -> String {
        self.rows_of(kinds, 0..kinds.len(), &self.limit())
    }

    /// No plan is looked at before the transaction is set.
    fn limit(&self) -> String {
        match self.scope {
            Some(_) => "\nlimit (select plans from scope)".to_owned(),
            None => format!("\nlimit cardinality({}::text[])", placeholder(self.lists)),
        }
    }

    /// The same with some of the constants.
    fn rows_of(&self, kinds: &[&str], which: std::ops::Range<usize>, limit: &str) -> String {
        let tenants = placeholder(self.lists);
        let some = || kinds.iter().enumerate().filter(|(place, _)| which.contains(place));
        let constants = some().map(|(place, kind)| {
            let array = format!("{}::{kind}[]", placeholder(self.lists + 1 + place));
            format!("({array})[least(p._place, cardinality({array}))], ")
        });
        let columns = some().map(|(place, _)| format!("c{}, ", place + 1));
        format!(
            "(\nselect p.tenant, {}p._place\n\
             from unnest({tenants}::text[]) with ordinality as p(tenant, _place){limit}\n\
             ) as k(tenant, {}_place)",
            constants.collect::<String>(),
            columns.collect::<String>(),
        )
    }

    fn text(mut self) -> Option<String> {
        let step = self.step;
        if inserts(step) {
            return self.insert_text();
        }
        let returns_row = returns_row(self.plan, step);
        let takers: Vec<usize> = takers(self.plan).collect();
        let bounds = room::bounds(step, takers.len())?;
        // In the order of the constants.
        let key = self.key_condition();
        let operands: Vec<Vec<String>> =
            step.assignments.iter().map(|a| self.operand_names(&a.expr)).collect();
        let mut condition = String::new();
        for conjunct in step.guard.conjuncts() {
            condition.push_str(" and ");
            condition.push_str(&self.guard(conjunct));
        }
        bounds.iter().for_each(|bound| condition.extend([" and ", bound]));
        let record: Vec<String> = match self.plan.entry() {
            Some(_) => RECORD.iter().map(|_| self.constant()).collect(),
            None => Vec::new(),
        };
        let at = match (self.compiler.now, self.stamped) {
            (Some(_), _) if !record.is_empty() => format!("{}::timestamptz", self.constant()),
            (_, Some(column)) => format!("t.{}", name(column)),
            _ if self.reads_clock => "(select now from clock)".to_owned(),
            _ => "clock_timestamp()".to_owned(),
        };
        let write = self.write(&key, &operands, &condition, returns_row, &record, &at);
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.scope.as_ref().map(|scope| format!("scope as materialized (\nselect {scope}\n)")));
        if self.reads_clock {
            parts.push(self.clock(&key));
        }
        if record.is_empty() {
            let lead = if parts.is_empty() { String::new() } else { format!("with {}\n", parts.join(", ")) };
            return Some(format!("{lead}{write}"));
        }
        parts.push(format!("written as (\n{write}\n)"));
        let (place, position, from) = match self.source {
            Source::Parameters => {
                let known = record.last().map(|events| format!("{events}::text")).unwrap_or_default();
                parts.extend(self.append_one(&self.events(&known, &takers), &record));
                ("1::bigint", "moved.head", "written, moved")
            }
            Source::Rows { .. } => {
                parts.extend(self.append_several(&takers));
                ("written._place", "written._position", "ranked as written")
            }
        };
        let columns =
            if returns_row { format!(", {}", all_columns(&step.table, "written")) } else { String::new() };
        Some(format!(
            "with {}\nselect {place}, {position}, written._at{columns}\nfrom {from}",
            parts.join(", ")
        ))
    }

    /// One reading of the server's clock, after the rows are locked.
    fn clock(&self, key: &str) -> String {
        let reading = "clock as materialized (\nselect clock_timestamp() as now";
        let table = self.compiler.names.table(self.step.table.name());
        let mut lock = format!("select from {table} as t where {key} for update");
        if let Source::Rows { kinds } = self.source {
            lock = format!("select from {} cross join lateral ({lock}) as row", self.rows(kinds));
        }
        format!("{reading}\nfrom (select count(*) from ({lock}) as rows) as locked\n)")
    }

    fn key_condition(&mut self) -> String {
        let step = self.step;
        let mut parts = vec![format!("t.{TENANT} = {}", self.tenant())];
        for column in step.table.key_columns() {
            parts.push(format!("t.{} = {}", name(&column.name), self.constant()));
        }
        parts.join(" and ")
    }

    fn write(
        &self,
        key: &str,
        operands: &[Vec<String>],
        condition: &str,
        returns_row: bool,
        record: &[String],
        at: &str,
    ) -> String {
        let step = self.step;
        let table = self.compiler.names.table(step.table.name());
        let mut returned: Vec<String> = Vec::new();
        let (mut from, mut using) = (String::new(), String::new());
        match self.source {
            Source::Parameters if record.is_empty() => returned.push("1::bigint as _place".to_owned()),
            Source::Parameters => {}
            Source::Rows { kinds } => {
                returned.push("k._place".to_owned());
                if !record.is_empty() {
                    returned.push("k.tenant as _tenant".to_owned());
                    let columns = record.iter().zip(RECORD);
                    returned.extend(columns.map(|(constant, column)| format!("{constant} as {column}")));
                }
                let rows = self.rows(kinds);
                (from, using) = (format!("\nfrom {rows}"), format!("\nusing {rows}"));
            }
        }
        returned.extend((!record.is_empty()).then(|| format!("{at} as _at")));
        returned.extend(returns_row.then(|| all_columns(&step.table, "t")));
        let returning = returned.join(", ");
        match (step.verb, step.expect) {
            (Verb::Put, Expect::Present) => {
                let set = self.changes(operands, false);
                format!("update {table} as t\nset {set}{from}\nwhere {key}{condition}\nreturning {returning}")
            }
            (Verb::Put, _) => {
                let (columns, values) = self.new_row(operands);
                let set = self.changes(operands, true);
                let condition = condition.strip_prefix(" and ").map(|text| format!("\nwhere {text}"));
                format!(
                    "insert into {table} as t ({columns})\nvalues ({values})\non conflict ({}) do update\n\
                     set {set}{}\nreturning {returning}",
                    self.key_columns(),
                    condition.unwrap_or_default(),
                )
            }
            _ => format!("delete from {table} as t{using}\nwhere {key}{condition}\nreturning {returning}"),
        }
    }

    /// The columns of the primary key, as they stand in a list.
    fn key_columns(&self) -> String {
        let columns = self.step.table.key_columns().iter().map(|column| name(&column.name));
        std::iter::once(TENANT.to_owned()).chain(columns).collect::<Vec<_>>().join(", ")
    }

    /// The events of a record, with the row taken in where that is asked for.
    fn events(&self, known: &str, takers: &[usize]) -> String {
        match takers {
            [] => format!("{known}::json"),
            _ => format!("replace({known}, '{ROW_MARK}', {})::json", row_json(&self.step.table)),
        }
    }

    /// Takes the head of the partition and appends the record.
    fn append_one(&self, events: &str, record: &[String]) -> Vec<String> {
        let (heads, log) = (self.compiler.names.heads(), self.compiler.names.log());
        let [partition, operation, resource, key, fingerprint, _] = record else { return Vec::new() };
        vec![
            format!(
                "moved as (\nupdate {heads} as h\nset head = h.head + 1\n\
                 where h.partition = {partition} and exists (select from written)\nreturning h.head\n)"
            ),
            format!(
                "logged as (\ninsert into {log} (partition, position, tenant, operation, resource, key, at, \
                 fingerprint, fate, events)\nselect {partition}, moved.head, {}, {operation}::text, \
                 {resource}::text, {key}::text, written._at, {fingerprint}::text, 'applied', {events}\nfrom written, moved\n)",
                self.tenant(),
            ),
        ]
    }

    /// Takes the heads of the partitions and appends the records. With nested loops over index lookups, which is all
    /// that the planner may use, the heads are taken in the order of the partitions.
    fn append_several(&self, takers: &[usize]) -> Vec<String> {
        let (heads, log) = (self.compiler.names.heads(), self.compiler.names.log());
        let events = self.events("written._events", takers);
        vec![
            format!(
                "moved as (\nupdate {heads} as h\nset head = h.head + counted.count\nfrom (\n\
                 select _partition, count(*) as count\nfrom written\ngroup by _partition\n\
                 order by _partition\noffset 0\n) as counted\nwhere h.partition = counted._partition\n\
                 returning h.partition, h.head - counted.count as base\n)"
            ),
            "ranked as materialized (\nselect written.*, moved.base + row_number() over \
             (partition by written._partition order by written._place) as _position\n\
             from written join moved on moved.partition = written._partition\n)"
                .to_owned(),
            format!(
                "logged as (\ninsert into {log} (partition, position, tenant, operation, resource, key, at, \
                 fingerprint, fate, events)\nselect written._partition, written._position, written._tenant, \
                 written._operation, written._resource, written._key, written._at, written._fingerprint, \
                 'applied', {events}\nfrom ranked as written\n)"
            ),
        ]
    }

    /// The names of the constants of an expression.
    fn operand_names(&mut self, expr: &Expr) -> Vec<String> {
        let now = self.compiler.now;
        let reads = || expr.operands().any(|operand| matches!(operand, Operand::Now { .. }));
        self.reads_clock |= now.is_none() && self.stamped.is_none() && reads();
        expr.operands()
            .filter(|operand| has_constant(operand, now))
            .map(|operand| self.operand_constant(operand))
            .collect::<Vec<_>>()
    }

    /// The assignments to a row that is there. Where the same statement inserts it, constants have been said already.
    fn changes(&self, operands: &[Vec<String>], inserts_too: bool) -> String {
        let step = self.step;
        let mut parts = Vec::with_capacity(step.assignments.len() + 1);
        for (assignment, names) in step.assignments.iter().zip(operands) {
            let column = name(&assignment.column);
            let value = match &assignment.expr {
                Expr::Is(Operand::Value(_)) if inserts_too => format!("excluded.{column}"),
                expr => self.expression(expr, names, &assignment.column, Found::Row),
            };
            parts.push(format!("{column} = {value}"));
        }
        parts.push(format!("{VERSION} = t.{VERSION} + 1"));
        parts.join(", ")
    }

    fn expression(&self, expr: &Expr, names: &[String], column: &str, found: Found) -> String {
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

    fn guard(&mut self, guard: &Guard) -> String {
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

    fn joined(&mut self, parts: &[Guard], with: &str) -> String {
        let parts: Vec<String> = parts.iter().map(|part| self.guard(part)).collect();
        format!("({})", parts.join(with))
    }

    /// Lists stand before the constants, behind the tenant of one plan.
    fn listed(&mut self, column: &str, operator: &str) -> String {
        let kind = self.step.table.type_of(column).map_or("text", type_name);
        let first = usize::from(matches!(self.source, Source::Parameters));
        let list = placeholder(first + self.lists_named);
        self.lists_named += 1;
        format!("t.{} {operator} ({list}::{kind}[])", name(column))
    }

    fn comparison(&mut self, left: &Operand, comparison: Comparison, right: &Operand) -> String {
        let kind = compared_type(&self.step.table, left, right);
        let ordered = !matches!(comparison, Comparison::Eq | Comparison::Ne);
        // Equal text is equal in every collation that a database can have; its order is not.
        let collation = if ordered && kind == Type::Text { " collate \"C\"" } else { "" };
        let (left, right) = (self.compared(left, kind), self.compared(right, kind));
        format!("{left}{collation} {} {right}", comparison.symbol())
    }

    fn compared(&mut self, operand: &Operand, kind: Type) -> String {
        self.reads_clock |= self.compiler.now.is_none() && matches!(operand, Operand::Now { .. });
        let constant = has_constant(operand, self.compiler.now).then(|| self.operand_constant(operand));
        operand_text(operand, constant.as_deref(), kind, Found::Row)
    }

    /// The constant of an operand, by its name. A distance from the server's clock is named with the clock. Within a
    /// century of it no time leaves the range of times, so nothing has to be clamped.
    fn operand_constant(&mut self, operand: &Operand) -> String {
        let constant = self.constant();
        match (operand, self.compiler.now) {
            (Operand::Now { .. }, None) => format!("(select now from clock) + {constant}::interval"),
            _ => constant,
        }
    }
}

/// An operand, given the name of its constant if it has one.
fn operand_text(operand: &Operand, constant: Option<&str>, kind: Type, found: Found) -> String {
    match (operand, found) {
        (Operand::Column(column), Found::Row) => format!("t.{}", name(column)),
        (Operand::Column(_), Found::Nothing) => format!("null::{}", type_name(kind)),
        (Operand::Coalesce(column, _), Found::Row) => {
            format!("coalesce(t.{}, {})", name(column), constant.unwrap_or("null"))
        }
        (Operand::Coalesce(..), Found::Nothing) | (Operand::Value(_), _) => {
            constant.unwrap_or("null").to_owned()
        }
        (Operand::Now { .. }, _) => constant.unwrap_or("(select now from clock)").to_owned(),
    }
}

/// The text of a written row as [`Row::to_json`] has it.
fn row_json(table: &Table) -> String {
    let columns = table.columns().iter().map(|column| {
        let content = format!("written.{}", name(&column.name));
        let json = match column.kind {
            Type::Time => json_time(&content),
            Type::Bytes => format!("translate(encode({content}, 'base64'), e'\\n', '')"),
            _ => content,
        };
        (column.name.as_str(), json)
    });
    let version = (VERSION, format!("written.{VERSION}"));
    json_object(&columns.chain([version]).collect::<Vec<_>>())
}

/// A time as it stands in JSON.
fn json_time(time: &str) -> String {
    format!("to_char({time} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')")
}

/// The text of an object of these fields.
fn json_object(fields: &[(&str, String)]) -> String {
    /// A function takes at most 100 arguments.
    const FIELDS_MAX: usize = 40;
    let object = |fields: &[(&str, String)]| {
        let fields: Vec<String> =
            fields.iter().map(|(name, content)| format!("'{name}', {content}")).collect();
        format!("json_build_object({})::text", fields.join(", "))
    };
    // One goes on where the one before would end.
    let joined = |text: String, more: String| format!("left({text}, -1) || ', ' || substr({more}, 2)");
    fields.chunks(FIELDS_MAX).map(object).reduce(joined).unwrap_or_else(|| "'{}'".to_owned())
}
