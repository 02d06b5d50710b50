//! Outcomes whose consequences are recorded with them, and errors that a target repeats.

use statehouse::declare::machine::MachinePart;
use statehouse::infra::effect::settle::{EffectEnd, ExchangeKind, Interpretation, Settlement, Settler};
use statehouse::{Refusal, Resource};
use statehouse_store::{Guard, Operand, Row, Table};
use tokio::sync::Barrier;

use super::*;

/// One target that keeps its errors under the key, and one whose effects belong to orders.
const SETTLED: &str = r#"
[house]
name = "drill"

[entity.order]
key    = { id = "text" }
fields = { paid = "int?", doubts = "int?" }

[effect.stripe]
url            = "https://psp.example/charges"
idempotent     = true
replays_errors = true
reconcile      = { url = "https://psp.example/charges/{key}", after = "10s" }
back_off       = { min = "1s", max = "8s" }
lease          = "1m"
breaker        = { failures = 100 }

[effect.charge]
url       = "https://psp.example/charges"
reconcile = { url = "https://psp.example/charges/{key}", after = "10s" }
back_off  = { min = "1s", max = "8s" }
lease     = "1m"
breaker   = { failures = 100 }
"#;

pub(super) async fn an_error_that_is_replayed_is_asked_about(namespace: &dyn TestNamespace) -> Result<()> {
    // It answers with an error and keeps it: `done` says what it has done all the same.
    let script = FakeTargets::of(|outbound, _| match (outbound.method.as_str(), outbound.url.path()) {
        ("GET", path) if path.ends_with("3Adone") => TargetBehavior::body(200, "{\"outcome\": \"applied\"}"),
        ("GET", path) if path.ends_with("silent") => TargetBehavior::status(500),
        ("GET", _) => TargetBehavior::status(404),
        _ => TargetBehavior::status(500),
    });
    let fixture = EffectFixture::with(namespace, script, SETTLED).await?;
    for name in ["done", "undone", "silent"] {
        fixture.send("stripe", name).await?;
    }
    fixture.pass(Duration::ZERO).await?;
    for name in ["done", "undone", "silent"] {
        let expected = json!({"status": "UNCERTAIN", "doubt": true, "reason": "target_failed", "attempt": 1});
        fixture.shows("stripe", name, expected).await?;
    }
    for _ in 0..20 {
        fixture.pass(SECOND * 10).await?;
    }
    fixture.shows("stripe", "done", json!({"status": "DELIVERED", "doubt": false, "attempt": 1})).await?;
    let undone = json!({"status": "PARKED", "doubt": false, "reason": "target_failed", "attempt": 1});
    fixture.shows("stripe", "undone", undone).await?;
    let silent = json!({"status": "UNCERTAIN", "doubt": true, "reason": "target_failed", "attempt": 1});
    fixture.shows("stripe", "silent", silent).await?;
    let sent = fixture.script.outbounds();
    let sent: Vec<String> = sent.iter().filter(|one| one.method == "POST").map(key_of).collect();
    same("each was sent once", &sent.len(), &3)
}

/// Counts in the order of an effect how often it was paid, and how often that was in doubt.
#[derive(Debug)]
struct OrderSettler {
    orders: Arc<Table>,
    /// Lets two settle the same outcome at once.
    barrier: Option<Barrier>,
    /// How often the order changes between its read and the plan.
    races: AtomicUsize,
}

impl OrderSettler {
    fn of(client: &TenantClient) -> Result<OrderSettler> {
        let (orders, barrier) = (client.table("orders")?.clone(), None);
        Ok(OrderSettler { orders, barrier, races: AtomicUsize::new(0) })
    }

    fn attach(self, client: &TenantClient) -> Result<()> {
        let resource: &Resource = client.house.resource("charge")?;
        let outbox = resource.outbox.as_ref().context("a charge is an effect")?;
        ensure!(outbox.settle_with(Arc::new(self)), "it has a settler");
        Ok(())
    }

    async fn order(&self, settlement: &Settlement<'_>) -> Result<Row, Refusal> {
        let address =
            Address::new(&self.orders, settlement.effect.tenant(), settlement.effect.key().to_vec())?;
        let rows = settlement.store.get(&[address], Consistency::Strong).await?;
        let order = rows.into_iter().next().flatten();
        order.ok_or_else(|| Refusal::new(Code::NotFound, "there is no such order yet"))
    }
}

#[async_trait]
impl Settler for OrderSettler {
    async fn interpret(
        &self,
        _: &Row,
        _: ExchangeKind,
        answer: &TargetResponse,
        _: &dyn Store,
    ) -> Result<Interpretation, Refusal> {
        Ok(match answer.body.as_slice() {
            b"pending" => Interpretation::Open("pending"),
            b"broken" => return Err(Refusal::new(Code::Internal, "it cannot be read")),
            b"declined" | b"paid" => Interpretation::Definite,
            b"unknown here" => Interpretation::NotApplied,
            _ => Interpretation::ByStatus,
        })
    }

    async fn settle(&self, settlement: &Settlement<'_>) -> Result<Vec<MachinePart>, Refusal> {
        let order = self.order(settlement).await?;
        let column = match settlement.end {
            EffectEnd::Uncertain => "doubts",
            EffectEnd::Delivered if settlement.answer.is_some_and(|answer| answer.body == b"paid") => "paid",
            EffectEnd::Delivered | EffectEnd::Parked => return Ok(Vec::new()),
        };
        let count = order.int(column).unwrap_or(0) + 1;
        if self.races.load(Ordering::SeqCst) > 0 {
            self.races.fetch_sub(1, Ordering::SeqCst);
            let step = Step::update(&self.orders, order.key().to_vec()).set("doubts", 7);
            let plan = Plan::of(order.tenant(), format!("race {}", order.version())).step(step).build()?;
            settlement.store.commit(&plan).await?;
        }
        if let Some(barrier) = &self.barrier {
            tokio::select! {
                _ = barrier.wait() => {}
                () = SystemClock.sleep(Duration::from_millis(200)) => {}
            }
        }
        let step = Step::update(&self.orders, order.key().to_vec());
        let step = match self.barrier {
            // Counted blindly, so that each settlement shows.
            Some(_) => step.set(column, Operand::Coalesce(column.to_owned(), Value::Int(0)).add(1)),
            None => step.guard(Guard::version(order.version())).set(column, count),
        };
        Ok(vec![step.into()])
    }
}

async fn order(fixture: &EffectFixture, id: &str) -> Result<()> {
    fixture.client.done("order.create", &[], json!({"id": id}), None).await.map(drop)
}

pub(super) async fn a_settler_changes_its_rows_with_the_outcome(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("settlers of programs write rows without events");
    let script = FakeTargets::of(|outbound, _| match (outbound.method.as_str(), key_of(outbound).as_str()) {
        ("GET", _) => TargetBehavior::body(200, "paid"),
        (_, "acme:charge:lost") => TargetBehavior::Loses,
        _ => TargetBehavior::body(201, "paid"),
    });
    let fixture = EffectFixture::with(namespace, script, SETTLED).await?;
    let mut settler = OrderSettler::of(&fixture.client)?;
    settler.races = AtomicUsize::new(2);
    settler.attach(&fixture.client)?;
    // The order changes twice between its read and the plan; the third plan has it as it is.
    for (name, doubts) in [("lost", json!(8)), ("plain", Json::Null)] {
        order(&fixture, name).await?;
        fixture.send("charge", name).await?;
        fixture.pass(Duration::ZERO).await?;
        fixture.client.shows("order", &key(name), &json!({"doubts": doubts})).await?;
    }
    fixture.client.shows("order", &key("plain"), &json!({"paid": 1})).await?;
    fixture.client.shows("order", &key("lost"), &json!({"paid": null})).await?;
    fixture.pass(SECOND * 10).await?;
    fixture.client.shows("order", &key("lost"), &json!({"paid": 1, "doubts": 8})).await?;
    fixture.shows("charge", "lost", json!({"status": "DELIVERED", "unsettled_at": null})).await?;
    // The order and the effect are one record of the log.
    let records = whole_log(fixture.client.house.store().as_ref()).await?;
    let delivered = records.iter().filter(|record| record.events[0].name == "charge.delivered");
    same("deliveries", &delivered.count(), &2)
}

pub(super) async fn a_settler_reads_what_a_status_does_not_say(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("settlers of programs write rows without events");
    let script = FakeTargets::of(|outbound, number| {
        let key = key_of(outbound);
        match (outbound.method.as_str(), key.rsplit(':').next().unwrap_or_default()) {
            ("GET", "absent") => TargetBehavior::body(200, "unknown here"),
            ("GET", _) => TargetBehavior::body(200, "paid"),
            (_, "absent") if number > 4 => TargetBehavior::status(200),
            (_, "declined") => TargetBehavior::body(402, "declined"),
            (_, "broken") => TargetBehavior::body(200, "broken"),
            _ => TargetBehavior::body(200, "pending"),
        }
    });
    let fixture = EffectFixture::with(namespace, script, SETTLED).await?;
    OrderSettler::of(&fixture.client)?.attach(&fixture.client)?;
    for name in ["pending", "declined", "broken", "absent"] {
        order(&fixture, name).await?;
        fixture.send("charge", name).await?;
        fixture.pass(Duration::ZERO).await?;
    }
    fixture.shows("charge", "declined", json!({"status": "DELIVERED", "http_status": 402})).await?;
    for (name, reason) in [("pending", "pending"), ("broken", "response_not_read"), ("absent", "pending")] {
        fixture
            .shows("charge", name, json!({"status": "UNCERTAIN", "doubt": true, "reason": reason}))
            .await?;
    }
    fixture.pass(SECOND * 10).await?;
    for name in ["pending", "broken"] {
        fixture.shows("charge", name, json!({"status": "DELIVERED", "attempt": 1, "answer": "paid"})).await?;
        fixture.client.shows("order", &key(name), &json!({"paid": 1, "doubts": 1})).await?;
    }
    fixture.shows("charge", "absent", json!({"status": "DELIVERED", "attempt": 2})).await
}

pub(super) async fn a_settler_that_refuses_loses_no_outcome(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("settlers of programs write rows without events");
    let script = FakeTargets::of(|outbound, _| match outbound.method.as_str() {
        "GET" => TargetBehavior::body(200, "paid"),
        _ if key_of(outbound).ends_with("lost") => TargetBehavior::Loses,
        _ => TargetBehavior::body(201, "paid"),
    });
    let fixture = EffectFixture::with(namespace, script, SETTLED).await?;
    OrderSettler::of(&fixture.client)?.attach(&fixture.client)?;
    // The orders do not exist when the outcomes come.
    for name in ["paid", "lost"] {
        fixture.send("charge", name).await?;
    }
    fixture.pass(Duration::ZERO).await?;
    let since = json!(fixture.clock.now().to_string());
    fixture
        .shows("charge", "paid", json!({"status": "DELIVERED", "answer": "paid", "unsettled_at": since}))
        .await?;
    fixture
        .shows("charge", "lost", json!({"status": "UNCERTAIN", "doubt": true, "unsettled_at": since}))
        .await?;
    fixture.pass(SECOND * 30).await?;
    fixture.shows("charge", "paid", json!({"status": "DELIVERED", "unsettled_at": since})).await?;
    same("each was sent once, and not asked about", &fixture.script.outbounds().len(), &2)?;
    for name in ["paid", "lost"] {
        order(&fixture, name).await?;
    }
    fixture.pass(SECOND * 30).await?;
    fixture
        .shows("charge", "paid", json!({"status": "DELIVERED", "unsettled_at": null, "due_at": null}))
        .await?;
    fixture.client.shows("order", &key("paid"), &json!({"paid": 1, "doubts": null})).await?;
    fixture.shows("charge", "lost", json!({"unsettled_at": null})).await?;
    fixture.pass(SECOND * 10).await?;
    fixture
        .shows("charge", "lost", json!({"status": "DELIVERED", "attempt": 1, "unsettled_at": null}))
        .await?;
    fixture.client.shows("order", &key("lost"), &json!({"paid": 1, "doubts": 1})).await
}

pub(super) async fn an_outcome_is_settled_once(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("settlers of programs write rows without events");
    let script = FakeTargets::of(|_, _| TargetBehavior::body(201, "paid"));
    let fixture = EffectFixture::with(namespace, script, SETTLED).await?;
    let mut settler = OrderSettler::of(&fixture.client)?;
    settler.barrier = Some(Barrier::new(2));
    settler.attach(&fixture.client)?;
    fixture.send("charge", "one").await?;
    fixture.pass(Duration::ZERO).await?;
    fixture.shows("charge", "one", json!({"status": "DELIVERED"})).await?;
    order(&fixture, "one").await?;
    fixture.clock.advance(SECOND * 10);
    // Two processes have read the same row, and settle it at once.
    for _ in 0..20 {
        let (client, other) = (fixture.client.clone(), fixture.client.clone());
        let (one, two) = tokio::join!(
            tokio::spawn(async move { client.work(7).await.map(drop) }),
            tokio::spawn(async move { other.work(7).await.map(drop) })
        );
        one??;
        two??;
    }
    fixture.shows("charge", "one", json!({"unsettled_at": null})).await?;
    fixture.client.shows("order", &key("one"), &json!({"paid": 1})).await?;
    fixture.check().await
}

pub(super) async fn what_a_person_found_out_is_settled(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("settlers of programs write rows without events");
    let script = FakeTargets::of(|outbound, _| match outbound.method.as_str() {
        "GET" => TargetBehavior::status(500),
        _ => TargetBehavior::Loses,
    });
    let fixture = EffectFixture::with(namespace, script, SETTLED).await?;
    OrderSettler::of(&fixture.client)?.attach(&fixture.client)?;
    fixture.send("charge", "one").await?;
    fixture.pass(Duration::ZERO).await?;
    let found = json!({"delivered": true, "reason": "on the statement"});
    // Its order does not exist, so that the finding cannot be settled, and is not recorded.
    fixture.client.refused("charge.resolve", &key("one"), found.clone(), None, Code::NotFound).await?;
    fixture.shows("charge", "one", json!({"status": "UNCERTAIN"})).await?;
    order(&fixture, "one").await?;
    let version = fixture.client.shown("charge", &key("one"), &["version"]).await?[0].as_i64();
    let stale = version.map(|version| version - 1);
    fixture
        .client
        .refused("charge.resolve", &key("one"), found.clone(), stale, Code::VersionConflict)
        .await?;
    fixture.client.done("charge.resolve", &key("one"), found, version).await?;
    let delivered = json!({"status": "DELIVERED", "reason": "resolved_by_hand", "unsettled_at": null});
    fixture.shows("charge", "one", delivered).await?;
    fixture.check().await
}
