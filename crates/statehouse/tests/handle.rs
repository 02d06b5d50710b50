//! The typed handle, on the model store; and the example, which is the first thing that people run.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

#[expect(dead_code, reason = "the example has a main function of its own")]
#[path = "../examples/profile.rs"]
mod profile;

use profile::Profile;
use serde::{Deserialize, Serialize};
use serde_json::json;
use statehouse::entities::{Entity, EntityStatus, List, Mutation};
use statehouse::{Blueprint, Code, Expected, House};
use statehouse_store::Tenant;

async fn house(blueprint: &str) -> House {
    let blueprint = Blueprint::read("statehouse.toml", blueprint).unwrap();
    House::open("memory:", &blueprint).await.unwrap()
}

fn tenant() -> Tenant {
    Tenant::new("acme").unwrap()
}

fn profiles(house: &House) -> Entity<'_, Profile> {
    house.entity("profile", &tenant()).unwrap()
}

fn ann(user_id: i64) -> Profile {
    Profile { user_id, display_name: "Ann".into(), bio: None, points: 0 }
}

#[tokio::test]
async fn the_example_does_what_it_shows() {
    let house = house(profile::BLUEPRINT).await;
    profile::tour(&house).await.unwrap();
    let row = profiles(&house).read(42).await.unwrap();
    assert_eq!((row.version, row.value.display_name.as_str(), row.value.points), (5, "Anna", 5));
}

#[tokio::test]
async fn every_action_has_a_typed_answer() {
    let house = house(profile::BLUEPRINT).await;
    let profiles = profiles(&house);
    let created = profiles.create(&ann(1)).await.unwrap();
    assert_eq!((created.version, created.status), (1, EntityStatus::Active));
    let patched = profiles.patch(1, 1, &json!({"bio": "b"})).await.unwrap();
    assert_eq!((patched.version, patched.value.bio.as_deref()), (2, Some("b")));
    assert!(patched.updated_at >= created.updated_at);
    let cached = profiles.read_cached(1, &[patched.token.unwrap()]).await.unwrap();
    assert_eq!((cached.version, cached.value.bio.as_deref()), (2, Some("b")));
    let refusal = profiles.mutate(1, Mutation::new().set("bio", "c").at(1)).await.unwrap_err();
    assert_eq!((refusal.code, refusal.current_version), (Code::VersionConflict, Some(2)));
    let deleted = profiles.delete(1, Expected::Any).await.unwrap();
    assert_eq!((deleted.version, deleted.status), (3, EntityStatus::Deleted));
    assert_eq!(profiles.read(1).await.unwrap_err().code, Code::Deleted);
    let gone = profiles.list(&List { status: EntityStatus::Deleted, ..List::default() }).await.unwrap();
    assert_eq!(
        gone.rows,
        [deleted.clone()].map(|row| statehouse::entities::Versioned { token: None, ..row })
    );
    assert_eq!(profiles.restore(1, 2).await.unwrap_err().code, Code::VersionConflict);
    assert_eq!(profiles.restore(1, 3).await.unwrap().version, 4);
}

#[tokio::test]
async fn lists_go_page_by_page() {
    let house = house(profile::BLUEPRINT).await;
    let profiles = profiles(&house);
    for user in 0..5 {
        profiles.create(&ann(user)).await.unwrap();
    }
    let mut list = List { limit: Some(2), ..List::default() };
    let mut seen = Vec::new();
    loop {
        let page = profiles.list(&list).await.unwrap();
        seen.extend(page.rows.into_iter().map(|row| row.value.user_id));
        list.after = page.next;
        if list.after.is_none() {
            break;
        }
    }
    assert_eq!(seen, [4, 3, 2, 1, 0]);
}

#[tokio::test]
async fn a_repetition_under_an_id_has_the_first_answer_and_another_write_is_refused() {
    let house = house(profile::BLUEPRINT).await;
    let profiles = profiles(&house);
    let once = profiles.under("signup-1");
    let first = once.create(&ann(1)).await.unwrap();
    profiles.mutate(1, Mutation::new().increment("points", 1)).await.unwrap();
    assert_eq!(once.create(&ann(1)).await.unwrap(), first);
    assert_eq!(once.create(&ann(2)).await.unwrap_err().code, Code::OperationReused);
    assert_eq!(once.delete(1, Expected::Any).await.unwrap_err().code, Code::OperationReused);
}

#[tokio::test]
async fn what_does_not_fit_says_so() {
    let house = house(profile::BLUEPRINT).await;
    let refusal = house.entity::<Profile>("profle", &tenant()).unwrap_err();
    assert_eq!(refusal.code, Code::NotFound);
    assert!(refusal.message.contains("the blueprint has profile"), "{refusal}");

    let profiles = profiles(&house);
    profiles.create(&ann(1)).await.unwrap();
    let refusal = profiles.update(1, 1, &ann(2)).await.unwrap_err();
    assert_eq!((refusal.code, refusal.field_errors[0].pointer.as_str()), (Code::InvalidInput, "/user_id"));

    #[derive(Debug, Serialize, Deserialize)]
    struct Other {
        user_id: i64,
        nickname: String,
    }
    let others = house.entity::<Other>("profile", &tenant()).unwrap();
    let refusal = others.create(&Other { user_id: 2, nickname: "x".into() }).await.unwrap_err();
    assert_eq!(refusal.code, Code::InvalidInput);
    assert!(refusal.field_errors.iter().any(|misfit| misfit.pointer == "/nickname"), "{refusal:?}");
    let refusal = others.read(1).await.unwrap_err();
    assert!(refusal.message.contains("missing field `nickname`"), "{refusal}");
}

#[tokio::test]
async fn hot_fields_and_composite_keys_have_their_place() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Seat {
        event: String,
        number: i64,
        name: String,
        #[serde(default)]
        views: i64,
    }
    #[derive(Debug, PartialEq, Deserialize)]
    struct Counted {
        views: i64,
    }
    let house = house(
        "[entity.seat]\nkey = { event = 'text', number = 'int' }\n\
         fields = { name = 'text', views = { type = 'int', default = 0 } }\nhot = ['views']",
    )
    .await;
    let seats = house.entity::<Seat>("seat", &tenant()).unwrap();
    let seat = |name: &str, views| Seat { event: "gala".into(), number: 7, name: name.into(), views };
    seats.create(&seat("a", 0)).await.unwrap();
    let counted: Counted = seats.count(("gala", 7), Mutation::new().increment("views", 3)).await.unwrap();
    assert_eq!(counted, Counted { views: 3 });
    let refusal = seats.mutate(("gala", 7), Mutation::new().increment("views", 1)).await.unwrap_err();
    assert!(refusal.message.contains("use `count`"), "{refusal}");
    let read = seats.read(("gala", 7)).await.unwrap();
    assert_eq!((read.version, &read.value), (1, &seat("a", 3)));
    // What was read can be written back; the hot field is left alone.
    seats.update(("gala", 7), 1, &seat("b", 9)).await.unwrap();
    assert_eq!(seats.read(("gala", 7)).await.unwrap().value, seat("b", 3));
}
