//! What the command prints, for people and for programs.

use std::io::{IsTerminal, Write as _};
use std::process::ExitCode;

use serde_json::{Value as Json, json};
use statehouse::engine::OpenError;
use statehouse::{Code, Problems, Refusal};
use statehouse_store::StoreError;

use crate::omitted;

/// Where results go.
pub(crate) struct Output {
    json: bool,
}

/// Why the command did not do what it was asked.
#[derive(Debug)]
pub(crate) enum CliFailure {
    /// The blueprint is invalid.
    Blueprint(Problems),
    /// An action was refused.
    Refused(Refusal),
    /// It was called wrongly.
    Usage(String),
    /// Something else.
    Other(anyhow::Error),
    /// What was asked for was found wanting, and has been shown.
    #[cfg(feature = "proof")]
    Shown,
}

/// A number with its noun: `1 drill`, `2 drills`.
pub(crate) fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

impl Output {
    pub(crate) fn new(json: bool) -> Output {
        Output { json }
    }

    /// Prints a result: the JSON for programs, the text for people.
    pub(crate) fn show(&self, json: &Json, text: impl FnOnce() -> String) {
        let text = if self.json { format!("{json:#}") } else { text() };
        if !text.is_empty() {
            print(&text);
        }
    }

    /// Prints a result of a command that goes on: the JSON on one line.
    pub(crate) fn line(&self, json: &Json, text: impl FnOnce() -> String) {
        print(&if self.json { json.to_string() } else { text() });
    }

    /// Prints why the command failed, and returns the exit code that says so too.
    pub(crate) fn fail(&self, failure: &CliFailure) -> ExitCode {
        let (code, json) = match failure {
            CliFailure::Blueprint(problems) => {
                (3, json!({"error": "blueprint_invalid", "problems": problems.to_json()}))
            }
            CliFailure::Refused(refusal) => {
                let exit = match refusal.code {
                    code if code.is_conflict() => 4,
                    Code::InvalidInput => 2,
                    _ => 1,
                };
                let field_errors =
                    refusal.field_errors.iter().map(|m| json!({"pointer": m.pointer, "detail": m.detail}));
                let errors: Vec<Json> = field_errors.collect();
                let json = json!({
                    "error": refusal.code.name(), "message": refusal.message,
                    "current_version": refusal.current_version, "errors": errors,
                });
                (exit, json)
            }
            CliFailure::Usage(message) => (2, json!({"error": "usage", "message": message})),
            CliFailure::Other(error) => (1, json!({"error": "failed", "message": format!("{error:#}")})),
            #[cfg(feature = "proof")]
            CliFailure::Shown => return ExitCode::FAILURE,
        };
        if self.json {
            print(&format!("{json:#}"));
        } else {
            // Where the complaint cannot be heard, the exit code still says it.
            let _ = writeln!(std::io::stderr(), "{}", describe(failure));
        }
        ExitCode::from(code)
    }
}

/// Prints to standard output. A reader that closed it has read enough.
fn print(text: &str) {
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
}

/// Prints what goes on to standard error.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn describe(failure: &CliFailure) -> String {
    match failure {
        CliFailure::Blueprint(problems) => {
            let colored = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            problems.render(colored)
        }
        CliFailure::Refused(refusal) => {
            let mut lines = vec![format!("refused ({}): {}", refusal.code, refusal.message)];
            lines.extend(
                refusal.field_errors.iter().skip(1).map(|m| format!("  {}: {}", m.pointer, m.detail)),
            );
            lines.join("\n")
        }
        CliFailure::Usage(message) => format!("error: {message}"),
        CliFailure::Other(error) => format!("error: {error:#}"),
        #[cfg(feature = "proof")]
        CliFailure::Shown => String::new(),
    }
}

impl From<anyhow::Error> for CliFailure {
    fn from(error: anyhow::Error) -> CliFailure {
        CliFailure::Other(error)
    }
}

impl From<Problems> for CliFailure {
    fn from(problems: Problems) -> CliFailure {
        CliFailure::Blueprint(problems)
    }
}

impl From<Refusal> for CliFailure {
    fn from(refusal: Refusal) -> CliFailure {
        CliFailure::Refused(refusal)
    }
}

impl From<StoreError> for CliFailure {
    fn from(error: StoreError) -> CliFailure {
        CliFailure::Other(error.into())
    }
}

impl From<OpenError> for CliFailure {
    fn from(error: OpenError) -> CliFailure {
        match error {
            OpenError::Blueprint(problems) => CliFailure::Blueprint(problems),
            OpenError::BadUrl { .. } => CliFailure::Usage(error.to_string()),
            OpenError::NotBuilt { engine } => omitted::engine(engine),
            other => CliFailure::Other(other.into()),
        }
    }
}
