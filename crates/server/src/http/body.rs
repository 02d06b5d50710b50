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
use super::strict;
use crate::problem::{MALFORMED, Problem, REQUEST_TIMEOUT, TOO_LARGE, UNSUPPORTED_MEDIA_TYPE};

/// A body beyond the limit is read and discarded up to this multiple of the limit before the connection is closed:
/// a client that is still sending does not read the response.
const DRAIN_FACTOR: usize = 8;

/// Limits of a body.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes, after decompression.
    pub bytes: usize,
    /// Time until the last byte.
    pub time: Duration,
}

/// Reads a body to its end and decompresses it.
pub async fn read(
    headers: &HeaderMap,
    body: Incoming,
    bounds: Bounds,
    clock: &dyn Clock,
) -> Result<Bytes, Problem> {
    let timed_out = || {
        let detail = format!("the body did not arrive within {} ms", bounds.time.as_millis());
        Problem::new(REQUEST_TIMEOUT, detail).header(http::header::CONNECTION, "close")
    };
    let whole = tokio::select! {
        // A body that has arrived needs no timer.
        biased;
        whole = collect_body(headers, body, bounds.bytes) => whole?,
        () = clock.sleep(bounds.time) => return Err(timed_out()),
    };
    match single(headers, &CONTENT_ENCODING)? {
        None | Some("" | "identity") => Ok(whole),
        Some(coding) if coding.eq_ignore_ascii_case("gzip") => decompress(&whole, bounds.bytes),
        Some(coding) => {
            let detail = format!("the content coding {coding:?} is not supported; send gzip");
            Err(Problem::new(UNSUPPORTED_MEDIA_TYPE, detail).header(http::header::ACCEPT_ENCODING, "gzip"))
        }
    }
}

fn too_large(limit: usize) -> Problem {
    Problem::new(TOO_LARGE, format!("the body has more than {limit} bytes"))
}

async fn collect_body(headers: &HeaderMap, mut body: Incoming, limit: usize) -> Result<Bytes, Problem> {
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

/// Decompresses gzip, up to the limit.
fn decompress(compressed: &[u8], limit: usize) -> Result<Bytes, Problem> {
    let mut whole = Vec::new();
    let mut reader = flate2::read::MultiGzDecoder::new(compressed).take(limit as u64 + 1);
    reader.read_to_end(&mut whole).map_err(|_| Problem::new(MALFORMED, "the body is not valid gzip"))?;
    if whole.len() > limit {
        return Err(too_large(limit));
    }
    Ok(whole.into())
}

/// Parses the JSON of a body; `None` if the body is empty.
pub fn json(headers: &HeaderMap, body: &[u8], patch: bool) -> Result<Option<Json>, Problem> {
    if body.is_empty() {
        return Ok(None);
    }
    let given = single(headers, &CONTENT_TYPE)?.unwrap_or("none");
    let essence = given.split(';').next().unwrap_or_default().trim();
    let understood = essence.eq_ignore_ascii_case("application/json")
        || (patch && essence.eq_ignore_ascii_case("application/merge-patch+json"));
    if !understood {
        let accepted =
            if patch { "application/json, application/merge-patch+json" } else { "application/json" };
        let detail = format!("the body is of type {given}; send {accepted}");
        let name = if patch { http::HeaderName::from_static("accept-patch") } else { http::header::ACCEPT };
        return Err(Problem::new(UNSUPPORTED_MEDIA_TYPE, detail).header(name, accepted));
    }
    let text = std::str::from_utf8(body).map_err(|_| Problem::new(MALFORMED, "the body is not UTF-8"))?;
    let json = strict::read(text)
        .map_err(|error| Problem::new(MALFORMED, format!("the body is not valid JSON: {error}")))?;
    Ok(Some(json))
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

    #[test]
    fn json_needs_its_type_and_its_shape() {
        let headers = |kind: &str| HeaderMap::from_iter([(CONTENT_TYPE, kind.parse().unwrap())]);
        let read = |kind: &str, body: &str, patch| {
            json(&headers(kind), body.as_bytes(), patch).map_err(|problem| problem.kind.code)
        };
        assert_eq!(read("application/json; charset=utf-8", "{}", false), Ok(Some(serde_json::json!({}))));
        assert_eq!(read("text/plain", "", false), Ok(None));
        assert_eq!(read("text/plain", "{}", false), Err("unsupported_media_type"));
        assert_eq!(read("application/merge-patch+json", "{}", false), Err("unsupported_media_type"));
        assert!(read("application/merge-patch+json", "{}", true).is_ok());
        assert_eq!(read("application/json", "{", false), Err("malformed"));
        assert_eq!(read("application/json", &"[".repeat(200), false), Err("malformed"));
        assert_eq!(read("application/json", r#"{"a": 1, "a": 2}"#, false), Err("malformed"));
        let not_text = json(&headers("application/json"), b"\"\xff\"", false);
        assert_eq!(not_text.unwrap_err().kind.code, "malformed");
    }
}
