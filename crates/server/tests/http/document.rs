//! The OpenAPI document: golden, valid by an independent judge, and kept by the server under a fuzzer.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use statehouse_server::{Config, openapi};

use crate::support::{Running, Site, cases};

cases![the_document_is_as_it_was, the_document_is_valid, a_fuzzer_finds_nothing];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn pretty(document: &serde_json::Value) -> String {
    format!("{}\n", serde_json::to_string_pretty(document).unwrap())
}

/// Set `STATEHOUSE_BLESS` to write the file anew, and look at what changed.
async fn the_document_is_as_it_was(site: Site) {
    let house = site.house().await;
    let document = pretty(&openapi::document(&house));
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/openapi.json");
    if std::env::var_os("STATEHOUSE_BLESS").is_some() {
        std::fs::write(&golden, &document).unwrap();
    }
    let expected = std::fs::read_to_string(&golden).unwrap();
    assert!(
        document == expected,
        "the document changed; run the test with STATEHOUSE_BLESS=1 and look at the difference"
    );
    let server = site.server().await;
    let served = server.get("/openapi.json").await.ok(200);
    assert_eq!(pretty(&served.json()), expected);
}

async fn check(arguments: &[&str]) {
    let script = root().join("scripts/openapi-check");
    let mut command = tokio::process::Command::new(script);
    let output = command.args(arguments).stdin(Stdio::null()).output().await.unwrap();
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}\n{said}\n{complained}");
}

async fn the_document_is_valid(site: Site) {
    is_valid(&site, &openapi::document(&*site.house().await)).await;
}

/// Asks a validator of OpenAPI.
pub async fn is_valid(site: &Site, document: &serde_json::Value) {
    let file = site.folder().join("openapi.json");
    std::fs::write(&file, pretty(document)).unwrap();
    check(&["validate", file.to_str().unwrap()]).await;
}

async fn a_fuzzer_finds_nothing(site: Site) {
    let server = Running::of(site.house_without_json().await, Config::default()).await;
    let url = server.url("");
    check(&["fuzz", &url, "20"]).await;
    server.get("/livez").await.ok(200);
}
