//! What Statehouse costs, as a ratio to hand-written code on the same engine in the same run.
//!
//! Figures of one machine mean little on another, and even here they move from run to run. So every figure stands
//! beside its reference, measured in turn with it, round by round; the median of the ratios is the result. The
//! references are what a careful engineer would write by hand for that engine, with the same tables, the same SQL
//! and the same durability; or what others have made for the same purpose.

pub mod auctions;
pub mod batches;
pub mod bookings;
pub mod constrained;
pub mod feed;
pub mod hotspots;
pub mod http;
pub mod jobs;
pub mod load;
pub mod postgres;
pub mod report;
pub mod scans;
pub mod servers;
pub mod site;
pub mod sqlite;
pub mod stock;
pub mod waist;
