//! The worker: finds what is due, and for each row claims it, sends it, and records what is known.
//!
//! A step is bounded by its rows and by the time-outs of their requests. It may be cut short anywhere: before the claim
//! nothing has happened, and after it the row says `SENDING` until the lease is over, and then that the outcome is unknown. All
//! requests of a step run together, within the limits of their targets. Rows that cannot be sent now, because of their target or
//! their tenant's failures there, are put off so that they do not delay others.

mod settle;
mod transition;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde_json::Value as Json;
use statehouse_store::guard::{column, is_null, now, now_plus};
use statehouse_store::{
    Commit, Entry, EventTemplate, Expr, Guard, Plan, PlanError, Query, RetryPolicy, Row, Step, StoreError,
    Tenant, Time, Value, commit_known,
};

use self::transition::EffectTransition;
use super::outbound::UnsendableRow;
use super::rules::{
    AttemptHistory, BROKEN, EffectOutcome, NO_ANSWER, ReconcileFinding, describe, finding, health, spread,
};
use super::secret::Secrets;
use super::settle::{ExchangeKind, Interpretation};
use super::target::{InFlightRequest, SendPermit};
use super::{
    ANSWER, ATTEMPT, CANCELLED, CHECKS, DELIVERED, DELIVERED_AT, DETAIL, DOUBT, EXPIRES_AT,
    EffectDestination, EffectSpec, HTTP_STATUS, KEY, PARKED, PENDING, REASON, RETRYING, SENDING, STATUS,
    STUCK_AT, TARGET, TRIES, UNCERTAIN, UNSETTLED_AT, UPDATED_AT,
};
use crate::egress::{SendOutcome, TargetResponse, Transport};
use crate::infra::due::{DUE, DUE_AT};
use crate::resource::key_text;
use crate::worker::{Gauge, NextStep, StepContext, StepProgress, Worker};

/// Pages of the index that one step reads past rows that cannot be done now.
const PAGES_MAX: usize = 8;
/// After so long a step begins nothing new.
const BUDGET: Duration = Duration::from_secs(2);
/// For how long rows are put off, at least, that would delay rows of other targets and tenants.
const PUT_OFF: Duration = Duration::from_secs(1);

/// Sends what is due.
#[derive(Debug)]
pub(super) struct EffectSender(pub Arc<EffectSpec>);

#[async_trait]
impl Worker for EffectSender {
    fn name(&self) -> &str {
        self.0.sender.as_str()
    }

    fn shards(&self) -> u32 {
        self.0.shards
    }

    fn gauges(&self) -> Vec<Gauge> {
        self.0.targets.gauges()
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let effect = &*self.0;
        let mut query = Query::all_tenants(&effect.table, DUE, [i64::from(context.shard).into()])
            .and_then(|query| query.limit(limit))
            .map_err(|error| misuse(&error))?;
        let mut progress = StepProgress::idle();
        let mut again_at: Option<Time> = None;
        for _ in 0..PAGES_MAX {
            let page = context.store.query(&query).await?;
            let at = context.clock.now();
            let due: Vec<&Row> =
                page.rows.iter().take_while(|row| row.time(DUE_AT).is_some_and(|due| due <= at)).collect();
            let oldest = due.first().and_then(|row| row.time(DUE_AT));
            progress.lag = progress.lag.max(oldest.map_or(Duration::ZERO, |due| at.since(due)));
            let first_later = page.rows.get(due.len()).and_then(|row| row.time(DUE_AT));
            again_at = [again_at, first_later].into_iter().flatten().min();
            if !due.is_empty() {
                let round = effect.round(&due, page.next.is_some() && first_later.is_none(), context).await?;
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
                    progress.next = NextStep::Now;
                    return Ok(progress);
                }
                Some(next) if first_later.is_none() => {
                    query = query.after(next).map_err(|error| misuse(&error))?;
                }
                _ => {
                    progress.next = again_at.map_or(NextStep::Idle, NextStep::At);
                    return Ok(progress);
                }
            }
        }
        // All of these were put off. There are more rows behind them.
        progress.next = NextStep::Now;
        Ok(progress)
    }
}

/// What came of the rows of a page.
#[derive(Debug, Default)]
struct PageResult {
    rows: usize,
    failures: Vec<String>,
    /// When a target that could not take something can.
    again_at: Option<Time>,
    unreachable: Option<StoreError>,
}

impl PageResult {
    /// Adds what came of a row.
    fn add(&mut self, result: Result<RowResult, StoreError>) {
        match result {
            Ok(RowResult::Moved) => self.rows += 1,
            Ok(RowResult::Opened(why)) => {
                self.rows += 1;
                self.failures.push(why);
            }
            Ok(RowResult::Passed) => {}
            Ok(RowResult::Failed(why)) => self.failures.push(why),
            Err(error) if error.is_transient() => self.unreachable = Some(error),
            Err(error) => self.failures.push(error.to_string()),
        }
    }
}

/// What came of one row.
#[derive(Debug)]
enum RowResult {
    /// It moved on.
    Moved,
    /// It moved on, and its target's breaker opened.
    Opened(String),
    /// Another process was faster, or it is not due by the engine's clock.
    Passed,
    /// It could not be done, for a reason of its own.
    Failed(String),
}

type RowTask<'t> = Pin<Box<dyn Future<Output = Result<RowResult, StoreError>> + Send + 't>>;

/// A row that is due, as far as it has to be read to choose what to do.
struct DueEffect<'r> {
    row: &'r Row,
    status: &'r str,
    target: &'r str,
}

impl DueEffect<'_> {
    fn of(row: &Row) -> Result<DueEffect<'_>, StoreError> {
        Ok(DueEffect { row, status: row.get_text(STATUS)?, target: row.get_text(TARGET)? })
    }
}

/// What the rows of a round share.
pub(super) struct SendContext<'d, 's> {
    pub(super) context: &'d StepContext<'s>,
    transport: &'d dyn Transport,
    pub(super) secrets: Secrets,
}

impl EffectSpec {
    /// Does what is due, all together, within the limits of the targets. `more` says that more rows may be due behind these.
    async fn round(
        &self,
        due: &[&Row],
        more: bool,
        context: &StepContext<'_>,
    ) -> Result<PageResult, StoreError> {
        let mut round = PageResult::default();
        let Some(transport) = &context.egress.transport else {
            round.failures.push("there is no courier: nothing can be sent by this process".into());
            return Ok(round);
        };
        let secrets = Secrets::read(self.references(), context.egress, &**context.store).await?;
        let cx = SendContext { context, transport: &**transport, secrets };
        let (start, began_at) = (context.clock.uptime(), context.clock.now());
        let mut waiting: Vec<DueEffect<'_>> = Vec::with_capacity(due.len());
        for row in due {
            match DueEffect::of(row) {
                Ok(effect) => waiting.push(effect),
                Err(error) => round.failures.push(error.to_string()),
            }
        }
        let mut running: FuturesUnordered<RowTask<'_>> = FuturesUnordered::new();
        let mut left: Vec<(&Row, Option<Duration>)> = Vec::new();
        loop {
            if context.clock.uptime().saturating_sub(start) > BUDGET || !context.is_live() {
                left.extend(waiting.drain(..).map(|effect| (effect.row, None)));
            }
            self.order_fairly(&mut waiting);
            waiting = self.start_tasks(waiting, &cx, &running, &mut left);
            match running.next().await {
                Some(result) => round.add(result),
                None => break,
            }
        }
        left.extend(waiting.into_iter().map(|effect| (effect.row, None)));
        // By when something that was left can go on.
        let soonest = left.iter().filter_map(|(_, wait)| *wait).min();
        round.again_at = soonest.map(|wait| began_at.plus(wait));
        // Rows of one target and one tenant are alone in a page that is not full: then they delay no others.
        let puts_off = more || matches!(self.destination, EffectDestination::Hosts(_));
        for (row, wait) in left.into_iter().filter(|_| puts_off) {
            // The outcome does not matter: a row that was not put off is due as before.
            let plan = self.put_off(row, wait.unwrap_or_default(), &cx)?;
            let _ = commit_known(&**context.store, &plan, RetryPolicy::WORKER).await;
        }
        Ok(round)
    }

    /// Starts what is due, as far as the targets have room. Returns what waits for room; `left` gets what waits for a time.
    fn start_tasks<'t>(
        &'t self,
        due: Vec<DueEffect<'t>>,
        cx: &'t SendContext<'_, '_>,
        running: &FuturesUnordered<RowTask<'t>>,
        left: &mut Vec<(&'t Row, Option<Duration>)>,
    ) -> Vec<DueEffect<'t>> {
        let uptime = cx.context.clock.uptime();
        let mut full = Vec::new();
        for effect in due {
            let row = effect.row;
            match effect.status {
                _ if row.time(UNSETTLED_AT).is_some() => running.push(Box::pin(self.settle_again(row, cx))),
                SENDING => running.push(Box::pin(self.lapse(row, cx))),
                PENDING | RETRYING | UNCERTAIN => {
                    match self.targets.enter(row.tenant(), effect.target, uptime) {
                        SendPermit::Pass(pass) => running.push(Box::pin(self.deliver(row, pass, cx))),
                        SendPermit::Full => full.push(effect),
                        SendPermit::Later(at) => left.push((row, Some(at.saturating_sub(uptime)))),
                    }
                }
                _ => running.push(Box::pin(self.forget(row, cx))),
            }
        }
        full
    }

    /// Orders rows so that tenants share the slots of a target: a row comes after as many rounds as its tenant has
    /// requests in flight to the target and rows before it.
    fn order_fairly(&self, waiting: &mut Vec<DueEffect<'_>>) {
        let mut loads: BTreeMap<(&Tenant, &str), usize> = BTreeMap::new();
        let mut ranked = Vec::with_capacity(waiting.len());
        for effect in waiting.drain(..) {
            let account = (effect.row.tenant(), effect.target);
            let load = loads.entry(account).or_insert_with(|| self.targets.in_flight(account.0, account.1));
            ranked.push((*load, effect));
            *load += 1;
        }
        ranked.sort_by_key(|(rank, _)| *rank);
        waiting.extend(ranked.into_iter().map(|(_, effect)| effect));
    }

    /// One row that its target can take: it is sent, or asked about.
    async fn deliver(
        &self,
        row: &Row,
        pass: InFlightRequest,
        cx: &SendContext<'_, '_>,
    ) -> Result<RowResult, StoreError> {
        let asks = row.get_text(STATUS)? == UNCERTAIN && self.rules.reconcile.is_some();
        if asks { self.ask(row, pass, cx).await } else { self.send(row, pass, cx).await }
    }

    /// Claims a row, sends it, and records what is known.
    async fn send(
        &self,
        row: &Row,
        pass: InFlightRequest,
        cx: &SendContext<'_, '_>,
    ) -> Result<RowResult, StoreError> {
        let clock = &**cx.context.clock;
        let status = row.get_text(STATUS)?;
        let history = before(row, self)?;
        if row.get_optional_time(EXPIRES_AT)?.is_some_and(|end| end <= clock.now()) {
            let moved = self.moved(row, status, &self.rules.after_expiry(history))?;
            let moved = moved.guarded(|step| step.guard(column(EXPIRES_AT).le(now())));
            return Ok(if self.record(&moved, None, cx).await? {
                RowResult::Moved
            } else {
                RowResult::Passed
            });
        }
        let outbound = match self.outbound(row, cx) {
            Ok(outbound) => outbound,
            // Nothing was claimed: as soon as the secret is there it is sent.
            Err(UnsendableRow::Yet(why)) => return Ok(RowResult::Failed(format!("{row}: {why}"))),
            Err(UnsendableRow::Ever(why)) => {
                let forbidden = SendOutcome::Forbidden { why };
                let outcome = self.rules.after_sending(history, &forbidden, Interpretation::ByStatus);
                let moved = self.moved(row, status, &outcome)?;
                return Ok(if self.record(&moved, None, cx).await? {
                    RowResult::Moved
                } else {
                    RowResult::Passed
                });
            }
            Err(UnsendableRow::Broken(error)) => return Err(error),
        };
        if !cx.commit(self.claim(row, cx)?).await? {
            return Ok(RowResult::Passed);
        }
        let attempt = row.get_int(ATTEMPT)? + 1;
        let sent = tokio::select! {
            sent = cx.transport.send(&outbound, clock) => sent,
            // No transport should take so long; the process that takes over decides now.
            () = clock.sleep(self.lease) => SendOutcome::Unknown { why: "no answer came within the sender's lease".into() },
        };
        let opened = pass.finish(health(&sent), clock.uptime());
        let history = AttemptHistory { tries: history.tries + 1, ..history };
        let interpreted = self.interpreted(row, ExchangeKind::Request, &sent, cx).await;
        let outcome = self.rules.after_sending(history, &sent, interpreted);
        let moved = self.moved(row, SENDING, &outcome)?.at_attempt(attempt);
        let moved = moved.with_status(&sent).with_answer(&sent, self.answer_max, cx);
        let recorded = match self.record(&moved, response(&sent), cx).await {
            // An answer that no row can hold must not hide what it says.
            Err(error) if !error.is_transient() => {
                self.record(&moved.without_answer(), response(&sent), cx).await?
            }
            other => other?,
        };
        Ok(match (recorded, opened) {
            (_, true) => RowResult::Opened(format!(
                "the breaker of {} is open: {}",
                row.get_text(TARGET)?,
                describe(&sent)
            )),
            (true, false) => RowResult::Moved,
            (false, false) => RowResult::Passed,
        })
    }

    /// Asks the target what became of an effect, and records what it says.
    async fn ask(
        &self,
        row: &Row,
        pass: InFlightRequest,
        cx: &SendContext<'_, '_>,
    ) -> Result<RowResult, StoreError> {
        let clock = &**cx.context.clock;
        let outbound = match self.question(row, cx) {
            Ok(outbound) => outbound,
            Err(UnsendableRow::Yet(why) | UnsendableRow::Ever(why)) => {
                return Ok(RowResult::Failed(format!("{row}: {why}")));
            }
            Err(UnsendableRow::Broken(error)) => return Err(error),
        };
        let before = before(row, self)?;
        let sent = cx.transport.send(&outbound, clock).await;
        let opened = pass.finish(health(&sent), clock.uptime());
        // Two who asked at once are one question: the first answer counts.
        let asked = before.checks;
        let checks = asked + 1;
        let before = AttemptHistory {
            checks,
            spread: spread(row.tenant(), &self.name, &key_text(row.key()), checks),
            ..before
        };
        let (found, reason) = match self.interpreted(row, ExchangeKind::StatusQuery, &sent, cx).await {
            Interpretation::ByStatus => (finding(&sent), NO_ANSWER),
            Interpretation::Definite => (ReconcileFinding::Applied, NO_ANSWER),
            Interpretation::NotApplied => (ReconcileFinding::NotApplied, NO_ANSWER),
            Interpretation::Open(reason) => (ReconcileFinding::Unknown, reason),
        };
        let said = match found {
            ReconcileFinding::Applied => "asked, the target says that it was applied",
            ReconcileFinding::NotApplied => "asked, the target says that it was not applied",
            ReconcileFinding::Unknown => "asked, the target does not say what became of it",
        };
        let outcome =
            self.rules.after_asking(before, found, reason, &format!("{said} ({})", describe(&sent)));
        let moved = self
            .moved(row, UNCERTAIN, &outcome)?
            .guarded(|step| step.guard(column(CHECKS).eq(asked)).set(CHECKS, checks));
        // Without a settler the row keeps what the target answered to the request.
        let moved = match self.settler.get() {
            Some(_) => moved.with_answer(&sent, self.answer_max, cx),
            None => moved,
        };
        let recorded = self.record(&moved, response(&sent), cx).await?;
        Ok(match (recorded, opened) {
            (true, false) => RowResult::Moved,
            (_, true) => RowResult::Opened(format!("the breaker of {} is open", row.get_text(TARGET)?)),
            (false, false) => RowResult::Passed,
        })
    }

    /// A sender that did not come back (I4).
    async fn lapse(&self, row: &Row, cx: &SendContext<'_, '_>) -> Result<RowResult, StoreError> {
        let outcome = self.rules.after_lapse(before(row, self)?);
        let moved = self.moved(row, SENDING, &outcome)?.guarded(|step| step.guard(column(DUE_AT).le(now())));
        Ok(if self.record(&moved, None, cx).await? { RowResult::Moved } else { RowResult::Passed })
    }

    /// Removes the row of an effect that is over, when it was kept for long enough.
    async fn forget(&self, row: &Row, cx: &SendContext<'_, '_>) -> Result<RowResult, StoreError> {
        let status = row.get_text(STATUS)?;
        if ![DELIVERED, CANCELLED].contains(&status) {
            return Ok(RowResult::Failed(format!("{row} is due in an unknown state")));
        }
        let step = Step::delete(&self.table, row.key().iter().cloned())
            .guard(column(STATUS).eq(status))
            .guard(column(DUE_AT).le(now()));
        let event = EventTemplate::named(format!("{}.forgotten", self.name))
            .with(KEY, row.get_text(KEY)?)
            .with(STATUS, status);
        let entry = Entry::about(&self.name, key_text(row.key())).event(event);
        let plan = Plan::of(row.tenant(), cx.context.ids.next()).step(step).log(entry).without_rows().build();
        Ok(if cx.commit(plan.map_err(|error| misuse(&error))?).await? {
            RowResult::Moved
        } else {
            RowResult::Passed
        })
    }

    /// The plan that makes a row this sender's (I2).
    fn claim(&self, row: &Row, cx: &SendContext<'_, '_>) -> Result<Plan, StoreError> {
        let attempt = row.get_int(ATTEMPT)?;
        let alive = is_null(EXPIRES_AT).or(column(EXPIRES_AT).gt(now()));
        let step = Step::update(&self.table, row.key().iter().cloned())
            .guard(column(STATUS).eq(row.get_text(STATUS)?))
            .guard(column(ATTEMPT).eq(attempt))
            .guard(column(DUE_AT).le(now()))
            .guard(alive)
            .set(STATUS, SENDING)
            .set(ATTEMPT, attempt + 1)
            .set(TRIES, column(TRIES).add(1))
            .set(DUE_AT, now_plus(self.lease))
            .set(UPDATED_AT, now());
        let event = EventTemplate::named(self.event(SENDING))
            .with(KEY, row.get_text(KEY)?)
            .with(ATTEMPT, attempt + 1)
            .with(TARGET, row.get_text(TARGET)?);
        let entry = Entry::about(&self.name, key_text(row.key())).event(event);
        let plan = Plan::of(row.tenant(), cx.context.ids.next()).step(step).log(entry).without_rows();
        plan.build().map_err(|error| misuse(&error))
    }

    /// Moves rows behind those of other targets and tenants. It is no transition: it leaves nothing in the log.
    fn put_off(&self, row: &Row, wait: Duration, cx: &SendContext<'_, '_>) -> Result<Plan, StoreError> {
        let spread = spread(row.tenant(), &self.name, &key_text(row.key()), row.version());
        let wait = wait.max(PUT_OFF) + PUT_OFF.mul_f64(spread);
        let step = Step::update(&self.table, row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .set(DUE_AT, now_plus(wait));
        Plan::of(row.tenant(), cx.context.ids.next())
            .step(step)
            .without_rows()
            .build()
            .map_err(|error| misuse(&error))
    }
}

/// What a row says of the time before.
fn before(row: &Row, effect: &EffectSpec) -> Result<AttemptHistory, StoreError> {
    let attempt = row.get_int(ATTEMPT)?;
    Ok(AttemptHistory {
        tries: row.get_int(TRIES)?,
        checks: row.get_int(CHECKS)?,
        doubt: row.get_bool(DOUBT)?,
        kept_error: effect.rules.replays_errors && row.get_optional_text(REASON)? == Some(BROKEN),
        spread: spread(row.tenant(), &effect.name, &key_text(row.key()), attempt),
    })
}

/// What a target answered, if it did.
fn response(sent: &SendOutcome) -> Option<&TargetResponse> {
    match sent {
        SendOutcome::Answered(answer) => Some(answer),
        _ => None,
    }
}

fn misuse(error: &PlanError) -> StoreError {
    StoreError::schema("an effect", error.to_string())
}

impl SendContext<'_, '_> {
    /// Commits a plan until its outcome is known, and says whether it was applied.
    async fn commit(&self, plan: Plan) -> Result<bool, StoreError> {
        let commit = commit_known(&**self.context.store, &plan, RetryPolicy::WORKER).await?;
        Ok(matches!(commit, Commit::Applied(_)))
    }
}
