//! `init`, `check`, `plan`, `apply`: from a file to tables.

use std::path::Path;

use anyhow::Context;
use serde_json::{Value as Json, json};
use statehouse::{Blueprint, House, engine, resource};
use statehouse_store::{Change, Migrate};

use crate::arguments::{Apply, BlueprintFile, Init, Live};
use crate::output::{Failure, Output};

/// What `init` can begin with.
const TEMPLATES: [(&str, &str); 2] = [
    ("profile", include_str!("../../../systems/profile/statehouse.toml")),
    ("catalog", include_str!("../../../systems/catalog/statehouse.toml")),
];

/// Reads a blueprint.
pub(crate) fn read(file: &BlueprintFile) -> Result<Blueprint, Failure> {
    let path = &file.blueprint;
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("{} cannot be read; `statehouse init` writes a first one", path.display())
    })?;
    Ok(Blueprint::read(&path.display().to_string(), &text)?)
}

/// Opens the store and puts a house over it, without touching its tables.
pub(crate) async fn open(live: &Live) -> Result<House, Failure> {
    let blueprint = read(&live.file)?;
    resource::declare(&blueprint)?;
    Ok(House::over(engine::open(&live.store).await?, &blueprint)?)
}

pub(crate) fn init(init: &Init, output: &Output) -> Result<(), Failure> {
    let template = TEMPLATES.iter().find(|(name, _)| *name == init.template);
    let Some((_, text)) = template else {
        let names: Vec<&str> = TEMPLATES.iter().map(|(name, _)| *name).collect();
        let message = format!("there is no template `{}`; there are {}", init.template, names.join(", "));
        return Err(Failure::Usage(message));
    };
    std::fs::create_dir_all(&init.folder)
        .with_context(|| format!("{} cannot be made", init.folder.display()))?;
    let path = init.folder.join("statehouse.toml");
    write_new(&path, text)?;
    output.show(&json!({"blueprint": path}), || format!("Wrote {}.\nNext: statehouse check", path.display()));
    Ok(())
}

/// Writes a file that must not exist.
fn write_new(path: &Path, text: &str) -> Result<(), Failure> {
    use std::io::Write as _;
    let file = std::fs::File::options().write(true).create_new(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    Ok(written.with_context(|| format!("{} was not written", path.display()))?)
}

pub(crate) fn check(file: &BlueprintFile, output: &Output) -> Result<(), Failure> {
    let blueprint = read(file)?;
    let resources = resource::declare(&blueprint)?;
    let list: Vec<Json> = resources
        .iter()
        .map(|resource| {
            let tables: Vec<&str> = resource.tables.iter().map(|table| table.name()).collect();
            let actions: Vec<&str> = resource.actions.iter().map(|action| action.name).collect();
            json!({
                "name": resource.name, "archetype": resource.archetype.keyword(),
                "tables": tables, "actions": actions,
            })
        })
        .collect();
    output.show(&json!({"house": blueprint.name, "resources": list}), || {
        let lines = resources.iter().map(|resource| {
            let actions: Vec<&str> = resource.actions.iter().map(|action| action.name).collect();
            format!("  {} {}: {}", resource.archetype.keyword(), resource.name, actions.join(", "))
        });
        let lines: Vec<String> = lines.collect();
        format!("{} is a good blueprint.\n{}", file.blueprint.display(), lines.join("\n"))
    });
    Ok(())
}

pub(crate) async fn plan(live: &Live, output: &Output) -> Result<(), Failure> {
    let house = open(live).await?;
    let changes = house.migrate(Migrate::Show).await?;
    show_changes(&changes, "Nothing to do: the store fits the blueprint.", output);
    house.store().close().await;
    Ok(())
}

pub(crate) async fn apply(apply: &Apply, output: &Output) -> Result<(), Failure> {
    let house = open(&apply.live).await?;
    let planned = house.migrate(Migrate::Show).await?;
    let losses: Vec<String> =
        planned.iter().filter(|change| change.loses_data()).map(ToString::to_string).collect();
    let how = if apply.allow_loss { Migrate::ApplyWithLoss } else { Migrate::Apply };
    let changes = house.migrate(how).await?;
    show_changes(&changes, "Nothing was done: the store fits the blueprint.", output);
    if !apply.allow_loss && !losses.is_empty() && !output.is_json() {
        output.show(&Json::Null, || {
            format!("Kept, because data would be lost (--allow-loss removes it):\n  {}", losses.join("\n  "))
        });
    }
    house.store().close().await;
    Ok(())
}

fn show_changes(changes: &[Change], none: &str, output: &Output) {
    let list: Vec<Json> = changes
        .iter()
        .map(|change| {
            json!({
                "change": change.to_string(), "table": change.table.name(),
                "loses_data": change.loses_data(), "statements": change.statements,
            })
        })
        .collect();
    output.show(&json!({"changes": list}), || {
        if changes.is_empty() {
            return none.to_owned();
        }
        let blocks = changes.iter().map(|change| {
            let mark = if change.loses_data() { "!" } else { "+" };
            let statements: Vec<String> =
                change.statements.iter().map(|statement| indent(&format!("{statement};"))).collect();
            format!("{mark} {change}\n{}", statements.join("\n"))
        });
        blocks.collect::<Vec<_>>().join("\n")
    });
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}
