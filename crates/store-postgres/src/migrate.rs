//! Making the live tables fit a schema: in one transaction, under one lock.
//!
//! PostgreSQL's DDL is transactional, so this happens whole or not at all. An advisory lock, which goes with the transaction, lets
//! several servers start at once: the second finds nothing left to do. Only indexes on tables that have rows are built afterwards,
//! beside the writers of the tables ([`crate::index_build`]). An index that an operator built beforehand, under the name that
//! `Migrate::Show` prints, is taken over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::migration::{
    Difference, Migrate, NULL_ROWS_MAX, SchemaChange, keep_surplus, null_rows, planned, strip,
};
use statehouse_store::{Clock as _, Column, Schema, StoreError, SystemClock, Table, Type, Value};
use tokio_postgres::Row;

use crate::connection::{Connector, DatabaseCall, Session};
use crate::ddl::{FORMAT, Names, index_name};
use crate::fault::PostgresFault;
use crate::index_build::{IndexState, LaterIndex};
use crate::options::{PARTITIONS, PostgresOptions};
use crate::sql::{Arg, int_at, text_at, value_at};
use crate::tenancy;

const META: &str = "statehouse_meta";

/// How long a change of a table waits for those who use it, and they in turn for it.
const DDL_LOCK_TIMEOUT_MS: u32 = 10_000;

/// How long a migration pauses before it asks again whether another one is over.
const MIGRATION_LOCK_PAUSE: Duration = Duration::from_millis(50);

/// A session that changes tables.
pub(crate) struct SchemaMigrator<'s> {
    pub session: &'s Session,
    /// Makes the sessions on which indexes are built.
    pub connector: &'s Connector,
    pub names: &'s Names,
    pub options: &'s PostgresOptions,
}

impl SchemaMigrator<'_> {
    /// Makes sure of Statehouse's own tables, and returns how many partitions the log has.
    pub(crate) async fn open(&self) -> Result<u32, StoreError> {
        self.check_role().await?;
        if !self.exists(META).await? {
            self.create_own_tables().await?;
        }
        let text = format!("select name, value from {}", self.names.meta());
        let rows = self.ask(DatabaseCall::new(text, Vec::new())).await.map_err(denied)?;
        let mut settings = BTreeMap::new();
        for row in &rows {
            settings.insert(text_at(row, 0, "statehouse_meta")?, int_at(row, 1, "statehouse_meta")?);
        }
        let setting = |name: &str| {
            let missing = || StoreError::corrupt("statehouse_meta", format!("it does not say {name}"));
            settings.get(name).copied().ok_or_else(missing)
        };
        let place = format!("schema {}", self.names.schema());
        let format = setting("format")?;
        if format > FORMAT {
            let why = format!(
                "it was written in format {format} by a later Statehouse, and this one knows formats up to \
                 {FORMAT}; run the later one"
            );
            return Err(StoreError::schema(place, why));
        }
        let partitions = u32::try_from(setting("partitions")?)
            .map_err(|_| StoreError::corrupt("statehouse_meta", "the number of partitions is impossible"))?;
        if let Some(wanted) = self.options.partitions
            && wanted != partitions
        {
            let why = format!("its log has {partitions} partitions, which cannot become {wanted}");
            return Err(StoreError::schema(place, why));
        }
        let text = format!("select count(*) from {}", self.names.heads());
        let rows = self.ask(DatabaseCall::new(text, Vec::new())).await.map_err(denied)?;
        let heads = rows.first().map(|row| int_at(row, 0, "statehouse_heads")).transpose()?;
        if heads != Some(i64::from(partitions)) {
            let why = format!("it should have {partitions} rows");
            return Err(StoreError::corrupt("statehouse_heads", why));
        }
        Ok(partitions)
    }

    /// Refuses a role that row-level security would not bind.
    async fn check_role(&self) -> Result<(), StoreError> {
        if !self.options.row_level_security {
            return Ok(());
        }
        let text = "select rolname::text, rolsuper or rolbypassrls from pg_catalog.pg_roles \
                    where rolname = coalesce($1::text, current_user)";
        let role = Value::from(self.options.runtime_role.clone());
        let rows =
            self.ask(DatabaseCall::new(text, vec![Arg::Own(role)])).await.map_err(|f| f.into_error(&[]))?;
        let given = self.options.runtime_role.as_deref().unwrap_or("that connects");
        let Some(row) = rows.first() else {
            let why = "it does not exist; an administrator creates it: create role … login";
            return Err(StoreError::schema(format!("role {given}"), why));
        };
        if value_at(row, 1, Type::Bool, "pg_roles")?.as_bool() == Some(true) {
            let why = "row-level security does not bind it (superuser or bypassrls); name another one with \
                       the parameter role";
            return Err(StoreError::schema(format!("role {}", text_at(row, 0, "pg_roles")?), why));
        }
        Ok(())
    }

    async fn create_own_tables(&self) -> Result<(), StoreError> {
        self.begin().await?;
        let result = self.create_own_tables_in_transaction().await;
        self.end(result).await
    }

    async fn create_own_tables_in_transaction(&self) -> Result<(), StoreError> {
        // Another server may have been faster.
        if self.exists(META).await? {
            return Ok(());
        }
        let schema = crate::sql::name(self.names.schema());
        let text = "select exists (select from pg_catalog.pg_namespace where nspname = $1::text)";
        let rows =
            self.ask(DatabaseCall::new(text, vec![Arg::Text(self.names.schema())])).await.map_err(denied)?;
        if !is_true(&rows)? {
            self.execute(&format!("create schema {schema}")).await?;
        }
        for statement in self.names.own_tables(self.options.partitions.unwrap_or(PARTITIONS)) {
            self.execute(&statement).await?;
        }
        let text = "select exists (select from pg_catalog.pg_settings \
                    where name = 'default_toast_compression' and 'lz4' = any (enumvals))";
        if is_true(&self.ask(DatabaseCall::new(text, Vec::new())).await.map_err(denied)?)? {
            self.execute(&self.names.pack_log()).await?;
        }
        Ok(())
    }

    /// Makes the live tables fit, or says what that would take.
    pub(crate) async fn migrate(
        &self,
        schema: &Schema,
        how: Migrate,
    ) -> Result<Vec<SchemaChange>, StoreError> {
        self.begin().await?;
        let result = self.migrate_in_transaction(schema, how).await;
        let (mut changes, later) = self.end(result).await?;
        if how != Migrate::Show {
            for index in &later {
                if !self.build(index).await? {
                    changes.retain(|change| !index.is_added_by(change));
                }
            }
        }
        Ok(changes)
    }

    /// What a migration changes, and which of it is an index to be built afterwards.
    async fn changes(
        &self,
        live: &Schema,
        schema: &Schema,
        how: Migrate,
    ) -> Result<(Vec<SchemaChange>, Vec<LaterIndex>), StoreError> {
        let (mut changes, mut later) = (Vec::new(), Vec::new());
        for (table, difference) in planned(live, schema, how)? {
            let mut statements = self.names.statements(&table, &difference)?;
            match &difference {
                Difference::CreateTable if self.options.row_level_security => {
                    statements.extend(self.fence(table.name()));
                }
                Difference::AddIndex(index) if self.has_rows(table.name()).await? => {
                    let index = LaterIndex { table: table.clone(), index: index.clone() };
                    statements = vec![index.statement(self.names)];
                    later.push(index);
                }
                _ => {}
            }
            changes.push(SchemaChange { table, difference, statements });
        }
        for change in &changes {
            self.check_nulls(change).await?;
        }
        Ok((changes, later))
    }

    async fn migrate_in_transaction(
        &self,
        schema: &Schema,
        how: Migrate,
    ) -> Result<(Vec<SchemaChange>, Vec<LaterIndex>), StoreError> {
        let live = self.live().await?;
        let (changes, later) = self.changes(&live, schema, how).await?;
        if how == Migrate::Show {
            return Ok((changes, later));
        }
        let is_later = |change: &SchemaChange| later.iter().any(|index| index.is_added_by(change));
        let mut tables: BTreeMap<&str, Arc<Table>> =
            schema.tables().map(|table| (table.name(), table.clone())).collect();
        if how == Migrate::Apply {
            for old in live.tables() {
                let kept = match schema.table(old.name()) {
                    Some(new) => keep_surplus(old, new)?,
                    None => old.clone(),
                };
                tables.insert(old.name(), kept);
            }
        }
        for change in changes.iter().filter(|change| !is_later(change)) {
            self.carry_out(change).await?;
        }
        for old in live.tables().filter(|old| !tables.contains_key(old.name())) {
            let text = format!("delete from {} where name = $1", self.names.tables());
            self.ask(DatabaseCall::new(text, vec![Arg::Text(old.name())])).await.map_err(denied)?;
        }
        for table in tables.values() {
            let is_later = |name: &str| later.iter().any(|index| index.is(table.name(), name));
            let table = match table.indexes().iter().any(|index| is_later(&index.name)) {
                true => &strip(table, |_| false, is_later)?,
                false => table,
            };
            if live.table(table.name()) != Some(table) {
                self.define(table).await?;
            }
        }
        if self.options.row_level_security {
            self.fence_all(tables.keys().copied().collect()).await?;
        }
        Ok((changes, later))
    }

    /// Refuses a column that becomes required while rows have no value for it.
    async fn check_nulls(&self, change: &SchemaChange) -> Result<(), StoreError> {
        let Difference::RequireColumn(column) = &change.difference else { return Ok(()) };
        if self.options.row_level_security {
            // For rows of every tenant, also where they are filled.
            self.execute("set local statehouse.tenants = '*'").await?;
        }
        if column.default.is_some() {
            return Ok(());
        }
        let table = &change.table;
        let key = |key: &Column| format!("', {}=' || {}::text", key.name, crate::sql::name(&key.name));
        let keys: Vec<String> = table.key_columns().iter().map(key).collect();
        let text = format!(
            "select '{table}(tenant=' || tenant || {} || ')' from {} where {} is null limit {}",
            keys.join(" || "),
            self.names.table(table.name()),
            crate::sql::name(&column.name),
            NULL_ROWS_MAX + 1,
        );
        let rows = self.ask(DatabaseCall::new(text, Vec::new())).await.map_err(denied)?;
        let rows = rows.iter().map(|row| text_at(row, 0, table.name()));
        let rows = rows.collect::<Result<Vec<String>, StoreError>>()?;
        match rows.is_empty() {
            true => Ok(()),
            false => Err(null_rows(table, column, rows)),
        }
    }

    /// Whether a table of the store has rows, of whichever tenant.
    async fn has_rows(&self, table: &str) -> Result<bool, StoreError> {
        if self.options.row_level_security {
            self.execute("set local statehouse.tenants = '*'").await?;
        }
        let text = format!("select exists (select from {})", self.names.table(table));
        is_true(&self.ask(DatabaseCall::new(text, Vec::new())).await.map_err(denied)?)
    }

    async fn carry_out(&self, change: &SchemaChange) -> Result<(), StoreError> {
        if let Difference::AddIndex(index) = &change.difference {
            let name = index_name(change.table.name(), &index.name);
            match IndexState::of(self.session, self.names, &name).await? {
                IndexState::Missing => {}
                // An operator built it beforehand.
                IndexState::Valid => return Ok(()),
                IndexState::Invalid => {
                    self.execute(&format!("drop index {}", self.names.table(&name))).await?;
                }
            }
        }
        for statement in &change.statements {
            self.execute(statement).await.map_err(|error| match error {
                StoreError::Schema { why, .. } => {
                    StoreError::schema(format!("table {}", change.table), format!("{change} failed: {why}"))
                }
                other => other,
            })?;
        }
        Ok(())
    }

    /// The tables as they were last migrated to.
    pub(crate) async fn live(&self) -> Result<Schema, StoreError> {
        let text = format!("select name, definition from {} order by name", self.names.tables());
        let rows = self.ask(DatabaseCall::new(text, Vec::new())).await.map_err(denied)?;
        let place = "statehouse_tables";
        let mut tables = Vec::with_capacity(rows.len());
        for row in &rows {
            let Value::Json(definition) = value_at(row, 1, Type::Json, place)? else {
                return Err(StoreError::corrupt(place, "a definition is null"));
            };
            let table: Table = serde_json::from_value(definition)
                .map_err(|error| StoreError::corrupt(place, error.to_string()))?;
            tables.push(Arc::new(table));
        }
        Schema::new(tables).map_err(|error| StoreError::corrupt(place, error.to_string()))
    }

    pub(crate) async fn define(&self, table: &Table) -> Result<(), StoreError> {
        let definition = serde_json::to_string(table)
            .map_err(|error| StoreError::schema(format!("table {table}"), error.to_string()))?;
        let text = format!(
            "insert into {} (name, definition) values ($1, $2) \
             on conflict (name) do update set definition = excluded.definition",
            self.names.tables(),
        );
        let args = vec![Arg::Text(table.name()), Arg::Json(definition)];
        self.ask(DatabaseCall::new(text, args)).await.map_err(denied).map(drop)
    }

    /// Puts a table under row-level security.
    fn fence(&self, table: &str) -> Vec<String> {
        let full = self.names.table(table);
        let mut statements = tenancy::protect(&full);
        statements.extend(self.options.runtime_role.iter().map(|role| tenancy::grant_on_table(&full, role)));
        statements
    }

    /// Puts those tables under row-level security that are not, for instance because it was switched on later.
    async fn fence_all(&self, mut tables: Vec<&str>) -> Result<(), StoreError> {
        tables.push("statehouse_log");
        let text = "select c.relname::text, c.relrowsecurity and c.relforcerowsecurity and exists (select from \
                    pg_catalog.pg_policy p where p.polrelid = c.oid and p.polname = $3::text), \
                    $4::text is null or has_any_column_privilege($4::text, c.oid, 'update') \
                    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
                    where n.nspname = $1::text and c.relname = any ($2::text[])";
        let role = Value::from(self.options.runtime_role.clone());
        let args = vec![
            Arg::Text(self.names.schema()),
            Arg::Texts(tables),
            Arg::Text(tenancy::POLICY),
            Arg::Own(role),
        ];
        let rows = self.ask(DatabaseCall::new(text, args)).await.map_err(denied)?;
        for row in &rows {
            let table = text_at(row, 0, "pg_class")?;
            let full = self.names.table(&table);
            if value_at(row, 1, Type::Bool, "pg_class")?.as_bool() != Some(true) {
                self.execute(&format!("drop policy if exists {} on {full}", tenancy::POLICY)).await?;
                for statement in tenancy::protect(&full) {
                    self.execute(&statement).await?;
                }
            }
            let admitted = value_at(row, 2, Type::Bool, "pg_class")?.as_bool() == Some(true);
            if let Some(role) = self.options.runtime_role.as_deref().filter(|_| !admitted) {
                if table == "statehouse_log" {
                    for statement in tenancy::grant_on_system_tables(self.names, role) {
                        self.execute(&statement).await?;
                    }
                } else {
                    self.execute(&tenancy::grant_on_table(&full, role)).await?;
                }
            }
        }
        Ok(())
    }

    /// Opens a transaction in which no other migration of this schema is under way. The lock is asked for again and again, each time in a
    /// new transaction: a statement that waits for it would have a snapshot, and PostgreSQL builds an index concurrently only when older
    /// snapshots are gone; and a transaction that waits would take a pooler's connection from the migration that has the lock.
    pub(crate) async fn begin(&self) -> Result<(), StoreError> {
        loop {
            self.session
                .execute("begin isolation level read committed; set local standard_conforming_strings = on")
                .await
                .map_err(denied)?;
            let result = self.lock().await;
            if !matches!(result, Ok(true)) {
                // If this fails too, the connection is dropped with the session.
                let _ = self.session.execute("rollback").await;
            }
            if result? {
                return Ok(());
            }
            SystemClock.sleep(MIGRATION_LOCK_PAUSE).await;
        }
    }

    /// Takes the lock of migrations, if it is free.
    async fn lock(&self) -> Result<bool, StoreError> {
        let call = DatabaseCall::new(self.names.migration_lock(), Vec::new());
        let is_locked = is_true(&self.ask(call).await.map_err(denied)?)?;
        self.execute(&format!("set local lock_timeout = {DDL_LOCK_TIMEOUT_MS}")).await?;
        Ok(is_locked)
    }

    pub(crate) async fn end<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match result {
            Ok(value) => {
                self.session.execute("commit").await.map_err(denied)?;
                Ok(value)
            }
            Err(error) => {
                // If this fails too, the connection is dropped with the session.
                let _ = self.session.execute("rollback").await;
                Err(error)
            }
        }
    }

    /// Whether the schema has a table or index of this name. The catalogue is asked as a table: functions such as
    /// `to_regclass` answer from a cache that does not hear of others' commits while a lock is waited for.
    async fn exists(&self, relation: &str) -> Result<bool, StoreError> {
        let text = "select exists (select from pg_catalog.pg_class c join pg_catalog.pg_namespace n \
                    on n.oid = c.relnamespace where n.nspname = $1::text and c.relname = $2::text)";
        let args = vec![Arg::Text(self.names.schema()), Arg::Text(relation)];
        let rows = self.ask(DatabaseCall::new(text, args)).await.map_err(denied)?;
        is_true(&rows)
    }

    async fn ask(&self, call: DatabaseCall<'_>) -> Result<Vec<Row>, PostgresFault> {
        let rows = self.session.run(None, &[call], None).await.rows?;
        Ok(rows.into_iter().next().unwrap_or_default())
    }

    pub(crate) async fn execute(&self, statement: &str) -> Result<(), StoreError> {
        self.session.execute(statement).await.map_err(denied)
    }
}

pub(crate) fn is_true(rows: &[Row]) -> Result<bool, StoreError> {
    let value = rows.first().map(|row| value_at(row, 0, Type::Bool, "pg_catalog")).transpose()?;
    Ok(value.is_some_and(|value| value.as_bool() == Some(true)))
}

/// The error of a migration that failed. It was rolled back; the message says which right the user lacks, if that is the reason.
pub(crate) fn denied(fault: PostgresFault) -> StoreError {
    match fault {
        PostgresFault::Schema(said) | PostgresFault::NoTable(said) | PostgresFault::Data(said) => {
            StoreError::schema("the PostgreSQL schema", format!("{said}; nothing was changed"))
        }
        other => StoreError::unavailable(other.said()),
    }
}
