//! A06 Inventory / constrained resource: quantities of goods at places, of which callers reserve some and then buy them, or do not.
//!
//! ```text
//!   stock        restock, adjust, recount, transfer        what is in stock
//!                reserve: available → reserved             commit: reserved → sold
//!                release, expire: reserved → available     return: sold → available
//!
//!   reservation    reserve                 commit
//!         (none) ───────────► RESERVED ───────────────► COMMITTED
//!                              │ ▲  │ │
//!                       extend └─┘  │ └─ release ─────► RELEASED
//!                                   └─── expire ──────► EXPIRED
//! ```
//!
//! **Rows.** `stocks(tenant, sku, location, fields…, available, reserved, sold, stocked, updated_at, version)`, kept together by
//! all of the key but its last part; `stock_reservations(tenant, reservation_id, state, lines, bought, holder, created_at,
//! expires_at, committed_at, due_shard, due_at, updated_at, version)`, with indexes by holder and by state and the index `due`
//! across tenants; and `stock_movements(tenant, sku, location, movement_id, kind, quantity, reservation_id, reason, moved_at)`,
//! unless `movements = "log"`.
//!
//! **Invariants.**
//! - I1. Never more is reserved or taken out than is available, but for `backorder`. *Guard of reserve, for each row:*
//!   `available >= quantity - backorder`, where the quantity is the sum of all lines of that row; *of adjust and transfer:*
//!   `available >= quantity`. The guard is judged in the write.
//! - I2. What a row has reserved is the sum of the lines of reservations that are RESERVED. *A reservation and its rows change in one
//!   plan;* each leaves `state = 'RESERVED'` once. *Guard of each row that commit, release and expire change:*
//!   `reserved >= quantity`.
//! - I3. A reservation is made once. *Its row is absent before;* the same id with the same lines and holder gets the same answer.
//! - I4. Nothing is bought after the end, and every reservation ends. *Guard of commit and extend:* `expires_at is null or
//!   expires_at > now`, by the engine's clock, which also set the end; *of expire, the opposite:* `expires_at <= now`. A reservation
//!   is due at its end.
//! - I5. In each row `available + reserved + sold = stocked`. *Each transition changes the columns by amounts that add up.* What is
//!   stocked is the sum of the movements, and what is sold the sum of the lines that were bought, less what came back. *Guard of
//!   return:* `sold >= quantity`. Movements are rows of the same plan.
//! - I6. A count replaces what was seen. *Guard of recount:* the version of the row that the caller has seen (`If-Match`).
//! - I7. The event `low` is left by exactly the plan by which a row falls to the threshold. *Guard of lowering:* that more than
//!   the threshold is left; or that `available` is what was seen, from which the plan falls to it; or that `available <= low`
//!   before.
//! - I8. A refusal for lack is true when it is told. *The refused row said so in the write, and nothing of it was reserved;* if
//!   something was, one step of the sweeper ran after the refusal, and a strong read after it found too little.
//!
//! **Cells** (`cells = N`), for engines on which callers of one row hinder each other. A stock is cut into N rows: cell 0 is its own row,
//! the others are in `stocks_cells(tenant, sku, location, cell, available, reserved, sold, stocked, updated_at, version)`. I1 to I5 hold for
//! each row, and so for all together.
//! - C1. A reserve takes from one cell, chosen by its id. If it is refused, the caller reads all cells and takes from several in one plan.
//!   *Guard of each cell:* `available >= quantity` of it; only cell 0 falls below zero, by `backorder`.
//! - C2. No refusal is an artefact of cells. *The plan that is refused asserts the version of every other cell and takes all that they have;
//!   its last step is that on cell 0, whose guard* `available >= what is left - backorder` *fails.* Steps are judged in order, so all of
//!   them together held too little at one moment.
//! - C3. The plan by which all cells together fall to `low` leaves the event (I7). *A reserve from one cell demands that more than the
//!   threshold is left in it; any other near the threshold asserts the version of every cell.*
//! - C4. Cells become even again. *A plan that takes from several makes the stock due;* the balancer moves quantities between cells. *Guard
//!   of each cell that gives:* `available >= quantity`.
//!
//! **Failures.** *Oversell*: I1. *Double allocate*: I3, and the operation id. *Lost release*: I4; the release is guarded by the state,
//! so any number of repetitions releases once (I2). *Stale availability read*: reads are strong; a refused reserve says the number.
//!
//! **Hotspots.** *Hot inventory key*, *concentrated contention on scarce resources*: `reserve` reads nothing, so that an engine makes
//! one write of many plans that wait for one row; a refused one costs one refused plan. *Fragmented capacity*: lines of several rows
//! are one plan, all or none; cells of one stock are taken from together (C1, C2) and made even (C4).

mod actions;
mod archetype;
mod balance;
mod cell_write;
mod cells;
mod lines;
mod movements;
mod read;
mod reserve;
mod sweep;
mod transitions;
mod write;

pub use archetype::ARCHETYPE;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Row, StoreError, Type, Value};

use crate::blueprint::settings::Field;
use crate::declare::settings::SettingsReader;
use crate::declare::table::{CREATED_AT, STATE, UPDATED_AT};
use crate::declare::{Declare, Machine, ResourceSpec, TableDef, TableSpec};
use crate::infra::due::DUE_AT;
use crate::resource::{key_text, plural};
use crate::view_source::{SourceRows, ViewSource};
use balance::CellBalancer;
use sweep::SharedSweep;
use transitions::{RowParts, StockParts};

/// The states of a reservation.
const RESERVATION_STATES: [&str; 4] = [RESERVED_STATE, COMMITTED, RELEASED, EXPIRED];
const RESERVED_STATE: &str = "RESERVED";
const COMMITTED: &str = "COMMITTED";
const RELEASED: &str = "RELEASED";
const EXPIRED: &str = "EXPIRED";
/// Columns of a stock.
const AVAILABLE: &str = "available";
const RESERVED: &str = "reserved";
const SOLD: &str = "sold";
const STOCKED: &str = "stocked";
/// The number of a cell.
const CELL: &str = "cell";
/// Columns of a reservation.
const RESERVATION_ID: &str = "reservation_id";
const LINES: &str = "lines";
const BOUGHT: &str = "bought";
/// What of which cells: lists of the number of the line, the cell and the quantity. Null if all of it is of cell 0.
const TAKEN: &str = "taken";
const HOLDER: &str = "holder";
const EXPIRES_AT: &str = "expires_at";
const COMMITTED_AT: &str = "committed_at";
/// Inputs, and fields of lines, events and movements.
const QUANTITY: &str = "quantity";
const REASON: &str = "reason";
/// The indexes that list reservations.
const BY_HOLDER: &str = "by_holder";
const BY_STATE: &str = "by_state";

const HOLD_FOR_DEFAULT: Duration = Duration::from_secs(900);
/// The bounds of `hold_for` and `hold_max`.
const HOLDS_FOR: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(366 * 86_400);
/// Rows of a reservation: with the reservation and the log entry a plan has 100 operations.
const LINES_MAX: u32 = 97;
/// The same if each line may leave an event about its row, which may belong to a further partition of the log.
const LINES_MAX_WITH_LOW: u32 = 82;
const LINES_DEFAULT: u32 = 40;
/// The bounds of `backorder` and `low`.
const THRESHOLDS: RangeInclusive<u32> = 0..=1_000_000_000;
/// Names that columns of the key or fields cannot have, because actions take inputs of these names.
const TAKEN_NAMES: [&str; 3] = [QUANTITY, REASON, CELL];

/// One declared kind of stock.
#[derive(Debug)]
struct InventorySpec {
    /// `stock`.
    name: String,
    /// `stock_reservation`.
    reservations: String,
    key: Vec<Field>,
    fields: Vec<Field>,
    stock_def: Arc<TableDef>,
    reservation_def: Arc<TableDef>,
    /// None if movements are only in the log.
    movement_def: Option<Arc<TableDef>>,
    /// None if a reservation lasts until it is released.
    hold_for: Option<Duration>,
    hold_max: Option<Duration>,
    lines_max: usize,
    /// How far below zero what is available may fall.
    backorder: i64,
    /// At how many there is an event.
    low: Option<i64>,
    /// How many rows a stock is cut into.
    cells: usize,
    /// The rows of all cells but the first; none if there is one cell.
    cells_def: Option<Arc<TableDef>>,
}

/// The settings that are no columns.
struct InventorySettings {
    hold_for: Option<Duration>,
    hold_max: Option<Duration>,
    lines_max: u32,
    backorder: u32,
    low: Option<u32>,
    shards: u32,
    has_movements: bool,
    cells: u32,
}

impl InventorySettings {
    fn read(settings: &mut SettingsReader<'_>) -> InventorySettings {
        let hold_for = settings.duration_or_none("hold_for", HOLD_FOR_DEFAULT, HOLDS_FOR);
        let hold_max = settings.maybe_duration("hold_max", HOLDS_FOR);
        let backorder = settings.count("backorder", 0, THRESHOLDS);
        let low = settings.maybe_count("low", THRESHOLDS);
        let shards = settings.count("shards", 16, 1..=1_024);
        let has_movements = settings.choice("movements", &["rows", "log"]) == "rows";
        let cells = settings.count("cells", 1, 1..=cells::CELLS_MAX);
        // A commit changes each row of a line, and tells its movement; a reserve may leave an event about each line.
        let of_movements = if has_movements { LINES_MAX / (cells + 1) } else { LINES_MAX / cells };
        let of_events = if low.is_some() { LINES_MAX_WITH_LOW / cells } else { LINES_MAX };
        let most = of_movements.min(of_events);
        let lines_max = settings.count("lines_max", LINES_DEFAULT.min(most), 1..=most);
        if let Some(hold_max) = hold_max {
            let is_short = hold_for.is_none_or(|hold_for| hold_max < hold_for);
            let title = "`hold_max` must be at least as long as `hold_for`, which must have an end";
            settings.refuse_if(is_short, "hold_max", title);
        }
        InventorySettings { hold_for, hold_max, lines_max, backorder, low, shards, has_movements, cells }
    }
}

/// Reads `[inventory.NAME]`: stocks, reservations and movements.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let key = settings.key("key");
    let fields = settings.fields("fields");
    let table = settings.text("table", plural(name));
    let given = InventorySettings::read(settings);
    for field in key.iter().chain(&fields).filter(|field| TAKEN_NAMES.contains(&field.name.as_str())) {
        let title = format!("`{}` is an input of actions of an inventory", field.name);
        settings.field_problem(field, title, Some("give the column another name"));
    }
    let (reservations, movements) = (format!("{name}_reservation"), format!("{name}_movement"));
    let cells_def = match given.cells {
        1 => None,
        _ => Some(cx.build(cells_table(&format!("{table}_cells"), &key))?),
    };
    let stock_def = cx.build(stock_table(table, &key, &fields, &given))?;
    let reservation_def = cx.build(reservation_table(&reservations, given.shards))?;
    let movement_def = match given.has_movements {
        true => Some(cx.build(movements::table(&movements, &key))?),
        false => None,
    };
    let inventory = Arc::new(InventorySpec {
        name: name.to_owned(),
        reservations,
        key,
        fields,
        stock_def,
        reservation_def,
        movement_def,
        hold_for: given.hold_for,
        hold_max: given.hold_max,
        lines_max: given.lines_max as usize,
        backorder: given.backorder.into(),
        low: given.low.map(i64::from),
        cells: given.cells as usize,
        cells_def,
    });
    declare_resources(cx, &inventory)
}

fn declare_resources(cx: &mut Declare<'_>, inventory: &Arc<InventorySpec>) -> Option<()> {
    let stock = Machine::of(&inventory.name, &inventory.stock_def);
    let stock = transitions::of_rows(inventory, actions::with_patch(inventory, stock), &inventory.fields);
    let stock = cx.machine(stock)?;
    let rows = Arc::new(StockParts { main: RowParts::of(cx, &stock)?, cells: cell_parts(cx, inventory)? });
    let called = actions::reservation_actions(inventory);
    let machine = cx.machine(transitions::of_reservations(inventory, &rows, called))?;
    let expire = cx.part(&machine, "expire")?;
    let reserve = reserve::Reserve {
        inventory: inventory.clone(),
        rows: rows.clone(),
        insert: cx.part(&machine, "reserve")?,
        sweep: SharedSweep::new(&inventory.reservation_def, expire),
    };
    let low = actions::low_events(inventory);
    let low: Vec<&str> = low.iter().map(String::as_str).collect();
    let resource = ResourceSpec::of(&inventory.name, &inventory.stock_def)
        .telling(telling(inventory))
        .machine(&stock)
        .actions(actions::stock_writes(inventory, &rows))
        .actions(actions::stock_reads(inventory))
        .events(&actions::STOCK_EVENTS)
        .events(&[("low", &low)]);
    cx.resource(match &inventory.cells_def {
        Some(def) => resource.table(def.table()).worker(CellBalancer::new(inventory, &rows)),
        None => resource,
    });
    cx.resource(
        ResourceSpec::of(&inventory.reservations, &inventory.reservation_def)
            .actions(actions::reserve_and_reads(inventory, reserve))
            .machine(&machine),
    );
    if let Some(def) = &inventory.movement_def {
        let telling = ViewSource::nothing(
            "its rows are written beside the rows that they tell of",
            format!("make the view of `{}_reservation`", inventory.name),
        );
        cx.resource(
            ResourceSpec::of(&format!("{}_movement", inventory.name), def)
                .telling(telling)
                .action(actions::movement_list(inventory, def)),
        );
    }
    Some(())
}

/// The transitions of the rows of cells; none if there is one cell.
fn cell_parts(cx: &mut Declare<'_>, inventory: &InventorySpec) -> Option<Option<RowParts>> {
    let Some(def) = &inventory.cells_def else { return Some(None) };
    let machine = Machine::of(format!("{}_cell", inventory.name), def);
    let machine = cx.machine(transitions::of_rows(inventory, machine, &[]))?;
    RowParts::of(cx, &machine).map(Some)
}

/// How views can follow a stock.
fn telling(inventory: &InventorySpec) -> ViewSource {
    if inventory.cells_def.is_some() {
        let instead = format!("make the view of `{}`", inventory.reservations);
        return ViewSource::nothing("its quantities are in several rows", instead);
    }
    let unlogged = "reservations change them, and their events are about the reservation";
    let source_rows = SourceRows::with_row(&inventory.name, inventory.stock_def.table());
    ViewSource::Rows(Box::new(source_rows.unlogged(&[AVAILABLE, RESERVED, SOLD, UPDATED_AT], unlogged)))
}

fn cells_table(table: &str, key: &[Field]) -> TableSpec {
    quantities(TableSpec::named(table).key(key).sort(CELL, Type::Int), true)
}

/// The columns of a row of a stock. Those of one cell among several are not shown, because a caller wants all cells together.
fn quantities(spec: TableSpec, is_cell: bool) -> TableSpec {
    let columns = [
        (AVAILABLE, "what can be reserved"),
        (RESERVED, "what reservations hold"),
        (SOLD, "what was bought and did not come back"),
        (STOCKED, "what was put in, less what was taken out: available, reserved and sold together"),
    ];
    let spec = columns.into_iter().fold(spec, |spec, (name, about)| {
        let spec = spec.int(name).default(0).about(about);
        if is_cell { spec.hidden() } else { spec }
    });
    spec.updated_at()
}

fn stock_table(table: String, key: &[Field], fields: &[Field], given: &InventorySettings) -> TableSpec {
    let spec = TableSpec::named(table).growing("cells", given.cells);
    let spec = match key.split_last() {
        // The rows of one group are listed by their keys.
        Some((last, group)) if !group.is_empty() => spec.key(group).sort(&last.name, last.kind),
        _ => spec.key(key),
    };
    let spec = quantities(spec.fields(fields), given.cells > 1);
    match given.cells {
        1 => spec,
        // When the cells are to be made even.
        _ => spec.time(DUE_AT).null().hidden().deadline(&[""; 0], DUE_AT, given.shards),
    }
}

fn reservation_table(name: &str, shards: u32) -> TableSpec {
    TableSpec::named(plural(name))
        .partition(RESERVATION_ID, Type::Text)
        .states(&RESERVATION_STATES)
        .about("as it is now")
        .json(LINES)
        .about("what it reserved of which rows")
        .immutable()
        .json(TAKEN)
        .null()
        .hidden()
        .immutable()
        .json(BOUGHT)
        .null()
        .about("what of it was bought")
        .text(HOLDER)
        .null()
        .about("for whom")
        .immutable()
        .created_at()
        .time(EXPIRES_AT)
        .null()
        .about("when it ends; null if it lasts until it is released")
        .time(COMMITTED_AT)
        .null()
        .about("when it was bought")
        .updated_at()
        .deadline(&[RESERVED_STATE], EXPIRES_AT, shards)
        .index(BY_HOLDER, &[HOLDER], &[CREATED_AT])
        .index(BY_STATE, &[STATE], &[CREATED_AT])
}

impl InventorySpec {
    fn what(&self, key: &[Value]) -> String {
        format!("{} {}", self.name, key_text(key))
    }

    /// The key of a cell's row.
    fn row_key(&self, key: &[Value], cell: usize) -> Vec<Value> {
        let number = (cell > 0).then(|| Value::Int(i64::try_from(cell).unwrap_or(i64::MAX)));
        key.iter().cloned().chain(number).collect()
    }

    /// What a reservation can still get of a row.
    fn orderable(&self, row: &Row) -> Result<i64, StoreError> {
        Ok(row.get_int(AVAILABLE)?.saturating_add(self.backorder))
    }
}

#[cfg(test)]
mod tests {
    use crate::Blueprint;
    use crate::resource::declare;

    fn check(text: &str, expect: &str) {
        let blueprint = Blueprint::read("statehouse.toml", &format!("[inventory.stock]\n{text}\n")).unwrap();
        let problems = declare(&blueprint).unwrap_err().render(false);
        assert!(problems.contains(expect), "{problems}");
    }

    #[test]
    fn declarations_are_checked() {
        let key = "key = { sku = \"text\", location = \"text\" }";
        check("", "has no key");
        check("key = { quantity = \"text\" }", "`quantity` is an input");
        check(&format!("{key}\nfields = {{ available = \"int\" }}"), "has a column `available` already");
        check(&format!("{key}\nlines_max = 49"), "from 1 to 48");
        check(&format!("{key}\nmovements = \"log\"\nlow = 1\nlines_max = 83"), "from 1 to 82");
        check(&format!("{key}\nmovements = \"log\"\nlines_max = 98"), "from 1 to 97");
        check(&format!("{key}\ncells = 16\nlines_max = 6"), "from 1 to 5");
        check(&format!("{key}\ncells = 41"), "from 1 to 40");
        check(&format!("{key}\nhold_max = \"1m\""), "at least as long as `hold_for`");
        check(&format!("{key}\nhold_for = \"\"\nhold_max = \"1m\""), "which must have an end");
        check(&format!("{key}\nhold_for = \"soon\""), "a span of time");
        check(&format!("{key}\nbackorders = 1"), "did you mean `backorder`?");
    }
}
