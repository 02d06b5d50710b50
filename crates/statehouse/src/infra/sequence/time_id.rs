//! Time-ordered ids, from a span of time that was reserved: pure, so that no clock and no crash can come between.
//!
//! An id is an integer of 63 bits: milliseconds since an epoch, the worker, and a number within the millisecond.
//!
//! ```text
//!   0 │ time (63 - worker_bits - sequence_bits) │ worker (worker_bits) │ number (sequence_bits)
//! ```

use std::time::Duration;

use statehouse_store::Time;

/// How the bits of an id are divided, and where its time begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeIdLayout {
    /// Milliseconds between 1970 and the id's time 0.
    pub epoch_ms: i64,
    /// Bits of the worker.
    pub worker_bits: u32,
    /// Bits of the number within a millisecond.
    pub sequence_bits: u32,
}

/// Bits of an id: a positive number of every type that holds 64 bits.
const BITS: u32 = 63;

impl TimeIdLayout {
    /// How many workers there can be.
    pub fn workers(&self) -> i64 {
        1 << self.worker_bits
    }

    /// How many ids a worker can mint in a millisecond.
    pub fn per_millisecond(&self) -> i64 {
        1 << self.sequence_bits
    }

    /// Bits of the time.
    pub fn time_bits(&self) -> u32 {
        BITS.saturating_sub(self.worker_bits + self.sequence_bits)
    }

    /// The id of a millisecond (since 1970), a worker and a number; `None` if one of them does not fit.
    pub fn id(&self, millis: i64, worker: i64, number: i64) -> Option<i64> {
        let since = millis.checked_sub(self.epoch_ms)?;
        let fits = (0..1_i64 << self.time_bits()).contains(&since)
            && (0..self.workers()).contains(&worker)
            && (0..self.per_millisecond()).contains(&number);
        fits.then_some(
            since << (self.worker_bits + self.sequence_bits) | worker << self.sequence_bits | number,
        )
    }

    /// The time, the worker and the number of an id.
    pub fn parts(&self, id: i64) -> (Time, i64, i64) {
        let millis = (id >> (self.worker_bits + self.sequence_bits)).saturating_add(self.epoch_ms);
        let worker = (id >> self.sequence_bits) & (self.workers() - 1);
        (Time::from_millis(millis), worker, id & (self.per_millisecond() - 1))
    }
}

/// The whole milliseconds of a span of time. Spans that do not overlap have none in common.
pub fn whole_millis(from: Time, until: Time) -> (i64, i64) {
    let floor = |micros: i64| micros.div_euclid(1_000);
    (floor(from.micros().saturating_add(999)), floor(until.micros()))
}

/// What mints the ids of one worker within one span.
#[derive(Clone, Debug)]
pub struct TimeIdGenerator {
    layout: TimeIdLayout,
    worker: i64,
    until_ms: i64,
    /// What the millisecond `from_ms` was on the clock that counts what has passed.
    started: Duration,
    from_ms: i64,
    /// The next id's millisecond, if no time passes, and its number.
    next: (i64, i64),
}

impl TimeIdGenerator {
    /// A generator for `[from, until)`, which was asked for when the uptime was `started`.
    pub fn new(
        layout: TimeIdLayout,
        worker: i64,
        from: Time,
        until: Time,
        started: Duration,
    ) -> TimeIdGenerator {
        let (from_ms, until_ms) = whole_millis(from, until);
        TimeIdGenerator { layout, worker, until_ms, started, from_ms, next: (from_ms, 0) }
    }

    /// The next id, at this uptime; `None` when the span is used up, or over.
    pub fn next_id(&mut self, uptime: Duration) -> Option<i64> {
        let passed = i64::try_from(uptime.saturating_sub(self.started).as_millis()).unwrap_or(i64::MAX);
        let now_ms = self.from_ms.saturating_add(passed);
        let (millis, number) = if now_ms > self.next.0 { (now_ms, 0) } else { self.next };
        if millis >= self.until_ms {
            return None;
        }
        let id = self.layout.id(millis, self.worker, number)?;
        // A generator that is faster than the number has room for runs ahead of the clock, within the span.
        self.next = if number + 1 < self.layout.per_millisecond() {
            (millis, number + 1)
        } else {
            (millis.saturating_add(1), 0)
        };
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: TimeIdLayout = TimeIdLayout { epoch_ms: 1_000, worker_bits: 4, sequence_bits: 2 };

    fn generator_of(from: i64, until: i64) -> TimeIdGenerator {
        TimeIdGenerator::new(
            LAYOUT,
            3,
            Time::from_micros(from),
            Time::from_micros(until),
            Duration::from_secs(9),
        )
    }

    #[test]
    fn ids_come_apart_as_they_were_put_together() {
        for (millis, worker, number) in [(1_000, 0, 0), (1_001, 15, 3), (1_800_000_000_000, 7, 1)] {
            let id = LAYOUT.id(millis, worker, number).unwrap();
            assert_eq!(LAYOUT.parts(id), (Time::from_millis(millis), worker, number));
        }
        for (millis, worker, number) in [(999, 0, 0), (1_000, 16, 0), (1_000, 0, 4), (i64::MAX, 0, 0)] {
            assert_eq!(LAYOUT.id(millis, worker, number), None);
        }
        let widest = TimeIdLayout { epoch_ms: 0, worker_bits: 16, sequence_bits: 8 };
        assert_eq!(widest.id((1 << 39) - 1, 65_535, 255), Some(i64::MAX));
    }

    #[test]
    fn spans_that_touch_share_no_millisecond() {
        let check = |from, until, expect| {
            assert_eq!(whole_millis(Time::from_micros(from), Time::from_micros(until)), expect);
        };
        check(1_000, 3_000, (1, 3));
        check(1_001, 3_999, (2, 3));
        check(3_999, 6_000, (4, 6));
        check(-1_500, -1, (-1, -1));
    }

    #[test]
    fn a_minter_stays_in_its_span_and_never_goes_back() {
        let mut generator = generator_of(2_000_000, 2_003_000);
        let at = |millis| Duration::from_secs(9) + Duration::from_millis(millis);
        let mut ids = Vec::new();
        // Five in the first millisecond: the fifth is one of the next. Then time passes, and then it seems to go back.
        for uptime in [at(0), at(0), at(0), at(0), at(0), at(2), at(0), Duration::ZERO] {
            ids.push(generator.next_id(uptime).unwrap());
        }
        let parts: Vec<(i64, i64)> = ids
            .iter()
            .map(|id| {
                let (time, worker, number) = LAYOUT.parts(*id);
                assert_eq!(worker, 3);
                (time.micros() / 1_000, number)
            })
            .collect();
        let expected =
            [(2_000, 0), (2_000, 1), (2_000, 2), (2_000, 3), (2_001, 0), (2_002, 0), (2_002, 1), (2_002, 2)];
        assert_eq!(parts, expected);
        assert!(ids.is_sorted() && ids.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(generator.next_id(at(2)).is_some());
        assert_eq!(generator.next_id(at(2)), None, "the span is used up");
        assert_eq!(generator_of(0, 0).next_id(at(0)), None, "an empty one has none");
        let mut over = generator_of(2_000_000, 2_003_000);
        assert_eq!(over.next_id(at(3)), None, "a span that is over is left alone");
    }
}
