//! Ids of many processes in simulated time: clocks that are set back, processes that die, leases that are lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use statehouse::infra::sequence::local_ids::TimeIds;
use statehouse::infra::sequence::time_id::whole_millis;
use statehouse::{Blueprint, House};
use statehouse_store::{Clock, Ids, ManualClock, Migrate, ModelStore, Random, Store, Tenant, Time};

const BLUEPRINT: &str = "[sequence.order_id]\nkind = \"time\"\n";
/// Processes at a time, and how much happens to them.
const PROCESSES: u64 = 48;
const TURNS: u32 = 2_500;
/// Ids that a process draws in a turn, at most.
const DRAWN_MAX: u64 = 2_000;

/// About 2.4 million ids are really drawn and compared. The spans that were reserved for them have room for more than a
/// billion, and no two spans of a worker overlap: so no two of those could have been the same either.
#[tokio::test]
async fn a_billion_ids_have_room_and_none_is_minted_twice() {
    let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
    let store = Arc::new(ModelStore::with(Arc::new(clock.clone()), 4));
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT).unwrap();
    let ids = Ids::new(Arc::new(clock.clone()), Random::seeded(3));
    let house = Arc::new(House::with(store.clone(), &blueprint, Arc::new(clock.clone()), ids).unwrap());
    house.migrate(Migrate::Apply).await.unwrap();
    let tenant = Tenant::new("acme").unwrap();
    let mut random = Random::seeded(11);
    let mut lives = 0;
    let mut born = || {
        lives += 1;
        TimeIds::new(house.clone(), &tenant, "order_id", &format!("life {lives}"))
    };
    let mut processes: Vec<TimeIds> = (0..PROCESSES).map(|_| born()).collect();
    let (mut drawn, mut set_back) = (Vec::new(), 0);
    for _ in 0..TURNS {
        let process = usize::try_from(random.below(PROCESSES)).unwrap();
        match random.below(20) {
            // It dies, with what is left of its span, and its next life knows nothing of it.
            0 => processes[process] = born(),
            1 => {
                set_back += 1;
                clock.set(clock.now().minus(Duration::from_millis(random.below(90_000))));
            }
            2..=9 => clock.advance(Duration::from_millis(random.below(4_000))),
            // Long enough for leases to be lost to others.
            10 => clock.advance(Duration::from_secs(40)),
            _ => {
                let mut before = None;
                for _ in 0..random.below(DRAWN_MAX * 2) {
                    let id = processes[process].next().await.unwrap();
                    assert!(before.is_none_or(|before| before < id), "{id} after {before:?}");
                    before = Some(id);
                    drawn.push(id);
                }
            }
        }
    }
    let count = drawn.len();
    drawn.sort_unstable();
    drawn.dedup();
    assert_eq!(drawn.len(), count, "ids were minted twice");
    assert!(count > 2_000_000 && set_back > 50, "{count} ids, set back {set_back} times");
    let mut spans: BTreeMap<i64, Vec<(Time, Time)>> = BTreeMap::new();
    for partition in 0..store.partitions() {
        let mut after = 0;
        loop {
            let page = store.read_log(partition, after, 1_000).await.unwrap();
            for event in page.records.iter().flat_map(|record| &record.events) {
                let row = &event.data["row"];
                let time = |name: &str| row[name].as_str().unwrap().parse::<Time>().unwrap();
                let span = (time("reserved_from"), time("reserved_until"));
                spans.entry(row["worker"].as_i64().unwrap()).or_default().push(span);
            }
            let Some(last) = page.records.last().and_then(|record| record.position) else { break };
            after = last.offset;
        }
    }
    let mut room = 0;
    for (worker, spans) in &mut spans {
        spans.sort_unstable();
        assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "worker {worker}: {spans:?}");
        let millis = spans.iter().map(|(from, until)| whole_millis(*from, *until));
        room += millis.map(|(from, until)| (until - from).max(0) * 4_096).sum::<i64>();
    }
    assert!(room > 1_000_000_000, "room for {room}");
}
