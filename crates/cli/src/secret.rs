//! `secret`: values that effects send and that cannot be read back.

use std::io::Read as _;

use anyhow::Context as _;
use serde_json::json;
use statehouse::House;
use statehouse::audit;
use statehouse::infra::effect::{SecretChange, forget_secret, keep_secret, new_secret};
use statehouse::secret_keys::{SecretKeyError, SecretKeys, reencrypt};
use statehouse_store::Plan;

use crate::arguments::{SecretArgs, SecretCommand};
use crate::blueprint;
use crate::output::{CliFailure, Output};
use crate::settings::CliSettings;

pub(crate) async fn run(secret: &SecretArgs, output: &Output) -> Result<(), CliFailure> {
    let Some(live) = secret.live() else {
        let key = SecretKeys::generate().map_err(|error| CliFailure::Other(error.into()))?;
        output.show(&json!({"key": key}), || key.clone());
        return Ok(());
    };
    let settings = CliSettings::read(&live.flags())?;
    let house = blueprint::open_in_use(&settings.own).await?;
    let done = act(&house, &secret.command, output).await;
    house.store().close().await;
    done
}

async fn act(house: &House, command: &SecretCommand, output: &Output) -> Result<(), CliFailure> {
    let (by, operation) = (crate::audit::actor(), house.ids().next());
    let change = SecretChange { by: &by, at: house.clock().now(), operation: &operation };
    match command {
        SecretCommand::Set { name, .. } => {
            let mut secret = String::new();
            std::io::stdin().read_to_string(&mut secret).context("standard input cannot be read as text")?;
            let secret = secret.trim_end_matches(['\r', '\n']);
            if secret.is_empty() {
                return Err(CliFailure::Usage(
                    "standard input is empty: `statehouse secret set NAME < FILE`".into(),
                ));
            }
            commit(house, keep_secret(house.secret_keys(), name, secret, change)).await?;
            output.show(&json!({"name": name}), || format!("Effects find it as house:{name}."));
        }
        SecretCommand::Generate { name, .. } => {
            let secret = new_secret().map_err(|error| CliFailure::Other(error.into()))?;
            commit(house, keep_secret(house.secret_keys(), name, &secret, change)).await?;
            output.show(&json!({"name": name, "secret": secret}), || secret.clone());
        }
        SecretCommand::Forget { name, .. } => {
            commit(house, forget_secret(name, change)).await?;
            output.show(&json!({"name": name}), || format!("house:{name} is forgotten."));
        }
        SecretCommand::Reencrypt { .. } => {
            let done = reencrypt(house, &by).await.map_err(|error| CliFailure::Other(error.into()))?;
            let key = house.secret_keys().ids().next().unwrap_or_default();
            output.show(&json!({"key": key, "total": done.total, "changed": done.changed}), || {
                format!("{} of {} secrets were encrypted anew, with the key {key}.", done.changed, done.total)
            });
        }
        SecretCommand::NewKey => {}
    }
    Ok(())
}

async fn commit(house: &House, plan: Result<Plan, SecretKeyError>) -> Result<(), CliFailure> {
    let plan = plan.map_err(|error| CliFailure::Usage(error.to_string()))?;
    match audit::commit(&**house.store(), &plan).await? {
        None => Ok(()),
        Some(_) => Err(CliFailure::Other(anyhow::anyhow!("the store refused to keep it; try again"))),
    }
}
