//! Points in time, in whole microseconds: the finest grain that every engine keeps.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point in time: microseconds since 1970-01-01T00:00:00Z.
///
/// Only the years 1 to 9999 can be stored ([`Time::MIN`] to [`Time::MAX`]); every engine can hold and print those.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(i64);

impl Time {
    /// 0001-01-01T00:00:00Z.
    pub const MIN: Time = Time(-62_135_596_800_000_000);
    /// 9999-12-30T22:00:00Z, the last instant that the calendar library prints in every time zone.
    pub const MAX: Time = Time(253_402_207_200_000_000);

    /// The time this many microseconds after the epoch.
    pub const fn from_micros(micros: i64) -> Time {
        Time(micros)
    }

    /// The time this many milliseconds after the epoch.
    pub const fn from_millis(millis: i64) -> Time {
        Time(millis.saturating_mul(1_000))
    }

    /// Microseconds since the epoch.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// Whether the time lies in the range that every engine can hold.
    pub fn is_storable(self) -> bool {
        (Time::MIN..=Time::MAX).contains(&self)
    }

    /// This time moved by a signed number of microseconds; `None` when that leaves the storable range.
    pub fn checked_add_micros(self, micros: i64) -> Option<Time> {
        self.0.checked_add(micros).map(Time).filter(|time| time.is_storable())
    }

    /// This time moved forward, stopping at [`Time::MAX`].
    pub fn plus(self, span: Duration) -> Time {
        let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Time(self.0.saturating_add(micros).min(Time::MAX.0))
    }

    /// This time moved backward, stopping at [`Time::MIN`].
    pub fn minus(self, span: Duration) -> Time {
        let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Time(self.0.saturating_sub(micros).max(Time::MIN.0))
    }

    /// How long after `earlier` this is; zero when it is not after it.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

/// The year of [`Time::MAX`].
const LAST_YEAR: i16 = 9999;

const DAY_MICROS: i64 = 86_400_000_000;

impl Time {
    /// The text of a time that can be stored. Rows and events hold many times, and all that is read of them is printed: the
    /// calendar library, which can do more, takes several times as long.
    fn text(self) -> [u8; 27] {
        let (days, micros) = (self.0.div_euclid(DAY_MICROS), self.0.rem_euclid(DAY_MICROS));
        let (year, month, day) = civil(days);
        let seconds = micros / 1_000_000;
        let mut text = *b"0000-00-00T00:00:00.000000Z";
        let parts = [
            (0..4, year),
            (5..7, month),
            (8..10, day),
            (11..13, seconds / 3_600),
            (14..16, seconds / 60 % 60),
            (17..19, seconds % 60),
            (20..26, micros % 1_000_000),
        ];
        for (index, mut number) in parts {
            for digit in text.get_mut(index).unwrap_or_default().iter_mut().rev() {
                *digit = b'0' + u8::try_from(number % 10).unwrap_or(0);
                number /= 10;
            }
        }
        text
    }
}

impl Time {
    /// What `Display` writes. Code that prints many of them need not use a formatter for each.
    pub(crate) fn to_text(self) -> String {
        if self.is_storable()
            && let Ok(text) = std::str::from_utf8(&self.text())
        {
            return text.to_owned();
        }
        self.to_string()
    }
}

/// Year, month and day of a day, counted from 1970-01-01. Years are counted from March here, so that a leap day is the last
/// of its year; 400 of them have always the same number of days.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

/// RFC 3339 in UTC with exactly six decimals, so that the text sorts as the time does.
impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_storable() {
            let text = self.text();
            return f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?);
        }
        match jiff::Timestamp::from_microsecond(self.0) {
            Ok(timestamp) => write!(f, "{timestamp:.6}"),
            Err(_) => write!(f, "{}µs", self.0),
        }
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a text is not a time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadTime {
    /// It is no time at all.
    #[error("{0:?} is not a time: write it as 2026-01-31T12:00:00Z")]
    Text(String),
    /// It is a time that not every engine could hold.
    #[error("{0} cannot be stored: a time must lie between {min} and {max}", min = Time::MIN, max = Time::MAX)]
    Range(String),
}

impl FromStr for Time {
    type Err = BadTime;

    fn from_str(text: &str) -> Result<Time, BadTime> {
        let timestamp: jiff::Timestamp = text.parse().map_err(|_| {
            // The calendar library's last instant is a little before the end of its last year.
            let civil = text.trim_end_matches(['Z', 'z']).parse::<jiff::civil::DateTime>();
            let is_time = civil.is_ok_and(|civil| civil.year() >= LAST_YEAR || civil.year() < 1);
            if is_time { BadTime::Range(text.to_owned()) } else { BadTime::Text(text.to_owned()) }
        })?;
        let time = Time(timestamp.as_microsecond());
        if time.is_storable() { Ok(time) } else { Err(BadTime::Range(text.to_owned())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_six_decimals_and_reads_them_back() {
        for (micros, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (1, "1970-01-01T00:00:00.000001Z"),
            (-1, "1969-12-31T23:59:59.999999Z"),
            (Time::MIN.micros(), "0001-01-01T00:00:00.000000Z"),
            (Time::MAX.micros(), "9999-12-30T22:00:00.000000Z"),
        ] {
            assert_eq!(Time::from_micros(micros).to_string(), text);
            assert_eq!(Time::from_micros(micros).to_text(), text);
            assert_eq!(text.parse::<Time>().unwrap(), Time::from_micros(micros));
        }
    }

    #[test]
    fn prints_what_the_calendar_library_prints() {
        let check = |micros: i64| {
            let expected = format!("{:.6}", jiff::Timestamp::from_microsecond(micros).unwrap());
            assert_eq!(Time::from_micros(micros).to_string(), expected);
        };
        // Every day of four centuries around the epoch, then all other years at their turns.
        (-73_100..=73_100).for_each(|day| check(day * DAY_MICROS + 86_399_999_999));
        let (first, last) = (Time::MIN.micros() / DAY_MICROS, Time::MAX.micros() / DAY_MICROS);
        (first..=last).step_by(59).for_each(|day| check(day * DAY_MICROS + 45_296_070_809));
        [Time::MIN, Time::MAX].iter().for_each(|time| check(time.micros()));
        // What cannot be stored is printed all the same.
        assert_eq!(Time::from_micros(Time::MIN.micros() - 1).to_string(), "0000-12-31T23:59:59.999999Z");
    }

    #[test]
    fn says_why_a_text_is_refused() {
        for text in ["9999-12-31T23:59:59Z", "9999-12-30T22:00:00.000001Z", "0000-12-31T23:59:59Z"] {
            let message = text.parse::<Time>().unwrap_err().to_string();
            let expected = format!(
                "{text} cannot be stored: a time must lie between 0001-01-01T00:00:00.000000Z and \
                 9999-12-30T22:00:00.000000Z"
            );
            assert_eq!(message, expected);
        }
        for text in ["soon", "", "2026-13-01T00:00:00Z", "2026-01-31"] {
            let message = text.parse::<Time>().unwrap_err().to_string();
            assert_eq!(message, format!("{text:?} is not a time: write it as 2026-01-31T12:00:00Z"));
        }
    }

    #[test]
    fn refuses_what_an_engine_could_not_hold() {
        assert!("-000001-01-01T00:00:00Z".parse::<Time>().is_err());
        assert_eq!(Time::MAX.checked_add_micros(1), None);
        assert_eq!(Time::MIN.checked_add_micros(-1), None);
        assert_eq!(Time::MAX.plus(Duration::from_secs(1)), Time::MAX);
    }
}
