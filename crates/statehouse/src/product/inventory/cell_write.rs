//! Plans on stocks of several cells: takes and removals (C1 to C3), and the actions on stocks.

use std::sync::Arc;

use statehouse_store::plan::Expect;
use statehouse_store::{
    Address, Consistency, EventTemplate, Guard, PlanError, Row, Step, Tenant, Time, Value, bug,
};

use super::cells::{CellQuantity, CellRows, balance, split, take};
use super::movements::MovementKind;
use super::transitions::{FLOOR, RowParts, StockParts};
use super::write::{COUNTED, StockAction, WriteStock};
use super::{AVAILABLE, InventorySpec, QUANTITY, REASON, RESERVATION_ID, RESERVED, SOLD, STOCKED};
use crate::action::{ActionContext, Call, Code, Expected, PlanParts, Refusal, RelatedEvent};
use crate::declare::machine::{Firing, PartUse, add_parts};
use crate::infra::due::{self, DUE_AT};
use crate::resource::key_text;

/// The label of the last step of a plan that proves a lack (C2).
pub(super) const PROOF: &str = "proof";
/// The labels of steps that only demand that a cell is as it was read, and that make a stock due.
const SEEN_CELL: &str = "seen";
const BALANCE: &str = "balance";

/// What is taken from a stock.
pub(super) struct CellLowering<'a> {
    pub key: &'a [Value],
    pub seen: &'a CellRows,
    pub quantity: i64,
    /// How far below zero cell 0 may fall by it.
    pub backorder: i64,
    /// The transition of each cell.
    pub part: fn(&RowParts) -> &PartUse,
}

/// A plan that is being made, and for whom.
pub(super) struct CellPlan<'a> {
    pub inventory: &'a Arc<InventorySpec>,
    pub parts: &'a StockParts,
    pub tenant: &'a Tenant,
    pub now_here: Time,
    pub plan: PlanParts,
}

impl InventorySpec {
    /// The addresses of all cells of some stocks.
    pub(super) fn addresses(&self, tenant: &Tenant, keys: &[&[Value]]) -> Result<Vec<Address>, PlanError> {
        let cells = self.cells_def.as_ref().map(|def| def.table());
        let mut addresses = Vec::with_capacity(keys.len() * self.cells);
        for key in keys {
            for cell in 0..self.cells {
                let table = cells.filter(|_| cell > 0).unwrap_or(self.stock_def.table());
                addresses.push(Address::new(table, tenant, self.row_key(key, cell))?);
            }
        }
        Ok(addresses)
    }

    /// All cells of some stocks.
    pub(super) async fn read_cells(
        &self,
        tenant: &Tenant,
        cx: &ActionContext<'_>,
        keys: &[&[Value]],
    ) -> Result<Vec<CellRows>, Refusal> {
        let addresses = self.addresses(tenant, keys)?;
        let mut rows = cx.store.get(&addresses, Consistency::Strong).await?.into_iter();
        Ok(keys.iter().map(|_| CellRows(rows.by_ref().take(self.cells).collect())).collect())
    }

    /// All cells of the stock with the key of a call.
    pub(super) async fn cells_of(&self, call: &Call, cx: &ActionContext<'_>) -> Result<CellRows, Refusal> {
        let read = self.read_cells(&call.tenant, cx, &[&call.key]).await?;
        let seen = read.into_iter().next().ok_or_else(|| bug!("a read of one stock gave none"))?;
        if seen.main().is_none() {
            return Err(self.missing(&call.key));
        }
        Ok(seen)
    }

    /// The cell from which an operation takes first.
    pub(super) fn home(&self, tenant: &Tenant, id: &str) -> usize {
        let cells = u32::try_from(self.cells).unwrap_or(1);
        statehouse_store::log::partition_of(tenant, &self.name, id, cells) as usize
    }

    /// The least that one cell must have so that the caller need not look at the others (C1, C3).
    pub(super) fn floor_alone(&self, cell: usize, quantity: i64) -> i64 {
        // Cell 0 may be below zero by what was ordered beyond what there is; the others are not.
        let ordered = if cell == 0 { 0 } else { self.backorder };
        let plain = if cell == 0 { quantity - self.backorder } else { quantity };
        self.low.map_or(plain, |low| plain.max(quantity + low + 1 + ordered))
    }
}

impl CellPlan<'_> {
    /// Fires a transition on a cell and returns the number of its step.
    pub(super) fn fire(&mut self, firing: Firing) -> Result<usize, Refusal> {
        let step = self.plan.steps.len();
        add_parts(&mut self.plan, self.tenant, self.now_here, [firing.into()])?;
        Ok(step)
    }

    fn firing(&self, part: fn(&RowParts) -> &PartUse, key: &[Value], cell: usize) -> Firing {
        part(self.parts.of(cell)).at(self.inventory.row_key(key, cell))
    }

    /// Demands that a step's row, or a row that no step is about, is as it was read.
    fn fence(
        &mut self,
        step: Option<usize>,
        key: &[Value],
        cell: usize,
        row: Option<&Row>,
    ) -> Result<(), Refusal> {
        if let Some(step) = step.and_then(|step| self.plan.steps.get_mut(step)) {
            match row {
                Some(row) => *step = step.clone().guard(Guard::version(row.version())),
                None => step.expect = Expect::Absent,
            }
            return Ok(());
        }
        let inventory = self.inventory;
        let def = inventory.cells_def.as_ref().filter(|_| cell > 0).unwrap_or(&inventory.stock_def);
        let key = inventory.row_key(key, cell);
        let step = match row {
            Some(row) => Step::assert(def.table(), key).guard(Guard::version(row.version())),
            None => Step::assert_absent(def.table(), key),
        };
        self.plan.steps.push(step.label(SEEN_CELL));
        Ok(())
    }

    /// Takes a quantity from the cells of a stock (C1 to C3). If they have too little, the plan is refused by its last step, which
    /// proves it.
    pub(super) fn lower(&mut self, lowering: &CellLowering<'_>) -> Result<Vec<CellQuantity>, Refusal> {
        let CellLowering { key, seen, quantity, backorder, part } = *lowering;
        let has = seen.column(AVAILABLE)?;
        let (total, others): (i64, i64) = (has.iter().sum(), has.iter().skip(1).sum());
        let lacks = total + backorder < quantity;
        let low = self.inventory.low.filter(|low| total - quantity <= *low);
        let fenced = lacks || low.is_some();
        let taken = take(&has, quantity);
        let of =
            |cell: usize| taken.iter().find(|taken| taken.cell == cell).map_or(0, |taken| taken.quantity);
        for (cell, row) in seen.0.iter().enumerate().skip(1) {
            let step = match of(cell) {
                0 => None,
                quantity => {
                    let firing = self.firing(part, key, cell).bind(QUANTITY, quantity).bind(FLOOR, quantity);
                    Some(self.fire(firing)?)
                }
            };
            if fenced {
                self.fence(step, key, cell, row.as_ref())?;
            }
        }
        if fenced || of(0) > 0 {
            let floor = if fenced { quantity - others - backorder } else { of(0) - backorder };
            let firing = self.firing(part, key, 0).bind(QUANTITY, of(0)).bind(FLOOR, floor);
            let step = self.fire(firing)?;
            match (lacks, self.plan.steps.get_mut(step)) {
                (true, Some(step)) => *step = step.clone().label(PROOF),
                _ if fenced => self.fence(Some(step), key, 0, seen.main())?,
                _ => {}
            }
        }
        if let Some(low) = low.filter(|low| !lacks && total > *low) {
            self.plan.related.push(self.inventory.low_event(key, total - quantity, low));
        }
        Ok(taken)
    }

    /// Makes a stock due for the balancer, unless it is due already (C4).
    pub(super) fn unbalance(&mut self, key: &[Value], seen: &CellRows) {
        let def = &self.inventory.stock_def;
        if seen.main().is_none_or(|row| row.time(DUE_AT).is_some()) {
            return;
        }
        let is_main =
            |step: &Step| step.table.name() == def.table().name() && step.key == key && step.writes();
        let index = self.plan.steps.iter().position(is_main).unwrap_or_else(|| {
            self.plan.steps.push(def.update(key.iter().cloned()).label(BALANCE));
            self.plan.steps.len() - 1
        });
        let Some(step) = self.plan.steps.get_mut(index) else { return };
        let at = statehouse_store::guard::now_plus(super::balance::BALANCE_AFTER);
        *step = def.set_due(step.clone(), self.tenant, &self.inventory.name, at);
        let worker = super::balance::worker_name(&self.inventory.name);
        self.plan.wakeups.extend(due::wakeup(&worker, step, self.now_here));
    }
}

/// What an action on a stock of several cells does.
struct CellChange {
    kind: MovementKind,
    quantity: i64,
}

impl WriteStock {
    /// Prepares an action on a stock of several cells.
    pub(super) async fn prepare_cells(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<PlanParts, Refusal> {
        let inventory = &self.inventory;
        let event = EventTemplate::named(format!("{}.{}", inventory.name, self.event()));
        let columns = inventory.key.iter().zip(&call.key);
        let event = columns.fold(event, |event, (field, value)| event.with(&field.name, value.to_json()));
        let plan = PlanParts::new(key_text(&call.key), Vec::new(), event);
        let mut plan =
            CellPlan { inventory, parts: &self.rows, tenant: &call.tenant, now_here: cx.clock.now(), plan };
        let seen = match (self.action, call.expected) {
            (StockAction::Restock, None) => None,
            _ => Some(inventory.cells_of(call, cx).await?),
        };
        if let (Some(Expected::Version(expected)), Some(seen)) = (call.expected, &seen)
            && seen.totals()?.version != expected
        {
            return Err(self.conflict_at(call, seen.totals()?.version));
        }
        let change = match (self.action, &seen) {
            (StockAction::Restock, _) => self.restock_cells(&mut plan, call, cx)?,
            (StockAction::Adjust, Some(seen)) => self.adjust_cells(&mut plan, call, seen)?,
            (StockAction::Recount, Some(seen)) => self.recount_cells(&mut plan, call, seen)?,
            (StockAction::Return, Some(seen)) => self.return_cells(&mut plan, call, seen)?,
            (StockAction::Transfer, Some(seen)) => self.transfer_cells(&mut plan, call, seen)?,
            (_, None) => return Err(bug!("an action on a stock did not read it").into()),
        };
        if let (Some(Expected::Version(_)), Some(seen)) = (call.expected, &seen) {
            self.fence_all(&mut plan, call, seen)?;
        }
        self.told(plan.plan, call, cx, &change)
    }

    /// Demands that every cell is as the caller has seen it.
    fn fence_all(&self, plan: &mut CellPlan<'_>, call: &Call, seen: &CellRows) -> Result<(), Refusal> {
        for (cell, row) in seen.0.iter().enumerate() {
            let key = self.inventory.row_key(&call.key, cell);
            let def =
                self.inventory.cells_def.as_ref().filter(|_| cell > 0).unwrap_or(&self.inventory.stock_def);
            let is_own = |step: &Step| step.table.name() == def.table().name() && step.key == key;
            let step = plan.plan.steps.iter().position(is_own);
            let version = row.as_ref().map(|row| Guard::version(row.version()));
            let is_fenced =
                step.and_then(|step| plan.plan.steps.get(step)).is_some_and(|step| match &version {
                    Some(version) => step.guard.conjuncts().contains(version),
                    None => step.expect == Expect::Absent,
                });
            if !is_fenced {
                plan.fence(step, &call.key, cell, row.as_ref())?;
            }
        }
        Ok(())
    }

    fn restock_cells(
        &self,
        plan: &mut CellPlan<'_>,
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<CellChange, Refusal> {
        let quantity = call.input.get_int(QUANTITY)?;
        let shares = split(quantity, self.inventory.cells, self.inventory.home(&call.tenant, cx.operation));
        let of =
            |cell: usize| shares.iter().find(|share| share.cell == cell).map_or(0, |share| share.quantity);
        // The stock's own row is made even if its cell gets nothing.
        let step = plan.fire(self.restocked(call, of(0)))?;
        if let (Some(Expected::Any), Some(step)) = (call.expected, plan.plan.steps.get_mut(step)) {
            step.expect = Expect::Present;
        }
        for share in shares.iter().filter(|share| share.cell > 0) {
            let firing = plan.firing(|rows| &rows.add, &call.key, share.cell).bind(QUANTITY, share.quantity);
            plan.fire(firing)?;
        }
        Ok(CellChange { kind: MovementKind::Restock, quantity })
    }

    fn adjust_cells(
        &self,
        plan: &mut CellPlan<'_>,
        call: &Call,
        seen: &CellRows,
    ) -> Result<CellChange, Refusal> {
        let by = super::write::change_by(call)?;
        if by > 0 {
            let firing = plan.firing(|rows| &rows.find, &call.key, 0).bind(QUANTITY, by);
            plan.fire(firing)?;
            plan.unbalance(&call.key, seen);
        } else {
            plan.lower(&removal(&call.key, seen, -by))?;
        }
        Ok(CellChange { kind: MovementKind::Adjust, quantity: by })
    }

    fn recount_cells(
        &self,
        plan: &mut CellPlan<'_>,
        call: &Call,
        seen: &CellRows,
    ) -> Result<CellChange, Refusal> {
        let inventory = &self.inventory;
        let (counted, before) = (call.input.get_int(COUNTED)?, seen.totals()?);
        let available = counted - before.reserved;
        if available < -inventory.backorder {
            return Err(inventory.counted_too_few(&call.key, counted, before.reserved));
        }
        // As even as it can be, beginning with all of it in cell 0.
        let mut target = vec![0; seen.0.len()];
        if let Some(main) = target.first_mut() {
            *main = available;
        }
        for change in balance(&target) {
            if let Some(cell) = target.get_mut(change.cell) {
                *cell += change.quantity;
            }
        }
        for ((cell, row), available) in seen.0.iter().enumerate().zip(target) {
            let step = match row {
                Some(row) => {
                    let stocked = available + row.get_int(RESERVED)? + row.get_int(SOLD)?;
                    let firing = plan.firing(|rows| &rows.recount, &call.key, cell).bind(STOCKED, stocked);
                    Some(plan.fire(firing.bind(AVAILABLE, available))?)
                }
                None if available == 0 => None,
                None => {
                    let firing = plan.firing(|rows| &rows.add, &call.key, cell).bind(QUANTITY, available);
                    Some(plan.fire(firing)?)
                }
            };
            plan.fence(step, &call.key, cell, row.as_ref())?;
        }
        if let Some(low) = inventory.low.filter(|low| before.available > *low && available <= *low) {
            plan.plan.related.push(inventory.low_event(&call.key, available, low));
        }
        Ok(CellChange { kind: MovementKind::Recount, quantity: available - before.available })
    }

    fn return_cells(
        &self,
        plan: &mut CellPlan<'_>,
        call: &Call,
        seen: &CellRows,
    ) -> Result<CellChange, Refusal> {
        let quantity = call.input.get_int(QUANTITY)?;
        let sold = seen.totals()?.sold;
        if sold < quantity {
            let what = self.inventory.what(&call.key);
            return Err(Refusal::new(
                Code::WrongState,
                format!("{what} has {sold} sold; no more can come back"),
            ));
        }
        for of in take(&seen.column(SOLD)?, quantity) {
            let firing = plan.firing(|rows| &rows.give_back, &call.key, of.cell).bind(QUANTITY, of.quantity);
            plan.fire(firing)?;
        }
        Ok(CellChange { kind: MovementKind::Return, quantity })
    }

    fn transfer_cells(
        &self,
        plan: &mut CellPlan<'_>,
        call: &Call,
        seen: &CellRows,
    ) -> Result<CellChange, Refusal> {
        let (to, quantity) = (self.target(call)?, call.input.get_int(QUANTITY)?);
        plan.lower(&removal(&call.key, seen, quantity))?;
        let received = self.received_part().at(to.iter().cloned()).bind(QUANTITY, quantity);
        plan.fire(received)?;
        let event =
            EventTemplate::named(format!("{}.received", self.inventory.name)).with(QUANTITY, quantity);
        let resource = self.inventory.name.clone();
        plan.plan.related.push(RelatedEvent { resource, key: key_text(&to), event });
        Ok(CellChange { kind: MovementKind::TransferOut, quantity: -quantity })
    }

    /// Adds the event and the movements.
    fn told(
        &self,
        mut plan: PlanParts,
        call: &Call,
        cx: &ActionContext<'_>,
        change: &CellChange,
    ) -> Result<PlanParts, Refusal> {
        let told = super::write::told(call);
        let event = std::mem::replace(&mut plan.event, EventTemplate::named(""));
        let event = told.iter().fold(event, |event, (name, value)| event.with(name, value.clone()));
        plan.event = event.with(QUANTITY, change.quantity);
        let id = cx.ids.next();
        let mut moved = vec![(change.kind, call.key.clone(), change.quantity)];
        if change.kind == MovementKind::TransferOut {
            moved.push((MovementKind::TransferIn, self.target(call)?, -change.quantity));
        }
        for (kind, key, quantity) in moved {
            let movement = self.inventory.movement(kind, &key, &id, quantity);
            let movement = movement.map(|movement| movement.of_reservation(call.input.text(RESERVATION_ID)));
            plan.steps.extend(movement.map(|movement| movement.because(call.input.text(REASON)).step()));
        }
        Ok(plan)
    }
}

fn removal<'a>(key: &'a [Value], seen: &'a CellRows, quantity: i64) -> CellLowering<'a> {
    CellLowering { key, seen, quantity, backorder: 0, part: |rows| &rows.remove }
}
