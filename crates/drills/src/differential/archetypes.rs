//! Plans of archetypes, on the model and on another store side by side.
//!
//! A history of the simulation is recorded: the tables of its house, and every plan that its processes and workers sent,
//! with the time at which it arrived. Then the plans are sent again, to both stores, not quite as they were: some come
//! earlier or later than they did, some come twice, some lack a condition, and some are resolved before they come. So the
//! other store meets the plans that it will meet, in states that the house never saw.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use statehouse_store::{Guard, ManualClock, Plan, Query, Random, Row, Schema, Table, Time};

use super::{DifferentialStats, START, StorePair, all_rows, compare_rows};
use crate::harness::engines::TestNamespace;
use crate::harness::simulation::{RecordedPlans, Workload};

/// Operations of the history whose plans are sent.
const OPERATIONS: u64 = 60;
/// Plans of a history that are sent at most. The first ones build what the others meet.
const PLANS_MAX: usize = 160;
/// How many places a plan is moved at most.
const WINDOW: u64 = 6;
/// How far the clock is off at most when a plan comes.
const OFF_MICROS: u64 = 3_000_000;

/// Sends the plans of a history of an archetype, of at most `largest_plan` operations each, to the model and to a namespace's
/// store.
pub async fn run(
    namespace: &dyn TestNamespace,
    workload: &'static Workload,
    seed: u64,
    largest_plan: usize,
) -> Result<DifferentialStats> {
    let RecordedPlans { schema, plans } = workload.recorded(seed, OPERATIONS)?;
    let mut random = Random::seeded(seed ^ 0xd1ff);
    let fits = |plan: &Plan| plan.steps().len() + usize::from(plan.entry().is_some()) <= largest_plan;
    let mut plans: Vec<(Time, Plan)> =
        plans.into_iter().filter(|(_, plan)| fits(plan)).take(PLANS_MAX).collect();
    let first = plans.first().map_or(START, |(at, _)| *at);
    for place in 0..plans.len() {
        if random.chance(0.15) {
            let other = place + usize::try_from(random.below(WINDOW))?;
            if other < plans.len() {
                plans.swap(place, other);
            }
        }
    }
    let clock = ManualClock::at(first);
    let mut pair = StorePair::open(namespace, &clock, &schema).await?;
    let mut stats = DifferentialStats::default();
    for (number, (at, plan)) in plans.iter().enumerate() {
        if number == plans.len() / 2 {
            pair.restart(namespace, &clock).await?;
        }
        let off = if random.chance(0.2) { random.below(OFF_MICROS) } else { 0 };
        clock.set((*at).max(first).plus(Duration::from_micros(off)));
        let about = || format!("seed {seed} of {}, plan {number}", workload.archetype);
        if random.chance(0.04) {
            pair.resolve(plan.tenant(), plan.operation(), &mut stats).await.with_context(about)?;
        }
        let mutated = if random.chance(0.15) { without_a_condition(plan, &mut random) } else { None };
        pair.commit(mutated.as_ref().unwrap_or(plan), &mut stats).await.with_context(about)?;
        if random.chance(0.08)
            && let Some((_, again)) = random.pick(plans.get(..=number).unwrap_or_default())
        {
            pair.commit(again, &mut stats).await.with_context(about)?;
        }
    }
    compare(&pair, &schema, &mut stats)
        .await
        .with_context(|| format!("seed {seed} of {}", workload.archetype))?;
    let decided = stats.applied + stats.refused;
    ensure!(stats.applied * 4 >= decided && stats.refused > 0, "seed {seed} shows too little: {stats}");
    Ok(stats)
}

/// The plan without one of its conditions, if it has any.
fn without_a_condition(plan: &Plan, random: &mut Random) -> Option<Plan> {
    let guarded =
        |index: &usize| plan.steps().get(*index).is_some_and(|step| !step.guard.conjuncts().is_empty());
    let places: Vec<usize> = (0..plan.steps().len()).filter(guarded).collect();
    let mut builder = plan.to_builder();
    let step = builder.steps.get_mut(*random.pick(&places)?)?;
    let mut conjuncts = step.guard.conjuncts().to_vec();
    let gone = usize::try_from(random.below(conjuncts.len() as u64)).ok()?;
    conjuncts.remove(gone);
    step.guard = Guard::All(conjuncts);
    builder.build().ok()
}

/// Compares everything that is stored: rows, ranges of tables and of indexes, and the log.
async fn compare(pair: &StorePair, schema: &Schema, stats: &mut DifferentialStats) -> Result<()> {
    for table in schema.tables() {
        let (model, other) =
            (all_rows(&pair.model, table).await?, all_rows(pair.other.as_ref(), table).await?);
        compare_rows(&format!("the rows of {table}"), &model, &other)?;
        stats.rows += model.len();
        for query in queries(table, &model)? {
            pair.compare_range(&query).await?;
            stats.ranges += 1;
        }
    }
    stats.records = pair.compare_log().await?;
    Ok(())
}

/// The ranges in which rows stand: in the table, and in each of its indexes.
fn queries(table: &std::sync::Arc<Table>, rows: &[Row]) -> Result<Vec<Query>> {
    let mut queries = Vec::new();
    let mut seen = BTreeSet::new();
    let own: Vec<String> = table.partition_columns().iter().map(|column| column.name.clone()).collect();
    let parts = std::iter::once((None, &own))
        .chain(table.indexes().iter().map(|index| (Some(index), &index.partition)));
    for (index, columns) in parts {
        for row in rows {
            let values: Vec<_> = columns.iter().filter_map(|name| row.get(name).cloned()).collect();
            if values.iter().any(statehouse_store::Value::is_null) {
                continue;
            }
            let query = match index {
                None => Query::table(table, row.tenant(), values)?,
                Some(index) if index.global => Query::all_tenants(table, &index.name, values)?,
                Some(index) => Query::index(table, &index.name, row.tenant(), values)?,
            };
            let range = format!("{} {:?} {:?}", query.source(), query.tenant(), query.partition_values());
            if seen.insert(range) {
                queries.push(query.clone().limit(5)?);
                queries.push(query.backward().limit(3)?);
            }
        }
    }
    Ok(queries)
}
