//! Listens for publications that other nodes want.
//!
//! Publishers of a replicated topic mark it and ring a doorbell, both in the node segment; this is
//! cheap while no thread sleeps there. The listener's thread sleeps there, and announces marked
//! topics to the workers. Each second it checks all topics: for publishers that died before they
//! marked them, and for idle publishers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::WaitStrategy;
use threads::lock;

use crate::error::{Error, Result};
use crate::node_segment::PublishDoorbell;
use crate::replication::Announcer;
use crate::replication::source::last_sequences::IdlePublishers;
use crate::topic::Topic;
use crate::wake::WakeFd;

/// Interval of checks without a doorbell.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

struct ListenedTopic {
    topic: Arc<Topic>,
    announcer: Announcer,
    /// Announced up to this position.
    position: u64,
    idle: IdlePublishers,
}

impl ListenedTopic {
    /// Announces new messages.
    fn poll(&mut self) {
        let position = self.topic.local().position();
        if position != self.position {
            self.position = position;
            self.announcer.announce_waiter();
        }
    }
}

struct Shared {
    /// By mark and number.
    topics: Mutex<BTreeMap<(u32, u32), ListenedTopic>>,
    /// Newly idle publishers of each topic, with their last sequences.
    idle: Mutex<BTreeMap<u32, Vec<(u64, u64)>>>,
    /// Wakes the service's thread, which sends them.
    bell: Arc<WakeFd>,
    is_stopping: AtomicBool,
}

fn topic_key(number: u32) -> (u32, u32) {
    (PublishDoorbell::mark(number), number)
}

impl Shared {
    /// Announces new messages of marked topics; None if no topic is marked.
    fn poll_marked(&self, bell: &PublishDoorbell) -> Option<()> {
        let mut topics = None;
        let has_any = bell.take(|mark| {
            let topics = topics.get_or_insert_with(|| lock(&self.topics));
            let marked = topics.range_mut((mark, 0)..=(mark, u32::MAX));
            marked.for_each(|(_, listened)| listened.poll());
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
            listened.poll();
            let idle = listened.idle.poll(&listened.topic);
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
            bell.wait(&mut spin, next, || self.poll_marked(bell));
            if Instant::now() >= next {
                self.check_all();
                next = Instant::now() + CHECK_INTERVAL;
            }
        }
    }
}

pub(crate) struct PublishListener {
    shared: Arc<Shared>,
    bell: Arc<PublishDoorbell>,
    thread: Option<JoinHandle<()>>,
}

impl PublishListener {
    /// Rings the service's bell when publishers have become [idle](Self::take_idle).
    pub(crate) fn start(bell: Arc<PublishDoorbell>, service: Arc<WakeFd>) -> Result<Self> {
        let shared = Arc::new(Shared {
            topics: Mutex::default(),
            idle: Mutex::default(),
            bell: service,
            is_stopping: AtomicBool::new(false),
        });
        let (listened, rung) = (Arc::clone(&shared), Arc::clone(&bell));
        let thread = threads::spawn("fabricast-pubs", move || listened.listen(&rung))
            .map_err(|error| Error::of("start publish listener", error))?;
        Ok(Self { shared, bell, thread: Some(thread) })
    }

    /// Listens for a replicated topic from now on, existing messages included.
    pub(crate) fn listen(&self, topic: &Arc<Topic>, announcer: Announcer) {
        let mut listened = ListenedTopic {
            topic: Arc::clone(topic),
            announcer,
            position: u64::MAX,
            idle: IdlePublishers::default(),
        };
        // A publisher that does not know yet that the topic is replicated has published before this
        // poll.
        fence(Ordering::SeqCst);
        let mut topics = lock(&self.shared.topics);
        listened.poll();
        topics.insert(topic_key(topic.number()), listened);
    }

    pub(crate) fn stop_listening(&self, number: u32) {
        lock(&self.shared.topics).remove(&topic_key(number));
    }

    /// Publishers of each topic that have become idle since the last call, with their last
    /// sequences.
    pub(crate) fn take_idle(&self) -> BTreeMap<u32, Vec<(u64, u64)>> {
        std::mem::take(&mut *lock(&self.shared.idle))
    }

    /// Announces a topic again: it may be sendable only now.
    pub(crate) fn announce_again(&self, number: u32) {
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
