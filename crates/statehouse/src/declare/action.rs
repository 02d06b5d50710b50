//! Actions as archetypes declare them. The kind gives route, shape, mechanism and the usual refusal codes; a declaration
//! states only what differs.

use std::borrow::Cow;
use std::sync::Arc;

use super::read::{IndexList, RowRead};
use super::table::TableDef;
use crate::action::{Action, Code, Does, Each, Method, Place, Read, Route, Several, WAIT, Write};
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
    output: Output,
    codes: Vec<Code>,
    needs_version: bool,
    answers: &'static [&'static str],
    after: Vec<String>,
    target: Option<String>,
    handler: Option<Does>,
}

#[derive(Clone)]
enum Output {
    Row,
    Rows(Option<Form>),
    Other(Form),
}

impl ActionSpec {
    fn kind(
        name: impl Into<Cow<'static, str>>,
        summary: impl Into<Cow<'static, str>>,
        (method, place): (Method, Place),
        shape: &'static str,
        mechanism: &'static str,
        codes: &[Code],
    ) -> ActionSpec {
        ActionSpec {
            name: name.into(),
            summary: summary.into(),
            shape,
            mechanism: mechanism.into(),
            route: Route { method, place },
            input: Vec::new(),
            output: Output::Row,
            codes: codes.to_vec(),
            needs_version: false,
            answers: &[],
            after: Vec::new(),
            target: None,
            handler: None,
        }
    }

    /// Inserts a row: `POST /v1/NAME`.
    pub fn create(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let route = (Method::Post, Place::Collection);
        ActionSpec::kind(name, summary, route, "create target", "insert/create", &[Code::AlreadyExists])
    }

    /// Writes a row whether it exists or not: `PUT /v1/NAME/KEY`.
    pub fn put(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let route = (Method::Put, Place::Item);
        ActionSpec::kind(name, summary, route, "overwrite", "upsert", &[Code::VersionConflict])
    }

    /// Changes fields of a row that exists: `PATCH /v1/NAME/KEY`.
    pub fn patch(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Patch, Place::Item), "guarded conditional update");
        let codes = [Code::NotFound, Code::VersionConflict];
        ActionSpec::kind(name, summary, route, "overwrite", mechanism, &codes)
    }

    /// Takes a row from one state to another: `POST /v1/NAME/KEY/ACTION`.
    pub fn transition(
        name: impl Into<Cow<'static, str>>,
        summary: impl Into<Cow<'static, str>>,
    ) -> ActionSpec {
        let (route, mechanism) = ((Method::Post, Place::ItemAction), "guarded conditional update");
        let codes = [Code::NotFound, Code::WrongState];
        ActionSpec::kind(name, summary, route, "state transition", mechanism, &codes)
    }

    /// Ends a row: `DELETE /v1/NAME/KEY`.
    pub fn delete(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let route = Route { method: Method::Delete, place: Place::Item };
        ActionSpec { route, ..ActionSpec::transition(name, summary) }
    }

    /// Writes nothing and is refused unless a condition holds: for batches.
    pub fn check(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Post, Place::ItemAction), "assertion in the plan");
        ActionSpec::kind(name, summary, route, "assert", mechanism, &[Code::NotFound])
    }

    /// Reads a row: `GET /v1/NAME/KEY`.
    pub fn read(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Get, Place::Item), "strong read by key");
        ActionSpec::kind(name, summary, route, "read source", mechanism, &[Code::NotFound])
    }

    /// Lists rows page by page: `GET /v1/NAME`. `limit` and `cursor` follow the inputs that are declared.
    pub fn list(name: &'static str, summary: impl Into<Cow<'static, str>>) -> ActionSpec {
        let (route, mechanism) = ((Method::Get, Place::Collection), "range read on an index");
        let output = Output::Rows(None);
        ActionSpec { output, ..ActionSpec::kind(name, summary, route, "read source", mechanism, &[]) }
    }

    /// Another method or place than the kind has.
    #[must_use]
    pub fn on(mut self, method: Method, place: Place) -> ActionSpec {
        self.route = Route { method, place };
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
        self.output = Output::Other(output);
        self
    }

    /// The rows that a list gives, if they are not as the table says.
    #[must_use]
    pub fn gives_rows(mut self, row: Form) -> ActionSpec {
        self.output = Output::Rows(Some(row));
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

    /// It is done by one plan.
    #[must_use]
    pub fn writes(self, write: impl Write + 'static) -> ActionSpec {
        self.handler(Does::Write(Arc::new(write)))
    }

    /// It is done by several plans, each decided by itself.
    #[must_use]
    pub fn writes_several(self, several: impl Several + 'static) -> ActionSpec {
        self.handler(Does::Several(Arc::new(several)))
    }

    /// It calls another action for each item of a list.
    #[must_use]
    pub fn for_each(self, each: Each) -> ActionSpec {
        self.handler(Does::Each(each))
    }

    /// It reads.
    #[must_use]
    pub fn reads(self, read: impl Read + 'static) -> ActionSpec {
        self.handler(Does::Read(Arc::new(read)))
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
    pub fn handler(mut self, handler: Does) -> ActionSpec {
        self.handler = Some(handler);
        self
    }

    /// The action of a resource, whose rows have this definition if they are answered. `None` if nothing does it.
    pub(super) fn build(self, resource: &str, def: Option<&TableDef>) -> Option<Action> {
        let row = || def.map_or(Form::Any, TableDef::row_form);
        let is_list = matches!(self.output, Output::Rows(_));
        let full = |action: String| match action.contains('.') || action == WAIT {
            true => action,
            false => format!("{resource}.{action}"),
        };
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
                Output::Row => row(),
                Output::Rows(other) => Form::List(Box::new(other.unwrap_or_else(row))),
                Output::Other(form) => form,
            },
            refusals: self.codes,
            needs_version: self.needs_version,
            answers: self.answers,
            after: self.after.into_iter().map(full).collect(),
            does: self.handler?,
        })
    }
}
