//! What is wrong with a blueprint: where, why, and what to write instead.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct BlueprintProblem {
    span: Range<usize>,
    title: String,
    label: Option<String>,
    advice: Option<String>,
    is_warning: bool,
}

impl BlueprintProblem {
    /// A problem at a place in the text.
    pub fn at(span: Range<usize>, title: impl Into<String>) -> BlueprintProblem {
        BlueprintProblem { span, title: title.into(), label: None, advice: None, is_warning: false }
    }

    /// Says something about the place itself.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> BlueprintProblem {
        self.label = Some(label.into());
        self
    }

    /// The blueprint is good all the same.
    #[must_use]
    pub fn warning(mut self) -> BlueprintProblem {
        self.is_warning = true;
        self
    }

    /// Says what to do.
    #[must_use]
    pub fn advice(mut self, advice: impl Into<String>) -> BlueprintProblem {
        self.advice = Some(advice.into());
        self
    }
}

/// All that is wrong with one file. An error when there is something.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct Problems {
    file: String,
    text: String,
    list: Vec<BlueprintProblem>,
}

impl Problems {
    /// No problems yet.
    pub fn of(file: &str, text: &str) -> Problems {
        Problems { file: file.to_owned(), text: text.to_owned(), list: Vec::new() }
    }

    /// Adds one.
    pub fn add(&mut self, problem: BlueprintProblem) {
        self.list.push(problem);
    }

    /// The text of the file.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// These, and others of the same file.
    #[must_use]
    pub fn and(mut self, others: Problems) -> Problems {
        self.list.extend(others.list);
        self
    }

    /// The result, if nothing is wrong.
    pub fn or<T>(self, result: T) -> Result<T, Problems> {
        if self.list.is_empty() { Ok(result) } else { Err(self) }
    }

    /// The problems as text with the lines they concern, in the order of the file.
    pub fn render(&self, color: bool) -> String {
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        let mut list: Vec<&BlueprintProblem> = self.list.iter().collect();
        list.sort_by_key(|problem| problem.span.start);
        let blocks: Vec<String> = list
            .into_iter()
            .map(|problem| {
                let mut annotation = AnnotationKind::Primary.span(self.within(&problem.span));
                if let Some(label) = &problem.label {
                    annotation = annotation.label(label);
                }
                let snippet =
                    Snippet::source(self.text.as_str()).path(self.file.as_str()).annotation(annotation);
                let level = if problem.is_warning { Level::WARNING } else { Level::ERROR };
                let mut group = level.primary_title(problem.title.as_str()).element(snippet);
                if let Some(advice) = &problem.advice {
                    group = group.element(Level::HELP.message(advice.as_str()));
                }
                renderer.render(&[group])
            })
            .collect();
        blocks.join("\n\n")
    }

    /// The problems for programs: file, line and column from 1, message, advice.
    pub fn to_json(&self) -> serde_json::Value {
        let entry = |problem: &BlueprintProblem| {
            let before = self.text.get(..problem.span.start).unwrap_or(&self.text);
            let line = before.matches('\n').count() + 1;
            let column = before.rsplit('\n').next().map_or(0, |text| text.chars().count()) + 1;
            serde_json::json!({
                "file": self.file, "line": line, "column": column,
                "message": problem.title, "label": problem.label, "advice": problem.advice,
            })
        };
        self.list.iter().map(entry).collect()
    }

    /// A span that lies in the text, on the edges of characters.
    fn within(&self, span: &Range<usize>) -> Range<usize> {
        let floor = |mut offset: usize| {
            offset = offset.min(self.text.len());
            while !self.text.is_char_boundary(offset) {
                offset -= 1;
            }
            offset
        };
        let start = floor(span.start);
        start..floor(span.end.max(start))
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}
