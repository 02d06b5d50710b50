//! What is proven of the atlas is complete, and what the page says about it is so.

use std::collections::BTreeSet;
use std::path::Path;

use statehouse::atlas;
use statehouse_drills::coverage;
use statehouse_drills::drill::Drill;
use statehouse_drills::proof::DRILLS;

fn drills() -> impl Iterator<Item = &'static Drill> {
    DRILLS.iter().copied().flatten()
}

/// An archetype that has drills has one for each of its failures, and no other.
#[test]
fn each_failure_has_one_drill() {
    let keywords: BTreeSet<&str> = drills().map(|drill| drill.archetype).collect();
    for keyword in keywords {
        let archetype = atlas::by_keyword(keyword).expect("the atlas has the archetype");
        let mut named: Vec<&str> =
            drills().filter(|drill| drill.archetype == keyword).map(|drill| drill.failure).collect();
        let mut expected: Vec<&str> = archetype.failures.iter().map(String::as_str).collect();
        named.sort_unstable();
        expected.sort_unstable();
        assert_eq!(named, expected, "{keyword}");
        for hotspot in &archetype.hotspots {
            assert!(coverage::switch(archetype, hotspot).is_some(), "{keyword}: what turns {hotspot} down?");
        }
    }
    assert!(
        drills().all(|drill| drill.provokes.ends_with('.')),
        "a drill says what it provokes in one sentence"
    );
}

#[test]
fn every_relief_is_of_a_hotspot_of_the_atlas() {
    let known = atlas::archetypes().iter().flat_map(|archetype| {
        archetype.hotspots.iter().filter(|hotspot| coverage::switch(archetype, hotspot).is_some())
    });
    assert_eq!(known.count(), coverage::RELIEFS.len());
}

#[test]
fn the_page_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guarantees.md");
    if std::env::var_os("STATEHOUSE_BLESS").is_some() {
        std::fs::write(&path, coverage::page()).expect("the page can be written");
    }
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        page == coverage::page(),
        "docs/guarantees.md is not what the drills say; bless it (see its head)"
    );
}
