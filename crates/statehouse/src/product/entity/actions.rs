//! The actions of an entity, as every surface is made from them.

use std::sync::Arc;

use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::read::Reader;
use super::write::{Verb, Writer};
use super::{CONSISTENCIES, Entity, STATUS, STATUSES, UPDATED_AT};
use crate::action::{Action, Code, Does, Method, Place, Route};
use crate::blueprint::settings::Field;
use crate::form::{Form, Property};
use crate::paging;
use crate::resource::state_name;

pub(super) fn actions(entity: &Arc<Entity>, key: &[Field], needs_version: bool) -> Vec<Action> {
    let name = &entity.name;
    let target = state_name(name);
    let row = row_form(entity, key);
    let property = |field: &Field, required: bool| Property { required, ..field.property() };
    let whole: Vec<Property> = entity.fields.iter().map(Field::property).collect();
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
    let mutate_mechanism = if entity.lock_table.is_some() {
        "server-side change under a lock on the row, waited for with back-off"
    } else {
        "server-side change with bounded retry and back-off"
    };
    // Whoever meets a lock may wait in vain.
    let locked = |may: &'static [Code], may_wait: &'static [Code]| {
        if entity.lock_table.is_some() { may_wait.to_vec() } else { may.to_vec() }
    };
    let write = |verb: Verb| Does::Write(Arc::new(Writer { entity: entity.clone(), verb }));
    let at = |method, place| Route { method, place };
    let named = |action: &str| format!("{name}.{action}");
    vec![
        Action {
            name: "create".into(),
            summary: format!("Create a {name}."),
            target: target.clone(),
            shape: "create target",
            mechanism: "insert/create".into(),
            route: at(Method::Post, Place::Collection),
            input: created,
            output: row.clone(),
            refusals: vec![Code::AlreadyExists],
            needs_version: false,
            answers: &["retry ambiguity on write"],
            after: vec![],
            does: write(Verb::Create),
        },
        Action {
            name: "read".into(),
            summary: format!("Read a {name}."),
            target: target.clone(),
            shape: "read source",
            mechanism: "strong read by key, or a cached one that sees the caller's own writes".into(),
            route: at(Method::Get, Place::Item),
            input: vec![
                Property::optional(
                    "consistency",
                    Form::one_of(&CONSISTENCIES),
                    "how fresh; strong if not given, cached may be some seconds old",
                ),
                Property::optional(
                    "after",
                    Form::Value(Type::Text),
                    "tokens of writes that a cached read must see, with commas between them",
                ),
            ],
            output: row.clone(),
            refusals: vec![Code::NotFound, Code::Deleted],
            needs_version: false,
            answers: &["stale read after update", "cache invalidation lag"],
            after: vec![named("create")],
            does: Does::Read(Arc::new(Reader { entity: entity.clone(), list: false })),
        },
        Action {
            name: "list".into(),
            summary: format!("List {name} rows by status, newest first."),
            target: target.clone(),
            shape: "read source",
            mechanism: "range read on the status and time index".into(),
            route: at(Method::Get, Place::Collection),
            input: [Property::optional("status", Form::one_of(&STATUSES), "which rows; ACTIVE if not given")]
                .into_iter()
                .chain(paging::properties())
                .collect(),
            output: Form::List(Box::new(row.clone())),
            refusals: vec![],
            needs_version: false,
            answers: &[],
            after: vec![named("create")],
            does: Does::Read(Arc::new(Reader { entity: entity.clone(), list: true })),
        },
        Action {
            name: "update".into(),
            summary: format!("Replace the fields of a {name}, under the version that was read."),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "guarded conditional update".into(),
            route: at(Method::Put, Place::Item),
            input: whole,
            output: row.clone(),
            refusals: vec![Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended],
            needs_version,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            after: vec![named("create")],
            does: write(Verb::Update),
        },
        Action {
            name: "patch".into(),
            summary: format!(
                "Change some fields of a {name}; null clears an optional one (JSON Merge Patch)."
            ),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "guarded conditional update".into(),
            route: at(Method::Patch, Place::Item),
            input: part,
            output: row.clone(),
            refusals: vec![Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended],
            needs_version,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            after: vec![named("create")],
            does: write(Verb::Patch),
        },
        Action {
            name: "mutate".into(),
            summary: format!(
                "Set, increment or append to fields of a {name} on the server, without reading it first."
            ),
            target: target.clone(),
            shape: "overwrite",
            mechanism: mutate_mechanism.into(),
            route: at(Method::Post, Place::ItemAction),
            input: vec![
                Property::optional("set", Form::Object(sets), "new contents"),
                Property::optional("increment", Form::Object(numbers), "numbers to add"),
                Property::optional("append", Form::Object(lists), "items for lists"),
            ],
            output: Form::Any,
            refusals: vec![
                Code::NotFound,
                Code::Deleted,
                Code::VersionConflict,
                Code::Contended,
                Code::OutOfRange,
            ],
            needs_version: false,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            after: vec![named("create")],
            does: write(Verb::Mutate),
        },
        Action {
            name: "delete".into(),
            summary: format!("Delete a {name}. It is kept and can be restored."),
            target: target.clone(),
            shape: "state transition",
            mechanism: "guarded conditional update (soft delete)".into(),
            route: at(Method::Delete, Place::Item),
            input: vec![],
            output: row.clone(),
            refusals: locked(
                &[Code::NotFound, Code::Deleted, Code::VersionConflict],
                &[Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended],
            ),
            needs_version: false,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            after: vec![named("create")],
            does: write(Verb::Delete),
        },
        Action {
            name: "restore".into(),
            summary: format!("Bring a deleted {name} back."),
            target,
            shape: "state transition",
            mechanism: "guarded conditional update".into(),
            route: at(Method::Post, Place::ItemAction),
            input: vec![],
            output: row,
            refusals: locked(
                &[Code::NotFound, Code::NotDeleted, Code::VersionConflict],
                &[Code::NotFound, Code::NotDeleted, Code::VersionConflict, Code::Contended],
            ),
            needs_version: false,
            answers: &["concurrent overwrite race", "retry ambiguity on write"],
            after: vec![named("create"), named("delete")],
            does: write(Verb::Restore),
        },
    ]
}

fn row_form(entity: &Entity, key: &[Field]) -> Form {
    // Hot fields stand in another row, which only a read brings along.
    let described = |field: &Field, hot: bool| Property { required: !hot, ..field.property() };
    let given = key.iter().chain(&entity.fields).map(|field| described(field, false));
    let mut properties: Vec<Property> =
        given.chain(entity.hot.iter().map(|field| described(field, true))).collect();
    properties.push(Property::required(STATUS, Form::one_of(&STATUSES), ""));
    properties.push(Property::required(UPDATED_AT, Form::Value(Type::Time), ""));
    properties.push(Property::required(VERSION, Form::Value(Type::Int), "raised by every write"));
    Form::Object(properties)
}
