//! Decides whether what concurrent clients saw of versioned registers can have happened in one order.
//!
//! The search of Wing and Gong with Lowe's memory. Calls that overlap in time may have taken effect in any order; a
//! call that returned before another was made came before it. From the calls that may come first, take one, see
//! whether its answer fits the state, go on with the rest, and turn back where nothing fits. What has been done
//! (a set of calls) and the state that it led to say everything about what is still possible, so each such pair is
//! entered once. Linearizability is local: a history is linearizable if each key's part of it is, so each key is
//! searched by itself, which keeps the sets small.
//!
//! A register is a row: absent, or a value with a version that counts from 1. A call whose outcome is unknown has
//! no end: it may have taken effect at any time after it was made, or never.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

/// One call of one client, with the moments between which it took effect, by a counter that all clients share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisterCall {
    /// Which register.
    pub key: String,
    /// When the client made the call.
    pub invoked: u64,
    /// When it had the answer; `None` if it never got one.
    pub returned: Option<u64>,
    /// What was asked, and what was answered.
    pub action: RegisterAction,
}

/// A question and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterAction {
    /// A strong read.
    Read {
        /// Version and value; `None` if there was no row.
        observed: Option<(i64, i64)>,
    },
    /// A write on condition of a version; on condition of absence if that is `None`.
    Write {
        /// The version that the row must have.
        expected: Option<i64>,
        /// The value that it gets.
        value: i64,
        /// What the client was told.
        written: Written,
    },
}

/// What a client was told about its write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The condition held, and the value was stored.
    Applied,
    /// The condition did not hold.
    Refused,
    /// The outcome is unknown.
    Unknown,
}

/// A history that cannot have happened in one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The register.
    pub key: String,
    /// How many of its calls could be put in order, at best.
    pub placed: usize,
    /// The calls that could not, at that point.
    pub left: Vec<RegisterCall>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "no order of the calls on {} explains their answers;", self.key)?;
        writeln!(f, "{} calls can be put in order, and then none of these fits:", self.placed)?;
        self.left.iter().try_for_each(|call| writeln!(f, "  {call:?}"))
    }
}

impl std::error::Error for Violation {}

/// The content of a register.
type RegisterState = Option<(i64, i64)>;

/// Looks for an order of each key's calls that explains all answers.
pub fn check(history: &[RegisterCall]) -> Result<(), Violation> {
    let mut by_key: BTreeMap<&str, Vec<&RegisterCall>> = BTreeMap::new();
    for call in history {
        by_key.entry(&call.key).or_default().push(call);
    }
    by_key.into_values().try_for_each(|calls| check_key(&calls))
}

fn check_key(calls: &[&RegisterCall]) -> Result<(), Violation> {
    let end =
        |call: &RegisterCall| if is_optional(call) { u64::MAX } else { call.returned.unwrap_or(u64::MAX) };
    let mut seen: HashSet<(Vec<u64>, RegisterState)> = HashSet::new();
    let mut open: Vec<(Vec<u64>, RegisterState)> = vec![(vec![0; calls.len().div_ceil(64)], None)];
    let mut furthest: Option<(usize, Vec<u64>)> = None;
    while let Some((done, state)) = open.pop() {
        let left = || (0..calls.len()).filter(|&index| !contains(&done, index));
        if left().all(|index| is_optional(calls[index])) {
            return Ok(());
        }
        let placed = calls.len() - left().count();
        if furthest.as_ref().is_none_or(|(best, _)| placed > *best) {
            furthest = Some((placed, done.clone()));
        }
        // Whatever takes effect next was made before the first of the remaining answers.
        let horizon = left().map(|index| end(calls[index])).min().unwrap_or(u64::MAX);
        let fits = |index: usize| Some((index, after(calls[index].action, state)?));
        let candidates = left().filter(|&index| calls[index].invoked < horizon).filter_map(fits);
        let mut candidates: Vec<(usize, RegisterState)> = candidates.collect();
        // A call that fits here and changes nothing does not exclude any other call, so no other choice need be tried.
        if let Some(idle) = candidates.iter().position(|(_, next)| *next == state) {
            candidates = vec![candidates[idle]];
        }
        for (index, next) in candidates {
            let mut with = done.clone();
            with[index / 64] |= 1 << (index % 64);
            if seen.insert((with.clone(), next)) {
                open.push((with, next));
            }
        }
    }
    let (placed, done) = furthest.unwrap_or_default();
    let left = calls.iter().enumerate().filter(|(index, _)| !contains(&done, *index));
    Err(Violation {
        key: calls.first().map(|call| call.key.clone()).unwrap_or_default(),
        placed,
        left: left.map(|(_, &call)| call.clone()).collect(),
    })
}

fn contains(set: &[u64], index: usize) -> bool {
    set[index / 64] & (1 << (index % 64)) != 0
}

/// Whether the call may be left out of the order: it may never have taken effect.
fn is_optional(call: &RegisterCall) -> bool {
    matches!(call.action, RegisterAction::Write { written: Written::Unknown, .. })
        || (call.returned.is_none() && matches!(call.action, RegisterAction::Read { .. }))
}

/// The state after a call, or `None` if its answer does not fit the state before it.
fn after(action: RegisterAction, state: RegisterState) -> Option<RegisterState> {
    match action {
        RegisterAction::Read { observed } => (observed == state).then_some(state),
        RegisterAction::Write { expected, value, written } => {
            let held = expected == state.map(|(version, _)| version);
            match (written, held) {
                (Written::Applied | Written::Unknown, true) => Some(Some((expected.unwrap_or(0) + 1, value))),
                (Written::Refused, false) => Some(state),
                // An unknown write whose condition fails here changes nothing, which is the same as leaving it out.
                (Written::Applied | Written::Unknown, false) | (Written::Refused, true) => None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(invoked: u64, returned: u64, action: RegisterAction) -> RegisterCall {
        RegisterCall { key: "x".into(), invoked, returned: Some(returned), action }
    }

    fn read(invoked: u64, returned: u64, observed: RegisterState) -> RegisterCall {
        call(invoked, returned, RegisterAction::Read { observed })
    }

    fn write(
        invoked: u64,
        returned: u64,
        expected: Option<i64>,
        value: i64,
        written: Written,
    ) -> RegisterCall {
        call(invoked, returned, RegisterAction::Write { expected, value, written })
    }

    fn lost(invoked: u64, expected: Option<i64>, value: i64) -> RegisterCall {
        let action = RegisterAction::Write { expected, value, written: Written::Unknown };
        RegisterCall { key: "x".into(), invoked, returned: None, action }
    }

    use Written::{Applied, Refused};

    #[test]
    fn one_after_another_fits() {
        let history = [
            read(0, 1, None),
            write(2, 3, None, 10, Applied),
            read(4, 5, Some((1, 10))),
            write(6, 7, None, 11, Refused),
            write(8, 9, Some(1), 12, Applied),
            read(10, 11, Some((2, 12))),
        ];
        assert_eq!(check(&history), Ok(()));
    }

    #[test]
    fn overlapping_calls_may_be_turned_round() {
        // The read began before the write returned, so either answer is right.
        for observed in [None, Some((1, 10))] {
            assert_eq!(check(&[write(0, 5, None, 10, Applied), read(1, 2, observed)]), Ok(()));
        }
        // The order that the invocations suggest is not the one that explains the answers.
        let history = [
            write(0, 9, Some(1), 20, Applied),
            write(1, 8, None, 10, Applied),
            read(2, 7, Some((1, 10))),
            read(3, 12, None),
        ];
        assert_eq!(check(&history), Ok(()));
    }

    #[test]
    fn a_stale_read_is_found() {
        let history = [write(0, 1, None, 10, Applied), read(2, 3, None)];
        let violation = check(&history).unwrap_err();
        assert_eq!((violation.placed, violation.left), (1, vec![history[1].clone()]));
    }

    #[test]
    fn a_lost_update_is_found() {
        let history = [
            write(0, 1, None, 10, Applied),
            write(2, 6, Some(1), 11, Applied),
            write(3, 7, Some(1), 12, Applied),
        ];
        assert!(check(&history).is_err(), "both writes claim to have found version 1");
    }

    #[test]
    fn a_read_that_goes_back_is_found() {
        // The write is still open, so each read alone could be right; new before old cannot.
        let history = [
            write(0, 1, None, 10, Applied),
            write(2, 20, Some(1), 11, Applied),
            read(3, 4, Some((2, 11))),
            read(5, 6, Some((1, 10))),
        ];
        assert!(check(&history).is_err());
    }

    #[test]
    fn a_refusal_without_a_cause_is_found() {
        assert!(check(&[write(0, 1, None, 10, Refused)]).is_err());
        let history = [write(0, 1, None, 10, Applied), write(2, 3, Some(1), 11, Refused)];
        assert!(check(&history).is_err());
    }

    #[test]
    fn a_value_that_was_never_written_is_found() {
        assert!(check(&[write(0, 1, None, 10, Applied), read(2, 3, Some((1, 11)))]).is_err());
    }

    #[test]
    fn an_unknown_write_may_have_happened_or_not_but_not_both() {
        for observed in [None, Some((1, 10))] {
            assert_eq!(check(&[lost(0, None, 10), read(5, 6, observed)]), Ok(()));
        }
        let late = [lost(0, None, 10), read(1, 2, None), read(3, 4, Some((1, 10)))];
        assert_eq!(check(&late), Ok(()), "it may take effect long after it was given up");
        let undone = [lost(0, None, 10), read(1, 2, Some((1, 10))), read(3, 4, None)];
        assert!(check(&undone).is_err());
        let unconditional = [lost(0, Some(3), 10), read(1, 2, Some((1, 10)))];
        assert!(check(&unconditional).is_err(), "its condition never held");
        let early = [read(0, 1, Some((1, 10))), lost(2, None, 10)];
        assert!(check(&early).is_err(), "it was seen before it was made");
    }

    #[test]
    fn keys_do_not_explain_each_other() {
        let elsewhere = RegisterCall { key: "y".into(), ..write(0, 1, None, 10, Applied) };
        let violation = check(&[elsewhere, read(2, 3, Some((1, 10)))]).unwrap_err();
        assert_eq!(violation.key, "x");
    }

    #[test]
    fn many_overlapping_calls_are_decided() {
        // There are more orders of 40 overlapping calls than could ever be tried.
        let mut history: Vec<RegisterCall> = vec![write(0, 1, None, 0, Applied)];
        history.extend((0..40).map(|value| write(2, 1_000, None, value, Refused)));
        history.extend((0..70).map(|turn| read(10 + turn, 11 + turn, Some((1, 0)))));
        assert_eq!(check(&history), Ok(()));
        history.push(read(500, 501, Some((2, 7))));
        assert!(check(&history).is_err(), "nobody wrote version 2");
    }
}
