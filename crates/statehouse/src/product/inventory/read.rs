//! Reads of stocks, all of them strong.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::table::VERSION;
use statehouse_store::{Query, Row, Type, Value};

use super::{AVAILABLE, InventorySpec, QUANTITY, RESERVED, SOLD, STOCKED};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::declare::TableDef;
use crate::declare::read::find_row;
use crate::form::{Form, Property};
use crate::inputs::Inputs;
use crate::paging;

pub(super) const ORDERABLE: &str = "orderable";
pub(super) const ENOUGH: &str = "enough";

/// What `availability` gives.
pub(super) fn availability_form() -> Form {
    let int = |name, about| Property::required(name, Form::Value(Type::Int), about);
    Form::Object(vec![
        int(AVAILABLE, "what can be reserved"),
        int(ORDERABLE, "the same with what may be ordered beyond it"),
        int(RESERVED, "what reservations hold"),
        int(SOLD, "what was bought and did not come back"),
        int(STOCKED, "available, reserved and sold together"),
        Property::required(ENOUGH, Form::Value(Type::Bool), "whether the quantity can be reserved now"),
    ])
}

/// How many can be reserved of a stock.
pub(super) struct Availability(pub Arc<InventorySpec>);

#[async_trait]
impl Read for Availability {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let inventory = &self.0;
        let totals = inventory.cells_of(call, cx).await?.totals()?;
        let orderable = totals.available.saturating_add(inventory.backorder);
        let body = json!({
            AVAILABLE: totals.available,
            ORDERABLE: orderable,
            RESERVED: totals.reserved,
            SOLD: totals.sold,
            STOCKED: totals.stocked,
            ENOUGH: orderable >= call.input.int(QUANTITY).unwrap_or(1),
        });
        Ok(Arc::new(Answer { version: Some(totals.version), ..Answer::row(body) }))
    }
}

impl InventorySpec {
    /// The refusal of a call on a stock that is not there.
    pub(super) fn missing(&self, key: &[Value]) -> Refusal {
        Refusal::new(Code::NotFound, format!("{} does not exist: restock it first", self.what(key)))
    }
}

/// The rows of a table that agree in the first columns of the key, by the others.
pub(super) struct GroupList {
    pub def: Arc<TableDef>,
    /// How many columns.
    pub columns: usize,
    pub backward: bool,
}

impl GroupList {
    fn group(&self, input: &Inputs) -> Vec<Value> {
        let columns = self.def.table().key_columns().iter().take(self.columns);
        columns.map(|column| input.value_or_null(&column.name)).collect()
    }
}

#[async_trait]
impl Read for GroupList {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let query = Query::table(self.def.table(), &call.tenant, self.group(&call.input))?;
        let query = if self.backward { query.backward() } else { query };
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        let rows = page.rows.iter().map(|row: &Row| self.def.row_json(row));
        Ok(Arc::new(paging::answer(rows, page.next)))
    }
}

/// The form of a stock that is cut into several cells: its fields, and the quantities of all cells together.
pub(super) fn stock_form(inventory: &InventorySpec) -> Form {
    let quantities = match availability_form() {
        Form::Object(properties) => properties,
        _ => Vec::new(),
    };
    let quantities =
        quantities.into_iter().filter(|property| ![ORDERABLE, ENOUGH].contains(&&*property.name));
    let columns = match inventory.stock_def.row_form() {
        Form::Object(properties) => properties,
        _ => Vec::new(),
    };
    Form::Object(columns.into_iter().chain(quantities).collect())
}

/// Stocks that are cut into several cells: one by its key, or those of a group.
pub(super) struct CellStocks {
    pub inventory: Arc<InventorySpec>,
    /// The columns that a list has in common; none for a read of one stock.
    pub group: Option<usize>,
}

impl CellStocks {
    /// Stocks as callers see them, from their own rows. The version is raised by every write of every cell.
    async fn shown(&self, rows: &[Row], call: &Call, cx: &ActionContext<'_>) -> Result<Vec<Json>, Refusal> {
        let inventory = &self.inventory;
        let keys: Vec<&[Value]> = rows.iter().map(Row::key).collect();
        let cells = inventory.read_cells(&call.tenant, cx, &keys).await?;
        let mut shown = Vec::with_capacity(rows.len());
        for (row, cells) in rows.iter().zip(cells) {
            let totals = cells.totals()?;
            let mut json = inventory.stock_def.row_json(cells.main().unwrap_or(row));
            if let Some(fields) = json.as_object_mut() {
                let all = [
                    (AVAILABLE, totals.available),
                    (RESERVED, totals.reserved),
                    (SOLD, totals.sold),
                    (STOCKED, totals.stocked),
                    (VERSION, totals.version),
                ];
                fields.extend(all.map(|(name, value)| (name.to_owned(), Json::from(value))));
            }
            shown.push(json);
        }
        Ok(shown)
    }
}

#[async_trait]
impl Read for CellStocks {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let def = &self.inventory.stock_def;
        let Some(columns) = self.group else {
            let row = find_row(def, call, cx).await?.ok_or_else(|| self.inventory.missing(&call.key))?;
            let shown = self.shown(&[row], call, cx).await?;
            return Ok(Arc::new(Answer::row(shown.into_iter().next().unwrap_or_default())));
        };
        let columns = def.table().key_columns().iter().take(columns);
        let group: Vec<Value> = columns.map(|column| call.input.value_or_null(&column.name)).collect();
        let query = Query::table(def.table(), &call.tenant, group)?;
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        let rows = self.shown(&page.rows, call, cx).await?;
        Ok(Arc::new(paging::answer(rows, page.next)))
    }

    async fn show(
        &self,
        rows: &[Row],
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Option<Vec<Option<Json>>>, Refusal> {
        Ok(Some(self.shown(rows, call, cx).await?.into_iter().map(Some).collect()))
    }
}
