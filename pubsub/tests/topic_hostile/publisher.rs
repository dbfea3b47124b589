//! Publishes at a steady rate on both topics until its input ends.

use std::path::Path;
use std::time::{Duration, Instant};

use testkit::children::say;

use crate::stop_signal::StopSignal;
use crate::topics::{self, LENGTH, LONGEST, PERIOD};

/// Between two messages that a pause has delayed: readers can follow.
const CATCHING_UP: Duration = Duration::from_micros(500);

pub fn run(directory: &Path) {
    let node = &topics::join(directory);
    let stop = &StopSignal::watch();
    std::thread::scope(|scope| {
        for name in topics::ALL {
            scope.spawn(move || {
                let topic = node.topic(name, &topics::settings(name)).expect("the topic");
                let publisher = topic.publisher().expect("a publisher");
                let mut next = Instant::now();
                while !stop.is_over() {
                    publisher.push(&[7; LENGTH], LONGEST).expect("a message that is published");
                    next += PERIOD;
                    let left = next.saturating_duration_since(Instant::now());
                    std::thread::sleep(left.max(CATCHING_UP));
                }
            });
        }
        say("ready");
    });
}
