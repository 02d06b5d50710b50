//! Reports of cases that the code rules out.
//!
//! [`bug!`](crate::bug!) marks a branch that no input, no race and no fault of an engine can reach. Reaching it means that the
//! program is wrong. What it does depends on how the program was compiled:
//!
//! - **With debug assertions** (the profile `dev`, so all tests, drills and simulations) it panics. The test fails at the defect
//!   and not at one of its consequences.
//! - **Without them** (the profiles `release` and `dist`) it logs the place, the message and a new id as an error of the target
//!   `statehouse::bug`, and evaluates to a [`Bug`]. The caller returns it: it converts into [`StoreError::Bug`], which a server
//!   answers as an internal error. One request fails, and the process goes on.
//!
//! It is not for stored data that may be damaged ([`StoreError::Corrupt`], as [`crate::Row::get_text`] returns it), nor for bad
//! input, nor for faults that an engine reports.
//!
//! [`StoreError::Bug`]: crate::StoreError::Bug
//! [`StoreError::Corrupt`]: crate::StoreError::Corrupt

use std::fmt;

use crate::random::Random;

/// An impossible case was reached. Made by [`bug!`](crate::bug!) only.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("internal error {id} at {place}: {message}")]
pub struct Bug {
    id: String,
    place: String,
    message: String,
}

impl Bug {
    /// The id under which the log has this bug: 16 hexadecimal digits, new for each report.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The source file and line.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// What was found.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Reports a bug. Callers use [`bug!`](crate::bug!), which knows the place.
    #[doc(hidden)]
    pub fn report(file: &str, line: u32, message: fmt::Arguments<'_>) -> Bug {
        report(cfg!(debug_assertions), format!("{file}:{line}"), message.to_string())
    }
}

#[expect(clippy::panic, reason = "with debug assertions a defect must stop the test that reaches it")]
fn report(panics: bool, place: String, message: String) -> Bug {
    if panics {
        panic!("bug at {place}: {message}");
    }
    let id = format!("{:016x}", Random::from_entropy().next_u64());
    tracing::error!(target: "statehouse::bug", id, place, "{message}");
    Bug { id, place, message }
}

/// Reports an impossible case: panics with debug assertions, else logs it and evaluates to a [`Bug`](crate::bug::Bug). Takes
/// what `format!` takes.
///
/// ```
/// # use statehouse_store::{StoreError, bug};
/// fn newest(offsets: &[u64]) -> Result<u64, StoreError> {
///     // The engine keeps the newest record of each partition.
///     Ok(*offsets.last().ok_or_else(|| bug!("a partition without records"))?)
/// }
/// assert_eq!(newest(&[1, 2]), Ok(2));
/// ```
#[macro_export]
macro_rules! bug {
    ($($message:tt)+) => {
        $crate::bug::Bug::report(file!(), line!(), format_args!($($message)+))
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StoreError;

    #[test]
    #[should_panic(expected = "a list of 2 has no third entry")]
    fn a_bug_stops_a_test() {
        let error: StoreError = bug!("a list of {} has no third entry", 2).into();
        drop(error);
    }

    #[test]
    fn a_bug_is_an_error_with_an_id_in_production() {
        let one = report(false, "store.rs:7".into(), "no row".into());
        let other = report(false, "store.rs:7".into(), "no row".into());
        assert_ne!(one.id(), other.id(), "each report has an id of its own");
        assert_eq!((one.id().len(), one.place(), one.message()), (16, "store.rs:7", "no row"));
        let error = StoreError::from(one.clone());
        assert!(!error.is_transient(), "a retry meets the same defect");
        assert_eq!(error.to_string(), format!("internal error {} at store.rs:7: no row", one.id()));
    }
}
