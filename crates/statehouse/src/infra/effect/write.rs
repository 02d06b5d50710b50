//! The writes: an effect is written down, and people change their minds about it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{HeaderName, Uri};
use serde_json::{Map, Value as Json};
use sha2::{Digest as _, Sha256};
use statehouse_store::guard::{now, now_plus};
use statehouse_store::{EventTemplate, Expr, Reason, Row, Step, StoreError, Table, Tenant, Time, Value};

use super::rules::BY_HAND;
use super::settle::{EffectEnd, Settlement, Settler};
use super::{
    AFTER_MS, BODY, BODY_BYTES_MAX, CREATED_AT, CheckedUrl, DIGEST, EXPIRES_AT, EffectDestination,
    EffectSpec, HEADERS, HEADERS_BYTES_MAX, IS_DELIVERED, JSON, KEY, KEY_BYTES_MAX, PENDING, REASON,
    SENT_KEY, STATUS, TARGET, UPDATED_AT, URL, check_url, encoded, is_reserved, settings,
};
use crate::action::{
    ActionContext, Answer, Call, Code, Expected, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::blueprint::Blueprint;
use crate::declare::Declare;
use crate::declare::machine::{PartUse, add_parts, part_verdict};
use crate::infra::due::{self, DUE_AT, DUE_SHARD};
use crate::inputs::Inputs;
use crate::resource::key_text;

/// An effect that is to be sent.
#[derive(Clone, Debug, Default)]
pub struct EffectRequest {
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
/// use statehouse::infra::effect::{EffectRequest, Outbox};
/// use statehouse_store::{Tenant, Time};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let blueprint = Blueprint::read("statehouse.toml", "[effect.receipt]\nurl = \"https://mail.example/send\"\n")?;
/// let outbox = Outbox::of(&blueprint, "receipt").ok_or("there is no such effect")?;
/// let request = EffectRequest { key: "order-7".into(), body: "thanks".into(), ..EffectRequest::default() };
/// // Its steps and its event go into the plan of whatever decided it.
/// let parts = outbox.send(&Tenant::new("acme")?, &request, Time::from_millis(0))?;
/// assert_eq!((parts.steps.len(), parts.event.name.as_str()), (1, "receipt.pending"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Outbox(Arc<EffectSpec>);

impl Outbox {
    /// The outbox of an effect that a blueprint declares; `None` if it declares none of that name, or wrongly.
    pub fn of(blueprint: &Blueprint, name: &str) -> Option<Outbox> {
        let thing = blueprint.thing(name).filter(|thing| thing.archetype.keyword() == "effect")?;
        let effect = Declare::read(thing, &mut blueprint.problems(), settings::read)?;
        Some(Outbox(Arc::new(effect)))
    }

    /// Whether the blueprint says where it goes, so that a request names no address.
    pub(crate) fn is_fixed(&self) -> bool {
        matches!(self.0.destination, EffectDestination::Fixed(_))
    }

    pub(crate) fn over(effect: &Arc<EffectSpec>) -> Outbox {
        Outbox(effect.clone())
    }

    /// The name of the effect.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The table of its rows.
    pub fn table(&self) -> &Arc<Table> {
        &self.0.table
    }

    /// Has a settler change the rows that its effects are sent for, in the plans that record their outcomes. `false` if it has
    /// one already. To be called before workers are started, on the outbox of the house's resource
    /// ([`crate::Resource::outbox`]).
    pub fn settle_with(&self, settler: Arc<dyn Settler>) -> bool {
        self.0.settler.set(settler).is_ok()
    }

    /// What the address of an owned effect begins with.
    pub(crate) fn base_url(&self) -> &str {
        &self.0.base_url
    }

    /// Whether each effect brings its own address.
    pub(crate) fn takes_url(&self) -> bool {
        matches!(self.0.destination, EffectDestination::Hosts(_))
    }

    /// Why an effect must not go to an address.
    pub(crate) fn check_address(&self, url: &str) -> Result<(), String> {
        let checked = check_url(url, self.0.allow_private)?;
        self.0.check_host(&checked.uri)
    }

    /// The step that writes an effect down, and its event. A plan that has the step and is refused at it, because the row
    /// is present, was applied before or names another effect by this key. `at` is the time of this process, for the hint when
    /// workers have to look ([`PlanParts::wakeups`]).
    pub fn send(&self, tenant: &Tenant, request: &EffectRequest, at: Time) -> Result<PlanParts, Refusal> {
        self.0.parts(tenant, request, at)
    }
}

fn field_error(name: &str, detail: impl Into<String>) -> Refusal {
    Refusal::field(name, detail)
}

impl EffectRequest {
    /// What a call of `send` says.
    fn read(input: &Inputs) -> Result<EffectRequest, Refusal> {
        let headers = match input.json(HEADERS) {
            Json::Null => Map::new(),
            Json::Object(headers) => headers,
            _ => return Err(field_error(HEADERS, "expected an object of texts")),
        };
        Ok(EffectRequest {
            key: input.get_text(KEY)?.to_owned(),
            url: input.text(URL).map(ToOwned::to_owned),
            body: input.json(BODY),
            headers,
            due_at: input.time(DUE_AT),
            after: input.duration_ms(AFTER_MS).unwrap_or_default(),
            expires_at: input.time(EXPIRES_AT),
        })
    }
}

impl EffectSpec {
    /// What the target knows an effect by: the same key of two tenants is two effects.
    pub(super) fn sent_key(&self, tenant: &Tenant, key: &str) -> String {
        // The key comes last: what it says is its own.
        self.sent_key.replace("{tenant}", tenant.as_str()).replace("{name}", &self.name).replace("{key}", key)
    }

    /// Where an effect goes (I7).
    pub(super) fn address(
        &self,
        request: &EffectRequest,
        sent_key: &str,
    ) -> Result<(String, CheckedUrl), Refusal> {
        match (&self.destination, &request.url) {
            (EffectDestination::Fixed(url), None) => {
                let url = url.replace("{key}", &encoded(sent_key));
                let checked = check_url(&url, self.allow_private).map_err(|why| field_error(KEY, why))?;
                Ok((url, checked))
            }
            (EffectDestination::Fixed(_), Some(_)) => {
                Err(field_error(URL, "the blueprint says where it goes"))
            }
            (EffectDestination::Hosts(_), None) => Err(field_error(URL, "say where it goes")),
            (EffectDestination::Hosts(_), Some(url)) => {
                let checked = check_url(url, self.allow_private).map_err(|why| field_error(URL, why))?;
                self.check_host(&checked.uri).map_err(|why| field_error(URL, why))?;
                Ok((url.clone(), checked))
            }
        }
    }

    /// Whether an effect may go to the host of an address.
    pub(super) fn check_host(&self, url: &Uri) -> Result<(), String> {
        let EffectDestination::Hosts(hosts) = &self.destination else { return Ok(()) };
        let host = url.host().ok_or_else(|| format!("`{url}` names no host"))?.to_ascii_lowercase();
        let default = if url.scheme_str() == Some("https") { 443 } else { 80 };
        let port = url.port_u16().filter(|port| *port != default);
        if hosts.iter().any(|rule| rule.admits(&host, port)) {
            return Ok(());
        }
        let port = port.map(|port| format!(":{port}")).unwrap_or_default();
        Err(format!("{host}{port} is not among the hosts that {} may go to", self.name))
    }

    /// Tells what is sent from anything else that could be. Where the blueprint says where it goes, that is no part of it.
    fn digest(&self, request: &EffectRequest) -> String {
        digest(request.url.as_deref().unwrap_or_default(), &request.headers, &request.body)
    }

    fn check_headers(&self, headers: &Map<String, Json>) -> Result<(), Refusal> {
        let mut size = 0;
        for (name, value) in headers {
            let wrong = |why: &str| Err(field_error(HEADERS, format!("`{name}` {why}")));
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
    fn parts(&self, tenant: &Tenant, request: &EffectRequest, at: Time) -> Result<PlanParts, Refusal> {
        let EffectRequest { key, body, headers, due_at, after, expires_at, .. } = request;
        if key.is_empty()
            || key.len() > KEY_BYTES_MAX
            || !key.bytes().all(|byte| (0x20..0x7f).contains(&byte))
        {
            return Err(field_error(
                KEY,
                format!("expected 1 to {KEY_BYTES_MAX} printable ASCII characters"),
            ));
        }
        if self.content_type != JSON && !matches!(body, Json::String(_) | Json::Null) {
            return Err(field_error(
                BODY,
                format!("the target takes {}: give the body as a text", self.content_type),
            ));
        }
        self.check_headers(headers)?;
        if self.bytes(Some(body)).len() > BODY_BYTES_MAX {
            return Err(Refusal::new(Code::TooLarge, format!("a body has at most {BODY_BYTES_MAX} bytes")));
        }
        let sent_key = self.sent_key(tenant, key);
        let (url, checked) = self.address(request, &sent_key)?;
        // All effects of one target are in one shard, for all tenants, so that its limits are counted in one place.
        let shard = shard_of(&checked.target, self.shards);
        let due: Expr = match due_at {
            Some(at) => Value::Time(at.plus(*after)).into(),
            None => now_plus(*after).into(),
        };
        let or_null = |json: &Json| if json.is_null() { Value::Null } else { Value::Json(json.clone()) };
        let step = Step::insert(&self.table, [key.as_str().into()])
            .set(STATUS, PENDING)
            .set(SENT_KEY, sent_key)
            .set(DIGEST, self.digest(request))
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
        let subject = key_text([&key.as_str().into()]);
        let due = due::wakeup(&self.sender, &step, at);
        Ok(PlanParts::new(subject, vec![step], event).wakeups(due))
    }

    /// The event of a transition is named after the state that it leads to.
    pub(super) fn event(&self, status: &str) -> String {
        format!("{}.{}", self.name, status.to_ascii_lowercase())
    }
}

/// The shard of a target, for all tenants.
pub(super) fn shard_of(target: &str, shards: u32) -> i64 {
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
pub(super) struct SendEffect(pub Arc<EffectSpec>);

#[async_trait]
impl Prepare for SendEffect {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let effect = &self.0;
        let request = EffectRequest::read(&call.input)?;
        let parts = effect.parts(&call.tenant, &request, cx.clock.now())?;
        // The first draft leaves it to the store to find out that the key is taken.
        if cx.attempt > 0
            && let Some(row) = effect.find(cx.store, &call.tenant, &[request.key.as_str().into()]).await?
        {
            return match self.is_same(&request, &row)? {
                true => Ok(Prepared::Unchanged(Answer::row(self.0.def.row_json(&row)))),
                false => Err(self.key_taken(&request, &row)),
            };
        }
        Ok(Prepared::Write(parts))
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match (refused.reason, refused.row) {
            (Reason::Present, Some(row)) => match self.key_refusal(call, row) {
                Ok(Some(refusal)) | Err(refusal) => Verdict::Refuse(refusal),
                // The same effect: its row is the answer.
                Ok(None) => Verdict::Retry,
            },
            (Reason::Present, None) => Verdict::Retry,
            _ => refused.standard(&self.0.name),
        }
    }
}

impl SendEffect {
    /// The refusal of a call whose key names another effect.
    fn key_refusal(&self, call: &Call, row: &Row) -> Result<Option<Refusal>, Refusal> {
        let request = EffectRequest::read(&call.input)?;
        Ok((!self.is_same(&request, row)?).then(|| self.key_taken(&request, row)))
    }

    fn is_same(&self, request: &EffectRequest, row: &Row) -> Result<bool, StoreError> {
        Ok(row.get_text(DIGEST)? == self.0.digest(request))
    }

    fn key_taken(&self, request: &EffectRequest, row: &Row) -> Refusal {
        let (name, key) = (&self.0.name, &request.key);
        let message = format!("{name} {key} exists and is another one: a key names one effect for ever");
        Refusal::new(Code::AlreadyExists, message).at_version(Some(row))
    }
}

/// `resolve`.
pub(super) struct ResolveEffect {
    pub effect: Arc<EffectSpec>,
    pub part: PartUse,
}

#[async_trait]
impl Prepare for ResolveEffect {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let effect = &self.effect;
        let what = format!("{} {}", effect.name, key_text(&call.key));
        let row = cx.row(&effect.table, &call.tenant, call.key.iter().cloned()).await?;
        let row = row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{what} does not exist")))?;
        if let Some(Expected::Version(seen)) = call.expected
            && seen != row.version()
        {
            let message = format!("{what} is at version {}: read it again and decide anew", row.version());
            return Err(Refusal::new(Code::VersionConflict, message).at_version(Some(&row)));
        }
        let is_delivered = call.input.flag(IS_DELIVERED) == Some(true);
        let (case, end) = match is_delivered {
            true => ("delivered", EffectEnd::Delivered),
            false => ("parked", EffectEnd::Parked),
        };
        let reason = call.input.get_text(REASON)?;
        let mut parts =
            self.part.on(&row).case(case).bind(REASON, reason).prepare(&call.tenant, cx.clock.now())?;
        if let Some(settler) = effect.settler.get() {
            let settlement = Settlement {
                effect: &row,
                end,
                answer: None,
                reason: Some(BY_HAND),
                store: cx.store,
                clock: cx.clock,
            };
            let settled = settler.settle(&settlement).await?;
            add_parts(&mut parts, &call.tenant, cx.clock.now(), settled)?;
        }
        Ok(Prepared::Write(parts))
    }

    fn refused(&self, _: &Call, refused: &RefusedStep<'_>) -> Verdict {
        part_verdict(std::slice::from_ref(&self.part), refused).unwrap_or(Verdict::Retry)
    }
}
