//! The sweeper of a machine: fires deadline transitions on rows that are due.

use std::fmt;
use std::sync::Arc;

use statehouse_store::{Plan, Refused, Row, Table, Time};

use super::Machine;
use super::check::BuiltTransition;
use super::part::{Firing, PartUse};
use crate::action::{Code, LastRefusal, Refusal};
use crate::infra::due::{Due, Scanner};

/// Fires the deadline transitions of a machine.
pub struct DeadlineSweeper(Arc<Machine>);

impl fmt::Debug for DeadlineSweeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sweeper({})", self.0.resource)
    }
}

impl Machine {
    /// The worker that fires deadline transitions, if there are any.
    pub fn sweeper(self: &Arc<Machine>) -> Option<Scanner<DeadlineSweeper>> {
        self.transitions.iter().find(|one| one.is_deadline())?;
        let (worker, deadline) = (self.worker.as_ref()?, self.def.deadline()?);
        Some(Scanner::new(worker, deadline.shards, DeadlineSweeper::of(self)))
    }
}

impl Due for DeadlineSweeper {
    fn table(&self) -> &Arc<Table> {
        self.0.def.table()
    }

    fn plan(&self, row: &Row, now: Time, operation: &str) -> Result<Plan, Refusal> {
        self.firing(row)?.plan(row.tenant(), operation, now, None)
    }

    fn plan_if_early(
        &self,
        row: &Row,
        now: Time,
        operation: &str,
        refused: &Refused,
    ) -> Result<Option<Plan>, Refusal> {
        let (firing, tenant) = (self.firing(row)?, row.tenant());
        let last = LastRefusal { label: None, reason: refused.reason.clone(), row: refused.current.clone() };
        // Another case may not depend on how late it is.
        if firing.case_name(tenant, now, Some(&last))? == firing.case_name(tenant, now, None)? {
            return Ok(None);
        }
        firing.plan(tenant, operation, now, Some(&last)).map(Some)
    }
}

impl DeadlineSweeper {
    pub(super) fn of(machine: &Arc<Machine>) -> DeadlineSweeper {
        DeadlineSweeper(machine.clone())
    }

    /// The deadline transition that leaves the state of a row.
    fn firing(&self, row: &Row) -> Result<Firing, Refusal> {
        let machine = &self.0;
        let state = machine.state_of(row)?;
        let leaves = |one: &BuiltTransition| {
            one.is_deadline() && one.cases.iter().any(|case| case.from.iter().any(|from| from == state))
        };
        let found = machine.transitions.iter().position(leaves);
        let index = found.ok_or_else(|| {
            Refusal::new(Code::Internal, format!("no deadline transition leaves {state:?}"))
        })?;
        Ok(PartUse { machine: machine.clone(), index }.on(row))
    }
}
