//! Tables as archetypes declare them: columns with a description, allowed values and visibility.
//!
//! A [`TableSpec`] is written once. From it come the stored table, the form of a row in requests and responses
//! ([`TableDef::row_form`]), and rows as callers see them ([`TableDef::row_json`]): hidden columns never leave the library.
//! A column with a deadline brings its due index, so that setting and clearing it cannot be forgotten
//! ([`TableDef::set_due`], [`TableDef::clear_due`]).

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::guard::now;
use statehouse_store::table::{TableBuilder, VERSION};
use statehouse_store::{Column, Expr, Row, SchemaError, Step, Table, Tenant, Type, Value};

use crate::blueprint::settings::Field;
use crate::form::{Form, Property};
use crate::infra::due::{self, DUE_AT, DUE_SHARD};
use crate::resource::key_text;

/// The column that holds the state of a row, unless a table names another.
pub const STATE: &str = "state";
/// When a row was created.
pub const CREATED_AT: &str = "created_at";
/// When a row was last changed.
pub const UPDATED_AT: &str = "updated_at";

/// A declared column.
#[derive(Clone, Debug)]
pub struct ColumnDef {
    /// Name, type, whether it refuses null, default.
    pub column: Column,
    /// One line for people who read the API.
    pub about: Cow<'static, str>,
    /// How responses show it, if not as its type says.
    pub form: Option<Form>,
    /// Whether it is left out of responses, events and OpenAPI.
    pub hidden: bool,
    /// Whether only the insert sets it.
    pub immutable: bool,
}

/// Rows in some states become due at the time in a column.
#[derive(Clone, Debug)]
pub struct Deadline {
    /// The column with the time.
    pub column: &'static str,
    /// The states in which rows are due. Empty: the archetype decides by hand.
    pub states: Vec<Cow<'static, str>>,
    /// Into how many shards the due index is divided.
    pub shards: u32,
}

/// A table being declared. Modifiers like [`TableSpec::about`] apply to the column that was added last.
#[derive(Clone, Debug)]
pub struct TableSpec {
    builder: TableBuilder,
    columns: Vec<ColumnDef>,
    key_len: usize,
    state_column: Option<Cow<'static, str>>,
    states: Vec<Cow<'static, str>>,
    live_states: Vec<Cow<'static, str>>,
    deadline: Option<Deadline>,
}

/// A declared table.
#[derive(Debug)]
pub struct TableDef {
    table: Arc<Table>,
    columns: Vec<ColumnDef>,
    hidden: Vec<String>,
    state_column: Option<Cow<'static, str>>,
    states: Vec<Cow<'static, str>>,
    live_states: Vec<Cow<'static, str>>,
    deadline: Option<Deadline>,
}

impl TableSpec {
    /// Starts the declaration of a table.
    pub fn named(name: impl Into<String>) -> TableSpec {
        TableSpec {
            builder: Table::named(name),
            columns: Vec::new(),
            key_len: 0,
            state_column: None,
            states: Vec::new(),
            live_states: Vec::new(),
            deadline: None,
        }
    }

    /// The columns of the key, all of which name the partition.
    #[must_use]
    pub fn key(self, key: &[Field]) -> TableSpec {
        key.iter().fold(self, |spec, field| spec.partition(&field.name, field.kind))
    }

    /// One more partition column of the key.
    #[must_use]
    pub fn partition(mut self, name: &str, kind: Type) -> TableSpec {
        self.builder = self.builder.partition(name, kind);
        self.key_column(name, kind)
    }

    /// A sort column of the key: rows of one partition are kept in its order.
    #[must_use]
    pub fn sort(mut self, name: &str, kind: Type) -> TableSpec {
        self.builder = self.builder.sort(name, kind);
        self.key_column(name, kind)
    }

    fn key_column(mut self, name: &str, kind: Type) -> TableSpec {
        let column = Column { name: name.to_owned(), kind, required: true, default: None };
        self.columns.insert(self.key_len, ColumnDef { immutable: true, ..plain(column) });
        self.key_len += 1;
        self
    }

    /// Columns that the user declared.
    #[must_use]
    pub fn fields(mut self, fields: &[Field]) -> TableSpec {
        for field in fields {
            let required = !field.optional || field.default.is_some();
            let column = Column {
                name: field.name.clone(),
                kind: field.kind,
                required,
                default: field.default.clone(),
            };
            if let Some(former) = &field.renamed_from {
                self.builder = self.builder.renamed(&field.name, former);
            }
            self.columns.push(ColumnDef { immutable: field.immutable, ..plain(column) });
        }
        self
    }

    /// A column that refuses null.
    #[must_use]
    pub fn column(mut self, name: impl Into<String>, kind: Type) -> TableSpec {
        self.columns.push(plain(Column { name: name.into(), kind, required: true, default: None }));
        self
    }

    /// A column of text.
    #[must_use]
    pub fn text(self, name: &'static str) -> TableSpec {
        self.column(name, Type::Text)
    }

    /// A column of integers.
    #[must_use]
    pub fn int(self, name: &'static str) -> TableSpec {
        self.column(name, Type::Int)
    }

    /// A column of true and false.
    #[must_use]
    pub fn flag(self, name: &'static str) -> TableSpec {
        self.column(name, Type::Bool)
    }

    /// A column of times.
    #[must_use]
    pub fn time(self, name: &'static str) -> TableSpec {
        self.column(name, Type::Time)
    }

    /// A column of JSON.
    #[must_use]
    pub fn json(self, name: &'static str) -> TableSpec {
        self.column(name, Type::Json)
    }

    /// The last column may be null.
    #[must_use]
    pub fn null(self) -> TableSpec {
        self.last(|def| def.column.required = false)
    }

    /// The last column has this value if an insert does not set it.
    #[must_use]
    pub fn default(self, value: impl Into<Value>) -> TableSpec {
        let value = value.into();
        self.last(|def| def.column.default = Some(value))
    }

    /// Describes the last column.
    #[must_use]
    pub fn about(self, about: impl Into<Cow<'static, str>>) -> TableSpec {
        self.last(|def| def.about = about.into())
    }

    /// The last column has one of these values.
    #[must_use]
    pub fn one_of(self, words: &[&'static str]) -> TableSpec {
        self.last(|def| def.form = Some(Form::one_of(words)))
    }

    /// Responses show the last column in this form.
    #[must_use]
    pub fn shown_as(self, form: Form) -> TableSpec {
        self.last(|def| def.form = Some(form))
    }

    /// The last column is internal: it is left out of responses, events and OpenAPI.
    #[must_use]
    pub fn hidden(self) -> TableSpec {
        self.last(|def| def.hidden = true)
    }

    /// Only the insert sets the last column.
    #[must_use]
    pub fn immutable(self) -> TableSpec {
        self.last(|def| def.immutable = true)
    }

    fn last(mut self, change: impl FnOnce(&mut ColumnDef)) -> TableSpec {
        if let Some(def) = self.columns.last_mut() {
            change(def);
        }
        self
    }

    /// The column `state`, with these states.
    #[must_use]
    pub fn states<S: Clone + Into<Cow<'static, str>>>(self, states: &[S]) -> TableSpec {
        self.states_in(STATE, states)
    }

    /// The states of a row, in a column of another name.
    #[must_use]
    pub fn states_in<S: Clone + Into<Cow<'static, str>>>(
        mut self,
        column: &'static str,
        states: &[S],
    ) -> TableSpec {
        self.state_column = Some(column.into());
        self.states = owned(states);
        let form = Form::OneOf(self.states.clone());
        self.text(column).shown_as(form)
    }

    /// The states in which a row counts as existing, if it does not in all of them.
    #[must_use]
    pub fn live(mut self, states: &[&'static str]) -> TableSpec {
        self.live_states = states.iter().map(|state| Cow::Borrowed(*state)).collect();
        self
    }

    /// The column `created_at`, which the insert sets.
    #[must_use]
    pub fn created_at(self) -> TableSpec {
        self.time(CREATED_AT).about("when it was created").immutable()
    }

    /// The column `updated_at`, which every write that is logged sets.
    #[must_use]
    pub fn updated_at(self) -> TableSpec {
        self.time(UPDATED_AT).about("when it was last changed")
    }

    /// Rows in these states become due at the time in a column. Adds the index `due` and its hidden columns. The column
    /// `due_at` itself is used if it is the one that is named, and is then as visible as it was declared. The store records the
    /// number of shards, which the setting `shards` says.
    #[must_use]
    pub fn deadline<S: Clone + Into<Cow<'static, str>>>(
        mut self,
        states: &[S],
        column: &'static str,
        shards: u32,
    ) -> TableSpec {
        let states = owned(states);
        self.deadline = Some(Deadline { column, states, shards });
        let has_due_at = self.columns.iter().any(|def| def.column.name == DUE_AT);
        let spec = self.column(DUE_SHARD, Type::Int).null().hidden();
        let spec = if has_due_at { spec } else { spec.column(DUE_AT, Type::Time).null().hidden() };
        // A sweeper looks at so many shards, and at no others.
        TableSpec { builder: due::index(spec.builder), ..spec }.growing("shards", shards)
    }

    /// A setting that says over how many parts rows are spread. It may only become greater while the table exists.
    #[must_use]
    pub fn growing(mut self, setting: &str, parts: u32) -> TableSpec {
        self.builder = self.builder.growing(setting, parts);
        self
    }

    /// An index of each tenant's rows: equal in the first columns, in the order of the others.
    #[must_use]
    pub fn index(mut self, name: &str, partition: &[&str], sort: &[&str]) -> TableSpec {
        self.builder = self.builder.index(name, partition, sort);
        self
    }

    /// An index of the rows of all tenants, for workers.
    #[must_use]
    pub fn global_index(mut self, name: &str, partition: &[&str], sort: &[&str]) -> TableSpec {
        self.builder = self.builder.global_index(name, partition, sort);
        self
    }

    /// Its name.
    pub(super) fn name(&self) -> &str {
        self.builder.name()
    }

    /// The columns that are declared so far: the key's first.
    pub(super) fn column_defs(&self) -> &[ColumnDef] {
        &self.columns
    }

    /// The column of the state and the state in which rows count as existing, if they do in one state only.
    pub(super) fn live_state(&self) -> Option<(&str, &str)> {
        match (self.state_column.as_deref(), self.live_states.as_slice()) {
            (Some(column), [live]) => Some((column, live)),
            _ => None,
        }
    }

    /// The names of columns that cannot be declared, because the table has them already.
    pub(super) fn clashes(&self) -> Vec<String> {
        let others = self.columns.iter().skip(self.key_len).map(|def| def.column.clone());
        others.fold(self.builder.clone(), TableBuilder::declared).clashes()
    }

    /// Checks the declaration.
    pub fn build(self) -> Result<Arc<TableDef>, SchemaError> {
        let TableSpec { builder, columns, key_len, state_column, states, live_states, deadline } = self;
        let others = columns.iter().skip(key_len).map(|def| def.column.clone());
        let table = others.fold(builder, TableBuilder::declared).build()?;
        let hidden = columns.iter().filter(|def| def.hidden).map(|def| def.column.name.clone()).collect();
        Ok(Arc::new(TableDef { table, columns, hidden, state_column, states, live_states, deadline }))
    }
}

fn owned<S: Clone + Into<Cow<'static, str>>>(states: &[S]) -> Vec<Cow<'static, str>> {
    states.iter().cloned().map(Into::into).collect()
}

fn plain(column: Column) -> ColumnDef {
    ColumnDef { column, about: Cow::Borrowed(""), form: None, hidden: false, immutable: false }
}

impl TableDef {
    /// The stored table.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// The columns: the key's first.
    pub fn columns(&self) -> &[ColumnDef] {
        &self.columns
    }

    /// The names of the columns that callers do not see.
    pub fn hidden(&self) -> &[String] {
        &self.hidden
    }

    /// The column with the state of a row, and the states it can have.
    pub fn states(&self) -> Option<(&str, &[Cow<'static, str>])> {
        self.state_column.as_deref().map(|column| (column, self.states.as_slice()))
    }

    /// The states in which a row counts as existing; empty if it does in all of them.
    pub fn live_states(&self) -> &[Cow<'static, str>] {
        &self.live_states
    }

    /// When rows become due.
    pub fn deadline(&self) -> Option<&Deadline> {
        self.deadline.as_ref()
    }

    /// Whether callers see a time of a row beside those of its creation and its last change.
    pub fn has_times(&self) -> bool {
        self.columns.iter().filter(|def| !def.hidden).any(|def| {
            def.column.kind == Type::Time && ![CREATED_AT, UPDATED_AT].contains(&def.column.name.as_str())
        })
    }

    /// The form of a row as callers see it.
    pub fn row_form(&self) -> Form {
        let visible = self.columns.iter().filter(|def| !def.hidden);
        let version = Property::required(VERSION, Form::Value(Type::Int), "raised by every write");
        Form::Object(visible.map(ColumnDef::shown).chain([version]).collect())
    }

    /// A row as callers see it.
    pub fn row_json(&self, row: &Row) -> Json {
        self.visible(row.to_json())
    }

    /// A row that an event has, as callers see it.
    pub fn visible(&self, mut row: Json) -> Json {
        if let Some(fields) = row.as_object_mut() {
            self.hidden.iter().for_each(|name| drop(fields.remove(name)));
        }
        row
    }

    /// Sets the time at which a row becomes due, in a step on it.
    pub fn set_due(&self, step: Step, tenant: &Tenant, resource: &str, at: impl Into<Expr>) -> Step {
        let Some(deadline) = &self.deadline else { return step };
        let at = at.into();
        let shard = due::shard_of(tenant, resource, &key_text(&step.key), deadline.shards);
        let step = if deadline.column == DUE_AT { step } else { step.set(deadline.column, at.clone()) };
        due::set(step, shard, at)
    }

    /// Makes a row due no more, in a step on it. Another column than `due_at` keeps its time.
    pub fn clear_due(&self, step: Step) -> Step {
        due::clear(step)
    }

    /// A step that changes a row, with the time of the change.
    pub fn update(&self, key: impl IntoIterator<Item = Value>) -> Step {
        Step::update(&self.table, key).set(UPDATED_AT, now())
    }
}

impl ColumnDef {
    /// The column in a response.
    fn shown(&self) -> Property {
        let form = self.form.clone().unwrap_or(match self.column.kind {
            Type::Json => Form::Any,
            kind => Form::Value(kind),
        });
        let property = Property::required(&self.column.name, form, &self.about);
        Property { nullable: !self.column.required, ..property }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lots() -> Arc<TableDef> {
        TableSpec::named("lots")
            .partition("lot_id", Type::Text)
            .states(&["OPEN", "CLOSED"])
            .int("reserve")
            .about("bids below it are rejected")
            .hidden()
            .time("ends_at")
            .json("notes")
            .null()
            .updated_at()
            .deadline(&["OPEN"], "ends_at", 4)
            .build()
            .unwrap()
    }

    #[test]
    fn responses_are_derived_from_the_visible_columns() {
        let Form::Object(properties) = lots().row_form() else { panic!("a row is an object") };
        let names: Vec<&str> = properties.iter().map(|property| property.name.as_str()).collect();
        assert_eq!(names, ["lot_id", "state", "ends_at", "notes", "updated_at", "version"]);
        let nullable: Vec<bool> = properties.iter().map(|property| property.nullable).collect();
        assert_eq!(nullable, [false, false, false, true, false, false]);
        let row = json!({"lot_id": "a", "reserve": 5, "due_shard": 1, "due_at": null, "version": 1});
        assert_eq!(lots().visible(row), json!({"lot_id": "a", "version": 1}));
    }

    #[test]
    fn a_deadline_sets_its_column_and_the_due_index_together() {
        let def = lots();
        let step = Step::update(def.table(), ["a".into()]);
        let step = def.set_due(step, &Tenant::new("acme").unwrap(), "lot", now());
        let set: Vec<&str> = step.assignments.iter().map(|one| one.column.as_str()).collect();
        assert_eq!(set, ["ends_at", DUE_SHARD, DUE_AT]);
    }

    #[test]
    fn a_visible_due_at_is_used_itself() {
        let def = TableSpec::named("timers")
            .partition("id", Type::Text)
            .time(DUE_AT)
            .null()
            .deadline(&["SET"], DUE_AT, 4)
            .build()
            .unwrap();
        assert_eq!(def.hidden(), [DUE_SHARD]);
    }
}
