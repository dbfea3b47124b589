//! A reader: reads both topics, and prints counts for each line of input.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use pubsub::{ErrorKind, Node};
use testkit::children::{next_line, say};

use crate::topics;
use crate::window::Window;

/// Interval at which a thread checks whether to stop.
const PULL_TIMEOUT: Duration = Duration::from_millis(200);

pub fn run(directory: &Path) {
    let node = &topics::join(directory);
    let is_over = &AtomicBool::new(false);
    let windows = topics::ALL.map(|name| Mutex::new(Window::new(name)));
    std::thread::scope(|scope| {
        for (name, window) in topics::ALL.into_iter().zip(&windows) {
            scope.spawn(move || read(node, name, window, is_over));
        }
        say("ready");
        while next_line().is_some() {
            for window in &windows {
                let counts = window.lock().expect("no thread panicked").next();
                say(&counts.line());
            }
        }
        is_over.store(true, Relaxed);
    });
}

fn read(node: &Node, name: &str, window: &Mutex<Window>, is_over: &AtomicBool) {
    let topic = node.topic(name, &topics::settings(name)).expect("open the topic");
    let mut subscriber = topic.subscriber().expect("create a subscriber");
    // Missed by subscribers that were evicted.
    let mut missed_before = 0;
    while !is_over.load(Relaxed) {
        let result = subscriber.pull(PULL_TIMEOUT).map(drop);
        let mut window = window.lock().expect("no thread panicked");
        match result {
            Ok(()) => window.message(),
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) if error.kind() == ErrorKind::Evicted => {
                missed_before += subscriber.missed();
                window.evicted();
                subscriber = topic.subscriber().expect("subscribe after an eviction");
            }
            Err(error) => panic!("{name}: {error}"),
        }
        window.set_missed(missed_before + subscriber.missed());
    }
}
