//! The audit, and who wrote what: rows in the plans that they tell of, each once, kept for their own time; and the actor with each
//! event of the log.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::audit::{
    AuditActor, AuditEntry, AuditFilter, AuditOutcome, AuditRow, begin, commit, list, record,
};
use statehouse::infra::effect::{SecretChange, keep_secret};
use statehouse::secret_keys::{CONTENT, SecretKeys, reencrypt};
use statehouse::{Blueprint, House, Operation, Principal, system};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{
    Address, Consistency, Guard, Ids, ManualClock, Random, Record, Step, Store, StoreError, Tenant, Time,
};

use super::audit;
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::TenantClient;

pub(super) const CASES: &[Case] = cases! {
    audit {
        a_change_is_recorded_in_its_own_plan(9),
        a_lost_answer_is_recorded_once(9),
        audit_rows_are_read_by_time(9),
        audit_rows_are_deleted_after_their_own_time(9),
        what_operators_do_is_recorded(9),
        each_event_says_who_wrote_it(9),
    }
};

const BLUEPRINT: &str = r#"
[entity.note]
key    = { id = "int" }
fields = { body = "text?", author = { type = "text?", unique = true } }
require_version = false

[view.note_count]
of    = "note"
count = true
"#;

async fn client(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    TenantClient::open(namespace, BLUEPRINT).await
}

fn ann() -> AuditActor {
    AuditActor::command("ann")
}

/// All audit rows, the oldest first.
async fn rows(store: &dyn Store) -> Result<Vec<AuditRow>> {
    let filter = AuditFilter { oldest_first: true, ..AuditFilter::default() };
    Ok(list(store, &filter, 1_000, None).await?.rows)
}

/// What is stored of a secret, without encryption.
async fn secret(store: &dyn Store, name: &str) -> Result<Option<Vec<u8>>> {
    let tenant = system::tenant().context("no tenant")?;
    let address = Address::new(&system::secrets()?, &tenant, [format!("effect/{name}").into()])?;
    let row = store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
    Ok(row.map(|row| row.get_bytes(CONTENT).map(<[u8]>::to_vec)).transpose()?)
}

/// A plan that is refused leaves no audit row, and one that is applied leaves what it tells.
async fn a_change_is_recorded_in_its_own_plan(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the view is not built");
    let client = client(namespace).await?;
    let (store, ids) = (client.house.store(), client.house.ids());
    let at = client.house.clock().now();
    let entry = AuditEntry::of(&ann().at(Some([10, 0, 0, 7].into())), "key.revoke", "0123").tenant("acme");
    let impossible = Step::update(&system::keys()?, ["0123".into()]).guard(Guard::version(1));
    let plan = begin(&entry, at, &ids.next())?.step(impossible).build()?;
    let refused = commit(&**store, &plan).await?.context("a key that is not there was changed")?;
    same("the refused step", &refused.step, &1)?;
    same("rows of a plan that was refused", &rows(&**store).await?, &Vec::new())?;
    let operation = ids.next();
    let change = SecretChange { by: &ann(), at, operation: &operation };
    let plan = keep_secret(&SecretKeys::default(), "psp", "s3cret-value", change)?;
    same("what refused it", &commit(&**store, &plan).await?, &None)?;
    same("the secret", &secret(&**store, "psp").await?, &Some(b"s3cret-value".to_vec()))?;
    let all = rows(&**store).await?;
    let [row] = all.as_slice() else { anyhow::bail!("there is not one row") };
    same("the action", &(row.action.as_str(), row.outcome.as_str()), &("secret.set", "done"))?;
    same("who", &(row.actor.as_deref(), row.credential.as_str()), &(Some("ann"), "command:ann"))?;
    same("what", &(row.target.as_deref(), &row.id), &(Some("house:psp"), &operation))?;
    ensure!(!format!("{row:?}").contains("s3cret"), "the audit tells a secret: {row:?}");
    Ok(())
}

/// A caller that loses the answer commits the same plan again: the change and its row are there once.
async fn a_lost_answer_is_recorded_once(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the view is not built");
    let client = client(namespace).await?;
    let sound = client.house.store().clone();
    let lossy = Odds { unknown_after: 0.6, ..Odds::default() };
    let faulty = FaultyStore::over(sound.clone(), client.house.clock().clone(), lossy, 7);
    let (mut known, mut unknown) = (0, 0);
    for number in 0..24 {
        let (by, operation) = (ann(), client.house.ids().next());
        let change = SecretChange { by: &by, at: client.house.clock().now(), operation: &operation };
        let plan = keep_secret(&SecretKeys::default(), &format!("s{number}"), "x", change)?;
        match commit(&faulty, &plan).await {
            Ok(refused) => {
                same("what refused it", &refused, &None)?;
                known += 1;
            }
            Err(error) => {
                ensure!(matches!(error, StoreError::OutcomeUnknown { .. }), "{error}");
                unknown += 1;
            }
        }
    }
    ensure!(known > 0 && faulty.achieved().unknown_after > 0, "no answer was lost: {known} {unknown}");
    let mut targets: Vec<String> = rows(&*sound).await?.into_iter().filter_map(|row| row.target).collect();
    same("rows", &targets.len(), &24)?;
    targets.sort();
    targets.dedup();
    same("different targets", &targets.len(), &24)?;
    // A repetition that comes late changes nothing: it does not put an old secret in the place of a newer one.
    let (by, at) = (ann(), client.house.clock().now());
    let keep = |value: &str, operation: &str| {
        keep_secret(&SecretKeys::default(), "psp", value, SecretChange { by: &by, at, operation })
    };
    let (old, new) = (keep("old", "op 1")?, keep("new", "op 2")?);
    for plan in [&old, &new, &old] {
        same("what refused it", &commit(&*sound, plan).await?, &None)?;
    }
    same("the secret", &secret(&*sound, "psp").await?, &Some(b"new".to_vec()))?;
    same("rows", &rows(&*sound).await?.len(), &26)
}

async fn audit_rows_are_read_by_time(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the view is not built");
    let client = client(namespace).await?;
    let store = &**client.house.store();
    let at = |number: i64| Time::from_micros(1_700_000_000_000_000 + number * 1_000_000);
    for number in 0..6 {
        let action = if number % 2 == 0 { "key.create" } else { "login" };
        let entry = AuditEntry::of(&ann(), action, &number.to_string()).tenant(["acme", "other"][number % 2]);
        let entry = entry.outcome(AuditOutcome::Rejected).times(3).detail("why");
        record(store, &[entry], at(number as i64), &format!("id {number}")).await?;
    }
    let read = async |filter: AuditFilter, limit: usize| {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = list(store, &filter, limit, after).await?;
            found.extend(page.rows.into_iter().filter_map(|row| row.target));
            after = page.next;
            if after.is_none() {
                return anyhow::Ok(found.join(" "));
            }
        }
    };
    let all = AuditFilter::default();
    same("the newest first", &read(all.clone(), 2).await?.as_str(), &"5 4 3 2 1 0")?;
    let oldest = AuditFilter { oldest_first: true, ..all.clone() };
    same("the oldest first", &read(oldest.clone(), 4).await?.as_str(), &"0 1 2 3 4 5")?;
    let part = AuditFilter { from: Some(at(1)), to: Some(at(4)), ..oldest };
    same("a part", &read(part, 100).await?.as_str(), &"1 2 3")?;
    let action = |action: &str| AuditFilter { action: Some(action.into()), ..AuditFilter::default() };
    same("a group of actions", &read(action("key."), 100).await?.as_str(), &"4 2 0")?;
    same("an action", &read(action("login"), 1).await?.as_str(), &"5 3 1")?;
    same("no such action", &read(action("log"), 100).await?.as_str(), &"")?;
    let tenant = AuditFilter { tenant: Some("acme".into()), ..all };
    same("of a tenant", &read(tenant, 100).await?.as_str(), &"4 2 0")?;
    // The same rows under the same id are written once.
    let entry = AuditEntry::of(&ann(), "login", "again");
    for _ in 0..2 {
        record(store, std::slice::from_ref(&entry), at(9), "id 9").await?;
    }
    same("after a repetition", &rows(store).await?.len(), &7)
}

async fn audit_rows_are_deleted_after_their_own_time(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = ManualClock::at(Time::from_micros(1_700_000_000_000_000));
    let shared = Arc::new(clock.clone());
    let store = namespace.open_at(shared.clone()).await?;
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
    let ids = Ids::new(shared.clone(), Random::seeded(1));
    let house = House::with(store.clone(), &blueprint, shared, ids)?;
    let client = TenantClient::enter(house.with_audit_retention(Duration::from_secs(3_600))).await?;
    let start = client.house.clock().now();
    for number in 0..20_u64 {
        let at = start.plus(Duration::from_secs(60 * number));
        let entry = AuditEntry::of(&ann(), "login", &number.to_string());
        record(&*store, &[entry], at, &format!("id {number}")).await?;
    }
    client.drain_workers().await?;
    same("before their time", &rows(&*store).await?.len(), &20)?;
    // Ten of them are older than an hour, the eleventh is exactly so old.
    clock.advance(Duration::from_secs(3_600 + 60 * 10));
    let deleted = client.drain_workers_of("audit").await?;
    same("deleted", &deleted, &10)?;
    let left: Vec<Option<String>> = rows(&*store).await?.into_iter().map(|row| row.target).collect();
    same("the oldest that is left", &left.first(), &Some(&Some("10".to_owned())))?;
    same("left", &left.len(), &10)
}

async fn what_operators_do_is_recorded(namespace: &dyn TestNamespace) -> Result<()> {
    let client = client(namespace).await?;
    let store = client.house.store().clone();
    client.drain_workers().await?;
    let projection = || {
        let found = client.house.projections().into_iter().next();
        found.map(|one| one.on_behalf_of(&ann(), client.house.ids())).context("there is no projection")
    };
    ensure!(!projection()?.roll_back().await?, "there is nothing to go back to");
    same("what was not done", &rows(&*store).await?.len(), &0)?;
    ensure!(projection()?.rebuild().await?, "no build could be begun");
    ensure!(!projection()?.rebuild().await?, "two builds were begun");
    client.drain_workers().await?;
    ensure!(projection()?.roll_back().await?, "there is something to go back to");
    ensure!(projection()?.drop_previous().await?, "there is something to drop");
    // Programs that do it on their own behalf are not recorded.
    client.drain_workers().await?;
    let by = ann();
    let change = SecretChange { by: &by, at: client.house.clock().now(), operation: "set" };
    let plan = keep_secret(&SecretKeys::default(), "psp", "x", change)?;
    same("what refused it", &commit(&*store, &plan).await?, &None)?;
    let keys = SecretKeys::parse(&SecretKeys::generate()?)?;
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
    let with_key = House::over(store.clone(), &blueprint)?.with_secret_keys(keys);
    same("encrypted", &reencrypt(&with_key, &by).await?.changed, &1)?;
    same("again", &reencrypt(&with_key, &by).await?.changed, &0)?;
    let actions: Vec<String> = rows(&*store).await?.into_iter().map(|row| row.action).collect();
    let expected =
        ["projection.rebuild", "projection.rollback", "projection.drop", "secret.set", "secret.reencrypt"];
    same("actions", &actions, &expected.map(str::to_owned).to_vec())
}

/// The actors of a record's events.
fn actors(of: &Record) -> Vec<Option<&str>> {
    of.events.iter().map(|event| event.actor.as_deref()).collect()
}

async fn each_event_says_who_wrote_it(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the view is not built");
    let client = client(namespace).await?;
    let house = &client.house;
    let tenant = Tenant::new("acme")?;
    let caller = |actor: &str| Principal { actor: Some(actor.into()), ..Principal::from(&tenant) };
    let request = |action: &str, key: &[i64], input: Json| {
        let key: Vec<_> = key.iter().map(|key| (*key).into()).collect();
        TenantClient::request(action, &key, &input, None)
    };
    let create = request("note.create", &[], json!({"id": 1, "author": "a"}));
    let operation = || Operation::under("op-1", &create);
    let first = house.call(caller("key:1"), create.clone(), operation()).await?;
    // A repetition by another credential gets the same answer, and the record tells of the first.
    let again = house.call(caller("key:2"), create.clone(), operation()).await?;
    same("the repeated answer", &again, &first)?;
    ensure!(!first.body.to_string().contains("key:1"), "the answer tells the actor: {}", first.body);
    let patch = request("note.patch", &[1], json!({"body": "b"}));
    house.call(caller("token:ä\"1"), patch, Operation::default()).await?;
    // Several subjects, in several partitions of the log.
    let batch = (2..6).map(|id| request("note.create", &[], json!({"id": id}))).collect();
    house.batch(caller("key:3"), batch, Operation::under("op-2", &create)).await?;
    house.call(caller("key:4"), request("note.delete", &[5], json!({})), Operation::default()).await?;
    // A program's own call names none.
    house.call(&tenant, request("note.patch", &[2], json!({"body": "c"})), Operation::default()).await?;
    let mut told: Vec<String> = Vec::new();
    // Engines that number records after their commit show them some moments later.
    for _ in 0..1_000 {
        let events = whole_log(&**house.store()).await?.into_iter().flat_map(|record| record.events);
        told = events.map(|event| event.actor.unwrap_or_else(|| "none".to_owned())).collect();
        if told.len() >= 8 {
            break;
        }
        pause().await;
    }
    told.sort();
    let mut expected = vec!["key:1", "key:4", "none", "token:ä\"1"];
    expected.extend(["key:3"; 4]);
    expected.sort_unstable();
    same("the actors in the log", &told, &expected.into_iter().map(str::to_owned).collect())?;
    let found = house.store().find_operation(&tenant, "op-2").await?.context("no record")?;
    same("the actors of the batch", &actors(&found), &vec![Some("key:3"); 4])
}
