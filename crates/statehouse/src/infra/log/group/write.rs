//! The writes of a group: claim, renew, release, commit, seek and park.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Bug, Guard, Operand, Row, Step};

use super::super::parking::{self, LOG_OFFSET, ParkedRows, REASON, SUBJECT};
use super::super::progress::{ConsumerTables, GroupProgress, KEEPS_FROM, PARKED_COUNT, REACHED, UPDATED_AT};
use super::super::{column_of, offset_of};
use super::{BEHIND_MAX, DURATION_MS, FROM, GroupSpec, PROGRESS, TO};
use crate::action::{ActionContext, Call, Code, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict};
use crate::infra::lease::{self, EPOCH, EXPIRES_AT, HOLDER};
use crate::resource::key_text;

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupVerb {
    Claim,
    Renew,
    Release,
    Commit,
    Seek,
    Park,
}

pub(super) struct GroupWrite {
    pub(super) group: Arc<GroupSpec>,
    pub(super) verb: GroupVerb,
}

/// What a caller says about itself.
struct ReaderClaim<'c> {
    holder: &'c str,
    epoch: i64,
    span: Duration,
}

impl GroupWrite {
    fn claim<'c>(&self, call: &'c Call) -> Result<ReaderClaim<'c>, Bug> {
        Ok(ReaderClaim {
            holder: call.input.get_text(HOLDER)?,
            // Who claims has none yet.
            epoch: if self.verb == GroupVerb::Claim { 0 } else { call.input.get_int(EPOCH)? },
            span: call.input.duration_ms(DURATION_MS).unwrap_or(self.group.duration),
        })
    }

    /// The commit of an offset, with what has to be parked on the way to it (I4).
    async fn commit(
        &self,
        call: &Call,
        partition: u32,
        cx: &ActionContext<'_>,
    ) -> Result<Vec<Step>, Refusal> {
        let books = ConsumerTables::open()?;
        let ReaderClaim { holder, epoch, span } = self.claim(call)?;
        let (from, to) = (call.input.get_count(FROM)?, call.input.get_count(TO)?);
        if to < from {
            return Err(Refusal::field(TO, format!("it is before {from}; to go back, seek")));
        }
        let row = self.group.row(&call.tenant, partition, cx.store).await?;
        let mark = GroupProgress::of(row.as_ref())?;
        let behind = self.parked_on_the_way(call, partition, (from, to), mark.parked, cx).await?;
        let parked = mark.parked + i64::try_from(behind.len()).unwrap_or(0);
        let step = Step::update(&books.progress, ConsumerTables::key(&self.group.name, partition))
            .guard(lease::held_by(holder, epoch))
            .guard(column(REACHED).eq(column_of(from)))
            .guard(column(PARKED_COUNT).eq(mark.parked))
            .set(REACHED, column_of(to))
            .set(KEEPS_FROM, column_of(to))
            .set(PARKED_COUNT, parked)
            .set(EXPIRES_AT, now_plus(span))
            .set(UPDATED_AT, now());
        Ok(std::iter::once(step).chain(behind).collect())
    }

    /// The steps that park the records up to an offset which are behind parked ones (I4).
    async fn parked_on_the_way(
        &self,
        call: &Call,
        partition: u32,
        (from, to): (u64, u64),
        parked: i64,
        cx: &ActionContext<'_>,
    ) -> Result<Vec<Step>, Refusal> {
        let books = ConsumerTables::open()?;
        let field_error = |detail: String| Refusal::field(TO, detail);
        let mut lot = match parked {
            0 => ParkedRows::default(),
            _ => ParkedRows::read(cx.store, &call.tenant, &self.group.name, partition).await?,
        };
        let (mut behind, mut records) = (Vec::new(), 0);
        let mut at = from;
        loop {
            // Without anything parked only the newest offset is asked for.
            let rows = if parked == 0 { 1 } else { PAGE_MAX };
            let page = cx.store.read_log(partition, at, rows).await?;
            if to > page.head {
                return Err(field_error(format!("the newest offset is {}", page.head)));
            }
            let Some(last) = page.records.last().map(offset_of).filter(|_| parked > 0) else { break };
            for record in page.records.iter().filter(|record| offset_of(record) <= to) {
                let Some(delivery) = self.group.delivery(&call.tenant, record) else { continue };
                if delivery.waits(&lot) && !delivery.is_parked(&lot) {
                    let reason = "an older record of its key is parked";
                    behind.extend(delivery.park(&self.group.name, partition, reason, 0, books));
                    delivery.add_to(&mut lot);
                    records += 1;
                }
            }
            at = last;
            if at >= to {
                break;
            }
        }
        // A record of many keys is parked under all of them, and cannot be committed in part.
        if behind.len() > BEHIND_MAX && records > 1 {
            return Err(field_error(format!(
                "records on the way have more than {BEHIND_MAX} keys that are behind parked ones; commit less"
            )));
        }
        Ok(behind)
    }

    /// Parks a record under each of its subjects (D2).
    async fn park(&self, call: &Call, partition: u32, cx: &ActionContext<'_>) -> Result<Vec<Step>, Refusal> {
        let books = ConsumerTables::open()?;
        let ReaderClaim { holder, epoch, .. } = self.claim(call)?;
        let offset = call.input.get_count(LOG_OFFSET)?;
        let (subject, reason) = (call.input.get_text(SUBJECT)?, call.input.get_text(REASON)?);
        let group = &self.group.name;
        let page = cx.store.read_log(partition, offset.saturating_sub(1), 1).await?;
        let record = page.records.first().filter(|record| offset_of(record) == offset);
        let delivery = record.map(|record| self.group.delivery(&call.tenant, record));
        let parked = match &delivery {
            Some(Some(delivery)) if delivery.subjects().iter().any(|known| known == subject) => {
                delivery.park(group, partition, reason, 1, books)
            }
            // A record that was trimmed after the program read it, or is not the group's, is parked as the program names it.
            None | Some(None) => vec![parking::park(group, partition, subject, offset, reason, 1, books)],
            Some(Some(_)) => {
                let detail = format!("{} has no record of {subject} at {offset}", self.group.what(call));
                return Err(Refusal::field(SUBJECT, detail));
            }
        };
        let count = i64::try_from(parked.len()).unwrap_or(i64::MAX);
        let step = Step::update(&books.progress, ConsumerTables::key(group, partition))
            .guard(lease::held_by(holder, epoch))
            .guard(column(REACHED).lt(column_of(offset)))
            .set(PARKED_COUNT, column(PARKED_COUNT).add(count))
            .set(UPDATED_AT, now());
        Ok(std::iter::once(step).chain(parked).collect())
    }
}

#[async_trait]
impl Prepare for GroupWrite {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let books = ConsumerTables::open()?;
        let partition = self.group.partition(call, cx.store)?;
        let ReaderClaim { holder, epoch, span } = self.claim(call)?;
        if holder.is_empty() {
            return Err(Refusal::field(HOLDER, "the holder must not be empty"));
        }
        let (table, key) = (&books.progress, ConsumerTables::key(&self.group.name, partition));
        let (mut steps, what) = match self.verb {
            GroupVerb::Claim => {
                let step = lease::acquire(table, key, holder, span)
                    .set(KEEPS_FROM, Operand::Coalesce(REACHED.to_owned(), 0.into()));
                (vec![step.set(UPDATED_AT, now())], "claimed")
            }
            GroupVerb::Renew => {
                (vec![lease::renew(table, key, holder, epoch, span).set(UPDATED_AT, now())], "renewed")
            }
            GroupVerb::Release => {
                (vec![lease::release(table, key, holder, epoch).set(UPDATED_AT, now())], "released")
            }
            GroupVerb::Commit => (self.commit(call, partition, cx).await?, "committed"),
            GroupVerb::Seek => {
                let head = cx.store.read_log(partition, 0, 1).await?.head;
                let to = column_of(call.input.get_count(TO)?.min(head));
                let step = Step::update(table, key).guard(lease::held_by(holder, epoch));
                (vec![step.set(REACHED, to).set(KEEPS_FROM, to).set(UPDATED_AT, now())], "moved")
            }
            GroupVerb::Park => (self.park(call, partition, cx).await?, "parked"),
        };
        if let Some(progress) = steps.first_mut() {
            progress.label = Some(PROGRESS.into());
        }
        let event = self.group.event(what).with_row_of(0);
        Ok(PlanParts::new(key_text(&call.key), steps, event).into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let what = self.group.what(call);
        let on_progress = refused.label() == PROGRESS;
        if !on_progress && self.verb == GroupVerb::Commit {
            return Verdict::Retry;
        }
        if !on_progress {
            return refused.standard(&format!("{what}: the record at that offset, among what is parked,"));
        }
        let (Some(guard), Some(row)) = (refused.guard(), refused.row) else {
            return refused.standard(&what);
        };
        self.progress_verdict(call, &what, guard, row).unwrap_or_else(Verdict::Refuse)
    }
}

impl GroupWrite {
    /// What a condition on the row of progress means that failed.
    fn progress_verdict(
        &self,
        call: &Call,
        what: &str,
        guard: &Guard,
        row: &Row,
    ) -> Result<Verdict, Refusal> {
        let ReaderClaim { holder, epoch, .. } = self.claim(call)?;
        let current = row.get_optional_text(HOLDER)?.unwrap_or("no reader");
        let (at, reached) = (row.get_int(EPOCH)?, row.get_int(REACHED)?);
        let is_own = current == holder && at == epoch;
        let refusal = match self.verb {
            GroupVerb::Claim => {
                let message = format!("{what} is read by {current}, under epoch {at}: wait and try again");
                Refusal::new(Code::Held, message)
            }
            _ if !is_own => {
                let message = format!(
                    "{what} is read by {current} under epoch {at}, not by {holder} under epoch {epoch}"
                );
                Refusal::new(Code::NotHolder, message)
            }
            GroupVerb::Renew => Refusal::new(
                Code::Expired,
                format!("{what}: its lease has expired; claim it again, under a new epoch"),
            ),
            GroupVerb::Park => {
                Refusal::new(Code::WrongState, format!("{what} has passed that record: it is at {reached}"))
            }
            // Something was parked or settled between the draft and the commit.
            GroupVerb::Commit if *guard != column(REACHED).eq(column_of(call.input.get_count(FROM)?)) => {
                return Ok(Verdict::Retry);
            }
            _ => {
                Refusal::new(Code::VersionConflict, format!("{what} is at {reached}: poll again from there"))
            }
        };
        Ok(Verdict::Refuse(refusal.at_version(Some(row))))
    }
}
