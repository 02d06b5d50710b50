//! Texts that are compared with files in `tests/golden`. With `STATEHOUSE_BLESS` set, the files are written anew.

use std::path::PathBuf;

/// Compares a text with its golden file, or writes the file. Returns what differs.
pub(super) fn differs(name: &str, text: &str) -> Option<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("STATEHOUSE_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    if golden == text {
        return None;
    }
    let (was, is): (Vec<&str>, Vec<&str>) = (golden.lines().collect(), text.lines().collect());
    let first = (0..).find(|line| was.get(*line) != is.get(*line)).unwrap_or(0);
    let section = is.iter().take(first + 1).rev().find(|line| !line.starts_with(' ') && !line.is_empty());
    let section = section.unwrap_or(&"the end");
    let shown = |lines: &[&str]| lines.iter().skip(first).take(5).copied().collect::<Vec<_>>().join("\n");
    let (was, is) = (shown(&was), shown(&is));
    Some(format!("{name} differs in {section}, line {}; it was\n{was}\nand is\n{is}\n", first + 1))
}

/// Fails if anything differs.
pub(super) fn check(differing: impl IntoIterator<Item = String>) {
    let differing: Vec<String> = differing.into_iter().collect();
    assert!(differing.is_empty(), "{}\nSTATEHOUSE_BLESS=1 writes the files anew", differing.join("\n"));
}
