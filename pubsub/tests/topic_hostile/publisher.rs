//! A publisher: publishes at a steady rate on both topics until its input is closed.

use std::path::Path;
use std::time::{Duration, Instant};

use testkit::children::say;

use crate::stop_signal::StopSignal;
use crate::topics::{self, LENGTH, PERIOD, TIMEOUT};

/// Between two messages after a pause, so that readers can keep up.
const MIN_PERIOD: Duration = Duration::from_micros(500);

pub fn run(directory: &Path) {
    let node = &topics::join(directory);
    let stop = &StopSignal::watch();
    std::thread::scope(|scope| {
        for name in topics::ALL {
            scope.spawn(move || {
                let topic = node.topic(name, &topics::settings(name)).expect("open the topic");
                let publisher = topic.publisher().expect("create publisher of topic");
                let mut next = Instant::now();
                while !stop.is_over() {
                    publisher.push(&[7; LENGTH], TIMEOUT).expect("push");
                    next += PERIOD;
                    let left = next.saturating_duration_since(Instant::now());
                    std::thread::sleep(left.max(MIN_PERIOD));
                }
            });
        }
        say("ready");
    });
}
