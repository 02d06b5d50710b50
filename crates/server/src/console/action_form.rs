//! The form of an action: its fields, what is wrong with them, the answer, and the same call in other languages.
//!
//! A form carries the version of the row as the person saw it, the row itself, and an idempotency key. If the key's outcome is
//! unknown, the form is shown again with the same key; after a definite refusal it gets a new one.

use axum::response::Response;
use http::StatusCode;
use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::action::{Action, Method, RouteKind};
use statehouse::form::Property;
use statehouse::house::{CallArguments, IF};
use statehouse::{Answer, Operation, Resource};

use super::conflict;
use super::fields::{BASE, FieldState, KEY, OPERATION, SentForm, VERSION, field, hidden};
use super::frame::{ConsolePage, heading};
use super::list::data_table;
use super::samples::{SampleCall, samples};
use super::values::{key_in, read_action, rows_in};
use super::{ConsoleContext, ROOT, action_link, capitalized, resource_link, row_link};
use crate::http::{RequestInfo, call, path};
use crate::problem::{INVALID_INPUT, OPERATION_IN_PROGRESS, OUTCOME_UNKNOWN, Problem, VERSION_CONFLICT};
use crate::seal::fingerprint;

/// What a form is filled with.
#[derive(Default)]
pub(super) struct FormState {
    pub key: Option<String>,
    pub version: Option<String>,
    /// The row as the person saw it.
    pub base: Map<String, Json>,
    pub input: Map<String, Json>,
    /// The idempotency key, if the form keeps one.
    pub operation: Option<String>,
}

fn find(cx: &ConsoleContext) -> Result<(&Resource, &Action), Problem> {
    let found = cx.shared.house.action(cx.segment(1))?;
    cx.require_call(found.0, found.1)?;
    Ok(found)
}

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    let (resource, action) = find(cx)?;
    if !action.is_write() {
        return read_page(cx, resource, action).await;
    }
    let key = cx.parameter(KEY).filter(|_| action.route.kind != RouteKind::Collection);
    let mut state = FormState { key: key.map(str::to_owned), ..FormState::default() };
    if let (Some(text), Some(read)) = (key, read_action(resource)) {
        match cx.read(resource, read, resource.parse_key(text)?, Map::new()).await {
            Ok(answer) => {
                state.version =
                    answer.version.filter(|_| action.needs_version).map(|version| version.to_string());
                state.base = answer.body.as_object().cloned().unwrap_or_default();
            }
            Err(problem) if [403, 404, 410].contains(&problem.kind.status) => {}
            Err(problem) => return Err(problem),
        }
    }
    let fields = action.input.iter().filter_map(|property| {
        let current = state.base.get(&property.name).filter(|value| property.nullable || !value.is_null());
        Some((
            property.name.clone(),
            current.or(property.example.as_ref().filter(|_| property.required))?.clone(),
        ))
    });
    state.input = fields.collect();
    Ok(form_page(cx, resource, action, &state, None, StatusCode::OK).await)
}

/// A form, with a problem if there is one.
pub(super) async fn form_page(
    cx: &ConsoleContext,
    resource: &Resource,
    action: &Action,
    state: &FormState,
    problem: Option<&Problem>,
    status: StatusCode,
) -> Response {
    let errors = |name: &str| -> Vec<String> {
        let errors = problem.iter().flat_map(|problem| &problem.errors);
        let below = format!("/{name}/");
        let of_field = errors.filter(|(at, _)| *at == format!("/{name}") || at.starts_with(&below));
        of_field.map(|(_, detail)| detail.clone()).collect()
    };
    let operation = state.operation.clone().unwrap_or_else(|| cx.shared.house.ids().next());
    let form = html! {
        form method="post" action=(action_link(&resource.name, &action.name, None)) class="action" data-action-form="" {
            (hidden(OPERATION, &operation))
            @if !state.base.is_empty() { (hidden(BASE, &Json::Object(state.base.clone()).to_string())) }
            @if let Some(problem) = problem { (problem_text(problem)) }
            @if action.route.kind != RouteKind::Collection { (key_field(resource, state.key.as_deref(), &errors(KEY))) }
            @if action.needs_version { (version_field(state.version.as_deref())) }
            // The form has an operation id of its own, so that a double click is one write.
            @for property in action.input.iter().filter(|one| action.operation_input() != Some(one.name.as_str())) {
                (field(property, &FieldState { value: state.input.get(&property.name).cloned(), errors: errors(&property.name) }))
            }
            button type="submit" { (capitalized(&action.name)) }
        }
    };
    let content = html! {
        (title_of(resource, action))
        p { (action.summary) }
        div class="two" {
            (form)
            div {
                (sample_section(cx, resource, action, state))
                (explanation(cx, resource, action).await)
            }
        }
    };
    show(cx, resource, action, content, status)
}

fn show(
    cx: &ConsoleContext,
    resource: &Resource,
    action: &Action,
    content: Markup,
    status: StatusCode,
) -> Response {
    let title = format!("{}.{}", resource.name, action.name);
    ConsolePage { title: &title, place: &resource_link(&resource.name), content }.show_as(status, cx)
}

fn title_of(resource: &Resource, action: &Action) -> Markup {
    let title =
        html! { (capitalized(&action.name)) " " a href=(resource_link(&resource.name)) { (resource.name) } };
    heading(&title, &html! { span class="faint" { (action.shape) " · " (action.mechanism) } })
}

/// What went wrong, for the whole form.
pub(super) fn problem_text(problem: &Problem) -> Markup {
    html! {
        div class="error" role="alert" {
            p { b { (problem.kind.title) } ": " (problem.detail) }
            @if problem.kind != INVALID_INPUT { p { (problem.kind.advice.replace('`', "")) } }
        }
    }
}

fn key_field(resource: &Resource, key: Option<&str>, errors: &[String]) -> Markup {
    let names: Vec<&str> = resource.key.iter().map(|(name, _)| name.as_str()).collect();
    let kinds: Vec<String> = resource.key.iter().map(|(name, kind)| format!("{name} is {kind}")).collect();
    html! {
        div class="field" {
            label for=(KEY) { "key: " (names.join(",")) }
            input id=(KEY) name=(KEY) value=(key.unwrap_or_default()) required autocomplete="off" aria-describedby="help-key";
            p id="help-key" class="help" { (kinds.join(", ")) ", required" }
            @for error in errors { p class="error" { (error) } }
        }
    }
}

fn version_field(version: Option<&str>) -> Markup {
    html! {
        div class="field" {
            label for=(VERSION) { "version that you have seen" }
            input id=(VERSION) name=(VERSION) value=(version.unwrap_or_default()) required autocomplete="off" aria-describedby="help-version";
            p id="help-version" class="help" { "If-Match: the write is refused if the row has another version by then; * overwrites any version" }
        }
    }
}

fn sample_section(cx: &ConsoleContext, resource: &Resource, action: &Action, state: &FormState) -> Markup {
    samples(&SampleCall {
        origin: &cx.origin,
        resource: &resource.name,
        action,
        key: state.key.as_deref().filter(|_| action.route.kind != RouteKind::Collection),
        version: state.version.as_deref().filter(|_| action.needs_version),
        input: &state.input,
        needs_key: !cx.shared.authenticator.is_open(),
    })
}

/// What engines get for the action, if the program that serves can say it.
async fn explanation(cx: &ConsoleContext, resource: &Resource, action: &Action) -> Markup {
    let explainer = cx.shared.console.sources.explainer.clone();
    let explained = match explainer {
        Some(explainer) => explainer.explain(&format!("{}.{}", resource.name, action.name)).await,
        None => Vec::new(),
    };
    html! {
        @if !explained.is_empty() {
            section class="samples" aria-label="What engines get" {
                h2 { "What engines get" }
                @for (engine, text) in &explained {
                    details { summary { (engine) } pre tabindex="0" { (text) } }
                }
            }
        }
        @if !action.answers.is_empty() {
            p class="faint" { "Answers these failures: " (action.answers.join(", ")) "." }
        }
    }
}

/// An action that reads: its form sends a query, and the answer is below it.
async fn read_page(cx: &ConsoleContext, resource: &Resource, action: &Action) -> Result<Response, Problem> {
    let key = cx.parameter(KEY).filter(|key| !key.is_empty());
    let given: Vec<(String, String)> = cx
        .query
        .iter()
        .filter_map(|(name, value)| Some((name.strip_prefix("f.")?.to_owned(), value.clone())))
        .collect();
    let find = |property: &Property| given.iter().find(|(name, _)| *name == property.name);
    let parse = |property: &Property| {
        let value = super::fields::parse(&find(property)?.1, property)?;
        Some((property.name.clone(), value))
    };
    let input: Map<String, Json> = action.input.iter().filter_map(parse).collect();
    let names_row = action.route.kind != RouteKind::Collection;
    let is_complete = (!names_row || key.is_some())
        && action.input.iter().all(|property| !property.required || input.contains_key(&property.name));
    let answer = match is_complete {
        false => None,
        true => {
            let parsed = match key.filter(|_| names_row) {
                Some(key) => resource.parse_key(key).map_err(Problem::from),
                None => Ok(Vec::new()),
            };
            Some(match parsed {
                Ok(key) => cx.read(resource, action, key, input.clone()).await,
                Err(problem) => Err(problem),
            })
        }
    };
    let state = FormState { key: key.map(str::to_owned), input, ..FormState::default() };
    let content = html! {
        (title_of(resource, action))
        p { (action.summary) }
        div class="two" {
            div {
                form class="action" data-action-form="" {
                    @if names_row { (key_field(resource, key, &[])) }
                    @for property in &action.input {
                        (field(property, &FieldState { value: state.input.get(&property.name).cloned(), errors: Vec::new() }))
                    }
                    button type="submit" { (capitalized(&action.name)) }
                }
                @match &answer {
                    None => {},
                    Some(Err(problem)) => (problem_text(problem)),
                    Some(Ok(answer)) => (answer_section(cx, resource, action, answer)),
                }
            }
            (sample_section(cx, resource, action, &state))
        }
    };
    Ok(show(cx, resource, action, content, StatusCode::OK))
}

fn answer_section(cx: &ConsoleContext, resource: &Resource, action: &Action, answer: &Answer) -> Markup {
    html! {
        section aria-label="Answer" {
            h2 { "Answer" }
            @match rows_in(&answer.body) {
                Some(rows) if rows.iter().all(Json::is_object) && !rows.is_empty() => (data_table(cx, resource, action, rows, "the answer")),
                _ => pre tabindex="0" { (format!("{:#}", answer.body)) },
            }
        }
    }
}

/// Takes a form and performs the action.
pub(super) async fn submit(
    cx: &ConsoleContext,
    sent: SentForm,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (resource, action) = find(cx)?;
    let name = format!("{}.{}", resource.name, action.name);
    info.action = Some(name.as_str().into());
    let operation = sent.required(OPERATION)?.to_owned();
    let base = sent.base().unwrap_or_default();
    let mut input = sent.input(&action.input);
    if action.route.method == Method::Patch {
        // A patch names what changed; an empty one would be refused, so the house gets to say so.
        input.retain(|field, value| base.get(field) != Some(value));
    }
    let mut state = FormState {
        key: sent.text(KEY).map(str::to_owned),
        version: sent.text(VERSION).map(str::to_owned),
        base,
        input: sent.input(&action.input),
        operation: None,
    };
    match perform(cx, resource, action, sent, input, &operation).await {
        Ok((answer, written)) => Ok(done(cx, resource, action, &answer, &written, state.key.as_deref())),
        Err(problem) if problem.kind == VERSION_CONFLICT && state.key.is_some() => {
            conflict::page(cx, resource, action, &state, &problem).await
        }
        Err(problem) => {
            let is_open = problem.kind == OUTCOME_UNKNOWN || problem.kind == OPERATION_IN_PROGRESS;
            state.operation = is_open.then_some(operation);
            Ok(form_page(cx, resource, action, &state, Some(&problem), problem.status()).await)
        }
    }
}

/// Performs a write, bounded as a write over the API is. Returns the answer and the operation id.
async fn perform(
    cx: &ConsoleContext,
    resource: &Resource,
    action: &Action,
    sent: SentForm,
    input: Map<String, Json>,
    operation: &str,
) -> Result<(Answer, String), Problem> {
    let (shared, tenant) = (&cx.shared, &cx.caller.tenant);
    let key = match (action.route.kind, sent.text(KEY)) {
        (RouteKind::Collection, _) => Vec::new(),
        (_, text) => resource.parse_key(text.unwrap_or_default())?,
    };
    let expected = sent.expected()?;
    if input.contains_key(IF) {
        // Whether a condition holds says what the row is.
        super::access::require_follow(&cx.caller, &resource.name)?;
    }
    let flight = shared.in_flight_keys.begin(tenant, operation)?;
    shared.write_rate.check(tenant)?;
    let digest = fingerprint(&[
        cx.segment(1).as_bytes(),
        sent.text(KEY).unwrap_or_default().as_bytes(),
        sent.text(VERSION).unwrap_or_default().as_bytes(),
        Json::Object(input.clone()).to_string().as_bytes(),
    ]);
    let bytes = sent.bytes();
    let arguments = CallArguments { key, input, expected };
    let called = shared.house.find_action_of(&resource.name, &action.name)?;
    let id = Operation { id: Some(operation.to_owned()), fingerprint: digest };
    let answer = call::submit(shared, &cx.caller, called, arguments, id, (flight, sent.memory)).await?;
    shared.write_rate.charge(tenant, bytes, &Response::default());
    Ok((answer, operation.to_owned()))
}

/// The answer to a write, with links to what it left.
fn done(
    cx: &ConsoleContext,
    resource: &Resource,
    action: &Action,
    answer: &Answer,
    operation: &str,
    key: Option<&str>,
) -> Response {
    let of_row =
        answer.created.clone().or_else(|| key.map(str::to_owned)).or_else(|| key_in(resource, &answer.body));
    let may_see = super::access::may_follow(&cx.caller, &resource.name) || answer.token.is_some();
    let content = html! {
        (title_of(resource, action))
        p class="done" role="status" {
            @if answer.token.is_some() { "● Written." } @else { "○ Nothing had to change." }
            @if let Some(version) = answer.version { " The row is at version " (version) "." }
        }
        div class="actions" {
            @if let Some(key) = of_row.filter(|_| read_action(resource).is_some()) {
                a class="button" href=(row_link(&resource.name, &key)) { "Open " (resource.name) " " (key) }
            }
            a class="button quiet" href={ (ROOT) "/log?operation=" (path::parameter(operation)) } { "Its record in the log" }
            a class="button quiet" href=(action_link(&resource.name, &action.name, None)) { (capitalized(&action.name)) " another" }
            a class="button quiet" href=(resource_link(&resource.name)) { (resource.name) }
        }
        @if may_see { (answer_section(cx, resource, action, answer)) }
    };
    show(cx, resource, action, content, StatusCode::OK)
}
