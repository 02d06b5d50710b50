//! The writes: from a call to the steps of a plan, and from a refused step to what it means.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{column, is_in, now, now_minus, now_plus};
use statehouse_store::limits::{LOG_ENTRY_OPERATIONS, PLAN_OPERATIONS_MAX};
use statehouse_store::log::partition_of;
use statehouse_store::plan::Expect;
use statehouse_store::{
    Address, Consistency, Entry, Event, EventTemplate, Guard, Plan, PlanError, Query, Reason, Refused, Row,
    Step, Table, Tenant, Time, Value,
};

use super::rules::{choose, holder_field, misfit, span, standing, value_of};
use super::{
    AVAILABLE, BOOKING_ID, Booking, CANCELLED, CHOICES, CONFIRMED, COUNT, CREATED_AT, EXPIRED, EXPIRES_AT,
    HELD, HOLD_EXPIRES_AT, HOLDER, IN_PROGRESS, LOOK_PAGES, LOOK_ROWS, SOLD, STATE, UNITS, UPDATED_AT,
};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::holds::{Hold, Holds};
use crate::infra::due::{self, Due};
use crate::resource::key_text;
use crate::worker::Wake;

/// How often units are chosen anew because somebody else has taken one of them.
const LEASE_TRIES: usize = 8;

impl Booking {
    pub(super) fn sweeper(&self) -> String {
        format!("{}.expire", self.bookings)
    }

    fn unit_key(&self, group: &[Value], unit: &Value) -> Vec<Value> {
        group.iter().chain([unit]).cloned().collect()
    }

    pub(super) fn group_of(&self, input: &Map<String, Json>) -> Result<Vec<Value>, Refusal> {
        self.group.iter().map(|field| value_of(input.get(&field.name), field)).collect()
    }

    /// The group of a booking's row.
    fn group_in(&self, row: &Row) -> Vec<Value> {
        self.group.iter().map(|field| row.get(&field.name).cloned().unwrap_or(Value::Null)).collect()
    }

    /// The keys of the units that a booking's row names.
    fn units_in(&self, row: &Row) -> Vec<Vec<Value>> {
        let group = self.group_in(row);
        let units = row.json(UNITS).and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
        units
            .iter()
            .filter_map(|unit| Value::from_json(unit.clone(), self.unit.kind).ok())
            .map(|unit| self.unit_key(&group, &unit))
            .collect()
    }

    pub(super) fn what(&self, key: &[Value]) -> String {
        format!("{} {}", self.name, key_text(key))
    }

    /// A step on a unit of a booking (I2).
    fn on_unit(&self, key: Vec<Value>, booking_id: &str) -> Step {
        Step::update(&self.units_table, key).guard(column(BOOKING_ID).eq(booking_id)).set(UPDATED_AT, now())
    }

    fn freed(&self, key: Vec<Value>, booking_id: &str) -> Step {
        self.on_unit(key, booking_id)
            .set(STATE, AVAILABLE)
            .set(BOOKING_ID, Value::Null)
            .set(HOLD_EXPIRES_AT, Value::Null)
    }

    /// The end of a booking whose time is up (I4).
    fn expired(&self, booking_id: &str) -> Step {
        let guard = column(STATE).eq(IN_PROGRESS).and(column(EXPIRES_AT).le(now()));
        due::clear(self.on_booking(booking_id).guard(guard).set(STATE, EXPIRED))
    }

    fn on_booking(&self, booking_id: &str) -> Step {
        Step::update(&self.bookings_table, [booking_id.into()]).set(UPDATED_AT, now())
    }

    /// What ends a booking whose time is up, with all its units.
    fn expiry(&self, row: &Row) -> Vec<Step> {
        let booking_id = row.text(BOOKING_ID).unwrap_or_default();
        // A lease ends by itself, and has left no trace in the units' rows.
        let units = if self.leased { Vec::new() } else { self.units_in(row) };
        let units = units.into_iter().map(|key| self.freed(key, booking_id));
        std::iter::once(self.expired(booking_id)).chain(units).collect()
    }

    pub(super) async fn rows(
        &self,
        desk: &Desk<'_>,
        addresses: &[Address],
    ) -> Result<Vec<Option<Row>>, Refusal> {
        Ok(desk.store.get(addresses, Consistency::Strong).await?)
    }

    pub(super) async fn booking(&self, call: &Call, desk: &Desk<'_>) -> Result<Row, Refusal> {
        let address = Address::new(&self.bookings_table, &call.tenant, call.key.iter().cloned())?;
        let found = self.rows(desk, &[address]).await?.into_iter().next().flatten();
        found.ok_or_else(|| {
            let message = format!("{} {} does not exist", self.bookings, key_text(&call.key));
            Refusal::new(Code::NotFound, message)
        })
    }

    /// The units that a call names, as they are.
    async fn named(
        &self,
        call: &Call,
        desk: &Desk<'_>,
        group: &[Value],
        wanted: &[Value],
    ) -> Result<Vec<Row>, Refusal> {
        let keys: Vec<Vec<Value>> = wanted.iter().map(|unit| self.unit_key(group, unit)).collect();
        let addresses = keys
            .iter()
            .map(|key| Address::new(&self.units_table, &call.tenant, key.iter().cloned()))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = self.rows(desk, &addresses).await?;
        let found = keys.iter().zip(rows).map(|(key, row)| {
            row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", self.what(key))))
        });
        found.collect()
    }

    fn wanted(&self, call: &Call) -> Result<Vec<Value>, Refusal> {
        let list = call.input.get(&self.unit.name).and_then(Json::as_array);
        let wanted = list.into_iter().flatten().map(|unit| value_of(Some(unit), &self.unit));
        let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
        let distinct: BTreeSet<String> = wanted.iter().map(ToString::to_string).collect();
        if distinct.len() < wanted.len() {
            return Err(misfit(&self.unit.name, "a unit is named twice"));
        }
        Ok(wanted)
    }

    /// The holds, for bookings that keep theirs there.
    fn holds<'d>(&self, desk: &Desk<'d>) -> Result<&'d dyn Holds, Refusal> {
        desk.holds.ok_or_else(|| {
            let message =
                format!("{} keeps its holds in Redis, and this house was opened without one", self.name);
            Refusal::new(Code::Unavailable, message)
        })
    }

    /// The name under which a unit is held. Those of one group have the part in braces in common, by which a cluster keeps
    /// them together.
    fn hold_name(&self, tenant: &Tenant, key: &[Value]) -> String {
        let (group, unit) = key.split_at(key.len().saturating_sub(1));
        let group = key_text(group).replace(['{', '}'], "_");
        format!("{{{tenant}/{}/{group}}}/{}", self.name, key_text(unit))
    }

    fn hold_names<'k>(&self, tenant: &Tenant, keys: impl IntoIterator<Item = &'k [Value]>) -> Vec<String> {
        keys.into_iter().map(|key| self.hold_name(tenant, key)).collect()
    }

    /// Who holds each unit before the store; nobody, where holds are states of the units.
    pub(super) async fn leases(
        &self,
        tenant: &Tenant,
        desk: &Desk<'_>,
        units: &[Row],
    ) -> Result<Vec<Option<Hold>>, Refusal> {
        if !self.leased {
            return Ok(units.iter().map(|_| None).collect());
        }
        let names = self.hold_names(tenant, units.iter().map(Row::key));
        Ok(self.holds(desk)?.look(&names).await?)
    }

    /// Takes leases on the units that a call wants, chosen ones included, and then looks at their rows: whoever was sold
    /// one of them had a lease on it before.
    async fn lease(
        &self,
        call: &Call,
        desk: &Desk<'_>,
        group: &[Value],
        wanted: &[Value],
        count: usize,
    ) -> Result<Vec<Row>, Refusal> {
        let holds = self.holds(desk)?;
        let booking_id = call.input.get(BOOKING_ID).and_then(Json::as_str).unwrap_or_default();
        for _ in 0..LEASE_TRIES {
            let mut units = self.named(call, desk, group, wanted).await?;
            if count > units.len() {
                let more = self.best(call, desk, group, &units, count - units.len()).await?;
                units.extend(more);
            }
            let names = self.hold_names(&call.tenant, units.iter().map(Row::key));
            match holds.take(&names, booking_id, self.hold_for).await? {
                Ok(()) => {}
                Err(place) if place < wanted.len() => {
                    let what = units.get(place).map(|unit| self.what(unit.key())).unwrap_or_default();
                    return Err(Refusal::new(Code::Held, format!("{what} is held by somebody else")));
                }
                // One that was chosen here was chosen by somebody else as well.
                Err(_) => continue,
            }
            let chosen: Vec<Value> = units.iter().filter_map(|unit| unit.key().last().cloned()).collect();
            let fresh = self.named(call, desk, group, &chosen).await;
            let free = fresh.and_then(|rows| {
                rows.iter().try_for_each(|unit| self.check_free(unit, desk.clock.now()))?;
                Ok(rows)
            });
            if free.is_err() {
                holds.release(&names, booking_id).await?;
            }
            return free;
        }
        let message = format!("too many buyers want units of {} {} at once", self.name, key_text(group));
        Err(Refusal::new(Code::Contended, message))
    }

    /// What becomes of the leases of a booking that is about to change; only a lost one stops it.
    async fn change_leases(
        &self,
        verb: Verb,
        call: &Call,
        desk: &Desk<'_>,
        row: &Row,
    ) -> Result<(), Refusal> {
        if !self.leased || row.text(STATE) != Some(IN_PROGRESS) {
            return Ok(());
        }
        let keys = self.units_in(row);
        let names = self.hold_names(&call.tenant, keys.iter().map(Vec::as_slice));
        let id = row.text(BOOKING_ID).unwrap_or_default();
        match verb {
            Verb::Extend => {
                // Never beyond what the booking's row will allow, or a lease could be prolonged for ever by extensions
                // that the store refuses.
                let last = row.time(CREATED_AT).map_or(Time::MAX, |created| created.plus(self.hold_max));
                let span = last.since(desk.clock.now()).min(self.hold_for);
                if !span.is_zero() && !self.holds(desk)?.extend(&names, id, span).await? {
                    let message = format!("{} {id} has lost its hold; hold again", self.bookings);
                    return Err(Refusal::new(Code::Expired, message));
                }
            }
            // If the cancellation is not applied after all, the buyer has said that they do not want it.
            Verb::Cancel => self.holds(desk)?.release(&names, id).await?,
            Verb::Hold | Verb::Confirm | Verb::Expire => {}
        }
        Ok(())
    }

    /// Units that are free, beside those that were named: the best ones, as [`choose`] says.
    async fn best(
        &self,
        call: &Call,
        desk: &Desk<'_>,
        group: &[Value],
        named: &[Row],
        count: usize,
    ) -> Result<Vec<Row>, Refusal> {
        let now = desk.clock.now();
        let mut query =
            Query::table(&self.units_table, &call.tenant, group.iter().cloned())?.limit(LOOK_ROWS)?;
        let (mut rows, mut free): (Vec<Row>, Vec<bool>) = Default::default();
        for _ in 0..LOOK_PAGES {
            let page = desk.store.query(&query).await?;
            let leases = self.leases(&call.tenant, desk, &page.rows).await?;
            free.extend(page.rows.iter().zip(&leases).map(|(row, lease)| {
                standing(row, lease.as_ref(), now) == AVAILABLE
                    && !named.iter().any(|named| named.key() == row.key())
            }));
            rows.extend(page.rows);
            match page.next {
                Some(next) if free.iter().filter(|free| **free).count() < count + CHOICES => {
                    query = query.after(next)?;
                }
                _ => break,
            }
        }
        let id = call.input.get(BOOKING_ID).and_then(Json::as_str).unwrap_or_default();
        let spread = partition_of(&call.tenant, &self.bookings, id, u32::MAX) as usize;
        let Some(chosen) = choose(&free, count, spread) else {
            let what = format!("{} {}", self.name, key_text(group));
            let message = match count {
                1 => format!("{what} has no unit that is free"),
                _ => format!("{what} has fewer than {count} units that are free"),
            };
            return Err(Refusal::new(Code::Held, message));
        };
        Ok(rows.into_iter().zip(chosen).filter_map(|(row, chosen)| chosen.then_some(row)).collect())
    }

    async fn hold(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let group = self.group_of(&call.input)?;
        let wanted = self.wanted(call)?;
        let count = call.input.get(COUNT).and_then(Json::as_u64);
        let count = count.map_or(wanted.len(), |count| usize::try_from(count).unwrap_or(usize::MAX));
        if count == 0 || count > self.units_max || count < wanted.len() {
            let detail = format!("name the units, or say how many; at most {} in all", self.units_max);
            return Err(misfit(COUNT, &detail));
        }
        let units = if self.leased {
            self.lease(call, desk, &group, &wanted, count).await?
        } else {
            let mut units = self.named(call, desk, &group, &wanted).await?;
            let now_here = desk.clock.now();
            units.iter().try_for_each(|unit| self.check_free(unit, now_here))?;
            if count > units.len() {
                let more = self.best(call, desk, &group, &units, count - units.len()).await?;
                units.extend(more);
            }
            units
        };
        let booking_id = call.input.get(BOOKING_ID).and_then(Json::as_str).unwrap_or_default();
        let names: Vec<Json> =
            units.iter().filter_map(|unit| unit.key().last()).map(Value::to_json).collect();
        let mut booking = Step::insert(&self.bookings_table, [booking_id.into()])
            .set(STATE, IN_PROGRESS)
            .set(UNITS, Value::Json(json!(names)))
            .set(HOLDER, value_of(call.input.get(HOLDER), &holder_field())?)
            .set(CREATED_AT, now())
            .set(EXPIRES_AT, now_plus(self.hold_for))
            .set(UPDATED_AT, now());
        for (field, value) in self.group.iter().zip(&group) {
            booking = booking.set(&field.name, value.clone());
        }
        for field in self.details.iter().filter(|field| call.input.contains_key(&field.name)) {
            booking = booking.set(&field.name, value_of(call.input.get(&field.name), field)?);
        }
        let shard = due::shard_of(&call.tenant, &self.bookings, booking_id, self.shards);
        let mut steps = vec![due::set(booking, shard, now_plus(self.hold_for))];
        if !self.leased {
            steps.extend(units.iter().map(|unit| self.taken(unit, booking_id)));
            steps.extend(self.ended_for(call, desk, &units).await?);
        }
        if steps.len() + LOG_ENTRY_OPERATIONS > PLAN_OPERATIONS_MAX {
            let message = "these units were held together with too many others; hold fewer at once, or try again in \
                           a moment";
            return Err(Refusal::new(Code::Contended, message));
        }
        let event = EventTemplate::named(format!("{}.held", self.bookings)).with_row_of(0);
        Ok(Draft::Write(Pieces { subject: key_text([&booking_id.into()]), steps, event }))
    }

    /// Takes a unit that is free, or from a booking whose time is up (I1).
    fn taken(&self, unit: &Row, booking_id: &str) -> Step {
        let guard = match (unit.text(STATE), unit.text(BOOKING_ID)) {
            (Some(HELD), Some(before)) => {
                column(BOOKING_ID).eq(before).and(column(HOLD_EXPIRES_AT).le(now()))
            }
            _ => column(STATE).eq(AVAILABLE),
        };
        Step::update(&self.units_table, unit.key().iter().cloned())
            .guard(guard)
            .set(STATE, HELD)
            .set(BOOKING_ID, booking_id)
            .set(HOLD_EXPIRES_AT, now_plus(self.hold_for))
            .set(UPDATED_AT, now())
    }

    /// Sells a unit that was held by a lease. It may still be held in its row, from before holds were leases.
    fn bought(&self, key: Vec<Value>, booking_id: &str) -> Step {
        let over = column(STATE).eq(HELD).and(column(HOLD_EXPIRES_AT).le(now()));
        Step::update(&self.units_table, key)
            .guard(column(STATE).eq(AVAILABLE).or(column(BOOKING_ID).eq(booking_id)).or(over))
            .set(STATE, SOLD)
            .set(BOOKING_ID, booking_id)
            .set(HOLD_EXPIRES_AT, Value::Null)
            .set(UPDATED_AT, now())
    }

    /// The end of the bookings from which units are taken, with the rest of their units (I2).
    async fn ended_for(&self, call: &Call, desk: &Desk<'_>, taken: &[Row]) -> Result<Vec<Step>, Refusal> {
        let held = taken.iter().filter(|unit| unit.text(STATE) == Some(HELD));
        let ids: BTreeSet<&str> = held.filter_map(|unit| unit.text(BOOKING_ID)).collect();
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let addresses = ids
            .iter()
            .map(|id| Address::new(&self.bookings_table, &call.tenant, [(*id).into()]))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = self.rows(desk, &addresses).await?;
        let own = |step: &Step| {
            step.table.name() == self.units_table.name() && taken.iter().any(|unit| unit.key() == step.key)
        };
        Ok(rows.iter().flatten().flat_map(|row| self.expiry(row)).filter(|step| !own(step)).collect())
    }

    fn check_free(&self, unit: &Row, now: Time) -> Result<(), Refusal> {
        let what = self.what(unit.key());
        match standing(unit, None, now) {
            AVAILABLE => Ok(()),
            HELD => {
                let until = unit.time(HOLD_EXPIRES_AT).map(|end| format!(" until {end}")).unwrap_or_default();
                Err(Refusal::new(Code::Held, format!("{what} is held by somebody else{until}")))
            }
            state => Err(Refusal::new(Code::WrongState, format!("{what} is {state}"))),
        }
    }
}

/// `create` of a unit.
pub(super) struct Offer(pub Arc<Booking>);

#[async_trait]
impl Write for Offer {
    async fn draft(&self, call: &Call, _: &Desk<'_>) -> Result<Draft, Refusal> {
        let booking = &self.0;
        let group = booking.group_of(&call.input)?;
        let key = booking.unit_key(&group, &value_of(call.input.get(&booking.unit.name), &booking.unit)?);
        let subject = key_text(&key);
        let mut step = Step::insert(&booking.units_table, key).set(STATE, AVAILABLE).set(UPDATED_AT, now());
        for field in booking.fields.iter().filter(|field| call.input.contains_key(&field.name)) {
            step = step.set(&field.name, value_of(call.input.get(&field.name), field)?);
        }
        let event = EventTemplate::named(format!("{}.created", booking.name)).with_row_of(0);
        Ok(Draft::Write(Pieces { subject, steps: vec![step], event }))
    }

    fn refusal(&self, _: &Call, refused: &Refused) -> Verdict {
        common_verdict(&format!("this {}", self.0.name), refused)
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let row = row_of(event);
        let parts = self.0.units_table.key_columns().iter().map(|column| {
            Value::from_json(row.get(&column.name).cloned().unwrap_or_default(), column.kind)
                .unwrap_or(Value::Null)
        });
        let created = Some(key_text(&parts.collect::<Vec<_>>()));
        Answer { created, ..Answer::row(row) }
    }
}

/// What changes a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Hold,
    Extend,
    Confirm,
    Cancel,
    Expire,
}

pub(super) struct Writer {
    pub booking: Arc<Booking>,
    pub verb: Verb,
}

impl Writer {
    /// What must hold for the booking's row.
    fn guard(&self, row: &Row) -> Guard {
        let booking = &self.booking;
        let live = || column(STATE).eq(IN_PROGRESS).and(column(EXPIRES_AT).gt(now()));
        match self.verb {
            Verb::Extend => live().and(self.extendable()),
            Verb::Hold | Verb::Confirm => live(),
            // Units have to be freed only if they were sold, so it must not be sold meanwhile.
            Verb::Cancel if booking.refundable && booking.leased => {
                let seen = row.text(STATE).filter(|state| *state == CONFIRMED).unwrap_or(IN_PROGRESS);
                column(STATE).eq(seen)
            }
            Verb::Cancel if booking.refundable => is_in(STATE, [IN_PROGRESS, CONFIRMED]),
            Verb::Cancel => column(STATE).eq(IN_PROGRESS),
            Verb::Expire => column(STATE).eq(IN_PROGRESS).and(column(EXPIRES_AT).le(now())),
        }
    }

    /// That a hold which ends `hold_for` from now is no longer than `hold_max` (I5).
    fn extendable(&self) -> Guard {
        let Booking { hold_for, hold_max, .. } = *self.booking;
        column(CREATED_AT).ge(now_minus(hold_max.saturating_sub(hold_for)))
    }

    /// A change of a booking that is there, and of its units.
    async fn change(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let booking = &self.booking;
        let row = booking.booking(call, desk).await?;
        let id = row.text(BOOKING_ID).unwrap_or_default();
        booking.change_leases(self.verb, call, desk, &row).await?;
        let step = booking.on_booking(id).guard(self.guard(&row));
        let (step, what) = match self.verb {
            Verb::Hold | Verb::Extend => {
                let end = now_plus(booking.hold_for);
                let shard = due::shard_of(&call.tenant, &booking.bookings, id, booking.shards);
                (due::set(step.set(EXPIRES_AT, end.clone()), shard, end), "extended")
            }
            Verb::Confirm => (due::clear(step.set(STATE, CONFIRMED)), "confirmed"),
            Verb::Cancel => (due::clear(step.set(STATE, CANCELLED)), "cancelled"),
            Verb::Expire => (due::clear(step.set(STATE, EXPIRED)), "expired"),
        };
        let sold = row.text(STATE) == Some(CONFIRMED);
        let has_trace = !booking.leased || self.verb == Verb::Confirm || sold;
        let units = if has_trace { booking.units_in(&row) } else { Vec::new() };
        let units = units.into_iter().map(|key| match self.verb {
            Verb::Confirm if booking.leased => booking.bought(key, id),
            Verb::Hold | Verb::Extend => {
                booking.on_unit(key, id).set(HOLD_EXPIRES_AT, now_plus(booking.hold_for))
            }
            Verb::Confirm => booking.on_unit(key, id).set(STATE, SOLD).set(HOLD_EXPIRES_AT, Value::Null),
            Verb::Cancel | Verb::Expire => booking.freed(key, id),
        });
        let steps = std::iter::once(step).chain(units).collect();
        let event = EventTemplate::named(format!("{}.{what}", booking.bookings)).with_row_of(0);
        Ok(Draft::Write(Pieces { subject: key_text(row.key()), steps, event }))
    }

    /// Why the booking's row does not let it happen.
    fn turned_down(&self, row: &Row, failed: &Guard) -> Refusal {
        let what = format!("{} {}", self.booking.bookings, row.text(BOOKING_ID).unwrap_or_default());
        match (row.text(STATE).unwrap_or_default(), self.verb) {
            (IN_PROGRESS, Verb::Extend) if *failed == self.extendable() => {
                let most = span(self.booking.hold_max);
                Refusal::new(Code::Expired, format!("{what} cannot be held longer than {most} in all"))
            }
            (IN_PROGRESS, Verb::Expire) => Refusal::new(Code::WrongState, format!("{what} is still held")),
            (IN_PROGRESS, _) | (EXPIRED, _) => {
                Refusal::new(Code::Expired, format!("the time of {what} was up; hold again"))
            }
            (state, _) => Refusal::new(Code::WrongState, format!("{what} is {state}")),
        }
    }
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        match self.verb {
            Verb::Hold => self.booking.hold(call, desk).await,
            _ => self.change(call, desk).await,
        }
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let booking = &self.booking;
        let (Reason::Guard { guard, .. }, Some(row)) = (&refused.reason, &refused.current) else {
            return common_verdict(&format!("this {}", booking.bookings), refused);
        };
        let on_booking = row.table().name() == booking.bookings_table.name();
        match self.verb {
            // A unit that was named is somebody's now; one that was chosen is chosen anew.
            Verb::Hold if !on_booking => {
                let named = booking.wanted(call).unwrap_or_default();
                if !row.key().last().is_some_and(|unit| named.contains(unit)) {
                    return Verdict::TryAgain;
                }
                let what = booking.what(row.key());
                match row.text(STATE) {
                    Some(HELD) => {
                        Verdict::Refuse(Refusal::new(Code::Held, format!("{what} is held by somebody else")))
                    }
                    Some(SOLD) => {
                        Verdict::Refuse(Refusal::new(Code::WrongState, format!("{what} is {SOLD}")))
                    }
                    _ => Verdict::TryAgain,
                }
            }
            Verb::Hold => Verdict::TryAgain,
            Verb::Cancel
                if on_booking
                    && booking.leased
                    && booking.refundable
                    && matches!(row.text(STATE), Some(IN_PROGRESS | CONFIRMED)) =>
            {
                Verdict::TryAgain
            }
            // The lease was lost, and somebody else was faster.
            Verb::Confirm if booking.leased && !on_booking => {
                let message =
                    format!("{} was sold to somebody else; the hold was lost", booking.what(row.key()));
                Verdict::Refuse(Refusal::new(Code::WrongState, message))
            }
            _ if on_booking => Verdict::Refuse(self.turned_down(row, guard)),
            // The booking was seen in a state that it has left since, and its units with it.
            _ => Verdict::TryAgain,
        }
    }

    /// A hold that takes units over ends the bookings that had them.
    fn besides(&self, steps: &[Step]) -> Vec<(String, EventTemplate)> {
        let is_end = |step: &Step| {
            self.verb == Verb::Hold
                && step.table.name() == self.booking.bookings_table.name()
                && step.expect == Expect::Present
        };
        let ended = |number: usize, step: &Step| {
            let event = EventTemplate::named(format!("{}.expired", self.booking.bookings));
            (key_text(&step.key), event.with_row_of(number))
        };
        let ends = steps.iter().enumerate().filter(|(_, step)| is_end(step));
        ends.map(|(number, step)| ended(number, step)).collect()
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let row = row_of(event);
        let created = (self.verb == Verb::Hold)
            .then(|| row.get(BOOKING_ID).and_then(Json::as_str).map(|id| key_text([&Value::from(id)])))
            .flatten();
        Answer { created, ..Answer::row(self.booking.bookings_def.visible(row)) }
    }

    fn wakes(&self, _: &Call, event: &Event) -> Vec<Wake> {
        due::wake(&self.booking.sweeper(), event).into_iter().collect()
    }
}

/// What ends bookings whose time is up (I4).
#[derive(Debug)]
pub(super) struct Sweep(pub Arc<Booking>);

impl Due for Sweep {
    fn table(&self) -> &Arc<Table> {
        &self.0.bookings_table
    }

    fn plan(&self, row: &Row, _: Time, operation: &str) -> Result<Plan, PlanError> {
        let event = EventTemplate::named(format!("{}.expired", self.0.bookings)).with_row_of(0);
        let entry = Entry::about(&self.0.bookings, key_text(row.key())).event(event);
        Plan::of(row.tenant(), operation).steps(self.0.expiry(row)).log(entry).without_rows().build()
    }
}
