//! The machines: rows of a stock, which plans of actions and reservations change, and reservations.

use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::Value;

use super::lines::Line;
use super::movements::MovementKind;
use super::{
    AVAILABLE, BOUGHT, COMMITTED, COMMITTED_AT, CREATED_AT, EXPIRED, EXPIRES_AT, HOLDER, InventorySpec,
    LINES, QUANTITY, RELEASED, RESERVED, RESERVED_STATE, SOLD, STOCKED, TAKEN,
};
use crate::action::{ActionContext, Call, Code, Refusal};
use crate::blueprint::settings::Field;
use crate::declare::action::ActionSpec;
use crate::declare::machine::{
    Gather, Gathered, MachinePart, PartUse, Scene, Transition, TransitionCase, absent, always, any,
    difference, from, null, sum,
};
use crate::declare::rule::{Rule, bind, coalesce, col, is_null, now, now_minus, now_plus};
use crate::declare::settings::duration_text;
use crate::declare::{Machine, MachineSpec};

/// What parts of a stock's row are bound to.
pub(super) const FLOOR: &str = "floor";
pub(super) const SEEN: &str = "seen";
pub(super) const LOW: &str = "low";
pub(super) const FREED: &str = "freed";
/// What is said of a return of more than was sold.
const NOT_SOLD: &str = "{what} has not sold as many; no more can come back";
/// The cases of a transition that lowers what is available, if there is an event `low`.
pub(super) const PLENTY: &str = "plenty";
pub(super) const CROSSING: &str = "crossing";
pub(super) const BELOW: &str = "below";
/// The id of the movements that a plan writes.
pub(super) const MOVEMENT: &str = "movement";

/// The transitions of one row of a stock.
pub(super) struct RowParts {
    /// Adds to a row, which may be absent.
    pub add: PartUse,
    /// Adds to a row that exists.
    pub find: PartUse,
    /// Takes out what is available.
    pub remove: PartUse,
    /// Sets the quantity that was counted.
    pub recount: PartUse,
    /// Reserves what is available.
    pub take: PartUse,
    /// Ends what is reserved: a part of it is sold, the rest is available again.
    pub settle: PartUse,
    /// Brings back what was sold.
    pub give_back: PartUse,
}

/// The transitions of the rows of a stock.
pub(super) struct StockParts {
    /// Of its own row, which is cell 0.
    pub main: RowParts,
    /// Of the other cells, if there are some.
    pub cells: Option<RowParts>,
}

impl StockParts {
    /// Those of a cell.
    pub(super) fn of(&self, cell: usize) -> &RowParts {
        match (&self.cells, cell) {
            (Some(cells), 1..) => cells,
            _ => &self.main,
        }
    }

    /// One transition, of all rows.
    pub(super) fn each(&self, part: fn(&RowParts) -> &PartUse) -> Vec<PartUse> {
        [Some(&self.main), self.cells.as_ref()].into_iter().flatten().map(|rows| part(rows).clone()).collect()
    }
}

/// The machine of a table with rows of a stock. A row that is added to gets these fields.
pub(super) fn of_rows(inventory: &InventorySpec, machine: MachineSpec, fields: &[Field]) -> MachineSpec {
    let fields = fields.iter().map(|field| field.name.clone());
    let raised = |case: TransitionCase| {
        case.set(STOCKED, sum(coalesce(STOCKED, 0), bind(QUANTITY)))
            .set(AVAILABLE, sum(coalesce(AVAILABLE, 0), bind(QUANTITY)))
    };
    let removed = |case: TransitionCase| case.set(STOCKED, difference(col(STOCKED), bind(QUANTITY)));
    let taken = |case: TransitionCase| case.set(RESERVED, sum(col(RESERVED), bind(QUANTITY)));
    // The action demands the version that was read.
    let recounted = any().to_same().set(STOCKED, bind(STOCKED)).set(AVAILABLE, bind(AVAILABLE));
    let settled = any()
        .to_same()
        .rule_or_retry("reserved", col(RESERVED).ge(bind(QUANTITY)))
        .set(RESERVED, difference(col(RESERVED), bind(QUANTITY)))
        .set(SOLD, sum(col(SOLD), bind(SOLD)))
        .set(AVAILABLE, sum(col(AVAILABLE), bind(FREED)));
    let returned = any()
        .to_same()
        .rule("sold", col(SOLD).ge(bind(QUANTITY)), Code::WrongState, NOT_SOLD)
        .set(SOLD, difference(col(SOLD), bind(QUANTITY)))
        .set(AVAILABLE, sum(col(AVAILABLE), bind(QUANTITY)));
    machine
        .transition(Transition::part("add", raised(always().to_same()).set_given(fields)))
        .transition(Transition::part("find", raised(any().to_same())))
        .transition(lowering(inventory, "remove").each(removed))
        .transition(Transition::part("recount", recounted))
        .transition(lowering(inventory, "take").each(taken))
        .transition(Transition::part("settle", settled))
        .transition(Transition::part("give_back", returned))
}

impl RowParts {
    /// The transitions, found by their names.
    pub(super) fn of(cx: &mut crate::declare::Declare<'_>, machine: &Arc<Machine>) -> Option<RowParts> {
        Some(RowParts {
            add: cx.part(machine, "add")?,
            find: cx.part(machine, "find")?,
            remove: cx.part(machine, "remove")?,
            recount: cx.part(machine, "recount")?,
            take: cx.part(machine, "take")?,
            settle: cx.part(machine, "settle")?,
            give_back: cx.part(machine, "give_back")?,
        })
    }
}

/// A transition that lowers what is available (I1). With `low`, three cases tell whether it falls to the threshold by this plan:
/// there is plenty left; it is exactly what was seen, and falls to the threshold; it was there before.
fn lowering(inventory: &InventorySpec, name: &'static str) -> Transition {
    // The action that fires it says what is lacking.
    let enough = |case: TransitionCase| case.rule_or_retry("enough", col(AVAILABLE).ge(bind(FLOOR)));
    let lowered = |case: TransitionCase| case.set(AVAILABLE, difference(col(AVAILABLE), bind(QUANTITY)));
    let case = || any().to_same();
    let transition = match inventory.low.filter(|_| inventory.cells == 1) {
        None => Transition::part(name, enough(case())),
        Some(_) => Transition::part(
            name,
            [
                enough(case().named(PLENTY)),
                case().named(CROSSING).rule_or_retry("as it was seen", col(AVAILABLE).eq(bind(SEEN))),
                enough(case().named(BELOW)).rule_or_retry("low", col(AVAILABLE).le(bind(LOW))),
            ],
        ),
    };
    transition.each(lowered)
}

/// The actions of a reservation that are transitions of its row.
pub(super) struct ReservationActions {
    pub commit: ActionSpec,
    pub release: ActionSpec,
    /// None if reservations have no end.
    pub extend: Option<ActionSpec>,
    pub expire: ActionSpec,
}

/// The machine of reservations. `reserve` fires the first transition by hand.
pub(super) fn of_reservations(
    inventory: &Arc<InventorySpec>,
    rows: &Arc<StockParts>,
    actions: ReservationActions,
) -> MachineSpec {
    let ReservationActions { commit, release, extend, expire } = actions;
    let ended = |case: TransitionCase| {
        case.refused_in(EXPIRED, Code::Expired, "{what} ended at {expires_at}; reserve again")
    };
    let live = |case: TransitionCase| {
        ended(case).rule("in time", in_time(), Code::Expired, "{what} ended at {expires_at}; reserve again")
    };
    let reserved = absent()
        .to(RESERVED_STATE)
        .event("reserved")
        .set(LINES, bind(LINES))
        .set(TAKEN, bind(TAKEN))
        .set_given([HOLDER])
        .set(CREATED_AT, now())
        .set(EXPIRES_AT, inventory.hold_for.map_or_else(null, now_plus));
    let committed = live(from([RESERVED_STATE]).to(COMMITTED))
        .event("committed")
        .set(COMMITTED_AT, now())
        .set_with(BOUGHT, bought(inventory))
        .parts(rows.each(|rows| &rows.settle), settled(inventory, rows, true))
        .parts([], sales(inventory));
    let released = ended(from([RESERVED_STATE]).to(RELEASED));
    let expired = ended(from([RESERVED_STATE]).to(EXPIRED));
    let freed =
        |case: TransitionCase| case.parts(rows.each(|rows| &rows.settle), settled(inventory, rows, false));
    let reading = |transition: Transition| transition.reading_only([LINES, TAKEN]);
    let machine = Machine::of(&inventory.reservations, &inventory.reservation_def)
        .transition(Transition::part("reserve", reserved))
        .transition(reading(Transition::call(commit, committed)).gather(NewId).codes(&[Code::InvalidInput]))
        .transition(reading(Transition::call(release, freed(released))))
        .transition(reading(Transition::deadline_or_call(expire, freed(expired))));
    match (extend, inventory.hold_for) {
        (Some(extend), Some(hold_for)) => {
            let extended = live(from([RESERVED_STATE]).to_same());
            let extended = match inventory.hold_max {
                Some(hold_max) => {
                    let longest =
                        format!("{{what}} cannot last longer than {} in all", duration_text(hold_max));
                    let begun = col(CREATED_AT).ge(now_minus(hold_max.saturating_sub(hold_for)));
                    extended.rule("bound", begun, Code::Expired, longest)
                }
                None => extended,
            };
            machine.transition(Transition::call(extend, extended.set(EXPIRES_AT, now_plus(hold_for))))
        }
        _ => machine,
    }
}

/// I4: by the engine's clock, which also set the end.
fn in_time() -> Rule {
    is_null(EXPIRES_AT).or(col(EXPIRES_AT).gt(now()))
}

/// What a commit buys, as the row keeps it.
fn bought(
    inventory: &Arc<InventorySpec>,
) -> impl Fn(&Scene<'_>) -> Result<statehouse_store::Expr, Refusal> + use<> {
    let inventory = inventory.clone();
    move |scene| {
        let (_, bought) = ending(&inventory, scene)?;
        Ok(Value::Json(inventory.lines_json(&bought)).into())
    }
}

/// The lines of a reservation, and what of them a call buys.
fn ending(inventory: &Arc<InventorySpec>, scene: &Scene<'_>) -> Result<(Vec<Line>, Vec<Line>), Refusal> {
    let reserved = inventory.lines_in(scene.loaded_row()?, LINES)?;
    let bought = inventory.bought(&reserved, scene.inputs())?;
    Ok((reserved, bought))
}

/// Ends what a reservation has of each row (I2). Rows change only together with the reservation, so that a refused row means that
/// the reservation has changed since.
fn settled(
    inventory: &Arc<InventorySpec>,
    rows: &Arc<StockParts>,
    buys: bool,
) -> impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + use<> {
    let (inventory, rows) = (inventory.clone(), rows.clone());
    move |scene| {
        let (reserved, bought) = match buys {
            true => ending(&inventory, scene)?,
            false => (inventory.lines_in(scene.loaded_row()?, LINES)?, Vec::new()),
        };
        let mut left = bought;
        let mut fired = Vec::new();
        for taken in inventory.taken_in(scene.loaded_row()?, &reserved)? {
            let key = reserved.get(taken.line).map_or(&[][..], |line| &line.key);
            let bought = left.iter_mut().find(|line| line.key == key);
            let sold = bought.map_or(0, |line| {
                let sold = line.quantity.min(taken.quantity);
                line.quantity -= sold;
                sold
            });
            let firing = rows.of(taken.cell).settle.at(inventory.row_key(key, taken.cell));
            let firing =
                firing.bind(QUANTITY, taken.quantity).bind(SOLD, sold).bind(FREED, taken.quantity - sold);
            fired.push(firing.or_retry().into());
        }
        Ok(fired)
    }
}

/// The movements of a sale.
fn sales(inventory: &Arc<InventorySpec>) -> impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + use<> {
    let inventory = inventory.clone();
    move |scene| {
        let (_, bought) = ending(&inventory, scene)?;
        let id = scene.bound(MOVEMENT).and_then(Value::as_text).unwrap_or_default();
        let reservation = scene.key_text()?;
        let steps = bought.iter().filter_map(|line| {
            let movement = inventory.movement(MovementKind::Sale, &line.key, id, line.quantity)?;
            Some(movement.of_reservation(Some(reservation)).step().into())
        });
        Ok(steps.collect())
    }
}

/// Gives the movements of a plan their id.
struct NewId;

#[async_trait::async_trait]
impl Gather for NewId {
    async fn gather(
        &self,
        _: &Call,
        cx: &ActionContext<'_>,
        _: Option<&statehouse_store::Row>,
    ) -> Result<Gathered, Refusal> {
        let binds = vec![(MOVEMENT.into(), cx.ids.next().into())];
        Ok(Gathered { binds, ..Gathered::default() })
    }
}

/// What a call says why it changes a stock.
pub(super) fn reason(call: &Call) -> Json {
    call.input.text(super::REASON).map_or(Json::Null, Json::from)
}
