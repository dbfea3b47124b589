//! A member that makes many topics, each with a publisher.

use std::path::Path;

use pubsub::TopicSettings;
use testkit::children::say;

use super::{Attempts, PAUSE, SERVICE, join};
use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;

const SETTINGS: fn() -> TopicSettings =
    || TopicSettings { depth: 1, largest: 64, loans: 1, ..TopicSettings::default() };

pub fn run(stop: &StopSignal, directory: &Path, count: u64) -> Outcome {
    say("ready");
    let mut attempts = Attempts::default();
    let mut kept = Vec::new();
    let Some(node) = attempts.count(join(directory)) else {
        return attempts.outcome("joining", SERVICE);
    };
    let mut attempts = Attempts::default();
    for number in 0..count {
        if stop.is_over() {
            break;
        }
        let made = node
            .topic(&format!("many-{number}"), &SETTINGS())
            .and_then(|topic| Ok((topic.publisher()?, topic)));
        match attempts.count(made) {
            Some(made) => kept.push(made),
            // What was refused once is asked for again, not faster than this.
            None if !stop.sleep(PAUSE) => break,
            None => {}
        }
    }
    while stop.sleep(PAUSE) {}
    attempts.outcome("topics", SERVICE)
}
