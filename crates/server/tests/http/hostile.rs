//! Bad input and bad clients: each gets a 4xx with a code, nothing is written, and the server still answers.

use std::io::Write as _;

use serde_json::{Value as Json, json};
use statehouse_server::Config;

use crate::support::{Running, Site, cases};

cases![
    malformed_json,
    wrong_types_and_unknown_fields,
    bad_utf8,
    deep_nesting,
    large_bodies,
    gzip_bombs,
    media_types,
    path_tricks,
    header_floods,
    slow_headers,
    slow_bodies,
    idle_connections,
    clients_that_do_not_read,
    broken_protocol,
    chunked_bodies_are_bounded,
    strange_tenants,
    foreign_hosts,
    field_errors_are_bounded,
    query_parameters_are_bounded,
    gzip_members_are_bounded,
];

async fn still_answers(server: &Running) {
    assert_eq!(server.written().await, 0, "something was written");
    server.get("/livez").await.ok(200);
    server.create(999).await;
}

fn json_type() -> (&'static str, &'static str) {
    ("content-type", "application/json")
}

async fn malformed_json(site: Site) {
    let server = site.server().await;
    for body in [
        "{",
        "}",
        "{\"user_id\": }",
        "nul",
        "{\"a\":1,}",
        "'x'",
        "{} {}",
        "\u{feff}{}",
        "{\"user_id\": 01}",
        "NaN",
    ] {
        server.send("POST", "/v1/profile", &[json_type()], body).await.problem(400, "malformed");
        server.send("POST", "/v1/batch", &[json_type()], body).await.problem(400, "malformed");
    }
    still_answers(&server).await;
}

async fn wrong_types_and_unknown_fields(site: Site) {
    let server = site.server().await;
    for (body, pointer) in [
        (json!({}), "/user_id"),
        (json!({"user_id": "one", "display_name": "x"}), "/user_id"),
        (json!({"user_id": 1.5, "display_name": "x"}), "/user_id"),
        (json!({"user_id": 1e30, "display_name": "x"}), "/user_id"),
        (json!({"user_id": null, "display_name": "x"}), "/user_id"),
        (json!({"user_id": 1, "display_name": 3}), "/display_name"),
        (json!({"user_id": 1, "display_name": null}), "/display_name"),
        (json!({"user_id": 1, "display_name": ["x"]}), "/display_name"),
        (json!({"user_id": 1, "display_name": "a\u{0}b"}), "/display_name"),
        (json!({"user_id": 1, "display_name": "x", "admin": true}), "/admin"),
        (json!({"user_id": 1, "display_name": "x", "version": 7}), "/version"),
        (json!({"user_id": 1, "display_name": "x", "tenant": "other"}), "/tenant"),
        (json!({"user_id": 1, "display_name": "x", "a/b~c": 1}), "/a~1b~0c"),
        (json!([]), ""),
        (json!("x"), ""),
        (Json::Null, ""),
    ] {
        let problem =
            server.put("POST", "/v1/profile", &[], body.clone()).await.problem(400, "invalid_input");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{body}");
    }
    let seat = json!({"event": "e", "seat_no": "1", "price": 1e300});
    server.put("POST", "/v1/seat", &[], seat).await.problem(400, "invalid_input");
    still_answers(&server).await;
}

async fn bad_utf8(site: Site) {
    let server = site.server().await;
    let body = b"{\"user_id\": 1, \"display_name\": \"\xff\xfe\"}".to_vec();
    server.send("POST", "/v1/profile", &[json_type()], body).await.problem(400, "malformed");
    let half = b"{\"user_id\": 1, \"display_name\": \"\\ud800\"}".to_vec();
    server.send("POST", "/v1/profile", &[json_type()], half).await.problem(400, "malformed");
    server.get("/v1/seat/%ff,1").await.problem(400, "malformed");
    server.get("/v1/profile?cursor=%c3%28").await.problem(400, "malformed");
    still_answers(&server).await;
}

async fn deep_nesting(site: Site) {
    let server = site.server().await;
    for depth in [70, 127, 128, 100_000] {
        let nested = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        let body = format!("{{\"user_id\": 1, \"display_name\": \"x\", \"tags\": {nested}}}");
        let reply = server.send("POST", "/v1/profile", &[json_type()], body).await;
        assert!(reply.status == 400, "{depth}: {reply:?}");
        reply.header("content-type");
        let nested = format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
        server.send("POST", "/v1/profile", &[json_type()], nested).await.ok(400);
    }
    still_answers(&server).await;
}

async fn large_bodies(site: Site) {
    let server = site.server().await;
    let text = |bytes: usize| json!({"user_id": 1, "display_name": "x".repeat(bytes)}).to_string();
    // Larger than any body may be.
    server.send("POST", "/v1/profile", &[json_type()], text(10 << 20)).await.problem(413, "too_large");
    // A body that may be, with a row that may not.
    server.send("POST", "/v1/profile", &[json_type()], text(1 << 20)).await.problem(413, "too_large");
    // A length that is too long to wait for.
    let mut raw = server.raw().await;
    raw.say("POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n{").await;
    assert!(raw.until("too_large").await.starts_with("HTTP/1.1 413"));
    // Keys have their own limit.
    let long = "k".repeat(2000);
    server.get(&format!("/v1/seat/{long},1")).await.problem(413, "too_large");
    still_answers(&server).await;
}

async fn gzip_bombs(site: Site) {
    let server = site.server().await;
    let headers = [json_type(), ("content-encoding", "gzip")];
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    for _ in 0..200 {
        encoder.write_all(&[b' '; 1 << 20]).unwrap();
    }
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < 1 << 20);
    server.send("POST", "/v1/profile", &headers, bomb).await.problem(413, "too_large");
    server.send("POST", "/v1/profile", &headers, "not gzip").await.problem(400, "malformed");
    let twice = [json_type(), ("content-encoding", "gzip, gzip")];
    server.send("POST", "/v1/profile", &twice, "x").await.problem(415, "unsupported_media_type");
    still_answers(&server).await;
}

async fn media_types(site: Site) {
    let server = site.server().await;
    let body = json!({"user_id": 1, "display_name": "x"}).to_string();
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/merge-patch+json",
        "application/jsonp",
        "",
    ] {
        let reply = server.send("POST", "/v1/profile", &[("content-type", kind)], body.clone()).await;
        reply.problem(415, "unsupported_media_type");
        assert_eq!(reply.header("accept"), "application/json");
    }
    server.send("POST", "/v1/profile", &[], body).await.problem(415, "unsupported_media_type");
    still_answers(&server).await;
}

async fn path_tricks(site: Site) {
    let server = site.server().await;
    for (path, code) in [
        ("/v1/../etc/passwd", "HTTP/1.1 404"),
        ("/v1/profile/../../x", "HTTP/1.1 404"),
        ("/v1/profile/%2e%2e%2f%2e%2e", "HTTP/1.1 400"),
        ("/v1//profile", "HTTP/1.1 404"),
        ("//v1/profile", "HTTP/1.1 404"),
        ("/v1/profile/", "HTTP/1.1 404"),
        ("/v1/profile/%00", "HTTP/1.1 400"),
        ("/v1/seat/%00,1", "HTTP/1.1 400"),
        ("/v1/profile/1%20", "HTTP/1.1 400"),
        ("/v1/profile/%31%2f%32", "HTTP/1.1 400"),
        ("/v1/profile/9223372036854775808", "HTTP/1.1 400"),
        ("/v1/profile/1;x=1", "HTTP/1.1 400"),
        ("/v1/profile/%", "HTTP/1.1 400"),
        ("/v1/%70rofile/1", "HTTP/1.1 404"),
        ("/v1/house_keys", "HTTP/1.1 404"),
        ("/v1/house_secrets/server", "HTTP/1.1 404"),
    ] {
        let mut raw = server.raw().await;
        raw.say(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await;
        let reply = raw.rest().await;
        assert!(reply.starts_with(code), "{path}: {reply}");
        assert!(reply.contains("\"code\":"), "{path}: {reply}");
    }
    still_answers(&server).await;
}

async fn header_floods(site: Site) {
    let server = site.server().await;
    let many: String = (0..100).map(|n| format!("x-flood-{n}: 1\r\n")).collect();
    let large = format!("x-large: {}\r\n", "a".repeat(40_000));
    for headers in [many, large] {
        let mut raw = server.raw().await;
        raw.say(format!("GET /livez HTTP/1.1\r\nhost: localhost\r\n{headers}connection: close\r\n\r\n"))
            .await;
        let reply = raw.rest().await;
        assert!(reply.starts_with("HTTP/1.1 431") && reply.contains("headers_too_large"), "{reply}");
    }
    // What is far beyond the limits is not even kept in memory.
    for flood in [
        (0..5000).map(|n| format!("x-{n}: 1\r\n")).collect::<String>(),
        format!("x: {}\r\n", "a".repeat(4 << 20)),
    ] {
        let mut raw = server.raw().await;
        let _ = tokio::io::AsyncWriteExt::write_all(
            &mut raw.0,
            format!("GET /livez HTTP/1.1\r\nhost: localhost\r\n{flood}\r\n").as_bytes(),
        )
        .await;
        let reply = raw.rest().await;
        assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 431"), "{reply}");
    }
    let long = format!("/v1/profile?cursor={}", "a".repeat(40_000));
    server.get(&long).await.problem(431, "headers_too_large");
    still_answers(&server).await;
}

async fn short_timeouts(site: &Site) -> Running {
    let mut config = Config::default();
    config.limits.header_timeout_ms = 200;
    config.limits.body_timeout_ms = 200;
    config.limits.idle_timeout_ms = 400;
    config.limits.write_timeout_ms = 200;
    site.server_with(config).await
}

async fn slow_headers(site: Site) {
    let server = short_timeouts(&site).await;
    let mut raw = server.raw().await;
    raw.say("POST /v1/profile HTTP/1.1\r\nhost: localhost\r\n").await;
    // The server closes the connection; this would wait for ever if it did not.
    raw.rest().await;
    still_answers(&server).await;
}

async fn slow_bodies(site: Site) {
    let server = short_timeouts(&site).await;
    let mut raw = server.raw().await;
    raw.say("POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n{").await;
    let reply = raw.rest().await;
    assert!(reply.starts_with("HTTP/1.1 408") && reply.contains("request_timeout"), "{reply}");
    still_answers(&server).await;
}

async fn idle_connections(site: Site) {
    let server = short_timeouts(&site).await;
    // One that never says anything, and one that has had its answer.
    let mut silent = server.raw().await;
    let mut served = server.raw().await;
    served.say("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(served.rest().await.starts_with("HTTP/1.1 200"));
    assert_eq!(silent.rest().await, "");
    still_answers(&server).await;
}

async fn clients_that_do_not_read(site: Site) {
    let mut config = Config::default();
    // Long enough for those who read, however busy the machine is.
    config.limits.write_timeout_ms = 3_000;
    config.limits.connections = 2;
    let server = site.server_with(config).await;
    // A client that keeps its connections may come to have two, and take up both places for good.
    let briefly = [("connection", "close")];
    for user in 0..40 {
        let body = json!({"user_id": user, "display_name": "x".repeat(300_000)});
        server.put("POST", "/v1/profile", &briefly, body).await.ok(201);
    }
    // This one takes one of the two places and never reads: the rows do not fit the socket's buffers.
    let mut blocked = server.raw().await;
    for _ in 0..20 {
        blocked.say("GET /v1/profile?limit=40 HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    }
    // The server gives the connection up; this would go on for ever if it did not.
    loop {
        let text = server.get_with("/metrics", &briefly).await.ok(200);
        let text = String::from_utf8_lossy(&text.body).into_owned();
        if text.contains("statehouse_http_connections 1\n") && text.contains("route=\"profile.list\"") {
            break;
        }
        tokio::task::yield_now().await;
    }
}

async fn broken_protocol(site: Site) {
    let server = site.server().await;
    for request in [
        "GARBAGE\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        "POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\n",
        "POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\nzz\r\n{}\r\n",
    ] {
        let mut raw = server.raw().await;
        raw.say(request).await;
        tokio::io::AsyncWriteExt::shutdown(&mut raw.0).await.unwrap();
        let reply = raw.rest().await;
        assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 4"), "{request}: {reply}");
    }
    still_answers(&server).await;
}

async fn chunked_bodies_are_bounded(site: Site) {
    let mut config = Config::default();
    config.limits.body_bytes = 10_000;
    let server = site.server_with(config).await;
    let mut raw = server.raw().await;
    raw.say("POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let chunk = format!("1000\r\n{}\r\n", "x".repeat(4096));
    // It does not end, and need not: the server has seen enough.
    let feed =
        async { while tokio::io::AsyncWriteExt::write_all(&mut raw.0, chunk.as_bytes()).await.is_ok() {} };
    feed.await;
    still_answers(&server).await;
}

async fn strange_tenants(site: Site) {
    let server = site.server().await;
    let long = "t".repeat(65);
    for tenant in ["", "a b", "a/b", "ü", "_house", long.as_str()] {
        server.get_with("/v1/profile/1", &[("statehouse-tenant", tenant)]).await.problem(400, "malformed");
    }
    still_answers(&server).await;
    // An unknown tenant is one without rows: another's row and no row give the same answer.
    let theirs =
        server.get_with("/v1/profile/999", &[("statehouse-tenant", "other")]).await.problem(404, "not_found");
    let nobodys =
        server.get_with("/v1/profile/998", &[("statehouse-tenant", "other")]).await.problem(404, "not_found");
    assert_eq!(theirs["detail"].as_str().unwrap().replace("999", "998"), nobodys["detail"].as_str().unwrap());
    assert_eq!(
        server.get_with("/v1/profile", &[("statehouse-tenant", "other")]).await.ok(200).json(),
        json!([])
    );
}

async fn foreign_hosts(site: Site) {
    let server = site.server().await;
    // A page whose name was made to resolve to this machine after it was loaded.
    for headers in [
        "host: evil.example",
        "host: localhost\r\norigin: https://evil.example",
        "host: localhost\r\norigin: null",
    ] {
        let mut raw = server.raw().await;
        raw.say(format!("POST /v1/profile/1/restore HTTP/1.1\r\n{headers}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")).await;
        let reply = raw.rest().await;
        assert!(reply.starts_with("HTTP/1.1 403") && reply.contains("\"forbidden\""), "{reply}");
    }
    still_answers(&server).await;
}

async fn field_errors_are_bounded(site: Site) {
    let server = site.server().await;
    let many: serde_json::Map<String, Json> = (0..5_000).map(|n| (format!("f{n}"), json!(1))).collect();
    let batch: Vec<Json> = vec![json!({"action": "profile.create", "input": many})];
    for (path, body) in [("/v1/profile", json!(many)), ("/v1/batch", json!(batch))] {
        let problem = server.put("POST", path, &[], body).await.problem(400, "invalid_input");
        assert_eq!(problem["errors"].as_array().unwrap().len(), 20);
        assert!(problem["detail"].as_str().unwrap().len() < 500, "{}", problem["detail"]);
    }
    still_answers(&server).await;
}

async fn query_parameters_are_bounded(site: Site) {
    let server = site.server().await;
    let query = |count: usize| (0..count).map(|n| format!("p{n}=1&")).collect::<String>();
    for path in ["/v1/profile", "/v1/events"] {
        let problem = server.get(&format!("{path}?{}", query(65))).await.problem(400, "malformed");
        assert!(problem["detail"].as_str().unwrap().contains("64"), "{problem}");
        server.get(&format!("{path}?{}", query(64))).await.problem(400, "invalid_input");
    }
    still_answers(&server).await;
}

async fn gzip_members_are_bounded(site: Site) {
    let server = site.server().await;
    let member = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let headers = [json_type(), ("content-encoding", "gzip")];
    let split = |members: usize| {
        let mut body = member(b"").repeat(members - 1);
        body.extend(member(br#"{"user_id": 1}"#));
        body
    };
    server.send("POST", "/v1/profile", &headers, split(17)).await.problem(400, "malformed");
    // The body itself lacks a field.
    server.send("POST", "/v1/profile", &headers, split(16)).await.problem(400, "invalid_input");
    still_answers(&server).await;
}
