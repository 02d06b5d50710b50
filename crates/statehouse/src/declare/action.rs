//! Actions as archetypes declare them. The kind gives route, shape, mechanism and the usual refusal codes; a declaration
//! states only what differs.

use std::borrow::Cow;
use std::sync::Arc;

use statehouse_store::{Event, StoreError};

use super::combine::{Combine, Combiner, Combining};
use super::read::{IndexList, RowRead};
use super::table::TableDef;
use crate::action::{
    Action, ActionHandler, Answer, AnswerFrom, Call, Code, ForEach, Method, MultiPlan, Prepare, Read, Route,
    RouteKind, WAIT, WriteHandler,
};
use crate::form::{Form, Property};
use crate::paging;
use crate::resource::state_name;

/// An action being declared. `{name}` in its summary is the name of the resource.
#[derive(Clone)]
pub struct ActionSpec {
    name: Cow<'static, str>,
    summary: Cow<'static, str>,
    shape: &'static str,
    mechanism: Cow<'static, str>,
    route: Route,
    input: Vec<Property>,
    output: ActionOutput,
    codes: Vec<Code>,
    needs_version: bool,
    is_restricted: bool,
    scope: Option<Box<str>>,
    answers: &'static [&'static str],
    after: Vec<String>,
    target: Option<String>,
    handler: Option<HandlerSpec>,
    answer: Option<AnswerFrom>,
    creates: bool,
}

/// What performs the action, before the source of its answer is known.
#[derive(Clone)]
enum HandlerSpec {
    Prepare(Arc<dyn Prepare>),
    Combine(Arc<dyn Prepare>, Arc<dyn Combiner>),
    Other(ActionHandler),
}

#[derive(Clone)]
enum ActionOutput {
    Row,
    Rows(Option<Form>),
    Other(Form),
}

impl ActionSpec {
    fn kind(
        name: impl Into<Cow<'static, str>>,
        summary: impl Into<Cow<'static, str>>,
        (method, place): (Method, RouteKind),
        shape: &'static str,
        mechanism: &'static str,
        codes: &[Code],
    ) -> ActionSpec {
        ActionSpec {
            name: name.into(),
            summary: summary.into(),
            shape,
            mechanism: mechanism.into(),
            route: Route { method, kind: place },
            input: Vec::new(),
            output: ActionOutput::Row,
            codes: codes.to_vec(),
            needs_version: false,
            is_restricted: false,
            scope: None,
            answers: &[],
            after: Vec::new(),
            target: None,
            handler: None,
            answer: None,
            creates: false,
        }
    }

    /// Inserts a row: `POST /v1/NAME`.
    pub fn create(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let route = (Method::Post, RouteKind::Collection);
        let codes = [Code::AlreadyExists];
        let action = ActionSpec::kind(name, summary, route, "create target", "insert/create", &codes);
        ActionSpec { creates: true, ..action }
    }

    /// Writes a row whether it exists or not: `PUT /v1/NAME/KEY`.
    pub fn put(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let route = (Method::Put, RouteKind::Item);
        ActionSpec::kind(name, summary, route, "overwrite", "upsert", &[Code::VersionConflict])
    }

    /// Changes fields of a row that exists: `PATCH /v1/NAME/KEY`.
    pub fn patch(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Patch, RouteKind::Item), "guarded conditional update");
        let codes = [Code::NotFound, Code::VersionConflict];
        ActionSpec::kind(name, summary, route, "overwrite", mechanism, &codes)
    }

    /// Takes a row from one state to another: `POST /v1/NAME/KEY/ACTION`.
    pub fn transition(
        name: impl Into<Cow<'static, str>>,
        summary: impl Into<Cow<'static, str>>,
    ) -> ActionSpec {
        let (route, mechanism) = ((Method::Post, RouteKind::ItemAction), "guarded conditional update");
        let codes = [Code::NotFound, Code::WrongState];
        ActionSpec::kind(name, summary, route, "state transition", mechanism, &codes)
    }

    /// Ends a row: `DELETE /v1/NAME/KEY`.
    pub fn delete(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let route = Route { method: Method::Delete, kind: RouteKind::Item };
        ActionSpec { route, ..ActionSpec::transition(name, summary) }
    }

    /// Writes nothing and is refused unless a condition holds: for batches.
    pub fn check(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Post, RouteKind::ItemAction), "assertion in the plan");
        ActionSpec::kind(name, summary, route, "assert", mechanism, &[Code::NotFound])
    }

    /// Reads a row: `GET /v1/NAME/KEY`.
    pub fn read(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Get, RouteKind::Item), "strong read by key");
        ActionSpec::kind(name, summary, route, "read source", mechanism, &[Code::NotFound])
    }

    /// Lists rows page by page: `GET /v1/NAME`. `limit` and `cursor` follow the inputs that are declared.
    pub fn list(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Get, RouteKind::Collection), "range read on an index");
        let output = ActionOutput::Rows(None);
        ActionSpec { output, ..ActionSpec::kind(name, summary, route, "read source", mechanism, &[]) }
    }

    /// The same under another name, which is also its path.
    #[must_use]
    pub fn named(mut self, name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        self.name = name.into();
        self.summary = summary.into();
        self
    }

    /// Another method or place than the kind has.
    #[must_use]
    pub fn on(mut self, method: Method, place: RouteKind) -> ActionSpec {
        self.route = Route { method, kind: place };
        self
    }

    /// Another shape than the kind has.
    #[must_use]
    pub fn shape(mut self, shape: &'static str) -> ActionSpec {
        self.shape = shape;
        self
    }

    /// How it is kept right, if the kind does not say it well enough.
    #[must_use]
    pub fn mechanism(mut self, mechanism: impl Into<Cow<'static, str>>) -> ActionSpec {
        self.mechanism = mechanism.into();
        self
    }

    /// The state it works on, if that is not the resource's.
    #[must_use]
    pub fn target(mut self, target: impl Into<String>) -> ActionSpec {
        self.target = Some(target.into());
        self
    }

    /// What it takes, apart from the key.
    #[must_use]
    pub fn takes(mut self, input: impl IntoIterator<Item = Property>) -> ActionSpec {
        self.input.extend(input);
        self
    }

    /// What it gives, if not a row (a list of rows, for a list).
    #[must_use]
    pub fn gives(mut self, output: Form) -> ActionSpec {
        self.output = ActionOutput::Other(output);
        self
    }

    /// The rows that a list gives, if they are not as the table says.
    #[must_use]
    pub fn gives_rows(mut self, row: Form) -> ActionSpec {
        self.output = ActionOutput::Rows(Some(row));
        self
    }

    /// The codes it can be refused with, instead of those of its kind.
    #[must_use]
    pub fn codes(mut self, codes: &[Code]) -> ActionSpec {
        self.codes = codes.to_vec();
        self
    }

    /// One more code that it can be refused with.
    #[must_use]
    pub fn code(mut self, code: Code) -> ActionSpec {
        if !self.codes.contains(&code) {
            self.codes.push(code);
        }
        self
    }

    /// The caller has to say which version it has seen.
    #[must_use]
    pub fn needs_version(mut self, needs_version: bool) -> ActionSpec {
        self.needs_version = needs_version;
        self
    }

    /// The scope `write` is not enough for it: a credential needs `admin`, or a scope that names the action.
    #[must_use]
    pub fn restricted(mut self) -> ActionSpec {
        self.is_restricted = true;
        self
    }

    /// The scope `write` is not enough for it: a credential needs this one, or `admin`, or a scope that names the action.
    #[must_use]
    pub fn scope(mut self, scope: Option<String>) -> ActionSpec {
        self.is_restricted |= scope.is_some();
        self.scope = scope.map(String::into_boxed_str);
        self
    }

    /// The failures of the atlas that it handles.
    #[must_use]
    pub fn answers(mut self, failures: &'static [&'static str]) -> ActionSpec {
        self.answers = failures;
        self
    }

    /// Actions that bring an empty store to a state in which this one can be done, in order: of this resource, or of
    /// another by their full names.
    #[must_use]
    pub fn after<'n>(mut self, actions: impl IntoIterator<Item = &'n str>) -> ActionSpec {
        self.after = actions.into_iter().map(str::to_owned).collect();
        self
    }

    /// It is done by one plan. Unless another answer is declared, it answers with the row in its event, and a kind that
    /// creates a row also with the key.
    #[must_use]
    pub fn writes(mut self, prepare: impl Prepare + 'static) -> ActionSpec {
        self.handler = Some(HandlerSpec::Prepare(Arc::new(prepare)));
        self
    }

    /// Concurrent calls of one row are judged one after the other in memory and written as one plan.
    #[must_use]
    pub fn combines(mut self, rules: impl Combine) -> ActionSpec {
        let combining = Arc::new(Combining(rules));
        let answers = combining.clone();
        self.handler = Some(HandlerSpec::Combine(combining.clone(), combining));
        self.try_answer_with(move |call, _, event| answers.0.answer_alone(call, event))
    }

    /// Its answer is made by this function from the call, the key of the row and the event.
    #[must_use]
    pub fn answer_with(
        self,
        answer: impl Fn(&Call, &str, &mut Event) -> Answer + Send + Sync + 'static,
    ) -> ActionSpec {
        self.try_answer_with(move |call, key, event| Ok(answer(call, key, event)))
    }

    /// The same, for an answer that needs values which the event may lack only if the log is damaged.
    #[must_use]
    pub fn try_answer_with(
        mut self,
        answer: impl Fn(&Call, &str, &mut Event) -> Result<Answer, StoreError> + Send + Sync + 'static,
    ) -> ActionSpec {
        self.answer = Some(AnswerFrom::With(Arc::new(answer)));
        self
    }

    /// Its answer is the row of another table than the resource's.
    #[must_use]
    pub fn answer_row_of(mut self, def: &TableDef) -> ActionSpec {
        self.answer = Some(AnswerFrom::Row(def.hidden().to_vec()));
        self
    }

    /// It creates a row, whatever its kind: the answer names the key.
    #[must_use]
    pub fn creates(mut self, creates: bool) -> ActionSpec {
        self.creates = creates;
        self
    }

    /// It is done by several plans, each decided by itself.
    #[must_use]
    pub fn writes_several(self, multi: impl MultiPlan + 'static) -> ActionSpec {
        self.handler(ActionHandler::MultiPlan(Arc::new(multi)))
    }

    /// It calls another action for each item of a list.
    #[must_use]
    pub fn for_each(self, each: ForEach) -> ActionSpec {
        self.handler(ActionHandler::ForEach(each))
    }

    /// It reads.
    #[must_use]
    pub fn reads(self, read: impl Read + 'static) -> ActionSpec {
        self.handler(ActionHandler::Read(Arc::new(read)))
    }

    /// It reads the row with the key of the call.
    #[must_use]
    pub fn reads_row(self, read: RowRead) -> ActionSpec {
        self.reads(read)
    }

    /// It lists rows by an index, and takes the filters that the index needs.
    #[must_use]
    pub fn reads_index(self, list: IndexList) -> ActionSpec {
        let filters = list.properties();
        self.takes(filters).reads(list)
    }

    /// What does it.
    #[must_use]
    pub fn handler(mut self, handler: ActionHandler) -> ActionSpec {
        self.handler = Some(HandlerSpec::Other(handler));
        self
    }

    /// Its name.
    pub(super) fn name(&self) -> Cow<'static, str> {
        self.name.clone()
    }

    /// The inputs that are declared.
    pub(super) fn inputs(&self) -> &[Property] {
        &self.input
    }

    /// Whether it reads the row with the key of a call.
    pub(super) fn is_row_read(&self) -> bool {
        self.route == Route { method: Method::Get, kind: RouteKind::Item }
    }

    /// What comes before it.
    pub(super) fn comes_after(&self) -> &[String] {
        &self.after
    }

    /// Whether it is said what comes before it.
    pub(super) fn has_after(&self) -> bool {
        !self.after.is_empty()
    }

    /// The action of a resource, whose rows have this definition if they are answered. `None` if nothing does it.
    pub(super) fn build(self, resource: &str, def: Option<&TableDef>) -> Option<Action> {
        let row = || def.map_or(Form::Any, TableDef::row_form);
        let hidden = def.map(|def| def.hidden().to_vec()).unwrap_or_default();
        let is_list = matches!(self.output, ActionOutput::Rows(_));
        let full = |action: String| match action.contains('.') || action == WAIT {
            true => action,
            false => format!("{resource}.{action}"),
        };
        let is_plan = matches!(self.handler, Some(HandlerSpec::Prepare(_) | HandlerSpec::Combine(..)));
        let is_on_row = self.route.kind != RouteKind::Collection;
        let condition = (is_plan && is_on_row && def.is_some()).then_some(Code::ConditionFailed);
        let condition = condition.filter(|code| !self.codes.contains(code));
        let paging = is_list.then(paging::properties).into_iter().flatten();
        Some(Action {
            name: self.name,
            summary: self.summary.replace("{name}", resource),
            target: self.target.unwrap_or_else(|| state_name(resource)),
            shape: self.shape,
            mechanism: self.mechanism,
            route: self.route,
            input: self.input.into_iter().chain(paging).collect(),
            output: match self.output {
                ActionOutput::Row => row(),
                ActionOutput::Rows(other) => Form::List(Box::new(other.unwrap_or_else(row))),
                ActionOutput::Other(form) => form,
            },
            refusals: self.codes.into_iter().chain(condition).collect(),
            needs_version: self.needs_version,
            is_restricted: self.is_restricted,
            scope: self.scope,
            answers: self.answers,
            after: self.after.into_iter().map(full).collect(),
            handler: {
                let (prepare, combiner) = match self.handler? {
                    HandlerSpec::Other(handler) => (Err(handler), None),
                    HandlerSpec::Prepare(prepare) => (Ok(prepare), None),
                    HandlerSpec::Combine(prepare, combiner) => (Ok(prepare), Some(combiner)),
                };
                let row = if self.creates { AnswerFrom::Created(hidden) } else { AnswerFrom::Row(hidden) };
                let answer = self.answer.unwrap_or(row);
                match prepare {
                    Ok(prepare) => ActionHandler::Write(WriteHandler { prepare, answer, combiner }),
                    Err(handler) => handler,
                }
            },
        })
    }
}
