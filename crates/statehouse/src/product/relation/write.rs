//! The writes: from a call to the steps of a plan, and from a refused step to what it means.

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::guard::{column, is_null, now};
use statehouse_store::{Event, EventTemplate, Guard, Reason, Refused, Row, Step, Value};

use super::{IN_BUCKET, OUT_BUCKET, Relation, SINCE, UPDATED_AT, places};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Expected, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::product::fields::contents;
use crate::resource::key_text;

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Remove,
}

pub(super) struct Writer {
    pub relation: Arc<Relation>,
    pub verb: Verb,
}

impl Relation {
    /// Makes an edge that is not there, in both lists and both counts (I2).
    fn make(&self, call: &Call, desk: &Desk<'_>, fields: Vec<(&str, Value)>) -> Vec<Step> {
        let (from, to) = self.ends(&call.key);
        let since = desk.clock.now();
        let outward = self.outward.place(&call.tenant, to, since);
        let inward = self.inward.place(&call.tenant, from, since);
        let mut edge = Step::upsert(&self.table, call.key.iter().cloned())
            .guard(is_null(SINCE))
            .set(SINCE, since)
            .set(OUT_BUCKET, outward.bucket)
            .set(IN_BUCKET, inward.bucket)
            .set(UPDATED_AT, now());
        for (name, value) in fields {
            edge = edge.set(name, value);
        }
        let lists = self.outward.put(&call.tenant, from, to, outward);
        let lists = lists.into_iter().chain(self.inward.put(&call.tenant, to, from, inward));
        std::iter::once(edge).chain(lists).collect()
    }

    async fn add(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let fields = contents(&self.fields, &call.input, true)?;
        // Most edges are new. If this one is not, the store says so, and the next draft looks.
        if desk.tries == 0 && call.expected.is_none() {
            return Ok(self.change(call, self.make(call, desk, fields), "added"));
        }
        let row = self.row(call, desk).await?;
        self.check_expected(call, row.as_ref())?;
        let mut steps = match row.as_ref().and_then(|row| Some((row, row.time(SINCE)?))) {
            None => self.make(call, desk, fields),
            Some((row, since)) => {
                let differs = |(name, value): &(&str, Value)| row.get(name) != Some(value);
                let changed: Vec<(&str, Value)> = fields.into_iter().filter(differs).collect();
                if changed.is_empty() {
                    return Ok(Draft::Done(Answer::row(self.shown(row.to_json()))));
                }
                let edge = Step::update(&self.table, call.key.iter().cloned())
                    .guard(column(SINCE).eq(since))
                    .set(UPDATED_AT, now());
                vec![changed.into_iter().fold(edge, |edge, (name, value)| edge.set(name, value))]
            }
        };
        insist(call, &mut steps);
        let what = if steps.len() == 1 { "changed" } else { "added" };
        Ok(self.change(call, steps, what))
    }

    /// Makes a tombstone of an edge, and takes it out of both lists and both counts (I2).
    async fn remove(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let row = self.row(call, desk).await?;
        self.check_expected(call, row.as_ref())?;
        let found = row.as_ref().and_then(|row| Some((row.time(SINCE)?, places(row)?)));
        let Some((since, [outward, inward])) = found else {
            let body = row.map_or_else(|| self.never(call), |row| self.shown(row.to_json()));
            return Ok(Draft::Done(Answer::row(body)));
        };
        let (from, to) = self.ends(&call.key);
        let mut edge = Step::update(&self.table, call.key.iter().cloned())
            .guard(column(SINCE).eq(since))
            .set(SINCE, Value::Null)
            .set(OUT_BUCKET, Value::Null)
            .set(IN_BUCKET, Value::Null)
            .set(UPDATED_AT, now());
        for field in &self.fields {
            edge = edge.set(&field.name, Value::Null);
        }
        let lists = self.outward.take(&call.tenant, from, to, outward);
        let lists = lists.into_iter().chain(self.inward.take(&call.tenant, to, from, inward));
        let mut steps: Vec<Step> = std::iter::once(edge).chain(lists).collect();
        insist(call, &mut steps);
        Ok(self.change(call, steps, "removed"))
    }

    fn change(&self, call: &Call, steps: Vec<Step>, what: &str) -> Draft {
        let event = EventTemplate::named(format!("{}.{what}", self.name)).with_row_of(0);
        Draft::Write(Pieces { subject: key_text(&call.key), steps, event })
    }

    /// What a caller says about the row's version.
    fn check_expected(&self, call: &Call, row: Option<&Row>) -> Result<(), Refusal> {
        match (call.expected, row) {
            (None, _) | (Some(Expected::Any), Some(_)) => Ok(()),
            (Some(Expected::Version(expected)), Some(row)) if expected == row.version() => Ok(()),
            (Some(Expected::Version(expected)), Some(row)) => Err(self.conflict(call, expected, row)),
            (Some(_), None) => {
                Err(Refusal::new(Code::NotFound, format!("{} was never there", self.what(call))))
            }
        }
    }

    fn conflict(&self, call: &Call, expected: i64, row: &Row) -> Refusal {
        let message = format!(
            "{} is at version {}, not {expected}: read it again and decide anew",
            self.what(call),
            row.version()
        );
        Refusal::new(Code::VersionConflict, message).at_version(Some(row))
    }
}

/// Guards the edge by the version that the caller has seen, which says all that the draft has read.
fn insist(call: &Call, steps: &mut [Step]) {
    if let (Some(Expected::Version(version)), Some(edge)) = (call.expected, steps.first_mut()) {
        edge.guard = Guard::version(version);
    }
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        match self.verb {
            Verb::Add => self.relation.add(call, desk).await,
            Verb::Remove => self.relation.remove(call, desk).await,
        }
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let relation = &self.relation;
        let what = relation.what(call);
        match (&refused.reason, &refused.current) {
            // The edge was made, removed or made anew meanwhile: the last intent wins, and this one is later (I3).
            (Reason::Guard { .. }, Some(row)) if refused.step == 0 => match call.expected {
                Some(Expected::Version(expected)) if expected != row.version() => {
                    Verdict::Refuse(relation.conflict(call, expected, row))
                }
                _ => Verdict::TryAgain,
            },
            (Reason::Overflow { .. } | Reason::Null { .. }, _) => common_verdict(&what, refused),
            (Reason::Guard { .. }, _) | (Reason::Absent | Reason::Present, _) => {
                let message = format!("{what} and its lists do not agree: {}", refused.reason);
                Verdict::Refuse(Refusal::new(Code::Internal, message))
            }
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        Answer::row(self.relation.shown(row_of(event)))
    }
}
