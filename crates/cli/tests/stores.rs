//! Stores that the command opens: which commands change their tables, what a change of the blueprint is refused for, and backups.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value as Json;

/// A folder with a blueprint in it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn with(blueprint: &str) -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.write(blueprint);
        folder
    }

    fn write(&self, blueprint: &str) {
        std::fs::write(self.path("statehouse.toml"), blueprint).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_statehouse"));
        for name in ["STORE", "BLUEPRINT", "CONFIG", "TENANT"] {
            command.env_remove(format!("STATEHOUSE_{name}"));
        }
        command.args(arguments).current_dir(self.0.path()).output().unwrap()
    }

    /// Runs, demands an exit code, and returns what was printed, errors included.
    fn expect(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        text
    }

    fn json(&self, arguments: &[&str]) -> Json {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

const NOTE: &str = "[entity.note]\nkey = { id = \"int\" }\nfields = { text = \"text?\", seen = { type = \"int\", default = 0 } }\n";

#[test]
fn only_apply_and_serve_change_tables() {
    let folder = Folder::with(NOTE);
    // A store that is created by a call gets its tables.
    folder.expect(0, &["call", "note.create", "id=1", "text=one"]);
    folder.write(&format!("{NOTE}\n[lease.lock]\nkey = {{ name = \"text\" }}\n"));
    for arguments in [
        &["call", "note.read", "--key", "1"][..],
        &["call", "note.create", "id=2"],
        &["key", "list"],
        &["secret", "generate", "x"],
        &["projection", "list"],
        &["serve", "--listen", "127.0.0.1:0", "--set", "migrate=never"],
        &["serve", "--listen", "127.0.0.1:0", "--migrate", "off"],
    ] {
        let text = folder.expect(1, arguments);
        assert!(
            text.contains("create table locks") && text.contains("statehouse apply"),
            "{arguments:?}: {text}"
        );
        assert!(
            folder.expect(0, &["plan"]).contains("+ create table locks"),
            "{arguments:?} changed the tables"
        );
    }
    folder.expect(0, &["apply"]);
    assert!(folder.expect(0, &["call", "note.read", "--key", "1"]).contains("\"one\""));
    // An older blueprint finds all that it needs.
    folder.write(NOTE);
    folder.expect(0, &["call", "note.read", "--key", "1"]);
}

#[test]
fn an_empty_file_is_no_new_store() {
    let folder = Folder::with(NOTE);
    std::fs::write(folder.path("statehouse.db"), "").unwrap();
    let text = folder.expect(1, &["call", "note.create", "id=1"]);
    assert!(text.contains("none of the blueprint's tables") && text.contains("statehouse apply"), "{text}");
    folder.expect(0, &["apply"]);
    folder.expect(0, &["call", "note.create", "id=1"]);
}

#[test]
fn rows_are_not_lost_by_a_smaller_number() {
    let follow = |buckets: u32| {
        format!("[relation.follow]\nfrom = {{ a = \"int\" }}\nto = {{ b = \"int\" }}\nbuckets = {buckets}\n")
    };
    let folder = Folder::with(&follow(4));
    folder.expect(0, &["call", "follow.add", "--key", "1,2"]);
    folder.write(&follow(2));
    for arguments in [
        &["plan"][..],
        &["apply"],
        &["apply", "--allow-loss"],
        &["serve"],
        &["call", "follow.read", "--key", "1,2"],
    ] {
        let text = folder.expect(1, arguments);
        assert!(text.contains("`buckets` is 4 in the store and 2 in the blueprint"), "{text}");
        assert!(text.contains("write `buckets = 4` or more"), "{text}");
    }
    folder.write(&follow(8));
    assert!(folder.expect(0, &["apply"]).contains("record `buckets` of follows_in as 8"));
}

#[test]
fn values_of_a_field_that_becomes_hot_are_moved_by_apply() {
    let folder = Folder::with(NOTE);
    folder.expect(0, &["call", "note.create", "id=1", "seen=7"]);
    folder.write(&format!("{NOTE}hot = [\"seen\"]\n"));
    assert!(folder.expect(0, &["plan"]).contains("+ move the values of notes.seen to notes_hot"));
    for arguments in [&["serve", "--listen", "127.0.0.1:0"][..], &["call", "note.read", "--key", "1"]] {
        let text = folder.expect(1, arguments);
        assert!(text.contains("statehouse apply"), "{text}");
    }
    assert!(folder.expect(0, &["apply"]).contains("move the values of notes.seen"));
    assert_eq!(folder.json(&["call", "note.read", "--key", "1"])["body"]["seen"], 7);
    assert!(folder.expect(0, &["plan"]).contains("Nothing to do"));
}

#[test]
fn a_blueprint_of_another_house_is_rejected() {
    let folder = Folder::with(&format!("[house]\nname = \"one\"\n{NOTE}"));
    folder.expect(0, &["call", "note.create", "id=1", "text=one"]);
    folder.write("[house]\nname = \"two\"\n[entity.order]\nkey = { id = \"int\" }\n");
    for arguments in [
        &["plan"][..],
        &["apply"],
        &["apply", "--allow-loss", "notes"],
        &["serve", "--listen", "127.0.0.1:0"],
        &["serve", "--listen", "127.0.0.1:0", "--migrate", "all"],
        &["call", "order.create", "id=1"],
    ] {
        let text = folder.expect(1, arguments);
        assert!(text.contains("belongs to the house `one`") && text.contains("renamed_from"), "{text}");
    }
    folder.write(&format!("[house]\nname = \"two\"\nrenamed_from = \"one\"\n{NOTE}"));
    folder.expect(0, &["apply"]);
    assert!(folder.expect(0, &["call", "note.read", "--key", "1"]).contains("\"one\""));
}

#[test]
fn a_backup_is_a_store() {
    let folder = Folder::with(NOTE);
    folder.expect(0, &["call", "note.create", "id=1", "text=one"]);
    let made = folder.json(&["backup", "copy.db"]);
    assert_eq!(made["bytes"], std::fs::metadata(folder.path("copy.db")).unwrap().len());
    folder.expect(0, &["call", "note.create", "id=2", "text=two"]);
    let copy = ["--store", "sqlite:copy.db"];
    let read = |key: &'static str| [&["call", "note.read", "--key", key][..], &copy].concat();
    assert!(folder.expect(0, &read("1")).contains("\"one\""));
    folder.expect(1, &read("2"));
    // What is there is not written over, and nothing is left of a backup that was not made.
    assert!(folder.expect(1, &["backup", "copy.db"]).contains("exists already"));
    assert!(
        folder
            .expect(1, &["backup", "--store", "sqlite:none.db", "other.db"])
            .contains("there is no file none.db")
    );
    std::fs::write(folder.path("empty.db"), "").unwrap();
    let text = folder.expect(1, &["backup", "--store", "sqlite:empty.db", "other.db"]);
    assert!(text.contains("nothing to back up"), "{text}");
    let left = std::fs::read_dir(folder.0.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!left.into_iter().any(|name| name.to_string_lossy().starts_with("other")), "something is left");
    for (store, tool) in
        [("postgres://a:b@db/x?schema=house", "pg_dump"), ("dynamodb://house", "create-backup")]
    {
        let text = folder.expect(2, &["backup", "--store", store, "other.db"]);
        assert!(text.contains(tool) && !text.contains(":b@"), "{text}");
    }
    assert!(folder.expect(0, &["backup", "--help"]).contains("Examples:"));
}
