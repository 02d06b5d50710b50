//! The OpenAPI 3.1 document of a house, generated from the declarations that its routes are generated from.
//!
//! It does not depend on the configuration: credentials are optional in it, because the operator decides whether they are
//! required. Every operation has a `default` response, a problem; the refusals of the action are listed with their codes.

use http::StatusCode;
use serde_json::{Map, Value as Json, json};
use statehouse::action::{Action, ActionHandler, Method, RouteKind};
use statehouse::form::{Form, Property};
use statehouse::house::{IF, condition_property, conditioned};
use statehouse::inbound::InboundEndpoint;
use statehouse::{Code, House, Resource};
use statehouse_store::{Type, limits};

use crate::problem::{self, ProblemKind};

/// The document.
pub fn document(house: &House) -> Json {
    let mut paths: Map<String, Json> = Map::new();
    let mut schemas: Map<String, Json> = Map::new();
    schemas.insert("Problem".into(), problem_schema());
    let call = batch_call_schema(house, &mut schemas);
    schemas.insert("BatchCall".into(), call);
    schemas.insert("BatchResult".into(), batch_result_schema());
    for resource in house.resources() {
        for action in &resource.actions {
            let entry = paths.entry(action.path(&resource.name, "{key}")).or_insert_with(|| json!({}));
            if let Some(entry) = entry.as_object_mut() {
                let operation = operation(resource, action, &mut schemas);
                entry.insert(action.route.method.name().to_ascii_lowercase(), operation);
            }
        }
    }
    for endpoint in house.inbound() {
        paths.insert(endpoint.path(), json!({"post": inbound_operation(endpoint)}));
    }
    paths.insert("/v1/batch".into(), json!({"post": batch_operation()}));
    paths.insert("/v1/events".into(), json!({"get": events_operation(house)}));
    paths.insert(
        "/healthz".into(),
        json!({"get": probe("health", "Whether the server and its store answer.")}),
    );
    paths.insert("/livez".into(), json!({"get": probe("live", "Whether the process answers.")}));
    paths.insert("/readyz".into(), json!({"get": probe("ready", "Whether new requests are welcome.")}));
    let mut tags: Vec<Json> = house
        .resources()
        .iter()
        .map(|resource| json!({"name": resource.name, "description": resource.archetype.name}))
        .collect();
    if !house.inbound().is_empty() {
        tags.push(json!({"name": "inbound", "description": "Signed messages of other systems"}));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": house.name(),
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Made from the actions of the house. Problems are described below /problems/{code}.",
        },
        "servers": [{"url": "/"}],
        "tags": tags,
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of this house (sth_…) or a token of an issuer that it trusts. An operation lists \
                        the narrowest scope that permits it; RESOURCE:read, RESOURCE:write, RESOURCE:*, read, write and \
                        admin include it. A batch needs the scope of each of its calls.",
                },
            },
            "parameters": parameters(),
            "headers": headers(),
        },
    })
}

/// A signed message from another system. It needs no credential.
fn inbound_operation(endpoint: &InboundEndpoint) -> Json {
    let header = |(name, about): (String, &str)| json!({"name": name, "in": "header", "required": true, "schema": {"type": "string", "minLength": 1}, "description": about});
    let about = "The message as it was signed: JSON in the form that the sender documents.";
    let mut responses = Map::new();
    let schema = json!({
        "type": "object",
        "required": ["id", "handled"],
        "properties": {
            "id": {"type": "string", "description": "The id of the message."},
            "handled": {"type": "boolean", "description": "Whether the endpoint has an action for such messages."},
        },
    });
    let content = json!({"application/json": {"schema": schema}});
    let description = "The message was verified, and its action was done, now or by an earlier delivery.";
    responses.insert("200".into(), json!({"description": description, "content": content}));
    let codes =
        [Code::InvalidSignature, Code::InvalidInput, Code::TooLarge, Code::OutcomeUnknown, Code::Unavailable];
    let mut kinds: Vec<ProblemKind> =
        codes.into_iter().chain(endpoint.refusals().iter().copied()).map(problem::kind_of).collect();
    kinds.extend([problem::UNSUPPORTED_MEDIA_TYPE, problem::TOO_MANY_REQUESTS]);
    kinds.sort_by_key(|kind| kind.code);
    kinds.dedup();
    responses.extend(problems(&kinds));
    responses.insert("default".into(), any_problem());
    json!({
        "operationId": format!("inbound.{}", endpoint.name()),
        "summary": format!("Receive a signed message of another system, and run {} once for its id.", endpoint.action()),
        "tags": ["inbound"],
        "parameters": endpoint.headers().into_iter().map(header).collect::<Vec<Json>>(),
        "security": [{}],
        "requestBody": {"required": true, "description": about, "content": {"application/json": {"schema": {}}}},
        "responses": responses,
    })
}

/// `ProfileUpdate` for `profile` and `update`.
fn schema_name(resource: &str, action: &str) -> String {
    let words = resource.split('_').chain(action.split('_'));
    let capital = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect::<String>()
    };
    words.map(capital).collect()
}

fn reference(section: &str, name: &str) -> Json {
    json!({"$ref": format!("#/components/{section}/{name}")})
}

/// A schema, moved to the components if it is an object.
fn named(schemas: &mut Map<String, Json>, name: &str, form: &Form) -> Json {
    match form {
        Form::Object(_) => {
            schemas.entry(name.to_owned()).or_insert_with(|| form.schema());
            reference("schemas", name)
        }
        Form::List(item) => json!({"type": "array", "items": named(schemas, name, item)}),
        other => other.schema(),
    }
}

fn operation(resource: &Resource, action: &Action, schemas: &mut Map<String, Json>) -> Json {
    let writes = action.is_write();
    let mut parameters = Vec::new();
    if action.route.kind != RouteKind::Collection {
        parameters.push(key_parameter(resource));
    }
    if writes {
        parameters.push(reference("parameters", "IdempotencyKey"));
        let condition = match (creates(action), action.needs_version) {
            (true, _) => "IfNoneMatchAny",
            (false, true) => "RequiredIfMatch",
            (false, false) => "IfMatch",
        };
        parameters.push(reference("parameters", condition));
        if conditioned(resource, action).is_some() {
            parameters.push(reference("parameters", "Condition"));
        }
    } else {
        for property in &action.input {
            parameters.push(json!({
                "name": property.name,
                "in": "query",
                "required": property.required,
                "schema": property.form.schema(),
                "description": property.about,
            }));
        }
        if action.route.kind == RouteKind::Item {
            parameters.push(reference("parameters", "IfNoneMatch"));
            parameters.push(reference("parameters", "Prefer"));
        }
    }
    let mut operation = json!({
        "operationId": format!("{}.{}", resource.name, action.name),
        "summary": action.summary,
        "description": format!("{} ({}): {}.", action.target, action.shape, action.mechanism),
        "tags": [resource.name],
        "parameters": parameters,
        "security": security(&format!("{}:{}", resource.name, action.name)),
        "responses": responses(resource, action, writes, schemas),
    });
    let input = body_properties(resource, action);
    if writes && !input.is_empty() {
        let is_required =
            input.iter().any(|property| property.required) || !is_conditional_post(resource, action);
        let name = schema_name(&resource.name, &action.name);
        let schema = named(schemas, &name, &Form::Object(input));
        let mut content = json!({"application/json": {"schema": schema}});
        if action.route.method == Method::Patch
            && let Some(content) = content.as_object_mut()
        {
            content.insert("application/merge-patch+json".into(), json!({"schema": schema}));
        }
        put(&mut operation, "requestBody", json!({"required": is_required, "content": content}));
    }
    operation
}

/// What an operation needs: no credential in open mode, otherwise this scope or one that includes it.
fn security(scope: &str) -> Json {
    json!([{}, {"bearer": [scope]}])
}

/// Whether an action takes a condition in its body: those of `PUT` and `PATCH` are the row itself.
fn is_conditional_post(resource: &Resource, action: &Action) -> bool {
    action.route.method == Method::Post && conditioned(resource, action).is_some()
}

/// What the body of a single call has.
fn body_properties(resource: &Resource, action: &Action) -> Vec<Property> {
    let is_declared = action.input.iter().any(|property| property.name == IF);
    let adds = is_conditional_post(resource, action) && !is_declared;
    action.input.iter().cloned().chain(adds.then(condition_property)).collect()
}

/// Whether an action creates a row whose key is part of its input.
fn creates(action: &Action) -> bool {
    action.is_write() && action.route.method == Method::Post && action.route.kind == RouteKind::Collection
}

fn put(object: &mut Json, name: &str, value: Json) {
    if let Some(object) = object.as_object_mut() {
        object.insert(name.to_owned(), value);
    }
}

fn responses(resource: &Resource, action: &Action, writes: bool, schemas: &mut Map<String, Json>) -> Json {
    let schema = named(schemas, &schema_name(&resource.name, ""), &action.output);
    let creates = creates(action);
    let mut headers = Map::new();
    let mut header =
        |name: &str, component: &str| drop(headers.insert(name.to_owned(), reference("headers", component)));
    if action.route.kind != RouteKind::Collection || creates {
        header("ETag", "ETag");
    }
    if creates {
        header("Location", "Location");
    }
    if writes {
        header("Statehouse-Token", "Token");
    }
    if !writes && resource.has_times() {
        header("Statehouse-Now", "Now");
    }
    if matches!(action.output, Form::List(_)) {
        header("Link", "Link");
    }
    let mut responses = Map::new();
    let status = if creates { "201" } else { "200" };
    let success = json!({
        "description": if creates { "It was created." } else { "It was done." },
        "headers": headers,
        "content": {"application/json": {"schema": schema}},
    });
    responses.insert(status.into(), success);
    if !writes && action.route.kind == RouteKind::Item {
        responses.insert("304".into(), json!({"description": "The caller holds this version."}));
    }
    let mut codes: Vec<Code> = action.refusals.to_vec();
    codes.push(Code::InvalidInput);
    if writes {
        codes.extend([Code::OperationReused, Code::TooLarge]);
        if action.needs_version {
            codes.push(Code::VersionRequired);
        }
    }
    let mut kinds: Vec<ProblemKind> = codes.into_iter().map(problem::kind_of).collect();
    if writes {
        kinds.extend([
            problem::OPERATION_IN_PROGRESS,
            problem::OPERATION_FENCED,
            problem::UNSUPPORTED_MEDIA_TYPE,
        ]);
    }
    for (status, response) in problems(&kinds) {
        responses.insert(status, response);
    }
    responses.insert("default".into(), any_problem());
    Json::Object(responses)
}

/// The responses for these kinds of problems, by status.
fn problems(kinds: &[ProblemKind]) -> Vec<(String, Json)> {
    let mut statuses: Vec<u16> = kinds.iter().map(|kind| kind.status).collect();
    statuses.sort_unstable();
    statuses.dedup();
    statuses
        .into_iter()
        .map(|status| {
            let codes: Vec<&str> =
                kinds.iter().filter(|kind| kind.status == status).map(|kind| kind.code).collect();
            let reason = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
            let description = format!("{}: {}.", reason.unwrap_or("Problem"), codes.join(", "));
            (status.to_string(), json!({"description": description, "content": problem_content()}))
        })
        .collect()
}

fn problem_content() -> Json {
    json!({"application/problem+json": {"schema": reference("schemas", "Problem")}})
}

fn any_problem() -> Json {
    json!({"description": "Any other problem.", "content": problem_content()})
}

fn key_parameter(resource: &Resource) -> Json {
    let (schema, about) = match resource.key.as_slice() {
        [(name, Type::Text)] => {
            (json!({"type": "string", "minLength": 1, "pattern": "^[^,\\u0000]+$"}), format!("{name} (text)"))
        }
        [(name, kind)] => (Form::Value(*kind).schema(), format!("{name} ({kind})")),
        parts => {
            let names: Vec<String> = parts.iter().map(|(name, kind)| format!("{name} ({kind})")).collect();
            let about = format!(
                "{}, with commas between them; within a part %2C stands for a comma and %25 for a percent sign",
                names.join(", ")
            );
            let patterns: Vec<&str> = parts.iter().map(|(_, kind)| part_pattern(*kind)).collect();
            let pattern = format!("^{}$", patterns.join(","));
            (json!({"type": "string", "minLength": 1, "pattern": pattern}), about)
        }
    };
    json!({"name": "key", "in": "path", "required": true, "schema": schema, "description": about})
}

/// Pattern of one part of a composite key.
fn part_pattern(kind: Type) -> &'static str {
    match kind {
        Type::Text => "[^,\\u0000]+",
        Type::Int => "(0|-?[1-9][0-9]{0,17})",
        Type::Float => "-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,9})?",
        Type::Bool => "(true|false)",
        Type::Bytes => "([A-Za-z0-9+/]{4})+",
        Type::Time => "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]{1,6})?Z",
        Type::Json => "[^,]+",
    }
}

fn parameters() -> Json {
    let header = |name: &str, required: bool, schema: Json, about: &str| json!({"name": name, "in": "header", "required": required, "schema": schema, "description": about});
    let etag = json!({"type": "string", "minLength": 1, "pattern": r#"^(\*|"[1-9][0-9]{0,17}")$"#});
    json!({
        "IdempotencyKey": header(
            "Idempotency-Key", false,
            json!({
                "type": "string",
                "minLength": 1,
                "pattern": r#"^([!#-~][!-~]{0,254}|"([ !#-\[\]-~]|\\["\\]){1,255}")$"#,
            }),
            "Names this write. A repetition with the same key gets the first answer and writes nothing. It is \
             remembered as long as the log keeps the write.",
        ),
        "Condition": {
            "name": IF,
            "in": "query",
            "required": false,
            "schema": {"type": "string"},
            "description": condition_property().about,
            "example": "version < 9",
        },
        "IfMatch": header("If-Match", false, etag.clone(), "The version that was seen, or * for any."),
        "RequiredIfMatch": header("If-Match", true, etag, "The version that was seen, or * for any."),
        "IfNoneMatch": header(
            "If-None-Match", false,
            json!({"type": "string", "examples": ["\"3\""]}),
            "A version that the caller holds: 304 while the row is at it. What is no entity tag matches nothing.",
        ),
        "IfNoneMatchAny": header(
            "If-None-Match", false,
            json!({"type": "string", "examples": ["*"]}),
            "`*`: the row must be new, and one that exists is answered with 412 and not with 409.",
        ),
        "Prefer": header(
            "Prefer", false,
            json!({"type": "string", "examples": ["wait=5"]}),
            "With If-None-Match, `wait=5`: the seconds to wait for another version.",
        ),
    })
}

fn headers() -> Json {
    let text = |about: &str| json!({"description": about, "schema": {"type": "string"}});
    json!({
        "ETag": {"description": "The row's version.", "schema": {"type": "string", "pattern": "^\"[0-9]+\"$"}},
        "Location": text("The path of the row."),
        "Token": text("For a cached read that has to see this write: its parameter `after`."),
        "Now": {
            "description": "The time by which deadlines are judged, in milliseconds since 1970.",
            "schema": {"type": "integer", "format": "int64"},
        },
        "Link": text("The next page, with rel=\"next\", if there is one."),
    })
}

fn problem_schema() -> Json {
    let codes: Vec<&str> = problem::ALL.iter().map(|kind| kind.code).collect();
    json!({
        "type": "object",
        "description": "RFC 9457.",
        "required": ["type", "title", "status", "detail", "code", "request_id", "trace_id"],
        "properties": {
            "type": {"type": "string", "description": "A page about the problem."},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string", "description": "What happened this time."},
            "instance": {"type": "string"},
            "code": {"type": "string", "enum": codes},
            "request_id": {"type": "string"},
            "trace_id": {"type": "string"},
            "current_version": {"type": "integer", "description": "The row's version as it is."},
            "call": {"type": "integer", "description": "Which call of a batch, from 0."},
            "errors": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["pointer", "detail"],
                    "properties": {
                        "pointer": {"type": "string", "description": "The place, as a JSON pointer."},
                        "detail": {"type": "string"},
                    },
                },
            },
        },
    })
}

/// One call of a batch: a variant for each action, with the input that the action takes.
fn batch_call_schema(house: &House, schemas: &mut Map<String, Json>) -> Json {
    let mut variants = Vec::new();
    for resource in house.resources() {
        for action in
            resource.actions.iter().filter(|action| matches!(action.handler, ActionHandler::Write(_)))
        {
            variants.push(batch_variant(resource, action, schemas));
        }
    }
    if variants.is_empty() {
        return json!({"description": "No resource of this house has an action for a batch.", "not": {}});
    }
    json!({"description": "A write; `action` says which.", "oneOf": variants})
}

fn batch_variant(resource: &Resource, action: &Action, schemas: &mut Map<String, Json>) -> Json {
    let (mut properties, mut required) = (Map::new(), vec!["action"]);
    let name = format!("{}.{}", resource.name, action.name);
    properties.insert("action".into(), json!({"type": "string", "const": name}));
    if action.route.kind != RouteKind::Collection {
        required.push("key");
        let about = "The key of the row, as it stands in its path, decoded.";
        properties.insert("key".into(), json!({"type": "string", "description": about}));
    }
    // The condition is beside the input.
    let (condition, own): (Vec<Property>, Vec<Property>) =
        action.input.iter().cloned().partition(|property| property.name == IF);
    if own.iter().any(|property| property.required) {
        required.push("input");
    }
    if condition.iter().any(|property| property.required) {
        required.push(IF);
    }
    if conditioned(resource, action).is_some() {
        properties.insert(IF.into(), condition_property().schema());
    }
    let named_form = Form::Object(body_properties(resource, action));
    let input = match own.is_empty() {
        true => Form::Object(own).schema(),
        false => named(schemas, &schema_name(&resource.name, &action.name), &named_form),
    };
    properties.insert("input".into(), input);
    if action.needs_version {
        required.push("expected_version");
    }
    let version = json!({
        "description": "What If-Match says for a single call.",
        "oneOf": [{"type": "integer", "minimum": 1}, {"const": "*"}],
    });
    properties.insert("expected_version".into(), version);
    json!({
        "type": "object",
        "required": required,
        "additionalProperties": false,
        "properties": properties,
    })
}

fn batch_result_schema() -> Json {
    json!({
        "type": "object",
        "required": ["action", "body"],
        "properties": {
            "action": {"type": "string"},
            "body": {"description": "What the action gives."},
            "version": {"type": "integer"},
            "location": {"type": "string"},
        },
    })
}

fn batch_operation() -> Json {
    let kinds = [
        problem::INVALID_INPUT,
        problem::NOT_FOUND,
        problem::VERSION_CONFLICT,
        problem::ALREADY_EXISTS,
        problem::TOO_LARGE,
        problem::OPERATION_REUSED,
        problem::VERSION_REQUIRED,
    ];
    let mut responses: Map<String, Json> = problems(&kinds).into_iter().collect();
    let results = json!({"type": "array", "items": reference("schemas", "BatchResult")});
    let success = json!({
        "description": "All calls were done.",
        "headers": {"Statehouse-Token": reference("headers", "Token")},
        "content": {"application/json": {"schema": results}},
    });
    responses.insert("200".into(), success);
    responses.insert("default".into(), any_problem());
    let calls =
        json!({"type": "array", "minItems": 1, "maxItems": 98, "items": reference("schemas", "BatchCall")});
    json!({
        "operationId": "batch",
        "summary": "Run several writes as one: all of them, or none.",
        "description": format!(
            "All calls are one plan. A plan has at most {} operations, its log record included, and its log record at most {} \
             bytes; a larger batch is refused with too_large, as a whole.",
            limits::PLAN_OPERATIONS_MAX,
            limits::ROW_BYTES_MAX,
        ),
        "tags": [],
        "parameters": [reference("parameters", "IdempotencyKey")],
        "requestBody": {"required": true, "content": {"application/json": {"schema": calls}}},
        "responses": responses,
    })
}

fn events_operation(house: &House) -> Json {
    let names: Vec<&str> = house.resources().iter().map(|resource| resource.name.as_str()).collect();
    let kinds = [problem::INVALID_INPUT, problem::TRIMMED];
    let mut responses: Map<String, Json> = problems(&kinds).into_iter().collect();
    let success = json!({
        "description": "A stream of server-sent events; the data of each is a CloudEvent.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    });
    responses.insert("200".into(), success);
    responses.insert("default".into(), any_problem());
    json!({
        "operationId": "events",
        "summary": "Follow what is written.",
        "description": "Events of the resources that the caller may read, or of the one that it names.",
        "tags": [],
        "security": security("*:read"),
        "parameters": [
            {"name": "after", "in": "query", "schema": {"type": "string"}, "description":
                "The id of an event: the stream goes on behind it. `oldest` begins with the oldest that is kept."},
            {"name": "resource", "in": "query", "schema": {"type": "string", "enum": names}, "description":
                "Only events of this resource."},
            {"name": "key", "in": "query", "schema": {"type": "string"}, "description":
                "Only events of the row with this key; `resource` names its resource."},
            {"name": "newest", "in": "query", "schema": {"type": "boolean"}, "description":
                "Only the newest event of each row: those before it are passed over."},
            {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}, "description":
                "As `after`, and it counts more."},
        ],
        "responses": responses,
    })
}

fn probe(id: &str, summary: &str) -> Json {
    json!({
        "operationId": id,
        "summary": summary,
        "tags": [],
        "security": [],
        "responses": {
            "200": {"description": "Yes.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            "default": any_problem(),
        },
    })
}
