//! The log, read backwards in bounded windows: the newest records first, of one tenant.

use std::time::Duration;

use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::house::{data_of, subject_of};
use statehouse::resource::visible_data;
use statehouse_store::log::partition_of;
use statehouse_store::{OperationStatus, Position, Record, Time};

use super::access::may_operate;
use super::values::{plain, time};
use super::{ConsoleContext, ROOT, row_link};
use crate::http::path;
use crate::problem::Problem;

/// Records that one page looks at, in each partition that it reads.
const WINDOW: u64 = 400;

/// One event of the log.
#[derive(Clone, Debug)]
pub(super) struct LoggedEvent {
    pub position: Option<Position>,
    pub at: Time,
    pub operation: String,
    pub name: String,
    pub resource: String,
    pub key: String,
    pub data: Json,
    pub is_aborted: bool,
    /// Who caused the write. Only operators see it.
    pub actor: Option<String>,
}

impl LoggedEvent {
    /// The row that the write left.
    pub(super) fn row(&self) -> Option<&Map<String, Json>> {
        self.data.get("row").and_then(Json::as_object)
    }
}

/// What of the log was looked at.
#[derive(Clone, Debug, Default)]
pub(super) struct LogWindow {
    /// The newest first.
    pub events: Vec<LoggedEvent>,
    /// Where an older window ends, for each partition that was read; none if there is nothing older.
    pub older: Option<u64>,
    /// Whether records before the window were trimmed.
    pub is_trimmed: bool,
}

fn failed(error: statehouse_store::StoreError) -> Problem {
    Problem::from(statehouse::Refusal::from(error))
}

/// The events of one row, up to an offset.
pub(super) async fn of_row(
    cx: &ConsoleContext,
    resource: &str,
    key: &str,
    up_to: Option<u64>,
) -> Result<LogWindow, Problem> {
    let partitions = cx.shared.house.store().partitions();
    let partition = partition_of(&cx.caller.tenant, resource, key, partitions);
    let mut window = read(cx, partition, up_to).await?;
    window.events.retain(|event| event.resource == resource && event.key == key);
    Ok(window)
}

/// The newest events of all partitions that a filter wants.
pub(super) async fn newest(
    cx: &ConsoleContext,
    limit: usize,
    wanted: impl Fn(&LoggedEvent) -> bool,
) -> Result<LogWindow, Problem> {
    let mut all = LogWindow::default();
    for partition in 0..cx.shared.house.store().partitions() {
        let window = read(cx, partition, None).await?;
        all.is_trimmed |= window.is_trimmed;
        all.events.extend(window.events.into_iter().filter(&wanted));
    }
    all.events.sort_by_key(|event| std::cmp::Reverse((event.at, event.position)));
    all.events.truncate(limit);
    Ok(all)
}

/// The newest records of one partition, up to an offset.
async fn read(cx: &ConsoleContext, partition: u32, up_to: Option<u64>) -> Result<LogWindow, Problem> {
    let (store, tenant) = (cx.shared.house.store(), &cx.caller.tenant);
    let heads = store.wait_log(&[], Duration::ZERO).await.map_err(failed)?;
    let head = heads.get(partition as usize).copied().unwrap_or_default();
    let last = up_to.map_or(head, |up_to| up_to.min(head));
    let after = last.saturating_sub(WINDOW);
    if last == 0 {
        return Ok(LogWindow::default());
    }
    let limit = usize::try_from(last - after).unwrap_or(0);
    let page = store.read_log(partition, after, limit).await.map_err(failed)?;
    let mut window = LogWindow {
        events: Vec::new(),
        older: (after >= page.oldest.max(1)).then_some(after),
        is_trimmed: page.oldest > 1,
    };
    for record in page.records.iter().rev().filter(|record| record.tenant == *tenant) {
        window.events.extend(events_of(cx, record).into_iter().rev());
    }
    Ok(window)
}

/// The events of a record, as the caller sees them.
pub(super) fn events_of(cx: &ConsoleContext, record: &Record) -> Vec<LoggedEvent> {
    let house = &cx.shared.house;
    let sees_actors = may_operate(&cx.caller).is_ok();
    let event = |name: &str, resource: &str, key: &str, data: Json| LoggedEvent {
        actor: None,
        position: record.position,
        at: record.at,
        operation: record.operation.clone(),
        name: name.to_owned(),
        resource: resource.to_owned(),
        key: key.to_owned(),
        data,
        is_aborted: record.status == OperationStatus::Aborted,
    };
    if record.status == OperationStatus::Aborted {
        return vec![event("fenced", "", "", Json::Null)];
    }
    let shown = record.events.iter().filter_map(|one| {
        let (resource, key) = subject_of(record, one)?;
        let data = visible_data(house.resources(), &one.name, data_of(one)).into_owned();
        let actor = one.actor.clone().filter(|_| sees_actors);
        Some(LoggedEvent { actor, ..event(&one.name, resource, key, data) })
    });
    shown.collect()
}

/// The fields that differ between two rows: name, before, after.
pub(super) fn difference<'r>(
    before: Option<&'r Map<String, Json>>,
    after: &'r Map<String, Json>,
) -> Vec<(&'r str, Option<&'r Json>, &'r Json)> {
    let changed = |(name, value): (&'r String, &'r Json)| {
        let earlier = before.and_then(|before| before.get(name));
        let is_same = earlier == Some(value) || (before.is_none() && value.is_null());
        (!is_same).then_some((name.as_str(), earlier, value))
    };
    after.iter().filter_map(changed).collect()
}

/// The history of a row as a timeline, the newest first.
pub(super) fn timeline(events: &[LoggedEvent], now: Time) -> Markup {
    html! {
        ol class="timeline" {
            @for (index, event) in events.iter().enumerate() {
                @let before = events.get(index + 1..).unwrap_or_default().iter().find_map(LoggedEvent::row);
                li {
                    div class="when" {
                        (time(event.at, now)) " " b { (event.name) } " "
                        @if let Some(version) = event.row().and_then(|row| row.get("version")) { "version " (version) " " }
                        @if let Some(actor) = &event.actor { "by " span class="mono" { (actor) } " " }
                        a class="faint mono" href={ (ROOT) "/log?operation=" (path::parameter(&event.operation)) } { (event.operation) }
                    }
                    @match event.row() {
                        Some(row) => (changes(&difference(before, row))),
                        None => @if event.data.as_object().is_some_and(|data| !data.is_empty()) { pre tabindex="0" { (format!("{:#}", event.data)) } },
                    }
                }
            }
        }
    }
}

fn changes(changes: &[(&str, Option<&Json>, &Json)]) -> Markup {
    html! {
        dl class="diff" {
            @for (name, before, after) in changes {
                dt { (name) }
                dd {
                    @if let Some(before) = before { del { (plain(before)) } " " }
                    ins { (plain(after)) }
                }
            }
        }
    }
}

/// A short list of events.
pub(super) fn event_list(events: &[LoggedEvent], now: Time) -> Markup {
    html! {
        ul class="needs" {
            @for event in events {
                li {
                    b { (event.name) } " "
                    @if !event.is_aborted { a class="mono" href=(row_link(&event.resource, &event.key)) { (event.resource) " " (event.key) } " " }
                    span class="faint" { (time(event.at, now)) " " }
                    a class="faint" href={ (ROOT) "/log?operation=" (path::parameter(&event.operation)) } { "record" span class="visually-hidden" { " " (event.operation) } }
                }
            }
        }
    }
}

/// A table of events.
pub(super) fn event_table(events: &[LoggedEvent], now: Time) -> Markup {
    html! {
        div class="scroll" tabindex="0" role="region" aria-label="Records of the log" {
            table data-rows="" {
                thead { tr { th scope="col" { "when" } th scope="col" { "event" } th scope="col" { "row" } th scope="col" { "actor" } th scope="col" { "operation" } th scope="col" { "position" } th scope="col" { "data" } } }
                tbody {
                    @for event in events {
                        tr data-key=(event.operation) {
                            td { (time(event.at, now)) }
                            td { b { (event.name) } }
                            td { @if event.is_aborted { "–" } @else { a class="mono" href=(row_link(&event.resource, &event.key)) { (event.resource) " " (event.key) } } }
                            td class="mono" { @if let Some(actor) = &event.actor { (actor) } @else { span class="null" { "–" } } }
                            td { a class="mono" href={ (ROOT) "/log?operation=" (path::parameter(&event.operation)) } { (event.operation) } }
                            td class="mono" { @if let Some(position) = event.position { (position) } @else { "–" } }
                            td { details { summary class="mono" { "data" } pre tabindex="0" { (format!("{:#}", event.data)) } } }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_difference_names_what_changed() {
        let (before, after) = (json!({"a": 1, "b": 2, "c": null}), json!({"a": 1, "b": 3, "c": null}));
        let (before, after) = (before.as_object().unwrap(), after.as_object().unwrap());
        assert_eq!(difference(Some(before), after), [("b", Some(&json!(2)), &json!(3))]);
        let first: Vec<&str> = difference(None, after).into_iter().map(|(name, _, _)| name).collect();
        assert_eq!(first, ["a", "b"]);
    }
}
