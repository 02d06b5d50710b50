//! Resources as archetypes declare them.

use std::sync::Arc;

use statehouse_store::{Table, Type};

use super::action::ActionSpec;
use super::machine::Machine;
use super::row_constraints::RowConstraints;
use super::table::TableDef;
use crate::atlas::AtlasEntry;
use crate::blueprint::problem::BlueprintProblem;
use crate::code::Code;
use crate::form::{Form, Property};
use crate::house::{IF, RowCheck, condition_property};
use crate::infra::effect::Outbox;
use crate::infra::log::{DeclaredGroup, RecordHandler};
use crate::infra::projection::Projector;
use crate::product::schedule::JobQueue;
use crate::product::workflow::StateChart;
use crate::resource::{Consuming, EventSource, Resource};
use crate::view_source::{SourceRows, ViewSource};
use crate::worker::Worker;

/// A resource being declared: by default over one table, whose rows are in every event of their writes.
pub struct ResourceSpec {
    name: String,
    key: Vec<(String, Type)>,
    def: Option<Arc<TableDef>>,
    tables: Vec<Arc<Table>>,
    actions: Vec<ActionSpec>,
    machine: Option<Arc<Machine>>,
    job_queue: Option<JobQueue>,
    state_chart: Option<StateChart>,
    workers: Vec<Arc<dyn Worker>>,
    consumers: Vec<Consuming>,
    telling: ViewSource,
    events: Vec<EventSource>,
    constraints: RowConstraints,
    person: Option<String>,
    warnings: Vec<BlueprintProblem>,
    outbox: Option<Outbox>,
}

impl ResourceSpec {
    /// A resource over a table. Its key is the table's.
    pub fn of(name: &str, def: &Arc<TableDef>) -> ResourceSpec {
        let table = def.table();
        let key = table.key_columns().iter().map(|column| (column.name.clone(), column.kind)).collect();
        let telling = ViewSource::Rows(Box::new(SourceRows::with_row(name, table)));
        ResourceSpec {
            def: Some(def.clone()),
            tables: vec![table.clone()],
            ..ResourceSpec::without_rows(name, key, telling)
        }
    }

    /// A resource whose actions do not answer with rows of one table.
    pub fn without_rows(name: &str, key: Vec<(String, Type)>, telling: ViewSource) -> ResourceSpec {
        ResourceSpec {
            name: name.to_owned(),
            key,
            def: None,
            tables: Vec::new(),
            actions: Vec::new(),
            machine: None,
            job_queue: None,
            state_chart: None,
            workers: Vec::new(),
            consumers: Vec::new(),
            telling,
            events: Vec::new(),
            constraints: RowConstraints::default(),
            person: None,
            warnings: Vec::new(),
            outbox: None,
        }
    }

    /// The column that says whose row it is.
    #[must_use]
    pub fn person(mut self, column: Option<String>) -> ResourceSpec {
        self.person = column;
        self
    }

    /// How other resources send it in their plans, if it is an effect.
    #[must_use]
    pub fn outbox(mut self, outbox: Outbox) -> ResourceSpec {
        self.outbox = Some(outbox);
        self
    }

    /// Another key than the table's.
    #[must_use]
    pub fn key(mut self, key: Vec<(String, Type)>) -> ResourceSpec {
        self.key = key;
        self
    }

    /// One more table that it needs.
    #[must_use]
    pub fn table(mut self, table: &Arc<Table>) -> ResourceSpec {
        self.tables.push(table.clone());
        self
    }

    /// Constraints between its rows, with the tables that they need.
    #[must_use]
    pub fn constrained(mut self, constraints: RowConstraints) -> ResourceSpec {
        self.tables.extend(constraints.tables().cloned());
        self.constraints = constraints;
        self
    }

    /// One more action.
    #[must_use]
    pub fn action(mut self, action: ActionSpec) -> ResourceSpec {
        self.actions.push(action);
        self
    }

    /// More actions.
    #[must_use]
    pub fn actions(mut self, actions: impl IntoIterator<Item = ActionSpec>) -> ResourceSpec {
        self.actions.extend(actions);
        self
    }

    /// The machine of its rows: adds the actions and the sweeper.
    #[must_use]
    pub fn machine(mut self, machine: &Arc<Machine>) -> ResourceSpec {
        self.machine = Some(machine.clone());
        let sweeper = machine.sweeper().map(|sweeper| Arc::new(sweeper) as Arc<dyn Worker>);
        self.workers.extend(sweeper);
        self.actions(machine.actions())
    }

    /// How plans of other resources enqueue its jobs.
    #[must_use]
    pub fn job_queue(mut self, queue: JobQueue) -> ResourceSpec {
        self.job_queue = Some(queue);
        self
    }

    /// The states and transitions of a workflow.
    #[must_use]
    pub fn state_chart(mut self, chart: StateChart) -> ResourceSpec {
        self.state_chart = Some(chart);
        self
    }

    /// What is probably not meant in the declaration.
    #[must_use]
    pub fn warnings(mut self, warnings: Vec<BlueprintProblem>) -> ResourceSpec {
        self.warnings.extend(warnings);
        self
    }

    /// Background work.
    #[must_use]
    pub fn worker(mut self, worker: impl Worker + 'static) -> ResourceSpec {
        self.workers.push(Arc::new(worker));
        self
    }

    /// A group that reads the log.
    #[must_use]
    pub fn group(mut self, handler: Arc<dyn RecordHandler>) -> ResourceSpec {
        self.consumers.push(Consuming::Group(handler));
        self
    }

    /// Rows that follow from the log.
    #[must_use]
    pub fn projection(mut self, projector: Arc<dyn Projector>) -> ResourceSpec {
        self.consumers.push(Consuming::Projection(projector));
        self
    }

    /// Has the trimmer keep what programs outside have yet to read of the log.
    #[must_use]
    pub fn declared_group(mut self, group: DeclaredGroup) -> ResourceSpec {
        self.consumers.push(Consuming::Declared(group));
        self
    }

    /// How views can follow its rows, if not by the row in every event.
    #[must_use]
    pub fn telling(mut self, telling: ViewSource) -> ResourceSpec {
        self.telling = telling;
        self
    }

    /// How views can follow its rows, with what the default does not say.
    #[must_use]
    pub fn source_rows(mut self, source_rows: SourceRows) -> ResourceSpec {
        self.telling = ViewSource::Rows(Box::new(source_rows));
        self
    }

    /// Events that it leaves in the log besides those of its machine, each with the actions that leave it: by their names, or
    /// by their full names if they are actions of another resource.
    #[must_use]
    pub fn events(mut self, events: &[(&str, &[&str])]) -> ResourceSpec {
        for (event, actions) in events {
            let full = |action: &&str| match action.contains('.') {
                true => (*action).to_owned(),
                false => format!("{}.{action}", self.name),
            };
            self.events
                .push(EventSource { name: (*event).to_owned(), by: actions.iter().map(full).collect() });
        }
        self
    }

    pub(super) fn build(self, archetype: &'static AtlasEntry) -> Resource {
        let (name, def) = (self.name, self.def);
        let mut actions = self.actions;
        if let Some(check) = check(&name, def.as_ref(), &self.key, &actions) {
            actions.push(check);
        }
        let actions = actions.into_iter();
        let mut events = self.events;
        if let Some(machine) = &self.machine {
            add_machine_events(machine, &mut events);
        }
        Resource {
            archetype,
            key: self.key,
            allow: None,
            is_derived: false,
            indexes: Vec::new(),
            hidden: def.as_ref().map(|def| def.hidden().to_vec()).unwrap_or_default(),
            actions: actions.filter_map(|action| action.build(&name, def.as_deref())).collect(),
            tables: self.tables,
            machine: self.machine,
            job_queue: self.job_queue,
            state_chart: self.state_chart.map(Arc::new),
            workers: self.workers,
            consumers: self.consumers,
            view_source: self.telling,
            constraints: self.constraints,
            person: self.person,
            warnings: self.warnings,
            outbox: self.outbox,
            def,
            events,
            name,
        }
    }
}

/// The assertion for batches that every resource over one table has, unless it declares its own.
fn check(
    name: &str,
    def: Option<&Arc<TableDef>>,
    key: &[(String, Type)],
    actions: &[ActionSpec],
) -> Option<ActionSpec> {
    let def = def?;
    let has_key =
        def.table().key_columns().iter().map(|column| &column.name).eq(key.iter().map(|(name, _)| name));
    let read = actions.iter().find(|action| action.is_row_read())?;
    if !has_key || actions.iter().any(|action| action.name() == CHECK) {
        return None;
    }
    let condition = Property { required: true, ..condition_property() };
    let summary = "Write nothing, and be refused unless a condition holds for the {name}: for a batch.";
    let answer =
        Form::Object(vec![Property::required(IF, Form::Value(Type::Text), "the condition, which holds")]);
    let check = RowCheck { resource: name.to_owned(), def: def.clone() };
    let deleted = def.live_guard().map(|_| Code::Deleted);
    let action = ActionSpec::check(CHECK, summary)
        .takes([condition.example("version >= 1".into())])
        .gives(answer)
        .after(read.comes_after().iter().map(String::as_str))
        .writes(check);
    Some(deleted.into_iter().fold(action, ActionSpec::code))
}

const CHECK: &str = "check";

/// Adds the events of a machine's transitions, each with the transitions that leave it. What is no action fires none of them
/// by itself, and does no harm in the list.
fn add_machine_events(machine: &Machine, events: &mut Vec<EventSource>) {
    let graph = machine.graph();
    for edge in &graph.edges {
        let Some(name) = &edge.event else { continue };
        let by = format!("{}.{}", graph.resource, edge.transition);
        match events.iter_mut().find(|known| known.name == *name) {
            Some(known) if !known.by.contains(&by) => known.by.push(by),
            Some(_) => {}
            None => events.push(EventSource { name: name.clone(), by: vec![by] }),
        }
    }
}
