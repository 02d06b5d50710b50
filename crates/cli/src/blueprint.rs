//! `init`, `check`, `plan`, `apply`: from a file to tables.

use std::path::Path;

use anyhow::Context;
use serde_json::{Value as Json, json};
use statehouse::engine::guarantees::{self, Difference};
use statehouse::engine::{self, Engine, limits};
use statehouse::product::booking;
use statehouse::{Blueprint, House, Resource, resource};
use statehouse_drills::systems::BLUEPRINTS;
use statehouse_store::{Change, Migrate};

use crate::arguments::{Apply, Check, Init, Plan};
use crate::output::{Failure, Output};
use crate::settings::{Own, Settings};

/// Reads a blueprint.
pub(crate) fn read(own: &Own) -> Result<Blueprint, Failure> {
    let (path, text) = text(own)?;
    Ok(Blueprint::read(&path, &text)?)
}

/// The path of the blueprint, and its text.
fn text(own: &Own) -> Result<(String, String), Failure> {
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
pub(crate) async fn open_in_use(own: &Own) -> Result<House, Failure> {
    let is_new = is_new(&own.store);
    in_use(open(own).await?, is_new).await
}

/// The same for commands that call actions.
pub(crate) async fn open_in_use_for_calls(own: &Own) -> Result<House, Failure> {
    let is_new = is_new(&own.store);
    in_use(open_for_calls(own).await?, is_new).await
}

async fn in_use(house: House, is_new: bool) -> Result<House, Failure> {
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
pub(crate) async fn open(own: &Own) -> Result<House, Failure> {
    Ok(House::open_as_it_is(&own.store, &read(own)?).await?)
}

/// The same for commands that call actions: with holds before the store, if the blueprint keeps some there.
pub(crate) async fn open_for_calls(own: &Own) -> Result<House, Failure> {
    let blueprint = read(own)?;
    let leased = booking::leased(&blueprint);
    // Before the store is opened, which may create it.
    if !leased.is_empty() && own.redis.is_empty() {
        let message = format!(
            "{} keeps its holds in Redis; say where it is, with --set redis=redis://HOST:PORT or STATEHOUSE_REDIS",
            leased.join(", ")
        );
        return Err(Failure::Usage(message));
    }
    let house = open(own).await?;
    if leased.is_empty() {
        return Ok(house);
    }
    let holds = engine::open_holds(&own.redis, house.name()).await?;
    Ok(house.with_holds(holds))
}

pub(crate) fn init(init: &Init, output: &Output) -> Result<(), Failure> {
    let text = template(&init.template)?;
    std::fs::create_dir_all(&init.folder)
        .with_context(|| format!("{} cannot be made", init.folder.display()))?;
    let path = init.folder.join("statehouse.toml");
    write_new(&path, text)?;
    output.show(&json!({"blueprint": path}), || format!("Wrote {}.\nNext: statehouse check", path.display()));
    Ok(())
}

/// The blueprint of the system of that name.
fn template(name: &str) -> Result<&'static str, Failure> {
    let found = BLUEPRINTS.iter().find(|blueprint| blueprint.name == name);
    Ok(found.ok_or_else(|| no_system(name))?.text)
}

/// What is wrong if no system has this name.
pub(crate) fn no_system(name: &str) -> Failure {
    let names: Vec<&str> = BLUEPRINTS.iter().map(|blueprint| blueprint.name).collect();
    Failure::Usage(format!("there is no system `{name}`; there are {}", names.join(", ")))
}

/// Writes a file that must not exist.
fn write_new(path: &Path, text: &str) -> Result<(), Failure> {
    use std::io::Write as _;
    let file = std::fs::File::options().write(true).create_new(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    Ok(written.with_context(|| {
        format!("{} was not written; give another folder, `statehouse init FOLDER`", path.display())
    })?)
}

pub(crate) fn check(check: &Check, output: &Output) -> Result<(), Failure> {
    let own = Settings::read(&check.live.flags())?.own;
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
    output.show(&json!({"house": blueprint.name, "engine": engine.name(), "resources": list}), || {
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

pub(crate) async fn plan(plan: &Plan, output: &Output) -> Result<(), Failure> {
    let own = Settings::read(&plan.live.flags())?.own;
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
    let json = json!({"changes": changes_json(&changes), "leased": leased, "holds_less": less});
    output.show(&json, || {
        let mut parts = vec![describe_changes(&changes)];
        if changes.is_empty() {
            parts = vec!["Nothing to do: the store fits the blueprint.".to_owned()];
        } else if changes.iter().any(Change::loses_data) {
            parts.push("What has a `!` loses data, and is only done with --allow-loss.".to_owned());
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

/// What changes if the house moves to another engine: what that one cannot carry, and what holds otherwise there.
fn show_move(own: &Own, to: Engine, output: &Output) -> Result<(), Failure> {
    let blueprint = read(own)?;
    let resources = resource::declare(&blueprint)?;
    limits::problems(&blueprint, &resources, to).or(())?;
    let from = Engine::of_url(&own.store)?;
    let differences = guarantees::differences(from, to);
    let list: Vec<Json> = differences.iter().map(Difference::to_json).collect();
    let json = json!({"from": from.name(), "to": to.name(), "differences": list});
    output.show(&json, || {
        let part = |one: &Difference| {
            let mark = if one.weaker { "weaker" } else { "other" };
            format!("{} ({mark})\n  {from}: {}\n  {to}: {}", one.subject, one.before, one.after)
        };
        let head = match differences.as_slice() {
            [] => format!("Nothing changes from {from} to {to}."),
            some => {
                let weaker = some.iter().filter(|one| one.weaker).count();
                let weaker = match weaker {
                    0 => "no guarantee gets weaker".to_owned(),
                    1 => "1 guarantee gets weaker".to_owned(),
                    _ => format!("{weaker} guarantees get weaker"),
                };
                format!("{to} can carry this blueprint. From {from} to {to} {weaker}.")
            }
        };
        let parts = differences.iter().map(part);
        std::iter::once(head).chain(parts).collect::<Vec<_>>().join("\n\n")
    });
    Ok(())
}

pub(crate) async fn apply(apply: &Apply, output: &Output) -> Result<(), Failure> {
    let house = open(&Settings::read(&apply.live.flags())?.own).await?;
    let planned = house.migrate(Migrate::Show).await?;
    let losses: Vec<String> =
        planned.iter().filter(|change| change.loses_data()).map(ToString::to_string).collect();
    let how = if apply.allow_loss { Migrate::ApplyWithLoss } else { Migrate::Apply };
    let changes = house.migrate(how).await?;
    let kept = if apply.allow_loss { Vec::new() } else { losses };
    output.show(&json!({"changes": changes_json(&changes), "kept": kept}), || {
        let mut parts = Vec::new();
        if !changes.is_empty() {
            parts.push(describe_changes(&changes));
        } else if kept.is_empty() {
            parts.push("Nothing was done: the store fits the blueprint.".to_owned());
        }
        if !kept.is_empty() {
            let kept = kept.join("\n  ");
            parts.push(format!("Kept, because data would be lost (--allow-loss removes it):\n  {kept}"));
        }
        parts.join("\n")
    });
    house.store().close().await;
    Ok(())
}

fn changes_json(changes: &[Change]) -> Vec<Json> {
    let change = |change: &Change| {
        json!({
            "change": change.to_string(), "table": change.table.name(),
            "loses_data": change.loses_data(), "statements": change.statements,
        })
    };
    changes.iter().map(change).collect()
}

fn describe_changes(changes: &[Change]) -> String {
    let block = |change: &Change| {
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
