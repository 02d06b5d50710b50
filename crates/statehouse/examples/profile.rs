//! A profile, typed: create, conditional update, conflict, mutation, retry.
//!
//! `cargo run -p statehouse --example profile --features sqlite`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use serde::{Deserialize, Serialize};
use serde_json::json;
use statehouse::entities::{List, Mutation};
use statehouse::{Blueprint, Code, House};
use statehouse_store::Tenant;

/// What the blueprint's `[entity.profile]` holds, under the same names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Profile {
    pub(crate) user_id: i64,
    pub(crate) display_name: String,
    pub(crate) bio: Option<String>,
    pub(crate) points: i64,
}

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "example"

[entity.profile]
key    = { user_id = "int" }
fields = { display_name = "text", bio = "text?", points = { type = "int", default = 0 } }
"#;

/// Walks through the life of a profile.
pub(crate) async fn tour(house: &House) -> Result<(), Box<dyn Error>> {
    let profiles = house.entity::<Profile>("profile", &Tenant::new("acme")?)?;

    // Under an operation id a retry gets the first answer, whatever happened to the acknowledgement.
    let ann = Profile { user_id: 42, display_name: "Ann".into(), bio: None, points: 0 };
    let created = profiles.under("signup-42").create(&ann).await?;
    let again = profiles.under("signup-42").create(&ann).await?;
    println!("created at version {}, and again at version {}", created.version, again.version);

    // Two people read version 1. The second to save is told, with the version to look at.
    let anna = Profile { display_name: "Anna".into(), ..created.value.clone() };
    let saved = profiles.update(42, created.version, &anna).await?;
    println!("updated to version {}: {}", saved.version, saved.value.display_name);
    match profiles.patch(42, created.version, &json!({"bio": "Likes trains"})).await {
        Err(refusal) if refusal.code == Code::VersionConflict => println!("refused: {refusal}"),
        other => return Err(format!("a stale patch was not refused: {other:?}").into()),
    }

    // A change that does not depend on what was there needs no version.
    let counted = profiles.mutate(42, Mutation::new().increment("points", 5)).await?;
    println!("{} points at version {}", counted.value.points, counted.version);

    profiles.delete(42, counted.version).await?;
    println!("{} active profiles after the delete", profiles.list(&List::default()).await?.rows.len());
    let back = profiles.restore(42, statehouse::Expected::Any).await?;
    println!("restored at version {}: {:?}", back.version, back.value);
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::temp_dir().join(format!("statehouse-example-{}.db", std::process::id()));
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
    let house = House::open(&format!("sqlite:{}", file.display()), &blueprint).await?;
    let toured = tour(&house).await;
    house.store().close().await;
    for ending in ["", "-wal", "-shm"] {
        // What cannot be removed stays in the folder for such things.
        let _ = std::fs::remove_file(format!("{}{ending}", file.display()));
    }
    toured
}
