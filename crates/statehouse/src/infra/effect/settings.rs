//! The settings of `[effect.NAME]`.

use std::ops::RangeInclusive;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{HeaderName, Method};
use statehouse_store::Type;

use super::rules::{ReconcileRules, RetryRules};
use super::secret::{SecretReference, SecretTemplate};
use super::target::{TargetLimits, Targets};
use super::{
    ANSWER, ANSWER_BYTES_MAX, ATTEMPT, AllowedHost, BODY, BY_STATUS, CHECKS, DELIVERED_AT, DETAIL, DIGEST,
    DOUBT, EXPIRES_AT, EffectDestination, EffectSpec, HEADERS, HTTP_STATUS, HostName, JSON, KEY,
    OWNED_STATUSES, REASON, SENT_KEY, SPAN_MS_MAX, STATUS, STATUSES, STUCK_AT, TARGET, TRIES, UNSETTLED_AT,
    UPDATED_AT, URL, check_url, is_reserved,
};
use crate::declare::{Declare, SettingsReader, TableDef, TableSpec};
use crate::infra::due::DUE_AT;
use crate::resource::plural;

const METHODS: [&str; 5] = ["POST", "PUT", "PATCH", "DELETE", "GET"];
/// The bounds of every duration.
const DURATIONS: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_millis(SPAN_MS_MAX as u64);

/// What a declaration says of an effect, before its table is built.
pub(crate) struct EffectDraft {
    table: String,
    shards: u32,
    build: Box<dyn FnOnce(Arc<TableDef>) -> Option<EffectSpec>>,
}

/// An effect that another archetype declares within its own table of settings, for itself. It reads `url`, the address that all
/// requests begin with, instead of `url` and `hosts`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnedEffect<'a> {
    /// The name of its resource.
    pub name: &'a str,
    /// Where the target is asked, behind `url`: `/transactions/{key}`.
    pub status_path: &'static str,
    /// The content type of the bodies.
    pub content_type: &'static str,
    /// Whether the target is known to do one key once.
    pub idempotent: bool,
    /// Whether the target is known to keep its errors under the key.
    pub replays_errors: bool,
}

pub(super) fn read(cx: &mut Declare<'_>) -> Option<EffectSpec> {
    let name = cx.name();
    let draft = draft(cx.settings(), name, None);
    // The columns are checked also if a setting is wrong.
    let def = cx.build(rows(draft.table.clone(), draft.shards, &STATUSES))?;
    draft.with(def)
}

impl EffectDraft {
    /// Reads the settings of an effect that another archetype owns.
    pub(crate) fn read(settings: &mut SettingsReader<'_>, owned: &OwnedEffect<'_>) -> EffectDraft {
        draft(settings, owned.name, Some(owned))
    }

    /// The columns of its rows.
    pub(crate) fn rows(&self) -> TableSpec {
        rows(self.table.clone(), self.shards, &OWNED_STATUSES)
    }

    /// The effect over its table; `None` if the settings had problems.
    pub(super) fn with(self, def: Arc<TableDef>) -> Option<EffectSpec> {
        (self.build)(def)
    }
}

fn draft(settings: &mut SettingsReader<'_>, name: &str, owned: Option<&OwnedEffect<'_>>) -> EffectDraft {
    let table = match owned {
        Some(_) => plural(name),
        None => settings.text("table", plural(name)),
    };
    let method = if owned.is_some() { "POST" } else { settings.choice("method", &METHODS) };
    let by_default = owned.map_or(["PUT", "DELETE", "GET"].contains(&method), |owned| owned.idempotent);
    let idempotent = settings.flag("idempotent", by_default);
    let allow_private = settings.flag("allow_private", false);
    let (base_url, destination) = match owned {
        Some(_) => base(settings, allow_private),
        None => (String::new(), destination(settings, name, allow_private)),
    };
    let one_target = owned.is_some() || matches!(destination, Some(EffectDestination::Fixed(_)));
    let shards = settings.count("shards", if one_target { 1 } else { 8 }, 1..=1_024);
    let content_type = match owned {
        Some(owned) => owned.content_type.to_owned(),
        None => settings.text("content_type", JSON),
    };
    let headers = headers(settings);
    if owned.is_none() {
        check_disclosure(settings, destination.as_ref(), &headers);
    }
    let (key_header, sent_key) = (key_header(settings), sent_key(settings));
    let sign = sign(settings);
    let (connect_timeout, timeout, lease) = timeouts(settings);
    let (reconcile_url, reconcile) = match owned {
        Some(owned) => (Some(format!("{base_url}{}", owned.status_path)), Some(questions(settings, timeout))),
        None => reconcile(settings, timeout, allow_private),
    };
    let replays_errors = owned.is_some_and(|owned| owned.replays_errors);
    let rules = retry_rules(settings, idempotent, replays_errors, reconcile);
    let targets = Arc::new(Targets::with(limits(settings)));
    let answer_max = match owned {
        // The settler has to find the whole answer.
        Some(_) => ANSWER_BYTES_MAX,
        None => settings.count("answer_max", 16_000, 0..=ANSWER_BYTES_MAX),
    };
    let keep = if owned.is_some() { None } else { settings.maybe_duration("keep", DURATIONS) };
    let (name, method) = (name.to_owned(), method.parse().unwrap_or(Method::POST));
    let build = move |def: Arc<TableDef>| {
        Some(EffectSpec {
            sender: format!("{name}.send"),
            name,
            table: def.table().clone(),
            def,
            shards,
            destination: destination?,
            base_url,
            method,
            headers,
            content_type,
            connect_timeout,
            timeout,
            lease,
            rules,
            targets,
            key_header,
            sent_key,
            sign,
            reconcile_url,
            allow_private,
            answer_max: answer_max as usize,
            keep,
            settler: OnceLock::new(),
        })
    };
    EffectDraft { table, shards, build: Box::new(build) }
}

/// What the target knows an effect by.
fn sent_key(settings: &mut SettingsReader<'_>) -> String {
    let sent_key = settings.text("sent_key", "{tenant}:{name}:{key}");
    let title = "`sent_key` must have `{key}` in it, or all effects would be one";
    settings.refuse_if(!sent_key.contains("{key}"), "sent_key", title);
    sent_key
}

fn retry_rules(
    settings: &mut SettingsReader<'_>,
    idempotent: bool,
    replays_errors: bool,
    reconcile: Option<ReconcileRules>,
) -> RetryRules {
    let (pause_min, pause_max) = back_off(settings);
    let max_attempts = i64::from(settings.count("max_attempts", 12, 1..=1_000));
    let replays_errors = settings.flag("replays_errors", replays_errors);
    let title =
        "`replays_errors` needs `reconcile`: after an error the target is asked, and not sent the same again";
    settings.refuse_if(replays_errors && reconcile.is_none(), "replays_errors", title);
    RetryRules { max_attempts, pause_min, pause_max, idempotent, replays_errors, reconcile }
}

/// The address that all requests of an owned effect begin with. They go to its host only.
fn base(settings: &mut SettingsReader<'_>, allow_private: bool) -> (String, Option<EffectDestination>) {
    let url = settings.text("url", "");
    let url = url.trim_end_matches('/').to_owned();
    match check_url(&url, allow_private) {
        Ok(checked) => {
            let default = if checked.uri.scheme_str() == Some("https") { 443 } else { 80 };
            let host = checked.uri.host().unwrap_or_default().to_ascii_lowercase();
            let port = checked.uri.port_u16().filter(|port| *port != default);
            let allowed = AllowedHost { name: HostName::Is(host), port };
            (url, Some(EffectDestination::Hosts(vec![allowed])))
        }
        Err(why) if url.is_empty() => {
            drop(why);
            settings.problem_with_advice(
                "url",
                "`url` is missing",
                "write `url = \"https://…\"`, where requests go",
            );
            (url, None)
        }
        Err(why) => {
            settings.problem("url", why);
            (url, None)
        }
    }
}

/// When an owned effect asks what became of a request.
fn questions(settings: &mut SettingsReader<'_>, timeout: Duration) -> ReconcileRules {
    let after = timeout.saturating_mul(2);
    let given = settings.nested("reconcile", |settings| ReconcileRules {
        after: settings.duration("after", after, DURATIONS),
        max_checks: i64::from(settings.count("max_checks", 10, 1..=1_000)),
    });
    given.unwrap_or(ReconcileRules { after, max_checks: 10 })
}

fn rows(table: String, shards: u32, statuses: &[&'static str]) -> TableSpec {
    let due = "when the server looks at it next; while it is sent, the end of its sender's lease";
    TableSpec::named(table)
        .partition(KEY, Type::Text)
        .states_in(STATUS, statuses)
        .text(SENT_KEY)
        .about("what the target knows it by")
        .text(URL)
        .text(TARGET)
        .about("host and port")
        .json(HEADERS)
        .null()
        .about("those that came with it")
        .json(BODY)
        .null()
        .text(DIGEST)
        .about("tells a repetition from another effect under the same key")
        .int(ATTEMPT)
        .default(0)
        .about("how often it was sent in all; the epoch of its sender")
        .int(TRIES)
        .default(0)
        .about("how often since it was written down or replayed")
        .int(CHECKS)
        .default(0)
        .about("how often the target was asked what became of it")
        .flag(DOUBT)
        .default(false)
        .about("whether some attempt may have been applied without an answer")
        .time(STUCK_AT)
        .null()
        .about("since when a person has to look at it")
        .time(UNSETTLED_AT)
        .null()
        .about("since when the outcome is recorded and its consequences are not")
        .time(EXPIRES_AT)
        .null()
        .int(HTTP_STATUS)
        .null()
        .about("of the last answer")
        .text(ANSWER)
        .null()
        .about("the beginning of the last answer's body, without secrets")
        .text(REASON)
        .null()
        .about("a stable word for why it is where it is")
        .text(DETAIL)
        .null()
        .created_at()
        .time(DELIVERED_AT)
        .null()
        .updated_at()
        .time(DUE_AT)
        .null()
        .about(due)
        .deadline(&[""; 0], DUE_AT, shards)
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT])
}

/// One address for all effects, or the hosts that they may go to.
fn destination(
    settings: &mut SettingsReader<'_>,
    name: &str,
    allow_private: bool,
) -> Option<EffectDestination> {
    let (url, hosts) = (settings.maybe_text("url"), settings.texts("hosts"));
    match (url, settings.has("hosts")) {
        (Some(url), false) => {
            if let Err(why) = check_url(&url.replace("{key}", "key"), allow_private) {
                settings.problem("url", why);
            }
            Some(EffectDestination::Fixed(url))
        }
        (None, true) => {
            let mut parsed = Vec::new();
            for host in &hosts {
                match AllowedHost::parse(host) {
                    Some(host) => parsed.push(host),
                    None => {
                        let advice = "write \"api.example.com\", with a port if it is not the usual one, \
                                      \"*.example.com\", or \"*\" for any";
                        settings.problem_with_advice("hosts", format!("`{host}` is not a host"), advice);
                    }
                }
            }
            Some(EffectDestination::Hosts(parsed))
        }
        _ => {
            let title = format!("`effect.{name}` needs either `url` or `hosts`");
            let advice = "`url = \"https://…\"` if all go to one address, `hosts = [\"…\"]` if each effect brings its own";
            settings.problem_with_advice("url", title, advice);
            None
        }
    }
}

fn headers(settings: &mut SettingsReader<'_>) -> Vec<(HeaderName, SecretTemplate)> {
    let mut headers = Vec::new();
    for (name, value) in &settings.texts_by_name("headers") {
        let header =
            name.to_ascii_lowercase().parse::<HeaderName>().map_err(|_| format!("`{name}` is not a header"));
        let header = header.and_then(|header| match is_reserved(&header) {
            true => Err(format!("the server itself sets the header `{name}`")),
            false => Ok(header),
        });
        match (header, SecretTemplate::parse(value)) {
            (Ok(header), Ok(value)) => headers.push((header, value)),
            (Err(why), _) | (_, Err(why)) => settings.problem("headers", why),
        }
    }
    headers
}

/// A caller that may choose the host receives the secrets in `headers` there. So no host may be a pattern, and listed
/// hosts need `send_secrets = true`.
fn check_disclosure(
    settings: &mut SettingsReader<'_>,
    destination: Option<&EffectDestination>,
    headers: &[(HeaderName, SecretTemplate)],
) {
    let send_secrets = settings.flag("send_secrets", false);
    let Some(EffectDestination::Hosts(hosts)) = destination else { return };
    let Some((name, _)) = headers.iter().find(|(_, value)| value.references().next().is_some()) else {
        return;
    };
    if hosts.iter().any(AllowedHost::is_pattern) {
        let title = format!("the secret in `{name}` would go to every host that a caller chooses");
        let advice = "list the hosts one by one, or use `url`; to prove who sends, use `sign`, which does not send the secret";
        settings.problem_with_advice("headers", title, advice);
    } else if !send_secrets {
        let title =
            format!("the secret in `{name}` would go to any URL at these hosts that a caller chooses");
        let advice = "write `send_secrets = true` if every listed host may have it";
        settings.problem_with_advice("headers", title, advice);
    }
}

fn key_header(settings: &mut SettingsReader<'_>) -> Option<HeaderName> {
    let name = settings.text("key_header", "idempotency-key");
    if name.is_empty() {
        return None;
    }
    let header = name.to_ascii_lowercase().parse::<HeaderName>().ok();
    settings.refuse_if(header.is_none(), "key_header", format!("`{name}` is not a header"));
    header
}

fn sign(settings: &mut SettingsReader<'_>) -> Vec<SecretReference> {
    let given = settings.texts("sign");
    let title = "`sign` takes one secret, or two during a rotation";
    settings.refuse_if(given.len() > 2, "sign", title);
    let mut references = Vec::new();
    for secret in &given {
        match SecretReference::parse(secret) {
            Ok(reference) => references.push(reference),
            Err(why) => settings.problem("sign", why),
        }
    }
    references
}

/// For the connection, for the answer, and from the claim to the record.
fn timeouts(settings: &mut SettingsReader<'_>) -> (Duration, Duration, Duration) {
    let connect = settings.duration("connect_timeout", Duration::from_secs(5), DURATIONS);
    let answer = settings.duration("timeout", Duration::from_secs(15), DURATIONS);
    let both = connect.saturating_add(answer);
    let lease = settings.duration("lease", both.saturating_add(Duration::from_secs(30)), DURATIONS);
    let title = "`lease` must be longer than `connect_timeout` and `timeout` together";
    settings.refuse_if(lease <= both, "lease", title);
    (connect, answer, lease)
}

fn back_off(settings: &mut SettingsReader<'_>) -> (Duration, Duration) {
    let default = (Duration::from_secs(1), Duration::from_secs(3_600));
    let given = settings.nested("back_off", |settings| {
        let (min, max) =
            (settings.duration("min", default.0, DURATIONS), settings.duration("max", default.1, DURATIONS));
        settings.refuse_if(max < min, "max", "`max` must be at least as long as `min`");
        (min, max)
    });
    given.unwrap_or(default)
}

fn limits(settings: &mut SettingsReader<'_>) -> TargetLimits {
    let rates = settings.nested("limits", |settings| {
        (settings.count("concurrency", 16, 1..=1_000), settings.maybe_count("per_second", 1..=100_000))
    });
    let (concurrency, per_second) = rates.unwrap_or((16, None));
    let default = (5, Duration::from_secs(30));
    let breaker = settings.nested("breaker", |settings| {
        let failures = settings.count("failures", default.0, 1..=1_000);
        (failures, settings.duration("cool_down", default.1, DURATIONS))
    });
    let (failures, cool_down) = breaker.unwrap_or(default);
    TargetLimits { concurrency: concurrency as usize, per_second, failures, cool_down }
}

/// Where a target is asked what became of an effect, when and how often.
fn reconcile(
    settings: &mut SettingsReader<'_>,
    timeout: Duration,
    allow_private: bool,
) -> (Option<String>, Option<ReconcileRules>) {
    let given = settings.nested("reconcile", |settings| {
        let url = settings.maybe_text("url");
        let after = settings.duration("after", timeout.saturating_mul(2), DURATIONS);
        let max_checks = i64::from(settings.count("max_checks", 10, 1..=1_000));
        match &url {
            None => settings.problem("url", "`reconcile` needs a `url` with `{key}` in it"),
            Some(url) if !url.contains("{key}") => {
                settings.problem("url", "the `url` of `reconcile` must have `{key}` in it");
            }
            Some(url) => {
                if let Err(why) = check_url(&url.replace("{key}", "key"), allow_private) {
                    settings.problem("url", why);
                }
            }
        }
        (url, ReconcileRules { after, max_checks })
    });
    given.map_or((None, None), |(url, reconcile)| (url, Some(reconcile)))
}
