//! The archetypes that are built: the one list, and what each archetype declares about itself.
//!
//! An archetype is one folder here with a constant `ARCHETYPE`, one proof folder, one page in `docs/archetypes`, and one line
//! in [`for_archetypes!`](crate::for_archetypes). What blueprints may declare, the atlas, `explain`, the tables of the README
//! and of `docs/guarantees.md`, and the list of proofs are derived from these.
//!
//! **Invariants**, checked by the tests below and in `crates/cli/tests/tidy.rs`.
//! - The code is in the atlas, and the failures and hotspots are those that the atlas lists for it, in its order.
//! - `depends_on` names archetypes of the list and has no cycle. What may refer to every table does not list them.
//! - The specimen of an archetype, together with those of the archetypes it depends on, is a blueprint without problems.

use crate::atlas::AtlasEntry;
use crate::declare::Declare;
use crate::{infra, product};

/// Calls a macro with every archetype that is built, by module: `product::booking`, in the order of the keywords. The one
/// list: this crate makes [`ARCHETYPES`] from it, the proof crate its list of proofs, and the benchmarks those of hotspots.
#[macro_export]
macro_rules! for_archetypes {
    ($callback:ident) => {
        $callback! {
            product::auction,
            product::booking,
            infra::effect,
            product::entity,
            product::feed,
            product::inventory,
            infra::lease,
            infra::log,
            infra::on,
            product::payment,
            infra::projection,
            product::relation,
            infra::scan,
            product::schedule,
            infra::sequence,
            product::thread,
            infra::timer,
            product::view,
            product::workflow,
        }
    };
}

macro_rules! list_archetypes {
    ($($kind:ident::$name:ident,)*) => {
        /// Every archetype that is built, in the order of their keywords.
        pub const ARCHETYPES: &[&Archetype] = &[$(&$kind::$name::ARCHETYPE),*];
    };
}

for_archetypes!(list_archetypes);

/// One archetype that is built.
#[derive(Clone, Copy, Debug)]
pub struct Archetype {
    /// Its code in the atlas: `A08`. Two keywords may share one.
    pub code: &'static str,
    /// The word that declares it in a blueprint, and the name of its folders and its page.
    pub keyword: &'static str,
    /// What it is for, in one line of the README.
    pub about: &'static str,
    /// Declares its resources; `None` if it is not declared in a blueprint, because other archetypes are built on it.
    pub declare: Option<DeclareFn>,
    /// Whether its rows follow from the rows of other resources.
    pub derived: bool,
    /// The archetypes whose things are declared before its own, because its own may refer to them.
    pub depends_on: Dependencies,
    /// The declaration of one thing, or of one of each kind. It may refer to the specimens of what it depends on.
    pub specimen: &'static str,
    /// What it does about each failure that the atlas lists.
    pub failures: &'static [FailureAnswer],
    /// What reduces the load on each hotspot that the atlas lists.
    pub reliefs: &'static [Relief],
}

/// The archetypes that an archetype depends on.
#[derive(Clone, Copy, Debug)]
pub enum Dependencies {
    /// Those of these keywords.
    Named(&'static [&'static str]),
    /// Every archetype whose rows do not follow from others: it may refer to any table of them.
    Tables,
    /// Every other archetype: it may refer to any resource.
    AllOthers,
}

/// Declares the resources of one thing of a blueprint. `None` if there were problems.
pub type DeclareFn = fn(&mut Declare<'_>) -> Option<()>;

/// What an archetype does about one failure.
#[derive(Clone, Copy, Debug)]
pub struct FailureAnswer {
    /// The failure, as the atlas calls it.
    pub failure: &'static str,
    /// What happens when it is provoked.
    pub answer: &'static str,
    /// The guard, row or rule that ensures it.
    pub held_by: &'static str,
}

impl FailureAnswer {
    /// The answer to a failure.
    pub const fn of(failure: &'static str, answer: &'static str, held_by: &'static str) -> FailureAnswer {
        FailureAnswer { failure, answer, held_by }
    }
}

/// What reduces the load on one hotspot.
#[derive(Clone, Copy, Debug)]
pub struct Relief {
    /// The hotspot, as the atlas calls it.
    pub hotspot: &'static str,
    /// The switch in a blueprint, a call or a store's URL.
    pub switch: &'static str,
    /// The benchmark of `cargo bench` that measures it, if there is one.
    pub bench: Option<&'static str>,
}

impl Relief {
    /// The relief of a hotspot.
    pub const fn of(hotspot: &'static str, switch: &'static str, bench: Option<&'static str>) -> Relief {
        Relief { hotspot, switch, bench }
    }
}

impl Archetype {
    /// The archetype of a keyword, if it is built.
    pub fn of(keyword: &str) -> Option<&'static Archetype> {
        ARCHETYPES.iter().copied().find(|archetype| archetype.keyword == keyword)
    }

    /// The archetypes of a code: none if it is not built.
    pub fn of_code(code: &str) -> impl Iterator<Item = &'static Archetype> {
        ARCHETYPES.iter().copied().filter(move |archetype| archetype.code == code)
    }

    /// What reduces the load on a hotspot of an entry.
    pub fn relief_of(entry: &AtlasEntry, hotspot: &str) -> Option<&'static Relief> {
        let mut reliefs = Archetype::of_code(&entry.code).flat_map(|built| built.reliefs);
        reliefs.find(|relief| relief.hotspot == hotspot)
    }

    /// Its entry in the atlas.
    pub fn entry(&self) -> Option<&'static AtlasEntry> {
        crate::atlas::archetypes().iter().find(|entry| entry.code == self.code)
    }

    /// Whether a blueprint can declare it.
    pub fn is_declarable(&self) -> bool {
        self.declare.is_some()
    }

    /// The archetypes that it depends on directly.
    pub fn dependencies(&self) -> impl Iterator<Item = &'static Archetype> + '_ {
        ARCHETYPES.iter().copied().filter(|other| match self.depends_on {
            Dependencies::Named(keywords) => keywords.contains(&other.keyword),
            Dependencies::Tables => !other.derived && matches!(other.depends_on, Dependencies::Named(_)),
            Dependencies::AllOthers => other.keyword != self.keyword,
        })
    }

    /// Its place in the order of declaration: greater than that of every archetype it depends on.
    pub(crate) fn rank(&self) -> usize {
        self.rank_below(ARCHETYPES.len())
    }

    /// The bound ends the recursion if the dependencies had a cycle, which a test refuses.
    fn rank_below(&self, bound: usize) -> usize {
        let ranks = self
            .dependencies()
            .map(|archetype| 1 + bound.checked_sub(1).map_or(0, |b| archetype.rank_below(b)));
        ranks.max().unwrap_or(0)
    }

    /// A blueprint with its specimen and all that the specimen may refer to.
    pub fn specimen_blueprint(&self) -> String {
        let needed =
            |other: &&&Archetype| other.keyword == self.keyword || self.depends_on_also(other.keyword);
        ARCHETYPES.iter().filter(needed).map(|archetype| archetype.specimen).collect()
    }

    /// Whether it depends on a keyword, directly or not.
    fn depends_on_also(&self, keyword: &str) -> bool {
        self.dependencies().any(|below| below.keyword == keyword || below.depends_on_also(keyword))
    }
}

/// A blueprint with the specimens of all archetypes.
pub fn specimens() -> String {
    ARCHETYPES.iter().map(|archetype| archetype.specimen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blueprint::Blueprint;
    use crate::resource;
    use crate::view_source::ViewSource;

    #[test]
    fn the_list_is_in_the_order_of_the_keywords() {
        assert!(ARCHETYPES.windows(2).all(|pair| pair[0].keyword < pair[1].keyword));
    }

    #[test]
    fn each_archetype_answers_what_the_atlas_lists() {
        for archetype in ARCHETYPES {
            let entry = archetype.entry().expect("the atlas has the code");
            let answered: Vec<&str> = archetype.failures.iter().map(|answer| answer.failure).collect();
            assert_eq!(answered, entry.failures, "failures of {}", archetype.keyword);
            assert!(
                archetype
                    .failures
                    .iter()
                    .all(|answer| !answer.answer.is_empty() && !answer.held_by.is_empty()),
                "{} has a failure without an answer",
                archetype.keyword
            );
            let mut relieved: Vec<&str> = archetype.reliefs.iter().map(|relief| relief.hotspot).collect();
            let mut hotspots: Vec<&str> = entry.hotspots.iter().map(String::as_str).collect();
            relieved.sort_unstable();
            hotspots.sort_unstable();
            assert_eq!(relieved, hotspots, "hotspots of {}", archetype.keyword);
        }
    }

    #[test]
    fn dependencies_are_in_the_list_and_have_no_cycle() {
        for archetype in ARCHETYPES {
            if let Dependencies::Named(keywords) = archetype.depends_on {
                for keyword in keywords {
                    assert!(Archetype::of(keyword).is_some(), "{} needs {keyword}", archetype.keyword);
                }
            }
            for below in archetype.dependencies() {
                let pair = (archetype.keyword, below.keyword);
                assert!(below.rank() < archetype.rank(), "{pair:?} form a cycle");
            }
            assert!(archetype.rank() < ARCHETYPES.len(), "{} is in a cycle", archetype.keyword);
        }
    }

    #[test]
    fn each_specimen_is_a_blueprint_by_itself() {
        for archetype in ARCHETYPES.iter().filter(|archetype| archetype.is_declarable()) {
            let blueprint = Blueprint::read("specimen", &archetype.specimen_blueprint())
                .unwrap_or_else(|problems| panic!("{}: {problems}", archetype.keyword));
            let things = blueprint.things.iter().filter(|thing| thing.keyword == archetype.keyword);
            assert!(things.count() > 0, "the specimen of {} declares none", archetype.keyword);
            let resources = resource::declare(&blueprint);
            resources.unwrap_or_else(|problems| panic!("{}: {problems}", archetype.keyword));
        }
    }

    /// A view can be of any resource whose rows the log tells of, so all of them are declared before it.
    #[test]
    fn a_view_depends_on_all_that_it_can_count() {
        let view = Archetype::of("view").expect("it is built");
        let blueprint = Blueprint::read("specimens", &specimens()).expect("the specimens fit together");
        for resource in resource::declare(&blueprint).expect("they can be declared") {
            let keyword = resource.archetype.keyword();
            let countable = matches!(resource.view_source, ViewSource::Rows(_));
            assert!(!countable || view.depends_on_also(keyword), "a view can be of a {keyword}");
        }
    }
}
