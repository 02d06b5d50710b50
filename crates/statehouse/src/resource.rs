//! Resources: the declared things, ready for use, and the one list of archetypes that are built.

use std::borrow::Cow;
use std::sync::Arc;

use statehouse_store::{Table, Type, Value};

use crate::action::{Action, Code, Refusal};
use crate::atlas::Archetype;
use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::{self, Blueprint, Thing};
use crate::form::Misfit;
use crate::infra;
use crate::infra::log::Handler;
use crate::infra::projection::Projector;
use crate::own;
use crate::product;
use crate::told::Telling;
use crate::worker::Worker;

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
    /// What the house does for it by itself.
    pub workers: Vec<Arc<dyn Worker>>,
    /// What it does with the records of the log, by itself; each becomes a worker with a shard for each partition.
    pub consumers: Vec<Consuming>,
    /// What the log tells of its rows, for views.
    pub telling: Telling,
}

/// What is done with the records of the log.
#[derive(Clone, Debug)]
pub enum Consuming {
    /// A group does what its handler says.
    Group(Arc<dyn Handler>),
    /// Rows are kept that follow from other rows.
    Projection(Arc<dyn Projector>),
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
                let part = match part.contains('%') {
                    true => Cow::Owned(part.replace("%2C", ",").replace("%2c", ",").replace("%25", "%")),
                    false => Cow::Borrowed(part),
                };
                key_part(&part, *kind).ok_or_else(|| misfit(format!("{name} must be {kind}")))
            })
            .collect()
    }
}

/// A key as text: what [`Resource::parse_key`] reads.
pub fn key_text<'a>(parts: impl IntoIterator<Item = &'a Value>) -> String {
    let mut key = String::new();
    for (place, part) in parts.into_iter().enumerate() {
        if place > 0 {
            key.push(',');
        }
        let text = match part.to_json() {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        if text.contains(['%', ',']) {
            key.push_str(&text.replace('%', "%25").replace(',', "%2C"));
        } else {
            key.push_str(&text);
        }
    }
    key
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

/// A table's name for a thing's name.
pub(crate) fn plural(name: &str) -> String {
    match name {
        _ if name.ends_with('y') && !name.ends_with("ey") => {
            format!("{}ies", name.strip_suffix('y').unwrap_or(name))
        }
        _ if ["s", "x", "ch", "sh"].iter().any(|end| name.ends_with(end)) => format!("{name}es"),
        _ => format!("{name}s"),
    }
}

/// `ProfileState` for `profile`.
pub(crate) fn state_name(name: &str) -> String {
    let words = name.split('_').map(|word| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect::<String>()
    });
    format!("{}State", words.collect::<String>())
}

/// How a declaration becomes a resource, or several.
type Declare = fn(&Thing, &mut Problems) -> Vec<Resource>;

/// The archetypes that are built, by keyword. The one list.
const BUILT: &[(&str, Declare)] = &[
    ("booking", product::booking::declare),
    ("effect", |thing, problems| infra::effect::declare(thing, problems).into_iter().collect()),
    ("entity", |thing, problems| product::entity::declare(thing, problems).into_iter().collect()),
    ("lease", |thing, problems| infra::lease::declare(thing, problems).into_iter().collect()),
    ("log", infra::log::declare),
    ("relation", product::relation::declare),
    ("schedule", product::schedule::declare),
    ("sequence", |thing, problems| infra::sequence::declare(thing, problems).into_iter().collect()),
    ("thread", product::thread::declare),
    ("timer", |thing, problems| infra::timer::declare(thing, problems).into_iter().collect()),
];

/// How a declaration becomes resources that stand on others of the blueprint.
type DeclareOver = fn(&Thing, &Blueprint, &[Resource], &mut Problems) -> Vec<Resource>;

/// What stands on other resources, by keyword; declared after [`BUILT`], in any order of the file.
const STANDING_ON: [(&str, DeclareOver); 2] =
    [("feed", product::feed::declare), ("view", product::view::declare)];

/// Whether a thing is declared over others.
pub(crate) fn stands_on_others(thing: &Thing) -> bool {
    STANDING_ON.iter().any(|(keyword, _)| *keyword == thing.keyword)
}

/// What is built and has nothing to declare: others stand on it.
const BENEATH: [&str; 1] = ["projection"];

/// Whether an archetype is built.
pub fn is_built(archetype: &Archetype) -> bool {
    is_declared(archetype) || BENEATH.contains(&archetype.keyword())
}

/// Whether a blueprint can declare an archetype.
pub fn is_declared(archetype: &Archetype) -> bool {
    let over = STANDING_ON.iter().map(|(keyword, _)| *keyword);
    BUILT.iter().map(|(keyword, _)| *keyword).chain(over).any(|keyword| keyword == archetype.keyword())
}

/// The resources of a blueprint, or everything that is wrong with their settings.
pub fn declare(blueprint: &Blueprint) -> Result<Vec<Resource>, Problems> {
    let mut problems = blueprint.problems();
    let mut resources: Vec<Resource> = Vec::new();
    let (over, plain): (Vec<&Thing>, Vec<&Thing>) =
        blueprint.things.iter().partition(|thing| stands_on_others(thing));
    for thing in plain.into_iter().chain(over) {
        let keyword = thing.keyword;
        let declare = BUILT.iter().find(|(built, _)| *built == keyword).map(|(_, declare)| declare);
        let over = STANDING_ON.iter().find(|(built, _)| *built == keyword).map(|(_, declare)| declare);
        let declared = match (declare, over) {
            (Some(declare), _) => declare(thing, &mut problems),
            (None, Some(declare)) => declare(thing, blueprint, &resources, &mut problems),
            (None, None) => {
                let title = match is_built(thing.archetype) {
                    true => format!("`{keyword}` ({}) is not declared by itself", thing.archetype.name),
                    false => format!("`{keyword}` ({}) is not built yet", thing.archetype.name),
                };
                let built = BUILT.iter().map(|(keyword, _)| *keyword);
                let built: Vec<&str> = built.chain(STANDING_ON.iter().map(|(keyword, _)| *keyword)).collect();
                let advice = format!("this version has {}", built.join(", "));
                problems.add(Problem::at(thing.settings.span(), title).advice(advice));
                continue;
            }
        };
        for resource in declared {
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
            // What one declaration makes beside its own name may be the name of another.
            if resources.iter().any(|other| other.name == resource.name)
                || blueprint
                    .things
                    .iter()
                    .any(|other| other.name == resource.name && other.name != thing.name)
            {
                let title = format!("`{}` makes `{}`, which is declared as well", thing.name, resource.name);
                problems
                    .add(Problem::at(thing.settings.span(), title).advice("give one of them another name"));
                continue;
            }
            resources.push(resource);
        }
    }
    problems.or(resources)
}

/// The refusal of something that the house does not have, with what it has instead.
pub fn no_such<'n>(what: &str, name: &str, known: impl Iterator<Item = &'n str>) -> Refusal {
    let known: Vec<&str> = known.collect();
    let advice = match blueprint::nearest(name, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("there are {}", known.join(", ")),
    };
    Refusal::new(Code::NotFound, format!("there is no {what} `{name}`; {advice}"))
}
