//! Web pages of other origins. Off unless origins are listed; then exactly those may call, with their credentials in
//! the `Authorization` header (no cookies are used, so none are allowed).

use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};

const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE";
const HEADERS: &str = "authorization, content-type, content-encoding, idempotency-key, if-match, if-none-match, \
                       last-event-id, prefer, statehouse-tenant, traceparent, x-request-id";
const EXPOSED: &str = "etag, link, location, preference-applied, retry-after, statehouse-token, x-request-id";

/// Whether an origin is listed.
pub fn is_listed(origins: &[String], origin: &HeaderValue) -> bool {
    origins.iter().any(|listed| listed.as_bytes() == origin.as_bytes())
}

/// The answer to a browser that asks before it calls; `None` if this is not such a question of a listed origin.
pub fn preflight(origins: &[String], method: &Method, headers: &HeaderMap) -> Option<Response> {
    let origin = headers.get(ORIGIN)?;
    let asks = method == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    (asks && is_listed(origins, origin)).then(|| {
        let answer = [
            (ACCESS_CONTROL_ALLOW_METHODS, METHODS),
            (ACCESS_CONTROL_ALLOW_HEADERS, HEADERS),
            (ACCESS_CONTROL_MAX_AGE, "600"),
        ];
        (StatusCode::NO_CONTENT, answer).into_response()
    })
}

/// Lets a page of a listed origin see the answer.
pub fn allow(origins: &[String], origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
    if origins.is_empty() {
        return;
    }
    headers.append(VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin.filter(|origin| is_listed(origins, origin)) {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    }
}
