//! The audit: who did what with which credential. For operators.

use axum::response::Response;
use maud::{Markup, html};
use statehouse::audit::AuditRow;

use super::frame::{ConsolePage, empty, heading};
use super::values::{StateKind, mark, time};
use super::{ConsoleContext, ROOT};
use crate::audit::{AuditRequest, next_query};
use crate::problem::Problem;

const COLUMNS: [&str; 9] =
    ["when", "actor", "credential", "address", "action", "target", "tenant", "outcome", "detail"];

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    super::access::may_operate(&cx.caller)?;
    let found = AuditRequest::of(&cx.shared, &cx.query)?.read(&cx.shared).await?;
    let given = |name: &str| cx.parameter(name).unwrap_or_default();
    let content = html! {
        (heading(&html! { "Audit" }, &html! {}))
        form class="filters" {
            label { "from" input name="from" value=(given("from")) placeholder="2026-11-18T00:00:00Z" autocomplete="off"; }
            label { "to" input name="to" value=(given("to")) placeholder="2026-11-19T00:00:00Z" autocomplete="off"; }
            label { "action" input name="action" value=(given("action")) placeholder="key. or login" autocomplete="off"; }
            label { "tenant" input name="tenant" value=(given("tenant")) autocomplete="off"; }
            button type="submit" { "Filter" }
        }
        @if found.rows.is_empty() { (empty("No audit record matches on this page.", None)) } @else { (table(cx, &found.rows)) }
        @if let Some(next) = &found.next {
            p { a rel="next" href={ (ROOT) "/audit" (next_query(&cx.shared, &cx.query, next)) } { "Older" } }
        }
        p class="faint" { "Key and secret changes, operations on projections, migrations and logins. " code { "statehouse audit export" } " writes all of it." }
    };
    Ok(ConsolePage { title: "Audit", place: &format!("{ROOT}/audit"), content }.show(cx))
}

fn table(cx: &ConsoleContext, rows: &[AuditRow]) -> Markup {
    let text = |text: &Option<String>| {
        html! { @match text { Some(text) => (text), None => span class="null" { "–" } } }
    };
    html! {
        div class="scroll" tabindex="0" role="region" aria-label="Audit" { table data-rows="" {
            thead { tr { @for name in COLUMNS { th scope="col" { (name) } } } }
            tbody { @for row in rows { tr data-key=(row.id) {
                td { (time(row.at, cx.now)) }
                td { (text(&row.actor)) }
                td class="mono" { (row.credential) }
                td class="mono" { (text(&row.peer)) }
                td { b { (row.action) } @if row.count > 1 { " × " (row.count) } }
                td class="mono" { (text(&row.target)) }
                td { (text(&row.tenant)) }
                td { (outcome(&row.outcome)) }
                td { (text(&row.detail)) }
            } } }
        } }
    }
}

fn outcome(name: &str) -> Markup {
    let kind = match name {
        "done" => StateKind::Ok,
        "begun" => StateKind::Waiting,
        _ => StateKind::Failed,
    };
    mark(kind, name)
}
