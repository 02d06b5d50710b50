//! Exported charts, read and run by XState itself, and imported again.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking, as tests do")]

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value as Json, json};

/// The folder of the packages.
const PACKAGES: &str = "STATEHOUSE_TEST_XSTATE";

const BLUEPRINT: &str = r#"
[house]
name = "charts"
[effect.mail]
url = "https://mail.example/"
[schedule.label]
[workflow.order]
key     = { order_id = "text" }
fields  = { total = "int", payment = "text?" }
initial = "open.new"
final   = ["CLOSED", "LAPSED"]
[workflow.order.on]
take    = { from = "open.new", to = "open.taken" }
give    = { from = "open.taken", to = "open.new" }
pay     = { from = "open.*", to = "PAID", if = "total < 10", set = ["payment"], send = { mail = { to = "{payment}" } } }
remind  = { from = "PAID" }
ship    = { from = "PAID", to = "CLOSED", scope = "warehouse", enqueue = { label = { order = "{order_id}" } } }
expire  = { from = "open.new", to = "LAPSED", after = "30m" }
"#;

/// Creates the machine on standard input, sends events to it (`+N` lets N milliseconds pass), and prints the state after each, the
/// actions that were run, and the configuration as XState has it.
const RUNNER: &str = r#"
const { createMachine, createActor, SimulatedClock } = require(process.argv[1] + "/xstate");
const [modules, holds, ...events] = process.argv.slice(1);
const run = [];
const note = (type) => (_, params) => run.push([type, params]);
const config = JSON.parse(require("fs").readFileSync(0, "utf8"));
const machine = createMachine(config).provide({
  guards: { condition: (_, params) => { run.push(["condition", params]); return holds === "true"; } },
  actions: { set: note("set"), send: note("send"), enqueue: note("enqueue") },
});
const clock = new SimulatedClock();
const actor = createActor(machine, { clock });
actor.start();
const flat = (value) => typeof value === "string" ? value
  : Object.entries(value).map(([name, below]) => name + "." + flat(below)).join("|");
const states = [flat(actor.getSnapshot().value)];
for (const event of events) {
  if (event.startsWith("+")) clock.increment(Number(event.slice(1))); else actor.send({ type: event });
  states.push(flat(actor.getSnapshot().value));
}
console.log(JSON.stringify({ states, run, status: actor.getSnapshot().status, config: machine.config }));
"#;

struct ChartShell(tempfile::TempDir);

impl ChartShell {
    fn new() -> ChartShell {
        let shell = ChartShell(tempfile::tempdir().unwrap());
        std::fs::write(shell.0.path().join("statehouse.toml"), BLUEPRINT).unwrap();
        shell
    }

    fn statehouse(&self, arguments: &[&str]) -> String {
        let command = Command::new(env!("CARGO_BIN_EXE_statehouse"))
            .args(arguments)
            .current_dir(self.0.path())
            .env_remove("STATEHOUSE_BLUEPRINT")
            .env_remove("STATEHOUSE_CONFIG")
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&command.stderr);
        assert!(command.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(command.stdout).unwrap()
    }

    /// What XState does with the exported machine.
    fn run(&self, holds: bool, events: &[&str]) -> Json {
        let packages = std::env::var(PACKAGES)
            .unwrap_or_else(|_| panic!("{PACKAGES} has to be set to what `scripts/xstate` prints"));
        let machine = self.statehouse(&["workflow", "export", "order"]);
        let mut node = Command::new("node")
            .args(["-e", RUNNER, &packages, &holds.to_string()])
            .args(events)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        node.stdin.take().unwrap().write_all(machine.as_bytes()).unwrap();
        let output = node.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn field<'j>(ran: &'j Json, name: &str) -> &'j Json {
    ran.get(name).unwrap()
}

#[test]
fn xstate_goes_where_the_workflow_goes() {
    let ran = ChartShell::new().run(true, &["ship", "take", "give", "take", "pay", "remind", "ship"]);
    let states = ["open.new", "open.new", "open.taken", "open.new", "open.taken", "PAID", "PAID", "CLOSED"];
    assert_eq!(field(&ran, "states"), &json!(states));
    assert_eq!(field(&ran, "status"), "done");
    let expected = json!([
        ["condition", {"if": "total < 10"}],
        ["set", {"fields": ["payment"]}],
        ["send", {"effect": "mail", "body": {"to": "{payment}"}}],
        ["enqueue", {"schedule": "label", "payload": {"order": "{order_id}"}}],
    ]);
    assert_eq!(field(&ran, "run"), &expected);
}

#[test]
fn xstate_keeps_conditions_and_timers() {
    let ran = ChartShell::new().run(false, &["pay", "take", "give", "+1799999", "+1"]);
    let states = ["open.new", "open.new", "open.taken", "open.new", "open.new", "LAPSED"];
    assert_eq!(field(&ran, "states"), &json!(states));
}

#[test]
fn what_xstate_has_is_imported_as_the_same_workflow() {
    let shell = ChartShell::new();
    let exported = shell.statehouse(&["workflow", "export", "order"]);
    let config = field(&shell.run(true, &[]), "config").to_string();
    std::fs::write(shell.0.path().join("machine.json"), config).unwrap();
    let imported = shell.statehouse(&["workflow", "import", "machine.json", "--name", "order"]);
    let fields = "fields  = { total = \"int\", payment = \"text?\" }\ninitial =";
    let besides = "[effect.mail]\nurl = \"https://mail.example/\"\n[schedule.label]\n";
    let blueprint = format!("{besides}{}", imported.replacen("initial =", fields, 1));
    std::fs::write(shell.0.path().join("statehouse.toml"), blueprint).unwrap();
    let again: Json = serde_json::from_str(&shell.statehouse(&["workflow", "export", "order"])).unwrap();
    assert_eq!(again, serde_json::from_str::<Json>(&exported).unwrap());
}
