//! Pages of docs/reference that are generated from declarations.

use std::fmt::Write;
use std::path::Path;

use clap::{Arg, Command};

/// Set in the environment, [`check`] writes the pages instead of comparing them.
const WRITE: &str = "WRITE_REFERENCE";

/// Checks that a page of docs/reference contains the text, between `<!-- begin NAME -->` and
/// `<!-- end NAME -->`.
///
/// # Panics
/// The page has another text there, or no such marks.
pub fn check(page: &str, name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference").join(page);
    let all = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
    let (head, rest) = all.split_once(&begin).unwrap_or_else(|| panic!("{page} has no {begin}"));
    let (found, tail) = rest.split_once(&end).unwrap_or_else(|| panic!("{page} has no {end}"));
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, format!("{head}{begin}\n{text}\n{end}{tail}")).unwrap();
    } else {
        assert!(found == format!("\n{text}\n"), "{page} is out of date: make reference");
    }
}

/// A section for each subcommand: usage, arguments and options, without the options under a
/// heading of their own.
#[must_use]
pub fn of_subcommands(mut program: Command) -> String {
    program.build();
    let mut out = String::new();
    for command in
        program.get_subcommands_mut().filter(|it| !it.is_hide_set() && it.get_name() != "help")
    {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let usage = command.render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ");
        let _ = write!(out, "## {}\n\n{about}: `{usage}`\n\n", command.get_name());
        let rows: String = command.get_arguments().filter(|it| is_listed(it)).map(row).collect();
        if !rows.is_empty() {
            let _ = write!(out, "| option | meaning |\n|---|---|\n{rows}\n");
        }
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

fn is_listed(argument: &Arg) -> bool {
    !argument.is_hide_set()
        && argument.get_help_heading().is_none()
        && !matches!(argument.get_id().as_str(), "help" | "version")
}

fn row(argument: &Arg) -> String {
    let option = argument.to_string();
    let mut help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let values: Vec<_> = argument
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if argument.get_action().takes_values() {
        if !values.is_empty() {
            let _ = write!(help, ". Values: {}", values.join(", "));
        }
        let defaults: Vec<_> =
            argument.get_default_values().iter().map(|it| it.to_string_lossy()).collect();
        if defaults.iter().any(|value| !value.is_empty()) {
            let _ = write!(help, " [default: {}]", defaults.join(", "));
        }
    }
    let escape = |text: &str| text.replace('|', "\\|").replace('<', "\\<");
    format!("| `{}` | {} |\n", option.replace('|', "\\|"), escape(&help))
}
