//! I12 Effects: what leaves the house does so at least once, counts once, and nobody is told what nobody knows.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::infra::effect::{Letter, Outbox, keep_secret};
use statehouse::outside::http::{HttpCourier, Resolver};
use statehouse::outside::{Environment, Outside, Reply};
use statehouse::worker::Options;
use statehouse::{Answer, Blueprint, Code, Operation};
use statehouse_store::clock::SkewedClock;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{
    Clock, Commit, Entry, ManualClock, Plan, Random, Record, Step, Store, StoreError, SystemClock, Tenant,
    Time, Value,
};
use tokio::sync::watch;

use super::effect;
use super::house::{Visitor, shows};
use crate::around::{Around, Paused};
use crate::client::{pause, same, whole_log};
use crate::conformance::{Case, cases};
use crate::drill::Drill;
use crate::engines::Lab;
use crate::outside::{Door, Listener, Play, Reaction, Script, Secrets, header, key_of};

pub(super) const CASES: &[Case] = cases! {
    effect {
        an_effect_is_sent_and_its_answer_kept(3),
        a_key_names_one_effect(3),
        an_effect_has_one_name_in_the_log(3),
        an_effect_exists_if_what_decided_it_does(5),
        programs_write_effects_in_their_own_plans(4),
        every_transition_begins_with_its_states(3),
        every_transition_that_may_begin_does(3),
        who_was_paused_records_nothing(3),
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
        whoever_looked_long_ago_changes_nothing(3),
        a_finding_that_comes_late_is_refused(3),
        cancelling_and_sending_contend_on_one_row(3),
        lost_answers_of_the_store_lose_no_effect(3),
        pauses_grow_and_targets_are_heard(3),
        nothing_is_sent_before_its_time_or_after_its_end(3),
        what_is_rejected_is_parked_and_can_be_replayed(3),
        a_changed_blueprint_holds_for_what_is_due(3),
        a_broken_target_is_left_alone_and_others_go_on(3),
        no_target_gets_more_than_its_limits(3),
        a_slow_target_holds_up_nobody_else(3),
        signatures_are_as_receivers_expect_them(3),
        secrets_can_be_kept_in_the_house_and_rotated(3),
        nothing_goes_where_it_must_not(3),
        hostile_answers_are_borne(3),
        silence_is_doubt_and_a_closed_door_is_not(3),
        what_is_over_is_forgotten_in_time(3),
        processes_share_the_effects_and_survive_each_other(3),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(super) const DRILLS: &[Drill] = &[
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

/// A visitor whose outside follows a script.
struct Scene {
    visitor: Visitor,
    script: Arc<Script>,
    clock: ManualClock,
}

impl Scene {
    async fn open(lab: &dyn Lab, script: Arc<Script>) -> Result<Scene> {
        Scene::with(lab, script, BLUEPRINT).await
    }

    async fn with(lab: &dyn Lab, script: Arc<Script>, blueprint: &str) -> Result<Scene> {
        let clock = standing();
        let store = lab.open_at(Arc::new(clock.clone())).await?;
        let outside = script.outside(SECRETS);
        let visitor = Visitor::before(store, blueprint, Arc::new(clock.clone()), outside).await?;
        Ok(Scene { visitor, script, clock })
    }

    async fn send(&self, resource: &str, name: &str) -> Result<Answer> {
        let mut input = json!({"key": name, "body": {"n": name}});
        if resource == "mail" {
            input["body"] = json!("Dear");
        }
        self.visitor.done(&format!("{resource}.send"), &[], input, None).await
    }

    async fn hook(&self, name: &str, url: &str) -> Result<Answer> {
        self.visitor.done("hook.send", &[], json!({"key": name, "url": url}), None).await
    }

    /// Lets time pass, and everything that is due then happen.
    async fn pass(&self, span: Duration) -> Result<()> {
        self.clock.advance(span);
        self.visitor.drain_workers().await.map(drop)
    }

    async fn shows(&self, resource: &str, name: &str, expected: Json) -> Result<()> {
        self.visitor.shows(resource, &key(name), &expected).await
    }

    /// How long the house waits before it looks at an effect again.
    async fn wait(&self, resource: &str, name: &str) -> Result<Duration> {
        let shown = self.visitor.shown(resource, &key(name), &["due_at"]).await?;
        let due: Time = shown[0].as_str().context("it is not due")?.parse()?;
        Ok(due.since(self.clock.now()))
    }
}

type Held = tokio::task::JoinHandle<Result<(), StoreError>>;

/// A step of all workers that is held up where `reached` says. One that saw nothing is repeated: an index may lag.
async fn held_up(visitor: &Visitor, reached: impl Fn() -> bool) -> Result<Held> {
    for _ in 0..1_000 {
        let visitor = visitor.clone();
        let step = tokio::spawn(async move { visitor.work(20).await.map(drop) });
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

async fn an_effect_is_sent_and_its_answer_kept(lab: &dyn Lab) -> Result<()> {
    let target = Listener::open(|got, _| {
        // A target that tells everything it was told.
        let seen = got.headers.get("authorization").cloned().unwrap_or_default();
        Reaction::answer(
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
    let outside = Outside { environment: Arc::new(Secrets::of(SECRETS)), ..Outside::default() };
    let store = lab.open_at(Arc::new(clock.clone())).await?;
    let visitor = Visitor::before(store.clone(), &blueprint, Arc::new(clock.clone()), outside).await?;
    visitor.refused("charge.read", &key("order-1"), json!({}), None, Code::NotFound).await?;
    let input =
        json!({"key": "order-1", "body": {"amount": 100, "to": "Zoë"}, "headers": {"X-Trace": "abc"}});
    let sent = visitor.done("charge.send", &[], input, None).await?;
    same("what was created", &sent.created.as_deref(), &Some("order-1"))?;
    shows(
        &sent,
        &json!({
            "status": "PENDING", "attempt": 0, "tries": 0, "doubt": false, "sent_key": "acme:charge:order-1",
            "url": format!("http://{}/charges/acme%3Acharge%3Aorder-1?x=1", target.address),
            "target": target.address.to_string(), "due_at": clock.now().to_string(),
        }),
    )?;
    visitor.drain_workers().await?;
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
    let read = visitor.done("charge.read", &key("order-1"), json!({}), None).await?;
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
    visitor.drain_workers().await?;
    same("how many requests came", &target.got().len(), &1)
}

async fn a_key_names_one_effect(lab: &dyn Lab) -> Result<()> {
    let scene = Scene::open(lab, Script::of(|_, _| Play::status(200))).await?;
    let visitor = &scene.visitor;
    let first = scene.send("charge", "order-1").await?;
    let again = scene.send("charge", "order-1").await?;
    same("the same effect", &again.body, &first.body)?;
    let other = json!({"key": "order-1", "body": {"n": "more"}});
    visitor.refused("charge.send", &[], other.clone(), None, Code::AlreadyExists).await?;
    visitor.drain_workers().await?;
    // Also when it is long over.
    let again = scene.send("charge", "order-1").await?;
    shows(&again, &json!({"status": "DELIVERED", "attempt": 1}))?;
    visitor.refused("charge.send", &[], other, None, Code::AlreadyExists).await?;
    // Another tenant's key, and another effect's, are others.
    let bond = visitor.for_tenant("bond")?;
    bond.done("charge.send", &[], json!({"key": "order-1", "body": {"n": "order-1"}}), None).await?;
    scene.send("ledger", "order-1").await?;
    visitor.drain_workers().await?;
    let acted = scene.script.acted();
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
        visitor
            .refused("charge.send", &[], input, None, Code::InvalidInput)
            .await
            .with_context(|| key.to_owned())?;
    }
    let long = json!({"key": "k", "body": "x".repeat(100_001)});
    visitor.refused("charge.send", &[], long, None, Code::TooLarge).await?;
    visitor
        .refused("mail.send", &[], json!({"key": "k", "body": {"a": 1}}), None, Code::InvalidInput)
        .await?;
    Ok(())
}

async fn an_effect_has_one_name_in_the_log(lab: &dyn Lab) -> Result<()> {
    let scene = Scene::open(lab, Script::of(|_, _| Play::status(200))).await?;
    // What separates the parts of a key, and what escapes it.
    scene.send("ledger", "entry,1%").await?;
    scene.pass(Duration::ZERO).await?;
    let store = scene.visitor.house.store().clone();
    let story = ["ledger.pending", "ledger.sending", "ledger.delivered"];
    tells(store.as_ref(), "entry%2C1%25", &story).await
}

async fn an_effect_exists_if_what_decided_it_does(lab: &dyn Lab) -> Result<()> {
    let scene = Scene::open(lab, Script::of(|_, _| Play::status(200))).await?;
    let visitor = &scene.visitor;
    visitor.done("order.create", &[], json!({"id": 1}), None).await?;
    let batch = async |version: i64, name: &str, body: Json| {
        let requests = vec![
            Visitor::request("order.update", &[1.into()], &json!({"paid": true}), Some(version.into())),
            Visitor::request("charge.send", &[], &json!({"key": name, "body": body}), None),
        ];
        visitor.house.batch(&visitor.tenant, requests, Operation::default()).await
    };
    // The decision is refused, and the effect with it.
    let refused = batch(7, "order-1", json!(1)).await.err().map(|(number, refusal)| (number, refusal.code));
    same("a decision that is refused", &refused, &Some((0, Code::VersionConflict)))?;
    visitor.refused("charge.read", &key("order-1"), json!({}), None, Code::NotFound).await?;
    visitor.drain_workers().await?;
    same("how often it was sent", &scene.script.parcels().len(), &0)?;
    // The effect is refused, and the decision with it.
    scene.send("charge", "taken").await?;
    let refused =
        batch(1, "taken", json!("other")).await.err().map(|(number, refusal)| (number, refusal.code));
    same("an effect that is refused", &refused, &Some((1, Code::AlreadyExists)))?;
    visitor.shows("order", &[1.into()], &json!({"paid": null, "version": 1})).await?;
    // Both.
    batch(1, "order-1", json!(1)).await.map_err(|(_, refusal)| refusal)?;
    visitor.shows("order", &[1.into()], &json!({"paid": true, "version": 2})).await?;
    scene.shows("charge", "order-1", json!({"status": "PENDING"})).await?;
    visitor.drain_workers().await?;
    scene.shows("charge", "order-1", json!({"status": "DELIVERED"})).await
}

async fn programs_write_effects_in_their_own_plans(lab: &dyn Lab) -> Result<()> {
    let scene = Scene::open(lab, Script::of(|_, _| Play::status(200))).await?;
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
    let outbox = Outbox::of(&blueprint, "ledger").context("there is no ledger")?;
    ensure!(Outbox::of(&blueprint, "order").is_none(), "an order has no outbox");
    let letter =
        Letter { key: "entry-1".into(), body: json!({"sum": 0}), after: SECOND, ..Letter::default() };
    let (client, tenant) = (scene.visitor.client()?, &scene.visitor.tenant);
    let orders = scene.visitor.table("orders")?.clone();
    scene.visitor.done("order.create", &[], json!({"id": 1}), None).await?;
    let plan = |guard: i64| -> Result<_> {
        let pieces = outbox.send(tenant, &letter)?;
        let decided = Step::update(&orders, [1.into()])
            .guard(statehouse_store::Guard::version(guard))
            .set("paid", true);
        let mut event = pieces.event;
        event.row_of = event.row_of.map(|step| step + 1);
        let entry = Entry::about("order", "1").event(event.with("subject", pieces.subject));
        Ok(client.plan().step(decided).steps(pieces.steps).log(entry))
    };
    client.refuse(plan(9)?).await?;
    scene.visitor.refused("ledger.read", &key("entry-1"), json!({}), None, Code::NotFound).await?;
    let applied = client.apply(plan(1)?).await?;
    let record = applied.record.context("no record")?;
    let wake = outbox.wake(&record.events[0]).context("nobody is to be woken")?;
    same("who is woken", &(wake.worker.as_str(), wake.at), &("ledger.send", scene.clock.now().plus(SECOND)))?;
    scene.pass(SECOND).await?;
    scene.shows("ledger", "entry-1", json!({"status": "DELIVERED", "http_status": 200})).await
}

async fn every_transition_begins_with_its_states(lab: &dyn Lab) -> Result<()> {
    let door = Door::default();
    let script = Script::of({
        let door = door.clone();
        move |parcel, _| match parcel.url.path() {
            "/charges" if key_of(parcel).ends_with("held") => Play::Holds(door.clone()),
            "/charges" if key_of(parcel).ends_with("rejected") => Play::status(422),
            "/charges" if key_of(parcel).ends_with("waiting") => Play::Unreachable,
            "/charges" if key_of(parcel).ends_with("doubtful") => Play::Loses,
            _ => Play::status(200),
        }
    });
    let scene = Scene::open(lab, script).await?;
    let visitor = &scene.visitor;
    for name in ["rejected", "waiting", "doubtful", "done"] {
        scene.send("charge", name).await?;
    }
    visitor.drain_workers().await?;
    scene.send("charge", "cancelled").await?;
    visitor.done("charge.cancel", &key("cancelled"), json!({}), None).await?;
    scene.send("charge", "held").await?;
    let sender = held_up(visitor, || scene.script.parcels().len() == 5).await?;
    let later = json!({"key": "pending", "after_ms": 3_600_000});
    visitor.done("charge.send", &[], later, None).await?;
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
        scene.shows("charge", name, json!({"status": status})).await?;
        let actions = ["cancel", "replay", "resolve", "reconcile"];
        for (action, can) in actions.into_iter().zip(can) {
            if can {
                continue;
            }
            let input = if action == "resolve" { resolve.clone() } else { json!({}) };
            visitor
                .refused(&format!("charge.{action}"), &key(name), input, None, Code::WrongState)
                .await
                .with_context(|| format!("{action} of {status}"))?;
        }
        scene.shows("charge", name, json!({"status": status})).await?;
    }
    for action in ["cancel", "replay", "reconcile"] {
        visitor.refused(&format!("charge.{action}"), &key("none"), json!({}), None, Code::NotFound).await?;
    }
    visitor.refused("charge.cancel", &key("pending"), json!({}), Some(9), Code::VersionConflict).await?;
    for (action, name, input, status) in [
        ("cancel", "pending", json!({}), "CANCELLED"),
        ("replay", "waiting", json!({}), "PENDING"),
        ("resolve", "doubtful", resolve, "DELIVERED"),
        ("cancel", "rejected", json!({}), "CANCELLED"),
    ] {
        let answer = visitor.done(&format!("charge.{action}"), &key(name), input, None).await?;
        shows(&answer, &json!({"status": status}))?;
    }
    scene
        .shows(
            "charge",
            "doubtful",
            json!({"doubt": false, "reason": "resolved_by_hand", "detail": "seen on the statement"}),
        )
        .await?;
    door.open();
    sender.await??;
    scene.shows("charge", "held", json!({"status": "DELIVERED"})).await?;
    // What is cancelled stays so.
    let before = scene.script.count("psp.example");
    scene.pass(HOUR * 2).await?;
    let after = scene.script.parcels();
    ensure!(after.iter().skip(before).all(|parcel| key_of(parcel).ends_with("waiting")), "{after:?}");
    let list = visitor.done("charge.list", &[], json!({"status": "CANCELLED"}), None).await?;
    ensure!(list.body.as_array().is_some(), "no list: {}", list.body);
    Ok(())
}

async fn every_transition_that_may_begin_does(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|parcel, _| match key_of(parcel) {
        key if key.contains("retrying") => Play::Unreachable,
        key if key.contains("parked") => Play::status(422),
        key if key.contains("uncertain") => Play::Loses,
        _ => Play::status(200),
    });
    let scene = Scene::open(lab, script).await?;
    let visitor = &scene.visitor;
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
            visitor.done(&format!("{resource}.send"), &[], input, None).await?;
        }
        visitor.drain_workers().await?;
        for (state, action) in cross.iter().copied() {
            let name = format!("{state}-{action}");
            let shown = visitor.shown(resource, &key(&name), &["status", "version"]).await?;
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
                visitor.refused(&action, &key(&name), input.clone(), other, Code::VersionConflict).await?;
            }
            let told = visitor.call(&format!("{resource}.{action}"), &key(&name), input, version).await;
            let expected = if may { None } else { Some(Code::WrongState) };
            same(&format!("{resource} {name}"), &told.err().map(|refusal| refusal.code), &expected)?;
        }
    }
    Ok(())
}

async fn who_was_paused_records_nothing(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|parcel, _| match parcel.method.as_str() {
        "GET" => Play::body(200, "{\"outcome\": \"applied\"}"),
        _ => Play::status(200),
    });
    let clock = standing();
    let store = lab.open_at(Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(Around::new(store.clone(), paused.clone()));
    let process = async |store: Arc<dyn Store>| {
        Visitor::before(store, BLUEPRINT, Arc::new(clock.clone()), script.outside(SECRETS)).await
    };
    let (visitor, slow) = (process(store).await?, process(slow).await?);
    let (client, table) = (visitor.client()?, visitor.table("charges")?.clone());
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
        visitor.done("charge.send", &[], json!({"key": name}), None).await?;
        let on = |columns: &[(&'static str, Value)]| {
            let step = Step::update(&table, key(&name));
            columns.iter().fold(step, |step, (column, value)| step.set(column, value.clone()))
        };
        if !setup.is_empty() {
            client.apply(client.one(on(&setup))).await?;
        }
        let (others, changed) = (visitor.client()?, on(std::slice::from_ref(&change)));
        paused.before("charges", 1, async move {
            // If this fails, the row is not as the case expects.
            drop(others.apply(others.one(changed)).await);
        });
        while !paused.is_over() {
            slow.work(20).await?;
            pause().await;
        }
        let row = client.row(&table, key(&name)).await?;
        let mut expected: BTreeMap<&str, Value> = [text("status", "PENDING")].into();
        expected.extend(setup.into_iter().chain([change]));
        for (column, value) in expected {
            same(&format!("{name}: {column}"), &row.get(column), &Some(&value))?;
        }
        client.apply(client.one(Step::delete(&table, key(&name)))).await?;
    }
    Ok(())
}

async fn a_lost_acknowledgement_is_asked_about(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|parcel, _| {
        if parcel.method == "GET" { Play::body(200, "{\"outcome\": \"applied\"}") } else { Play::Loses }
    });
    let scene = Scene::open(lab, script).await?;
    scene.send("charge", "order-1").await?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("charge", "order-1", json!({"status": "UNCERTAIN", "doubt": true, "reason": "no_answer", "attempt": 1, "stuck_at": null})).await?;
    same("when it is asked", &scene.wait("charge", "order-1").await?, &(SECOND * 10))?;
    scene.pass(SECOND * 9).await?;
    same("too early", &scene.script.parcels().len(), &1)?;
    scene.pass(SECOND).await?;
    scene
        .shows(
            "charge",
            "order-1",
            json!({"status": "DELIVERED", "doubt": false, "reason": "reconciled", "attempt": 1, "checks": 1}),
        )
        .await?;
    let parcels = scene.script.parcels();
    same("how many requests", &parcels.len(), &2)?;
    same(
        "the question",
        &parcels[1].url.to_string(),
        &"https://psp.example/charges/acme%3Acharge%3Aorder-1".to_owned(),
    )?;
    same("who asks", &header(&parcels[1], "authorization").as_deref(), &Some("Bearer sk-topsecret"))?;
    same("what was done", &scene.script.acted(), &[("acme:charge:order-1".to_owned(), 1)].into())?;
    let store = scene.visitor.house.store().clone();
    tells(
        store.as_ref(),
        "order-1",
        &["charge.pending", "charge.sending", "charge.uncertain", "charge.delivered"],
    )
    .await
}

async fn what_was_not_applied_is_sent_again(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|parcel, number| match (parcel.method.as_str(), number) {
        ("GET", _) => Play::status(404),
        (_, 0) => Play::Swallows,
        _ => Play::status(200),
    });
    let scene = Scene::open(lab, script).await?;
    scene.send("charge", "order-1").await?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("charge", "order-1", json!({"status": "UNCERTAIN", "doubt": true})).await?;
    scene.pass(SECOND * 10).await?;
    scene
        .shows("charge", "order-1", json!({"status": "DELIVERED", "attempt": 2, "tries": 2, "checks": 1}))
        .await?;
    same("what was done", &scene.script.acted(), &[("acme:charge:order-1".to_owned(), 1)].into())?;
    let keys: Vec<String> = scene.script.parcels().iter().map(key_of).collect();
    same("keys", &keys, &vec!["acme:charge:order-1".to_owned(); 3])
}

async fn a_stuck_reconciliation_is_said_and_goes_on(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|parcel, number| match (parcel.method.as_str(), number) {
        ("GET", _) => Play::status(500),
        (_, 0) => Play::Loses,
        _ => Play::status(200),
    });
    let scene = Scene::open(lab, script).await?;
    let visitor = &scene.visitor;
    scene.send("charge", "order-1").await?;
    scene.pass(Duration::ZERO).await?;
    scene.pass(SECOND * 10).await?;
    scene.shows("charge", "order-1", json!({"status": "UNCERTAIN", "checks": 1, "stuck_at": null})).await?;
    scene.pass(SECOND).await?;
    scene.shows("charge", "order-1", json!({"status": "UNCERTAIN", "checks": 2, "stuck_at": null})).await?;
    scene.pass(SECOND * 2).await?;
    let since = scene.clock.now().to_string();
    scene
        .shows(
            "charge",
            "order-1",
            json!({"status": "UNCERTAIN", "checks": 3, "stuck_at": since, "doubt": true}),
        )
        .await?;
    // It is asked further, at the longest pause, and since when it is stuck does not change.
    for checks in 4..10 {
        scene.pass(SECOND * 8).await?;
        scene
            .shows("charge", "order-1", json!({"status": "UNCERTAIN", "checks": checks, "stuck_at": since}))
            .await?;
    }
    let records = whole_log(visitor.house.store().as_ref()).await?;
    let stuck = |record: &&Record| record.events.iter().any(|event| event.data["stuck"] == json!(true));
    ensure!(records.iter().find(stuck).is_some(), "the log does not say that it is stuck");
    // It can be asked about at once; it cannot be sent again, or taken back, as long as nobody knows.
    visitor.refused("charge.replay", &key("order-1"), json!({}), None, Code::WrongState).await?;
    visitor.refused("charge.cancel", &key("order-1"), json!({}), None, Code::WrongState).await?;
    let asked = visitor.done("charge.reconcile", &key("order-1"), json!({}), None).await?;
    shows(
        &asked,
        &json!({"status": "UNCERTAIN", "checks": 0, "stuck_at": null, "due_at": scene.clock.now().to_string()}),
    )?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("charge", "order-1", json!({"status": "UNCERTAIN", "checks": 1})).await?;
    // Somebody finds out by hand.
    let found = json!({"delivered": false, "reason": "not on the statement"});
    let resolved = visitor.done("charge.resolve", &key("order-1"), found, None).await?;
    shows(&resolved, &json!({"status": "PARKED", "doubt": false, "due_at": null, "stuck_at": null}))?;
    scene.pass(HOUR).await?;
    scene.shows("charge", "order-1", json!({"status": "PARKED", "attempt": 1})).await?;
    visitor.done("charge.replay", &key("order-1"), json!({}), None).await?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("charge", "order-1", json!({"status": "DELIVERED", "attempt": 2, "tries": 1})).await
}

async fn an_idempotent_target_gets_the_same_key_again(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|_, number| match number {
        0 | 1 => Play::Loses,
        2 => Play::status(500),
        _ => Play::status(200),
    });
    let scene = Scene::open(lab, script).await?;
    scene.send("ledger", "entry-1").await?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("ledger", "entry-1", json!({"status": "UNCERTAIN", "doubt": true, "attempt": 1})).await?;
    scene.pass(SECOND).await?;
    scene.shows("ledger", "entry-1", json!({"status": "UNCERTAIN", "doubt": true, "attempt": 2})).await?;
    scene.pass(SECOND * 2).await?;
    scene
        .shows(
            "ledger",
            "entry-1",
            json!({"status": "RETRYING", "doubt": true, "attempt": 3, "http_status": 500}),
        )
        .await?;
    // What may have been applied cannot be cancelled, also while it waits for its next try.
    let visitor = &scene.visitor;
    let version = visitor.shown("ledger", &key("entry-1"), &["version"]).await?[0].as_i64();
    for version in [None, version] {
        visitor.refused("ledger.cancel", &key("entry-1"), json!({}), version, Code::WrongState).await?;
    }
    scene.pass(SECOND * 4).await?;
    scene.shows("ledger", "entry-1", json!({"status": "DELIVERED", "doubt": false, "attempt": 4})).await?;
    let parcels = scene.script.parcels();
    let keys: Vec<String> = parcels.iter().map(key_of).collect();
    same("keys", &keys, &vec!["acme:ledger:entry-1".to_owned(); 4])?;
    ensure!(parcels.iter().all(|parcel| parcel.body == parcels[0].body), "bodies differ: {parcels:?}");
    Ok(())
}

async fn what_may_have_been_applied_is_never_said_to_have_failed(lab: &dyn Lab) -> Result<()> {
    // First the answer is lost, then the target is gone, or it rejects: that says nothing about the first attempt.
    let script = Script::of(|parcel, number| match (number, key_of(parcel).as_str()) {
        (0 | 1, _) => Play::Loses,
        (_, "acme:ledger:rejected") => Play::status(401),
        _ => Play::Unreachable,
    });
    let scene = Scene::open(lab, script).await?;
    let visitor = &scene.visitor;
    for name in ["gone", "rejected"] {
        scene.send("ledger", name).await?;
    }
    for _ in 0..12 {
        scene.pass(SECOND * 8).await?;
    }
    scene.shows("ledger", "gone", json!({"status": "UNCERTAIN", "doubt": true, "reason": "attempts_exhausted", "attempt": 4, "due_at": null})).await?;
    scene.shows("ledger", "rejected", json!({"status": "UNCERTAIN", "doubt": true, "reason": "rejected", "attempt": 2, "http_status": 401})).await?;
    for name in ["gone", "rejected"] {
        let shown = visitor.shown("ledger", &key(name), &["stuck_at"]).await?;
        ensure!(shown[0].is_string(), "nobody is told that {name} is stuck");
        visitor.refused("ledger.cancel", &key(name), json!({}), None, Code::WrongState).await?;
    }
    // The target honours keys, so it may be sent again by hand.
    visitor.done("ledger.replay", &key("gone"), json!({}), None).await?;
    scene.pass(Duration::ZERO).await?;
    scene
        .shows(
            "ledger",
            "gone",
            json!({"status": "RETRYING", "doubt": true, "attempt": 5, "tries": 1, "stuck_at": null}),
        )
        .await
}

async fn without_a_way_to_know_nothing_is_sent_twice(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(
        |parcel, _| if key_of(parcel).ends_with("broken") { Play::status(502) } else { Play::Loses },
    );
    let scene = Scene::open(lab, script).await?;
    for name in ["lost", "broken"] {
        scene.send("mail", name).await?;
    }
    for _ in 0..5 {
        scene.pass(HOUR).await?;
    }
    for (name, reason) in [("lost", "no_answer"), ("broken", "target_failed")] {
        scene
            .shows(
                "mail",
                name,
                json!({"status": "UNCERTAIN", "doubt": true, "attempt": 1, "due_at": null, "reason": reason}),
            )
            .await?;
        let shown = scene.visitor.shown("mail", &key(name), &["stuck_at"]).await?;
        ensure!(shown[0].is_string(), "nobody is told that {name} is stuck");
        scene.visitor.refused("mail.replay", &key(name), json!({}), None, Code::WrongState).await?;
    }
    same("how often it was sent", &scene.script.parcels().len(), &2)?;
    same("what was sent", &scene.script.parcels()[0].body, &b"Dear".to_vec())
}

async fn a_sender_that_is_killed_leaves_doubt(lab: &dyn Lab) -> Result<()> {
    // The first request arrives, is acted on, and its sender dies before it hears of that.
    let door = Door::default();
    let script = Script::of(move |parcel, number| match (parcel.method.as_str(), number) {
        ("GET", _) => Play::status(200),
        (_, 0 | 1) => Play::Holds(door.clone()),
        _ => Play::status(200),
    });
    let scene = Scene::open(lab, script).await?;
    let visitor = &scene.visitor;
    for resource in ["charge", "ledger"] {
        scene.send(resource, "one").await?;
        let count = if resource == "charge" { 1 } else { 2 };
        let sender = held_up(visitor, || scene.script.parcels().len() == count).await?;
        sender.abort();
        let _ = sender.await;
        scene.shows(resource, "one", json!({"status": "SENDING", "attempt": 1, "doubt": false})).await?;
    }
    // As long as its lease lasts it is the sender's; one moment later it is known that nobody knows.
    scene.pass(SECOND * 60 - Duration::from_micros(1)).await?;
    for resource in ["charge", "ledger"] {
        scene.shows(resource, "one", json!({"status": "SENDING"})).await?;
    }
    same("how often it was sent", &scene.script.parcels().len(), &2)?;
    scene.clock.advance(Duration::from_micros(1));
    for _ in 0..200 {
        visitor.work(7).await?;
        let shown = visitor.shown("charge", &key("one"), &["status"]).await?;
        if shown[0] != json!("SENDING") {
            break;
        }
    }
    scene
        .shows(
            "charge",
            "one",
            json!({"status": "UNCERTAIN", "doubt": true, "reason": "sender_lost", "attempt": 1}),
        )
        .await?;
    scene.pass(SECOND * 10).await?;
    scene
        .shows("charge", "one", json!({"status": "DELIVERED", "reason": "reconciled", "attempt": 1}))
        .await?;
    scene.shows("ledger", "one", json!({"status": "DELIVERED", "attempt": 2})).await?;
    let acted: BTreeMap<String, usize> = scene.script.acted();
    same("charged", &acted.get("acme:charge:one"), &Some(&1))?;
    let store = visitor.house.store().clone();
    let mut told = Vec::new();
    for _ in 0..1_000 {
        told = story(store.as_ref(), "one").await?;
        if told.iter().filter(|name| name.ends_with(".delivered")).count() == 2 {
            break;
        }
        pause().await;
    }
    same("uncertain", &told.iter().filter(|name| name.ends_with(".uncertain")).count(), &2)
}

/// A store on a clock of its own, a process that shares the clock, and others that do not.
struct Two {
    engine: ManualClock,
    second: Visitor,
}

impl Two {
    async fn open(lab: &dyn Lab, script: &Arc<Script>) -> Result<Two> {
        let engine = standing();
        let store = lab.open_at(Arc::new(engine.clone())).await?;
        let awake: Arc<dyn Clock> = Arc::new(engine.clone());
        let second = Visitor::before(store, BLUEPRINT, awake, script.outside(SECRETS)).await?;
        Ok(Two { engine, second })
    }

    async fn process(&self, clock: Arc<dyn Clock>, script: &Arc<Script>) -> Result<Visitor> {
        let store = self.second.house.store().clone();
        Visitor::before(store, BLUEPRINT, clock, script.outside(SECRETS)).await
    }
}

async fn a_sender_that_wakes_late_is_refused(lab: &dyn Lab) -> Result<()> {
    let doors = BTreeMap::from([false, true].map(|takeover| (takeover, [Door::default(), Door::default()])));
    let script = Script::by_key({
        let doors = doors.clone();
        move |parcel, number| {
            let doors = &doors[&key_of(parcel).ends_with("true")];
            doors.get(number).map_or(Play::Unreachable, |door| Play::Holds(door.clone()))
        }
    });
    let two = Two::open(lab, &script).await?;
    for (takeover, [asleep, awake]) in &doors {
        let (takeover, sent) = (*takeover, script.parcels().len());
        let asleep_clock = ManualClock::at(two.engine.now());
        let first = two.process(Arc::new(asleep_clock), &script).await?;
        let name = format!("entry-{takeover}");
        first.done("ledger.send", &[], json!({"key": name}), None).await?;
        let late = held_up(&first, || script.parcels().len() > sent).await?;
        // It sleeps through its lease, and the other process sees that.
        two.engine.advance(SECOND * 60);
        let lapsed = async || -> Result<()> {
            for _ in 0..1_000 {
                let shown = two.second.shown("ledger", &key(&name), &["status"]).await?;
                if shown[0] != json!("SENDING") {
                    return Ok(());
                }
                two.second.work(7).await?;
            }
            anyhow::bail!("it is still being sent")
        };
        lapsed().await?;
        two.second.shows("ledger", &key(&name), &json!({"status": "UNCERTAIN", "attempt": 1})).await?;
        let next = if takeover {
            // It is even being sent again.
            two.engine.advance(SECOND);
            let next = held_up(&two.second, || script.parcels().len() > sent + 1).await?;
            two.second.shows("ledger", &key(&name), &json!({"status": "SENDING", "attempt": 2})).await?;
            Some(next)
        } else {
            None
        };
        let before = two.second.done("ledger.read", &key(&name), json!({}), None).await?;
        asleep.open();
        late.await??;
        let after = two.second.done("ledger.read", &key(&name), json!({}), None).await?;
        same("what the late one has changed", &after.body, &before.body)?;
        awake.open();
        if let Some(next) = next {
            next.await??;
        }
        two.engine.advance(SECOND * 10);
        two.second.drain_workers().await?;
        two.second.shows("ledger", &key(&name), &json!({"status": "DELIVERED", "attempt": 2})).await?;
    }
    Ok(())
}

async fn a_lease_does_not_lapse_early(lab: &dyn Lab) -> Result<()> {
    let door = Door::default();
    let script = Script::of({
        let door = door.clone();
        move |_, _| Play::Holds(door.clone())
    });
    let engine = standing();
    let store = lab.open_at(Arc::new(engine.clone())).await?;
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    let right =
        Visitor::before(store.clone(), BLUEPRINT, Arc::new(engine.clone()), script.outside(SECRETS)).await?;
    let ahead = Visitor::before(store, BLUEPRINT, Arc::new(skewed.clone()), script.outside(SECRETS)).await?;
    let later = json!({"key": "later", "after_ms": 5_000});
    right.done("ledger.send", &[], later, None).await?;
    right.done("ledger.send", &[], json!({"key": "now"}), None).await?;
    let end = engine.now().plus(SECOND * 5).to_string();
    let ends = json!({"key": "ends", "due_at": engine.now().minus(SECOND).to_string(), "expires_at": end});
    let sender = held_up(&right, || script.parcels().len() == 1).await?;
    // A process whose clock is ten minutes ahead neither takes what is another's nor sends what is not due.
    skewed.skew(600_000_000);
    right.done("ledger.send", &[], ends, None).await?;
    same("what it did", &ahead.drain_workers().await?, &0)?;
    // Neither is it over for the engine.
    right.shows("ledger", &key("ends"), &json!({"status": "PENDING", "attempt": 0})).await?;
    right.done("ledger.cancel", &key("ends"), json!({}), None).await?;
    right.shows("ledger", &key("now"), &json!({"status": "SENDING", "attempt": 1})).await?;
    right.shows("ledger", &key("later"), &json!({"status": "PENDING", "attempt": 0})).await?;
    same("how often it was sent", &script.parcels().len(), &1)?;
    door.open();
    sender.await??;
    right.shows("ledger", &key("now"), &json!({"status": "DELIVERED", "attempt": 1})).await
}

async fn each_effect_is_sent_once_however_many_scan(lab: &dyn Lab) -> Result<()> {
    let scene = Scene::open(lab, Script::of(|_, _| Play::status(200))).await?;
    for tenant in ["acme", "bond"] {
        let visitor = scene.visitor.for_tenant(tenant)?;
        for number in 0..10 {
            visitor.done("charge.send", &[], json!({"key": format!("o{number}")}), None).await?;
            visitor.done("mail.send", &[], json!({"key": format!("o{number}")}), None).await?;
        }
    }
    // Several processes, each with its own targets in mind, over one store.
    let mut scanners = Vec::new();
    for _ in 0..4 {
        let store = scene.visitor.house.store().clone();
        let clock: Arc<dyn Clock> = Arc::new(scene.clock.clone());
        let process = Visitor::before(store, BLUEPRINT, clock, scene.script.outside(SECRETS)).await?;
        scanners.push(tokio::spawn(async move { process.drain_workers().await }));
    }
    for scanner in scanners {
        scanner.await??;
    }
    scene.visitor.drain_workers().await?;
    let acted = scene.script.acted();
    same("how many were sent", &acted.len(), &40)?;
    ensure!(acted.values().all(|times| *times == 1), "sent more than once: {acted:?}");
    for tenant in ["acme", "bond"] {
        let visitor = scene.visitor.for_tenant(tenant)?;
        for number in 0..10 {
            let delivered = json!({"status": "DELIVERED", "attempt": 1, "tries": 1});
            visitor.shows("charge", &key(&format!("o{number}")), &delivered).await?;
        }
    }
    Ok(())
}

/// An environment that can make whoever reads a secret wait: a worker reads them after it has looked and before it writes.
#[derive(Debug)]
struct Gate {
    closed: watch::Sender<bool>,
    waiting: AtomicUsize,
}

impl Gate {
    fn open() -> Arc<Gate> {
        Arc::new(Gate { closed: watch::Sender::new(false), waiting: AtomicUsize::new(0) })
    }

    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Environment for Gate {
    async fn read(&self, _: &str) -> Option<String> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // The sender lives as long as `self`.
        let _ = self.closed.subscribe().wait_for(|closed| !closed).await;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Some("secret".into())
    }
}

/// A process that looks at what is due, and then sleeps until others have done something.
struct Sleeper {
    visitor: Visitor,
    gate: Arc<Gate>,
}

impl Sleeper {
    async fn looks_while(&self, others: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        self.gate.closed.send_replace(true);
        let worker = held_up(&self.visitor, || self.gate.waiting() > 0).await?;
        let done = others().await;
        self.gate.closed.send_replace(false);
        worker.await??;
        done
    }
}

async fn whoever_looked_long_ago_changes_nothing(lab: &dyn Lab) -> Result<()> {
    let blueprint = "[effect.call]\nurl = \"https://psp.example/\"\nheaders = { x-key = \"${env:K}\" }\nidempotent = true\n\
                     keep = \"1h\"\nlease = \"1m\"\nback_off = { min = \"1s\", max = \"1s\" }\n\
                     [effect.hook]\nhosts = [\"a.example\"]\nheaders = { x-key = \"${env:K}\" }\nshards = 1\n\
                     breaker = { failures = 1, cool_down = \"1h\" }\nback_off = { min = \"100h\", max = \"100h\" }\n";
    let (door, down) = (Door::default(), Arc::new(AtomicBool::new(false)));
    let script = Script::of({
        let (door, down) = (door.clone(), down.clone());
        move |parcel, _| match key_of(parcel).as_str() {
            "acme:call:slow" => Play::Holds(door.clone()),
            _ if down.load(Ordering::SeqCst) => Play::Unreachable,
            _ => Play::status(200),
        }
    });
    let set_down = |is: bool| down.store(is, Ordering::SeqCst);
    let scene = Scene::with(lab, script.clone(), blueprint).await?;
    let store = scene.visitor.house.store().clone();
    let process = async |clock: Arc<dyn Clock>, outside: Outside| {
        Visitor::before(store.clone(), blueprint, clock, outside).await
    };
    let clock: Arc<dyn Clock> = Arc::new(scene.clock.clone());
    let gate = Gate::open();
    let others = process(clock.clone(), script.outside(&[("K", "secret")])).await?;
    let outside = Outside { environment: gate.clone(), ..script.outside(&[]) };
    let sleeper = Sleeper { visitor: process(clock, outside).await?, gate };
    let send = async |resource: &str, name: &str| -> Result<()> {
        let mut input = json!({"key": name});
        if resource == "hook" {
            input["url"] = json!("https://a.example/");
        }
        others.done(&format!("{resource}.send"), &[], input, None).await.map(drop)
    };
    let pass = async |span: Duration| -> Result<()> {
        scene.clock.advance(span);
        others.drain_workers().await.map(drop)
    };

    // Others have tried it meanwhile: it is in the same state, and due again, under another attempt.
    set_down(true);
    send("call", "tried").await?;
    pass(Duration::ZERO).await?;
    scene.clock.advance(SECOND);
    let before = script.parcels().len();
    sleeper
        .looks_while(async || {
            pass(Duration::ZERO).await?;
            scene.clock.advance(SECOND);
            others.shows("call", &key("tried"), &json!({"status": "RETRYING", "attempt": 2})).await
        })
        .await?;
    others.shows("call", &key("tried"), &json!({"status": "RETRYING", "attempt": 2})).await?;
    same("requests", &script.parcels().len(), &(before + 1))?;
    set_down(false);
    pass(SECOND).await?;

    // It was cancelled meanwhile, so long ago that it is to be forgotten.
    send("call", "cancelled").await?;
    let before = script.parcels().len();
    sleeper
        .looks_while(async || {
            others.done("call.cancel", &key("cancelled"), json!({}), None).await?;
            scene.clock.advance(HOUR);
            Ok(())
        })
        .await?;
    others.shows("call", &key("cancelled"), &json!({"status": "CANCELLED", "attempt": 0})).await?;
    same("requests", &script.parcels().len(), &before)?;
    pass(Duration::ZERO).await?;

    // It was forgotten meanwhile, and its key is another effect's now, which is due, or was done.
    for done in [false, true] {
        send("call", "again").await?;
        pass(Duration::ZERO).await?;
        scene.clock.advance(HOUR);
        sleeper
            .looks_while(async || {
                pass(Duration::ZERO).await?;
                others.refused("call.read", &key("again"), json!({}), None, Code::NotFound).await?;
                send("call", "again").await?;
                if done { pass(Duration::ZERO).await } else { Ok(()) }
            })
            .await?;
        let status = if done { "DELIVERED" } else { "PENDING" };
        others.shows("call", &key("again"), &json!({"status": status})).await?;
        pass(Duration::ZERO).await?;
        pass(HOUR).await?;
    }

    // It was forgotten meanwhile: once is enough.
    send("call", "once").await?;
    pass(Duration::ZERO).await?;
    scene.clock.advance(HOUR);
    sleeper.looks_while(async || pass(Duration::ZERO).await).await?;
    tells(store.as_ref(), "once", &["call.pending", "call.sending", "call.delivered", "call.forgotten"])
        .await?;

    // Its sender came back after all, long ago.
    let frozen = ManualClock::at(scene.clock.now());
    let slow = process(Arc::new(frozen), script.outside(&[("K", "secret")])).await?;
    send("call", "slow").await?;
    let count = script.parcels().len();
    let sender = held_up(&slow, || script.parcels().len() > count).await?;
    scene.clock.advance(SECOND * 60);
    sleeper
        .looks_while(async || {
            door.open();
            sender.await??;
            others.shows("call", &key("slow"), &json!({"status": "DELIVERED", "attempt": 1})).await?;
            scene.clock.advance(HOUR);
            Ok(())
        })
        .await?;
    others.shows("call", &key("slow"), &json!({"status": "DELIVERED", "attempt": 1, "doubt": false})).await?;
    pass(Duration::ZERO).await?;

    // It would be put off, because the sleeper's breaker is open; others have delivered it.
    set_down(true);
    send("hook", "down").await?;
    for _ in 0..1_000 {
        sleeper.visitor.work(7).await?;
        if others.shown("hook", &key("down"), &["status"]).await?[0] == json!("RETRYING") {
            break;
        }
    }
    set_down(false);
    send("hook", "up").await?;
    sleeper
        .looks_while(async || {
            pass(Duration::ZERO).await?;
            others.shows("hook", &key("up"), &json!({"status": "DELIVERED"})).await
        })
        .await?;
    others.shows("hook", &key("up"), &json!({"status": "DELIVERED", "due_at": null})).await
}

async fn a_finding_that_comes_late_is_refused(lab: &dyn Lab) -> Result<()> {
    // The target says that it was applied, but so late that somebody has decided otherwise, or asked anew.
    let doors = BTreeMap::from([false, true].map(|asked_anew| (asked_anew, Door::default())));
    let script = Script::by_key({
        let doors = doors.clone();
        move |parcel, number| match (parcel.method.as_str(), number) {
            ("GET", 1) => Play::status(500),
            ("GET", _) => Play::Holds(doors[&key_of(parcel).ends_with("true")].clone()),
            _ => Play::Loses,
        }
    });
    let scene = Scene::open(lab, script).await?;
    for (asked_anew, door) in &doors {
        let (visitor, name) = (&scene.visitor, format!("order-{asked_anew}"));
        let sent = scene.script.parcels().len();
        scene.send("charge", &name).await?;
        scene.pass(Duration::ZERO).await?;
        scene.pass(SECOND * 10).await?;
        scene.shows("charge", &name, json!({"status": "UNCERTAIN", "checks": 1})).await?;
        scene.clock.advance(SECOND);
        let asker = held_up(visitor, || scene.script.parcels().len() == sent + 3).await?;
        let expected = if *asked_anew {
            visitor.done("charge.reconcile", &key(&name), json!({}), None).await?;
            json!({"status": "UNCERTAIN", "checks": 0, "doubt": true})
        } else {
            let found = json!({"delivered": false, "reason": "not on the statement"});
            visitor.done("charge.resolve", &key(&name), found, None).await?;
            json!({"status": "PARKED", "checks": 1, "doubt": false})
        };
        // The one that was held up writes what it has heard.
        door.open();
        asker.await??;
        scene.shows("charge", &name, expected).await?;
        let resolved = json!({"delivered": true, "reason": "the end of the case"});
        visitor.done("charge.resolve", &key(&name), resolved, None).await?;
    }
    Ok(())
}

async fn cancelling_and_sending_contend_on_one_row(lab: &dyn Lab) -> Result<()> {
    let scene = Arc::new(Scene::open(lab, Script::of(|_, _| Play::status(200))).await?);
    for number in 0..12 {
        scene.send("mail", &format!("m{number}")).await?;
    }
    let sender = tokio::spawn({
        let visitor = scene.visitor.clone();
        async move { visitor.drain_workers().await }
    });
    for number in (0..12).rev() {
        match scene.visitor.call("mail.cancel", &key(&format!("m{number}")), json!({}), None).await {
            Ok(_) => {}
            Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
        }
    }
    sender.await??;
    scene.visitor.drain_workers().await?;
    let acted = scene.script.acted();
    for number in 0..12 {
        let shown = scene.visitor.shown("mail", &key(&format!("m{number}")), &["status"]).await?;
        let sent = acted.contains_key(&format!("acme:mail:m{number}"));
        let expected = if sent { "DELIVERED" } else { "CANCELLED" };
        same(&format!("m{number}"), &shown[0], &json!(expected))?;
    }
    Ok(())
}

async fn lost_answers_of_the_store_lose_no_effect(lab: &dyn Lab) -> Result<()> {
    let clock = standing();
    let sound = lab.open_at(Arc::new(clock.clone())).await?;
    let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), 3));
    let script = Script::of(|parcel, number| match (parcel.method.as_str(), number % 5) {
        ("GET", _) => Play::status(404),
        (_, 1) => Play::Unreachable,
        (_, 3) => Play::Loses,
        _ => Play::status(200),
    });
    let visitor =
        Visitor::before(faulty.clone(), BLUEPRINT, Arc::new(clock.clone()), script.outside(SECRETS)).await?;
    for number in 0..12 {
        visitor.done("ledger.send", &[], json!({"key": format!("e{number}")}), None).await?;
    }
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    for _ in 0..40 {
        clock.advance(SECOND * 3);
        // Whatever comes of it: the process may die here as well.
        let _ = visitor.work(7).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    for _ in 0..20 {
        clock.advance(SECOND * 61);
        visitor.drain_workers().await?;
    }
    let acted = script.acted();
    for number in 0..12 {
        let name = format!("e{number}");
        let shown = visitor.shown("ledger", &key(&name), &["status", "doubt"]).await?;
        let did = acted.contains_key(&format!("acme:ledger:{name}"));
        match shown[0].as_str() {
            Some("DELIVERED") => ensure!(did, "{name} is said to be delivered and was not"),
            // Without an answer to the last try nobody knows; that it failed is never said of one that was done.
            Some("UNCERTAIN") => same("doubt", &shown[1], &json!(true))?,
            other => ensure!(other == Some("PARKED") && !did, "{name} is {other:?}, and done: {did}"),
        }
    }
    Ok(())
}

async fn pauses_grow_and_targets_are_heard(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|parcel, _| match key_of(parcel).as_str() {
        "acme:mail:patient" => Play::Answers(Reply {
            status: 429,
            retry_after: Some(SECOND * 90),
            complete: true,
            ..Reply::default()
        }),
        _ => Play::Unreachable,
    });
    let scene = Scene::open(lab, script).await?;
    scene.send("mail", "gone").await?;
    // Each pause is between half of what it may be and all of it, and the last one follows the longest.
    for (tries, most) in [(1, 1), (2, 2), (3, 4)] {
        scene.pass(Duration::ZERO).await?;
        scene
            .shows(
                "mail",
                "gone",
                json!({"status": "RETRYING", "tries": tries, "reason": "not_taken", "doubt": false}),
            )
            .await?;
        let wait = scene.wait("mail", "gone").await?;
        ensure!(wait >= SECOND * most / 2 && wait <= SECOND * most, "after try {tries}: {wait:?}");
        scene.pass(wait - Duration::from_micros(1)).await?;
        scene.shows("mail", "gone", json!({"tries": tries})).await?;
        scene.clock.advance(Duration::from_micros(1));
    }
    scene.pass(Duration::ZERO).await?;
    scene
        .shows(
            "mail",
            "gone",
            json!({"status": "PARKED", "tries": 4, "reason": "attempts_exhausted", "due_at": null}),
        )
        .await?;
    scene.send("mail", "patient").await?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("mail", "patient", json!({"status": "RETRYING", "http_status": 429})).await?;
    same("what the target asked for", &scene.wait("mail", "patient").await?, &(SECOND * 90))?;
    // It asked for itself, not for one effect: nothing else goes there meanwhile.
    let before = scene.script.parcels().len();
    scene.send("mail", "other").await?;
    scene.pass(SECOND * 89).await?;
    same("requests meanwhile", &scene.script.parcels().len(), &before)?;
    scene.pass(SECOND).await?;
    ensure!(scene.script.parcels().len() > before, "it is never asked again");
    Ok(())
}

async fn nothing_is_sent_before_its_time_or_after_its_end(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|parcel, number| match key_of(parcel).as_str() {
        "acme:charge:lost" if parcel.method == "GET" => Play::status(404),
        "acme:charge:lost" if number < 3 => Play::Swallows,
        _ => Play::status(200),
    });
    let scene = Scene::open(lab, script).await?;
    let visitor = &scene.visitor;
    let at = |seconds: u64| scene.clock.now().plus(SECOND * u32::try_from(seconds).unwrap_or(0)).to_string();
    for (name, input) in [
        ("after", json!({"after_ms": 5_000})),
        ("at", json!({"due_at": at(3), "after_ms": 2_000})),
        ("late", json!({"due_at": at(5), "expires_at": at(5)})),
        ("soon", json!({"expires_at": at(5)})),
        ("lost", json!({"expires_at": at(5)})),
    ] {
        let mut input = input;
        input["key"] = json!(name);
        visitor.done("charge.send", &[], input, None).await?;
    }
    scene.pass(Duration::ZERO).await?;
    scene.shows("charge", "soon", json!({"status": "DELIVERED"})).await?;
    same("what was sent", &scene.script.parcels().len(), &2)?;
    scene.pass(SECOND * 5 - Duration::from_micros(1)).await?;
    same("what was sent", &scene.script.parcels().len(), &2)?;
    scene.pass(Duration::from_micros(1)).await?;
    for name in ["after", "at"] {
        scene.shows("charge", name, json!({"status": "DELIVERED"})).await?;
    }
    scene.shows("charge", "late", json!({"status": "PARKED", "reason": "expired", "attempt": 0})).await?;
    // One that may have been applied is not over by its time: it is asked about, and then not sent again.
    scene.shows("charge", "lost", json!({"status": "UNCERTAIN", "attempt": 1})).await?;
    scene.pass(SECOND * 5).await?;
    scene
        .shows(
            "charge",
            "lost",
            json!({"status": "PARKED", "reason": "expired", "attempt": 1, "doubt": false}),
        )
        .await?;
    // A process whose clock is behind does not send what has expired by the engine's.
    let skewed = SkewedClock::over(Arc::new(scene.clock.clone()));
    skewed.skew(-1_000_000);
    let store = visitor.house.store().clone();
    let behind = Visitor::before(store, BLUEPRINT, Arc::new(skewed), scene.script.outside(SECRETS)).await?;
    let early = scene.clock.now().minus(SECOND * 2).to_string();
    let input = json!({"key": "behind", "due_at": early, "expires_at": scene.clock.now().to_string()});
    visitor.done("charge.send", &[], input, None).await?;
    let before = scene.script.parcels().len();
    behind.drain_workers().await?;
    same("what was sent", &scene.script.parcels().len(), &before)?;
    scene.shows("charge", "behind", json!({"status": "PENDING", "attempt": 0})).await
}

async fn what_is_rejected_is_parked_and_can_be_replayed(lab: &dyn Lab) -> Result<()> {
    let script = Script::of(|_, number| match number {
        0 => Play::body(422, "no such account"),
        1 => Play::status(302),
        _ => Play::status(200),
    });
    let scene = Scene::open(lab, script).await?;
    let visitor = &scene.visitor;
    scene.send("mail", "one").await?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("mail", "one", json!({"status": "PARKED", "reason": "rejected", "http_status": 422, "answer": "no such account", "doubt": false, "due_at": null})).await?;
    scene.pass(HOUR * 24).await?;
    same("how often it was sent", &scene.script.parcels().len(), &1)?;
    for tries in 0.. {
        let list = visitor.done("mail.list", &[], json!({}), None).await?;
        let keys: Vec<&Json> =
            list.body.as_array().context("no list")?.iter().map(|row| &row["key"]).collect();
        if keys == [&json!("one")] {
            break;
        }
        ensure!(tries < 1_000, "parked: {keys:?}");
        pause().await;
    }
    let replayed = visitor.done("mail.replay", &key("one"), json!({}), None).await?;
    shows(&replayed, &json!({"status": "PENDING", "tries": 0, "attempt": 1, "reason": null}))?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("mail", "one", json!({"status": "PARKED", "reason": "redirected", "attempt": 2})).await?;
    visitor.done("mail.replay", &key("one"), json!({}), None).await?;
    scene.pass(Duration::ZERO).await?;
    scene.shows("mail", "one", json!({"status": "DELIVERED", "attempt": 3, "tries": 1})).await?;
    visitor.refused("mail.replay", &key("one"), json!({}), None, Code::WrongState).await.map(drop)
}

async fn a_changed_blueprint_holds_for_what_is_due(lab: &dyn Lab) -> Result<()> {
    let first = "[effect.call]\nurl = \"https://wrong.example/\"\nidempotent = true\nback_off = { min = \"1s\", max = \"1s\" }\n\
                 [effect.hook]\nhosts = [\"a.example\", \"b.example\"]\n";
    let second = "[effect.call]\nurl = \"https://right.example/\"\nback_off = { min = \"1s\", max = \"1s\" }\n\
                  [effect.hook]\nhosts = [\"b.example\"]\n";
    let script = Script::of(|parcel, _| match (parcel.url.host(), key_of(parcel).as_str()) {
        (Some("wrong.example"), "acme:call:doubtful") => Play::status(500),
        (Some("wrong.example"), _) => Play::status(404),
        _ => Play::status(200),
    });
    let before = Scene::with(lab, script.clone(), first).await?;
    for name in ["one", "doubtful"] {
        before.visitor.done("call.send", &[], json!({"key": name}), None).await?;
    }
    before.pass(Duration::ZERO).await?;
    before.shows("call", "one", json!({"status": "PARKED", "url": "https://wrong.example/"})).await?;
    before.shows("call", "doubtful", json!({"status": "RETRYING", "doubt": true})).await?;
    for host in ["a", "b"] {
        let input = json!({"key": host, "url": format!("https://{host}.example/")});
        before.visitor.done("hook.send", &[], input, None).await?;
    }
    let store = before.visitor.house.store().clone();
    let clock: Arc<dyn Clock> = Arc::new(before.clock.clone());
    let after = Visitor::before(store, second, clock, script.outside(&[])).await?;
    // A replay goes to where the blueprint says now, and the effect is still the same one.
    after.done("call.replay", &key("one"), json!({}), None).await?;
    // What may have been applied is not sent again to a target of which nobody says any more that it does a key once.
    after.refused("call.replay", &key("doubtful"), json!({}), None, Code::WrongState).await?;
    after.drain_workers().await?;
    after
        .shows("call", &key("one"), &json!({"status": "DELIVERED", "url": "https://right.example/"}))
        .await?;
    after.done("call.send", &[], json!({"key": "one"}), None).await?;
    // A host that is not allowed any more gets nothing, also of what was written down before.
    after
        .shows("hook", &key("a"), &json!({"status": "PARKED", "reason": "address_forbidden", "attempt": 0}))
        .await?;
    after.shows("hook", &key("b"), &json!({"status": "DELIVERED"})).await?;
    same("requests to a", &script.count("a.example"), &0)
}

async fn a_broken_target_is_left_alone_and_others_go_on(lab: &dyn Lab) -> Result<()> {
    let healed = Arc::new(AtomicBool::new(false));
    let script = Script::of({
        let healed = healed.clone();
        move |parcel, _| {
            let up = parcel.url.host() != Some("a.example") || healed.load(Ordering::SeqCst);
            if up { Play::status(200) } else { Play::Unreachable }
        }
    });
    let scene = Scene::open(lab, script).await?;
    let script = &scene.script;
    // More than a step looks at stand before the others.
    for number in 0..20 {
        scene.hook(&format!("a{number}"), "https://a.example/x").await?;
    }
    scene.clock.advance(Duration::from_millis(1));
    for number in 0..5 {
        scene.hook(&format!("b{number}"), "https://b.example/x").await?;
    }
    scene.pass(Duration::ZERO).await?;
    for number in 0..5 {
        scene.shows("hook", &format!("b{number}"), json!({"status": "DELIVERED", "attempt": 1})).await?;
    }
    // Three failures open the breaker; one more was under way.
    let failed = script.count("a.example");
    ensure!((3..=4).contains(&failed), "{failed} requests went to a target that is down");
    let gauges = scene.visitor.house.resources().iter().flat_map(|resource| &resource.workers);
    let open =
        gauges.flat_map(|worker| worker.gauges()).find(|gauge| gauge.label.1 == "open" && gauge.value > 0.0);
    ensure!(open.is_some(), "nobody can see that the breaker is open");
    // While it is open nothing goes there, and nobody's tries are used up.
    scene.pass(SECOND * 29).await?;
    same("requests while it is open", &script.count("a.example"), &failed)?;
    let untouched = async || -> Result<usize> {
        let mut count = 0;
        for number in 0..20 {
            let shown =
                scene.visitor.shown("hook", &key(&format!("a{number}")), &["status", "tries"]).await?;
            count += usize::from(shown == [json!("PENDING"), json!(0)]);
        }
        Ok(count)
    };
    same("those that wait", &untouched().await?, &(20 - failed))?;
    // After the cool-down one probe goes; it fails, and all wait again.
    scene.pass(SECOND * 5).await?;
    same("a probe", &script.count("a.example"), &(failed + 1))?;
    healed.store(true, Ordering::SeqCst);
    scene.pass(SECOND * 20).await?;
    same("requests while it is open", &script.count("a.example"), &(failed + 1))?;
    for _ in 0..10 {
        scene.pass(SECOND * 8).await?;
    }
    for number in 0..20 {
        scene.shows("hook", &format!("a{number}"), json!({"status": "DELIVERED"})).await?;
    }
    same("done", &script.acted().values().filter(|times| **times == 1).count(), &25)
}

async fn no_target_gets_more_than_its_limits(lab: &dyn Lab) -> Result<()> {
    let blueprint = "[effect.hook]\nhosts = [\"a.example\", \"b.example\"]\nshards = 1\nlimits = { per_second = 5 }\n\
                     [effect.slow]\nurl = \"https://slow.example/\"\nlimits = { concurrency = 3 }\n";
    let door = Door::default();
    let script = Script::of({
        let door = door.clone();
        move |parcel, _| match parcel.url.host() {
            Some("slow.example") => Play::Holds(door.clone()),
            _ => Play::status(200),
        }
    });
    let scene = Scene::with(lab, script, blueprint).await?;
    for number in 0..8 {
        scene.visitor.done("slow.send", &[], json!({"key": format!("{number}")}), None).await?;
    }
    let sender = held_up(&scene.visitor, || scene.script.parcels().len() >= 3).await?;
    for _ in 0..10 {
        pause().await;
    }
    same("at once", &scene.script.parcels().len(), &3)?;
    door.open();
    sender.await??;
    scene.visitor.drain_workers().await?;
    same("all of them", &scene.script.count("slow.example"), &8)?;
    ensure!(scene.script.most_in_flight() <= 3, "{} were under way at once", scene.script.most_in_flight());
    for number in 0..12 {
        scene.hook(&format!("a{number}"), "https://a.example/x").await?;
    }
    scene.pass(Duration::ZERO).await?;
    same("in the first moment", &scene.script.count("a.example"), &5)?;
    scene.hook("b", "https://b.example/x").await?;
    scene.pass(Duration::ZERO).await?;
    same("another target", &scene.script.count("b.example"), &1)?;
    // Rows that were put off come back within two seconds, and then five go in each.
    let mut counts = Vec::new();
    for _ in 0..6 {
        scene.pass(SECOND).await?;
        counts.push(scene.script.count("a.example"));
    }
    same("in the end", &counts.last(), &Some(&12))?;
    let jumps = std::iter::once(5).chain(counts.iter().copied()).zip(counts.iter().copied());
    ensure!(jumps.into_iter().all(|(before, after)| after - before <= 5), "{counts:?}");
    Ok(())
}

async fn a_slow_target_holds_up_nobody_else(lab: &dyn Lab) -> Result<()> {
    let door = Door::default();
    let script = Script::of({
        let door = door.clone();
        move |parcel, _| {
            if parcel.url.host() == Some("a.example") { Play::Holds(door.clone()) } else { Play::status(200) }
        }
    });
    let scene = Scene::open(lab, script).await?;
    for number in 0..6 {
        scene.hook(&format!("a{number}"), "https://a.example/x").await?;
        scene.hook(&format!("b{number}"), "https://b.example/x").await?;
        scene.hook(&format!("c{number}"), "https://any.c.example/x").await?;
    }
    // One step: the slow target has two requests under way, the others get all of theirs meanwhile.
    let sender = held_up(&scene.visitor, || scene.script.parcels().len() >= 14).await?;
    for _ in 0..1_000 {
        let mut done = 0;
        for name in ["b", "c"] {
            for number in 0..6 {
                let shown =
                    scene.visitor.shown("hook", &key(&format!("{name}{number}")), &["status"]).await?;
                done += usize::from(shown[0] == json!("DELIVERED"));
            }
        }
        if done == 12 {
            break;
        }
        pause().await;
    }
    same("the slow one", &scene.script.count("a.example"), &2)?;
    for name in ["b5", "c5"] {
        scene.shows("hook", name, json!({"status": "DELIVERED"})).await?;
    }
    door.open();
    sender.await??;
    scene.visitor.drain_workers().await?;
    for _ in 0..5 {
        scene.pass(SECOND).await?;
    }
    same("all of them", &scene.script.acted().len(), &18)
}

const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const SECOND_SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
/// Computed with Python's `hmac` for the request of the cases below: id `acme:hook:order-7`, timestamp 1800000000, body
/// `{"paid":"für 7 €"}`.
const BY_FIRST: &str = "v1,vfwQI9UHBk1wupo+YasOtGWRUWSBXP+52UpA8qgzhBM=";
const BY_SECOND: &str = "v1,0X7GUimqX8YLRXmqKMqMM5oC+lPK84QDxDvEAy3E50k=";

async fn signatures_are_as_receivers_expect_them(lab: &dyn Lab) -> Result<()> {
    let target = Listener::open(|_, _| Reaction::answer(204, &[], b"")).await?;
    let blueprint = format!(
        "[effect.hook]\nurl = \"http://{}/\"\nallow_private = true\nsign = [\"env:NEW\", \"env:OLD\"]\n",
        target.address
    );
    let clock = standing();
    let secrets = Arc::new(Secrets::of(&[("NEW", SECOND_SECRET), ("OLD", FIRST)]));
    let outside = Outside { environment: secrets.clone(), ..Outside::default() };
    let store = lab.open_at(Arc::new(clock.clone())).await?;
    let visitor = Visitor::before(store, &blueprint, Arc::new(clock.clone()), outside).await?;
    for tenant in ["acme", "bond", "core", "dent"] {
        visitor
            .for_tenant(tenant)?
            .done("hook.send", &[], json!({"key": "order-7", "body": {"paid": "für 7 €"}}), None)
            .await?;
        match tenant {
            // During a rotation there are two, and afterwards one; without any nothing is sent.
            "bond" => secrets.set("OLD", None),
            "core" => secrets.set("NEW", None),
            "dent" => secrets.set("OLD", Some("not a secret")),
            _ => {}
        }
        visitor.drain_workers().await?;
    }
    let got = target.got();
    same("how many were sent", &got.len(), &2)?;
    let headers = |number: usize, name: &str| got[number].headers.get(name).cloned().unwrap_or_default();
    same("the body", &got[0].body, &"{\"paid\":\"für 7 €\"}".as_bytes().to_vec())?;
    same("webhook-id", &headers(0, "webhook-id"), &"acme:hook:order-7".to_owned())?;
    same("webhook-timestamp", &headers(0, "webhook-timestamp"), &"1800000000".to_owned())?;
    same("webhook-signature", &headers(0, "webhook-signature"), &format!("{BY_SECOND} {BY_FIRST}"))?;
    same("webhook-id", &headers(1, "webhook-id"), &"bond:hook:order-7".to_owned())?;
    ensure!(!headers(1, "webhook-signature").contains(' '), "{}", headers(1, "webhook-signature"));
    // What could not be signed waits as if nothing had been tried, and goes when the secret is there.
    for tenant in ["core", "dent"] {
        visitor
            .for_tenant(tenant)?
            .shows("hook", &key("order-7"), &json!({"status": "PENDING", "attempt": 0}))
            .await?;
    }
    let failures: Vec<String> =
        visitor.work(7).await?.into_iter().flat_map(|progress| progress.failures).collect();
    ensure!(failures.len() == 2 && !failures.iter().any(|why| why.contains("not a secret")), "{failures:?}");
    secrets.set("OLD", Some(FIRST));
    visitor.drain_workers().await?;
    same("how many were sent", &target.got().len(), &4)
}

async fn secrets_can_be_kept_in_the_house_and_rotated(lab: &dyn Lab) -> Result<()> {
    let blueprint = "[effect.call]\nurl = \"https://psp.example/\"\nheaders = { x-key = \"${house:psp}\" }\n";
    let scene = Scene::with(lab, Script::of(|_, _| Play::status(200)), blueprint).await?;
    let store = scene.visitor.house.store().clone();
    scene.visitor.done("call.send", &[], json!({"key": "one"}), None).await?;
    scene.visitor.drain_workers().await?;
    same("without a secret", &scene.script.parcels().len(), &0)?;
    for (number, secret) in ["first-secret", "second-secret"].into_iter().enumerate() {
        let plan = keep_secret("psp", secret, &format!("keep-{number}"))?;
        ensure!(matches!(store.commit(&plan).await?, Commit::Applied(_)), "the secret was not kept");
        scene.visitor.done("call.send", &[], json!({"key": format!("{number}")}), None).await?;
        scene.visitor.drain_workers().await?;
    }
    let keys: Vec<Option<String>> =
        scene.script.parcels().iter().map(|parcel| header(parcel, "x-key")).collect();
    same("what was sent", &keys.len(), &3)?;
    same("the first", &keys[0].as_deref(), &Some("first-secret"))?;
    same("the last", &keys[2].as_deref(), &Some("second-secret"))?;
    let told = format!("{:?}", whole_log(store.as_ref()).await?);
    ensure!(!told.contains("-secret"), "the log tells a secret");
    ensure!(keep_secret("../server", "x", "op").is_err(), "a name reaches out of its corner");
    // Nothing prints them either.
    let printed = format!("{:?}", scene.script.parcels());
    ensure!(!printed.contains("-secret"), "{printed}");
    Ok(())
}

/// Names and the addresses that they have, one list for each time they are asked for.
#[derive(Debug)]
struct Names(Mutex<BTreeMap<&'static str, Vec<Vec<&'static str>>>>);

#[async_trait]
impl Resolver for Names {
    async fn resolve(&self, host: &str) -> Result<Vec<std::net::IpAddr>, String> {
        let mut names = self.0.lock().map_err(|error| error.to_string())?;
        let lists = names.get_mut(host).ok_or("no such name")?;
        let list = if lists.len() > 1 { lists.remove(0) } else { lists.first().cloned().unwrap_or_default() };
        list.iter().map(|text| text.parse().map_err(|_| "a bad address".to_owned())).collect()
    }
}

async fn nothing_goes_where_it_must_not(lab: &dyn Lab) -> Result<()> {
    let redirect =
        Listener::open(|_, _| Reaction::answer(307, &[("location", "http://127.0.0.1:1/")], b"")).await?;
    let port = redirect.address.port();
    let blueprint = format!(
        "[effect.hook]\nhosts = [\"*\"]\nshards = 1\n\n[effect.narrow]\nhosts = [\"a.example\", \"*.b.example:8443\"]\n\n\
         [effect.own]\nhosts = [\"*:{port}\"]\nallow_private = true\n"
    );
    let names = Names(Mutex::new(
        [
            ("inner.example", vec![vec!["10.0.0.7"]]),
            ("two-faced.example", vec![vec!["93.184.216.34", "127.0.0.1"]]),
            ("mapped.example", vec![vec!["::ffff:169.254.169.254"]]),
            ("metadata.example", vec![vec!["169.254.169.254"]]),
            // A name that shows one address to whoever checks, and another one to whoever connects.
            ("rebound.example", vec![vec!["127.0.0.1"], vec!["127.0.0.9"]]),
        ]
        .into(),
    ));
    let courier = HttpCourier::default().resolving_by(Arc::new(names));
    let outside = Outside { courier: Some(Arc::new(courier)), ..Outside::default() };
    let clock = standing();
    let store = lab.open_at(Arc::new(clock.clone())).await?;
    let visitor = Visitor::before(store, &blueprint, Arc::new(clock.clone()), outside).await?;
    let forbidden = [
        "https://127.0.0.1/",
        "https://10.1.2.3/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fd00::1]/",
        "https://[fe80::1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://0.0.0.0/",
        "https://192.168.1.1/",
        "https://100.64.0.1/",
        "https://224.0.0.1/",
        "https://inner.example/",
        "https://two-faced.example/",
        "https://mapped.example/",
    ];
    for (number, url) in forbidden.iter().enumerate() {
        visitor.done("hook.send", &[], json!({"key": format!("{number}"), "url": url}), None).await?;
    }
    visitor.drain_workers().await?;
    for (number, url) in forbidden.iter().enumerate() {
        visitor
            .shows(
                "hook",
                &key(&number.to_string()),
                &json!({"status": "PARKED", "reason": "address_forbidden"}),
            )
            .await
            .with_context(|| (*url).to_owned())?;
    }
    for (resource, url) in [
        ("hook", "http://a.example/"),
        ("hook", "https://a.example:22/"),
        ("hook", "https://user:pw@a.example/"),
        ("hook", "ftp://a.example/"),
        ("hook", "file:///etc/passwd"),
        ("hook", "a.example"),
        ("narrow", "https://c.example/"),
        ("narrow", "https://a.example.evil.example/"),
        ("narrow", "https://a.example:8443/"),
        ("narrow", "https://x.b.example/"),
        ("narrow", "https://b.example:8443/"),
        ("narrow", "https://a.example@c.example/"),
        ("own", "http://127.0.0.1/"),
    ] {
        visitor
            .refused(
                &format!("{resource}.send"),
                &[],
                json!({"key": "no", "url": url}),
                None,
                Code::InvalidInput,
            )
            .await?;
    }
    visitor.refused("narrow.send", &[], json!({"key": "no"}), None, Code::InvalidInput).await?;
    visitor
        .done(
            "narrow.send",
            &[],
            json!({"key": "ok", "url": "https://x.b.example:8443/", "after_ms": 60_000}),
            None,
        )
        .await?;
    // One's own network can be opened; metadata services stay closed, and redirects are not followed.
    for (name, host) in
        [("redirect", "127.0.0.1"), ("rebound", "rebound.example"), ("metadata", "metadata.example")]
    {
        let url = format!("http://{host}:{port}/");
        visitor.done("own.send", &[], json!({"key": name, "url": url}), None).await?;
    }
    visitor.drain_workers().await?;
    for (name, reason) in
        [("redirect", "redirected"), ("rebound", "redirected"), ("metadata", "address_forbidden")]
    {
        visitor.shows("own", &key(name), &json!({"status": "PARKED", "reason": reason})).await?;
    }
    same("how many requests came", &redirect.got().len(), &2)?;
    let host = redirect.got()[1].headers.get("host").cloned();
    ensure!(host.is_some_and(|host| host.ends_with(&format!(":{port}"))), "{:?}", redirect.got());
    Ok(())
}

async fn hostile_answers_are_borne(lab: &dyn Lab) -> Result<()> {
    let target = Listener::open(|got, _| {
        let head =
            |length: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").into_bytes();
        match got.headers.get("idempotency-key").map(String::as_str) {
            Some("acme:call:long") => Reaction::answer(200, &[], &vec![b'x'; 5_000_000]),
            Some("acme:call:endless") => Reaction::Stalls([head(1 << 40), vec![b'y'; 100_000]].concat()),
            Some("acme:call:zeros") => Reaction::answer(200, &[], b"a\0b\xff\xfe\0"),
            Some("acme:call:cut") => Reaction::Writes([head(500), b"only this".to_vec()].concat()),
            Some("acme:call:later") => Reaction::answer(503, &[("retry-after", "99999999999999999999")], b""),
            _ => Reaction::Writes(b"HTTP/1.1 nonsense\r\n\r\n".to_vec()),
        }
    })
    .await?;
    let blueprint = format!(
        "[effect.call]\nurl = \"http://{}/\"\nallow_private = true\nanswer_max = 1000\nidempotent = true\n",
        target.address
    );
    let visitor = Visitor::open_at(lab, &blueprint, Arc::new(standing())).await?;
    for name in ["long", "endless", "zeros", "cut", "later", "nonsense"] {
        visitor.done("call.send", &[], json!({"key": name}), None).await?;
    }
    // The endless one stalls after more than is kept, so that nobody has to wait for the rest.
    for _ in 0..3 {
        visitor.work(7).await?;
    }
    for (name, answer) in [
        ("long", "x".repeat(1_000)),
        ("endless", "y".repeat(1_000)),
        ("zeros", "a\u{fffd}b\u{fffd}\u{fffd}\u{fffd}".to_owned()),
        ("cut", "only this".to_owned()),
    ] {
        let expected = json!({"status": "DELIVERED", "http_status": 200, "answer": answer});
        visitor.shows("call", &key(name), &expected).await.with_context(|| name.to_owned())?;
    }
    visitor.shows("call", &key("later"), &json!({"status": "RETRYING", "http_status": 503})).await?;
    visitor.shows("call", &key("nonsense"), &json!({"status": "UNCERTAIN", "doubt": true})).await
}

async fn silence_is_doubt_and_a_closed_door_is_not(lab: &dyn Lab) -> Result<()> {
    let silent = Listener::open(|_, _| Reaction::Stalls(Vec::new())).await?;
    let cut = Listener::open(|_, _| Reaction::Writes(Vec::new())).await?;
    let gone = Listener::open(|_, _| Reaction::Writes(Vec::new())).await?;
    let (closed, address) = (gone.address, silent.address);
    drop(gone);
    let blueprint = format!(
        "[effect.silent]\nurl = \"http://{address}/\"\nallow_private = true\ntimeout = \"200ms\"\nbreaker = {{ failures = 1 }}\n\
         [effect.cut]\nurl = \"http://{}/\"\nallow_private = true\n\
         [effect.closed]\nurl = \"http://{closed}/\"\nallow_private = true\nback_off = {{ min = \"1h\" }}\n\
         [effect.unnamed]\nurl = \"https://no-such-name.invalid/\"\nback_off = {{ min = \"1h\" }}\n",
        cut.address
    );
    let visitor = Visitor::open(lab, &blueprint).await?;
    for resource in ["silent", "cut", "closed", "unnamed"] {
        visitor.done(&format!("{resource}.send"), &[], json!({"key": "one"}), None).await?;
    }
    let settled = async |resource: &str, expected: Json| -> Result<()> {
        for _ in 0..1_000 {
            visitor.work(7).await?;
            let shown = visitor.shown(resource, &key("one"), &["status"]).await?;
            if shown[0] != json!("PENDING") {
                break;
            }
            pause().await;
        }
        visitor.shows(resource, &key("one"), &expected).await.with_context(|| resource.to_owned())
    };
    settled("silent", json!({"status": "UNCERTAIN", "doubt": true, "reason": "no_answer"})).await?;
    settled("cut", json!({"status": "UNCERTAIN", "doubt": true, "reason": "no_answer"})).await?;
    settled("closed", json!({"status": "RETRYING", "doubt": false, "reason": "not_taken"})).await?;
    settled("unnamed", json!({"status": "RETRYING", "doubt": false, "reason": "not_taken"})).await
}

async fn what_is_over_is_forgotten_in_time(lab: &dyn Lab) -> Result<()> {
    let blueprint = "[effect.call]\nurl = \"https://psp.example/\"\nkeep = \"30d\"\n";
    let script =
        Script::of(|parcel, _| Play::status(if key_of(parcel).ends_with("bad") { 400 } else { 200 }));
    let scene = Scene::with(lab, script, blueprint).await?;
    let visitor = &scene.visitor;
    for name in ["done", "bad", "cancelled", "resolved"] {
        let later = if name == "cancelled" { 1_000 } else { 0 };
        visitor.done("call.send", &[], json!({"key": name, "after_ms": later}), None).await?;
    }
    visitor.done("call.cancel", &key("cancelled"), json!({}), None).await?;
    scene.pass(Duration::ZERO).await?;
    scene.pass(HOUR * 24 * 30 - Duration::from_micros(1)).await?;
    for name in ["done", "bad", "cancelled"] {
        visitor.done("call.read", &key(name), json!({}), None).await?;
    }
    scene.pass(Duration::from_micros(1)).await?;
    for name in ["done", "cancelled"] {
        visitor.refused("call.read", &key(name), json!({}), None, Code::NotFound).await?;
    }
    // What is parked waits for a person, for ever.
    scene.pass(HOUR * 24 * 300).await?;
    scene.shows("call", "bad", json!({"status": "PARKED"})).await?;
    let store = visitor.house.store().clone();
    tells(store.as_ref(), "done", &["call.pending", "call.sending", "call.delivered", "call.forgotten"]).await
}

async fn processes_share_the_effects_and_survive_each_other(lab: &dyn Lab) -> Result<()> {
    let target = Listener::open(|_, number| match number % 7 {
        3 => Reaction::answer(503, &[], b"later"),
        _ => Reaction::answer(200, &[], b"ok"),
    })
    .await?;
    let blueprint = format!(
        "[effect.hook]\nhosts = [\"*:{}\"]\nallow_private = true\nidempotent = true\nshards = 3\nlease = \"2s\"\n\
         timeout = \"500ms\"\nconnect_timeout = \"500ms\"\nback_off = {{ min = \"10ms\", max = \"50ms\" }}\n",
        target.address.port()
    );
    let store = lab.open().await?;
    let open = async || Visitor::over(store.clone(), &blueprint, Arc::new(SystemClock)).await;
    let (first, second) = (open().await?, open().await?);
    let options = || Options {
        lease: Duration::from_millis(1_500),
        idle_max: Duration::from_millis(100),
        random: Random::seeded(1),
        ..Options::default()
    };
    for visitor in [&first, &second] {
        visitor.house.start_workers(options());
    }
    let send = async |visitor: &Visitor, numbers: std::ops::Range<usize>| -> Result<()> {
        for number in numbers {
            let url = format!("http://127.0.0.1:{}/{number}", target.address.port());
            visitor.done("hook.send", &[], json!({"key": format!("h{number}"), "url": url}), None).await?;
        }
        Ok(())
    };
    send(&first, 0..15).await?;
    // One process is killed, perhaps amid a request, with its leases in its hands.
    drop(first);
    send(&second, 15..30).await?;
    let tenant = Tenant::new("acme")?;
    same("who", &second.tenant, &tenant)?;
    for number in 0..30 {
        let name = format!("h{number}");
        let mut last = Json::Null;
        for _ in 0..3_000 {
            last = second.shown("hook", &key(&name), &["status"]).await?[0].clone();
            if last == json!("DELIVERED") {
                break;
            }
            pause().await;
        }
        same(&name, &last, &json!("DELIVERED"))?;
    }
    same("how many were done", &target.keys().len(), &30)?;
    second.house.stop_workers().await;
    let plan = Plan::of(&tenant, "end").log(Entry::about("drill", "end")).build()?;
    store.commit(&plan).await.map(drop).context("the store is still there")
}
