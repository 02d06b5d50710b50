//! Backups: made here where the engine is embedded, and left to the database's own tools where it is a server.

use std::path::Path;

use statehouse_store::StoreError;

use super::{Engine, OpenError, without_password};

/// How far a backup has got: pages that are copied, and all pages.
pub type BackupSteps<'p> = &'p mut (dyn FnMut(u64, u64) + Send);

/// Why no backup was made.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The engine has tools of its own for it.
    #[error("{engine} is not backed up by this command: {advice}")]
    Elsewhere {
        /// The engine.
        engine: Engine,
        /// What to use.
        advice: String,
    },
    /// The URL names no store, or one that this program was built without.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It could not be made, and none is left behind.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Copies the store that a URL names, which may be in use, to a file that must not exist. Blocks until it is complete, checked
/// and on the disk. Returns how large it is.
pub fn backup(url: &str, to: &Path, steps: BackupSteps<'_>) -> Result<u64, BackupError> {
    let engine = Engine::of_url(url)?;
    let advice = match engine {
        Engine::Sqlite => {
            let path = url.strip_prefix("sqlite:").unwrap_or(url);
            return sqlite(Path::new(path.strip_prefix("//").unwrap_or(path)), to, steps);
        }
        Engine::Model => "it is gone with its process; there is nothing to back up".to_owned(),
        Engine::Postgres => format!(
            "use `pg_dump --format=custom --schema={} --file={} DATABASE_URL`, which is of one moment and can be made \
             while servers run, or base backups with archived WAL. The store is {}",
            postgres_schema(url),
            to.display(),
            without_password(url)
        ),
        Engine::Dynamodb => {
            let prefix = url.strip_prefix("dynamodb://").unwrap_or_default();
            let prefix = prefix.split(['?', '/']).next().unwrap_or_default();
            format!(
                "use `aws dynamodb create-backup` for each table whose name begins with `{prefix}.`, or point-in-time \
                 recovery. Each table is backed up by itself: only while no server writes are all of one moment"
            )
        }
    };
    Err(BackupError::Elsewhere { engine, advice })
}

#[cfg(feature = "sqlite")]
fn sqlite(from: &Path, to: &Path, steps: BackupSteps<'_>) -> Result<u64, BackupError> {
    use statehouse_store_sqlite::{BackupProgress, backup};
    let made = backup(from, to, &mut |BackupProgress { copied, pages }| steps(copied, pages))?;
    Ok(made.bytes)
}

#[cfg(not(feature = "sqlite"))]
fn sqlite(_: &Path, _: &Path, _: BackupSteps<'_>) -> Result<u64, BackupError> {
    Err(OpenError::NotBuilt { engine: "sqlite" }.into())
}

/// The schema that a URL names.
#[cfg(feature = "postgres")]
fn postgres_schema(url: &str) -> String {
    let options = statehouse_store_postgres::PostgresOptions::from_url(url);
    options.map_or_else(|_| "SCHEMA".to_owned(), |options| options.schema)
}

/// The schema that a URL names.
#[cfg(not(feature = "postgres"))]
fn postgres_schema(_: &str) -> String {
    "SCHEMA".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_engines_name_their_own_tools() {
        let to = Path::new("house.backup");
        for (url, expect) in [
            ("postgres://app:secret@db/shop?schema=house", "pg_dump"),
            ("dynamodb://shop?region=eu-central-1", "whose name begins with `shop.`"),
            ("memory:", "nothing to back up"),
            ("mysql://db", "scheme is unknown"),
        ] {
            let error = backup(url, to, &mut |_, _| {}).unwrap_err().to_string();
            assert!(error.contains(expect) && !error.contains("secret"), "{error}");
        }
    }
}
