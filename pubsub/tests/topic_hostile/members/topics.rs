//! A member that creates many topics, each with a publisher.

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
    let mut topics = Vec::new();
    let Some(node) = attempts.count(join(directory)) else {
        return attempts.outcome("joining", SERVICE);
    };
    let mut attempts = Attempts::default();
    for number in 0..count {
        if stop.is_over() {
            break;
        }
        let result = node
            .topic(&format!("many-{number}"), &SETTINGS())
            .and_then(|topic| Ok((topic.publisher()?, topic)));
        match attempts.count(result) {
            Some(topic) => topics.push(topic),
            // Limits the rate of attempts after a refusal.
            None if !stop.sleep(PAUSE) => break,
            None => {}
        }
    }
    while stop.sleep(PAUSE) {}
    attempts.outcome("topics", SERVICE)
}
