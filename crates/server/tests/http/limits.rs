//! Limits per tenant and per key: a caller that reaches one gets a 429 or a 409, and other tenants are served.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use statehouse_server::Config;
use statehouse_server::auth::Scope;
use statehouse_server::config::Auth;
use statehouse_store::{Clock as _, Plan, Step, SystemClock, Tenant};
use tokio::task::JoinHandle;

use crate::credentials::key;
use crate::support::{BLUEPRINT, Raw, Reply, Running, Site, cases};

cases![
    streams_of_a_tenant,
    waits_of_a_tenant,
    polls_of_a_tenant_are_waits,
    requests_of_a_tenant,
    body_bytes_of_a_tenant,
    requests_of_a_key,
    written_bytes_of_a_tenant,
    a_wait_wakes_only_for_its_own_row,
    rows_of_a_tenant,
    rows_that_are_there_already_are_counted,
    timers_of_a_tenant,
    log_bytes_of_a_tenant,
];

const ACME: (&str, &str) = ("statehouse-tenant", "acme");
const OTHER: (&str, &str) = ("statehouse-tenant", "other");

fn is_refused(reply: &Reply) {
    reply.problem(429, "too_many_requests");
    assert_eq!(reply.header("retry-after"), "1");
}

async fn create(server: &Running, tenant: (&str, &str), user: i64) {
    let body = json!({"user_id": user, "display_name": "Ann"});
    server.put("POST", "/v1/profile", &[tenant], body).await.ok(201);
}

/// An open event stream.
async fn stream(server: &Running, tenant: &str) -> Raw {
    let mut raw = server.raw().await;
    raw.say(format!("GET /v1/events HTTP/1.1\r\nhost: localhost\r\nstatehouse-tenant: {tenant}\r\n\r\n"))
        .await;
    raw.until(": open").await;
    raw
}

/// A long poll for a change of profile 1 at version 1.
fn wait(server: &Arc<Running>, header: (&'static str, String)) -> JoinHandle<Reply> {
    wait_for(server, header, "\"1\"")
}

/// Waits for profile 1 to have another version than this one.
fn wait_for(
    server: &Arc<Running>,
    header: (&'static str, String),
    version: &'static str,
) -> JoinHandle<Reply> {
    let server = server.clone();
    tokio::spawn(async move {
        let headers = [(header.0, header.1.as_str()), ("if-none-match", version), ("prefer", "wait=60")];
        server.get_with("/v1/profile/1", &headers).await
    })
}

async fn streams_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_streams = 2;
    let server = site.server_with(config).await;
    let (_first, second) = (stream(&server, "acme").await, stream(&server, "acme").await);
    is_refused(&server.get_with("/v1/events", &[ACME]).await);
    let _other = stream(&server, "other").await;
    drop(second);
    // The server notices the end of the second stream after a while.
    while server.get_with("/v1/events?after=wrong", &[ACME]).await.status != 400 {
        tokio::task::yield_now().await;
    }
}

async fn waits_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_waits = 1;
    let server = Arc::new(site.server_with(config).await);
    create(&server, ACME, 1).await;
    create(&server, OTHER, 1).await;
    let waiting = wait(&server, (ACME.0, ACME.1.into()));
    server.until_under_way(1).await;
    let headers = [ACME, ("if-none-match", "\"1\""), ("prefer", "wait=60")];
    is_refused(&server.get_with("/v1/profile/1", &headers).await);
    // Reads that do not wait are served, and so are waits of others.
    server.get_with("/v1/profile/1", &[ACME]).await.ok(200);
    let others = wait(&server, (OTHER.0, OTHER.1.into()));
    server.until_under_way(2).await;
    for tenant in [ACME, OTHER] {
        let body = json!({"bio": "x"});
        server.put("PATCH", "/v1/profile/1", &[tenant, ("if-match", "\"1\"")], body).await.ok(200);
    }
    waiting.await.unwrap().ok(200);
    others.await.unwrap().ok(200);
}

async fn polls_of_a_tenant_are_waits(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_waits = 1;
    let house = site.house_of(&format!("{BLUEPRINT}\n[log.mailer]\nof = [\"profile\"]\n")).await;
    let server = Arc::new(Running::of(house, config).await);
    let poll = "/v1/mailer/0/poll?wait_ms=20000";
    let polling = server.clone();
    let polling = tokio::spawn(async move { polling.get_with(poll, &[ACME]).await });
    server.until_under_way(1).await;
    is_refused(&server.get_with(poll, &[ACME]).await);
    // Polls that do not wait are served, and so are those of others.
    server.get_with("/v1/mailer/0/poll", &[ACME]).await.ok(200);
    server.get_with("/v1/mailer/0/poll?wait_ms=1", &[OTHER]).await.ok(200);
    polling.abort();
}

async fn requests_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_requests = 1;
    let server = Arc::new(site.server_with(config).await);
    create(&server, ACME, 1).await;
    let waiting = wait(&server, (ACME.0, ACME.1.into()));
    server.until_under_way(1).await;
    is_refused(&server.get_with("/v1/profile/1", &[ACME]).await);
    is_refused(&server.put("POST", "/v1/batch", &[ACME], json!([])).await);
    server.get_with("/v1/profile/1", &[OTHER]).await.problem(404, "not_found");
    server.get("/livez").await.ok(200);
    waiting.abort();
    // The connection of the wait is closed, and its request ends.
    while server.get_with("/v1/profile/1", &[ACME]).await.status != 200 {
        tokio::task::yield_now().await;
    }
}

async fn body_bytes_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_body_bytes = 10_000;
    let server = site.server_with(config).await;
    let mut half = server.raw().await;
    half.say(format!(
        "POST /v1/profile HTTP/1.1\r\nhost: localhost\r\nstatehouse-tenant: acme\r\n\
         content-type: application/json\r\ncontent-length: 9000\r\n\r\n{{\"display_name\": \"{}",
        "x".repeat(5_000)
    ))
    .await;
    server.until_under_way(1).await;
    let large = || json!({"user_id": 1, "display_name": "x".repeat(6_000)});
    // The part of the first body arrives after a while.
    let refused = loop {
        let reply = server.put("POST", "/v1/profile", &[ACME], large()).await;
        if reply.status != 201 && reply.status != 409 {
            break reply;
        }
    };
    is_refused(&refused);
    server.put("POST", "/v1/profile", &[OTHER], large()).await.ok(201);
    drop(half);
}

async fn requests_of_a_key(site: Site) {
    let mut config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
    config.limits.key_requests = 1;
    let server = Arc::new(site.server_with(config).await);
    let scopes = [Scope::Read, Scope::Write];
    let busy = format!("Bearer {}", key(&server.house, "acme", &scopes, None).await.key);
    let free = format!("Bearer {}", key(&server.house, "acme", &scopes, None).await.key);
    create(&server, ("authorization", &busy), 1).await;
    let mut waiting = wait(&server, ("authorization", busy.clone()));
    let refused = loop {
        let reply = server.get_with("/v1/profile/1", &[("authorization", &busy)]).await;
        if reply.status == 429 {
            break reply;
        }
        // If this read came first, the wait was refused instead.
        if waiting.is_finished() {
            waiting = wait(&server, ("authorization", busy.clone()));
        }
        tokio::task::yield_now().await;
    };
    is_refused(&refused);
    server.get_with("/v1/profile/1", &[("authorization", &free)]).await.ok(200);
    waiting.abort();
}

async fn written_bytes_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_write_bytes_per_minute = 2_000;
    let server = site.server_with(config).await;
    let large = |user: i64| json!({"user_id": user, "display_name": "x".repeat(9_000)});
    server.put("POST", "/v1/profile", &[ACME], large(1)).await.ok(201);
    let refused = server.put("POST", "/v1/profile", &[ACME], large(2)).await;
    refused.problem(429, "too_many_requests");
    assert!(refused.header("retry-after").parse::<u64>().unwrap() > 60);
    server.put("POST", "/v1/batch", &[ACME], json!([])).await.problem(429, "too_many_requests");
    server.get_with("/v1/profile/1", &[ACME]).await.ok(200);
    server.put("POST", "/v1/profile", &[OTHER], large(1)).await.ok(201);
}

async fn a_wait_wakes_only_for_its_own_row(site: Site) {
    let server = Arc::new(site.server().await);
    create(&server, ACME, 1).await;
    let wakeups = async || {
        let metrics = server.get("/metrics").await;
        let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
        let line = metrics.lines().find(|line| line.starts_with("statehouse_wait_wakeups_total "));
        line.expect("the metric is missing").rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let change = async |version: &str| {
        let body = json!({"bio": version});
        server.put("PATCH", "/v1/profile/1", &[ACME, ("if-match", version)], body).await.ok(200);
    };
    // A log reader that starts after the wait wakes it once for each partition. After this wait the reader has started.
    let waiting = wait(&server, (ACME.0, ACME.1.into()));
    server.until_under_way(1).await;
    change("\"1\"").await;
    waiting.await.unwrap().ok(200);
    let at_first = wakeups().await;

    let waiting = wait_for(&server, (ACME.0, ACME.1.into()), "\"2\"");
    server.until_under_way(1).await;
    // Other rows of the tenant, and the row with the same key of another tenant.
    for user in 2..50 {
        create(&server, ACME, user).await;
    }
    create(&server, OTHER, 1).await;
    let before = wakeups().await - at_first;
    change("\"2\"").await;
    waiting.await.unwrap().ok(200);
    // The wait may have begun before the log reader got to the change of its own row.
    assert!(before <= 1, "{before} wakeups by other rows");
    assert!(wakeups().await > at_first);
}

const STORED: &str = r#"
[house]
name = "shop"

[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text" }

[timer.reminder]
key = { user_id = "text" }
"#;

async fn stored(site: &Site, config: Config) -> Running {
    Running::of(site.house_of(STORED).await, config).await
}

async fn rows_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_rows = 3;
    let server = stored(&site, config).await;
    let profile = |user: i64| json!({"user_id": user, "display_name": "Ann"});
    for user in 1..=2 {
        create(&server, ACME, user).await;
    }
    // A write that is refused creates nothing and uses nothing of the limit.
    for _ in 0..5 {
        server.put("POST", "/v1/profile", &[ACME], profile(1)).await.problem(409, "already_exists");
    }
    let calls = |users: [i64; 2]| {
        let call = |user: i64| json!({"action": "profile.create", "input": profile(user)});
        json!(users.map(call))
    };
    let refused = server.put("POST", "/v1/batch", &[ACME], calls([3, 4])).await;
    refused.problem(409, "tenant_rows_limit");
    create(&server, ACME, 3).await;
    let refused =
        server.put("POST", "/v1/profile", &[ACME], profile(4)).await.problem(409, "tenant_rows_limit");
    assert!(refused["detail"].as_str().unwrap().contains("the limit is 3"), "{refused}");
    server.get_with("/v1/profile/4", &[ACME]).await.problem(404, "not_found");
    // What creates no row is admitted, and so are other tenants.
    let change = json!({"display_name": "Bea"});
    server.put("PATCH", "/v1/profile/1", &[ACME, ("if-match", "\"1\"")], change).await.ok(200);
    server.put("POST", "/v1/batch", &[OTHER], calls([1, 2])).await.ok(200);
    // The same rows by a plan of another process: the count is corrected after the refusal.
    let table = server.house.resources()[0].tables[0].clone();
    let acme = Tenant::new("acme").unwrap();
    let plan = Plan::of(&acme, "purge").step(Step::delete(&table, [1.into()]));
    server.house.store().commit(&plan.build().unwrap()).await.unwrap();
    while server.put("POST", "/v1/profile", &[ACME], profile(4)).await.status != 201 {
        SystemClock.sleep(Duration::from_millis(50)).await;
    }
    server.put("POST", "/v1/profile", &[ACME], profile(5)).await.problem(409, "tenant_rows_limit");
}

async fn rows_that_are_there_already_are_counted(site: Site) {
    let before = stored(&site, Config::default()).await;
    for user in 1..=20 {
        create(&before, ACME, user).await;
    }
    let mut config = Config::default();
    config.limits.tenant_rows = 10;
    let server = Running::of(before.house.clone(), config).await;
    // The first writes are admitted until the rows are counted, and not more than the limit itself.
    let mut admitted = 0;
    for user in 100.. {
        let body = json!({"user_id": user, "display_name": "Ann"});
        let reply = server.put("POST", "/v1/profile", &[ACME], body).await;
        if reply.status == 409 {
            reply.problem(409, "tenant_rows_limit");
            break;
        }
        admitted += 1;
    }
    assert!(admitted <= 10, "{admitted} rows were admitted");
}

async fn timers_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_timers = 2;
    let server = stored(&site, config).await;
    let set = async |tenant, user: &str| {
        server.put("PUT", &format!("/v1/reminder/{user}"), &[tenant], json!({"after_ms": 3_600_000})).await
    };
    set(ACME, "a").await.ok(200);
    set(ACME, "b").await.ok(200);
    set(ACME, "c").await.problem(409, "tenant_timers_limit");
    set(OTHER, "a").await.ok(200);
    // Rows that are no timers have no limit here.
    create(&server, ACME, 1).await;
    server.send("DELETE", "/v1/reminder/a", &[ACME], "").await.ok(200);
    // The count is corrected after a refusal.
    while set(ACME, "c").await.status != 200 {
        SystemClock.sleep(Duration::from_millis(50)).await;
    }
    set(ACME, "d").await.problem(409, "tenant_timers_limit");
}

async fn log_bytes_of_a_tenant(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_log_bytes = 20_000;
    let server = stored(&site, config).await;
    let large = "x".repeat(9_000);
    for user in 1..=3 {
        let body = json!({"user_id": user, "display_name": large});
        server.put("POST", "/v1/profile", &[ACME], body).await;
    }
    // The log is read a moment later.
    let refused = loop {
        let reply = server
            .put("PATCH", "/v1/profile/1", &[ACME, ("if-match", "*")], json!({"display_name": "Ann"}))
            .await;
        if reply.status != 200 {
            break reply;
        }
        SystemClock.sleep(Duration::from_millis(20)).await;
    };
    refused.problem(409, "tenant_log_bytes_limit");
    server.get_with("/v1/profile/1", &[ACME]).await.ok(200);
    create(&server, OTHER, 1).await;
    server.send("DELETE", "/v1/profile/1", &[ACME, ("if-match", "*")], "").await.ok(200);
    // Bytes leave the sum with the records: those of whole parts of the log.
    server
        .put("PATCH", "/v1/profile/2", &[ACME, ("if-match", "*")], json!({"display_name": "Bea"}))
        .await
        .problem(409, "tenant_log_bytes_limit");
}
