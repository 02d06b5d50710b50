//! A list that also reads declared indexes and rows by their keys, around the list that an archetype declares.
//!
//! - L1. A call that gives only what the archetype's own list takes is read by it, as if there were no indexes.
//! - L2. Every filter that a call gives holds for every row of the answer: the index has it, or the call is refused.
//! - L3. Rows are shown as the archetype shows them. One that does not count as existing, or that is shown with another value
//!   than a filter says, is left out.
//! - L4. `fields` is applied after rules for end users have judged the whole rows.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse_store::{Address, Consistency, Row, Type};

use super::ListIndex;
use super::choose::{COMPARISONS, IndexRequest, query};
use crate::action::{Action, ActionContext, ActionHandler, Answer, Call, Code, Read, Refusal};
use crate::blueprint::nearest;
use crate::declare::table::TableDef;
use crate::form::{FieldError, Form, Property};
use crate::paging::{self, CURSOR, LIMIT};
use crate::resource::parse_key;

/// The order of the rows.
pub(super) const SORT: &str = "sort";
const FIELDS: &str = "fields";
const KEYS: &str = "keys";
/// Inputs of every list, which no column of an index can be called like.
pub(super) const INPUTS: [&str; 5] = [SORT, FIELDS, KEYS, LIMIT, CURSOR];
/// Keys in one call.
const KEYS_MAX: usize = 100;

/// What a list reads.
#[derive(Clone, Debug)]
pub(super) struct ListSource {
    pub resource: String,
    /// The section of the blueprint: `entity.tool`.
    pub section: String,
    /// The columns of a key; none if rows cannot be read by keys.
    pub key: Vec<(String, Type)>,
    pub def: Arc<TableDef>,
    pub indexes: Vec<ListIndex>,
}

/// The list of a resource that declares none: it has only indexes.
pub(super) struct NoList;

#[async_trait]
impl Read for NoList {
    async fn read(&self, _: &Call, _: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        Err(Refusal::new(Code::Internal, "a list without an index was read"))
    }
}

/// A list around the one that an archetype declares.
struct IndexedList {
    source: ListSource,
    /// The archetype's own list; `None` if it has none.
    own: Option<Arc<dyn Read>>,
    /// What the own list takes, and what it cannot do without.
    own_inputs: Vec<String>,
    needed: Vec<String>,
    /// Shows rows.
    shows: Option<Arc<dyn Read>>,
    /// What a row of the answer has.
    shown: Vec<String>,
}

/// Puts a list that reads indexes and keys around the handler of an action, and declares what it takes.
pub(super) fn wrap(action: &mut Action, source: ListSource, row_read: Option<Arc<dyn Read>>, has_list: bool) {
    let ActionHandler::Read(handler) = &action.handler else { return };
    let own = has_list.then(|| handler.clone());
    let is_paging = |property: &Property| [LIMIT, CURSOR].contains(&property.name.as_str());
    let (paging, mut inputs): (Vec<Property>, Vec<Property>) =
        std::mem::take(&mut action.input).into_iter().partition(is_paging);
    let own_inputs = inputs.iter().map(|property| property.name.clone()).collect();
    let needed: Vec<String> =
        inputs.iter().filter(|property| property.required).map(|property| property.name.clone()).collect();
    for property in inputs.iter_mut().filter(|property| property.required) {
        property.required = false;
        let others =
            if source.indexes.is_empty() { "`keys` are" } else { "`keys` or columns of an index are" };
        let about = if property.about.is_empty() { String::new() } else { format!("{}; ", property.about) };
        property.about = format!("{about}needed unless {others} given");
    }
    for property in properties(&source) {
        if !inputs.iter().any(|known| known.name == property.name) {
            inputs.push(property);
        }
    }
    action.input = inputs.into_iter().chain(paging).collect();
    if has_list && !source.indexes.is_empty() {
        action.mechanism = format!("{}; or on a declared index", action.mechanism).into();
    }
    let shown = match &action.output {
        Form::List(item) => match &**item {
            Form::Object(properties) => properties.iter().map(|property| property.name.clone()).collect(),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    };
    let shows = own.clone().or(row_read);
    action.handler =
        ActionHandler::Read(Arc::new(IndexedList { source, own, own_inputs, needed, shows, shown }));
}

/// What a list takes besides its own inputs.
fn properties(source: &ListSource) -> Vec<Property> {
    let mut properties: Vec<Property> = Vec::new();
    let mut add = |property: Property| {
        if !properties.iter().any(|known| known.name == property.name) {
            properties.push(property);
        }
    };
    let columns = || source.indexes.iter().flat_map(|index| index.columns.iter().skip(index.fixed));
    for name in source.indexes.iter().flat_map(|index| &index.columns) {
        add(Property::optional(name, filter_form(&source.def, name), "which rows, by an index"));
    }
    for name in columns() {
        for (comparison, about) in COMPARISONS {
            let form = Form::Value(source.def.table().type_of(name).unwrap_or(Type::Text));
            add(Property::optional(
                &format!("{name}.{comparison}"),
                form,
                &format!("rows with {name} {about} this"),
            ));
        }
    }
    if let Some(first) = columns().next() {
        let about = "the column that orders the rows, with `-` for the greatest first; as the index says if not given";
        let sort = Property::optional(SORT, Form::Value(Type::Text), about);
        add(sort.example(format!("-{first}").into()));
    }
    if !source.key.is_empty() {
        let names: Vec<&str> = source.key.iter().map(|(name, _)| name.as_str()).collect();
        let about =
            format!("the rows with these keys, up to {KEYS_MAX}: {} of each, with commas", names.join(","));
        add(Property::optional(KEYS, Form::Value(Type::Text), &about));
    }
    let about = "what to show of each row, with commas; everything if not given";
    add(Property::optional(FIELDS, Form::Value(Type::Text), about));
    properties
}

/// The form of a filter by equality.
fn filter_form(def: &TableDef, name: &str) -> Form {
    let column = def.columns().iter().find(|known| known.column.name == name);
    let declared = column.and_then(|known| known.form.clone()).filter(|form| form.kind().is_some());
    declared.unwrap_or_else(|| Form::Value(column.map_or(Type::Text, |known| known.column.kind)))
}

#[async_trait]
impl Read for IndexedList {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        self.check_fields(call)?;
        if let Some(keys) = call.input.text(KEYS).filter(|_| !self.is_own_input(KEYS)) {
            return self.by_keys(keys, call, cx).await;
        }
        let filters = || call.input.names().filter(|name| ![LIMIT, CURSOR, FIELDS].contains(name));
        let missing: Vec<&String> = self.needed.iter().filter(|name| !call.input.has(name)).collect();
        let is_own = filters().all(|name| self.is_own_input(name));
        match &self.own {
            Some(own) if is_own && missing.is_empty() => return own.read(call, cx).await,
            _ => {}
        }
        let request = IndexRequest::of_call(call, &self.source.def);
        let Some((index, prefix)) = request.choose(&self.source) else {
            return Err(self.unserved(&request, is_own, &missing, call));
        };
        if let Some(other) = filters().find(|name| !self.is_index_input(name)) {
            return Err(Refusal::field(other, "it does not go with the filters of an index"));
        }
        let query = query(&self.source, index, prefix, &request, call)?;
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        let rows = self.shown_rows(page.rows, &request.equal, call, cx).await?;
        Ok(Arc::new(paging::answer(rows, page.next)))
    }

    fn project(&self, call: &Call, answer: Arc<Answer>) -> Arc<Answer> {
        let Some(names) = self.fields(call) else { return answer };
        let Json::Array(rows) = &answer.body else { return answer };
        let projected = rows.iter().map(|row| {
            let member = |name: &&str| Some(((*name).to_owned(), row.get(name)?.clone()));
            Json::Object(names.iter().filter_map(member).collect())
        });
        let body = Json::Array(projected.collect());
        Arc::new(Answer { body, ..(*answer).clone() })
    }

    fn undeclared(&self, name: &str, fields: &Map<String, Json>) -> Option<String> {
        let request = IndexRequest::of_fields(fields, &self.source.def);
        let column = name.rsplit_once('.').map_or(name, |(column, _)| column);
        let is_asked = request.equal.iter().chain(&request.ranged).any(|known| known == column);
        match name == SORT {
            true => Some(self.unknown_sort(&request).unwrap_or_else(|| request.advice(&self.source))),
            false => is_asked.then(|| request.advice(&self.source)),
        }
    }
}

impl IndexedList {
    fn is_own_input(&self, name: &str) -> bool {
        self.own_inputs.iter().any(|own| own == name)
    }

    /// Whether the read of an index uses an input.
    fn is_index_input(&self, name: &str) -> bool {
        let column = name.rsplit_once('.').map_or(name, |(column, _)| column);
        name == SORT || self.source.def.columns().iter().any(|known| known.column.name == column)
    }

    /// The refusal of a call that neither an index nor the own list serves.
    fn unserved(&self, request: &IndexRequest, is_own: bool, missing: &[&String], call: &Call) -> Refusal {
        if is_own && !missing.is_empty() {
            let error =
                |name: &&String| FieldError { pointer: format!("/{name}"), detail: "it is required".into() };
            return Refusal::invalid(missing.iter().map(error).collect());
        }
        if is_own {
            let first = self.source.indexes.iter().filter_map(|index| index.columns.first());
            let first: Vec<&str> = first.map(String::as_str).collect();
            return Refusal::new(Code::InvalidInput, format!("say which rows: give {}", first.join(" or ")));
        }
        let detail = self.unknown_sort(request).unwrap_or_else(|| request.advice(&self.source));
        let is_filter = |name: &&str| ![LIMIT, CURSOR, FIELDS].contains(name) && !self.is_own_input(name);
        Refusal::field(call.input.names().find(is_filter).unwrap_or(SORT), detail)
    }

    /// What is wrong with an order by something that is no column.
    fn unknown_sort(&self, request: &IndexRequest) -> Option<String> {
        let (column, _) = request.sort.as_ref()?;
        let names = self.shown.iter().map(String::as_str);
        let columns = self.source.def.columns();
        if columns.iter().any(|known| known.column.name == *column && !known.hidden) {
            return None;
        }
        let advice = nearest(column, names).map(|near| format!("; did you mean {near}?")).unwrap_or_default();
        Some(format!("there is no column {column}{advice}"))
    }

    /// The names in `fields`.
    fn fields<'c>(&self, call: &'c Call) -> Option<Vec<&'c str>> {
        let text = call.input.text(FIELDS).filter(|_| !self.is_own_input(FIELDS))?;
        Some(text.split(',').map(str::trim).collect())
    }

    fn check_fields(&self, call: &Call) -> Result<(), Refusal> {
        for name in self.fields(call).unwrap_or_default() {
            if !self.shown.iter().any(|known| known == name) {
                let advice = match nearest(name, self.shown.iter().map(String::as_str)) {
                    Some(near) => format!("did you mean {near}?"),
                    None => format!("there are {}", self.shown.join(", ")),
                };
                return Err(Refusal::field(FIELDS, format!("there is no field {name:?}; {advice}")));
            }
        }
        Ok(())
    }

    /// The rows with these keys, in the order of the keys. One that is not there is left out.
    async fn by_keys(&self, text: &str, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let ListSource { resource, key, def, .. } = &self.source;
        let state = def.states().map(|(column, _)| column);
        let goes_along = |name: &&str| [KEYS, FIELDS].contains(name) || Some(*name) == state;
        if let Some(other) = call.input.names().find(|name| !goes_along(name)) {
            return Err(Refusal::field(other, "it does not go with `keys`"));
        }
        let parts: Vec<&str> = text.split(',').collect();
        let mut addresses: Vec<Address> = Vec::new();
        for parts in parts.chunks(key.len().max(1)) {
            let parsed = parse_key(resource, key, &parts.join(","));
            let parsed = parsed.map_err(|refusal| {
                let why =
                    refusal.field_errors.into_iter().next().map(|error| error.detail).unwrap_or_default();
                Refusal::field(KEYS, why)
            })?;
            let address = Address::new(def.table(), &call.tenant, parsed)?;
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.len() > KEYS_MAX {
            let detail = format!("there are {} keys; the limit is {KEYS_MAX}", addresses.len());
            return Err(Refusal::field(KEYS, detail));
        }
        let rows = cx.store.get(&addresses, Consistency::Strong).await?.into_iter().flatten().collect();
        let rows = self.shown_rows(rows, &[], call, cx).await?;
        Ok(Arc::new(paging::answer(rows, None)))
    }

    /// Rows as they are shown (L3).
    async fn shown_rows(
        &self,
        mut rows: Vec<Row>,
        equal: &[String],
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Vec<Json>, Refusal> {
        let def = &self.source.def;
        if let Some((state, _)) = def.states() {
            let wanted = call.input.text(state);
            rows.retain(|row| match (row.text(state), wanted) {
                (found, Some(wanted)) => found == Some(wanted),
                (Some(found), None) => {
                    def.live_states().is_empty() || def.live_states().iter().any(|live| *live == found)
                }
                (None, None) => false,
            });
        }
        let shown = match &self.shows {
            Some(shows) => shows.show(&rows, call, cx).await?,
            None => None,
        };
        let shown = shown.unwrap_or_else(|| rows.iter().map(|row| Some(def.row_json(row))).collect());
        let holds = |row: &Json| {
            equal.iter().all(|name| {
                let given = call.input.value(name).map(statehouse_store::Value::to_json);
                row.get(name) == given.as_ref()
            })
        };
        Ok(shown.into_iter().flatten().filter(holds).collect())
    }
}
