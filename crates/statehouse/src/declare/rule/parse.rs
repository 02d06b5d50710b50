//! The parser of a rule's text: recursive descent, with the place of each term for messages.

use std::ops::Range;
use std::time::Duration;

use statehouse_store::Value;
use statehouse_store::guard::Comparison;
use statehouse_store::limits::GUARD_LEAVES_MAX;

use super::check::{RuleScope, check_leaf, too_many_leaves};
use super::token::{self, MICROSECONDS, RuleToken};
use super::{CheckedRule, Rule, RuleColumns, RuleError, Term};
use crate::blueprint::settings::parse_duration;
use crate::form::Property;

/// Parentheses and `not` go no deeper. Callers send rules too, and the parser calls itself for each level.
const DEPTH_MAX: usize = 32;

const TERM: &str = "a column, a literal, `now`, `input.NAME` or `claim.NAME`";

impl Rule {
    /// Reads and checks a rule that may name these columns and inputs. The grammar is described at [the module](super).
    pub fn parse(text: &str, columns: &RuleColumns, inputs: &[Property]) -> Result<CheckedRule, RuleError> {
        let scope = RuleScope { columns, inputs };
        let tokens = token::tokens(text)?;
        let mut parser = Parser { tokens: &tokens, place: 0, depth: 0, leaves: 0, scope };
        let rule = parser.alternatives(false)?;
        match parser.peek() {
            RuleToken::End => rule.checked(columns, inputs),
            _ => Err(parser.expected("`and`, `or` or the end")),
        }
    }
}

type Spanned<T> = (T, Range<usize>);

struct Parser<'a> {
    tokens: &'a [Spanned<RuleToken<'a>>],
    place: usize,
    depth: usize,
    leaves: usize,
    scope: RuleScope<'a>,
}

impl<'a> Parser<'a> {
    fn ahead(&self, by: usize) -> &'a RuleToken<'a> {
        self.tokens.get(self.place + by).map_or(&RuleToken::End, |(token, _)| token)
    }

    fn peek(&self) -> &'a RuleToken<'a> {
        self.ahead(0)
    }

    /// Where the next token stands; behind the last one, the end.
    fn span(&self) -> Range<usize> {
        let token = self.tokens.get(self.place).or_else(|| self.tokens.last());
        token.map_or(0..0, |(_, span)| span.clone())
    }

    /// Where the token before the next one ends.
    fn end(&self) -> usize {
        let before = self.place.checked_sub(1).and_then(|place| self.tokens.get(place));
        before.map_or(0, |(_, span)| span.end)
    }

    fn is_word(&self, by: usize, word: &str) -> bool {
        matches!(self.ahead(by), RuleToken::Word(found) if found.eq_ignore_ascii_case(word))
    }

    fn is_symbol(&self, by: usize, symbol: &str) -> bool {
        matches!(self.ahead(by), RuleToken::Symbol(found) if *found == symbol)
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let found = self.is_word(0, word);
        self.place += usize::from(found);
        found
    }

    fn eat_symbol(&mut self, symbol: &str) -> bool {
        let found = self.is_symbol(0, symbol);
        self.place += usize::from(found);
        found
    }

    fn need_symbol(&mut self, symbol: &str) -> Result<(), RuleError> {
        if self.eat_symbol(symbol) { Ok(()) } else { Err(self.expected(&format!("`{symbol}`"))) }
    }

    fn expected(&self, what: &str) -> RuleError {
        let found = match self.peek() {
            RuleToken::End => "the end".to_owned(),
            RuleToken::Word(word) | RuleToken::Number(word) => format!("`{word}`"),
            RuleToken::Symbol(symbol) => format!("`{symbol}`"),
            RuleToken::Quoted(name) => format!("\"{name}\""),
            RuleToken::Text(text) => Value::from(text.as_str()).to_string(),
        };
        RuleError::at(self.span(), format!("expected {what}, found {found}"))
    }

    fn alternatives(&mut self, is_negated: bool) -> Result<Rule, RuleError> {
        let mut rule = self.conjuncts(is_negated)?;
        while self.eat_word("or") {
            let next = self.conjuncts(is_negated)?;
            rule = if is_negated { rule.and(next) } else { rule.or(next) };
        }
        Ok(rule)
    }

    fn conjuncts(&mut self, is_negated: bool) -> Result<Rule, RuleError> {
        let mut rule = self.single(is_negated)?;
        while self.eat_word("and") {
            let next = self.single(is_negated)?;
            rule = if is_negated { rule.or(next) } else { rule.and(next) };
        }
        Ok(rule)
    }

    fn single(&mut self, is_negated: bool) -> Result<Rule, RuleError> {
        let (span, is_not, is_open) = (self.span(), self.is_word(0, "not"), self.is_symbol(0, "("));
        if !is_not && !is_open {
            return match self.constant() {
                Some(holds) if holds == is_negated => Ok(Rule::never()),
                Some(_) => Ok(Rule::always()),
                None => self.leaf(is_negated),
            };
        }
        if self.depth == DEPTH_MAX {
            let title = format!("the rule is nested deeper than {DEPTH_MAX} levels");
            return Err(RuleError::at(span, title));
        }
        self.depth += 1;
        self.place += 1;
        let rule = if is_not {
            self.single(!is_negated)?
        } else {
            let rule = self.alternatives(is_negated)?;
            if !self.eat_symbol(")") {
                return Err(self.expected("`and`, `or` or `)`"));
            }
            rule
        };
        self.depth -= 1;
        Ok(rule)
    }

    /// `true` or `false` where it is a whole rule and not a side of a comparison.
    fn constant(&mut self) -> Option<bool> {
        let holds = self.is_word(0, "true");
        if !holds && !self.is_word(0, "false") {
            return None;
        }
        let is_whole = match self.ahead(1) {
            RuleToken::End => true,
            RuleToken::Symbol(symbol) => *symbol == ")",
            RuleToken::Word(word) => word.eq_ignore_ascii_case("and") || word.eq_ignore_ascii_case("or"),
            _ => false,
        };
        self.place += usize::from(is_whole);
        is_whole.then_some(holds)
    }

    fn leaf(&mut self, is_negated: bool) -> Result<Rule, RuleError> {
        let (left, span) = self.term()?;
        let mut spans = vec![span];
        let rule = if let Some(comparison) = self.comparison() {
            let (right, span) = self.term()?;
            spans.push(span);
            Rule::Compare(left, comparison, right)
        } else if self.eat_word("is") {
            let is_not = self.eat_word("not");
            if !self.eat_word("null") {
                return Err(self.expected(if is_not { "`null`" } else { "`null` or `not null`" }));
            }
            if is_not { Rule::NotNull(left) } else { Rule::Null(left) }
        } else if self.eat_word("in") {
            Rule::In(left, self.list(&mut spans)?)
        } else if self.is_word(0, "not") && self.is_word(1, "in") {
            self.place += 2;
            Rule::NotIn(left, self.list(&mut spans)?)
        } else {
            let error = self.expected("a comparison (=, <>, <, <=, >, >=), `is` or `in`");
            return Err(error.advise(format!("a rule compares: `{left} = …`")));
        };
        self.check(rule, is_negated, &spans)
    }

    /// Counts and checks a leaf whose terms stand at these places.
    fn check(&mut self, rule: Rule, is_negated: bool, spans: &[Range<usize>]) -> Result<Rule, RuleError> {
        let whole = spans.first().map_or(0, |first| first.start)..self.end();
        self.leaves += 1;
        if self.leaves > GUARD_LEAVES_MAX {
            return Err(RuleError::at(whole, too_many_leaves()));
        }
        match check_leaf(rule, &self.scope) {
            Ok(leaf) if is_negated => Ok(leaf.rule.negated()),
            Ok(leaf) => Ok(leaf.rule),
            Err(error) => {
                let term = error.term.and_then(|index| spans.get(index)).cloned();
                Err(error.placed(term.unwrap_or(whole)))
            }
        }
    }

    fn comparison(&mut self) -> Option<Comparison> {
        let RuleToken::Symbol(symbol) = self.peek() else { return None };
        let comparison = Comparison::ALL.into_iter().find(|comparison| comparison.symbol() == *symbol)?;
        self.place += 1;
        Some(comparison)
    }

    fn list(&mut self, spans: &mut Vec<Range<usize>>) -> Result<Vec<Term>, RuleError> {
        self.need_symbol("(")?;
        let mut list = Vec::new();
        loop {
            let (term, span) = self.term()?;
            list.push(term);
            spans.push(span);
            if self.eat_symbol(")") {
                return Ok(list);
            }
            if !self.eat_symbol(",") {
                return Err(self.expected("`,` or `)`"));
            }
        }
    }

    fn term(&mut self) -> Result<Spanned<Term>, RuleError> {
        let start = self.span().start;
        let term = match self.peek() {
            RuleToken::Quoted(name) => {
                self.place += 1;
                Term::Column(name.clone())
            }
            RuleToken::Word(word) if !token::is_reserved(word) => self.named(word)?,
            RuleToken::Word(word) if word.eq_ignore_ascii_case("now") => {
                self.place += 1;
                self.now()?
            }
            _ => Term::Value(self.literal(TERM)?),
        };
        Ok((term, start..self.end()))
    }

    /// A term that begins with a word of no other meaning.
    fn named(&mut self, word: &str) -> Result<Term, RuleError> {
        self.place += 1;
        if word.eq_ignore_ascii_case("coalesce") && self.eat_symbol("(") {
            return self.coalesce();
        }
        if !self.eat_symbol(".") {
            return Ok(Term::Column(word.to_owned()));
        }
        let make = match word.to_ascii_lowercase().as_str() {
            "input" => Term::Input,
            "claim" | "claims" => Term::Claim,
            "row" => Term::Column,
            _ => {
                self.place -= 1;
                let title = format!("`{word}.` is not known");
                let span = self.end() - word.len()..self.span().end;
                return Err(
                    RuleError::at(span, title).advise("write `row.NAME`, `input.NAME` or `claim.NAME`")
                );
            }
        };
        let name = self.name(&format!("a name behind `{word}.`"))?;
        Ok(make(name))
    }

    /// A name where no word has another meaning.
    fn name(&mut self, what: &str) -> Result<String, RuleError> {
        let name = match self.peek() {
            RuleToken::Word(name) => (*name).to_owned(),
            RuleToken::Quoted(name) => name.clone(),
            _ => return Err(self.expected(what)),
        };
        self.place += 1;
        Ok(name)
    }

    fn coalesce(&mut self) -> Result<Term, RuleError> {
        let column = self.name("a column")?;
        self.need_symbol(",")?;
        let default = self.literal("a literal")?;
        self.need_symbol(")")?;
        Ok(Term::Coalesce(column, default))
    }

    fn now(&mut self) -> Result<Term, RuleError> {
        let is_minus = self.is_symbol(0, "-");
        if !is_minus && !self.is_symbol(0, "+") {
            return Ok(Term::Now { plus_micros: 0 });
        }
        self.place += 1;
        let micros = match self.peek() {
            RuleToken::Number(text) => duration(text).and_then(|span| i64::try_from(span.as_micros()).ok()),
            _ => None,
        };
        let Some(micros) = micros else { return Err(self.expected("a duration such as `10m` or `1h30m`")) };
        self.place += 1;
        Ok(Term::Now { plus_micros: if is_minus { -micros } else { micros } })
    }

    fn literal(&mut self, expected: &str) -> Result<Value, RuleError> {
        let value = match self.peek() {
            RuleToken::Text(text) => Value::Text(text.clone()),
            RuleToken::Number(text) => self.number("", text)?,
            RuleToken::Symbol("-") => {
                let RuleToken::Number(text) = self.ahead(1) else { return Err(self.expected(expected)) };
                self.place += 1;
                self.number("-", text)?
            }
            RuleToken::Word(word) if word.eq_ignore_ascii_case("true") => Value::Bool(true),
            RuleToken::Word(word) if word.eq_ignore_ascii_case("false") => Value::Bool(false),
            RuleToken::Word(word) if word.eq_ignore_ascii_case("null") => {
                let error = RuleError::at(self.span(), "null cannot be compared");
                return Err(error.advise("ask `is null` or `is not null`"));
            }
            _ => return Err(self.expected(expected)),
        };
        self.place += 1;
        Ok(value)
    }

    fn number(&self, sign: &str, text: &str) -> Result<Value, RuleError> {
        let signed = format!("{sign}{text}");
        if text.chars().all(|c| c.is_ascii_digit()) {
            return signed.parse().map(Value::Int).map_err(|_| {
                RuleError::at(self.span(), format!("{signed} does not fit into an integer of 64 bits"))
            });
        }
        let is_decimal = text.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | 'e' | 'E' | '+' | '-'));
        match signed.parse() {
            Ok(float) if is_decimal => Ok(Value::Float(float)),
            _ if duration(text).is_some() => {
                let title = format!("`{text}` is a duration, which can only be added to the clock");
                Err(RuleError::at(self.span(), title)
                    .advise(format!("write `now + {text}` or `now - {text}`")))
            }
            _ => Err(RuleError::at(self.span(), format!("`{text}` is neither a number nor a duration"))
                .advise("text is in single quotes")),
        }
    }
}

/// A duration as blueprints write it, or in microseconds.
fn duration(text: &str) -> Option<Duration> {
    match text.strip_suffix(MICROSECONDS).map(str::parse) {
        Some(Ok(micros)) => Some(Duration::from_micros(micros)),
        _ => parse_duration(text),
    }
}
