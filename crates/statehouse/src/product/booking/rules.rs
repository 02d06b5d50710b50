//! Pure decisions: how a unit reads at a time, and which units to take.

use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::{Row, Time, Type, Value};

use super::{AVAILABLE, CHOICES, HELD, HOLD_EXPIRES_AT, HOLDER, SOLD, STATE};
use crate::action::Refusal;
use crate::blueprint::settings::Field;
use crate::form::Misfit;
use crate::holds::Hold;

/// The state of a unit as it reads at a time: a hold that is over is none, and a lease before the store is one.
pub(super) fn standing(unit: &Row, lease: Option<&Hold>, now: Time) -> &'static str {
    match unit.text(STATE) {
        Some(HELD) if unit.time(HOLD_EXPIRES_AT).is_some_and(|end| end > now) => HELD,
        Some(SOLD) => SOLD,
        _ if lease.is_some() => HELD,
        _ => AVAILABLE,
    }
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
    let singles: Vec<usize> = (0..free.len()).filter(|place| free.get(*place) == Some(&true)).collect();
    if singles.len() < count {
        return None;
    }
    let first = spread % (singles.len() - count + 1).min(CHOICES);
    for place in singles.iter().skip(first).take(count) {
        if let Some(one) = chosen.get_mut(*place) {
            *one = true;
        }
    }
    Some(chosen)
}

pub(super) fn holder_field() -> Field {
    Field { name: HOLDER.to_owned(), span: 0..0, kind: Type::Text, optional: false, default: None }
}

pub(super) fn misfit(name: &str, detail: &str) -> Refusal {
    Refusal::misfits(vec![Misfit { pointer: format!("/{name}"), detail: detail.to_owned() }])
}

pub(super) fn value_of(json: Option<&Json>, field: &Field) -> Result<Value, Refusal> {
    Value::from_json(json.cloned().unwrap_or_default(), field.kind)
        .map_err(|why| misfit(&field.name, &why.to_string()))
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
