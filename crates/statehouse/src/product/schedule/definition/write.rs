//! Writes of definitions: create, pause, resume, delete, run.

use super::*;

/// What is done with a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DefinitionVerb {
    Create,
    Pause,
    Resume,
    Delete,
    Run,
}

/// The columns that say when.
type WhenColumns = [(&'static str, Value); 4];

pub(super) struct DefinitionWrite {
    pub(super) schedule: Arc<ScheduleSpec>,
    pub(super) verb: DefinitionVerb,
}

impl DefinitionWrite {
    fn missing(&self, definition_id: &str) -> Refusal {
        let resource = self.schedule.definition_resource();
        Refusal::new(Code::NotFound, format!("{resource} {definition_id} does not exist"))
    }

    /// Reads what `create` says about the time.
    fn when(input: &Inputs) -> Result<(When, WhenColumns), Refusal> {
        let said = input.get_object(WHEN)?;
        let text = |name: &str| said.text(name);
        let (every, at) = (said.int(EVERY_MS), said.time(AT));
        let (when, zone) = match (text(CRON), every, at) {
            (Some(cron), None, None) => {
                let zone = text(ZONE).unwrap_or(ZONE_DEFAULT);
                let when = When::cron(cron, zone)
                    .map_err(|(name, why)| field_error(&format!("{WHEN}/{name}"), &why))?;
                (when, Some(zone))
            }
            (None, Some(every), None) => {
                (When::Every(Duration::from_millis(u64::try_from(every).unwrap_or(0))), None)
            }
            (None, None, Some(at)) => (When::At(at), None),
            _ => return Err(field_error(WHEN, "say one of cron (and zone), every_ms and at")),
        };
        let columns = [
            (CRON, text(CRON).map_or(Value::Null, Value::from)),
            (ZONE, zone.map_or(Value::Null, Value::from)),
            (EVERY_MS, every.map_or(Value::Null, Value::from)),
            (AT, at.map_or(Value::Null, Value::from)),
        ];
        Ok((when, columns))
    }

    async fn create(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        definition_id: &str,
    ) -> Result<Prepared, Refusal> {
        let schedule = &self.schedule;
        let input = &call.input;
        let text = |name: &str| input.text(name);
        let (when, columns) = DefinitionWrite::when(input)?;
        let priority = input.int(PRIORITY).unwrap_or(0);
        if priority >= schedule.priorities {
            return Err(field_error(PRIORITY, &format!("there are {} priorities", schedule.priorities)));
        }
        let payload = input.json(PAYLOAD);
        check_size(PAYLOAD, &payload)?;
        let overlap = text(OVERLAP).unwrap_or("allow");
        let before = schedule.definition(cx.store, &call.tenant, definition_id).await?;
        let key = [definition_id.into()];
        let mut step = match &before {
            Some(row) => Step::update(&schedule.definitions, key).guard(Guard::version(row.version())),
            None if call.expected.is_some() => return Err(self.missing(definition_id)),
            None => Step::insert(&schedule.definitions, key),
        };
        if let (Some(Expected::Version(expected)), Some(row)) = (call.expected, &before)
            && row.version() != expected
        {
            return Err(self.conflict(row)?);
        }
        for (name, value) in columns {
            step = step.set(name, value);
        }
        let attempts = input.value_or_null(ATTEMPTS_MAX);
        let step = step
            .set(STATUS, ACTIVE)
            .set(QUEUE, text(QUEUE).unwrap_or(QUEUE_DEFAULT))
            .set(PRIORITY, priority)
            .set(ATTEMPTS_MAX, attempts)
            .set(PAYLOAD, document(&payload))
            .set(MISSED, text(MISSED).unwrap_or("once"))
            .set(OVERLAP, overlap)
            .set(REVISION, Expr::Add(Operand::Coalesce(REVISION.to_owned(), 0.into()), value(1)))
            .set(UPDATED_AT, now());
        let at = cx.clock.now();
        let Some(step) = schedule.begun(step, &call.tenant, definition_id, &when, at, overlap) else {
            return Err(field_error(&format!("{WHEN}/{CRON}"), "it is never due"));
        };
        let mut steps = vec![step];
        if let Some(row) = &before {
            steps.extend(schedule.withdraw(cx, row).await?);
        }
        Ok(self.parts(cx, definition_id, steps, "created"))
    }

    async fn change(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        definition_id: &str,
    ) -> Result<Prepared, Refusal> {
        let schedule = &self.schedule;
        let row = schedule.definition(cx.store, &call.tenant, definition_id).await?;
        let row = row.filter(|row| row.text(STATUS) != Some(DELETED));
        let row = row.ok_or_else(|| self.missing(definition_id))?;
        if let Some(Expected::Version(expected)) = call.expected
            && row.version() != expected
        {
            return Err(self.conflict(&row)?);
        }
        if self.verb == DefinitionVerb::Run {
            let at = cx.clock.now();
            let job_id = format!("{definition_id}@run-{}", cx.ids.next());
            let wanted = JobInput { when: now().into(), ..wanted(&row, at)? };
            let place = match &wanted.order_key {
                Some(key) => Some(schedule.take_ticket(cx.store, cx.ids, &call.tenant, key).await?),
                None => None,
            };
            let mut steps = schedule.stored(&call.tenant, &job_id, &wanted, place.as_ref());
            let there = Step::assert(&schedule.definitions, [definition_id.into()]);
            steps.push(there.guard(Guard::version(row.version())));
            let event = EventTemplate::named(format!("{}.enqueued", schedule.name)).with_row_of(0);
            let parts = PlanParts::new(key_text([&Value::from(job_id)]), steps, event);
            return Ok(parts.notify(&schedule.news).into());
        }
        let status = row.get_text(STATUS)?;
        let step = Step::update(&schedule.definitions, [definition_id.into()])
            .guard(Guard::version(row.version()))
            .set(REVISION, column(REVISION).add(1))
            .set(UPDATED_AT, now());
        let wrong = || {
            let message = format!("{} {definition_id} is {status}", schedule.definition_resource());
            Err(Refusal::new(Code::WrongState, message).at_version(Some(&row)))
        };
        let (step, what) = match (self.verb, status) {
            (DefinitionVerb::Pause, ACTIVE) => {
                (due::clear(step.set(STATUS, PAUSED).set(NEXT_TIME, Value::Null)), "paused")
            }
            (DefinitionVerb::Resume, PAUSED) => {
                let (at, overlap) = (cx.clock.now(), row.get_text(OVERLAP)?);
                // One that was for a time that has passed is due at once; what recurs goes on from now.
                let step = step.set(STATUS, ACTIVE);
                let when = when_of(&row)?;
                let begun = schedule.begun(step.clone(), &call.tenant, definition_id, &when, at, overlap);
                (begun.unwrap_or_else(|| due::clear(step.set(NEXT_TIME, Value::Null))), "resumed")
            }
            (DefinitionVerb::Delete, _) => {
                (due::clear(step.set(STATUS, DELETED).set(NEXT_TIME, Value::Null)), "deleted")
            }
            _ => return wrong(),
        };
        let mut steps = vec![step];
        steps.extend(schedule.withdraw(cx, &row).await?);
        Ok(self.parts(cx, definition_id, steps, what))
    }

    fn parts(&self, cx: &ActionContext<'_>, definition_id: &str, steps: Vec<Step>, what: &str) -> Prepared {
        let event =
            EventTemplate::named(format!("{}.{what}", self.schedule.definition_resource())).with_row_of(0);
        let due = steps.first().and_then(|step| due::wakeup(&self.schedule.maker(), step, cx.clock.now()));
        let parts = PlanParts::new(key_text([&Value::from(definition_id)]), steps, event);
        parts.wakeups(due).notify(&self.schedule.news).into()
    }

    fn conflict(&self, row: &Row) -> Result<Refusal, StoreError> {
        let message = format!(
            "{} {} is at version {}: read it again and decide anew",
            self.schedule.definition_resource(),
            row.get_text(DEFINITION_ID)?,
            row.version()
        );
        Ok(Refusal::new(Code::VersionConflict, message).at_version(Some(row)))
    }
}

#[async_trait]
impl Prepare for DefinitionWrite {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let definition_id = call.key_text()?;
        match self.verb {
            DefinitionVerb::Create => self.create(call, cx, definition_id).await,
            _ => self.change(call, cx, definition_id).await,
        }
    }

    fn refused(&self, _: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match refused.reason {
            // Another caller changed the definition, or a job of it, since it was read.
            Reason::Guard { .. } | Reason::Present | Reason::Absent => Verdict::Retry,
            _ => refused.standard(&format!("this {}", self.schedule.definition_resource())),
        }
    }
}
