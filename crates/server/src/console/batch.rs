//! Several writes as one plan: a list of calls as JSON, as `/v1/batch` takes it.

use axum::response::Response;
use http::StatusCode;
use maud::{Markup, html};
use serde_json::{Value as Json, json};
use statehouse::Operation;
use statehouse::action::RouteKind;
use statehouse::form::Form;

use super::action_form::problem_text;
use super::fields::{OPERATION, SentForm, hidden};
use super::frame::{ConsolePage, heading};
use super::{ConsoleContext, ROOT};
use crate::http::{batch as calls, path, strict};
use crate::problem::{MALFORMED, OPERATION_IN_PROGRESS, OUTCOME_UNKNOWN, Problem};
use crate::seal::fingerprint;

/// The field with the calls.
const CALLS: &str = "calls";

pub(super) fn page(cx: &ConsoleContext) -> Response {
    show(cx, &example(cx), None, None, StatusCode::OK)
}

/// A first batch: what the first action that creates something takes.
fn example(cx: &ConsoleContext) -> String {
    let mut actions = cx.shared.house.actions();
    let first = actions.find(|(_, resource, action)| {
        action.is_write() && action.route.kind == RouteKind::Collection && cx.may_call(resource, action)
    });
    let Some((_, resource, action)) = first else { return "[]".to_owned() };
    let blank = |form: &Form| match form {
        Form::Range(min, _) => json!(min),
        Form::Value(statehouse_store::Type::Int) => json!(1),
        _ => json!(""),
    };
    let input: serde_json::Map<String, Json> = action
        .input
        .iter()
        .filter(|property| property.required)
        .map(|property| {
            (property.name.clone(), property.example.clone().unwrap_or_else(|| blank(&property.form)))
        })
        .collect();
    format!("{:#}", json!([{"action": format!("{}.{}", resource.name, action.name), "input": input}]))
}

fn show(
    cx: &ConsoleContext,
    text: &str,
    operation: Option<&str>,
    result: Option<Result<Markup, &Problem>>,
    status: StatusCode,
) -> Response {
    let operation = operation.map_or_else(|| cx.shared.house.ids().next(), str::to_owned);
    let content = html! {
        (heading(&html! { "Batch" }, &html! {}))
        p { "Several writes as one plan: all of them are applied, or none. Each call has " code { "action" } ", and as far as the action takes them "
            code { "key" } ", " code { "input" } " and " code { "expected_version" } "." }
        @match result {
            None => {},
            Some(Ok(result)) => (result),
            Some(Err(problem)) => {
                (problem_text(problem))
                ul { @for (pointer, detail) in &problem.errors { li { code { (pointer) } " " (detail) } } }
            }
        }
        form method="post" action={ (ROOT) "/batch" } class="action wide" {
            (hidden(OPERATION, &operation))
            div class="field" {
                label for=(CALLS) { "calls" }
                textarea id=(CALLS) name=(CALLS) rows="14" class="mono" spellcheck="false" { "\n" (text) }
            }
            @if !cx.is_read_only() { button type="submit" { "Run all or none" } }
        }
    };
    ConsolePage { title: "Batch", place: &format!("{ROOT}/batch"), content }.show_as(status, cx)
}

pub(super) async fn submit(cx: &ConsoleContext, sent: &SentForm) -> Result<Response, Problem> {
    cx.require_writable()?;
    let operation = sent.required(OPERATION)?;
    let text = sent.required(CALLS)?;
    match run(cx, sent, text, operation).await {
        Ok(results) => {
            let result = html! {
                p class="done" role="status" { "● All calls were applied." }
                div class="actions" { a class="button quiet" href={ (ROOT) "/log?operation=" (path::parameter(operation)) } { "The record in the log" } }
                pre tabindex="0" { (format!("{results:#}")) }
            };
            Ok(show(cx, text, None, Some(Ok(result)), StatusCode::OK))
        }
        Err(problem) => {
            let is_open = problem.kind == OUTCOME_UNKNOWN || problem.kind == OPERATION_IN_PROGRESS;
            let kept = is_open.then_some(operation);
            Ok(show(cx, text, kept, Some(Err(&problem)), problem.status()))
        }
    }
}

async fn run(cx: &ConsoleContext, sent: &SentForm, text: &str, operation: &str) -> Result<Json, Problem> {
    let (shared, tenant) = (&cx.shared, &cx.caller.tenant);
    let json = strict::read(text)
        .map_err(|error| Problem::new(MALFORMED, format!("the calls are not valid JSON: {error}")))?;
    let mut parsed = calls::parse_calls(&shared.house, json, shared.config.limits.batch_calls)?;
    calls::authorize(&cx.caller, &parsed)?;
    let flight = shared.in_flight_keys.begin(tenant, operation)?;
    shared.write_rate.check(tenant)?;
    let id =
        Operation { id: Some(operation.to_owned()), fingerprint: fingerprint(&[b"batch", text.as_bytes()]) };
    let answers = calls::submit(shared, &cx.caller, &mut parsed, id, flight).await?;
    shared.write_rate.charge(tenant, sent.bytes(), &Response::default());
    let results = parsed.iter().zip(&answers);
    Ok(results
        .map(|(call, answer)| {
            let body = if super::access::may_follow(&cx.caller, &call.resource.name) {
                answer.body.clone()
            } else {
                Json::Null
            };
            json!({"action": call.name(), "version": answer.version, "body": body})
        })
        .collect())
}
