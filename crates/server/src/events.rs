//! `/v1/events`: the log as a stream of server-sent events, each a CloudEvent.
//!
//! - **Cursor.** `id:` is a sealed cursor over all partitions of the log. A client that reconnects sends it as
//!   `Last-Event-ID` (browsers do) or as `?after=` and misses nothing. `?after=oldest` starts at the oldest retained
//!   record; without either the stream starts at the current end.
//! - **Order.** The events of one row arrive in the order of its versions. There is no order between rows.
//! - **One row.** `?resource=lot&key=7` has the events of one row.
//! - **The newest only.** With `?newest=true` a stream sends of each row the newest event that there is when the client can take
//!   one, and passes over those before it. A watcher that is slow or was away is told what holds now, not what it missed.
//! - **At least once.** A record with several events is one step of the cursor: a client that is disconnected within a
//!   record receives the whole record again. The CloudEvent's `id` is stable, so that the client can deduplicate.
//! - **Tenant isolation.** A stream contains only records of the caller's tenant, of resources that its scopes let it read.
//! - **Actors.** A caller with the scope `admin` also gets `actor` with each event: the credential that caused the write.
//! - **Trimmed log.** If the log no longer contains the records after the cursor, the response is 410.
//! - **Revocation.** The server re-checks the credentials every few seconds. The stream ends soon after its key was
//!   revoked or its key or token expired.
//!
//! The streams of a process share one log reader ([`statehouse::follow`]). A stream that starts further back, or whose
//! client is slow, reads from the store until it has caught up. Backpressure: no stream reads faster than its client.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::poll_fn;
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde_json::{Value as Json, json};
use statehouse::follow::{Listener, TailRead};
use statehouse::house::{data_of, subject_of};
use statehouse::resource::visible_data;
use statehouse::{House, Refusal};
use statehouse_store::{Event, LogPage, Record, StoreError, Tenant, Time};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use crate::auth::networks::PeerAddress;
use crate::auth::{self, Access, Caller};
use crate::config::millis;
use crate::http::{Context, HttpRequest, HttpShared, RequestInfo, query_pairs};
use crate::metrics::GaugeGuard;
use crate::problem::{INVALID_INPUT, MALFORMED, Problem, TRIMMED, UNAVAILABLE};
use crate::quota::QuotaGuard;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Value of `after` that starts a stream at the oldest record.
const OLDEST: &str = "oldest";
/// Records per read.
const PAGE: usize = 100;
/// Records that a stream of the newest events passes over at once.
const NEWEST_RECORDS_MAX: usize = 5_000;
/// Messages buffered for a slow client before its stream stops reading.
const BUFFERED_MESSAGES: usize = 64;
/// Bytes buffered for a slow client before its stream stops reading.
const BUFFERED_BYTES: u32 = 256 << 10;
/// Reconnection delay requested from the client, in milliseconds.
const RETRY_MS: u64 = 2_000;
/// Minimum interval between two checks of a stream's credentials.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(250);
/// Seal context of log cursors.
const PURPOSE: &[u8] = b"events";

/// Opens a stream.
pub(crate) async fn handle(
    shared: &Arc<HttpShared>,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (parts, _) = request.into_parts();
    let caller =
        shared.authenticator.authenticate(&parts.headers, PeerAddress::of(&parts.extensions)).await?;
    info.tenant = Some(caller.tenant.clone());
    open(shared, &caller, &parts, &info.context).await
}

async fn open(
    shared: &Arc<HttpShared>,
    caller: &Caller,
    request: &Parts,
    context: &Context,
) -> Result<Response, Problem> {
    if request.method != Method::GET {
        return Err(Problem::method_not_allowed(&["GET"]));
    }
    let (mut after, mut resource, mut key, mut newest) = (None, None, None, false);
    for (name, value) in query_pairs(request.uri.query())? {
        match (name.as_str(), value.as_str()) {
            ("after", _) => after = Some(value),
            ("resource", _) => resource = Some(value),
            ("key", _) => key = Some(value),
            ("newest", "true" | "false") => newest = value == "true",
            ("newest", _) => return Err(parameter_error(&name, "expected true or false")),
            _ => {
                let why = "unknown parameter; this path takes after, resource, key and newest";
                return Err(parameter_error(&name, why));
            }
        }
    }
    if key.is_some() && resource.is_none() {
        return Err(parameter_error("key", "name the resource whose row it is, with resource"));
    }
    if let Some(resource) = &resource
        && shared.house.resource(resource).is_err()
    {
        return Err(parameter_error("resource", "unknown resource"));
    }
    require_reads(shared, caller, resource.as_deref())?;
    // A browser that reconnects repeats its first URL; the header is newer.
    if let Some(last) = request.headers.get(LAST_EVENT_ID) {
        let text = last.to_str().map_err(|_| Problem::new(MALFORMED, "Last-Event-ID is not ASCII"))?;
        after = Some(text.to_owned()).filter(|text| !text.is_empty()).or(after);
    }
    let counted = shared.quotas.streams.acquire(caller, 1)?;
    let tenant = &caller.tenant;
    let listener = shared.house.tail().listen();
    let offsets = start_offsets(shared, tenant, after.as_deref()).await?;
    let permit = shared.streams.clone().try_acquire_owned();
    let permit = permit.map_err(|_| {
        Problem::new(UNAVAILABLE, "too many event streams are open").header(http::header::RETRY_AFTER, "5")
    })?;
    // What waits in the buffer is not the newest for long.
    let (to, mut messages) = mpsc::channel(if newest { 1 } else { BUFFERED_MESSAGES });
    let now = shared.house.clock().now();
    let credentials = [AUTHORIZATION, auth::TENANT].into_iter();
    let stream = EventStream {
        shared: shared.clone(),
        caller: caller.clone(),
        credentials: credentials
            .filter_map(|name| request.headers.get(&name).map(|value| (name, value.clone())))
            .collect(),
        peer: PeerAddress::of(&request.extensions),
        resource,
        key,
        newest,
        listener,
        offsets,
        to,
        buffer: Arc::new(Semaphore::new(BUFFERED_BYTES as usize)),
        sent_at: now,
        checked_at: now,
    };
    tokio::spawn(stream.run((permit, counted), context.request_id.clone()));
    let body =
        // Taking a message releases its part of the buffer.
        poll_fn(move |task| {
            messages.poll_recv(task).map(|message| message.map(|(message, _)| Ok::<_, std::io::Error>(message)))
        });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Proxies that buffer responses would stall a stream.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(response)
}

/// Requires that the caller may read the resource that it asked for; without one, at least one of them.
fn require_reads(shared: &HttpShared, caller: &Caller, resource: Option<&str>) -> Result<(), Problem> {
    if let Some(resource) = resource {
        return caller.require(Access::Resource(resource));
    }
    let mut resources = shared.house.resources().iter();
    match resources.any(|resource| caller.may(Access::Resource(&resource.name))) {
        true => Ok(()),
        false => caller.require(Access::Resource("*")),
    }
}

fn parameter_error(name: &str, detail: &str) -> Problem {
    let mut problem = Problem::new(INVALID_INPUT, format!("/{name}: {detail}"));
    problem.errors.push((format!("/{name}"), detail.to_owned()));
    problem
}

fn trimmed() -> Problem {
    Problem::new(
        TRIMMED,
        "the log no longer contains the events after this cursor; read the rows again, then follow without a cursor",
    )
}

/// The offsets after which a stream starts.
async fn start_offsets(
    shared: &HttpShared,
    tenant: &Tenant,
    after: Option<&str>,
) -> Result<Vec<u64>, Problem> {
    let store = shared.house.store();
    let failed = |error: StoreError| Problem::from(Refusal::from(error));
    let partitions = store.partitions();
    let Some(after) = after else {
        return store.wait_log(&[], Duration::ZERO).await.map_err(failed);
    };
    let mut offsets = vec![0; partitions as usize];
    if after != OLDEST {
        let opened = shared.cursors.open(&[tenant.as_str().as_bytes(), PURPOSE], after);
        offsets = opened
            .and_then(|bytes| unpack(&bytes))
            .filter(|offsets| offsets.len() == partitions as usize)
            .ok_or_else(|| parameter_error("after", "not a cursor returned by this stream"))?;
    }
    for (partition, offsets) in offsets.iter_mut().enumerate() {
        let page =
            store.read_log(u32::try_from(partition).unwrap_or(0), *offsets, 1).await.map_err(failed)?;
        if after == OLDEST {
            *offsets = page.oldest.saturating_sub(1);
        } else if has_gap(&page, *offsets) {
            return Err(trimmed());
        }
    }
    Ok(offsets)
}

/// Whether records after an offset are missing: they were trimmed, or the cursor belongs to another log.
fn has_gap(page: &LogPage, offsets: u64) -> bool {
    page.oldest > offsets + 1 || offsets > page.head
}

/// One open stream.
struct EventStream {
    shared: Arc<HttpShared>,
    /// Who reads it, with the scopes of the last check.
    caller: Caller,
    /// The headers that authenticated the caller.
    credentials: HeaderMap,
    peer: PeerAddress,
    resource: Option<String>,
    listener: Listener,
    /// Last offset sent or skipped, per partition.
    offsets: Vec<u64>,
    /// The row whose events it has, if not all.
    key: Option<String>,
    /// Whether it has only the newest event of each row.
    newest: bool,
    to: mpsc::Sender<(Bytes, OwnedSemaphorePermit)>,
    /// Bytes that may still be buffered.
    buffer: Arc<Semaphore>,
    /// Time of the last message.
    sent_at: Time,
    /// Time of the last successful credential check.
    checked_at: Time,
}

impl EventStream {
    async fn run(mut self, _counted: (OwnedSemaphorePermit, QuotaGuard), request_id: String) {
        let _gauge = GaugeGuard::enter(&self.shared.metrics, |metrics| &metrics.streams);
        match self.send_all().await {
            StreamEnd::Closed => {}
            StreamEnd::Unauthorized => {
                tracing::info!(target: "statehouse::events", request_id, "event stream closed: its credentials are no longer valid");
            }
            // The client reconnects with its cursor and receives the problem then.
            StreamEnd::Failed(why) => {
                tracing::warn!(target: "statehouse::events", why, request_id, "event stream failed");
            }
        }
    }

    async fn send_all(&mut self) -> StreamEnd {
        let mut stopping = self.shared.stopping.clone();
        let opening = format!(": open\nretry: {RETRY_MS}\nid: {}\n\n", self.cursor());
        if let Err(stop) = self.send(opening).await {
            return stop;
        }
        while !*stopping.borrow() {
            if let Err(stop) = self.step(&mut stopping).await {
                return stop;
            }
        }
        StreamEnd::Closed
    }

    /// Sends available records, or waits for new ones and sends a heartbeat when it is due.
    async fn step(&mut self, stopping: &mut watch::Receiver<bool>) -> Result<(), StreamEnd> {
        self.check().await?;
        let mut sent = false;
        for partition in 0..self.offsets.len() {
            sent |= match self.newest {
                true => self.send_newest(partition).await?,
                false => self.send_partition(partition).await?,
            };
        }
        let heartbeat = millis(self.shared.config.limits.heartbeat_ms);
        let clock = self.shared.house.clock();
        let silent = clock.now().since(self.sent_at);
        if silent >= heartbeat {
            // An id without data moves the client's cursor past records of other tenants.
            return self.send(format!(": still here\nid: {}\n\n", self.cursor())).await;
        }
        if sent {
            return Ok(());
        }
        let pause = clock.sleep((heartbeat - silent).min(self.until_check()));
        tokio::select! {
            () = self.listener.news() => Ok(()),
            () = pause => Ok(()),
            _ = stopping.changed() => Ok(()),
            () = self.to.closed() => Err(StreamEnd::Closed),
        }
    }

    /// Time until the next credential check.
    fn until_check(&self) -> Duration {
        let limits = &self.shared.config.limits;
        let trusted = millis(limits.credential_cache_ms.min(limits.heartbeat_ms)).max(CHECK_INTERVAL_MIN);
        trusted.saturating_sub(self.shared.house.clock().now().since(self.checked_at))
    }

    /// Re-checks the credentials if the check is due.
    async fn check(&mut self) -> Result<(), StreamEnd> {
        if !self.until_check().is_zero() {
            return Ok(());
        }
        self.checked_at = self.shared.house.clock().now();
        match self.shared.authenticator.authenticate(&self.credentials, self.peer).await {
            Ok(caller)
                if caller.tenant == self.caller.tenant
                    && require_reads(&self.shared, &caller, self.resource.as_deref()).is_ok() =>
            {
                self.caller = caller;
                Ok(())
            }
            // If the store is unavailable, the stream has nothing to send either.
            Err(problem) if problem.kind == UNAVAILABLE => Ok(()),
            _ => Err(StreamEnd::Unauthorized),
        }
    }

    /// Some records of one partition behind an offset.
    async fn records(&self, partition: usize, after: u64) -> Result<Vec<Arc<Record>>, StreamEnd> {
        match self.listener.after(partition, after, PAGE) {
            TailRead::Nothing => Ok(Vec::new()),
            TailRead::Records(records) => Ok(records),
            TailRead::Behind => {
                let number = u32::try_from(partition).unwrap_or(0);
                let page = self.shared.house.store().read_log(number, after, PAGE).await?;
                if has_gap(&page, after) {
                    return Err(StreamEnd::Failed(
                        "the log was trimmed past the position of the stream".into(),
                    ));
                }
                Ok(page.records.into_iter().map(Arc::new).collect())
            }
        }
    }

    /// Sends some records of one partition and returns whether there were any.
    async fn send_partition(&mut self, partition: usize) -> Result<bool, StreamEnd> {
        let after = self.offsets.get(partition).copied().unwrap_or_default();
        let records = self.records(partition, after).await?;
        for record in &records {
            self.send_record(partition, record).await?;
        }
        Ok(!records.is_empty())
    }

    /// Sends the newest event of each row among the records of one partition, and returns whether there were any.
    async fn send_newest(&mut self, partition: usize) -> Result<bool, StreamEnd> {
        let mut after = self.offsets.get(partition).copied().unwrap_or_default();
        let mut newest: BTreeMap<(String, String), (Arc<Record>, usize)> = BTreeMap::new();
        let mut read = 0;
        loop {
            let records = self.records(partition, after).await?;
            for record in &records {
                for (number, event) in self.wanted(record) {
                    if let Some((resource, key)) = subject_of(record, event) {
                        newest.insert((resource.to_owned(), key.to_owned()), (record.clone(), number));
                    }
                }
                after = record.position.map_or(after, |position| position.offset);
            }
            read += records.len();
            if records.is_empty() || read >= NEWEST_RECORDS_MAX {
                break;
            }
        }
        let mut sent = Vec::with_capacity(newest.len());
        for (record, number) in newest.values() {
            sent.extend(self.shown(record, *number).await?);
        }
        let before = self.cursor();
        if let Some(offset) = self.offsets.get_mut(partition) {
            *offset = after;
        }
        self.send_events(sent, before).await?;
        Ok(read > 0)
    }

    /// The events of a record that the stream has, with their numbers.
    fn wanted<'r>(&self, record: &'r Record) -> impl Iterator<Item = (usize, &'r Event)> + use<'_, 'r> {
        let is_own = record.tenant == self.caller.tenant;
        let is_wanted = move |event: &Event| {
            subject_of(record, event).is_some_and(|(resource, key)| {
                self.resource.as_deref().is_none_or(|only| only == resource)
                    && self.key.as_deref().is_none_or(|only| only == key)
                    && self.caller.may(Access::Resource(resource))
            })
        };
        record.events.iter().enumerate().filter(move |(_, event)| is_own && is_wanted(event))
    }

    /// An event as the client gets it; none if the rules of its resource do not let the client see it.
    async fn shown(&self, record: &Record, number: usize) -> Result<Option<Json>, StreamEnd> {
        let Some(event) = record.events.get(number) else { return Ok(None) };
        if let Some(claims) = &self.caller.claims
            && !self.shared.house.may_see(claims, record, event).await?
        {
            return Ok(None);
        }
        let actor = event.actor.as_deref().filter(|_| self.caller.may(Access::Operator));
        Ok(Some(cloud_event(&self.shared.house, record, number, (event, actor))))
    }

    async fn send_record(&mut self, partition: usize, record: &Record) -> Result<(), StreamEnd> {
        let numbers: Vec<usize> = self.wanted(record).map(|(number, _)| number).collect();
        let mut sent: Vec<Json> = Vec::new();
        for number in numbers {
            sent.extend(self.shown(record, number).await?);
        }
        // Only the last event of a record moves the cursor past it.
        let before = if sent.len() > 1 { self.cursor() } else { String::new() };
        if let (Some(offsets), Some(position)) = (self.offsets.get_mut(partition), record.position) {
            *offsets = position.offset;
        }
        self.send_events(sent, before).await
    }

    /// Sends events, of which the last one moves the client's cursor.
    async fn send_events(&mut self, sent: Vec<Json>, before: String) -> Result<(), StreamEnd> {
        let last = sent.len().saturating_sub(1);
        for (number, event) in sent.into_iter().enumerate() {
            let id = if number == last { &self.cursor() } else { &before };
            self.send(format!("id: {id}\ndata: {event}\n\n")).await?;
        }
        Ok(())
    }

    /// Queues a message as soon as the buffer has space, re-checking the credentials while it waits.
    async fn send(&mut self, message: String) -> Result<(), StreamEnd> {
        let clock = self.shared.house.clock().clone();
        let bytes = u32::try_from(message.len()).unwrap_or(u32::MAX).min(BUFFERED_BYTES);
        loop {
            self.check().await?;
            let space = async {
                let bytes =
                    self.buffer.clone().acquire_many_owned(bytes).await.map_err(|_| StreamEnd::Closed)?;
                let slot = self.to.reserve().await.map_err(|_| StreamEnd::Closed)?;
                Ok::<_, StreamEnd>((bytes, slot))
            };
            tokio::select! {
                biased;
                space = space => {
                    let (bytes, slot) = space?;
                    slot.send((message.into(), bytes));
                    self.sent_at = clock.now();
                    return Ok(());
                }
                () = clock.sleep(self.until_check()) => {}
            }
        }
    }

    fn cursor(&self) -> String {
        self.shared.cursors.close(&[self.caller.tenant.as_str().as_bytes(), PURPOSE], &pack(&self.offsets))
    }
}

/// Why a stream ends.
enum StreamEnd {
    /// The client disconnected, or the server is stopping.
    Closed,
    /// The credentials are no longer valid.
    Unauthorized,
    Failed(String),
}

impl From<StoreError> for StreamEnd {
    fn from(error: StoreError) -> StreamEnd {
        StreamEnd::Failed(error.to_string())
    }
}

/// An event of a record as a CloudEvent in JSON, with the actor that its reader may see.
fn cloud_event(
    house: &House,
    record: &Record,
    number: usize,
    (event, actor): (&Event, Option<&str>),
) -> Json {
    let place = record.position.map(|position| position.to_string()).unwrap_or_default();
    let (resource, key) = subject_of(record, event).unwrap_or_default();
    let mut cloud = json!({
        "specversion": "1.0",
        "id": format!("{place}:{number}"),
        "source": format!("/{}", house.name()),
        "type": event.name,
        "subject": format!("{resource}/{key}"),
        "time": record.at.to_string(),
        "datacontenttype": "application/json",
        "data": visible_data(house.resources(), &event.name, data_of(event)),
    });
    if let (Some(cloud), Some(actor)) = (cloud.as_object_mut(), actor) {
        cloud.insert("actor".to_owned(), actor.into());
    }
    cloud
}

/// Offsets as variable-length integers: seven bits per byte, least significant first.
fn pack(offsets: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(offsets.len() * 2);
    for offset in offsets {
        let mut rest = *offset;
        while rest >= 0x80 {
            bytes.push((rest & 0x7f) as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
    }
    bytes
}

fn unpack(bytes: &[u8]) -> Option<Vec<u64>> {
    let mut offsets = Vec::new();
    let (mut offset, mut shift) = (0_u64, 0_u32);
    for byte in bytes {
        let bits = u64::from(byte & 0x7f);
        offset |= bits.checked_shl(shift).filter(|shifted| shifted >> shift == bits)?;
        if byte & 0x80 == 0 {
            offsets.push(offset);
            (offset, shift) = (0, 0);
        } else {
            shift += 7;
        }
    }
    (shift == 0).then_some(offsets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_survive_packing() {
        for offsets in [vec![], vec![0], vec![0, 1, 127, 128, 300, u64::MAX], vec![5; 64]] {
            assert_eq!(unpack(&pack(&offsets)), Some(offsets));
        }
        assert_eq!(unpack(&[0x80]), None);
        assert_eq!(unpack(&[0xff; 11]), None);
    }
}
