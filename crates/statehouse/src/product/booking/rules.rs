//! Pure decisions: how a unit reads at a time, and which units to take.

use std::time::Duration;

use statehouse_store::{Row, StoreError, Time};

use super::{AVAILABLE, CHOICES, HELD, HOLD_EXPIRES_AT, RETIRED, SOLD, STATE};
use crate::action::Refusal;
use crate::product::booking::external_holds::ExternalHold;

/// The state of a unit as it reads at a time: a hold that is over is none, unless bookings keep their units (`keeps_units`), and
/// a lease before the store is one.
pub(super) fn effective_state(
    unit: &Row,
    lease: Option<&ExternalHold>,
    keeps_units: bool,
    now: Time,
) -> Result<&'static str, StoreError> {
    let ends_at = unit.get_optional_time(HOLD_EXPIRES_AT)?;
    Ok(match unit.get_text(STATE)? {
        HELD if keeps_units || ends_at.is_some_and(|end| end > now) => HELD,
        SOLD => SOLD,
        RETIRED => RETIRED,
        _ if lease.is_some() => HELD,
        _ => AVAILABLE,
    })
}

/// Which of a row of units to take, so many of them: side by side if there is such a place, the first ones otherwise. Of
/// the first few places one is taken by `spread`, so that callers who come together do not all want the same.
pub(super) fn choose(free: &[bool], count: usize, spread: usize) -> Option<Vec<bool>> {
    let mut chosen = vec![false; free.len()];
    let fits =
        |start: &usize| free.get(*start..*start + count).is_some_and(|run| run.iter().all(|free| *free));
    // Places that do not overlap, so that two choices do not meet half-way.
    let mut places = Vec::new();
    let mut start = 0;
    while start < free.len() && places.len() < CHOICES {
        if fits(&start) {
            places.push(start);
            start += count;
        } else {
            start += 1;
        }
    }
    if let Some(start) = places.get(spread % places.len().max(1)) {
        chosen.iter_mut().skip(*start).take(count).for_each(|one| *one = true);
        return Some(chosen);
    }
    let singles: Vec<usize> = (0..free.len()).filter(|index| free.get(*index) == Some(&true)).collect();
    if singles.len() < count {
        return None;
    }
    let first = spread % (singles.len() - count + 1).min(CHOICES);
    for index in singles.iter().skip(first).take(count) {
        if let Some(one) = chosen.get_mut(*index) {
            *one = true;
        }
    }
    Some(chosen)
}

pub(super) fn field_error(name: &str, detail: &str) -> Refusal {
    Refusal::field(name, detail)
}

/// A span as people say it.
pub(super) fn span(span: Duration) -> String {
    match span.as_secs() {
        0 => format!("{} ms", span.as_millis()),
        seconds if seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(free: &str, count: usize, spread: usize, expect: Option<&str>) {
        let places: Vec<bool> = free.chars().map(|c| c == '.').collect();
        let chosen = choose(&places, count, spread);
        let shown =
            chosen.map(|chosen| chosen.iter().map(|one| if *one { '#' } else { '-' }).collect::<String>());
        assert_eq!(shown.as_deref(), expect, "{free} {count} {spread}");
    }

    #[test]
    fn the_best_are_side_by_side_and_spread() {
        check("...", 1, 0, Some("#--"));
        check("...", 1, 1, Some("-#-"));
        check("x.x..", 2, 7, Some("---##"));
        check("....", 2, 1, Some("--##"));
        check(".x.x.", 2, 0, Some("#-#--"));
        check(".x.x.", 2, 1, Some("--#-#"));
        check(".xx", 2, 0, None);
        check("", 1, 0, None);
    }
}
