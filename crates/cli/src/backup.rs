//! `backup`: the store in a file, as of one moment.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use statehouse::engine::backup::{BackupError, backup};

use crate::arguments::Backup;
use crate::output::{CliFailure, Output};
use crate::settings::CliSettings;

pub(crate) async fn run(arguments: &Backup, output: &Output) -> Result<(), CliFailure> {
    let store = CliSettings::read(&arguments.flags())?.own.store;
    let to = arguments.to.clone();
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::new(0),
        false => ProgressBar::hidden(),
    };
    let style = ProgressStyle::with_template("{bar:40} {percent}% of {len} pages ({elapsed}) {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let shown = bar.clone();
    let copy = move || {
        backup(&store, &to, &mut |copied, pages| {
            shown.set_length(pages);
            shown.set_position(copied);
            if copied == pages {
                shown.set_message("checking it");
                shown.enable_steady_tick(Duration::from_millis(200));
            }
        })
    };
    let made = tokio::task::spawn_blocking(copy).await.context("the backup was cut off")?;
    bar.finish_and_clear();
    let (bytes, path) = (made?, &arguments.to);
    output.show(&json!({"file": path, "bytes": bytes}), || {
        format!("{} has the store as of when the backup began: {bytes} bytes, checked.", path.display())
    });
    Ok(())
}

impl From<BackupError> for CliFailure {
    fn from(error: BackupError) -> CliFailure {
        match error {
            BackupError::Elsewhere { .. } => CliFailure::Usage(error.to_string()),
            BackupError::Open(error) => error.into(),
            BackupError::Store(error) => error.into(),
        }
    }
}
