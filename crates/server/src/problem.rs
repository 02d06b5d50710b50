//! Problems (RFC 9457): every response that is not a success, from one catalogue.
//!
//! A [`ProblemKind`] has a stable code, a status, and a page that explains it. Only this module maps refusals of the house to HTTP
//! statuses. A [`Problem`] is one occurrence. A handler returns it, and [`crate::http`] adds the ids of the request.

use std::ops::{Deref, DerefMut};

use axum::response::{IntoResponse, Response};
use http::header::{ALLOW, CONTENT_TYPE, ETAG, RETRY_AFTER};
use http::{HeaderName, HeaderValue, StatusCode};
use serde_json::{Map, Value as Json, json};
use statehouse::{Code, Refusal};

/// A kind of problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProblemKind {
    /// The stable code.
    pub code: &'static str,
    /// The status.
    pub status: u16,
    /// Short, stable title.
    pub title: &'static str,
    /// What it means and what to do.
    pub advice: &'static str,
}

macro_rules! kinds {
    (
        refusals { $($variant:ident => $refusal:ident, $refusal_status:literal, $refusal_title:literal, $refusal_advice:literal;)* }
        requests { $($request:ident = $code:literal, $status:literal, $title:literal, $advice:literal;)* }
    ) => {
        $(
            #[doc = $refusal_title]
            pub const $refusal: ProblemKind = ProblemKind {
                code: Code::$variant.name(),
                status: $refusal_status,
                title: $refusal_title,
                advice: $refusal_advice,
            };
        )*
        $(
            #[doc = $title]
            pub const $request: ProblemKind = ProblemKind { code: $code, status: $status, title: $title, advice: $advice };
        )*

        /// Every kind.
        pub const ALL: &[ProblemKind] = &[$($refusal,)* $($request,)*];

        /// The kind of a refusal. The compiler checks that every code has one.
        pub const fn kind_of(code: Code) -> ProblemKind {
            match code { $(Code::$variant => $refusal,)* }
        }
    };
}

kinds! {
    // Refusals of the house, by their code.
    refusals {
        InvalidInput => INVALID_INPUT, 400, "Invalid input",
            "The body, the query or the key does not have the form that the action takes. `errors` names each place with a \
             JSON pointer. Correct them; nothing was written.";
        NotFound => NOT_FOUND, 404, "Not found",
            "No resource, action or row has this name for this caller. Rows of other tenants are reported the same way.";
        AlreadyExists => ALREADY_EXISTS, 409, "Already exists",
            "A row with this key exists. Read it, or choose another key. With `If-None-Match: *` the status is 412.";
        Forbidden => FORBIDDEN, 403, "Forbidden",
            "The key or token does not have the scope that the call needs, its claims do not fulfil the rule of the action, or \
             the request comes from an origin that may not call this server.";
        InvalidSignature => INVALID_SIGNATURE, 401, "Invalid signature",
            "The message is not signed with a secret of the endpoint, or was signed too long ago. Check the secret and the clock of \
             the sender, and sign the message again. Nothing was written.";
        Held => HELD, 409, "Held by another holder",
            "Another holder has it. Wait until it is released or has expired, for example with `If-None-Match` and \
             `Prefer: wait` on a read of it, and acquire it then.";
        NotHolder => NOT_HOLDER, 409, "Not the holder",
            "It was released, or another holder acquired it after it had expired. Stop the work that depends on it. To \
             continue, acquire it again, under a new epoch.";
        Expired => EXPIRED, 409, "Expired",
            "It expired before the request arrived. Nothing was written. Stop the work that depends on it, and start again.";
        WrongState => WRONG_STATE, 409, "Wrong state",
            "The action does not start from the state that the row is in. Read the row to see its state.";
        OutOfStock => OUT_OF_STOCK, 409, "Out of stock",
            "Less is available than the call wants. The message has the row and the number that is available. Ask for less, or try \
             again when stock was added or a reservation has ended. Nothing was written.";
        NotDeleted => NOT_DELETED, 409, "Not deleted",
            "Only a deleted row can be restored.";
        ConditionFailed => CONDITION_FAILED, 412, "Condition failed",
            "The condition that the caller put on the row with `if` does not hold. The message has the part that failed and the \
             current values; `current_version` and the `ETag` give the version of the row. Nothing was written.";
        TooLow => TOO_LOW, 409, "Too low",
            "The bid is below the least amount that is accepted now. The message has that amount: bid it, or more.";
        OutOfRange => OUT_OF_RANGE, 409, "Out of range",
            "The number that the change would lead to cannot be stored. Nothing was written.";
        NotUnique => NOT_UNIQUE, 409, "Not unique",
            "Another row has this value, and one at most may have it. `errors` names the fields. Choose another value, or change \
             or delete the row that has it. Nothing was written.";
        MissingReference => MISSING_REFERENCE, 409, "Missing reference",
            "A field refers to a row that does not exist or was deleted. `errors` names the field. Create or restore that row \
             first, or refer to another. Nothing was written.";
        Referenced => REFERENCED, 409, "Referenced by other rows",
            "Other rows refer to this one, so it cannot be deleted. The message says how many, and of which resource. Delete \
             or change them first. Nothing was written.";
        OperationFenced => OPERATION_FENCED, 409, "Operation fenced",
            "The idempotency key was fenced before the write was applied, so the write will never be applied. Use a new key.";
        Deleted => DELETED, 410, "Deleted",
            "The row was deleted. It is kept and can be restored.";
        Erased => ERASED, 410, "Erased",
            "The write was applied under this idempotency key, and its answer was erased with the row. Nothing was written now. Read the \
             row to see whether there is one.";
        VersionConflict => VERSION_CONFLICT, 412, "Version conflict",
            "Another caller changed the row first. `current_version` and the `ETag` give the version that it is at: read it, \
             merge, and retry.";
        TooLarge => TOO_LARGE, 413, "Too large",
            "The request or its result is larger than any engine can hold. The message has the limit. Nothing was written.";
        OperationReused => OPERATION_REUSED, 422, "Idempotency key reused",
            "The idempotency key was used for another request. A key stands for one request: use a new one.";
        VersionRequired => VERSION_REQUIRED, 428, "Version required",
            "The action overwrites what other callers may have written. Send `If-Match` with the `ETag` of the row as you \
             read it, or `If-Match: *` to overwrite any version.";
        Internal => INTERNAL, 500, "Internal error",
            "A defect of the server. Quote `request_id` when you report it.";
        Contended => CONTENDED, 503, "Too much contention",
            "Too many callers write this row; the server tried several times. Repeat the request after a moment.";
        OutcomeUnknown => OUTCOME_UNKNOWN, 503, "Outcome unknown",
            "It is not known whether the write was applied. Repeat the request with the same `Idempotency-Key`: it is \
             applied once, and you get its answer. Without a key, read the row to see.";
        Unavailable => UNAVAILABLE, 503, "Service unavailable",
            "The store cannot be reached, or the server is stopping or full. Nothing was done. Repeat the request after a \
             moment.";
        SchemaMismatch => SCHEMA_MISMATCH, 503, "Schema mismatch",
            "Another blueprint was applied to the store while this server runs. Nothing was done. Start the server with the \
             blueprint that was applied, or apply this one again; `statehouse plan` shows the difference.";
    }
    // Requests that do not reach the house.
    requests {
        MALFORMED = "malformed", 400, "Malformed request",
            "A header, the path or the JSON of the body is not well formed. Nothing was written.";
        UNAUTHENTICATED = "unauthenticated", 401, "Authentication required",
            "Send `Authorization: Bearer` with a key of this house or a token of an issuer that it trusts. It must not be \
             expired or revoked.";
        METHOD_NOT_ALLOWED = "method_not_allowed", 405, "Method not allowed",
            "The `Allow` header lists the methods that it takes.";
        REQUEST_TIMEOUT = "request_timeout", 408, "Request timeout",
            "The body took too long to arrive. Send it again, faster or in smaller parts. Nothing was written.";
        OPERATION_IN_PROGRESS = "operation_in_progress", 409, "Operation in progress",
            "The first request with this idempotency key is still running. Repeat the request after a moment: it gets the \
             answer of the first one.";
        TENANT_ROWS = "tenant_rows_limit", 409, "The tenant has too many rows",
            "The tenant has as many rows as the server allows. Nothing was written. Delete rows, or ask the operator for a higher \
             limit (`limits.tenant_rows`); the count is corrected within seconds.";
        TENANT_TIMERS = "tenant_timers_limit", 409, "The tenant has too many timers",
            "The tenant has as many timers as the server allows. Nothing was written. Cancel timers, or ask the operator for a \
             higher limit (`limits.tenant_timers`); the count is corrected within seconds.";
        TENANT_LOG_BYTES = "tenant_log_bytes_limit", 409, "The log has too many bytes of the tenant",
            "The log has as many bytes of the tenant as the server allows. Nothing was written; deletions are still accepted. \
             Records leave the log when its retention has passed, or the operator raises `limits.tenant_log_bytes`.";
        TRIMMED = "trimmed", 410, "Log trimmed",
            "The log no longer contains the events after this cursor. Read the rows again, then follow the log without a \
             cursor.";
        UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type", 415, "Unsupported media type",
            "Send JSON as `application/json` (a patch also as `application/merge-patch+json`), plain or with \
             `Content-Encoding: gzip`.";
        TOO_MANY_REQUESTS = "too_many_requests", 429, "Too many requests",
            "A limit per connection, key or tenant is reached; the message names it. Nothing was done. Repeat the request after \
             the time in `Retry-After`.";
        HEADERS_TOO_LARGE = "headers_too_large", 431, "Headers too large",
            "Send fewer or shorter ones.";
    }
}

/// Field errors in a response; further ones are omitted.
const FIELD_ERRORS_MAX: usize = 20;

/// One occurrence of a problem. Boxed, so that results stay small.
#[derive(Clone, Debug)]
pub struct Problem(Box<Occurrence>);

/// Details of an occurrence.
#[derive(Clone, Debug)]
pub struct Occurrence {
    /// The kind.
    pub kind: ProblemKind,
    /// The status, where it differs from the kind's.
    pub status: Option<StatusCode>,
    /// Message for the caller.
    pub detail: String,
    /// Message for the log only.
    pub cause: Option<String>,
    /// Current version of the row.
    pub current_version: Option<i64>,
    /// Index of the call in a batch, from 0.
    pub call: Option<usize>,
    /// JSON pointers and what is wrong there.
    pub errors: Vec<(String, String)>,
    /// Additional headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Deref for Problem {
    type Target = Occurrence;
    fn deref(&self) -> &Occurrence {
        &self.0
    }
}

impl DerefMut for Problem {
    fn deref_mut(&mut self) -> &mut Occurrence {
        &mut self.0
    }
}

impl Problem {
    /// A problem with a message for the caller.
    pub fn new(kind: ProblemKind, detail: impl Into<String>) -> Problem {
        Problem(Box::new(Occurrence {
            kind,
            status: None,
            detail: detail.into(),
            cause: None,
            current_version: None,
            call: None,
            errors: Vec::new(),
            headers: Vec::new(),
        }))
    }

    /// A defect or failure whose cause only the operator may see. The caller gets the advice.
    pub fn hidden(kind: ProblemKind, cause: impl Into<String>) -> Problem {
        let mut problem = Problem::new(kind, kind.advice);
        problem.cause = Some(cause.into());
        problem
    }

    /// The tables in the store are not those of the house; the cause names the difference.
    pub fn mismatch(cause: impl Into<String>) -> Problem {
        let detail = "another blueprint was applied to the store: start this server with that blueprint, or apply this one again";
        let mut problem = Problem::new(SCHEMA_MISMATCH, detail);
        problem.cause = Some(cause.into());
        problem
    }

    /// A path that does not support the method.
    pub fn method_not_allowed(allowed: &[&str]) -> Problem {
        let list = allowed.join(", ");
        let detail = format!("this path takes {list}");
        Problem::new(METHOD_NOT_ALLOWED, detail).header(ALLOW, &list)
    }

    /// A limit per connection, key or tenant is reached.
    pub fn too_many_requests(detail: impl Into<String>) -> Problem {
        Problem::new(TOO_MANY_REQUESTS, detail).header(RETRY_AFTER, "1")
    }

    /// Adds a header, if its value is valid.
    #[must_use]
    pub fn header(mut self, name: HeaderName, content: &str) -> Problem {
        if let Ok(content) = HeaderValue::from_str(content) {
            self.headers.push((name, content));
        }
        self
    }

    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        self.status
            .or_else(|| StatusCode::from_u16(self.kind.status).ok())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// The problem document, with the ids of the request.
    pub fn document(&self, instance: &str, request_id: &str, trace_id: &str) -> Json {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Json| drop(fields.insert(name.to_owned(), value));
        put("type", format!("/problems/{}", self.kind.code).into());
        put("title", self.kind.title.into());
        put("status", self.status().as_u16().into());
        put("detail", self.detail.as_str().into());
        put("instance", instance.into());
        put("code", self.kind.code.into());
        put("request_id", request_id.into());
        put("trace_id", trace_id.into());
        if let Some(version) = self.current_version {
            put("current_version", version.into());
        }
        if let Some(call) = self.call {
            put("call", call.into());
        }
        if !self.errors.is_empty() {
            let errors = self.errors.iter();
            let errors = errors.map(|(pointer, detail)| json!({"pointer": pointer, "detail": detail}));
            put("errors", errors.collect());
        }
        Json::Object(fields)
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Problem {
        let kind = kind_of(refusal.code);
        let Refusal { message, current_version, field_errors, .. } = refusal;
        let errors = field_errors.into_iter().map(|error| (error.pointer, error.detail)).collect();
        // Messages of a store name files, hosts and tables.
        let mut problem = match refusal.code {
            Code::SchemaMismatch => Problem::mismatch(message),
            Code::Internal | Code::Unavailable | Code::OutcomeUnknown => Problem::hidden(kind, message),
            _ => Problem::new(kind, message),
        };
        problem.current_version = current_version;
        problem.errors = errors;
        problem.errors.truncate(FIELD_ERRORS_MAX);
        if let Some(version) = current_version {
            problem = problem.header(ETAG, &format!("\"{version}\""));
        }
        if kind.status == 503 {
            problem = problem.header(RETRY_AFTER, "1");
        }
        problem
    }
}

/// The page about a kind.
pub fn page(code: &str) -> Option<Response> {
    let kind = ALL.iter().find(|kind| kind.code == code)?;
    let ProblemKind { code, status, title, advice } = kind;
    let advice = markup(advice);
    let html = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title>\n\
         <h1>{title}</h1>\n<p><code>{code}</code>, status {status}</p>\n<p>{advice}</p>\n</html>\n"
    );
    Some(([(CONTENT_TYPE, "text/html; charset=utf-8")], html).into_response())
}

/// Text with `code` in backquotes, as HTML.
fn markup(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;");
    let parts = escaped.split('`').enumerate();
    parts.map(|(n, part)| if n % 2 == 1 { format!("<code>{part}</code>") } else { part.to_owned() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_have_pages() {
        for (n, kind) in ALL.iter().enumerate() {
            assert!(ALL.iter().skip(n + 1).all(|other| other.code != kind.code), "{}", kind.code);
            assert!(page(kind.code).is_some());
            assert!((400..600).contains(&kind.status));
        }
        assert!(page("nonsense").is_none());
    }

    #[test]
    fn what_the_store_said_stays_inside() {
        let refusal = Refusal::new(Code::Unavailable, "host db-7 refused the connection");
        let problem = Problem::from(refusal);
        assert!(!problem.document("/", "r", "t").to_string().contains("db-7"));
        assert_eq!(problem.cause.as_deref(), Some("host db-7 refused the connection"));
    }
}
