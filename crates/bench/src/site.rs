//! A house in a namespace of its own, and what benchmarks of archetypes do with it: call actions, many at once.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value as Json};
use statehouse::{Answer, Blueprint, Expected, House, Operation, Refusal, Request};
use statehouse_drills::engines::{self, TestNamespace};
use statehouse_store::{Migrate, Store, Tenant, Value};
use tokio::task::JoinSet;

/// The tenant of all rows.
const TENANT: &str = "acme";
/// Calls in flight while tables are filled.
const FILLING: usize = 256;

/// A store in an empty namespace of an engine. What is in it goes away with it.
pub struct Site {
    store: Arc<dyn Store>,
    tenant: Tenant,
    /// Takes the namespace away when it is dropped; `None` if the caller does so.
    _namespace: Option<Arc<dyn TestNamespace>>,
}

/// A house on a site.
#[derive(Clone)]
pub struct Tenancy {
    /// The house.
    pub house: Arc<House>,
    tenant: Tenant,
}

impl Site {
    /// A namespace at a store's URL, beside what is there.
    pub async fn at(url: &str) -> Result<Site> {
        let namespace = engines::at(url)?.namespace("bench")?;
        Ok(Site { store: namespace.open().await?, tenant: Tenant::new(TENANT)?, _namespace: Some(namespace) })
    }

    /// A store whose namespace the caller keeps.
    pub fn over(store: Arc<dyn Store>) -> Result<Site> {
        Ok(Site { store, tenant: Tenant::new(TENANT)?, _namespace: None })
    }

    /// A house with this blueprint. Several may stand on one site.
    pub async fn house(&self, blueprint: &str) -> Result<Tenancy> {
        self.changed_house(blueprint, |house| house).await
    }

    /// A house with this blueprint that is changed before it is used: it gets a handler or another outside.
    pub async fn changed_house(
        &self,
        blueprint: &str,
        change: impl FnOnce(House) -> House,
    ) -> Result<Tenancy> {
        let blueprint = Blueprint::read("statehouse.toml", blueprint)?;
        let house = change(House::over(self.store.clone(), &blueprint)?);
        house.migrate(Migrate::Apply).await?;
        Ok(Tenancy { house: Arc::new(house), tenant: self.tenant.clone() })
    }

    /// Closes the store, so that its namespace can go away.
    pub async fn close(self) {
        self.store.close().await;
    }
}

/// A request for an action.
pub fn request(action: &str, key: Vec<Value>, input: Json) -> Request {
    let input = match input {
        Json::Object(input) => input,
        _ => Map::new(),
    };
    Request { action: action.to_owned(), key, input, expected: None }
}

impl Tenancy {
    /// The tenant.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The same house for another tenant.
    pub fn of_tenant(&self, name: &str) -> Result<Tenancy> {
        Ok(Tenancy { house: self.house.clone(), tenant: Tenant::new(name)? })
    }

    /// Sends a request.
    pub async fn send(&self, request: Request) -> Result<Answer, Refusal> {
        self.house.call(&self.tenant, request, Operation::default()).await
    }

    /// Calls an action.
    pub async fn call(&self, action: &str, key: Vec<Value>, input: Json) -> Result<Answer, Refusal> {
        self.send(request(action, key, input)).await
    }

    /// Calls an action that wants to know which version was seen; any will do.
    pub async fn overwrite(&self, action: &str, key: Vec<Value>, input: Json) -> Result<Answer, Refusal> {
        let request = Request { expected: Some(Expected::Any), ..request(action, key, input) };
        self.house.call(&self.tenant, request, Operation::default()).await
    }

    /// Calls an action that gives a list.
    pub async fn list(&self, action: &str, key: Vec<Value>, input: Json) -> Result<Vec<Json>> {
        match self.call(action, key, input).await?.body {
            Json::Array(rows) => Ok(rows),
            other => bail!("the answer is no list: {other}"),
        }
    }

    /// Calls, many at once, each of one request or of several as one plan, until all are done.
    pub async fn fill(&self, batches: impl IntoIterator<Item = Vec<Request>>) -> Result<()> {
        let mut filling = JoinSet::new();
        for batch in batches {
            let site = self.clone();
            filling.spawn(async move {
                let filled = site.house.batch(&site.tenant, batch, Operation::default()).await;
                filled.map_err(|refusal| anyhow::anyhow!("call {:?}: {refusal}", refusal.call))
            });
            if filling.len() >= FILLING {
                filling.join_next().await.context("nothing is being filled")???;
            }
        }
        while let Some(filled) = filling.join_next().await {
            filled??;
        }
        Ok(())
    }
}
