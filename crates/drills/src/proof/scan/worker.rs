//! A worker of a scan, as a program outside would be: it claims ranges, and writes its effects in one batch with `advance`.

use anyhow::{Result, bail};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Operation, Refusal, Request};
use statehouse_store::Value;

use crate::harness::tenant_client::TenantClient;

/// A range that the worker has claimed.
#[derive(Clone, Debug)]
pub(crate) struct ClaimedRange {
    pub key: [Value; 2],
    pub epoch: i64,
}

/// What became of a step of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeStep {
    Advanced,
    Finished,
}

impl ClaimedRange {
    pub(crate) fn of(row: &Json) -> ClaimedRange {
        let run = row["run_id"].as_str().unwrap_or_default();
        let number = row["range_no"].as_i64().unwrap_or(0);
        ClaimedRange { key: [run.into(), number.into()], epoch: row["epoch"].as_i64().unwrap_or(0) }
    }

    /// Claims a range of a run of `sweep`.
    pub(crate) async fn claim(
        client: &TenantClient,
        run: &str,
        holder: &str,
    ) -> Result<ClaimedRange, Refusal> {
        let input = json!({"run_id": run, "holder": holder});
        let claimed = client.call("sweep_range.claim", &[], input, None).await?;
        Ok(ClaimedRange::of(&claimed.body))
    }

    /// The next rows.
    pub(crate) async fn rows(&self, client: &TenantClient, limit: usize) -> Result<Json, Refusal> {
        let page = client.call("sweep_range.rows", &self.key, json!({"limit": limit}), None).await?;
        Ok(page.body)
    }

    /// The requests that count each row of a page once more, and advance the range over it.
    pub(crate) fn batch(&self, page: &Json) -> Vec<Request> {
        let rows = page["rows"].as_array().map_or(&[][..], Vec::as_slice);
        let count = |row: &Json| {
            let key = [Value::from(row["id"].as_i64().unwrap_or(0))];
            TenantClient::request("item.mutate", &key, &json!({"increment": {"n": 1}}), None)
        };
        let advance = TenantClient::request("sweep_range.advance", &self.key, &self.advance(page), None);
        rows.iter().map(count).chain([advance]).collect()
    }

    /// The input of `advance` over a page.
    pub(crate) fn advance(&self, page: &Json) -> Json {
        let rows = page["rows"].as_array().map_or(0, Vec::len);
        json!({"epoch": self.epoch, "cursor": page["cursor"], "next": page["next"], "rows": rows})
    }

    /// The input of `finish` at the cursor of a page.
    pub(crate) fn finish(&self, page: &Json) -> Json {
        json!({"epoch": self.epoch, "cursor": page["cursor"]})
    }

    /// Reads a page and writes its effects with the cursor in one plan, or finishes the range.
    pub(crate) async fn step(
        &self,
        client: &TenantClient,
        limit: usize,
        operation: Operation,
    ) -> Result<RangeStep, Refusal> {
        let page = self.rows(client, limit).await?;
        if page["rows"].as_array().is_some_and(Vec::is_empty) {
            client.call("sweep_range.finish", &self.key, self.finish(&page), None).await?;
            return Ok(RangeStep::Finished);
        }
        client.house.batch(&client.tenant, self.batch(&page), operation).await?;
        Ok(RangeStep::Advanced)
    }
}

/// Works on a run until no range is left to claim. Repeats what may succeed a moment later.
pub(crate) async fn work(client: &TenantClient, run: &str, holder: &str) -> Result<()> {
    let mut mine: Option<ClaimedRange> = None;
    for _ in 0..10_000 {
        let Some(range) = &mine else {
            match ClaimedRange::claim(client, run, holder).await {
                Ok(claimed) => mine = Some(claimed),
                Err(refusal) if [Code::Held, Code::WrongState].contains(&refusal.code) => return Ok(()),
                Err(refusal) if is_passing(refusal.code) => {}
                Err(refusal) => bail!("claim: {refusal}"),
            }
            continue;
        };
        match range.step(client, 2, Operation::default()).await {
            Ok(RangeStep::Advanced) => {}
            Ok(RangeStep::Finished) => mine = None,
            // It may have been done: the cursor that is stored says so.
            Err(refusal) if is_passing(refusal.code) => {}
            Err(refusal) if [Code::VersionConflict, Code::Contended].contains(&refusal.code) => {}
            Err(refusal) if [Code::NotHolder, Code::WrongState].contains(&refusal.code) => mine = None,
            Err(refusal) => bail!("{range:?}: {refusal}"),
        }
    }
    bail!("{holder} does not come to an end")
}

fn is_passing(code: Code) -> bool {
    code.is_passing() || code == Code::OutcomeUnknown
}

/// Starts a run of `sweep`.
pub(crate) async fn start(client: &TenantClient, run: &str) -> Result<Answer> {
    client.done("sweep.start", &[], json!({"run_id": run}), None).await
}
