//! `secret`: what effects need and nobody may read.

use std::io::Read as _;

use anyhow::Context as _;
use serde_json::json;
use statehouse::House;
use statehouse::infra::effect::{forget_secret, keep_secret, new_secret};
use statehouse_store::{Commit, Plan, PlanError};

use crate::arguments::{Secret, SecretCommand};
use crate::blueprint;
use crate::output::{Failure, Output};
use crate::settings::Settings;

pub(crate) async fn run(secret: &Secret, output: &Output) -> Result<(), Failure> {
    let settings = Settings::read(&secret.live().flags())?;
    let house = blueprint::open_in_use(&settings.own).await?;
    let done = act(&house, &secret.command, output).await;
    house.store().close().await;
    done
}

async fn act(house: &House, command: &SecretCommand, output: &Output) -> Result<(), Failure> {
    let operation = house.ids().next();
    match command {
        SecretCommand::Set { name, .. } => {
            let mut secret = String::new();
            std::io::stdin().read_to_string(&mut secret).context("standard input cannot be read as text")?;
            let secret = secret.trim_end_matches(['\r', '\n']);
            if secret.is_empty() {
                return Err(Failure::Usage(
                    "standard input is empty: `statehouse secret set NAME < FILE`".into(),
                ));
            }
            commit(house, keep_secret(name, secret, &operation)).await?;
            output.show(&json!({"name": name}), || format!("Effects find it as house:{name}."));
        }
        SecretCommand::Generate { name, .. } => {
            let secret = new_secret().map_err(|error| Failure::Other(error.into()))?;
            commit(house, keep_secret(name, &secret, &operation)).await?;
            output.show(&json!({"name": name, "secret": secret}), || secret.clone());
        }
        SecretCommand::Forget { name, .. } => {
            commit(house, forget_secret(name, &operation)).await?;
            output.show(&json!({"name": name}), || format!("house:{name} is forgotten."));
        }
    }
    Ok(())
}

async fn commit(house: &House, plan: Result<Plan, PlanError>) -> Result<(), Failure> {
    let plan = plan.map_err(|error| Failure::Usage(error.to_string()))?;
    match house.store().commit(&plan).await? {
        Commit::Applied(_) => Ok(()),
        Commit::Refused(_) | Commit::Fenced => {
            Err(Failure::Other(anyhow::anyhow!("the store refused to keep it; try again")))
        }
    }
}
