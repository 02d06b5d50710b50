//! Who gets in: keys, tokens, scopes, tenants.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value as Json, json};
use statehouse::House;
use statehouse::audit::AuditActor;
use statehouse_server::auth::Scope;
use statehouse_server::auth::keys::{self, NewKey};
use statehouse_server::auth::networks::AllowedNetworks;
use statehouse_server::auth::secret::HouseSecret;
use statehouse_server::config::{Auth, Jwt, JwtKeys};
use statehouse_server::{Config, Server, SetupError};
use statehouse_store::{Clock as _, ManualClock, SystemClock, Tenant, Time};

use crate::support::{Running, Site, cases};

cases![
    keys_open_the_door_for_their_tenant,
    scopes_bound_what_a_key_may_do,
    keys_expire_rotate_and_are_revoked,
    wrong_keys_are_refused,
    another_tenants_row_is_like_none,
    shared_secrets_sign_tokens,
    key_sets_sign_tokens,
    key_sets_come_from_an_address,
    key_sets_are_fetched_again_when_they_must_be,
    forged_tokens_are_refused,
    figures_need_an_administrator,
];

pub async fn key(
    house: &House,
    tenant: &str,
    scopes: &[Scope],
    expires_in: Option<Duration>,
) -> keys::CreatedKey {
    let secret = HouseSecret::of(house, None).await.unwrap();
    let new = NewKey {
        tenant: Tenant::new(tenant).unwrap(),
        name: "test".into(),
        scopes: scopes.to_vec(),
        expires_in,
        networks: AllowedNetworks::default(),
    };
    keys::create(house, &secret, new, &AuditActor::program("test")).await.unwrap()
}

pub fn with_keys() -> Config {
    let mut config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
    // Every request asks the store, so that a revocation shows at once.
    config.limits.credential_cache_ms = 0;
    config
}

pub async fn as_caller(
    server: &Running,
    credential: &str,
    method: &str,
    path: &str,
    body: Option<Json>,
) -> crate::support::Reply {
    let bearer = format!("Bearer {credential}");
    let headers = [("authorization", bearer.as_str())];
    match body {
        None => server.send(method, path, &headers, "").await,
        Some(body) => server.put(method, path, &headers, body).await,
    }
}

async fn keys_open_the_door_for_their_tenant(site: Site) {
    let server = site.server_with(with_keys()).await;
    let anonymous = server.get("/v1/profile/1").await;
    anonymous.problem(401, "unauthenticated");
    assert!(anonymous.header("www-authenticate").starts_with("Bearer"));
    let acme = key(&server.house, "acme", &[Scope::Read, Scope::Write], None).await.key;
    let body = json!({"user_id": 1, "display_name": "Ann"});
    as_caller(&server, &acme, "POST", "/v1/profile", Some(body)).await.ok(201);
    as_caller(&server, &acme, "GET", "/v1/profile/1", None).await.ok(200);
    // The header that names a tenant on an open door means nothing here.
    let bearer = format!("Bearer {acme}");
    let headers = [("authorization", bearer.as_str()), ("statehouse-tenant", "other")];
    server.get_with("/v1/profile/1", &headers).await.ok(200);
    // Probes and pages of problems are for everybody, and a guarded door takes any host name.
    for path in ["/livez", "/readyz", "/healthz", "/problems/not_found"] {
        server.get(path).await.ok(200);
    }
}

async fn scopes_bound_what_a_key_may_do(site: Site) {
    let server = site.server_with(with_keys()).await;
    let reader = key(&server.house, "acme", &[Scope::Read], None).await.key;
    let writer = key(&server.house, "acme", &[Scope::Write], None).await.key;
    let body = || Some(json!({"user_id": 1, "display_name": "Ann"}));
    let refused = as_caller(&server, &reader, "POST", "/v1/profile", body()).await;
    refused.problem(403, "forbidden");
    assert!(refused.header("www-authenticate").contains("insufficient_scope"));
    let batch = json!([{"action": "profile.create", "input": body()}]);
    as_caller(&server, &reader, "POST", "/v1/batch", Some(batch)).await.problem(403, "forbidden");
    as_caller(&server, &writer, "POST", "/v1/profile", body()).await.ok(201);
    as_caller(&server, &writer, "GET", "/v1/profile/1", None).await.problem(403, "forbidden");
    as_caller(&server, &writer, "GET", "/v1/events", None).await.problem(403, "forbidden");
    as_caller(&server, &reader, "GET", "/v1/profile/1", None).await.ok(200);
}

async fn keys_expire_rotate_and_are_revoked(site: Site) {
    let server = site.server_with(with_keys()).await;
    let house = &server.house;
    let read = |key: String| {
        let server = &server;
        async move { as_caller(server, &key, "GET", "/v1/profile", None).await }
    };
    let short = key(house, "acme", &[Scope::Read], Some(Duration::ZERO)).await;
    read(short.key.clone()).await.problem(401, "unauthenticated");
    let old = key(house, "acme", &[Scope::Read], None).await;
    let secret = HouseSecret::of(house, None).await.unwrap();
    let new = keys::rotate(
        house,
        &secret,
        &old.info.prefix,
        (Duration::from_secs(3600), None),
        &AuditActor::program("test"),
    )
    .await
    .unwrap();
    for live in [&old, &new] {
        read(live.key.clone()).await.ok(200);
    }
    let revoked = keys::revoke(house, &old.info.prefix, &AuditActor::program("test")).await.unwrap();
    assert!(revoked.revoked_at.is_some());
    read(old.key.clone()).await.problem(401, "unauthenticated");
    read(new.key.clone()).await.ok(200);
    assert_eq!(keys::revoke(house, &old.info.prefix, &AuditActor::program("test")).await.unwrap(), revoked);
    assert!(keys::revoke(house, "0000000000000000", &AuditActor::program("test")).await.is_err());
    let listed = keys::list(house, Some(&Tenant::new("acme").unwrap())).await.unwrap();
    assert_eq!(listed.len(), 3);
    assert_eq!(keys::list(house, Some(&Tenant::new("other").unwrap())).await.unwrap(), []);
    let text = serde_json::to_string(&listed).unwrap();
    let hidden = new.key.rsplit('_').next().unwrap();
    assert!(!text.contains(hidden) && text.contains(&new.info.prefix));
}

async fn wrong_keys_are_refused(site: Site) {
    let server = site.server_with(with_keys()).await;
    let good = key(&server.house, "acme", &[Scope::Admin], None).await.key;
    let other = key(&server.house, "acme", &[Scope::Admin], None).await.key;
    let mut typo = good.clone();
    let last = if typo.ends_with('0') { '1' } else { '0' };
    typo.pop();
    typo.push(last);
    // A prefix with another key's secret, and a right checksum nowhere.
    let mixed = format!("{}_{}", &good[..20], &other[21..]);
    for credential in ["", "x", "sth_", typo.as_str(), mixed.as_str(), &good[..50], "a.b.c"] {
        as_caller(&server, credential, "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
    }
    for header in ["Basic abc", "bearer", good.as_str()] {
        server.get_with("/v1/profile", &[("authorization", header)]).await.problem(401, "unauthenticated");
    }
    as_caller(&server, &good, "GET", "/v1/profile", None).await.ok(200);
    assert_eq!(server.written().await, 0);
}

async fn another_tenants_row_is_like_none(site: Site) {
    let server = site.server_with(with_keys()).await;
    let acme = key(&server.house, "acme", &[Scope::Admin], None).await.key;
    let other = key(&server.house, "other", &[Scope::Admin], None).await.key;
    let body = json!({"user_id": 1, "display_name": "Ann"});
    as_caller(&server, &acme, "POST", "/v1/profile", Some(body)).await.ok(201);
    for (method, suffix, body) in [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/restore", None),
        ("POST", "/mutate", Some(json!({"increment": {"points": 1}}))),
    ] {
        let mut answers = Vec::new();
        for user in [1, 2] {
            let path = format!("/v1/profile/{user}{suffix}");
            let reply = as_caller(&server, &other, method, &path, body.clone()).await;
            let mut problem = reply.problem(404, "not_found");
            for id in ["request_id", "trace_id", "instance"] {
                problem.as_object_mut().unwrap().remove(id);
            }
            answers.push(problem.to_string().replace("profile 2", "profile 1"));
        }
        assert_eq!(answers[0], answers[1], "{method}{suffix}");
    }
    assert_eq!(as_caller(&server, &other, "GET", "/v1/profile", None).await.ok(200).json(), json!([]));
    // And the key is free for a row of their own.
    let body = json!({"user_id": 1, "display_name": "Their own"});
    as_caller(&server, &other, "POST", "/v1/profile", Some(body)).await.ok(201);
}

const SHARED: &str = "a secret that two parties share, long enough";

fn now() -> i64 {
    SystemClock.now().micros() / 1_000_000
}

pub fn claims(more: Json) -> Json {
    let mut claims = json!({"tenant": "acme", "scope": "openid read write", "exp": now() + 600, "iss": "me", "aud": "shop"});
    for (name, value) in more.as_object().unwrap() {
        claims[name] = value.clone();
    }
    claims
}

pub fn signed(algorithm: Algorithm, key: &EncodingKey, id: Option<&str>, claims: &Json) -> String {
    let header = Header { kid: id.map(str::to_owned), ..Header::new(algorithm) };
    jsonwebtoken::encode(&header, claims, key).unwrap()
}

pub fn with_tokens(keys: JwtKeys) -> Config {
    let jwt = Jwt { issuer: Some("me".into()), audience: Some("shop".into()), ..Jwt::with(keys) };
    Config { auth: Auth { api_keys: false, jwt: Some(jwt) }, ..Config::default() }
}

async fn shared_secrets_sign_tokens(site: Site) {
    let server = site.server_with(with_tokens(JwtKeys::Secret(SHARED.into()))).await;
    let key = EncodingKey::from_secret(SHARED.as_bytes());
    let token = |more: Json| signed(Algorithm::HS256, &key, None, &claims(more));
    as_caller(&server, &token(json!({})), "GET", "/v1/profile", None).await.ok(200);
    as_caller(&server, &token(json!({"scope": ["read"]})), "GET", "/v1/profile", None).await.ok(200);
    as_caller(&server, &token(json!({"scope": "write"})), "GET", "/v1/profile", None)
        .await
        .problem(403, "forbidden");
    as_caller(&server, &token(json!({"nbf": now() - 5})), "GET", "/v1/profile", None).await.ok(200);
    for (name, value) in [
        ("exp", json!(now() - 3600)),
        ("exp", Json::Null),
        ("exp", json!("soon")),
        ("nbf", json!(now() + 3600)),
        ("iss", json!("another issuer")),
        ("iss", Json::Null),
        ("aud", json!("another shop")),
        ("aud", Json::Null),
        ("tenant", Json::Null),
        ("tenant", json!("a b")),
        ("tenant", json!("_house")),
        ("tenant", json!(["acme"])),
    ] {
        let reply = as_caller(&server, &token(json!({name: value})), "GET", "/v1/profile", None).await;
        reply.problem(401, "unauthenticated");
    }
    let short = with_tokens(JwtKeys::Secret("short".into()));
    assert!(matches!(Server::new(server.house.clone(), short).await, Err(SetupError::Tokens(_))));
}

/// An Ed25519 pair: the private key as PKCS #8, and the public one as a JWK.
pub fn ed25519() -> (EncodingKey, Json) {
    let secret: [u8; 32] = statehouse_store::random::secret_bytes().unwrap();
    let head =
        [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
    let der: Vec<u8> = head.into_iter().chain(secret).collect();
    let key = EncodingKey::from_ed_der(&der);
    let jwk = jsonwebtoken::jwk::Jwk::from_encoding_key(&key, Algorithm::EdDSA).unwrap();
    (key, serde_json::to_value(jwk).unwrap())
}

pub fn key_set(keys: &[(&str, &Json)]) -> String {
    let keys: Vec<Json> = keys
        .iter()
        .map(|(id, jwk)| {
            let mut jwk = (*jwk).clone();
            jwk["kid"] = json!(id);
            jwk
        })
        .collect();
    json!({"keys": keys}).to_string()
}

fn rsa() -> (EncodingKey, Json) {
    use aws_lc_rs::encoding::AsDer as _;
    use base64::Engine as _;
    let pair = aws_lc_rs::rsa::KeyPair::generate(aws_lc_rs::rsa::KeySize::Rsa2048).unwrap();
    let der: aws_lc_rs::encoding::Pkcs8V1Der<'_> = pair.as_der().unwrap();
    let text = base64::engine::general_purpose::STANDARD.encode(der.as_ref());
    let pem = format!("-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n");
    let key = EncodingKey::from_rsa_pem(pem.as_bytes()).unwrap();
    let jwk = jsonwebtoken::jwk::Jwk::from_encoding_key(&key, Algorithm::RS256).unwrap();
    (key, serde_json::to_value(jwk).unwrap())
}

async fn key_sets_sign_tokens(site: Site) {
    let ((ed, ed_public), (rsa, rsa_public)) = (ed25519(), rsa());
    let file = site.folder().join("keys.json");
    std::fs::write(&file, key_set(&[("ed", &ed_public), ("rsa", &rsa_public)])).unwrap();
    let server = site.server_with(with_tokens(JwtKeys::JwksFile(file.clone()))).await;
    let all = claims(json!({}));
    for token in [
        signed(Algorithm::EdDSA, &ed, Some("ed"), &all),
        signed(Algorithm::EdDSA, &ed, None, &all),
        signed(Algorithm::RS256, &rsa, Some("rsa"), &all),
    ] {
        as_caller(&server, &token, "GET", "/v1/profile", None).await.ok(200);
    }
    let (stranger, _) = ed25519();
    for token in [
        signed(Algorithm::EdDSA, &stranger, Some("ed"), &all),
        signed(Algorithm::EdDSA, &ed, Some("rsa"), &all),
        signed(Algorithm::RS512, &rsa, Some("rsa"), &all),
        // The public key used as a shared secret.
        signed(
            Algorithm::HS256,
            &EncodingKey::from_secret(rsa_public["n"].as_str().unwrap().as_bytes()),
            Some("rsa"),
            &all,
        ),
    ] {
        as_caller(&server, &token, "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
    }
    let missing = with_tokens(JwtKeys::JwksFile(site.folder().join("nothing.json")));
    assert!(matches!(Server::new(server.house.clone(), missing).await, Err(SetupError::Tokens(_))));
}

async fn key_sets_come_from_an_address(site: Site) {
    let (ed, public) = ed25519();
    let issuer = Issuer::with(key_set(&[("ed", &public)])).await;
    let server = site.server_with(with_tokens(JwtKeys::JwksUrl(issuer.address))).await;
    let token = signed(Algorithm::EdDSA, &ed, Some("ed"), &claims(json!({})));
    as_caller(&server, &token, "GET", "/v1/profile", None).await.ok(200);
    let plain = with_tokens(JwtKeys::JwksUrl("http://example.com/keys".into()));
    assert!(matches!(Server::new(server.house.clone(), plain).await, Err(SetupError::Tokens(_))));
}

/// An issuer of key sets, which counts how often it is asked.
#[derive(Clone)]
struct Issuer {
    address: String,
    document: Arc<Mutex<Option<String>>>,
    asked: Arc<AtomicUsize>,
}

impl Issuer {
    async fn with(document: String) -> Issuer {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}/keys", listener.local_addr().unwrap());
        let issuer =
            Issuer { address, document: Arc::new(Mutex::new(Some(document))), asked: Arc::default() };
        let answering = issuer.clone();
        tokio::spawn(async move {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            while let Ok((mut stream, _)) = listener.accept().await {
                answering.asked.fetch_add(1, Ordering::SeqCst);
                let mut buffer = [0; 4096];
                let _ = stream.read(&mut buffer).await;
                // One that is down closes the connection without a word.
                let Some(document) = answering.document.lock().unwrap().clone() else { continue };
                let length = document.len();
                let head =
                    format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all(format!("{head}{document}").as_bytes()).await;
            }
        });
        issuer
    }

    fn publish(&self, document: Option<String>) {
        *self.document.lock().unwrap() = document;
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

async fn key_sets_are_fetched_again_when_they_must_be(site: Site) {
    let ((first, first_public), (second, second_public)) = (ed25519(), ed25519());
    let issuer = Issuer::with(key_set(&[("first", &first_public)])).await;
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let config = with_tokens(JwtKeys::JwksUrl(issuer.address.clone()));
    let server = Running::of(site.house_at(&clock).await, config).await;
    let claims = claims(json!({"exp": 1_900_000_000}));
    let old = signed(Algorithm::EdDSA, &first, Some("first"), &claims);
    let new = signed(Algorithm::EdDSA, &second, Some("second"), &claims);
    let ask = |token: String, status: u16| {
        let server = &server;
        async move { as_caller(server, &token, "GET", "/v1/profile", None).await.ok(status) }
    };
    ask(old.clone(), 200).await;
    ask(new.clone(), 401).await;
    assert_eq!(issuer.asked(), 1);
    // The issuer rotates. A key that is not known is asked for, but not at once: no client can make this server hammer it.
    issuer.publish(Some(key_set(&[("first", &first_public), ("second", &second_public)])));
    ask(new.clone(), 401).await;
    assert_eq!(issuer.asked(), 1);
    clock.advance(Duration::from_secs(11));
    ask(new.clone(), 200).await;
    assert_eq!(issuer.asked(), 2);
    let unknown = signed(Algorithm::EdDSA, &second, Some("unknown"), &claims);
    for _ in 0..2 {
        clock.advance(Duration::from_secs(11));
        for _ in 0..10 {
            ask(unknown.clone(), 401).await;
        }
    }
    assert_eq!(issuer.asked(), 4);
    // A set is fetched again after a while; if that fails, the keys that are known stay in use.
    issuer.publish(None);
    clock.advance(Duration::from_secs(301));
    for token in [&old, &new] {
        ask(token.clone(), 200).await;
    }
    assert!(issuer.asked() > 4);
    // And one that was withdrawn is no longer accepted once the issuer can be asked.
    issuer.publish(Some(key_set(&[("first", &first_public), ("second", &second_public)])));
    clock.advance(Duration::from_secs(10));
    ask(old.clone(), 200).await;
    let asked = issuer.asked();
    issuer.publish(Some(key_set(&[("second", &second_public)])));
    clock.advance(Duration::from_millis(9_999));
    ask(old.clone(), 200).await;
    assert_eq!(issuer.asked(), asked, "the set is asked for too often");
    clock.advance(Duration::from_millis(1));
    ask(old, 401).await;
    ask(new, 200).await;
}

async fn forged_tokens_are_refused(site: Site) {
    use base64::Engine as _;
    let server = site.server_with(with_tokens(JwtKeys::Secret(SHARED.into()))).await;
    let part = |json: Json| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(json.to_string());
    let none = format!("{}.{}.", part(json!({"alg": "none", "typ": "JWT"})), part(claims(json!({}))));
    let wrong = EncodingKey::from_secret(b"a secret that was guessed by a client");
    let good =
        signed(Algorithm::HS256, &EncodingKey::from_secret(SHARED.as_bytes()), None, &claims(json!({})));
    let mut parts: Vec<String> = good.split('.').map(str::to_owned).collect();
    parts[1] = part(claims(json!({"tenant": "other"})));
    for token in [
        none,
        signed(Algorithm::HS256, &wrong, None, &claims(json!({}))),
        signed(Algorithm::HS512, &EncodingKey::from_secret(SHARED.as_bytes()), None, &claims(json!({}))),
        parts.join("."),
        format!("{good}x"),
        good.replace('.', ""),
        "..".into(),
        "é".into(),
    ] {
        let bearer = format!("Bearer {token}");
        let reply = server.get_with("/v1/profile", &[("authorization", &bearer)]).await;
        reply.problem(401, "unauthenticated");
    }
    as_caller(&server, &good, "GET", "/v1/profile", None).await.ok(200);
}

async fn figures_need_an_administrator(site: Site) {
    let server = site.server_with(with_keys()).await;
    server.get("/metrics").await.problem(401, "unauthenticated");
    let reader = key(&server.house, "acme", &[Scope::Read], None).await.key;
    as_caller(&server, &reader, "GET", "/metrics", None).await.problem(403, "forbidden");
    let admin = key(&server.house, "acme", &[Scope::Admin], None).await.key;
    as_caller(&server, &admin, "GET", "/metrics", None).await.ok(200);
    let open = Running::of(server.house.clone(), Config { open_metrics: true, ..with_keys() }).await;
    open.get("/metrics").await.ok(200);
}
