//! The blueprint: its text, what it declares, and what the store lacks of it.

use axum::response::Response;
use maud::html;
use statehouse_store::Migrate;

use super::frame::{ConsolePage, heading};
use super::values::{StateKind, mark};
use super::{ConsoleContext, ROOT, action_link, resource_link};
use crate::problem::Problem;

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let house = &cx.shared.house;
    let plan = house.migrate(Migrate::Show).await;
    let source = cx.shared.console.sources.blueprint.as_deref();
    let content = html! {
        (heading(&html! { "Blueprint" }, &html! {}))
        section aria-label="Plan" {
            h2 { "Store" }
            @match &plan {
                Ok(changes) if changes.is_empty() => p { (mark(StateKind::Ok, "The store fits the blueprint.")) },
                Ok(changes) => ul { @for change in changes { li { (change.to_string()) @if change.loses_data() { " " (mark(StateKind::Failed, "loses data")) } } } },
                Err(_) => p { (mark(StateKind::Failed, "The store could not be compared; the server's log says why.")) },
            }
        }
        section aria-label="Resources" {
            h2 { "Resources" }
            div class="scroll" tabindex="0" role="region" aria-label="Resources" { table {
                thead { tr { @for name in ["resource", "archetype", "key", "actions"] { th scope="col" { (name) } } } }
                tbody { @for resource in house.resources() { tr {
                    th scope="row" { a href=(resource_link(&resource.name)) { (resource.name) } }
                    td { (resource.archetype.keyword()) }
                    td class="mono" { @for (name, kind) in &resource.key { (name) " " (kind.to_string()) " " } }
                    td { @for action in resource.actions.iter().filter(|action| cx.may_call(resource, action)) {
                        a href=(action_link(&resource.name, &action.name, None)) { (action.name) } " "
                    } }
                } } }
            } }
        }
        @if let Some(source) = source {
            section aria-label="Source" {
                h2 { "Source" }
                pre tabindex="0" class="lines" { @for (index, line) in source.lines().enumerate() { span class="faint" { (format!("{:>4}  ", index + 1)) } (line) "\n" } }
            }
        }
    };
    Ok(ConsolePage { title: "Blueprint", place: &format!("{ROOT}/blueprint"), content }.show(cx))
}
