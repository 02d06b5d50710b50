//! The SQL of a compiled statement, clause by clause.

use statehouse_store::plan::{Expect, Verb};
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{Expr, Guard, Operand, Plan, Step, Table, Type, Value};

use super::{Compiler, Set, prints_floats};
use crate::shape::{ROW_MARK, inserts, lists, returns_row, takers};
use crate::size_bounds;
use crate::sql::{all_columns, literal, name, placeholder};

/// Where the constants of a statement come from.
#[derive(Clone, Copy)]
pub(super) enum ValueSource<'k> {
    /// Of one plan: parameters, behind the tenant and the lists.
    Parameters,
    /// Of several: columns of `k`, which are of these types.
    Rows { kinds: &'k [&'static str] },
}

/// Whether the row that an expression looks at is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FoundRow {
    /// It is, as `t`.
    Row,
    /// It is not: all its columns are null.
    Nothing,
}

/// A statement being written. Constants are named in the order in which [`crate::shape::constants`] lists them.
pub(super) struct CompiledStatement<'n, 'p> {
    pub compiler: &'n Compiler<'n>,
    pub plan: &'p Plan,
    pub step: &'p Step,
    pub source: ValueSource<'n>,
    /// Sets what does not hold yet, and gives back the tenant's name or how many plans there are.
    pub scope: Option<String>,
    /// Whether it is given the tenants that it works for, behind the constants of several plans.
    pub says_tenants: bool,
    pub lists: usize,
    /// How many parameters stand before the constants of one plan.
    pub before: usize,
    /// How many constants, and how many lists, have been named.
    pub named: usize,
    pub lists_named: usize,
    /// Whether the server's clock is read ahead, for several uses.
    pub reads_clock: bool,
    /// The column that is set to the server's clock, if that is the clock's only use. Then it is read in its place,
    /// where an update that had to wait for the row reads it again.
    pub stamped: Option<&'p str>,
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
fn scope(
    compiler: &Compiler<'_>,
    plan: &Plan,
    step: &Step,
    source: ValueSource<'_>,
    set: Set,
) -> Option<String> {
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
            ValueSource::Parameters => "$1".to_owned(),
            ValueSource::Rows { kinds } => placeholder(lists(step).len() + 1 + kinds.len()),
        };
        say("statehouse.tenants", &tenants);
        // A pooler may have let a session in with its role and then have given it another server process.
        if let Some(role) = compiler.role {
            local = format!("{local} and current_user = {}", literal(&Value::from(role)));
        }
    }
    let known = match source {
        ValueSource::Parameters => "$1::text end as tenant".to_owned(),
        ValueSource::Rows { .. } => {
            format!("cardinality({}::text[]) else 0 end as plans", placeholder(lists(step).len()))
        }
    };
    (local != "true").then(|| format!("case when {local} then {known}"))
}

/// The columns of a record that come from the plan, in the order of [`crate::shape::constants`].
pub(super) const RECORD: [&str; 6] =
    ["_partition", "_operation", "_resource", "_key", "_fingerprint", "_events"];

impl<'n, 'p> CompiledStatement<'n, 'p> {
    pub(super) fn new(
        compiler: &'n Compiler<'n>,
        plan: &'p Plan,
        step: &'p Step,
        source: ValueSource<'n>,
        set: Set,
    ) -> CompiledStatement<'n, 'p> {
        let lists = lists(step).len();
        let scope = scope(compiler, plan, step, source, set);
        // An insert does not wait for its row, and its record may need the reading too.
        let stamped = stamped(step).filter(|_| compiler.now.is_none() && !inserts(step));
        CompiledStatement {
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
    pub(super) fn constant(&mut self) -> String {
        self.named += 1;
        match self.source {
            ValueSource::Parameters => placeholder(self.before + self.named - 1),
            ValueSource::Rows { .. } => format!("k.c{}", self.named),
        }
    }

    pub(super) fn tenant(&self) -> &'static str {
        match self.source {
            ValueSource::Parameters if self.scope.is_some() => "(select tenant from scope)",
            ValueSource::Parameters => "$1::text",
            ValueSource::Rows { .. } => "k.tenant",
        }
    }

    /// `(select p.tenant, ($2::bigint[])[p._place], … from unnest($1::text[]) … limit …) as k(tenant, c1, …, _place)`: the
    /// plans, one a row. Places in arrays are quicker than so many arrays unnested side by side, each into a store of its
    /// own. An array of one stands for as many as there are plans ([`super::without_repeats`]): most of what plans of one shape bring along
    /// is the same, and to look far into an array of texts means to look at all before. The limit is no limit: it makes the planner expect so few rows that it looks up each of them, in their
    /// order, whatever the size of the table is when the statement is planned.
    pub(super) fn rows(&self, kinds: &[&str]) -> String {
        self.rows_of(kinds, 0..kinds.len(), &self.limit())
    }

    /// No plan is looked at before the transaction is set.
    pub(super) fn limit(&self) -> String {
        match self.scope {
            Some(_) => "\nlimit (select plans from scope)".to_owned(),
            None => format!("\nlimit cardinality({}::text[])", placeholder(self.lists)),
        }
    }

    /// The same with some of the constants.
    pub(super) fn rows_of(&self, kinds: &[&str], which: std::ops::Range<usize>, limit: &str) -> String {
        let tenants = placeholder(self.lists);
        let some = || kinds.iter().enumerate().filter(|(index, _)| which.contains(index));
        let constants = some().map(|(index, kind)| {
            let array = format!("{}::{kind}[]", placeholder(self.lists + 1 + index));
            format!("({array})[least(p._place, cardinality({array}))], ")
        });
        let columns = some().map(|(index, _)| format!("c{}, ", index + 1));
        format!(
            "(\nselect p.tenant, {}p._place\n\
             from unnest({tenants}::text[]) with ordinality as p(tenant, _place){limit}\n\
             ) as k(tenant, {}_place)",
            constants.collect::<String>(),
            columns.collect::<String>(),
        )
    }

    pub(super) fn text(mut self) -> Option<String> {
        let step = self.step;
        if inserts(step) {
            return self.insert_text();
        }
        let returns_row = returns_row(self.plan, step);
        let takers: Vec<usize> = takers(self.plan).collect();
        let bounds = size_bounds::bounds(step, takers.len())?;
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
            ValueSource::Parameters => {
                let known = record.last().map(|events| format!("{events}::text")).unwrap_or_default();
                parts.extend(self.append_one(&self.events(&known, &takers), &record));
                ("1::bigint", "moved.head", "written, moved")
            }
            ValueSource::Rows { .. } => {
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
    pub(super) fn clock(&self, key: &str) -> String {
        let reading = "clock as materialized (\nselect clock_timestamp() as now";
        let table = self.compiler.names.table(self.step.table.name());
        let mut lock = format!("select from {table} as t where {key} for update");
        if let ValueSource::Rows { kinds } = self.source {
            lock = format!("select from {} cross join lateral ({lock}) as row", self.rows(kinds));
        }
        format!("{reading}\nfrom (select count(*) from ({lock}) as rows) as locked\n)")
    }

    pub(super) fn key_condition(&mut self) -> String {
        let step = self.step;
        let mut parts = vec![format!("t.{TENANT} = {}", self.tenant())];
        for column in step.table.key_columns() {
            parts.push(format!("t.{} = {}", name(&column.name), self.constant()));
        }
        parts.join(" and ")
    }

    pub(super) fn write(
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
            ValueSource::Parameters if record.is_empty() => returned.push("1::bigint as _place".to_owned()),
            ValueSource::Parameters => {}
            ValueSource::Rows { kinds } => {
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
    pub(super) fn key_columns(&self) -> String {
        let columns = self.step.table.key_columns().iter().map(|column| name(&column.name));
        std::iter::once(TENANT.to_owned()).chain(columns).collect::<Vec<_>>().join(", ")
    }

    /// The events of a record, with the row taken in where that is asked for.
    pub(super) fn events(&self, known: &str, takers: &[usize]) -> String {
        match takers {
            [] => format!("{known}::json"),
            _ => format!("replace({known}, '{ROW_MARK}', {})::json", row_json(&self.step.table)),
        }
    }

    /// Locks the head of the partition and appends the record.
    pub(super) fn append_one(&self, events: &str, record: &[String]) -> Vec<String> {
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

    /// Locks the heads of the partitions and appends the records. The planner may use nested loops over index lookups only, so
    /// the heads are locked in the order of the partitions.
    pub(super) fn append_several(&self, takers: &[usize]) -> Vec<String> {
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
}

/// The text of a written row as [`statehouse_store::Row::to_json`] has it.
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
pub(super) fn json_time(time: &str) -> String {
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
