//! The actions of definitions, and their reads.

use super::write::{DefinitionVerb, DefinitionWrite};
use super::*;

/// What is read of definitions.
#[derive(Clone, Copy, Debug)]
enum DefinitionQuery {
    One,
    History,
}

struct DefinitionRead {
    schedule: Arc<ScheduleSpec>,
    what: DefinitionQuery,
}

#[async_trait]
impl Read for DefinitionRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let schedule = &self.schedule;
        let definition_id = call.key_text()?;
        let query = match self.what {
            DefinitionQuery::One => {
                let row = schedule.definition(cx.store, &call.tenant, definition_id).await?;
                let row = row.filter(|row| row.text(STATUS) != Some(DELETED)).ok_or_else(|| {
                    let resource = schedule.definition_resource();
                    Refusal::new(Code::NotFound, format!("{resource} {definition_id} does not exist"))
                })?;
                return Ok(Arc::new(Answer::row(schedule.definitions_def.row_json(&row))));
            }
            DefinitionQuery::History => {
                Query::index(&schedule.jobs, BY_DEFINITION, &call.tenant, [definition_id.into()])?
            }
        };
        let page = cx.store.query(&paging::page_of(query.backward(), call)?).await?;
        let rows = page.rows.iter().map(|row| schedule.jobs_def.row_json(row));
        Ok(Arc::new(paging::answer(rows, page.next)))
    }
}

pub(in crate::product::schedule) fn actions(schedule: &Arc<ScheduleSpec>) -> [ActionSpec; 8] {
    let job = &schedule.name;
    let read = |what: DefinitionQuery| DefinitionRead { schedule: schedule.clone(), what };
    let write = |action: ActionSpec, verb: DefinitionVerb| {
        action
            .code(Code::VersionConflict)
            .after(["create"])
            .writes(DefinitionWrite { schedule: schedule.clone(), verb })
    };
    let status = Property::optional(STATUS, Form::one_of(&STATUSES), "which of them; ACTIVE if not given");
    let transition = |name: &'static str, summary: String| ActionSpec::transition(name, summary);
    [
        write(
            ActionSpec::put("create", format!("Define when {job} rows are made, or define it anew.")),
            DefinitionVerb::Create,
        )
        .shape("create target")
        .mechanism("insert/create")
        .takes(create_form())
        .codes(&[Code::NotFound, Code::VersionConflict])
        .answers(&["due item never materialized"])
        .after([]),
        write(
            transition("pause", format!("Make no {job} rows, and take back the one that waits.")),
            DefinitionVerb::Pause,
        ),
        write(transition("resume", format!("Make {job} rows again, from now on.")), DefinitionVerb::Resume)
            .after(["create", "pause"]),
        write(ActionSpec::delete("delete", format!("Make no {job} rows any more.")), DefinitionVerb::Delete),
        write(
            transition("run", format!("Make a {job} now, besides those that are due.")),
            DefinitionVerb::Run,
        )
        .shape("create target")
        .mechanism("materialize claimable run")
        .gives(schedule.jobs_def.row_form())
        .answer_row_of(&schedule.jobs_def),
        ActionSpec::read("read", "Read a definition.").after(["create"]).reads(read(DefinitionQuery::One)),
        ActionSpec::list("list", "List definitions by status, newest first.")
            .mechanism("range read on the status and time index")
            .after(["create"])
            .reads_index(IndexList::newest_first(&schedule.definitions_def).by_or(BY_STATUS, status, ACTIVE)),
        ActionSpec::list(
            "history",
            format!("List the {job} rows of a definition, by their due times, newest first."),
        )
        .on(Method::Get, RouteKind::ItemAction)
        .shape("read projection")
        .mechanism("range read on the definition and time index")
        .gives_rows(schedule.jobs_def.row_form())
        .after(["create"])
        .reads(read(DefinitionQuery::History)),
    ]
}

fn create_form() -> Vec<Property> {
    let text = || Form::Value(Type::Text);
    let when = Form::Object(vec![
        Property::optional(
            EVERY_MS,
            Form::Range(EVERY_MS_MIN, SPAN_MS_MAX),
            "in which steps, the first one from now",
        ),
        Property::optional(CRON, text(), "a pattern of five fields, or of six with seconds in front"),
        Property::optional(ZONE, text(), "by which wall clock: Europe/Berlin; UTC if not given"),
        Property::optional(AT, Form::Value(Type::Time), "once, at this time"),
    ]);
    vec![
        Property::required(WHEN, when, "one of every_ms, cron (and zone), and at"),
        Property::optional(QUEUE, text(), "`default` if not given"),
        Property::optional(PAYLOAD, Form::Any, "what the worker gets").or_null(),
        Property::optional(PRIORITY, Form::Range(0, i64::from(PRIORITIES_LIMIT) - 1), "0 comes first"),
        Property::optional(
            ATTEMPTS_MAX,
            Form::Range(1, i64::from(ATTEMPTS_LIMIT)),
            "how often each is tried",
        ),
        Property::optional(
            MISSED,
            Form::one_of(&MISSED_WORDS),
            "due times that passed while no process ran: made as one, or each",
        ),
        Property::optional(
            OVERLAP,
            Form::one_of(&OVERLAP_WORDS),
            "when the one before is not over: made, skipped, or in line behind it",
        ),
    ]
}
