//! Targets: their limits, their signatures, their answers, and where nothing may go.

use super::*;

pub(super) async fn pauses_grow_and_targets_are_heard(namespace: &dyn TestNamespace) -> Result<()> {
    let script = FakeTargets::of(|outbound, _| match key_of(outbound).as_str() {
        "acme:mail:patient" => TargetBehavior::Answers(TargetResponse {
            status: 429,
            retry_after: Some(SECOND * 90),
            complete: true,
            ..TargetResponse::default()
        }),
        _ => TargetBehavior::Unreachable,
    });
    let fixture = EffectFixture::open(namespace, script).await?;
    fixture.send("mail", "gone").await?;
    // Each pause is between half of what it may be and all of it, and the last one follows the longest.
    for (tries, most) in [(1, 1), (2, 2), (3, 4)] {
        fixture.pass(Duration::ZERO).await?;
        fixture
            .shows(
                "mail",
                "gone",
                json!({"status": "RETRYING", "tries": tries, "reason": "not_taken", "doubt": false}),
            )
            .await?;
        let wait = fixture.wait("mail", "gone").await?;
        ensure!(wait >= SECOND * most / 2 && wait <= SECOND * most, "after try {tries}: {wait:?}");
        fixture.pass(wait - Duration::from_micros(1)).await?;
        fixture.shows("mail", "gone", json!({"tries": tries})).await?;
        fixture.clock.advance(Duration::from_micros(1));
    }
    fixture.pass(Duration::ZERO).await?;
    fixture
        .shows(
            "mail",
            "gone",
            json!({"status": "PARKED", "tries": 4, "reason": "attempts_exhausted", "due_at": null}),
        )
        .await?;
    fixture.send("mail", "patient").await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("mail", "patient", json!({"status": "RETRYING", "http_status": 429})).await?;
    same("what the target asked for", &fixture.wait("mail", "patient").await?, &(SECOND * 90))?;
    // It asked for itself, not for one effect: nothing else goes there meanwhile.
    let before = fixture.script.outbounds().len();
    fixture.send("mail", "other").await?;
    fixture.pass(SECOND * 89).await?;
    same("requests meanwhile", &fixture.script.outbounds().len(), &before)?;
    fixture.pass(SECOND).await?;
    ensure!(fixture.script.outbounds().len() > before, "it is never asked again");
    Ok(())
}

pub(super) async fn nothing_is_sent_before_its_time_or_after_its_end(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let script = FakeTargets::of(|outbound, number| match key_of(outbound).as_str() {
        "acme:charge:lost" if outbound.method == "GET" => TargetBehavior::status(404),
        "acme:charge:lost" if number < 3 => TargetBehavior::Swallows,
        _ => TargetBehavior::status(200),
    });
    let fixture = EffectFixture::open(namespace, script).await?;
    let client = &fixture.client;
    let at =
        |seconds: u64| fixture.clock.now().plus(SECOND * u32::try_from(seconds).unwrap_or(0)).to_string();
    for (name, input) in [
        ("after", json!({"after_ms": 5_000})),
        ("at", json!({"due_at": at(3), "after_ms": 2_000})),
        ("late", json!({"due_at": at(5), "expires_at": at(5)})),
        ("soon", json!({"expires_at": at(5)})),
        ("lost", json!({"expires_at": at(5)})),
    ] {
        let mut input = input;
        input["key"] = json!(name);
        client.done("charge.send", &[], input, None).await?;
    }
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("charge", "soon", json!({"status": "DELIVERED"})).await?;
    same("what was sent", &fixture.script.outbounds().len(), &2)?;
    fixture.pass(SECOND * 5 - Duration::from_micros(1)).await?;
    same("what was sent", &fixture.script.outbounds().len(), &2)?;
    fixture.pass(Duration::from_micros(1)).await?;
    for name in ["after", "at"] {
        fixture.shows("charge", name, json!({"status": "DELIVERED"})).await?;
    }
    fixture.shows("charge", "late", json!({"status": "PARKED", "reason": "expired", "attempt": 0})).await?;
    // One that may have been applied is not over by its time: it is asked about, and then not sent again.
    fixture.shows("charge", "lost", json!({"status": "UNCERTAIN", "attempt": 1})).await?;
    fixture.pass(SECOND * 5).await?;
    fixture
        .shows(
            "charge",
            "lost",
            json!({"status": "PARKED", "reason": "expired", "attempt": 1, "doubt": false}),
        )
        .await?;
    // A process whose clock is behind does not send what has expired by the engine's.
    let skewed = SkewedClock::over(Arc::new(fixture.clock.clone()));
    skewed.skew(-1_000_000);
    let store = client.house.store().clone();
    let behind =
        TenantClient::before(store, BLUEPRINT, Arc::new(skewed), fixture.script.egress(SECRETS)).await?;
    let early = fixture.clock.now().minus(SECOND * 2).to_string();
    let input = json!({"key": "behind", "due_at": early, "expires_at": fixture.clock.now().to_string()});
    client.done("charge.send", &[], input, None).await?;
    let before = fixture.script.outbounds().len();
    behind.drain_workers().await?;
    same("what was sent", &fixture.script.outbounds().len(), &before)?;
    fixture.shows("charge", "behind", json!({"status": "PENDING", "attempt": 0})).await
}

pub(super) async fn what_is_rejected_is_parked_and_can_be_replayed(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let script = FakeTargets::of(|_, number| match number {
        0 => TargetBehavior::body(422, "no such account"),
        1 => TargetBehavior::status(302),
        _ => TargetBehavior::status(200),
    });
    let fixture = EffectFixture::open(namespace, script).await?;
    let client = &fixture.client;
    fixture.send("mail", "one").await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("mail", "one", json!({"status": "PARKED", "reason": "rejected", "http_status": 422, "answer": "no such account", "doubt": false, "due_at": null})).await?;
    fixture.pass(HOUR * 24).await?;
    same("how often it was sent", &fixture.script.outbounds().len(), &1)?;
    for tries in 0.. {
        let list = client.done("mail.list", &[], json!({}), None).await?;
        let keys: Vec<&Json> =
            list.body.as_array().context("no list")?.iter().map(|row| &row["key"]).collect();
        if keys == [&json!("one")] {
            break;
        }
        ensure!(tries < 1_000, "parked: {keys:?}");
        pause().await;
    }
    let replayed = client.done("mail.replay", &key("one"), json!({}), None).await?;
    shows(&replayed, &json!({"status": "PENDING", "tries": 0, "attempt": 1, "reason": null}))?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("mail", "one", json!({"status": "PARKED", "reason": "redirected", "attempt": 2})).await?;
    client.done("mail.replay", &key("one"), json!({}), None).await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("mail", "one", json!({"status": "DELIVERED", "attempt": 3, "tries": 1})).await?;
    client.refused("mail.replay", &key("one"), json!({}), None, Code::WrongState).await.map(drop)
}

pub(super) async fn a_changed_blueprint_holds_for_what_is_due(namespace: &dyn TestNamespace) -> Result<()> {
    let first = "[effect.call]\nurl = \"https://wrong.example/\"\nidempotent = true\nback_off = { min = \"1s\", max = \"1s\" }\n\
                 [effect.hook]\nhosts = [\"a.example\", \"b.example\"]\n";
    let second = "[effect.call]\nurl = \"https://right.example/\"\nback_off = { min = \"1s\", max = \"1s\" }\n\
                  [effect.hook]\nhosts = [\"b.example\"]\n";
    let script = FakeTargets::of(|outbound, _| match (outbound.url.host(), key_of(outbound).as_str()) {
        (Some("wrong.example"), "acme:call:doubtful") => TargetBehavior::status(500),
        (Some("wrong.example"), _) => TargetBehavior::status(404),
        _ => TargetBehavior::status(200),
    });
    let before = EffectFixture::with(namespace, script.clone(), first).await?;
    for name in ["one", "doubtful"] {
        before.client.done("call.send", &[], json!({"key": name}), None).await?;
    }
    before.pass(Duration::ZERO).await?;
    before.shows("call", "one", json!({"status": "PARKED", "url": "https://wrong.example/"})).await?;
    before.shows("call", "doubtful", json!({"status": "RETRYING", "doubt": true})).await?;
    for host in ["a", "b"] {
        let input = json!({"key": host, "url": format!("https://{host}.example/")});
        before.client.done("hook.send", &[], input, None).await?;
    }
    let store = before.client.house.store().clone();
    let clock: Arc<dyn Clock> = Arc::new(before.clock.clone());
    let after = TenantClient::before(store, second, clock, script.egress(&[])).await?;
    // A replay goes to where the blueprint says now, and the effect is still the same one.
    after.done("call.replay", &key("one"), json!({}), None).await?;
    // What may have been applied is not sent again to a target that is no longer declared to do a key once.
    after.refused("call.replay", &key("doubtful"), json!({}), None, Code::WrongState).await?;
    after.drain_workers().await?;
    after
        .shows("call", &key("one"), &json!({"status": "DELIVERED", "url": "https://right.example/"}))
        .await?;
    after.done("call.send", &[], json!({"key": "one"}), None).await?;
    // A host that is not allowed any more gets nothing, also of what was written down before.
    after
        .shows("hook", &key("a"), &json!({"status": "PARKED", "reason": "address_forbidden", "attempt": 0}))
        .await?;
    after.shows("hook", &key("b"), &json!({"status": "DELIVERED"})).await?;
    same("requests to a", &script.count("a.example"), &0)
}

pub(super) async fn a_broken_target_is_left_alone_and_others_go_on(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let healed = Arc::new(AtomicBool::new(false));
    let script = FakeTargets::of({
        let healed = healed.clone();
        move |outbound, _| {
            let up = outbound.url.host() != Some("a.example") || healed.load(Ordering::SeqCst);
            if up { TargetBehavior::status(200) } else { TargetBehavior::Unreachable }
        }
    });
    let fixture = EffectFixture::open(namespace, script).await?;
    let script = &fixture.script;
    // More than a step looks at stand before the others.
    for number in 0..20 {
        fixture.send_hook(&format!("a{number}"), "https://a.example/x").await?;
    }
    fixture.clock.advance(Duration::from_millis(1));
    for number in 0..5 {
        fixture.send_hook(&format!("b{number}"), "https://b.example/x").await?;
    }
    fixture.pass(Duration::ZERO).await?;
    for number in 0..5 {
        fixture.shows("hook", &format!("b{number}"), json!({"status": "DELIVERED", "attempt": 1})).await?;
    }
    // Three failures open the breaker; one more was under way.
    let failed = script.count("a.example");
    ensure!((3..=4).contains(&failed), "{failed} requests went to a target that is down");
    let gauges = fixture.client.house.resources().iter().flat_map(|resource| &resource.workers);
    let open =
        gauges.flat_map(|worker| worker.gauges()).find(|gauge| gauge.label.1 == "open" && gauge.value > 0.0);
    ensure!(open.is_some(), "the open breaker is not visible");
    // While it is open nothing goes there, and no tries are used up.
    fixture.pass(SECOND * 29).await?;
    same("requests while it is open", &script.count("a.example"), &failed)?;
    let untouched = async || -> Result<usize> {
        let mut count = 0;
        for number in 0..20 {
            let shown =
                fixture.client.shown("hook", &key(&format!("a{number}")), &["status", "tries"]).await?;
            count += usize::from(shown == [json!("PENDING"), json!(0)]);
        }
        Ok(count)
    };
    same("those that wait", &untouched().await?, &(20 - failed))?;
    // After the cool-down one probe goes; it fails, and all wait again.
    fixture.pass(SECOND * 5).await?;
    same("a probe", &script.count("a.example"), &(failed + 1))?;
    healed.store(true, Ordering::SeqCst);
    fixture.pass(SECOND * 20).await?;
    same("requests while it is open", &script.count("a.example"), &(failed + 1))?;
    for _ in 0..10 {
        fixture.pass(SECOND * 8).await?;
    }
    for number in 0..20 {
        fixture.shows("hook", &format!("a{number}"), json!({"status": "DELIVERED"})).await?;
    }
    same("done", &script.acted().values().filter(|times| **times == 1).count(), &25)
}

pub(super) async fn no_target_gets_more_than_its_limits(namespace: &dyn TestNamespace) -> Result<()> {
    let blueprint = "[effect.hook]\nhosts = [\"a.example\", \"b.example\"]\nshards = 1\nlimits = { per_second = 5 }\n\
                     [effect.slow]\nurl = \"https://slow.example/\"\nlimits = { concurrency = 3 }\n";
    let door = Latch::default();
    let script = FakeTargets::of({
        let door = door.clone();
        move |outbound, _| match outbound.url.host() {
            Some("slow.example") => TargetBehavior::Holds(door.clone()),
            _ => TargetBehavior::status(200),
        }
    });
    let fixture = EffectFixture::with(namespace, script, blueprint).await?;
    for number in 0..8 {
        fixture.client.done("slow.send", &[], json!({"key": format!("{number}")}), None).await?;
    }
    let sender = held_up(&fixture.client, || fixture.script.outbounds().len() >= 3).await?;
    for _ in 0..10 {
        pause().await;
    }
    same("at once", &fixture.script.outbounds().len(), &3)?;
    door.open();
    sender.await??;
    fixture.client.drain_workers().await?;
    same("all of them", &fixture.script.count("slow.example"), &8)?;
    ensure!(
        fixture.script.most_in_flight() <= 3,
        "{} were under way at once",
        fixture.script.most_in_flight()
    );
    for number in 0..12 {
        fixture.send_hook(&format!("a{number}"), "https://a.example/x").await?;
    }
    fixture.pass(Duration::ZERO).await?;
    same("in the first moment", &fixture.script.count("a.example"), &5)?;
    fixture.send_hook("b", "https://b.example/x").await?;
    fixture.pass(Duration::ZERO).await?;
    same("another target", &fixture.script.count("b.example"), &1)?;
    // Rows that were put off come back within two seconds, and then five go in each.
    let mut counts = Vec::new();
    for _ in 0..6 {
        fixture.pass(SECOND).await?;
        counts.push(fixture.script.count("a.example"));
    }
    same("in the end", &counts.last(), &Some(&12))?;
    let jumps = std::iter::once(5).chain(counts.iter().copied()).zip(counts.iter().copied());
    ensure!(jumps.into_iter().all(|(before, after)| after - before <= 5), "{counts:?}");
    Ok(())
}

pub(super) async fn a_slow_target_delays_no_other_target(namespace: &dyn TestNamespace) -> Result<()> {
    let door = Latch::default();
    let script = FakeTargets::of({
        let door = door.clone();
        move |outbound, _| {
            if outbound.url.host() == Some("a.example") {
                TargetBehavior::Holds(door.clone())
            } else {
                TargetBehavior::status(200)
            }
        }
    });
    let fixture = EffectFixture::open(namespace, script).await?;
    for number in 0..6 {
        fixture.send_hook(&format!("a{number}"), "https://a.example/x").await?;
        fixture.send_hook(&format!("b{number}"), "https://b.example/x").await?;
        fixture.send_hook(&format!("c{number}"), "https://any.c.example/x").await?;
    }
    // One step: the slow target has two requests under way, the others get all of theirs meanwhile.
    let sender = held_up(&fixture.client, || fixture.script.outbounds().len() >= 14).await?;
    for _ in 0..1_000 {
        let mut done = 0;
        for name in ["b", "c"] {
            for number in 0..6 {
                let shown =
                    fixture.client.shown("hook", &key(&format!("{name}{number}")), &["status"]).await?;
                done += usize::from(shown[0] == json!("DELIVERED"));
            }
        }
        if done == 12 {
            break;
        }
        pause().await;
    }
    same("the slow one", &fixture.script.count("a.example"), &2)?;
    for name in ["b5", "c5"] {
        fixture.shows("hook", name, json!({"status": "DELIVERED"})).await?;
    }
    door.open();
    sender.await??;
    fixture.client.drain_workers().await?;
    for _ in 0..5 {
        fixture.pass(SECOND).await?;
    }
    same("all of them", &fixture.script.acted().len(), &18)
}

pub(super) const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
pub(super) const SECOND_SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
/// Computed with Python's `hmac` for the request of the cases below: id `acme:interceptor:order-7`, timestamp 1800000000, body
/// `{"paid":"für 7 €"}`.
pub(super) const BY_FIRST: &str = "v1,vfwQI9UHBk1wupo+YasOtGWRUWSBXP+52UpA8qgzhBM=";
pub(super) const BY_SECOND: &str = "v1,0X7GUimqX8YLRXmqKMqMM5oC+lPK84QDxDvEAy3E50k=";

pub(super) async fn signatures_are_as_receivers_expect_them(namespace: &dyn TestNamespace) -> Result<()> {
    let target = TestHttpServer::open(|_, _| ServerReaction::answer(204, &[], b"")).await?;
    let blueprint = format!(
        "[effect.hook]\nurl = \"http://{}/\"\nallow_private = true\nsign = [\"env:NEW\", \"env:OLD\"]\n",
        target.address
    );
    let clock = standing();
    let secrets = Arc::new(TestSecrets::of(&[("NEW", SECOND_SECRET), ("OLD", FIRST)]));
    let egress = Egress { environment: secrets.clone(), ..Egress::default() };
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let client = TenantClient::before(store, &blueprint, Arc::new(clock.clone()), egress).await?;
    for tenant in ["acme", "bond", "core", "dent"] {
        client
            .for_tenant(tenant)?
            .done("hook.send", &[], json!({"key": "order-7", "body": {"paid": "für 7 €"}}), None)
            .await?;
        match tenant {
            // During a rotation there are two, and afterwards one; without any nothing is sent.
            "bond" => secrets.set("OLD", None),
            "core" => secrets.set("NEW", None),
            "dent" => secrets.set("OLD", Some("not a secret")),
            _ => {}
        }
        client.drain_workers().await?;
    }
    let got = target.got();
    same("how many were sent", &got.len(), &2)?;
    let headers = |number: usize, name: &str| got[number].headers.get(name).cloned().unwrap_or_default();
    same("the body", &got[0].body, &"{\"paid\":\"für 7 €\"}".as_bytes().to_vec())?;
    same("webhook-id", &headers(0, "webhook-id"), &"acme:hook:order-7".to_owned())?;
    same("webhook-timestamp", &headers(0, "webhook-timestamp"), &"1800000000".to_owned())?;
    same("webhook-signature", &headers(0, "webhook-signature"), &format!("{BY_SECOND} {BY_FIRST}"))?;
    same("webhook-id", &headers(1, "webhook-id"), &"bond:hook:order-7".to_owned())?;
    ensure!(!headers(1, "webhook-signature").contains(' '), "{}", headers(1, "webhook-signature"));
    // What could not be signed waits as if nothing had been tried, and goes when the secret is there.
    for tenant in ["core", "dent"] {
        client
            .for_tenant(tenant)?
            .shows("hook", &key("order-7"), &json!({"status": "PENDING", "attempt": 0}))
            .await?;
    }
    let failures: Vec<String> =
        client.work(7).await?.into_iter().flat_map(|progress| progress.failures).collect();
    ensure!(failures.len() == 2 && !failures.iter().any(|why| why.contains("not a secret")), "{failures:?}");
    secrets.set("OLD", Some(FIRST));
    client.drain_workers().await?;
    same("how many were sent", &target.got().len(), &4)
}

/// FakeResolver and the addresses that they have, one list for each time they are asked for.
#[derive(Debug)]
pub(super) struct FakeResolver(Mutex<BTreeMap<&'static str, Vec<Vec<&'static str>>>>);

#[async_trait]
impl Resolver for FakeResolver {
    async fn resolve(&self, host: &str) -> Result<Vec<std::net::IpAddr>, String> {
        let mut names = self.0.lock().map_err(|error| error.to_string())?;
        let lists = names.get_mut(host).ok_or("no such name")?;
        let list = if lists.len() > 1 { lists.remove(0) } else { lists.first().cloned().unwrap_or_default() };
        list.iter().map(|text| text.parse().map_err(|_| "a bad address".to_owned())).collect()
    }
}

pub(super) async fn nothing_goes_where_it_must_not(namespace: &dyn TestNamespace) -> Result<()> {
    let redirect =
        TestHttpServer::open(|_, _| ServerReaction::answer(307, &[("location", "http://127.0.0.1:1/")], b""))
            .await?;
    let port = redirect.address.port();
    let blueprint = format!(
        "[effect.hook]\nhosts = [\"*\"]\nshards = 1\n\n[effect.narrow]\nhosts = [\"a.example\", \"*.b.example:8443\"]\n\n\
         [effect.own]\nhosts = [\"*:{port}\"]\nallow_private = true\n"
    );
    let names = FakeResolver(Mutex::new(
        [
            ("inner.example", vec![vec!["10.0.0.7"]]),
            ("two-faced.example", vec![vec!["93.184.216.34", "127.0.0.1"]]),
            ("mapped.example", vec![vec!["::ffff:169.254.169.254"]]),
            ("metadata.example", vec![vec!["169.254.169.254"]]),
            // A name that resolves to one address for the check, and to another one for the connection.
            ("rebound.example", vec![vec!["127.0.0.1"], vec!["127.0.0.9"]]),
        ]
        .into(),
    ));
    let transport = HttpTransport::default().resolving_by(Arc::new(names));
    let egress = Egress { transport: Some(Arc::new(transport)), ..Egress::default() };
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let client = TenantClient::before(store, &blueprint, Arc::new(clock.clone()), egress).await?;
    let forbidden = [
        "https://127.0.0.1/",
        "https://10.1.2.3/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fd00::1]/",
        "https://[fe80::1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://0.0.0.0/",
        "https://192.168.1.1/",
        "https://100.64.0.1/",
        "https://224.0.0.1/",
        "https://inner.example/",
        "https://two-faced.example/",
        "https://mapped.example/",
    ];
    for (number, url) in forbidden.iter().enumerate() {
        client.done("hook.send", &[], json!({"key": format!("{number}"), "url": url}), None).await?;
    }
    client.drain_workers().await?;
    for (number, url) in forbidden.iter().enumerate() {
        client
            .shows(
                "hook",
                &key(&number.to_string()),
                &json!({"status": "PARKED", "reason": "address_forbidden"}),
            )
            .await
            .with_context(|| (*url).to_owned())?;
        let row = client.done("hook.read", &key(&number.to_string()), json!({}), None).await?;
        let told = [&row.body["detail"], &row.body["answer"]];
        let inner = ["10.0.0.7", "169.254.169.254", "93.184.216.34", "127.0.0.1"];
        let reveals = |address: &&str| told.iter().any(|text| text.to_string().contains(*address));
        let revealed = inner.iter().find(|address| reveals(address) && !url.contains(**address));
        ensure!(revealed.is_none(), "{url}: {told:?} reveal {revealed:?}");
    }
    for (resource, url) in [
        ("hook", "http://a.example/"),
        ("hook", "https://a.example:22/"),
        ("hook", "https://user:pw@a.example/"),
        ("hook", "ftp://a.example/"),
        ("hook", "file:///etc/passwd"),
        ("hook", "a.example"),
        ("narrow", "https://c.example/"),
        ("narrow", "https://a.example.evil.example/"),
        ("narrow", "https://a.example:8443/"),
        ("narrow", "https://x.b.example/"),
        ("narrow", "https://b.example:8443/"),
        ("narrow", "https://a.example@c.example/"),
        ("own", "http://127.0.0.1/"),
    ] {
        client
            .refused(
                &format!("{resource}.send"),
                &[],
                json!({"key": "no", "url": url}),
                None,
                Code::InvalidInput,
            )
            .await?;
    }
    client.refused("narrow.send", &[], json!({"key": "no"}), None, Code::InvalidInput).await?;
    client
        .done(
            "narrow.send",
            &[],
            json!({"key": "ok", "url": "https://x.b.example:8443/", "after_ms": 60_000}),
            None,
        )
        .await?;
    // One's own network can be opened; metadata services stay closed, and redirects are not followed.
    for (name, host) in
        [("redirect", "127.0.0.1"), ("rebound", "rebound.example"), ("metadata", "metadata.example")]
    {
        let url = format!("http://{host}:{port}/");
        client.done("own.send", &[], json!({"key": name, "url": url}), None).await?;
    }
    client.drain_workers().await?;
    for (name, reason) in
        [("redirect", "redirected"), ("rebound", "redirected"), ("metadata", "address_forbidden")]
    {
        client.shows("own", &key(name), &json!({"status": "PARKED", "reason": reason})).await?;
    }
    same("how many requests came", &redirect.got().len(), &2)?;
    let host = redirect.got()[1].headers.get("host").cloned();
    ensure!(host.is_some_and(|host| host.ends_with(&format!(":{port}"))), "{:?}", redirect.got());
    Ok(())
}

pub(super) async fn hostile_answers_are_borne(namespace: &dyn TestNamespace) -> Result<()> {
    let target = TestHttpServer::open(|got, _| {
        let head =
            |length: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").into_bytes();
        match got.headers.get("idempotency-key").map(String::as_str) {
            Some("acme:call:long") => ServerReaction::answer(200, &[], &vec![b'x'; 5_000_000]),
            Some("acme:call:endless") => {
                ServerReaction::Stalls([head(1 << 40), vec![b'y'; 100_000]].concat())
            }
            Some("acme:call:zeros") => ServerReaction::answer(200, &[], b"a\0b\xff\xfe\0"),
            Some("acme:call:cut") => ServerReaction::Writes([head(500), b"only this".to_vec()].concat()),
            Some("acme:call:later") => {
                ServerReaction::answer(503, &[("retry-after", "99999999999999999999")], b"")
            }
            _ => ServerReaction::Writes(b"HTTP/1.1 nonsense\r\n\r\n".to_vec()),
        }
    })
    .await?;
    let blueprint = format!(
        "[effect.call]\nurl = \"http://{}/\"\nallow_private = true\nanswer_max = 1000\nidempotent = true\n",
        target.address
    );
    let client = TenantClient::open_at(namespace, &blueprint, Arc::new(standing())).await?;
    for name in ["long", "endless", "zeros", "cut", "later", "nonsense"] {
        client.done("call.send", &[], json!({"key": name}), None).await?;
    }
    // The endless one stalls after more than is kept, so that the sender need not wait for the rest.
    for _ in 0..3 {
        client.work(7).await?;
    }
    for (name, answer) in [
        ("long", "x".repeat(1_000)),
        ("endless", "y".repeat(1_000)),
        ("zeros", "a\u{fffd}b\u{fffd}\u{fffd}\u{fffd}".to_owned()),
        ("cut", "only this".to_owned()),
    ] {
        let expected = json!({"status": "DELIVERED", "http_status": 200, "answer": answer});
        client.shows("call", &key(name), &expected).await.with_context(|| name.to_owned())?;
    }
    client.shows("call", &key("later"), &json!({"status": "RETRYING", "http_status": 503})).await?;
    client.shows("call", &key("nonsense"), &json!({"status": "UNCERTAIN", "doubt": true})).await
}

pub(super) async fn silence_is_doubt_and_a_closed_door_is_not(namespace: &dyn TestNamespace) -> Result<()> {
    let silent = TestHttpServer::open(|_, _| ServerReaction::Stalls(Vec::new())).await?;
    let cut = TestHttpServer::open(|_, _| ServerReaction::Writes(Vec::new())).await?;
    let gone = TestHttpServer::open(|_, _| ServerReaction::Writes(Vec::new())).await?;
    let (closed, address) = (gone.address, silent.address);
    drop(gone);
    let blueprint = format!(
        "[effect.silent]\nurl = \"http://{address}/\"\nallow_private = true\ntimeout = \"200ms\"\nbreaker = {{ failures = 1 }}\n\
         [effect.cut]\nurl = \"http://{}/\"\nallow_private = true\n\
         [effect.closed]\nurl = \"http://{closed}/\"\nallow_private = true\nback_off = {{ min = \"1h\" }}\n\
         [effect.unnamed]\nurl = \"https://no-such-name.invalid/\"\nback_off = {{ min = \"1h\" }}\n",
        cut.address
    );
    let client = TenantClient::open(namespace, &blueprint).await?;
    for resource in ["silent", "cut", "closed", "unnamed"] {
        client.done(&format!("{resource}.send"), &[], json!({"key": "one"}), None).await?;
    }
    let settled = async |resource: &str, expected: Json| -> Result<()> {
        for _ in 0..1_000 {
            client.work(7).await?;
            let shown = client.shown(resource, &key("one"), &["status"]).await?;
            if shown[0] != json!("PENDING") {
                break;
            }
            pause().await;
        }
        client.shows(resource, &key("one"), &expected).await.with_context(|| resource.to_owned())
    };
    settled("silent", json!({"status": "UNCERTAIN", "doubt": true, "reason": "no_answer"})).await?;
    settled("cut", json!({"status": "UNCERTAIN", "doubt": true, "reason": "no_answer"})).await?;
    settled("closed", json!({"status": "RETRYING", "doubt": false, "reason": "not_taken"})).await?;
    settled("unnamed", json!({"status": "RETRYING", "doubt": false, "reason": "not_taken"})).await
}

pub(super) async fn what_is_over_is_forgotten_in_time(namespace: &dyn TestNamespace) -> Result<()> {
    let blueprint = "[effect.call]\nurl = \"https://psp.example/\"\nkeep = \"30d\"\n";
    let script = FakeTargets::of(|outbound, _| {
        TargetBehavior::status(if key_of(outbound).ends_with("bad") { 400 } else { 200 })
    });
    let fixture = EffectFixture::with(namespace, script, blueprint).await?;
    let client = &fixture.client;
    for name in ["done", "bad", "cancelled", "resolved"] {
        let later = if name == "cancelled" { 1_000 } else { 0 };
        client.done("call.send", &[], json!({"key": name, "after_ms": later}), None).await?;
    }
    client.done("call.cancel", &key("cancelled"), json!({}), None).await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.pass(HOUR * 24 * 30 - Duration::from_micros(1)).await?;
    for name in ["done", "bad", "cancelled"] {
        client.done("call.read", &key(name), json!({}), None).await?;
    }
    fixture.pass(Duration::from_micros(1)).await?;
    for name in ["done", "cancelled"] {
        client.refused("call.read", &key(name), json!({}), None, Code::NotFound).await?;
    }
    // What is parked waits for a person, for ever.
    fixture.pass(HOUR * 24 * 300).await?;
    fixture.shows("call", "bad", json!({"status": "PARKED"})).await?;
    let store = client.house.store().clone();
    tells(store.as_ref(), "done", &["call.pending", "call.sending", "call.delivered", "call.forgotten"]).await
}

pub(super) async fn processes_share_the_effects_and_survive_each_other(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let target = TestHttpServer::open(|_, number| match number % 7 {
        3 => ServerReaction::answer(503, &[], b"later"),
        _ => ServerReaction::answer(200, &[], b"ok"),
    })
    .await?;
    let blueprint = format!(
        "[effect.hook]\nhosts = [\"*:{}\"]\nallow_private = true\nidempotent = true\nshards = 3\nlease = \"2s\"\n\
         timeout = \"500ms\"\nconnect_timeout = \"500ms\"\nback_off = {{ min = \"10ms\", max = \"50ms\" }}\n",
        target.address.port()
    );
    let store = namespace.open().await?;
    let open = async || TenantClient::over(store.clone(), &blueprint, Arc::new(SystemClock)).await;
    let (first, second) = (open().await?, open().await?);
    let options = || WorkerOptions {
        lease: Duration::from_millis(1_500),
        idle_max: Duration::from_millis(100),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    };
    for client in [&first, &second] {
        client.house.start_workers(options());
    }
    let send = async |client: &TenantClient, numbers: std::ops::Range<usize>| -> Result<()> {
        for number in numbers {
            let url = format!("http://127.0.0.1:{}/{number}", target.address.port());
            client.done("hook.send", &[], json!({"key": format!("h{number}"), "url": url}), None).await?;
        }
        Ok(())
    };
    send(&first, 0..15).await?;
    // One process is killed, perhaps amid a request, with its leases in its hands.
    drop(first);
    send(&second, 15..30).await?;
    let tenant = Tenant::new("acme")?;
    same("who", &second.tenant, &tenant)?;
    for number in 0..30 {
        let name = format!("h{number}");
        let mut last = Json::Null;
        for _ in 0..3_000 {
            last = second.shown("hook", &key(&name), &["status"]).await?[0].clone();
            if last == json!("DELIVERED") {
                break;
            }
            pause().await;
        }
        same(&name, &last, &json!("DELIVERED"))?;
    }
    same("how many were done", &target.keys().len(), &30)?;
    second.house.stop_workers().await;
    let plan = Plan::of(&tenant, "end").log(Entry::about("drill", "end")).build()?;
    store.commit(&plan).await.map(drop).context("the store is still there")
}
