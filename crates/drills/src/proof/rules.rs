//! Rules for end users under races, for every archetype whose actions name one row.
//!
//! Each specimen gets a rule for each action: `row.version <= claims.version`. A row of any archetype has a version, and any other
//! write makes the rule fail. The caller holds a claim that fits the row as it is and as its own write leaves it. Then the row is
//! written twice between the last read of the action and its commit: the write must be refused, and the row must be as the
//! others left it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse::action::{Action, ActionHandler, RouteKind, WAIT};
use statehouse::allow::Principal;
use statehouse::archetypes::ARCHETYPES;
use statehouse::{Answer, Blueprint, Code, Expected, Operation, Refusal, Resource, resource};
use statehouse_store::{Address, Consistency, Row, Scan, Step, SystemClock, Value};

use super::rules;
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::sample_inputs;
use crate::harness::store_client::scan;
use crate::harness::tenant_client::TenantClient;

pub(crate) const CASES: &[Case] = cases! {
    rules {
        a_rule_holds_for_the_row_that_is_written_of_every_archetype(12),
    }
};

/// The archetypes of which at least one action must have been raced.
const RACED: [&str; 6] = ["booking", "entity", "lease", "relation", "thread", "timer"];

/// Whether an action names the one row that it writes.
fn names_row(resource: &Resource, action: &Action) -> bool {
    let is_item = action.route.kind != RouteKind::Collection;
    matches!(action.handler, ActionHandler::Write(_)) && is_item && resource.row_def().is_some()
}

/// The specimens of all archetypes, each thing with rules.
fn governed_specimens() -> Result<String> {
    let mut text: String = ARCHETYPES
        .iter()
        .filter(|archetype| archetype.is_declarable())
        .map(|archetype| archetype.specimen)
        .collect();
    let blueprint = Blueprint::read("specimens", &text)?;
    let resources = resource::declare(&blueprint)?;
    for thing in &blueprint.things {
        let below = format!("{}_", thing.name);
        let first = resources.iter().find(|one| one.name == thing.name);
        // `thing_created` is no resource of `thing`: it is of another archetype.
        let is_own = |one: &&Resource| {
            let archetype = one.archetype.keyword();
            let is_named = one.name == thing.name || one.name.starts_with(&below);
            is_named && first.is_none_or(|first| first.archetype.keyword() == archetype)
        };
        let own: Vec<&Resource> = resources.iter().filter(is_own).collect();
        if !own.iter().any(|one| one.actions.iter().any(|action| names_row(one, action))) {
            continue;
        }
        let keyword = own.first().context("a thing without a resource")?.archetype.keyword();
        writeln!(text, "\n[{keyword}.{}.allow]", thing.name)?;
        for resource in own {
            writeln!(text, "\"{}.read\" = \"true\"", resource.name)?;
            for action in resource.actions.iter().filter(|action| action.is_write()) {
                let rule = if names_row(resource, action) { "row.version <= claims.version" } else { "true" };
                writeln!(text, "\"{}.{}\" = \"{rule}\"", resource.name, action.name)?;
            }
        }
    }
    Ok(text)
}

/// One tenant's row that an action is about to write.
struct RuleRace<'a> {
    client: TenantClient,
    resource: &'a Resource,
    action: &'a Action,
    key: Vec<Value>,
    version: i64,
}

impl<'a> RuleRace<'a> {
    /// Brings a row into a state in which the action can be done; `None` if there is no row then.
    async fn prepare(
        client: TenantClient,
        resource: &'a Resource,
        action: &'a Action,
    ) -> Result<Option<RuleRace<'a>>> {
        let house = client.house.clone();
        for name in action.after.iter().filter(|name| *name != WAIT) {
            let (of, before) = house.action(name)?;
            let request = sample_inputs::request(house.resources(), of, before, 2);
            // Sample inputs do not lead everywhere.
            if house.call(&client.tenant, request, Operation::default()).await.is_err() {
                return Ok(None);
            }
        }
        let mut race =
            RuleRace { client, resource, action, key: sample_inputs::key(resource, 1), version: 0 };
        // Actions that choose a row do not choose the same one on every engine.
        let table = resource.tables.first().context("a resource without a table")?;
        let rows = scan(house.store().as_ref(), Scan::of(table, &race.client.tenant)).await?;
        // The one that they have written has the highest version.
        let own = race.row().await?.filter(|own| rows.iter().all(|row| row.version() <= own.version()));
        let row = own.or_else(|| rows.into_iter().max_by_key(Row::version));
        let Some(row) = row else { return Ok(None) };
        race.key = row.key().to_vec();
        race.version = row.version();
        Ok(Some(race))
    }

    async fn row(&self) -> Result<Option<Row>> {
        let table = self.resource.tables.first().context("a resource without a table")?;
        let address = Address::new(table, &self.client.tenant, self.key.iter().cloned())?;
        let rows = self.client.house.store().get(&[address], Consistency::Strong).await?;
        Ok(rows.into_iter().next().flatten())
    }

    /// Calls the action, as a caller whose claims name a version.
    async fn call(&self, through: &TenantClient, version: i64) -> Result<Result<Answer, Refusal>> {
        let house = &through.house;
        let mut request = sample_inputs::request(house.resources(), self.resource, self.action, 2);
        request.key.clone_from(&self.key);
        request.expected = request.expected.map(|_| Expected::Any);
        let row = self.row().await?.context("the row is gone")?;
        for (name, value) in &mut request.input {
            if let Some(stored) = row.get(name).filter(|stored| !stored.is_null()) {
                *value = stored.to_json();
            }
        }
        let claims = json!({ "version": version });
        let claims = claims.as_object().cloned().map(Arc::new);
        let caller = Principal { tenant: self.client.tenant.clone(), claims, actor: None };
        Ok(house.call(&caller, request, Operation::default()).await)
    }

    /// A write of the row by others that changes nothing but its version.
    fn touch(&self, row: &Row) -> Result<Step> {
        let table = self.resource.tables.first().context("a resource without a table")?;
        let column = table.columns().get(table.key_len());
        let column = column.with_context(|| format!("{table} has key columns only"))?;
        let value = row.get(&column.name).cloned().unwrap_or(Value::Null);
        Ok(Step::update(table, self.key.clone()).set(&column.name, value))
    }

    /// What happens if the row is written twice before the commit of the action.
    async fn run(&self, slow: &TenantClient, paused: &Paused) -> Result<()> {
        let before = self.row().await?.context("the row is gone")?;
        let (others, touch) = (self.client.store_client()?, self.touch(&before)?);
        let table = self.resource.tables.first().context("a resource without a table")?;
        paused.before(table.name(), 1, async move {
            for _ in 0..2 {
                // If this fails, the version below is another than expected.
                let _ = others.apply(others.one(touch.clone())).await;
            }
        });
        let outcome = self.call(slow, self.version + 1).await?;
        let what = format!("{}.{}", self.resource.name, self.action.name);
        ensure!(paused.is_over(), "{what} committed nothing");
        let code = outcome.as_ref().err().map(|refusal| refusal.code);
        ensure!(
            matches!(code, Some(Code::Forbidden | Code::NotFound)),
            "{what}, after the rule stopped to hold: {outcome:?}"
        );
        let after = self.row().await?.context("the row is gone")?;
        ensure!(after.version() == before.version() + 2, "{what} was refused and wrote: {after:?}");
        ensure!(after.values() == before.values(), "{what} was refused and changed {before:?} to {after:?}");
        Ok(())
    }
}

async fn a_rule_holds_for_the_row_that_is_written_of_every_archetype(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let text = governed_specimens()?;
    let store = namespace.open().await?;
    let paused = Arc::new(Paused::default());
    let slow_store = Arc::new(StoreProxy::new(store.clone(), paused.clone()));
    let client = TenantClient::over(store, &text, Arc::new(SystemClock)).await?;
    let slow = TenantClient::over(slow_store, &text, Arc::new(SystemClock)).await?;
    let mut raced: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut tenants = 0;
    let mut tenant = || {
        tenants += 1;
        client.for_tenant(&format!("tenant{tenants}"))
    };
    let resources: Vec<Resource> = client.house.resources().to_vec();
    for resource in &resources {
        for action in resource.actions.iter().filter(|action| names_row(resource, action)) {
            let name = format!("{}.{}", resource.name, action.name);
            // Without a race: the claim decides.
            let Some(control) = RuleRace::prepare(tenant()?, resource, action).await? else { continue };
            let early = control.call(&control.client, control.version - 1).await?;
            let code = early.as_ref().err().map(|refusal| refusal.code);
            ensure!(
                matches!(code, Some(Code::Forbidden | Code::NotFound)),
                "{name} without the claim: {early:?}"
            );
            let done = control.call(&control.client, control.version + 1).await?;
            let changed = control.row().await?.is_none_or(|row| row.version() != control.version);
            if done.is_err() || !changed {
                // Sample inputs do not lead everywhere, and a check writes nothing.
                continue;
            }
            let race =
                RuleRace::prepare(tenant()?, resource, action).await?.context("no row the second time")?;
            let slow = TenantClient { tenant: race.client.tenant.clone(), ..slow.clone() };
            race.run(&slow, &paused).await?;
            raced.entry(resource.archetype.keyword()).or_default().insert(name);
        }
    }
    for keyword in RACED {
        ensure!(raced.contains_key(keyword), "no action of {keyword} was raced: {raced:?}");
    }
    Ok(())
}
