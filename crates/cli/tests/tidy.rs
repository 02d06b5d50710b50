//! What documents say about the project, held against the project.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking, as tests do")]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value as Json;
use statehouse::archetypes::{ARCHETYPES, Archetype};
use statehouse::atlas::Kind;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files below a folder whose name ends like this, without what is built.
fn files(folder: &Path, end: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            files(&path, end, found);
        } else if name.ends_with(end) {
            found.push(path);
        }
    }
}

fn all(end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root(), end, &mut found);
    assert!(!found.is_empty());
    found
}

#[test]
fn every_module_says_what_it_is_for() {
    for path in all(".rs") {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("//!"), "{} has no `//!` at its head", path.display());
    }
}

#[test]
fn paths_in_the_architecture_exist() {
    let text = text("ARCHITECTURE.md");
    let quoted = text.split('`').skip(1).step_by(2);
    let mut paths = 0;
    for path in quoted.filter(|quoted| quoted.starts_with("crates/") || quoted.starts_with("docs/")) {
        assert!(root().join(path).exists(), "ARCHITECTURE.md names {path}");
        paths += 1;
    }
    assert!(paths > 10);
}

#[test]
fn links_between_documents_lead_somewhere() {
    for path in all(".md") {
        let text = std::fs::read_to_string(&path).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            assert!(path.parent().unwrap().join(target).exists(), "{} links to {link}", path.display());
        }
    }
}

/// Names in a folder: of its folders, or of its files with this end.
fn names(folder: &str, end: Option<&str>) -> Vec<String> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().path())
        .filter_map(|path| {
            let name = path.file_name()?.to_string_lossy().into_owned();
            match end {
                Some(end) => name.strip_suffix(end).map(str::to_owned),
                None => path.is_dir().then_some(name),
            }
        })
        .collect();
    names.sort();
    names
}

/// An archetype is one folder of the library, one folder of the proof, one page and one line of the list. A folder or a page
/// that is not in the list belongs to no archetype.
#[test]
fn every_archetype_has_its_folders_and_its_page() {
    let keywords: Vec<&str> = ARCHETYPES.iter().map(|archetype| archetype.keyword).collect();
    let mut proven = names("crates/drills/src/proof", None);
    // Cases of no single archetype are in folders without a proof.
    proven.retain(|name| {
        let head = root().join("crates/drills/src/proof").join(name).join("mod.rs");
        std::fs::read_to_string(head).is_ok_and(|text| text.contains("const PROOF"))
    });
    assert_eq!(proven, keywords, "folders of the proof");
    assert_eq!(names("docs/archetypes", Some(".md")), keywords, "pages");
    let mut folders = names("crates/statehouse/src/product", None);
    folders.extend(names("crates/statehouse/src/infra", None));
    folders.sort();
    assert_eq!(folders, keywords, "folders of the library");
    for archetype in ARCHETYPES {
        let entry = archetype.entry().unwrap_or_else(|| panic!("the atlas has no {}", archetype.code));
        let kind = if entry.kind() == Kind::Product { "product" } else { "infra" };
        let folder = format!("crates/statehouse/src/{kind}/{}", archetype.keyword);
        assert!(root().join(&folder).join("archetype.rs").exists(), "{folder} has no archetype.rs");
        let page = text(&format!("docs/archetypes/{}.md", archetype.keyword));
        let code = archetype.code;
        assert!(page.contains(code), "the page of {} does not say {code}", archetype.keyword);
    }
}

/// What the command tells of the atlas is what is built.
#[test]
fn the_atlas_tells_the_actions_of_what_can_be_declared() {
    let output = Command::new(env!("CARGO_BIN_EXE_statehouse")).args(["atlas", "--json"]).output().unwrap();
    let atlas: Json = serde_json::from_slice(&output.stdout).unwrap();
    for told in atlas.as_array().unwrap() {
        let code = told["code"].as_str().unwrap();
        let built = Archetype::of_code(code).next().is_some();
        assert_eq!(told["implemented"], built, "{code}");
        let declarable = Archetype::of_code(code).any(Archetype::is_declarable);
        assert_eq!(!told["actions"].is_null(), declarable, "{code} has actions");
    }
}

#[test]
fn every_problem_is_documented_with_its_status_and_title() {
    let page = text("docs/http.md");
    let rows = page.lines().skip_while(|line| *line != "| status | code | title |").skip(2);
    let mut listed: Vec<String> = rows.take_while(|line| line.starts_with('|')).map(str::to_owned).collect();
    let kinds = statehouse_server::problem::ALL.iter();
    let mut expected: Vec<String> =
        kinds.map(|kind| format!("| {} | `{}` | {} |", kind.status, kind.code, kind.title)).collect();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected, "the table of problems in docs/http.md");
}

#[test]
fn the_test_command_of_the_readme_is_what_the_build_server_runs() {
    let run = text(".ci/run");
    assert!(run.contains("scripts/verify") && text("README.md").contains("\n    scripts/verify\n"), "{run}");
}

#[test]
fn every_system_has_its_parts() {
    for system in statehouse_drills::systems::BLUEPRINTS {
        let folder = root().join("systems").join(system.name);
        for part in ["statehouse.toml", "scenario.rs", "README.md"] {
            assert!(folder.join(part).exists(), "systems/{} has no {part}", system.name);
        }
    }
}
