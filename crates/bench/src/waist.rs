//! The load as it goes through the waist: the same on every engine.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use statehouse_store::guard::{column, now};
use statehouse_store::{
    Address, Commit, Consistency, Entry, EventTemplate, Ids, Migrate, Plan, Random, Schema, Step, Store,
    SystemClock, Table, Tenant, Type,
};
use tokio::task::JoinSet;

use crate::load::{LoadRound, drive};

/// Rows in the table.
pub const ROWS: u64 = 10_000;
/// Plans in flight while the table is filled.
const FILLING: usize = 256;

/// A store with a table of profiles.
pub struct Waist {
    store: Arc<dyn Store>,
    table: Arc<Table>,
    tenant: Tenant,
    ids: Ids,
}

impl Waist {
    /// Makes and fills the table.
    pub async fn over(store: Arc<dyn Store>) -> Result<Waist> {
        let table = Table::named("profiles")
            .partition("user_id", Type::Int)
            .required("display_name", Type::Text)
            .optional("bio", Type::Text)
            .defaulted("status", Type::Text, "ACTIVE")
            .required("updated_at", Type::Time)
            .build()?;
        store.migrate(&Schema::new([table.clone()])?, Migrate::Apply).await?;
        let tenant = Tenant::new("acme")?;
        let mut filling = JoinSet::new();
        for user in 0..ROWS {
            let step = Step::insert(&table, [(user as i64).into()])
                .set("display_name", "a person")
                .set("bio", "a few words about a person, as people write them")
                .set("updated_at", now());
            let plan = Plan::of(&tenant, format!("create-{user}")).step(step).build()?;
            let store = store.clone();
            filling.spawn(async move { store.commit(&plan).await });
            if filling.len() >= FILLING
                && let Some(filled) = filling.join_next().await
            {
                filled??;
            }
        }
        while let Some(filled) = filling.join_next().await {
            filled??;
        }
        let ids = Ids::new(Arc::new(SystemClock), Random::from_entropy());
        Ok(Waist { store, table, tenant, ids })
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Guarded updates with a log record each.
    pub async fn writes(self: &Arc<Waist>, callers: u64, span: Duration) -> Result<LoadRound> {
        let waist = self.clone();
        drive(callers, span, move |caller, number| {
            let waist = waist.clone();
            async move {
                let user = pick(caller, number);
                let update = Step::update(&waist.table, [user.into()])
                    .guard(column("status").eq("ACTIVE"))
                    .set("display_name", name(number))
                    .set("updated_at", now());
                let event = EventTemplate::named("profile.updated").with("display_name", name(number));
                let plan = Plan::of(&waist.tenant, waist.ids.next())
                    .step(update)
                    .log(Entry::about("profile", user.to_string()).event(event))
                    .build()?;
                let outcome = waist.store.commit(&plan).await?;
                ensure!(matches!(outcome, Commit::Applied(_)), "not applied: {outcome:?}");
                Ok(())
            }
        })
        .await
    }

    /// Point reads by one caller.
    pub async fn reads(self: &Arc<Waist>, span: Duration) -> Result<LoadRound> {
        let waist = self.clone();
        drive(1, span, move |caller, number| {
            let waist = waist.clone();
            async move {
                let address = Address::new(&waist.table, &waist.tenant, [pick(caller, number).into()])?;
                let rows = waist.store.get(&[address], Consistency::Strong).await?;
                ensure!(rows.iter().flatten().count() == 1, "the row is missing");
                Ok(())
            }
        })
        .await
    }
}

/// The row that a caller touches; spread over the table without a generator's cost.
pub fn pick(caller: u64, number: u64) -> i64 {
    ((caller * 7919 + number * 104_729) % ROWS) as i64
}

/// What a row is changed to.
pub fn name(number: u64) -> String {
    format!("a person {number}")
}
