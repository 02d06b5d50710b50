//! When a definition is due: by a cron pattern in a time zone, in steps, or once. Pure: the time is passed in.
//!
//! A pattern means wall clocks. When they jump ahead, a time that they pass over is due at the jump; when they go back, a
//! time of day that comes twice is due once, and what recurs within the hour goes on in both.

use std::str::FromStr;
use std::time::Duration;

use croner::Cron;
use jiff::tz::TimeZone;
use statehouse_store::Time;

use crate::infra::timer::{MissedPolicy, next_due};

/// When something is due.
#[derive(Clone, Debug)]
pub(super) enum When {
    Cron(Box<Cron>, TimeZone),
    Every(Duration),
    At(Time),
}

impl When {
    /// Reads a pattern and the name of a time zone.
    pub(super) fn cron(pattern: &str, zone: &str) -> Result<When, (&'static str, String)> {
        let cron = Cron::from_str(pattern)
            .map_err(|error| ("cron", format!("{pattern:?} is not a cron pattern: {error}")))?;
        let zone = TimeZone::get(zone)
            .map_err(|_| ("zone", format!("{zone:?} is not a time zone: write it as Europe/Berlin")))?;
        Ok(When::Cron(Box::new(cron), zone))
    }

    /// The first due time of what is defined now.
    pub(super) fn first(&self, now: Time) -> Option<Time> {
        match self {
            When::Every(every) => Some(now.plus(*every)),
            When::At(at) => Some(*at),
            When::Cron(..) => self.after(now),
        }
    }

    /// The due time behind one, if there is one. Those that were missed are passed over, or not.
    pub(super) fn next(&self, due: Time, now: Time, missed: MissedPolicy) -> Option<Time> {
        match self {
            When::At(_) => None,
            When::Every(every) => Some(next_due(due, *every, now, missed).0),
            When::Cron(..) if missed == MissedPolicy::Once && due < now => self.after(now),
            When::Cron(..) => self.after(due),
        }
    }

    /// When the last of those is over that are passed over on the way to the next, if any are.
    pub(super) fn passed(&self, due: Time, now: Time, missed: MissedPolicy) -> Option<Time> {
        let next = self.next(due, now, missed);
        if next == self.next(due, due, missed) {
            return None;
        }
        match (self, next) {
            (When::Every(every), Some(next)) => Some(next.minus(*every)),
            _ => Some(now),
        }
    }

    /// The first time of a pattern that lies behind another.
    fn after(&self, time: Time) -> Option<Time> {
        let When::Cron(cron, zone) = self else { return None };
        let start = jiff::Timestamp::from_microsecond(time.micros()).ok()?.to_zoned(zone.clone());
        let next = cron.find_next_occurrence(&start, false).ok()?;
        Some(Time::from_micros(next.timestamp().as_microsecond())).filter(|next| next.is_storable())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The due times of a pattern from a time on.
    fn check(pattern: &str, zone: &str, start: &str, expect: &[&str]) {
        let when = When::cron(pattern, zone).unwrap();
        let mut time: Time = start.parse().unwrap();
        let mut got = Vec::new();
        for _ in expect {
            time = when.next(time, time, MissedPolicy::All).unwrap();
            got.push(jiff::Timestamp::from_microsecond(time.micros()).unwrap().to_string());
        }
        assert_eq!(got, expect, "{pattern} in {zone}");
    }

    #[test]
    fn patterns_mean_wall_clocks() {
        check(
            "30 9 * * MON-FRI",
            "Europe/Berlin",
            "2026-01-02T12:00:00Z",
            &["2026-01-05T08:30:00Z", "2026-01-06T08:30:00Z"],
        );
        check("0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z", &["2028-02-29T00:00:00Z", "2032-02-29T00:00:00Z"]);
        check(
            "*/20 * * * * *",
            "UTC",
            "2026-01-01T00:00:05Z",
            &["2026-01-01T00:00:20Z", "2026-01-01T00:00:40Z"],
        );
    }

    #[test]
    fn when_clocks_jump_ahead_nothing_is_lost() {
        // In Berlin there is no 02:30 on 29 March 2026: the hour from 01:00Z on is called three.
        check(
            "30 2 * * *",
            "Europe/Berlin",
            "2026-03-27T12:00:00Z",
            &["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"],
        );
        // What recurs within the hour goes on without a gap.
        check(
            "*/30 * * * *",
            "Europe/Berlin",
            "2026-03-29T00:15:00Z",
            &["2026-03-29T00:30:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"],
        );
    }

    #[test]
    fn when_clocks_go_back_nothing_is_done_twice() {
        // In Berlin 02:30 comes twice on 25 October 2026, at 00:30Z and at 01:30Z.
        check(
            "30 2 * * *",
            "Europe/Berlin",
            "2026-10-24T12:00:00Z",
            &["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"],
        );
        // What recurs within the hour recurs in both.
        check(
            "*/30 * * * *",
            "Europe/Berlin",
            "2026-10-25T00:15:00Z",
            &["2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z", "2026-10-25T02:00:00Z"],
        );
    }

    #[test]
    fn missed_times_are_passed_over_or_not() {
        let at = |text: &str| text.parse::<Time>().unwrap();
        let when = When::cron("0 * * * *", "UTC").unwrap();
        let (due, now) = (at("2026-01-01T03:00:00Z"), at("2026-01-01T07:30:00Z"));
        assert_eq!(when.next(due, now, MissedPolicy::All), Some(at("2026-01-01T04:00:00Z")));
        assert_eq!(when.next(due, now, MissedPolicy::Once), Some(at("2026-01-01T08:00:00Z")));
        // Made ahead of its time, it is followed by the next one whatever the clock says.
        assert_eq!(
            when.next(due, at("2026-01-01T02:59:50Z"), MissedPolicy::Once),
            Some(at("2026-01-01T04:00:00Z"))
        );
        assert_eq!(When::At(due).next(due, now, MissedPolicy::All), None);
        assert_eq!(When::At(due).first(now), Some(due));
        let every = When::Every(Duration::from_secs(60));
        assert_eq!(every.first(due), Some(due.plus(Duration::from_secs(60))));
        assert_eq!(every.next(due, now, MissedPolicy::Once), Some(at("2026-01-01T07:31:00Z")));
    }

    #[test]
    fn what_is_no_pattern_is_said_to_be_none() {
        for (pattern, zone, expect) in
            [("* * *", "UTC", "cron"), ("99 * * * *", "UTC", "cron"), ("* * * * *", "Mars/Base", "zone")]
        {
            assert_eq!(When::cron(pattern, zone).unwrap_err().0, expect);
        }
    }
}
