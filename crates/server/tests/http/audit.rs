//! The audit: who did what with which credential, and who may know.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse::audit::{self, AuditActor, AuditFilter, AuditRow};
use statehouse::{House, system};
use statehouse_server::auth::Scope;
use statehouse_server::auth::keys::{self, NewKey};
use statehouse_server::auth::networks::AllowedNetworks;
use statehouse_server::auth::secret::HouseSecret;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Clock as _, SystemClock, Tenant};

use crate::credentials::{as_caller, key, with_keys};
use crate::streams::Stream;
use crate::support::{Running, Site, cases, house_over};

cases![
    changes_of_keys_are_recorded_with_them,
    a_lost_answer_is_recorded_once,
    failed_logins_are_recorded_and_bounded,
    logins_are_recorded_once_after_lost_answers,
    a_tenant_neither_reads_nor_writes_the_audit,
    operators_read_the_audit_by_pages,
    each_write_says_who_made_it_to_operators_only,
];

async fn rows(house: &House) -> Vec<AuditRow> {
    let filter = AuditFilter { oldest_first: true, ..AuditFilter::default() };
    audit::list(&**house.store(), &filter, 1_000, None).await.unwrap().rows
}

/// The rows of an action, once there are so many.
async fn rows_of(house: &House, action: &str, count: usize) -> Vec<AuditRow> {
    loop {
        let mut found = rows(house).await;
        found.retain(|row| row.action == action);
        if found.len() >= count {
            return found;
        }
        SystemClock.sleep(Duration::from_millis(20)).await;
    }
}

/// A store that loses its answers to commits once the test sets other odds.
async fn faulty(site: &Site) -> Arc<FaultyStore> {
    let clock = Arc::new(SystemClock);
    Arc::new(FaultyStore::over(site.store().await, clock, Odds::default(), 1))
}

/// Every commit reaches the store, and its answer is lost.
fn losing() -> Odds {
    Odds { unknown_after: 1.0, ..Odds::default() }
}

fn new_key(tenant: &str) -> NewKey {
    NewKey {
        tenant: Tenant::new(tenant).unwrap(),
        name: "billing".into(),
        scopes: vec![Scope::Read],
        expires_in: None,
        networks: AllowedNetworks::default(),
    }
}

async fn changes_of_keys_are_recorded_with_them(site: Site) {
    let house = site.house().await;
    let secret = HouseSecret::of(&house, None).await.unwrap();
    let by = AuditActor::key("00ff", "root").at(Some([192, 0, 2, 7].into()));
    let old = keys::create(&house, &secret, new_key("acme"), &by).await.unwrap();
    let span = (Duration::from_secs(60), None);
    let new = keys::rotate(&house, &secret, &old.info.prefix, span, &by).await.unwrap();
    let replaced = keys::list(&house, None).await.unwrap();
    let replaced = replaced.iter().find(|key| key.prefix == old.info.prefix).unwrap();
    assert!(replaced.expires_at.is_some(), "both keys change in one plan");
    keys::revoke(&house, &old.info.prefix, &by).await.unwrap();
    // What changes nothing is not recorded.
    keys::revoke(&house, &old.info.prefix, &by).await.unwrap();
    assert!(keys::rotate(&house, &secret, &old.info.prefix, span, &by).await.is_err());
    assert!(keys::revoke(&house, "0000000000000000", &by).await.is_err());
    let rows = rows(&house).await;
    let told: Vec<(&str, &str)> =
        rows.iter().map(|row| (row.action.as_str(), row.target.as_deref().unwrap())).collect();
    let prefix = old.info.prefix.as_str();
    let expected = [
        ("secret.generate", "server"),
        ("key.create", prefix),
        ("key.rotate", prefix),
        ("key.revoke", prefix),
    ];
    assert_eq!(told, expected);
    assert!(rows[2].detail.as_ref().unwrap().contains(&new.info.prefix), "{rows:?}");
    for row in &rows[1..] {
        assert_eq!((row.actor.as_deref(), row.credential.as_str()), (Some("root"), "key:00ff"));
        assert_eq!((row.peer.as_deref(), row.tenant.as_deref()), (Some("192.0.2.7"), Some("acme")));
    }
    let text = serde_json::to_string(&rows).unwrap();
    for key in [&old.key, &new.key] {
        assert!(!text.contains(key.rsplit('_').next().unwrap()), "the audit has the secret of a key");
    }
}

async fn a_lost_answer_is_recorded_once(site: Site) {
    let store = faulty(&site).await;
    let house = house_over(store.clone()).await;
    let secret = HouseSecret::of(&house, None).await.unwrap();
    let by = AuditActor::command("ann");
    let old = keys::create(&house, &secret, new_key("acme"), &by).await.unwrap();
    store.set_odds(losing());
    let span = (Duration::from_secs(60), None);
    assert!(
        keys::rotate(&house, &secret, &old.info.prefix, span, &by).await.is_err(),
        "its outcome is unknown"
    );
    assert!(keys::revoke(&house, &old.info.prefix, &by).await.is_err(), "its outcome is unknown");
    store.set_odds(Odds::default());
    let listed = keys::list(&house, None).await.unwrap();
    let actions: Vec<String> = rows(&house).await.into_iter().map(|row| row.action).collect();
    assert_eq!(actions, ["secret.generate", "key.create", "key.rotate", "key.revoke"]);
    assert_eq!(listed.len(), 2, "{listed:?}");
}

async fn failed_logins_are_recorded_and_bounded(site: Site) {
    let server = site.server_with(with_keys()).await;
    let house = &server.house;
    let live = key(house, "acme", &[Scope::Read], None).await;
    // A request without a credential is no login, and one that succeeds is none that failed.
    server.get("/v1/profile").await.problem(401, "unauthenticated");
    as_caller(&server, &live.key, "GET", "/v1/profile", None).await.ok(200);
    keys::revoke(house, &live.info.prefix, &AuditActor::program("test")).await.unwrap();
    for _ in 0..3 {
        as_caller(&server, &live.key, "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
    }
    let failed = rows_of(house, "login", 1).await;
    let counted: i64 = failed.iter().map(|row| row.count).sum();
    assert!(counted <= 3, "{failed:?}");
    let row = &failed[0];
    assert_eq!((row.outcome.as_str(), row.detail.as_deref()), ("rejected", Some("revoked")));
    assert_eq!(row.credential, format!("key:{}", live.info.prefix));
    assert_eq!((row.tenant.as_deref(), row.peer.as_deref()), (Some("acme"), Some("127.0.0.1")));
    // A stranger with many keys that are none.
    for number in 0..200 {
        let wrong = format!("kind-{number}");
        as_caller(&server, &wrong, "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
        let typo = format!("{}{number:02x}", &live.key[..live.key.len() - 2]);
        as_caller(&server, &typo, "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
    }
    let house = house.clone();
    server.stop().await;
    let failed = rows_of(&house, "login", 1).await;
    let counted: i64 = failed.iter().map(|row| row.count).sum();
    assert_eq!(counted, 403, "each of them is counted: {failed:?}");
    assert!(failed.len() < 100, "{} rows", failed.len());
    let text = serde_json::to_string(&failed).unwrap();
    assert!(!text.contains("kind-1") && !text.contains(&live.key[22..40]), "{text}");
}

async fn logins_are_recorded_once_after_lost_answers(site: Site) {
    let store = faulty(&site).await;
    let house = house_over(store.clone()).await;
    let server = Running::of(house.clone(), with_keys()).await;
    store.set_odds(losing());
    as_caller(&server, "sth_wrong", "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
    // The answer of the first plan is lost, several times.
    SystemClock.sleep(Duration::from_millis(1_500)).await;
    store.set_odds(Odds::default());
    as_caller(&server, "sth_wrong", "GET", "/v1/profile", None).await.problem(401, "unauthenticated");
    server.stop().await;
    let counted: i64 = rows_of(&house, "login", 1).await.iter().map(|row| row.count).sum();
    assert_eq!(counted, 2, "each is recorded once");
}

async fn a_tenant_neither_reads_nor_writes_the_audit(site: Site) {
    let server = site.server_with(with_keys()).await;
    let all = key(&server.house, "acme", &[Scope::Read, Scope::Write], None).await.key;
    let admin = key(&server.house, "acme", &[Scope::Admin], None).await.key;
    server.get("/audit").await.problem(401, "unauthenticated");
    as_caller(&server, &all, "GET", "/audit", None).await.problem(403, "forbidden");
    let before = rows(&server.house).await;
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        as_caller(&server, &admin, method, "/audit", Some(json!({})))
            .await
            .problem(405, "method_not_allowed");
    }
    for path in ["/v1/house_audit", "/v1/house_audit/all", "/v1/audit"] {
        as_caller(&server, &admin, "GET", path, None).await.problem(404, "not_found");
        as_caller(&server, &admin, "POST", path, Some(json!({"action": "x"})))
            .await
            .problem(404, "not_found");
    }
    let insert = json!([{"action": "house_audit.create", "input": {"part": "all"}}]);
    as_caller(&server, &admin, "POST", "/v1/batch", Some(insert)).await.problem(404, "not_found");
    // No key is of the tenant that the rows belong to.
    let house = &server.house;
    let secret = HouseSecret::of(house, None).await.unwrap();
    let own = NewKey { tenant: system::tenant().unwrap(), ..new_key("acme") };
    assert!(keys::create(house, &secret, own, &AuditActor::open()).await.is_err());
    assert_eq!(rows(house).await, before);
    as_caller(&server, &admin, "GET", "/v1/events?resource=house_audit", None)
        .await
        .problem(400, "invalid_input");
}

async fn operators_read_the_audit_by_pages(site: Site) {
    let server = site.server_with(with_keys()).await;
    let admin = key(&server.house, "acme", &[Scope::Admin], None).await.key;
    for _ in 0..4 {
        key(&server.house, "other", &[Scope::Read], None).await;
    }
    let get = async |path: &str| as_caller(&server, &admin, "GET", path, None).await;
    let all = get("/audit").await.ok(200).json();
    assert_eq!(all.as_array().unwrap().len(), 6, "{all}");
    assert_eq!(all[0]["action"], "key.create");
    let (mut seen, mut path) = (Vec::new(), "/audit?limit=2&action=key.&tenant=other".to_owned());
    loop {
        let reply = get(&path).await.ok(200);
        seen.extend(reply.json().as_array().unwrap().iter().map(|row| row["id"].clone()));
        let Some(link) = reply.headers.get("link") else { break };
        let next = link.to_str().unwrap().strip_prefix('<').and_then(|link| link.split_once('>')).unwrap();
        path = next.0.to_owned();
    }
    let expected: Vec<Json> = all.as_array().unwrap()[..4].iter().map(|row| row["id"].clone()).collect();
    assert_eq!(seen, expected);
    let middle = all[2]["at"].as_str().unwrap();
    let older = get(&format!("/audit?to={middle}")).await.ok(200).json();
    assert!(older.as_array().unwrap().iter().all(|row| row["at"].as_str().unwrap() < middle), "{older}");
    for bad in ["from=now", "limit=0", "limit=x", "cursor=abc", "color=red"] {
        get(&format!("/audit?{bad}")).await.problem(400, "invalid_input");
    }
}

async fn each_write_says_who_made_it_to_operators_only(site: Site) {
    let server = site.server_with(with_keys()).await;
    let writer = key(&server.house, "acme", &[Scope::Write], None).await;
    let reader = key(&server.house, "acme", &[Scope::Read], None).await.key;
    let admin = key(&server.house, "acme", &[Scope::Admin], None).await.key;
    let body = json!({"user_id": 1, "display_name": "Ann"});
    let answer = as_caller(&server, &writer.key, "POST", "/v1/profile", Some(body)).await.ok(201);
    assert!(!answer.json().to_string().contains(&writer.info.prefix));
    let told = async |key: &str| {
        let headers = format!("authorization: Bearer {key}\r\n");
        let mut stream = Stream::open(&server, "/v1/events?after=oldest", &headers).await;
        stream.take(1).await.remove(0).1
    };
    assert_eq!(told(&admin).await["actor"], format!("key:{}", writer.info.prefix));
    let seen = told(&reader).await;
    assert!(seen.get("actor").is_none() && !seen.to_string().contains(&writer.info.prefix), "{seen}");
}
