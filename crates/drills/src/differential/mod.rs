//! Random plans over random schemas, on the model and on another store side by side.
//!
//! Both stores stand on one [`ManualClock`] and get the same calls one after another, so there is exactly one right
//! answer to each, and the model gives it: outcome, refused step, reason, current row, rows, record, resolution. At the
//! end all rows, ranges, indexes and logs are compared. A third of the way the schema grows, and from then on some
//! plans come from a program that does not know the new columns; half of the way the other store is restarted.
//!
//! Keys and values are drawn from small domains, so that plans meet on the same rows, and a guard is chosen with an
//! eye on the row it will find, so that it holds often enough for something to happen and fails often enough to
//! matter. A run in which nearly everything was applied, or nearly nothing, has shown little and is an error.
//!
//! [`archetypes`] does the same with the tables of archetypes, and plans that they made.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::guard::{Comparison, column};
use statehouse_store::plan::{Expect, PlanBuilder, Verb};
use statehouse_store::table::{self, VERSION};
use statehouse_store::{
    Address, Clock, Column, Commit, Consistency, Entry, EventTemplate, Expr, Guard, ManualClock, Migrate,
    ModelStore, Operand, Plan, Query, Random, Record, Resolution, Row, Scan, Schema, SchemaChange, Step,
    Store, StoreError, Table, Tenant, Time, Type, Value, eval,
};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{ladder, ordered_types};
use crate::harness::store_client::{StoreClient, rows, scan, shown, whole_log};

pub mod archetypes;

/// What a run did, and so what it has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DifferentialStats {
    /// Commits that were applied, by their first attempt.
    pub applied: usize,
    /// Commits that were refused.
    pub refused: usize,
    /// Commits that learned an earlier outcome.
    pub repeated: usize,
    /// Commits that were fenced.
    pub fenced: usize,
    /// Operations that were resolved.
    pub resolved: usize,
    /// Rows at the end.
    pub rows: usize,
    /// Reads of ranges that were compared at the end.
    pub ranges: usize,
    /// Records in the log at the end.
    pub records: usize,
}

impl fmt::Display for DifferentialStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DifferentialStats { applied, refused, repeated, fenced, resolved, rows, ranges, records } = self;
        write!(
            f,
            "{applied} applied, {refused} refused, {repeated} repeated, {fenced} fenced, {resolved} resolved; \
             {rows} rows, {ranges} ranges, {records} records"
        )
    }
}

/// Runs so many random plans, of at most `largest_plan` operations each, on the model and on a namespace's store.
pub async fn run(
    namespace: &dyn TestNamespace,
    seed: u64,
    plans: usize,
    largest_plan: usize,
) -> Result<DifferentialStats> {
    let mut generator = PlanGenerator::new(seed, largest_plan)?;
    let mut pair = StorePair::open(namespace, &generator.clock, &generator.schema()?).await?;
    let mut stats = DifferentialStats::default();
    for number in 0..plans {
        if number == plans / 3 {
            generator.grow_tables()?;
            pair.migrate(&generator.schema()?)
                .await
                .with_context(|| format!("seed {seed}, migrating before plan {number}"))?;
        }
        if number == plans / 2 {
            pair.restart(namespace, &generator.clock).await?;
        }
        generator.clock.advance(Duration::from_micros(generator.random.below(2_000_000)));
        if generator.random.chance(0.06) {
            let (tenant, operation) = generator.operation_to_resolve(number);
            let resolved = pair.resolve(&tenant, &operation, &mut stats).await;
            resolved.with_context(|| format!("seed {seed}, call {number}"))?;
            continue;
        }
        let plan = generator.plan(number, &pair.model).await?;
        let committed = pair.commit(&plan, &mut stats).await;
        committed.with_context(|| format!("seed {seed}, call {number}"))?;
        generator.plans.push(plan);
    }
    pair.compare_content(&mut generator, &mut stats)
        .await
        .with_context(|| format!("seed {seed}, at the end"))?;
    let decided = stats.applied + stats.refused;
    ensure!(
        stats.applied * 4 >= decided && stats.refused * 6 >= decided,
        "seed {seed} shows too little, one kind of outcome is too rare: {stats}"
    );
    Ok(stats)
}

/// The two stores.
struct StorePair {
    model: ModelStore,
    other: Arc<dyn Store>,
}

impl StorePair {
    async fn open(namespace: &dyn TestNamespace, clock: &ManualClock, schema: &Schema) -> Result<StorePair> {
        let other = namespace.open_at(Arc::new(clock.clone())).await?;
        // With as many partitions as the other store has, records stand at the same positions on both.
        let model = ModelStore::with(Arc::new(clock.clone()), other.partitions());
        let pair = StorePair { model, other };
        pair.migrate(schema).await?;
        Ok(pair)
    }

    async fn migrate(&self, schema: &Schema) -> Result<()> {
        let printed =
            |changes: Vec<SchemaChange>| changes.iter().map(SchemaChange::to_string).collect::<Vec<_>>();
        let model = printed(self.model.migrate(schema, Migrate::Apply).await?);
        let other = printed(self.other.migrate(schema, Migrate::Apply).await?);
        ensure!(model == other, "the migrations differ:\n  model: {model:?}\n  other: {other:?}");
        Ok(())
    }

    /// Commits a plan to both, which must come to the same.
    async fn commit(&self, plan: &Plan, stats: &mut DifferentialStats) -> Result<()> {
        let (model, other) = (self.model.commit(plan).await, self.other.commit(plan).await);
        ensure!(
            same_outcome(&model, &other),
            "{}\n  model: {}\n  other: {}",
            shown(plan),
            outcome_text(&model),
            outcome_text(&other)
        );
        match model? {
            Commit::Applied(applied) if applied.repeated => stats.repeated += 1,
            Commit::Applied(_) => stats.applied += 1,
            Commit::Refused(_) => stats.refused += 1,
            Commit::Fenced => stats.fenced += 1,
        }
        Ok(())
    }

    /// Resolves an operation on both.
    async fn resolve(&self, tenant: &Tenant, operation: &str, stats: &mut DifferentialStats) -> Result<()> {
        let model = self.model.resolve(tenant, operation).await;
        let other = self.other.resolve(tenant, operation).await;
        stats.resolved += 1;
        ensure!(
            same_resolution(&model, &other),
            "resolve {tenant}/{operation}:\n  model: {model:?}\n  other: {other:?}"
        );
        Ok(())
    }

    async fn restart(&mut self, namespace: &dyn TestNamespace, clock: &ManualClock) -> Result<()> {
        self.other.close().await;
        self.other = namespace.open_at(Arc::new(clock.clone())).await?;
        Ok(())
    }

    async fn compare_content(
        &self,
        generator: &mut PlanGenerator,
        stats: &mut DifferentialStats,
    ) -> Result<()> {
        for versions in generator.tables.clone() {
            for table in &versions.0 {
                let (model, other) =
                    (all_rows(&self.model, table).await?, all_rows(self.other.as_ref(), table).await?);
                compare_rows(&format!("the rows of {table}"), &model, &other)?;
                if Arc::ptr_eq(table, versions.newest()) {
                    stats.rows += model.len();
                }
                let mut queries = generator.queries_across(table)?;
                for tenant in generator.tenants.clone() {
                    queries.extend(generator.queries(table, &tenant)?);
                }
                for query in queries {
                    self.compare_range(&query).await?;
                    stats.ranges += 1;
                }
            }
        }
        stats.records = self.compare_log().await?;
        Ok(())
    }

    async fn compare_range(&self, query: &Query) -> Result<()> {
        let model = rows(&self.model, query.clone()).await?;
        let about = || format!("the range {query:?}");
        if query.consistency() == Consistency::Strong {
            return compare_rows(&about(), &model, &rows(self.other.as_ref(), query.clone()).await?);
        }
        let client = StoreClient::of(self.other.clone(), "any")?;
        client.eventually(query, |other| compare_rows(&about(), &model, other)).await
    }

    /// The records of each subject, in their order.
    async fn compare_log(&self) -> Result<usize> {
        let by_subject = |records: &[Record]| {
            let mut subjects: BTreeMap<String, Vec<Record>> = BTreeMap::new();
            for record in records {
                let subject = match record.resource.as_str() {
                    "" => format!("{}: aborted {}", record.tenant, record.operation),
                    resource => format!("{}: {resource}/{}", record.tenant, record.key),
                };
                subjects.entry(subject).or_default().push(Record { position: None, ..record.clone() });
            }
            subjects
        };
        let model = whole_log(&self.model).await?;
        let other = StoreClient::of(self.other.clone(), "any")?.exact_log(model.len()).await?;
        let (model_subjects, mut other_subjects) = (by_subject(&model), by_subject(&other));
        for (subject, records) in model_subjects {
            let found = other_subjects.remove(&subject).unwrap_or_default();
            ensure!(found == records, "the log of {subject}:\n  model: {records:#?}\n  other: {found:#?}");
        }
        ensure!(other_subjects.is_empty(), "only the other store's log has {other_subjects:?}");
        Ok(model.len())
    }
}

async fn all_rows(store: &dyn Store, table: &Arc<Table>) -> Result<Vec<Row>> {
    // A scan has an order of its own on every engine.
    let mut rows = scan(store, Scan::all(table).limit(7)?).await?;
    rows.sort_by_key(Row::to_string);
    Ok(rows)
}

fn compare_rows(about: &str, model: &[Row], other: &[Row]) -> Result<()> {
    if model == other {
        return Ok(());
    }
    let list = |rows: &[Row]| rows.iter().map(|row| format!("    {}\n", row_text(row))).collect::<String>();
    bail!("{about} differ:\n  model:\n{}  other:\n{}", list(model), list(other))
}

fn row_text(row: &Row) -> String {
    let columns = row.table().columns().iter().zip(row.values());
    let columns: Vec<String> = columns.map(|(column, value)| format!("{}: {value}", column.name)).collect();
    format!("{} at version {} of {{{}}}", row.table(), row.version(), columns.join(", "))
}

fn outcome_text(outcome: &Result<Commit, StoreError>) -> String {
    let row = |row: &Option<Row>| row.as_ref().map_or("no row".to_owned(), row_text);
    match outcome {
        Ok(Commit::Applied(applied)) => {
            let rows: Vec<String> = applied.rows.iter().map(row).collect();
            let record = applied.record.as_ref();
            format!("applied (repeated: {}), rows [{}], record {record:?}", applied.repeated, rows.join("; "))
        }
        Ok(Commit::Refused(refused)) => {
            format!(
                "refused at step {} because {:?}, on {}",
                refused.step,
                refused.reason,
                row(&refused.current)
            )
        }
        other => format!("{other:?}"),
    }
}

/// Whether two records are the same. The other store may not know the position yet.
fn same_record(model: &Record, other: &Record) -> bool {
    let position = other.position.and(model.position);
    let also_at = if other.position.is_some() { model.also_at.clone() } else { Vec::new() };
    Record { position, also_at, ..model.clone() } == *other
}

fn same_outcome(model: &Result<Commit, StoreError>, other: &Result<Commit, StoreError>) -> bool {
    match (model, other) {
        (Ok(Commit::Applied(model)), Ok(Commit::Applied(other))) => {
            let records = match (&model.record, &other.record) {
                (Some(model), Some(other)) => same_record(model, other),
                (model, other) => model.is_none() && other.is_none(),
            };
            records && model.rows == other.rows && model.repeated == other.repeated
        }
        (Ok(model), Ok(other)) => model == other,
        // A text may differ, the kind may not.
        (Err(model), Err(other)) => std::mem::discriminant(model) == std::mem::discriminant(other),
        _ => false,
    }
}

fn same_resolution(model: &Result<Resolution, StoreError>, other: &Result<Resolution, StoreError>) -> bool {
    match (model, other) {
        (Ok(Resolution::Applied(model)), Ok(Resolution::Applied(other))) => same_record(model, other),
        (Ok(model), Ok(other)) => model == other,
        _ => false,
    }
}

/// The versions of one table, oldest first. All of them are in use at once.
#[derive(Clone)]
struct Versions(Vec<Arc<Table>>);

impl Versions {
    fn newest(&self) -> &Arc<Table> {
        &self.0[self.0.len() - 1]
    }
}

/// When every run begins.
const START: Time = Time::from_micros(1_700_000_000_000_000);

/// Where the plans come from.
struct PlanGenerator {
    random: Random,
    clock: ManualClock,
    tenants: [Tenant; 2],
    tables: Vec<Versions>,
    /// The values that each column, by table and name, is drawn from.
    domains: BTreeMap<(String, String), Vec<Value>>,
    largest_plan: usize,
    /// What was committed so far, to be repeated.
    plans: Vec<Plan>,
    /// Ids that were resolved before any plan came under them.
    fenced: Vec<(Tenant, String)>,
}

impl PlanGenerator {
    fn new(seed: u64, largest_plan: usize) -> Result<PlanGenerator> {
        let mut generator = PlanGenerator {
            random: Random::seeded(seed),
            clock: ManualClock::at(START),
            tenants: [Tenant::new("acme")?, Tenant::new("acme-2")?],
            tables: Vec::new(),
            domains: BTreeMap::new(),
            largest_plan,
            plans: Vec::new(),
            fenced: Vec::new(),
        };
        for number in 0..2 + generator.random.below(2) {
            let table = generator.table(&format!("table_{number}"))?;
            generator.tables.push(Versions(vec![table]));
        }
        Ok(generator)
    }

    fn schema(&self) -> Result<Schema> {
        Ok(Schema::new(self.tables.iter().map(|versions| versions.newest().clone()))?)
    }

    fn pick<T: Clone>(&mut self, items: &[T]) -> Result<T> {
        self.random.pick(items).cloned().context("there is nothing to pick from")
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.below(end as u64) as usize
    }

    /// A table with a column of every type and some more, a key of one to three columns, and some indexes.
    fn table(&mut self, name: &str) -> Result<Arc<Table>> {
        let ordered: Vec<Type> = ordered_types().collect();
        let mut builder = Table::named(name);
        for place in 0..=self.random.below(2) {
            let kind = self.pick(&ordered)?;
            builder = builder.partition(&format!("p{place}"), kind);
        }
        for place in 0..self.random.below(3) {
            let kind = self.pick(&ordered)?;
            builder = builder.sort(&format!("s{place}"), kind);
        }
        let mut kinds = Type::ALL.to_vec();
        for _ in 0..3 {
            let kind = self.pick(&Type::ALL)?;
            kinds.push(kind);
        }
        for (place, kind) in kinds.into_iter().enumerate() {
            builder = builder.declared(self.column(name, &format!("c{place}"), kind, true)?);
        }
        let table = builder.clone().build()?;
        for column in table.key_columns() {
            let mut domain = ladder(column.kind);
            while domain.len() > 2 {
                domain.swap_remove(self.below(domain.len()));
            }
            self.domains.insert((name.to_owned(), column.name.clone()), domain);
        }
        for place in 0..self.random.below(4) {
            builder = self.index(builder, &table, &format!("i{place}"))?;
        }
        Ok(builder.build()?)
    }

    /// A column, and the domain of its values.
    fn column(&mut self, table: &str, name: &str, kind: Type, may_be_required: bool) -> Result<Column> {
        let domain: Vec<Value> = match kind {
            Type::Int => [0, 1, 2, 5, i64::MAX, i64::MIN].map(Value::Int).to_vec(),
            Type::Float => [0.0, 0.5, -2.25, 1e100, 9.9e125, 1e-130].map(Value::Float).to_vec(),
            Type::Time => {
                [START, START.plus(Duration::from_secs(100)), Time::MIN, Time::MAX].map(Value::Time).to_vec()
            }
            _ => {
                let mut domain = ladder(kind);
                while domain.len() > 4 {
                    domain.swap_remove(self.below(domain.len()));
                }
                domain
            }
        };
        let default = self.pick(&domain)?;
        self.domains.insert((table.to_owned(), name.to_owned()), domain);
        let (required, default) = match self.random.below(10) {
            0..=4 => (false, None),
            5 => (false, Some(default)),
            6..=7 if may_be_required => (true, None),
            _ => (true, Some(default)),
        };
        Ok(Column { name: name.to_owned(), kind, required, default })
    }

    fn index(
        &mut self,
        builder: table::TableBuilder,
        table: &Table,
        name: &str,
    ) -> Result<table::TableBuilder> {
        let mut names: Vec<&str> = table
            .columns()
            .iter()
            .filter(|column| column.kind.is_ordered())
            .map(|column| column.name.as_str())
            .collect();
        let mut take = |random: &mut Random| names.swap_remove(random.below(names.len() as u64) as usize);
        let partition: Vec<&str> = (0..self.random.below(2)).map(|_| take(&mut self.random)).collect();
        let sort: Vec<&str> = (0..=self.random.below(2)).map(|_| take(&mut self.random)).collect();
        if !partition.is_empty() && self.random.chance(0.4) {
            return Ok(builder.global_index(name, &partition, &sort));
        }
        Ok(builder.index(name, &partition, &sort))
    }

    /// Gives every table a newer version with more columns and perhaps an index on them.
    fn grow_tables(&mut self) -> Result<()> {
        for place in 0..self.tables.len() {
            let old = self.tables[place].newest().clone();
            let mut builder = Table::named(old.name());
            for column in old.partition_columns() {
                builder = builder.partition(&column.name, column.kind);
            }
            for column in old.sort_columns() {
                builder = builder.sort(&column.name, column.kind);
            }
            for column in old.other_columns() {
                builder = builder.declared(column.clone());
            }
            for index in old.indexes() {
                builder = builder.declared_index(index.clone());
            }
            for number in 0..=self.random.below(2) {
                let kind = self.pick(&Type::ALL)?;
                builder = builder.declared(self.column(old.name(), &format!("new{number}"), kind, false)?);
            }
            let table = builder.clone().build()?;
            if self.random.chance(0.7) {
                builder = self.index(builder, &table, "newer")?;
            }
            self.tables[place].0.push(builder.build()?);
        }
        Ok(())
    }

    fn value(&mut self, table: &Table, column: &str) -> Result<Value> {
        let domain = self.domains.get(&(table.name().to_owned(), column.to_owned()));
        let domain = domain.cloned().unwrap_or_else(|| (1..4).map(Value::Int).collect());
        self.pick(&domain)
    }

    fn key(&mut self, table: &Table) -> Result<Vec<Value>> {
        table.key_columns().iter().map(|column| self.value(table, &column.name)).collect()
    }

    /// An id that was used, or one that will be used later, after it was fenced.
    fn operation_to_resolve(&mut self, number: usize) -> (Tenant, String) {
        if self.random.chance(0.6)
            && let Some(plan) = self.random.pick(&self.plans)
        {
            return (plan.tenant().clone(), plan.operation().to_owned());
        }
        let tenant = self.tenants[self.random.below(2) as usize].clone();
        let operation = (tenant, format!("fenced-{number}"));
        self.fenced.push(operation.clone());
        operation
    }

    /// A plan: most often a new one, sometimes an earlier one again, sometimes a new one under an earlier id.
    async fn plan(&mut self, number: usize, model: &ModelStore) -> Result<Plan> {
        if self.random.chance(0.06)
            && let Some(plan) = self.random.pick(&self.plans)
        {
            return Ok(plan.clone());
        }
        let mut tenant = self.tenants[self.below(2)].clone();
        let mut operation = format!("op-{number}");
        if self.random.chance(0.05)
            && let Some(plan) = self.random.pick(&self.plans)
        {
            (tenant, operation) = (plan.tenant().clone(), plan.operation().to_owned());
        } else if self.random.chance(0.05)
            && let Some(fenced) = self.random.pick(&self.fenced)
        {
            (tenant, operation) = fenced.clone();
        }
        let mut builder = Plan::of(&tenant, operation);
        let logged = self.random.chance(0.7);
        // A log entry is one operation more than a plan without one has, and its events about others may be two more.
        let most = self.largest_plan.saturating_sub(if logged { 3 } else { 0 }).max(1);
        let count = match self.random.below(10) {
            0..=5 => 1,
            6..=8 => 2 + self.below(2),
            _ => 1 + self.below(most),
        };
        let mut taken: Vec<(String, Vec<Value>)> = Vec::new();
        for _ in 0..count.min(most) {
            let index = self.below(self.tables.len());
            let versions = self.tables[index].clone();
            let table = self.pick(&versions.0)?;
            let key = self.key(&table)?;
            // A row that is named twice would be refused when the plan is built, and that is tested elsewhere.
            if taken.iter().any(|(name, other)| name == table.name() && *other == key) {
                continue;
            }
            taken.push((table.name().to_owned(), key.clone()));
            let address = Address::new(&table, &tenant, key.clone())?;
            let row = model.get(&[address], Consistency::Strong).await?.pop().flatten();
            builder = builder.step(self.step(&table, key, row.as_ref())?);
        }
        if logged {
            builder = self.entry(builder)?;
        }
        if self.random.chance(0.1) {
            builder = builder.without_rows();
        }
        Ok(builder.build()?)
    }

    fn entry(&mut self, builder: PlanBuilder) -> Result<PlanBuilder> {
        let writing: Vec<usize> =
            (0..builder.steps.len()).filter(|&step| builder.steps[step].writes()).collect();
        let resource = self.pick(&["post", "póst"])?;
        let mut entry = Entry::about(resource, self.random.below(3).to_string());
        entry = entry.fingerprint(self.random.below(3).to_string());
        for _ in 0..self.random.below(3) {
            let name = self.pick(&["made", "changed"])?;
            let document = self.pick(&ladder(Type::Json))?;
            let mut draft = EventTemplate::named(name).with("document", document.to_json());
            if let Some(step) = self.random.pick(&writing) {
                draft = draft.with_row_of(*step);
            }
            if self.random.chance(0.4) {
                let resource = self.pick(&["post", "póst"])?;
                draft = draft.about(resource, self.random.below(3).to_string());
            }
            entry = entry.event(draft);
        }
        Ok(builder.log(entry))
    }

    /// A step that fits the row as it is nine times out of ten.
    fn step(&mut self, table: &Arc<Table>, key: Vec<Value>, row: Option<&Row>) -> Result<Step> {
        let fitting = self.random.chance(0.9);
        let (verb, expect) = match (row.is_some() == fitting, self.random.below(20)) {
            (true, 0..=8) => (Verb::Put, Expect::Present),
            (true, 9..=11) => (Verb::Delete, Expect::Present),
            (true, 12..=14) => (Verb::Assert, Expect::Present),
            (false, 0..=12) => (Verb::Put, Expect::Absent),
            (false, 13) => (Verb::Assert, Expect::Absent),
            (false, 14) => (Verb::Delete, Expect::Absent),
            (_, 15..=17) => (Verb::Put, Expect::Either),
            (_, 18) => (Verb::Delete, Expect::Either),
            _ => (Verb::Assert, Expect::Either),
        };
        let mut step = Step { verb, expect, ..Step::assert(table, key) };
        if expect != Expect::Absent && self.random.chance(0.7) {
            step = step.guard(self.guard(table, row)?);
        }
        if verb == Verb::Put {
            for column in table.other_columns() {
                let needed = expect != Expect::Present && column.required && column.default.is_none();
                if needed || self.random.chance(0.3) {
                    step = step.set(&column.name, self.expr(table, column)?);
                }
            }
        }
        Ok(step)
    }

    /// A guard that holds for the row about four times out of five.
    fn guard(&mut self, table: &Table, row: Option<&Row>) -> Result<Guard> {
        let wanted = self.random.chance(0.8);
        let now = self.clock.now();
        let mut guard = self.any_guard(table, 2)?;
        for _ in 0..8 {
            let holds = |guard: &Guard| row.is_none_or(|row| eval::holds(guard, row, now) == wanted);
            if holds(&guard) {
                break;
            }
            let negated = guard.clone().negated();
            guard = if holds(&negated) { negated } else { self.any_guard(table, 2)? };
        }
        Ok(guard)
    }

    fn any_guard(&mut self, table: &Table, depth: usize) -> Result<Guard> {
        if depth > 0 && self.random.chance(0.4) {
            let parts =
                (0..self.random.below(4)).map(|_| self.any_guard(table, depth - 1)).collect::<Result<_>>()?;
            let guard = if self.random.chance(0.6) { Guard::All(parts) } else { Guard::Any(parts) };
            return Ok(if self.random.chance(0.2) { guard.negated() } else { guard });
        }
        let name = {
            let mut names: Vec<String> = table.columns().iter().map(|column| column.name.clone()).collect();
            names.push(VERSION.to_owned());
            self.pick(&names)?
        };
        let kind = table.type_of(&name).with_context(|| format!("{table} has no column {name}"))?;
        let question = if kind.is_ordered() { self.random.below(8) } else { 0 };
        Ok(match question {
            0 if self.random.chance(0.5) => Guard::Null(name),
            0 => Guard::NotNull(name),
            1 => {
                let values =
                    (0..self.random.below(4)).map(|_| self.value(table, &name)).collect::<Result<_>>()?;
                if self.random.chance(0.5) { Guard::In(name, values) } else { Guard::NotIn(name, values) }
            }
            _ => {
                let comparison = self.pick(&Comparison::ALL)?;
                let left = match self.random.below(4) {
                    0 => Operand::Coalesce(name.clone(), self.value(table, &name)?),
                    _ => column(&name),
                };
                let right = self.operand(table, &name, kind)?;
                if self.random.chance(0.2) {
                    right.compare(comparison, left)
                } else {
                    left.compare(comparison, right)
                }
            }
        })
    }

    /// An operand of a type: a constant of the column's domain, another column, the clock.
    fn operand(&mut self, table: &Table, beside: &str, kind: Type) -> Result<Operand> {
        if kind == Type::Time && self.random.chance(0.3) {
            return Ok(Operand::Now { plus_micros: self.random.below(200_000_000) as i64 - 100_000_000 });
        }
        let mut alike: Vec<String> = table
            .columns()
            .iter()
            .filter(|column| column.kind == kind)
            .map(|column| column.name.clone())
            .collect();
        if kind == Type::Int {
            alike.push(VERSION.to_owned());
        }
        Ok(match self.random.below(4) {
            0 if !alike.is_empty() => column(&self.pick(&alike)?),
            1 if !alike.is_empty() => Operand::Coalesce(self.pick(&alike)?, self.value(table, beside)?),
            _ => Operand::Value(self.value(table, beside)?),
        })
    }

    fn expr(&mut self, table: &Table, target: &Column) -> Result<Expr> {
        if !target.required && self.random.chance(0.15) {
            return Ok(Value::Null.into());
        }
        let computable = matches!(target.kind, Type::Int | Type::Float | Type::Time);
        if !computable || self.random.chance(0.6) {
            return Ok(self.operand(table, &target.name, target.kind)?.into());
        }
        let left = self.operand(table, &target.name, target.kind)?;
        let right = if target.kind == Type::Time {
            let micros = self.random.below(20_000_000) as i64 - 10_000_000;
            if self.random.chance(0.7) { micros.into() } else { column(VERSION) }
        } else {
            self.operand(table, &target.name, target.kind)?
        };
        Ok(if self.random.chance(0.5) { left.add(right) } else { left.subtract(right) })
    }

    /// Ranges over every partition of a table and of its indexes, whether anything stands there or not.
    fn queries(&mut self, table: &Arc<Table>, tenant: &Tenant) -> Result<Vec<Query>> {
        let names = |columns: &[Column]| columns.iter().map(|column| column.name.clone()).collect::<Vec<_>>();
        let mut queries = Vec::new();
        for partition in self.combinations(table, &names(table.partition_columns())) {
            queries.push(Query::table(table, tenant, partition.clone())?);
            queries.push(Query::table(table, tenant, partition.clone())?.backward());
            for _ in 0..2 {
                let query = Query::table(table, tenant, partition.clone())?;
                queries.push(self.narrowed(query)?);
            }
        }
        for index in table.indexes().iter().filter(|index| !index.global) {
            for partition in self.combinations(table, &index.partition) {
                queries.push(Query::index(table, &index.name, tenant, partition.clone())?);
                let query = Query::index(table, &index.name, tenant, partition)?;
                queries.push(self.narrowed(query)?);
            }
        }
        Ok(queries)
    }

    /// Ranges of the indexes across tenants.
    fn queries_across(&mut self, table: &Arc<Table>) -> Result<Vec<Query>> {
        let mut queries = Vec::new();
        for index in table.indexes().iter().filter(|index| index.global) {
            for partition in self.combinations(table, &index.partition) {
                queries.push(Query::all_tenants(table, &index.name, partition.clone())?);
                queries.push(Query::all_tenants(table, &index.name, partition.clone())?.backward());
                let query = Query::all_tenants(table, &index.name, partition)?;
                queries.push(self.narrowed(query)?);
            }
        }
        Ok(queries)
    }

    /// All combinations of the values of these columns' domains.
    fn combinations(&self, table: &Table, columns: &[String]) -> Vec<Vec<Value>> {
        columns.iter().fold(vec![Vec::new()], |partial, column| {
            let domain =
                self.domains.get(&(table.name().to_owned(), column.clone())).cloned().unwrap_or_default();
            let extend = |values: &Vec<Value>| -> Vec<Vec<Value>> {
                domain.iter().map(|value| values.iter().chain([value]).cloned().collect()).collect()
            };
            partial.iter().flat_map(extend).collect()
        })
    }

    /// The query with a random prefix, bounds, direction and page size.
    fn narrowed(&mut self, mut query: Query) -> Result<Query> {
        let table = query.read_table().clone();
        let columns: Vec<String> = query.sort_columns().iter().map(|column| column.name.clone()).collect();
        let fixed = self.below(columns.len() + 1);
        let prefix =
            columns.iter().take(fixed).map(|name| self.value(&table, name)).collect::<Result<Vec<_>>>()?;
        query = query.prefix(prefix)?;
        if let Some(next) = columns.get(fixed) {
            let (low, high) = (self.value(&table, next)?, self.value(&table, next)?);
            query = match self.random.below(3) {
                0 => query.from(low)?,
                1 => query.above(low)?,
                _ => query,
            };
            query = match self.random.below(3) {
                0 => query.to(high)?,
                1 => query.below(high)?,
                _ => query,
            };
        }
        if self.random.chance(0.5) {
            query = query.backward();
        }
        Ok(query.limit(1 + self.below(4))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::engines::{Model, TestEngine};

    #[tokio::test]
    async fn a_seed_determines_a_run() {
        let mut stats = Vec::new();
        for _ in 0..2 {
            let namespace = Model.namespace("seed").unwrap();
            stats.push(run(namespace.as_ref(), 3, 150, 10).await.unwrap());
        }
        assert_eq!(stats[0], stats[1]);
    }
}
