//! The contract of a store. Whatever keeps it can stand below everything else.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;

use crate::blank::{BlankRange, BlankedPage};
use crate::bug;
use crate::bug::Bug;
use crate::claim_range::{ClaimRange, claim_row_by_row};
use crate::error::StoreError;
use crate::log::{LogPage, Record};
use crate::migration::{Migrate, SchemaChange};
use crate::outcome::{Commit, Resolution};
use crate::plan::Plan;
use crate::read::{Consistency, Page, Query};
use crate::row::{Address, Cell, Row, Tenant};
use crate::scan::{Scan, Segment};
use crate::table::Schema;
use crate::time::Time;
use crate::value::Value;

/// Tables, plans of guarded steps, range reads and a log.
///
/// # What is promised
/// 1. **Atomic.** A plan is applied whole or not at all, rows and log records together. It is decided as
///    [`crate::eval::decide`] would decide it on the rows at one moment, with one reading of the engine's clock.
/// 2. **Serial.** Plans that name a common row take effect one after another. A step's condition is checked on
///    the row as the plans before it left it.
/// 3. **Durable.** What `commit` calls applied is still there after a crash or loss of power of the machine.
/// 4. **Certain or said to be uncertain.** [`Commit`] is final. Conflicts, deadlocks and throttling are retried
///    inside and never shown as a refusal. [`StoreError::OutcomeUnknown`] is returned exactly when the engine does
///    not know, and then `commit` with the same plan, or `resolve`, finds out.
/// 5. **Once.** Under one tenant and operation id at most one plan with a log entry is ever applied, as long as
///    its record is kept. A repetition gets the first one's record.
/// 6. **In order.** Each partition of the log is gapless and in the order of the commits, and has all events of the subjects
///    that belong to it, each once (see [`crate::log`]).
/// 7. **Apart.** No call on behalf of one tenant returns, changes or depends on rows or operations of another. Three
///    reads are on behalf of the house and not of a tenant: [`Scan::all`], [`Query::all_tenants`], and the log.
/// 8. **Fresh.** A strong read sees every commit that was acknowledged before it began.
///
/// # What is not promised
/// - A `get` of several rows, a page, or a `read_many`, is not one moment in time; each row by itself is.
/// - Eventual reads, which include all reads of an index, may be arbitrarily old.
/// - A refusal is not remembered: the same operation id may be tried again and may then be applied.
/// - A plan without a log entry is not remembered either: its guards must make it safe to repeat.
/// - Versions count the writes of one life of a row. A row that is deleted and inserted again begins at 1; a caller that
///   needs more keeps a tombstone.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// The engine's name: `model`, `sqlite`, `postgres`, `dynamodb`.
    fn engine(&self) -> &'static str;

    /// How many partitions the log has. Fixed when the store is created.
    fn partitions(&self) -> u32;

    /// Makes the live store fit a schema, or says what that would take. Idempotent, and safe to run from
    /// several processes at once. Returns the changes, in the order in which they are made.
    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError>;

    /// Applies a plan. The tables it names must have been migrated to.
    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError>;

    /// Finds out what became of an operation, and settles it if nothing has: claims the operation id with an
    /// `aborted` record, which fences the original for good, or learns that the original was applied.
    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError>;

    /// The record of an operation, if there is one. Claims nothing: where it answers `None`, the operation may still be
    /// in flight, and only `commit` or `resolve` can settle it.
    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError>;

    /// Reads rows by address. The answer has one entry for each address, in their order.
    async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError>;

    /// Reads a page of a range.
    async fn query(&self, query: &Query) -> Result<Page, StoreError>;

    /// Makes several reads in one go. The answer has one entry for each request, in their order: what a strong `get`, or a
    /// `query`, would have answered; of a value, what the row has that a strong `get` would have answered. They are not
    /// read at one moment.
    ///
    /// Unless an engine can do better, they are made at the same time.
    async fn read_many(&self, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>, StoreError> {
        let one = async |ask: &ReadRequest<'_>| match ask {
            ReadRequest::Get(addresses) => {
                self.get(addresses, Consistency::Strong).await.map(ReadResult::Rows)
            }
            ReadRequest::Value(cell) => {
                let rows = self.get(std::slice::from_ref(cell.address()), Consistency::Strong).await?;
                let row = rows.into_iter().next().flatten();
                Ok(ReadResult::Value(row.and_then(|row| cell.value_in(row))))
            }
            ReadRequest::Query(query) => self.query(query).await.map(ReadResult::Page),
        };
        join_all(asks.iter().map(one)).await.into_iter().collect()
    }

    /// Takes the first rows of a range (T1 to T4 of [`crate::claim_range`]), and returns them as they are then.
    ///
    /// Unless an engine can do better, the range is read and a plan is committed for each of its rows.
    async fn claim_range(&self, take: &ClaimRange) -> Result<Vec<Row>, StoreError> {
        claim_row_by_row(self, take).await
    }

    /// Reads a page of a whole table or of one of its segments. Strong, row by row.
    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError>;

    /// Divides what is left of a scan into at most `max` segments (1 to [`crate::scan::SEGMENTS_MAX`]) for
    /// [`Scan::within`]. The segments tile it: every row of the rest of the scan, also one that is inserted later, belongs
    /// to exactly one.
    ///
    /// An engine that divides by keys reads all keys once and makes segments of nearly equal size; there are fewer than
    /// `max` only if there are fewer rows. It can divide a segment again. An engine that divides by hash returns a segment
    /// that it is given unchanged, as the only one.
    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError>;

    /// Reads records of one partition after an offset (0: from the oldest), at most `limit`, never more than
    /// [`crate::limits::PAGE_MAX`]. A record has the events that belong to the partition, and no others.
    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError>;

    /// Returns the newest offset of each partition, as soon as one is above what was `seen` (one entry a
    /// partition; missing ones count as 0), or when `at_most` has passed.
    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError>;

    /// Forgets the records of a partition up to an offset, and with them their operation ids. The newest record
    /// of a partition is always kept.
    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError>;

    /// Blanks events about rows that were erased (B1 to B4 of [`crate::blank`]) in a bounded number of records, also in the copies
    /// that answers to repetitions are made from. Positions, names and operation ids stay. Idempotent; a caller goes on behind
    /// [`BlankedPage::reached`] until that is the end of its range.
    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError>;

    /// Removes from the engine's own files what rows and records contained before they were changed, deleted or blanked, as far as
    /// the engine can. It may take as long as to copy all data. SQLite rewrites its file. The model has no former contents;
    /// PostgreSQL and DynamoDB remove them by themselves, at a time of their own.
    async fn scrub(&self) -> Result<(), StoreError>;

    /// The time by the clock that `now` in a guard reads: the server's clock on PostgreSQL, the clock of this process elsewhere.
    async fn now(&self) -> Result<Time, StoreError>;

    /// What the engine would be sent for this, without sending it.
    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation;

    /// Finishes what is under way and lets go of files and connections. Later calls return `Unavailable`.
    async fn close(&self);
}

/// One of several reads that are made in one go.
#[derive(Clone, Copy, Debug)]
pub enum ReadRequest<'a> {
    /// Rows by address, strongly.
    Get(&'a [Address]),
    /// One value of a row, strongly: for those who need nothing else of a row that has much in it.
    Value(&'a Cell),
    /// A page of a range.
    Query(&'a Query),
}

/// The result of a [`ReadRequest`].
#[derive(Clone, Debug, PartialEq)]
pub enum ReadResult {
    /// The rows, one entry for each address.
    Rows(Vec<Option<Row>>),
    /// The value, null where the row has none; `None` if there is no such row.
    Value(Option<Value>),
    /// The page.
    Page(Page),
}

impl ReadResult {
    /// The rows of a [`ReadRequest::Get`], one entry for each address.
    pub fn into_rows(self) -> Result<Vec<Option<Row>>, Bug> {
        match self {
            ReadResult::Rows(rows) => Ok(rows),
            ReadResult::Value(_) | ReadResult::Page(_) => Err(bug!("not the result of a get: {self:?}")),
        }
    }

    /// The value of a [`ReadRequest::Value`]; `None` if there is no such row.
    pub fn into_value(self) -> Result<Option<Value>, Bug> {
        match self {
            ReadResult::Value(value) => Ok(value),
            ReadResult::Rows(_) | ReadResult::Page(_) => {
                Err(bug!("not the result of a value read: {self:?}"))
            }
        }
    }

    /// The page of a [`ReadRequest::Query`].
    pub fn into_page(self) -> Result<Page, Bug> {
        match self {
            ReadResult::Page(page) => Ok(page),
            ReadResult::Rows(_) | ReadResult::Value(_) => Err(bug!("not the result of a query: {self:?}")),
        }
    }
}

/// What a store can be asked to do with rows.
#[derive(Clone, Copy, Debug)]
pub enum ExplainRequest<'a> {
    /// To apply a plan.
    Commit(&'a Plan),
    /// To read rows by address.
    Get(&'a [Address], Consistency),
    /// To read a page of a range.
    Query(&'a Query),
    /// To read a page of a whole table.
    Scan(&'a Scan),
    /// To make several reads in one go.
    ReadMany(&'a [ReadRequest<'a>]),
    /// To take the first rows of a range, of which this is one, if there is any.
    ClaimRange(&'a ClaimRange, Option<&'a Row>),
}

impl<'a> From<ReadRequest<'a>> for ExplainRequest<'a> {
    fn from(ask: ReadRequest<'a>) -> ExplainRequest<'a> {
        match ask {
            ReadRequest::Get(addresses) => ExplainRequest::Get(addresses, Consistency::Strong),
            ReadRequest::Value(cell) => {
                ExplainRequest::Get(std::slice::from_ref(cell.address()), Consistency::Strong)
            }
            ReadRequest::Query(query) => ExplainRequest::Query(query),
        }
    }
}

impl<'a> From<&'a Plan> for ExplainRequest<'a> {
    fn from(plan: &'a Plan) -> ExplainRequest<'a> {
        ExplainRequest::Commit(plan)
    }
}

/// What a store would send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The requests, in order.
    pub requests: Vec<EngineRequest>,
    /// What it costs, as pairs of a name and a figure: round trips, write units, synchronizations.
    pub cost: Vec<(String, String)>,
}

/// One request or statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRequest {
    /// What it is for.
    pub purpose: String,
    /// The statement or request, as the engine gets it.
    pub text: String,
    /// The parameters, in order, as pairs of a placeholder and a value.
    pub parameters: Vec<(String, String)>,
}

impl Explanation {
    /// All that is sent for several things that are done at once. What costs the same is said once.
    pub fn of_all(parts: impl IntoIterator<Item = Explanation>) -> Explanation {
        let mut all = Explanation { requests: Vec::new(), cost: Vec::new() };
        for part in parts {
            all.requests.extend(part.requests);
            let new = part.cost.into_iter().filter(|cost| !all.cost.contains(cost)).collect::<Vec<_>>();
            all.cost.extend(new);
        }
        all
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for request in &self.requests {
            writeln!(f, "-- {}", request.purpose)?;
            writeln!(f, "{}", request.text)?;
            for (placeholder, value) in &request.parameters {
                writeln!(f, "   {placeholder} = {value}")?;
            }
        }
        for (name, figure) in &self.cost {
            writeln!(f, "-- {name}: {figure}")?;
        }
        Ok(())
    }
}
