//! Reads: the order of keys, ranges, pages, indexes, scans.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{
    Consistency, Cursor, Query, Random, Row, Scan, Step, StoreError, Table, Tenant, Type, Value,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{counters, ladder, of_every_type, ordered_types};
use crate::harness::store_client::{StoreClient, column_of, fails, keys_of, pause, same, scan};

/// How many inserts go into one plan where a case needs many rows.
const INSERTS: usize = 9;

/// Inserts rows with these keys, in an order that has nothing to do with theirs.
async fn insert_shuffled(client: &StoreClient, table: &Arc<Table>, keys: &[Vec<Value>]) -> Result<()> {
    let mut keys = keys.to_vec();
    let mut random = Random::seeded(keys.len() as u64);
    for index in (1..keys.len()).rev() {
        keys.swap(index, random.below(index as u64 + 1) as usize);
    }
    for chunk in keys.chunks(INSERTS) {
        let steps = chunk.iter().map(|key| Step::insert(table, key.iter().cloned()));
        client.apply(client.plan().steps(steps)).await?;
    }
    Ok(())
}

/// A table of text partitions, sorted by one column.
fn sorted_by(name: &str, kind: Type) -> Result<Arc<Table>> {
    Ok(Table::named(name)
        .partition("part", Type::Text)
        .sort("rank", kind)
        .optional("note", Type::Text)
        .build()?)
}

pub(super) async fn keys_are_in_the_order_of_their_type(namespace: &dyn TestNamespace) -> Result<()> {
    for kind in ordered_types() {
        let table = sorted_by(&format!("ordered_{kind}"), kind)?;
        let client = StoreClient::open(namespace, &[&table]).await?;
        let ladder = ladder(kind);
        let keys: Vec<Vec<Value>> = ladder.iter().map(|rank| vec!["p".into(), rank.clone()]).collect();
        insert_shuffled(&client, &table, &keys).await?;
        let query = || Query::table(&table, &client.tenant, ["p".into()]);
        same(&format!("{kind}, forward"), &column_of(&client.rows(query()?).await?, "rank"), &ladder)?;
        let backward: Vec<Value> = ladder.iter().rev().cloned().collect();
        same(
            &format!("{kind}, backward"),
            &column_of(&client.rows(query()?.backward()).await?, "rank"),
            &backward,
        )?;
        for page in [1, 2, 5] {
            let rows = client.rows(query()?.limit(page)?).await?;
            same(&format!("{kind}, in pages of {page}"), &column_of(&rows, "rank"), &ladder)?;
            let rows = client.rows(query()?.backward().limit(page)?).await?;
            same(&format!("{kind}, backward in pages of {page}"), &column_of(&rows, "rank"), &backward)?;
        }
    }
    Ok(())
}

pub(super) async fn ranges_have_the_bounds_that_were_asked_for(namespace: &dyn TestNamespace) -> Result<()> {
    for kind in ordered_types() {
        let table = sorted_by(&format!("ranged_{kind}"), kind)?;
        let client = StoreClient::open(namespace, &[&table]).await?;
        let ladder = ladder(kind);
        let keys: Vec<Vec<Value>> = ladder.iter().map(|rank| vec!["p".into(), rank.clone()]).collect();
        insert_shuffled(&client, &table, &keys).await?;
        let last = ladder.len() - 1;
        let bounds = |place: usize| [Bound::Included(place), Bound::Excluded(place)];
        let mut lowers = vec![Bound::Unbounded];
        let mut uppers = vec![Bound::Unbounded];
        for place in [0, last / 2, last] {
            lowers.extend(bounds(place));
            uppers.extend(bounds(place));
        }
        for lower in &lowers {
            for upper in &uppers {
                // Bounds that have crossed over ask for nothing, and get it.
                let inside = |place: &usize| {
                    let above = match lower {
                        Bound::Unbounded => true,
                        Bound::Included(bound) => place >= bound,
                        Bound::Excluded(bound) => place > bound,
                    };
                    let below = match upper {
                        Bound::Unbounded => true,
                        Bound::Included(bound) => place <= bound,
                        Bound::Excluded(bound) => place < bound,
                    };
                    above && below
                };
                let mut expected: Vec<Value> =
                    (0..ladder.len()).filter(inside).map(|place| ladder[place].clone()).collect();
                let mut query = Query::table(&table, &client.tenant, ["p".into()])?.limit(4)?;
                query = match lower {
                    Bound::Unbounded => query,
                    Bound::Included(place) => query.from(ladder[*place].clone())?,
                    Bound::Excluded(place) => query.above(ladder[*place].clone())?,
                };
                query = match upper {
                    Bound::Unbounded => query,
                    Bound::Included(place) => query.to(ladder[*place].clone())?,
                    Bound::Excluded(place) => query.below(ladder[*place].clone())?,
                };
                let about = format!("{kind} from {lower:?} to {upper:?}");
                let rows = client.rows(query.clone()).await?;
                same(&about, &column_of(&rows, "rank"), &expected)?;
                expected.reverse();
                let rows = client.rows(query.backward()).await?;
                same(&format!("{about}, backward"), &column_of(&rows, "rank"), &expected)?;
            }
        }
    }
    Ok(())
}

/// A table with two partition and three sort columns, and keys that run into each other when they are joined.
fn deep() -> Result<(Arc<Table>, Vec<Vec<Value>>)> {
    let table = Table::named("deep")
        .partition("p", Type::Text)
        .partition("q", Type::Text)
        .sort("a", Type::Text)
        .sort("b", Type::Int)
        .sort("c", Type::Bytes)
        .build()?;
    let mut keys: Vec<Vec<Value>> = Vec::new();
    for (p, q) in [("x", "yz"), ("xy", "z"), ("x#", "y"), ("x", "#y"), ("", "xyz"), ("xyz", "")] {
        for a in ["", "\u{1}", "#", "a", "a\u{1}", "a#", "ab", "b"] {
            for b in [-1_i64, 2, 10] {
                for c in [vec![], vec![0], vec![255]] {
                    keys.push(vec![p.into(), q.into(), a.into(), b.into(), c.into()]);
                }
            }
        }
    }
    Ok((table, keys))
}

pub(super) async fn keys_of_several_columns_do_not_run_into_each_other(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (table, keys) = deep()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert_shuffled(&client, &table, &keys).await?;
    // The keys were listed partition by partition, in the order of their columns.
    for chunk in keys.chunks(8 * 3 * 3) {
        let partition = chunk[0][..2].to_vec();
        let query = Query::table(&table, &client.tenant, partition.clone())?;
        let rows = client.rows(query.clone().limit(11)?).await?;
        same(&format!("partition {partition:?}"), &keys_of(&rows), &chunk.to_vec())?;
        let mut backward = keys_of(&client.rows(query.backward().limit(10)?).await?);
        backward.reverse();
        same(&format!("partition {partition:?}, backward"), &backward, &chunk.to_vec())?;
    }
    Ok(())
}

pub(super) async fn prefixes_fix_the_leading_columns(namespace: &dyn TestNamespace) -> Result<()> {
    let (table, keys) = deep()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let own: Vec<Vec<Value>> =
        keys.into_iter().filter(|key| key[0] == "x".into() && key[1] == "yz".into()).collect();
    insert_shuffled(&client, &table, &own).await?;
    let query = || Query::table(&table, &client.tenant, ["x".into(), "yz".into()]);
    let expect = |keep: &dyn Fn(&[Value]) -> bool| -> Vec<Vec<Value>> {
        own.iter().filter(|key| keep(&key[2..])).cloned().collect()
    };
    let ten: Value = 10.into();
    let cases: Vec<(&str, Query, Vec<Vec<Value>>)> = vec![
        // A prefix of columns is not a prefix of text: "a" does not stand for "ab".
        ("a", query()?.prefix(["a".into()])?, expect(&|sort| sort[0] == "a".into())),
        ("a, 10", query()?.prefix(["a".into(), 10.into()])?, expect(&|s| s[0] == "a".into() && s[1] == ten)),
        (
            "a, 10, x'00'",
            query()?.prefix(["a".into(), 10.into(), vec![0_u8].into()])?,
            expect(&|s| s[0] == "a".into() && s[1] == ten && s[2] == vec![0_u8].into()),
        ),
        (
            "a from 2",
            query()?.prefix(["a".into()])?.from(2)?,
            expect(&|s| s[0] == "a".into() && s[1] != (-1).into()),
        ),
        (
            "a above 2",
            query()?.prefix(["a".into()])?.above(2)?,
            expect(&|s| s[0] == "a".into() && s[1] == ten),
        ),
        ("a to 2", query()?.prefix(["a".into()])?.to(2)?, expect(&|s| s[0] == "a".into() && s[1] != ten)),
        (
            "a below 2",
            query()?.prefix(["a".into()])?.below(2)?,
            expect(&|s| s[0] == "a".into() && s[1] == (-1).into()),
        ),
        (
            "from a below b",
            query()?.from("a")?.below("b")?,
            expect(&|s| s[0] != "b".into() && matches!(&s[0], Value::Text(t) if t.starts_with('a'))),
        ),
        // A bound on the first column takes in, or leaves out, all rows of that value.
        ("above a", query()?.above("a")?, expect(&|s| matches!(&s[0], Value::Text(t) if t.as_str() > "a"))),
        ("to a", query()?.to("a")?, expect(&|s| matches!(&s[0], Value::Text(t) if t.as_str() <= "a"))),
        ("a prefix of nothing", query()?.prefix(["zzz".into()])?, Vec::new()),
    ];
    for (about, query, mut expected) in cases {
        ensure!(about == "a prefix of nothing" || !expected.is_empty(), "{about} expects nothing");
        same(about, &keys_of(&client.rows(query.clone().limit(4)?).await?), &expected)?;
        expected.reverse();
        same(
            &format!("{about}, backward"),
            &keys_of(&client.rows(query.backward().limit(4)?).await?),
            &expected,
        )?;
    }
    Ok(())
}

pub(super) async fn limits_and_cursors_of_pages(namespace: &dyn TestNamespace) -> Result<()> {
    let table = sorted_by("paged", Type::Int)?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys: Vec<Vec<Value>> = (0..10).map(|rank| vec!["p".into(), rank.into()]).collect();
    insert_shuffled(&client, &table, &keys).await?;
    let query = Query::table(&table, &client.tenant, ["p".into()])?;
    // Every row is a place to go on from, whatever page it came in; and both ways.
    let all = client.rows(query.clone()).await?;
    for (place, row) in all.iter().enumerate() {
        let cursor = Cursor::parse(&query.cursor_at(row).to_string())?;
        let behind = client.rows(query.clone().after(cursor.clone())?).await?;
        same("the rows behind a cursor", &keys_of(&behind), &keys[place + 1..].to_vec())?;
        let mut before = keys_of(&client.rows(query.clone().backward().after(cursor)?).await?);
        before.reverse();
        same("the rows before a cursor", &before, &keys[..place].to_vec())?;
    }
    // A cursor stays valid when its row is deleted, and inside bounds.
    let cursor = query.cursor_at(&all[4]);
    client.apply(client.one(Step::delete(&table, keys[4].clone()))).await?;
    let rows = client.rows(query.clone().from(2)?.below(8)?.limit(2)?.after(cursor.clone())?).await?;
    same("the rows behind a deleted row", &keys_of(&rows), &keys[5..8].to_vec())?;
    let mut rows = keys_of(&client.rows(query.from(2)?.below(8)?.backward().after(cursor)?).await?);
    rows.reverse();
    same("the rows before a deleted row", &rows, &keys[2..4].to_vec())
}

pub(super) async fn a_full_page_is_a_thousand_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let table = sorted_by("crowded", Type::Int)?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let ranks: Vec<i64> = (0..=PAGE_MAX as i64).collect();
    for chunk in ranks.chunks(100) {
        let steps = chunk.iter().map(|rank| Step::insert(&table, ["p".into(), (*rank).into()]));
        client.apply(client.plan().steps(steps)).await?;
    }
    let query = Query::table(&table, &client.tenant, ["p".into()])?;
    let page = client.store.query(&query).await?;
    ensure!(page.rows.len() <= PAGE_MAX && page.next.is_some(), "{} rows in a page", page.rows.len());
    let expected: Vec<Value> = ranks.iter().map(|rank| (*rank).into()).collect();
    same("all pages", &column_of(&client.rows(query).await?, "rank"), &expected)?;
    let scanned = scan(client.store.as_ref(), Scan::all(&table)).await?;
    same("all pages of a scan", &scanned.len(), &ranks.len())
}

pub(super) async fn pages_of_heavy_rows_are_complete(namespace: &dyn TestNamespace) -> Result<()> {
    let table = sorted_by("heavy", Type::Int)?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys: Vec<Vec<Value>> = (0..8).map(|rank| vec!["p".into(), rank.into()]).collect();
    for key in &keys {
        let step = Step::insert(&table, key.clone()).set("note", "x".repeat(300_000));
        client.apply(client.one(step)).await?;
    }
    // Together more than some engine returns at once; it may return fewer rows a page, not fewer in all.
    let query = Query::table(&table, &client.tenant, ["p".into()])?;
    same("a query", &keys_of(&client.rows(query.clone()).await?), &keys)?;
    let scanned = scan(client.store.as_ref(), Scan::of(&table, &client.tenant)).await?;
    same("a scan", &scanned.len(), &keys.len())?;
    let addresses = keys.iter().map(|key| client.address(&table, key.clone())).collect::<Result<Vec<_>>>()?;
    let rows = client.store.get(&addresses, Consistency::Strong).await?;
    let lengths: Vec<Option<usize>> =
        rows.iter().map(|row| Some(row.as_ref()?.text("note")?.len())).collect();
    same("a get", &lengths, &vec![Some(300_000); keys.len()])
}

pub(super) async fn rows_that_stay_are_read_once_while_others_come_and_go(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = sorted_by("lively", Type::Int)?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let stable: Vec<i64> = (0..30).map(|rank| rank * 10).collect();
    let keys: Vec<Vec<Value>> = stable.iter().map(|rank| vec!["p".into(), (*rank).into()]).collect();
    insert_shuffled(&client, &table, &keys).await?;
    let (writer, churned) = (client.clone(), table.clone());
    let churn = tokio::spawn(async move {
        let mut random = Random::seeded(1);
        for _ in 0..120 {
            // Never a multiple of ten: those are the rows that stay.
            let rank = random.below(300) as i64;
            let key = ["p".into(), (rank + i64::from(rank % 10 == 0)).into()];
            let step =
                if random.chance(0.6) { Step::upsert(&churned, key) } else { Step::remove(&churned, key) };
            writer.apply(writer.one(step)).await?;
            tokio::task::yield_now().await;
        }
        anyhow::Ok(())
    });
    let mut rounds = 0;
    while !churn.is_finished() || rounds < 3 {
        let query = Query::table(&table, &client.tenant, ["p".into()])?.limit(3)?;
        let query = if rounds % 2 == 0 { query } else { query.backward() };
        let rows = client.rows(query).await?;
        let mut ranks: Vec<i64> = rows.iter().filter_map(|row| row.int("rank")).collect();
        if rounds % 2 == 1 {
            ranks.reverse();
        }
        ensure!(ranks.windows(2).all(|pair| pair[0] < pair[1]), "the pages are not in order: {ranks:?}");
        ranks.retain(|rank| rank % 10 == 0);
        same("the rows that were there throughout", &ranks, &stable)?;
        let scanned = scan(client.store.as_ref(), Scan::of(&table, &client.tenant).limit(4)?).await?;
        let mut ranks: Vec<i64> = scanned.iter().filter_map(|row| row.int("rank")).collect();
        ranks.retain(|rank| rank % 10 == 0);
        ranks.sort_unstable();
        same("the rows of a scan that were there throughout", &ranks, &stable)?;
        rounds += 1;
    }
    churn.await?
}

pub(super) async fn gets_answer_in_the_order_of_their_addresses(namespace: &dyn TestNamespace) -> Result<()> {
    let (left, right) = (counters("got_left")?, counters("got_right")?);
    let client = StoreClient::open(namespace, &[&left, &right]).await?;
    let other = client.for_tenant("other")?;
    client.apply(client.one(Step::insert(&left, ["a".into()]).set("n", 1))).await?;
    client.apply(client.one(Step::insert(&right, ["a".into()]).set("n", 2))).await?;
    client.apply(other.one(Step::insert(&left, ["a".into()]).set("n", 3))).await?;
    let addresses = [
        client.address(&right, ["a".into()])?,
        client.address(&left, ["missing".into()])?,
        client.address(&left, ["a".into()])?,
        other.address(&left, ["a".into()])?,
        client.address(&right, ["a".into()])?,
    ];
    for consistency in [Consistency::Strong, Consistency::Eventual] {
        let mut tries = 0;
        let numbers = loop {
            let rows = client.store.get(&addresses, consistency).await?;
            let numbers: Vec<Option<i64>> = rows.iter().map(|row| row.as_ref()?.int("n")).collect();
            tries += 1;
            // An eventual read may lag, though not for ever.
            let settled = numbers == [Some(2), None, Some(1), Some(3), Some(2)];
            if settled || consistency == Consistency::Strong || tries == 1_000 {
                break numbers;
            }
            pause().await;
        };
        let expected = vec![Some(2), None, Some(1), Some(3), Some(2)];
        same(&format!("a {consistency:?} get"), &numbers, &expected)?;
    }
    same("a get of nothing", &client.store.get(&[], Consistency::Strong).await?, &Vec::new())
}

pub(super) async fn many_rows_can_be_got_at_once(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("got_many")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let present: Vec<i64> = (0..230).filter(|number| number % 3 != 0).collect();
    for chunk in present.chunks(INSERTS) {
        let steps = chunk.iter().map(|n| Step::insert(&table, [n.to_string().into()]).set("n", *n));
        client.apply(client.plan().steps(steps)).await?;
    }
    let addresses = (0..230)
        .map(|number: i64| client.address(&table, [number.to_string().into()]))
        .collect::<Result<Vec<_>>>()?;
    let rows = client.store.get(&addresses, Consistency::Strong).await?;
    let numbers: Vec<Option<i64>> = rows.iter().map(|row| row.as_ref()?.int("n")).collect();
    let expected: Vec<Option<i64>> = (0..230).map(|number| (number % 3 != 0).then_some(number)).collect();
    same("the numbers", &numbers, &expected)
}

pub(super) async fn strong_reads_see_what_was_acknowledged(namespace: &dyn TestNamespace) -> Result<()> {
    let table = sorted_by("fresh", Type::Int)?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let mut tasks: JoinSet<Result<()>> = JoinSet::new();
    for task in 0..4 {
        let (client, table) = (client.clone(), table.clone());
        tasks.spawn(async move {
            let part: Value = format!("p{task}").into();
            for rank in 0..25_i64 {
                // Having looked before must not make a difference.
                let before = client.find(&table, [part.clone(), rank.into()]).await?;
                ensure!(before.is_none(), "a row is there before it is inserted: {before:?}");
                client.apply(client.one(Step::insert(&table, [part.clone(), rank.into()]))).await?;
                ensure!(
                    client.find(&table, [part.clone(), rank.into()]).await?.is_some(),
                    "an acknowledged insert is not seen by a get"
                );
                let query = Query::table(&table, &client.tenant, [part.clone()])?;
                let count = client.rows(query).await?.len() as i64;
                ensure!(count == rank + 1, "after {} acknowledged inserts a query sees {count}", rank + 1);
            }
            Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

pub(super) async fn eventual_queries_catch_up(namespace: &dyn TestNamespace) -> Result<()> {
    let table = sorted_by("lagging", Type::Int)?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys: Vec<Vec<Value>> = (0..7).map(|rank| vec!["p".into(), rank.into()]).collect();
    insert_shuffled(&client, &table, &keys).await?;
    let query = Query::table(&table, &client.tenant, ["p".into()])?.eventual().limit(2)?;
    client.eventually(&query, |rows| same("an eventual query", &keys_of(rows), &keys)).await
}

/// Posts by author and number, indexed by topic and score, and by score alone.
fn posts() -> Result<Arc<Table>> {
    Ok(Table::named("posts")
        .partition("author", Type::Text)
        .sort("number", Type::Int)
        .optional("topic", Type::Text)
        .optional("score", Type::Int)
        .index("by_topic", &["topic"], &["score"])
        .index("by_score", &[], &["score"])
        .build()?)
}

/// A post's key, topic and score.
type PostRow = (&'static str, i64, Option<&'static str>, Option<i64>);

const POSTS: [PostRow; 9] = [
    ("ann", 1, Some("rust"), Some(5)),
    ("ann", 2, Some("rust"), Some(-3)),
    ("ann", 10, Some("rust"), Some(5)),
    ("bob", 1, Some("rust"), Some(5)),
    ("bob", 2, Some("sql"), Some(5)),
    ("bob", 3, None, Some(9)),
    ("bob", 4, Some("rust"), None),
    ("bob", 5, None, None),
    ("Zed", 1, Some("rust"), Some(7)),
];

async fn insert_posts(client: &StoreClient, table: &Arc<Table>) -> Result<()> {
    for (author, number, topic, score) in POSTS.iter().rev() {
        let step = Step::insert(table, [(*author).into(), (*number).into()]);
        client.apply(client.one(step.set("topic", *topic).set("score", *score))).await?;
    }
    Ok(())
}

/// The keys of posts, as the cases write them.
fn names(rows: &[Row]) -> Vec<String> {
    let name = |row: &Row| Some(format!("{}{}", row.text("author")?, row.int("number")?));
    rows.iter().filter_map(name).collect()
}

async fn expect_posts(client: &StoreClient, query: &Query, expected: &[&str]) -> Result<()> {
    let about = format!("{query:?}");
    let expected: Vec<String> = expected.iter().map(|&name| name.to_owned()).collect();
    client.eventually(query, |rows| same(&about, &names(rows), &expected)).await
}

pub(super) async fn indexes_hold_the_rows_whose_columns_are_set(namespace: &dyn TestNamespace) -> Result<()> {
    let table = posts()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert_posts(&client, &table).await?;
    let topic = |topic: &str| Query::index(&table, "by_topic", &client.tenant, [topic.into()]);
    let score = || Query::index(&table, "by_score", &client.tenant, []);
    let rust = ["ann2", "ann1", "ann10", "bob1", "Zed1"];
    // Within a score the row's key decides: ann before bob, 1 before 10.
    for page in [1, 2, 1_000] {
        expect_posts(&client, &topic("rust")?.limit(page)?, &rust).await?;
        expect_posts(
            &client,
            &topic("rust")?.backward().limit(page)?,
            &["Zed1", "bob1", "ann10", "ann1", "ann2"],
        )
        .await?;
    }
    expect_posts(&client, &topic("sql")?, &["bob2"]).await?;
    expect_posts(&client, &topic("nothing")?, &[]).await?;
    // An index without partition columns has one partition: the tenant.
    expect_posts(&client, &score()?.limit(3)?, &["ann2", "ann1", "ann10", "bob1", "bob2", "Zed1", "bob3"])
        .await?;
    expect_posts(&client, &topic("rust")?.from(5)?.below(7)?, &["ann1", "ann10", "bob1"]).await?;
    expect_posts(&client, &topic("rust")?.above(5)?, &["Zed1"]).await?;
    expect_posts(&client, &topic("rust")?.to(-3)?, &["ann2"]).await?;
    expect_posts(&client, &topic("rust")?.prefix([5.into()])?.limit(2)?, &["ann1", "ann10", "bob1"]).await?;
    // Rows come whole from an index.
    let query = topic("sql")?;
    let stored = client.row(&table, ["bob".into(), 2.into()]).await?;
    client.eventually(&query, |rows| same("the row of an index", &rows.to_vec(), &vec![stored.clone()])).await
}

pub(super) async fn indexes_follow_the_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let table = posts()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert_posts(&client, &table).await?;
    let topic = |topic: &str| Query::index(&table, "by_topic", &client.tenant, [topic.into()]);
    let update = |author: &str, number: i64| Step::update(&table, [author.into(), number.into()]);
    // Moved within its partition, to another, out of the index, into it, and deleted.
    client.apply(client.one(update("ann", 2).set("score", 6))).await?;
    client.apply(client.one(update("ann", 1).set("topic", "sql"))).await?;
    client.apply(client.one(update("bob", 1).set("topic", Value::Null))).await?;
    client.apply(client.one(update("bob", 4).set("score", 0))).await?;
    client.apply(client.one(Step::delete(&table, ["Zed".into(), 1.into()]))).await?;
    expect_posts(&client, &topic("rust")?, &["bob4", "ann10", "ann2"]).await?;
    expect_posts(&client, &topic("sql")?, &["ann1", "bob2"]).await?;
    // A column outside of the index changes what it shows, not where.
    let score = Query::index(&table, "by_score", &client.tenant, [])?;
    expect_posts(&client, &score, &["bob4", "ann1", "ann10", "bob1", "bob2", "ann2", "bob3"]).await?;
    let stored = client.row(&table, ["bob".into(), 1.into()]).await?;
    client
        .eventually(&score.prefix([5.into()])?, |rows| {
            let shown = rows.iter().find(|row| row.key() == stored.key());
            same("a row whose topic was unset", &shown, &Some(&stored))
        })
        .await
}

pub(super) async fn indexes_order_every_type(namespace: &dyn TestNamespace) -> Result<()> {
    let mut table = of_every_type("indexed");
    for kind in ordered_types() {
        table = table.index(&format!("by_{kind}"), &[], &[kind.name()]);
        table = table.index(&format!("at_{kind}"), &[kind.name()], &["id"]);
    }
    let table = table.build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let longest = ordered_types().map(|kind| ladder(kind).len()).max().unwrap_or(0);
    for place in (0..longest).rev() {
        let mut step = Step::insert(&table, [(place as i64).into()]);
        for kind in ordered_types() {
            step = step.set(kind.name(), ladder(kind).get(place).cloned().unwrap_or(Value::Null));
        }
        client.apply(client.one(step)).await?;
    }
    for kind in ordered_types() {
        let ladder = ladder(kind);
        let query = Query::index(&table, &format!("by_{kind}"), &client.tenant, [])?.limit(5)?;
        let about = format!("the index on {kind}");
        client.eventually(&query, |rows| same(&about, &column_of(rows, kind.name()), &ladder)).await?;
        let mut backward = ladder.clone();
        backward.reverse();
        client
            .eventually(&query.backward(), |rows| same(&about, &column_of(rows, kind.name()), &backward))
            .await?;
        for (place, value) in ladder.iter().enumerate() {
            let query = Query::index(&table, &format!("at_{kind}"), &client.tenant, [value.clone()])?;
            let about = format!("the partition of {value} in an index");
            let expected = vec![Value::from(place as i64)];
            client.eventually(&query, |rows| same(&about, &column_of(rows, "id"), &expected)).await?;
        }
    }
    Ok(())
}

pub(super) async fn partitions_that_are_empty_give_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let table = posts()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let queries = [
        Query::table(&table, &client.tenant, ["nobody".into()])?,
        Query::table(&table, &client.tenant, ["nobody".into()])?.backward().from(1)?.to(5)?,
        Query::index(&table, "by_topic", &client.tenant, ["nothing".into()])?,
        Query::index(&table, "by_score", &client.tenant, [])?,
    ];
    for query in queries {
        same("an empty range", &client.rows(query).await?, &Vec::new())?;
    }
    same("an empty table", &scan(client.store.as_ref(), Scan::all(&table)).await?, &Vec::new())
}

pub(super) async fn scans_return_every_row_once(namespace: &dyn TestNamespace) -> Result<()> {
    let table = sorted_by("scanned", Type::Int)?;
    let beside = sorted_by("scanned_too", Type::Int)?;
    let client = StoreClient::open(namespace, &[&table, &beside]).await?;
    let tenants = ["acme", "acme-2", "Acme", "b"];
    let mut expected: BTreeMap<String, usize> = BTreeMap::new();
    for (place, tenant) in tenants.iter().enumerate() {
        let client = client.for_tenant(tenant)?;
        let keys: Vec<Vec<Value>> = (0..=(place as i64 * 7))
            .map(|number| vec![format!("p{}", number % 3).into(), number.into()])
            .collect();
        insert_shuffled(&client, &table, &keys).await?;
        expected.insert((*tenant).to_owned(), keys.len());
    }
    client.apply(client.one(Step::insert(&beside, ["p".into(), 1.into()]))).await?;
    let counted = |rows: &[Row]| -> Result<BTreeMap<String, usize>> {
        let mut seen: Vec<String> = rows.iter().map(Row::to_string).collect();
        let mut counts = BTreeMap::new();
        for row in rows {
            *counts.entry(row.tenant().to_string()).or_default() += 1;
        }
        seen.sort();
        ensure!(seen.windows(2).all(|pair| pair[0] != pair[1]), "a row was scanned twice: {seen:?}");
        Ok(counts)
    };
    for page in [1, 4, PAGE_MAX] {
        let rows = scan(client.store.as_ref(), Scan::all(&table).limit(page)?).await?;
        same(&format!("all tenants in pages of {page}"), &counted(&rows)?, &expected)?;
        for (tenant, count) in &expected {
            let own = Scan::of(&table, &Tenant::new(tenant)?).limit(page)?;
            let rows = scan(client.store.as_ref(), own).await?;
            same("one tenant", &counted(&rows)?, &BTreeMap::from([(tenant.clone(), *count)]))?;
        }
    }
    let nobody = Scan::of(&table, &Tenant::new("nobody")?);
    same("a tenant without rows", &scan(client.store.as_ref(), nobody).await?, &Vec::new())?;
    let row =
        scan(client.store.as_ref(), Scan::all(&beside)).await?.pop().context("the other table is empty")?;
    same("a scanned row", &Some(row.clone()), &client.get(&row.address()).await?)
}

pub(super) async fn tables_must_have_been_migrated_to(namespace: &dyn TestNamespace) -> Result<()> {
    let (known, unknown) = (posts()?, counters("unheard_of")?);
    let client = StoreClient::open(namespace, &[&known]).await?;
    let schema = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    let plan = client.one(Step::insert(&unknown, ["x".into()])).build()?;
    fails("a commit", client.store.commit(&plan).await, schema)?;
    let mixed = client.noted("thing", "x", "made");
    let mixed =
        mixed.step(Step::insert(&known, ["ann".into(), 1.into()])).step(Step::insert(&unknown, ["x".into()]));
    fails("a commit on both", client.store.commit(&mixed.build()?).await, schema)?;
    same("the known table's row", &client.find(&known, ["ann".into(), 1.into()]).await?, &None)?;
    let address = client.address(&unknown, ["x".into()])?;
    fails("a get", client.store.get(&[address], Consistency::Strong).await, schema)?;
    let query = Query::table(&unknown, &client.tenant, ["x".into()])?;
    fails("a query", client.store.query(&query).await, schema)?;
    fails("a scan", client.store.scan(&Scan::all(&unknown)).await, schema)
}
