//! What the functions of a transition see: the call, the row, and what was gathered before.

use async_trait::async_trait;
use statehouse_store::{Bug, Row, Table, Tenant, Time, Value, bug};

use super::transition::DeclaredName;
use crate::action::{ActionContext, Call, LastRefusal, Refusal};
use crate::declare::rule::RuleSource;
use crate::inputs::Inputs;

/// One firing of a transition.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    /// On whose behalf.
    pub tenant: &'a Tenant,
    /// The key of the row.
    pub key: &'a [Value],
    /// The call; none if a sweeper, a worker or a plan of another row fires it.
    pub call: Option<&'a Call>,
    /// The row as it was read, if the transition reads it. See [`super::RowReading`].
    pub row: Option<&'a Row>,
    /// What [`Gather`] returned.
    pub gathered: &'a Gathered,
    /// Values for `bind(NAME)`.
    pub binds: &'a [(DeclaredName, Value)],
    /// The refused step of the previous attempt.
    pub refused: Option<&'a LastRefusal>,
    /// The clock of this process: for hints only. Guards read the engine's clock.
    pub now_here: Time,
}

impl<'a> Scene<'a> {
    /// The inputs of the call.
    pub fn inputs(&self) -> Option<&'a Inputs> {
        self.call.map(|call| &call.input)
    }

    /// The row, of a transition that reads it.
    ///
    /// # Errors
    /// It was not read: a defect of the declaration.
    pub fn loaded_row(&self) -> Result<&'a Row, Bug> {
        self.row.ok_or_else(|| bug!("a transition uses its row and does not read it"))
    }

    /// The first part of the key, which is a text. An error as of [`Call::key_text`].
    pub fn key_text(&self) -> Result<&'a str, Bug> {
        let first = self.key.first().and_then(Value::as_text);
        first.ok_or_else(|| bug!("the key of a transition does not begin with a text"))
    }

    /// A bound value.
    pub fn bound(&self, name: &str) -> Option<&'a Value> {
        self.binds.iter().find(|(bound, _)| bound == name).map(|(_, value)| value)
    }
}

impl RuleSource for Scene<'_> {
    fn input(&self, name: &str) -> Value {
        let input = self.inputs().and_then(|inputs| inputs.get(name));
        // A list, which rules name after `in`, is compared item by item.
        input.map_or(Value::Null, |input| match input.value() {
            Some(value) => value.clone(),
            None => Value::Json(input.to_json()),
        })
    }

    fn key(&self, index: usize) -> Value {
        self.key.get(index).cloned().unwrap_or(Value::Null)
    }

    fn bound(&self, name: &str) -> Value {
        Scene::bound(self, name).cloned().unwrap_or(Value::Null)
    }
}

/// What was read, or done outside the store, before a plan is prepared.
#[derive(Clone, Debug, Default)]
pub struct Gathered {
    /// Rows on which the plan relies: it is refused, and prepared again, if one of them has changed.
    pub fenced: Vec<Row>,
    /// Rows that are covered otherwise: by the rules of the parts that change them, or by the fence of the main row if every
    /// writer of them also writes that row.
    pub hints: Vec<Row>,
    /// Values for `bind(NAME)`.
    pub binds: Vec<(DeclaredName, Value)>,
}

impl Gathered {
    /// A row of a table by its key.
    pub fn row(&self, table: &Table, key: &[Value]) -> Option<&Row> {
        let mut rows = self.fenced.iter().chain(&self.hints);
        rows.find(|row| row.table().name() == table.name() && row.key() == key)
    }
}

/// Reads other rows, or acts outside the store, before a plan is prepared.
#[async_trait]
pub trait Gather: Send + Sync {
    /// Runs after the main row was read, if the transition reads it.
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        row: Option<&Row>,
    ) -> Result<Gathered, Refusal>;

    /// Whether it changes something outside the store, so that a repetition must be recognized before it runs.
    fn acts_outside(&self) -> bool {
        false
    }
}
