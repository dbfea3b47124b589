//! Members without descriptors.

use std::fs::File;
use std::path::Path;

use testkit::children::say;

use super::{Attempts, PAUSE, TIMEOUT, join};
use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;
use crate::{limits, topics};

/// The limit that an error must name.
const LIMIT: &str = "ulimit -n";

/// Repeatedly joins and reads both topics, with a low limit of descriptors and with half of it.
pub fn run_with_few(stop: &StopSignal, directory: &Path, count: u64) -> Outcome {
    say("ready");
    let mut all = [count, count / 2].map(|limit| (limit, Attempts::default()));
    for index in (0..all.len()).cycle() {
        if !stop.sleep(PAUSE) {
            break;
        }
        let (limit, attempts) = &mut all[index];
        limits::set_descriptors(*limit);
        let result = join(directory).and_then(|node| {
            for name in topics::ALL {
                let topic = node.topic(name, &topics::settings(name))?;
                topic.subscriber()?.pull(TIMEOUT)?;
            }
            Ok(())
        });
        attempts.count(result);
    }
    let outcome = |(limit, attempts): (u64, Attempts)| {
        attempts.outcome(&format!("{limit} descriptors"), LIMIT)
    };
    Outcome::sum(&all.map(outcome))
}

/// A member that exhausts its descriptors, then continues to read and to open topics.
pub fn run_with_none_left(stop: &StopSignal, directory: &Path, count: u64) -> Outcome {
    limits::set_descriptors(count);
    say("ready");
    let mut joining = Attempts::default();
    let joined = join(directory).and_then(|node| {
        let topic = node.topic(topics::DROP_OLDEST, &topics::settings(topics::DROP_OLDEST))?;
        let mut subscriber = topic.subscriber()?;
        // After the first message, reading opens no more descriptors.
        subscriber.pull(TIMEOUT)?;
        Ok((node, subscriber))
    });
    let Some((node, mut subscriber)) = joining.count(joined) else {
        return joining.outcome("joining", LIMIT);
    };
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    let (mut pulls, mut opens) = (Attempts::default(), Attempts::default());
    let mut number = 0;
    while stop.sleep(PAUSE) {
        pulls.count(subscriber.pull(TIMEOUT));
        number += 1;
        let name = format!("without-descriptors-{number}");
        opens.count(node.topic(&name, &topics::settings(topics::RELIABLE)));
    }
    let held = files.len();
    let mut all = vec![
        Outcome::new(0, format!("{held} other descriptors are open")),
        opens.outcome("opening topics", LIMIT),
    ];
    let mut pulls = pulls.outcome("reading", LIMIT);
    if pulls.refused > 0 {
        let text = &pulls.text;
        pulls.fault = Some(format!("a member without free descriptors cannot read: {text}"));
    }
    all.push(pulls);
    Outcome::sum(&all)
}
