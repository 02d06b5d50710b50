//! The worker: finds what is due, and for each row claims it, sends it, and records what is known.
//!
//! A step is bounded by its rows and by the time-outs of their requests. It may be cut short anywhere: before the claim
//! nothing has happened, and after it the row says `SENDING` until the lease is over, and then that nobody knows. All
//! requests of a step run together, within the limits of their targets; a target that cannot take them now holds up nobody
//! else.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, HeaderName, Method};
use serde_json::Value as Json;
use statehouse_store::guard::{column, is_null, now, now_plus};
use statehouse_store::{
    Commit, Entry, EventTemplate, Expr, Guard, Plan, PlanError, Query, RetryPolicy, Row, Step, StoreError,
    Time, Value, commit_known,
};

use super::rules::{Before, Finding, Outcome, finding, health, spread, told};
use super::secret::Secrets;
use super::target::{Admission, Pass};
use super::{
    ANSWER, ATTEMPT, BODY, CANCELLED, CHECKS, DELIVERED, DELIVERED_AT, DETAIL, DOUBT, Destination,
    EXPIRES_AT, Effect, HEADERS, HTTP_STATUS, JSON, KEY, PENDING, REASON, RETRYING, SENDING, SENT_KEY,
    STATUS, STUCK_AT, TARGET, TRIES, UNCERTAIN, UPDATED_AT, URL, check_url, encoded, signature,
};
use crate::infra::due::{DUE, DUE_AT};
use crate::outside::{Courier, Parcel, Reply, Sent};
use crate::resource::key_text;
use crate::worker::{Gauge, Next, Progress, Shift, Worker};

/// Pages of the index that one step reads past rows that cannot be done now.
const PAGES_MAX: usize = 8;
/// After so long a step begins nothing new.
const BUDGET: Duration = Duration::from_secs(2);
/// For how long rows are put off that would stand in the way of other targets' rows, at least.
const PUT_OFF: Duration = Duration::from_secs(1);

/// Sends what is due.
#[derive(Debug)]
pub(super) struct Sender(pub Arc<Effect>);

#[async_trait]
impl Worker for Sender {
    fn name(&self) -> &str {
        self.0.sender.as_str()
    }

    fn shards(&self) -> u32 {
        self.0.shards
    }

    fn gauges(&self) -> Vec<Gauge> {
        self.0.targets.gauges()
    }

    async fn step(&self, shift: &Shift<'_>, limit: usize) -> Result<Progress, StoreError> {
        let effect = &*self.0;
        let mut query = Query::all_tenants(&effect.table, DUE, [i64::from(shift.shard).into()])
            .and_then(|query| query.limit(limit))
            .map_err(|error| misuse(&error))?;
        let mut progress = Progress::idle();
        let mut again_at: Option<Time> = None;
        for _ in 0..PAGES_MAX {
            let page = shift.store.query(&query).await?;
            let at = shift.clock.now();
            let due: Vec<&Row> =
                page.rows.iter().take_while(|row| row.time(DUE_AT).is_some_and(|due| due <= at)).collect();
            let oldest = due.first().and_then(|row| row.time(DUE_AT));
            progress.lag = progress.lag.max(oldest.map_or(Duration::ZERO, |due| at.since(due)));
            let first_later = page.rows.get(due.len()).and_then(|row| row.time(DUE_AT));
            again_at = [again_at, first_later].into_iter().flatten().min();
            if !due.is_empty() {
                let round = effect.round(&due, shift).await?;
                progress.rows += round.rows;
                progress.failures.extend(round.failures);
                again_at = [again_at, round.again_at].into_iter().flatten().min();
                if let Some(error) = round.unreachable {
                    if progress.rows == 0 {
                        return Err(error);
                    }
                    progress.failures.push(error.to_string());
                    return Ok(progress);
                }
            }
            match page.next {
                // What was done may have made something due.
                _ if progress.rows > 0 => {
                    progress.next = Next::Now;
                    return Ok(progress);
                }
                Some(next) if first_later.is_none() => {
                    query = query.after(next).map_err(|error| misuse(&error))?;
                }
                _ => break,
            }
        }
        progress.next = again_at.map_or(Next::Idle, Next::At);
        Ok(progress)
    }
}

/// What came of the rows of a page.
#[derive(Debug, Default)]
struct Round {
    rows: usize,
    failures: Vec<String>,
    /// When a target that could not take something can.
    again_at: Option<Time>,
    unreachable: Option<StoreError>,
}

/// What came of one row.
#[derive(Debug)]
enum Done {
    /// It moved on.
    Moved,
    /// It moved on, and its target's breaker opened.
    Opened(String),
    /// Somebody else was faster, or it is not due by the engine's clock.
    Passed,
    /// It could not be done, for a reason of its own.
    Failed(String),
}

type Task<'t> = Pin<Box<dyn Future<Output = Result<Done, StoreError>> + Send + 't>>;

/// Why a request cannot be made of a row.
#[derive(Debug)]
enum Unsent {
    /// A secret is missing, or is none.
    Yet(String),
    /// The blueprint does not allow it any more.
    Ever(String),
}

impl Unsent {
    fn ever(why: impl Into<String>) -> Unsent {
        Unsent::Ever(why.into())
    }
}

/// What the rows of a round share.
struct Desk<'d, 's> {
    shift: &'d Shift<'s>,
    courier: &'d dyn Courier,
    secrets: Secrets,
}

impl Effect {
    /// Does what is due, all together, within the limits of the targets.
    async fn round(&self, due: &[&Row], shift: &Shift<'_>) -> Result<Round, StoreError> {
        let mut round = Round::default();
        let Some(courier) = &shift.outside.courier else {
            round.failures.push("there is no courier: nothing can be sent by this process".into());
            return Ok(round);
        };
        let outside = &shift.outside;
        let secrets = Secrets::read(self.references(), &*outside.environment, &**shift.store).await?;
        let desk = Desk { shift, courier: &**courier, secrets };
        let (start, began_at) = (shift.clock.uptime(), shift.clock.now());
        let mut waiting: VecDeque<&Row> = due.iter().copied().collect();
        let mut running: FuturesUnordered<Task<'_>> = FuturesUnordered::new();
        let mut left: Vec<(&Row, Option<Duration>)> = Vec::new();
        loop {
            let uptime = shift.clock.uptime();
            let over = uptime.saturating_sub(start) > BUDGET || !shift.is_live();
            let mut full = VecDeque::new();
            for row in waiting.drain(..) {
                if over {
                    left.push((row, None));
                    continue;
                }
                match row.text(STATUS) {
                    Some(SENDING) => running.push(Box::pin(self.lapse(row, &desk))),
                    Some(PENDING | RETRYING | UNCERTAIN) => {
                        match self.targets.enter(row.text(TARGET).unwrap_or_default(), uptime) {
                            Admission::Pass(pass) => running.push(Box::pin(self.deliver(row, pass, &desk))),
                            Admission::Full => full.push_back(row),
                            Admission::Later(at) => left.push((row, Some(at.saturating_sub(uptime)))),
                        }
                    }
                    _ => running.push(Box::pin(self.forget(row, &desk))),
                }
            }
            waiting = full;
            match running.next().await {
                None => break,
                Some(Ok(Done::Moved)) => round.rows += 1,
                Some(Ok(Done::Opened(why))) => {
                    round.rows += 1;
                    round.failures.push(why);
                }
                Some(Ok(Done::Passed)) => {}
                Some(Ok(Done::Failed(why))) => round.failures.push(why),
                Some(Err(error)) if error.is_transient() => round.unreachable = Some(error),
                Some(Err(error)) => round.failures.push(error.to_string()),
            }
        }
        left.extend(waiting.into_iter().map(|row| (row, None)));
        // By when something that was left can go on.
        let soonest = left.iter().filter_map(|(_, wait)| *wait).min();
        round.again_at = soonest.map(|wait| began_at.plus(wait));
        if matches!(self.destination, Destination::Hosts(_)) {
            for (row, wait) in left {
                // What comes of it does not matter: it is due as before if it was not put off.
                let plan = self.put_off(row, wait.unwrap_or_default(), &desk)?;
                let _ = commit_known(&**shift.store, &plan, RetryPolicy::WORKER).await;
            }
        }
        Ok(round)
    }

    /// One row that its target can take: it is sent, or asked about.
    async fn deliver(&self, row: &Row, pass: Pass, desk: &Desk<'_, '_>) -> Result<Done, StoreError> {
        let asks = row.text(STATUS) == Some(UNCERTAIN) && self.rules.reconcile.is_some();
        if asks { self.ask(row, pass, desk).await } else { self.send(row, pass, desk).await }
    }

    /// Claims a row, sends it, and records what is known.
    async fn send(&self, row: &Row, pass: Pass, desk: &Desk<'_, '_>) -> Result<Done, StoreError> {
        let clock = desk.shift.clock;
        if row.time(EXPIRES_AT).is_some_and(|end| end <= clock.now()) {
            let before = before(row, &self.name);
            let plan =
                self.moved(row, row.text(STATUS).unwrap_or_default(), &self.rules.after_expiry(before));
            let plan = plan.guarded(|step| step.guard(column(EXPIRES_AT).le(now())));
            return Ok(if desk.commit(plan.build(desk)?).await? { Done::Moved } else { Done::Passed });
        }
        let parcel = match self.parcel(row, desk) {
            Ok(parcel) => parcel,
            // Nothing was claimed: as soon as the secret is there it is sent.
            Err(Unsent::Yet(why)) => return Ok(Done::Failed(format!("{row}: {why}"))),
            Err(Unsent::Ever(why)) => {
                let outcome = self.rules.after_sending(before(row, &self.name), &Sent::Forbidden { why });
                let moved = self.moved(row, row.text(STATUS).unwrap_or_default(), &outcome);
                return Ok(if desk.record(&moved).await? { Done::Moved } else { Done::Passed });
            }
        };
        if !desk.commit(self.claim(row, desk)?).await? {
            return Ok(Done::Passed);
        }
        let attempt = row.int(ATTEMPT).unwrap_or(0) + 1;
        let sent = tokio::select! {
            sent = desk.courier.send(&parcel, clock) => sent,
            // No courier should take so long; whoever takes over has the word now.
            () = clock.sleep(self.lease) => Sent::Unknown { why: "no answer came within the sender's lease".into() },
        };
        let opened = pass.leave(health(&sent), clock.uptime());
        let tries = row.int(TRIES).unwrap_or(0) + 1;
        let before = Before { tries, ..before(row, &self.name) };
        let outcome = self.rules.after_sending(before, &sent);
        let moved =
            self.moved(row, SENDING, &outcome).at_attempt(attempt).with_answer(&sent, self.answer_max, desk);
        let recorded = match desk.record(&moved).await {
            // An answer that no row can hold must not hide what it says.
            Err(error) if !error.is_transient() => desk.record(&moved.without_answer()).await?,
            other => other?,
        };
        Ok(match (recorded, opened) {
            (_, true) => Done::Opened(format!(
                "the breaker of {} is open: {}",
                row.text(TARGET).unwrap_or_default(),
                told(&sent)
            )),
            (true, false) => Done::Moved,
            (false, false) => Done::Passed,
        })
    }

    /// Asks the target what became of an effect, and records what it says.
    async fn ask(&self, row: &Row, pass: Pass, desk: &Desk<'_, '_>) -> Result<Done, StoreError> {
        let clock = desk.shift.clock;
        let parcel = match self.question(row, desk) {
            Ok(parcel) => parcel,
            Err(Unsent::Yet(why) | Unsent::Ever(why)) => return Ok(Done::Failed(format!("{row}: {why}"))),
        };
        let sent = desk.courier.send(&parcel, clock).await;
        let opened = pass.leave(health(&sent), clock.uptime());
        let checks = row.int(CHECKS).unwrap_or(0) + 1;
        let before = before(row, &self.name);
        let before = Before {
            checks,
            spread: spread(row.tenant(), &self.name, &key_text(row.key()), checks),
            ..before
        };
        let found = finding(&sent);
        let said = match found {
            Finding::Applied => "asked, the target says that it was applied",
            Finding::NotApplied => "asked, the target says that it was not applied",
            Finding::Unknown => "asked, the target does not say what became of it",
        };
        let outcome = self.rules.after_asking(before, found, &format!("{said} ({})", told(&sent)));
        // Two who asked at once are one question: the first answer counts.
        let asked = row.int(CHECKS).unwrap_or(0);
        let moved = self
            .moved(row, UNCERTAIN, &outcome)
            .guarded(|step| step.guard(column(CHECKS).eq(asked)).set(CHECKS, checks));
        let recorded = desk.commit(moved.build(desk)?).await?;
        Ok(match (recorded, opened) {
            (true, false) => Done::Moved,
            (_, true) => {
                Done::Opened(format!("the breaker of {} is open", row.text(TARGET).unwrap_or_default()))
            }
            (false, false) => Done::Passed,
        })
    }

    /// A sender that did not come back (I4).
    async fn lapse(&self, row: &Row, desk: &Desk<'_, '_>) -> Result<Done, StoreError> {
        let outcome = self.rules.after_lapse(before(row, &self.name));
        let moved = self.moved(row, SENDING, &outcome).guarded(|step| step.guard(column(DUE_AT).le(now())));
        Ok(if desk.commit(moved.build(desk)?).await? { Done::Moved } else { Done::Passed })
    }

    /// Removes the row of an effect that is over, when it was kept for long enough.
    async fn forget(&self, row: &Row, desk: &Desk<'_, '_>) -> Result<Done, StoreError> {
        let status = row.text(STATUS).filter(|status| [DELIVERED, CANCELLED].contains(status));
        let Some(status) = status else {
            return Ok(Done::Failed(format!("{row} is due in an unknown state")));
        };
        let step = Step::delete(&self.table, row.key().iter().cloned())
            .guard(column(STATUS).eq(status))
            .guard(column(DUE_AT).le(now()));
        let event = EventTemplate::named(format!("{}.forgotten", self.name))
            .with(KEY, name_of(row))
            .with(STATUS, status);
        let entry = Entry::about(&self.name, key_text(row.key())).event(event);
        let plan = Plan::of(row.tenant(), desk.shift.ids.next()).step(step).log(entry).without_rows().build();
        Ok(if desk.commit(plan.map_err(|error| misuse(&error))?).await? { Done::Moved } else { Done::Passed })
    }

    /// The plan that makes a row this sender's (I2).
    fn claim(&self, row: &Row, desk: &Desk<'_, '_>) -> Result<Plan, StoreError> {
        let attempt = row.int(ATTEMPT).unwrap_or(0);
        let alive = is_null(EXPIRES_AT).or(column(EXPIRES_AT).gt(now()));
        let step = Step::update(&self.table, row.key().iter().cloned())
            .guard(column(STATUS).eq(row.text(STATUS).unwrap_or_default()))
            .guard(column(ATTEMPT).eq(attempt))
            .guard(column(DUE_AT).le(now()))
            .guard(alive)
            .set(STATUS, SENDING)
            .set(ATTEMPT, attempt + 1)
            .set(TRIES, column(TRIES).add(1))
            .set(DUE_AT, now_plus(self.lease))
            .set(UPDATED_AT, now());
        let event = EventTemplate::named(self.event(SENDING))
            .with(KEY, name_of(row))
            .with(ATTEMPT, attempt + 1)
            .with(TARGET, row.text(TARGET).unwrap_or_default());
        let entry = Entry::about(&self.name, key_text(row.key())).event(event);
        let plan = Plan::of(row.tenant(), desk.shift.ids.next()).step(step).log(entry).without_rows();
        plan.build().map_err(|error| misuse(&error))
    }

    /// What becomes of a row, guarded by its state and its attempt.
    fn moved(&self, row: &Row, from: &str, outcome: &Outcome) -> Moved {
        let Outcome { status, doubt, wait, stuck, reason, detail } = outcome;
        let due: Expr = match (wait, self.keep) {
            (Some(wait), _) => now_plus(*wait).into(),
            (None, Some(keep)) if *status == DELIVERED => now_plus(keep).into(),
            (None, _) => Value::Null.into(),
        };
        let was_stuck = row.time(STUCK_AT);
        let stuck_at: Expr = match (stuck, was_stuck) {
            (false, _) => Value::Null.into(),
            (true, Some(since)) => since.into(),
            (true, None) => now().into(),
        };
        let detail: String = detail.replace('\0', "\u{fffd}").chars().take(DETAIL_CHARS).collect();
        let mut step = Step::update(&self.table, row.key().iter().cloned())
            .guard(column(STATUS).eq(from))
            .set(STATUS, *status)
            .set(DOUBT, *doubt)
            .set(DUE_AT, due)
            .set(STUCK_AT, stuck_at)
            .set(REASON, reason.map_or(Value::Null, Value::from))
            .set(DETAIL, detail.as_str())
            .set(UPDATED_AT, now());
        if *status == DELIVERED {
            step = step.set(DELIVERED_AT, now());
        }
        let event = EventTemplate::named(self.event(status))
            .with(KEY, name_of(row))
            .with(TARGET, row.text(TARGET).unwrap_or_default())
            .with(DOUBT, *doubt)
            .with("stuck", *stuck)
            .with(REASON, reason.map_or(Json::Null, Json::from))
            .with(DETAIL, detail);
        Moved {
            effect: self.name.clone(),
            row: row.clone(),
            attempt: row.int(ATTEMPT).unwrap_or(0),
            step,
            event,
            answer: None,
        }
    }

    /// Moves rows behind those of other targets. It is no transition: it leaves nothing in the log.
    fn put_off(&self, row: &Row, wait: Duration, desk: &Desk<'_, '_>) -> Result<Plan, StoreError> {
        let spread = spread(row.tenant(), &self.name, &key_text(row.key()), row.version());
        let wait = wait.max(PUT_OFF) + PUT_OFF.mul_f64(spread);
        let step = Step::update(&self.table, row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .set(DUE_AT, now_plus(wait));
        Plan::of(row.tenant(), desk.shift.ids.next())
            .step(step)
            .without_rows()
            .build()
            .map_err(|error| misuse(&error))
    }

    /// The request of an effect.
    fn parcel(&self, row: &Row, desk: &Desk<'_, '_>) -> Result<Parcel, Unsent> {
        let sent_key = row.text(SENT_KEY).unwrap_or_default();
        let body = self.bytes(row.json(BODY));
        let mut headers = self.common_headers(sent_key, desk)?;
        for (name, value) in row.json(HEADERS).and_then(Json::as_object).into_iter().flatten() {
            let bad = || Unsent::ever(format!("{name} cannot be a header"));
            let header: HeaderName = name.to_ascii_lowercase().parse().map_err(|_| bad())?;
            let value = HeaderValue::from_str(value.as_str().unwrap_or_default()).map_err(|_| bad())?;
            headers.insert(header, value);
        }
        if !body.is_empty() {
            let kind = HeaderValue::from_str(&self.content_type);
            headers.insert(CONTENT_TYPE, kind.map_err(|_| Unsent::ever("a bad content type"))?);
        }
        if !self.sign.is_empty() {
            let seconds = desk.shift.clock.now().micros() / 1_000_000;
            for (name, value) in [
                (signature::ID, sent_key.to_owned()),
                (signature::TIMESTAMP, seconds.to_string()),
                (signature::SIGNATURE, self.signatures(sent_key, seconds, &body, desk).map_err(Unsent::Yet)?),
            ] {
                let value = HeaderValue::from_str(&value);
                let value = value.map_err(|_| Unsent::ever(format!("{name} cannot be a header")))?;
                headers.insert(HeaderName::from_static(name), value);
            }
        }
        let url = row.text(URL).unwrap_or_default();
        let parcel = self.to(url, self.method.clone(), headers)?;
        // The blueprint may have changed since it was written down.
        self.check_host(&parcel.url).map_err(Unsent::Ever)?;
        Ok(Parcel { body, ..parcel })
    }

    /// During a rotation one of two secrets may be missing; a request without any signature is never sent.
    fn signatures(&self, id: &str, seconds: i64, body: &[u8], desk: &Desk<'_, '_>) -> Result<String, String> {
        let mut signatures = Vec::new();
        for reference in &self.sign {
            match desk.secrets.get(reference) {
                Ok(secret) => {
                    let signed = signature::sign(secret, id, seconds, body);
                    signatures.push(signed.map_err(|why| format!("{reference}: {why}"))?);
                }
                Err(why) if self.sign.len() < 2 => return Err(why),
                Err(_) => {}
            }
        }
        if signatures.is_empty() {
            Err("there is no secret to sign with".into())
        } else {
            Ok(signatures.join(" "))
        }
    }

    /// The request that asks what became of an effect.
    fn question(&self, row: &Row, desk: &Desk<'_, '_>) -> Result<Parcel, Unsent> {
        let sent_key = row.text(SENT_KEY).unwrap_or_default();
        let url = self.reconcile_url.as_deref().unwrap_or_default().replace("{key}", &encoded(sent_key));
        let mut headers = self.common_headers(sent_key, desk)?;
        headers.insert(ACCEPT, HeaderValue::from_static(JSON));
        // The answer has to be whole to be understood, also if little of it is kept.
        let answer_max = self.answer_max.max(QUESTION_BYTES);
        Ok(Parcel { answer_max, ..self.to(&url, Method::GET, headers)? })
    }

    fn common_headers(&self, sent_key: &str, desk: &Desk<'_, '_>) -> Result<HeaderMap, Unsent> {
        let mut headers = HeaderMap::new();
        for (name, template) in &self.headers {
            headers.insert(name, template.header(&desk.secrets).map_err(Unsent::Yet)?);
        }
        if let Some(name) = &self.key_header {
            let value = HeaderValue::from_str(sent_key);
            headers.insert(name, value.map_err(|_| Unsent::ever("the key cannot be a header"))?);
        }
        Ok(headers)
    }

    fn to(&self, url: &str, method: Method, headers: HeaderMap) -> Result<Parcel, Unsent> {
        Ok(Parcel {
            method,
            url: check_url(url, self.allow_private).map_err(Unsent::Ever)?.uri,
            headers,
            body: Vec::new(),
            connect_timeout: self.connect_timeout,
            timeout: self.timeout,
            answer_max: self.answer_max,
            allow_private: self.allow_private,
        })
    }
}

/// How much of what went wrong is said.
const DETAIL_CHARS: usize = 500;
/// What of an answer to a question is read at least.
const QUESTION_BYTES: usize = 16_000;

/// What a row says of the time before.
fn before(row: &Row, resource: &str) -> Before {
    let attempt = row.int(ATTEMPT).unwrap_or(0);
    Before {
        tries: row.int(TRIES).unwrap_or(0),
        checks: row.int(CHECKS).unwrap_or(0),
        doubt: row.bool(DOUBT) == Some(true),
        spread: spread(row.tenant(), resource, &key_text(row.key()), attempt),
    }
}

fn misuse(error: &PlanError) -> StoreError {
    StoreError::schema("an effect", error.to_string())
}

/// What names an effect, for its events.
fn name_of(row: &Row) -> &str {
    row.text(KEY).unwrap_or_default()
}

/// A transition of a row that is being put together.
struct Moved {
    effect: String,
    row: Row,
    attempt: i64,
    step: Step,
    event: EventTemplate,
    answer: Option<String>,
}

impl Moved {
    /// Under the attempt of this sender, which the row as it was scanned does not know yet.
    fn at_attempt(mut self, attempt: i64) -> Moved {
        self.attempt = attempt;
        self
    }

    fn guarded(mut self, change: impl FnOnce(Step) -> Step) -> Moved {
        self.step = change(self.step);
        self
    }

    /// With what the target answered, freed of secrets (I6).
    fn with_answer(mut self, sent: &Sent, most: usize, desk: &Desk<'_, '_>) -> Moved {
        let Sent::Answered(Reply { status, body, .. }) = sent else { return self };
        self.step = self.step.set(HTTP_STATUS, i64::from(*status));
        self.event = self.event.with(HTTP_STATUS, *status);
        if most > 0 && !body.is_empty() {
            let text = String::from_utf8_lossy(body).replace('\0', "\u{fffd}");
            self.answer = Some(desk.secrets.hidden(text));
        }
        self
    }

    fn without_answer(mut self) -> Moved {
        self.answer = None;
        self
    }

    fn build(&self, desk: &Desk<'_, '_>) -> Result<Plan, StoreError> {
        let step = self.step.clone().guard(column(ATTEMPT).eq(self.attempt));
        let step = match &self.answer {
            Some(answer) => step.set(ANSWER, answer.as_str()),
            None => step,
        };
        let event = self.event.clone().with(ATTEMPT, self.attempt);
        let entry = Entry::about(&self.effect, key_text(self.row.key())).event(event);
        let plan = Plan::of(self.row.tenant(), desk.shift.ids.next()).step(step).log(entry).without_rows();
        plan.build().map_err(|error| misuse(&error))
    }
}

impl Desk<'_, '_> {
    async fn record(&self, moved: &Moved) -> Result<bool, StoreError> {
        self.commit(moved.build(self)?).await
    }

    /// Commits a plan until its outcome is known, and says whether it was applied.
    async fn commit(&self, plan: Plan) -> Result<bool, StoreError> {
        let commit = commit_known(&**self.shift.store, &plan, RetryPolicy::WORKER).await?;
        Ok(matches!(commit, Commit::Applied(_)))
    }
}
