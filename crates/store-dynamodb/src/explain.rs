//! The requests of a plan or a read, and their cost.
//!
//! The requests are those of the first attempt, as the JSON that is sent. If a plan has to read first, values that depend on
//! the rows are printed in angle quotes: ‹version read›.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use aws_sdk_dynamodb::types::AttributeValue;
use serde_json::{Value as Json, json};
use statehouse_store::eval::{self, Decision};
use statehouse_store::log::{LogPart, parts_of};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::read::Direction;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, EngineRequest, ExplainRequest, Explanation, Plan, Query, Record, Scan, Step, Time,
};

use crate::catalog::LiveTable;
use crate::commit::{KnownRows, initial_rows};
use crate::expression::{Condition, ExpressionPlaceholders};
use crate::inner::DynamoInner;
use crate::item::{self, INCARNATION, ItemKey, ItemState};
use crate::item_write::{ItemWrite, UpdateClauses, item_json};
use crate::read::{RangeRead, scan_filter};
use crate::record::LogWrite;
use crate::write::{StepTarget, StepWriter};

/// Bytes of one write unit.
const WRITE_UNIT: usize = 1_024;

impl DynamoInner {
    pub(crate) fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        let (request, units) = match asked {
            ExplainRequest::Commit(plan) => return self.explain_plan(plan),
            ExplainRequest::Get(addresses, consistency) => {
                let key = |row: &Address| ItemKey::at(row, &self.catalog.physical(row.table().name()));
                let keys: Vec<ItemKey> = addresses.iter().map(key).collect();
                let strong = consistency == Consistency::Strong;
                let units = if strong { "1 per 4 KB of each item" } else { "1 per 8 KB of each item" };
                (read_request(&keys.iter().collect::<Vec<_>>(), strong, false), units)
            }
            ExplainRequest::Query(query) => match self.query_request(query) {
                Some(asked) => asked,
                None => return Explanation { requests: Vec::new(), cost: Vec::new() },
            },
            ExplainRequest::Scan(scan) => (self.scan_request(scan), "1 per 4 KB of all items of the table"),
            ExplainRequest::ReadMany(asks) => {
                return Explanation::of_all(asks.iter().map(|ask| self.explain((*ask).into())));
            }
            ExplainRequest::ClaimRange(take, row) => return take.explained(row, |asked| self.explain(asked)),
        };
        let cost = [("requests", "1 for each page of 1 MB"), ("read units", units)];
        let cost = cost.map(|(name, figure)| (name.to_owned(), figure.to_owned()));
        Explanation { requests: vec![request], cost: cost.into() }
    }

    fn query_request(&self, query: &Query) -> Option<(EngineRequest, &'static str)> {
        let RangeRead { index, condition, terms, wanted, strong } = RangeRead::of(query)?;
        let mut json = json!({
            "TableName": self.catalog.physical(query.read_table().name()),
            "KeyConditionExpression": condition,
            "ExpressionAttributeNames": terms.names(),
            "ExpressionAttributeValues": item_json(&terms.values().unwrap_or_default()),
            "ConsistentRead": strong,
            "ScanIndexForward": query.direction() == Direction::Forward,
            "Limit": wanted,
        });
        if let (Json::Object(fields), Some(index)) = (&mut json, index) {
            fields.insert("IndexName".into(), index.into());
        }
        let units = if strong { "1 per 4 KB of the page" } else { "1 per 8 KB of the page" };
        Some((request_text("read a page of the range, and one row more", "Query", &json), units))
    }

    fn scan_request(&self, scan: &Scan) -> EngineRequest {
        let mut terms = ExpressionPlaceholders::default();
        let filter = scan_filter(scan, &mut terms);
        let mut json = json!({
            "TableName": self.catalog.physical(scan.read_table().name()),
            "ConsistentRead": true,
        });
        if let (Json::Object(fields), Some(filter)) = (&mut json, filter) {
            fields.insert("FilterExpression".into(), filter.into());
            fields.insert("ExpressionAttributeNames".into(), json!(terms.names()));
            let values = item_json(&terms.values().unwrap_or_default());
            fields.insert("ExpressionAttributeValues".into(), values);
        }
        if let (Json::Object(fields), Ok(Some((index, total)))) = (&mut json, scan.hash_segment()) {
            fields.insert("Segment".into(), index.into());
            fields.insert("TotalSegments".into(), total.into());
        }
        request_text("scan the table", "Scan", &json)
    }

    fn explain_plan(&self, plan: &Plan) -> Explanation {
        let tables = self.cached_tables(plan);
        let now = self.clock.now();
        let partition = plan.entry().map(|entry| self.partition_of(plan, entry));
        let stamp = self.stamps.peek(now);
        let parts = parts_of(plan, self.partitions).unwrap_or_default();
        let partitions: Vec<u32> =
            partition.into_iter().chain(parts.iter().map(|part| part.partition)).collect();
        let writer = self.writer(plan, &tables, now, &partitions, stamp, 0);
        let targets: Vec<StepTarget<'_>> = writer.targets().collect();
        if plan.entry().is_none() && !plan.steps().iter().any(Step::writes) {
            let request = read_request(&keys_of(&targets), true, true);
            let units = if targets.len() > 1 { 2 * targets.len() } else { 1 };
            return Explanation { requests: vec![request], cost: cost(1, 0, units, None) };
        }
        let unread = self.first_writes(plan, &writer, &targets);
        let reads = unread.is_none();
        let mut writes = unread
            .unwrap_or_else(|| targets.iter().map(|target| write_after_read(&writer, target)).collect());
        let log_writes = self.log_writes(plan, &parts, now, stamp, &targets);
        let sum = |skip: usize| log_writes.iter().skip(skip).map(|write| units(write.weight)).sum::<usize>();
        let sequencer_units = (!log_writes.is_empty()).then(|| 2 * (sum(0) + sum(1)));
        writes.extend(log_writes);
        let mut requests = Vec::new();
        if reads {
            requests.push(read_request(&keys_of(&targets), true, false));
        }
        let (request, factor) = match writes.as_slice() {
            [write] if plan.entry().is_none() => (single_request(write), 1),
            writes => (transaction_request(writes), 2),
        };
        requests.push(request);
        let write_units = writes.iter().map(|write| factor * units(write.weight)).sum();
        let read_units = if reads { targets.len() } else { 0 };
        let cost = cost(requests.len(), write_units, read_units, sequencer_units);
        Explanation { requests, cost }
    }

    /// The tables of a plan: those of the cache, or the plan's own if the store has not read any.
    fn cached_tables(&self, plan: &Plan) -> Vec<Arc<LiveTable>> {
        let cached = self.catalog.cached();
        let table = |step: &Step| {
            cached.get(step.table.name()).cloned().unwrap_or_else(|| {
                Arc::new(LiveTable {
                    table: step.table.clone(),
                    physical: self.catalog.physical(step.table.name()),
                    logged: AtomicBool::new(false),
                })
            })
        };
        plan.steps().iter().map(table).collect()
    }

    /// The writes of a plan's log entry.
    fn log_writes(
        &self,
        plan: &Plan,
        parts: &[LogPart],
        now: Time,
        stamp: i64,
        targets: &[StepTarget<'_>],
    ) -> Vec<ItemWrite> {
        let Some(entry) = plan.entry() else { return Vec::new() };
        let events = entry.events.iter().map(|event| eval::finish_event(event, |_| None)).collect();
        let record = &Record::of(plan, now, events);
        let rows: Vec<ItemKey> = targets.iter().map(|target| target.key.clone()).collect();
        let partition = self.partition_of(plan, entry);
        let log_write = LogWrite { record, partition, parts, stamp, attempt: "‹attempt›", rows: &rows };
        self.tables.enter(&log_write).unwrap_or_default()
    }

    /// The writes of a first attempt that reads nothing; `None` if rows are read first.
    fn first_writes(
        &self,
        plan: &Plan,
        writer: &StepWriter<'_>,
        targets: &[StepTarget<'_>],
    ) -> Option<Vec<ItemWrite>> {
        match initial_rows(plan)? {
            KnownRows::NotRead => targets.iter().map(|target| writer.conditional(target)).collect(),
            KnownRows::Items { items, .. } => {
                let absent = vec![None; items.len()];
                let Ok(Decision::Apply(effect)) = eval::decide(plan, writer.now, &absent) else {
                    return None;
                };
                let parts = targets.iter().zip(&effect.rows);
                parts
                    .map(|(target, row)| writer.decided(target, &ItemState::absent(), row.as_ref()).ok())
                    .collect()
            }
        }
    }
}

fn units(bytes: usize) -> usize {
    bytes.div_ceil(WRITE_UNIT).max(1)
}

fn cost(requests: usize, write: usize, read: usize, sequencer: Option<usize>) -> Vec<(String, String)> {
    let mut cost = vec![
        ("requests".to_owned(), requests.to_string()),
        ("write units".to_owned(), format!("{write} (1 per KB of each item, twice that in a transaction)")),
    ];
    if read > 0 {
        cost.push((
            "read units".to_owned(),
            format!("{read} (1 per 4 KB of each item, twice that in a snapshot)"),
        ));
    }
    if let Some(units) = sequencer {
        cost.push(("write units of the sequencer, later".to_owned(), units.to_string()));
    }
    cost
}

fn pretty(name: &str, json: &Json) -> String {
    // Printing a tree of JSON values cannot fail.
    let text = serde_json::to_string_pretty(json).unwrap_or_default();
    format!("{name} {}", with_short_objects(&text))
}

/// Puts objects of one field, as attribute values are, on one line: `{ "S": "x" }`.
fn with_short_objects(pretty: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for line in pretty.lines() {
        let text = line.trim_start();
        if let ("}" | "},", [.., placeholder, only]) = (text, lines.as_slice())
            && placeholder.ends_with('{')
            && !only.ends_with(['{', '}', '[', ']', ','])
        {
            let whole = format!("{placeholder} {} {text}", only.trim_start());
            lines.truncate(lines.len() - 2);
            lines.push(whole);
        } else {
            lines.push(line.to_owned());
        }
    }
    lines.join("\n")
}

fn single_request(action: &ItemWrite) -> EngineRequest {
    let mut json = action.to_json();
    if let (Json::Object(fields), "UpdateItem") = (&mut json, action.request_name()) {
        fields.insert("ReturnValues".into(), "ALL_NEW".into());
    }
    EngineRequest {
        purpose: "write the row if its condition holds".into(),
        text: pretty(action.request_name(), &json),
        parameters: Vec::new(),
    }
}

fn transaction_request(actions: &[ItemWrite]) -> EngineRequest {
    let items: Vec<Json> =
        actions.iter().map(|action| json!({ action.part_name(): action.to_json() })).collect();
    let json = json!({ "ClientRequestToken": "‹token›", "TransactItems": items });
    EngineRequest {
        purpose: "write all items if all conditions hold".into(),
        text: pretty("TransactWriteItems", &json),
        parameters: Vec::new(),
    }
}

fn keys_of<'t>(targets: &'t [StepTarget<'_>]) -> Vec<&'t ItemKey> {
    targets.iter().map(|target| &target.key).collect()
}

fn read_request(keys: &[&ItemKey], strong: bool, is_snapshot: bool) -> EngineRequest {
    let attributes = |key: &ItemKey| item_json(&key.attributes());
    let (name, json) = match keys {
        [key] => {
            ("GetItem", json!({ "TableName": key.table, "Key": attributes(key), "ConsistentRead": strong }))
        }
        keys if is_snapshot => {
            let gets =
                keys.iter().map(|key| json!({ "Get": { "TableName": key.table, "Key": attributes(key) } }));
            ("TransactGetItems", json!({ "TransactItems": gets.collect::<Vec<_>>() }))
        }
        keys => {
            let mut tables = serde_json::Map::new();
            for key in keys {
                let entry = tables.entry(key.table.clone());
                let entry = entry.or_insert_with(|| json!({ "Keys": [], "ConsistentRead": strong }));
                if let Some(Json::Array(list)) = entry.get_mut("Keys") {
                    list.push(attributes(key));
                }
            }
            ("BatchGetItem", json!({ "RequestItems": tables }))
        }
    };
    request_text("read the rows", name, &json)
}

fn request_text(purpose: &str, name: &str, json: &Json) -> EngineRequest {
    EngineRequest { purpose: purpose.to_owned(), text: pretty(name, json), parameters: Vec::new() }
}

/// A write that depends on a row, with placeholders for the values that are read.
fn write_after_read(writer: &StepWriter<'_>, target: &StepTarget<'_>) -> ItemWrite {
    let step = target.step;
    let placeholder = |text: &str| AttributeValue::S(format!("‹{text}›"));
    let mut terms = ExpressionPlaceholders::default();
    let condition = if step.expect == Expect::Absent {
        Condition::missing(&mut terms, VERSION)
    } else {
        let version = Condition::compare(&mut terms, VERSION, "=", placeholder("version read"));
        version.and(Condition::compare(&mut terms, INCARNATION, "=", placeholder("incarnation read")))
    };
    match step.verb {
        Verb::Assert => writer.check(target, condition, terms),
        Verb::Delete => writer.delete(target, condition, terms, false),
        Verb::Put => {
            let mut clauses = UpdateClauses::default();
            for assignment in &step.assignments {
                let value = assignment.expr.as_constant().and_then(item::attribute);
                let value = value.unwrap_or_else(|| placeholder(&assignment.expr.to_string()));
                clauses.set(&mut terms, &assignment.column, value);
            }
            for index in target.live.table.indexes() {
                if index.columns().any(|name| step.assignments.iter().any(|set| set.column == name)) {
                    let (pk, sk) = item::index_names(&index.name);
                    clauses.set(&mut terms, &pk, placeholder(&format!("partition key in {}", index.name)));
                    clauses.set(&mut terms, &sk, placeholder(&format!("sort key in {}", index.name)));
                }
            }
            clauses.set(&mut terms, VERSION, placeholder("version read, plus 1"));
            let condition = writer.mark(&mut terms, &mut clauses, condition);
            ItemWrite::update(&target.key.table, target.key.attributes(), &clauses, condition, terms)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_one_field_stand_on_one_line() {
        let json =
            json!({ "Key": { "pk": { "S": "a,{" } }, "Keys": [{ "n": { "N": "1" }, "m": 2 }], "Limit": 3 });
        let expected = "Get {\n  \"Key\": {\n    \"pk\": { \"S\": \"a,{\" }\n  },\n  \"Keys\": [\n    {\n      \"m\": 2,\n      \
                        \"n\": { \"N\": \"1\" }\n    }\n  ],\n  \"Limit\": 3\n}";
        assert_eq!(pretty("Get", &json), expected);
    }
}
