//! `serve`: the house over HTTP, and `config`: what it would be served with.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value as Json, json};
use statehouse::House;
use statehouse::audit::AuditActor;
use statehouse_server::Server;
use statehouse_server::config::ConsoleMode;
use statehouse_server::console::{self, ConsoleSources};
use statehouse_server::logs::{self, Format, Logs};
use statehouse_store::{Migrate, SchemaChange};
use tokio::net::TcpListener;

use crate::arguments::Serve;
use crate::audit::{self, MigrationAudit};
use crate::output::{CliFailure, Output};
use crate::settings::{CliSettings, LogFormat, MigrateOnStart, Own, Workers};
use crate::stop::stop_requested;
use crate::{blueprint, explain, hint};

/// How long a killed server holds up changes that an older blueprint cannot go on after.
const PROCESS_LEASE: Duration = Duration::from_secs(10);
/// The shortest lease of a process on its part of the work.
const WORKER_LEASE_MS_MIN: u64 = 500;

pub(crate) async fn run(serve: &Serve, output: &Output) -> Result<(), CliFailure> {
    let settings = CliSettings::read(&serve.flags()?)?;
    let _logs = start_log(&settings.own)?;
    let lease = worker_lease(&settings.own)?;
    // Before anything is opened or migrated, so that a server that may not listen leaves nothing behind.
    let listener = match settings.own.workers {
        Workers::Only => None,
        Workers::On | Workers::Off => Some(bind(&settings).await?),
    };
    let retention = retention_text(&settings.own)?;
    let audit_retention = audit::retention(&settings.own)?;
    let house = blueprint::open_for_calls(&settings.own).await?;
    let house = match audit_retention {
        Some(kept) => house.with_audit_retention(kept),
        None => house,
    };
    let start = match fit(&house, settings.own.migrate).await {
        Ok(start) => start,
        Err(failure) => {
            house.store().close().await;
            return Err(failure);
        }
    };
    if house.secret_keys().is_empty() {
        tracing::warn!(
            target: "statehouse::secrets",
            "secrets in the store are not encrypted; set STATEHOUSE_SECRETS_KEY_FILE to a file with a key from \
             `statehouse secret new-key`"
        );
    }
    tracing::info!(target: "statehouse::store", log_retention = retention, "the log is trimmed");
    let house = Arc::new(house);
    if let Err(error) = house.register(PROCESS_LEASE).await {
        house.store().close().await;
        return Err(error.into());
    }
    if settings.own.workers != Workers::Off {
        house.start_workers(statehouse::worker::WorkerOptions { lease, ..Default::default() });
    }
    let served = match listener {
        None => work(&house, &start, output).await,
        Some(listener) => listen(listener, &house, &settings, (&retention, &start), output).await,
    };
    house.stop_workers().await;
    house.unregister().await;
    house.store().close().await;
    served
}

/// What is said about the store when a server starts.
struct StartReport {
    /// The changes that were made.
    changes: Vec<String>,
    /// Tables that the blueprint does not name.
    orphaned: Vec<String>,
}

impl StartReport {
    fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> =
            self.changes.iter().map(|change| format!("Changed the store: {change}.")).collect();
        lines.extend(self.orphaned.iter().map(|table| {
            format!(
                "The blueprint does not name the table {table} of the store. It stays with its data; \
                 `statehouse apply --allow-loss {table}` removes it."
            )
        }));
        lines
    }
}

/// Makes the store fit the blueprint, as far as the settings let it.
async fn fit(house: &House, migrate: MigrateOnStart) -> Result<StartReport, CliFailure> {
    let changes = match migrate {
        MigrateOnStart::Off => {
            house.check_fit().await?;
            Vec::new()
        }
        MigrateOnStart::Additive | MigrateOnStart::All => migrate_at_start(house, migrate).await?,
    };
    for change in &changes {
        tracing::info!(target: "statehouse::store", %change, "migrated");
    }
    let orphaned = house.orphaned_tables().await?;
    for table in &orphaned {
        tracing::warn!(target: "statehouse::store", %table, "the blueprint does not name this table of the store");
    }
    Ok(StartReport { changes: changes.iter().map(ToString::to_string).collect(), orphaned })
}

/// Makes the changes of the settings, and records them in the audit.
async fn migrate_at_start(house: &House, migrate: MigrateOnStart) -> Result<Vec<SchemaChange>, CliFailure> {
    let planned = house.migrate(Migrate::Show).await?;
    let made: Vec<SchemaChange> = planned.into_iter().filter(|change| !change.removes()).collect();
    let recorded = MigrationAudit::begin(house, AuditActor::program("serve"), &made, &[]).await?;
    let done = match migrate {
        MigrateOnStart::All => house.migrate(Migrate::Apply).await,
        MigrateOnStart::Additive | MigrateOnStart::Off => house.prepare().await,
    };
    let ended = if made.is_empty() { Ok(()) } else { recorded.end(&done).await };
    let changes = done?;
    ended?;
    Ok(changes)
}

/// How long the log is kept, for messages.
fn retention_text(own: &Own) -> Result<String, CliFailure> {
    const HOUR_S: u64 = 60 * 60;
    let Some(kept) = blueprint::log_retention(own, &blueprint::read(own)?)? else {
        return Ok(blueprint::FOREVER.into());
    };
    Ok(match kept.span.as_secs() {
        days if days % (24 * HOUR_S) == 0 => format!("{}d", days / (24 * HOUR_S)),
        hours if hours % HOUR_S == 0 => format!("{}h", hours / HOUR_S),
        seconds => format!("{seconds}s"),
    })
}

/// How long this process holds its part of the work without a sign of life.
fn worker_lease(own: &Own) -> Result<Duration, CliFailure> {
    if own.worker_lease_ms < WORKER_LEASE_MS_MIN {
        let given = own.worker_lease_ms;
        return Err(CliFailure::Usage(format!(
            "worker_lease_ms is {given}; below {WORKER_LEASE_MS_MIN} processes would lose their work to each other \
             whenever one of them is busy"
        )));
    }
    Ok(Duration::from_millis(own.worker_lease_ms))
}

/// Nothing but the house's own work, until the process is told to end.
async fn work(house: &House, start: &StartReport, output: &Output) -> Result<(), CliFailure> {
    let stop = stop_requested();
    let workers: Vec<String> = house.worker_figures().into_iter().map(|figures| figures.worker).collect();
    let json = json!({
        "house": house.name(), "engine": house.store().engine(), "workers": workers, "changes": start.changes,
        "orphaned_tables": start.orphaned,
    });
    output.line(&json, || {
        let list = if workers.is_empty() { "no workers".to_owned() } else { workers.join(", ") };
        let (name, engine) = (house.name(), house.store().engine());
        let mut lines = start.lines();
        lines.push(format!("{name} is worked on, in {engine}: {list}. Ctrl-C stops it."));
        lines.join("\n")
    });
    stop.await;
    Ok(())
}

/// Takes the address, if the server may be reached there.
async fn bind(settings: &CliSettings) -> Result<TcpListener, CliFailure> {
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
    settings: &CliSettings,
    (retention, start): (&str, &StartReport),
    output: &Output,
) -> Result<(), CliFailure> {
    let stop = stop_requested();
    let sources = console_sources(&settings.own)?;
    let server = Server::with_console(house.clone(), settings.server.clone(), sources).await;
    let server = server.map_err(anyhow::Error::from)?;
    let bound = listener.local_addr().context("the socket has no address")?;
    let scheme = if settings.server.tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{bound}");
    let needs_key = settings.server.auth.is_required();
    let commands = hint::commands(house, &url, needs_key).await?;
    let is_console = settings.server.console != ConsoleMode::Off;
    let console = is_console.then(|| format!("{url}{}", console::ROOT));
    let json = json!({
        "house": house.name(), "url": url, "engine": house.store().engine(), "log_retention": retention,
        "try": commands, "console": console, "changes": start.changes, "orphaned_tables": start.orphaned,
    });
    output.line(&json, || {
        let mut lines = start.lines();
        lines.push(greeting(house, &url, retention, console.as_deref(), needs_key, &commands));
        lines.join("\n")
    });
    server.serve(listener, stop).await.map_err(|error| anyhow::Error::from(error).into())
}

/// What the console shows beside the house.
fn console_sources(own: &Own) -> Result<ConsoleSources, CliFailure> {
    let text = std::fs::read_to_string(&own.blueprint)
        .with_context(|| format!("{} cannot be read", own.blueprint.display()))?;
    let explainer = explain::ConsoleExplainer { blueprint: blueprint::read(own)? };
    Ok(ConsoleSources { blueprint: Some(text), explainer: Some(Arc::new(explainer)) })
}

fn greeting(
    house: &House,
    url: &str,
    retention: &str,
    console: Option<&str>,
    needs_key: bool,
    commands: &[hint::SuggestedCommand],
) -> String {
    let mut lines = vec![format!(
        "{} is served at {url}, from {}. Ctrl-C stops it.",
        house.name(),
        house.store().engine()
    )];
    lines.extend(console.map(|console| format!("The console: {console}")));
    lines.push(format!("The log is kept for {retention} (log_retention)."));
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
fn start_log(own: &Own) -> Result<Logs, CliFailure> {
    let terminal = std::io::stderr().is_terminal();
    let format = match own.log_format {
        LogFormat::Text => Format::Text,
        LogFormat::Auto if terminal => Format::Text,
        LogFormat::Auto | LogFormat::Json => Format::Json,
    };
    let started = logs::start(logs::LogOptions { level: own.log, format }, std::io::stderr());
    started.map_err(|error| CliFailure::Other(error.into()))
}

pub(crate) fn config(serve: &Serve, output: &Output) -> Result<(), CliFailure> {
    let settings = CliSettings::read(&serve.flags()?)?.list();
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
