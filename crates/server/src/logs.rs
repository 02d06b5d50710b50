//! Logs: one line for each event, as JSON for machines or as text for people.
//!
//! - L1. *Nobody waits for a log.* A line is put together on the caller's thread and handed to a thread that writes. If
//!   the reader of the log is slower than the server, lines beyond [`WAITING_BYTES_MAX`] are left out, and a line says
//!   how many.
//! - L2. *No secrets, at any level.* Lines come from this project's own events, which name no body, no credential, no
//!   idempotency key and no key of a row. What libraries have to say is only passed on when it is a warning: their
//!   detailed events show what crosses the wire.
//! - L3. *No tricks.* Whatever a caller can smuggle into a field is escaped: a line is one line.
//!
//! At the default level, `info`, there is one line for each request, when it has been answered.

use std::cell::RefCell;
use std::fmt::{self, Write as _};
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use statehouse_store::{Clock as _, SystemClock, Time};
use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber, span};

/// Whose events are passed on at every level.
const OWN: &str = "statehouse";
/// What may wait for a slow reader of the log.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// What is worth waking the writing thread for at once.
const WORTH_BYTES: usize = 64 << 10;
/// How long a line may wait for others to be written with it.
const GATHER: Duration = Duration::from_millis(10);

/// What is logged, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The least important events that are logged.
    pub level: Level,
    /// How a line is written.
    pub format: Format,
}

/// How important an event is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Nothing is logged.
    Off,
    /// Something failed that should not.
    Error,
    /// Something is not as it should be.
    Warn,
    /// Starts, stops and every request.
    #[default]
    Info,
    /// Broken connections and other small things.
    Debug,
    /// Everything there is.
    Trace,
}

impl Level {
    fn filter(self) -> tracing::metadata::LevelFilter {
        use tracing::metadata::LevelFilter;
        match self {
            Level::Off => LevelFilter::OFF,
            Level::Error => LevelFilter::ERROR,
            Level::Warn => LevelFilter::WARN,
            Level::Info => LevelFilter::INFO,
            Level::Debug => LevelFilter::DEBUG,
            Level::Trace => LevelFilter::TRACE,
        }
    }
}

/// How a line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One JSON object a line.
    #[default]
    Json,
    /// Time, level and message, then `name=value`.
    Text,
}

/// Logs cannot be started: the process has some already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process has logs already")]
pub struct Taken;

/// The logs of a process. Lines that wait are written when this is dropped, so keep it until the end of `main`.
#[derive(Debug)]
#[must_use]
pub struct Logs {
    queue: Arc<Queue>,
    writer: Option<JoinHandle<()>>,
}

/// Starts the logs of this process. They can be started once.
pub fn start(options: Options, to: impl Write + Send + 'static) -> Result<Logs, Taken> {
    let queue = Arc::new(Queue::default());
    let lines = Lines { options, queue: queue.clone() };
    tracing::subscriber::set_global_default(lines).map_err(|_| Taken)?;
    let writer = std::thread::Builder::new().name("statehouse-logs".into()).spawn({
        let queue = queue.clone();
        move || queue.drain(to)
    });
    Ok(Logs { queue, writer: writer.ok() })
}

impl Drop for Logs {
    fn drop(&mut self) {
        self.queue.waiting().ended = true;
        self.queue.news.notify_one();
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has nothing more to write.
            let _ = writer.join();
        }
    }
}

/// Lines that wait to be written.
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: Vec<u8>,
    left_out: u64,
    ended: bool,
}

impl Queue {
    fn waiting(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &str, urgent: bool) {
        let mut waiting = self.waiting();
        if waiting.lines.len() + line.len() > WAITING_BYTES_MAX {
            waiting.left_out += 1;
            return;
        }
        let before = waiting.lines.len();
        waiting.lines.extend_from_slice(line.as_bytes());
        let wakes = before == 0 || urgent || (before < WORTH_BYTES && waiting.lines.len() >= WORTH_BYTES);
        drop(waiting);
        if wakes {
            self.news.notify_one();
        }
    }

    /// Writes what waits until the end. An error of the writer is nobody's to hear; the lines are lost.
    fn drain(&self, mut to: impl Write) {
        let mut lines = Vec::new();
        loop {
            let mut waiting = self.waiting();
            while waiting.lines.is_empty() && !waiting.ended {
                waiting = self.news.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            if !waiting.ended && waiting.lines.len() < WORTH_BYTES {
                let more = self.news.wait_timeout(waiting, GATHER);
                waiting = more.unwrap_or_else(PoisonError::into_inner).0;
            }
            std::mem::swap(&mut lines, &mut waiting.lines);
            let (left_out, ended) = (std::mem::take(&mut waiting.left_out), waiting.ended);
            drop(waiting);
            let _ = to.write_all(&lines);
            if left_out > 0 {
                let _ = writeln!(
                    to,
                    "{{\"level\":\"WARN\",\"message\":\"lines were left out\",\"lines\":{left_out}}}"
                );
            }
            let _ = to.flush();
            lines.clear();
            if ended {
                return;
            }
        }
    }
}

/// Makes lines of events. Spans are not kept: the ids of a request stand in its own line.
struct Lines {
    options: Options,
    queue: Arc<Queue>,
}

thread_local! {
    static LINE: RefCell<Line> = RefCell::default();
}

/// The line that a thread puts together, and the second that it last did so in: most lines share theirs with the one
/// before, and to write a date costs more than all the rest.
#[derive(Default)]
struct Line {
    text: String,
    second: i64,
    second_text: String,
}

impl Line {
    /// Begins with the time, in the form of [`Time`].
    fn begin(&mut self, format: Format, now: Time) {
        let (second, micros) = (now.micros().div_euclid(1_000_000), now.micros().rem_euclid(1_000_000));
        if second != self.second || self.second_text.is_empty() {
            self.second = second;
            self.second_text = Time::from_micros(second * 1_000_000).to_string();
            // What is left ends with the point before the decimals.
            self.second_text.truncate(self.second_text.len().saturating_sub("000000Z".len()));
        }
        self.text.clear();
        self.text.push_str(if format == Format::Json { "{\"at\":\"" } else { "" });
        self.text.push_str(&self.second_text);
        // Writing to memory does not fail.
        let _ = write!(self.text, "{micros:06}Z");
    }
}

impl Subscriber for Lines {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let own = metadata.target().starts_with(OWN);
        metadata.is_event()
            && *metadata.level() <= self.options.level.filter()
            && (own || *metadata.level() <= tracing::Level::WARN)
    }

    fn max_level_hint(&self) -> Option<tracing::metadata::LevelFilter> {
        Some(self.options.level.filter())
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        // An event that arises while a line is put together on this thread finds it in use and is left out.
        let _ = LINE.try_with(|line| {
            if let Ok(mut line) = line.try_borrow_mut() {
                line.begin(self.options.format, SystemClock.now());
                write_line(&mut line.text, self.options.format, event);
                self.queue.push(&line.text, *event.metadata().level() <= tracing::Level::WARN);
            }
        });
    }
}

fn write_line(line: &mut String, format: Format, event: &Event<'_>) {
    let metadata = event.metadata();
    match format {
        Format::Json => {
            for part in
                ["\",\"level\":\"", metadata.level().as_str(), "\",\"target\":\"", metadata.target(), "\""]
            {
                line.push_str(part);
            }
        }
        // Writing to memory does not fail.
        Format::Text => drop(write!(line, " {:<5}", metadata.level())),
    }
    event.record(&mut Fields { line, format });
    line.push_str(if format == Format::Json { "}\n" } else { "\n" });
}

/// Writes the fields of an event. Empty texts say nothing and are left out.
struct Fields<'l> {
    line: &'l mut String,
    format: Format,
}

impl Fields<'_> {
    /// Writes the name, and says whether text is put in quotes.
    fn name(&mut self, field: &Field) -> bool {
        match self.format {
            Format::Json => {
                self.line.push_str(",\"");
                self.line.push_str(field.name());
                self.line.push_str("\":");
                true
            }
            Format::Text => {
                self.line.push(' ');
                let named = field.name() != "message";
                if named {
                    self.line.push_str(field.name());
                    self.line.push('=');
                }
                named
            }
        }
    }

    fn text(&mut self, field: &Field, write: impl FnOnce(&mut Escaped<'_>) -> fmt::Result) {
        let quote = if self.name(field) { "\"" } else { "" };
        self.line.push_str(quote);
        // Writing to memory does not fail.
        let _ = write(&mut Escaped(self.line));
        self.line.push_str(quote);
    }

    fn bare(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        self.name(field);
        let _ = self.line.write_fmt(value);
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.text(field, |to| write!(to, "{value:?}"));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        if !value.is_empty() {
            self.text(field, |to| to.write_str(value));
        }
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.bare(field, format_args!("{value}"));
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.bare(field, format_args!("{value}"));
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.bare(field, format_args!("{value}"));
    }
}

/// Text as it stands between the quotes of a JSON string (L3).
struct Escaped<'l>(&'l mut String);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if !text.bytes().any(|byte| byte < b' ' || matches!(byte, b'"' | b'\\' | 0x7f)) {
            self.0.push_str(text);
            return Ok(());
        }
        for letter in text.chars() {
            match letter {
                '"' => self.0.push_str("\\\""),
                '\\' => self.0.push_str("\\\\"),
                control if control.is_control() => write!(self.0, "\\u{:04x}", u32::from(control))?,
                other => self.0.push(other),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an event becomes.
    fn lines(options: Options, say: impl FnOnce()) -> String {
        let queue = Arc::new(Queue::default());
        tracing::subscriber::with_default(Lines { options, queue: queue.clone() }, say);
        queue.waiting().ended = true;
        let mut text = Vec::new();
        queue.drain(&mut text);
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_line_is_one_object_whatever_is_in_it() {
        let evil = "a\"b\\c\nd\u{7f}\u{85}";
        let text = lines(Options::default(), || {
            tracing::info!(target: "statehouse::x", status = 200_u16, evil, shown = %evil, empty = "", "done");
        });
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["message"], &line["level"]), (&"done".into(), &"INFO".into()));
        assert_eq!(
            (&line["status"], &line["evil"], &line["shown"]),
            (&200.into(), &evil.into(), &evil.into())
        );
        assert!(line.get("empty").is_none());
        let plain = lines(Options { format: Format::Text, ..Options::default() }, || {
            tracing::warn!(target: "statehouse::x", status = 200_u16, evil, "done");
        });
        assert!(
            plain.contains("WARN  done status=200 evil=\"a\\\"b") && plain.lines().count() == 1,
            "{plain}"
        );
    }

    #[test]
    fn the_time_of_a_line_is_written_as_times_are() {
        let mut line = Line::default();
        for micros in [0, 1, 999_999, 1_000_000, 1_700_000_000_123_456, 1_700_000_000_999_999, -1] {
            let now = Time::from_micros(micros);
            line.begin(Format::Text, now);
            assert_eq!(line.text, now.to_string());
        }
    }

    #[test]
    fn libraries_are_only_heard_when_they_warn() {
        let everything = Options { level: Level::Trace, ..Options::default() };
        let text = lines(everything, || {
            tracing::trace!(target: "statehouse::x", "own");
            tracing::info!(target: "hyper::proto", "theirs");
            tracing::warn!(target: "hyper::proto", "their warning");
        });
        assert!(text.contains("own") && text.contains("their warning") && !text.contains("theirs"), "{text}");
        let quiet = lines(Options { level: Level::Off, ..Options::default() }, || {
            tracing::error!(target: "statehouse::x", "own");
        });
        assert_eq!(quiet, "");
    }

    #[test]
    fn a_slow_reader_loses_lines_and_is_told_how_many() {
        let queue = Queue::default();
        let line = "x".repeat(WAITING_BYTES_MAX / 2);
        for _ in 0..5 {
            queue.push(&line, false);
        }
        queue.waiting().ended = true;
        let mut text = Vec::new();
        queue.drain(&mut text);
        assert!(String::from_utf8(text).unwrap().ends_with("\"lines\":3}\n"));
    }
}
