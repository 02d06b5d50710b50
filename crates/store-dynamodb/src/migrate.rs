//! Making the live tables fit a schema.
//!
//! Each step can be done twice, and by two processes at once. A definition is changed only over the revision that was
//! read; whoever loses starts again from what the winner left. What a new definition asks of existing rows is written
//! down with it as work, and stays there until it is done: a migration that crashed is finished by the next one.
//!
//! Filling in rows goes item by item, on the condition that the item is as it was read and that the work is still to
//! be done. The second matters when two processes fill the same table: once one of them is finished, a column may have
//! been set to null on purpose, and the slower one must not put its default back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::{
    AttributeDefinition, AttributeValue, BillingMode, CreateGlobalSecondaryIndexAction,
    DeleteGlobalSecondaryIndexAction, GlobalSecondaryIndex, GlobalSecondaryIndexUpdate, IndexStatus,
    KeySchemaElement, KeyType, Projection, ProjectionType, ProvisionedThroughput, ScalarAttributeType,
    TableDescription, TableStatus, TimeToLiveSpecification,
};
use statehouse_store::migration::{Difference, differences, keep_surplus};
use statehouse_store::{Change, Index, Migrate, Schema, StoreError, Table, Value};

use crate::action::{Action, Clauses};
use crate::catalog::{Definition, Work};
use crate::expression::{Condition, Terms, present};
use crate::inner::Inner;
use crate::item::{self, EXPIRES, Item, Key, LIFE, PK, SK};
use crate::options::Billing;
use crate::wire::{Fault, Reply};

/// Indexes of one table that DynamoDB takes.
const INDEXES_MAX: usize = 20;
/// How often a migration starts again because another one was faster.
const TURNS_MAX: u32 = 20;
/// How long a change of a table may take on the server.
const TABLE_CHANGE_MAX: Duration = Duration::from_secs(30 * 60);

/// The key of a table or an index, as a request for its creation takes it.
struct Schematic {
    keys: Vec<KeySchemaElement>,
    attributes: Vec<AttributeDefinition>,
}

fn refused(error: &aws_sdk_dynamodb::error::BuildError) -> StoreError {
    StoreError::corrupt("a request for a table", error.to_string())
}

fn schematic(
    hash: (&str, ScalarAttributeType),
    range: Option<(&str, ScalarAttributeType)>,
) -> Result<Schematic, StoreError> {
    let mut schematic = Schematic { keys: Vec::new(), attributes: Vec::new() };
    for (part, key_type) in [(Some(hash), KeyType::Hash), (range, KeyType::Range)] {
        let Some((name, kind)) = part else { continue };
        let key = KeySchemaElement::builder().attribute_name(name).key_type(key_type).build();
        schematic.keys.push(key.map_err(|error| refused(&error))?);
        let attribute = AttributeDefinition::builder().attribute_name(name).attribute_type(kind).build();
        schematic.attributes.push(attribute.map_err(|error| refused(&error))?);
    }
    Ok(schematic)
}

impl Inner {
    pub(crate) async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<Change>, StoreError> {
        for table in schema.tables() {
            if table.indexes().len() > INDEXES_MAX {
                let why = format!("it has {} indexes; DynamoDB takes {INDEXES_MAX}", table.indexes().len());
                return Err(StoreError::schema(format!("table {table}"), why));
            }
        }
        let mut made = Vec::new();
        for turn in 0..TURNS_MAX {
            let mut definitions = self.catalog.definitions(&self.wire).await?;
            if how != Migrate::Show && definitions.iter().any(|definition| !definition.work.is_done()) {
                for definition in definitions.iter().filter(|definition| !definition.work.is_done()) {
                    self.finish(definition).await?;
                }
                definitions = self.catalog.definitions(&self.wire).await?;
            }
            definitions.retain(|definition| !definition.work.drop_table);
            let live = Schema::new(definitions.iter().map(|definition| definition.table.clone()));
            let live = live.map_err(|error| StoreError::schema(error.table, error.why))?;
            let mut changes: Vec<Change> = differences(&live, schema)?
                .into_iter()
                .map(|(table, difference)| self.change(table, difference))
                .collect();
            if how == Migrate::Show {
                return Ok(changes);
            }
            if how == Migrate::Apply {
                changes.retain(|change| !change.removes());
                for before in &definitions {
                    if let Some(wanted) = schema.table(before.table.name()) {
                        keep_surplus(&before.table, wanted)?;
                    }
                }
            }
            if self.carry_out(schema, how, &definitions, changes, &mut made).await? {
                self.catalog.refresh(&self.wire).await?;
                return Ok(made);
            }
            self.wire.pause(turn).await;
        }
        Err(StoreError::unavailable("other processes change the tables all the time"))
    }

    /// Makes the changes, table by table, and notes those that were this call's. Says whether all were.
    async fn carry_out(
        &self,
        schema: &Schema,
        how: Migrate,
        definitions: &[Definition],
        changes: Vec<Change>,
        made: &mut Vec<Change>,
    ) -> Result<bool, StoreError> {
        let mut by_table: Vec<(String, Vec<Change>)> = Vec::new();
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
                    Definition { table: wanted.clone(), revision: 0, work: Work::default() }
                }
                (Some(before), Some(wanted)) => {
                    let table = match how {
                        Migrate::ApplyWithLoss => wanted.clone(),
                        _ => keep_surplus(&before.table, wanted)?,
                    };
                    Definition { table, revision: before.revision, work: work(&changes) }
                }
                (Some(before), None) => {
                    Definition { work: Work { drop_table: true, ..Work::default() }, ..before.clone() }
                }
                (None, None) => continue,
            };
            if !self.catalog.publish(&self.wire, &next.table, next.revision, &next.work).await? {
                alone = false;
                continue;
            }
            made.extend(changes);
            let published = Definition { revision: next.revision + 1, ..next };
            if !published.work.is_done() {
                self.finish(&published).await?;
            }
        }
        Ok(alone)
    }

    /// Does what a definition asks of the server and of existing rows.
    async fn finish(&self, definition: &Definition) -> Result<(), StoreError> {
        let Definition { table, revision, work } = definition;
        let physical = self.catalog.physical(table.name());
        // Until then some process may write rows as the former definition had them.
        self.wire.pauses.sleep(self.catalog.lease() * 2).await;
        if work.drop_table {
            self.drop_table(&physical).await?;
            self.catalog.forget(&self.wire, table.name(), *revision).await?;
            return Ok(());
        }
        for index in &work.drop_index {
            self.drop_index(&physical, index).await?;
        }
        for index in work.index.iter().filter_map(|name| table.index(name)) {
            self.add_index(&physical, index).await?;
        }
        if !(work.fill.is_empty() && work.index.is_empty() && work.strip.is_empty()) {
            self.fill_in(definition, &physical).await?;
        }
        // If another process was faster, it has published the same.
        self.catalog.publish(&self.wire, table, *revision, &Work::default()).await?;
        Ok(())
    }

    /// Creates the table of a logical one, or finds it created.
    async fn create_table(&self, table: &Table) -> Result<(), StoreError> {
        let physical = self.catalog.physical(table.name());
        let sort = (!table.sort_columns().is_empty()).then_some((SK, ScalarAttributeType::S));
        let key = schematic((PK, ScalarAttributeType::S), sort)?;
        let is_new = self.create(&physical, key, table.indexes()).await?;
        // A table that was there already, from a migration that did not finish, may lack indexes.
        for index in table.indexes().iter().filter(|_| !is_new) {
            self.add_index(&physical, index).await?;
        }
        let expiry = TimeToLiveSpecification::builder().attribute_name(EXPIRES).enabled(true).build();
        let expiry = expiry.map_err(|error| refused(&error))?;
        let request = || {
            let request = self.wire.client.update_time_to_live().table_name(&physical);
            request.time_to_live_specification(expiry.clone()).send()
        };
        match self.wire.repeat(request).await {
            // The server refuses to switch on what is on.
            Ok(_) | Err(Fault::Invalid(_) | Fault::Busy(_)) => Ok(()),
            Err(fault) => Err(fault.into_error(&physical)),
        }
    }

    /// Creates one of the log's tables, or finds it created.
    pub(crate) async fn create_own(
        &self,
        physical: &str,
        hash: (&str, ScalarAttributeType),
        range: Option<(&str, ScalarAttributeType)>,
    ) -> Result<(), StoreError> {
        self.create(physical, schematic(hash, range)?, &[]).await.map(drop)
    }

    fn throughput(&self) -> Result<Option<ProvisionedThroughput>, StoreError> {
        let Billing::Provisioned { read_units, write_units } = self.billing else { return Ok(None) };
        let units = ProvisionedThroughput::builder().read_capacity_units(read_units);
        units.write_capacity_units(write_units).build().map(Some).map_err(|error| refused(&error))
    }

    /// Creates a table with its indexes, or finds it created. Says whether it was not there before.
    async fn create(&self, physical: &str, key: Schematic, indexes: &[Index]) -> Result<bool, StoreError> {
        let throughput = self.throughput()?;
        let mut attributes = key.attributes;
        let mut secondary = Vec::new();
        for index in indexes {
            let (pk, sk) = item::index_names(&index.name);
            let own = schematic((&pk, ScalarAttributeType::S), Some((&sk, ScalarAttributeType::S)))?;
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
            self.wire
                .client
                .create_table()
                .table_name(physical)
                .set_key_schema(Some(key.keys.clone()))
                .set_attribute_definitions(Some(attributes.clone()))
                .set_global_secondary_indexes((!secondary.is_empty()).then(|| secondary.clone()))
                .billing_mode(billing.clone())
                .set_provisioned_throughput(throughput.clone())
                .send()
        };
        let is_new = match self.wire.repeat(request).await {
            // Emulators are done at once.
            Ok(answer) if answer.table_description.as_ref().is_some_and(is_settled) => return Ok(true),
            Ok(_) => true,
            Err(Fault::Busy(_)) => false,
            Err(fault) => return Err(fault.into_error(physical)),
        };
        self.settled(physical).await?.map(|_| is_new).ok_or_else(|| StoreError::no_table(physical))
    }

    async fn describe(&self, physical: &str) -> Result<Option<TableDescription>, StoreError> {
        match self.wire.repeat(|| self.wire.client.describe_table().table_name(physical).send()).await {
            Ok(answer) => Ok(answer.table),
            Err(Fault::NoTable(_)) => Ok(None),
            Err(fault) => Err(fault.into_error(physical)),
        }
    }

    /// Waits until the server is done with a table; `None` when there is none.
    async fn settled(&self, physical: &str) -> Result<Option<TableDescription>, StoreError> {
        let (mut waited, mut pause) = (Duration::ZERO, Duration::from_millis(20));
        while waited < TABLE_CHANGE_MAX {
            let Some(table) = self.describe(physical).await? else { return Ok(None) };
            if is_settled(&table) {
                return Ok(Some(table));
            }
            self.wire.pauses.sleep(pause).await;
            waited += pause;
            pause = (pause * 2).min(Duration::from_secs(5));
        }
        Err(StoreError::unavailable(format!(
            "{physical} is being changed for longer than {TABLE_CHANGE_MAX:?}"
        )))
    }

    async fn drop_table(&self, physical: &str) -> Result<(), StoreError> {
        self.settled(physical).await?;
        match self.wire.repeat(|| self.wire.client.delete_table().table_name(physical).send()).await {
            Ok(_) | Err(Fault::NoTable(_) | Fault::Busy(_)) => {}
            Err(fault) => return Err(fault.into_error(physical)),
        }
        // While a table is being deleted it is there and not active; then it is gone.
        for turn in 0..TURNS_MAX {
            if self.settled(physical).await?.is_none() {
                return Ok(());
            }
            self.wire.pause(turn).await;
        }
        Err(StoreError::unavailable(format!("{physical} could not be deleted")))
    }

    async fn add_index(&self, physical: &str, index: &Index) -> Result<(), StoreError> {
        let (pk, sk) = item::index_names(&index.name);
        let name = item::index_physical(&index.name);
        for turn in 0..TURNS_MAX {
            let table = self.settled(physical).await?.ok_or_else(|| StoreError::no_table(physical))?;
            if table.global_secondary_indexes().iter().any(|live| live.index_name() == Some(&name)) {
                return Ok(());
            }
            let own = schematic((&pk, ScalarAttributeType::S), Some((&sk, ScalarAttributeType::S)))?;
            let create = CreateGlobalSecondaryIndexAction::builder()
                .index_name(item::index_physical(&index.name))
                .set_key_schema(Some(own.keys))
                .projection(Projection::builder().projection_type(ProjectionType::All).build())
                .set_provisioned_throughput(self.throughput()?)
                .build()
                .map_err(|error| refused(&error))?;
            let update = GlobalSecondaryIndexUpdate::builder().create(create).build();
            self.update_table(physical, Some(own.attributes), update).await?;
            self.wire.pause(turn).await;
        }
        Err(StoreError::unavailable(format!("index {} of {physical} could not be created", index.name)))
    }

    async fn drop_index(&self, physical: &str, index: &str) -> Result<(), StoreError> {
        let name = item::index_physical(index);
        for turn in 0..TURNS_MAX {
            let Some(table) = self.settled(physical).await? else { return Ok(()) };
            if !table.global_secondary_indexes().iter().any(|live| live.index_name() == Some(&name)) {
                return Ok(());
            }
            let delete = DeleteGlobalSecondaryIndexAction::builder().index_name(&name).build();
            let delete = delete.map_err(|error| refused(&error))?;
            let update = GlobalSecondaryIndexUpdate::builder().delete(delete).build();
            self.update_table(physical, None, update).await?;
            self.wire.pause(turn).await;
        }
        Err(StoreError::unavailable(format!("index {index} of {physical} could not be deleted")))
    }

    /// Sends a change of a table. One that another process has made is found made afterwards.
    async fn update_table(
        &self,
        physical: &str,
        attributes: Option<Vec<AttributeDefinition>>,
        update: GlobalSecondaryIndexUpdate,
    ) -> Result<(), StoreError> {
        let request = || {
            self.wire
                .client
                .update_table()
                .table_name(physical)
                .set_attribute_definitions(attributes.clone())
                .global_secondary_index_updates(update.clone())
                .send()
        };
        match self.wire.repeat(request).await {
            Ok(_) | Err(Fault::Busy(_) | Fault::Invalid(_) | Fault::NoTable(_)) => Ok(()),
            Err(fault) => Err(fault.into_error(physical)),
        }
    }

    /// Goes over all rows and gives them what the definition asks for.
    async fn fill_in(&self, definition: &Definition, physical: &str) -> Result<(), StoreError> {
        let mut start: Option<Item> = None;
        loop {
            let request = || {
                let scan = self.wire.client.scan().table_name(physical).consistent_read(true);
                scan.set_exclusive_start_key(start.clone()).send()
            };
            let page = self.wire.repeat(request).await.map_err(|fault| fault.into_error(physical))?;
            for item in page.items.unwrap_or_default() {
                if !self.fill_in_one(definition, physical, item).await? {
                    return Ok(());
                }
            }
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() {
                return Ok(());
            }
        }
    }

    /// Says whether the work is still to be done.
    async fn fill_in_one(
        &self,
        definition: &Definition,
        physical: &str,
        item: Item,
    ) -> Result<bool, StoreError> {
        let mut item = item;
        for turn in 0..TURNS_MAX {
            let Some(action) = patch(definition, physical, &item, self.draw_life())? else { return Ok(true) };
            let key = action.key.clone();
            let still = self.catalog.still(definition.table.name(), definition.revision);
            match self.wire.write_all(&[action, still]).await {
                Ok(Reply::Done(_)) => return Ok(true),
                Ok(Reply::Not(verdicts)) => {
                    if matches!(verdicts.get(1), Some(crate::wire::Verdict::Failed(_))) {
                        return Ok(false);
                    }
                }
                Err(Fault::Open(_)) => {}
                Err(fault) => return Err(fault.into_error(physical)),
            }
            self.wire.pause(turn).await;
            match self.wire.get(physical, key, true).await.map_err(|fault| fault.into_error(physical))? {
                Some(now) => item = now,
                None => return Ok(true),
            }
        }
        Err(StoreError::unavailable(format!("a row of {physical} is written by others all the time")))
    }

    /// A difference, and what is done about it in words and requests.
    fn change(&self, table: Arc<Table>, difference: Difference) -> Change {
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
            Difference::AddColumn(column) if column.default.is_some() => {
                vec![filled(&format!("{} is missing", column.name))]
            }
            Difference::AddColumn(_)
            | Difference::RelaxColumn(_)
            | Difference::ChangeDefault(_)
            | Difference::SetLayout(_) => {
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
            // No engine finds such a difference.
            Difference::MoveColumn { .. } => Vec::new(),
        };
        Change { table, difference, statements }
    }
}

/// Whether the server is done with a table.
fn is_settled(table: &TableDescription) -> bool {
    let active = |status: Option<&IndexStatus>| status.is_none_or(|status| *status == IndexStatus::Active);
    table.table_status() == Some(&TableStatus::Active)
        && table.global_secondary_indexes().iter().all(|index| active(index.index_status()))
}

/// What differences ask of existing rows.
fn work(changes: &[Change]) -> Work {
    let mut work = Work::default();
    for change in changes {
        match &change.difference {
            Difference::AddColumn(column) if column.default.is_some() => work.fill.push(column.name.clone()),
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

/// What has to change in an item, on the condition that it is as it was read; `None` for nothing.
///
/// The number of the row's life changes with it. Its version does not, since nothing that a plan knows of is written;
/// but whoever has read the row before must not write an index key that was computed without what is filled in.
fn patch(
    definition: &Definition,
    physical: &str,
    item: &Item,
    life: i64,
) -> Result<Option<Action>, StoreError> {
    let Definition { table, work, .. } = definition;
    let Some(row) = item::row(item, table)? else { return Ok(None) };
    let (mut terms, mut clauses) = (Terms::default(), Clauses::default());
    let mut condition = present(&mut terms);
    let mut values: BTreeMap<&str, Value> = table
        .columns()
        .iter()
        .map(|column| (column.name.as_str(), row.get(&column.name).cloned().unwrap_or(Value::Null)))
        .collect();
    for column in work.fill.iter().filter_map(|name| table.column(name)) {
        if let (None, Some(default)) = (item.get(&column.name), &column.default) {
            values.insert(&column.name, default.clone());
            if let Some(attribute) = item::attribute(default) {
                clauses.set(&mut terms, &column.name, attribute);
                condition = condition.and(Condition::missing(&mut terms, &column.name));
            }
        }
    }
    for index in work.index.iter().filter_map(|name| table.index(name)) {
        let key = item::index_key(table, index, row.tenant(), |name| values.get(name));
        let (pk, sk) = item::index_names(&index.name);
        let (pk_text, sk_text) = key.unzip();
        let mut changes = false;
        for (name, text) in [(pk, pk_text), (sk, sk_text)] {
            match text.map(AttributeValue::S) {
                Some(text) if item.get(&name) != Some(&text) => clauses.set(&mut terms, &name, text),
                None if item.contains_key(&name) => clauses.remove(&mut terms, &name),
                _ => continue,
            }
            changes = true;
        }
        for column in index.columns().filter(|_| changes) {
            condition = condition.and(match item.get(column) {
                Some(value) => Condition::compare(&mut terms, column, "=", value.clone()),
                None => Condition::missing(&mut terms, column),
            });
        }
    }
    for name in work.strip.iter().filter(|name| item.contains_key(*name)) {
        clauses.remove(&mut terms, name);
    }
    if clauses.set.is_empty() && clauses.remove.is_empty() {
        return Ok(None);
    }
    clauses.set(&mut terms, LIFE, item::number(life));
    let Some(key) = Key::in_item(physical, item) else { return Ok(None) };
    Ok(Some(Action::update(physical, key.attributes(), &clauses, condition, terms)))
}
