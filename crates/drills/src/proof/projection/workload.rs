//! I06 in simulation: generations that are rebuilt, switched, rolled back and dropped while their source changes.

use anyhow::{Result, bail};

use super::cases::{teams, truth};
use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::proof::view::workload as source;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "projection",
    blueprint: source::BLUEPRINT,
    resource: "teams",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

async fn act(client: &mut SimulatedClient) {
    let choice = client.below(12);
    let projections = client.read().house.projections();
    let Some(projection) = projections.first() else { return };
    // A request that fails or has nothing to do changes nothing that the end of the history depends on.
    match choice {
        0 => drop(projection.rebuild().await),
        1 => drop(projection.roll_back().await),
        2 => drop(projection.drop_previous().await),
        _ => source::act(client).await,
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Whatever became of the builds, the generation that readers see is what the source says, and no build is left.
    let expected = truth(&end.sound).await?;
    let projections = end.sound.house.projections();
    let Some(projection) = projections.first() else { bail!("the house has no projection") };
    for _ in 0..STEPS_MAX {
        let state = projection.state().await?;
        let is_idle = state.building.is_none() && state.dropping.is_none();
        if is_idle && matches!(teams(&end.sound).await, Ok(found) if found == expected) {
            return Ok(());
        }
        end.sound.work(50).await?;
    }
    let found = teams(&end.sound).await;
    bail!("the view shows {found:?}, its source is {expected:?}; {:?}", projection.state().await?)
}

/// Steps until a projection has finished its builds and caught up.
const STEPS_MAX: usize = 400;
