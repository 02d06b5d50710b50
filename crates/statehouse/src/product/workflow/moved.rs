//! Rows in states that a definition no longer has: what they become when the blueprint is applied.

use std::sync::Arc;

use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::{Entry, EventTemplate, Guard, Plan, PlanError, Row, Step, Table, Value};

use super::{
    AT, ENTERED_AT, FROM, LAST_BY, LAST_OPERATION, LAST_TRANSITION, OPERATION, SEQ, StateChart, TO,
    TRANSITION,
};
use crate::declare::TableDef;
use crate::declare::table::{STATE, UPDATED_AT};
use crate::infra::due;
use crate::resource::{Resource, key_text};

/// The name of the transition in the history, and of the event.
pub(super) const MOVED: &str = "moved";

/// What moves the rows of one workflow.
#[derive(Clone, Debug)]
pub(crate) struct StateMover {
    pub(crate) chart: Arc<StateChart>,
    def: Arc<TableDef>,
    history: Option<Arc<Table>>,
}

impl StateMover {
    /// That of a resource, if it is a workflow.
    pub(crate) fn of(resource: &Resource) -> Option<StateMover> {
        let (chart, def) = (resource.state_chart.clone()?, resource.def.clone()?);
        let history = resource.tables.iter().find(|table| table.name() != def.table().name()).cloned();
        Some(StateMover { chart, def, history })
    }

    /// The table with the rows.
    pub(crate) fn table(&self) -> &Arc<Table> {
        self.def.table()
    }

    /// The state of a row that the definition does not have.
    pub(crate) fn removed_state<'r>(&self, row: &'r Row) -> Option<&'r str> {
        row.text(STATE).filter(|state| !self.chart.states.iter().any(|known| known == state))
    }

    /// What the rows of a removed state become.
    pub(crate) fn target(&self, state: &str) -> Option<&str> {
        self.chart.moved.iter().find(|(old, _)| old == state).map(|(_, new)| new.as_str())
    }

    /// The plan that moves a row. `None` if it is in a state that the definition has, or in one that it does not map.
    pub(crate) fn plan(&self, row: &Row, operation: &str) -> Result<Option<Plan>, PlanError> {
        let Some((from, to)) = self.removed_state(row).and_then(|from| Some((from, self.target(from)?)))
        else {
            return Ok(None);
        };
        let key = row.key().iter().cloned();
        let step = Step::update(self.table(), key.clone())
            .guard(Guard::version(row.version()))
            .set(STATE, to)
            .set(SEQ, column(SEQ).add(1))
            .set(ENTERED_AT, now())
            .set(LAST_TRANSITION, MOVED)
            .set(LAST_BY, Value::Null)
            .set(LAST_OPERATION, operation)
            .set(UPDATED_AT, now());
        let mut steps = vec![self.with_due(step, row, to)];
        if let Some(history) = &self.history {
            let seq = row.int(SEQ).unwrap_or_default().saturating_add(1);
            let entry = Step::insert(history, key.chain([Value::Int(seq)]))
                .set(TRANSITION, MOVED)
                .set(FROM, from)
                .set(TO, to)
                .set(AT, now())
                .set(OPERATION, operation);
            steps.push(entry);
        }
        let name = &self.chart.name;
        let event = EventTemplate::named(format!("{name}.{MOVED}")).with_row_of(0).with(FROM, from);
        let entry = Entry::about(name, key_text(row.key())).event(event);
        Plan::of(row.tenant(), operation).steps(steps).log(entry).without_rows().build().map(Some)
    }

    /// The timer of the state that is entered begins; that of the removed one ends.
    fn with_due(&self, step: Step, row: &Row, to: &str) -> Step {
        let Some(deadline) = self.def.deadline() else { return step };
        match self.chart.timer_of(to).and_then(|timer| timer.after) {
            Some(after) => {
                let key = key_text(row.key());
                let shard = due::shard_of(row.tenant(), &self.chart.name, &key, deadline.shards);
                due::set(step, shard, now_plus(after))
            }
            None => due::clear(step),
        }
    }
}
