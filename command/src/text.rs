//! Text for people: aligned tables, wrapped lines, numbers with their nouns.

use std::io::{IsTerminal, Write};
use std::time::Duration;

/// The widest line that is printed.
pub const WIDTH: usize = 120;

/// Writes a line to standard error. Errors are ignored: there is no other output for them.
pub fn print_error(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Text of another process, safe to print: characters that move a cursor or colour a terminal are
/// escaped.
pub fn escape_control(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '"' | '\'' | '\\' => out.push(character),
            _ => out.extend(character.escape_debug()),
        }
    }
    out
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

/// Bold, on a terminal without NO_COLOR.
pub fn heading(text: &str) -> String {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if std::io::stdout().is_terminal() && !plain {
        format!("\x1b[1m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// Aligns columns, two spaces between them; the last one is not padded.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
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
    let indent = first.chars().count();
    let mut out = first.to_owned();
    let mut column = indent;
    for word in text.split(' ') {
        let length = word.chars().count();
        if column > indent && column + 1 + length > WIDTH {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        }
        if column > indent {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
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
    fn long_lines_are_wrapped_and_indented() {
        let text = wrapped("name  ", &"word ".repeat(60));
        assert!(text.lines().count() > 2);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
        assert!(text.lines().skip(1).all(|line| line.starts_with("      word")));
    }
}
