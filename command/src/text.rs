//! Text for people: aligned tables, wrapped lines, numbers with their nouns.

use std::io::Write;
use std::time::Duration;

use crate::terminal;

pub use errors::escape_control;

/// The widest line that is printed.
pub const WIDTH: usize = 120;

/// The narrowest terminal that lines are fitted to.
const MIN_WIDTH: usize = 40;

/// Writes lines to standard error, without control characters. Errors are ignored: there is no other
/// output for them.
pub fn print_error(lines: &str) {
    let lines: Vec<_> = lines.split('\n').map(escape_control).collect();
    let _ = writeln!(std::io::stderr(), "{}", lines.join("\n"));
}

/// Columns of the terminal of standard output; None without one.
fn terminal_width() -> Option<usize> {
    terminal::columns(&std::io::stdout()).map(|columns| columns.max(MIN_WIDTH))
}

/// The width of wrapped lines.
fn line_width() -> usize {
    terminal_width().unwrap_or(WIDTH).min(WIDTH)
}

/// A number of things: `1 message`, `2 messages`.
pub fn count_of(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A number with its singular or plural: `1 process`, `2 processes`.
pub fn count_of_irregular(number: u64, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

/// A time, to the millisecond if it has one: `301ms`, `2.5s`.
pub fn format_duration(time: Duration) -> String {
    match u64::try_from(time.as_millis()) {
        Ok(milliseconds @ 1..) => format!("{:?}", Duration::from_millis(milliseconds)),
        _ => format!("{time:?}"),
    }
}

/// `1 message is corrupted`, `2 messages are corrupted`.
pub fn corrupted(messages: u64) -> String {
    let one = "message is corrupted";
    count_of_irregular(messages, one, "messages are corrupted")
}

/// Bold, on a terminal that takes escape sequences.
pub fn heading(text: &str) -> String {
    match terminal::takes_escapes(&std::io::stdout()) {
        true => format!("\x1b[1m{text}\x1b[0m"),
        false => text.to_owned(),
    }
}

/// Aligns columns, two spaces between them; the last one is not padded. On a terminal that is too
/// narrow, the columns that do not fit follow in further lines of each row, indented.
pub fn table(rows: &[Vec<String>]) -> String {
    table_within(rows, terminal_width().unwrap_or(usize::MAX))
}

fn table_within(rows: &[Vec<String>], most: usize) -> String {
    const GAP: usize = 2;
    const INDENT: usize = 4;
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    // The columns of each line of a row.
    let mut lines = Vec::new();
    let (mut first, mut used) = (0, 0);
    for (column, width) in widths.iter().enumerate() {
        if column > first && used + width > most {
            lines.push(first..column);
            (first, used) = (column, INDENT);
        }
        used += width + GAP;
    }
    lines.push(first..columns);
    let mut text = String::new();
    for row in rows {
        for columns in &lines {
            let indent = if columns.start == 0 { 0 } else { INDENT };
            let mut line = " ".repeat(indent);
            for column in columns.clone() {
                let (cell, width) = (row.get(column).map_or("", String::as_str), widths[column]);
                line.push_str(&format!("{cell:width$}  "));
            }
            let line = line.trim_end();
            if columns.start == 0 || !line.is_empty() {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

/// Breaks lines that are wider than the terminal of standard output, between words. Further lines
/// begin below the text of the last column, or else at the indentation.
pub fn fit(text: &str) -> String {
    terminal_width().map_or_else(|| text.to_owned(), |width| fit_within(text, width))
}

fn fit_within(text: &str, width: usize) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        fit_line(line, width, &mut out);
    }
    out
}

fn fit_line(line: &str, width: usize, out: &mut String) {
    let indent = hanging_indent(line, width);
    let (mut rest, mut start) = (line, 0);
    while let Some(at) = break_before(rest, width - start) {
        out.push_str(rest[..at].trim_end());
        out.push('\n');
        out.push_str(&" ".repeat(indent));
        (rest, start) = (rest[at..].trim_start_matches(' '), indent);
    }
    out.push_str(rest);
}

/// Where further lines begin: at the last column that begins in the left half, after a gap of two
/// spaces.
fn hanging_indent(line: &str, width: usize) -> usize {
    let characters: Vec<char> = line.chars().take(width / 2).collect();
    let leading = characters.iter().take_while(|it| **it == ' ').count();
    let begins_column =
        |at: &usize| characters[at - 2..*at] == [' ', ' '] && characters[*at] != ' ';
    (leading + 2..characters.len()).rev().find(begins_column).unwrap_or(leading.min(width / 2))
}

/// The index of the space at which a line is broken to fit; None if it fits, or has one word.
fn break_before(line: &str, width: usize) -> Option<usize> {
    let (mut column, mut in_escape, mut last_space) = (0, false, None);
    let mut has_word = false;
    for (at, character) in line.char_indices() {
        match character {
            '\n' => return None,
            '\x1b' => in_escape = true,
            'm' if in_escape => in_escape = false,
            _ if in_escape => {}
            ' ' if has_word => {
                last_space = Some(at);
                column += 1;
            }
            _ => {
                if column >= width && last_space.is_some() {
                    return last_space;
                }
                column += 1;
                has_word |= character != ' ';
            }
        }
    }
    None
}

/// Like [`table`], with a head; empty if there are no rows.
pub fn table_of<const N: usize>(
    head: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let mut all = vec![head.map(str::to_owned).to_vec()];
    all.extend(rows.map(|row| row.to_vec()));
    if all.len() > 1 { table(&all) } else { String::new() }
}

/// Puts `text` after `first`, broken between words; further lines are indented to its column.
pub fn wrapped(first: &str, text: &str) -> String {
    wrapped_within(first, text, line_width())
}

fn wrapped_within(first: &str, text: &str, width: usize) -> String {
    let mut column = first.chars().count();
    let indent = if column > width / 2 { width / 8 } else { column };
    let mut out = first.to_owned();
    let mut is_first = true;
    for word in text.split(' ') {
        let length = word.chars().count();
        if !is_first && column + 1 + length > width {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            (column, is_first) = (indent, true);
        }
        if !is_first {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
        is_first = false;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_of_one_is_singular() {
        let all = [0, 1, 2].map(|number| count_of(number, "message"));
        assert_eq!(all, ["0 messages", "1 message", "2 messages"]);
        let all = [0, 1, 2].map(|number| count_of_irregular(number, "process", "processes"));
        assert_eq!(all, ["0 processes", "1 process", "2 processes"]);
        assert_eq!(corrupted(1), "1 message is corrupted");
    }

    #[test]
    fn columns_are_aligned() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let text = table(&[row(["a", "long", "x"]), row(["longer", "b", ""])]);
        assert_eq!(text, "a       long  x\nlonger  b\n");
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escape_control("\"tcp\" over \u{e9}th0"), "\"tcp\" over \u{e9}th0");
        assert_eq!(escape_control("a\u{1b}[2Jb\nc\u{9b}"), "a\\u{1b}[2Jb\\nc\\u{9b}");
    }

    #[test]
    fn wide_tables_have_several_lines_for_a_row() {
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        let rows = [row(["name", "one", "two", "three"]), row(["a long name", "1", "", ""])];
        assert_eq!(
            table_within(&rows, 26),
            table_within(&rows, usize::MAX).replace("  three", "\n    three")
        );
        let narrow = "name         one\n    two  three\na long name  1\n";
        assert_eq!(table_within(&rows, 16), narrow);
        assert_eq!(table_within(&rows, 1).lines().count(), 4 + 2);
    }

    #[test]
    fn wide_lines_are_broken_below_their_last_column() {
        let text =
            "  --option  Says what it does to the process\nshort\n\x1b[1mbold and long\x1b[0m\n";
        let fitted = fit_within(text, 30);
        let expected = "  --option  Says what it does\n            to the process\nshort\n\x1b[1mbold and long\x1b[0m\n";
        assert_eq!(fitted, expected);
        assert_eq!(fit_within("one two three", 7), "one two\nthree");
        assert_eq!(fit_within("a-word-without-a-space", 7), "a-word-without-a-space");
        assert_eq!(fit_within("\x1b[1mone two\x1b[0m", 7), "\x1b[1mone two\x1b[0m");
    }

    #[test]
    fn fitted_lines_keep_their_words() {
        let text = "a table  of three  columns, and of more words than fit \n    indented, and also too long\n";
        for width in 8..70 {
            let fitted = fit_within(text, width);
            assert!(fitted.split_whitespace().eq(text.split_whitespace()), "{fitted}");
            let is_narrow =
                |line: &str| line.chars().count() <= width || !line.trim().contains(' ');
            assert!(fitted.lines().all(|line| is_narrow(line.trim_end())), "{width}: {fitted}");
        }
    }

    #[test]
    fn long_lines_are_wrapped_and_indented() {
        let text = wrapped("name  ", &"word ".repeat(60));
        assert!(text.lines().count() > 2);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
        assert!(text.lines().skip(1).all(|line| line.starts_with("      word")));
        let long = wrapped_within("a first part that is long: ", "and more words", 40);
        assert_eq!(long, "a first part that is long: and more\n     words\n");
    }
}
