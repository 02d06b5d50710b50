//! The way by which plans of other resources enqueue jobs.

use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::guard::now;
use statehouse_store::{EventTemplate, Tenant, Time, Value};

use super::rules::{JobInput, check_size};
use super::{PAYLOAD, QUEUE_DEFAULT, ScheduleSpec};
use crate::action::{PlanParts, Refusal};
use crate::infra::due;
use crate::resource::key_text;

/// Enqueues jobs of one schedule in plans of other resources: the job exists if and only if the plan was applied.
#[derive(Clone, Debug)]
pub struct JobQueue(pub(super) Arc<ScheduleSpec>);

impl JobQueue {
    /// The step that stores a job for now, and its event. A plan that has the step is refused at it if there is a job of this id.
    /// `at` is the time of this process, for the hint when workers have to look.
    pub fn enqueue(
        &self,
        tenant: &Tenant,
        job_id: &str,
        payload: Json,
        at: Time,
    ) -> Result<PlanParts, Refusal> {
        let schedule = &self.0;
        check_size(PAYLOAD, &payload)?;
        let wanted = JobInput {
            queue: QUEUE_DEFAULT.to_owned(),
            priority: 0,
            when: now().into(),
            attempts_max: None,
            payload,
            unique_key: None,
            order_key: None,
            made_by: None,
        };
        let steps = schedule.stored(tenant, job_id, &wanted, None);
        let mut due = None;
        if let Some(job) = steps.first() {
            due = due::wakeup(&schedule.sweeper(), job, at);
        }
        let event = EventTemplate::named(format!("{}.enqueued", schedule.name)).with_row_of(0);
        let parts = PlanParts::new(key_text([&Value::from(job_id)]), steps, event);
        Ok(parts.wakeups(due).notify(&schedule.news))
    }
}
