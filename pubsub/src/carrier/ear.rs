//! Hears that somebody published what other nodes want.
//!
//! Publishers of a topic that is carried ring a bell in the hall, which costs a look as long
//! as nobody sleeps there. A thread sleeps there, and tells the workers which topics have
//! something new.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::Spin;

use crate::bridge::Announcer;
use crate::error::{Error, Result};
use crate::hall::Bell;
use crate::topic::Topic;

/// How often it looks though the bell did not ring.
const LOOK: Duration = Duration::from_secs(1);

/// A topic that is listened for.
struct Heard {
    topic: Arc<Topic>,
    announcer: Announcer,
    /// Up to where it was announced.
    position: u64,
}

#[derive(Default)]
struct Shared {
    topics: Mutex<BTreeMap<u32, Heard>>,
    is_over: AtomicBool,
    /// What is listened for has changed.
    has_changed: AtomicBool,
}

impl Shared {
    fn topics(&self) -> MutexGuard<'_, BTreeMap<u32, Heard>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Announces what is new; None if nothing is.
    fn look(&self) -> Option<()> {
        let mut found = None;
        for heard in self.topics().values_mut() {
            let position = heard.topic.here().position();
            if position != heard.position {
                heard.position = position;
                heard.announcer.announce();
                found = Some(());
            }
        }
        if self.has_changed.swap(false, Ordering::AcqRel) || self.is_over.load(Ordering::Acquire) {
            found = Some(());
        }
        found
    }
}

pub(super) struct Ear {
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Ear {
    pub(super) fn start(bell: Arc<Bell>) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let (heard, rung) = (Arc::clone(&shared), Arc::clone(&bell));
        let thread = std::thread::Builder::new()
            .name("fabricast-ear".into())
            .spawn(move || {
                let mut spin = Spin::default();
                while !heard.is_over.load(Ordering::Acquire) {
                    rung.wait(&mut spin, Instant::now() + LOOK, || heard.look());
                }
            })
            .map_err(|error| Error::of("listen for what is published", error))?;
        Ok(Self { shared, bell, thread: Some(thread) })
    }

    /// Listens for a topic from now on, what there is already included.
    pub(super) fn listen(&self, topic: &Arc<Topic>, announcer: Announcer) {
        announcer.announce();
        let heard = Heard { topic: Arc::clone(topic), announcer, position: u64::MAX };
        self.shared.topics().insert(topic.number(), heard);
        self.changed();
    }

    pub(super) fn ignore(&self, number: u32) {
        self.shared.topics().remove(&number);
    }

    /// Announces a topic anew: it may be sent only now.
    pub(super) fn repeat(&self, number: u32) {
        if let Some(heard) = self.shared.topics().get(&number) {
            heard.announcer.announce();
        }
    }

    fn changed(&self) {
        self.shared.has_changed.store(true, Ordering::Release);
        self.bell.ring();
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.bell.ring();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that listens for what is published panicked");
        }
    }
}
