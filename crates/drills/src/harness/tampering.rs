//! Changes that no action makes, with which a test shows that each checker of invariants can fail.

use serde_json::Value as Json;
use statehouse_store::Value;

/// Calls that make one row, and a change of the row that no action makes: a checker has to notice it.
pub(crate) struct Tampering {
    /// The archetype whose specimen declares the resource.
    pub(crate) specimen: &'static str,
    pub(crate) resource: &'static str,
    /// Actions with their keys and inputs.
    pub(crate) calls: Vec<(&'static str, &'static [i64], Json)>,
    /// Whether workers have to run before there is a row.
    pub(crate) by_workers: bool,
    pub(crate) table: &'static str,
    /// Columns and their new values. Without any, only the version changes.
    pub(crate) changes: Vec<(&'static str, Value)>,
    /// The reader whose rows of one of the system's tables are meant.
    pub(crate) consumer: Option<&'static str>,
}

impl Tampering {
    pub(crate) fn new(specimen: &'static str, resource: &'static str, table: &'static str) -> Tampering {
        let (calls, changes) = (Vec::new(), Vec::new());
        Tampering { specimen, resource, calls, by_workers: false, table, changes, consumer: None }
    }

    pub(crate) fn call(mut self, action: &'static str, key: &'static [i64], input: Json) -> Tampering {
        self.calls.push((action, key, input));
        self
    }

    pub(crate) fn set(mut self, column: &'static str, value: impl Into<Value>) -> Tampering {
        self.changes.push((column, value.into()));
        self
    }

    pub(crate) fn of_consumer(mut self, consumer: &'static str) -> Tampering {
        self.consumer = Some(consumer);
        self
    }

    pub(crate) fn by_workers(mut self) -> Tampering {
        self.by_workers = true;
        self
    }
}
