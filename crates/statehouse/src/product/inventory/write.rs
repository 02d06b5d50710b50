//! The actions on stocks: restock, adjust, recount, return and transfer. The transitions that they fire are in [`super::transitions`].

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse_store::plan::Expect;
use statehouse_store::{EventTemplate, Guard, Operand, Reason, Row, StoreError, Value, bug};

use super::cell_write::PROOF;
use super::movements::MovementKind;
use super::transitions::{BELOW, CROSSING, FLOOR, LOW, PLENTY, SEEN, StockParts, reason};
use super::{AVAILABLE, InventorySpec, QUANTITY, REASON, RESERVATION_ID, RESERVED, SOLD, STOCKED};
use crate::action::{
    ActionContext, Call, Code, Expected, PlanParts, Prepare, Prepared, Refusal, RefusedStep, RelatedEvent,
    Verdict,
};
use crate::blueprint::settings::Field;
use crate::declare::machine::{Firing, PartUse, add_parts, part_verdict};
use crate::resource::key_text;

/// By how much `adjust` changes a stock.
pub(super) const BY: &str = "by";
/// How many were counted.
pub(super) const COUNTED: &str = "counted";
/// What comes before a column of the key in the name of an input of `transfer`.
pub(super) const TO: &str = "to_";

/// An action on one stock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StockAction {
    Restock,
    Adjust,
    Recount,
    Return,
    Transfer,
}

/// One change of a stock by an action, with the movement that it is.
struct StockChange {
    firing: Firing,
    key: Vec<Value>,
    kind: MovementKind,
    quantity: i64,
    low: Option<RelatedEvent>,
    /// The version at which its row was read, if the change follows from what was read.
    read: Option<i64>,
}

/// How a plan lowers what is available.
pub(super) struct Lowering {
    pub quantity: i64,
    /// The least that must be available.
    pub floor: i64,
    /// What was available when the row was last seen.
    pub seen: Option<i64>,
}

impl InventorySpec {
    /// Fires a transition that lowers what is available, with the event `low` if the row falls to the threshold by it (I1, I7).
    pub(super) fn lower(
        &self,
        part: &PartUse,
        key: &[Value],
        lowering: &Lowering,
    ) -> (Firing, Option<RelatedEvent>) {
        let Lowering { quantity, floor, seen } = *lowering;
        let firing = part.at(key.iter().cloned()).bind(QUANTITY, quantity);
        let Some(low) = self.low else { return (firing.bind(FLOOR, floor), None) };
        match seen {
            Some(seen) if seen <= low => (firing.case(BELOW).bind(FLOOR, floor).bind(LOW, low), None),
            Some(seen) if seen - quantity <= low => {
                let event = self.low_event(key, seen - quantity, low);
                (firing.case(CROSSING).bind(SEEN, seen), Some(event))
            }
            // More than the threshold is left.
            _ => (firing.case(PLENTY).bind(FLOOR, floor.max(quantity + low + 1)), None),
        }
    }

    pub(super) fn low_event(&self, key: &[Value], available: i64, low: i64) -> RelatedEvent {
        let event =
            EventTemplate::named(format!("{}.low", self.name)).with(AVAILABLE, available).with(LOW, low);
        let columns = self.key.iter().zip(key);
        let event = columns.fold(event, |event, (field, value)| event.with(&field.name, value.to_json()));
        RelatedEvent { resource: self.name.clone(), key: key_text(key), event }
    }

    /// The refusal of a call that wants more than there is.
    pub(super) fn out_of_stock(&self, key: &[Value], wanted: i64, orderable: i64) -> Refusal {
        let message = format!(
            "{} has {orderable} available and {wanted} are wanted; ask for less, or try again when stock was added or \
             released",
            self.what(key)
        );
        Refusal::new(Code::OutOfStock, message)
    }

    /// The refusal of a plan whose last step failed on cell 0, after all other cells were as they had been read (C2).
    pub(super) fn proven(
        &self,
        row: &Row,
        key: &[Value],
        wanted: i64,
        refused: &RefusedStep<'_>,
    ) -> Result<Refusal, StoreError> {
        let floor = match refused.guard() {
            Some(Guard::Compare(_, _, Operand::Value(floor))) => floor.as_int(),
            _ => None,
        };
        let floor =
            floor.ok_or_else(|| bug!("a lack was proven by another guard than that of the quantity"))?;
        // All of the other cells is what is wanted less the floor of cell 0.
        Ok(self.out_of_stock(key, wanted, row.get_int(AVAILABLE)? + wanted - floor))
    }

    /// The refusal of a count of less than is reserved.
    pub(super) fn counted_too_few(&self, key: &[Value], counted: i64, reserved: i64) -> Refusal {
        let what = self.what(key);
        let message =
            format!("{what} has {reserved} reserved, and {counted} were counted; release reservations first");
        Refusal::new(Code::OutOfStock, message)
    }
}

/// Prepares an action on a stock.
pub(super) struct WriteStock {
    pub inventory: Arc<InventorySpec>,
    pub rows: Arc<StockParts>,
    pub action: StockAction,
}

impl WriteStock {
    pub(super) fn event(&self) -> &'static str {
        match self.action {
            StockAction::Restock => "restocked",
            StockAction::Adjust => "adjusted",
            StockAction::Recount => "recounted",
            StockAction::Return => "returned",
            StockAction::Transfer => "transferred",
        }
    }

    /// What is available by the row of the last refusal.
    fn seen(cx: &ActionContext<'_>) -> Option<i64> {
        cx.refused.and_then(|last| last.row.as_ref()?.int(AVAILABLE))
    }

    /// Adds to the row of a call, with the fields that it gives. A row is only made with all that it needs.
    pub(super) fn restocked(&self, call: &Call, quantity: i64) -> Firing {
        let is_whole =
            self.inventory.fields.iter().all(|field| !is_needed(field) || call.input.has(&field.name));
        let part = if is_whole { &self.rows.main.add } else { &self.rows.main.find };
        let firing = part.at(call.key.iter().cloned()).bind(QUANTITY, quantity);
        let given = self.inventory.fields.iter().filter(|field| call.input.has(&field.name));
        given.fold(firing, |firing, field| {
            firing.bind(field.name.clone(), call.input.value_or_null(&field.name))
        })
    }

    fn restock(&self, call: &Call) -> Result<StockChange, Refusal> {
        let quantity = call.input.get_int(QUANTITY)?;
        let firing = self.restocked(call, quantity);
        Ok(StockChange {
            firing,
            key: call.key.clone(),
            kind: MovementKind::Restock,
            quantity,
            low: None,
            read: None,
        })
    }

    fn adjust(&self, call: &Call, cx: &ActionContext<'_>) -> Result<StockChange, Refusal> {
        let by = change_by(call)?;
        let key = call.key.clone();
        let (firing, low) = match by {
            1.. => (self.rows.main.find.at(key.iter().cloned()).bind(QUANTITY, by), None),
            _ => self.inventory.lower(&self.rows.main.remove, &key, &removal(-by, Self::seen(cx))),
        };
        Ok(StockChange { firing, key, kind: MovementKind::Adjust, quantity: by, low, read: None })
    }

    /// Takes what was counted for what is there: available and reserved (I6).
    async fn recount(&self, call: &Call, cx: &ActionContext<'_>) -> Result<StockChange, Refusal> {
        let inventory = &self.inventory;
        let row = cx.row(inventory.stock_def.table(), &call.tenant, call.key.iter().cloned()).await?;
        let row = row.ok_or_else(|| inventory.missing(&call.key))?;
        if let Some(Expected::Version(expected)) = call.expected
            && expected != row.version()
        {
            return Err(self.conflict(call, Some(&row)));
        }
        let counted = call.input.get_int(COUNTED)?;
        let available = counted - row.get_int(RESERVED)?;
        if available < -inventory.backorder {
            let refusal = inventory.counted_too_few(&call.key, counted, row.get_int(RESERVED)?);
            return Err(refusal.at_version(Some(&row)));
        }
        let stocked = counted.saturating_add(row.get_int(SOLD)?);
        let before = row.get_int(AVAILABLE)?;
        let low = inventory.low.filter(|low| before > *low && available <= *low);
        let firing = self.rows.main.recount.at(call.key.iter().cloned());
        Ok(StockChange {
            firing: firing.bind(STOCKED, stocked).bind(AVAILABLE, available),
            key: call.key.clone(),
            kind: MovementKind::Recount,
            quantity: stocked - row.get_int(STOCKED)?,
            low: low.map(|low| inventory.low_event(&call.key, available, low)),
            read: Some(row.version()),
        })
    }

    fn give_back(&self, call: &Call) -> Result<StockChange, Refusal> {
        let quantity = call.input.get_int(QUANTITY)?;
        let firing = self.rows.main.give_back.at(call.key.iter().cloned()).bind(QUANTITY, quantity);
        Ok(StockChange {
            firing,
            key: call.key.clone(),
            kind: MovementKind::Return,
            quantity,
            low: None,
            read: None,
        })
    }

    fn transfer(&self, call: &Call, cx: &ActionContext<'_>) -> Result<[StockChange; 2], Refusal> {
        let quantity = call.input.get_int(QUANTITY)?;
        let to = self.target(call)?;
        let key = call.key.clone();
        let (firing, low) =
            self.inventory.lower(&self.rows.main.remove, &key, &removal(quantity, Self::seen(cx)));
        let out = StockChange {
            firing,
            key,
            kind: MovementKind::TransferOut,
            quantity: -quantity,
            low,
            read: None,
        };
        let firing = self.received_part().at(to.iter().cloned()).bind(QUANTITY, quantity);
        Ok([
            out,
            StockChange { firing, key: to, kind: MovementKind::TransferIn, quantity, low: None, read: None },
        ])
    }

    /// The key of the row that `transfer` moves to.
    pub(super) fn target(&self, call: &Call) -> Result<Vec<Value>, Refusal> {
        let target = |(field, own): (&Field, &Value)| {
            call.input.value(&format!("{TO}{}", field.name)).cloned().unwrap_or_else(|| own.clone())
        };
        let to: Vec<Value> = self.inventory.key.iter().zip(&call.key).map(target).collect();
        if to == call.key {
            let name = self.inventory.key.last().map_or("", |field| &field.name);
            let detail = "name another row than that which it is taken from";
            return Err(Refusal::field(&format!("{TO}{name}"), detail));
        }
        Ok(to)
    }

    /// Adds to the row that `transfer` moves to, which must exist if it needs fields.
    pub(super) fn received_part(&self) -> &PartUse {
        let rows = &self.rows.main;
        if self.inventory.fields.iter().any(is_needed) { &rows.find } else { &rows.add }
    }

    /// The refusal of a call whose caller has seen another version.
    fn conflict(&self, call: &Call, row: Option<&Row>) -> Refusal {
        self.conflict_at(call, row.map_or(0, Row::version))
    }

    /// The same, with the version as it is.
    pub(super) fn conflict_at(&self, call: &Call, version: i64) -> Refusal {
        let what = self.inventory.what(&call.key);
        let message = format!("{what} is at version {version}: read it again and decide anew");
        Refusal { current_version: Some(version), ..Refusal::new(Code::VersionConflict, message) }
    }

    /// What it means that a step of a plan on several cells was refused. What is not proven is read again.
    fn cells_verdict(&self, call: &Call, refused: &RefusedStep<'_>, wanted: Option<i64>) -> Verdict {
        let is_proof = refused.label() == PROOF && refused.guard().is_some();
        if let (Some(row), Some(wanted), true) = (refused.row, wanted, is_proof) {
            return Verdict::refuse(self.inventory.proven(row, &call.key, wanted, refused));
        }
        match (refused.reason, self.action) {
            (Reason::Absent, StockAction::Restock | StockAction::Transfer) => {
                Verdict::Refuse(self.inventory.missing(&refused.step.key))
            }
            (Reason::Guard { .. } | Reason::Absent | Reason::Present, _) => Verdict::Retry,
            (Reason::Overflow { .. } | Reason::Null { .. }, _) => {
                refused.standard(&self.inventory.what(&refused.step.key))
            }
        }
    }

    /// The plan of changes, the first of which is that of the call's own row.
    fn planned(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        changes: Vec<StockChange>,
    ) -> Result<PlanParts, Refusal> {
        let inventory = &self.inventory;
        let event = EventTemplate::named(format!("{}.{}", inventory.name, self.event()));
        let mut plan = PlanParts::new(key_text(&call.key), Vec::new(), event);
        let id = cx.ids.next();
        let told = told(call);
        for (index, change) in changes.into_iter().enumerate() {
            let step = plan.steps.len();
            add_parts(&mut plan, &call.tenant, cx.clock.now(), [change.firing.into()])?;
            if index == 0 {
                expect(&mut plan, call, change.read);
                let event = std::mem::replace(&mut plan.event, EventTemplate::named(""));
                let event = told.iter().fold(event, |event, (name, value)| event.with(name, value.clone()));
                plan.event = EventTemplate { row_of: Some(step), ..event.with(QUANTITY, change.quantity) };
            } else {
                let event = EventTemplate::named(format!("{}.received", inventory.name))
                    .with(QUANTITY, change.quantity);
                let event = EventTemplate { row_of: Some(step), ..event };
                let key = key_text(&change.key);
                plan.related.push(RelatedEvent { resource: inventory.name.clone(), key, event });
            }
            plan.related.extend(change.low);
            if let Some(movement) = inventory.movement(change.kind, &change.key, &id, change.quantity) {
                let movement = movement.of_reservation(call.input.text(RESERVATION_ID));
                plan.steps.push(movement.because(call.input.text(REASON)).step());
            }
        }
        Ok(plan)
    }
}

/// Whether a row cannot be without a field.
fn is_needed(field: &Field) -> bool {
    !field.optional && field.default.is_none()
}

/// By how much `adjust` changes a stock: not by nothing.
pub(super) fn change_by(call: &Call) -> Result<i64, Refusal> {
    match call.input.get_int(BY)? {
        0 => Err(Refusal::field(BY, "say by how many the stock changes; it is not changed by 0")),
        by => Ok(by),
    }
}

/// What the event of a call has besides the row and the quantity.
pub(super) fn told(call: &Call) -> Map<String, Json> {
    let reservation = call.input.text(RESERVATION_ID).map(|id| (RESERVATION_ID.to_owned(), Json::from(id)));
    let reason = Some((REASON.to_owned(), reason(call))).filter(|(_, reason)| !reason.is_null());
    reservation.into_iter().chain(reason).collect()
}

fn removal(quantity: i64, seen: Option<i64>) -> Lowering {
    Lowering { quantity, floor: quantity, seen }
}

/// Demands of the call's own row the version at which it was read, or what the caller says about it.
fn expect(plan: &mut PlanParts, call: &Call, read: Option<i64>) {
    let Some(step) = plan.steps.first_mut() else { return };
    let version = match call.expected {
        Some(Expected::Version(version)) => Some(version),
        Some(Expected::Any) | None => read,
    };
    if call.expected.is_some() || read.is_some() {
        step.expect = Expect::Present;
    }
    if let Some(version) = version {
        *step = step.clone().guard(Guard::version(version));
    }
}

#[async_trait]
impl Prepare for WriteStock {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        if self.inventory.cells > 1 {
            return self.prepare_cells(call, cx).await.map(Into::into);
        }
        let changes = match self.action {
            StockAction::Restock => vec![self.restock(call)?],
            StockAction::Adjust => vec![self.adjust(call, cx)?],
            StockAction::Recount => vec![self.recount(call, cx).await?],
            StockAction::Return => vec![self.give_back(call)?],
            StockAction::Transfer => self.transfer(call, cx)?.into(),
        };
        self.planned(call, cx, changes).map(Into::into)
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let wanted = match self.action {
            StockAction::Adjust => call.input.int(BY).map(|by| -by),
            StockAction::Transfer => call.input.int(QUANTITY),
            _ => None,
        };
        if self.inventory.cells > 1 {
            return self.cells_verdict(call, refused, wanted);
        }
        if let (Some(Expected::Version(version)), Reason::Guard { guard, .. }) =
            (call.expected, refused.reason)
            && **guard == Guard::version(version)
        {
            return Verdict::Refuse(self.conflict(call, refused.row));
        }
        if let Reason::Absent = refused.reason {
            return Verdict::Refuse(self.inventory.missing(&refused.step.key));
        }
        let lacking = refused.row.zip(wanted).filter(|_| matches!(refused.reason, Reason::Guard { .. }));
        if let Some((row, wanted)) = lacking {
            return match row.get_int(AVAILABLE) {
                Ok(available) if available < wanted => {
                    let refusal = self.inventory.out_of_stock(row.key(), wanted, available);
                    Verdict::Refuse(refusal.at_version(Some(row)))
                }
                Ok(_) => Verdict::Retry,
                Err(error) => Verdict::Refuse(error.into()),
            };
        }
        let uses = [&self.rows.main.add, &self.rows.main.find, &self.rows.main.give_back].map(Clone::clone);
        part_verdict(&uses, refused).unwrap_or(Verdict::Retry)
    }
}
