//! `init`, `check`, `plan`, `apply`: from a file to tables.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value as Json, json};
use statehouse::blueprint::settings::parse_duration;
use statehouse::declare::indexes::ListIndex;
use statehouse::engine::guarantees::{self, GuaranteeDifference};
use statehouse::engine::{self, Engine, limits};
use statehouse::infra::log::LogRetention;
use statehouse::product::booking;
use statehouse::secret_keys::SecretKeys;
use statehouse::{Blueprint, House, Resource, resource};
use statehouse_drills::systems::BLUEPRINTS;
use statehouse_store::{Migrate, SchemaChange};

use crate::affected;
use crate::arguments::{Apply, Check, Init, PlanArgs};
use crate::audit::MigrationAudit;
use crate::output::{CliFailure, Output, counted, note};
use crate::settings::{CliSettings, Own};

/// A log that is never trimmed, as a value of `log_retention`.
pub(crate) const FOREVER: &str = "forever";
/// The shortest retention of the log, as in a blueprint.
const RETENTION_MIN: Duration = Duration::from_secs(60);

/// Reads a blueprint.
pub(crate) fn read(own: &Own) -> Result<Blueprint, CliFailure> {
    let (path, text) = text(own)?;
    Ok(Blueprint::read(&path, &text)?)
}

/// How long the log is kept: as the blueprint says, or else as the settings say.
pub(crate) fn log_retention(own: &Own, blueprint: &Blueprint) -> Result<Option<LogRetention>, CliFailure> {
    match own.log_retention.as_str() {
        _ if blueprint.keeping.is_some() => Ok(blueprint.keeping),
        FOREVER => Ok(None),
        text => match parse_duration(text).filter(|span| *span >= RETENTION_MIN) {
            Some(span) => Ok(Some(LogRetention { span, unread: true })),
            None => Err(CliFailure::Usage(format!(
                "log_retention is {text:?}; it must be a time of at least {RETENTION_MIN:?}, such as \"30d\", or \"{FOREVER}\""
            ))),
        },
    }
}

/// The path of the blueprint, and its text.
fn text(own: &Own) -> Result<(String, String), CliFailure> {
    let path = own.blueprint.display().to_string();
    let text = std::fs::read_to_string(&own.blueprint)
        .with_context(|| format!("{path} cannot be read; `statehouse init` writes a first one"))?;
    Ok((path, text))
}

/// The word that declares a resource: of a view it is not that of its archetype.
fn keyword(blueprint: &Blueprint, resource: &Resource) -> &'static str {
    blueprint.thing(&resource.name).map_or_else(|| resource.archetype.keyword(), |thing| thing.keyword)
}

/// Whether a URL names a store that is not there yet and is created by opening it.
fn is_new(url: &str) -> bool {
    match url.strip_prefix("sqlite:") {
        Some(path) => !Path::new(path.strip_prefix("//").unwrap_or(path)).exists(),
        None => url.starts_with("memory:"),
    }
}

/// Opens the store for a command that uses the house. A store that is created by it gets the blueprint's tables. Any other has
/// to have them: only `apply`, and `serve` if its settings say so, change tables that are there.
pub(crate) async fn open_in_use(own: &Own) -> Result<House, CliFailure> {
    let is_new = is_new(&own.store);
    in_use(open(own).await?, is_new).await
}

/// The same for commands that call actions.
pub(crate) async fn open_in_use_for_calls(own: &Own) -> Result<House, CliFailure> {
    let is_new = is_new(&own.store);
    in_use(open_for_calls(own).await?, is_new).await
}

async fn in_use(house: House, is_new: bool) -> Result<House, CliFailure> {
    let fits = match is_new {
        true => house.prepare().await.map(drop),
        false => house.check_fit().await,
    };
    if let Err(error) = fits {
        house.store().close().await;
        return Err(error.into());
    }
    Ok(house)
}

/// Opens the store and puts a house over it, without touching its tables.
pub(crate) async fn open(own: &Own) -> Result<House, CliFailure> {
    let keys = SecretKeys::parse(&own.secrets_key).map_err(|error| CliFailure::Usage(error.to_string()))?;
    let mut blueprint = read(own)?;
    blueprint.keeping = log_retention(own, &blueprint)?;
    Ok(House::open_as_it_is(&own.store, &blueprint).await?.with_secret_keys(keys))
}

/// The same for commands that call actions: with holds before the store, if the blueprint keeps some there.
pub(crate) async fn open_for_calls(own: &Own) -> Result<House, CliFailure> {
    let blueprint = read(own)?;
    let leased = booking::leased(&blueprint);
    // Before the store is opened, which may create it.
    if !leased.is_empty() && own.redis.is_empty() {
        let message = format!(
            "{} keeps its holds in Redis; say where it is, with --set redis=redis://HOST:PORT or STATEHOUSE_REDIS",
            leased.join(", ")
        );
        return Err(CliFailure::Usage(message));
    }
    let house = open(own).await?;
    if leased.is_empty() {
        return Ok(house);
    }
    let holds = engine::open_holds(&own.redis, house.name()).await?;
    Ok(house.with_holds(holds))
}

pub(crate) fn init(init: &Init, output: &Output) -> Result<(), CliFailure> {
    let text = template(&init.template)?;
    std::fs::create_dir_all(&init.folder)
        .with_context(|| format!("{} cannot be made", init.folder.display()))?;
    let path = init.folder.join("statehouse.toml");
    write_new(&path, text)?;
    output.show(&json!({"blueprint": path}), || format!("Wrote {}.\nNext: statehouse check", path.display()));
    Ok(())
}

/// The blueprint of the system of that name.
fn template(name: &str) -> Result<&'static str, CliFailure> {
    let found = BLUEPRINTS.iter().find(|blueprint| blueprint.name == name);
    Ok(found.ok_or_else(|| no_system(name))?.text)
}

/// What is wrong if no system has this name.
pub(crate) fn no_system(name: &str) -> CliFailure {
    let names: Vec<&str> = BLUEPRINTS.iter().map(|blueprint| blueprint.name).collect();
    CliFailure::Usage(format!("there is no system `{name}`; there are {}", names.join(", ")))
}

/// Writes a file that must not exist.
fn write_new(path: &Path, text: &str) -> Result<(), CliFailure> {
    use std::io::Write as _;
    let file = std::fs::File::options().write(true).create_new(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    Ok(written.with_context(|| {
        format!("{} was not written; give another folder, `statehouse init FOLDER`", path.display())
    })?)
}

pub(crate) fn check(check: &Check, output: &Output) -> Result<(), CliFailure> {
    let own = CliSettings::read(&check.live.flags())?.own;
    let engine = match check.on {
        Some(engine) => engine.engine(),
        None => Engine::of_url(&own.store)?,
    };
    let (path, text) = text(&own)?;
    let (blueprint, resources) = resource::check(&path, &text)?;
    limits::problems(&blueprint, &resources, engine).or(())?;
    let list: Vec<Json> = resources
        .iter()
        .map(|resource| {
            let tables: Vec<&str> = resource.tables.iter().map(|table| table.name()).collect();
            let actions: Vec<&str> = resource.actions.iter().map(|action| &*action.name).collect();
            json!({
                "name": resource.name, "archetype": keyword(&blueprint, resource),
                "tables": tables, "actions": actions,
            })
        })
        .collect();
    let mut warnings = blueprint.problems();
    resources.iter().flat_map(|resource| &resource.warnings).for_each(|one| warnings.add(one.clone()));
    let json = json!({
        "house": blueprint.name, "engine": engine.name(), "resources": list, "warnings": warnings.to_json(),
    });
    if !warnings.is_empty() {
        note(&warnings.render(std::io::stderr().is_terminal()));
    }
    output.show(&json, || {
        let lines = resources.iter().map(|resource| {
            let actions: Vec<&str> = resource.actions.iter().map(|action| &*action.name).collect();
            format!("  {} {}: {}", keyword(&blueprint, resource), resource.name, actions.join(", "))
        });
        let lines: Vec<String> = lines.collect();
        format!(
            "{} is a good blueprint, and {engine} can carry it.\n{}",
            own.blueprint.display(),
            lines.join("\n")
        )
    });
    Ok(())
}

pub(crate) async fn plan(plan: &PlanArgs, output: &Output) -> Result<(), CliFailure> {
    let own = CliSettings::read(&plan.live.flags())?.own;
    if let Some(to) = plan.to {
        return show_move(&own, to.engine(), output);
    }
    // A plan changes nothing, so it does not make a file either: an empty one elsewhere stands for it.
    let stand_in = match own.store.starts_with("sqlite:") && is_new(&own.store) {
        true => Some(tempfile::tempdir().context("there is no place for a temporary file")?),
        false => None,
    };
    let store = match &stand_in {
        Some(folder) => format!("sqlite:{}", folder.path().join("empty.db").display()),
        None => own.store.clone(),
    };
    let own = Own { store, ..own };
    let house = open(&own).await?;
    let changes = house.migrate(Migrate::Show).await?;
    let blueprint = read(&own)?;
    let leased = booking::leased(&blueprint);
    let less: &[&str] = if leased.is_empty() { &[] } else { &booking::LEASED_HOLDS_LESS };
    let reactions = statehouse::infra::on::summaries(&blueprint);
    let inbound = statehouse::inbound::summaries(&blueprint);
    let indexes = declared_indexes(house.resources());
    let engine = Engine::of_url(&own.store)?;
    let lag = index_lag(engine);
    let affected = affected::affected(&changes, house.resources(), &blueprint.text, engine);
    let json = json!({
        "changes": changes_json(&changes), "leased": leased, "holds_less": less, "reactions": reactions, "inbound": inbound,
        "indexes": indexes, "indexes_lag": lag.is_some(), "affected": affected::to_json(&affected),
    });
    output.show(&json, || {
        let mut parts = vec![describe_changes(&changes)];
        if changes.is_empty() {
            parts = vec!["Nothing to do: the store fits the blueprint.".to_owned()];
        } else if changes.iter().any(SchemaChange::loses_data) {
            let names = changes.iter().filter(|change| change.loses_data()).filter_map(SchemaChange::removed);
            let names: Vec<String> = names.map(|name| format!("--allow-loss {name}")).collect();
            parts.push(format!("What has a `!` loses data, and is only done with: {}", names.join(" ")));
        }
        parts.extend(affected::describe(&affected));
        if !reactions.is_empty() {
            parts.push(format!("Events that call actions:\n  {}", reactions.join("\n  ")));
        }
        if !inbound.is_empty() {
            parts.push(format!("Signed messages that call actions:\n  {}", inbound.join("\n  ")));
        }
        if !indexes.is_empty() {
            let lines = std::iter::once(format!("Lists by indexes:\n  {}", indexes.join("\n  ")));
            parts.push(lines.chain(lag.map(str::to_owned)).collect::<Vec<_>>().join("\n"));
        }
        if !less.is_empty() {
            let head = format!("With the holds of {} in Redis some things are weaker:", leased.join(", "));
            let lines = std::iter::once(head).chain(less.iter().map(|line| format!("  - {line}")));
            parts.push(lines.collect::<Vec<_>>().join("\n"));
        }
        parts.join("\n\n")
    });
    house.store().close().await;
    Ok(())
}

/// How many guarantees get weaker.
fn weaker_text(count: usize) -> String {
    match count {
        0 => "no guarantee gets weaker".to_owned(),
        _ => counted(count as u64, "guarantee gets weaker", "guarantees get weaker"),
    }
}

/// The indexes that the blueprint declares, each with the list that reads it.
fn declared_indexes(resources: &[Resource]) -> Vec<String> {
    let lines = resources.iter().flat_map(|resource| {
        let line =
            |index: &ListIndex| format!("{}.list {} = {}", resource.name, index.name, index.columns_text());
        resource.indexes.iter().map(line)
    });
    lines.collect()
}

/// What a caller of a list by an index has to know on an engine.
fn index_lag(engine: Engine) -> Option<&'static str> {
    let lag = "On DynamoDB these are global secondary indexes (GSIs), which are eventually consistent: for some moments a list \
               may not show what was just written. Reads by key are strong.";
    (engine == Engine::Dynamodb).then_some(lag)
}

/// What changes if the house moves to another engine: what that one cannot carry, and what holds otherwise there.
fn show_move(own: &Own, to: Engine, output: &Output) -> Result<(), CliFailure> {
    let blueprint = read(own)?;
    let resources = resource::declare(&blueprint)?;
    limits::problems(&blueprint, &resources, to).or(())?;
    let from = Engine::of_url(&own.store)?;
    let differences = guarantees::differences(from, to);
    let list: Vec<Json> = differences.iter().map(GuaranteeDifference::to_json).collect();
    let json = json!({"from": from.name(), "to": to.name(), "differences": list});
    output.show(&json, || {
        let part = |one: &GuaranteeDifference| {
            let mark = if one.weaker { "weaker" } else { "other" };
            format!("{} ({mark})\n  {from}: {}\n  {to}: {}", one.subject, one.before, one.after)
        };
        let head = match differences.as_slice() {
            [] => format!("Nothing changes from {from} to {to}."),
            some => {
                let weaker = weaker_text(some.iter().filter(|one| one.weaker).count());
                format!("{to} can carry this blueprint. From {from} to {to} {weaker}.")
            }
        };
        let parts = differences.iter().map(part);
        std::iter::once(head).chain(parts).collect::<Vec<_>>().join("\n\n")
    });
    Ok(())
}

pub(crate) async fn apply(apply: &Apply, output: &Output) -> Result<(), CliFailure> {
    let house = open(&CliSettings::read(&apply.live.flags())?.own).await?;
    let house = house.with_progress(|progress| note(&progress.to_string()));
    let changes = match migrate(&house, &apply.allow_loss).await {
        Ok(changes) => changes,
        Err(failure) => {
            house.store().close().await;
            return Err(failure);
        }
    };
    let left = house.migrate(Migrate::Show).await?;
    let kept: Vec<String> =
        left.iter().filter(|change| change.loses_data()).filter_map(SchemaChange::removed).collect();
    output.show(&json!({"changes": changes_json(&changes), "kept": kept}), || {
        let mut parts = Vec::new();
        if !changes.is_empty() {
            parts.push(describe_changes(&changes));
        } else if kept.is_empty() {
            parts.push("Nothing was done: the store fits the blueprint.".to_owned());
        }
        if !kept.is_empty() {
            let kept: Vec<String> = kept.iter().map(|name| format!("  --allow-loss {name}")).collect();
            parts.push(format!(
                "Kept, because data would be lost. What is named is removed with its data:\n{}",
                kept.join("\n")
            ));
        }
        parts.join("\n")
    });
    house.store().close().await;
    Ok(())
}

/// Makes the changes, and records them in the audit before and after.
async fn migrate(house: &House, losses: &[String]) -> Result<Vec<SchemaChange>, CliFailure> {
    let planned = house.migrate(Migrate::Show).await?;
    let made: Vec<SchemaChange> =
        planned.into_iter().filter(|change| !losses.is_empty() || !change.removes()).collect();
    let recorded = MigrationAudit::begin(house, crate::audit::actor(), &made, losses).await?;
    let done = match losses {
        [] => house.migrate(Migrate::Apply).await,
        names => house.migrate_losing(names).await,
    };
    let ended = recorded.end(&done).await;
    let changes = done?;
    ended?;
    Ok(changes)
}

fn changes_json(changes: &[SchemaChange]) -> Vec<Json> {
    let change = |change: &SchemaChange| {
        json!({
            "change": change.to_string(), "table": change.table.name(),
            "loses_data": change.loses_data(), "statements": change.statements,
        })
    };
    changes.iter().map(change).collect()
}

fn describe_changes(changes: &[SchemaChange]) -> String {
    let block = |change: &SchemaChange| {
        let mark = if change.loses_data() { "!" } else { "+" };
        let statements: Vec<String> =
            change.statements.iter().map(|statement| indent(&format!("{statement};"))).collect();
        format!("{mark} {change}\n{}", statements.join("\n"))
    };
    changes.iter().map(block).collect::<Vec<_>>().join("\n")
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_guarantee_is_not_told_of_as_several() {
        assert_eq!(weaker_text(0), "no guarantee gets weaker");
        assert_eq!(weaker_text(1), "1 guarantee gets weaker");
        assert_eq!(weaker_text(2), "2 guarantees get weaker");
    }
}
