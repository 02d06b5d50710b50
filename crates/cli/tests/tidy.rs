//! What documents say about the project, held against the project.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking, as tests do")]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value as Json;

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

#[test]
fn every_archetype_that_is_built_has_its_page() {
    let output = Command::new(env!("CARGO_BIN_EXE_statehouse")).args(["atlas", "--json"]).output().unwrap();
    let atlas: Json = serde_json::from_slice(&output.stdout).unwrap();
    let built = atlas.as_array().unwrap().iter().filter(|archetype| archetype["implemented"] == true);
    for archetype in built {
        let code = archetype["code"].as_str().unwrap();
        let known = statehouse::atlas::archetypes().iter().find(|known| known.code == code).unwrap();
        let keyword = known.keyword();
        let has_actions = !archetype["actions"].is_null();
        assert_eq!(
            has_actions,
            statehouse::resource::is_declared(known),
            "the atlas has no specimen of {keyword}"
        );
        let page = text(&format!("docs/archetypes/{keyword}.md"));
        assert!(page.contains(code), "the page of {keyword} does not say {code}");
        for failure in archetype["failures"].as_array().unwrap() {
            let name = failure["name"].as_str().unwrap();
            assert!(
                page.to_lowercase().contains(&name.to_lowercase()),
                "the page of {keyword} does not answer {name}"
            );
        }
    }
}

#[test]
fn every_refusal_is_documented() {
    let page = text("docs/http.md");
    for code in statehouse::Code::ALL {
        assert!(page.contains(&format!("`{}`", code.name())), "docs/http.md does not name {}", code.name());
    }
}

#[test]
fn the_test_command_of_the_readme_is_what_the_build_server_runs() {
    let run = text(".ci/run");
    assert!(run.contains("scripts/verify") && text("README.md").contains("\n    scripts/verify\n"), "{run}");
}

#[test]
fn every_system_has_its_parts() {
    for system in statehouse_drills::scenario::SYSTEMS {
        let folder = root().join("systems").join(system.name);
        for part in ["statehouse.toml", "scenario.rs", "README.md"] {
            assert!(folder.join(part).exists(), "systems/{} has no {part}", system.name);
        }
    }
}
