//! `call`: one action on a store, without a server.

use serde_json::{Map, Value as Json, json};
use statehouse::action::RouteKind;
use statehouse::house::IF;
use statehouse::{Expected, House, Operation, Principal, Request};
use statehouse_store::Tenant;

use crate::arguments::{CallArgs, Spoken};
use crate::blueprint;
use crate::output::{CliFailure, Output};
use crate::settings::CliSettings;

pub(crate) async fn run(call: CallArgs, output: &Output) -> Result<(), CliFailure> {
    let house = blueprint::open_in_use_for_calls(&CliSettings::read(&call.live.flags())?.own).await?;
    let (tenant, request) = request(&house, &call.spoken)?;
    let operation = match call.operation {
        Some(id) => Operation::under(id, &request),
        None => Operation::default(),
    };
    let actor = Some(crate::audit::actor().credential().clone());
    let caller = Principal { actor, ..Principal::from(&tenant) };
    let answer = house.call(caller, request, operation).await;
    house.store().close().await;
    let answer = answer?;
    output.show(&json!(answer), || {
        let next = answer.next.as_ref().map(|next| format!("\nMore: cursor={next}")).unwrap_or_default();
        format!("{:#}{next}", answer.body)
    });
    Ok(())
}

/// What was said, as a request.
pub(crate) fn request(house: &House, spoken: &Spoken) -> Result<(Tenant, Request), CliFailure> {
    let (resource, action) = house.action(&spoken.action)?;
    let key = match (&spoken.key, action.route.kind) {
        (Some(key), RouteKind::Item | RouteKind::ItemAction) => resource.parse_key(key)?,
        (None, RouteKind::Item | RouteKind::ItemAction) => {
            let names: Vec<&str> = resource.key.iter().map(|(name, _)| name.as_str()).collect();
            return Err(CliFailure::Usage(format!("{} needs --key {}", spoken.action, names.join(","))));
        }
        (_, RouteKind::Collection) => Vec::new(),
    };
    let mut input = match &spoken.input {
        None => Map::new(),
        Some(text) => match statehouse_server::strict_json(text) {
            Ok(Json::Object(fields)) => fields,
            Ok(_) => return Err(CliFailure::Usage("--input must be a JSON object".into())),
            Err(error) => return Err(CliFailure::Usage(format!("--input is not JSON: {error}"))),
        },
    };
    for field in &spoken.fields {
        let Some((name, value)) = field.split_once('=') else {
            return Err(CliFailure::Usage(format!("`{field}` is not NAME=VALUE")));
        };
        let form = action.input.iter().find(|property| property.name == name).map(|property| &property.form);
        let value = value_of(value, form).map_err(|why| CliFailure::Usage(format!("{name}: {why}")))?;
        input.insert(name.to_owned(), value);
    }
    if let Some(condition) = &spoken.condition {
        input.insert(IF.to_owned(), condition.as_str().into());
    }
    let expected = match spoken.version.as_deref() {
        None => None,
        Some("any" | "*") => Some(Expected::Any),
        Some(text) => Some(Expected::Version(
            text.parse()
                .map_err(|_| CliFailure::Usage(format!("--version {text} is not a number or `any`")))?,
        )),
    };
    let tenant = Tenant::new(&spoken.tenant).map_err(|error| CliFailure::Usage(error.to_string()))?;
    Ok((tenant, Request { action: spoken.action.clone(), key, input, expected }))
}

/// A value on the command line: text where text is wanted, JSON where it can be.
fn value_of(text: &str, form: Option<&statehouse::form::Form>) -> Result<Json, serde_json::Error> {
    use statehouse::form::Form;
    use statehouse_store::Type;
    let wants_text = matches!(form.and_then(Form::kind), Some(Type::Text | Type::Bytes | Type::Time));
    if wants_text && text != "null" {
        return Ok(text.into());
    }
    match statehouse_server::strict_json(text) {
        // What is no JSON at all is a text.
        Err(_) if serde_json::from_str::<serde::de::IgnoredAny>(text).is_err() => Ok(text.into()),
        read => read,
    }
}
