//! The two reads that most archetypes have, implemented once: a row by its key, and rows by an index.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::{Address, Consistency, Query, Row, Time, Value};

use super::table::TableDef;
use crate::action::{Answer, Call, Code, Desk, Read, Refusal};
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
pub async fn find_row(def: &TableDef, call: &Call, desk: &Desk<'_>) -> Result<Option<Row>, Refusal> {
    let address = Address::new(def.table(), &call.tenant, call.key.iter().cloned())?;
    Ok(desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
}

#[async_trait]
impl Read for RowRead {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let Some(row) = find_row(&self.def, call, desk).await? else {
            let message = format!("{} {} {}", self.resource, key_text(&call.key), self.missing);
            return Err(Refusal::new(Code::NotFound, message));
        };
        Ok(Arc::new(Answer::row((self.show)(&self.def, &row, desk.clock.now()))))
    }
}

/// A range read of one of several indexes, each of which has one filter: the first one whose filter is given, or the one
/// with a default.
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
            let column = choice.filter.name.as_str();
            let kind = self.def.table().type_of(column);
            if let (Some(given), Some(kind)) = (call.input.get(column), kind) {
                let value = Value::from_json(given.clone(), kind);
                return Ok((choice.index, value.map_err(|why| Refusal::field(column, why.to_string()))?));
            }
            if let Some(default) = &choice.default {
                return Ok((choice.index, default.clone()));
            }
        }
        let names: Vec<&str> = self.choices.iter().map(|choice| choice.filter.name.as_str()).collect();
        let message = format!("say which rows: give {}", names.join(" or "));
        Err(Refusal::new(Code::InvalidInput, message))
    }
}

#[async_trait]
impl Read for IndexList {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let (index, value) = self.choose(call)?;
        let query = Query::index(self.def.table(), index, &call.tenant, [value])?;
        let query = if self.backward { query.backward() } else { query };
        let page = desk.store.query(&paging::page_of(query, call)?).await?;
        let now = desk.clock.now();
        let rows = page.rows.iter().map(|row| (self.show)(&self.def, row, now));
        Ok(Arc::new(paging::answer(rows, page.next)))
    }
}
