//! Logins for the audit: those that failed, and those to the console. Bounded and in batches, because a stranger causes them.
//!
//! - L1. *A request does not wait for the audit.* It is noted in memory; one task per process writes what was noted, in one plan.
//! - L2. *Bounded.* What is alike in a window (credential, address, reason) is one row with a count. A window has at most
//!   [`ROWS_MAX`] rows; everything else in it is counted in one row. While windows are full they grow, from [`WINDOW`] to
//!   [`WINDOW_MAX`], so a stranger that goes on for ever causes at most `ROWS_MAX + 1` rows in [`WINDOW_MAX`].
//! - L3. *Once.* What could not be written is committed again as the same plan. Meanwhile the next window goes on counting.
//!
//! Noted is who presented a credential that was rejected; a request without any is not a login. A process that is killed loses the
//! window that it had not written.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse::House;
use statehouse::audit::{self, AuditActor, AuditEntry, AuditOutcome};
use statehouse_store::Time;
use tokio::sync::{Notify, watch};

/// Rows of a window.
pub const ROWS_MAX: usize = 20;
/// The shortest time between two plans.
pub const WINDOW: Duration = Duration::from_secs(1);
/// The longest time between two plans.
pub const WINDOW_MAX: Duration = Duration::from_secs(64);
/// What the row says that counts the rest.
const OTHERS: &str = "further failed logins in the same time";

/// Why a credential was rejected. The caller is not told; the audit is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedLogin {
    /// Who it may have been.
    pub actor: AuditActor,
    /// The tenant of the credential, if it is known.
    pub tenant: Option<String>,
    /// Why it was rejected.
    pub reason: &'static str,
}

impl RejectedLogin {
    /// A credential of a kind, of which only a part is known.
    pub fn unproved(kind: &str, id: &str, reason: &'static str) -> RejectedLogin {
        RejectedLogin { actor: AuditActor::unproved(kind, id), tenant: None, reason }
    }
}

/// What makes logins alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LoginKind {
    credential: String,
    peer: Option<std::net::IpAddr>,
    reason: &'static str,
}

/// What was noted and is not written.
#[derive(Default)]
struct LoginWindow {
    rows: BTreeMap<LoginKind, (AuditEntry, i64)>,
    others: i64,
}

/// A window that is being written, under one id (L3).
struct PendingWindow {
    entries: Vec<AuditEntry>,
    at: Time,
    id: String,
}

/// Notes logins and writes them to the audit.
#[derive(Default)]
pub struct LoginLog {
    window: Mutex<LoginWindow>,
    noted: Notify,
}

impl LoginLog {
    /// Notes a rejected credential.
    pub fn failed(&self, rejected: &RejectedLogin, peer: Option<std::net::IpAddr>) {
        let actor = rejected.actor.clone().at(peer);
        let entry = AuditEntry::of(&actor, "login", "")
            .tenant(rejected.tenant.as_deref().unwrap_or_default())
            .outcome(AuditOutcome::Rejected);
        self.note(&actor, peer, entry.detail(rejected.reason), rejected.reason);
    }

    /// Notes a login to the console.
    pub fn succeeded(&self, actor: &AuditActor, tenant: &str, peer: Option<std::net::IpAddr>) {
        let entry = AuditEntry::of(actor, "login", "console").tenant(tenant);
        self.note(actor, peer, entry, "");
    }

    fn note(
        &self,
        actor: &AuditActor,
        peer: Option<std::net::IpAddr>,
        entry: AuditEntry,
        reason: &'static str,
    ) {
        let kind = LoginKind { credential: actor.credential().to_string(), peer, reason };
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, count)) = window.rows.get_mut(&kind) {
            *count = count.saturating_add(1);
        } else if window.rows.len() < ROWS_MAX {
            window.rows.insert(kind, (entry, 1));
        } else {
            window.others = window.others.saturating_add(1);
        }
        drop(window);
        self.noted.notify_one();
    }

    /// Takes what was noted, and whether the window was full.
    fn take(&self) -> (Vec<AuditEntry>, bool) {
        let window = take(&mut *self.window.lock().unwrap_or_else(PoisonError::into_inner));
        let mut entries: Vec<AuditEntry> =
            window.rows.into_values().map(|(entry, count)| entry.times(count)).collect();
        if window.others > 0 {
            let others = AuditEntry::of(&AuditActor::unproved("several", ""), "login", "");
            entries.push(others.outcome(AuditOutcome::Rejected).times(window.others).detail(OTHERS));
        }
        (entries, window.others > 0)
    }

    /// Writes what is noted, until the server stops; then the rest, once.
    pub async fn write(self: Arc<Self>, house: Arc<House>, mut stopping: watch::Receiver<bool>) {
        let mut pause = WINDOW;
        let mut pending: Option<PendingWindow> = None;
        loop {
            if pending.is_none() {
                tokio::select! {
                    () = self.noted.notified() => {}
                    _ = stopping.wait_for(|stopping| *stopping) => {}
                }
            }
            tokio::select! {
                () = house.clock().sleep(pause) => {}
                _ = stopping.wait_for(|stopping| *stopping) => {}
            }
            let is_last = *stopping.borrow() || stopping.has_changed().is_err();
            // At the end what could not be written before goes first.
            for _ in 0..=usize::from(is_last) {
                pause = self.write_window(&house, &mut pending, pause).await;
            }
            if is_last {
                return;
            }
        }
    }

    /// Writes the pending window, or else what was noted since. Returns the pause until the next one.
    async fn write_window(
        &self,
        house: &House,
        pending: &mut Option<PendingWindow>,
        pause: Duration,
    ) -> Duration {
        let mut next = pause;
        if pending.is_none() {
            let (entries, is_full) = self.take();
            next = if is_full { (pause * 2).min(WINDOW_MAX) } else { WINDOW };
            let (at, id) = (house.clock().now(), house.ids().next());
            *pending = (!entries.is_empty()).then_some(PendingWindow { entries, at, id });
        }
        let Some(PendingWindow { entries, at, id }) = &*pending else { return next };
        match audit::record(&**house.store(), entries, *at, id).await {
            Ok(()) => *pending = None,
            Err(error) => {
                tracing::warn!(target: "statehouse::audit", %error, "logins are not recorded yet");
                next = (pause * 2).min(WINDOW_MAX);
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_bounded_whatever_a_stranger_sends() {
        let log = LoginLog::default();
        for number in 0..1_000_u32 {
            let id = format!("{:016x}", number % 500);
            let rejected = RejectedLogin::unproved("key", &id, "unknown key");
            log.failed(&rejected, Some([10, 0, 0, 1].into()));
        }
        let (entries, is_full) = log.take();
        assert!(is_full && entries.len() == ROWS_MAX + 1, "{}", entries.len());
        assert_eq!(entries[0], {
            let actor = AuditActor::unproved("key", "0000000000000000").at(Some([10, 0, 0, 1].into()));
            let entry = AuditEntry::of(&actor, "login", "").outcome(AuditOutcome::Rejected);
            entry.detail("unknown key").times(2)
        });
        let others = entries.last().unwrap();
        assert_eq!(*others, {
            let actor = AuditActor::unproved("several", "");
            let entry = AuditEntry::of(&actor, "login", "").outcome(AuditOutcome::Rejected);
            entry.detail(OTHERS).times(1_000 - 2 * ROWS_MAX as i64)
        });
        assert_eq!(log.take(), (Vec::new(), false));
    }
}
