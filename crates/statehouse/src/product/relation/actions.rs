//! What can be done with edges and their lists.

use std::sync::Arc;

use statehouse_store::Type;

use statehouse_store::Event;

use super::read::{RelationQuery, RelationRead};
use super::write::{RelationVerb, RelationWrite};
use super::{COUNT, HAS, RelationEnd, RelationSpec};
use crate::action::{Answer, Call, Code, take_row};
use crate::blueprint::settings::Field;
use crate::declare::ActionSpec;
use crate::form::{Form, Property};
use crate::resource::state_name;

const CODES: [Code; 3] = [Code::NotFound, Code::VersionConflict, Code::Contended];
const FAILURES: [&str; 3] = ["duplicate edge creation on retry", "add/remove race", "count projection lag"];

pub(super) fn edge_actions(relation: &Arc<RelationSpec>) -> [ActionSpec; 3] {
    let row = row_form(relation);
    let write = |verb: RelationVerb| RelationWrite { relation: relation.clone(), verb };
    let shown = || {
        let relation = relation.clone();
        move |_: &Call, _: &str, event: &mut Event| Answer::row(relation.shown(take_row(event)))
    };
    [
        ActionSpec::put("add", "Make a {name}, or give it other fields. One that is there stays.")
            .shape("create target")
            .mechanism("guarded upsert of the edge, with both lists and counts in one plan")
            .takes(relation.fields.iter().map(Field::property))
            .gives(row.clone())
            .codes(&CODES)
            .answers(&FAILURES)
            .answer_with(shown())
            .writes(write(RelationVerb::Add)),
        ActionSpec::delete("remove", "End a {name}. One that is not there stays so.")
            .mechanism(
                "guarded conditional update of the edge to a tombstone, out of both lists and counts in one plan",
            )
            .gives(row.clone())
            .codes(&CODES)
            .answers(&FAILURES)
            .after(["add"])
            .answer_with(shown())
            .writes(write(RelationVerb::Remove)),
        ActionSpec::read("has", "Say whether there is a {name}.")
            .gives(row)
            .codes(&[])
            .after(["add"])
            .reads(RelationRead { relation: relation.clone(), what: RelationQuery::Has }),
    ]
}

pub(super) fn end_actions(relation: &Arc<RelationSpec>, end: RelationEnd) -> [ActionSpec; 2] {
    let name = &relation.name;
    let owner = relation.owner(end).iter();
    let owner = owner.map(|field| Property::required(&field.name, Form::Value(field.kind), ""));
    let where_to = if end == RelationEnd::Out { "from here" } else { "to here" };
    let read = |what: RelationQuery| RelationRead { relation: relation.clone(), what };
    let about = "as exact as the edges: it changes with them";
    let counted = Property::required(COUNT, Form::Value(Type::Int), about);
    let added = format!("{name}.add");
    [
        ActionSpec::list("list", format!("List the {name} rows that lead {where_to}, the newest first."))
            .target(state_name(name))
            .mechanism("strong range reads of all buckets at once, merged, and a read of the edges by key")
            .takes(owner.clone())
            .gives_rows(row_form(relation))
            .answers(&["stale relation list cache"])
            .after([added.as_str()])
            .reads(read(RelationQuery::List(end))),
        ActionSpec::read("count", format!("Count the {name} rows that lead {where_to}."))
            .target(format!("{}CountView", state_name(name).trim_end_matches("State")))
            .mechanism("strong read of the shards of the count, added up")
            .gives(Form::Object(owner.chain([counted]).collect()))
            .codes(&[])
            .answers(&["count projection lag"])
            .after([added.as_str()])
            .reads(read(RelationQuery::Count(end))),
    ]
}

/// An edge that was never there is answered too, without a row: not all of its columns are set then.
fn row_form(relation: &RelationSpec) -> Form {
    let has = Property::required(HAS, Form::Value(Type::Bool), "whether it is there");
    match relation.def.row_form() {
        Form::Object(mut properties) => {
            let updated = properties.iter_mut().filter(|property| property.name == super::UPDATED_AT);
            updated.for_each(|property| property.nullable = true);
            properties.push(has);
            Form::Object(properties)
        }
        other => other,
    }
}
