//! The command `explain` as people and programs call it. What it says of actions is in the golden files `golden/plans`, what
//! engines get in `golden/shapes`; both are compared by unit tests of the command.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::path::PathBuf;
use std::process::{Command, Output};

fn explain(arguments: &[&str]) -> Output {
    let blueprint = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../systems/profile/statehouse.toml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_statehouse"));
    command.arg("explain").args(arguments).arg("--blueprint").arg(blueprint).output().unwrap()
}

fn text(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_action_is_explained_with_its_shape_and_what_the_engine_gets() {
    for (engine, sent) in [
        ("memory", "update profiles(user_id=1)"),
        ("sqlite", "UPDATE profiles SET"),
        ("postgres", "profiles"),
        ("dynamodb", "TransactWriteItems"),
    ] {
        let text = text(explain(&["profile.delete", "--on", engine]));
        assert!(text.starts_with("delete profile -> ProfileState (abstract: "), "{text}");
        assert!(text.contains(&format!("(concrete, on {engine}):")) && text.contains(sent), "{text}");
    }
}

#[test]
fn a_resource_alone_explains_all_its_actions() {
    let text = text(explain(&["profile", "--on", "sqlite"]));
    for action in
        ["create", "read", "list", "update", "patch", "mutate", "delete", "restore", "erase", "check"]
    {
        assert!(text.contains(&format!("{action} profile -> ")), "{action} is missing:\n{text}");
    }
    assert_eq!(text.matches("(concrete, on").count(), 10, "{text}");
}

#[test]
fn programs_get_json() {
    let text = text(explain(&["profile.update", "--on", "postgres", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["action"], "profile.update");
    assert_eq!(json["engine"], "postgres");
    assert!(json["concrete"][0]["requests"][0]["text"].is_string(), "{text}");
}

#[test]
fn an_unknown_action_is_a_mistake_of_the_caller() {
    let output = explain(&["profile.vanish"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("profile.vanish"), "{output:?}");
}
