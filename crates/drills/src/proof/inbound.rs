//! Inbound webhooks: a signed message runs its action once per message id, and what is not signed writes nothing.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value as Json, json};
use statehouse::egress::Egress;
use statehouse::inbound::AcceptedMessage;
use statehouse::infra::effect::signature::sign;
use statehouse::{Blueprint, Code, Refusal};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{ManualClock, Store, SystemClock, Time};

use super::inbound;
use crate::conformance::{Case, cases};
use crate::harness::engines::TestNamespace;
use crate::harness::fake_targets::TestSecrets;
use crate::harness::store_client::{same, whole_log};
use crate::harness::tenant_client::TenantClient;

pub(crate) const CASES: &[Case] = cases! {
    inbound {
        a_message_runs_its_action_once(3),
        racing_deliveries_run_the_action_once(3),
        lost_answers_run_the_action_once(3),
        a_message_that_changes_nothing_is_remembered(3),
        a_refused_message_is_tried_again(3),
        unsigned_and_old_messages_write_nothing(3),
        secrets_are_rotated_without_a_pause(3),
        signatures_of_other_senders_are_verified(3),
        the_tenant_is_what_was_signed(3),
        messages_of_other_kinds_are_ignored(3),
        a_message_needs_a_name_and_the_inputs_of_the_action(3),
        a_callers_operation_does_not_pass_for_a_message(3),
        bad_endpoints_are_reported_at_their_line(1),
    }
};

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.tally]
key    = { id = "text" }
fields = { count = { type = "int", default = 0 }, last = "text?" }
require_version = false

[inbound.psp]
scheme = "standard"
secret = ["env:NEW", "env:OLD"]
tenant = "acme"
when   = { body.type = ["paid", "refunded"] }
do     = "tally.mutate"
input  = { key = "{body.data.account}", increment = { count = 1 }, set = { last = "{id}" } }

[inbound.label]
scheme = "standard"
secret = "env:NEW"
tenant = "acme"
do     = "tally.patch"
key    = "{body.data.account}"
input  = { last = "{body.label}" }

[inbound.hub]
scheme = "hmac"
secret = "env:PLAIN"
header = "X-Hub-Signature-256"
prefix = "sha256="
id     = "{header.x-hub-delivery}"
tenant = "{body.owner}"
do     = "tally.mutate"
key    = "{body.data.account}"
input  = { increment = { count = 1 } }

[inbound.shop]
scheme   = "hmac"
secret   = "env:PLAIN"
header   = "x-shop-signature"
encoding = "base64"
id       = "{body.id}"
tenant   = "acme"
do       = "tally.mutate"
key      = "{body.data.account}"
input    = { increment = { count = 1 } }

[inbound.stripe]
scheme           = "hmac"
secret           = "env:PLAIN"
header           = "stripe-signature"
prefix           = "v1="
timestamp_prefix = "t="
id               = "{body.id}"
tenant           = "acme"
do               = "tally.mutate"
key              = "{body.data.account}"
input            = { increment = { count = 1 } }

[inbound.slack]
scheme           = "hmac"
secret           = "env:PLAIN"
header           = "x-slack-signature"
prefix           = "v0="
timestamp_header = "x-slack-request-timestamp"
signed           = "v0:{timestamp}:{body}"
tolerance        = "1m"
id               = "{body.id}"
tenant           = "acme"
do               = "tally.mutate"
key              = "{body.data.account}"
input            = { increment = { count = 1 } }
"#;

const NEW: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const FOREIGN: &str = "whsec_c3VjaCBhIHNlY3JldCBpcyBubyBvbmUncyBoZXJl";
const PLAIN: &str = "it is a secret to everybody";
/// When messages are signed, in seconds.
const AT: i64 = 1_800_000_000;

/// A house whose clock shows [`AT`], and its secrets.
struct InboundSite {
    client: TenantClient,
    clock: ManualClock,
    secrets: Arc<TestSecrets>,
}

async fn site(namespace: &dyn TestNamespace) -> Result<InboundSite> {
    site_over(namespace.open().await?).await
}

async fn site_over(store: Arc<dyn Store>) -> Result<InboundSite> {
    let clock = ManualClock::at(Time::from_micros(AT * 1_000_000));
    let secrets = Arc::new(TestSecrets::of(&[("NEW", NEW), ("OLD", OLD), ("PLAIN", PLAIN)]));
    let egress = Egress { environment: secrets.clone(), ..Egress::default() };
    let client = TenantClient::before(store, BLUEPRINT, Arc::new(clock.clone()), egress).await?;
    Ok(InboundSite { client, clock, secrets })
}

fn headers(named: &[(&str, &str)]) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in named {
        headers.append(HeaderName::from_bytes(name.as_bytes())?, HeaderValue::from_str(value)?);
    }
    Ok(headers)
}

/// The headers of a message by Standard Webhooks.
fn standard(secret: &str, id: &str, at: i64, body: &str) -> Result<HeaderMap> {
    let signature = sign(secret, id, at, body.as_bytes()).map_err(|why| anyhow!(why))?;
    headers(&[("webhook-id", id), ("webhook-timestamp", &at.to_string()), ("webhook-signature", &signature)])
}

fn paid(account: &str) -> String {
    json!({"type": "paid", "data": {"account": account}}).to_string()
}

impl InboundSite {
    async fn accept(
        &self,
        endpoint: &str,
        headers: &HeaderMap,
        body: &str,
    ) -> Result<AcceptedMessage, Refusal> {
        let house = &self.client.house;
        house.accept_message(house.inbound_endpoint(endpoint)?, headers, body.as_bytes()).await
    }

    async fn deliver(&self, endpoint: &str, headers: &HeaderMap, body: &str) -> Result<bool, Refusal> {
        let message = self.accept(endpoint, headers, body).await?;
        self.client.house.run_message(&message).await?;
        Ok(message.is_handled())
    }

    /// Delivers a message of the endpoint `psp`, signed now.
    async fn pays(&self, id: &str, body: &str) -> Result<bool, Refusal> {
        let headers =
            standard(NEW, id, AT, body).map_err(|error| Refusal::new(Code::Internal, error.to_string()))?;
        self.deliver("psp", &headers, body).await
    }

    async fn refused(&self, endpoint: &str, headers: &HeaderMap, body: &str, code: Code) -> Result<Refusal> {
        match self.deliver(endpoint, headers, body).await {
            Err(refusal) if refusal.code == code => Ok(refusal),
            other => bail!("{endpoint} {headers:?} {body}: expected {code}, got {other:?}"),
        }
    }

    async fn open_tally(&self, id: &str) -> Result<()> {
        self.client.done("tally.create", &[], json!({"id": id}), None).await.map(drop)
    }

    async fn counts(&self, id: &str, count: i64) -> Result<()> {
        self.client.shows("tally", &[id.into()], &json!({"count": count})).await
    }

    async fn records(&self) -> Result<usize> {
        Ok(whole_log(self.client.house.store().as_ref()).await?.len())
    }
}

async fn a_message_runs_its_action_once(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    site.open_tally("a1").await?;
    ensure!(site.pays("msg_1", &paid("a1")).await?);
    site.client.shows("tally", &["a1".into()], &json!({"count": 1, "last": "msg_1"})).await?;
    // A later delivery has a time and a signature of its own, and may count attempts in the body.
    site.clock.advance(Duration::from_secs(3_600));
    let body = json!({"type": "paid", "data": {"account": "a1"}, "attempt": 2}).to_string();
    ensure!(site.deliver("psp", &standard(NEW, "msg_1", AT + 3_600, &body)?, &body).await?);
    site.counts("a1", 1).await?;
    ensure!(site.deliver("psp", &standard(NEW, "msg_2", AT + 3_600, &body)?, &body).await?);
    site.counts("a1", 2).await?;
    // Another endpoint has ids of its own.
    let body = json!({"label": "x", "data": {"account": "a1"}}).to_string();
    site.deliver("label", &standard(NEW, "msg_1", AT + 3_600, &body)?, &body).await?;
    site.client.shows("tally", &["a1".into()], &json!({"count": 2, "last": "x"})).await
}

async fn racing_deliveries_run_the_action_once(namespace: &dyn TestNamespace) -> Result<()> {
    let site = Arc::new(site(namespace).await?);
    site.open_tally("a1").await?;
    for round in 1..=4 {
        let deliveries: Vec<_> = (0..12)
            .map(|_| {
                let site = site.clone();
                tokio::spawn(async move { site.pays(&format!("msg_{round}"), &paid("a1")).await })
            })
            .collect();
        let mut done = 0;
        for delivery in deliveries {
            match delivery.await? {
                Ok(handled) => done += usize::from(handled),
                // The row is contended by the deliveries themselves; nothing was written, and the sender repeats it.
                Err(refusal) => ensure!(refusal.code == Code::Contended, "{refusal}"),
            }
        }
        ensure!(done > 0, "no delivery was answered");
        site.counts("a1", round).await?;
    }
    Ok(())
}

async fn lost_answers_run_the_action_once(namespace: &dyn TestNamespace) -> Result<()> {
    let faulty =
        Arc::new(FaultyStore::over(namespace.open().await?, Arc::new(SystemClock), Odds::default(), 7));
    let mut site = site_over(faulty.clone()).await?;
    site.open_tally("a1").await?;
    // Backoff waits for a clock that moves.
    let (egress, clock) = (site.client.house.egress().clone(), Arc::new(SystemClock));
    site.client = TenantClient::before(faulty.clone(), BLUEPRINT, clock.clone(), egress).await?;
    let now = statehouse_store::Clock::now(clock.as_ref()).micros() / 1_000_000;
    faulty.set_odds(Odds { unknown_before: 0.5, unknown_after: 0.45, ..Odds::default() });
    let mut unknown = 0;
    for number in 0..6 {
        let (id, body) = (format!("msg_{number}"), paid("a1"));
        let headers = standard(NEW, &id, now, &body)?;
        let mut deliveries = 0;
        // The sender delivers it until it has a success.
        while let Err(refusal) = site.deliver("psp", &headers, &body).await {
            ensure!(refusal.code == Code::OutcomeUnknown, "{refusal}");
            (unknown, deliveries) = (unknown + 1, deliveries + 1);
            ensure!(deliveries < 200, "it is never answered");
        }
    }
    ensure!(unknown > 0, "every answer came at once");
    faulty.set_odds(Odds::default());
    site.counts("a1", 6).await
}

async fn a_message_that_changes_nothing_is_remembered(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    site.client.done("tally.create", &[], json!({"id": "a1", "last": "x"}), None).await?;
    let body = json!({"label": "x", "data": {"account": "a1"}}).to_string();
    let headers = standard(NEW, "msg_1", AT, &body)?;
    site.deliver("label", &headers, &body).await?;
    let records = site.records().await?;
    site.deliver("label", &headers, &body).await?;
    same("the records of a repeated delivery", &site.records().await?, &records)?;
    site.client.done("tally.patch", &["a1".into()], json!({"last": "y"}), None).await?;
    site.deliver("label", &headers, &body).await?;
    site.client.shows("tally", &["a1".into()], &json!({"last": "y"})).await
}

async fn a_refused_message_is_tried_again(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    let body = paid("a1");
    let headers = standard(NEW, "msg_1", AT, &body)?;
    for _ in 0..2 {
        site.refused("psp", &headers, &body, Code::NotFound).await?;
    }
    site.open_tally("a1").await?;
    ensure!(site.deliver("psp", &headers, &body).await?);
    ensure!(site.deliver("psp", &headers, &body).await?);
    site.counts("a1", 1).await
}

async fn unsigned_and_old_messages_write_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    site.open_tally("a1").await?;
    let records = site.records().await?;
    let (body, id, at) = (paid("a1"), "msg_1", AT.to_string());
    let good = sign(NEW, id, AT, body.as_bytes()).map_err(|why| anyhow!(why))?;
    let by = |secret| standard(secret, id, AT, &body);
    let with = |id: &str, at: &str, signature: &str| {
        headers(&[("webhook-id", id), ("webhook-timestamp", at), ("webhook-signature", signature)])
    };
    let cut = good.trim_start_matches("v1,");
    let twice = headers(&[
        ("webhook-id", id),
        ("webhook-id", "msg_2"),
        ("webhook-timestamp", &at),
        ("webhook-signature", &good),
    ])?;
    for headers in [
        HeaderMap::new(),
        by(FOREIGN)?,
        with("msg_2", &at, &good)?,
        with(id, &(AT + 1).to_string(), &good)?,
        with(id, &format!("+{at}"), &good)?,
        with(id, "", &good)?,
        with(id, "now", &good)?,
        with(id, "99999999999999999999", &good)?,
        with(id, &at, "")?,
        with(id, &at, cut)?,
        with(id, &at, &format!("v2,{cut}"))?,
        with(id, &at, &format!("v1a,{cut}"))?,
        with(id, &at, &good.replace("v1,", "v1, "))?,
        with(id, &at, &good[..good.len() - 4])?,
        with(id, &at, "v1,")?,
        headers(&[("webhook-timestamp", &at), ("webhook-signature", &good)])?,
        twice,
        standard(NEW, id, AT - 301, &body)?,
        standard(NEW, id, AT + 301, &body)?,
    ] {
        site.refused("psp", &headers, &body, Code::InvalidSignature).await?;
    }
    // Another body under the right headers.
    site.refused("psp", &by(NEW)?, &paid("a2"), Code::InvalidSignature).await?;
    site.refused("psp", &by(NEW)?, "", Code::InvalidSignature).await?;
    same("the records", &site.records().await?, &records)?;
    for at in [AT - 300, AT + 300] {
        ensure!(site.deliver("psp", &standard(NEW, &format!("at-{at}"), at, &body)?, &body).await?);
    }
    // One right signature among others will do.
    let among = format!("v1a,AAAA v1,{} {good}", "A".repeat(43));
    ensure!(site.deliver("psp", &with(id, &at, &among)?, &body).await?);
    site.counts("a1", 3).await
}

async fn secrets_are_rotated_without_a_pause(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    site.open_tally("a1").await?;
    let body = paid("a1");
    for (number, secret) in [NEW, OLD].into_iter().enumerate() {
        ensure!(site.deliver("psp", &standard(secret, &format!("msg_{number}"), AT, &body)?, &body).await?);
    }
    // A sender that has both signs with both.
    let both =
        [OLD, FOREIGN].map(|secret| sign(secret, "msg_2", AT, body.as_bytes()).unwrap_or_default()).join(" ");
    let signed = headers(&[
        ("webhook-id", "msg_2"),
        ("webhook-timestamp", &AT.to_string()),
        ("webhook-signature", &both),
    ])?;
    ensure!(site.deliver("psp", &signed, &body).await?);
    // The old one is taken away. It is read for each message anew.
    site.secrets.set("OLD", None);
    site.refused("psp", &standard(OLD, "msg_3", AT, &body)?, &body, Code::InvalidSignature).await?;
    ensure!(site.deliver("psp", &standard(NEW, "msg_3", AT, &body)?, &body).await?);
    // Without any secret, or with one that is none, nothing can be said of a message.
    for broken in [None, Some("whsec_short")] {
        site.secrets.set("NEW", broken);
        let refusal =
            site.refused("psp", &standard(NEW, "msg_4", AT, &body)?, &body, Code::Unavailable).await?;
        ensure!(!refusal.message.contains("short"), "{refusal}");
    }
    site.counts("a1", 4).await
}

/// What `hmac.new(secret, signed, sha256)` of Python says of these messages.
async fn signatures_of_other_senders_are_verified(namespace: &dyn TestNamespace) -> Result<()> {
    const HUB: &str = "sha256=772175987846cf0ae5ab4bcd4b06ab73e2647ac6dc991f57180379ad9a060033";
    const STRIPE: &str = "8e2d2782c9c74ee529af6fc98df7f5b6c78db8c37075e9edb4b5cabd348a7e8a";
    const SLACK: &str = "v0=49ce85223f770f74a0a5e644214779434a678d0abae918135c46b2f806519546";
    const SHOP: &str = "dyF1mHhGzwrlq0vNSwarc+JkesbcmR9XGAN5rZoGADM=";
    let body = r#"{"id":"evt_1","type":"paid","data":{"account":"a1"}}"#;
    let site = site(namespace).await?;
    site.open_tally("a1").await?;
    let stripe = |at: i64| headers(&[("stripe-signature", &format!("t={at},v1={STRIPE},v0=00"))]);
    let slack =
        |at: i64| headers(&[("x-slack-signature", SLACK), ("x-slack-request-timestamp", &at.to_string())]);
    let shop = headers(&[("x-shop-signature", SHOP)])?;
    for (endpoint, headers) in [("stripe", &stripe(AT)?), ("slack", &slack(AT)?), ("shop", &shop)] {
        for _ in 0..2 {
            ensure!(site.deliver(endpoint, headers, body).await.with_context(|| endpoint)?);
        }
    }
    site.counts("a1", 3).await?;
    let hub = |signature: &str| headers(&[("x-hub-signature-256", signature), ("x-hub-delivery", "d1")]);
    // It has no owner, and so no tenant; the signature is right.
    site.refused("hub", &hub(HUB)?, body, Code::InvalidInput).await?;
    for (endpoint, headers) in [
        ("hub", hub(&HUB.replace("sha256=", ""))?),
        ("hub", hub(&HUB.replace("sha256=", "sha1="))?),
        ("hub", hub(&HUB.replace('7', "8"))?),
        ("hub", hub(&HUB.replace("33", "3"))?),
        ("hub", hub("sha256=")?),
        ("shop", headers(&[("x-shop-signature", STRIPE)])?),
        ("stripe", stripe(AT + 1)?),
        ("stripe", headers(&[("stripe-signature", &format!("v1={STRIPE}"))])?),
        ("stripe", headers(&[("stripe-signature", &format!("t={AT},t={AT},v1={STRIPE}"))])?),
        ("slack", slack(AT + 1)?),
        ("slack", headers(&[("x-slack-signature", SLACK)])?),
    ] {
        site.refused(endpoint, &headers, body, Code::InvalidSignature).await?;
    }
    // What has a time gets old; what has none does not.
    site.clock.advance(Duration::from_secs(61));
    site.refused("slack", &slack(AT)?, body, Code::InvalidSignature).await?;
    ensure!(site.deliver("stripe", &stripe(AT)?, body).await?);
    site.clock.advance(Duration::from_secs(240));
    site.refused("stripe", &stripe(AT)?, body, Code::InvalidSignature).await?;
    ensure!(site.deliver("shop", &shop, body).await?);
    site.counts("a1", 3).await
}

/// Computed with Python, as above, over `{"owner":OWNER,"data":{"account":"a1"}}`.
async fn the_tenant_is_what_was_signed(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    let hub = |signature: &str| {
        headers(&[("x-hub-signature-256", &format!("sha256={signature}")), ("x-hub-delivery", "d1")])
    };
    let signed = [
        ("\"acme\"", "77a988948338fce69a33daf256f6707185fdad6209e2f862706b32ff0dadf3b4"),
        ("\"bond\"", "21b4fd1b53d93fef0636d6823489700da45bc6833229d5f9b8947aaf101f8ce8"),
        ("\"a/b\"", "ca0b4ed182f9f841180c107c8e88c98e4600792f7f31880cccd31a41ff6f04c5"),
        ("\"_house\"", "b86c913341bb8e533a88b1513cb41ac9c4920051f9d9490b3a9a4caf80a5a310"),
        ("{}", "df4c3643a4665ee4403a29e87e41940e06f7224211590311aed8eac95035940d"),
    ];
    let body = |owner: &str| format!(r#"{{"owner":{owner},"data":{{"account":"a1"}}}}"#);
    for tenant in ["acme", "bond"] {
        site.client.for_tenant(tenant)?.done("tally.create", &[], json!({"id": "a1"}), None).await?;
    }
    let records = site.records().await?;
    let [acme, bond, bad @ ..] = &signed;
    for (owner, signature) in bad {
        let refusal = site.refused("hub", &hub(signature)?, &body(owner), Code::InvalidInput).await?;
        same("where", &refusal.field_errors[0].pointer.as_str(), &"/tenant")?;
    }
    // A message for one tenant is none for another.
    site.refused("hub", &hub(acme.1)?, &body(bond.0), Code::InvalidSignature).await?;
    same("the records", &site.records().await?, &records)?;
    for (owner, signature) in [acme, bond, acme] {
        ensure!(site.deliver("hub", &hub(signature)?, &body(owner)).await?);
    }
    for tenant in ["acme", "bond"] {
        site.client.for_tenant(tenant)?.shows("tally", &["a1".into()], &json!({"count": 1})).await?;
    }
    Ok(())
}

async fn messages_of_other_kinds_are_ignored(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    site.open_tally("a1").await?;
    let records = site.records().await?;
    for kind in [json!("created"), json!(null), json!(["paid"]), json!("Paid")] {
        let body = json!({"type": kind, "data": {"account": "a1"}}).to_string();
        ensure!(!site.pays("msg_1", &body).await?, "{body}");
    }
    same("the records", &site.records().await?, &records)?;
    // The id was not used up.
    let body = json!({"type": "refunded", "data": {"account": "a1"}}).to_string();
    ensure!(site.pays("msg_1", &body).await?);
    site.counts("a1", 1).await
}

async fn a_message_needs_a_name_and_the_inputs_of_the_action(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    site.open_tally("a1").await?;
    let records = site.records().await?;
    let long = "x".repeat(statehouse::inbound::ID_BYTES_MAX + 1);
    for (id, body) in [
        (long.as_str(), paid("a1")),
        ("msg_1", "{\"type\": \"paid\"".to_owned()),
        ("msg_1", "[".repeat(500)),
        ("msg_1", json!({"type": "paid", "data": {"account": "a\u{0}"}}).to_string()),
    ] {
        let headers = standard(NEW, id, AT, &body)?;
        site.refused("psp", &headers, &body, Code::InvalidInput).await?;
    }
    same("the records", &site.records().await?, &records)?;
    ensure!(site.pays(&long[1..], &paid("a1")).await?);
    site.counts("a1", 1).await
}

async fn a_callers_operation_does_not_pass_for_a_message(namespace: &dyn TestNamespace) -> Result<()> {
    let site = site(namespace).await?;
    site.open_tally("a1").await?;
    let input = json!({"increment": {"count": 5}});
    site.client.call_as("inbound.psp/msg_1", "tally.mutate", &["a1".into()], input.clone(), None).await?;
    let body = paid("a1");
    site.refused("psp", &standard(NEW, "msg_1", AT, &body)?, &body, Code::OperationReused).await?;
    ensure!(site.pays("msg_2", &body).await?);
    let again = site.client.call_as("inbound.psp/msg_2", "tally.mutate", &["a1".into()], input, None).await;
    ensure!(again.as_ref().is_err_and(|refusal| refusal.code == Code::OperationReused), "{again:?}");
    site.counts("a1", 6).await
}

async fn bad_endpoints_are_reported_at_their_line(_: &dyn TestNamespace) -> Result<()> {
    let good = "\
[entity.tally]
key = { id = \"text\" }
fields = { count = \"int\" }
[inbound.psp]
scheme = \"hmac\"
header = \"x-signature\"
secret = \"env:A\"
id = \"{body.id}\"
tenant = \"acme\"
do = \"tally.create\"
input = { id = \"{id}\", count = \"{body.count}\" }
";
    let problems = |text: &str| -> Result<Json> {
        let blueprint = Blueprint::read("statehouse.toml", text)?;
        Ok(statehouse::resource::declare(&blueprint).err().map_or(json!([]), |problems| problems.to_json()))
    };
    same("the problems of a good one", &problems(good)?, &json!([]))?;
    for (line, from, to, expected) in [
        (5, "\"hmac\"", "\"md5\"", "must be \"standard\" or \"hmac\""),
        (6, "\"hmac\"", "\"standard\"", "`header` is a setting of `scheme = \"hmac\"`"),
        (4, "header = \"x-signature\"\n", "", "there is no `header`"),
        (6, "x-signature", "x signature", "is not a header"),
        (7, "\"env:A\"", "\"whsec_abc\"", "does not say where a secret is"),
        (7, "\"env:A\"", "[\"env:A\", \"env:B\", \"env:C\"]", "one secret, or two"),
        (7, "\"env:A\"", "[]", "one secret, or two"),
        (8, "{body.id}", "always", "placeholder"),
        (8, "{body.id}", "{id}", "does not name a message"),
        (9, "\"acme\"", "\"a/b\"", "a tenant is"),
        (9, "\"acme\"", "\"_house\"", "the server itself"),
        (9, "\"acme\"", "\"{header.x-tenant}\"", "may not be signed"),
        (10, "tally.create", "tally.creat", "did you mean `create`?"),
        (10, "tally.create", "tally.list", "not a write of one plan"),
        (11, "{body.count}", "{data.count}", "names nothing"),
        (11, "{body.count}", "{header.X-Count}", "is not a header"),
        (11, "count = \"{body.count}\"", "cuont = 1, count = 1", "did you mean `count`?"),
        (9, "tenant =", "tolerance = \"5m\"\ntenant =", "when a message was signed"),
        (9, "tenant =", "signed = \"{timestamp}.{body}\"\ntenant =", "needs `timestamp_header`"),
        (9, "tenant =", "signed = \"x\"\ntenant =", "must have `{body}`"),
        (
            10,
            "tenant =",
            "timestamp_header = \"x-at\"\nsigned = \"{body}\"\ntenant =",
            "must have `{timestamp}`",
        ),
        (9, "tenant =", "when = { type = \"a\" }\ntenant =", "neither body.FIELD nor header.NAME"),
        (9, "tenant =", "when = { body.type = [] }\ntenant =", "must be a text"),
        (9, "tenant =", "whem = 1\ntenant =", "did you mean `when`?"),
        (4, "inbound.psp", "inbound.Psp", "must begin with a letter"),
    ] {
        let text = good.replace(from, to);
        let found = match Blueprint::read("statehouse.toml", &text) {
            Ok(_) => problems(&text)?,
            Err(problems) => problems.to_json(),
        };
        let said = found.to_string();
        let is_there = found.as_array().is_some_and(|all| {
            all.iter()
                .any(|one| one["line"] == line && one.to_string().contains(&expected.replace('"', "\\\"")))
        });
        ensure!(is_there, "{to}: expected line {line}: {expected}, found {said}");
    }
    Ok(())
}
