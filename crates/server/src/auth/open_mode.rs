//! Open mode: no credentials, only direct requests of local programs.
//!
//! The listener has a loopback address, but two kinds of strangers can still reach it, and both are rejected:
//!
//! - *Web pages in a local browser.* Browsers send `Host`, `Origin` and `Sec-Fetch-Site`, and a page cannot forge them. The
//!   host must be local, which also stops DNS rebinding. The origin must be local or listed in `cors_origins`.
//! - *Clients of a reverse proxy on this machine.* Proxies add forwarding headers. A request with one of them is
//!   rejected, because its sender is unknown.
//!
//! A header that decides about this and is given twice is rejected too: two programs may read different values.

use std::sync::{Arc, LazyLock};

use http::Uri;
use http::header::{FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN, VIA};
use statehouse::audit::AuditActor;
use statehouse::system;
use statehouse_store::Tenant;

use super::{Caller, Scope, TENANT, TENANT_DEFAULT};
use crate::cors;
use crate::problem::{FORBIDDEN, MALFORMED, Problem};

/// Tells where a request of a browser comes from.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Prefix of the headers that most proxies add.
const FORWARDED_PREFIX: &str = "x-forwarded-";
/// Other headers that proxies add.
const PROXY_HEADERS: [HeaderName; 5] = [
    FORWARDED,
    VIA,
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("true-client-ip"),
    HeaderName::from_static("cf-connecting-ip"),
];

/// Checks that a request comes directly from a program on this machine, or from a listed origin.
pub fn check(headers: &HeaderMap, uri: &Uri, listed: &[String]) -> Result<(), Problem> {
    for name in [HOST, TENANT, ORIGIN, SEC_FETCH_SITE] {
        if headers.get_all(&name).iter().nth(1).is_some() {
            return Err(Problem::new(MALFORMED, format!("the header {name} is given twice")));
        }
    }
    if let Some(name) = headers.keys().find(|name| is_proxy_header(name)) {
        let detail = format!(
            "the header {name} says that a proxy forwarded this request, and without credentials this server accepts \
             direct local callers only: switch API keys on (--api-keys) or configure tokens"
        );
        return Err(Problem::new(FORBIDDEN, detail));
    }
    let refuse = |what: &str| {
        let detail =
            format!("without credentials this server accepts local callers only, and {what} is not local");
        Err(Problem::new(FORBIDDEN, detail))
    };
    let host = headers.get(HOST).map(|host| host.to_str().unwrap_or_default());
    if host.is_some_and(|host| !is_local(host)) || uri.host().is_some_and(|host| !is_local(host)) {
        return refuse("this host name");
    }
    match headers.get(ORIGIN) {
        Some(origin) if cors::is_listed(listed, origin) => Ok(()),
        Some(origin) if !is_local_origin(origin) => refuse("this origin"),
        _ if headers.get(SEC_FETCH_SITE).is_some_and(|site| site == "cross-site") => {
            refuse("the site of this request")
        }
        _ => Ok(()),
    }
}

fn is_proxy_header(name: &HeaderName) -> bool {
    name.as_str().starts_with(FORWARDED_PREFIX) || PROXY_HEADERS.contains(name)
}

fn is_local_origin(origin: &HeaderValue) -> bool {
    let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    origin.is_some_and(|(_, host)| is_local(host))
}

/// Whether a host, with or without a port, is a loopback name or address.
fn is_local(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => {
            let (name, rest) = rest.split_once(']').unwrap_or_default();
            (name, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').unwrap_or("none")) })
        }
        None => host.rsplit_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    if port.is_some_and(|port| port.parse::<u16>().is_err()) {
        return false;
    }
    name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// What log and audit say of callers without credentials.
pub fn actor() -> &'static Arc<AuditActor> {
    static ACTOR: LazyLock<Arc<AuditActor>> = LazyLock::new(|| Arc::new(AuditActor::open()));
    &ACTOR
}

/// The caller of a request without credentials.
pub fn caller(headers: &HeaderMap) -> Result<Caller, Problem> {
    let name = match headers.get(TENANT) {
        None => TENANT_DEFAULT,
        Some(name) => name.to_str().unwrap_or_default(),
    };
    let bad = |why: String| Problem::new(MALFORMED, format!("Statehouse-Tenant: {why}"));
    let tenant = Tenant::new(name).map_err(|error| bad(error.to_string()))?;
    if system::is_system(&tenant) {
        return Err(bad("this name is reserved".into()));
    }
    Ok(Caller { scopes: vec![Scope::Admin], ..Caller::anonymous(tenant) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_hosts_are_known_by_name_and_address() {
        for host in
            ["localhost", "LocalHost:80", "127.0.0.1:8080", "127.8.8.8", "[::1]:80", "app.localhost:3000"]
        {
            assert!(is_local(host), "{host}");
        }
        for host in [
            "example.com",
            "localhost.example.com",
            "10.0.0.1:80",
            "[::2]",
            "",
            "127.0.0.1.nip.io",
            "localhost:99999",
            "[::1]x",
        ] {
            assert!(!is_local(host), "{host}");
        }
    }

    #[test]
    fn requests_of_web_pages_are_rejected() {
        let check = |name: HeaderName, value: &'static str| {
            let headers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
            check(&headers, &Uri::from_static("/v1/x"), &["https://app.example".into()]).is_ok()
        };
        assert!(check(HOST, "127.0.0.1:80") && check(ORIGIN, "http://localhost:3000"));
        assert!(check(ORIGIN, "https://app.example") && check(SEC_FETCH_SITE, "same-origin"));
        assert!(
            !check(HOST, "evil.example") && !check(ORIGIN, "https://evil.example") && !check(ORIGIN, "null")
        );
        assert!(!check(SEC_FETCH_SITE, "cross-site"));
    }
}
