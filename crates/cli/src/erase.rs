//! `erase`: removes a row, or all rows of a person, for good, and waits until the log and the store's files have nothing of them.

use serde_json::{Map, Value as Json, json};
use statehouse::action::Code;
use statehouse::erase::{ErasureBacklog, PersonErasure, PersonProgress};
use statehouse::resource::key_text;
use statehouse::{House, Operation, Request};
use statehouse_store::Tenant;

use crate::arguments::Erase;
use crate::blueprint;
use crate::output::{CliFailure, Output, counted};
use crate::settings::CliSettings;

pub(crate) async fn run(arguments: &Erase, output: &Output) -> Result<(), CliFailure> {
    let tenant = Tenant::new(&arguments.tenant).map_err(|error| CliFailure::Usage(error.to_string()))?;
    let house = blueprint::open_in_use_for_calls(&CliSettings::read(&arguments.live.flags())?.own).await?;
    let done = erase(&house, &tenant, arguments, output).await;
    house.store().close().await;
    done
}

async fn erase(house: &House, tenant: &Tenant, arguments: &Erase, output: &Output) -> Result<(), CliFailure> {
    let (progress, missing) = match (&arguments.resource, &arguments.key, &arguments.person) {
        (Some(resource), Some(key), None) => erase_row(house, tenant, resource, key, arguments.yes).await?,
        (None, None, Some(person)) => (erase_person(house, tenant, person, arguments.yes).await?, None),
        _ => return Err(CliFailure::Usage("name a RESOURCE with --key, or a --person".into())),
    };
    // Also what an earlier command, or a server that stopped, has left to do.
    let blanked = ErasureBacklog::of(house.store().as_ref(), &**house.clock()).finish().await?;
    if let Some(refusal) = missing {
        return Err(refusal);
    }
    let refused: Vec<Json> = progress
        .refused
        .iter()
        .map(|(resource, key, refusal)| json!({"resource": resource, "key": key, "error": refusal.code, "message": refusal.message}))
        .collect();
    output.show(&json!({"erased": progress.erased, "blanked": blanked, "refused": refused}), || {
        let rows = counted(progress.erased as u64, "row", "rows");
        let mut text =
            format!("Erased {rows}; blanked {} in the log.", counted(blanked as u64, "event", "events"));
        for (resource, key, refusal) in &progress.refused {
            text += &format!("\nNot erased: {resource} {key}: {}", refusal.message);
        }
        text
    });
    match progress.refused.into_iter().next() {
        Some((_, _, refusal)) => Err(refusal.into()),
        None => Ok(()),
    }
}

/// Erases one row. A row that is not there is reported after the log was blanked: an earlier attempt may have erased it.
async fn erase_row(
    house: &House,
    tenant: &Tenant,
    resource: &str,
    key: &str,
    is_confirmed: bool,
) -> Result<(PersonProgress, Option<CliFailure>), CliFailure> {
    let action = format!("{resource}.erase");
    let (declared, _) = house.action(&action)?;
    let key = declared.parse_key(key)?;
    if !is_confirmed {
        let what = format!("{resource} {} of tenant {tenant}, with its events in the log", key_text(&key));
        return Err(unconfirmed(&what));
    }
    let request = Request { action, key, input: Map::new(), expected: None };
    match house.call(tenant, request, Operation::default()).await {
        Ok(_) => Ok((PersonProgress { erased: 1, ..PersonProgress::default() }, None)),
        Err(refusal) if refusal.code == Code::NotFound => {
            Ok((PersonProgress::default(), Some(refusal.into())))
        }
        Err(refusal) => Err(refusal.into()),
    }
}

async fn erase_person(
    house: &House,
    tenant: &Tenant,
    person: &str,
    is_confirmed: bool,
) -> Result<PersonProgress, CliFailure> {
    let names: Vec<&str> = PersonErasure::resources(house).map(|resource| resource.name.as_str()).collect();
    if names.is_empty() {
        let why = "no resource says whose its rows are; add `person = \"COLUMN\"` to those that do, and run `statehouse apply`";
        return Err(CliFailure::Usage(why.into()));
    }
    if !is_confirmed {
        let what = format!("all rows of person {person:?} of tenant {tenant} in {}", names.join(", "));
        return Err(unconfirmed(&what));
    }
    Ok(PersonErasure::of(house, tenant, person).finish().await?)
}

fn unconfirmed(what: &str) -> CliFailure {
    CliFailure::Usage(format!("this erases {what}. It cannot be undone; repeat the command with --yes"))
}
