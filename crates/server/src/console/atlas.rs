//! The atlas: the archetypes, what fails by default, and what this version does about it.

use axum::response::Response;
use maud::html;
use statehouse::archetypes::Archetype;
use statehouse::atlas::{archetypes, by_keyword};

use super::frame::{ConsolePage, heading};
use super::values::{StateKind, mark};
use super::{ConsoleContext, ROOT, resource_link};
use crate::problem::{NOT_FOUND, Problem};

pub(super) fn page(cx: &ConsoleContext) -> Response {
    let content = html! {
        (heading(&html! { "Atlas" }, &html! {}))
        p { (archetypes().len()) " kinds of state, with their failures and hotspots. " code { "[keyword.NAME]" } " in the blueprint declares one." }
        div class="scroll" tabindex="0" role="region" aria-label="Archetypes" { table data-rows="" {
            thead { tr { @for name in ["code", "archetype", "keyword", "this version", "failures", "hotspots", "declared here"] { th scope="col" { (name) } } } }
            tbody {
                @for entry in archetypes() {
                    @let built: Vec<&Archetype> = Archetype::of_code(&entry.code).collect();
                    tr {
                        td class="mono" { (entry.code) }
                        th scope="row" { a href={ (ROOT) "/atlas/" (entry.keyword()) } { (entry.name) } }
                        td class="mono" { (entry.keyword()) }
                        td { @if built.is_empty() { (mark(StateKind::Over, "not built")) } @else { (mark(StateKind::Ok, "built")) } }
                        td class="number" { (entry.failures.len()) }
                        td class="number" { (entry.hotspots.len()) }
                        td {
                            @for resource in cx.shared.house.resources().iter().filter(|one| one.archetype.code == entry.code) {
                                a href=(resource_link(&resource.name)) { (resource.name) } " "
                            }
                        }
                    }
                }
            }
        } }
    };
    ConsolePage { title: "Atlas", place: &format!("{ROOT}/atlas"), content }.show(cx)
}

pub(super) fn archetype(cx: &ConsoleContext) -> Result<Response, Problem> {
    let keyword = cx.segment(1);
    let entry =
        by_keyword(keyword).ok_or_else(|| Problem::new(NOT_FOUND, format!("the atlas has no {keyword}")))?;
    let built: Vec<&Archetype> = Archetype::of_code(&entry.code).collect();
    let answers = || built.iter().flat_map(|one| one.failures);
    let content = html! {
        (heading(&html! { (entry.name) " " small class="faint" { (entry.code) " " (entry.keyword()) } }, &html! {}))
        p { "States " (entry.states.join(", ")) "; the truth is " (entry.truth.join(", ")) "; actors " (entry.actors.join(", ")) "." }
        h2 { "Failures" }
        table class="fields" { tbody {
            @for failure in &entry.failures { tr {
                th scope="row" { (failure) }
                td { @match answers().find(|answer| answer.failure == *failure) {
                    Some(answer) => { (answer.answer) " " span class="faint" { (answer.held_by) } },
                    None => (mark(StateKind::Over, "not built")),
                } }
            } }
        } }
        h2 { "Hotspots" }
        table class="fields" { tbody {
            @for hotspot in &entry.hotspots { tr {
                th scope="row" { (hotspot) }
                td { @match Archetype::relief_of(entry, hotspot) {
                    Some(relief) => (relief.switch.replace('`', "")),
                    None => (mark(StateKind::Over, "not built")),
                } }
            } }
        } }
        @for one in &built { h2 { "Declaration" } pre tabindex="0" { (one.specimen.trim()) } }
    };
    Ok(ConsolePage { title: &entry.name, place: &format!("{ROOT}/atlas"), content }.show(cx))
}
