//! Bodies: read whole, within a time and a size, and turned into JSON.
//!
//! The limit counts what comes out of decompression, so a small body that unfolds into a large one is refused at the
//! limit and not a byte later. The time counts from the first byte to the last, so a client that sends one byte now and
//! then is cut off as well.

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

/// How much more than the limit is read and thrown away before the connection is given up: a client that is still
/// sending does not read the answer.
const DRAIN_FACTOR: usize = 8;

/// What a body may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes, after decompression.
    pub bytes: usize,
    /// Time to arrive.
    pub time: Duration,
}

/// Reads a body to its end.
pub async fn read(
    headers: &HeaderMap,
    body: Incoming,
    bounds: Bounds,
    clock: &dyn Clock,
) -> Result<Bytes, Problem> {
    let late = || {
        let detail = format!("the body did not arrive within {} ms", bounds.time.as_millis());
        Problem::new(REQUEST_TIMEOUT, detail).header(http::header::CONNECTION, "close")
    };
    let whole = tokio::select! {
        // What has arrived needs no timer.
        biased;
        whole = gather(headers, body, bounds.bytes) => whole?,
        () = clock.sleep(bounds.time) => return Err(late()),
    };
    match single(headers, &CONTENT_ENCODING)? {
        None | Some("" | "identity") => Ok(whole),
        Some(coding) if coding.eq_ignore_ascii_case("gzip") => unfold(&whole, bounds.bytes),
        Some(coding) => {
            let detail = format!("the content coding {coding:?} is not understood; gzip is");
            Err(Problem::new(UNSUPPORTED_MEDIA_TYPE, detail).header(http::header::ACCEPT_ENCODING, "gzip"))
        }
    }
}

fn too_large(limit: usize) -> Problem {
    Problem::new(TOO_LARGE, format!("the body has more than {limit} bytes"))
}

async fn gather(headers: &HeaderMap, mut body: Incoming, limit: usize) -> Result<Bytes, Problem> {
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let drained = limit.saturating_mul(DRAIN_FACTOR);
    if announced.is_some_and(|length: usize| length > drained) {
        return Err(too_large(limit));
    }
    let mut whole = BytesMut::new();
    let mut size = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Problem::new(MALFORMED, "the body ended before it was complete"))?;
        let Ok(data) = frame.into_data() else { continue };
        if announced == Some(data.len()) && data.len() <= limit {
            return Ok(data);
        }
        size = size.saturating_add(data.len());
        if size <= limit {
            whole.extend_from_slice(&data);
        } else {
            whole = BytesMut::new();
            if size > drained {
                break;
            }
        }
    }
    if size > limit { Err(too_large(limit)) } else { Ok(whole.freeze()) }
}

/// Undoes gzip, up to the limit.
fn unfold(folded: &[u8], limit: usize) -> Result<Bytes, Problem> {
    let mut whole = Vec::new();
    let mut reader = flate2::read::MultiGzDecoder::new(folded).take(limit as u64 + 1);
    reader
        .read_to_end(&mut whole)
        .map_err(|_| Problem::new(MALFORMED, "the body is not gzip, though it says so"))?;
    if whole.len() > limit {
        return Err(too_large(limit));
    }
    Ok(whole.into())
}

/// The JSON in a body; `None` if there is no body.
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
    let json = strict::read(text).map_err(|error| {
        Problem::new(MALFORMED, format!("the body is not JSON that can be read: {error}"))
    })?;
    Ok(Some(json))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn folded(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn gzip_is_undone_up_to_the_limit() {
        assert_eq!(unfold(&folded(b"hello"), 5).unwrap(), "hello");
        assert_eq!(unfold(&folded(b"hello!"), 5).unwrap_err().kind.code, "too_large");
        let bomb = folded(&vec![0; 50 << 20]);
        assert!(bomb.len() < 100_000);
        assert_eq!(unfold(&bomb, 1 << 20).unwrap_err().kind.code, "too_large");
        assert_eq!(unfold(b"hello", 5).unwrap_err().kind.code, "malformed");
        assert_eq!(unfold(&folded(b"hello")[..12], 5).unwrap_err().kind.code, "malformed");
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
