//! Secrets by reference: a blueprint says where a secret is, never what it is.
//!
//! `env:NAME` is the environment variable `NAME`, or the content of the file that `NAME_FILE` names. `house:NAME` is a row of
//! the house's own secrets, which no action reads. They are read for every step anew, so that a rotation needs no restart.

use std::collections::BTreeMap;
use std::fmt;

use http::header::HeaderValue;
use statehouse_store::plan::PlanBuilder;
use statehouse_store::{Address, Consistency, Plan, PlanError, Step, Store, StoreError, Time, Value};

use crate::audit::{self, AuditActor, AuditEntry};
use crate::egress::Egress;
use crate::secret_keys::{CONTENT, SecretKeyError, SecretKeys};
use crate::system;

/// Secrets of effects have their own corner, so that a blueprint cannot name the server's.
const CORNER: &str = "effect/";

/// Where a secret is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SecretReference {
    Environment(String),
    House(String),
}

impl SecretReference {
    pub(crate) fn parse(text: &str) -> Result<SecretReference, String> {
        let plain = |name: &str| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || ['_', '-'].contains(&c))
        };
        match text.split_once(':') {
            Some(("env", name)) if plain(name) => Ok(SecretReference::Environment(name.to_owned())),
            Some(("house", name)) if plain(name) => Ok(SecretReference::House(name.to_owned())),
            _ => Err(format!(
                "`{text}` does not say where a secret is: write \"env:NAME\" for the environment variable NAME, or for \
                 the file that NAME_FILE names, or \"house:NAME\" for one that is kept in the store"
            )),
        }
    }
}

impl fmt::Display for SecretReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretReference::Environment(name) => write!(f, "env:{name}"),
            SecretReference::House(name) => write!(f, "house:{name}"),
        }
    }
}

/// A text with secrets in it, each as `${env:NAME}` or `${house:NAME}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SecretTemplate(Vec<SecretTemplatePart>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum SecretTemplatePart {
    Text(String),
    Secret(SecretReference),
}

impl SecretTemplate {
    pub(super) fn parse(text: &str) -> Result<SecretTemplate, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once("${") {
            let (reference, after) =
                behind.split_once('}').ok_or_else(|| format!("`{text}`: a `${{` has no `}}`"))?;
            pieces.push(SecretTemplatePart::Text(before.to_owned()));
            pieces.push(SecretTemplatePart::Secret(SecretReference::parse(reference)?));
            rest = after;
        }
        pieces.push(SecretTemplatePart::Text(rest.to_owned()));
        Ok(SecretTemplate(pieces))
    }

    pub(super) fn references(&self) -> impl Iterator<Item = &SecretReference> {
        self.0.iter().filter_map(|piece| match piece {
            SecretTemplatePart::Secret(reference) => Some(reference),
            SecretTemplatePart::Text(_) => None,
        })
    }

    /// The value of a header, marked if it has a secret in it.
    pub(super) fn header(&self, secrets: &Secrets) -> Result<HeaderValue, String> {
        let mut text = String::new();
        for piece in &self.0 {
            match piece {
                SecretTemplatePart::Text(part) => text.push_str(part),
                SecretTemplatePart::Secret(reference) => text.push_str(secrets.get(reference)?),
            }
        }
        let mut value =
            HeaderValue::from_str(&text).map_err(|_| "a secret has characters that no header can have")?;
        value.set_sensitive(self.references().next().is_some());
        Ok(value)
    }
}

/// Secrets that were read for a step. One that is stored and cannot be decrypted has the reason in its place.
#[derive(Default)]
pub(crate) struct Secrets(BTreeMap<SecretReference, Result<String, String>>);

/// It does not print them.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Secrets {
    /// Reads secrets. Those that are not there are found missing when they are needed.
    pub(crate) async fn read(
        references: impl Iterator<Item = &SecretReference>,
        egress: &Egress,
        store: &dyn Store,
    ) -> Result<Secrets, StoreError> {
        let mut found = BTreeMap::new();
        for reference in references {
            let secret = match reference {
                SecretReference::Environment(name) => egress.environment.read(name).await.map(Ok),
                SecretReference::House(name) => kept(store, &egress.secret_keys, name).await?,
            };
            if let Some(secret) = secret {
                found.insert(reference.clone(), secret);
            }
        }
        Ok(Secrets(found))
    }

    pub(crate) fn get(&self, reference: &SecretReference) -> Result<&str, String> {
        match self.0.get(reference) {
            Some(Ok(secret)) => Ok(secret),
            Some(Err(why)) => Err(format!("the secret {reference} cannot be read: {why}")),
            None => Err(format!("there is no secret {reference}")),
        }
    }

    /// A text without any of the secrets, for whatever a target sends back.
    pub(super) fn hidden(&self, text: String) -> String {
        self.0.values().flatten().filter(|secret| secret.len() >= SECRET_MIN).fold(text, |text, secret| {
            if text.contains(secret.as_str()) { text.replace(secret.as_str(), "[secret]") } else { text }
        })
    }
}

/// Shorter ones are words that any text may have.
const SECRET_MIN: usize = 4;

/// The secret that is kept under a name, or why it cannot be read.
async fn kept(
    store: &dyn Store,
    keys: &SecretKeys,
    name: &str,
) -> Result<Option<Result<String, String>>, StoreError> {
    let address = place(name)?;
    let rows = store.get(std::slice::from_ref(&address), Consistency::Strong).await?;
    let Some(row) = rows.into_iter().next().flatten() else { return Ok(None) };
    let opened = keys.open(&address, row.get_bytes(CONTENT)?).map_err(|why| why.to_string());
    Ok(Some(opened.and_then(|bytes| String::from_utf8(bytes).map_err(|_| "it is not text".to_owned()))))
}

fn place(name: &str) -> Result<Address, StoreError> {
    let misuse = |why: String| StoreError::schema("the house's secrets", why);
    let (table, tenant) = (system::secrets().map_err(|e| misuse(e.to_string()))?, system::tenant());
    let tenant = tenant.ok_or_else(|| misuse("the house has no tenant of its own".into()))?;
    Address::new(&table, &tenant, [purpose(name)]).map_err(|error| misuse(error.to_string()))
}

fn purpose(name: &str) -> Value {
    format!("{CORNER}{name}").into()
}

/// The place of a secret with a name that the caller gives.
fn place_named(name: &str) -> Result<Address, PlanError> {
    let parsed = SecretReference::parse(&format!("house:{name}"));
    let why = "must hold only letters, digits, _ and -";
    let bad = || PlanError::BadName { what: "secret", given: name.to_owned(), why };
    parsed.map_err(|_| bad())?;
    place(name).map_err(|_| bad())
}

/// Who changes a secret, and when.
#[derive(Clone, Copy, Debug)]
pub struct SecretChange<'a> {
    /// Who.
    pub by: &'a AuditActor,
    /// When.
    pub at: Time,
    /// The operation id, for this change alone.
    pub operation: &'a str,
}

impl SecretChange<'_> {
    /// A plan that begins with the audit row of the change. It is committed with [`audit::commit`].
    fn begin(&self, action: &str, name: &str) -> Result<PlanBuilder, StoreError> {
        let entry = AuditEntry::of(self.by, action, &format!("house:{name}"));
        audit::begin(&entry, self.at, self.operation)
    }
}

/// The plan that keeps a secret for effects under `house:NAME`, in place of the one before, and records who did. It is encrypted if
/// there is a key.
pub fn keep(
    keys: &SecretKeys,
    name: &str,
    secret: &str,
    change: SecretChange<'_>,
) -> Result<Plan, SecretKeyError> {
    let address = place_named(name)?;
    let content = Value::Bytes(keys.seal(&address, secret.as_bytes())?);
    let step = Step::upsert(address.table(), address.key().iter().cloned()).set(CONTENT, content);
    Ok(change.begin("secret.set", name)?.step(step).build()?)
}

/// The plan that forgets it, and records who did.
pub fn forget(name: &str, change: SecretChange<'_>) -> Result<Plan, SecretKeyError> {
    let address = place_named(name)?;
    let step = Step::remove(address.table(), address.key().iter().cloned());
    Ok(change.begin("secret.forget", name)?.step(step).build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_and_templates() {
        assert_eq!(SecretReference::parse("env:PSP_KEY"), Ok(SecretReference::Environment("PSP_KEY".into())));
        assert_eq!(SecretReference::parse("house:psp"), Ok(SecretReference::House("psp".into())));
        for bad in ["PSP_KEY", "env:", "house:", "whsec_abc", "env:A B", "vault:x", "house:../server"] {
            assert!(SecretReference::parse(bad).is_err(), "{bad}");
        }
        let template = SecretTemplate::parse("Bearer ${env:A}:${house:b}!").unwrap();
        assert_eq!(template.references().map(ToString::to_string).collect::<Vec<_>>(), ["env:A", "house:b"]);
        let known = [(SecretReference::Environment("A".into()), Ok("one".to_owned()))];
        let mut secrets = Secrets(known.into());
        assert_eq!(template.header(&secrets), Err("there is no secret house:b".into()));
        let unreadable = Err("it is encrypted with the key 12345678".to_owned());
        secrets.0.insert(SecretReference::House("b".into()), unreadable);
        assert!(template.header(&secrets).unwrap_err().contains("12345678"));
        secrets.0.insert(SecretReference::House("b".into()), Ok("two".to_owned()));
        let header = template.header(&secrets).unwrap();
        assert_eq!(header.as_bytes(), b"Bearer one:two!");
        assert_eq!(format!("{header:?} {secrets:?}"), "Sensitive {Environment(\"A\"), House(\"b\")}");
        assert!(SecretTemplate::parse("${env:A").is_err());
        assert!(!SecretTemplate::parse("plain").unwrap().header(&secrets).unwrap().is_sensitive());
    }

    #[test]
    fn answers_are_freed_of_secrets() {
        let secrets = Secrets([(SecretReference::House("b".into()), Ok("s3cret".to_owned()))].into());
        assert_eq!(secrets.hidden("you sent s3cret, s3cret".into()), "you sent [secret], [secret]");
    }
}
