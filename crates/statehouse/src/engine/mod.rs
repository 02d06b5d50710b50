//! Engines: stores by URL, what each engine cannot carry ([`limits`]), what it promises beyond the waist
//! ([`guarantees`]), and how it is backed up ([`mod@backup`]). This folder is the one place in the library that names engines.
//!
//! | URL | store |
//! |---|---|
//! | `sqlite:house.db` | an embedded file; created if it does not exist |
//! | `postgres://user@host/database?schema=house` | PostgreSQL |
//! | `dynamodb://prefix?region=eu-central-1` | DynamoDB |
//! | `memory:` | in memory, gone with the process |

pub mod backup;
pub mod guarantees;
pub mod limits;
#[cfg(feature = "redis")]
mod redis;

use std::fmt;
use std::sync::Arc;

use statehouse_store::{ExplainRequest, Explanation, ModelStore, Store, StoreError, Time};

use crate::product::booking::external_holds::ExternalHolds;
use crate::{Blueprint, House, Problems, resource};

/// An engine, by name: also one that this program was built without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// In memory; the reference.
    Model,
    /// An embedded file.
    Sqlite,
    /// PostgreSQL.
    Postgres,
    /// DynamoDB.
    Dynamodb,
}

impl Engine {
    /// Every engine.
    pub const ALL: [Engine; 4] = [Engine::Model, Engine::Sqlite, Engine::Postgres, Engine::Dynamodb];

    /// As [`Store::engine`] says it.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Model => "model",
            Engine::Sqlite => "sqlite",
            Engine::Postgres => "postgres",
            Engine::Dynamodb => "dynamodb",
        }
    }

    /// The engine of that name.
    pub fn named(name: &str) -> Option<Engine> {
        Engine::ALL.into_iter().find(|engine| engine.name() == name)
    }

    /// The engine whose store a URL names, without opening it.
    pub fn of_url(url: &str) -> Result<Engine, OpenError> {
        let bad = |why: &str| OpenError::BadUrl { url: without_password(url), why: why.to_owned() };
        match url.split_once(':').ok_or_else(|| bad("it has no scheme"))? {
            ("memory", _) => Ok(Engine::Model),
            ("sqlite", "" | "//") => Err(bad("it names no file")),
            ("sqlite", _) => Ok(Engine::Sqlite),
            ("postgres" | "postgresql", _) => Ok(Engine::Postgres),
            ("dynamodb", _) => Ok(Engine::Dynamodb),
            _ => Err(bad("its scheme is unknown")),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // People know it by its URL.
        f.write_str(if *self == Engine::Model { "memory" } else { self.name() })
    }
}

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
    /// Opens the store that a URL names, makes it fit the blueprint (adding only), and puts the house over it. What the
    /// engine cannot carry is refused before anything is created.
    pub async fn open(url: &str, blueprint: &Blueprint) -> Result<House, OpenError> {
        let house = House::open_as_it_is(url, blueprint).await?;
        house.prepare().await?;
        Ok(house)
    }

    /// Opens the store that a URL names and puts the house over it, without touching its tables.
    pub async fn open_as_it_is(url: &str, blueprint: &Blueprint) -> Result<House, OpenError> {
        let resources = resource::declare(blueprint)?;
        limits::problems(blueprint, &resources, Engine::of_url(url)?).or(())?;
        Ok(House::over(open(url).await?, blueprint)?)
    }
}

/// Opens the holds that a URL names, for a house of this name.
#[cfg(feature = "redis")]
pub async fn open_holds(url: &str, house: &str) -> Result<Arc<dyn ExternalHolds>, OpenError> {
    let holds = redis::RedisHolds::connect(url, house).await;
    Ok(Arc::new(holds.map_err(|error| StoreError::unavailable(error.to_string()))?))
}

/// Opens the holds that a URL names, for a house of this name.
#[cfg(not(feature = "redis"))]
pub async fn open_holds(_: &str, _: &str) -> Result<Arc<dyn ExternalHolds>, OpenError> {
    Err(OpenError::NotBuilt { engine: "redis" })
}

/// Opens the store that a URL names.
pub async fn open(url: &str) -> Result<Arc<dyn Store>, OpenError> {
    match Engine::of_url(url)? {
        Engine::Model => Ok(Arc::new(ModelStore::new())),
        Engine::Sqlite => {
            let path = url.strip_prefix("sqlite:").unwrap_or(url);
            open_sqlite(path.strip_prefix("//").unwrap_or(path)).await
        }
        Engine::Postgres => open_postgres(url).await,
        Engine::Dynamodb => open_dynamodb(url).await,
    }
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(path: &str) -> Result<Arc<dyn Store>, OpenError> {
    use statehouse_store_sqlite::{SqliteOptions, SqliteStore};
    Ok(Arc::new(SqliteStore::open(SqliteOptions::at(path)).await?))
}

#[cfg(not(feature = "sqlite"))]
async fn open_sqlite(_: &str) -> Result<Arc<dyn Store>, OpenError> {
    Err(OpenError::NotBuilt { engine: "sqlite" })
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str) -> Result<Arc<dyn Store>, OpenError> {
    use statehouse_store_postgres::{PostgresOptions, PostgresStore};
    Ok(Arc::new(PostgresStore::open(PostgresOptions::from_url(url)?).await?))
}

#[cfg(not(feature = "postgres"))]
async fn open_postgres(_: &str) -> Result<Arc<dyn Store>, OpenError> {
    Err(OpenError::NotBuilt { engine: "postgres" })
}

#[cfg(feature = "dynamodb")]
async fn open_dynamodb(url: &str) -> Result<Arc<dyn Store>, OpenError> {
    use statehouse_store_dynamodb::{DynamoOptions, DynamoStore};
    Ok(Arc::new(DynamoStore::open(DynamoOptions::from_url(url)?).await?))
}

#[cfg(not(feature = "dynamodb"))]
async fn open_dynamodb(_: &str) -> Result<Arc<dyn Store>, OpenError> {
    Err(OpenError::NotBuilt { engine: "dynamodb" })
}

/// The time at which everything is explained, where a caller's clock is part of a request.
pub fn explained_at() -> Time {
    Time::from_millis(1_700_000_000_000)
}

/// What a store of an engine, with the settings it has by default, would send for this. No store is needed.
pub fn explain(engine: Engine, asked: ExplainRequest<'_>) -> Result<Explanation, OpenError> {
    match engine {
        Engine::Model => Ok(ModelStore::new().explain(asked)),
        Engine::Sqlite => explain_sqlite(asked),
        Engine::Postgres => explain_postgres(asked),
        Engine::Dynamodb => explain_dynamodb(asked),
    }
}

#[cfg(feature = "sqlite")]
fn explain_sqlite(asked: ExplainRequest<'_>) -> Result<Explanation, OpenError> {
    Ok(statehouse_store_sqlite::explain(asked))
}

#[cfg(not(feature = "sqlite"))]
fn explain_sqlite(_: ExplainRequest<'_>) -> Result<Explanation, OpenError> {
    Err(OpenError::NotBuilt { engine: "sqlite" })
}

#[cfg(feature = "postgres")]
fn explain_postgres(asked: ExplainRequest<'_>) -> Result<Explanation, OpenError> {
    use statehouse_store_postgres::{PostgresOptions, explain};
    Ok(explain(&PostgresOptions::from_url("postgres://localhost/house")?, asked))
}

#[cfg(not(feature = "postgres"))]
fn explain_postgres(_: ExplainRequest<'_>) -> Result<Explanation, OpenError> {
    Err(OpenError::NotBuilt { engine: "postgres" })
}

#[cfg(feature = "dynamodb")]
fn explain_dynamodb(asked: ExplainRequest<'_>) -> Result<Explanation, OpenError> {
    use statehouse_store::clock::ManualClock;
    use statehouse_store_dynamodb::{DynamoOptions, explain};
    let mut options = DynamoOptions::from_url("dynamodb://house")?;
    options.clock = Arc::new(ManualClock::at(explained_at()));
    Ok(explain(options, asked))
}

#[cfg(not(feature = "dynamodb"))]
fn explain_dynamodb(_: ExplainRequest<'_>) -> Result<Explanation, OpenError> {
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
        assert_eq!(open("memory:").await.unwrap().engine(), Engine::Model.name());
        assert_eq!(Engine::of_url("postgresql://db/x").unwrap(), Engine::Postgres);
    }

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(without_password("postgres://app:s:e@db/x?y"), "postgres://app:…@db/x?y");
        assert_eq!(without_password("postgres://db/x@y"), "postgres://db/x@y");
        assert_eq!(without_password("sqlite:a.db"), "sqlite:a.db");
    }
}
