//! What the contract of a store means, one small case at a time.
//!
//! A case is a plain function that gets an empty [`TestNamespace`] and returns an error that says what it expected. All are
//! listed once, in [`CASES`], and there is no other way in: a function that is not listed is never used, and the
//! compiler says so. No case knows the name of an engine. Where engines may differ (how soon an index or the log
//! shows a commit, whether a commit's answer has the record's position), the contract says so and the case
//! waits or looks away; where the contract is silent, no case asks.
//!
//! [`Case::largest_plan`] is how many operations the largest plan of the case has that is sent to a store. Nearly all
//! stay within 10, because one emulator of DynamoDB takes no more.

use std::future::Future;
use std::pin::Pin;

use anyhow::Result;

use crate::harness::engines::TestNamespace;

#[cfg(feature = "suite")]
mod across;
#[cfg(feature = "suite")]
mod blank;
#[cfg(feature = "suite")]
mod guards;
#[cfg(feature = "suite")]
mod lifecycle;
#[cfg(feature = "suite")]
mod limits;
#[cfg(feature = "suite")]
mod log;
#[cfg(feature = "suite")]
mod looks;
#[cfg(feature = "suite")]
mod migration;
#[cfg(feature = "suite")]
mod operations;
#[cfg(feature = "suite")]
mod plans;
#[cfg(feature = "suite")]
mod reads;
#[cfg(feature = "suite")]
mod segments;
#[cfg(feature = "suite")]
mod steps;
#[cfg(feature = "suite")]
mod subjects;
#[cfg(feature = "suite")]
mod takes;
#[cfg(feature = "suite")]
mod tenants;

/// What a case finds.
pub type CaseFuture<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// One thing that every store must do.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its theme and name: `guards::expiry_is_exact_at_the_boundary`.
    pub name: &'static str,
    /// Operations in the largest plan that it sends, the log entry included.
    pub largest_plan: usize,
    pub(crate) run: for<'a> fn(&'a dyn TestNamespace) -> CaseFuture<'a>,
}

impl Case {
    /// Runs the case in an empty namespace.
    pub fn run<'a>(&self, namespace: &'a dyn TestNamespace) -> CaseFuture<'a> {
        (self.run)(namespace)
    }
}

/// A list of cases: their theme, their names, and the size of each one's largest plan. After a case of an archetype, the checkers of
/// the archetypes look at what it has left ([`crate::harness::case_check`]).
macro_rules! cases {
    ($($theme:ident { $($name:ident ($largest_plan:literal),)* })*) => {
        &[$($(Case {
            name: concat!(stringify!($theme), "::", stringify!($name)),
            largest_plan: $largest_plan,
            run: |namespace| {
                Box::pin($crate::harness::case_check::checked(namespace, $theme::$name(namespace)))
            },
        },)*)*]
    };
}

pub(crate) use cases;

/// Every case.
#[cfg(feature = "suite")]
pub const CASES: &[Case] = cases! {
    guards {
        comparisons_with_constants_of_every_type(1),
        constants_may_stand_on_the_left(1),
        comparisons_of_two_columns_of_every_type(1),
        a_comparison_with_null_never_holds(1),
        null_can_be_asked_of_every_type(1),
        lists_of_every_type(1),
        all_any_and_negation_follow_kleene(1),
        a_constant_stands_in_for_null(1),
        guards_see_the_key_and_the_version(1),
        the_failed_conjunct_is_named(1),
        the_engines_clock_in_guards(1),
        expiry_is_exact_at_the_boundary(1),
        one_reading_of_the_clock_serves_the_plan(3),
        the_clock_may_be_set_back(1),
    }
    steps {
        every_verb_and_expectation_on_present_and_absent_rows(1),
        every_value_of_every_type_reads_back(1),
        every_value_can_stand_in_a_key(1),
        values_are_stored_in_one_form(1),
        columns_can_be_copied(1),
        assignments_read_the_row_as_it_was(1),
        sums_and_differences(1),
        null_makes_a_sum_null(1),
        results_out_of_range_are_refused(1),
        required_columns_refuse_null_at_commit(1),
        the_first_impossible_assignment_is_named(1),
        an_upsert_counts_from_nothing(1),
        an_upsert_ignores_its_guard_when_nothing_is_there(1),
        defaults_fill_what_an_insert_leaves_out(1),
        a_default_is_not_what_an_insert_reads(1),
        versions_count_the_writes_of_one_life(1),
        the_engines_clock_in_assignments(1),
    }
    plans {
        a_refused_step_leaves_no_trace_of_the_others(6),
        the_first_refused_step_in_plan_order_is_named(4),
        plans_span_tables_and_answer_step_by_step(6),
        rows_can_be_done_without(2),
        plans_of_asserts_alone(3),
        one_insert_of_a_key_wins(1),
        one_transition_out_of_a_state_wins(1),
        blind_increments_are_never_lost(2),
        guarded_increments_take_turns(1),
        plans_in_opposite_orders_do_not_block_each_other(5),
        nobody_sees_half_of_a_plan(2),
        an_asserted_row_stays_as_it_is_until_the_plan_is_done(2),
        an_absence_that_was_asserted_is_kept(2),
        what_clients_saw_can_have_happened_in_one_order(1),
        explanations_name_the_tables(0),
    }
    operations {
        a_look_up_tells_and_claims_nothing(2),
        a_repetition_learns_the_first_outcome(2),
        another_plan_under_the_same_id_is_not_applied(2),
        a_refusal_is_not_remembered(2),
        tenants_have_operation_ids_of_their_own(2),
        ids_are_told_apart_to_the_last_byte(1),
        resolving_before_the_commit_fences_it(2),
        resolving_after_the_commit_learns_of_it(2),
        a_refused_operation_can_be_fenced(2),
        a_plan_without_an_entry_leaves_no_record(1),
        an_entry_alone_is_a_plan(1),
        one_of_many_equal_commits_is_applied(2),
        one_of_many_plans_under_one_id_is_applied(2),
        commit_and_resolve_race_and_all_agree(2),
    }
    log {
        offsets_count_from_one_in_the_subjects_partition(1),
        records_say_what_was_committed(2),
        events_say_who_caused_them(8),
        events_carry_the_rows_of_steps(6),
        rows_in_events_have_every_type(2),
        versions_of_a_row_stand_in_order_and_none_is_missing(3),
        a_reader_by_offset_misses_nothing(3),
        a_subjects_last_record_matches_its_row(2),
        pages_of_the_log_are_bounded(1),
        a_page_of_the_log_has_at_most_a_thousand_records(1),
        waiting_ends_with_a_commit(1),
        waiting_does_not_wait_for_what_is_there(1),
        waiting_ends_when_its_time_is_up(1),
        trimming_forgets_records_and_their_ids(1),
        trimming_keeps_the_newest_record(1),
        a_fence_can_be_forgotten(1),
        unicode_everywhere(2),
    }
    subjects {
        a_rows_events_are_read_in_the_order_of_its_versions(4),
        each_event_is_read_once_from_its_own_partition(8),
        an_event_about_the_entrys_subject_stays_with_it(2),
        a_repetition_gets_all_events_of_the_first(8),
        the_answer_to_a_commit_says_every_place_or_none(6),
        what_is_not_applied_leaves_nothing_in_any_partition(6),
        a_batch_whose_answer_was_lost_is_found(6),
        concurrent_batches_are_read_in_the_order_of_versions(8),
        trimming_a_further_record_forgets_no_operation(4),
        the_largest_batch(99),
        steps_of_one_shape_are_told_row_by_row(8),
    }
    blank {
        positions_names_and_versions_stay(1),
        copies_in_batches_are_blanked(3),
        a_row_that_was_created_again_keeps_its_events(1),
        a_range_is_blanked_in_bounded_steps(1),
        other_tenants_keep_their_events(1),
        scrubbing_keeps_what_is_there(1),
    }
    reads {
        keys_are_in_the_order_of_their_type(9),
        ranges_have_the_bounds_that_were_asked_for(9),
        keys_of_several_columns_do_not_run_into_each_other(9),
        prefixes_fix_the_leading_columns(9),
        limits_and_cursors_of_pages(9),
        a_full_page_is_a_thousand_rows(100),
        pages_of_heavy_rows_are_complete(1),
        rows_that_stay_are_read_once_while_others_come_and_go(9),
        gets_answer_in_the_order_of_their_addresses(1),
        many_rows_can_be_got_at_once(9),
        strong_reads_see_what_was_acknowledged(1),
        eventual_queries_catch_up(7),
        indexes_hold_the_rows_whose_columns_are_set(1),
        indexes_follow_the_rows(1),
        indexes_order_every_type(1),
        partitions_that_are_empty_give_nothing(0),
        scans_return_every_row_once(9),
        tables_must_have_been_migrated_to(3),
    }
    segments {
        segments_tile_a_table_also_for_later_rows(9),
        segments_of_a_tenant_have_only_its_rows(9),
        a_segment_is_resumed_after_a_cursor(9),
        the_rest_of_a_segment_can_be_divided_again(9),
        segments_of_empty_tables_have_later_rows(9),
        keys_of_every_type_can_be_boundaries(9),
        numbers_and_tables_of_segments_are_checked(0),
    }
    looks {
        answers_stand_in_the_order_of_their_asks(9),
        ranges_keep_their_bounds_order_and_pages(9),
        rows_of_every_type_can_be_looked_at_together(7),
        a_value_can_be_looked_at_without_its_row(9),
        indexes_can_be_looked_at_with_tables(9),
        each_tenant_is_shown_its_own_rows(9),
        a_look_sees_what_was_acknowledged(2),
        tables_that_are_not_there_are_told(1),
    }
    takes {
        the_first_rows_are_taken_in_order(9),
        what_the_guard_refuses_is_left_as_it_is(6),
        guards_may_look_at_lists_and_the_clock(4),
        no_more_are_taken_than_may_weigh(1),
        nobody_takes_what_belongs_to_another_tenant(3),
        each_row_has_one_taker(9),
        what_is_no_take_is_refused(0),
        a_lost_answer_stays_unknown_if_the_retry_is_unavailable(1),
    }
    across {
        rows_of_all_tenants_stand_in_one_order(1),
        the_index_follows_the_rows(2),
        every_ordered_type_can_stand_in_it(1),
        pages_of_heavy_rows_go_on_where_they_ended(1),
        it_can_be_added_to_rows_and_taken_away(1),
    }
    tenants {
        verbs_touch_the_own_tenants_rows_only(1),
        reads_return_the_own_tenants_rows_only(3),
        subjects_of_tenants_are_apart_in_the_log(1),
    }
    limits {
        a_hundred_operations(100),
        a_row_of_the_largest_size(1),
        a_row_must_not_grow_over_the_limit(4),
        keys_of_the_largest_size(1),
        index_entries_of_the_largest_size(1),
        a_plan_of_the_largest_size(10),
        a_plan_must_not_grow_over_the_limit(11),
        a_record_of_the_largest_size(2),
        lists_and_guards_of_the_largest_size(1),
        names_of_the_largest_size(2),
        many_columns(1),
        json_of_the_greatest_depth(2),
    }
    migration {
        migrating_again_changes_nothing(0),
        showing_changes_nothing(1),
        a_new_column_has_its_default_in_old_rows(2),
        new_columns_of_every_type(1),
        a_new_index_finds_old_rows(1),
        an_older_writer_keeps_what_it_does_not_know(1),
        removals_take_their_data_along(2),
        a_column_can_be_relaxed_and_its_default_changed(1),
        what_cannot_change_in_place_is_refused(1),
        a_table_is_added_beside_others(2),
        a_required_column_left_behind_is_relaxed(1),
        a_column_is_required_when_every_row_has_a_value(1),
        layout_numbers_never_shrink(1),
        migrations_may_run_at_once(1),
    }
    lifecycle {
        a_restart_keeps_rows_log_operations_and_schema(2),
        a_closed_store_is_unavailable(1),
        closing_amid_commits_loses_none_that_was_acknowledged(2),
    }
};
