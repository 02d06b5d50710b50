//! Bidders compete for lots that end soon, many of them in the last moment, while auctioneers open, cancel and correct lots. Workers
//! close the lots; they are stopped and started again meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, worker};
use statehouse_store::random::Random;
use statehouse_store::{Clock as _, Record, Row, Scan, SystemClock, Tenant, Time};

use super::{Invariant, ScenarioContext, nothing_is_lost_or_doubled, request};
use crate::proof::auction::invariants;

/// The minutes of the blueprint in which a bid moves the end, shortened for the scenario.
pub(super) const EXTENSION: (&str, &str) =
    ("within = \"2m\", to = \"2m\", until = \"30m\"", "within = \"80ms\", to = \"80ms\", until = \"400ms\"");
/// How long a lot is open, in milliseconds.
const OPEN_MS: std::ops::Range<u64> = 150..600;
/// How long before the end a bidder waits for the last moment.
const LAST_MOMENT: Duration = Duration::from_millis(15);
const SELLER: &str = "seller";
/// Lots that are bid for at one time.
const LOTS_AT_ONCE: usize = 6;
/// How often something that the workers do is read again, and the pause before that.
const READS_MAX: usize = 600;
const PAUSE: Duration = Duration::from_millis(50);

/// What all callers know.
#[derive(Default)]
struct AuctionHouse {
    /// The newest lots.
    lots: Mutex<Vec<String>>,
    /// Operations that were acknowledged, except bids.
    acknowledged: Mutex<Vec<String>>,
    /// Bids that were acknowledged: the lot and the bid's number.
    bids: Mutex<BTreeMap<String, (String, i64)>>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One caller: a bidder, and an auctioneer now and then.
struct AuctionCaller {
    context: Arc<ScenarioContext>,
    tenant: Tenant,
    sale: Arc<AuctionHouse>,
    number: usize,
    random: Random,
}

pub(super) async fn run(context: Arc<ScenarioContext>) -> Result<Vec<Invariant>> {
    let tenant = Tenant::new("default")?;
    let sale = Arc::new(AuctionHouse::default());
    context.house.start_workers(worker::WorkerOptions::default());
    let caller = |context, number, random| AuctionCaller {
        context,
        tenant: tenant.clone(),
        sale: sale.clone(),
        number,
        random,
    };
    let mut first = caller(context.clone(), usize::MAX, Random::seeded(context.size.seed));
    for number in 0..LOTS_AT_ONCE {
        first.open(&format!("first-{number}")).await?;
    }
    context
        .callers(|context, number, random| {
            let mut caller = caller(context, number, random);
            async move {
                for number in 0..caller.context.size.actions {
                    caller.act(number).await?;
                    caller.context.done();
                }
                Ok(())
            }
        })
        .await?;
    let auction = StoredSale { context: &context, tenant: &tenant };
    auction.every_lot_closes().await?;
    let records = context.records().await?;
    let mails = auction.winners_are_told(&records).await?;
    let dashboard = auction.dashboard_is_true().await?;
    context.house.stop_workers().await;
    let acknowledged = std::mem::take(&mut *locked(&sale.acknowledged));
    let bids = std::mem::take(&mut *locked(&sale.bids));
    Ok(vec![
        auction.lots_are_sound(&records).await?,
        auction.bids_are_kept(&bids).await?,
        mails,
        nothing_is_lost_or_doubled(&records, &acknowledged)?,
        dashboard,
    ])
}

impl AuctionCaller {
    /// One thing that a caller does.
    async fn act(&mut self, number: usize) -> Result<()> {
        let operation = format!("caller-{}-{number}", self.number);
        match self.random.below(24) {
            0..3 => self.open(&operation).await,
            3 => self.restart_workers().await,
            4 => self.correct(&operation).await,
            5..9 => self.bid(&operation, true).await,
            _ => self.bid(&operation, false).await,
        }
    }

    /// Opens a lot that ends soon.
    async fn open(&mut self, operation: &str) -> Result<()> {
        let open = OPEN_MS.start + self.random.below(OPEN_MS.end - OPEN_MS.start);
        let ends_at = SystemClock.now().plus(Duration::from_millis(open));
        let mut input = json!({
            "lot_id": operation, "title": format!("Lot of {operation}"), "seller": SELLER,
            "ends_at": ends_at.to_string(), "start_price": 10,
        });
        if self.random.chance(0.3) {
            input["reserve"] = json!(150);
        }
        if self.act_on("lot.create", "", input, operation).await? {
            let mut lots = locked(&self.sale.lots);
            lots.push(operation.to_owned());
            let surplus = lots.len().saturating_sub(LOTS_AT_ONCE);
            lots.drain(..surplus);
        }
        Ok(())
    }

    /// Stops the workers of this process and starts them again, in the middle of what they do.
    async fn restart_workers(&mut self) -> Result<()> {
        if self.number == 0 {
            self.context.house.stop_workers().await;
            self.context.house.start_workers(worker::WorkerOptions::default());
        }
        Ok(())
    }

    /// An operator takes the best bid out of a lot, or cancels the lot.
    async fn correct(&mut self, operation: &str) -> Result<()> {
        let (Some(lot), shown) = self.lot().await? else { return Ok(()) };
        match shown["best_bid_id"].as_str() {
            Some(best) if self.random.chance(0.8) => {
                self.act_on("lot.void", &lot, json!({"bid_id": best}), operation).await.map(drop)
            }
            _ => self.act_on("lot.cancel", &lot, json!({}), operation).await.map(drop),
        }
    }

    /// Bids what the lot needs or more, and sometimes too little; a part of the bids in the last moment.
    async fn bid(&mut self, operation: &str, at_the_end: bool) -> Result<()> {
        let (Some(lot), shown) = self.lot().await? else { return Ok(()) };
        if let (true, Some(ends_at)) = (at_the_end, shown["ends_at"].as_str()) {
            let ends_at: Time = ends_at.parse()?;
            SystemClock.sleep(ends_at.since(SystemClock.now()).saturating_sub(LAST_MOMENT)).await;
        }
        let least = shown["min_next"].as_i64().context("a lot without a least bid")?;
        let amount = match self.random.below(8) {
            0 => least - 1,
            1 => least + 500,
            more => least + i64::try_from(more)? * 10,
        };
        let bidder =
            if self.random.chance(0.02) { SELLER.to_owned() } else { format!("bidder-{}", self.number) };
        let input = json!({"bidder_id": bidder, "amount": amount.max(1)});
        let call = request("lot.bid", &[lot.as_str().into()], input);
        match self.context.call(&self.tenant, call, operation).await? {
            Ok(answer) => {
                let number = answer.body["seq"].as_i64().context("a bid without a number")?;
                locked(&self.sale.bids).insert(operation.to_owned(), (lot, number));
                Ok(())
            }
            Err(refusal) => match refusal.code {
                Code::TooLow | Code::Expired | Code::WrongState => Ok(()),
                Code::Forbidden if bidder == SELLER => Ok(()),
                _ => bail!("{operation}: {refusal}"),
            },
        }
    }

    /// One of the newest lots, as it is read now.
    async fn lot(&mut self) -> Result<(Option<String>, Json)> {
        let lots = locked(&self.sale.lots).clone();
        let Some(lot) = self.random.pick(&lots).cloned() else { return Ok((None, Json::Null)) };
        let call = request("lot.read", &[lot.as_str().into()], json!({}));
        let answer = self.context.call(&self.tenant, call, "").await?;
        Ok((Some(lot), answer.map_err(|refusal| anyhow::anyhow!("lot.read: {refusal}"))?.body))
    }

    /// Calls an action. `false` if it was refused as it may be.
    async fn act_on(&self, action: &str, lot: &str, input: Json, operation: &str) -> Result<bool> {
        let key = if lot.is_empty() { Vec::new() } else { vec![lot.into()] };
        match self.context.call(&self.tenant, request(action, &key, input), operation).await? {
            Ok(_) => {
                locked(&self.sale.acknowledged).push(operation.to_owned());
                Ok(true)
            }
            Err(refusal) => match refusal.code {
                Code::WrongState | Code::Expired | Code::InvalidInput => Ok(false),
                _ => bail!("{operation}: {refusal}"),
            },
        }
    }
}

/// What is stored after the bidders have gone.
struct StoredSale<'a> {
    context: &'a ScenarioContext,
    tenant: &'a Tenant,
}

impl StoredSale<'_> {
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

    async fn every_lot_closes(&self) -> Result<()> {
        for _ in 0..READS_MAX {
            let lots = self.rows("lots").await?;
            if lots.iter().all(|row| row.text("state") != Some("OPEN")) {
                return Ok(());
            }
            SystemClock.sleep(PAUSE).await;
        }
        bail!("lots are still open long after their end: {:?}", self.context.house.worker_figures())
    }

    async fn lots_are_sound(&self, records: &[Record]) -> Result<Invariant> {
        invariants::check(&self.context.scope(self.tenant, "lot")).await?;
        let lots = self.rows("lots").await?;
        let sold = lots.iter().filter(|lot| lot.text("state") == Some("SOLD")).count();
        let closes = records.iter().flat_map(|record| &record.events);
        let closes = closes.filter(|event| matches!(event.name.as_str(), "lot.sold" | "lot.unsold")).count();
        let cancelled = lots.iter().filter(|lot| lot.text("state") == Some("CANCELLED")).count();
        ensure!(closes + cancelled == lots.len(), "{closes} closes of {} lots", lots.len());
        let moved = lots.iter().filter(|lot| lot.time("ends_at") != lot.time("hard_end")).count();
        Ok(Invariant {
            holds: "each lot closed once, at its end, and its winner is the best bidder of the bids in time",
            counted: format!("{} lots, {sold} sold, {moved} before their last possible end", lots.len()),
        })
    }

    /// Bids that were acknowledged are stored under the number that the bidder was told.
    async fn bids_are_kept(&self, acknowledged: &BTreeMap<String, (String, i64)>) -> Result<Invariant> {
        let rows = self.rows("lot_bids").await?;
        let stored: BTreeMap<&str, &Row> =
            rows.iter().filter_map(|row| Some((row.text("bid_id")?, row))).collect();
        ensure!(stored.len() == rows.len(), "an id of a bid is stored twice");
        for (bid, (lot, number)) in acknowledged {
            let row = stored.get(bid.as_str()).with_context(|| format!("bid {bid} for {lot} is lost"))?;
            ensure!(
                row.text("state") != Some("REJECTED") && row.int("seq") == Some(*number),
                "bid {bid} for {lot} was number {number}: {row}"
            );
        }
        Ok(Invariant {
            holds: "each acknowledged bid is stored once, under the number that its bidder was told",
            counted: format!("{} bids, {} rejected", acknowledged.len(), rejected(&rows)),
        })
    }

    /// Waits until there is a mail for each lot that was sold.
    async fn winners_are_told(&self, records: &[Record]) -> Result<Invariant> {
        let events = records.iter().flat_map(|record| &record.events);
        let sold = events.filter(|event| event.name == "lot.sold");
        let expected: BTreeSet<String> =
            sold.filter_map(|event| Some(format!("won-{}", event.data["row"]["lot_id"].as_str()?))).collect();
        let mut found = BTreeSet::new();
        for _ in 0..READS_MAX {
            let mails = self.rows("mails").await?;
            found = mails.iter().filter_map(|mail| mail.text("job_id").map(str::to_owned)).collect();
            if found == expected {
                return Ok(Invariant {
                    holds: "each winner has one mail, and no other bidder has one",
                    counted: format!("{} mails", found.len()),
                });
            }
            SystemClock.sleep(PAUSE).await;
        }
        bail!("{} mails for {} lots that were sold", found.len(), expected.len())
    }

    /// Waits until the view counts what the rows say.
    async fn dashboard_is_true(&self) -> Result<Invariant> {
        let mut last = String::new();
        for _ in 0..READS_MAX {
            let mut groups: BTreeMap<String, i64> = BTreeMap::new();
            for lot in self.rows("lots").await? {
                *groups.entry(lot.text("state").unwrap_or_default().to_owned()).or_default() += 1;
            }
            let list = self.context.call(self.tenant, request("sales.list", &[], json!({})), "").await?;
            let shown: Option<BTreeMap<String, i64>> = list.ok().and_then(|list| {
                let groups = list.body.as_array()?.iter();
                groups
                    .map(|group| Some((group["state"].as_str()?.to_owned(), group["count"].as_i64()?)))
                    .collect()
            });
            if shown.as_ref() == Some(&groups) {
                let counted = format!("{} lots", groups.values().sum::<i64>());
                return Ok(Invariant { holds: "the dashboard says what the rows say", counted });
            }
            last = format!("{shown:?} for {groups:?}");
            SystemClock.sleep(PAUSE).await;
        }
        bail!("the dashboard differs from the rows: {last}")
    }
}

fn rejected(bids: &[Row]) -> usize {
    bids.iter().filter(|bid| bid.text("state") == Some("REJECTED")).count()
}
