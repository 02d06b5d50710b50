//! Rows that are deleted with the row they refer to.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse::infra::lease::Leases;
use statehouse::worker::StepContext;
use statehouse::{Code, system};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Store, SystemClock, Value};

use super::id;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Meanwhile, Paused, StoreProxy};
use crate::harness::recorder::{Actor, WORKER, on_behalf};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.member]
key = { id = "int" }

[entity.loan]
key = { id = "int" }
require_version = false
unique = { slot = ["room", "day"] }

[entity.loan.fields]
member = { type = "int?", ref = "member", on_delete = "cascade" }
room   = "text?"
day    = "int?"

[entity.fine]
key = { id = "int" }
fields = { loan = { type = "int?", ref = "loan", on_delete = "cascade" } }

[thread.comment]
parent = { post = "int" }
fields = { author = { type = "int?", ref = "member", on_delete = "cascade" } }

[entity.folder]
key = { id = "int" }
require_version = false
fields = { parent = { type = "int?", ref = "folder", on_delete = "cascade" } }
"#;

async fn open(namespace: &dyn TestNamespace) -> Result<TenantClient> {
    TenantClient::open(namespace, BLUEPRINT).await
}

/// Steps until what was noted is done. An index may be behind, so that a worker pauses before it looks again.
async fn drain(client: &TenantClient) -> Result<()> {
    for _ in 0..60 {
        client.drain_workers().await?;
        let mut notes = 0;
        for table in ["members_cascade", "loans_cascade", "folders_cascade"] {
            let scan = statehouse_store::Scan::all(client.table(table)?);
            notes += client.house.store().scan(&scan).await?.rows.len();
        }
        if notes == 0 {
            return Ok(());
        }
        client.house.clock().sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("the deletions do not come to an end")
}

impl TenantClient {
    async fn is_deleted(&self, resource: &str, key: &[Value]) -> Result<()> {
        self.refused(&format!("{resource}.read"), key, json!({}), None, Code::Deleted).await.map(drop)
    }

    /// A member with so many loans, which have the numbers from `first` on.
    async fn lend(&self, member: i64, first: i64, count: i64) -> Result<()> {
        self.create("member", member, json!({})).await?;
        for loan in first..first + count {
            self.create("loan", loan, json!({"member": member, "room": "red", "day": loan})).await?;
        }
        Ok(())
    }

    /// How many events of this name there are.
    async fn count_events(&self, name: &str) -> Result<usize> {
        let store = self.house.store();
        let mut count = 0;
        for partition in 0..store.partitions() {
            let mut after = 0;
            loop {
                let page = store.read_log(partition, after, 100).await?;
                let Some(last) = page.records.last() else { break };
                after = last.position.context("a record without a position")?.offset;
                let events = page.records.iter().flat_map(|record| &record.events);
                count += events.filter(|event| event.name == name).count();
            }
        }
        Ok(count)
    }
}

pub(super) async fn rows_are_deleted_with_the_row_they_refer_to(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.lend(1, 1, 5).await?;
    client.lend(2, 10, 2).await?;
    client.create("fine", 1, json!({"loan": 3})).await?;
    client.create("fine", 2, json!({"loan": 10})).await?;
    let child = json!({"post": 1, "comment_id": "x", "author": 1});
    client.done("comment.append", &[], child, None).await?;
    // One that no longer refers to the row stays.
    client.patch("loan", 5, json!({"member": 2})).await?;
    client.delete("member", 1).await?;
    client.is_deleted("member", &id(1)).await?;
    let refusal = client.not_restored("member", 1, Code::Held).await?;
    ensure!(refusal.message.contains("are being deleted"), "{refusal}");
    client.not_created("loan", 20, json!({"member": 1}), Code::MissingReference).await?;
    drain(&client).await?;
    for loan in 1..5 {
        client.is_deleted("loan", &id(loan)).await?;
    }
    client.is_deleted("fine", &id(1)).await?;
    for loan in [1, 99] {
        client.not_created("fine", 30, json!({"loan": loan}), Code::MissingReference).await?;
    }
    let comment = [Value::Int(1), "x".into()];
    client.is_deleted("comment", &comment).await?;
    for loan in [5, 10, 11] {
        client.shows("loan", &id(loan), &json!({"member": 2, "status": "ACTIVE"})).await?;
    }
    client.shows("fine", &id(2), &json!({"loan": 10})).await?;
    same("deleted loans in the log", &client.count_events("loan.deleted").await?, &4)?;
    same("deleted fines in the log", &client.count_events("fine.deleted").await?, &1)?;
    same("removed comments in the log", &client.count_events("comment.removed").await?, &1)?;
    // Their unique values are free, and references to them are not counted any more.
    client.create("loan", 21, json!({"room": "red", "day": 1})).await?;
    client.restore("member", 1).await?;
    client.restore("loan", 2).await?;
    client.not_restored("loan", 1, Code::NotUnique).await?;
    client.delete("member", 1).await?;
    drain(&client).await?;
    client.is_deleted("loan", &id(2)).await?;
    // A row that nothing refers to can be restored as soon as a worker has looked.
    client.restore("member", 1).await?;
    client.delete("member", 1).await?;
    drain(&client).await?;
    client.restore("member", 1).await.map(drop)
}

/// The worker dies between two pages, and answers get lost; another process goes on with what is stored.
pub(super) async fn deletions_go_on_after_a_crash(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let clock = Arc::new(SystemClock);
    let client = TenantClient::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    client.lend(1, 1, 9).await?;
    client.create("fine", 1, json!({"loan": 9})).await?;
    client.delete("member", 1).await?;
    // A page of two rows; then the process is gone.
    client.work(2).await?;
    client.not_restored("member", 1, Code::Held).await?;
    let faulty = Arc::new(FaultyStore::over(store, clock.clone(), Odds::default(), 5));
    let unlucky = TenantClient::over(faulty.clone(), BLUEPRINT, clock).await?;
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.3, unavailable: 0.1, ..Odds::default() });
    for _ in 0..6 {
        // Whatever it says: what is stored decides.
        drop(unlucky.work(2).await);
    }
    faulty.set_odds(Odds::default());
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_before + achieved.unknown_after > 0, "no answer was lost: {achieved}");
    drain(&unlucky).await?;
    for loan in 1..10 {
        client.is_deleted("loan", &id(loan)).await?;
    }
    client.is_deleted("fine", &id(1)).await?;
    same("deleted loans in the log", &client.count_events("loan.deleted").await?, &9)?;
    client.restore("member", 1).await?;
    client.restore("loan", 1).await.map(drop)
}

/// Rows that refer to each other in a tree, and in a circle.
pub(super) async fn deletions_of_a_circle_come_to_an_end(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.create("folder", 1, json!({})).await?;
    for folder in 2..8 {
        client.create("folder", folder, json!({"parent": folder / 2})).await?;
    }
    // A circle of three, and one that refers to itself.
    for folder in 10..13 {
        client.create("folder", folder, json!({})).await?;
    }
    for (folder, parent) in [(10, 11), (11, 12), (12, 10)] {
        client.patch("folder", folder, json!({"parent": parent})).await?;
    }
    client.create("folder", 20, json!({"parent": 20})).await?;
    client.delete("folder", 2).await?;
    client.delete("folder", 10).await?;
    client.delete("folder", 20).await?;
    drain(&client).await?;
    for folder in [2, 4, 5, 10, 11, 12, 20] {
        client.is_deleted("folder", &id(folder)).await?;
    }
    for folder in [1, 3, 6, 7] {
        client.shows("folder", &id(folder), &json!({"status": "ACTIVE"})).await?;
    }
    same("deleted folders in the log", &client.count_events("folder.deleted").await?, &7)
}

/// A worker is held up when it has found the deletion. Meanwhile another one finishes it, the row is restored, and other rows refer
/// to it again.
pub(super) async fn a_late_deletion_takes_nothing_along(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.lend(1, 1, 2).await?;
    client.delete("member", 1).await?;
    let other = client.clone();
    step_while(&client, async move {
        drain(&other).await?;
        other.restore("member", 1).await?;
        other.create("loan", 7, json!({"member": 1})).await.map(drop)
    })
    .await?;
    client.shows("loan", &id(7), &json!({"member": 1, "status": "ACTIVE", "version": 1})).await?;
    client.shows("member", &id(1), &json!({"status": "ACTIVE"})).await
}

/// Rows that refer elsewhere by the time at which the worker commits their deletion stay.
pub(super) async fn a_row_that_refers_elsewhere_meanwhile_stays(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    client.lend(1, 1, 4).await?;
    client.lend(2, 10, 1).await?;
    let comment = |name: &str| [Value::Int(1), name.into()];
    for name in ["x", "y"] {
        let child = json!({"post": 1, "comment_id": name, "author": 1});
        client.done("comment.append", &[], child, None).await?;
    }
    client.delete("member", 1).await?;
    let (loans, comments) = (Arc::new(Paused::default()), Arc::new(Paused::default()));
    let store: Arc<dyn Store> = Arc::new(StoreProxy::new(client.house.store().clone(), loans.clone()));
    let store: Arc<dyn Store> = Arc::new(StoreProxy::new(store, comments.clone()));
    let (moved, edited) = (Outcome::default(), Outcome::default());
    let other = client.clone();
    let move_loans = async move {
        for loan in 1..5 {
            other.patch("loan", loan, json!({"member": 2})).await?;
        }
        Ok(())
    };
    loans.before("loans", 1, moved.of(move_loans));
    let other = client.clone();
    let edit_comments = async move {
        for name in ["x", "y"] {
            other.done("comment.edit", &comment(name), json!({"author": 2}), Some(1)).await?;
        }
        Ok(())
    };
    comments.before("comments", 1, edited.of(edit_comments));
    step_over(&client, &store).await?;
    moved.get()?;
    edited.get()?;
    drain(&client).await?;
    for loan in 1..5 {
        client.shows("loan", &id(loan), &json!({"member": 2, "status": "ACTIVE"})).await?;
    }
    for name in ["x", "y"] {
        client.shows("comment", &comment(name), &json!({"author": 2, "status": "VISIBLE"})).await?;
    }
    client.is_deleted("member", &id(1)).await
}

/// What came of something that happens while a worker is paused.
#[derive(Clone, Default)]
struct Outcome(Arc<Mutex<Option<Result<()>>>>);

impl Outcome {
    fn of(
        &self,
        event: impl Future<Output = Result<()>> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let outcome = self.0.clone();
        async move {
            let result = event.await;
            *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        }
    }

    fn get(&self) -> Result<()> {
        let outcome = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        outcome.context("nothing has happened meanwhile")?
    }
}

/// A step of the worker of members, between whose reading and first commit others do something.
async fn step_while(
    client: &TenantClient,
    others: impl Future<Output = Result<()>> + Send + 'static,
) -> Result<()> {
    let (meanwhile, outcome) = (Arc::new(Meanwhile::default()), Outcome::default());
    meanwhile.next(outcome.of(others));
    let store: Arc<dyn Store> = Arc::new(StoreProxy::new(client.house.store().clone(), meanwhile));
    step_over(client, &store).await?;
    outcome.get()
}

/// A step of the worker of members over a store.
async fn step_over(client: &TenantClient, store: &Arc<dyn Store>) -> Result<()> {
    let store = on_behalf(store, Actor { archetype: "entity", name: format!("{WORKER}member.cascade") });
    let house = &client.house;
    let tenant = system::tenant().context("the house has no tenant")?;
    let leases = Leases::of(house.store().clone(), house.clock().clone(), system::leases()?, tenant);
    let key = ["drill".into(), "late".into()];
    let held = leases.acquire(&key, "drill", Duration::from_secs(60)).await?;
    let held = held.ok().context("the lease is taken")?;
    let worker = house.workers().iter().find(|worker| worker.name() == "member.cascade");
    let worker = worker.context("there is no such worker")?;
    for shard in 0..worker.shards() {
        let (clock, ids) = (house.clock(), house.ids());
        let (egress, wakeups) = (house.egress(), house.bells());
        let context = StepContext { store: &store, clock, ids, egress, wakeups, shard, held: &held };
        worker.step(&context, 10).await?;
    }
    Ok(())
}
