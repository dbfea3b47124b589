//! Doorbell of a worker: how other threads wake it.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};

use fabric::Waker;
use threads::lock;

use super::TopicKey;

/// Announced topics of a worker, and its waker.
#[derive(Debug)]
pub(super) struct WorkerDoorbell {
    announced: Mutex<Vec<Announcement>>,
    is_asleep: AtomicBool,
    waker: Mutex<Waker>,
}

#[derive(Debug)]
pub(super) struct Announcement {
    key: TopicKey,
    is_listed: Arc<AtomicBool>,
}

impl Announcement {
    /// Returns the topic; later announcements list it again. This is a swap, not a store: data
    /// published before an announcement that found it listed is visible to the poll that follows.
    pub(super) fn clear_listed(&self) -> TopicKey {
        self.is_listed.swap(false, Ordering::AcqRel);
        self.key
    }
}

impl WorkerDoorbell {
    pub(super) fn new(waker: Waker) -> Self {
        let (is_asleep, waker) = (AtomicBool::new(false), Mutex::new(waker));
        Self { announced: Mutex::default(), is_asleep, waker }
    }

    /// Swaps the announced topics with an empty list.
    pub(super) fn take(&self, into: &mut Vec<Announcement>) {
        std::mem::swap(&mut *lock(&self.announced), into);
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.announced).is_empty()
    }

    /// Marks the worker as asleep or awake. It checks for work once more after this.
    pub(super) fn set_asleep(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Wakes the worker after work was published.
    pub(super) fn ring(&self) {
        // Either this sees that the worker sleeps, or the worker sees the work before it does.
        fence(Ordering::SeqCst);
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // If this fails, the worker wakes after its own timeout.
            let _ = lock(&self.waker).wake();
        }
    }

    /// Replaces the waker while the worker is awake.
    pub(super) fn set_waker(&self, waker: Waker) {
        *lock(&self.waker) = waker;
    }
}

/// Announces that a topic's source has messages. Cheap while the worker is awake; superfluous
/// announcements do no harm.
#[derive(Debug, Clone)]
pub struct Announcer {
    doorbell: Arc<WorkerDoorbell>,
    key: TopicKey,
    is_listed: Arc<AtomicBool>,
}

impl Announcer {
    pub(super) fn new(doorbell: &Arc<WorkerDoorbell>, key: TopicKey) -> Self {
        let is_listed = Arc::new(AtomicBool::new(false));
        Self { doorbell: Arc::clone(doorbell), key, is_listed }
    }

    /// Announces the topic.
    pub fn announce_waiter(&self) {
        if self.is_listed.swap(true, Ordering::AcqRel) {
            return;
        }
        let is_listed = Arc::clone(&self.is_listed);
        lock(&self.doorbell.announced).push(Announcement { key: self.key, is_listed });
        self.doorbell.ring();
    }
}

#[cfg(test)]
#[path = "doorbell_tests.rs"]
mod tests;
