//! Keys as readable text that sorts as the values do.
//!
//! A key is a list of parts, each followed by `#`: `acme#ann#2026-01-31T12:00:00.000000Z#`. DynamoDB orders text by its
//! bytes. The order of the lists is kept under three conditions: each part sorts as its value does; no part contains
//! a character up to `#`; and a part that is a prefix of another sorts first, because `#` is below every character that can
//! follow. In text, the characters up to `$` are therefore escaped, in their order, as `$` and one letter (a space is
//! `$_`). A key grows to at most twice its length.
//!
//! With this encoding every range of a query is one closed interval of text. No stored key ends in `$`, so the upper bound of
//! all keys with a prefix is the prefix with its last `#` replaced by `$`.

use std::ops::Bound;

use statehouse_store::read::Direction;
use statehouse_store::{Query, Time, Type, Value};

/// Ends a part of a key.
const END: char = '#';
/// Begins an escaped character, and is the least character that a part can hold.
const ESCAPE: char = '$';
/// Moves the characters up to [`ESCAPE`] to printable ones, so that a space becomes `_`.
const ESCAPE_SHIFT: u32 = 0x3f;
/// Negative numbers are written as this minus their magnitude, so that they sort by their digits.
const COMPLEMENT: u128 = 10_000_000_000_000_000_000;
/// Digits of the longest integer.
const DIGITS: usize = 19;

/// The key of a list of values. Nulls do not occur in keys and are written as empty text.
pub(crate) fn encode<'v>(values: impl IntoIterator<Item = &'v Value>) -> String {
    let mut text = String::new();
    for value in values {
        push(&mut text, value);
        text.push(END);
    }
    text
}

/// The key of a tenant's values.
pub(crate) fn encode_for<'v>(tenant: &str, values: impl IntoIterator<Item = &'v Value>) -> String {
    format!("{tenant}{END}{}", encode(values))
}

/// An integer as a part of a key.
pub(crate) fn int(value: i64) -> String {
    match u128::try_from(value) {
        Ok(value) => format!("{value:0DIGITS$}"),
        Err(_) => format!("-{:0DIGITS$}", COMPLEMENT - u128::from(value.unsigned_abs())),
    }
}

/// Parses the text of [`int`].
pub(crate) fn parse_int(text: &str) -> Option<i64> {
    match text.strip_prefix('-') {
        None => text.parse().ok(),
        Some(digits) => {
            let magnitude = COMPLEMENT.checked_sub(digits.parse().ok()?)?;
            i64::try_from(-i128::try_from(magnitude).ok()?).ok()
        }
    }
}

fn push(text: &mut String, value: &Value) {
    match value {
        Value::Null | Value::Json(_) => {}
        Value::Text(content) => {
            for c in content.chars() {
                match char::from_u32(u32::from(c) + ESCAPE_SHIFT) {
                    Some(shifted) if c <= ESCAPE => text.extend([ESCAPE, shifted]),
                    _ => text.push(c),
                }
            }
        }
        Value::Int(content) => text.push_str(&int(*content)),
        // The bits of positive floats sort as the floats do, those of negative ones in reverse.
        Value::Float(content) => {
            let bits = content.to_bits();
            let ordered = if bits >> 63 == 0 { bits | 1 << 63 } else { !bits };
            text.push_str(&format!("{ordered:016x}"));
        }
        Value::Bool(content) => text.push_str(if *content { "true" } else { "false" }),
        Value::Bytes(content) => content.iter().for_each(|byte| text.push_str(&format!("{byte:02x}"))),
        Value::Time(content) => text.push_str(&content.to_string()),
    }
}

/// Splits a key into its tenant and the rest.
pub(crate) fn split_tenant(key: &str) -> Option<(&str, &str)> {
    key.split_once(END)
}

/// Parses the text of [`encode`].
pub(crate) fn decode(key: &str, kinds: impl IntoIterator<Item = Type>) -> Option<Vec<Value>> {
    let mut rest = key;
    let mut values = Vec::new();
    for kind in kinds {
        let (part, after) = rest.split_once(END)?;
        values.push(parse(part, kind)?);
        rest = after;
    }
    rest.is_empty().then_some(values)
}

fn parse(part: &str, kind: Type) -> Option<Value> {
    Some(match kind {
        Type::Text => {
            let mut text = String::with_capacity(part.len());
            let mut letters = part.chars();
            while let Some(c) = letters.next() {
                text.push(if c == ESCAPE {
                    char::from_u32(u32::from(letters.next()?).checked_sub(ESCAPE_SHIFT)?)?
                } else {
                    c
                });
            }
            Value::Text(text)
        }
        Type::Int => Value::Int(parse_int(part)?),
        Type::Float => {
            let ordered = u64::from_str_radix(part, 16).ok()?;
            let bits = if ordered >> 63 == 1 { ordered & !(1 << 63) } else { !ordered };
            Value::Float(f64::from_bits(bits))
        }
        Type::Bool => Value::Bool(part.parse().ok()?),
        Type::Bytes => {
            let digits: Vec<u32> = part.chars().map(|c| c.to_digit(16)).collect::<Option<_>>()?;
            let pairs = digits.chunks(2).map(|pair| match pair {
                [high, low] => u8::try_from(high * 16 + low).ok(),
                _ => None,
            });
            Value::Bytes(pairs.collect::<Option<_>>()?)
        }
        Type::Time => Value::Time(part.parse::<Time>().ok()?),
        Type::Json => return None,
    })
}

/// The smallest text above every key with this prefix.
fn after_all(key: &str) -> String {
    match key.strip_suffix(END) {
        Some(open) => format!("{open}{ESCAPE}"),
        None => format!("{key}{ESCAPE}"),
    }
}

/// The greatest text below every key with this prefix, among keys of the same columns.
fn before_all(key: &str) -> String {
    key.strip_suffix(END).unwrap_or(key).to_owned()
}

/// The closed interval of sort keys of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SortKeyRange {
    /// The whole partition.
    Whole,
    /// From this one on.
    From(String),
    /// From the first to the second.
    Between(String, String),
    /// The interval is empty.
    Empty,
}

/// The sort keys that a query has not read yet.
pub(crate) fn range(query: &Query) -> SortKeyRange {
    let prefix = encode(query.prefix_values());
    let with = |value: &Value| format!("{prefix}{}", encode([value]));
    let (lower, upper) = query.bounds();
    let mut low = match lower {
        Bound::Unbounded => prefix.clone(),
        Bound::Included(value) => with(value),
        Bound::Excluded(value) => after_all(&with(value)),
    };
    let mut high = match upper {
        Bound::Unbounded if prefix.is_empty() => None,
        Bound::Unbounded => Some(after_all(&prefix)),
        Bound::Included(value) => Some(after_all(&with(value))),
        Bound::Excluded(value) => Some(before_all(&with(value))),
    };
    if let Some(cursor) = query.cursor_values() {
        let at = encode(cursor);
        if at.is_empty() {
            // A table without sort columns has one row in a partition, and the cursor is after it.
            return SortKeyRange::Empty;
        }
        match query.direction() {
            Direction::Forward => low = low.max(after_all(&at)),
            Direction::Backward => {
                let below = before_all(&at);
                high = Some(high.map_or(below.clone(), |high| high.min(below)));
            }
        }
    }
    match high {
        None if low.is_empty() => SortKeyRange::Whole,
        None => SortKeyRange::From(low),
        // DynamoDB rejects an empty text, and every key is above it.
        Some(high) if high.is_empty() || low > high => SortKeyRange::Empty,
        Some(high) if low.is_empty() => SortKeyRange::Between(END.to_string(), high),
        Some(high) => SortKeyRange::Between(low, high),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use statehouse_store::{Table, Tenant};
    use std::cmp::Ordering;

    const KINDS: [Type; 6] = [Type::Text, Type::Int, Type::Float, Type::Bool, Type::Bytes, Type::Time];

    fn any_value(kind: Type) -> BoxedStrategy<Value> {
        match kind {
            Type::Text => prop_oneof![
                "[ -&#$a-c\u{1}-\u{3}]{0,4}",
                any::<String>().prop_map(|text| text.replace('\0', "")),
            ]
            .prop_map(Value::Text)
            .boxed(),
            Type::Int => prop_oneof![-3..4_i64, any::<i64>()].prop_map(Value::Int).boxed(),
            Type::Float => prop_oneof![Just(0.0), -2.0..2.0_f64, -1e120..1e120_f64]
                .prop_map(|float| Value::Float(float).admitted(Type::Float).unwrap_or(Value::Float(0.0)))
                .boxed(),
            Type::Bool => any::<bool>().prop_map(Value::Bool).boxed(),
            Type::Bytes => proptest::collection::vec(prop_oneof![0..2_u8, any::<u8>()], 0..4)
                .prop_map(Value::Bytes)
                .boxed(),
            Type::Time | Type::Json => (Time::MIN.micros()..=Time::MAX.micros())
                .prop_map(|micros| Value::Time(Time::from_micros(micros)))
                .boxed(),
        }
    }

    fn any_pair() -> impl Strategy<Value = (Vec<Type>, Vec<Value>, Vec<Value>)> {
        proptest::collection::vec(0..KINDS.len(), 1..4).prop_flat_map(|places| {
            let kinds: Vec<Type> = places.into_iter().map(|index| KINDS[index]).collect();
            let list = || kinds.iter().map(|kind| any_value(*kind)).collect::<Vec<_>>();
            let (left, right) = (list(), list());
            (Just(kinds), left, right)
        })
    }

    fn order(left: &[Value], right: &[Value]) -> Ordering {
        let mut orders = left.iter().zip(right).map(|(a, b)| a.compare(b).unwrap());
        orders.find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    }

    proptest! {
        #[test]
        fn keys_sort_as_their_values_and_read_back((kinds, left, right) in any_pair()) {
            let (a, b) = (encode(&left), encode(&right));
            prop_assert_eq!(a.as_bytes().cmp(b.as_bytes()), order(&left, &right), "{:?} {:?}", a, b);
            prop_assert_eq!(decode(&a, kinds), Some(left));
        }

        #[test]
        fn a_key_grows_to_twice_its_weight_at_most((_, values, _) in any_pair()) {
            let weight: usize = values.iter().map(|value| match value {
                Value::Bytes(bytes) => bytes.len() * 2 + 1,
                other => other.weight().max(5) + 1,
            }).sum();
            prop_assert!(encode(&values).len() <= 2 * weight);
        }

        #[test]
        fn ranges_hold_what_their_bounds_say(
            values in proptest::collection::vec(("[ #$ab]{0,2}", -2..3_i64), 0..12),
            prefix in proptest::option::of("[ #$ab]{0,2}"),
            bounds in (0..3_u8, 0..3_u8),
            cursor in proptest::option::of(("[ #$ab]{0,2}", -2..3_i64)),
            limits in ("[ #$ab]{0,2}", "[ #$ab]{0,2}", -2..3_i64, -2..3_i64),
            backward: bool,
        ) {
            let table = Table::named("t").partition("p", Type::Int).sort("a", Type::Text).sort("b", Type::Int);
            let table = table.build().unwrap();
            let tenant = Tenant::new("acme").unwrap();
            let mut query = Query::table(&table, &tenant, [1.into()]).unwrap();
            let (lower, upper): (Value, Value) = match &prefix {
                Some(prefix) => {
                    query = query.prefix([prefix.as_str().into()]).unwrap();
                    (limits.2.into(), limits.3.into())
                }
                None => (limits.0.as_str().into(), limits.1.as_str().into()),
            };
            query = match bounds.0 { 0 => query, 1 => query.from(lower.clone()).unwrap(), _ => query.above(lower.clone()).unwrap() };
            query = match bounds.1 { 0 => query, 1 => query.to(upper.clone()).unwrap(), _ => query.below(upper.clone()).unwrap() };
            if backward { query = query.backward(); }
            let row = |(a, b): &(String, i64)| vec![Value::from(a.as_str()), Value::Int(*b)];
            if let Some(cursor) = &cursor {
                let values = [vec![Value::Int(1)], row(cursor)].concat();
                let at = statehouse_store::Row::new(table.clone(), tenant.clone(), values, 1);
                query = query.clone().after(query.cursor_at(&at)).unwrap();
            }
            let range = range(&query);
            for value in &values {
                let sort = row(value);
                let next = if prefix.is_some() { &sort[1] } else { &sort[0] };
                let expected = prefix.as_ref().is_none_or(|prefix| *prefix == value.0)
                    && match bounds.0 { 0 => true, 1 => next.compare(&lower).unwrap().is_ge(), _ => next.compare(&lower).unwrap().is_gt() }
                    && match bounds.1 { 0 => true, 1 => next.compare(&upper).unwrap().is_le(), _ => next.compare(&upper).unwrap().is_lt() }
                    && cursor.as_ref().is_none_or(|cursor| {
                        let order = order(&sort, &row(cursor));
                        if backward { order.is_lt() } else { order.is_gt() }
                    });
                let key = encode(&sort);
                let found = match &range {
                    SortKeyRange::Whole => true,
                    SortKeyRange::From(low) => *low <= key,
                    SortKeyRange::Empty => false,
                    SortKeyRange::Between(low, high) => *low <= key && key <= *high,
                };
                prop_assert_eq!(found, expected, "{:?} in {:?}", key, range);
            }
        }
    }

    #[test]
    fn keys_can_be_read_by_people() {
        let key = encode_for("acme", [&Value::from("Ann Lee"), &Value::Int(42), &Value::Int(-1)]);
        assert_eq!(key, "acme#Ann$_Lee#0000000000000000042#-9999999999999999999#");
        for value in [i64::MIN, -1, 0, 1, i64::MAX] {
            assert_eq!(parse_int(&int(value)), Some(value));
        }
    }
}
