//! The plans that workers commit by themselves: expire, fire, send, make, forget, project.
//!
//! Every action is performed on an empty house after those that it needs, with all inputs and with the required ones only, and
//! to targets that answer in different ways. Then the workers run: at once, a day later and much later.

use std::collections::BTreeMap;
use std::time::Duration;

use statehouse::action::Action;
use statehouse::egress::Egress;
use statehouse::resource::Consuming;
use statehouse::{Blueprint, Operation, Resource};
use statehouse_drills::fake_targets::{FakeTargets, TargetBehavior};
use statehouse_drills::sample_inputs as sample;

use super::super::{DAY, RecordedCall, Stage, step_worker};
use super::write_asked;

/// Longer than any row is kept that is over.
const LONG: Duration = Duration::from_secs(100 * 86_400);
/// Longer than a sample of an end that lies far ahead.
const CENTURY: Duration = Duration::from_secs(100 * 366 * 86_400);
/// Enough steps of a worker to begin, fill and switch to a projection.
const ROUNDS: usize = 6;

/// The distinct plans of each worker, by its name. Plans that differ only in numbers are one.
pub(super) async fn plans(blueprint: &Blueprint, resources: &[Resource]) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for resource in resources {
        for action in &resource.actions {
            for egress in egresses(resource) {
                for all_inputs in [true, false] {
                    let mut stage = Stage::of(blueprint).await.unwrap();
                    stage.house = stage.house.with_egress(egress.clone());
                    if call(&stage, resource, action, all_inputs).await {
                        run_workers(&stage, resource, &mut found).await;
                    }
                }
            }
        }
    }
    found
}

/// Targets that answer, refuse, cannot be reached, and whose answer is lost. Other archetypes send nothing.
fn egresses(resource: &Resource) -> Vec<Egress> {
    if resource.archetype.keyword() != "effect" {
        return vec![FakeTargets::of(|_, _| TargetBehavior::Unreachable).egress(&[])];
    }
    let plays = [
        TargetBehavior::status(200),
        TargetBehavior::status(503),
        TargetBehavior::status(404),
        TargetBehavior::Loses,
        TargetBehavior::Unreachable,
    ];
    plays.map(|play| FakeTargets::of(move |_, _| play.clone()).egress(&[])).into()
}

/// Calls the actions that an action needs, and the action itself if it writes. Whether it was done.
async fn call(stage: &Stage, resource: &Resource, action: &Action, all_inputs: bool) -> bool {
    stage.perform(&action.after).await.unwrap();
    if !action.is_write() {
        return true;
    }
    let house = &stage.house;
    let mut request = sample::request(house.resources(), resource, action, 1);
    if !all_inputs {
        let is_required = |name: &str| action.input.iter().any(|input| input.name == name && input.required);
        request.input.retain(|name, _| is_required(name));
    }
    house.call(&stage.tenant, request, Operation::default()).await.is_ok()
}

/// Runs the workers that what was done to a resource concerns, and notes their plans.
async fn run_workers(stage: &Stage, resource: &Resource, found: &mut BTreeMap<String, Vec<String>>) {
    // What is declared together has names that begin the same; projections read what other resources write.
    let concerns = |name: &str| {
        let owner = name.split('.').next().unwrap_or(name);
        name.ends_with(super::super::PROJECTING)
            || owner.starts_with(&resource.name)
            || resource.name.starts_with(owner)
            || stage.house.resource(owner).is_ok_and(is_reaction)
    };
    for pause in [Duration::ZERO, DAY, LONG, CENTURY] {
        stage.clock.advance(pause);
        for _ in 0..ROUNDS {
            for worker in stage.house.workers().iter().filter(|worker| concerns(worker.name())) {
                stage.recorder.forget();
                step_worker(&stage.house, &**worker).await.unwrap();
                let plans = found.entry(worker.name().to_owned()).or_default();
                for asked in stage.recorder.asked().iter().filter(|asked| is_noted(asked)) {
                    let mut text = String::new();
                    write_asked(&mut text, asked);
                    if plans.iter().all(|known| shape(known) != shape(&text)) {
                        plans.push(text);
                    }
                }
            }
        }
    }
}

/// Whether a resource is a reaction, which reads what other resources write.
fn is_reaction(resource: &Resource) -> bool {
    resource.consumers.iter().any(|consuming| matches!(consuming, Consuming::Group(_)))
}

/// Whether it is a plan, and not one of the leases under which workers run.
fn is_noted(asked: &RecordedCall) -> bool {
    let of_leases = |name: &str| name == "house_leases";
    match asked {
        RecordedCall::Commit(plan) => !plan.steps().iter().all(|step| of_leases(step.table.name())),
        _ => false,
    }
}

/// The text without its numbers.
fn shape(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_ascii_digit()).collect()
}

/// The names of a resource's workers.
pub(super) fn names(resource: &Resource) -> Vec<String> {
    let own = resource.workers.iter().map(|worker| worker.name().to_owned());
    let consumers = resource.consumers.iter().filter_map(|consuming| match consuming {
        Consuming::Group(handler) => Some(format!("{}.consume", handler.group())),
        Consuming::Projection(projector) => Some(format!("{}{}", projector.name(), super::super::PROJECTING)),
        // Programs outside read for a declared group.
        Consuming::Declared(_) => None,
    });
    own.chain(consumers).collect()
}
