//! The atlas: the 34 archetypes, with their states, truth, actors, failures and hotspots.
//!
//! The names here are the vocabulary of the whole house: of blueprints, drills, documentation and the command line.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::archetypes::ARCHETYPES;

/// What kind of thing an archetype is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A room that people use.
    Product,
    /// A room that other rooms stand on.
    Infra,
}

/// What the atlas says of one archetype.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AtlasEntry {
    /// `A01` to `A19`, `I01` to `I15`.
    pub code: String,
    /// Its name in full.
    pub name: String,
    /// The states it has; `X` stands for the thing's own name.
    pub states: Vec<String>,
    /// Those states that are the truth; the others can be rebuilt from them.
    pub truth: Vec<String>,
    /// Who acts on the states.
    pub actors: Vec<String>,
    /// What fails by default.
    pub failures: Vec<String>,
    /// What gets hot first.
    pub hotspots: Vec<String>,
    /// The first boxes of a design.
    pub starter_box: String,
}

impl AtlasEntry {
    /// Whether it is a product or an infrastructure archetype.
    pub fn kind(&self) -> Kind {
        if self.code.starts_with('A') { Kind::Product } else { Kind::Infra }
    }

    /// The word that declares it in a blueprint: `[entity.profile]`.
    pub fn keyword(&self) -> &'static str {
        KEYWORDS.iter().find(|(code, _)| *code == self.code).map_or("", |(_, keyword)| keyword)
    }
}

/// The words that blueprints, modules and documentation use, by code.
const KEYWORDS: [(&str, &str); 34] = [
    ("A01", "entity"),
    ("A02", "relation"),
    ("A03", "thread"),
    ("A04", "workflow"),
    ("A05", "feed"),
    ("A06", "inventory"),
    ("A07", "payment"),
    ("A08", "booking"),
    ("A09", "schedule"),
    ("A10", "frontier"),
    ("A11", "flags"),
    ("A12", "matching"),
    ("A13", "leaderboard"),
    ("A14", "channel"),
    ("A15", "search"),
    ("A16", "auction"),
    ("A17", "document"),
    ("A18", "drive"),
    ("A19", "catalog"),
    ("I01", "coordination"),
    ("I02", "lease"),
    ("I03", "timer"),
    ("I04", "scan"),
    ("I05", "log"),
    ("I06", "projection"),
    ("I07", "cache"),
    ("I08", "budget"),
    ("I09", "sequence"),
    ("I10", "presence"),
    ("I11", "snapshot"),
    ("I12", "effect"),
    ("I13", "subject"),
    ("I14", "artifact"),
    ("I15", "fleet"),
];

/// Every keyword with its code: those above, and those of archetypes that are built in several shapes.
fn all_keywords() -> impl Iterator<Item = (&'static str, &'static str)> {
    let built = ARCHETYPES.iter().map(|archetype| (archetype.code, archetype.keyword));
    KEYWORDS.into_iter().chain(built.filter(|named| !KEYWORDS.contains(named)))
}

static ATLAS: LazyLock<Vec<AtlasEntry>> = LazyLock::new(|| {
    // The file is part of the program; the test below reads it too.
    serde_json::from_str(include_str!("atlas.json")).unwrap_or_default()
});

/// All archetypes, in the order of their codes.
pub fn archetypes() -> &'static [AtlasEntry] {
    &ATLAS
}

/// The archetype that a blueprint's word declares.
pub fn by_keyword(keyword: &str) -> Option<&'static AtlasEntry> {
    let code = all_keywords().find(|(_, known)| *known == keyword).map(|(code, _)| code)?;
    archetypes().iter().find(|archetype| archetype.code == code)
}

/// All words that declare something in a blueprint.
pub fn keywords() -> impl Iterator<Item = &'static str> {
    all_keywords().map(|(_, keyword)| keyword)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_atlas_is_complete() {
        assert_eq!(archetypes().len(), 34);
        assert_eq!(archetypes().iter().map(|archetype| archetype.failures.len()).sum::<usize>(), 145);
        assert_eq!(archetypes().iter().map(|archetype| archetype.hotspots.len()).sum::<usize>(), 126);
        for archetype in archetypes() {
            assert!(!archetype.keyword().is_empty(), "{} has no keyword", archetype.code);
            assert!(
                archetype.truth.iter().all(|state| archetype.states.contains(state)),
                "{}",
                archetype.code
            );
        }
        assert_eq!(archetypes().iter().filter(|archetype| archetype.kind() == Kind::Product).count(), 19);
        assert_eq!(by_keyword("booking").unwrap().code, "A08");
    }
}
