//! What the pages of the archetypes tell a reader to paste, pasted: each page's example runs in an empty folder, and
//! prints what the page says it does.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Each page, and what its example prints, in this order, whatever stands between.
const PAGES: [(&str, &[&str]); 12] = [
    (
        "booking",
        &["\"AVAILABLE\"", "\"IN_PROGRESS\"", "refused (held)", "\"CONFIRMED\"", "\"state\": \"SOLD\""],
    ),
    ("effect", &["\"paid\":true", "\"key\":\"order-7\"", "\"DELIVERED\""]),
    (
        "entity",
        &[
            "dynamodb can carry it",
            "\"version\": 1",
            "\"version\": 1",
            "\"version\": 2",
            "exit 4",
            "\"stock\": 12",
            "\"views\": 1",
        ],
    ),
    (
        "feed",
        &[
            "\"has\":true",
            "\"post_preview\":\"hello\"",
            "\"DELETED\"",
            "\"post_preview\":\"unheard\"",
            "\"last_seen_post_id\":2",
            "generation 2",
        ],
    ),
    ("lease", &["\"epoch\": 1", "exit 4", "\"FREE\"", "\"epoch\": 2", "abstract: state transition"]),
    (
        "log",
        &[
            "\"total\":42",
            "\"epoch\":1",
            "\"order.created\"",
            "\"Thank you\"",
            "\"mailer.commit\"",
            "\"lag_records\":0",
        ],
    ),
    (
        "relation",
        &[
            "\"follower\":3,\"has\":true",
            "\"follower\":3,\"has\":true",
            "\"has\":false",
            "[{\"followee\":100,\"follower\":3",
            "{\"count\":2",
        ],
    ),
    (
        "schedule",
        &[
            "\"PENDING\"",
            "\"attempt\": 1",
            "[]",
            "\"attempt\": 2",
            "refused (not_holder)",
            "\"COMPLETED\"",
            "\"result\": \"sent\"",
        ],
    ),
    (
        "sequence",
        &[
            "\"first\":1,\"last\":3",
            "\"next\":1",
            "\"subject\":\"invoice/a\"",
            "{\"ids\":[",
            "\"holder\":\"me\"",
        ],
    ),
    ("thread", &["First!", "First!", "Something rude", "\"version\":2", "\"HIDDEN\"", "[{", "{\"count\":1"]),
    ("timer", &["\"SET\"", "\"subject\":\"reminder/tea\"", "\"CANCELLED\"", "\"FIRED\""]),
    (
        "view",
        &[
            "\"max_points\":9,\"sum_points\":14",
            "\"DELETED\"",
            "\"max_points\":5,\"sum_points\":5",
            "\"queue\":\"mail\",\"state\":\"CANCELLED\"",
            "\"queue\":\"mail\",\"state\":\"LIVE\"",
            "generation 2",
        ],
    ),
];

fn pages() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/archetypes")
}

/// The first indented block behind the heading, as it would be copied.
fn example(page: &str) -> Option<String> {
    let text = std::fs::read_to_string(pages().join(format!("{page}.md"))).unwrap();
    let (_, behind) = text.split_once("\n## Try it\n")?;
    let block: Vec<&str> = behind
        .lines()
        .skip_while(|line| !line.starts_with("    "))
        .take_while(|line| line.is_empty() || line.starts_with("    "))
        .map(|line| line.strip_prefix("    ").unwrap_or(line))
        .collect();
    Some(block.join("\n"))
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
fn missing<'a>(printed: &str, said: &[&'a str]) -> Option<&'a str> {
    let mut rest = printed;
    said.iter().copied().find(|part| match rest.split_once(part) {
        Some((_, behind)) => {
            rest = behind;
            false
        }
        None => true,
    })
}

#[test]
fn what_pages_say_works_when_pasted() {
    let mut there: Vec<String> = std::fs::read_dir(pages())
        .unwrap()
        .filter_map(|page| page.unwrap().path().file_stem().map(|name| name.to_string_lossy().into_owned()))
        .filter(|page| example(page).is_some())
        .collect();
    there.sort();
    assert_eq!(there, PAGES.map(|(page, _)| page), "each page with an example is run");
    let runs = PAGES.map(|(page, said)| {
        let text = example(page).unwrap();
        (page, said, std::thread::spawn(move || run(&text)))
    });
    for (page, said, run) in runs {
        let printed = run.join().unwrap();
        if let Some(part) = missing(&printed, said) {
            panic!("the example of {page} does not print {part:?} where it should:\n{printed}");
        }
    }
}
