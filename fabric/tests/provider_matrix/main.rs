//! The provider matrix: one conformance suite × every provider, endpoint type
//! and memory kind.
//!
//! A cell is one case on one provider. Each cell runs in its own process (or, with
//! FABRICAST_MATRIX_BATCH=N, N cells in one process), with a deadline, so that a provider that
//! crashes or hangs costs one cell. `exclusions.txt` lists what a cell cannot do, with the
//! reason. An unlisted lack is a failure, and so is a run without any cell.
//!
//! ```text
//! provider_matrix [--only PATTERN]… [--exclude PATTERN]… [--headers-only] [--json FILE] [--label TEXT]
//!                                                                   run cells
//! provider_matrix --report FILE… [--skip-group NAME --reason TEXT]  print the table of several runs
//! provider_matrix --list                                            list cells
//! ```
#![allow(missing_docs, unreachable_pub)]

mod cases;
mod cells;
mod cuda;
mod exclusions;
mod pair;
mod peer;
mod report;
mod runner;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut options = runner::Options::default();
    let mut cells = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().cloned().unwrap_or_default();
        match argument.as_str() {
            "--only" => options.only.push(value()),
            "--exclude" => options.exclude.push(value()),
            "--json" => options.json = Some(value().into()),
            "--label" => options.label = value(),
            "--headers-only" => options.headers_only = true,
            "--cell" => cells.push(value()),
            "--peer" => return peer::serve(&value()),
            "--list" => options.list = true,
            "--skip-group" => options.skipped.push((value(), String::new())),
            "--reason" => {
                let reason = value();
                if let Some(last) = options.skipped.last_mut() {
                    last.1 = reason;
                }
            }
            "--report" | "--merge" => {
                options.reporting = true;
                while let Some(file) = rest.as_slice().first().filter(|f| !f.starts_with("--")) {
                    options.report.push(file.into());
                    rest.next();
                }
            }
            // Arguments that `cargo test` passes to harnesses are ignored.
            "--nocapture" | "--quiet" | "-q" | "--test-threads" | "--include-ignored" => {}
            other => {
                eprintln!(
                    "provider_matrix: \"{other}\" is not an argument; see the top of main.rs"
                );
                return ExitCode::from(2);
            }
        }
    }
    if !cells.is_empty() {
        return runner::run_cells(&cells);
    }
    runner::run(&options)
}
