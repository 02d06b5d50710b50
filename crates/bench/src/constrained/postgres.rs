//! PostgreSQL by hand: a connection for each caller, and one prepared statement for a create.

use anyhow::{Context, Result};
use async_trait::async_trait;
use serde_json::Value as Json;
use tokio_postgres::{Client, NoTls, Statement};

use super::{CATEGORIES, LoansByHand, MEMBERS, NewLoan, PAGE, TOOLS, WRITERS, event_of, tool_json};

const TABLES: &str = "
drop schema if exists bench_loans cascade;
create schema bench_loans;
create table bench_loans.members (
    tenant text not null, member_id bigint not null, name text not null, status text not null default 'ACTIVE',
    updated_at timestamptz not null default now(), version bigint not null default 1, primary key (tenant, member_id)
);
create table bench_loans.loans (
    tenant text not null, loan_id text not null, code text not null, member bigint not null,
    status text not null default 'ACTIVE', updated_at timestamptz not null, version bigint not null default 1,
    primary key (tenant, loan_id)
);
create index on bench_loans.loans (tenant, status, updated_at);
create table bench_loans.codes (
    tenant text not null, code text not null, taken_by text not null, primary key (tenant, code)
);
create table bench_loans.refs (
    tenant text not null, target bigint not null, n bigint not null, primary key (tenant, target)
);
create table bench_loans.tools (
    tenant text not null, tool_id bigint not null, category text not null, name text not null, price bigint not null,
    status text not null default 'ACTIVE', updated_at timestamptz not null default now(),
    version bigint not null default 1, primary key (tenant, tool_id)
);
create index on bench_loans.tools (tenant, category, price);
create table bench_loans.outbox (
    position bigserial primary key, tenant text not null, operation text not null, resource text not null,
    key text not null, at timestamptz not null, events json not null, unique (tenant, operation)
);
";

const CREATE: &str = "
with target as (
    select member_id from bench_loans.members
    where tenant = $1 and member_id = $4 and status = 'ACTIVE' for share
), taken as (
    insert into bench_loans.codes (tenant, code, taken_by) select $1, $3, $2 from target
    on conflict do nothing returning code
), counted as (
    insert into bench_loans.refs as refs (tenant, target, n) select $1, $4, 1 from taken
    on conflict (tenant, target) do update set n = refs.n + 1
), stored as (
    insert into bench_loans.loans (tenant, loan_id, code, member, updated_at) select $1, $2, $3, $4, now() from taken
    returning loan_id
)
insert into bench_loans.outbox (tenant, operation, resource, key, at, events)
select $1, $5, 'loan', loan_id, now(), $6::text::json from stored";

const SELECT: &str = "
select tool_id, name, price, (extract(epoch from updated_at) * 1000000)::bigint, version
from bench_loans.tools where tenant = $1 and category = $2 and status = 'ACTIVE'
order by price desc, tool_id desc limit $3";

pub(super) struct PostgresLoans {
    clients: Vec<PostgresCaller>,
}

struct PostgresCaller {
    client: Client,
    create: Statement,
    select: Statement,
}

impl PostgresLoans {
    pub(super) async fn open(url: &str) -> Result<PostgresLoans> {
        let mut clients = Vec::new();
        for number in 0..WRITERS {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            if number == 0 {
                client.batch_execute(TABLES).await?;
                fill(&client).await?;
            }
            let (create, select) = (client.prepare(CREATE).await?, client.prepare(SELECT).await?);
            clients.push(PostgresCaller { client, create, select });
        }
        Ok(PostgresLoans { clients })
    }

    fn caller(&self, number: u64) -> Result<&PostgresCaller> {
        self.clients.get(number as usize).context("no connection")
    }
}

async fn fill(client: &Client) -> Result<()> {
    let members = "insert into bench_loans.members (tenant, member_id, name)
                   select 'acme', n, 'a member' from generate_series(0, $1::bigint - 1) as n";
    client.execute(members, &[&(MEMBERS as i64)]).await?;
    let tools = "insert into bench_loans.tools (tenant, tool_id, category, name, price)
                 select 'acme', n, 'category ' || (n % $2::bigint), 'a tool', n * 7 % 1000
                 from generate_series(0, $1::bigint - 1) as n";
    client.execute(tools, &[&(TOOLS as i64), &(CATEGORIES as i64)]).await?;
    Ok(())
}

#[async_trait]
impl LoansByHand for PostgresLoans {
    async fn create(&self, caller: u64, loan: NewLoan) -> Result<bool> {
        let PostgresCaller { client, create, .. } = self.caller(caller)?;
        let events = event_of(&loan);
        let NewLoan { id, code, member, operation } = &loan;
        Ok(client.execute(create, &[&"acme", id, code, member, operation, &events]).await? == 1)
    }

    async fn page(&self, caller: u64, category: &str) -> Result<Vec<Json>> {
        let PostgresCaller { client, select, .. } = self.caller(caller)?;
        let rows = client.query(select, &[&"acme", &category, &PAGE]).await?;
        let tool = |row: &tokio_postgres::Row| -> Result<Json> {
            let tool = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?, row.try_get(4)?);
            Ok(tool_json(category, tool))
        };
        rows.iter().map(tool).collect()
    }
}
