//! Tenants that send to the same target.

use super::*;

/// One tenant's path at a shared host fails, and the host throttles another tenant. A third tenant's effects to the same
/// host go on, with `hosts` and with one `url`, also where the others' rows fill several pages before them.
pub(super) async fn failures_of_one_tenant_do_not_stop_another(namespace: &dyn TestNamespace) -> Result<()> {
    let blueprint = "[effect.hook]\nhosts = [\"a.example\"]\nidempotent = true\nshards = 1\nlimits = { concurrency = 2 }\n\
                     breaker = { failures = 3, cool_down = \"1h\" }\n\
                     [effect.call]\nurl = \"https://b.example/\"\nidempotent = true\nlimits = { concurrency = 2 }\n\
                     breaker = { failures = 3, cool_down = \"1h\" }\n";
    let script = FakeTargets::of(|outbound, _| match key_of(outbound).split(':').next() {
        Some("acme") => TargetBehavior::Unreachable,
        Some("globex") => TargetBehavior::Answers(TargetResponse {
            status: 429,
            retry_after: Some(HOUR),
            complete: true,
            ..TargetResponse::default()
        }),
        _ => TargetBehavior::status(200),
    });
    let fixture = EffectFixture::with(namespace, script, blueprint).await?;
    let other = fixture.client.for_tenant("globex")?;
    let third = fixture.client.for_tenant("initech")?;
    let url = json!("https://a.example/x");
    for (resource, input) in [("hook", json!({"url": url})), ("call", json!({}))] {
        let send = async |client: &TenantClient, name: String| {
            let mut input = input.clone();
            input["key"] = json!(name);
            client.done(&format!("{resource}.send"), &[], input, None).await
        };
        for number in 0..45 {
            send(&fixture.client, format!("a{number}")).await?;
        }
        send(&other, "g".into()).await?;
        fixture.clock.advance(Duration::from_millis(1));
        send(&third, "i".into()).await?;
        // Steps so small that none of them reads past the rows of the first tenant.
        for _ in 0..1_000 {
            fixture.client.work(3).await?;
            if third.shown(resource, &key("i"), &["status"]).await? == [json!("DELIVERED")] {
                break;
            }
            pause().await;
        }
        third.shows(resource, &key("i"), &json!({"status": "DELIVERED", "attempt": 1})).await?;
        fixture.pass(Duration::ZERO).await?;
        other.shows(resource, &key("g"), &json!({"status": "RETRYING", "http_status": 429})).await?;
        // The breaker of the first tenant is open: three failures, and one more request was in flight.
        let host = if resource == "hook" { "a.example" } else { "b.example" };
        let failed = fixture.script.count(host) - 2;
        ensure!((3..=4).contains(&failed), "{resource}: {failed} requests of the first tenant");
        // Effects that are sent later are not delayed either.
        send(&third, "j".into()).await?;
        fixture.pass(SECOND * 60).await?;
        third.shows(resource, &key("j"), &json!({"status": "DELIVERED", "attempt": 1})).await?;
        same("requests while it is open", &fixture.script.count(host), &(failed + 3))?;
    }
    Ok(())
}

/// Two tenants wait for one target. Each gets half of its slots, and together they never exceed them.
pub(super) async fn tenants_share_the_slots_of_a_target(namespace: &dyn TestNamespace) -> Result<()> {
    let blueprint = "[effect.call]\nurl = \"https://a.example/\"\nlimits = { concurrency = 4 }\n";
    let latch = Latch::default();
    let script = FakeTargets::of({
        let latch = latch.clone();
        move |_, _| TargetBehavior::Holds(latch.clone())
    });
    let fixture = EffectFixture::with(namespace, script, blueprint).await?;
    let other = fixture.client.for_tenant("globex")?;
    for number in 0..10 {
        fixture.send("call", &format!("a{number}")).await?;
    }
    fixture.clock.advance(Duration::from_millis(1));
    for number in 0..4 {
        other.done("call.send", &[], json!({"key": format!("g{number}")}), None).await?;
    }
    let script = fixture.script.clone();
    let first = || {
        let mut tenants = BTreeMap::<String, usize>::new();
        for outbound in script.outbounds().iter().take(4) {
            let tenant = key_of(outbound).split(':').next().unwrap_or_default().to_owned();
            *tenants.entry(tenant).or_default() += 1;
        }
        tenants
    };
    let sender = held_up(&fixture.client, || script.outbounds().len() >= 4).await?;
    for _ in 0..10 {
        pause().await;
    }
    same("in flight", &script.outbounds().len(), &4)?;
    same("slots", &first(), &BTreeMap::from([("acme".into(), 2), ("globex".into(), 2)]))?;
    latch.open();
    sender.await??;
    fixture.pass(SECOND * 5).await?;
    same("all of them", &script.acted().len(), &14)?;
    ensure!(script.most_in_flight() <= 4, "{} were in flight at once", script.most_in_flight());
    Ok(())
}
