//! Resources: the declared things, ready for use, and the one list of archetypes that are built.

use std::sync::Arc;

use statehouse_store::{Table, Type, Value};

use crate::action::{Action, Code, Refusal};
use crate::atlas::Archetype;
use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::{Blueprint, Thing};
use crate::form::Misfit;
use crate::own;
use crate::product;

/// A declared thing with its tables and actions.
#[derive(Clone, Debug)]
pub struct Resource {
    /// Its name: `profile`.
    pub name: String,
    /// Its archetype.
    pub archetype: &'static Archetype,
    /// The columns of the key that its actions take, by name and type.
    pub key: Vec<(String, Type)>,
    /// The tables it needs.
    pub tables: Vec<Arc<Table>>,
    /// What can be done with it.
    pub actions: Vec<Action>,
}

impl Resource {
    /// The action of that name.
    pub fn action(&self, name: &str) -> Option<&Action> {
        self.actions.iter().find(|action| action.name == name)
    }

    /// Reads a key from its text: the parts with commas between them, `%2C` for a comma within a part and `%25` for a
    /// percent sign.
    pub fn parse_key(&self, text: &str) -> Result<Vec<Value>, Refusal> {
        let parts: Vec<&str> = text.split(',').collect();
        let misfit = |detail: String| Refusal::misfits(vec![Misfit { pointer: "/key".into(), detail }]);
        if parts.len() != self.key.len() {
            let names: Vec<&str> = self.key.iter().map(|(name, _)| name.as_str()).collect();
            return Err(misfit(format!("a key of {} is {}", self.name, names.join(","))));
        }
        self.key
            .iter()
            .zip(parts)
            .map(|((name, kind), part)| {
                let part = part.replace("%2C", ",").replace("%2c", ",").replace("%25", "%");
                key_part(&part, *kind).ok_or_else(|| misfit(format!("{name} must be {kind}")))
            })
            .collect()
    }
}

/// A key as text: what [`Resource::parse_key`] reads.
pub fn key_text<'a>(parts: impl IntoIterator<Item = &'a Value>) -> String {
    let texts: Vec<String> = parts
        .into_iter()
        .map(|part| {
            let text = match part.to_json() {
                serde_json::Value::String(text) => text,
                other => other.to_string(),
            };
            text.replace('%', "%25").replace(',', "%2C")
        })
        .collect();
    texts.join(",")
}

fn key_part(text: &str, kind: Type) -> Option<Value> {
    let json = match kind {
        Type::Text | Type::Bytes | Type::Time => text.into(),
        // JSON would pass over it, and one row would have two names.
        _ if text.contains(char::is_whitespace) => return None,
        _ => serde_json::from_str(text).ok()?,
    };
    Value::from_json(json, kind).ok().filter(|value| !value.is_null())
}

/// How a declaration becomes a resource.
type Declare = fn(&Thing, &mut Problems) -> Option<Resource>;

/// The archetypes that are built, by keyword. The one list.
const BUILT: [(&str, Declare); 1] = [("entity", product::entity::declare)];

/// Whether an archetype is built.
pub fn is_built(archetype: &Archetype) -> bool {
    BUILT.iter().any(|(keyword, _)| *keyword == archetype.keyword())
}

/// The resources of a blueprint, or everything that is wrong with their settings.
pub fn declare(blueprint: &Blueprint) -> Result<Vec<Resource>, Problems> {
    let mut problems = blueprint.problems();
    let mut resources: Vec<Resource> = Vec::new();
    for thing in &blueprint.things {
        let keyword = thing.archetype.keyword();
        let Some((_, declare)) = BUILT.iter().find(|(built, _)| *built == keyword) else {
            let title = format!("`{keyword}` ({}) is not built yet", thing.archetype.name);
            let built: Vec<&str> = BUILT.iter().map(|(keyword, _)| *keyword).collect();
            let advice = format!("this version has {}", built.join(", "));
            problems.add(Problem::at(thing.settings.span(), title).advice(advice));
            continue;
        };
        let Some(resource) = declare(thing, &mut problems) else { continue };
        let taken = resource.tables.iter().find(|table| {
            let others = resources.iter().flat_map(|other| &other.tables);
            others.into_iter().any(|other| other.name() == table.name()) || own::has_table(table.name())
        });
        if let Some(table) = taken {
            let title = format!("the table `{table}` of `{}` is another's already", thing.name);
            let advice = "give one of them another table: `table = \"…\"`";
            problems.add(Problem::at(thing.settings.span(), title).advice(advice));
            continue;
        }
        resources.push(resource);
    }
    problems.or(resources)
}

/// The refusal of something that the house does not have.
pub fn no_such(what: &str, name: &str) -> Refusal {
    Refusal::new(Code::NotFound, format!("there is no {what} `{name}`"))
}
