//! Home: what needs a person, most urgent first, and how the processes and the engine are.
//!
//! Everything here is read in bounded pieces: states of rows by one page of a list each, groups and projections by their
//! marks. Counts end at the size of a page.

use std::time::Duration;

use axum::response::Response;
use maud::{Markup, html};

use super::frame::{ConsolePage, heading, live_region};
use super::groups::{self, group_names};
use super::values::{StateKind, mark, needs_person, span};
use super::{
    ConsoleContext, ROOT, action_link, capitalized, history, queues, redirect, resource_link, row_link,
};
use crate::http::path;
use crate::problem::Problem;

/// A group or a worker that is further behind than this needs a person.
const LAG_MAX: Duration = Duration::from_secs(60);
/// Events on the page.
const EVENTS_MAX: usize = 8;

/// Something that needs a person.
pub(super) struct Attention {
    pub kind: StateKind,
    pub text: String,
    /// What helps: address and title.
    pub link: (String, String),
}

impl Attention {
    fn of(kind: StateKind, text: String, address: String, title: &str) -> Attention {
        Attention { kind, text, link: (address, title.to_owned()) }
    }
}

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let mut needs = states(cx).await;
    needs.extend(workers(cx));
    needs.extend(group_needs(cx).await);
    needs.extend(projection_needs(cx).await);
    needs.sort_by_key(|one| one.kind != StateKind::Failed);
    let visible = |event: &history::LoggedEvent| super::access::may_follow(&cx.caller, &event.resource);
    let events = history::newest(cx, EVENTS_MAX, visible).await;
    let events = events.map(|window| window.events).unwrap_or_default();
    let content = html! {
        (heading(&html! { "Home" }, &html! {}))
        @let body = html! {
            section aria-label="What needs a person" {
                h2 { "What needs a person" }
                @if needs.is_empty() { p class="done" { "● Nothing is wrong." } }
                ul class="needs" {
                    @for one in &needs {
                        li { (mark(one.kind, if one.kind == StateKind::Failed { "failed" } else { "late" })) " " (one.text) " "
                            a class="button quiet" href=(one.link.0) { (one.link.1) } }
                    }
                }
            }
            div class="two" {
                section aria-label="Newest records" {
                    h2 { "Newest records" }
                    @if events.is_empty() { (first_action(cx)) }
                    @else { (history::event_list(&events, cx.now)) }
                }
                section aria-label="This process" { h2 { "This process" } (process(cx)) (refusals(cx)) }
            }
        };
        (live_region("home", "", &body))
    };
    Ok(ConsolePage { title: "Home", place: ROOT, content }.show(cx))
}

/// Rows in states that need a person, by the lists that filter by state.
async fn states(cx: &ConsoleContext) -> Vec<Attention> {
    let mut needs = Vec::new();
    for count in queues::counts(cx, needs_person).await {
        if count.rows > 0 {
            let text = format!("{} {} rows are {}", count.text(), count.resource, count.state);
            needs.push(Attention::of(StateKind::Failed, text, count.link, "Look at them"));
        }
    }
    needs
}

fn workers(cx: &ConsoleContext) -> Vec<Attention> {
    let link = || format!("{ROOT}/groups");
    let mut needs = Vec::new();
    for figures in cx.shared.house.worker_figures() {
        if let Some(error) = figures.last_error.filter(|_| figures.errors > 0) {
            let text =
                format!("worker {} failed {} times; the last time: {error}", figures.worker, figures.errors);
            needs.push(Attention::of(StateKind::Failed, text, link(), "Workers"));
        }
        if figures.lag > LAG_MAX {
            let text = format!("worker {} is {} late", figures.worker, span(figures.lag));
            needs.push(Attention::of(StateKind::Waiting, text, link(), "Workers"));
        }
    }
    needs
}

async fn group_needs(cx: &ConsoleContext) -> Vec<Attention> {
    let mut needs = Vec::new();
    let link = || format!("{ROOT}/groups");
    for name in group_names(&cx.shared.house) {
        let group = cx.shared.house.group(&name);
        let parked = groups::parked(&group, &cx.caller.tenant).await.map_or(0, |parked| parked.len());
        if parked > 0 {
            let text = format!("group {name} has parked {parked} records");
            needs.push(Attention::of(StateKind::Failed, text, link(), "Replay or discard"));
        }
        let behind = group.status().await.unwrap_or_default().iter().map(|one| one.behind).max();
        if behind.is_some_and(|behind| behind > LAG_MAX) {
            let text = format!("group {name} is {} behind", span(behind.unwrap_or_default()));
            needs.push(Attention::of(StateKind::Waiting, text, link(), "Groups"));
        }
    }
    needs
}

async fn projection_needs(cx: &ConsoleContext) -> Vec<Attention> {
    let mut needs = Vec::new();
    for projection in cx.shared.house.projections() {
        let Ok(status) = projection.status().await else { continue };
        let (name, link) = (projection.name(), format!("{ROOT}/projections"));
        let differs = status.state.verified == Some(false);
        if differs {
            let text = format!("the last build of projection {name} differs from its source");
            needs.push(Attention::of(StateKind::Failed, text, link.clone(), "Rebuild"));
        }
        if status.outdated {
            let text = format!("projection {name} was built by another definition");
            needs.push(Attention::of(StateKind::Waiting, text, link, "Projections"));
        }
    }
    needs
}

/// The first thing to do in an empty house.
fn first_action(cx: &ConsoleContext) -> Markup {
    let resources = cx.shared.house.resources().iter();
    let mut all =
        resources.flat_map(|resource| resource.actions.iter().map(move |action| (resource, action)));
    let first = all.find(|(resource, action)| action.is_write() && cx.may_call(resource, action));
    html! {
        div class="empty" {
            p { "The log has no records of this tenant yet." }
            @if let Some((resource, action)) = first {
                a class="button" href=(action_link(&resource.name, &action.name, None)) { (capitalized(&action.name)) " the first " (resource.name) }
            }
        }
    }
}

fn process(cx: &ConsoleContext) -> Markup {
    let house = &cx.shared.house;
    let figures = house.worker_figures();
    let held: u64 = figures.iter().map(|one| one.held).sum();
    html! {
        table class="fields" { tbody {
            tr { th scope="row" { "engine" } td { (mark(StateKind::Ok, house.store().engine())) } }
            tr { th scope="row" { "log partitions" } td class="number" { (house.store().partitions()) } }
            tr { th scope="row" { "workers" } td { (figures.len()) " here, with " (held) " shards" } }
            tr { th scope="row" { "version" } td { (env!("CARGO_PKG_VERSION")) } }
        } }
    }
}

fn refusals(cx: &ConsoleContext) -> Markup {
    let problems = cx.shared.metrics.problems();
    html! {
        h2 { "Refusals since the start" }
        @if problems.is_empty() { p class="faint" { "None." } }
        @else { table class="fields" { tbody {
            @for (code, count) in problems { tr { th scope="row" { a href={ "/problems/" (code) } { (code) } } td class="number" { (count) } } }
        } } }
    }
}

/// Search: `resource key` opens a row; a name opens a resource or an action.
pub(super) fn find(cx: &ConsoleContext) -> Response {
    let query = cx.parameter("q").unwrap_or_default().trim();
    let resources = cx.shared.house.resources();
    let (first, rest) = match cx.parameter("resource") {
        Some(resource) => (resource, query),
        None => query.split_once([' ', '/']).unwrap_or((query, "")),
    };
    if let Some(resource) = resources.iter().find(|one| one.name == first) {
        return redirect(&match rest.trim() {
            "" => resource_link(first),
            key => row_link(&resource.name, key),
        });
    }
    if cx.shared.house.action(query).is_ok() {
        return redirect(&format!("{ROOT}/a/{}", path::segment(query)));
    }
    let near = resources.iter().find(|one| !query.is_empty() && one.name.contains(&query.to_lowercase()));
    let address = near
        .map_or_else(|| format!("{ROOT}/log?key={}", path::parameter(query)), |one| resource_link(&one.name));
    redirect(&address)
}
