//! I09 Sequence: no number and no id twice, for any callers, clocks and crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value as Json, json};
use statehouse::infra::sequence::gapless::take_number;
use statehouse::infra::sequence::local_ids::{RangeNumbers, TimeIds};
use statehouse::infra::sequence::time_id::{TimeIdGenerator, TimeIdLayout};
use statehouse::{Answer, Code, Operation, lock};
use statehouse_store::clock::SkewedClock;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::guard::{now, now_plus};
use statehouse_store::{Clock, Commit, ManualClock, Scan, Step, SystemClock, Time, Value};

use super::{cases as sequence, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::drill::{Drill, DrillClock};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Meanwhile, Paused, StoreProxy};
use crate::harness::store_client::{pause, same, scan};
use crate::harness::tenant_client::{TenantClient, shows};
use crate::proof::entity::cases::outcome;

pub(crate) const CASES: &[Case] = cases! {
    sequence {
        a_counter_counts(4),
        numbers_are_given_out_once_however_many_ask(4),
        a_retry_gets_its_own_numbers(4),
        ranges_are_given_out_by_their_holders(4),
        lost_answers_give_no_number_twice(4),
        a_gapless_number_is_taken_with_its_subject(6),
        a_number_that_was_not_used_is_not_burnt(7),
        takers_leave_no_gap(5),
        a_number_can_stand_in_the_row_that_bears_it(6),
        the_guard_and_not_the_lock_keeps_numbers_apart(4),
        takers_wait_for_one_that_crashed(4),
        a_taker_that_lost_its_lock_takes_nothing(4),
        a_lock_that_was_lost_is_left_to_others(4),
        ranges_that_do_not_agree_are_not_made_worse(4),
        a_worker_id_is_leased_reserved_and_released(3),
        worker_ids_run_out_with_a_word(3),
        of_many_leases_of_a_worker_one_is_given(3),
        each_part_of_a_lease_is_asked_for(3),
        a_holder_that_is_paused_extends_nothing(3),
        a_clock_that_is_set_back_repeats_no_id(3),
        two_processes_that_believe_to_own_a_worker_share_no_id(3),
        processes_mint_apart(3),
        lost_answers_repeat_no_id(3),
        sequences_of_tenants_are_apart(6),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "duplicate IDs",
        "Answers to takers get lost, and all numbers that anybody has are compared.",
        "sequence::lost_answers_give_no_number_twice",
    ),
    Drill::by_case(
        CASES,
        "non-monotonic IDs",
        "Many take numbers and lease ranges at once, and all that was given out is put together.",
        "sequence::numbers_are_given_out_once_however_many_ask",
    ),
    Drill::by_case(
        CASES,
        "worker-id exhaustion",
        "More processes want a worker id than there are.",
        "sequence::worker_ids_run_out_with_a_word",
    ),
    Drill::by_case(
        CASES,
        "clock rollback / stale epoch",
        "Clocks are set back while ids are minted.",
        "sequence::a_clock_that_is_set_back_repeats_no_id",
    ),
];

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[sequence.ticket]
kind  = "counter"
key   = { desk = "text" }
start = 100
lease = "10s"

[sequence.invoice_no]
kind = "gapless"
key  = { year = "int" }

[entity.invoice]
key    = { id = "text" }
fields = { number = "int?" }

[sequence.order_id]
kind          = "time"
worker_bits   = 2
sequence_bits = 4
shared        = 2
ahead         = "10s"
lease         = "30s"

[sequence.lone_id]
kind          = "time"
worker_bits   = 1
sequence_bits = 4
ahead         = "100ms"
lease         = "1s"
"#;

fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(1_800_000_000_000))
}

fn desk() -> [Value; 1] {
    ["front".into()]
}

fn year() -> [Value; 1] {
    [2026.into()]
}

fn int(answer: &Answer, name: &str) -> Result<i64> {
    answer.body[name].as_i64().with_context(|| format!("no {name} in {}", answer.body))
}

fn time(answer: &Answer, name: &str) -> Result<Time> {
    let text = answer.body[name].as_str().with_context(|| format!("no {name} in {}", answer.body))?;
    Ok(text.parse()?)
}

/// Requires ranges to have no number in common, and together to be all from the first to the last.
fn fill(mut ranges: Vec<(i64, i64)>, first: i64, last: i64) -> Result<()> {
    ranges.sort_unstable();
    let mut next = first;
    for (from, to) in &ranges {
        ensure!(*from == next && to >= from, "{from} to {to} follows {}: {ranges:?}", next - 1);
        next = to + 1;
    }
    same("the last number", &(next - 1), &last)
}

async fn a_counter_counts(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    client.refused("ticket.read", &desk(), json!({}), None, Code::NotFound).await?;
    let one = client.done("ticket.next", &desk(), json!({}), None).await?;
    shows(&one, &json!({"desk": "front", "first": 100, "last": 100}))?;
    let five = client.done("ticket.next", &desk(), json!({"count": 5}), None).await?;
    shows(&five, &json!({"first": 101, "last": 105}))?;
    let leased = client.done("ticket.lease", &desk(), json!({"holder": "a", "count": 20}), None).await?;
    shows(&leased, &json!({"first": 106, "last": 125, "holder": "a"}))?;
    same(
        "how long",
        &time(&leased, "expires_at")?.since(time(&leased, "leased_at")?),
        &Duration::from_secs(10),
    )?;
    client.shows("ticket", &desk(), &json!({"last": 125})).await?;
    // Another key counts for itself, and a lease may come first.
    let back = ["back".into()];
    let leased = client.done("ticket.lease", &back, json!({"holder": "b", "count": 1}), None).await?;
    shows(&leased, &json!({"first": 100, "last": 100}))?;
    let ranges = client.done("ticket.ranges", &[], json!({"desk": "front"}), None).await?;
    same("ranges of the front desk", &ranges.body.as_array().map(Vec::len), &Some(1))?;
    for input in [json!({"count": 0}), json!({"count": 1_000_001}), json!({"number": 1})] {
        client.refused("ticket.next", &desk(), input, None, Code::InvalidInput).await?;
    }
    let unnamed = json!({"holder": "", "count": 1});
    client.refused("ticket.lease", &desk(), unnamed, None, Code::InvalidInput).await?;
    client.refused("ticket.ranges", &[], json!({}), None, Code::InvalidInput).await.map(drop)
}

async fn numbers_are_given_out_once_however_many_ask(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let callers = (0..12_i64).map(|caller| {
        let client = client.clone();
        tokio::spawn(async move {
            let mut ranges = Vec::new();
            for turn in 0..6 {
                let count = 1 + (caller + turn) % 3;
                // A lease has to know its numbers before it commits, and loses to a faster caller.
                let answer = if caller % 4 == 0 {
                    let input = json!({"holder": format!("caller {caller}"), "count": count});
                    match client.call("ticket.lease", &desk(), input, None).await {
                        Err(refusal) if refusal.code == Code::Contended => continue,
                        answer => answer?,
                    }
                } else {
                    client.call("ticket.next", &desk(), json!({"count": count}), None).await?
                };
                let (first, last) = (int(&answer, "first")?, int(&answer, "last")?);
                same("how many", &(last - first + 1), &count)?;
                ranges.push((first, last));
            }
            Ok::<_, anyhow::Error>(ranges)
        })
    });
    let mut ranges = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        ranges.extend(caller.await??);
    }
    let last = int(&client.done("ticket.read", &desk(), json!({}), None).await?, "last")?;
    fill(ranges, 100, last)?;
    invariants::check(&client.scope("ticket")).await
}

async fn a_retry_gets_its_own_numbers(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let key = desk();
    let next = || client.call_as("op-1", "ticket.next", &key, json!({"count": 3}), None);
    let first = next().await?;
    let leased = json!({"holder": "a", "count": 4});
    let lease = || client.call_as("op-2", "ticket.lease", &key, leased.clone(), None);
    let range = lease().await?;
    client.done("ticket.next", &desk(), json!({}), None).await?;
    same("the numbers of a retry", &next().await?.body, &first.body)?;
    same("the range of a retry", &lease().await?.body, &range.body)?;
    client.shows("ticket", &desk(), &json!({"last": 107})).await
}

async fn ranges_are_given_out_by_their_holders(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let numbers = |holder: &str| {
        RangeNumbers::new(client.house.clone(), &client.tenant, "ticket", desk().to_vec(), holder, 4)
    };
    let (one, two) = (numbers("one"), numbers("two"));
    let mut given = Vec::new();
    for _ in 0..3 {
        given.push(one.next().await?);
        given.push(two.next().await?);
    }
    same("from two ranges", &given, &vec![100, 104, 101, 105, 102, 106])?;
    // A process that dies loses the rest of its range; its next life begins with another.
    drop(one);
    same("after a crash", &numbers("one").next().await?, &108)?;
    // When a lease ends, what is left is far behind what others give out, and is given up.
    clock.advance(Duration::from_secs(10));
    same("after the lease", &two.next().await?, &112)?;
    for expected in [113, 114, 115, 116] {
        same("range after range", &two.next().await?, &expected)?;
    }
    let ranges = client.done("ticket.ranges", &[], json!({"desk": "front", "limit": 2}), None).await?;
    let firsts: Vec<Option<i64>> =
        ranges.body.as_array().into_iter().flatten().map(|row| row["first"].as_i64()).collect();
    same("the newest ranges", &firsts, &vec![Some(116), Some(112)])
}

/// A world in which answers get lost, and the house above it.
async fn faulty(namespace: &dyn TestNamespace) -> Result<(Arc<FaultyStore>, TenantClient)> {
    let store = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(store, Arc::new(SystemClock), Odds::default(), 7));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.25, unknown_after: 0.35, ..Odds::default() });
    Ok((faulty, client))
}

async fn lost_answers_give_no_number_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let (faulty, client) = faulty(namespace).await?;
    let mut ranges = BTreeMap::new();
    for turn in 0..30 {
        let operation = format!("op-{turn}");
        let (action, input) = match turn % 3 {
            0 => ("ticket.lease", json!({"holder": "a", "count": 3})),
            _ => ("ticket.next", json!({"count": 2})),
        };
        // A caller that was told nothing asks again under the same id until it knows.
        for _ in 0..50 {
            match client.call_as(&operation, action, &desk(), input.clone(), None).await {
                Ok(answer) => {
                    let range = (int(&answer, "first")?, int(&answer, "last")?);
                    let before = ranges.insert(turn, range);
                    ensure!(before.is_none_or(|before| before == range), "{before:?}, then {range:?}");
                    // And once more, for an answer that never arrived.
                    if turn % 2 == 0 || before.is_some() {
                        break;
                    }
                }
                Err(refusal) => ensure!(refusal.code == Code::OutcomeUnknown, "{refusal}"),
            }
        }
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 5 && achieved.unknown_before > 5, "{achieved}");
    same("how many calls were answered", &ranges.len(), &30)?;
    faulty.set_odds(Odds::default());
    let last = int(&client.done("ticket.read", &desk(), json!({}), None).await?, "last")?;
    // Under its own id each call has its numbers, and none is lost.
    fill(ranges.into_values().collect(), 100, last)
}

/// Checks I3 on what is stored: each number up to the last belongs to one subject.
async fn check_gapless(client: &TenantClient, expected: i64) -> Result<()> {
    let store_client = client.store_client()?;
    let rows =
        scan(store_client.store.as_ref(), Scan::of(client.table("invoice_nos_taken")?, &client.tenant))
            .await?;
    let mut numbers: Vec<i64> = rows.iter().filter_map(|row| row.int("number")).collect();
    numbers.sort_unstable();
    same("the numbers that were taken", &numbers, &(1..=expected).collect())?;
    let last = store_client.find(client.table("invoice_nos")?, year()).await?.and_then(|row| row.int("last"));
    same("the last number", &last, &(expected > 0).then_some(expected))?;
    invariants::check(&client.scope("invoice_no")).await
}

async fn a_gapless_number_is_taken_with_its_subject(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    client.shows("invoice_no", &year(), &json!({"year": 2026, "next": 1})).await?;
    let first = client.done("invoice_no.take", &year(), json!({"subject": "invoice/a"}), None).await?;
    shows(&first, &json!({"year": 2026, "number": 1, "subject": "invoice/a"}))?;
    client.done("invoice_no.take", &year(), json!({"subject": "invoice/b"}), None).await?;
    // Asked again under another operation id, a subject keeps its number.
    let again = client.done("invoice_no.take", &year(), json!({"subject": "invoice/a"}), None).await?;
    same("the number of a subject", &again.body, &first.body)?;
    client.shows("invoice_no", &year(), &json!({"next": 3})).await?;
    let other = json!({"subject": "invoice/a", "number": 3});
    client.refused("invoice_no.take", &year(), other, None, Code::AlreadyExists).await?;
    client.refused("invoice_no.take", &year(), json!({"subject": ""}), None, Code::InvalidInput).await?;
    for _ in 0..1_000 {
        let list = client.done("invoice_no.list", &[], json!({"year": 2026}), None).await?;
        let numbers: Vec<Option<i64>> =
            list.body.as_array().into_iter().flatten().map(|row| row["number"].as_i64()).collect();
        if numbers == [Some(2), Some(1)] {
            return check_gapless(&client, 2).await;
        }
        pause().await;
    }
    Err(anyhow!("the list does not show both numbers"))
}

async fn a_number_that_was_not_used_is_not_burnt(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    client.done("invoice.create", &[], json!({"id": "taken"}), None).await?;
    let batch = async |id: &str| {
        let requests = vec![
            TenantClient::request(
                "invoice_no.take",
                &year(),
                &json!({"subject": format!("invoice/{id}")}),
                None,
            ),
            TenantClient::request("invoice.create", &[], &json!({"id": id}), None),
        ];
        client.house.batch(&client.tenant, requests, Operation::default()).await
    };
    for (id, expected) in [("a", Ok(1)), ("taken", Err(Code::AlreadyExists)), ("b", Ok(2))] {
        let number = match batch(id).await {
            Ok(answers) => Ok(answers.first().context("no answer")?.body["number"].as_i64().unwrap_or(0)),
            Err(refusal) => Err(refusal.code),
        };
        same(&format!("the number of {id}"), &number, &expected)?;
    }
    check_gapless(&client, 2).await
}

async fn takers_leave_no_gap(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let takers = (0..16).map(|taker| {
        let client = client.clone();
        // Each subject is asked for twice, by two callers who do not know of each other.
        let subject = json!({"subject": format!("invoice/{}", taker / 2)});
        tokio::spawn(async move { client.call("invoice_no.take", &year(), subject, None).await })
    });
    let mut numbers: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
    for taker in takers.collect::<Vec<_>>() {
        match taker.await? {
            Ok(answer) => {
                let subject = answer.body["subject"].as_str().context("no subject")?.to_owned();
                numbers.entry(subject).or_default().insert(int(&answer, "number")?);
            }
            Err(refusal) => ensure!(refusal.code == Code::Contended, "{refusal}"),
        }
    }
    ensure!(numbers.values().all(|numbers| numbers.len() == 1), "a subject has two numbers: {numbers:?}");
    check_gapless(&client, i64::try_from(numbers.len())?).await
}

async fn a_number_can_stand_in_the_row_that_bears_it(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let bear = async |id: &str, number: i64| {
        let subject = json!({"subject": format!("invoice/{id}"), "number": number});
        let requests = vec![
            TenantClient::request("invoice_no.take", &year(), &subject, None),
            TenantClient::request("invoice.create", &[], &json!({"id": id, "number": number}), None),
        ];
        let done = client.house.batch(&client.tenant, requests, Operation::default()).await;
        done.map(drop).map_err(|refusal| refusal.code)
    };
    same("in order", &bear("a", 1).await, &Ok(()))?;
    same("a number that is gone", &bear("b", 1).await, &Err(Code::VersionConflict))?;
    same("a number that is not next", &bear("b", 3).await, &Err(Code::VersionConflict))?;
    // Two who read the same number: one of them has it, and the other has written nothing.
    let callers: Vec<_> = (0..6)
        .map(|caller| {
            let client = client.clone();
            tokio::spawn(async move {
                let id = format!("c{caller}");
                let subject = json!({"subject": format!("invoice/{id}"), "number": 2});
                let requests = vec![
                    TenantClient::request("invoice_no.take", &year(), &subject, None),
                    TenantClient::request("invoice.create", &[], &json!({"id": id, "number": 2}), None),
                ];
                client.house.batch(&client.tenant, requests, Operation::default()).await.is_ok()
            })
        })
        .collect();
    let mut done = 0;
    for caller in callers {
        done += usize::from(caller.await?);
    }
    same("who got number 2", &done, &1)?;
    let invoices =
        scan(client.house.store().as_ref(), Scan::of(client.table("invoices")?, &client.tenant)).await?;
    let mut numbers: Vec<Option<i64>> = invoices.iter().map(|row| row.int("number")).collect();
    numbers.sort_unstable();
    same("the numbers in the rows", &numbers, &vec![Some(1), Some(2)])?;
    check_gapless(&client, 2).await
}

async fn the_guard_and_not_the_lock_keeps_numbers_apart(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let store_client = client.store_client()?;
    let table = client.table("invoice_nos")?.clone();
    // A plan that was drafted when nothing was taken yet, by a caller that knows of no lock.
    let stale = store_client.one(take_number(&table, year(), None, 1));
    client.done("invoice_no.take", &year(), json!({"subject": "a"}), None).await?;
    store_client.refuse(stale).await?;
    let stale = store_client.one(take_number(&table, year(), Some(1), 2));
    client.done("invoice_no.take", &year(), json!({"subject": "b"}), None).await?;
    store_client.refuse(stale).await?;
    check_gapless(&client, 2).await?;
    // The plan of another archetype takes the next one.
    store_client.apply(store_client.one(take_number(&table, year(), Some(2), 3))).await?;
    client.shows("invoice_no", &year(), &json!({"next": 4})).await
}

/// Takes the lock of a year for a holder that will not release it.
async fn hold(client: &TenantClient, year: i64, holder: &str) -> Result<()> {
    let store_client = client.store_client()?;
    let lock = Step::upsert(client.table("invoice_nos_lock")?, [year.into()])
        .set("held_by", holder)
        .set("held_until", now_plus(lock::TERM));
    store_client.apply(store_client.one(lock)).await?;
    Ok(())
}

async fn takers_wait_for_one_that_crashed(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    hold(&client, 2026, "crashed").await?;
    let until = clock.now().plus(lock::TERM);
    let call = client.start("invoice_no.take", &year(), json!({"subject": "a"}), None);
    // Its clock stands, so it cannot even look again.
    for _ in 0..5 {
        pause().await;
    }
    ensure!(!call.is_finished(), "it did not wait for the lock");
    let answer = outcome(&clock, call).await??;
    shows(&answer, &json!({"number": 1}))?;
    ensure!(time(&answer, "taken_at")? >= until, "{} was taken before the lock ran out", answer.body);
    // The operation that holds a lock is let in at once: it is the holder, come back after a crash.
    hold(&client, 2027, "retried").await?;
    let subject = json!({"subject": "b"});
    let answer = client.call_as("retried", "invoice_no.take", &[2027.into()], subject, None).await?;
    shows(&answer, &json!({"number": 1}))
}

async fn a_taker_that_lost_its_lock_takes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let almost = lock::TERM - Duration::from_micros(1);
    // How often the lock was taken since the plan was made, how long ago, and whether the plan may then be applied.
    for (year, (taken, ago, applies)) in (2030..).zip([
        (0, Duration::ZERO, false),
        (1, Duration::ZERO, true),
        (1, almost, true),
        (1, lock::TERM, false),
        (2, Duration::ZERO, false),
    ]) {
        let plan = client.drafted("invoice_no.take", &[year.into()], json!({"subject": "a"}), None).await?;
        for holder in 0..taken {
            hold(&client, year, &holder.to_string()).await?;
        }
        clock.advance(ago);
        let applied = matches!(client.house.store().commit(&plan).await?, Commit::Applied(_));
        same(&format!("taken {taken} times, {ago:?} ago"), &applied, &applies)?;
        let next = if applied { 2 } else { 1 };
        client.shows("invoice_no", &[year.into()], &json!({"next": next})).await?;
    }
    Ok(())
}

async fn a_lock_that_was_lost_is_left_to_others(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let meanwhile = Arc::new(Meanwhile::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), meanwhile.clone()));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(clock.clone())).await?;
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(clock.clone())).await?;
    client.done("invoice_no.take", &year(), json!({"subject": "a"}), None).await?;
    // Between the taking of the lock and the reading the caller is paused, for longer than its lock lasts.
    meanwhile.next({
        let (client, clock) = (client.clone(), clock.clone());
        async move {
            clock.advance(lock::TERM);
            // If this fails, the case finds another holder than it expects.
            let _ = hold(&client, 2026, "somebody").await;
        }
    });
    // The subject has its number, so there is nothing to write, and the lock is given back: but it is another's by now.
    let again = slow.done("invoice_no.take", &year(), json!({"subject": "a"}), None).await?;
    shows(&again, &json!({"number": 1}))?;
    let held = client.store_client()?.row(client.table("invoice_nos_lock")?, year()).await?;
    same("the holder", &held.text("held_by"), &Some("somebody"))?;
    ensure!(held.time("held_until") > Some(clock.now()), "another holder's lock was released: {held:?}");
    Ok(())
}

async fn ranges_that_do_not_agree_are_not_made_worse(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let lease = async |desk: &str| {
        let input = json!({"holder": "a", "count": 5});
        client.drafted("ticket.lease", &[desk.into()], input, None).await
    };
    // Two who see that nothing was given out yet.
    let late = lease("front").await?;
    client.done("ticket.next", &desk(), json!({}), None).await?;
    client.too_late(&late).await?;
    // What is gone altogether is not made up.
    let late = lease("front").await?;
    client.done("invoice_no.take", &year(), json!({"subject": "a"}), None).await?;
    let second = json!({"subject": "b", "number": 2});
    let taken = client.drafted("invoice_no.take", &year(), second, None).await?;
    for (table, key, plan) in [("tickets", desk(), &late), ("invoice_nos", year(), &taken)] {
        let store_client = client.store_client()?;
        store_client.apply(store_client.one(Step::delete(client.table(table)?, key))).await?;
        client.too_late(plan).await?;
    }
    // An operator lost the counter and has the ranges still: what was leased is not leased again.
    let late = lease("back").await?;
    let store_client = client.store_client()?;
    let range = Step::insert(client.table("tickets_ranges")?, ["back".into(), 100.into()]);
    let range = range.set("last", 104).set("holder", "b").set("leased_at", now()).set("expires_at", now());
    store_client.apply(store_client.one(range)).await?;
    client.too_late(&late).await
}

async fn a_worker_id_is_leased_reserved_and_released(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    client.shows("order_id", &[3.into()], &json!({"state": "FREE", "epoch": 0, "version": 0})).await?;
    client.refused("order_id.read", &[4.into()], json!({}), None, Code::OutOfRange).await?;
    let leased = client.done("order_id.lease", &[], json!({"holder": "a"}), None).await?;
    let worker = int(&leased, "worker")?;
    ensure!((2..4).contains(&worker), "worker {worker} is shared, or there is none");
    same("the key", &leased.created, &Some(worker.to_string()))?;
    let (from, until) = (clock.now(), clock.now().plus(Duration::from_secs(10)));
    shows(
        &leased,
        &json!({
            "state": "HELD", "holder": "a", "epoch": 1, "reserved_from": from.to_string(),
            "reserved_until": until.to_string(),
            "layout": {"epoch_ms": 1_577_836_800_000_i64, "worker_bits": 2, "sequence_bits": 4},
        }),
    )?;
    // Reserved again at once, the span begins at the mark; later, it begins then. Both hold the worker id for longer.
    let holder = json!({"holder": "a", "epoch": 1});
    let key = [worker.into()];
    let more = client.done("order_id.reserve", &key, holder.clone(), None).await?;
    shows(&more, &json!({"reserved_from": until.to_string(), "epoch": 1}))?;
    clock.advance(Duration::from_secs(25));
    let later = client.done("order_id.reserve", &key, holder.clone(), None).await?;
    shows(&later, &json!({"reserved_from": clock.now().to_string()}))?;
    same("how long it is held", &time(&later, "expires_at")?, &clock.now().plus(Duration::from_secs(30)))?;
    // A retry whose answer was lost, under another operation id, has the same worker id and a span of its own.
    let again = client.done("order_id.lease", &[], json!({"holder": "a"}), None).await?;
    shows(&again, &json!({"worker": worker, "epoch": 1, "reserved_from": later.body["reserved_until"]}))?;
    for (action, input, code) in [
        ("reserve", json!({"holder": "b", "epoch": 1}), Code::NotHolder),
        ("reserve", json!({"holder": "a", "epoch": 2}), Code::NotHolder),
        ("release", json!({"holder": "b", "epoch": 1}), Code::NotHolder),
        ("reserve", json!({"holder": "", "epoch": 1}), Code::InvalidInput),
    ] {
        client.refused(&format!("order_id.{action}"), &key, input, None, code).await?;
    }
    client.refused("order_id.reserve", &[9.into()], holder.clone(), None, Code::NotFound).await?;
    clock.advance(Duration::from_secs(31));
    client.refused("order_id.reserve", &key, holder.clone(), None, Code::Expired).await?;
    let mark = time(&again, "reserved_until")?;
    let anew = client.done("order_id.lease", &[], json!({"holder": "a"}), None).await?;
    shows(&anew, &json!({"worker": worker, "epoch": 2}))?;
    ensure!(time(&anew, "reserved_from")? >= mark, "{} begins before {mark}", anew.body);
    let released = client.done("order_id.release", &key, json!({"holder": "a", "epoch": 2}), None).await?;
    shows(&released, &json!({"state": "FREE", "holder": null, "epoch": 2}))?;
    client
        .refused("order_id.reserve", &key, json!({"holder": "a", "epoch": 2}), None, Code::NotHolder)
        .await?;
    // Through the store, without a worker id of one's own.
    let drawn = client.done("order_id.next", &[0.into()], json!({"count": 40}), None).await?;
    let ids = drawn_ids(&drawn)?;
    same("how many were drawn", &ids.len(), &40)?;
    ensure!(ids.is_sorted(), "{ids:?}");
    client.refused("order_id.next", &key, json!({}), None, Code::WrongState).await?;
    let list = client.done("order_id.list", &[], json!({}), None).await?;
    same("worker ids that were used", &list.body.as_array().map(Vec::len), &Some(2))
}

fn drawn_ids(answer: &Answer) -> Result<Vec<i64>> {
    let ids = answer.body["ids"].as_array().with_context(|| format!("no ids in {}", answer.body))?;
    Ok(ids.iter().filter_map(Json::as_i64).collect())
}

async fn worker_ids_run_out_with_a_word(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let lease = |holder: &str| json!({"holder": holder});
    let mut workers = BTreeSet::new();
    for holder in ["a", "b"] {
        let leased = client.done("order_id.lease", &[], lease(holder), None).await?;
        workers.insert(int(&leased, "worker")?);
    }
    same("worker ids of two holders", &workers, &BTreeSet::from([2, 3]))?;
    let refusal = client.refused("order_id.lease", &[], lease("c"), None, Code::Held).await?;
    let free_at = clock.now().plus(Duration::from_secs(30)).to_string();
    ensure!(refusal.message.contains(&free_at), "{refusal} does not say {free_at}");
    // A holder keeps its id; when one has expired, the next caller has it.
    client.done("order_id.lease", &[], lease("a"), None).await?;
    clock.advance(Duration::from_secs(30));
    client.done("order_id.lease", &[], lease("c"), None).await?;
    let ids = TimeIds::new(client.house.clone(), &client.tenant, "order_id", "d");
    ids.next().await?;
    let full = TimeIds::new(client.house.clone(), &client.tenant, "order_id", "e");
    same("when none is free", &full.next().await.map_err(|refusal| refusal.code), &Err(Code::Held))?;
    ids.release().await?;
    full.next().await?;
    Ok(())
}

async fn of_many_leases_of_a_worker_one_is_given(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    // Both worker ids were used a moment ago, so their marks are ahead of the clock and the first draft of all is in vain.
    for holder in ["a", "b"] {
        client.done("order_id.lease", &[], json!({"holder": holder}), None).await?;
    }
    for row in client.done("order_id.list", &[], json!({}), None).await?.body.as_array().context("no list")? {
        let holder = json!({"holder": row["holder"], "epoch": row["epoch"]});
        let worker = row["worker"].as_i64().context("no worker")?;
        client.done("order_id.release", &[worker.into()], holder, None).await?;
    }
    let callers: Vec<_> = (0..8)
        .map(|caller| {
            let (client, holder) = (client.clone(), json!({"holder": format!("caller {caller}")}));
            tokio::spawn(async move { client.call("order_id.lease", &[], holder, None).await })
        })
        .collect();
    let mut workers = Vec::new();
    for caller in callers {
        match caller.await? {
            Ok(answer) => workers.push((int(&answer, "worker")?, int(&answer, "epoch")?)),
            Err(refusal) => ensure!([Code::Held, Code::Contended].contains(&refusal.code), "{refusal}"),
        }
    }
    workers.sort_unstable();
    same("who has a worker id", &workers, &vec![(2, 2), (3, 2)])?;
    invariants::check(&client.scope("order_id")).await
}

async fn each_part_of_a_lease_is_asked_for(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let (key, lease) = ([1.into()], |holder: &str| json!({"holder": holder}));
    // Two who look at once see the same worker id free.
    let first = client.drafted("lone_id.lease", &[], lease("a"), None).await?;
    let second = client.drafted("lone_id.lease", &[], lease("b"), None).await?;
    ensure!(client.house.store().commit(&first).await?.applied().is_some(), "it is free");
    // The mark lies behind the clock, and the lease is not over: it alone decides.
    clock.advance(Duration::from_millis(500));
    client.too_late(&second).await?;
    for (action, holder, epoch) in
        [("reserve", "b", 1), ("reserve", "a", 2), ("release", "b", 1), ("release", "a", 2)]
    {
        let input = json!({"holder": holder, "epoch": epoch});
        client.refused(&format!("lone_id.{action}"), &key, input, None, Code::NotHolder).await?;
    }
    let own = json!({"holder": "a", "epoch": 1});
    client.done("lone_id.reserve", &key, own.clone(), None).await?;
    clock.advance(Duration::from_secs(1));
    client.refused("lone_id.reserve", &key, own, None, Code::Expired).await?;
    // What was given back long ago is leased from now on, not from where the mark was left.
    let anew = client.done("lone_id.lease", &[], lease("a"), None).await?;
    let own = json!({"holder": "a", "epoch": anew.body["epoch"]});
    client.done("lone_id.release", &key, own, None).await?;
    clock.advance(Duration::from_secs(10));
    let leased = client.done("lone_id.lease", &[], lease("b"), None).await?;
    shows(&leased, &json!({"reserved_from": clock.now().to_string()}))?;
    // Drawn twice at one moment, through the store.
    let mut ledger = IssuedIds::default();
    for _ in 0..3 {
        let drawn = client.done("lone_id.next", &[0.into()], json!({"count": 50}), None).await?;
        for id in drawn_ids(&drawn)? {
            ledger.note(id)?;
        }
    }
    Ok(())
}

/// What becomes of a worker id while its holder is paused with a plan in its hands.
#[derive(Clone, Copy, Debug)]
enum LeaseLoss {
    /// Its time is up.
    Over,
    /// Its time was up, and the same holder has it anew.
    Anew,
    /// An operator gave it to another by hand.
    HandedOver,
}

async fn a_holder_that_is_paused_extends_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = DrillClock::new();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), paused.clone()));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(clock.clone())).await?;
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(clock.clone())).await?;
    let (key, lease) = ([1.into()], json!({"holder": "a"}));
    let own = json!({"holder": "a", "epoch": 1});
    for (number, (fate, reserved, leased)) in [
        (LeaseLoss::Over, Err(Code::Expired), Ok(2)),
        (LeaseLoss::Anew, Err(Code::NotHolder), Ok(2)),
        (LeaseLoss::HandedOver, Err(Code::NotHolder), Err(Code::Held)),
    ]
    .into_iter()
    .enumerate()
    {
        for (action, key, input, expected) in
            [("reserve", &key[..], &own, reserved), ("lease", &key[..0], &lease, leased)]
        {
            // The first plan reserves from now on. If the mark is ahead of the clock that is in vain, and the second one
            // reserves from the mark on.
            for plan in [1, 2] {
                let tenant = format!("{action}{plan}{number}");
                let (client, slow) = (client.for_tenant(&tenant)?, slow.for_tenant(&tenant)?);
                client.done("lone_id.lease", &[], lease.clone(), None).await?;
                if plan == 1 {
                    clock.advance(Duration::from_millis(200));
                }
                let (clock, lease) = (clock.clone(), lease.clone());
                paused.before("lone_ids", plan, async move {
                    // If any of this fails, the case finds another holder than it expects.
                    if !matches!(fate, LeaseLoss::HandedOver) {
                        clock.advance(Duration::from_secs(1));
                    }
                    match fate {
                        LeaseLoss::Over => {}
                        LeaseLoss::Anew => drop(client.done("lone_id.lease", &[], lease, None).await),
                        LeaseLoss::HandedOver => drop(hand_over(&client, "b").await),
                    }
                });
                let answer = slow.call(&format!("lone_id.{action}"), key, input.clone(), None).await;
                let outcome = answer.map(|answer| answer.body["epoch"].as_i64().unwrap_or(0));
                let outcome = outcome.map_err(|refusal| refusal.code);
                same(&format!("{action}, {fate:?}, plan {plan}"), &outcome, &expected)?;
            }
        }
    }
    Ok(())
}

/// Gives the worker id 1 to another, past the actions.
async fn hand_over(client: &TenantClient, holder: &str) -> Result<()> {
    let store_client = client.store_client()?;
    let step = Step::update(client.table("lone_ids")?, [0.into(), 1.into()]).set("holder", holder);
    store_client.apply(store_client.one(step)).await.map(drop)
}

/// What was minted and reserved: neither may repeat.
#[derive(Default)]
struct IssuedIds {
    ids: BTreeSet<i64>,
    /// By worker, the spans that were reserved.
    spans: BTreeMap<i64, Vec<(Time, Time)>>,
}

impl IssuedIds {
    fn reserve(&mut self, answer: &Answer) -> Result<TimeIdGenerator> {
        let (worker, layout) = (int(answer, "worker")?, &answer.body["layout"]);
        let bits = |name: &str| u32::try_from(layout[name].as_i64()?).ok();
        let layout = TimeIdLayout {
            epoch_ms: layout["epoch_ms"].as_i64().context("no epoch")?,
            worker_bits: bits("worker_bits").context("no bits")?,
            sequence_bits: bits("sequence_bits").context("no bits")?,
        };
        let (from, until) = (time(answer, "reserved_from")?, time(answer, "reserved_until")?);
        let spans = self.spans.entry(worker).or_default();
        let overlaps = spans.iter().find(|(other, end)| from < *end && *other < until);
        ensure!(overlaps.is_none(), "worker {worker}: {from} to {until} overlaps {overlaps:?}");
        spans.push((from, until));
        Ok(TimeIdGenerator::new(layout, worker, from, until, Duration::ZERO))
    }

    fn note(&mut self, id: i64) -> Result<()> {
        ensure!(self.ids.insert(id), "{id} was minted twice");
        Ok(())
    }

    fn mint(&mut self, minter: &mut TimeIdGenerator, count: usize) -> Result<()> {
        for _ in 0..count {
            let id = minter.next_id(Duration::ZERO).context("the span is used up")?;
            self.note(id)?;
        }
        Ok(())
    }
}

async fn a_clock_that_is_set_back_repeats_no_id(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let mut ledger = IssuedIds::default();
    let start = clock.now();
    let leased = client.done("lone_id.lease", &[], json!({"holder": "a"}), None).await?;
    let (key, epoch) = ([int(&leased, "worker")?.into()], int(&leased, "epoch")?);
    let mut minter = ledger.reserve(&leased)?;
    ledger.mint(&mut minter, 100)?;
    let mut newest = *ledger.ids.last().context("no id")?;
    let holder = json!({"holder": "a", "epoch": epoch});
    // Forward a little, back a little, back a lot, and forward again by less than the lease lasts.
    for offset_ms in [50_i64, -400, -390, -60_000, -59_990, -59_300, -120_000, -119_900] {
        clock.set(Time::from_micros(start.micros() + offset_ms * 1_000));
        let reserved = client.done("lone_id.reserve", &key, holder.clone(), None).await?;
        let mut minter = ledger.reserve(&reserved)?;
        ledger.mint(&mut minter, 100)?;
        let latest = *ledger.ids.last().context("no id")?;
        ensure!(latest > newest, "an id of the same worker went back: {latest} after {newest}");
        newest = latest;
        // Drawn through the store as well, from the worker id that is shared.
        let drawn = client.done("lone_id.next", &[0.into()], json!({"count": 50}), None).await?;
        for id in drawn_ids(&drawn)? {
            ledger.note(id)?;
        }
    }
    // The process is gone, and its next life begins while the clock stands where it stood when the first one began.
    client.done("lone_id.release", &key, holder, None).await?;
    clock.set(start);
    let leased = client.done("lone_id.lease", &[], json!({"holder": "b"}), None).await?;
    let mut minter = ledger.reserve(&leased)?;
    ledger.mint(&mut minter, 100)?;
    same("how many ids there are", &ledger.ids.len(), &(10 * 100 + 8 * 50))
}

async fn two_processes_that_believe_to_own_a_worker_share_no_id(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?;
    let mut ledger = IssuedIds::default();
    let leased = client.done("lone_id.lease", &[], json!({"holder": "a"}), None).await?;
    let mut paused = ledger.reserve(&leased)?;
    ledger.mint(&mut paused, 10)?;
    // The first is paused for as long as its lease lasts. There is one worker id, and the second gets it, while the store's
    // clock is set back to where the first one's span lies.
    clock.advance(Duration::from_secs(1));
    let second = client.done("lone_id.lease", &[], json!({"holder": "b"}), None).await?;
    same(
        "whose worker id",
        &(int(&second, "worker")?, int(&second, "epoch")?),
        &(int(&leased, "worker")?, 2),
    )?;
    let mut minter = ledger.reserve(&second)?;
    clock.set(time(&leased, "reserved_from")?);
    for _ in 0..5 {
        ledger.mint(&mut minter, 40)?;
        ledger.mint(&mut paused, 40)?;
        let holder = json!({"holder": "b", "epoch": 2});
        minter = ledger.reserve(&client.done("lone_id.reserve", &[1.into()], holder, None).await?)?;
    }
    let stale = json!({"holder": "a", "epoch": 1});
    client.refused("lone_id.reserve", &[1.into()], stale.clone(), None, Code::NotHolder).await?;
    client.refused("lone_id.release", &[1.into()], stale, None, Code::NotHolder).await?;
    client.shows("lone_id", &[1.into()], &json!({"holder": "b", "epoch": 2})).await
}

async fn processes_mint_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let mut minters = Vec::new();
    // Their clocks are wrong by minutes, in both directions: only the store's counts, and how much time has passed.
    for process in 0..3_i64 {
        let clock = SkewedClock::over(Arc::new(SystemClock));
        clock.skew((process - 1) * 120_000_000);
        let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(clock)).await?;
        // The pool has one worker id for two of them, so one waits until it is free.
        minters.push(tokio::spawn(async move {
            let mut ids = Vec::new();
            let mint =
                TimeIds::new(client.house.clone(), &client.tenant, "lone_id", &format!("process {process}"));
            for _ in 0..1_000 {
                match mint.next().await {
                    Ok(id) => ids.push(id),
                    Err(refusal) => {
                        ensure!(matches!(refusal.code, Code::Held | Code::Contended), "{refusal}");
                        pause().await;
                    }
                }
                if ids.len() == 150 {
                    break;
                }
            }
            mint.release().await?;
            let drawn = client.call("order_id.next", &[1.into()], json!({"count": 10}), None).await?;
            Ok((ids, drawn_ids(&drawn)?))
        }));
    }
    let (mut leased, mut drawn) = (Vec::new(), Vec::new());
    for minter in minters {
        let (minted, shared) = minter.await??;
        ensure!(minted.len() == 150 && minted.is_sorted(), "{} ids: {minted:?}", minted.len());
        leased.extend(minted);
        drawn.extend(shared);
    }
    for ids in [leased, drawn] {
        let distinct: BTreeSet<i64> = ids.iter().copied().collect();
        same("how many ids are different", &distinct.len(), &ids.len())?;
    }
    Ok(())
}

async fn lost_answers_repeat_no_id(namespace: &dyn TestNamespace) -> Result<()> {
    let (faulty, client) = faulty(namespace).await?;
    let mut ledger = IssuedIds::default();
    for turn in 0..20 {
        let operation = format!("op-{turn}");
        for _ in 0..50 {
            let input = json!({"count": 20});
            match client.call_as(&operation, "order_id.next", &[0.into()], input, None).await {
                Ok(answer) => {
                    for id in drawn_ids(&answer)? {
                        ledger.note(id)?;
                    }
                    break;
                }
                Err(refusal) => ensure!(refusal.code == Code::OutcomeUnknown, "{refusal}"),
            }
        }
    }
    // In the process: a span whose answer was lost stays unused, and the next one lies behind it.
    let ids = TimeIds::new(client.house.clone(), &client.tenant, "lone_id", "a");
    let mut minted = BTreeSet::new();
    for _ in 0..4_000 {
        match ids.next().await {
            Ok(id) => ensure!(minted.insert(id), "{id} was minted twice"),
            Err(refusal) => ensure!(refusal.code == Code::OutcomeUnknown, "{refusal}"),
        }
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 5 && achieved.unknown_before > 5, "{achieved}");
    same("how many were drawn", &ledger.ids.len(), &400)?;
    ensure!(minted.len() > 2_000, "{} were minted", minted.len());
    Ok(())
}

async fn sequences_of_tenants_are_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let other = client.for_tenant("zeta")?;
    for _ in 0..3 {
        client.done("ticket.next", &desk(), json!({}), None).await?;
        let subject = json!({"subject": "a"});
        client.done("invoice_no.take", &year(), subject, None).await?;
        client.done("lone_id.lease", &[], json!({"holder": "a"}), None).await?;
    }
    other.refused("ticket.read", &desk(), json!({}), None, Code::NotFound).await?;
    shows(&other.done("ticket.next", &desk(), json!({}), None).await?, &json!({"first": 100}))?;
    other.done("invoice_no.take", &year(), json!({"subject": "b"}), None).await?;
    check_gapless(&client, 1).await?;
    check_gapless(&other, 1).await?;
    // Another tenant's worker ids are another pool: their ids are the same numbers, in another tenant's rows.
    shows(&other.done("lone_id.lease", &[], json!({"holder": "b"}), None).await?, &json!({"epoch": 1}))?;
    other
        .refused("lone_id.reserve", &[1.into()], json!({"holder": "a", "epoch": 1}), None, Code::NotHolder)
        .await
        .map(drop)
}
