//! The guide's examples: run as a reader would paste them, in their order.

use std::path::Path;

use statehouse_server::Config;

use crate::support::{Running, Site, cases};

cases![the_examples_work_when_pasted];

/// What the answers to each block of commands must hold, in the order of the guide.
const EXPECTED: [&[&str]; 13] = [
    &["HTTP/1.1 201 Created", "location: /v1/profile/42", "etag: \"1\""],
    &["HTTP/1.1 200 OK", "HTTP/1.1 304 Not Modified"],
    &["HTTP/1.1 200 OK", "etag: \"2\""],
    &["HTTP/1.1 412 Precondition Failed", "etag: \"2\"", "\"current_version\":2"],
    &["HTTP/1.1 200 OK", "\"points\":5"],
    &["HTTP/1.1 200 OK", "\"points\":10", "HTTP/1.1 412", "points < 9 does not hold: points is 10"],
    &["201\n", "\"display_name\":\"Bob\""],
    &["HTTP/1.1 200 OK", "rel=\"next\""],
    &["HTTP/1.1 200 OK", "\"location\":\"/v1/profile/44\"", "\"version\":5"],
    &["HTTP/1.1 200 OK", "\"if\":\"points >= 0\"", "\"version\":6"],
    &["HTTP/1.1 304 Not Modified", "preference-applied: wait=5"],
    &["\"points\":12"],
    &["\"type\":\"profile.created\"", "\"specversion\":\"1.0\"", "\"subject\":\"profile/42\""],
];

/// The indented blocks of a page.
fn blocks(page: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    for line in page.lines() {
        match (line.strip_prefix("    "), blocks.last_mut()) {
            (Some(code), Some(block)) => {
                block.push_str(code);
                block.push('\n');
            }
            (None, Some(block)) if !block.is_empty() => blocks.push(String::new()),
            _ => {}
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

async fn the_examples_work_when_pasted(site: Site) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/http.md");
    let blocks = blocks(&std::fs::read_to_string(page).unwrap());
    let blueprint = blocks.iter().find(|block| block.starts_with("[house]")).unwrap();
    let server = Running::of(site.house_of(blueprint).await, Config::default()).await;
    let is_command =
        |block: &&String| ["curl ", "for ", "token="].iter().any(|start| block.starts_with(start));
    let commands: Vec<&String> = blocks.iter().filter(is_command).collect();
    assert_eq!(commands.len(), EXPECTED.len(), "{commands:#?}");
    for (command, expected) in commands.into_iter().zip(EXPECTED) {
        let mut shell = tokio::process::Command::new("bash");
        let output = shell.arg("-c").arg(command).env("STATEHOUSE", server.url("")).output().await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        for text in expected {
            assert!(said.contains(text), "{text:?} is missing in the answer to\n{command}\n{said}");
        }
    }
}
