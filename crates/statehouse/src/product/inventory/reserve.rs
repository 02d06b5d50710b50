//! `reserve`: all lines or none, without a read unless it is refused (I1, I3, I7, I8).

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{Address, Consistency, EventTemplate, Reason, Row, StoreError, Tenant, Value, bug};

use super::cell_write::{CellLowering, CellPlan, PROOF};
use super::cells::{CellQuantity, CellRows};
use super::lines::{Line, TakenCell};
use super::sweep::SharedSweep;
use super::transitions::{FLOOR, StockParts};
use super::write::Lowering;
use super::{
    AVAILABLE, EXPIRES_AT, HOLDER, InventorySpec, LINES, QUANTITY, RESERVATION_ID, RESERVED, RESERVED_STATE,
    STATE, TAKEN,
};
use crate::action::{
    ActionContext, Answer, Call, Code, LastRefusal, PlanParts, Prepare, Prepared, Refusal, RefusedStep,
    Verdict,
};
use crate::declare::machine::{Firing, PartUse, add_parts};

/// Prepares `reserve`.
pub(super) struct Reserve {
    pub inventory: Arc<InventorySpec>,
    pub rows: Arc<StockParts>,
    /// Inserts the reservation.
    pub insert: PartUse,
    pub sweep: SharedSweep,
}

/// The first line of which too little is available.
struct Lack<'r> {
    line: &'r Line,
    row: &'r Row,
    orderable: i64,
}

impl Reserve {
    /// The rows of all lines, as they are. The first one that is missing is the refusal.
    async fn read(&self, call: &Call, cx: &ActionContext<'_>, lines: &[Line]) -> Result<Vec<Row>, Refusal> {
        let table = self.inventory.stock_def.table();
        let address = |line: &Line| Address::new(table, &call.tenant, line.key.iter().cloned());
        let addresses = lines.iter().map(address).collect::<Result<Vec<_>, _>>()?;
        let rows = cx.store.get(&addresses, Consistency::Strong).await?;
        let found = lines.iter().zip(rows);
        found.map(|(line, row)| row.ok_or_else(|| self.inventory.missing(&line.key))).collect()
    }

    fn lack<'r>(&self, lines: &'r [Line], rows: &'r [Row]) -> Result<Option<Lack<'r>>, StoreError> {
        for (line, row) in lines.iter().zip(rows) {
            let orderable = self.inventory.orderable(row)?;
            if orderable < line.quantity {
                return Ok(Some(Lack { line, row, orderable }));
            }
        }
        Ok(None)
    }

    /// What is available of each line after a refusal. A caller that lacks something which reservations hold has the sweeper make a
    /// step and looks again; then it is refused (I8).
    async fn seen(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        lines: &[Line],
    ) -> Result<Vec<Option<i64>>, Refusal> {
        let mut rows = self.read(call, cx, lines).await?;
        if let Some(lack) = self.lack(lines, &rows)?
            && lack.row.get_int(RESERVED)? > 0
        {
            self.sweep.run(cx).await?;
            rows = self.read(call, cx, lines).await?;
        }
        if let Some(Lack { line, row, orderable }) = self.lack(lines, &rows)? {
            let refusal = self.inventory.out_of_stock(row.key(), line.quantity, orderable);
            return Err(refusal.at_version(Some(row)));
        }
        Ok(rows.iter().map(|row| row.get_int(AVAILABLE).map(Some)).collect::<Result<_, _>>()?)
    }

    /// Takes all lines from one cell (C1).
    fn take_alone(
        &self,
        plan: &mut CellPlan<'_>,
        id: &str,
        lines: &[Line],
    ) -> Result<Vec<TakenCell>, Refusal> {
        let cell = self.inventory.home(plan.tenant, id);
        let mut taken = Vec::with_capacity(lines.len());
        for (line, of) in lines.iter().enumerate() {
            let firing = self.rows.of(cell).take.at(self.inventory.row_key(&of.key, cell));
            let floor = self.inventory.floor_alone(cell, of.quantity);
            plan.fire(firing.bind(QUANTITY, of.quantity).bind(FLOOR, floor))?;
            taken.push(TakenCell { line, cell, quantity: of.quantity });
        }
        Ok(taken)
    }

    /// All cells of all lines. A caller that lacks something which reservations hold has the sweeper make a step first (I8).
    async fn seen_cells(
        &self,
        tenant: &Tenant,
        cx: &ActionContext<'_>,
        lines: &[Line],
    ) -> Result<Vec<CellRows>, Refusal> {
        let inventory = &self.inventory;
        let keys: Vec<&[Value]> = lines.iter().map(|line| line.key.as_slice()).collect();
        let seen = inventory.read_cells(tenant, cx, &keys).await?;
        let mut may_free = false;
        for (line, seen) in lines.iter().zip(&seen) {
            if seen.main().is_none() {
                return Err(inventory.missing(&line.key));
            }
            let totals = seen.totals()?;
            may_free |= totals.available + inventory.backorder < line.quantity && totals.reserved > 0;
        }
        if !may_free {
            return Ok(seen);
        }
        self.sweep.run(cx).await?;
        inventory.read_cells(tenant, cx, &keys).await
    }

    /// Takes all lines from as many cells as it needs, or proves that they have too little (C1, C2).
    async fn take_together(
        &self,
        plan: &mut CellPlan<'_>,
        cx: &ActionContext<'_>,
        lines: &[Line],
    ) -> Result<Vec<TakenCell>, Refusal> {
        let seen = self.seen_cells(plan.tenant, cx, lines).await?;
        let mut taken = Vec::new();
        for ((line, of), seen) in lines.iter().enumerate().zip(&seen) {
            let (backorder, quantity) = (self.inventory.backorder, of.quantity);
            let lowering = CellLowering { key: &of.key, seen, quantity, backorder, part: |rows| &rows.take };
            let cells = plan.lower(&lowering)?;
            taken.extend(cells.into_iter().map(|CellQuantity { cell, quantity }| TakenCell {
                line,
                cell,
                quantity,
            }));
            plan.unbalance(&of.key, seen);
        }
        Ok(taken)
    }

    /// The plan of a reserve from cells.
    async fn prepare_cells(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        lines: &[Line],
    ) -> Result<PlanParts, Refusal> {
        let inventory = &self.inventory;
        let (id, now_here) = (call.input.get_text(RESERVATION_ID)?, cx.clock.now());
        let plan = PlanParts::new("", Vec::new(), EventTemplate::named(""));
        let mut rows = CellPlan { inventory, parts: &self.rows, tenant: &call.tenant, now_here, plan };
        let taken = match cx.refused {
            None => self.take_alone(&mut rows, id, lines)?,
            Some(_) => self.take_together(&mut rows, cx, lines).await?,
        };
        let taken = Value::Json(taken.into_iter().map(TakenCell::json).collect());
        let mut plan = self.inserted(call, lines)?.bind(TAKEN, taken).prepare(&call.tenant, now_here)?;
        let PlanParts { steps, related, wakeups, .. } = rows.plan;
        plan.steps.extend(steps);
        Ok(plan.related(related).wakeups(wakeups))
    }

    /// The verdict on a cell that was refused: all but a proof is tried again, with all cells read.
    fn cell_verdict(&self, call: &Call, refused: &RefusedStep<'_>) -> Result<Verdict, Refusal> {
        let is_proof = refused.label() == PROOF && refused.guard().is_some();
        let Some(row) = refused.row.filter(|_| is_proof) else { return Ok(Verdict::Retry) };
        let lines = self.inventory.lines_given(&call.input)?;
        let line = lines.iter().find(|line| line.key == row.key());
        let line = line.ok_or_else(|| bug!("a lack was proven of a row that no line names"))?;
        Ok(Verdict::Refuse(self.inventory.proven(row, &line.key, line.quantity, refused)?))
    }

    /// Inserts the reservation of a call.
    fn inserted(&self, call: &Call, lines: &[Line]) -> Result<Firing, Refusal> {
        let id = call.input.get_text(RESERVATION_ID)?;
        let firing = self.insert.at([id.into()]).bind(LINES, Value::Json(self.inventory.lines_json(lines)));
        Ok(firing.bind(HOLDER, call.input.value_or_null(HOLDER)))
    }

    /// Whether a reservation is what a call asks for (I3).
    fn is_same(&self, call: &Call, lines: &[Line], row: &Row) -> Result<bool, StoreError> {
        let holder = row.get(HOLDER).cloned().unwrap_or(Value::Null);
        let is_open = row.get_text(STATE)? == RESERVED_STATE;
        let is_alike = *row.get_json(LINES)? == self.inventory.lines_json(lines);
        Ok(is_open && is_alike && holder == call.input.value_or_null(HOLDER))
    }

    fn taken(&self, row: &Row) -> Result<Refusal, StoreError> {
        let (id, state) = (row.get_text(RESERVATION_ID)?, row.get_text(STATE)?);
        let end = row.get_optional_time(EXPIRES_AT)?.map(|end| format!(", until {end}"));
        let message = format!(
            "{} {id} exists with other lines, another holder or another state ({state}{}); use a new id",
            self.inventory.reservations,
            end.unwrap_or_default()
        );
        Ok(Refusal::new(Code::AlreadyExists, message).at_version(Some(row)))
    }

    /// The verdict on a row of a stock that was refused.
    fn lack_verdict(&self, call: &Call, refused: &RefusedStep<'_>) -> Result<Verdict, Refusal> {
        let Some(row) = refused.row else {
            return Ok(Verdict::Refuse(self.inventory.missing(&refused.step.key)));
        };
        let lines = self.inventory.lines_given(&call.input)?;
        let rows = [row.clone()];
        let own: Vec<Line> = lines.into_iter().filter(|line| line.key == row.key()).collect();
        // The refused row was judged in the write. What nothing holds, no sweep can free.
        Ok(match self.lack(&own, &rows)? {
            Some(lack) if row.get_int(RESERVED)? == 0 => {
                let refusal = self.inventory.out_of_stock(row.key(), lack.line.quantity, lack.orderable);
                Verdict::Refuse(refusal.at_version(Some(row)))
            }
            _ => Verdict::Retry,
        })
    }
}

#[async_trait]
impl Prepare for Reserve {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let inventory = &self.inventory;
        let lines = inventory.lines_given(&call.input)?;
        if let Some(LastRefusal { reason: Reason::Present, row: Some(row), .. }) = cx.refused
            && row.table().name() == inventory.reservation_def.table().name()
            && self.is_same(call, &lines, row)?
        {
            let answer = Answer::row(inventory.reservation_def.row_json(row));
            let created = Some(call.input.get_text(RESERVATION_ID)?.to_owned());
            return Ok(Prepared::Unchanged(Answer { created, ..answer }));
        }
        if inventory.cells > 1 {
            return self.prepare_cells(call, cx, &lines).await.map(Into::into);
        }
        let seen = match cx.refused {
            None => vec![None; lines.len()],
            Some(_) => self.seen(call, cx, &lines).await?,
        };
        let firing = self.inserted(call, &lines)?.bind(TAKEN, Value::Null);
        let now_here = cx.clock.now();
        let mut plan = firing.prepare(&call.tenant, now_here)?;
        for (line, seen) in lines.iter().zip(seen) {
            let lowering =
                Lowering { quantity: line.quantity, floor: line.quantity - inventory.backorder, seen };
            let (firing, low) = inventory.lower(&self.rows.main.take, &line.key, &lowering);
            add_parts(&mut plan, &call.tenant, now_here, [firing.into()])?;
            plan.related.extend(low);
        }
        Ok(plan.into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let is_reservation = refused.step.table.name() == self.inventory.reservation_def.table().name();
        let judged = match (is_reservation, refused.row) {
            (true, Some(row)) => self.inventory.lines_given(&call.input).and_then(|lines| {
                let is_same = self.is_same(call, &lines, row)?;
                Ok(if is_same { Verdict::Retry } else { Verdict::Refuse(self.taken(row)?) })
            }),
            (true, None) => Ok(Verdict::Retry),
            (false, _) if self.inventory.cells > 1 => self.cell_verdict(call, refused),
            (false, _) => self.lack_verdict(call, refused),
        };
        judged.unwrap_or_else(Verdict::Refuse)
    }
}
