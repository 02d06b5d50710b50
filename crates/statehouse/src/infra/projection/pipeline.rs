//! From changes to plans: what is known of the entries, what the changes make of it, and the steps that write it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{
    Address, Consistency, Guard, Operand, PlanError, Position, Record, Row, Step, Store, StoreError, Table,
    Tenant, Value,
};

use super::{
    EntryContent, EntryDelta, FanOutTask, GONE, ProjectionEntry, Projector, RowLookup, SOURCE_ORDER,
    SourceChange, SourceMention,
};
use crate::infra::log::{HandlerContext, HandlerError, HandlerWrite, RecordHandler};

/// Rows in one plan at most; one more is the group's progress.
const STEPS_MAX: usize = 96;
/// Bits of a mark that are a record's place in its partition.
const OFFSET_BITS: u32 = 48;

/// One generation of a projection, as a group that reads the log.
#[derive(Debug)]
pub(super) struct GenerationGroup {
    pub(super) projector: Arc<dyn Projector>,
    pub(super) generation: i64,
    pub(super) group: String,
}

impl GenerationGroup {
    pub(super) fn of(projector: &Arc<dyn Projector>, generation: i64) -> GenerationGroup {
        let group = group_of(projector.name(), generation);
        GenerationGroup { projector: projector.clone(), generation, group }
    }
}

/// The group of a generation.
pub(super) fn group_of(name: &str, generation: i64) -> String {
    format!("{name}@{generation}")
}

/// The generation whose group this is, if it is one of the projection's.
pub(super) fn generation_of(name: &str, group: &str) -> Option<i64> {
    group.strip_prefix(name)?.strip_prefix('@')?.parse().ok()
}

#[async_trait]
impl RecordHandler for GenerationGroup {
    fn group(&self) -> &str {
        &self.group
    }

    fn wants(&self, record: &Record) -> bool {
        self.projector.wants(record)
    }

    async fn handle(
        &self,
        records: &[Record],
        reading: &HandlerContext<'_>,
    ) -> Result<HandlerWrite, HandlerError> {
        if let (Some(reach), Some(first)) = (self.projector.reach(), records.first()) {
            if let Some(effect) = self.bundle(records, reading).await? {
                return Ok(effect);
            }
            let piece = reach.piece(self.generation, FanOutTask::Record(first), reading).await?;
            let effect = HandlerWrite::of(1, piece.steps);
            return Ok(HandlerWrite { goes_on: !piece.is_last, contends: true, ..effect });
        }
        let mut sheet = PendingRows::over(&*self.projector, self.generation);
        let changes = match self.projector.row_lookup() {
            None => {
                let mentions = records.iter().map(|record| self.projector.mentions(record));
                let mentions = mentions.collect::<Result<Vec<_>, _>>().map_err(HandlerError::Never)?;
                let changes = changes_in(&*self.projector, reading.store, reading.tenant, mentions).await?;
                sheet.read(reading.store, reading.tenant, changes.iter().flatten()).await?;
                changes
            }
            Some(look) => {
                let mut named: Vec<Vec<Vec<Value>>> =
                    records.iter().map(|record| look.named(record)).collect();
                named.truncate(looked_up_at_once(named.iter().map(Vec::len)));
                let seen = sheet.look_up(look, reading.store, reading.tenant, named.iter().flatten()).await?;
                let mut seen = seen.into_iter();
                let of_record = |(keys, record): (&Vec<Vec<Value>>, &Record)| {
                    let marked = |change| SourceChange { order: mark_of(record), ..change };
                    seen.by_ref().take(keys.len()).map(|change| change.map(marked)).collect()
                };
                let of_records = named.iter().zip(records).map(of_record);
                of_records.collect::<Result<Vec<_>, String>>().map_err(HandlerError::Never)?
            }
        };
        let (sheet, taken) = sheet.fill(changes)?;
        let effect = HandlerWrite::of(taken.max(1), sheet.steps());
        // A guard that fails means that another process has written an entry meanwhile.
        Ok(HandlerWrite { goes_on: taken == 0, contends: true, ..effect })
    }

    /// A bundle demands all that it was made from.
    async fn ahead(
        &self,
        records: &[Record],
        reading: &HandlerContext<'_>,
    ) -> Result<Option<HandlerWrite>, HandlerError> {
        self.bundle(records, reading).await
    }
}

impl GenerationGroup {
    /// What the first few records make together, if they can be done so.
    async fn bundle(
        &self,
        records: &[Record],
        reading: &HandlerContext<'_>,
    ) -> Result<Option<HandlerWrite>, HandlerError> {
        // What was refused is done one by one, by whatever is so now.
        let Some(reach) = self.projector.reach().filter(|_| reading.refused == 0) else { return Ok(None) };
        let matters: Vec<FanOutTask<'_>> = records.iter().map(FanOutTask::Record).collect();
        let bundle = reach.bundle(self.generation, &matters, reading).await?;
        Ok(bundle
            .map(|bundle| HandlerWrite { contends: true, ..HandlerWrite::of(bundle.taken, bundle.steps) }))
    }
}

/// Of how many records the rows are looked up at once, if they name so many each: one plan will not take more, and one
/// record has to be.
fn looked_up_at_once(names: impl Iterator<Item = usize>) -> usize {
    let sums = names.scan(0, |sum: &mut usize, names| {
        *sum += names;
        Some(*sum)
    });
    sums.take_while(|sum| *sum <= STEPS_MAX).count().max(1)
}

/// What the entries say, as their order, that were written for a record: no other record's says the same, and no scan's,
/// which is 0.
fn mark_of(record: &Record) -> i64 {
    let Some(Position { partition, offset }) = record.position else { return 0 };
    (i64::from(partition) << OFFSET_BITS) | i64::try_from(offset).unwrap_or(i64::MAX)
}

/// What the mentions of each record change. Rows that a record has only in part are looked up: a strong read, after the record,
/// finds the row at the record's version or at a later one, and it counts under that one (I2).
pub(crate) async fn changes_in(
    projector: &dyn Projector,
    store: &dyn Store,
    tenant: &Tenant,
    mentions: Vec<Vec<SourceMention>>,
) -> Result<Vec<Vec<SourceChange>>, HandlerError> {
    let partial: BTreeMap<&str, &Vec<Value>> = mentions
        .iter()
        .flatten()
        .filter_map(|mention| match mention {
            SourceMention::Partial { key, source, .. } => Some((source.as_str(), key)),
            SourceMention::Change(_) => None,
        })
        .collect();
    let address = |key: &&Vec<Value>| Address::new(projector.source(), tenant, key.iter().cloned());
    let addresses = partial.values().map(address).collect::<Result<Vec<Address>, PlanError>>()?;
    let rows = match addresses.is_empty() {
        true => Vec::new(),
        false => store.get(&addresses, Consistency::Strong).await?,
    };
    let rows: HashMap<String, Option<Row>> = partial.into_keys().map(str::to_owned).zip(rows).collect();
    let change = |mention: SourceMention| match mention {
        SourceMention::Change(change) => change,
        SourceMention::Partial { source, order, .. } => match rows.get(&source).and_then(Option::as_ref) {
            Some(row) => projector.change_of(row),
            None => SourceChange { source, order, content: None },
        },
    };
    Ok(mentions.into_iter().map(|mentions| mentions.into_iter().map(change).collect()).collect())
}

/// What a plan will make of the rows of a generation.
#[derive(Clone)]
pub(super) struct PendingRows<'p> {
    projector: &'p dyn Projector,
    generation: i64,
    /// The entries as they were read.
    read: Arc<HashMap<String, ProjectionEntry>>,
    /// Those that change.
    changed: BTreeMap<String, (i64, Option<EntryContent>)>,
    /// Other rows, by table and key.
    others: BTreeMap<String, EntryDelta>,
}

impl<'p> PendingRows<'p> {
    pub(super) fn over(projector: &'p dyn Projector, generation: i64) -> PendingRows<'p> {
        let read = Arc::default();
        PendingRows { projector, generation, read, changed: BTreeMap::new(), others: BTreeMap::new() }
    }

    fn key(&self, source: &str) -> [Value; 2] {
        [self.generation.into(), source.into()]
    }

    /// Reads the entries that changes are about.
    pub(super) async fn read(
        &mut self,
        store: &dyn Store,
        tenant: &Tenant,
        changes: impl Iterator<Item = &SourceChange>,
    ) -> Result<(), HandlerError> {
        let mut sources: Vec<&str> = changes.map(|change| change.source.as_str()).collect();
        sources.sort_unstable();
        sources.dedup();
        let addresses = sources
            .iter()
            .map(|source| Address::new(self.projector.entries(), tenant, self.key(source)))
            .collect::<Result<Vec<Address>, PlanError>>()?;
        if addresses.is_empty() {
            return Ok(());
        }
        let rows = store.get(&addresses, Consistency::Strong).await?;
        let entries = sources.into_iter().zip(rows);
        let entries =
            entries.map(|(source, row)| Ok((source.to_owned(), ProjectionEntry::of(row.as_ref())?)));
        self.read = Arc::new(entries.collect::<Result<_, StoreError>>()?);
        Ok(())
    }

    /// Looks up rows, after their entries were read (I2): by key, what they mean, or why they cannot be understood.
    pub(super) async fn look_up(
        &mut self,
        look: &dyn RowLookup,
        store: &dyn Store,
        tenant: &Tenant,
        keys: impl Iterator<Item = &Vec<Value>>,
    ) -> Result<Vec<Result<SourceChange, String>>, HandlerError> {
        // Without the rows first: that is enough to know the entries.
        let blanks: Vec<(&Vec<Value>, Result<SourceChange, String>)> =
            keys.map(|key| (key, look.seen(key, None))).collect();
        let known = || blanks.iter().filter_map(|(key, blank)| Some((*key, blank.as_ref().ok()?)));
        self.read(store, tenant, known().map(|(_, blank)| blank)).await?;
        let by_source: BTreeMap<&str, &Vec<Value>> =
            known().map(|(key, blank)| (blank.source.as_str(), key)).collect();
        let address = |key: &&Vec<Value>| Address::new(self.projector.source(), tenant, key.iter().cloned());
        let addresses = by_source.values().map(address).collect::<Result<Vec<Address>, PlanError>>()?;
        let rows = match addresses.is_empty() {
            true => Vec::new(),
            false => store.get(&addresses, Consistency::Strong).await?,
        };
        let rows: BTreeMap<&str, Option<Row>> = by_source.into_keys().zip(rows).collect();
        let seen = |(key, blank): &(&Vec<Value>, Result<SourceChange, String>)| match blank {
            Ok(blank) => look.seen(key, rows.get(blank.source.as_str()).and_then(Option::as_ref)),
            Err(why) => Err(why.clone()),
        };
        Ok(blanks.iter().map(seen).collect())
    }

    /// What is known of a source: the order, and what the entry says.
    fn known(&self, source: &str) -> (i64, Option<&EntryContent>) {
        match (self.changed.get(source), self.read.get(source)) {
            (Some((order, content)), _) => (*order, content.as_ref()),
            (None, Some(entry)) => (entry.order, entry.content.as_ref()),
            (None, None) => (i64::MIN, None),
        }
    }

    /// Whether there is an entry that a change of a scanned row would replace.
    pub(super) fn replaces(&self, change: &SourceChange) -> bool {
        self.read.get(&change.source).is_some_and(|entry| entry.version > 0) && self.differs(change)
    }

    /// Whether a change makes a difference. One that was looked up does until its entry says which record it was written
    /// for (I2).
    fn differs(&self, change: &SourceChange) -> bool {
        let (order, content) = self.known(&change.source);
        match self.projector.row_lookup() {
            Some(_) => (order, content) != (change.order, change.content.as_ref()),
            None => change.supersedes(order),
        }
    }

    /// Takes a change in, unless it makes no difference (I2).
    fn apply(&mut self, change: SourceChange) -> Result<(), HandlerError> {
        if !self.differs(&change) {
            return Ok(());
        }
        let SourceChange { source, order, content } = change;
        let (_, before) = self.known(&source);
        if before != content.as_ref() {
            let deltas = self.projector.deltas(self.generation, &source, before, content.as_ref());
            for delta in deltas.map_err(StoreError::from)? {
                self.add(delta)?;
            }
        }
        self.changed.insert(source, (order, content));
        Ok(())
    }

    /// Takes in the changes of as many records as fit into a plan, and says how many. If not even the first one does, then
    /// of that one what fits, and none is done yet (I7).
    pub(super) fn fill(
        mut self,
        changes: Vec<Vec<SourceChange>>,
    ) -> Result<(PendingRows<'p>, usize), HandlerError> {
        let mut taken = 0;
        for changes in changes {
            let mut next = self.clone();
            changes.iter().cloned().try_for_each(|change| next.apply(change))?;
            if next.rows() > STEPS_MAX {
                if taken > 0 {
                    break;
                }
                // What is stored tells the next piece what is left: only that makes a difference.
                return Ok((self.part(&changes)?, 0));
            }
            (self, taken) = (next, taken + 1);
        }
        Ok((self, taken))
    }

    /// As many as fit of the changes that make a difference.
    fn part(mut self, changes: &[SourceChange]) -> Result<PendingRows<'p>, HandlerError> {
        for change in changes {
            let mut next = self.clone();
            next.apply(change.clone())?;
            if self.rows() > 0 && next.rows() > STEPS_MAX {
                break;
            }
            self = next;
        }
        Ok(self)
    }

    fn add(&mut self, delta: EntryDelta) -> Result<(), HandlerError> {
        let (EntryDelta::Add { table, key, .. }
        | EntryDelta::Put { table, key, .. }
        | EntryDelta::Remove { table, key }) = &delta;
        let name = format!("{table} {key:?}");
        match (self.others.get_mut(&name), delta) {
            (Some(EntryDelta::Add { amounts: sums, .. }), EntryDelta::Add { amounts, .. }) => {
                for (column, amount) in amounts {
                    let out_of_range =
                        || HandlerError::Never(format!("what it adds to {column} of {name} is out of range"));
                    let sum = sums.get(&column).copied().unwrap_or_default();
                    let sum = sum.checked_add(amount).ok_or_else(out_of_range)?;
                    sums.insert(column, sum);
                }
            }
            (_, delta) => drop(self.others.insert(name, delta)),
        }
        Ok(())
    }

    /// How many rows would be written.
    pub(super) fn rows(&self) -> usize {
        self.changed.len() + self.others.len()
    }

    /// The steps that write it.
    pub(super) fn steps(self) -> Vec<Step> {
        let table = self.projector.entries();
        let entry = |(source, (order, content)): (&String, &(i64, Option<EntryContent>))| {
            let version = self.read.get(source).map_or(0, |entry| entry.version);
            entry_step(table, self.key(source), version, *order, content.as_ref())
        };
        let entries: Vec<Step> = self.changed.iter().map(entry).collect();
        entries.into_iter().chain(self.others.into_values().filter_map(step_of)).collect()
    }
}

/// The step that writes an entry, over the version that was read (I2); 0 if there was none.
pub(crate) fn entry_step(
    table: &Arc<Table>,
    key: [Value; 2],
    version: i64,
    order: i64,
    content: Option<&EntryContent>,
) -> Step {
    let step = match version {
        0 => Step::insert(table, key),
        version => Step::update(table, key).guard(Guard::version(version)),
    };
    let step = step.set(SOURCE_ORDER, order).set(GONE, content.is_none());
    let own =
        table.other_columns().iter().filter(|column| ![SOURCE_ORDER, GONE].contains(&column.name.as_str()));
    own.fold(step, |step, column| {
        let value = content.and_then(|content| content.get(&column.name));
        step.set(&column.name, value.cloned().unwrap_or(Value::Null))
    })
}

/// The step of a delta; none where what was added was taken away again.
fn step_of(delta: EntryDelta) -> Option<Step> {
    match delta {
        EntryDelta::Add { table, key, amounts, columns } => {
            if amounts.values().all(|amount| *amount == 0) {
                return None;
            }
            let step = columns
                .into_iter()
                .fold(Step::upsert(&table, key), |step, (name, value)| step.set(&name, value));
            let added = amounts.into_iter().fold(step, |step, (name, amount)| {
                let column = Operand::Coalesce(name.clone(), 0.into());
                step.set(&name, column.add(amount))
            });
            Some(added)
        }
        EntryDelta::Put { table, key, columns } => Some(
            columns.into_iter().fold(Step::upsert(&table, key), |step, (name, value)| step.set(&name, value)),
        ),
        EntryDelta::Remove { table, key } => Some(Step::remove(&table, key)),
    }
}

/// A digest of entries in which their order does not count: the sum of a digest of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EntryDigest(u128);

impl EntryDigest {
    pub(super) fn add(&mut self, tenant: &Tenant, source: &str, order: i64, content: &EntryContent) {
        let text = format!("{tenant}\0{source}\0{order}\0{content:?}");
        let digest = text.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        });
        self.0 = self.0.wrapping_add(digest);
    }
}

impl std::fmt::Display for EntryDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// An error of a read, where a handler's would be.
pub(super) fn as_store_error(unable: HandlerError, name: &str) -> StoreError {
    match unable {
        HandlerError::Later(error) => error,
        HandlerError::Never(why) => StoreError::schema(format!("the projection {name}"), why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_records_are_looked_up_at_once_than_a_plan_takes() {
        let at_once = |names: &[usize]| looked_up_at_once(names.iter().copied());
        assert_eq!(at_once(&[40, 40, 16, 1]), 3);
        assert_eq!(at_once(&[40, 40, 17, 1]), 2);
        assert_eq!(at_once(&[0; 48]), 48);
        // One has to be, however many it names.
        assert_eq!(at_once(&[250, 1]), 1);
    }
}
