//! What a plan or a read would send, word for word. No server is asked: the options and the plan say it all.

use std::collections::BTreeMap;

use statehouse_store::log::{EventSubject, partition_of, parts_of};
use statehouse_store::plan::{Expect, Step, Verb};
use statehouse_store::{
    ClaimRange, EngineRequest, ExplainRequest, Explanation, Plan, ReadRequest, Record, Row, Time, Value,
};

use crate::batch::{Batch, PlacedRecord};
use crate::claim::IN_ORDER;
use crate::compile::{ClaimTexts, Compiler, Set, Texts, UniformMode};
use crate::connection::DatabaseCall;
use crate::ddl::Names;
use crate::multi_read::{MultiRead, ReadCall, ReadStatements};
use crate::options::{PARTITIONS, PostgresOptions};
use crate::read;
use crate::sql::placeholder;
use crate::statements::{
    self, PLANNER, Placeholders, StatementKey, append, clock_call, lock_calls, records_of,
};
use crate::tenancy::TransactionScope;

/// What a store with these options would send. Without a live store the log is taken to have as many
/// partitions as the options say, or as a new store gets.
pub fn explain(options: &PostgresOptions, asked: ExplainRequest<'_>) -> Explanation {
    let partitions = options.partitions.unwrap_or(PARTITIONS);
    let explainer = Explainer { options, names: Names::new(&options.schema), partitions };
    match asked {
        ExplainRequest::Commit(plan) => explainer.explain(plan),
        ExplainRequest::Get(addresses, _) => {
            explainer.explain_reads("read the rows", &[ReadRequest::Get(addresses)])
        }
        ExplainRequest::Query(query) => explainer
            .explain_reads("read a page of the range, and one row more", &[ReadRequest::Query(query)]),
        ExplainRequest::ReadMany(asks) => {
            explainer.explain_reads("read all of it in one go, and one row more of each range", asks)
        }
        ExplainRequest::Scan(scan) => {
            let scope = scan.tenant().map_or(TransactionScope::All, TransactionScope::of);
            let call = read::scan_call(&explainer.names, scan);
            explainer.read("read a page of the table, and one row more", &scope, Some(&call))
        }
        ExplainRequest::ClaimRange(take, row) => explainer.explain_claim(take, row),
    }
}

struct Explainer<'o> {
    options: &'o PostgresOptions,
    names: Names,
    partitions: u32,
}

impl Explainer<'_> {
    fn explain_reads(&self, purpose: &str, asks: &[ReadRequest<'_>]) -> Explanation {
        let reads = MultiRead::of(asks);
        let statements = ReadStatements::default();
        let asking = ReadCall::of(&self.names, &statements, std::slice::from_ref(&reads));
        self.read(purpose, &reads.scope(), asking.as_ref().map(|asking| &asking.call))
    }

    fn read(&self, purpose: &str, scope: &TransactionScope, call: Option<&DatabaseCall<'_>>) -> Explanation {
        let mut requests: Vec<EngineRequest> = call.map(|call| request(purpose, call)).into_iter().collect();
        if self.options.row_level_security {
            let open = DatabaseCall::new(self.options.begin_read_sql(scope), Vec::new());
            requests.insert(0, request("open a transaction that sees these tenants only", &open));
            requests.push(request("close it", &DatabaseCall::new("commit", Vec::new())));
        }
        Explanation { requests, cost: vec![("round trips".to_owned(), "1".to_owned())] }
    }

    fn explain_claim(&self, take: &ClaimRange, row: Option<&Row>) -> Explanation {
        let (texts, takes) = (Texts::default(), ClaimTexts::default());
        let compiler = Compiler::new(&self.names, &texts, self.options, self.partitions);
        let Some(taken) = compiler.claim(&takes, take) else {
            return take.explained(row, |asked| explain(self.options, asked));
        };
        let lock_timeout_ms = self.options.lock_timeout.as_millis();
        let open = self.options.begin_sql(lock_timeout_ms, IN_ORDER, &TransactionScope::of(take.tenant()));
        let requests = vec![
            request("open the transaction", &DatabaseCall::new(open, Vec::new())),
            request("find and lock the rows that no other session has locked, change them", &taken.call),
            request("make it durable", &DatabaseCall::new("commit", Vec::new())),
        ];
        let cost = [
            ("round trips", "2, or 3 when nothing could be taken"),
            ("row locks", "1 for each row; none is waited for"),
            ("log head", "none"),
            ("synchronizations", "1, shared by all that is committed together"),
        ];
        Explanation { requests, cost: cost.map(|(name, figure)| (name.to_owned(), figure.to_owned())).into() }
    }

    fn explain(&self, plan: &Plan) -> Explanation {
        let texts = Texts::default();
        let compiler = Compiler::new(&self.names, &texts, self.options, self.partitions);
        if let Some(uniform) = compiler.uniform(plan, None, Set::Session, false) {
            let rows = match uniform.way {
                UniformMode::Judged => "lock and judge the rows, write all or none",
                UniformMode::AtOnce => "write all rows under their guards, or fail",
            };
            let log = plan.entry().map_or("", |_| ", take the log's head, append the record");
            let requests = vec![request(&format!("{rows}{log}"), &uniform.call)];
            return Explanation { requests, cost: self.cost(plan, "1, or 3 when a step is refused") };
        }
        let Some(compiled) = compiler.compile(plan, None, Set::Session) else {
            return self.explain_batch(plan);
        };
        let purpose = match plan.entry() {
            Some(_) => "write the row, take the log's head, append the record; a transaction by itself",
            None => "write the row; a transaction by itself",
        };
        let requests = vec![request(purpose, &compiled.call)];
        Explanation { requests, cost: self.cost(plan, "1, or 3 when the step is refused") }
    }

    fn begin_sql(&self, plan: &Plan, planner: &str) -> String {
        self.options.begin_sql(
            self.options.lock_timeout.as_millis(),
            planner,
            &TransactionScope::of(plan.tenant()),
        )
    }

    fn explain_batch(&self, plan: &Plan) -> Explanation {
        let plans = std::slice::from_ref(plan);
        let mut batch = Batch::of(plans);
        batch.assume_absent(|_| true);
        let mut requests = vec![request(
            "open the transaction",
            &DatabaseCall::new(self.begin_sql(plan, PLANNER), Vec::new()),
        )];
        for call in lock_calls(&self.names, &batch) {
            requests.push(request("lock and read the rows, in the order of their keys", &call));
        }
        if plan.entry().is_some() {
            let lookup = records_of(&self.names, batch.operations());
            requests.push(request("learn whether the operation was applied before", &lookup));
        }
        if self.options.clock.is_none() {
            requests.push(request("read the clock, once", &clock_call()));
        }
        for step in plan.steps() {
            requests.extend(self.explain_step(plan, step));
        }
        if let Some(entry) = plan.entry() {
            let partition = partition_of(plan.tenant(), &entry.resource, &entry.key, self.partitions);
            let record = Record::of(plan, Time::from_micros(0), Vec::new());
            let parts = parts_of(plan, self.partitions).unwrap_or_default();
            let of_subject = |subject: EventSubject| Record {
                resource: subject.resource,
                key: subject.key,
                ..record.clone()
            };
            let further: Vec<(u32, Record)> =
                parts.iter().map(|part| (part.partition, of_subject(part.subject.clone()))).collect();
            let of_part =
                |(number, record)| PlacedRecord { is_part: true, ..PlacedRecord::alone(number, record) };
            let further_ones = further.iter().map(|(number, record)| of_part((*number, record)));
            let all: Vec<PlacedRecord<'_>> =
                std::iter::once(PlacedRecord::alone(partition, &record)).chain(further_ones).collect();
            let counts: BTreeMap<u32, u64> = all.iter().map(|placed| (placed.partition, 1)).collect();
            let [take, append] = append(&self.names, &counts, all.into_iter());
            let (head, records) = match further.len() {
                0 => (
                    "take the log's head, as the last lock",
                    "append the record (its time and events are known then)",
                ),
                _ => (
                    "take the log's heads, in their order, as the last locks",
                    "append a record for each partition (their time and events are known then)",
                ),
            };
            requests.push(request(head, &take));
            requests.push(request(records, &append));
        }
        requests.push(request("make it durable", &DatabaseCall::new("commit", Vec::new())));
        let round_trips = match batch.unread() {
            0 => "2, or 1 when a step is refused",
            _ => "2, or 1 when a step is refused; with a look for the rows to be inserted if one is there",
        };
        Explanation { requests, cost: self.cost(plan, round_trips) }
    }

    /// What writes the row of a step that was decided in memory. Of the row only what the plan says is known here.
    fn explain_step(&self, plan: &Plan, step: &Step) -> Vec<EngineRequest> {
        let (names, table) = (&self.names, &*step.table);
        let key: StatementKey<'_> = (plan.tenant(), &step.key);
        let others = table.other_columns().iter().map(|_| Value::Null);
        let values = step.key.iter().cloned().chain(others).collect();
        let row = Row::new(step.table.clone(), plan.tenant().clone(), values, 1);
        let assigned = |column: &str| step.assignments.iter().find(|a| a.column == column);
        let key_values =
            || std::iter::once(plan.tenant().to_string()).chain(step.key.iter().map(Value::to_string));
        let update = || {
            let places = step.assignments.iter().filter_map(|a| table.position(&a.column)).collect();
            let call = statements::update(names, table, &[&row], &places);
            let set = table.other_columns().iter().filter_map(|column| assigned(&column.name));
            let values =
                key_values().chain(set.map(|a| a.expr.to_string())).chain(["version + 1".to_owned()]);
            described("write the row that is there, decided in memory", &call, values)
        };
        let insert = || {
            let call = statements::insert(names, table, &[&row]);
            let others = table.other_columns().iter().map(|column| match assigned(&column.name) {
                Some(assignment) => assignment.expr.to_string(),
                None => column.default.as_ref().unwrap_or(&Value::Null).to_string(),
            });
            let values = key_values().chain(others).chain(["1".to_owned()]);
            described("insert the row that is not there, decided in memory", &call, values)
        };
        let delete =
            |purpose: &str| described(purpose, &statements::delete(names, table, &[key]), key_values());
        let hold = || {
            let placeholders = Placeholders::new();
            let call = statements::hold(names, table, &[key], &placeholders);
            let held = request("hold the absence of the row with a placeholder", &call);
            vec![held, delete("delete the placeholder")]
        };
        match (step.verb, step.expect) {
            (Verb::Put, Expect::Absent) => vec![insert()],
            (Verb::Put, Expect::Present) => vec![update()],
            (Verb::Put, Expect::Either) => vec![update(), insert()],
            (Verb::Delete, _) => vec![delete("delete the row, decided in memory")],
            (Verb::Assert, Expect::Absent) => hold(),
            // The lock is all that an assert takes.
            (Verb::Assert, _) => Vec::new(),
        }
    }

    fn cost(&self, plan: &Plan, round_trips: &str) -> Vec<(String, String)> {
        let head = match plan.entry() {
            Some(entry) => {
                let partition = partition_of(plan.tenant(), &entry.resource, &entry.key, self.partitions);
                match parts_of(plan, self.partitions).map_or(0, |parts| parts.len()) {
                    0 => format!("partition {partition} of {}", self.partitions),
                    further => format!("partition {partition} and {further} others of {}", self.partitions),
                }
            }
            None => "none".to_owned(),
        };
        vec![
            ("round trips".to_owned(), round_trips.to_owned()),
            ("row locks".to_owned(), plan.steps().len().to_string()),
            ("log head".to_owned(), head),
            ("synchronizations".to_owned(), "1, shared by all plans committed together".to_owned()),
        ]
    }
}

/// A request whose parameters are known only as what the plan says of them. Each stands for an array of one.
fn described(purpose: &str, call: &DatabaseCall<'_>, values: impl Iterator<Item = String>) -> EngineRequest {
    let parameters = values.enumerate().map(|(index, value)| (placeholder(index), format!("{{{value}}}")));
    EngineRequest {
        purpose: purpose.to_owned(),
        text: call.text.to_string(),
        parameters: parameters.collect(),
    }
}

fn request(purpose: &str, call: &DatabaseCall<'_>) -> EngineRequest {
    let numbered = call.args.iter().enumerate();
    let parameters = numbered.map(|(index, arg)| (placeholder(index), arg.to_string())).collect();
    EngineRequest { purpose: purpose.to_owned(), text: call.text.to_string(), parameters }
}
