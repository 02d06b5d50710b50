//! The failures of A01, on any entity.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json, json};
use statehouse::form::{Form, Property};
use statehouse::{Code, Expected};
use statehouse_store::faulty::Odds;
use statehouse_store::{Clock, Commit, SystemClock, Type};

use crate::conformance::CaseFuture;
use crate::harness::drill::{Drill, DrillKind, DrillRun, Skipped, action, input, insist};
use crate::harness::sample_inputs;
use crate::harness::store_client::{same, whole_log};
use crate::harness::tenant_client::TenantClient;
use crate::proof::entity::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::DrillFn) -> Drill {
    let kind = DrillKind::AnyResource { blueprint: BLUEPRINT, resource: "profile", run };
    Drill { archetype: "entity", failure, provokes, largest_plan: 3, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "retry ambiguity on write",
        "Answers to creates and updates get lost before and after the commit, and the caller repeats them.",
        |run| boxed(retry_ambiguity(run)),
    ),
    drill(
        "concurrent overwrite race",
        "Several callers change a row under one version at once, and one writes what it drafted before a rival's write.",
        |run| boxed(overwrite_race(run)),
    ),
    drill(
        "stale read after update",
        "A second process reads what the first has just been told is written, strongly and by the writer's token.",
        |run| boxed(stale_read(run)),
    ),
    drill(
        "cache invalidation lag",
        "A process whose news of the log come late and fail answers cached reads while another one writes.",
        |run| boxed(cache_lag(run)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> CaseFuture<'a> {
    Box::pin(run)
}

/// A field that a drill changes: one with many values, if there is one.
fn field(run: &DrillRun) -> Result<&Property> {
    let fields = &action(run.resource()?, "update")?.input;
    let rank = |property: &&Property| match property.form {
        Form::Value(Type::Text) => 0,
        Form::Value(Type::Int | Type::Float | Type::Time) => 1,
        Form::Value(Type::Bytes | Type::Json) | Form::Any => 2,
        _ => 3,
    };
    let def = run.resource()?.def.as_ref().context("an entity without rows")?;
    let can_change = |property: &&Property| {
        !def.columns().iter().any(|def| def.immutable && def.column.name == property.name)
    };
    let name = &run.target.resource;
    let reason = || Skipped(format!("{name} has no field that `update` and `patch` can change"));
    fields.iter().filter(can_change).min_by_key(rank).ok_or_else(|| reason().into())
}

/// The field with a value for a write that makes this version. Values of successive versions differ, also where the type
/// has only two; a write that changes nothing writes nothing and would show nothing.
fn change(run: &DrillRun, version: i64, number: i64) -> Result<Map<String, Json>> {
    let field = field(run)?;
    let value =
        sample_inputs::of_property(field, 2 * number + version % 2).context("a field without values")?;
    Ok(Map::from_iter([(field.name.clone(), value)]))
}

/// The same, as the input of a patch.
fn patched(run: &DrillRun, version: i64, number: i64) -> Result<Json> {
    change(run, version, number).map(Json::Object)
}

/// What creates the row of that number.
fn creation(run: &DrillRun, number: i64) -> Result<Json> {
    let resource = run.resource()?;
    let key = resource
        .key
        .iter()
        .map(|(name, kind)| (name.clone(), sample_inputs::value(name, *kind, number).to_json()));
    let given = key.chain(change(run, 1, number)?).collect::<Map<String, Json>>();
    Ok(input(action(resource, "create")?, number, given))
}

async fn create(run: &DrillRun, client: &TenantClient, number: i64) -> Result<()> {
    client.done(&run.action("create"), &[], creation(run, number)?, None).await.map(drop)
}

async fn retry_ambiguity(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let sound = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let faulty = run.faulty(store.clone());
    let client = run.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    let (mut random, mut records) = (run.random(), 0);
    for row in run.rounds() {
        let (create, patch) = (run.action("create"), run.action("patch"));
        let made = creation(run, row)?;
        insist(&client, &format!("create-{row}"), &create, &[], &made, None).await?;
        let key = run.key(row)?;
        let changes = 1 + i64::try_from(random.below(3))?;
        for number in 1..=changes {
            let (id, changed) = (format!("patch-{row}-{number}"), patched(run, number + 1, row)?);
            let first = insist(&client, &id, &patch, &key, &changed, Some(number)).await?;
            let again = sound.call_as(&id, &patch, &key, changed.clone(), Some(number)).await?;
            same("the answer to a repetition", &again.body, &first.body)?;
        }
        records += 1 + usize::try_from(changes)?;
        let shown = sound.shown(&run.resource()?.name, &key, &["version"]).await?;
        same("the version after one create and its patches", &shown, &vec![json!(1 + changes)])?;
    }
    let reused = sound.call_as("create-1", &run.action("create"), &[], creation(run, 100)?, None).await;
    same("another request", &reused.err().map(|refusal| refusal.code), &Some(Code::OperationReused))?;
    same("records in the log", &sound.store_client()?.exact_log(records).await?.len(), &records)
}

async fn overwrite_race(run: &DrillRun) -> Result<()> {
    let client = run.house().await?;
    let (patch, update) = (run.action("patch"), run.action("update"));
    create(run, &client, 1).await?;
    let key = run.key(1)?;
    let mut version = 1;
    for round in run.rounds() {
        let callers: Vec<_> = (0..4_i64)
            .map(|caller| {
                let changed = patched(run, version + 1, 5 * round + caller)?;
                Ok(client.start(&patch, &key, changed, Some(version)))
            })
            .collect::<Result<_>>()?;
        let mut winners = 0;
        for caller in callers {
            match caller.await? {
                Ok(_) => winners += 1,
                Err(refusal) => {
                    let told = (refusal.code, refusal.current_version);
                    same("what a loser is told", &told, &(Code::VersionConflict, Some(version + 1)))?;
                }
            }
        }
        same("winners under one version", &winners, &1)?;
        version += 1;
        // Between the reading and the writing of one caller comes another.
        for name in [&patch, &update] {
            let changed = change(run, version + 1, 5 * round + 4)?;
            let (late, expected) = if name == &patch {
                (Json::Object(changed), Expected::Any)
            } else {
                let whole = input(action(run.resource()?, "update")?, 5 * round + 4, changed);
                (whole, Expected::Version(version))
            };
            let request = TenantClient::request(name, &key, &late, Some(expected));
            let Some(plan) = client.house.plan(&client.tenant, request).await? else { continue };
            let rival = patched(run, version + 1, 200 + round)?;
            client.done(&patch, &key, rival, Some(version)).await?;
            let before = client.shown(&run.resource()?.name, &key, &["version"]).await?;
            let rival_wrote = before != vec![json!(version)];
            version = before[0].as_i64().context("a row without a version")?;
            let outcome = client.house.store().commit(&plan).await?;
            let refused = matches!(outcome, Commit::Refused(_));
            ensure!(refused || !rival_wrote, "{name} was written over what it had not read: {outcome:?}");
            version += i64::from(!refused);
        }
    }
    let shown = client.shown(&run.resource()?.name, &key, &["version"]).await?;
    same("the version after all writes that were acknowledged", &shown, &vec![json!(version)])?;
    let records = whole_log(client.house.store().as_ref()).await?.len();
    ensure!(i64::try_from(records)? <= version, "{records} records of {version} versions");
    Ok(())
}

async fn stale_read(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let writer = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let reader = run.house_over(store, Arc::new(SystemClock)).await?;
    reader.house.start_followers();
    create(run, &writer, 1).await?;
    let (key, read) = (run.key(1)?, run.action("read"));
    for version in run.rounds() {
        let changed = patched(run, version + 1, version)?;
        let written = writer.done(&run.action("patch"), &key, changed, Some(version)).await?;
        let strong = reader.done(&read, &key, json!({}), None).await?;
        same("a strong read in another process", &strong.version, &Some(version + 1))?;
        let token = written.token.context("a write has no token")?;
        let cached = json!({"consistency": "cached", "after": token});
        let seen = reader.done(&read, &key, cached, None).await?;
        same("a cached read with the writer's token", &seen.version, &Some(version + 1))?;
    }
    Ok(())
}

async fn cache_lag(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let writer = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let faulty = run.faulty(store);
    let reader = run.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    create(run, &writer, 1).await?;
    reader.house.start_followers();
    let at_most = Duration::from_millis(5);
    faulty.set_odds(Odds { delay: 0.7, delay_at_most: at_most, unavailable: 0.2, ..Odds::default() });
    let (key, read) = (run.key(1)?, run.action("read"));
    let mut newest = 0;
    for version in run.rounds() {
        let changed = patched(run, version + 1, version)?;
        let written = writer.done(&run.action("patch"), &key, changed, Some(version)).await?;
        let token = written.token.context("a write has no token")?;
        for input in [json!({"consistency": "cached", "after": token}), json!({"consistency": "cached"})] {
            let needs = if input.get("after").is_some() { version + 1 } else { 1 };
            let seen = insist(&reader, "look", &read, &key, &input, None).await?;
            let seen = seen.version.context("a row without a version")?;
            ensure!(seen >= needs, "a cached read shows version {seen} after version {needs} was to be seen");
            ensure!(seen <= version + 1, "version {seen} was never written");
            newest = newest.max(seen);
        }
    }
    same("the newest version that was seen", &newest, &(i64::try_from(run.rounds)? + 1))?;
    // In the end the cache has caught up, token or not.
    faulty.set_odds(Odds::default());
    for _ in 0..1_000 {
        let seen = reader.done(&read, &key, json!({"consistency": "cached"}), None).await?;
        if seen.version == Some(newest) {
            return Ok(());
        }
        SystemClock.sleep(Duration::from_millis(5)).await;
    }
    anyhow::bail!("the cache never showed version {newest}")
}
