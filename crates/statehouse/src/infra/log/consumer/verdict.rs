//! What the outcome of a commit means for a run.

use statehouse_store::{Plan, Refused, Step};

use super::super::StepJudge;
use crate::action::{LastRefusal, RefusedStep, Verdict};

/// What a commit means for the run.
pub(super) enum CommitVerdict {
    /// It is done.
    Done,
    /// The row of progress is not what was read.
    Overtaken,
    /// It was done before, under the same operation id: whether the progress past it was written then has to be read.
    Repeated,
    /// The handler's own steps do not fit, for this reason.
    Unfit(String, Option<Box<LastRefusal>>),
    /// It can never be written.
    Never(String),
}

/// What a refused step of an effect means, as its judge says.
pub(super) fn unfit(judge: &StepJudge, step: &Step, refused: Refused, plan: &Plan) -> CommitVerdict {
    let said = refused.describe(plan);
    let Refused { step: at, reason, current } = refused;
    // The first step of the plan is that of the progress.
    let refused = RefusedStep { index: at.saturating_sub(1), step, reason: &reason, row: current.as_ref() };
    match (judge.0)(&refused) {
        Verdict::Refuse(refusal) => CommitVerdict::Never(refusal.to_string()),
        Verdict::Retry | Verdict::Wait => CommitVerdict::Unfit(
            said,
            Some(Box::new(LastRefusal { label: step.label.clone(), reason, row: current })),
        ),
    }
}
