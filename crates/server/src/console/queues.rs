//! States of rows: for each list that filters by a word, how many rows the first page of each word has.
//!
//! This shows queues, schedules, effects, timers and bookings alike. A number is never more than a page: `50+` means that there
//! are more.

use axum::response::Response;
use maud::html;
use statehouse::Resource;
use statehouse::action::Action;
use statehouse::form::{Form, Property};

use super::frame::{ConsolePage, empty, heading, live_region};
use super::list::read_page;
use super::values::{list_action, state_mark};
use super::{ConsoleContext, ROOT, resource_link};
use crate::http::path;
use crate::problem::Problem;

/// Rows that are looked at for a number.
const ROWS_MAX: &str = "50";

/// Rows in one state.
pub(super) struct StateCount {
    pub resource: String,
    pub state: String,
    pub rows: usize,
    pub has_more: bool,
    /// The address of the list.
    pub link: String,
}

impl StateCount {
    /// The number, with a sign if there are more.
    pub(super) fn text(&self) -> String {
        if self.has_more { format!("{}+", self.rows) } else { self.rows.to_string() }
    }
}

/// The input of a list that chooses a state, if nothing else must be given.
fn state_filter(list: &Action) -> Option<&Property> {
    let can_be_left_out = |property: &Property| !property.required || matches!(property.form, Form::OneOf(_));
    let chooses = |property: &&Property| matches!(property.form, Form::OneOf(_));
    list.input.iter().find(chooses).filter(|_| list.input.iter().all(can_be_left_out))
}

/// The numbers of rows in the states that are wanted. A list that cannot be read has none.
pub(super) async fn counts(cx: &ConsoleContext, wanted: impl Fn(&str) -> bool) -> Vec<StateCount> {
    let mut counts = Vec::new();
    for resource in cx.shared.house.resources() {
        let Some(list) = list_action(resource).filter(|list| cx.may_call(resource, list)) else { continue };
        let Some(property) = state_filter(list) else { continue };
        let Form::OneOf(words) = &property.form else { continue };
        for word in words.iter().filter(|word| wanted(word)) {
            counts.extend(count(cx, resource, list, &property.name, word).await);
        }
    }
    counts
}

async fn count(
    cx: &ConsoleContext,
    resource: &Resource,
    list: &Action,
    filter: &str,
    state: &str,
) -> Option<StateCount> {
    let mut query = vec![(filter.to_owned(), state.to_owned())];
    if list.input.iter().any(|property| property.name == "limit") {
        query.push(("limit".to_owned(), ROWS_MAX.to_owned()));
    }
    let page = read_page(cx, resource, list, &query).await.ok()?;
    Some(StateCount {
        resource: resource.name.clone(),
        state: state.to_owned(),
        rows: page.rows.len(),
        has_more: page.next.is_some(),
        link: format!(
            "{}?{}={}",
            resource_link(&resource.name),
            path::parameter(filter),
            path::parameter(state)
        ),
    })
}

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let counts = counts(cx, |_| true).await;
    let mut names: Vec<&str> = counts.iter().map(|count| count.resource.as_str()).collect();
    names.dedup();
    let content = html! {
        (heading(&html! { "Queues and states" }, &html! {}))
        @if names.is_empty() { (empty("No resource has a list that filters by state.", None)) }
        @let body = html! {
            @for name in names {
                @let resource = cx.shared.house.resource(name).ok();
                section aria-label=(name) {
                    h2 { a href=(resource_link(name)) { (name) } }
                    ul class="states" {
                        @for count in counts.iter().filter(|count| count.resource == name) {
                            li { a href=(count.link) { (state_mark(resource, &count.state)) " " b class="number" { (count.text()) } } }
                        }
                    }
                    @if let Some(machine) = resource.and_then(|resource| resource.machine.as_ref()) {
                        details { summary { "Transitions" } pre tabindex="0" { (machine.graph().mermaid()) } }
                    }
                }
            }
        };
        (live_region("states", "", &body))
    };
    Ok(ConsolePage { title: "Queues and states", place: &format!("{ROOT}/queues"), content }.show(cx))
}
