//! A plan of one step as one statement: the guarded write, the log's head and the log record together.
//!
//! The statement is safe by construction: **it applies the plan, or it does nothing.** It need not know why it did
//! nothing; then the plan is decided as every other plan is ([`crate::batch`]), on locked rows and by
//! [`statehouse_store::eval`]. So a compiled condition may be too strict, but never too lax, and these things are
//! left out or made strict on purpose:
//! - sums of floats and times, whose ranges are narrower here than in SQL; asserts; removals of rows that may be
//!   missing: not compiled;
//! - sums of ints compile: where they overflow the server raises an error, and nothing is done;
//! - a row's size is limited, and what the row holds already is not known when the statement is built: the statement
//!   bounds the length of what it keeps, generously, and leaves rows near the limit to the exact way.
//!
//! Why it is right under READ COMMITTED: an UPDATE or DELETE that had to wait for a row decides its condition anew on
//! the row as it is then, and the condition looks at that row alone. The head of the log's partition is taken
//! after the row, and given back at the end of the transaction: records of one partition get their positions in
//! the order of the commits. `Now` is read once, after the row is locked if the step looks at it.
//!
//! The statement is a transaction by itself, and nothing has to be sent before or after it: what has to be set for the
//! transaction, it sets itself, first of all.

use statehouse_store::guard::Comparison;
use statehouse_store::log::partition_of;
use statehouse_store::plan::{Assignment, Expect, Verb};
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{
    Applied, Entry, Expr, Guard, Operand, Plan, Position, Record, Row, Step, StoreError, Table, Time, Type,
    Value, eval,
};

use crate::ddl::Names;
use crate::link::Call;
use crate::room::Room;
use crate::sql::{Arg, all_columns, int_at, name, placeholder, row_at, time_at, type_name};

/// A plan as one statement.
pub(crate) struct Compiled<'p> {
    plan: &'p Plan,
    partition: u32,
    returns_row: bool,
    pub call: Call<'p>,
}

/// Compiles a plan, if it is one of those that can be. `now` is the caller's clock, if it is not the server's.
pub(crate) fn compile<'p>(
    names: &Names,
    plan: &'p Plan,
    partitions: u32,
    now: Option<Time>,
    lock_timeout_ms: u128,
) -> Option<Compiled<'p>> {
    let [step] = plan.steps() else { return None };
    let room = Room::of(plan, step)?;
    if !is_compilable(step) {
        return None;
    }
    let takes_row = plan.entry().is_some_and(|entry| entry.events.iter().any(|draft| draft.row_of.is_some()));
    let returns_row = takes_row || (step.verb == Verb::Put && plan.returns_rows());
    let partition =
        plan.entry().map_or(0, |entry| partition_of(plan.tenant(), &entry.resource, &entry.key, partitions));
    let prints_floats = takes_row && step.table.columns().iter().any(|column| column.kind == Type::Float);
    let scope = scope(lock_timeout_ms, prints_floats);
    let mut statement = Statement { names, plan, step, now, scope, args: Vec::new(), reads_clock: false };
    let text = statement.text(room, partition, returns_row);
    Some(Compiled { plan, partition, returns_row, call: Call::new(text, statement.args) })
}

/// The first thing that the statement does: it bounds its waits for locks, says for whom it works, and gives the
/// tenant's name back. Since no row can be looked for without that name, nothing happens before this.
fn scope(lock_timeout_ms: u128, prints_floats: bool) -> String {
    let mut local = format!("set_config('lock_timeout', '{lock_timeout_ms}', true) is not null");
    if prints_floats {
        // Floats in events have all their digits, whatever the server is set to.
        local = format!("set_config('extra_float_digits', '1', {local}) is not null");
    }
    format!("scope as materialized (\nselect set_config('statehouse.tenants', $1, {local}) as tenant\n)")
}

fn is_compilable(step: &Step) -> bool {
    let put = step.verb == Verb::Put;
    let delete = step.verb == Verb::Delete && step.expect == Expect::Present;
    let exact = step.assignments.iter().all(|assignment| match assignment.expr {
        Expr::Is(_) => true,
        Expr::Add(..) | Expr::Subtract(..) => step.table.type_of(&assignment.column) == Some(Type::Int),
    });
    // The server looks for nulls in what would be inserted before it finds the row that is there already.
    let insertable =
        step.expect == Expect::Present || !step.assignments.iter().any(|a| is_null_when_new(step, a));
    (put || delete) && exact && insertable
}

/// Whether an assignment gives null for a row that is not there, to a column that refuses null.
fn is_null_when_new(step: &Step, assignment: &Assignment) -> bool {
    let required = step.table.column(&assignment.column).is_some_and(|column| column.required);
    required && assignment.expr.operands().any(|operand| matches!(operand, Operand::Column(_)))
}

impl Compiled<'_> {
    /// What came of it: `None` if the statement did nothing.
    pub(crate) fn outcome(&self, rows: &[tokio_postgres::Row]) -> Result<Option<Applied>, StoreError> {
        let Some(answer) = rows.first() else { return Ok(None) };
        let Some(step) = self.plan.steps().first() else { return Ok(None) };
        let logged = self.plan.entry().is_some();
        let mut row: Option<Row> = None;
        if self.returns_row {
            row = Some(row_at(answer, if logged { 2 } else { 0 }, &step.table, self.plan.tenant())?);
        }
        let mut record = None;
        if let Some(entry) = self.plan.entry() {
            let position = int_at(answer, 0, "statehouse_log")?;
            let at = time_at(answer, 1, "statehouse_log")?;
            let events =
                entry.events.iter().map(|draft| eval::finish_event(draft, |_| row.as_ref())).collect();
            record = Some(Record {
                position: Some(Position {
                    partition: self.partition,
                    offset: u64::try_from(position).unwrap_or_default(),
                }),
                ..Record::of(self.plan, at, events)
            });
        }
        let rows = match (self.plan.returns_rows(), step.verb) {
            (false, _) => Vec::new(),
            (true, Verb::Put) => vec![row],
            (true, _) => vec![None],
        };
        Ok(Some(Applied { record, rows, repeated: false }))
    }
}

/// The tenant, once the statement's scope is set.
const SCOPE: &str = "(select tenant from scope)";

/// Whether the row that an expression looks at is there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It is, as `t`.
    Row,
    /// It is not: all its columns are null.
    Nothing,
}

/// A statement being written.
struct Statement<'n, 'p> {
    names: &'n Names,
    plan: &'p Plan,
    step: &'p Step,
    now: Option<Time>,
    scope: String,
    args: Vec<Arg<'p>>,
    /// Whether the server's clock is part of the step.
    reads_clock: bool,
}

impl<'p> Statement<'_, 'p> {
    fn text(&mut self, room: Room, partition: u32, returns_row: bool) -> String {
        let key = self.key_condition();
        let write = self.write(&key, room, returns_row);
        let Some(entry) = self.plan.entry() else {
            return format!("with {}{}\n{write}", self.scope, self.clock(&key));
        };
        let partition = self.arg(Arg::Int(i64::from(partition)));
        let heads = self.names.heads();
        let record = self.record(entry, &partition, returns_row);
        let lead = format!(
            "with {}{}, written as (\n{write}\n), moved as (\nupdate {heads} as h\nset head = h.head + 1\n\
             where h.partition = {partition} and exists (select from written)\nreturning h.head\n)",
            self.scope,
            self.clock(&key),
        );
        if returns_row {
            let columns = all_columns(&self.step.table, "written");
            format!(
                "{lead}, logged as (\n{record}\n)\nselect logged.position, logged.at, {columns}\nfrom logged, written"
            )
        } else {
            format!("{lead}\n{record}")
        }
    }

    fn arg(&mut self, arg: Arg<'p>) -> String {
        self.args.push(arg);
        placeholder(self.args.len() - 1)
    }

    fn value(&mut self, value: &'p Value) -> String {
        self.arg(Arg::One(value))
    }

    /// Names the row by its full key. These are the first parameters.
    fn key_condition(&mut self) -> String {
        self.arg(Arg::Text(self.plan.tenant().as_str()));
        let mut parts = vec![format!("t.{TENANT} = {SCOPE}")];
        let step = self.step;
        for (column, value) in step.table.key_columns().iter().zip(&step.key) {
            parts.push(format!("t.{} = {}", name(&column.name), self.value(value)));
        }
        parts.join(" and ")
    }

    /// One reading of the server's clock, after the row is locked; nothing if nobody looks at it.
    fn clock(&self, key: &str) -> String {
        if !self.reads_clock {
            return String::new();
        }
        let reading = ", clock as materialized (\nselect clock_timestamp() as now";
        if self.step.expect == Expect::Absent {
            return format!("{reading}\n)");
        }
        let table = self.names.table(self.step.table.name());
        format!(
            "{reading}\nfrom (select count(*) from (select from {table} as t where {key} for update) as row) as locked\n)"
        )
    }

    fn write(&mut self, key: &str, room: Room, returns_row: bool) -> String {
        let step = self.step;
        let table = self.names.table(step.table.name());
        let returning = if returns_row { all_columns(&step.table, "t") } else { format!("t.{VERSION}") };
        match (step.verb, step.expect) {
            (Verb::Put, Expect::Present) => {
                let set = self.changes(false);
                let condition = self.condition(room);
                format!("update {table} as t\nset {set}\nwhere {key}{condition}\nreturning {returning}")
            }
            (Verb::Put, expect) => {
                let (columns, values) = self.new_row();
                let keys: Vec<String> = std::iter::once(TENANT.to_owned())
                    .chain(step.table.key_columns().iter().map(|column| name(&column.name)))
                    .collect();
                let conflict = if expect == Expect::Either {
                    let set = self.changes(true);
                    let condition = self.condition(room);
                    let condition = condition.strip_prefix(" and ").map(|text| format!("\nwhere {text}"));
                    format!("do update\nset {set}{}", condition.unwrap_or_default())
                } else {
                    "do nothing".to_owned()
                };
                format!(
                    "insert into {table} as t ({columns})\nvalues ({values})\non conflict ({}) {conflict}\n\
                     returning {returning}",
                    keys.join(", "),
                )
            }
            _ => {
                let condition = self.condition(room);
                format!("delete from {table} as t\nwhere {key}{condition}\nreturning {returning}")
            }
        }
    }

    /// The assignments to a row that is there. Where the same statement inserts it, constants have been said already.
    fn changes(&mut self, inserts_too: bool) -> String {
        let step = self.step;
        let mut parts = Vec::with_capacity(step.assignments.len() + 1);
        for assignment in &step.assignments {
            let column = name(&assignment.column);
            let value = match &assignment.expr {
                Expr::Is(Operand::Value(_)) if inserts_too => format!("excluded.{column}"),
                expr => self.expression(expr, &assignment.column, Found::Row),
            };
            parts.push(format!("{column} = {value}"));
        }
        parts.push(format!("{VERSION} = t.{VERSION} + 1"));
        parts.join(", ")
    }

    /// All columns of a row that is not there yet, and their values.
    fn new_row(&mut self) -> (String, String) {
        let step = self.step;
        let mut columns = vec![TENANT.to_owned()];
        let mut values = vec![SCOPE.to_owned()];
        for (place, column) in step.table.columns().iter().enumerate() {
            columns.push(name(&column.name));
            let assigned = step.assignments.iter().find(|assignment| assignment.column == column.name);
            values.push(match assigned {
                // The key's values follow the tenant among the parameters.
                _ if place < step.table.key_len() => placeholder(place + 1),
                Some(assignment) => self.expression(&assignment.expr, &column.name, Found::Nothing),
                None => match &column.default {
                    Some(default) => self.value(default),
                    None => "null".to_owned(),
                },
            });
        }
        columns.push(VERSION.to_owned());
        values.push("1".to_owned());
        (columns.join(", "), values.join(", "))
    }

    fn expression(&mut self, expr: &'p Expr, column: &str, found: Found) -> String {
        let kind = self.step.table.type_of(column);
        let (left, sign, right) = match expr {
            Expr::Is(operand) => return self.operand(operand, kind, found),
            Expr::Add(left, right) => (left, "+", right),
            Expr::Subtract(left, right) => (left, "-", right),
        };
        let (left, right) = (self.operand(left, kind, found), self.operand(right, kind, found));
        // Only ints are added here; that two parameters are, the server cannot know by itself.
        let typed = |text: String| if text.starts_with('$') { format!("{text}::bigint") } else { text };
        format!("{} {sign} {}", typed(left), typed(right))
    }

    fn operand(&mut self, operand: &'p Operand, kind: Option<Type>, found: Found) -> String {
        match (operand, found) {
            (Operand::Column(column), Found::Row) => format!("t.{}", name(column)),
            (Operand::Column(_), Found::Nothing) => format!("null::{}", kind.map_or("text", type_name)),
            (Operand::ColumnOr(column, default), Found::Row) => {
                format!("coalesce(t.{}, {})", name(column), self.value(default))
            }
            (Operand::ColumnOr(_, value), Found::Nothing) | (Operand::Value(value), _) => self.value(value),
            (Operand::Now { plus_micros }, _) => self.now(*plus_micros),
        }
    }

    fn now(&mut self, plus_micros: i64) -> String {
        if let Some(now) = self.now {
            return self.arg(Arg::Own(Value::Time(eval::now_moved(now, plus_micros))));
        }
        // Within a century of the server's clock no time leaves the range of times, so nothing has to be clamped.
        self.reads_clock = true;
        if plus_micros == 0 {
            "(select now from clock)".to_owned()
        } else {
            format!("(select now from clock) + {}::interval", self.arg(Arg::Interval(plus_micros)))
        }
    }

    /// The guard and the room that is left, to be put behind the key.
    fn condition(&mut self, room: Room) -> String {
        let step = self.step;
        let mut text = String::new();
        for conjunct in step.guard.conjuncts() {
            text.push_str(" and ");
            text.push_str(&self.guard(conjunct));
        }
        for bound in room.bounds {
            let limit = self.arg(Arg::Int(bound.bytes_max));
            text.push_str(&format!(" and {} <= {limit}", bound.length));
        }
        text
    }

    fn guard(&mut self, guard: &'p Guard) -> String {
        match guard {
            Guard::Compare(left, comparison, right) => self.comparison(left, *comparison, right),
            Guard::Null(column) => format!("t.{} is null", name(column)),
            Guard::NotNull(column) => format!("t.{} is not null", name(column)),
            Guard::In(column, values) => self.listed(column, "= any", values),
            Guard::NotIn(column, values) => self.listed(column, "<> all", values),
            Guard::All(parts) if parts.is_empty() => "true".to_owned(),
            Guard::Any(parts) if parts.is_empty() => "false".to_owned(),
            Guard::All(parts) => self.joined(parts, " and "),
            Guard::Any(parts) => self.joined(parts, " or "),
        }
    }

    fn joined(&mut self, parts: &'p [Guard], with: &str) -> String {
        let parts: Vec<String> = parts.iter().map(|part| self.guard(part)).collect();
        format!("({})", parts.join(with))
    }

    fn listed(&mut self, column: &str, operator: &str, values: &'p [Value]) -> String {
        let kind = self.step.table.type_of(column).map_or("text", type_name);
        let list = self.arg(Arg::Many(values.iter().collect()));
        format!("t.{} {operator} ({list}::{kind}[])", name(column))
    }

    fn comparison(&mut self, left: &'p Operand, comparison: Comparison, right: &'p Operand) -> String {
        let table = &self.step.table;
        let kind = operand_type(table, left).or_else(|| operand_type(table, right));
        let ordered = !matches!(comparison, Comparison::Eq | Comparison::Ne);
        // Equal text is equal in every collation that a database can have; its order is not.
        let collation = if ordered && kind == Some(Type::Text) { " collate \"C\"" } else { "" };
        let (left, right) = (self.operand(left, kind, Found::Row), self.operand(right, kind, Found::Row));
        format!("{left}{collation} {} {right}", comparison.symbol())
    }

    /// The record of a plan that was applied.
    fn record(&mut self, entry: &'p Entry, partition: &str, returns_row: bool) -> String {
        let operation = self.arg(Arg::Text(self.plan.operation()));
        let resource = self.arg(Arg::Text(&entry.resource));
        let key = self.arg(Arg::Text(&entry.key));
        let fingerprint = self.arg(Arg::Text(&entry.fingerprint));
        let events = self.arg(Arg::Json(drafts_json(entry)));
        let at = match self.now {
            Some(now) => format!("{}::timestamptz", self.arg(Arg::Own(Value::Time(now)))),
            None if self.reads_clock => "(select now from clock)".to_owned(),
            None => "clock_timestamp()".to_owned(),
        };
        let mut events = format!("{events}::jsonb");
        for (place, draft) in entry.events.iter().enumerate() {
            if draft.row_of.is_some() {
                events =
                    format!("jsonb_set({events}, '{{{place},data,row}}', {})", row_json(&self.step.table));
            }
        }
        let from = if returns_row { "moved, written" } else { "moved" };
        format!(
            "insert into {} (partition, position, tenant, operation, resource, key, at, fingerprint, fate, events)\n\
             select {partition}, moved.head, {SCOPE}, {operation}::text, {resource}::text, {key}::text, {at}, \
             {fingerprint}::text, 'applied', {events}\nfrom {from}\nreturning position, at",
            self.names.log(),
        )
    }
}

fn operand_type(table: &Table, operand: &Operand) -> Option<Type> {
    match operand {
        Operand::Column(column) | Operand::ColumnOr(column, _) => table.type_of(column),
        Operand::Now { .. } => Some(Type::Time),
        Operand::Value(_) => None,
    }
}

/// The events as the caller knows them, without the rows that they are to take in.
fn drafts_json(entry: &Entry) -> String {
    let drafts =
        entry.events.iter().map(|draft| serde_json::json!({ "name": draft.name, "data": draft.data }));
    serde_json::Value::Array(drafts.collect()).to_string()
}

/// A written row as [`Row::to_json`] has it.
fn row_json(table: &Table) -> String {
    /// A function takes at most 100 arguments.
    const COLUMNS_MAX: usize = 40;
    let mut fields: Vec<String> = table
        .columns()
        .iter()
        .map(|column| {
            let content = format!("written.{}", name(&column.name));
            let json = match column.kind {
                Type::Time => {
                    format!("to_char({content} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')")
                }
                Type::Bytes => format!("translate(encode({content}, 'base64'), e'\\n', '')"),
                _ => content,
            };
            format!("'{}', {json}", column.name)
        })
        .collect();
    fields.push(format!("'{VERSION}', written.{VERSION}"));
    let objects = fields.chunks(COLUMNS_MAX).map(|chunk| format!("jsonb_build_object({})", chunk.join(", ")));
    objects.collect::<Vec<_>>().join(" || ")
}
