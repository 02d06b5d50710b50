//! The command as people and programs use it: what it prints, and with which exit code it ends.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value as Json;

struct Shell {
    folder: tempfile::TempDir,
}

impl Shell {
    fn new() -> Shell {
        Shell { folder: tempfile::tempdir().unwrap() }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_statehouse"))
            .args(arguments)
            .current_dir(self.folder.path())
            .env_remove("STATEHOUSE_STORE")
            .env_remove("STATEHOUSE_BLUEPRINT")
            .env_remove("STATEHOUSE_TENANT")
            .output()
            .unwrap()
    }

    /// Runs, demands an exit code, and returns what was printed, errors included.
    fn expect(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        text
    }

    fn json(&self, code: i32, arguments: &[&str]) -> Json {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(name), text).unwrap();
    }
}

#[test]
fn from_nothing_to_a_conflict() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    assert!(shell.expect(1, &["init"]).contains("was not written"), "a blueprint is never overwritten");
    assert!(shell.expect(0, &["check"]).contains("good blueprint"));
    assert!(shell.expect(0, &["plan"]).contains("CREATE TABLE profiles"));
    shell.expect(0, &["apply"]);
    assert!(shell.expect(0, &["plan"]).contains("Nothing to do"));
    let created = shell.json(0, &["call", "profile.create", "user_id=42", "display_name=Ann"]);
    assert_eq!((&created["version"], &created["created"]), (&Json::from(1), &Json::from("42")));
    shell.expect(0, &["call", "profile.patch", "--key", "42", "--version", "1", "bio=x"]);
    let refused = shell.json(4, &["call", "profile.patch", "--key", "42", "--version", "1", "bio=y"]);
    assert_eq!((&refused["error"], &refused["current_version"]), (&"version_conflict".into(), &2.into()));
    let other = shell.json(1, &["call", "profile.read", "--key", "42", "--tenant", "other"]);
    assert_eq!(other["error"], "not_found");
}

#[test]
fn an_operation_is_done_once() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    shell.expect(0, &["call", "profile.create", "user_id=1", "display_name=A"]);
    let count = ["call", "profile.mutate", "--key", "1", "--operation", "op", "--input"];
    let once = shell.json(0, &[&count[..], &[r#"{"increment":{"points":5}}"#]].concat());
    let again = shell.json(0, &[&count[..], &[r#"{"increment":{"points":5}}"#]].concat());
    assert_eq!(once, again);
    let reused = shell.json(4, &[&count[..], &[r#"{"increment":{"points":6}}"#]].concat());
    assert_eq!(reused["error"], "operation_reused");
}

#[test]
fn wrong_usage_is_told_apart() {
    let shell = Shell::new();
    assert!(shell.expect(1, &["check"]).contains("`statehouse init` writes a first one"));
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"itn\" }\n");
    assert!(shell.expect(3, &["check"]).contains("did you mean \"int\"?"));
    assert_eq!(shell.json(3, &["check"])["problems"][0]["line"], 2);
    shell.write("statehouse.toml", "[booking.seat]\n");
    assert!(shell.expect(3, &["check"]).contains("is not built yet"));
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"int\" }\n");
    assert!(shell.expect(2, &["plan", "--store", "house.db"]).contains("names no store"));
    assert!(shell.expect(2, &["call", "a.read"]).contains("needs --key id"));
    assert!(shell.expect(2, &["call", "a.read", "--key", "x"]).contains("must be int"));
    shell.expect(2, &["call"]);
    assert!(shell.expect(2, &["atlas", "zebra"]).contains("there is no archetype"));
}

#[test]
fn a_removal_asks_first() {
    let shell = Shell::new();
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"int\" }\nfields = { n = \"int?\" }\n");
    shell.expect(0, &["apply"]);
    shell.expect(0, &["call", "a.create", "id=1", "n=7"]);
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"int\" }\n");
    assert!(shell.expect(0, &["apply"]).contains("Kept, because data would be lost"));
    assert!(shell.expect(0, &["plan"]).contains("! drop column as.n, with its data"));
    shell.expect(0, &["apply", "--allow-loss"]);
    assert!(shell.expect(0, &["plan"]).contains("Nothing to do"));
}

#[test]
fn every_action_is_explained_in_both_layers() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    let all = shell.json(0, &["check"]);
    for action in all["resources"][0]["actions"].as_array().unwrap() {
        let name = format!("profile.{}", action.as_str().unwrap());
        let text = shell.expect(0, &["explain", &name]);
        assert!(text.contains("-> ProfileState (abstract: ") && text.contains("(concrete"), "{text}");
    }
    let update = shell.expect(0, &["explain", "profile.update"]);
    assert!(update.contains("UPDATE profiles SET") && update.contains("version = 1 and status = 'ACTIVE'"));
}

#[test]
fn the_atlas_is_for_programs_too() {
    let shell = Shell::new();
    let atlas = shell.json(0, &["atlas"]);
    let entries = atlas.as_array().unwrap();
    assert_eq!(entries.len(), 34);
    assert_eq!(entries[0]["implemented"], true);
    assert_eq!(entries[0]["actions"][0]["name"], "create");
    assert_eq!((&entries[1]["implemented"], &entries[1]["actions"]), (&Json::from(false), &Json::Null));
    assert!(shell.expect(0, &["atlas", "booking"]).contains("confirm-after-expiry race"));
}

#[test]
fn every_template_is_a_good_blueprint() {
    for template in ["profile", "catalog"] {
        let shell = Shell::new();
        shell.expect(0, &["init", "--template", template, "shop"]);
        shell.expect(0, &["check", "--blueprint", "shop/statehouse.toml"]);
    }
    assert!(Shell::new().expect(2, &["init", "--template", "x"]).contains("there are profile, catalog"));
}

#[test]
fn help_and_completions() {
    let shell = Shell::new();
    assert!(shell.expect(0, &["call", "--help"]).contains("Examples:"));
    assert!(shell.expect(0, &["completions", "bash"]).contains("statehouse"));
    assert!(Path::new(env!("CARGO_BIN_EXE_statehouse")).exists());
}
