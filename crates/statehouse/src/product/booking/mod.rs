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

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Table, Type};

use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::settings::Field;
use crate::blueprint::{Blueprint, Thing};
use crate::infra::due::{self, Scanner};
use crate::resource::{Resource, plural};
use crate::told::{Telling, Told};
use crate::worker::Worker;

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
const STATE: &str = "state";
const BOOKING_ID: &str = "booking_id";
const UPDATED_AT: &str = "updated_at";
/// Columns of a unit.
const HOLD_EXPIRES_AT: &str = "hold_expires_at";
/// Columns of a booking.
const UNITS: &str = "units";
const HOLDER: &str = "holder";
const CREATED_AT: &str = "created_at";
const EXPIRES_AT: &str = "expires_at";
/// How many units a caller wants.
const COUNT: &str = "count";
/// The index that lists the bookings of a holder.
const BY_HOLDER: &str = "by_holder";

const HOLD_FOR_DEFAULT: Duration = Duration::from_secs(600);
const UNITS_MAX_DEFAULT: i64 = 10;
/// Units of a booking, so that a plan can always change them all and the booking itself.
const UNITS_MAX: i64 = 40;
const SHARDS_DEFAULT: i64 = 16;
const SHARDS_MAX: i64 = 1_024;
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
pub fn declare(thing: &Thing, problems: &mut Problems) -> Vec<Resource> {
    declare_both(thing, problems).map(Into::into).unwrap_or_default()
}

fn declare_both(thing: &Thing, problems: &mut Problems) -> Option<[Resource; 2]> {
    let mut settings = thing.settings.clone();
    let key = settings.key("key", problems);
    let fields = settings.fields("fields", problems).unwrap_or_default();
    let details = settings.fields("details", problems).unwrap_or_default();
    let table = settings.text("table", problems).unwrap_or_else(|| plural(&thing.name));
    let hold_for = settings.duration("hold_for", problems).unwrap_or(HOLD_FOR_DEFAULT);
    let hold_max = settings.duration("hold_max", problems).unwrap_or(hold_for.saturating_mul(3));
    let units_max = settings.int("units_max", problems).unwrap_or(UNITS_MAX_DEFAULT);
    let refundable = settings.bool("refundable", problems).unwrap_or(false);
    let shards = settings.int("shards", problems).unwrap_or(SHARDS_DEFAULT);
    let leased = settings.choice(HOLDS, &HOLDS_IN, problems) == Some(IN_REDIS);
    settings.finish(problems);
    let before = problems.len();
    if hold_for.is_zero() || hold_max < hold_for {
        let title = "`hold_for` must be above zero, and `hold_max` at least as long";
        problems.add(Problem::at(settings.span_of("hold_for"), title));
    }
    for (name, given, most) in [("units_max", units_max, UNITS_MAX), ("shards", shards, SHARDS_MAX)] {
        if !(1..=most).contains(&given) {
            let title = format!("`{name}` must be from 1 to {most}");
            problems.add(Problem::at(settings.span_of(name), title));
        }
    }
    let mut group = key?;
    let unit = group.pop()?;
    if group.is_empty() {
        let title = format!("the key of `booking.{}` needs a group and a unit", thing.name);
        let advice =
            "units of one group are booked together: `key = { event_id = \"text\", seat_no = \"text\" }`";
        problems.add(Problem::at(settings.span_of("key"), title).advice(advice));
    }
    if problems.len() > before {
        return None;
    }
    let mut built = |table: statehouse_store::table::Builder| match table.build() {
        Ok(table) => Some(table),
        Err(error) => {
            problems.add(Problem::at(settings.span(), format!("`booking.{}`: {}", thing.name, error.why)));
            None
        }
    };
    let mut units = Table::named(&table);
    for field in &group {
        units = units.partition(&field.name, field.kind);
    }
    units = Field::columns(&fields, units.sort(&unit.name, unit.kind))
        .required(STATE, Type::Text)
        .optional(BOOKING_ID, Type::Text)
        .optional(HOLD_EXPIRES_AT, Type::Time)
        .required(UPDATED_AT, Type::Time);
    let bookings_name = format!("{}_booking", thing.name);
    let mut bookings = Table::named(plural(&bookings_name)).partition(BOOKING_ID, Type::Text);
    bookings = bookings.required(STATE, Type::Text);
    for field in &group {
        bookings = bookings.required(&field.name, field.kind);
    }
    bookings = Field::columns(&details, bookings.required(UNITS, Type::Json).required(HOLDER, Type::Text))
        .required(CREATED_AT, Type::Time)
        .required(EXPIRES_AT, Type::Time)
        .required(UPDATED_AT, Type::Time)
        .index(BY_HOLDER, &[HOLDER], &[CREATED_AT]);
    let (units_table, bookings_table) = (built(units)?, built(due::columns(bookings))?);
    let booking = Arc::new(Booking {
        name: thing.name.clone(),
        bookings: bookings_name,
        group,
        unit,
        fields,
        details,
        units_table,
        bookings_table,
        hold_for,
        hold_max,
        units_max: usize::try_from(units_max).unwrap_or(1),
        refundable,
        leased,
        shards: u32::try_from(shards).unwrap_or(1),
    });
    let sweeper: Arc<dyn Worker> =
        Arc::new(Scanner::new(booking.sweeper(), booking.shards, write::Sweep(booking.clone())));
    let key = booking.group.iter().chain([&booking.unit]);
    // A plan of a booking changes all its units, and its event is about the booking, which names them.
    let namings = [(booking.name.as_str(), booking.unit.name.as_str()), (booking.bookings.as_str(), UNITS)];
    let units_told = Told::by_name(&booking.units_table, namings);
    let told = Told::with_row(&booking.bookings, &booking.bookings_table);
    Some([
        Resource {
            hidden: Vec::new(),
            name: thing.name.clone(),
            archetype: thing.archetype,
            key: key.map(|field| (field.name.clone(), field.kind)).collect(),
            tables: vec![booking.units_table.clone()],
            actions: actions::unit_actions(&booking),
            workers: Vec::new(),
            consumers: Vec::new(),
            telling: Telling::Rows(Box::new(units_told)),
        },
        Resource {
            hidden: Vec::new(),
            name: booking.bookings.clone(),
            archetype: thing.archetype,
            key: vec![(BOOKING_ID.to_owned(), Type::Text)],
            tables: vec![booking.bookings_table.clone()],
            actions: actions::booking_actions(&booking),
            workers: vec![sweeper],
            consumers: Vec::new(),
            telling: Telling::Rows(Box::new(told)),
        },
    ])
}
