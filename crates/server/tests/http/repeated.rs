//! `Idempotency-Key`: a write happens once, and its answer is repeated.

use serde_json::json;
use statehouse_server::Config;

use crate::support::{Running, Site, cases, house_over};
use crate::trap::TrapStore;

cases![
    a_repetition_gets_the_first_answer,
    another_request_under_the_key_is_refused,
    keys_of_two_tenants_are_two,
    a_repetition_waits_its_turn,
    a_batch_repeats_as_one,
    keys_must_be_readable,
    what_was_begun_is_finished_without_its_client,
    a_write_without_a_key_is_finished_without_its_client,
];

async fn a_repetition_gets_the_first_answer(site: Site) {
    let server = site.server().await;
    let body = || json!({"user_id": 1, "display_name": "Ann"});
    let first = server.put("POST", "/v1/profile", &[("idempotency-key", "k-1")], body()).await.ok(201);
    let patch = [("if-match", "\"1\""), ("idempotency-key", "\"k-2\"")];
    let second = server.put("PATCH", "/v1/profile/1", &patch, json!({"bio": "b"})).await.ok(200);
    server.send("DELETE", "/v1/profile/1", &[("idempotency-key", "k-3")], "").await.ok(200);
    let written = server.written().await;
    // By now both would be refused, if they were judged anew. Bare and quoted keys are the same.
    let again = server.put("POST", "/v1/profile", &[("idempotency-key", "\"k-1\"")], body()).await.ok(201);
    assert_eq!(
        (&again.body, again.header("location"), again.header("etag")),
        (&first.body, "/v1/profile/1", "\"1\"")
    );
    let patch = [("if-match", "\"1\""), ("idempotency-key", "k-2")];
    let again = server.put("PATCH", "/v1/profile/1", &patch, json!({"bio": "b"})).await.ok(200);
    assert_eq!((&again.body, again.header("etag")), (&second.body, "\"2\""));
    assert_eq!(server.written().await, written);
}

async fn another_request_under_the_key_is_refused(site: Site) {
    let server = site.server().await;
    let key = ("idempotency-key", "k");
    server.put("POST", "/v1/profile", &[key], json!({"user_id": 1, "display_name": "A"})).await.ok(201);
    let written = server.written().await;
    let body = json!({"user_id": 2, "display_name": "A"});
    server.put("POST", "/v1/profile", &[key], body).await.problem(422, "operation_reused");
    let same_body = json!({"user_id": 1, "display_name": "A"});
    server.put("POST", "/v1/seat", &[key], same_body.clone()).await.problem(400, "invalid_input");
    server.send("DELETE", "/v1/profile/1", &[key], "").await.problem(422, "operation_reused");
    server.put("PATCH", "/v1/profile/1", &[key, ("if-match", "\"1\"")], json!({"bio": "x"})).await.ok(422);
    server
        .put(
            "PATCH",
            "/v1/profile/1",
            &[("idempotency-key", "p"), ("if-match", "\"1\"")],
            json!({"bio": "x"}),
        )
        .await
        .ok(200);
    // The version that a caller expects is part of its request.
    let other = [("idempotency-key", "p"), ("if-match", "*")];
    server.put("PATCH", "/v1/profile/1", &other, json!({"bio": "x"})).await.problem(422, "operation_reused");
    assert_eq!(server.written().await, written + 1);
}

async fn keys_of_two_tenants_are_two(site: Site) {
    let server = site.server().await;
    let body = || json!({"user_id": 1, "display_name": "A"});
    for tenant in ["one", "two"] {
        let headers = [("idempotency-key", "k"), ("statehouse-tenant", tenant)];
        server.put("POST", "/v1/profile", &headers, body()).await.ok(201);
    }
    assert_eq!(server.written().await, 2);
}

async fn a_repetition_waits_its_turn(site: Site) {
    let server = site.server().await;
    let body = json!({"user_id": 1, "display_name": "A"}).to_string();
    let mut first = server.raw().await;
    first
        .say(format!(
            "POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             idempotency-key: k\r\ncontent-length: {}\r\nexpect: 100-continue\r\n\r\n",
            body.len()
        ))
        .await;
    // The server asks for the body, so by now the first request is under way.
    first.until("100 Continue").await;
    let second = server
        .send(
            "POST",
            "/v1/profile",
            &[("idempotency-key", "k"), ("content-type", "application/json")],
            body.clone(),
        )
        .await;
    second.problem(409, "operation_in_progress");
    assert_eq!(second.header("retry-after"), "1");
    first.say(&body).await;
    first.until("201 Created").await;
    let third = server
        .send("POST", "/v1/profile", &[("idempotency-key", "k"), ("content-type", "application/json")], body)
        .await;
    third.ok(201);
}

async fn a_batch_repeats_as_one(site: Site) {
    let server = site.server().await;
    let calls = || {
        json!([
            {"action": "profile.create", "input": {"user_id": 1, "display_name": "A"}},
            {"action": "profile.create", "input": {"user_id": 2, "display_name": "B"}},
        ])
    };
    let key = [("idempotency-key", "b")];
    let first = server.put("POST", "/v1/batch", &key, calls()).await.ok(200);
    server.send("DELETE", "/v1/profile/1", &[], "").await.ok(200);
    assert_eq!(server.put("POST", "/v1/batch", &key, calls()).await.ok(200).body, first.body);
    server
        .put("POST", "/v1/batch", &key, json!([{"action": "profile.delete", "key": "2"}]))
        .await
        .problem(422, "operation_reused");
}

async fn keys_must_be_readable(site: Site) {
    let server = site.server().await;
    let body = json!({"user_id": 1, "display_name": "A"});
    let long = "k".repeat(256);
    for key in ["", "\"", "\"open", long.as_str()] {
        server
            .put("POST", "/v1/profile", &[("idempotency-key", key)], body.clone())
            .await
            .problem(400, "malformed");
    }
    let twice = [("idempotency-key", "a"), ("idempotency-key", "b")];
    server.put("POST", "/v1/profile", &twice, body).await.problem(400, "malformed");
    assert_eq!(server.written().await, 0);
}

async fn what_was_begun_is_finished_without_its_client(site: Site) {
    let server = site.server().await;
    let body = json!({"user_id": 1, "display_name": "A"}).to_string();
    let request = format!(
        "POST /v1/profile HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         idempotency-key: k\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut gone = server.raw().await;
    gone.say(request).await;
    drop(gone);
    // Whether the write was reached or not, the repetition decides it, and it is applied once.
    let headers = [("idempotency-key", "k"), ("content-type", "application/json")];
    loop {
        let reply = server.send("POST", "/v1/profile", &headers, body.clone()).await;
        if reply.status == 201 {
            break;
        }
        reply.problem(409, "operation_in_progress");
    }
    assert_eq!(server.written().await, 1);
}

/// Without a key no client can ask what became of a write. So it must not stop half-way when its client goes.
async fn a_write_without_a_key_is_finished_without_its_client(site: Site) {
    let store = TrapStore::over(site.store().await);
    let server = Running::of(house_over(store.clone()).await, Config::default()).await;
    for (path, body) in [
        ("/v1/profile", json!({"user_id": 1, "display_name": "A"})),
        ("/v1/batch", json!([{"action": "profile.create", "input": {"user_id": 2, "display_name": "B"}}])),
    ] {
        let before = server.written().await;
        store.hold(true);
        let body = body.to_string();
        let mut gone = server.raw().await;
        gone.say(format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ))
        .await;
        // The commit is about to begin, and the connection breaks.
        store.until_held().await;
        server.until_under_way(1).await;
        drop(gone);
        server.until_under_way(0).await;
        store.hold(false);
        // This would go on for ever if the write had been dropped with its connection.
        while server.written().await == before {
            tokio::task::yield_now().await;
        }
    }
    server.get("/v1/profile/1").await.ok(200);
    server.get("/v1/profile/2").await.ok(200);
}
