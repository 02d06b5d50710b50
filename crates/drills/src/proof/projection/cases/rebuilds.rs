//! Builds beside the live generation: what is read, written, overtaken and switched meanwhile.

use super::*;

pub(super) async fn a_rebuild_while_writing_gives_the_truth(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    for id in 0..6 {
        fixture.put(id, NAMES[id as usize % 4], id).await?;
    }
    fixture.drain().await?;
    let projection = fixture.projection()?;
    ensure!(projection.rebuild().await?, "no build could be begun");
    ensure!(!projection.rebuild().await?, "two builds were begun");
    let mut random = Random::seeded(5);
    let mut written = 0;
    // Rows that were scanned already and rows that were not change, go and come, while the scan goes on.
    while fixture.state().await?.building.is_some() && written < 20 {
        let id = i64::try_from(random.below(9)).unwrap_or(0);
        let team = NAMES[usize::try_from(random.below(4)).unwrap_or(0)];
        match random.below(5) {
            0 if id < 6 => drop(fixture.delete(id).await),
            1 if id < 6 => drop(fixture.any_version("profile.restore", id, json!({})).await),
            _ => drop(fixture.put(id, team, id * 3 + written).await),
        }
        written += 1;
        fixture.work(1).await?;
    }
    ensure!(written > 3, "the rebuild was over after {written} writes");
    fixture.drain().await?;
    same("the live generation", &fixture.live().await?, &2)?;
    fixture.is_true().await?;
    fixture.equals_a_rebuild().await
}

pub(super) async fn readers_never_see_half_a_generation(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    for id in 0..8 {
        fixture.put(id, NAMES[id as usize % 4], id).await?;
    }
    fixture.drain().await?;
    let (client, over) = (fixture.client.clone(), Arc::new(AtomicBool::new(false)));
    let reader = tokio::spawn({
        let over = over.clone();
        async move {
            let (mut lists, mut sums) = (0, BTreeSet::new());
            while !over.load(Ordering::SeqCst) {
                let teams = teams(&client).await?;
                sums.insert(teams.values().filter_map(|team| team[0].as_i64()).sum::<i64>());
                lists += 1;
            }
            Ok::<_, anyhow::Error>((lists, sums))
        }
    });
    let projection = fixture.projection()?;
    for round in 0..2 {
        projection.rebuild().await?;
        for id in 0..3 {
            // Other numbers, the same teams: whatever a reader lists has eight members.
            fixture.put(id, NAMES[id as usize % 4], 100 * (round + 1) + id).await?;
            fixture.work(1).await?;
        }
        fixture.drain().await?;
    }
    over.store(true, Ordering::SeqCst);
    let (lists, sums) = reader.await??;
    ensure!(lists > 0, "no reader read");
    same("how many members readers have seen", &sums, &BTreeSet::from([8]))?;
    same("the live generation", &fixture.live().await?, &3)?;
    fixture.is_true().await
}

pub(super) async fn a_page_goes_on_in_its_generation(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    for id in 0..4 {
        fixture.put(id, NAMES[id as usize], id).await?;
    }
    fixture.drain().await?;
    let first = fixture.client.done("teams.list", &[], json!({"limit": 2}), None).await?;
    let cursor = first.next.clone().context("there is no second page")?;
    let projection = fixture.projection()?;
    projection.rebuild().await?;
    fixture.drain().await?;
    let rest = fixture.client.done("teams.list", &[], json!({"limit": 9, "cursor": cursor}), None).await?;
    for row in first.body.as_array().into_iter().chain(rest.body.as_array()).flatten() {
        same("the generation", &row["generation"], &json!(1))?;
    }
    same("the rest", &rest.body.as_array().map(Vec::len), &Some(2))?;
    // Once that generation is gone, the reader has to begin anew.
    ensure!(projection.drop_previous().await?, "there is none to drop");
    fixture.drain().await?;
    let input = json!({"limit": 9, "cursor": cursor});
    fixture.client.refused("teams.list", &[], input, None, Code::InvalidInput).await?;
    for bad in ["x", "1", "1.x", ".", "99.x"] {
        fixture.client.refused("teams.list", &[], json!({"cursor": bad}), None, Code::InvalidInput).await?;
    }
    Ok(())
}

pub(super) async fn what_a_scan_has_read_before_does_not_come_back(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (store, slow, late) = LateReads::over(namespace).await?;
    let fixture = ProjectionFixture::over(slow, TEAMS).await?;
    for id in 0..6 {
        fixture.put(id, "red", id + 1).await?;
    }
    fixture.drain().await?;
    let projection = fixture.projection()?;
    let table = fixture.client.table("profiles")?.clone();
    let before = scan(store.as_ref(), Scan::all(&table)).await?;
    ensure!(projection.rebuild().await?, "no build could be begun");
    // Some go, some change, and the log has told the new generation so before the scan comes with what it had read.
    for id in 0..3 {
        fixture.delete(id).await?;
    }
    fixture.put(4, "blue", 40).await?;
    let generation = fixture.state().await?.building.context("nothing is being built")?.generation.number;
    let group = projection.group(generation);
    for _ in 0..200 {
        let standing = group.status().await?;
        let Some(ahead) = standing.iter().find(|one| one.records > 0) else { break };
        // The first shard would scan as well.
        ensure!(
            ahead.partition > 0 || standing.iter().all(|one| one.partition == 0 || one.records == 0),
            "{ahead:?}"
        );
        if ahead.partition == 0 {
            break;
        }
        fixture.step("teams", ahead.partition, 1).await?;
    }
    *late.rows.lock().unwrap_or_else(PoisonError::into_inner) = before;
    // Each step of the first shard scans a row and then reads on, so that both orders occur.
    fixture.drain().await?;
    ensure!(
        late.rows.lock().unwrap_or_else(PoisonError::into_inner).is_empty(),
        "the scan did not see them all"
    );
    same("the live generation", &fixture.live().await?, &2)?;
    fixture.is_true().await
}

pub(super) async fn a_scan_that_was_overtaken_counts_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (store, slow, late) = LateReads::over(namespace).await?;
    let sleeper = Arc::new(ProjectionFixture::over(slow, TEAMS).await?);
    let other = ProjectionFixture::over(store.clone(), TEAMS).await?;
    for id in 1..=2 {
        other.put(id, "red", id).await?;
    }
    other.drain().await?;
    let table = other.client.table("profiles")?.clone();
    let order: Vec<i64> =
        scan(store.as_ref(), Scan::all(&table)).await?.iter().filter_map(|row| row.int("id")).collect();
    // Of the first row the new generation has no entry yet; of the second one the log has brought an older version.
    for (known, id) in [(false, order[0]), (true, order[1])] {
        ensure!(other.projection()?.rebuild().await?, "no build could be begun");
        if known {
            other.put(id, "red", 20).await?;
            other.step("teams", 0, 1).await?;
            for shard in 1..store.partitions() {
                other.step("teams", shard, 1).await?;
            }
            // The log has its turn before the scan, one record at a time: the second of these is left for the scan.
            other.put(id, "red", 25).await?;
            other.put(id, "red", 30).await?;
        }
        let gate = late.hold_back("teams_entries");
        let scan = tokio::spawn({
            let sleeper = sleeper.clone();
            async move { sleeper.step("teams", 0, 1).await }
        });
        gate.arrived.notified().await;
        other.put(id, "blue", 40).await?;
        other.drain().await?;
        gate.go_on.notify_one();
        scan.await??;
        other.drain().await?;
        other.is_true().await?;
    }
    other.equals_a_rebuild().await
}

pub(super) async fn a_step_that_was_overtaken_takes_no_switch_back(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (store, slow, late) = LateReads::over(namespace).await?;
    let sleeper = Arc::new(ProjectionFixture::over(slow, TEAMS).await?);
    let other = ProjectionFixture::over(store.clone(), TEAMS).await?;
    other.put(1, "red", 1).await?;
    // Once while the first generation is begun, and once in the middle of a scan.
    for generation in [1, 2] {
        if generation == 2 {
            ensure!(other.projection()?.rebuild().await?, "no build could be begun");
        }
        let gate = late.hold_back("house_projections");
        let step = tokio::spawn({
            let sleeper = sleeper.clone();
            async move { sleeper.step("teams", 0, 1).await }
        });
        gate.arrived.notified().await;
        other.drain().await?;
        same("the live generation", &other.live().await?, &generation)?;
        gate.go_on.notify_one();
        step.await??;
        same("the live generation", &other.live().await?, &generation)?;
        other.is_true().await?;
    }
    Ok(())
}

pub(super) async fn a_build_that_differs_is_not_switched_to(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    for id in 0..4 {
        fixture.put(id, "red", id).await?;
    }
    fixture.drain().await?;
    let projection = fixture.projection()?;
    projection.rebuild().await?;
    let caught_up = |state: &ProjectionState| {
        state.building.as_ref().is_some_and(|building| building.phase == BuildPhase::CatchingUp)
    };
    for tries in 0.. {
        if caught_up(&fixture.state().await?) {
            break;
        }
        ensure!(tries < 100, "the scan does not end");
        fixture.step("teams", 0, 1).await?;
    }
    // A program deletes an entry behind the projector's back.
    let entries = fixture.client.table("teams_entries")?.clone();
    let store_client = fixture.client.store_client()?;
    store_client.apply(store_client.one(Step::delete(&entries, [2.into(), "1".into()]))).await?;
    fixture.drain().await?;
    let state = fixture.state().await?;
    same("the phase", &state.building.as_ref().map(|building| building.phase), &Some(BuildPhase::Differs))?;
    same("the live generation", &fixture.live().await?, &1)?;
    same("whether it is the source's", &state.verified, &Some(false))?;
    fixture.is_true().await?;
    // Another one begins anew, and the bad one is deleted.
    ensure!(projection.rebuild().await?, "no build could be begun");
    fixture.drain().await?;
    same("the live generation", &fixture.live().await?, &3)?;
    same("generations with rows", &generations(&fixture).await?, &BTreeSet::from([1, 3]))?;
    fixture.is_true().await
}

/// The generations that have rows.
async fn generations(fixture: &ProjectionFixture) -> Result<BTreeSet<i64>> {
    let mut found = BTreeSet::new();
    for name in ["teams", "teams_entries", "teams_order"] {
        let rows =
            scan(fixture.client.house.store().as_ref(), Scan::all(fixture.client.table(name)?)).await?;
        found.extend(rows.iter().filter_map(|row| row.int("generation")));
    }
    Ok(found)
}

pub(super) async fn readers_go_back_to_what_was_kept_up(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = ProjectionFixture::open(namespace, TEAMS).await?;
    for id in 0..4 {
        fixture.put(id, NAMES[id as usize], id).await?;
    }
    fixture.drain().await?;
    let projection = fixture.projection()?;
    ensure!(!projection.roll_back().await?, "there is nothing to go back to");
    projection.rebuild().await?;
    fixture.drain().await?;
    fixture.put(1, "red", 77).await?;
    fixture.drain().await?;
    ensure!(projection.roll_back().await?, "there is something to go back to");
    same("the live generation", &fixture.live().await?, &1)?;
    fixture.is_true().await?;
    fixture.put(2, "red", 78).await?;
    fixture.drain().await?;
    fixture.is_true().await?;
    // Dropped, nothing of it is left, and nothing of its progress.
    ensure!(projection.drop_previous().await?, "there is something to drop");
    ensure!(!projection.roll_back().await?, "it is gone");
    fixture.drain().await?;
    same("generations with rows", &generations(&fixture).await?, &BTreeSet::from([1]))?;
    let progress = fixture.client.table("house_progress")?;
    let rows = scan(fixture.client.house.store().as_ref(), Scan::all(progress)).await?;
    ensure!(rows.iter().all(|row| row.text("consumer") == Some("teams@1")), "{rows:?}");
    fixture.is_true().await
}

pub(super) async fn another_definition_is_built_beside_the_live_one(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let old = ProjectionFixture::over(store.clone(), TEAMS).await?;
    for id in 0..5 {
        old.put(id, NAMES[id as usize % 4], id).await?;
    }
    old.drain().await?;
    // Another version of the program, which orders nothing and groups by something else.
    let views = "[view.teams]\nof = \"profile\"\ngroup_by = [\"points\"]\ncount = true\n";
    let new = ProjectionFixture::over(store.clone(), views).await?;
    ensure!(new.projection()?.status().await?.outdated, "it is not said that the view is outdated");
    new.step("teams", 0, 1).await?;
    same("the live generation", &old.live().await?, &1)?;
    // Meanwhile the old one goes on, and is kept up by the old program.
    old.put(9, "red", 9).await?;
    old.work(1).await?;
    for _ in 0..500 {
        if new.live().await? == 2 {
            break;
        }
        new.work(1).await?;
    }
    new.drain().await?;
    same("the live generation", &new.live().await?, &2)?;
    let list = new.client.done("teams.list", &[], json!({}), None).await?.body;
    let points: BTreeSet<i64> =
        list.as_array().into_iter().flatten().filter_map(|row| row["points"].as_i64()).collect();
    same("the new groups", &points, &BTreeSet::from([0, 1, 2, 3, 4, 9]))?;
    // The old program does not build its own again as long as its generation is there.
    for _ in 0..5 {
        old.step("teams", 0, 1).await?;
    }
    same("the live generation", &new.live().await?, &2)?;
    same("what is being built", &new.state().await?.building, &None)
}
