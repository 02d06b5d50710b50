//! `key`: who may come in over HTTP.

use std::time::Duration;

use serde_json::json;
use statehouse::House;
use statehouse::blueprint::settings::parse_duration;
use statehouse_server::auth::keys::{self, CreatedKey, KeyInfo, NewKey};
use statehouse_server::auth::secret::{HouseSecret, SystemRowError};
use statehouse_server::auth::{BadScope, Scope};
use statehouse_store::Tenant;

use crate::arguments::{KeyArgs, KeyCommand};
use crate::output::{CliFailure, Output};
use crate::settings::CliSettings;
use crate::{audit, blueprint};

pub(crate) async fn run(key: &KeyArgs, output: &Output) -> Result<(), CliFailure> {
    let settings = CliSettings::read(&key.live().flags())?;
    let house = blueprint::open_in_use(&settings.own).await?;
    let done = act(&house, &settings, &key.command, output).await;
    house.store().close().await;
    done
}

async fn act(
    house: &House,
    settings: &CliSettings,
    command: &KeyCommand,
    output: &Output,
) -> Result<(), CliFailure> {
    let (now, by) = (house.clock().now(), audit::actor());
    let secret = || HouseSecret::of(house, settings.server.secret.as_deref());
    match command {
        KeyCommand::Create { tenant, name, scopes, expires_in, networks, quiet, .. } => {
            let scopes = read_scopes(house, scopes)?;
            let expires_in = expires_in.as_deref().map(read_span).transpose()?;
            let networks = networks.parse().map_err(|error| CliFailure::Usage(format!("--from: {error}")))?;
            let new =
                NewKey { tenant: read_tenant(tenant)?, name: name.clone(), scopes, expires_in, networks };
            let created = keys::create(house, &secret().await?, new, &by).await?;
            show_created(&created, *quiet, output);
        }
        KeyCommand::Rotate { prefix, overlap, expires_in, quiet, .. } => {
            let overlap = read_span(overlap)?;
            let expires_in = expires_in.as_deref().map(read_span).transpose()?;
            let created = keys::rotate(house, &secret().await?, prefix, (overlap, expires_in), &by).await?;
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
            let info = keys::revoke(house, prefix, &by).await?;
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
    let from = info.networks.as_deref().map_or(String::new(), |networks| format!(", from {networks}"));
    format!("{}  {:<16} {:<18} {:<20} {state}{from}", info.prefix, info.tenant, info.scopes, info.name)
}

fn read_tenant(text: &str) -> Result<Tenant, CliFailure> {
    Tenant::new(text).map_err(|error| CliFailure::Usage(format!("--tenant: {error}")))
}

fn read_span(text: &str) -> Result<Duration, CliFailure> {
    parse_duration(text)
        .ok_or_else(|| CliFailure::Usage(format!("`{text}` is no span of time; write 90d, 12h or 30m")))
}

fn read_scopes(house: &House, text: &str) -> Result<Vec<Scope>, CliFailure> {
    let wrong = |why: String| CliFailure::Usage(format!("--scopes: {why}"));
    let words = text.split([',', ' ']).filter(|word| !word.is_empty());
    let scopes: Vec<Scope> =
        words.map(str::parse).collect::<Result<_, BadScope>>().map_err(|error| wrong(error.to_string()))?;
    for scope in &scopes {
        scope.check(house).map_err(|error| wrong(error.to_string()))?;
    }
    if scopes.is_empty() { Err(wrong("none was given".into())) } else { Ok(scopes) }
}

impl From<SystemRowError> for CliFailure {
    fn from(error: SystemRowError) -> CliFailure {
        match error {
            SystemRowError::NoKey(_)
            | SystemRowError::NotLive(_)
            | SystemRowError::BadName
            | SystemRowError::OwnTenant(_)
            | SystemRowError::ShortSecret { .. } => CliFailure::Usage(error.to_string()),
            other => CliFailure::Other(other.into()),
        }
    }
}
