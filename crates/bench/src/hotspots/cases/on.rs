//! Hotspots of `on`: those of the log, which the cases of `log` measure.

use super::super::case::HotspotCase;

pub(super) const CASES: &[HotspotCase] = &[];
