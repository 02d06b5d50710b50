//! `/v1/events`: the log as a stream of server-sent events, each a CloudEvent.
//!
//! - **Place.** `id:` is a sealed cursor over all partitions of the log. A client that lost its connection sends it as
//!   `Last-Event-ID` (browsers do so by themselves) or as `?after=`, and misses nothing. `?after=oldest` begins with
//!   the oldest record that is kept; without either the stream begins now.
//! - **Order.** The events of one row come in the order of its versions. Between rows there is no order.
//! - **At least once.** A record with several events is one step of the cursor: whoever is cut off within it gets it
//!   again as a whole. A CloudEvent's `id` is always the same, so a repetition can be told.
//! - **Apart.** Only the caller's tenant is shown. That is no filter a caller could leave out.
//! - **Trimmed.** If the log no longer has what follows the cursor, the answer is 410: read the rows anew.
//!
//! - **As long as the caller may.** Credentials are looked at again every few seconds, whether there are events or not:
//!   a stream ends soon after its key was revoked, or its key or token has come to its end.
//!
//! The streams of a process share one reader of the log ([`statehouse::follow`]). A stream that begins further back, or
//! whose client is slow, reads the store until it has caught up; none reads faster than its client does.

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
use statehouse::follow::{Listener, Next};
use statehouse::house::{data_of, subject_of};
use statehouse::resource::visible_data;
use statehouse::{House, Refusal};
use statehouse_store::{Event, LogPage, Record, StoreError, Tenant, Time};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use crate::auth::{self, Scope};
use crate::config::millis;
use crate::http::{Context, Request, Shared, Visit, query_pairs};
use crate::metrics::Gauged;
use crate::problem::{INVALID_INPUT, MALFORMED, Problem, TRIMMED, UNAVAILABLE};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// What begins a stream with the oldest record.
const OLDEST: &str = "oldest";
/// Records that are read at a time.
const PAGE: usize = 100;
/// Messages that wait for a slow client before its stream stops reading.
const AHEAD: usize = 64;
/// What the client is asked to wait before it connects again, in milliseconds.
const RETRY_MS: u64 = 2_000;
/// The shortest time between two looks at a stream's credentials.
const CHECK_MIN: Duration = Duration::from_millis(250);
/// What cursors of the log are sealed for.
const PURPOSE: &[u8] = b"events";

/// Opens a stream.
pub(crate) async fn handle(
    shared: &Arc<Shared>,
    request: Request,
    visit: &mut Visit,
) -> Result<Response, Problem> {
    let (parts, _) = request.into_parts();
    let caller = shared.gate.admit(&parts.headers).await?;
    visit.tenant = Some(caller.tenant.clone());
    caller.require(Scope::Read)?;
    open(shared, &caller.tenant, &parts, &visit.context).await
}

async fn open(
    shared: &Arc<Shared>,
    tenant: &Tenant,
    request: &Parts,
    context: &Context,
) -> Result<Response, Problem> {
    if request.method != Method::GET {
        return Err(Problem::method_not_allowed(&["GET"]));
    }
    let (mut after, mut resource) = (None, None);
    for (name, value) in query_pairs(request.uri.query())? {
        match name.as_str() {
            "after" => after = Some(value),
            "resource" => resource = Some(value),
            _ => return Err(misfit(&name, "there is no such parameter; there are after and resource")),
        }
    }
    if let Some(resource) = &resource
        && shared.house.resource(resource).is_err()
    {
        return Err(misfit("resource", "no resource has this name"));
    }
    // A browser that connects again repeats the URL it began with; the header is newer.
    if let Some(last) = request.headers.get(LAST_EVENT_ID) {
        let text = last.to_str().map_err(|_| Problem::new(MALFORMED, "Last-Event-ID is not ASCII"))?;
        after = Some(text.to_owned()).filter(|text| !text.is_empty()).or(after);
    }
    let listener = shared.house.tail().listen();
    let seen = begin(shared, tenant, after.as_deref()).await?;
    let permit = shared.streams.clone().try_acquire_owned();
    let permit = permit.map_err(|_| {
        Problem::new(UNAVAILABLE, "too many event streams are open").header(http::header::RETRY_AFTER, "5")
    })?;
    let (to, mut messages) = mpsc::channel(AHEAD);
    let now = shared.house.clock().now();
    let credentials = [AUTHORIZATION, auth::TENANT].into_iter();
    let stream = Stream {
        shared: shared.clone(),
        tenant: tenant.clone(),
        credentials: credentials
            .filter_map(|name| request.headers.get(&name).map(|value| (name, value.clone())))
            .collect(),
        resource,
        listener,
        seen,
        to,
        said_at: now,
        checked_at: now,
    };
    tokio::spawn(stream.run(permit, context.request_id.clone()));
    let body =
        poll_fn(move |task| messages.poll_recv(task).map(|message| message.map(Ok::<_, std::io::Error>)));
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Proxies that gather answers before they pass them on would stop a stream.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(response)
}

fn misfit(name: &str, detail: &str) -> Problem {
    let mut problem = Problem::new(INVALID_INPUT, format!("/{name}: {detail}"));
    problem.errors.push((format!("/{name}"), detail.to_owned()));
    problem
}

fn trimmed() -> Problem {
    Problem::new(
        TRIMMED,
        "the log no longer has the events after this cursor; read the rows anew, then follow without it",
    )
}

/// The offsets behind which a stream begins.
async fn begin(shared: &Shared, tenant: &Tenant, after: Option<&str>) -> Result<Vec<u64>, Problem> {
    let store = shared.house.store();
    let failed = |error: StoreError| Problem::from(Refusal::from(error));
    let partitions = store.partitions();
    let Some(after) = after else {
        return store.wait_log(&[], Duration::ZERO).await.map_err(failed);
    };
    let mut seen = vec![0; partitions as usize];
    if after != OLDEST {
        let opened = shared.cursors.open(&[tenant.as_str().as_bytes(), PURPOSE], after);
        seen = opened
            .and_then(|bytes| unpack(&bytes))
            .filter(|seen| seen.len() == partitions as usize)
            .ok_or_else(|| misfit("after", "it is not a cursor that this stream returned"))?;
    }
    for (partition, seen) in seen.iter_mut().enumerate() {
        let page = store.read_log(u32::try_from(partition).unwrap_or(0), *seen, 1).await.map_err(failed)?;
        if after == OLDEST {
            *seen = page.oldest.saturating_sub(1);
        } else if has_gap(&page, *seen) {
            return Err(trimmed());
        }
    }
    Ok(seen)
}

/// Whether records are missing behind an offset: trimmed, or never there because the log is another one.
fn has_gap(page: &LogPage, seen: u64) -> bool {
    page.oldest > seen + 1 || seen > page.head
}

/// One open stream.
struct Stream {
    shared: Arc<Shared>,
    tenant: Tenant,
    /// The headers that let the caller in.
    credentials: HeaderMap,
    resource: Option<String>,
    listener: Listener,
    /// The offsets that were passed, one for each partition.
    seen: Vec<u64>,
    to: mpsc::Sender<Bytes>,
    /// When the client last heard something.
    said_at: Time,
    /// When it was last known that the caller may listen.
    checked_at: Time,
}

impl Stream {
    async fn run(mut self, _permit: OwnedSemaphorePermit, request_id: String) {
        let _counted = Gauged::enter(&self.shared.metrics, |metrics| &metrics.streams);
        match self.tell_all().await {
            Stop::Gone => {}
            Stop::Expelled => {
                tracing::info!(target: "statehouse::events", request_id, "a stream's credentials have come to their end");
            }
            // The client connects again with its cursor and learns what is the matter.
            Stop::Failed(why) => {
                tracing::warn!(target: "statehouse::events", why, request_id, "an event stream ended");
            }
        }
    }

    async fn tell_all(&mut self) -> Stop {
        let mut stopping = self.shared.stopping.clone();
        let opening = format!(": open\nretry: {RETRY_MS}\nid: {}\n\n", self.cursor());
        if let Err(stop) = self.say(opening).await {
            return stop;
        }
        while !*stopping.borrow() {
            if let Err(stop) = self.step(&mut stopping).await {
                return stop;
            }
        }
        Stop::Gone
    }

    /// Passes on what there is, or waits for news and says at least that the stream is still there.
    async fn step(&mut self, stopping: &mut watch::Receiver<bool>) -> Result<(), Stop> {
        self.check().await?;
        let mut told = false;
        for partition in 0..self.seen.len() {
            told |= self.pass(partition).await?;
        }
        let heartbeat = millis(self.shared.config.limits.heartbeat_ms);
        let clock = self.shared.house.clock();
        let silent = clock.now().since(self.said_at);
        if silent >= heartbeat {
            // An id without data moves the client's cursor without an event: others' records need not be read twice.
            return self.say(format!(": still here\nid: {}\n\n", self.cursor())).await;
        }
        if told {
            return Ok(());
        }
        let pause = clock.sleep((heartbeat - silent).min(self.until_check()));
        tokio::select! {
            () = self.listener.news() => Ok(()),
            () = pause => Ok(()),
            _ = stopping.changed() => Ok(()),
            () = self.to.closed() => Err(Stop::Gone),
        }
    }

    /// How long the credentials count as known.
    fn until_check(&self) -> Duration {
        let limits = &self.shared.config.limits;
        let trusted = millis(limits.credential_cache_ms.min(limits.heartbeat_ms)).max(CHECK_MIN);
        trusted.saturating_sub(self.shared.house.clock().now().since(self.checked_at))
    }

    /// Looks at the credentials again, if it is time to.
    async fn check(&mut self) -> Result<(), Stop> {
        if !self.until_check().is_zero() {
            return Ok(());
        }
        self.checked_at = self.shared.house.clock().now();
        match self.shared.gate.admit(&self.credentials).await {
            Ok(caller) if caller.tenant == self.tenant && caller.require(Scope::Read).is_ok() => Ok(()),
            // A store that cannot be asked has nothing to tell either.
            Err(problem) if problem.kind == UNAVAILABLE => Ok(()),
            _ => Err(Stop::Expelled),
        }
    }

    /// Passes on some records of one partition, and says whether there were any.
    async fn pass(&mut self, partition: usize) -> Result<bool, Stop> {
        let seen = self.seen.get(partition).copied().unwrap_or_default();
        match self.listener.after(partition, seen, PAGE) {
            Next::Nothing => Ok(false),
            Next::Records(records) => {
                for record in &records {
                    self.tell(partition, record).await?;
                }
                Ok(true)
            }
            Next::Behind => {
                let number = u32::try_from(partition).unwrap_or(0);
                let page = self.shared.house.store().read_log(number, seen, PAGE).await?;
                if has_gap(&page, seen) {
                    return Err(Stop::Failed("the log was trimmed before the stream got there".into()));
                }
                for record in &page.records {
                    self.tell(partition, record).await?;
                }
                Ok(!page.records.is_empty())
            }
        }
    }

    async fn tell(&mut self, partition: usize, record: &Record) -> Result<(), Stop> {
        let wanted = |event: &Event| {
            let only = self.resource.as_deref();
            subject_of(record, event).is_some_and(|(resource, _)| only.is_none_or(|only| only == resource))
        };
        let told: Vec<Json> = match record.tenant == self.tenant {
            false => Vec::new(),
            true => (record.events.iter().enumerate().filter(|(_, event)| wanted(event)))
                .map(|(number, event)| cloud_event(&self.shared.house, record, number, event))
                .collect(),
        };
        // Only the last event of a record moves the cursor past it.
        let before = if told.len() > 1 { self.cursor() } else { String::new() };
        if let (Some(seen), Some(position)) = (self.seen.get_mut(partition), record.position) {
            *seen = position.offset;
        }
        let last = told.len().saturating_sub(1);
        for (number, event) in told.into_iter().enumerate() {
            let id = if number == last { &self.cursor() } else { &before };
            self.say(format!("id: {id}\ndata: {event}\n\n")).await?;
        }
        Ok(())
    }

    /// Hands a message to the client, as soon as it takes one and as long as it may.
    async fn say(&mut self, message: String) -> Result<(), Stop> {
        let clock = self.shared.house.clock().clone();
        loop {
            self.check().await?;
            tokio::select! {
                biased;
                room = self.to.reserve() => {
                    room.map_err(|_| Stop::Gone)?.send(message.into());
                    self.said_at = clock.now();
                    return Ok(());
                }
                () = clock.sleep(self.until_check()) => {}
            }
        }
    }

    fn cursor(&self) -> String {
        self.shared.cursors.close(&[self.tenant.as_str().as_bytes(), PURPOSE], &pack(&self.seen))
    }
}

/// Why a stream ends.
enum Stop {
    /// The client went away, or the server stops.
    Gone,
    /// The caller may listen no longer.
    Expelled,
    Failed(String),
}

impl From<StoreError> for Stop {
    fn from(error: StoreError) -> Stop {
        Stop::Failed(error.to_string())
    }
}

/// An event of a record as a CloudEvent, in its JSON form.
fn cloud_event(house: &House, record: &Record, number: usize, event: &Event) -> Json {
    let place = record.position.map(|position| position.to_string()).unwrap_or_default();
    let (resource, key) = subject_of(record, event).unwrap_or_default();
    json!({
        "specversion": "1.0",
        "id": format!("{place}:{number}"),
        "source": format!("/{}", house.name()),
        "type": event.name,
        "subject": format!("{resource}/{key}"),
        "time": record.at.to_string(),
        "datacontenttype": "application/json",
        "data": visible_data(house.resources(), &event.name, data_of(event)),
    })
}

/// Offsets in a few bytes each: seven bits a byte, the least first.
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
