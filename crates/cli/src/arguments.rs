//! What can be said on the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Say what kind of state each thing in your product is; get the guarded writes, and the proof.
#[derive(Debug, Parser)]
#[command(name = "statehouse", version, about, max_term_width = 100)]
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
        after_help = "Examples:\n  statehouse check\n  statehouse check --blueprint shop/statehouse.toml"
    )]
    Check(BlueprintFile),
    /// Show what `apply` would change on the live store.
    #[command(
        after_help = "Examples:\n  statehouse plan\n  statehouse plan --store postgres://app@localhost/shop"
    )]
    Plan(Live),
    /// Make the live store fit the blueprint. Adds; removes only what you allow it to lose.
    #[command(after_help = "Examples:\n  statehouse apply\n  statehouse apply --allow-loss")]
    Apply(Apply),
    /// Run one action on the store.
    #[command(after_help = "Examples:\n  statehouse call profile.create user_id=42 display_name=Ann\n  \
        statehouse call profile.read --key 42\n  \
        statehouse call profile.patch --key 42 --version 1 bio='Likes trains'\n  \
        statehouse call profile.mutate --key 42 --input '{\"increment\": {\"points\": 5}}'")]
    Call(Call),
    /// Show what an action does: its abstract shape, then the statements or requests that the engine gets.
    #[command(after_help = "Examples:\n  statehouse explain profile.update\n  \
        statehouse explain profile.update --store postgres://app@localhost/shop")]
    Explain(Explain),
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
    /// The blueprint.
    #[arg(long, env = "STATEHOUSE_BLUEPRINT", default_value = "statehouse.toml")]
    pub blueprint: PathBuf,
}

/// A blueprint and a store.
#[derive(Args, Clone, Debug)]
pub(crate) struct Live {
    #[command(flatten)]
    pub file: BlueprintFile,
    /// The store: sqlite:FILE, postgres://…, dynamodb://PREFIX or memory:.
    #[arg(long, env = "STATEHOUSE_STORE", default_value = "sqlite:statehouse.db", hide_env_values = true)]
    pub store: String,
}

#[derive(Args, Debug)]
pub(crate) struct Init {
    /// What to begin with: profile or catalog.
    #[arg(long, default_value = "profile")]
    pub template: String,
    /// The folder; made if it does not exist.
    #[arg(default_value = ".")]
    pub folder: PathBuf,
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
    /// Resource and action: profile.update.
    pub action: String,
}

#[derive(Args, Debug)]
pub(crate) struct Atlas {
    /// One archetype, by code or keyword.
    pub archetype: Option<String>,
}
