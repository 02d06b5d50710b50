//! What can be done with children and their threads.

use std::sync::Arc;

use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::read::{Reader, Reading};
use super::write::{Verb, Writer};
use super::{
    ALSO_HIDDEN, COUNT, NEWEST, ORDER, ORDERS, POSTED_AT, REASON, STATUS, STATUSES, Thread, UPDATED_AT,
};
use crate::action::{Action, Code, Does, Method, Place, Route};
use crate::blueprint::settings::Field;
use crate::form::{Form, Property};
use crate::paging;
use crate::resource::state_name;

pub(super) fn child_actions(thread: &Arc<Thread>, needs_version: bool) -> Vec<Action> {
    let (name, row) = (&thread.name, row_form(thread));
    let at = |method, place| Route { method, place };
    let write = |verb: Verb| Does::Write(Arc::new(Writer { thread: thread.clone(), verb }));
    let read = |what: Reading| Does::Read(Arc::new(Reader { thread: thread.clone(), what }));
    let parent = || thread.parent.iter().map(Field::property);
    let part = thread.fields.iter().map(|field| Property { required: false, ..field.property() });
    let reason = || Property::optional(REASON, Form::Value(Type::Text), "why; it stands in the event");
    let appended = || vec![format!("{name}.append")];
    let action = |name: &'static str, summary: String, mechanism: &'static str, verb: Verb| Action {
        name: name.into(),
        summary,
        target: state_name(&thread.name),
        shape: "state transition",
        mechanism: mechanism.into(),
        route: at(Method::Post, Place::ItemAction),
        input: vec![],
        output: row.clone(),
        refusals: vec![Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended],
        needs_version: false,
        answers: &[],
        after: appended(),
        does: write(verb),
    };
    vec![
        Action {
            shape: "create target",
            route: at(Method::Post, Place::Collection),
            input: parent()
                .chain([Property::required(
                    &thread.id.name,
                    Form::Value(Type::Text),
                    "an id that you choose, so that asking again makes no second one",
                )])
                .chain(thread.fields.iter().map(Field::property))
                .collect(),
            refusals: vec![Code::AlreadyExists, Code::Deleted, Code::WrongState, Code::Contended],
            answers: &["duplicate child creation on retry", "projection/search lag after append"],
            after: vec![],
            ..action(
                "append",
                format!("Append a {name}."),
                "insert/create, into the parent's list and count in one plan",
                Verb::Append,
            )
        },
        Action {
            shape: "read source",
            route: at(Method::Get, Place::Item),
            input: vec![Property::optional(
                ALSO_HIDDEN,
                Form::Value(Type::Bool),
                "whether to show it also if it is hidden: for moderators",
            )],
            refusals: vec![Code::NotFound, Code::Deleted],
            answers: &["moderation/removal lag"],
            does: read(Reading::Child),
            ..action("read", format!("Read a {name}."), "strong read by key", Verb::Append)
        },
        Action {
            shape: "read source",
            route: at(Method::Get, Place::Collection),
            input: parent()
                .chain([Property::optional(ORDER, Form::one_of(&ORDERS), "which first; newest if not given")])
                .chain(paging::properties())
                .collect(),
            output: Form::List(Box::new(row.clone())),
            refusals: vec![],
            answers: &["projection/search lag after append", "moderation/removal lag"],
            does: read(Reading::List),
            ..action(
                "list",
                format!("List the {name} rows of a parent that are visible."),
                "strong range reads of all buckets at once, merged, and a read of the children by key",
                Verb::Append,
            )
        },
        Action {
            shape: "overwrite",
            route: at(Method::Patch, Place::Item),
            input: part.collect(),
            refusals: vec![
                Code::NotFound,
                Code::Deleted,
                Code::WrongState,
                Code::VersionConflict,
                Code::Contended,
            ],
            needs_version,
            answers: &["delete/edit race", "concurrent edit/delete race"],
            ..action(
                "edit",
                format!("Change some fields of a {name} that is visible; null clears an optional one."),
                "guarded conditional update",
                Verb::Edit,
            )
        },
        Action {
            route: at(Method::Delete, Place::Item),
            refusals: vec![Code::NotFound, Code::VersionConflict, Code::Contended],
            answers: &["delete/edit race", "concurrent edit/delete race", "moderation/removal lag"],
            ..action(
                "remove",
                format!("Remove a {name}, with what it said. Its id stays taken."),
                "guarded conditional update to a tombstone, out of list and count in one plan",
                Verb::Remove,
            )
        },
        Action {
            input: vec![reason()],
            answers: &["moderation/removal lag"],
            ..action(
                "hide",
                format!("Hide a {name}, whatever its author does meanwhile: for moderators."),
                "guarded conditional update, out of list and count in one plan",
                Verb::Hide,
            )
        },
        Action {
            input: vec![reason()],
            after: vec![format!("{name}.append"), format!("{name}.hide")],
            ..action(
                "restore",
                format!("Show a {name} again that was hidden, at its old place: for moderators."),
                "guarded conditional update, back into list and count in one plan",
                Verb::Restore,
            )
        },
    ]
}

pub(super) fn thread_actions(thread: &Arc<Thread>) -> Vec<Action> {
    let parent = thread.parent.iter();
    let mut summary: Vec<Property> =
        parent.map(|field| Property::required(&field.name, Form::Value(field.kind), "")).collect();
    summary.extend([
        Property::required(COUNT, Form::Value(Type::Int), "how many are visible"),
        Property::required(NEWEST, row_form(thread), "the one that came last, of those that are visible")
            .or_null(),
    ]);
    vec![Action {
        name: "read".into(),
        summary: format!("Count the {} rows of a parent, and show the newest.", thread.name),
        target: format!("{}View", state_name(&thread.threads).trim_end_matches("State")),
        shape: "read source",
        mechanism: "strong read of the shards of the count, added up, and of the newest of each bucket"
            .into(),
        route: Route { method: Method::Get, place: Place::Item },
        input: vec![],
        output: Form::Object(summary),
        refusals: vec![],
        needs_version: false,
        answers: &["projection/search lag after append", "moderation/removal lag"],
        after: vec![format!("{}.append", thread.name)],
        does: Does::Read(Arc::new(Reader { thread: thread.clone(), what: Reading::Summary })),
    }]
}

fn row_form(thread: &Thread) -> Form {
    let key = thread.parent.iter().chain([&thread.id]);
    let mut form: Vec<Property> =
        key.map(|field| Property::required(&field.name, Form::Value(field.kind), "")).collect();
    form.extend(thread.fields.iter().map(|field| Property {
        required: true,
        nullable: true,
        ..field.property()
    }));
    form.extend([
        Property::required(STATUS, Form::one_of(&STATUSES), ""),
        Property::required(POSTED_AT, Form::Value(Type::Time), "what it is listed by"),
        Property::required(UPDATED_AT, Form::Value(Type::Time), "when it was last changed"),
        Property::required(VERSION, Form::Value(Type::Int), "raised by every change"),
    ]);
    Form::Object(form)
}
