//! What an engine cannot carry, found before anything is created.
//!
//! Every engine is held to the weakest one's law when a plan is built (`statehouse_store::limits`). What is left
//! depends on how an engine lays tables out: names that it keeps for itself or makes from others, how many columns and
//! indexes a table can have, how much of a row must fit one page or one request. An engine would say so when its tables
//! are made, or worse, when the first full row is written; here it is said about the blueprint, at the line.
//!
//! What is measured here stands in another crate or on a server. The case `limits` of the drills holds the two together:
//! a schema that passes here is made, filled and read on every engine.

use std::collections::HashMap;

use statehouse_store::{Table, Type};

use super::Engine;
use crate::blueprint::Blueprint;
use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::resource::Resource;
use crate::system;

/// Columns that every table has beside the declared ones: tenant and version.
const OWN_COLUMNS: usize = 2;

/// Columns of a table that SQLite takes.
const SQLITE_COLUMNS_MAX: usize = 2_000;
/// Names that begin so are SQLite's own.
const SQLITE_OWN: &str = "sqlite_";

/// Columns of a table that PostgreSQL takes.
const POSTGRES_COLUMNS_MAX: usize = 1_600;
/// Columns of an index that PostgreSQL takes.
const POSTGRES_INDEX_COLUMNS_MAX: usize = 32;
/// What a page of PostgreSQL holds of one row. Long content is moved out of it, the columns themselves are not.
const POSTGRES_ROW_BYTES_MAX: usize = 8_160;
/// Columns that every PostgreSQL table has.
const POSTGRES_OWN: [&str; 6] = ["cmax", "cmin", "ctid", "tableoid", "xmax", "xmin"];

/// Indexes of a table that DynamoDB takes.
const DYNAMODB_INDEXES_MAX: usize = 20;
/// What DynamoDB takes of one expression. A write names every column that it sets in one.
const DYNAMODB_EXPRESSION_BYTES_MAX: usize = 4_096;

/// Something about a table that an engine cannot carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// The table.
    pub table: String,
    /// The column, if it is about one.
    pub column: Option<String>,
    /// What is too much, with the engine and the number.
    pub why: String,
    /// What to do.
    pub advice: &'static str,
}

/// What of a blueprint an engine cannot carry, each at its line.
pub fn problems(blueprint: &Blueprint, resources: &[Resource], engine: Engine) -> Problems {
    let mut problems = blueprint.problems();
    let own = match system::tables() {
        Ok(own) => own,
        Err(error) => {
            problems.add(BlueprintProblem::at(0..0, error.to_string()));
            return problems;
        }
    };
    let tables: Vec<&Table> =
        resources.iter().flat_map(|resource| &resource.tables).chain(&own).map(|table| &**table).collect();
    for obstacle in obstacles(&tables, engine) {
        let owner = resources
            .iter()
            .find(|resource| resource.tables.iter().any(|table| table.name() == obstacle.table))
            .and_then(|resource| blueprint.thing(&resource.name));
        let span = owner.map_or(0..0, |thing| match &obstacle.column {
            Some(column) => thing.settings.span_of_declared(column),
            None => thing.settings.span_of("table"),
        });
        problems.add(BlueprintProblem::at(span, obstacle.why).advice(obstacle.advice));
    }
    problems
}

/// What of a schema an engine cannot carry.
pub fn obstacles(tables: &[&Table], engine: Engine) -> Vec<Obstacle> {
    match engine {
        Engine::Model => Vec::new(),
        Engine::Sqlite => sqlite(tables),
        Engine::Postgres => postgres(tables),
        Engine::Dynamodb => dynamodb(tables),
    }
}

const FEWER_COLUMNS: &str = "make several things of it, or put what belongs together into one json field";
const FEWER_INDEXES: &str = "make several things of it, each with its own indexes";
const OTHER_TABLE: &str = "give it another table: `table = \"…\"`";

fn about(table: &Table, why: String, advice: &'static str) -> Obstacle {
    Obstacle { table: table.name().to_owned(), column: None, why, advice }
}

fn column_count(table: &Table) -> usize {
    table.columns().len() + OWN_COLUMNS
}

fn sqlite(tables: &[&Table]) -> Vec<Obstacle> {
    let mut found = Vec::new();
    for table in tables {
        let columns = column_count(table);
        if columns > SQLITE_COLUMNS_MAX {
            let why = format!("table `{table}` has {columns} columns; SQLite takes {SQLITE_COLUMNS_MAX}");
            found.push(about(table, why, FEWER_COLUMNS));
        }
        if table.name().starts_with(SQLITE_OWN) {
            let why = format!("SQLite keeps names that begin with `{SQLITE_OWN}` for itself: `{table}`");
            found.push(about(table, why, OTHER_TABLE));
        }
    }
    found.extend(clashes("SQLite", tables, |table| {
        table.indexes().iter().map(|index| format!("{table}__{}", index.name)).collect()
    }));
    found
}

fn postgres(tables: &[&Table]) -> Vec<Obstacle> {
    let mut found = Vec::new();
    for table in tables {
        let columns = column_count(table);
        if columns > POSTGRES_COLUMNS_MAX {
            let why =
                format!("table `{table}` has {columns} columns; PostgreSQL takes {POSTGRES_COLUMNS_MAX}");
            found.push(about(table, why, FEWER_COLUMNS));
        }
        let bytes = page_bytes(table);
        if bytes > POSTGRES_ROW_BYTES_MAX {
            let why = format!(
                "a row of table `{table}` with all its {columns} columns set can take {bytes} bytes of a page; \
                 PostgreSQL has {POSTGRES_ROW_BYTES_MAX}"
            );
            found.push(about(table, why, FEWER_COLUMNS));
        }
        let key = 1 + table.key_len();
        let indexes = table.indexes().iter().map(|index| {
            let rest = table.key_columns().iter().filter(|key| !index.columns().any(|c| c == key.name));
            (format!("index `{}` of table `{table}`", index.name), 1 + index.columns().count() + rest.count())
        });
        for (what, columns) in std::iter::once((format!("the key of table `{table}`"), key)).chain(indexes) {
            if columns > POSTGRES_INDEX_COLUMNS_MAX {
                let why = format!(
                    "{what} has {columns} columns, the tenant and the key included; PostgreSQL takes \
                     {POSTGRES_INDEX_COLUMNS_MAX}"
                );
                found.push(about(table, why, "make the key shorter"));
            }
        }
        for column in table.columns().iter().filter(|column| POSTGRES_OWN.contains(&column.name.as_str())) {
            found.push(Obstacle {
                table: table.name().to_owned(),
                column: Some(column.name.clone()),
                why: format!("every PostgreSQL table has a column `{}` already", column.name),
                advice: "choose another name",
            });
        }
    }
    found.extend(clashes("PostgreSQL", tables, |table| {
        let indexes = table.indexes().iter().map(|index| format!("{table}_{}_idx", index.name));
        indexes.chain(std::iter::once(format!("{table}_pkey"))).collect()
    }));
    found
}

/// The most that the columns of one row take in a page, whatever they hold.
fn page_bytes(table: &Table) -> usize {
    // Content of more than 24 bytes can be moved out; what follows may have to begin at the next multiple of 8.
    const MOVABLE: usize = 24 + 7;
    const FIXED: usize = 8;
    let columns: usize = table
        .columns()
        .iter()
        .map(|column| match column.kind {
            Type::Text | Type::Bytes | Type::Json => MOVABLE,
            Type::Int | Type::Float | Type::Bool | Type::Time => FIXED,
        })
        .sum();
    let header = 24 + column_count(table).div_ceil(8).next_multiple_of(8);
    header + MOVABLE + FIXED + columns
}

fn dynamodb(tables: &[&Table]) -> Vec<Obstacle> {
    let mut found = Vec::new();
    for table in tables {
        let indexes = table.indexes().len();
        if indexes > DYNAMODB_INDEXES_MAX {
            let why = format!("table `{table}` has {indexes} indexes; DynamoDB takes {DYNAMODB_INDEXES_MAX}");
            found.push(about(table, why, FEWER_INDEXES));
        }
        let bytes = expression_bytes(table);
        if bytes > DYNAMODB_EXPRESSION_BYTES_MAX {
            let why = format!(
                "writing all {} columns of table `{table}` takes an expression of {bytes} bytes; DynamoDB takes \
                 {DYNAMODB_EXPRESSION_BYTES_MAX}",
                table.columns().len()
            );
            found.push(about(table, why, "shorten the names of its columns, or make several things of it"));
        }
    }
    found
}

/// The longest expression that writes a whole row: `SET #name = :v0, … REMOVE … ADD …`.
fn expression_bytes(table: &Table) -> usize {
    const KEY_SUFFIX: usize = "_PK".len();
    const OWN: usize = "version_life_at".len();
    // `#`, ` = `, `:v` and three digits, `, `.
    const AROUND: usize = 1 + 3 + 5 + 2;
    let columns = table.columns().iter().map(|column| column.name.len());
    let indexes = table.indexes().iter().flat_map(|index| [index.name.len() + KEY_SUFFIX; 2]);
    let set: usize = columns.chain(indexes).map(|name| name + AROUND).sum();
    set + OWN + 3 * AROUND + "SET  REMOVE #_expires ADD #_log :v000".len()
}

/// Names that an engine makes for what belongs to a table, and that are taken.
fn clashes(engine: &str, tables: &[&Table], made: impl Fn(&Table) -> Vec<String>) -> Vec<Obstacle> {
    let mut owners: HashMap<String, &Table> =
        tables.iter().map(|table| (table.name().to_owned(), *table)).collect();
    let mut found = Vec::new();
    for table in tables {
        for name in made(table) {
            if let Some(other) = owners.insert(name.clone(), table) {
                let why = format!(
                    "on {engine} the name `{name}` belongs to an index of table `{table}`, so table `{other}` and \
                     it are in each other's way"
                );
                found.push(about(other, why, OTHER_TABLE));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource;

    /// What an engine says about `[entity.thing]` with these settings.
    fn said(settings: &str, engine: Engine) -> String {
        let text = format!("[entity.thing]\n{settings}\n");
        let blueprint = Blueprint::read("statehouse.toml", &text).unwrap();
        let resources = resource::declare(&blueprint).unwrap_or_else(|problems| panic!("{problems}"));
        problems(&blueprint, &resources, engine).render(false)
    }

    fn columns(count: usize, kind: &str) -> String {
        let list: Vec<String> = (0..count).map(|number| format!("c{number} = \"{kind}?\"")).collect();
        format!("key = {{ id = \"int\" }}\nfields = {{ {} }}", list.join(", "))
    }

    /// The first engine says this, the others nothing.
    fn only(settings: &str, engine: Engine, expect: &str) {
        let found = said(settings, engine);
        assert!(found.contains(expect), "{engine}: {found}");
        for other in Engine::ALL.into_iter().filter(|other| *other != engine) {
            assert_eq!(said(settings, other), "", "{other}");
        }
    }

    #[test]
    fn names_that_an_engine_keeps_are_pointed_at() {
        only(
            "key = { id = \"int\" }\nfields = { ctid = \"text\" }",
            Engine::Postgres,
            "\
error: every PostgreSQL table has a column `ctid` already
 --> statehouse.toml:3:12
  |
3 | fields = { ctid = \"text\" }
  |            ^^^^
  |
  = help: choose another name",
        );
        only("key = { id = \"int\" }\ntable = \"sqlite_things\"", Engine::Sqlite, "statehouse.toml:3:9");
        let two = |table: &str| {
            let key = "key = { id = \"int\" }";
            format!("{key}\ntable = \"things\"\n[entity.other]\n{key}\ntable = \"{table}\"")
        };
        only(&two("things_by_status_idx"), Engine::Postgres, "in each other's way");
        only(&two("things_pkey"), Engine::Postgres, "statehouse.toml:6:9");
        only(&two("things__by_status"), Engine::Sqlite, "in each other's way");
    }

    #[test]
    fn limits_begin_where_they_are_said_to() {
        // An entity's table has tenant, key, status, time and version beside its fields.
        let own = 5;
        let sqlite = SQLITE_COLUMNS_MAX - own;
        assert_eq!(said(&columns(sqlite, "bool"), Engine::Sqlite), "");
        assert!(
            said(&columns(sqlite + 1, "bool"), Engine::Sqlite).contains("2001 columns; SQLite takes 2000")
        );
        assert!(
            said(&columns(POSTGRES_COLUMNS_MAX, "bool"), Engine::Postgres).contains("PostgreSQL takes 1600")
        );
        assert_eq!(said(&columns(250, "text"), Engine::Postgres), "");
        assert!(said(&columns(270, "text"), Engine::Postgres).contains("bytes of a page"));
        assert_eq!(said(&columns(200, "int"), Engine::Dynamodb), "");
        assert!(said(&columns(300, "int"), Engine::Dynamodb).contains("DynamoDB takes 4096"));
        let key = |count: usize| {
            let parts: Vec<String> = (0..count).map(|number| format!("k{number} = \"int\"")).collect();
            format!("key = {{ {} }}", parts.join(", "))
        };
        // The index by status and time has the tenant and the key in it too.
        assert_eq!(said(&key(29), Engine::Postgres), "");
        only(&key(30), Engine::Postgres, "index `by_status` of table `things` has 33 columns");
    }

    #[test]
    fn the_number_of_indexes_is_limited_on_dynamodb() {
        let start = Table::named("things").partition("id", Type::Int).required("n", Type::Int);
        let with = |count: usize| {
            let builder = (0..count)
                .fold(start.clone(), |table, number| table.index(&format!("by_{number}"), &[], &["n"]));
            builder.build().unwrap()
        };
        assert_eq!(obstacles(&[&with(20)], Engine::Dynamodb), []);
        let found = obstacles(&[&with(21)], Engine::Dynamodb);
        assert!(found[0].why.contains("21 indexes; DynamoDB takes 20"), "{found:?}");
    }
}
