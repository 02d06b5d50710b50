//! A tour of the waist on an SQLite file: a guarded update, a lost race, a retry, an explanation, the log.
//!
//! `cargo run -p statehouse-store-sqlite --example tour [FILE]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;

use statehouse_store::guard::{column, now};
use statehouse_store::{
    Commit, Entry, EventTemplate, Guard, Ids, Migrate, Plan, Random, Schema, Step, Store, SystemClock, Table,
    Tenant, Type,
};
use statehouse_store_sqlite::{SqliteOptions, SqliteStore};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "tour.db".into());
    let store = SqliteStore::open(SqliteOptions::at(&path)).await?;
    println!("A store in {path}, its log in {} partitions.", store.partitions());

    let profiles = Table::named("profiles")
        .partition("user_id", Type::Int)
        .required("display_name", Type::Text)
        .optional("bio", Type::Text)
        .defaulted("status", Type::Text, "ACTIVE")
        .required("updated_at", Type::Time)
        .index("by_status", &["status"], &["updated_at"])
        .build()?;
    for change in store.migrate(&Schema::new([profiles.clone()])?, Migrate::Apply).await? {
        println!("\n{change}:\n{}", change.statements.join(";\n"));
    }

    let acme = Tenant::new("acme")?;
    let ids = Ids::new(Arc::new(SystemClock), Random::from_entropy());
    let create = Plan::of(&acme, ids.next())
        .step(
            Step::upsert(&profiles, [42.into()])
                .set("display_name", "Ann")
                .set("status", "ACTIVE")
                .set("updated_at", now()),
        )
        .log(Entry::about("profile", "42").event(EventTemplate::named("profile.saved").with_row_of(0)))
        .build()?;
    let Commit::Applied(created) = store.commit(&create).await? else { return Err("refused".into()) };
    let version = created.rows.iter().flatten().next().map_or(0, statehouse_store::Row::version);
    println!("\nSaved profile 42: version {version}.");

    let rename = |name: &str| {
        Plan::of(&acme, ids.next())
            .step(
                Step::update(&profiles, [42.into()])
                    .guard(Guard::version(version).and(column("status").eq("ACTIVE")))
                    .set("display_name", name)
                    .set("updated_at", now()),
            )
            .log(Entry::about("profile", "42").event(EventTemplate::named("profile.updated").with_row_of(0)))
            .build()
    };
    let (ours, theirs) = (rename("Anna")?, rename("Annie")?);
    println!("\nWhat an update under version {version} does:\n{}", store.explain((&ours).into()));

    println!(
        "Two writers saw version {version}. The first: {}",
        describe(&ours, &store.commit(&ours).await?)
    );
    println!("The second: {}", describe(&theirs, &store.commit(&theirs).await?));
    println!("The first again, as a retry would: {}", describe(&ours, &store.commit(&ours).await?));

    println!("\nThe log of profile 42:");
    let partition = statehouse_store::log::partition_of(&acme, "profile", "42", store.partitions());
    for record in store.read_log(partition, 0, 100).await?.records {
        for event in record.events {
            println!("  {} {} {}", record.at, event.name, event.data);
        }
    }
    store.close().await;
    Ok(())
}

fn describe(plan: &Plan, outcome: &Commit) -> String {
    match outcome {
        Commit::Applied(applied) if applied.repeated => "applied before; nothing was done twice.".into(),
        Commit::Applied(_) => "applied.".into(),
        Commit::Refused(refused) => format!("refused, {}.", refused.describe(plan)),
        Commit::Fenced => "fenced.".into(),
    }
}
