//! A write under a version that another caller has changed since: what was read, what is there now, and what was written, side
//! by side. Saving is a new write under the version that is there now.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::Resource;
use statehouse::action::Action;
use statehouse::form::Property;

use super::action_form::{FormState, problem_text};
use super::fields::{BASE, FieldState, KEY, OPERATION, VERSION, field, hidden};
use super::frame::{ConsolePage, heading};
use super::values::{plain, read_action};
use super::{ConsoleContext, action_link, resource_link, row_link};
use crate::problem::Problem;

pub(super) async fn page(
    cx: &ConsoleContext,
    resource: &Resource,
    action: &Action,
    state: &FormState,
    problem: &Problem,
) -> Result<Response, Problem> {
    let key = state.key.clone().unwrap_or_default();
    let theirs = match read_action(resource) {
        Some(read) => {
            let answer = cx.read(resource, read, resource.parse_key(&key)?, Map::new()).await?;
            answer.body.as_object().cloned().unwrap_or_default()
        }
        None => Map::new(),
    };
    let version =
        theirs.get("version").and_then(Json::as_i64).or(problem.current_version).unwrap_or_default();
    let link = row_link(&resource.name, &key);
    let content = html! {
        (heading(&html! { "Conflict on " a href=(link) { (resource.name) " " (key) } }, &html! {}))
        (problem_text(problem))
        p { "Another caller changed the row after you read it. Choose a value for each field; saving writes under version " (version) "." }
        form method="post" action=(action_link(&resource.name, &action.name, None)) data-action-form="" {
            (hidden(OPERATION, &cx.shared.house.ids().next()))
            (hidden(KEY, &key))
            (hidden(VERSION, &version.to_string()))
            (hidden(BASE, &Json::Object(theirs.clone()).to_string()))
            div class="scroll" tabindex="0" role="region" aria-label="Versions of the row" {
                table class="merge" {
                    thead { tr {
                        th scope="col" { "field" } th scope="col" { "you read" } th scope="col" { "there now" }
                        th scope="col" { "you wrote" } th scope="col" { "save" }
                    } }
                    tbody { @for property in &action.input { (line(property, state, &theirs)) } }
                }
            }
            button type="submit" { "Save the merge" }
            " " a class="button quiet" href=(link) { "Discard mine" }
        }
    };
    let (title, place) = (format!("Conflict on {} {key}", resource.name), resource_link(&resource.name));
    Ok(ConsolePage { title: &title, place: &place, content }.show_as(problem.status(), cx))
}

/// The value that a merge proposes: mine where I changed the field, theirs elsewhere.
fn proposed<'v>(
    base: Option<&'v Json>,
    theirs: Option<&'v Json>,
    mine: Option<&'v Json>,
) -> Option<&'v Json> {
    let is_empty = |value: Option<&Json>| value.is_none_or(Json::is_null);
    if mine == base || (is_empty(mine) && is_empty(base)) { theirs } else { mine }
}

fn line(property: &Property, state: &FormState, theirs: &Map<String, Json>) -> Markup {
    let name = &property.name;
    let (base, theirs, mine) = (state.base.get(name), theirs.get(name), state.input.get(name));
    let changed = |value: Option<&Json>| if value == base { "" } else { "changed" };
    let both = theirs != base && mine != base && theirs != mine;
    let text = |value: Option<&Json>| value.map_or("–".to_owned(), plain);
    let value = proposed(base, theirs, mine).cloned().filter(|value| property.nullable || !value.is_null());
    html! {
        tr class=[both.then_some("both")] {
            th scope="row" { (name) @if both { " " span class="state failed" { "✕ both changed" } } }
            td class="value" { (text(base)) }
            td class={ "value " (changed(theirs)) } { (text(theirs)) @if theirs.is_some() { (take(name, theirs, "theirs")) } }
            td class={ "value " (changed(mine)) } { (text(mine)) @if mine.is_some() { (take(name, mine, "mine")) } }
            td { (field(property, &FieldState { value, errors: Vec::new() })) }
        }
    }
}

/// A button that a script makes take one of the values.
fn take(name: &str, value: Option<&Json>, whose: &str) -> Markup {
    let text = value.map_or(String::new(), |value| match value {
        Json::Null => String::new(),
        value => plain(value),
    });
    html! { button type="button" class="quiet take" data-take=(name) data-value=(text) aria-label={ "Take " (whose) " for " (name) } { "take" } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_merge_proposes_my_changes_over_theirs() {
        let (one, two, three) = (json!(1), json!(2), json!(3));
        assert_eq!(proposed(Some(&one), Some(&two), Some(&one)), Some(&two));
        assert_eq!(proposed(Some(&one), Some(&two), Some(&three)), Some(&three));
        assert_eq!(proposed(Some(&one), Some(&one), Some(&three)), Some(&three));
        assert_eq!(proposed(Some(&Json::Null), Some(&two), None), Some(&two));
    }
}
