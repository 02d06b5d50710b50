//! Workers of the house and groups that read the log: who holds what, how far they are, what they have parked.

use axum::response::Response;
use maud::{Markup, html};
use statehouse::infra::log::{GroupInfo, GroupStatus, ParkedRecord};
use statehouse::resource::Consuming;
use statehouse::worker::WorkerStats;
use statehouse::{House, Refusal, Resource};
use statehouse_store::{StoreError, Tenant};

use super::fields::{SentForm, hidden};
use super::frame::{ConsolePage, empty, heading, live_region};
use super::values::{StateKind, mark, span, time};
use super::{ConsoleContext, ROOT, capitalized, redirect, resource_link};
use crate::problem::{MALFORMED, NOT_FOUND, Problem};

/// ParkedRecord records on the page, for each group.
const PARKED_MAX: usize = 100;

fn failed(error: StoreError) -> Problem {
    Problem::from(Refusal::from(error))
}

/// The groups of the house itself.
pub(super) fn group_names(house: &House) -> Vec<String> {
    let consumers = house.resources().iter().flat_map(|resource| &resource.consumers);
    let name = |consuming: &Consuming| match consuming {
        Consuming::Group(handler) => Some(handler.group().to_owned()),
        Consuming::Projection(_) | Consuming::Declared(_) => None,
    };
    consumers.filter_map(name).collect()
}

/// What a group has parked of a tenant.
pub(super) async fn parked(group: &GroupInfo, tenant: &Tenant) -> Result<Vec<ParkedRecord>, Problem> {
    group.parked(tenant).await.map_err(failed)
}

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let house = &cx.shared.house;
    let mut groups = Vec::new();
    for name in group_names(house) {
        let group = house.group(&name);
        let standing = group.status().await.map_err(failed)?;
        let mut parked = parked(&group, &cx.caller.tenant).await?;
        parked.truncate(PARKED_MAX);
        groups.push((name, standing, parked));
    }
    let declared: Vec<&Resource> = house
        .resources()
        .iter()
        .filter(|one| one.consumers.iter().any(|consuming| matches!(consuming, Consuming::Declared(_))))
        .collect();
    let content = html! {
        (heading(&html! { "Workers and groups" }, &html! {}))
        @let body = html! {
            section aria-label="Workers" { h2 { "Workers of this process" } (workers(&house.worker_figures())) }
            section aria-label="Groups of the house" {
                h2 { "Groups of the house" }
                @if groups.is_empty() { p class="faint" { "No resource of this blueprint reads the log in a group of the house." } }
                @for (name, standing, parked) in &groups { (group_section(cx, name, standing, parked)) }
            }
            section aria-label="Declared groups" {
                h2 { "Declared groups" }
                @if declared.is_empty() { p class="faint" { "The blueprint declares none; " code { "[log.NAME]" } " does." } }
                ul class="links" { @for one in declared { li { a href=(resource_link(&one.name)) { (one.name) } ": progress, lag, claim, seek; "
                    a href=(resource_link(&format!("{}_parked", one.name))) { "parked records" } } } }
            }
        };
        (live_region("groups", "", &body))
    };
    Ok(ConsolePage { title: "Workers and groups", place: &format!("{ROOT}/groups"), content }.show(cx))
}

fn workers(figures: &[WorkerStats]) -> Markup {
    if figures.is_empty() {
        return empty("No workers run in this process (--workers off), or the blueprint needs none.", None);
    }
    html! {
        div class="scroll" tabindex="0" role="region" aria-label="Workers" { table data-rows="" {
            thead { tr { @for name in ["worker", "shards held", "steps", "rows", "errors", "lag", "last error"] { th scope="col" { (name) } } } }
            tbody { @for one in figures { tr {
                th scope="row" class="mono" { (one.worker) }
                td class="number" { (one.held) " of " (one.shards) }
                td class="number" { (one.steps) }
                td class="number" { (one.rows) }
                td class="number" { (one.errors) }
                td { (span(one.lag)) }
                td { @match &one.last_error { Some(error) => { (mark(StateKind::Failed, "failed")) " " (error) }, None => span class="null" { "–" } } }
            } } }
        } }
    }
}

fn group_section(
    cx: &ConsoleContext,
    name: &str,
    standing: &[GroupStatus],
    parked: &[ParkedRecord],
) -> Markup {
    html! {
        h3 { (name) }
        div class="scroll" tabindex="0" role="region" aria-label={ "Progress of " (name) } { table {
            thead { tr { @for head in ["partition", "reached", "newest", "ahead", "behind", "missed", ""] { th scope="col" { (head) @if head.is_empty() { span class="visually-hidden" { "seek" } } } } } }
            tbody { @for one in standing { tr {
                th scope="row" class="number" { (one.partition) }
                td class="number" { (one.reached) } td class="number" { (one.head) } td class="number" { (one.records) }
                td { (span(one.behind)) } td class="number" { (one.missed) }
                td { @if cx.may_operate() { (seek_form(name, one)) } }
            } } }
        } }
        @for one in parked {
            div class="notice" {
                (mark(StateKind::Failed, "parked")) " " span class="mono" { (one.subject) } " at " (one.partition) ":" (one.offset) ", "
                (time(one.parked_at, cx.now)) ", tried " (one.tries) " times: " (one.reason)
                @if cx.may_operate() { (parked_form(name, one, "replay")) (parked_form(name, one, "discard")) }
            }
        }
    }
}

fn seek_form(group: &str, one: &GroupStatus) -> Markup {
    html! {
        form method="post" action={ (ROOT) "/groups" } class="inline" {
            (hidden("group", group)) (hidden("partition", &one.partition.to_string())) (hidden("do", "seek"))
            input name="to" value=(one.reached) size="6" aria-label={ "Seek partition " (one.partition) " of " (group) " to offset" };
            button type="submit" class="quiet" { "Seek" }
        }
    }
}

fn parked_form(group: &str, one: &ParkedRecord, verb: &str) -> Markup {
    html! {
        form method="post" action={ (ROOT) "/groups" } class="inline" {
            (hidden("group", group)) (hidden("partition", &one.partition.to_string())) (hidden("do", verb))
            (hidden("subject", &one.subject)) (hidden("offset", &one.offset.to_string()))
            button type="submit" class="quiet" { (capitalized(verb)) }
        }
    }
}

pub(super) async fn submit(cx: &ConsoleContext, sent: &SentForm) -> Result<Response, Problem> {
    cx.require_operator()?;
    let name = sent.required("group")?;
    if !group_names(&cx.shared.house).iter().any(|known| known == name) {
        return Err(Problem::new(NOT_FOUND, format!("the house has no group {name}")));
    }
    let number = |field: &str| -> Result<u64, Problem> {
        sent.required(field)?.parse().map_err(|_| Problem::new(MALFORMED, format!("{field} is a number")))
    };
    let partition = u32::try_from(number("partition")?).unwrap_or(u32::MAX);
    if partition >= cx.shared.house.store().partitions() {
        return Err(Problem::new(NOT_FOUND, "the log has no such partition"));
    }
    let (group, tenant) = (cx.shared.house.group(name), &cx.caller.tenant);
    match sent.required("do")? {
        "seek" => group.seek(partition, number("to")?).await.map_err(failed)?,
        "replay" => {
            group.replay(tenant, partition, sent.required("subject")?).await.map_err(failed)?;
        }
        "discard" => {
            let offset = number("offset")?;
            let found = parked(&group, tenant).await?;
            let one = found.iter().find(|one| one.partition == partition && one.offset == offset);
            let one = one.ok_or_else(|| Problem::new(NOT_FOUND, "this record is not parked any more"))?;
            group.discard(tenant, one).await.map_err(failed)?;
        }
        other => return Err(Problem::new(MALFORMED, format!("{other} is not seek, replay or discard"))),
    }
    Ok(redirect(&format!("{ROOT}/groups")))
}
