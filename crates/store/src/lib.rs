//! The narrow waist of Statehouse: everything above it is written once, everything below it is an engine.
//!
//! Four things cross it: [tables](table), [plans](plan) of guarded steps, [reads](read) of ranges, and the
//! [log]. [`Store`] is the contract; [`ModelStore`] is its reference; [`FaultyStore`] makes any store fail.
//!
//! ```
//! use statehouse_store::guard::{column, Guard};
//! use statehouse_store::{Commit, EventTemplate, Entry, Migrate, ModelStore, Plan, Schema, Step, Store, Table, Tenant, Type};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let profiles = Table::named("profiles")
//!     .partition("user_id", Type::Int)
//!     .required("display_name", Type::Text)
//!     .defaulted("status", Type::Text, "ACTIVE")
//!     .build()?;
//! let store = ModelStore::new();
//! store.migrate(&Schema::new([profiles.clone()])?, Migrate::Apply).await?;
//!
//! let acme = Tenant::new("acme")?;
//! let create = Plan::of(&acme, "op-1").step(Step::insert(&profiles, [42.into()]).set("display_name", "Ann"));
//! store.commit(&create.build()?).await?;
//!
//! let rename = Plan::of(&acme, "op-2")
//!     .step(
//!         Step::update(&profiles, [42.into()])
//!             .guard(Guard::version(1).and(column("status").eq("ACTIVE")))
//!             .set("display_name", "Anna"),
//!     )
//!     .log(Entry::about("profile", "42").event(EventTemplate::named("profile.updated").with_row_of(0)));
//! let rename = rename.build()?;
//! assert!(matches!(store.commit(&rename).await?, Commit::Applied(applied) if !applied.repeated));
//! // The same operation again learns its first outcome instead of failing on the version.
//! assert!(matches!(store.commit(&rename).await?, Commit::Applied(applied) if applied.repeated));
//! # Ok(())
//! # }
//! ```

pub mod blank;
pub mod bug;
pub mod claim_range;
pub mod clock;
pub mod commit;
pub mod error;
pub mod eval;
pub mod faulty;
pub mod guard;
pub mod label;
pub mod limits;
pub mod log;
pub mod migration;
pub mod model;
pub mod outcome;
pub mod plan;
pub mod random;
pub mod read;
pub mod row;
pub mod scan;
pub mod store;
pub mod table;
mod text;
pub mod time;
pub mod value;

pub use blank::{BlankRange, BlankedPage};
pub use bug::Bug;
pub use claim_range::ClaimRange;
pub use clock::{Clock, ManualClock, SystemClock};
pub use commit::{Backoff, CommitReport, RetryPolicy, commit_known, commit_reported};
pub use error::{PlanError, SchemaError, StoreError};
pub use faulty::FaultyStore;
pub use guard::{Expr, Guard, Operand};
pub use label::Label;
pub use log::{Entry, Event, EventTemplate, LogPage, OperationStatus, Position, Record};
pub use migration::{Migrate, SchemaChange};
pub use model::ModelStore;
pub use outcome::{Applied, Commit, Reason, Refused, Resolution};
pub use plan::{Plan, Step};
pub use random::{Ids, Random};
pub use read::{Consistency, Cursor, Page, Query};
pub use row::{Address, Cell, Row, Tenant};
pub use scan::{Scan, Segment};
pub use store::{EngineRequest, ExplainRequest, Explanation, ReadRequest, ReadResult, Store};
pub use table::{Column, Index, Schema, Table};
pub use time::Time;
pub use value::{BadValue, Type, Value};
