//! Views at their limits: sums out of range, records that name more rows than a plan writes, sources that were given a field
//! meanwhile, and entries that are fought over. Each costs what it concerns, and nothing else stands still or is lost.

use super::*;

use std::sync::atomic::AtomicUsize;

use statehouse_store::log::{EventTemplate, partition_of};
use statehouse_store::{Address, Consistency};

/// What the live generations of a board have parked of a tenant, with the reasons.
async fn parked(board: &ViewFixture, client: &TenantClient) -> Result<Vec<String>> {
    let mut reasons = Vec::new();
    for projection in board.client().house.projections() {
        let live = projection.state().await?.live.context("nothing is live")?.number;
        let parked = projection.group(live).parked(&client.tenant).await?;
        reasons.extend(parked.into_iter().map(|one| one.reason));
    }
    Ok(reasons)
}

const ENORMOUS: i64 = 6_000_000_000_000_000_000;

pub(in crate::proof::projection) async fn a_sum_out_of_range_delays_no_other_source(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("a source waits for a sum to fit");
    let board = ViewFixture::open(namespace, SEATS, &[("seat", BY_STATE)]).await?;
    board.fixture.drain().await?;
    let own = board.client();
    let other = own.for_tenant("other")?;
    let seat = |number: i64, price: i64| json!({"event_id": "gala", "seat_no": number, "price": price});
    // One by one, the second does not fit into the sum of the first.
    own.done("seat.create", &[], seat(1, ENORMOUS), None).await?;
    own.done("seat.create", &[], seat(2, ENORMOUS), None).await?;
    for number in 1..=8 {
        other.done("seat.create", &[], seat(number, number), None).await?;
    }
    board.fixture.drain_by(50).await?;
    let shown = async |client: &TenantClient| BY_STATE.found(client).await;
    let free = |numbers: Json| BTreeMap::from([(r#"["AVAILABLE"]"#.to_owned(), numbers)]);
    same("what one shows", &shown(own).await?, &free(json!([1, ENORMOUS, ENORMOUS, ENORMOUS])))?;
    same("what the other shows", &shown(&other).await?, &BY_STATE.truth(&other).await?)?;
    same("what the other has parked", &parked(&board, &other).await?.len(), &0)?;
    let reasons = parked(&board, own).await?;
    ensure!(reasons.len() == 1 && reasons[0].contains("sum_price"), "{reasons:?}");
    // In one plan two of them do not even make an amount.
    let third = own.for_tenant("third")?;
    let partitions = own.house.store().partitions();
    let partition = |number: i64| partition_of(&third.tenant, "seat", &format!("gala,{number}"), partitions);
    let beside = (12..).find(|number| partition(*number) == partition(11)).context("there is always one")?;
    let pair = [seat(11, ENORMOUS), seat(beside, ENORMOUS)];
    let pair = pair.map(|seat| TenantClient::request("seat.create", &[], &seat, None));
    let batch = own.house.batch(&third.tenant, pair.to_vec(), Operation::default()).await;
    batch?;
    board.fixture.drain_by(50).await?;
    same("what the third shows", &shown(&third).await?, &BTreeMap::new())?;
    let reasons = parked(&board, &third).await?;
    // It is parked under each of its seats.
    ensure!(reasons.len() == 2 && reasons.iter().all(|why| why.contains("sum_price")), "{reasons:?}");
    // What has no opposite could be added, and never be taken away again.
    let fourth = own.for_tenant("fourth")?;
    fourth.done("seat.create", &[], seat(1, i64::MIN), None).await?;
    fourth.done("seat.create", &[], seat(2, 5), None).await?;
    board.fixture.drain_by(50).await?;
    same("what the fourth shows", &shown(&fourth).await?, &free(json!([1, 5, 5, 5])))?;
    let reasons = parked(&board, &fourth).await?;
    ensure!(reasons.len() == 1 && reasons[0].contains("`price`"), "{reasons:?}");
    Ok(())
}

/// Counts how many rows one read asks for, at most.
#[derive(Debug, Default)]
struct WidestRead(AtomicUsize);

#[async_trait]
impl Interceptor for Arc<WidestRead> {
    async fn get(
        &self,
        inner: &Arc<dyn Store>,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        self.0.fetch_max(addresses.len(), Ordering::Relaxed);
        inner.get(addresses, consistency).await
    }
}

/// Leaves a record in the log that names seats and changes none, as a hold outside the store does.
async fn name_seats(board: &ViewFixture, booking: &str, seats: std::ops::RangeInclusive<i64>) -> Result<()> {
    let (client, seats) = (board.client(), seats.collect::<Vec<i64>>());
    let event = EventTemplate::named("seat_booking.held").with("event_id", "gala").with("units", seats);
    let entry = statehouse_store::Entry::about("seat_booking", booking).event(event);
    let plan = Plan::of(&client.tenant, client.house.ids().next()).log(entry).build()?;
    let commit = client.house.store().commit(&plan).await?;
    ensure!(matches!(commit, Commit::Applied(_)), "{commit:?}");
    Ok(())
}

pub(in crate::proof::projection) async fn a_record_may_name_more_rows_than_a_plan_writes(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let (store, widest) =
        (namespace.open_at(Arc::new(clock.clone())).await?, Arc::new(WidestRead::default()));
    let store = Arc::new(StoreProxy::new(store, widest.clone()));
    let board = ViewFixture::over(store, clock, SEATS, &[("seat", BY_STATE)]).await?;
    let board = ViewFixture { step_rows: 50, ..board };
    for seat in [3, 77, 119] {
        let input = json!({"event_id": "gala", "seat_no": seat, "price": seat});
        board.client().done("seat.create", &[], input, None).await?;
    }
    board.fixture.drain_by(50).await?;
    // Several that name a few are not looked up all at once.
    let booking = elsewhere(&board, "seat_booking", "b");
    widest.0.store(0, Ordering::Relaxed);
    for first in [1, 41, 81] {
        name_seats(&board, &booking, first..=first + 39).await?;
    }
    board.fixture.drain_by(50).await?;
    let most = widest.0.load(Ordering::Relaxed);
    ensure!((40..100).contains(&most), "{most} rows were read at once");
    // One that names many is passed, and nothing waits behind it.
    name_seats(&board, &booking, 1..=250).await?;
    let hold = json!({"booking_id": "real", "event_id": "gala", "seat_no": [3, 77], "holder": "ann"});
    board.client().done("seat_booking.hold", &[], hold, None).await?;
    name_seats(&board, &booking, 2..=120).await?;
    board.fixture.drain_by(50).await?;
    same("what is parked", &parked(&board, board.client()).await?, &Vec::new())?;
    board.equals_a_rebuild().await
}

pub(in crate::proof::projection) async fn a_field_that_is_added_loses_no_record(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let levels =
        ViewExpectation { view: "levels", by: &["rank"], sum: &["level"], ends: &["level"], ..POINTS };
    let sources = SOURCE.replace("[house]\nname = \"drill\"\n", "");
    let old = ViewFixture::over(store.clone(), clock.clone(), &sources, &[("profile", POINTS)]).await?;
    put(old.client(), 1, "red", 1).await?;
    old.fixture.drain().await?;
    // What the new program has not read yet when it comes, and what the old one writes beside it.
    put(old.client(), 2, "red", 2).await?;
    let added = "fields = { rank = \"text?\", level = { type = \"int\", default = 3 },";
    let new = sources.replace("fields = {", added);
    let new = ViewFixture::over(store, clock, &new, &[("profile", POINTS), ("profile", levels)]).await?;
    new.fixture.drain().await?;
    new.is_true().await?;
    put(old.client(), 3, "blue", 3).await?;
    put(old.client(), 1, "blue", 4).await?;
    put(new.client(), 4, "blue", 5).await?;
    new.equals_a_rebuild().await
}

/// Writes an entry over, just before a group comes to write it, for so many times.
#[derive(Debug, Default)]
struct ConcurrentWriter(AtomicUsize);

#[async_trait]
impl Interceptor for Arc<ConcurrentWriter> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let has = |name: &str| plan.steps().iter().find(|step| step.table.name() == name);
        let one_less = |left: usize| left.checked_sub(1);
        if let (Some(step), Some(_)) = (has("teams_entries"), has("house_progress"))
            && self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
        {
            let bad = |error: statehouse_store::PlanError| StoreError::schema("a rival", error.to_string());
            let address = Address::new(&step.table, plan.tenant(), step.key.iter().cloned()).map_err(bad)?;
            let rows = inner.get(std::slice::from_ref(&address), Consistency::Strong).await?;
            let order = rows.into_iter().flatten().next().and_then(|row| row.int("source_order"));
            let same = Step::update(&step.table, step.key.iter().cloned())
                .set("source_order", order.unwrap_or_default());
            inner.commit(&Plan::of(plan.tenant(), "rival").step(same).build().map_err(bad)?).await?;
        }
        inner.commit(plan).await
    }
}

pub(in crate::proof::projection) async fn an_entry_that_is_fought_over_is_not_parked(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let rival = Arc::new(ConcurrentWriter::default());
    let store = Arc::new(StoreProxy::new(namespace.open().await?, rival.clone()));
    let fixture = ProjectionFixture::over(store, TEAMS).await?;
    fixture.put(1, "red", 1).await?;
    fixture.drain().await?;
    fixture.put(1, "blue", 5).await?;
    // More often than a course tries.
    rival.0.store(12, Ordering::Relaxed);
    for _ in 0..100 {
        match fixture.work(1).await {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => ensure!(error.is_transient(), "{error}"),
        }
    }
    same("how often it could have gone on", &rival.0.load(Ordering::Relaxed), &0)?;
    let group = fixture.projection()?.group(fixture.live().await?);
    same("what is parked", &group.parked(&fixture.client.tenant).await?.len(), &0)?;
    fixture.equals_a_rebuild().await
}
use crate::harness::case_check::skip_invariants;
