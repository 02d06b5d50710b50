//! Takes: the first rows of a range, each changed under a guard. It is what workers do who share a queue.
//!
//! A [`ClaimRange`] is not one plan but many: each row is changed by itself, as by a plan of one step without a log entry, so
//! that all of them are changed, or some, or none. How they are found is the engine's affair. What it promises:
//!
//! - T1. Only rows of the range, the tenant's own, that the step's guard holds for; each is given back as it is then.
//! - T2. Never more than asked for: the range's limit, and [`ClaimRange::limit_bytes`].
//! - T3. The first ones, mostly in the order of the range. Rows that another caller is changing meanwhile may be passed over, and
//!   so may those behind a row that the guard does not hold for: a row that is found and not taken uses up its place.
//! - T4. A claimed row is returned, or found. *A taken row has the take's operation id in its mark:* where an answer got lost,
//!   the engine looks for it there. If the store becomes unreachable, a row may be claimed without the caller learning of it; the
//!   error says so, and the claim must therefore expire.

use std::sync::Arc;

use futures_util::future::join_all;

use crate::commit::{RetryPolicy, commit_known};
use crate::error::{PlanError, StoreError};
use crate::limits::row_weight;
use crate::outcome::{Commit, Refused};
use crate::plan::{Expect, Plan, Step, Verb, admit_change};
use crate::read::Query;
use crate::row::{Row, Tenant};
use crate::store::{ExplainRequest, Explanation, Store};
use crate::value::Value;

/// For one row of a range: a row that was taken and not reported waits until its lease ends, so many attempts are worth it.
const RETRIES: RetryPolicy<'static> = RetryPolicy { attempts: 9, backoff: None };

/// The first rows of a range, and what becomes of each. Cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimRange(Arc<ClaimContent>);

#[derive(Clone, Debug, PartialEq)]
struct ClaimContent {
    tenant: Tenant,
    operation: String,
    query: Query,
    /// Its key is not known yet.
    step: Step,
    mark: String,
    bytes_max: usize,
}

impl ClaimRange {
    /// The first rows of `query` that are the tenant's, changed by `step`: an update without a key. `mark` is a column for
    /// text, which is set to the operation id.
    pub fn of(
        tenant: &Tenant,
        operation: impl Into<String>,
        query: Query,
        step: Step,
        mark: &str,
    ) -> Result<ClaimRange, PlanError> {
        let operation = operation.into();
        let unfit = |why: &str| PlanError::Mistyped {
            table: step.table.name().to_owned(),
            expression: step.to_string(),
            why: why.to_owned(),
        };
        if (step.verb, step.expect) != (Verb::Put, Expect::Present) || !step.key.is_empty() {
            return Err(unfit("is no update without a key"));
        }
        if query.read_table() != &step.table {
            return Err(unfit("changes rows of a table that the range is not of"));
        }
        if query.tenant().is_some_and(|whose| whose != tenant) {
            return Err(unfit("changes rows of a tenant whom the range is not of"));
        }
        let step = admit_change(step.set(mark, operation.as_str()))?;
        let (tenant, mark) = (tenant.clone(), mark.to_owned());
        Ok(ClaimRange(Arc::new(ClaimContent { tenant, operation, query, step, mark, bytes_max: usize::MAX })))
    }

    /// Takes no row behind those that weigh so much together; the first one always.
    #[must_use]
    pub fn limit_bytes(self, bytes_max: usize) -> ClaimRange {
        ClaimRange(Arc::new(ClaimContent { bytes_max, ..ClaimContent::clone(&self.0) }))
    }

    /// Whose rows.
    pub fn tenant(&self) -> &Tenant {
        &self.0.tenant
    }

    /// The operation id.
    pub fn operation(&self) -> &str {
        &self.0.operation
    }

    /// The range.
    pub fn query(&self) -> &Query {
        &self.0.query
    }

    /// What becomes of each row; without a key.
    pub fn step(&self) -> &Step {
        &self.0.step
    }

    /// What the rows may weigh together, but for the last.
    pub fn bytes_max(&self) -> usize {
        self.0.bytes_max
    }

    /// The plan that takes one row.
    pub fn plan(&self, key: &[Value]) -> Result<Plan, PlanError> {
        let step = Step { key: key.to_vec(), ..self.0.step.clone() };
        Plan::of(&self.0.tenant, self.0.operation.as_str()).step(step).build()
    }

    /// Whether a row was taken by this.
    fn has_taken(&self, row: &Row) -> bool {
        row.text(&self.0.mark) == Some(self.0.operation.as_str())
    }

    /// What an engine is asked for that reads the range and commits a plan for each row, of which this is one.
    pub fn explained(
        &self,
        row: Option<&Row>,
        explain: impl Fn(ExplainRequest<'_>) -> Explanation,
    ) -> Explanation {
        let plan = row.and_then(|row| self.plan(row.key()).ok());
        let plan = plan.as_ref().map(|plan| explain(ExplainRequest::Commit(plan)));
        Explanation::of_all([explain(ExplainRequest::Query(&self.0.query))].into_iter().chain(plan))
    }
}

/// Reads the range, and commits a plan for each of its rows.
pub async fn claim_row_by_row<S: Store + ?Sized>(
    store: &S,
    take: &ClaimRange,
) -> Result<Vec<Row>, StoreError> {
    claim_remaining(store, take, Vec::new()).await
}

/// The same when some rows were taken already: as many others as there is room for.
pub async fn claim_remaining<S: Store + ?Sized>(
    store: &S,
    take: &ClaimRange,
    mut taken: Vec<Row>,
) -> Result<Vec<Row>, StoreError> {
    let page = match store.query(take.query()).await {
        Err(error) if taken.is_empty() => return Err(error),
        Err(_) => return Ok(taken),
        Ok(page) => page,
    };
    let mut bytes: usize = taken.iter().map(row_weight).sum();
    let fits = |row: &&Row| {
        let fits = bytes < take.bytes_max();
        bytes = bytes.saturating_add(row_weight(row));
        fits
    };
    let is_other =
        |row: &&Row| row.tenant() == take.tenant() && taken.iter().all(|taken| taken.key() != row.key());
    let room = take.query().page_limit().saturating_sub(taken.len());
    let others = page.rows.iter().filter(is_other).take(room).take_while(fits);
    let keys = others.map(|row| row.key().to_vec()).collect();
    match claim_keys(store, take, keys).await {
        Ok(others) => taken.extend(others),
        Err(error) if taken.is_empty() => return Err(error),
        // The caller gets what was claimed before the error.
        Err(_) => {}
    }
    Ok(taken)
}

/// Commits a plan for each row with one of these keys. An error only if it is that for some and none was taken.
pub async fn claim_keys<S: Store + ?Sized>(
    store: &S,
    take: &ClaimRange,
    keys: Vec<Vec<Value>>,
) -> Result<Vec<Row>, StoreError> {
    let (mut taken, mut failure) = (Vec::new(), None);
    for outcome in join_all(keys.iter().map(|key| take_one(store, take, key))).await {
        match outcome {
            Ok(row) => taken.extend(row),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if taken.is_empty() => Err(error),
        _ => Ok(taken),
    }
}

async fn take_one<S: Store + ?Sized>(
    store: &S,
    take: &ClaimRange,
    key: &[Value],
) -> Result<Option<Row>, StoreError> {
    let table = take.query().read_table().name();
    let plan = take.plan(key).map_err(|error| StoreError::schema(table, error.to_string()))?;
    Ok(match commit_known(store, &plan, RETRIES).await? {
        Commit::Applied(applied) => applied.rows.into_iter().next().flatten(),
        // An answer got lost, and the row is this one's own.
        Commit::Refused(Refused { current: Some(row), .. }) if take.has_taken(&row) => Some(row),
        Commit::Refused(_) | Commit::Fenced => None,
    })
}
