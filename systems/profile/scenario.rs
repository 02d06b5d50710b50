//! People edit their profile from several devices at once, collect points, and sometimes leave and come back.
//!
//! Every write is sent a second time under the same id, as a client does that lost the answer, and must get the
//! first one's answer.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, bail, ensure};
use serde_json::json;
use statehouse::{Answer, Code, Request};
use statehouse_store::Tenant;
use statehouse_store::random::Random;

use super::{
    Invariant, ScenarioContext, entities_are_sound, nothing_is_lost_or_doubled, number, request, under,
    versions_have_one_writer,
};

/// Few people, so that their devices meet.
const PEOPLE: u64 = 20;

/// What the devices know to have been acknowledged.
#[derive(Default)]
struct ProfileAcknowledged {
    operations: Vec<String>,
    points: i64,
}

pub(super) async fn run(context: Arc<ScenarioContext>) -> Result<Vec<Invariant>> {
    let tenant = Tenant::new("default")?;
    let acknowledged = Arc::new(Mutex::new(ProfileAcknowledged::default()));
    for person in 0..PEOPLE {
        let input = json!({"user_id": person, "display_name": format!("Person {person}")});
        let operation = format!("join-{person}");
        write(&context, &tenant, &acknowledged, request("profile.create", &[], input), &operation).await?;
    }
    context
        .callers(|context, device, random| {
            let (tenant, acknowledged) = (tenant.clone(), acknowledged.clone());
            async move { use_device(&context, &tenant, &acknowledged, device, random).await }
        })
        .await?;
    let records = context.records().await?;
    let (versions, deletions) = entities_are_sound(context.scope(&tenant, "profile")).await?;
    let acknowledged = std::mem::take(&mut *acknowledged.lock().unwrap_or_else(PoisonError::into_inner));
    let mut invariants = vec![
        versions_have_one_writer(versions),
        nothing_is_lost_or_doubled(&records, &acknowledged.operations)?,
    ];
    invariants.push(Invariant {
        holds: "a deleted profile accepts no update",
        counted: format!("{deletions} deletions"),
    });
    let mut points = 0;
    for person in 0..PEOPLE as i64 {
        match context.call(&tenant, request("profile.read", &[person.into()], json!({})), "").await? {
            Ok(answer) => points += number(&answer.body, "points")?,
            Err(refusal) => bail!("profile {person} cannot be read: {refusal}"),
        }
    }
    ensure!(
        points == acknowledged.points,
        "{} points were given and {points} are there",
        acknowledged.points
    );
    invariants.push(Invariant {
        holds: "every point that was given is there once",
        counted: format!("{points} points"),
    });
    Ok(invariants)
}

/// What one device does: mostly edits, often points, rarely a deletion that is undone.
async fn use_device(
    context: &ScenarioContext,
    tenant: &Tenant,
    acknowledged: &Mutex<ProfileAcknowledged>,
    device: usize,
    mut random: Random,
) -> Result<()> {
    for number in 0..context.size.actions {
        let person = random.below(PEOPLE) as i64;
        let key = [person.into()];
        let operation = format!("device-{device}-{number}");
        match random.below(20) {
            0 => {
                write(context, tenant, acknowledged, request("profile.delete", &key, json!({})), &operation)
                    .await?;
                let back = format!("{operation}-back");
                write(context, tenant, acknowledged, request("profile.restore", &key, json!({})), &back)
                    .await?;
            }
            1..8 => {
                let input = json!({"increment": {"points": 1}});
                let mutate = request("profile.mutate", &key, input);
                if write(context, tenant, acknowledged, mutate, &operation).await?.is_some() {
                    acknowledged.lock().unwrap_or_else(PoisonError::into_inner).points += 1;
                }
            }
            _ => edit(context, tenant, acknowledged, person, &operation).await?,
        }
        context.done();
    }
    Ok(())
}

/// Reads, changes, writes under the version that was read; reads again when another caller was faster.
async fn edit(
    context: &ScenarioContext,
    tenant: &Tenant,
    acknowledged: &Mutex<ProfileAcknowledged>,
    person: i64,
    operation: &str,
) -> Result<()> {
    let key = [person.into()];
    for attempt in 0.. {
        let read = context.call(tenant, request("profile.read", &key, json!({})), "").await?;
        // Another caller has deleted it for a moment.
        let Ok(answer) = read else { return Ok(()) };
        let seen = number(&answer.body, "version")?;
        let patch = request("profile.patch", &key, json!({"bio": format!("{operation}, try {attempt}")}));
        let operation = format!("{operation}-{attempt}");
        if write(context, tenant, acknowledged, under(seen, patch), &operation).await?.is_some() {
            return Ok(());
        }
    }
    Ok(())
}

/// Writes, and writes again under the same id. `None` if the write was refused as it may be.
async fn write(
    context: &ScenarioContext,
    tenant: &Tenant,
    acknowledged: &Mutex<ProfileAcknowledged>,
    request: Request,
    operation: &str,
) -> Result<Option<Answer>> {
    let first = match context.call(tenant, request.clone(), operation).await? {
        Ok(answer) => answer,
        Err(refusal) => match refusal.code {
            Code::VersionConflict | Code::Deleted | Code::NotDeleted => return Ok(None),
            _ => bail!("{operation}: {refusal}"),
        },
    };
    acknowledged.lock().unwrap_or_else(PoisonError::into_inner).operations.push(operation.to_owned());
    match context.call(tenant, request, operation).await? {
        Ok(again) if again.body == first.body => Ok(Some(first)),
        other => bail!("{operation} was answered {:?} and then {other:?}", first.body),
    }
}
