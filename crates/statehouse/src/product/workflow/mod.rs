//! A04 Workflow: the life cycle of a row, with transitions that the blueprint declares and guards that the engine checks.
//!
//! ```text
//!             start              a declared transition, by a caller
//!   (none) ───────────► STATE ──────────────────────────────────────► STATE
//!                         │                                             ▲
//!                         └── a declared transition with `after`, by ───┘
//!                             the worker, when the row's time is up
//! ```
//!
//! **Rows.** `orders(tenant, key…, fields…, state, seq, entered_at, last_transition, last_by, last_operation, due_at, due_shard,
//! updated_at, version)`: `seq` counts the transitions, `start` is the first; `due_at` is when the timer of the state fires, and is
//! there if the blueprint declares a timer. Index by state and time, and the index `due` across tenants.
//! `order_history(tenant, key…, seq, transition, from, to, by, reason, at, operation, version)`, one row for each transition
//! (`history = "rows"`); with `history = "log"` only the log tells of them, as long as it is kept.
//! Effects and jobs of a transition are rows of their own resources, under the key `{name}:{key}:{seq}`.
//!
//! **Invariants.**
//! - W1. A row goes only where the definition leads. *Guard of a transition:* `version = the one that was read`, which implies the
//!   state, `seq`, and the condition `if` as they were read; without a read, `state = 'PAID'` and the condition themselves.
//! - W2. `seq` counts the transitions, and history has each of them once: `1..seq`, `from` of each is `to` of the one before. *One
//!   plan writes the row and inserts the history row, which is refused if there is one.*
//! - W3. An effect or a job exists if and only if its transition was applied. *It is an insert in the same plan.*
//! - W4. A timer fires in the state that it belongs to, not before its time, once. *Guard of the worker's transition:*
//!   `due_at <= now` by the engine's clock, and the version or the state; entering a state sets `due_at` anew, leaving it clears it.
//! - W5. A repetition under the same operation id gets the first answer. *The log's operation.*
//!
//! **Failures.** *Retry of same transition after commit*: W5; without an operation id the caller is told `wrong_state` with the last
//! transition and its operation. *Invalid transition from stale state*: W1, the engine judges the row, not the caller's copy.
//! *Competing transitions*: both are about one row; the second is judged again in the new state. *Crash after transition but before
//! side effect*: W3. *Stale status read*: reads by key are strong; `until` and `Prefer: wait` wait for a state.
//!
//! **Hotspots.** *Hot workflow transition rows*: `history = "log"`: transitions without effects and jobs need no read, and an engine combines
//! those of one row. *Expensive status polling*: `until=STATE` with `Prefer: wait`: a read that waits costs nothing. *Side-effect
//! worker backlog*: `limits` of the effect, and more workers for the jobs.

mod archetype;
mod chart;
mod declaration;
#[cfg(test)]
mod declaration_tests;
mod interchange;
mod moved;
mod outputs;
mod read;
mod states;
mod transitions;

pub use archetype::ARCHETYPE;
pub use chart::{ChartTransition, StateChart};
pub use interchange::{ImportProblem, import_xstate};
pub(crate) use moved::StateMover;

use std::sync::Arc;

use statehouse_store::Type;

use self::declaration::{DeclaredTransition, GraphText, TransitionContext, read_graph};
use self::states::StateSet;
use crate::blueprint::settings::Field;
use crate::declare::table::STATE;
use crate::declare::{Declare, Machine, ResourceSpec, SettingsReader, TableDef, TableSpec};
use crate::infra::due::DUE_AT;
use crate::resource::plural;

/// Columns of a row.
const SEQ: &str = "seq";
const ENTERED_AT: &str = "entered_at";
const LAST_TRANSITION: &str = "last_transition";
const LAST_BY: &str = "last_by";
const LAST_OPERATION: &str = "last_operation";
const BY_STATE: &str = "by_state";
/// Columns of the history.
const TRANSITION: &str = "transition";
const FROM: &str = "from";
const TO: &str = "to";
const BY: &str = "by";
const REASON: &str = "reason";
const AT: &str = "at";
const OPERATION: &str = "operation";
/// The first action.
const START: &str = "start";
/// Who did what the worker does when a timer fires.
const TIMER: &str = "timer";
/// Bytes of a reason.
const LAST_REASON_BYTES_MAX: usize = 2_000;
/// Names that transitions cannot have: of actions and events that every workflow has.
const RESERVED: [&str; 10] =
    [START, "started", "read", "list", "history", "can", "check", "moved", "erase", "erased"];
/// Where the history is.
const HISTORY: [&str; 2] = ["rows", "log"];

/// One declared workflow.
#[derive(Debug)]
struct WorkflowSpec {
    name: String,
    key: Vec<Field>,
    fields: Vec<Field>,
    states: StateSet,
    /// States of an older definition, whose rows are moved when the blueprint is applied.
    moved: Vec<(String, String)>,
    transitions: Vec<DeclaredTransition>,
    def: Arc<TableDef>,
    /// The table of the history, if it has rows.
    history: Option<Arc<TableDef>>,
}

impl WorkflowSpec {
    /// The timer of a state.
    fn timer_of(&self, state: &str) -> Option<&DeclaredTransition> {
        let leaves =
            |one: &&DeclaredTransition| one.after.is_some() && one.from.iter().any(|from| from == state);
        self.transitions.iter().find(leaves)
    }

    /// Whether a transition leaves a state.
    fn is_left(&self, state: &str) -> bool {
        self.transitions.iter().any(|one| one.from.iter().any(|from| from == state))
    }
}

/// Reads `[workflow.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let (blueprint, resources) = cx.others()?;
    let settings = cx.settings();
    let key = settings.key("key");
    let fields = settings.fields("fields");
    let table = settings.text("table", plural(name));
    let shards = settings.count("shards", 4, 1..=1_024);
    let has_history = settings.choice("history", &HISTORY) == "rows";
    check_fields(settings, &fields);
    let graph = read_graph(settings)?;
    let def = cx.build(rows_table(&table, (&key, &fields), &graph, shards))?;
    let history = match has_history {
        true => Some(cx.build(history_table(name, &key))?),
        false => None,
    };
    let context = TransitionContext { blueprint, resources, def: &def, key: &key, fields: &fields };
    let declared = graph.transitions.iter().zip(&graph.from);
    let settings = cx.settings();
    let transitions: Vec<Option<DeclaredTransition>> =
        declared.map(|(one, from)| context.read(settings, one, from)).collect();
    let transitions = transitions.into_iter().collect::<Option<Vec<DeclaredTransition>>>()?;
    let GraphText { set: states, initial, edges, from, moved, .. } = graph;
    let warnings = states.warnings(&edges, &from, &initial);
    let workflow = Arc::new(WorkflowSpec {
        name: name.to_owned(),
        key,
        fields,
        states,
        moved,
        transitions,
        def,
        history,
    });
    let machine = cx.machine(transitions::of(&workflow, Machine::of(name, &workflow.def)))?;
    let resource = ResourceSpec::of(name, &workflow.def)
        .machine(&machine)
        .warnings(warnings)
        .state_chart(StateChart::of(&workflow))
        .events(moved_events(&workflow));
    let tables = workflow.history.iter().map(|history| history.table());
    cx.resource(tables.fold(resource, ResourceSpec::table).actions(read::actions(&workflow)));
    Some(())
}

/// What leaves an event besides the transitions: rows of removed states are moved when the blueprint is applied.
fn moved_events(workflow: &WorkflowSpec) -> &'static [(&'static str, &'static [&'static str])] {
    if workflow.moved.is_empty() { &[] } else { &[(moved::MOVED, &[])] }
}

/// Names that inputs of every transition have.
fn check_fields(settings: &mut SettingsReader<'_>, fields: &[Field]) {
    for field in fields.iter().filter(|field| field.name == REASON) {
        let title = format!("`{REASON}` is an input of every transition, which the history keeps");
        settings.field_problem(field, title, Some("give the field another name"));
    }
}

fn rows_table(name: &str, (key, fields): (&[Field], &[Field]), graph: &GraphText, shards: u32) -> TableSpec {
    let spec = TableSpec::named(name)
        .key(key)
        .fields(fields)
        .states(&graph.set.states)
        .about("as it is now")
        .int(SEQ)
        .about("how many transitions it has made, the start included")
        .time(ENTERED_AT)
        .about("when it entered the state")
        .text(LAST_TRANSITION)
        .about("the transition that was made last")
        .text(LAST_BY)
        .null()
        .about("who made it: the credential's owner, or `timer`")
        .text(LAST_OPERATION)
        .null()
        .about("the operation that made it; null for a timer")
        .updated_at()
        .index(BY_STATE, &[STATE], &[ENTERED_AT]);
    let timed: Vec<String> = timed_states(graph);
    if timed.is_empty() {
        return spec;
    }
    let spec = spec.time(DUE_AT).null().about("when the timer of its state fires");
    spec.deadline(&timed, DUE_AT, shards)
}

/// The states that have a timer, in order.
fn timed_states(graph: &GraphText) -> Vec<String> {
    let timers = graph.edges.iter().zip(&graph.from).filter(|(edge, _)| edge.after.is_some());
    let left: Vec<&String> = timers.flat_map(|(_, from)| from).collect();
    graph.set.states.iter().filter(|state| left.contains(state)).cloned().collect()
}

fn history_table(name: &str, key: &[Field]) -> TableSpec {
    TableSpec::named(format!("{name}_history"))
        .key(key)
        .sort(SEQ, Type::Int)
        .text(TRANSITION)
        .about("what was done")
        .text(FROM)
        .null()
        .about("the state before; null for the start")
        .text(TO)
        .about("the state after")
        .text(BY)
        .null()
        .about("who did it: the credential's owner, or `timer`")
        .text(REASON)
        .null()
        .about("why, as the caller said")
        .time(AT)
        .about("when it was done")
        .text(OPERATION)
        .null()
        .about("the operation that did it; null for a timer")
}
