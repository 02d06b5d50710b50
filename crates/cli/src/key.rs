//! `key`: who may come in over HTTP.

use std::time::Duration;

use serde_json::json;
use statehouse::House;
use statehouse::blueprint::settings::parse_duration;
use statehouse_server::auth::keys::{self, CreatedKey, KeyInfo, NewKey};
use statehouse_server::auth::secret::{Secret, SystemRowError};
use statehouse_server::auth::{Scope, scopes_text};
use statehouse_store::Tenant;

use crate::arguments::{Key, KeyCommand};
use crate::blueprint;
use crate::output::{Failure, Output};
use crate::settings::Settings;

pub(crate) async fn run(key: &Key, output: &Output) -> Result<(), Failure> {
    let settings = Settings::read(&key.live().flags())?;
    let house = blueprint::open_in_use(&settings.own).await?;
    let done = act(&house, &settings, &key.command, output).await;
    house.store().close().await;
    done
}

async fn act(
    house: &House,
    settings: &Settings,
    command: &KeyCommand,
    output: &Output,
) -> Result<(), Failure> {
    let now = house.clock().now();
    let secret = || Secret::of(house, settings.server.secret.as_deref());
    match command {
        KeyCommand::Create { tenant, name, scopes, expires_in, quiet, .. } => {
            let scopes = read_scopes(scopes)?;
            let expires_in = expires_in.as_deref().map(read_span).transpose()?;
            let new = NewKey { tenant: read_tenant(tenant)?, name: name.clone(), scopes, expires_in };
            let created = keys::create(house, &secret().await?, new).await?;
            show_created(&created, *quiet, output);
        }
        KeyCommand::Rotate { prefix, overlap, expires_in, quiet, .. } => {
            let overlap = read_span(overlap)?;
            let expires_in = expires_in.as_deref().map(read_span).transpose()?;
            let created = keys::rotate(house, &secret().await?, prefix, overlap, expires_in).await?;
            show_created(&created, *quiet, output);
        }
        KeyCommand::List { tenant, .. } => {
            let tenant = tenant.as_deref().map(read_tenant).transpose()?;
            let listed = keys::list(house, tenant.as_ref()).await?;
            output.show(&json!(listed), || {
                if listed.is_empty() {
                    return "There is no key yet; `statehouse key create` makes one.".into();
                }
                listed.iter().map(|info| line(info, info.is_live(now))).collect::<Vec<_>>().join("\n")
            });
        }
        KeyCommand::Revoke { prefix, .. } => {
            let info = keys::revoke(house, prefix).await?;
            output.show(&json!(info), || {
                format!("{} is revoked. Servers turn it away within some seconds.", info.prefix)
            });
        }
    }
    Ok(())
}

fn show_created(created: &CreatedKey, quiet: bool, output: &Output) {
    output.show(&json!({"key": created.key, "info": created.info}), || {
        if quiet {
            return created.key.clone();
        }
        let info = &created.info;
        format!(
            "{}\n\nFor tenant {}, scopes {}. Keep it: it is shown this once and stored nowhere.\n\
             Lists and `statehouse key revoke` call it {}.",
            created.key, info.tenant, info.scopes, info.prefix
        )
    });
}

fn line(info: &KeyInfo, live: bool) -> String {
    let state = match (live, info.revoked_at, info.expires_at) {
        (true, _, None) => "live".to_owned(),
        (true, _, Some(end)) => format!("live until {end}"),
        (false, Some(at), _) => format!("revoked {at}"),
        (false, None, _) => "expired".to_owned(),
    };
    format!("{}  {:<16} {:<18} {:<20} {state}", info.prefix, info.tenant, info.scopes, info.name)
}

fn read_tenant(text: &str) -> Result<Tenant, Failure> {
    Tenant::new(text).map_err(|error| Failure::Usage(format!("--tenant: {error}")))
}

fn read_span(text: &str) -> Result<Duration, Failure> {
    parse_duration(text)
        .ok_or_else(|| Failure::Usage(format!("`{text}` is no span of time; write 90d, 12h or 30m")))
}

fn read_scopes(text: &str) -> Result<Vec<Scope>, Failure> {
    let scopes: Result<Vec<Scope>, _> =
        text.split([',', ' ']).filter(|word| !word.is_empty()).map(str::parse).collect();
    let wrong =
        |why: String| Failure::Usage(format!("--scopes: {why}; there are {}", scopes_text(&Scope::ALL)));
    let scopes = scopes.map_err(|error| wrong(error.to_string()))?;
    if scopes.is_empty() { Err(wrong("none was given".into())) } else { Ok(scopes) }
}

impl From<SystemRowError> for Failure {
    fn from(error: SystemRowError) -> Failure {
        match error {
            SystemRowError::NoKey(_) | SystemRowError::OwnTenant(_) | SystemRowError::ShortSecret { .. } => {
                Failure::Usage(error.to_string())
            }
            other => Failure::Other(other.into()),
        }
    }
}
