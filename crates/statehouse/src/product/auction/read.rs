//! Reads of lots and bids.

use std::cmp::Reverse;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::{Address, Consistency, Cursor, Query, Row, Time, Value};

use super::{
    ACCEPTED, AuctionSpec, BID_ID, BUCKET, BY_STATE, OPEN, RUNNER_UP_AMOUNT, RUNNER_UP_BIDDER_ID, SCHEDULED,
    SEQ, STARTS_AT, STATES,
};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::declare::table::STATE;
use crate::form::{Form, Property};
use crate::paging::{self, CURSOR};

/// The lot with its description and its winner, by one strong read.
pub(super) struct AuctionRead(pub Arc<AuctionSpec>);

/// The field of an answer with the winner.
const WINNER: &str = "winner";

impl AuctionRead {
    /// What it answers.
    pub(super) fn form(auction: &AuctionSpec) -> Form {
        let Form::Object(mut shown) = auction.lots.row_form() else { return auction.lots.row_form() };
        for property in &mut shown {
            if property.name == STATE {
                let words: Vec<&'static str> = STATES.into_iter().chain([SCHEDULED]).collect();
                property.form = Form::one_of(&words);
                property.about = "as it is now; `SCHEDULED` is an open lot that has not begun".into();
            }
        }
        let taken = |name: &str, shown: &[Property]| shown.iter().any(|property| property.name == name);
        let form_of = |form: Form| if let Form::Object(properties) = form { properties } else { Vec::new() };
        for property in auction.details.iter().flat_map(|details| form_of(details.row_form())) {
            if !taken(&property.name, &shown) {
                shown.push(property);
            }
        }
        let winner = Property::required(WINNER, auction.winners.row_form(), "the winner, once it is sold");
        shown.push(Property { nullable: true, ..winner });
        Form::Object(shown)
    }

    fn addresses(&self, call: &Call, key: &[Value]) -> Result<Vec<Address>, Refusal> {
        let auction = &self.0;
        let tables = [&auction.lots, &auction.winners].into_iter().chain(&auction.details);
        let address = |def: &Arc<crate::declare::TableDef>| {
            Address::new(def.table(), &call.tenant, key.iter().cloned()).map_err(Refusal::from)
        };
        tables.map(address).collect()
    }

    fn shown(&self, lot: &Row, winner: Option<&Row>, details: Option<&Row>, now: Time) -> Json {
        let auction = &self.0;
        let mut json = auction.lots.row_json(lot);
        let Some(fields) = json.as_object_mut() else { return json };
        if lot.text(STATE) == Some(OPEN) && lot.time(STARTS_AT).is_some_and(|at| at > now) {
            fields.insert(STATE.into(), SCHEDULED.into());
        }
        let described = details.map(Row::to_json);
        for (name, value) in described.as_ref().and_then(Json::as_object).into_iter().flatten() {
            if auction.fields.iter().any(|field| field.name == *name) {
                fields.insert(name.clone(), value.clone());
            }
        }
        let mut winner = winner.map(|row| auction.winners.row_json(row));
        if let Some(winner) = winner.as_mut().and_then(Json::as_object_mut).filter(|_| !auction.runner_up) {
            winner.remove(RUNNER_UP_BIDDER_ID);
            winner.remove(RUNNER_UP_AMOUNT);
        }
        fields.insert(WINNER.into(), winner.unwrap_or_default());
        json
    }
}

#[async_trait]
impl Read for AuctionRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let addresses = self.addresses(call, &call.key)?;
        let mut rows = cx.store.get(&addresses, Consistency::Strong).await?.into_iter();
        let (lot, winner, details) = (rows.next().flatten(), rows.next().flatten(), rows.next().flatten());
        let lot = lot.ok_or_else(|| {
            Refusal::new(Code::NotFound, format!("{} does not exist", self.0.what(&call.key)))
        })?;
        let json = self.shown(&lot, winner.as_ref(), details.as_ref(), cx.clock.now());
        Ok(Arc::new(Answer::row(json)))
    }
}

/// One bid.
pub(super) struct BidRead(pub Arc<AuctionSpec>);

#[async_trait]
impl Read for BidRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let auction = &self.0;
        let missing = || {
            let lot = call.key.get(..auction.key.len()).unwrap_or_default();
            Refusal::new(Code::NotFound, format!("{} has no such bid", auction.what(lot)))
        };
        let (lot, bid) = call.key.split_at_checked(auction.key.len()).ok_or_else(missing)?;
        let bid_id = bid.first().and_then(Value::as_text).ok_or_else(missing)?;
        let lot =
            cx.row(auction.lots.table(), &call.tenant, lot.iter().cloned()).await?.ok_or_else(missing)?;
        let key = auction.bid_key(&lot, bid_id)?;
        let row = cx.row(auction.bids.table(), &call.tenant, key).await?.ok_or_else(missing)?;
        Ok(Arc::new(Answer::row(auction.shown_bid(&row))))
    }
}

impl AuctionSpec {
    /// A bid without its place among the buckets.
    fn shown_bid(&self, bid: &Row) -> Json {
        let mut json = self.bids.row_json(bid);
        if let Some(fields) = json.as_object_mut() {
            fields.remove(BUCKET);
        }
        json
    }
}

/// The bids for a lot: the buckets are read side by side and merged.
pub(super) struct BidHistory(pub Arc<AuctionSpec>);

impl BidHistory {
    /// The newest bids of a bucket, as many as a page has.
    async fn bucket(
        &self,
        query: &Query,
        limit: usize,
        cx: &ActionContext<'_>,
    ) -> Result<(Vec<Row>, bool), Refusal> {
        let (mut rows, mut query) = (Vec::new(), query.clone());
        loop {
            let page = cx.store.query(&query).await?;
            rows.extend(page.rows);
            match page.next {
                Some(next) if rows.len() < limit => query = query.after(next)?,
                next => return Ok((rows, next.is_some())),
            }
        }
    }
}

#[async_trait]
impl Read for BidHistory {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let auction = &self.0;
        let lot = paging::given(&auction.key, call)?;
        let state = call.input.text(STATE).unwrap_or(ACCEPTED);
        let limit = paging::rows(call);
        let after = call.input.text(CURSOR).map(Cursor::parse).transpose()?;
        let (mut found, mut is_more): (Vec<(Row, Query)>, bool) = (Vec::new(), false);
        for bucket in 0..auction.buckets {
            let partition = lot.iter().cloned().chain([i64::from(bucket).into(), state.into()]);
            let query = Query::index(auction.bids.table(), BY_STATE, &call.tenant, partition)?.backward();
            let query = query.limit(limit)?;
            let start = match &after {
                Some(cursor) => query.clone().after(cursor.in_read(&query))?,
                None => query.clone(),
            };
            let (rows, has_more) = self.bucket(&start, limit, cx).await?;
            is_more |= has_more;
            found.extend(rows.into_iter().map(|row| (row, query.clone())));
        }
        // The order of the index, without what all bids of a lot have in common.
        let order = |row: &Row| (row.int(SEQ), row.int(BUCKET), row.text(BID_ID).map(str::to_owned));
        found.sort_by_cached_key(|(row, _)| Reverse(order(row)));
        is_more |= found.len() > limit;
        found.truncate(limit);
        let next = found.last().filter(|_| is_more).map(|(row, query)| query.cursor_at(row));
        let rows = found.iter().map(|(row, _)| auction.shown_bid(row));
        Ok(Arc::new(paging::answer(rows, next)))
    }
}
