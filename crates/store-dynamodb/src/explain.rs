//! What a plan or a read would send, and what that costs.
//!
//! The requests are the ones of the first attempt, as JSON, in the form in which they are sent. Where a plan has to
//! read first, what depends on the rows stands in angle quotes: ‹version read›.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use aws_sdk_dynamodb::types::AttributeValue;
use serde_json::{Value as Json, json};
use statehouse_store::eval::{self, Decision};
use statehouse_store::log::parts_of;
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::read::Direction;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, ExplainRequest, Explanation, Plan, Query, Record, Request, Scan, Step,
};

use crate::action::{Action, Clauses, item_json};
use crate::catalog::Live;
use crate::commit::{Known, first_guess};
use crate::expression::{Condition, Terms};
use crate::inner::Inner;
use crate::item::{self, Found, Key, LIFE};
use crate::read::{RangeRead, walk_filter};
use crate::record::Entering;
use crate::write::{Target, Writer};

/// Bytes of one write unit.
const WRITE_UNIT: usize = 1_024;

impl Inner {
    pub(crate) fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        let (request, units) = match asked {
            ExplainRequest::Commit(plan) => return self.explain_plan(plan),
            ExplainRequest::Get(addresses, consistency) => {
                let key = |row: &Address| Key::at(row, &self.catalog.physical(row.table().name()));
                let keys: Vec<Key> = addresses.iter().map(key).collect();
                let strong = consistency == Consistency::Strong;
                let units = if strong { "1 per 4 KB of each item" } else { "1 per 8 KB of each item" };
                (read_request(&keys.iter().collect::<Vec<_>>(), strong, false), units)
            }
            ExplainRequest::Query(query) => match self.query_request(query) {
                Some(asked) => asked,
                None => return Explanation { requests: Vec::new(), cost: Vec::new() },
            },
            ExplainRequest::Scan(scan) => (self.scan_request(scan), "1 per 4 KB of all that is walked over"),
            ExplainRequest::ReadMany(asks) => {
                return Explanation::of_all(asks.iter().map(|ask| self.explain((*ask).into())));
            }
            ExplainRequest::ClaimRange(take, row) => return take.explained(row, |asked| self.explain(asked)),
        };
        let cost = [("requests", "1 for each page of 1 MB"), ("read units", units)];
        let cost = cost.map(|(name, figure)| (name.to_owned(), figure.to_owned()));
        Explanation { requests: vec![request], cost: cost.into() }
    }

    fn query_request(&self, query: &Query) -> Option<(Request, &'static str)> {
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
        Some((asking("read a page of the range, and one row more", "Query", &json), units))
    }

    fn scan_request(&self, scan: &Scan) -> Request {
        let mut terms = Terms::default();
        let filter = walk_filter(scan, &mut terms);
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
        asking("walk over the table", "Scan", &json)
    }

    fn explain_plan(&self, plan: &Plan) -> Explanation {
        let known = self.catalog.known();
        let tables: Vec<Arc<Live>> = plan
            .steps()
            .iter()
            .map(|step| {
                known.get(step.table.name()).cloned().unwrap_or_else(|| {
                    Arc::new(Live {
                        table: step.table.clone(),
                        physical: self.catalog.physical(step.table.name()),
                        logged: AtomicBool::new(false),
                    })
                })
            })
            .collect();
        let now = self.clock.now();
        let partition = plan.entry().map(|entry| self.partition_of(plan, entry));
        let stamp = self.stamps.peek(now);
        let parts = parts_of(plan, self.partitions).unwrap_or_default();
        let partitions: Vec<u32> =
            partition.into_iter().chain(parts.iter().map(|part| part.partition)).collect();
        let writer = self.writer(plan, &tables, now, &partitions, stamp, 0);
        let targets: Vec<Target<'_>> = writer.targets().collect();
        if plan.entry().is_none() && !plan.steps().iter().any(Step::writes) {
            let request = read_request(&keys_of(&targets), true, true);
            let units = if targets.len() > 1 { 2 * targets.len() } else { 1 };
            return Explanation { requests: vec![request], cost: cost(1, 0, units, None) };
        }
        let guess = self.first_actions(plan, &writer, &targets);
        let reads = guess.is_none();
        let mut actions =
            guess.unwrap_or_else(|| targets.iter().map(|target| symbolic(&writer, target)).collect());
        let mut later = None;
        if let (Some(entry), Some(partition)) = (plan.entry(), partition) {
            let events = entry.events.iter().map(|draft| eval::finish_event(draft, |_| None)).collect();
            let record = &Record::of(plan, now, events);
            let keys: Vec<Key> = targets.iter().map(|target| target.key.clone()).collect();
            let entering =
                Entering { record, partition, parts: &parts, stamp, attempt: "‹attempt›", rows: &keys };
            if let Ok(entering) = self.tables.enter(&entering) {
                let sum = |skip: usize| {
                    entering.iter().skip(skip).map(|action| units(action.weight)).sum::<usize>()
                };
                later = Some(2 * (sum(0) + sum(1)));
                actions.extend(entering);
            }
        }
        let mut requests = Vec::new();
        if reads {
            requests.push(read_request(&keys_of(&targets), true, false));
        }
        let alone = plan.entry().is_none() && actions.len() == 1;
        let (request, factor) = match actions.as_slice() {
            [action] if alone => (single_request(action), 1),
            actions => (transaction_request(actions), 2),
        };
        requests.push(request);
        let write_units = actions.iter().map(|action| factor * units(action.weight)).sum();
        let read_units = if reads { targets.len() } else { 0 };
        let cost = cost(requests.len(), write_units, read_units, later);
        Explanation { requests, cost }
    }

    /// The actions of a first attempt that reads nothing; `None` where rows are read first.
    fn first_actions(&self, plan: &Plan, writer: &Writer<'_>, targets: &[Target<'_>]) -> Option<Vec<Action>> {
        match first_guess(plan)? {
            Known::Nothing => targets.iter().map(|target| writer.blind(target)).collect(),
            Known::Rows { found, .. } => {
                let absent = vec![None; found.len()];
                let Ok(Decision::Apply(effect)) = eval::decide(plan, writer.now, &absent) else {
                    return None;
                };
                let parts = targets.iter().zip(&effect.rows);
                Some(
                    parts
                        .map(|(target, row)| writer.decided(target, &Found::nothing(), row.as_ref()))
                        .collect(),
                )
            }
        }
    }
}

fn units(bytes: usize) -> usize {
    bytes.div_ceil(WRITE_UNIT).max(1)
}

fn cost(requests: usize, write: usize, read: usize, later: Option<usize>) -> Vec<(String, String)> {
    let mut cost = vec![
        ("requests".to_owned(), requests.to_string()),
        ("write units".to_owned(), format!("{write} (1 per KB of each item, twice that in a transaction)")),
    ];
    if read > 0 {
        cost.push((
            "read units".to_owned(),
            format!("{read} (1 per 4 KB of each item, twice that at one moment)"),
        ));
    }
    if let Some(later) = later {
        cost.push(("write units of whoever reads the log first".to_owned(), later.to_string()));
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
        if let ("}" | "},", [.., open, only]) = (text, lines.as_slice())
            && open.ends_with('{')
            && !only.ends_with(['{', '}', '[', ']', ','])
        {
            let whole = format!("{open} {} {text}", only.trim_start());
            lines.truncate(lines.len() - 2);
            lines.push(whole);
        } else {
            lines.push(line.to_owned());
        }
    }
    lines.join("\n")
}

fn single_request(action: &Action) -> Request {
    let mut json = action.to_json();
    if let (Json::Object(fields), "UpdateItem") = (&mut json, action.request_name()) {
        fields.insert("ReturnValues".into(), "ALL_NEW".into());
    }
    Request {
        purpose: "write the row if its condition holds".into(),
        text: pretty(action.request_name(), &json),
        parameters: Vec::new(),
    }
}

fn transaction_request(actions: &[Action]) -> Request {
    let items: Vec<Json> =
        actions.iter().map(|action| json!({ action.part_name(): action.to_json() })).collect();
    let json = json!({ "ClientRequestToken": "‹token›", "TransactItems": items });
    Request {
        purpose: "write all items if all conditions hold".into(),
        text: pretty("TransactWriteItems", &json),
        parameters: Vec::new(),
    }
}

fn keys_of<'t>(targets: &'t [Target<'_>]) -> Vec<&'t Key> {
    targets.iter().map(|target| &target.key).collect()
}

fn read_request(keys: &[&Key], strong: bool, at_once: bool) -> Request {
    let attributes = |key: &Key| item_json(&key.attributes());
    let (name, json) = match keys {
        [key] => {
            ("GetItem", json!({ "TableName": key.table, "Key": attributes(key), "ConsistentRead": strong }))
        }
        keys if at_once => {
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
    asking("read the rows", name, &json)
}

fn asking(purpose: &str, name: &str, json: &Json) -> Request {
    Request { purpose: purpose.to_owned(), text: pretty(name, json), parameters: Vec::new() }
}

/// An action that depends on a row, with names for what will be read.
fn symbolic(writer: &Writer<'_>, target: &Target<'_>) -> Action {
    let step = target.step;
    let open = |text: &str| AttributeValue::S(format!("‹{text}›"));
    let mut terms = Terms::default();
    let condition = if step.expect == Expect::Absent {
        Condition::missing(&mut terms, VERSION)
    } else {
        let version = Condition::compare(&mut terms, VERSION, "=", open("version read"));
        version.and(Condition::compare(&mut terms, LIFE, "=", open("life read")))
    };
    match step.verb {
        Verb::Assert => writer.check(target, condition, terms),
        Verb::Delete => writer.delete(target, condition, terms, false),
        Verb::Put => {
            let mut clauses = Clauses::default();
            for assignment in &step.assignments {
                let value = assignment.expr.as_constant().and_then(item::attribute);
                let value = value.unwrap_or_else(|| open(&assignment.expr.to_string()));
                clauses.set(&mut terms, &assignment.column, value);
            }
            for index in target.live.table.indexes() {
                if index.columns().any(|name| step.assignments.iter().any(|set| set.column == name)) {
                    let (pk, sk) = item::index_names(&index.name);
                    clauses.set(&mut terms, &pk, open(&format!("partition key in {}", index.name)));
                    clauses.set(&mut terms, &sk, open(&format!("sort key in {}", index.name)));
                }
            }
            clauses.set(&mut terms, VERSION, open("version read, plus 1"));
            let condition = writer.mark(&mut terms, &mut clauses, condition);
            Action::update(&target.key.table, target.key.attributes(), &clauses, condition, terms)
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
