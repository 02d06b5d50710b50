//! Several new posts in one plan, with the rows of all their readers: what most of a log is, and most of a build.
//!
//! What is read for them is read at once: their entries, which must not be there, and the counts of their authors' followers.
//! The followers themselves are listed once and remembered.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::{Address, Consistency, Row, Step, Tenant, Value};

use super::PUSH;
use super::fan_out::{Desk, Shown};
use crate::infra::log::{Reading, Unable};
use crate::infra::projection::{Bundle, Change, entry_step};
use crate::product::listing::{Item, Tally, together};
use crate::resource::key_text;

/// Steps of a plan for several posts; one more is the group's progress.
const STEPS_MAX: usize = 98;
/// Steps that each post has besides those of its readers: its entry, and its place in its author's list.
const STEPS_EACH: usize = 2;
/// Followers that are remembered at most, of all authors together.
const REMEMBERED_MAX: usize = 100_000;

/// The followers of authors, as they were listed. Whoever follows or unfollows changes a part of the author's count, whose
/// versions never come back: while the count is what it was before the list was read, so is the list.
#[derive(Debug, Default)]
pub(super) struct Remembered(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// By tenant and author.
    followers: HashMap<(Tenant, String), Listed>,
    items: usize,
}

/// Followers, and the count's stamp before they were listed.
type Listed = (Vec<i64>, Arc<Vec<Item>>);

impl Remembered {
    /// The followers at a count that was read just now, if they were listed at the same.
    fn at(&self, tenant: &Tenant, author: &Value, tally: &Tally) -> Option<Arc<Vec<Item>>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (stamp, items) = known.followers.get(&(tenant.clone(), key_text([author])))?;
        (*stamp == tally.stamp()).then(|| items.clone())
    }

    /// Keeps followers that were listed after this count was read.
    fn keep(&self, tenant: &Tenant, author: &Value, tally: &Tally, items: &Arc<Vec<Item>>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.items + items.len() > REMEMBERED_MAX {
            *known = Known::default();
        }
        known.items += items.len() + 1;
        let key = (tenant.clone(), key_text([author]));
        if let Some((_, before)) = known.followers.insert(key, (tally.stamp(), items.clone())) {
            known.items = known.items.saturating_sub(before.len() + 1);
        }
    }
}

/// Those who get the posts of an author.
struct Audience<'p> {
    author: &'p Value,
    tally: Tally,
}

impl Desk<'_> {
    /// The plan of as many of the first of these posts as are new, are pushed, and fit into it with the rows of all their
    /// readers, under the demand that nobody comes or goes (F2). That a post has no entry yet says also that nothing is
    /// under way for it (F4): work is made with an entry, and the entry stays.
    pub(super) async fn bundle(&self, posts: &[(Change, Shown)]) -> Result<Option<Bundle>, Unable> {
        let posts = posts.get(..posts.len().min(STEPS_MAX / STEPS_EACH)).unwrap_or_default();
        let (new, audiences) = self.surveyed(posts).await?;
        let (mut fitting, mut met, mut room) = (0, 0, STEPS_MAX);
        for (_, shown) in posts.iter().take(new) {
            let Some(number) = audiences.iter().position(|one| *one.author == shown.author) else { break };
            let Some(Audience { tally, .. }) = audiences.get(number) else { break };
            let followers = usize::try_from(tally.sum()).unwrap_or(0);
            // The demand on an author's count is made once.
            let demand = if number < met { 0 } else { tally.parts() };
            let needed = STEPS_EACH + demand + followers;
            if tally.sum() > self.feed.pull_above || needed > room {
                break;
            }
            (fitting, met, room) = (fitting + 1, met.max(number + 1), room - needed);
        }
        let audiences: Vec<Audience<'_>> = audiences.into_iter().take(met).collect();
        let followers = self.all_followers(&audiences).await?;
        let mut bundle = Bundle::default();
        let mut met = 0;
        for (change, shown) in posts.iter().take(fitting) {
            let Some(number) = audiences.iter().position(|one| *one.author == shown.author) else { break };
            let (Some(audience), Some(Some(items))) = (audiences.get(number), followers.get(number)) else {
                break;
            };
            let demand = audience.tally.unchanged().take(if number < met { 0 } else { usize::MAX });
            let key = [self.generation.into(), change.source.as_str().into()];
            let entry = entry_step(&self.feed.entries, key, 0, change.order, change.content.as_ref());
            let own = [entry, self.enlist(shown, PUSH, change.order)].into_iter();
            let rows = items.iter().filter_map(|item| self.give(item, shown));
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
    async fn surveyed<'p>(&self, posts: &'p [(Change, Shown)]) -> Result<(usize, Vec<Audience<'p>>), Unable> {
        let (feed, Reading { store, tenant, .. }) = (self.feed, *self.reading);
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
        let audience = |(author, parts): (&'p Value, usize)| Audience {
            author,
            tally: Tally::of(read.by_ref().take(parts)),
        };
        Ok((new, authors.into_iter().map(audience).collect()))
    }

    /// The followers of each author; none where they are more than a plan takes.
    async fn all_followers(&self, audiences: &[Audience<'_>]) -> Result<Vec<Option<Arc<Vec<Item>>>>, Unable> {
        let tenant = self.reading.tenant;
        let reads: Vec<Pin<Box<dyn Future<Output = _> + Send + '_>>> = audiences
            .iter()
            .map(|Audience { author, tally }| {
                Box::pin(async move {
                    if let Some(known) = self.feed.remembered.at(tenant, author, tally) {
                        return Ok(Some(known));
                    }
                    let (items, next) = self.followers(author, STEPS_MAX, None).await?;
                    if next.is_some() {
                        return Ok(None);
                    }
                    let items = Arc::new(items);
                    self.feed.remembered.keep(tenant, author, tally, &items);
                    Ok(Some(items))
                }) as _
            })
            .collect();
        together(reads).await.into_iter().collect()
    }
}
