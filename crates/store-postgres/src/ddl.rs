//! Tables as a person would have written them, and the few of Statehouse's own.
//!
//! A declared table is an ordinary table with native types: the tenant first, the key, the other columns with their
//! defaults, the version, and a primary key that the tenant leads. Text that is part of a key or an index is
//! `collate "C"`, because its order is a promise; other text is left to the database. A declared index lists the
//! tenant, its columns, and the rest of the key, so that it gives the rows of a page in their full order; it is
//! partial over a column that may be null, which is what "sparse" means in SQL, and always by [`INDEXED`]. An index
//! across tenants lists the tenant behind its columns.
//!
//! Statehouse's own tables stand in the same schema:
//! - `statehouse_meta`: the format of all this and the number of log partitions;
//! - `statehouse_tables`: what the live tables were declared as, which the catalogue alone would not say;
//! - `statehouse_heads`: a row for each log partition with the position of its newest record. Locking it is the last
//!   lock of a transaction. It changes with every commit, so its pages are left nearly empty for the new versions;
//! - `statehouse_log`: the log, unique by tenant and operation id.

use statehouse_store::migration::Difference;
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{Column, Index, StoreError, Table, Type};

use crate::sql::{literal, name, quoted, type_name};

/// The format of the stored data. A store with a higher one was written by a later Statehouse.
pub(crate) const FORMAT: i64 = 1;

/// Columns that every PostgreSQL table has, under names that no other column can take.
const SYSTEM_COLUMNS: [&str; 6] = ["cmax", "cmin", "ctid", "tableoid", "xmax", "xmin"];

/// What holds for every row, and is in no query by key: the condition of every declared
/// index. Of a table that was never analyzed, PostgreSQL believes that a tenant has one row, so to look a key up by any
/// index that the tenant leads costs the same for it as by the primary key, and it takes the newest one. The plan is
/// kept, and reads all rows of the tenant each time when they have become many. An index with a condition that the
/// statement does not name is not considered. Its column never changes, so it does not stand in the way of updates
/// within a page.
pub(crate) const INDEXED: &str = "tenant <> ''";

/// What every index of a declared table is made with. Since each of them ends with the key, no two rows have an entry in
/// common, only versions of one row do; to look for duplicates on every full page before it is split, as PostgreSQL does
/// by itself, finds nothing worth it and takes a fifth of the time of a job's claim.
const DISTINCT: &str = "deduplicate_items = off";

/// The longest name that PostgreSQL keeps.
const NAME_BYTES_MAX: usize = 63;

/// The tables of one PostgreSQL schema, by their full names.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    schema: String,
}

impl Names {
    pub(crate) fn new(schema: &str) -> Names {
        Names { schema: schema.to_owned() }
    }

    /// The schema, as the catalogue has it.
    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    /// A table's full name, as it stands in a statement.
    pub(crate) fn table(&self, table: &str) -> String {
        format!("{}.{}", name(&self.schema), name(table))
    }

    pub(crate) fn log(&self) -> String {
        self.table("statehouse_log")
    }

    pub(crate) fn heads(&self) -> String {
        self.table("statehouse_heads")
    }

    pub(crate) fn meta(&self) -> String {
        self.table("statehouse_meta")
    }

    pub(crate) fn tables(&self) -> String {
        self.table("statehouse_tables")
    }

    /// What creates Statehouse's own tables.
    pub(crate) fn own_tables(&self, partitions: u32) -> Vec<String> {
        let (meta, tables, heads, log) = (self.meta(), self.tables(), self.heads(), self.log());
        vec![
            format!("create table {meta} (\n    name text primary key,\n    value bigint not null\n)"),
            format!(
                "create table {tables} (\n    name text collate \"C\" primary key,\n    \
                 definition jsonb not null\n)"
            ),
            format!(
                "create table {heads} (\n    partition integer primary key,\n    \
                 head bigint not null default 0\n) with (fillfactor = 10)"
            ),
            format!(
                "create table {log} (\n    partition integer not null,\n    position bigint not null,\n    \
                 tenant text collate \"C\" not null,\n    operation text collate \"C\" not null,\n    \
                 resource text not null,\n    key text not null,\n    at timestamptz not null,\n    \
                 fingerprint text not null,\n    fate text not null,\n    events json not null,\n    \
                 primary key (partition, position),\n    unique (tenant, operation)\n)"
            ),
            format!(
                "insert into {heads} (partition) select generate_series(0, {})",
                partitions.saturating_sub(1)
            ),
            format!(
                "insert into {meta} (name, value) values ('partitions', {partitions}), ('format', {FORMAT})"
            ),
        ]
    }

    /// What lets the log be packed with lz4, for servers that have it. Its records are long where many plans are one, and to
    /// pack such a one as PostgreSQL does by itself takes longer than to write it.
    pub(crate) fn pack_log(&self) -> String {
        format!("alter table {} alter column events set compression lz4", self.log())
    }

    /// What a difference takes.
    pub(crate) fn statements(
        &self,
        table: &Table,
        difference: &Difference,
    ) -> Result<Vec<String>, StoreError> {
        let full = self.table(table.name());
        Ok(match difference {
            Difference::CreateTable => {
                check_names(table.columns())?;
                let mut statements = vec![self.create_table(table)];
                statements.extend(table.indexes().iter().map(|index| self.create_index(table, index, false)));
                statements
            }
            Difference::AddColumn(column) => {
                check_names(std::slice::from_ref(column))?;
                vec![format!("alter table {full} add column {}", column_definition(table, column))]
            }
            Difference::RenameColumn { column, to } => {
                vec![format!("alter table {full} rename column {} to {}", name(&column.name), name(to))]
            }
            Difference::RelaxColumn(column) => {
                vec![format!("alter table {full} alter column {} drop not null", name(&column.name))]
            }
            Difference::RequireColumn(column) => {
                let of = name(&column.name);
                let fill = column.default.as_ref().map(|default| {
                    format!("update {full} set {of} = {} where {of} is null", literal(default))
                });
                let mut statements: Vec<String> = fill.into_iter().collect();
                statements.push(format!("alter table {full} alter column {of} set not null"));
                // An index over a column that may be null leaves such rows out, which queries rely on.
                let over = |index: &&Index| index.columns().any(|listed| *listed == column.name);
                for index in table.indexes().iter().filter(over) {
                    let index_name = self.table(&index_name(table.name(), &index.name));
                    statements.push(format!("drop index if exists {index_name}"));
                    statements.push(self.create_index(table, index, true));
                }
                statements
            }
            Difference::ChangeDefault(column) => {
                let what = match &column.default {
                    Some(default) => format!("set default {}", literal(default)),
                    None => "drop default".to_owned(),
                };
                vec![format!("alter table {full} alter column {} {what}", name(&column.name))]
            }
            Difference::AddIndex(index) => vec![self.create_index(table, index, true)],
            Difference::DropIndex(index) => {
                vec![format!("drop index {}", self.table(&index_name(table.name(), &index.name)))]
            }
            Difference::DropColumn(column) => {
                vec![format!("alter table {full} drop column {}", name(&column.name))]
            }
            Difference::DropTable => vec![format!("drop table {full}")],
            // The one stands in the definition, which is written after the statements. The other is no engine's.
            Difference::SetLayout { .. }
            | Difference::MoveColumn { .. }
            | Difference::FillTable { .. }
            | Difference::MoveRows { .. } => Vec::new(),
        })
    }

    fn create_table(&self, table: &Table) -> String {
        let mut lines = vec![format!("{TENANT} text collate \"C\" not null")];
        lines.extend(table.columns().iter().map(|column| column_definition(table, column)));
        lines.push(format!("{VERSION} bigint not null default 1"));
        let key = table.key_columns().iter().map(|column| name(&column.name));
        let key: Vec<String> = std::iter::once(TENANT.to_owned()).chain(key).collect();
        lines.push(format!("primary key ({}) with ({DISTINCT})", key.join(", ")));
        format!("create table {} (\n    {}\n)", self.table(table.name()), lines.join(",\n    "))
    }

    /// An index. On a table that exists already a column may have been made when it was in no index, so its order
    /// is spelled out.
    pub(crate) fn create_index(&self, table: &Table, index: &Index, exists: bool) -> String {
        let listed: Vec<&Column> = index.columns().filter_map(|column| table.column(column)).collect();
        let rest = table.key_columns().iter().filter(|key| !index.columns().any(|column| column == key.name));
        let columns = listed.iter().map(|column| {
            let is_key = table.key_columns().iter().any(|key| key.name == column.name);
            let collation =
                if exists && column.kind == Type::Text && !is_key { " collate \"C\"" } else { "" };
            format!("{}{collation}", name(&column.name))
        });
        let (before, behind) = if index.global { (None, Some(TENANT)) } else { (Some(TENANT), None) };
        let columns = before
            .map(str::to_owned)
            .into_iter()
            .chain(columns)
            .chain(behind.map(str::to_owned))
            .chain(rest.map(|key| name(&key.name)))
            .collect::<Vec<_>>();
        let sparse = listed.iter().filter(|column| !column.required);
        let sparse = sparse.map(|column| format!("{} is not null", name(&column.name)));
        let conditions: Vec<String> = std::iter::once(INDEXED.to_owned()).chain(sparse).collect();
        format!(
            "create index {} on {} ({}) with ({DISTINCT}) where {}",
            name(&index_name(table.name(), &index.name)),
            self.table(table.name()),
            columns.join(", "),
            conditions.join(" and "),
        )
    }

    /// The advisory lock that migrations of this schema take, so that two servers can start at once.
    pub(crate) fn migration_lock(&self) -> String {
        let text = quoted(&format!("statehouse migration of {}", self.schema));
        format!("select pg_try_advisory_xact_lock(hashtextextended({text}, 0))")
    }
}

/// The name of an index's relation, which shares one namespace with the tables of the schema.
pub(crate) fn index_name(table: &str, index: &str) -> String {
    let whole = format!("{table}_{index}_idx");
    if whole.len() <= NAME_BYTES_MAX {
        return whole;
    }
    // PostgreSQL would cut the name, and two indexes could become one. A digest keeps them apart.
    let digest = whole.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let kept: String = whole.chars().take(NAME_BYTES_MAX - 9).collect();
    format!("{kept}_{:08x}", digest >> 32)
}

fn column_definition(table: &Table, column: &Column) -> String {
    let ordered = table.key_columns().iter().any(|key| key.name == column.name)
        || table.indexes().iter().any(|index| index.columns().any(|name| name == column.name));
    let mut text = format!("{} {}", name(&column.name), type_name(column.kind));
    if ordered && column.kind == Type::Text {
        text.push_str(" collate \"C\"");
    }
    if column.required {
        text.push_str(" not null");
    }
    if let Some(default) = &column.default {
        text.push_str(" default ");
        text.push_str(&literal(default));
    }
    text
}

fn check_names(columns: &[Column]) -> Result<(), StoreError> {
    match columns.iter().find(|column| SYSTEM_COLUMNS.contains(&column.name.as_str())) {
        Some(column) => Err(StoreError::schema(
            format!("column {}", column.name),
            "every PostgreSQL table has a column of that name already; choose another one",
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_store::Value;

    fn check(actual: &[String], expected: &[&str]) {
        assert_eq!(actual.join(";\n"), expected.join(";\n"));
    }

    #[test]
    fn tables_read_as_if_written_by_hand() {
        let table = Table::named("profiles")
            .partition("user_id", Type::Int)
            .required("display_name", Type::Text)
            .optional("bio", Type::Text)
            .optional("avatar_url", Type::Text)
            .defaulted("status", Type::Text, "ACTIVE")
            .optional("updated_at", Type::Time)
            .index("by_status", &["status"], &["updated_at"])
            .build()
            .unwrap();
        check(
            &Names::new("public").statements(&table, &Difference::CreateTable).unwrap(),
            &[
                "create table public.profiles (\n    tenant text collate \"C\" not null,\n    \
                 user_id bigint not null,\n    display_name text not null,\n    bio text,\n    \
                 avatar_url text,\n    status text collate \"C\" not null default 'ACTIVE',\n    \
                 updated_at timestamptz,\n    version bigint not null default 1,\n    \
                 primary key (tenant, user_id) with (deduplicate_items = off)\n)",
                "create index profiles_by_status_idx on public.profiles (tenant, status, updated_at, user_id) \
                 with (deduplicate_items = off) where tenant <> '' and updated_at is not null",
            ],
        );
    }

    #[test]
    fn changes_are_the_plain_statements() {
        let names = Names::new("My House");
        let table = Table::named("order")
            .partition("user", Type::Text)
            .optional("note", Type::Text)
            .index("by_note", &[], &["note"])
            .build()
            .unwrap();
        let column = |required, default: Option<Value>| Column {
            name: "note".into(),
            kind: Type::Text,
            required,
            default,
        };
        for (difference, expected) in [
            (
                Difference::AddColumn(column(true, Some("x".into()))),
                "alter table \"My House\".\"order\" add column note text collate \"C\" not null default 'x'",
            ),
            (
                Difference::RelaxColumn(column(false, None)),
                "alter table \"My House\".\"order\" alter column note drop not null",
            ),
            (
                Difference::ChangeDefault(column(false, None)),
                "alter table \"My House\".\"order\" alter column note drop default",
            ),
            (
                Difference::AddIndex(table.indexes()[0].clone()),
                "create index order_by_note_idx on \"My House\".\"order\" (tenant, note collate \"C\", \"user\") \
                 with (deduplicate_items = off) where tenant <> '' and note is not null",
            ),
            (Difference::DropIndex(table.indexes()[0].clone()), "drop index \"My House\".order_by_note_idx"),
            (Difference::DropTable, "drop table \"My House\".\"order\""),
        ] {
            check(&names.statements(&table, &difference).unwrap(), &[expected]);
        }
    }

    #[test]
    fn an_index_across_tenants_has_the_tenant_behind_its_columns() {
        let table = Table::named("jobs")
            .partition("queue", Type::Text)
            .sort("number", Type::Int)
            .optional("due_shard", Type::Int)
            .optional("due_at", Type::Time)
            .global_index("due", &["due_shard"], &["due_at"])
            .build()
            .unwrap();
        check(
            &Names::new("public")
                .statements(&table, &Difference::AddIndex(table.indexes()[0].clone()))
                .unwrap(),
            &["create index jobs_due_idx on public.jobs (due_shard, due_at, tenant, queue, number) \
               with (deduplicate_items = off) where tenant <> '' and due_shard is not null and due_at is not null"],
        );
    }

    #[test]
    fn long_index_names_stay_apart() {
        let (table, index) = ("t".repeat(48), "i".repeat(47));
        let names = [index_name(&table, &format!("{index}a")), index_name(&table, &format!("{index}b"))];
        assert!(names.iter().all(|name| name.len() <= NAME_BYTES_MAX), "{names:?}");
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn names_that_postgresql_keeps_for_itself_are_refused() {
        let table = Table::named("t").partition("ctid", Type::Int).build().unwrap();
        let error = Names::new("public").statements(&table, &Difference::CreateTable).unwrap_err();
        assert!(error.to_string().contains("column ctid"), "{error}");
    }
}
