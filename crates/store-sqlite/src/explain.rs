//! The statements of plans and reads, as text. Needs no file.

use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Address, EngineRequest, ExplainRequest, Explanation, Plan, Step, Tenant, Value};

use crate::sql::{self, SqliteStatement, TableSql};
use crate::writer::INSERT_LOG;

/// The statements that a store of this engine runs for a request.
pub fn explain(asked: ExplainRequest<'_>) -> Explanation {
    let requests = match asked {
        ExplainRequest::Commit(plan) => return explain_plan(plan),
        ExplainRequest::Get(addresses, _) => addresses.iter().map(read_row).collect(),
        ExplainRequest::Query(query) => {
            vec![read_page("read a page of the range, and one row more", &sql::query(query))]
        }
        ExplainRequest::Scan(scan) => {
            vec![read_page("read a page of the table, and one row more", &sql::scan(scan))]
        }
        ExplainRequest::ReadMany(asks) => {
            return Explanation::of_all(asks.iter().map(|ask| explain((*ask).into())));
        }
        ExplainRequest::ClaimRange(take, row) => return take.explained(row, explain),
    };
    Explanation { requests, cost: vec![("synchronizations".to_owned(), "none".to_owned())] }
}

fn read_row(address: &Address) -> EngineRequest {
    let key = key_parameters(address.tenant(), address.key(), 1);
    request("read the row, beside the writer", &TableSql::new(address.table()).select, key)
}

fn read_page(purpose: &str, statement: &SqliteStatement) -> EngineRequest {
    let numbered = statement.parameters.iter().enumerate();
    let parameters = numbered.map(|(index, value)| (format!("?{}", index + 1), value.to_string()));
    request(purpose, &statement.text, parameters)
}

/// The statements of a plan, in the order in which the writer runs them.
fn explain_plan(plan: &Plan) -> Explanation {
    let mut requests = vec![request(
        "open the transaction that this plan shares with those that wait",
        "BEGIN IMMEDIATE",
        [],
    )];
    for (number, step) in plan.steps().iter().enumerate() {
        let sql = TableSql::new(&step.table);
        requests.push(request(
            &format!("read the row of step {number}, and decide in the writer: {step}"),
            &sql.select,
            key_parameters(plan.tenant(), &step.key, 1),
        ));
    }
    if let Some(entry) = plan.entry() {
        let events: Vec<&str> = entry.events.iter().map(|event| event.name.as_str()).collect();
        requests.push(request(
            "append to the log, once for this operation id",
            INSERT_LOG,
            [
                ("?1".to_owned(), "the next position of the subject's partition".to_owned()),
                ("?2".to_owned(), format!("'{}'", plan.tenant())),
                ("?3".to_owned(), format!("'{}'", plan.operation())),
                ("?4".to_owned(), format!("'{}'", entry.resource)),
                ("?5".to_owned(), format!("'{}'", entry.key)),
                ("?6".to_owned(), "now".to_owned()),
                ("?7".to_owned(), format!("'{}'", entry.fingerprint)),
                ("?8".to_owned(), "'applied'".to_owned()),
                ("?9".to_owned(), format!("[{}]", events.join(", "))),
            ],
        ));
    }
    for (number, step) in plan.steps().iter().enumerate() {
        requests.extend(write(plan, step, number));
    }
    requests.push(request("make it durable, then acknowledge", "COMMIT", []));
    let reads = plan.steps().len();
    let writes =
        plan.steps().iter().filter(|step| step.writes()).count() + usize::from(plan.entry().is_some());
    let cost = [
        ("statements".to_owned(), format!("{reads} read, {writes} written")),
        ("synchronizations".to_owned(), "1 of the WAL, shared by the plans of the transaction".to_owned()),
    ];
    Explanation { requests, cost: cost.into() }
}

/// The write of one step; an upsert is one of two, as the row is there or not.
fn write(plan: &Plan, step: &Step, number: usize) -> Vec<EngineRequest> {
    let sql = TableSql::new(&step.table);
    let columns: Vec<&str> = step.assignments.iter().map(|assignment| assignment.column.as_str()).collect();
    let mut requests = Vec::new();
    if step.verb == Verb::Put && step.expect != Expect::Present {
        let tenant = ("?1".to_owned(), format!("'{}'", plan.tenant()));
        let row = step.table.columns().iter().enumerate().map(|(index, column)| {
            let assigned = step.assignments.iter().find(|assignment| assignment.column == column.name);
            let value = match (step.key.get(index), assigned) {
                (Some(part), _) => part.to_string(),
                (None, Some(assignment)) => assignment.expr.to_string(),
                (None, None) => column.default.as_ref().map_or("null".to_owned(), ToString::to_string),
            };
            (format!("?{}", index + 2), value)
        });
        let version = (format!("?{}", step.table.columns().len() + 2), "1".to_owned());
        let parameters = std::iter::once(tenant).chain(row).chain([version]);
        requests.push(request(
            &format!("write step {number}, if the row is missing"),
            &sql.insert,
            parameters,
        ));
    }
    if step.verb == Verb::Put && step.expect != Expect::Absent {
        let assigned = step.assignments.iter().enumerate();
        let assigned = assigned.map(|(index, one)| (format!("?{}", index + 1), one.expr.to_string()));
        let version = (format!("?{}", columns.len() + 1), "version + 1".to_owned());
        let key = key_parameters(plan.tenant(), &step.key, columns.len() + 2);
        requests.push(request(
            &format!("write step {number}, if the row is there"),
            &TableSql::update(&step.table, &columns),
            assigned.chain([version]).chain(key),
        ));
    }
    if step.verb == Verb::Delete {
        let key = key_parameters(plan.tenant(), &step.key, 1);
        requests.push(request(&format!("write step {number}, if the row is there"), &sql.delete, key));
    }
    requests
}

fn key_parameters(tenant: &Tenant, key: &[Value], first: usize) -> Vec<(String, String)> {
    let tenant = format!("'{tenant}'");
    let parts = std::iter::once(tenant).chain(key.iter().map(ToString::to_string));
    parts.enumerate().map(|(index, value)| (format!("?{}", first + index), value)).collect()
}

fn request(
    purpose: &str,
    text: &str,
    parameters: impl IntoIterator<Item = (String, String)>,
) -> EngineRequest {
    EngineRequest {
        purpose: purpose.to_owned(),
        text: text.to_owned(),
        parameters: parameters.into_iter().collect(),
    }
}
