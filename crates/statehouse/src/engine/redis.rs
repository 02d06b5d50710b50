//! Holds in Redis: the scripts of [`crate::holds`] over one connection that many callers share and that comes back by
//! itself.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{ErrorKind, FromRedisValue, RedisError, Script};

use crate::product::booking::external_holds::{
    EXTEND, ExternalHold, ExternalHolds, HoldsUnreachable, LOOK, RELEASE, TAKE,
};

/// Timeout of a request to Redis.
const PATIENCE: Duration = Duration::from_secs(2);

/// Holds in one Redis.
pub struct RedisHolds {
    connection: ConnectionManager,
    prefix: String,
    take: Script,
    extend: Script,
    release: Script,
    look: Script,
}

impl RedisHolds {
    /// Connects to `redis://host:port/number`. The keys begin with the prefix, so that several houses can share a server.
    pub async fn connect(url: &str, prefix: &str) -> Result<RedisHolds, HoldsUnreachable> {
        let why = |error: RedisError| HoldsUnreachable(described(&error));
        let client = redis::Client::open(url).map_err(why)?;
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE))
            .set_number_of_retries(2);
        let connection = client.get_connection_manager_with_config(config).await.map_err(why)?;
        Ok(RedisHolds {
            connection,
            prefix: format!("{prefix}:"),
            take: Script::new(TAKE),
            extend: Script::new(EXTEND),
            release: Script::new(RELEASE),
            look: Script::new(LOOK),
        })
    }

    async fn run<T: FromRedisValue>(
        &self,
        script: &Script,
        names: &[String],
        arguments: &[&str],
    ) -> Result<T, HoldsUnreachable> {
        let mut call = script.prepare_invoke();
        for name in names {
            call.key(format!("{}{name}", self.prefix));
        }
        for argument in arguments {
            call.arg(*argument);
        }
        let answer = call.invoke_async(&mut self.connection.clone()).await;
        answer.map_err(|error| HoldsUnreachable(described(&error)))
    }
}

/// What went wrong, without the address, which may hold a password.
fn described(error: &RedisError) -> String {
    match error.kind() {
        ErrorKind::InvalidClientConfig => "its URL cannot be read; write redis://HOST:PORT".to_owned(),
        _ => error.to_string(),
    }
}

fn millis(span: Duration) -> String {
    span.as_millis().max(1).to_string()
}

impl fmt::Debug for RedisHolds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisHolds({})", self.prefix)
    }
}

#[async_trait]
impl ExternalHolds for RedisHolds {
    async fn acquire(
        &self,
        names: &[String],
        holder: &str,
        span: Duration,
    ) -> Result<Result<(), usize>, HoldsUnreachable> {
        let number: usize = self.run(&self.take, names, &[holder, &millis(span)]).await?;
        Ok(number.checked_sub(1).map_or(Ok(()), Err))
    }

    async fn extend(&self, names: &[String], holder: &str, span: Duration) -> Result<bool, HoldsUnreachable> {
        let extended: i64 = self.run(&self.extend, names, &[holder, &millis(span)]).await?;
        Ok(extended == 1)
    }

    async fn release(&self, names: &[String], holder: &str) -> Result<(), HoldsUnreachable> {
        self.run::<i64>(&self.release, names, &[holder]).await.map(drop)
    }

    async fn read_holds(&self, names: &[String]) -> Result<Vec<Option<ExternalHold>>, HoldsUnreachable> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let found: Vec<(String, i64)> = self.run(&self.look, names, &[]).await?;
        let hold = |(holder, left): (String, i64)| {
            let left = Duration::from_millis(u64::try_from(left).unwrap_or_default());
            (!holder.is_empty()).then_some(ExternalHold { holder, left })
        };
        Ok(found.into_iter().map(hold).collect())
    }
}
