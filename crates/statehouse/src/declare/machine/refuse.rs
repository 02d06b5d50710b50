//! What a refused step means: the failed condition is matched with the rules of its case.

use statehouse_store::guard::Comparison;
use statehouse_store::table::VERSION;
use statehouse_store::{Guard, Operand, Reason, Row, Value};

use super::Machine;
use super::check::BuiltCase;
use super::transition::OnRefused;
use crate::action::{Call, Code, Expected, Refusal, Verdict};
use crate::declare::rule::{Rule, Term};

/// A condition of a case that failed.
pub(super) struct FailedCase<'a> {
    pub machine: &'a Machine,
    pub case: &'a BuiltCase,
    pub key: &'a [Value],
    pub call: Option<&'a Call>,
    /// The row as it was when the condition failed.
    pub row: Option<&'a Row>,
    /// Whether the row was read before, under a fence.
    pub fenced: bool,
}

impl FailedCase<'_> {
    /// What follows from the reason of a refusal; `None` if it means the same for every action.
    pub(super) fn verdict(&self, reason: &Reason) -> Option<Verdict> {
        match reason {
            // The row was read, so it was deleted or created since.
            Reason::Absent | Reason::Present if self.fenced => Some(Verdict::Retry),
            Reason::Guard { guard, .. } => Some(self.guard_verdict(guard)),
            _ => None,
        }
    }

    fn guard_verdict(&self, guard: &Guard) -> Verdict {
        if is_version(guard) {
            let expected = self.call.and_then(|call| call.expected);
            let is_callers =
                matches!(expected, Some(Expected::Version(seen)) if *guard == Guard::version(seen));
            return if is_callers && !self.fenced { self.version_conflict() } else { Verdict::Retry };
        }
        if self.case.state.as_ref() == Some(guard) {
            return self.wrong_state();
        }
        let rule = self.case.rules.iter().find(|rule| could_bind(rule.rule.rule(), guard));
        rule.map_or(Verdict::Retry, |rule| self.rule_verdict(&rule.spec.on_refused))
    }

    pub(super) fn version_conflict(&self) -> Verdict {
        let version = self.row.map_or(0, Row::version);
        let what = self.machine.what(self.key);
        let message = format!("{what} is at version {version}: read it again and decide anew");
        self.refuse(Code::VersionConflict, message)
    }

    /// The row is in none of the states that the case begins with.
    pub(super) fn wrong_state(&self) -> Verdict {
        self.in_state(|state| {
            let from = self.case.from.join(" or ");
            let message = format!("{} is {state}; this begins with {from}", self.machine.what(self.key));
            self.refuse(Code::WrongState, message)
        })
    }

    pub(super) fn rule_verdict(&self, on_refused: &OnRefused) -> Verdict {
        self.in_state(|_| self.declared(on_refused))
    }

    /// What is declared for the state that the row is in, or else what the function says.
    fn in_state(&self, otherwise: impl FnOnce(&str) -> Verdict) -> Verdict {
        // A row that is not there has no state.
        let state = match self.row.map_or(Ok(""), |row| self.machine.state_of(row)) {
            Ok(state) => state,
            Err(error) => return Verdict::Refuse(error.into()),
        };
        match self.case.decl.state_refusals.iter().find(|refusal| refusal.state == state) {
            Some(refusal) => self.declared(&refusal.on_refused),
            None => otherwise(state),
        }
    }

    fn declared(&self, on_refused: &OnRefused) -> Verdict {
        match on_refused {
            OnRefused::Retry => Verdict::Retry,
            OnRefused::Refuse(code, message) => self.refuse(*code, self.text(message)),
        }
    }

    fn refuse(&self, code: Code, message: String) -> Verdict {
        Verdict::Refuse(Refusal::new(code, message).at_version(self.row))
    }

    /// A message with its names filled in.
    fn text(&self, template: &str) -> String {
        let mut text = String::new();
        let mut rest = template;
        while let Some((before, after)) = rest.split_once('{') {
            let Some((name, after)) = after.split_once('}') else { break };
            text.push_str(before);
            text.push_str(&self.value(name));
            rest = after;
        }
        text + rest
    }

    fn value(&self, name: &str) -> String {
        match (name, name.strip_prefix("input.")) {
            ("what", _) => self.machine.what(self.key),
            ("state", _) => {
                let column = self.machine.def.states().map(|(column, _)| column);
                column.and_then(|column| self.row?.get(column)).map_or(String::new(), plain)
            }
            (VERSION, _) => self.row.map_or(0, Row::version).to_string(),
            (_, Some(input)) => {
                let given = self.call.and_then(|call| call.input.value(input));
                given.map_or(String::new(), plain)
            }
            (column, None) => self.row.and_then(|row| row.get(column)).map_or(String::new(), plain),
        }
    }
}

/// A value without the quotes of a literal.
fn plain(value: &Value) -> String {
    match value.to_json() {
        serde_json::Value::String(text) => text,
        serde_json::Value::Null => "nothing".to_owned(),
        other => other.to_string(),
    }
}

fn is_version(guard: &Guard) -> bool {
    let Guard::Compare(Operand::Column(name), Comparison::Eq, Operand::Value(_)) = guard else {
        return false;
    };
    name == VERSION
}

/// Whether a conjunct can be what a rule binds to, for some call. Values that a call gives match any; alternatives that a
/// call decides are missing in the guard.
pub(super) fn could_bind(rule: &Rule, guard: &Guard) -> bool {
    if let Guard::Any(parts) = guard
        && parts.is_empty()
    {
        let mut is_given = false;
        rule.terms(&mut |term| {
            is_given |= matches!(term, Term::Input(_) | Term::Claim(_) | Term::Key(_) | Term::Bind(_));
        });
        return is_given;
    }
    match (rule, guard) {
        (Rule::Compare(left, comparison, right), Guard::Compare(a, is, b)) => {
            comparison == is && could_be(left, a) && could_be(right, b)
        }
        (Rule::Null(Term::Column(name)), Guard::Null(column))
        | (Rule::NotNull(Term::Column(name)) | Rule::NotIn(Term::Column(name), _), Guard::NotNull(column))
        | (Rule::In(Term::Column(name), _), Guard::In(column, _))
        | (Rule::NotIn(Term::Column(name), _), Guard::NotIn(column, _)) => name == column,
        (Rule::In(..) | Rule::NotIn(..), Guard::Any(parts) | Guard::All(parts)) => {
            parts.iter().all(|part| could_bind(rule, part))
        }
        (Rule::Any(rules), Guard::Any(parts)) | (Rule::All(rules), Guard::All(parts)) => {
            parts.iter().all(|part| rules.iter().any(|rule| could_bind(rule, part)))
        }
        (Rule::Any(rules) | Rule::All(rules), one) => rules.iter().any(|rule| could_bind(rule, one)),
        _ => false,
    }
}

fn could_be(term: &Term, operand: &Operand) -> bool {
    match (term, operand) {
        (Term::Column(name), Operand::Column(column)) => name == column,
        (Term::Coalesce(name, default), Operand::Coalesce(column, value)) => {
            name == column && default == value
        }
        (Term::Now { plus_micros }, Operand::Now { plus_micros: plus }) => plus_micros == plus,
        (Term::Value(value), Operand::Value(bound)) => value == bound,
        (Term::Input(_) | Term::Claim(_) | Term::Key(_) | Term::Bind(_), Operand::Value(_)) => true,
        _ => false,
    }
}
