//! Open mode, without credentials: only direct requests of local programs are served.

use crate::support::{Running, Site, cases};

cases![proxied_requests_are_rejected, ambiguous_headers_are_rejected, cross_site_requests_are_rejected];

/// The start of the response to a GET with these header lines.
async fn get(server: &Running, headers: &str) -> String {
    let mut raw = server.raw().await;
    raw.say(format!("GET /v1/profile HTTP/1.1\r\n{headers}connection: close\r\n\r\n")).await;
    raw.rest().await
}

async fn proxied_requests_are_rejected(site: Site) {
    let server = site.server().await;
    for header in [
        "x-forwarded-for: 203.0.113.9",
        "x-forwarded-host: shop.example",
        "x-forwarded-proto: https",
        "x-forwarded-port: 443",
        "x-real-ip: 203.0.113.9",
        "forwarded: for=203.0.113.9",
        "via: 1.1 proxy.example",
        "cf-connecting-ip: 203.0.113.9",
        "true-client-ip: 203.0.113.9",
    ] {
        let reply = get(&server, &format!("host: localhost\r\n{header}\r\n")).await;
        assert!(reply.starts_with("HTTP/1.1 403") && reply.contains("\"forbidden\""), "{header}: {reply}");
        assert!(reply.contains("--api-keys"), "the answer says what to do: {reply}");
    }
    assert!(get(&server, "host: localhost\r\n").await.starts_with("HTTP/1.1 200"));
}

async fn ambiguous_headers_are_rejected(site: Site) {
    let server = site.server().await;
    for headers in [
        "host: localhost\r\nhost: localhost\r\n",
        "host: evil.example\r\nhost: localhost\r\n",
        "host: localhost\r\nstatehouse-tenant: acme\r\nstatehouse-tenant: other\r\n",
    ] {
        let reply = get(&server, headers).await;
        assert!(reply.starts_with("HTTP/1.1 400"), "{headers}: {reply}");
    }
    // The target of the request names a host too. Both must be local.
    let mut raw = server.raw().await;
    raw.say("GET http://evil.example/v1/profile HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await;
    assert!(raw.rest().await.starts_with("HTTP/1.1 403"));
}

async fn cross_site_requests_are_rejected(site: Site) {
    let server = site.server().await;
    let reply = get(&server, "host: localhost\r\nsec-fetch-site: cross-site\r\n").await;
    assert!(reply.starts_with("HTTP/1.1 403") && reply.contains("\"forbidden\""), "{reply}");
    for own in ["same-origin", "same-site", "none"] {
        let reply = get(&server, &format!("host: localhost\r\nsec-fetch-site: {own}\r\n")).await;
        assert!(reply.starts_with("HTTP/1.1 200"), "{own}: {reply}");
    }
    // An origin that the operator listed is cross-site and allowed.
    let config =
        statehouse_server::Config { cors_origins: vec!["https://app.example".into()], ..Default::default() };
    let server = Running::of(server.house.clone(), config).await;
    let listed = "host: localhost\r\norigin: https://app.example\r\nsec-fetch-site: cross-site\r\n";
    assert!(get(&server, listed).await.starts_with("HTTP/1.1 200"));
}
