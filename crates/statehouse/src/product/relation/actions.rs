//! What can be done with edges and their lists.

use std::sync::Arc;

use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::read::{Reader, Reading};
use super::write::{Verb, Writer};
use super::{COUNT, End, HAS, Relation, SINCE, UPDATED_AT};
use crate::action::{Action, Code, Does, Method, Place, Route};
use crate::blueprint::settings::Field;
use crate::form::{Form, Property};
use crate::paging;
use crate::resource::state_name;

pub(super) fn edge_actions(relation: &Arc<Relation>) -> Vec<Action> {
    let (name, row) = (&relation.name, row_form(relation));
    let write = |verb: Verb| Does::Write(Arc::new(Writer { relation: relation.clone(), verb }));
    let action = |name: &'static str, summary: String, method: Method| Action {
        name: name.into(),
        summary,
        target: state_name(&relation.name),
        shape: "create target",
        mechanism: "guarded upsert of the edge, with both lists and counts in one plan".into(),
        route: Route { method, place: Place::Item },
        input: vec![],
        output: row.clone(),
        refusals: vec![Code::NotFound, Code::VersionConflict, Code::Contended],
        needs_version: false,
        answers: &["duplicate edge creation on retry", "add/remove race", "count projection lag"],
        after: vec![],
        does: write(Verb::Add),
    };
    let added = || vec![format!("{name}.add")];
    vec![
        Action {
            input: relation.fields.iter().map(Field::property).collect(),
            ..action(
                "add",
                format!("Make a {name}, or give it other fields. One that is there stays."),
                Method::Put,
            )
        },
        Action {
            shape: "state transition",
            mechanism: "guarded conditional update of the edge to a tombstone, out of both lists and counts in one plan".into(),
            after: added(),
            does: write(Verb::Remove),
            ..action("remove", format!("End a {name}. One that is not there stays so."), Method::Delete)
        },
        Action {
            shape: "read source",
            mechanism: "strong read by key".into(),
            refusals: vec![],
            answers: &[],
            after: added(),
            does: Does::Read(Arc::new(Reader { relation: relation.clone(), what: Reading::Has })),
            ..action("has", format!("Say whether there is a {name}."), Method::Get)
        },
    ]
}

pub(super) fn end_actions(relation: &Arc<Relation>, end: End) -> Vec<Action> {
    let name = &relation.name;
    let owner: Vec<Property> = relation
        .owner(end)
        .iter()
        .map(|field| Property::required(&field.name, Form::Value(field.kind), ""))
        .collect();
    let where_to = if end == End::Out { "from here" } else { "to here" };
    let read = |what: Reading| Does::Read(Arc::new(Reader { relation: relation.clone(), what }));
    let list = Action {
        name: "list".into(),
        summary: format!("List the {name} rows that lead {where_to}, the newest first."),
        target: state_name(name),
        shape: "read source",
        mechanism: "strong range reads of all buckets at once, merged, and a read of the edges by key".into(),
        route: Route { method: Method::Get, place: Place::Collection },
        input: owner.iter().cloned().chain(paging::properties()).collect(),
        output: Form::List(Box::new(row_form(relation))),
        refusals: vec![],
        needs_version: false,
        answers: &["stale relation list cache"],
        after: vec![format!("{name}.add")],
        does: read(Reading::List(end)),
    };
    let counted =
        Property::required(COUNT, Form::Value(Type::Int), "as exact as the edges: it changes with them");
    let count = Action {
        name: "count".into(),
        summary: format!("Count the {name} rows that lead {where_to}."),
        target: format!("{}CountView", state_name(name).trim_end_matches("State")),
        mechanism: "strong read of the shards of the count, added up".into(),
        route: Route { method: Method::Get, place: Place::Item },
        input: vec![],
        output: Form::Object(owner.into_iter().chain([counted]).collect()),
        answers: &["count projection lag"],
        does: read(Reading::Count(end)),
        ..list.clone()
    };
    vec![list, count]
}

fn row_form(relation: &Relation) -> Form {
    let ends = relation.from.iter().chain(&relation.to);
    let mut form: Vec<Property> =
        ends.map(|field| Property::required(&field.name, Form::Value(field.kind), "")).collect();
    form.extend(relation.fields.iter().map(|field| Property {
        required: true,
        nullable: true,
        ..field.property()
    }));
    form.extend([
        Property::required(HAS, Form::Value(Type::Bool), "whether it is there"),
        Property::required(SINCE, Form::Value(Type::Time), "since when it is there").or_null(),
        Property::required(UPDATED_AT, Form::Value(Type::Time), "when it was last changed").or_null(),
        Property::required(
            VERSION,
            Form::Value(Type::Int),
            "raised by every change; 0 if it was never there",
        ),
    ]);
    Form::Object(form)
}
