//! Values that engines get wrong, in ascending order, and tables with a column of every type.
//!
//! Each ladder holds the traps of its type. Text: UTF-16 code units order U+1D11E before U+FFFD, UTF-8 the other way
//! round; locales order `B` behind `a` and fold `é`. Ints: 2^53 and 2^53 + 1 are one float; 9 and 10 are the
//! wrong way round as text. Bytes: 0x80 is negative as a signed char. Times: before 1970 is negative.

use std::sync::Arc;

use anyhow::Result;
use serde_json::json;
use statehouse_store::table::TableBuilder;
use statehouse_store::{Table, Time, Type, Value};

/// The types that have an order.
pub(crate) fn ordered_types() -> impl Iterator<Item = Type> {
    Type::ALL.into_iter().filter(|kind| kind.is_ordered())
}

/// Values of a type, each greater than the one before. JSON, which has no order, gives documents in any order.
pub(crate) fn ladder(kind: Type) -> Vec<Value> {
    fn values<T: Into<Value>>(list: impl IntoIterator<Item = T>) -> Vec<Value> {
        list.into_iter().map(Into::into).collect()
    }
    match kind {
        Type::Text => values([
            "",
            "\u{1}",
            " ",
            "#",
            "10",
            "9",
            "B",
            "a",
            "a ",
            "ab",
            "a\u{300}",
            "z'\"\\%_",
            "é",
            "中",
            "\u{fffd}",
            "\u{1d11e}",
        ]),
        Type::Int => values([
            i64::MIN,
            i64::MIN + 1,
            -(1 << 53) - 1,
            -10,
            -9,
            -1,
            0,
            1,
            9,
            10,
            1 << 53,
            (1 << 53) + 1,
            i64::MAX - 1,
            i64::MAX,
        ]),
        Type::Float => values([
            -9.9e125,
            -1e15,
            -10.5,
            -9.25,
            -1e-9,
            -1e-130,
            0.0,
            1e-130,
            1e-129,
            0.1,
            0.1 + 0.2,
            9.0,
            10.0,
            1.7e18,
            1e21,
            9.9e125,
        ]),
        Type::Bool => values([false, true]),
        Type::Bytes => values([
            vec![],
            vec![0],
            vec![0, 0],
            vec![0, 1],
            vec![1],
            vec![0x61],
            vec![0x61, 0],
            vec![0x7f],
            vec![0x80],
            vec![0xfe, 0xff],
            vec![0xff],
            vec![0xff, 0],
            vec![0xff, 0xff],
        ]),
        Type::Time => values([
            Time::MIN,
            Time::from_micros(-62_135_596_799_999_999),
            Time::from_micros(-1_000_001),
            Time::from_micros(-1_000_000),
            Time::from_micros(-1),
            Time::from_micros(0),
            Time::from_micros(1),
            Time::from_micros(999_999),
            Time::from_micros(1_000_000),
            Time::from_micros(1_700_000_000_123_456),
            Time::from_micros(1_700_000_000_123_457),
            Time::MAX,
        ]),
        Type::Json => values([
            json!(false),
            json!(0),
            json!(""),
            json!([]),
            json!({}),
            json!("it's \"quoted\" \\ \u{1d11e} \u{1}"),
            json!([null, true, -1, 0.5, 1e100, i64::MIN, u64::MAX, "x"]),
            json!({"b": {"c": [1, {"d": null}]}, "": "empty name", "a.b": 1, "é": "中", "$x": "$y"}),
        ]),
    }
}

/// A value of the ladder, going round when it is at its end.
pub(crate) fn sample(kind: Type, index: usize) -> Value {
    let ladder = ladder(kind);
    ladder[index % ladder.len()].clone()
}

/// The longest ladder has this many values.
pub(crate) fn longest_ladder() -> usize {
    Type::ALL.into_iter().map(|kind| ladder(kind).len()).max().unwrap_or(0)
}

/// A table with a key `id` and two optional columns of every type: `text` and `other_text`, and so on.
pub(crate) fn of_every_type(name: &str) -> TableBuilder {
    Type::ALL.into_iter().fold(Table::named(name).partition("id", Type::Int), |table, kind| {
        table.optional(kind.name(), kind).optional(&other(kind), kind)
    })
}

/// The name of the second column of a type.
pub(crate) fn other(kind: Type) -> String {
    format!("other_{kind}")
}

/// Counters: a key `id` of text, and `n`, which begins at 0.
pub(crate) fn counters(name: &str) -> Result<Arc<Table>> {
    Ok(Table::named(name).partition("id", Type::Text).defaulted("n", Type::Int, 0).build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ladders_ascend() {
        for kind in ordered_types() {
            for pair in ladder(kind).windows(2) {
                assert_eq!(pair[0].compare(&pair[1]), Some(std::cmp::Ordering::Less), "{pair:?}");
            }
        }
    }

    #[test]
    fn every_rung_is_already_in_the_form_in_which_it_is_stored() {
        for kind in Type::ALL {
            for value in ladder(kind) {
                assert_eq!(value.clone().admitted(kind), Ok(value));
            }
        }
    }
}
