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
pub(crate) enum Failure {
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
    pub(crate) fn fail(&self, failure: &Failure) -> ExitCode {
        let (code, json) = match failure {
            Failure::Blueprint(problems) => {
                (3, json!({"error": "blueprint_invalid", "problems": problems.to_json()}))
            }
            Failure::Refused(refusal) => {
                let exit = match refusal.code {
                    code if code.is_conflict() => 4,
                    Code::InvalidInput => 2,
                    _ => 1,
                };
                let misfits =
                    refusal.misfits.iter().map(|m| json!({"pointer": m.pointer, "detail": m.detail}));
                let errors: Vec<Json> = misfits.collect();
                let json = json!({
                    "error": refusal.code.name(), "message": refusal.message,
                    "current_version": refusal.current_version, "errors": errors,
                });
                (exit, json)
            }
            Failure::Usage(message) => (2, json!({"error": "usage", "message": message})),
            Failure::Other(error) => (1, json!({"error": "failed", "message": format!("{error:#}")})),
            #[cfg(feature = "proof")]
            Failure::Shown => return ExitCode::FAILURE,
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

/// Prints to standard output. Whoever closed it has read enough.
fn print(text: &str) {
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
}

fn describe(failure: &Failure) -> String {
    match failure {
        Failure::Blueprint(problems) => {
            let colored = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            problems.render(colored)
        }
        Failure::Refused(refusal) => {
            let mut lines = vec![format!("refused ({}): {}", refusal.code, refusal.message)];
            lines.extend(refusal.misfits.iter().skip(1).map(|m| format!("  {}: {}", m.pointer, m.detail)));
            lines.join("\n")
        }
        Failure::Usage(message) => format!("error: {message}"),
        Failure::Other(error) => format!("error: {error:#}"),
        #[cfg(feature = "proof")]
        Failure::Shown => String::new(),
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure::Other(error)
    }
}

impl From<Problems> for Failure {
    fn from(problems: Problems) -> Failure {
        Failure::Blueprint(problems)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::Refused(refusal)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        Failure::Other(error.into())
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        match error {
            OpenError::Blueprint(problems) => Failure::Blueprint(problems),
            OpenError::BadUrl { .. } => Failure::Usage(error.to_string()),
            OpenError::NotBuilt { engine } => omitted::engine(engine),
            other => Failure::Other(other.into()),
        }
    }
}
