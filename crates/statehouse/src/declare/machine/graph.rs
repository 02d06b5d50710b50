//! The graph of a machine: its states, and the edges that its transitions are.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use super::Machine;
use super::check::BuiltTransition;
use super::transition::{DeclaredName, TransitionTarget, Trigger};
use crate::action::WAIT;
use crate::declare::table::TableDef;

/// What can happen to a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graph {
    /// The resource.
    pub resource: String,
    /// The column with the state; empty for a table without states.
    pub column: String,
    /// The states that a row can be stored in.
    pub states: Vec<DeclaredName>,
    /// One for each case of a transition and each state that it leaves.
    pub edges: Vec<Edge>,
}

/// One step of a row from one state to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The state before; `None` if the row does not exist.
    pub from: Option<DeclaredName>,
    /// The state after; `None` if the row is deleted.
    pub to: Option<DeclaredName>,
    /// The transition.
    pub transition: DeclaredName,
    /// Its case; empty if there is only one.
    pub case: DeclaredName,
    /// The name of its event without that of the resource; `None` if it leaves none.
    pub event: Option<String>,
    /// What fires it.
    pub kind: EdgeKind,
}

/// What fires a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EdgeKind {
    /// A caller.
    Call,
    /// The sweeper, when the deadline has come.
    Deadline,
    /// The sweeper or a caller, when the deadline has come.
    DeadlineOrCall,
    /// A plan of another row, or a worker.
    Part,
    /// Code outside the machine.
    ByHand,
}

impl Machine {
    /// The graph of its transitions.
    pub fn graph(&self) -> Graph {
        Graph::of(&self.resource, &self.def, &self.transitions)
    }

    /// The actions that bring a row from nothing to where a transition can begin, in order.
    pub(super) fn path_to(&self, transition: &str) -> Option<Vec<String>> {
        let mut path = self.after.clone();
        path.extend(self.graph().path_to(transition)?);
        Some(path)
    }
}

impl Graph {
    pub(super) fn of(resource: &str, def: &TableDef, transitions: &[BuiltTransition]) -> Graph {
        let (column, states) = def.states().unwrap_or(("", &[]));
        let mut edges = Vec::new();
        for transition in transitions {
            let kind = match transition.decl.trigger {
                Trigger::Call(_) => EdgeKind::Call,
                Trigger::Part => EdgeKind::Part,
                Trigger::Deadline(None) => EdgeKind::Deadline,
                Trigger::Deadline(Some(_)) => EdgeKind::DeadlineOrCall,
                Trigger::ByHand => EdgeKind::ByHand,
            };
            for case in &transition.cases {
                let absent = case.decl.from.absent.then_some(None);
                // A table without states is drawn with one, which has no name.
                let present = match (states.is_empty(), &case.decl.from.present) {
                    (true, super::transition::PresentRows::Any) => vec![DeclaredName::Borrowed("")],
                    _ => case.from.clone(),
                };
                for from in absent.into_iter().chain(present.into_iter().map(Some)) {
                    let to = match &case.decl.to {
                        TransitionTarget::State(state) => Some(state.clone()),
                        TransitionTarget::Same | TransitionTarget::Checked => {
                            Some(from.clone().unwrap_or_default())
                        }
                        TransitionTarget::Deleted => None,
                    };
                    let event = case.event.as_deref().and_then(|event| event.split_once('.'));
                    edges.push(Edge {
                        from,
                        to,
                        transition: transition.decl.name.clone(),
                        case: case.decl.name.clone(),
                        event: event.map(|(_, event)| event.to_owned()),
                        kind,
                    });
                }
            }
        }
        Graph { resource: resource.to_owned(), column: column.to_owned(), states: states.to_vec(), edges }
    }

    /// States that no path from nothing leads to.
    pub fn unreachable(&self) -> Vec<DeclaredName> {
        let mut reached: BTreeSet<Option<&DeclaredName>> = BTreeSet::from([None]);
        loop {
            let before = reached.len();
            let open = self.edges.iter().filter(|edge| reached.contains(&edge.from.as_ref()));
            let next: Vec<Option<&DeclaredName>> = open.map(|edge| edge.to.as_ref()).collect();
            reached.extend(next);
            if reached.len() == before {
                break;
            }
        }
        self.states.iter().filter(|state| !reached.contains(&Some(*state))).cloned().collect()
    }

    /// The shortest list of actions after which a transition can begin; [`WAIT`] before one that has to be due. `None` if
    /// actions alone do not lead there.
    pub fn path_to(&self, transition: &str) -> Option<Vec<String>> {
        let of_it: Vec<&Edge> = self.edges.iter().filter(|edge| edge.transition == transition).collect();
        let waits =
            of_it.iter().any(|edge| matches!(edge.kind, EdgeKind::Deadline | EdgeKind::DeadlineOrCall));
        let goals: Vec<Option<&DeclaredName>> = of_it.iter().map(|edge| edge.from.as_ref()).collect();
        let mut seen: BTreeSet<Option<&DeclaredName>> = BTreeSet::from([None]);
        let mut queue: VecDeque<(Option<&DeclaredName>, Vec<String>)> = VecDeque::from([(None, Vec::new())]);
        while let Some((state, path)) = queue.pop_front() {
            if goals.contains(&state) {
                return Some(path.into_iter().chain(waits.then(|| WAIT.to_owned())).collect());
            }
            for edge in self.edges.iter().filter(|edge| edge.from.as_ref() == state) {
                let wait = edge.kind == EdgeKind::DeadlineOrCall;
                let is_action = wait || matches!(edge.kind, EdgeKind::Call | EdgeKind::ByHand);
                if is_action && edge.to.is_some() && seen.insert(edge.to.as_ref()) {
                    let mut path = path.clone();
                    path.extend(wait.then(|| WAIT.to_owned()));
                    path.push(edge.transition.to_string());
                    queue.push_back((edge.to.as_ref(), path));
                }
            }
        }
        None
    }

    /// Where a row can be after an event, if it can be in these states before (`None`: it does not exist). Edges without an event
    /// may be taken at any time. `to` is the state that the event shows, if it does. Empty if the event is not on a path.
    pub fn after_event(
        &self,
        before: &BTreeSet<Option<DeclaredName>>,
        event: &str,
        to: Option<&str>,
    ) -> BTreeSet<Option<DeclaredName>> {
        let before = self.closure(before);
        let taken = self.edges.iter().filter(|edge| {
            before.contains(&edge.from)
                && edge.event.as_deref() == Some(event)
                && to.is_none_or(|to| edge.to.as_deref() == Some(to) || edge.to.is_none())
        });
        self.closure(&taken.map(|edge| edge.to.clone()).collect())
    }

    /// These states, and those that edges without an event lead to.
    fn closure(&self, states: &BTreeSet<Option<DeclaredName>>) -> BTreeSet<Option<DeclaredName>> {
        let mut closed = states.clone();
        loop {
            let silent = self.edges.iter().filter(|edge| edge.event.is_none() && closed.contains(&edge.from));
            let more: Vec<Option<DeclaredName>> = silent.map(|edge| edge.to.clone()).collect();
            let before = closed.len();
            closed.extend(more);
            if closed.len() == before {
                return closed;
            }
        }
    }

    /// The graph as a Mermaid state diagram. Edges between the same two states share an arrow; what the server does by
    /// itself is in parentheses.
    pub fn mermaid(&self) -> String {
        let mut arrows: BTreeMap<(usize, usize), Vec<String>> = BTreeMap::new();
        let rank = |state: &Option<DeclaredName>| {
            let index = state.as_ref().and_then(|state| self.states.iter().position(|known| known == state));
            index.map_or(0, |index| index + 1)
        };
        for edge in &self.edges {
            let label = match edge.kind {
                EdgeKind::Call | EdgeKind::ByHand | EdgeKind::Part => edge.transition.to_string(),
                EdgeKind::Deadline | EdgeKind::DeadlineOrCall => format!("({})", edge.transition),
            };
            let labels = arrows.entry((rank(&edge.from), rank(&edge.to))).or_default();
            if !labels.contains(&label) {
                labels.push(label);
            }
        }
        let name = |rank: usize| match rank.checked_sub(1).and_then(|index| self.states.get(index)) {
            Some(state) => state.to_string(),
            None => "[*]".to_owned(),
        };
        let mut text = String::from("stateDiagram-v2\n");
        for ((from, to), labels) in arrows {
            let _ = writeln!(text, "    {} --> {}: {}", name(from), name(to), labels.join(", "));
        }
        text
    }
}
