//! The only place where chance enters: seeded, so that what happened can happen again.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::clock::Clock;

/// A sequence of numbers that a seed determines (SplitMix64). Not for secrets.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    pub fn seeded(seed: u64) -> Random {
        Random(seed)
    }

    /// An unpredictable sequence.
    #[expect(clippy::disallowed_methods, reason = "this is the random module")]
    pub fn from_entropy() -> Random {
        let mut seed = [0; 8];
        // Without entropy the ids of two processes could collide; an address at least differs between runs.
        if getrandom::fill(&mut seed).is_err() {
            seed = (std::ptr::from_ref(&seed) as usize as u64).to_le_bytes();
        }
        Random(u64::from_le_bytes(seed))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        // The product's high half is even enough for any `end` far below 2^64.
        ((u128::from(self.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// A number from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// One of these; `None` if there are none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(usize::try_from(self.below(items.len() as u64)).unwrap_or(0))
    }

    /// An independent sequence, determined by this one.
    pub fn fork(&mut self) -> Random {
        Random(self.next_u64())
    }
}

/// Why there is no secret: the operating system gave no entropy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the operating system gave no random bytes: {why}")]
pub struct NoEntropy {
    /// What it said.
    pub why: String,
}

/// Bytes for secrets, from the operating system. There is no way to do without: where there is no entropy there is no
/// secret.
#[expect(clippy::disallowed_methods, reason = "this is the random module")]
pub fn secret_bytes<const N: usize>() -> Result<[u8; N], NoEntropy> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| NoEntropy { why: error.to_string() })?;
    Ok(bytes)
}

/// A source of unique ids that sort by the time of their making (UUID version 7).
#[derive(Clone)]
pub struct Ids {
    clock: Arc<dyn Clock>,
    random: Arc<Mutex<Random>>,
}

impl Ids {
    /// Ids by this clock and this chance.
    pub fn new(clock: Arc<dyn Clock>, random: Random) -> Ids {
        Ids { clock, random: Arc::new(Mutex::new(random)) }
    }

    /// A new id.
    pub fn next(&self) -> String {
        let millis = u64::try_from(self.clock.now().micros() / 1_000).unwrap_or(0);
        let mut bytes = [0; 10];
        {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            for byte in &mut bytes {
                *byte = random.below(256) as u8;
            }
        }
        uuid::Builder::from_unix_timestamp_millis(millis, &bytes).into_uuid().to_string()
    }
}

impl fmt::Debug for Ids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ids")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_the_sequence() {
        let draw = |seed| {
            let mut random = Random::seeded(seed);
            (0..8).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn secrets_differ() {
        assert_ne!(secret_bytes::<32>().unwrap(), secret_bytes::<32>().unwrap());
    }

    #[test]
    fn ids_sort_by_time_and_differ() {
        let clock = crate::clock::ManualClock::at(crate::Time::from_millis(1_700_000_000_000));
        let ids = Ids::new(Arc::new(clock.clone()), Random::seeded(1));
        let (first, second) = (ids.next(), ids.next());
        clock.advance(std::time::Duration::from_millis(1));
        let third = ids.next();
        assert_ne!(first, second);
        assert!(first < third && second < third);
    }
}
