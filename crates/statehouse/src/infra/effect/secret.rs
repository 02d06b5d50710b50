//! Secrets by reference: a blueprint says where a secret is, never what it is.
//!
//! `env:NAME` is the environment variable `NAME`, or the content of the file that `NAME_FILE` names. `house:NAME` is a row of
//! the house's own secrets, which no action reads. They are read for every step anew, so that a rotation needs no restart.

use std::collections::BTreeMap;
use std::fmt;

use http::header::HeaderValue;
use statehouse_store::{Address, Consistency, Plan, PlanError, Step, Store, StoreError, Value};

use crate::outside::Environment;
use crate::own;

/// Secrets of effects have their own corner, so that a blueprint cannot name the server's.
const CORNER: &str = "effect/";

/// Where a secret is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reference {
    Environment(String),
    House(String),
}

impl Reference {
    pub(super) fn parse(text: &str) -> Result<Reference, String> {
        let plain = |name: &str| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || ['_', '-'].contains(&c))
        };
        match text.split_once(':') {
            Some(("env", name)) if plain(name) => Ok(Reference::Environment(name.to_owned())),
            Some(("house", name)) if plain(name) => Ok(Reference::House(name.to_owned())),
            _ => Err(format!(
                "`{text}` does not say where a secret is: write \"env:NAME\" for the environment variable NAME, or for \
                 the file that NAME_FILE names, or \"house:NAME\" for one that is kept in the store"
            )),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reference::Environment(name) => write!(f, "env:{name}"),
            Reference::House(name) => write!(f, "house:{name}"),
        }
    }
}

/// A text with secrets in it, each as `${env:NAME}` or `${house:NAME}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Secret(Reference),
}

impl Template {
    pub(super) fn parse(text: &str) -> Result<Template, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once("${") {
            let (reference, after) =
                behind.split_once('}').ok_or_else(|| format!("`{text}`: a `${{` has no `}}`"))?;
            pieces.push(Piece::Text(before.to_owned()));
            pieces.push(Piece::Secret(Reference::parse(reference)?));
            rest = after;
        }
        pieces.push(Piece::Text(rest.to_owned()));
        Ok(Template(pieces))
    }

    pub(super) fn references(&self) -> impl Iterator<Item = &Reference> {
        self.0.iter().filter_map(|piece| match piece {
            Piece::Secret(reference) => Some(reference),
            Piece::Text(_) => None,
        })
    }

    /// The value of a header, marked if it has a secret in it.
    pub(super) fn header(&self, secrets: &Secrets) -> Result<HeaderValue, String> {
        let mut text = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(part) => text.push_str(part),
                Piece::Secret(reference) => text.push_str(secrets.get(reference)?),
            }
        }
        let mut value =
            HeaderValue::from_str(&text).map_err(|_| "a secret has characters that no header can have")?;
        value.set_sensitive(self.references().next().is_some());
        Ok(value)
    }
}

/// Secrets that were read for a step.
#[derive(Default)]
pub(super) struct Secrets(BTreeMap<Reference, String>);

/// It does not print them.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Secrets {
    /// Reads secrets. Those that are not there are found missing when they are needed.
    pub(super) async fn read(
        references: impl Iterator<Item = &Reference>,
        environment: &dyn Environment,
        store: &dyn Store,
    ) -> Result<Secrets, StoreError> {
        let mut found = BTreeMap::new();
        for reference in references {
            let secret = match reference {
                Reference::Environment(name) => environment.read(name).await,
                Reference::House(name) => kept(store, name).await?,
            };
            if let Some(secret) = secret {
                found.insert(reference.clone(), secret);
            }
        }
        Ok(Secrets(found))
    }

    pub(super) fn get(&self, reference: &Reference) -> Result<&str, String> {
        self.0.get(reference).map(String::as_str).ok_or_else(|| format!("there is no secret {reference}"))
    }

    /// A text without any of the secrets, for whatever a target sends back.
    pub(super) fn hidden(&self, text: String) -> String {
        self.0.values().filter(|secret| secret.len() >= SECRET_MIN).fold(text, |text, secret| {
            if text.contains(secret.as_str()) { text.replace(secret.as_str(), "[secret]") } else { text }
        })
    }
}

/// Shorter ones are words that any text may have.
const SECRET_MIN: usize = 4;

async fn kept(store: &dyn Store, name: &str) -> Result<Option<String>, StoreError> {
    let address = place(name)?;
    let row = store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
    let content = row.as_ref().and_then(|row| row.bytes("content"));
    Ok(content.and_then(|content| String::from_utf8(content.to_vec()).ok()))
}

fn place(name: &str) -> Result<Address, StoreError> {
    let misuse = |why: String| StoreError::schema("the house's secrets", why);
    let (table, tenant) = (own::secrets().map_err(|e| misuse(e.to_string()))?, own::tenant());
    let tenant = tenant.ok_or_else(|| misuse("the house has no tenant of its own".into()))?;
    Address::new(&table, &tenant, [purpose(name)]).map_err(|error| misuse(error.to_string()))
}

fn purpose(name: &str) -> Value {
    format!("{CORNER}{name}").into()
}

/// The place of a secret whose name somebody gives.
fn place_named(name: &str) -> Result<Address, PlanError> {
    let parsed = Reference::parse(&format!("house:{name}"));
    let why = "must hold only letters, digits, _ and -";
    let bad = || PlanError::BadName { what: "secret", given: name.to_owned(), why };
    parsed.map_err(|_| bad())?;
    place(name).map_err(|_| bad())
}

/// The plan that keeps a secret for effects under `house:NAME`, in place of the one before.
pub fn keep(name: &str, secret: &str, operation: &str) -> Result<Plan, PlanError> {
    let address = place_named(name)?;
    let content = Value::Bytes(secret.as_bytes().to_vec());
    let step = Step::upsert(address.table(), address.key().iter().cloned()).set("content", content);
    Plan::of(address.tenant(), operation).step(step).build()
}

/// The plan that forgets it.
pub fn forget(name: &str, operation: &str) -> Result<Plan, PlanError> {
    let address = place_named(name)?;
    let step = Step::remove(address.table(), address.key().iter().cloned());
    Plan::of(address.tenant(), operation).step(step).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_and_templates() {
        assert_eq!(Reference::parse("env:PSP_KEY"), Ok(Reference::Environment("PSP_KEY".into())));
        assert_eq!(Reference::parse("house:psp"), Ok(Reference::House("psp".into())));
        for bad in ["PSP_KEY", "env:", "house:", "whsec_abc", "env:A B", "vault:x", "house:../server"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
        let template = Template::parse("Bearer ${env:A}:${house:b}!").unwrap();
        assert_eq!(template.references().map(ToString::to_string).collect::<Vec<_>>(), ["env:A", "house:b"]);
        let known = [(Reference::Environment("A".into()), "one".to_owned())];
        let mut secrets = Secrets(known.into());
        assert_eq!(template.header(&secrets), Err("there is no secret house:b".into()));
        secrets.0.insert(Reference::House("b".into()), "two".to_owned());
        let header = template.header(&secrets).unwrap();
        assert_eq!(header.as_bytes(), b"Bearer one:two!");
        assert_eq!(format!("{header:?} {secrets:?}"), "Sensitive {Environment(\"A\"), House(\"b\")}");
        assert!(Template::parse("${env:A").is_err());
        assert!(!Template::parse("plain").unwrap().header(&secrets).unwrap().is_sensitive());
    }

    #[test]
    fn answers_are_freed_of_secrets() {
        let secrets = Secrets([(Reference::House("b".into()), "s3cret".to_owned())].into());
        assert_eq!(secrets.hidden("you sent s3cret, s3cret".into()), "you sent [secret], [secret]");
    }
}
