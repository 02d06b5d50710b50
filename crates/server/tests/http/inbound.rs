//! Signed messages of other systems over HTTP: the signature is the credential, and a message id has its effect once.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value as Json, json};
use statehouse::egress::{Egress, Environment};
use statehouse::infra::effect::signature::sign;
use statehouse::{Blueprint, House};
use statehouse_server::{Config, openapi};
use statehouse_store::{Clock as _, Migrate, Store, SystemClock, Tenant};

use crate::support::{BLUEPRINT, Reply, Running, Site, cases};
use crate::trap::{SOUND, TrapStore, UNKNOWN};

cases![
    a_signed_message_is_handled_once,
    racing_deliveries_are_handled_once,
    forged_and_old_messages_write_nothing,
    both_secrets_are_valid_during_a_rotation,
    a_refused_message_may_be_delivered_again,
    an_unknown_outcome_is_reported_as_such,
    hostile_messages_are_refused_by_their_form,
    an_endpoint_needs_no_credential_and_gives_none,
    a_flood_of_forged_messages_leaves_the_tenant_its_quota,
    messages_of_the_standards_own_signer_are_accepted,
    the_document_has_the_endpoints,
];

const ENDPOINTS: &str = r#"
[inbound.psp]
scheme   = "standard"
secret   = ["env:NEW", "env:OLD"]
when     = { body.type = "paid" }
do       = "profile.mutate"
key      = "{body.user}"
version  = "any"
input    = { increment = { points = "{body.points}" } }
body_max = 2000

[inbound.hub]
scheme   = "hmac"
secret   = "env:PLAIN"
header   = "x-hub-signature"
id       = "{header.x-hub-delivery}"
do       = "profile.create"
input    = { user_id = "{body.user}", display_name = "{body.name}" }
"#;

const NEW: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const FOREIGN: &str = "whsec_c3VjaCBhIHNlY3JldCBpcyBubyBvbmUncyBoZXJl";

#[derive(Debug)]
struct Secrets;

#[async_trait::async_trait]
impl Environment for Secrets {
    async fn read(&self, name: &str) -> Option<String> {
        let secret = match name {
            "NEW" => NEW,
            "OLD" => OLD,
            "PLAIN" => "it is a secret to everybody",
            _ => return None,
        };
        Some(secret.to_owned())
    }
}

async fn house(store: Arc<dyn Store>) -> Arc<House> {
    let blueprint = Blueprint::read("statehouse.toml", &format!("{BLUEPRINT}{ENDPOINTS}")).unwrap();
    let egress = Egress { environment: Arc::new(Secrets), ..Egress::default() };
    let house = House::over(store, &blueprint).unwrap().with_egress(egress);
    house.migrate(Migrate::Apply).await.unwrap();
    Arc::new(house)
}

async fn server(site: &Site) -> Running {
    Running::of(house(site.store().await).await, Config::default()).await
}

fn now() -> i64 {
    SystemClock.now().micros() / 1_000_000
}

fn paid(user: i64) -> String {
    json!({"type": "paid", "user": user, "points": 10}).to_string()
}

async fn post(server: &Running, id: &str, at: i64, signature: &str, body: &str) -> Reply {
    let at = at.to_string();
    let headers = [
        ("content-type", "application/json"),
        ("webhook-id", id),
        ("webhook-timestamp", &at),
        ("webhook-signature", signature),
    ];
    server.send("POST", "/inbound/psp", &headers, body.to_owned()).await
}

async fn deliver(server: &Running, secret: &str, id: &str, body: &str) -> Reply {
    let at = now();
    post(server, id, at, &sign(secret, id, at, body.as_bytes()).unwrap(), body).await
}

async fn points(server: &Running, user: i64) -> Json {
    server.get(&format!("/v1/profile/{user}")).await.ok(200).json()["points"].clone()
}

async fn a_signed_message_is_handled_once(site: Site) {
    let server = server(&site).await;
    server.create(1).await;
    for _ in 0..3 {
        let reply = deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
        assert_eq!(reply.json(), json!({"id": "msg_1", "handled": true}));
        assert_eq!(reply.header("cache-control"), "no-store");
    }
    assert_eq!(points(&server, 1).await, 10);
    let other = json!({"type": "created", "user": 1, "points": 10}).to_string();
    let reply = deliver(&server, NEW, "msg_2", &other).await.ok(200);
    assert_eq!(reply.json(), json!({"id": "msg_2", "handled": false}));
    deliver(&server, NEW, "msg_3", &paid(1)).await.ok(200);
    assert_eq!(points(&server, 1).await, 20);
}

async fn racing_deliveries_are_handled_once(site: Site) {
    let server = Arc::new(server(&site).await);
    server.create(1).await;
    let deliveries: Vec<_> = (0..16)
        .map(|_| {
            let server = server.clone();
            tokio::spawn(async move { deliver(&server, NEW, "msg_1", &paid(1)).await })
        })
        .collect();
    for delivery in deliveries {
        assert_eq!(delivery.await.unwrap().ok(200).json()["handled"], true);
    }
    assert_eq!(points(&server, 1).await, 10);
}

async fn forged_and_old_messages_write_nothing(site: Site) {
    let server = server(&site).await;
    let (body, at) = (paid(1), now());
    let good = sign(NEW, "msg_1", at, body.as_bytes()).unwrap();
    let old = sign(NEW, "msg_1", at - 400, body.as_bytes()).unwrap();
    for reply in [
        deliver(&server, FOREIGN, "msg_1", &body).await,
        post(&server, "msg_2", at, &good, &body).await,
        post(&server, "msg_1", at, &good, &paid(2)).await,
        post(&server, "msg_1", at - 400, &old, &body).await,
        post(&server, "msg_1", at, "v1,", &body).await,
        server.put("POST", "/inbound/psp", &[], json!({"type": "paid"})).await,
        // The right signature of the other scheme's header is none here.
        server.put("POST", "/inbound/hub", &[("webhook-signature", &good)], json!({})).await,
    ] {
        reply.problem(401, "invalid_signature");
        assert_eq!(reply.header("www-authenticate"), "Signature");
        let said = String::from_utf8_lossy(&reply.body).into_owned();
        assert!(!said.contains("whsec") && !said.contains(good.trim_start_matches("v1,")), "{said}");
    }
    assert_eq!(server.written().await, 0);
}

async fn both_secrets_are_valid_during_a_rotation(site: Site) {
    let server = server(&site).await;
    server.create(1).await;
    deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
    deliver(&server, OLD, "msg_2", &paid(1)).await.ok(200);
    // A repeated delivery may be signed by the other one.
    deliver(&server, OLD, "msg_1", &paid(1)).await.ok(200);
    assert_eq!(points(&server, 1).await, 20);
}

async fn a_refused_message_may_be_delivered_again(site: Site) {
    let server = server(&site).await;
    deliver(&server, NEW, "msg_1", &paid(1)).await.problem(404, "not_found");
    assert_eq!(server.written().await, 0);
    server.create(1).await;
    deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
    deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
    assert_eq!(points(&server, 1).await, 10);
    let wrong = json!({"type": "paid", "user": 1, "points": "many"}).to_string();
    let problem = deliver(&server, NEW, "msg_2", &wrong).await.problem(400, "invalid_input");
    assert!(problem["errors"][0]["pointer"].as_str().unwrap().contains("points"), "{problem}");
}

async fn an_unknown_outcome_is_reported_as_such(site: Site) {
    let store = TrapStore::over(site.store().await);
    let server = Running::of(house(store.clone()).await, Config::default()).await;
    server.create(1).await;
    store.set(UNKNOWN);
    let reply = deliver(&server, NEW, "msg_1", &paid(1)).await;
    reply.problem(503, "outcome_unknown");
    assert_eq!(reply.header("retry-after"), "1");
    store.set(SOUND);
    deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
    deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
    assert_eq!(points(&server, 1).await, 10);
}

async fn hostile_messages_are_refused_by_their_form(site: Site) {
    let server = server(&site).await;
    let at = now();
    let signed = |body: &[u8]| sign(NEW, "msg_1", at, body).unwrap();
    let send = async |headers: &[(&str, &str)], body: Vec<u8>| {
        let (at, signature) = (at.to_string(), signed(&body));
        let own = [("webhook-id", "msg_1"), ("webhook-timestamp", &at), ("webhook-signature", &signature)];
        let headers: Vec<(&str, &str)> = own.into_iter().chain(headers.iter().copied()).collect();
        server.send("POST", "/inbound/psp", &headers, body).await
    };
    let json_type = ("content-type", "application/json");
    for path in ["/inbound/", "/inbound/none", "/inbound/psp/1", "/inbound/psp/", "/inbound/PSP"] {
        server.send("POST", path, &[json_type], "{}").await.problem(404, "not_found");
    }
    for method in ["GET", "PUT", "DELETE", "PATCH"] {
        let reply = server.send(method, "/inbound/psp", &[json_type], "").await;
        reply.problem(405, "method_not_allowed");
        assert_eq!(reply.header("allow"), "POST");
    }
    let body = paid(1).into_bytes();
    for coding in ["gzip", "deflate", "br", "gzip, gzip", "x"] {
        let reply = send(&[json_type, ("content-encoding", coding)], body.clone()).await;
        reply.problem(415, "unsupported_media_type");
    }
    for kind in ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "json"]
    {
        send(&[("content-type", kind)], body.clone()).await.problem(415, "unsupported_media_type");
    }
    send(&[], body.clone()).await.problem(415, "unsupported_media_type");
    send(&[json_type], vec![b' '; 2_001]).await.problem(413, "too_large");
    for bad in [&b""[..], b"{", b"\xff\xfe", b"[[[[", b"{} {}", &[b'['; 1_999]] {
        send(&[json_type], bad.to_vec()).await.problem(400, "invalid_input");
    }
    // Two ids, of which one is signed.
    send(&[json_type, ("webhook-id", "msg_2")], body.clone()).await.problem(401, "invalid_signature");
    assert_eq!(server.written().await, 0);
    server.create(1).await;
    send(&[("content-type", "application/cloudevents+json; charset=utf-8")], body).await.ok(200);
}

async fn an_endpoint_needs_no_credential_and_gives_none(site: Site) {
    let mut config = Config::default();
    config.auth.api_keys = true;
    let house = house(site.store().await).await;
    let request = statehouse::Request {
        action: "profile.create".into(),
        key: Vec::new(),
        input: json!({"user_id": 1, "display_name": "Ann"}).as_object().unwrap().clone(),
        expected: None,
    };
    let tenant = Tenant::new("default").unwrap();
    house.call(&tenant, request, statehouse::Operation::default()).await.unwrap();
    let server = Running::of(house, config).await;
    deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
    let at = now().to_string();
    let signature = sign(NEW, "msg_2", now(), b"").unwrap();
    let headers = [("webhook-id", "msg_2"), ("webhook-timestamp", &at), ("webhook-signature", &signature)];
    server.get_with("/v1/profile/1", &headers).await.problem(401, "unauthenticated");
}

/// Forged messages are counted as those of one credential.
async fn a_flood_of_forged_messages_leaves_the_tenant_its_quota(site: Site) {
    let mut config = Config::default();
    (config.limits.key_body_bytes, config.limits.tenant_body_bytes) = (1_000, 100_000);
    let server = Running::of(house(site.store().await).await, config).await;
    let large = format!("\"{}\"", "x".repeat(1_500));
    let headers = [("content-type", "application/json")];
    server.send("POST", "/inbound/psp", &headers, large).await.problem(429, "too_many_requests");
    server.create(1).await;
    deliver(&server, NEW, "msg_1", &paid(1)).await.ok(200);
}

/// The package of the authors of Standard Webhooks signs.
async fn messages_of_the_standards_own_signer_are_accepted(site: Site) {
    let server = server(&site).await;
    server.create(1).await;
    let body = json!({"type": "paid", "user": 1, "points": 10, "text": "für 7 €"}).to_string();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    for (id, secret) in [("msg_1", NEW), ("msg_2", OLD)] {
        let at = now();
        let mut command = tokio::process::Command::new(root.join("scripts/webhook-sign"));
        let output = command.args([secret, id, &at.to_string(), &body]).output().await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let signature = String::from_utf8(output.stdout).unwrap();
        post(&server, id, at, signature.trim(), &body).await.ok(200);
        post(&server, id, at, signature.trim(), &body).await.ok(200);
        post(&server, "msg_3", at, signature.trim(), &body).await.problem(401, "invalid_signature");
    }
    assert_eq!(points(&server, 1).await, 20);
}

async fn the_document_has_the_endpoints(site: Site) {
    let document = openapi::document(&*house(site.store().await).await);
    let operation = &document["paths"]["/inbound/psp"]["post"];
    assert_eq!(operation["security"], json!([{}]));
    let headers: Vec<&str> =
        operation["parameters"].as_array().unwrap().iter().filter_map(|one| one["name"].as_str()).collect();
    assert_eq!(headers, ["webhook-id", "webhook-timestamp", "webhook-signature"]);
    assert!(operation["responses"]["401"]["description"].as_str().unwrap().contains("invalid_signature"));
    assert_eq!(document["paths"]["/inbound/hub"]["post"]["parameters"][0]["name"], "x-hub-signature");
    crate::document::is_valid(&site, &document).await;
}
