//! Lanes: at most `per_key` jobs of one order key are admitted at a time, and the others stand in line.
//!
//! A job that is admitted can be claimed; one in line cannot, because its `run_at` is null. The lane's row counts both,
//! and is gone while there are none; the line has a row for each job that waits, in the order of numbers that the lane gave
//! out. The plan that ends an admitted job admits the next one.
//!
//! - L1. *Guard of admission at once:* `running < per_key and waiting = 0`, or that there is no lane. No job overtakes the wait list.
//! - L2. *Guard of standing in line:* the opposite. No job waits without need.
//! - L3. *Guard of leaving without a successor:* `waiting = 0`, and the count that was read. No waiting job is left behind.
//! - L4. *The next one is admitted once:* its row in the line is deleted by the plan that admits it.
//!
//! - L5. *Guard of taking a place with a number:* `tail >= the number`: it was given out by the lane that is there.
//!
//! A number in a lane that is there is taken by a write of its own, before the job is stored. One that is not used leaves a gap,
//! which is harmless. A lane that is not there is made by the plan that stores its first job, so that a job which is refused
//! leaves none behind.

use statehouse_store::guard::column;
use statehouse_store::{
    Address, Commit, Consistency, Expr, Ids, Plan, Query, Reason, Refused, RetryPolicy, Row, Step, Store,
    StoreError, Table, Tenant, bug, commit_known,
};

use super::{
    JOB_ID, LINE_SEQ, NOT_BEFORE, ORDER_KEY, RUN_AT, RUN_SHARD, RUNNING, ScheduleSpec, TAIL, UPDATED_AT,
    WAITING,
};
use crate::action::{Code, Refusal};

/// How often a lane is looked at that changes while one looks.
const LOOKS_MAX: usize = 8;

/// A place in a lane that a job may take.
#[derive(Clone, Debug)]
pub(super) struct LaneTicket {
    pub order_key: String,
    pub seq: i64,
    /// Whether it can be claimed at once, or stands in line.
    pub admitted: bool,
    /// Whether the lane is not there yet.
    pub first: bool,
}

impl ScheduleSpec {
    /// Takes a number in a lane, and looks whether there is room.
    pub(super) async fn take_ticket(
        &self,
        store: &dyn Store,
        ids: &Ids,
        tenant: &Tenant,
        order_key: &str,
    ) -> Result<LaneTicket, Refusal> {
        let step = Step::update(&self.lanes, [order_key.into()]).set(TAIL, column(TAIL).add(1));
        let order_key = order_key.to_owned();
        let plan = Plan::of(tenant, ids.next()).step(step).build()?;
        match commit_known(store, &plan, RetryPolicy::WORKER).await {
            Ok(Commit::Applied(applied)) => {
                let row = applied.rows.into_iter().next().flatten();
                let row = row.ok_or_else(|| bug!("an update of lane {order_key} returned no row"))?;
                let admitted = row.get_int(RUNNING)? < self.per_key && row.get_int(WAITING)? == 0;
                Ok(LaneTicket { order_key, seq: row.get_int(TAIL)?, admitted, first: false })
            }
            Ok(Commit::Refused(Refused { reason: Reason::Absent, .. })) => {
                Ok(LaneTicket { order_key, seq: 1, admitted: true, first: true })
            }
            Ok(Commit::Refused(_) | Commit::Fenced) => {
                Err(Refusal::new(Code::Internal, "a lane refused a number"))
            }
            // A number may be taken, which leaves a harmless gap. The caller's own plan was not committed yet.
            Err(StoreError::OutcomeUnknown { .. }) => {
                let message = "the order key's lane did not answer; nothing was done";
                Err(Refusal::new(Code::Unavailable, message))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a table is one of those in which places are taken.
    pub(super) fn is_of_lanes(&self, table: &Table) -> bool {
        [&self.lanes, &self.lines].iter().any(|known| known.name() == table.name())
    }

    /// What it takes to stand at a place (L1, L2, L5).
    pub(super) fn join_wait_list(&self, ticket: &LaneTicket, job_id: &str, when: &Expr) -> Vec<Step> {
        if ticket.first {
            let lane = Step::insert(&self.lanes, [ticket.order_key.as_str().into()]);
            return vec![lane.set(RUNNING, 1).set(TAIL, ticket.seq)];
        }
        // A lane that went and came again does not know the number, and would give it out to those behind.
        let lane =
            Step::update(&self.lanes, [ticket.order_key.as_str().into()]).guard(column(TAIL).ge(ticket.seq));
        if ticket.admitted {
            let room = column(RUNNING).lt(self.per_key).and(column(WAITING).eq(0));
            return vec![lane.guard(room).set(RUNNING, column(RUNNING).add(1))];
        }
        let full = column(RUNNING).ge(self.per_key).or(column(WAITING).gt(0));
        let line = Step::insert(&self.lines, [ticket.order_key.as_str().into(), ticket.seq.into()]);
        vec![
            lane.guard(full).set(WAITING, column(WAITING).add(1)),
            line.set(JOB_ID, job_id).set(NOT_BEFORE, when.clone()),
        ]
    }

    /// What it takes to leave the line, for one that was never admitted.
    pub(super) fn leave_wait_list(&self, row: &Row) -> Result<Vec<Step>, StoreError> {
        let (order_key, seq) = (row.get_text(ORDER_KEY)?, row.get_int(LINE_SEQ)?);
        Ok(vec![
            Step::update(&self.lanes, [order_key.into()]).set(WAITING, column(WAITING).subtract(1)),
            Step::delete(&self.lines, [order_key.into(), seq.into()]),
        ])
    }

    /// What it takes to leave the lane, for one that was admitted: the next in line takes its place (L3, L4).
    pub(super) async fn admit_next(&self, store: &dyn Store, row: &Row) -> Result<Vec<Step>, Refusal> {
        let Some(order_key) = row.get_optional_text(ORDER_KEY)? else { return Ok(Vec::new()) };
        let tenant = row.tenant();
        for _ in 0..LOOKS_MAX {
            let line = Query::table(&self.lines, tenant, [order_key.into()])?.limit(1)?;
            let head = store.query(&line).await?.rows.into_iter().next();
            let address = Address::new(&self.lanes, tenant, [order_key.into()])?;
            let lane = store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
            // A lane that is not there has no jobs.
            let count = |name: &str| lane.as_ref().map_or(Ok(0), |lane| lane.get_int(name));
            let key = || [order_key.into()];
            match (count(WAITING)?, head) {
                (0, _) if count(RUNNING)? > 1 => {
                    let guard = column(RUNNING).gt(1).and(column(WAITING).eq(0));
                    let step = Step::update(&self.lanes, key()).guard(guard);
                    return Ok(vec![step.set(RUNNING, column(RUNNING).subtract(1))]);
                }
                (0, _) => {
                    let guard = column(RUNNING).eq(1).and(column(WAITING).eq(0));
                    return Ok(vec![Step::delete(&self.lanes, key()).guard(guard)]);
                }
                (_, Some(head)) => return Ok(self.admit_head(order_key, &head)?),
                // Another caller took the last one between the two reads.
                (_, None) => {}
            }
        }
        Err(Refusal::new(Code::Contended, "too many jobs of this order key end at once; try again"))
    }

    fn admit_head(&self, order_key: &str, head: &Row) -> Result<Vec<Step>, StoreError> {
        let (job_id, seq) = (head.get_text(JOB_ID)?, head.get_int(LINE_SEQ)?);
        let when = head.get_time(NOT_BEFORE)?;
        Ok(vec![
            Step::update(&self.lanes, [order_key.into()]).set(WAITING, column(WAITING).subtract(1)),
            Step::delete(&self.lines, [order_key.into(), seq.into()]),
            Step::update(&self.jobs, [job_id.into()])
                .set(RUN_SHARD, self.shard_of(head.tenant(), job_id))
                .set(RUN_AT, when)
                .set(UPDATED_AT, statehouse_store::guard::now()),
        ])
    }
}
