//! Segments of a scan: they tile the table, they can be stored, resumed and divided again.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use statehouse_store::scan::SEGMENTS_MAX;
use statehouse_store::{Cursor, PlanError, Row, Scan, Segment, Step, StoreError, Table, Type, Value};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{ladder, ordered_types};
use crate::harness::store_client::{StoreClient, fails, same, scan};

/// Rows of one plan.
const INSERTS: usize = 9;

/// A table of rows with a number in each of several partitions.
fn numbered(name: &str) -> Result<Arc<Table>> {
    Ok(Table::named(name).partition("part", Type::Text).sort("n", Type::Int).build()?)
}

/// Inserts rows with these numbers, each in one of three partitions.
async fn insert(client: &StoreClient, table: &Arc<Table>, numbers: &[i64]) -> Result<()> {
    for chunk in numbers.chunks(INSERTS) {
        let key = |n: &i64| [Value::from(format!("p{}", n % 3)), Value::from(*n)];
        client.apply(client.plan().steps(chunk.iter().map(|n| Step::insert(table, key(n))))).await?;
    }
    Ok(())
}

/// The sorted tenants and numbers of rows.
fn found(rows: &[Row]) -> Vec<(String, i64)> {
    let mut found: Vec<(String, i64)> =
        rows.iter().filter_map(|row| Some((row.tenant().to_string(), row.int("n")?))).collect();
    found.sort();
    found
}

/// All rows of several segments of a scan, in pages of 3 rows.
async fn rows_within(client: &StoreClient, whole: &Scan, segments: &[Segment]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for segment in segments {
        // As another process would read it.
        let segment = Segment::parse(&segment.to_string())?;
        rows.extend(scan(client.store.as_ref(), whole.clone().within(segment)?.limit(3)?).await?);
    }
    Ok(rows)
}

pub(super) async fn segments_tile_a_table_also_for_later_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let table = numbered("tiled")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let other = client.for_tenant("other")?;
    insert(&client, &table, &(100..130).collect::<Vec<_>>()).await?;
    insert(&other, &table, &(100..108).collect::<Vec<_>>()).await?;
    let whole = Scan::all(&table);
    let segments = client.store.segments(&whole, 5).await?;
    same("the number of segments", &segments.len(), &5)?;
    let expected = |mine: &[i64], others: &[i64]| {
        let mine = mine.iter().map(|n| (client.tenant.to_string(), *n));
        let mut all: Vec<_> = mine.chain(others.iter().map(|n| (other.tenant.to_string(), *n))).collect();
        all.sort();
        all
    };
    let (mut mine, others): (Vec<i64>, Vec<i64>) = ((100..130).collect(), (100..108).collect());
    let rows = rows_within(&client, &whole, &segments).await?;
    same("the rows of all segments", &found(&rows), &expected(&mine, &others))?;
    // Below, between and above the keys that existed when the table was divided.
    insert(&client, &table, &[1, 2, 3, 500, 501, 502]).await?;
    mine.extend([1, 2, 3, 500, 501, 502]);
    mine.sort_unstable();
    let rows = rows_within(&client, &whole, &segments).await?;
    same("the rows of all segments after inserts", &found(&rows), &expected(&mine, &others))
}

pub(super) async fn segments_of_a_tenant_have_only_its_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let table = numbered("tiled_of_one")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let other = client.for_tenant("other")?;
    insert(&client, &table, &(0..18).collect::<Vec<_>>()).await?;
    insert(&other, &table, &(0..18).collect::<Vec<_>>()).await?;
    let whole = Scan::of(&table, &client.tenant);
    let segments = client.store.segments(&whole, 3).await?;
    let rows = rows_within(&client, &whole, &segments).await?;
    let expected: Vec<_> = (0..18).map(|n| (client.tenant.to_string(), n)).collect();
    same("the rows of the tenant", &found(&rows), &expected)
}

pub(super) async fn a_segment_is_resumed_after_a_cursor(namespace: &dyn TestNamespace) -> Result<()> {
    let table = numbered("resumed")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert(&client, &table, &(0..24).collect::<Vec<_>>()).await?;
    let whole = Scan::all(&table);
    let mut rows = Vec::new();
    for segment in client.store.segments(&whole, 2).await? {
        let part = whole.clone().within(segment)?.limit(2)?;
        let mut next = Some(part.clone());
        while let Some(scan) = next {
            let page = client.store.scan(&scan).await?;
            rows.extend(page.rows);
            let cursor = page.next.map(|cursor| Cursor::parse(&cursor.to_string())).transpose()?;
            next = cursor.map(|cursor| part.clone().after(cursor)).transpose()?;
        }
    }
    let expected: Vec<_> = (0..24).map(|n| (client.tenant.to_string(), n)).collect();
    same("the rows of both segments", &found(&rows), &expected)
}

pub(super) async fn the_rest_of_a_segment_can_be_divided_again(namespace: &dyn TestNamespace) -> Result<()> {
    let table = numbered("divided")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    insert(&client, &table, &(0..27).collect::<Vec<_>>()).await?;
    let whole = Scan::all(&table);
    let segment = client.store.segments(&whole, 1).await?;
    let [segment] = segment.as_slice() else { anyhow::bail!("not one segment: {segment:?}") };
    let part = whole.clone().within(segment.clone())?.limit(5)?;
    let page = client.store.scan(&part).await?;
    let rest = part.clone().after(page.next.context("more than a page of rows")?)?;
    let again = client.store.segments(&rest, 4).await?;
    if again == [segment.clone()] {
        // Segments by hash cannot be divided.
        return Ok(());
    }
    same("the number of segments", &again.len(), &4)?;
    let mut rows = page.rows;
    rows.extend(rows_within(&client, &whole, &again).await?);
    let expected: Vec<_> = (0..27).map(|n| (client.tenant.to_string(), n)).collect();
    same("the first page and the rows of the new segments", &found(&rows), &expected)?;
    let sizes = async |segment: &Segment| {
        Ok::<_, anyhow::Error>(rows_within(&client, &whole, std::slice::from_ref(segment)).await?.len())
    };
    for segment in &again {
        let rows = sizes(segment).await?;
        ensure!((5..=6).contains(&rows), "{rows} of 22 rows in one of 4 segments");
    }
    Ok(())
}

pub(super) async fn segments_of_empty_tables_have_later_rows(namespace: &dyn TestNamespace) -> Result<()> {
    let table = numbered("empty_tiled")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let whole = Scan::all(&table);
    let segments = client.store.segments(&whole, 4).await?;
    ensure!(!segments.is_empty(), "an empty table has no segment");
    same("the rows of an empty table", &rows_within(&client, &whole, &segments).await?.len(), &0)?;
    insert(&client, &table, &(0..9).collect::<Vec<_>>()).await?;
    let rows = rows_within(&client, &whole, &segments).await?;
    let expected: Vec<_> = (0..9).map(|n| (client.tenant.to_string(), n)).collect();
    same("the rows that came later", &found(&rows), &expected)
}

pub(super) async fn keys_of_every_type_can_be_boundaries(namespace: &dyn TestNamespace) -> Result<()> {
    for kind in ordered_types() {
        let table = Table::named(format!("tiled_{kind}")).partition("id", kind).build()?;
        let client = StoreClient::open(namespace, &[&table]).await?;
        let ladder = ladder(kind);
        for chunk in ladder.chunks(INSERTS) {
            let steps = chunk.iter().map(|id| Step::insert(&table, [id.clone()]));
            client.apply(client.plan().steps(steps)).await?;
        }
        let whole = Scan::all(&table);
        let segments = client.store.segments(&whole, ladder.len()).await?;
        let rows = rows_within(&client, &whole, &segments).await?;
        let mut ids: Vec<String> =
            rows.iter().filter_map(|row| row.get("id")).map(Value::to_string).collect();
        let mut expected: Vec<String> = ladder.iter().map(Value::to_string).collect();
        ids.sort();
        expected.sort();
        same(&format!("keys of type {kind}"), &ids, &expected)?;
    }
    Ok(())
}

pub(super) async fn numbers_and_tables_of_segments_are_checked(namespace: &dyn TestNamespace) -> Result<()> {
    let (table, other) = (numbered("checked_one")?, numbered("checked_other")?);
    let client = StoreClient::open(namespace, &[&table, &other]).await?;
    let limit = |error: &StoreError| matches!(error, StoreError::LimitExceeded { .. });
    fails("no segment", client.store.segments(&Scan::all(&table), 0).await, limit)?;
    fails("many segments", client.store.segments(&Scan::all(&table), SEGMENTS_MAX + 1).await, limit)?;
    let segments = client.store.segments(&Scan::all(&table), 2).await?;
    for segment in segments {
        let foreign = Scan::all(&other).within(segment);
        ensure!(matches!(foreign, Err(PlanError::BadSegment { .. })), "a segment of another table");
    }
    let missing = numbered("checked_missing")?;
    let schema = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    fails("a missing table", client.store.segments(&Scan::all(&missing), 2).await, schema)
}
