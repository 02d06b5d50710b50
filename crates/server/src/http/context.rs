//! Request ids and W3C trace context.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName};
use statehouse_store::Ids;

/// `X-Request-Id`.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// `traceparent`.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Maximum length of a caller's request id.
const REQUEST_ID_MAX: usize = 128;

/// Ids of a request.
#[derive(Clone, Debug)]
pub struct Context {
    /// The caller's request id, or a generated one.
    pub request_id: String,
    /// The caller's trace id (32 hexadecimal digits), or a generated one if the caller sent a request id but no trace.
    /// `None`: the digits of the generated request id are the trace id.
    trace: Option<String>,
    /// The caller's span in the trace, 16 hexadecimal digits.
    pub parent_id: Option<String>,
}

impl Context {
    /// Reads the ids from the headers. Missing or malformed ones are generated.
    pub fn of(headers: &HeaderMap, ids: &Ids) -> Context {
        let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|id| is_plain(id));
        let trace =
            headers.get(TRACEPARENT).and_then(|parent| parent.to_str().ok()).and_then(parse_traceparent);
        match (given, trace) {
            // One generated id serves as both.
            (None, None) => Context { request_id: ids.next(), trace: None, parent_id: None },
            (given, trace) => Context {
                request_id: given.map_or_else(|| ids.next(), str::to_owned),
                trace: Some(trace.map_or_else(|| digits(&ids.next()), |(trace, _)| trace.to_owned())),
                parent_id: trace.map(|(_, parent)| parent.to_owned()),
            },
        }
    }

    /// The trace id, 32 hexadecimal digits.
    pub fn trace_id(&self) -> Cow<'_, str> {
        match &self.trace {
            Some(trace) => trace.into(),
            None => digits(&self.request_id).into(),
        }
    }

    /// The trace id, if it differs from the request id; otherwise empty.
    pub fn other_trace(&self) -> &str {
        self.trace.as_deref().unwrap_or_default()
    }
}

fn digits(id: &str) -> String {
    id.replace('-', "")
}

/// Whether an id is safe in a header and in a log line.
fn is_plain(id: &str) -> bool {
    (1..=REQUEST_ID_MAX).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:/+=".contains(&byte))
}

/// Trace and parent of a W3C `traceparent`: `00-{32 hex}-{16 hex}-{2 hex}`, neither of them all zeros.
fn parse_traceparent(text: &str) -> Option<(&str, &str)> {
    let hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let mut parts = text.split('-');
    let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    // Later versions may have more parts; version 00 has none, and ff is invalid.
    let version_fits = hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none());
    let fits = version_fits && hex(trace, 32) && hex(parent, 16) && hex(flags, 2);
    let zeros = |part: &str| part.bytes().all(|byte| byte == b'0');
    (fits && !zeros(trace) && !zeros(parent)).then_some((trace, parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traceparents_are_read_strictly() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(parse_traceparent(good), Some(("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")));
        assert!(parse_traceparent(&good.replacen("00", "01", 1)).is_some());
        assert!(parse_traceparent(&format!("{}-extra", good.replacen("00", "01", 1))).is_some());
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
        ] {
            assert_eq!(parse_traceparent(bad), None, "{bad}");
        }
    }

    #[test]
    fn ids_that_could_do_harm_are_replaced() {
        for id in ["", "a b", "a\"b", "a{b", &"x".repeat(129)] {
            assert!(!is_plain(id), "{id}");
        }
        assert!(is_plain("01920f2e-7b1c-7cc1-9d6a-1b2c3d4e5f60"));
    }
}
