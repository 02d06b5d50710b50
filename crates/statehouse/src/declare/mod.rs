//! The declaration kit: what an archetype's author writes, and what is derived from it.
//!
//! A `declare` function reads its settings ([`SettingsReader`]), declares tables ([`TableSpec`]) and resources with their
//! actions ([`ResourceSpec`], [`ActionSpec`]), and hands them to [`Declare`]. Settings are read with default and range in one
//! call; response forms come from the columns of the table; an action states only what differs from its kind.

pub mod action;
pub mod action_call;
pub mod combine;
pub mod indexes;
pub mod limits;
pub mod machine;
pub mod read;
pub mod resource;
pub mod row_constraints;
pub mod rule;
pub mod settings;
pub mod table;
pub mod template;

use std::sync::Arc;

use statehouse_store::table::TableBuilder;
use statehouse_store::{SchemaError, Table};

pub use action::ActionSpec;
pub use limits::{FieldLimits, TextPattern};
pub use machine::{Machine, MachineSpec};
pub use read::{IndexList, RowRead};
pub use resource::ResourceSpec;
pub use row_constraints::RowConstraints;
pub use settings::SettingsReader;
pub use table::{TableDef, TableSpec};

use indexes::{DeclaredIndexes, INDEXES};
use machine::{MachineError, PartUse};

use crate::allow;
use crate::allow::declare::ALLOW;
use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::blueprint::{Blueprint, Thing};
use crate::resource::{Resource, stands_on_others};

/// Declares groups of the log, which deliver events of other resources.
const GROUP: &str = "log";

/// One thing of a blueprint while its archetype declares it.
#[derive(Debug)]
pub struct Declare<'a> {
    thing: &'a Thing,
    /// The whole file, and what was declared before, for archetypes that depend on others.
    others: Option<(&'a Blueprint, &'a [Resource])>,
    settings: SettingsReader<'a>,
    resources: Vec<Resource>,
    machines: Vec<Arc<Machine>>,
    indexes: DeclaredIndexes,
}

impl<'a> Declare<'a> {
    /// Declares a thing. Returns nothing if there were problems, which are added to the list: settings that do not fit,
    /// unknown settings, tables that cannot be.
    pub fn run(
        thing: &'a Thing,
        others: Option<(&'a Blueprint, &'a [Resource])>,
        problems: &'a mut Problems,
        declare: impl FnOnce(&mut Declare<'a>) -> Option<()>,
    ) -> Vec<Resource> {
        let before = problems.len();
        let mut settings = thing.settings.clone();
        let allow = settings.node(ALLOW);
        let indexes = DeclaredIndexes::read(settings.node(INDEXES), problems);
        let settings = SettingsReader::new(settings, problems);
        let mut declaring =
            Declare { thing, others, settings, resources: Vec::new(), machines: Vec::new(), indexes };
        let done = declare(&mut declaring);
        declaring.check_parts();
        let Declare { settings, mut resources, indexes, .. } = declaring;
        let (_, problems) = settings.finish();
        if problems.len() == before {
            indexes.finish(&thing.name, problems);
        }
        if done.is_none() && problems.len() == before {
            let title = format!("`{}.{}` could not be declared", thing.keyword, thing.name);
            problems.add(BlueprintProblem::at(thing.settings.span(), title));
        }
        for resource in &mut resources {
            resource.is_derived = stands_on_others(thing) || thing.keyword == GROUP;
        }
        if let Some(allow) = allow
            && problems.len() == before
        {
            allow::declare::declare(&thing.name, allow, &mut resources, problems);
        }
        if problems.len() > before { Vec::new() } else { resources }
    }

    /// Reads what a thing declares without declaring its resources, for archetypes that depend on it. `None` if there were
    /// problems.
    pub fn read<T>(
        thing: &'a Thing,
        problems: &'a mut Problems,
        read: impl FnOnce(&mut Declare<'a>) -> Option<T>,
    ) -> Option<T> {
        let before = problems.len();
        let mut settings = thing.settings.clone();
        settings.node(ALLOW);
        let indexes = DeclaredIndexes::read(settings.node(INDEXES), problems);
        let settings = SettingsReader::new(settings, problems);
        let (resources, machines) = (Vec::new(), Vec::new());
        let mut declaring = Declare { thing, others: None, settings, resources, machines, indexes };
        let value = read(&mut declaring);
        let (_, problems) = declaring.settings.finish();
        value.filter(|_| problems.len() == before)
    }

    /// The name of the thing: `profile`.
    pub fn name(&self) -> &'a str {
        &self.thing.name
    }

    /// Its settings.
    pub fn settings(&mut self) -> &mut SettingsReader<'a> {
        &mut self.settings
    }

    /// The whole blueprint, and the resources that were declared before this thing.
    pub fn others(&self) -> Option<(&'a Blueprint, &'a [Resource])> {
        self.others
    }

    /// Builds a table, or reports why it cannot be.
    pub fn build(&mut self, spec: TableSpec) -> Option<Arc<TableDef>> {
        if self.settings.clashes(&spec.clashes()) {
            return None;
        }
        let spec = self.indexes.place(spec, &mut self.settings);
        self.built(spec.build())
    }

    /// Builds a table whose rows are not shown to callers, or reports why it cannot be.
    pub fn build_internal(&mut self, builder: TableBuilder) -> Option<Arc<Table>> {
        if self.settings.clashes(&builder.clashes()) {
            return None;
        }
        self.built(builder.build())
    }

    fn built<T>(&mut self, built: Result<T, SchemaError>) -> Option<T> {
        let Thing { keyword, name, .. } = self.thing;
        built.map_err(|error| self.settings.whole_problem(format!("`{keyword}.{name}`: {}", error.why))).ok()
    }

    /// Builds a machine, or reports why it cannot be.
    pub fn machine(&mut self, spec: MachineSpec) -> Option<Arc<Machine>> {
        let machine = spec.build().map_err(|error| self.machine_problem(&error)).ok()?;
        self.machines.push(machine.clone());
        Some(machine)
    }

    /// A transition of a machine that other code fires, or reports that there is none.
    pub fn part(&mut self, machine: &Arc<Machine>, name: &str) -> Option<PartUse> {
        machine.part(name).map_err(|error| self.machine_problem(&error)).ok()
    }

    fn machine_problem(&mut self, error: &MachineError) {
        let Thing { keyword, name, .. } = self.thing;
        self.settings.whole_problem(format!("`{keyword}.{name}`: {error}"));
    }

    /// Reports transitions that nothing can fire.
    fn check_parts(&mut self) {
        for machine in std::mem::take(&mut self.machines) {
            for unused in machine.unused_parts() {
                let why = format!("nothing fires `{unused}`");
                self.machine_problem(&MachineError { resource: machine.resource().to_owned(), why });
            }
        }
    }

    /// Adds a resource.
    pub fn resource(&mut self, resource: ResourceSpec) {
        let mut resource = resource.build(self.thing.archetype);
        self.indexes.serve(&mut resource, self.thing.keyword, &self.thing.name);
        self.resources.push(resource);
    }
}
