//! The work that is left for a version of a post, and where posts are shown.

use super::*;

/// What is going on with a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PostPhase {
    /// Readers lose it at the place where it was.
    Retract,
    /// Readers get it, and lose it at the place where it was, if it is by the same author.
    Deliver,
    /// Readers are told to look into the author's list.
    Link,
}

impl PostPhase {
    pub(super) const ALL: [PostPhase; 3] = [PostPhase::Retract, PostPhase::Deliver, PostPhase::Link];

    pub(super) fn name(self) -> &'static str {
        match self {
            PostPhase::Retract => "TAKE",
            PostPhase::Deliver => "GIVE",
            PostPhase::Link => "POINT",
        }
    }
}

/// A post where it is shown.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::product::feed) struct ShownPost {
    pub post: Value,
    pub author: Value,
    pub at: Time,
    pub preview: Value,
}

impl ShownPost {
    pub(super) fn of(content: Option<&EntryContent>) -> Option<ShownPost> {
        let content = content?;
        let at = content.get(CREATED_AT).and_then(Value::as_time)?;
        let (post, author) = (content.get(POST)?.clone(), content.get(AUTHOR)?.clone());
        Some(ShownPost { post, author, at, preview: content.get(PREVIEW).cloned().unwrap_or(Value::Null) })
    }

    pub(super) fn is_at(&self, place: &PostLocation) -> bool {
        self.author == place.author && self.at == place.at
    }
}

/// Where a post is, or was.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PostLocation {
    pub(super) author: Value,
    pub(super) at: Time,
}

/// What is left to do for a version of a post.
#[derive(Clone, Debug)]
pub(super) struct PostWork {
    pub(super) post: Value,
    pub(super) order: i64,
    pub(super) phase: PostPhase,
    pub(super) cursor: Option<String>,
    /// Where readers had it before.
    pub(super) was: Option<PostLocation>,
}

impl PostWork {
    pub(super) fn of(row: &Row) -> Result<PostWork, StoreError> {
        let phase = row.get_text(PHASE)?;
        let phase = PostPhase::ALL.into_iter().find(|known| known.name() == phase);
        let was_at = row.get_optional_time(WAS_AT)?;
        let was = was_at.zip(row.get(WAS_AUTHOR).filter(|author| !author.is_null()));
        Ok(PostWork {
            post: post_in(row)?.clone(),
            order: row.get_int(SOURCE_ORDER)?,
            phase: phase.ok_or_else(|| row.corrupt(PHASE, "is not a phase"))?,
            cursor: row.get_optional_text(CURSOR)?.map(str::to_owned),
            was: was.map(|(at, author)| PostLocation { author: author.clone(), at }),
        })
    }

    pub(super) fn written(&self, step: Step) -> Step {
        let null = || Value::Null;
        let (author, at) = match &self.was {
            Some(was) => (was.author.clone(), was.at.into()),
            None => (null(), null()),
        };
        step.set(POST, self.post.clone())
            .set(SOURCE_ORDER, self.order)
            .set(PHASE, self.phase.name())
            .set(CURSOR, self.cursor.as_deref().map_or_else(null, Value::from))
            .set(WAS_AUTHOR, author)
            .set(WAS_AT, at)
    }

    /// The author whose followers it goes to.
    pub(super) fn author<'w>(&'w self, shown: Option<&'w ShownPost>) -> Option<&'w Value> {
        match self.phase {
            PostPhase::Retract => self.was.as_ref().map(|was| &was.author),
            PostPhase::Deliver | PostPhase::Link => shown.map(|shown| &shown.author),
        }
    }

    /// Steps for each reader, besides the one that demands the edge.
    pub(super) fn steps_each(&self) -> usize {
        1 + usize::from(self.phase == PostPhase::Deliver && self.was.is_some())
    }
}
