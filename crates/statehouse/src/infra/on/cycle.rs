//! Reactions that would call each other for ever (R4).
//!
//! A reaction leads to another if its action may leave the other's event. A cycle in which no reaction has a condition never
//! ends, and is refused. One with a condition may end, and is cut at the greatest depth if it does not.

use crate::blueprint::Blueprint;
use crate::resource::Resource;

/// A reaction as its settings have it, whether or not they are right.
struct ReactionEdge {
    name: String,
    event: String,
    action: String,
    is_conditional: bool,
}

/// The names of the reactions of a cycle that begins and ends with this one and never ends, if there is such a cycle.
pub(super) fn endless(name: &str, blueprint: &Blueprint, resources: &[Resource]) -> Option<Vec<String>> {
    let mut edges = Vec::new();
    for thing in blueprint.things.iter().filter(|thing| thing.keyword == super::ARCHETYPE.keyword) {
        let (mut settings, mut unread) = (thing.settings.clone(), blueprint.problems());
        let mut text = |name| settings.text(name, &mut unread).unwrap_or_default();
        let (event, action) = (text("event"), text("do"));
        let is_conditional = thing.settings.has("when");
        edges.push(ReactionEdge { name: thing.name.clone(), event, action, is_conditional });
    }
    let unconditional: Vec<&ReactionEdge> = edges.iter().filter(|edge| !edge.is_conditional).collect();
    let first = unconditional.iter().find(|edge| edge.name == name)?;
    path(first, first, &unconditional, resources, &mut Vec::new())
}

fn path(
    from: &ReactionEdge,
    to: &ReactionEdge,
    edges: &[&ReactionEdge],
    resources: &[Resource],
    seen: &mut Vec<String>,
) -> Option<Vec<String>> {
    seen.push(from.name.clone());
    for next in edges.iter().filter(|next| leaves(&from.action, &next.event, resources)) {
        if next.name == to.name {
            return Some(seen.clone());
        }
        if !seen.contains(&next.name)
            && let Some(found) = path(next, to, edges, resources, seen)
        {
            return Some(found);
        }
    }
    seen.pop();
    None
}

/// Whether an action may leave an event.
fn leaves(action: &str, event: &str, resources: &[Resource]) -> bool {
    let Some((resource, event)) = event.split_once('.') else { return false };
    let mut events = resources.iter().filter(|known| known.name == resource).flat_map(|known| &known.events);
    events.any(|known| known.name == event && known.by.iter().any(|by| by == action))
}
