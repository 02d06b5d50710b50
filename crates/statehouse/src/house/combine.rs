//! Runs calls of combined actions ([`crate::declare::combine`]): queues of waiting callers, and the caller that leads.
//!
//! ```text
//!   arrives ──► WAITING ──► in a group ──► answered
//!      │           │            │  ▲
//!      │           └─ told to lead │ (the leader went away)
//!      └─ queue without a leader ──┘
//! ```
//!
//! There is a queue for each action, tenant and row. The first caller of a queue leads: it takes the callers that wait, commits
//! one plan for all of them and itself, tells each its answer, and hands the lead to the caller that waits next. No task runs
//! besides the callers, and no lock is held while anything is awaited.
//!
//! - Q1. The lead is never lost. *A leader that goes away, because its caller does, hands over when it is dropped
//!   ([`Leader::drop`]); so does a caller that was told to lead and is dropped before it begins ([`QueueTicket::drop`]).*
//! - Q2. A group whose leader went away during its commit may yet be applied. *Its callers wait again, each with the operation id
//!   of that plan, and the next leader resolves it before it judges them again: it was applied, and the receipts answer, or it
//!   is fenced.* The same holds for callers that were told `outcome_unknown` and ask again.
//! - Q3. A plan that was refused after a lost answer is fenced before its callers are judged again, because the lost attempt may
//!   still be under way.
//! - Q4. A caller is judged a bounded number of times, and then told `contended`.

mod group;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use statehouse_store::{Tenant, bug};
use tokio::sync::oneshot;

use super::authorize::masked;
use super::{ActionRef, CONFLICTS_MAX, House, Operation, ValidatedCall};
use crate::action::{Answer, Call, Refusal};
use crate::declare::combine::{AnyState, Combiner, request_digest};
use crate::resource::key_text;
use group::GroupRun;

/// The field of a group's event with the ids of the callers that it applied.
pub const COMBINED_OPERATIONS: &str = "operations";
/// Queues without waiting callers that are kept, each with the state that its last group left.
const IDLE_MAX: usize = 1_024;

/// Which row of which action, of whom.
type QueueKey = (ActionRef, Tenant, String);

/// The queues of a house.
#[derive(Default)]
pub(super) struct CombineQueues(Mutex<BTreeMap<QueueKey, Arc<CombineQueue>>>);

impl fmt::Debug for CombineQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CombineQueues")
    }
}

#[derive(Default)]
struct CombineQueue(Mutex<QueueContent>);

#[derive(Default)]
struct QueueContent {
    waiting: VecDeque<WaitingCaller>,
    is_led: bool,
    /// The state that the last group left. It may be stale.
    known: Option<AnyState>,
}

/// A call in a queue.
struct QueuedCall {
    call: Call,
    id: String,
    /// Whether the caller knows the id, so that it can ask again.
    is_given: bool,
    /// The plan that may yet apply it.
    doubt: Option<String>,
}

struct WaitingCaller {
    queued: QueuedCall,
    reply: oneshot::Sender<CallerMessage>,
}

/// What a waiting caller is told.
enum CallerMessage {
    /// Its call is next, and it leads.
    Lead(QueuedCall),
    Done(Result<Answer, Refusal>),
}

impl CombineQueues {
    fn queue(&self, key: QueueKey) -> Arc<CombineQueue> {
        let queues = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if queues.len() >= IDLE_MAX && !queues.contains_key(&key) {
            queues.retain(|_, queue| Arc::strong_count(queue) > 1 || queue.lock().is_led);
        }
        queues.entry(key).or_default().clone()
    }
}

impl CombineQueue {
    fn lock(&self) -> MutexGuard<'_, QueueContent> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call. It leads if no other call does.
    fn join(&self, queued: QueuedCall) -> Joined<'_> {
        let content = &mut *self.lock();
        if !content.is_led {
            content.is_led = true;
            return Joined::Leads(queued);
        }
        let (reply, told) = oneshot::channel();
        content.waiting.push_back(WaitingCaller { queued, reply });
        Joined::Waits(QueueTicket { queue: self, reply: told })
    }

    /// Gives the lead to the caller that waits next, or to none (Q1).
    fn hand_over(&self) {
        loop {
            let next = {
                let content = &mut *self.lock();
                let next = content.waiting.pop_front();
                content.is_led = next.is_some();
                next
            };
            let Some(WaitingCaller { queued, reply }) = next else { return };
            if reply.send(CallerMessage::Lead(queued)).is_ok() {
                return;
            }
        }
    }
}

/// What becomes of a call that joins a queue.
enum Joined<'q> {
    Leads(QueuedCall),
    Waits(QueueTicket<'q>),
}

/// The place of a caller that waits.
struct QueueTicket<'q> {
    queue: &'q CombineQueue,
    reply: oneshot::Receiver<CallerMessage>,
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        self.reply.close();
        if let Ok(CallerMessage::Lead(_)) = self.reply.try_recv() {
            self.queue.hand_over();
        }
    }
}

/// A call of the group under way.
struct GroupMember {
    queued: QueuedCall,
    /// None for the leader's own call.
    reply: Option<oneshot::Sender<CallerMessage>>,
    result: Option<Result<Answer, Refusal>>,
}

impl GroupMember {
    fn of(WaitingCaller { queued, reply }: WaitingCaller) -> GroupMember {
        GroupMember { queued, reply: Some(reply), result: None }
    }

    /// Whether it is not known yet what to tell it.
    fn is_open(&self) -> bool {
        self.result.is_none()
    }
}

/// The caller that leads a queue. Whenever it is dropped, another one leads (Q1).
struct Leader<'q> {
    queue: &'q CombineQueue,
    /// Its own call first.
    group: Vec<GroupMember>,
    /// The plan that is being committed.
    in_flight: Option<String>,
}

impl<'q> Leader<'q> {
    /// Takes the calls that wait, as many as a plan may have. Two calls under one id do not share a plan.
    fn of(queue: &'q CombineQueue, own: QueuedCall, most: usize) -> Leader<'q> {
        let mut group = vec![GroupMember { queued: own, reply: None, result: None }];
        let content = &mut *queue.lock();
        let mut left = VecDeque::new();
        while let Some(waiting) = content.waiting.pop_front() {
            if waiting.reply.is_closed() {
                continue;
            }
            let is_twin = group.iter().any(|member| member.queued.id == waiting.queued.id);
            if is_twin || group.len() >= most {
                left.push_back(waiting);
            } else {
                group.push(GroupMember::of(waiting));
            }
        }
        content.waiting = left;
        Leader { queue, group, in_flight: None }
    }

    fn open(&self) -> Vec<usize> {
        let members = self.group.iter().enumerate();
        members.filter(|(_, member)| member.is_open()).map(|(index, _)| index).collect()
    }

    /// Tells a caller what came of its call.
    fn settle(&mut self, index: usize, result: Result<Answer, Refusal>) {
        let Some(member) = self.group.get_mut(index) else { return };
        match member.reply.take() {
            Some(reply) => {
                // A caller that went away needs no answer.
                drop(reply.send(CallerMessage::Done(result.clone())));
                member.result = Some(result);
            }
            None => member.result = Some(result),
        }
    }

    fn settle_open(&mut self, refusal: &Refusal) {
        for place in self.open() {
            self.settle(place, Err(refusal.clone()));
        }
    }

    /// Puts the later half of the calls back into the queue. Returns whether there was more than one.
    fn halve(&mut self) -> bool {
        let open = self.open();
        let Some(first) = open.get(open.len().div_ceil(2)).copied().filter(|_| open.len() > 1) else {
            return false;
        };
        let later = self.group.split_off(first);
        self.put_back(later, None);
        true
    }

    fn put_back(&self, members: Vec<GroupMember>, doubt: Option<&str>) {
        let content = &mut *self.queue.lock();
        for GroupMember { mut queued, reply, result } in members.into_iter().rev() {
            let (Some(reply), None) = (reply, result) else { continue };
            if let Some(doubt) = doubt {
                queued.doubt = Some(doubt.to_owned());
            }
            content.waiting.push_front(WaitingCaller { queued, reply });
        }
    }

    /// What came of the leader's own call.
    fn own(&mut self) -> Result<Answer, Refusal> {
        let result = self.group.first_mut().and_then(|member| member.result.take());
        result.unwrap_or_else(|| Err(bug!("the leader of a group has no answer").into()))
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let members = std::mem::take(&mut self.group);
        let in_flight = self.in_flight.take();
        self.put_back(members, in_flight.as_deref());
        self.queue.hand_over();
    }
}

impl House {
    /// Runs a call of a combined action: in a group, or by itself.
    pub(super) async fn combine(
        &self,
        action: ActionRef,
        one: ValidatedCall<'_>,
        combiner: &dyn Combiner,
        operation: Operation,
    ) -> Result<Answer, Refusal> {
        let named = one.call.input.text(combiner.id_input()).map(str::to_owned);
        if let (Some(id), Some(named)) = (&operation.id, &named)
            && id != named
        {
            let detail = format!("the id of the request is {id}: give the same id here, or none");
            return Err(Refusal::field(combiner.id_input(), detail));
        }
        let given = operation.id.clone().or(named);
        if one.goes_alone() {
            let fingerprint = match &operation.id {
                Some(_) => operation.fingerprint,
                None => request_digest(&one.call),
            };
            let tenant = one.call.tenant.clone();
            let operation = Operation { id: given, fingerprint };
            let answers = self.write(&tenant, &[one], operation, CONFLICTS_MAX).await;
            let answers = answers.map_err(|refusal| Refusal { call: None, ..refusal })?;
            let answer = answers.into_iter().next();
            return answer.ok_or_else(|| bug!("a write had no answer").into());
        }
        let is_given = given.is_some();
        let id = given.unwrap_or_else(|| self.ids.next());
        let queue = self.combining.queue((action, one.call.tenant.clone(), key_text(&one.call.key)));
        let queued = QueuedCall { call: one.call.clone(), id, is_given, doubt: None };
        let result = self.enqueue(&queue, queued, &one, combiner).await;
        result.map_err(|refusal| masked(std::slice::from_ref(&one), refusal))
    }

    /// Waits for the answer, or leads.
    async fn enqueue(
        &self,
        queue: &CombineQueue,
        queued: QueuedCall,
        one: &ValidatedCall<'_>,
        combiner: &dyn Combiner,
    ) -> Result<Answer, Refusal> {
        let own = match queue.join(queued) {
            Joined::Leads(queued) => queued,
            Joined::Waits(mut ticket) => match (&mut ticket.reply).await {
                Ok(CallerMessage::Done(result)) => return result,
                Ok(CallerMessage::Lead(queued)) => queued,
                Err(_) => return Err(bug!("a queue of combined calls has forgotten a caller").into()),
            },
        };
        let mut leader = Leader::of(queue, own, combiner.most());
        GroupRun::of(self, one, combiner, &mut leader).run().await;
        leader.own()
    }
}

impl ValidatedCall<'_> {
    /// Whether the call cannot share a plan: what it demands of the row is judged by the engine.
    fn goes_alone(&self) -> bool {
        let call = &self.call;
        call.condition.is_some()
            || call.expected.is_some()
            || self.governed().is_some_and(|governed| governed.reads_clock())
    }
}
