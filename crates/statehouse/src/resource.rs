//! Resources: the declared things, ready for use.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::{Table, Type, Value};

use crate::action::{Action, Code, Refusal};
use crate::allow::AllowRules;
use crate::archetypes::{ARCHETYPES, Archetype};
use crate::atlas::AtlasEntry;
use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::blueprint::{self, Blueprint, Thing};
use crate::declare::indexes::ListIndex;
use crate::declare::row_constraints::{self, RowConstraints};
use crate::declare::{Declare, Machine, TableDef};
use crate::form::FieldError;
use crate::inbound;
use crate::infra::effect::Outbox;
use crate::infra::log::{DeclaredGroup, RecordHandler};
use crate::infra::projection::Projector;
use crate::product::schedule::JobQueue;
use crate::product::workflow::StateChart;
use crate::system;
use crate::view_source::ViewSource;
use crate::worker::Worker;

/// A declared thing with its tables and actions.
#[derive(Clone, Debug)]
pub struct Resource {
    /// Its name: `profile`.
    pub name: String,
    /// Its archetype.
    pub archetype: &'static AtlasEntry,
    /// The columns of the key that its actions take, by name and type.
    pub key: Vec<(String, Type)>,
    /// The definition of its rows, if it is a resource over one table.
    pub def: Option<Arc<TableDef>>,
    /// Columns of its rows that callers do not see.
    pub hidden: Vec<String>,
    /// The rules for callers with claims, if there are some.
    pub allow: Option<Arc<AllowRules>>,
    /// The indexes that the blueprint declares, which its list reads.
    pub indexes: Vec<ListIndex>,
    /// Whether it shows what other resources have: views, feeds, groups of the log.
    pub is_derived: bool,
    /// The tables it needs.
    pub tables: Vec<Arc<Table>>,
    /// What can be done with it.
    pub actions: Vec<Action>,
    /// The transitions of its rows, if they are declared as a machine.
    pub machine: Option<Arc<Machine>>,
    /// How plans of other resources enqueue its jobs, if it has jobs.
    pub job_queue: Option<JobQueue>,
    /// What the house does for it by itself.
    pub workers: Vec<Arc<dyn Worker>>,
    /// What it does with the records of the log, by itself; each becomes a worker with a shard for each partition.
    pub consumers: Vec<Consuming>,
    /// What the log tells of its rows, for views.
    pub view_source: ViewSource,
    /// The events that its actions and workers leave in the log, for reactions.
    pub events: Vec<EventSource>,
    /// The constraints between its rows, and those of others that concern them.
    pub constraints: RowConstraints,
    /// Its states and declared transitions, if it is a workflow.
    pub state_chart: Option<Arc<StateChart>>,
    /// What is probably not meant in its declaration.
    pub warnings: Vec<BlueprintProblem>,
    /// The column that says whose row it is, if it is a person's.
    pub person: Option<String>,
    /// How plans of other resources send it, if it is an effect.
    pub outbox: Option<Outbox>,
}

/// An event that a resource leaves in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// Its name without that of the resource: `created`.
    pub name: String,
    /// Full names of the actions that leave it; none, if only workers do.
    pub by: Vec<String>,
}

/// The data of an event of this name as callers see it: without the hidden columns of its row.
pub fn visible_data<'e>(resources: &[Resource], event: &str, data: Cow<'e, Json>) -> Cow<'e, Json> {
    let name = event.split('.').next().unwrap_or_default();
    let hidden = resources.iter().find(|resource| resource.name == name).map(|resource| &resource.hidden);
    let row = data.get("row").and_then(Json::as_object);
    let (Some(hidden), Some(row)) = (hidden, row) else { return data };
    if !hidden.iter().any(|name| row.contains_key(name)) {
        return data;
    }
    let mut data = data.into_owned();
    if let Some(row) = data.get_mut("row").and_then(Json::as_object_mut) {
        hidden.iter().for_each(|name| drop(row.remove(name)));
    }
    Cow::Owned(data)
}

/// What is done with the records of the log.
#[derive(Clone, Debug)]
pub enum Consuming {
    /// A group does what its handler says.
    Group(Arc<dyn RecordHandler>),
    /// Rows are kept that follow from other rows.
    Projection(Arc<dyn Projector>),
    /// Programs outside read them.
    Declared(DeclaredGroup),
}

impl Resource {
    /// The definition of the rows that its keys name. `None` if its key is another than its table's.
    pub fn row_def(&self) -> Option<&Arc<TableDef>> {
        let names = |def: &Arc<TableDef>| {
            let columns = def.table().key_columns().iter().map(|column| column.name.as_str());
            columns.eq(self.key.iter().map(|(name, _)| name.as_str()))
        };
        self.def.as_ref().filter(|def| names(def))
    }

    /// Whether callers see a time in its rows that is not just when a row was created or changed: a deadline, a due time.
    pub fn has_times(&self) -> bool {
        self.def.as_ref().is_some_and(|def| def.has_times())
    }

    /// The action of that name.
    pub fn action(&self, name: &str) -> Option<&Action> {
        self.actions.iter().find(|action| action.name == name)
    }

    /// Reads a key from its text: the parts with commas between them, `%2C` for a comma within a part and `%25` for a
    /// percent sign.
    pub fn parse_key(&self, text: &str) -> Result<Vec<Value>, Refusal> {
        parse_key(&self.name, &self.key, text)
    }
}

/// Reads a key of a resource with these columns from its text ([`Resource::parse_key`]).
pub(crate) fn parse_key(resource: &str, key: &[(String, Type)], text: &str) -> Result<Vec<Value>, Refusal> {
    let parts: Vec<&str> = text.split(',').collect();
    let field_error = |detail: String| Refusal::invalid(vec![FieldError { pointer: "/key".into(), detail }]);
    if parts.len() != key.len() {
        let names: Vec<&str> = key.iter().map(|(name, _)| name.as_str()).collect();
        return Err(field_error(format!("a key of {resource} is {}", names.join(","))));
    }
    let parse = |((name, kind), part): (&(String, Type), &str)| {
        let part = match part.contains('%') {
            true => Cow::Owned(part.replace("%2C", ",").replace("%2c", ",").replace("%25", "%")),
            false => Cow::Borrowed(part),
        };
        key_part(&part, *kind).ok_or_else(|| field_error(format!("{name} must be {kind}")))
    };
    key.iter().zip(parts).map(parse).collect()
}

/// A key as text: what [`Resource::parse_key`] reads.
pub fn key_text<'a>(parts: impl IntoIterator<Item = &'a Value>) -> String {
    let mut key = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        if index > 0 {
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

/// Whether a thing is derived from others.
pub(crate) fn stands_on_others(thing: &Thing) -> bool {
    Archetype::of(thing.keyword).is_some_and(|archetype| archetype.derived)
}

/// Whether an archetype of the atlas is built.
pub fn is_built(entry: &AtlasEntry) -> bool {
    Archetype::of_code(&entry.code).next().is_some()
}

/// Whether a blueprint can declare an archetype of the atlas.
pub fn is_declared(entry: &AtlasEntry) -> bool {
    Archetype::of_code(&entry.code).any(Archetype::is_declarable)
}

/// The problem of a thing whose archetype cannot be declared.
fn undeclarable(thing: &Thing) -> BlueprintProblem {
    let (keyword, name) = (thing.keyword, &thing.archetype.name);
    let title = match is_built(thing.archetype) {
        true => format!("`{keyword}` ({name}) is not declared by itself"),
        false => format!("`{keyword}` ({name}) is not built yet"),
    };
    let built = ARCHETYPES.iter().filter(|archetype| archetype.is_declarable());
    let built: Vec<&str> = built.map(|archetype| archetype.keyword).collect();
    BlueprintProblem::at(thing.settings.span(), title)
        .advice(format!("this version has {}", built.join(", ")))
}

/// Whether this word declares something in a blueprint.
pub(crate) fn is_declared_by(keyword: &str) -> bool {
    Archetype::of(keyword).is_some_and(Archetype::is_declarable)
}

/// Reads a blueprint and declares its resources, or says everything that is wrong with it: with sections that cannot be read,
/// and with the settings of the others. A blueprint that declares nothing is wrong, too.
pub fn check(file: &str, text: &str) -> Result<(Blueprint, Vec<Resource>), Problems> {
    let (mut blueprint, mut problems) = Blueprint::read_what_can_be(file, text);
    if blueprint.things.is_empty() && problems.is_empty() {
        let advice = "declare something: `[entity.NAME]`; `statehouse init` writes a first blueprint";
        problems.add(BlueprintProblem::at(0..0, "this blueprint declares nothing").advice(advice));
    }
    if !problems.is_empty() {
        // What a view or a feed stands on may be in a section that cannot be read.
        blueprint.things.retain(|thing| !stands_on_others(thing));
    }
    match declare(&blueprint) {
        Ok(resources) => problems.or((blueprint, resources)),
        Err(more) => Err(problems.and(more)),
    }
}

/// The resources of a blueprint, or everything that is wrong with their settings.
pub fn declare(blueprint: &Blueprint) -> Result<Vec<Resource>, Problems> {
    let mut problems = blueprint.problems();
    let mut resources: Vec<Resource> = Vec::new();
    // A reaction may be about anything, so that reactions come last.
    let is_reaction = |thing: &Thing| thing.keyword == crate::infra::on::ARCHETYPE.keyword;
    let rank = |thing: &&Thing| (is_reaction(thing), Archetype::of(thing.keyword).map_or(0, Archetype::rank));
    let mut things: Vec<&Thing> = blueprint.things.iter().collect();
    things.sort_by_key(rank);
    for thing in things {
        let Some(declare) = Archetype::of(thing.keyword).and_then(|archetype| archetype.declare) else {
            problems.add(undeclarable(thing));
            continue;
        };
        let declared = Declare::run(thing, Some((blueprint, &resources)), &mut problems, declare);
        for resource in declared {
            let taken = resource.tables.iter().find(|table| {
                let others = resources.iter().flat_map(|other| &other.tables);
                others.into_iter().any(|other| other.name() == table.name())
                    || system::has_table(table.name())
            });
            if let Some(table) = taken {
                let title = format!("the table `{table}` of `{}` is another's already", thing.name);
                let advice = "give one of them another table: `table = \"…\"`";
                problems.add(BlueprintProblem::at(thing.settings.span(), title).advice(advice));
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
                problems.add(
                    BlueprintProblem::at(thing.settings.span(), title)
                        .advice("give one of them another name"),
                );
                continue;
            }
            resources.push(resource);
        }
    }
    row_constraints::resolve(&mut resources, &mut problems);
    if problems.is_empty() {
        inbound::check(blueprint, &resources, &mut problems);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> String {
        check("statehouse.toml", text).unwrap_err().render(false)
    }

    #[test]
    fn what_is_wrong_is_said_at_once_whatever_cannot_be_read() {
        let text = "[entty.one]\n[zebra.two]\n[entity.post]\nkey = { id = \"int\" }\nfeilds = {}\n[view.three]\nof = \"one\"\n";
        let said = problems(text);
        for expected in ["`entty` is not an archetype", "`zebra` is not an archetype", "no setting `feilds`"]
        {
            assert!(said.contains(expected), "{said}");
        }
        assert!(!said.contains("view"), "{said}");
    }

    #[test]
    fn every_reserved_column_is_pointed_at() {
        let text = "[entity.post]\nkey = { id = \"int\", tenant = \"text\" }\nfields = { status = \"text\", body = \"text\", version = \"int\", id = \"text\" }\n";
        let found = check("statehouse.toml", text).unwrap_err().to_json();
        let found: Vec<(u64, u64, &str)> = found
            .as_array()
            .unwrap()
            .iter()
            .map(|one| {
                (
                    one["line"].as_u64().unwrap(),
                    one["column"].as_u64().unwrap(),
                    one["message"].as_str().unwrap(),
                )
            })
            .collect();
        let every = |name: &str| format!("every `entity` has a column `{name}` already");
        let expected = [
            (2, 21, every("tenant")),
            (3, 12, every("status")),
            (3, 44, every("version")),
            (3, 61, "`id` is declared twice".to_owned()),
        ];
        for (line, column, message) in &expected {
            assert!(found.contains(&(*line, *column, message.as_str())), "{message}: {found:?}");
        }
        assert_eq!(found.len(), expected.len(), "{found:?}");
    }

    #[test]
    fn a_blueprint_declares_something() {
        for text in ["", "# nothing\n", "[house]\nname = \"shop\"\n"] {
            assert!(problems(text).contains("this blueprint declares nothing"));
        }
    }
}
