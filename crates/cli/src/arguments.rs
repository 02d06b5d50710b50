//! The arguments of the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use statehouse::engine::Engine;
use statehouse_drills::systems::BLUEPRINTS;

use crate::output::CliFailure;
use crate::settings::Flags;

/// Declare what kind of state each thing in your product is; get guarded writes over HTTP, and their proof.
#[derive(Debug, Parser)]
#[command(
    name = "statehouse",
    version,
    about,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the blueprint is invalid, 4 refused by a conflict."
)]
pub(crate) struct Arguments {
    /// Print JSON, for programs.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: CliCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Write a first blueprint.
    #[command(after_help = "Examples:\n  statehouse init\n  statehouse init --template catalog shop")]
    Init(Init),
    /// Report all problems of a blueprint.
    #[command(
        after_help = "Examples:\n  statehouse check\n  statehouse check --blueprint shop/statehouse.toml --on dynamodb"
    )]
    Check(Check),
    /// Show what `apply` would change on the live store, or what would change with another engine.
    #[command(
        after_help = "Examples:\n  statehouse plan\n  statehouse plan --store postgres://app@localhost/shop\n  \
        statehouse plan --to dynamodb"
    )]
    Plan(PlanArgs),
    /// Change the tables of the store to those of the blueprint. Adds tables and columns, and moves the values of fields that
    /// become hot; removes only data that --allow-loss names.
    #[command(after_help = "Examples:\n  statehouse apply\n  statehouse apply --allow-loss products.note")]
    Apply(Apply),
    /// Copy the store to a file, as of one moment, while servers run. For SQLite; for other engines it prints which of their
    /// tools to use.
    #[command(after_help = "Examples:\n  statehouse backup house-2026-11-18.db\n  \
        statehouse backup --store sqlite:/var/lib/house.db /backup/house.db --json\n\n\
        The file must not exist. It is complete, checked and on the disk when the command ends with 0; otherwise there is \
        none. To restore: stop all servers, replace the store's file, remove the files beside the old one \
        (-wal, -shm), start the servers.")]
    Backup(Backup),
    /// Serve the house over HTTP.
    #[command(after_help = "Examples:\n  statehouse serve\n  \
        statehouse serve --store postgres://app@localhost/shop --listen 127.0.0.1:9000\n  \
        statehouse serve --listen 0.0.0.0:8080 --api-keys --set limits.connections=2000\n  \
        statehouse serve --workers only")]
    Serve(Serve),
    /// Show every setting of `serve`, and where it comes from: flag, environment, file or default.
    #[command(after_help = "Examples:\n  statehouse config\n  STATEHOUSE_LISTEN=[::1]:80 statehouse config")]
    Config(Serve),
    /// Create, list, rotate and revoke the API keys of callers over HTTP.
    Key(KeyArgs),
    /// Show who did what with which credential: changes of keys and secrets, operations on projections, migrations, logins.
    Audit(AuditArgs),
    /// Show projections such as views, with their generations and lag; rebuild one beside the live one, or roll back.
    Projection(Project),
    /// Store secrets for effects, which name them as `house:NAME`. Stored secrets are never shown.
    Secret(SecretArgs),
    /// Show workflows as charts for other tools, and write blueprints of machines of other tools.
    Workflow(WorkflowArgs),
    /// Run one action on the store.
    #[command(after_help = "Examples:\n  statehouse call profile.create user_id=42 display_name=Ann\n  \
        statehouse call profile.read --key 42\n  \
        statehouse call profile.patch --key 42 --version 1 bio='Likes trains'\n  \
        statehouse call profile.mutate --key 42 --input '{\"increment\": {\"points\": 5}}'")]
    Call(CallArgs),
    /// Erase a row, or all rows of a person, for good, with their events in the log.
    #[command(after_help = "Examples:\n  statehouse erase profile --key 42 --yes\n  \
        statehouse erase --person 42 --tenant acme --yes\n\n\
        Without --yes it says what it would erase and ends with 2. --person erases the rows of every resource that has `person` in \
        the blueprint. The command waits until the events are blank and the store's files were rewritten; docs/security.md says \
        which copies it does not reach, such as backups.")]
    Erase(Erase),
    /// Show what an action does: its abstract shape, then the statements or requests that the engine gets.
    #[command(after_help = "Examples:\n  statehouse explain profile.update\n  \
        statehouse explain profile.update --on postgres\n  statehouse explain profile --on dynamodb")]
    Explain(Explain),
    /// Run an example system under load with lost responses, and check its invariants.
    #[command(after_help = "Examples:\n  statehouse demo\n  statehouse demo catalog --callers 64\n  \
        statehouse demo profile --store 'postgres://app@localhost/shop?schema=demo'")]
    #[cfg_attr(
        not(feature = "proof"),
        command(about = "Run a system under load; not in this build (feature `proof`)")
    )]
    Demo(Demo),
    /// Provoke the failures that the atlas lists, on any engine and on your own resources, in separate namespaces.
    #[command(
        after_help = "Examples:\n  statehouse drill\n  statehouse drill booking --on sqlite:house.db\n  \
        statehouse drill 'duplicate hold' --on postgres://app@localhost/shop --blueprint statehouse.toml\n  \
        statehouse drill --mutate lease\n\n\
        A drill that fails shows the shortest history that was found, and its seed. With --mutate each guard is removed \
        from the plans in turn, on the model, and a drill must fail. Exit code 1: a drill failed, or no drill noticed."
    )]
    #[cfg_attr(
        not(feature = "proof"),
        command(about = "Provoke failures; not in this build (feature `proof`)")
    )]
    Drill(DrillArgs),
    /// Run archetypes and workers in simulated processes that crash, pause and lose responses, on a virtual clock.
    #[command(
        after_help = "Examples:\n  statehouse simulate\n  statehouse simulate --seeds 100000 --minutes 30\n  \
        statehouse simulate --first 4711 --seeds 1 --history"
    )]
    #[cfg_attr(
        not(feature = "proof"),
        command(about = "Simulate crashes; not in this build (feature `proof`)")
    )]
    Simulate(Simulate),
    /// Show the 34 archetypes: states, sources of truth, actors, failures, hotspots, and which are built.
    #[command(
        after_help = "Examples:\n  statehouse atlas\n  statehouse atlas booking\n  statehouse atlas --json"
    )]
    Atlas(Atlas),
    /// Print a completion script for a shell.
    #[command(after_help = "Example:\n  statehouse completions bash > /etc/bash_completion.d/statehouse")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// The files of settings and blueprint.
#[derive(Args, Clone, Debug)]
pub(crate) struct BlueprintFile {
    /// Settings, as a TOML file [env: STATEHOUSE_CONFIG] [default: server.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The blueprint [env: STATEHOUSE_BLUEPRINT] [default: statehouse.toml].
    #[arg(long, value_name = "FILE")]
    pub blueprint: Option<PathBuf>,
}

impl BlueprintFile {
    pub(crate) fn flags(&self) -> Flags {
        let flags = Flags { file: self.config.clone(), given: Vec::new() };
        flags.with("blueprint", self.blueprint.as_ref().map(|path| path.display()))
    }
}

/// A blueprint and a store.
#[derive(Args, Clone, Debug)]
pub(crate) struct Live {
    #[command(flatten)]
    pub file: BlueprintFile,
    /// The store: sqlite:FILE, postgres://…, dynamodb://PREFIX or memory: [env: STATEHOUSE_STORE]
    /// [default: sqlite:statehouse.db].
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
}

impl Live {
    pub(crate) fn flags(&self) -> Flags {
        self.file.flags().with("store", self.store.as_ref())
    }
}

/// The settings of the server. Every setting has a name; the usual ones have flags.
#[derive(Args, Clone, Debug)]
pub(crate) struct Serve {
    #[command(flatten)]
    pub live: Live,
    /// The address to listen on; without credentials only a loopback address [env: STATEHOUSE_LISTEN]
    /// [default: 127.0.0.1:8080].
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Whether this process runs the workers (timers, deadlines, projections): on, off, or only (it serves no HTTP)
    /// [env: STATEHOUSE_WORKERS] [default: on].
    #[arg(long, value_name = "on|off|only")]
    pub workers: Option<String>,
    /// How far the store is made to fit the blueprint at start: off (a store that lacks something is refused), additive (only
    /// changes after which an older blueprint fits again), all (as `apply`; nothing is removed) [env: STATEHOUSE_MIGRATE]
    /// [default: additive].
    #[arg(long, value_name = "off|additive|all")]
    pub migrate: Option<String>,
    /// Authenticate callers by API key (see `statehouse key`) [env: STATEHOUSE_AUTH_API_KEYS].
    #[arg(long)]
    pub api_keys: bool,
    /// Whether the web console is served at /console: on, read-only or off [env: STATEHOUSE_CONSOLE] [default: on].
    #[arg(long, value_name = "on|read-only|off")]
    pub console: Option<String>,
    /// The certificate chain, as a PEM file [env: STATEHOUSE_TLS_CERTIFICATES].
    #[arg(long, value_name = "FILE")]
    pub tls_certificates: Option<PathBuf>,
    /// The certificate's private key, as a PEM file [env: STATEHOUSE_TLS_KEY].
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Log level: off, error, warn, info, debug or trace [env: STATEHOUSE_LOG] [default: info].
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
    /// Any other setting; `statehouse config` lists them. May be given several times.
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
}

impl Serve {
    pub(crate) fn flags(&self) -> Result<Flags, CliFailure> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let mut flags = self
            .live
            .flags()
            .with("listen", self.listen.as_ref())
            .with("workers", self.workers.as_ref())
            .with("migrate", self.migrate.as_ref())
            .with("auth.api_keys", self.api_keys.then_some(true))
            .with("tls.certificates", path(&self.tls_certificates))
            .with("tls.key", path(&self.tls_key))
            .with("console", self.console.as_ref())
            .with("log", self.log.as_ref());
        for setting in &self.set {
            let Some((name, value)) = setting.split_once('=') else {
                return Err(CliFailure::Usage(format!("--set {setting}: write NAME=VALUE")));
            };
            flags = flags.with(name, Some(value));
        }
        Ok(flags)
    }
}

#[derive(Args, Debug)]
pub(crate) struct Backup {
    /// Settings, as a TOML file [env: STATEHOUSE_CONFIG] [default: server.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The store [env: STATEHOUSE_STORE] [default: sqlite:statehouse.db].
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// The file to create. It must not exist.
    pub to: PathBuf,
}

impl Backup {
    pub(crate) fn flags(&self) -> Flags {
        Flags { file: self.config.clone(), given: Vec::new() }.with("store", self.store.as_ref())
    }
}

#[derive(Args, Debug)]
pub(crate) struct Project {
    #[command(subcommand)]
    pub command: ProjectCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProjectCommand {
    /// List projections, with their live generation and its lag.
    #[command(after_help = "Example:\n  statehouse projection list --json")]
    List {
        #[command(flatten)]
        live: Live,
    },
    /// Show one projection.
    #[command(after_help = "Example:\n  statehouse projection status profiles_by_status")]
    Status {
        #[command(flatten)]
        live: Live,
        /// The projection.
        name: String,
    },
    /// Rebuild a projection from its source, beside the live generation, and switch to it.
    #[command(after_help = "Examples:\n  statehouse projection rebuild profiles_by_status\n  \
        statehouse projection rebuild profiles_by_status --detach")]
    Rebuild {
        #[command(flatten)]
        live: Live,
        /// The projection.
        name: String,
        /// Only start the rebuild; running servers do the work.
        #[arg(long)]
        detach: bool,
    },
    /// Switch readers back to the previous generation.
    #[command(after_help = "Example:\n  statehouse projection rollback profiles_by_status")]
    Rollback {
        #[command(flatten)]
        live: Live,
        /// The projection.
        name: String,
    },
    /// Delete the previous generation.
    #[command(after_help = "Example:\n  statehouse projection drop profiles_by_status")]
    Drop {
        #[command(flatten)]
        live: Live,
        /// The projection.
        name: String,
    },
}

impl Project {
    pub(crate) fn live(&self) -> &Live {
        match &self.command {
            ProjectCommand::List { live }
            | ProjectCommand::Status { live, .. }
            | ProjectCommand::Rebuild { live, .. }
            | ProjectCommand::Rollback { live, .. }
            | ProjectCommand::Drop { live, .. } => live,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct KeyArgs {
    #[command(subcommand)]
    pub command: KeyCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create a key. It is shown once.
    #[command(after_help = "Examples:\n  statehouse key create\n  \
        statehouse key create --tenant acme --name billing --scopes read --expires-in 90d\n  \
        statehouse key create --name door --scopes profile:read,seat:hold --from 10.0.0.0/8")]
    Create {
        #[command(flatten)]
        live: Live,
        /// The tenant of its callers.
        #[arg(long, default_value = statehouse_server::auth::TENANT_DEFAULT)]
        tenant: String,
        /// A description, shown by `key list`.
        #[arg(long, default_value = "")]
        name: String,
        /// What its callers may do: read, write, admin, or RESOURCE:ACTION such as profile:read or seat:hold.
        #[arg(long, default_value = "read,write")]
        scopes: String,
        /// When it expires, from now: 90d, 12h.
        #[arg(long, value_name = "TIME")]
        expires_in: Option<String>,
        /// The networks from which it may be used, separated by commas: 10.0.0.0/8,192.0.2.7. Without it, all.
        #[arg(long = "from", value_name = "NETWORKS", default_value = "", hide_default_value = true)]
        networks: String,
        /// Print only the key, for scripts.
        #[arg(long, short)]
        quiet: bool,
    },
    /// List keys, without the secret part.
    #[command(after_help = "Example:\n  statehouse key list --tenant acme")]
    List {
        #[command(flatten)]
        live: Live,
        /// Only keys of this tenant.
        #[arg(long)]
        tenant: Option<String>,
    },
    /// Create the successor of a key. Both are valid until the overlap ends.
    #[command(after_help = "Example:\n  statehouse key rotate 0123456789abcdef --overlap 1d")]
    Rotate {
        #[command(flatten)]
        live: Live,
        /// The key's prefix, as `key list` shows it.
        prefix: String,
        /// How long the old key stays valid.
        #[arg(long, default_value = "1d", value_name = "TIME")]
        overlap: String,
        /// When the new key expires, from now.
        #[arg(long, value_name = "TIME")]
        expires_in: Option<String>,
        /// Print only the key, for scripts.
        #[arg(long, short)]
        quiet: bool,
    },
    /// Revoke a key. This cannot be undone.
    #[command(after_help = "Example:\n  statehouse key revoke 0123456789abcdef")]
    Revoke {
        #[command(flatten)]
        live: Live,
        /// The key's prefix, as `key list` shows it.
        prefix: String,
    },
}

impl KeyArgs {
    pub(crate) fn live(&self) -> &Live {
        match &self.command {
            KeyCommand::Create { live, .. }
            | KeyCommand::List { live, .. }
            | KeyCommand::Rotate { live, .. }
            | KeyCommand::Revoke { live, .. } => live,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct AuditArgs {
    #[command(subcommand)]
    pub command: AuditCommand,
}

/// Which audit records are wanted.
#[derive(Args, Clone, Debug)]
pub(crate) struct AuditSelection {
    #[command(flatten)]
    pub live: Live,
    /// Not before this time: 2026-11-18T00:00:00Z.
    #[arg(long, value_name = "TIME")]
    pub from: Option<String>,
    /// Before this time.
    #[arg(long, value_name = "TIME")]
    pub to: Option<String>,
    /// Only this action, or a group of them: key.revoke, key., login.
    #[arg(long)]
    pub action: Option<String>,
    /// Only what concerns this tenant.
    #[arg(long)]
    pub tenant: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// List records, the newest first.
    #[command(after_help = "Examples:\n  statehouse audit list\n  \
        statehouse audit list --action login --limit 20\n  \
        statehouse audit list --action key. --from 2026-11-01T00:00:00Z --json")]
    List {
        #[command(flatten)]
        selection: AuditSelection,
        /// The most records.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Write all records to standard output, the oldest first: a line for each, with --json as a JSON object.
    #[command(after_help = "Examples:\n  statehouse audit export --json > audit.jsonl\n  \
        statehouse audit export --from 2026-10-01T00:00:00Z --to 2026-11-01T00:00:00Z --json > audit-2026-10.jsonl")]
    Export {
        #[command(flatten)]
        selection: AuditSelection,
    },
}

impl AuditArgs {
    pub(crate) fn selection(&self) -> &AuditSelection {
        match &self.command {
            AuditCommand::List { selection, .. } | AuditCommand::Export { selection } => selection,
        }
    }
}

fn system_names() -> clap::builder::PossibleValuesParser {
    BLUEPRINTS.iter().map(|blueprint| blueprint.name).into()
}

/// Charts of workflows.
#[derive(Args, Debug)]
pub(crate) struct WorkflowArgs {
    #[command(subcommand)]
    pub command: WorkflowCommand,
}

#[derive(Args, Debug)]
pub(crate) struct SecretArgs {
    #[command(subcommand)]
    pub command: SecretCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkflowCommand {
    /// Print a workflow of the blueprint as an XState v5 machine, or as a Mermaid diagram.
    #[command(after_help = "Examples:\n  statehouse workflow export order > order.json\n  \
        statehouse workflow export order --format mermaid\n  statehouse workflow export order --format mermaid --json")]
    Export {
        #[command(flatten)]
        file: BlueprintFile,
        /// The workflow's name.
        name: String,
        /// The form: xstate (JSON, for Stately's editor) or mermaid.
        #[arg(long, value_enum, default_value_t = ChartFormat::Xstate)]
        format: ChartFormat,
    },
    /// Print the blueprint of an XState v5 machine. What has no meaning in a blueprint is refused with its line.
    #[command(
        after_help = "Examples:\n  statehouse workflow import machine.json --name order >> statehouse.toml\n  \
        statehouse workflow import machine.json --name order --json"
    )]
    Import {
        /// The machine, as a JSON file.
        machine: PathBuf,
        /// The name of the workflow.
        #[arg(long)]
        name: String,
    },
}

/// The form of a chart.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum ChartFormat {
    Xstate,
    Mermaid,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SecretCommand {
    /// Store a secret from standard input; replaces the one of that name.
    #[command(after_help = "Example:\n  statehouse secret set psp < psp.key")]
    Set {
        #[command(flatten)]
        live: Live,
        /// The secret's name.
        name: String,
    },
    /// Generate a secret for signatures (Standard Webhooks), store it, and print it once, for the receiver.
    #[command(after_help = "Example:\n  statehouse secret generate hook-2026")]
    Generate {
        #[command(flatten)]
        live: Live,
        /// The secret's name.
        name: String,
    },
    /// Print a new key that encrypts secrets in the store, for the setting `secrets_key`. It is not stored.
    #[command(after_help = "Example:\n  statehouse secret new-key > /etc/statehouse/secrets.key")]
    NewKey,
    /// Encrypt every secret in the store with the first key of `secrets_key`.
    #[command(after_help = "Example:\n  statehouse secret reencrypt")]
    Reencrypt {
        #[command(flatten)]
        live: Live,
    },
    /// Delete a secret.
    #[command(after_help = "Example:\n  statehouse secret forget hook-2025")]
    Forget {
        #[command(flatten)]
        live: Live,
        /// The secret's name.
        name: String,
    },
}

impl SecretArgs {
    /// Which store it works on; `None` if it needs none.
    pub(crate) fn live(&self) -> Option<&Live> {
        match &self.command {
            SecretCommand::Set { live, .. }
            | SecretCommand::Generate { live, .. }
            | SecretCommand::Reencrypt { live }
            | SecretCommand::Forget { live, .. } => Some(live),
            SecretCommand::NewKey => None,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct Init {
    /// The example system to start from.
    #[arg(long, default_value = "profile", value_parser = system_names())]
    pub template: String,
    /// The folder; created if it does not exist.
    #[arg(default_value = ".")]
    pub folder: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct Check {
    #[command(flatten)]
    pub live: Live,
    /// The engine that must support it [default: the one of --store].
    #[arg(long, value_name = "ENGINE")]
    pub on: Option<EngineName>,
}

#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub live: Live,
    /// Show what would change with this engine: what it does not support, and which guarantees and limits differ.
    #[arg(long, value_name = "ENGINE")]
    pub to: Option<EngineName>,
}

#[derive(Args, Debug)]
pub(crate) struct Apply {
    #[command(flatten)]
    pub live: Live,
    /// Also remove this, which the blueprint no longer declares, with its data: TABLE, TABLE.COLUMN or TABLE.INDEX, as `plan`
    /// names it. May be given several times.
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "")]
    pub allow_loss: Vec<String>,
}

/// A request as given on the command line.
#[derive(Args, Clone, Debug)]
pub(crate) struct Spoken {
    /// Resource and action: profile.update.
    pub action: String,
    /// The key of the row; parts of a composite key with commas between them.
    #[arg(long)]
    pub key: Option<String>,
    /// The action's input, as a JSON object.
    #[arg(long, value_name = "JSON")]
    pub input: Option<String>,
    /// The action's input, field by field. A value that is not JSON is text.
    #[arg(value_name = "NAME=VALUE")]
    pub fields: Vec<String>,
    /// The version that you have seen, or `any`.
    #[arg(long = "version", value_name = "VERSION", id = "expected_version")]
    pub version: Option<String>,
    /// A condition on the row, judged with the write: "points < 3 and status = 'ACTIVE'".
    #[arg(long = "if", value_name = "CONDITION", id = "condition")]
    pub condition: Option<String>,
    /// The tenant.
    #[arg(long, env = "STATEHOUSE_TENANT", default_value = "default")]
    pub tenant: String,
}

#[derive(Args, Debug)]
pub(crate) struct CallArgs {
    #[command(flatten)]
    pub live: Live,
    #[command(flatten)]
    pub spoken: Spoken,
    /// An id for this write. Repeating it under the same id returns the first outcome.
    #[arg(long)]
    pub operation: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Erase {
    #[command(flatten)]
    pub live: Live,
    /// The resource, with --key.
    #[arg(requires = "key", conflicts_with = "person")]
    pub resource: Option<String>,
    /// The key of the row: 42, or the parts with commas between them.
    #[arg(long, requires = "resource")]
    pub key: Option<String>,
    /// The person: erases all rows of the resources that say by `person` whose their rows are.
    #[arg(long, value_name = "ID")]
    pub person: Option<String>,
    /// The tenant.
    #[arg(long, env = "STATEHOUSE_TENANT", default_value = statehouse_server::auth::TENANT_DEFAULT)]
    pub tenant: String,
    /// Erase. Without it nothing is changed.
    #[arg(long)]
    pub yes: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Explain {
    #[command(flatten)]
    pub live: Live,
    /// Resource and action: profile.update. A resource alone explains all its actions.
    pub action: String,
    /// The engine; no server is needed [default: the one of --store].
    #[arg(long, value_name = "ENGINE")]
    pub on: Option<EngineName>,
}

/// The name of an engine.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum EngineName {
    Memory,
    Sqlite,
    Postgres,
    Dynamodb,
}

impl EngineName {
    pub(crate) fn engine(self) -> Engine {
        match self {
            EngineName::Memory => Engine::Model,
            EngineName::Sqlite => Engine::Sqlite,
            EngineName::Postgres => Engine::Postgres,
            EngineName::Dynamodb => Engine::Dynamodb,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct Demo {
    /// The example system.
    #[arg(default_value = "profile", value_parser = system_names())]
    pub system: String,
    /// An empty store [default: a SQLite file that is deleted afterwards].
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Concurrent callers.
    #[arg(long, default_value_t = 16)]
    pub callers: usize,
    /// Actions of each caller.
    #[arg(long, default_value_t = 100)]
    pub actions: usize,
    /// The seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

#[derive(Args, Debug)]
pub(crate) struct DrillArgs {
    /// Only drills whose archetype, failure or name contains this text.
    pub filter: Option<String>,
    /// The engine. The store of the URL is not touched: drills use a file, a schema or a prefix of their own beside it.
    #[arg(long, value_name = "URL", default_value = "memory:")]
    pub on: String,
    /// Drill the resources of this blueprint: the first of each archetype.
    #[arg(long, value_name = "FILE")]
    pub blueprint: Option<PathBuf>,
    /// The seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Remove each guard in turn, and show which drill notices.
    #[arg(long, conflicts_with_all = ["blueprint", "on"])]
    pub mutate: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Simulate {
    /// The number of histories.
    #[arg(long, default_value_t = 400)]
    pub seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    pub first: u64,
    /// Stop after this many minutes.
    #[arg(long, default_value_t = 10)]
    pub minutes: u64,
    /// Show the plans of histories that violate an invariant, and of a single history always.
    #[arg(long)]
    pub history: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Atlas {
    /// One archetype, by code or keyword.
    pub archetype: Option<String>,
}
