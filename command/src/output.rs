//! Output of the programs: standard output whose pipe may close, JSON, and the end of a command.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;

use crate::exit::{Exit, Failure, Result};
use crate::text;

/// Writes to standard output. A closed pipe (`| head`) is not reported, and ends the program.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| write_failure(&error))
}

/// Writes a report for people: lines that are wider than the terminal are broken.
pub fn print_report(text: &str) -> Result<()> {
    print(&text::fit(text))
}

/// Standard output cannot be written.
pub(crate) fn write_failure(error: &std::io::Error) -> Failure {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        Failure::silent(Exit::OutputClosed)
    } else {
        Failure::failed(format!("write standard output failed: {error}"))
    }
}

/// Writes it as a line of JSON.
pub fn json(document: &impl Serialize) -> Result<()> {
    let line = serde_json::to_string(document);
    print(&(line.map_err(Failure::of)? + "\n"))
}

/// Prints why a command failed, if it did, and returns its exit code: as text, and with `--json`
/// also as one line of JSON.
#[must_use]
pub fn conclude(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_silent() {
                text::print_error(&format!("fabricast: {failure}"));
                if wants_json(std::env::args_os()) {
                    // The exit code is returned also if the output is closed.
                    let _ = json(&failure.document());
                }
            }
            failure.exit().into()
        }
    }
}

/// Prints the report of a command as one line of JSON. If the command failed, [`conclude`] prints
/// the line, with the reason in it.
///
/// # Errors
/// Those of the command, and of the output.
pub fn report_as_json(done: Result<()>, report: &impl Serialize) -> Result<()> {
    match done {
        Ok(()) => json(report),
        Err(failure) => Err(failure.with_report(report)),
    }
}

/// Do these arguments have the option `--json`? True also if other arguments are invalid.
#[must_use]
pub fn wants_json(arguments: impl IntoIterator<Item = OsString>) -> bool {
    arguments.into_iter().skip(1).take_while(|it| it != "--").any(|it| it == "--json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_option_json_requests_json() {
        let wants = |line: &str| wants_json(line.split(' ').map(OsString::from));
        assert!(wants("fabricast pub t --json") && wants("fabricast --dephth 3 --json --size"));
        assert!(!wants("--json pub t") && !wants("fabricast sub -- --json"));
        assert!(!wants("fabricast sub --jsonl"));
    }
}
