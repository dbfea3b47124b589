//! Hostile members: processes of the same user that join node 1 and exhaust its resources.

mod descriptors;
mod files;
mod reader;
mod topics;

use std::path::Path;
use std::time::Duration;

use pubsub::{Node, NodeOptions};
use testkit::children::say;

use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;

/// Shorter than a phase, so that each operation ends within it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Between two attempts, since the service logs each of them.
const PAUSE: Duration = Duration::from_secs(1);
/// Text of an error that is due to a limit of the service, not of the member.
const SERVICE: &str = "the node's service, process";

/// Runs a member until the input of this process is closed, and prints its outcome.
pub fn run(name: &str, directory: &Path) {
    let (name, number) = name.split_once(':').unwrap_or((name, "0"));
    let number = number.parse().expect("a number");
    let stop = StopSignal::watch();
    let outcome = match name {
        "topics" => topics::run(&stop, directory, number),
        "reader" => reader::run(&stop, directory),
        "short-files" => files::run_with_short_files(&stop, directory),
        "large-topics" => files::run_with_large_topics(&stop, directory),
        "few-descriptors" => descriptors::run_with_few(&stop, directory, number),
        "all-descriptors" => descriptors::run_with_none_left(&stop, directory, number),
        _ => panic!("unknown member {name}"),
    };
    say(&outcome.line());
}

fn join(directory: &Path) -> pubsub::Result<Node> {
    Node::join(NodeOptions { service_timeout: TIMEOUT, ..crate::topics::options(directory) })
}

/// Counts of attempts, and the first refusal.
#[derive(Debug, Default)]
struct Attempts {
    done: u64,
    refused: u64,
    first: Option<String>,
}

impl Attempts {
    fn count<T>(&mut self, result: pubsub::Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.done += 1;
                Some(value)
            }
            Err(error) => {
                self.refused += 1;
                self.first.get_or_insert_with(|| error.to_string());
                None
            }
        }
    }

    /// The outcome of the attempts. Errors must contain `cause`.
    fn outcome(self, operation: &str, cause: &str) -> Outcome {
        let Self { done, refused, first } = self;
        let fault = first.as_ref().filter(|first| !first.contains(cause));
        let fault = fault.map(|first| format!("an error does not name \"{cause}\": {first}"));
        let first = first.map_or_else(String::new, |first| format!(", first error: {first}"));
        let text = format!("{operation}: {done} done, {refused} refused{first}");
        Outcome { refused, text, fault }
    }
}
