//! The reads of units: availability as it is now.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::{Address, Query, Row, Time};

use super::external_holds::ExternalHold;
use super::rules::effective_state;
use super::write::UNIT_CHANGE;
use super::{AVAILABLE, BOOKING_ID, BookingSpec, HELD, HOLD_EXPIRES_AT, STATE};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum BookingQuery {
    Unit,
    Units,
}

pub(super) struct BookingRead {
    pub booking: Arc<BookingSpec>,
    pub what: BookingQuery,
}

#[async_trait]
impl Read for BookingRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.what {
            BookingQuery::Unit => self.unit(call, cx).await,
            BookingQuery::Units => self.units(call, cx).await,
        };
        answer.map(Arc::new)
    }

    async fn show(
        &self,
        rows: &[Row],
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Option<Vec<Option<Json>>>, Refusal> {
        let leases = self.booking.leases(&call.tenant, cx, rows).await?;
        let now = cx.clock.now();
        let units = rows.iter().zip(leases.iter().map(Option::as_ref));
        let shown_units = units.map(|(row, lease)| {
            let state = effective_state(row, lease, self.booking.keeps_units, now)?;
            Ok(Some(shown(row, lease, state, now)))
        });
        Ok(Some(shown_units.collect::<Result<_, Refusal>>()?))
    }
}

/// A unit as it reads at a time.
fn shown(unit: &Row, lease: Option<&ExternalHold>, state: &'static str, now: Time) -> Json {
    let mut json = unit.to_json();
    let Some(fields) = json.as_object_mut() else { return json };
    match (state, lease) {
        (HELD, Some(lease)) => {
            fields.insert(STATE.into(), HELD.into());
            // For a moment the house itself has the lease of a unit that it changes.
            let booking = Some(lease.holder.as_str()).filter(|holder| *holder != UNIT_CHANGE);
            fields.insert(BOOKING_ID.into(), booking.into());
            fields.insert(HOLD_EXPIRES_AT.into(), now.plus(lease.left).to_string().into());
        }
        (AVAILABLE, _) => {
            fields.insert(STATE.into(), AVAILABLE.into());
            fields.insert(BOOKING_ID.into(), Json::Null);
            fields.insert(HOLD_EXPIRES_AT.into(), Json::Null);
        }
        _ => {}
    }
    json
}

impl BookingRead {
    async fn unit(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let booking = &self.booking;
        let address = Address::new(&booking.units_table, &call.tenant, call.key.iter().cloned())?;
        let row = booking.rows(cx, &[address]).await?.into_iter().next().flatten();
        let row = row.ok_or_else(|| {
            Refusal::new(Code::NotFound, format!("{} does not exist", booking.what(&call.key)))
        })?;
        let leases = booking.leases(&call.tenant, cx, std::slice::from_ref(&row)).await?;
        let (lease, now) = (leases.first().and_then(Option::as_ref), cx.clock.now());
        let state = effective_state(&row, lease, booking.keeps_units, now)?;
        Ok(Answer::row(shown(&row, lease, state, now)))
    }

    async fn units(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let booking = &self.booking;
        let group = booking.group_of(&call.input);
        let query = Query::table(&booking.units_table, &call.tenant, group)?;
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        let wanted = call.input.text(STATE);
        let leases = booking.leases(&call.tenant, cx, &page.rows).await?;
        let now = cx.clock.now();
        let mut units = Vec::with_capacity(page.rows.len());
        for (row, lease) in page.rows.iter().zip(leases.iter().map(Option::as_ref)) {
            let state = effective_state(row, lease, booking.keeps_units, now)?;
            if wanted.is_none_or(|wanted| state == wanted) {
                units.push(shown(row, lease, state, now));
            }
        }
        Ok(paging::answer(units, page.next))
    }
}
