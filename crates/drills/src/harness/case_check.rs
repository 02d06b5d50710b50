//! The invariants of what a case has left.
//!
//! While a case runs, the clients that it opens note their blueprint and their tenants here. When the case has succeeded, the checkers
//! of the archetypes look at each resource of the blueprint that was opened last. A case that changes rows past the actions, or that
//! leaves work of an interrupted process behind, says so with [`skip_invariants`].

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use statehouse::{Blueprint, House};
use statehouse_store::{Ids, Random, SystemClock, Tenant};

use crate::harness::engines::TestNamespace;
use crate::harness::invariants::CheckScope;
use crate::proof::Proof;

tokio::task_local! {
    static CASE: Mutex<CaseNotes>;
}

/// What a case has opened.
#[derive(Default)]
struct CaseNotes {
    blueprint: Option<String>,
    tenants: BTreeSet<Tenant>,
    is_skipped: bool,
}

fn note(change: impl FnOnce(&mut CaseNotes)) {
    // Drills, simulations and scenarios check by themselves, and have no notes.
    let _outside_of_a_case =
        CASE.try_with(|notes| change(&mut notes.lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Notes that a client was opened over a blueprint.
pub(crate) fn note_blueprint(text: &str) {
    note(|notes| notes.blueprint = Some(text.to_owned()));
}

/// Notes that a client works for a tenant.
pub(crate) fn note_tenant(tenant: &Tenant) {
    note(|notes| {
        notes.tenants.insert(tenant.clone());
    });
}

/// Leaves out the check behind the case that runs. The reason is for the reader.
pub(crate) fn skip_invariants(_reason: &'static str) {
    note(|notes| notes.is_skipped = true);
}

/// Runs a case, and then checks what it has left in its namespace.
pub(crate) async fn checked(
    namespace: &dyn TestNamespace,
    case: impl Future<Output = Result<()>>,
) -> Result<()> {
    let noted = async {
        case.await?;
        Ok(CASE.with(|notes| std::mem::take(&mut *notes.lock().unwrap_or_else(PoisonError::into_inner))))
    };
    let notes: Result<CaseNotes> = CASE.scope(Mutex::default(), noted).await;
    let CaseNotes { blueprint: Some(text), tenants, is_skipped: false } = notes? else { return Ok(()) };
    check(namespace, &text, &tenants).await.context("the case has succeeded, but what it has left is wrong")
}

async fn check(namespace: &dyn TestNamespace, text: &str, tenants: &BTreeSet<Tenant>) -> Result<()> {
    let (store, clock) = (namespace.open().await?, Arc::new(SystemClock));
    let ids = Ids::new(clock.clone(), Random::from_entropy());
    let blueprint = Blueprint::read("statehouse.toml", text)?;
    let house = House::with(store.clone(), &blueprint, clock, ids)?;
    for thing in &blueprint.things {
        let Some(check) = Proof::of(thing.keyword).and_then(|proof| proof.invariants) else { continue };
        for tenant in tenants {
            let scope = CheckScope { house: &house, store: store.clone(), tenant, resource: &thing.name };
            check(&scope).await.with_context(|| format!("{} of tenant {tenant}", thing.name))?;
        }
    }
    Ok(())
}
