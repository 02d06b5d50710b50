//! Constraints between rows that are added to a table with rows: what the rows have taken, and what they refer to, is written to the
//! tables of the constraint before anything else is changed.
//!
//! Phases of a fill, in their order:
//! - *expand*: the tables of the constraint are created, or emptied. No program uses them yet.
//! - *backfill*: a run of [`crate::infra::scan::runner`] goes over the rows. It is stored, so that it goes on after a crash, in any process
//!   that applies the same blueprint.
//! - *verify*: if rows violate the constraint, the tables are dropped again and the rows are listed. Nothing else was changed.
//! - *record*: `house_constraints` says that the tables follow from the rows. A constraint that is given up loses the record, so that it
//!   is filled anew when it is declared again.
//!
//! Servers with a blueprint from before the constraint write rows that it does not know of: they have to be stopped first, so a server
//! does not fill tables when it starts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::migration::Difference;
use statehouse_store::{
    Address, Commit, Consistency, Ids, Migrate, Plan, PlanError, Row, Scan, Schema, SchemaChange, Step,
    Store, StoreError, Table, Value,
};

use super::constrain::count;
use super::constraints::{LISTED_MAX, live_part};
use crate::declare::TableDef;
use crate::declare::row_constraints::{RowReference, TAKEN_BY, UniqueFields};
use crate::infra::scan::runner::{RowEffects, RunProgress, RunSettings, ScanRunner, ScanTask, scans_table};
use crate::resource::{Resource, key_text};

/// Ranges of a run, and workers of a process that work on it.
const RANGES: usize = 16;
const WORKERS: usize = 4;
/// Steps of one plan, beside that of the runner.
const STEPS_MAX: usize = 90;
/// What the record of a filled table says.
pub(super) const FILLED: &str = "rows";

/// The fills that a migration has to make.
#[derive(Debug)]
pub(super) struct Fills {
    fills: Vec<Fill>,
    /// Tables of constraints that have no record: the table with the rows, and the one that follows from them.
    pub(super) unrecorded: Vec<(String, String)>,
}

/// The constraints that are added to one resource with rows.
#[derive(Debug)]
struct Fill {
    name: String,
    def: Arc<TableDef>,
    /// The table as it is before the migration, and what columns are called in it.
    live: Arc<Table>,
    unique: Vec<UniqueFields>,
    references: Vec<LiveReference>,
}

/// A reference, and its target's table as it is before the migration; nothing if that is created by it.
#[derive(Debug)]
struct LiveReference {
    reference: RowReference,
    target: Option<Arc<Table>>,
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn misuse(error: PlanError) -> StoreError {
    StoreError::schema("a constraint that is added", error.to_string())
}

fn schema_of(tables: impl IntoIterator<Item = Arc<Table>>) -> Result<Schema, StoreError> {
    Schema::new(tables).map_err(|error| StoreError::schema(error.table, error.why))
}

impl Fills {
    /// Compares the constraints between rows with what is recorded as filled, and takes that out of the records.
    pub(super) async fn pending(
        store: &dyn Store,
        resources: &[Resource],
        planned: &[SchemaChange],
        recorded: &mut BTreeMap<(String, String), String>,
    ) -> Result<Fills, StoreError> {
        let (mut fills, mut unrecorded) = (Vec::new(), Vec::new());
        for resource in resources {
            let Some(def) = &resource.def else { continue };
            let main = def.table().name();
            let tables = resource.constraints.tables().map(|table| table.name().to_owned());
            let tables: BTreeSet<String> = tables.collect();
            let is_recorded = |table: &String| {
                recorded.get(&(main.to_owned(), table.clone())).is_some_and(|said| said == FILLED)
            };
            let new: BTreeSet<String> = tables.iter().filter(|table| !is_recorded(table)).cloned().collect();
            for table in tables {
                recorded.remove(&(main.to_owned(), table));
            }
            unrecorded.extend(new.iter().map(|table| (main.to_owned(), table.clone())));
            if new.is_empty() {
                continue;
            }
            if let Some(live) = live_part(def.table(), planned)?
                && has_rows(store, &live).await?
            {
                fills.push(Fill::of(resource, def, live, &new, planned)?);
            }
        }
        Ok(Fills { fills, unrecorded })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fills.is_empty()
    }

    /// The fills, as changes.
    pub(super) fn changes(&self) -> Vec<SchemaChange> {
        let of = |fill: &Fill| {
            let from = fill.live.name().to_owned();
            let change = |table: &Arc<Table>| SchemaChange {
                table: table.clone(),
                difference: Difference::FillTable { from: from.clone() },
                statements: Vec::new(),
            };
            fill.tables().map(change).collect::<Vec<_>>()
        };
        self.fills.iter().flat_map(of).collect()
    }

    /// Fills the tables, or refuses rows that violate a constraint and leaves the store as it was.
    pub(super) async fn carry_out(
        &self,
        runner: &ScanRunner,
        store: &dyn Store,
        ids: &Ids,
        tell: &(dyn Fn(&RunProgress) + Send + Sync),
    ) -> Result<(), StoreError> {
        let mut violations = Vec::new();
        for fill in &self.fills {
            violations.extend(fill.carry_out(runner, store, ids, tell).await?);
        }
        if violations.is_empty() {
            return Ok(());
        }
        for fill in &self.fills {
            fill.give_up(runner, store, ids).await?;
        }
        let more = if violations.len() > LISTED_MAX { "; and more" } else { "" };
        violations.truncate(LISTED_MAX);
        let why = format!(
            "rows violate a new constraint: {}{more}. Nothing was changed: correct these rows, or change the constraint",
            violations.join("; ")
        );
        let tables: Vec<&str> = self.fills.iter().map(|fill| fill.live.name()).collect();
        Err(StoreError::schema(format!("table {}", tables.join(", ")), why))
    }

    /// Forgets the runs, when the tables are recorded.
    pub(super) async fn forget(&self, runner: &ScanRunner) -> Result<(), StoreError> {
        for fill in &self.fills {
            runner.remove(&fill.run()).await?;
        }
        Ok(())
    }
}

async fn has_rows(store: &dyn Store, table: &Arc<Table>) -> Result<bool, StoreError> {
    let mut scan = Scan::all(table);
    loop {
        let page = store.scan(&scan).await?;
        if !page.rows.is_empty() {
            return Ok(true);
        }
        let Some(next) = page.next else { return Ok(false) };
        scan = scan.after(next).map_err(misuse)?;
    }
}

impl Fill {
    fn of(
        resource: &Resource,
        def: &Arc<TableDef>,
        live: Arc<Table>,
        new: &BTreeSet<String>,
        planned: &[SchemaChange],
    ) -> Result<Fill, StoreError> {
        let constraints = &resource.constraints;
        let unique = constraints.unique.iter().filter(|unique| new.contains(unique.table.name()));
        let is_new = |reference: &&RowReference| {
            reference.counts.as_ref().is_some_and(|counts| new.contains(counts.name()))
        };
        let live_reference = |reference: &RowReference| {
            let target = live_part(reference.def.table(), planned)?;
            Ok(LiveReference { reference: reference.clone(), target })
        };
        let references = constraints.references.iter().filter(is_new).map(live_reference);
        Ok(Fill {
            name: resource.name.clone(),
            def: def.clone(),
            live,
            unique: unique.cloned().collect(),
            references: references.collect::<Result<Vec<LiveReference>, StoreError>>()?,
        })
    }

    fn tables(&self) -> impl Iterator<Item = &Arc<Table>> {
        let counts = self.references.iter().filter_map(|one| one.reference.counts.as_ref());
        self.unique.iter().map(|unique| &unique.table).chain(counts)
    }

    /// The name of the run, which follows from what is filled.
    fn run(&self) -> String {
        let tables: Vec<&str> = self.tables().map(|table| table.name()).collect();
        format!("fill {}", tables.join(" "))
    }

    /// Expands and backfills. Returns the rows that violate a constraint.
    async fn carry_out(
        &self,
        runner: &ScanRunner,
        store: &dyn Store,
        ids: &Ids,
        tell: &(dyn Fn(&RunProgress) + Send + Sync),
    ) -> Result<Vec<String>, StoreError> {
        let scans = scans_table().map_err(|error| StoreError::schema(error.table, error.why))?;
        store.migrate(&schema_of(self.tables().cloned().chain([scans]))?, Migrate::Apply).await?;
        let run = self.run();
        match runner.progress(&run).await? {
            // What is there follows from rows as they were when the constraint was declared before.
            None => self.empty(store, ids).await?,
            Some(progress) if progress.state == "STOPPED" => {
                self.empty(store, ids).await?;
                runner.remove(&run).await?;
            }
            Some(_) => {}
        }
        runner.start(&run, self, RunSettings { ranges: RANGES, rate: None }).await?;
        runner.drive(&run, self, WORKERS, tell).await?;
        let progress = runner.progress(&run).await?.filter(RunProgress::is_done);
        let Some(progress) = progress else {
            return Err(StoreError::unavailable(format!("the run `{run}` was stopped by another process")));
        };
        Ok(progress.problems)
    }

    /// Leaves the store as it was.
    async fn give_up(&self, runner: &ScanRunner, store: &dyn Store, ids: &Ids) -> Result<(), StoreError> {
        self.empty(store, ids).await?;
        let own = schema_of(self.tables().cloned())?;
        let shown = store.migrate(&own, Migrate::Show).await?;
        let others = shown.iter().filter(|change| change.difference == Difference::DropTable);
        let others = schema_of(others.map(|change| change.table.clone()))?;
        let dropped = store.migrate(&others, Migrate::Show).await?;
        let is_own = |change: &SchemaChange| {
            change.difference == Difference::DropTable && own.table(change.table.name()).is_some()
        };
        if dropped.iter().all(is_own) {
            store.migrate(&others, Migrate::ApplyWithLoss).await?;
        }
        runner.remove(&self.run()).await
    }

    /// Removes all rows of the tables of the constraints.
    async fn empty(&self, store: &dyn Store, ids: &Ids) -> Result<(), StoreError> {
        for table in self.tables() {
            let mut scan = Scan::all(table);
            loop {
                let page = store.scan(&scan).await?;
                for row in &page.rows {
                    let step = Step::remove(table, row.key().iter().cloned());
                    let plan = Plan::of(row.tenant(), ids.next()).step(step).without_rows().build();
                    let (Commit::Applied(_) | Commit::Refused(_) | Commit::Fenced) =
                        store.commit(&plan.map_err(misuse)?).await?;
                }
                let Some(next) = page.next else { break };
                scan = scan.after(next).map_err(misuse)?;
            }
        }
        Ok(())
    }

    fn is_live(&self, row: &Row) -> bool {
        is_live(&self.def, row)
    }

    /// A value of a row. A column that the migration adds has its default.
    fn value(&self, row: &Row, column: &str) -> Value {
        let former = || self.def.table().renamed_from(column).and_then(|former| row.get(former));
        let default = || {
            let column = self.def.table().column(column)?;
            column.default.clone()
        };
        row.get(column).or_else(former).cloned().or_else(default).unwrap_or(Value::Null)
    }

    /// What a row takes of a unique constraint; nothing if one of its values is null.
    fn taken(&self, row: &Row, unique: &UniqueFields) -> Option<Vec<Value>> {
        let values = unique.fields.iter().map(|field| self.value(row, field));
        values.map(|value| (!value.is_null()).then_some(value)).collect()
    }

    /// The rows that have taken these values already, of each of some constraints.
    async fn unique_effects(
        &self,
        store: &dyn Store,
        rows: &[&Row],
        effects: &mut RowEffects,
    ) -> Result<(), StoreError> {
        for unique in &self.unique {
            let wanted: Vec<(&Row, Vec<Value>)> =
                rows.iter().filter_map(|row| Some((*row, self.taken(row, unique)?))).collect();
            let addresses =
                wanted.iter().map(|(row, key)| Address::new(&unique.table, row.tenant(), key.clone()));
            let addresses = addresses.collect::<Result<Vec<Address>, PlanError>>().map_err(misuse)?;
            let found = read(store, &addresses).await?;
            let mut first: BTreeMap<String, String> = BTreeMap::new();
            for ((row, key), found) in wanted.into_iter().zip(found) {
                let own = key_text(row.key());
                let holder = found.as_ref().and_then(|found| found.text(TAKEN_BY)).map(str::to_owned);
                let holder = holder.or_else(|| first.get(&key_text(&key)).cloned());
                match holder {
                    Some(holder) if holder == own => {}
                    Some(holder) => {
                        let fields = unique.fields.iter().zip(&key);
                        let values = fields.map(|(field, value)| format!("{field} {}", value.to_json()));
                        let values = values.collect::<Vec<_>>().join(" and ");
                        effects
                            .problems
                            .push(format!("{row}: {values}: it is taken by {} {holder}", self.name));
                    }
                    None => {
                        first.insert(key_text(&key), own.clone());
                        effects.steps.push(Step::insert(&unique.table, key).set(TAKEN_BY, own));
                    }
                }
            }
        }
        Ok(())
    }

    async fn reference_effects(
        &self,
        store: &dyn Store,
        rows: &[&Row],
        effects: &mut RowEffects,
    ) -> Result<(), StoreError> {
        for LiveReference { reference, target } in &self.references {
            let is_itself = |row: &Row, value: &Value| {
                reference.def.table().name() == self.def.table().name()
                    && row.key() == std::slice::from_ref(value)
            };
            let named = |row: &&&Row| {
                let value = self.value(row, &reference.field);
                (!value.is_null() && !is_itself(row, &value)).then_some(value)
            };
            let wanted: Vec<(&Row, Value)> =
                rows.iter().filter_map(|row| Some((*row, named(&row)?))).collect();
            let found = match target {
                None => vec![None; wanted.len()],
                Some(target) => {
                    let address =
                        |(row, value): &(&Row, Value)| Address::new(target, row.tenant(), [value.clone()]);
                    let addresses = wanted.iter().map(address).collect::<Result<Vec<Address>, PlanError>>();
                    read(store, &addresses.map_err(misuse)?).await?
                }
            };
            let mut counts: BTreeMap<String, (Value, i64)> = BTreeMap::new();
            for ((row, value), found) in wanted.into_iter().zip(found) {
                let what = format!("{} {}", reference.target, key_text([&value]));
                match found {
                    Some(found) if is_live(&reference.def, &found) => {
                        counts.entry(key_text([&value])).or_insert((value, 0)).1 += 1;
                    }
                    found => {
                        let why = if found.is_some() { "was deleted" } else { "does not exist" };
                        effects.problems.push(format!("{row}: {}: {what} {why}", reference.field));
                    }
                }
            }
            if let Some(table) = &reference.counts {
                effects.steps.extend(counts.into_values().map(|(key, number)| count(table, key, number)));
            }
        }
        Ok(())
    }
}

fn is_live(def: &TableDef, row: &Row) -> bool {
    let live = def.live_states();
    let state = def.states().and_then(|(state, _)| row.text(state));
    live.is_empty() || live.iter().any(|one| state == Some(one.as_ref()))
}

async fn read(store: &dyn Store, addresses: &[Address]) -> Result<Vec<Option<Row>>, StoreError> {
    match addresses.is_empty() {
        true => Ok(Vec::new()),
        false => store.get(addresses, Consistency::Strong).await,
    }
}

#[async_trait]
impl ScanTask for Fill {
    fn table(&self) -> &Arc<Table> {
        &self.live
    }

    fn page_rows(&self) -> usize {
        (STEPS_MAX / self.tables().count().max(1)).max(1)
    }

    async fn effects(&self, store: &dyn Store, rows: &[Row]) -> Result<RowEffects, StoreError> {
        let live: Vec<&Row> = rows.iter().filter(|row| self.is_live(row)).collect();
        let mut effects = RowEffects::default();
        self.unique_effects(store, &live, &mut effects).await?;
        self.reference_effects(store, &live, &mut effects).await?;
        Ok(effects)
    }
}
