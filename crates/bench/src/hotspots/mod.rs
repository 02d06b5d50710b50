//! Hotspots: for each relief that an archetype names, a workload with the switch off and on, or under a low and the hot load,
//! on the same engine in the same run.
//!
//! Both sides run in turn, each on an empty store, and the first of a round is the other one each time. What counts is the
//! median of the ratios of the rounds; the least and the greatest are printed beside it. Wall time depends on what else the
//! machine does, so processor time and the number of requests for each operation are printed as well.

mod case;
mod cases;
mod engines;

use anyhow::{Result, ensure};
use statehouse::archetypes::Archetype;

use self::case::{CaseFigures, Compares, HotspotCase, Trial};
use self::engines::HotspotEngine;
use crate::load::{self, middle};
use crate::report;

/// Rounds of each case.
const ROUNDS: usize = 5;
/// A median ratio between these, or a spread that has 1 in it, is no measurable effect.
const NO_EFFECT: std::ops::RangeInclusive<f64> = 0.9..=1.1;

/// The figures of one case on one engine, one entry for each round.
struct Compared {
    case: &'static HotspotCase,
    operations: u64,
    sides: [Vec<CaseFigures>; 2],
}

/// Measures the hotspots of these archetypes, or of all, and prints a table for each engine.
pub async fn run(archetypes: &[String]) -> Result<()> {
    for keyword in archetypes {
        ensure!(Archetype::of(keyword).is_some(), "there is no archetype `{keyword}`");
    }
    let wanted = |case: &&HotspotCase| {
        archetypes.is_empty() || archetypes.iter().any(|keyword| keyword == case.archetype)
    };
    for engine in HotspotEngine::available()? {
        report::heading(&format!("{}: hotspots, {ROUNDS} rounds of each case", engine.name()));
        report::line(HEADING);
        for case in cases::all().filter(wanted) {
            let operations = engine.scaled(case.operations);
            report::line(&compare(case, &engine, operations, ROUNDS).await?.row()?);
        }
    }
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

const HEADING: &str = "\
| archetype | hotspot | one operation | from → to | operations | per second | requests each | CPU µs each | ratio | spread | |
|---|---|---|---|---|---|---|---|---|---|---|";

async fn compare(
    case: &'static HotspotCase,
    engine: &HotspotEngine,
    operations: u64,
    rounds: usize,
) -> Result<Compared> {
    let mut sides = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for number in order {
            let (Some(side), Some(figures)) = (case.sides.get(number), sides.get_mut(number)) else {
                continue;
            };
            figures.push(Trial::run(case, *side, engine, operations).await?);
        }
    }
    Ok(Compared { case, operations, sides })
}

impl Compared {
    /// A row of the table.
    fn row(&self) -> Result<String> {
        let [from, to] = &self.sides;
        let both = |of: fn(&CaseFigures) -> f64| -> Result<(f64, f64)> {
            let median = |figures: &[CaseFigures]| middle(&figures.iter().map(of).collect::<Vec<_>>());
            Ok((median(from)?, median(to)?))
        };
        let (rates, requests) = (both(CaseFigures::rate)?, both(CaseFigures::requests_each)?);
        let processor = both(CaseFigures::processor_each)?;
        let ratios: Vec<f64> = from.iter().zip(to).map(|(from, to)| to.rate() / from.rate()).collect();
        let (least, greatest) = ratios
            .iter()
            .fold((f64::MAX, 0.0_f64), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
        let ratio = middle(&ratios)?;
        let HotspotCase { archetype, hotspot, operation, sides: [off, on], .. } = self.case;
        Ok(format!(
            "| {archetype} | {hotspot} | {operation} | {} → {} | {} | {:.0} → {:.0} | {:.2} → {:.2} | {:.0} → {:.0} \
             | {ratio:.2} × | {least:.2}–{greatest:.2} | {} |",
            shown(off.name),
            shown(on.name),
            self.operations,
            rates.0,
            rates.1,
            requests.0,
            requests.1,
            processor.0,
            processor.1,
            self.verdict(ratio, least, greatest),
        ))
    }

    /// What the ratio says.
    fn verdict(&self, ratio: f64, least: f64, greatest: f64) -> &'static str {
        let has_none = NO_EFFECT.contains(&ratio) || (least..=greatest).contains(&1.0);
        match self.case.compares {
            Compares::Switch if has_none => "no measurable effect",
            Compares::Switch if ratio > 1.0 => "gains",
            Compares::Switch => "costs",
            Compares::Load if has_none => "the same under load",
            Compares::Load if ratio > 1.0 => "faster under load",
            Compares::Load => "slower under load",
        }
    }
}

fn shown(name: &str) -> String {
    name.replace('\n', ", ")
}

#[cfg(test)]
mod tests;
