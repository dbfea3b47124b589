//! A publisher: publishes on all topics until the supervisor stops it, then reports its numbers.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use testkit::children::{next_line, say};

use crate::message::Message;
use crate::progress::Progress;
use crate::topics::{self, TIMEOUT};

/// Between two messages of a topic.
const PAUSE: Duration = Duration::from_millis(50);

/// Publishes on the topics for holders of samples, until it is killed or stopped.
pub fn run_for_holders(directory: &Path, id: u64) {
    let node = topics::join(directory);
    let is_over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (name, settings) in topics::held() {
            let topic = node.topic(&name, &settings).expect("open the topic");
            scope.spawn(move || {
                let publisher = topic.publisher().expect("create publisher of topic");
                for number in 1.. {
                    if is_over.load(Relaxed) {
                        break;
                    }
                    let bytes = Message { publisher: id, number }.bytes();
                    publisher.push(&bytes, TIMEOUT).expect("push");
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
        }
        say("ready");
        while next_line().is_some_and(|line| line != "stop") {}
        is_over.store(true, Relaxed);
    });
}

pub fn run(directory: &Path) {
    let node = topics::join(directory);
    let is_over = &AtomicBool::new(false);
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).expect("read random bytes");
    let id = u64::from_le_bytes(seed);
    let (node, progress, mut lines) = (&node, &Progress::create(directory, id), Vec::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = topics::all()
            .into_iter()
            .enumerate()
            .map(|(index, (name, settings))| {
                scope.spawn(move || {
                    let topic = node.topic(&name, &settings).expect("open the topic");
                    let publisher = topic.publisher().expect("create publisher of topic");
                    let mut number = 0;
                    while !is_over.load(Relaxed) {
                        number += 1;
                        let bytes = Message { publisher: id, number }.bytes();
                        progress.begin(index, number);
                        publisher.push(&bytes, TIMEOUT).expect("push");
                        progress.end(index, number);
                        std::thread::sleep(PAUSE);
                    }
                    // The publisher stays until the end of the test, which does not test its end.
                    (format!("{name} {id} {number}"), publisher)
                })
            })
            .collect();
        say(&format!("ready {id}"));
        while next_line().is_some_and(|line| line != "stop") {}
        is_over.store(true, Relaxed);
        lines.extend(threads.into_iter().map(|thread| thread.join().expect("publish on a topic")));
    });
    lines.iter().for_each(|(line, _)| say(line));
    while next_line().is_some() {}
}
