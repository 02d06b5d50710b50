//! The reads: jobs, and queues.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::json;
use statehouse_store::table::VERSION;
use statehouse_store::{Address, Consistency, Query, Row};

use super::{
    BY_ORDER_KEY, BY_STATE, ORDER_KEY, PAUSED, PENDING, QUEUE, QUEUE_DEFAULT, STATE, ScheduleSpec, UPDATED_AT,
};
use crate::action::{ActionContext, Answer, Call, Read, Refusal};
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum JobQuery {
    Job,
    Jobs,
    Queue,
}

pub(super) struct JobRead {
    pub schedule: Arc<ScheduleSpec>,
    pub what: JobQuery,
}

#[async_trait]
impl Read for JobRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let schedule = &self.schedule;
        let answer = match self.what {
            JobQuery::Job => {
                let job = schedule.job(cx.store, &call.tenant, call.key_text()?).await?;
                Answer::row(schedule.jobs_def.row_json(&job))
            }
            JobQuery::Jobs => self.jobs(call, cx).await?,
            JobQuery::Queue => {
                let key = call.key_text()?;
                let address = Address::new(&schedule.queues, &call.tenant, [key.into()])?;
                let row = cx.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
                // A queue exists as soon as a caller names it.
                let fresh = json!({QUEUE: key, PAUSED: false, UPDATED_AT: null, VERSION: 0});
                Answer::row(row.map_or(fresh, |row| row.to_json()))
            }
        };
        Ok(Arc::new(answer))
    }
}

impl JobRead {
    async fn jobs(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let text = |name: &str| call.input.text(name);
        let (jobs, tenant) = (&self.schedule.jobs, &call.tenant);
        let query = match text(ORDER_KEY) {
            Some(order_key) => Query::index(jobs, BY_ORDER_KEY, tenant, [order_key.into()])?,
            None => {
                let partition =
                    [text(QUEUE).unwrap_or(QUEUE_DEFAULT).into(), text(STATE).unwrap_or(PENDING).into()];
                Query::index(jobs, BY_STATE, tenant, partition)?
            }
        };
        let page = cx.store.query(&paging::page_of(query.backward(), call)?).await?;
        let is_asked = |row: &Row, name: &str| text(name).is_none_or(|asked| row.text(name) == Some(asked));
        // The index by order key has all states and queues.
        let rows = page.rows.iter().filter(|row| is_asked(row, QUEUE) && is_asked(row, STATE));
        Ok(paging::answer(rows.map(|row| self.schedule.jobs_def.row_json(row)), page.next))
    }
}
