//! Which generations a projection has: one row of the house, and the pure transitions of it.

use std::sync::Arc;

use statehouse_store::guard::now;
use statehouse_store::{Guard, Row, SchemaError, Step, StoreError, Table, Type, Value};

/// The table.
pub const PROJECTIONS: &str = "house_projections";
const NAME: &str = "name";
pub(super) const LIVE: &str = "live";
const PREVIOUS: &str = "previous";
const BUILDING: &str = "building";
const NEWEST: &str = "newest";
const DROPPING: &str = "dropping";
const LIVE_DEFINITION: &str = "live_definition";
const PREVIOUS_DEFINITION: &str = "previous_definition";
const BUILDING_DEFINITION: &str = "building_definition";
const PHASE: &str = "phase";
const CURSOR: &str = "cursor";
const SCANNED: &str = "scanned";
const VERIFIED: &str = "verified";
const DIGEST: &str = "digest";
const UPDATED_AT: &str = "updated_at";

/// How far a build has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildPhase {
    /// The source is being scanned.
    Scanning,
    /// The scan is done; what was written meanwhile is read from the log.
    CatchingUp,
    /// It has caught up, and its entries are not those of the source. It is not switched to.
    Differs,
}

impl BuildPhase {
    /// As it is stored.
    pub fn name(self) -> &'static str {
        match self {
            BuildPhase::Scanning => "SCANNING",
            BuildPhase::CatchingUp => "CATCHING_UP",
            BuildPhase::Differs => "DIFFERS",
        }
    }

    fn parse(name: &str) -> Option<BuildPhase> {
        [BuildPhase::Scanning, BuildPhase::CatchingUp, BuildPhase::Differs]
            .into_iter()
            .find(|phase| phase.name() == name)
    }
}

/// The declaration of the table.
pub fn projections_table() -> Result<Arc<Table>, SchemaError> {
    Table::named(PROJECTIONS)
        .partition(NAME, Type::Text)
        .optional(LIVE, Type::Int)
        .optional(PREVIOUS, Type::Int)
        .optional(BUILDING, Type::Int)
        .required(NEWEST, Type::Int)
        .optional(DROPPING, Type::Int)
        .optional(LIVE_DEFINITION, Type::Text)
        .optional(PREVIOUS_DEFINITION, Type::Text)
        .optional(BUILDING_DEFINITION, Type::Text)
        .optional(PHASE, Type::Text)
        .optional(CURSOR, Type::Text)
        .defaulted(SCANNED, Type::Int, 0)
        .optional(VERIFIED, Type::Bool)
        .optional(DIGEST, Type::Text)
        .required(UPDATED_AT, Type::Time)
        .build()
}

/// A generation, and what it was made by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Its number.
    pub number: i64,
    /// The definition of the projector that fills it.
    pub definition: String,
}

/// A generation that is being filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationBuild {
    /// Which.
    pub generation: Generation,
    /// How far it has got.
    pub phase: BuildPhase,
    /// Where the scan goes on; `None` for the beginning.
    pub cursor: Option<String>,
}

/// Which generations a projection has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProjectionState {
    /// What readers read.
    pub live: Option<Generation>,
    /// What they read before, kept up to date to go back to.
    pub previous: Option<Generation>,
    /// What they will read.
    pub building: Option<GenerationBuild>,
    /// The highest number that was given out.
    pub newest: i64,
    /// A generation that is being deleted.
    pub dropping: Option<i64>,
    /// Source rows that the last build has scanned.
    pub scanned: i64,
    /// Whether the last build was seen to be equal to the source; `None` if the source did not stand still.
    pub verified: Option<bool>,
    /// The digest of the last build's entries.
    pub digest: Option<String>,
    /// The row's version; 0 if there is none.
    pub version: i64,
}

impl ProjectionState {
    pub(super) fn of(row: Option<&Row>) -> Result<ProjectionState, StoreError> {
        let Some(row) = row else { return Ok(ProjectionState::default()) };
        let text = |name: &str| Ok::<_, StoreError>(row.get_optional_text(name)?.map(str::to_owned));
        let generation = |number: &str, definition: &str| {
            let Some(number) = row.get_optional_int(number)? else { return Ok::<_, StoreError>(None) };
            Ok(Some(Generation { number, definition: row.get_text(definition)?.to_owned() }))
        };
        let building = match generation(BUILDING, BUILDING_DEFINITION)? {
            Some(generation) => {
                let phase = BuildPhase::parse(row.get_text(PHASE)?);
                let phase = phase.ok_or_else(|| row.corrupt(PHASE, "is not a phase"))?;
                Some(GenerationBuild { generation, phase, cursor: text(CURSOR)? })
            }
            None => None,
        };
        Ok(ProjectionState {
            live: generation(LIVE, LIVE_DEFINITION)?,
            previous: generation(PREVIOUS, PREVIOUS_DEFINITION)?,
            building,
            newest: row.get_int(NEWEST)?,
            dropping: row.get_optional_int(DROPPING)?,
            scanned: row.get_int(SCANNED)?,
            verified: row.get_optional_bool(VERIFIED)?,
            digest: text(DIGEST)?,
            version: row.version(),
        })
    }

    /// The step to what comes after this state, under the version that was read (I5).
    pub(super) fn step_to(&self, after: &ProjectionState, name: &str, table: &Arc<Table>) -> Step {
        let key = [Value::from(name)];
        let step = match self.version {
            0 => Step::insert(table, key),
            version => Step::update(table, key).guard(Guard::version(version)),
        };
        let number = |of: &Option<Generation>| of.as_ref().map_or(Value::Null, |one| one.number.into());
        let definition =
            |of: &Option<Generation>| of.as_ref().map_or(Value::Null, |one| one.definition.as_str().into());
        let text = |of: Option<&str>| of.map_or(Value::Null, Value::from);
        let building = after.building.as_ref().map(|building| building.generation.clone());
        step.set(LIVE, number(&after.live))
            .set(LIVE_DEFINITION, definition(&after.live))
            .set(PREVIOUS, number(&after.previous))
            .set(PREVIOUS_DEFINITION, definition(&after.previous))
            .set(BUILDING, number(&building))
            .set(BUILDING_DEFINITION, definition(&building))
            .set(PHASE, text(after.building.as_ref().map(|building| building.phase.name())))
            .set(CURSOR, text(after.building.as_ref().and_then(|building| building.cursor.as_deref())))
            .set(NEWEST, after.newest)
            .set(DROPPING, after.dropping.map_or(Value::Null, Value::from))
            .set(SCANNED, after.scanned)
            .set(VERIFIED, after.verified.map_or(Value::Null, Value::from))
            .set(DIGEST, text(after.digest.as_deref()))
            .set(UPDATED_AT, now())
    }

    /// Begins to build a generation. `None` while one is being built, or deleted.
    pub(super) fn begun(&self, definition: String) -> Option<ProjectionState> {
        let is_free = match &self.building {
            None => true,
            // One that differs, or that another definition began, is given up for the new one.
            Some(building) => {
                building.phase == BuildPhase::Differs || building.generation.definition != definition
            }
        };
        if !is_free || self.dropping.is_some() {
            return None;
        }
        let number = self.newest + 1;
        let generation = Generation { number, definition };
        Some(ProjectionState {
            building: Some(GenerationBuild { generation, phase: BuildPhase::Scanning, cursor: None }),
            newest: number,
            dropping: self.building.as_ref().map(|building| building.generation.number),
            scanned: 0,
            verified: None,
            digest: None,
            ..self.clone()
        })
    }

    /// A page of the scan is done; without a cursor it was the last (I6).
    pub(super) fn scanned_to(&self, rows: i64, cursor: Option<String>) -> ProjectionState {
        let mut after = self.clone();
        after.scanned += rows;
        if let Some(building) = &mut after.building {
            building.phase = if cursor.is_some() { BuildPhase::Scanning } else { BuildPhase::CatchingUp };
            building.cursor = cursor;
        }
        after
    }

    /// The build was compared with the source. If nothing was written meanwhile and they differ, it is not switched to.
    pub(super) fn switched(&self, verified: Option<bool>, digest: String) -> Option<ProjectionState> {
        let building = self.building.clone()?;
        let mut after = ProjectionState { verified, digest: Some(digest), ..self.clone() };
        if verified == Some(false) {
            after.building = Some(GenerationBuild { phase: BuildPhase::Differs, ..building });
            return Some(after);
        }
        // Only one is kept to go back to; the one before it is deleted first.
        if self.dropping.is_some() {
            return None;
        }
        after.dropping = self.previous.as_ref().map(|previous| previous.number);
        after.previous = self.live.clone();
        after.live = Some(building.generation);
        after.building = None;
        Some(after)
    }

    /// Readers go back to the generation before, which was kept up to date.
    pub(super) fn rolled_back(&self) -> Option<ProjectionState> {
        let previous = self.previous.clone()?;
        Some(ProjectionState { live: Some(previous), previous: self.live.clone(), ..self.clone() })
    }

    /// The generation before is no longer wanted.
    pub(super) fn dropping_previous(&self) -> Option<ProjectionState> {
        let previous = self.previous.as_ref().filter(|_| self.dropping.is_none())?;
        Some(ProjectionState { dropping: Some(previous.number), previous: None, ..self.clone() })
    }

    /// Generations are lost, with their tables or with columns of them: readers have none of them any more, and what is left of
    /// them is deleted (I8). `None` if there is no such generation.
    pub(super) fn without(&self, is_lost: impl Fn(&Generation) -> bool) -> Option<ProjectionState> {
        let all = [self.live.as_ref(), self.previous.as_ref(), self.building_generation()];
        let lost = all.into_iter().flatten().filter(|generation| is_lost(generation));
        let newest_lost = lost.map(|generation| generation.number).max()?;
        let kept = |generation: &Generation| !is_lost(generation);
        Some(ProjectionState {
            live: self.live.clone().filter(kept),
            previous: self.previous.clone().filter(kept),
            building: self.building.clone().filter(|building| kept(&building.generation)),
            dropping: self.dropping.or(Some(newest_lost)),
            verified: None,
            digest: None,
            ..self.clone()
        })
    }

    fn building_generation(&self) -> Option<&Generation> {
        self.building.as_ref().map(|building| &building.generation)
    }

    /// Whether nothing of a generation is needed any more, nor ever will be. Those that are begun after this state was read have
    /// numbers above [`ProjectionState::newest`].
    pub(super) fn is_over(&self, generation: i64) -> bool {
        let kept = [self.live.as_ref(), self.previous.as_ref(), self.building_generation()];
        let is_kept = kept.into_iter().flatten().any(|kept| kept.number == generation);
        generation <= self.newest && !is_kept
    }

    /// Everything of the generation that was to be deleted is.
    pub(super) fn dropped(&self) -> ProjectionState {
        ProjectionState { dropping: None, ..self.clone() }
    }

    /// The generations that a projector of this definition fills.
    pub(super) fn filled_by(&self, definition: &str) -> Vec<i64> {
        let all = [self.live.as_ref(), self.previous.as_ref(), self.building_generation()];
        let own = all.into_iter().flatten().filter(|generation| generation.definition == definition);
        own.map(|generation| generation.number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(state: &ProjectionState) -> ProjectionState {
        let scanned = state.scanned_to(3, Some("x".into())).scanned_to(2, None);
        assert_eq!(scanned.building.as_ref().map(|building| building.phase), Some(BuildPhase::CatchingUp));
        scanned.switched(Some(true), "d".into()).unwrap()
    }

    #[test]
    fn generations_come_and_go() {
        let first = ProjectionState::default().begun("a".into()).unwrap();
        assert_eq!(first.begun("a".into()), None, "one is being built");
        assert_eq!(first.filled_by("a"), [1]);
        let first = built(&first);
        assert_eq!((first.live.as_ref().unwrap().number, first.scanned, first.rolled_back()), (1, 5, None));
        let second = built(&first.begun("b".into()).unwrap());
        assert_eq!(second.live.as_ref().unwrap().number, 2);
        assert_eq!((second.filled_by("a"), second.filled_by("b")), (vec![1], vec![2]));
        let back = second.rolled_back().unwrap();
        assert_eq!((back.live.as_ref().unwrap().number, back.previous.as_ref().unwrap().number), (1, 2));
        // One more switch, and the oldest is deleted before anything new begins.
        let third = built(&second.begun("b".into()).unwrap());
        assert_eq!((third.dropping, third.previous.as_ref().unwrap().number), (Some(1), 2));
        assert_eq!(third.begun("c".into()), None);
        assert!(third.dropped().begun("c".into()).is_some());
        assert_eq!(third.dropped().dropping_previous().unwrap().dropping, Some(2));
    }

    #[test]
    fn what_is_lost_is_given_up() {
        let two =
            built(&built(&ProjectionState::default().begun("a".into()).unwrap()).begun("b".into()).unwrap());
        let three = two.begun("b".into()).unwrap();
        let none = three.without(|_| true).unwrap();
        assert_eq!((&none.live, &none.previous, &none.building), (&None, &None, &None));
        assert_eq!((none.dropping, none.newest, none.verified), (Some(3), 3, None));
        assert!((1..=3).all(|number| none.is_over(number)) && !none.is_over(4));
        assert_eq!(none.begun("a".into()), None, "what is lost is deleted first");
        assert_eq!(none.dropped().begun("a".into()).unwrap().newest, 4);
        let other = three.without(|generation| generation.definition == "b").unwrap();
        assert_eq!((other.previous.as_ref().map(|one| one.number), &other.live), (Some(1), &None));
        assert!(!other.is_over(1) && other.is_over(2) && other.is_over(3));
        assert_eq!(three.without(|generation| generation.definition == "c"), None);
    }

    #[test]
    fn a_build_that_differs_is_not_switched_to() {
        let state = built(&ProjectionState::default().begun("a".into()).unwrap());
        let bad = state.begun("a".into()).unwrap().scanned_to(1, None);
        let bad = bad.switched(Some(false), "e".into()).unwrap();
        assert_eq!(bad.live.as_ref().unwrap().number, 1);
        let again = bad.begun("a".into()).unwrap();
        assert_eq!((again.building.as_ref().unwrap().generation.number, again.dropping), (3, Some(2)));
    }
}
