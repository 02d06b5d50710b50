//! Figures on the terminal, each beside its reference.

#![expect(clippy::print_stdout, reason = "printing is what a report does")]

use crate::load::LoadRound;

/// Prints a heading.
pub fn heading(text: &str) {
    println!("\n{text}");
}

/// Prints a line as it is: a row of a table.
pub fn line(text: &str) {
    println!("{text}");
}

/// Prints one measurement.
pub fn measured(name: &str, round: LoadRound) {
    let micros = |span: std::time::Duration| span.as_micros();
    println!(
        "  {name:<58} {:>9.0}/s   p50 {:>6} µs   p99 {:>6} µs",
        round.rate,
        micros(round.p50),
        micros(round.p99)
    );
}

/// Prints a ratio and whether it reaches what is wanted.
pub fn ratio(name: &str, ratio: f64, wanted: f64) {
    let verdict = if ratio >= wanted { "reached" } else { "NOT REACHED" };
    println!("  {name:<58} {ratio:>9.2} ×   wanted {wanted} ×: {verdict}");
}

/// Prints a ratio that nothing is asked of.
pub fn compared(name: &str, ratio: f64) {
    println!("  {name:<58} {ratio:>9.2} ×");
}

/// Prints a figure under an upper limit.
pub fn bounded(name: &str, figure: f64, unit: &str, limit: f64) {
    let verdict = if figure <= limit { "reached" } else { "NOT REACHED" };
    println!("  {name:<58} {figure:>9.1} {unit}   wanted at most {limit} {unit}: {verdict}");
}

/// Prints a figure that nothing is asked of.
pub fn figure(name: &str, figure: f64, unit: &str) {
    println!("  {name:<58} {figure:>9.1} {unit}");
}

/// Prints something that figures have to be seen with.
pub fn note(name: &str, text: &str) {
    println!("  {name:<58} {text}");
}
