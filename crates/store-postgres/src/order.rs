//! The one order in which rows are locked: by table, tenant and key, everywhere the same.
//!
//! A row's place is written as octets whose order is that of the rows, so that it can be sorted and looked up as it
//! is. Two processes that take their locks in this order cannot wait for each other in a circle.

use statehouse_store::{Tenant, Value};

/// The place of a row among all rows of all tables. Where a batch knows a table by several definitions, which is
/// rare, their rows are kept apart; if that ever leads to a deadlock, the server breaks it.
pub(crate) fn place(table: &str, definition: usize, tenant: &Tenant, key: &[Value]) -> Vec<u8> {
    let mut out = Vec::with_capacity(table.len() + tenant.as_str().len() + 4 + 9 * key.len());
    push_text(table, &mut out);
    out.extend_from_slice(&u16::try_from(definition).unwrap_or(u16::MAX).to_be_bytes());
    push_text(tenant.as_str(), &mut out);
    for value in key {
        push(value, &mut out);
    }
    out
}

/// No text holds U+0000, so that it can end with one and still sort before every longer text.
fn push_text(text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(text.as_bytes());
    out.push(0);
}

fn push(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Text(text) => push_text(text, out),
        Value::Int(int) => push_int(*int, out),
        Value::Time(time) => push_int(time.micros(), out),
        Value::Bool(bool) => out.push(u8::from(*bool)),
        Value::Float(float) => {
            let bits = float.to_bits();
            // Negative floats sort backwards by their bits, positive ones forwards.
            let sign = 1 << 63;
            out.extend_from_slice(&(if bits & sign == 0 { bits | sign } else { !bits }).to_be_bytes());
        }
        Value::Bytes(bytes) => {
            for byte in bytes {
                out.push(*byte);
                if *byte == 0 {
                    out.push(255);
                }
            }
            out.extend_from_slice(&[0, 0]);
        }
        // These stand in no key.
        Value::Null | Value::Json(_) => {}
    }
}

fn push_int(int: i64, out: &mut Vec<u8>) {
    out.extend_from_slice(&(int.cast_unsigned() ^ (1 << 63)).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Ordering;

    #[test]
    fn places_sort_as_their_values_do() {
        let tenant = Tenant::new("t").unwrap();
        let lists: [Vec<Value>; 4] = [
            ["", "a", "a\u{1}", "aa", "b", "é"].map(Value::from).to_vec(),
            [i64::MIN, -1, 0, 1, i64::MAX].map(Value::from).to_vec(),
            [-9e125, -1.5, -1e-130, 0.0, 1e-130, 0.1, 1.5, 9e125].map(Value::from).to_vec(),
            [vec![], vec![0], vec![0, 0], vec![0, 1], vec![1], vec![255]].map(Value::from).to_vec(),
        ];
        for list in lists {
            for a in &list {
                for b in &list {
                    for tail in [Value::from(false), Value::from(true)] {
                        let left = place("x", 0, &tenant, &[a.clone(), Value::from(true)]);
                        let right = place("x", 0, &tenant, &[b.clone(), tail.clone()]);
                        let expected = a
                            .compare(b)
                            .unwrap()
                            .then(Value::from(true).compare(&tail).unwrap_or(Ordering::Equal));
                        assert_eq!(left.cmp(&right), expected, "{a} {b} {tail}");
                    }
                }
            }
        }
    }
}
