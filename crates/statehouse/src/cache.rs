//! A bounded cache of answers to reads of one row, kept honest by the log.
//!
//! A cached read may be a little old, never wrong for good, and never older than the caller's own writes:
//!
//! - C1. *Whatever was written is thrown out.* The follower ([`crate::follow`]) reads the log and discards what each record is about. It is
//!   the only way in which an entry becomes invalid; writers do not touch the cache, so a write of another process
//!   counts as much as one of this.
//! - C2. *No stale insert.* A reader that misses takes a [`Ticket`] with its stripe's generation, reads the store, and
//!   may only insert while the generation is the same. Discarding raises the generation, whether or not there was an
//!   entry: a row that was read before a write and arrives after its discarding stays outside.
//! - C3. *Reads your writes.* A write returns a [`ReadToken`]: its place in the log, or several if it is in several partitions. A cached read that brings a token the
//!   follower has not reached goes to the store instead. Where an engine gives out places only after the commit, the
//!   token has none, and goes to the store always.
//! - C4. *Bounded age.* If the follower has not confirmed for [`AGE_MAX`] that it has seen the whole log, or does not
//!   run, the cache answers nothing. If it lost its place because the log was trimmed, everything is thrown out.
//! - C5. *Bounded size.* Each stripe discards what was used longest ago when it outgrows its share.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Position, Record, Tenant, Time};

use crate::action::Answer;
use crate::house::subject_of;

/// How long the cache answers without a word from its follower.
pub const AGE_MAX: Duration = Duration::from_secs(5);
/// What a cache holds, unless it is told otherwise.
pub const BYTES_DEFAULT: usize = 32 << 20;

/// Locks, and generations. More of them let more readers pass each other, and let fewer inserts fail for a write to
/// another row.
const STRIPES: usize = 64;
/// What an entry costs besides its content.
const ENTRY_BYTES: usize = 200;

/// A caller's write, as a later read names it: where the write stands in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadToken {
    /// Here.
    At(Position),
    /// The engine did not say where.
    Unplaced,
}

impl ReadToken {
    /// The tokens of a write that left this record: one for each partition it is in.
    pub fn of(record: &Record) -> Vec<ReadToken> {
        match record.position {
            None => vec![ReadToken::Unplaced],
            Some(position) => record.also_at.iter().copied().chain([position]).map(ReadToken::At).collect(),
        }
    }

    /// The same as text, as [`ReadToken::parse_list`] reads it.
    pub fn text_of(record: &Record) -> String {
        ReadToken::of(record).iter().map(ReadToken::to_string).collect::<Vec<_>>().join(",")
    }

    /// Several tokens with commas between them.
    pub fn parse_list(text: &str) -> Option<Vec<ReadToken>> {
        text.split(',').map(|part| part.trim().parse().ok()).collect()
    }
}

impl fmt::Display for ReadToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadToken::At(Position { partition, offset }) => write!(f, "w{partition}-{offset}"),
            ReadToken::Unplaced => f.write_str("w"),
        }
    }
}

/// The text is not a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not a token that a write returned")]
pub struct BadToken;

impl FromStr for ReadToken {
    type Err = BadToken;

    fn from_str(text: &str) -> Result<ReadToken, BadToken> {
        let place = text.strip_prefix('w').ok_or(BadToken)?;
        if place.is_empty() {
            return Ok(ReadToken::Unplaced);
        }
        let (partition, offset) = place.split_once('-').ok_or(BadToken)?;
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(partition) || !digits(offset) {
            return Err(BadToken);
        }
        let partition = partition.parse().map_err(|_| BadToken)?;
        Ok(ReadToken::At(Position { partition, offset: offset.parse().map_err(|_| BadToken)? }))
    }
}

/// What the cache says to a read.
#[derive(Debug)]
pub enum Lookup {
    /// This is the answer.
    Hit(Arc<Answer>),
    /// Read the store, and hand the answer in with this.
    Miss(Ticket),
    /// Read the store; the cache cannot help, nor be helped.
    Bypass,
}

/// The right to insert what was read after it was given out, until something is discarded (C2).
#[derive(Debug)]
pub struct Ticket {
    name: String,
    stripe: usize,
    generation: u64,
}

/// How often the cache could help.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Reads that it answered.
    pub hits: u64,
    /// Reads that it could have answered, had it held the row.
    pub misses: u64,
    /// Reads that it was not allowed to answer (C3, C4).
    pub bypasses: u64,
    /// What it holds.
    pub bytes: u64,
}

/// The cache.
pub struct Cache {
    clock: Arc<dyn Clock>,
    hasher: RandomState,
    stripes: Vec<Mutex<Stripe>>,
    stripe_bytes: usize,
    /// The follower's place in each partition.
    reached: Vec<AtomicU64>,
    confirmed_micros: AtomicI64,
    runs: AtomicBool,
    hits: AtomicU64,
    misses: AtomicU64,
    bypasses: AtomicU64,
}

#[derive(Default)]
struct Stripe {
    generation: u64,
    entries: HashMap<String, CachedAnswer>,
    /// The names in the order of their last use.
    uses: BTreeMap<u64, String>,
    clock: u64,
    bytes: usize,
}

struct CachedAnswer {
    answer: Arc<Answer>,
    bytes: usize,
    used: u64,
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cache({:?})", self.figures())
    }
}

fn name_of(tenant: &Tenant, resource: &str, key: &str) -> String {
    // No tenant and no resource can hold the separator.
    format!("{tenant}\0{resource}\0{key}")
}

impl Cache {
    /// An empty cache in front of a log with so many partitions.
    pub fn holding(bytes: usize, partitions: u32, clock: Arc<dyn Clock>) -> Cache {
        Cache {
            clock,
            hasher: RandomState::new(),
            stripes: std::iter::repeat_with(Mutex::default).take(STRIPES).collect(),
            stripe_bytes: bytes / STRIPES,
            reached: (0..partitions).map(|_| AtomicU64::new(0)).collect(),
            confirmed_micros: AtomicI64::new(i64::MIN),
            runs: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            bypasses: AtomicU64::new(0),
        }
    }

    /// Looks for the answer to a read of one row, on behalf of a caller whose own writes are these.
    pub fn lookup(&self, tenant: &Tenant, resource: &str, key: &str, after: &[ReadToken]) -> Lookup {
        if !self.is_fresh() || !after.iter().all(|token| self.has_reached(*token)) {
            self.bypasses.fetch_add(1, Ordering::Relaxed);
            return Lookup::Bypass;
        }
        let name = name_of(tenant, resource, key);
        let number = self.stripe_of(&name);
        let Some(mut stripe) = self.stripe(number) else { return Lookup::Bypass };
        if let Some(answer) = stripe.touch(&name) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Lookup::Hit(answer);
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        Lookup::Miss(Ticket { name, stripe: number, generation: stripe.generation })
    }

    /// Keeps an answer that was read after its ticket was given out, unless something was discarded since (C2).
    pub fn keep(&self, ticket: Ticket, answer: &Arc<Answer>, bytes: usize) {
        let bytes = bytes + ticket.name.len() + ENTRY_BYTES;
        let Some(mut stripe) = self.stripe(ticket.stripe) else { return };
        if stripe.generation == ticket.generation && bytes <= self.stripe_bytes {
            stripe.insert(ticket.name, CachedAnswer { answer: answer.clone(), bytes, used: 0 });
            stripe.shrink(self.stripe_bytes);
        }
    }

    /// How often it could help.
    pub fn figures(&self) -> CacheStats {
        let bytes =
            (0..STRIPES).filter_map(|number| self.stripe(number)).map(|stripe| stripe.bytes).sum::<usize>();
        CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            bypasses: self.bypasses.load(Ordering::Relaxed),
            bytes: bytes as u64,
        }
    }

    fn stripe_of(&self, name: &str) -> usize {
        usize::try_from(self.hasher.hash_one(name) % STRIPES as u64).unwrap_or(0)
    }

    fn stripe(&self, number: usize) -> Option<MutexGuard<'_, Stripe>> {
        Some(self.stripes.get(number)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_fresh(&self) -> bool {
        let confirmed = Time::from_micros(self.confirmed_micros.load(Ordering::Acquire));
        self.runs.load(Ordering::Acquire) && self.clock.now().since(confirmed) <= AGE_MAX
    }

    fn has_reached(&self, token: ReadToken) -> bool {
        let ReadToken::At(Position { partition, offset }) = token else { return false };
        let reached = self.reached.get(partition as usize);
        reached.is_some_and(|reached| reached.load(Ordering::Acquire) >= offset)
    }

    fn discard(&self, tenant: &Tenant, resource: &str, key: &str) {
        let name = name_of(tenant, resource, key);
        if let Some(mut stripe) = self.stripe(self.stripe_of(&name)) {
            stripe.generation += 1;
            stripe.remove(&name);
        }
    }

    pub(crate) fn discard_all(&self) {
        for number in 0..STRIPES {
            if let Some(mut stripe) = self.stripe(number) {
                let generation = stripe.generation + 1;
                *stripe = Stripe { generation, ..Stripe::default() };
            }
        }
    }

    /// Throws out what records of the log are about (C1).
    pub(crate) fn discard_subjects(&self, records: &[Record]) {
        for record in records {
            for event in &record.events {
                if let Some((resource, key)) = subject_of(record, event) {
                    self.discard(&record.tenant, resource, key);
                }
            }
        }
    }

    /// The follower has got here (C3).
    pub(crate) fn reach(&self, partition: usize, offset: u64) {
        if let Some(reached) = self.reached.get(partition) {
            reached.store(offset, Ordering::Release);
        }
    }

    /// The follower had seen the whole log at this time (C4).
    pub(crate) fn confirm(&self, at: Time) {
        self.confirmed_micros.store(at.micros(), Ordering::Release);
        self.runs.store(true, Ordering::Release);
    }

    /// Answers nothing from now on: the follower is gone.
    pub(crate) fn stop(&self) {
        self.runs.store(false, Ordering::Release);
        self.discard_all();
    }
}

impl Stripe {
    fn touch(&mut self, name: &str) -> Option<Arc<Answer>> {
        self.clock += 1;
        let entry = self.entries.get_mut(name)?;
        if let Some(name) = self.uses.remove(&entry.used) {
            self.uses.insert(self.clock, name);
        }
        entry.used = self.clock;
        Some(entry.answer.clone())
    }

    fn insert(&mut self, name: String, mut entry: CachedAnswer) {
        self.remove(&name);
        self.clock += 1;
        entry.used = self.clock;
        self.bytes += entry.bytes;
        self.uses.insert(self.clock, name.clone());
        self.entries.insert(name, entry);
    }

    fn remove(&mut self, name: &str) {
        if let Some(entry) = self.entries.remove(name) {
            self.uses.remove(&entry.used);
            self.bytes -= entry.bytes;
        }
    }

    fn shrink(&mut self, bytes_max: usize) {
        while self.bytes > bytes_max
            && let Some((_, oldest)) = self.uses.pop_first()
        {
            self.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::follow::{Tail, follow_once};
    use serde_json::json;
    use statehouse_store::{ManualClock, ModelStore, Store as _};

    fn cache(bytes: usize) -> (Cache, ManualClock, Tenant) {
        let clock = ManualClock::at(Time::from_millis(1));
        let cache = Cache::holding(bytes, 16, Arc::new(clock.clone()));
        cache.runs.store(true, Ordering::Release);
        cache.confirmed_micros.store(clock.now().micros(), Ordering::Release);
        (cache, clock, Tenant::new("acme").unwrap())
    }

    fn answer(number: i64) -> Arc<Answer> {
        Arc::new(Answer::row(json!({"version": number})))
    }

    fn miss(cache: &Cache, tenant: &Tenant, key: &str) -> Ticket {
        match cache.lookup(tenant, "profile", key, &[]) {
            Lookup::Miss(ticket) => ticket,
            other => panic!("expected a miss, got {other:?}"),
        }
    }

    #[test]
    fn a_row_that_was_read_before_a_write_and_arrives_after_it_stays_outside() {
        let (cache, _, tenant) = cache(1 << 20);
        let early = miss(&cache, &tenant, "1");
        cache.discard(&tenant, "profile", "1");
        let late = miss(&cache, &tenant, "1");
        cache.keep(early, &answer(1), 10);
        miss(&cache, &tenant, "1");
        cache.keep(late, &answer(2), 10);
        assert!(
            matches!(cache.lookup(&tenant, "profile", "1", &[]), Lookup::Hit(hit) if hit.version == Some(2))
        );
    }

    #[test]
    fn tenants_and_resources_do_not_share_entries() {
        let (cache, _, tenant) = cache(1 << 20);
        cache.keep(miss(&cache, &tenant, "1"), &answer(1), 10);
        let other = Tenant::new("other").unwrap();
        assert!(matches!(cache.lookup(&other, "profile", "1", &[]), Lookup::Miss(_)));
        assert!(matches!(cache.lookup(&tenant, "account", "1", &[]), Lookup::Miss(_)));
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let (cache, _, tenant) = cache(STRIPES * 3 * (10 + ENTRY_BYTES + 20));
        for key in 0..1000 {
            cache.keep(miss(&cache, &tenant, &key.to_string()), &answer(1), 10);
            // The one that is used again and again stays.
            cache.lookup(&tenant, "profile", "0", &[]);
        }
        assert!(matches!(cache.lookup(&tenant, "profile", "0", &[]), Lookup::Hit(_)));
        assert!(cache.figures().bytes <= (STRIPES * 3 * (10 + ENTRY_BYTES + 20)) as u64);
        assert!(matches!(cache.lookup(&tenant, "profile", "1", &[]), Lookup::Miss(_)));
    }

    #[test]
    fn without_a_word_from_the_follower_it_answers_nothing() {
        let (cache, clock, tenant) = cache(1 << 20);
        cache.keep(miss(&cache, &tenant, "1"), &answer(1), 10);
        clock.advance(AGE_MAX + Duration::from_micros(1));
        assert!(matches!(cache.lookup(&tenant, "profile", "1", &[]), Lookup::Bypass));
    }

    #[test]
    fn tokens_that_were_not_reached_go_to_the_store() {
        let (cache, _, tenant) = cache(1 << 20);
        cache.reached[3].store(7, Ordering::Release);
        let at = |partition, offset| ReadToken::At(Position { partition, offset });
        assert!(matches!(cache.lookup(&tenant, "profile", "1", &[at(3, 7)]), Lookup::Miss(_)));
        for tokens in [vec![at(3, 8)], vec![at(99, 0)], vec![ReadToken::Unplaced], vec![at(3, 7), at(3, 8)]] {
            assert!(matches!(cache.lookup(&tenant, "profile", "1", &tokens), Lookup::Bypass), "{tokens:?}");
        }
        for token in [at(3, 7), ReadToken::Unplaced] {
            assert_eq!(token.to_string().parse(), Ok(token));
        }
        for text in ["", "3-7", "w3", "w-7", "w3-", "w+3-7", "w3-99999999999999999999"] {
            assert!(text.parse::<ReadToken>().is_err(), "{text}");
        }
        assert_eq!(ReadToken::parse_list("w3-7, w").map(|list| list.len()), Some(2));
    }

    #[tokio::test]
    async fn a_trimmed_log_empties_the_cache() {
        let store = ModelStore::new();
        let (cache, _, tenant) = cache(1 << 20);
        let (tail, mut seen) = (Tail::of(16), None);
        follow_once(&store, &*cache.clock, &cache, &tail, &mut seen).await.unwrap();
        cache.keep(miss(&cache, &tenant, "1"), &answer(1), 10);
        for operation in ["a", "b", "c"] {
            let plan = statehouse_store::Plan::of(&tenant, operation);
            let plan = plan.log(statehouse_store::Entry::about("thing", "x")).build().unwrap();
            store.commit(&plan).await.unwrap();
        }
        let partition = statehouse_store::log::partition_of(&tenant, "thing", "x", 16);
        store.trim_log(partition, 2).await.unwrap();
        follow_once(&store, &*cache.clock, &cache, &tail, &mut seen).await.unwrap();
        miss(&cache, &tenant, "1");
        assert_eq!(seen.unwrap()[partition as usize], 3);
    }
}
