//! Where a value stands in the text of a JSON document, for messages: the parser of the document does not say.

/// The line of the value behind a path, from 1. A step of the path is the name of a field, or the place in a list. The line of what is
/// found last, if the path leads to nothing.
pub(super) fn line_of(text: &str, path: &[String]) -> usize {
    let place = place_of(text, path);
    text.get(..place).unwrap_or(text).matches('\n').count() + 1
}

/// The byte at which the value behind a path begins.
pub(super) fn place_of(text: &str, path: &[String]) -> usize {
    let mut scanner = JsonScanner { text: text.as_bytes(), at: 0 };
    scanner.skip_space();
    let mut found = scanner.at;
    for name in path {
        if !scanner.enter(name) {
            break;
        }
        found = scanner.at;
    }
    found
}

/// A reader of text that is known to be JSON.
struct JsonScanner<'t> {
    text: &'t [u8],
    at: usize,
}

impl JsonScanner<'_> {
    fn peek(&self) -> u8 {
        self.text.get(self.at).copied().unwrap_or_default()
    }

    fn skip_space(&mut self) {
        while self.peek().is_ascii_whitespace() {
            self.at += 1;
        }
    }

    /// Passes what separates values.
    fn skip_separators(&mut self) {
        while self.peek().is_ascii_whitespace() || matches!(self.peek(), b',' | b':') {
            self.at += 1;
        }
    }

    /// Goes to the field or the item of this name, of the value that begins here. Whether there is one.
    fn enter(&mut self, name: &str) -> bool {
        let is_object = self.peek() == b'{';
        if !is_object && self.peek() != b'[' {
            return false;
        }
        self.at += 1;
        let mut index = 0_usize;
        loop {
            self.skip_separators();
            if matches!(self.peek(), b'}' | b']' | 0) {
                return false;
            }
            let is_it = match is_object {
                true => {
                    let key = self.skip_value();
                    self.skip_separators();
                    let quoted = self.text.get(key..self.at).unwrap_or_default();
                    serde_json::Deserializer::from_slice(quoted)
                        .into_iter::<String>()
                        .next()
                        .is_some_and(|read| read.is_ok_and(|read| read == name))
                }
                false => index.to_string() == name,
            };
            if is_it {
                return true;
            }
            self.skip_value();
            index += 1;
        }
    }

    /// Passes a value, and returns where it began.
    fn skip_value(&mut self) -> usize {
        let (start, mut depth) = (self.at, 0_usize);
        loop {
            match self.peek() {
                0 => return start,
                b'"' => self.skip_string(),
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    self.at += 1;
                }
                _ if depth == 0 => {
                    while !matches!(self.peek(), 0 | b',' | b'}' | b']' | b':') {
                        self.at += 1;
                    }
                    return start;
                }
                _ => self.at += 1,
            }
            if depth == 0 {
                return start;
            }
        }
    }

    fn skip_string(&mut self) {
        self.at += 1;
        while !matches!(self.peek(), 0 | b'"') {
            self.at += if self.peek() == b'\\' { 2 } else { 1 };
        }
        self.at += 1;
    }
}
