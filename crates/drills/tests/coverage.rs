//! What is proven of the atlas is complete, and what the page says about it is so.
#![expect(clippy::expect_used, clippy::panic, reason = "helpers of tests fail by panicking, as tests do")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use statehouse::archetypes::ARCHETYPES;
use statehouse::atlas;
use statehouse_drills::coverage;
use statehouse_drills::harness::machine_docs::machine_section;
use statehouse_drills::proof::{self, PROOFS};

/// An archetype that has drills has one for each of its failures, and no other.
#[test]
fn each_failure_has_one_drill() {
    let keywords: BTreeSet<&str> = proof::drills().map(|drill| drill.archetype).collect();
    for keyword in keywords {
        let archetype = atlas::by_keyword(keyword).expect("the atlas has the archetype");
        let mut named: Vec<&str> =
            proof::drills().filter(|drill| drill.archetype == keyword).map(|drill| drill.failure).collect();
        let mut expected: Vec<&str> = archetype.failures.iter().map(String::as_str).collect();
        named.sort_unstable();
        expected.sort_unstable();
        assert_eq!(named, expected, "{keyword}");
        for hotspot in &archetype.hotspots {
            assert!(coverage::switch(archetype, hotspot).is_some(), "{keyword}: what turns {hotspot} down?");
        }
    }
    assert!(
        proof::drills().all(|drill| drill.provokes.ends_with('.')),
        "a drill says what it provokes in one sentence"
    );
}

/// The text of a file of the project.
fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Compares a file with what it should contain; `STATEHOUSE_BLESS=1` writes it.
fn check(path: &Path, expected: &str) {
    if std::env::var_os("STATEHOUSE_BLESS").is_some() {
        std::fs::write(path, expected).expect("the file can be written");
    }
    let path_shown = path.display();
    assert!(
        text(path) == expected,
        "{path_shown} is not what the archetypes and drills say; \
         STATEHOUSE_BLESS=1 cargo test --workspace --test coverage writes it"
    );
}

/// The text with another content between the markers of that name.
fn with_generated(text: &str, name: &str, content: &str) -> String {
    let (start, end) = (format!("<!-- generated: {name} -->\n"), format!("<!-- end: {name} -->"));
    let (before, rest) = text.split_once(&start).unwrap_or_else(|| panic!("there is no {start}"));
    let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("there is no {end}"));
    format!("{before}{start}{content}{end}{after}")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_page_is_current() {
    check(&root().join("docs/guarantees.md"), &coverage::page());
}

#[test]
fn the_readme_lists_the_archetypes() {
    let path = root().join("README.md");
    let expected = with_generated(&text(&path), "archetypes", &coverage::readme_table());
    check(&path, &expected);
}

#[test]
fn the_page_of_each_archetype_answers_its_failures() {
    for archetype in ARCHETYPES {
        let path = root().join(format!("docs/archetypes/{}.md", archetype.keyword));
        let expected = with_generated(&text(&path), "failures", &coverage::failure_table(archetype));
        check(&path, &expected);
    }
}

#[test]
fn the_page_of_each_archetype_shows_its_machines() {
    for archetype in ARCHETYPES {
        let path = root().join(format!("docs/archetypes/{}.md", archetype.keyword));
        let section = machine_section(archetype).expect("the specimen can be declared");
        let has_markers = text(&path).contains("<!-- generated: machines -->");
        assert_eq!(has_markers, !section.is_empty(), "{}: markers for machines", archetype.keyword);
        if has_markers {
            check(&path, &with_generated(&text(&path), "machines", &section));
        }
    }
}

/// A proof has the name of its archetype.
#[test]
fn each_proof_is_of_the_archetype_of_its_folder() {
    let proven: Vec<&str> = PROOFS.iter().map(|proof| proof.archetype).collect();
    let built: Vec<&str> = ARCHETYPES.iter().map(|archetype| archetype.keyword).collect();
    assert_eq!(proven, built);
    for proof in PROOFS {
        let prefix = format!("{}::", proof.archetype);
        assert!(proof.cases.iter().all(|case| case.name.starts_with(&prefix)), "{prefix}");
        assert!(proof.drills.iter().all(|drill| drill.archetype == proof.archetype), "{prefix}");
        assert!(proof.workload.is_none_or(|workload| workload.archetype == proof.archetype), "{prefix}");
    }
}
