//! What guards mean: comparisons, lists, null, the clock. Each guard is asked of an assert and of an update, since
//! engines compile the two differently.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use statehouse_store::guard::{Comparison, column, is_in, is_null, is_set, now, now_minus, now_plus, value};
use statehouse_store::limits::GUARD_LEAVES_MAX;
use statehouse_store::{Clock, Guard, ManualClock, Operand, Reason, Step, Table, Time, Type, Value};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{
    ladder, longest_ladder, of_every_type, ordered_types, other, sample,
};
use crate::harness::store_client::{StoreClient, same};

const HOUR: Duration = Duration::from_secs(3_600);

/// Requires that a guard holds, or does not, for the row of a key.
async fn check(client: &StoreClient, table: &Arc<Table>, key: i64, guard: Guard, holds: bool) -> Result<()> {
    for step in [Step::assert(table, [key.into()]), Step::update(table, [key.into()])] {
        let plan = client.one(step.guard(guard.clone()));
        if holds {
            client.apply(plan).await?;
        } else {
            let refused = client.refuse(plan).await?;
            ensure!(
                refused.step == 0 && matches!(refused.reason, Reason::Guard { .. }),
                "expected the guard {guard} not to hold, got {refused:?}"
            );
            ensure!(refused.current.is_some(), "the refusal by {guard} does not show the row");
        }
    }
    Ok(())
}

/// Requires that all of the first guards hold, and none of the second, in as few plans as the limits allow.
async fn check_many(
    client: &StoreClient,
    table: &Arc<Table>,
    key: i64,
    hold: &[Guard],
    fail: &[Guard],
) -> Result<()> {
    for chunk in hold.chunks(GUARD_LEAVES_MAX) {
        check(client, table, key, Guard::All(chunk.to_vec()), true).await?;
    }
    for chunk in fail.chunks(GUARD_LEAVES_MAX) {
        check(client, table, key, Guard::Any(chunk.to_vec()), false).await?;
    }
    Ok(())
}

/// All six comparisons of two operands, told apart by whether they hold for operands in this order.
fn sorted_comparisons(
    left: &Operand,
    right: &Operand,
    order: Ordering,
    hold: &mut Vec<Guard>,
    fail: &mut Vec<Guard>,
) {
    for comparison in Comparison::ALL {
        let guard = left.clone().compare(comparison, right.clone());
        if comparison.accepts(order) { hold.push(guard) } else { fail.push(guard) }
    }
}

/// Inserts row 1 of a table of all types, with these columns.
async fn insert(client: &StoreClient, table: &Arc<Table>, columns: &[(&str, Value)]) -> Result<()> {
    let step = Step::insert(table, [1.into()]);
    let step = columns.iter().fold(step, |step, (name, value)| step.set(name, value.clone()));
    client.apply(client.one(step)).await?;
    Ok(())
}

pub(super) async fn comparisons_with_constants_of_every_type(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("ladders").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for place in 0..longest_ladder() {
        let mut step = Step::insert(&table, [(place as i64).into()]);
        for kind in ordered_types() {
            step = step.set(kind.name(), ladder(kind).get(place).cloned().unwrap_or(Value::Null));
        }
        client.apply(client.one(step)).await?;
    }
    for kind in ordered_types() {
        let ladder = ladder(kind);
        for place in 0..ladder.len() {
            let (mut hold, mut fail) = (Vec::new(), Vec::new());
            for (rung, constant) in ladder.iter().enumerate() {
                let (own, constant) = (column(kind.name()), Operand::Value(constant.clone()));
                sorted_comparisons(&own, &constant, place.cmp(&rung), &mut hold, &mut fail);
            }
            check_many(&client, &table, place as i64, &hold, &fail).await?;
        }
    }
    Ok(())
}

pub(super) async fn constants_may_stand_on_the_left(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("numbers").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert(&client, &table, &[("int", 5.into())]).await?;
    let (mut hold, mut fail) = (Vec::new(), Vec::new());
    for constant in [4, 5, 6] {
        sorted_comparisons(&value(constant), &column("int"), constant.cmp(&5), &mut hold, &mut fail);
    }
    check_many(&client, &table, 1, &hold, &fail).await
}

pub(super) async fn comparisons_of_two_columns_of_every_type(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("pairs").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let orders = [(0, 1), (1, 0), (1, 1)];
    for (key, (left, right)) in orders.into_iter().enumerate() {
        let mut step = Step::insert(&table, [(key as i64).into()]);
        for kind in ordered_types() {
            // The last rungs: astral text, huge numbers, octets above 0x80.
            let ladder = ladder(kind);
            let from_end = |back: usize| ladder[ladder.len() - 2 + back].clone();
            step = step.set(kind.name(), from_end(left)).set(&other(kind), from_end(right));
        }
        client.apply(client.one(step)).await?;
        for kind in ordered_types() {
            let (mut hold, mut fail) = (Vec::new(), Vec::new());
            let (first, second) = (column(kind.name()), column(&other(kind)));
            sorted_comparisons(&first, &second, left.cmp(&right), &mut hold, &mut fail);
            sorted_comparisons(&first, &first, Ordering::Equal, &mut hold, &mut fail);
            check_many(&client, &table, key as i64, &hold, &fail).await?;
        }
    }
    Ok(())
}

pub(super) async fn a_comparison_with_null_never_holds(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("gaps").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let mut set: Vec<(String, Value)> = Vec::new();
    for kind in ordered_types() {
        set.push((other(kind), sample(kind, 1)));
    }
    let set: Vec<(&str, Value)> = set.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    insert(&client, &table, &set).await?;
    for kind in ordered_types() {
        let mut fail = Vec::new();
        for comparison in Comparison::ALL {
            // With a constant, with a column that is set, with one that is null too, and with itself.
            let null = || column(kind.name());
            for guard in [
                null().compare(comparison, sample(kind, 1)),
                null().compare(comparison, column(&other(kind))),
                column(&other(kind)).compare(comparison, null()),
                null().compare(comparison, null()),
            ] {
                fail.push(guard.clone());
                fail.push(guard.negated());
            }
        }
        let list = is_in(kind.name(), [sample(kind, 0), sample(kind, 1)]);
        fail.push(list.clone());
        fail.push(list.negated());
        fail.push(is_set(kind.name()));
        fail.push(is_null(&other(kind)));
        let hold = [is_null(kind.name()), is_set(&other(kind))];
        check_many(&client, &table, 1, &hold, &fail).await?;
    }
    Ok(())
}

pub(super) async fn null_can_be_asked_of_every_type(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("presence").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, [1.into()]))).await?;
    for kind in Type::ALL {
        check_many(&client, &table, 1, &[is_null(kind.name())], &[is_set(kind.name())]).await?;
        // The least values are the ones that an engine could take for null: "", 0, false, no octets.
        for value in ladder(kind) {
            let set = Step::update(&table, [1.into()]).set(kind.name(), value);
            client.apply(client.one(set)).await?;
            check_many(&client, &table, 1, &[is_set(kind.name())], &[is_null(kind.name())]).await?;
        }
        let unset = Step::update(&table, [1.into()]).set(kind.name(), Value::Null);
        client.apply(client.one(unset)).await?;
        check_many(&client, &table, 1, &[is_null(kind.name())], &[is_set(kind.name())]).await?;
    }
    Ok(())
}

pub(super) async fn lists_of_every_type(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("lists").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for kind in ordered_types() {
        let (first, last) = (sample(kind, 0), sample(kind, ladder(kind).len() - 1));
        let step = Step::upsert(&table, [1.into()]).set(kind.name(), last.clone());
        client.apply(client.one(step)).await?;
        let with = is_in(kind.name(), [first.clone(), last.clone()]);
        let alone = is_in(kind.name(), [last]);
        let without = is_in(kind.name(), [first]);
        let none = Guard::In(kind.name().to_owned(), Vec::new());
        let hold = [
            with.clone(),
            alone.clone(),
            without.clone().negated(),
            Guard::NotIn(kind.name().into(), vec![]),
        ];
        let fail = [without, none, with.negated(), alone.negated()];
        check_many(&client, &table, 1, &hold, &fail).await?;
    }
    Ok(())
}

pub(super) async fn all_any_and_negation_follow_kleene(namespace: &dyn TestNamespace) -> Result<()> {
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum ExpectedTruth {
        True,
        False,
        Unknown,
    }
    let table = of_every_type("truths").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert(&client, &table, &[("int", 1.into())]).await?;
    let leaves = [
        (column("int").eq(1), ExpectedTruth::True),
        (column("int").eq(2), ExpectedTruth::False),
        (column("other_int").eq(1), ExpectedTruth::Unknown),
    ];
    let (mut hold, mut fail) = (Vec::new(), Vec::new());
    for (a, a_truth) in &leaves {
        for (b, b_truth) in &leaves {
            let truths = [*a_truth, *b_truth];
            let all = Guard::All(vec![a.clone(), b.clone()]);
            let any = Guard::Any(vec![a.clone(), b.clone()]);
            let mut sort = |guard: Guard, holds: bool| {
                if holds { hold.push(guard) } else { fail.push(guard) }
            };
            sort(any.clone(), truths.contains(&ExpectedTruth::True));
            sort(all.clone(), truths == [ExpectedTruth::True; 2]);
            sort(all.negated(), truths.contains(&ExpectedTruth::False));
            sort(any.clone().negated(), truths == [ExpectedTruth::False; 2]);
            sort(any.negated().negated(), truths.contains(&ExpectedTruth::True));
        }
    }
    // One at a time: inside a larger `All` or `Any` an engine that drops brackets could still answer rightly.
    for (guards, holds) in [(hold, true), (fail, false)] {
        for guard in guards {
            check(&client, &table, 1, guard, holds).await?;
        }
    }
    let nested = Guard::Any(vec![
        Guard::All(vec![column("int").eq(1), Guard::Any(vec![column("int").eq(2), column("int").eq(3)])]),
        Guard::All(vec![column("int").eq(1), Guard::Any(vec![column("int").eq(3), is_null("other_int")])]),
    ]);
    check(&client, &table, 1, nested.clone(), true).await?;
    check(&client, &table, 1, nested.negated(), false).await?;
    check(&client, &table, 1, Guard::always(), true).await?;
    check(&client, &table, 1, Guard::never(), false).await?;
    check(&client, &table, 1, Guard::All(vec![Guard::always(), column("int").eq(1)]), true).await?;
    check(&client, &table, 1, Guard::Any(vec![Guard::never(), column("int").eq(1)]), true).await?;
    check(&client, &table, 1, Guard::Any(vec![Guard::never(), column("int").eq(2)]), false).await
}

pub(super) async fn a_constant_stands_in_for_null(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("stand_ins").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, [1.into()]))).await?;
    for kind in ordered_types() {
        let ladder = ladder(kind);
        let (low, high) = (ladder[0].clone(), ladder[1].clone());
        let or_low = Operand::Coalesce(kind.name().to_owned(), low.clone());
        let (mut hold, mut fail) = (Vec::new(), Vec::new());
        sorted_comparisons(&or_low, &Operand::Value(low.clone()), Ordering::Equal, &mut hold, &mut fail);
        sorted_comparisons(&or_low, &Operand::Value(high.clone()), Ordering::Less, &mut hold, &mut fail);
        check_many(&client, &table, 1, &hold, &fail).await?;
        let set = Step::update(&table, [1.into()]).set(kind.name(), high.clone());
        client.apply(client.one(set)).await?;
        let (mut hold, mut fail) = (Vec::new(), Vec::new());
        sorted_comparisons(&or_low, &Operand::Value(low), Ordering::Greater, &mut hold, &mut fail);
        sorted_comparisons(&or_low, &Operand::Value(high), Ordering::Equal, &mut hold, &mut fail);
        check_many(&client, &table, 1, &hold, &fail).await?;
    }
    Ok(())
}

pub(super) async fn guards_see_the_key_and_the_version(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("versions").partition("id", Type::Int).optional("n", Type::Int).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, [7.into()]).set("n", 2))).await?;
    client.apply(client.one(Step::update(&table, [7.into()]).guard(Guard::version(1)))).await?;
    let update = |guard: Guard| client.one(Step::update(&table, [7.into()]).guard(guard));
    for stale in [Guard::version(1), Guard::version(3), column("version").ne(2), column("version").gt(2)] {
        let reason = Reason::Guard { conjunct: 0, guard: Box::new(stale.clone()) };
        client.refuse_as(update(stale), 0, &reason).await?;
    }
    let held = Guard::version(2)
        .and(column("id").eq(7))
        .and(column("version").eq(column("n")))
        .and(column("version").lt(column("id")))
        .and(is_in("version", [1, 2]));
    client.apply(update(held)).await?;
    same("the version after three writes", &client.row(&table, [7.into()]).await?.version(), &3)
}

pub(super) async fn the_failed_conjunct_is_named(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("conjuncts").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert(&client, &table, &[("int", 5.into()), ("text", "x".into())]).await?;
    let good = [
        column("int").eq(5),
        column("text").eq("x").or(column("text").eq("y")),
        is_null("time"),
        column("bool").eq(true).or(is_null("bool")),
    ];
    let bad = [
        column("int").eq(6),
        column("text").eq("z").or(column("text").eq("y")),
        is_set("time"),
        column("bool").eq(true),
    ];
    for first_bad in 0..good.len() {
        // Everything behind the first failure fails too: the first in order is the one to be named.
        let parts = good.iter().take(first_bad).chain(bad.iter().skip(first_bad)).cloned().collect();
        let guard = Guard::All(parts);
        let reason = Reason::Guard { conjunct: first_bad, guard: Box::new(bad[first_bad].clone()) };
        let steps = [
            Step::update(&table, [1.into()]).guard(guard.clone()).set("int", 9),
            Step::assert(&table, [1.into()]).guard(guard.clone()),
            Step::delete(&table, [1.into()]).guard(guard.clone()),
            Step::upsert(&table, [1.into()]).guard(guard.clone()).set("int", 9),
            Step::remove(&table, [1.into()]).guard(guard),
        ];
        for step in steps {
            client.refuse_as(client.one(step), 0, &reason).await?;
        }
    }
    same("the version of a row that no plan changed", &client.row(&table, [1.into()]).await?.version(), &1)
}

pub(super) async fn the_engines_clock_in_guards(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("clocks").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let insert = Step::insert(&table, [1.into()]).set("time", now()).set("other_time", now_plus(HOUR));
    client.apply(client.one(insert)).await?;
    let hold = [
        column("time").le(now()),
        column("time").gt(now_minus(HOUR)),
        column("time").lt(now_plus(HOUR)),
        column("other_time").gt(now()),
        column("other_time").le(now_plus(HOUR)),
        now().ge(column("time")),
        now_plus(2 * HOUR).gt(column("other_time")),
    ];
    let fail = [
        column("time").gt(now()),
        column("time").gt(now_plus(HOUR)),
        column("time").lt(now_minus(HOUR)),
        column("other_time").le(now()),
        column("other_time").lt(now_minus(2 * HOUR)),
    ];
    check_many(&client, &table, 1, &hold, &fail).await
}

pub(super) async fn expiry_is_exact_at_the_boundary(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("holds").build()?;
    let start = Time::from_micros(1_700_000_000_000_001);
    let clock = ManualClock::at(start);
    let client = StoreClient::open_at(namespace, Arc::new(clock.clone()), &[&table]).await?;
    let minute = Duration::from_secs(60);
    client.apply(client.one(Step::insert(&table, [1.into()]).set("time", now_plus(minute)))).await?;
    let expires = start.plus(minute);
    same("the expiry", &client.row(&table, [1.into()]).await?.time("time"), &Some(expires))?;
    let held = column("time").gt(now());
    let expired = column("time").le(now());
    let soon = column("time").le(now_plus(Duration::from_micros(1)));
    let recent = column("time").ge(now_minus(Duration::from_micros(1)));
    for (micros, hold, fail) in [
        (-2, vec![&held, &recent], vec![&expired, &soon]),
        (-1, vec![&held, &soon, &recent], vec![&expired]),
        (0, vec![&expired, &soon, &recent], vec![&held]),
        (1, vec![&expired, &soon, &recent], vec![&held]),
        (2, vec![&expired, &soon], vec![&held, &recent]),
    ] {
        clock.set(Time::from_micros(expires.micros() + micros));
        for (guards, holds) in [(hold, true), (fail, false)] {
            for guard in guards {
                check(&client, &table, 1, guard.clone(), holds).await?;
            }
        }
    }
    Ok(())
}

pub(super) async fn one_reading_of_the_clock_serves_the_plan(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("moments").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for round in 0..20 {
        let (a, b): (i64, i64) = (round * 2, round * 2 + 1);
        let plan = client.noted("moment", &round.to_string(), "moment.noted").steps([
            Step::insert(&table, [a.into()]).set("time", now()).set("other_time", now_plus(HOUR)),
            Step::insert(&table, [b.into()]).set("time", now()).set("other_time", now_minus(HOUR)),
        ]);
        let applied = client.apply(plan).await?;
        let (first, second) = (client.row(&table, [a.into()]).await?, client.row(&table, [b.into()]).await?);
        let noted = applied.record.map(|record| record.at);
        let at = first.time("time");
        ensure!(
            at.is_some() && at == second.time("time"),
            "two steps of one plan read {first:?}, {second:?}"
        );
        same("the record's time", &noted, &at)?;
        let moved = [first.time("other_time"), second.time("other_time")];
        same("the moved times", &moved, &[at.map(|at| at.plus(HOUR)), at.map(|at| at.minus(HOUR))])?;
    }
    Ok(())
}

pub(super) async fn the_clock_may_be_set_back(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("relapses").build()?;
    let clock = ManualClock::at(Time::from_millis(1_700_000_000_000));
    let client = StoreClient::open_at(namespace, Arc::new(clock.clone()), &[&table]).await?;
    let touch = || client.one(Step::upsert(&table, [1.into()]).set("time", now()));
    client.apply(touch()).await?;
    clock.set(Time::from_millis(1_600_000_000_000));
    client.apply(touch()).await?;
    let at = client.row(&table, [1.into()]).await?.time("time");
    same("the time after the clock was set back", &at, &Some(clock.now()))
}
