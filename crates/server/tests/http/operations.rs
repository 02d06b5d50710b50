//! What an operator sees: probes, figures, shutdown, failures of the store, TLS.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use statehouse_server::config::Tls;
use statehouse_server::{Config, Server, SetupError};
use tokio::net::TcpListener;

use crate::support::{Running, Site, cases, house_of, house_over};
use crate::trap::{AHEAD, FAIL, PANIC, SOUND, TrapStore, UNKNOWN};

cases![
    probes_and_figures,
    failures_of_the_store_are_told_without_details,
    reads_of_deadlines_tell_the_time_that_decides,
    a_panic_is_answered_and_survived,
    without_credentials_only_loopback,
    stopping_lets_requests_finish,
    stopping_ends_streams_and_waits,
    stopping_does_not_wait_for_ever,
    stopping_waits_for_writes_without_clients,
    two_servers_share_one_secret,
    tls_by_files,
];

async fn probes_and_figures(site: Site) {
    let server = site.server().await;
    for path in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(server.get(path).await.ok(200).body, "ok\n");
    }
    server.create(1).await;
    server.get("/v1/profile/2").await.ok(404);
    server.get("/nowhere/at/all").await.ok(404);
    let figures = server.get("/metrics").await.ok(200);
    assert!(figures.header("content-type").starts_with("text/plain; version=0.0.4"));
    let text = String::from_utf8(figures.body.to_vec()).unwrap();
    for line in [
        "statehouse_http_requests_total{route=\"profile.create\",status=\"201\"} 1",
        "statehouse_http_requests_total{route=\"profile.read\",status=\"404\"} 1",
        "statehouse_http_requests_total{route=\"unmatched\",status=\"404\"} 1",
        "statehouse_problems_total{code=\"not_found\"} 2",
        "statehouse_http_request_seconds_count{route=\"profile.create\"} 1",
        "statehouse_http_in_flight_requests 1",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

async fn failures_of_the_store_are_told_without_details(site: Site) {
    let store = TrapStore::over(site.store().await);
    let server = Running::of(house_over(store.clone()).await, Config::default()).await;
    server.create(1).await;
    store.set(FAIL);
    for path in ["/v1/profile/1", "/readyz", "/healthz"] {
        let reply = server.get(path).await;
        reply.problem(503, "unavailable");
        assert!(!String::from_utf8_lossy(&reply.body).contains("secret"), "{reply:?}");
    }
    server.get("/livez").await.ok(200);
    store.set(UNKNOWN);
    let reply = server.put("POST", "/v1/profile", &[], json!({"user_id": 2, "display_name": "x"})).await;
    reply.problem(503, "outcome_unknown");
    assert_eq!(reply.header("retry-after"), "1");
    assert!(!String::from_utf8_lossy(&reply.body).contains("secret"), "{reply:?}");
    store.set(SOUND);
    server.get("/v1/profile/1").await.ok(200);
}

async fn reads_of_deadlines_tell_the_time_that_decides(site: Site) {
    let text = "[timer.alarm]\nkey = { name = \"text\" }\n[entity.note]\nkey = { id = \"int\" }\n";
    let store = TrapStore::over(site.store().await);
    store.set(AHEAD);
    let server = Running::of(house_of(text, store).await, Config::default()).await;
    server.put("PUT", "/v1/alarm/wake", &[], json!({"after_ms": 60_000})).await.ok(200);
    server.put("POST", "/v1/note", &[], json!({"id": 1})).await.ok(201);
    let now = || server.house.clock().now().micros() / 1000;
    let before = now();
    let read = server.get("/v1/alarm/wake").await.ok(200);
    let told: i64 = read.header("statehouse-now").parse().unwrap();
    // The engine is an hour ahead of this process; PostgreSQL's own clock is that of this machine.
    assert!((before + 3_500_000..=now() + 3_700_000).contains(&told), "{told} is not an hour after {before}");
    let note = server.get("/v1/note/1").await.ok(200);
    assert!(!note.headers.contains_key("statehouse-now"), "{note:?}");
}

async fn a_panic_is_answered_and_survived(site: Site) {
    let store = TrapStore::over(site.store().await);
    let server = Running::of(house_over(store.clone()).await, Config::default()).await;
    server.create(1).await;
    store.set(PANIC);
    let replies = [
        server.get("/v1/profile/1").await,
        server
            .put(
                "POST",
                "/v1/profile",
                &[("idempotency-key", "k")],
                json!({"user_id": 2, "display_name": "x"}),
            )
            .await,
    ];
    for reply in replies {
        reply.problem(500, "internal");
        assert!(!String::from_utf8_lossy(&reply.body).contains("secret"), "{reply:?}");
    }
    store.set(SOUND);
    server.get("/v1/profile/1").await.ok(200);
    // The key is free again.
    server
        .put("POST", "/v1/profile", &[("idempotency-key", "k")], json!({"user_id": 2, "display_name": "x"}))
        .await
        .ok(201);
}

async fn without_credentials_only_loopback(site: Site) {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
    let server = Server::new(site.house().await, Config::default()).await.unwrap();
    let refused = server.serve(listener, std::future::pending()).await;
    assert!(matches!(refused, Err(SetupError::PublicWithoutCredentials(_))), "{refused:?}");
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
    let mut config = Config::default();
    config.auth.api_keys = true;
    let server = Server::new(site.house().await, config).await.unwrap();
    server.serve(listener, std::future::ready(())).await.unwrap();
}

async fn stopping_lets_requests_finish(site: Site) {
    let mut server = site.server().await;
    let body = json!({"user_id": 1, "display_name": "A"}).to_string();
    let mut slow = server.raw().await;
    slow.say(format!(
        "POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nexpect: 100-continue\r\n\r\n",
        body.len()
    ))
    .await;
    slow.until("100 Continue").await;
    server.begin_stop();
    // New connections are not accepted any more.
    while tokio::net::TcpStream::connect(("127.0.0.1", server.port)).await.is_ok() {
        tokio::task::yield_now().await;
    }
    slow.say(&body).await;
    let reply = slow.rest().await;
    assert!(reply.contains("201 Created"), "{reply}");
    server.stop().await;
}

async fn stopping_ends_streams_and_waits(site: Site) {
    let server = Arc::new(site.server().await);
    server.create(1).await;
    let mut stream = server.raw().await;
    stream.say("GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    stream.until(": open").await;
    let mut waiter = server.raw().await;
    waiter.say("GET /v1/profile/1 HTTP/1.1\r\nhost: localhost\r\nif-none-match: \"1\"\r\nprefer: wait=60\r\n\r\n").await;
    // Both are under way before the server is told to stop: the stream has its headers, and the other waits.
    server.until_under_way(1).await;
    // This would wait for ever if either of the two did not end.
    Arc::try_unwrap(server).ok().unwrap().stop().await;
    assert!(waiter.rest().await.starts_with("HTTP/1.1 304"));
}

async fn stopping_does_not_wait_for_ever(site: Site) {
    let mut config = Config::default();
    config.limits.drain_ms = 200;
    // Nothing else would end it.
    config.limits.body_timeout_ms = u64::MAX >> 20;
    let server = site.server_with(config).await;
    let mut stuck = server.raw().await;
    stuck.say("POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 40\r\nexpect: 100-continue\r\n\r\n").await;
    stuck.until("100 Continue").await;
    server.stop().await;
}

async fn stopping_waits_for_writes_without_clients(site: Site) {
    let store = TrapStore::over(site.store().await);
    let server = Running::of(house_over(store.clone()).await, Config::default()).await;
    store.hold(true);
    let body = json!({"user_id": 1, "display_name": "A"}).to_string();
    let mut gone = server.raw().await;
    gone.say(format!(
        "POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ))
    .await;
    store.until_held().await;
    drop(gone);
    server.until_under_way(0).await;
    let house = server.house.clone();
    let stopping = tokio::spawn(server.stop());
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!stopping.is_finished());
    store.hold(false);
    stopping.await.unwrap();
    let written = house.store().wait_log(&[], Duration::ZERO).await.unwrap();
    assert_eq!(written.iter().sum::<u64>(), 1);
}

async fn two_servers_share_one_secret(site: Site) {
    let house = site.house().await;
    let first = Running::of(house.clone(), Config::default()).await;
    let second = Running::of(house, Config::default()).await;
    for user in 0..3 {
        first.create(user).await;
    }
    let page = first.get("/v1/profile?limit=1").await.ok(200);
    let path = page.header("link").split(['<', '>']).nth(1).unwrap().to_owned();
    second.get(&path).await.ok(200);
    // A secret that the operator gives counts instead.
    let config = Config { secret: Some("a secret of the operator".into()), ..Config::default() };
    let third = Running::of(first.house.clone(), config).await;
    third.get(&path).await.problem(400, "invalid_input");
    let short = Config { secret: Some("short".into()), ..Config::default() };
    assert!(matches!(Server::new(first.house.clone(), short).await, Err(SetupError::Own(_))));
}

async fn tls_by_files(site: Site) {
    use rustls::pki_types::ServerName;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (certificates, key) = (site.folder().join("cert.pem"), site.folder().join("key.pem"));
    std::fs::write(&certificates, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let mut config = Config {
        tls: Some(Tls { certificates: certificates.clone(), key: key.clone(), client_authorities: None }),
        ..Config::default()
    };
    config.limits.header_timeout_ms = 200;
    let server = site.server_with(config).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let client =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let client = Arc::new(client.with_root_certificates(roots).with_no_client_auth());
    // One that never shakes hands does not stay, and does not keep others out.
    let mut silent = server.raw().await;
    let tcp = tokio::net::TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(client);
    let mut stream = connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await.unwrap();
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply).await;
    assert!(reply.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&reply));
    assert_eq!(silent.rest().await, "");
    for (certificates, key) in
        [(key.clone(), key.clone()), (certificates.clone(), certificates), (key, site.folder().join("none"))]
    {
        let config =
            Config { tls: Some(Tls { certificates, key, client_authorities: None }), ..Config::default() };
        assert!(matches!(Server::new(server.house.clone(), config).await, Err(SetupError::Tls(_))));
    }
}
