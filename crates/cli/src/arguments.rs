//! What can be said on the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use statehouse::engine::Engine;
use statehouse_drills::systems::BLUEPRINTS;

use crate::output::Failure;
use crate::settings::Flags;

/// Say what kind of state each thing in your product is; get the guarded writes, and the proof.
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
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a first blueprint.
    #[command(after_help = "Examples:\n  statehouse init\n  statehouse init --template catalog shop")]
    Init(Init),
    /// Say everything that is wrong with a blueprint.
    #[command(
        after_help = "Examples:\n  statehouse check\n  statehouse check --blueprint shop/statehouse.toml --on dynamodb"
    )]
    Check(Check),
    /// Show what `apply` would change on the live store, or what would change with another engine.
    #[command(
        after_help = "Examples:\n  statehouse plan\n  statehouse plan --store postgres://app@localhost/shop\n  \
        statehouse plan --to dynamodb"
    )]
    Plan(Plan),
    /// Make the live store fit the blueprint. Adds, and moves the values of fields that become hot; removes only what you allow
    /// it to lose.
    #[command(after_help = "Examples:\n  statehouse apply\n  statehouse apply --allow-loss")]
    Apply(Apply),
    /// Copy the store to a file, as of one moment, while servers go on. For SQLite; other engines have tools of their own, and
    /// it says which.
    #[command(after_help = "Examples:\n  statehouse backup house-2026-11-18.db\n  \
        statehouse backup --store sqlite:/var/lib/house.db /backup/house.db --json\n\n\
        The file must not exist. It is complete, checked and on the disk when the command ends with 0; otherwise there is \
        none. To restore: stop all servers, put the file in the place of the store, remove what is beside the old one \
        (-wal, -shm), start again.")]
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
    /// Say who may come in over HTTP: make, list, rotate and revoke API keys.
    Key(Key),
    /// Projections, like views: their generations and their lag; build one anew beside the live one, go back.
    Projection(Project),
    /// Keep secrets in the store, for effects that name them as `house:NAME`. They are never shown again.
    Secret(Secret),
    /// Run one action on the store.
    #[command(after_help = "Examples:\n  statehouse call profile.create user_id=42 display_name=Ann\n  \
        statehouse call profile.read --key 42\n  \
        statehouse call profile.patch --key 42 --version 1 bio='Likes trains'\n  \
        statehouse call profile.mutate --key 42 --input '{\"increment\": {\"points\": 5}}'")]
    Call(Call),
    /// Show what an action does: its abstract shape, then the statements or requests that the engine gets.
    #[command(after_help = "Examples:\n  statehouse explain profile.update\n  \
        statehouse explain profile.update --on postgres\n  statehouse explain profile --on dynamodb")]
    Explain(Explain),
    /// Run a ready system under load, in a world in which answers get lost, and check what must hold.
    #[command(after_help = "Examples:\n  statehouse demo\n  statehouse demo catalog --callers 64\n  \
        statehouse demo profile --store 'postgres://app@localhost/shop?schema=demo'")]
    #[cfg_attr(
        not(feature = "proof"),
        command(about = "Run a system under load; not in this build (feature `proof`)")
    )]
    Demo(Demo),
    /// Provoke the failures that the atlas names, on any engine and on your own resources, in namespaces of their own.
    #[command(
        after_help = "Examples:\n  statehouse drill\n  statehouse drill booking --on sqlite:house.db\n  \
        statehouse drill 'duplicate hold' --on postgres://app@localhost/shop --blueprint statehouse.toml\n  \
        statehouse drill --mutate lease\n\n\
        A drill that is red shows the shortest history that was found, and its seed. With --mutate each guard is taken \
        out of the plans in turn, on the model, and a drill has to turn red. Exit code 1: something is red, or survived."
    )]
    #[cfg_attr(
        not(feature = "proof"),
        command(about = "Provoke failures; not in this build (feature `proof`)")
    )]
    Drill(Drill),
    /// Let archetypes and workers live in simulated processes that crash, pause and lose answers, on a virtual clock.
    #[command(
        after_help = "Examples:\n  statehouse simulate\n  statehouse simulate --seeds 100000 --minutes 30\n  \
        statehouse simulate --first 4711 --seeds 1 --history"
    )]
    #[cfg_attr(
        not(feature = "proof"),
        command(about = "Simulate crashes; not in this build (feature `proof`)")
    )]
    Simulate(Simulate),
    /// The 34 archetypes: states, truth, actors, failures, hotspots, and what is built.
    #[command(
        after_help = "Examples:\n  statehouse atlas\n  statehouse atlas booking\n  statehouse atlas --json"
    )]
    Atlas(Atlas),
    /// Print a completion script for a shell.
    #[command(after_help = "Example:\n  statehouse completions bash > /etc/bash_completion.d/statehouse")]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

/// Where the blueprint is.
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

/// What the server is told. Every setting has a name; the usual ones have flags of their own.
#[derive(Args, Clone, Debug)]
pub(crate) struct Serve {
    #[command(flatten)]
    pub live: Live,
    /// Where to listen; without credentials on a loopback address only [env: STATEHOUSE_LISTEN]
    /// [default: 127.0.0.1:8080].
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Whether this process also does what the house does by itself: on, off, or only (then it serves nothing)
    /// [env: STATEHOUSE_WORKERS] [default: on].
    #[arg(long, value_name = "on|off|only")]
    pub workers: Option<String>,
    /// Let callers in by API key (see `statehouse key`) [env: STATEHOUSE_AUTH_API_KEYS].
    #[arg(long)]
    pub api_keys: bool,
    /// The certificate chain, as a PEM file [env: STATEHOUSE_TLS_CERTIFICATES].
    #[arg(long, value_name = "FILE")]
    pub tls_certificates: Option<PathBuf>,
    /// The certificate's private key, as a PEM file [env: STATEHOUSE_TLS_KEY].
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// What to log: off, error, warn, info, debug or trace [env: STATEHOUSE_LOG] [default: info].
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
    /// Any other setting; `statehouse config` lists them. May be given several times.
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
}

impl Serve {
    pub(crate) fn flags(&self) -> Result<Flags, Failure> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let mut flags = self
            .live
            .flags()
            .with("listen", self.listen.as_ref())
            .with("workers", self.workers.as_ref())
            .with("auth.api_keys", self.api_keys.then_some(true))
            .with("tls.certificates", path(&self.tls_certificates))
            .with("tls.key", path(&self.tls_key))
            .with("log", self.log.as_ref());
        for setting in &self.set {
            let Some((name, value)) = setting.split_once('=') else {
                return Err(Failure::Usage(format!("--set {setting}: write NAME=VALUE")));
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
    /// Where to. The file must not exist.
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
    /// List projections, with their live generation and how far it is behind.
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
        /// Which.
        name: String,
    },
    /// Build a projection anew from its source, beside the live one, and switch to it.
    #[command(after_help = "Examples:\n  statehouse projection rebuild profiles_by_status\n  \
        statehouse projection rebuild profiles_by_status --detach")]
    Rebuild {
        #[command(flatten)]
        live: Live,
        /// Which.
        name: String,
        /// Only begin, and leave the work to the servers that run.
        #[arg(long)]
        detach: bool,
    },
    /// Let readers go back to the generation before the last switch.
    #[command(after_help = "Example:\n  statehouse projection rollback profiles_by_status")]
    Rollback {
        #[command(flatten)]
        live: Live,
        /// Which.
        name: String,
    },
    /// Delete the generation before the last switch.
    #[command(after_help = "Example:\n  statehouse projection drop profiles_by_status")]
    Drop {
        #[command(flatten)]
        live: Live,
        /// Which.
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
pub(crate) struct Key {
    #[command(subcommand)]
    pub command: KeyCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key. It is shown once.
    #[command(after_help = "Examples:\n  statehouse key create\n  \
        statehouse key create --tenant acme --name billing --scopes read --expires-in 90d")]
    Create {
        #[command(flatten)]
        live: Live,
        /// On whose behalf it lets in.
        #[arg(long, default_value = statehouse_server::auth::TENANT_DEFAULT)]
        tenant: String,
        /// What it is for, for lists.
        #[arg(long, default_value = "")]
        name: String,
        /// To do what: read, write, admin.
        #[arg(long, default_value = "read,write")]
        scopes: String,
        /// When it ends, from now: 90d, 12h.
        #[arg(long, value_name = "TIME")]
        expires_in: Option<String>,
        /// Print the key alone, for scripts.
        #[arg(long, short)]
        quiet: bool,
    },
    /// List keys: everything but the keys themselves.
    #[command(after_help = "Example:\n  statehouse key list --tenant acme")]
    List {
        #[command(flatten)]
        live: Live,
        /// Of one tenant only.
        #[arg(long)]
        tenant: Option<String>,
    },
    /// Make a successor of a key; for a while both let in.
    #[command(after_help = "Example:\n  statehouse key rotate 0123456789abcdef --overlap 1d")]
    Rotate {
        #[command(flatten)]
        live: Live,
        /// What names the key.
        prefix: String,
        /// For how long the old one still lets in.
        #[arg(long, default_value = "1d", value_name = "TIME")]
        overlap: String,
        /// When the new one ends, from now.
        #[arg(long, value_name = "TIME")]
        expires_in: Option<String>,
        /// Print the key alone, for scripts.
        #[arg(long, short)]
        quiet: bool,
    },
    /// End a key, for good.
    #[command(after_help = "Example:\n  statehouse key revoke 0123456789abcdef")]
    Revoke {
        #[command(flatten)]
        live: Live,
        /// What names the key.
        prefix: String,
    },
}

impl Key {
    pub(crate) fn live(&self) -> &Live {
        match &self.command {
            KeyCommand::Create { live, .. }
            | KeyCommand::List { live, .. }
            | KeyCommand::Rotate { live, .. }
            | KeyCommand::Revoke { live, .. } => live,
        }
    }
}

fn system_names() -> clap::builder::PossibleValuesParser {
    BLUEPRINTS.iter().map(|blueprint| blueprint.name).into()
}

#[derive(Args, Debug)]
pub(crate) struct Secret {
    #[command(subcommand)]
    pub command: SecretCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SecretCommand {
    /// Keep what comes in on standard input, in place of what was there.
    #[command(after_help = "Example:\n  statehouse secret set psp < psp.key")]
    Set {
        #[command(flatten)]
        live: Live,
        /// What effects call it.
        name: String,
    },
    /// Make a secret for signatures (Standard Webhooks), keep it, and print it once, for the receiver.
    #[command(after_help = "Example:\n  statehouse secret generate hook-2026")]
    Generate {
        #[command(flatten)]
        live: Live,
        /// What effects call it.
        name: String,
    },
    /// Forget a secret.
    #[command(after_help = "Example:\n  statehouse secret forget hook-2025")]
    Forget {
        #[command(flatten)]
        live: Live,
        /// What effects call it.
        name: String,
    },
}

impl Secret {
    pub(crate) fn live(&self) -> &Live {
        match &self.command {
            SecretCommand::Set { live, .. }
            | SecretCommand::Generate { live, .. }
            | SecretCommand::Forget { live, .. } => live,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct Init {
    /// The system to begin with.
    #[arg(long, default_value = "profile", value_parser = system_names())]
    pub template: String,
    /// The folder; made if it does not exist.
    #[arg(default_value = ".")]
    pub folder: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct Check {
    #[command(flatten)]
    pub live: Live,
    /// The engine that has to carry it [default: the one of --store].
    #[arg(long, value_name = "ENGINE")]
    pub on: Option<EngineName>,
}

#[derive(Args, Debug)]
pub(crate) struct Plan {
    #[command(flatten)]
    pub live: Live,
    /// Say what would change with this engine: what it cannot carry, and which guarantees and limits differ.
    #[arg(long, value_name = "ENGINE")]
    pub to: Option<EngineName>,
}

#[derive(Args, Debug)]
pub(crate) struct Apply {
    #[command(flatten)]
    pub live: Live,
    /// Also remove what the blueprint no longer declares, with its data.
    #[arg(long)]
    pub allow_loss: bool,
}

/// A request as the command line says it.
#[derive(Args, Clone, Debug)]
pub(crate) struct Spoken {
    /// Resource and action: profile.update.
    pub action: String,
    /// The key of the row; parts of a composite key with commas between them.
    #[arg(long)]
    pub key: Option<String>,
    /// What the action takes, as a JSON object.
    #[arg(long, value_name = "JSON")]
    pub input: Option<String>,
    /// What the action takes, name by name. A value is JSON where it can be, text elsewhere.
    #[arg(value_name = "NAME=VALUE")]
    pub fields: Vec<String>,
    /// The version that you have seen, or `any`.
    #[arg(long = "version", value_name = "VERSION", id = "expected_version")]
    pub version: Option<String>,
    /// On whose behalf.
    #[arg(long, env = "STATEHOUSE_TENANT", default_value = "default")]
    pub tenant: String,
}

#[derive(Args, Debug)]
pub(crate) struct Call {
    #[command(flatten)]
    pub live: Live,
    #[command(flatten)]
    pub spoken: Spoken,
    /// An id for this write. Repeating it under the same id returns the first outcome.
    #[arg(long)]
    pub operation: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Explain {
    #[command(flatten)]
    pub live: Live,
    /// Resource and action: profile.update. A resource alone explains all its actions.
    pub action: String,
    /// The engine; it need not run [default: the one of --store].
    #[arg(long, value_name = "ENGINE")]
    pub on: Option<EngineName>,
}

/// An engine, as people name it.
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
    /// Which system.
    #[arg(default_value = "profile", value_parser = system_names())]
    pub system: String,
    /// An empty store [default: a SQLite file that is deleted afterwards].
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Callers at once.
    #[arg(long, default_value_t = 16)]
    pub callers: usize,
    /// What each of them does, in actions.
    #[arg(long, default_value_t = 100)]
    pub actions: usize,
    /// Where chance comes from.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

#[derive(Args, Debug)]
pub(crate) struct Drill {
    /// Those whose archetype, failure or name holds this text.
    pub filter: Option<String>,
    /// The engine. Nothing that the URL names is touched: drills get a file, a schema or a prefix of their own beside it.
    #[arg(long, value_name = "URL", default_value = "memory:")]
    pub on: String,
    /// Drill the resources of this blueprint: the first of each archetype.
    #[arg(long, value_name = "FILE")]
    pub blueprint: Option<PathBuf>,
    /// Where chance comes from.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Take each guard out in turn, and say who notices.
    #[arg(long, conflicts_with_all = ["blueprint", "on"])]
    pub mutate: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Simulate {
    /// How many histories.
    #[arg(long, default_value_t = 400)]
    pub seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    pub first: u64,
    /// The longest that it may take.
    #[arg(long, default_value_t = 10)]
    pub minutes: u64,
    /// Show the plans of histories that are violated, and of a single one in any case.
    #[arg(long)]
    pub history: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Atlas {
    /// One archetype, by code or keyword.
    pub archetype: Option<String>,
}
