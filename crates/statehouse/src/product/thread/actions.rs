//! What can be done with children and their threads.

use std::sync::Arc;

use statehouse_store::Type;

use super::read::{ThreadQuery, ThreadRead};
use super::write::{ThreadVerb, ThreadWrite};
use super::{ALSO_HIDDEN, COUNT, NEWEST, ORDER, ORDERS, REASON, ThreadSpec};
use crate::action::{Code, Method, RouteKind};
use crate::blueprint::settings::Field;
use crate::declare::ActionSpec;
use crate::erase;
use crate::form::{Form, Property};
use crate::resource::state_name;

pub(super) fn child_actions(thread: &Arc<ThreadSpec>, needs_version: bool) -> [ActionSpec; 8] {
    let read = |what: ThreadQuery| ThreadRead { thread: thread.clone(), what };
    let write = |verb: ThreadVerb| ThreadWrite { thread: thread.clone(), verb };
    let parent = || thread.parent.iter().map(Field::property);
    let about = "an id that you choose, so that asking again makes no second one";
    let id = Property::required(&thread.id.name, Form::Value(Type::Text), about);
    let key = thread.parent.iter().chain([&thread.id]).map(|field| (field.name.as_str(), field.kind));
    let part = thread.fields.iter().map(|field| Property { required: false, ..field.property() });
    let reason = || [Property::optional(REASON, Form::Value(Type::Text), "why; it stands in the event")];
    let moderate = |name: &'static str, summary: &'static str, mechanism: &'static str, verb: ThreadVerb| {
        ActionSpec::transition(name, summary)
            .mechanism(mechanism)
            .takes(reason())
            .codes(&[Code::NotFound, Code::Deleted, Code::VersionConflict, Code::Contended])
            .after(["append"])
            .writes(write(verb))
    };
    [
        ActionSpec::create("append", "Append a {name}.")
            .mechanism("insert/create, into the parent's list and count in one plan")
            .takes(parent().chain([id]).chain(thread.fields.iter().map(Field::property)))
            .codes(&[Code::AlreadyExists, Code::Deleted, Code::WrongState, Code::Contended])
            .answers(&["duplicate child creation on retry", "projection/search lag after append"])
            .writes(write(ThreadVerb::Append)),
        ActionSpec::read("read", "Read a {name}.")
            .takes([Property::optional(
                ALSO_HIDDEN,
                Form::Value(Type::Bool),
                "whether to show it also if it is hidden: for moderators",
            )])
            .code(Code::Deleted)
            .answers(&["moderation/removal lag"])
            .after(["append"])
            .reads(read(ThreadQuery::Child)),
        ActionSpec::list("list", "List the {name} rows of a parent that are visible.")
            .mechanism("strong range reads of all buckets at once, merged, and a read of the children by key")
            .takes(parent())
            .takes([Property::optional(ORDER, Form::one_of(&ORDERS), "which first; newest if not given")])
            .answers(&["projection/search lag after append", "moderation/removal lag"])
            .after(["append"])
            .reads(read(ThreadQuery::List)),
        ActionSpec::patch(
            "edit",
            "Change some fields of a {name} that is visible; null clears an optional one.",
        )
        .takes(part)
        .codes(&[Code::NotFound, Code::Deleted, Code::WrongState, Code::VersionConflict, Code::Contended])
        .needs_version(needs_version)
        .answers(&["delete/edit race", "concurrent edit/delete race"])
        .after(["append"])
        .writes(write(ThreadVerb::Edit)),
        ActionSpec::delete("remove", "Remove a {name}, with what it said. Its id stays taken.")
            .mechanism("guarded conditional update to a tombstone, out of list and count in one plan")
            .codes(&[Code::NotFound, Code::VersionConflict, Code::Contended])
            .answers(&["delete/edit race", "concurrent edit/delete race", "moderation/removal lag"])
            .after(["append"])
            .writes(write(ThreadVerb::Remove)),
        moderate(
            "hide",
            "Hide a {name}, whatever its author does meanwhile: for moderators.",
            "guarded conditional update, out of list and count in one plan",
            ThreadVerb::Hide,
        )
        .answers(&["moderation/removal lag"]),
        moderate(
            "restore",
            "Show a {name} again that was hidden, at its old place: for moderators.",
            "guarded conditional update, back into list and count in one plan",
            ThreadVerb::Restore,
        )
        .after(["append", "hide"]),
        ActionSpec::transition(
            "erase",
            "Erase a {name} for good, with what the log has of it. Its id can be used again.",
        )
        .mechanism("guarded delete, out of list and count in one plan; a worker blanks the child's events in the log")
        .gives(erase::answer_form(key))
        .codes(&[Code::NotFound, Code::VersionConflict, Code::Contended])
        .restricted()
        .after(["append"])
        .answer_with(|_, _, event| erase::answer(event))
        .writes(write(ThreadVerb::Erase)),
    ]
}

pub(super) fn thread_read(thread: &Arc<ThreadSpec>) -> ActionSpec {
    let parent = thread.parent.iter();
    let parent = parent.map(|field| Property::required(&field.name, Form::Value(field.kind), ""));
    let newest = "the one that came last, of those that are visible";
    let summary = parent.chain([
        Property::required(COUNT, Form::Value(Type::Int), "how many are visible"),
        Property::required(NEWEST, thread.def.row_form(), newest).or_null(),
    ]);
    let name = &thread.name;
    ActionSpec::read("read", format!("Count the {name} rows of a parent, and show the newest."))
        .on(Method::Get, RouteKind::Item)
        .target(format!("{}View", state_name(&thread.threads).trim_end_matches("State")))
        .mechanism("strong read of the shards of the count, added up, and of the newest of each bucket")
        .gives(Form::Object(summary.collect()))
        .codes(&[])
        .answers(&["projection/search lag after append", "moderation/removal lag"])
        .after([format!("{name}.append").as_str()])
        .reads(ThreadRead { thread: thread.clone(), what: ThreadQuery::Summary })
}
