//! Work for the readers of a post that several plans do (F4).

use super::*;

impl FanOutContext<'_> {
    /// The next piece of work that is under way (F4).
    pub(super) async fn resume(
        &self,
        entry: &ProjectionEntry,
        row: &Row,
    ) -> Result<FanOutStep, HandlerError> {
        let feed = self.feed;
        let same = || column(SOURCE_ORDER).eq(entry.order);
        let done = || Step::delete(&feed.work, row.key().to_vec()).guard(same());
        let shown = ShownPost::of(entry.content.as_ref());
        let work = PostWork::of(row)?;
        let Some(author) = work.author(shown.as_ref()).cloned() else {
            return Ok(FanOutStep::last(vec![done()]));
        };
        if work.phase == PostPhase::Link && self.is_full(&author).await? {
            return Ok(FanOutStep::last(vec![done()]));
        }
        // One more step for each reader demands the edge. A retraction goes to all listed readers.
        let each = work.steps_each() + usize::from(work.phase != PostPhase::Retract);
        let (items, next) = self.followers(&author, STEPS_MAX / each, work.cursor.as_deref()).await?;
        let mut steps = Vec::new();
        for item in &items {
            let for_reader = self.steps_for(item, &work, shown.as_ref());
            if work.phase != PostPhase::Retract && !for_reader.is_empty() {
                steps.push(self.follows(item, &author));
            }
            steps.extend(for_reader);
        }
        let then = match next {
            Some(cursor) => Some(PostWork { cursor: Some(cursor.to_string()), ..work }),
            None => self.after(&work, shown.as_ref(), &mut steps).await?,
        };
        let is_last = then.is_none();
        steps.push(match then {
            None => done(),
            Some(then) => {
                let step = Step::update(&feed.work, row.key().to_vec());
                // A piece that was passed would take the work back; the last one has nothing behind it.
                then.written(step.guard(Guard::version(row.version())).guard(same()))
            }
        });
        Ok(FanOutStep { steps, is_last })
    }

    /// What comes after a phase is done.
    async fn after(
        &self,
        work: &PostWork,
        shown: Option<&ShownPost>,
        steps: &mut Vec<Step>,
    ) -> Result<Option<PostWork>, HandlerError> {
        let Some(shown) = shown else { return Ok(None) };
        match work.phase {
            PostPhase::Deliver => Ok(None),
            PostPhase::Link => {
                let key = self.key([shown.author.clone()]);
                steps.push(Step::upsert(&self.feed.authors, key).set(STATE, FULL));
                Ok(None)
            }
            PostPhase::Retract => {
                let [pushed, pulled] = self.get([self.listed(shown, PUSH), self.listed(shown, PULL)]).await?;
                let (post, order) = (work.post.clone(), work.order);
                if pushed.is_some() {
                    return Ok(Some(PostWork {
                        post,
                        order,
                        phase: PostPhase::Deliver,
                        cursor: None,
                        was: None,
                    }));
                }
                if pulled.is_some() { self.link(shown, post, order, steps).await } else { Ok(None) }
            }
        }
    }
}
