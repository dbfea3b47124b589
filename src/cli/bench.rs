//! `fabricast bench`: runs the program `fabricast-bench` in place of this one.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::exit::{Exit, Failure, Result};

const PROGRAM: &str = "fabricast-bench";

/// Returns only if the program cannot be executed. A program beside this executable has precedence
/// over `PATH`.
pub(super) fn run(arguments: &[OsString]) -> Result<()> {
    let own = std::env::current_exe().unwrap_or_default();
    let beside = Some(own.with_file_name(PROGRAM)).filter(|path| path.is_file());
    let mut command = Command::new(beside.unwrap_or_else(|| PROGRAM.into()));
    let error = command.args(arguments).exec();
    let why = match error.kind() {
        ErrorKind::NotFound => format!(
            "program {PROGRAM} is neither beside {} nor on PATH. Build it: \
             cargo build --release -p {PROGRAM}",
            own.display()
        ),
        _ => format!("{}: {error}", command.get_program().display()),
    };
    Err(Failure::new(Exit::NoProvider, format!("run \"fabricast bench\" failed: {why}")))
}
