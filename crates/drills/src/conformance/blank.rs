//! Blank events: what is left in the log of the events of erased rows, in records and in the copies of batches.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::blank::{BlankSubjects, is_blank};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::{EventSubject, partition_of};
use statehouse_store::{
    BlankRange, Commit, Entry, EventTemplate, Plan, Position, Record, Step, StoreError, Value,
};

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::counters;
use crate::harness::store_client::{StoreClient, fails, same};

/// What must not be found again.
const PERSONAL: &str = "ann@example.org";

/// A plan that leaves an event with personal data about each key.
fn told(client: &StoreClient, operation: &str, keys: &[&str]) -> Result<Plan> {
    let mut entry = Entry::about("member", keys[0]).fingerprint("digest");
    for key in keys {
        let row = json!({"email": PERSONAL, "key": key, "version": 3});
        let event = EventTemplate::named("member.updated").with("row", row).with("reason", PERSONAL);
        let is_own = *key == keys[0];
        entry = entry.event(if is_own { event } else { event.with("subject", *key).about("member", *key) });
    }
    Ok(Plan::of(&client.tenant, operation).log(entry).build()?)
}

async fn commit(client: &StoreClient, plan: &Plan) -> Result<()> {
    let outcome = client.store.commit(plan).await?;
    ensure!(matches!(outcome, Commit::Applied(_)), "{outcome:?}");
    Ok(())
}

/// Leaves the event that tells of an erasure, and returns its position.
async fn erased(client: &StoreClient, key: &str) -> Result<Position> {
    let operation = format!("erase {key}");
    let event = EventTemplate::named("member.erased").with("of", json!({"key": key}));
    let entry = Entry::about("member", key).event(event);
    commit(client, &Plan::of(&client.tenant, operation.as_str()).log(entry).build()?).await?;
    client.store.wait_log(&[], std::time::Duration::ZERO).await?;
    let record = client.store.find_operation(&client.tenant, &operation).await?;
    record.and_then(|record| record.position).context("the erasure has no position")
}

/// Blanks the events of keys in the whole log, in pages of `limit` records. Returns how many events were blanked.
async fn blank(client: &StoreClient, keys: &[(&str, Position)], limit: usize) -> Result<usize> {
    let subject = |key: &str| EventSubject { resource: "member".into(), key: key.into() };
    let subjects: BTreeMap<EventSubject, Position> =
        keys.iter().map(|(key, position)| (subject(key), *position)).collect();
    let subjects = Arc::new(BlankSubjects::from([(client.tenant.clone(), subjects)]));
    let heads = client.store.wait_log(&[], std::time::Duration::ZERO).await?;
    let mut events = 0;
    for (partition, through) in (0..).zip(heads) {
        let mut after = 0;
        while after < through {
            let range = BlankRange { partition, after, through, limit, subjects: subjects.clone() };
            let page = client.store.blank_events(&range).await?;
            ensure!(page.reached > after && page.reached <= through, "{page:?} after {after} of {through}");
            (after, events) = (page.reached, events + page.events);
        }
    }
    Ok(events)
}

fn data_of<'r>(records: &'r [Record], operation: &str) -> Vec<&'r Json> {
    let records = records.iter().filter(|record| record.operation == operation);
    records.flat_map(|record| &record.events).map(|event| &event.data).collect()
}

pub(super) async fn positions_names_and_versions_stay(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    for (operation, key) in [("1", "ann"), ("2", "bob"), ("3", "ann")] {
        commit(&client, &told(&client, operation, &[key])?).await?;
    }
    let at = erased(&client, "ann").await?;
    let before = client.exact_log(4).await?;
    same("how many events were blanked", &blank(&client, &[("ann", at)], PAGE_MAX).await?, &2)?;
    let after = client.exact_log(4).await?;
    for (old, new) in before.iter().zip(&after) {
        let is_erased = old.operation == "1" || old.operation == "3";
        let blank = json!({"erased": true, "version": 3});
        for (was, is) in old.events.iter().zip(&new.events) {
            same("the name", &is.name, &was.name)?;
            same("the data", &is.data, if is_erased { &blank } else { &was.data })?;
        }
        let rest = |record: &Record| Record { events: Vec::new(), ..record.clone() };
        same("the rest of the record", &rest(new), &rest(old))?;
    }
    same("how many were blanked again", &blank(&client, &[("ann", at)], PAGE_MAX).await?, &0)?;
    same("the log after it was blanked again", &client.exact_log(4).await?, &after)
}

pub(super) async fn copies_in_batches_are_blanked(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let partitions = client.store.partitions();
    let partition = |key: &str| partition_of(&client.tenant, "member", key, partitions);
    let other = (0..)
        .map(|number: u32| format!("b{number}"))
        .find(|key| partitions == 1 || partition(key) != partition("ann"));
    let other = other.context("there is always another")?;
    let plan = told(&client, "batch", &[other.as_str(), "ann", "third"])?;
    commit(&client, &plan).await?;
    let at = erased(&client, "ann").await?;
    blank(&client, &[("ann", at)], PAGE_MAX).await?;
    let records = client.log(2).await?;
    let blanks = data_of(&records, "batch").into_iter().filter(|data| is_blank(data)).count();
    same("blank events of the batch for readers", &blanks, &1)?;
    // What a repetition is answered from.
    let repeated = client.store.commit(&plan).await?.applied().context("it was applied before")?;
    let known = client.store.find_operation(&client.tenant, "batch").await?;
    for record in [repeated.record, known] {
        let events = record.context("the operation is known")?.events;
        same("its events", &events.len(), &3)?;
        let is_ann = |data: &Json| data["subject"] == "ann";
        let anns: Vec<&Json> = events.iter().map(|event| &event.data).filter(|data| is_ann(data)).collect();
        same("what is left of one", &anns, &vec![&json!({"erased": true, "subject": "ann", "version": 3})])?;
        let personal = events.iter().filter(|event| event.data.to_string().contains(PERSONAL)).count();
        same("events of others", &personal, &2)?;
    }
    Ok(())
}

pub(super) async fn a_row_that_was_created_again_keeps_its_events(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    commit(&client, &told(&client, "before", &["ann"])?).await?;
    let first = erased(&client, "ann").await?;
    commit(&client, &told(&client, "after", &["ann"])?).await?;
    same("how many events were blanked", &blank(&client, &[("ann", first)], PAGE_MAX).await?, &1)?;
    let records = client.exact_log(3).await?;
    ensure!(
        data_of(&records, "before").into_iter().all(is_blank),
        "the former row's event stays: {records:?}"
    );
    ensure!(
        !data_of(&records, "after").into_iter().any(is_blank),
        "the new row's event is gone: {records:?}"
    );
    same("what tells of the erasure", &data_of(&records, "erase ann"), &vec![&json!({"of": {"key": "ann"}})])
}

pub(super) async fn a_range_is_blanked_in_bounded_steps(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    for number in 0..7 {
        let key = if number % 2 == 0 { "ann" } else { "bob" };
        commit(&client, &told(&client, &number.to_string(), &[key])?).await?;
    }
    let at = erased(&client, "ann").await?;
    let subject = EventSubject { resource: "member".into(), key: "ann".into() };
    let subjects = BlankSubjects::from([(client.tenant.clone(), BTreeMap::from([(subject, at)]))]);
    let first = BlankRange {
        partition: at.partition,
        after: 0,
        through: at.offset,
        limit: 1,
        subjects: subjects.into(),
    };
    let page = client.store.blank_events(&first).await?;
    same("how far a step of one record gets", &page.reached, &1)?;
    ensure!(page.events <= 1, "{page:?}");
    let rest = blank(&client, &[("ann", at)], 2).await?;
    same("events that were blanked in all", &(page.events + rest), &4)?;
    let records = client.exact_log(8).await?;
    let blanks =
        records.iter().flat_map(|record| &record.events).filter(|event| is_blank(&event.data)).count();
    same("blank events", &blanks, &4)?;
    let unknown = BlankRange { partition: client.store.partitions(), ..first };
    let is_schema = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    fails("blanking a partition too far", client.store.blank_events(&unknown).await, is_schema)
}

pub(super) async fn other_tenants_keep_their_events(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let other = client.for_tenant("other")?;
    commit(&client, &told(&client, "own", &["ann"])?).await?;
    commit(&other, &told(&other, "theirs", &["ann"])?).await?;
    let at = erased(&client, "ann").await?;
    same("how many events were blanked", &blank(&client, &[("ann", at)], PAGE_MAX).await?, &1)?;
    let records = client.exact_log(3).await?;
    ensure!(!data_of(&records, "theirs").into_iter().any(is_blank), "another tenant's event is gone");
    ensure!(data_of(&records, "own").into_iter().all(is_blank), "the tenant's own event stays");
    Ok(())
}

pub(super) async fn scrubbing_keeps_what_is_there(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("scrubbed")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for number in 0..20 {
        client
            .apply(client.one(Step::insert(&table, [Value::from(format!("row {number}"))]).set("n", number)))
            .await?;
    }
    for number in 0..10 {
        client.apply(client.one(Step::delete(&table, [Value::from(format!("row {number}"))]))).await?;
    }
    commit(&client, &told(&client, "told", &["ann"])?).await?;
    let log = client.exact_log(1).await?;
    client.store.scrub().await?;
    same("the log", &client.exact_log(1).await?, &log)?;
    for number in 0..20_i64 {
        let row = client.find(&table, [Value::from(format!("row {number}"))]).await?;
        same("a row", &row.and_then(|row| row.int("n")), &(number >= 10).then_some(number))?;
    }
    // It goes on working.
    commit(&client, &told(&client, "later", &["ann"])?).await?;
    client.exact_log(2).await.map(drop)
}
