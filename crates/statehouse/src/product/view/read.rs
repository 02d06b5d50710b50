//! What can be read of a view: its groups.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::{Address, Consistency, Query, Row, Tenant, Type, Value};

use super::{MEMBERS, VALUE, View, group_key};
use crate::action::{Answer, Call, Code, Desk, Read, Refusal};
use crate::declare::ActionSpec;
use crate::form::{Form, Misfit, Property};
use crate::infra::projection::{Consult, GENERATION, SOURCE, fresh};
use crate::paging;
use crate::product::listing::filled;
use crate::resource::state_name;

pub(super) fn actions(view: &Arc<View>) -> Vec<ActionSpec> {
    let target = format!("{}View", state_name(&view.name).trim_end_matches("State"));
    let action = |spec: ActionSpec, list: bool| {
        spec.target(target.clone())
            .shape("read projection")
            .takes(fresh())
            .codes(&[Code::Unavailable])
            .after(view.after.iter().map(String::as_str))
            .reads(Reader { view: view.clone(), list })
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

impl View {
    fn form(&self) -> Form {
        let kind = |name: &str| Form::Value(self.told.table.type_of(name).unwrap_or(Type::Int));
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
        let Some(alike) = &self.told.alike else { return Ok(()) };
        let mut named = self.group_by.iter().zip(groups);
        let found = named.find(|((name, _), value)| name == alike.column && alike.has(value));
        let Some((_, value)) = found else { return Ok(()) };
        let (values, shown, why) = (alike.values.join(", "), alike.shown, self.told.untold.why);
        let asked = value.as_text().unwrap_or_default();
        let detail = format!("there is no group {asked}: {values} count as {shown}, because {why}");
        Err(Refusal::misfits(vec![Misfit { pointer: "/key".into(), detail }]))
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
        let (mut wanted, mut queries) = (Vec::new(), Vec::new());
        for (side, names, backward) in sides {
            for name in names {
                let key = [generation.into(), group.as_str().into(), name.as_str().into()];
                let query = Query::table(&self.order, tenant, key)?.limit(1)?;
                wanted.push((side, name));
                queries.push(if backward { query.backward() } else { query });
            }
        }
        for ((side, name), page) in wanted.into_iter().zip(filled(desk.store, &queries).await?) {
            let found = page.rows.first();
            let value = found.and_then(|row| row.json(VALUE)).cloned().unwrap_or_default();
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
        if !self.list {
            view.check_group(&call.key)?;
        }
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
