//! Rules for end users, on the rows of entities: they are guards, so no race gets past them.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Expected, Operation, Principal, Refusal};
use statehouse_store::{Address, Consistency, Row, Step, Store, StoreError, SystemClock, Value};

use super::invariants;
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::recorder::{Actor, acting, unattributed};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

const BLUEPRINT: &str = r#"
[entity.note]
key    = { id = "int" }
fields = { owner = "text", viewer = "text", helper = "text?", body = "text?", points = { type = "int", default = 0 }, views = { type = "int", default = 0 } }
hot    = ["views"]

[entity.note.allow]
create  = "row.owner = claims.sub"
read    = "row.viewer = claims.sub"
update  = "row.owner = claims.sub"
patch   = "row.owner = claims.sub or row.helper = claims.sub"
mutate  = "row.owner = claims.sub"
delete  = "row.owner = claims.sub"
restore = "row.owner = claims.sub"
list    = { if = "row.viewer = claims.sub", filter = true }
"*"     = "claims.role = 'staff'"
"#;

/// Lets something happen after the next rows were read by key, before the reader goes on.
#[derive(Default)]
struct AfterFirstGet(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl AfterFirstGet {
    fn next(&self, event: impl Future<Output = ()> + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::pin(event));
    }
}

impl std::fmt::Debug for AfterFirstGet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AfterFirstGet")
    }
}

#[async_trait]
impl Interceptor for Arc<AfterFirstGet> {
    async fn get(
        &self,
        inner: &Arc<dyn Store>,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        let rows = inner.get(addresses, consistency).await;
        let event = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(event) = event {
            unattributed(event).await;
        }
        rows
    }
}

/// Calls an action as an end user.
async fn call(
    client: &TenantClient,
    claims: Json,
    action: &str,
    key: &[Value],
    input: Json,
    expected: Option<Expected>,
) -> Result<Answer, Refusal> {
    let request = TenantClient::request(&format!("note.{action}"), key, &input, expected);
    let claims = claims.as_object().cloned().map(Arc::new);
    let caller = Principal { tenant: client.tenant.clone(), claims, actor: None };
    let (resource, _) = client.house.action(&request.action)?;
    let actor = Actor { archetype: resource.archetype.keyword(), name: request.action.clone() };
    acting(actor, client.house.call(&caller, request, Operation::default())).await
}

fn ann() -> Json {
    json!({"sub": "ann"})
}

/// A note of Ann's, made by the operator.
async fn note(client: &TenantClient, id: i64) -> Result<[Value; 1]> {
    let input = json!({"id": id, "owner": "ann", "viewer": "ann", "helper": "ann"});
    client.done("note.create", &[], input, None).await?;
    Ok([id.into()])
}

fn refused(what: &str, outcome: &Result<Answer, Refusal>, code: Code) -> Result<()> {
    ensure!(
        matches!(outcome, Err(refusal) if refusal.code == code),
        "{what}: expected {code}, got {outcome:?}"
    );
    Ok(())
}

/// Between the judging of a call and its commit the row gets another owner, reader or helper.
pub(super) async fn a_rule_holds_for_the_row_that_is_written(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let store = namespace.open().await?;
    let meanwhile = Arc::new(AfterFirstGet::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), meanwhile.clone()));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(SystemClock)).await?;
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(SystemClock)).await?;
    let whole = json!({"owner": "ann", "viewer": "ann", "body": "mine"});
    let (later, any) = (Some(Expected::Version(2)), Some(Expected::Any));
    let calls = [
        ("update", whole.clone(), later),
        ("update", whole, any),
        ("patch", json!({"body": "mine"}), later),
        ("patch", json!({"body": "mine"}), any),
        ("mutate", json!({"increment": {"points": 1}}), None),
        ("mutate", json!({"set": {"body": "mine"}}), None),
        ("mutate", json!({"increment": {"views": 1}}), None),
        ("delete", json!({}), None),
        ("restore", json!({}), None),
    ];
    let mut id = 0;
    for (action, input, expected) in calls {
        for (columns, code) in
            [(&["owner", "helper"][..], Code::Forbidden), (&["viewer"][..], Code::NotFound)]
        {
            id += 1;
            let key = note(&client, id).await?;
            if action == "restore" {
                client.done("note.delete", &key, json!({}), None).await?;
            }
            change(&client, &meanwhile, &key, columns)?;
            let outcome = call(&slow, ann(), action, &key, input.clone(), expected).await;
            refused(&format!("{action} {input} after {columns:?} changed"), &outcome, code)?;
            let row = client.store_client()?.row(client.table("notes")?, key).await?;
            let deleted = if action == "restore" { 1 } else { 0 };
            same("the version", &row.version(), &(2 + deleted))?;
        }
    }
    // Ann may give the note away as long as she helps with it; meanwhile she does not any more.
    let key = note(&client, 1_000).await?;
    change(&client, &meanwhile, &key, &["helper"])?;
    let outcome = call(&slow, ann(), "patch", &key, json!({"owner": "bob"}), later).await;
    refused("giving away", &outcome, Code::Forbidden)?;
    let outcome = call(&slow, ann(), "patch", &key, json!({"owner": "bob"}), any).await;
    refused("giving away", &outcome, Code::Forbidden)
}

/// Changes columns of a note as soon as the next row was read.
fn change(
    client: &TenantClient,
    meanwhile: &AfterFirstGet,
    key: &[Value; 1],
    columns: &[&str],
) -> Result<()> {
    let (store_client, table) = (client.store_client()?, client.table("notes")?.clone());
    let step = columns.iter().fold(Step::update(&table, key.clone()), |step, column| step.set(column, "bob"));
    meanwhile.next(async move {
        // If this fails, the case finds another outcome than it expects.
        let _ = store_client.apply(store_client.one(step)).await;
    });
    Ok(())
}

/// Who may do what, without any race.
pub(super) async fn rules_decide_who_does_what(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let (bob, staff) = (json!({"sub": "bob"}), json!({"sub": "sue", "role": "staff"}));
    let new = |id: i64, owner: &str| json!({"id": id, "owner": owner, "viewer": owner, "helper": "hal"});
    let any = Some(Expected::Any);
    let key = [Value::from(1)];
    call(&client, ann(), "create", &[], new(1, "ann"), None).await?;
    refused("another's", &call(&client, ann(), "create", &[], new(2, "bob"), None).await, Code::Forbidden)?;
    call(&client, staff.clone(), "create", &[], new(3, "bob"), None).await?;
    call(&client, ann(), "read", &key, json!({}), None).await?;
    call(&client, staff.clone(), "read", &key, json!({}), None).await?;
    for (action, input, expected) in [
        ("read", json!({}), None),
        ("patch", json!({"body": "b"}), any),
        ("mutate", json!({"increment": {"points": 1}}), None),
        ("delete", json!({}), None),
    ] {
        let seen = call(&client, bob.clone(), action, &key, input.clone(), expected).await;
        let absent = call(&client, bob.clone(), action, &[9.into()], input, expected).await;
        refused(action, &seen, Code::NotFound)?;
        let texts = [seen, absent].map(|one| one.err().map(|refusal| refusal.message.replace('9', "1")));
        same("what a stranger is told", &texts[0], &texts[1])?;
    }
    call(&client, ann(), "patch", &key, json!({"body": "a"}), any).await?;
    refused(
        "gives away",
        &call(&client, ann(), "patch", &key, json!({"owner": "bob"}), any).await,
        Code::Forbidden,
    )?;
    // The operator lets Hal see it, who helps.
    client.done("note.mutate", &key, json!({"set": {"viewer": "hal"}}), None).await?;
    let hal = json!({"sub": "hal"});
    call(&client, hal.clone(), "patch", &key, json!({"body": "h"}), any).await?;
    refused(
        "helps only",
        &call(&client, hal.clone(), "delete", &key, json!({}), None).await,
        Code::Forbidden,
    )?;
    let listed = call(&client, hal, "list", &[], json!({}), None).await?;
    same("the list", &listed.body.as_array().map(Vec::len), &Some(1))?;
    let listed = call(&client, ann(), "list", &[], json!({}), None).await?;
    same("the list", &listed.body.as_array().map(Vec::len), &Some(0))?;
    // A deleted row that a caller may not see is like none.
    client.done("note.delete", &key, json!({}), None).await?;
    refused("deleted", &call(&client, bob, "read", &key, json!({}), None).await, Code::NotFound)?;
    // Staff does everything.
    call(&client, staff.clone(), "restore", &key, json!({}), None).await?;
    let row = call(&client, staff, "delete", &key, json!({}), None).await?;
    row.version.context("a version")?;
    invariants::check(&client.scope("note")).await
}
