//! Settlers: code that owns the rows an effect was sent for, and changes them in the plan that records the effect's outcome.
//!
//! A worker sends an effect, gets a response and records it in the effect's row. Without a settler the rows that the effect
//! is sent for would need a second plan, and a process that dies between the two would leave them behind. A [`Settler`]
//! interprets the response and returns the further parts of the one plan.
//!
//! **Invariants.**
//! - S1. An outcome that is recorded is settled, in one plan, or its row has `unsettled_at` and is due. *The settler's parts are
//!   steps of the plan that moves the effect to `DELIVERED`, `PARKED` or `UNCERTAIN`, also by hand ([`super::write`]).*
//! - S2. An outcome is settled once. *The steps are in one plan with the effect's own, whose guard is that of the sender (I2 of
//!   [`super`]); an outcome that was recorded without them is settled under the guard `version = the one that was read`.*
//! - S3. A settler cannot lose an outcome. *If it refuses, or its steps are refused several times, the outcome is recorded alone
//!   with `unsettled_at`; the worker settles it later from the stored answer.*

use std::fmt;

use async_trait::async_trait;
use statehouse_store::{Clock, Row, Store};

use crate::action::Refusal;
use crate::declare::machine::MachinePart;
use crate::egress::TargetResponse;

/// What a response means to a settler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpretation {
    /// What the status code says ([`super`]).
    ByStatus,
    /// The target has answered definitely. What it said is for the settler.
    Definite,
    /// The target does not have what it is asked about, and will not act on what was sent before.
    NotApplied,
    /// The response leaves open what became of it: the target is asked later. The text is a stable reason.
    Open(&'static str),
}

/// Where a response comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// The request itself.
    Request,
    /// The question what became of it.
    StatusQuery,
}

/// What is known of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EffectEnd {
    /// It was applied, or definitely answered.
    Delivered,
    /// It was certainly not applied, and is not sent again by itself.
    Parked,
    /// It may have been applied.
    Uncertain,
}

/// An outcome that is being recorded.
#[derive(Clone, Copy)]
pub struct Settlement<'a> {
    /// The row of the effect as it was before.
    pub effect: &'a Row,
    /// What is known now.
    pub end: EffectEnd,
    /// The response that says so; none if there was none, or a person found out.
    pub answer: Option<&'a TargetResponse>,
    /// The stable reason that the effect's row gets.
    pub reason: Option<&'a str>,
    /// For strong reads.
    pub store: &'a dyn Store,
    /// The clock of this process, for hints.
    pub clock: &'a dyn Clock,
}

/// Owns the rows that an effect was sent for.
#[async_trait]
pub trait Settler: Send + Sync + fmt::Debug {
    /// What a response means. An error leaves the outcome open, and the target is asked again.
    async fn interpret(
        &self,
        effect: &Row,
        exchange: ExchangeKind,
        answer: &TargetResponse,
        store: &dyn Store,
    ) -> Result<Interpretation, Refusal>;

    /// The address where the target is asked about this effect, if it differs from row to row.
    fn status_url(&self, _effect: &Row) -> Option<String> {
        None
    }

    /// The further parts of the plan that records an outcome. It is called again if one of their steps is refused, because a row
    /// has changed since it was read.
    async fn settle(&self, settlement: &Settlement<'_>) -> Result<Vec<MachinePart>, Refusal>;
}
