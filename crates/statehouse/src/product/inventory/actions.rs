//! What can be done with stocks, reservations and movements.

use std::sync::Arc;

use serde_json::{Value as Json, json};
use statehouse_store::Type;

use super::lines::{self, QUANTITY_MAX};
use super::read::{Availability, CellStocks, GroupList, availability_form, stock_form};
use super::reserve::Reserve;
use super::transitions::{ReservationActions, StockParts};
use super::write::{BY, COUNTED, StockAction, TO, WriteStock};
use super::{
    BY_HOLDER, BY_STATE, HOLDER, InventorySpec, LINES, QUANTITY, REASON, RESERVATION_ID, RESERVATION_STATES,
    RESERVED_STATE, STATE,
};
use crate::action::{Answer, Code, Method, RouteKind, WAIT};
use crate::blueprint::settings::Field;
use crate::declare::machine::{Transition, any};
use crate::declare::settings::duration_text;
use crate::declare::table::TableDef;
use crate::declare::{ActionSpec, IndexList, MachineSpec, RowRead};
use crate::form::{Form, Property};
use crate::resource::state_name;

/// The events of stocks that actions by hand leave.
pub(super) const STOCK_EVENTS: [(&str, &[&str]); 6] = [
    ("restocked", &["restock"]),
    ("adjusted", &["adjust"]),
    ("recounted", &["recount"]),
    ("returned", &["return"]),
    ("transferred", &["transfer"]),
    ("received", &["transfer"]),
];

/// The actions that may leave the event `low`; none without the setting.
pub(super) fn low_events(inventory: &InventorySpec) -> Vec<String> {
    let own = ["adjust", "recount", "transfer"].map(|action| format!("{}.{action}", inventory.name));
    let reserve = format!("{}.reserve", inventory.reservations);
    inventory.low.map_or_else(Vec::new, |_| own.into_iter().chain([reserve]).collect())
}

fn quantity(about: &str) -> Property {
    Property::required(QUANTITY, Form::Range(1, QUANTITY_MAX), about)
}

fn reason() -> Property {
    Property::optional(REASON, Form::Value(Type::Text), "why, for the movement and the event")
}

fn reservation() -> Property {
    Property::required(RESERVATION_ID, Form::Value(Type::Text), "an id that you choose")
}

/// The machine of stocks with the action that changes the fields, if there are some.
pub(super) fn with_patch(inventory: &InventorySpec, machine: MachineSpec) -> MachineSpec {
    if inventory.fields.is_empty() {
        return machine;
    }
    let about = "Change some fields of a {name}; null clears an optional one (JSON Merge Patch).";
    let part = inventory.fields.iter().map(|field| Property { required: false, ..field.property() });
    let patch = ActionSpec::patch("patch", about).takes(part).after(["restock"]);
    let fields = inventory.fields.iter().map(|field| field.name.clone());
    machine.transition(Transition::call(patch, any().to_same().event("updated").set_given(fields)))
}

/// The answer of an action on a stock of several cells: what changed. No row has the quantities of all cells.
fn answered_with_quantity(inventory: &InventorySpec, spec: ActionSpec) -> ActionSpec {
    let names: Vec<String> = inventory.key.iter().map(|field| field.name.clone()).collect();
    let changed = Property::required(QUANTITY, Form::Value(Type::Int), "by how many the stock changed");
    let form = Form::Object(inventory.key.iter().map(Field::property).chain([changed]).collect());
    spec.gives(form).answer_with(move |_, _, event| {
        let shown = names.iter().map(String::as_str).chain([QUANTITY]);
        let fields = shown.map(|name| (name.to_owned(), event.data.get(name).cloned().unwrap_or_default()));
        let body = Json::Object(fields.collect());
        Answer { body, version: None, created: None, next: None, token: None }
    })
}

/// An action on one stock.
fn stock_write(
    inventory: &Arc<InventorySpec>,
    rows: &Arc<StockParts>,
    spec: ActionSpec,
    action: StockAction,
) -> ActionSpec {
    let spec = spec.writes(WriteStock { inventory: inventory.clone(), rows: rows.clone(), action });
    if inventory.cells == 1 { spec } else { answered_with_quantity(inventory, spec) }
}

/// An action on a stock that exists.
fn item(name: &'static str, summary: &'static str) -> ActionSpec {
    ActionSpec::transition(name, summary).shape("guarded change of a quantity").after(["restock"])
}

/// The codes of actions that take something out.
const REMOVAL_CODES: [Code; 5] =
    [Code::NotFound, Code::OutOfStock, Code::VersionConflict, Code::OutOfRange, Code::Contended];

/// The actions that change what is in stock.
pub(super) fn stock_writes(inventory: &Arc<InventorySpec>, rows: &Arc<StockParts>) -> [ActionSpec; 5] {
    let fields = inventory.fields.iter().map(|field| Property { required: false, ..field.property() });
    let by = Form::Range(-QUANTITY_MAX, QUANTITY_MAX);
    let by = Property::required(BY, by, "how many more; less if negative").example(json!(-1));
    let counted = "how many are there, reserved ones included";
    let counted = Property::required(COUNTED, Form::Range(0, QUANTITY_MAX), counted).example(json!(90));
    let restock = ActionSpec::transition("restock", "Add to a {name}, which need not exist before.")
        .shape("increment")
        .mechanism("upsert of an increment")
        .takes([quantity("how many more").example(json!(100)), reason()])
        .takes(fields)
        .codes(&[Code::NotFound, Code::VersionConflict, Code::OutOfRange]);
    let adjust =
        item("adjust", "Correct a {name} by some more or less; less only as far as it is available.")
            .takes([by, reason()])
            .codes(&REMOVAL_CODES)
            .answers(&["oversell"]);
    let recount = item("recount", "Set how many were counted, if the {name} is as the caller has seen it.")
        .shape("overwrite")
        .needs_version(true)
        .takes([counted, reason()])
        .codes(&[Code::NotFound, Code::OutOfStock, Code::VersionConflict]);
    let write = |spec, action| stock_write(inventory, rows, spec, action);
    [
        write(restock, StockAction::Restock),
        write(adjust, StockAction::Adjust),
        write(recount, StockAction::Recount),
        write(returning(inventory), StockAction::Return),
        write(transferring(inventory), StockAction::Transfer),
    ]
}

fn returning(inventory: &InventorySpec) -> ActionSpec {
    let reserve = format!("{}.reserve", inventory.reservations);
    let commit = format!("{}.commit", inventory.reservations);
    let about = "the reservation that it was bought by";
    let back = Property::optional(RESERVATION_ID, Form::Value(Type::Text), about);
    item("return", "Bring back what was bought; it is available again.")
        .takes([quantity("how many come back"), back, reason()])
        .codes(&[Code::NotFound, Code::WrongState, Code::VersionConflict])
        .after(["restock", reserve.as_str(), commit.as_str()])
}

fn transferring(inventory: &InventorySpec) -> ActionSpec {
    let to = inventory.key.iter().map(|field| {
        let about = format!("the {} of the row that gets it, if it is another", field.name);
        let name = format!("{TO}{}", field.name);
        Property { name, required: false, about, ..field.property() }
    });
    item("transfer", "Move what is available to another {name}, which need not exist before.")
        .mechanism("guarded decrement and increment in one plan")
        .takes([quantity("how many move")])
        .takes(to)
        .takes([reason()])
        .codes(&REMOVAL_CODES)
        .answers(&["oversell"])
}

/// The reads of stocks.
pub(super) fn stock_reads(inventory: &Arc<InventorySpec>) -> Vec<ActionSpec> {
    let wanted =
        Property::optional(QUANTITY, Form::Range(1, QUANTITY_MAX), "how many are wanted; 1 if not given");
    let read =
        ActionSpec::read("read", "Read a {name}.").answers(&["stale availability read"]).after(["restock"]);
    let cells = |group| CellStocks { inventory: inventory.clone(), group };
    let mut reads = vec![
        match inventory.cells {
            1 => read.reads_row(RowRead::of(&inventory.name, &inventory.stock_def)),
            _ => read.mechanism("strong read of all cells").gives(stock_form(inventory)).reads(cells(None)),
        },
        ActionSpec::read("availability", "Read how many of a {name} can be reserved.")
            .on(Method::Get, RouteKind::ItemAction)
            .takes([wanted])
            .gives(availability_form())
            .answers(&["stale availability read"])
            .after(["restock"])
            .reads(Availability(inventory.clone())),
    ];
    let group = inventory.key.split_last().map_or(&[][..], |(_, group)| group);
    if !group.is_empty() {
        let list = ActionSpec::list(
            "list",
            "List the {name} rows that have the first columns of the key in common.",
        )
        .mechanism("strong range read of the group")
        .takes(group.iter().map(Field::property))
        .answers(&["stale availability read"])
        .after(["restock"]);
        let rows = GroupList { def: inventory.stock_def.clone(), columns: group.len(), backward: false };
        reads.push(match inventory.cells {
            1 => list.reads(rows),
            _ => list.gives_rows(stock_form(inventory)).reads(cells(Some(group.len()))),
        });
    }
    reads
}

/// The state that actions of reservations work on.
fn target(inventory: &InventorySpec) -> String {
    format!("{} + {}", state_name(&inventory.reservations), state_name(&inventory.name))
}

fn lines_property(inventory: &InventorySpec, about: &str, required: bool) -> Property {
    let form = Form::List(Box::new(lines::form(&inventory.key)));
    Property { required, ..Property::required(LINES, form, about) }
}

/// `reserve`, and the reads of reservations.
pub(super) fn reserve_and_reads(inventory: &InventorySpec, reserve: Reserve) -> [ActionSpec; 3] {
    let (name, def) = (&inventory.name, &inventory.reservation_def);
    let restock = format!("{name}.restock");
    let summary = match inventory.hold_for {
        Some(hold_for) => format!("Reserve {name} for {}, all lines or none.", duration_text(hold_for)),
        None => format!("Reserve {name} until it is released or bought, all lines or none."),
    };
    let about = format!("what of which rows; those of one row are added up; at most {}", inventory.lines_max);
    let whom = Property::optional(HOLDER, Form::Value(Type::Text), "for whom");
    let whose = Property::optional(HOLDER, Form::Value(Type::Text), "whose reservations");
    let which = "in which state; RESERVED if no holder is given either";
    let state = Property::optional(STATE, Form::one_of(&RESERVATION_STATES), which);
    [
        ActionSpec::create("reserve", summary)
            .target(target(inventory))
            .shape("guarded hold of quantities")
            .mechanism("insert and guarded decrements in one plan")
            .takes([reservation(), lines_property(inventory, &about, true), whom])
            .codes(&[Code::AlreadyExists, Code::NotFound, Code::OutOfStock, Code::Contended])
            .answers(&["oversell", "double allocate", "stale availability read"])
            .after([restock.as_str()])
            .writes(reserve),
        ActionSpec::read("read", "Read a reservation.")
            .target(target(inventory))
            .after([restock.as_str(), "reserve"])
            .reads_row(RowRead::of(&inventory.reservations, def)),
        ActionSpec::list("list", "List the reservations of a holder, or those in a state, newest first.")
            .target(target(inventory))
            .mechanism("range read on the index by holder and time, or by state and time")
            .after([restock.as_str(), "reserve"])
            .reads_index(IndexList::newest_first(def).by(BY_HOLDER, whose).by_or(
                BY_STATE,
                state,
                RESERVED_STATE,
            )),
    ]
}

/// The actions that are transitions of a reservation.
pub(super) fn reservation_actions(inventory: &InventorySpec) -> ReservationActions {
    let restock = format!("{}.restock", inventory.name);
    let action = |name: &'static str, summary: String, mechanism: &'static str| {
        let action = ActionSpec::transition(name, summary).target(target(inventory)).mechanism(mechanism);
        action.after([restock.as_str(), "reserve"])
    };
    let about = "what of it is bought, all of it if not given; what is not named is released";
    let commit = "Buy what is reserved, or a part of it, if its time is not up. The rest is released.";
    let extend = inventory.hold_for.map(|hold_for| {
        let longest =
            inventory.hold_max.map_or(String::new(), |max| format!(", up to {} in all", duration_text(max)));
        let summary = format!("Reserve for {} from now{longest}.", duration_text(hold_for));
        action("extend", summary, "guarded extension of the reservation").answers(&["lost release"])
    });
    let expire = "Release what is reserved, if its time is up. The server does this by itself.";
    ReservationActions {
        commit: action("commit", commit.into(), "guarded commit in one plan with the rows")
            .takes([lines_property(inventory, about, false)])
            .answers(&["double allocate"]),
        release: action("release", "Give back what is reserved.".into(), "guarded release")
            .answers(&["lost release"]),
        extend,
        expire: action("expire", expire.into(), "timed release / expiry").answers(&["lost release"]).after([
            restock.as_str(),
            "reserve",
            WAIT,
        ]),
    }
}

/// The list of movements.
pub(super) fn movement_list(inventory: &InventorySpec, def: &Arc<TableDef>) -> ActionSpec {
    let restock = format!("{}.restock", inventory.name);
    let list = GroupList { def: def.clone(), columns: inventory.key.len(), backward: true };
    ActionSpec::list("list", format!("List the movements of a {}, newest first.", inventory.name))
        .mechanism("strong range read of the row's movements")
        .takes(inventory.key.iter().map(Field::property))
        .after([restock.as_str()])
        .reads(list)
}
