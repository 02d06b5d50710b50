//! The declaration kit: what an archetype's author writes, and what is derived from it.
//!
//! A `declare` function reads its settings ([`SettingsReader`]), declares tables ([`TableSpec`]) and resources with their
//! actions ([`ResourceSpec`], [`ActionSpec`]), and hands them to [`Declare`]. Settings are read with default and range in one
//! call; response forms come from the columns of the table; an action states only what differs from its kind.

pub mod action;
pub mod read;
pub mod resource;
pub mod rule;
pub mod settings;
pub mod table;

use std::sync::Arc;

use statehouse_store::table::Builder;
use statehouse_store::{SchemaError, Table};

pub use action::ActionSpec;
pub use read::{IndexList, RowRead};
pub use resource::ResourceSpec;
pub use settings::SettingsReader;
pub use table::{TableDef, TableSpec};

use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::{Blueprint, Thing};
use crate::resource::Resource;

/// One thing of a blueprint while its archetype declares it.
#[derive(Debug)]
pub struct Declare<'a> {
    thing: &'a Thing,
    /// The whole file, and what was declared before, for archetypes that depend on others.
    others: Option<(&'a Blueprint, &'a [Resource])>,
    settings: SettingsReader<'a>,
    resources: Vec<Resource>,
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
        let settings = SettingsReader::new(thing.settings.clone(), problems);
        let mut declaring = Declare { thing, others, settings, resources: Vec::new() };
        let done = declare(&mut declaring);
        let Declare { settings, resources, .. } = declaring;
        let (_, problems) = settings.finish();
        if done.is_none() && problems.len() == before {
            let title = format!("`{}.{}` could not be declared", thing.keyword, thing.name);
            problems.add(Problem::at(thing.settings.span(), title));
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
        let settings = SettingsReader::new(thing.settings.clone(), problems);
        let mut declaring = Declare { thing, others: None, settings, resources: Vec::new() };
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
        self.built(spec.build())
    }

    /// Builds a table whose rows are not shown to callers, or reports why it cannot be.
    pub fn build_internal(&mut self, builder: Builder) -> Option<Arc<Table>> {
        if self.settings.clashes(&builder.clashes()) {
            return None;
        }
        self.built(builder.build())
    }

    fn built<T>(&mut self, built: Result<T, SchemaError>) -> Option<T> {
        let Thing { keyword, name, .. } = self.thing;
        built.map_err(|error| self.settings.whole_problem(format!("`{keyword}.{name}`: {}", error.why))).ok()
    }

    /// Adds a resource.
    pub fn resource(&mut self, resource: ResourceSpec) {
        self.resources.push(resource.build(self.thing.archetype));
    }
}
