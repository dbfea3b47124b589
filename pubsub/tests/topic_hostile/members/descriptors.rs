//! Members without descriptors.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use testkit::children::say;

use super::{Attempts, PATIENCE, PAUSE, join};
use crate::outcome::Outcome;
use crate::over::Over;
use crate::{limits, topics};

const LOOK: Duration = Duration::from_millis(100);

/// Joins and reads both topics, again and again, with so few descriptors.
pub fn run_with_few(over: &Over, directory: &Path, count: u64) -> Outcome {
    limits::set_descriptors(count);
    say("ready");
    let mut attempts = Attempts::default();
    while over.sleep(PAUSE) {
        let used = join(directory).and_then(|node| {
            for name in topics::ALL {
                let topic = node.topic(name, &topics::settings(name))?;
                let mut subscriber = topic.subscriber()?;
                subscriber.pull(PATIENCE)?;
            }
            Ok(())
        });
        attempts.count(used);
    }
    attempts.outcome(&format!("{count} descriptors"))
}

/// A member that uses up its descriptors, so many, and goes on reading, publishing and subscribing.
pub fn run_with_none_left(over: &Over, directory: &Path, count: u64) -> Outcome {
    limits::set_descriptors(count);
    say("ready");
    let mut attempts = Attempts::default();
    let joined = join(directory).and_then(|node| {
        let topic = node.topic(topics::DROP_OLDEST, &topics::settings(topics::DROP_OLDEST))?;
        let subscriber = topic.subscriber()?;
        Ok((node, topic, subscriber))
    });
    let Some((node, topic, mut subscriber)) = attempts.count(joined) else {
        return attempts.outcome("joining");
    };
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    let mut attempts = Attempts::default();
    let mut pulls = 0_u64;
    while over.sleep(LOOK) {
        while subscriber.try_pull().is_ok_and(|sample| sample.is_some()) {
            pulls += 1;
        }
        attempts.count(topic.subscriber());
        let name = format!("without-descriptors-{}", attempts.refused);
        attempts.count(node.topic(&name, &topics::settings(topics::RELIABLE)));
    }
    let held = files.len();
    let what = format!(
        "{held} other descriptors open, {} messages read",
        if pulls > 0 { "some" } else { "no" }
    );
    attempts.outcome(&what)
}
