//! A01 Current-value entity: one authoritative row holds the current state of a thing.
//!
//! ```text
//!            create                    delete
//!   (none) ──────────► ACTIVE ───────────────────► DELETED
//!                       │  ▲ ▲                        │
//!                       └──┘ └────────────────────────┘
//!              update, patch, mutate      restore
//! ```
//!
//! **Rows.** `profiles(tenant, key…, fields…, status, updated_at, version)`, with an index by status and time. Fields
//! that are declared `hot` stand in a row of their own, `profiles_hot(tenant, key…, hot fields…, version)`, so that
//! counting a view does not raise the version that editors hold.
//!
//! **Invariants.**
//! - I1. Each version number has exactly one writer. *Guard of every update:* `version = the one that was read`.
//! - I2. No acknowledged update is lost. *I1, and the store's durability.*
//! - I3. A deleted row accepts no update. *Guard of every update:* `status = 'ACTIVE'`.
//! - I4. A write that would change nothing writes nothing. *Decided in the draft; the version that it saw is answered.*
//! - I5. A retry under the same operation id returns the first answer. *The house's H2 and H3.*
//!
//! **Failures.** *Retry ambiguity on write*: I5. *Concurrent overwrite race*: I1; the loser is told the current
//! version. *Stale read after update*: reads are strong unless the caller says `consistency=cached`, and then the token
//! of a write (`after`) makes the read see it. *Cache invalidation lag*: the cache follows the log, answers nothing when
//! it has lost touch, and never keeps a row that was read before a write and arrived after it ([`crate::cache`]).
//!
//! **Hotspots.** *Write contention on hot entity*: `hot = ["views"]` splits fields off; a mutation that only counts
//! needs no version and is never retried.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{column, now};
use statehouse_store::limits::row_weight;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Cursor, Draft as EventDraft, Event, Expr, Guard, Operand, Query, Reason, Refused,
    Row, Step, Table, Tenant, Type, Value,
};

use crate::action::{
    Action, Answer, Call, Code, Desk, Does, Draft, Expected, Method, Pieces, Place, Read, Refusal, Route,
    Verdict, Write, common_verdict,
};
use crate::blueprint::Thing;
use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::settings::Field;
use crate::cache::{Lookup, Token};
use crate::form::{Form, Misfit, Property};
use crate::resource::{Resource, key_text};

/// The states of a row.
const STATUSES: [&str; 2] = [ACTIVE, DELETED];
const ACTIVE: &str = "ACTIVE";
const DELETED: &str = "DELETED";
/// Columns that every entity has.
const STATUS: &str = "status";
const UPDATED_AT: &str = "updated_at";
/// The index that lists rows by status and time.
const BY_STATUS: &str = "by_status";

/// One declared entity.
#[derive(Debug)]
struct Entity {
    name: String,
    fields: Vec<Field>,
    hot: Vec<Field>,
    table: Arc<Table>,
    hot_table: Option<Arc<Table>>,
}

/// Reads `[entity.NAME]`.
pub fn declare(thing: &Thing, problems: &mut Problems) -> Option<Resource> {
    let mut settings = thing.settings.clone();
    let key = settings.fields("key", problems);
    let fields = settings.fields("fields", problems).unwrap_or_default();
    let table = settings.text("table", problems).unwrap_or_else(|| plural(&thing.name));
    let hot_names = settings.texts("hot", problems).unwrap_or_default();
    let require_version = settings.bool("require_version", problems).unwrap_or(true);
    settings.finish(problems);
    let Some(key) = key.filter(|key| !key.is_empty()) else {
        let title = format!("`entity.{}` has no key", thing.name);
        let advice = "say what names a row: `key = { user_id = \"int\" }`";
        problems.add(Problem::at(settings.span(), title).advice(advice));
        return None;
    };
    for field in key.iter().filter(|field| field.optional || field.default.is_some()) {
        let title = format!("`{}` is part of the key and must always be given", field.name);
        problems.add(Problem::at(field.span.clone(), title));
    }
    for name in &hot_names {
        match fields.iter().find(|field| field.name == *name) {
            None => {
                let title = format!("`{name}` is hot and not declared in `fields`");
                problems.add(Problem::at(settings.span_of("hot"), title));
            }
            Some(field) if !field.optional && field.default.is_none() => {
                let title = format!("`{name}` is hot, so it must be optional or have a default");
                let advice = "its row is only written when it is first changed";
                problems.add(Problem::at(field.span.clone(), title).advice(advice));
            }
            Some(_) => {}
        }
    }
    let (hot, fields): (Vec<Field>, Vec<Field>) =
        fields.into_iter().partition(|field| hot_names.contains(&field.name));
    let mut built = |name: &str, columns: &[Field], main: bool| {
        let mut builder = Table::named(name);
        for field in &key {
            builder = builder.partition(&field.name, field.kind);
        }
        for field in columns {
            builder = match (&field.default, field.optional) {
                (Some(default), _) => builder.defaulted(&field.name, field.kind, default.clone()),
                (None, true) => builder.optional(&field.name, field.kind),
                (None, false) => builder.required(&field.name, field.kind),
            };
        }
        if main {
            builder = builder.defaulted(STATUS, Type::Text, ACTIVE).required(UPDATED_AT, Type::Time).index(
                BY_STATUS,
                &[STATUS],
                &[UPDATED_AT],
            );
        }
        match builder.build() {
            Ok(table) => Some(table),
            Err(error) => {
                problems.add(Problem::at(settings.span(), format!("`entity.{}`: {}", thing.name, error.why)));
                None
            }
        }
    };
    let main = built(&table, &fields, true)?;
    let hot_table = if hot.is_empty() { None } else { Some(built(&format!("{table}_hot"), &hot, false)?) };
    let entity = Arc::new(Entity { name: thing.name.clone(), fields, hot, table: main, hot_table });
    Some(Resource {
        name: thing.name.clone(),
        archetype: thing.archetype,
        key: key.iter().map(|field| (field.name.clone(), field.kind)).collect(),
        tables: std::iter::once(entity.table.clone()).chain(entity.hot_table.clone()).collect(),
        actions: actions(&entity, &key, require_version),
    })
}

/// A table's name for a thing's name.
fn plural(name: &str) -> String {
    match name {
        _ if name.ends_with('y') && !name.ends_with("ey") => {
            format!("{}ies", name.strip_suffix('y').unwrap_or(name))
        }
        _ if ["s", "x", "ch", "sh"].iter().any(|end| name.ends_with(end)) => format!("{name}es"),
        _ => format!("{name}s"),
    }
}

/// `ProfileState` for `profile`.
fn state_name(name: &str) -> String {
    let words = name.split('_').map(|word| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect::<String>()
    });
    format!("{}State", words.collect::<String>())
}

fn actions(entity: &Arc<Entity>, key: &[Field], needs_version: bool) -> Vec<Action> {
    let name = &entity.name;
    let target = state_name(name);
    let row = row_form(entity, key);
    let property = |field: &Field, required: bool| Property {
        name: field.name.clone(),
        form: Form::Value(field.kind),
        required,
        nullable: field.optional,
        about: String::new(),
    };
    let must_give = |field: &Field| !field.optional && field.default.is_none();
    let whole: Vec<Property> = entity.fields.iter().map(|field| property(field, must_give(field))).collect();
    let part: Vec<Property> = entity.fields.iter().map(|field| property(field, false)).collect();
    let created: Vec<Property> =
        key.iter().map(|field| property(field, true)).chain(whole.iter().cloned()).collect();
    let every: Vec<&Field> = entity.fields.iter().chain(&entity.hot).collect();
    let numbers: Vec<Property> = every
        .iter()
        .filter(|field| matches!(field.kind, Type::Int | Type::Float))
        .map(|field| property(field, false))
        .collect();
    let lists: Vec<Property> = every
        .iter()
        .filter(|field| field.kind == Type::Json)
        .map(|field| Property::optional(&field.name, Form::Any, "added at the end of the list"))
        .collect();
    let sets: Vec<Property> = every.iter().map(|field| property(field, false)).collect();
    let write = |verb: Verb| Does::Write(Arc::new(Writer { entity: entity.clone(), verb }));
    let at = |method, place| Route { method, place };
    vec![
        Action {
            name: "create",
            summary: format!("Create a {name}."),
            target: target.clone(),
            shape: "create target",
            mechanism: "insert/create",
            route: at(Method::Post, Place::Collection),
            input: created,
            output: row.clone(),
            refusals: &[Code::AlreadyExists],
            needs_version: false,
            answers: &["retry ambiguity on write"],
            does: write(Verb::Create),
        },
        Action {
            name: "read",
            summary: format!("Read a {name}."),
            target: target.clone(),
            shape: "read source",
            mechanism: "strong read by key, or a cached one that sees the caller's own writes",
            route: at(Method::Get, Place::Item),
            input: vec![
                Property::optional(
                    "consistency",
                    Form::OneOf(&CONSISTENCIES),
                    "how fresh; strong if not given, cached may be some seconds old",
                ),
                Property::optional(
                    "after",
                    Form::Value(Type::Text),
                    "tokens of writes that a cached read must see, with commas between them",
                ),
            ],
            output: row.clone(),
            refusals: &[Code::NotFound, Code::Deleted],
            needs_version: false,
            answers: &["stale read after update", "cache invalidation lag"],
            does: Does::Read(Arc::new(Reader { entity: entity.clone(), list: false })),
        },
        Action {
            name: "list",
            summary: format!("List {name} rows by status, newest first."),
            target: target.clone(),
            shape: "read source",
            mechanism: "range read on the status and time index",
            route: at(Method::Get, Place::Collection),
            input: vec![
                Property::optional("status", Form::OneOf(&STATUSES), "which rows; ACTIVE if not given"),
                Property::optional("limit", Form::Range(1, LIST_MAX), "rows in a page; 50 if not given"),
                Property::optional("cursor", Form::Value(Type::Text), "where a page before this one ended"),
            ],
            output: Form::List(Box::new(row.clone())),
            refusals: &[],
            needs_version: false,
            answers: &[],
            does: Does::Read(Arc::new(Reader { entity: entity.clone(), list: true })),
        },
        Action {
            name: "update",
            summary: format!("Replace the fields of a {name}, under the version that was read."),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "guarded conditional update",
            route: at(Method::Put, Place::Item),
            input: whole,
            output: row.clone(),
            refusals: &[Code::NotFound, Code::Deleted, Code::VersionConflict],
            needs_version,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            does: write(Verb::Update),
        },
        Action {
            name: "patch",
            summary: format!(
                "Change some fields of a {name}; null clears an optional one (JSON Merge Patch)."
            ),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "guarded conditional update",
            route: at(Method::Patch, Place::Item),
            input: part,
            output: row.clone(),
            refusals: &[Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended],
            needs_version,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            does: write(Verb::Patch),
        },
        Action {
            name: "mutate",
            summary: format!(
                "Set, increment or append to fields of a {name} on the server, without reading it first."
            ),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "server-side change with bounded retry and back-off",
            route: at(Method::Post, Place::ItemAction),
            input: vec![
                Property::optional("set", Form::Object(sets), "new contents"),
                Property::optional("increment", Form::Object(numbers), "numbers to add"),
                Property::optional("append", Form::Object(lists), "items for lists"),
            ],
            output: Form::Any,
            refusals: &[
                Code::NotFound,
                Code::Deleted,
                Code::VersionConflict,
                Code::Contended,
                Code::OutOfRange,
            ],
            needs_version: false,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            does: write(Verb::Mutate),
        },
        Action {
            name: "delete",
            summary: format!("Delete a {name}. It is kept and can be restored."),
            target: target.clone(),
            shape: "state transition",
            mechanism: "guarded conditional update (soft delete)",
            route: at(Method::Delete, Place::Item),
            input: vec![],
            output: row.clone(),
            refusals: &[Code::NotFound, Code::Deleted, Code::VersionConflict],
            needs_version: false,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            does: write(Verb::Delete),
        },
        Action {
            name: "restore",
            summary: format!("Bring a deleted {name} back."),
            target,
            shape: "state transition",
            mechanism: "guarded conditional update",
            route: at(Method::Post, Place::ItemAction),
            input: vec![],
            output: row,
            refusals: &[Code::NotFound, Code::NotDeleted, Code::VersionConflict],
            needs_version: false,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            does: write(Verb::Restore),
        },
    ]
}

/// How fresh a read has to be.
const CONSISTENCIES: [&str; 2] = ["strong", CACHED];
const CACHED: &str = "cached";

/// The most rows of a page.
const LIST_MAX: i64 = 500;
/// The rows of a page, if the caller does not say.
const LIST_DEFAULT: i64 = 50;

fn row_form(entity: &Entity, key: &[Field]) -> Form {
    let described = |field: &Field, hot: bool| Property {
        name: field.name.clone(),
        form: Form::Value(field.kind),
        // Hot fields stand in another row, which only a read brings along.
        required: !hot,
        nullable: field.optional,
        about: String::new(),
    };
    let given = key.iter().chain(&entity.fields).map(|field| described(field, false));
    let mut properties: Vec<Property> =
        given.chain(entity.hot.iter().map(|field| described(field, true))).collect();
    properties.push(Property::required(STATUS, Form::OneOf(&STATUSES), ""));
    properties.push(Property::required(UPDATED_AT, Form::Value(Type::Time), ""));
    properties.push(Property::required(VERSION, Form::Value(Type::Int), "raised by every write"));
    Form::Object(properties)
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Create,
    Update,
    Patch,
    Mutate,
    Delete,
    Restore,
}

struct Writer {
    entity: Arc<Entity>,
    verb: Verb,
}

impl Entity {
    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    fn address(&self, table: &Arc<Table>, tenant: &Tenant, key: &[Value]) -> Result<Address, Refusal> {
        Ok(Address::new(table, tenant, key.iter().cloned())?)
    }

    /// The row and, if fields are split off, the hot row.
    async fn rows(&self, call: &Call, desk: &Desk<'_>) -> Result<(Option<Row>, Option<Row>), Refusal> {
        let mut addresses = vec![self.address(&self.table, &call.tenant, &call.key)?];
        if let Some(hot) = &self.hot_table {
            addresses.push(self.address(hot, &call.tenant, &call.key)?);
        }
        let mut rows = desk.store.get(&addresses, Consistency::Strong).await?.into_iter();
        Ok((rows.next().flatten(), rows.next().flatten()))
    }

    /// The row that a caller means to change (I1, I3), as it is.
    async fn current(&self, call: &Call, desk: &Desk<'_>, status: &str) -> Result<Row, Refusal> {
        let (row, _) = self.rows(call, desk).await?;
        let row =
            row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", self.what(call))))?;
        self.check_status(call, &row, status)?;
        match call.expected {
            Some(Expected::Version(expected)) if expected != row.version() => {
                Err(self.conflict(call, expected, &row))
            }
            _ => Ok(row),
        }
    }

    fn check_status(&self, call: &Call, row: &Row, status: &str) -> Result<(), Refusal> {
        if row.text(STATUS) == Some(status) {
            return Ok(());
        }
        let what = self.what(call);
        Err(match status {
            ACTIVE => Refusal::new(Code::Deleted, format!("{what} was deleted; restore it first")),
            _ => Refusal::new(Code::NotDeleted, format!("{what} is not deleted")),
        }
        .at_version(Some(row)))
    }

    fn conflict(&self, call: &Call, expected: i64, row: &Row) -> Refusal {
        let message = format!(
            "{} is at version {}, not {expected}: read it again, merge and retry",
            self.what(call),
            row.version()
        );
        Refusal::new(Code::VersionConflict, message).at_version(Some(row))
    }

    /// A guarded update of a row that was read, or the answer that nothing has to change (I4).
    fn change(&self, call: &Call, row: &Row, changes: Vec<(&str, Value)>) -> Draft {
        let changed: Vec<(&str, Value)> =
            changes.into_iter().filter(|(name, value)| row.get(name) != Some(value)).collect();
        if changed.is_empty() {
            return Draft::Done(Answer::row(row.to_json()));
        }
        let mut step = Step::update(&self.table, call.key.iter().cloned())
            .guard(Guard::version(row.version()))
            .guard(column(STATUS).eq(ACTIVE))
            .set(UPDATED_AT, now());
        for (name, value) in changed {
            step = step.set(name, value);
        }
        self.write(call, step, "updated")
    }

    fn write(&self, call: &Call, step: Step, what: &str) -> Draft {
        let event = EventDraft::named(format!("{}.{what}", self.name)).with_row_of(0);
        Draft::Write(Pieces { subject: key_text(&call.key), steps: vec![step], event })
    }

    /// The contents that an input gives for fields. It was checked against the form already.
    fn contents<'a>(
        fields: &'a [Field],
        input: &Map<String, Json>,
        whole: bool,
    ) -> Result<Vec<(&'a str, Value)>, Refusal> {
        let mut contents = Vec::new();
        for field in fields {
            let value = match input.get(&field.name) {
                Some(json) => Value::from_json(json.clone(), field.kind).map_err(|why| {
                    let pointer = format!("/{}", field.name);
                    Refusal::misfits(vec![Misfit { pointer, detail: why.to_string() }])
                })?,
                None if whole => field.default.clone().unwrap_or(Value::Null),
                None => continue,
            };
            contents.push((field.name.as_str(), value));
        }
        Ok(contents)
    }

    fn create(&self, call: &Call) -> Result<Draft, Refusal> {
        // The key of a create is part of its input.
        let key = self
            .table
            .key_columns()
            .iter()
            .map(|column| {
                Value::from_json(call.input.get(&column.name).cloned().unwrap_or_default(), column.kind)
            })
            .collect::<Result<Vec<Value>, _>>()
            .map_err(|why| Refusal::new(Code::InvalidInput, why.to_string()))?;
        let mut step =
            Step::insert(&self.table, key.iter().cloned()).set(STATUS, ACTIVE).set(UPDATED_AT, now());
        for (name, value) in Entity::contents(&self.fields, &call.input, true)? {
            step = step.set(name, value);
        }
        let event = EventDraft::named(format!("{}.created", self.name)).with_row_of(0);
        Ok(Draft::Write(Pieces { subject: key_text(&key), steps: vec![step], event }))
    }

    /// Hot fields are counted in their own row; all others under the version that is read here.
    async fn mutate(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let part = |name: &str| call.input.get(name).and_then(Json::as_object).cloned().unwrap_or_default();
        let (set, increment, append) = (part("set"), part("increment"), part("append"));
        let names: Vec<&String> = set.keys().chain(increment.keys()).chain(append.keys()).collect();
        if names.is_empty() {
            return Err(Refusal::new(Code::InvalidInput, "say what to set, increment or append"));
        }
        if let Some(twice) =
            names.iter().enumerate().find(|(n, name)| names.iter().take(*n).any(|o| o == *name))
        {
            return Err(Refusal::new(
                Code::InvalidInput,
                format!("{} is changed in two ways at once", twice.1),
            ));
        }
        let is_hot = |name: &&String| self.hot.iter().any(|field| field.name == **name);
        let hot = names.iter().filter(|name| is_hot(name)).count();
        if hot > 0 && hot < names.len() {
            let message = "hot fields stand in a row of their own; change them in a mutation of their own";
            return Err(Refusal::new(Code::InvalidInput, message));
        }
        if hot > 0 {
            return self.mutate_hot(call, desk, &set, &increment, &append).await;
        }
        let counts_only = set.is_empty() && append.is_empty() && call.expected.is_none();
        if counts_only {
            let amounts = Entity::contents(&self.fields, &increment, false)?;
            if amounts.iter().all(|(_, amount)| is_zero(amount)) {
                return Ok(Draft::Done(Answer::row(self.current(call, desk, ACTIVE).await?.to_json())));
            }
            return Ok(self.count(call, amounts));
        }
        let row = self.current(call, desk, ACTIVE).await?;
        let mut changes = Entity::contents(&self.fields, &set, false)?;
        changes.extend(computed(&self.fields, Some(&row), &increment, &append)?);
        Ok(self.change(call, &row, changes))
    }

    /// Adds to numbers where they stand: no version is needed, so no race can be lost.
    fn count(&self, call: &Call, amounts: Vec<(&str, Value)>) -> Draft {
        let mut step = Step::update(&self.table, call.key.iter().cloned())
            .guard(column(STATUS).eq(ACTIVE))
            .set(UPDATED_AT, now());
        for (name, amount) in amounts {
            let zero = if matches!(amount, Value::Float(_)) { Value::Float(0.0) } else { Value::Int(0) };
            let sum = Expr::Add(Operand::ColumnOr(name.to_owned(), zero), Operand::Value(amount));
            step = step.set(name, sum);
        }
        self.write(call, step, "updated")
    }

    async fn mutate_hot(
        &self,
        call: &Call,
        desk: &Desk<'_>,
        set: &Map<String, Json>,
        increment: &Map<String, Json>,
        append: &Map<String, Json>,
    ) -> Result<Draft, Refusal> {
        let Some(table) = &self.hot_table else {
            return Err(Refusal::new(Code::Internal, "hot fields without a table"));
        };
        // The row itself must be there and active; it is not written, so its version stays.
        let owner = Step::assert(&self.table, call.key.iter().cloned()).guard(column(STATUS).eq(ACTIVE));
        let mut step = Step::upsert(table, call.key.iter().cloned());
        let mut changes = Entity::contents(&self.hot, set, false)?;
        if !append.is_empty() {
            let (_, hot) = self.rows(call, desk).await?;
            changes.extend(computed(&self.hot, hot.as_ref(), &Map::new(), append)?);
            step = match &hot {
                Some(hot) => step.guard(Guard::version(hot.version())),
                None => Step::insert(table, call.key.iter().cloned()),
            };
        }
        for (name, value) in changes {
            step = step.set(name, value);
        }
        for (name, amount) in Entity::contents(&self.hot, increment, false)? {
            let field = self.hot.iter().find(|field| field.name == name);
            let base = field.and_then(|field| field.default.clone()).unwrap_or(match amount {
                Value::Float(_) => Value::Float(0.0),
                _ => Value::Int(0),
            });
            step =
                step.set(name, Expr::Add(Operand::ColumnOr(name.to_owned(), base), Operand::Value(amount)));
        }
        let event = EventDraft::named(format!("{}.counted", self.name)).with_row_of(1);
        Ok(Draft::Write(Pieces { subject: key_text(&call.key), steps: vec![owner, step], event }))
    }
}

fn is_zero(value: &Value) -> bool {
    matches!(value, Value::Int(0)) || value.as_float() == Some(0.0)
}

/// Sums and longer lists, computed from a row that was read.
fn computed<'a>(
    fields: &'a [Field],
    row: Option<&Row>,
    increment: &Map<String, Json>,
    append: &Map<String, Json>,
) -> Result<Vec<(&'a str, Value)>, Refusal> {
    let mut contents = Vec::new();
    for (name, amount) in Entity::contents(fields, increment, false)? {
        let out_of_range = || Refusal::new(Code::OutOfRange, format!("the new {name} is out of range"));
        let before = row.and_then(|row| row.get(name));
        let sum = match (before, amount) {
            (Some(Value::Int(a)), Value::Int(b)) => Value::Int(a.checked_add(b).ok_or_else(out_of_range)?),
            (Some(Value::Float(a)), Value::Float(b)) => {
                Value::Float(a + b).admitted(Type::Float).map_err(|_| out_of_range())?
            }
            (_, amount) => amount,
        };
        contents.push((name, sum));
    }
    for field in fields {
        let Some(item) = append.get(&field.name) else { continue };
        let mut items = match row.and_then(|row| row.json(&field.name)) {
            None => Vec::new(),
            Some(Json::Array(items)) => items.clone(),
            Some(_) => {
                let message = format!("{} is not a list, so nothing can be appended to it", field.name);
                return Err(Refusal::new(Code::InvalidInput, message));
            }
        };
        items.push(item.clone());
        let list = Value::Json(Json::Array(items)).admitted(Type::Json);
        contents.push((
            field.name.as_str(),
            list.map_err(|why| Refusal::new(Code::InvalidInput, format!("{}: {why}", field.name)))?,
        ));
    }
    Ok(contents)
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let entity = &self.entity;
        match self.verb {
            Verb::Create => entity.create(call),
            Verb::Mutate => entity.mutate(call, desk).await,
            Verb::Update | Verb::Patch => {
                let row = entity.current(call, desk, ACTIVE).await?;
                let changes = Entity::contents(&entity.fields, &call.input, self.verb == Verb::Update)?;
                Ok(entity.change(call, &row, changes))
            }
            Verb::Delete | Verb::Restore => {
                let (from, to, what) = match self.verb {
                    Verb::Delete => (ACTIVE, DELETED, "deleted"),
                    _ => (DELETED, ACTIVE, "restored"),
                };
                let mut step = Step::update(&entity.table, call.key.iter().cloned());
                if let Some(Expected::Version(version)) = call.expected {
                    step = step.guard(Guard::version(version));
                }
                let step = step.guard(column(STATUS).eq(from)).set(STATUS, to).set(UPDATED_AT, now());
                Ok(entity.write(call, step, what))
            }
        }
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let entity = &self.entity;
        let (Reason::Guard { .. }, Some(row)) = (&refused.reason, &refused.current) else {
            let what = match self.verb {
                Verb::Create => format!("this {}", entity.name),
                _ => entity.what(call),
            };
            return common_verdict(&what, refused);
        };
        if row.table().name() == entity.table.name() {
            let wanted = if self.verb == Verb::Restore { DELETED } else { ACTIVE };
            if let Err(refusal) = entity.check_status(call, row, wanted) {
                return Verdict::Refuse(refusal);
            }
            if let Some(Expected::Version(expected)) = call.expected {
                return Verdict::Refuse(entity.conflict(call, expected, row));
            }
        }
        // The caller did not insist on a version, so the one that was read here is no concern of theirs.
        Verdict::TryAgain
    }

    fn answer(&self, _: &Call, event: &Event) -> Answer {
        let row = event.data.get("row").cloned().unwrap_or_default();
        let created = (self.verb == Verb::Create).then(|| {
            let table = &self.entity.table;
            let parts = table.key_columns().iter().map(|column| {
                Value::from_json(row.get(&column.name).cloned().unwrap_or_default(), column.kind)
                    .unwrap_or(Value::Null)
            });
            key_text(&parts.collect::<Vec<_>>())
        });
        Answer { created, ..Answer::row(row) }
    }
}

struct Reader {
    entity: Arc<Entity>,
    list: bool,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        if self.list { self.list(call, desk).await } else { self.one(call, desk).await }
    }
}

impl Reader {
    async fn one(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let text = |name: &str| call.input.get(name).and_then(Json::as_str);
        let after = match text("after").map(Token::parse_list) {
            None => Vec::new(),
            Some(Some(tokens)) => tokens,
            Some(None) => {
                let detail = "expected what writes returned as their token".to_owned();
                return Err(Refusal::misfits(vec![Misfit { pointer: "/after".into(), detail }]));
            }
        };
        if text("consistency") != Some(CACHED) {
            return self.strong(call, desk).await.map(|(answer, _)| answer);
        }
        match desk.cache.look(&call.tenant, &self.entity.name, &key_text(&call.key), &after) {
            Lookup::Hit(answer) => Ok(Answer::clone(&answer)),
            Lookup::Bypass => self.strong(call, desk).await.map(|(answer, _)| answer),
            Lookup::Miss(ticket) => {
                let (answer, bytes) = self.strong(call, desk).await?;
                desk.cache.keep(ticket, &answer, bytes);
                Ok(answer)
            }
        }
    }

    /// The row as it is, and what it weighs.
    async fn strong(&self, call: &Call, desk: &Desk<'_>) -> Result<(Answer, usize), Refusal> {
        let entity = &self.entity;
        let (row, hot) = entity.rows(call, desk).await?;
        let row =
            row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", entity.what(call))))?;
        entity.check_status(call, &row, ACTIVE)?;
        let mut body = row.to_json();
        if let Some(body) = body.as_object_mut() {
            for field in &entity.hot {
                let stored = hot.as_ref().and_then(|hot| hot.get(&field.name));
                let value = stored.or(field.default.as_ref()).map_or(Json::Null, Value::to_json);
                body.insert(field.name.clone(), value);
            }
        }
        let bytes = row_weight(&row) + hot.as_ref().map_or(0, row_weight);
        Ok((Answer::row(body), bytes))
    }

    async fn list(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let text = |name: &str| call.input.get(name).and_then(Json::as_str);
        let status = text("status").unwrap_or(ACTIVE);
        let limit = call.input.get("limit").and_then(Json::as_i64).unwrap_or(LIST_DEFAULT);
        let mut query = Query::index(&self.entity.table, BY_STATUS, &call.tenant, [status.into()])?
            .backward()
            .limit(usize::try_from(limit).unwrap_or(1))?;
        if let Some(cursor) = text("cursor") {
            query = query.after(Cursor::parse(cursor)?)?;
        }
        let page = desk.store.query(&query).await?;
        let rows: Vec<Json> = page.rows.iter().map(Row::to_json).collect();
        let next = page.next.map(|cursor| cursor.to_string());
        Ok(Answer { body: json!(rows), version: None, created: None, next, token: None })
    }
}
