//! Logs: one line per event, as JSON or as text.
//!
//! - L1. *Logging never blocks.* A line is formatted on the calling thread and queued for a writer thread. If the reader of
//!   the log is too slow, lines beyond [`QUEUE_BYTES_MAX`] are dropped, and a line reports their number.
//! - L2. *No secrets at any level.* Lines come from this project's own events, which contain no body, credential,
//!   idempotency key or row key. Events of libraries are logged from level `warn` up only: their detailed events show
//!   traffic.
//! - L3. *No log injection.* Field values are escaped: an event is always one line.
//!
//! At the default level, `info`, each request produces one line when it has been answered.

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

/// Prefix of the targets that are logged at every level.
const OWN: &str = "statehouse";
/// Queue limit.
const QUEUE_BYTES_MAX: usize = 4 << 20;
/// Queue size at which the writer thread is woken immediately.
const WAKE_BYTES: usize = 64 << 10;
/// Time that a line may wait, so that several lines are written together.
const FLUSH_DELAY: Duration = Duration::from_millis(10);

/// Log settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogOptions {
    /// Minimum level.
    pub level: Level,
    /// Line format.
    pub format: Format,
}

/// Severity of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Nothing is logged.
    Off,
    /// A failure.
    Error,
    /// A condition that needs attention.
    Warn,
    /// Start, stop and every request.
    #[default]
    Info,
    /// Broken connections and other details.
    Debug,
    /// Everything.
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

/// Line format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One JSON object per line.
    #[default]
    Json,
    /// Time, level and message, then `name=value`.
    Text,
}

/// The process already has a logger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process already has a logger")]
pub struct AlreadyStarted;

/// The logger of a process. Dropping it writes the queued lines, so keep it until the end of `main`.
#[derive(Debug)]
#[must_use]
pub struct Logs {
    queue: Arc<LogQueue>,
    writer: Option<JoinHandle<()>>,
}

/// Starts the logger of this process. This works once.
pub fn start(options: LogOptions, to: impl Write + Send + 'static) -> Result<Logs, AlreadyStarted> {
    let queue = Arc::new(LogQueue::default());
    let lines = LogSubscriber { options, queue: queue.clone() };
    tracing::subscriber::set_global_default(lines).map_err(|_| AlreadyStarted)?;
    let writer = std::thread::Builder::new().name("statehouse-logs".into()).spawn({
        let queue = queue.clone();
        move || queue.drain(to)
    });
    Ok(Logs { queue, writer: writer.ok() })
}

impl Drop for Logs {
    fn drop(&mut self) {
        self.queue.state().ended = true;
        self.queue.news.notify_one();
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has nothing left to write.
            let _ = writer.join();
        }
    }
}

/// Lines that wait to be written.
#[derive(Debug, Default)]
struct LogQueue {
    state: Mutex<LogQueueState>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct LogQueueState {
    lines: Vec<u8>,
    dropped: u64,
    ended: bool,
}

impl LogQueue {
    fn state(&self) -> std::sync::MutexGuard<'_, LogQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &str, urgent: bool) {
        let mut state = self.state();
        if state.lines.len() + line.len() > QUEUE_BYTES_MAX {
            state.dropped += 1;
            return;
        }
        let before = state.lines.len();
        state.lines.extend_from_slice(line.as_bytes());
        let wakes = before == 0 || urgent || (before < WAKE_BYTES && state.lines.len() >= WAKE_BYTES);
        drop(state);
        if wakes {
            self.news.notify_one();
        }
    }

    /// Writes queued lines until the queue is closed. Write errors have no reader; the lines are lost.
    fn drain(&self, mut to: impl Write) {
        let mut lines = Vec::new();
        loop {
            let mut state = self.state();
            while state.lines.is_empty() && !state.ended {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if !state.ended && state.lines.len() < WAKE_BYTES {
                let more = self.news.wait_timeout(state, FLUSH_DELAY);
                state = more.unwrap_or_else(PoisonError::into_inner).0;
            }
            std::mem::swap(&mut lines, &mut state.lines);
            let (dropped, ended) = (std::mem::take(&mut state.dropped), state.ended);
            drop(state);
            let _ = to.write_all(&lines);
            if dropped > 0 {
                let _ = writeln!(
                    to,
                    "{{\"level\":\"WARN\",\"message\":\"lines were left out\",\"lines\":{dropped}}}"
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

/// Formats events as lines. Spans are not recorded: the line of a request contains its ids.
struct LogSubscriber {
    options: LogOptions,
    queue: Arc<LogQueue>,
}

thread_local! {
    static LINE: RefCell<LineBuffer> = RefCell::default();
}

/// Line buffer of a thread, with the formatted time of the last second: most lines share it, and formatting a date is
/// the largest cost.
#[derive(Default)]
struct LineBuffer {
    text: String,
    second: i64,
    second_text: String,
}

impl LineBuffer {
    /// Starts a line with the time, formatted as [`Time`].
    fn begin(&mut self, format: Format, now: Time) {
        let (second, micros) = (now.micros().div_euclid(1_000_000), now.micros().rem_euclid(1_000_000));
        if second != self.second || self.second_text.is_empty() {
            self.second = second;
            self.second_text = Time::from_micros(second * 1_000_000).to_string();
            // The rest ends with the decimal point.
            self.second_text.truncate(self.second_text.len().saturating_sub("000000Z".len()));
        }
        self.text.clear();
        self.text.push_str(if format == Format::Json { "{\"at\":\"" } else { "" });
        self.text.push_str(&self.second_text);
        // Writing to memory does not fail.
        let _ = write!(self.text, "{micros:06}Z");
    }
}

impl Subscriber for LogSubscriber {
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
        // An event raised while this thread formats a line finds the buffer borrowed and is dropped.
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
    event.record(&mut LogFields { line, format });
    line.push_str(if format == Format::Json { "}\n" } else { "\n" });
}

/// Writes the fields of an event. Empty texts are omitted.
struct LogFields<'l> {
    line: &'l mut String,
    format: Format,
}

impl LogFields<'_> {
    /// Writes the name and returns whether text is quoted.
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

impl Visit for LogFields<'_> {
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

/// Escapes text for a JSON string (L3).
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

    /// The lines of some events.
    fn lines(options: LogOptions, say: impl FnOnce()) -> String {
        let queue = Arc::new(LogQueue::default());
        tracing::subscriber::with_default(LogSubscriber { options, queue: queue.clone() }, say);
        queue.state().ended = true;
        let mut text = Vec::new();
        queue.drain(&mut text);
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_line_is_one_object_whatever_is_in_it() {
        let evil = "a\"b\\c\nd\u{7f}\u{85}";
        let text = lines(LogOptions::default(), || {
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
        let plain = lines(LogOptions { format: Format::Text, ..LogOptions::default() }, || {
            tracing::warn!(target: "statehouse::x", status = 200_u16, evil, "done");
        });
        assert!(
            plain.contains("WARN  done status=200 evil=\"a\\\"b") && plain.lines().count() == 1,
            "{plain}"
        );
    }

    #[test]
    fn the_time_of_a_line_is_written_as_times_are() {
        let mut line = LineBuffer::default();
        for micros in [0, 1, 999_999, 1_000_000, 1_700_000_000_123_456, 1_700_000_000_999_999, -1] {
            let now = Time::from_micros(micros);
            line.begin(Format::Text, now);
            assert_eq!(line.text, now.to_string());
        }
    }

    #[test]
    fn libraries_are_only_heard_when_they_warn() {
        let everything = LogOptions { level: Level::Trace, ..LogOptions::default() };
        let text = lines(everything, || {
            tracing::trace!(target: "statehouse::x", "own");
            tracing::info!(target: "hyper::proto", "theirs");
            tracing::warn!(target: "hyper::proto", "their warning");
        });
        assert!(text.contains("own") && text.contains("their warning") && !text.contains("theirs"), "{text}");
        let quiet = lines(LogOptions { level: Level::Off, ..LogOptions::default() }, || {
            tracing::error!(target: "statehouse::x", "own");
        });
        assert_eq!(quiet, "");
    }

    #[test]
    fn a_slow_reader_loses_lines_and_is_told_how_many() {
        let queue = LogQueue::default();
        let line = "x".repeat(QUEUE_BYTES_MAX / 2);
        for _ in 0..5 {
            queue.push(&line, false);
        }
        queue.state().ended = true;
        let mut text = Vec::new();
        queue.drain(&mut text);
        assert!(String::from_utf8(text).unwrap().ends_with("\"lines\":3}\n"));
    }
}
