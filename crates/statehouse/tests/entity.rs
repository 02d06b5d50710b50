//! The entity's actions through the house, on the model store: what each does, and what each refuses.

#![expect(
    clippy::unwrap_used,
    clippy::needless_pass_by_value,
    reason = "helpers of tests fail by panicking and take literals, as tests do"
)]

use std::sync::Arc;

use serde_json::{Value as Json, json};
use statehouse::{Answer, Blueprint, Code, Expected, House, Operation, Refusal, Request};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Migrate, ModelStore, Store, SystemClock, Tenant};

const BLUEPRINT: &str = r#"
[house]
name = "shop"

[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text", bio = "text?", points = { type = "int", default = 0 }, tags = "json?", views = { type = "int", default = 0 } }
hot    = ["views"]
"#;

struct Bench {
    house: House,
    tenant: Tenant,
}

impl Bench {
    async fn over(store: Arc<dyn Store>) -> Bench {
        let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT).unwrap();
        let house = House::over(store, &blueprint).unwrap();
        house.migrate(Migrate::Apply).await.unwrap();
        Bench { house, tenant: Tenant::new("acme").unwrap() }
    }

    async fn new() -> Bench {
        Bench::over(Arc::new(ModelStore::new())).await
    }

    fn request(action: &str, user: i64, input: Json, version: Option<i64>) -> Request {
        let key = if action == "create" { vec![] } else { vec![user.into()] };
        Request {
            action: format!("profile.{action}"),
            key,
            input: input.as_object().cloned().unwrap_or_default(),
            expected: version.map(Expected::Version),
        }
    }

    async fn call(
        &self,
        action: &str,
        user: i64,
        input: Json,
        version: Option<i64>,
    ) -> Result<Answer, Refusal> {
        let request = Bench::request(action, user, input, version);
        self.house.call(&self.tenant, request, Operation::default()).await
    }

    async fn as_operation(
        &self,
        id: &str,
        action: &str,
        input: Json,
        version: Option<i64>,
    ) -> Result<Answer, Refusal> {
        let operation = Operation { id: Some(id.into()), fingerprint: input.to_string() };
        self.house.call(&self.tenant, Bench::request(action, 1, input, version), operation).await
    }

    async fn refused(
        &self,
        action: &str,
        user: i64,
        input: Json,
        version: Option<i64>,
        code: Code,
    ) -> Refusal {
        let refusal = self.call(action, user, input, version).await.unwrap_err();
        assert_eq!(refusal.code, code, "{refusal}");
        refusal
    }
}

#[tokio::test]
async fn a_row_lives_its_life() {
    let bench = Bench::new().await;
    let created = bench.call("create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await.unwrap();
    assert_eq!((created.version, created.created.as_deref()), (Some(1), Some("1")));
    assert_eq!(created.body["status"], "ACTIVE");
    assert_eq!(created.body["points"], 0);

    let updated =
        bench.call("update", 1, json!({"display_name": "Anna", "bio": "x"}), Some(1)).await.unwrap();
    assert_eq!(updated.version, Some(2));
    let patched = bench.call("patch", 1, json!({"bio": null}), Some(2)).await.unwrap();
    assert_eq!((patched.version, &patched.body["bio"]), (Some(3), &Json::Null));

    let deleted = bench.call("delete", 1, json!({}), None).await.unwrap();
    assert_eq!((deleted.version, &deleted.body["status"]), (Some(4), &json!("DELETED")));
    bench.refused("read", 1, json!({}), None, Code::Deleted).await;
    bench.refused("update", 1, json!({"display_name": "B"}), Some(4), Code::Deleted).await;
    bench.refused("mutate", 1, json!({"increment": {"points": 1}}), None, Code::Deleted).await;
    bench.refused("mutate", 1, json!({"increment": {"views": 1}}), None, Code::Deleted).await;
    bench.refused("delete", 1, json!({}), None, Code::Deleted).await;
    let restored = bench.call("restore", 1, json!({}), None).await.unwrap();
    assert_eq!(restored.version, Some(5));
    bench.refused("restore", 1, json!({}), None, Code::NotDeleted).await;
    assert_eq!(bench.call("read", 1, json!({}), None).await.unwrap().body["display_name"], "Anna");
}

#[tokio::test]
async fn a_lost_race_names_the_current_version() {
    let bench = Bench::new().await;
    bench.call("create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await.unwrap();
    bench.call("patch", 1, json!({"display_name": "A"}), Some(1)).await.unwrap();
    let refusal =
        bench.refused("patch", 1, json!({"display_name": "B"}), Some(1), Code::VersionConflict).await;
    assert_eq!(refusal.current_version, Some(2));
    bench.refused("update", 1, json!({"display_name": "B"}), None, Code::VersionRequired).await;
    bench.refused("patch", 2, json!({"display_name": "B"}), Some(1), Code::NotFound).await;
    let refusal = bench
        .refused("create", 1, json!({"user_id": 1, "display_name": "C"}), None, Code::AlreadyExists)
        .await;
    assert_eq!(refusal.current_version, Some(2));
    let stale = bench.refused("delete", 1, json!({}), Some(1), Code::VersionConflict).await;
    assert_eq!(stale.current_version, Some(2));
}

#[tokio::test]
async fn a_write_that_changes_nothing_writes_nothing() {
    let bench = Bench::new().await;
    bench.call("create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await.unwrap();
    let heads = bench.house.store().wait_log(&[], std::time::Duration::ZERO).await.unwrap();
    for (action, input) in [
        ("patch", json!({"display_name": "Ann"})),
        ("patch", json!({})),
        ("update", json!({"display_name": "Ann"})),
        ("mutate", json!({"set": {"display_name": "Ann"}})),
        ("mutate", json!({"increment": {"points": 0}})),
    ] {
        assert_eq!(bench.call(action, 1, input, Some(1)).await.unwrap().version, Some(1), "{action}");
    }
    assert_eq!(bench.house.store().wait_log(&[], std::time::Duration::ZERO).await.unwrap(), heads);
}

#[tokio::test]
async fn a_retry_gets_the_first_answer() {
    let bench = Bench::new().await;
    let body = json!({"user_id": 1, "display_name": "Ann"});
    let first = bench.as_operation("op-1", "create", body.clone(), None).await.unwrap();
    let patch = json!({"display_name": "Anna"});
    let second = bench.as_operation("op-2", "patch", patch.clone(), Some(1)).await.unwrap();
    bench.call("delete", 1, json!({}), None).await.unwrap();
    // By now both would be refused, if they were judged anew.
    assert_eq!(bench.as_operation("op-1", "create", body, None).await.unwrap(), first);
    assert_eq!(bench.as_operation("op-2", "patch", patch, Some(1)).await.unwrap(), second);
    let other = bench.as_operation("op-2", "patch", json!({"display_name": "B"}), Some(1)).await;
    assert_eq!(other.unwrap_err().code, Code::OperationReused);
    bench.house.store().resolve(&bench.tenant, "op-3").await.unwrap();
    let fenced = bench.as_operation("op-3", "delete", json!({}), None).await;
    assert_eq!(fenced.unwrap_err().code, Code::OperationFenced);
}

#[tokio::test]
async fn mutations_set_count_and_append() {
    let bench = Bench::new().await;
    bench.call("create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await.unwrap();
    let counted = bench.call("mutate", 1, json!({"increment": {"points": 5}}), None).await.unwrap();
    assert_eq!((counted.version, &counted.body["points"]), (Some(2), &json!(5)));
    let both = json!({"set": {"bio": "b"}, "increment": {"points": -2}, "append": {"tags": "x"}});
    let mixed = bench.call("mutate", 1, both, None).await.unwrap();
    assert_eq!(
        (&mixed.body["bio"], &mixed.body["points"], &mixed.body["tags"]),
        (&json!("b"), &json!(3), &json!(["x"]))
    );
    bench.refused("mutate", 1, json!({"increment": {"points": i64::MAX}}), None, Code::OutOfRange).await;
    bench.refused("mutate", 1, json!({}), None, Code::InvalidInput).await;
    let twice = json!({"set": {"points": 1}, "increment": {"points": 1}});
    bench.refused("mutate", 1, twice, None, Code::InvalidInput).await;
    bench.refused("mutate", 1, json!({"increment": {"bio": 1}}), None, Code::InvalidInput).await;
}

#[tokio::test]
async fn hot_fields_leave_the_version_alone() {
    let bench = Bench::new().await;
    bench.call("create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await.unwrap();
    for _ in 0..3 {
        bench.call("mutate", 1, json!({"increment": {"views": 1}}), None).await.unwrap();
    }
    let read = bench.call("read", 1, json!({}), None).await.unwrap();
    assert_eq!((read.version, &read.body["views"]), (Some(1), &json!(3)));
    let mixed = json!({"increment": {"views": 1, "points": 1}});
    bench.refused("mutate", 1, mixed, None, Code::InvalidInput).await;
    bench.refused("mutate", 2, json!({"increment": {"views": 1}}), None, Code::NotFound).await;
}

#[tokio::test]
async fn lists_are_paged_newest_first() {
    let bench = Bench::new().await;
    for user in 0..7 {
        bench.call("create", user, json!({"user_id": user, "display_name": "x"}), None).await.unwrap();
    }
    bench.call("delete", 3, json!({}), None).await.unwrap();
    let mut seen = Vec::new();
    let mut input = json!({"limit": 2});
    loop {
        let request = Request { key: vec![], ..Bench::request("list", 0, input.clone(), None) };
        let page = bench.house.call(&bench.tenant, request, Operation::default()).await.unwrap();
        seen.extend(page.body.as_array().unwrap().iter().map(|row| row["user_id"].as_i64().unwrap()));
        let Some(next) = page.next else { break };
        input["cursor"] = next.into();
    }
    assert_eq!(seen, [6, 5, 4, 2, 1, 0]);
    let bad = Bench::request("list", 0, json!({"cursor": "nonsense"}), None);
    let refusal = bench.house.call(&bench.tenant, Request { key: vec![], ..bad }, Operation::default()).await;
    assert_eq!(refusal.unwrap_err().code, Code::InvalidInput);
}

#[tokio::test]
async fn a_batch_is_all_or_nothing_and_repeats_as_one() {
    let bench = Bench::new().await;
    bench.call("create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await.unwrap();
    let create = Bench::request("create", 2, json!({"user_id": 2, "display_name": "Bob"}), None);
    let stale = Bench::request("patch", 1, json!({"display_name": "A"}), Some(9));
    let batch = |requests: Vec<Request>| {
        let operation = Operation { id: Some("batch-1".into()), fingerprint: "f".into() };
        bench.house.batch(&bench.tenant, requests, operation)
    };
    let refusal = batch(vec![create.clone(), stale]).await.unwrap_err();
    assert_eq!((refusal.call, refusal.code), (Some(1), Code::VersionConflict));
    bench.refused("read", 2, json!({}), None, Code::NotFound).await;
    // One that changes nothing keeps its place among the answers, also when they are repeated.
    let same = Bench::request("patch", 1, json!({"display_name": "Ann"}), Some(1));
    let first = batch(vec![same.clone(), create.clone()]).await.unwrap();
    assert_eq!(first.iter().map(|answer| answer.version).collect::<Vec<_>>(), [Some(1), Some(1)]);
    bench.call("patch", 1, json!({"display_name": "Z"}), Some(1)).await.unwrap();
    assert_eq!(batch(vec![same, create]).await.unwrap(), first);
}

#[tokio::test]
async fn input_is_checked_before_anything_is_read() {
    let bench = Bench::new().await;
    let refusal = bench
        .refused("create", 1, json!({"user_id": "one", "display_name": 3, "bo": 1}), None, Code::InvalidInput)
        .await;
    let places: Vec<&str> = refusal.field_errors.iter().map(|error| error.pointer.as_str()).collect();
    assert_eq!(places, ["/user_id", "/display_name", "/bo"]);
    let request = Request { action: "profile.explode".into(), ..Bench::request("read", 1, json!({}), None) };
    let refusal = bench.house.call(&bench.tenant, request, Operation::default()).await.unwrap_err();
    assert_eq!(refusal.code, Code::NotFound);
}

#[tokio::test]
async fn a_key_that_no_path_can_name_is_refused() {
    let blueprint = "[house]\nname = \"shop\"\n[entity.note]\nkey = { id = \"text\" }\n";
    let blueprint = Blueprint::read("statehouse.toml", blueprint).unwrap();
    let house = House::over(Arc::new(ModelStore::new()), &blueprint).unwrap();
    house.migrate(Migrate::Apply).await.unwrap();
    let tenant = Tenant::new("acme").unwrap();
    for (id, accepted) in [("", false), (".", false), ("..", false), ("...", true), (",", true), ("%", true)]
    {
        let input = json!({"id": id}).as_object().cloned().unwrap();
        let request = Request { action: "note.create".into(), key: vec![], input, expected: None };
        let answer = house.call(&tenant, request, Operation::default()).await;
        assert_eq!(answer.is_ok(), accepted, "{id:?}: {answer:?}");
    }
}

#[tokio::test]
async fn a_batch_that_writes_a_row_twice_says_which_calls_do() {
    let bench = Bench::new().await;
    let create =
        |user: i64| Bench::request("create", user, json!({"user_id": user, "display_name": "Ann"}), None);
    let batch = vec![create(1), create(2), create(1)];
    let refusal = bench.house.batch(&bench.tenant, batch, Operation::default()).await.unwrap_err();
    assert_eq!(refusal.code, Code::InvalidInput);
    assert!(refusal.message.starts_with("calls 0 and 2 of the batch"), "{refusal}");
}

/// Several callers count in a world that loses answers: every acknowledged call counts once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counting_survives_lost_answers() {
    let model: Arc<dyn Store> = Arc::new(ModelStore::new());
    let faulty = Arc::new(FaultyStore::over(model, Arc::new(SystemClock), Odds::default(), 7));
    let bench = Arc::new(Bench::over(faulty.clone()).await);
    bench.call("create", 1, json!({"user_id": 1, "display_name": "Ann"}), None).await.unwrap();
    faulty.set_odds(Odds { unknown_before: 0.1, unknown_after: 0.2, unavailable: 0.05, ..Odds::default() });
    let callers: Vec<_> = (0..4)
        .map(|caller| {
            let bench = bench.clone();
            tokio::spawn(async move {
                for number in 0..25 {
                    let id = format!("{caller}-{number}");
                    // Both ways of counting: where the number stands, and under the version that was read.
                    let input = if number % 2 == 0 {
                        json!({"increment": {"points": 1}})
                    } else {
                        json!({"increment": {"points": 1}, "set": {"bio": id}})
                    };
                    loop {
                        match bench.as_operation(&id, "mutate", input.clone(), None).await {
                            Ok(_) => break,
                            Err(refusal) => assert!(
                                matches!(
                                    refusal.code,
                                    Code::Unavailable | Code::OutcomeUnknown | Code::Contended
                                ),
                                "{refusal}"
                            ),
                        }
                    }
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    let achieved = faulty.achieved();
    assert!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    assert_eq!(bench.call("read", 1, json!({}), None).await.unwrap().body["points"], 100);
}
