//! Members for which there is no more memory: their own files must be short, or those of the
//! service, or the budget of the node ends.

use std::path::Path;

use pubsub::TopicSettings;
use testkit::children::say;

use super::{Attempts, PATIENCE, PAUSE, join};
use crate::outcome::Outcome;
use crate::over::Over;
use crate::service::BUDGET;
use crate::{limits, topics};

/// Joins, publishes and reads while no file of this process, and no shared memory, may be longer
/// than this.
pub fn run_with_short_files(over: &Over, directory: &Path, length: u64) -> Outcome {
    limits::set_file_length(length);
    say("ready");
    let mut attempts = Attempts::default();
    let settings = TopicSettings { largest: 64 << 10, ..topics::settings(topics::RELIABLE) };
    while over.sleep(PAUSE) {
        let used = join(directory).and_then(|node| {
            let topic = node.topic(&format!("short-files-{length}"), &settings)?;
            let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
            publisher.push(&[1; 64 << 10], PATIENCE)?;
            subscriber.pull(PATIENCE).map(drop)
        });
        attempts.count(used);
    }
    attempts.outcome(&format!("files of {length} bytes"))
}

/// Makes topics with pools that are larger than the node's budget, and others that the service has
/// to make room for.
pub fn run_with_large_topics(over: &Over, directory: &Path) -> Outcome {
    say("ready");
    let mut joining = Attempts::default();
    let Some(node) = joining.count(join(directory)) else { return joining.outcome("joining") };
    let (mut beyond, mut within) = (Attempts::default(), Attempts::default());
    let mut number = 0;
    while over.sleep(PAUSE) {
        number += 1;
        for (attempts, largest) in [(&mut beyond, BUDGET), (&mut within, BUDGET / 64)] {
            let settings = TopicSettings { depth: 2, largest, ..TopicSettings::default() };
            let used =
                node.topic(&format!("large-{largest}-{number}"), &settings).and_then(|topic| {
                    let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
                    publisher.push(&vec![1; largest as usize], PATIENCE)?;
                    subscriber.pull(PATIENCE).map(drop)
                });
            attempts.count(used);
        }
    }
    let outcomes = [beyond.outcome("beyond the budget"), within.outcome("within the budget")];
    Outcome::sum(&outcomes)
}
