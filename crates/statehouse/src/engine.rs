//! Stores by URL: the one place in the library that names engines.
//!
//! | URL | store |
//! |---|---|
//! | `sqlite:house.db` | an embedded file; created if it does not exist |
//! | `postgres://user@host/database?schema=house` | PostgreSQL |
//! | `dynamodb://prefix?region=eu-central-1` | DynamoDB |
//! | `memory:` | in memory, gone with the process |

use std::sync::Arc;

use statehouse_store::{Migrate, ModelStore, Store, StoreError};

use crate::{Blueprint, House, Problems};

/// Why no store could be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL names no store.
    #[error("`{url}` names no store: {why}; write sqlite:FILE, postgres://…, dynamodb://PREFIX or memory:")]
    BadUrl {
        /// What was given, without its password.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The engine is known and was left out when this program was built.
    #[error("this program was built without {engine}; build it with the feature `{engine}`")]
    NotBuilt {
        /// The engine.
        engine: &'static str,
    },
    /// The engine said no.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The blueprint's settings are wrong.
    #[error("{0}")]
    Blueprint(#[from] Problems),
}

impl House {
    /// Opens the store that a URL names, makes it fit the blueprint (adding only), and puts the house over it.
    pub async fn open(url: &str, blueprint: &Blueprint) -> Result<House, OpenError> {
        let house = House::over(open(url).await?, blueprint)?;
        house.migrate(Migrate::Apply).await?;
        Ok(house)
    }
}

/// Opens the store that a URL names.
pub async fn open(url: &str) -> Result<Arc<dyn Store>, OpenError> {
    let bad = |why: &str| OpenError::BadUrl { url: without_password(url), why: why.to_owned() };
    let (scheme, rest) = url.split_once(':').ok_or_else(|| bad("it has no scheme"))?;
    match scheme {
        "memory" => Ok(Arc::new(ModelStore::new())),
        "sqlite" if rest.is_empty() || rest == "//" => Err(bad("it names no file")),
        "sqlite" => open_sqlite(rest.strip_prefix("//").unwrap_or(rest)).await,
        "postgres" | "postgresql" => open_postgres(url).await,
        "dynamodb" => open_dynamodb(url).await,
        _ => Err(bad("its scheme is unknown")),
    }
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(path: &str) -> Result<Arc<dyn Store>, OpenError> {
    use statehouse_store_sqlite::{Options, SqliteStore};
    Ok(Arc::new(SqliteStore::open(Options::at(path)).await?))
}

#[cfg(not(feature = "sqlite"))]
async fn open_sqlite(_: &str) -> Result<Arc<dyn Store>, OpenError> {
    Err(OpenError::NotBuilt { engine: "sqlite" })
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str) -> Result<Arc<dyn Store>, OpenError> {
    use statehouse_store_postgres::{Options, PostgresStore};
    Ok(Arc::new(PostgresStore::open(Options::from_url(url)?).await?))
}

#[cfg(not(feature = "postgres"))]
async fn open_postgres(_: &str) -> Result<Arc<dyn Store>, OpenError> {
    Err(OpenError::NotBuilt { engine: "postgres" })
}

#[cfg(feature = "dynamodb")]
async fn open_dynamodb(url: &str) -> Result<Arc<dyn Store>, OpenError> {
    use statehouse_store_dynamodb::{DynamoStore, Options};
    Ok(Arc::new(DynamoStore::open(Options::from_url(url)?).await?))
}

#[cfg(not(feature = "dynamodb"))]
async fn open_dynamodb(_: &str) -> Result<Arc<dyn Store>, OpenError> {
    Err(OpenError::NotBuilt { engine: "dynamodb" })
}

/// A URL that can be shown: `postgres://user:…@host` for `postgres://user:secret@host`.
pub fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let authority_end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(authority_end);
    match authority.rsplit_once('@').and_then(|(login, host)| Some((login.split_once(':')?.0, host))) {
        Some((user, host)) => format!("{scheme}://{user}:…@{host}{path}"),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn urls_that_name_no_store_are_refused_with_advice() {
        for (url, expect) in
            [("house.db", "no scheme"), ("sqlite:", "names no file"), ("mysql://x", "scheme is unknown")]
        {
            let error = open(url).await.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(expect) && error.contains("sqlite:FILE"), "{url}: {error}");
        }
        assert_eq!(open("memory:").await.unwrap().engine(), "model");
    }

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(without_password("postgres://app:s:e@db/x?y"), "postgres://app:…@db/x?y");
        assert_eq!(without_password("postgres://db/x@y"), "postgres://db/x@y");
        assert_eq!(without_password("sqlite:a.db"), "sqlite:a.db");
    }
}
