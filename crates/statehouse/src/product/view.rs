//! A05 Derived projection, as a view: counts, sums, extremes and the latest of a resource's rows, by group.
//!
//! ```text
//!   source rows (truth) ──► log ──► entries ──► totals by group
//!                                      └──────► rows in order, for min, max and latest
//! ```
//!
//! **Rows.** `profiles_by_status(tenant, generation, group_key, group columns…, members, sum_…, version)`: one for each group.
//! `profiles_by_status_entries`: what each source row counts for. `profiles_by_status_order(tenant, generation, group_key,
//! field, rank, source, value, version)`: the values of a group in their order, so that a minimum is right after the row
//! that had it is gone.
//!
//! **Invariants.** Those of [`crate::infra::projection`], and:
//! - V1. A group's totals are the sums over its entries. *Whatever changes an entry takes its old share away and adds the new
//!   one, in one plan, by adding to the totals and not by writing them.*
//! - V2. A minimum, maximum or latest is that of an entry that is there. *It is the first or last of rows in order, which come
//!   and go with their entries in one plan.*
//! - V3. A deleted row counts nowhere. *An entity's row counts while it is `ACTIVE`, unless the view groups by status.*
//!
//! **Failures.** *Stale projection*: the lag is known, and a read with `after`, the token of a write, waits for it. *Missing
//! entry*, *duplicate entry*: effect and progress are one plan, and the row's version counts once. *Tombstone not
//! propagated*: V3, and the pipeline's I3. *Expensive reindex after schema change*: another definition is built beside the live
//! one, which goes on serving. *Stale ranking after source update*: V2.
//!
//! **Hotspots.** *Fanout on write*, *expensive ranking/recompute*: a source row changes a bounded number of rows. *Projection
//! lag*, *rebuild cost*: the pipeline's. *Query fanout across shards*: a group is one row, and one more read for each extreme.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::{Address, Consistency, Query, Record, Row, Table, Tenant, Type, Value};

use crate::action::{Action, Answer, Call, Code, Desk, Does, Method, Place, Read, Refusal, Route};
use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::settings::Settings;
use crate::blueprint::{Blueprint, Thing};
use crate::form::{Form, Property};
use crate::infra::projection::{
    Change, Consult, Content, Delta, GENERATION, Projector, SOURCE, entries_table, fresh,
};
use crate::paging;
use crate::resource::{Consuming, Resource, key_text, state_name};

const GROUP_KEY: &str = "group_key";
const MEMBERS: &str = "members";
const FIELD: &str = "field";
const RANK: &str = "rank";
const VALUE: &str = "value";
const STATUS: &str = "status";
const ACTIVE: &str = "ACTIVE";
/// Bytes of a group's values, and of a source's key, that fit into the keys of the view's rows.
const KEY_BYTES_MAX: usize = 300;
/// The archetypes of which every write of a row is an event with that row.
const TOLD: [&str; 3] = ["entity", "lease", "timer"];

/// One declared view.
#[derive(Debug)]
struct View {
    name: String,
    of: String,
    source: Arc<Table>,
    totals: Arc<Table>,
    entries: Arc<Table>,
    order: Arc<Table>,
    group_by: Vec<(String, Type)>,
    count: bool,
    sum: Vec<String>,
    min: Vec<String>,
    max: Vec<String>,
    latest: Vec<String>,
    /// Whether only rows that are `ACTIVE` count.
    active_only: bool,
}

/// Reads `[view.NAME]`, over a resource that is declared elsewhere in the blueprint.
pub fn declare(
    thing: &Thing,
    _: &Blueprint,
    resources: &[Resource],
    problems: &mut Problems,
) -> Vec<Resource> {
    declare_view(thing, resources, problems).into_iter().collect()
}

fn declare_view(thing: &Thing, resources: &[Resource], problems: &mut Problems) -> Option<Resource> {
    let mut settings = thing.settings.clone();
    let of = settings.text("of", problems);
    let group_by = settings.texts("group_by", problems).unwrap_or_default();
    let [sum, min, max] =
        ["sum", "min", "max"].map(|name| settings.texts(name, problems).unwrap_or_default());
    let latest: Vec<String> = settings.text("latest", problems).into_iter().collect();
    let nothing_else = sum.is_empty() && min.is_empty() && max.is_empty() && latest.is_empty();
    let count = settings.bool("count", problems).unwrap_or(nothing_else);
    settings.finish(problems);
    let Some(of) = of else {
        let title = format!("`view.{}` does not say what it is of", thing.name);
        let advice = "name a resource: `of = \"profile\"`";
        problems.add(Problem::at(settings.span(), title).advice(advice));
        return None;
    };
    let before = problems.len();
    let told = |resource: &&Resource| resource.name == of && TOLD.contains(&resource.archetype.keyword());
    let Some(source) = resources.iter().find(told).and_then(|resource| resource.tables.first()) else {
        let title = format!("`{of}` is not a resource that a view can be of");
        let advice = format!("declare it as one of {}", TOLD.join(", "));
        problems.add(Problem::at(settings.span_of("of"), title).advice(advice));
        return None;
    };
    let numbers = [Type::Int, Type::Float, Type::Time];
    let groups = [Type::Text, Type::Int, Type::Bool, Type::Time];
    let lists: [(&'static str, &[String], &[Type]); 5] = [
        ("group_by", &group_by, &groups),
        ("sum", &sum, &[Type::Int]),
        ("min", &min, &numbers),
        ("max", &max, &numbers),
        ("latest", &latest, &numbers),
    ];
    for (setting, names, kinds) in lists {
        check_columns(&settings, setting, names, kinds, source, &of, problems);
    }
    if problems.len() > before {
        return None;
    }
    let kind = |name: &str| source.type_of(name).unwrap_or(Type::Text);
    let group_by: Vec<(String, Type)> = group_by.iter().map(|name| (name.clone(), kind(name))).collect();
    let tables = tables(&thing.name, &group_by, &sum, [&min, &max, &latest]);
    let [totals, entries, order] = match tables {
        Ok(tables) => tables,
        Err(why) => {
            problems.add(Problem::at(settings.span(), format!("`view.{}`: {why}", thing.name)));
            return None;
        }
    };
    let active_only = source.column(STATUS).is_some_and(|column| column.default == Some(ACTIVE.into()))
        && !group_by.iter().any(|(name, _)| name == STATUS);
    let source = source.clone();
    let view = Arc::new(View {
        name: thing.name.clone(),
        of,
        source,
        totals,
        entries,
        order,
        group_by,
        count,
        sum,
        min,
        max,
        latest,
        active_only,
    });
    Some(Resource {
        name: thing.name.clone(),
        archetype: thing.archetype,
        key: view.group_by.clone(),
        tables: view.tables(),
        actions: actions(&view),
        workers: Vec::new(),
        consumers: vec![Consuming::Projection(view)],
    })
}

/// Says which names are not columns of the source that can be used like this.
fn check_columns(
    settings: &Settings,
    setting: &'static str,
    names: &[String],
    kinds: &[Type],
    source: &Table,
    of: &str,
    problems: &mut Problems,
) {
    for name in names {
        let words: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let title = match source.column(name).map(|column| column.kind) {
            None => format!("`{of}` has no column `{name}` that a view can be made of"),
            Some(kind) if !kinds.contains(&kind) => {
                format!("`{name}` is {kind}; `{setting}` takes {}", words.join(", "))
            }
            Some(_) => continue,
        };
        problems.add(Problem::at(settings.span_of(setting), title));
    }
}

fn tables(
    name: &str,
    group_by: &[(String, Type)],
    sum: &[String],
    ordered: [&Vec<String>; 3],
) -> Result<[Arc<Table>; 3], String> {
    let mut totals = Table::named(name).partition(GENERATION, Type::Int).sort(GROUP_KEY, Type::Text);
    let mut entries = entries_table(&format!("{name}_entries")).optional(GROUP_KEY, Type::Text);
    for (column, kind) in group_by {
        totals = totals.optional(column, *kind);
        entries = entries.optional(&format!("by_{column}"), *kind);
    }
    totals = totals.defaulted(MEMBERS, Type::Int, 0);
    for column in sum {
        totals = totals.defaulted(&format!("sum_{column}"), Type::Int, 0);
        entries = entries.optional(&format!("sum_{column}"), Type::Int);
    }
    let mut ranked: Vec<&String> = ordered.into_iter().flatten().collect();
    ranked.sort();
    ranked.dedup();
    for column in ranked {
        entries = entries.optional(&format!("rank_{column}"), Type::Text);
    }
    let order = Table::named(format!("{name}_order"))
        .partition(GENERATION, Type::Int)
        .partition(GROUP_KEY, Type::Text)
        .partition(FIELD, Type::Text)
        .sort(RANK, Type::Text)
        .sort(SOURCE, Type::Text)
        .required(VALUE, Type::Json);
    let built = |table: statehouse_store::table::Builder| table.build().map_err(|error| error.why);
    Ok([built(totals)?, built(entries)?, built(order)?])
}

/// A number as text of the same order.
fn rank(value: &Value) -> Option<String> {
    let ordered = |bits: u64| format!("{bits:016x}");
    let signed = |number: i64| number.cast_unsigned() ^ (1 << 63);
    match value {
        Value::Int(number) => Some(ordered(signed(*number))),
        Value::Time(time) => Some(ordered(signed(time.micros()))),
        Value::Float(number) => {
            let bits = number.to_bits();
            Some(ordered(if bits >> 63 == 0 { bits ^ (1 << 63) } else { !bits }))
        }
        _ => None,
    }
}

/// A number from such text.
fn unranked(rank: &str, kind: Type) -> Value {
    let Ok(bits) = u64::from_str_radix(rank, 16) else { return Value::Null };
    let signed = (bits ^ (1 << 63)).cast_signed();
    match kind {
        Type::Int => signed.into(),
        Type::Time => statehouse_store::Time::from_micros(signed).into(),
        Type::Float => Value::Float(f64::from_bits(if bits >> 63 == 1 { bits ^ (1 << 63) } else { !bits })),
        _ => Value::Null,
    }
}

impl View {
    /// The fields whose values stand in order.
    fn ranked(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.min.iter().chain(&self.max).chain(&self.latest).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// What a source row means, whose columns are these.
    fn meaning(&self, get: &dyn Fn(&str) -> Value) -> Result<Option<Content>, String> {
        if self.active_only && get(STATUS) != Value::from(ACTIVE) {
            return Ok(None);
        }
        let mut content = Content::new();
        let groups: Vec<Value> = self.group_by.iter().map(|(name, _)| get(name)).collect();
        content.insert(GROUP_KEY.to_owned(), group_key(&groups)?.into());
        let named = self.group_by.iter().zip(groups);
        content.extend(named.map(|((name, _), value)| (format!("by_{name}"), value)));
        content.extend(self.sum.iter().map(|name| (format!("sum_{name}"), get(name))));
        let ranks = self.ranked().into_iter().filter_map(|name| Some((name, rank(&get(name))?)));
        content.extend(ranks.map(|(name, rank)| (format!("rank_{name}"), rank.into())));
        content.retain(|_, value| !value.is_null());
        Ok(Some(content))
    }

    fn source_key(&self, get: &dyn Fn(&str) -> Value) -> Result<String, String> {
        let key: Vec<Value> = self.source.key_columns().iter().map(|column| get(&column.name)).collect();
        let text = key_text(&key);
        if text.len() > KEY_BYTES_MAX {
            return Err(format!("its key has {} bytes; a view takes up to {KEY_BYTES_MAX}", text.len()));
        }
        Ok(text)
    }

    /// What an entry adds to its group; the opposite of it if it is taken away.
    fn total(&self, generation: i64, content: &Content, sign: i64) -> Delta {
        let int = |name: &str| content.get(name).and_then(Value::as_int).unwrap_or(0);
        let mut amounts = BTreeMap::from([(MEMBERS.to_owned(), sign)]);
        for name in &self.sum {
            let name = format!("sum_{name}");
            let amount = int(&name).saturating_mul(sign);
            amounts.insert(name, amount);
        }
        let columns = self.group_by.iter().map(|(name, _)| {
            (name.clone(), content.get(&format!("by_{name}")).cloned().unwrap_or(Value::Null))
        });
        let columns = columns.collect();
        Delta::Add {
            table: self.totals.clone(),
            key: vec![generation.into(), of_group(content)],
            amounts,
            columns,
        }
    }

    fn order_key(&self, generation: i64, content: &Content, field: &str, source: &str) -> Option<Vec<Value>> {
        let rank = content.get(&format!("rank_{field}"))?.clone();
        Some(vec![generation.into(), of_group(content), field.into(), rank, source.into()])
    }
}

fn of_group(content: &Content) -> Value {
    content.get(GROUP_KEY).cloned().unwrap_or_else(|| "[]".into())
}

/// The values of a group as text: the same values always give the same, others another.
fn group_key(values: &[Value]) -> Result<String, String> {
    let text = Json::Array(values.iter().map(Value::to_json).collect()).to_string();
    if text.len() > KEY_BYTES_MAX {
        return Err(format!(
            "the values of its group have {} bytes; a view takes up to {KEY_BYTES_MAX}",
            text.len()
        ));
    }
    Ok(text)
}

impl Projector for View {
    fn name(&self) -> &str {
        &self.name
    }

    fn definition(&self) -> String {
        let View { of, group_by, sum, active_only, .. } = self;
        let groups: Vec<String> = group_by.iter().map(|(name, kind)| format!("{name} {kind}")).collect();
        let (sums, ranks) = (sum.join(","), self.ranked().join(","));
        format!("of {of} by {} sum {sums} order {ranks} active_only {active_only}", groups.join(","))
    }

    fn source(&self) -> &Arc<Table> {
        &self.source
    }

    fn entries(&self) -> &Arc<Table> {
        &self.entries
    }

    fn tables(&self) -> Vec<Arc<Table>> {
        vec![self.totals.clone(), self.entries.clone(), self.order.clone()]
    }

    fn wants(&self, record: &Record) -> bool {
        record.events.iter().any(|event| event.name.split('.').next() == Some(&self.of))
    }

    fn changes(&self, record: &Record) -> Result<Vec<Change>, String> {
        let mut changes = Vec::new();
        for event in record.events.iter().filter(|event| event.name.split('.').next() == Some(&self.of)) {
            let Some(row) = event.data.get("row").and_then(Json::as_object) else { continue };
            // Events of what stands beside the row, like hot fields, do not have all of its columns.
            let is_whole = self.source.columns().iter().all(|column| row.contains_key(&column.name));
            let (true, Some(order)) = (is_whole, row.get("version").and_then(Json::as_i64)) else { continue };
            let get = |name: &str| {
                let kind = self.source.type_of(name).unwrap_or(Type::Text);
                let json = row.get(name).cloned().unwrap_or_default();
                Value::from_json(json, kind).unwrap_or(Value::Null)
            };
            let source = self.source_key(&get)?;
            changes.push(Change { source, order, content: self.meaning(&get)? });
        }
        Ok(changes)
    }

    fn change_of(&self, row: &Row) -> Change {
        let get = |name: &str| row.get(name).cloned().unwrap_or(Value::Null);
        // What does not fit into a view is no entry, here as in the log, where it is parked with the reason.
        let source = self.source_key(&get);
        let content = if source.is_ok() { self.meaning(&get).unwrap_or(None) } else { None };
        let source = source.unwrap_or_else(|_| "(too long)".to_owned());
        Change { source, order: row.version(), content }
    }

    fn deltas(
        &self,
        generation: i64,
        source: &str,
        before: Option<&Content>,
        after: Option<&Content>,
    ) -> Vec<Delta> {
        let shares = before.map(|content| (content, -1)).into_iter().chain(after.map(|content| (content, 1)));
        let mut deltas: Vec<Delta> =
            shares.map(|(content, sign)| self.total(generation, content, sign)).collect();
        for field in self.ranked() {
            let key = |content: Option<&Content>| {
                content.and_then(|content| self.order_key(generation, content, field, source))
            };
            let (old, new) = (key(before), key(after));
            if old == new {
                continue;
            }
            let table = self.order.clone();
            deltas.extend(old.map(|key| Delta::Remove { table: table.clone(), key }));
            deltas.extend(new.map(|key| {
                let kind = self.source.type_of(field).unwrap_or(Type::Int);
                let rank = key.get(3).and_then(Value::as_text).unwrap_or_default();
                let value = Value::Json(unranked(rank, kind).to_json());
                Delta::Put { table, key, columns: Content::from([(VALUE.to_owned(), value)]) }
            }));
        }
        deltas
    }
}

fn actions(view: &Arc<View>) -> Vec<Action> {
    let name = &view.name;
    let target = format!("{}View", state_name(name).trim_end_matches("State"));
    let read = |list: bool| Does::Read(Arc::new(Reader { view: view.clone(), list }));
    let create = format!("{}.create", view.of);
    let mut actions = vec![Action {
        name: "list",
        summary: format!("List the groups of {name}."),
        target: target.clone(),
        shape: "read projection",
        mechanism: "range read under the live generation",
        route: Route { method: Method::Get, place: Place::Collection },
        input: fresh().into_iter().chain(paging::properties()).collect(),
        output: Form::List(Box::new(view.form())),
        refusals: &[Code::Unavailable],
        needs_version: false,
        answers: &["stale projection", "missing entry", "duplicate entry", "tombstone not propagated"],
        after: vec![create.clone()],
        does: read(true),
    }];
    if !view.group_by.is_empty() {
        actions.push(Action {
            name: "read",
            summary: format!("Read one group of {name}; one without rows counts nothing."),
            target,
            shape: "read projection",
            mechanism: "strong read by key under the live generation",
            route: Route { method: Method::Get, place: Place::Item },
            input: fresh().into(),
            output: view.form(),
            refusals: &[Code::Unavailable],
            needs_version: false,
            answers: &["stale projection", "stale ranking after source update"],
            after: vec![create],
            does: read(false),
        });
    }
    actions
}

impl View {
    fn form(&self) -> Form {
        let kind = |name: &str| Form::Value(self.source.type_of(name).unwrap_or(Type::Int));
        let mut properties: Vec<Property> = self
            .group_by
            .iter()
            .map(|(name, kind)| Property::required(name, Form::Value(*kind), "").or_null())
            .collect();
        if self.count {
            properties.push(Property::required("count", Form::Value(Type::Int), "rows in the group"));
        }
        for (prefix, names) in [("sum", &self.sum), ("min", &self.min), ("max", &self.max)] {
            for name in names {
                let form = if prefix == "sum" { Form::Value(Type::Int) } else { kind(name) };
                properties.push(Property::required(&format!("{prefix}_{name}"), form, "").or_null());
            }
        }
        for name in &self.latest {
            let row = Form::Object(vec![
                Property::required("key", Form::Value(Type::Text), "the key of the row"),
                Property::required(name, kind(name), ""),
            ]);
            properties.push(Property::required("latest", row, "the row with the greatest").or_null());
        }
        properties.push(Property::required(GENERATION, Form::Value(Type::Int), "of the projection"));
        Form::Object(properties)
    }

    /// The row of a group as callers see it.
    async fn shown(
        &self,
        groups: &[Value],
        row: Option<&Row>,
        generation: i64,
        tenant: &Tenant,
        desk: &Desk<'_>,
    ) -> Result<Json, Refusal> {
        let mut body: Map<String, Json> = self
            .group_by
            .iter()
            .zip(groups)
            .map(|((name, _), value)| (name.clone(), value.to_json()))
            .collect();
        let int = |name: &str| row.and_then(|row| row.int(name)).unwrap_or(0);
        if self.count {
            body.insert("count".into(), int(MEMBERS).into());
        }
        for name in &self.sum {
            body.insert(format!("sum_{name}"), int(&format!("sum_{name}")).into());
        }
        let group = group_key(groups).map_err(|why| Refusal::new(Code::InvalidInput, why))?;
        let sides = [("min", &self.min, false), ("max", &self.max, true), ("latest", &self.latest, true)];
        for (side, names, backward) in sides {
            for name in names {
                let key = [generation.into(), group.as_str().into(), name.as_str().into()];
                let query = Query::table(&self.order, tenant, key)?.limit(1)?;
                let query = if backward { query.backward() } else { query };
                let page = desk.store.query(&query).await?;
                let found = page.rows.first();
                let value = found.and_then(|row| row.json(VALUE)).cloned().unwrap_or_default();
                if side == "latest" {
                    let source = found.and_then(|row| row.text(SOURCE));
                    body.insert(
                        side.into(),
                        source.map_or(Json::Null, |key| json!({"key": key, name: value})),
                    );
                } else {
                    body.insert(format!("{side}_{name}"), value);
                }
            }
        }
        body.insert(GENERATION.into(), generation.into());
        Ok(Json::Object(body))
    }
}

struct Reader {
    view: Arc<View>,
    list: bool,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({})", self.view.name)
    }
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let view = &*self.view;
        let consult = Consult { name: &view.name, desk };
        let (generation, cursor) = consult.open(call).await?;
        if !self.list {
            let group = group_key(&call.key).map_err(|why| Refusal::new(Code::InvalidInput, why))?;
            let address = Address::new(&view.totals, &call.tenant, [generation.into(), group.into()])?;
            let row = desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
            let body = view.shown(&call.key, row.as_ref(), generation, &call.tenant, desk).await?;
            return Ok(Arc::new(Answer::row(body)));
        }
        let mut asked = call.clone();
        asked.input.remove("cursor");
        if let Some(cursor) = cursor {
            asked.input.insert("cursor".into(), cursor.into());
        }
        let query = Query::table(&view.totals, &call.tenant, [generation.into()])?;
        let page = desk.store.query(&paging::page_of(query, &asked)?).await?;
        let mut rows = Vec::new();
        for row in page.rows.iter().filter(|row| row.int(MEMBERS) != Some(0)) {
            let groups: Vec<Value> =
                view.group_by.iter().map(|(name, _)| row.get(name).cloned().unwrap_or(Value::Null)).collect();
            rows.push(view.shown(&groups, Some(row), generation, &call.tenant, desk).await?);
        }
        let mut answer = paging::answer(rows, page.next);
        answer.next = answer.next.map(|next| Consult::cursor(generation, &next));
        Ok(Arc::new(answer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_order_of_their_numbers() {
        let ints = [i64::MIN, -5, -1, 0, 1, 7, i64::MAX].map(Value::Int);
        let floats = [f64::MIN, -1.5, -0.25, 0.0, 0.25, 1.5, f64::MAX].map(Value::Float);
        for (values, kind) in [(ints, Type::Int), (floats, Type::Float)] {
            let ranks: Vec<String> = values.iter().map(|value| rank(value).unwrap()).collect();
            assert!(ranks.is_sorted() && ranks.iter().collect::<std::collections::BTreeSet<_>>().len() == 7);
            for (rank, value) in ranks.iter().zip(&values) {
                assert_eq!(unranked(rank, kind), *value);
            }
        }
        assert_eq!(rank(&"text".into()), None);
    }
}
