//! PostgreSQL: a guarded update and its log record, against one statement and one connection for each caller.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use statehouse_store::{Ids, Random, SystemClock};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use tokio_postgres::{Client, NoTls, Statement};

use crate::load::{LoadRound, drive, median, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::waist::{ROWS, Waist, name, pick};

const CALLERS: u64 = 64;
const ROUNDS: usize = 7;
const SPAN: Duration = Duration::from_millis(1000);

/// Measures and prints.
pub async fn run() -> Result<()> {
    let server = BenchServer::postgres()?;
    let house = waist(&server.url, "bench_house", false).await?;
    let guarded = waist(&server.url, "bench_guarded", true).await?;
    let by_hand = Arc::new(PostgresRowsByHand::open(&server.url).await?);
    for (callers, wanted) in [(CALLERS, 3.0), (1, 0.8)] {
        let (mut ours, mut separated, mut reference) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(house.writes(callers, SPAN).await?);
            reference.push(by_hand.writes(callers).await?);
            separated.push(guarded.writes(callers, SPAN).await?);
        }
        report::heading(&format!("PostgreSQL: guarded update + log record, {callers} caller(s)"));
        report::measured("Statehouse", median(&ours)?);
        report::measured("Statehouse, row-level security", median(&separated)?);
        report::measured("by hand, one statement and connection for each caller", median(&reference)?);
        report::ratio("Statehouse / by hand", ratio(&ours, &reference)?, wanted);
        report::ratio("Statehouse with row-level security / without", ratio(&separated, &ours)?, 0.8);
    }
    for (waist, schema) in [(&house, "bench_house"), (&guarded, "bench_guarded")] {
        waist.store().close().await;
        let mut options = PostgresOptions::from_url(&server.url)?;
        options.schema = schema.to_owned();
        PostgresStore::erase(&options).await?;
    }
    Ok(())
}

async fn waist(url: &str, schema: &str, row_level_security: bool) -> Result<Arc<Waist>> {
    let mut options = PostgresOptions::from_url(url)?;
    options.schema = schema.to_owned();
    options.row_level_security = row_level_security;
    if row_level_security {
        // Row-level security does not bind a superuser, which the server's owner is.
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        tokio::spawn(connection);
        let create =
            format!("do $$ begin create role {ROLE}; exception when duplicate_object then null; end $$");
        client.batch_execute(&create).await?;
        options.runtime_role = Some(ROLE.to_owned());
    }
    PostgresStore::erase(&options).await?;
    Ok(Arc::new(Waist::over(Arc::new(PostgresStore::open(options).await?)).await?))
}

/// Who writes when tenants are kept apart by the server.
const ROLE: &str = "statehouse_bench";

/// What a careful engineer would write: a connection for each caller, one prepared statement that does it all.
struct PostgresRowsByHand {
    clients: Vec<(Client, Statement)>,
    ids: Ids,
}

const TABLES: &str = "
drop schema if exists bench_by_hand cascade;
create schema bench_by_hand;
create table bench_by_hand.profiles (
    tenant text not null, user_id bigint not null, display_name text not null, bio text,
    status text not null default 'ACTIVE', updated_at timestamptz not null, version bigint not null default 1,
    primary key (tenant, user_id)
);
create table bench_by_hand.outbox (
    position bigserial primary key, tenant text not null, operation text not null, resource text not null,
    key text not null, at timestamptz not null, events json not null, unique (tenant, operation)
);
";

const UPDATE: &str = "
with updated as (
    update bench_by_hand.profiles
    set display_name = $3, updated_at = now(), version = version + 1
    where tenant = $1 and user_id = $2 and status = 'ACTIVE'
    returning version
)
insert into bench_by_hand.outbox (tenant, operation, resource, key, at, events)
select $1, $4, 'profile', $2::bigint::text, now(), $5::text::json from updated
returning position";

impl PostgresRowsByHand {
    async fn open(url: &str) -> Result<PostgresRowsByHand> {
        let mut clients = Vec::new();
        for number in 0..CALLERS {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            if number == 0 {
                client.batch_execute(TABLES).await?;
                let fill = "insert into bench_by_hand.profiles (tenant, user_id, display_name, bio, updated_at)
                            select 'acme', n, 'a person', 'a few words about a person, as people write them', now()
                            from generate_series(0, $1::bigint - 1) as n";
                client.execute(fill, &[&(ROWS as i64)]).await?;
            }
            let statement = client.prepare(UPDATE).await?;
            clients.push((client, statement));
        }
        Ok(PostgresRowsByHand { clients, ids: Ids::new(Arc::new(SystemClock), Random::from_entropy()) })
    }

    async fn writes(self: &Arc<PostgresRowsByHand>, callers: u64) -> Result<LoadRound> {
        let by_hand = self.clone();
        drive(callers, SPAN, move |caller, number| {
            let by_hand = by_hand.clone();
            async move {
                let (client, statement) = by_hand.clients.get(caller as usize).context("no connection")?;
                let name = name(number);
                let events = serde_json::json!([{"name": "profile.updated", "data": {"display_name": name}}]);
                let written = client
                    .execute(
                        statement,
                        &[&"acme", &pick(caller, number), &name, &by_hand.ids.next(), &events.to_string()],
                    )
                    .await?;
                ensure!(written == 1, "not applied");
                Ok(())
            }
        })
        .await
    }
}
