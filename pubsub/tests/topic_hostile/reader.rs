//! Reads both topics, and says what came since it was asked last.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use pubsub::{ErrorKind, Node};
use testkit::children::{next_line, say};

use crate::topics;
use crate::window::Window;

/// How long a pull waits before it looks whether it is over.
const LOOK: Duration = Duration::from_millis(200);

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
    let topic = node.topic(name, &topics::settings(name)).expect("the topic");
    let mut subscriber = topic.subscriber().expect("a subscriber");
    // Of subscribers that were evicted.
    let mut missed_before = 0;
    while !is_over.load(Relaxed) {
        let pulled = subscriber.pull(LOOK).map(drop);
        let mut window = window.lock().expect("no thread panicked");
        match pulled {
            Ok(()) => window.message(),
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) if error.kind() == ErrorKind::Evicted => {
                missed_before += subscriber.missed();
                window.evicted();
                subscriber = topic.subscriber().expect("a subscriber after an eviction");
            }
            Err(error) => panic!("{name}: pull: {error}"),
        }
        window.missed(missed_before + subscriber.missed());
    }
}
