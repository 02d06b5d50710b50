//! State machines as data: the transitions of one table's rows, and what is derived from them.
//!
//! A [`Machine`] declares the states of a row, the transitions between them, the rules under which each may happen, what
//! each assigns and which other rows change in the same plan. Functions in a declaration are pure and return data. From
//! the declaration come:
//!
//! - the actions, with routes, inputs, refusal codes and the calls that lead to them ([`Machine::actions`]);
//! - the plan of each call ([`crate::action::Prepare`]) and the meaning of each refusal;
//! - the due time of a row, which is set where it enters a state with a deadline, moved where the deadline's column is
//!   assigned, and cleared where it leaves; the sweeper that fires deadline transitions; the wakeups of that sweeper;
//! - the graph ([`Machine::graph`]): state diagram, action table, standard drills, and the check that the log of a row is a
//!   path in the graph.
//!
//! ```
//! use statehouse::Code;
//! use statehouse::declare::machine::{Machine, Transition, absent, from};
//! use statehouse::declare::rule::{col, now};
//! use statehouse::declare::{ActionSpec, TableSpec};
//! use statehouse_store::Type;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let lots = TableSpec::named("lots").partition("lot_id", Type::Text).states(&["OPEN", "SOLD", "OVER"]);
//! let lots = lots.time("ends_at").updated_at().deadline(&["OPEN"], "ends_at", 4).build()?;
//! let ends_at = statehouse::form::Property::required("ends_at", statehouse::form::Form::Value(Type::Time), "its end");
//! let machine = Machine::of("lot", &lots)
//!     .transition(Transition::call(
//!         ActionSpec::put("open", "Open a {name}.").takes([ends_at]),
//!         absent().to("OPEN").set_given(["ends_at"]),
//!     ))
//!     .transition(Transition::call(
//!         ActionSpec::transition("buy", "Buy a {name}."),
//!         from(["OPEN"]).to("SOLD").event("sold").rule("in time", col("ends_at").gt(now()), Code::Expired, "{what} is over"),
//!     ))
//!     .transition(Transition::deadline("close", from(["OPEN"]).to("OVER")))
//!     .build()?;
//! assert_eq!(machine.graph().edges.len(), 3);
//! # Ok(())
//! # }
//! ```
//!
//! # The step of a transition
//!
//! The conjuncts of the guard are, in this order: the fence of a row that was read, the state, the version that the caller
//! has seen (`If-Match`), the deadline, the rules. A transition that reads its row under a fence judges the state, the version and
//! rules without a clock in memory and does not send them: the fence implies them. The step assigns the declared columns, then
//! `state`, `updated_at` and the due columns. Its label is the name of the transition (and case), for a part with
//! the name of the resource before it; by the label and the shape of the failed conjunct a refusal finds its rule.
//!
//! # What is not a transition
//!
//! Reads, and writes that depend on the clock of this process, on ranges of rows or on other systems, are written by hand next
//! to the machine, as [`crate::action::Prepare`]. They fire transitions of machines with [`Machine::part`] and
//! [`Firing`], and declare their edges with [`Transition::by_hand`], so that the graph is complete.

mod actions;
mod bind;
mod check;
#[cfg(test)]
mod declaration_tests;
mod graph;
mod part;
mod prepare;
mod refuse;
mod scene;
#[cfg(test)]
mod specimens;
mod sweep;
#[cfg(test)]
mod tests;
mod transition;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use graph::{Edge, EdgeKind, Graph};
pub use part::{Firing, MachinePart, PartUse, TOLD};
pub use prepare::{add_parts, part_verdict};
pub use scene::{Gather, Gathered, Scene};
pub use sweep::DeadlineSweeper;
pub use transition::{
    Assign, DeclaredName, OnRefused, PartsFn, PresentRows, RowOrigin, RowReading, RuleSpec, StateRefusal,
    Transition, TransitionCase, TransitionCases, TransitionTarget, absent, absent_or, always, any,
    difference, from, null, sum,
};

use super::table::TableDef;
use check::BuiltTransition;

/// The transitions of one table's rows, checked.
pub struct Machine {
    resource: String,
    def: Arc<TableDef>,
    /// The worker to wake when a row becomes due.
    worker: Option<String>,
    /// Actions of other resources that come before all paths of the graph.
    after: Vec<String>,
    transitions: Vec<BuiltTransition>,
    /// Which transitions other code has asked for.
    used: Vec<AtomicBool>,
}

/// A machine being declared.
pub struct MachineSpec {
    resource: String,
    def: Arc<TableDef>,
    worker: Option<String>,
    after: Vec<String>,
    transitions: Vec<Transition>,
}

/// A declaration that contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{resource}`: {why}")]
pub struct MachineError {
    /// The resource.
    pub resource: String,
    /// What is wrong.
    pub why: String,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Machine({})", self.resource)
    }
}

impl Machine {
    /// Starts the machine of a resource, whose rows are those of a table.
    pub fn of(resource: impl Into<String>, def: &Arc<TableDef>) -> MachineSpec {
        MachineSpec {
            resource: resource.into(),
            def: def.clone(),
            worker: None,
            after: Vec::new(),
            transitions: Vec::new(),
        }
    }

    /// The resource.
    pub fn resource(&self) -> &str {
        &self.resource
    }

    /// The table.
    pub fn def(&self) -> &Arc<TableDef> {
        &self.def
    }

    /// A transition, for code that fires it: another machine, a worker, an action by hand.
    pub fn part(self: &Arc<Machine>, name: &str) -> Result<PartUse, MachineError> {
        let Some(index) = self.transitions.iter().position(|one| one.decl.name == name) else {
            let names: Vec<&str> = self.transitions.iter().map(|one| &*one.decl.name).collect();
            let why = format!("there is no transition `{name}`; it has {}", names.join(", "));
            return Err(MachineError { resource: self.resource.clone(), why });
        };
        if let Some(used) = self.used.get(index) {
            used.store(true, Ordering::Relaxed);
        }
        Ok(PartUse { machine: self.clone(), index })
    }

    /// Transitions that only other code can fire and that no code has asked for.
    pub fn unused_parts(&self) -> Vec<&str> {
        let parts = self.transitions.iter().zip(&self.used);
        let unused = parts.filter(|(one, used)| one.is_part() && !used.load(Ordering::Relaxed));
        unused.map(|(one, _)| &*one.decl.name).collect()
    }

    /// What a row is called in messages.
    fn what<'k>(&self, key: impl IntoIterator<Item = &'k statehouse_store::Value>) -> String {
        format!("{} {}", self.resource, crate::resource::key_text(key))
    }

    fn label_of(&self, index: usize) -> String {
        let name = self.transitions.get(index).map_or("", |one| &one.decl.name);
        format!("{}.{name}", self.resource)
    }
}

impl MachineSpec {
    /// One more transition.
    #[must_use]
    pub fn transition(mut self, transition: Transition) -> MachineSpec {
        self.transitions.push(transition);
        self
    }

    /// The worker that acts on due rows, if it is not the sweeper of this machine.
    #[must_use]
    pub fn worker(mut self, worker: impl Into<String>) -> MachineSpec {
        self.worker = Some(worker.into());
        self
    }

    /// Actions of other resources, by their full names, without which no row of this one can be created.
    #[must_use]
    pub fn after<'n>(mut self, actions: impl IntoIterator<Item = &'n str>) -> MachineSpec {
        self.after = actions.into_iter().map(str::to_owned).collect();
        self
    }
}
