//! Effects that belong to another archetype: it reads their settings within its own, sends them in its own plans, settles them,
//! and decides what callers may do with them.

use std::sync::Arc;

use statehouse_store::Row;

use super::settle::Settler;
use super::{EffectSpec, IS_DELIVERED, KEY, Outbox, PARKED, REASON, STATUS, transitions, worker};
use crate::declare::machine::{Firing, PartUse};
use crate::declare::{ActionSpec, Declare, IndexList, Machine, ResourceSpec, RowRead};
use crate::form::{Form, Property};
use crate::infra::due;
use crate::view_source::SourceRows;

pub(crate) use super::settings::{EffectDraft, OwnedEffect};

/// The effect of another archetype, with the transitions that it fires by hand.
pub(crate) struct EffectOfOwner {
    spec: Arc<EffectSpec>,
    machine: Arc<Machine>,
    /// The target is asked at once.
    pub ask: PartUse,
    /// A person, or other evidence, says whether it was applied.
    resolve: PartUse,
}

impl EffectOfOwner {
    /// Builds the table and the machine of a draft.
    pub(crate) fn build(cx: &mut Declare<'_>, draft: EffectDraft) -> Option<EffectOfOwner> {
        let def = cx.build(draft.rows())?;
        let spec = Arc::new(draft.with(def)?);
        let machine = cx.machine(transitions::of_owned(&spec))?;
        let (ask, resolve) = (cx.part(&machine, "ask")?, cx.part(&machine, "resolve")?);
        Some(EffectOfOwner { spec, machine, ask, resolve })
    }

    /// By which its owner sends it.
    pub(crate) fn outbox(&self) -> Outbox {
        Outbox::over(&self.spec)
    }

    /// The transition that records what a person found out.
    pub(crate) fn resolve(&self) -> ResolvedByHand {
        ResolvedByHand(self.resolve.clone())
    }

    /// Its resource: what callers can do with it is to look.
    pub(crate) fn resource(&self, settler: Arc<dyn Settler>, after: &[&str]) -> ResourceSpec {
        let (spec, def) = (&self.spec, &self.spec.def);
        // A second settler cannot be there: this is the only reference but those of the owner.
        let _ = spec.settler.set(settler);
        let source_rows = SourceRows::with_keys(&spec.table, [(spec.name.as_str(), KEY)]).unlogged(
            &[due::DUE_AT],
            "an effect that has to wait for its target is put off without an event",
        );
        let status = Property::optional(
            STATUS,
            Form::one_of(&super::OWNED_STATUSES),
            "which rows; PARKED if not given",
        );
        ResourceSpec::of(&spec.name, def)
            .source_rows(source_rows)
            .worker(worker::EffectSender(spec.clone()))
            .action(
                ActionSpec::read("read", "Read a {name}: one request to the provider and what became of it.")
                    .after(after.iter().copied())
                    .reads_row(RowRead::of(&spec.name, def)),
            )
            .action(
                ActionSpec::list("list", "List {name} rows by status, newest first.")
                    .mechanism("range read on the status and time index")
                    .after(after.iter().copied())
                    .reads_index(IndexList::newest_first(def).by_or(super::BY_STATUS, status, PARKED)),
            )
            .machine(&self.machine)
    }
}

/// Records by hand whether an effect was applied.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedByHand(PartUse);

impl ResolvedByHand {
    /// Fires it on a row as it was read.
    pub(crate) fn firing(&self, row: &Row, delivered: bool, reason: &str) -> Firing {
        let case = if delivered { "delivered" } else { "parked" };
        self.0.on(row).case(case).bind(IS_DELIVERED, delivered).bind(REASON, reason)
    }
}

/// Whether the row of an effect says that it is not known what became of it.
pub(crate) fn is_uncertain(row: &Row) -> bool {
    row.text(STATUS) == Some(super::UNCERTAIN)
}
