//! What can be read of a view: its groups.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::{Address, Consistency, Query, Row, Table, Tenant, Type, Value};

use super::{MEMBERS, TOTAL_SHARDS, VALUE, ViewSpec, group_key};
use crate::action::{ActionContext, Answer, Call, Code, Method, Read, Refusal, RouteKind};
use crate::declare::ActionSpec;
use crate::form::{FieldError, Form, Property};
use crate::infra::projection::{GENERATION, ProjectionReader, SOURCE, fresh};
use crate::paging;
use crate::product::listing::filled;
use crate::resource::state_name;

pub(super) fn actions(view: &Arc<ViewSpec>) -> Vec<ActionSpec> {
    let target = view.target();
    let action = |spec: ActionSpec, list: bool| {
        spec.target(target.clone())
            .shape("read projection")
            .takes(fresh())
            .codes(&[Code::Unavailable])
            .after(view.after.iter().map(String::as_str))
            .reads(ViewRead { view: view.clone(), list })
    };
    let mut actions = vec![
        action(ActionSpec::list("list", "List the groups of {name}."), true)
            .mechanism("range read under the live generation")
            .gives_rows(view.form())
            .answers(&["stale projection", "missing entry", "duplicate entry", "tombstone not propagated"]),
    ];
    if !view.group_by.is_empty() {
        let summary = "Read one group of {name}; one without rows counts nothing.";
        actions.push(
            action(ActionSpec::read("read", summary), false)
                .mechanism("strong read by key under the live generation")
                .gives(view.form())
                .answers(&["stale projection", "stale ranking after source update"]),
        );
    }
    actions
}

/// The read of the total over all groups.
pub(super) fn total(view: &Arc<ViewSpec>, table: &Arc<Table>) -> ActionSpec {
    let summary = format!("Read what all groups of {} add up to.", view.name);
    ActionSpec::read("read", summary)
        .on(Method::Get, RouteKind::Collection)
        .target(view.target())
        .shape("read projection")
        .mechanism("strong read of the shards of the total under the live generation")
        .takes(fresh())
        .gives(Form::Object(view.amount_properties()))
        .codes(&[Code::Unavailable, Code::OutOfRange])
        .answers(&["stale projection", "missing entry", "duplicate entry"])
        .after(view.after.iter().map(String::as_str))
        .reads(TotalRead { view: view.clone(), table: table.clone() })
}

impl ViewSpec {
    fn target(&self) -> String {
        format!("{}View", state_name(&self.name).trim_end_matches("State"))
    }

    /// The count and the sums, as callers see them.
    fn amount_properties(&self) -> Vec<Property> {
        let count = Property::required("count", Form::Value(Type::Int), "rows in all groups");
        let sum = |name: &String| Property::required(&format!("sum_{name}"), Form::Value(Type::Int), "");
        let generation = Property::required(GENERATION, Form::Value(Type::Int), "of the projection");
        let counts = self.count.then_some(count);
        counts.into_iter().chain(self.sum.iter().map(sum)).chain([generation]).collect()
    }

    fn form(&self) -> Form {
        let kind = |name: &str| Form::Value(self.source_rows.table.type_of(name).unwrap_or(Type::Int));
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

    /// Refuses a group that cannot have rows, because they count under another name.
    fn check_group(&self, groups: &[Value]) -> Result<(), Refusal> {
        let Some(alike) = &self.source_rows.merged else { return Ok(()) };
        let mut named = self.group_by.iter().zip(groups);
        let found = named.find(|((name, _), value)| name == alike.column && alike.has(value));
        let Some((_, value)) = found else { return Ok(()) };
        let (values, shown, why) = (alike.values.join(", "), alike.shown, self.source_rows.unlogged.why);
        let asked = value.as_text().unwrap_or_default();
        let detail = format!("there is no group {asked}: {values} count as {shown}, because {why}");
        Err(Refusal::invalid(vec![FieldError { pointer: "/key".into(), detail }]))
    }

    /// The row of a group as callers see it.
    async fn shown(
        &self,
        groups: &[Value],
        row: Option<&Row>,
        generation: i64,
        tenant: &Tenant,
        cx: &ActionContext<'_>,
    ) -> Result<Json, Refusal> {
        let mut body: Map<String, Json> = self
            .group_by
            .iter()
            .zip(groups)
            .map(|((name, _), value)| (name.clone(), value.to_json()))
            .collect();
        // A group without a row has no members.
        let int = |name: &str| row.map_or(Ok(0), |row| row.get_int(name));
        if self.count {
            body.insert("count".into(), int(MEMBERS)?.into());
        }
        for name in &self.sum {
            body.insert(format!("sum_{name}"), int(&format!("sum_{name}"))?.into());
        }
        let group = group_key(groups).map_err(|why| Refusal::new(Code::InvalidInput, why))?;
        let sides = [("min", &self.min, false), ("max", &self.max, true), ("latest", &self.latest, true)];
        let (mut wanted, mut queries) = (Vec::new(), Vec::new());
        for (side, names, backward) in sides {
            for name in names {
                let key = [generation.into(), group.as_str().into(), name.as_str().into()];
                let query = Query::table(&self.order, tenant, key)?.limit(1)?;
                wanted.push((side, name));
                queries.push(if backward { query.backward() } else { query });
            }
        }
        for ((side, name), page) in wanted.into_iter().zip(filled(cx.store, &queries).await?) {
            let found = page.rows.first();
            // A group without members has no extremes.
            let value = found.map_or(Ok(Json::Null), |row| row.get_json(VALUE).cloned())?;
            if side == "latest" {
                let source = found.and_then(|row| row.text(SOURCE));
                body.insert(side.into(), source.map_or(Json::Null, |key| json!({"key": key, name: value})));
            } else {
                body.insert(format!("{side}_{name}"), value);
            }
        }
        body.insert(GENERATION.into(), generation.into());
        Ok(Json::Object(body))
    }
}

struct ViewRead {
    view: Arc<ViewSpec>,
    list: bool,
}

impl fmt::Debug for ViewRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({})", self.view.name)
    }
}

#[async_trait]
impl Read for ViewRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let view = &*self.view;
        if !self.list {
            view.check_group(&call.key)?;
        }
        let consult = ProjectionReader { name: &view.name, cx };
        let (generation, cursor) = consult.open(call).await?;
        if !self.list {
            let group = group_key(&call.key).map_err(|why| Refusal::new(Code::InvalidInput, why))?;
            let address = Address::new(&view.totals, &call.tenant, [generation.into(), group.into()])?;
            let row = cx.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
            let body = view.shown(&call.key, row.as_ref(), generation, &call.tenant, cx).await?;
            return Ok(Arc::new(Answer::row(body)));
        }
        let mut asked = call.clone();
        asked.input.remove("cursor");
        if let Some(cursor) = cursor {
            asked.input.set("cursor", cursor);
        }
        let query = Query::table(&view.totals, &call.tenant, [generation.into()])?;
        let page = cx.store.query(&paging::page_of(query, &asked)?).await?;
        let mut rows = Vec::new();
        for row in page.rows.iter().filter(|row| row.int(MEMBERS) != Some(0)) {
            let groups: Vec<Value> =
                view.group_by.iter().map(|(name, _)| row.get(name).cloned().unwrap_or(Value::Null)).collect();
            rows.push(view.shown(&groups, Some(row), generation, &call.tenant, cx).await?);
        }
        let mut answer = paging::answer(rows, page.next);
        answer.next = answer.next.map(|next| ProjectionReader::cursor(generation, &next));
        Ok(Arc::new(answer))
    }
}

struct TotalRead {
    view: Arc<ViewSpec>,
    table: Arc<Table>,
}

impl fmt::Debug for TotalRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TotalReader({})", self.view.name)
    }
}

#[async_trait]
impl Read for TotalRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let view = &*self.view;
        let (generation, _) = ProjectionReader { name: &view.name, cx }.open(call).await?;
        let address = |shard: u32| {
            Address::new(&self.table, &call.tenant, [generation.into(), i64::from(shard).into()])
        };
        let addresses = (0..TOTAL_SHARDS).map(address).collect::<Result<Vec<_>, _>>()?;
        let shards = cx.store.get(&addresses, Consistency::Strong).await?;
        let added = |column: &str| -> Result<i64, Refusal> {
            let mut sum = 0_i64;
            for row in shards.iter().flatten() {
                sum = sum.checked_add(row.get_int(column)?).ok_or_else(|| {
                    Refusal::new(Code::OutOfRange, format!("{column} of all groups is beyond 64 bits"))
                })?;
            }
            Ok(sum)
        };
        let mut body = Map::new();
        if view.count {
            body.insert("count".into(), added(MEMBERS)?.into());
        }
        for name in &view.sum {
            let name = format!("sum_{name}");
            let sum = added(&name)?;
            body.insert(name, sum.into());
        }
        body.insert(GENERATION.into(), generation.into());
        Ok(Arc::new(Answer::row(Json::Object(body))))
    }
}
