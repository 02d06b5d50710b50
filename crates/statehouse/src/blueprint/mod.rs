//! The blueprint: one file that says what kind of state each thing in a product is.
//!
//! ```toml
//! [house]
//! name = "ticketing"
//!
//! [entity.profile]                       # [<archetype>.<name>]
//! key    = { user_id = "int" }
//! fields = { display_name = "text", bio = "text?", avatar_url = "text?" }
//! ```
//!
//! Reading it has two steps. [`tree`] turns the text into settings that remember where they stand. The archetypes then
//! read their settings from it, and whatever is wrong becomes a [`BlueprintProblem`](problem::BlueprintProblem) with its place in the
//! file and advice: all of them at once, not the first one only.

mod field;
pub mod problem;
pub mod settings;
pub mod tree;

use std::time::Duration;

use statehouse_store::table::NAME_MAX;

use crate::atlas;
use crate::infra::log::LogRetention;
use crate::resource;
use problem::{BlueprintProblem, Problems};
use settings::Settings;
use tree::{Node, TreeEntry};

/// The shortest retention of the log: callers that retry must be recognized, and readers have time to come back.
const RETENTION_MIN: Duration = Duration::from_secs(60);

/// The section of endpoints. It declares no state, so it is not an archetype.
const INBOUND: &str = "inbound";

/// A blueprint that could be read. Its things have known archetypes and distinct names; what their settings mean is
/// for the archetypes to say.
#[derive(Clone, Debug, PartialEq)]
pub struct Blueprint {
    /// The file it was read from, for messages.
    pub file: String,
    /// Its text, for messages.
    pub text: String,
    /// The house's name.
    pub name: String,
    /// The name that the house had before.
    pub renamed_from: Option<String>,
    /// How long the log is kept; for ever if nothing is said.
    pub keeping: Option<LogRetention>,
    /// What it declares, in the order of the file.
    pub things: Vec<Thing>,
    /// Endpoints for signed messages from outside.
    pub endpoints: Vec<DeclaredEndpoint>,
}

/// One declared endpoint: `[inbound.psp]`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredEndpoint {
    /// Its name, which is a part of its path.
    pub name: String,
    /// What is said about it.
    pub settings: Settings,
}

/// One declared thing: `[entity.profile]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Thing {
    /// Its archetype.
    pub archetype: &'static atlas::AtlasEntry,
    /// The word that declares it: mostly its archetype's.
    pub keyword: &'static str,
    /// Its own name.
    pub name: String,
    /// What is said about it.
    pub settings: Settings,
}

impl Blueprint {
    /// Reads a blueprint, or says everything that is wrong with it.
    pub fn read(file: &str, text: &str) -> Result<Blueprint, Problems> {
        let (blueprint, problems) = Blueprint::read_what_can_be(file, text);
        problems.or(blueprint)
    }

    /// Reads what can be read of a blueprint, and says what is wrong with the rest.
    pub(crate) fn read_what_can_be(file: &str, text: &str) -> (Blueprint, Problems) {
        let mut problems = Problems::of(file, text);
        let root = tree::parse(text, &mut problems);
        let mut house = HouseSettings::default();
        let (mut things, mut endpoints): (Vec<Thing>, Vec<DeclaredEndpoint>) = (Vec::new(), Vec::new());
        for TreeEntry { key, key_span, value } in root {
            if key == "house" {
                house = read_house(value, &mut problems);
            } else if key == INBOUND {
                endpoints = read_endpoints(value, &mut problems);
            } else if let (Some(archetype), Some(keyword)) =
                (atlas::by_keyword(&key), atlas::keywords().find(|keyword| *keyword == key))
            {
                read_things(archetype, keyword, value, &mut things, &mut problems);
            } else {
                let known = atlas::keywords().filter(|keyword| resource::is_declared_by(keyword));
                let mut problem = BlueprintProblem::at(key_span, format!("`{key}` is not an archetype"))
                    .label("no archetype has this name");
                if let Some(near) = nearest(&key, known.chain(["house", INBOUND])) {
                    problem = problem.advice(format!("did you mean `{near}`?"));
                } else {
                    problem = problem.advice("`statehouse atlas` lists the archetypes");
                }
                problems.add(problem);
            }
        }
        things.sort_by_key(|thing| thing.settings.span().start);
        let HouseSettings { name, renamed_from, keeping } = house;
        let name = name.unwrap_or_else(|| "house".to_owned());
        let (file, text) = (file.to_owned(), text.to_owned());
        (Blueprint { file, text, name, renamed_from, keeping, things, endpoints }, problems)
    }

    /// The thing of that name.
    pub fn thing(&self, name: &str) -> Option<&Thing> {
        self.things.iter().find(|thing| thing.name == name)
    }

    /// Problems that are found later, with this file's text to show them in.
    pub fn problems(&self) -> Problems {
        Problems::of(&self.file, &self.text)
    }
}

/// What stands under `[house]`.
#[derive(Default)]
struct HouseSettings {
    name: Option<String>,
    renamed_from: Option<String>,
    keeping: Option<LogRetention>,
}

fn read_house(value: Node, problems: &mut Problems) -> HouseSettings {
    let Some(mut settings) = Settings::of("house", value, problems) else { return HouseSettings::default() };
    let name = settings.text("name", problems);
    let renamed_from = settings.text("renamed_from", problems);
    let span = settings.duration("log_retention", problems);
    let unread = settings.bool("log_keep_unread", problems);
    settings.finish(problems);
    if span.is_some_and(|span| span < RETENTION_MIN) {
        let title = format!("`log_retention` must be at least {RETENTION_MIN:?}");
        let advice = "a retry is recognized for as long as its first record is kept";
        problems.add(BlueprintProblem::at(settings.span_of("log_retention"), title).advice(advice));
    }
    if span.is_none() && unread.is_some() {
        let title = "`log_keep_unread` says what `log_retention` leaves, which is not given";
        problems.add(BlueprintProblem::at(settings.span_of("log_keep_unread"), title));
    }
    if renamed_from.is_some() && renamed_from == name {
        let title = "`renamed_from` is the name that the house has now";
        problems.add(BlueprintProblem::at(settings.span_of("renamed_from"), title));
    }
    let keeping = span.map(|span| LogRetention { span, unread: unread.unwrap_or(true) });
    HouseSettings { name, renamed_from, keeping }
}

/// Reads `[inbound.NAME]`: endpoints have names of their own, because their paths are no resource's.
fn read_endpoints(value: Node, problems: &mut Problems) -> Vec<DeclaredEndpoint> {
    let advice = format!("write `[{INBOUND}.NAME]`");
    let Node { span, value: tree::TreeValue::Table(entries) } = value else {
        let title = format!("`{INBOUND}` must be followed by a name");
        problems.add(BlueprintProblem::at(value.span, title).advice(advice));
        return Vec::new();
    };
    if entries.is_empty() {
        let title = format!("`[{INBOUND}]` declares nothing");
        problems.add(BlueprintProblem::at(span, title).advice(advice));
    }
    let mut endpoints = Vec::new();
    for TreeEntry { key, key_span, value } in entries {
        if let Err(why) = check_name(&key) {
            problems.add(BlueprintProblem::at(key_span, format!("`{key}` cannot be a name: it {why}")));
        } else if let Some(settings) = Settings::of(&format!("{INBOUND}.{key}"), value, problems) {
            endpoints.push(DeclaredEndpoint { name: key, settings });
        }
    }
    endpoints
}

fn read_things(
    archetype: &'static atlas::AtlasEntry,
    keyword: &'static str,
    value: Node,
    things: &mut Vec<Thing>,
    problems: &mut Problems,
) {
    let (span, entries) = match value {
        Node { span, value: tree::TreeValue::Table(entries) } => (span, entries),
        other => {
            let title = format!("`{keyword}` must be followed by a name");
            problems.add(BlueprintProblem::at(other.span, title).advice(format!("write `[{keyword}.NAME]`")));
            return;
        }
    };
    if entries.is_empty() {
        let title = format!("`[{keyword}]` declares nothing");
        problems.add(BlueprintProblem::at(span, title).advice(format!("write `[{keyword}.NAME]`")));
    }
    for TreeEntry { key, key_span, value } in entries {
        if let Err(why) = check_name(&key) {
            problems.add(BlueprintProblem::at(key_span, format!("`{key}` cannot be a name: it {why}")));
            continue;
        }
        if let Some(other) = things.iter().find(|thing| thing.name == key) {
            let title = format!("the name `{key}` is taken");
            let label = format!("`[{}.{key}]` has it already", other.keyword);
            problems.add(
                BlueprintProblem::at(key_span, title).label(label).advice("names are unique in a house"),
            );
            continue;
        }
        let subject = format!("{keyword}.{key}");
        if let Some(settings) = Settings::of(&subject, value, problems) {
            things.push(Thing { archetype, keyword, name: key, settings });
        }
    }
}

/// Names become parts of table names, paths and identifiers.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    // Derived names add a few letters.
    let limit = NAME_MAX - 16;
    if !plain {
        Err("must begin with a letter a-z and hold only a-z, 0-9 and _".into())
    } else if name.len() > limit {
        Err(format!("has {} characters; the limit is {limit}", name.len()))
    } else if name == "batch" || name == "events" || name.starts_with("statehouse") {
        Err("is one that Statehouse itself uses".into())
    } else {
        Ok(())
    }
}

/// The candidate that a mistyped word most likely stands for.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest_within(1 + word.chars().count() / 3, word, candidates)
}

/// The same, if no more than so many letters are wrong.
pub fn nearest_within<'a>(
    limit: usize,
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// How many letters have to be added, removed or changed.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = i;
        let mut before = i + 1;
        for (b, cell) in right.iter().zip(row.iter_mut().skip(1)) {
            let changed = diagonal + usize::from(a != *b);
            diagonal = *cell;
            before = changed.min(before + 1).min(diagonal + 1);
            *cell = before;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a text and compares the problems, as a person on a plain terminal sees them.
    fn check(text: &str, expect: &str) {
        let problems = match Blueprint::read("statehouse.toml", text) {
            Ok(blueprint) => panic!("no problem was found in {blueprint:?}"),
            Err(problems) => problems.render(false),
        };
        assert!(problems.contains(expect), "{problems}");
    }

    #[test]
    fn things_are_read_in_the_order_of_the_file() {
        let text = "[house]\nname = \"shop\"\n[entity.product]\n[booking.seat]\n[entity.account]\n";
        let blueprint = Blueprint::read("statehouse.toml", text).unwrap();
        assert_eq!(blueprint.name, "shop");
        let names: Vec<&str> = blueprint.things.iter().map(|thing| thing.name.as_str()).collect();
        assert_eq!(names, ["product", "seat", "account"]);
        assert_eq!(blueprint.thing("seat").unwrap().archetype.code, "A08");
    }

    #[test]
    fn an_unknown_archetype_gets_the_nearest_name() {
        check(
            "[house]\nname = \"shop\"\n\n[entty.product]\n",
            "\
error: `entty` is not an archetype
 --> statehouse.toml:4:2
  |
4 | [entty.product]
  |  ^^^^^ no archetype has this name
  |
  = help: did you mean `entity`?",
        );
        check("[zebra.product]\n", "`statehouse atlas` lists the archetypes");
        // What is not built is not proposed.
        check("[leaderbord.lot]\n", "`statehouse atlas` lists the archetypes");
    }

    #[test]
    fn names_are_checked() {
        check("[entity.Product]\n", "must begin with a letter a-z");
        check("[entity.a]\n[booking.a]\n", "`[entity.a]` has it already");
        check("[entity.batch]\n", "one that Statehouse itself uses");
        check("entity = 3\n", "write `[entity.NAME]`");
        check("[entity]\n", "declares nothing");
        check("[house]\nname = 3\n", "expected text");
        check("[house]\nnome = \"x\"\n", "did you mean `name`?");
        check("[house]\nlog_retention = \"5s\"\n", "must be at least 60s");
        check("[house]\nname = \"a\"\nrenamed_from = \"a\"\n", "the name that the house has now");
        check("[house]\nlog_keep_unread = false\n", "which is not given");
    }

    #[test]
    fn bad_syntax_points_at_the_place() {
        check("[entity.a\nkey = 1\n", "statehouse.toml:1:");
        check("[entity.a]\nkey = {\n", "error: ");
    }

    #[test]
    fn distances_count_edits() {
        assert_eq!(distance("entity", "entity"), 0);
        assert_eq!(distance("entty", "entity"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
