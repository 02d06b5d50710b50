//! `hold`: the choice of units and the leases on them. The transitions that it fires are in [`super::transitions`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::limits::{LOG_ENTRY_OPERATIONS, PLAN_OPERATIONS_MAX};
use statehouse_store::log::partition_of;
use statehouse_store::{Address, Consistency, Query, Row, StoreError, Tenant, Time, Value, bug};

use super::rules::{choose, effective_state, field_error};
use super::transitions::{BEFORE, FREE, LeaseChange, OVER, TAKEN, UnitLease};
use super::{
    AVAILABLE, BOOKING_ID, BookingSpec, CHOICES, COUNT, CREATED_AT, HELD, HOLD_EXPIRES_AT, HOLDER,
    IN_PROGRESS, LOOK_PAGES, LOOK_ROWS, STATE, UNITS,
};
use crate::action::{ActionContext, Call, Code, Prepare, Prepared, Refusal, RefusedStep, Verdict};
use crate::blueprint::settings::Field;
use crate::declare::machine::{Firing, PartUse, add_parts, part_verdict};
use crate::inputs::{Input, Inputs};
use crate::product::booking::external_holds::{ExternalHold, ExternalHolds};
use crate::resource::key_text;

/// How often units are chosen anew because another caller has taken one of them.
const LEASE_TRIES: usize = 8;
/// The holder of a lease on a unit that is about to be retired or deleted. No booking has this id: a text has no such character.
pub const UNIT_CHANGE: &str = "\0change";
/// How long such a lease lasts at most. If the plan takes longer, a buyer may have a hold on a unit that is gone, and cannot
/// confirm it.
const UNIT_CHANGE_LEASE: Duration = Duration::from_secs(5);

impl BookingSpec {
    fn unit_key(&self, group: &[Value], unit: &Value) -> Vec<Value> {
        group.iter().chain([unit]).cloned().collect()
    }

    pub(super) fn group_of(&self, input: &Inputs) -> Vec<Value> {
        self.group.iter().map(|field| input.value_or_null(&field.name)).collect()
    }

    /// The group of a booking's row.
    fn group_in(&self, row: &Row) -> Result<Vec<Value>, StoreError> {
        let value = |field: &Field| match row.get(&field.name) {
            Some(Value::Null) => Err(row.corrupt(&field.name, "is null")),
            Some(value) => Ok(value.clone()),
            None => Err(bug!("table {} has no column {}", row.table(), field.name).into()),
        };
        self.group.iter().map(value).collect()
    }

    /// The keys of the units that a booking's row names.
    pub(super) fn units_in(&self, row: &Row) -> Result<Vec<Vec<Value>>, StoreError> {
        let group = self.group_in(row)?;
        let units = row.get_json(UNITS)?.as_array();
        let units = units.ok_or_else(|| row.corrupt(UNITS, "is not a list"))?;
        let unit = |unit: &Json| match Value::from_json(unit.clone(), self.unit.kind) {
            Ok(unit) => Ok(self.unit_key(&group, &unit)),
            Err(why) => Err(row.corrupt(UNITS, &format!("has a unit that cannot be one: {why}"))),
        };
        units.iter().map(unit).collect()
    }

    pub(super) fn what(&self, key: &[Value]) -> String {
        format!("{} {}", self.name, key_text(key))
    }

    pub(super) async fn rows(
        &self,
        cx: &ActionContext<'_>,
        addresses: &[Address],
    ) -> Result<Vec<Option<Row>>, Refusal> {
        Ok(cx.store.get(addresses, Consistency::Strong).await?)
    }

    /// The units that a call names, as they are.
    async fn named(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        group: &[Value],
        wanted: &[Value],
    ) -> Result<Vec<Row>, Refusal> {
        let keys: Vec<Vec<Value>> = wanted.iter().map(|unit| self.unit_key(group, unit)).collect();
        let addresses = keys
            .iter()
            .map(|key| Address::new(&self.units_table, &call.tenant, key.iter().cloned()))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = self.rows(cx, &addresses).await?;
        let found = keys.iter().zip(rows).map(|(key, row)| {
            row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", self.what(key))))
        });
        found.collect()
    }

    fn wanted(&self, call: &Call) -> Result<Vec<Value>, Refusal> {
        let list = call.input.list(&self.unit.name).iter();
        let wanted: Vec<Value> = list.filter_map(Input::value).cloned().collect();
        let distinct: BTreeSet<String> = wanted.iter().map(ToString::to_string).collect();
        if distinct.len() < wanted.len() {
            return Err(field_error(&self.unit.name, "a unit is named twice"));
        }
        Ok(wanted)
    }

    /// The holds, for bookings that keep theirs there.
    fn holds<'d>(&self, cx: &ActionContext<'d>) -> Result<&'d dyn ExternalHolds, Refusal> {
        cx.holds.ok_or_else(|| {
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

    /// The external hold of each unit; `None` where holds are states of the units.
    pub(super) async fn leases(
        &self,
        tenant: &Tenant,
        cx: &ActionContext<'_>,
        units: &[Row],
    ) -> Result<Vec<Option<ExternalHold>>, Refusal> {
        if !self.leased {
            return Ok(units.iter().map(|_| None).collect());
        }
        let names = self.hold_names(tenant, units.iter().map(Row::key));
        Ok(self.holds(cx)?.read_holds(&names).await?)
    }

    /// Takes leases on the units that a call wants, chosen ones included, and then looks at their rows: a caller that was sold
    /// one of them had a lease on it before.
    async fn lease(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        group: &[Value],
        wanted: &[Value],
        count: usize,
    ) -> Result<Vec<Row>, Refusal> {
        let holds = self.holds(cx)?;
        let booking_id = call.input.get_text(BOOKING_ID)?;
        for _ in 0..LEASE_TRIES {
            let mut units = self.named(call, cx, group, wanted).await?;
            if count > units.len() {
                let more = self.best(call, cx, group, &units, count - units.len()).await?;
                units.extend(more);
            }
            let names = self.hold_names(&call.tenant, units.iter().map(Row::key));
            match holds.acquire(&names, booking_id, self.hold_for).await? {
                Ok(()) => {}
                Err(index) if index < wanted.len() => {
                    let unit = units.get(index).ok_or_else(|| bug!("unit {index} was not asked for"))?;
                    let what = self.what(unit.key());
                    return Err(Refusal::new(Code::Held, format!("{what} is held by another caller")));
                }
                // One that was chosen here was chosen by another caller as well.
                Err(_) => continue,
            }
            let chosen: Vec<Value> = units.iter().filter_map(|unit| unit.key().last().cloned()).collect();
            let fresh = self.named(call, cx, group, &chosen).await;
            let free = fresh.and_then(|rows| {
                rows.iter().try_for_each(|unit| self.check_free(unit, cx.clock.now()))?;
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

    /// Changes the leases of a booking that is about to change; only a lost one stops it.
    pub(super) async fn change_leases(
        &self,
        change: LeaseChange,
        call: &Call,
        cx: &ActionContext<'_>,
        row: &Row,
    ) -> Result<(), Refusal> {
        if row.get_text(STATE)? != IN_PROGRESS {
            return Ok(());
        }
        let keys = self.units_in(row)?;
        let names = self.hold_names(&call.tenant, keys.iter().map(Vec::as_slice));
        let id = row.get_text(BOOKING_ID)?;
        match change {
            LeaseChange::Extend => {
                // Never beyond what the booking's row will allow, or a lease could be prolonged for ever by extensions
                // that the store refuses.
                let last = row.get_time(CREATED_AT)?.plus(self.hold_max);
                let span = last.since(cx.clock.now()).min(self.hold_for);
                if !span.is_zero() && !self.holds(cx)?.extend(&names, id, span).await? {
                    let message = format!("{} {id} has lost its hold; hold again", self.bookings);
                    return Err(Refusal::new(Code::Expired, message));
                }
            }
            // If the cancellation is not applied after all, the buyer has said that they do not want it.
            LeaseChange::Release => self.holds(cx)?.release(&names, id).await?,
        }
        Ok(())
    }

    /// Does what a change of a unit needs of its lease.
    pub(super) async fn lease_unit(
        &self,
        lease: UnitLease,
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<(), Refusal> {
        let names = self.hold_names(&call.tenant, [call.key.as_slice()]);
        let holds = self.holds(cx)?;
        let is_held = match lease {
            UnitLease::Look => holds.read_holds(&names).await?.iter().any(Option::is_some),
            UnitLease::Take => {
                let span = self.hold_for.min(UNIT_CHANGE_LEASE);
                holds.acquire(&names, UNIT_CHANGE, span).await?.is_err()
            }
            UnitLease::Release => {
                holds.release(&names, UNIT_CHANGE).await?;
                false
            }
        };
        match is_held {
            true => {
                let message = format!("{} is held; try again when the hold is over", self.what(&call.key));
                Err(Refusal::new(Code::Held, message))
            }
            false => Ok(()),
        }
    }

    /// Units that are free, beside those that were named: the best ones, as [`choose`] says.
    async fn best(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        group: &[Value],
        named: &[Row],
        count: usize,
    ) -> Result<Vec<Row>, Refusal> {
        let now = cx.clock.now();
        let mut query =
            Query::table(&self.units_table, &call.tenant, group.iter().cloned())?.limit(LOOK_ROWS)?;
        let (mut rows, mut free): (Vec<Row>, Vec<bool>) = Default::default();
        for _ in 0..LOOK_PAGES {
            let page = cx.store.query(&query).await?;
            let leases = self.leases(&call.tenant, cx, &page.rows).await?;
            for (row, lease) in page.rows.iter().zip(&leases) {
                let state = effective_state(row, lease.as_ref(), self.keeps_units, now)?;
                let is_available = state == AVAILABLE;
                free.push(is_available && !named.iter().any(|named| named.key() == row.key()));
            }
            rows.extend(page.rows);
            match page.next {
                Some(next) if free.iter().filter(|free| **free).count() < count + CHOICES => {
                    query = query.after(next)?;
                }
                _ => break,
            }
        }
        let id = call.input.get_text(BOOKING_ID)?;
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

    /// The units that a call wants, named and chosen, as they are.
    async fn units_for(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        wanted: &[Value],
    ) -> Result<Vec<Row>, Refusal> {
        let group = self.group_of(&call.input);
        let count = call.input.count(COUNT);
        let count = count.map_or(wanted.len(), |count| usize::try_from(count).unwrap_or(usize::MAX));
        if count == 0 || count > self.units_max || count < wanted.len() {
            let detail = format!("name the units, or say how many; at most {} in all", self.units_max);
            return Err(field_error(COUNT, &detail));
        }
        if self.leased {
            return self.lease(call, cx, &group, wanted, count).await;
        }
        let mut units = self.named(call, cx, &group, wanted).await?;
        let now_here = cx.clock.now();
        units.iter().try_for_each(|unit| self.check_free(unit, now_here))?;
        if count > units.len() {
            let more = self.best(call, cx, &group, &units, count - units.len()).await?;
            units.extend(more);
        }
        Ok(units)
    }

    /// The bookings from which units are taken.
    async fn displaced(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        taken: &[Row],
    ) -> Result<Vec<Row>, Refusal> {
        let mut ids: BTreeSet<&str> = BTreeSet::new();
        for unit in taken {
            if unit.get_text(STATE)? == HELD {
                ids.insert(unit.get_text(BOOKING_ID)?);
            }
        }
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let addresses = ids
            .iter()
            .map(|id| Address::new(&self.bookings_table, &call.tenant, [(*id).into()]))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(self.rows(cx, &addresses).await?.into_iter().flatten().collect())
    }

    fn check_free(&self, unit: &Row, now: Time) -> Result<(), Refusal> {
        let what = self.what(unit.key());
        match effective_state(unit, None, self.keeps_units, now)? {
            AVAILABLE => Ok(()),
            HELD => {
                let until = unit.get_optional_time(HOLD_EXPIRES_AT)?.map(|end| format!(" until {end}"));
                let until = until.unwrap_or_default();
                Err(Refusal::new(Code::Held, format!("{what} is held by another caller{until}")))
            }
            state => Err(Refusal::new(Code::WrongState, format!("{what} is {state}"))),
        }
    }
}

/// `hold`: chooses units, and fires the transitions that hold them.
pub(super) struct HoldUnits {
    pub booking: Arc<BookingSpec>,
    /// Inserts the booking.
    pub insert: PartUse,
    /// Ends a booking whose time is up and whose units are taken.
    pub expire: PartUse,
    /// Holds a unit; none if holds are leases.
    pub hold_unit: Option<PartUse>,
}

impl HoldUnits {
    /// Takes a unit that is free, or from a booking whose time is up (I1).
    fn unit_firing(
        &self,
        part: &PartUse,
        unit: &Row,
        booking_id: &str,
        is_named: bool,
    ) -> Result<Firing, StoreError> {
        let firing = part.at(unit.key().iter().cloned()).bind(BOOKING_ID, booking_id);
        let firing = match unit.get_text(STATE)? {
            HELD => firing.case(OVER).bind(BEFORE, unit.get_text(BOOKING_ID)?),
            _ => firing.case(FREE),
        };
        // A unit that was chosen is chosen anew.
        Ok(if is_named { firing } else { firing.or_retry() })
    }

    fn inserted(&self, call: &Call, booking_id: &str, units: &[Row]) -> Firing {
        let booking = &self.booking;
        let names = units.iter().filter_map(|unit| unit.key().last()).map(Value::to_json);
        let mut firing = self
            .insert
            .at([booking_id.into()])
            .bind(UNITS, Value::Json(Json::Array(names.collect())))
            .bind(HOLDER, call.input.value_or_null(HOLDER));
        let details = booking.details.iter().filter(|field| call.input.has(&field.name));
        for field in booking.group.iter().chain(details) {
            firing = firing.bind(field.name.clone(), call.input.value_or_null(&field.name));
        }
        firing
    }
}

#[async_trait]
impl Prepare for HoldUnits {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let booking = &self.booking;
        let wanted = booking.wanted(call)?;
        let units = booking.units_for(call, cx, &wanted).await?;
        let booking_id = call.input.get_text(BOOKING_ID)?;
        let now_here = cx.clock.now();
        let mut plan = self.inserted(call, booking_id, &units).prepare(&call.tenant, now_here)?;
        if let Some(hold) = &self.hold_unit {
            let is_named = |unit: &Row| unit.key().last().is_some_and(|unit| wanted.contains(unit));
            for unit in &units {
                let taken = self.unit_firing(hold, unit, booking_id, is_named(unit))?;
                add_parts(&mut plan, &call.tenant, now_here, [taken.into()])?;
            }
            // I2: they end with the rest of their units.
            let keys: Vec<Json> = units.iter().map(|unit| json!(key_text(unit.key()))).collect();
            let keys = Value::Json(Json::Array(keys));
            let displaced = booking.displaced(call, cx, &units).await?;
            let ends =
                displaced.iter().map(|row| self.expire.on(row).bind(TAKEN, keys.clone()).or_retry().into());
            add_parts(&mut plan, &call.tenant, now_here, ends)?;
        }
        if plan.steps.len() + LOG_ENTRY_OPERATIONS > PLAN_OPERATIONS_MAX {
            let message = "these units were held together with too many others; hold fewer at once, or try again in \
                           a moment";
            return Err(Refusal::new(Code::Contended, message));
        }
        Ok(plan.into())
    }

    fn acts_before_commit(&self) -> bool {
        self.booking.leased
    }

    fn refused(&self, _: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let uses = [Some(&self.insert), Some(&self.expire), self.hold_unit.as_ref()];
        let uses: Vec<PartUse> = uses.into_iter().flatten().cloned().collect();
        part_verdict(&uses, refused).unwrap_or(Verdict::Retry)
    }
}
