//! The log: the newest records of the tenant, by resource, key and operation.

use axum::response::Response;
use maud::html;

use super::access::may_follow;
use super::frame::{ConsolePage, empty, heading, live_region};
use super::history::{event_table, events_of, newest};
use super::{ConsoleContext, ROOT};
use crate::problem::Problem;

/// Events on the page.
const EVENTS_MAX: usize = 100;

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let house = &cx.shared.house;
    let given = |name: &str| cx.parameter(name).map(str::trim).filter(|text| !text.is_empty());
    let (resource, key, operation) = (given("resource"), given("key"), given("operation"));
    let (events, is_trimmed) = match operation {
        Some(operation) => {
            let found = house.store().find_operation(&cx.caller.tenant, operation).await;
            let found = found.map_err(|error| Problem::from(statehouse::Refusal::from(error)))?;
            let mut events = found.map(|record| events_of(cx, &record)).unwrap_or_default();
            events.retain(|event| may_follow(&cx.caller, &event.resource));
            (events, false)
        }
        None => {
            let window = newest(cx, EVENTS_MAX, |event| {
                may_follow(&cx.caller, &event.resource)
                    && resource.is_none_or(|wanted| event.resource == wanted)
                    && key.is_none_or(|wanted| event.key == wanted)
            });
            let window = window.await?;
            (window.events, window.is_trimmed)
        }
    };
    let content = html! {
        (heading(&html! { "Log" }, &html! {}))
        form class="filters" {
            label { "resource"
                select name="resource" {
                    option value="" { "(all)" }
                    @for one in house.resources() { option value=(one.name) selected[Some(one.name.as_str()) == resource] { (one.name) } }
                }
            }
            label { "key" input name="key" value=(key.unwrap_or_default()) autocomplete="off"; }
            label { "operation" input name="operation" value=(operation.unwrap_or_default()) autocomplete="off"; }
            button type="submit" { "Filter" }
        }
        @let table = html! {
            @if events.is_empty() {
                (empty("No record matches in the part of the log that was read.", None))
            } @else { (event_table(&events, cx.now)) }
        };
        (live_region("events", resource.unwrap_or_default(), &table))
        p class="faint" {
            "The newest records of this tenant. A page reads a bounded number of records of each of "
            (house.store().partitions()) " partitions." @if is_trimmed { " Older records were trimmed." }
        }
    };
    Ok(ConsolePage { title: "Log", place: &format!("{ROOT}/log"), content }.show(cx))
}
