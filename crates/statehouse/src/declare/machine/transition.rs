//! Transitions as data: where they begin and end, under which rules, what they assign and what else they change.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::{Expr, Value};

use super::part::{MachinePart, PartUse};
use super::scene::{Gather, Scene};
use crate::action::{Code, Refusal};
use crate::declare::action::ActionSpec;
use crate::declare::rule::{Rule, Term};

/// A name in a declaration: a literal of an archetype, or text of a blueprint.
pub type DeclaredName = Cow<'static, str>;

/// The rows that a transition begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowOrigin {
    /// Whether the row may be absent.
    pub absent: bool,
    /// Which rows that exist are accepted.
    pub present: PresentRows,
}

/// Rows that exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PresentRows {
    /// None: the row must be absent.
    None,
    /// Rows in any state, and rows of a table without states.
    Any,
    /// Rows in one of these states.
    In(Vec<DeclaredName>),
}

/// What becomes of the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransitionTarget {
    /// It enters this state.
    State(DeclaredName),
    /// It keeps its state.
    Same,
    /// It is deleted.
    Deleted,
    /// It is not written. The plan is refused unless the row is in a state of the origin and the rules hold.
    Checked,
}

/// The row exists and is in one of these states.
pub fn from<S: Into<DeclaredName>>(states: impl IntoIterator<Item = S>) -> RowOrigin {
    RowOrigin { absent: false, present: PresentRows::In(states.into_iter().map(Into::into).collect()) }
}

/// The row does not exist.
pub fn absent() -> RowOrigin {
    RowOrigin { absent: true, present: PresentRows::None }
}

/// The row does not exist, or is in one of these states.
pub fn absent_or<S: Into<DeclaredName>>(states: impl IntoIterator<Item = S>) -> RowOrigin {
    RowOrigin { absent: true, ..from(states) }
}

/// The row exists, in any state.
pub fn any() -> RowOrigin {
    RowOrigin { absent: false, present: PresentRows::Any }
}

/// The row does not exist, or is in any state.
pub fn always() -> RowOrigin {
    RowOrigin { absent: true, present: PresentRows::Any }
}

impl RowOrigin {
    /// The row enters a state.
    pub fn to(self, state: impl Into<DeclaredName>) -> TransitionCase {
        TransitionCase::new(self, TransitionTarget::State(state.into()))
    }

    /// The row keeps its state.
    pub fn to_same(self) -> TransitionCase {
        TransitionCase::new(self, TransitionTarget::Same)
    }

    /// The row is deleted.
    pub fn to_deleted(self) -> TransitionCase {
        TransitionCase::new(self, TransitionTarget::Deleted)
    }

    /// The row is only checked.
    pub fn checked(self) -> TransitionCase {
        TransitionCase::new(self, TransitionTarget::Checked)
    }
}

/// What follows from a refused rule.
#[derive(Clone, Debug, PartialEq)]
pub enum OnRefused {
    /// Another operation was faster: prepare and commit again.
    Retry,
    /// The caller is told, with this message. It may name `{what}`, `{state}`, visible columns and `{input.NAME}`.
    Refuse(Code, DeclaredName),
}

/// A condition on the row, with its name and what follows if it does not hold.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleSpec {
    /// Its name within the case.
    pub label: DeclaredName,
    /// The condition.
    pub rule: Rule,
    /// What follows if it does not hold.
    pub on_refused: OnRefused,
}

/// A refusal for rows in one state, which takes precedence over that of the condition that failed.
#[derive(Clone, Debug, PartialEq)]
pub struct StateRefusal {
    /// The state.
    pub state: DeclaredName,
    /// What follows if the row is in it.
    pub on_refused: OnRefused,
}

/// A pure function of a scene.
pub type SceneFn<T> = Arc<dyn Fn(&Scene<'_>) -> T + Send + Sync>;

/// What a column is set to.
#[derive(Clone)]
pub enum Assign {
    /// A term.
    Is(Term),
    /// The sum of two terms.
    Add(Term, Term),
    /// The difference of two terms.
    Subtract(Term, Term),
    /// The bound value or the input of this name. A column for which neither is given is not set.
    Given(DeclaredName),
    /// Computed; still one assignment of one column.
    With(SceneFn<Result<Expr, Refusal>>),
}

impl fmt::Debug for Assign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Assign::Is(term) => write!(f, "{term}"),
            Assign::Add(left, right) => write!(f, "{left} + {right}"),
            Assign::Subtract(left, right) => write!(f, "{left} - {right}"),
            Assign::Given(name) => write!(f, "{name} if given"),
            Assign::With(_) => f.write_str("computed"),
        }
    }
}

impl<T: Into<Term>> From<T> for Assign {
    fn from(term: T) -> Assign {
        Assign::Is(term.into())
    }
}

/// The sum of two terms.
pub fn sum(left: impl Into<Term>, right: impl Into<Term>) -> Assign {
    Assign::Add(left.into(), right.into())
}

/// The difference of two terms.
pub fn difference(left: impl Into<Term>, right: impl Into<Term>) -> Assign {
    Assign::Subtract(left.into(), right.into())
}

/// Null, as the content of a column.
pub fn null() -> Term {
    Term::Value(Value::Null)
}

/// What a transition reads of its row before it is prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RowReading {
    /// Nothing: all conditions are sent with the plan.
    #[default]
    No,
    /// The whole row, and the plan is refused if the row has changed since. Conditions without a clock are judged in memory and
    /// not sent: the fence implies them.
    Fenced,
    /// These columns, which only the insert sets. There is no fence, all conditions are sent, and the functions of the
    /// transition see no other columns. `pick` sees the whole row: it only guesses, and the guards of the case decide.
    Only(Vec<DeclaredName>),
}

/// What fires a transition.
#[derive(Clone)]
pub(super) enum Trigger {
    /// A call of this action.
    Call(Box<ActionSpec>),
    /// A plan of another row, or a worker.
    Part,
    /// The time in the column of the table's deadline; also a call, if there is an action.
    Deadline(Option<Box<ActionSpec>>),
    /// Code outside the machine: this declares the edge only.
    ByHand,
}

/// One way in which a transition changes its row. Most transitions have one case.
#[derive(Clone)]
pub struct TransitionCase {
    pub(super) name: DeclaredName,
    pub(super) from: RowOrigin,
    pub(super) to: TransitionTarget,
    pub(super) state_implied: bool,
    pub(super) rules: Vec<RuleSpec>,
    pub(super) state_refusals: Vec<StateRefusal>,
    pub(super) sets: Vec<(DeclaredName, Assign)>,
    pub(super) event: Option<DeclaredName>,
    pub(super) data: Vec<(DeclaredName, SceneFn<Json>)>,
    pub(super) parts: Vec<PartsFn>,
    pub(super) uses: Vec<PartUse>,
}

/// The further rows that a case changes: a pure function.
pub type PartsFn = SceneFn<Result<Vec<MachinePart>, Refusal>>;

impl TransitionCase {
    fn new(from: RowOrigin, to: TransitionTarget) -> TransitionCase {
        TransitionCase {
            name: DeclaredName::Borrowed(""),
            from,
            to,
            state_implied: false,
            rules: Vec::new(),
            state_refusals: Vec::new(),
            sets: Vec::new(),
            event: None,
            data: Vec::new(),
            parts: Vec::new(),
            uses: Vec::new(),
        }
    }

    /// Names it, among the cases of a transition that has several.
    #[must_use]
    pub fn named(mut self, name: impl Into<DeclaredName>) -> TransitionCase {
        self.name = name.into();
        self
    }

    /// A condition; the caller is refused with this code and message if it does not hold.
    #[must_use]
    pub fn rule(
        self,
        label: impl Into<DeclaredName>,
        rule: Rule,
        code: Code,
        message: impl Into<DeclaredName>,
    ) -> TransitionCase {
        self.with_rule(label.into(), rule, OnRefused::Refuse(code, message.into()))
    }

    /// A condition; the call is prepared again if it does not hold.
    #[must_use]
    pub fn rule_or_retry(self, label: impl Into<DeclaredName>, rule: Rule) -> TransitionCase {
        self.with_rule(label.into(), rule, OnRefused::Retry)
    }

    fn with_rule(mut self, label: DeclaredName, rule: Rule, on_refused: OnRefused) -> TransitionCase {
        self.rules.push(RuleSpec { label, rule, on_refused });
        self
    }

    /// The states of the origin follow from the rules, so that no condition on the state is sent: `why` says how.
    #[must_use]
    pub fn state_implied(mut self, _why: &'static str) -> TransitionCase {
        self.state_implied = true;
        self
    }

    /// A refused call is told this if the row is in this state, whichever condition failed.
    #[must_use]
    pub fn refused_in(
        mut self,
        state: impl Into<DeclaredName>,
        code: Code,
        message: impl Into<DeclaredName>,
    ) -> TransitionCase {
        let on_refused = OnRefused::Refuse(code, message.into());
        self.state_refusals.push(StateRefusal { state: state.into(), on_refused });
        self
    }

    /// Sets a column.
    #[must_use]
    pub fn set(mut self, column: impl Into<DeclaredName>, assign: impl Into<Assign>) -> TransitionCase {
        self.sets.push((column.into(), assign.into()));
        self
    }

    /// Sets columns to the inputs, or bound values, of the same names, where they are given.
    #[must_use]
    pub fn set_given<S: Into<DeclaredName>>(
        mut self,
        columns: impl IntoIterator<Item = S>,
    ) -> TransitionCase {
        let given = columns.into_iter().map(Into::into);
        self.sets.extend(given.map(|name: DeclaredName| (name.clone(), Assign::Given(name))));
        self
    }

    /// Sets a column to what a pure function computes.
    #[must_use]
    pub fn set_with(
        self,
        column: impl Into<DeclaredName>,
        compute: impl Fn(&Scene<'_>) -> Result<Expr, Refusal> + Send + Sync + 'static,
    ) -> TransitionCase {
        self.set(column, Assign::With(Arc::new(compute)))
    }

    /// The name of the event, if not the past tense of the transition's name.
    #[must_use]
    pub fn event(mut self, event: impl Into<DeclaredName>) -> TransitionCase {
        self.event = Some(event.into());
        self
    }

    /// A field of the event, besides the row.
    #[must_use]
    pub fn event_field(
        mut self,
        field: impl Into<DeclaredName>,
        compute: impl Fn(&Scene<'_>) -> Json + Send + Sync + 'static,
    ) -> TransitionCase {
        self.data.push((field.into(), Arc::new(compute)));
        self
    }

    /// Further rows that change in the same plan. `uses` names the transitions that the function may return.
    #[must_use]
    pub fn parts(
        mut self,
        uses: impl IntoIterator<Item = PartUse>,
        parts: impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + Send + Sync + 'static,
    ) -> TransitionCase {
        self.uses.extend(uses);
        self.parts.push(Arc::new(parts));
        self
    }
}

/// The cases of a transition: one, or several that have names.
pub struct TransitionCases(pub(super) Vec<TransitionCase>);

impl From<TransitionCase> for TransitionCases {
    fn from(case: TransitionCase) -> TransitionCases {
        TransitionCases(vec![case])
    }
}

impl<const N: usize> From<[TransitionCase; N]> for TransitionCases {
    fn from(cases: [TransitionCase; N]) -> TransitionCases {
        TransitionCases(cases.into())
    }
}

impl From<Vec<TransitionCase>> for TransitionCases {
    fn from(cases: Vec<TransitionCase>) -> TransitionCases {
        TransitionCases(cases)
    }
}

/// One transition of a machine.
#[derive(Clone)]
pub struct Transition {
    pub(super) name: DeclaredName,
    pub(super) trigger: Trigger,
    pub(super) cases: Vec<TransitionCase>,
    pub(super) pick: Option<SceneFn<Result<usize, Refusal>>>,
    pub(super) reading: RowReading,
    pub(super) gather: Option<Arc<dyn Gather>>,
    pub(super) binds: Vec<(DeclaredName, SceneFn<Result<Value, Refusal>>)>,
    pub(super) row_in_event: bool,
    pub(super) logged: bool,
    pub(super) codes: Vec<Code>,
}

impl Transition {
    fn new(name: DeclaredName, trigger: Trigger, cases: impl Into<TransitionCases>) -> Transition {
        let TransitionCases(cases) = cases.into();
        Transition {
            name,
            trigger,
            cases,
            pick: None,
            reading: RowReading::No,
            gather: None,
            binds: Vec::new(),
            row_in_event: true,
            logged: true,
            codes: Vec::new(),
        }
    }

    /// Callers fire it by this action, which brings its name, route, inputs and summary.
    pub fn call(action: ActionSpec, cases: impl Into<TransitionCases>) -> Transition {
        Transition::new(action.name(), Trigger::Call(Box::new(action)), cases)
    }

    /// Plans of other rows fire it, or workers. It has an event only if one is named.
    pub fn part(name: impl Into<DeclaredName>, cases: impl Into<TransitionCases>) -> Transition {
        Transition::new(name.into(), Trigger::Part, cases)
    }

    /// The sweeper fires it when the time of the table's deadline has come.
    pub fn deadline(name: impl Into<DeclaredName>, cases: impl Into<TransitionCases>) -> Transition {
        Transition::new(name.into(), Trigger::Deadline(None), cases)
    }

    /// The sweeper fires it when the time of the table's deadline has come, and callers may fire it by this action then.
    pub fn deadline_or_call(action: ActionSpec, cases: impl Into<TransitionCases>) -> Transition {
        Transition::new(action.name(), Trigger::Deadline(Some(Box::new(action))), cases)
    }

    /// Code outside the machine changes the row like this. The graph has the edge.
    pub fn by_hand(name: impl Into<DeclaredName>, cases: impl Into<TransitionCases>) -> Transition {
        Transition::new(name.into(), Trigger::ByHand, cases)
    }

    /// Changes all its cases.
    #[must_use]
    pub fn each(mut self, change: impl FnMut(TransitionCase) -> TransitionCase) -> Transition {
        self.cases = self.cases.into_iter().map(change).collect();
        self
    }

    /// Chooses one of several cases by its index. After a refusal it is called again, with the refused step in the scene.
    #[must_use]
    pub fn pick(self, pick: impl Fn(&Scene<'_>) -> usize + Send + Sync + 'static) -> Transition {
        self.try_pick(move |scene| Ok(pick(scene)))
    }

    /// As [`Transition::pick`], by columns of the row, which may be damaged.
    #[must_use]
    pub fn try_pick(
        mut self,
        pick: impl Fn(&Scene<'_>) -> Result<usize, Refusal> + Send + Sync + 'static,
    ) -> Transition {
        self.pick = Some(Arc::new(pick));
        self
    }

    /// Reads the row first, and is refused if it has changed since ([`RowReading::Fenced`]).
    #[must_use]
    pub fn reading(mut self) -> Transition {
        self.reading = RowReading::Fenced;
        self
    }

    /// Reads columns that only the insert sets ([`RowReading::Only`]).
    #[must_use]
    pub fn reading_only<S: Into<DeclaredName>>(mut self, columns: impl IntoIterator<Item = S>) -> Transition {
        self.reading = RowReading::Only(columns.into_iter().map(Into::into).collect());
        self
    }

    /// Reads other rows, or acts outside the store, before the plan is prepared.
    #[must_use]
    pub fn gather(mut self, gather: impl Gather + 'static) -> Transition {
        self.gather = Some(Arc::new(gather));
        self
    }

    /// A value that rules, assignments and parts name by `bind(NAME)`.
    #[must_use]
    pub fn bind(
        mut self,
        name: impl Into<DeclaredName>,
        compute: impl Fn(&Scene<'_>) -> Result<Value, Refusal> + Send + Sync + 'static,
    ) -> Transition {
        self.binds.push((name.into(), Arc::new(compute)));
        self
    }

    /// The event does not carry the row: who follows it looks the row up.
    #[must_use]
    pub fn without_row(mut self) -> Transition {
        self.row_in_event = false;
        self
    }

    /// It leaves no event and is not remembered, so that its guards must make it safe to repeat. Not for actions: the answer to
    /// a repetition comes from the log.
    #[must_use]
    pub fn unlogged(mut self) -> Transition {
        self.logged = false;
        self
    }

    /// Codes that the functions of the transition, its parts or what it gathers refuse with, besides those of its rules.
    #[must_use]
    pub fn codes(mut self, codes: &[Code]) -> Transition {
        self.codes.extend(codes);
        self
    }
}
