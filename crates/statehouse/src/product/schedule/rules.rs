//! Pure decisions: what an enqueuer wants, and how long a failed job rests.

use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::guard::{now, now_plus};
use statehouse_store::{Expr, Time, Value};

use super::{
    ATTEMPTS_MAX, ORDER_KEY, PAYLOAD, PAYLOAD_BYTES_MAX, PRIORITY, QUEUE, QUEUE_DEFAULT, UNIQUE_KEY,
};
use crate::action::{Code, Refusal};
use crate::inputs::Inputs;

/// Inputs of `enqueue` and `claim`.
pub(super) const AT: &str = "at";
pub(super) const AFTER_MS: &str = "after_ms";

/// The job that a caller wants to enqueue.
#[derive(Clone, Debug)]
pub(super) struct JobInput {
    pub queue: String,
    pub priority: i64,
    /// From when on.
    pub when: Expr,
    pub attempts_max: Option<i64>,
    pub payload: Json,
    pub unique_key: Option<String>,
    pub order_key: Option<String>,
    /// The definition that makes it, and which of its due times it is.
    pub made_by: Option<(String, Time)>,
}

impl JobInput {
    /// What the input of `enqueue` says; it fits its form already.
    pub(super) fn of(input: &Inputs, priorities: i64) -> Result<JobInput, Refusal> {
        let text = |name: &str| input.text(name).map(str::to_owned);
        let priority = input.int(PRIORITY).unwrap_or(0);
        if !(0..priorities).contains(&priority) {
            let detail = format!("there are {priorities} priorities, from 0, which comes first");
            return Err(field_error(PRIORITY, &detail));
        }
        let payload = input.json(PAYLOAD);
        check_size(PAYLOAD, &payload)?;
        let when = match (input.time(AT), input.duration_ms(AFTER_MS)) {
            (Some(at), after) => Value::Time(at.plus(after.unwrap_or_default())).into(),
            (None, Some(after)) => now_plus(after).into(),
            (None, None) => now().into(),
        };
        Ok(JobInput {
            queue: text(QUEUE).unwrap_or_else(|| QUEUE_DEFAULT.to_owned()),
            priority,
            when,
            attempts_max: input.int(ATTEMPTS_MAX),
            payload,
            unique_key: text(UNIQUE_KEY),
            order_key: text(ORDER_KEY),
            made_by: None,
        })
    }
}

pub(super) fn field_error(name: &str, detail: &str) -> Refusal {
    Refusal::field(name, detail)
}

/// That a document is small enough for the records it will stand in.
pub(super) fn check_size(name: &str, document: &Json) -> Result<(), Refusal> {
    let bytes = document.to_string().len();
    if bytes > PAYLOAD_BYTES_MAX {
        let message = format!(
            "{name} has {bytes} bytes, and at most {PAYLOAD_BYTES_MAX} are kept with a job; store it elsewhere"
        );
        return Err(Refusal::new(Code::TooLarge, message));
    }
    Ok(())
}

/// How long a job rests after its n-th attempt failed: twice as long each time, up to a bound, and of that between half
/// and all, by its id, so that jobs that failed together do not come back together.
pub(super) fn backoff(job_id: &str, attempt: i64, first: Duration, most: Duration) -> Duration {
    let doublings = u32::try_from(attempt.saturating_sub(1).clamp(0, 30)).unwrap_or(0);
    let span = first.saturating_mul(1 << doublings).min(most);
    // FNV-1a with a last mix: it has to spread jobs, and the same attempt always rests as long.
    let mut hash =
        job_id.bytes().chain(attempt.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let share = (hash >> 11) as f64 / (1_u64 << 53) as f64;
    span.mul_f64(0.5 + share / 2.0)
}

/// A span as an input in milliseconds.
pub(super) fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rests_double_up_to_a_bound_and_differ() {
        let (first, most) = (Duration::from_secs(1), Duration::from_secs(60));
        for (attempt, full) in [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (63, 60), (i64::MAX, 60)] {
            for job in 0..50 {
                let rest = backoff(&format!("job-{job}"), attempt, first, most);
                let full = Duration::from_secs(full);
                assert!(rest >= full / 2 && rest <= full, "attempt {attempt}: {rest:?} of {full:?}");
            }
        }
        let rests: std::collections::BTreeSet<Duration> =
            (0..50).map(|job| backoff(&format!("job-{job}"), 1, first, most)).collect();
        assert!(rests.len() > 45, "{rests:?}");
        assert_eq!(backoff("a", 1, first, most), backoff("a", 1, first, most));
    }

    #[test]
    fn what_is_wanted() {
        let form = super::super::actions::enqueue_form();
        let wanted = |input: Json| {
            let inputs = crate::inputs::parse_inputs(&form, input.as_object().unwrap().clone());
            JobInput::of(&inputs.unwrap(), 3)
        };
        let plain = wanted(json!({})).unwrap();
        assert_eq!((plain.queue.as_str(), plain.priority, plain.when), ("default", 0, now().into()));
        let later = wanted(json!({"at": "2030-01-01T00:00:00Z", "after_ms": 1500})).unwrap();
        let at: Time = "2030-01-01T00:00:01.5Z".parse().unwrap();
        assert_eq!(later.when, Value::Time(at).into());
        assert_eq!(wanted(json!({"after_ms": 5})).unwrap().when, now_plus(Duration::from_millis(5)).into());
        assert_eq!(wanted(json!({"priority": 3})).unwrap_err().code, Code::InvalidInput);
        let heavy = "x".repeat(PAYLOAD_BYTES_MAX);
        assert_eq!(wanted(json!({"payload": heavy})).unwrap_err().code, Code::TooLarge);
    }
}
