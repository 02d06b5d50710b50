//! The reads: jobs, and queues.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::table::VERSION;
use statehouse_store::{Address, Consistency, Query, Value};

use super::{BY_STATE, PAUSED, PENDING, QUEUE, QUEUE_DEFAULT, STATE, Schedule, UPDATED_AT};
use crate::action::{Answer, Call, Desk, Read, Refusal};
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading {
    Job,
    Jobs,
    Queue,
}

pub(super) struct Reader {
    pub schedule: Arc<Schedule>,
    pub what: Reading,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let schedule = &self.schedule;
        let key = call.key.first().and_then(Value::as_text).unwrap_or_default();
        let answer = match self.what {
            Reading::Job => {
                let job = schedule.job(desk.store, &call.tenant, key).await?;
                Answer::row(schedule.jobs_def.row_json(&job))
            }
            Reading::Jobs => self.jobs(call, desk).await?,
            Reading::Queue => {
                let address = Address::new(&schedule.queues, &call.tenant, [key.into()])?;
                let row = desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
                // A queue is there as soon as somebody names it.
                let fresh = json!({QUEUE: key, PAUSED: false, UPDATED_AT: null, VERSION: 0});
                Answer::row(row.map_or(fresh, |row| row.to_json()))
            }
        };
        Ok(Arc::new(answer))
    }
}

impl Reader {
    async fn jobs(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let text = |name: &str| call.input.get(name).and_then(Json::as_str);
        let partition = [text(QUEUE).unwrap_or(QUEUE_DEFAULT).into(), text(STATE).unwrap_or(PENDING).into()];
        let query = Query::index(&self.schedule.jobs, BY_STATE, &call.tenant, partition)?.backward();
        let page = desk.store.query(&paging::page_of(query, call)?).await?;
        let rows = page.rows.iter().map(|row| self.schedule.jobs_def.row_json(row));
        Ok(paging::answer(rows, page.next))
    }
}
