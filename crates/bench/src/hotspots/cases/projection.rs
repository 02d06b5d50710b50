//! Hotspots of `projection`. It has nothing to declare of its own, so views show them.

pub(super) use super::view::PROJECTION_CASES as CASES;
