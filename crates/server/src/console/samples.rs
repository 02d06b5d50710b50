//! The same call in other languages: curl, the command line, Rust, TypeScript and Python.
//!
//! Where the input stands, a sample has [`INPUT`]; the script of the page keeps it in step with the form.

use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::action::{Action, Method};

use crate::http::path;

/// Stands for the input in a sample.
const INPUT: &str = "{{input}}";

/// A call to be shown.
pub(super) struct SampleCall<'c> {
    pub origin: &'c str,
    pub resource: &'c str,
    pub action: &'c Action,
    pub key: Option<&'c str>,
    pub version: Option<&'c str>,
    pub input: &'c Map<String, Json>,
    pub needs_key: bool,
}

impl SampleCall<'_> {
    fn path(&self) -> String {
        self.action.path(self.resource, &path::segment(self.key.unwrap_or("KEY")))
    }

    fn media(&self) -> &'static str {
        if self.action.route.method == Method::Patch {
            "application/merge-patch+json"
        } else {
            "application/json"
        }
    }

    fn if_match(&self) -> Option<String> {
        self.version.map(|version| if version == "*" { "*".to_owned() } else { format!("\"{version}\"") })
    }

    fn url(&self) -> String {
        format!("{}{}", self.origin, self.path())
    }

    fn curl(&self) -> String {
        let mut words = Vec::new();
        if self.action.is_write() {
            words.push(format!("curl -i -X {} '{}'", self.action.route.method.name(), self.url()));
        } else {
            words.push(format!("curl -i -G '{}'", self.url()));
        }
        if self.needs_key {
            words.push("-H \"Authorization: Bearer $KEY\"".into());
        }
        words.extend(self.if_match().map(|tag| format!("-H 'If-Match: {tag}'")));
        if self.action.is_write() {
            words.push(format!("-H 'Content-Type: {}'", self.media()));
            words.push(format!("-d '{INPUT}'"));
        } else {
            let pairs = self.input.iter().map(|(name, value)| {
                format!("--data-urlencode '{name}={}'", super::values::plain(value).replace('\'', "'\\''"))
            });
            words.extend(pairs);
        }
        words.join(" \\\n  ")
    }

    fn command(&self) -> String {
        let mut words = vec![format!("statehouse call {}.{}", self.resource, self.action.name)];
        words.extend(self.key.map(|key| format!("--key '{key}'")));
        words.extend(self.version.map(|version| format!("--version '{version}'")));
        words.push(format!("--input '{INPUT}'"));
        words.join(" \\\n  ")
    }

    fn rust(&self) -> String {
        let (resource, action) = (self.resource, &self.action.name);
        let key = match self.key {
            Some(key) => format!("house.resource({resource:?})?.parse_key({key:?})?"),
            None => "Vec::new()".to_owned(),
        };
        let expected = match self.version {
            None => "None".to_owned(),
            Some("*") => "Some(Expected::Any)".to_owned(),
            Some(version) => format!("Some(Expected::Version({version}))"),
        };
        format!(
            "let serde_json::Value::Object(input) = serde_json::json!({INPUT}) else {{ unreachable!() }};\n\
             let request = Request {{\n    action: \"{resource}.{action}\".into(),\n    key: {key},\n    input,\n    \
             expected: {expected},\n}};\nlet answer = house.call(&tenant, request, Operation::default()).await?;"
        )
    }

    fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = vec![("Content-Type", self.media().to_owned())];
        headers.extend(self.if_match().map(|tag| ("If-Match", tag)));
        headers
    }

    fn typescript(&self) -> String {
        let headers: Vec<String> =
            self.headers().iter().map(|(name, value)| format!("    {name:?}: {value:?},\n")).collect();
        let key = if self.needs_key { "    Authorization: `Bearer ${key}`,\n" } else { "" };
        let (url, method) = (self.url(), self.action.route.method.name());
        if !self.action.is_write() {
            return format!(
                "const query = new URLSearchParams({INPUT});\n\
                 const response = await fetch(`{url}?${{query}}`, {{\n  headers: {{\n{key}  }},\n}});\n\
                 const answer = await response.json();"
            );
        }
        format!(
            "const response = await fetch({url:?}, {{\n  method: {method:?},\n  headers: {{\n{key}{}    \
             \"Idempotency-Key\": crypto.randomUUID(),\n  }},\n  body: JSON.stringify({INPUT}),\n}});\n\
             const answer = await response.json();",
            headers.concat()
        )
    }

    fn python(&self) -> String {
        let headers: Vec<String> =
            self.headers().iter().map(|(name, value)| format!("{name:?}: {value:?}, ")).collect();
        let key = if self.needs_key { "\"Authorization\": f\"Bearer {key}\", " } else { "" };
        let (url, method) = (self.url(), self.action.route.method.name());
        if !self.action.is_write() {
            return format!(
                "import json, urllib.parse, urllib.request\n\n\
                 query = urllib.parse.urlencode(json.loads('''{INPUT}'''))\n\
                 request = urllib.request.Request(\"{url}?\" + query, headers={{{key}}})\n\
                 answer = json.load(urllib.request.urlopen(request))"
            );
        }
        format!(
            "import json, urllib.request, uuid\n\nrequest = urllib.request.Request(\n    {url:?},\n    method={method:?},\n    \
             headers={{{key}{}\"Idempotency-Key\": str(uuid.uuid4())}},\n    data=b'''{INPUT}''',\n)\n\
             answer = json.load(urllib.request.urlopen(request))",
            headers.concat()
        )
    }
}

/// The samples, one under each other, with a button to copy each.
pub(super) fn samples(call: &SampleCall<'_>) -> Markup {
    let input = Json::Object(call.input.clone()).to_string();
    let all = [
        ("curl", call.curl()),
        ("Command line", call.command()),
        ("Rust", call.rust()),
        ("TypeScript", call.typescript()),
        ("Python", call.python()),
    ];
    html! {
        section class="samples" aria-label="The same call elsewhere" {
            h2 { "The same call" }
            @for (index, (title, template)) in all.iter().enumerate() {
                details open[index == 0] {
                    summary { (title) }
                    div class="sample" {
                        button type="button" class="quiet copy" data-copy="" { "Copy" }
                        pre tabindex="0" data-template=(template) { (template.replace(INPUT, &input)) }
                    }
                }
            }
        }
    }
}
