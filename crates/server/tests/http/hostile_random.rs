//! Random hostile requests: every route of the document with mutated paths, queries, headers and bodies.
//!
//! The seed is fixed, so a failure can be repeated. `STATEHOUSE_HOSTILE_REQUESTS` sets how many requests are sent. The attacker is
//! a tenant with a valid key. Each request must get an answer that is no server error, and the rows of another tenant must stay
//! as they were.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use statehouse_server::auth::Scope;
use statehouse_store::Random;

use crate::credentials::{key, with_keys};
use crate::support::{Running, Site, cases};

cases![random_requests_get_answers_and_touch_no_other_tenant];

const VARIABLE: &str = "STATEHOUSE_HOSTILE_REQUESTS";
const REQUESTS: usize = 3_000;
const VICTIM_ROWS: i64 = 5;

/// Texts that parsers get wrong.
const TEXTS: &[&str] = &[
    "",
    " ",
    "0",
    "-1",
    "1",
    "2",
    "9223372036854775807",
    "9223372036854775808",
    "1e309",
    "NaN",
    "null",
    "true",
    "a",
    "victim",
    "'; drop table profiles; --",
    "../../etc/passwd",
    "%2e%2e%2f",
    "%00",
    "%",
    "%zz",
    "\u{202e}abc",
    "ü",
    "💣",
    "{}",
    "[]",
    "\"",
    "\\",
    "a.b",
    "a,b",
    "_house",
    "*",
    "=",
    "&",
    "if",
    "1970-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
    "points < 100 and (name = 'x' or",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
];

const METHODS: &[&str] =
    &["GET", "GET", "POST", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"];

const HEADERS: &[&str] = &[
    "if-match",
    "if-none-match",
    "idempotency-key",
    "prefer",
    "accept",
    "content-type",
    "content-encoding",
    "accept-encoding",
    "last-event-id",
    "statehouse-tenant",
    "statehouse-token",
    "traceparent",
    "origin",
    "range",
    "x-request-id",
    "expect",
];

struct Attack {
    random: Random,
    paths: Vec<String>,
    names: Vec<String>,
}

impl Attack {
    fn on(document: &Json, seed: u64) -> Attack {
        let paths = document["paths"].as_object().unwrap().keys().cloned().collect();
        let names = [
            "user_id",
            "display_name",
            "bio",
            "set",
            "increment",
            "limit",
            "cursor",
            "after",
            "action",
            "input",
            "key",
        ];
        Attack { random: Random::seeded(seed), paths, names: names.map(str::to_owned).to_vec() }
    }

    fn text(&mut self) -> String {
        let text = (*self.random.pick(TEXTS).unwrap()).to_owned();
        match self.random.below(12) {
            0 => text.repeat(200),
            1 => format!("{text}{}", self.random.next_u64()),
            _ => text,
        }
    }

    /// A path of the document whose parameters are hostile, sometimes cut or lengthened.
    fn path(&mut self) -> String {
        let template = self.random.pick(&self.paths).unwrap().clone();
        let mut path = String::new();
        for (index, part) in template.split('/').enumerate() {
            if index > 0 {
                path.push('/');
            }
            match part.starts_with('{') {
                true => path.push_str(&escaped(&self.text())),
                false => path.push_str(part),
            }
        }
        if self.random.chance(0.1) {
            path.push('/');
            path.push_str(&escaped(&self.text()));
        }
        let parameters = self.random.below(4);
        for index in 0..parameters {
            path.push(if index == 0 { '?' } else { '&' });
            let name = self.random.pick(&self.names).unwrap().clone();
            path.push_str(&format!("{name}={}", escaped(&self.text())));
        }
        path
    }

    fn value(&mut self, depth: usize) -> Json {
        match self.random.below(if depth > 3 { 5 } else { 7 }) {
            0 => Json::Null,
            1 => json!(self.random.next_u64()),
            2 => json!(-1.5e300),
            3 | 4 => self.text().into(),
            5 => (0..self.random.below(4)).map(|_| self.value(depth + 1)).collect(),
            _ => self.object(depth + 1),
        }
    }

    fn object(&mut self, depth: usize) -> Json {
        let mut object = serde_json::Map::new();
        for _ in 0..self.random.below(5) {
            let name = match self.random.chance(0.8) {
                true => self.random.pick(&self.names).unwrap().clone(),
                false => self.text(),
            };
            let value = self.value(depth);
            object.insert(name, value);
        }
        object.into()
    }

    /// A body of JSON, sometimes cut in the middle or of other bytes.
    fn body(&mut self) -> Vec<u8> {
        let mut body = self.value(0).to_string().into_bytes();
        match self.random.below(10) {
            0 => body.truncate(body.len() / 2),
            1 => body.extend([0xff, 0xfe, 0x00]),
            2 => body = self.random.next_u64().to_le_bytes().to_vec(),
            _ => {}
        }
        body
    }

    fn headers(&mut self) -> Vec<(String, String)> {
        let mut headers = Vec::new();
        if self.random.chance(0.8) {
            headers.push(("content-type".to_owned(), "application/json".to_owned()));
        }
        for _ in 0..self.random.below(4) {
            let name = (*self.random.pick(HEADERS).unwrap()).to_owned();
            let value: String = self.text().chars().filter(char::is_ascii_graphic).collect();
            headers.push((name, value));
        }
        headers
    }
}

/// What a client must escape to send it in a path or query at all. The rest is sent as it is.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'!'..=b'~'
                if !matches!(
                    byte,
                    b'#' | b'?' | b'"' | b'<' | b'>' | b'\\' | b'`' | b'{' | b'}' | b'^' | b'|'
                ) =>
            {
                escaped.push(char::from(byte));
            }
            _ => escaped.push_str(&format!("%{byte:02x}")),
        }
    }
    escaped
}

async fn victims(server: &Running, bearer: &str) -> Vec<Json> {
    let mut rows = Vec::new();
    for user in 1..=VICTIM_ROWS {
        rows.push(
            server
                .get_with(&format!("/v1/profile/{user}"), &[("authorization", bearer)])
                .await
                .ok(200)
                .json(),
        );
    }
    rows
}

async fn random_requests_get_answers_and_touch_no_other_tenant(site: Site) {
    let server = site.server_with(with_keys()).await;
    let all = [Scope::Read, Scope::Write];
    let victim = format!("Bearer {}", key(&server.house, "victim", &all, None).await.key);
    let attacker = format!("Bearer {}", key(&server.house, "attacker", &all, None).await.key);
    for user in 1..=VICTIM_ROWS {
        let row = json!({"user_id": user, "display_name": "hidden-from-others"});
        server.put("POST", "/v1/profile", &[("authorization", &victim)], row).await.ok(201);
    }
    let before = victims(&server, &victim).await;
    let document = server.get_with("/openapi.json", &[("authorization", &attacker)]).await.ok(200).json();
    let mut attack = Attack::on(&document, 20_261_118);
    let requests = std::env::var(VARIABLE).map_or(REQUESTS, |count| count.parse().unwrap());
    let mut answers: BTreeMap<u16, usize> = BTreeMap::new();
    for number in 0..requests {
        let (method, path, body) = (*attack.random.pick(METHODS).unwrap(), attack.path(), attack.body());
        // A stream has no end to wait for.
        if path.starts_with("/v1/events") {
            continue;
        }
        let headers = attack.headers();
        let mut sent: Vec<(&str, &str)> = vec![("authorization", &attacker)];
        sent.extend(headers.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let reply = server.send(method, &path, &sent, body.clone()).await;
        let what =
            || format!("request {number}: {method} {path} {headers:?} {}", String::from_utf8_lossy(&body));
        assert!(reply.status < 500 || reply.status == 501, "{}: {reply:?}", what());
        *answers.entry(reply.status).or_default() += 1;
        let text = String::from_utf8_lossy(&reply.body);
        assert!(!text.contains("hidden-from-others"), "{}: {text}", what());
    }
    // Requests that all fail at the first check would show nothing.
    for status in [200, 400, 404, 405] {
        assert!(answers.contains_key(&status), "no answer {status} among {answers:?}");
    }
    assert_eq!(victims(&server, &victim).await, before);
    server.get("/livez").await.ok(200);
}
