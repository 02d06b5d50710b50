//! Reactions, `[on.NAME]`: an event in the log calls an action, once, with what the event says.
//!
//! ```toml
//! [on.overdue]
//! event = "due_reminder.fired"
//! do    = "mail.send"
//! input = { key = "overdue-{subject}", body = { to = "{row.payload.email}" } }
//! when  = "fired = 1"
//! ```
//!
//! A reaction is a group of the server ([`crate::infra::log`]) whose handler prepares the action. What the log promises of a
//! group holds of it: effect and offset are one plan, events of a row are handled in order, and what cannot be done is parked
//! under its subject and holds up nothing else.
//!
//! **Rows.** Those of the group, `house_progress` and `house_parked`, under the reaction's name.
//!
//! **Invariants.**
//! - R1. An event has its effect once. *The plan of the action has the step that moves the group's offset, with the guards of
//!   the log's I2 to I4.*
//! - R2. Also where the offset does not say so: a record with several events of this name, a lost answer, a group that was moved
//!   back. *The operation id of the plan is made from the reaction, the record's operation and the event's place in it, and is
//!   looked up before anything is refused or repeated.* It is forgotten with the log's record of it, as every operation id.
//! - R3. A refused action is parked with its code and message, in the plan that passes the event. *What others did at the same
//!   time, and what passes by itself, is tried again for ever and never parked.*
//! - R4. Reactions do not keep each other busy for ever. *Cycles without a condition are refused when the blueprint is read; every
//!   event of a reaction says how many reactions led to it, and beyond [`DEPTH_MAX`] it is parked.*
//! - R5. A reaction that is new begins with what is written from then on, unless the blueprint says `from = "start"`. *The
//!   migration puts the group's mark at the end of the log.*

mod archetype;
mod cycle;
mod declare;
mod react;
#[cfg(test)]
mod tests;

pub use archetype::ARCHETYPE;
pub(crate) use declare::declare;
pub use declare::summaries;

/// How many reactions may lead to one another.
pub const DEPTH_MAX: u64 = 8;
