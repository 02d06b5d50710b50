//! A08 Time-bounded exclusive allocation: seats, rooms and slots that one buyer holds for a while and then has, or not.
//!
//! ```text
//!   unit                 hold                 confirm
//!            AVAILABLE ───────────► HELD ─────────────────► SOLD
//!           │ ▲  ▲  ▲                │ │                      │
//!    retire │ │  │  └─ cancel, expire┘ └─ hold, once expired  │
//!           ▼ │  └──────────── cancel (refundable) ───────────┘
//!         RETIRED ──── restore ──► AVAILABLE
//!
//!   patch and delete begin with AVAILABLE or RETIRED.
//!
//!   booking       hold                   confirm
//!       (none) ─────────► IN_PROGRESS ─────────────► CONFIRMED ──── cancel (refundable) ──┐
//!                          │  ▲  │ │                       ▲                              ▼
//!                   extend └──┘  │ └───────────────── cancel ──────────────────────► CANCELLED
//!                                │                         │                              ▲
//!                                ├─ expire, "free" ──────► EXPIRED                        │
//!                                └─ expire, "overdue" ───► OVERDUE ──── confirm, cancel ──┘
//! ```
//!
//! **Rows.** `seats(tenant, event_id, seat_no, fields…, state, booking_id, hold_expires_at, updated_at, version)`, kept
//! together by all of the key but its last part, the *group*; and
//! `seat_bookings(tenant, booking_id, state, event_id, units, holder, details…, created_at, expires_at, due_shard, due_at,
//! updated_at, version)`, with an index by holder and the index `due` across tenants. A booking holds up to `units_max`
//! units of one group, all of them or none.
//!
//! **Invariants.**
//! - I1. A unit has at most one live hold or sale. *Guard of hold, for each unit:* `state = 'AVAILABLE'`, or that it is
//!   held by a booking whose time is up, `booking_id = that one and hold_expires_at <= now`.
//! - I2. A booking that is in progress holds exactly its units, and a confirmed one has bought exactly them. *Bookings and
//!   their units change in one plan;* a caller that takes a unit from an expired booking expires that booking, with all
//!   its units, in the plan that takes it. *Guard of each unit that a booking changes:* `booking_id = mine`.
//! - I3. No confirmation after the end. *Guard of confirm and extend:* `state = 'IN_PROGRESS' and expires_at > now`, by the
//!   engine's clock, which is also the one that set `expires_at`.
//! - I4. Every hold ends. *A booking in progress is due at its end; the sweeper's guard is the opposite of I3:*
//!   `expires_at <= now`. Confirm and sweep contend on the booking's row, and one of them wins.
//! - I5. Extensions are bounded. *Guard of extend:* `created_at >= now - (hold_max - hold_for)`.
//! - I6. A unit that is held or sold is not edited, retired or deleted, and a retired one is not held. *Guard of patch, retire and
//!   delete:* the state is `AVAILABLE` (or `RETIRED`); *of hold:* I1. All of them write the unit's row, so one of them wins.
//!
//! **Bookings that become overdue** (`on_expiry = "overdue"`), for things that are lent and brought back. At its end a booking
//! becomes `OVERDUE` and keeps its units until it is confirmed or cancelled (given back). Then I1 has no second alternative:
//! *guard of hold:* `state = 'AVAILABLE'` alone; a hold whose time is up reads as `HELD`. I3 holds for `extend` only. *Guard of
//! confirm and cancel:* `state in ('IN_PROGRESS', 'OVERDUE')`. If the setting is changed back, bookings that are overdue stay so
//! until they are cancelled.
//!
//! **Holds in Redis** (`holds = "redis"`). The hold is then a lease in [`crate::holds`], taken before the booking's row is
//! inserted; the unit's row stays `AVAILABLE` until it is sold. I1 for holds depends on Redis keeping the lease; I1 for
//! sales, I3, I4 and I5 are as above: *guard of confirm, for each unit:* its row says that no other caller holds it. `patch`
//! looks whether there is a lease; `retire` and `delete` take it for a moment, so that no buyer gets one meanwhile.
//! [`LEASED_HOLDS_LESS`] says which guarantees are weaker.
//!
//! **Failures.** *Duplicate hold*: I1 for two buyers, and the operation id for one buyer who asks twice. *Expired hold not
//! released*: it reads as free and can be held at once (I1), swept or not (I4). *Confirm-after-expiry race*: I3 and I4.
//! *Cancel/confirm race*: both leave `IN_PROGRESS`, on one row. *Stale availability after hold expiry*: reads look at
//! `hold_expires_at`, not only at the state.
//!
//! **Hotspots.** *Hot hold key*: a hold that loses is one refused plan, and the units that a buyer did not name are chosen
//! by the booking's id among the best, so that many buyers do not all want the same one. *Hold storms*: as before; plans
//! in flight are one transaction. *Expiry scan pressure*: `shards = 16` parts of the due index, bounded steps.
//! *Hold-store contention*: units of different groups share nothing.

mod actions;
mod archetype;
pub mod external_holds;
mod read;
mod rules;
mod transitions;
mod write;

pub use archetype::ARCHETYPE;
pub use write::UNIT_CHANGE;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Table, Type};

use crate::blueprint::settings::Field;
use crate::blueprint::{Blueprint, Thing};
use crate::declare::table::{CREATED_AT, STATE};
use crate::declare::{Declare, Machine, ResourceSpec, TableDef, TableSpec};
use crate::form::Form;
use crate::resource::plural;
use crate::view_source::SourceRows;
use transitions::UnitParts;
use write::HoldUnits;

/// The states of a unit.
const UNIT_STATES: [&str; 4] = [AVAILABLE, HELD, SOLD, RETIRED];
const AVAILABLE: &str = "AVAILABLE";
const HELD: &str = "HELD";
const SOLD: &str = "SOLD";
const RETIRED: &str = "RETIRED";
/// The states of a booking.
const BOOKING_STATES: [&str; 5] = [IN_PROGRESS, CONFIRMED, EXPIRED, CANCELLED, OVERDUE];
const IN_PROGRESS: &str = "IN_PROGRESS";
const CONFIRMED: &str = "CONFIRMED";
const EXPIRED: &str = "EXPIRED";
const CANCELLED: &str = "CANCELLED";
const OVERDUE: &str = "OVERDUE";
/// Columns of both.
const BOOKING_ID: &str = "booking_id";
/// Columns of a unit.
const HOLD_EXPIRES_AT: &str = "hold_expires_at";
/// Columns of a booking.
const UNITS: &str = "units";
const HOLDER: &str = "holder";
const EXPIRES_AT: &str = "expires_at";
/// How many units a caller wants.
const COUNT: &str = "count";
/// The index that lists the bookings of a holder.
const BY_HOLDER: &str = "by_holder";
const BY_STATE: &str = "by_state";

const HOLD_FOR_DEFAULT: Duration = Duration::from_secs(600);
/// The bounds of `hold_for` and `hold_max`.
const HOLDS_FOR: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(366 * 86_400);
/// Units of a booking, so that a plan can always change them all and the booking itself.
const UNITS_MAX: u32 = 40;
/// Units that are looked at for the best ones, in pages of so many.
const LOOK_PAGES: usize = 10;
const LOOK_ROWS: usize = 500;
/// Among so many of the best a choice is made, so that not everybody wants the same.
const CHOICES: usize = 32;

/// One declared kind of unit.
#[derive(Debug)]
struct BookingSpec {
    /// `seat`.
    name: String,
    /// `seat_booking`.
    bookings: String,
    /// The key of a unit without its last part.
    group: Vec<Field>,
    /// The last part of a unit's key.
    unit: Field,
    fields: Vec<Field>,
    details: Vec<Field>,
    units_def: Arc<TableDef>,
    bookings_def: Arc<TableDef>,
    units_table: Arc<Table>,
    bookings_table: Arc<Table>,
    hold_for: Duration,
    hold_max: Duration,
    units_max: usize,
    refundable: bool,
    /// Whether a booking keeps its units when its time is up.
    keeps_units: bool,
    /// The type of the holder.
    holder: Type,
    /// Whether holds are leases before the store, and not states of the units.
    leased: bool,
}

/// The setting that says where holds are kept.
const HOLDS: &str = "holds";
const HOLDS_IN: [&str; 2] = ["store", IN_REDIS];
const IN_REDIS: &str = "redis";
/// The setting that says what becomes of a booking at its end.
const ON_EXPIRY: &str = "on_expiry";
const ON_EXPIRY_WAYS: [&str; 2] = ["free", "overdue"];
/// The types that a holder can have: those of keys.
const HOLDER_TYPES: [&str; 6] = ["text", "int", "float", "bool", "bytes", "time"];

/// What holds less if holds are leases before the store, for the operator who decides on it.
pub const LEASED_HOLDS_LESS: [&str; 4] = [
    "a hold is a promise, not a right: if Redis loses it (a failover, an eviction, a restart without its file), two buyers \
     may be at the checkout with one unit, and the second to confirm is refused",
    "a unit is still sold at most once: the confirmation is a guarded write of the store, and depends on no other service",
    "while Redis cannot be reached, nothing can be held, extended or looked up; confirmations go on",
    "holds leave no trace in the units' rows and in the log; bookings do",
];

/// The bookings of a blueprint whose holds are leases before the store.
pub fn leased(blueprint: &Blueprint) -> Vec<&str> {
    let is_leased = |thing: &&Thing| {
        let (mut settings, mut ignored) = (thing.settings.clone(), blueprint.problems());
        thing.archetype.keyword() == "booking"
            && settings.choice(HOLDS, &HOLDS_IN, &mut ignored) == Some(IN_REDIS)
    };
    blueprint.things.iter().filter(is_leased).map(|thing| thing.name.as_str()).collect()
}

/// Reads `[booking.NAME]`: the units, and their bookings.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let mut group = settings.key("key");
    let fields = settings.fields("fields");
    let details = settings.fields("details");
    let table = settings.text("table", plural(name));
    let hold_for = settings.duration("hold_for", HOLD_FOR_DEFAULT, HOLDS_FOR);
    let hold_max = settings.duration("hold_max", hold_for.saturating_mul(3), HOLDS_FOR);
    let units_max = settings.count("units_max", 10, 1..=UNITS_MAX);
    let refundable = settings.flag("refundable", false);
    let shards = settings.count("shards", 16, 1..=1_024);
    let leased = settings.choice(HOLDS, &HOLDS_IN) == IN_REDIS;
    let keeps_units = settings.choice(ON_EXPIRY, &ON_EXPIRY_WAYS) == "overdue";
    let holder = settings.choice(HOLDER, &HOLDER_TYPES);
    let holder = Type::ALL.into_iter().find(|kind| kind.name() == holder).unwrap_or(Type::Text);
    if leased && keeps_units {
        let title = "a hold in Redis ends by itself, so a booking cannot keep its units when its time is up";
        settings.problem_with_advice(ON_EXPIRY, title, "write `holds = \"store\"`, or leave out `on_expiry`");
    }
    settings.refuse_if(hold_max < hold_for, "hold_max", "`hold_max` must be at least as long as `hold_for`");
    let unit = group.pop()?;
    if group.is_empty() {
        let title = format!("the key of `booking.{name}` needs a group and a unit");
        let advice =
            "units of one group are booked together: `key = { event_id = \"text\", seat_no = \"text\" }`";
        settings.problem_with_advice("key", title, advice);
        return None;
    }
    let bookings = format!("{name}_booking");
    let units_def = cx.build(units_table(table, &group, &unit, &fields))?;
    let bookings_def = cx.build(bookings_table(&bookings, &group, (&unit, holder), &details, shards))?;
    let booking = Arc::new(BookingSpec {
        name: name.to_owned(),
        bookings,
        group,
        unit,
        fields,
        details,
        units_table: units_def.table().clone(),
        units_def,
        bookings_table: bookings_def.table().clone(),
        bookings_def,
        hold_for,
        hold_max,
        units_max: units_max as usize,
        refundable,
        keeps_units,
        holder,
        leased,
    });
    let units_machine = cx.machine(transitions::of_units(&booking, actions::unit_actions(&booking)))?;
    let units = unit_parts(cx, &booking, &units_machine)?;
    let called = actions::booking_actions(&booking);
    let machine = cx.machine(transitions::of_bookings(&booking, &units, called))?;
    let hold = HoldUnits {
        booking: booking.clone(),
        insert: cx.part(&machine, "hold")?,
        expire: cx.part(&machine, "expire")?,
        hold_unit: units.hold,
    };
    // A plan of a booking changes all its units, and its event is about the booking, which names them.
    let namings = [(name, booking.unit.name.as_str()), (booking.bookings.as_str(), UNITS)];
    let unit_rows = SourceRows::with_keys(&booking.units_table, namings);
    cx.resource(
        ResourceSpec::of(name, &booking.units_def)
            .source_rows(unit_rows)
            .machine(&units_machine)
            .actions(actions::unit_reads(&booking)),
    );
    cx.resource(
        ResourceSpec::of(&booking.bookings, &booking.bookings_def)
            .actions(actions::hold_and_reads(&booking, hold))
            .machine(&machine),
    );
    Some(())
}

/// The transitions of units that bookings fire. Holds that are leases leave no trace in the rows of units.
fn unit_parts(cx: &mut Declare<'_>, booking: &BookingSpec, units: &Arc<Machine>) -> Option<UnitParts> {
    let mut part_if = |is_used: bool, name: &str| match is_used {
        true => cx.part(units, name).map(Some),
        false => Some(None),
    };
    Some(UnitParts {
        hold: part_if(!booking.leased, "hold")?,
        extend: part_if(!booking.leased, "extend")?,
        free: part_if(!booking.leased || booking.refundable, "free")?,
        sell: cx.part(units, "sell")?,
    })
}

fn units_table(table: String, group: &[Field], unit: &Field, fields: &[Field]) -> TableSpec {
    TableSpec::named(table)
        .key(group)
        .sort(&unit.name, unit.kind)
        .fields(fields)
        .states(&UNIT_STATES)
        .about("as it is now")
        .text(BOOKING_ID)
        .null()
        .about("the booking that holds or bought it")
        .time(HOLD_EXPIRES_AT)
        .null()
        .about("when it is free again")
        .updated_at()
}

fn bookings_table(
    name: &str,
    group: &[Field],
    (unit, holder): (&Field, Type),
    details: &[Field],
    shards: u32,
) -> TableSpec {
    let spec = TableSpec::named(plural(name))
        .partition(BOOKING_ID, Type::Text)
        .states(&BOOKING_STATES)
        .about("as it is now");
    group
        .iter()
        .fold(spec, |spec, field| spec.column(&field.name, field.kind).immutable())
        .json(UNITS)
        .shown_as(Form::List(Box::new(Form::Value(unit.kind))))
        .about("what it holds or bought")
        .immutable()
        .column(HOLDER, holder)
        .about("for whom")
        .fields(details)
        .created_at()
        .time(EXPIRES_AT)
        .about("when the hold ends")
        .updated_at()
        .deadline(&[IN_PROGRESS], EXPIRES_AT, shards)
        .index(BY_HOLDER, &[HOLDER], &[CREATED_AT])
        .index(BY_STATE, &[STATE], &[CREATED_AT])
}
