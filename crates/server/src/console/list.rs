//! A resource: a page of its rows, with the filters that its list takes.
//!
//! The filters are the inputs of the list action, so only what an index or a key serves is offered. A page is one call of the
//! list; further rows are behind its cursor. Nothing is counted.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::Resource;
use statehouse::action::{Action, RouteKind};
use statehouse::form::{Form, Property};

use super::fields::constraint;
use super::frame::{ConsolePage, empty, heading, live_region, resource_title};
use super::values::{cell, form_of, key_in, list_action, properties, read_action, rows_in, state_mark};
use super::{ConsoleContext, ROOT, action_link, capitalized, resource_link, row_link};
use crate::http::{call, path};
use crate::problem::{INVALID_INPUT, Problem};

/// Inputs of a list that are not filters.
const NOT_FILTERS: [&str; 4] = ["limit", "cursor", "fields", "keys"];
/// Columns of a table.
const COLUMNS_MAX: usize = 9;

/// One page of a list.
pub(super) struct ListPage {
    pub rows: Vec<Json>,
    /// The sealed cursor of the next page.
    pub next: Option<String>,
}

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let resource = cx.shared.house.resource(cx.segment(1))?;
    let title = resource.name.clone();
    let place = resource_link(&resource.name);
    let content = html! {
        (heading(&resource_title(resource), &collection_actions(cx, resource)))
        @match list_action(resource) {
            None => {
                (empty("This resource has no list. Open a row by its key, or call one of its actions.", None))
                (open_by_key(resource))
            }
            Some(list) => (table(cx, resource, list).await?),
        }
    };
    Ok(ConsolePage { title: &title, place: &place, content }.show(cx))
}

/// Links to the forms of actions that name no row, and a fold with those that do.
fn collection_actions(cx: &ConsoleContext, resource: &Resource) -> Markup {
    let own = |action: &&Action| action.route.kind == RouteKind::Collection && cx.may_call(resource, action);
    let creates = |action: &&Action| action.is_write() && action.route.kind != RouteKind::Collection;
    let is_list = |action: &Action| list_action(resource).is_some_and(|list| list.name == action.name);
    html! {
        @for action in resource.actions.iter().filter(own).filter(|action| !is_list(action)) {
            a class="button" href=(action_link(&resource.name, &action.name, None)) { (capitalized(&action.name)) }
        }
        @for action in resource.actions.iter().filter(creates).filter(|action| cx.may_call(resource, action)) {
            a class="button quiet" href=(action_link(&resource.name, &action.name, None)) { (capitalized(&action.name)) }
        }
    }
}

fn open_by_key(resource: &Resource) -> Markup {
    let names: Vec<&str> = resource.key.iter().map(|(name, _)| name.as_str()).collect();
    html! {
        @if read_action(resource).is_some() {
            form class="filters" action={ (ROOT) "/find" } {
                input type="hidden" name="resource" value=(resource.name);
                label { "Key: " (names.join(",")) input name="q" required autocomplete="off"; }
                button type="submit" { "Open" }
            }
        }
    }
}

async fn table(cx: &ConsoleContext, resource: &Resource, list: &Action) -> Result<Markup, Problem> {
    let filters: Vec<&Property> =
        list.input.iter().filter(|property| !NOT_FILTERS.contains(&property.name.as_str())).collect();
    let missing = filters.iter().find(|property| property.required && cx.parameter(&property.name).is_none());
    let shown = match missing {
        Some(property) => Err(format!("Give {} to see rows.", property.name)),
        None => match read_page(cx, resource, list, &cx.query).await {
            Ok(page) => Ok(page),
            Err(problem) if problem.kind == INVALID_INPUT => Err(problem.detail.clone()),
            Err(problem) => return Err(problem),
        },
    };
    Ok(html! {
        @if !filters.is_empty() { (filter_form(cx, &filters)) }
        @match shown {
            Err(why) => p class="notice" { (why) },
            Ok(page) => {
                (live_region("rows", &resource.name, &rows(cx, resource, list, &page)))
                (paging(cx, resource, &page))
            }
        }
        (open_by_key(resource))
    })
}

/// Reads one page of a list. Parameters that the list does not take are passed over: they belong to the console's page.
pub(super) async fn read_page(
    cx: &ConsoleContext,
    resource: &Resource,
    list: &Action,
    query: &[(String, String)],
) -> Result<ListPage, Problem> {
    let known = |name: &str| list.input.iter().any(|property| property.name == name);
    let given = query.iter().filter(|(name, value)| known(name) && !value.is_empty());
    let text: Vec<String> =
        given.map(|(name, value)| format!("{}={}", path::parameter(name), path::parameter(value))).collect();
    let mut input: Map<String, Json> = path::input(Some(&text.join("&")), &list.input)?;
    let name = format!("{}.{}", resource.name, list.name);
    call::open_cursor(&cx.shared, &name, &cx.caller.tenant, &mut input)?;
    let filter = call::filter_of(&input);
    let answer = cx.read(resource, list, Vec::new(), input).await?;
    let seal = |next: &String| call::sealed_cursor(&cx.shared, &name, &cx.caller.tenant, &filter, next);
    Ok(ListPage {
        rows: rows_in(&answer.body).cloned().unwrap_or_default(),
        next: answer.next.as_ref().map(seal),
    })
}

fn filter_form(cx: &ConsoleContext, filters: &[&Property]) -> Markup {
    html! {
        form class="filters" {
            @for property in filters {
                @let value = cx.parameter(&property.name).unwrap_or_default();
                label title=(constraint(property)) {
                    (property.name)
                    @match &property.form {
                        Form::OneOf(words) => select name=(property.name) {
                            @if !property.required { option value="" { "(default)" } }
                            @for word in words { option value=(word) selected[*word == *value] { (word) } }
                        },
                        _ => input name=(property.name) value=(value) autocomplete="off" placeholder=(property.about);
                    }
                }
            }
            button type="submit" { "Filter" }
        }
    }
}

/// The columns of a table: the key first, then what the form of the rows names, then what else the rows have.
fn columns(resource: &Resource, list: &Action, rows: &[Json]) -> Vec<String> {
    let mut names: Vec<String> = resource.key.iter().map(|(name, _)| name.clone()).collect();
    let declared = properties(&list.output).iter().map(|property| property.name.clone());
    let found = rows.iter().filter_map(Json::as_object).flat_map(|row| row.keys().cloned());
    for name in declared.chain(found) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let has = |name: &String| rows.is_empty() || rows.iter().any(|row| row.get(name).is_some());
    names.retain(has);
    names.truncate(COLUMNS_MAX);
    names
}

fn rows(cx: &ConsoleContext, resource: &Resource, list: &Action, page: &ListPage) -> Markup {
    if page.rows.is_empty() {
        let first = resource.actions.iter().find(|action| action.is_write() && cx.may_call(resource, action));
        let link = first.map(|action| {
            let title = format!("{} a {}", capitalized(&action.name), resource.name);
            (action_link(&resource.name, &action.name, None), title)
        });
        let link = link.as_ref().map(|(address, title)| (address.as_str(), title.as_str()));
        return empty("No rows match. What is written appears here by itself.", link);
    }
    data_table(cx, resource, list, &page.rows, &resource.name)
}

/// A table of rows.
pub(super) fn data_table(
    cx: &ConsoleContext,
    resource: &Resource,
    list: &Action,
    rows: &[Json],
    caption: &str,
) -> Markup {
    let mut names = columns(resource, list, rows);
    let states = state_columns(resource, list);
    let is_readable = read_action(resource).is_some();
    if is_readable && rows.iter().all(|row| key_in(resource, row).is_some()) {
        // The link to the row shows the key.
        names.retain(|name| !resource.key.iter().any(|(key, _)| key == name));
    }
    html! {
        div class="scroll" tabindex="0" role="region" aria-label={ "Rows of " (caption) } {
            table data-rows="" {
                thead { tr {
                    @if is_readable { th scope="col" { "row" } }
                    @for name in &names { th scope="col" { (name) } }
                } }
                tbody {
                    @for row in rows {
                        @let key = key_in(resource, row).filter(|_| is_readable);
                        tr data-key=[key.as_deref()] data-version=[row.get("version").map(Json::to_string)] {
                            @if is_readable {
                                th scope="row" {
                                    @match &key {
                                        Some(key) => a href=(row_link(&resource.name, key)) class="mono" { (key) },
                                        None => "–",
                                    }
                                }
                            }
                            @for name in &names {
                                td {
                                    @match (row.get(name), states.contains(name)) {
                                        (Some(Json::String(state)), true) => (state_mark(Some(resource), state)),
                                        (Some(value), _) => (cell(value, form_of(&list.output, name), cx.now)),
                                        (None, _) => span class="null" { "–" },
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The columns that hold a state: that of the machine, and those of which a form lists the words in capitals.
pub(super) fn state_columns(resource: &Resource, action: &Action) -> Vec<String> {
    let mut names: Vec<String> = resource.machine.iter().map(|machine| machine.graph().column).collect();
    let is_word = |word: &str| word.chars().all(|letter| letter.is_ascii_uppercase() || letter == '_');
    let of_forms = properties(&action.output).iter().chain(&action.input);
    for property in of_forms {
        if let Form::OneOf(words) = &property.form
            && words.iter().all(|word| is_word(word))
            && !names.contains(&property.name)
        {
            names.push(property.name.clone());
        }
    }
    names
}

fn paging(cx: &ConsoleContext, resource: &Resource, page: &ListPage) -> Markup {
    let link = |cursor: Option<&str>| {
        let kept = cx.query.iter().filter(|(name, value)| name != "cursor" && !value.is_empty());
        let mut parts: Vec<String> = kept
            .map(|(name, value)| format!("{}={}", path::parameter(name), path::parameter(value)))
            .collect();
        parts.extend(cursor.map(|cursor| format!("cursor={}", path::parameter(cursor))));
        let query = if parts.is_empty() { String::new() } else { format!("?{}", parts.join("&")) };
        format!("{}{query}", resource_link(&resource.name))
    };
    html! {
        nav class="paging" aria-label="Pages" {
            @if cx.parameter("cursor").is_some() { a class="button quiet" href=(link(None)) { "First page" } }
            @if let Some(next) = &page.next { a class="button quiet" rel="next" href=(link(Some(next))) { "Next page" } }
            span class="faint" { (page.rows.len()) " rows on this page" }
        }
    }
}
