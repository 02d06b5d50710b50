//! The failures of A01, on any entity.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json, json};
use statehouse::form::{Form, Property};
use statehouse::{Code, Expected};
use statehouse_store::faulty::Odds;
use statehouse_store::{Clock, Commit, SystemClock, Type};

use crate::conformance::Verdict;
use crate::harness::client::{same, whole_log};
use crate::harness::drill::{Drill, Ground, Kind, Skipped, action, input, insist};
use crate::harness::house::Visitor;
use crate::harness::specimen;
use crate::proof::entity::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::OnGround) -> Drill {
    let kind = Kind::Ground { blueprint: BLUEPRINT, resource: "profile", run };
    Drill { archetype: "entity", failure, provokes, largest_plan: 3, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "retry ambiguity on write",
        "Answers to creates and updates get lost before and after the commit, and the caller repeats them.",
        |ground| boxed(retry_ambiguity(ground)),
    ),
    drill(
        "concurrent overwrite race",
        "Several callers change a row under one version at once, and one writes what it drafted before a rival's write.",
        |ground| boxed(overwrite_race(ground)),
    ),
    drill(
        "stale read after update",
        "A second process reads what the first has just been told is written, strongly and by the writer's token.",
        |ground| boxed(stale_read(ground)),
    ),
    drill(
        "cache invalidation lag",
        "A process whose news of the log come late and fail answers cached reads while another one writes.",
        |ground| boxed(cache_lag(ground)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> Verdict<'a> {
    Box::pin(run)
}

/// A field that a drill changes: one with many values, if there is one.
fn field(ground: &Ground) -> Result<&Property> {
    let fields = &action(ground.resource()?, "update")?.input;
    let rank = |property: &&Property| match property.form {
        Form::Value(Type::Text) => 0,
        Form::Value(Type::Int | Type::Float | Type::Time) => 1,
        Form::Value(Type::Bytes | Type::Json) | Form::Any => 2,
        _ => 3,
    };
    let name = &ground.plot.resource;
    let reason = || Skipped(format!("{name} has no field that `update` and `patch` can change"));
    fields.iter().min_by_key(rank).ok_or_else(|| reason().into())
}

/// The field with a value for a write that makes this version. Values of successive versions differ, also where the type
/// has only two; a write that changes nothing writes nothing and would show nothing.
fn change(ground: &Ground, version: i64, number: i64) -> Result<Map<String, Json>> {
    let field = field(ground)?;
    let value = specimen::of_property(field, 2 * number + version % 2).context("a field without values")?;
    Ok(Map::from_iter([(field.name.clone(), value)]))
}

/// The same, as the input of a patch.
fn patched(ground: &Ground, version: i64, number: i64) -> Result<Json> {
    change(ground, version, number).map(Json::Object)
}

/// What creates the row of that number.
fn creation(ground: &Ground, number: i64) -> Result<Json> {
    let resource = ground.resource()?;
    let key = resource
        .key
        .iter()
        .map(|(name, kind)| (name.clone(), specimen::value(name, *kind, number).to_json()));
    let given = key.chain(change(ground, 1, number)?).collect::<Map<String, Json>>();
    Ok(input(action(resource, "create")?, number, given))
}

async fn create(ground: &Ground, visitor: &Visitor, number: i64) -> Result<()> {
    visitor.done(&ground.action("create"), &[], creation(ground, number)?, None).await.map(drop)
}

async fn retry_ambiguity(ground: &Ground) -> Result<()> {
    let store = ground.lab.open().await?;
    let sound = ground.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let faulty = ground.faulty(store.clone());
    let visitor = ground.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    let (mut random, mut records) = (ground.random(), 0);
    for row in ground.rounds() {
        let (create, patch) = (ground.action("create"), ground.action("patch"));
        let made = creation(ground, row)?;
        insist(&visitor, &format!("create-{row}"), &create, &[], &made, None).await?;
        let key = ground.key(row)?;
        let changes = 1 + i64::try_from(random.below(3))?;
        for number in 1..=changes {
            let (id, changed) = (format!("patch-{row}-{number}"), patched(ground, number + 1, row)?);
            let first = insist(&visitor, &id, &patch, &key, &changed, Some(number)).await?;
            let again = sound.call_as(&id, &patch, &key, changed.clone(), Some(number)).await?;
            same("the answer to a repetition", &again.body, &first.body)?;
        }
        records += 1 + usize::try_from(changes)?;
        let shown = sound.shown(&ground.resource()?.name, &key, &["version"]).await?;
        same("the version after one create and its patches", &shown, &vec![json!(1 + changes)])?;
    }
    let reused = sound.call_as("create-1", &ground.action("create"), &[], creation(ground, 100)?, None).await;
    same("another request", &reused.err().map(|refusal| refusal.code), &Some(Code::OperationReused))?;
    same("records in the log", &sound.client()?.exact_log(records).await?.len(), &records)
}

async fn overwrite_race(ground: &Ground) -> Result<()> {
    let visitor = ground.house().await?;
    let (patch, update) = (ground.action("patch"), ground.action("update"));
    create(ground, &visitor, 1).await?;
    let key = ground.key(1)?;
    let mut version = 1;
    for round in ground.rounds() {
        let callers: Vec<_> = (0..4_i64)
            .map(|caller| {
                let changed = patched(ground, version + 1, 5 * round + caller)?;
                Ok(visitor.start(&patch, &key, changed, Some(version)))
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
            let changed = change(ground, version + 1, 5 * round + 4)?;
            let (late, expected) = if name == &patch {
                (Json::Object(changed), Expected::Any)
            } else {
                let whole = input(action(ground.resource()?, "update")?, 5 * round + 4, changed);
                (whole, Expected::Version(version))
            };
            let request = Visitor::request(name, &key, &late, Some(expected));
            let Some(plan) = visitor.house.plan(&visitor.tenant, request).await? else { continue };
            let rival = patched(ground, version + 1, 200 + round)?;
            visitor.done(&patch, &key, rival, Some(version)).await?;
            let before = visitor.shown(&ground.resource()?.name, &key, &["version"]).await?;
            let rival_wrote = before != vec![json!(version)];
            version = before[0].as_i64().context("a row without a version")?;
            let outcome = visitor.house.store().commit(&plan).await?;
            let refused = matches!(outcome, Commit::Refused(_));
            ensure!(refused || !rival_wrote, "{name} was written over what it had not read: {outcome:?}");
            version += i64::from(!refused);
        }
    }
    let shown = visitor.shown(&ground.resource()?.name, &key, &["version"]).await?;
    same("the version after all writes that were acknowledged", &shown, &vec![json!(version)])?;
    let records = whole_log(visitor.house.store().as_ref()).await?.len();
    ensure!(i64::try_from(records)? <= version, "{records} records of {version} versions");
    Ok(())
}

async fn stale_read(ground: &Ground) -> Result<()> {
    let store = ground.lab.open().await?;
    let writer = ground.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let reader = ground.house_over(store, Arc::new(SystemClock)).await?;
    reader.house.start_followers();
    create(ground, &writer, 1).await?;
    let (key, read) = (ground.key(1)?, ground.action("read"));
    for version in ground.rounds() {
        let changed = patched(ground, version + 1, version)?;
        let written = writer.done(&ground.action("patch"), &key, changed, Some(version)).await?;
        let strong = reader.done(&read, &key, json!({}), None).await?;
        same("a strong read in another process", &strong.version, &Some(version + 1))?;
        let token = written.token.context("a write has no token")?;
        let cached = json!({"consistency": "cached", "after": token});
        let seen = reader.done(&read, &key, cached, None).await?;
        same("a cached read with the writer's token", &seen.version, &Some(version + 1))?;
    }
    Ok(())
}

async fn cache_lag(ground: &Ground) -> Result<()> {
    let store = ground.lab.open().await?;
    let writer = ground.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let faulty = ground.faulty(store);
    let reader = ground.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    create(ground, &writer, 1).await?;
    reader.house.start_followers();
    let at_most = Duration::from_millis(5);
    faulty.set_odds(Odds { delay: 0.7, delay_at_most: at_most, unavailable: 0.2, ..Odds::default() });
    let (key, read) = (ground.key(1)?, ground.action("read"));
    let mut newest = 0;
    for version in ground.rounds() {
        let changed = patched(ground, version + 1, version)?;
        let written = writer.done(&ground.action("patch"), &key, changed, Some(version)).await?;
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
    same("the newest version that was seen", &newest, &(i64::try_from(ground.rounds)? + 1))?;
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
