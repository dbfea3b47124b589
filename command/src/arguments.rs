//! Reading the command line.

use std::ffi::OsString;

use clap::{Command, Error, Parser};
use serde_json::json;

use crate::output::{self, wants_json};
use crate::text;

/// Parses the command line. If it is invalid, prints why and exits; if it asks for help or the
/// version, prints that and exits, with an error if it cannot be written.
#[must_use]
pub fn read<A: Parser>() -> A {
    read_from(std::env::args_os()).unwrap_or_else(|error| {
        if error.use_stderr() && wants_json(std::env::args_os()) {
            let why = cause(&error.render().to_string());
            let _ = output::json(&json!({ "error": why, "exit_code": error.exit_code() }));
        }
        let rendered = error.render().to_string();
        if error.use_stderr() {
            text::print_error(rendered.trim_end_matches('\n'));
        } else if let Err(failure) = output::print_report(&rendered) {
            if !failure.is_silent() {
                text::print_error(&format!("fabricast: {failure}"));
            }
            std::process::exit(failure.exit() as i32)
        }
        std::process::exit(error.exit_code())
    })
}

/// The cause alone of what clap prints with its usage, its parts joined by "; ".
fn cause(message: &str) -> String {
    let cause = message.split("\n\nUsage:").next().unwrap_or_default();
    let cause = cause.strip_prefix("error: ").unwrap_or(cause);
    let cause = cause.replace("\n  tip:", "\n\n  tip:");
    let parts =
        cause.split("\n\n").map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Like [`read`], of these words.
///
/// # Errors
/// They are invalid.
pub fn read_from<A: Parser>(
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<A, Error> {
    let mut command = with_negative_numbers(A::command());
    let read = A::from_arg_matches(&command.try_get_matches_from_mut(words)?);
    read.map_err(|error| error.format(&mut command))
}

/// A negative number is an invalid value of an option, not an unknown option.
fn with_negative_numbers(command: Command) -> Command {
    let command = command.mut_args(|argument| {
        let takes = argument.get_long().is_some() && argument.get_action().takes_values();
        if takes { argument.allow_negative_numbers(true) } else { argument }
    });
    command.mut_subcommands(with_negative_numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_of_a_usage_error_omits_the_usage() {
        let message = "error: unexpected argument '-x' found\n\n  tip: y\n\nUsage: fabricast\n";
        assert_eq!(cause(message), "unexpected argument '-x' found; tip: y");
        let message =
            "error: a thing is missing:\n  <T>\n\n  tip: y\n  tip: z\n\nUsage: fabricast\n";
        assert_eq!(cause(message), "a thing is missing: <T>; tip: y; tip: z");
    }
}
