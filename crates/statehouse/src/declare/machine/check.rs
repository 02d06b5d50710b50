//! The check of a declaration, and the transitions as they are bound to calls.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use statehouse_store::guard::{column, is_in};
use statehouse_store::table::VERSION;
use statehouse_store::{Guard, Type, Value};

use super::graph::Graph;
use super::transition::{
    Assign, DeclaredName, OnRefused, PresentRows, RowReading, RuleSpec, Transition, TransitionCase,
    TransitionTarget, Trigger,
};
use super::{Machine, MachineError, MachineSpec};
use crate::action::Code;
use crate::declare::rule::{CheckedRule, RuleColumns, Term, col, now};
use crate::declare::table::{Deadline, TableDef, UPDATED_AT};
use crate::form::Property;
use crate::infra::due::{DUE_AT, DUE_SHARD};

/// The label of the rule that every deadline transition has.
pub(super) const DUE_RULE: &str = "due";

/// A transition as it was declared, and its cases as they are bound.
pub(super) struct BuiltTransition {
    pub decl: Transition,
    pub cases: Vec<BuiltCase>,
}

/// A case whose names and types were checked.
pub(super) struct BuiltCase {
    pub decl: TransitionCase,
    /// The label of its step: `fire/last`.
    pub label: String,
    /// The states of rows that it begins with.
    pub from: Vec<DeclaredName>,
    /// The condition on the state, if one is needed.
    pub state: Option<Guard>,
    pub rules: Vec<BuiltRule>,
    pub sets: Vec<(DeclaredName, Type, Assign)>,
    pub due: DueChange,
    /// The full name of its event.
    pub event: Option<String>,
}

pub(super) struct BuiltRule {
    pub spec: RuleSpec,
    pub rule: CheckedRule,
    /// Whether the call alone decides it.
    pub is_of_call: bool,
}

/// What becomes of the time at which the row is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DueChange {
    Unchanged,
    /// It is the expression that the deadline's column is set to.
    Assigned,
    /// It is what the deadline's column holds.
    FromColumn,
    Cleared,
}

impl BuiltTransition {
    pub fn is_part(&self) -> bool {
        matches!(self.decl.trigger, Trigger::Part)
    }

    pub fn is_deadline(&self) -> bool {
        matches!(self.decl.trigger, Trigger::Deadline(_))
    }
}

impl MachineSpec {
    /// Checks the declaration.
    pub fn build(self) -> Result<Arc<Machine>, MachineError> {
        let MachineSpec { resource, def, worker, after, transitions } = self;
        let built = MachineChecks { resource: &resource, def: &def }.transitions(transitions);
        let transitions = built.map_err(|why| MachineError { resource: resource.clone(), why })?;
        let sweeper = transitions.iter().find(|one| one.is_deadline());
        let worker = worker.or_else(|| sweeper.map(|one| format!("{resource}.{}", one.decl.name)));
        let used = transitions.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Arc::new(Machine { resource, def, worker, after, transitions, used }))
    }
}

struct MachineChecks<'a> {
    resource: &'a str,
    def: &'a TableDef,
}

type CheckedMachine<T> = Result<T, String>;

fn ensure(holds: bool, why: impl FnOnce() -> String) -> CheckedMachine<()> {
    if holds { Ok(()) } else { Err(why()) }
}

impl MachineChecks<'_> {
    fn states(&self) -> &[DeclaredName] {
        self.def.states().map_or(&[], |(_, states)| states)
    }

    /// The deadline, unless the archetype sets due times by hand.
    fn deadline(&self) -> Option<&Deadline> {
        self.def.deadline().filter(|deadline| !deadline.states.is_empty())
    }

    fn transitions(&self, transitions: Vec<Transition>) -> CheckedMachine<Vec<BuiltTransition>> {
        let mut built: Vec<BuiltTransition> = Vec::with_capacity(transitions.len());
        for transition in transitions {
            let name = transition.name.clone();
            let twice = built.iter().any(|other| other.decl.name == name);
            ensure(!twice, || format!("`{name}` is declared twice"))?;
            built.push(self.transition(transition).map_err(|why| format!("`{name}`: {why}"))?);
        }
        let unreachable = Graph::of(self.resource, self.def, &built).unreachable();
        ensure(unreachable.is_empty(), || format!("no transition leads to {}", unreachable.join(", ")))?;
        for state in self.deadline().into_iter().flat_map(|deadline| &deadline.states) {
            let mut ends = built.iter().filter(|one| one.is_deadline()).flat_map(|one| &one.cases);
            let is_left = ends.any(|case| case.from.contains(state));
            ensure(is_left, || format!("{state} has a deadline, and no deadline transition leaves it"))?;
        }
        Ok(built)
    }

    fn transition(&self, mut decl: Transition) -> CheckedMachine<BuiltTransition> {
        let inputs = match &decl.trigger {
            Trigger::Call(action) | Trigger::Deadline(Some(action)) => action.inputs().to_vec(),
            _ => Vec::new(),
        };
        let several = decl.cases.len() > 1;
        ensure(!decl.cases.is_empty(), || "it has no case".into())?;
        // Code that fires a part names the case, or leaves it to `pick`.
        let is_picked = matches!(decl.trigger, Trigger::Call(_) | Trigger::Deadline(_));
        ensure(!is_picked || several == decl.pick.is_some(), || "several cases need a `pick`".into())?;
        ensure(decl.logged || !decl.is_called(), || "an action is answered from its event".into())?;
        if let Trigger::Deadline(_) = decl.trigger {
            ensure(decl.gather.is_none(), || "a sweeper cannot gather".into())?;
            self.add_due_rule(&mut decl)?;
        }
        if let RowReading::Only(columns) = &decl.reading {
            for name in columns {
                let known = self.def.columns().iter().find(|known| known.column.name == *name);
                let immutable = known.ok_or_else(|| self.unknown(name))?.immutable;
                ensure(immutable, || format!("`{name}` can change: read it with `reading`"))?;
            }
        }
        let mut cases: Vec<BuiltCase> = Vec::with_capacity(decl.cases.len());
        for case in &decl.cases {
            let built = self.case(case, &decl, &inputs)?;
            let twice = cases.iter().any(|other| other.label == built.label);
            ensure(!twice, || format!("the case `{}` is declared twice", case.name))?;
            cases.push(built);
        }
        Ok(BuiltTransition { decl, cases })
    }

    fn add_due_rule(&self, decl: &mut Transition) -> CheckedMachine<()> {
        let deadline = self.deadline().ok_or("the table has no deadline")?;
        for case in &mut decl.cases {
            let from = self.states_before(case)?;
            let stray = from.iter().find(|state| !deadline.states.contains(state));
            ensure(stray.is_none() && !case.from.absent, || {
                format!(
                    "{stray:?} has no deadline: a deadline transition leaves {}",
                    deadline.states.join(", ")
                )
            })?;
            if case.rules.iter().any(|rule| rule.label == DUE_RULE) {
                continue;
            }
            let message = format!("{{what}} is not due before {{{}}}", deadline.column);
            let on_refused = OnRefused::Refuse(Code::WrongState, message.into());
            let rule = col(deadline.column).le(now());
            case.rules.insert(0, RuleSpec { label: DUE_RULE.into(), rule, on_refused });
        }
        Ok(())
    }

    /// The states of rows that a case begins with.
    fn states_before(&self, case: &TransitionCase) -> CheckedMachine<Vec<DeclaredName>> {
        match &case.from.present {
            PresentRows::None => Ok(Vec::new()),
            PresentRows::Any => Ok(self.states().to_vec()),
            PresentRows::In(states) => {
                ensure(!states.is_empty(), || "it begins with no state".into())?;
                states.iter().try_for_each(|state| self.known_state(state))?;
                Ok(states.clone())
            }
        }
    }

    fn known_state(&self, state: &DeclaredName) -> CheckedMachine<()> {
        let known = || format!("there is no state {state}; there are {}", self.states().join(", "));
        ensure(self.states().contains(state), known)
    }

    fn case(
        &self,
        case: &TransitionCase,
        decl: &Transition,
        inputs: &[Property],
    ) -> CheckedMachine<BuiltCase> {
        let from = self.states_before(case)?;
        if let TransitionTarget::State(state) = &case.to {
            self.known_state(state)?;
        }
        let writes = matches!(case.to, TransitionTarget::State(_) | TransitionTarget::Same);
        ensure(writes || case.sets.is_empty(), || "a row that is not stored cannot be assigned".into())?;
        case.state_refusals.iter().try_for_each(|refusal| self.known_state(&refusal.state))?;
        let refusals = case.state_refusals.iter().map(|refusal| &refusal.on_refused);
        for on_refused in refusals.chain(case.rules.iter().map(|rule| &rule.on_refused)) {
            if let OnRefused::Refuse(_, message) = on_refused {
                self.message(message, inputs)?;
            }
        }
        let rules = case.rules.iter().map(|rule| self.rule(rule, case, inputs));
        let rules = rules.collect::<CheckedMachine<Vec<_>>>()?;
        let sets = case.sets.iter().map(|(name, assign)| self.set(name, assign, case, inputs));
        let sets = sets.collect::<CheckedMachine<Vec<_>>>()?;
        let due = self.due_change(case, &from)?;
        let label = match &*case.name {
            "" => decl.name.to_string(),
            name => format!("{}/{name}", decl.name),
        };
        let event = match (&case.event, &decl.trigger) {
            (Some(event), _) => Some(event.clone()),
            (None, Trigger::Part) => None,
            (None, _) => Some(past_tense(&decl.name).into()),
        };
        let event = event.filter(|_| decl.logged).map(|event| format!("{}.{event}", self.resource));
        let state = self.state_guard(case, &from);
        Ok(BuiltCase { decl: case.clone(), label, from, state, rules, sets, due, event })
    }

    fn state_guard(&self, case: &TransitionCase, from: &[DeclaredName]) -> Option<Guard> {
        let (name, states) = self.def.states()?;
        let is_every = states.iter().all(|state| from.contains(state));
        if from.is_empty() || is_every || case.state_implied {
            return None;
        }
        let value = |state: &DeclaredName| Value::from(state.as_ref());
        Some(match from {
            [only] => column(name).eq(value(only)),
            several => is_in(name, several.iter().map(value)),
        })
    }

    fn rule(&self, spec: &RuleSpec, case: &TransitionCase, inputs: &[Property]) -> CheckedMachine<BuiltRule> {
        let columns = RuleColumns::from(self.def);
        let rule = spec.rule.clone().checked(&columns, inputs);
        let rule = rule.map_err(|error| format!("rule `{}`: {error}", spec.label))?;
        let is_of_call = rule.rule().columns().is_empty() && !rule.reads_clock();
        ensure(is_of_call || case.from.present != PresentRows::None, || {
            format!("rule `{}`: a row that is absent has no columns", spec.label)
        })?;
        Ok(BuiltRule { spec: spec.clone(), rule, is_of_call })
    }

    fn set(
        &self,
        name: &DeclaredName,
        assign: &Assign,
        case: &TransitionCase,
        inputs: &[Property],
    ) -> CheckedMachine<(DeclaredName, Type, Assign)> {
        let known = self.def.columns().iter().find(|known| known.column.name == *name);
        let known = known.ok_or_else(|| self.unknown(name))?;
        let state = self.def.states().map(|(column, _)| column);
        let automatic = [Some(UPDATED_AT), state];
        let is_due =
            [DUE_AT, DUE_SHARD].contains(&&**name) && self.deadline().is_some_and(|d| d.column != *name);
        ensure(!automatic.contains(&Some(name)) && !is_due, || format!("`{name}` is set by the machine"))?;
        ensure(!known.immutable || case.from.present == PresentRows::None, || {
            format!("only the insert sets `{name}`")
        })?;
        let terms: &[&Term] = match assign {
            Assign::Is(term) => &[term],
            Assign::Add(left, right) | Assign::Subtract(left, right) => &[left, right],
            // What is bound is only known when it is fired.
            Assign::Given(_) | Assign::With(_) => &[],
        };
        for term in terms {
            match term {
                Term::Column(name) | Term::Coalesce(name, _) => {
                    let known = self.def.table().type_of(name).is_some() || name == VERSION;
                    ensure(known, || self.unknown(name))?;
                }
                Term::Input(name) => self.input(name, inputs)?,
                _ => {}
            }
        }
        Ok((name.clone(), known.column.kind, assign.clone()))
    }

    fn input(&self, name: &str, inputs: &[Property]) -> CheckedMachine<()> {
        let known = inputs.iter().any(|input| input.name == name);
        ensure(known, || format!("there is no input `{name}`: `takes` declares inputs"))
    }

    /// The names in a message: of inputs and visible columns.
    fn message(&self, text: &str, inputs: &[Property]) -> CheckedMachine<()> {
        for name in names_in(text) {
            match name.strip_prefix("input.") {
                Some(input) => self.input(input, inputs)?,
                None if ["what", "state", VERSION].contains(&name) => {}
                None => {
                    let known = self.def.columns().iter().find(|known| known.column.name == name);
                    let hidden = known.ok_or_else(|| self.unknown(name))?.hidden;
                    ensure(!hidden, || format!("a message shows the hidden column `{name}`"))?;
                }
            }
        }
        Ok(())
    }

    fn due_change(&self, case: &TransitionCase, from: &[DeclaredName]) -> CheckedMachine<DueChange> {
        let Some(deadline) = self.deadline() else { return Ok(DueChange::Unchanged) };
        let assigned = case.sets.iter().any(|(name, _)| *name == deadline.column);
        let due_before = from.iter().filter(|state| deadline.states.contains(state)).count();
        let (all_due, some_due) = (due_before == from.len() && !case.from.absent, due_before > 0);
        let enters = match &case.to {
            TransitionTarget::State(state) => deadline.states.contains(state),
            TransitionTarget::Same if assigned && some_due => {
                ensure(all_due, || {
                    format!("`{}` is assigned in states with and without a deadline", deadline.column)
                })?;
                true
            }
            TransitionTarget::Same | TransitionTarget::Deleted | TransitionTarget::Checked => {
                return Ok(DueChange::Unchanged);
            }
        };
        match (enters, assigned) {
            (true, true) => Ok(DueChange::Assigned),
            (true, false) if all_due => Ok(DueChange::Unchanged),
            (true, false) => {
                let has_time = deadline.column != DUE_AT && !case.from.absent;
                ensure(has_time, || format!("it enters a state with a deadline: set `{}`", deadline.column))?;
                Ok(DueChange::FromColumn)
            }
            (false, _) if some_due => Ok(DueChange::Cleared),
            (false, _) => Ok(DueChange::Unchanged),
        }
    }

    fn unknown(&self, name: &str) -> String {
        let known: Vec<&str> = self.def.columns().iter().map(|def| def.column.name.as_str()).collect();
        format!("there is no column `{name}`; there are {}", known.join(", "))
    }
}

impl Transition {
    fn is_called(&self) -> bool {
        matches!(self.trigger, Trigger::Call(_) | Trigger::Deadline(Some(_)))
    }
}

/// The names in braces within a message.
pub(super) fn names_in(text: &str) -> impl Iterator<Item = &str> {
    text.split('{').skip(1).filter_map(|rest| rest.split_once('}').map(|(name, _)| name))
}

/// The regular past tense of a verb: `expired` for `expire`.
fn past_tense(verb: &str) -> String {
    if verb.ends_with('e') { format!("{verb}d") } else { format!("{verb}ed") }
}
