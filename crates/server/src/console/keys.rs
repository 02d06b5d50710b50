//! API keys: who may call the house. For operators.

use std::time::Duration;

use axum::response::Response;
use maud::{Markup, html};
use statehouse_store::Tenant;

use super::fields::{SentForm, hidden};
use super::frame::{ConsolePage, empty, heading};
use super::values::{StateKind, mark, time};
use super::{ConsoleContext, ROOT, redirect};
use crate::auth::Scope;
use crate::auth::keys::{self, CreatedKey, KeyInfo, NewKey};
use crate::auth::networks::BadNetwork;
use crate::auth::secret::SystemRowError;
use crate::problem::{INVALID_INPUT, MALFORMED, Problem, UNAVAILABLE};

/// Time for which the old key is valid after a rotation.
const OVERLAP: Duration = Duration::from_secs(24 * 60 * 60);
/// Keys on the page.
const KEYS_MAX: usize = 500;

fn failed(error: SystemRowError) -> Problem {
    match error {
        SystemRowError::NoKey(_)
        | SystemRowError::NotLive(_)
        | SystemRowError::BadName
        | SystemRowError::OwnTenant(_) => Problem::new(INVALID_INPUT, error.to_string()),
        other => Problem::hidden(UNAVAILABLE, other.to_string()),
    }
}

pub(super) async fn page(cx: &ConsoleContext) -> Result<Response, Problem> {
    super::access::may_operate(&cx.caller)?;
    show(cx, None).await
}

async fn show(cx: &ConsoleContext, created: Option<&CreatedKey>) -> Result<Response, Problem> {
    let mut listed = keys::list(&cx.shared.house, None).await.map_err(failed)?;
    listed.reverse();
    listed.truncate(KEYS_MAX);
    let content = html! {
        (heading(&html! { "Keys" }, &html! {}))
        @if cx.shared.authenticator.is_open() {
            p class="notice" { "This server runs without credentials: it serves local callers only. Keys are checked once it is started with " code { "--api-keys" } "." }
        }
        @if let Some(created) = created {
            div class="done" role="status" {
                p { "The new key. It is shown this once and stored nowhere:" }
                pre tabindex="0" { (created.key) }
            }
        }
        @if cx.may_operate() { (create_form(cx)) }
        @if listed.is_empty() { (empty("There is no key yet.", None)) } @else { (table(cx, &listed)) }
    };
    Ok(ConsolePage { title: "Keys", place: &format!("{ROOT}/keys"), content }.show(cx))
}

fn create_form(cx: &ConsoleContext) -> Markup {
    html! {
        form method="post" action={ (ROOT) "/keys" } class="filters" {
            (hidden("do", "create"))
            label { "tenant" input name="tenant" value=(cx.caller.tenant.as_str()) required autocomplete="off"; }
            label { "name" input name="name" autocomplete="off"; }
            label { "scopes" input name="scopes" value="read write" required autocomplete="off"; }
            label { "valid for days" input name="days" inputmode="numeric" autocomplete="off" placeholder="for ever"; }
            label { "networks" input name="networks" autocomplete="off" placeholder="all"; }
            button type="submit" { "Create key" }
        }
    }
}

fn table(cx: &ConsoleContext, listed: &[KeyInfo]) -> Markup {
    html! {
        div class="scroll" tabindex="0" role="region" aria-label="Keys" { table data-rows="" {
            thead { tr { @for name in ["prefix", "tenant", "name", "scopes", "networks", "state", "created", "expires", "change"] { th scope="col" { (name) } } } }
            tbody { @for key in listed { tr {
                th scope="row" class="mono" { (key.prefix) }
                td { (key.tenant) } td { (key.name) } td { (key.scopes) } td { (key.networks.as_deref().unwrap_or("all")) }
                td { @if key.is_live(cx.now) { (mark(StateKind::Ok, "live")) } @else if key.revoked_at.is_some() { (mark(StateKind::Over, "revoked")) } @else { (mark(StateKind::Over, "expired")) } }
                td { (time(key.created_at, cx.now)) }
                td { @if let Some(at) = key.expires_at { (time(at, cx.now)) } @else { span class="null" { "–" } } }
                td { @if key.is_live(cx.now) && cx.may_operate() { (change(&key.prefix, "rotate", "Rotate")) (change(&key.prefix, "revoke", "Revoke")) } }
            } } }
        } }
    }
}

fn change(prefix: &str, verb: &str, title: &str) -> Markup {
    html! {
        form method="post" action={ (ROOT) "/keys" } class="inline" {
            (hidden("do", verb)) (hidden("prefix", prefix))
            button type="submit" class="quiet" aria-label={ (title) " " (prefix) } { (title) }
        }
    }
}

pub(super) async fn submit(cx: &ConsoleContext, sent: &SentForm) -> Result<Response, Problem> {
    cx.require_operator()?;
    let (house, secret, by) = (&cx.shared.house, &cx.shared.console.secret, cx.caller.audited());
    match sent.required("do")? {
        "create" => {
            let created = keys::create(house, secret, new_key(cx, sent)?, &by).await.map_err(failed)?;
            show(cx, Some(&created)).await
        }
        "rotate" => {
            let rotated = keys::rotate(house, secret, sent.required("prefix")?, (OVERLAP, None), &by).await;
            show(cx, Some(&rotated.map_err(failed)?)).await
        }
        "revoke" => {
            keys::revoke(house, sent.required("prefix")?, &by).await.map_err(failed)?;
            Ok(redirect(&format!("{ROOT}/keys")))
        }
        other => Err(Problem::new(MALFORMED, format!("{other} is not create, rotate or revoke"))),
    }
}

fn new_key(cx: &ConsoleContext, sent: &SentForm) -> Result<NewKey, Problem> {
    let invalid = |why: String| Problem::new(INVALID_INPUT, why);
    let tenant =
        Tenant::new(sent.required("tenant")?).map_err(|error| invalid(format!("tenant: {error}")))?;
    let words = sent.required("scopes")?.split([',', ' ']).filter(|word| !word.is_empty());
    let scopes: Result<Vec<Scope>, _> = words.map(str::parse).collect();
    let scopes = scopes.map_err(|error| invalid(format!("scopes: {error}")))?;
    for scope in &scopes {
        scope.check(&cx.shared.house).map_err(|error| invalid(format!("scopes: {error}")))?;
    }
    let days = sent.text("days").map(str::parse::<u64>).transpose();
    let days = days.map_err(|_| invalid("days is a number".to_owned()))?;
    let expires_in = days.map(|days| Duration::from_secs(days.saturating_mul(24 * 60 * 60)));
    let networks = sent.text("networks").unwrap_or_default().parse();
    let networks = networks.map_err(|error: BadNetwork| invalid(format!("networks: {error}")))?;
    let name = sent.text("name").unwrap_or_default().to_owned();
    Ok(NewKey { tenant, name, scopes, expires_in, networks })
}
