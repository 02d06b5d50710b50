//! The console without a browser: who may use it, what it refuses, and that a page performs a bounded number of reads.

use serde_json::json;
use statehouse::audit::AuditActor;
use statehouse_server::Config;
use statehouse_server::auth::keys::{self, NewKey};
use statehouse_server::auth::networks::AllowedNetworks;
use statehouse_server::auth::secret::HouseSecret;
use statehouse_server::config::{Auth, ConsoleMode};
use statehouse_store::Tenant;

use crate::support::{Headers, Reply, Running, Site, cases};

cases![
    pages_are_served_without_configuration,
    forms_of_other_origins_are_rejected,
    the_console_can_be_switched_off_or_read_only,
    a_form_that_is_sent_twice_is_one_write,
    a_key_opens_a_session,
    scopes_decide_what_a_session_may_do,
    tenants_do_not_see_each_other,
];

const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const OWN: (&str, &str) = ("sec-fetch-site", "same-origin");

fn page(reply: &Reply) -> String {
    String::from_utf8_lossy(&reply.body).into_owned()
}

async fn post(server: &Running, path: &str, headers: Headers<'_>, form: &str) -> Reply {
    let headers: Vec<(&str, &str)> = headers.iter().copied().chain([FORM]).collect();
    server.send("POST", path, &headers, form.to_owned()).await
}

const CREATE: &str = "operation=op-1&f.user_id=7&f.display_name=Ann";

async fn pages_are_served_without_configuration(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    for (path, text) in [
        ("/console", "Nothing is wrong"),
        ("/console/r/profile", "/console/r/profile/1"),
        ("/console/r/profile/1", "profile.created"),
        ("/console/a/profile.update?key=1", "Idempotency-Key"),
        ("/console/batch", "Run all or none"),
        ("/console/audit", "secret.generate"),
        ("/console/r/profile/1", "by <span class=\"mono\">open</span>"),
        ("/console/log", "<td class=\"mono\">open</td>"),
        ("/console/log", "profile.created"),
        ("/console/groups", "Workers"),
        ("/console/projections", "Projections"),
        ("/console/queues", "Queues"),
        ("/console/atlas", "A01"),
        ("/console/atlas/entity", "Failures"),
        ("/console/blueprint", "The store fits the blueprint."),
        ("/console/keys", "Create key"),
    ] {
        let reply = server.get(path).await.ok(200);
        assert!(page(&reply).contains(text), "{path}: {}", page(&reply));
        let policy = reply.header("content-security-policy");
        assert!(policy.starts_with("default-src 'self'") && !policy.contains("unsafe"), "{policy}");
        assert!(!page(&reply).contains("<script>") && !page(&reply).contains(" style="), "{path}");
        assert_eq!(reply.header("cache-control"), "no-store");
    }
    server.get("/console/nothing").await.ok(404);
    server.get("/console/r/nothing").await.ok(404);
    server.get("/console/r/profile/99").await.ok(404);
    server.get("/consoles").await.problem(404, "not_found");
    let found = server.get("/console/find?q=profile+1").await.ok(303);
    assert_eq!(found.header("location"), "/console/r/profile/1");
}

async fn forms_of_other_origins_are_rejected(site: Site) {
    let server = site.server().await;
    let host = format!("http://127.0.0.1:{}", server.port);
    for headers in [
        &[][..],
        &[("sec-fetch-site", "same-site")],
        &[("sec-fetch-site", "none")],
        &[("origin", "http://localhost:1")],
        &[("origin", "http://localhost:1"), ("sec-fetch-site", "same-origin")],
    ] {
        post(&server, "/console/a/profile.create", headers, CREATE).await.ok(403);
    }
    // Open mode rejects requests of other sites before the console sees them.
    post(&server, "/console/a/profile.create", &[("sec-fetch-site", "cross-site")], CREATE).await.ok(403);
    assert_eq!(server.written().await, 0);
    post(&server, "/console/a/profile.create", &[("origin", &host)], CREATE).await.ok(200);
    assert_eq!(server.written().await, 1);
    let json =
        server.send("POST", "/console/a/profile.create", &[OWN, ("content-type", "application/json")], "{}");
    json.await.ok(415);
    server.send("DELETE", "/console", &[OWN], "").await.ok(405);
}

async fn the_console_can_be_switched_off_or_read_only(site: Site) {
    let server = site.server_with(Config { console: ConsoleMode::Off, ..Config::default() }).await;
    server.get("/console").await.problem(404, "not_found");
    let config = Config { console: ConsoleMode::ReadOnly, ..Config::default() };
    let server = Running::of(server.house.clone(), config).await;
    let home = page(&server.get("/console/r/profile").await.ok(200));
    assert!(home.contains("read-only") && !home.contains("profile.create"), "{home}");
    server.get("/console/a/profile.create").await.ok(403);
    for (path, form) in [
        ("/console/a/profile.create", CREATE),
        ("/console/batch", "operation=b&calls=[]"),
        ("/console/keys", "do=create&tenant=a&scopes=read"),
        ("/console/projections", "do=rebuild&projection=x"),
        ("/console/groups", "do=seek&group=x&partition=0&to=0"),
    ] {
        post(&server, path, &[OWN], form).await.ok(403);
    }
    assert_eq!(server.written().await, 0);
}

async fn a_form_that_is_sent_twice_is_one_write(site: Site) {
    let server = site.server().await;
    for _ in 0..2 {
        let reply = post(&server, "/console/a/profile.create", &[OWN], CREATE).await.ok(200);
        assert!(page(&reply).contains("Written"), "{}", page(&reply));
    }
    assert_eq!(server.written().await, 1);
    // Errors are beside their fields, and nothing is written.
    let wrong = "operation=op-2&f.user_id=seven&f.display_name=Ann";
    let reply = post(&server, "/console/a/profile.create", &[OWN], wrong).await.ok(400);
    assert!(page(&reply).contains("id=\"error.user_id\""), "{}", page(&reply));
    // A conflict shows all three versions.
    let version = [("if-match", "\"1\"")];
    server.put("PATCH", "/v1/profile/7", &version, json!({"display_name": "Bea"})).await.ok(200);
    let stale = "operation=op-3&key=7&version=1&base={\"display_name\":\"Ann\"}&f.display_name=Cleo";
    let reply = post(&server, "/console/a/profile.patch", &[OWN], stale).await.ok(412);
    for text in ["Conflict", "Ann", "Bea", "Cleo", "name=\"version\" value=\"2\""] {
        assert!(page(&reply).contains(text), "{text}: {}", page(&reply));
    }
    let merged = "operation=op-4&key=7&version=2&base={\"display_name\":\"Bea\"}&f.display_name=Cleo";
    post(&server, "/console/a/profile.patch", &[OWN], merged).await.ok(200);
    let calls = "operation=op-5&calls=[{\"action\":\"profile.create\",\"input\":{\"user_id\":8,\"display_name\":\"Dan\"}},{\"action\":\"profile.create\",\"input\":{\"user_id\":7,\"display_name\":\"Eve\"}}]";
    let reply = post(&server, "/console/batch", &[OWN], calls).await.ok(409);
    assert!(page(&reply).contains("call 1"), "{}", page(&reply));
    server.get("/v1/profile/8").await.problem(404, "not_found");
}

/// A server with keys, and a key with these scopes.
async fn with_key(site: &Site, scopes: &str) -> (Running, String, String) {
    let config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
    let server = site.server_with(config).await;
    let secret = HouseSecret::of(&server.house, None).await.unwrap();
    let new = NewKey {
        tenant: Tenant::new("acme").unwrap(),
        name: String::new(),
        scopes: scopes.split(' ').map(|scope| scope.parse().unwrap()).collect(),
        expires_in: None,
        networks: AllowedNetworks::default(),
    };
    let created = keys::create(&server.house, &secret, new, &AuditActor::program("test")).await.unwrap();
    (server, created.key, created.info.prefix)
}

/// Logs in and returns the cookie.
async fn login(server: &Running, key: &str) -> String {
    let reply = post(server, "/console/login", &[OWN], &format!("key={key}")).await.ok(303);
    let cookie = reply.header("set-cookie");
    for attribute in ["HttpOnly", "SameSite=Strict", "Path=/console", "Max-Age="] {
        assert!(cookie.contains(attribute), "{cookie}");
    }
    assert!(!cookie.contains(key), "the cookie does not show the key");
    cookie.split(';').next().unwrap().to_owned()
}

async fn a_key_opens_a_session(site: Site) {
    let (server, key, prefix) = with_key(&site, "admin").await;
    assert_eq!(server.get("/console").await.ok(303).header("location"), "/console/login");
    server.get("/console/login").await.ok(200);
    post(&server, "/console/login", &[OWN], "key=sth_wrong").await.ok(401);
    post(&server, "/console/login", &[], &format!("key={key}")).await.ok(403);
    let cookie = login(&server, &key).await;
    let own = ("cookie", cookie.as_str());
    assert!(page(&server.get_with("/console", &[own]).await.ok(200)).contains("operate"));
    // The cookie is for the console only.
    server.get_with("/v1/profile", &[own]).await.problem(401, "unauthenticated");
    let mut forged = cookie.clone();
    forged.push('A');
    server.get_with("/console", &[("cookie", &forged)]).await.ok(303);
    post(&server, "/console/a/profile.create", &[own], CREATE).await.ok(403);
    post(&server, "/console/a/profile.create", &[own, OWN], CREATE).await.ok(200);
    let ended = post(&server, "/console/logout", &[own, OWN], "x=1").await.ok(303);
    assert!(ended.header("set-cookie").contains("Max-Age=0"));
    // A revoked key ends its sessions on every server, as soon as its cached entry expires.
    keys::revoke(&server.house, &prefix, &AuditActor::program("test")).await.unwrap();
    let mut config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
    config.limits.credential_cache_ms = 0;
    let server = Running::of(server.house.clone(), config).await;
    assert_eq!(server.get_with("/console", &[own]).await.ok(303).header("location"), "/console/login");
}

async fn scopes_decide_what_a_session_may_do(site: Site) {
    let (server, key, _) = with_key(&site, "profile:read").await;
    let cookie = login(&server, &key).await;
    let own = ("cookie", cookie.as_str());
    let list = page(&server.get_with("/console/r/profile", &[own]).await.ok(200));
    assert!(!list.contains("profile.create"), "{list}");
    server.get_with("/console/a/profile.create", &[own]).await.ok(403);
    server.get_with("/console/audit", &[own]).await.ok(403);
    post(&server, "/console/a/profile.create", &[own, OWN], CREATE).await.ok(403);
    server.get_with("/console/r/seat", &[own]).await.ok(403);
    server.get_with("/console/keys", &[own]).await.ok(403);
    post(&server, "/console/keys", &[own, OWN], "do=create&tenant=acme&scopes=admin").await.ok(403);
    let calls = "operation=b&calls=[{\"action\":\"profile.create\",\"input\":{\"user_id\":8,\"display_name\":\"Dan\"}}]";
    post(&server, "/console/batch", &[own, OWN], calls).await.ok(403);
    assert_eq!(server.written().await, 0);
}

async fn tenants_do_not_see_each_other(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let chosen = post(&server, "/console/tenant", &[OWN], "tenant=other").await.ok(303);
    let cookie = chosen.header("set-cookie").split(';').next().unwrap().to_owned();
    let own = [("cookie", cookie.as_str())];
    for path in ["/console", "/console/r/profile", "/console/log"] {
        let reply = page(&server.get_with(path, &own).await.ok(200));
        assert!(
            !reply.contains("profile.created") && !reply.contains("/console/r/profile/1"),
            "{path}: {reply}"
        );
    }
    server.get_with("/console/r/profile/1", &own).await.ok(404);
    post(&server, "/console/tenant", &[OWN], "tenant=_house").await.ok(400);
}
