//! Members without memory: the file size of the member or of the service is limited, or the budget
//! of the node is exhausted.

use std::path::Path;

use pubsub::TopicSettings;
use testkit::children::say;

use super::{Attempts, PAUSE, SERVICE, TIMEOUT, join};
use crate::outcome::Outcome;
use crate::service::BUDGET;
use crate::stop_signal::StopSignal;
use crate::{limits, topics};

/// Limits of the files and the shared memory of a member.
const LENGTHS: [u64; 4] = [0, 4095, 65_535, 1_048_575];
const LARGEST: u64 = 64 << 10;

/// Joins, publishes and reads with limits of the file size.
pub fn run_with_short_files(stop: &StopSignal, directory: &Path) -> Outcome {
    say("ready");
    let settings = TopicSettings { largest: LARGEST, ..topics::settings(topics::RELIABLE) };
    let mut all = LENGTHS.map(|length| (length, Attempts::default()));
    for index in (0..all.len()).cycle() {
        if !stop.sleep(PAUSE) {
            break;
        }
        let (length, attempts) = &mut all[index];
        limits::set_file_length(*length);
        let result = join(directory).and_then(|node| {
            let topic = node.topic(&format!("short-files-{length}"), &settings)?;
            let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
            publisher.push(&[1; LARGEST as usize], TIMEOUT)?;
            subscriber.pull(TIMEOUT).map(drop)
        });
        attempts.count(result);
    }
    let outcome = |(length, attempts): (u64, Attempts)| {
        attempts.outcome(&format!("files of {length} bytes"), "ulimit -f")
    };
    Outcome::sum(&all.map(outcome))
}

/// Creates topics that exceed the node's budget, and topics within it whose samples are held, so that
/// no memory becomes free.
pub fn run_with_large_topics(stop: &StopSignal, directory: &Path) -> Outcome {
    say("ready");
    let mut joining = Attempts::default();
    let Some(node) = joining.count(join(directory)) else {
        return joining.outcome("joining", SERVICE);
    };
    let (mut beyond, mut within) = (Attempts::default(), Attempts::default());
    let mut held = Vec::new();
    let mut number = 0;
    while stop.sleep(PAUSE) {
        number += 1;
        let settings =
            |largest| TopicSettings { depth: 1, loans: 1, largest, ..TopicSettings::default() };
        beyond.count(node.topic(&format!("beyond-{number}"), &settings(BUDGET)));
        let largest = BUDGET / 16;
        let result = node.topic(&format!("large-{number}"), &settings(largest)).and_then(|topic| {
            let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
            publisher.push(&vec![1; largest as usize], TIMEOUT)?;
            let sample = subscriber.pull(TIMEOUT)?;
            Ok((sample, subscriber, publisher, topic))
        });
        held.extend(within.count(result));
    }
    Outcome::sum(&[
        beyond.outcome("topics beyond the budget", "budget"),
        within.outcome("topics within the budget", SERVICE),
    ])
}
