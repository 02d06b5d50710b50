//! What a run of the suite is restricted to, from the environment. Without a variable everything is run.
//!
//! | variable | value |
//! |---|---|
//! | `STATEHOUSE_TEST_ENGINES` | engines by name, with commas between them |
//! | `STATEHOUSE_TEST_AREAS` | `store` for the store's own cases, archetypes by keyword |
//! | `STATEHOUSE_TEST_REDUCED` | engines that run the store's cases and one drill per failure, and no other archetype case |
//!
//! A name that does not exist is an error: a run with a misspelled name would test nothing and be green.

use std::collections::BTreeSet;

use crate::harness::engines;
use crate::harness::simulation::WORKLOADS;
use crate::proof;

/// The area of the store's own cases.
pub const STORE: &str = "store";

const ENGINES_VARIABLE: &str = "STATEHOUSE_TEST_ENGINES";
const AREAS_VARIABLE: &str = "STATEHOUSE_TEST_AREAS";
const REDUCED_VARIABLE: &str = "STATEHOUSE_TEST_REDUCED";

/// What is run.
pub struct Selection {
    engines: BTreeSet<String>,
    areas: BTreeSet<String>,
    reduced: BTreeSet<String>,
}

impl Selection {
    /// Reads the environment; the error names the variable and the values that it may have.
    pub fn from_environment() -> Result<Selection, String> {
        let engines: BTreeSet<String> =
            engines::all().iter().map(|engine| engine.name().to_owned()).collect();
        let areas = all_areas();
        Ok(Selection {
            reduced: names(REDUCED_VARIABLE, &engines)?.unwrap_or_default(),
            engines: names(ENGINES_VARIABLE, &engines)?.unwrap_or(engines),
            areas: names(AREAS_VARIABLE, &areas)?.unwrap_or(areas),
        })
    }

    /// Whether an engine is tested.
    pub fn has_engine(&self, name: &str) -> bool {
        self.engines.contains(name)
    }

    /// Whether an engine runs the store's cases and one drill per failure only.
    pub fn is_reduced(&self, engine: &str) -> bool {
        self.reduced.contains(engine)
    }

    /// Whether an area is tested.
    pub fn has_area(&self, name: &str) -> bool {
        self.areas.contains(name)
    }
}

/// A number from the environment.
pub fn number(variable: &str, default: u64) -> Result<u64, String> {
    match std::env::var(variable) {
        Ok(text) => text.parse().map_err(|error| format!("{variable} has to be a number: {error}")),
        Err(_) => Ok(default),
    }
}

/// The area of a case: the part of its name before the colons.
pub fn area(name: &str) -> &str {
    name.split("::").next().unwrap_or(name)
}

fn all_areas() -> BTreeSet<String> {
    let cases = proof::CASES.iter().copied().flatten().map(|case| area(case.name));
    let drills = proof::DRILLS.iter().copied().flatten().map(|drill| drill.archetype);
    let workloads = WORKLOADS.iter().map(|course| course.archetype);
    cases.chain(drills).chain(workloads).chain([STORE]).map(str::to_owned).collect()
}

fn names(variable: &str, known: &BTreeSet<String>) -> Result<Option<BTreeSet<String>>, String> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    let names: BTreeSet<String> =
        text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
    match names.iter().find(|name| !known.contains(*name)) {
        None => Ok(Some(names)),
        Some(name) => {
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            Err(format!("{variable}: there is no `{name}`; there are {}", known.join(", ")))
        }
    }
}
