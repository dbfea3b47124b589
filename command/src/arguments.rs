//! Reading the command line.

use std::ffi::OsString;

use clap::{Command, Error, Parser};

/// What the command line says; if it is wrong, that is told, and this process ends.
#[must_use]
pub fn read<A: Parser>() -> A {
    read_from(std::env::args_os()).unwrap_or_else(|error| error.exit())
}

/// The same of these words.
///
/// # Errors
/// What is wrong with them.
pub fn read_from<A: Parser>(
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<A, Error> {
    let mut command = with_negative_numbers(A::command());
    let read = A::from_arg_matches(&command.try_get_matches_from_mut(words)?);
    read.map_err(|error| error.format(&mut command))
}

/// A number below zero is a value that an option cannot have, and no option that is not known.
fn with_negative_numbers(command: Command) -> Command {
    let command = command.mut_args(|argument| {
        let takes = argument.get_long().is_some() && argument.get_action().takes_values();
        if takes { argument.allow_negative_numbers(true) } else { argument }
    });
    command.mut_subcommands(with_negative_numbers)
}
