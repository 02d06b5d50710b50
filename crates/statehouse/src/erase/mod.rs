//! Erasure: removes a row for good, and with it what the log says of it.
//!
//! ```text
//!   erase ──► row deleted, `NAME.erased`, row in `house_erasures` ──► worker blanks the log ──► scrub ──► row in `house_erasures` deleted
//! ```
//!
//! **Rows.** `house_erasures(tenant; resource, key, operation, erased_at)`: one for each erased row whose events are not blank yet.
//! `house_blanking(part, …)`, of the system tenant: which of them are being blanked, and how far.
//!
//! **Invariants.**
//! - E1. The row, what stands beside it and the note for the worker go in one plan. *[`parts`] makes it; the archetype gives the steps,
//!   the first of which has the version that was read as its guard.*
//! - E2. Once the worker is done, neither the log nor the answer to a repetition has data of the row. *The heads of the log are read after
//!   the note was, so every event of the row is at or below them; [`statehouse_store::Store::blank_events`] goes through all of it.*
//! - E3. Events of a row that was created again under the key stay. *The position of the erasure bounds the blanking in the partition of
//!   the row (B2 of [`statehouse_store::blank`]).*
//! - E4. An erasure is noted until the log is blank and the engine has removed former contents. *The note is deleted last, if it is still of
//!   this erasure.*
//! - E5. A crash anywhere loses nothing. *How far the log is blank is a row; blanking twice changes nothing.*
//!
//! What else has copies, and what is not covered, is listed in docs/security.md.

mod person;
mod worker;

use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value as Json};
use statehouse_store::blank::ERASED;
use statehouse_store::guard::now;
use statehouse_store::table::VERSION;
use statehouse_store::{Event, EventTemplate, Row, Step, StoreError, Table, Type};

pub use self::person::{PersonErasure, PersonProgress};
pub use self::worker::{BlankingStep, BlankingWorker, ErasureBacklog, NAME};
use crate::action::{ActionContext, Answer, PlanParts, Prepared, Refusal};
use crate::blueprint::nearest;
use crate::blueprint::settings::Field;
use crate::declare::SettingsReader;
use crate::form::{Form, Property};
use crate::resource::key_text;
use crate::system;
use crate::view_source::OF;
use crate::worker::Wakeup;

const RESOURCE: &str = "resource";
const KEY: &str = "key";
const OPERATION: &str = "operation";
const ERASED_AT: &str = "erased_at";
/// The setting that names the column of the person.
const PERSON: &str = "person";
/// The label of the step that notes the erasure.
const NOTED: &str = "noted";

/// The table of erasures that are not blank yet.
fn erasures() -> Result<Arc<Table>, StoreError> {
    static ERASURES: OnceLock<Arc<Table>> = OnceLock::new();
    if let Some(table) = ERASURES.get() {
        return Ok(table.clone());
    }
    let table = system::erasures().map_err(|error| StoreError::schema(error.table, error.why))?;
    Ok(ERASURES.get_or_init(|| table).clone())
}

/// The plan that erases a row, whose steps delete it and what stands beside it (E1).
pub(crate) fn parts(
    resource: &str,
    row: &Row,
    mut steps: Vec<Step>,
    cx: &ActionContext<'_>,
) -> Result<Prepared, Refusal> {
    let key = key_text(row.key());
    let noted = Step::upsert(&erasures()?, [resource.into(), key.as_str().into()])
        .set(OPERATION, cx.operation)
        .set(ERASED_AT, now())
        .label(NOTED);
    steps.push(noted);
    let columns = row.table().key_columns().iter().zip(row.key());
    let of: Map<String, Json> =
        columns.map(|(column, value)| (column.name.clone(), value.to_json())).collect();
    let event =
        EventTemplate::named(format!("{resource}.{ERASED}")).with(OF, of).with(VERSION, row.version());
    let wakeup = Wakeup { worker: NAME.to_owned(), shard: 0, at: cx.clock.now() };
    Ok(PlanParts { wakeups: vec![wakeup], ..PlanParts::new(key, steps, event) }.into())
}

/// Reads `person`: the column that says whose row it is, one of these.
pub(crate) fn read_person(settings: &mut SettingsReader<'_>, columns: &[&Field]) -> Option<String> {
    let name = settings.maybe_text(PERSON)?;
    let names = || columns.iter().map(|field| field.name.as_str());
    let found = columns.iter().find(|field| field.name == name);
    let title = match found.map(|field| field.kind) {
        Some(Type::Text | Type::Int) => return Some(name),
        Some(kind) => format!("`{name}` is {kind}; a person is named by text or int"),
        None => format!("`{PERSON}` names the column `{name}`, which is neither in the key nor a field"),
    };
    match nearest(&name, names()).filter(|_| found.is_none()) {
        Some(near) => settings.problem_with_advice(PERSON, title, format!("did you mean `{near}`?")),
        None => settings.problem(PERSON, title),
    }
    None
}

/// What an erasure answers: the key.
pub(crate) fn answer_form<'k>(key: impl Iterator<Item = (&'k str, Type)>) -> Form {
    Form::Object(key.map(|(name, kind)| Property::required(name, Form::Value(kind), "")).collect())
}

/// The answer of an erasure, from its event.
pub(crate) fn answer(event: &mut Event) -> Answer {
    Answer::row(event.data.get_mut(OF).map(Json::take).unwrap_or_default())
}
