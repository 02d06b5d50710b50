//! Several new posts in one plan, with the rows of all their readers: what most of a log is, and most of a build.
//!
//! What is read for them is read at once: their entries, which must not be there, and the counts of their authors' followers.
//! The followers themselves are listed once and remembered. So is how many they were: how many posts will fit is known before
//! anything is read for them, and no more are read than that.
//!
//! A post without an entry has no rows either, because they are made with it or after it. So the rows are inserted: an engine
//! need not look whether they are there.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::{Address, Consistency, Row, Step, Tenant, Value};

use super::PUSH;
use super::fan_out::{FanOutContext, ShownPost};
use crate::infra::log::{HandlerContext, HandlerError};
use crate::infra::projection::{FanOutBatch, SourceChange, entry_step};
use crate::product::listing::{ListItem, ShardedCount, together};
use crate::resource::key_text;

/// Steps of a plan for several posts; one more is the group's progress.
const STEPS_MAX: usize = 98;
/// Steps that each post has besides those of its readers: its entry, and its place in its author's list.
const STEPS_EACH: usize = 2;
/// Followers that are remembered at most, of all authors together.
const REMEMBERED_MAX: usize = 100_000;
/// Authors at most of whom it is remembered how many followers they have.
const COUNTED_MAX: usize = 50_000;

/// The followers of authors, as they were listed. Each follow and unfollow changes a part of the author's count, whose
/// versions never come back: while the count is what it was before the list was read, so is the list.
#[derive(Debug, Default)]
pub(super) struct FollowerCache(Mutex<CachedFollowers>);

#[derive(Debug, Default)]
struct CachedFollowers {
    /// By tenant and author.
    followers: HashMap<(Tenant, String), ListedFollowers>,
    items: usize,
    /// How many they were when they were last counted.
    counts: HashMap<(Tenant, String), usize>,
}

/// Followers, and the count's stamp before they were listed.
type ListedFollowers = (Vec<i64>, Arc<Vec<ListItem>>);

impl FollowerCache {
    /// The followers at a count that was read just now, if they were listed at the same.
    fn at(&self, tenant: &Tenant, author: &Value, shards: &ShardedCount) -> Option<Arc<Vec<ListItem>>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (stamp, items) = known.followers.get(&(tenant.clone(), key_text([author])))?;
        (*stamp == shards.stamp()).then(|| items.clone())
    }

    /// Keeps followers that were listed after this count was read.
    fn keep(&self, tenant: &Tenant, author: &Value, shards: &ShardedCount, items: &Arc<Vec<ListItem>>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.items + items.len() > REMEMBERED_MAX {
            known.followers.clear();
            known.items = 0;
        }
        known.items += items.len() + 1;
        let key = (tenant.clone(), key_text([author]));
        if let Some((_, before)) = known.followers.insert(key, (shards.stamp(), items.clone())) {
            known.items = known.items.saturating_sub(before.len() + 1);
        }
    }

    /// How many followers an author had the last time that they were counted.
    fn expected(&self, tenant: &Tenant, author: &Value) -> Option<usize> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.counts.get(&(tenant.clone(), key_text([author]))).copied()
    }

    /// Notes how many followers an author has.
    pub(super) fn counted(&self, tenant: &Tenant, author: &Value, shards: &ShardedCount) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.counts.len() >= COUNTED_MAX {
            known.counts.clear();
        }
        let count = usize::try_from(shards.sum()).unwrap_or(0);
        known.counts.insert((tenant.clone(), key_text([author])), count);
    }
}

/// How many more posts may fit into a plan, as far as is known before anything is read for them.
pub(super) struct PlanCapacity<'d, 'f> {
    cx: &'d FanOutContext<'f>,
    authors: HashSet<String>,
    left: usize,
}

impl<'d, 'f> PlanCapacity<'d, 'f> {
    pub(super) fn of(cx: &'d FanOutContext<'f>) -> PlanCapacity<'d, 'f> {
        PlanCapacity { cx, authors: HashSet::new(), left: STEPS_MAX }
    }

    /// Whether there is room for one more; if so, it is taken. Of an author who was never met, there is for the post alone.
    pub(super) fn takes(&mut self, shown: &ShownPost) -> bool {
        let FanOutContext { feed, reading, .. } = *self.cx;
        let followers = feed.remembered.expected(reading.tenant, &shown.author).unwrap_or(0);
        let is_met = !self.authors.insert(key_text([&shown.author]));
        let demand = if is_met { 0 } else { feed.relation.inward.shards() };
        let needed = STEPS_EACH + demand + followers;
        let fits = needed <= self.left;
        self.left = self.left.saturating_sub(needed);
        fits
    }
}

/// Those who get the posts of an author.
struct Audience<'p> {
    author: &'p Value,
    shards: ShardedCount,
}

impl FanOutContext<'_> {
    /// The plan of as many of the first of these posts as are new, are pushed, and fit into it with the rows of all their
    /// readers, under the demand that no follower is added or removed (F2). That a post has no entry yet says also that nothing is
    /// under way for it (F4): work is made with an entry, and the entry stays.
    pub(super) async fn bundle(
        &self,
        posts: &[(SourceChange, ShownPost)],
    ) -> Result<Option<FanOutBatch>, HandlerError> {
        let (new, audiences) = self.surveyed(posts).await?;
        let (mut fitting, mut met, mut room) = (0, 0, STEPS_MAX);
        for (_, shown) in posts.iter().take(new) {
            let Some(number) = audiences.iter().position(|one| *one.author == shown.author) else { break };
            let Some(Audience { shards, .. }) = audiences.get(number) else { break };
            let followers = usize::try_from(shards.sum()).unwrap_or(0);
            // The demand on an author's count is made once.
            let demand = if number < met { 0 } else { shards.parts() };
            let needed = STEPS_EACH + demand + followers;
            if shards.sum() > self.feed.pull_above || needed > room {
                break;
            }
            (fitting, met, room) = (fitting + 1, met.max(number + 1), room - needed);
        }
        let audiences: Vec<Audience<'_>> = audiences.into_iter().take(met).collect();
        let followers = self.all_followers(&audiences).await?;
        let mut bundle = FanOutBatch::default();
        let mut met = 0;
        for (change, shown) in posts.iter().take(fitting) {
            let Some(number) = audiences.iter().position(|one| *one.author == shown.author) else { break };
            let (Some(audience), Some(Some(items))) = (audiences.get(number), followers.get(number)) else {
                break;
            };
            let demand = audience.shards.unchanged().take(if number < met { 0 } else { usize::MAX });
            let key = [self.generation.into(), change.source.as_str().into()];
            let entry = entry_step(&self.feed.entries, key, 0, change.order, change.content.as_ref());
            let (list, key) = self.listed(shown, PUSH);
            let own = [entry, self.enlist(Step::insert(list, key), shown, change.order)].into_iter();
            let rows = items.iter().filter_map(|item| self.deliver(item, shown));
            let steps: Vec<Step> = demand.chain(own).chain(rows).collect();
            if bundle.steps.len() + steps.len() > STEPS_MAX {
                break;
            }
            bundle.steps.extend(steps);
            bundle.taken += 1;
            met = met.max(number + 1);
        }
        Ok((bundle.taken > 0).then_some(bundle))
    }

    /// How many of the first of these posts are new, and their authors, in the order in which they are met, with the counts of
    /// their followers. Counts are read before followers are: what comes between the two is refused as well.
    async fn surveyed<'p>(
        &self,
        posts: &'p [(SourceChange, ShownPost)],
    ) -> Result<(usize, Vec<Audience<'p>>), HandlerError> {
        let (feed, HandlerContext { store, tenant, .. }) = (self.feed, *self.reading);
        let mut addresses = Vec::new();
        for (change, _) in posts {
            let key = self.key([change.source.as_str().into()]);
            addresses.push(Address::new(&feed.entries, tenant, key)?);
        }
        let mut authors: Vec<(&'p Value, usize)> = Vec::new();
        for (_, shown) in posts {
            if authors.iter().all(|(author, _)| **author != shown.author) {
                let parts = feed.relation.inward.parts(tenant, std::slice::from_ref(&shown.author))?;
                authors.push((&shown.author, parts.len()));
                addresses.extend(parts);
            }
        }
        if addresses.is_empty() {
            return Ok((0, Vec::new()));
        }
        let rows = store.get(&addresses, Consistency::Strong).await?;
        let mut read: std::vec::IntoIter<(Address, Option<Row>)> =
            addresses.into_iter().zip(rows).collect::<Vec<_>>().into_iter();
        let entries: Vec<Option<Row>> = read.by_ref().take(posts.len()).map(|(_, row)| row).collect();
        let new = entries.iter().take_while(|entry| entry.is_none()).count();
        let mut audiences = Vec::with_capacity(authors.len());
        for (author, parts) in authors {
            let shards = ShardedCount::of(read.by_ref().take(parts))?;
            feed.remembered.counted(tenant, author, &shards);
            audiences.push(Audience { author, shards });
        }
        Ok((new, audiences))
    }

    /// The followers of each author; none where they are more than a plan takes.
    async fn all_followers(
        &self,
        audiences: &[Audience<'_>],
    ) -> Result<Vec<Option<Arc<Vec<ListItem>>>>, HandlerError> {
        let tenant = self.reading.tenant;
        let reads: Vec<Pin<Box<dyn Future<Output = _> + Send + '_>>> = audiences
            .iter()
            .map(|Audience { author, shards }| {
                Box::pin(async move {
                    if let Some(known) = self.feed.remembered.at(tenant, author, shards) {
                        return Ok(Some(known));
                    }
                    let (items, next) = self.followers(author, STEPS_MAX, None).await?;
                    if next.is_some() {
                        return Ok(None);
                    }
                    let items = Arc::new(items);
                    self.feed.remembered.keep(tenant, author, shards, &items);
                    Ok(Some(items))
                }) as _
            })
            .collect();
        together(reads).await.into_iter().collect()
    }
}
