//! `/v1/events`: order, places, tenants, heartbeats, trimmed logs.

use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse::House;
use statehouse::audit::AuditActor;
use statehouse_server::Config;
use statehouse_server::auth::Scope;
use statehouse_server::auth::keys::{self, NewKey};
use statehouse_server::auth::networks::AllowedNetworks;
use statehouse_server::auth::secret::HouseSecret;
use statehouse_server::config::{Auth, Jwt, JwtKeys};
use statehouse_store::{ManualClock, Tenant, Time};

use crate::support::{Raw, Running, Site, cases, house_over};
use crate::trap::TrapStore;

cases![
    what_is_written_is_told_as_cloud_events,
    a_stream_goes_on_where_it_was_cut_off,
    only_the_callers_tenant_is_told,
    one_resource_can_be_followed,
    one_row_can_be_followed,
    the_newest_event_of_each_row_is_told,
    a_batch_is_told_whole,
    a_rows_events_come_in_the_order_of_its_versions,
    silence_is_filled_with_heartbeats,
    a_trimmed_log_is_said_to_be,
    bad_places_are_refused,
    streams_are_limited,
    streams_share_one_reader_of_the_log,
    a_slow_client_misses_nothing,
    a_stream_ends_when_its_key_is_revoked,
    a_stream_ends_when_its_key_expires,
    a_stream_ends_when_its_token_expires,
];

pub struct Stream {
    raw: Raw,
    /// Bytes of the chunked body that are not decoded yet.
    encoded: Vec<u8>,
    text: String,
}

impl Stream {
    pub async fn open(server: &Running, path: &str, headers: &str) -> Stream {
        let mut raw = server.raw().await;
        raw.say(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n")).await;
        let head = raw.until("\n\n").await;
        assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
        let (_, body) = head.split_once("\r\n\r\n").unwrap();
        let mut stream = Stream { raw, encoded: body.as_bytes().to_vec(), text: String::new() };
        stream.decode();
        stream
    }

    /// Moves the chunks that have arrived whole to the text.
    fn decode(&mut self) {
        loop {
            let Some(end) = self.encoded.windows(2).position(|bytes| bytes == b"\r\n") else { return };
            let length = std::str::from_utf8(&self.encoded[..end]).unwrap();
            let length = usize::from_str_radix(length, 16).unwrap();
            let (start, next) = (end + 2, end + 2 + length + 2);
            if length == 0 || self.encoded.len() < next {
                return;
            }
            self.text.push_str(std::str::from_utf8(&self.encoded[start..start + length]).unwrap());
            self.encoded.drain(..next);
        }
    }

    /// The next so many events or more, each with its id.
    pub async fn take(&mut self, count: usize) -> Vec<(String, Json)> {
        let mut events = Vec::new();
        loop {
            // What follows the last empty line has not arrived whole.
            let whole = self.text.rfind("\n\n").map_or(0, |end| end + 2);
            let rest = self.text.split_off(whole);
            events.extend(self.text.split("\n\n").filter_map(parse));
            self.text = rest;
            if events.len() >= count {
                return events;
            }
            let mut buffer = [0; 16 << 10];
            let read = tokio::io::AsyncReadExt::read(&mut self.raw.0, &mut buffer).await.unwrap();
            assert!(read > 0, "the stream ended after {}", events.len());
            self.encoded.extend_from_slice(&buffer[..read]);
            self.decode();
        }
    }
}

/// The id and the data of a message.
fn parse(message: &str) -> Option<(String, Json)> {
    let field = |name: &str| message.lines().find_map(|line| line.trim().strip_prefix(name));
    let data = field("data: ")?;
    Some((field("id: ")?.to_owned(), serde_json::from_str(data).ok()?))
}

async fn what_is_written_is_told_as_cloud_events(site: Site) {
    let server = site.server().await;
    let mut stream = Stream::open(&server, "/v1/events", "").await;
    server.create(1).await;
    server.put("PATCH", "/v1/profile/1", &[("if-match", "\"1\"")], json!({"bio": "b"})).await.ok(200);
    let events = stream.take(2).await;
    let (_, first) = &events[0];
    assert_eq!((&first["specversion"], &first["type"]), (&json!("1.0"), &json!("profile.created")));
    assert_eq!((&first["source"], &first["subject"]), (&json!("/shop"), &json!("profile/1")));
    assert_eq!(first["data"]["row"]["display_name"], "Ann");
    assert!(first["time"].as_str().unwrap().ends_with('Z'));
    let (_, second) = &events[1];
    assert_eq!((&second["type"], &second["data"]["row"]["version"]), (&json!("profile.updated"), &json!(2)));
    assert_ne!(first["id"], second["id"]);
}

async fn a_stream_goes_on_where_it_was_cut_off(site: Site) {
    let server = site.server().await;
    for user in 1..=5 {
        server.create(user).await;
    }
    let mut whole = Stream::open(&server, "/v1/events?after=oldest", "").await;
    let events = whole.take(5).await;
    for (cut, (id, _)) in events.iter().enumerate() {
        if cut == 4 {
            break;
        }
        let rest: Vec<Json> = events[cut + 1..].iter().map(|(_, event)| event["id"].clone()).collect();
        for (path, headers) in [
            (format!("/v1/events?after={id}"), String::new()),
            // The header counts more: a browser repeats the URL it began with.
            ("/v1/events?after=oldest".into(), format!("last-event-id: {id}\r\n")),
        ] {
            let mut stream = Stream::open(&server, &path, &headers).await;
            let mut seen: Vec<Json> =
                stream.take(rest.len()).await.into_iter().map(|(_, event)| event["id"].clone()).collect();
            let mut expected = rest.clone();
            seen.sort_by_key(Json::to_string);
            expected.sort_by_key(Json::to_string);
            assert_eq!(seen, expected);
        }
    }
}

async fn only_the_callers_tenant_is_told(site: Site) {
    let server = site.server().await;
    let mut other = Stream::open(&server, "/v1/events?after=oldest", "statehouse-tenant: other\r\n").await;
    server.create(1).await;
    let body = json!({"user_id": 2, "display_name": "theirs"});
    server.put("POST", "/v1/profile", &[("statehouse-tenant", "other")], body).await.ok(201);
    let events = other.take(1).await;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].1["data"]["row"]["display_name"], "theirs");
    // Another tenant's place is no place.
    let (id, _) = &events[0];
    server.get(&format!("/v1/events?after={id}")).await.problem(400, "invalid_input");
}

async fn one_resource_can_be_followed(site: Site) {
    let server = site.server().await;
    let mut seats = Stream::open(&server, "/v1/events?resource=seat", "").await;
    server.create(1).await;
    server.put("POST", "/v1/seat", &[], json!({"event": "a,b", "seat_no": "1"})).await.ok(201);
    let events = seats.take(1).await;
    assert_eq!(
        (&events[0].1["type"], &events[0].1["subject"]),
        (&json!("seat.created"), &json!("seat/a%2Cb,1"))
    );
    server.get("/v1/events?resource=nothing").await.problem(400, "invalid_input");
}

async fn one_row_can_be_followed(site: Site) {
    let server = site.server().await;
    for id in 1..=3 {
        server.create(id).await;
    }
    let path = "/v1/events?after=oldest&resource=profile&key=2";
    let events = Stream::open(&server, path, "").await.take(1).await;
    assert_eq!(events[0].1["subject"], "profile/2");
    for path in ["/v1/events?key=2", "/v1/events?newest=yes"] {
        server.get(path).await.problem(400, "invalid_input");
    }
}

async fn the_newest_event_of_each_row_is_told(site: Site) {
    let server = site.server().await;
    for id in [1, 2] {
        server.create(id).await;
        for number in 0..5 {
            let name = json!({"display_name": format!("{id} {number}")});
            server.put("PATCH", &format!("/v1/profile/{id}"), &[("if-match", "*")], name).await.ok(200);
        }
    }
    let path = "/v1/events?after=oldest&newest=true&resource=profile";
    let mut stream = Stream::open(&server, path, "").await;
    let mut told: Vec<(Json, Json)> = Vec::new();
    for (_, event) in stream.take(2).await {
        told.push((event["subject"].clone(), event["data"]["row"]["display_name"].clone()));
    }
    told.sort_by_key(|(subject, _)| subject.to_string());
    let newest = |id: u64| (json!(format!("profile/{id}")), json!(format!("{id} 4")));
    assert_eq!(told, [newest(1), newest(2)]);
    // It goes on behind them.
    server.create(3).await;
    assert_eq!(stream.take(1).await[0].1["subject"], "profile/3");
}

async fn a_batch_is_told_whole(site: Site) {
    let server = site.server().await;
    let mut stream = Stream::open(&server, "/v1/events", "").await;
    let calls = json!([
        {"action": "profile.create", "input": {"user_id": 1, "display_name": "A"}},
        {"action": "seat.create", "input": {"event": "gala", "seat_no": "1"}},
    ]);
    server.put("POST", "/v1/batch", &[], calls).await.ok(200);
    let events = stream.take(2).await;
    let subjects_of = |events: &[(String, Json)]| {
        let mut subjects: Vec<String> =
            events.iter().map(|(_, event)| event["subject"].as_str().unwrap().to_owned()).collect();
        subjects.sort();
        subjects
    };
    // Each row's event stands in the row's own partition, and between partitions there is no order.
    assert_eq!(subjects_of(&events), ["profile/1", "seat/gala,1"]);
    assert!(events.iter().all(|(_, event)| event["data"].get("subject").is_none()), "it is said once");
    // A client that is cut off between them gets the rest, or, within one record, all of that record again.
    let mut again = Stream::open(&server, &format!("/v1/events?after={}", events[0].0), "").await;
    assert!(subjects_of(&again.take(1).await).contains(&events[1].1["subject"].as_str().unwrap().to_owned()));
    let mut behind = Stream::open(&server, &format!("/v1/events?after={}", events[1].0), "").await;
    server.create(2).await;
    assert_eq!(behind.take(1).await[0].1["subject"], "profile/2");
}

async fn a_rows_events_come_in_the_order_of_its_versions(site: Site) {
    let server = site.server().await;
    let mut live = Stream::open(&server, "/v1/events", "").await;
    let create =
        |user: i64| json!({"action": "profile.create", "input": {"user_id": user, "display_name": "A"}});
    server.put("POST", "/v1/batch", &[], json!([create(1), create(2), create(3)])).await.ok(200);
    for turn in 0..20 {
        let patch = |user: &str| json!({"action": "profile.patch", "key": user, "expected_version": "*", "input": {"bio": format!("{turn}")}});
        server.put("POST", "/v1/batch", &[], json!([patch("1"), patch("2"), patch("3")])).await.ok(200);
        server
            .put("PATCH", "/v1/profile/2", &[("if-match", "*")], json!({"bio": format!("{turn} again")}))
            .await
            .ok(200);
    }
    let mut late = Stream::open(&server, "/v1/events?after=oldest", "").await;
    for stream in [&mut live, &mut late] {
        let mut versions: std::collections::BTreeMap<String, Vec<i64>> = std::collections::BTreeMap::new();
        for (_, event) in stream.take(83).await {
            let subject = event["subject"].as_str().unwrap().to_owned();
            versions.entry(subject).or_default().push(event["data"]["row"]["version"].as_i64().unwrap());
        }
        let expected = [("profile/1", 21), ("profile/2", 41), ("profile/3", 21)];
        let expected = expected.map(|(subject, last)| (subject.to_owned(), (1..=last).collect()));
        assert_eq!(versions, std::collections::BTreeMap::from(expected));
    }
}

async fn silence_is_filled_with_heartbeats(site: Site) {
    let mut config = Config::default();
    config.limits.heartbeat_ms = 50;
    let server = site.server_with(config).await;
    let mut stream = Stream::open(&server, "/v1/events", "").await;
    stream.raw.until(": still here").await;
    // A heartbeat moves the place, so what others write is not read twice.
    let theirs = json!({"user_id": 2, "display_name": "theirs"});
    server.put("POST", "/v1/profile", &[("statehouse-tenant", "other")], theirs).await.ok(201);
    stream.raw.until(": still here").await;
}

async fn a_trimmed_log_is_said_to_be(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    let mut stream = Stream::open(&server, "/v1/events?after=oldest", "").await;
    let (id, _) = stream.take(1).await.remove(0);
    for version in 1..4 {
        let tag = format!("\"{version}\"");
        let body = json!({"bio": version.to_string()});
        server.put("PATCH", "/v1/profile/1", &[("if-match", &tag)], body).await.ok(200);
    }
    let store = server.house.store();
    for partition in 0..store.partitions() {
        store.trim_log(partition, 3).await.unwrap();
    }
    server.get(&format!("/v1/events?after={id}")).await.problem(410, "trimmed");
    let mut oldest = Stream::open(&server, "/v1/events?after=oldest", "").await;
    assert_eq!(oldest.take(1).await[0].1["data"]["row"]["version"], 4);
}

async fn bad_places_are_refused(site: Site) {
    let server = site.server().await;
    for place in ["x", "0", "AAAA", "..", "%20"] {
        server.get(&format!("/v1/events?after={place}")).await.problem(400, "invalid_input");
    }
    server.get("/v1/events?since=1").await.problem(400, "invalid_input");
    server.get_with("/v1/events", &[("last-event-id", "nonsense")]).await.problem(400, "invalid_input");
}

async fn streams_are_limited(site: Site) {
    let mut config = Config::default();
    config.limits.streams = 1;
    let server = site.server_with(config).await;
    let first = Stream::open(&server, "/v1/events", "").await;
    server.get("/v1/events").await.problem(503, "unavailable");
    drop(first);
    // A place becomes free when the client is gone.
    loop {
        let mut raw = server.raw().await;
        raw.say("GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        if raw.until("\r\n\r\n").await.starts_with("HTTP/1.1 200") {
            break;
        }
        tokio::task::yield_now().await;
    }
}

async fn streams_share_one_reader_of_the_log(site: Site) {
    let store = TrapStore::over(site.store().await);
    let server = Running::of(house_over(store.clone()).await, Config::default()).await;
    let mut streams = Vec::new();
    for _ in 0..10 {
        streams.push(Stream::open(&server, "/v1/events", "").await);
    }
    let (before, rows) = (store.log_reads(), 8);
    for user in 0..rows {
        server.create(user).await;
        // Everybody has heard of it before the next is written, so each would have had to read by itself.
        for stream in &mut streams {
            assert_eq!(stream.take(1).await[0].1["subject"], format!("profile/{user}"));
        }
    }
    let reads = store.log_reads() - before;
    assert!(reads <= usize::try_from(rows).unwrap(), "{reads} reads for {rows} records");
}

async fn a_slow_client_misses_nothing(site: Site) {
    let server = site.server().await;
    let mut slow = Stream::open(&server, "/v1/events", "").await;
    let mut quick = Stream::open(&server, "/v1/events", "").await;
    // More than the shared window holds, and more than the socket's buffers do.
    let rows = 60;
    let write = async {
        for user in 0..rows {
            let body = json!({"user_id": user, "display_name": "x".repeat(200_000)});
            server.put("POST", "/v1/profile", &[], body).await.ok(201);
        }
    };
    tokio::join!(write, async {
        let mut seen = 0;
        while seen < rows {
            seen += quick.take(1).await.len();
        }
    });
    let mut subjects = Vec::new();
    while subjects.len() < rows {
        let events = slow.take(1).await;
        subjects.extend(events.iter().map(|(_, event)| event["subject"].as_str().unwrap().to_owned()));
    }
    subjects.sort();
    let mut expected: Vec<String> = (0..rows).map(|user| format!("profile/{user}")).collect();
    expected.sort();
    assert_eq!(subjects, expected);
}

async fn a_stream_ends_when_its_key_is_revoked(site: Site) {
    let mut config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
    config.limits.credential_cache_ms = 0;
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let server = Running::of(site.house_at(&clock).await, config).await;
    let (mine, other) = (key(&server.house, None).await, key(&server.house, None).await);
    let bearer = |created: &keys::CreatedKey| {
        format!("authorization: Bearer {}\r\nconnection: close\r\n", created.key)
    };
    let mut stream = Stream::open(&server, "/v1/events", &bearer(&mine)).await;
    let mut others = Stream::open(&server, "/v1/events", &bearer(&other)).await;
    keys::revoke(&server.house, &mine.info.prefix, &AuditActor::program("test")).await.unwrap();
    clock.advance(Duration::from_secs(1));
    // This would wait for ever if the server did not check the key again.
    assert_eq!(stream.raw.rest().await, "0\r\n\r\n");
    // Others go on.
    clock.advance(Duration::from_secs(15));
    others.raw.until(": still here").await;
}

async fn a_stream_ends_when_its_key_expires(site: Site) {
    let config = Config { auth: Auth { api_keys: true, jwt: None }, ..Config::default() };
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let server = Running::of(site.house_at(&clock).await, config).await;
    let short = key(&server.house, Some(Duration::from_secs(60))).await;
    let bearer = format!("authorization: Bearer {}\r\nconnection: close\r\n", short.key);
    let mut stream = Stream::open(&server, "/v1/events", &bearer).await;
    clock.advance(Duration::from_secs(30));
    stream.raw.until(": still here").await;
    clock.advance(Duration::from_secs(30));
    stream.raw.rest().await;
}

async fn a_stream_ends_when_its_token_expires(site: Site) {
    let shared = "a secret that two parties share, long enough";
    let jwt = Jwt { leeway_s: 0, ..Jwt::with(JwtKeys::Secret(shared.into())) };
    let config = Config { auth: Auth { api_keys: false, jwt: Some(jwt) }, ..Config::default() };
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let server = Running::of(site.house_at(&clock).await, config).await;
    let claims = json!({"tenant": "acme", "scope": "read", "exp": 1_800_000_060});
    let secret = jsonwebtoken::EncodingKey::from_secret(shared.as_bytes());
    let token = jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &secret).unwrap();
    let mut stream = Stream::open(
        &server,
        "/v1/events",
        &format!("authorization: Bearer {token}\r\nconnection: close\r\n"),
    )
    .await;
    clock.advance(Duration::from_secs(30));
    stream.raw.until(": still here").await;
    clock.advance(Duration::from_secs(30));
    stream.raw.rest().await;
}

async fn key(house: &House, expires_in: Option<Duration>) -> keys::CreatedKey {
    let secret = HouseSecret::of(house, None).await.unwrap();
    let tenant = Tenant::new("acme").unwrap();
    let new = NewKey {
        tenant,
        name: "test".into(),
        scopes: vec![Scope::Read],
        expires_in,
        networks: AllowedNetworks::default(),
    };
    keys::create(house, &secret, new, &AuditActor::program("test")).await.unwrap()
}
