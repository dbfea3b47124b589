//! Numbers of lines by category.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::production::Category;
use crate::sources::{Source, Sources};

/// Numbers of a category.
#[derive(Default)]
struct Count {
    files: usize,
    lines: usize,
    /// Lines that are neither empty nor comments.
    code: usize,
}

/// What to print.
#[derive(Clone, Copy)]
pub(crate) enum Format {
    Table,
    /// With the lines of production code in each directory.
    TableAndDirectories,
    Json,
}

/// Returns the numbers of lines as text.
pub(crate) fn report(sources: &Sources, format: Format) -> String {
    let mut counts: BTreeMap<Category, Count> = BTreeMap::new();
    let mut directories: BTreeMap<String, usize> = BTreeMap::new();
    for source in sources.files().iter().filter(|source| source.category != Category::Tools) {
        counts.entry(source.category).or_default().files += 1;
        for (at, line) in source.text.lines().enumerate() {
            let is_test = source.test_lines.contains(&(at + 1));
            let count =
                counts.entry(if is_test { Category::Tests } else { source.category }).or_default();
            count.lines += 1;
            count.code += usize::from(is_code(line));
            if source.category == Category::Production && !is_test {
                *directories.entry(directory(source)).or_default() += 1;
            }
        }
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| Reverse(count.lines));
    if matches!(format, Format::Json) {
        let parts = counts.iter().map(|(category, Count { files, lines, code })| {
            format!(
                r#""{}": {{"files": {files}, "lines": {lines}, "code": {code}}}"#,
                category.name()
            )
        });
        return format!("{{{}}}\n", parts.collect::<Vec<_>>().join(", "));
    }
    let mut text = format!("{:12}{:>8}{:>10}{:>10}\n", "", "files", "lines", "code");
    for (category, Count { files, lines, code }) in &counts {
        text.push_str(&format!("{:12}{files:8}{lines:10}{code:10}\n", category.name()));
    }
    if matches!(format, Format::TableAndDirectories) {
        let mut directories: Vec<_> = directories.into_iter().collect();
        directories.sort_by_key(|(_, lines)| Reverse(*lines));
        for (directory, lines) in directories {
            text.push_str(&format!("{lines:8}  {directory}\n"));
        }
    }
    text
}

fn is_code(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !["//", "/*", "* "].iter().any(|comment| line.starts_with(comment))
}

/// Returns the first three folders of a file's path.
fn directory(source: &Source) -> String {
    let mut steps: Vec<&str> = source.path.split('/').collect();
    steps.pop();
    steps.truncate(3);
    if steps.is_empty() { ".".to_owned() } else { steps.join("/") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn lines_of_test_items_are_those_of_tests() {
        let library = "\
//! A queue.

mod lock;

fn push() {}

#[cfg(test)]
mod tests {
    #[test]
    fn works() {}
}
";
        let texts = [
            ("ipc/src/lib.rs", library),
            ("ipc/src/lock.rs", "fn lock() {}\n"),
            ("ipc/tests/queue.rs", "fn main() {}\n"),
            ("xtask/src/main.rs", "fn main() {}\n"),
        ];
        let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned()));
        let sources = Sources::new(BTreeMap::from(texts));
        let expected = [
            "               files     lines      code",
            "production         2         7         3",
            "tests              1         6         6",
            "       7  ipc/src",
        ];
        let table = report(&sources, Format::TableAndDirectories);
        assert_eq!(table.lines().collect::<Vec<_>>(), expected);
        let json = r#"{"production": {"files": 2, "lines": 7, "code": 3}, "tests": {"files": 1, "lines": 6, "code": 6}}"#;
        assert_eq!(report(&sources, Format::Json).trim_end(), json);
    }
}
