//! I09 Sequence, identifier generation: numbers and ids that are given out once.
//!
//! Three kinds, because what people ask of a number excludes what others ask of it:
//!
//! ```text
//!   counter   next n ─────► the n numbers behind `last`, for this caller
//!             lease n ────► the same as a range: its holder gives them out by itself, until the lease ends
//!
//!   gapless   take ───────► last + 1, in the plan of the row that uses it; if that is refused, it stays free
//!
//!   time      (none) ── lease ──► HELD ── reserve ──► HELD ── release ──► FREE        (one row a worker id)
//!             each of lease and reserve moves the mark on: [reserved_from, reserved_until) is the holder's own for ever
//! ```
//!
//! **Rows.** Counter: `tickets(tenant, key…, last, updated_at, version)`, and a row for each leased range,
//! `tickets_ranges(tenant, key…, first, last, holder, leased_at, expires_at, version)`. Gapless:
//! `invoices(tenant, key…, last, updated_at, version)`, a row for each number that was taken,
//! `invoices_taken(tenant, key…, subject, number, taken_at, version)`, and `invoices_lock`, by which takers take turns
//! ([`crate::lock`]). Time: `orders(tenant, pool, worker, lease…, reserved_from, reserved_until, version)`, where `pool` is
//! always 0 and the lease is that of [`crate::infra::lease`]. None of these rows is ever deleted.
//!
//! **Invariants.**
//! - I1. No number of a counter is given out twice. *Next and lease add to `last` where it stands; a lease, whose range is
//!   written into a row of its own, is guarded by* `last = the one that was read`.
//! - I2. What a holder did not use of its range is lost and never given out again. *Nothing lowers `last`.*
//! - I3. The numbers of a gapless sequence are all used, each by one subject, and a subject has one. *Number and user are
//!   written in one plan; guard:* `last = the number before`; *the subject's row must be absent.*
//! - I4. No two ids of a time sequence are the same. *An id's time lies in a span that was reserved for its worker before it
//!   was minted. Spans of a worker never overlap, because each begins at or after the mark that the one before left: guard
//!   of a span that begins now:* `reserved_until <= now`; *one that begins at the mark needs no guard.* It is not the lease
//!   that keeps ids apart: two processes which both believe to own a worker have spans of their own, also if one of them was
//!   paused for an hour, and whatever the clock of either says.
//! - I5. Ids of one worker grow. *I4, and a minter never goes back within its span.* Those of different workers are as far
//!   apart as a span is long.
//! - I6. A worker id has one holder at a time. *The lease's guards; a reservation renews the lease and carries
//!   `epoch = mine and holder = me`.*
//!
//! **Failures.** *Duplicate IDs*: I1, I3, I4. A lost answer costs the numbers that it named, unless the request is repeated
//! under its operation id. *Non-monotonic IDs*: I5; leased ranges end with their lease, so that what is far behind is given
//! up. *Worker-id exhaustion*: `held`, with the time at which the next one is free; nothing is minted without a worker id.
//! *Clock rollback / stale epoch*: the mark stands in the store. If the store's clock is set back, the next span begins at
//! the mark; the clocks of processes are not asked at all, only how much time has passed on them. A stale holder's
//! reservation is refused, and what it still mints lies in its own span.
//!
//! **Hotspots.** *Allocator hot spot*: `lease` and [`local_ids::RangeNumbers`], or a time sequence and [`local_ids::TimeIds`]: one write for
//! thousands of numbers; adding needs no version and loses no race. *Worker-id pool contention*: processes begin to look at
//! different places, by their names. *Lease refresh pressure*: a reservation is the renewal, one write in `ahead`.

mod archetype;
mod counter;
pub mod gapless;
pub mod local_ids;
mod time;
pub mod time_id;

pub use archetype::ARCHETYPE;
use std::ops::RangeInclusive;

use crate::blueprint::settings::Field;
use crate::declare::Declare;
use crate::declare::table::UPDATED_AT;
use crate::form::{Form, Property};
use crate::resource::plural;
use crate::view_source::ViewSource;

const COUNTER: &str = "counter";
const GAPLESS: &str = "gapless";
const TIME: &str = "time";

/// The last number that was given out.
const LAST: &str = "last";
const FIRST: &str = "first";
const COUNT: &str = "count";
const HOLDER: &str = "holder";

/// What a view could be of: a sequence's row is a number already.
fn telling(name: &str) -> ViewSource {
    let instead = format!("call `{name}.list`, or make the view of what has its numbers");
    ViewSource::nothing("its row says how far it has got", instead)
}

/// Reads `[sequence.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let kind = settings.required_choice(
        "kind",
        &[COUNTER, GAPLESS, TIME],
        "say what it gives: `kind = \"counter\"`, \"gapless\" or \"time\"",
    )?;
    let table = settings.text("table", plural(name));
    match kind {
        COUNTER => counter::declare(cx, &table),
        GAPLESS => gapless::declare(cx, &table),
        _ => time::declare(cx, &table),
    }
}

/// The bounds of the number that a sequence starts with.
const STARTS: RangeInclusive<i64> = i64::MIN / 2..=i64::MAX / 2;

fn key_properties(key: &[Field]) -> Vec<Property> {
    key.iter().map(|field| Property::required(&field.name, Form::Value(field.kind), "")).collect()
}

#[cfg(test)]
mod tests {
    use crate::Blueprint;
    use crate::resource::declare;

    fn check(text: &str, expect: &str) {
        let blueprint = Blueprint::read("statehouse.toml", &format!("[sequence.number]\n{text}\n")).unwrap();
        let problems = declare(&blueprint).unwrap_err().render(false);
        assert!(problems.contains(expect), "{problems}");
    }

    #[test]
    fn declarations_are_checked() {
        check("", "`sequence.number` has no kind");
        check("kind = \"counters\"", "did you mean \"counter\"?");
        check("kind = \"counter\"", "has no key");
        check("kind = \"counter\"\nkey = { a = \"int\" }\nlease = \"2d\"", "`lease` must be from 1ms to 1d");
        check("kind = \"gapless\"\nkey = { last = \"int\" }", "has a column `last` already");
        check("kind = \"gapless\"\nkey = { a = \"int\" }\nlease = \"1m\"", "no setting `lease`");
        check("kind = \"time\"\nworker_bits = 17", "`worker_bits` must be from 1 to 16");
        check("kind = \"time\"\nworker_bits = 16\nsequence_bits = 12", "can be 24 together");
        check("kind = \"time\"\nworker_bits = 1\nshared = 2", "none can be leased");
        check(
            "kind = \"time\"\nahead = \"1m\"\nlease = \"10s\"",
            "`lease` must be at least as long as `ahead`",
        );
        check("kind = \"time\"\nepoch = \"once\"", "is not a time");
        check("kind = \"time\"\nkey = { a = \"int\" }", "no setting `key`");
    }
}
