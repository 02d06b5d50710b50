//! What came of a plan.

use std::fmt;

use crate::guard::Guard;
use crate::label::Label;
use crate::log::{OperationStatus, Record};
use crate::plan::Plan;
use crate::row::Row;

/// What came of a commit. Each of these is certain; where nothing is certain the commit returns
/// [`crate::StoreError::OutcomeUnknown`].
#[derive(Clone, Debug, PartialEq)]
pub enum Commit {
    /// All steps were applied, and they are durable.
    Applied(Applied),
    /// A step's condition failed, and nothing was changed.
    Refused(Refused),
    /// The operation id was fenced by [`crate::Store::resolve`]: no plan with a log entry was or will be applied under
    /// it. (A plan without an entry does not take part: it neither remembers nor asks.)
    Fenced,
}

impl Commit {
    /// The outcome of a commit whose operation id has a record already.
    pub fn of_record(record: Record) -> Commit {
        match record.status {
            OperationStatus::Aborted => Commit::Fenced,
            OperationStatus::Applied => {
                Commit::Applied(Applied { record: Some(record), rows: Vec::new(), repeated: true })
            }
        }
    }

    /// The applied outcome, if it is one.
    pub fn applied(self) -> Option<Applied> {
        if let Commit::Applied(applied) = self { Some(applied) } else { None }
    }

    /// The refusal, if it is one.
    pub fn refused(self) -> Option<Refused> {
        if let Commit::Refused(refused) = self { Some(refused) } else { None }
    }
}

/// A plan that was applied, now or, under the same operation id, before.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// What it left in the log; `None` for a plan without an entry. An answer that is made from this alone is the
    /// same for the first commit and for every repetition.
    pub record: Option<Record>,
    /// The row of each step after the plan: as a put left it, as an assert found it, `None` where there is none.
    /// Empty when `repeated`, because what the rows were then is not kept, and when the plan does without them.
    pub rows: Vec<Option<Row>>,
    /// Whether the operation had been applied by an earlier commit.
    pub repeated: bool,
}

/// A plan that was refused. Final: the same plan on the same rows is refused again.
#[derive(Clone, Debug, PartialEq)]
pub struct Refused {
    /// The first step, from 0 and in the plan's order, whose condition failed.
    pub step: usize,
    /// Which condition.
    pub reason: Reason,
    /// The row as it was when the condition failed.
    pub current: Option<Row>,
}

/// Why a step was refused.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// The row had to be there, and is not.
    Absent,
    /// The row had to be missing, and is there.
    Present,
    /// A conjunct of the guard does not hold.
    Guard {
        /// Which one, from 0, in the order of [`Guard::conjuncts`].
        conjunct: usize,
        /// The conjunct itself.
        guard: Box<Guard>,
    },
    /// The new content of a column lies outside its type's range.
    Overflow {
        /// The column.
        column: String,
    },
    /// A required column would become null.
    Null {
        /// The column.
        column: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Absent => f.write_str("the row does not exist"),
            Reason::Present => f.write_str("the row exists already"),
            Reason::Guard { guard, .. } => write!(f, "`{guard}` does not hold"),
            Reason::Overflow { column } => write!(f, "the new content of {column} is out of range"),
            Reason::Null { column } => write!(f, "{column} is required and would become null"),
        }
    }
}

impl Refused {
    /// One sentence: which row of the plan, and why.
    pub fn describe(&self, plan: &Plan) -> String {
        match plan.addresses().nth(self.step) {
            Some(address) => format!("step {} on {address}: {}", self.step, self.reason),
            None => format!("step {}: {}", self.step, self.reason),
        }
    }

    /// The label of the refused step, if the plan's author gave it one.
    pub fn label<'p>(&self, plan: &'p Plan) -> Option<&'p Label> {
        plan.steps().get(self.step)?.label.as_ref()
    }

    /// The conjunct that failed, if the guard was the reason.
    pub fn guard(&self) -> Option<&Guard> {
        if let Reason::Guard { guard, .. } = &self.reason { Some(guard) } else { None }
    }
}

/// The fate of an operation whose commit did not say.
#[derive(Clone, Debug, PartialEq)]
pub enum Resolution {
    /// It was applied, and this is its record.
    Applied(Record),
    /// It was not applied and never will be.
    Aborted,
}

impl Resolution {
    /// The resolution that a record gives.
    pub fn of_record(record: Record) -> Resolution {
        match record.status {
            OperationStatus::Aborted => Resolution::Aborted,
            OperationStatus::Applied => Resolution::Applied(record),
        }
    }
}
