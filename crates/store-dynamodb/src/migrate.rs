//! Changes the live tables to those of a schema.
//!
//! Each step is idempotent, and two processes may run it concurrently. A definition is changed only if it has the revision
//! that was read; the process that loses starts again from the winner's definition. The work that a new definition causes
//! for existing rows is stored with it until it is done. If a migration crashes, the next one finishes its work
//! ([`crate::backfill`]).

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, CreateGlobalSecondaryIndexAction, DeleteGlobalSecondaryIndexAction,
    GlobalSecondaryIndex, GlobalSecondaryIndexUpdate, IndexStatus, KeySchemaElement, KeyType, Projection,
    ProjectionType, ProvisionedThroughput, ScalarAttributeType, TableDescription, TableStatus,
    TimeToLiveSpecification,
};
use statehouse_store::migration::{Difference, keep_surplus, planned};
use statehouse_store::{Index, Migrate, Schema, SchemaChange, StoreError, Table};

use crate::catalog::{BackfillWork, TableDefinition};
use crate::inner::DynamoInner;
use crate::item::{self, EXPIRES, PK, SK};
use crate::options::Billing;
use crate::request_error::RequestError;

/// DynamoDB's limit for the indexes of a table.
const INDEXES_MAX: usize = 20;
/// Attempts of a migration that loses races against others.
const ATTEMPTS_MAX: u32 = 20;
/// The time limit for a change of a table on the server.
const TABLE_CHANGE_MAX: Duration = Duration::from_secs(30 * 60);

/// The key of a table or an index in a request.
struct KeySchema {
    keys: Vec<KeySchemaElement>,
    attributes: Vec<AttributeDefinition>,
}

fn refused(error: &aws_sdk_dynamodb::error::BuildError) -> StoreError {
    StoreError::corrupt("a request for a table", error.to_string())
}

fn key_schema(
    hash: (&str, ScalarAttributeType),
    range: Option<(&str, ScalarAttributeType)>,
) -> Result<KeySchema, StoreError> {
    let mut key_schema = KeySchema { keys: Vec::new(), attributes: Vec::new() };
    for (part, key_type) in [(Some(hash), KeyType::Hash), (range, KeyType::Range)] {
        let Some((name, kind)) = part else { continue };
        let key = KeySchemaElement::builder().attribute_name(name).key_type(key_type).build();
        key_schema.keys.push(key.map_err(|error| refused(&error))?);
        let attribute = AttributeDefinition::builder().attribute_name(name).attribute_type(kind).build();
        key_schema.attributes.push(attribute.map_err(|error| refused(&error))?);
    }
    Ok(key_schema)
}

impl DynamoInner {
    pub(crate) async fn migrate(
        &self,
        schema: &Schema,
        how: Migrate,
    ) -> Result<Vec<SchemaChange>, StoreError> {
        for table in schema.tables() {
            if table.indexes().len() > INDEXES_MAX {
                let why = format!("it has {} indexes; DynamoDB allows {INDEXES_MAX}", table.indexes().len());
                return Err(StoreError::schema(format!("table {table}"), why));
            }
        }
        let mut made = Vec::new();
        for attempt_number in 0..ATTEMPTS_MAX {
            let mut definitions = self.catalog.definitions(&self.client).await?;
            if how != Migrate::Show && definitions.iter().any(|definition| !definition.work.is_done()) {
                for definition in definitions.iter().filter(|definition| !definition.work.is_done()) {
                    self.finish_work(definition).await?;
                }
                definitions = self.catalog.definitions(&self.client).await?;
            }
            definitions.retain(|definition| !definition.work.drop_table);
            let live = Schema::new(definitions.iter().map(|definition| definition.table.clone()));
            let live = live.map_err(|error| StoreError::schema(error.table, error.why))?;
            let changes: Vec<SchemaChange> = planned(&live, schema, how)?
                .into_iter()
                .map(|(table, difference)| self.change(table, difference))
                .collect();
            for change in &changes {
                refuse_rename(change)?;
                self.check_nulls(change).await?;
            }
            if how == Migrate::Show {
                return Ok(changes);
            }
            if self.apply_changes(schema, how, &definitions, changes, &mut made).await? {
                self.catalog.refresh(&self.client).await?;
                return Ok(made);
            }
            self.client.back_off(attempt_number).await;
        }
        Err(StoreError::unavailable("other processes changed the tables during each attempt"))
    }

    /// Makes the changes, table by table, and adds those of this call to `made`. Returns whether these are all.
    async fn apply_changes(
        &self,
        schema: &Schema,
        how: Migrate,
        definitions: &[TableDefinition],
        changes: Vec<SchemaChange>,
        made: &mut Vec<SchemaChange>,
    ) -> Result<bool, StoreError> {
        let mut by_table: Vec<(String, Vec<SchemaChange>)> = Vec::new();
        for change in changes {
            let name = change.table.name();
            match by_table.iter_mut().find(|(table, _)| table == name) {
                Some((_, list)) => list.push(change),
                None => by_table.push((name.to_owned(), vec![change])),
            }
        }
        let mut alone = true;
        for (name, changes) in by_table {
            let before = definitions.iter().find(|definition| definition.table.name() == name);
            let wanted = schema.table(&name);
            let next = match (before, wanted) {
                (None, Some(wanted)) => {
                    self.create_table(wanted).await?;
                    TableDefinition { table: wanted.clone(), revision: 0, work: BackfillWork::default() }
                }
                (Some(before), Some(wanted)) => {
                    let table = match how {
                        Migrate::ApplyWithLoss => wanted.clone(),
                        _ => keep_surplus(&before.table, wanted)?,
                    };
                    TableDefinition { table, revision: before.revision, work: work(&changes) }
                }
                (Some(before), None) => TableDefinition {
                    work: BackfillWork { drop_table: true, ..BackfillWork::default() },
                    ..before.clone()
                },
                (None, None) => continue,
            };
            if !self.catalog.publish(&self.client, &next.table, next.revision, &next.work).await? {
                alone = false;
                continue;
            }
            made.extend(changes);
            let published = TableDefinition { revision: next.revision + 1, ..next };
            if !published.work.is_done() {
                self.finish_work(&published).await?;
            }
        }
        Ok(alone)
    }

    /// Does the work of a definition, on the server and on existing rows.
    async fn finish_work(&self, definition: &TableDefinition) -> Result<(), StoreError> {
        let TableDefinition { table, revision, work } = definition;
        let physical = self.catalog.physical(table.name());
        // Until then other processes may write rows of the former definition.
        self.client.retry_clock.sleep(self.catalog.lease() * 2).await;
        if work.drop_table {
            self.drop_table(&physical).await?;
            self.catalog.delete_definition(&self.client, table.name(), *revision).await?;
            return Ok(());
        }
        for index in &work.drop_index {
            self.drop_index(&physical, index).await?;
        }
        for index in work.index.iter().filter_map(|name| table.index(name)) {
            self.add_index(&physical, index).await?;
        }
        if !(work.fill.is_empty() && work.index.is_empty() && work.strip.is_empty()) {
            self.backfill(definition, &physical).await?;
        }
        // If another process was faster, it has published the same definition.
        self.catalog.publish(&self.client, table, *revision, &BackfillWork::default()).await?;
        Ok(())
    }

    /// Creates a table, if it does not exist.
    async fn create_table(&self, table: &Table) -> Result<(), StoreError> {
        let physical = self.catalog.physical(table.name());
        let sort = (!table.sort_columns().is_empty()).then_some((SK, ScalarAttributeType::S));
        let key = key_schema((PK, ScalarAttributeType::S), sort)?;
        let is_new = self.create(&physical, key, table.indexes()).await?;
        // A table that exists already is from an interrupted migration and may lack indexes.
        for index in table.indexes().iter().filter(|_| !is_new) {
            self.add_index(&physical, index).await?;
        }
        let expiry = TimeToLiveSpecification::builder().attribute_name(EXPIRES).enabled(true).build();
        let expiry = expiry.map_err(|error| refused(&error))?;
        let request = || {
            let request = self.client.sdk.update_time_to_live().table_name(&physical);
            request.time_to_live_specification(expiry.clone()).send()
        };
        match self.client.send_with_retries(request).await {
            // The server rejects the request if the expiry is switched on already.
            Ok(_) | Err(RequestError::Invalid(_) | RequestError::TableInUse(_)) => Ok(()),
            Err(error) => Err(error.into_error(&physical)),
        }
    }

    /// Creates a system table, if it does not exist.
    pub(crate) async fn create_system_table(
        &self,
        physical: &str,
        hash: (&str, ScalarAttributeType),
        range: Option<(&str, ScalarAttributeType)>,
    ) -> Result<(), StoreError> {
        self.create(physical, key_schema(hash, range)?, &[]).await.map(drop)
    }

    fn throughput(&self) -> Result<Option<ProvisionedThroughput>, StoreError> {
        let Billing::Provisioned { read_units, write_units } = self.billing else { return Ok(None) };
        let units = ProvisionedThroughput::builder().read_capacity_units(read_units);
        units.write_capacity_units(write_units).build().map(Some).map_err(|error| refused(&error))
    }

    /// Creates a table with its indexes, if it does not exist. Returns whether it is new.
    async fn create(&self, physical: &str, key: KeySchema, indexes: &[Index]) -> Result<bool, StoreError> {
        let throughput = self.throughput()?;
        let mut attributes = key.attributes;
        let mut secondary = Vec::new();
        for index in indexes {
            let (pk, sk) = item::index_names(&index.name);
            let own = key_schema((&pk, ScalarAttributeType::S), Some((&sk, ScalarAttributeType::S)))?;
            attributes.extend(own.attributes);
            let index = GlobalSecondaryIndex::builder()
                .index_name(item::index_physical(&index.name))
                .set_key_schema(Some(own.keys))
                .projection(Projection::builder().projection_type(ProjectionType::All).build())
                .set_provisioned_throughput(throughput.clone())
                .build();
            secondary.push(index.map_err(|error| refused(&error))?);
        }
        let billing =
            if throughput.is_some() { BillingMode::Provisioned } else { BillingMode::PayPerRequest };
        let request = || {
            self.client
                .sdk
                .create_table()
                .table_name(physical)
                .set_key_schema(Some(key.keys.clone()))
                .set_attribute_definitions(Some(attributes.clone()))
                .set_global_secondary_indexes((!secondary.is_empty()).then(|| secondary.clone()))
                .billing_mode(billing.clone())
                .set_provisioned_throughput(throughput.clone())
                .send()
        };
        let is_new = match self.client.send_with_retries(request).await {
            // Emulators create a table synchronously.
            Ok(answer) if answer.table_description.as_ref().is_some_and(is_active) => return Ok(true),
            Ok(_) => true,
            Err(RequestError::TableInUse(_)) => false,
            Err(error) => return Err(error.into_error(physical)),
        };
        self.wait_until_active(physical).await?.map(|_| is_new).ok_or_else(|| StoreError::no_table(physical))
    }

    async fn describe(&self, physical: &str) -> Result<Option<TableDescription>, StoreError> {
        match self
            .client
            .send_with_retries(|| self.client.sdk.describe_table().table_name(physical).send())
            .await
        {
            Ok(answer) => Ok(answer.table),
            Err(RequestError::TableNotFound(_)) => Ok(None),
            Err(error) => Err(error.into_error(physical)),
        }
    }

    /// Waits until a table is active; `None` if it does not exist.
    async fn wait_until_active(&self, physical: &str) -> Result<Option<TableDescription>, StoreError> {
        let (mut waited, mut pause) = (Duration::ZERO, Duration::from_millis(20));
        while waited < TABLE_CHANGE_MAX {
            let Some(table) = self.describe(physical).await? else { return Ok(None) };
            if is_active(&table) {
                return Ok(Some(table));
            }
            self.client.retry_clock.sleep(pause).await;
            waited += pause;
            pause = (pause * 2).min(Duration::from_secs(5));
        }
        Err(StoreError::unavailable(format!(
            "{physical} is being changed for longer than {TABLE_CHANGE_MAX:?}"
        )))
    }

    async fn drop_table(&self, physical: &str) -> Result<(), StoreError> {
        self.wait_until_active(physical).await?;
        match self
            .client
            .send_with_retries(|| self.client.sdk.delete_table().table_name(physical).send())
            .await
        {
            Ok(_) | Err(RequestError::TableNotFound(_) | RequestError::TableInUse(_)) => {}
            Err(error) => return Err(error.into_error(physical)),
        }
        // A table that is being deleted exists and is not active.
        for attempt_number in 0..ATTEMPTS_MAX {
            if self.wait_until_active(physical).await?.is_none() {
                return Ok(());
            }
            self.client.back_off(attempt_number).await;
        }
        Err(StoreError::unavailable(format!("{physical} could not be deleted")))
    }

    async fn add_index(&self, physical: &str, index: &Index) -> Result<(), StoreError> {
        let (pk, sk) = item::index_names(&index.name);
        let name = item::index_physical(&index.name);
        for attempt_number in 0..ATTEMPTS_MAX {
            let table =
                self.wait_until_active(physical).await?.ok_or_else(|| StoreError::no_table(physical))?;
            if table.global_secondary_indexes().iter().any(|live| live.index_name() == Some(&name)) {
                return Ok(());
            }
            let own = key_schema((&pk, ScalarAttributeType::S), Some((&sk, ScalarAttributeType::S)))?;
            let create = CreateGlobalSecondaryIndexAction::builder()
                .index_name(item::index_physical(&index.name))
                .set_key_schema(Some(own.keys))
                .projection(Projection::builder().projection_type(ProjectionType::All).build())
                .set_provisioned_throughput(self.throughput()?)
                .build()
                .map_err(|error| refused(&error))?;
            let update = GlobalSecondaryIndexUpdate::builder().create(create).build();
            self.update_table(physical, Some(own.attributes), update).await?;
            self.client.back_off(attempt_number).await;
        }
        Err(StoreError::unavailable(format!("index {} of {physical} could not be created", index.name)))
    }

    async fn drop_index(&self, physical: &str, index: &str) -> Result<(), StoreError> {
        let name = item::index_physical(index);
        for attempt_number in 0..ATTEMPTS_MAX {
            let Some(table) = self.wait_until_active(physical).await? else { return Ok(()) };
            if !table.global_secondary_indexes().iter().any(|live| live.index_name() == Some(&name)) {
                return Ok(());
            }
            let delete = DeleteGlobalSecondaryIndexAction::builder().index_name(&name).build();
            let delete = delete.map_err(|error| refused(&error))?;
            let update = GlobalSecondaryIndexUpdate::builder().delete(delete).build();
            self.update_table(physical, None, update).await?;
            self.client.back_off(attempt_number).await;
        }
        Err(StoreError::unavailable(format!("index {index} of {physical} could not be deleted")))
    }

    /// Sends a change of a table. The caller checks whether the change was made, by this process or another.
    async fn update_table(
        &self,
        physical: &str,
        attributes: Option<Vec<AttributeDefinition>>,
        update: GlobalSecondaryIndexUpdate,
    ) -> Result<(), StoreError> {
        let request = || {
            self.client
                .sdk
                .update_table()
                .table_name(physical)
                .set_attribute_definitions(attributes.clone())
                .global_secondary_index_updates(update.clone())
                .send()
        };
        match self.client.send_with_retries(request).await {
            Ok(_)
            | Err(RequestError::TableInUse(_) | RequestError::Invalid(_) | RequestError::TableNotFound(_)) => {
                Ok(())
            }
            Err(error) => Err(error.into_error(physical)),
        }
    }

    /// A difference with the requests that resolve it, for display.
    fn change(&self, table: Arc<Table>, difference: Difference) -> SchemaChange {
        let physical = self.catalog.physical(table.name());
        let filled = |what: &str| format!("Scan {physical}, UpdateItem where {what}");
        let statements = match &difference {
            Difference::CreateTable => {
                let indexes: Vec<&str> = table.indexes().iter().map(|index| index.name.as_str()).collect();
                let key = if table.sort_columns().is_empty() { "PK" } else { "PK, SK" };
                let mut statement = format!("CreateTable {physical} ({key})");
                if !indexes.is_empty() {
                    statement.push_str(&format!(" with GSI {}", indexes.join(", ")));
                }
                vec![statement, format!("UpdateTimeToLive {physical} ({EXPIRES})")]
            }
            Difference::AddColumn(column) | Difference::RequireColumn(column) if column.default.is_some() => {
                vec![filled(&format!("{} is missing", column.name))]
            }
            Difference::RequireColumn(column) => {
                let check = format!("Scan {physical}, refuse if {} is missing", column.name);
                vec![check, format!("UpdateItem {} table/{table}", self.catalog.meta())]
            }
            Difference::AddColumn(_)
            | Difference::RelaxColumn(_)
            | Difference::ChangeDefault(_)
            | Difference::SetLayout { .. } => {
                vec![format!("UpdateItem {} table/{table}", self.catalog.meta())]
            }
            Difference::AddIndex(index) => vec![
                format!("UpdateTable {physical} create GSI {}", index.name),
                filled(&format!("the keys of {} are missing", index.name)),
            ],
            Difference::DropIndex(index) => vec![
                format!("UpdateTable {physical} delete GSI {}", index.name),
                filled(&format!("the keys of {} are left", index.name)),
            ],
            Difference::DropColumn(column) => vec![filled(&format!("{} is left", column.name))],
            Difference::DropTable => vec![format!("DeleteTable {physical}")],
            // The one is refused, and `planned` never returns the other.
            Difference::RenameColumn { .. }
            | Difference::MoveColumn { .. }
            | Difference::FillTable { .. }
            | Difference::MoveRows { .. } => Vec::new(),
        };
        SchemaChange { table, difference, statements }
    }
}

/// Refuses another name of a column: items have their own names of attributes.
fn refuse_rename(change: &SchemaChange) -> Result<(), StoreError> {
    let Difference::RenameColumn { column, to } = &change.difference else { return Ok(()) };
    let (table, name) = (&change.table, &column.name);
    let why = format!(
        "DynamoDB cannot rename it to {to}, because each item has the name; nothing was changed. Declare both fields, copy the \
         values from {name} to {to} by calls, then remove {name} from the blueprint"
    );
    Err(StoreError::schema(format!("column {table}.{name}"), why))
}

/// Whether a table and its indexes are active.
fn is_active(table: &TableDescription) -> bool {
    let active = |status: Option<&IndexStatus>| status.is_none_or(|status| *status == IndexStatus::Active);
    table.table_status() == Some(&TableStatus::Active)
        && table.global_secondary_indexes().iter().all(|index| active(index.index_status()))
}

/// The work that changes cause for existing rows.
fn work(changes: &[SchemaChange]) -> BackfillWork {
    let mut work = BackfillWork::default();
    for change in changes {
        match &change.difference {
            Difference::AddColumn(column) if column.default.is_some() => work.fill.push(column.name.clone()),
            Difference::RequireColumn(column) if column.default.is_some() => {
                work.fill.push(column.name.clone());
                // Rows that get a value come into the indexes over it.
                let over = change.table.indexes().iter();
                let over = over.filter(|index| index.columns().any(|listed| *listed == column.name));
                for index in over {
                    if !work.index.contains(&index.name) {
                        work.index.push(index.name.clone());
                    }
                }
            }
            Difference::AddIndex(index) if work.index.contains(&index.name) => {}
            Difference::AddIndex(index) => work.index.push(index.name.clone()),
            Difference::DropIndex(index) => {
                work.drop_index.push(index.name.clone());
                let (pk, sk) = item::index_names(&index.name);
                work.strip.extend([pk, sk]);
            }
            Difference::DropColumn(column) => work.strip.push(column.name.clone()),
            _ => {}
        }
    }
    work
}
