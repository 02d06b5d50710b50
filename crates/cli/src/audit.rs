//! `audit`: who did what with which credential.

use std::time::Duration;

use serde_json::json;
use statehouse::House;
use statehouse::audit::{self, AuditActor, AuditEntry, AuditFilter, AuditOutcome, AuditRow};
use statehouse::blueprint::settings::parse_duration;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{SchemaChange, StoreError, Time};

use crate::arguments::{AuditArgs, AuditCommand, AuditSelection};
use crate::blueprint::{self, FOREVER};
use crate::output::{CliFailure, Output};
use crate::settings::{CliSettings, Own};

/// The shortest time for which audit records are kept.
const RETENTION_MIN: Duration = Duration::from_secs(60 * 60);

pub(crate) async fn run(arguments: &AuditArgs, output: &Output) -> Result<(), CliFailure> {
    let selection = arguments.selection();
    let filter = filter_of(selection)?;
    let house = blueprint::open_in_use(&CliSettings::read(&selection.live.flags())?.own).await?;
    let done = match &arguments.command {
        AuditCommand::List { limit, .. } => show_list(&house, &filter, *limit, output).await,
        AuditCommand::Export { .. } => export(&house, filter, output).await,
    };
    house.store().close().await;
    done
}

fn filter_of(selection: &AuditSelection) -> Result<AuditFilter, CliFailure> {
    let time = |flag: &str, text: &Option<String>| {
        let parsed = text.as_deref().map(str::parse::<Time>).transpose();
        parsed.map_err(|error| CliFailure::Usage(format!("{flag}: {error}; write 2026-11-18T00:00:00Z")))
    };
    Ok(AuditFilter {
        from: time("--from", &selection.from)?,
        to: time("--to", &selection.to)?,
        action: selection.action.clone(),
        tenant: selection.tenant.clone(),
        oldest_first: false,
    })
}

async fn show_list(
    house: &House,
    filter: &AuditFilter,
    limit: usize,
    output: &Output,
) -> Result<(), CliFailure> {
    let mut rows: Vec<AuditRow> = Vec::new();
    let mut after = None;
    while rows.len() < limit {
        let page = audit::list(&**house.store(), filter, PAGE_MAX.min(limit), after).await?;
        rows.extend(page.rows);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    rows.truncate(limit);
    output.show(&json!(rows), || {
        if rows.is_empty() {
            return "There is no such audit record.".into();
        }
        rows.iter().map(line).collect::<Vec<_>>().join("\n")
    });
    Ok(())
}

async fn export(house: &House, filter: AuditFilter, output: &Output) -> Result<(), CliFailure> {
    let filter = AuditFilter { oldest_first: true, ..filter };
    let mut after = None;
    loop {
        let page = audit::list(&**house.store(), &filter, PAGE_MAX, after).await?;
        for row in &page.rows {
            output.line(&json!(row), || line(row));
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

fn line(row: &AuditRow) -> String {
    let optional = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let count = if row.count > 1 { format!(" x {}", row.count) } else { String::new() };
    let detail = row.detail.as_ref().map_or(String::new(), |detail| format!("  {detail}"));
    format!(
        "{}  {:<18} {:<9} {:<24} {:<24} from {:<15} tenant {}{count}{detail}",
        row.at,
        row.action,
        row.outcome,
        optional(&row.target),
        row.credential,
        optional(&row.peer),
        optional(&row.tenant),
    )
}

/// How long audit records are kept; `None` for ever.
pub(crate) fn retention(own: &Own) -> Result<Option<Duration>, CliFailure> {
    if own.audit_retention == FOREVER {
        return Ok(None);
    }
    let kept = parse_duration(&own.audit_retention).filter(|span| *span >= RETENTION_MIN);
    kept.map(Some).ok_or_else(|| {
        CliFailure::Usage(format!(
            "audit_retention is {:?}; it must be a time of at least {RETENTION_MIN:?}, such as \"400d\", or \"{FOREVER}\"",
            own.audit_retention
        ))
    })
}

/// The person who runs this command, by the name that the system gives.
pub(crate) fn actor() -> AuditActor {
    let user = ["USER", "LOGNAME", "USERNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    AuditActor::command(user.as_deref().unwrap_or("unknown"))
}

/// Records a migration, before and after it. A store that has no table for it yet is recorded afterwards only.
pub(crate) struct MigrationAudit<'h> {
    house: &'h House,
    by: AuditActor,
    has_table: bool,
    /// What is named for removal.
    losses: String,
}

impl<'h> MigrationAudit<'h> {
    /// A migration that will make these changes.
    pub(crate) async fn begin(
        house: &'h House,
        by: AuditActor,
        planned: &[SchemaChange],
        losses: &[String],
    ) -> Result<MigrationAudit<'h>, StoreError> {
        let has_table = !planned.iter().any(|change| change.table.name() == audit::AUDIT);
        let losses = match losses {
            [] => String::new(),
            names => format!("; with the loss of {}", names.join(", ")),
        };
        let migration = MigrationAudit { house, by, has_table, losses };
        if has_table && !planned.is_empty() {
            migration.record(AuditOutcome::Begun, &described(planned)).await?;
        }
        Ok(migration)
    }

    /// Records what became of it. A failure may have left some of the changes.
    pub(crate) async fn end(&self, done: &Result<Vec<SchemaChange>, StoreError>) -> Result<(), StoreError> {
        match done {
            Ok(changes) if changes.is_empty() => Ok(()),
            Ok(changes) => self.record(AuditOutcome::Done, &described(changes)).await,
            Err(_) if !self.has_table => Ok(()),
            Err(error) => self.record(AuditOutcome::Failed, &error.to_string()).await,
        }
    }

    async fn record(&self, outcome: AuditOutcome, detail: &str) -> Result<(), StoreError> {
        let entry = AuditEntry::of(&self.by, "house.migrate", self.house.name()).outcome(outcome);
        let entry = entry.detail(format!("{detail}{}", self.losses));
        let (at, id) = (self.house.clock().now(), self.house.ids().next());
        audit::record(&**self.house.store(), &[entry], at, &id).await
    }
}

fn described(changes: &[SchemaChange]) -> String {
    changes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_retention_is_a_time_or_for_ever() {
        let kept = |text: &str| retention(&Own { audit_retention: text.into(), ..Own::default() }).ok();
        assert_eq!(kept("400d"), Some(Some(Duration::from_secs(400 * 24 * 60 * 60))));
        assert_eq!(kept("forever"), Some(None));
        for bad in ["", "1s", "soon", "-1d"] {
            assert_eq!(kept(bad), None, "{bad}");
        }
    }
}
