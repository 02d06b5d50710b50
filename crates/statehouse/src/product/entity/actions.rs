//! The actions of an entity, as every surface is made from them.

use std::sync::Arc;

use statehouse_store::Type;

use super::read::EntityRead;
use super::write::{EntityVerb, EntityWrite, mutated};
use super::{ACTIVE, BY_STATUS, CONSISTENCIES, EntitySpec, STATUS, STATUSES};
use crate::action::{Code, Method, RouteKind};
use crate::blueprint::settings::Field;
use crate::declare::{ActionSpec, IndexList};
use crate::erase;
use crate::form::{Form, Property};

const FAILURES: [&str; 2] = ["concurrent overwrite race", "retry ambiguity on write"];

pub(super) fn actions(entity: &Arc<EntitySpec>, key: &[Field], needs_version: bool) -> [ActionSpec; 9] {
    let row = row_form(entity);
    let new = entity.fields.iter().map(Field::property);
    // An immutable field may be left out of a replacement: it keeps what it is.
    let whole =
        entity.fields.iter().map(|field| if field.immutable { optional(field) } else { field.property() });
    let part = entity.fields.iter().map(optional);
    let created = key.iter().map(Field::property).chain(new);
    let status = Property::optional(STATUS, Form::one_of(&STATUSES), "which rows; ACTIVE if not given");
    // A caller that meets a lock waits for it, up to a bound.
    let waits = |action: ActionSpec| match entity.lock_table {
        Some(_) => action.code(Code::Contended),
        None => action,
    };
    let changes = |action: ActionSpec, verb: EntityVerb| {
        action
            .gives(row.clone())
            .answers(&FAILURES)
            .after(["create"])
            .writes(EntityWrite { entity: entity.clone(), verb })
    };
    let edit = |action: ActionSpec, verb: EntityVerb| {
        let codes = [Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended];
        changes(action, verb).codes(&codes).needs_version(needs_version)
    };
    [
        changes(ActionSpec::create("create", "Create a {name}.").takes(created), EntityVerb::Create)
            .answers(&["retry ambiguity on write"])
            .after([]),
        ActionSpec::read("read", "Read a {name}.")
            .mechanism("strong read by key, or a cached one that sees the caller's own writes")
            .takes(read_inputs())
            .gives(row.clone())
            .code(Code::Deleted)
            .answers(&["stale read after update", "cache invalidation lag"])
            .after(["create"])
            .reads(EntityRead { entity: entity.clone() }),
        ActionSpec::list("list", "List {name} rows by status, newest first.")
            .mechanism("range read on the status and time index")
            .gives_rows(row.clone())
            .after(["create"])
            .reads_index(IndexList::newest_first(&entity.def).by_or(BY_STATUS, status, ACTIVE)),
        edit(
            ActionSpec::put("update", "Replace the fields of a {name}, under the version that was read.")
                .mechanism("guarded conditional update")
                .takes(whole),
            EntityVerb::Update,
        ),
        edit(
            ActionSpec::patch(
                "patch",
                "Change some fields of a {name}; null clears an optional one (JSON Merge Patch).",
            )
            .takes(part),
            EntityVerb::Patch,
        ),
        mutate(entity),
        waits(
            changes(
                ActionSpec::delete("delete", "Delete a {name}. It is kept and can be restored.")
                    .mechanism("guarded conditional update (soft delete)"),
                EntityVerb::Delete,
            )
            .codes(&[Code::NotFound, Code::Deleted, Code::VersionConflict]),
        ),
        waits(
            changes(ActionSpec::transition("restore", "Bring a deleted {name} back."), EntityVerb::Restore)
                .codes(&[Code::NotFound, Code::NotDeleted, Code::VersionConflict])
                .after(["create", "delete"]),
        ),
        waits(
            changes(
                ActionSpec::transition(
                    "erase",
                    "Erase a {name} for good, with what the log has of it. It cannot be restored.",
                )
                .mechanism("guarded delete; a worker blanks the row's events in the log"),
                EntityVerb::Erase,
            )
            .gives(erase::answer_form(key.iter().map(|field| (field.name.as_str(), field.kind))))
            .codes(&[Code::NotFound, Code::VersionConflict, Code::Contended])
            .restricted()
            .answer_with(|_, _, event| erase::answer(event)),
        ),
    ]
}

fn optional(field: &Field) -> Property {
    Property { required: false, ..field.property() }
}

/// A number that is added to a field, which is not bound by what the field itself may be.
fn amount(field: &Field) -> Property {
    Property { form: Form::Value(field.kind), ..optional(field) }
}

fn read_inputs() -> [Property; 2] {
    let consistency = "how fresh; strong if not given, cached may be some seconds old";
    let after = "tokens of writes that a cached read must see, with commas between them";
    [
        Property::optional("consistency", Form::one_of(&CONSISTENCIES), consistency),
        Property::optional("after", Form::Value(Type::Text), after),
    ]
}

fn mutate(entity: &Arc<EntitySpec>) -> ActionSpec {
    let every: Vec<&Field> = entity.fields.iter().chain(&entity.hot).collect();
    let changeable = || every.iter().filter(|field| !field.immutable);
    let numbers = changeable().filter(|field| matches!(field.kind, Type::Int | Type::Float));
    let lists = changeable().filter(|field| field.kind == Type::Json);
    let lists = lists.map(|field| Property::optional(&field.name, Form::Any, "added at the end of the list"));
    let object = |properties: Vec<Property>| Form::Object(properties);
    let mechanism = match entity.lock_table {
        Some(_) => "server-side change under a lock on the row, waited for with back-off",
        None => "server-side change with bounded retry and back-off",
    };
    ActionSpec::transition(
        "mutate",
        "Set, increment or append to fields of a {name} on the server, without reading it first.",
    )
    .on(Method::Post, RouteKind::ItemAction)
    .shape("overwrite")
    .mechanism(mechanism)
    .takes([
        Property::optional(
            "set",
            object(every.iter().map(|field| optional(field)).collect()),
            "new contents",
        ),
        Property::optional(
            "increment",
            object(numbers.map(|field| amount(field)).collect()),
            "numbers to add",
        ),
        Property::optional("append", object(lists.collect()), "items for lists"),
    ])
    .gives(Form::Any)
    .codes(&[Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended, Code::OutOfRange])
    .answers(&FAILURES)
    .after(["create"])
    .answer_with(|_, _, event| mutated(event))
    .writes(EntityWrite { entity: entity.clone(), verb: EntityVerb::Mutate })
}

/// Hot fields are in another row, which only a read brings along.
fn row_form(entity: &EntitySpec) -> Form {
    match entity.def.row_form() {
        Form::Object(mut properties) => {
            properties.extend(entity.hot.iter().map(optional));
            Form::Object(properties)
        }
        other => other,
    }
}
