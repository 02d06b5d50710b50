//! Keys and queries of a URL, percent-decoded exactly once.
//!
//! A path is split before it is decoded, so an encoded slash is part of a key. The decoded text is the key's parts,
//! separated by commas; within a part `%2C` stands for a comma and `%25` for a percent sign. A client that encodes path
//! parameters as usual, including commas, works; only a comma *within* a part is encoded twice.

use serde_json::{Map, Value as Json};
use statehouse::Resource;
use statehouse::form::Property;
use statehouse_store::{Type, Value};

use crate::problem::{INVALID_INPUT, MALFORMED, Problem};

/// The path segments as sent.
pub fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').skip(1)
}

/// Parses the key in a path segment.
pub fn key(resource: &Resource, segment: &str) -> Result<Vec<Value>, Problem> {
    Ok(resource.parse_key(&decoded(segment, false)?)?)
}

/// Key text ([`statehouse::resource::key_text`]) as a path segment.
pub fn segment(key_text: &str) -> String {
    encoded(key_text, b"-._~,:@")
}

/// Text as a query parameter value.
pub fn parameter(text: &str) -> String {
    encoded(text, b"-._~")
}

fn encoded(text: &str, plain: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Percent-decodes a text once.
pub fn decoded(text: &str, plus_is_space: bool) -> Result<String, Problem> {
    let is_encoded = text.contains('%') || (plus_is_space && text.contains('+'));
    if !is_encoded {
        return Ok(text.to_owned());
    }
    let bad = || {
        Problem::new(MALFORMED, "the URL is not percent-encoded correctly: % needs two hexadecimal digits")
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16)).ok_or_else(bad);
                let (high, low) = (digit()?, digit()?);
                bytes.push(u8::try_from(high * 16 + low).unwrap_or_default());
            }
            b'+' if plus_is_space => bytes.push(b' '),
            other => bytes.push(other),
        }
    }
    String::from_utf8(bytes).map_err(|_| Problem::new(MALFORMED, "the decoded URL is not UTF-8"))
}

/// Maximum number of query parameters. It also bounds the search for repeated names.
const PARAMETERS_MAX: usize = 64;

/// Names and values of a query. Rejects a repeated name.
pub fn pairs(query: Option<&str>) -> Result<Vec<(String, String)>, Problem> {
    pairs_up_to(PARAMETERS_MAX, query)
}

/// Names and values of a query or of a form in a web page, so many at most. Rejects a repeated name.
pub fn pairs_up_to(max: usize, query: Option<&str>) -> Result<Vec<(String, String)>, Problem> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for part in query.unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
        if pairs.len() == max {
            let detail = format!("the query has more than {max} parameters");
            return Err(Problem::new(MALFORMED, detail));
        }
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let (name, value) = (decoded(name, true)?, decoded(value, true)?);
        if pairs.iter().any(|(other, _)| *other == name) {
            return Err(at(&name, "given twice"));
        }
        pairs.push((name, value));
    }
    Ok(pairs)
}

/// A problem with one query parameter.
pub fn at(name: &str, detail: &str) -> Problem {
    let pointer = format!("/{}", name.replace('~', "~0").replace('/', "~1"));
    let mut problem = Problem::new(INVALID_INPUT, format!("{pointer}: {detail}"));
    problem.errors.push((pointer, detail.to_owned()));
    problem
}

/// The input in a query, converted to the JSON types of the form. Values that do not convert stay text, so that
/// validation reports them.
pub fn input(query: Option<&str>, form: &[Property]) -> Result<Map<String, Json>, Problem> {
    let typed = |(name, text): (String, String)| {
        let property = form.iter().find(|property| property.name == name);
        let plain = match property.and_then(|property| property.form.kind()) {
            Some(Type::Int | Type::Float | Type::Bool | Type::Json) => serde_json::from_str(&text).ok(),
            _ => None,
        };
        (name, plain.unwrap_or(Json::String(text)))
    };
    Ok(pairs(query)?.into_iter().map(typed).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_decoded_once() {
        assert_eq!(decoded("a%2Cb%252F+", false).unwrap(), "a,b%2F+");
        assert_eq!(decoded("a+b", true).unwrap(), "a b");
        for text in ["%", "%2", "%zz", "%+1", "%ff"] {
            assert!(decoded(text, false).is_err(), "{text}");
        }
    }

    #[test]
    fn a_query_names_each_parameter_once() {
        assert_eq!(pairs(Some("a=1&b=x%20y&&c")).unwrap().len(), 3);
        assert!(pairs(Some("a=1&%61=2")).is_err());
        assert_eq!(pairs(None).unwrap(), []);
    }

    #[test]
    fn segments_survive_the_way_there_and_back() {
        for text in ["plain", "a%2Cb,c", "x%25y", "sl/ash", "ümlaut", "q?u#e"] {
            let there = segment(text);
            assert!(!there.contains(['/', '?', '#', ' ']));
            assert_eq!(decoded(&there, false).unwrap(), text);
        }
    }
}
