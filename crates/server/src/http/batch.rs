//! `/v1/batch`: several writes as one atomic plan. Either all of them are applied, or none.

use axum::response::Response;
use http::{HeaderValue, Method, StatusCode};
use serde_json::{Map, Value as Json, json};
use statehouse::action::Place;
use statehouse::form::{Form, Misfit, Property};
use statehouse::{Answer, Code, Expected, House, Operation, Refusal, Request};
use statehouse_store::Type;

use super::call::{TOKEN, digest, location};
use super::{Request as HttpRequest, RequestInfo, Shared, body, conditions, json_response, path};
use crate::auth::Scope;
use crate::problem::{Problem, TOO_LARGE};

/// Handles a batch.
pub async fn handle(
    shared: &Shared,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let caller = shared.authenticator.authenticate(&parts.headers).await?;
    let tenant = caller.tenant.clone();
    info.tenant = Some(tenant.clone());
    caller.require(Scope::Write)?;
    if parts.method != Method::POST {
        return Err(Problem::method_not_allowed(&["POST"]));
    }
    if let Some((name, _)) = path::pairs(parts.uri.query())?.first() {
        return Err(path::at(name, "a batch takes its input in the body"));
    }
    let id = conditions::idempotency_key(&parts.headers)?;
    let flight = id.as_deref().map(|id| shared.in_flight_keys.begin(&tenant, id)).transpose()?;
    let body = body::read(&parts.headers, body, shared.bounds(), &**shared.house.clock()).await?;
    let calls = body::json(&parts.headers, &body, false)?.unwrap_or(Json::Null);
    let requests = requests(&shared.house, calls, shared.config.limits.batch_calls)?;
    let names: Vec<String> = requests.iter().map(|request| request.action.clone()).collect();
    let operation =
        Operation { fingerprint: id.as_ref().map_or(String::new(), |_| digest(&parts, &body)), id };
    let house = shared.house.clone();
    let write = shared.pending_writes.run(async move {
        let answers = house.batch(&tenant, requests, operation).await;
        drop(flight);
        answers
    });
    let answers = write.await.map_err(|(number, refusal)| match number {
        Some(number) => refused(number, refusal),
        None => Problem::from(refusal),
    })?;
    let token = answers.iter().find_map(|answer| answer.token.clone());
    let results: Vec<Json> = names.iter().zip(&answers).map(|(name, answer)| result(name, answer)).collect();
    let mut response = json_response(StatusCode::OK, &json!(results));
    if let Some(token) = token.and_then(|token| HeaderValue::from_str(&token).ok()) {
        response.headers_mut().insert(TOKEN, token);
    }
    Ok(response)
}

/// Pointer to the member of a call that is neither its key nor in its input.
const BESIDE_INPUT: &str = "/expected_version";

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
    ]
}

/// Parses the calls of a batch.
fn requests(house: &House, calls: Json, calls_max: usize) -> Result<Vec<Request>, Problem> {
    let misfit = |pointer: &str, detail: &str| {
        Problem::from(Refusal::misfits(vec![Misfit { pointer: pointer.into(), detail: detail.into() }]))
    };
    let Json::Array(calls) = calls else { return Err(misfit("", "expected a list of calls")) };
    if calls.is_empty() {
        return Err(misfit("", "expected at least one call"));
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
            let misfits = form.misfits(&call);
            if !misfits.is_empty() {
                return Err(refused_at(number, "", Refusal::misfits(misfits)));
            }
            read_call(house, call).map_err(|refusal| refused(number, refusal))
        })
        .collect()
}

fn read_call(house: &House, call: Json) -> Result<Request, Refusal> {
    let Json::Object(mut call) = call else {
        return Err(Refusal::new(Code::Internal, "a call was no object"));
    };
    let action = call.get("action").and_then(Json::as_str).unwrap_or_default().to_owned();
    let key = match call.get("key").and_then(Json::as_str) {
        None => Vec::new(),
        Some(text) => {
            let (resource, called) = house.action(&action)?;
            if called.route.place == Place::Collection {
                let detail = format!("{action} takes no key beside its input");
                return Err(Refusal::misfits(vec![Misfit { pointer: "/key".into(), detail }]));
            }
            resource.parse_key(text)?
        }
    };
    let input = match call.remove("input") {
        None => Map::new(),
        Some(Json::Object(input)) => input,
        Some(_) => {
            let misfit = Misfit { pointer: "/input".into(), detail: "expected an object".into() };
            return Err(Refusal::misfits(vec![misfit]));
        }
    };
    let expected = match call.get("expected_version") {
        None => None,
        Some(Json::String(any)) if any == "*" => Some(Expected::Any),
        Some(version) => {
            Some(Expected::Version(version.as_i64().filter(|version| *version > 0).ok_or_else(|| {
                let detail = "expected an integer from 1 or \"*\"".to_owned();
                // This member is beside the input; the pointers of other refusals are relative to the input.
                Refusal::misfits(vec![Misfit { pointer: BESIDE_INPUT.into(), detail }])
            })?))
        }
    };
    Ok(Request { action, key, input, expected })
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
        let beside = [BESIDE_INPUT, "/key", "/input"].contains(&pointer.as_str());
        let below = if beside { "" } else { below };
        *pointer = format!("/{number}{below}{pointer}");
    }
    problem
}

fn result(action: &str, answer: &Answer) -> Json {
    let mut result = Map::new();
    result.insert("action".into(), action.into());
    result.insert("body".into(), answer.body.clone());
    if let Some(version) = answer.version {
        result.insert("version".into(), version.into());
    }
    if let Some(created) = &answer.created {
        result.insert("location".into(), location(action, created).into());
    }
    Json::Object(result)
}
