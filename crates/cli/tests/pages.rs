//! What the pages of the archetypes tell a reader to paste, pasted: each page's example runs in an empty folder, and
//! prints what the page says it does, in a comment behind it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking, as tests do")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use statehouse::archetypes::ARCHETYPES;

fn pages() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/archetypes")
}

/// What a page tells the reader to paste, and what that prints, in this order, whatever stands between.
struct Example {
    page: &'static str,
    pasted: String,
    printed: Vec<String>,
}

/// The first indented block behind the heading, as it would be copied, and the comment behind it.
fn example(page: &'static str) -> Option<Example> {
    let text = std::fs::read_to_string(pages().join(format!("{page}.md"))).unwrap();
    let (_, behind) = text.split_once("\n## Try it\n")?;
    let block: Vec<&str> = behind
        .lines()
        .skip_while(|line| !line.starts_with("    "))
        .take_while(|line| line.is_empty() || line.starts_with("    "))
        .map(|line| line.strip_prefix("    ").unwrap_or(line))
        .collect();
    let comment =
        behind.split_once("\n<!-- prints, in this order:\n").and_then(|(_, rest)| rest.split_once("\n-->"));
    let printed = comment.map(|(lines, _)| lines.lines().map(str::to_owned).collect());
    Some(Example {
        page,
        pasted: block.join("\n"),
        printed: printed.unwrap_or_else(|| panic!("{page}.md does not say what its example prints")),
    })
}

fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// How long an example may take before it counts as stuck.
const SECONDS_MAX: &str = "180";

/// Runs an example in a folder of its own and returns what it printed. Pages run side by side, so each has ports of
/// its own, a server is waited for instead of given a second, and other waits are four times as long.
fn run(example: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (port, other) = (free_port(), free_port());
    let ready =
        format!("for _ in $(seq 300); do curl -sf 127.0.0.1:{port}/readyz >ready && break; sleep 0.1; done");
    let mut script = example
        .replace("127.0.0.1:8080", &format!("127.0.0.1:{port}"))
        .replace("8099", &other)
        .replace("/tmp/", "");
    for seconds in [1, 2] {
        let wait = format!("\nsleep {seconds}\n");
        script = script
            .replace(&format!("statehouse serve &{wait}"), &format!("statehouse serve &\n{ready}\n"))
            .replace(&wait, &format!("\nsleep {}\n", 4 * seconds));
    }
    let binary = Path::new(env!("CARGO_BIN_EXE_statehouse")).parent().unwrap().to_owned();
    let path = std::env::join_paths(
        std::iter::once(binary).chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    // One stream, so that refusals stand where they were printed; and whatever was started ends with the example.
    let script = format!("exec 2>&1\ntrap 'kill $(jobs -p) 2>/dev/null' EXIT\n{script}");
    let output = Command::new("timeout")
        .args(["-k", "5", SECONDS_MAX, "bash", "-m", "-c", &script])
        .current_dir(folder.path())
        .env("PATH", path.unwrap())
        .env("STATEHOUSE_LISTEN", format!("127.0.0.1:{port}"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// What was expected and did not follow, if anything.
fn missing<'a>(printed: &str, expected: &'a [String]) -> Option<&'a String> {
    let mut rest = printed;
    expected.iter().find(|part| match rest.split_once(part.as_str()) {
        Some((_, behind)) => {
            rest = behind;
            false
        }
        None => true,
    })
}

#[test]
fn what_pages_say_works_when_pasted() {
    let examples = ARCHETYPES.iter().filter_map(|archetype| {
        let example = example(archetype.keyword);
        assert_eq!(example.is_some(), archetype.is_declarable(), "{}.md has an example", archetype.keyword);
        example
    });
    let runs: Vec<_> = examples
        .chain(["../query", "../inbound", "../../systems/library/README"].into_iter().filter_map(example))
        .map(|example| {
            let pasted = example.pasted.clone();
            (example, std::thread::spawn(move || run(&pasted)))
        })
        .collect();
    for (Example { page, printed: expected, .. }, run) in runs {
        let printed = run.join().unwrap();
        if let Some(part) = missing(&printed, &expected) {
            panic!("the example of {page} does not print {part:?} where it should:\n{printed}");
        }
    }
}
