//! A08 Time-bounded exclusive allocation: seats, rooms and slots that one buyer holds for a while and then has, or not.
//!
//! ```text
//!   unit                 hold                 confirm
//!            AVAILABLE ───────────► HELD ─────────────────► SOLD
//!                ▲  ▲                │ │                      │
//!                │  └─ cancel, expire┘ └─ hold, once expired  │
//!                └──────────── cancel (refundable) ───────────┘
//!
//!   booking       hold                   confirm
//!       (none) ─────────► IN_PROGRESS ─────────────► CONFIRMED ──── cancel (refundable) ──┐
//!                          │  ▲  │ │                                                      ▼
//!                   extend └──┘  │ └───────────────── cancel ──────────────────────► CANCELLED
//!                                └──── expire (its time is up) ────► EXPIRED
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
//!   their units change in one plan;* whoever takes a unit from a booking whose time is up expires that booking, with all
//!   its units, in the plan that takes it. *Guard of each unit that a booking changes:* `booking_id = mine`.
//! - I3. No confirmation after the end. *Guard of confirm and extend:* `state = 'IN_PROGRESS' and expires_at > now`, by the
//!   engine's clock, which is also the one that set `expires_at`.
//! - I4. Every hold ends. *A booking in progress is due at its end; the sweeper's guard is the opposite of I3:*
//!   `expires_at <= now`. Confirm and sweep contend on the booking's row, and one of them wins.
//! - I5. Extensions are bounded. *Guard of extend:* `created_at >= now - (hold_max - hold_for)`.
//!
//! **Holds in Redis** (`holds = "redis"`). The hold is then a lease in [`crate::holds`], taken before the booking's row is
//! inserted; the unit's row stays `AVAILABLE` until it is sold. I1 for holds is as good as Redis; I1 for sales, I3, I4 and
//! I5 are as above: *guard of confirm, for each unit:* that nobody else has
//! it by its row. [`LEASED_HOLDS_LESS`] says what that means.
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
mod read;
mod rules;
mod write;

pub use archetype::ARCHETYPE;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Table, Type};

use crate::blueprint::settings::Field;
use crate::blueprint::{Blueprint, Thing};
use crate::declare::table::{CREATED_AT, STATE, UPDATED_AT};
use crate::declare::{Declare, ResourceSpec, TableDef, TableSpec};
use crate::form::Form;
use crate::infra::due::Scanner;
use crate::resource::plural;
use crate::told::Told;

/// The states of a unit.
const UNIT_STATES: [&str; 3] = [AVAILABLE, HELD, SOLD];
const AVAILABLE: &str = "AVAILABLE";
const HELD: &str = "HELD";
const SOLD: &str = "SOLD";
/// The states of a booking.
const BOOKING_STATES: [&str; 4] = [IN_PROGRESS, CONFIRMED, EXPIRED, CANCELLED];
const IN_PROGRESS: &str = "IN_PROGRESS";
const CONFIRMED: &str = "CONFIRMED";
const EXPIRED: &str = "EXPIRED";
const CANCELLED: &str = "CANCELLED";
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
struct Booking {
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
    /// Whether holds are leases before the store, and not states of the units.
    leased: bool,
    shards: u32,
}

/// The setting that says where holds are kept.
const HOLDS: &str = "holds";
const HOLDS_IN: [&str; 2] = ["store", IN_REDIS];
const IN_REDIS: &str = "redis";

/// What holds less if holds are leases before the store, for whoever decides on it.
pub const LEASED_HOLDS_LESS: [&str; 4] = [
    "a hold is a promise, not a right: if Redis loses it (a failover, an eviction, a restart without its file), two buyers \
     may be at the checkout with one unit, and the second to confirm is refused",
    "a unit is still sold at most once: the confirmation is a guarded write of the store, and asks nobody else",
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
    let bookings_def = cx.build(bookings_table(&bookings, &group, &unit, &details, shards))?;
    let booking = Arc::new(Booking {
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
        leased,
        shards,
    });
    // A plan of a booking changes all its units, and its event is about the booking, which names them.
    let namings = [(name, booking.unit.name.as_str()), (booking.bookings.as_str(), UNITS)];
    let units_told = Told::by_name(&booking.units_table, namings);
    cx.resource(
        ResourceSpec::of(name, &booking.units_def).told(units_told).actions(actions::unit_actions(&booking)),
    );
    cx.resource(
        ResourceSpec::of(&booking.bookings, &booking.bookings_def)
            .worker(Scanner::new(booking.sweeper(), shards, write::Sweep(booking.clone())))
            .actions(actions::booking_actions(&booking)),
    );
    Some(())
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

fn bookings_table(name: &str, group: &[Field], unit: &Field, details: &[Field], shards: u32) -> TableSpec {
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
        .text(HOLDER)
        .about("for whom")
        .fields(details)
        .created_at()
        .time(EXPIRES_AT)
        .about("when the hold ends")
        .updated_at()
        .deadline(&[IN_PROGRESS], EXPIRES_AT, shards)
        .index(BY_HOLDER, &[HOLDER], &[CREATED_AT])
}
