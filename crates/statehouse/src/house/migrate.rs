//! Making a store fit a blueprint.
//!
//! M1. Nothing is changed before it is known that everything can be: a layout number that rows would be lost with, or a key of
//!     another type, is refused by [`House::migrate`] whatever it was asked to do, before the first change.
//! M2. Derived rows go with their tables: generations of projections are given up before the tables come back that they were in
//!     ([`crate::infra::projection`]).
//! M3. A field that goes to another table takes its values along ([`super::moves`]). A column is dropped when it is empty.
//! M4. Only [`House::migrate`] and [`House::prepare`] change tables; [`House::check_fit`] only looks.

use statehouse_store::migration::Difference;
use statehouse_store::{Change, Migrate, StoreError};

use super::House;
use super::moves::Moves;
use crate::infra::projection;
use crate::resource::Consuming;

impl House {
    /// Makes the store fit the blueprint, or says what that would take. Values of fields that go to another table are moved:
    /// servers that run with an older blueprint, and so write to the old place, have to be stopped first.
    pub async fn migrate(&self, how: Migrate) -> Result<Vec<Change>, StoreError> {
        let planned = self.store.migrate(&self.schema, Migrate::Show).await?;
        let moves = Moves::pending(&self.resources, &planned)?;
        if how == Migrate::Show {
            return Ok(moves.shown(planned));
        }
        for consuming in self.resources.iter().flat_map(|resource| &resource.consumers) {
            if let Consuming::Projection(projector) = consuming {
                projection::restart(&*self.store, &self.schema, &planned, &**projector).await?;
            }
        }
        if moves.is_empty() {
            return self.store.migrate(&self.schema, how).await;
        }
        let mut changes = self.store.migrate(&self.schema, Migrate::Apply).await?;
        moves.carry_out(&*self.store, &self.ids).await?;
        self.drop_emptied(&moves).await?;
        changes.extend(moves.changes());
        if how == Migrate::ApplyWithLoss {
            changes.extend(self.store.migrate(&self.schema, how).await?);
        }
        Ok(changes)
    }

    /// Drops what moves have emptied, and nothing else: what other programs have added since stays.
    async fn drop_emptied(&self, moves: &Moves) -> Result<(), StoreError> {
        let left = self.store.migrate(&self.schema, Migrate::Show).await?;
        let without = moves.emptied(&self.schema, &left)?;
        let dropped = self.store.migrate(&without, Migrate::Show).await?;
        if dropped.iter().all(|change| moves.empties(change)) {
            self.store.migrate(&without, Migrate::ApplyWithLoss).await?;
        }
        Ok(())
    }

    /// Makes the store fit the blueprint as a server does when it starts: adds what is missing. Values are not moved, because
    /// servers with an older blueprint may still write to the old place; that is refused, with what to do.
    pub async fn prepare(&self) -> Result<Vec<Change>, StoreError> {
        let planned = self.migrate(Migrate::Show).await?;
        if let Some(change) = planned.iter().find(|change| change.moves()) {
            let why = format!(
                "a server does not {change}; stop the servers that run with the older blueprint, run `statehouse apply`, \
                 and start again"
            );
            return Err(StoreError::schema(format!("table {}", change.table), why));
        }
        self.migrate(Migrate::Apply).await
    }

    /// Refuses a store that lacks something of the blueprint, and changes nothing. What the blueprint no longer names may be
    /// there.
    pub async fn check_fit(&self) -> Result<(), StoreError> {
        let planned = self.migrate(Migrate::Show).await?;
        let missing: Vec<&Change> = planned.iter().filter(|change| !change.removes()).collect();
        let Some(first) = missing.first() else { return Ok(()) };
        let created = missing.iter().filter(|change| change.difference == Difference::CreateTable).count();
        if created == self.schema.tables().count() {
            let why = "it has none of the blueprint's tables: it is new, or not the store that is meant; `statehouse apply` \
                       creates them";
            return Err(StoreError::schema("the store", why));
        }
        let others = match missing.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        let why = format!(
            "the blueprint asks for changes: {first}{others}; `statehouse plan` shows them and `statehouse apply` makes them"
        );
        Err(StoreError::schema("the store", why))
    }
}
