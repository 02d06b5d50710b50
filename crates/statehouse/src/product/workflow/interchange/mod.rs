//! Charts in other forms: XState v5 JSON, both ways, and Mermaid. Pure.

mod import;
mod json_place;
mod mermaid;
mod xstate;

pub use import::{ImportProblem, import_xstate};

use super::chart::StateChart;

impl StateChart {
    /// The chart as an XState v5 machine.
    pub fn to_xstate(&self) -> serde_json::Value {
        xstate::export(self)
    }

    /// The chart as a Mermaid state diagram.
    pub fn to_mermaid(&self) -> String {
        mermaid::export(self)
    }
}

/// The type of the guard that has a condition of a blueprint.
const CONDITION: &str = "condition";
/// The types of the actions that have what a transition does besides.
const SET: &str = "set";
const SEND: &str = "send";
const ENQUEUE: &str = "enqueue";

#[cfg(test)]
mod tests;
