//! Records what came of jobs: together with others of their tenant where nothing is in the way, one by one otherwise.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value as Json};
use statehouse_store::{Commit, Entry, Plan, RetryPolicy, Tenant, Value, commit_known};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::{Job, RunnerTask};
use crate::action::{Code, Refusal};
use crate::house::{Operation, Request, TOGETHER_MAX, with_subject};
use crate::resource::key_text;

/// Bytes of results in one plan: with what else its record says they fit into one.
const RESULTS_BYTES_MAX: usize = 300_000;

/// Plans of completions in flight, but for the first one of each tenant: while some are written, the next ones gather.
const RECORDING_MAX: usize = 4;

/// How often a result is sent that was not taken.
const TRIES_MAX: u32 = 8;

/// Temporary refusals: they pass with a retry.
const PASSING: [Code; 3] = [Code::OutcomeUnknown, Code::Unavailable, Code::Contended];

/// A job that was done.
pub(super) struct FinishedJob {
    pub job: Job,
    pub result: Json,
    pub bytes: usize,
}

/// One on its way to the store, together with others.
pub(super) struct JobReport {
    done: Arc<FinishedJob>,
    /// Told whether it was recorded. If it was not, it goes by itself.
    recorded: oneshot::Sender<bool>,
}

/// The first jobs that fit into one plan, and into one record of it.
fn first_that_fit(waiting: &mut VecDeque<JobReport>, most: usize) -> Vec<JobReport> {
    let mut bytes = 0;
    let fits = |ended: &&JobReport| {
        bytes += ended.done.bytes;
        bytes <= RESULTS_BYTES_MAX
    };
    // One that does not fit by itself is refused for that.
    let many = waiting.iter().take(most).take_while(fits).count().max(1);
    waiting.drain(..many.min(waiting.len())).collect()
}

impl RunnerTask {
    /// Hands a job that was done to who records them together, and waits until it is recorded, or known not to be.
    pub(super) async fn is_recorded_with_others(
        &self,
        done: &Arc<FinishedJob>,
        ended: &mpsc::UnboundedSender<JobReport>,
    ) -> bool {
        let (recorded, is_recorded) = oneshot::channel();
        // Who records goes away after the last of these.
        ended.send(JobReport { done: done.clone(), recorded }).is_ok() && is_recorded.await.unwrap_or(false)
    }

    /// Records jobs that were done, until there are no more. One that ends by itself is recorded at once; those that end
    /// while others of their tenant are being recorded gather until there are enough for a plan, or until those are.
    pub(super) async fn record_all(self: Arc<Self>, mut ended: mpsc::UnboundedReceiver<JobReport>) {
        let most = TOGETHER_MAX;
        let enough = (self.options.at_once / 2).clamp(1, most);
        let mut gathered: BTreeMap<Tenant, VecDeque<JobReport>> = BTreeMap::new();
        // Of each tenant, how many plans are under way.
        let mut under_way: BTreeMap<Tenant, usize> = BTreeMap::new();
        let (mut recording, mut arrived, mut more) = (JoinSet::new(), Vec::new(), true);
        while more || !recording.is_empty() {
            tokio::select! {
                taken = ended.recv_many(&mut arrived, most), if more => {
                    more = taken > 0;
                    // Those that end at the same moment are about to say so.
                    tokio::task::yield_now().await;
                    while let Ok(another) = ended.try_recv() {
                        arrived.push(another);
                    }
                }
                Some(recorded) = recording.join_next() => match recorded {
                    Ok(tenant) => {
                        under_way.entry(tenant).and_modify(|plans| *plans = plans.saturating_sub(1));
                    }
                    // It panicked and does not say whose it was: no caller waits for it.
                    Err(_) => under_way.clear(),
                },
            }
            for ended in arrived.drain(..) {
                gathered.entry(ended.done.job.tenant.clone()).or_default().push_back(ended);
            }
            gathered.retain(|tenant, waiting| {
                let plans = under_way.entry(tenant.clone()).or_default();
                while !waiting.is_empty()
                    && (*plans == 0 || (waiting.len() >= enough && recording.len() < RECORDING_MAX))
                {
                    recording.spawn(self.clone().complete(tenant.clone(), first_that_fit(waiting, most)));
                    *plans += 1;
                }
                !waiting.is_empty()
            });
            under_way.retain(|_, plans| *plans > 0);
        }
    }

    /// Completes jobs of one tenant as one plan; if something is in the way of one of them, they are told so. Returns whose
    /// they are.
    async fn complete(self: Arc<Self>, tenant: Tenant, together: Vec<JobReport>) -> Tenant {
        let is_done = self.complete_as_one(&tenant, &together).await;
        for ended in together {
            // Its handler may have been cancelled.
            let _ = ended.recorded.send(is_done);
        }
        tenant
    }

    /// Whether jobs were completed by one plan: that of `complete`, for all of them, made without the way of a request.
    async fn complete_as_one(&self, tenant: &Tenant, together: &[JobReport]) -> bool {
        let Some(first) = together.first() else { return true };
        let about = key_text([&Value::from(first.done.job.job_id.as_str())]);
        let mut entry = Entry::about(&self.schedule.name, about.as_str());
        let mut steps = Vec::with_capacity(together.len());
        for JobReport { done, .. } in together {
            let job = &done.job;
            let completed = self.schedule.completed(tenant, &job.job_id, job.attempt, done.result.clone());
            let Ok((step, event)) = completed else { return false };
            steps.push(self.schedule.only_if_independent(step));
            let key = key_text([&Value::from(job.job_id.as_str())]);
            let event = with_subject(event, &self.schedule.name, &key, &entry);
            entry = entry.event(event);
        }
        let plan = Plan::of(tenant, self.house.ids().next()).steps(steps).log(entry);
        let Ok(plan) = plan.without_rows().build() else { return false };
        // No wakeup is needed: an independent job admits no other job.
        matches!(
            commit_known(&**self.house.store(), &plan, RetryPolicy::WORKER).await,
            Ok(Commit::Applied(_))
        )
    }

    /// Sends what came of a job until it is taken, or known to be of no use. If it never is, the lease ends.
    pub(super) async fn record(&self, job: &Job, action: &str, input: Json) {
        let input = match input {
            Json::Object(input) => input,
            _ => Map::new(),
        };
        for tries in 0..TRIES_MAX {
            let request = Request {
                action: format!("{}.{action}", self.schedule.name),
                key: vec![Value::from(job.job_id.as_str())],
                input: input.clone(),
                expected: None,
            };
            match self.house.call(&job.tenant, request, Operation::default()).await {
                Err(Refusal { code, .. }) if PASSING.contains(&code) => {
                    self.house.clock().sleep(Duration::from_millis(10 << tries)).await;
                }
                Ok(_) | Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(bytes: usize) -> JobReport {
        let tenant = Tenant::new("acme").unwrap();
        let job = Job { tenant, job_id: "a".into(), attempt: 1, queue: "q".into(), payload: Json::Null };
        JobReport {
            done: Arc::new(FinishedJob { job, result: Json::Null, bytes }),
            recorded: oneshot::channel().0,
        }
    }

    #[test]
    fn jobs_go_together_as_far_as_their_results_fit_into_a_record() {
        let check = |given: &[usize], expected: &[usize]| {
            let mut waiting: VecDeque<JobReport> = given.iter().map(|bytes| ended(*bytes)).collect();
            let mut sizes = Vec::new();
            while !waiting.is_empty() {
                sizes.push(first_that_fit(&mut waiting, 98).len());
            }
            assert_eq!(sizes, expected, "{given:?}");
        };
        check(&[], &[]);
        check(&[4; 100], &[98, 2]);
        check(&[200_000, 90_000, 20_000], &[2, 1]);
        // One that is too large by itself does not delay the others.
        check(&[RESULTS_BYTES_MAX + 1, 4, 4], &[1, 2]);
    }
}
