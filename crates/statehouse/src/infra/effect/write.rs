//! The writes: an effect is written down, and people change their minds about it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{HeaderName, Uri};
use serde_json::{Map, Value as Json};
use sha2::{Digest as _, Sha256};
use statehouse_store::guard::{column, is_in, now, now_plus};
use statehouse_store::{
    Event, EventTemplate, Expr, Guard, Reason, Refused, Row, Step, Tenant, Time, Type, Value,
};

use super::rules::BY_HAND;
use super::{
    AFTER_MS, ATTEMPT, BODY, BODY_BYTES_MAX, CANCELLED, CHECKS, CREATED_AT, Checked, DELIVERED, DELIVERED_AT,
    DETAIL, DIGEST, DOUBT, Destination, EXPIRES_AT, Effect, HEADERS, HEADERS_BYTES_MAX, IS_DELIVERED, JSON,
    KEY, KEY_BYTES_MAX, PARKED, PENDING, REASON, RETRYING, SENT_KEY, STATUS, STUCK_AT, TARGET, TRIES,
    UNCERTAIN, UPDATED_AT, URL, check_url, encoded, is_reserved, settings,
};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Expected, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::blueprint::Blueprint;
use crate::declare::Declare;
use crate::form::Misfit;
use crate::infra::due::{self, DUE_AT, DUE_SHARD};
use crate::worker::Wake;

/// An effect that is to be sent.
#[derive(Clone, Debug, Default)]
pub struct Letter {
    /// What names it.
    pub key: String,
    /// Where it goes, if the blueprint leaves that open.
    pub url: Option<String>,
    /// What is sent.
    pub body: Json,
    /// Further headers.
    pub headers: Map<String, Json>,
    /// Not before this time.
    pub due_at: Option<Time>,
    /// And so much later.
    pub after: Duration,
    /// Not after this time.
    pub expires_at: Option<Time>,
}

/// The way by which other archetypes and programs in Rust write effects in their own plans.
///
/// ```
/// use statehouse::Blueprint;
/// use statehouse::infra::effect::{Letter, Outbox};
/// use statehouse_store::Tenant;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let blueprint = Blueprint::read("statehouse.toml", "[effect.receipt]\nurl = \"https://mail.example/send\"\n")?;
/// let outbox = Outbox::of(&blueprint, "receipt").ok_or("there is no such effect")?;
/// let letter = Letter { key: "order-7".into(), body: "thanks".into(), ..Letter::default() };
/// // Its steps and its event go into the plan of whatever decided it.
/// let pieces = outbox.send(&Tenant::new("acme")?, &letter)?;
/// assert_eq!((pieces.steps.len(), pieces.event.name.as_str()), (1, "receipt.pending"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Outbox(Arc<Effect>);

impl Outbox {
    /// The outbox of an effect that a blueprint declares; `None` if it declares none of that name, or wrongly.
    pub fn of(blueprint: &Blueprint, name: &str) -> Option<Outbox> {
        let thing = blueprint.thing(name).filter(|thing| thing.archetype.keyword() == "effect")?;
        let effect = Declare::read(thing, &mut blueprint.problems(), settings::read)?;
        Some(Outbox(Arc::new(effect)))
    }

    /// The step that writes an effect down, and its event. A plan that has the step and is refused at it, because the row
    /// is present, was applied before or names another effect by this key.
    pub fn send(&self, tenant: &Tenant, letter: &Letter) -> Result<Pieces, Refusal> {
        self.0.pieces(tenant, letter)
    }

    /// Whom to wake when the plan was applied (see [`crate::House::bells`]).
    pub fn wake(&self, event: &Event) -> Option<Wake> {
        due::wake(&self.0.sender, event)
    }
}

fn misfit(name: &str, detail: impl Into<String>) -> Refusal {
    Refusal::misfits(vec![Misfit { pointer: format!("/{name}"), detail: detail.into() }])
}

impl Letter {
    /// What a call of `send` says.
    fn read(input: &Map<String, Json>) -> Result<Letter, Refusal> {
        let text = |name: &str| input.get(name).and_then(Json::as_str).map(ToOwned::to_owned);
        let time = |name: &str| -> Result<Option<Time>, Refusal> {
            let Some(given) = input.get(name) else { return Ok(None) };
            let value = Value::from_json(given.clone(), Type::Time);
            Ok(value.map_err(|why| misfit(name, why.to_string()))?.as_time())
        };
        let headers = match input.get(HEADERS) {
            None | Some(Json::Null) => Map::new(),
            Some(Json::Object(headers)) => headers.clone(),
            Some(_) => return Err(misfit(HEADERS, "expected an object of texts")),
        };
        Ok(Letter {
            key: text(KEY).unwrap_or_default(),
            url: text(URL),
            body: input.get(BODY).cloned().unwrap_or_default(),
            headers,
            due_at: time(DUE_AT)?,
            after: Duration::from_millis(input.get(AFTER_MS).and_then(Json::as_u64).unwrap_or(0)),
            expires_at: time(EXPIRES_AT)?,
        })
    }
}

impl Effect {
    /// What the target knows an effect by: the same key of two tenants is two effects.
    fn sent_key(&self, tenant: &Tenant, key: &str) -> String {
        // The key comes last: what it says is its own.
        self.sent_key.replace("{tenant}", tenant.as_str()).replace("{name}", &self.name).replace("{key}", key)
    }

    /// Where an effect goes (I7).
    fn address(&self, letter: &Letter, sent_key: &str) -> Result<(String, Checked), Refusal> {
        match (&self.destination, &letter.url) {
            (Destination::Fixed(url), None) => {
                let url = url.replace("{key}", &encoded(sent_key));
                let checked = check_url(&url, self.allow_private).map_err(|why| misfit(KEY, why))?;
                Ok((url, checked))
            }
            (Destination::Fixed(_), Some(_)) => Err(misfit(URL, "the blueprint says where it goes")),
            (Destination::Hosts(_), None) => Err(misfit(URL, "say where it goes")),
            (Destination::Hosts(_), Some(url)) => {
                let checked = check_url(url, self.allow_private).map_err(|why| misfit(URL, why))?;
                self.check_host(&checked.uri).map_err(|why| misfit(URL, why))?;
                Ok((url.clone(), checked))
            }
        }
    }

    /// Whether an effect may go to the host of an address.
    pub(super) fn check_host(&self, url: &Uri) -> Result<(), String> {
        let Destination::Hosts(hosts) = &self.destination else { return Ok(()) };
        let host = url.host().unwrap_or_default().to_ascii_lowercase();
        let default = if url.scheme_str() == Some("https") { 443 } else { 80 };
        let port = url.port_u16().filter(|port| *port != default);
        if hosts.iter().any(|rule| rule.admits(&host, port)) {
            return Ok(());
        }
        let port = port.map(|port| format!(":{port}")).unwrap_or_default();
        Err(format!("{host}{port} is not among the hosts that {} may go to", self.name))
    }

    /// Tells what is sent from anything else that could be. Where the blueprint says where it goes, that is no part of it.
    fn digest(&self, letter: &Letter) -> String {
        digest(letter.url.as_deref().unwrap_or_default(), &letter.headers, &letter.body)
    }

    fn check_headers(&self, headers: &Map<String, Json>) -> Result<(), Refusal> {
        let mut size = 0;
        for (name, value) in headers {
            let wrong = |why: &str| Err(misfit(HEADERS, format!("`{name}` {why}")));
            let Ok(header) = name.to_ascii_lowercase().parse::<HeaderName>() else {
                return wrong("is not the name of a header");
            };
            let Some(text) = value.as_str() else { return wrong("must be a text") };
            if http::HeaderValue::from_str(text).is_err() {
                return wrong("has characters that no header can have");
            }
            let own = self.headers.iter().any(|(own, _)| *own == header)
                || self.key_header.as_ref() == Some(&header);
            if own || is_reserved(&header) {
                return wrong("is set by the house");
            }
            size += name.len() + text.len();
        }
        if size > HEADERS_BYTES_MAX {
            return Err(Refusal::new(
                Code::TooLarge,
                format!("headers have at most {HEADERS_BYTES_MAX} bytes"),
            ));
        }
        Ok(())
    }

    /// The bytes that are sent for a body: the same for every attempt.
    pub(super) fn bytes(&self, body: Option<&Json>) -> Vec<u8> {
        match body {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::String(text)) if self.content_type != JSON => text.clone().into_bytes(),
            Some(json) => json.to_string().into_bytes(),
        }
    }

    /// The step that writes an effect down (I1), and its event.
    fn pieces(&self, tenant: &Tenant, letter: &Letter) -> Result<Pieces, Refusal> {
        let Letter { key, body, headers, due_at, after, expires_at, .. } = letter;
        if key.is_empty()
            || key.len() > KEY_BYTES_MAX
            || !key.bytes().all(|byte| (0x20..0x7f).contains(&byte))
        {
            return Err(misfit(KEY, format!("expected 1 to {KEY_BYTES_MAX} printable ASCII characters")));
        }
        if self.content_type != JSON && !matches!(body, Json::String(_) | Json::Null) {
            return Err(misfit(
                BODY,
                format!("the target takes {}: give the body as a text", self.content_type),
            ));
        }
        self.check_headers(headers)?;
        if self.bytes(Some(body)).len() > BODY_BYTES_MAX {
            return Err(Refusal::new(Code::TooLarge, format!("a body has at most {BODY_BYTES_MAX} bytes")));
        }
        let sent_key = self.sent_key(tenant, key);
        let (url, checked) = self.address(letter, &sent_key)?;
        // All effects of one target are in one shard, whoever sends them, so that its limits are counted in one place.
        let shard = shard_of(&checked.target, self.shards);
        let due: Expr = match due_at {
            Some(at) => Value::Time(at.plus(*after)).into(),
            None => now_plus(*after).into(),
        };
        let or_null = |json: &Json| if json.is_null() { Value::Null } else { Value::Json(json.clone()) };
        let step = Step::insert(&self.table, [key.as_str().into()])
            .set(STATUS, PENDING)
            .set(SENT_KEY, sent_key)
            .set(DIGEST, self.digest(letter))
            .set(URL, url)
            .set(TARGET, checked.target)
            .set(
                HEADERS,
                if headers.is_empty() { Value::Null } else { Value::Json(Json::Object(headers.clone())) },
            )
            .set(BODY, or_null(body))
            .set(EXPIRES_AT, expires_at.map_or(Value::Null, Value::Time))
            .set(DUE_SHARD, shard)
            .set(DUE_AT, due)
            .set(CREATED_AT, now())
            .set(UPDATED_AT, now());
        let event = EventTemplate::named(self.event(PENDING)).with_row_of(0);
        let subject = crate::resource::key_text([&key.as_str().into()]);
        Ok(Pieces { subject, steps: vec![step], event })
    }

    /// The event of a transition is named after the state that it leads to.
    pub(super) fn event(&self, status: &str) -> String {
        format!("{}.{}", self.name, status.to_ascii_lowercase())
    }
}

/// The shard of a target, whoever sends to it.
fn shard_of(target: &str, shards: u32) -> i64 {
    let hash = target.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    i64::try_from((hash ^ (hash >> 33)) % u64::from(shards.max(1))).unwrap_or(0)
}

/// Tells what is sent from anything else that could be.
fn digest(url: &str, headers: &Map<String, Json>, body: &Json) -> String {
    let mut hash = Sha256::new();
    for part in [url, &Json::Object(headers.clone()).to_string(), &body.to_string()] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// `send`.
pub(super) struct Writer(pub Arc<Effect>);

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let effect = &self.0;
        let letter = Letter::read(&call.input)?;
        let pieces = effect.pieces(&call.tenant, &letter)?;
        // The first draft leaves it to the store to find out that the key is taken.
        if desk.tries > 0
            && let Some(row) = effect.find(desk.store, &call.tenant, &[letter.key.as_str().into()]).await?
        {
            return match self.is_same(call, &row) {
                true => Ok(Draft::Done(Answer::row(self.0.def.row_json(&row)))),
                false => Err(self.taken(call, &row)),
            };
        }
        Ok(Draft::Write(pieces))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        match (&refused.reason, &refused.current) {
            (Reason::Present, Some(row)) if !self.is_same(call, row) => {
                Verdict::Refuse(self.taken(call, row))
            }
            // The same effect: its row is the answer.
            (Reason::Present, _) => Verdict::TryAgain,
            _ => common_verdict(&self.0.name, refused),
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let answer = Answer::row(self.0.def.visible(row_of(event)));
        let created =
            answer.body.get(KEY).and_then(Json::as_str).map(|key| crate::resource::key_text([&key.into()]));
        Answer { created, ..answer }
    }

    fn wakes(&self, _: &Call, event: &Event) -> Vec<Wake> {
        due::wake(&self.0.sender, event).into_iter().collect()
    }
}

impl Writer {
    fn is_same(&self, call: &Call, row: &Row) -> bool {
        let Ok(letter) = Letter::read(&call.input) else { return false };
        row.text(DIGEST) == Some(&self.0.digest(&letter))
    }

    fn taken(&self, call: &Call, row: &Row) -> Refusal {
        let key = call.input.get(KEY).and_then(Json::as_str).unwrap_or_default();
        let message =
            format!("{} {key} exists and is another one: a key names one effect for ever", self.0.name);
        Refusal::new(Code::AlreadyExists, message).at_version(Some(row))
    }
}

/// What a person does to an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Cancel,
    Replay,
    Resolve,
    Reconcile,
}

pub(super) struct Changer {
    pub effect: Arc<Effect>,
    pub verb: Verb,
}

impl Changer {
    /// The states with which it begins.
    fn begins_with(&self) -> &'static [&'static str] {
        match self.verb {
            Verb::Cancel => &[PENDING, RETRYING, PARKED],
            // Sent again although it may have been applied: only to a target that does one key once (I5).
            Verb::Replay if self.effect.rules.idempotent => &[PARKED, RETRYING, UNCERTAIN],
            Verb::Replay => &[PARKED, RETRYING],
            Verb::Resolve => &[UNCERTAIN, PARKED],
            Verb::Reconcile => &[UNCERTAIN],
        }
    }

    fn guard(&self) -> Guard {
        let guard = is_in(STATUS, self.begins_with().iter().map(|status| Value::from(*status)));
        match self.verb {
            // I3: what may have been applied cannot be taken back.
            Verb::Cancel => guard.and(column(DOUBT).eq(false)),
            // I5: a try that waits may follow one without an answer.
            Verb::Replay if !self.effect.rules.idempotent => guard.and(column(DOUBT).eq(false)),
            _ => guard,
        }
    }
}

#[async_trait]
impl Write for Changer {
    async fn draft(&self, call: &Call, _: &Desk<'_>) -> Result<Draft, Refusal> {
        let effect = &self.effect;
        let step = Step::update(&effect.table, call.key.iter().cloned())
            .guard(self.guard())
            .set(STUCK_AT, Value::Null)
            .set(UPDATED_AT, now());
        let ended = || effect.keep.map_or(Expr::from(Value::Null), |keep| now_plus(keep).into());
        let (mut step, status) = match self.verb {
            Verb::Cancel => (step.set(DUE_AT, ended()), CANCELLED),
            Verb::Replay => {
                let mut step =
                    step.set(TRIES, 0).set(CHECKS, 0).set(REASON, Value::Null).set(DETAIL, Value::Null);
                // It goes to where the blueprint says now: the address may be what was wrong.
                if matches!(effect.destination, Destination::Fixed(_)) {
                    let key = call.key.first().and_then(Value::as_text).unwrap_or_default();
                    let sent_key = effect.sent_key(&call.tenant, key);
                    let (url, checked) = effect.address(&Letter::default(), &sent_key)?;
                    let shard = shard_of(&checked.target, effect.shards);
                    step = step.set(URL, url).set(TARGET, checked.target).set(DUE_SHARD, shard);
                }
                (step.set(DUE_AT, now()), PENDING)
            }
            Verb::Reconcile => (step.set(CHECKS, 0).set(DUE_AT, now()), UNCERTAIN),
            Verb::Resolve => {
                let why = call.input.get(REASON).and_then(Json::as_str).unwrap_or_default();
                let step = step.set(DOUBT, false).set(REASON, BY_HAND).set(DETAIL, why);
                match call.input.get(IS_DELIVERED).and_then(Json::as_bool) {
                    Some(true) => (step.set(DELIVERED_AT, now()).set(DUE_AT, ended()), DELIVERED),
                    _ => (step.set(DUE_AT, Value::Null), PARKED),
                }
            }
        };
        step = step.set(STATUS, status);
        if let Some(Expected::Version(version)) = call.expected {
            step = step.guard(Guard::version(version));
        }
        let event = EventTemplate::named(effect.event(status)).with("by", "hand").with_row_of(0);
        Ok(Draft::Write(Pieces { subject: crate::resource::key_text(&call.key), steps: vec![step], event }))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let what = self.effect.what(&call.key);
        let (Reason::Guard { .. }, Some(row)) = (&refused.reason, &refused.current) else {
            return common_verdict(&what, refused);
        };
        let status = row.text(STATUS).unwrap_or_default();
        let doubt = row.bool(DOUBT) == Some(true);
        let states = self.begins_with();
        let refusal = if !states.contains(&status) {
            let message = format!("{what} is {status}; this begins with {}", states.join(" or "));
            Refusal::new(Code::WrongState, message)
        } else if doubt && matches!(self.verb, Verb::Cancel | Verb::Replay) {
            let message = format!(
                "{what} may have been applied by attempt {}: find out, and resolve it",
                row.int(ATTEMPT).unwrap_or(0)
            );
            Refusal::new(Code::WrongState, message)
        } else {
            let message = format!("{what} is at version {}: read it again and decide anew", row.version());
            Refusal::new(Code::VersionConflict, message)
        };
        Verdict::Refuse(refusal.at_version(Some(row)))
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        Answer::row(self.effect.def.visible(row_of(event)))
    }

    fn wakes(&self, _: &Call, event: &Event) -> Vec<Wake> {
        due::wake(&self.effect.sender, event).into_iter().collect()
    }
}
