//! Librarians of two branches lend, extend and take back tools, keep the waiting lists, enter members and retire tools. Loans are
//! short, so that many become overdue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, Request, worker};
use statehouse_store::random::Random;
use statehouse_store::{Clock as _, Record, Row, Scan, SystemClock, Tenant, Value};

use super::{Invariant, ScenarioContext, nothing_is_lost_or_doubled, number, request};
use crate::proof::booking::invariants;

const BRANCHES: [&str; 2] = ["east", "west"];
const CATEGORIES: [&str; 3] = ["drill", "sander", "saw"];
/// How long a loan lasts in the scenario; the blueprint's two weeks are shortened to it.
pub(super) const LOAN: (&str, &str) = ("hold_for  = \"14d\"", "hold_for  = \"200ms\"");
const LOANS_MAX: i64 = 3;
/// How often something that the workers do is looked for, and the pause between two looks.
const LOOKS_MAX: usize = 600;
const PAUSE: Duration = Duration::from_millis(50);

/// The library, as one librarian knows it.
struct Desk {
    context: Arc<ScenarioContext>,
    tenant: Tenant,
    acknowledged: Arc<Mutex<Vec<String>>>,
    librarian: usize,
    members: u64,
    tools: u64,
    random: Random,
    /// Loans that this librarian made and did not take back, with their members.
    loans: Vec<(String, i64)>,
}

pub(super) async fn run(context: Arc<ScenarioContext>) -> Result<Vec<Invariant>> {
    let tenant = Tenant::new("default")?;
    let acknowledged = Arc::<Mutex<Vec<String>>>::default();
    let members = (context.size.callers as u64 / 2).max(2);
    let tools = (context.size.callers * context.size.actions / 16 / BRANCHES.len()).max(3) as u64;
    let desk = |context: Arc<ScenarioContext>, librarian: usize, random: Random| Desk {
        context,
        tenant: tenant.clone(),
        acknowledged: acknowledged.clone(),
        librarian,
        members,
        tools,
        random,
        loans: Vec::new(),
    };
    desk(context.clone(), usize::MAX, Random::seeded(context.size.seed)).open().await?;
    context.house.start_workers(worker::WorkerOptions::default());
    context
        .callers(|context, librarian, random| {
            let mut desk = desk(context, librarian, random);
            async move {
                for number in 0..desk.context.size.actions {
                    desk.act(number).await?;
                    desk.context.done();
                }
                Ok(())
            }
        })
        .await?;
    let library = Library { context: &context, tenant: &tenant };
    library.every_loan_is_over_or_overdue().await?;
    let records = context.records().await?;
    let reminded = library.reminders_are_sent(&records).await?;
    let dashboard = library.dashboard_is_true().await?;
    context.house.stop_workers().await;
    let acknowledged = std::mem::take(&mut *acknowledged.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(vec![
        library.loans_are_sound().await?,
        library.members_keep_the_limit().await?,
        library.addresses_are_unique().await?,
        reminded,
        nothing_is_lost_or_doubled(&records, &acknowledged)?,
        dashboard,
    ])
}

impl Desk {
    /// Members and tools.
    async fn open(&mut self) -> Result<()> {
        for id in 1..=self.members {
            let input = json!({"member_id": id, "name": format!("Member {id}"), "email": format!("m{id}@example.com")});
            self.must(&[request("member.create", &[], input)], &format!("join-{id}")).await?;
        }
        for branch in BRANCHES {
            for number in 1..=self.tools {
                let category =
                    CATEGORIES.get(number as usize % CATEGORIES.len()).copied().unwrap_or_default();
                let input = json!({
                    "branch": branch, "tool_no": number, "name": format!("{category} {number}"),
                    "category": category, "price": 10 * number,
                });
                self.must(&[request("tool.create", &[], input)], &format!("buy-{branch}-{number}")).await?;
            }
        }
        Ok(())
    }

    /// One thing that a librarian does.
    async fn act(&mut self, number: usize) -> Result<()> {
        let operation = format!("librarian-{}-{number}", self.librarian);
        match self.random.below(20) {
            0..8 => self.lend(&operation).await,
            8..12 => self.take_back(&operation).await,
            12 => self.extend(&operation).await,
            13 | 14 => self.wish(&operation).await,
            15 => self.join(&operation).await,
            16 => self.comment(&operation).await,
            17 | 18 => self.shelve(&operation).await,
            _ => self.search().await,
        }
    }

    fn member(&mut self) -> Result<i64> {
        Ok(1 + i64::try_from(self.random.below(self.members))?)
    }

    fn tool(&mut self) -> Result<(&'static str, i64)> {
        let branch = self.random.pick(&BRANCHES).copied().unwrap_or_default();
        Ok((branch, 1 + i64::try_from(self.random.below(self.tools))?))
    }

    /// A loan and the number of the member's loans, as one plan.
    async fn lend(&mut self, operation: &str) -> Result<()> {
        let (member, (branch, tool)) = (self.member()?, self.tool()?);
        let mut wanted = json!({"booking_id": operation, "branch": branch, "holder": member});
        if self.random.chance(0.5) {
            wanted["tool_no"] = json!([tool]);
        } else {
            wanted["count"] = json!(1);
        }
        let requests = [counted(member, 1), request("tool_booking.hold", &[], wanted)];
        if self.calls(&requests, operation).await? {
            self.loans.push((operation.to_owned(), member));
        }
        Ok(())
    }

    /// A return, and then the tool goes to the member who has waited longest.
    async fn take_back(&mut self, operation: &str) -> Result<()> {
        if self.loans.is_empty() {
            return Ok(());
        }
        let (loan, member) = self.loans.swap_remove(self.random.below(self.loans.len() as u64) as usize);
        let cancel = request("tool_booking.cancel", &[loan.as_str().into()], json!({}));
        self.must(&[cancel, counted(member, -1)], operation).await?;
        let loan = self.read("tool_booking.read", &[loan.as_str().into()], json!({})).await?;
        let branch = loan["branch"].as_str().context("a loan without a branch")?.to_owned();
        let tool = loan["units"][0].as_i64().context("a loan without a tool")?;
        let since = "2000-01-01T00:00:00Z";
        let input = json!({"branch": branch, "tool_no": tool, "since.gt": since, "limit": 1});
        let waiting = self.read("wish.list", &[], input).await?;
        let Some(next) = waiting.get(0) else { return Ok(()) };
        let next = number(next, "member_id")?;
        let booking = format!("{operation}-next");
        let wanted = json!({"booking_id": booking, "branch": branch, "tool_no": [tool], "holder": next});
        let key = [next.into(), branch.as_str().into(), tool.into()];
        let requests = [
            counted(next, 1),
            request("tool_booking.hold", &[], wanted),
            request("wish.remove", &key, json!({})),
        ];
        if self.calls(&requests, &booking).await? {
            self.loans.push((booking, next));
        }
        Ok(())
    }

    async fn extend(&mut self, operation: &str) -> Result<()> {
        let Some((loan, _)) = self.random.pick(&self.loans).cloned() else { return Ok(()) };
        let extend = request("tool_booking.extend", &[loan.as_str().into()], json!({}));
        self.calls(&[extend], operation).await.map(drop)
    }

    async fn wish(&mut self, operation: &str) -> Result<()> {
        let (member, (branch, tool)) = (self.member()?, self.tool()?);
        let add = request("wish.add", &[member.into(), branch.into(), tool.into()], json!({}));
        self.calls(&[add], operation).await.map(drop)
    }

    /// A new member. Several want the same address, and one of them gets it.
    async fn join(&mut self, operation: &str) -> Result<()> {
        let id = 1_000 + i64::try_from(self.random.below(1_000_000))?;
        let email = format!("new{}@example.com", self.random.below(8));
        let input = json!({"member_id": id, "name": operation, "email": email});
        self.calls(&[request("member.create", &[], input)], operation).await.map(drop)
    }

    async fn comment(&mut self, operation: &str) -> Result<()> {
        let (member, (branch, tool)) = (self.member()?, self.tool()?);
        let input = json!({
            "comment_id": operation, "branch": branch, "tool_no": tool, "author": member, "text": "Works.",
        });
        self.calls(&[request("comment.append", &[], input)], operation).await.map(drop)
    }

    /// Retires a tool, puts one back, or gives one another price.
    async fn shelve(&mut self, operation: &str) -> Result<()> {
        let (branch, tool) = self.tool()?;
        let (action, input) = match self.random.below(4) {
            0 => ("tool.retire", json!({})),
            1 => ("tool.patch", json!({"price": self.random.below(500)})),
            _ => ("tool.restore", json!({})),
        };
        self.calls(&[request(action, &[branch.into(), tool.into()], input)], operation).await.map(drop)
    }

    async fn search(&mut self) -> Result<()> {
        let category = self.random.pick(&CATEGORIES).copied().unwrap_or_default();
        let found = self.read("tool.list", &[], json!({"category": category})).await?;
        let names: Vec<&str> =
            found.as_array().into_iter().flatten().filter_map(|tool| tool["name"].as_str()).collect();
        ensure!(names.is_sorted(), "the tools of {category} are not in the order of the index: {names:?}");
        ensure!(names.iter().all(|name| name.starts_with(category)), "{category}: {names:?}");
        Ok(())
    }

    /// Calls actions as one. `false` if they were refused as they may be; then nothing was done.
    async fn calls(&self, requests: &[Request], operation: &str) -> Result<bool> {
        match self.context.batch(&self.tenant, requests, operation).await? {
            Ok(answers) => {
                if answers.iter().any(|answer| answer.token.is_some()) {
                    let mut acknowledged = self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
                    acknowledged.push(operation.to_owned());
                }
                Ok(true)
            }
            Err(refusal) => match refusal.code {
                Code::OutOfRange | Code::Held | Code::WrongState | Code::Expired => Ok(false),
                Code::NotUnique | Code::AlreadyExists => Ok(false),
                _ => bail!("{operation}: {refusal}"),
            },
        }
    }

    async fn must(&self, requests: &[Request], operation: &str) -> Result<()> {
        ensure!(self.calls(requests, operation).await?, "{operation} was refused");
        Ok(())
    }

    async fn read(&self, action: &str, key: &[Value], input: Json) -> Result<Json> {
        let answer = self.context.call(&self.tenant, request(action, key, input), "").await?;
        Ok(answer.map_err(|refusal| anyhow::anyhow!("{action}: {refusal}"))?.body)
    }
}

/// One loan more or less of a member.
fn counted(member: i64, amount: i64) -> Request {
    request("member.mutate", &[member.into()], json!({"increment": {"open_loans": amount}}))
}

/// What is stored, when the librarians have gone.
struct Library<'a> {
    context: &'a ScenarioContext,
    tenant: &'a Tenant,
}

impl Library<'_> {
    async fn rows(&self, table: &str) -> Result<Vec<Row>> {
        let found = self.context.house.schema().table(table);
        let mut scan = Scan::of(found.with_context(|| format!("there is no table {table}"))?, self.tenant);
        let mut rows = Vec::new();
        loop {
            let page = self.context.store.scan(&scan).await?;
            rows.extend(page.rows);
            let Some(next) = page.next else { return Ok(rows) };
            scan = scan.after(next)?;
        }
    }

    async fn every_loan_is_over_or_overdue(&self) -> Result<()> {
        for _ in 0..LOOKS_MAX {
            let loans = self.rows("tool_bookings").await?;
            if loans.iter().all(|row| row.text("state") != Some("IN_PROGRESS")) {
                return Ok(());
            }
            SystemClock.sleep(PAUSE).await;
        }
        bail!("loans are still open long after their end: {:?}", self.context.house.worker_figures())
    }

    async fn loans_are_sound(&self) -> Result<Invariant> {
        invariants::check(&self.context.scope(self.tenant, "tool")).await?;
        let loans = self.rows("tool_bookings").await?;
        let overdue = loans.iter().filter(|loan| loan.text("state") == Some("OVERDUE")).count();
        Ok(Invariant {
            holds: "no tool is lent twice, and each loan has its tools",
            counted: format!("{} loans, {overdue} overdue", loans.len()),
        })
    }

    async fn members_keep_the_limit(&self) -> Result<Invariant> {
        let mut open: BTreeMap<i64, i64> = BTreeMap::new();
        for loan in self.rows("tool_bookings").await? {
            if matches!(loan.text("state"), Some("IN_PROGRESS" | "OVERDUE")) {
                *open.entry(loan.int("holder").context("a loan without a member")?).or_default() += 1;
            }
        }
        let members = self.rows("members").await?;
        for member in &members {
            let id = member.key().first().and_then(Value::as_int).context("a member without a number")?;
            let (stored, loans) = (member.int("open_loans"), open.remove(&id).unwrap_or(0));
            ensure!(stored == Some(loans), "{member} has {loans} open loans");
            ensure!(loans <= LOANS_MAX, "{member} has {loans} tools");
        }
        ensure!(open.is_empty(), "loans of members who do not exist: {open:?}");
        Ok(Invariant {
            holds: "no member has more than three tools, and the stored number is right",
            counted: format!("{} members", members.len()),
        })
    }

    async fn addresses_are_unique(&self) -> Result<Invariant> {
        let members = self.rows("members").await?;
        let addresses: BTreeSet<&str> = members.iter().filter_map(|member| member.text("email")).collect();
        ensure!(addresses.len() == members.len(), "{} members have {addresses:?}", members.len());
        let counted = format!("{} addresses", addresses.len());
        Ok(Invariant { holds: "no two members have one e-mail address", counted })
    }

    /// Waits until there is a mail for each loan that became overdue.
    async fn reminders_are_sent(&self, records: &[Record]) -> Result<Invariant> {
        let events = records.iter().flat_map(|record| &record.events);
        let overdue = events.filter(|event| event.name == "tool_booking.overdue");
        let expected: BTreeSet<String> = overdue
            .filter_map(|event| Some(format!("overdue-{}", event.data["row"]["booking_id"].as_str()?)))
            .collect();
        let mut found = BTreeSet::new();
        for _ in 0..LOOKS_MAX {
            let mails = self.rows("mails").await?;
            found = mails.iter().filter_map(|mail| mail.text("job_id").map(str::to_owned)).collect();
            if found == expected {
                return Ok(Invariant {
                    holds: "each loan that became overdue has one mail, and no other has one",
                    counted: format!("{} mails", found.len()),
                });
            }
            SystemClock.sleep(PAUSE).await;
        }
        bail!("{} mails for {} overdue loans", found.len(), expected.len())
    }

    /// Waits until the views say what the rows say.
    async fn dashboard_is_true(&self) -> Result<Invariant> {
        let mut differences = String::new();
        for _ in 0..LOOKS_MAX {
            let tools = self.rows("tools").await?;
            let loans = self.rows("tool_bookings").await?;
            differences =
                self.differences("shelf", &tools).await? + &self.differences("loans", &loans).await?;
            if differences.is_empty() {
                return Ok(Invariant {
                    holds: "the dashboard says what the rows say",
                    counted: format!("{} tools, {} loans", tools.len(), loans.len()),
                });
            }
            SystemClock.sleep(PAUSE).await;
        }
        bail!("the dashboard differs from the rows: {differences}")
    }

    /// How a view by state and its total differ from rows; empty if they do not.
    async fn differences(&self, view: &str, rows: &[Row]) -> Result<String> {
        let mut groups: BTreeMap<String, [i64; 2]> = BTreeMap::new();
        for row in rows {
            let group = groups.entry(row.text("state").unwrap_or_default().to_owned()).or_default();
            group[0] += 1;
            group[1] += row.int("price").unwrap_or(0);
        }
        let total = groups.values().fold([0, 0], |sum, group| [sum[0] + group[0], sum[1] + group[1]]);
        let shown =
            |body: &Json| [body["count"].as_i64().unwrap_or(0), body["sum_price"].as_i64().unwrap_or(0)];
        let list =
            self.context.call(self.tenant, request(&format!("{view}.list"), &[], json!({})), "").await?;
        let whole = format!("{view}_total.read");
        let whole = self.context.call(self.tenant, request(&whole, &[], json!({})), "").await?;
        let (Ok(list), Ok(whole)) = (list, whole) else { return Ok(format!("{view} is not built")) };
        let listed: BTreeMap<String, [i64; 2]> = list
            .body
            .as_array()
            .into_iter()
            .flatten()
            .map(|group| (group["state"].as_str().unwrap_or_default().to_owned(), shown(group)))
            .collect();
        let is_true = listed == groups && shown(&whole.body) == total;
        Ok(if is_true { String::new() } else { format!("{view}: {listed:?} for {groups:?}; ") })
    }
}
