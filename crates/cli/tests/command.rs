//! The command as people and programs use it: what it prints, and with which exit code it ends.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking, as tests do"
)]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value as Json;
use statehouse::engine::OpenError;

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
            .env_remove("STATEHOUSE_CONFIG")
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
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{text} {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn has(&self, name: &str) -> bool {
        self.folder.path().join(name).exists()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(name), text).unwrap();
    }
}

#[test]
fn from_nothing_to_a_conflict() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    assert!(shell.expect(1, &["init"]).contains("give another folder"), "a blueprint is never overwritten");
    assert!(shell.expect(0, &["check"]).contains("good blueprint"));
    assert!(shell.expect(0, &["plan"]).contains("CREATE TABLE profiles"));
    assert!(!shell.has("statehouse.db"), "a plan makes no file");
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
    // Whatever the size of the request.
    let long = format!("bio={}", "x".repeat(5_000));
    shell.json(0, &["call", "profile.patch", "--key", "1", "--version", "2", "--operation", "long", &long]);
}

#[test]
fn wrong_usage_is_told_apart() {
    let shell = Shell::new();
    assert!(shell.expect(1, &["check"]).contains("`statehouse init` writes a first one"));
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"itn\" }\n");
    assert!(shell.expect(3, &["check"]).contains("did you mean \"int\"?"));
    assert_eq!(shell.json(3, &["check"])["problems"][0]["line"], 2);
    shell.write("statehouse.toml", "[leaderboard.points]\n");
    assert!(shell.expect(3, &["check"]).contains("is not built yet"));
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"int\" }\n");
    assert!(shell.expect(2, &["plan", "--store", "house.db"]).contains("names no store"));
    assert!(shell.expect(2, &["call", "a.read"]).contains("needs --key id"));
    assert!(shell.expect(1, &["call", "a.raed", "--key", "1"]).contains("did you mean `read`?"));
    assert!(shell.expect(2, &["call", "a.read", "--key", "x"]).contains("must be int"));
    shell.expect(2, &["call"]);
    assert!(shell.expect(2, &["atlas", "zebra"]).contains("there is no archetype"));
}

#[cfg(feature = "proof")]
#[test]
fn a_drill_that_finds_no_store_is_an_error_and_not_red() {
    let shell = Shell::new();
    for (code, store, why) in [
        (1, "dynamodb://shop?colour=red", "there is no parameter colour"),
        (1, "postgres://shop@localhost/shop?colour=red", "colour"),
        (1, "sqlite:nowhere/house.db", "a folder for the drill's file"),
        (2, "house.db", "names no store"),
    ] {
        let said = shell.expect(code, &["drill", "duplicate hold", "--on", store]);
        assert!(said.contains(why), "{store}: {said}");
        assert!(!said.contains("drills on"), "{store}: {said}");
    }
}

/// A program without a feature says which one adds what it lacks. A nightly run tests the default build.
#[cfg(not(feature = "proof"))]
#[test]
fn a_command_that_was_left_out_names_its_feature() {
    let shell = Shell::new();
    for command in ["demo", "drill", "simulate"] {
        let said = shell.expect(1, &[command]);
        assert!(said.contains(&format!("built without `{command}`")), "{said}");
        assert!(said.contains("cargo install --locked --path crates/cli --features proof"), "{said}");
        assert!(shell.expect(0, &["--help"]).contains("not in this build (feature `proof`)"));
    }
    let atlas = shell.json(0, &["atlas"]);
    assert_eq!(atlas[0]["failures"][0].as_object().unwrap().len(), 1, "only the name is known");
}

/// The library, which other crates of the workspace share with the command, says whether the engine was left out.
#[tokio::test]
async fn an_engine_that_was_left_out_names_its_feature() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    let url = "dynamodb://shop?colour=red";
    let was_left_out = matches!(statehouse::engine::open(url).await, Err(OpenError::NotBuilt { .. }));
    let said = shell.expect(1, &["plan", "--store", url]);
    let expected = if was_left_out {
        "built without dynamodb; in the checkout, install one that has it: \
         cargo install --locked --path crates/cli --features dynamodb"
    } else {
        "there is no parameter colour"
    };
    assert!(said.contains(expected), "{said}");
}

#[cfg(feature = "proof")]
#[test]
fn a_drill_that_can_show_nothing_is_skipped_with_the_reason() {
    let shell = Shell::new();
    shell.write("statehouse.toml", "[entity.mark]\nkey = { name = \"text\" }\n");
    let drill = ["drill", "concurrent overwrite", "--on", "memory:", "--blueprint", "statehouse.toml"];
    let said = shell.expect(0, &drill);
    assert!(said.contains("skipped  entity::concurrent_overwrite_race"), "{said}");
    assert!(said.contains("mark has no field that `update` and `patch` can change"), "{said}");
    assert!(said.contains("1 drill on model, 0 red, 1 skipped"), "{said}");
    let report = &shell.json(0, &drill)[0];
    assert_eq!(report["outcome"], "skipped");
    assert_eq!(report["green"], false);
    assert!(report["skipped"].as_str().unwrap().contains("mark has no field"), "{report}");
}

#[test]
fn a_blueprint_is_checked_as_a_whole() {
    let shell = Shell::new();
    let good = "[entity.a]\nkey = { id = \"int\" }\n[view.b]\nof = \"a\"\n";
    shell.write("statehouse.toml", good);
    assert!(shell.expect(0, &["check"]).contains("  view b: "));
    assert_eq!(shell.json(0, &["check"])["resources"][1]["archetype"], "view");
    shell.write("statehouse.toml", "[entty.a]\n[zebra.b]\n[entity.c]\n");
    assert_eq!(shell.json(3, &["check"])["problems"].as_array().unwrap().len(), 3);
    shell.write("statehouse.toml", "");
    assert!(shell.expect(3, &["check"]).contains("declares nothing"));
    shell.write("statehouse.toml", &format!("{good}sum = [\"note\"]\n"));
    assert!(shell.expect(3, &["check"]).contains("can be of id"));
    let text = "[entity.a]\nkey = { id = \"text\" }\n[view.b]\nof = \"a\"\nsum = [\"note\"]\n";
    shell.write("statehouse.toml", text);
    assert!(shell.expect(3, &["check"]).contains("no column of `a` is int, so leave out `sum`"));
}

#[test]
fn numbers_on_the_command_line_stay_what_they_are() {
    let shell = Shell::new();
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"int\" }\nfields = { tags = \"json?\" }\n");
    for input in
        [&["id=1", "tags=99999999999999999999"], &["--input", r#"{"id": 1, "tags": [99999999999999999999]}"#]]
    {
        let said = shell.expect(2, &[&["call", "a.create"], &input[..]].concat());
        assert!(said.contains("99999999999999999999 does not fit 64 bits"), "{said}");
    }
}

#[test]
fn a_removal_asks_first() {
    let shell = Shell::new();
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"int\" }\nfields = { n = \"int?\" }\n");
    shell.expect(0, &["apply"]);
    shell.expect(0, &["call", "a.create", "id=1", "n=7"]);
    shell.write("statehouse.toml", "[entity.a]\nkey = { id = \"int\" }\n");
    let text = shell.expect(0, &["apply"]);
    assert!(
        text.contains("Kept, because data would be lost") && !text.contains("Nothing was done"),
        "{text}"
    );
    assert_eq!(shell.json(0, &["apply"])["kept"].as_array().unwrap().len(), 1);
    assert!(shell.expect(0, &["plan"]).contains("--allow-loss"));
    assert!(shell.expect(0, &["plan"]).contains("! drop column as.n, with its data"));
    // A loss has to be named, and rightly so.
    for wrong in
        [&["apply", "--allow-loss"][..], &["apply", "--allow-loss", "as"], &["apply", "--allow-loss=a.n"]]
    {
        let text = shell.expect(1, wrong);
        assert!(
            text.contains("what could be removed: as.n") && text.contains("nothing was changed"),
            "{text}"
        );
    }
    assert!(shell.expect(0, &["plan"]).contains("! drop column as.n, with its data"));
    shell.expect(0, &["apply", "--allow-loss", "as.n"]);
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
    let unbuilt = entries.iter().find(|entry| entry["code"] == "A13").unwrap();
    assert_eq!((&unbuilt["implemented"], &unbuilt["actions"]), (&Json::from(false), &Json::Null));
    assert!(shell.expect(0, &["atlas", "booking"]).contains("confirm-after-expiry race"));
}

#[test]
fn every_template_is_a_good_blueprint() {
    for template in ["profile", "catalog", "library"] {
        let shell = Shell::new();
        shell.expect(0, &["init", "--template", template, "shop"]);
        shell.expect(0, &["check", "--blueprint", "shop/statehouse.toml"]);
    }
    assert!(
        Shell::new()
            .expect(2, &["init", "--template", "x"])
            .contains("[possible values: auction, catalog, feed, jobs, library, profile, tickets]")
    );
}

#[test]
fn help_and_completions() {
    let shell = Shell::new();
    assert!(shell.expect(0, &["call", "--help"]).contains("Examples:"));
    assert!(shell.expect(0, &["completions", "bash"]).contains("statehouse"));
    assert!(Path::new(env!("CARGO_BIN_EXE_statehouse")).exists());
}

/// A server of the profile system, stopped when the test ends.
struct Served {
    child: std::process::Child,
    greeting: Json,
}

impl Served {
    fn start(shell: &Shell, arguments: &[&str]) -> Served {
        use std::io::BufRead as _;
        let mut child = Command::new(env!("CARGO_BIN_EXE_statehouse"))
            .args(["serve", "--json", "--listen", "127.0.0.1:0", "--log", "warn"])
            .args(arguments)
            .current_dir(shell.folder.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let greeting: Json = serde_json::from_str(&line).unwrap();
        // No blueprint of these tests says how long the log is kept.
        assert_eq!(greeting["log_retention"], "30d");
        Served { child, greeting }
    }

    /// Pastes a command into a shell and returns the status line and the body of the answer.
    fn paste(&self, number: usize, key: &str) -> (String, Json) {
        let text = self.greeting["try"][number]["text"].as_str().unwrap();
        let output = Command::new("sh").args(["-c", text]).env("KEY", key).output().unwrap();
        let answer = String::from_utf8(output.stdout).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}: {answer}"));
        (head.lines().next().unwrap().to_owned(), serde_json::from_str(body).unwrap())
    }

    /// Asks it to stop, and returns its exit code.
    fn stop(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_commands_that_serve_hints_at_work_when_pasted_also_after_a_restart() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    for expected_key in ["1", "2"] {
        let served = Served::start(&shell, &[]);
        let (status, row) = served.paste(0, "");
        assert_eq!(status, "HTTP/1.1 201 Created");
        assert_eq!(row["user_id"].to_string(), expected_key);
        let (status, row) = served.paste(1, "");
        assert_eq!((status.as_str(), &row["version"]), ("HTTP/1.1 200 OK", &Json::from(2)));
        let (status, problem) = served.paste(2, "");
        assert_eq!(status, "HTTP/1.1 412 Precondition Failed");
        assert_eq!(problem["current_version"], 2);
        assert_eq!(served.stop(), Some(0), "it stops in order when it is told to");
    }
}

#[test]
fn keys_let_in_until_they_are_revoked() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    let served = Served::start(&shell, &["--api-keys", "--set", "limits.credential_cache_ms=0"]);
    assert_eq!(served.paste(0, "nonsense").0, "HTTP/1.1 401 Unauthorized");
    let key = shell.expect(0, &["key", "create", "--quiet", "--name", "shop", "--expires-in", "1d"]);
    let key = key.trim();
    assert_eq!(served.paste(0, key).0, "HTTP/1.1 201 Created");
    let listed = shell.json(0, &["key", "list"]);
    let prefix = listed[0]["prefix"].as_str().unwrap();
    assert_eq!((&listed[0]["name"], &listed[0]["scopes"]), (&Json::from("shop"), &Json::from("read write")));
    assert!(!listed.to_string().contains(key), "the key itself is stored nowhere");
    let successor = shell.expect(0, &["key", "rotate", prefix, "--quiet"]);
    shell.expect(0, &["key", "revoke", prefix]);
    assert_eq!(served.paste(1, key).0, "HTTP/1.1 401 Unauthorized");
    assert_eq!(served.paste(1, successor.trim()).0, "HTTP/1.1 200 OK");
    assert!(shell.expect(2, &["key", "revoke", "0000"]).contains("no key with the prefix"));
    assert!(shell.expect(2, &["key", "create", "--scopes", "Fly"]).contains("not a scope"));
    assert!(shell.expect(2, &["key", "create", "--scopes", "fly"]).contains("there is no scope `fly`"));
}

#[test]
fn without_credentials_the_server_stays_at_home() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    let text = shell.expect(1, &["serve", "--listen", "0.0.0.0:0"]);
    assert!(!shell.has("statehouse.db"), "it was refused before anything was made");
    assert!(text.contains("not a loopback address") && text.contains("API keys"), "{text}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let text = shell.expect(1, &["serve", "--listen", &address, "--store", "memory:"]);
    assert!(text.contains("cannot be listened on") && text.contains(&address), "{text}");
}

#[test]
fn settings_say_where_they_come_from() {
    let shell = Shell::new();
    shell.write("server.toml", "listen = \"127.0.0.1:9000\"\n[limits]\nstreams = 7\n");
    let settings = shell.json(0, &["config", "--set", "limits.headers=5"]);
    let origin = |name: &str| {
        let found = settings.as_array().unwrap().iter().find(|entry| entry["name"] == name).unwrap();
        (found["value"].to_string(), found["origin"].as_str().unwrap().to_owned())
    };
    assert_eq!(origin("limits.streams"), ("7".into(), "server.toml".into()));
    assert_eq!(origin("limits.headers"), ("5".into(), "flag".into()));
    assert_eq!(origin("log"), ("\"info\"".into(), "default".into()));
    assert!(shell.expect(2, &["config", "--set", "limit.headers=5"]).contains("limits.headers"));
}

#[cfg(feature = "proof")]
#[test]
fn demos_end_with_what_holds() {
    let shell = Shell::new();
    for system in ["profile", "auction", "catalog", "feed", "jobs", "library", "tickets"] {
        let report =
            shell.json(0, &["demo", system, "--callers", "4", "--actions", "25", "--store", "memory:"]);
        assert!(report["invariants"].as_array().unwrap().len() >= 4, "{report}");
        assert_eq!(report["figures"]["actions"], "100");
    }
    assert!(
        shell
            .expect(2, &["demo", "nothing"])
            .contains("[possible values: auction, catalog, feed, jobs, library, profile, tickets]")
    );
    shell.expect(0, &["init"]);
    shell.expect(0, &["call", "profile.create", "user_id=1", "display_name=Ann"]);
    assert!(shell.expect(1, &["demo", "--store", "sqlite:statehouse.db"]).contains("wants an empty store"));
}

#[test]
fn what_another_engine_changes_is_said() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    let moved = shell.json(0, &["plan", "--to", "dynamodb"]);
    assert_eq!((&moved["from"], &moved["to"]), (&Json::from("sqlite"), &Json::from("dynamodb")));
    let weaker = moved["differences"].as_array().unwrap().iter().filter(|one| one["weaker"] == true);
    assert!(weaker.count() > 0, "{moved}");
    let fields: Vec<String> = (0..2_001).map(|number| format!("f{number} = \"int?\"")).collect();
    let wide = format!(
        "[house]\nname = \"w\"\n[entity.wide]\nkey = {{ id = \"int\" }}\nfields = {{ {} }}\n",
        fields.join(", ")
    );
    shell.write("wide.toml", &wide);
    let text = shell.expect(3, &["check", "--blueprint", "wide.toml", "--on", "sqlite"]);
    assert!(text.contains("wide.toml") && text.contains("columns"), "{text}");
    assert!(shell.expect(3, &["apply", "--blueprint", "wide.toml"]).contains("columns"));
    assert!(
        !shell.folder.path().join("statehouse.db").exists(),
        "nothing is created for what cannot be carried"
    );
}

#[test]
fn holds_in_redis_are_explained_and_asked_for() {
    let shell = Shell::new();
    let blueprint = "[booking.seat]\nkey = { event_id = \"text\", seat_no = \"int\" }\nholds = \"redis\"\n";
    shell.write("statehouse.toml", blueprint);
    let text = shell.expect(0, &["plan"]);
    assert!(text.contains("some things are weaker") && text.contains("at most once"), "{text}");
    assert_eq!(shell.json(0, &["plan"])["leased"], serde_json::json!(["seat"]));
    let text = shell.expect(0, &["explain", "seat_booking.hold", "--on", "postgres"]);
    assert!(text.contains("take all holds or none, in Redis") && text.contains("insert into"), "{text}");
    for action in ["extend", "cancel"] {
        let text = shell.expect(0, &["explain", &format!("seat_booking.{action}")]);
        assert!(text.contains("the holds, in Redis"), "{text}");
    }
    assert!(shell.expect(2, &["call", "seat.read", "--key", "gala,1"]).contains("STATEHOUSE_REDIS"));
    shell.write("server.toml", "redis = \"redis://:word@127.0.0.1:1\"\n");
    let text = shell.expect(1, &["call", "seat.read", "--key", "gala,1"]);
    assert!(text.contains("holds cannot be reached") && !text.contains("word"), "{text}");
}

/// All bytes of the files in the folder whose names begin with `statehouse.db`: the database, its write-ahead log and index.
fn stored_bytes(shell: &Shell) -> Vec<u8> {
    let files = std::fs::read_dir(shell.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let database =
        files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("statehouse.db"));
    database.flat_map(|path| std::fs::read(path).unwrap()).collect()
}

fn has_bytes(stored: &[u8], wanted: &str) -> bool {
    stored.windows(wanted.len()).any(|window| window == wanted.as_bytes())
}

#[test]
fn the_files_hold_no_secret_and_no_api_key() {
    let shell = Shell::new();
    shell.write("statehouse.toml", "[effect.hook]\nhosts = [\"*\"]\nsign = [\"house:hook\"]\n");
    let text = |json: &Json, name: &str| json[name].as_str().unwrap().to_owned();
    let plain = text(&shell.json(0, &["secret", "generate", "plain"]), "secret");
    assert!(has_bytes(&stored_bytes(&shell), &plain), "without a key the scan has to find it");
    let without = shell.expect(1, &["secret", "reencrypt"]);
    assert!(without.contains("secrets_key"), "{without}");
    let keys = [(); 2].map(|()| text(&shell.json(0, &["secret", "new-key"]), "key"));
    shell.write("server.toml", &format!("secrets_key = \"{}\"\n", keys[0]));
    let sealed = text(&shell.json(0, &["secret", "generate", "sealed"]), "secret");
    let api_key = text(&shell.json(0, &["key", "create", "--tenant", "acme"]), "key");
    let done = shell.json(0, &["secret", "reencrypt"]);
    // The server's own secret, from which digests of keys are derived, was encrypted when it was made.
    assert_eq!((&done["total"], &done["changed"]), (&3.into(), &1.into()), "{done}");
    let stored = stored_bytes(&shell);
    assert!(!has_bytes(&stored, &sealed), "the file has a secret");
    let hidden = api_key.rsplit('_').next().unwrap();
    assert!(hidden.len() >= 64 && !has_bytes(&stored, &hidden[..64]), "the file has an API key");
    assert!(!has_bytes(&stored, &keys[0]), "the file has the key");
    // Another key is refused with the id of the missing one, and nothing is replaced.
    shell.write("server.toml", &format!("secrets_key = \"{}\"\n", keys[1]));
    let refused = shell.expect(1, &["key", "create", "--tenant", "acme"]);
    let id = done["key"].as_str().unwrap();
    assert!(refused.contains(id) && refused.contains("secrets_key"), "{refused}");
    shell.write("server.toml", &format!("secrets_key = \"{},{}\"\n", keys[1], keys[0]));
    assert_eq!(shell.json(0, &["secret", "reencrypt"])["changed"], 3);
    shell.write("server.toml", &format!("secrets_key = \"{}\"\n", keys[1]));
    shell.expect(0, &["key", "create", "--tenant", "acme"]);
    shell.write("server.toml", "secrets_key = \"none\"\n");
    assert!(shell.expect(2, &["secret", "generate", "x"]).contains("new-key"));
}

/// Many rows, so that pages of the file split and merge, and their contents are copied within it.
#[test]
fn the_files_hold_nothing_of_what_was_erased() {
    const TOML: &str = "[entity.member]\nkey = { id = \"int\" }\nfields = { name = \"text\", email = { type = \"text\", unique = true } }\n\
        require_version = false\nperson = \"id\"\n[thread.comment]\nparent = { post = \"int\" }\nfields = { author = \"int\", body = \"text\" }\n\
        require_version = false\nperson = \"author\"\n[view.names]\nof = \"member\"\ngroup_by = [\"name\"]\n";
    let shell = Shell::new();
    shell.write("statehouse.toml", TOML);
    let secret = |id: usize, what: &str| format!("personal-{what}-of-{id}@example.org");
    for id in 0..12 {
        let (name, email) = (format!("name={}", secret(id, "name")), format!("email={}", secret(id, "mail")));
        let id_field = format!("id={id}");
        shell.expect(0, &["call", "member.create", &id_field, &name, &email]);
        let (key, former) = (id.to_string(), format!("name={}", secret(id, &"former ".repeat(200))));
        shell.expect(0, &["call", "member.patch", "--key", &key, &former]);
        shell.expect(0, &["call", "member.patch", "--key", &key, &name]);
        let (author, body) = (format!("author={id}"), format!("body={}", secret(id, "body")));
        let comment = format!("comment_id=c{id}");
        shell.expect(0, &["call", "comment.append", "post=1", &comment, &author, &body]);
    }
    shell.expect(0, &["projection", "rebuild", "names"]);
    let of_person = |id: usize| {
        [secret(id, "name"), secret(id, "mail"), secret(id, &"former ".repeat(200)), secret(id, "body")]
    };
    for text in of_person(3) {
        assert!(has_bytes(&stored_bytes(&shell), &text), "the scan has to find {text:?} while it is there");
    }
    assert!(shell.expect(2, &["erase", "--person", "3"]).contains("--yes"));
    assert!(shell.expect(2, &["erase", "member", "--key", "3"]).contains("--yes"));
    shell.expect(2, &["erase", "member", "--yes"]);
    shell.expect(2, &["erase", "--key", "3", "--yes"]);
    shell.expect(0, &["call", "member.read", "--key", "3"]);
    let done = shell.json(0, &["erase", "--person", "3", "--yes"]);
    assert_eq!((&done["erased"], &done["blanked"]), (&2.into(), &4.into()), "{done}");
    shell.expect(0, &["erase", "member", "--key", "4", "--yes"]);
    assert_eq!(shell.json(1, &["erase", "member", "--key", "4", "--yes"])["error"], "not_found");
    // The view follows; then its former rows are in the file no more, either.
    shell.expect(0, &["projection", "rebuild", "names"]);
    shell.expect(0, &["projection", "drop", "names"]);
    // The workers of a server delete the former generation.
    let mut workers = Command::new(env!("CARGO_BIN_EXE_statehouse"))
        .args(["serve", "--workers", "only"])
        .current_dir(shell.folder.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let is_rebuilt = || shell.run(&["projection", "rebuild", "names"]).status.success();
    let rebuilt = (0..600).any(|_| is_rebuilt());
    workers.kill().unwrap();
    workers.wait().unwrap();
    assert!(rebuilt, "the former generation is not deleted");
    shell.expect(0, &["erase", "member", "--key", "5", "--yes"]);
    let stored = stored_bytes(&shell);
    let left: Vec<String> = of_person(3).into_iter().filter(|text| has_bytes(&stored, text)).collect();
    assert!(left.is_empty(), "the files still have {left:?}");
    let others = of_person(6).into_iter().filter(|text| has_bytes(&stored, text));
    assert_eq!(others.count(), 4, "another person's data is gone");
}

#[test]
fn secrets_are_kept_and_not_shown_again() {
    let shell = Shell::new();
    shell.write("statehouse.toml", "[effect.hook]\nhosts = [\"*\"]\nsign = [\"house:hook\"]\n");
    let made = shell.json(0, &["secret", "generate", "hook"]);
    assert!(made["secret"].as_str().unwrap().starts_with("whsec_"), "{made}");
    assert!(shell.expect(2, &["secret", "generate", "../server"]).contains("letters, digits"));
    assert!(shell.expect(2, &["secret", "set", "hook"]).contains("standard input is empty"));
    assert!(shell.expect(0, &["secret", "forget", "hook"]).contains("house:hook is forgotten"));
    // Without a worker an effect waits as it was written down; a repetition is the same one.
    let url = "url=https://customer.example/hook";
    let sent = shell.json(0, &["call", "hook.send", "key=order-7", url]);
    assert_eq!((&sent["created"], &sent["body"]["status"]), (&Json::from("order-7"), &Json::from("PENDING")));
    shell.expect(0, &["call", "hook.send", "key=order-7", url]);
    shell.expect(4, &["call", "hook.send", "key=order-7", url, "body=other"]);
}

#[test]
fn the_audit_lists_and_exports_what_operators_did() {
    let shell = Shell::new();
    shell.expect(0, &["init"]);
    shell.expect(0, &["apply"]);
    let key = shell.expect(0, &["key", "create", "--quiet", "--name", "shop"]);
    let prefix = shell.json(0, &["key", "list"])[0]["prefix"].as_str().unwrap().to_owned();
    shell.expect(0, &["key", "revoke", &prefix]);
    let actions = |rows: &Json| -> Vec<String> {
        rows.as_array().unwrap().iter().map(|row| row["action"].as_str().unwrap().to_owned()).collect()
    };
    let rows = shell.json(0, &["audit", "list"]);
    assert_eq!(actions(&rows), ["key.revoke", "key.create", "secret.generate", "house.migrate"]);
    assert_eq!((&rows[0]["target"], &rows[0]["tenant"]), (&Json::from(prefix.as_str()), &"default".into()));
    assert!(rows[0]["credential"].as_str().unwrap().starts_with("command:"), "{rows}");
    assert_eq!(shell.json(0, &["audit", "list", "--limit", "1"]).as_array().unwrap().len(), 1);
    assert_eq!(actions(&shell.json(0, &["audit", "list", "--action", "key."])), ["key.revoke", "key.create"]);
    assert!(shell.expect(0, &["audit", "list", "--from", "2999-01-01T00:00:00Z"]).contains("no such"));
    assert!(shell.expect(2, &["audit", "list", "--from", "yesterday"]).contains("--from"));
    // A change of a store that has the table is recorded before it and after it.
    let blueprint = std::fs::read_to_string(shell.folder.path().join("statehouse.toml")).unwrap();
    shell.write("statehouse.toml", &format!("{blueprint}\n[entity.extra]\nkey = {{ id = \"int\" }}\n"));
    shell.expect(0, &["apply"]);
    let exported = shell.expect(0, &["audit", "export", "--json"]);
    let rows: Vec<Json> = exported.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let told: Vec<(&str, &str)> =
        rows.iter().map(|row| (row["action"].as_str().unwrap(), row["outcome"].as_str().unwrap())).collect();
    let expected = [
        ("house.migrate", "done"),
        ("secret.generate", "done"),
        ("key.create", "done"),
        ("key.revoke", "done"),
        ("house.migrate", "begun"),
        ("house.migrate", "done"),
    ];
    assert_eq!(told, expected);
    assert!(rows[5]["detail"].as_str().unwrap().contains("extra"), "{exported}");
    assert!(!exported.contains(key.trim().rsplit('_').next().unwrap()), "the audit has a key");
    assert_eq!(shell.expect(0, &["audit", "export"]).lines().count(), 6);
    assert!(
        shell
            .expect(2, &["serve", "--workers", "only", "--set", "audit_retention=soon"])
            .contains("audit_retention")
    );
}
