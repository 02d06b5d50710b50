//! The handler of a reaction: from a record to the plan of an action.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::blank::is_blank;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Event, OperationStatus, Record, Row, Store, StoreError, SystemClock, Tenant, Value,
};

use super::DEPTH_MAX;
use super::declare::table_of;
use crate::action::{ActionContext, Code, Refusal};
use crate::cache::Cache;
use crate::declare::action_call::DeclaredCall;
use crate::declare::rule::{CheckedRule, RuleValues};
use crate::declare::template::{TemplateValues, find};
use crate::house::{self, REACTION, Reacted, ReactionCall, digest};
use crate::infra::log::{CallSupport, HandlerContext, HandlerError, HandlerWrite, RecordHandler};
use crate::resource::Resource;

/// Where [`REACTION`] says how many reactions led to an event.
const DEPTH: &str = "depth";
/// The longest operation id that is shown as it is.
const OPERATION_BYTES_MAX: usize = 160;

/// A declared reaction.
#[derive(Debug)]
pub(super) struct Reaction {
    name: String,
    source: Resource,
    /// The full name of the event.
    event: String,
    call: DeclaredCall,
    when: Option<CheckedRule>,
    /// The columns that the templates and the condition name.
    columns: Vec<String>,
    from_start: bool,
    cache: OnceLock<Cache>,
}

impl Reaction {
    pub(super) fn new(
        name: &str,
        source: &Resource,
        event: String,
        call: DeclaredCall,
        when: Option<CheckedRule>,
        from_start: bool,
    ) -> Reaction {
        let mut columns: Vec<String> = Vec::new();
        call.placeholders(&mut |path| {
            if let [row, column, ..] = path
                && row == "row"
                && column != VERSION
            {
                columns.push(column.clone());
            }
        });
        columns.extend(when.iter().flat_map(|when| when.rule().columns()).map(str::to_owned));
        let (name, source, cache) = (name.to_owned(), source.clone(), OnceLock::new());
        Reaction { name, source, event, call, when, columns, from_start, cache }
    }

    /// The events of a record that it reacts to, each with its place in the record.
    fn matching<'r>(&self, record: &'r Record) -> impl Iterator<Item = (usize, &'r Event)> {
        record.events.iter().enumerate().filter(|(_, event)| event.name == self.event)
    }

    /// The operation id of the effect of an event (R2). The place in the record counts the events of one partition.
    fn operation(&self, record: &Record, index: usize) -> String {
        let partition = record.position.map_or(0, |position| position.partition);
        let operation = match record.operation.len() > OPERATION_BYTES_MAX {
            true => digest(&record.operation),
            false => record.operation.clone(),
        };
        format!("on.{}/{operation}/{partition}-{index}", self.name)
    }

    /// Whether the effect of an event is done already (R2).
    async fn is_done(&self, operation: &str, reading: &HandlerContext<'_>) -> Result<bool, HandlerError> {
        match reading.store.find_operation(reading.tenant, operation).await? {
            None => Ok(false),
            Some(record) if record.fingerprint != digest(operation) => {
                Err(HandlerError::Never(format!("the operation {operation} was used for another request")))
            }
            Some(record) => match record.status {
                OperationStatus::Applied => Ok(true),
                OperationStatus::Aborted => Err(HandlerError::Never(format!(
                    "the operation {operation} was given up before it was applied"
                ))),
            },
        }
    }

    /// The row that an event is about: as the event has it, or as it is now where the event does not have all of it.
    async fn row(
        &self,
        subject: &str,
        event: &Event,
        reading: &HandlerContext<'_>,
    ) -> Result<Option<Row>, HandlerError> {
        let Some(table) = table_of(&self.source).filter(|_| !self.columns.is_empty()) else {
            return Ok(None);
        };
        let has = |row: &Map<String, Json>, name: &str| row.contains_key(name);
        if let Some(row) = event.data.get("row").and_then(Json::as_object)
            && self.columns.iter().all(|name| has(row, name))
            && table.key_columns().iter().all(|column| has(row, &column.name))
            && let Some(version) = row.get(VERSION).and_then(Json::as_i64)
        {
            let value = |column: &statehouse_store::table::Column| {
                // Hidden columns, which the reaction does not name, are not in the event.
                let Some(json) = row.get(&column.name) else { return Ok(Value::Null) };
                Value::from_json(json.clone(), column.kind).map_err(|why| {
                    StoreError::corrupt(format!("the event {} of {subject}", event.name), why.to_string())
                })
            };
            let values = table.columns().iter().map(value).collect::<Result<_, StoreError>>()?;
            return Ok(Some(Row::new(table.clone(), reading.tenant.clone(), values, version)));
        }
        let Ok(key) = self.source.parse_key(subject) else { return Ok(None) };
        let address = Address::new(table, reading.tenant, key)?;
        Ok(reading.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
    }

    /// What an event makes: `None` if nothing is to be done about it.
    async fn effect_of(
        &self,
        record: &Record,
        (place, event): (usize, &Event),
        reading: &HandlerContext<'_>,
        support: &CallSupport<'_>,
    ) -> Result<Option<HandlerWrite>, HandlerError> {
        // Of an event whose row was erased nothing is left to react to.
        if is_blank(&event.data) {
            return Ok(None);
        }
        let Some((_, subject)) = house::subject_of(record, event) else {
            return Err(HandlerError::Never(format!("the event {} names no resource", event.name)));
        };
        let subject = subject.to_owned();
        let row = self.row(&subject, event, reading).await?;
        if let Some(when) = &self.when
            && !row.as_ref().is_some_and(|row| when.holds(&RuleValues::default(), row, reading.now))
        {
            return Ok(None);
        }
        let operation = self.operation(record, place);
        let depth = event.data.get(REACTION).and_then(|cause| cause.get(DEPTH)?.as_u64()).unwrap_or(0) + 1;
        if depth > DEPTH_MAX {
            let why =
                format!("{DEPTH_MAX} reactions have led to this event, one to the other; a cycle has to end");
            return Err(HandlerError::Never(why));
        }
        let cause = json!({"on": self.name, DEPTH: depth, "operation": record.operation});
        let values = EventValues { reaction: self, record, event, subject: &subject, row: row.as_ref() };
        let prepared = self.prepared(&values, &operation, &cause, reading, support).await;
        let reacted = match prepared {
            Ok(Some(reacted)) => reacted,
            Ok(None) => return Ok(None),
            // A lost attempt may have been what it is refused for.
            Err(refusal) if self.is_done(&operation, reading).await? => {
                drop(refusal);
                return Ok(None);
            }
            Err(refusal) => return Err(unable(&refusal)),
        };
        let Reacted { steps, entry, judge, wakeups, notify } = reacted;
        Ok(Some(HandlerWrite {
            taken: 1,
            steps,
            entry: Some(entry),
            contends: true,
            operation: Some(operation),
            judge: Some(judge),
            wakeups,
            notify,
            ..HandlerWrite::default()
        }))
    }

    async fn prepared(
        &self,
        values: &EventValues<'_>,
        operation: &str,
        cause: &Json,
        reading: &HandlerContext<'_>,
        support: &CallSupport<'_>,
    ) -> Result<Option<Reacted>, Refusal> {
        let arguments = self.call.arguments(values)?;
        let (resource, action) = (self.call.resource()?, self.call.action()?);
        let call = ReactionCall::validated(resource, action, reading.tenant, arguments, operation)?;
        if call.acts_before_commit() && is_known(reading.store, reading.tenant, operation).await? {
            return Err(Refusal::new(Code::OperationReused, "it was done before"));
        }
        // No reader follows the log for it, so that it answers nothing, and reads are strong.
        let partitions = reading.store.partitions();
        let cache = self.cache.get_or_init(|| Cache::holding(0, partitions, Arc::new(SystemClock)));
        let cx = ActionContext {
            store: reading.store,
            cache,
            clock: support.clock,
            holds: support.holds,
            ids: support.ids,
            resources: &self.call.resources,
            operation,
            attempt: reading.refused,
            refused: support.last_refusal,
        };
        call.prepare(&cx, &digest(operation), cause).await
    }
}

async fn is_known(store: &dyn Store, tenant: &Tenant, operation: &str) -> Result<bool, StoreError> {
    Ok(store.find_operation(tenant, operation).await?.is_some())
}

/// What a refusal means for the event (R3).
fn unable(refusal: &Refusal) -> HandlerError {
    match refusal.code.is_passing() {
        true => HandlerError::Later(StoreError::unavailable(refusal.to_string())),
        false => HandlerError::Never(refusal.to_string()),
    }
}

#[async_trait]
impl RecordHandler for Reaction {
    fn group(&self) -> &str {
        &self.name
    }

    fn wants(&self, record: &Record) -> bool {
        self.matching(record).next().is_some()
    }

    fn subjects(&self, record: &Record) -> Vec<String> {
        crate::infra::log::subjects_among(record, |event| event.name == self.event)
    }

    fn begins_at_end(&self) -> bool {
        !self.from_start
    }

    async fn handle(
        &self,
        records: &[Record],
        reading: &HandlerContext<'_>,
    ) -> Result<HandlerWrite, HandlerError> {
        let (Some(record), Some(support)) = (records.first(), reading.support) else {
            return Err(HandlerError::Never("no record was given".to_owned()));
        };
        let events: Vec<(usize, &Event)> = self.matching(record).collect();
        // Of one event, the offset says whether it was done, unless a plan was refused or had been done before.
        let looks_up = events.len() > 1 || reading.refused > 0;
        let mut rest = events.into_iter().peekable();
        while let Some((place, event)) = rest.next() {
            if looks_up && self.is_done(&self.operation(record, place), reading).await? {
                continue;
            }
            if let Some(effect) = self.effect_of(record, (place, event), reading, &support).await? {
                return Ok(HandlerWrite { goes_on: rest.peek().is_some(), ..effect });
            }
        }
        Ok(HandlerWrite::of(1, Vec::new()))
    }
}

/// What the templates of a reaction name.
struct EventValues<'a> {
    reaction: &'a Reaction,
    record: &'a Record,
    event: &'a Event,
    subject: &'a str,
    row: Option<&'a Row>,
}

impl TemplateValues for EventValues<'_> {
    fn value(&self, path: &[String]) -> Json {
        let Some((name, rest)) = path.split_first() else { return Json::Null };
        match (name.as_str(), rest) {
            ("subject", _) => self.subject.into(),
            ("event", _) => self.event.name.as_str().into(),
            ("operation", _) => self.record.operation.as_str().into(),
            ("tenant", _) => self.record.tenant.as_str().into(),
            ("at", _) => Value::Time(self.record.at).to_json(),
            ("data", rest) => find(&self.event.data, rest).clone(),
            ("key", [part]) => {
                let source = &self.reaction.source;
                let index = source.key.iter().position(|(name, _)| name == part);
                let key = source.parse_key(self.subject).ok();
                key.zip(index).and_then(|(key, index)| Some(key.get(index)?.to_json())).unwrap_or_default()
            }
            ("row", [column, rest @ ..]) => self.column(column, rest),
            _ => Json::Null,
        }
    }
}

impl EventValues<'_> {
    fn column(&self, column: &str, rest: &[String]) -> Json {
        if column == VERSION {
            let version = self.event.data.get("row").and_then(|row| row.get(VERSION)).cloned();
            return version.or_else(|| self.row.map(|row| row.version().into())).unwrap_or_default();
        }
        let value = self.row.and_then(|row| row.get(column)).map(Value::to_json).unwrap_or_default();
        find(&value, rest).clone()
    }
}
