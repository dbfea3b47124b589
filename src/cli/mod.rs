//! The command line: one file per subcommand.

mod bench;
mod choices;
mod clean;
mod connectivity;
mod demo;
mod info;
mod node;
mod node_report;
mod open_topic;
mod paths;
mod progress;
mod publish;
mod remedy;
mod report_rows;
mod service_wait;
mod settings;
mod signals;
mod statistics;
mod subscribe;
mod test_pattern;
mod topics;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use command::{exit, histogram, output, process, size, stages, terminal, text};
use nix::sys::signal::{SigSet, Signal};
use settings::config;
use tracing_subscriber::filter::LevelFilter;

/// Moves GPU and host memory over any available fabric.
#[derive(Debug, Parser)]
#[command(name = "fabricast", version = command::VERSION_LINE, after_help = help())]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Exit codes and environment variables, with the hint about settings.
fn help() -> String {
    const SETTINGS: &str =
        "  FABRICAST_NAME  a setting; \"fabricast config\" lists all with their names";
    format!("{}\n{SETTINGS}", exit::HELP)
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List providers and devices, and which provider would be selected and why
    Info(info::Arguments),
    /// Show which path data takes, and why: in typical situations, or to a running agent
    Paths(paths::Arguments),
    /// Serve a node in the foreground
    Node(node::Arguments),
    /// Publish messages to a topic
    Pub(publish::Arguments),
    /// Read the messages of a topic
    Sub(subscribe::Arguments),
    /// List the topics of a node with their publishers, subscribers and backlog
    Topics(topics::Arguments),
    /// List all settings with their values and origins
    Config(config::Arguments),
    /// Remove files that killed processes left behind
    Clean(clean::Arguments),
    /// Run benchmarks, with the data verified (program fabricast-bench)
    #[command(disable_help_flag = true)]
    Bench {
        /// See "fabricast bench --help"
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Run a demonstration on this machine; no special hardware needed
    Demo(demo::Arguments),
}

pub(crate) fn main() -> ExitCode {
    let arguments = command::arguments::read::<Arguments>();
    let (requested, default_level) = match &arguments.command {
        Command::Node(arguments) => (arguments.log(), LevelFilter::INFO),
        _ => (None, LevelFilter::WARN),
    };
    let started = command::log::start(requested, default_level).inspect(|()| set_process_limits());
    output::conclude(started.and_then(|()| match arguments.command {
        Command::Info(arguments) => info::run(&arguments),
        Command::Paths(arguments) => paths::run(&arguments),
        Command::Node(arguments) => node::run(&arguments),
        Command::Pub(arguments) => publish::run(&arguments),
        Command::Sub(arguments) => subscribe::run(&arguments),
        Command::Topics(arguments) => topics::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Clean(arguments) => clean::run(&arguments),
        Command::Bench { arguments } => bench::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
    }))
}

/// Raises the limit of descriptors, since a process needs one for each topic and each other process
/// of its node; no `select()` is called, which is limited to 1024. Blocks SIGXFSZ in all threads,
/// so that a file size limit is an error of the write.
fn set_process_limits() {
    if let Err(error) = ipc::DescriptorLimit::raise() {
        tracing::warn!(%error, "cannot raise the limit of open descriptors (ulimit -n)");
    }
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    if let Err(error) = signals.thread_block() {
        tracing::warn!(%error, "cannot block SIGXFSZ");
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn documentation_lists_the_commands() {
        let text = testkit::reference::of_subcommands(Arguments::command());
        testkit::reference::check("command-line.md", "commands", &text);
    }

    #[test]
    fn help_names_environment_variables_of_settings() {
        let help = |line: &str| {
            let words = ["fabricast"].into_iter().chain(line.split_whitespace());
            command::arguments::read_from::<Arguments>(words).unwrap_err().to_string()
        };
        for line in ["pub --help", "sub --help", "node --help", "topics --help", "config --help"] {
            let help = help(line);
            let expected = "\nEnvironment:\n  Each setting can be set as FABRICAST_NAME, too: \"fabricast config\" lists \
                            them with their names\n";
            assert!(help.ends_with(expected) && !help.contains("docs/"), "{help}");
        }
        let expected =
            "  FABRICAST_NAME  a setting; \"fabricast config\" lists all with their names\n";
        assert!(help("--help").ends_with(expected), "{}", help("--help"));
    }

    #[test]
    fn negative_numbers_are_invalid_values_of_options() {
        for line in ["sub t --count -1", "pub t --rate -0.5"] {
            let words = ["fabricast"].into_iter().chain(line.split(' '));
            let error = command::arguments::read_from::<Arguments>(words).unwrap_err().to_string();
            assert!(error.contains("invalid value '-"), "{error}");
        }
    }

    #[test]
    fn arguments_after_bench_are_passed_on() {
        for line in ["bench --help", "bench ring --size 1M --help", "bench -V", "bench"] {
            let words: Vec<_> = line.split(' ').collect();
            let read =
                command::arguments::read_from::<Arguments>(["fabricast"].iter().chain(&words));
            let Command::Bench { arguments } = read.unwrap().command else { panic!("{line}") };
            assert_eq!(arguments, words[1..]);
        }
    }
}
