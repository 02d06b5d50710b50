//! PostgreSQL under row-level security: a schema and a role that owns nothing, for each site.

use std::sync::Arc;

use statehouse_store::{Random, Store};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use tokio_postgres::NoTls;

/// Where the server is found.
const VARIABLE: &str = "STATEHOUSE_TEST_POSTGRES";

/// A schema whose tables are used under row-level security. It goes away with the value.
pub struct RestrictedSchema {
    options: PostgresOptions,
    role: String,
}

impl RestrictedSchema {
    pub fn new() -> RestrictedSchema {
        let url = std::env::var(VARIABLE);
        let url = url.unwrap_or_else(|_| {
            panic!("{VARIABLE} has to hold the URL that `scripts/postgres start DIR` prints")
        });
        let number = Random::from_entropy().below(1 << 48);
        let role = format!("http_role_{number:x}");
        let mut options = PostgresOptions::from_url(&url).unwrap();
        options.schema = format!("http_{number:x}");
        options.row_level_security = true;
        options.runtime_role = Some(role.clone());
        RestrictedSchema { options, role }
    }

    pub async fn open(&self) -> Arc<dyn Store> {
        let role = &self.role;
        execute(&format!(
            "do $$ begin if not exists (select from pg_roles where rolname = '{role}') then create role {role}; end if; end $$"
        ))
        .await;
        Arc::new(PostgresStore::open(self.options.clone()).await.unwrap())
    }
}

impl Drop for RestrictedSchema {
    fn drop(&mut self) {
        let (options, role) = (self.options.clone(), self.role.clone());
        // A runtime of its own, on a thread of its own: the site may go away within another runtime.
        let erased = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let _ = PostgresStore::erase(&options).await;
                execute(&format!("drop owned by {role}; drop role {role}")).await;
            });
        });
        // A schema that stays behind disturbs no other test.
        let _ = erased.join();
    }
}

async fn execute(statement: &str) {
    let (client, connection) =
        tokio_postgres::connect(&std::env::var(VARIABLE).unwrap(), NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    client.batch_execute(statement).await.unwrap();
    drop(client);
    let _ = connection.await;
}
