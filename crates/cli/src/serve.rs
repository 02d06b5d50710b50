//! `serve`: the house over HTTP, and `config`: what it would be served with.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value as Json, json};
use statehouse::House;
use statehouse_server::Server;
use statehouse_server::logs::{self, Format, Logs};
use tokio::net::TcpListener;

use crate::arguments::Serve;
use crate::output::{Failure, Output};
use crate::settings::{LogFormat, MigrateOnStart, Own, Settings, Workers};
use crate::stop::told_to_stop;
use crate::{blueprint, hint};

/// The shortest lease of a process on its part of the work.
const WORKER_LEASE_MS_MIN: u64 = 500;

pub(crate) async fn run(serve: &Serve, output: &Output) -> Result<(), Failure> {
    let settings = Settings::read(&serve.flags()?)?;
    let _logs = start_log(&settings.own)?;
    let lease = worker_lease(&settings.own)?;
    // Before anything is opened or migrated, so that a server that may not listen leaves nothing behind.
    let listener = match settings.own.workers {
        Workers::Only => None,
        Workers::On | Workers::Off => Some(bind(&settings).await?),
    };
    let house = blueprint::open_for_calls(&settings.own).await?;
    if let Err(failure) = fit(&house, settings.own.migrate).await {
        house.store().close().await;
        return Err(failure);
    }
    let house = Arc::new(house);
    if settings.own.workers != Workers::Off {
        house.start_workers(statehouse::worker::Options { lease, ..Default::default() });
    }
    let served = match listener {
        None => work(&house, output).await,
        Some(listener) => listen(listener, &house, &settings, output).await,
    };
    house.stop_workers().await;
    house.store().close().await;
    served
}

/// Makes the store fit the blueprint, as far as the settings let it.
async fn fit(house: &House, migrate: MigrateOnStart) -> Result<(), Failure> {
    match migrate {
        MigrateOnStart::Never => house.check_fit().await?,
        MigrateOnStart::Add => {
            for change in &house.prepare().await? {
                tracing::info!(target: "statehouse::store", %change, "migrated");
            }
        }
    }
    Ok(())
}

/// How long this process holds its part of the work without a sign of life.
fn worker_lease(own: &Own) -> Result<Duration, Failure> {
    if own.worker_lease_ms < WORKER_LEASE_MS_MIN {
        let given = own.worker_lease_ms;
        return Err(Failure::Usage(format!(
            "worker_lease_ms is {given}; below {WORKER_LEASE_MS_MIN} processes would lose their work to each other \
             whenever one of them is busy"
        )));
    }
    Ok(Duration::from_millis(own.worker_lease_ms))
}

/// Nothing but the house's own work, until the process is told to end.
async fn work(house: &House, output: &Output) -> Result<(), Failure> {
    let stop = told_to_stop();
    let workers: Vec<String> = house.worker_figures().into_iter().map(|figures| figures.worker).collect();
    let json = json!({"house": house.name(), "engine": house.store().engine(), "workers": workers});
    output.line(&json, || {
        let list = if workers.is_empty() { "no workers".to_owned() } else { workers.join(", ") };
        format!("{} is worked on, in {}: {list}. Ctrl-C stops it.", house.name(), house.store().engine())
    });
    stop.await;
    Ok(())
}

/// Takes the address, if the server may be reached there.
async fn bind(settings: &Settings) -> Result<TcpListener, Failure> {
    let address = &settings.own.listen;
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("{address} cannot be listened on; --listen takes another address, and port 0 any free one")
    })?;
    settings.server.may_listen(&listener).map_err(anyhow::Error::from)?;
    Ok(listener)
}

async fn listen(
    listener: TcpListener,
    house: &Arc<House>,
    settings: &Settings,
    output: &Output,
) -> Result<(), Failure> {
    let stop = told_to_stop();
    let server = Server::new(house.clone(), settings.server.clone()).await.map_err(anyhow::Error::from)?;
    let bound = listener.local_addr().context("the socket has no address")?;
    let scheme = if settings.server.tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{bound}");
    let needs_key = settings.server.auth.is_required();
    let commands = hint::commands(house, &url, needs_key).await?;
    let json = json!({
        "house": house.name(), "url": url, "engine": house.store().engine(), "try": commands,
    });
    output.line(&json, || greeting(house, &url, needs_key, &commands));
    server.serve(listener, stop).await.map_err(|error| anyhow::Error::from(error).into())
}

fn greeting(house: &House, url: &str, needs_key: bool, commands: &[hint::Command]) -> String {
    let mut lines = vec![format!(
        "{} is served at {url}, from {}. Ctrl-C stops it.",
        house.name(),
        house.store().engine()
    )];
    if needs_key {
        lines.push("Callers need a key: export KEY=$(statehouse key create --quiet)".into());
    }
    for command in commands {
        lines.push(format!("\n# {}\n{}", command.about, command.text));
    }
    lines.push(format!("\nEverything else: {url}/openapi.json\n"));
    lines.join("\n")
}

/// Log lines go to standard error: text for people at a terminal, JSON elsewhere.
fn start_log(own: &Own) -> Result<Logs, Failure> {
    let terminal = std::io::stderr().is_terminal();
    let format = match own.log_format {
        LogFormat::Text => Format::Text,
        LogFormat::Auto if terminal => Format::Text,
        LogFormat::Auto | LogFormat::Json => Format::Json,
    };
    let started = logs::start(logs::Options { level: own.log, format }, std::io::stderr());
    started.map_err(|error| Failure::Other(error.into()))
}

pub(crate) fn config(serve: &Serve, output: &Output) -> Result<(), Failure> {
    let settings = Settings::read(&serve.flags()?)?.list();
    let json: Vec<Json> = settings
        .iter()
        .map(|(name, value, origin)| json!({"name": name, "value": value, "origin": origin}))
        .collect();
    output.show(&json!(json), || {
        let line = |(name, value, origin): &(String, Json, String)| {
            let value = match value {
                Json::Null => "-".to_owned(),
                Json::String(text) => text.clone(),
                other => other.to_string(),
            };
            format!("{name:<28} {value:<24} {origin}")
        };
        settings.iter().map(line).collect::<Vec<_>>().join("\n")
    });
    Ok(())
}
