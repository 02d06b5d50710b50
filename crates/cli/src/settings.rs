//! Settings by flag, environment and file, in that order, and where each one came from.
//!
//! A setting has one dotted name wherever it is said: `limits.body_bytes` is
//! `--set limits.body_bytes=1000000`, `STATEHOUSE_LIMITS_BODY_BYTES=1000000`, or in the file
//!
//! ```toml
//! [limits]
//! body_bytes = 1000000
//! ```
//!
//! What there is to set is read off the server's own configuration, so that it is not listed twice. Settings that may
//! hold a secret are also taken from a file that `STATEHOUSE_<NAME>_FILE` names, and are never shown.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use statehouse_server::config::{Config, Jwt, JwtKeys, Tls};
use statehouse_server::logs::Level;

use crate::output::CliFailure;

/// The file that is read if it exists and no other is named.
const FILE_DEFAULT: &str = "server.toml";
/// What every variable begins with.
const ENVIRONMENT: &str = "STATEHOUSE";
/// Variables of ours that are no settings of a server.
const OTHERS: [&str; 2] = ["config", "tenant"];
/// Settings that may hold a secret.
const SECRETS: [&str; 5] = ["store", "redis", "secret", "secrets_key", "auth.jwt.secret"];

/// What the command itself has to know; the rest is the server's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Own {
    pub blueprint: PathBuf,
    pub store: String,
    /// The URL of the Redis server for the holds of bookings; empty if no booking keeps its holds in Redis.
    pub redis: String,
    /// Keys that encrypt the secrets in the store, the one that encrypts first; empty for none.
    pub secrets_key: String,
    /// How far `serve` makes the store fit the blueprint.
    pub migrate: MigrateOnStart,
    pub listen: String,
    pub workers: Workers,
    /// How long the work of a process that was killed stands still.
    pub worker_lease_ms: u64,
    /// How long the log is kept if the blueprint does not say; `forever` for without an end.
    pub log_retention: String,
    /// How long audit records are kept; `forever` for without an end.
    pub audit_retention: String,
    pub log: Level,
    pub log_format: LogFormat,
}

/// What `serve` does about a store that lacks something of the blueprint. In no case it removes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MigrateOnStart {
    /// It does not start.
    #[serde(alias = "never")]
    Off,
    /// It makes changes after which an older blueprint fits the store again, and does not start if others are needed.
    #[serde(alias = "add")]
    Additive,
    /// It makes the changes that `apply` makes.
    All,
}

/// Whether `serve` does what the house does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Workers {
    /// Beside serving.
    On,
    /// Other processes do it.
    Off,
    /// Nothing else: no address is listened on.
    Only,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    /// For people.
    Text,
    /// For programs.
    Json,
}

impl Default for Own {
    fn default() -> Own {
        Own {
            blueprint: "statehouse.toml".into(),
            store: "sqlite:statehouse.db".into(),
            redis: String::new(),
            secrets_key: String::new(),
            migrate: MigrateOnStart::Additive,
            listen: "127.0.0.1:8080".into(),
            workers: Workers::On,
            worker_lease_ms: 10_000,
            log_retention: "30d".into(),
            audit_retention: "400d".into(),
            log: Level::default(),
            log_format: LogFormat::Auto,
        }
    }
}

/// Everything that can be set, as it is.
#[derive(Clone, Debug)]
pub(crate) struct CliSettings {
    pub own: Own,
    pub server: Config,
    origins: BTreeMap<String, Origin>,
}

/// Where a setting came from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    Default,
    File(PathBuf),
    Environment(String),
    Flag,
}

/// What flags say: dotted names and their values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags {
    pub file: Option<PathBuf>,
    pub given: Vec<(String, String)>,
}

impl Flags {
    /// Adds a flag that may not have been given.
    pub(crate) fn with(mut self, name: &str, value: Option<impl ToString>) -> Flags {
        self.given.extend(value.map(|value| (name.to_owned(), value.to_string())));
        self
    }
}

impl CliSettings {
    /// Reads flags, environment and file.
    pub(crate) fn read(flags: &Flags) -> Result<CliSettings, CliFailure> {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        if let Some(message) = misspelled(names) {
            return Err(CliFailure::Usage(message));
        }
        CliSettings::layered(flags, |name| std::env::var(name).ok())
    }

    fn layered(
        flags: &Flags,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<CliSettings, CliFailure> {
        let known = known();
        let mut origins: BTreeMap<String, Origin> =
            known.keys().map(|name| (name.clone(), Origin::Default)).collect();
        let mut tree = Json::Object(Map::new());
        let named = flags.file.clone().or_else(|| environment(&variable("config")).map(PathBuf::from));
        let file = named.clone().or_else(|| Some(PathBuf::from(FILE_DEFAULT)).filter(|path| path.exists()));
        if let Some(path) = file {
            let read = from_file(&path, &known)?;
            origins.extend(read.keys().map(|name| (name.clone(), Origin::File(path.clone()))));
            read.into_iter().for_each(|(name, value)| put(&mut tree, &name, value));
        }
        for (name, example) in &known {
            let Some((variable, text)) = from_environment(name, &environment)? else { continue };
            let value = typed(&text, example)
                .map_err(|expected| CliFailure::Usage(format!("{variable}: expected {expected}")))?;
            replace(&mut tree, &mut origins, name, value, Origin::Environment(variable));
        }
        for (name, text) in &flags.given {
            let example = known.get(name).ok_or_else(|| unknown(name, "--set", &known))?;
            let value = typed(text, example)
                .map_err(|expected| CliFailure::Usage(format!("{name}: expected {expected}")))?;
            replace(&mut tree, &mut origins, name, value, Origin::Flag);
        }
        let (own, server) = split(tree);
        let own: Own = serde_json::from_value(own).map_err(|error| CliFailure::Usage(error.to_string()))?;
        let server = serde_json::from_value(server).map_err(|error| {
            // Half of a pair, such as a certificate without its key, is only seen here.
            CliFailure::Usage(format!(
                "the settings do not fit together: {error}; `statehouse config` shows them"
            ))
        })?;
        Ok(CliSettings { own, server, origins })
    }

    /// Every setting with its value and where that came from, secrets hidden.
    pub(crate) fn list(&self) -> Vec<(String, Json, String)> {
        let mut tree = json!(self.own);
        let server = json!(self.server);
        if let (Some(tree), Json::Object(server)) = (tree.as_object_mut(), server) {
            tree.extend(server);
        }
        let mut values = BTreeMap::new();
        leaves("", &tree, &mut values);
        let entry = |(name, origin): (&String, &Origin)| {
            let value = values.get(name).cloned().unwrap_or_default();
            let value = match value.as_str() {
                Some(url) if name == "store" || name == "redis" => {
                    json!(statehouse::engine::without_password(url))
                }
                Some(_) if SECRETS.contains(&name.as_str()) => json!("(hidden)"),
                _ => value,
            };
            let origin = match origin {
                Origin::Default => "default".to_owned(),
                Origin::File(path) => path.display().to_string(),
                Origin::Environment(variable) => format!("${variable}"),
                Origin::Flag => "flag".to_owned(),
            };
            (name.clone(), value, origin)
        };
        self.origins.iter().map(entry).collect()
    }
}

/// Every setting's name, with a value of its type.
fn known() -> BTreeMap<String, Json> {
    let whole = Config {
        auth: statehouse_server::config::Auth {
            api_keys: false,
            jwt: Some(Jwt {
                issuer: Some(String::new()),
                audience: Some(String::new()),
                ..Jwt::with(JwtKeys::Secret(String::new()))
            }),
        },
        tls: Some(Tls {
            certificates: PathBuf::new(),
            key: PathBuf::new(),
            client_authorities: Some(PathBuf::new()),
        }),
        secret: Some(String::new()),
        ..Config::default()
    };
    let mut known = BTreeMap::new();
    leaves("", &json!(whole), &mut known);
    leaves("", &json!(Own::default()), &mut known);
    // A token's keys come from one of three places, and a value shows only one of them.
    for name in ["auth.jwt.jwks_file", "auth.jwt.jwks_url"] {
        known.insert(name.to_owned(), json!(""));
    }
    known
}

/// The values of a tree, by their dotted names.
fn leaves(prefix: &str, tree: &Json, found: &mut BTreeMap<String, Json>) {
    match tree {
        Json::Object(fields) => {
            for (name, value) in fields {
                let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                leaves(&name, value, found);
            }
        }
        Json::Null => {}
        value => {
            found.insert(prefix.to_owned(), value.clone());
        }
    }
}

/// Puts a value into a tree under its dotted name.
fn put(tree: &mut Json, name: &str, value: Json) {
    let mut place = tree;
    for part in name.split('.') {
        if !place.is_object() {
            *place = json!({});
        }
        let Some(fields) = place.as_object_mut() else { return };
        place = fields.entry(part).or_insert(Json::Null);
    }
    *place = value;
}

/// Puts a value over what a lower layer said. A token's keys come from one place, so a new place replaces the old one.
fn replace(tree: &mut Json, origins: &mut BTreeMap<String, Origin>, name: &str, value: Json, origin: Origin) {
    const PLACES: [&str; 3] = ["secret", "jwks_file", "jwks_url"];
    if name.strip_prefix("auth.jwt.").is_some_and(|place| PLACES.contains(&place))
        && let Some(jwt) = tree.pointer_mut("/auth/jwt").and_then(Json::as_object_mut)
    {
        for place in PLACES {
            jwt.remove(place);
            origins.insert(format!("auth.jwt.{place}"), Origin::Default);
        }
    }
    put(tree, name, value);
    origins.insert(name.to_owned(), origin);
}

fn from_file(path: &Path, known: &BTreeMap<String, Json>) -> Result<BTreeMap<String, Json>, CliFailure> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let tree: Json =
        toml::from_str(&text).map_err(|error| CliFailure::Usage(format!("{}: {error}", path.display())))?;
    let mut found = BTreeMap::new();
    leaves("", &tree, &mut found);
    for (name, value) in &found {
        let example = known.get(name).ok_or_else(|| unknown(name, &path.display().to_string(), known))?;
        if std::mem::discriminant(example) != std::mem::discriminant(value) {
            let message = format!("{}: {name}: expected {}", path.display(), kind(example));
            return Err(CliFailure::Usage(message));
        }
    }
    Ok(found)
}

fn from_environment(
    name: &str,
    environment: &impl Fn(&str) -> Option<String>,
) -> Result<Option<(String, String)>, CliFailure> {
    let variable = variable(name);
    if let Some(text) = environment(&variable) {
        return Ok(Some((variable, text)));
    }
    let variable = format!("{variable}_FILE");
    let Some(path) = SECRETS.contains(&name).then(|| environment(&variable)).flatten() else {
        return Ok(None);
    };
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("{variable}: {path} cannot be read"))?;
    Ok(Some((variable, text.trim_end_matches(['\r', '\n']).to_owned())))
}

/// `STATEHOUSE_LIMITS_BODY_BYTES` for `limits.body_bytes`.
fn variable(name: &str) -> String {
    format!("{ENVIRONMENT}_{}", name.replace('.', "_").to_ascii_uppercase())
}

/// What is wrong with a variable that is almost a setting's. Others that begin alike may belong to other programs.
fn misspelled(names: impl Iterator<Item = String>) -> Option<String> {
    let known: Vec<String> = known().into_keys().map(|name| name.replace('.', "_")).collect();
    let is_secret_file = |name: &str| {
        name.strip_suffix("_file")
            .is_some_and(|name| SECRETS.iter().any(|secret| secret.replace('.', "_") == name))
    };
    names.into_iter().find_map(|given| {
        let name = given.strip_prefix(ENVIRONMENT)?.strip_prefix('_')?.to_ascii_lowercase();
        if known.contains(&name) || is_secret_file(&name) || OTHERS.contains(&name.as_str()) {
            return None;
        }
        let near = statehouse::blueprint::nearest_within(2, &name, known.iter().map(String::as_str))?;
        Some(format!("{given} is no setting; did you mean {}?", variable(near)))
    })
}

/// A value of the type that the example has, or what would have been right.
fn typed(text: &str, example: &Json) -> Result<Json, &'static str> {
    let wrong = || kind(example);
    match example {
        Json::Bool(_) => match text {
            "true" | "1" | "on" | "yes" => Ok(true.into()),
            "false" | "0" | "off" | "no" => Ok(false.into()),
            _ => Err(wrong()),
        },
        Json::Number(_) => text.replace('_', "").parse::<u64>().map(Json::from).map_err(|_| wrong()),
        Json::Array(_) => {
            Ok(text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(Json::from).collect())
        }
        _ => Ok(text.into()),
    }
}

fn kind(example: &Json) -> &'static str {
    match example {
        Json::Bool(_) => "true or false",
        Json::Number(_) => "a whole number",
        Json::Array(_) => "a list",
        _ => "text",
    }
}

fn unknown(name: &str, place: &str, known: &BTreeMap<String, Json>) -> CliFailure {
    let advice = match statehouse::blueprint::nearest(name, known.keys().map(String::as_str)) {
        Some(near) => format!("did you mean `{near}`?"),
        None => "`statehouse config` lists them".to_owned(),
    };
    CliFailure::Usage(format!("{place}: there is no setting `{name}`; {advice}"))
}

/// The command's own settings, with their defaults, and the server's.
fn split(tree: Json) -> (Json, Json) {
    let mut own = json!(Own::default());
    let Json::Object(mut server) = tree else { return (own, tree) };
    if let Json::Object(own) = &mut own {
        for (name, value) in own.iter_mut() {
            if let Some(given) = server.remove(name) {
                *value = given;
            }
        }
    }
    (own, Json::Object(server))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_almost_a_setting_is_not_ignored() {
        let said = |name: &str| misspelled(std::iter::once(name.to_owned()));
        let advice = "STATEHOUSE_LISTN is no setting; did you mean STATEHOUSE_LISTEN?";
        assert_eq!(said("STATEHOUSE_LISTN").as_deref(), Some(advice));
        assert!(said("STATEHOUSE_LIMITS_BODY_BYTE").unwrap().ends_with("STATEHOUSE_LIMITS_BODY_BYTES?"));
        for fine in [
            "STATEHOUSE_LISTEN",
            "STATEHOUSE_STORE_FILE",
            "STATEHOUSE_AUTH_JWT_SECRET_FILE",
            "STATEHOUSE_CONFIG",
            "STATEHOUSE_TENANT",
            "STATEHOUSE_TEST_POSTGRES",
            "STATEHOUSE_TEST_PGBOUNCER",
            "STATEHOUSE_TEST_REDIS",
            "STATEHOUSE_TOOLS",
            "STATEHOUSE_BLESS",
            "STATEHOUSE_REGION",
            "STATEHOUSE_PORT",
            "LISTN",
        ] {
            assert_eq!(said(fine), None, "{fine}");
        }
    }

    fn read(file: &str, environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<CliSettings, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server.toml");
        std::fs::write(&path, file).unwrap();
        let flags = Flags {
            file: Some(path),
            given: flags.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        };
        let lookup = |name: &str| {
            environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        CliSettings::layered(&flags, lookup).map_err(|failure| format!("{failure:?}"))
    }

    #[test]
    fn flags_win_over_the_environment_and_the_environment_over_the_file() {
        let file = "listen = \"a:1\"\nstore = \"sqlite:file.db\"\n[limits]\nbody_bytes = 1\nstreams = 2\n";
        let environment = [("STATEHOUSE_STORE", "memory:"), ("STATEHOUSE_LIMITS_BODY_BYTES", "3_000")];
        let settings = read(file, &environment, &[("limits.body_bytes", "4")]).unwrap();
        assert_eq!(settings.own.listen, "a:1");
        assert_eq!(settings.own.store, "memory:");
        assert_eq!((settings.server.limits.body_bytes, settings.server.limits.streams), (4, 2));
        assert_eq!(settings.own.blueprint, PathBuf::from("statehouse.toml"));
        let origin = |name: &str| settings.list().into_iter().find(|(known, _, _)| known == name).unwrap().2;
        assert_eq!(origin("limits.body_bytes"), "flag");
        assert_eq!(origin("store"), "$STATEHOUSE_STORE");
        assert!(origin("listen").ends_with("server.toml"));
        assert_eq!(origin("log"), "default");
    }

    #[test]
    fn mistakes_are_named_with_advice() {
        for (file, environment, flag, expect) in [
            ("[limits]\nbody_byte = 1\n", None, None, "did you mean `limits.body_bytes`"),
            ("listen = 1\n", None, None, "listen: expected text"),
            ("listen = \n", None, None, "server.toml"),
            ("", Some(("STATEHOUSE_AUTH_API_KEYS", "maybe")), None, "expected true or false"),
            ("", None, Some(("limits.streams", "-1")), "expected a whole number"),
            ("[tls]\nkey = \"k.pem\"\n", None, None, "do not fit together"),
        ] {
            let environment: Vec<_> = environment.into_iter().collect();
            let flags: Vec<_> = flag.into_iter().collect();
            let error = read(file, &environment, &flags).err().unwrap_or_default();
            assert!(error.contains(expect), "{file} {environment:?} {flags:?}: {error}");
        }
    }

    #[test]
    fn secrets_come_from_files_too_and_are_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "0123456789abcdef0123456789abcdef\n").unwrap();
        let environment = [("STATEHOUSE_AUTH_JWT_SECRET_FILE", path.to_str().unwrap())];
        let file = "store = \"postgres://app:word@db/shop\"\n[auth.jwt]\njwks_file = \"keys.json\"\n";
        let settings = read(file, &environment, &[]).unwrap();
        let jwt = settings.server.auth.jwt.clone().unwrap();
        assert_eq!(jwt.keys, JwtKeys::Secret("0123456789abcdef0123456789abcdef".into()));
        let shown = format!("{:?}", settings.list());
        assert!(
            !shown.contains("0123456789") && !shown.contains("word") && shown.contains("(hidden)"),
            "{shown}"
        );
    }
}
