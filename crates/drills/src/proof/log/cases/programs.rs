//! Programs that read the log over HTTP.

use super::*;

pub(super) async fn claim_as_me(client: &TenantClient, key: &[Value]) -> Result<i64> {
    let claimed = client.done("audit.claim", key, json!({"holder": "me"}), None).await?;
    claimed.body["epoch"].as_i64().context("no epoch")
}

pub(super) fn numbers(poll: &Json) -> Vec<i64> {
    let records = poll["records"].as_array().cloned().unwrap_or_default();
    records.iter().filter_map(|record| record["events"][0]["data"]["row"]["n"].as_i64()).collect()
}

pub(super) async fn a_program_polls_and_commits(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let fixture = LogFixture::over(store.clone(), Arc::new(clock.clone()), BLUEPRINT, 4).await?;
    let client = &fixture.client;
    let partition = one_note(&fixture, &[1, 2, 3]).await?;
    let key = [i64::from(partition).into()];
    client.refused("audit.claim", &[9_999.into()], json!({"holder": "me"}), None, Code::NotFound).await?;
    client.refused("audit.claim", &key, json!({"holder": ""}), None, Code::InvalidInput).await?;
    let epoch = claim_as_me(client, &key).await?;
    same("the epoch", &epoch, &1)?;
    client.refused("audit.claim", &key, json!({"holder": "you"}), None, Code::Held).await?;
    let own = |more: Json| {
        let mut input = json!({"holder": "me", "epoch": epoch});
        for (name, value) in more.as_object().into_iter().flatten() {
            input[name] = value.clone();
        }
        input
    };
    let poll = client.done("audit.poll", &key, own(json!({"limit": 2})), None).await?.body;
    same("the first two", &numbers(&poll), &vec![1, 2])?;
    let record = &poll["records"][0];
    same("its subject", &record["subject"], &json!("note/1"))?;
    same("its event", &record["events"][0]["name"], &json!("note.created"))?;
    let through = poll["through"].as_u64().context("no offset")?;
    clock.advance(Duration::from_secs(2));
    let lag = client.done("audit.read", &key, json!({}), None).await?;
    shows(&lag, &json!({"reached": 0, "lag_records": 3, "lag_ms": 2_000, "missed": 0}))?;
    // Under the old offset and the epoch, and not beyond what there is.
    let commit = |from: u64, to: u64| own(json!({"from": from, "to": to}));
    client.refused("audit.commit", &key, commit(1, through), None, Code::VersionConflict).await?;
    client.refused("audit.commit", &key, commit(0, 999), None, Code::InvalidInput).await?;
    client.refused("audit.commit", &key, commit(2, 1), None, Code::InvalidInput).await?;
    let stale = json!({"holder": "me", "epoch": 0, "from": 0, "to": through});
    client.refused("audit.commit", &key, stale, None, Code::NotHolder).await?;
    let stranger = json!({"holder": "you", "epoch": epoch, "from": 0, "to": through});
    client.refused("audit.commit", &key, stranger, None, Code::NotHolder).await?;
    let expires_at = clock.now().plus(Duration::from_secs(10)).to_string();
    let done = client.done("audit.commit", &key, commit(0, through), None).await?;
    shows(&done, &json!({"reached": through, "expires_at": expires_at}))?;
    client.refused("audit.commit", &key, commit(0, through), None, Code::VersionConflict).await?;
    let poll = client.done("audit.poll", &key, own(json!({})), None).await?.body;
    same("the rest", &numbers(&poll), &vec![3])?;
    // What was polled and not committed is polled again; after an offset of the caller's own, the rest.
    same("again", &numbers(&client.done("audit.poll", &key, json!({}), None).await?.body), &vec![3])?;
    let beyond = json!({"after": poll["through"]});
    same("beyond", &numbers(&client.done("audit.poll", &key, beyond, None).await?.body), &vec![])?;
    let through = poll["through"].as_u64().context("no offset")?;
    let from = poll["reached"].as_u64().context("no offset")?;
    client.done("audit.commit", &key, commit(from, through), None).await?;
    shows(&client.done("audit.read", &key, json!({}), None).await?, &json!({"lag_records": 0, "lag_ms": 0}))?;
    // Back, and forward again: the group's own bookkeeping is no news for anybody.
    client.done("audit.seek", &key, own(json!({"to": 1})), None).await?;
    let poll = client.done("audit.poll", &key, own(json!({})), None).await?.body;
    ensure!(numbers(&poll).ends_with(&[2, 3]), "{poll}");
    let far = client.done("audit.seek", &key, own(json!({"to": 1_000_000})), None).await?;
    ensure!(far.body["reached"].as_u64().is_some_and(|reached| reached >= 3), "{}", far.body);
    same("nothing", &numbers(&client.done("audit.poll", &key, own(json!({})), None).await?.body), &vec![])?;
    let list = client.done("audit.list", &[], json!({}), None).await?;
    same("the partitions", &list.body.as_array().map(Vec::len), &Some(store.partitions() as usize))?;
    let released = client.done("audit.release", &key, own(json!({})), None).await?;
    shows(&released, &json!({"holder": null, "epoch": 1}))?;
    client.refused("audit.renew", &key, own(json!({})), None, Code::NotHolder).await?;
    client.refused("audit.poll", &key, own(json!({})), None, Code::NotHolder).await?;
    Ok(())
}

pub(super) async fn a_program_commits_with_its_effect(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = LogFixture::open(namespace, 4).await?;
    let client = &fixture.client;
    let partition = one_note(&fixture, &[1]).await?;
    let key = [i64::from(partition).into()];
    let epoch = claim_as_me(client, &key).await?;
    let poll = client.done("audit.poll", &key, json!({}), None).await?.body;
    let commit = |from: u64, epoch: i64| {
        let input = json!({"holder": "me", "epoch": epoch, "from": from, "to": poll["through"]});
        TenantClient::request("audit.commit", &key, &input, None)
    };
    let effect = |subject: &str| {
        TenantClient::request("trail.create", &[], &json!({"subject": subject, "steps": "1"}), None)
    };
    let batch = async |requests| client.house.batch(&client.tenant, requests, Operation::default()).await;
    // The effect of a reader that is not the holder, or not at that place, does not happen.
    for (wrong, code) in [(commit(0, epoch - 1), Code::NotHolder), (commit(7, epoch), Code::InvalidInput)] {
        let refused = batch(vec![effect("a"), wrong]).await;
        ensure!(refused.as_ref().is_err_and(|refusal| refusal.code == code), "{refused:?}");
    }
    client.refused("trail.read", &["a".into()], json!({}), None, Code::NotFound).await?;
    batch(vec![effect("a"), commit(0, epoch)]).await?;
    client.shows("trail", &["a".into()], &json!({"steps": "1"})).await?;
    // And not a second time.
    let again = batch(vec![effect("b"), commit(0, epoch)]).await;
    ensure!(again.as_ref().is_err_and(|refusal| refusal.code == Code::VersionConflict), "{again:?}");
    client.refused("trail.read", &["b".into()], json!({}), None, Code::NotFound).await?;
    invariants::check(&client.scope("audit")).await?;
    // Another group sees the effect, and nothing of the bookkeeping beside it.
    let mut seen = Vec::new();
    for partition in 0..client.house.store().partitions() {
        let poll = client.done("other.poll", &[i64::from(partition).into()], json!({}), None).await?.body;
        for record in poll["records"].as_array().into_iter().flatten() {
            for event in record["events"].as_array().into_iter().flatten() {
                seen.push(event["name"].as_str().unwrap_or_default().to_owned());
            }
        }
    }
    seen.sort();
    same("what another group sees", &seen, &vec!["note.created".to_owned(), "trail.created".to_owned()])
}

pub(super) async fn a_program_whose_time_was_up_commits_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let fixture = LogFixture::over(store, Arc::new(clock.clone()), BLUEPRINT, 4).await?;
    let client = &fixture.client;
    let partition = one_note(&fixture, &[1, 2]).await?;
    let key = [i64::from(partition).into()];
    let epoch = claim_as_me(client, &key).await?;
    let poll = client.done("audit.poll", &key, json!({"holder": "me", "epoch": epoch}), None).await?.body;
    clock.advance(Duration::from_secs(9));
    client.done("audit.renew", &key, json!({"holder": "me", "epoch": epoch}), None).await?;
    clock.advance(Duration::from_secs(9));
    client.refused("audit.claim", &key, json!({"holder": "you"}), None, Code::Held).await?;
    clock.advance(Duration::from_secs(1));
    client.refused("audit.renew", &key, json!({"holder": "me", "epoch": epoch}), None, Code::Expired).await?;
    let claimed = client.done("audit.claim", &key, json!({"holder": "you"}), None).await?;
    shows(&claimed, &json!({"holder": "you", "epoch": epoch + 1, "reached": 0}))?;
    // The offset is where the first one has read it; only the epoch tells that it is not the holder any more.
    let to = poll["through"].clone();
    let late = json!({"holder": "me", "epoch": epoch, "from": 0, "to": to});
    client.refused("audit.commit", &key, late.clone(), None, Code::NotHolder).await?;
    client.refused("audit.seek", &key, late_seek(epoch), None, Code::NotHolder).await?;
    let park = json!({"holder": "me", "epoch": epoch, "subject": "note/1", "log_offset": 1, "reason": "x"});
    client.refused("audit.park", &key, park, None, Code::NotHolder).await?;
    client
        .refused("audit.release", &key, json!({"holder": "me", "epoch": epoch}), None, Code::NotHolder)
        .await?;
    let mut own = late;
    (own["holder"], own["epoch"]) = (json!("you"), json!(epoch + 1));
    client.done("audit.commit", &key, own, None).await.map(drop)
}

pub(super) fn late_seek(epoch: i64) -> Json {
    json!({"holder": "me", "epoch": epoch, "to": 0})
}

pub(super) async fn programs_park_and_settle_in_order(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = LogFixture::open(namespace, 4).await?;
    let client = &fixture.client;
    let partition = one_note(&fixture, &[1, 2]).await?;
    let mut id = 1;
    loop {
        id += 1;
        fixture.write("acme", id, 50).await?;
        if position_of(client.house.store().as_ref(), "acme", id, 50).await?.0 == partition {
            break;
        }
    }
    let key = [i64::from(partition).into()];
    let epoch = claim_as_me(client, &key).await?;
    let own = |more: Json| {
        let mut input = json!({"holder": "me", "epoch": epoch});
        for (name, value) in more.as_object().into_iter().flatten() {
            input[name] = value.clone();
        }
        input
    };
    let poll = client.done("audit.poll", &key, own(json!({})), None).await?.body;
    same("at first", &numbers(&poll), &vec![1, 2, 50])?;
    let bad = &poll["records"][0];
    let park =
        own(json!({"subject": bad["subject"], "log_offset": bad["log_offset"], "reason": "no such unit"}));
    let parked = client.done("audit.park", &key, park.clone(), None).await?;
    shows(&parked, &json!({"parked": 1, "reached": 0}))?;
    client.refused("audit.park", &key, park.clone(), None, Code::AlreadyExists).await?;
    // What is behind it is withheld, and parked by the commit that passes it; the rest goes on.
    let poll = client.done("audit.poll", &key, own(json!({})), None).await?.body;
    same("without the key", &numbers(&poll), &vec![50])?;
    let commit = own(json!({"from": 0, "to": poll["through"]}));
    shows(&client.done("audit.commit", &key, commit, None).await?, &json!({"parked": 2}))?;
    client.refused("audit.park", &key, park, None, Code::WrongState).await?;
    let list =
        async || client.done("audit_parked.list", &[], json!({"log_partition": partition}), None).await;
    let rows = list().await?.body;
    let first = &rows[0];
    same("why", &first["reason"], &json!("no such unit"))?;
    same("the record", &first["record"]["events"][0]["data"]["row"]["n"], &json!(1))?;
    same("behind it", &rows[1]["record"]["events"][0]["data"]["row"]["n"], &json!(2))?;
    let of = |row: &Json| -> [Value; 3] {
        let offset = row["log_offset"].as_i64().unwrap_or(0);
        [i64::from(partition).into(), row["subject"].as_str().unwrap_or_default().into(), offset.into()]
    };
    client.shows("audit_parked", &of(first), &json!({"tries": 1})).await?;
    client.refused("audit_parked.settle", &of(&rows[1]), json!({}), None, Code::WrongState).await?;
    let other = client.for_tenant("other")?;
    other.refused("audit_parked.read", &of(first), json!({}), None, Code::NotFound).await?;
    other.refused("audit_parked.settle", &of(first), json!({}), None, Code::NotFound).await?;
    for row in [&rows[0], &rows[1]] {
        client.done("audit_parked.settle", &of(row), json!({}), None).await?;
    }
    client.refused("audit_parked.settle", &of(first), json!({}), None, Code::NotFound).await?;
    same("what is parked", &list().await?.body, &json!([]))?;
    shows(&client.done("audit.read", &key, json!({}), None).await?, &json!({"parked": 0}))?;
    // The key is free again.
    fixture.write("acme", 1, 3).await?;
    position_of(client.house.store().as_ref(), "acme", 1, 3).await?;
    let poll = client.done("audit.poll", &key, own(json!({})), None).await?.body;
    same("at last", &numbers(&poll), &vec![3])
}

pub(super) async fn each_part_of_a_claim_is_asked_for(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("a program parks a record of a partition that it has not read");
    let fixture = LogFixture::open(namespace, 4).await?;
    let (client, store_client) = (&fixture.client, fixture.client.store_client()?);
    let partition = one_note(&fixture, &[1, 2]).await?;
    let key = [i64::from(partition).into()];
    let poll = client.done("audit.poll", &key, json!({}), None).await?.body;
    same("what there is", &numbers(&poll), &vec![1, 2])?;
    let (bad, through) = (&poll["records"][0], &poll["through"]);
    let input = |action: &str, holder: &str, epoch: i64| {
        let mut input = match action {
            "seek" => json!({"to": 0}),
            "park" => json!({"subject": bad["subject"], "log_offset": bad["log_offset"], "reason": "no"}),
            "commit" => json!({"from": 0, "to": through}),
            _ => json!({}),
        };
        input["holder"] = json!(holder);
        input["epoch"] = json!(epoch);
        input
    };
    let ask = async |action: &str, holder: &str, epoch: i64| {
        let told = client.call(&format!("audit.{action}"), &key, input(action, holder, epoch), None).await;
        told.err().map(|refusal| refusal.code)
    };
    let draft = async |action: &str, holder: &str, epoch: i64| {
        client.drafted(&format!("audit.{action}"), &key, input(action, holder, epoch), None).await
    };
    let actions = ["renew", "seek", "park", "commit", "release"];
    // No program has claimed it.
    for action in actions {
        ensure!(ask(action, "me", 1).await.is_some(), "{action} without a claim");
    }
    same("the epoch", &claim_as_me(client, &key).await?, &1)?;
    for action in actions {
        for (holder, epoch) in [("you", 1), ("me", 2)] {
            same(action, &ask(action, holder, epoch).await, &Some(Code::NotHolder))?;
        }
    }
    // What was given back can be claimed at once, by another.
    same("release", &ask("release", "me", 1).await, &None)?;
    let claimed = client.done("audit.claim", &key, json!({"holder": "you"}), None).await?;
    same("the next epoch", &claimed.body["epoch"], &json!(2))?;
    // Something was parked since the commit was drafted, or is parked where it wants to park something.
    let commit = draft("commit", "you", 2).await?;
    same("park", &ask("park", "you", 2).await, &None)?;
    client.too_late(&commit).await?;
    let commit = draft("commit", "you", 2).await?;
    let behind = commit.steps().get(1).context("nothing is behind")?.clone();
    let take_away = || Step::delete(&behind.table, behind.key.iter().cloned());
    store_client.apply(store_client.one(behind.clone())).await?;
    client.too_late(&commit).await?;
    store_client.apply(store_client.one(take_away())).await?;
    same("commit", &ask("commit", "you", 2).await, &None)?;
    // Something was parked or settled since this was to be settled.
    let settled = [
        key[0].clone(),
        bad["subject"].as_str().unwrap_or_default().into(),
        bad["log_offset"].as_i64().unwrap_or(0).into(),
    ];
    let settle = client.drafted("audit_parked.settle", &settled, json!({}), None).await?;
    let [progress, parked] = settle.steps() else { anyhow::bail!("{settle:?}") };
    let count = |count: i64| Step::update(&progress.table, progress.key.iter().cloned()).set("parked", count);
    store_client.apply(store_client.one(count(3))).await?;
    client.too_late(&settle).await?;
    store_client.apply(store_client.one(count(2))).await?;
    store_client.apply(store_client.one(Step::delete(&parked.table, parked.key.iter().cloned()))).await?;
    client.too_late(&settle).await?;
    // The row of progress is gone altogether: no action creates it.
    let next: Vec<Value> = behind.key.iter().skip(1).cloned().collect();
    let mut plans = vec![client.drafted("audit_parked.settle", &next, json!({}), None).await?];
    for action in actions {
        plans.push(draft(action, "you", 2).await.with_context(|| action)?);
    }
    let gone = store_client.one(Step::delete(&progress.table, progress.key.iter().cloned()));
    unattributed(store_client.apply(gone)).await?;
    for plan in &plans {
        client.too_late(plan).await?;
    }
    Ok(())
}

pub(super) async fn programs_see_their_own_tenants_records(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = LogFixture::open(namespace, 4).await?;
    let store = fixture.client.house.store().clone();
    for (tenant, n) in [("acme", 1), ("bond", 2)] {
        for id in 0..8 {
            fixture.write(tenant, id, n).await?;
        }
    }
    for (tenant, n) in [("acme", 1), ("bond", 2), ("core", 3)] {
        let client = fixture.client.for_tenant(tenant)?;
        let mut found = Vec::new();
        for partition in 0..store.partitions() {
            let key = [i64::from(partition).into()];
            // Each tenant has the group to itself.
            let claimed = client.done("audit.claim", &key, json!({"holder": "me"}), None).await?;
            shows(&claimed, &json!({"epoch": 1}))?;
            found.extend(numbers(&client.done("audit.poll", &key, json!({}), None).await?.body));
        }
        let expected = if tenant == "core" { vec![] } else { vec![n; 8] };
        same(tenant, &found, &expected)?;
        let list = client.done("audit.list", &[], json!({}), None).await?.body;
        let lag: u64 =
            list.as_array().into_iter().flatten().filter_map(|one| one["lag_records"].as_u64()).sum();
        same("its lag", &lag, &(expected.len() as u64))?;
        invariants::check(&client.scope("audit")).await?;
    }
    Ok(())
}

pub(super) async fn a_poll_waits_for_what_comes(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = LogFixture::open(namespace, 4).await?;
    let client = fixture.client.clone();
    let partition = one_note(&fixture, &[1]).await?;
    let key = [Value::from(i64::from(partition))];
    let epoch = claim_as_me(&client, &key).await?;
    let poll = client.done("audit.poll", &key, json!({}), None).await?.body;
    let waiting = tokio::spawn({
        let client = client.clone();
        let input = json!({"holder": "me", "epoch": epoch, "after": poll["through"], "wait_ms": 30_000});
        async move { client.done("audit.poll", &key, input, None).await }
    });
    pause().await;
    fixture.write("acme", 1, 2).await?;
    same("what came", &numbers(&waiting.await??.body), &vec![2])
}
use crate::harness::case_check::skip_invariants;
