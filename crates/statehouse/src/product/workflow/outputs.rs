//! What a transition causes outside its row: effects that are sent and jobs that are enqueued, as parts of its plan.

use std::ops::Range;

use serde_json::Value as Json;
use statehouse_store::{Tenant, Time, Type};

use super::chart::json_of;
use crate::action::Refusal;
use crate::blueprint::problem::BlueprintProblem;
use crate::blueprint::settings::Field;
use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::blueprint::{Blueprint, nearest};
use crate::declare::SettingsReader;
use crate::declare::machine::{MachinePart, TOLD};
use crate::declare::template::{Template, TemplateScope, TemplateValues};
use crate::house::digest;
use crate::infra::effect::{EffectRequest, Outbox};
use crate::product::schedule::JobQueue;
use crate::resource::Resource;

/// The longest key of an effect.
const KEY_BYTES_MAX: usize = 128;
/// What a template may name besides the columns of the key and the fields.
pub(super) const PLACES: [(&str, Type); 6] = [
    ("key", Type::Text),
    ("state", Type::Text),
    ("transition", Type::Text),
    ("seq", Type::Int),
    ("reason", Type::Text),
    ("by", Type::Text),
];

/// An effect or a job of a transition.
#[derive(Debug)]
pub(super) struct TransitionOutput {
    /// The resource of the effect or the job.
    pub resource: String,
    target: OutputTarget,
    /// The body of the effect, or the payload of the job.
    content: Template,
    /// The same as it stands in the file.
    pub source: Json,
}

#[derive(Debug)]
enum OutputTarget {
    Effect(Outbox),
    Job(JobQueue),
}

/// Where the names of effects and schedules are looked up.
pub(super) struct OutputPlaces<'a> {
    pub blueprint: &'a Blueprint,
    pub resources: &'a [Resource],
}

/// The names in the templates of a transition.
pub(super) struct RowScope<'a> {
    pub key: &'a [Field],
    pub fields: &'a [Field],
}

impl TemplateScope for RowScope<'_> {
    fn kind_of(&self, path: &[String]) -> Result<Option<Type>, (String, String)> {
        let (name, rest) = path.split_first().map_or(("", path), |(name, rest)| (name.as_str(), rest));
        let columns = self.key.iter().chain(self.fields).map(|field| (field.name.as_str(), field.kind));
        let mut known = columns.chain(PLACES);
        match known.find(|(column, _)| *column == name) {
            Some((_, Type::Json)) if !rest.is_empty() => Ok(None),
            Some((_, kind)) if rest.is_empty() => Ok(Some(kind)),
            Some((_, kind)) => {
                Err((format!("`{name}` is {kind}, which has no parts"), format!("write {{{name}}}")))
            }
            None => {
                let names: Vec<&str> = self.key.iter().chain(self.fields).map(|field| &*field.name).collect();
                let names: Vec<&str> = names.into_iter().chain(PLACES.map(|(place, _)| place)).collect();
                let advice = match nearest(name, names.iter().copied()) {
                    Some(near) => format!("did you mean {{{near}}}?"),
                    None => format!("there are {}", names.join(", ")),
                };
                Err((format!("a transition has no `{name}`"), advice))
            }
        }
    }
}

/// Reads `send`: the names of effects, each with the template of its body.
pub(super) fn read_sends(
    settings: &mut SettingsReader<'_>,
    node: Option<&Node>,
    places: &OutputPlaces<'_>,
    scope: &RowScope<'_>,
) -> Vec<TransitionOutput> {
    let things = &places.blueprint.things;
    let effects = things.iter().filter(|thing| thing.archetype.keyword() == "effect");
    let names: Vec<&str> = effects.map(|thing| thing.name.as_str()).collect();
    let outbox = |name: &str| {
        let found = names.contains(&name).then(|| Outbox::of(places.blueprint, name));
        // One that is declared wrongly is reported where it is declared.
        found.map(|outbox| outbox.map(OutputTarget::Effect))
    };
    read_outputs(settings, node, ("send", "effect"), &names, outbox, scope)
}

/// Reads `enqueue`: the names of schedules, each with the template of its payload.
pub(super) fn read_jobs(
    settings: &mut SettingsReader<'_>,
    node: Option<&Node>,
    places: &OutputPlaces<'_>,
    scope: &RowScope<'_>,
) -> Vec<TransitionOutput> {
    let queues = places.resources.iter().filter(|resource| resource.job_queue.is_some());
    let things = places.blueprint.things.iter().filter(|thing| thing.keyword == "schedule");
    let names: Vec<&str> = things.map(|thing| thing.name.as_str()).collect();
    let queues: Vec<&Resource> = queues.collect();
    let queue = |name: &str| {
        let found = queues.iter().find(|resource| resource.name == name);
        let queue = found.and_then(|resource| resource.job_queue.clone());
        names.contains(&name).then(|| queue.map(OutputTarget::Job))
    };
    read_outputs(settings, node, ("enqueue", "schedule"), &names, queue, scope)
}

/// Reads a table of names and templates. `target` gives nothing for an unknown name, and an empty target for a thing that is
/// declared wrongly.
fn read_outputs(
    settings: &mut SettingsReader<'_>,
    node: Option<&Node>,
    (setting, keyword): (&str, &str),
    names: &[&str],
    target: impl Fn(&str) -> Option<Option<OutputTarget>>,
    scope: &RowScope<'_>,
) -> Vec<TransitionOutput> {
    let Some(node) = node else { return Vec::new() };
    let TreeValue::Table(entries) = &node.value else {
        let title = format!("`{setting}` must be a table of names and contents, not {}", node.value.kind());
        let advice = format!("write `{setting} = {{ NAME = {{ id = \"{{key}}\" }} }}`");
        settings.add_problem(BlueprintProblem::at(node.span.clone(), title).advice(advice));
        return Vec::new();
    };
    let mut outputs = Vec::new();
    for TreeEntry { key, key_span, value } in entries {
        let content = Template::read(value).and_then(|content| {
            content.check_names(value, scope)?;
            Ok(content)
        });
        match (target(key), content) {
            (None, _) => settings.add_problem(unknown(keyword, key, key_span, names)),
            (Some(_), Err(error)) => settings.template_problem(error),
            (Some(Some(target)), Ok(content)) => {
                let source = json_of(value);
                outputs.push(TransitionOutput { resource: key.clone(), target, content, source });
            }
            (Some(None), Ok(_)) => {}
        }
    }
    outputs
}

fn unknown(keyword: &str, name: &str, span: &Range<usize>, names: &[&str]) -> BlueprintProblem {
    let problem = BlueprintProblem::at(span.clone(), format!("there is no {keyword} `{name}`"));
    match nearest(name, names.iter().copied()) {
        Some(near) => problem.advice(format!("did you mean `{near}`?")),
        None => problem.advice(format!("declare it: `[{keyword}.{name}]`")),
    }
}

/// What names the effects and jobs of one transition of one row: `{name}:{key}:{seq}`. A key of a row that is too long for an
/// effect, or has characters that no header can have, stands there as its digest.
pub(super) fn output_key(name: &str, key: &str, seq: i64) -> String {
    let plain = format!("{name}:{key}:{seq}");
    let is_short = plain.len() <= KEY_BYTES_MAX && plain.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if is_short { plain } else { format!("{name}:{}:{seq}", digest(key)) }
}

impl TransitionOutput {
    /// Whether it is a job.
    pub fn is_job(&self) -> bool {
        matches!(self.target, OutputTarget::Job(_))
    }

    /// The part of a plan that writes it down.
    pub fn part(
        &self,
        tenant: &Tenant,
        key: &str,
        values: &dyn TemplateValues,
        now_here: Time,
    ) -> Result<MachinePart, Refusal> {
        let content: Json = self.content.render(values);
        let mut parts = match &self.target {
            OutputTarget::Effect(outbox) => {
                let request =
                    EffectRequest { key: key.to_owned(), body: content, ..EffectRequest::default() };
                outbox.send(tenant, &request, now_here)?
            }
            OutputTarget::Job(queue) => queue.enqueue(tenant, key, content, now_here)?,
        };
        for step in &mut parts.steps {
            step.label = Some(format!("{}{TOLD}", self.resource).into());
        }
        Ok(MachinePart::Prepared { resource: self.resource.clone(), parts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_outputs_fit_a_header() {
        assert_eq!(output_key("order", "7", 3), "order:7:3");
        let long = output_key("order", &"x".repeat(200), 3);
        assert!(long.len() <= KEY_BYTES_MAX && long.starts_with("order:") && long.ends_with(":3"), "{long}");
        let foreign = output_key("order", "häuser", 3);
        assert!(foreign.is_ascii() && foreign != output_key("order", "hauser", 3));
    }
}
