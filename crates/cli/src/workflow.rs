//! `workflow`: charts of declared workflows for other tools, and machines of other tools as blueprints.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use serde_json::json;
use statehouse::blueprint::nearest;
use statehouse::product::workflow::{StateChart, import_xstate};
use statehouse::resource;

use crate::arguments::{ChartFormat, WorkflowArgs, WorkflowCommand};
use crate::blueprint;
use crate::output::{CliFailure, Output};
use crate::settings::CliSettings;

pub(crate) fn run(arguments: &WorkflowArgs, output: &Output) -> Result<(), CliFailure> {
    match &arguments.command {
        WorkflowCommand::Export { file, name, format } => {
            let own = CliSettings::read(&file.flags())?.own;
            let blueprint = blueprint::read(&own)?;
            let resources = resource::declare(&blueprint)?;
            let charts: Vec<&StateChart> =
                resources.iter().filter_map(|resource| resource.state_chart.as_deref()).collect();
            export(named(&charts, name)?, *format, output);
        }
        WorkflowCommand::Import { machine, name } => import(machine, name, output)?,
    }
    Ok(())
}

/// The workflow of that name.
fn named<'c>(charts: &[&'c StateChart], name: &str) -> Result<&'c StateChart, CliFailure> {
    let found = charts.iter().find(|chart| chart.name == name);
    found.copied().ok_or_else(|| {
        let names: Vec<&str> = charts.iter().map(|chart| chart.name.as_str()).collect();
        let advice = match nearest(name, names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None if names.is_empty() => "it declares none; `[workflow.NAME]` does".to_owned(),
            None => format!("there are {}", names.join(", ")),
        };
        CliFailure::Usage(format!("the blueprint has no workflow `{name}`; {advice}"))
    })
}

fn export(chart: &StateChart, format: ChartFormat, output: &Output) {
    match format {
        ChartFormat::Xstate => {
            let machine = chart.to_xstate();
            output.show(&machine, || format!("{machine:#}"));
        }
        ChartFormat::Mermaid => {
            let diagram = chart.to_mermaid();
            output.show(&json!({"mermaid": diagram}), || diagram.trim_end().to_owned());
        }
    }
}

fn import(machine: &Path, name: &str, output: &Output) -> Result<(), CliFailure> {
    let path = machine.display();
    let text = std::fs::read_to_string(machine).with_context(|| format!("{path} cannot be read"))?;
    let blueprint = import_xstate(&text, name).map_err(|problems| {
        let lines: Vec<String> =
            problems.iter().map(|one| format!("{path}:{}: {}", one.line, one.title)).collect();
        CliFailure::Other(anyhow!("the machine cannot be a blueprint:\n{}", lines.join("\n")))
    })?;
    output.show(&json!({"blueprint": blueprint}), || blueprint.trim_end().to_owned());
    Ok(())
}
