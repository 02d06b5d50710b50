//! A create with a unique field and a reference, and a page of a filtered list, on SQLite and on PostgreSQL, against the same
//! statements by hand.
//!
//! A loan has a code that no other loan has and names a member that exists. By hand that is a look at the member, a row for the code,
//! a count of the member's loans, the loan and a record for readers of the log, in one transaction: with group commit on SQLite, as
//! one statement on a connection for each caller on PostgreSQL. A page is twenty tools of a category, the dearest first, as JSON.

mod postgres;
mod sqlite;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::{Ids, Random, SystemClock};

use crate::load::{self, LoadRound, drive, median, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

const BLUEPRINT: &str = "
[house]
name = \"bench\"

[entity.member]
key    = { member_id = \"int\" }
fields = { name = \"text\" }

[entity.loan]
key = { loan_id = \"text\" }
[entity.loan.fields]
code   = { type = \"text\", unique = true }
member = { type = \"int\", ref = \"member\" }

[entity.tool]
key     = { tool_id = \"int\" }
fields  = { category = \"text\", name = \"text\", price = \"int\" }
indexes = { by_category = [\"category\", \"-price\"] }
";

/// Members, each with loans of its own caller only, so that callers do not meet at one count.
const MEMBERS: u64 = 6_400;
const TOOLS: u64 = 20_000;
const CATEGORIES: u64 = 50;
/// Rows of a page.
const PAGE: i64 = 20;
const WRITERS: u64 = 64;
const READERS: u64 = 16;
/// Rows of one plan while tables are filled.
const FILLED: u64 = 40;

/// What a careful engineer would write.
#[async_trait]
pub(crate) trait LoansByHand: Send + Sync + 'static {
    /// Creates a loan and says whether it was created.
    async fn create(&self, caller: u64, loan: NewLoan) -> Result<bool>;

    /// A page of a category.
    async fn page(&self, caller: u64, category: &str) -> Result<Vec<Json>>;
}

/// A loan to be created.
#[derive(Debug)]
pub(crate) struct NewLoan {
    pub(crate) id: String,
    pub(crate) code: String,
    pub(crate) member: i64,
    pub(crate) operation: String,
}

/// Measures and prints. `quick` measures too little for a figure, and shows that everything runs.
pub async fn run(quick: bool) -> Result<()> {
    let (rounds, span) =
        if quick { (1, Duration::from_millis(100)) } else { (7, Duration::from_millis(700)) };
    for (engine, server) in [("SQLite", BenchServer::sqlite()?), ("PostgreSQL", BenchServer::postgres()?)] {
        let site = Site::at(&server.url).await?;
        let house = site.house(BLUEPRINT).await?;
        fill(&house).await?;
        let folder = tempfile::tempdir()?;
        let by_hand: Arc<dyn LoansByHand> = match engine {
            "SQLite" => Arc::new(sqlite::SqliteLoans::open(&folder.path().join("hand.db"))?),
            _ => Arc::new(postgres::PostgresLoans::open(&server.url).await?),
        };
        server.settle().await?;
        let (mut ours, mut reference) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(creates(&house, span).await?);
            reference.push(creates_by_hand(&by_hand, span).await?);
        }
        report::heading(&format!("{engine}: create with a unique field and a reference, {WRITERS} callers"));
        report::measured("Statehouse", median(&ours)?);
        report::measured("by hand, the same statements", median(&reference)?);
        report::ratio("Statehouse / by hand", ratio(&ours, &reference)?, 0.7);
        let (mut ours, mut reference) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(pages(&house, span).await?);
            reference.push(pages_by_hand(&by_hand, span).await?);
        }
        report::heading(&format!("{engine}: a page of {PAGE} rows by a declared index, {READERS} callers"));
        report::measured("Statehouse", median(&ours)?);
        report::measured("by hand, the same statement", median(&reference)?);
        report::ratio("Statehouse / by hand", ratio(&ours, &reference)?, 0.8);
        site.close().await;
    }
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

fn category(number: u64) -> String {
    format!("category {}", number % CATEGORIES)
}

async fn fill(house: &Tenancy) -> Result<()> {
    let member = |id: u64| request("member.create", vec![], json!({"member_id": id, "name": "a member"}));
    let tool = |id: u64| {
        let input =
            json!({"tool_id": id, "category": category(id), "name": "a tool", "price": id * 7 % 1_000});
        request("tool.create", vec![], input)
    };
    let batches = |count: u64| (0..count).step_by(FILLED as usize);
    house.fill(batches(MEMBERS).map(|first| (first..first + FILLED).map(member).collect())).await?;
    house.fill(batches(TOOLS).map(|first| (first..first + FILLED).map(tool).collect())).await
}

/// The member of a caller's loan.
fn member_of(caller: u64, number: u64) -> Result<i64> {
    let own = MEMBERS / WRITERS;
    Ok(i64::try_from(caller * own + number % own)?)
}

async fn creates(house: &Tenancy, span: Duration) -> Result<LoadRound> {
    let house = house.clone();
    drive(WRITERS, span, move |caller, number| {
        let house = house.clone();
        async move {
            let id = house.house.ids().next();
            let input = json!({"loan_id": id, "code": id, "member": member_of(caller, number)?});
            house.call("loan.create", vec![], input).await?;
            Ok(())
        }
    })
    .await
}

async fn creates_by_hand(by_hand: &Arc<dyn LoansByHand>, span: Duration) -> Result<LoadRound> {
    let by_hand = by_hand.clone();
    let ids = Arc::new(Ids::new(Arc::new(SystemClock), Random::from_entropy()));
    drive(WRITERS, span, move |caller, number| {
        let (by_hand, ids) = (by_hand.clone(), ids.clone());
        async move {
            let id = ids.next();
            let (code, member) = (id.clone(), member_of(caller, number)?);
            let loan = NewLoan { id, code, member, operation: ids.next() };
            ensure!(by_hand.create(caller, loan).await?, "not created");
            Ok(())
        }
    })
    .await
}

async fn pages(house: &Tenancy, span: Duration) -> Result<LoadRound> {
    let house = house.clone();
    drive(READERS, span, move |caller, number| {
        let house = house.clone();
        async move {
            let input = json!({"category": category(caller + number), "limit": PAGE});
            let rows = house.list("tool.list", vec![], input).await?;
            ensure!(rows.len() == PAGE as usize, "{} rows", rows.len());
            Ok(())
        }
    })
    .await
}

async fn pages_by_hand(by_hand: &Arc<dyn LoansByHand>, span: Duration) -> Result<LoadRound> {
    let by_hand = by_hand.clone();
    drive(READERS, span, move |caller, number| {
        let by_hand = by_hand.clone();
        async move {
            let rows = by_hand.page(caller, &category(caller + number)).await?;
            ensure!(rows.len() == PAGE as usize, "{} rows", rows.len());
            Ok(())
        }
    })
    .await
}

/// A tool as JSON: number, name, price, the time of its last change in microseconds, version.
fn tool_json(category: &str, (id, name, price, updated_at, version): (i64, String, i64, i64, i64)) -> Json {
    json!({
        "tool_id": id, "category": category, "name": name, "price": price, "status": "ACTIVE",
        "updated_at": statehouse_store::Time::from_micros(updated_at).to_string(), "version": version,
    })
}

/// The event of a create, as readers of the log get it.
fn event_of(loan: &NewLoan) -> String {
    let row = json!({"loan_id": loan.id, "code": loan.code, "member": loan.member, "status": "ACTIVE", "version": 1});
    json!([{"name": "loan.created", "data": {"row": row}}]).to_string()
}
