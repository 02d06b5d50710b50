//! Resources as archetypes declare them.

use std::sync::Arc;

use statehouse_store::{Table, Type};

use super::action::ActionSpec;
use super::table::TableDef;
use crate::action::Action;
use crate::atlas::AtlasEntry;
use crate::infra::log::{DeclaredGroup, Handler};
use crate::infra::projection::Projector;
use crate::resource::{Consuming, Resource};
use crate::told::{Telling, Told};
use crate::worker::Worker;

/// A resource being declared: by default over one table, whose rows are in every event of their writes.
pub struct ResourceSpec {
    name: String,
    key: Vec<(String, Type)>,
    def: Option<Arc<TableDef>>,
    tables: Vec<Arc<Table>>,
    actions: Vec<ActionSpec>,
    built_actions: Vec<Action>,
    workers: Vec<Arc<dyn Worker>>,
    consumers: Vec<Consuming>,
    telling: Telling,
}

impl ResourceSpec {
    /// A resource over a table. Its key is the table's.
    pub fn of(name: &str, def: &Arc<TableDef>) -> ResourceSpec {
        let table = def.table();
        let key = table.key_columns().iter().map(|column| (column.name.clone(), column.kind)).collect();
        let telling = Telling::Rows(Box::new(Told::with_row(name, table)));
        ResourceSpec {
            def: Some(def.clone()),
            tables: vec![table.clone()],
            ..ResourceSpec::without_rows(name, key, telling)
        }
    }

    /// A resource whose actions do not answer with rows of one table.
    pub fn without_rows(name: &str, key: Vec<(String, Type)>, telling: Telling) -> ResourceSpec {
        ResourceSpec {
            name: name.to_owned(),
            key,
            def: None,
            tables: Vec::new(),
            actions: Vec::new(),
            built_actions: Vec::new(),
            workers: Vec::new(),
            consumers: Vec::new(),
            telling,
        }
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

    /// Actions that were put together without the kit.
    #[must_use]
    pub fn built_actions(mut self, actions: Vec<Action>) -> ResourceSpec {
        self.built_actions = actions;
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
    pub fn group(mut self, handler: Arc<dyn Handler>) -> ResourceSpec {
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
    pub fn telling(mut self, telling: Telling) -> ResourceSpec {
        self.telling = telling;
        self
    }

    /// How views can follow its rows, with what the default does not say.
    #[must_use]
    pub fn told(mut self, told: Told) -> ResourceSpec {
        self.telling = Telling::Rows(Box::new(told));
        self
    }

    pub(super) fn build(self, archetype: &'static AtlasEntry) -> Resource {
        let (name, def) = (self.name, self.def);
        let actions = self.actions.into_iter();
        Resource {
            archetype,
            key: self.key,
            hidden: def.as_ref().map(|def| def.hidden().to_vec()).unwrap_or_default(),
            actions: actions
                .filter_map(|action| action.build(&name, def.as_deref()))
                .chain(self.built_actions)
                .collect(),
            tables: self.tables,
            workers: self.workers,
            consumers: self.consumers,
            telling: self.telling,
            name,
        }
    }
}
