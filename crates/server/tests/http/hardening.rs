//! Smaller hardening findings: each was an accepted request that should have been rejected, or a wrong probe.

use std::sync::Arc;
use std::time::Duration;

use jsonwebtoken::Algorithm;
use serde_json::{Value as Json, json};
use statehouse::audit::AuditActor;
use statehouse::worker::WorkerOptions;
use statehouse_server::auth::Scope;
use statehouse_server::auth::keys::{self, NewKey};
use statehouse_server::auth::networks::AllowedNetworks;
use statehouse_server::auth::secret::HouseSecret;
use statehouse_server::config::{Auth, JwtKeys, Tls};
use statehouse_server::{Config, Server, SetupError};
use statehouse_store::{Clock as _, SystemClock, Tenant};
use statehouse_store_sqlite::{SqliteOptions, SqliteStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::crash_vfs::CrashVfs;
use crate::credentials::{as_caller, claims, ed25519, key, key_set, with_keys, with_tokens};
use crate::logged::logged_until;
use crate::support::{BLUEPRINT, Running, Site, cases, house_of, house_over};
use crate::trap::{FAIL_WRITES, SOUND, TrapStore};

cases![
    empty_writes_show_nothing_to_a_caller_that_may_not_read,
    a_revoked_key_is_not_rotated,
    a_key_is_used_from_its_networks_only,
    names_of_keys_are_plain_text,
    key_sets_say_what_a_key_is_for,
    tokens_of_other_types_are_rejected,
    a_removed_key_is_not_trusted_any_more,
    ports_are_in_range,
    tokens_of_writes_are_sealed,
    tokens_of_writes_are_sealed_for_views,
    a_store_that_cannot_write_is_not_ready,
    a_full_disk_is_not_ready,
    a_worker_that_cannot_write_makes_the_server_unready,
    keys_over_plain_http_are_reported,
    certificates_are_reloaded,
    clients_need_a_certificate_of_an_authority,
    the_document_needs_a_credential,
    idle_connections_are_kept_for_the_idle_time,
];

async fn empty_writes_show_nothing_to_a_caller_that_may_not_read(site: Site) {
    let server = site.server_with(with_keys()).await;
    let writer = key(&server.house, "acme", &[Scope::Write], None).await.key;
    let both = key(&server.house, "acme", &[Scope::Read, Scope::Write], None).await.key;
    let row = json!({"user_id": 1, "display_name": "Ann", "bio": "hidden"});
    as_caller(&server, &both, "POST", "/v1/profile", Some(row)).await.ok(201);
    let headers = |bearer: &str| {
        [("authorization".to_owned(), format!("Bearer {bearer}")), ("if-match".to_owned(), "*".to_owned())]
    };
    let patch = async |bearer: &str, body: Json| {
        let headers = headers(bearer);
        let headers: Vec<(&str, &str)> = headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        server.put("PATCH", "/v1/profile/1", &headers, body).await
    };
    let silent = patch(&writer, json!({})).await.ok(204);
    assert!(silent.body.is_empty());
    let batch = json!([{"action": "profile.patch", "key": "1", "expected_version": "*", "input": {}}]);
    let silent = as_caller(&server, &writer, "POST", "/v1/batch", Some(batch)).await.ok(200);
    assert!(!String::from_utf8_lossy(&silent.body).contains("hidden"), "{silent:?}");
    // A caller that may read sees the row, and a write that changes something leaves its trace and shows its result.
    assert_eq!(patch(&both, json!({})).await.ok(200).json()["bio"], "hidden");
    patch(&writer, json!({"display_name": "Bob"})).await.ok(200);
}

async fn a_revoked_key_is_not_rotated(site: Site) {
    let house = site.house().await;
    let secret = HouseSecret::of(&house, None).await.unwrap();
    let revoked = key(&house, "acme", &[Scope::Read], None).await;
    keys::revoke(&house, &revoked.info.prefix, &AuditActor::program("test")).await.unwrap();
    let expired = key(&house, "acme", &[Scope::Read], Some(Duration::ZERO)).await;
    for dead in [revoked, expired] {
        let rotated = keys::rotate(
            &house,
            &secret,
            &dead.info.prefix,
            (Duration::from_secs(60), None),
            &AuditActor::program("test"),
        )
        .await;
        assert!(rotated.is_err(), "{rotated:?}");
    }
    assert_eq!(keys::list(&house, None).await.unwrap().len(), 2);
}

async fn a_key_is_used_from_its_networks_only(site: Site) {
    let server = site.server_with(with_keys()).await;
    let secret = HouseSecret::of(&server.house, None).await.unwrap();
    let key_from = async |networks: &str| {
        let new = NewKey {
            tenant: Tenant::new("acme").unwrap(),
            name: "test".into(),
            scopes: vec![Scope::Read, Scope::Write, Scope::Admin],
            expires_in: None,
            networks: networks.parse().unwrap(),
        };
        keys::create(&server.house, &secret, new, &AuditActor::program("test")).await.unwrap()
    };
    let (near, far) =
        (key_from("10.0.0.0/8, 127.0.0.0/8").await, key_from("10.0.0.0/8, 2001:db8::/32").await);
    assert_eq!(near.info.networks.as_deref(), Some("10.0.0.0/8, 127.0.0.0/8"));
    let overlap = Duration::from_secs(60);
    let rotated =
        keys::rotate(&server.house, &secret, &far.info.prefix, (overlap, None), &AuditActor::program("test"))
            .await
            .unwrap();
    assert_eq!(rotated.info.networks, far.info.networks);
    for path in ["/v1/profile", "/openapi.json", "/metrics"] {
        as_caller(&server, &near.key, "GET", path, None).await.ok(200);
    }
    let login = async |key: &str| {
        let form = ("content-type", "application/x-www-form-urlencoded");
        let headers = [form, ("sec-fetch-site", "same-origin")];
        server.send("POST", "/console/login", &headers, format!("key={key}")).await
    };
    let batch =
        || Some(json!([{"action": "profile.create", "input": {"user_id": 1, "display_name": "Ann"}}]));
    for key in [&far.key, &rotated.key] {
        for path in ["/v1/profile", "/openapi.json", "/metrics", "/v1/events"] {
            as_caller(&server, key, "GET", path, None).await.problem(401, "unauthenticated");
        }
        as_caller(&server, key, "POST", "/v1/batch", batch()).await.problem(401, "unauthenticated");
        // A header is no address.
        let bearer = format!("Bearer {key}");
        let forged = [("authorization", bearer.as_str()), ("x-forwarded-for", "10.0.0.1")];
        server.get_with("/v1/profile", &forged).await.problem(401, "unauthenticated");
        login(key).await.ok(401);
    }
    login(&near.key).await.ok(303);
    as_caller(&server, &near.key, "POST", "/v1/batch", batch()).await.ok(200);
}

async fn names_of_keys_are_plain_text(site: Site) {
    let house = site.house().await;
    let secret = HouseSecret::of(&house, None).await.unwrap();
    let long = "x".repeat(201);
    for name in ["a\nb", "\u{1b}[2J", "a\u{0}", "\u{202e}gpj", long.as_str()] {
        let new = NewKey {
            tenant: Tenant::new("acme").unwrap(),
            name: name.into(),
            scopes: vec![Scope::Read],
            expires_in: None,
            networks: AllowedNetworks::default(),
        };
        assert!(keys::create(&house, &secret, new, &AuditActor::program("test")).await.is_err(), "{name:?}");
    }
    assert_eq!(keys::list(&house, None).await.unwrap(), []);
}

async fn key_sets_say_what_a_key_is_for(site: Site) {
    let (ed, public) = ed25519();
    let file = site.folder().join("keys.json");
    let token = || crate::credentials::signed(Algorithm::EdDSA, &ed, Some("ed"), &claims(json!({})));
    for (member, value) in [("use", json!("enc")), ("key_ops", json!(["encrypt"])), ("alg", json!("RS256"))] {
        let mut jwk = public.clone();
        jwk[member] = value;
        std::fs::write(&file, key_set(&[("ed", &jwk)])).unwrap();
        let server = site.server_with(with_tokens(JwtKeys::JwksFile(file.clone()))).await;
        as_caller(&server, &token(), "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
    }
    let mut jwk = public.clone();
    jwk["use"] = json!("sig");
    jwk["alg"] = json!("EdDSA");
    std::fs::write(&file, key_set(&[("ed", &jwk)])).unwrap();
    let server = site.server_with(with_tokens(JwtKeys::JwksFile(file.clone()))).await;
    as_caller(&server, &token(), "GET", "/v1/profile", None).await.ok(200);
}

/// A token with other members in its header.
fn with_header(key: &jsonwebtoken::EncodingKey, members: Json) -> String {
    use base64::Engine as _;
    let base64 = base64::engine::general_purpose::URL_SAFE_NO_PAD;
    let mut header = json!({"alg": "EdDSA", "kid": "ed"});
    header.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    let message =
        format!("{}.{}", base64.encode(header.to_string()), base64.encode(claims(json!({})).to_string()));
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), key, Algorithm::EdDSA).unwrap();
    format!("{message}.{signature}")
}

async fn tokens_of_other_types_are_rejected(site: Site) {
    let (ed, public) = ed25519();
    let file = site.folder().join("keys.json");
    std::fs::write(&file, key_set(&[("ed", &public)])).unwrap();
    let server = site.server_with(with_tokens(JwtKeys::JwksFile(file))).await;
    for header in [
        json!({"crit": ["exp"]}),
        json!({"crit": ["b64"], "b64": true}),
        json!({"crit": []}),
        json!({"typ": "dpop+jwt"}),
        json!({"typ": "logout+jwt"}),
        json!({"typ": "JOSE"}),
    ] {
        let token = with_header(&ed, header.clone());
        let reply = as_caller(&server, &token, "GET", "/v1/profile", None).await;
        assert_eq!(reply.status, 401, "{header}: {reply:?}");
    }
    for header in
        [json!({}), json!({"typ": "JWT"}), json!({"typ": "at+jwt"}), json!({"typ": "application/at+JWT"})]
    {
        as_caller(&server, &with_header(&ed, header), "GET", "/v1/profile", None).await.ok(200);
    }
}

async fn a_removed_key_is_not_trusted_any_more(site: Site) {
    let ((old, old_public), (_, new_public)) = (ed25519(), ed25519());
    let file = site.folder().join("keys.json");
    std::fs::write(&file, key_set(&[("old", &old_public)])).unwrap();
    let mut config = with_tokens(JwtKeys::JwksFile(file.clone()));
    config.limits.credential_cache_ms = 0;
    let server = site.server_with(config).await;
    let token = crate::credentials::signed(Algorithm::EdDSA, &old, Some("old"), &claims(json!({})));
    as_caller(&server, &token, "GET", "/v1/profile", None).await.ok(200);
    std::fs::write(&file, key_set(&[("new", &new_public)])).unwrap();
    as_caller(&server, &token, "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
}

async fn ports_are_in_range(site: Site) {
    let server = site.server().await;
    for host in ["localhost:99999", "localhost:x", "127.0.0.1:65536", "[::1]x"] {
        let mut raw = server.raw().await;
        raw.say(format!("GET /v1/profile HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")).await;
        let reply = raw.rest().await;
        assert!(reply.starts_with("HTTP/1.1 4"), "{host}: {reply}");
    }
    let url = JwtKeys::JwksUrl("https://login.example.com:99999/keys".into());
    let refused = Server::new(server.house.clone(), with_tokens(url)).await;
    let Err(SetupError::Tokens(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("port"), "{why}");
}

async fn tokens_of_writes_are_sealed(site: Site) {
    let server = site.server().await;
    let written = server.create(1).await;
    let token = written.header("statehouse-token").to_owned();
    assert!(!token.contains('-') || token.len() > 20, "the place in the log is visible: {token}");
    let cached = |token: &str| format!("/v1/profile/1?consistency=cached&after={token}");
    server.get(&cached(&token)).await.ok(200);
    let mut forged = token.clone().into_bytes();
    forged[3] = if forged[3] == b'A' { b'B' } else { b'A' };
    for token in ["w0-999999", "w", "w0-1", "", std::str::from_utf8(&forged).unwrap()] {
        let problem = server.get(&cached(token)).await.problem(400, "invalid_input");
        assert_eq!(problem["errors"][0]["pointer"], "/after", "{token}");
    }
    // It belongs to its tenant.
    let other = server.get_with(&cached(&token), &[("statehouse-tenant", "other")]).await;
    other.problem(400, "invalid_input");
}

async fn tokens_of_writes_are_sealed_for_views(site: Site) {
    let view = "[view.names]\nof = \"profile\"\ngroup_by = [\"display_name\"]\ncount = true\n";
    let house = site.house_of(&format!("{BLUEPRINT}{view}")).await;
    let server = Running::of(house, Config::default()).await;
    let token = server.create(1).await.header("statehouse-token").to_owned();
    let read = |token: &str| format!("/v1/names/Ann?wait_ms=0&after={token}");
    // No worker runs, so that the view cannot have the write: the token is read and believed.
    server.get(&read(&token)).await.problem(503, "unavailable");
    let mut forged = token.clone().into_bytes();
    forged[3] = if forged[3] == b'A' { b'B' } else { b'A' };
    for token in ["w0-999999", "w", "w0-1", "", std::str::from_utf8(&forged).unwrap()] {
        let problem = server.get(&read(token)).await.problem(400, "invalid_input");
        assert_eq!(problem["errors"][0]["pointer"], "/after", "{token}");
    }
    let other = server.get_with(&read(&token), &[("statehouse-tenant", "other")]).await;
    other.problem(400, "invalid_input");
}

async fn a_store_that_cannot_write_is_not_ready(site: Site) {
    let store = TrapStore::over(site.store().await);
    let server = Running::of(house_over(store.clone()).await, Config::default()).await;
    server.create(1).await;
    server.get("/readyz").await.ok(200);
    // The disk is full: reads are answered, writes are not.
    store.set(FAIL_WRITES);
    let body = json!({"user_id": 2, "display_name": "Ann"});
    server.put("POST", "/v1/profile", &[], body).await.problem(503, "unavailable");
    server.get("/v1/profile/1").await.ok(200);
    server.get("/readyz").await.problem(503, "unavailable");
    server.get("/livez").await.ok(200);
    store.set(SOUND);
    server.get("/readyz").await.ok(200);
}

/// SQLite itself reports the full disk, whatever the engine of the site is.
async fn a_full_disk_is_not_ready(site: Site) {
    let name = site.folder().file_name().unwrap().to_str().unwrap().to_owned();
    let disk = CrashVfs::register(&name, 1, 0);
    let options =
        SqliteOptions { vfs: Some(disk.name()), ..SqliteOptions::at(site.folder().join("full.db")) };
    let store = Arc::new(SqliteStore::open(options).await.unwrap());
    let server = Running::of(house_over(store).await, Config::default()).await;
    server.create(1).await;
    server.get("/readyz").await.ok(200);
    disk.refuse_writes(true);
    let body = json!({"user_id": 2, "display_name": "Ann"});
    server.put("POST", "/v1/profile", &[], body.clone()).await.problem(503, "unavailable");
    server.get("/v1/profile/1").await.ok(200);
    server.get("/readyz").await.problem(503, "unavailable");
    server.get("/livez").await.ok(200);
    disk.refuse_writes(false);
    server.get("/readyz").await.ok(200);
    server.put("POST", "/v1/profile", &[], body).await.ok(201);
}

async fn a_worker_that_cannot_write_makes_the_server_unready(site: Site) {
    let store = TrapStore::over(site.store().await);
    let timers = format!("{BLUEPRINT}[timer.alarm]\nkey = {{ id = \"int\" }}\n");
    let server = Running::of(house_of(&timers, store.clone()).await, Config::default()).await;
    let options = WorkerOptions { lease: Duration::from_millis(600), ..WorkerOptions::default() };
    server.house.start_workers(options);
    server.get("/readyz").await.ok(200);
    // No request writes: only the workers notice. They try again, so that the first failures are known by then.
    store.set(FAIL_WRITES);
    store.until_refused(6).await;
    server.get("/readyz").await.problem(503, "unavailable");
    server.get("/livez").await.ok(200);
    store.set(SOUND);
    server.get("/readyz").await.ok(200);
    server.house.stop_workers().await;
}

async fn keys_over_plain_http_are_reported(site: Site) {
    let house = site.house().await;
    for (address, is_public) in [("0.0.0.0:0", true), ("127.0.0.1:0", false)] {
        let config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
        let server = Server::new(house.clone(), config).await.unwrap();
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        // Ports are used again, so the log of this process may have the same port with another address.
        let bound = listener.local_addr().unwrap().to_string();
        server.serve(listener, async {}).await.unwrap();
        let text = logged_until(&format!("{bound}\"")).await;
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("plain HTTP")).collect();
        assert_eq!(lines.iter().any(|line| line.contains(&bound)), is_public, "{lines:?}");
    }
}

async fn certificates_are_reloaded(site: Site) {
    let (certificates, file) = (site.folder().join("cert.pem"), site.folder().join("key.pem"));
    let renew = || {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
        std::fs::write(&certificates, made.cert.pem()).unwrap();
        std::fs::write(&file, made.signing_key.serialize_pem()).unwrap();
        made.cert.der().clone()
    };
    let first = renew();
    let tls = Tls { certificates: certificates.clone(), key: file.clone(), client_authorities: None };
    let mut config = Config { tls: Some(tls), ..Config::default() };
    config.limits.credential_cache_ms = 0;
    let server = site.server_with(config).await;
    let is_shown = async |certificate: &rustls::pki_types::CertificateDer<'static>| {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider);
        let client = client.with_safe_default_protocol_versions().unwrap();
        let client = client.with_root_certificates(roots).with_no_client_auth();
        let tcp = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
        tokio_rustls::TlsConnector::from(Arc::new(client)).connect(name, tcp).await.is_ok()
    };
    assert!(is_shown(&first).await);
    let second = renew();
    assert!(is_shown(&second).await && !is_shown(&first).await);
    // Files that cannot be used do not replace those in use.
    std::fs::write(&certificates, "nonsense").unwrap();
    assert!(is_shown(&second).await);
}

async fn clients_need_a_certificate_of_an_authority(site: Site) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (certificates, key) = (site.folder().join("cert.pem"), site.folder().join("key.pem"));
    std::fs::write(&certificates, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let authority = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let root = params.self_signed(&authority).unwrap();
    let authorities = site.folder().join("ca.pem");
    std::fs::write(&authorities, root.pem()).unwrap();
    let issuer = rcgen::Issuer::new(params, authority);
    let tls = Tls { certificates, key, client_authorities: Some(authorities) };
    let server = site.server_with(Config { tls: Some(tls), ..Config::default() }).await;
    let client_key = rcgen::KeyPair::generate().unwrap();
    let signed = rcgen::CertificateParams::new(vec!["client".into()]).unwrap();
    let signed = signed.signed_by(&client_key, &issuer).unwrap();
    let stranger = rcgen::generate_simple_self_signed(vec!["client".into()]).unwrap();
    let is_served = async |identity: Option<(rustls::pki_types::CertificateDer<'static>, Vec<u8>)>| {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider);
        let client = client.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let client = match identity {
            None => client.with_no_client_auth(),
            Some((certificate, key)) => {
                let key = rustls::pki_types::PrivateKeyDer::try_from(key).unwrap();
                client.with_client_auth_cert(vec![certificate], key).unwrap()
            }
        };
        let tcp = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
        let Ok(mut stream) = tokio_rustls::TlsConnector::from(Arc::new(client)).connect(name, tcp).await
        else {
            return false;
        };
        let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        let mut answer = Vec::new();
        // With TLS 1.3 the client learns of the rejection when it reads.
        stream.write_all(request.as_bytes()).await.is_ok()
            && stream.read_to_end(&mut answer).await.is_ok()
            && answer.starts_with(b"HTTP/1.1 200")
    };
    assert!(is_served(Some((signed.der().clone(), client_key.serialize_der()))).await);
    assert!(!is_served(None).await);
    assert!(!is_served(Some((stranger.cert.der().clone(), stranger.signing_key.serialize_der()))).await);
}

async fn the_document_needs_a_credential(site: Site) {
    let server = site.server_with(with_keys()).await;
    server.get("/openapi.json").await.problem(401, "unauthenticated");
    let reader = key(&server.house, "acme", &[Scope::Read], None).await.key;
    as_caller(&server, &reader, "GET", "/openapi.json", None).await.ok(200);
    let config = Config { open_openapi: true, ..with_keys() };
    let server = Running::of(server.house.clone(), config).await;
    server.get("/openapi.json").await.ok(200);
}

async fn idle_connections_are_kept_for_the_idle_time(site: Site) {
    let mut config = Config::default();
    config.limits.header_timeout_ms = 200;
    let server = site.server_with(config).await;
    let mut raw = server.raw().await;
    let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
    for _ in 0..2 {
        raw.say(request).await;
        raw.until("ok\n").await;
        SystemClock.sleep(Duration::from_millis(600)).await;
    }
    // The headers of a request still have their own timeout.
    raw.say("GET /livez HTTP/1.1\r\nhost: local").await;
    assert_eq!(raw.rest().await, "");
}
