//! Firing a transition: from a call, a due row or a part to the parts of a plan.

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{Entry, EventTemplate, Guard, Label, Plan, Reason, Row, Step, Tenant, Time, Value};

use super::Machine;
use super::bind::{Fence, wakeups};
use super::check::{BuiltCase, BuiltTransition};
use super::part::{Firing, MachinePart, PartUse, RETRIED, TOLD};
use super::refuse::FailedCase;
use super::scene::{Gathered, Scene};
use super::transition::{DeclaredName, RowReading};
use crate::action::{
    ActionContext, Call, Code, Expected, LastRefusal, PlanParts, Prepare, Prepared, Refusal, RefusedStep,
    RelatedEvent, Verdict,
};
use crate::house::with_subject;
use crate::resource::key_text;

/// The label of an assertion that a gathered row has not changed.
const GATHERED: &str = "gathered";

/// A defect of a declaration that only shows when it is used.
fn defect(why: impl Into<String>) -> Refusal {
    Refusal::new(Code::Internal, why)
}

impl BuiltTransition {
    /// Computed values, after those that are given.
    fn binds(&self, scene: &Scene<'_>) -> Result<Vec<(DeclaredName, Value)>, Refusal> {
        let mut binds = scene.binds.to_vec();
        for (name, compute) in &self.decl.binds {
            let value = compute(&Scene { binds: &binds, ..*scene })?;
            binds.push((name.clone(), value));
        }
        Ok(binds)
    }

    fn picked(&self, scene: &Scene<'_>) -> Result<&BuiltCase, Refusal> {
        let index = self.decl.pick.as_ref().map_or(Ok(0), |pick| pick(scene))?;
        self.cases.get(index).ok_or_else(|| defect(format!("`{}` has no case {index}", self.decl.name)))
    }

    fn case(&self, name: &str) -> Result<&BuiltCase, Refusal> {
        let found = self.cases.iter().find(|case| case.decl.name == name);
        found.ok_or_else(|| defect(format!("`{}` has no case `{name}`", self.decl.name)))
    }

    /// The case whose step has this label.
    fn labelled(&self, label: &str) -> Option<&BuiltCase> {
        self.cases.iter().find(|case| case.label == label)
    }
}

impl Machine {
    /// Adds the steps of a case and of its parts to a plan, and returns its event.
    fn fire(
        &self,
        transition: &BuiltTransition,
        case: &BuiltCase,
        scene: &Scene<'_>,
        label: String,
        plan: &mut PlanParts,
    ) -> Result<Option<EventTemplate>, Refusal> {
        // Functions see what the transition may rely on.
        let shown = transition.decl.reading.shown(scene.row);
        let fence = transition.decl.reading.fence(scene.row);
        let seen = Scene { row: shown.as_ref(), ..*scene };
        let binds = transition.binds(&seen)?;
        let seen = Scene { binds: &binds, ..seen };
        self.check_rules(case, &seen, fence)?;
        let step = case.step(self, &seen, fence)?.label(label);
        plan.wakeups.extend(wakeups(self, &step, seen.row, scene.now_here));
        let index = plan.steps.len();
        plan.steps.push(step);
        for parts in &case.decl.parts {
            add_parts(plan, scene.tenant, scene.now_here, parts(&seen)?)?;
        }
        Ok(case.event(&seen, transition.decl.row_in_event.then_some(index)))
    }

    /// Judges in memory what is not sent: rules that the call alone decides, and, under a fence, all that have no clock.
    fn check_rules(&self, case: &BuiltCase, scene: &Scene<'_>, fence: Fence) -> Result<(), Refusal> {
        let fenced = matches!(fence, Fence::Version(_)).then_some(scene.row).flatten();
        let failed =
            FailedCase { machine: self, case, key: scene.key, call: scene.call, row: fenced, fenced: true };
        let refusal_of = |verdict: Verdict| match verdict {
            Verdict::Refuse(refusal) => refusal,
            // The row was read strongly, so that it is not a race.
            Verdict::Retry | Verdict::Wait => defect("a rule that is retried failed in memory"),
        };
        if let Some(row) = fenced {
            if case.state.is_some() {
                let state = self.state_of(row)?;
                if !case.from.iter().any(|from| from == state) {
                    return Err(refusal_of(failed.wrong_state()));
                }
            }
            if let Some(Expected::Version(version)) = scene.call.and_then(|call| call.expected)
                && version != row.version()
            {
                return Err(refusal_of(failed.version_conflict()));
            }
        }
        for rule in &case.rules {
            let holds = match fenced {
                _ if rule.is_of_call => rule.rule.bind(scene) == Guard::always(),
                Some(row) if !rule.rule.reads_clock() => rule.rule.holds(scene, row, scene.now_here),
                _ => true,
            };
            if !holds {
                return Err(refusal_of(failed.rule_verdict(&rule.spec.on_refused)));
            }
        }
        Ok(())
    }
}

/// Adds parts to a plan: their steps, their events and their wakeups.
pub fn add_parts(
    plan: &mut PlanParts,
    tenant: &Tenant,
    now_here: Time,
    parts: impl IntoIterator<Item = MachinePart>,
) -> Result<(), Refusal> {
    for part in parts {
        match part {
            MachinePart::Step(step) => plan.steps.push(step),
            MachinePart::Transition(firing) => {
                let (machine, key) = (firing.part.machine.clone(), key_text(&firing.key));
                if let Some(event) = firing.add_to(plan, tenant, now_here, None)? {
                    plan.related.push(RelatedEvent { resource: machine.resource.clone(), key, event });
                }
            }
            MachinePart::Prepared { resource, parts } => {
                let offset = plan.steps.len();
                let PlanParts { subject, steps, event, related, wakeups, notify } = parts;
                let own = RelatedEvent { resource, key: subject, event };
                plan.related.extend(std::iter::once(own).chain(related).map(|mut one| {
                    one.event.row_of = one.event.row_of.map(|step| step + offset);
                    one
                }));
                plan.steps.extend(steps);
                plan.wakeups.extend(wakeups);
                plan.notify.extend(notify);
            }
        }
    }
    Ok(())
}

impl Firing {
    /// Finds its transition, its scene and its case.
    fn fired<T>(
        &self,
        tenant: &Tenant,
        now_here: Time,
        refused: Option<&LastRefusal>,
        then: impl FnOnce(&BuiltTransition, &BuiltCase, &Scene<'_>) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let transition = self.part.machine.transitions.get(self.part.index);
        let transition = transition.ok_or_else(|| defect("a part without a transition"))?;
        let (row, binds, gathered) = (self.row.as_ref(), self.binds.as_slice(), &Gathered::default());
        let scene = Scene { tenant, key: &self.key, call: None, row, gathered, binds, refused, now_here };
        let case = match &self.case {
            Some(name) => transition.case(name)?,
            None => transition.picked(&scene)?,
        };
        then(transition, case, &scene)
    }

    fn add_to(
        &self,
        plan: &mut PlanParts,
        tenant: &Tenant,
        now_here: Time,
        refused: Option<&LastRefusal>,
    ) -> Result<Option<EventTemplate>, Refusal> {
        let machine = &self.part.machine;
        let event = self.fired(tenant, now_here, refused, |transition, case, scene| {
            let label = format!("{}.{}{}", machine.resource, case.label, self.on_refused);
            machine.fire(transition, case, scene, label, plan)
        })?;
        let data = self.data.iter().cloned();
        Ok(event.map(|event| data.fold(event, |event, (name, value)| event.with(&name, value))))
    }

    /// The name of the case that it fires.
    pub(super) fn case_name(
        &self,
        tenant: &Tenant,
        now_here: Time,
        refused: Option<&LastRefusal>,
    ) -> Result<DeclaredName, Refusal> {
        self.fired(tenant, now_here, refused, |_, case, _| Ok(case.decl.name.clone()))
    }

    /// The parts of a plan whose main row is this one. For actions by hand.
    pub fn prepare(&self, tenant: &Tenant, now_here: Time) -> Result<PlanParts, Refusal> {
        let mut plan = PlanParts::new(key_text(&self.key), Vec::new(), EventTemplate::named(""));
        let event = self.add_to(&mut plan, tenant, now_here, None)?;
        plan.event = event.ok_or_else(|| defect("an action without an event"))?;
        Ok(plan)
    }

    /// The plan of a worker that fires a transition by itself. `refused` is what became of the plan before, if there was one.
    pub fn plan(
        &self,
        tenant: &Tenant,
        operation: &str,
        now_here: Time,
        refused: Option<&LastRefusal>,
    ) -> Result<Plan, Refusal> {
        let mut parts = PlanParts::new("", Vec::new(), EventTemplate::named(""));
        let event = self.add_to(&mut parts, tenant, now_here, refused)?;
        let plan = Plan::of(tenant, operation).steps(parts.steps).without_rows();
        if event.is_none() && parts.related.is_empty() {
            return Ok(plan.build()?);
        }
        let mut entry = Entry::about(&self.part.machine.resource, key_text(&self.key));
        entry = event.into_iter().fold(entry, Entry::event);
        for RelatedEvent { resource, key, event } in parts.related {
            let event = with_subject(event, &resource, &key, &entry);
            entry = entry.event(event);
        }
        Ok(plan.log(entry).build()?)
    }
}

/// What a refused step means if it is one of these parts, or of their parts.
pub fn part_verdict(uses: &[PartUse], refused: &RefusedStep<'_>) -> Option<Verdict> {
    let label = refused.label();
    let (label, retried) = match label.strip_suffix(RETRIED) {
        Some(label) => (label, true),
        None => (label, false),
    };
    for part in uses {
        let machine = &part.machine;
        let transition = machine.transitions.get(part.index)?;
        let own = label.strip_prefix(machine.resource.as_str()).and_then(|rest| rest.strip_prefix('.'));
        if let Some(case) = own.and_then(|label| transition.labelled(label)) {
            if retried && matches!(refused.reason, Reason::Guard { .. }) {
                return Some(Verdict::Retry);
            }
            let fenced = transition.decl.reading == RowReading::Fenced;
            let (key, row) = (refused.step.key.as_slice(), refused.row);
            let failed = FailedCase { machine, case, key, call: None, row, fenced };
            let verdict = failed.verdict(refused.reason);
            return Some(verdict.unwrap_or_else(|| refused.standard(&machine.what(key))));
        }
        let nested = transition.cases.iter().find_map(|case| part_verdict(&case.decl.uses, refused));
        if nested.is_some() {
            return nested;
        }
    }
    None
}

/// A transition as an action.
pub(super) struct CalledTransition {
    pub machine: Arc<Machine>,
    pub index: usize,
}

impl CalledTransition {
    fn transition(&self) -> Result<&BuiltTransition, Refusal> {
        self.machine.transitions.get(self.index).ok_or_else(|| defect("an action without a transition"))
    }

    /// The key of the row: of the call, or, for an action on the collection, from its inputs.
    fn key(&self, call: &Call) -> Vec<Value> {
        if !call.key.is_empty() {
            return call.key.clone();
        }
        let columns = self.machine.def.table().key_columns();
        columns.iter().map(|column| call.input.value_or_null(&column.name)).collect()
    }

    /// The row, if the transition reads it. The row of the refused step saves a read.
    async fn row(&self, call: &Call, key: &[Value], cx: &ActionContext<'_>) -> Result<Option<Row>, Refusal> {
        let transition = self.transition()?;
        if transition.decl.reading == RowReading::No {
            return Ok(None);
        }
        let refused = cx.refused.filter(|last| {
            let label = last.label.as_ref().map_or("", Label::as_str);
            transition.labelled(label).is_some()
        });
        let row = match refused.and_then(|last| last.row.clone()) {
            Some(row) => Some(row),
            None => cx.row(self.machine.def.table(), &call.tenant, key.iter().cloned()).await?,
        };
        let accepts_absent = transition.cases.iter().any(|case| case.decl.from.absent);
        if row.is_none() && !accepts_absent {
            let message = format!("{} does not exist", self.machine.what(key));
            return Err(Refusal::new(Code::NotFound, message));
        }
        Ok(row)
    }

    /// The refusal to tell because the case that was refused is picked again for the same row.
    fn refused_again(&self, case: &BuiltCase, scene: &Scene<'_>) -> Option<Refusal> {
        let last = scene.refused?;
        let is_same_case = last.label.as_ref().is_some_and(|label| label.as_str() == case.label);
        let is_same_row = match (scene.row, &last.row) {
            (Some(row), Some(refused)) => row.version() == refused.version(),
            (row, _) => row.is_none(),
        };
        if !is_same_case || !is_same_row {
            return None;
        }
        match self.failed(case, scene.key, scene.call, last.row.as_ref()).verdict(&last.reason)? {
            Verdict::Refuse(refusal) => Some(refusal),
            Verdict::Retry | Verdict::Wait => None,
        }
    }

    fn failed<'a>(
        &'a self,
        case: &'a BuiltCase,
        key: &'a [Value],
        call: Option<&'a Call>,
        row: Option<&'a Row>,
    ) -> FailedCase<'a> {
        let reading = self.machine.transitions.get(self.index).map(|one| &one.decl.reading);
        let fenced = reading == Some(&RowReading::Fenced);
        FailedCase { machine: &self.machine, case, key, call, row, fenced }
    }
}

#[async_trait]
impl Prepare for CalledTransition {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let transition = self.transition()?;
        let key = self.key(call);
        let row = self.row(call, &key, cx).await?;
        let gathered = match &transition.decl.gather {
            Some(gather) => gather.gather(call, cx, row.as_ref()).await?,
            None => Gathered::default(),
        };
        let scene = Scene {
            tenant: &call.tenant,
            key: &key,
            call: Some(call),
            row: row.as_ref(),
            gathered: &gathered,
            binds: &gathered.binds,
            refused: cx.refused,
            now_here: cx.clock.now(),
        };
        let case = transition.picked(&scene)?;
        if let Some(refusal) = self.refused_again(case, &scene) {
            return Err(refusal);
        }
        let mut plan = PlanParts::new(key_text(&key), Vec::new(), EventTemplate::named(""));
        let event = self.machine.fire(transition, case, &scene, case.label.clone(), &mut plan)?;
        plan.event = event.ok_or_else(|| defect("an action without an event"))?;
        fence(&mut plan.steps, &gathered.fenced);
        Ok(plan.into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let Ok(transition) = self.transition() else { return Verdict::Retry };
        if let Some(case) = transition.labelled(refused.label()) {
            let failed = self.failed(case, &refused.step.key, Some(call), refused.row);
            return match failed.verdict(refused.reason) {
                // Another case may fit: `pick` sees what was refused.
                Some(_) if transition.cases.len() > 1 => Verdict::Retry,
                Some(verdict) => verdict,
                None => refused.standard(&self.machine.what(&refused.step.key)),
            };
        }
        if let Some(resource) = refused.label().strip_suffix(TOLD) {
            return refused.standard(&format!("{resource} {}", key_text(&refused.step.key)));
        }
        let uses: Vec<PartUse> =
            transition.cases.iter().flat_map(|case| case.decl.uses.iter().cloned()).collect();
        part_verdict(&uses, refused).unwrap_or(Verdict::Retry)
    }

    fn acts_before_commit(&self) -> bool {
        let transition = self.machine.transitions.get(self.index);
        transition.is_some_and(|one| one.decl.gather.as_ref().is_some_and(|gather| gather.acts_outside()))
    }
}

/// Guards the rows that a plan relies on: on the step that names the row, or with an assertion.
fn fence(steps: &mut Vec<Step>, rows: &[Row]) {
    for row in rows {
        let is_on = |step: &Step| step.table.name() == row.table().name() && step.key == row.key();
        match steps.iter_mut().find(|step| is_on(step)) {
            Some(step) => *step = step.clone().guard(Guard::version(row.version())),
            None => {
                let step = Step::assert(row.table(), row.key().iter().cloned());
                steps.push(step.guard(Guard::version(row.version())).label(GATHERED));
            }
        }
    }
}
