//! A house in a namespace, and one tenant's calls of its actions.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse::egress::Egress;
use statehouse::infra::lease::Leases;
use statehouse::worker::{StepContext, StepProgress};
use statehouse::{Answer, Blueprint, Code, Expected, House, Operation, Refusal, Request, system};
use statehouse_store::{
    Clock, Commit, Ids, Migrate, Plan, Random, Store, StoreError, SystemClock, Table, Tenant, Value,
};

use tokio::task::JoinHandle;

use crate::harness::case_check;
use crate::harness::engines::TestNamespace;
use crate::harness::invariants::CheckScope;
use crate::harness::recorder::{Actor, WORKER, acting, on_behalf};
use crate::harness::store_client::{StoreClient, shown};

/// A tenant at work in a house. Clones share it.
#[derive(Clone)]
pub(crate) struct TenantClient {
    pub house: Arc<House>,
    pub tenant: Tenant,
}

/// The key of a call: nothing for an action on the collection.
pub(crate) type RowKey<'k> = &'k [Value];

impl TenantClient {
    /// Opens a namespace, puts the blueprint's house over it, and works there for the tenant `acme`.
    pub async fn open(namespace: &dyn TestNamespace, blueprint: &str) -> Result<TenantClient> {
        TenantClient::over(namespace.open().await?, blueprint, Arc::new(SystemClock)).await
    }

    /// The same with a clock that the store and the house share.
    pub async fn open_at(
        namespace: &dyn TestNamespace,
        blueprint: &str,
        clock: Arc<dyn Clock>,
    ) -> Result<TenantClient> {
        TenantClient::over(namespace.open_at(clock.clone()).await?, blueprint, clock).await
    }

    pub async fn over(store: Arc<dyn Store>, blueprint: &str, clock: Arc<dyn Clock>) -> Result<TenantClient> {
        TenantClient::before(store, blueprint, clock, Egress::default()).await
    }

    /// The same with ids that follow from a seed.
    pub async fn seeded(
        store: Arc<dyn Store>,
        blueprint: &str,
        clock: Arc<dyn Clock>,
        seed: u64,
    ) -> Result<TenantClient> {
        case_check::note_blueprint(blueprint);
        let blueprint = Blueprint::read("statehouse.toml", blueprint)?;
        let ids = Ids::new(clock.clone(), Random::seeded(seed));
        TenantClient::enter(House::with(store, &blueprint, clock, ids)?).await
    }

    /// The same with an outside of its own.
    pub async fn before(
        store: Arc<dyn Store>,
        blueprint: &str,
        clock: Arc<dyn Clock>,
        egress: Egress,
    ) -> Result<TenantClient> {
        case_check::note_blueprint(blueprint);
        let blueprint = Blueprint::read("statehouse.toml", blueprint)?;
        let ids = Ids::new(clock.clone(), Random::from_entropy());
        TenantClient::enter(House::with(store, &blueprint, clock, ids)?.with_egress(egress)).await
    }

    /// Makes the store fit a house, and works there for the tenant `acme`.
    pub async fn enter(house: House) -> Result<TenantClient> {
        house.migrate(Migrate::Apply).await.context("migrating to the house's tables")?;
        TenantClient::of(Arc::new(house))
    }

    /// Works in a house whose tables are there, for the tenant `acme`.
    pub fn of(house: Arc<House>) -> Result<TenantClient> {
        let tenant = Tenant::new("acme")?;
        case_check::note_tenant(&tenant);
        Ok(TenantClient { house, tenant })
    }

    /// The same house, for another tenant.
    pub fn for_tenant(&self, tenant: &str) -> Result<TenantClient> {
        let tenant = Tenant::new(tenant)?;
        case_check::note_tenant(&tenant);
        Ok(TenantClient { tenant, ..self.clone() })
    }

    /// The store below, as this tenant's client.
    pub fn store_client(&self) -> Result<StoreClient> {
        StoreClient::of(self.house.store().clone(), self.tenant.as_str())
    }

    /// What a checker of invariants looks at for this tenant.
    pub fn scope<'a>(&'a self, resource: &'a str) -> CheckScope<'a> {
        CheckScope { house: &self.house, store: self.house.store().clone(), tenant: &self.tenant, resource }
    }

    /// A table of the house.
    pub fn table(&self, name: &str) -> Result<&Arc<Table>> {
        self.house.schema().table(name).with_context(|| format!("the house has no table {name}"))
    }

    /// A request for an action.
    pub fn request(action: &str, key: RowKey<'_>, input: &Json, expected: Option<Expected>) -> Request {
        let input = input.as_object().cloned().unwrap_or_default();
        Request { action: action.to_owned(), key: key.to_vec(), input, expected }
    }

    /// Calls an action; under a version if one is given.
    pub async fn call(
        &self,
        action: &str,
        key: RowKey<'_>,
        input: Json,
        version: Option<i64>,
    ) -> Result<Answer, Refusal> {
        let request = TenantClient::request(action, key, &input, version.map(Expected::Version));
        self.ask(request, Operation::default()).await
    }

    /// Calls an action, on its own behalf.
    async fn ask(&self, request: Request, operation: Operation) -> Result<Answer, Refusal> {
        let (resource, _) = self.house.action(&request.action)?;
        let actor = Actor { archetype: resource.archetype.keyword(), name: request.action.clone() };
        acting(actor, self.house.call(&self.tenant, request, operation)).await
    }

    /// Calls an action in a task of its own.
    pub fn start(
        &self,
        action: &str,
        key: RowKey<'_>,
        input: Json,
        version: Option<i64>,
    ) -> JoinHandle<Result<Answer, Refusal>> {
        let (client, action, key) = (self.clone(), action.to_owned(), key.to_vec());
        tokio::spawn(async move { client.call(&action, &key, input, version).await })
    }

    /// Calls an action under an operation id.
    pub async fn call_as(
        &self,
        operation: &str,
        action: &str,
        key: RowKey<'_>,
        input: Json,
        version: Option<i64>,
    ) -> Result<Answer, Refusal> {
        let request = TenantClient::request(action, key, &input, version.map(Expected::Version));
        let operation = Operation::under(operation, &request);
        self.ask(request, operation).await
    }

    /// Calls an action that must be done.
    pub async fn done(
        &self,
        action: &str,
        key: RowKey<'_>,
        input: Json,
        version: Option<i64>,
    ) -> Result<Answer> {
        let what = format!("{action} {key:?} {input} at {version:?}");
        self.call(action, key, input, version).await.map_err(|refusal| anyhow!("{what}: {refusal}"))
    }

    /// Calls an action that must be refused with this code.
    pub async fn refused(
        &self,
        action: &str,
        key: RowKey<'_>,
        input: Json,
        version: Option<i64>,
        code: Code,
    ) -> Result<Refusal> {
        let what = format!("{action} {key:?} {input} at {version:?}");
        match self.call(action, key, input, version).await {
            Err(refusal) if refusal.code == code => Ok(refusal),
            other => bail!("{what}: expected the refusal {code}, got {other:?}"),
        }
    }

    /// The plan that a call would commit now: for a caller that is paused between drafting and committing.
    pub async fn drafted(
        &self,
        action: &str,
        key: RowKey<'_>,
        input: Json,
        expected: Option<Expected>,
    ) -> Result<Plan> {
        let request = TenantClient::request(action, key, &input, expected);
        let plan = self.house.plan(&self.tenant, request).await?;
        plan.with_context(|| format!("{action} {key:?} {input} has nothing to write"))
    }

    /// Requires that a plan which was drafted before comes too late.
    pub async fn too_late(&self, plan: &Plan) -> Result<()> {
        match self.house.store().commit(plan).await? {
            Commit::Refused(_) => Ok(()),
            other => bail!("expected {} to be refused, got {other:?}", shown(plan)),
        }
    }

    /// One step of every shard of every worker of the house.
    pub async fn work(&self, limit: usize) -> Result<Vec<StepProgress>, StoreError> {
        Ok(self.work_by_name(limit).await?.into_iter().map(|(_, progress)| progress).collect())
    }

    /// The same, each step with the name of its worker.
    async fn work_by_name(&self, limit: usize) -> Result<Vec<(String, StepProgress)>, StoreError> {
        self.work_where(limit, |_| true).await
    }

    /// The same for some workers, by name.
    async fn work_where(
        &self,
        limit: usize,
        is_run: impl Fn(&str) -> bool,
    ) -> Result<Vec<(String, StepProgress)>, StoreError> {
        let house = &self.house;
        let missing = || StoreError::schema("the house", "it has no place for leases");
        let (Some(tenant), Ok(table)) = (system::tenant(), system::leases()) else { return Err(missing()) };
        let leases = Leases::of(house.store().clone(), house.clock().clone(), table, tenant);
        let key = ["drill".into(), house.ids().next().into()];
        let held = match leases.acquire(&key, "drill", Duration::from_secs(60)).await? {
            Ok(held) => held,
            Err(lease) => return Err(StoreError::unavailable(format!("{lease:?} is taken"))),
        };
        let mut progress = Vec::new();
        for worker in house.workers().iter().filter(|worker| is_run(worker.name())) {
            // A worker is called after its resource; those of the house itself are unattributed.
            let owner = worker.name().split('.').next().and_then(|name| house.resource(name).ok());
            let name = format!("{WORKER}{}", worker.name());
            let store = match owner {
                Some(owner) => on_behalf(house.store(), Actor { archetype: owner.archetype.keyword(), name }),
                None => house.store().clone(),
            };
            for shard in 0..worker.shards() {
                let (clock, ids) = (house.clock(), house.ids());
                let (egress, wakeups) = (house.egress(), house.bells());
                let context = StepContext { store: &store, clock, ids, egress, wakeups, shard, held: &held };
                progress.push((worker.name().to_owned(), worker.step(&context, limit).await?));
            }
        }
        Ok(progress)
    }

    /// Steps until nothing is left to do, and returns how many rows were done. Indexes may lag, so nothing has to be seen
    /// several times.
    pub async fn drain_workers(&self) -> Result<usize> {
        self.drain_workers_where(|_| true).await
    }

    /// The same, counting only the rows of the workers of this resource. Workers of other resources, for example those of a
    /// view over it, process rows of their own.
    pub async fn drain_workers_of(&self, resource: &str) -> Result<usize> {
        self.drain_workers_where(|worker| worker.split('.').next() == Some(resource)).await
    }

    /// Steps only the workers of this resource until nothing is left to do, and returns how many rows were done: what other
    /// resources have to do stays as it is.
    pub async fn work_of(&self, resource: &str) -> Result<usize> {
        let is_run = |worker: &str| worker.split('.').next() == Some(resource);
        let (mut rows, mut quiet) = (0, 0);
        while quiet < 3 {
            let done: usize = self.work_where(7, is_run).await?.iter().map(|(_, step)| step.rows).sum();
            rows += done;
            quiet = if done == 0 { quiet + 1 } else { 0 };
        }
        Ok(rows)
    }

    async fn drain_workers_where(&self, is_counted: impl Fn(&str) -> bool) -> Result<usize> {
        let (mut rows, mut quiet) = (0, 0);
        while quiet < 3 {
            let steps = self.work_by_name(7).await?;
            rows +=
                steps.iter().filter(|(name, _)| is_counted(name)).map(|(_, step)| step.rows).sum::<usize>();
            let idle = steps.iter().all(|(_, step)| step.rows == 0);
            quiet = if idle { quiet + 1 } else { 0 };
        }
        Ok(rows)
    }

    /// The name of the event of each record, once there are exactly so many.
    pub async fn events(&self, count: usize) -> Result<Vec<String>> {
        let records = self.store_client()?.exact_log(count).await?;
        Ok(records.into_iter().map(|record| record.events[0].name.clone()).collect())
    }

    /// What a strong read shows of a row under these names.
    pub async fn shown(&self, resource: &str, key: RowKey<'_>, names: &[&str]) -> Result<Vec<Json>> {
        let row = self.done(&format!("{resource}.read"), key, json!({}), None).await?;
        Ok(names.iter().map(|name| row.body[*name].clone()).collect())
    }

    /// Requires a strong read to show this.
    pub async fn shows(&self, resource: &str, key: RowKey<'_>, expected: &Json) -> Result<()> {
        let row = self.done(&format!("{resource}.read"), key, json!({}), None).await?;
        shows(&row, expected)
    }
}

/// Requires an answer to have these fields.
pub(crate) fn shows(answer: &Answer, expected: &Json) -> Result<()> {
    for (name, value) in expected.as_object().into_iter().flatten() {
        let got = &answer.body[name];
        ensure!(got == value, "expected {name} to be {value}, got {got} in {}", answer.body);
    }
    Ok(())
}
