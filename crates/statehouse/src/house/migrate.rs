//! Making a store fit a blueprint.
//!
//! M1. Nothing is changed before it is known that everything can be: a layout number that rows would be lost with, or a key of
//!     another type, is refused by [`House::migrate`] whatever it was asked to do, before the first change.
//! M2. Derived rows go with their tables: generations of projections are given up before the tables come back that they were in
//!     ([`crate::infra::projection`]).
//! M3. A field that goes to another table takes its values along ([`super::moves`]). A column is dropped when it is empty.
//! M4. A store belongs to one house ([`super::identity`]): a blueprint of another one is rejected before anything else.
//! M5. Data goes away only if it is named ([`super::losses`]), or with [`Migrate::ApplyWithLoss`], which takes everything.
//! M6. Rows that violate a new constraint of a field are listed before anything is changed ([`super::constraints`]).
//!     A constraint between rows is filled from the rows that exist, before anything else is changed ([`super::fill`]).
//!     Rows in states that a workflow no longer has are counted, and moved to what the blueprint says ([`super::states`]).
//! M7. Only [`House::migrate`] and [`House::prepare`] change tables; [`House::check_fit`] only looks.
//! M8. Changes that another blueprint cannot go on after wait until no process serves one ([`super::processes`]).
//! M9. Each table of a house has one owner: one of its resources, or the house itself.

use std::collections::BTreeMap;

use statehouse_store::migration::Difference;
use statehouse_store::{Migrate, Schema, SchemaChange, SchemaError, StoreError};

use super::constraints::ConstraintChanges;
use super::moves::Moves;
use super::{House, losses};
use crate::infra::projection;
use crate::infra::scan::runner::{RunProgress, ScanRunner};
use crate::resource::{Consuming, Resource};
use crate::system;

/// The tables of these resources and of the house itself (M9).
pub(super) fn schema_of(resources: &[Resource]) -> Result<Schema, SchemaError> {
    let own = system::tables()?;
    let mut owners: BTreeMap<&str, Option<&str>> = own.iter().map(|table| (table.name(), None)).collect();
    for resource in resources {
        for table in &resource.tables {
            let why = match owners.insert(table.name(), Some(&resource.name)) {
                None => continue,
                Some(None) => {
                    let why = "and it is a table of the house itself; give it another table: `table = \"…\"`";
                    format!("`{}` declares it, {why}", resource.name)
                }
                Some(Some(other)) => {
                    let advice = "give one of them another table: `table = \"…\"`";
                    format!("`{other}` and `{}` both declare it; {advice}", resource.name)
                }
            };
            return Err(SchemaError { table: table.name().to_owned(), why });
        }
    }
    Schema::new(resources.iter().flat_map(|resource| &resource.tables).chain(&own).cloned())
}

impl House {
    /// Makes the store fit the blueprint, or says what that would take. Values of fields that go to another table are moved:
    /// servers that run with an older blueprint, and so write to the old place, have to be stopped first.
    pub async fn migrate(&self, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        self.migrate_naming(how, None).await
    }

    /// Makes the store fit the blueprint, and removes what is named and the blueprint no longer has, with its data: `table`,
    /// `table.column` or `table.index`. A name of which nothing would be removed is an error, and nothing is changed.
    pub async fn migrate_losing(&self, names: &[String]) -> Result<Vec<SchemaChange>, StoreError> {
        self.migrate_naming(Migrate::ApplyWithLoss, Some(names)).await
    }

    async fn migrate_naming(
        &self,
        how: Migrate,
        names: Option<&[String]>,
    ) -> Result<Vec<SchemaChange>, StoreError> {
        let recorded = self.check_identity().await?;
        let planned = self.store.migrate(&self.schema, Migrate::Show).await?;
        let moves = Moves::pending(&self.resources, &planned)?;
        let mut shown = moves.shown(planned.clone());
        losses::check(&shown, names.unwrap_or_default())?;
        let constraints = ConstraintChanges::read(&*self.store, &self.resources, &planned).await?;
        constraints.check(&*self.store, &planned).await?;
        let fills: Vec<SchemaChange> =
            constraints.fills.changes().into_iter().chain(constraints.states.changes()).collect();
        if how == Migrate::Show {
            let place = shown.iter().position(SchemaChange::removes).unwrap_or(shown.len());
            shown.splice(place..place, fills);
            return Ok(shown);
        }
        let ending: Vec<SchemaChange> = shown.iter().chain(&fills).cloned().collect();
        self.check_processes(&ending, how, names).await?;
        let mut changes = self.claim(recorded).await?;
        if !constraints.fills.is_empty() {
            let runner = self.scan_runner()?;
            let tell = |progress: &RunProgress| self.progress.tell(progress);
            constraints.fills.carry_out(&runner, &*self.store, &self.ids, &tell).await?;
        }
        changes.extend(fills);
        for consuming in self.resources.iter().flat_map(|resource| &resource.consumers) {
            if let Consuming::Projection(projector) = consuming {
                projection::restart(&*self.store, &self.schema, &planned, &**projector).await?;
            }
        }
        let at_once = moves.is_empty() && names.is_none();
        let first = if at_once { how } else { Migrate::Apply };
        changes.extend(self.store.migrate(&self.schema, first).await?);
        if !constraints.fills.is_empty() {
            // Before the record: a run without one is begun anew.
            constraints.fills.forget(&self.scan_runner()?).await?;
        }
        if !constraints.states.is_empty() {
            constraints.states.carry_out(&*self.store, &self.ids).await?;
        }
        constraints.record(&*self.store, &self.ids).await?;
        self.begin_groups().await?;
        if at_once {
            return Ok(changes);
        }
        if !moves.is_empty() {
            moves.carry_out(&*self.store, &self.ids).await?;
            self.drop_emptied(&moves).await?;
            changes.extend(moves.changes());
        }
        if how == Migrate::ApplyWithLoss {
            let left = self.store.migrate(&self.schema, Migrate::Show).await?;
            let kept = names.map(|names| losses::kept(&self.schema, &left, names)).transpose()?;
            let schema = kept.as_ref().unwrap_or(&self.schema);
            changes.extend(self.store.migrate(schema, how).await?);
        }
        Ok(changes)
    }

    fn scan_runner(&self) -> Result<ScanRunner, StoreError> {
        ScanRunner::of(self.store.clone(), self.clock.clone(), self.ids.clone())
    }

    /// Has groups that are new, and that begin at the end of the log, begin there.
    async fn begin_groups(&self) -> Result<(), StoreError> {
        for consuming in self.resources.iter().flat_map(|resource| &resource.consumers) {
            if let Consuming::Group(handler) = consuming
                && handler.begins_at_end()
            {
                self.group(handler.group()).begin_at_end().await?;
            }
        }
        Ok(())
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

    /// Makes the store fit the blueprint as a server does when it starts: only by changes after which an older blueprint fits the
    /// store again. Any other is refused, with what to do: for instance values are not moved, because servers with an older
    /// blueprint may still write to the old place.
    pub async fn prepare(&self) -> Result<Vec<SchemaChange>, StoreError> {
        let planned = self.migrate(Migrate::Show).await?;
        if let Some(change) = planned.iter().find(|change| !change.removes() && !change.is_reversible()) {
            let why = format!(
                "a server does not {change}, because servers with the older blueprint could not go on; stop them, run \
                 `statehouse apply`, and start again"
            );
            return Err(StoreError::schema(format!("table {}", change.table), why));
        }
        self.migrate(Migrate::Apply).await
    }

    /// The tables of the store that the blueprint does not name, with their data.
    pub async fn orphaned_tables(&self) -> Result<Vec<String>, StoreError> {
        let planned = self.migrate(Migrate::Show).await?;
        let orphaned = planned.iter().filter(|change| change.difference == Difference::DropTable);
        Ok(orphaned.map(|change| change.table.name().to_owned()).collect())
    }

    /// Refuses a store that lacks something of the blueprint, and changes nothing. What the blueprint no longer names may be
    /// there.
    pub async fn check_fit(&self) -> Result<(), StoreError> {
        let planned = self.migrate(Migrate::Show).await?;
        let missing: Vec<&SchemaChange> = planned.iter().filter(|change| !change.removes()).collect();
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use statehouse_store::{Ids, ModelStore, Random, SystemClock};

    use super::*;
    use crate::blueprint::Blueprint;
    use crate::resource;

    /// Resources of two blueprints, as a program may put them together.
    fn clash(first: &str, second: &str) -> String {
        let mut resources = Vec::new();
        for text in [first, second] {
            let blueprint = Blueprint::read("statehouse.toml", text).unwrap();
            resources.extend(resource::declare(&blueprint).unwrap());
        }
        let clock = Arc::new(SystemClock);
        let ids = Ids::new(clock.clone(), Random::seeded(1));
        House::of("test", resources, None, Arc::new(ModelStore::new()), clock, ids).unwrap_err().to_string()
    }

    #[test]
    fn two_resources_with_one_table_are_refused_by_name() {
        let post = "[entity.post]\nkey = { id = \"int\" }\ntable = \"texts\"\n";
        let note = "[entity.note]\nkey = { id = \"text\" }\ntable = \"texts\"\n";
        let error = clash(post, note);
        assert_eq!(
            error,
            "table texts: `post` and `note` both declare it; give one of them another table: `table = \"…\"`"
        );
    }

    #[test]
    fn a_table_of_the_house_itself_is_refused() {
        let mut resources =
            resource::check("statehouse.toml", "[entity.post]\nkey = { id = \"int\" }\n").unwrap().1;
        resources[0].tables.push(system::keys().unwrap());
        let error = schema_of(&resources).unwrap_err().to_string();
        assert!(
            error.starts_with("table house_keys: `post` declares it, and it is a table of the house"),
            "{error}"
        );
    }
}
