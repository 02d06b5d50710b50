//! Conformance cases, differential tests and drills for any Statehouse store.
