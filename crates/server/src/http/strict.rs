//! Strict JSON: no duplicate members, no integers beyond 64 bits.
//!
//! Parsers disagree about `{"amount": 1, "amount": 1000}`: a gateway may check the first value and a server use the last.
//! Such a body is rejected. An integer beyond 64 bits would be rounded to a float, which is another number; it is rejected
//! too.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value as Json};

/// Parses a document.
pub fn read(text: &str) -> Result<Json, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let is_large = Cell::new(false);
    let json = StrictJson { is_large: &is_large }.deserialize(&mut reader)?;
    reader.end()?;
    match large_integer(text).filter(|_| is_large.get()) {
        None => Ok(json),
        Some(digits) => {
            let shown = digits.get(..SHOWN_MAX).map_or(digits.to_owned(), |lead| format!("{lead}…"));
            Err(serde_json::Error::custom(format_args!("the integer {shown} does not fit 64 bits")))
        }
    }
}

/// Digits of a number shown in a message.
const SHOWN_MAX: usize = 40;

/// The first integer in a JSON text that does not fit 64 bits.
fn large_integer(text: &str) -> Option<&str> {
    let (mut rest, mut in_text) = (text, false);
    while let Some(index) = rest.find(|c: char| c == '"' || c == '\\' || c == '-' || c.is_ascii_digit()) {
        let (_, here) = rest.split_at(index);
        let length = match (here.as_bytes().first(), in_text) {
            (Some(b'"'), _) => {
                in_text = !in_text;
                1
            }
            // An escaped quote does not end a string.
            (Some(b'\\'), _) => 1 + here.chars().nth(1).map_or(0, char::len_utf8),
            (_, true) => 1,
            (_, false) => {
                let is_part = |c: char| c.is_ascii_digit() || ['-', '+', '.', 'e', 'E'].contains(&c);
                let end = here.find(|c| !is_part(c)).unwrap_or(here.len());
                let number = here.get(..end).unwrap_or(here);
                let is_integer = !number.contains(['.', 'e', 'E']);
                if is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                    return Some(number);
                }
                end.max(1)
            }
        };
        rest = here.get(length..).unwrap_or_default();
    }
    None
}

/// Visitor for a value and everything in it.
#[derive(Clone, Copy)]
struct StrictJson<'c> {
    /// Whether a number is so large that it may have been an integer beyond 64 bits.
    is_large: &'c Cell<bool>,
}

impl<'de> DeserializeSeed<'de> for StrictJson<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Json, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictJson<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        const TWO_63: f64 = 9_223_372_036_854_775_808.0;
        if value.abs() >= TWO_63 {
            self.is_large.set(true);
        }
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Json::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Json, A::Error> {
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!("duplicate member `{name}`")));
            }
            object.insert(name, members.next_value_seed(self)?);
        }
        Ok(Json::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_what_any_reader_reads() {
        for text in [
            "null",
            "true",
            "-1",
            "18446744073709551615",
            "1.5e3",
            "0.1",
            "\"a\\u00e9\\n\"",
            "[]",
            "[1,[2,{}]]",
            "{\"a\":{\"b\":[null,false]},\"c\":\"\"}",
            " {} ",
        ] {
            assert_eq!(read(text).unwrap(), serde_json::from_str::<Json>(text).unwrap(), "{text}");
        }
        for text in ["", "{", "[1,]", "{\"a\":1,}", "1 2", "nan", "'a'", "{a:1}", &"[".repeat(200)] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_is_there_once() {
        let twice = read(r#"{"a": {"b": 1, "c": [{"d": 1, "\u0064": 2}]}}"#).unwrap_err().to_string();
        assert!(twice.contains("duplicate member `d`"), "{twice}");
        assert!(read(r#"{"a": {"a": 1}, "b": {"a": 1}}"#).is_ok());
    }

    #[test]
    fn an_integer_fits_64_bits_or_is_refused() {
        for text in [
            "18446744073709551616",
            "-9223372036854775809",
            r#"{"a": [1, {"b": 123456789012345678901234567890}]}"#,
            r#"["\"", "\\", 99999999999999999999]"#,
        ] {
            let told = read(text).unwrap_err().to_string();
            assert!(told.contains("does not fit 64 bits"), "{text}: {told}");
        }
        let long = read(&"7".repeat(300)).unwrap_err().to_string();
        assert!(long.len() < 120, "{long}");
        for text in [
            "18446744073709551615",
            "-9223372036854775808",
            "1e30",
            "123456789012345678901234567890.0",
            r#""99999999999999999999""#,
            r#"{"99999999999999999999": 1e300, "a\"99999999999999999999": "\\"}"#,
        ] {
            assert!(read(text).is_ok(), "{text}");
        }
    }
}
