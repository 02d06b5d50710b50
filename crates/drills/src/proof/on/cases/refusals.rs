//! Reactions whose action is refused: parked, tried again, given up; and those that lead to each other.

use statehouse::infra::log::ParkedRecord;

use super::*;

async fn parked(client: &TenantClient) -> Result<Vec<ParkedRecord>> {
    Ok(client.house.group("ordered").parked(&client.tenant).await?)
}

fn parked_key(parked: &ParkedRecord) -> [statehouse_store::Value; 3] {
    let offset = i64::try_from(parked.offset).unwrap_or(0);
    [i64::from(parked.partition).into(), parked.subject.as_str().into(), offset.into()]
}

/// Steps until so many events are parked. The index that tells of what is ready may lag.
async fn until_parked(client: &TenantClient, count: usize) -> Result<Vec<ParkedRecord>> {
    for _ in 0..1_000 {
        client.drain_workers().await?;
        let found = parked(client).await?;
        if found.len() == count {
            return Ok(found);
        }
        pause().await;
    }
    anyhow::bail!("expected {count} events to be parked: {:?}", parked(client).await?)
}

pub(super) async fn a_refused_action_is_parked_and_retried(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    order(&client, 1, EMAILS[0]).await?;
    client.drain_workers().await?;
    let found = until_parked(&client, 1).await?;
    same("the subject", &found[0].subject.as_str(), &"order/1")?;
    ensure!(found[0].reason.contains("not_found"), "{found:?}");
    for list in [json!({"log_partition": found[0].partition}), json!({})] {
        let listed = client.done("ordered.list", &[], list, None).await?;
        same("what is listed", &listed.body[0]["record"]["events"][0]["name"], &json!("order.created"))?;
    }
    // In vain as long as there is no tally.
    client.done("ordered.retry", &parked_key(&found[0]), json!({}), None).await?;
    for tries in 0.. {
        client.drain_workers().await?;
        if parked(&client).await?[0].tries == 2 {
            break;
        }
        ensure!(tries < 1_000, "it was not tried again");
        pause().await;
    }
    tally(&client, EMAILS[0]).await?;
    client.done("ordered.retry", &parked_key(&found[0]), json!({}), None).await?;
    until_parked(&client, 0).await?;
    same("the effect", &orders(&client, EMAILS[0]).await?, &json!(1))?;
    client.refused("ordered.retry", &parked_key(&found[0]), json!({}), None, Code::NotFound).await?;
    client.drain_workers().await?;
    same("the effect", &orders(&client, EMAILS[0]).await?, &json!(1))
}

const MOVED: &str = r#"
[house]
name = "drill"

[entity.order]
key    = { id = "int" }
fields = { email = "text" }
require_version = false

[entity.tally]
key    = { email = "text" }
fields = { last = { type = "text", default = "" } }
require_version = false

[on.ordered]
event = "order.updated"
do    = "tally.patch"
key   = "{row.email}"
input = { last = "{row.version}" }
"#;

/// The second change of the first order names a tally that is not there.
pub(super) async fn a_refused_action_holds_up_its_key_alone(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, MOVED).await?;
    for email in ["a", "b"] {
        client.done("tally.create", &[], json!({"email": email}), None).await?;
    }
    for id in [1, 2] {
        client.done("order.create", &[], json!({"id": id, "email": "a"}), None).await?;
    }
    let patch = async |id: i64, email: &str| {
        client.done("order.patch", &[id.into()], json!({"email": email}), None).await.map(drop)
    };
    patch(1, "missing").await?;
    patch(1, "b").await?;
    patch(2, "b").await?;
    patch(2, "a").await?;
    let found = until_parked(&client, 2).await?;
    same(
        "the subjects",
        &found.iter().map(|one| one.subject.as_str()).collect::<Vec<_>>(),
        &vec!["order/1"; 2],
    )?;
    same("the tries", &found.iter().map(|one| one.tries).collect::<Vec<_>>(), &vec![1, 0])?;
    client.shows("tally", &["a".into()], &json!({"last": "3"})).await?;
    client.shows("tally", &["b".into()], &json!({"last": "2"})).await?;
    // The later event of the key is not retried before the older one.
    client.refused("ordered.retry", &parked_key(&found[1]), json!({}), None, Code::WrongState).await?;
    client.done("tally.create", &[], json!({"email": "missing"}), None).await?;
    client.done("ordered.retry", &parked_key(&found[0]), json!({}), None).await?;
    until_parked(&client, 0).await?;
    client.shows("tally", &["missing".into()], &json!({"last": "2"})).await?;
    client.shows("tally", &["b".into()], &json!({"last": "3"})).await?;
    invariants::check(&client.scope("ordered")).await
}

pub(super) async fn what_is_parked_is_given_up_in_order(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, MOVED).await?;
    client.done("tally.create", &[], json!({"email": "b"}), None).await?;
    client.done("order.create", &[], json!({"id": 1, "email": "a"}), None).await?;
    for email in ["missing", "b"] {
        client.done("order.patch", &[1.into()], json!({"email": email}), None).await?;
    }
    let found = until_parked(&client, 2).await?;
    client.refused("ordered.discard", &parked_key(&found[1]), json!({}), None, Code::WrongState).await?;
    client.done("ordered.discard", &parked_key(&found[0]), json!({}), None).await?;
    client.refused("ordered.discard", &parked_key(&found[0]), json!({}), None, Code::NotFound).await?;
    client.done("ordered.retry", &parked_key(&found[1]), json!({}), None).await?;
    until_parked(&client, 0).await?;
    client.shows("tally", &["b".into()], &json!({"last": "3"})).await?;
    invariants::check(&client.scope("ordered")).await
}

const CYCLE: &str = r#"
[house]
name = "drill"

[entity.ping]
key    = { id = "int" }
fields = { n = "int" }
require_version = false

[on.ordered]
event = "ping.updated"
when  = "n > 0"
do    = "ping.mutate"
key   = "{subject}"
input = { increment = { n = 1 } }
"#;

/// A condition that never ends a cycle: it is cut, and the event that would go on is parked.
pub(super) async fn a_cycle_is_cut(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, CYCLE).await?;
    for id in [1, 2] {
        client.done("ping.create", &[], json!({"id": id, "n": 0}), None).await?;
    }
    client.done("ping.patch", &[1.into()], json!({"n": 1}), None).await?;
    client.done("ping.patch", &[2.into()], json!({"n": -5}), None).await?;
    let found = until_parked(&client, 1).await?;
    ensure!(found[0].reason.contains("8 reactions have led to this event"), "{found:?}");
    client.shows("ping", &[1.into()], &json!({"n": 9})).await?;
    client.shows("ping", &[2.into()], &json!({"n": -5})).await?;
    invariants::check(&client.scope("ordered")).await
}

/// A caller has used the very operation id that a reaction would: the event is parked, and nothing is taken for done.
pub(super) async fn an_operation_id_that_is_taken_is_reported(namespace: &dyn TestNamespace) -> Result<()> {
    let client = open(namespace).await?;
    tallies(&client).await?;
    let email = EMAILS[0];
    let new = json!({"id": 1, "email": email, "n": 1});
    client.call_as("mine", "order.create", &[], new, None).await?;
    let log = whole_log(client.house.store().as_ref()).await?;
    let record =
        log.iter().find(|record| record.operation == "mine").context("the record is not there yet")?;
    let partition = record.position.context("a record without its place")?.partition;
    let taken = format!("on.ordered/mine/{partition}-0");
    client.call_as(&taken, "order.create", &[], json!({"id": 2, "email": EMAILS[1], "n": 2}), None).await?;
    let found = until_parked(&client, 1).await?;
    ensure!(found[0].reason.contains("was used for another request"), "{found:?}");
    same("the effect", &orders(&client, email).await?, &json!(0))?;
    same("another effect", &orders(&client, EMAILS[1]).await?, &json!(1))
}
