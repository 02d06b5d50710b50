//! Numbers as text in the order of the numbers, for keys.

use statehouse_store::{Type, Value};

/// A number as text of the same order.
pub(super) fn rank(value: &Value) -> Option<String> {
    let ordered = |bits: u64| format!("{bits:016x}");
    let signed = |number: i64| number.cast_unsigned() ^ (1 << 63);
    match value {
        Value::Int(number) => Some(ordered(signed(*number))),
        Value::Time(time) => Some(ordered(signed(time.micros()))),
        Value::Float(number) => {
            let bits = number.to_bits();
            Some(ordered(if bits >> 63 == 0 { bits ^ (1 << 63) } else { !bits }))
        }
        _ => None,
    }
}

/// A number from such text.
pub(super) fn unranked(rank: &str, kind: Type) -> Option<Value> {
    let bits = u64::from_str_radix(rank, 16).ok()?;
    let signed = (bits ^ (1 << 63)).cast_signed();
    Some(match kind {
        Type::Int => signed.into(),
        Type::Time => statehouse_store::Time::from_micros(signed).into(),
        Type::Float => Value::Float(f64::from_bits(if bits >> 63 == 1 { bits ^ (1 << 63) } else { !bits })),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_order_of_their_numbers() {
        let ints = [i64::MIN, -5, -1, 0, 1, 7, i64::MAX].map(Value::Int);
        let floats = [f64::MIN, -1.5, -0.25, 0.0, 0.25, 1.5, f64::MAX].map(Value::Float);
        for (values, kind) in [(ints, Type::Int), (floats, Type::Float)] {
            let ranks: Vec<String> = values.iter().map(|value| rank(value).unwrap()).collect();
            assert!(ranks.is_sorted() && ranks.iter().collect::<std::collections::BTreeSet<_>>().len() == 7);
            for (rank, value) in ranks.iter().zip(&values) {
                assert_eq!(unranked(rank, kind).as_ref(), Some(value));
            }
        }
        assert_eq!(rank(&"text".into()), None);
    }
}
