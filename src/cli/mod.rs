//! The command line: one file per subcommand.

mod bench;
mod choices;
mod clean;
mod config;
mod demo;
mod exchange;
mod exit;
mod histogram;
mod info;
mod membership;
mod node;
mod paths;
mod pattern;
mod process;
mod progress;
mod publish;
mod settings;
mod signals;
mod size;
mod stages;
mod subscribe;
mod text;
mod topics;
mod window;

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

use exit::{Exit, Failure};

const AFTER_HELP: &str = "\
Exit codes:
  0  it worked
  1  it failed
  2  the command line, or a setting, is wrong
  3  no provider, no device, or no path is what was asked for
  4  a deadline passed
  5  data arrived altered
  6  nobody is there who was asked for
  7  a message is longer than its topic allows, or the node has no room for it
  8  messages of a reliable topic were missed, or the subscriber was removed for being too slow
  9  this user may not use the node
 10  another process serves the node, and stays
130  interrupted before it was done
141  who read the output did not read on

Environment:
  FABRICAST_LOG  off, error, warn (the default), info, debug or trace; to stderr
  FI_PROVIDER    libfabric's own filter of providers; obeyed, and shown where it matters
  FI_LOG_LEVEL   libfabric's own messages: warn, trace, info or debug";

/// Moves GPU and host memory over whatever fabric is there.
#[derive(Debug, Parser)]
#[command(name = "fabricast", version = env!("FABRICAST_VERSION_LINE"), after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show which providers and devices there are, and which would be taken and why
    Info(info::Arguments),
    /// Show by which path bytes travel, and why: in typical situations, or to an agent that runs
    Paths(paths::Arguments),
    /// Serve a node in the foreground
    Node(node::Arguments),
    /// Publish messages in a topic
    Pub(publish::Arguments),
    /// Read the messages of a topic
    Sub(subscribe::Arguments),
    /// Show the topics of a node: who publishes, who subscribes, how far behind
    Topics(topics::Arguments),
    /// Show every setting, and who said what it is
    Config(config::Arguments),
    /// Remove what killed processes left in directories
    Clean(clean::Arguments),
    /// Measure, with the data checked
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Show on this machine what Fabricast does; needs no special hardware
    Demo(demo::Arguments),
    /// The second process of a measurement: started by the first one only
    #[command(hide = true)]
    ExchangeTarget,
    /// A process of a measurement: started by the first one only
    #[command(hide = true)]
    BenchWorker {
        /// Where to meet
        socket: PathBuf,
    },
    /// A process of the demonstration: started by the first one only
    #[command(hide = true)]
    DemoWorker {
        /// What it is called
        name: String,
    },
}

impl Arguments {
    /// What the command line says; if it is wrong, that is told, and this process ends.
    fn read() -> Self {
        let mut command = with_negative_numbers(Self::command());
        let read = Self::from_arg_matches(&command.get_matches_mut());
        read.unwrap_or_else(|error| error.format(&mut command).exit())
    }
}

/// A number below zero is a value that an option cannot have, and no option that is not known.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|argument| {
        let takes = argument.get_long().is_some() && argument.get_action().takes_values();
        if takes { argument.allow_negative_numbers(true) } else { argument }
    });
    command.mut_subcommands(with_negative_numbers)
}

pub(crate) fn main() -> ExitCode {
    process::end_as_usual();
    let arguments = Arguments::read();
    let log = match &arguments.command {
        Command::Node(arguments) => Log { said: arguments.log(), usual: LevelFilter::INFO },
        _ => Log { said: None, usual: LevelFilter::WARN },
    };
    let result = log.start().and_then(|()| match arguments.command {
        Command::Info(arguments) => info::run(&arguments),
        Command::Paths(arguments) => paths::run(&arguments),
        Command::Node(arguments) => node::run(&arguments),
        Command::Pub(arguments) => publish::run(&arguments),
        Command::Sub(arguments) => subscribe::run(&arguments),
        Command::Topics(arguments) => topics::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Clean(arguments) => clean::run(&arguments),
        Command::Bench(bench) => bench::run(&bench),
        Command::BenchWorker { socket } => bench::work(&socket),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::DemoWorker { name } => demo::work(&name),
        Command::ExchangeTarget => exchange::target::run(),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_silent() {
                text::complain(&format!("fabricast: {failure}"));
            }
            failure.exit().into()
        }
    }
}

/// What is logged.
struct Log {
    /// On the command line.
    said: Option<LevelFilter>,
    /// If nobody says anything.
    usual: LevelFilter,
}

impl Log {
    fn start(&self) -> Result<(), Failure> {
        // Set to nothing counts as not set, as with the settings.
        let named = std::env::var_os("FABRICAST_LOG").filter(|value| !value.is_empty());
        let level = match (self.said, named) {
            (Some(level), _) => level,
            (None, None) => self.usual,
            (None, Some(named)) => {
                let named = named.to_string_lossy();
                named.parse().map_err(|_| {
                    let levels = "off, error, warn, info, debug or trace";
                    let named = named.escape_debug();
                    let why = format!("FABRICAST_LOG is \"{named}\"; it can be {levels}");
                    Failure::new(Exit::Usage, why)
                })?
            }
        };
        let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
        match goes_to_the_journal() {
            // It notes the time by itself.
            true => log.without_time().init(),
            false => log.init(),
        }
        Ok(())
    }
}

/// Is standard error what the service manager says that it has connected with its journal?
fn goes_to_the_journal() -> bool {
    let Ok(journal) = std::env::var("JOURNAL_STREAM") else { return false };
    let error = std::io::stderr().as_fd().try_clone_to_owned();
    let found = error.and_then(|error| std::fs::File::from(error).metadata());
    found.is_ok_and(|found| format!("{}:{}", found.dev(), found.ino()) == journal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        with_negative_numbers(Arguments::command()).debug_assert();
    }

    #[test]
    fn what_an_option_cannot_be_is_said_of_numbers_below_zero_too() {
        for line in ["sub t --count -1", "pub t --rate -0.5", "bench queue --iters -3"] {
            let words = ["fabricast"].into_iter().chain(line.split(' '));
            let matches = with_negative_numbers(Arguments::command()).try_get_matches_from(words);
            let error = matches.unwrap_err().to_string();
            assert!(error.contains("invalid value '-"), "{error}");
        }
    }
}
