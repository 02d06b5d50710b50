//! What a scan writes of the source rows that it has come to.

use statehouse_store::{
    Address, Commit, Consistency, Ids, Plan, Reason, Row, Store, StoreError, Tenant, Time, Value,
};

use super::super::pipeline::{PendingRows, as_store_error};
use super::super::{FanOutTask, Projector, SourceChange};
use super::{RACES_MAX, misuse};
use crate::infra::log::{HandlerContext, HandlerError};

/// Writes what source rows mean, unless the log has brought something newer (I2).
pub(super) async fn put(
    store: &dyn Store,
    ids: &Ids,
    projector: &dyn Projector,
    generation: i64,
    tenant: &Tenant,
    rows: Vec<Row>,
) -> Result<(), StoreError> {
    let mut races = 0;
    while races < RACES_MAX {
        let mut sheet = PendingRows::over(projector, generation);
        let changes = changes_of(&mut sheet, store, projector, tenant, &rows).await;
        let changes = changes.map_err(|unable| as_store_error(unable, projector.name()))?;
        let taken = sheet.fill(vec![changes]);
        let (sheet, taken) = taken.map_err(|unable| as_store_error(unable, projector.name()))?;
        let steps = sheet.steps();
        if steps.is_empty() {
            return Ok(());
        }
        let plan = Plan::of(tenant, ids.next()).steps(steps).without_rows().build();
        let plan = plan.map_err(|error| misuse(&error))?;
        match store.commit(&plan).await {
            Ok(Commit::Applied(_)) if taken > 0 => return Ok(()),
            // That was only a part of it.
            Ok(Commit::Applied(_)) => races = 0,
            Ok(Commit::Refused(refused)) if matches!(refused.reason, Reason::Overflow { .. }) => {
                let never = HandlerError::Never(refused.describe(&plan));
                return Err(as_store_error(never, projector.name()));
            }
            // Whatever became of it, the entries tell.
            Ok(_) | Err(StoreError::OutcomeUnknown { .. }) => races += 1,
            Err(error) => return Err(error),
        }
    }
    Err(StoreError::unavailable("source rows change all the time; the scan tries again"))
}

/// What rows mean that a scan has come to, over their entries. Those that have to be looked up are, once more: the entries
/// were read after the scan.
async fn changes_of(
    sheet: &mut PendingRows<'_>,
    store: &dyn Store,
    projector: &dyn Projector,
    tenant: &Tenant,
    rows: &[Row],
) -> Result<Vec<SourceChange>, HandlerError> {
    let Some(look) = projector.row_lookup() else {
        let changes: Vec<SourceChange> = rows.iter().map(|row| projector.change_of(row)).collect();
        sheet.read(store, tenant, changes.iter()).await?;
        return looked_at_again(sheet, store, projector, rows, changes).await;
    };
    let keys: Vec<Vec<Value>> = rows.iter().map(|row| row.key().to_vec()).collect();
    let seen = sheet.look_up(look, store, tenant, keys.iter()).await?;
    // What cannot be understood is no entry. Of the log it would be parked, with the reason.
    let change = |(key, seen): (&Vec<Value>, Result<SourceChange, String>)| {
        seen.or_else(|_| look.seen(key, None)).ok()
    };
    Ok(keys.iter().zip(seen).filter_map(change).collect())
}

/// The changes of scanned rows, those that would replace an entry from the row as it is after the entry was read: the row that the scan
/// has seen may have been erased since, and another one created, whose versions are lower.
async fn looked_at_again(
    sheet: &PendingRows<'_>,
    store: &dyn Store,
    projector: &dyn Projector,
    rows: &[Row],
    changes: Vec<SourceChange>,
) -> Result<Vec<SourceChange>, HandlerError> {
    let replaces = |(row, change): (&Row, &SourceChange)| sheet.replaces(change).then(|| row.address());
    let addresses: Vec<Address> = rows.iter().zip(&changes).filter_map(replaces).collect();
    if addresses.is_empty() {
        return Ok(changes);
    }
    let mut found = store.get(&addresses, Consistency::Strong).await?.into_iter();
    let current = |change: SourceChange| match sheet.replaces(&change) {
        // Of a row that is gone the log tells.
        true => found.next().flatten().map(|row| projector.change_of(&row)),
        false => Some(change),
    };
    Ok(changes.into_iter().filter_map(current).collect())
}

/// Writes what source rows of one tenant mean, several in a plan where they fit and piece by piece where they do not, unless
/// the log has brought something newer (I2). Says whether it came to the end; each plan is asked for first.
pub(super) async fn put_in_pieces(
    store: &dyn Store,
    ids: &Ids,
    projector: &dyn Projector,
    generation: i64,
    rows: &[Row],
    now: Time,
    may: &(dyn Fn() -> bool + Sync),
) -> Result<bool, StoreError> {
    let Some(reach) = projector.reach() else { return Ok(true) };
    let unable = |unable| as_store_error(unable, projector.name());
    let (mut at, mut races) = (0, 0);
    while let Some(row) = rows.get(at) {
        if races == RACES_MAX {
            return Err(StoreError::unavailable("source rows change all the time; the scan tries again"));
        }
        let reading = HandlerContext { store, tenant: row.tenant(), now, refused: races, support: None };
        let rest: Vec<FanOutTask<'_>> = rows.iter().skip(at).map(FanOutTask::Row).collect();
        let bundle = match races {
            0 if rest.len() > 1 => reach.bundle(generation, &rest, &reading).await.map_err(unable)?,
            _ => None,
        };
        let (steps, passed) = match bundle {
            Some(bundle) => (bundle.steps, bundle.taken),
            None => {
                let piece = reach.piece(generation, FanOutTask::Row(row), &reading).await.map_err(unable)?;
                (piece.steps, usize::from(piece.is_last))
            }
        };
        if !steps.is_empty() {
            if !may() {
                return Ok(false);
            }
            let plan = Plan::of(row.tenant(), ids.next()).steps(steps).without_rows().build();
            match store.commit(&plan.map_err(|error| misuse(&error))?).await {
                Ok(Commit::Applied(_)) => races = 0,
                // Whatever became of it, what is stored tells.
                Ok(_) | Err(StoreError::OutcomeUnknown { .. }) => {
                    races += 1;
                    continue;
                }
                Err(error) => return Err(error),
            }
        }
        at += passed;
    }
    Ok(true)
}
