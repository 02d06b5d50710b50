//! What is in the log, and what is not, at the level that says most.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value as Json, json};
use statehouse::audit::AuditActor;
use statehouse_server::Config;
use statehouse_server::auth::Scope;
use statehouse_server::auth::keys::{self, NewKey};
use statehouse_server::auth::networks::AllowedNetworks;
use statehouse_server::auth::secret::HouseSecret;
use statehouse_server::config::{Auth, Jwt, JwtKeys};
use statehouse_server::logs::{self, Format, Level, LogOptions, Logs};
use statehouse_store::Tenant;

use crate::support::{Running, Site, cases};

cases![requests_are_logged_with_their_ids, secrets_are_not_logged];

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Memory;

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Keeps everything that is logged in this process.
pub fn start() -> Logs {
    logs::start(LogOptions { level: Level::Trace, format: Format::Json }, Memory).unwrap()
}

/// Everything that was logged, at least up to the line of this request.
pub async fn logged_until(request_id: &str) -> String {
    loop {
        let text = String::from_utf8(LOG.lock().unwrap_or_else(PoisonError::into_inner).clone()).unwrap();
        if text.contains(request_id) {
            return text;
        }
        tokio::task::yield_now().await;
    }
}

fn line_of(text: &str, request_id: &str) -> Json {
    let line = text.lines().find(|line| line.contains(request_id)).unwrap();
    serde_json::from_str(line).unwrap()
}

async fn requests_are_logged_with_their_ids(site: Site) {
    let server = site.server().await;
    let id = format!("logged-{}", server.port);
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace}-00f067aa0ba902b7-01");
    let headers = [("x-request-id", id.as_str()), ("traceparent", &parent)];
    server.get_with("/v1/profile/987654321", &headers).await.problem(404, "not_found");
    let text = logged_until(&id).await;
    let line = line_of(&text, &id);
    let expect = json!({
        "level": "INFO", "target": "statehouse::http", "message": "answered", "method": "GET",
        "route": "profile.read", "status": 404, "code": "not_found", "tenant": "default",
        "request_id": id, "trace_id": trace, "parent_id": "00f067aa0ba902b7",
    });
    for (name, value) in expect.as_object().unwrap() {
        assert_eq!(line[name], *value, "{name}");
    }
    assert!(line["micros"].is_u64() && line["at"].as_str().unwrap().ends_with('Z'));
    // Keys of rows belong to those whose rows they are.
    assert!(!text.contains("987654321"));
}

async fn secrets_are_not_logged(site: Site) {
    let shared = "a secret that two parties share, long enough";
    let jwt = Jwt::with(JwtKeys::Secret(shared.into()));
    let auth = Auth { api_keys: true, jwt: Some(jwt) };
    let server = Arc::new(site.server_with(Config { auth, ..Config::default() }).await);
    let secret = HouseSecret::of(&server.house, None).await.unwrap();
    let tenant = Tenant::new("acme").unwrap();
    let new = NewKey {
        tenant,
        name: "test".into(),
        scopes: vec![Scope::Admin],
        expires_in: None,
        networks: AllowedNetworks::default(),
    };
    let key = keys::create(&server.house, &secret, new, &AuditActor::program("test")).await.unwrap().key;
    let hidden = key.rsplit('_').next().unwrap().to_owned();
    let claims = json!({"tenant": "acme", "scope": "read write", "exp": 4_000_000_000_i64});
    let signing = jsonwebtoken::EncodingKey::from_secret(shared.as_bytes());
    let token = jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &signing).unwrap();
    let port = server.port;
    let idempotency = format!("idempotency-{port}-hidden");
    let content = format!("content-{port}-hidden");
    let cursor = format!("cursor-{port}-hidden");
    let wrong = format!("sth_0123456789abcdef_{}", "5e".repeat(36));
    let mut number = 0;
    for credential in [&key, &token, &wrong, &format!("{token}x")] {
        let bearer = format!("Bearer {credential}");
        let headers = [("authorization", bearer.as_str()), ("idempotency-key", &idempotency)];
        number += 1;
        for body in [
            json!({"user_id": number, "display_name": content}),
            json!({"user_id": content, "display_name": 1}),
            json!({"user_id": number, "display_name": "a", (content.as_str()): 1}),
        ] {
            server.put("POST", "/v1/profile", &headers, body).await;
        }
        server.send("POST", "/v1/profile", &headers, content.clone()).await;
        server.get_with(&format!("/v1/profile?cursor={cursor}"), &headers).await;
        server.get_with(&format!("/v1/profile/{content}"), &headers).await;
        stream(&server, &bearer).await;
    }
    let id = format!("last-{port}");
    server.get_with("/livez", &[("x-request-id", &id)]).await;
    let text = logged_until(&id).await;
    let shown = [&key, &hidden, &token, &idempotency, &content, &cursor, &wrong, &"5e".repeat(36)];
    for secret in shown {
        assert!(!text.contains(secret.as_str()), "{secret} is in the log");
    }
    let signature = token.rsplit('.').next().unwrap();
    assert!(!text.contains(signature) && !text.contains(shared));
    // The log has the requests all the same.
    assert!(text.contains("operation_reused") && text.contains("unauthenticated"));
}

/// A stream, and its end.
async fn stream(server: &Running, bearer: &str) {
    let mut raw = server.raw().await;
    raw.say(format!("GET /v1/events HTTP/1.1\r\nhost: localhost\r\nauthorization: {bearer}\r\n\r\n")).await;
    raw.until("\r\n\r\n").await;
}
