//! One of many readers of the reliable topic. The supervisor stops some of them.

use std::path::Path;
use std::time::Duration;

use pubsub::ErrorKind;
use testkit::children::say;

use super::{Attempts, join};
use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;
use crate::topics::{self, RELIABLE};

const PULL_TIMEOUT: Duration = Duration::from_millis(200);

pub fn run(stop: &StopSignal, directory: &Path) -> Outcome {
    let mut attempts = Attempts::default();
    let subscribed = join(directory).and_then(|node| {
        let topic = node.topic(RELIABLE, &topics::settings(RELIABLE))?;
        let subscriber = topic.subscriber()?;
        Ok((node, topic, subscriber))
    });
    let subscribed = attempts.count(subscribed);
    say("ready");
    let Some((_node, topic, mut subscriber)) = subscribed else {
        return attempts.outcome("subscribing", "subscribers already");
    };
    let mut evictions = 0_u64;
    while !stop.is_over() {
        match subscriber.pull(PULL_TIMEOUT) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) if error.kind() == ErrorKind::Evicted => {
                evictions += 1;
                match attempts.count(topic.subscriber()) {
                    Some(next) => subscriber = next,
                    None => break,
                }
            }
            Err(error) => {
                attempts.count::<()>(Err(error));
                break;
            }
        }
    }
    attempts.refused += evictions;
    let mut outcome = attempts.outcome("reading", "");
    // Without counts, so that the text is the same for all readers and is printed once.
    outcome.text = format!("{} evictions", if evictions > 0 { "some" } else { "no" });
    outcome
}
