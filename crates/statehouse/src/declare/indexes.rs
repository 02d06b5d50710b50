//! Indexes that a blueprint declares: `indexes = { by_email = ["email"], by_category = ["category", "-updated_at"] }`.
//!
//! Every archetype builds its tables and adds its resources through [`super::Declare`], which is where these indexes are taken
//! from the settings, added to the table that has their columns, and given to the list of that table's resource
//! ([`list::IndexedList`]). No archetype knows of them.
//!
//! - X1. *The first column is given, the others are in order.* `["category", "-updated_at"]` is stored with the partition
//!   `category` and the order `updated_at`. A first column with a sign (`["-price"]`) is in order too: then all rows of a tenant
//!   are one partition.
//! - X2. *The sign is a default.* A list can be read in both directions, all columns of the order together. So columns behind
//!   one with `-` need a `-` as well.
//! - X3. *The stored name follows from the columns*, so that another declaration under the same name is another index, and a
//!   migration adds it.
//! - X4. *Rows that do not count as existing are elsewhere.* Where rows count as existing in one state only, the state is the first
//!   partition column of the stored index, and a list reads that state unless the caller asks for another.
//! - X5. *No row is missing.* A row is in an index only while all columns of the index are set. A list uses an index with a
//!   column that may be null only if the call gives a condition on that column.

pub(crate) mod choose;
pub(crate) mod list;

use std::ops::Range;

use statehouse_store::table::NAME_MAX;

use super::action::ActionSpec;
use super::settings::SettingsReader;
use super::table::{ColumnDef, TableSpec};
use crate::action::{Action, ActionHandler, Method, Route, RouteKind};
use crate::blueprint::nearest;
use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::form::Form;
use crate::resource::Resource;
use list::ListSource;

/// The setting.
pub(crate) const INDEXES: &str = "indexes";
/// Indexes of one declaration. Each is written with every row, and DynamoDB takes 20 of a table.
const INDEXES_MAX: usize = 10;
/// Columns of one index.
const COLUMNS_MAX: usize = 8;

/// A declared index, as lists use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListIndex {
    /// Its name in the blueprint.
    pub name: String,
    /// Its columns, in the order of the declaration.
    pub columns: Vec<String>,
    /// How many of them, from the first, a call has to give: one, or none if the first is in order too.
    pub fixed: usize,
    /// Whether a list is greatest first, unless the call says otherwise.
    pub backward: bool,
    /// Its name in the store.
    pub stored: String,
    /// The column that leads the stored index, and the state of the rows that count as existing.
    pub state: Option<(String, String)>,
}

impl ListIndex {
    /// The columns as a blueprint writes them: `["category", "-updated_at"]`.
    pub fn columns_text(&self) -> String {
        let sign = if self.backward { "-" } else { "" };
        let forward = if self.fixed == 0 && !self.backward { "+" } else { sign };
        let text = self.columns.iter().enumerate().map(|(index, column)| {
            let sign = match index {
                index if index < self.fixed => "",
                0 => forward,
                _ => sign,
            };
            format!("\"{sign}{column}\"")
        });
        format!("[{}]", text.collect::<Vec<_>>().join(", "))
    }
}

/// A column of an index as it stands in the file.
#[derive(Clone, Debug)]
struct IndexColumn {
    name: String,
    /// `+`, `-` or nothing.
    sign: Option<char>,
    span: Range<usize>,
}

/// An index as it stands in the file.
#[derive(Clone, Debug)]
struct WantedIndex {
    name: String,
    span: Range<usize>,
    columns: Vec<IndexColumn>,
}

/// The indexes of one declaration.
#[derive(Debug, Default)]
pub(super) struct DeclaredIndexes {
    wanted: Vec<WantedIndex>,
    /// Those that a table has, each with the table, where it is declared, and whether a list uses it.
    placed: Vec<(String, Range<usize>, ListIndex, bool)>,
    /// The columns of the first table, for advice.
    known: Vec<String>,
}

impl DeclaredIndexes {
    /// Reads the setting.
    pub(super) fn read(node: Option<Node>, problems: &mut Problems) -> DeclaredIndexes {
        let Some(node) = node else { return DeclaredIndexes::default() };
        let TreeValue::Table(entries) = node.value else {
            let title =
                format!("`{INDEXES}` must be a table of names and columns, not {}", node.value.kind());
            let advice = format!("write `{INDEXES} = {{ by_email = [\"email\"] }}`");
            problems.add(BlueprintProblem::at(node.span, title).advice(advice));
            return DeclaredIndexes::default();
        };
        if entries.len() > INDEXES_MAX {
            let title = format!("there are {} indexes; the limit is {INDEXES_MAX}", entries.len());
            let advice = "each index is written with every row: keep those that lists need";
            problems.add(BlueprintProblem::at(node.span, title).advice(advice));
        }
        let mut wanted = Vec::new();
        for entry in &entries {
            match wanted_index(entry) {
                Ok(index) => wanted.push(index),
                Err(problem) => problems.add(problem),
            }
        }
        DeclaredIndexes { wanted, ..DeclaredIndexes::default() }
    }

    /// Adds to a table those indexes whose columns it has, unless a table before it has them.
    pub(super) fn place(&mut self, spec: TableSpec, settings: &mut SettingsReader<'_>) -> TableSpec {
        let columns = spec.column_defs();
        if self.known.is_empty() {
            self.known = columns.iter().filter(|def| can_be_indexed(def)).map(named).collect();
        }
        let find = |name: &str| columns.iter().find(|def| def.column.name == name);
        let has = |index: &WantedIndex| index.columns.iter().all(|column| find(&column.name).is_some());
        let (here, elsewhere) = std::mem::take(&mut self.wanted).into_iter().partition(has);
        self.wanted = elsewhere;
        let mut added: Vec<(ListIndex, Vec<String>)> = Vec::new();
        for index in here {
            let problem = index.columns.iter().find_map(|column| unsuited(column, find(&column.name)?));
            if let Some(problem) = problem {
                settings.add_problem(problem);
                continue;
            }
            let (made, partition) = list_index(&index, spec.live_state());
            if let Some((other, _)) = added.iter().find(|(other, _)| other.stored == made.stored) {
                let title = format!("`{}` has the same columns as `{}`", made.name, other.name);
                let advice = "remove one of them: a list reads an index in both directions, with `sort`";
                settings.add_problem(BlueprintProblem::at(index.span, title).advice(advice));
                continue;
            }
            self.placed.push((spec.name().to_owned(), index.span, made.clone(), false));
            added.push((made, partition));
        }
        added.into_iter().fold(spec, |spec, (made, partition)| {
            let partition: Vec<&str> = partition.iter().map(String::as_str).collect();
            let sort: Vec<&str> = made.columns.iter().skip(made.fixed).map(String::as_str).collect();
            spec.index(&made.stored, &partition, &sort)
        })
    }

    /// Gives the indexes of a resource's table to its list. Every list of rows can be read by keys and in part.
    pub(super) fn serve(&mut self, resource: &mut Resource, keyword: &str, thing: &str) {
        let Some(def) = resource.def.clone() else { return };
        let mut indexes = Vec::new();
        for (table, _, index, is_served) in &mut self.placed {
            if table == def.table().name() && lists_rows_or_none(resource) {
                *is_served = true;
                indexes.push(index.clone());
            }
        }
        let has_list = resource.actions.iter().any(|action| is_row_list(resource, action));
        let Some(place) = list_place(resource, indexes.is_empty()) else { return };
        let row_read = resource.actions.iter().find_map(|action| match &action.handler {
            ActionHandler::Read(read) if action.route == ITEM => Some(read.clone()),
            _ => None,
        });
        resource.indexes.clone_from(&indexes);
        let has_row_key = resource.row_def().is_some();
        let source = ListSource {
            resource: resource.name.clone(),
            section: format!("{keyword}.{thing}"),
            key: if has_row_key { resource.key.clone() } else { Vec::new() },
            def,
            indexes,
        };
        if let Some(action) = resource.actions.get_mut(place) {
            list::wrap(action, source, row_read, has_list);
        }
    }

    /// Reports the indexes that no table has, and those that no list can use.
    pub(super) fn finish(self, subject: &str, problems: &mut Problems) {
        for index in &self.wanted {
            problems.add(self.unknown_column(subject, index));
        }
        for (table, span, index, is_served) in &self.placed {
            if !is_served {
                let title = format!("`{}`: no list of `{subject}` shows rows of `{table}`", index.name);
                problems.add(BlueprintProblem::at(span.clone(), title));
            }
        }
    }

    fn unknown_column(&self, subject: &str, index: &WantedIndex) -> BlueprintProblem {
        let unknown = index.columns.iter().find(|column| !self.known.contains(&column.name));
        let Some(column) = unknown.or(index.columns.first()) else {
            return BlueprintProblem::at(index.span.clone(), format!("`{}` has no columns", index.name));
        };
        let title = format!("`{subject}` has no column `{}` that an index can have", column.name);
        let problem = BlueprintProblem::at(column.span.clone(), title);
        match nearest(&column.name, self.known.iter().map(String::as_str)) {
            Some(near) => problem.advice(format!("did you mean `{near}`?")),
            None if self.known.is_empty() => problem.advice("it has no rows of its own"),
            None => problem.advice(format!("it has {}", self.known.join(", "))),
        }
    }
}

const ITEM: Route = Route { method: Method::Get, kind: RouteKind::Item };
const COLLECTION: Route = Route { method: Method::Get, kind: RouteKind::Collection };

fn named(def: &ColumnDef) -> String {
    def.column.name.clone()
}

fn can_be_indexed(def: &ColumnDef) -> bool {
    !def.hidden && def.column.kind.is_ordered()
}

/// Whether the list of a resource shows its rows, or there is no list.
fn lists_rows_or_none(resource: &Resource) -> bool {
    resource
        .actions
        .iter()
        .find(|action| action.route == COLLECTION)
        .is_none_or(|list| is_row_list(resource, list))
}

/// Whether an action lists the rows of its resource: what it gives has all their columns.
fn is_row_list(resource: &Resource, action: &Action) -> bool {
    let (Form::List(item), Some(def)) = (&action.output, &resource.def) else { return false };
    let (Form::Object(shown), Form::Object(columns)) = (&**item, def.row_form()) else { return false };
    let is_read = action.route == COLLECTION && matches!(action.handler, ActionHandler::Read(_));
    is_read && columns.iter().all(|column| shown.iter().any(|one| one.name == column.name))
}

/// Where the list of a resource is among its actions. One that has none gets one if it has indexes.
fn list_place(resource: &mut Resource, has_no_index: bool) -> Option<usize> {
    let found = resource.actions.iter().position(|action| is_row_list(resource, action));
    if found.is_some() || has_no_index || !lists_rows_or_none(resource) {
        return found;
    }
    let read = resource.actions.iter().find(|action| action.route == ITEM);
    let after: Vec<String> = read.map(|read| read.after.clone()).unwrap_or_default();
    let mut spec = ActionSpec::list("list", "List {name} rows by an index.")
        .mechanism("range read on a declared index")
        .after(after.iter().map(String::as_str))
        .reads(list::NoList);
    if let Some(read) = read {
        spec = spec.gives_rows(read.output.clone());
    }
    resource.actions.push(spec.build(&resource.name, resource.def.as_deref())?);
    resource.actions.len().checked_sub(1)
}

/// Reads one entry of the setting.
fn wanted_index(entry: &TreeEntry) -> Result<WantedIndex, BlueprintProblem> {
    let name = &entry.key;
    let wrong = |span: &Range<usize>, title: String| {
        let advice = format!("write `{name} = [\"category\", \"-updated_at\"]`");
        BlueprintProblem::at(span.clone(), title).advice(advice)
    };
    let not_a_list = || format!("`{name}` must be a list of columns, not {}", entry.value.value.kind());
    let TreeValue::List(items) = &entry.value.value else {
        return Err(wrong(&entry.value.span, not_a_list()));
    };
    if items.is_empty() || items.len() > COLUMNS_MAX {
        let title = format!("`{name}` has {} columns; an index has from 1 to {COLUMNS_MAX}", items.len());
        return Err(wrong(&entry.value.span, title));
    }
    let mut columns: Vec<IndexColumn> = Vec::new();
    for item in items {
        let TreeValue::Text(text) = &item.value else {
            return Err(wrong(&item.span, format!("a column must be text, not {}", item.value.kind())));
        };
        let sign = text.chars().next().filter(|first| ['+', '-'].contains(first));
        let column = text.strip_prefix(['+', '-']).unwrap_or(text).to_owned();
        if columns.iter().any(|other| other.name == column) {
            return Err(wrong(&item.span, format!("`{name}` names `{column}` twice")));
        }
        columns.push(IndexColumn { name: column, sign, span: item.span.clone() });
    }
    check_signs(name, &columns)?;
    Ok(WantedIndex { name: name.clone(), span: entry.key_span.clone(), columns })
}

/// A list reads all columns of the order in one direction (X2).
fn check_signs(name: &str, columns: &[IndexColumn]) -> Result<(), BlueprintProblem> {
    let backward = columns.iter().position(|column| column.sign == Some('-'));
    let Some(backward) = backward else { return Ok(()) };
    let other = columns
        .iter()
        .enumerate()
        .find(|(index, column)| column.sign == Some('+') || (*index > backward && column.sign.is_none()));
    let Some((_, other)) = other else { return Ok(()) };
    let title = format!("`{name}` has columns in both directions: an index is read in one of them");
    let advice = format!("write `\"-{}\"`, or make it the first column", other.name);
    Err(BlueprintProblem::at(other.span.clone(), title).advice(advice))
}

/// Why a column of a table cannot be in an index.
fn unsuited(column: &IndexColumn, def: &ColumnDef) -> Option<BlueprintProblem> {
    let name = &column.name;
    let problem = |title: String| Some(BlueprintProblem::at(column.span.clone(), title));
    if def.hidden {
        return problem(format!("`{name}` is not shown to callers, so that they cannot list by it"));
    }
    if !def.column.kind.is_ordered() {
        return problem(format!("`{name}` is {}, which has no order", def.column.kind));
    }
    if list::INPUTS.contains(&name.as_str()) {
        let problem =
            problem(format!("every list has an input `{name}`, so that rows cannot be listed by it"));
        return problem.map(|problem| problem.advice("give the field another name"));
    }
    None
}

/// The index as lists use it, and the partition columns of the stored index (X1, X4).
fn list_index(index: &WantedIndex, live: Option<(&str, &str)>) -> (ListIndex, Vec<String>) {
    let columns: Vec<String> = index.columns.iter().map(|column| column.name.clone()).collect();
    let fixed = usize::from(index.columns.first().is_some_and(|first| first.sign.is_none()));
    let state = live.filter(|(state, _)| !columns.iter().any(|column| column == state));
    let led = state.iter().map(|(state, _)| (*state).to_owned());
    let partition: Vec<String> = led.chain(columns.iter().take(fixed).cloned()).collect();
    let made = ListIndex {
        name: index.name.clone(),
        fixed,
        backward: index.columns.iter().any(|column| column.sign == Some('-')),
        stored: stored_name(&partition, columns.get(fixed..).unwrap_or_default()),
        state: state.map(|(state, live)| (state.to_owned(), live.to_owned())),
        columns,
    };
    (made, partition)
}

/// The longest name that is written out. A longer one ends with a hash.
const STORED_NAME_MAX: usize = NAME_MAX;

/// The name of an index in the store: partition and order, so that other columns make another name (X3).
fn stored_name(partition: &[String], sort: &[String]) -> String {
    let order = if sort.is_empty() { String::new() } else { format!("by__{}", sort.join("__")) };
    let parts = [partition.join("__"), order].into_iter().filter(|part| !part.is_empty());
    let readable = format!("ix_{}", parts.collect::<Vec<_>>().join("__"));
    let is_unclear = |column: &String| column.contains("__") || column.ends_with('_') || column == "by";
    if readable.len() <= STORED_NAME_MAX && !partition.iter().chain(sort).any(is_unclear) {
        return readable;
    }
    let whole = format!("{}|{}", partition.join(","), sort.join(","));
    // FNV-1a: the name must be the same in every version of the program.
    let hash = whole.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let kept: String = readable.chars().take(STORED_NAME_MAX - 17).collect();
    format!("{kept}_{hash:016x}")
}
