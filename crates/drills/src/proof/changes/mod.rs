//! A blueprint that changes over a store with data: after the change every resource shows what was written before it, or the
//! change is refused before anything is touched.

mod derived;
mod evolution;
mod fills;
mod hot;
mod layout;
mod processes;

use std::sync::Arc;

use anyhow::{Result, bail};
use statehouse::{Blueprint, House};
use statehouse_store::{Ids, Migrate, Random, SchemaChange, Store, StoreError, SystemClock};

use self::derived::{
    a_dropped_column_of_a_view_is_built_again, a_dropped_feed_is_built_again, a_dropped_view_is_built_again,
    a_migration_that_races_keeps_the_new_build, a_partial_event_is_looked_up_by_a_feed,
    a_partial_event_is_looked_up_by_a_view, a_source_that_was_dropped_is_counted_anew,
};
use self::evolution::{
    a_renamed_field_keeps_its_values, a_renamed_resource_keeps_its_table,
    a_required_field_goes_and_comes_back, a_server_makes_only_reversible_changes,
    a_store_belongs_to_one_house, of_houses_that_race_one_gets_the_store, only_what_is_named_is_lost,
    rows_that_violate_a_new_constraint_are_listed,
};
use self::fills::{
    a_constraint_is_added_to_rows_that_exist, a_constraint_that_was_given_up_is_filled_anew,
    a_fill_that_was_killed_goes_on, rows_that_violate_a_new_row_constraint_are_listed,
};
use self::hot::{
    a_field_that_becomes_hot_keeps_its_values, a_field_that_is_no_longer_hot_keeps_its_values,
    a_move_that_was_interrupted_is_finished, a_server_does_not_move_values, moved_rows_count_in_views,
};
use self::layout::{layout_numbers_are_recorded, lower_layout_numbers_are_refused};
use self::processes::{a_killed_process_is_waited_for, two_blueprints_serve_at_once};
use super::changes;
use crate::conformance::{Case, cases};
use crate::harness::tenant_client::TenantClient;

pub(super) const CASES: &[Case] = cases! {
    changes {
        a_dropped_view_is_built_again(9),
        a_dropped_column_of_a_view_is_built_again(9),
        a_dropped_feed_is_built_again(9),
        a_source_that_was_dropped_is_counted_anew(9),
        a_migration_that_races_keeps_the_new_build(9),
        a_partial_event_is_looked_up_by_a_view(9),
        a_partial_event_is_looked_up_by_a_feed(9),
        layout_numbers_are_recorded(9),
        lower_layout_numbers_are_refused(0),
        a_field_that_becomes_hot_keeps_its_values(9),
        a_field_that_is_no_longer_hot_keeps_its_values(9),
        a_move_that_was_interrupted_is_finished(9),
        a_server_does_not_move_values(9),
        moved_rows_count_in_views(9),
        a_store_belongs_to_one_house(9),
        of_houses_that_race_one_gets_the_store(9),
        a_required_field_goes_and_comes_back(9),
        only_what_is_named_is_lost(9),
        a_server_makes_only_reversible_changes(9),
        rows_that_violate_a_new_constraint_are_listed(9),
        a_renamed_field_keeps_its_values(9),
        a_constraint_is_added_to_rows_that_exist(9),
        rows_that_violate_a_new_row_constraint_are_listed(9),
        a_fill_that_was_killed_goes_on(9),
        a_constraint_that_was_given_up_is_filled_anew(9),
        two_blueprints_serve_at_once(9),
        a_killed_process_is_waited_for(9),
        a_renamed_resource_keeps_its_table(9),
    }
};

/// A house of this blueprint over a store, whose tables are left as they are.
fn house(store: &Arc<dyn Store>, blueprint: &str) -> Result<House> {
    let blueprint = Blueprint::read("statehouse.toml", blueprint)?;
    let clock = Arc::new(SystemClock);
    let ids = Ids::new(clock.clone(), Random::from_entropy());
    Ok(House::with(store.clone(), &blueprint, clock, ids)?)
}

/// Applies a blueprint to a store, and works there.
async fn applied(store: &Arc<dyn Store>, blueprint: &str, how: Migrate) -> Result<TenantClient> {
    let house = house(store, blueprint)?;
    house.migrate(how).await?;
    TenantClient::of(Arc::new(house))
}

/// Requires a change of the blueprint to be refused, and returns the message.
async fn refused(result: Result<Vec<SchemaChange>, StoreError>) -> Result<String> {
    match result {
        Err(error @ StoreError::Schema { .. }) => Ok(error.to_string()),
        other => bail!("expected the change to be refused, got {other:?}"),
    }
}
