//! Drills on blueprints of users: a correct system is never red, whatever its blueprint declares beside what is drilled.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use statehouse::Blueprint;
use statehouse_drills::drill::{Drill, DrillReport, DrillTarget};
use statehouse_drills::engines::{Model, Sqlite, TestEngine};
use statehouse_drills::proof::DRILLS;

fn drills_of(archetype: &str) -> Vec<&'static Drill> {
    let all = DRILLS.iter().copied().flatten();
    all.filter(|drill| drill.archetype == archetype && drill.takes_any_resource()).collect()
}

/// Runs the drills of an archetype on a blueprint's first resource of it, on the model and on SQLite.
async fn reports(blueprint: &str, archetype: &str) -> Vec<DrillReport> {
    let blueprint = Blueprint::read("statehouse.toml", blueprint).unwrap();
    let targets = DrillTarget::all_of(&blueprint).unwrap();
    let (_, target) = targets.iter().find(|(keyword, _)| *keyword == archetype).unwrap();
    let mut reports = Vec::new();
    for engine in [&Model as &dyn TestEngine, &Sqlite] {
        for drill in drills_of(archetype) {
            reports.push(drill.report(engine, Some(target), 1).await);
        }
    }
    reports
}

async fn are_green(blueprint: &str, archetype: &str) {
    let reports = reports(blueprint, archetype).await;
    assert!(!reports.is_empty());
    for report in reports {
        assert!(report.failed.is_none(), "{}\n{}", report.drill.name(), report.failed.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_a_view_are_not_counted_as_the_sweeper_of_bookings() {
    let blueprint = r#"
        [booking.seat]
        key = { event_id = "text", seat_no = "int" }
        [view.seat_states]
        of       = "seat"
        group_by = ["state"]
        [view.booking_states]
        of       = "seat_booking"
        group_by = ["state"]
    "#;
    are_green(blueprint, "booking").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_a_view_are_not_counted_as_the_scanner_of_timers() {
    let blueprint = r#"
        [timer.reminder]
        key = { name = "text" }
        [view.reminder_states]
        of       = "reminder"
        group_by = ["status"]
    "#;
    are_green(blueprint, "timer").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entity_whose_only_field_is_a_bool_is_green() {
    for field in [
        "\"bool\"",
        "\"bool?\"",
        "{ type = \"bool\", default = true }",
        "{ type = \"bool\", default = false }",
    ] {
        let blueprint = format!("[entity.flag]\nkey = {{ name = \"text\" }}\nfields = {{ on = {field} }}\n");
        are_green(&blueprint, "entity").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entity_without_fields_is_skipped_with_the_reason() {
    let bare = "[entity.mark]\nkey = { name = \"text\" }\n";
    let hot = "[entity.mark]\nkey = { name = \"text\" }\nfields = { views = { type = \"int\", default = 0 } }\nhot = [\"views\"]\n";
    for blueprint in [bare, hot] {
        for report in reports(blueprint, "entity").await {
            assert!(report.failed.is_none(), "{}\n{}", report.drill.name(), report.failed.unwrap());
            let reason = report.skipped.unwrap();
            assert!(reason.contains("mark has no field"), "{reason}");
        }
    }
}
