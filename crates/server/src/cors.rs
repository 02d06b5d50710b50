//! Cross-origin requests. Off unless origins are listed; then exactly those may call, with their credentials in the
//! `Authorization` header. The server uses no cookies and allows none.

use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};

const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE";
const HEADERS: &str = "authorization, content-type, content-encoding, idempotency-key, if-match, if-none-match, \
                       last-event-id, prefer, statehouse-tenant, traceparent, x-request-id";
const EXPOSED: &str =
    "etag, link, location, preference-applied, retry-after, statehouse-now, statehouse-token, x-request-id";

/// Whether an origin is listed.
pub fn is_listed(origins: &[String], origin: &HeaderValue) -> bool {
    origins.iter().any(|listed| listed.as_bytes() == origin.as_bytes())
}

/// The response to a preflight request of a listed origin; `None` for every other request.
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

/// Adds the headers that let a page of a listed origin read the response.
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
