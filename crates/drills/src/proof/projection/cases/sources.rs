//! Views of whatever a dashboard counts: edges, comments, seats, bookings, jobs, definitions and effects. Whatever happens to
//! the source, by callers or by the house itself, the view is what its rows say.

mod limits;
mod totals;

use super::*;

pub(super) use self::limits::*;
pub(super) use self::totals::*;

use statehouse_store::log::partition_of;
use statehouse_store::{Clock, ManualClock, Time, Value};

use crate::harness::fake_targets::{FakeTargets, TargetBehavior};

const MINUTE: Duration = Duration::from_secs(60);

/// A view that counts, and what it has to be.
#[derive(Clone, Copy)]
struct ViewExpectation {
    view: &'static str,
    table: &'static str,
    by: &'static [&'static str],
    sum: &'static [&'static str],
    /// Of which the least and the greatest are wanted.
    ends: &'static [&'static str],
    counts: fn(&Row) -> bool,
    /// What is shown for a value of a group.
    shown: fn(&str, &Row) -> Json,
}

fn as_it_is(column: &str, row: &Row) -> Json {
    row.get(column).map(Value::to_json).unwrap_or_default()
}

/// The points of profiles, by team.
const POINTS: ViewExpectation = ViewExpectation {
    view: "points",
    table: "profiles",
    by: &["team"],
    sum: &["points"],
    ends: &["points"],
    counts: |row| row.text("status") == Some("ACTIVE"),
    shown: as_it_is,
};

impl ViewExpectation {
    /// The view as a blueprint declares it.
    fn declared(&self, of: &str) -> String {
        let ViewExpectation { view, by, sum, ends, .. } = self;
        format!(
            "[view.{view}]\nof = \"{of}\"\ncount = true\ntotal = {}\ngroup_by = {by:?}\nsum = {sum:?}\nmin = {ends:?}\nmax = {ends:?}\n",
            !by.is_empty()
        )
    }

    /// What the view shows, by group.
    async fn found(&self, client: &TenantClient) -> Result<BTreeMap<String, Json>> {
        let (mut found, mut input) = (BTreeMap::new(), json!({"limit": 3}));
        loop {
            let page = client.done(&format!("{}.list", self.view), &[], input.clone(), None).await?;
            for row in page.body.as_array().into_iter().flatten() {
                let group: Vec<&Json> = self.by.iter().map(|name| &row[*name]).collect();
                let sums = self.sum.iter().map(|name| format!("sum_{name}"));
                let ends = self.ends.iter().flat_map(|name| [format!("min_{name}"), format!("max_{name}")]);
                let numbers: Vec<&Json> =
                    ["count".to_owned()].into_iter().chain(sums).chain(ends).map(|name| &row[name]).collect();
                let group = json!(group).to_string();
                ensure!(found.insert(group.clone(), json!(numbers)).is_none(), "{group} is listed twice");
            }
            let Some(next) = page.next else { return Ok(found) };
            input["cursor"] = next.into();
        }
    }

    /// Requires the total over all groups to be what the groups add up to.
    async fn total_is_true(&self, client: &TenantClient, groups: &BTreeMap<String, Json>) -> Result<()> {
        if self.by.is_empty() {
            return Ok(());
        }
        let total = client.done(&format!("{}_total.read", self.view), &[], json!({}), None).await?;
        let sums = self.sum.iter().map(|name| format!("sum_{name}"));
        for (index, name) in ["count".to_owned()].into_iter().chain(sums).enumerate() {
            let sum: i64 = groups.values().filter_map(|numbers| numbers[index].as_i64()).sum();
            same(&format!("{name} of all groups of {}", self.view), &total.body[&name], &json!(sum))?;
        }
        Ok(())
    }

    /// The same, from the rows.
    async fn truth(&self, client: &TenantClient) -> Result<BTreeMap<String, Json>> {
        let table = client.table(self.table)?;
        let rows = scan(client.house.store().as_ref(), Scan::of(table, &client.tenant)).await?;
        let mut groups: BTreeMap<String, Vec<Row>> = BTreeMap::new();
        for row in rows.into_iter().filter(|row| (self.counts)(row)) {
            let group: Vec<Json> = self.by.iter().map(|name| (self.shown)(name, &row)).collect();
            groups.entry(json!(group).to_string()).or_default().push(row);
        }
        let numbers = |rows: &Vec<Row>| {
            let sum = |name: &&str| json!(rows.iter().filter_map(|row| row.int(name)).sum::<i64>());
            let ends = |name: &&str| {
                let mut values: Vec<&Value> =
                    rows.iter().filter_map(|row| row.get(name)).filter(|value| !value.is_null()).collect();
                values.sort_by(|a, b| a.compare(b).unwrap_or(std::cmp::Ordering::Equal));
                [values.first(), values.last()]
                    .map(|end| end.map(|value| value.to_json()).unwrap_or_default())
            };
            let sums = self.sum.iter().map(sum);
            let all = [json!(rows.len())].into_iter().chain(sums).chain(self.ends.iter().flat_map(ends));
            json!(all.collect::<Vec<_>>())
        };
        Ok(groups.iter().map(|(group, rows)| (group.clone(), numbers(rows))).collect())
    }
}

/// Views beside their sources, on a clock that stands until it is moved.
struct ViewFixture {
    fixture: ProjectionFixture,
    clock: ManualClock,
    shapes: Vec<ViewExpectation>,
    /// Rows in a step.
    step_rows: usize,
}

impl ViewFixture {
    async fn open(
        namespace: &dyn TestNamespace,
        sources: &str,
        views: &[(&str, ViewExpectation)],
    ) -> Result<ViewFixture> {
        let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
        let store = namespace.open_at(Arc::new(clock.clone())).await?;
        ViewFixture::over(store, clock, sources, views).await
    }

    async fn over(
        store: Arc<dyn Store>,
        clock: ManualClock,
        sources: &str,
        views: &[(&str, ViewExpectation)],
    ) -> Result<ViewFixture> {
        let shared: Arc<dyn Clock> = Arc::new(clock.clone());
        let client = TenantClient::over(store, &ViewFixture::blueprint(sources, views), shared).await?;
        ViewFixture::of(ProjectionFixture::of(client).await?, clock, views)
    }

    fn blueprint(sources: &str, views: &[(&str, ViewExpectation)]) -> String {
        let declared: String = views.iter().map(|(of, shape)| shape.declared(of)).collect();
        format!("[house]\nname = \"drill\"\n{sources}{declared}")
    }

    fn of(
        fixture: ProjectionFixture,
        clock: ManualClock,
        views: &[(&str, ViewExpectation)],
    ) -> Result<ViewFixture> {
        Ok(ViewFixture {
            fixture,
            clock,
            shapes: views.iter().map(|(_, shape)| *shape).collect(),
            step_rows: 1,
        })
    }

    fn client(&self) -> &TenantClient {
        &self.fixture.client
    }

    /// Does something that may be refused, but not fail.
    async fn tries(&self, action: &str, key: &[Value], input: Json) -> Result<Option<Json>> {
        let request = TenantClient::request(action, key, &input, None);
        match self.client().house.call(&self.client().tenant, request, Operation::default()).await {
            Ok(answer) => Ok(Some(answer.body)),
            Err(refusal) if refusal.code.is_conflict() || refusal.code == Code::NotFound => Ok(None),
            Err(refusal) => Err(refusal.into()),
        }
    }

    /// All that a worker of a source has to do, in all its shards.
    async fn sweep(&self, worker: &str, shards: u32) -> Result<()> {
        for _ in 0..3 {
            for shard in 0..shards {
                self.fixture.step_of(worker, shard, 5).await?;
            }
        }
        Ok(())
    }

    /// Requires all views to be what their sources say.
    async fn is_true(&self) -> Result<()> {
        for shape in &self.shapes {
            let (found, truth) = (shape.found(self.client()).await?, shape.truth(self.client()).await?);
            same(shape.view, &found, &truth)?;
            shape.total_is_true(self.client(), &truth).await?;
        }
        Ok(())
    }

    /// Requires the entries to be those of a build from nothing, and the views to be the truth.
    async fn equals_a_rebuild(&self) -> Result<()> {
        self.fixture.drain_by(self.step_rows).await?;
        self.is_true().await?;
        for projection in self.client().house.projections() {
            let live = projection.state().await?.live.context("nothing is live")?.number;
            let before = projection.digest(live).await?;
            ensure!(projection.rebuild().await?, "no build could be begun");
            self.fixture.drain_by(self.step_rows).await?;
            let state = projection.state().await?;
            let now = state.live.context("nothing is live")?.number;
            same("the live generation", &now, &(live + 1))?;
            same("whether the build is the source's", &state.verified, &Some(true))?;
            same("the digest", &projection.digest(now).await?, &before)?;
        }
        self.is_true().await
    }
}

/// One of several, by chance.
fn one_of<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[usize::try_from(random.below(of.len() as u64)).unwrap_or(0)]
}

fn number(random: &mut Random, below: u64) -> i64 {
    i64::try_from(random.below(below)).unwrap_or(0)
}

const FOLLOWS: &str = "[relation.follow]\nfrom = { follower = \"int\" }\nto = { followee = \"int\" }\n\
                       fields = { weight = \"int?\" }\n";
const FANS: ViewExpectation = ViewExpectation {
    view: "fans",
    table: "follows",
    by: &["followee"],
    sum: &["weight"],
    ends: &["weight"],
    counts: |row| row.time("since").is_some(),
    shown: as_it_is,
};

pub(super) async fn edges_are_counted_while_they_are_there(namespace: &dyn TestNamespace) -> Result<()> {
    let board = ViewFixture::open(namespace, FOLLOWS, &[("follow", FANS)]).await?;
    let mut random = Random::seeded(3);
    for round in 0..24 {
        let key = [number(&mut random, 3).into(), number(&mut random, 2).into()];
        match random.below(4) {
            0 | 1 => drop(board.tries("follow.add", &key, json!({"weight": random.below(9)})).await?),
            2 => drop(board.tries("follow.add", &key, json!({})).await?),
            _ => drop(board.tries("follow.remove", &key, json!({})).await?),
        }
        if round % 8 == 0 {
            board.fixture.work(1).await?;
        }
    }
    board.equals_a_rebuild().await?;
    // And none is left when none is there.
    for follower in 0..3 {
        for followee in 0..2 {
            board.tries("follow.remove", &[follower.into(), followee.into()], json!({})).await?;
        }
    }
    board.fixture.drain().await?;
    same("the groups", &FANS.found(board.client()).await?, &BTreeMap::new())
}

const COMMENTS: &str = "[thread.comment]\nparent = { post_id = \"int\" }\nfields = { author = \"text\", stars = \"int?\" }\n\
     require_version = false\n";
const STARS: ViewExpectation = ViewExpectation {
    view: "stars",
    table: "comments",
    by: &["author"],
    sum: &["stars"],
    ends: &["stars"],
    counts: |row| row.text("status") == Some("VISIBLE"),
    shown: as_it_is,
};
const MODERATED: ViewExpectation = ViewExpectation {
    view: "moderated",
    table: "comments",
    by: &["post_id", "status"],
    sum: &[],
    ends: &[],
    counts: |_| true,
    shown: as_it_is,
};

pub(super) async fn comments_are_counted_while_they_are_visible(namespace: &dyn TestNamespace) -> Result<()> {
    let board = ViewFixture::open(namespace, COMMENTS, &[("comment", STARS), ("comment", MODERATED)]).await?;
    let mut random = Random::seeded(4);
    for round in 0..24 {
        let (post, name) = (number(&mut random, 2), format!("c{}", random.below(4)));
        let key = [post.into(), name.as_str().into()];
        let stars = random.below(6);
        match random.below(6) {
            0..=2 => {
                let author = one_of(&mut random, &["ann", "bob"]);
                let input = json!({"post_id": post, "comment_id": name, "author": author, "stars": stars});
                board.tries("comment.append", &[], input).await?;
            }
            3 => drop(board.tries("comment.edit", &key, json!({"stars": stars})).await?),
            4 => {
                let action = one_of(&mut random, &["comment.hide", "comment.restore"]);
                board.tries(action, &key, json!({})).await?;
            }
            _ => drop(board.tries("comment.remove", &key, json!({})).await?),
        }
        if round % 8 == 0 {
            board.fixture.work(1).await?;
        }
    }
    board.equals_a_rebuild().await
}

const SEATS: &str = "[booking.seat]\nkey = { event_id = \"text\", seat_no = \"int\" }\nfields = { price = \"int?\" }\n\
                     hold_for = \"10m\"\nunits_max = 2\nshards = 2\nrefundable = true\n";
const BY_STATE: ViewExpectation = ViewExpectation {
    view: "seats_by_state",
    table: "seats",
    by: &["state"],
    sum: &["price"],
    ends: &["price"],
    counts: |_| true,
    shown: as_it_is,
};
const BOOKINGS: ViewExpectation = ViewExpectation {
    view: "bookings_by_state",
    table: "seat_bookings",
    by: &["state"],
    sum: &[],
    ends: &["expires_at"],
    counts: |_| true,
    shown: as_it_is,
};

pub(super) async fn seats_and_bookings_are_counted_by_state(namespace: &dyn TestNamespace) -> Result<()> {
    let views = [("seat", BY_STATE), ("seat_booking", BOOKINGS)];
    let board = ViewFixture::open(namespace, SEATS, &views).await?;
    let mut random = Random::seeded(6);
    let (mut held, mut taken_over) = (Vec::<String>::new(), 0);
    for seat in 1..=4 {
        let input = json!({"event_id": "gala", "seat_no": seat, "price": 10 * seat});
        board.client().done("seat.create", &[], input, None).await?;
    }
    for round in 0..30 {
        let booking = format!("b{round}");
        let old = held.get(usize::try_from(random.below(held.len().max(1) as u64)).unwrap_or(0)).cloned();
        let old: [Value; 1] = [old.unwrap_or_default().into()];
        match random.below(7) {
            0..=2 => {
                let wanted: Vec<i64> = match random.below(2) {
                    0 => vec![number(&mut random, 4) + 1],
                    _ => vec![2, 3],
                };
                let input =
                    json!({"booking_id": booking, "event_id": "gala", "seat_no": wanted, "holder": "ann"});
                if board.tries("seat_booking.hold", &[], input).await?.is_some() {
                    held.push(booking);
                }
            }
            3 => drop(board.tries("seat_booking.confirm", &old, json!({})).await?),
            4 => drop(board.tries("seat_booking.cancel", &old, json!({})).await?),
            5 => drop(board.tries("seat_booking.extend", &old, json!({})).await?),
            _ => {
                // Everybody's time is up. Some are swept, of others the seats are taken over.
                board.clock.advance(11 * MINUTE);
                if random.below(2) == 0 {
                    board.sweep("seat_booking.expire", 2).await?;
                } else {
                    let input =
                        json!({"booking_id": booking, "event_id": "gala", "seat_no": [3], "holder": "bob"});
                    taken_over += usize::from(board.tries("seat_booking.hold", &[], input).await?.is_some());
                }
            }
        }
        if round % 8 == 0 {
            board.fixture.work(1).await?;
        }
    }
    ensure!(held.len() > 3 && taken_over > 0, "{} held, {taken_over} taken over", held.len());
    board.equals_a_rebuild().await
}

const JOBS: &str = "[schedule.job]\nlease = \"1m\"\nmax_attempts = 2\nbackoff = \"1s\"\nkeep = \"1h\"\nkeep_failed = \"2h\"\n\
                    priorities = 3\nshards = 2\n";
const BACKLOG: ViewExpectation = ViewExpectation {
    view: "backlog",
    table: "jobs",
    by: &["queue", "state"],
    sum: &["priority"],
    ends: &["not_before"],
    counts: |_| true,
    shown: |column, row| match row.text(column) {
        Some("PENDING" | "IN_PROGRESS" | "RETRYING") => json!("LIVE"),
        _ => as_it_is(column, row),
    },
};
const DEFINED: ViewExpectation = ViewExpectation {
    view: "defined",
    table: "job_definitions",
    by: &["queue"],
    sum: &["made"],
    ends: &[],
    counts: |row| row.text("status") != Some("DELETED"),
    shown: as_it_is,
};

/// Claims what there is, and returns ids and attempts.
async fn claim(board: &ViewFixture, queue: &str) -> Result<Vec<(String, i64)>> {
    let input = json!({"worker": "ann", "limit": 2});
    let claimed = board.tries("job_queue.claim", &[queue.into()], input).await?;
    let jobs = claimed.as_ref().and_then(Json::as_array).cloned().unwrap_or_default();
    let job = |job: &Json| Some((job["job_id"].as_str()?.to_owned(), job["attempt"].as_i64()?));
    Ok(jobs.iter().filter_map(job).collect())
}

pub(super) async fn jobs_are_counted_as_live_until_they_are_over(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let board = ViewFixture::open(namespace, JOBS, &[("job", BACKLOG), ("job_definition", DEFINED)]).await?;
    let mut random = Random::seeded(8);
    let mut claimed: Vec<(String, i64)> = Vec::new();
    let mut done = BTreeMap::<&str, usize>::new();
    for round in 0..44 {
        let job: [Value; 1] = [format!("j{}", random.below(6)).into()];
        let queue = one_of(&mut random, &["default", "mail"]);
        let what = random.below(11);
        let held = if claimed.is_empty() { ("none".to_owned(), 1) } else { claimed.remove(0) };
        let (its, attempt): ([Value; 1], i64) = ([held.0.as_str().into()], held.1);
        match what {
            0..=2 => {
                // Ids come again once they are forgotten; some stand in line, some take a key over.
                let mut input =
                    json!({"job_id": job[0].to_json(), "queue": queue, "priority": random.below(3)});
                match random.below(4) {
                    0 => input["order_key"] = json!("one"),
                    1 => input["unique_key"] = json!("only"),
                    _ => {}
                }
                let enqueued = board.tries("job.enqueue", &[], input).await?;
                *done.entry("enqueued").or_default() += usize::from(enqueued.is_some());
            }
            3 | 4 => {
                claimed.push(held);
                let found = claim(&board, queue).await?;
                *done.entry("claimed").or_default() += found.len();
                claimed.extend(found);
            }
            5 => drop(board.tries("job.complete", &its, json!({"attempt": attempt})).await?),
            6 => drop(board.tries("job.fail", &its, json!({"attempt": attempt, "error": "no"})).await?),
            7 => drop(board.tries("job.cancel", &job, json!({})).await?),
            8 => drop(board.tries("job.replay", &job, json!({})).await?),
            9 => {
                let (name, when) = ([one_of(&mut random, &["d1", "d2"]).into()], json!({"every_ms": 60_000}));
                match random.below(4) {
                    0 => drop(board.tries("job_definition.pause", &name, json!({})).await?),
                    1 => drop(board.tries("job_definition.delete", &name, json!({})).await?),
                    _ => {
                        let input = json!({"when": when, "queue": queue});
                        board.tries("job_definition.create", &name, input).await?;
                    }
                }
            }
            _ => {
                claimed.push(held);
                board.clock.advance(one_of(&mut random, &[MINUTE, MINUTE, 130 * MINUTE]));
                board.sweep("job.make", 2).await?;
                board.sweep("job.forget", 2).await?;
            }
        }
        if round % 8 == 0 {
            board.fixture.work(1).await?;
        }
    }
    // What is over is forgotten, and counts no more.
    let kept = BACKLOG.truth(board.client()).await?;
    ensure!(done.values().all(|times| *times > 2) && !kept.is_empty(), "{done:?}, {kept:?}");
    board.equals_a_rebuild().await?;
    board.clock.advance(130 * MINUTE);
    board.sweep("job.forget", 2).await?;
    board.fixture.drain().await?;
    board.is_true().await?;
    // One cannot ask for those that were claimed, and is told why.
    let running = ["default".into(), "IN_PROGRESS".into()];
    board.client().refused("backlog.read", &running, json!({}), None, Code::InvalidInput).await?;
    board.client().done("backlog.read", &["default".into(), "LIVE".into()], json!({}), None).await.map(drop)
}

const EFFECTS: &str = "[effect.charge]\nurl = \"https://psp.example/charges\"\nback_off = { min = \"1s\", max = \"2s\" }\n\
                       max_attempts = 2\nlease = \"1m\"\nkeep = \"1h\"\nbreaker = { failures = 100 }\n";
const CHARGES: ViewExpectation = ViewExpectation {
    view: "charges_by_status",
    table: "charges",
    by: &["target", "status"],
    sum: &["tries"],
    ends: &["attempt"],
    counts: |_| true,
    shown: as_it_is,
};

pub(super) async fn effects_are_counted_by_status(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    // Some are taken, some rejected, of some it is never known.
    let script = FakeTargets::of(|_, number| match number % 5 {
        0 | 1 => TargetBehavior::status(200),
        2 => TargetBehavior::status(503),
        3 => TargetBehavior::status(400),
        _ => TargetBehavior::Loses,
    });
    let views = [("charge", CHARGES)];
    let (blueprint, shared) = (ViewFixture::blueprint(EFFECTS, &views), Arc::new(clock.clone()));
    let client = TenantClient::before(store, &blueprint, shared, script.egress(&[])).await?;
    let board = ViewFixture::of(ProjectionFixture::of(client).await?, clock, &views)?;
    for round in 0..9 {
        let input = json!({"key": format!("order-{round}"), "body": {"n": round}});
        board.client().done("charge.send", &[], input, None).await?;
        let key = [format!("order-{}", round / 2).into()];
        match round % 4 {
            0 => drop(board.tries("charge.cancel", &key, json!({})).await?),
            1 => drop(board.tries("charge.replay", &key, json!({})).await?),
            _ => {
                board.clock.advance(Duration::from_secs(3));
                board.sweep("charge.send", 1).await?;
            }
        }
        board.fixture.work(1).await?;
    }
    let statuses = CHARGES.truth(board.client()).await?;
    ensure!(statuses.len() > 2, "{statuses:?}");
    board.equals_a_rebuild().await?;
    board.clock.advance(61 * MINUTE);
    board.sweep("charge.send", 1).await?;
    let left = CHARGES.truth(board.client()).await?;
    let rows =
        |groups: &BTreeMap<String, Json>| groups.values().filter_map(|group| group[0].as_i64()).sum::<i64>();
    ensure!(rows(&left) < rows(&statuses), "nothing was forgotten: {left:?}");
    board.fixture.drain().await?;
    board.is_true().await
}

/// Two processes: one that can be held up, and another.
async fn two(
    namespace: &dyn TestNamespace,
    sources: &str,
    views: &[(&str, ViewExpectation)],
) -> Result<(Arc<ViewFixture>, ViewFixture, Arc<LateReads>)> {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let (store, late) = (namespace.open_at(Arc::new(clock.clone())).await?, Arc::new(LateReads::default()));
    let slow = Arc::new(StoreProxy::new(store.clone(), late.clone()));
    let sleeper = ViewFixture::over(slow, clock.clone(), sources, views).await?;
    let other = ViewFixture::over(store, clock, sources, views).await?;
    Ok((Arc::new(sleeper), other, late))
}

/// A name whose records stand in another partition than the first, which the sleeper reads itself; if there is another.
fn elsewhere(board: &ViewFixture, resource: &str, prefix: &str) -> String {
    let (tenant, partitions) = (&board.client().tenant, board.client().house.store().partitions());
    let names = (0..).map(|number| format!("{prefix}{number}"));
    let mut apart =
        names.filter(|name| partitions == 1 || partition_of(tenant, resource, name, partitions) > 0);
    apart.next().unwrap_or_default()
}

/// Lets the sleeper scan, and holds it up when it has looked.
async fn asleep(
    sleeper: &Arc<ViewFixture>,
    late: &LateReads,
    view: &'static str,
    entries: &'static str,
) -> (Arc<PlanPause>, tokio::task::JoinHandle<Result<(), StoreError>>) {
    let gate = late.hold_back(entries);
    let sleeper = sleeper.clone();
    let step = tokio::spawn(async move { sleeper.fixture.step(view, 0, 1).await });
    gate.arrived.notified().await;
    (gate, step)
}

pub(super) async fn what_was_forgotten_since_a_look_does_not_come_back(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let views = [("job", BACKLOG)];
    let (sleeper, other, late) = two(namespace, JOBS, &views).await?;
    let job = elsewhere(&other, "job", "j");
    other.client().done("job.enqueue", &[], json!({"job_id": job}), None).await?;
    other.fixture.drain().await?;
    ensure!(other.fixture.projection()?.rebuild().await?, "no build could be begun");
    let (gate, step) = asleep(&sleeper, &late, "backlog", "backlog_entries").await;
    // The new generation has heard nothing of the job yet when the job is gone already.
    other.client().done("job.cancel", &[job.as_str().into()], json!({}), None).await?;
    other.clock.advance(61 * MINUTE);
    other.sweep("job.forget", 2).await?;
    other.fixture.drain().await?;
    gate.go_on.notify_one();
    step.await??;
    other.equals_a_rebuild().await?;
    same("what is counted", &BACKLOG.found(other.client()).await?, &BTreeMap::new())?;
    // Under its name another one may come.
    other.client().done("job.enqueue", &[], json!({"job_id": job}), None).await?;
    other.equals_a_rebuild().await?;
    same("the groups", &BACKLOG.found(other.client()).await?.len(), &1)
}

pub(super) async fn what_changed_back_since_a_look_stays_so(namespace: &dyn TestNamespace) -> Result<()> {
    let views = [("seat", BY_STATE)];
    let (sleeper, other, late) = two(namespace, SEATS, &views).await?;
    for seat in 1..=4 {
        let input = json!({"event_id": "gala", "seat_no": seat, "price": 5});
        other.client().done("seat.create", &[], input, None).await?;
    }
    other.fixture.drain().await?;
    let hold = async |booking: &str, seat: i64| {
        let input = json!({"booking_id": booking, "event_id": "gala", "seat_no": [seat], "holder": "ann"});
        other.client().done("seat_booking.hold", &[], input, None).await
    };
    let cancel = async |booking: &str| {
        other.client().done("seat_booking.cancel", &[booking.into()], json!({}), None).await
    };
    ensure!(other.fixture.projection()?.rebuild().await?, "no build could be begun");
    // The log has brought the last seat to the new generation before the scan comes to it.
    hold("early", 4).await?;
    cancel("early").await?;
    for _ in 0..3 {
        for shard in 0..other.client().house.store().partitions() {
            other.fixture.step("seats_by_state", shard, 1).await?;
        }
    }
    // The sleeper has the first record for itself, if it stands in its partition, and sees the last seat held when it scans.
    let booking = elsewhere(&other, "seat_booking", "b");
    hold("first", 1).await?;
    hold(&booking, 4).await?;
    let (gate, step) = asleep(&sleeper, &late, "seats_by_state", "seats_by_state_entries").await;
    // It is given up, and the log finds it as it was.
    cancel(&booking).await?;
    other.fixture.drain().await?;
    gate.go_on.notify_one();
    step.await??;
    other.fixture.drain().await?;
    other.is_true().await?;
    other.equals_a_rebuild().await
}

pub(super) async fn a_record_of_many_rows_is_done_in_pieces(namespace: &dyn TestNamespace) -> Result<()> {
    let sources = format!("{}{SOURCE}", SEATS.replace("units_max = 2", "units_max = 40"));
    let sources = sources.replace("[house]\nname = \"drill\"\n", "");
    let board = ViewFixture::open(namespace, &sources, &[("seat", BY_STATE), ("profile", POINTS)]).await?;
    let board = ViewFixture { step_rows: 50, ..board };
    let create = |number: i64| {
        let input = json!({"event_id": "gala", "seat_no": number, "price": number});
        TenantClient::request("seat.create", &[], &input, None)
    };
    let house = &board.client().house;
    let tenant = &board.client().tenant;
    let batch = house.batch(tenant, (1..=48).map(create).collect(), Operation::default()).await;
    batch?;
    let profile = |id: i64| {
        let input = json!({"id": id, "team": format!("t{}", id % 25), "points": id});
        TenantClient::request("profile.create", &[], &input, None)
    };
    let batch = house.batch(tenant, (1..=49).map(profile).collect(), Operation::default()).await;
    batch?;
    board.fixture.drain_by(50).await?;
    board.is_true().await?;
    let wanted: Vec<i64> = (1..=40).collect();
    let input = json!({"booking_id": "b", "event_id": "gala", "seat_no": wanted, "holder": "ann"});
    board.client().done("seat_booking.hold", &[], input, None).await?;
    board.fixture.drain_by(50).await?;
    board.is_true().await?;
    board.client().done("seat_booking.confirm", &["b".into()], json!({}), None).await?;
    board.equals_a_rebuild().await?;
    for projection in house.projections() {
        let live = projection.state().await?.live.context("nothing is live")?.number;
        same("what is parked", &projection.group(live).parked(tenant).await?.len(), &0)?;
    }
    Ok(())
}
