//! The writes: from a call to the steps of a plan, and from a refused step to what it means.

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::guard::{column, is_null, now};
use statehouse_store::{EventTemplate, Guard, Reason, Row, Step, Value};

use super::{IN_BUCKET, OUT_BUCKET, RelationSpec, SINCE, UPDATED_AT, positions};
use crate::action::{
    ActionContext, Answer, Call, Code, Expected, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::product::fields::contents;
use crate::resource::key_text;

/// The label of the step on the edge itself; the others are on its lists and counts.
const EDGE: &str = "edge";

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RelationVerb {
    Add,
    Remove,
}

pub(super) struct RelationWrite {
    pub relation: Arc<RelationSpec>,
    pub verb: RelationVerb,
}

impl RelationSpec {
    /// Makes an edge that is not there, in both lists and both counts (I2).
    fn make(&self, call: &Call, cx: &ActionContext<'_>, fields: Vec<(&str, Value)>) -> Vec<Step> {
        let (from, to) = self.ends(&call.key);
        let since = cx.clock.now();
        let outward = self.outward.position(&call.tenant, to, since);
        let inward = self.inward.position(&call.tenant, from, since);
        let mut edge = Step::upsert(&self.table, call.key.iter().cloned())
            .label(EDGE)
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

    async fn add(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let fields = contents(&self.fields, &call.input, true);
        // Most edges are new. If this one is not, the store says so, and the next draft looks.
        if cx.attempt == 0 && call.expected.is_none() {
            return Ok(self.change(call, self.make(call, cx, fields), "added"));
        }
        let row = self.row(call, cx).await?;
        self.check_expected(call, row.as_ref())?;
        let since = row.as_ref().map_or(Ok(None), |row| row.get_optional_time(SINCE))?;
        let mut steps = match row.as_ref().zip(since) {
            None => self.make(call, cx, fields),
            Some((row, since)) => {
                let differs = |(name, value): &(&str, Value)| row.get(name) != Some(value);
                let changed: Vec<(&str, Value)> = fields.into_iter().filter(differs).collect();
                if changed.is_empty() {
                    return Ok(Prepared::Unchanged(Answer::row(self.shown(row.to_json()))));
                }
                let edge = Step::update(&self.table, call.key.iter().cloned())
                    .label(EDGE)
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
    async fn remove(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let row = self.row(call, cx).await?;
        self.check_expected(call, row.as_ref())?;
        let found = row.as_ref().map_or(Ok(None), positions)?;
        let Some([outward, inward]) = found else {
            let body = row.map_or_else(|| self.never(call), |row| self.shown(row.to_json()));
            return Ok(Prepared::Unchanged(Answer::row(body)));
        };
        let (from, to) = self.ends(&call.key);
        let mut edge = Step::update(&self.table, call.key.iter().cloned())
            .label(EDGE)
            .guard(column(SINCE).eq(outward.at))
            .set(SINCE, Value::Null)
            .set(OUT_BUCKET, Value::Null)
            .set(IN_BUCKET, Value::Null)
            .set(UPDATED_AT, now());
        for field in &self.fields {
            edge = edge.set(&field.name, Value::Null);
        }
        let lists = self.outward.remove(&call.tenant, from, to, outward);
        let lists = lists.into_iter().chain(self.inward.remove(&call.tenant, to, from, inward));
        let mut steps: Vec<Step> = std::iter::once(edge).chain(lists).collect();
        insist(call, &mut steps);
        Ok(self.change(call, steps, "removed"))
    }

    fn change(&self, call: &Call, steps: Vec<Step>, what: &str) -> Prepared {
        let event = EventTemplate::named(format!("{}.{what}", self.name)).with_row_of(0);
        PlanParts::new(key_text(&call.key), steps, event).into()
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
impl Prepare for RelationWrite {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        match self.verb {
            RelationVerb::Add => self.relation.add(call, cx).await,
            RelationVerb::Remove => self.relation.remove(call, cx).await,
        }
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let relation = &self.relation;
        let what = relation.what(call);
        match (refused.reason, refused.row) {
            // The edge was made, removed or made anew meanwhile: the last intent wins, and this one is later (I3).
            (Reason::Guard { .. }, Some(row)) if refused.label() == EDGE => match call.expected {
                Some(Expected::Version(expected)) if expected != row.version() => {
                    Verdict::Refuse(relation.conflict(call, expected, row))
                }
                _ => Verdict::Retry,
            },
            (Reason::Overflow { .. } | Reason::Null { .. }, _) => refused.standard(&what),
            (Reason::Guard { .. }, _) | (Reason::Absent | Reason::Present, _) => {
                let message = format!("{what} and its lists do not agree: {}", refused.reason);
                Verdict::Refuse(Refusal::new(Code::Internal, message))
            }
        }
    }
}
