//! I12 Effects: what leaves the house does so at least once, counts once, and an unknown outcome is never reported as known.

mod doubt;
mod secrets;
mod settlers;
mod targets;
mod tenants;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::audit::{self, AuditActor};
use statehouse::egress::http::{HttpTransport, Resolver};
use statehouse::egress::{Egress, Environment, TargetResponse};
use statehouse::infra::effect::{EffectRequest, Outbox, SecretChange, keep_secret};
use statehouse::secret_keys::{CONTENT, SecretKeys, reencrypt};
use statehouse::worker::WorkerOptions;
use statehouse::{Answer, Blueprint, Code, Operation, system};
use statehouse_store::clock::SkewedClock;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{
    Address, Clock, Consistency, Entry, ManualClock, Plan, Random, Record, Step, Store, StoreError,
    SystemClock, Tenant, Time, Value,
};
use tokio::sync::watch;

use self::doubt::*;
use self::secrets::*;
use self::settlers::*;
use self::targets::*;
use self::tenants::*;
use super::{cases as effect, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::fake_targets::{
    FakeTargets, Latch, ServerReaction, TargetBehavior, TestHttpServer, TestSecrets, header, key_of,
};
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    effect {
        an_effect_is_sent_and_its_answer_kept(3),
        a_key_names_one_effect(3),
        an_effect_has_one_name_in_the_log(3),
        an_effect_exists_if_what_decided_it_does(5),
        programs_write_effects_in_their_own_plans(4),
        every_transition_begins_with_its_states(3),
        every_transition_that_may_begin_does(3),
        a_paused_sender_records_nothing(3),
        a_lost_acknowledgement_is_asked_about(3),
        what_was_not_applied_is_sent_again(3),
        a_stuck_reconciliation_is_said_and_goes_on(3),
        an_idempotent_target_gets_the_same_key_again(3),
        what_may_have_been_applied_is_never_said_to_have_failed(3),
        without_a_way_to_know_nothing_is_sent_twice(3),
        a_sender_that_is_killed_leaves_doubt(3),
        a_sender_that_wakes_late_is_refused(3),
        a_lease_does_not_lapse_early(3),
        each_effect_is_sent_once_however_many_scan(3),
        a_stale_reader_changes_nothing(3),
        a_finding_that_comes_late_is_refused(3),
        cancelling_and_sending_contend_on_one_row(3),
        lost_answers_of_the_store_lose_no_effect(3),
        pauses_grow_and_targets_are_heard(3),
        nothing_is_sent_before_its_time_or_after_its_end(3),
        what_is_rejected_is_parked_and_can_be_replayed(3),
        a_changed_blueprint_holds_for_what_is_due(3),
        a_broken_target_is_left_alone_and_others_go_on(3),
        failures_of_one_tenant_do_not_stop_another(3),
        tenants_share_the_slots_of_a_target(3),
        no_target_gets_more_than_its_limits(3),
        a_slow_target_delays_no_other_target(3),
        signatures_are_as_receivers_expect_them(3),
        secrets_can_be_kept_in_the_house_and_rotated(3),
        secrets_are_encrypted_at_rest(3),
        keys_of_secrets_are_rotated(3),
        nothing_goes_where_it_must_not(3),
        hostile_answers_are_borne(3),
        silence_is_doubt_and_a_closed_door_is_not(3),
        what_is_over_is_forgotten_in_time(3),
        processes_share_the_effects_and_survive_each_other(3),
        an_error_that_is_replayed_is_asked_about(3),
        a_settler_changes_its_rows_with_the_outcome(4),
        a_settler_reads_what_a_status_does_not_say(4),
        a_settler_that_refuses_loses_no_outcome(4),
        an_outcome_is_settled_once(4),
        what_a_person_found_out_is_settled(4),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "effect succeeded but ack lost",
        "A target does what it is asked and its answer never arrives, and the target is asked what became of it.",
        "effect::a_lost_acknowledgement_is_asked_about",
    ),
    Drill::by_case(
        CASES,
        "duplicate side effect",
        "Several processes look for what is due at once, and the target counts what it gets.",
        "effect::each_effect_is_sent_once_however_many_scan",
    ),
    Drill::by_case(
        CASES,
        "stuck reconciliation",
        "A target that left an effect in doubt does not say what became of it, however often it is asked.",
        "effect::a_stuck_reconciliation_is_said_and_goes_on",
    ),
    Drill::by_case(
        CASES,
        "invalid workflow transition around effect",
        "Each action is called on an effect in each of its states.",
        "effect::every_transition_begins_with_its_states",
    ),
];

const START_MS: i64 = 1_800_000_000_000;
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

/// One target each: one that can be asked, one that honours keys, one that does neither. And one with many targets.
const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.order]
key    = { id = "int" }
fields = { paid = "bool?" }

[effect.charge]
url          = "https://psp.example/charges"
headers      = { authorization = "Bearer ${env:PSP_KEY}", x-shop = "7" }
reconcile    = { url = "https://psp.example/charges/{key}", after = "10s", max_checks = 3 }
back_off     = { min = "1s", max = "8s" }
max_attempts = 4
lease        = "1m"
breaker      = { failures = 100 }

[effect.ledger]
url          = "https://ledger.example/entries"
idempotent   = true
back_off     = { min = "1s", max = "8s" }
max_attempts = 4
lease        = "1m"
breaker      = { failures = 100 }

[effect.mail]
url          = "https://mail.example/send"
content_type = "text/plain"
back_off     = { min = "1s", max = "8s" }
max_attempts = 4
lease        = "1m"
breaker      = { failures = 100 }

[effect.hook]
hosts        = ["a.example", "b.example", "*.c.example"]
idempotent   = true
shards       = 1
max_attempts = 50
back_off     = { min = "1s", max = "4s" }
limits       = { concurrency = 2 }
breaker      = { failures = 3, cool_down = "30s" }
"#;

const SECRETS: &[(&str, &str)] = &[("PSP_KEY", "sk-topsecret")];

fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(START_MS))
}

fn key(key: &str) -> [Value; 1] {
    [key.into()]
}

/// A client whose outside follows a script.
struct EffectFixture {
    client: TenantClient,
    script: Arc<FakeTargets>,
    clock: ManualClock,
}

impl EffectFixture {
    async fn open(namespace: &dyn TestNamespace, script: Arc<FakeTargets>) -> Result<EffectFixture> {
        EffectFixture::with(namespace, script, BLUEPRINT).await
    }

    async fn with(
        namespace: &dyn TestNamespace,
        script: Arc<FakeTargets>,
        blueprint: &str,
    ) -> Result<EffectFixture> {
        let clock = standing();
        let store = namespace.open_at(Arc::new(clock.clone())).await?;
        let egress = script.egress(SECRETS);
        let client = TenantClient::before(store, blueprint, Arc::new(clock.clone()), egress).await?;
        Ok(EffectFixture { client, script, clock })
    }

    async fn send(&self, resource: &str, name: &str) -> Result<Answer> {
        let mut input = json!({"key": name, "body": {"n": name}});
        if resource == "mail" {
            input["body"] = json!("Dear");
        }
        self.client.done(&format!("{resource}.send"), &[], input, None).await
    }

    async fn send_hook(&self, name: &str, url: &str) -> Result<Answer> {
        self.client.done("hook.send", &[], json!({"key": name, "url": url}), None).await
    }

    /// Lets time pass, and everything that is due then happen.
    async fn pass(&self, span: Duration) -> Result<()> {
        self.clock.advance(span);
        self.client.drain_workers().await?;
        self.check().await
    }

    /// Checks the invariants of every effect of the house.
    async fn check(&self) -> Result<()> {
        for resource in self.client.house.resources() {
            if resource.archetype.keyword() == "effect" && !resource.tables.is_empty() {
                invariants::check(&self.client.scope(&resource.name)).await?;
            }
        }
        Ok(())
    }

    async fn shows(&self, resource: &str, name: &str, expected: Json) -> Result<()> {
        self.client.shows(resource, &key(name), &expected).await
    }

    /// How long the house waits before it looks at an effect again.
    async fn wait(&self, resource: &str, name: &str) -> Result<Duration> {
        let shown = self.client.shown(resource, &key(name), &["due_at"]).await?;
        let due: Time = shown[0].as_str().context("it is not due")?.parse()?;
        Ok(due.since(self.clock.now()))
    }
}

type PausedStep = tokio::task::JoinHandle<Result<(), StoreError>>;

/// A step of all workers that is held up where `reached` says. One that saw nothing is repeated: an index may lag.
async fn held_up(client: &TenantClient, reached: impl Fn() -> bool) -> Result<PausedStep> {
    for _ in 0..1_000 {
        let client = client.clone();
        let step = tokio::spawn(async move { client.work(20).await.map(drop) });
        while !reached() && !step.is_finished() {
            pause().await;
        }
        if !step.is_finished() {
            return Ok(step);
        }
        step.await??;
    }
    anyhow::bail!("nothing was ever found to be due")
}

/// The names of the events about a subject, in order.
async fn story(store: &dyn Store, subject: &str) -> Result<Vec<String>> {
    let records = whole_log(store).await?;
    let about = records.iter().filter(|record| record.key == subject);
    Ok(about.flat_map(|record| record.events.iter().map(|event| event.name.clone())).collect())
}

/// The same, once the log tells it so: on some engines it comes a little later.
async fn tells(store: &dyn Store, subject: &str, expected: &[&str]) -> Result<()> {
    let mut told = Vec::new();
    for _ in 0..1_000 {
        told = story(store, subject).await?;
        if told == expected {
            return Ok(());
        }
        pause().await;
    }
    anyhow::bail!("{subject}: expected {expected:?}, the log tells {told:?}")
}

async fn an_effect_is_sent_and_its_answer_kept(namespace: &dyn TestNamespace) -> Result<()> {
    let target = TestHttpServer::open(|got, _| {
        // A target that tells everything it was told.
        let seen = got.headers.get("authorization").cloned().unwrap_or_default();
        ServerReaction::answer(
            201,
            &[("content-type", "application/json")],
            format!("{{\"saw\":\"{seen}\"}}").as_bytes(),
        )
    })
    .await?;
    let blueprint = format!(
        "[effect.charge]\nurl = \"http://{}/charges/{{key}}?x=1\"\nallow_private = true\n\
         headers = {{ authorization = \"Bearer ${{env:PSP_KEY}}\", x-shop = \"7\" }}\n",
        target.address
    );
    let clock = standing();
    let egress = Egress { environment: Arc::new(TestSecrets::of(SECRETS)), ..Egress::default() };
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let client = TenantClient::before(store.clone(), &blueprint, Arc::new(clock.clone()), egress).await?;
    client.refused("charge.read", &key("order-1"), json!({}), None, Code::NotFound).await?;
    let input =
        json!({"key": "order-1", "body": {"amount": 100, "to": "Zoë"}, "headers": {"X-Trace": "abc"}});
    let sent = client.done("charge.send", &[], input, None).await?;
    same("what was created", &sent.created.as_deref(), &Some("order-1"))?;
    shows(
        &sent,
        &json!({
            "status": "PENDING", "attempt": 0, "tries": 0, "doubt": false, "sent_key": "acme:charge:order-1",
            "url": format!("http://{}/charges/acme%3Acharge%3Aorder-1?x=1", target.address),
            "target": target.address.to_string(), "due_at": clock.now().to_string(),
        }),
    )?;
    client.drain_workers().await?;
    let got = target.got();
    same("how many requests came", &got.len(), &1)?;
    same("the request", &got[0].line.as_str(), &"POST /charges/acme%3Acharge%3Aorder-1?x=1 HTTP/1.1")?;
    same("its body", &serde_json::from_slice::<Json>(&got[0].body)?, &json!({"amount": 100, "to": "Zoë"}))?;
    for (name, value) in [
        ("authorization", "Bearer sk-topsecret"),
        ("x-shop", "7"),
        ("x-trace", "abc"),
        ("idempotency-key", "acme:charge:order-1"),
        ("content-type", "application/json"),
        ("host", &target.address.to_string()),
    ] {
        same(name, &got[0].headers.get(name).map(String::as_str), &Some(value))?;
    }
    let read = client.done("charge.read", &key("order-1"), json!({}), None).await?;
    shows(
        &read,
        &json!({
            "status": "DELIVERED", "attempt": 1, "tries": 1, "http_status": 201, "doubt": false, "due_at": null,
            "answer": "{\"saw\":\"Bearer [secret]\"}", "delivered_at": clock.now().to_string(),
        }),
    )?;
    tells(store.as_ref(), "order-1", &["charge.pending", "charge.sending", "charge.delivered"]).await?;
    // Nothing that can be read has the secret in it.
    for text in [read.body.to_string(), format!("{:?}", whole_log(store.as_ref()).await?)] {
        ensure!(!text.contains("topsecret"), "{text}");
    }
    client.drain_workers().await?;
    same("how many requests came", &target.got().len(), &1)
}

async fn a_key_names_one_effect(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = EffectFixture::open(namespace, FakeTargets::of(|_, _| TargetBehavior::status(200))).await?;
    let client = &fixture.client;
    let first = fixture.send("charge", "order-1").await?;
    let again = fixture.send("charge", "order-1").await?;
    same("the same effect", &again.body, &first.body)?;
    let other = json!({"key": "order-1", "body": {"n": "more"}});
    client.refused("charge.send", &[], other.clone(), None, Code::AlreadyExists).await?;
    client.drain_workers().await?;
    // Also when it is long over.
    let again = fixture.send("charge", "order-1").await?;
    shows(&again, &json!({"status": "DELIVERED", "attempt": 1}))?;
    client.refused("charge.send", &[], other, None, Code::AlreadyExists).await?;
    // Another tenant's key, and another effect's, are others.
    let bond = client.for_tenant("bond")?;
    bond.done("charge.send", &[], json!({"key": "order-1", "body": {"n": "order-1"}}), None).await?;
    fixture.send("ledger", "order-1").await?;
    client.drain_workers().await?;
    let acted = fixture.script.acted();
    let expected = ["acme:charge:order-1", "acme:ledger:order-1", "bond:charge:order-1"];
    same("what was done", &acted, &expected.map(|key| (key.to_owned(), 1)).into())?;
    for (key, input) in [
        ("", json!({"key": "", "body": 1})),
        ("a line break", json!({"key": "a\nb"})),
        ("an accent", json!({"key": "é"})),
        ("too long", json!({"key": "x".repeat(129)})),
        ("no object", json!({"key": "k", "headers": 3})),
        ("no text", json!({"key": "k", "headers": {"x": 3}})),
        ("no header", json!({"key": "k", "headers": {"x y": "3"}})),
        ("two lines", json!({"key": "k", "headers": {"x": "a\r\nhost: evil"}})),
        ("the house's", json!({"key": "k", "headers": {"Authorization": "mine"}})),
        ("HTTP's", json!({"key": "k", "headers": {"Content-Length": "9"}})),
        ("the key", json!({"key": "k", "headers": {"idempotency-key": "other"}})),
        ("a URL", json!({"key": "k", "url": "https://psp.example/"})),
    ] {
        client
            .refused("charge.send", &[], input, None, Code::InvalidInput)
            .await
            .with_context(|| key.to_owned())?;
    }
    let long = json!({"key": "k", "body": "x".repeat(100_001)});
    client.refused("charge.send", &[], long, None, Code::TooLarge).await?;
    client.refused("mail.send", &[], json!({"key": "k", "body": {"a": 1}}), None, Code::InvalidInput).await?;
    Ok(())
}

async fn an_effect_has_one_name_in_the_log(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = EffectFixture::open(namespace, FakeTargets::of(|_, _| TargetBehavior::status(200))).await?;
    // What separates the parts of a key, and what escapes it.
    fixture.send("ledger", "entry,1%").await?;
    fixture.pass(Duration::ZERO).await?;
    let store = fixture.client.house.store().clone();
    let story = ["ledger.pending", "ledger.sending", "ledger.delivered"];
    tells(store.as_ref(), "entry%2C1%25", &story).await
}

async fn an_effect_exists_if_what_decided_it_does(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = EffectFixture::open(namespace, FakeTargets::of(|_, _| TargetBehavior::status(200))).await?;
    let client = &fixture.client;
    client.done("order.create", &[], json!({"id": 1}), None).await?;
    let batch = async |version: i64, name: &str, body: Json| {
        let requests = vec![
            TenantClient::request("order.update", &[1.into()], &json!({"paid": true}), Some(version.into())),
            TenantClient::request("charge.send", &[], &json!({"key": name, "body": body}), None),
        ];
        client.house.batch(&client.tenant, requests, Operation::default()).await
    };
    // The decision is refused, and the effect with it.
    let refused = batch(7, "order-1", json!(1)).await.err().map(|refusal| (refusal.call, refusal.code));
    same("a decision that is refused", &refused, &Some((Some(0), Code::VersionConflict)))?;
    client.refused("charge.read", &key("order-1"), json!({}), None, Code::NotFound).await?;
    client.drain_workers().await?;
    same("how often it was sent", &fixture.script.outbounds().len(), &0)?;
    // The effect is refused, and the decision with it.
    fixture.send("charge", "taken").await?;
    let refused = batch(1, "taken", json!("other")).await.err().map(|refusal| (refusal.call, refusal.code));
    same("an effect that is refused", &refused, &Some((Some(1), Code::AlreadyExists)))?;
    client.shows("order", &[1.into()], &json!({"paid": null, "version": 1})).await?;
    // Both.
    batch(1, "order-1", json!(1)).await?;
    client.shows("order", &[1.into()], &json!({"paid": true, "version": 2})).await?;
    fixture.shows("charge", "order-1", json!({"status": "PENDING"})).await?;
    client.drain_workers().await?;
    fixture.shows("charge", "order-1", json!({"status": "DELIVERED"})).await
}

async fn programs_write_effects_in_their_own_plans(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = EffectFixture::open(namespace, FakeTargets::of(|_, _| TargetBehavior::status(200))).await?;
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
    let outbox = Outbox::of(&blueprint, "ledger").context("there is no ledger")?;
    ensure!(Outbox::of(&blueprint, "order").is_none(), "an order has no outbox");
    let letter = EffectRequest {
        key: "entry-1".into(),
        body: json!({"sum": 0}),
        after: SECOND,
        ..EffectRequest::default()
    };
    let (store_client, tenant) = (fixture.client.store_client()?, &fixture.client.tenant);
    let orders = fixture.client.table("orders")?.clone();
    fixture.client.done("order.create", &[], json!({"id": 1}), None).await?;
    let plan = |guard: i64| -> Result<_> {
        let pieces = outbox.send(tenant, &letter, fixture.clock.now())?;
        let decided = Step::update(&orders, [1.into()])
            .guard(statehouse_store::Guard::version(guard))
            .set("paid", true);
        let mut event = pieces.event;
        event.row_of = event.row_of.map(|step| step + 1);
        let entry = Entry::about("order", "1").event(event.with("subject", pieces.subject));
        Ok(store_client.plan().step(decided).steps(pieces.steps).log(entry))
    };
    store_client.refuse(plan(9)?).await?;
    fixture.client.refused("ledger.read", &key("entry-1"), json!({}), None, Code::NotFound).await?;
    store_client.apply(plan(1)?).await?;
    let wakeups = outbox.send(tenant, &letter, fixture.clock.now())?.wakeups;
    let wake = wakeups.first().context("no worker is woken")?;
    same(
        "who is woken",
        &(wake.worker.as_str(), wake.at),
        &("ledger.send", fixture.clock.now().plus(SECOND)),
    )?;
    fixture.pass(SECOND).await?;
    fixture.shows("ledger", "entry-1", json!({"status": "DELIVERED", "http_status": 200})).await
}

async fn every_transition_begins_with_its_states(namespace: &dyn TestNamespace) -> Result<()> {
    let door = Latch::default();
    let script = FakeTargets::of({
        let door = door.clone();
        move |outbound, _| match outbound.url.path() {
            "/charges" if key_of(outbound).ends_with("held") => TargetBehavior::Holds(door.clone()),
            "/charges" if key_of(outbound).ends_with("rejected") => TargetBehavior::status(422),
            "/charges" if key_of(outbound).ends_with("waiting") => TargetBehavior::Unreachable,
            "/charges" if key_of(outbound).ends_with("doubtful") => TargetBehavior::Loses,
            _ => TargetBehavior::status(200),
        }
    });
    let fixture = EffectFixture::open(namespace, script).await?;
    let client = &fixture.client;
    for name in ["rejected", "waiting", "doubtful", "done"] {
        fixture.send("charge", name).await?;
    }
    client.drain_workers().await?;
    fixture.send("charge", "cancelled").await?;
    client.done("charge.cancel", &key("cancelled"), json!({}), None).await?;
    fixture.send("charge", "held").await?;
    let sender = held_up(client, || fixture.script.outbounds().len() == 5).await?;
    let later = json!({"key": "pending", "after_ms": 3_600_000});
    client.done("charge.send", &[], later, None).await?;
    let resolve = json!({"delivered": true, "reason": "seen on the statement"});
    // By state: whether it can be cancelled, replayed, resolved, reconciled.
    for (name, status, can) in [
        ("pending", "PENDING", [true, false, false, false]),
        ("held", "SENDING", [false, false, false, false]),
        ("waiting", "RETRYING", [true, true, false, false]),
        ("doubtful", "UNCERTAIN", [false, false, true, true]),
        ("done", "DELIVERED", [false, false, false, false]),
        ("rejected", "PARKED", [true, true, true, false]),
        ("cancelled", "CANCELLED", [false, false, false, false]),
    ] {
        fixture.shows("charge", name, json!({"status": status})).await?;
        let actions = ["cancel", "replay", "resolve", "reconcile"];
        for (action, can) in actions.into_iter().zip(can) {
            if can {
                continue;
            }
            let input = if action == "resolve" { resolve.clone() } else { json!({}) };
            client
                .refused(&format!("charge.{action}"), &key(name), input, None, Code::WrongState)
                .await
                .with_context(|| format!("{action} of {status}"))?;
        }
        fixture.shows("charge", name, json!({"status": status})).await?;
    }
    for action in ["cancel", "replay", "reconcile"] {
        client.refused(&format!("charge.{action}"), &key("none"), json!({}), None, Code::NotFound).await?;
    }
    client.refused("charge.cancel", &key("pending"), json!({}), Some(9), Code::VersionConflict).await?;
    for (action, name, input, status) in [
        ("cancel", "pending", json!({}), "CANCELLED"),
        ("replay", "waiting", json!({}), "PENDING"),
        ("resolve", "doubtful", resolve, "DELIVERED"),
        ("cancel", "rejected", json!({}), "CANCELLED"),
    ] {
        let answer = client.done(&format!("charge.{action}"), &key(name), input, None).await?;
        shows(&answer, &json!({"status": status}))?;
    }
    fixture
        .shows(
            "charge",
            "doubtful",
            json!({"doubt": false, "reason": "resolved_by_hand", "detail": "seen on the statement"}),
        )
        .await?;
    door.open();
    sender.await??;
    fixture.shows("charge", "held", json!({"status": "DELIVERED"})).await?;
    // What is cancelled stays so.
    let before = fixture.script.count("psp.example");
    fixture.pass(HOUR * 2).await?;
    let after = fixture.script.outbounds();
    ensure!(after.iter().skip(before).all(|outbound| key_of(outbound).ends_with("waiting")), "{after:?}");
    let list = client.done("charge.list", &[], json!({"status": "CANCELLED"}), None).await?;
    ensure!(list.body.as_array().is_some(), "no list: {}", list.body);
    Ok(())
}

async fn every_transition_that_may_begin_does(namespace: &dyn TestNamespace) -> Result<()> {
    let script = FakeTargets::of(|outbound, _| match key_of(outbound) {
        key if key.contains("retrying") => TargetBehavior::Unreachable,
        key if key.contains("parked") => TargetBehavior::status(422),
        key if key.contains("uncertain") => TargetBehavior::Loses,
        _ => TargetBehavior::status(200),
    });
    let fixture = EffectFixture::open(namespace, script).await?;
    let client = &fixture.client;
    let states = ["pending", "retrying", "parked", "uncertain", "delivered"];
    // One that names the version that it has seen, and one that does not. A target that does one key once may get it again.
    for (resource, versioned) in [("charge", true), ("ledger", false)] {
        let actions: &[&str] = if resource == "charge" {
            &["cancel", "replay", "resolve", "reconcile"]
        } else {
            &["cancel", "replay", "resolve"]
        };
        let mut cross = Vec::new();
        for state in states {
            cross.extend(actions.iter().map(|action| (state, *action)));
        }
        for (state, action) in cross.iter().copied() {
            let after_ms = if state == "pending" { 3_600_000 } else { 0 };
            let input = json!({"key": format!("{state}-{action}"), "after_ms": after_ms});
            client.done(&format!("{resource}.send"), &[], input, None).await?;
        }
        client.drain_workers().await?;
        for (state, action) in cross.iter().copied() {
            let name = format!("{state}-{action}");
            let shown = client.shown(resource, &key(&name), &["status", "version"]).await?;
            same(&name, &shown[0], &json!(state.to_uppercase()))?;
            let may = match action {
                "cancel" => ["pending", "retrying", "parked"].contains(&state),
                "replay" => {
                    ["retrying", "parked"].contains(&state) || (state == "uncertain" && resource == "ledger")
                }
                "resolve" => ["uncertain", "parked"].contains(&state),
                _ => state == "uncertain",
            };
            let input = match action {
                "resolve" => json!({"delivered": false, "reason": "not on the statement"}),
                _ => json!({}),
            };
            let version = shown[1].as_i64().filter(|_| versioned);
            if let (true, Some(version)) = (may, version) {
                let action = format!("{resource}.{action}");
                let other = Some(version + 1);
                client.refused(&action, &key(&name), input.clone(), other, Code::VersionConflict).await?;
            }
            let told = client.call(&format!("{resource}.{action}"), &key(&name), input, version).await;
            let expected = if may { None } else { Some(Code::WrongState) };
            same(&format!("{resource} {name}"), &told.err().map(|refusal| refusal.code), &expected)?;
        }
    }
    Ok(())
}

async fn a_paused_sender_records_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let script = FakeTargets::of(|outbound, _| match outbound.method.as_str() {
        "GET" => TargetBehavior::body(200, "{\"outcome\": \"applied\"}"),
        _ => TargetBehavior::status(200),
    });
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), paused.clone()));
    let process = async |store: Arc<dyn Store>| {
        TenantClient::before(store, BLUEPRINT, Arc::new(clock.clone()), script.egress(SECRETS)).await
    };
    let (client, slow) = (process(store).await?, process(slow).await?);
    let (store_client, table) = (client.store_client()?, client.table("charges")?.clone());
    let text = |name: &'static str, value: &str| (name, Value::from(value));
    let attempt = |number: i64| ("attempt", Value::from(number));
    let over = ("expires_at", Value::Time(clock.now()));
    let sending = vec![text("status", "SENDING"), attempt(1)];
    let uncertain = vec![text("status", "UNCERTAIN"), attempt(1), ("doubt", true.into())];
    // How an effect is, so that it is sent, given up as expired, taken from its sender, or asked about; and what is
    // otherwise by the time that this is written down.
    for (number, (setup, change)) in [
        (vec![], text("status", "CANCELLED")),
        (vec![over.clone()], text("status", "RETRYING")),
        (vec![over], attempt(7)),
        (sending.clone(), text("status", "RETRYING")),
        (sending, attempt(7)),
        (uncertain, attempt(7)),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("e{number}");
        client.done("charge.send", &[], json!({"key": name}), None).await?;
        let on = |columns: &[(&'static str, Value)]| {
            let step = Step::update(&table, key(&name));
            columns.iter().fold(step, |step, (column, value)| step.set(column, value.clone()))
        };
        if !setup.is_empty() {
            store_client.apply(store_client.one(on(&setup))).await?;
        }
        let (others, changed) = (client.store_client()?, on(std::slice::from_ref(&change)));
        paused.before("charges", 1, async move {
            // If this fails, the row is not as the case expects.
            drop(others.apply(others.one(changed)).await);
        });
        while !paused.is_over() {
            slow.work(20).await?;
            pause().await;
        }
        let row = store_client.row(&table, key(&name)).await?;
        let mut expected: BTreeMap<&str, Value> = [text("status", "PENDING")].into();
        expected.extend(setup.into_iter().chain([change]));
        for (column, value) in expected {
            same(&format!("{name}: {column}"), &row.get(column), &Some(&value))?;
        }
        store_client.apply(store_client.one(Step::delete(&table, key(&name)))).await?;
    }
    Ok(())
}
