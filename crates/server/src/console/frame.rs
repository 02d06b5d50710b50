//! The frame around every page: name of the house, navigation, and the parts that pages share.

use axum::response::Response;
use http::StatusCode;
use maud::{DOCTYPE, Markup, html};
use statehouse::Resource;

use super::{ConsoleContext, ROOT, access, assets, html_response, resource_link};
use crate::http::{HttpShared, RequestInfo};
use crate::problem::Problem;

/// A page: its title, where it is in the navigation, and its content.
pub(super) struct ConsolePage<'p> {
    pub title: &'p str,
    /// The address of its entry in the navigation.
    pub place: &'p str,
    pub content: Markup,
}

impl ConsolePage<'_> {
    /// The page as a response.
    pub(super) fn show(self, cx: &ConsoleContext) -> Response {
        self.show_as(StatusCode::OK, cx)
    }

    /// The page as a response with another status.
    pub(super) fn show_as(self, status: StatusCode, cx: &ConsoleContext) -> Response {
        let shared = &cx.shared;
        let body = html! {
            a class="skip" href="#main" { "Skip to content" }
            header class={ "bar " (shared.config.console_colour.name()) } {
                button type="button" class="menu" data-menu="" aria-controls="side" aria-expanded="false" { "Menu" }
                a class="house" href=(ROOT) { (shared.house.name()) }
                @if !shared.config.console_label.is_empty() {
                    span class="label" { (shared.config.console_label) }
                }
                @if cx.is_read_only() { span class="label" { "read-only" } }
                form class="search" role="search" action={ (ROOT) "/find" } {
                    input type="search" name="q" aria-label="Search resources, rows and actions"
                        placeholder="Search: profile 42" data-search="" autocomplete="off";
                }
                span class="live" data-live-state="" title="Not live" aria-live="polite" { "○ paused" }
            }
            div class="columns" {
                (side(cx, self.place))
                main id="main" tabindex="-1" { (self.content) }
            }
        };
        html_response(status, document(self.title, shared.house.name(), &body))
    }
}

fn document(title: &str, house: &str, body: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · " (house) }
                link rel="icon" type="image/svg+xml" href=(assets::link("icon.svg"));
                link rel="stylesheet" href=(assets::link("style.css"));
                script type="module" src=(assets::link("console.js")) {}
                script type="module" src=(assets::link("form.js")) {}
            }
            body { (body) }
        }
    }
}

/// Pages of the house itself: address below the root, title, and key of the shortcut after `g`.
const PAGES: [(&str, &str, &str); 7] = [
    ("/log", "Log", "l"),
    ("/groups", "Workers and groups", "w"),
    ("/projections", "Projections", "p"),
    ("/queues", "Queues and states", "q"),
    ("/batch", "Batch", "b"),
    ("/atlas", "Atlas", "a"),
    ("/blueprint", "Blueprint", "t"),
];

fn side(cx: &ConsoleContext, place: &str) -> Markup {
    let entry = |address: &str, title: &str, key: Option<&str>| {
        let current = (address == place).then_some("page");
        html! { li { a href=(address) aria-current=[current] data-go=[key] { (title) } } }
    };
    let resources = cx.shared.house.resources();
    let mut keywords: Vec<&'static str> = resources.iter().map(|one| one.archetype.keyword()).collect();
    keywords.sort_unstable();
    keywords.dedup();
    let of = |keyword: &'static str| resources.iter().filter(move |one| one.archetype.keyword() == keyword);
    html! {
        nav id="side" aria-label="Console" {
            ul { (entry(ROOT, "Home", Some("h"))) }
            h2 { "Resources" }
            @for keyword in keywords {
                h3 { (keyword) }
                ul { @for resource in of(keyword) { (entry(&resource_link(&resource.name), &resource.name, None)) } }
            }
            h2 { "House" }
            ul {
                @for (path, title, key) in PAGES { (entry(&format!("{ROOT}{path}"), title, Some(key))) }
                @if access::may_operate(&cx.caller).is_ok() {
                    (entry(&format!("{ROOT}/keys"), "Keys", Some("k")))
                    (entry(&format!("{ROOT}/audit"), "Audit", Some("u")))
                }
            }
            (session(cx))
        }
    }
}

fn session(cx: &ConsoleContext) -> Markup {
    html! {
        div class="session" {
            @if cx.shared.authenticator.is_open() {
                form method="post" action={ (ROOT) "/tenant" } {
                    label { "Tenant" input name="tenant" value=(cx.caller.tenant.as_str()) autocomplete="off"; }
                    button type="submit" class="quiet" { "Change" }
                }
            } @else {
                p { "Tenant " b { (cx.caller.tenant.as_str()) } ", role " b { (access::role(&cx.caller)) } }
                (access::logout_form())
            }
            button type="button" class="quiet" data-theme-switch="" { "Light or dark" }
            p class="faint" { kbd { "/" } " search, " kbd { "g" } " then a letter goes to a page, " kbd { "j" } " "
                kbd { "k" } " move in a table" }
        }
    }
}

/// The page that asks for a key.
pub(super) fn login(shared: &HttpShared, problem: Option<&str>) -> Markup {
    let described = problem.map(|_| "problem");
    let body = html! {
        header class={ "bar " (shared.config.console_colour.name()) } {
            span class="house" { (shared.house.name()) }
            @if !shared.config.console_label.is_empty() { span class="label" { (shared.config.console_label) } }
        }
        main id="main" class="login" {
            h1 { "Log in" }
            form method="post" action={ (ROOT) "/login" } {
                label for="key" { "API key or token" }
                input id="key" name="key" type="password" autocomplete="current-password" required autofocus
                    aria-describedby=[described];
                @if let Some(problem) = problem { p id="problem" class="error" role="alert" { (problem) } }
                button type="submit" { "Log in" }
            }
            p class="faint" { "No key yet? " code { "statehouse key create --scopes read,write,admin" } }
        }
    };
    document("Log in", shared.house.name(), &body)
}

/// A problem as a page. Its causes stay in the server's log.
pub(super) fn problem_page(problem: &Problem, info: &RequestInfo) -> Response {
    let content = html! {
        main id="main" class="login" {
            h1 { (problem.kind.title) }
            p class="error" role="alert" { (problem.detail) }
            p { (problem.kind.advice.replace('`', "")) }
            p class="faint" { "Code " code { (problem.kind.code) } ", request " code { (info.context.request_id) } }
            p { a href=(ROOT) { "Home" } }
        }
    };
    html_response(problem.status(), document(problem.kind.title, "Statehouse", &content))
}

/// The heading of a page, with links beside it.
pub(super) fn heading(title: &Markup, aside: &Markup) -> Markup {
    html! { div class="head" { h1 { (title) } div class="actions" { (aside) } } }
}

/// A region that is replaced when rows of a resource change; all resources if the name is empty.
pub(super) fn live_region(id: &str, resource: &str, content: &Markup) -> Markup {
    html! { div id=(id) data-live=(resource) { (content) } }
}

/// Text for a page that has nothing to show yet.
pub(super) fn empty(text: &str, link: Option<(&str, &str)>) -> Markup {
    html! {
        div class="empty" {
            p { (text) }
            @if let Some((address, title)) = link { a class="button" href=(address) { (title) } }
        }
    }
}

/// The title of a resource with what it is.
pub(super) fn resource_title(resource: &Resource) -> Markup {
    html! { (resource.name) " " small class="faint" { (resource.archetype.name) } }
}
