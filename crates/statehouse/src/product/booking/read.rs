//! The reads of units: availability as it is now.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::{Address, Query, Row, Time};

use super::rules::standing;
use super::{AVAILABLE, BOOKING_ID, Booking, HELD, HOLD_EXPIRES_AT, STATE};
use crate::action::{Answer, Call, Code, Desk, Read, Refusal};
use crate::holds::Hold;
use crate::paging;

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading {
    Unit,
    Units,
}

pub(super) struct Reader {
    pub booking: Arc<Booking>,
    pub what: Reading,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.what {
            Reading::Unit => self.unit(call, desk).await,
            Reading::Units => self.units(call, desk).await,
        };
        answer.map(Arc::new)
    }
}

/// A unit as it reads at a time.
fn shown(unit: &Row, lease: Option<&Hold>, now: Time) -> Json {
    let mut json = unit.to_json();
    let Some(fields) = json.as_object_mut() else { return json };
    match (standing(unit, lease, now), lease) {
        (HELD, Some(lease)) => {
            fields.insert(STATE.into(), HELD.into());
            fields.insert(BOOKING_ID.into(), lease.holder.as_str().into());
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

impl Reader {
    async fn unit(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let booking = &self.booking;
        let address = Address::new(&booking.units_table, &call.tenant, call.key.iter().cloned())?;
        let row = booking.rows(desk, &[address]).await?.into_iter().next().flatten();
        let row = row.ok_or_else(|| {
            Refusal::new(Code::NotFound, format!("{} does not exist", booking.what(&call.key)))
        })?;
        let leases = booking.leases(&call.tenant, desk, std::slice::from_ref(&row)).await?;
        Ok(Answer::row(shown(&row, leases.first().and_then(Option::as_ref), desk.clock.now())))
    }

    async fn units(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let booking = &self.booking;
        let group = booking.group_of(&call.input)?;
        let query = Query::table(&booking.units_table, &call.tenant, group)?;
        let page = desk.store.query(&paging::page_of(query, call)?).await?;
        let wanted = call.input.get(STATE).and_then(Json::as_str);
        let leases = booking.leases(&call.tenant, desk, &page.rows).await?;
        let now = desk.clock.now();
        let units = page.rows.iter().zip(leases.iter().map(Option::as_ref));
        let units =
            units.filter(|(row, lease)| wanted.is_none_or(|wanted| standing(row, *lease, now) == wanted));
        Ok(paging::answer(units.map(|(row, lease)| shown(row, lease, now)), page.next))
    }
}
