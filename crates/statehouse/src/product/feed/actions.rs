//! The actions of a feed, as every surface is made from them.

use std::sync::Arc;

use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::read::{Reader, Reading};
use super::seen::Marker;
use super::{
    AUTHOR, CREATED_AT, EXPIRES_AT, Feed, LAST_SEEN_AT, LAST_SEEN_CREATED_AT, LAST_SEEN_POST, POST, PREVIEW,
    UPDATED_AT, VIEWER,
};
use crate::action::{Action, Code, Does, Method, Place, Route};
use crate::form::{Form, Property};
use crate::infra::projection::{GENERATION, fresh};
use crate::paging;
use crate::resource::state_name;

pub(super) fn actions(feed: &Arc<Feed>) -> Vec<Action> {
    let name = &feed.name;
    let kind = |column: &str| Form::Value(feed.rows.type_of(column).unwrap_or(Type::Text));
    let given = |column: &str, about: &str| Property::required(column, kind(column), about);
    let view = format!("{}View", state_name(name).trim_end_matches("State"));
    let cursor = format!("{}Cursor", state_name(name).trim_end_matches("State"));
    let row = Form::Object(vec![
        given(VIEWER, "whose feed it is"),
        given(POST, ""),
        given(AUTHOR, ""),
        given(PREVIEW, "how the post begins").or_null(),
        given(CREATED_AT, "by which the feed is ordered"),
        given(EXPIRES_AT, "until when it is shown"),
        Property::required(GENERATION, Form::Value(Type::Int), "of the projection"),
    ]);
    let seen = Form::Object(vec![
        given(VIEWER, "whose feed it is"),
        Property::required(LAST_SEEN_POST, kind(POST), "the newest post that was seen").or_null(),
        Property::required(LAST_SEEN_CREATED_AT, Form::Value(Type::Time), "and its time").or_null(),
        Property::required(LAST_SEEN_AT, Form::Value(Type::Time), "when it was seen").or_null(),
        Property::required(UPDATED_AT, Form::Value(Type::Time), "").or_null(),
        Property::required(VERSION, Form::Value(Type::Int), "raised by every change; 0 if nothing was seen"),
    ]);
    let read = |what: Reading| Does::Read(Arc::new(Reader { feed: feed.clone(), what }));
    vec![
        Action {
            name: "list".into(),
            summary: format!("List what {name} shows to a reader, the newest first."),
            target: view,
            shape: "read projection",
            mechanism:
                "range read under the live generation, merged with those of the authors that are pulled"
                    .into(),
            route: Route { method: Method::Get, place: Place::Collection },
            input: [given(VIEWER, "whose feed it is")]
                .into_iter()
                .chain(fresh())
                .chain(paging::properties())
                .collect(),
            output: Form::List(Box::new(row)),
            refusals: vec![Code::Unavailable],
            needs_version: false,
            answers: &[
                "stale projection",
                "missing entry",
                "duplicate entry",
                "tombstone not propagated",
                "stale ranking after source update",
            ],
            after: vec![format!("{}.create", feed.posts), format!("{}.add", feed.follows)],
            does: read(Reading::Page),
        },
        Action {
            name: "read".into(),
            summary: format!("Read how far a reader of {name} has got."),
            target: cursor.clone(),
            shape: "read source",
            mechanism: "strong read by key".into(),
            route: Route { method: Method::Get, place: Place::Item },
            input: vec![],
            output: seen.clone(),
            refusals: vec![],
            needs_version: false,
            answers: &[],
            after: vec![format!("{name}.seen")],
            does: read(Reading::Cursor),
        },
        Action {
            name: "seen".into(),
            summary: format!("Say up to which post a reader has seen {name}. It never goes back."),
            target: cursor,
            shape: "overwrite",
            mechanism: "upsert guarded by the version that was read; an older place changes nothing".into(),
            route: Route { method: Method::Post, place: Place::ItemAction },
            input: vec![given(POST, "the newest post that was seen"), given(CREATED_AT, "and its time")],
            output: seen,
            refusals: vec![Code::Contended],
            needs_version: false,
            answers: &[],
            after: vec![],
            does: Does::Write(Arc::new(Marker { feed: feed.clone() })),
        },
    ]
}
