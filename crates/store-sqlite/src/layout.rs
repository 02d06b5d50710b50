//! The file: how it is recognized, created and opened, and what its tables look like.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, params};
use statehouse_store::table::TENANT;
use statehouse_store::{Column, Index, Schema, StoreError, Table, Type, Value};

use crate::SqliteOptions;
use crate::fault;
use crate::permissions::create_private;
use crate::sql::{index_name, is_optional, name};

/// The SQLite application id of Statehouse files: `Sths` in ASCII.
pub(crate) const APPLICATION_ID: i64 = 0x5374_6873;
/// The layout that this version writes.
const FORMAT: i64 = 1;
/// Versions of SQLite before this one can corrupt a WAL that two connections write or checkpoint.
const SQLITE_MIN: i32 = 3_051_003;
/// Pages in the WAL before SQLite checkpoints it. Larger than SQLite's 1000, because each checkpoint costs an fsync of both
/// files.
const CHECKPOINT_PAGES: i64 = 8_000;
/// How many bits of a log position are the offset.
const OFFSET_BITS: u32 = 40;
/// The maximum number of partitions that the other bits can hold.
const PARTITIONS_MAX: u32 = 1 << 16;

/// The log's own tables.
const CREATE: &str = "
CREATE TABLE statehouse_meta (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;
CREATE TABLE statehouse_tables (
    name       TEXT NOT NULL PRIMARY KEY,
    definition TEXT NOT NULL
) STRICT;
CREATE TABLE statehouse_log (
    position    INTEGER PRIMARY KEY,
    tenant      TEXT NOT NULL,
    operation   TEXT NOT NULL,
    resource    TEXT NOT NULL,
    key         TEXT NOT NULL,
    at          INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    fate        TEXT NOT NULL,
    events      TEXT NOT NULL,
    \"partition\" INTEGER GENERATED ALWAYS AS (position >> 40) VIRTUAL,
    \"offset\"    INTEGER GENERATED ALWAYS AS (position & 1099511627775) VIRTUAL,
    UNIQUE (tenant, operation)
) STRICT;
";

/// The key of a log record: the partition, then the offset.
pub(crate) fn pack(partition: u32, offset: u64) -> i64 {
    // An offset beyond the bits, which no log reaches but a caller can name, is the last one of the partition.
    let offset = offset.min((1 << OFFSET_BITS) - 1);
    (i64::from(partition) << OFFSET_BITS) | offset as i64
}

/// The partition and offset of a log record's key.
pub(crate) fn unpack(position: i64) -> (u32, u64) {
    // Positions are not negative: `pack` leaves the sign bit clear.
    let position = position as u64;
    ((position >> OFFSET_BITS) as u32, position & ((1 << OFFSET_BITS) - 1))
}

/// Opens the writing connection. Returns it with the number of log partitions.
pub(crate) fn open_writer(options: &SqliteOptions) -> Result<(Connection, u32), StoreError> {
    let path = &options.path;
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    if rusqlite::version_number() < SQLITE_MIN {
        return Err(StoreError::schema(
            path.display().to_string(),
            format!("SQLite {} can corrupt a WAL; 3.51.3 or newer is needed", rusqlite::version()),
        ));
    }
    let is_new = !path.exists();
    create_private(path);
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = open(options, flags)?;
    if connection.is_readonly(rusqlite::MAIN_DB).map_err(fail)? {
        let file = path.display();
        return Err(StoreError::unavailable(format!("{file} is read-only; make it and its folder writable")));
    }
    recognize(&connection, path)?;
    let mode: String =
        connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).map_err(fail)?;
    if mode != "wal" {
        return Err(StoreError::unavailable(format!("{} cannot use a write-ahead log", path.display())));
    }
    let synchronous = if options.synchronous { "FULL" } else { "OFF" };
    connection
        .execute_batch(&format!(
            "PRAGMA synchronous = {synchronous};
             PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};
             PRAGMA journal_size_limit = 67108864;
             PRAGMA temp_store = MEMORY;"
        ))
        .map_err(fail)?;
    // After a failed fsync the WAL may have holes that only the page cache hides. A checkpoint before the first append leaves
    // none behind.
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).map_err(fail)?;
    let partitions = initialize(&connection, options)?;
    if is_new {
        // From now on a copy of the file alone is recognized as a store.
        connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).map_err(fail)?;
        synchronize_folder(path)?;
    }
    Ok((connection, partitions))
}

/// Opens a connection that cannot write.
pub(crate) fn open_reader(options: &SqliteOptions) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    open(options, flags)
}

fn open(options: &SqliteOptions, flags: OpenFlags) -> Result<Connection, StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(&options.path, &error);
    let connection = match &options.vfs {
        Some(vfs) => Connection::open_with_flags_and_vfs(&options.path, flags, vfs.as_str()),
        None => Connection::open_with_flags(&options.path, flags),
    }
    .map_err(fail)?;
    connection.busy_timeout(options.lock_timeout.max(Duration::from_millis(1))).map_err(fail)?;
    connection.set_prepared_statement_cache_capacity(256);
    Ok(connection)
}

/// Refuses files of other programs and of newer versions.
fn recognize(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    let number =
        |pragma: &str| connection.query_row(&format!("PRAGMA {pragma}"), [], |row| row.get::<_, i64>(0));
    let application = number("application_id").map_err(fail)?;
    let format = number("user_version").map_err(fail)?;
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)).map_err(fail)?;
    let is_empty = tables == 0 && application == 0;
    let refuse = |why: String| Err(StoreError::schema(path.display().to_string(), why));
    if application != APPLICATION_ID && !is_empty {
        return refuse("it is an SQLite file of another program; choose another path".into());
    }
    if format > FORMAT {
        return refuse(format!(
            "it has format {format}, written by a newer Statehouse; this one knows formats up to {FORMAT}: upgrade"
        ));
    }
    Ok(())
}

/// Creates the log's own tables if they are missing. Two processes may do so at once; the write lock serializes them.
fn initialize(connection: &Connection, options: &SqliteOptions) -> Result<u32, StoreError> {
    let path = &options.path;
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    let partitions = || {
        connection.query_row("SELECT value FROM statehouse_meta WHERE name = 'partitions'", [], |row| {
            row.get::<_, String>(0)
        })
    };
    let exists: i64 = connection
        .query_row("SELECT count(*) FROM sqlite_schema WHERE name = 'statehouse_meta'", [], |row| row.get(0))
        .map_err(fail)?;
    if exists == 0 {
        connection.execute_batch("BEGIN IMMEDIATE").map_err(fail)?;
        let made = connection
            .execute_batch(&format!(
                "PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
            ))
            .and_then(|()| connection.execute_batch(CREATE))
            .and_then(|()| {
                let partitions = options.partitions.clamp(1, PARTITIONS_MAX);
                connection.execute(
                    "INSERT INTO statehouse_meta (name, value) VALUES ('partitions', ?1)",
                    params![partitions.to_string()],
                )
            })
            .and_then(|_| connection.execute_batch("COMMIT"));
        if let Err(error) = made {
            drop(connection.execute_batch("ROLLBACK"));
            // Another process may have created the tables meanwhile.
            if partitions().is_err() {
                return Err(fail(error));
            }
        }
    }
    let text = partitions().map_err(fail)?;
    text.parse().map_err(|_| {
        StoreError::corrupt(path.display().to_string(), format!("its partition count is {text:?}"))
    })
}

/// Makes the directory entry of a new file durable. SQLite does so for the WAL, not for the file itself.
pub(crate) fn synchronize_folder(path: &Path) -> Result<(), StoreError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(|error| {
        StoreError::unavailable(format!("the folder {} cannot be synchronized: {error}", folder.display()))
    })
}

/// The tables as the file has them.
pub(crate) fn live_schema(connection: &Connection, path: &Path) -> Result<Schema, StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    let mut statement =
        connection.prepare_cached("SELECT name, definition FROM statehouse_tables").map_err(fail)?;
    let pairs = statement
        .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(fail)?;
    let tables: Vec<std::sync::Arc<Table>> = pairs
        .into_iter()
        .map(|(name, definition)| {
            serde_json::from_str::<Table>(&definition).map(Into::into).map_err(|error| {
                StoreError::corrupt(format!("{}, definition of {name}", path.display()), error.to_string())
            })
        })
        .collect::<Result<_, _>>()?;
    Schema::new(tables).map_err(|error| StoreError::corrupt(path.display().to_string(), error.to_string()))
}

/// `CREATE TABLE` under a name of choice.
pub(crate) fn create_table(table: &Table, as_name: &str) -> String {
    let mut text = format!("CREATE TABLE {} (\n    {TENANT} TEXT NOT NULL,\n", name(as_name));
    for column in table.columns() {
        let _ = writeln!(text, "    {},", column_definition(column));
    }
    let keys: Vec<String> = table.key_columns().iter().map(|column| name(&column.name)).collect();
    let _ = write!(
        text,
        "    version INTEGER NOT NULL,\n    PRIMARY KEY ({TENANT}, {})\n) STRICT, WITHOUT ROWID",
        keys.join(", ")
    );
    text
}

/// A column as `CREATE TABLE` and `ADD COLUMN` take it.
pub(crate) fn column_definition(column: &Column) -> String {
    let kind = match column.kind {
        Type::Text | Type::Json => "TEXT",
        Type::Int | Type::Bool | Type::Time => "INTEGER",
        Type::Float => "REAL",
        Type::Bytes => "BLOB",
    };
    let mut text = format!("{} {kind}", name(&column.name));
    if column.required {
        text.push_str(" NOT NULL");
    }
    if let Some(default) = &column.default {
        let _ = write!(text, " DEFAULT {}", literal(default));
    }
    text
}

/// A value as it stands in a statement.
pub(crate) fn literal(value: &Value) -> String {
    match value {
        Value::Bool(bool) => i64::from(*bool).to_string(),
        Value::Time(time) => time.micros().to_string(),
        Value::Json(json) => format!("'{}'", json.to_string().replace('\'', "''")),
        other => other.to_string(),
    }
}

/// `CREATE INDEX`. The table's key, which the tenant leads, is behind the index's columns, as in every index of a table
/// without row ids.
pub(crate) fn create_index(table: &Table, index: &Index) -> String {
    let tenant = (!index.global).then_some(TENANT);
    let columns: Vec<String> = tenant.into_iter().chain(index.columns()).map(name).collect();
    let mut text = format!(
        "CREATE INDEX {} ON {} ({})",
        index_name(table, &index.name),
        name(table.name()),
        columns.join(", ")
    );
    let optional: Vec<String> = index
        .columns()
        .filter(|column| is_optional(table, column))
        .map(|column| format!("{} IS NOT NULL", name(column)))
        .collect();
    if !optional.is_empty() {
        let _ = write!(text, " WHERE {}", optional.join(" AND "));
    }
    text
}
