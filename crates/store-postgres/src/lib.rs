//! Statehouse on PostgreSQL.
