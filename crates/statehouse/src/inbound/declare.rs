//! Reads `[inbound.NAME]`: whose signatures, which messages, which action.

use std::ops::RangeInclusive;
use std::time::Duration;

use http::HeaderName;
use serde_json::Value as Json;
use statehouse_store::{Tenant, Type};

use super::message::{MessageCondition, TenantName};
use super::verify::{Encoding, HmacScheme, SignatureKind, SignatureScheme, SignedPart, TimestampPlace};
use super::{InboundEndpoint, SECRETS_MAX, TENANT_DEFAULT};
use crate::blueprint::problem::Problems;
use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::blueprint::{Blueprint, DeclaredEndpoint};
use crate::declare::SettingsReader;
use crate::declare::action_call::DeclaredCall;
use crate::declare::template::{Template, TemplatePart, TemplateScope};
use crate::infra::effect::secret::SecretReference;
use crate::infra::effect::signature;
use crate::resource::Resource;
use crate::system;

/// How far the time of a signature may be from the server's.
const TOLERANCES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);
/// What the authors of Standard Webhooks and most senders recommend.
const TOLERANCE_DEFAULT: Duration = Duration::from_secs(300);
/// Bytes of a message.
const BODY_MAX: u32 = 256_000;
/// The settings that only the scheme `hmac` has.
const HMAC_SETTINGS: [&str; 6] =
    ["header", "prefix", "encoding", "timestamp_header", "timestamp_prefix", "signed"];

/// The endpoints of a blueprint, or everything that is wrong with them.
pub(crate) fn declare(
    blueprint: &Blueprint,
    resources: &[Resource],
) -> Result<Vec<InboundEndpoint>, Problems> {
    let mut problems = blueprint.problems();
    let endpoints = check(blueprint, resources, &mut problems);
    problems.or(endpoints)
}

/// The endpoints that can be declared; reports what is wrong with the others.
pub(crate) fn check(
    blueprint: &Blueprint,
    resources: &[Resource],
    problems: &mut Problems,
) -> Vec<InboundEndpoint> {
    let mut endpoints = Vec::new();
    for DeclaredEndpoint { name, settings } in &blueprint.endpoints {
        let mut settings = SettingsReader::new(settings.clone(), problems);
        endpoints.extend(read(name, &mut settings, resources));
        settings.finish();
    }
    endpoints
}

fn read(name: &str, settings: &mut SettingsReader<'_>, resources: &[Resource]) -> Option<InboundEndpoint> {
    let before = settings.problem_count();
    let kind = match settings.required_choice(
        "scheme",
        &["standard", "hmac"],
        "write `scheme = \"standard\"` for Standard Webhooks, or `scheme = \"hmac\"`",
    ) {
        Some("hmac") => read_hmac(settings).map(SignatureKind::Hmac),
        Some(_) => {
            for name in HMAC_SETTINGS {
                if settings.node(name).is_some() {
                    settings.problem(name, format!("`{name}` is a setting of `scheme = \"hmac\"`"));
                }
            }
            Some(SignatureKind::Standard)
        }
        None => {
            HMAC_SETTINGS.into_iter().for_each(|name| drop(settings.node(name)));
            None
        }
    };
    let dated = !matches!(&kind, Some(SignatureKind::Hmac(HmacScheme { timestamp: None, .. })));
    let title = "nothing says when a message was signed: name `timestamp_header` or `timestamp_prefix`";
    settings.refuse_if(!dated && settings.has("tolerance"), "tolerance", title);
    let tolerance = settings.duration("tolerance", TOLERANCE_DEFAULT, TOLERANCES);
    let secrets = read_secrets(settings);
    let id = read_id(settings, kind.as_ref());
    let tenant = read_tenant(settings);
    let when = read_when(settings);
    let body_max = settings.count("body_max", BODY_MAX, 1..=4_000_000) as usize;
    let call = DeclaredCall::read(settings, resources, &MessageScope);
    let scheme = SignatureScheme { kind: kind?, tolerance };
    let endpoint = InboundEndpoint {
        name: name.to_owned(),
        scheme,
        secrets,
        id: id?,
        tenant: tenant?,
        when,
        call: call?,
        body_max,
    };
    (settings.problem_count() == before).then_some(endpoint)
}

/// What the templates of an endpoint may name.
struct MessageScope;

const NAMES: &str = "id, at, body, body.FIELD and header.NAME";

impl TemplateScope for MessageScope {
    fn kind_of(&self, path: &[String]) -> Result<Option<Type>, (String, String)> {
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        match names.as_slice() {
            ["id"] => Ok(Some(Type::Text)),
            ["at"] => Ok(Some(Type::Time)),
            ["body", ..] => Ok(None),
            ["header", name] if is_header(name) => Ok(Some(Type::Text)),
            ["header", name] => {
                Err((format!("`{name}` is not a header"), "write it in lower case".to_owned()))
            }
            _ => Err((format!("`{{{}}}` names nothing", path.join(".")), format!("there are {NAMES}"))),
        }
    }
}

fn is_header(name: &str) -> bool {
    HeaderName::from_lowercase(name.as_bytes()).is_ok()
}

/// What the tenant of a message may be made of: what the sender has signed.
struct SignedScope;

impl TemplateScope for SignedScope {
    fn kind_of(&self, path: &[String]) -> Result<Option<Type>, (String, String)> {
        match path.first().map(String::as_str) {
            Some("body") => Ok(None),
            _ => Err((
                format!("`{{{}}}` is not a part of the body, and may not be signed", path.join(".")),
                "write a tenant, or `{body.FIELD}`".to_owned(),
            )),
        }
    }
}

/// What the id of a message may be made of.
struct IdScope;

impl TemplateScope for IdScope {
    fn kind_of(&self, path: &[String]) -> Result<Option<Type>, (String, String)> {
        match path.first().map(String::as_str) {
            Some("body" | "header") => MessageScope.kind_of(path),
            _ => Err((
                format!("`{{{}}}` does not name a message", path.join(".")),
                "there are body.FIELD and header.NAME".to_owned(),
            )),
        }
    }
}

fn read_header(settings: &mut SettingsReader<'_>, name: &'static str) -> Option<HeaderName> {
    let text = settings.maybe_text(name)?;
    let header = text.to_ascii_lowercase().parse::<HeaderName>().ok();
    settings.refuse_if(header.is_none(), name, format!("`{text}` is not a header"));
    header
}

fn read_hmac(settings: &mut SettingsReader<'_>) -> Option<HmacScheme> {
    let header = read_header(settings, "header");
    if !settings.has("header") {
        let advice = "name the header with the signature: `header = \"x-hub-signature-256\"`";
        settings.problem_with_advice("header", "there is no `header`", advice);
    }
    let encoding = match settings.choice("encoding", &["hex", "base64"]) {
        "base64" => Encoding::Base64,
        _ => Encoding::Hex,
    };
    let prefix = settings.text("prefix", "");
    let timestamp = match (read_header(settings, "timestamp_header"), settings.maybe_text("timestamp_prefix"))
    {
        (Some(_), Some(_)) => {
            let title = "a signature has one time: keep either `timestamp_header` or `timestamp_prefix`";
            settings.problem("timestamp_prefix", title);
            None
        }
        (Some(name), None) => Some(TimestampPlace::Header(name)),
        (None, Some(prefix)) => {
            settings.refuse_if(prefix.is_empty(), "timestamp_prefix", "`timestamp_prefix` must not be empty");
            Some(TimestampPlace::Prefix(prefix))
        }
        (None, None) => None,
    };
    let signed = read_signed(settings, timestamp.is_some())?;
    Some(HmacScheme { header: header?, prefix, encoding, timestamp, signed })
}

/// What is signed: text with the body in it, and the time if there is one.
fn read_signed(settings: &mut SettingsReader<'_>, dated: bool) -> Option<Vec<SignedPart>> {
    let Some(node) = settings.node("signed") else {
        let before =
            if dated { vec![SignedPart::Timestamp, SignedPart::Text(".".to_owned())] } else { Vec::new() };
        return Some(before.into_iter().chain([SignedPart::Body]).collect());
    };
    let template = Template::read(&node).map_err(|error| settings.template_problem(error)).ok()?;
    let advice = "write \"{body}\", or \"{timestamp}.{body}\" where the sender signs the time";
    let Template::Text(pieces) = template else {
        settings.problem_with_advice("signed", "`signed` must be text", advice);
        return None;
    };
    let mut parts = Vec::new();
    for piece in pieces {
        parts.push(match piece {
            TemplatePart::Text(text) => SignedPart::Text(text),
            TemplatePart::Placeholder(path) if path == ["body"] => SignedPart::Body,
            TemplatePart::Placeholder(path) if path == ["timestamp"] => SignedPart::Timestamp,
            TemplatePart::Placeholder(path) => {
                let title = format!("`{{{}}}` cannot be signed here", path.join("."));
                settings.problem_with_advice("signed", title, advice);
                return None;
            }
        });
    }
    let count = |wanted: &SignedPart| parts.iter().filter(|part| *part == wanted).count();
    let (bodies, times) = (count(&SignedPart::Body), count(&SignedPart::Timestamp));
    let title = "`signed` must have `{body}` in it, once: what is not signed anyone can change";
    settings.refuse_if(bodies != 1, "signed", title);
    let title = "`signed` must have `{timestamp}` in it if a time is given, or an old message could be sent as a new one";
    settings.refuse_if(dated && times == 0, "signed", title);
    let title = "`{timestamp}` needs `timestamp_header` or `timestamp_prefix`";
    settings.refuse_if(!dated && times > 0, "signed", title);
    Some(parts)
}

/// One secret, or the new one and the old one during a rotation.
fn read_secrets(settings: &mut SettingsReader<'_>) -> Vec<SecretReference> {
    let advice = "write `secret = \"env:NAME\"`, or `[\"env:NEW\", \"env:OLD\"]` during a rotation";
    let texts: Option<Vec<String>> = match settings.node("secret").map(|node| node.value) {
        Some(TreeValue::Text(text)) => Some(vec![text]),
        Some(TreeValue::List(items)) => {
            let text = |item: Node| if let TreeValue::Text(text) = item.value { Some(text) } else { None };
            items.into_iter().map(text).collect()
        }
        _ => None,
    };
    let texts = texts.unwrap_or_default();
    if texts.is_empty() || texts.len() > SECRETS_MAX {
        settings.problem_with_advice(
            "secret",
            "an endpoint has one secret, or two during a rotation",
            advice,
        );
    }
    let mut secrets = Vec::new();
    for text in &texts {
        match SecretReference::parse(text) {
            Ok(reference) => secrets.push(reference),
            Err(why) => settings.problem("secret", why),
        }
    }
    secrets
}

/// What names a message. Standard Webhooks says it; other senders do in a header or in the body.
fn read_id(settings: &mut SettingsReader<'_>, kind: Option<&SignatureKind>) -> Option<Template> {
    let node = settings.node("id");
    match (kind, node) {
        (None, _) => None,
        (Some(SignatureKind::Standard), None) => {
            let path = vec!["header".to_owned(), signature::ID.to_owned()];
            Some(Template::Text(vec![TemplatePart::Placeholder(path)]))
        }
        (Some(SignatureKind::Standard), Some(_)) => {
            settings.problem("id", "the header `webhook-id` names the message, so there is no `id`");
            None
        }
        (Some(SignatureKind::Hmac(_)), None) => {
            let advice =
                "say what names a message: `id = \"{body.id}\"` or `id = \"{header.x-github-delivery}\"`";
            settings.problem_with_advice("id", "there is no `id`", advice);
            None
        }
        (Some(SignatureKind::Hmac(_)), Some(node)) => read_naming(settings, "id", &node, &IdScope),
    }
}

/// A text with at least one placeholder.
fn read_naming(
    settings: &mut SettingsReader<'_>,
    name: &str,
    node: &Node,
    scope: &dyn TemplateScope,
) -> Option<Template> {
    let template =
        Template::read(node).and_then(|template| template.check_names(node, scope).map(|_| template));
    let template = template.map_err(|error| settings.template_problem(error)).ok()?;
    let mut names = 0;
    template.placeholders(&mut |_| names += 1);
    let is_text = matches!(template, Template::Text(_)) && names > 0;
    settings.refuse_if(!is_text, name, format!("`{name}` must be text with a placeholder in it"));
    is_text.then_some(template)
}

fn read_tenant(settings: &mut SettingsReader<'_>) -> Option<TenantName> {
    let node = settings.node("tenant");
    let text = match node.as_ref().map(|node| &node.value) {
        None => TENANT_DEFAULT,
        Some(TreeValue::Text(text)) => text.as_str(),
        Some(_) => {
            settings.problem("tenant", "`tenant` must be text");
            return None;
        }
    };
    if let Some(node) = &node
        && text.contains('{')
    {
        return read_naming(settings, "tenant", node, &SignedScope).map(TenantName::Signed);
    }
    match Tenant::new(text) {
        Ok(tenant) if !system::is_system(&tenant) => Some(TenantName::Constant(tenant)),
        Ok(_) => {
            settings.problem("tenant", format!("`{text}` is the tenant of the server itself"));
            None
        }
        Err(error) => {
            settings.problem("tenant", error.to_string());
            None
        }
    }
}

/// `when = { body.type = ["a", "b"] }`: which messages the endpoint handles.
fn read_when(settings: &mut SettingsReader<'_>) -> Vec<MessageCondition> {
    let Some(node) = settings.node("when") else { return Vec::new() };
    let mut conditions = Vec::new();
    if let Err(why) = add_conditions(&node, &mut Vec::new(), &mut conditions) {
        let advice = "write `when = { body.type = \"payment.succeeded\" }`, or a list of values";
        settings.problem_with_advice("when", why, advice);
    }
    conditions
}

fn add_conditions(
    node: &Node,
    path: &mut Vec<String>,
    found: &mut Vec<MessageCondition>,
) -> Result<(), String> {
    if let TreeValue::Table(entries) = &node.value {
        if entries.is_empty() {
            return Err("`when` names nothing".to_owned());
        }
        for TreeEntry { key, value, .. } in entries {
            path.push(key.clone());
            add_conditions(value, path, found)?;
            path.pop();
        }
        return Ok(());
    }
    let is_known = match path.as_slice() {
        [body, _, ..] if body == "body" => true,
        [header, name] if header == "header" => is_header(name),
        _ => false,
    };
    if !is_known {
        return Err(format!("`{}` is neither body.FIELD nor header.NAME", path.join(".")));
    }
    let values = match &node.value {
        TreeValue::List(items) => items.iter().map(constant).collect::<Option<Vec<Json>>>(),
        _ => constant(node).map(|value| vec![value]),
    };
    let values = values.filter(|values| !values.is_empty());
    let values =
        values.ok_or_else(|| format!("`{}` must be a text, a number, or a list of them", path.join(".")))?;
    found.push(MessageCondition { path: path.clone(), values });
    Ok(())
}

fn constant(node: &Node) -> Option<Json> {
    match &node.value {
        TreeValue::Text(text) => Some(text.as_str().into()),
        TreeValue::Int(int) => Some((*int).into()),
        TreeValue::Bool(bool) => Some((*bool).into()),
        _ => None,
    }
}

/// The endpoints of a blueprint, each as one line: `psp: POST /inbound/psp → payment.settle (standard)`.
pub fn summaries(blueprint: &Blueprint) -> Vec<String> {
    let line = |endpoint: &DeclaredEndpoint| {
        let (mut settings, mut unread) = (endpoint.settings.clone(), blueprint.problems());
        let mut text = |name| settings.text(name, &mut unread).unwrap_or_default();
        let (action, scheme) = (text("do"), text("scheme"));
        format!("{0}: POST /inbound/{0} → {action} ({scheme})", endpoint.name)
    };
    blueprint.endpoints.iter().map(line).collect()
}

/// The full name of the action that an endpoint of a blueprint runs, if it is declared.
pub fn action_of(blueprint: &Blueprint, name: &str) -> Option<String> {
    let endpoint = blueprint.endpoints.iter().find(|endpoint| endpoint.name == name)?;
    endpoint.settings.clone().text("do", &mut blueprint.problems())
}
