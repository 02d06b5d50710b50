//! Parts: the further rows that a plan changes. A part on a table with a machine is a transition of that machine.

use std::fmt;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::{Row, Step, Value};

use super::Machine;
use super::transition::DeclaredName;
use crate::action::PlanParts;

/// A transition of a machine that plans of other rows, or workers, fire. It is found at declaration, so that a name
/// which does not exist is reported there.
#[derive(Clone)]
pub struct PartUse {
    pub(super) machine: Arc<Machine>,
    pub(super) index: usize,
}

impl PartUse {
    /// Fires it on the row with this key.
    pub fn at(&self, key: impl IntoIterator<Item = Value>) -> Firing {
        Firing {
            part: self.clone(),
            case: None,
            key: key.into_iter().collect(),
            row: None,
            binds: Vec::new(),
            data: Vec::new(),
            on_refused: "",
        }
    }

    /// Fires it on a row that was read. Its columns are shown to the functions of the transition.
    pub fn on(&self, row: &Row) -> Firing {
        Firing { row: Some(row.clone()), ..self.at(row.key().iter().cloned()) }
    }
}

impl fmt::Debug for PartUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.machine.label_of(self.index))
    }
}

/// One firing of a part.
#[derive(Clone, Debug)]
pub struct Firing {
    pub(super) part: PartUse,
    pub(super) case: Option<DeclaredName>,
    pub(super) key: Vec<Value>,
    pub(super) row: Option<Row>,
    pub(super) binds: Vec<(DeclaredName, Value)>,
    pub(super) data: Vec<(DeclaredName, Json)>,
    pub(super) on_refused: &'static str,
}

/// The end of the label of a prepared step whose refusal is told to the caller: a row that the plan inserts is there already.
pub const TOLD: &str = "#told";

/// The end of the label of a step whose refusal is not told to the caller.
pub(super) const RETRIED: &str = "#retry";

impl Firing {
    /// One of several cases. Without it, the `pick` of the transition chooses.
    #[must_use]
    pub fn case(mut self, case: impl Into<DeclaredName>) -> Firing {
        self.case = Some(case.into());
        self
    }

    /// A value for `bind(NAME)`.
    #[must_use]
    pub fn bind(mut self, name: impl Into<DeclaredName>, value: impl Into<Value>) -> Firing {
        self.binds.push((name.into(), value.into()));
        self
    }

    /// A field of its event.
    #[must_use]
    pub fn event_field(mut self, field: impl Into<DeclaredName>, value: impl Into<Json>) -> Firing {
        self.data.push((field.into(), value.into()));
        self
    }

    /// If it is refused, the call is prepared again: the caller did not name this row.
    #[must_use]
    pub fn or_retry(mut self) -> Firing {
        self.on_refused = RETRIED;
        self
    }
}

/// Further rows that a plan changes.
#[derive(Clone, Debug)]
pub enum MachinePart {
    /// A transition of another machine, with its own parts and event.
    Transition(Firing),
    /// A step on a table without a machine.
    Step(Step),
    /// What another resource has prepared, as an effect to send or a job to enqueue. Its event is about that resource's row.
    Prepared {
        /// The resource.
        resource: String,
        /// Its steps, event and wakeups.
        parts: PlanParts,
    },
}

impl From<Firing> for MachinePart {
    fn from(firing: Firing) -> MachinePart {
        MachinePart::Transition(firing)
    }
}

impl From<Step> for MachinePart {
    fn from(step: Step) -> MachinePart {
        MachinePart::Step(step)
    }
}
