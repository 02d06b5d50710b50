//! One row: its fields, what it waits for, what can be done with it, its history, and the rows it refers to.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::Resource;
use statehouse::action::{Action, RouteKind};
use statehouse::declare::machine::{EdgeKind, Graph};

use super::access::may_follow;
use super::frame::{ConsolePage, empty, heading, live_region};
use super::history::{LogWindow, of_row, timeline};
use super::list::state_columns;
use super::values::{form_of, plain, read_action, references, relative, state_mark, time, time_of};
use super::{ConsoleContext, ROOT, action_link, capitalized, resource_link, row_link};
use crate::http::path;
use crate::problem::{NOT_FOUND, Problem};

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let house = &cx.shared.house;
    let resource = house.resource(cx.segment(1))?;
    let text = cx.segment(2);
    let key = resource.parse_key(text)?;
    let read = read_action(resource);
    let row = match read {
        None => None,
        Some(read) => match cx.read(resource, read, key, Map::new()).await {
            Ok(answer) => Some(answer.body.clone()),
            // The history of a row that is gone can still be read.
            Err(problem) if [404, 410].contains(&problem.kind.status) => None,
            Err(problem) => return Err(problem),
        },
    };
    let up_to = cx.parameter("up_to").and_then(|offset| offset.parse().ok());
    let history = match may_follow(&cx.caller, &resource.name) {
        true => of_row(cx, &resource.name, text, up_to).await?,
        false => LogWindow::default(),
    };
    if row.is_none() && history.events.is_empty() && up_to.is_none() && read.is_some() {
        let detail = format!(
            "{} has no row {text}, and no record in the part of the log that this page reads",
            resource.name
        );
        return Err(Problem::new(NOT_FOUND, detail));
    }
    let title = format!("{} {text}", resource.name);
    let place = resource_link(&resource.name);
    let fields = row.as_ref().and_then(Json::as_object);
    let body = html! {
        @match (fields, read) {
            (Some(fields), Some(read)) => {
                (waiting(cx, resource, read, fields))
                (fields_table(cx, resource, read, fields))
                (related(cx, resource, fields))
            }
            _ => p class="notice" { "There is no such row now." },
        }
        (history_section(cx, resource, text, &history))
        @if let Some(row) = &row { details { summary { "Raw" } pre tabindex="0" { (format!("{row:#}")) } } }
    };
    let name = html! { a href=(place) { (resource.name) } " " span class="mono" { (text) } };
    let content = html! {
        (heading(&name, &html! {}))
        (live_region("row", &resource.name, &html! { (actions(cx, resource, text, fields)) (body) }))
    };
    Ok(ConsolePage { title: &title, place: &place, content }.show(cx))
}

/// The actions of the row: those that its state allows as links, the others with the reason.
fn actions(cx: &ConsoleContext, resource: &Resource, key: &str, row: Option<&Map<String, Json>>) -> Markup {
    let of_row =
        |action: &&Action| action.route.kind != RouteKind::Collection && cx.may_call(resource, action);
    let is_read = |action: &Action| read_action(resource).is_some_and(|read| read.name == action.name);
    let graph = resource.machine.as_ref().map(|machine| machine.graph());
    let state = graph.as_ref().and_then(|graph| row?.get(&graph.column)?.as_str());
    html! {
        div class="actions" role="group" aria-label="Actions" {
            @for action in resource.actions.iter().filter(of_row).filter(|action| !is_read(action)) {
                @match graph.as_ref().and_then(|graph| forbidden(graph, state, &action.name)) {
                    None => a class="button" href=(action_link(&resource.name, &action.name, Some(key))) title=(action.summary) { (capitalized(&action.name)) },
                    Some(why) => span class="button off" title=(why) { (capitalized(&action.name)) span class="visually-hidden" { ": " (why) } },
                }
            }
        }
    }
}

/// Why an action cannot start from a state, by the machine of the resource.
fn forbidden(graph: &Graph, state: Option<&str>, action: &str) -> Option<String> {
    let state = state?;
    let starts: Vec<&str> = graph
        .edges
        .iter()
        .filter(|edge| edge.transition == action)
        .filter_map(|edge| edge.from.as_deref())
        .collect();
    if starts.is_empty() || starts.contains(&state) {
        return None;
    }
    Some(format!("the row is {state}; this action starts from {}", starts.join(", ")))
}

/// What the row waits for: a worker that acts on its state, and times that have not come yet.
fn waiting(cx: &ConsoleContext, resource: &Resource, read: &Action, row: &Map<String, Json>) -> Markup {
    let mut reasons = Vec::new();
    for (name, value) in row {
        if let Some(at) = time_of(value, form_of(&read.output, name)).filter(|at| *at > cx.now) {
            let holder = row.get("holder").and_then(Json::as_str);
            let held = holder.map_or(String::new(), |holder| format!(", held by {holder}"));
            reasons.push(html! { (name) " is " (relative(at, cx.now)) (held) " (" (at.to_string()) ")" });
        }
    }
    if let Some(graph) = resource.machine.as_ref().map(|machine| machine.graph()) {
        let state = row.get(&graph.column).and_then(Json::as_str).unwrap_or_default();
        for edge in graph.edges.iter().filter(|edge| edge.from.as_deref() == Some(state)) {
            let by = match edge.kind {
                EdgeKind::Deadline | EdgeKind::DeadlineOrCall => "a worker, at the deadline",
                EdgeKind::Part => "a worker, or a write of another row",
                EdgeKind::Call | EdgeKind::ByHand => continue,
            };
            let to = edge.to.as_deref().unwrap_or("deleted");
            if to != state {
                reasons
                    .push(html! { "from " (state) " to " b { (to) } " by " (by) " (" (edge.transition) ")" });
            }
        }
    }
    html! {
        @if !reasons.is_empty() {
            section class="waits" aria-label="What it waits for" {
                h2 { "What it waits for" }
                ul { @for reason in &reasons { li { (reason) } } }
            }
        }
    }
}

fn fields_table(cx: &ConsoleContext, resource: &Resource, read: &Action, row: &Map<String, Json>) -> Markup {
    let states = state_columns(resource, read);
    let links = references(cx.shared.house.resources(), resource, row);
    html! {
        section aria-label="Fields" {
            h2 { "Fields" }
            table class="fields" {
                tbody {
                    @for (name, value) in row {
                        tr {
                            th scope="row" { (name) }
                            td {
                                @match (value, time_of(value, form_of(&read.output, name))) {
                                    (Json::String(state), _) if states.contains(name) => (state_mark(Some(resource), state)),
                                    (_, Some(at)) => { (time(at, cx.now)) " " span class="faint mono" { (at.to_string()) } },
                                    (Json::Null, _) => span class="null" { "–" },
                                    (Json::Object(_) | Json::Array(_), _) => pre tabindex="0" { (format!("{value:#}")) },
                                    _ => span class="value" { (plain(value)) },
                                }
                                @for (_, title, address) in links.iter().filter(|(column, _, _)| column == name) {
                                    " " a href=(address) { "→ " (title) }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Lists of other resources that take a column of this row's key as a filter.
fn related(cx: &ConsoleContext, resource: &Resource, row: &Map<String, Json>) -> Markup {
    let mut links = Vec::new();
    for other in cx.shared.house.resources().iter().filter(|other| other.name != resource.name) {
        let Some(list) = super::values::list_action(other) else { continue };
        let given: Vec<String> = list
            .input
            .iter()
            .filter(|property| resource.key.iter().any(|(name, _)| *name == property.name))
            .filter_map(|property| Some((&property.name, row.get(&property.name)?)))
            .map(|(name, value)| format!("{}={}", path::parameter(name), path::parameter(&plain(value))))
            .collect();
        if !given.is_empty() {
            links.push((other.name.clone(), format!("{}?{}", resource_link(&other.name), given.join("&"))));
        }
    }
    html! {
        @if !links.is_empty() {
            section aria-label="Related" {
                h2 { "Related" }
                ul class="links" { @for (name, address) in &links { li { a href=(address) { (name) " of this row" } } } }
            }
        }
    }
}

fn history_section(cx: &ConsoleContext, resource: &Resource, key: &str, history: &LogWindow) -> Markup {
    html! {
        section aria-label="History" {
            h2 { "History" }
            @if history.events.is_empty() {
                (empty("No record of this row is in the part of the log that was read.", None))
            } @else {
                (timeline(&history.events, cx.now))
            }
            @if let Some(older) = history.older {
                a class="button quiet" href={ (row_link(&resource.name, key)) "?up_to=" (older) } { "Look further back" }
            } @else if history.is_trimmed {
                p class="faint" { "Older records were trimmed from the log." }
            }
            p class="faint" { a href={ (ROOT) "/log?resource=" (path::parameter(&resource.name)) } { "The log of " (resource.name) } }
        }
    }
}
