//! What is proven of the atlas: for each failure its drill and the engines that the suite runs it on, for each hotspot what
//! turns it down and which benchmark measures that.
//!
//! `statehouse atlas --json` and `docs/guarantees.md` are made from this.

use std::fmt::Write as _;

use statehouse::atlas::{self, Archetype};

use crate::harness::drill::Drill;
use crate::harness::engines;
use crate::proof::DRILLS;

/// What turns a hotspot down: the archetype by keyword, the hotspot in the atlas's words, the switch in a blueprint or a
/// call, and the benchmark of `cargo bench` that measures it, if there is one.
pub struct Relief {
    archetype: &'static str,
    hotspot: &'static str,
    /// The switch.
    pub switch: &'static str,
    /// The benchmark.
    pub bench: Option<&'static str>,
}

const fn relief(
    archetype: &'static str,
    hotspot: &'static str,
    switch: &'static str,
    bench: Option<&'static str>,
) -> Relief {
    Relief { archetype, hotspot, switch, bench }
}

/// Every hotspot that something turns down. The one list.
pub const RELIEFS: &[Relief] = &[
    relief("entity", "hot entity read skew", "consistency=cached", Some("http")),
    relief("entity", "write contention on hot entity", "hot = [\"FIELD\"], mutate = \"pessimistic\"", None),
    relief(
        "entity",
        "cache invalidation churn",
        "consistency=cached: rows are discarded one by one",
        Some("http"),
    ),
    relief("booking", "hot hold key", "count=N instead of named units", None),
    relief(
        "booking",
        "hold storms",
        "plans in flight share a transaction, without a switch; a schedule with per_key = N as a waiting room",
        Some("bookings"),
    ),
    relief("booking", "expiry scan pressure", "shards = N", Some("scans")),
    relief(
        "booking",
        "hold-store contention",
        "units of different groups share no row, without a switch",
        None,
    ),
    relief("feed", "fanout on write", "pull_above = N; a post goes out in bounded plans", Some("feed")),
    relief(
        "feed",
        "projection lag",
        "partitions=N in the store's URL, shared by all processes",
        Some("feed"),
    ),
    relief("feed", "expensive ranking/recompute", "the order is the key's, without a switch", Some("feed")),
    relief("feed", "rebuild cost", "keep = SPAN: what is over goes nowhere", Some("rebuild")),
    relief(
        "feed",
        "query fanout across shards",
        "one request, and one for each author above `pull_above`",
        None,
    ),
    relief("effect", "external dependency latency", "limits = { concurrency = N }, for each target", None),
    relief("effect", "retry storms", "breaker = { failures = N, cool_down = SPAN }", None),
    relief("effect", "outbox relay backlog", "shards = N", None),
    relief("lease", "hot claim key", "Prefer: wait", None),
    relief("lease", "heartbeat/renew storm", "renewals of several leases as one plan: /v1/batch", None),
    relief("lease", "lease-manager contention", "each key is a row of its own, without a switch", None),
    relief("log", "hot partitions", "partitions=N in the store's URL, when it is created", None),
    relief("log", "log I/O", "one read serves all tenants of a page, without a switch", None),
    relief("log", "lag buildup", "a handler that makes one plan of many records: Effect::taken", None),
    relief("log", "rebalance churn", "a partition changes hands at a step's end, without a switch", None),
    relief(
        "projection",
        "projector lag",
        "partitions=N in the store's URL, shared by all processes",
        Some("feed"),
    ),
    relief("projection", "rebuild cost", "beside the live one, in pages, without a switch", Some("rebuild")),
    relief(
        "projection",
        "hot search/index shards",
        "totals are added to without being read, without a switch",
        None,
    ),
    relief(
        "projection",
        "broad query fanout",
        "a read names its rows under one generation, without a switch",
        None,
    ),
    relief("relation", "celebrity skew", "buckets = N", None),
    relief("relation", "hot relation partition", "buckets = N, out_buckets = N", None),
    relief("relation", "hot count key", "count_shards = N", None),
    relief(
        "relation",
        "hot relation-list pages",
        "a page is one request for each bucket, without a switch",
        None,
    ),
    relief("sequence", "allocator hot spot", "leased ranges, or a sequence of times", None),
    relief(
        "sequence",
        "worker-id pool contention",
        "processes look at different places, without a switch",
        None,
    ),
    relief("sequence", "lease refresh pressure", "ahead = SPAN", None),
    relief("thread", "hot parent append rate", "buckets = N", None),
    relief("thread", "hot thread reads", "a page is one request for each bucket, without a switch", None),
    relief("thread", "long history scans", "a page is one request for each bucket, without a switch", None),
    relief("schedule", "due-time burstiness", "look_ahead = SPAN; claims in batches: limit=N", Some("jobs")),
    relief("schedule", "due bucket/index hotspot", "shards = N", Some("jobs")),
    relief(
        "schedule",
        "queue backlog",
        "a claim reads the beginning of a range, without a switch; priorities = N",
        Some("jobs"),
    ),
    relief(
        "schedule",
        "worker burst pressure",
        "claimers of one process take turns at a shard, without a switch",
        Some("jobs"),
    ),
    relief("timer", "due-time bucket hotspot", "shards = N", Some("scans")),
    relief("timer", "cron boundary burst", "shards = N", Some("scans")),
    relief("timer", "queue backlog", "missed = \"once\"", None),
    relief("timer", "worker burst", "steps are bounded, without a switch", Some("scans")),
];

/// The drill of a failure.
pub fn drill(archetype: &Archetype, failure: &str) -> Option<&'static Drill> {
    let ours = |drill: &&Drill| drill.archetype == archetype.keyword() && drill.failure == failure;
    DRILLS.iter().copied().flatten().find(ours)
}

/// The engines on which the suite runs a drill.
pub fn engines(drill: &Drill) -> Vec<String> {
    let all = engines::all();
    let fit = all
        .iter()
        .filter(|engine| engine.carries_archetypes() && drill.largest_plan <= engine.largest_plan());
    fit.map(|engine| engine.name().to_owned()).collect()
}

/// What turns a hotspot down.
pub fn switch(archetype: &Archetype, hotspot: &str) -> Option<&'static Relief> {
    RELIEFS.iter().find(|relief| relief.archetype == archetype.keyword() && relief.hotspot == hotspot)
}

/// `docs/guarantees.md`.
pub fn page() -> String {
    let archetypes = atlas::archetypes();
    let failures = archetypes.iter().flat_map(|a| a.failures.iter().map(move |failure| (a, failure)));
    let hotspots = archetypes.iter().flat_map(|a| a.hotspots.iter().map(move |hotspot| (a, hotspot)));
    let drilled = failures.clone().filter(|(a, failure)| drill(a, failure).is_some()).count();
    let relieved = hotspots.clone().filter(|(a, hotspot)| switch(a, hotspot).is_some()).count();
    let mut page = format!(
        "# Guarantees\n\n\
         <!-- Generated: STATEHOUSE_BLESS=1 cargo test -p statehouse-drills --test coverage -->\n\n\
         Each failure that the atlas names, the drill that provokes it, and the engines on which the test command runs that\n\
         drill. `statehouse drill NAME --on URL --blueprint FILE` runs it on your store and your resources, in a namespace of\n\
         its own; `statehouse drill --mutate` shows that it turns red when a guard is taken out.\n\n\
         {drilled} of {} failures have a drill; {relieved} of {} hotspots have something that turns them down.\n",
        failures.count(),
        hotspots.count(),
    );
    for archetype in archetypes {
        let keyword = archetype.keyword();
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            "\n## {} {} (`{keyword}`)\n\n| failure | drill | engines |\n|---|---|---|\n",
            archetype.code, archetype.name
        );
        for failure in &archetype.failures {
            let _ = match drill(archetype, failure) {
                Some(drill) => {
                    let engines = engines(drill).join(", ");
                    writeln!(page, "| {failure} | `{}` {} | {engines} |", drill.name(), drill.provokes)
                }
                None => writeln!(page, "| {failure} | not built yet | |"),
            };
        }
        let _ = write!(page, "\n| hotspot | switch | benchmark |\n|---|---|---|\n");
        for hotspot in &archetype.hotspots {
            let _ = match switch(archetype, hotspot) {
                Some(relief) => {
                    let bench = relief
                        .bench
                        .map_or("not built yet".to_owned(), |name| format!("`cargo bench -- {name}`"));
                    writeln!(page, "| {hotspot} | {} | {bench} |", relief.switch)
                }
                None => writeln!(page, "| {hotspot} | not built yet | |"),
            };
        }
    }
    page
}
