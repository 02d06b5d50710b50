//! How to reach a PostgreSQL store, and how to run it: all of it can be said in one URL.
//!
//! Statehouse's own parameters are taken out of the URL before the rest goes to the driver:
//!
//! | parameter | means | unless given |
//! |---|---|---|
//! | `schema` | the PostgreSQL schema that holds the tables | `public` |
//! | `partitions` | partitions of the log; fixed when the store is created | 16, or what the store has |
//! | `writers` | connections that commit plans, each those of its share of the log's partitions | 2 |
//! | `readers` | connections that read | 2 |
//! | `rls` | `on`: tenants are kept apart by forced row-level security too | `off` |
//! | `role` | the role that does the work under row-level security; must not own the tables | who connects |
//! | `timeout_ms` | the longest that one statement may take | 10000 |
//! | `lock_timeout_ms` | the longest that a statement may wait for another session's lock | 3000 |
//! | `sslmode` | `disable`, `prefer`, `require` (encrypted), `verify-full` (and the certificate is checked) | `prefer` |
//! | `sslrootcert` | a PEM file with the certificates to trust for `verify-full` | the system's |

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Clock, StoreError};
use tokio_postgres::config::SslMode;

use crate::sql::{name, with_source};
use crate::tenancy::TransactionScope;

/// How a connection is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// Not at all.
    Disable,
    /// Encrypted if the server can.
    Prefer,
    /// Encrypted, without a check of the server's identity.
    Require,
    /// Encrypted, with a certificate that is trusted and names the host.
    VerifyFull,
}

/// How to reach a store, and how to run it.
#[derive(Clone)]
pub struct PostgresOptions {
    /// The driver's part: host, port, user, password, database.
    pub(crate) driver: tokio_postgres::Config,
    /// The PostgreSQL schema that holds the tables.
    pub schema: String,
    /// Partitions of the log. `None`: what the store has, or 16 when it is created.
    pub partitions: Option<u32>,
    /// Connections that commit plans.
    pub writers: usize,
    /// Connections that read.
    pub readers: usize,
    /// Whether row-level security keeps tenants apart.
    pub row_level_security: bool,
    /// The role under which plans and reads run when row-level security is on. It must not own the tables.
    pub runtime_role: Option<String>,
    /// The longest that one statement may take.
    pub statement_timeout: Duration,
    /// The longest that a statement may wait for a lock that another session holds.
    pub lock_timeout: Duration,
    /// How connections are protected.
    pub encryption: Encryption,
    /// Certificates to trust instead of the system's.
    pub root_certificates: Option<PathBuf>,
    /// The clock behind `Now`. `None`: the server's, which is right wherever several processes share a store.
    pub clock: Option<Arc<dyn Clock>>,
}

/// Partitions of a log, unless the options say otherwise.
pub const PARTITIONS: u32 = 16;
/// More partitions than this are a mistake: every reader of the log asks for each of them.
const PARTITIONS_MAX: u32 = 4096;

impl PostgresOptions {
    /// Reads a URL such as `postgres://user:password@host:5432/database?schema=shop&partitions=32`.
    pub fn from_url(url: &str) -> Result<PostgresOptions, StoreError> {
        let (address, query) = url.split_once('?').unwrap_or((url, ""));
        let mut own: Vec<(&str, String)> = Vec::new();
        let mut drivers: Vec<String> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if OWN.contains(&name) {
                own.push((name, percent_decoded(value)));
            } else {
                drivers.push(pair.to_owned());
            }
        }
        let mut rest = address.to_owned();
        if !drivers.is_empty() {
            rest = format!("{address}?{}", drivers.join("&"));
        }
        let driver = tokio_postgres::Config::from_str(&rest).map_err(|error| bad(&with_source(&error)))?;
        let mut options = PostgresOptions::new(driver);
        for (name, value) in own {
            options.set(name, &value)?;
        }
        Ok(options)
    }

    /// Options for a driver configuration that was put together elsewhere.
    pub fn new(mut driver: tokio_postgres::Config) -> PostgresOptions {
        if driver.get_connect_timeout().is_none() {
            driver.connect_timeout(Duration::from_secs(5));
        }
        if driver.get_application_name().is_none() {
            driver.application_name("statehouse");
        }
        let encryption = match driver.get_ssl_mode() {
            SslMode::Disable => Encryption::Disable,
            SslMode::Require => Encryption::Require,
            _ => Encryption::Prefer,
        };
        PostgresOptions {
            driver,
            schema: "public".to_owned(),
            partitions: None,
            writers: 2,
            readers: 2,
            row_level_security: false,
            runtime_role: None,
            statement_timeout: Duration::from_secs(10),
            // Longer than the second after which the server looks for deadlocks.
            lock_timeout: Duration::from_secs(3),
            encryption,
            root_certificates: None,
            clock: None,
        }
    }

    /// Runs `Now` on this clock instead of the server's: for tests and simulations.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> PostgresOptions {
        self.clock = Some(clock);
        self
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), StoreError> {
        match name {
            "schema" if value.is_empty() || value.len() > 63 || value.contains('\0') => {
                return Err(bad("schema must be a name of 1 to 63 bytes"));
            }
            "schema" => self.schema = value.to_owned(),
            "partitions" => self.partitions = Some(number(name, value, 1, PARTITIONS_MAX)?),
            "writers" => self.writers = number(name, value, 1, 64)?,
            "readers" => self.readers = number(name, value, 1, 256)?,
            "rls" => {
                self.row_level_security = match value {
                    "on" => true,
                    "off" => false,
                    other => return Err(bad(&format!("rls is `on` or `off`, not {other:?}"))),
                }
            }
            "role" => self.runtime_role = Some(value.to_owned()),
            "timeout_ms" => {
                self.statement_timeout = Duration::from_millis(number(name, value, 10, 3_600_000)?);
            }
            "lock_timeout_ms" => {
                self.lock_timeout = Duration::from_millis(number(name, value, 1, 3_600_000)?);
            }
            "sslmode" => {
                let modes = [
                    ("disable", Encryption::Disable),
                    ("prefer", Encryption::Prefer),
                    ("require", Encryption::Require),
                    ("verify-full", Encryption::VerifyFull),
                ];
                let mode = modes.iter().find(|(name, _)| *name == value).map(|(_, mode)| *mode);
                let unknown = || bad("sslmode is disable, prefer, require or verify-full");
                self.encrypt(mode.ok_or_else(unknown)?);
            }
            "sslrootcert" => self.root_certificates = Some(value.into()),
            other => return Err(bad(&format!("{other} is not a parameter"))),
        }
        Ok(())
    }

    /// The role that a transaction takes on, if it is not the one that connects.
    pub(crate) fn role(&self) -> Option<&str> {
        self.runtime_role.as_deref().filter(|_| self.row_level_security)
    }

    /// The words that open the transaction of a compiled statement in a session that nothing is known of, if it needs
    /// any: a role cannot be taken on within a statement. Everything else it sets itself.
    pub(crate) fn role_sql(&self) -> Option<String> {
        let role = name(self.role()?);
        let timeout_ms = self.statement_timeout.as_millis();
        Some(format!(
            "begin isolation level read committed; \
             set local idle_in_transaction_session_timeout = {timeout_ms}; set local role {role}"
        ))
    }

    /// The words that restrict a transaction to its tenants, if the server is to keep them apart.
    pub(crate) fn scope_sql(&self, scope: &TransactionScope) -> String {
        if self.row_level_security { scope.sql(self.role()) } else { String::new() }
    }

    /// The words that open a transaction that reads.
    pub(crate) fn begin_read_sql(&self, scope: &TransactionScope) -> String {
        format!("begin read only{}", self.scope_sql(scope))
    }

    /// The words that open a transaction that writes. What they set is gone with it, so a pooler may stand between.
    pub(crate) fn begin_sql(&self, lock_timeout_ms: u128, planner: &str, scope: &TransactionScope) -> String {
        let timeout_ms = self.statement_timeout.as_millis();
        format!(
            "begin isolation level read committed; set local statement_timeout = {timeout_ms}; \
             set local lock_timeout = {lock_timeout_ms}; \
             set local idle_in_transaction_session_timeout = {timeout_ms}{planner}{}",
            self.scope_sql(scope),
        )
    }

    /// Sets how connections are protected.
    pub fn encrypt(&mut self, encryption: Encryption) {
        self.encryption = encryption;
        self.driver.ssl_mode(match encryption {
            Encryption::Disable => SslMode::Disable,
            Encryption::Prefer => SslMode::Prefer,
            Encryption::Require | Encryption::VerifyFull => SslMode::Require,
        });
    }
}

/// The parameters that are Statehouse's and not the driver's.
const OWN: [&str; 10] = [
    "schema",
    "partitions",
    "writers",
    "readers",
    "rls",
    "role",
    "timeout_ms",
    "lock_timeout_ms",
    "sslmode",
    "sslrootcert",
];

fn bad(why: &str) -> StoreError {
    StoreError::schema("the PostgreSQL URL", why)
}

fn number<N: Copy + FromStr + PartialOrd + fmt::Display>(
    name: &str,
    value: &str,
    least: N,
    most: N,
) -> Result<N, StoreError> {
    match value.parse::<N>() {
        Ok(number) if number >= least && number <= most => Ok(number),
        _ => Err(bad(&format!("{name} is a number from {least} to {most}, not {value:?}"))),
    }
}

/// Undoes percent encoding; text that is not valid stays as it is.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let code = tail.get(..2).and_then(|pair| std::str::from_utf8(pair).ok());
        let code = code.filter(|_| *first == b'%').and_then(|pair| u8::from_str_radix(pair, 16).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = tail.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// Without the driver's part, which may hold a password.
impl fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("schema", &self.schema)
            .field("partitions", &self.partitions)
            .field("writers", &self.writers)
            .field("readers", &self.readers)
            .field("row_level_security", &self.row_level_security)
            .field("runtime_role", &self.runtime_role)
            .field("encryption", &self.encryption)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_is_documented() {
        let page = include_str!("../../../docs/configuration.md");
        for name in OWN {
            assert!(page.contains(&format!("\n| `{name}` |")), "{name} is not in docs/configuration.md");
        }
    }

    #[test]
    fn own_parameters_are_taken_out_and_the_rest_goes_to_the_driver() {
        let url = "postgres://ann:s%3Fcret@db:5433/shop?schema=my%20house&writers=2&readers=8&partitions=32\
                   &rls=on&role=app&connect_timeout=3&sslmode=verify-full&lock_timeout_ms=250";
        let options = PostgresOptions::from_url(url).unwrap();
        assert_eq!(options.schema, "my house");
        assert_eq!((options.writers, options.readers, options.partitions), (2, 8, Some(32)));
        assert!(options.row_level_security);
        assert_eq!(options.runtime_role.as_deref(), Some("app"));
        assert_eq!(options.encryption, Encryption::VerifyFull);
        assert_eq!(options.lock_timeout, Duration::from_millis(250));
        assert_eq!(options.driver.get_user(), Some("ann"));
        assert_eq!(options.driver.get_password(), Some(&b"s?cret"[..]));
        assert_eq!(options.driver.get_dbname(), Some("shop"));
        assert_eq!(options.driver.get_ports(), [5433]);
        assert_eq!(options.driver.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(options.driver.get_ssl_mode(), SslMode::Require);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        for (url, expected) in [
            ("postgres://h/d?partitions=0", "partitions is a number from 1 to 4096"),
            ("postgres://h/d?writers=many", "writers is a number from 1 to 64"),
            ("postgres://h/d?rls=yes", "rls is `on` or `off`"),
            ("postgres://h/d?sslmode=maybe", "sslmode is disable"),
            ("postgres://h/d?schema=", "schema must be a name"),
            ("postgres://h/d?colour=red", "colour"),
            ("mysql://h/d", "URL"),
        ] {
            let error = PostgresOptions::from_url(url).unwrap_err().to_string();
            assert!(error.contains(expected), "{url}: {error}");
        }
    }

    #[test]
    fn passwords_are_not_printed() {
        let options = PostgresOptions::from_url("postgres://ann:hunter2@h/d").unwrap();
        assert!(!format!("{options:?}").contains("hunter2"));
    }
}
