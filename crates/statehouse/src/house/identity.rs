//! Which house a store belongs to.
//!
//! The first migration writes the house's name and a generated id to one row of the system tenant. From then on a blueprint of
//! another name is rejected before anything is changed. A store of an earlier version of the program has no such row, and is
//! claimed like an empty one. A house gets another name with `renamed_from` in the blueprint.

use statehouse_store::{
    Address, Commit, Consistency, Guard, Migrate, Plan, Schema, SchemaChange, Step, StoreError, Table,
    Tenant, Time, Value,
};
use std::sync::Arc;

use super::House;
use crate::system;

/// The key of the row.
const PART: &str = "house";
/// How often the row may be another one before a migration is given up.
const TRIES: u32 = 5;

/// What a store says about the house that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HouseIdentity {
    /// The house's name.
    pub name: String,
    /// Its id, which it keeps if it gets another name.
    pub id: String,
    /// When it got the store.
    pub claimed_at: Time,
    version: i64,
}

fn declared() -> Result<(Arc<Table>, Tenant), StoreError> {
    let table = system::identity().map_err(|error| StoreError::schema(error.table, error.why))?;
    let tenant = system::tenant().ok_or_else(|| StoreError::schema("the system tenant", "it has no name"))?;
    Ok((table, tenant))
}

impl House {
    /// What the store says about the house that it belongs to; nothing if it was never migrated, or only by an earlier version of
    /// the program.
    pub async fn identity(&self) -> Result<Option<HouseIdentity>, StoreError> {
        let (table, tenant) = declared()?;
        let address = Address::new(&table, &tenant, [PART.into()]);
        let address = address.map_err(|error| StoreError::schema(system::IDENTITY, error.to_string()))?;
        let rows = match self.store.get(&[address], Consistency::Strong).await {
            Ok(rows) => rows,
            // The table was not created yet.
            Err(StoreError::Schema { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(row) = rows.into_iter().next().flatten() else { return Ok(None) };
        let corrupt = |column: &str| StoreError::corrupt(system::IDENTITY, format!("it has no {column}"));
        let text = |column: &str| row.text(column).map(str::to_owned).ok_or_else(|| corrupt(column));
        let claimed_at =
            row.get("claimed_at").and_then(Value::as_time).ok_or_else(|| corrupt("claimed_at"))?;
        Ok(Some(HouseIdentity { name: text("name")?, id: text("id")?, claimed_at, version: row.version() }))
    }

    /// Rejects a store of another house. Returns what it says.
    pub(super) async fn check_identity(&self) -> Result<Option<HouseIdentity>, StoreError> {
        let recorded = self.identity().await?;
        let Some(found) = &recorded else { return Ok(None) };
        if found.name == self.name || self.renamed_from.as_ref() == Some(&found.name) {
            return Ok(recorded);
        }
        let (theirs, id, own) = (&found.name, &found.id, &self.name);
        let why = format!(
            "it belongs to the house `{theirs}` (id {id}), and the blueprint is of the house `{own}`; nothing was changed. Use \
             the store of `{own}`. If the house has a new name, write `renamed_from = \"{theirs}\"` under `[house]`"
        );
        Err(StoreError::schema("the store", why))
    }

    /// Writes the house's name to a store that says none, or its former one. Returns what was changed for that.
    pub(super) async fn claim(
        &self,
        recorded: Option<HouseIdentity>,
    ) -> Result<Vec<SchemaChange>, StoreError> {
        if recorded.as_ref().is_some_and(|found| found.name == self.name) {
            return Ok(Vec::new());
        }
        let (table, tenant) = declared()?;
        let schema =
            Schema::new([table.clone()]).map_err(|error| StoreError::schema(error.table, error.why))?;
        // Before all other tables, so that of two houses that find an empty store one changes nothing else.
        let changes = self.store.migrate(&schema, Migrate::Apply).await?;
        let mut recorded = recorded;
        for _ in 0..TRIES {
            let step = match &recorded {
                Some(found) if found.name == self.name => return Ok(changes),
                Some(found) => Step::update(&table, [PART.into()]).guard(Guard::version(found.version)),
                None => Step::insert(&table, [PART.into()])
                    .set("id", self.ids.next())
                    .set("claimed_at", Value::Time(self.clock.now())),
            };
            let plan = Plan::of(&tenant, self.ids.next()).step(step.set("name", self.name.as_str())).build();
            let plan = plan.map_err(|error| StoreError::schema(system::IDENTITY, error.to_string()))?;
            // Read again in any case: another process may have been faster.
            match self.store.commit(&plan).await {
                Ok(Commit::Applied(_)) => return Ok(changes),
                Ok(Commit::Refused(_) | Commit::Fenced) | Err(StoreError::OutcomeUnknown { .. }) => {}
                Err(error) => return Err(error),
            }
            recorded = self.check_identity().await?;
        }
        Err(StoreError::unavailable(format!("{} changes all the time", system::IDENTITY)))
    }
}
