//! What documents say about the project, held against the project.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking, as tests do")]

use std::collections::BTreeMap;
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

/// The text of a file without its unit tests, which stand at its end.
fn without_tests(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default()
}

/// The name that a line declares as a type, at any indentation. Associated types have no visibility and an indentation.
fn declared_type(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let declaration = code
        .strip_prefix("pub ")
        .or_else(|| code.split_once(") ").filter(|(head, _)| head.starts_with("pub(")).map(|(_, rest)| rest));
    let is_public = declaration.is_some();
    let mut words = declaration.unwrap_or(code).split(|c: char| !c.is_alphanumeric() && c != '_');
    let keyword = words.next()?;
    let is_type = matches!(keyword, "struct" | "enum" | "trait" | "union");
    let is_alias = keyword == "type" && (is_public || code.len() == line.len());
    (is_type || is_alias).then(|| words.next()).flatten().filter(|name| name.starts_with(char::is_uppercase))
}

/// A reader who searches for a type finds one.
#[test]
fn type_names_are_unique() {
    let mut declared: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in all(".rs") {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let is_test =
            ["tests", "examples", "benches"].iter().any(|folder| name.split('/').any(|part| part == *folder));
        if is_test || name.ends_with("tests.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for (index, line) in without_tests(&text).lines().enumerate() {
            if let Some(found) = declared_type(line) {
                declared.entry(found.to_owned()).or_default().push(format!("{name}:{}", index + 1));
            }
        }
    }
    assert!(declared.len() > 500, "only {} types were found", declared.len());
    declared.retain(|_, places| places.len() > 1);
    assert!(declared.is_empty(), "types with the same name: {declared:#?}");
}

/// How many lines two places in the archetypes' modules may share.
const SHARED_LINES_MAX: usize = 12;

/// The lines of code of a file, numbered from 1: without blank lines, comments, imports and unit tests.
fn code_lines(text: &str) -> Vec<(usize, &str)> {
    let mut in_import = false;
    let numbered = without_tests(text).lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    numbered
        .filter(|(_, line)| {
            let begins_import = ["use ", "pub use ", "pub(crate) use ", "pub(super) use "]
                .iter()
                .any(|start| line.starts_with(start));
            let is_import = in_import || begins_import;
            in_import = is_import && !line.ends_with(';');
            !is_import && !line.is_empty() && !line.starts_with("//")
        })
        .collect()
}

/// The places at which files share more lines of code than that, one after the other.
fn shared_places(files: &[(String, String)], lines_max: usize) -> Vec<String> {
    let mut seen: BTreeMap<Vec<&str>, String> = BTreeMap::new();
    let mut found = Vec::new();
    for (name, text) in files {
        for window in code_lines(text).windows(lines_max + 1) {
            let Some((number, _)) = window.first() else { continue };
            let place = format!("{name}:{number}");
            let lines = window.iter().map(|(_, line)| *line).collect();
            if let Some(first) = seen.get(&lines) {
                found.push(format!("{first} ~ {place}"));
            } else {
                seen.insert(lines, place);
            }
        }
    }
    found
}

/// What two archetypes share stands once, in the kit or in the one that the other depends on.
#[test]
fn archetypes_share_no_long_passages() {
    let mut paths = Vec::new();
    for folder in ["crates/statehouse/src/product", "crates/statehouse/src/infra"] {
        files(&root().join(folder), ".rs", &mut paths);
    }
    paths.retain(|path| !path.ends_with("tests.rs"));
    paths.sort();
    assert!(paths.len() > 80, "only {} files were found", paths.len());
    let read = |path: &PathBuf| {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        (name, std::fs::read_to_string(path).unwrap())
    };
    let texts: Vec<(String, String)> = paths.iter().map(read).collect();
    let found = shared_places(&texts, SHARED_LINES_MAX);
    assert!(found.is_empty(), "more than {SHARED_LINES_MAX} lines are the same: {found:#?}");
}

#[test]
fn a_shared_passage_is_found_across_comments_and_imports() {
    let lines = |count: usize| (0..count).map(|line| format!("    call({line});\n")).collect::<String>();
    let place = |name: &str, text: String| (name.to_owned(), text);
    let (short, long) = (lines(SHARED_LINES_MAX), lines(SHARED_LINES_MAX + 1));
    let apart =
        format!("use a::{{\n    b,\n}};\n{}", long.replace("call(3);", "call(3);\n\n    // A comment."));
    assert!(shared_places(&[place("a", short.clone()), place("b", short)], SHARED_LINES_MAX).is_empty());
    let found = shared_places(&[place("a", long), place("b", apart)], SHARED_LINES_MAX);
    assert_eq!(found, ["a:1 ~ b:4"]);
}

/// Sentences name their actor: the caller, the worker, the engine. `CONTRIBUTING.md` quotes what not to write.
#[test]
fn prose_names_its_actors() {
    let hides_its_actor = |text: &str| {
        let text = text.to_lowercase();
        let mut words = text.split(|c: char| !c.is_alphanumeric());
        words.any(|word| matches!(word, "nobody" | "somebody" | "whoever"))
    };
    let mut found = Vec::new();
    for path in all(".rs").into_iter().chain(all(".md")) {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let is_page = name.ends_with(".md");
        if matches!(name.as_str(), "CONTRIBUTING.md" | "CHANGELOG.md") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for (index, line) in text.lines().enumerate() {
            let prose = if is_page { Some(line) } else { line.split_once("//").map(|(_, comment)| comment) };
            if prose.is_some_and(hides_its_actor) {
                found.push(format!("{name}:{}: {}", index + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "name the actor instead: {found:#?}");
}

/// The code map has one short row for each module of the library, and the path of a request at most 15 rows.
#[test]
fn the_architecture_is_a_map() {
    let text = text("ARCHITECTURE.md");
    let section = |title: &str| -> Vec<&str> {
        let lines = text.lines().skip_while(|line| *line != title).skip(1);
        lines
            .take_while(|line| !line.starts_with("## "))
            .filter(|line| line.starts_with("| "))
            .skip(1)
            .collect()
    };
    let path = section("## The path of a request");
    assert!((5..=15).contains(&path.len()), "the path of a request has {} rows", path.len());
    let map = section("## Code map");
    for row in &map {
        let about = row.trim_end_matches('|').rsplit('|').next().unwrap_or_default();
        let words = about.split_whitespace().count();
        assert!(words <= 15, "a row of the code map has {words} words: {row}");
    }
    for folder in ["crates/statehouse/src", "crates/statehouse/src/product", "crates/statehouse/src/infra"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            let is_module = path.is_dir() || path.extension().is_some_and(|end| end == "rs");
            if !is_module || ["lib", "mod", "product", "infra"].contains(&stem.as_str()) {
                continue;
            }
            let module = format!("`{folder}/{stem}").replace("crates/statehouse/src/", "");
            assert!(
                map.iter().any(|row| row.contains(&format!("{module}`"))),
                "the code map has no row for {module}`"
            );
        }
    }
}

/// The words in backticks of a text.
fn code_spans(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn each_promise_of_the_security_page_names_tests_that_exist() {
    let page = text("docs/security.md");
    let (_, promises) = page.split_once("## Promises").unwrap();
    let (promises, _) = promises.split_once("\n## ").unwrap();
    let rows: Vec<&str> = promises.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 20, "only {} promises", rows.len());
    let sources: String = all(".rs").iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    for row in rows {
        let tests = row.trim_end_matches('|').rsplit('|').next().unwrap();
        let mut named = 0;
        for test in code_spans(tests) {
            let name = test.rsplit("::").next().unwrap();
            let exists = sources.contains(&format!("fn {name}("))
                || sources.contains(&format!("mod {name};"))
                || root().join(&test).exists();
            assert!(exists, "docs/security.md names `{test}`, which does not exist: {row}");
            named += 1;
        }
        assert!(named > 0, "a promise without a test: {row}");
    }
}
