//! The actions of a feed, as every surface is made from them.

use std::sync::Arc;

use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::read::{FeedQuery, FeedRead};
use super::seen::MarkSeen;
use super::{
    AUTHOR, CREATED_AT, EXPIRES_AT, FeedSpec, LAST_SEEN_AT, LAST_SEEN_CREATED_AT, LAST_SEEN_POST, POST,
    PREVIEW, UPDATED_AT, VIEWER,
};
use crate::action::Code;
use crate::declare::ActionSpec;
use crate::form::{Form, Property};
use crate::infra::projection::{GENERATION, fresh};
use crate::resource::state_name;

pub(super) fn actions(feed: &Arc<FeedSpec>) -> [ActionSpec; 3] {
    let kind = |column: &str| Form::Value(feed.rows.type_of(column).unwrap_or(Type::Text));
    let given = |column: &str, about: &str| Property::required(column, kind(column), about);
    let state = |suffix: &str| format!("{}{suffix}", state_name(&feed.name).trim_end_matches("State"));
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
    let read = |what: FeedQuery| FeedRead { feed: feed.clone(), what };
    let (created, followed) = (format!("{}.create", feed.posts), format!("{}.add", feed.follows));
    [
        ActionSpec::list("list", "List what {name} shows to a reader, the newest first.")
            .target(state("View"))
            .shape("read projection")
            .mechanism(
                "range read under the live generation, merged with those of the authors that are pulled",
            )
            .takes([given(VIEWER, "whose feed it is")].into_iter().chain(fresh()))
            .gives_rows(row)
            .codes(&[Code::Unavailable])
            .answers(&[
                "stale projection",
                "missing entry",
                "duplicate entry",
                "tombstone not propagated",
                "stale ranking after source update",
            ])
            .after([created.as_str(), followed.as_str()])
            .reads(read(FeedQuery::Page)),
        ActionSpec::read("read", "Read how far a reader of {name} has got.")
            .target(state("Cursor"))
            .gives(seen.clone())
            .codes(&[])
            .after(["seen"])
            .reads(read(FeedQuery::Cursor)),
        ActionSpec::transition("seen", "Say up to which post a reader has seen {name}. It never goes back.")
            .target(state("Cursor"))
            .shape("overwrite")
            .mechanism("upsert guarded by the version that was read; an older place changes nothing")
            .takes([given(POST, "the newest post that was seen"), given(CREATED_AT, "and its time")])
            .gives(seen)
            .codes(&[Code::Contended])
            .writes(MarkSeen { feed: feed.clone() }),
    ]
}
