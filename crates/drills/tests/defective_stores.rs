//! The suite judged by its own measure: stores with a known defect, each of which some case must notice.
//!
//! A case that nothing can fail proves nothing. Here the model gets one defect at a time, each of a kind that real
//! engines have had, and the case that is there to notice it has to turn red. The same case is green on the sound
//! model in the conformance run, so it is the defect that it sees.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "the exemption for tests does not reach the functions that tests share"
)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use statehouse_drills::conformance::{CASES, Case};
use statehouse_drills::engines::{Model, TestEngine, TestNamespace};
use statehouse_drills::{differential, faults};
use statehouse_store::clock::SkewedClock;
use statehouse_store::eval::{Decision, decide};
use statehouse_store::limits::further_records;
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{
    Address, BlankRange, BlankedPage, Clock, Commit, Consistency, ExplainRequest, Explanation, Guard,
    LogPage, Migrate, Page, Plan, Query, ReadRequest, ReadResult, Record, Resolution, Row, Scan, Schema,
    SchemaChange, Segment, Step, Store, StoreError, Tenant, Time, Value,
};

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    /// Nothing. It only measures.
    None,
    /// The last conjunct of every guard is not looked at.
    DropsConjunct,
    /// A delete does not look at its guard.
    DeletesUnguarded,
    /// Of several refused steps the last is named.
    NamesLastRefusal,
    /// Steps are applied one by one, so that those before a refused one stay.
    AppliesStepByStep,
    /// Conditions are checked first and the rows written later, without a lock in between.
    ChecksThenActs,
    /// The steps of a plan become visible one after another.
    ShowsHalves,
    /// Asserted rows are looked at before the plan, and not again.
    AssertsTooEarly,
    /// Operation ids are not remembered.
    ForgetsOperations,
    /// Refusals are remembered like what was applied.
    RemembersRefusals,
    /// `resolve` looks for a record and leaves no fence.
    ResolvesByReading,
    /// Tenants whose names differ by case are one.
    FoldsTenants,
    /// A scan of one tenant returns all tenants' rows.
    ScansEverybody,
    /// A scan of a segment returns the rows of all segments.
    IgnoresSegments,
    /// The last segment of a table is missing.
    DropsLastSegment,
    /// An index across tenants shows those of one tenant only.
    SeesOneTenantAcross,
    /// A get may answer from a cache.
    GetsFromCache,
    /// Answers to a get come in another order.
    ShufflesGets,
    /// Answers to several reads in one go come in another order.
    ShufflesLooks,
    /// Of several ranges that are read in one go, each has as many rows as the first one.
    LimitsLooksAlike,
    /// Text is ordered by its UTF-16 code units.
    OrdersByUtf16,
    /// A row is lost between two pages.
    SkipsBetweenPages,
    /// The first record behind the asked offset is left out.
    GapsInTheLog,
    /// Trimming forgets nothing.
    NeverTrims,
    /// Events of erased rows stay as they are.
    BlanksNothing,
    /// Events are blanked wherever they are, also those of a row that was created again.
    BlanksLaterEvents,
    /// The clock of guards is a microsecond ahead.
    ClockIsAhead,
    /// Closing does nothing.
    StaysOpen,
    /// A restart loses everything.
    LosesOnRestart,
    /// Showing a migration carries it out.
    ShowMigrates,
    /// A migration removes what the schema does not name.
    MigratesWithLoss,
    /// The explanation of a plan names nothing.
    ExplainsNothing,
}

/// A model with a defect, and how large its largest plan was.
struct DefectiveEngine {
    defect: Defect,
    largest_plan: Arc<AtomicUsize>,
}

impl DefectiveEngine {
    fn by(defect: Defect) -> DefectiveEngine {
        DefectiveEngine { defect, largest_plan: Arc::default() }
    }

    fn namespace(&self) -> Result<DefectiveNamespace> {
        Ok(DefectiveNamespace {
            defect: self.defect,
            sound: Model.namespace("")?,
            largest_plan: self.largest_plan.clone(),
        })
    }
}

struct DefectiveNamespace {
    defect: Defect,
    sound: Arc<dyn TestNamespace>,
    largest_plan: Arc<AtomicUsize>,
}

#[async_trait]
impl TestNamespace for DefectiveNamespace {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        let skewed = SkewedClock::over(clock);
        if self.defect == Defect::ClockIsAhead {
            skewed.skew(1);
        }
        let inner = match self.defect {
            Defect::LosesOnRestart => Model.namespace("")?.open_at(Arc::new(skewed)).await?,
            _ => self.sound.open_at(Arc::new(skewed)).await?,
        };
        Ok(Arc::new(DefectiveStore {
            defect: self.defect,
            inner,
            largest_plan: self.largest_plan.clone(),
            calls: AtomicU64::new(0),
            refusals: Mutex::default(),
            cache: Mutex::default(),
        }))
    }
}

#[derive(Debug)]
struct DefectiveStore {
    defect: Defect,
    inner: Arc<dyn Store>,
    largest_plan: Arc<AtomicUsize>,
    calls: AtomicU64,
    refusals: Mutex<HashMap<String, Commit>>,
    cache: Mutex<HashMap<String, Option<Row>>>,
}

impl DefectiveStore {
    /// The same plan with other steps.
    fn with_steps(plan: &Plan, change: impl FnMut(Step) -> Step) -> Plan {
        let mut builder = plan.to_builder();
        builder.steps = builder.steps.into_iter().map(change).collect();
        builder.build().expect("a plan that could be built stays one")
    }

    /// The steps alone, each as a plan without an entry, and then the entry.
    async fn commit_piecewise(&self, plan: &Plan) -> Result<Commit, StoreError> {
        for (number, step) in plan.steps().iter().enumerate() {
            let piece = Plan::of(plan.tenant(), plan.operation()).step(step.clone()).build();
            if let Commit::Refused(mut refused) =
                self.inner.commit(&piece.expect("one step of a plan")).await?
            {
                refused.step = number;
                return Ok(Commit::Refused(refused));
            }
            tokio::task::yield_now().await;
        }
        let mut builder = plan.to_builder();
        for step in &mut builder.steps {
            *step = Step { expect: Expect::Either, ..Step::assert(&step.table, step.key.clone()) };
        }
        if let Some(entry) = &mut builder.entry {
            entry.events.iter_mut().for_each(|event| event.row_of = None);
        }
        self.inner.commit(&builder.build().expect("asserts alone")).await
    }

    /// Decides on rows that were read before, and writes what was decided whatever is there by then.
    async fn commit_unlocked(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let addresses: Vec<Address> = plan.addresses().collect();
        let current = self.inner.get(&addresses, Consistency::Strong).await?;
        let now = statehouse_store::SystemClock.now();
        if let Decision::Refuse(refused) = decide(plan, now, &current)? {
            return Ok(Commit::Refused(refused));
        }
        tokio::task::yield_now().await;
        let blind =
            Self::with_steps(plan, |step| Step { expect: Expect::Either, guard: Guard::always(), ..step });
        self.inner.commit(&blind).await
    }

    async fn commit_asserting_early(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let asserts = plan.steps().iter().filter(|step| step.verb == Verb::Assert).cloned();
        let asserts = Plan::of(plan.tenant(), "early").steps(asserts).build();
        if let Ok(asserts) = asserts
            && let Commit::Refused(refused) = self.inner.commit(&asserts).await?
        {
            return Ok(Commit::Refused(refused));
        }
        tokio::task::yield_now().await;
        let lax = Self::with_steps(plan, |step| {
            if step.verb == Verb::Assert {
                Step { expect: Expect::Either, guard: Guard::always(), ..step }
            } else {
                step
            }
        });
        self.inner.commit(&lax).await
    }

    async fn commit_naming_last(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let mut builder = plan.to_builder();
        builder.steps.reverse();
        let count = builder.steps.len();
        if let Some(entry) = &mut builder.entry {
            for event in &mut entry.events {
                event.row_of = event.row_of.map(|step| count - 1 - step);
            }
        }
        let outcome = self.inner.commit(&builder.build().expect("the same steps")).await?;
        Ok(match outcome {
            Commit::Refused(mut refused) => {
                refused.step = count - 1 - refused.step;
                Commit::Refused(refused)
            }
            Commit::Applied(mut applied) => {
                applied.rows.reverse();
                Commit::Applied(applied)
            }
            Commit::Fenced => Commit::Fenced,
        })
    }

    async fn commit_with_memory_of_refusals(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let id = format!("{}/{}", plan.tenant(), plan.operation());
        if let Some(outcome) = self.refusals.lock().unwrap().get(&id) {
            return Ok(outcome.clone());
        }
        let outcome = self.inner.commit(plan).await?;
        if matches!(outcome, Commit::Refused(_)) {
            self.refusals.lock().unwrap().insert(id, outcome.clone());
        }
        Ok(outcome)
    }

    fn folded(&self, plan: &Plan) -> Plan {
        let mut builder = plan.to_builder();
        builder.tenant = folded(plan.tenant());
        builder.build().expect("the same plan for another tenant")
    }
}

fn folded(tenant: &Tenant) -> Tenant {
    Tenant::new(tenant.as_str().to_lowercase()).expect("a tenant in lower case")
}

#[async_trait]
impl Store for DefectiveStore {
    fn engine(&self) -> &'static str {
        "broken"
    }

    fn partitions(&self) -> u32 {
        self.inner.partitions()
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        let how = match (self.defect, how) {
            (Defect::ShowMigrates, Migrate::Show) => Migrate::Apply,
            (Defect::MigratesWithLoss, Migrate::Apply) => Migrate::ApplyWithLoss,
            (_, how) => how,
        };
        self.inner.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let logged = plan.entry().map_or(0, |entry| 1 + further_records(entry));
        let operations = plan.steps().len() + logged;
        self.largest_plan.fetch_max(operations, Ordering::Relaxed);
        match self.defect {
            Defect::DropsConjunct => {
                let lax = Self::with_steps(plan, |step| {
                    let parts = step.guard.conjuncts();
                    let kept = parts[..parts.len().saturating_sub(1)].to_vec();
                    Step { guard: Guard::All(kept), ..step }
                });
                self.inner.commit(&lax).await
            }
            Defect::DeletesUnguarded => {
                let lax = Self::with_steps(plan, |step| {
                    let guard = if step.verb == Verb::Delete { Guard::always() } else { step.guard.clone() };
                    Step { guard, ..step }
                });
                self.inner.commit(&lax).await
            }
            Defect::NamesLastRefusal => self.commit_naming_last(plan).await,
            Defect::AppliesStepByStep => self.commit_piecewise(plan).await,
            Defect::ChecksThenActs => self.commit_unlocked(plan).await,
            Defect::ShowsHalves => {
                // Only where no step can be refused any more, so that nothing but the moment is wrong.
                let guarded = plan.steps().iter().any(|step| !step.guard.conjuncts().is_empty());
                if guarded { self.inner.commit(plan).await } else { self.commit_piecewise(plan).await }
            }
            Defect::AssertsTooEarly => self.commit_asserting_early(plan).await,
            Defect::ForgetsOperations => {
                let mut builder = plan.to_builder();
                let call = self.calls.fetch_add(1, Ordering::Relaxed);
                builder.operation = format!("{call}");
                self.inner.commit(&builder.build().expect("another id")).await
            }
            Defect::RemembersRefusals => self.commit_with_memory_of_refusals(plan).await,
            Defect::FoldsTenants => self.inner.commit(&self.folded(plan)).await,
            _ => self.inner.commit(plan).await,
        }
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        if self.defect == Defect::ResolvesByReading {
            for partition in 0..self.partitions() {
                let page = self.inner.read_log(partition, 0, 1_000).await?;
                let own = |record: &&_| -> bool {
                    let record: &Record = record;
                    record.tenant == *tenant && record.operation == operation
                };
                if let Some(record) = page.records.iter().find(own) {
                    return Ok(Resolution::of_record(record.clone()));
                }
            }
            return Ok(Resolution::Aborted);
        }
        self.inner.resolve(tenant, operation).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.inner.find_operation(tenant, operation).await
    }

    async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        if self.defect == Defect::FoldsTenants {
            let folded = addresses.iter().map(|address| {
                Address::new(address.table(), &folded(address.tenant()), address.key().to_vec())
            });
            let folded: Vec<Address> =
                folded.map(|address| address.expect("another tenant's address")).collect();
            return self.inner.get(&folded, consistency).await;
        }
        let mut rows = self.inner.get(addresses, consistency).await?;
        if self.defect == Defect::ShufflesGets {
            rows.reverse();
        }
        if self.defect == Defect::GetsFromCache {
            let mut cache = self.cache.lock().unwrap();
            for (address, row) in addresses.iter().zip(&mut rows) {
                let fresh = row.clone();
                // Every second answer is what was seen the time before.
                if self.calls.fetch_add(1, Ordering::Relaxed) % 2 == 1
                    && let Some(seen) = cache.get(&address.to_string())
                {
                    *row = seen.clone();
                }
                cache.insert(address.to_string(), fresh);
            }
        }
        Ok(rows)
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        let mut page = self.inner.query(query).await?;
        match self.defect {
            Defect::OrdersByUtf16 => page.rows.sort_by_key(|row| {
                row.values()
                    .iter()
                    .filter_map(Value::as_text)
                    .flat_map(str::encode_utf16)
                    .collect::<Vec<u16>>()
            }),
            Defect::SkipsBetweenPages if page.next.is_some() => {
                page.rows.pop();
            }
            Defect::SeesOneTenantAcross if query.tenant().is_none() => {
                let first = page.rows.first().map(|row| row.tenant().clone());
                page.rows.retain(|row| Some(row.tenant()) == first.as_ref());
            }
            _ => {}
        }
        Ok(page)
    }

    async fn read_many(&self, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>, StoreError> {
        let mut seen = Vec::new();
        for ask in asks {
            seen.push(match ask {
                ReadRequest::Get(addresses) => {
                    ReadResult::Rows(self.get(addresses, Consistency::Strong).await?)
                }
                ReadRequest::Value(cell) => {
                    let rows = self.get(&[cell.address().clone()], Consistency::Strong).await?;
                    let row = rows.into_iter().next().flatten();
                    ReadResult::Value(row.and_then(|row| cell.value_in(row)))
                }
                ReadRequest::Query(query) => ReadResult::Page(self.query(query).await?),
            });
        }
        match self.defect {
            Defect::ShufflesLooks => seen.reverse(),
            Defect::LimitsLooksAlike => {
                let limit = asks.iter().find_map(|ask| match ask {
                    ReadRequest::Query(query) => Some(query.page_limit()),
                    ReadRequest::Get(_) | ReadRequest::Value(_) => None,
                });
                for seen in &mut seen {
                    if let (ReadResult::Page(page), Some(limit)) = (seen, limit) {
                        page.rows.truncate(limit);
                    }
                }
            }
            _ => {}
        }
        Ok(seen)
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        if self.defect == Defect::ScansEverybody {
            return self.inner.scan(&Scan::all(scan.read_table())).await;
        }
        if self.defect == Defect::IgnoresSegments && scan.segment().is_some() {
            let whole = self.inner.scan(&Scan::all(scan.read_table())).await?;
            return Ok(Page { next: None, ..whole });
        }
        self.inner.scan(scan).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        let mut segments = self.inner.segments(scan, max).await?;
        if self.defect == Defect::DropsLastSegment && segments.len() > 1 {
            segments.pop();
        }
        Ok(segments)
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        let mut page = self.inner.read_log(partition, after, limit).await?;
        if self.defect == Defect::GapsInTheLog && page.records.len() > 1 {
            page.records.remove(0);
        }
        Ok(page)
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.inner.wait_log(seen, at_most).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        if self.defect == Defect::NeverTrims { Ok(()) } else { self.inner.trim_log(partition, through).await }
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        let mut range = range.clone();
        let subjects = Arc::make_mut(&mut range.subjects);
        match self.defect {
            Defect::BlanksNothing => subjects.clear(),
            // As if every row had been erased at the end of the log.
            Defect::BlanksLaterEvents => {
                let positions = subjects.values_mut().flat_map(|subjects| subjects.values_mut());
                positions.for_each(|position| position.offset = u64::MAX);
            }
            _ => {}
        }
        self.inner.blank_events(&range).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.inner.scrub().await
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.inner.now().await
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        let explanation = self.inner.explain(asked);
        if self.defect == Defect::ExplainsNothing {
            Explanation { requests: Vec::new(), ..explanation }
        } else {
            explanation
        }
    }

    async fn close(&self) {
        if self.defect != Defect::StaysOpen {
            self.inner.close().await;
        }
    }
}

fn case(name: &str) -> Case {
    let found = CASES.iter().find(|case| case.name == name);
    *found.unwrap_or_else(|| panic!("there is no case {name}"))
}

/// Requires that the cases of these names turn red on a store with this defect.
async fn noticed(defect: Defect, cases: &[&str]) {
    for name in cases {
        let namespace = DefectiveEngine::by(defect).namespace().unwrap();
        let verdict = case(name).run(&namespace).await;
        assert!(verdict.is_err(), "{name} does not notice a store that {defect:?}");
    }
}

#[tokio::test]
async fn guards_that_are_not_looked_at() {
    let cases = ["guards::expiry_is_exact_at_the_boundary", "guards::the_failed_conjunct_is_named"];
    noticed(Defect::DropsConjunct, &cases).await;
    noticed(Defect::DropsConjunct, &["steps::every_verb_and_expectation_on_present_and_absent_rows"]).await;
    noticed(Defect::DeletesUnguarded, &["steps::every_verb_and_expectation_on_present_and_absent_rows"])
        .await;
    noticed(Defect::ClockIsAhead, &["guards::expiry_is_exact_at_the_boundary"]).await;
}

#[tokio::test]
async fn plans_that_are_not_atomic() {
    noticed(Defect::NamesLastRefusal, &["plans::the_first_refused_step_in_plan_order_is_named"]).await;
    noticed(Defect::AppliesStepByStep, &["plans::a_refused_step_leaves_no_trace_of_the_others"]).await;
    noticed(Defect::ShowsHalves, &["plans::nobody_sees_half_of_a_plan"]).await;
}

#[tokio::test]
async fn plans_that_are_not_serial() {
    let cases = [
        "plans::one_insert_of_a_key_wins",
        "plans::one_transition_out_of_a_state_wins",
        "plans::guarded_increments_take_turns",
        "plans::what_clients_saw_can_have_happened_in_one_order",
    ];
    noticed(Defect::ChecksThenActs, &cases).await;
    let cases = [
        "plans::an_asserted_row_stays_as_it_is_until_the_plan_is_done",
        "plans::an_absence_that_was_asserted_is_kept",
    ];
    noticed(Defect::AssertsTooEarly, &cases).await;
}

#[tokio::test]
async fn operations_that_are_not_settled() {
    let cases = [
        "operations::a_repetition_learns_the_first_outcome",
        "operations::one_of_many_equal_commits_is_applied",
        "operations::another_plan_under_the_same_id_is_not_applied",
    ];
    noticed(Defect::ForgetsOperations, &cases).await;
    noticed(Defect::RemembersRefusals, &["operations::a_refusal_is_not_remembered"]).await;
    noticed(Defect::ResolvesByReading, &["operations::resolving_before_the_commit_fences_it"]).await;
    noticed(Defect::ResolvesByReading, &["operations::commit_and_resolve_race_and_all_agree"]).await;
}

#[tokio::test]
async fn tenants_that_are_not_apart() {
    noticed(Defect::FoldsTenants, &["tenants::verbs_touch_the_own_tenants_rows_only"]).await;
    noticed(Defect::FoldsTenants, &["tenants::subjects_of_tenants_are_apart_in_the_log"]).await;
    let cases = ["reads::scans_return_every_row_once", "tenants::reads_return_the_own_tenants_rows_only"];
    noticed(Defect::ScansEverybody, &cases).await;
    noticed(Defect::SeesOneTenantAcross, &["across::rows_of_all_tenants_stand_in_one_order"]).await;
}

#[tokio::test]
async fn reads_that_are_wrong() {
    let cases = [
        "reads::strong_reads_see_what_was_acknowledged",
        "plans::what_clients_saw_can_have_happened_in_one_order",
    ];
    noticed(Defect::GetsFromCache, &cases).await;
    noticed(Defect::ShufflesGets, &["reads::gets_answer_in_the_order_of_their_addresses"]).await;
    noticed(Defect::ShufflesLooks, &["looks::answers_stand_in_the_order_of_their_asks"]).await;
    noticed(Defect::LimitsLooksAlike, &["looks::ranges_keep_their_bounds_order_and_pages"]).await;
    noticed(Defect::OrdersByUtf16, &["reads::keys_are_in_the_order_of_their_type"]).await;
    noticed(Defect::SkipsBetweenPages, &["reads::keys_are_in_the_order_of_their_type"]).await;
    noticed(Defect::SkipsBetweenPages, &["reads::rows_that_stay_are_read_once_while_others_come_and_go"])
        .await;
}

#[tokio::test]
async fn segments_that_do_not_tile_a_table() {
    let cases = [
        "segments::segments_tile_a_table_also_for_later_rows",
        "segments::segments_of_a_tenant_have_only_its_rows",
        "segments::the_rest_of_a_segment_can_be_divided_again",
        "segments::keys_of_every_type_can_be_boundaries",
    ];
    noticed(Defect::IgnoresSegments, &cases).await;
    noticed(Defect::DropsLastSegment, &cases).await;
    noticed(Defect::ScansEverybody, &["segments::segments_of_a_tenant_have_only_its_rows"]).await;
}

#[tokio::test]
async fn logs_that_are_wrong() {
    let cases = ["log::pages_of_the_log_are_bounded", "log::a_reader_by_offset_misses_nothing"];
    noticed(Defect::GapsInTheLog, &cases).await;
    noticed(
        Defect::NeverTrims,
        &["log::trimming_forgets_records_and_their_ids", "log::a_fence_can_be_forgotten"],
    )
    .await;
}

#[tokio::test]
async fn erasures_that_are_wrong() {
    noticed(
        Defect::BlanksNothing,
        &["blank::positions_names_and_versions_stay", "blank::copies_in_batches_are_blanked"],
    )
    .await;
    noticed(Defect::BlanksLaterEvents, &["blank::a_row_that_was_created_again_keeps_its_events"]).await;
}

#[tokio::test]
async fn lives_that_are_wrong() {
    noticed(Defect::StaysOpen, &["lifecycle::a_closed_store_is_unavailable"]).await;
    noticed(Defect::LosesOnRestart, &["lifecycle::a_restart_keeps_rows_log_operations_and_schema"]).await;
    noticed(Defect::ShowMigrates, &["migration::showing_changes_nothing"]).await;
    let cases = [
        "migration::an_older_writer_keeps_what_it_does_not_know",
        "migration::a_table_is_added_beside_others",
    ];
    noticed(Defect::MigratesWithLoss, &cases).await;
    noticed(Defect::ExplainsNothing, &["plans::explanations_name_the_tables"]).await;
}

#[tokio::test]
async fn random_plans_notice_without_being_told_where_to_look() {
    let defects = [
        Defect::DropsConjunct,
        Defect::DeletesUnguarded,
        Defect::NamesLastRefusal,
        Defect::AppliesStepByStep,
        Defect::ForgetsOperations,
        Defect::RemembersRefusals,
        Defect::ResolvesByReading,
        Defect::ScansEverybody,
        Defect::SeesOneTenantAcross,
        Defect::SkipsBetweenPages,
        Defect::ClockIsAhead,
        Defect::LosesOnRestart,
    ];
    for defect in defects {
        let namespace = DefectiveEngine::by(defect).namespace().unwrap();
        let verdict = differential::run(&namespace, 1, 400, 12).await;
        assert!(verdict.is_err(), "random plans do not notice a store that {defect:?}: {verdict:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_world_shows_who_forgets() {
    for defect in [Defect::ForgetsOperations, Defect::ResolvesByReading] {
        let namespace = DefectiveEngine::by(defect).namespace().unwrap();
        let verdict = faults::run(&namespace, 1, faults::FaultLevel::Deadly).await;
        assert!(
            verdict.is_err(),
            "clients in a bad world do not notice a store that {defect:?}: {verdict:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_case_says_truly_how_large_its_plans_are() {
    let mut wrong = Vec::new();
    for case in CASES {
        let broken = DefectiveEngine::by(Defect::None);
        case.run(&broken.namespace().unwrap())
            .await
            .unwrap_or_else(|error| panic!("{}: {error:#}", case.name));
        let largest = broken.largest_plan.load(Ordering::Relaxed);
        if largest != case.largest_plan {
            wrong.push(format!("{} has {largest}, not {}", case.name, case.largest_plan));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
