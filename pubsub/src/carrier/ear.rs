//! Hears that somebody published what other nodes want.
//!
//! Publishers of a topic that is carried mark it and ring a bell, both in the hall, which costs a look
//! as long as nobody sleeps there. A thread sleeps there, and tells the workers which topics have
//! something new. Each second it looks at all of them, for those whose publishers died before they
//! had marked them, and for publishers that have become quiet.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::Spin;

use super::published::QuietPublishers;
use crate::bridge::Announcer;
use crate::error::{Error, Result};
use crate::hall::Bell;
use crate::lock::lock;
use crate::topic::Topic;
use crate::wake::WakeFd;

/// How often it looks though the bell did not ring.
const LOOK: Duration = Duration::from_secs(1);

/// A topic that is listened for.
struct Heard {
    topic: Arc<Topic>,
    announcer: Announcer,
    /// Up to where it was announced.
    position: u64,
    quiet: QuietPublishers,
}

impl Heard {
    /// Announces what is new.
    fn look(&mut self) {
        let position = self.topic.here().position();
        if position != self.position {
            self.position = position;
            self.announcer.announce();
        }
    }
}

struct Shared {
    /// By their marks and numbers.
    topics: Mutex<BTreeMap<(u32, u32), Heard>>,
    /// Publishers of each topic that have become quiet, with the numbers of their last messages.
    quiet: Mutex<BTreeMap<u32, Vec<(u64, u64)>>>,
    /// Wakes who tells that.
    bell: Arc<WakeFd>,
    is_over: AtomicBool,
}

fn named(number: u32) -> (u32, u32) {
    (Bell::mark(number), number)
}

impl Shared {
    /// Announces what is new of the topics that are marked; None if none is.
    fn look(&self, bell: &Bell) -> Option<()> {
        let mut topics = None;
        let has_any = bell.take(|mark| {
            let topics = topics.get_or_insert_with(|| lock(&self.topics));
            let marked = topics.range_mut((mark, 0)..=(mark, u32::MAX));
            marked.for_each(|(_, heard)| heard.look());
        });
        drop(topics);
        if has_any {
            return Some(());
        }
        self.is_over.load(Ordering::Acquire).then_some(())
    }

    fn look_at_all(&self) {
        let mut has_any = false;
        for ((_, number), heard) in &mut *lock(&self.topics) {
            heard.look();
            let quiet = heard.quiet.look(&heard.topic);
            if !quiet.is_empty() {
                has_any = true;
                lock(&self.quiet).entry(*number).or_default().extend(quiet);
            }
        }
        if has_any {
            self.bell.ring();
        }
    }

    fn listen(&self, bell: &Bell) {
        let (mut spin, mut next) = (Spin::default(), Instant::now() + LOOK);
        while !self.is_over.load(Ordering::Acquire) {
            bell.wait(&mut spin, next, || self.look(bell));
            if Instant::now() >= next {
                self.look_at_all();
                next = Instant::now() + LOOK;
            }
        }
    }
}

pub(super) struct Ear {
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Ear {
    /// Rings the service's bell when publishers have become [quiet](Self::take_quiet).
    pub(super) fn start(bell: Arc<Bell>, service: Arc<WakeFd>) -> Result<Self> {
        let shared = Arc::new(Shared {
            topics: Mutex::default(),
            quiet: Mutex::default(),
            bell: service,
            is_over: AtomicBool::new(false),
        });
        let (heard, rung) = (Arc::clone(&shared), Arc::clone(&bell));
        let thread = std::thread::Builder::new()
            .name("fabricast-ear".into())
            .spawn(move || heard.listen(&rung))
            .map_err(|error| Error::of("listen for what is published", error))?;
        Ok(Self { shared, bell, thread: Some(thread) })
    }

    /// Listens for a topic that is carried from now on, what there is already included.
    pub(super) fn listen(&self, topic: &Arc<Topic>, announcer: Announcer) {
        let mut heard = Heard {
            topic: Arc::clone(topic),
            announcer,
            position: u64::MAX,
            quiet: QuietPublishers::default(),
        };
        // Who publishes and does not know yet that it is carried has done so before this look.
        fence(Ordering::SeqCst);
        let mut topics = lock(&self.shared.topics);
        heard.look();
        topics.insert(named(topic.number()), heard);
    }

    pub(super) fn ignore(&self, number: u32) {
        lock(&self.shared.topics).remove(&named(number));
    }

    /// Publishers of each topic that have become quiet since this was asked last, with the numbers of
    /// their last messages.
    pub(super) fn take_quiet(&self) -> BTreeMap<u32, Vec<(u64, u64)>> {
        std::mem::take(&mut *lock(&self.shared.quiet))
    }

    /// Announces a topic anew: it may be sent only now.
    pub(super) fn repeat(&self, number: u32) {
        if let Some(heard) = lock(&self.shared.topics).get(&named(number)) {
            heard.announcer.announce();
        }
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.bell.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that listens for what is published panicked");
        }
    }
}
