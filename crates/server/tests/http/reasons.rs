//! What a refusal says: the true reason, at the place that it is about.

use serde_json::{Value as Json, json};
use statehouse::{Blueprint, House};
use statehouse_server::{Config, openapi};
use statehouse_store::Migrate;

use crate::support::{BLUEPRINT, Running, Site, cases, house_over};

cases![
    a_batch_that_is_too_large_blames_no_call,
    integers_beyond_64_bits_are_refused,
    times_and_floats_are_refused_with_the_reason,
    a_row_that_was_deleted_is_not_created_again,
    a_store_with_other_tables_is_reported_and_not_ready,
    the_document_says_what_a_batch_takes,
];

async fn a_batch_that_is_too_large_blames_no_call(site: Site) {
    let server = site.server().await;
    let create = |user: i64| json!({"action": "profile.create", "input": {"user_id": user, "display_name": "x", "bio": "y".repeat(150_000)}});
    let problem = server
        .put("POST", "/v1/batch", &[], json!([create(1), create(2), create(3)]))
        .await
        .problem(413, "too_large");
    assert_eq!(problem["call"], Json::Null, "{problem}");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("400000") && !detail.contains("call 0"), "{detail}");
    server.get("/v1/profile/1").await.problem(404, "not_found");
}

async fn integers_beyond_64_bits_are_refused(site: Site) {
    let server = site.server().await;
    let json_type = [("content-type", "application/json")];
    for number in ["18446744073709551616", "-9223372036854775809", "99999999999999999999999"] {
        let body = format!(r#"{{"user_id": 1, "display_name": "x", "tags": [{number}]}}"#);
        let problem = server.send("POST", "/v1/profile", &json_type, body).await.problem(400, "malformed");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(&format!("the integer {number} does not fit 64 bits")), "{detail}");
    }
    let body = r#"{"user_id": 1, "display_name": "x", "tags": [18446744073709551615]}"#;
    let made = server.send("POST", "/v1/profile", &json_type, body.to_owned()).await.ok(201);
    assert_eq!(made.json()["tags"], json!([18_446_744_073_709_551_615_u64]));
}

async fn times_and_floats_are_refused_with_the_reason(site: Site) {
    let text = "[entity.note]\nkey = { id = \"int\" }\nfields = { at = \"time?\", weight = \"float?\" }\n";
    let server = Running::of(site.house_of(text).await, Config::default()).await;
    for (name, value, expected) in [
        (
            "at",
            json!("9999-12-31T23:59:59Z"),
            "9999-12-31T23:59:59Z cannot be stored: a time must lie between",
        ),
        ("at", json!("soon"), "\"soon\" is not a time: write it as"),
        ("weight", json!(1e300), "1e300 cannot be stored: a float must be zero or"),
    ] {
        let reply = server.put("POST", "/v1/note", &[], json!({"id": 1, name: value})).await;
        let problem = reply.problem(400, "invalid_input");
        let detail = problem["errors"][0]["detail"].as_str().unwrap();
        assert!(detail.starts_with(expected) && detail.len() < 200, "{detail}");
    }
    server.put("POST", "/v1/note", &[], json!({"id": 1, "at": "9999-12-30T22:00:00Z"})).await.ok(201);
}

async fn a_row_that_was_deleted_is_not_created_again(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let again = json!({"user_id": 1, "display_name": "x"});
    let problem = server.put("POST", "/v1/profile", &[], again.clone()).await.problem(409, "already_exists");
    assert_eq!(problem["detail"], "profile 1 exists already");
    server.send("DELETE", "/v1/profile/1", &[("if-match", "\"1\"")], String::new()).await.ok(200);
    let problem = server.put("POST", "/v1/profile", &[], again).await.problem(409, "already_exists");
    assert_eq!(problem["detail"], "profile 1 was deleted; restore it instead");
    server.put("POST", "/v1/profile/1/restore", &[], json!({})).await.ok(200);
}

async fn a_store_with_other_tables_is_reported_and_not_ready(site: Site) {
    let store = site.store().await;
    let house = house_over(store.clone()).await;
    let server = Running::of(house.clone(), Config::default()).await;
    server.put("POST", "/v1/seat", &[], json!({"event": "gala", "seat_no": "1"})).await.ok(201);
    server.get("/readyz").await.ok(200);
    // Another process applies a blueprint without seats, and allows the loss.
    let without = BLUEPRINT.split("[entity.seat]").next().unwrap();
    let other = House::over(store, &Blueprint::read("statehouse.toml", without).unwrap()).unwrap();
    other.migrate(Migrate::ApplyWithLoss).await.unwrap();
    for (method, path) in [("GET", "/v1/seat/gala,1"), ("POST", "/v1/seat"), ("GET", "/v1/seat")] {
        let reply = match method {
            "GET" => server.get(path).await,
            _ => server.put(method, path, &[], json!({"event": "gala", "seat_no": "2"})).await,
        };
        let problem = reply.problem(503, "schema_mismatch");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("another blueprint was applied to the store"), "{method} {path}: {detail}");
    }
    server.get("/readyz").await.problem(503, "schema_mismatch");
    server.get("/livez").await.ok(200);
    house.migrate(Migrate::Apply).await.unwrap();
    server.get("/readyz").await.ok(200);
    server.get("/v1/seat/gala,1").await.problem(404, "not_found");
}

async fn the_document_says_what_a_batch_takes(site: Site) {
    let document = openapi::document(&*site.house().await);
    let variants = document["components"]["schemas"]["BatchCall"]["oneOf"].as_array().unwrap();
    let variant =
        |action: &str| variants.iter().find(|one| one["properties"]["action"]["const"] == action).unwrap();
    let input = |action: &str| &variant(action)["properties"]["input"]["$ref"];
    assert_eq!(input("profile.create"), "#/components/schemas/ProfileCreate");
    assert_eq!(input("profile.patch"), "#/components/schemas/ProfilePatch");
    assert_eq!(variant("profile.patch")["required"], json!(["action", "key", "expected_version"]));
    assert_eq!(variant("profile.create")["required"], json!(["action", "input"]));
    let parameters = |path: &str, method: &str| document["paths"][path][method]["parameters"].to_string();
    let create = parameters("/v1/profile", "post");
    assert!(create.contains("IfNoneMatchAny") && !create.contains("IfMatch"), "{create}");
    assert!(parameters("/v1/profile/{key}", "patch").contains("RequiredIfMatch"));
}
