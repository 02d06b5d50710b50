//! Rules for end users by the claims of their tokens, over HTTP.

use jsonwebtoken::{Algorithm, EncodingKey};
use serde_json::{Value as Json, json};
use statehouse_server::Config;
use statehouse_server::auth::Scope;
use statehouse_server::config::{Auth, Jwt, JwtKeys};

use crate::credentials::{as_caller, claims, key, signed};
use crate::streams::Stream;
use crate::support::{Reply, Running, Site, cases};

cases![
    a_caller_does_what_the_rules_allow,
    operators_are_governed_by_scopes,
    lists_show_readable_rows_only,
    events_are_judged_before_they_are_sent,
    each_call_of_a_batch_is_judged,
    derived_resources_need_rules_of_their_own,
    answers_are_repeated_to_their_caller_only,
];

const BLUEPRINT: &str = r#"
[entity.note]
key    = { id = "int" }
fields = { user_id = "int", body = "text?" }

[entity.note.allow]
create = "claims.sub = row.user_id"
read   = "claims.sub = row.user_id"
patch  = "claims.sub = row.user_id"
list   = { if = "claims.sub = row.user_id", filter = true }

[relation.follow]
from  = { follower = "int" }
to    = { followed = "int" }

[relation.follow.allow]
read = "claims.sub = row.follower"
add  = "claims.sub = row.follower"
has  = "claims.sub = row.follower"
"follow_out.list" = "claims.sub = input.follower"

[entity.page]
key    = { id = "int" }
fields = { body = "text?" }

[log.mail]
"#;

const SHARED: &str = "a secret that two parties share, long enough";

async fn server(site: &Site) -> Running {
    let jwt = Jwt {
        issuer: Some("me".into()),
        audience: Some("shop".into()),
        ..Jwt::with(JwtKeys::Secret(SHARED.into()))
    };
    let config = Config { auth: Auth { api_keys: true, jwt: Some(jwt) }, ..Config::default() };
    Running::of(site.house_of(BLUEPRINT).await, config).await
}

fn token(sub: &str, scope: &str) -> String {
    let key = EncodingKey::from_secret(SHARED.as_bytes());
    signed(Algorithm::HS256, &key, None, &claims(json!({"sub": sub, "scope": scope})))
}

async fn user(server: &Running, sub: &str, method: &str, path: &str, body: Option<Json>) -> Reply {
    as_caller(server, &token(sub, "read write"), method, path, body).await
}

fn note(id: i64, user: i64) -> Option<Json> {
    Some(json!({"id": id, "user_id": user}))
}

async fn a_caller_does_what_the_rules_allow(site: Site) {
    let server = server(&site).await;
    user(&server, "7", "POST", "/v1/note", note(1, 7)).await.ok(201);
    user(&server, "7", "POST", "/v1/note", note(2, 8)).await.problem(403, "forbidden");
    user(&server, "7", "GET", "/v1/note/1", None).await.ok(200);
    let stranger = user(&server, "8", "GET", "/v1/note/1", None).await.problem(404, "not_found");
    let absent = user(&server, "8", "GET", "/v1/note/2", None).await.problem(404, "not_found");
    assert_eq!(stranger["detail"].as_str().unwrap().replace('1', "2"), absent["detail"]);
    // No rule allows to delete.
    user(&server, "7", "DELETE", "/v1/note/1", None).await.problem(403, "forbidden");
    user(&server, "8", "DELETE", "/v1/note/1", None).await.problem(404, "not_found");
    let bearer = format!("Bearer {}", token("7", "read write"));
    let headers = [("authorization", bearer.as_str()), ("if-match", "*")];
    server.put("PATCH", "/v1/note/1", &headers, json!({"body": "a"})).await.ok(200);
    server.put("PATCH", "/v1/note/1", &headers, json!({"user_id": 8})).await.problem(403, "forbidden");
    // A wait is a read.
    let headers = [("authorization", bearer.as_str()), ("if-none-match", "\"1\""), ("prefer", "wait=1")];
    server.get_with("/v1/note/1", &headers).await.ok(200);
    // Resources without rules are governed by scopes.
    user(&server, "7", "POST", "/v1/page", Some(json!({"id": 1}))).await.ok(201);
    // Scopes hold as well.
    as_caller(&server, &token("7", "page:read"), "GET", "/v1/note/1", None).await.problem(403, "forbidden");
}

async fn operators_are_governed_by_scopes(site: Site) {
    let server = server(&site).await;
    user(&server, "7", "POST", "/v1/note", note(1, 7)).await.ok(201);
    let operator = key(&server.house, "acme", &[Scope::Read, Scope::Write], None).await.key;
    for credential in [operator, token("9", "admin")] {
        as_caller(&server, &credential, "GET", "/v1/note/1", None).await.ok(200);
        let listed = as_caller(&server, &credential, "GET", "/v1/note", None).await.ok(200).json();
        assert_eq!(listed.as_array().unwrap().len(), 1);
    }
}

async fn lists_show_readable_rows_only(site: Site) {
    let server = server(&site).await;
    for (id, owner) in [(1, 7), (2, 8), (3, 7)] {
        user(&server, &owner.to_string(), "POST", "/v1/note", note(id, owner)).await.ok(201);
    }
    let ids = |reply: Reply| -> Vec<i64> {
        reply.ok(200).json().as_array().unwrap().iter().map(|row| row["id"].as_i64().unwrap()).collect()
    };
    assert_eq!(ids(user(&server, "7", "GET", "/v1/note", None).await), [3, 1]);
    assert_eq!(ids(user(&server, "8", "GET", "/v1/note", None).await), [2]);
    assert_eq!(ids(user(&server, "9", "GET", "/v1/note", None).await), [] as [i64; 0]);
    // A list whose filter the rule fixes: others' are refused, and no page is short.
    user(&server, "7", "PUT", "/v1/follow/7,8", Some(json!({}))).await.ok(200);
    user(&server, "7", "PUT", "/v1/follow/8,7", Some(json!({}))).await.problem(404, "not_found");
    let listed = user(&server, "7", "GET", "/v1/follow_out?follower=7", None).await.ok(200).json();
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    user(&server, "8", "GET", "/v1/follow_out?follower=7", None).await.problem(403, "forbidden");
    user(&server, "7", "GET", "/v1/follow_in?followed=8", None).await.problem(403, "forbidden");
}

async fn events_are_judged_before_they_are_sent(site: Site) {
    let server = server(&site).await;
    for (id, owner) in [(1, 7), (2, 8), (3, 7)] {
        user(&server, &owner.to_string(), "POST", "/v1/note", note(id, owner)).await.ok(201);
    }
    let headers = format!("authorization: Bearer {}\r\n", token("7", "read"));
    let mut stream = Stream::open(&server, "/v1/events?after=oldest", &headers).await;
    let mut subjects: Vec<String> =
        stream.take(2).await.iter().map(|(_, event)| event["subject"].as_str().unwrap().to_owned()).collect();
    user(&server, "8", "POST", "/v1/note", note(4, 8)).await.ok(201);
    user(&server, "7", "POST", "/v1/note", note(5, 7)).await.ok(201);
    subjects
        .extend(stream.take(1).await.iter().map(|(_, event)| event["subject"].as_str().unwrap().to_owned()));
    subjects.sort();
    assert_eq!(subjects, ["note/1", "note/3", "note/5"]);
}

async fn each_call_of_a_batch_is_judged(site: Site) {
    let server = server(&site).await;
    let create = |id: i64, user: i64| json!({"action": "note.create", "input": {"id": id, "user_id": user}});
    user(&server, "7", "POST", "/v1/batch", Some(json!([create(1, 7), create(2, 7)]))).await.ok(200);
    let refused = user(&server, "7", "POST", "/v1/batch", Some(json!([create(3, 7), create(4, 8)]))).await;
    assert_eq!(refused.problem(403, "forbidden")["call"], 1);
    let patch = json!({"action": "note.patch", "key": "1", "input": {"body": "x"}, "expected_version": "*"});
    let refused = user(&server, "8", "POST", "/v1/batch", Some(json!([create(5, 8), patch]))).await;
    assert_eq!(refused.problem(404, "not_found")["call"], 1);
    user(&server, "7", "GET", "/v1/note/3", None).await.problem(404, "not_found");
    user(&server, "8", "GET", "/v1/note/5", None).await.problem(404, "not_found");
}

async fn derived_resources_need_rules_of_their_own(site: Site) {
    let server = server(&site).await;
    user(&server, "7", "GET", "/v1/mail/0/poll", None).await.problem(403, "forbidden");
    let operator = key(&server.house, "acme", &[Scope::Read], None).await.key;
    as_caller(&server, &operator, "GET", "/v1/mail/0/poll", None).await.ok(200);
}

async fn answers_are_repeated_to_their_caller_only(site: Site) {
    let server = server(&site).await;
    let body = json!({"id": 1, "user_id": 7});
    let send = async |sub: &str| {
        let bearer = format!("Bearer {}", token(sub, "read write"));
        let headers = [("authorization", bearer.as_str()), ("idempotency-key", "k-1")];
        server.put("POST", "/v1/note", &headers, body.clone()).await
    };
    send("7").await.ok(201);
    send("7").await.ok(201);
    // Another user is judged like for a first attempt.
    let other = send("8").await;
    assert!([403, 422].contains(&other.status), "{other:?}");
}
