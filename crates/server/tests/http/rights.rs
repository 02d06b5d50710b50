//! What a credential permits: scopes per resource and action.

use serde_json::json;
use statehouse_server::Config;
use statehouse_server::auth::{Scope, read_scopes};

use crate::credentials::{as_caller, key, with_keys};
use crate::streams::Stream;
use crate::support::{Reply, Running, Site, cases};

cases![
    a_scope_names_a_resource_and_an_action,
    each_call_of_a_batch_needs_its_scope,
    a_condition_needs_the_scope_to_read,
    events_are_those_of_readable_resources,
    the_document_names_the_scope_of_each_action,
    scopes_are_checked_against_the_blueprint,
];

const BLUEPRINT: &str = r#"
[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text", points = { type = "int", default = 0 } }

[booking.seat]
key      = { event_id = "text", seat_no = "text" }
hold_for = "10m"

[log.mail]
"#;

async fn server(site: &Site, config: Config) -> Running {
    Running::of(site.house_of(BLUEPRINT).await, config).await
}

async fn key_with(server: &Running, scopes: &str) -> String {
    let parsed = read_scopes(scopes);
    assert_eq!(parsed.len(), scopes.split(' ').count(), "{scopes}");
    key(&server.house, "acme", &parsed, None).await.key
}

/// What a caller with these scopes gets for a call: whether the scope was enough.
fn is_permitted(reply: &Reply) -> bool {
    if reply.status != 403 {
        return true;
    }
    let problem = reply.problem(403, "forbidden");
    assert!(problem["detail"].as_str().unwrap().contains("needs the scope"), "{problem}");
    assert!(reply.header("www-authenticate").contains("insufficient_scope"));
    false
}

async fn a_scope_names_a_resource_and_an_action(site: Site) {
    let server = server(&site, with_keys()).await;
    let admin = key_with(&server, "admin").await;
    let body = json!({"user_id": 1, "display_name": "Ann"});
    as_caller(&server, &admin, "POST", "/v1/profile", Some(body)).await.ok(201);
    let seat = json!({"event_id": "x", "seat_no": "1"});
    as_caller(&server, &admin, "POST", "/v1/seat", Some(seat)).await.ok(201);
    let calls = [
        ("GET", "/v1/profile/1", None),
        ("GET", "/v1/profile", None),
        ("POST", "/v1/profile/1/mutate", Some(json!({"increment": {"points": 1}}))),
        ("GET", "/v1/seat/x,1", None),
        (
            "POST",
            "/v1/seat_booking",
            Some(json!({"key": {"event_id": "x", "seat_no": "1"}, "holder": "ann"})),
        ),
        ("GET", "/v1/mail/0/poll", None),
        ("POST", "/v1/mail/0/claim", Some(json!({"holder": "me"}))),
    ];
    let table = [
        ("read", [true, true, false, true, false, true, false]),
        ("*:read", [true, true, false, true, false, true, false]),
        ("profile:read", [true, true, false, false, false, false, false]),
        ("profile:list", [false, true, false, false, false, false, false]),
        ("profile:mutate seat:read", [false, false, true, true, false, false, false]),
        ("seat_booking:hold", [false, false, false, false, true, false, false]),
        ("mail:poll mail:claim", [false, false, false, false, false, true, true]),
        ("*:mutate", [false, false, true, false, false, false, false]),
        ("profile:*", [true, true, true, false, false, false, false]),
        ("write", [false, false, true, false, true, false, true]),
        ("admin", [true; 7]),
    ];
    for (scopes, expected) in table {
        let caller = key_with(&server, scopes).await;
        let mut found = Vec::new();
        for (method, path, body) in &calls {
            found.push(is_permitted(&as_caller(&server, &caller, method, path, body.clone()).await));
        }
        assert_eq!(found, expected, "{scopes}");
    }
}

async fn a_condition_needs_the_scope_to_read(site: Site) {
    let server = server(&site, with_keys()).await;
    let admin = key_with(&server, "admin").await;
    let body = json!({"user_id": 1, "display_name": "Ann"});
    as_caller(&server, &admin, "POST", "/v1/profile", Some(body)).await.ok(201);
    let mutate = json!({"increment": {"points": 1}, "if": "points >= 0"});
    let check = json!([{"action": "profile.check", "key": "1", "if": "points >= 0"}]);
    for (scopes, expected) in [("write", false), ("write seat:read", false), ("write profile:read", true)] {
        let caller = key_with(&server, scopes).await;
        let single = as_caller(&server, &caller, "POST", "/v1/profile/1/mutate", Some(mutate.clone())).await;
        assert_eq!(is_permitted(&single), expected, "{scopes}");
        let batch = as_caller(&server, &caller, "POST", "/v1/batch", Some(check.clone())).await;
        assert_eq!(is_permitted(&batch), expected, "{scopes}");
    }
}

async fn each_call_of_a_batch_needs_its_scope(site: Site) {
    let server = server(&site, with_keys()).await;
    let both = key_with(&server, "profile:create profile:mutate").await;
    let create =
        |user: i64| json!({"action": "profile.create", "input": {"user_id": user, "display_name": "Ann"}});
    let mutate = json!({"action": "profile.mutate", "key": "1", "input": {"increment": {"points": 1}}});
    as_caller(&server, &both, "POST", "/v1/batch", Some(json!([create(1), create(2)]))).await.ok(200);
    let answer =
        as_caller(&server, &both, "POST", "/v1/batch", Some(json!([create(3), mutate]))).await.ok(200);
    // Without a read scope no bodies are shown.
    assert!(answer.json()[0].get("body").is_none(), "{}", answer.json());
    let creator = key_with(&server, "profile:create profile:read").await;
    let refused = as_caller(&server, &creator, "POST", "/v1/batch", Some(json!([create(4), mutate]))).await;
    let problem = refused.problem(403, "forbidden");
    assert_eq!(problem["call"], 1);
    assert!(refused.header("www-authenticate").contains("scope=\"profile:mutate\""));
    // Nothing of it was done.
    as_caller(&server, &creator, "GET", "/v1/profile/4", None).await.problem(404, "not_found");
    let answer = as_caller(&server, &creator, "POST", "/v1/batch", Some(json!([create(4)]))).await.ok(200);
    assert_eq!(answer.json()[0]["body"]["user_id"], 4);
}

async fn events_are_those_of_readable_resources(site: Site) {
    let server = server(&site, with_keys()).await;
    let admin = key_with(&server, "admin").await;
    let reader = key_with(&server, "seat:read").await;
    let writer = key_with(&server, "profile:write profile:list").await;
    as_caller(&server, &writer, "GET", "/v1/events", None).await.problem(403, "forbidden");
    as_caller(&server, &writer, "GET", "/v1/events?resource=profile", None).await.problem(403, "forbidden");
    as_caller(&server, &reader, "GET", "/v1/events?resource=profile", None).await.problem(403, "forbidden");
    let body = json!({"user_id": 1, "display_name": "Ann"});
    as_caller(&server, &admin, "POST", "/v1/profile", Some(body)).await.ok(201);
    let seat = json!({"event_id": "x", "seat_no": "1"});
    as_caller(&server, &admin, "POST", "/v1/seat", Some(seat)).await.ok(201);
    for path in ["/v1/events?after=oldest", "/v1/events?after=oldest&resource=seat"] {
        let mut stream = Stream::open(&server, path, &format!("authorization: Bearer {reader}\r\n")).await;
        let seen = stream.take(1).await;
        assert_eq!(seen[0].1["subject"], "seat/x,1");
    }
    let mut all =
        Stream::open(&server, "/v1/events?after=oldest", &format!("authorization: Bearer {admin}\r\n")).await;
    let mut subjects: Vec<String> =
        all.take(2).await.iter().map(|(_, event)| event["subject"].as_str().unwrap().to_owned()).collect();
    subjects.sort();
    assert_eq!(subjects, ["profile/1", "seat/x,1"]);
}

async fn the_document_names_the_scope_of_each_action(site: Site) {
    let server = server(&site, Config::default()).await;
    let document = server.get("/openapi.json").await.ok(200).json();
    let mut actions = 0;
    for resource in server.house.resources() {
        for action in &resource.actions {
            let id = format!("{}.{}", resource.name, action.name);
            let operations = document["paths"].as_object().unwrap().values();
            let mut operations = operations.flat_map(|path| path.as_object().unwrap().values());
            let operation = operations.find(|operation| operation["operationId"] == id.as_str()).unwrap();
            assert_eq!(operation["security"], json!([{}, {"bearer": [id.replace('.', ":")]}]), "{id}");
            actions += 1;
        }
    }
    assert!(actions > 10);
}

async fn scopes_are_checked_against_the_blueprint(site: Site) {
    let house = site.house_of(BLUEPRINT).await;
    for good in ["read", "admin", "profile:read", "seat_booking:hold", "*:read", "*:hold", "profile:*", "*:*"]
    {
        good.parse::<Scope>().unwrap().check(&house).unwrap();
    }
    for (bad, why) in [
        ("profil:read", "there is no resource `profil`; did you mean `profile`?"),
        ("profile:hold", "there is no action `hold`"),
        ("*:mutat", "did you mean `mutate`?"),
    ] {
        let said = bad.parse::<Scope>().unwrap().check(&house).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
}
