//! Versions, conditions, lists, batches: every line of the HTTP grammar.

use serde_json::{Value as Json, json};
use statehouse_server::Config;

use crate::support::{Site, cases};

cases![
    a_row_lives_its_life,
    conflicts_name_the_current_version,
    any_version_will_do_where_the_caller_says_so,
    reads_are_conditional,
    creates_can_insist_on_being_first,
    keys_have_several_parts_and_any_letters,
    patches_merge,
    mutations_need_no_version,
    lists_are_paged_with_sealed_cursors,
    cursors_belong_to_their_tenant_and_filter,
    a_batch_is_all_or_nothing,
    conditions_stand_in_the_query_or_the_body,
    a_caller_can_wait_for_a_change,
    waiting_ends_when_patience_does,
    answers_are_compressed_and_requests_may_be,
    wrong_methods_get_the_right_ones,
    head_is_get_without_a_body,
    ids_and_traces_are_kept,
    problems_have_pages,
    cross_origin_calls_are_off_until_listed,
];

async fn a_row_lives_its_life(site: Site) {
    let server = site.server().await;
    let created = server.create(7).await;
    assert_eq!(created.header("location"), "/v1/profile/7");
    assert_eq!(created.header("etag"), "\"1\"");
    assert!(created.headers.contains_key("statehouse-token"));
    let read = server.get(created.header("location")).await.ok(200);
    assert_eq!((read.header("etag"), &read.json()["display_name"]), ("\"1\"", &json!("Ann")));
    let body = json!({"display_name": "Anna", "bio": "x"});
    let updated = server.put("PUT", "/v1/profile/7", &[("if-match", "\"1\"")], body).await.ok(200);
    assert_eq!((updated.header("etag"), &updated.json()["version"]), ("\"2\"", &json!(2)));
    let deleted = server.send("DELETE", "/v1/profile/7", &[], "").await.ok(200);
    assert_eq!(deleted.json()["status"], "DELETED");
    server.get("/v1/profile/7").await.problem(410, "deleted");
    server.send("POST", "/v1/profile/7/restore", &[], "").await.ok(200);
    server.send("POST", "/v1/profile/7/restore", &[], "").await.problem(409, "not_deleted");
    server.get("/v1/profile/8").await.problem(404, "not_found");
    let again = server.put("POST", "/v1/profile", &[], json!({"user_id": 7, "display_name": "B"})).await;
    assert_eq!(again.problem(409, "already_exists")["current_version"], 4);
}

async fn conditions_stand_in_the_query_or_the_body(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let any = [("if-match", "*")];
    let path = "/v1/profile/1?if=display_name+%3D+'Ann'";
    server.put("PATCH", path, &any, json!({"display_name": "B"})).await.ok(200);
    let failed = server.put("PATCH", path, &any, json!({"display_name": "C"})).await;
    let problem = failed.problem(412, "condition_failed");
    assert_eq!((&problem["current_version"], failed.header("etag")), (&json!(2), "\"2\""));
    assert!(problem["detail"].as_str().unwrap().contains("display_name is 'B'"), "{problem}");
    server.put("PUT", path, &any, json!({"display_name": "C"})).await.problem(412, "condition_failed");
    server.send("DELETE", path, &[], "").await.problem(412, "condition_failed");
    // The body of a patch is the row.
    let in_row = json!({"display_name": "C", "if": "version = 2"});
    let problem = server.put("PATCH", "/v1/profile/1", &any, in_row).await.problem(400, "invalid_input");
    assert_eq!(problem["errors"][0]["pointer"], "/if", "{problem}");
    let check = |body: Json| server.put("POST", "/v1/profile/1/check", &[], body);
    check(json!({"if": "version = 2"})).await.ok(200);
    check(json!({"if": "version = 1"})).await.problem(412, "condition_failed");
    check(json!({})).await.problem(400, "invalid_input");
    server.send("POST", "/v1/profile/1/check?if=version+%3D+2", &[], "").await.ok(200);
    let batch = |condition: &str| {
        let check = json!({"action": "profile.check", "key": "1", "if": condition});
        let create = json!({"action": "profile.create", "input": {"user_id": 2, "display_name": "D"}});
        server.put("POST", "/v1/batch", &[], json!([create, check]))
    };
    assert_eq!(batch("version = 1").await.problem(412, "condition_failed")["call"], 1);
    let problem = batch("vers = 1").await.problem(400, "invalid_input");
    assert_eq!(problem["errors"][0]["pointer"], "/1/if", "{problem}");
    batch("version = 2").await.ok(200);
    server.send("DELETE", "/v1/profile/1?if=version+%3D+2", &[], "").await.ok(200);
}

async fn conflicts_name_the_current_version(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let change = |tag: &'static str, name: &'static str| {
        let headers = vec![("if-match", tag)];
        let server = &server;
        async move { server.put("PATCH", "/v1/profile/1", &headers, json!({"display_name": name})).await }
    };
    change("\"1\"", "B").await.ok(200);
    let conflict = change("\"1\"", "C").await;
    assert_eq!(conflict.problem(412, "version_conflict")["current_version"], 2);
    assert_eq!(conflict.header("etag"), "\"2\"");
    // Tags that cannot be a version of a row, weak ones included, never match.
    for tag in ["W/\"2\"", "\"two\"", "\"02\""] {
        change(tag, "D").await.problem(412, "version_conflict");
    }
    for tag in ["2", "\"1\", \"2\""] {
        change(tag, "E").await.problem(400, "malformed");
    }
    let missing = server.put("PUT", "/v1/profile/1", &[], json!({"display_name": "F"})).await;
    missing.problem(428, "version_required");
    assert_eq!(server.get("/v1/profile/1").await.json()["display_name"], "B");
}

async fn any_version_will_do_where_the_caller_says_so(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let any = [("if-match", "*")];
    server.put("PUT", "/v1/profile/1", &any, json!({"display_name": "B"})).await.ok(200);
    server.put("PUT", "/v1/profile/2", &any, json!({"display_name": "B"})).await.problem(404, "not_found");
}

async fn reads_are_conditional(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let same = server.get_with("/v1/profile/1", &[("if-none-match", "\"1\"")]).await.ok(304);
    assert_eq!((same.header("etag"), same.body.len()), ("\"1\"", 0));
    server.get_with("/v1/profile/1", &[("if-none-match", "W/\"1\", \"5\"")]).await.ok(304);
    server.get_with("/v1/profile/1", &[("if-none-match", "\"2\"")]).await.ok(200);
    assert!(same.header("vary").contains("authorization"));
}

async fn creates_can_insist_on_being_first(site: Site) {
    let server = site.server().await;
    let create = || {
        let body = json!({"user_id": 1, "display_name": "Ann"});
        server.put("POST", "/v1/profile", &[("if-none-match", "*")], body)
    };
    create().await.ok(201);
    let second = create().await;
    assert_eq!(second.problem(412, "already_exists")["current_version"], 1);
    assert_eq!(second.header("etag"), "\"1\"");
}

async fn keys_have_several_parts_and_any_letters(site: Site) {
    let server = site.server().await;
    for (event, seat, path) in [
        ("gala", "7", "gala,7"),
        ("a,b", "c", "a%252Cb,c"),
        ("50%", "1", "50%2525,1"),
        ("a/b", "ü?", "a%2Fb,%C3%BC%3F"),
        ("..", "x y", "..,x%20y"),
    ] {
        let created =
            server.put("POST", "/v1/seat", &[], json!({"event": event, "seat_no": seat})).await.ok(201);
        assert_eq!(created.header("location"), format!("/v1/seat/{path}"));
        let read = server.get(created.header("location")).await.ok(200).json();
        assert_eq!((&read["event"], &read["seat_no"]), (&json!(event), &json!(seat)));
    }
    server.get("/v1/seat/gala").await.problem(400, "invalid_input");
    server.get("/v1/seat/gala,7,8").await.problem(400, "invalid_input");
    // Clients that encode commas say the same.
    server.get("/v1/seat/gala%2C7").await.ok(200);
    // Decoded once only.
    server.get("/v1/seat/a%25252Cb,c").await.problem(404, "not_found");
}

async fn patches_merge(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let headers = [("if-match", "\"1\""), ("content-type", "application/merge-patch+json")];
    let patched = server.send("PATCH", "/v1/profile/1", &headers, "{\"bio\": \"b\"}").await.ok(200).json();
    assert_eq!((&patched["bio"], &patched["display_name"]), (&json!("b"), &json!("Ann")));
    let cleared =
        server.put("PATCH", "/v1/profile/1", &[("if-match", "\"2\"")], json!({"bio": null})).await.ok(200);
    assert_eq!(cleared.json()["bio"], Json::Null);
    // A write that changes nothing writes nothing.
    let before = server.written().await;
    let same = server.put("PATCH", "/v1/profile/1", &[("if-match", "\"3\"")], json!({})).await.ok(200);
    assert_eq!((same.header("etag"), server.written().await), ("\"3\"", before));
}

async fn mutations_need_no_version(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let add = json!({"increment": {"points": 5}});
    let counted = server.put("POST", "/v1/profile/1/mutate", &[], add).await.ok(200);
    assert_eq!(counted.json()["points"], 5);
    let over = json!({"increment": {"points": i64::MAX}});
    server.put("POST", "/v1/profile/1/mutate", &[], over).await.problem(409, "out_of_range");
    server.put("POST", "/v1/profile/1/mutate", &[], json!({"increment": {"views": 2}})).await.ok(200);
    let read = server.get("/v1/profile/1").await.ok(200);
    assert_eq!((read.header("etag"), &read.json()["views"]), ("\"2\"", &json!(2)));
}

fn next(link: &str) -> String {
    let (path, rest) = link.strip_prefix('<').and_then(|link| link.split_once('>')).expect(link);
    assert_eq!(rest, "; rel=\"next\"");
    path.to_owned()
}

async fn lists_are_paged_with_sealed_cursors(site: Site) {
    let server = site.server().await;
    for user in 0..7 {
        server.create(user).await;
    }
    let mut seen = Vec::new();
    let mut path = "/v1/profile?limit=3&status=ACTIVE".to_owned();
    let mut pages = 0;
    loop {
        let page = server.get(&path).await.ok(200);
        pages += 1;
        let rows = page.json();
        seen.extend(rows.as_array().unwrap().iter().map(|row| row["user_id"].as_i64().unwrap()));
        if !page.headers.contains_key("link") {
            break;
        }
        path = next(page.header("link"));
        assert!(path.contains("limit=3") && path.contains("status=ACTIVE"), "{path}");
    }
    seen.sort_unstable();
    assert_eq!((seen, pages), ((0..7).collect::<Vec<_>>(), 3));
    for bad in [
        "limit=0",
        "limit=501",
        "limit=x",
        "limit=1.5",
        "status=GONE",
        "x=1",
        "limit=1&limit=2",
        "cursor=abc",
    ] {
        let problem = server.get(&format!("/v1/profile?{bad}")).await.problem(400, "invalid_input");
        let name = bad.split('=').next().unwrap();
        assert_eq!(problem["errors"][0]["pointer"], format!("/{name}"), "{bad}");
    }
    server.get("/v1/profile?limit=%zz").await.problem(400, "malformed");
}

async fn cursors_belong_to_their_tenant_and_filter(site: Site) {
    let server = site.server().await;
    for user in 0..3 {
        server.create(user).await;
    }
    let page = server.get("/v1/profile?limit=1").await.ok(200);
    let path = next(page.header("link"));
    server.get(&path).await.ok(200);
    server.get_with(&path, &[("statehouse-tenant", "other")]).await.problem(400, "invalid_input");
    server.get(&format!("{path}&status=DELETED")).await.problem(400, "invalid_input");
    server.get(&path.replace("/v1/profile", "/v1/seat")).await.problem(400, "invalid_input");
    // The page's size is no part of what a cursor is bound to.
    server.get(&path.replace("limit=1", "limit=2")).await.ok(200);
    let mut forged = path.clone();
    let last = if forged.ends_with('A') { 'B' } else { 'A' };
    forged.pop();
    forged.push(last);
    server.get(&forged).await.problem(400, "invalid_input");
}

async fn a_batch_is_all_or_nothing(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let calls = |version: i64| {
        json!([
            {"action": "profile.create", "input": {"user_id": 2, "display_name": "Bob"}},
            {"action": "profile.patch", "key": "1", "input": {"display_name": "A"}, "expected_version": version},
            {"action": "seat.create", "input": {"event": "gala", "seat_no": "1"}},
        ])
    };
    let before = server.written().await;
    let refused = server.put("POST", "/v1/batch", &[], calls(9)).await;
    let problem = refused.problem(412, "version_conflict");
    assert_eq!((&problem["call"], &problem["current_version"]), (&json!(1), &json!(1)));
    assert_eq!(server.written().await, before);
    server.get("/v1/profile/2").await.problem(404, "not_found");
    let done = server.put("POST", "/v1/batch", &[], calls(1)).await.ok(200);
    let results = done.json();
    assert_eq!(results[0]["location"], "/v1/profile/2");
    assert_eq!((&results[1]["version"], &results[1]["body"]["display_name"]), (&json!(2), &json!("A")));
    assert_eq!(results[2]["location"], "/v1/seat/gala,1");
    // A record in each partition that the rows belong to.
    let written = server.written().await;
    assert!((before + 1..=before + 3).contains(&written), "{before} {written}");
    for (calls, code, pointer) in [
        (json!({}), 400, ""),
        (json!([]), 400, ""),
        (json!([1]), 400, "/0"),
        (json!([{"action": "profile.create", "input": {"user_id": "x"}}]), 400, "/0/input/user_id"),
        (json!([{"action": "profile.create", "input": 3}]), 400, "/0/input"),
        (json!([{"action": "profile.patch", "key": "x", "expected_version": "*"}]), 400, "/0/key"),
        (
            json!([{"action": "profile.patch", "key": "1", "expected_version": "x"}]),
            400,
            "/0/expected_version",
        ),
        (json!([{"action": "profile.create", "more": 3}]), 400, "/0/more"),
    ] {
        let problem =
            server.put("POST", "/v1/batch", &[], calls.clone()).await.problem(code, "invalid_input");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{calls}");
    }
    server
        .put("POST", "/v1/batch", &[], json!([{"action": "profile.read", "key": "1"}]))
        .await
        .problem(400, "invalid_input");
    server
        .put("POST", "/v1/batch", &[], json!([{"action": "profile.fly", "key": "1"}]))
        .await
        .problem(404, "not_found");
    // As many as there may be, and one more.
    let create =
        |user: i64| json!({"action": "profile.create", "input": {"user_id": user, "display_name": "x"}});
    server.put("POST", "/v1/batch", &[], (100..183).map(create).collect()).await.ok(200);
    server.put("POST", "/v1/batch", &[], (200..284).map(create).collect()).await.problem(413, "too_large");
    let many = Json::Array(vec![json!({"action": "profile.delete", "key": "1"}); 99]);
    server.put("POST", "/v1/batch", &[], many).await.problem(413, "too_large");
    server.get("/v1/batch").await.problem(405, "method_not_allowed");
}

async fn a_caller_can_wait_for_a_change(site: Site) {
    let server = std::sync::Arc::new(site.server().await);
    server.create(1).await;
    let waiter = tokio::spawn({
        let server = server.clone();
        async move { server.get_with("/v1/profile/1", &[("if-none-match", "\"1\""), ("prefer", "wait=30")]).await }
    });
    // What happens to other rows does not end the wait.
    server.create(2).await;
    tokio::task::yield_now().await;
    server
        .put("PATCH", "/v1/profile/1", &[("if-match", "\"1\"")], json!({"display_name": "B"}))
        .await
        .ok(200);
    let reply = waiter.await.unwrap().ok(200);
    assert_eq!((reply.header("etag"), &reply.json()["display_name"]), ("\"2\"", &json!("B")));
    assert_eq!(reply.header("preference-applied"), "wait=30");
    // A caller with an older version need not wait.
    server.get_with("/v1/profile/1", &[("if-none-match", "\"1\""), ("prefer", "wait=30")]).await.ok(200);
}

async fn waiting_ends_when_patience_does(site: Site) {
    let mut config = Config::default();
    config.limits.wait_max_ms = 100;
    let server = site.server_with(config).await;
    server.create(1).await;
    let headers = [("if-none-match", "\"1\""), ("prefer", "wait=3600")];
    server.get_with("/v1/profile/1", &headers).await.ok(304);
    server.get_with("/v1/profile/2", &headers).await.problem(404, "not_found");
}

async fn answers_are_compressed_and_requests_may_be(site: Site) {
    use std::io::{Read as _, Write as _};
    let server = site.server().await;
    let body = json!({"user_id": 1, "display_name": "x".repeat(5000)}).to_string();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(body.as_bytes()).unwrap();
    let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
    server.send("POST", "/v1/profile", &headers, encoder.finish().unwrap()).await.ok(201);
    let read = server.get_with("/v1/profile/1", &[("accept-encoding", "gzip")]).await.ok(200);
    assert_eq!((read.header("content-encoding"), read.header("etag")), ("gzip", "\"1\""));
    let mut text = String::new();
    flate2::read::GzDecoder::new(&read.body[..]).read_to_string(&mut text).unwrap();
    assert!(text.contains(&"x".repeat(5000)));
    let plain = server.get("/v1/profile/1").await.ok(200);
    assert!(!plain.headers.contains_key("content-encoding"));
    let headers = [("content-type", "application/json"), ("content-encoding", "br")];
    server.send("POST", "/v1/profile", &headers, "{}").await.problem(415, "unsupported_media_type");
}

async fn wrong_methods_get_the_right_ones(site: Site) {
    let server = site.server().await;
    for (method, path, allowed) in [
        ("DELETE", "/v1/profile", "POST, GET, HEAD"),
        ("POST", "/v1/profile/1", "GET, PUT, PATCH, DELETE, HEAD"),
        ("GET", "/v1/profile/1/mutate", "POST"),
        ("TRACE", "/v1/profile/1", "GET, PUT, PATCH, DELETE, HEAD"),
        ("OPTIONS", "/v1/profile", "POST, GET, HEAD"),
        ("BREW", "/v1/profile", "POST, GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("POST", "/v1/events", "GET"),
        ("PUT", "/healthz", "GET, HEAD"),
    ] {
        let reply = server.send(method, path, &[], "").await;
        reply.problem(405, "method_not_allowed");
        assert_eq!(reply.header("allow"), allowed, "{method} {path}");
    }
    for path in ["/v1", "/v1/", "/v1/nothing", "/v1/profile/1/explode", "/v1/profile/1/mutate/x", "/x", "/"] {
        server.get(path).await.problem(404, "not_found");
    }
}

async fn head_is_get_without_a_body(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let head = server.send("HEAD", "/v1/profile/1", &[], "").await.ok(200);
    assert_eq!((head.header("etag"), head.body.len()), ("\"1\"", 0));
    server.send("HEAD", "/v1/profile/2", &[], "").await.ok(404);
}

async fn ids_and_traces_are_kept(site: Site) {
    let server = site.server().await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace}-00f067aa0ba902b7-01");
    let headers = [("x-request-id", "mine-1"), ("traceparent", parent.as_str())];
    let problem = server.get_with("/v1/profile/1", &headers).await.problem(404, "not_found");
    assert_eq!((&problem["request_id"], &problem["trace_id"]), (&json!("mine-1"), &json!(trace)));
    assert_eq!(problem["instance"], "/v1/profile/1");
    let made = server.get_with("/v1/profile/1", &[("x-request-id", "not plain!")]).await;
    assert_ne!(made.header("x-request-id"), "not plain!");
    assert_ne!(made.problem(404, "not_found")["trace_id"], trace);
}

async fn problems_have_pages(site: Site) {
    let server = site.server().await;
    for kind in statehouse_server::problem::ALL {
        let page = server.get(&format!("/problems/{}", kind.code)).await.ok(200);
        assert!(String::from_utf8_lossy(&page.body).contains(kind.title));
    }
    server.get("/problems/nonsense").await.problem(404, "not_found");
}

async fn cross_origin_calls_are_off_until_listed(site: Site) {
    let server = site.server().await;
    let page = ("origin", "https://app.example");
    let asks = [page, ("access-control-request-method", "PUT")];
    server.get_with("/v1/profile", &[page]).await.problem(403, "forbidden");
    server.send("OPTIONS", "/v1/profile", &asks, "").await.problem(403, "forbidden");
    server.stop().await;
    let listed = Config { cors_origins: vec!["https://app.example".into()], ..Config::default() };
    let server = site.server_with(listed).await;
    let allowed = server.get_with("/v1/profile", &[page]).await.ok(200);
    assert_eq!(allowed.header("access-control-allow-origin"), "https://app.example");
    let asked = server.send("OPTIONS", "/v1/profile", &asks, "").await.ok(204);
    assert!(asked.header("access-control-allow-methods").contains("PUT"));
    server.get_with("/v1/profile", &[("origin", "https://evil.example")]).await.problem(403, "forbidden");
}
