//! `/v1/batch`: several writes as one atomic plan. Either all of them are applied, or none.

use std::mem::take;

use axum::response::Response;
use http::{HeaderValue, Method, StatusCode};
use serde_json::{Map, Value as Json, json};
use statehouse::action::{Action, Method as ActionMethod, RouteKind};
use statehouse::form::{FieldError, Form, Property};
use statehouse::house::{ActionRef, CallArguments, IF, condition_property};
use statehouse::{Answer, Code, Expected, House, Operation, Refusal, Resource};
use statehouse_store::Type;

use super::call::{TOKEN, digest, location, sealed_token};
use super::routes::{access_of, created_by, created_in};
use super::{HttpRequest, HttpShared, RequestInfo, body, conditions, json_response, path};
use crate::auth::networks::PeerAddress;
use crate::auth::{Access, Caller};
use crate::problem::{Problem, TOO_LARGE};
use crate::usage::StoredRows;

/// One call of a batch.
pub struct BatchCall<'h> {
    /// The resource of its action.
    pub resource: &'h Resource,
    /// The declaration of its action.
    pub declared: &'h Action,
    action: ActionRef,
    arguments: CallArguments,
}

impl BatchCall<'_> {
    /// The full name of its action.
    pub fn name(&self) -> String {
        format!("{}.{}", self.resource.name, self.declared.name)
    }
}

/// Handles a batch.
pub async fn handle(
    shared: &HttpShared,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let caller =
        shared.authenticator.authenticate(&parts.headers, PeerAddress::of(&parts.extensions)).await?;
    let tenant = caller.tenant.clone();
    info.tenant = Some(tenant.clone());
    shared.unsent.check(&caller.tenant)?;
    let admitted = shared.quotas.requests.acquire(&caller, 1)?;
    if parts.method != Method::POST {
        return Err(Problem::method_not_allowed(&["POST"]));
    }
    if let Some((name, _)) = path::pairs(parts.uri.query())?.first() {
        return Err(path::at(name, "a batch takes its input in the body"));
    }
    let id = conditions::idempotency_key(&parts.headers)?;
    let flight = id.as_deref().map(|id| shared.in_flight_keys.begin(&tenant, id)).transpose()?;
    shared.write_rate.check(&tenant)?;
    let memory = shared.quotas.body_bytes.acquire(&caller, 0)?;
    let clock = &**shared.house.clock();
    let body = body::read(&parts.headers, body, shared.bounds(), clock, false, memory).await?;
    let calls = body.json.unwrap_or(Json::Null);
    let mut calls = parse_calls(&shared.house, calls, shared.config.limits.batch_calls)?;
    authorize(&caller, &calls)?;
    let operation = Operation {
        fingerprint: id.as_ref().map_or(String::new(), |_| digest(&parts, &caller, &body.bytes)),
        id,
    };
    let request_bytes = body.bytes.len();
    let created = calls.iter().map(|call| created_by(call.resource, call.declared));
    let created = created.fold(StoredRows::default(), |all, one| StoredRows {
        rows: all.rows + one.rows,
        timers: all.timers + one.timers,
    });
    let deletes =
        !calls.is_empty() && calls.iter().all(|call| call.declared.route.method == ActionMethod::Delete);
    let creation = shared.usage.admit(&tenant, created, deletes)?;
    let answers = submit(shared, &caller, &mut calls, operation, (flight, body.memory, admitted)).await?;
    creation.created(created_in(&answers));
    let token = answers.iter().find_map(|answer| answer.token.clone());
    let token = token.map(|token| sealed_token(shared, &caller.tenant, &token));
    // A call that changes nothing would show its row to a caller that may not read it.
    let shows_row = |call: &BatchCall<'_>| caller.may(Access::Resource(&call.resource.name));
    let results = calls.iter().zip(&answers).map(|(call, answer)| result(call, answer, shows_row(call)));
    let results: Vec<Json> = results.collect();
    let mut response = json_response(StatusCode::OK, &json!(results));
    if let Some(token) = token.and_then(|token| HeaderValue::from_str(&token).ok()) {
        response.headers_mut().insert(TOKEN, token);
    }
    shared.write_rate.charge(&caller.tenant, request_bytes, &response);
    Ok(response)
}

/// Runs a batch in its turn, with the arguments of its calls, which it takes. The guards of its key and quotas are released when its outcome is known.
pub async fn submit(
    shared: &HttpShared,
    caller: &Caller,
    calls: &mut [BatchCall<'_>],
    operation: Operation,
    guards: impl Send + 'static,
) -> Result<Vec<Answer>, Problem> {
    let (house, queue, principal) = (shared.house.clone(), shared.write_queue.clone(), caller.principal());
    let calls: Vec<_> = calls.iter_mut().map(|call| (call.action, take(&mut call.arguments))).collect();
    let write = shared.pending_writes.run(async move {
        let slot = queue.acquire(&principal.tenant).await;
        let answers = house.batch_actions(&principal, calls, operation).await;
        drop((slot, guards));
        answers
    });
    write.await.map_err(|refusal| match refusal.call {
        Some(index) => refused(index, refusal),
        None => Problem::from(refusal),
    })
}

/// Requires the scope of each call.
pub fn authorize(caller: &Caller, calls: &[BatchCall<'_>]) -> Result<(), Problem> {
    for (number, call) in calls.iter().enumerate() {
        let at_call = |mut problem: Problem| {
            problem.call = Some(number);
            problem.detail = format!("call {number}: {}", problem.detail);
            problem
        };
        caller.require(access_of(call.resource, call.declared)).map_err(at_call)?;
        if call.arguments.input.contains_key(IF) {
            // Whether a condition holds says what the row is.
            caller.require(Access::Resource(&call.resource.name)).map_err(at_call)?;
        }
    }
    Ok(())
}

/// Pointer to the member of a call that is neither its key nor in its input.
const BESIDE_INPUT: &str = "/expected_version";
const BESIDE_IF: &str = "/if";

/// The form of one call in a batch.
fn call_properties() -> Vec<Property> {
    vec![
        Property::required("action", Form::Value(Type::Text), "such as profile.update"),
        Property::optional("key", Form::Value(Type::Text), "of the row, as it stands in its path, decoded"),
        Property::optional("input", Form::Any, "what the action takes as its body"),
        Property::optional(
            "expected_version",
            Form::Any,
            "what If-Match says for a single call; \"*\" for any",
        ),
        condition_property(),
    ]
}

/// Parses the calls of a batch.
pub fn parse_calls(house: &House, calls: Json, calls_max: usize) -> Result<Vec<BatchCall<'_>>, Problem> {
    let field_error = |pointer: &str, detail: &str| {
        Problem::from(Refusal::invalid(vec![FieldError { pointer: pointer.into(), detail: detail.into() }]))
    };
    let Json::Array(calls) = calls else { return Err(field_error("", "expected a list of calls")) };
    if calls.is_empty() {
        return Err(field_error("", "expected at least one call"));
    }
    if calls.len() > calls_max {
        let detail = format!("a batch has at most {calls_max} calls; this one has {}", calls.len());
        return Err(Problem::new(TOO_LARGE, detail));
    }
    let form = Form::Object(call_properties());
    calls
        .into_iter()
        .enumerate()
        .map(|(number, call)| {
            let field_errors = form.field_errors(&call);
            if !field_errors.is_empty() {
                return Err(refused_at(number, "", Refusal::invalid(field_errors)));
            }
            parse_call(house, call).map_err(|refusal| refused(number, refusal))
        })
        .collect()
}

fn parse_call(house: &House, call: Json) -> Result<BatchCall<'_>, Refusal> {
    let Json::Object(mut call) = call else {
        return Err(Refusal::new(Code::Internal, "a call was no object"));
    };
    let name = call.get("action").and_then(Json::as_str).unwrap_or_default();
    let action = house.find_action(name)?;
    let (resource, declared) = house.resolve(action)?;
    let key = match call.get("key").and_then(Json::as_str) {
        None => Vec::new(),
        Some(text) => {
            if declared.route.kind == RouteKind::Collection {
                let detail = format!("{name} takes no key beside its input");
                return Err(Refusal::invalid(vec![FieldError { pointer: "/key".into(), detail }]));
            }
            resource.parse_key(text)?
        }
    };
    let mut input = match call.remove("input") {
        None => Map::new(),
        Some(Json::Object(input)) => input,
        Some(_) => {
            let field_error = FieldError { pointer: "/input".into(), detail: "expected an object".into() };
            return Err(Refusal::invalid(vec![field_error]));
        }
    };
    if let Some(condition) = call.remove(IF)
        && input.insert(IF.to_owned(), condition).is_some()
    {
        let detail = "given beside the input and in it".to_owned();
        return Err(Refusal::invalid(vec![FieldError { pointer: BESIDE_IF.into(), detail }]));
    }
    let expected = match call.get("expected_version") {
        None => None,
        Some(Json::String(any)) if any == "*" => Some(Expected::Any),
        Some(version) => {
            Some(Expected::Version(version.as_i64().filter(|version| *version > 0).ok_or_else(|| {
                let detail = "expected an integer from 1 or \"*\"".to_owned();
                // This member is beside the input; the pointers of other refusals are relative to the input.
                Refusal::invalid(vec![FieldError { pointer: BESIDE_INPUT.into(), detail }])
            })?))
        }
    };
    Ok(BatchCall { resource, declared, action, arguments: CallArguments { key, input, expected } })
}

/// A refusal of one call. Its pointers are relative to `input`, except for the key, which is beside it.
fn refused(number: usize, refusal: Refusal) -> Problem {
    refused_at(number, "/input", refusal)
}

fn refused_at(number: usize, below: &str, refusal: Refusal) -> Problem {
    let mut problem = Problem::from(refusal);
    problem.call = Some(number);
    problem.detail = format!("call {number}: {}", problem.detail);
    for (pointer, _) in &mut problem.errors {
        let beside = [BESIDE_INPUT, BESIDE_IF, "/key", "/input"].contains(&pointer.as_str());
        let below = if beside { "" } else { below };
        *pointer = format!("/{number}{below}{pointer}");
    }
    problem
}

fn result(call: &BatchCall<'_>, answer: &Answer, shows_row: bool) -> Json {
    let mut result = Map::new();
    result.insert("action".into(), call.name().into());
    if shows_row {
        result.insert("body".into(), answer.body.clone());
    }
    if let Some(version) = answer.version {
        result.insert("version".into(), version.into());
    }
    if let Some(created) = &answer.created {
        result.insert("location".into(), location(&call.resource.name, created).into());
    }
    Json::Object(result)
}
