//! The settings of `[effect.NAME]`.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method};
use statehouse_store::Type;

use super::rules::{Reconcile, Rules};
use super::secret::{Reference, Template};
use super::target::{Limits, Targets};
use super::{
    ANSWER, ANSWER_BYTES_MAX, ATTEMPT, BODY, BY_STATUS, CHECKS, DELIVERED_AT, DETAIL, DIGEST, DOUBT,
    Destination, EXPIRES_AT, Effect, HEADERS, HTTP_STATUS, Host, JSON, KEY, REASON, SENT_KEY, SPAN_MS_MAX,
    STATUS, STATUSES, STUCK_AT, TARGET, TRIES, UPDATED_AT, URL, check_url, is_reserved,
};
use crate::declare::{Declare, SettingsReader, TableSpec};
use crate::infra::due::DUE_AT;
use crate::resource::plural;

const METHODS: [&str; 5] = ["POST", "PUT", "PATCH", "DELETE", "GET"];
/// The bounds of every duration.
const DURATIONS: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_millis(SPAN_MS_MAX as u64);

pub(super) fn read(cx: &mut Declare<'_>) -> Option<Effect> {
    let name = cx.name();
    let settings = cx.settings();
    let table = settings.text("table", plural(name));
    let method = settings.choice("method", &METHODS);
    let idempotent = settings.flag("idempotent", ["PUT", "DELETE", "GET"].contains(&method));
    let allow_private = settings.flag("allow_private", false);
    let destination = destination(settings, name, allow_private);
    let shards = settings.count(
        "shards",
        if matches!(destination, Some(Destination::Fixed(_))) { 1 } else { 8 },
        1..=1_024,
    );
    let content_type = settings.text("content_type", JSON);
    let headers = headers(settings);
    let key_header = key_header(settings);
    let sent_key = settings.text("sent_key", "{tenant}:{name}:{key}");
    let title = "`sent_key` must have `{key}` in it, or all effects would be one";
    settings.refuse_if(!sent_key.contains("{key}"), "sent_key", title);
    let sign = sign(settings);
    let (connect_timeout, timeout, lease) = timeouts(settings);
    let (pause_min, pause_max) = back_off(settings);
    let max_attempts = i64::from(settings.count("max_attempts", 12, 1..=1_000));
    let (reconcile_url, reconcile) = reconcile(settings, timeout, allow_private);
    let targets = Arc::new(Targets::with(limits(settings)));
    let answer_max = settings.count("answer_max", 16_000, 0..=ANSWER_BYTES_MAX) as usize;
    let keep = settings.maybe_duration("keep", DURATIONS);
    let def = cx.build(rows(table, shards))?;
    Some(Effect {
        name: name.to_owned(),
        sender: format!("{name}.send"),
        table: def.table().clone(),
        def,
        shards,
        destination: destination?,
        method: method.parse().unwrap_or(Method::POST),
        headers,
        content_type,
        connect_timeout,
        timeout,
        lease,
        rules: Rules { max_attempts, pause_min, pause_max, idempotent, reconcile },
        targets,
        key_header,
        sent_key,
        sign,
        reconcile_url,
        allow_private,
        answer_max,
        keep,
    })
}

fn rows(table: String, shards: u32) -> TableSpec {
    let due = "when the server looks at it next; while it is sent, the end of its sender's lease";
    TableSpec::named(table)
        .partition(KEY, Type::Text)
        .states_in(STATUS, &STATUSES)
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
        .deadline(&[], DUE_AT, shards)
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT])
}

/// One address for all effects, or the hosts that they may go to.
fn destination(settings: &mut SettingsReader<'_>, name: &str, allow_private: bool) -> Option<Destination> {
    let (url, hosts) = (settings.maybe_text("url"), settings.texts("hosts"));
    match (url, settings.has("hosts")) {
        (Some(url), false) => {
            if let Err(why) = check_url(&url.replace("{key}", "key"), allow_private) {
                settings.problem("url", why);
            }
            Some(Destination::Fixed(url))
        }
        (None, true) => {
            let mut parsed = Vec::new();
            for host in &hosts {
                match Host::parse(host) {
                    Some(host) => parsed.push(host),
                    None => {
                        let advice = "write \"api.example.com\", with a port if it is not the usual one, \
                                      \"*.example.com\", or \"*\" for any";
                        settings.problem_with_advice("hosts", format!("`{host}` is not a host"), advice);
                    }
                }
            }
            Some(Destination::Hosts(parsed))
        }
        _ => {
            let title = format!("`effect.{name}` needs either `url` or `hosts`");
            let advice = "`url = \"https://…\"` if all go to one address, `hosts = [\"…\"]` if each effect brings its own";
            settings.problem_with_advice("url", title, advice);
            None
        }
    }
}

fn headers(settings: &mut SettingsReader<'_>) -> Vec<(HeaderName, Template)> {
    let mut headers = Vec::new();
    for (name, value) in &settings.texts_by_name("headers") {
        let header =
            name.to_ascii_lowercase().parse::<HeaderName>().map_err(|_| format!("`{name}` is not a header"));
        let header = header.and_then(|header| match is_reserved(&header) {
            true => Err(format!("the server itself sets the header `{name}`")),
            false => Ok(header),
        });
        match (header, Template::parse(value)) {
            (Ok(header), Ok(value)) => headers.push((header, value)),
            (Err(why), _) | (_, Err(why)) => settings.problem("headers", why),
        }
    }
    headers
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

fn sign(settings: &mut SettingsReader<'_>) -> Vec<Reference> {
    let given = settings.texts("sign");
    let title = "`sign` takes one secret, or two during a rotation";
    settings.refuse_if(given.len() > 2, "sign", title);
    let mut references = Vec::new();
    for secret in &given {
        match Reference::parse(secret) {
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

fn limits(settings: &mut SettingsReader<'_>) -> Limits {
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
    Limits { concurrency: concurrency as usize, per_second, failures, cool_down }
}

/// Where a target is asked what became of an effect, when and how often.
fn reconcile(
    settings: &mut SettingsReader<'_>,
    timeout: Duration,
    allow_private: bool,
) -> (Option<String>, Option<Reconcile>) {
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
        (url, Reconcile { after, max_checks })
    });
    given.map_or((None, None), |(url, reconcile)| (url, Some(reconcile)))
}
