//! Parsers for conditional headers, idempotency keys and preferences. Pure functions.

use std::time::Duration;

use http::header::{HeaderMap, HeaderName, IF_MATCH, IF_NONE_MATCH};
use statehouse::Expected;

use crate::problem::{MALFORMED, Problem};

/// `Idempotency-Key`.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// `Prefer`.
pub const PREFER: HeaderName = HeaderName::from_static("prefer");

/// Maximum length of an idempotency key. An operation id has at most 256 bytes.
const KEY_BYTES_MAX: usize = 255;

/// The strong entity tag of a version.
pub fn etag(version: i64) -> String {
    format!("\"{version}\"")
}

/// The only value of a header. A repeated header, or one that is not ASCII, is malformed.
pub fn single<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Result<Option<&'h str>, Problem> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(Problem::new(MALFORMED, format!("the header {name} is given twice")));
    }
    let text =
        value.to_str().map_err(|_| Problem::new(MALFORMED, format!("the header {name} is not ASCII")))?;
    Ok(Some(text.trim()))
}

/// The version that `If-Match` expects.
pub fn expected(headers: &HeaderMap) -> Result<Option<Expected>, Problem> {
    let Some(text) = single(headers, &IF_MATCH)? else { return Ok(None) };
    if text == "*" {
        return Ok(Some(Expected::Any));
    }
    let bad = || {
        let detail = format!("If-Match is `*` or one entity tag such as \"3\", not {text}");
        Problem::new(MALFORMED, detail)
    };
    // A weak tag, a tag that is not a version and an empty list never match. Versions start at 1, so 0 stands for a
    // version that no row has.
    if text.is_empty() {
        return Ok(Some(Expected::Version(0)));
    }
    let (weak, tag) = text.strip_prefix("W/").map_or((false, text), |tag| (true, tag));
    let tag = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')).ok_or_else(bad)?;
    if tag.contains('"') {
        return Err(bad());
    }
    let version = if weak { None } else { canonical(tag) };
    Ok(Some(Expected::Version(version.unwrap_or(0))))
}

/// A version exactly as [`etag`] formats it.
fn canonical(tag: &str) -> Option<i64> {
    tag.parse().ok().filter(|version: &i64| *version > 0 && version.to_string() == tag)
}

/// Parsed `If-None-Match`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoneMatch {
    /// `*`: any version.
    Anything,
    /// The versions that the caller holds.
    Tags(Vec<String>),
}

impl NoneMatch {
    /// Whether the caller holds this version.
    pub fn holds(&self, version: i64) -> bool {
        match self {
            NoneMatch::Anything => true,
            NoneMatch::Tags(tags) => tags.contains(&etag(version)),
        }
    }
}

/// Parses `If-None-Match`. Comparison is weak, as required; invalid tags match nothing.
pub fn none_match(headers: &HeaderMap) -> Option<NoneMatch> {
    let mut tags = Vec::new();
    for value in headers.get_all(IF_NONE_MATCH) {
        for tag in value.to_str().ok()?.split(',').map(str::trim) {
            if tag == "*" {
                return Some(NoneMatch::Anything);
            }
            tags.push(tag.strip_prefix("W/").unwrap_or(tag).to_owned());
        }
    }
    (!tags.is_empty()).then_some(NoneMatch::Tags(tags))
}

/// The idempotency key, bare or quoted.
pub fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(text) = single(headers, &IDEMPOTENCY_KEY)? else { return Ok(None) };
    let bad = |why: &str| Problem::new(MALFORMED, format!("the Idempotency-Key {why}"));
    let key = match text.strip_prefix('"') {
        Some(rest) => unquoted(rest).ok_or_else(|| bad("begins with a quote and does not end with one"))?,
        None => text.to_owned(),
    };
    if key.is_empty() || key.len() > KEY_BYTES_MAX {
        return Err(bad(&format!("must have 1 to {KEY_BYTES_MAX} characters")));
    }
    // Spaces are for quoted keys only: around a bare key they would be trimmed.
    let least = if text.starts_with('"') { b' ' } else { b'!' };
    if !key.bytes().all(|byte| (least..=b'~').contains(&byte)) {
        return Err(bad("must be visible ASCII, and quoted if it holds spaces"));
    }
    Ok(Some(key))
}

/// The content of a quoted string of RFC 8941, after its opening quote.
fn unquoted(rest: &str) -> Option<String> {
    let inner = rest.strip_suffix('"')?;
    let mut content = String::with_capacity(inner.len());
    let mut letters = inner.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => content.push(letters.next().filter(|next| matches!(next, '"' | '\\'))?),
            '"' => return None,
            other => content.push(other),
        }
    }
    Some(content)
}

/// The time that the caller is willing to wait: `Prefer: wait=N`, in seconds. Unknown preferences are ignored, as
/// RFC 7240 requires.
pub fn wait_preference(headers: &HeaderMap) -> Option<Duration> {
    let values = headers.get_all(PREFER).iter().filter_map(|value| value.to_str().ok());
    let mut preferences = values.flat_map(|value| value.split([',', ';'])).map(str::trim);
    preferences.find_map(|preference| {
        let (name, seconds) = preference.split_once('=')?;
        if !name.trim().eq_ignore_ascii_case("wait") {
            return None;
        }
        seconds.trim().trim_matches('"').parse().ok().map(Duration::from_secs)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &HeaderName, values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn if_match_names_one_version_or_any() {
        let read = |text| expected(&headers(&IF_MATCH, &[text])).map_err(|problem| problem.kind.code);
        assert_eq!(read("\"3\""), Ok(Some(Expected::Version(3))));
        assert_eq!(read(" * "), Ok(Some(Expected::Any)));
        // None of these is the version of a row.
        for tag in
            ["", "W/\"3\"", "\"abc\"", "\"03\"", "\"+3\"", "\"-1\"", "\"\"", "\"99999999999999999999\""]
        {
            assert_eq!(read(tag), Ok(Some(Expected::Version(0))), "{tag}");
        }
        for text in ["3", "\"3", "\"1\", \"2\""] {
            assert_eq!(read(text), Err("malformed"), "{text}");
        }
        assert!(expected(&headers(&IF_MATCH, &["\"1\"", "\"2\""])).is_err());
        assert_eq!(expected(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn if_none_match_compares_weakly() {
        let read = |values: &[&str]| none_match(&headers(&IF_NONE_MATCH, values));
        assert!(read(&["\"1\", W/\"2\""]).unwrap().holds(2));
        assert!(read(&["\"1\"", "\"3\""]).unwrap().holds(3));
        assert!(!read(&["\"1\""]).unwrap().holds(2));
        assert!(!read(&["2"]).unwrap().holds(2));
        assert!(read(&["*"]).unwrap().holds(9));
        assert_eq!(read(&[]), None);
    }

    #[test]
    fn idempotency_keys_are_bare_or_quoted() {
        let read = |text: &str| {
            idempotency_key(&headers(&IDEMPOTENCY_KEY, &[text])).map_err(|problem| problem.kind.code)
        };
        assert_eq!(read("abc-1"), Ok(Some("abc-1".into())));
        assert_eq!(read("\"abc-1\""), Ok(Some("abc-1".into())));
        assert_eq!(read("\"a b\""), Ok(Some("a b".into())));
        assert_eq!(read("\"a\\\"b\\\\\""), Ok(Some("a\"b\\".into())));
        for text in ["", "\"", "\"a", "\"\"", "\"a\"b\"", "\"a\\x\"", "a b", &"x".repeat(256)] {
            assert_eq!(read(text), Err("malformed"), "{text}");
        }
    }

    #[test]
    fn patience_is_read_among_other_preferences() {
        let read = |text| wait_preference(&headers(&PREFER, &[text]));
        assert_eq!(read("wait=5"), Some(Duration::from_secs(5)));
        assert_eq!(read("respond-async, Wait = 5"), Some(Duration::from_secs(5)));
        assert_eq!(read("return=minimal; wait=\"7\""), Some(Duration::from_secs(7)));
        assert_eq!(read("wait=soon"), None);
        assert_eq!(read("return=minimal"), None);
    }
}
