//! Commands that can be pasted, made from what the house serves: create, change under the version that was seen, and
//! once more, which is refused.

use serde::Serialize;
use serde_json::{Map, Value as Json};
use statehouse::action::{Action, Method};
use statehouse::form::Property;
use statehouse::resource::key_text;
use statehouse::{Code, House, Operation, Request, Resource};
use statehouse_drills::sample_inputs as sample;
use statehouse_store::{Tenant, Value};

use crate::output::CliFailure;

/// Rows that are looked at for a key that is free.
const KEYS_MAX: i64 = 100;

/// A command and what it does.
#[derive(Debug, Serialize)]
pub(crate) struct SuggestedCommand {
    pub about: String,
    pub text: String,
}

/// The commands for the first resource that can be created and changed under a version.
pub(crate) async fn commands(
    house: &House,
    url: &str,
    with_key: bool,
) -> Result<Vec<SuggestedCommand>, CliFailure> {
    let editable = |resource: &&Resource| {
        resource.action("create").is_some()
            && resource.action("patch").is_some_and(|patch| patch.needs_version && !patch.input.is_empty())
    };
    let Some(resource) = house.resources().iter().find(editable) else { return Ok(Vec::new()) };
    let (Some(create), Some(patch)) = (resource.action("create"), resource.action("patch")) else {
        return Ok(Vec::new());
    };
    let Some((key, number)) = free_key(house, resource).await? else { return Ok(Vec::new()) };
    let key_part = |name: &str| resource.key.iter().position(|(known, _)| known == name);
    let given = |property: &Property| match key_part(&property.name).and_then(|index| key.get(index)) {
        Some(part) => Some((property.name.clone(), part.to_json())),
        None => Some((property.name.clone(), sample::of_property(property, number)?)),
    };
    let input: Map<String, Json> =
        create.input.iter().filter(|property| property.required).filter_map(given).collect();
    let change = |variant: i64| -> Map<String, Json> {
        let first = patch.input.first();
        let value = first.and_then(|p| Some((p.name.clone(), sample::of_property(p, variant)?)));
        value.into_iter().collect()
    };
    let name = &resource.name;
    let path = format!("{url}/v1/{name}/{}", encoded(&key_text(&key)));
    let new = curl(create, &format!("{url}/v1/{name}"), with_key, None, &input);
    let once = curl(patch, &path, with_key, Some(1), &change(number + 1));
    let again = curl(patch, &path, with_key, Some(1), &change(number + 2));
    let command = |about: String, text| SuggestedCommand { about, text };
    Ok(vec![
        command(format!("a new {name}: 201"), new),
        command("change it under the version that you have seen: 200".into(), once),
        command("the same by a caller that has seen version 1 too: 412, it is at version 2".into(), again),
    ])
}

/// A key that no row of the default tenant has.
async fn free_key(house: &House, resource: &Resource) -> Result<Option<(Vec<Value>, i64)>, CliFailure> {
    let tenant = statehouse_server::auth::TENANT_DEFAULT;
    let tenant = Tenant::new(tenant).map_err(|error| CliFailure::Usage(error.to_string()))?;
    for number in 1..=KEYS_MAX {
        let key = sample::key(resource, number);
        let action = format!("{}.read", resource.name);
        let request = Request { action, key: key.clone(), input: Map::new(), expected: None };
        match house.call(&tenant, request, Operation::default()).await {
            Err(refusal) if refusal.code == Code::NotFound => return Ok(Some((key, number))),
            Ok(_) => {}
            Err(refusal) if refusal.code == Code::Deleted => {}
            Err(refusal) => return Err(refusal.into()),
        }
    }
    Ok(None)
}

fn curl(action: &Action, url: &str, with_key: bool, seen: Option<i64>, input: &Map<String, Json>) -> String {
    let mut words = vec![format!("curl -i -X {} '{url}'", action.route.method.name())];
    if with_key {
        words.push("-H \"Authorization: Bearer $KEY\"".into());
    }
    words.extend(seen.map(|version| format!("-H 'If-Match: \"{version}\"'")));
    let media = match action.route.method {
        Method::Patch => "application/merge-patch+json",
        _ => "application/json",
    };
    words.push(format!("-H 'Content-Type: {media}'"));
    let body = Json::Object(input.clone()).to_string().replace('\'', "'\\''");
    words.push(format!("-d '{body}'"));
    words.join(" \\\n  ")
}

/// A key as a segment of a path.
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'.' | b'_' | b'~' | b',' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}
