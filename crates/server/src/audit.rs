//! `/audit`: the audit for operators, as JSON by pages.
//!
//! It is not below `/v1`, because it belongs to the house and not to a tenant: it needs the scope `admin`, which tells of all tenants,
//! like the list of keys in the console.

use axum::response::Response;
use http::header::{CACHE_CONTROL, LINK};
use http::request::Parts;
use http::{HeaderValue, StatusCode};
use serde_json::json;
use statehouse::Refusal;
use statehouse::audit::{AuditFilter, AuditPage, list};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Cursor, Time};

use crate::auth::Access;
use crate::auth::networks::PeerAddress;
use crate::http::{HttpRequest, HttpShared, RequestInfo, json_response, only_get, path};
use crate::problem::{INTERNAL, Problem};

/// Where it is.
pub(crate) const PATH: &str = "/audit";
/// Rows of a page, if the caller does not say.
const LIMIT: usize = 100;
/// Seal context of cursors.
const CURSORS: &[u8] = b"audit";

/// What a caller asks for.
pub(crate) struct AuditRequest {
    /// Which rows.
    pub filter: AuditFilter,
    /// How many to read.
    pub limit: usize,
    /// Behind which row.
    pub after: Option<Cursor>,
}

impl AuditRequest {
    /// Reads the query of a request.
    pub(crate) fn of(shared: &HttpShared, query: &[(String, String)]) -> Result<AuditRequest, Problem> {
        let mut asked = AuditRequest { filter: AuditFilter::default(), limit: LIMIT, after: None };
        for (name, value) in query.iter().filter(|(_, value)| !value.is_empty()) {
            let time = || value.parse::<Time>().map_err(|error| path::at(name, &error.to_string()));
            match name.as_str() {
                "from" => asked.filter.from = Some(time()?),
                "to" => asked.filter.to = Some(time()?),
                "action" => asked.filter.action = Some(value.clone()),
                "tenant" => asked.filter.tenant = Some(value.clone()),
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=PAGE_MAX).contains(limit));
                    let wrong = || path::at(name, &format!("expected a number from 1 to {PAGE_MAX}"));
                    asked.limit = limit.ok_or_else(wrong)?;
                }
                "cursor" => {
                    let opened = shared.cursors.open(&[CURSORS], value);
                    let cursor = opened.and_then(|text| Cursor::parse(std::str::from_utf8(&text).ok()?).ok());
                    asked.after = Some(cursor.ok_or_else(|| path::at(name, "not a cursor of this list"))?);
                }
                _ => {
                    let detail =
                        "unknown parameter; this path takes from, to, action, tenant, limit and cursor";
                    return Err(path::at(name, detail));
                }
            }
        }
        Ok(asked)
    }

    /// The rows.
    pub(crate) async fn read(self, shared: &HttpShared) -> Result<AuditPage, Problem> {
        let page = list(&**shared.house.store(), &self.filter, self.limit, self.after).await;
        page.map_err(|error| Problem::from(Refusal::from(error)))
    }
}

/// The query of the next page.
pub(crate) fn next_query(shared: &HttpShared, query: &[(String, String)], next: &Cursor) -> String {
    let sealed = shared.cursors.close(&[CURSORS], next.to_string().as_bytes());
    let kept = query.iter().filter(|(name, value)| name != "cursor" && !value.is_empty());
    let kept = kept.map(|(name, value)| format!("{}={}&", path::parameter(name), path::parameter(value)));
    format!("?{}cursor={sealed}", kept.collect::<String>())
}

/// Answers a request.
pub(crate) async fn handle(
    shared: &HttpShared,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (parts, _) = request.into_parts();
    only_get(&parts.method)?;
    let caller =
        shared.authenticator.authenticate(&parts.headers, PeerAddress::of(&parts.extensions)).await?;
    info.tenant = Some(caller.tenant.clone());
    caller.require(Access::Operator)?;
    shared.unsent.check(&caller.tenant)?;
    let _admitted = shared.quotas.requests.acquire(&caller, 1)?;
    respond(shared, &parts).await
}

async fn respond(shared: &HttpShared, parts: &Parts) -> Result<Response, Problem> {
    let query = path::pairs(parts.uri.query())?;
    let page = AuditRequest::of(shared, &query)?.read(shared).await?;
    let mut response = json_response(StatusCode::OK, &json!(page.rows));
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(next) = &page.next {
        let link = format!("<{PATH}{}>; rel=\"next\"", next_query(shared, &query, next));
        let link = HeaderValue::from_str(&link);
        headers.insert(
            LINK,
            link.map_err(|_| Problem::hidden(INTERNAL, "the link is not a header".to_owned()))?,
        );
    }
    Ok(response)
}
