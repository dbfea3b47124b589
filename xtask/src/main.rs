//! Checks and counts of the project's sources.
//!
//! Modules, each importing only those before it: `repository`, `production`, `sources`, `tokens`,
//! `components`, `modules`, `doc_comments`, `module_order`, `file_cycles`, `structs`,
//! `tuple_parameters`, `file_names`, `count_lines`, `check_sources`.

mod check_sources;
mod components;
mod count_lines;
mod doc_comments;
mod file_cycles;
mod file_names;
mod module_order;
mod modules;
mod production;
mod repository;
mod sources;
mod structs;
mod tokens;
mod tuple_parameters;

use std::env;
use std::process::ExitCode;

use count_lines::Format;
use sources::Sources;

const USAGE: &str = "\
usage: cargo xtask check-sources [--verbose | --cycles]
       cargo xtask count-lines [COMMIT] [--by-directory | --json]

check-sources checks the work tree: the order of modules, cycles of imports between files, open
fields, beginnings of documentation comments, tuples as parameters, names of files.
  --verbose  list everything that is counted
  --cycles   only list the cycles of imports between files

count-lines counts the lines of the work tree, or of COMMIT, by category: all lines, and \"code\"
without empty and comment lines. Scripts, xtask and documents are not counted.
  --by-directory  list the directories with production code, too
";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{}", message.trim_end());
            ExitCode::from(2)
        }
    }
}

/// Runs a command; returns `false` if a check fails.
fn run(arguments: &[&str]) -> Result<bool, String> {
    match arguments {
        ["check-sources"] => Ok(check_sources::check(&read(None)?, false)),
        ["check-sources", "--verbose"] => Ok(check_sources::check(&read(None)?, true)),
        ["check-sources", "--cycles"] => {
            check_sources::print_cycles(&read(None)?);
            Ok(true)
        }
        ["count-lines", options @ ..] => {
            let mut format = Format::Table;
            let mut commit = None;
            for option in options {
                match *option {
                    "--by-directory" => format = Format::TableAndDirectories,
                    "--json" => format = Format::Json,
                    name if !name.starts_with('-') && commit.is_none() => commit = Some(name),
                    _ => return Err(USAGE.to_owned()),
                }
            }
            let sources = read(commit)?;
            sources.failures().iter().for_each(|failure| eprintln!("{failure}"));
            print!("{}", count_lines::report(&sources, format));
            Ok(true)
        }
        _ => Err(USAGE.to_owned()),
    }
}

fn read(commit: Option<&str>) -> Result<Sources, String> {
    Ok(Sources::new(repository::read(commit)?))
}
