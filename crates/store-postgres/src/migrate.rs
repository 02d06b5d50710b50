//! Making the live tables fit a schema: in one transaction, under one lock.
//!
//! PostgreSQL's DDL is transactional, so a migration happens whole or not at all. An advisory lock, which goes
//! with the transaction, lets several servers start at once: the second finds nothing left to do. Building an index
//! on a table that has rows holds back its writers for as long as that takes; whoever cannot have that creates the
//! index by hand first (`create index concurrently if not exists …` under the name that `Migrate::Show` prints) and
//! migrates then.

use std::collections::BTreeMap;
use std::sync::Arc;

use statehouse_store::migration::{Change, Difference, Migrate, differences, keep_surplus};
use statehouse_store::{Schema, StoreError, Table, Type, Value};
use tokio_postgres::Row;

use crate::ddl::{FORMAT, Names, index_name};
use crate::fault::Fault;
use crate::link::{Call, Session};
use crate::options::{Options, PARTITIONS};
use crate::sql::{Arg, int_at, text_at, value_at};
use crate::tenancy;

const META: &str = "statehouse_meta";

/// How long a change of a table waits for those who use it, and they in turn for it.
const DDL_LOCK_TIMEOUT_MS: u32 = 10_000;

/// A session that changes tables.
pub(crate) struct Builder<'s> {
    pub session: &'s Session,
    pub names: &'s Names,
    pub options: &'s Options,
}

impl Builder<'_> {
    /// Makes sure of Statehouse's own tables, and returns how many partitions the log has.
    pub(crate) async fn open(&self) -> Result<u32, StoreError> {
        self.check_role().await?;
        if !self.exists(META).await? {
            self.create_own_tables().await?;
        }
        let text = format!("select name, value from {}", self.names.meta());
        let rows = self.ask(Call::new(text, Vec::new())).await.map_err(denied)?;
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
        let rows = self.ask(Call::new(text, Vec::new())).await.map_err(denied)?;
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
        let rows = self.ask(Call::new(text, vec![Arg::Own(role)])).await.map_err(|f| f.into_error(&[]))?;
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
        // Somebody else may have been faster.
        if self.exists(META).await? {
            return Ok(());
        }
        let schema = crate::sql::name(self.names.schema());
        let text = "select exists (select from pg_catalog.pg_namespace where nspname = $1::text)";
        let rows = self.ask(Call::new(text, vec![Arg::Text(self.names.schema())])).await.map_err(denied)?;
        if !is_true(&rows)? {
            self.say(&format!("create schema {schema}")).await?;
        }
        for statement in self.names.own_tables(self.options.partitions.unwrap_or(PARTITIONS)) {
            self.say(&statement).await?;
        }
        let text = "select exists (select from pg_catalog.pg_settings \
                    where name = 'default_toast_compression' and 'lz4' = any (enumvals))";
        if is_true(&self.ask(Call::new(text, Vec::new())).await.map_err(denied)?)? {
            self.say(&self.names.pack_log()).await?;
        }
        Ok(())
    }

    /// Makes the live tables fit, or says what that would take.
    pub(crate) async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<Change>, StoreError> {
        self.begin().await?;
        let result = self.migrate_in_transaction(schema, how).await;
        self.end(result).await
    }

    async fn migrate_in_transaction(&self, schema: &Schema, how: Migrate) -> Result<Vec<Change>, StoreError> {
        let live = self.live().await?;
        let mut changes = differences(&live, schema)?
            .into_iter()
            .map(|(table, difference)| {
                let mut statements = self.names.statements(&table, &difference)?;
                if self.options.row_level_security && difference == Difference::CreateTable {
                    statements.extend(self.fence(table.name()));
                }
                Ok(Change { table, difference, statements })
            })
            .collect::<Result<Vec<Change>, StoreError>>()?;
        if how == Migrate::Show {
            return Ok(changes);
        }
        let mut tables: BTreeMap<&str, Arc<Table>> =
            schema.tables().map(|table| (table.name(), table.clone())).collect();
        if how == Migrate::Apply {
            changes.retain(|change| !change.removes());
            for old in live.tables() {
                let kept = match schema.table(old.name()) {
                    Some(new) => keep_surplus(old, new)?,
                    None => old.clone(),
                };
                tables.insert(old.name(), kept);
            }
        }
        for change in &changes {
            self.carry_out(change).await?;
        }
        for old in live.tables().filter(|old| !tables.contains_key(old.name())) {
            let text = format!("delete from {} where name = $1", self.names.tables());
            self.ask(Call::new(text, vec![Arg::Text(old.name())])).await.map_err(denied)?;
        }
        for table in tables.values().filter(|table| live.table(table.name()) != Some(table)) {
            self.define(table).await?;
        }
        if self.options.row_level_security {
            self.fence_all(tables.keys().copied().collect()).await?;
        }
        Ok(changes)
    }

    async fn carry_out(&self, change: &Change) -> Result<(), StoreError> {
        // An index that somebody built beforehand, concurrently, is the index.
        if let Difference::AddIndex(index) = &change.difference
            && self.exists(&index_name(change.table.name(), &index.name)).await?
        {
            return Ok(());
        }
        for statement in &change.statements {
            self.say(statement).await.map_err(|error| match error {
                StoreError::Schema { why, .. } => {
                    StoreError::schema(format!("table {}", change.table), format!("{change} failed: {why}"))
                }
                other => other,
            })?;
        }
        Ok(())
    }

    /// The tables as they were last migrated to.
    async fn live(&self) -> Result<Schema, StoreError> {
        let text = format!("select name, definition from {} order by name", self.names.tables());
        let rows = self.ask(Call::new(text, Vec::new())).await.map_err(denied)?;
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

    async fn define(&self, table: &Table) -> Result<(), StoreError> {
        let definition = serde_json::to_string(table)
            .map_err(|error| StoreError::schema(format!("table {table}"), error.to_string()))?;
        let text = format!(
            "insert into {} (name, definition) values ($1, $2) \
             on conflict (name) do update set definition = excluded.definition",
            self.names.tables(),
        );
        let args = vec![Arg::Text(table.name()), Arg::Json(definition)];
        self.ask(Call::new(text, args)).await.map_err(denied).map(drop)
    }

    /// Puts a table under row-level security.
    fn fence(&self, table: &str) -> Vec<String> {
        let full = self.names.table(table);
        let mut statements = tenancy::protect(&full);
        statements.extend(self.options.runtime_role.iter().map(|role| tenancy::admit(&full, role)));
        statements
    }

    /// Puts those tables under row-level security that are not, for instance because it was switched on later.
    async fn fence_all(&self, mut tables: Vec<&str>) -> Result<(), StoreError> {
        tables.push("statehouse_log");
        let text = "select c.relname::text, c.relrowsecurity and c.relforcerowsecurity and exists (select from \
                    pg_catalog.pg_policy p where p.polrelid = c.oid and p.polname = $3::text), \
                    $4::text is null or has_table_privilege($4::text, c.oid, 'insert') \
                    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
                    where n.nspname = $1::text and c.relname = any ($2::text[])";
        let role = Value::from(self.options.runtime_role.clone());
        let args = vec![
            Arg::Text(self.names.schema()),
            Arg::Texts(tables),
            Arg::Text(tenancy::POLICY),
            Arg::Own(role),
        ];
        let rows = self.ask(Call::new(text, args)).await.map_err(denied)?;
        for row in &rows {
            let table = text_at(row, 0, "pg_class")?;
            let full = self.names.table(&table);
            if value_at(row, 1, Type::Bool, "pg_class")?.as_bool() != Some(true) {
                self.say(&format!("drop policy if exists {} on {full}", tenancy::POLICY)).await?;
                for statement in tenancy::protect(&full) {
                    self.say(&statement).await?;
                }
            }
            let admitted = value_at(row, 2, Type::Bool, "pg_class")?.as_bool() == Some(true);
            if let Some(role) = self.options.runtime_role.as_deref().filter(|_| !admitted) {
                if table == "statehouse_log" {
                    for statement in tenancy::admit_to_own(self.names, role) {
                        self.say(&statement).await?;
                    }
                } else {
                    self.say(&tenancy::admit(&full, role)).await?;
                }
            }
        }
        Ok(())
    }

    /// Opens a transaction and waits until no other migration of this schema is under way.
    async fn begin(&self) -> Result<(), StoreError> {
        // The lock is waited for longer than any one change of a table.
        self.session
            .say("begin isolation level read committed; set local standard_conforming_strings = on")
            .await
            .map_err(denied)?;
        let locked = self.ask(Call::new(self.names.migration_lock(), Vec::new())).await;
        let locked = match locked {
            Ok(_) => self.session.say(&format!("set local lock_timeout = {DDL_LOCK_TIMEOUT_MS}")).await,
            Err(fault) => Err(fault),
        };
        if let Err(fault) = locked {
            // If this fails too, the connection is dropped with the session.
            let _ = self.session.say("rollback").await;
            return Err(denied(fault));
        }
        Ok(())
    }

    async fn end<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match result {
            Ok(value) => {
                self.session.say("commit").await.map_err(denied)?;
                Ok(value)
            }
            Err(error) => {
                // If this fails too, the connection is dropped with the session.
                let _ = self.session.say("rollback").await;
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
        let rows = self.ask(Call::new(text, args)).await.map_err(denied)?;
        is_true(&rows)
    }

    async fn ask(&self, call: Call<'_>) -> Result<Vec<Row>, Fault> {
        let rows = self.session.run(None, &[call], None).await.rows?;
        Ok(rows.into_iter().next().unwrap_or_default())
    }

    async fn say(&self, statement: &str) -> Result<(), StoreError> {
        self.session.say(statement).await.map_err(denied)
    }
}

fn is_true(rows: &[Row]) -> Result<bool, StoreError> {
    let value = rows.first().map(|row| value_at(row, 0, Type::Bool, "pg_catalog")).transpose()?;
    Ok(value.is_some_and(|value| value.as_bool() == Some(true)))
}

/// Of a migration that fails, nothing remains; who lacks the right to do it is told so.
fn denied(fault: Fault) -> StoreError {
    match fault {
        Fault::Schema(said) | Fault::NoTable(said) | Fault::Data(said) => {
            StoreError::schema("the PostgreSQL schema", format!("{said}; nothing was changed"))
        }
        other => StoreError::unavailable(other.said()),
    }
}
