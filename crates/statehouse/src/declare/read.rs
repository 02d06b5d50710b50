//! The two reads that most archetypes have, implemented once: a row by its key, and rows by an index.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::{Query, Row, Time, Value};

use super::table::TableDef;
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::form::Property;
use crate::paging;
use crate::resource::key_text;

/// How a row is shown at a time of this process.
pub type ShowRow = fn(&TableDef, &Row, Time) -> Json;

fn as_stored(def: &TableDef, row: &Row, _: Time) -> Json {
    def.row_json(row)
}

/// A strong read of one row by its key.
#[derive(Debug)]
pub struct RowRead {
    resource: String,
    def: Arc<TableDef>,
    missing: &'static str,
    show: ShowRow,
}

impl RowRead {
    /// Reads rows of a resource.
    pub fn of(resource: &str, def: &Arc<TableDef>) -> RowRead {
        RowRead {
            resource: resource.to_owned(),
            def: def.clone(),
            missing: "does not exist",
            show: as_stored,
        }
    }

    /// What is said of a row that is not there: `was never set`.
    #[must_use]
    pub fn missing(mut self, missing: &'static str) -> RowRead {
        self.missing = missing;
        self
    }

    /// Rows are not shown as they are stored.
    #[must_use]
    pub fn shown(mut self, show: ShowRow) -> RowRead {
        self.show = show;
        self
    }
}

/// The row with the key of a call, or none.
pub async fn find_row(def: &TableDef, call: &Call, cx: &ActionContext<'_>) -> Result<Option<Row>, Refusal> {
    cx.row(def.table(), &call.tenant, call.key.iter().cloned()).await
}

#[async_trait]
impl Read for RowRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let Some(row) = find_row(&self.def, call, cx).await? else {
            let message = format!("{} {} {}", self.resource, key_text(&call.key), self.missing);
            return Err(Refusal::new(Code::NotFound, message));
        };
        Ok(Arc::new(Answer::row((self.show)(&self.def, &row, cx.clock.now()))))
    }

    async fn show(
        &self,
        rows: &[Row],
        _: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Option<Vec<Option<Json>>>, Refusal> {
        let now = cx.clock.now();
        Ok(Some(rows.iter().map(|row| Some((self.show)(&self.def, row, now))).collect()))
    }
}

/// A range read of one of several indexes, each of which has one filter: the first one whose filter is given, or the one
/// with a default. If a call gives several filters, rows that do not fulfil the others are left out, and pages may be short.
#[derive(Debug)]
pub struct IndexList {
    def: Arc<TableDef>,
    choices: Vec<IndexChoice>,
    backward: bool,
    show: ShowRow,
}

#[derive(Debug)]
struct IndexChoice {
    index: &'static str,
    filter: Property,
    default: Option<Value>,
}

impl IndexList {
    /// Lists rows of a table, the newest (or greatest) first.
    pub fn newest_first(def: &Arc<TableDef>) -> IndexList {
        IndexList { def: def.clone(), choices: Vec::new(), backward: true, show: as_stored }
    }

    /// By this index, if its filter is given.
    #[must_use]
    pub fn by(mut self, index: &'static str, filter: Property) -> IndexList {
        self.choices.push(IndexChoice { index, filter, default: None });
        self
    }

    /// By this index, with this filter if none is given.
    #[must_use]
    pub fn by_or(mut self, index: &'static str, filter: Property, default: impl Into<Value>) -> IndexList {
        self.choices.push(IndexChoice { index, filter, default: Some(default.into()) });
        self
    }

    /// Rows are not shown as they are stored.
    #[must_use]
    pub fn shown(mut self, show: ShowRow) -> IndexList {
        self.show = show;
        self
    }

    /// The filters, as inputs of the action.
    pub(super) fn properties(&self) -> Vec<Property> {
        self.choices.iter().map(|choice| choice.filter.clone()).collect()
    }

    fn choose(&self, call: &Call) -> Result<(&'static str, Value), Refusal> {
        for choice in &self.choices {
            if let Some(given) = call.input.value(&choice.filter.name).filter(|given| !given.is_null()) {
                return Ok((choice.index, given.clone()));
            }
            if let Some(default) = &choice.default {
                return Ok((choice.index, default.clone()));
            }
        }
        let names: Vec<&str> = self.choices.iter().map(|choice| choice.filter.name.as_str()).collect();
        let message = format!("say which rows: give {}", names.join(" or "));
        Err(Refusal::new(Code::InvalidInput, message))
    }

    /// Whether a row has what the call gives for all filters, also for those whose index is not read.
    fn holds(&self, row: &Row, call: &Call) -> bool {
        self.choices.iter().all(|choice| {
            let given = call.input.value(&choice.filter.name).filter(|given| !given.is_null());
            given.is_none_or(|given| row.get(&choice.filter.name) == Some(given))
        })
    }
}

#[async_trait]
impl Read for IndexList {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let (index, value) = self.choose(call)?;
        let query = Query::index(self.def.table(), index, &call.tenant, [value])?;
        let query = if self.backward { query.backward() } else { query };
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        let now = cx.clock.now();
        let rows = page.rows.iter().filter(|row| self.holds(row, call));
        Ok(Arc::new(paging::answer(rows.map(|row| (self.show)(&self.def, row, now)), page.next)))
    }

    async fn show(
        &self,
        rows: &[Row],
        _: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Option<Vec<Option<Json>>>, Refusal> {
        let now = cx.clock.now();
        Ok(Some(rows.iter().map(|row| Some((self.show)(&self.def, row, now))).collect()))
    }
}
