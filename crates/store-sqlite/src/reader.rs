//! The pool of read-only connections.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::{Connection, Statement, params_from_iter};
use statehouse_store::log::{RecordView, StoredEvent};
use statehouse_store::{
    Address, LogPage, OperationStatus, Page, Position, Query, Record, Row, Scan, Segment, StoreError, Table,
    Tenant, Time,
};
use tokio::sync::Semaphore;

use crate::SqliteOptions;
use crate::fault;
use crate::layout::{open_reader, pack, unpack};
use crate::sql::{self, Bind, TableSql};

/// Pages of up to this many rows are read on the caller's thread.
pub(crate) const INLINE_ROWS: usize = 128;

/// Connections, each used by one caller at a time.
pub(crate) struct ReaderPool {
    shared: Arc<IdleReaders>,
}

struct IdleReaders {
    options: SqliteOptions,
    idle: Mutex<Vec<ReadConnection>>,
    permits: Semaphore,
    closed: AtomicBool,
}

impl IdleReaders {
    fn acquire(&self) -> Result<ReadConnection, StoreError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(fault::closed());
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(|| ReadConnection::open(&self.options), Ok)
    }

    fn release(&self, reader: ReadConnection) {
        if !self.closed.load(Ordering::Acquire) {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(reader);
        }
    }

    fn run<T>(
        &self,
        work: impl FnOnce(&mut ReadConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut reader = self.acquire()?;
        let result = work(&mut reader);
        self.release(reader);
        result
    }
}

impl ReaderPool {
    /// Connections are opened when they are first needed.
    pub(crate) fn new(options: &SqliteOptions) -> ReaderPool {
        let shared = IdleReaders {
            options: options.clone(),
            idle: Mutex::default(),
            permits: Semaphore::new(options.readers.max(1)),
            closed: AtomicBool::new(false),
        };
        ReaderPool { shared: Arc::new(shared) }
    }

    /// Reads on the caller's thread, for reads that take microseconds.
    pub(crate) async fn run_inline<T>(
        &self,
        work: impl FnOnce(&mut ReadConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let _permit = self.shared.permits.acquire().await.map_err(|_| fault::closed())?;
        self.shared.run(work)
    }

    /// Reads on a thread of the blocking pool, for reads that may take longer.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut ReadConnection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let _permit = self.shared.permits.acquire().await.map_err(|_| fault::closed())?;
        let shared = self.shared.clone();
        let joined = tokio::task::spawn_blocking(move || shared.run(work)).await;
        joined
            .unwrap_or_else(|error| Err(StoreError::unavailable(format!("a read was interrupted: {error}"))))
    }

    /// Closes the idle connections. A running read closes its connection when it ends.
    pub(crate) fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// One reading connection.
pub(crate) struct ReadConnection {
    path: PathBuf,
    connection: Connection,
    tables: TableStatements,
}

impl ReadConnection {
    fn open(options: &SqliteOptions) -> Result<ReadConnection, StoreError> {
        let connection = open_reader(options)?;
        Ok(ReadConnection { path: options.path.clone(), connection, tables: TableStatements::default() })
    }

    fn fail(&self, error: &rusqlite::Error) -> StoreError {
        fault::from_sqlite(&self.path, error)
    }

    /// Rows by address.
    pub(crate) fn get(&mut self, addresses: &[Address]) -> Result<Vec<Option<Row>>, StoreError> {
        let mut rows = Vec::with_capacity(addresses.len());
        for address in addresses {
            let text = &self.tables.of(address.table()).select;
            let select = self.connection.prepare_cached(text);
            let mut select = select.map_err(|error| unprepared(&self.path, address.table(), &error))?;
            rows.push(row_at(&mut select, &self.path, address)?);
        }
        Ok(rows)
    }

    /// A page of a range.
    pub(crate) fn query(&mut self, query: &Query) -> Result<Page, StoreError> {
        let statement = sql::query(query);
        let rows = self.rows(&statement, |stored| match query.tenant() {
            Some(tenant) => sql::row(stored, 0, query.read_table(), tenant),
            None => self.row_of_any(stored, query.read_table()),
        })?;
        Ok(page(rows, query.page_limit(), |row| query.cursor_at(row)))
    }

    /// The segments of a scan.
    pub(crate) fn segments(&mut self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        scan.require_key_segment()?;
        let statement = sql::segments(scan, max);
        let boundaries = self.rows(&statement, |stored| sql::scan_position(stored, scan.read_table()))?;
        Ok(Segment::by_keys(scan, boundaries))
    }

    /// A page of a whole table.
    pub(crate) fn scan(&mut self, scan: &Scan) -> Result<Page, StoreError> {
        scan.require_key_segment()?;
        let statement = sql::scan(scan);
        let rows = self.rows(&statement, |stored| self.row_of_any(stored, scan.read_table()))?;
        Ok(page(rows, scan.page_limit(), |row| scan.cursor_at(row)))
    }

    /// A row behind the name of its tenant.
    fn row_of_any(&self, stored: &rusqlite::Row<'_>, table: &Arc<Table>) -> Result<Row, StoreError> {
        let tenant: String = stored.get(0).map_err(|error| self.fail(&error))?;
        let tenant = Tenant::new(tenant)
            .map_err(|error| StoreError::corrupt(self.path.display().to_string(), error.to_string()))?;
        sql::row(stored, 1, table, &tenant)
    }

    fn rows<T>(
        &self,
        statement: &sql::SqliteStatement,
        read: impl Fn(&rusqlite::Row<'_>) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let fail = |error: rusqlite::Error| self.fail(&error);
        let mut prepared = self.connection.prepare_cached(&statement.text).map_err(fail)?;
        let mut found =
            prepared.query(params_from_iter(statement.parameters.iter().map(Bind))).map_err(fail)?;
        let mut rows = Vec::new();
        while let Some(stored) = found.next().map_err(fail)? {
            rows.push(read(stored)?);
        }
        Ok(rows)
    }

    /// Records of one partition.
    pub(crate) fn log(&mut self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        let path = self.path.clone();
        let fail = |error: rusqlite::Error| fault::from_sqlite(&path, &error);
        // One transaction, so that records, oldest and newest belong together.
        let transaction = self.connection.transaction().map_err(fail)?;
        let PartitionBounds { oldest, newest } = bounds(&transaction, partition).map_err(fail)?;
        let text = select_log("position > ?1 AND position <= ?2 ORDER BY position LIMIT ?3");
        let mut select = transaction.prepare_cached(&text).map_err(fail)?;
        // A page has at most `PAGE_MAX` records.
        let limit = limit as i64;
        let mut found = select
            .query([pack(partition, after.min(newest)), pack(partition, newest), limit])
            .map_err(fail)?;
        let mut records = Vec::new();
        while let Some(stored) = found.next().map_err(fail)? {
            records.push(record(stored, &path, RecordView::Log)?);
        }
        Ok(LogPage { records, oldest, head: newest })
    }

    /// The record of an operation.
    pub(crate) fn find_operation(
        &mut self,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<Option<Record>, StoreError> {
        find_operation(&self.connection, &self.path, tenant, operation)
    }

    /// The newest offset of each partition.
    pub(crate) fn heads(&mut self, partitions: u32) -> Result<Vec<u64>, StoreError> {
        (0..partitions)
            .map(|partition| bounds(&self.connection, partition).map(|bounds| bounds.newest))
            .collect::<rusqlite::Result<_>>()
            .map_err(|error| self.fail(&error))
    }
}

/// The statements of the tables that a connection has used.
///
/// A table is identified by its address, which stays unique because the entry keeps the table alive.
#[derive(Default)]
pub(crate) struct TableStatements(Vec<TableSql>);

/// The maximum number of tables. Callers may declare tables again and again; older ones are then unused.
const STATEMENTS_MAX: usize = 256;

impl TableStatements {
    pub(crate) fn of(&mut self, table: &Arc<Table>) -> &mut TableSql {
        let known = self.0.iter().position(|sql| Arc::ptr_eq(&sql.table, table));
        let index = known.unwrap_or_else(|| {
            if self.0.len() >= STATEMENTS_MAX {
                self.0.clear();
            }
            self.0.push(TableSql::new(table));
            self.0.len() - 1
        });
        #[expect(clippy::indexing_slicing, reason = "the entry was found or pushed above")]
        &mut self.0[index]
    }
}

/// The oldest and newest offsets of a partition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartitionBounds {
    pub oldest: u64,
    pub newest: u64,
}

/// The bounds of a partition, from the log itself. The newest record is never trimmed, so its offset stays known.
pub(crate) fn bounds(connection: &Connection, partition: u32) -> rusqlite::Result<PartitionBounds> {
    let range = [pack(partition, 0), pack(partition + 1, 0)];
    let edge = |select: &str| {
        let newest_or_oldest = |row: &rusqlite::Row<'_>| row.get::<_, Option<i64>>(0);
        connection.prepare_cached(select)?.query_row(range, newest_or_oldest)
    };
    let oldest = edge("SELECT min(position) FROM statehouse_log WHERE position >= ?1 AND position < ?2")?;
    let newest = edge("SELECT max(position) FROM statehouse_log WHERE position >= ?1 AND position < ?2")?;
    Ok(PartitionBounds {
        oldest: oldest.map_or(1, |position| unpack(position).1),
        newest: newest.map_or(0, |position| unpack(position).1),
    })
}

/// One row by address, with the statement that selects it.
pub(crate) fn row_at(
    select: &mut Statement<'_>,
    path: &std::path::Path,
    address: &Address,
) -> Result<Option<Row>, StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    select.raw_bind_parameter(1, address.tenant().as_str()).map_err(fail)?;
    for (index, part) in address.key().iter().enumerate() {
        select.raw_bind_parameter(index + 2, Bind(part)).map_err(fail)?;
    }
    let mut found = select.raw_query();
    match found.next().map_err(fail)? {
        Some(stored) => sql::row(stored, 0, address.table(), address.tenant()).map(Some),
        None => Ok(None),
    }
}

/// The error of a statement that could not be prepared, for this table.
pub(crate) fn unprepared(path: &std::path::Path, table: &Table, error: &rusqlite::Error) -> StoreError {
    if error.to_string().contains("no such table") {
        return StoreError::no_table(table.name());
    }
    fault::from_sqlite(path, error)
}

/// The record of an operation.
pub(crate) fn find_operation(
    connection: &Connection,
    path: &std::path::Path,
    tenant: &Tenant,
    operation: &str,
) -> Result<Option<Record>, StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    let text = select_log("tenant = ?1 AND operation = ?2");
    let mut select = connection.prepare_cached(&text).map_err(fail)?;
    let mut found = select.query([tenant.as_str(), operation]).map_err(fail)?;
    found.next().map_err(fail)?.map(|stored| record(stored, path, RecordView::Operation)).transpose()
}

fn page(mut rows: Vec<Row>, limit: usize, cursor_at: impl Fn(&Row) -> statehouse_store::Cursor) -> Page {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(cursor_at);
    Page { rows, next }
}

/// Selects whole records.
pub(crate) fn select_log(condition: &str) -> String {
    format!(
        "SELECT position, tenant, operation, resource, key, at, fingerprint, fate, events \
         FROM statehouse_log WHERE {condition}"
    )
}

/// A record from [`select_log`].
pub(crate) fn record(
    stored: &rusqlite::Row<'_>,
    path: &std::path::Path,
    view: RecordView,
) -> Result<Record, StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    let corrupt = |why: String| StoreError::corrupt(format!("the log in {}", path.display()), why);
    let text = |index: usize| stored.get::<_, String>(index).map_err(fail);
    let (partition, offset) = unpack(stored.get(0).map_err(fail)?);
    let status = match text(7)?.as_str() {
        "applied" => OperationStatus::Applied,
        "aborted" => OperationStatus::Aborted,
        other => return Err(corrupt(format!("a record has the status {other:?}"))),
    };
    let events: Vec<StoredEvent> =
        serde_json::from_str(&text(8)?).map_err(|error| corrupt(format!("a record's events: {error}")))?;
    let record = Record {
        position: Some(Position { partition, offset }),
        also_at: Vec::new(),
        tenant: Tenant::new(text(1)?).map_err(|error| corrupt(error.to_string()))?,
        operation: text(2)?,
        resource: text(3)?,
        key: text(4)?,
        at: Time::from_micros(stored.get(5).map_err(fail)?),
        fingerprint: text(6)?,
        status,
        events: Vec::new(),
    };
    Ok(view.of(record, events))
}
