//! Unique keys: of all jobs under one key at most one is not over.
//!
//! `job_uniques` says which job has a key. It keeps it when it is over; the next caller takes the key over, in a plan
//! that holds the old job to being over. Whatever deletes a job deletes its key with it.
//!
//! - U1. *The key's row is inserted, or taken from exactly the job that was seen to have it* (`job_id = that one`).
//! - U2. *That job is over, or gone:* a step on its row says so, and marks that it no longer has the key. A replay, which would
//!   bring it to life again, is about the same row.

use statehouse_store::guard::{column, is_in};
use statehouse_store::{Address, Consistency, Row, Step, Store, StoreError, Tenant};

use super::{JOB_ID, LIVE, OVER, STATE, ScheduleSpec, UNIQUE_HELD, UNIQUE_KEY};
use crate::action::{Code, Refusal};

impl ScheduleSpec {
    /// What it takes for a job that goes away to have its key no more.
    pub(super) fn give_up_key(&self, row: &Row) -> Result<Option<Step>, StoreError> {
        let key = (row.get_optional_text(UNIQUE_KEY)?, row.get_optional_bool(UNIQUE_HELD)?);
        let (Some(key), Some(true)) = key else { return Ok(None) };
        let job_id = row.get_text(JOB_ID)?;
        Ok(Some(Step::delete(&self.uniques, [key.into()]).guard(column(JOB_ID).eq(job_id))))
    }

    /// What it takes for a job to have a key; `looks` if the key may have been given out before.
    pub(super) async fn claim_key(
        &self,
        store: &dyn Store,
        tenant: &Tenant,
        unique_key: &str,
        job_id: &str,
        looks: bool,
    ) -> Result<Vec<Step>, Refusal> {
        let key = || [unique_key.into()];
        let fresh = vec![Step::insert(&self.uniques, key()).set(JOB_ID, job_id)];
        if !looks {
            return Ok(fresh);
        }
        let get = async |address: Address| -> Result<Option<Row>, Refusal> {
            Ok(store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
        };
        let Some(has) = get(Address::new(&self.uniques, tenant, key())?).await? else { return Ok(fresh) };
        let before = has.get_text(JOB_ID)?.to_owned();
        let taken =
            Step::update(&self.uniques, key()).guard(column(JOB_ID).eq(before.as_str())).set(JOB_ID, job_id);
        if before == job_id {
            return Ok(vec![taken]);
        }
        match get(Address::new(&self.jobs, tenant, [before.as_str().into()])?).await? {
            None => Ok(vec![taken, Step::assert_absent(&self.jobs, [before.into()])]),
            Some(job) if LIVE.contains(&job.get_text(STATE)?) => {
                let state = job.get_text(STATE)?;
                let message =
                    format!("{} {before} has the unique key {unique_key}, and is {state}", self.name);
                Err(Refusal::new(Code::AlreadyExists, message))
            }
            Some(_) => {
                let over = Step::update(&self.jobs, [before.into()]).guard(is_in(STATE, OVER));
                Ok(vec![taken, over.set(UNIQUE_HELD, false)])
            }
        }
    }
}
