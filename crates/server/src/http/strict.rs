//! JSON in which every member of an object has a name of its own.
//!
//! What `{"amount": 1, "amount": 1000}` means depends on who reads it. A gateway that checks the first and a server that
//! takes the last are two readers too many, so such a body is not read at all.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value as Json};

/// Reads a document.
pub fn read(text: &str) -> Result<Json, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let json = Strict.deserialize(&mut reader)?;
    reader.end()?;
    Ok(json)
}

/// A value, and the same for everything in it.
struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Json, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
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
        while let Some(item) = items.next_element_seed(Strict)? {
            list.push(item);
        }
        Ok(Json::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Json, A::Error> {
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!("the member `{name}` is there twice")));
            }
            object.insert(name, members.next_value_seed(Strict)?);
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
        assert!(twice.contains("the member `d` is there twice"), "{twice}");
        assert!(read(r#"{"a": {"a": 1}, "b": {"a": 1}}"#).is_ok());
    }
}
