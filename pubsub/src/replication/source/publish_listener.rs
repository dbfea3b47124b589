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

use ipc::WaitStrategy;

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::node_segment::PublishDoorbell;
use crate::replication::Announcer;
use crate::replication::source::last_sequences::IdlePublishers;
use crate::topic::Topic;
use crate::wake::WakeFd;

/// How often it looks though the bell did not ring.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A topic that is listened for.
struct ListenedTopic {
    topic: Arc<Topic>,
    announcer: Announcer,
    /// Up to where it was announced.
    position: u64,
    idle: IdlePublishers,
}

impl ListenedTopic {
    /// Announces what is new.
    fn look(&mut self) {
        let position = self.topic.local().position();
        if position != self.position {
            self.position = position;
            self.announcer.announce_waiter();
        }
    }
}

struct Shared {
    /// By their marks and numbers.
    topics: Mutex<BTreeMap<(u32, u32), ListenedTopic>>,
    /// Publishers of each topic that have become quiet, with the numbers of their last messages.
    idle: Mutex<BTreeMap<u32, Vec<(u64, u64)>>>,
    /// Wakes who tells that.
    bell: Arc<WakeFd>,
    is_stopping: AtomicBool,
}

fn topic_key(number: u32) -> (u32, u32) {
    (PublishDoorbell::mark(number), number)
}

impl Shared {
    /// Announces what is new of the topics that are marked; None if none is.
    fn look(&self, bell: &PublishDoorbell) -> Option<()> {
        let mut topics = None;
        let has_any = bell.take(|mark| {
            let topics = topics.get_or_insert_with(|| lock(&self.topics));
            let marked = topics.range_mut((mark, 0)..=(mark, u32::MAX));
            marked.for_each(|(_, listened)| listened.look());
        });
        drop(topics);
        if has_any {
            return Some(());
        }
        self.is_stopping.load(Ordering::Acquire).then_some(())
    }

    fn check_all(&self) {
        let mut has_any = false;
        for ((_, number), listened) in &mut *lock(&self.topics) {
            listened.look();
            let idle = listened.idle.look(&listened.topic);
            if !idle.is_empty() {
                has_any = true;
                lock(&self.idle).entry(*number).or_default().extend(idle);
            }
        }
        if has_any {
            self.bell.ring();
        }
    }

    fn listen(&self, bell: &PublishDoorbell) {
        let (mut spin, mut next) = (WaitStrategy::default(), Instant::now() + CHECK_INTERVAL);
        while !self.is_stopping.load(Ordering::Acquire) {
            bell.wait(&mut spin, next, || self.look(bell));
            if Instant::now() >= next {
                self.check_all();
                next = Instant::now() + CHECK_INTERVAL;
            }
        }
    }
}

pub(in crate::replication) struct PublishListener {
    shared: Arc<Shared>,
    bell: Arc<PublishDoorbell>,
    thread: Option<JoinHandle<()>>,
}

impl PublishListener {
    /// Rings the service's bell when publishers have become [quiet](Self::take_idle).
    pub(in crate::replication) fn start(
        bell: Arc<PublishDoorbell>,
        service: Arc<WakeFd>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            topics: Mutex::default(),
            idle: Mutex::default(),
            bell: service,
            is_stopping: AtomicBool::new(false),
        });
        let (listened, rung) = (Arc::clone(&shared), Arc::clone(&bell));
        let thread = std::thread::Builder::new()
            .name("fabricast-pubs".into())
            .spawn(move || listened.listen(&rung))
            .map_err(|error| Error::of("start the publish listener", error))?;
        Ok(Self { shared, bell, thread: Some(thread) })
    }

    /// Listens for a topic that is carried from now on, what there is already included.
    pub(in crate::replication) fn listen(&self, topic: &Arc<Topic>, announcer: Announcer) {
        let mut listened = ListenedTopic {
            topic: Arc::clone(topic),
            announcer,
            position: u64::MAX,
            idle: IdlePublishers::default(),
        };
        // Who publishes and does not know yet that it is carried has done so before this look.
        fence(Ordering::SeqCst);
        let mut topics = lock(&self.shared.topics);
        listened.look();
        topics.insert(topic_key(topic.number()), listened);
    }

    pub(in crate::replication) fn stop_listening(&self, number: u32) {
        lock(&self.shared.topics).remove(&topic_key(number));
    }

    /// Publishers of each topic that have become quiet since this was asked last, with the numbers of
    /// their last messages.
    pub(in crate::replication) fn take_idle(&self) -> BTreeMap<u32, Vec<(u64, u64)>> {
        std::mem::take(&mut *lock(&self.shared.idle))
    }

    /// Announces a topic anew: it may be sent only now.
    pub(in crate::replication) fn announce_again(&self, number: u32) {
        if let Some(listened) = lock(&self.shared.topics).get(&topic_key(number)) {
            listened.announcer.announce_waiter();
        }
    }
}

impl Drop for PublishListener {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.bell.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the publish listener panicked");
        }
    }
}
