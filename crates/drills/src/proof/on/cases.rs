//! Reactions: each event calls its action once, in order by key.

mod refusals;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::infra::lease::Leases;
use statehouse::worker::{StepContext, WorkerOptions};
use statehouse::{Code, Operation, Request, system};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Random, Store, SystemClock, Tenant};

use self::refusals::*;
use super::{cases as on, invariants};
use crate::conformance::{Case, cases};
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::TenantClient;

pub(crate) const CASES: &[Case] = cases! {
    on {
        an_event_calls_an_action_once(9),
        lost_answers_call_nothing_twice(9),
        a_process_that_dies_after_the_effect_calls_nothing_twice(9),
        a_holder_that_was_overtaken_calls_nothing(9),
        servers_share_the_work_and_survive_each_other(20),
        events_of_a_batch_are_reacted_to_one_by_one(20),
        going_back_calls_nothing_twice(9),
        a_new_reaction_begins_at_the_end_of_the_log(9),
        a_refused_action_is_parked_and_retried(9),
        an_operation_id_that_is_taken_is_reported(9),
        conditions_and_templates_read_the_row(9),
        an_action_under_a_lock_is_called_once(9),
        a_refused_action_holds_up_its_key_alone(9),
        what_is_parked_is_given_up_in_order(9),
        a_cycle_is_cut(9),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "duplicate consumption",
        "Answers to the plans of a reaction get lost before and after the commit, and the step is done again.",
        "on::lost_answers_call_nothing_twice",
    ),
    Drill::by_case(
        CASES,
        "offset advanced before effect committed",
        "Processes die before and after they commit the action with the offset.",
        "on::a_process_that_dies_after_the_effect_calls_nothing_twice",
    ),
    Drill::by_case(
        CASES,
        "consumer lag",
        "Servers that share the work die, and the others catch up.",
        "on::servers_share_the_work_and_survive_each_other",
    ),
    Drill::by_case(
        CASES,
        "out-of-order processing across partitions",
        "An action is refused while later events of its row and events of other rows come.",
        "on::a_refused_action_holds_up_its_key_alone",
    ),
];

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.order]
key    = { id = "int" }
fields = { email = "text", n = "int", note = "text?" }
require_version = false

[entity.tally]
key    = { email = "text" }
fields = { orders = { type = "int", default = 0 }, last = "text?", at = "time?" }
require_version = false

[on.ordered]
event = "order.created"
do    = "tally.mutate"
key   = "{row.email}"
input = { increment = { orders = 1 }, set = { last = "order {subject} of {row.email}: {row.n}", at = "{at}" } }
"#;

async fn open(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    TenantClient::open(namespace, BLUEPRINT).await
}

/// Creates the tally of an address, for tenants that have none.
async fn tally(client: &TenantClient, email: &str) -> Result<()> {
    client.done("tally.create", &[], json!({"email": email}), None).await.map(drop)
}

async fn order(client: &TenantClient, id: i64, email: &str) -> Result<()> {
    client.done("order.create", &[], json!({"id": id, "email": email, "n": id}), None).await.map(drop)
}

/// How often the action was called for an address.
async fn orders(client: &TenantClient, email: &str) -> Result<Json> {
    Ok(client.shown("tally", &[email.into()], &["orders"]).await?.remove(0))
}

const EMAILS: [&str; 3] = ["ann@example.com", "bob@example.com", "eve@example.com"];
const TENANTS: [&str; 2] = ["acme", "bond"];

/// Orders of all addresses and tenants; each tally has to come to this number.
async fn busy(client: &TenantClient, first: i64, count: i64) -> Result<()> {
    for id in first..first + count {
        for tenant in TENANTS {
            let client = client.for_tenant(tenant)?;
            for (index, email) in (0..).zip(EMAILS) {
                order(&client, 10 * id + index, email).await?;
            }
        }
    }
    Ok(())
}

async fn tallies(client: &TenantClient) -> Result<()> {
    for tenant in TENANTS {
        for email in EMAILS {
            tally(&client.for_tenant(tenant)?, email).await?;
        }
    }
    Ok(())
}

async fn counted(client: &TenantClient, count: i64) -> Result<()> {
    for tenant in TENANTS {
        for email in EMAILS {
            let found = orders(&client.for_tenant(tenant)?, email).await?;
            same(&format!("the orders of {email} in {tenant}"), &found, &json!(count))?;
        }
    }
    Ok(())
}

async fn an_event_calls_an_action_once(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tallies(&client).await?;
    busy(&client, 1, 3).await?;
    client.drain_workers().await?;
    counted(&client, 3).await?;
    client.drain_workers().await?;
    counted(&client, 3).await?;
    client.shows("tally", &[EMAILS[1].into()], &json!({"last": "order 31 of bob@example.com: 31"})).await?;
    // The event of the action says what caused it.
    let log = whole_log(client.house.store().as_ref()).await?;
    let caused = log.iter().flat_map(|record| &record.events).filter(|event| event.name == "tally.updated");
    let caused: Vec<&Json> = caused.map(|event| &event.data["reaction"]).collect();
    same("the effects", &caused.len(), &18)?;
    ensure!(caused.iter().all(|cause| cause["on"] == "ordered" && cause["depth"] == 1), "{caused:?}");
    let lag: u64 = client.house.group("ordered").status().await?.iter().map(|one| one.records).sum();
    same("what lies ahead", &lag, &0)
}

async fn lost_answers_call_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound, Arc::new(SystemClock), Odds::default(), 11));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    tallies(&client).await?;
    busy(&client, 1, 4).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.05, ..Odds::default() });
    for _ in 0..60 {
        // Whatever comes of it: the process may die here as well.
        let _ = client.work(4).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    client.drain_workers().await?;
    counted(&client, 4).await?;
    same("what is parked", &client.house.group("ordered").parked(&client.tenant).await?, &vec![])
}

async fn a_process_that_dies_after_the_effect_calls_nothing_twice(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let sound = namespace.open().await?;
    let quiet = TenantClient::over(sound.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    tallies(&quiet).await?;
    busy(&quiet, 1, 3).await?;
    let mut died = 0;
    for seed in 1..=8 {
        let odds = Odds { crash_before: 0.1, crash_after: 0.3, ..Odds::default() };
        let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), seed));
        let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
        faulty.set_odds(odds);
        let process = tokio::spawn(async move {
            for _ in 0..20 {
                let _ = client.work(3).await;
            }
        });
        // A call that never returns is a process that is gone.
        for _ in 0..500 {
            let achieved = faulty.achieved();
            if process.is_finished() || achieved.crashes_after + achieved.crashes_before > 0 {
                break;
            }
            pause().await;
        }
        process.abort();
        died += faulty.achieved().crashes_after;
    }
    ensure!(died > 0, "no process died after its effect");
    quiet.drain_workers().await?;
    counted(&quiet, 3).await
}

/// A holder whose lease another process has taken since works on, and finds everything done.
async fn a_holder_that_was_overtaken_calls_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tallies(&client).await?;
    busy(&client, 1, 2).await?;
    let house = &client.house;
    let (tenant, table) = (system::tenant().context("the house has no name")?, system::leases()?);
    let leases = Leases::of(house.store().clone(), house.clock().clone(), table, tenant);
    let hold = async |name: &str| {
        let held =
            leases.acquire(&["drill".into(), "ordered".into()], name, Duration::from_millis(1)).await?;
        held.map_err(|lease| anyhow::anyhow!("{lease:?} is taken"))
    };
    let first = hold("first").await?;
    pause().await;
    let second = hold("second").await?;
    let worker = house.workers().iter().find(|worker| worker.name() == "ordered.consume");
    let worker = worker.context("the reaction has no worker")?;
    for held in [&second, &first, &second, &first] {
        for shard in 0..worker.shards() {
            let (store, clock, ids) = (house.store(), house.clock(), house.ids());
            let (egress, wakeups) = (house.egress(), house.bells());
            let context = StepContext { store, clock, ids, egress, wakeups, shard, held };
            // The one that was overtaken may be told so.
            let _ = worker.step(&context, 50).await;
        }
    }
    counted(&client, 2).await
}

async fn servers_share_the_work_and_survive_each_other(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let open = async || TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await;
    let options = || WorkerOptions {
        lease: Duration::from_millis(1_500),
        idle_max: Duration::from_millis(100),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    };
    let (first, second) = (open().await?, open().await?);
    tallies(&first).await?;
    first.house.start_workers(options());
    busy(&first, 1, 2).await?;
    second.house.start_workers(options());
    busy(&second, 3, 2).await?;
    eventually(&second, 4).await?;
    // One is killed with its leases in its hands.
    drop(first);
    busy(&second, 5, 2).await?;
    eventually(&second, 6).await?;
    second.house.stop_workers().await;
    counted(&second, 6).await
}

async fn eventually(client: &TenantClient, count: i64) -> Result<()> {
    let mut found = Ok(());
    for _ in 0..3_000 {
        found = counted(client, count).await;
        if found.is_ok() {
            return Ok(());
        }
        pause().await;
    }
    found
}

async fn events_of_a_batch_are_reacted_to_one_by_one(namespace: &dyn TestNamespace) -> Result<()> {
    let faulty =
        Arc::new(FaultyStore::over(namespace.open().await?, Arc::new(SystemClock), Odds::default(), 5));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    tallies(&client).await?;
    for tenant in TENANTS {
        let tenant = Tenant::new(tenant)?;
        let request = |id: i64| {
            let email = EMAILS[usize::try_from(id).unwrap_or(0) % EMAILS.len()];
            TenantClient::request("order.create", &[], &json!({"id": id, "email": email, "n": 1}), None)
        };
        for first in [0, 3, 6] {
            let requests: Vec<Request> = (first..first + 3).map(request).collect();
            client.house.batch(&tenant, requests, Operation::default()).await?;
        }
    }
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.3, ..Odds::default() });
    for _ in 0..20 {
        let _ = client.work(4).await;
    }
    faulty.set_odds(Odds::default());
    client.drain_workers().await?;
    counted(&client, 3).await
}

async fn going_back_calls_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tallies(&client).await?;
    busy(&client, 1, 2).await?;
    client.drain_workers().await?;
    let group = client.house.group("ordered");
    for partition in 0..client.house.store().partitions() {
        group.seek(partition, 0).await?;
    }
    busy(&client, 3, 1).await?;
    client.drain_workers().await?;
    counted(&client, 3).await
}

const CONDITIONAL: &str = r#"
[house]
name = "drill"

[entity.order]
key    = { id = "int", shop = "text" }
fields = { email = "text?", n = "int", more = "json?" }
require_version = false

[timer.reminder]
key = { order = "text" }

[entity.mail]
key    = { id = "text" }
fields = { to = "text?", n = "int?", text = "text?", json = "json?" }
require_version = false

[on.large]
event = "order.updated"
when  = "n > 10 and email is not null"
do    = "mail.create"
input = { id = "{key.shop}-{key.id}-{row.version}", to = "{row.email}", n = "{row.n}", text = "{row.n} of {{{event}}}", json = { first = "{row.more.list.0}", list = ["{tenant}", 7] } }

[on.reminded]
event = "reminder.fired"
do    = "mail.create"
input = { id = "{subject}", to = "{row.payload.email}", text = "{row.payload.nothing}" }
"#;

async fn conditions_and_templates_read_the_row(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, CONDITIONAL).await?;
    let new = json!({"id": 7, "shop": "a,b%", "email": "ann@example.com", "n": 1, "more": {"list": ["x"]}});
    client.done("order.create", &[], new, None).await?;
    let key = [7.into(), "a,b%".into()];
    for n in [10, 11, 5, 12] {
        client.done("order.patch", &key, json!({"n": n}), None).await?;
    }
    client.done("order.patch", &key, json!({"n": 50, "email": null}), None).await?;
    let reminder = json!({"after_ms": 0, "payload": {"email": "eve@example.com"}});
    client.done("reminder.set", &["r1".into()], reminder, None).await?;
    client.drain_workers().await?;
    let mails = client.done("mail.list", &[], json!({}), None).await?;
    let mut ids: Vec<&str> =
        mails.body.as_array().into_iter().flatten().filter_map(|mail| mail["id"].as_str()).collect();
    ids.sort_unstable();
    same("the mails", &ids, &vec!["a,b%-7-3", "a,b%-7-5", "r1"])?;
    let text = "12 of {order.updated}";
    let expected =
        json!({"to": "ann@example.com", "n": 12, "text": text, "json": {"first": "x", "list": ["acme", 7]}});
    client.shows("mail", &["a,b%-7-5".into()], &expected).await?;
    client.shows("mail", &["r1".into()], &json!({"to": "eve@example.com", "text": null, "n": null})).await?;
    invariants::check(&client.scope("large")).await?;
    invariants::check(&client.scope("reminded")).await
}

async fn a_new_reaction_begins_at_the_end_of_the_log(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let reaction = BLUEPRINT.find("[on.ordered]").context("the blueprint has a reaction")?;
    let before = TenantClient::over(store.clone(), &BLUEPRINT[..reaction], Arc::new(SystemClock)).await?;
    tallies(&before).await?;
    busy(&before, 1, 2).await?;
    // The log shows what was written before a server with the reaction starts.
    settled(store.as_ref()).await?;
    let after = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    busy(&before, 3, 1).await?;
    after.drain_workers().await?;
    counted(&after, 1).await?;
    let from_start = BLUEPRINT.replace("[on.ordered]", "[on.from_start]\nfrom  = \"start\"");
    let all = TenantClient::over(store, &from_start, Arc::new(SystemClock)).await?;
    all.drain_workers().await?;
    counted(&all, 4).await
}

/// Waits until the log shows all orders and tallies.
async fn settled(store: &dyn Store) -> Result<()> {
    for _ in 0..1_000 {
        if whole_log(store).await?.len() >= 18 {
            return Ok(());
        }
        pause().await;
    }
    anyhow::bail!("the log does not show what was written")
}

const LOCKED: &str = r#"
[house]
name = "drill"

[entity.order]
key    = { id = "int" }
fields = { n = "int" }
require_version = false

[entity.account]
key    = { id = "text" }
fields = { total = { type = "int", default = 0 } }
require_version = false
mutate = "pessimistic"

[sequence.invoice]
kind = "gapless"
key  = { series = "text" }

[on.booked]
event = "order.created"
do    = "account.mutate"
key   = "all"
input = { increment = { total = "{row.n}" } }

[on.invoiced]
event = "order.created"
do    = "invoice.take"
key   = "A"
input = { subject = "order-{subject}" }
"#;

async fn an_action_under_a_lock_is_called_once(namespace: &dyn TestNamespace) -> Result<()> {
    let faulty =
        Arc::new(FaultyStore::over(namespace.open().await?, Arc::new(SystemClock), Odds::default(), 3));
    let client = TenantClient::over(faulty.clone(), LOCKED, Arc::new(SystemClock)).await?;
    client.done("account.create", &[], json!({"id": "all"}), None).await?;
    for id in 1..=5 {
        client.done("order.create", &[], json!({"id": id, "n": id}), None).await?;
    }
    faulty.set_odds(Odds { unknown_before: 0.1, unknown_after: 0.3, ..Odds::default() });
    for _ in 0..10 {
        let _ = client.work(4).await;
    }
    faulty.set_odds(Odds::default());
    for _ in 0..3_000 {
        // A lock whose answer was lost ends by itself.
        let _ = client.work(10).await;
        let total = client.shown("account", &["all".into()], &["total"]).await?.remove(0);
        let next = client.call("invoice.read", &["A".into()], json!({}), None).await;
        if total == json!(15) && next.as_ref().is_ok_and(|next| next.body["next"] == json!(6)) {
            break;
        }
        pause().await;
    }
    client.shows("account", &["all".into()], &json!({"total": 15})).await?;
    client.shows("invoice", &["A".into()], &json!({"next": 6})).await?;
    same("what is parked", &client.house.group("booked").parked(&client.tenant).await?, &vec![])?;
    invariants::check(&client.scope("booked")).await?;
    invariants::check(&client.scope("invoiced")).await
}
