//! Each relief has a workload, and each workload runs. Nothing here looks at times.

use std::collections::BTreeSet;

use statehouse::archetypes::{ARCHETYPES, Archetype};
use tokio::task::JoinSet;

use super::engines::HotspotEngine;
use super::{cases, compare};

/// Operations of a run that only shows that it works.
const FEW: u64 = 20;
/// The benchmark that registrations name.
const BENCH: &str = "hotspots";

#[test]
fn each_relief_has_a_workload_and_names_it() {
    let named = |archetype: &'static str, hotspot: &'static str| (archetype, hotspot);
    let measured: BTreeSet<_> = cases::all().map(|case| named(case.archetype, case.hotspot)).collect();
    let reliefs = ARCHETYPES.iter().flat_map(|built| built.reliefs.iter().map(move |relief| (built, relief)));
    let mut listed = BTreeSet::new();
    for (built, relief) in reliefs {
        let bench = relief.bench.and_then(|bench| bench.strip_prefix(BENCH)).map(str::trim);
        // Two keywords of one code may share the workloads of one of them.
        let of_code: Vec<&'static str> = Archetype::of_code(built.code).map(|one| one.keyword).collect();
        let keyword = of_code.into_iter().find(|keyword| Some(*keyword) == bench);
        let keyword = keyword.unwrap_or_else(|| panic!("{}: {}: {bench:?}", built.keyword, relief.hotspot));
        listed.insert(named(keyword, relief.hotspot));
    }
    assert_eq!(measured, listed, "hotspots with a workload, and hotspots of the archetypes");
}

async fn run_all(engine: HotspotEngine) {
    let mut running = JoinSet::new();
    for case in cases::all() {
        let engine = engine.clone();
        running.spawn(async move {
            let operations = FEW.min(case.operations);
            let compared = compare(case, &engine, operations, 1).await;
            let compared =
                compared.map_err(|error| format!("{}: {}: {error:#}", case.archetype, case.hotspot))?;
            for figures in compared.sides.iter().flatten() {
                assert!(
                    figures.operations > 0 && figures.requests > 0,
                    "{}: {}",
                    case.archetype,
                    case.hotspot
                );
            }
            compared.row().map_err(|error| error.to_string())
        });
    }
    let mut failures = Vec::new();
    while let Some(ended) = running.join_next().await {
        failures.extend(ended.unwrap().err());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_workload_runs_in_memory() {
    run_all(HotspotEngine::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_workload_runs_on_sqlite() {
    run_all(HotspotEngine::Sqlite).await;
}
