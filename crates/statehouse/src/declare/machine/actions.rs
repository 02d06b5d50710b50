//! The actions of a machine, and the table that describes them.

use std::sync::Arc;

use statehouse_store::{Row, StoreError};

use super::Machine;
use super::check::{BuiltCase, BuiltTransition};
use super::prepare::CalledTransition;
use super::transition::{OnRefused, PresentRows, Trigger};
use crate::action::Code;
use crate::declare::action::ActionSpec;

impl Machine {
    /// The actions that callers can fire, in the order of their declaration.
    pub fn actions(self: &Arc<Machine>) -> Vec<ActionSpec> {
        let mut actions = Vec::new();
        for (index, transition) in self.transitions.iter().enumerate() {
            let action = match &transition.decl.trigger {
                Trigger::Call(action) | Trigger::Deadline(Some(action)) => action,
                Trigger::Part | Trigger::Deadline(None) | Trigger::ByHand => continue,
            };
            let mut action = ActionSpec::clone(action).codes(&transition.codes());
            if !action.has_after()
                && let Some(path) = self.path_to(&transition.decl.name)
            {
                action = action.after(path.iter().map(String::as_str));
            }
            actions.push(action.writes(CalledTransition { machine: self.clone(), index }));
        }
        actions
    }

    /// The state of a row; empty if the rows of this machine have none.
    ///
    /// # Errors
    /// As of [`Row::get_text`].
    pub(super) fn state_of<'r>(&self, row: &'r Row) -> Result<&'r str, StoreError> {
        match self.def.states() {
            Some((column, _)) => row.get_text(column),
            None => Ok(""),
        }
    }

    /// The code of a call of a transition on a row in a state that it does not begin with. `None` if the rules decide.
    pub fn refusal_in(&self, transition: &str, state: &str) -> Option<Code> {
        let found = self.transitions.iter().find(|one| one.decl.name == transition)?;
        let case = found.cases.first()?;
        let declared = case.decl.state_refusals.iter().find(|refusal| refusal.state == state);
        match declared.map(|refusal| &refusal.on_refused) {
            Some(OnRefused::Refuse(code, _)) => Some(*code),
            Some(OnRefused::Retry) => None,
            None => case.state.is_some().then_some(Code::WrongState),
        }
    }
}

impl BuiltTransition {
    /// The codes that it can be refused with.
    pub(super) fn codes(&self) -> Vec<Code> {
        let mut codes = Vec::new();
        for code in self.cases.iter().flat_map(BuiltCase::codes).chain(self.decl.codes.iter().copied()) {
            if !codes.contains(&code) {
                codes.push(code);
            }
        }
        codes
    }
}

impl BuiltCase {
    fn codes(&self) -> Vec<Code> {
        let mut codes = Vec::new();
        if self.decl.from.present == PresentRows::None {
            codes.push(Code::AlreadyExists);
        } else {
            // A caller that says which version it has seen expects a row.
            codes.push(Code::NotFound);
        }
        if self.state.is_some() {
            codes.push(Code::WrongState);
        }
        let rules = self.rules.iter().map(|rule| &rule.spec.on_refused);
        let states = self.decl.state_refusals.iter().map(|refusal| &refusal.on_refused);
        codes.extend(rules.chain(states).filter_map(|on_refused| match on_refused {
            OnRefused::Refuse(code, _) => Some(*code),
            OnRefused::Retry => None,
        }));
        if self.decl.from.present != PresentRows::None {
            codes.push(Code::VersionConflict);
        }
        codes
    }
}
