//! I12 Workflow + external side effect: requests that leave the house, once decided, until it is known what became of them.
//!
//! ```text
//!          send             claim                      2xx
//!   (none) ─────► PENDING ─────────► SENDING ─────────────────────────► DELIVERED
//!                  │   ▲              ▲  │ │                              ▲  ▲
//!                  │   │ replay claim │  │ │ not taken       applied      │  │
//!                  │   ├── RETRYING ──┘◄─┼─┘    ┌── reconcile ────────────┘  │ resolve
//!                  │   │      ▲          │      │                            │
//!                  │   │      │ not      │ no answer, or sender lost         │
//!                  │   │      └─ applied ┼── UNCERTAIN ──────────────────────┤
//!                  │   │                 │      │    ▲ └─ claim (same key, if the target is idempotent)
//!           cancel │   └──── PARKED ◄────┘◄─────┘    │
//!                  │            │     rejected   resolve
//!                  ▼            ▼
//!                 CANCELLED ◄───┘
//! ```
//!
//! **Rows.** `charges(tenant, key, status, sent_key, url, target, headers, body, digest, attempt, tries, checks, doubt,
//! stuck_at, unsettled_at, due_shard, due_at, expires_at, http_status, answer, reason, detail, created_at, delivered_at, updated_at,
//! version)`, with an index by status and the index `due` across tenants. The row is OutboxState and EffectState in one: it is
//! written in the plan of whatever decided it (`/v1/batch`, [`Outbox`]), which is the WorkflowState. `due_shard` is fixed by the
//! target; `due_at` is set while the house has something to do: send it, ask about it, or notice that its sender is lost.
//!
//! **Invariants.**
//! - I1. An effect exists if and only if what decided it was applied. *One plan.* Its key names it: a second `send` under the
//!   key with the same content is the first one, with another content it is refused.
//! - I2. One sender at a time. *Guard of claim:* `status` and `attempt` as scanned and `due_at <= now`, by the engine's clock;
//!   it raises `attempt`, which is never reset, and sets `due_at` to the end of the sender's lease. *Guard of whatever the
//!   sender writes afterwards:* `status = 'SENDING' and attempt = mine`. A sender that was given up writes nothing.
//! - I3. What may have been applied is never said not to have been. *`doubt` is set by an attempt without a definite answer,
//!   and cleared by a definite one only:* the target's acknowledgement, what it says when it is asked, or a person. `PARKED`
//!   and `CANCELLED` are without doubt; *guard of cancel:* `doubt = false`.
//! - I4. Nothing is lost. *Whatever is not settled is due:* a sender that does not come back leaves `SENDING`, which becomes
//!   `UNCERTAIN` at the end of its lease; an unsettled row that nothing can be done about by itself has `stuck_at`, and an
//!   event that says so.
//! - I5. An effect that may have been applied is sent again only under the same key and to a target that honours it
//!   (`idempotent = true`), or after the target said that it was not applied. After an error that the target keeps under the key
//!   (`replays_errors = true`) it is asked, and not sent again. *Rules, pure functions.*
//! - I6. Secrets are read when something is sent and stored nowhere else; an answer is kept without them.
//! - I7. A request goes where it may: to an allowed host, at an address that was judged ([`crate::egress::address`]).
//! - I8. The rows that an effect was sent for change in the plan that records its outcome, if a [settler](settle) owns them.
//!
//! **Failures.** *Effect succeeded but ack lost*: `UNCERTAIN`; the target is asked, or gets the same key again. *Duplicate side
//! effect*: I2 and I5, and the key. *Stuck reconciliation*: it is asked with growing pauses for ever; after `max_checks` it is
//! said (`stuck_at`, event, list), and a person can resolve it. *Invalid workflow transition around effect*: I1; every change of
//! a row is a guarded transition.
//!
//! **Hotspots.** *External dependency latency*: requests of a step run together, at most `concurrency` for a target; a slow
//! target fills its own share. *Retry storms*: back-off with jitter, a breaker for each tenant at each target ([`target`]), patience that a
//! target asks for. *Outbox relay backlog*: `shards`, for effects with several targets; the lag is in the metrics.

mod actions;
mod archetype;
mod outbound;
pub(crate) mod owned;
mod read;
mod rules;
pub(crate) mod secret;
mod settings;
pub mod settle;
pub mod signature;
mod target;
mod transitions;
mod worker;
mod write;

pub use archetype::ARCHETYPE;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{HeaderName, Method, Uri};
use statehouse_store::Table;

use crate::declare::table::{CREATED_AT, UPDATED_AT};
use crate::declare::{Declare, ResourceSpec, TableDef};
use crate::infra::due;
use crate::view_source::SourceRows;
use rules::RetryRules;
pub use secret::{SecretChange, forget as forget_secret, keep as keep_secret};
use secret::{SecretReference, SecretTemplate};
use settle::Settler;
pub use signature::new_secret;
use target::Targets;
pub use write::{EffectRequest, Outbox};

/// The states of a row.
const STATUSES: [&str; 7] = [PENDING, SENDING, RETRYING, UNCERTAIN, DELIVERED, PARKED, CANCELLED];
/// The states of a row whose effect belongs to another archetype: such a request is not taken back.
const OWNED_STATUSES: [&str; 6] = [PENDING, SENDING, RETRYING, UNCERTAIN, DELIVERED, PARKED];
const PENDING: &str = "PENDING";
const SENDING: &str = "SENDING";
const RETRYING: &str = "RETRYING";
const UNCERTAIN: &str = "UNCERTAIN";
const DELIVERED: &str = "DELIVERED";
const PARKED: &str = "PARKED";
const CANCELLED: &str = "CANCELLED";
/// The columns, besides those of what is due.
const KEY: &str = "key";
const STATUS: &str = "status";
const SENT_KEY: &str = "sent_key";
const URL: &str = "url";
const TARGET: &str = "target";
const HEADERS: &str = "headers";
const BODY: &str = "body";
const DIGEST: &str = "digest";
const ATTEMPT: &str = "attempt";
const TRIES: &str = "tries";
const CHECKS: &str = "checks";
const DOUBT: &str = "doubt";
const STUCK_AT: &str = "stuck_at";
const UNSETTLED_AT: &str = "unsettled_at";
const EXPIRES_AT: &str = "expires_at";
const HTTP_STATUS: &str = "http_status";
const ANSWER: &str = "answer";
const REASON: &str = "reason";
const DETAIL: &str = "detail";
const DELIVERED_AT: &str = "delivered_at";
const BY_STATUS: &str = "by_status";
/// Inputs of actions.
const AFTER_MS: &str = "after_ms";
const IS_DELIVERED: &str = "delivered";

const SPAN_MS_MAX: i64 = 366 * 24 * 3_600 * 1_000;
const KEY_BYTES_MAX: usize = 128;
const URL_BYTES_MAX: usize = 2_048;
const BODY_BYTES_MAX: usize = 100_000;
const HEADERS_BYTES_MAX: usize = 8_000;
const ANSWER_BYTES_MAX: u32 = 64_000;
const JSON: &str = "application/json";

/// One declared kind of effect.
#[derive(Debug)]
pub(crate) struct EffectSpec {
    name: String,
    /// The worker that sends: `charge.send`.
    sender: String,
    def: Arc<TableDef>,
    table: Arc<Table>,
    shards: u32,
    destination: EffectDestination,
    /// What the addresses of an owned effect begin with.
    base_url: String,
    method: Method,
    headers: Vec<(HeaderName, SecretTemplate)>,
    content_type: String,
    connect_timeout: Duration,
    timeout: Duration,
    /// How long a sender has from the claim to the record.
    lease: Duration,
    rules: RetryRules,
    targets: Arc<Targets>,
    key_header: Option<HeaderName>,
    /// What the target knows an effect by: `{tenant}`, `{name}` and `{key}` are filled in.
    sent_key: String,
    sign: Vec<SecretReference>,
    /// Where a target is asked what became of an effect; `{key}` is filled in.
    reconcile_url: Option<String>,
    allow_private: bool,
    answer_max: usize,
    keep: Option<Duration>,
    /// Changes the rows that effects were sent for, in the plan that records an outcome.
    settler: OnceLock<Arc<dyn Settler>>,
}

/// Where effects go.
#[derive(Debug)]
enum EffectDestination {
    /// All to one address; `{key}` is filled in.
    Fixed(String),
    /// Each to its own, at one of these hosts.
    Hosts(Vec<AllowedHost>),
}

/// A host that effects may go to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AllowedHost {
    name: HostName,
    /// `None` for the port of the scheme.
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum HostName {
    Any,
    /// This one.
    Is(String),
    /// Those below this one: `.example.com`.
    Below(String),
}

impl AllowedHost {
    /// Reads `api.example.com`, `api.example.com:8443`, `*.example.com` or `*`.
    fn parse(text: &str) -> Option<AllowedHost> {
        let lower = text.to_ascii_lowercase();
        let (name, port) = match lower.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => (name.to_owned(), Some(port.parse().ok()?)),
            _ => (lower, None),
        };
        let name = match name.as_str() {
            "*" => HostName::Any,
            name => match name.strip_prefix('*') {
                Some(end) if end.starts_with('.') && end.len() > 1 && !end.contains('*') => {
                    HostName::Below(end.to_owned())
                }
                None if !name.is_empty() && !name.contains(['*', '/', '@', ' ']) => {
                    HostName::Is(name.to_owned())
                }
                _ => return None,
            },
        };
        Some(AllowedHost { name, port })
    }

    /// Whether it stands for more than one host.
    fn is_pattern(&self) -> bool {
        !matches!(self.name, HostName::Is(_))
    }

    fn admits(&self, host: &str, port: Option<u16>) -> bool {
        let named = match &self.name {
            HostName::Any => true,
            HostName::Is(name) => name == host,
            HostName::Below(end) => host.ends_with(end.as_str()),
        };
        named && self.port == port
    }
}

/// An address that an effect may have.
#[derive(Debug)]
struct CheckedUrl {
    uri: Uri,
    /// Host and port.
    target: String,
}

/// Checks the form of an address: scheme, host, nothing hidden in it.
fn check_url(text: &str, plain: bool) -> Result<CheckedUrl, String> {
    if text.len() > URL_BYTES_MAX {
        return Err(format!("a URL has at most {URL_BYTES_MAX} bytes"));
    }
    let uri: Uri = text.parse().map_err(|_| format!("`{text}` is not a URL"))?;
    let default = match uri.scheme_str() {
        Some("https") => 443,
        Some("http") if plain => 80,
        Some("http") => {
            return Err(
                "plain http is for one's own network only: write https, or `allow_private = true`".into()
            );
        }
        _ => return Err(format!("`{text}` must begin with https://")),
    };
    let authority = uri.authority().map_or("", http::uri::Authority::as_str);
    if authority.contains('@') {
        return Err("a URL must not have a user or a password in it: use `headers` and a secret".into());
    }
    let host = uri.host().unwrap_or_default().to_ascii_lowercase();
    if host.is_empty() {
        return Err(format!("`{text}` names no host"));
    }
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
    if has_port && uri.port_u16().is_none() {
        return Err(format!("`{text}` has a port that is not between 0 and 65535"));
    }
    let target = format!("{host}:{}", uri.port_u16().unwrap_or(default));
    Ok(CheckedUrl { uri, target })
}

/// A fuzz target: an address that passes the checks has the host and the port that will be connected to.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_url(allowed: &str, url: &str) {
    for plain in [false, true] {
        let Ok(checked) = check_url(url, plain) else { continue };
        let host = checked.uri.host().unwrap_or_default().to_ascii_lowercase();
        assert!(!host.is_empty() && !host.contains(['@', '/', '?', '#', ' ']), "{url}: {host}");
        let port = checked.target.strip_prefix(host.as_str()).and_then(|rest| rest.strip_prefix(':'));
        assert!(port.is_some_and(|port| port.parse::<u16>().is_ok()), "{url}: {}", checked.target);
        assert!(plain || checked.uri.scheme_str() == Some("https"), "{url}");
        if let Some(rule) = AllowedHost::parse(allowed)
            && rule.admits(&host, None)
            && let HostName::Below(end) = &rule.name
        {
            assert!(host.len() > end.len() && host.ends_with(end.as_str()), "{allowed} admits {host}");
        }
    }
}

/// A text as a part of a URL.
fn encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

/// Reads `[effect.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let effect = Arc::new(settings::read(cx)?);
    // Events of attempts do without the row, whose body may be large; and rows are forgotten.
    let source_rows = SourceRows::with_keys(&effect.table, [(effect.name.as_str(), KEY)])
        .unlogged(&[due::DUE_AT], "an effect that has to wait for its target is put off without an event");
    let machine = cx.machine(transitions::of(&effect))?;
    let resolve = actions::resolve(&effect, cx.part(&machine, "resolve")?);
    cx.resource(
        ResourceSpec::of(&effect.name, &effect.def)
            .source_rows(source_rows)
            .outbox(Outbox::over(&effect))
            .worker(worker::EffectSender(effect.clone()))
            .actions(actions::actions(&effect))
            .action(resolve)
            .machine(&machine),
    );
    Some(())
}

/// Whether a header is HTTP's own, or one that the house sets.
fn is_reserved(name: &HeaderName) -> bool {
    const RESERVED: [&str; 14] = [
        "host",
        "content-length",
        "content-type",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "proxy-authorization",
        signature::ID,
        signature::TIMESTAMP,
        signature::SIGNATURE,
    ];
    RESERVED.contains(&name.as_str())
}

impl EffectSpec {
    /// All secrets that sending needs.
    fn references(&self) -> impl Iterator<Item = &SecretReference> {
        self.headers.iter().flat_map(|(_, template)| template.references()).chain(&self.sign)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blueprint::Blueprint;

    #[test]
    fn hosts_admit_what_they_say() {
        for (rule, host, port, admitted) in [
            ("api.example.com", "api.example.com", None, true),
            ("API.example.com", "api.example.com", None, true),
            ("api.example.com", "api.example.com", Some(8443), false),
            ("api.example.com:8443", "api.example.com", Some(8443), true),
            ("api.example.com:8443", "api.example.com", None, false),
            ("api.example.com", "evil-api.example.com", None, false),
            ("*.example.com", "a.example.com", None, true),
            ("*.example.com", "a.b.example.com", None, true),
            ("*.example.com", "example.com", None, false),
            ("*.example.com", "evilexample.com", None, false),
            ("*", "anything.test", None, true),
            ("*", "anything.test", Some(22), false),
            ("*:8080", "anything.test", Some(8080), true),
            ("[::1]:80", "[::1]", Some(80), true),
        ] {
            let parsed = AllowedHost::parse(rule).unwrap_or_else(|| panic!("{rule}"));
            assert_eq!(parsed.admits(host, port), admitted, "{rule} {host} {port:?}");
        }
        for bad in ["https://a.example:65536", "https://a.example:", "https://[2001:db8::1]:99999/x"] {
            assert!(check_url(bad, false).is_err(), "{bad}");
        }
        assert!(check_url("https://[2001:db8::1]:8443/x", false).is_ok());
        for bad in ["", "*example.com", "*.", "a.*.com", "https://a.example", "a b", "a@b", "a:port"] {
            assert_eq!(AllowedHost::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn urls_say_where_they_go_and_nothing_else() {
        let target = |url| check_url(url, false).map(|checked| checked.target);
        assert_eq!(target("https://API.example.com/v1?x=1"), Ok("api.example.com:443".into()));
        assert_eq!(target("https://api.example.com:8443"), Ok("api.example.com:8443".into()));
        for bad in [
            "",
            "api.example.com",
            "/path",
            "http://api.example.com/",
            "ftp://a.example/",
            "https://",
            "https://user:pw@a.example/",
            "https://trusted.example@evil.example/",
            "https://a b/",
            "file:///etc/passwd",
            "https:///path",
        ] {
            assert!(target(bad).is_err(), "{bad}");
        }
        assert!(target(&format!("https://a.example/{}", "x".repeat(URL_BYTES_MAX))).is_err());
        assert_eq!(check_url("http://127.0.0.1:81/", true).unwrap().target, "127.0.0.1:81");
        assert_eq!(encoded("acme:charge:a/b c?é"), "acme%3Acharge%3Aa%2Fb%20c%3F%C3%A9");
    }

    fn problems(text: &str) -> String {
        let text = format!("[effect.hook]\n{text}");
        let blueprint = Blueprint::read("statehouse.toml", &text).unwrap();
        crate::resource::declare(&blueprint).err().map(|problems| problems.render(false)).unwrap_or_default()
    }

    #[test]
    fn secrets_go_only_to_hosts_that_the_operator_names() {
        const SECRET: &str = "headers = { x-plain = \"1\", authorization = \"Bearer ${env:K}\" }\n";
        for (hosts, expected) in [
            ("hosts = [\"*\"]\n", "every host that a caller chooses"),
            ("hosts = [\"*\"]\nsend_secrets = true\n", "every host that a caller chooses"),
            ("hosts = [\"a.example\", \"*.b.example\"]\nsend_secrets = true\n", "every host that a caller"),
            ("hosts = [\"*:8443\"]\nsend_secrets = true\n", "every host that a caller chooses"),
            ("hosts = [\"a.example\"]\n", "`send_secrets = true`"),
            ("hosts = [\"a.example\"]\nsend_secrets = false\n", "`send_secrets = true`"),
        ] {
            let said = problems(&format!("{hosts}{SECRET}"));
            assert!(said.contains(expected), "{hosts}: {said}");
            let line = hosts.lines().count() + 2;
            assert!(said.contains(&format!("statehouse.toml:{line}:")), "{hosts}: {said}");
            assert!(said.contains("`authorization`"), "{hosts}: {said}");
        }
        for fine in [
            format!("hosts = [\"a.example\", \"b.example\"]\nsend_secrets = true\n{SECRET}"),
            format!("url = \"https://a.example/\"\n{SECRET}"),
            "hosts = [\"*\"]\nheaders = { x-plain = \"1\" }\nsign = [\"env:K\"]\n".into(),
        ] {
            assert_eq!(problems(&fine), "", "{fine}");
        }
    }

    #[test]
    fn settings_are_checked() {
        const URL: &str = "url = \"https://a.example/\"\n";
        for (text, expected) in [
            ("", "needs either `url` or `hosts`"),
            ("url = \"https://a.example/\"\nhosts = [\"a.example\"]", "needs either `url` or `hosts`"),
            ("url = \"http://a.example/\"", "plain http"),
            ("hosts = [\"a b\"]", "is not a host"),
            (
                &format!("{URL}headers = {{ authorization = \"Bearer ${{PSP}}\" }}"),
                "does not say where a secret is",
            ),
            (&format!("{URL}headers = {{ content-length = \"3\" }}"), "the server itself sets"),
            (&format!("{URL}sign = [\"whsec_abc\"]"), "does not say where a secret is"),
            (&format!("{URL}sign = [\"env:A\", \"env:B\", \"env:C\"]"), "one secret, or two"),
            (&format!("{URL}sent_key = \"x\""), "all effects would be one"),
            (&format!("{URL}lease = \"5s\""), "must be longer"),
            (&format!("{URL}max_attempts = 0"), "must be from 1 to 1000"),
            (&format!("{URL}back_off = {{ min = \"10s\", max = \"1s\" }}"), "at least as long"),
            (&format!("{URL}back_off = {{ mix = \"10s\" }}"), "did you mean `min`?"),
            (&format!("{URL}reconcile = {{ url = \"https://a.example/\" }}"), "must have `{key}`"),
            (&format!("{URL}reconcile = {{ after = \"1s\" }}"), "needs a `url`"),
            (&format!("{URL}limits = {{ concurrency = 0 }}"), "must be from 1 to 1000"),
            (&format!("{URL}breaker = 3"), "`breaker` of `effect.hook`: expected a table"),
            (&format!("{URL}retries = 3"), "has no setting `retries`"),
        ] {
            let said = problems(text);
            assert!(said.contains(expected), "{text}: {said}");
        }
        let whole = "url = \"https://a.example/x/{key}\"\nmethod = \"PUT\"\nheaders = { authorization = \"Bearer ${env:K}\" }\n\
                     sign = [\"env:A\", \"house:b\"]\nback_off = { min = \"2s\", max = \"1h\" }\n\
                     limits = { concurrency = 4, per_second = 10 }\nbreaker = { failures = 3, cool_down = \"10s\" }\n\
                     reconcile = { url = \"https://a.example/by-key/{key}\", after = \"1m\", max_checks = 5 }\n\
                     idempotent = true\nkey_header = \"x-key\"\nsent_key = \"{key}\"\nkeep = \"30d\"\nanswer_max = 100\n";
        assert_eq!(problems(whole), "");
    }
}
