//! `explain`: the abstract shape of an action, then what the engine gets.

use serde_json::{Map, Value as Json, json};
use statehouse::action::{Action, Does, Place};
use statehouse::form::{Form, Property};
use statehouse::{Code, Expected, House, Operation, Request, Resource};
use statehouse_store::{Migrate, ModelStore, Tenant, Type, Value};

use crate::arguments::Explain;
use crate::blueprint;
use crate::output::{Failure, Output};

pub(crate) async fn run(explain: Explain, output: &Output) -> Result<(), Failure> {
    let house = blueprint::open(&explain.live).await?;
    let (resource, action) = house.action(&explain.action)?;
    let line = format!(
        "{} {} -> {} (abstract: {}, {})",
        action.name, resource.name, action.target, action.shape, action.mechanism
    );
    let plan = match &action.does {
        Does::Read(_) => None,
        Does::Write(_) => sample_plan(&blueprint::read(&explain.live.file)?, resource, action).await?,
    };
    let explanation = plan.as_ref().map(|plan| house.store().explain(plan));
    let requests: Option<Vec<Json>> = explanation.as_ref().map(|explanation| {
        let request = |request: &statehouse_store::Request| {
            json!({"purpose": request.purpose, "text": request.text, "parameters": request.parameters})
        };
        explanation.requests.iter().map(request).collect()
    });
    let json = json!({
        "action": explain.action, "target": action.target, "shape": action.shape, "mechanism": action.mechanism,
        "engine": house.store().engine(), "requests": requests,
        "cost": explanation.as_ref().map(|explanation| &explanation.cost),
        "answers": action.answers,
    });
    output.show(&json, || {
        let concrete = explanation.as_ref().map_or_else(
            || format!("(concrete: {}, on {})", action.mechanism, house.store().engine()),
            |explanation| format!("(concrete, on {}):\n\n{explanation}", house.store().engine()),
        );
        format!("{line}\n{concrete}")
    });
    house.store().close().await;
    Ok(())
}

/// The plan of an action for a row as one may be, made on a model that has such a row.
async fn sample_plan(
    blueprint: &statehouse::Blueprint,
    resource: &Resource,
    action: &Action,
) -> Result<Option<statehouse_store::Plan>, Failure> {
    let house = House::over(std::sync::Arc::new(ModelStore::new()), blueprint)?;
    house.migrate(Migrate::Apply).await?;
    let tenant = Tenant::new("default").map_err(|error| Failure::Usage(error.to_string()))?;
    let key: Vec<Value> = resource.key.iter().filter_map(|(_, kind)| sample_value(*kind, 1)).collect();
    // A row to act on, if the resource can make one, and one that was deleted for what undoes that.
    let mut prepare = vec![];
    if action.name != "create" && resource.action("create").is_some() {
        prepare.push("create");
    }
    if action.refusals.contains(&Code::NotDeleted) {
        prepare.push("delete");
    }
    for name in prepare {
        let Some(other) = resource.action(name) else { continue };
        let request = sample_request(resource, other, &key, 1);
        house.call(&tenant, request, Operation::default()).await?;
    }
    Ok(house.plan(&tenant, sample_request(resource, action, &key, 2)).await?)
}

fn sample_request(resource: &Resource, action: &Action, key: &[Value], variant: i64) -> Request {
    let mut input: Map<String, Json> = action
        .input
        .iter()
        .filter_map(|property| Some((property.name.clone(), sample(property, variant)?)))
        .collect();
    for ((name, _), value) in resource.key.iter().zip(key) {
        if input.contains_key(name) {
            input.insert(name.clone(), value.to_json());
        }
    }
    // Of the ways to change something one is enough, and they exclude each other.
    if action.input.iter().any(|property| matches!(property.form, Form::Object(_))) {
        let first =
            input.iter().find(|(_, value)| value.as_object().is_some_and(|fields| !fields.is_empty()));
        input = first.map(|(name, value)| (name.clone(), value.clone())).into_iter().collect();
    }
    let key = if action.route.place == Place::Collection { Vec::new() } else { key.to_vec() };
    let expected = action.needs_version.then_some(Expected::Version(1));
    Request { action: format!("{}.{}", resource.name, action.name), key, input, expected }
}

fn sample(property: &Property, variant: i64) -> Option<Json> {
    match &property.form {
        Form::Value(kind) => sample_value(*kind, variant).map(|value| value.to_json()),
        Form::OneOf(words) => words.first().map(|word| (*word).into()),
        Form::Range(least, _) => Some((*least).into()),
        Form::Any => Some(format!("item {variant}").into()),
        Form::List(_) => Some(json!([])),
        Form::Object(properties) => {
            // One field tells as much as all of them.
            let first = properties.iter().find_map(|p| Some((p.name.clone(), sample(p, variant)?)));
            Some(Json::Object(first.into_iter().collect()))
        }
    }
}

fn sample_value(kind: Type, variant: i64) -> Option<Value> {
    Some(match kind {
        Type::Text => format!("text {variant}").into(),
        Type::Int => variant.into(),
        Type::Float => Value::Float(variant as f64 + 0.5),
        Type::Bool => (variant % 2 == 0).into(),
        Type::Bytes => vec![u8::try_from(variant).unwrap_or(0)].into(),
        Type::Time => statehouse_store::Time::from_millis(1_700_000_000_000 + variant).into(),
        Type::Json => json!([variant]).into(),
    })
}
