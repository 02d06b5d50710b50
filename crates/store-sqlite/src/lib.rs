//! Statehouse on an embedded SQLite file.
