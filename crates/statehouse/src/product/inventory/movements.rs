//! Movements: one row for each change of what is in stock or sold, beside the change itself (I5).

use std::sync::Arc;

use statehouse_store::guard::now;
use statehouse_store::{Step, Table, Type, Value};

use super::{InventorySpec, QUANTITY, REASON, RESERVATION_ID};
use crate::blueprint::settings::Field;
use crate::declare::TableSpec;

pub(super) const MOVEMENT_ID: &str = "movement_id";
pub(super) const KIND: &str = "kind";
pub(super) const MOVED_AT: &str = "moved_at";

/// What moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MovementKind {
    Restock,
    Adjust,
    Recount,
    TransferOut,
    TransferIn,
    Sale,
    Return,
}

const KINDS: [&str; 7] = ["RESTOCK", "ADJUST", "RECOUNT", "TRANSFER_OUT", "TRANSFER_IN", "SALE", "RETURN"];

impl MovementKind {
    fn name(self) -> &'static str {
        match self {
            MovementKind::Restock => "RESTOCK",
            MovementKind::Adjust => "ADJUST",
            MovementKind::Recount => "RECOUNT",
            MovementKind::TransferOut => "TRANSFER_OUT",
            MovementKind::TransferIn => "TRANSFER_IN",
            MovementKind::Sale => "SALE",
            MovementKind::Return => "RETURN",
        }
    }
}

/// A row of the table of movements.
pub(super) struct Movement(Step);

impl Movement {
    /// The reservation that it belongs to.
    #[must_use]
    pub(super) fn of_reservation(self, reservation: Option<&str>) -> Movement {
        Movement(reservation.into_iter().fold(self.0, |step, id| step.set(RESERVATION_ID, Value::from(id))))
    }

    /// Why it was made.
    #[must_use]
    pub(super) fn because(self, reason: Option<&str>) -> Movement {
        Movement(reason.into_iter().fold(self.0, |step, reason| step.set(REASON, Value::from(reason))))
    }

    pub(super) fn step(self) -> Step {
        self.0
    }
}

impl InventorySpec {
    /// A movement of a stock by a quantity, which is negative where it leaves; `None` if movements are only in the log.
    pub(super) fn movement(
        &self,
        kind: MovementKind,
        key: &[Value],
        id: &str,
        quantity: i64,
    ) -> Option<Movement> {
        let table: &Arc<Table> = self.movement_def.as_ref()?.table();
        let step = Step::insert(table, key.iter().cloned().chain([id.into()]));
        let step = step.set(KIND, kind.name()).set(QUANTITY, quantity).set(MOVED_AT, now());
        Some(Movement(step.label("movement")))
    }
}

/// The table of movements: those of one stock together, in the order of their ids, which begin with the time.
pub(super) fn table(resource: &str, key: &[Field]) -> TableSpec {
    TableSpec::named(crate::resource::plural(resource))
        .key(key)
        .sort(MOVEMENT_ID, Type::Text)
        .about("ascending in time, by the clock of the process that made it")
        .text(KIND)
        .one_of(&KINDS)
        .about("what moved")
        .immutable()
        .int(QUANTITY)
        .about("by how many; negative where stock leaves")
        .immutable()
        .text(RESERVATION_ID)
        .null()
        .about("the reservation that was bought, or came back")
        .immutable()
        .text(REASON)
        .null()
        .about("as the caller gave it")
        .immutable()
        .time(MOVED_AT)
        .about("when")
        .immutable()
}
