//! Request bodies: read to the end within a time and a size limit, and parsed as JSON.
//!
//! The size limit applies after decompression, so a compressed body that expands beyond it is rejected at the limit. The
//! time limit covers the whole body, so a client that sends one byte at a time is disconnected too.

use std::io::Read as _;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::Value as Json;
use statehouse_store::Clock;

use super::conditions::single;
use super::{path, strict};
use crate::problem::{INTERNAL, MALFORMED, Problem, REQUEST_TIMEOUT, TOO_LARGE, UNSUPPORTED_MEDIA_TYPE};
use crate::quota::QuotaGuard;

/// A body beyond the limit is read and discarded up to this multiple of the limit before the connection is closed:
/// a client that is still sending does not read the response.
const DRAIN_FACTOR: usize = 8;

/// Larger bodies are decompressed and parsed on a blocking thread.
const INLINE_BYTES_MAX: usize = 64 << 10;
/// Members of a compressed body.
const GZIP_MEMBERS_MAX: usize = 16;

/// Limits of a body.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes, after decompression.
    pub bytes: usize,
    /// Time until the last byte.
    pub time: Duration,
}

/// A body and the JSON in it.
#[derive(Debug)]
pub struct ParsedBody {
    /// The bytes after decompression.
    pub bytes: Bytes,
    /// `None` if the body is empty.
    pub json: Option<Json>,
    /// Counts the bytes in memory.
    pub memory: QuotaGuard,
}

/// Reads a body to its end, decompresses and parses it. `patch` accepts a merge patch.
pub async fn read(
    headers: &HeaderMap,
    body: Incoming,
    bounds: Bounds,
    clock: &dyn Clock,
    patch: bool,
    mut memory: QuotaGuard,
) -> Result<ParsedBody, Problem> {
    let whole = collect_in_time(headers, body, bounds, clock, &mut memory).await?;
    decode(headers, whole, bounds, patch, memory).await
}

/// Reads a body to its end, as it was sent.
pub async fn read_raw(
    headers: &HeaderMap,
    body: Incoming,
    bounds: Bounds,
    clock: &dyn Clock,
    mut memory: QuotaGuard,
) -> Result<(Bytes, QuotaGuard), Problem> {
    let whole = collect_in_time(headers, body, bounds, clock, &mut memory).await?;
    Ok((whole, memory))
}

/// A body that arrives within a time and a size limit.
async fn collect_in_time(
    headers: &HeaderMap,
    body: Incoming,
    bounds: Bounds,
    clock: &dyn Clock,
    memory: &mut QuotaGuard,
) -> Result<Bytes, Problem> {
    tokio::select! {
        // A body that has arrived needs no timer.
        biased;
        whole = collect_body(headers, body, bounds.bytes, memory) => whole,
        () = clock.sleep(bounds.time) => {
            let detail = format!("the body did not arrive within {} ms", bounds.time.as_millis());
            Err(Problem::new(REQUEST_TIMEOUT, detail).header(http::header::CONNECTION, "close"))
        }
    }
}

/// Fields of a form that a web page sends.
const FORM_FIELDS_MAX: usize = 512;

/// Reads the form that a web page sends: names and values.
pub async fn read_form(
    headers: &HeaderMap,
    body: Incoming,
    bounds: Bounds,
    clock: &dyn Clock,
    memory: &mut QuotaGuard,
) -> Result<Vec<(String, String)>, Problem> {
    const FORM: &str = "application/x-www-form-urlencoded";
    let given = single(headers, &CONTENT_TYPE)?.unwrap_or("none");
    if !given.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(FORM) {
        let detail = format!("the body is of type {given}; send {FORM}");
        return Err(Problem::new(UNSUPPORTED_MEDIA_TYPE, detail).header(http::header::ACCEPT, FORM));
    }
    let whole = collect_in_time(headers, body, bounds, clock, memory).await?;
    let text = std::str::from_utf8(&whole).map_err(|_| Problem::new(MALFORMED, "the body is not UTF-8"))?;
    path::pairs_up_to(FORM_FIELDS_MAX, Some(text))
}

/// Decompresses and parses a body. Large and compressed bodies are processed on a blocking thread, so that they do not
/// delay other requests.
async fn decode(
    headers: &HeaderMap,
    whole: Bytes,
    bounds: Bounds,
    patch: bool,
    mut memory: QuotaGuard,
) -> Result<ParsedBody, Problem> {
    let length = whole.len();
    let is_compressed = match single(headers, &CONTENT_ENCODING)? {
        None | Some("" | "identity") => false,
        Some(coding) if coding.eq_ignore_ascii_case("gzip") => true,
        Some(coding) => {
            let detail = format!("the content coding {coding:?} is not supported; send gzip");
            let problem = Problem::new(UNSUPPORTED_MEDIA_TYPE, detail);
            return Err(problem.header(http::header::ACCEPT_ENCODING, "gzip"));
        }
    };
    let is_json = is_json(headers, patch);
    let parse = move || {
        let bytes = if is_compressed { decompress(&whole, bounds.bytes)? } else { whole };
        if is_compressed {
            memory.grow(bytes.len())?;
        }
        let json = if bytes.is_empty() { None } else { is_json.and_then(|()| parse(&bytes)).map(Some)? };
        Ok(ParsedBody { bytes, json, memory })
    };
    if is_compressed || length > INLINE_BYTES_MAX {
        let parsed = tokio::task::spawn_blocking(parse).await;
        return parsed.unwrap_or_else(|error| Err(Problem::hidden(INTERNAL, error.to_string())));
    }
    parse()
}

fn too_large(limit: usize) -> Problem {
    Problem::new(TOO_LARGE, format!("the body has more than {limit} bytes"))
}

async fn collect_body(
    headers: &HeaderMap,
    mut body: Incoming,
    limit: usize,
    memory: &mut QuotaGuard,
) -> Result<Bytes, Problem> {
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let drain_max = limit.saturating_mul(DRAIN_FACTOR);
    if announced.is_some_and(|length: usize| length > drain_max) {
        return Err(too_large(limit));
    }
    let mut whole = BytesMut::new();
    let mut size = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Problem::new(MALFORMED, "the body is incomplete"))?;
        let Ok(data) = frame.into_data() else { continue };
        if size <= limit {
            memory.grow(data.len())?;
        }
        if announced == Some(data.len()) && data.len() <= limit {
            return Ok(data);
        }
        size = size.saturating_add(data.len());
        if size <= limit {
            whole.extend_from_slice(&data);
        } else {
            whole = BytesMut::new();
            if size > drain_max {
                break;
            }
        }
    }
    if size > limit { Err(too_large(limit)) } else { Ok(whole.freeze()) }
}

/// Decompresses gzip, up to the limit. A body may have several members, but not many: each one costs the setup of a
/// decompressor, and an empty one has only 20 bytes.
pub(crate) fn decompress(compressed: &[u8], limit: usize) -> Result<Bytes, Problem> {
    let bad = |what: &str| Problem::new(MALFORMED, what);
    let mut whole = Vec::new();
    let mut rest = compressed;
    for _ in 0..GZIP_MEMBERS_MAX {
        let mut member = flate2::bufread::GzDecoder::new(rest);
        let left = (limit + 1).saturating_sub(whole.len()) as u64;
        (&mut member).take(left).read_to_end(&mut whole).map_err(|_| bad("the body is not valid gzip"))?;
        if whole.len() > limit {
            return Err(too_large(limit));
        }
        rest = member.into_inner();
        if rest.is_empty() {
            return Ok(whole.into());
        }
    }
    Err(bad("the body has too many gzip members"))
}

/// Whether the content type is one that the action accepts.
fn is_json(headers: &HeaderMap, patch: bool) -> Result<(), Problem> {
    let given = single(headers, &CONTENT_TYPE)?.unwrap_or("none");
    let essence = given.split(';').next().unwrap_or_default().trim();
    let is_accepted = essence.eq_ignore_ascii_case("application/json")
        || (patch && essence.eq_ignore_ascii_case("application/merge-patch+json"));
    if is_accepted {
        return Ok(());
    }
    let accepted = if patch { "application/json, application/merge-patch+json" } else { "application/json" };
    let detail = format!("the body is of type {given}; send {accepted}");
    let name = if patch { http::HeaderName::from_static("accept-patch") } else { http::header::ACCEPT };
    Err(Problem::new(UNSUPPORTED_MEDIA_TYPE, detail).header(name, accepted))
}

fn parse(body: &[u8]) -> Result<Json, Problem> {
    let text = std::str::from_utf8(body).map_err(|_| Problem::new(MALFORMED, "the body is not UTF-8"))?;
    strict::read(text)
        .map_err(|error| Problem::new(MALFORMED, format!("the body is not valid JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn compressed(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn gzip_is_undone_up_to_the_limit() {
        assert_eq!(decompress(&compressed(b"hello"), 5).unwrap(), "hello");
        assert_eq!(decompress(&compressed(b"hello!"), 5).unwrap_err().kind.code, "too_large");
        let bomb = compressed(&vec![0; 50 << 20]);
        assert!(bomb.len() < 100_000);
        assert_eq!(decompress(&bomb, 1 << 20).unwrap_err().kind.code, "too_large");
        assert_eq!(decompress(b"hello", 5).unwrap_err().kind.code, "malformed");
        assert_eq!(decompress(&compressed(b"hello")[..12], 5).unwrap_err().kind.code, "malformed");
    }

    fn headers(kind: &str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_TYPE, kind.parse().unwrap())])
    }

    const BOUNDS: Bounds = Bounds { bytes: 4 << 20, time: Duration::from_secs(1) };

    fn memory() -> QuotaGuard {
        let caller = crate::auth::Caller::anonymous(statehouse_store::Tenant::new("acme").unwrap());
        let quotas = crate::quota::Quotas::new(&crate::config::ServerLimits::default());
        quotas.body_bytes.acquire(&caller, 0).unwrap()
    }

    #[tokio::test]
    async fn json_needs_its_type_and_its_shape() {
        let read = async |kind: &str, body: &[u8], patch| {
            let parsed = decode(&headers(kind), Bytes::copy_from_slice(body), BOUNDS, patch, memory()).await;
            parsed.map(|parsed| parsed.json).map_err(|problem| problem.kind.code)
        };
        let object = Ok(Some(serde_json::json!({})));
        assert_eq!(read("application/json; charset=utf-8", b"{}", false).await, object);
        assert_eq!(read("text/plain", b"", false).await, Ok(None));
        assert_eq!(read("text/plain", b"{}", false).await, Err("unsupported_media_type"));
        assert_eq!(read("application/merge-patch+json", b"{}", false).await, Err("unsupported_media_type"));
        assert!(read("application/merge-patch+json", b"{}", true).await.is_ok());
        assert_eq!(read("application/json", b"{", false).await, Err("malformed"));
        assert_eq!(read("application/json", "[".repeat(200).as_bytes(), false).await, Err("malformed"));
        assert_eq!(read("application/json", br#"{"a": 1, "a": 2}"#, false).await, Err("malformed"));
        assert_eq!(read("application/json", b"\"\xff\"", false).await, Err("malformed"));
    }

    #[test]
    fn large_and_compressed_bodies_are_parsed_on_another_thread() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(1).build().unwrap();
        let (small, large) = ("1".to_owned(), format!("\"{}\"", "x".repeat(INLINE_BYTES_MAX)));
        let gzip = |text: &str| Bytes::from(compressed(text.as_bytes()));
        for (body, is_compressed, inline) in [
            (Bytes::from(small.clone()), false, true),
            (Bytes::from(large.clone()), false, false),
            (gzip(&small), true, false),
        ] {
            let mut headers = headers("application/json");
            if is_compressed {
                headers.insert(CONTENT_ENCODING, "gzip".parse().unwrap());
            }
            // The only other thread is busy, so that nothing that needs it is ready at the first poll.
            let (release, released) = std::sync::mpsc::channel::<()>();
            runtime.spawn_blocking(move || released.recv());
            runtime.block_on(async {
                let mut decoding = Box::pin(decode(&headers, body, BOUNDS, false, memory()));
                let first = futures_util::FutureExt::now_or_never(&mut decoding);
                assert_eq!(first.is_some(), inline);
                drop(release);
                let parsed = match first {
                    Some(parsed) => parsed,
                    None => decoding.await,
                };
                assert!(parsed.unwrap().json.is_some());
            });
        }
    }
}
