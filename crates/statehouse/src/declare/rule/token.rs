//! The words and symbols of a rule's text, each with its place in bytes.

use std::ops::Range;

use super::RuleError;

/// Words that are not names unless they are quoted.
const RESERVED: [&str; 9] = ["or", "and", "not", "is", "in", "null", "true", "false", "now"];

/// Comparisons first: the longer symbols before their beginnings.
const SYMBOLS: [&str; 12] = ["<>", "<=", ">=", "=", "<", ">", "(", ")", ",", ".", "+", "-"];

/// What other languages write, and what to write here.
const FOREIGN: [(&str, &str); 6] =
    [("==", "="), ("!=", "<>"), ("&&", "and"), ("||", "or"), ("!", "not"), ("\u{2260}", "<>")];

/// The suffix of an offset that is finer than the milliseconds of a blueprint's durations.
pub(super) const MICROSECONDS: &str = "us";

/// A word, a literal or a symbol.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RuleToken<'a> {
    /// A name or a word of the grammar.
    Word(&'a str),
    /// A name in double quotes.
    Quoted(String),
    /// A literal in single quotes.
    Text(String),
    /// Digits and what follows them without a gap: a number or a duration, without its sign.
    Number(&'a str),
    /// One of [`SYMBOLS`].
    Symbol(&'static str),
    /// The end of the text.
    End,
}

/// Whether a name can be written without quotes.
pub(super) fn is_word(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Whether a word belongs to the grammar.
pub(super) fn is_reserved(word: &str) -> bool {
    RESERVED.iter().any(|reserved| word.eq_ignore_ascii_case(reserved))
}

/// Takes the text apart. The last token is the end.
pub(super) fn tokens(text: &str) -> Result<Vec<(RuleToken<'_>, Range<usize>)>, RuleError> {
    let mut tokens = Vec::new();
    let mut offset = 0;
    loop {
        let rest = text.get(offset..).unwrap_or_default();
        let trimmed = rest.trim_start();
        offset += rest.len() - trimmed.len();
        if trimmed.is_empty() {
            tokens.push((RuleToken::End, text.len()..text.len()));
            return Ok(tokens);
        }
        let (token, length) = token(trimmed, offset)?;
        tokens.push((token, offset..offset + length));
        offset += length;
    }
}

/// The first token of a text that does not begin with a space, and its length.
fn token(text: &str, offset: usize) -> Result<(RuleToken<'_>, usize), RuleError> {
    let prefix = |length: usize| text.get(..length).unwrap_or_default();
    match text.chars().next() {
        Some(first) if first.is_ascii_alphabetic() || first == '_' => {
            let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
            Ok((RuleToken::Word(prefix(end)), end))
        }
        Some(first) if first.is_ascii_digit() => {
            let end = number_length(text);
            Ok((RuleToken::Number(prefix(end)), end))
        }
        Some('\'') => {
            let (content, end) = quoted(text, '\'', offset, "a text literal")?;
            Ok((RuleToken::Text(content), end))
        }
        Some('"') => {
            let (content, end) = quoted(text, '"', offset, "a quoted name")?;
            Ok((RuleToken::Quoted(content), end))
        }
        other => symbol(text, other, offset),
    }
}

fn symbol(text: &str, first: Option<char>, offset: usize) -> Result<(RuleToken<'_>, usize), RuleError> {
    if let Some((foreign, write)) = FOREIGN.iter().find(|(foreign, _)| text.starts_with(foreign)) {
        let title = format!("`{foreign}` is not a symbol of rules");
        return Err(RuleError::at(offset..offset + foreign.len(), title).advise(format!("write `{write}`")));
    }
    if let Some(symbol) = SYMBOLS.iter().find(|symbol| text.starts_with(**symbol)) {
        return Ok((RuleToken::Symbol(symbol), symbol.len()));
    }
    let first = first.unwrap_or_default();
    let title = format!("`{first}` is not a symbol of rules");
    Err(RuleError::at(offset..offset + first.len_utf8(), title))
}

/// How much of the text is one number or duration; an exponent may have a sign.
fn number_length(text: &str) -> usize {
    let mut before = ' ';
    let mut is_decimal = true;
    for (offset, letter) in text.char_indices() {
        let is_exponent_sign = matches!(letter, '+' | '-') && matches!(before, 'e' | 'E') && is_decimal;
        if !(letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_') || is_exponent_sign) {
            return offset;
        }
        is_decimal &= letter.is_ascii_digit() || matches!(letter, '.' | 'e' | 'E' | '+' | '-');
        before = letter;
    }
    text.len()
}

/// The content of a quoted text, in which a doubled quote stands for one, and its length with the quotes.
fn quoted(text: &str, quote: char, offset: usize, what: &str) -> Result<(String, usize), RuleError> {
    let mut content = String::new();
    let mut letters = text.char_indices().skip(1).peekable();
    while let Some((at, letter)) = letters.next() {
        if letter != quote {
            content.push(letter);
        } else if letters.next_if(|(_, next)| *next == quote).is_some() {
            content.push(quote);
        } else {
            return Ok((content, at + quote.len_utf8()));
        }
    }
    let title = format!("{what} is not closed");
    Err(RuleError::at(offset..offset + text.len(), title).advise(format!("end it with {quote}")))
}
