//! The states of a declared workflow: their names, patterns of them, and what is wrong with a graph of them. Pure.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use crate::blueprint::nearest;
use crate::blueprint::problem::BlueprintProblem;

/// Bytes of a state's name.
const NAME_BYTES_MAX: usize = 64;
/// States of a workflow. A condition on the state names at most so many.
pub(super) const STATES_MAX: usize = 100;
/// The end of a pattern for the sub-states of a state.
const SUB_STATES: &str = ".*";
/// The pattern for every state that is not final.
const EVERY: &str = "*";

/// A text of the blueprint, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlacedText {
    pub text: String,
    pub span: Range<usize>,
}

/// A transition as far as states are concerned.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StateEdge {
    pub name: String,
    pub name_span: Range<usize>,
    pub from: Vec<PlacedText>,
    /// `None`: the row keeps its state.
    pub to: Option<PlacedText>,
    pub after: Option<(Duration, Range<usize>)>,
}

/// The states of a workflow, in the order in which the blueprint names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StateSet {
    pub states: Vec<String>,
    pub initial: String,
    pub finals: Vec<String>,
}

/// What `from` of each transition stands for.
pub(super) type Expanded = Vec<Vec<String>>;

/// Whether a text can be the name of a state: words with dots between them, that begin with a letter.
fn is_state_name(name: &str) -> bool {
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphabetic())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    name.len() <= NAME_BYTES_MAX && name.split('.').all(is_word)
}

fn bad_name(name: &PlacedText) -> Option<BlueprintProblem> {
    if is_state_name(&name.text) {
        return None;
    }
    let title = format!("`{}` cannot be the name of a state", name.text);
    let advice =
        format!("write letters, digits and `_`, with dots before sub-states; at most {NAME_BYTES_MAX} bytes");
    Some(BlueprintProblem::at(name.span.clone(), title).advice(advice))
}

fn listed<'s>(names: impl IntoIterator<Item = &'s String>) -> String {
    names.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

impl StateSet {
    /// The states that a declaration names, or what is wrong with the names.
    pub fn of(
        initial: &PlacedText,
        finals: &[PlacedText],
        edges: &[StateEdge],
    ) -> Result<StateSet, Vec<BlueprintProblem>> {
        let mut problems = Vec::new();
        let mut places: Vec<&PlacedText> = Vec::new();
        for name in [initial].into_iter().chain(edges.iter().filter_map(|edge| edge.to.as_ref())) {
            problems.extend(bad_name(name));
            if !places.iter().any(|known| known.text == name.text) {
                places.push(name);
            }
        }
        for place in &places {
            let below = format!("{}.", place.text);
            let subs: Vec<&str> =
                places.iter().map(|one| &*one.text).filter(|one| one.starts_with(&below)).collect();
            if !subs.is_empty() {
                let title = format!("`{}` has sub-states, so a row cannot be in it itself", place.text);
                let advice = format!("name one of {}", subs.join(", "));
                problems.push(BlueprintProblem::at(place.span.clone(), title).advice(advice));
            }
        }
        let states: Vec<String> = places.iter().map(|place| place.text.clone()).collect();
        if states.len() > STATES_MAX {
            let title = format!("a workflow has at most {STATES_MAX} states, and this one {}", states.len());
            problems.push(BlueprintProblem::at(initial.span.clone(), title));
        }
        let finals = finals.iter().filter(|name| match states.contains(&name.text) {
            true => true,
            false => {
                problems.push(unknown(name, &states));
                false
            }
        });
        let finals: Vec<String> = finals.map(|name| name.text.clone()).collect();
        let set = StateSet { states, initial: initial.text.clone(), finals };
        if problems.is_empty() { Ok(set) } else { Err(problems) }
    }

    fn is_final(&self, state: &str) -> bool {
        self.finals.iter().any(|known| known == state)
    }

    /// What `from` of each transition stands for, or the patterns that stand for nothing.
    pub fn expand(&self, edges: &[StateEdge]) -> Result<Expanded, Vec<BlueprintProblem>> {
        let mut problems = Vec::new();
        let mut expanded = Vec::new();
        for edge in edges {
            let mut states: Vec<String> = Vec::new();
            for pattern in &edge.from {
                let found: Vec<&String> =
                    self.states.iter().filter(|state| self.matches(&pattern.text, state)).collect();
                if found.is_empty() {
                    problems.push(unknown(pattern, &self.states));
                }
                for state in found {
                    if !states.contains(state) {
                        states.push(state.clone());
                    }
                }
            }
            expanded.push(states);
        }
        if problems.is_empty() { Ok(expanded) } else { Err(problems) }
    }

    /// Whether a name, or a pattern like `a.*`, stands for a state.
    pub fn matches(&self, pattern: &str, state: &str) -> bool {
        match pattern.strip_suffix(SUB_STATES) {
            _ if pattern == EVERY => !self.is_final(state),
            Some(parent) => state.strip_prefix(parent).is_some_and(|rest| rest.starts_with('.')),
            None => state == pattern,
        }
    }

    /// States that no row can reach, each where it is first named; and what timers cannot do.
    pub fn problems(&self, edges: &[StateEdge], from: &Expanded) -> Vec<BlueprintProblem> {
        let mut problems = self.unreachable(edges, from);
        for (index, state) in self.states.iter().enumerate() {
            let timers: Vec<&StateEdge> = timers_of(state, edges, from).collect();
            if let [first, second, ..] = timers.as_slice() {
                let span = second.after.as_ref().map_or(0..0, |(_, span)| span.clone());
                let title = format!("{state} is left by two timers, `{}` and `{}`", first.name, second.name);
                let problem = BlueprintProblem::at(span, title);
                problems
                    .push(problem.advice("a row waits for one time: give one of them a state of its own"));
            }
            if let Some((chain, span)) = self.immediate_loop(state, edges, from)
                && chain.iter().all(|other| self.rank(other) >= index)
            {
                let title = format!(
                    "timers without a pause lead from {} and never end",
                    chain.iter().chain([state]).map(String::as_str).collect::<Vec<_>>().join(" to ")
                );
                problems.push(BlueprintProblem::at(span, title).advice("give one of them a longer `after`"));
            }
        }
        problems
    }

    fn rank(&self, state: &str) -> usize {
        self.states.iter().position(|known| known == state).unwrap_or(usize::MAX)
    }

    fn unreachable(&self, edges: &[StateEdge], from: &Expanded) -> Vec<BlueprintProblem> {
        let mut reached: BTreeSet<&str> = BTreeSet::from([self.initial.as_str()]);
        loop {
            let open = edges.iter().zip(from);
            let open = open.filter(|(_, from)| from.iter().any(|state| reached.contains(state.as_str())));
            let next: Vec<&str> =
                open.filter_map(|(edge, _)| Some(edge.to.as_ref()?.text.as_str())).collect();
            let before = reached.len();
            reached.extend(next);
            if reached.len() == before {
                break;
            }
        }
        let missed = self.states.iter().filter(|state| !reached.contains(state.as_str()));
        let missed = missed.filter_map(|state| {
            let place = edges.iter().filter_map(|edge| edge.to.as_ref()).find(|to| to.text == *state)?;
            let title = format!("no row can reach {state}: no path leads to it from {}", self.initial);
            let advice = "let a transition lead to it from a state that rows reach";
            Some(BlueprintProblem::at(place.span.clone(), title).advice(advice))
        });
        missed.collect()
    }

    /// The states that timers without a pause go through, from a state back to it.
    fn immediate_loop(
        &self,
        state: &str,
        edges: &[StateEdge],
        from: &Expanded,
    ) -> Option<(Vec<String>, Range<usize>)> {
        let (mut chain, mut at): (Vec<String>, &str) = (Vec::new(), state);
        for _ in &self.states {
            let immediate = |edge: &&StateEdge| edge.after.as_ref().is_some_and(|(span, _)| span.is_zero());
            let timer = timers_of(at, edges, from).find(immediate)?;
            let (_, span) = timer.after.as_ref()?;
            chain.push(at.to_owned());
            at = timer.to.as_ref().map_or(at, |to| &to.text);
            if at == state {
                return Some((chain, span.clone()));
            }
        }
        None
    }

    /// What is allowed and probably not meant: states in which rows stay for ever without being final, and final ones that rows
    /// leave.
    pub fn warnings(
        &self,
        edges: &[StateEdge],
        from: &Expanded,
        initial: &Range<usize>,
    ) -> Vec<BlueprintProblem> {
        let mut warnings = Vec::new();
        for state in &self.states {
            let exits: Vec<&StateEdge> = edges
                .iter()
                .zip(from)
                .filter(|(_, from)| from.contains(state))
                .map(|(edge, _)| edge)
                .collect();
            let named = edges.iter().filter_map(|edge| edge.to.as_ref()).find(|to| to.text == *state);
            let span = named.map_or(initial, |named| &named.span).clone();
            match (self.is_final(state), exits.first()) {
                (false, None) => {
                    let title = format!("rows stay in {state} for ever: no transition leaves it");
                    let advice = "add it to `final` if that is meant";
                    warnings.push(BlueprintProblem::at(span, title).advice(advice).warning());
                }
                (true, Some(exit)) => {
                    let title = format!("{state} is final, and `{}` leaves it", exit.name);
                    let advice = "take it out of `final`, or out of `from`";
                    let problem = BlueprintProblem::at(exit.name_span.clone(), title);
                    warnings.push(problem.advice(advice).warning());
                }
                _ => {}
            }
        }
        warnings
    }
}

/// The timers that leave a state.
fn timers_of<'e>(
    state: &'e str,
    edges: &'e [StateEdge],
    from: &'e Expanded,
) -> impl Iterator<Item = &'e StateEdge> {
    let leaves = move |(_, from): &(&StateEdge, &Vec<String>)| from.iter().any(|one| one == state);
    edges.iter().zip(from).filter(|(edge, _)| edge.after.is_some()).filter(leaves).map(|(edge, _)| edge)
}

/// A name or a pattern that stands for no state.
fn unknown(name: &PlacedText, states: &[String]) -> BlueprintProblem {
    let title =
        format!("there is no state `{}`: it is not `initial`, and no transition leads to it", name.text);
    let problem = BlueprintProblem::at(name.span.clone(), title);
    match nearest(&name.text, states.iter().map(String::as_str)) {
        Some(near) => problem.advice(format!("did you mean {near}?")),
        None => problem.advice(format!("there are {}", listed(states))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(text: &str) -> PlacedText {
        PlacedText { text: text.to_owned(), span: 0..1 }
    }

    fn edge(name: &str, from: &[&str], to: &str, after: Option<u64>) -> StateEdge {
        StateEdge {
            name: name.to_owned(),
            name_span: 0..1,
            from: from.iter().map(|state| placed(state)).collect(),
            to: Some(placed(to)),
            after: after.map(|millis| (Duration::from_millis(millis), 0..1)),
        }
    }

    /// The titles of all problems and warnings.
    fn said(finals: &[&str], edges: &[StateEdge]) -> String {
        let finals: Vec<PlacedText> = finals.iter().map(|state| placed(state)).collect();
        let found = || {
            let set = StateSet::of(&placed("A"), &finals, edges)?;
            let from = set.expand(edges)?;
            let mut all = set.problems(edges, &from);
            all.extend(set.warnings(edges, &from, &(0..1)));
            Ok::<_, Vec<BlueprintProblem>>(all)
        };
        format!("{:?}", found().unwrap_or_else(|problems| problems))
    }

    #[test]
    fn a_good_graph_has_nothing_to_say() {
        let edges = [edge("go", &["A"], "b.one", None), edge("end", &["b.*"], "C", Some(5))];
        assert_eq!(said(&["C"], &edges), "[]");
    }

    #[test]
    fn names_that_stand_for_no_state_are_reported() {
        assert!(said(&[], &[edge("go", &["B"], "C", None)]).contains("there is no state `B`"));
        assert!(said(&["D"], &[edge("go", &["A"], "C", None)]).contains("there is no state `D`"));
        assert!(said(&[], &[edge("go", &["x.*"], "C", None)]).contains("there is no state `x.*`"));
        assert!(said(&[], &[edge("go", &["A"], "not one", None)]).contains("cannot be the name"));
        assert!(said(&[], &[edge("go", &["A"], "A.b", None)]).contains("`A` has sub-states"));
    }

    #[test]
    fn unreachable_and_trap_states_are_reported() {
        let apart =
            [edge("go", &["A"], "B", None), edge("to", &["C"], "D", None), edge("fro", &["D"], "C", None)];
        let said_apart = said(&["B"], &apart);
        assert!(said_apart.contains("no row can reach C") && said_apart.contains("no row can reach D"));
        assert!(said(&[], &[edge("go", &["A"], "B", None)]).contains("rows stay in B for ever"));
        let leaves = [edge("go", &["A"], "B", None), edge("back", &["B"], "A", None)];
        assert!(said(&["B"], &leaves).contains("B is final, and `back` leaves it"));
    }

    #[test]
    fn timers_that_never_end_are_reported_once() {
        let circle = [edge("go", &["A"], "B", Some(0)), edge("back", &["B"], "A", Some(0))];
        assert_eq!(said(&[], &circle).matches("never end").count(), 1);
        let pausing = [edge("go", &["A"], "B", Some(0)), edge("back", &["B"], "A", Some(1))];
        assert_eq!(said(&[], &pausing), "[]");
        let twice = [
            edge("go", &["A"], "B", Some(1)),
            edge("also", &["A"], "B", Some(2)),
            edge("r", &["B"], "A", None),
        ];
        assert!(said(&[], &twice).contains("A is left by two timers, `go` and `also`"));
    }

    #[test]
    fn a_star_stands_for_every_state_that_is_not_final() {
        let edges = [edge("go", &["A"], "B", None), edge("cancel", &["*"], "C", None)];
        let set = StateSet::of(&placed("A"), &[placed("C")], &edges).unwrap();
        assert_eq!(set.expand(&edges).unwrap(), [vec!["A".to_owned()], vec!["A".to_owned(), "B".to_owned()]]);
    }
}
