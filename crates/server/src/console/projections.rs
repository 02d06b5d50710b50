//! Projections: their generations, how far they are behind, and building them anew.

use axum::response::Response;
use maud::{Markup, html};
use statehouse::Refusal;
use statehouse::infra::log::GroupStatus;
use statehouse::infra::projection::{Generation, Projection, ProjectionStatus};

use super::fields::{SentForm, hidden};
use super::frame::{ConsolePage, empty, heading, live_region};
use super::values::{StateKind, mark, span};
use super::{ConsoleContext, ROOT, capitalized, redirect};
use crate::problem::{MALFORMED, NOT_FOUND, Problem, WRONG_STATE};

fn failed(error: statehouse_store::StoreError) -> Problem {
    Problem::from(Refusal::from(error))
}

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let mut all = Vec::new();
    for projection in cx.shared.house.projections() {
        let status = projection.status().await.map_err(failed)?;
        all.push((projection.name().to_owned(), status));
    }
    let content = html! {
        (heading(&html! { "Projections" }, &html! {}))
        @if all.is_empty() { (empty("The blueprint has no projection; [view.NAME] and [feed.NAME] declare some.", None)) }
        @let body = html! { @for (name, status) in &all { (section(cx, name, status)) } };
        (live_region("projections", "", &body))
    };
    Ok(ConsolePage { title: "Projections", place: &format!("{ROOT}/projections"), content }.show(cx))
}

fn lag(standings: &[GroupStatus]) -> String {
    let records: u64 = standings.iter().map(|one| one.records).sum();
    let behind = standings.iter().map(|one| one.behind).max().unwrap_or_default();
    format!("{records} records ahead, {} behind", span(behind))
}

fn section(cx: &ConsoleContext, name: &str, status: &ProjectionStatus) -> Markup {
    let state = &status.state;
    let number = |generation: &Option<Generation>| {
        generation.as_ref().map_or("–".to_owned(), |one| one.number.to_string())
    };
    let verified = match state.verified {
        Some(true) => mark(StateKind::Ok, "equal to the source"),
        Some(false) => mark(StateKind::Failed, "different from the source"),
        None => mark(StateKind::Over, "not compared while nothing was written"),
    };
    html! {
        section aria-label=(name) {
            h2 { (name) @if status.outdated { " " (mark(StateKind::Failed, "built by another definition")) } }
            table class="fields" { tbody {
                tr { th scope="row" { "live generation" } td { (number(&state.live)) @if state.live.is_some() { ", " (lag(&status.live)) } } }
                tr { th scope="row" { "kept to go back to" } td { (number(&state.previous)) } }
                tr { th scope="row" { "being built" } td {
                    @match &state.building {
                        Some(building) => { (building.generation.number) ", " (mark(StateKind::Waiting, building.phase.name())) ", " (state.scanned) " rows scanned, " (lag(&status.building)) },
                        None => "–",
                    }
                } }
                tr { th scope="row" { "last comparison" } td { (verified) } }
            } }
            @if cx.may_operate() {
                div class="actions" {
                    (form(name, "rebuild", true)) (form(name, "rollback", state.previous.is_some())) (form(name, "drop", state.previous.is_some()))
                }
            }
        }
    }
}

fn form(name: &str, verb: &str, is_possible: bool) -> Markup {
    html! {
        form method="post" action={ (ROOT) "/projections" } class="inline" {
            (hidden("projection", name)) (hidden("do", verb))
            button type="submit" class="quiet" disabled[!is_possible] { (capitalized(verb)) span class="visually-hidden" { " " (name) } }
        }
    }
}

pub(super) async fn submit(cx: &ConsoleContext, sent: &SentForm) -> Result<Response, Problem> {
    cx.require_operator()?;
    let name = sent.required("projection")?;
    let found = cx.shared.house.projections().into_iter().find(|one: &Projection| one.name() == name);
    let projection =
        found.ok_or_else(|| Problem::new(NOT_FOUND, format!("there is no projection {name}")))?;
    let projection = projection.on_behalf_of(&cx.caller.audited(), cx.shared.house.ids());
    let (done, why) = match sent.required("do")? {
        "rebuild" => (projection.rebuild().await, "a generation is being built or deleted already"),
        "rollback" => (projection.roll_back().await, "there is no generation to go back to"),
        "drop" => {
            (projection.drop_previous().await, "there is no former generation, or one is being deleted")
        }
        other => return Err(Problem::new(MALFORMED, format!("{other} is not rebuild, rollback or drop"))),
    };
    match done.map_err(failed)? {
        true => Ok(redirect(&format!("{ROOT}/projections"))),
        false => Err(Problem::new(WRONG_STATE, format!("{name}: {why}"))),
    }
}
