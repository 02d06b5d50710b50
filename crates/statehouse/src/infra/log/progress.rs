//! How far a group has got: the rows, the steps on them, and what can be asked.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use statehouse_store::guard::{column, now};
use statehouse_store::{
    Address, Clock, Commit, Consistency, Plan, PlanError, Position, Query, RetryPolicy, Row, SchemaError,
    Step, Store, StoreError, Table, Tenant, Type, Value, commit_known,
};

use super::parking::{self, ParkedRecord, ParkedRows};
use super::{column_of, offset_at};
use crate::infra::lease::{ACQUIRED_AT, EPOCH, EXPIRES_AT, FREE, HOLDER, STATE};
use crate::system;

/// The table of progress.
pub const PROGRESS: &str = "house_progress";
pub(super) const CONSUMER: &str = "consumer";
pub(super) const LOG_PARTITION: &str = "log_partition";
pub(super) const REACHED: &str = "reached";
pub(super) const ERA: &str = "era";
pub(super) const PARKED_COUNT: &str = "parked";
pub(super) const MISSED: &str = "missed";
pub(super) const KEEPS_FROM: &str = "keeps_from";
pub(super) const UPDATED_AT: &str = "updated_at";
/// The index across tenants by which the trimmer finds the slowest.
pub(super) const KEEPS: &str = "keeps";

/// The declaration of the table.
pub fn progress_table() -> Result<Arc<Table>, SchemaError> {
    Table::named(PROGRESS)
        .partition(CONSUMER, Type::Text)
        .sort(LOG_PARTITION, Type::Int)
        .defaulted(REACHED, Type::Int, 0)
        .defaulted(ERA, Type::Int, 0)
        .defaulted(PARKED_COUNT, Type::Int, 0)
        .defaulted(MISSED, Type::Int, 0)
        .optional(KEEPS_FROM, Type::Int)
        .defaulted(STATE, Type::Text, FREE)
        .optional(HOLDER, Type::Text)
        .defaulted(EPOCH, Type::Int, 0)
        .optional(ACQUIRED_AT, Type::Time)
        .optional(EXPIRES_AT, Type::Time)
        .required(UPDATED_AT, Type::Time)
        .global_index(KEEPS, &[LOG_PARTITION], &[KEEPS_FROM])
        .build()
}

/// The tables that progress stands in, and the owner of the low-water marks.
#[derive(Clone, Debug)]
pub struct ConsumerTables {
    /// How far groups have got.
    pub progress: Arc<Table>,
    /// What is parked.
    pub parked: Arc<Table>,
    /// The house itself.
    pub house: Tenant,
}

static BOOKS: LazyLock<Result<ConsumerTables, SchemaError>> = LazyLock::new(|| {
    let missing = || SchemaError { table: PROGRESS.to_owned(), why: "the house has no name".to_owned() };
    Ok(ConsumerTables {
        progress: progress_table()?,
        parked: parking::parked_table()?,
        house: system::tenant().ok_or_else(missing)?,
    })
});

impl ConsumerTables {
    /// The tables. Their declarations are right, which a test shows.
    pub fn open() -> Result<&'static ConsumerTables, StoreError> {
        BOOKS.as_ref().map_err(|error| StoreError::schema(error.table.as_str(), error.why.as_str()))
    }

    pub(super) fn key(consumer: &str, partition: u32) -> [Value; 2] {
        [consumer.into(), i64::from(partition).into()]
    }

    pub(super) fn address(
        &self,
        tenant: &Tenant,
        consumer: &str,
        partition: u32,
    ) -> Result<Address, StoreError> {
        Address::new(&self.progress, tenant, ConsumerTables::key(consumer, partition)).map_err(misuse)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
pub(super) fn misuse(error: PlanError) -> StoreError {
    StoreError::schema("the progress of a group", error.to_string())
}

/// What a row of progress says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupProgress {
    /// Whether there is a row.
    pub(super) present: bool,
    /// Everything up to this offset is done, in this era.
    pub(super) reached: u64,
    pub(super) era: i64,
    pub(super) epoch: i64,
    /// How many records are parked.
    pub(super) parked: i64,
    /// How many were trimmed before they could be read.
    pub(super) missed: u64,
}

impl GroupProgress {
    pub(super) fn of(row: Option<&Row>) -> Result<GroupProgress, StoreError> {
        let Some(row) = row else { return Ok(GroupProgress::default()) };
        Ok(GroupProgress {
            present: true,
            reached: offset_at(row, REACHED)?,
            era: row.get_int(ERA)?,
            epoch: row.get_int(EPOCH)?,
            parked: row.get_int(PARKED_COUNT)?,
            missed: offset_at(row, MISSED)?,
        })
    }

    /// What is done in an era. A row of another one says nothing about it (I8).
    pub(super) fn done_in(&self, era: i64) -> u64 {
        if self.era == era { self.reached } else { 0 }
    }

    /// The step that every effect on a tenant's rows carries (I2, I3, I4), to what comes after it.
    pub(super) fn step_to(
        &self,
        after: &GroupProgress,
        consumer: &str,
        partition: u32,
        books: &ConsumerTables,
    ) -> Step {
        let key = ConsumerTables::key(consumer, partition);
        let step = match self.present {
            false => Step::insert(&books.progress, key),
            true => Step::update(&books.progress, key)
                .guard(column(REACHED).eq(column_of(self.reached)))
                .guard(column(PARKED_COUNT).eq(self.parked))
                .guard(column(EPOCH).le(after.epoch)),
        };
        step.set(REACHED, column_of(after.reached))
            .set(ERA, after.era)
            .set(PARKED_COUNT, after.parked)
            .set(EPOCH, after.epoch)
            .set(UPDATED_AT, now())
    }

    /// The step that moves the low-water mark of the house (I6, I7, I8); a holder's plan has the lease's guard as well.
    pub(super) fn low_water_to(
        &self,
        after: &GroupProgress,
        consumer: &str,
        partition: u32,
        books: &ConsumerTables,
    ) -> Step {
        let key = ConsumerTables::key(consumer, partition);
        let step = match self.present {
            false => Step::insert(&books.progress, key),
            true => Step::update(&books.progress, key).guard(column(ERA).eq(self.era)),
        };
        step.set(REACHED, column_of(after.reached))
            .set(KEEPS_FROM, column_of(after.reached))
            .set(ERA, after.era)
            .set(MISSED, column_of(after.missed))
            .set(EPOCH, after.epoch)
            .set(UPDATED_AT, now())
    }
}

/// How far a group has got in one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStatus {
    /// The partition.
    pub partition: u32,
    /// Everything up to this offset is done.
    pub reached: u64,
    /// The newest offset.
    pub head: u64,
    /// How many records are ahead.
    pub records: u64,
    /// How old the oldest of them is.
    pub behind: Duration,
    /// How many records were trimmed before the group could read them.
    pub missed: u64,
}

/// A group of the house, for those who watch over it.
#[derive(Clone, Debug)]
pub struct GroupInfo {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    name: String,
}

/// How often a write that met others is tried again.
const RACES_MAX: u32 = 20;

impl GroupInfo {
    /// The group of that name.
    pub fn named(store: Arc<dyn Store>, clock: Arc<dyn Clock>, name: impl Into<String>) -> GroupInfo {
        GroupInfo { store, clock, name: name.into() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    async fn low_water(&self) -> Result<Vec<GroupProgress>, StoreError> {
        let books = ConsumerTables::open()?;
        let addresses = (0..self.store.partitions())
            .map(|partition| books.address(&books.house, &self.name, partition))
            .collect::<Result<Vec<Address>, StoreError>>()?;
        let rows = self.store.get(&addresses, Consistency::Strong).await?;
        rows.iter().map(|row| GroupProgress::of(row.as_ref())).collect()
    }

    /// Has the group begin behind this offset, unless it has begun already.
    pub(crate) async fn begin_at(&self, partition: u32, offset: u64) -> Result<(), StoreError> {
        let books = ConsumerTables::open()?;
        let after = GroupProgress { reached: offset, ..GroupProgress::default() };
        let step = GroupProgress::default().low_water_to(&after, &self.name, partition, books);
        let plan = Plan::of(&books.house, "log.begin").step(step).without_rows().build().map_err(misuse)?;
        commit_known(&*self.store, &plan, RetryPolicy::WORKER).await.map(drop)
    }

    /// Has the group begin at the end of every partition in which it has not begun.
    pub(crate) async fn begin_at_end(&self) -> Result<(), StoreError> {
        let marks = self.low_water().await?;
        if marks.iter().all(|mark| mark.present) {
            return Ok(());
        }
        let heads = self.store.wait_log(&[], Duration::ZERO).await?;
        for (partition, (mark, head)) in (0..).zip(marks.into_iter().zip(heads)) {
            if !mark.present {
                self.begin_at(partition, head).await?;
            }
        }
        Ok(())
    }

    /// How far it has got, partition by partition.
    pub async fn status(&self) -> Result<Vec<GroupStatus>, StoreError> {
        let mut standing = Vec::new();
        let marks = self.low_water().await?;
        let heads = self.store.wait_log(&[], Duration::ZERO).await?;
        for (partition, (mark, head)) in (0..).zip(marks.into_iter().zip(heads)) {
            let missed = mark.missed;
            if mark.reached >= head {
                let (reached, records, behind) = (mark.reached, 0, Duration::ZERO);
                standing.push(GroupStatus { partition, reached, head, records, behind, missed });
                continue;
            }
            let page = self.store.read_log(partition, mark.reached, 1).await?;
            // A group that has not begun yet has nothing behind it that it could have missed.
            let start = if mark.present { mark.reached } else { page.oldest.saturating_sub(1) };
            let first = page.records.first();
            standing.push(GroupStatus {
                partition,
                reached: mark.reached,
                head: page.head,
                records: page.head.saturating_sub(start),
                behind: first.map_or(Duration::ZERO, |record| self.clock.now().since(record.at)),
                missed,
            });
        }
        Ok(standing)
    }

    /// Goes back, or forward, so that the next record is the one after this offset. Everything behind it is done again,
    /// for every tenant (I8).
    pub async fn seek(&self, partition: u32, to: u64) -> Result<(), StoreError> {
        let books = ConsumerTables::open()?;
        let address = books.address(&books.house, &self.name, partition)?;
        for _ in 0..RACES_MAX {
            let rows = self.store.get(std::slice::from_ref(&address), Consistency::Strong).await?;
            let mark = GroupProgress::of(rows.first().and_then(Option::as_ref))?;
            let after = GroupProgress { reached: to, era: mark.era + 1, ..mark.clone() };
            let step = mark.low_water_to(&after, &self.name, partition, books);
            let plan =
                Plan::of(&books.house, "log.seek").step(step).without_rows().build().map_err(misuse)?;
            match self.store.commit(&plan).await {
                Ok(Commit::Applied(_)) => return Ok(()),
                // A second seek to the same place does no harm.
                Ok(_) | Err(StoreError::OutcomeUnknown { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::unavailable(format!("the group {} moves on all the time; try again", self.name)))
    }

    /// What is parked of a tenant, by partition, key and offset.
    pub async fn parked(&self, tenant: &Tenant) -> Result<Vec<ParkedRecord>, StoreError> {
        let books = ConsumerTables::open()?;
        let mut found = Vec::new();
        for partition in 0..self.store.partitions() {
            let query = Query::table(&books.parked, tenant, ConsumerTables::key(&self.name, partition))
                .map_err(misuse)?;
            found.extend(parking::all(&*self.store, query).await?);
        }
        Ok(found)
    }

    /// Lets the holder of the partition retry the parked records of a key, oldest first. Returns whether there was
    /// anything.
    pub async fn replay(&self, tenant: &Tenant, partition: u32, subject: &str) -> Result<bool, StoreError> {
        let books = ConsumerTables::open()?;
        let rows = parking::of_subject(&*self.store, tenant, &self.name, partition, subject, 1).await?;
        let Some(head) = rows.first() else { return Ok(false) };
        let step = parking::ready(head, &self.name, books);
        let plan = Plan::of(tenant, "log.replay").step(step).without_rows().build().map_err(misuse)?;
        Ok(matches!(commit_known(&*self.store, &plan, RetryPolicy::WORKER).await?, Commit::Applied(_)))
    }

    /// Gives up one parked record, under all of its keys. Says whether it was there.
    pub async fn discard(&self, tenant: &Tenant, parked: &ParkedRecord) -> Result<bool, StoreError> {
        let books = ConsumerTables::open()?;
        let address = books.address(tenant, &self.name, parked.partition)?;
        for _ in 0..RACES_MAX {
            let rows = self.store.get(std::slice::from_ref(&address), Consistency::Strong).await?;
            let mark = GroupProgress::of(rows.first().and_then(Option::as_ref))?;
            let lot = ParkedRows::read(&*self.store, tenant, &self.name, parked.partition).await?;
            let keys = lot.keys_at(parked.offset);
            if keys.is_empty() {
                return Ok(false);
            }
            let left = mark.parked - i64::try_from(keys.len()).unwrap_or(0);
            let after = GroupProgress { parked: left, ..mark.clone() };
            let plan = Plan::of(tenant, "log.discard")
                .step(mark.step_to(&after, &self.name, parked.partition, books))
                .steps(parking::remove_all(&self.name, parked.partition, &keys, parked.offset, books))
                .without_rows()
                .build()
                .map_err(misuse)?;
            match commit_known(&*self.store, &plan, RetryPolicy::WORKER).await? {
                Commit::Applied(_) => return Ok(true),
                Commit::Refused(_) | Commit::Fenced => {}
            }
        }
        Err(StoreError::unavailable(format!("the group {} moves on all the time; try again", self.name)))
    }
}

/// Whether everything of a tenant up to these places is done: by the low-water mark, or by the tenant's own row, which is
/// ahead of it.
pub(crate) async fn has_passed(
    store: &dyn Store,
    group: &str,
    tenant: &Tenant,
    places: &[Position],
) -> Result<bool, StoreError> {
    let books = ConsumerTables::open()?;
    let mut addresses = Vec::with_capacity(2 * places.len());
    for place in places {
        addresses.push(books.address(&books.house, group, place.partition)?);
        addresses.push(books.address(tenant, group, place.partition)?);
    }
    if addresses.is_empty() {
        return Ok(true);
    }
    let rows = store.get(&addresses, Consistency::Strong).await?;
    let marks = rows.iter().map(|row| GroupProgress::of(row.as_ref()));
    let marks = marks.collect::<Result<Vec<GroupProgress>, StoreError>>()?;
    let passed = |(place, marks): (&Position, &[GroupProgress])| match marks {
        [house, own] => house.reached.max(own.done_in(house.era)) >= place.offset,
        _ => false,
    };
    Ok(places.iter().zip(marks.chunks(2)).all(passed))
}

#[cfg(test)]
mod tests {
    use statehouse_store::Time;

    use super::*;

    #[test]
    fn progress_that_cannot_be_read_is_not_the_beginning_of_the_log() {
        let progress = |reached: Value| {
            let table = progress_table().unwrap();
            let content = |column: &statehouse_store::Column| match column.name.as_str() {
                CONSUMER => "mail".into(),
                LOG_PARTITION => 3.into(),
                REACHED => reached.clone(),
                UPDATED_AT => Time::MIN.into(),
                _ => column.default.clone().unwrap_or(Value::Null),
            };
            let values = table.columns().iter().map(content).collect();
            let row = Row::new(table, Tenant::new("acme").unwrap(), values, 1);
            GroupProgress::of(Some(&row)).map(|progress| progress.reached)
        };
        assert_eq!(progress(7.into()), Ok(7));
        let place = "house_progress(tenant=acme, consumer='mail', log_partition=3).reached";
        for (stored, why) in [
            (Value::Null, "is null"),
            ((-1).into(), "is negative"),
            ("7".into(), "has a value that is not of type int"),
        ] {
            assert_eq!(progress(stored), Err(StoreError::corrupt(place, why)));
        }
    }
}
